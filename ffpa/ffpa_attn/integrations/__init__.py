"""Has attention under the names that other libraries call it by. What serves one is imported when it is asked for."""

import importlib


def __getattr__(name: str):
    if name == "transformers":
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
