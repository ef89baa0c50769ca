"""What other libraries call. Nothing here is imported before it is asked for, and no library with it."""

import importlib


def __getattr__(name: str):
    if name == "transformers":
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
