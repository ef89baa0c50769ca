"""Has attention under the names that other libraries call it by; importing this imports none of them."""

import importlib


def __getattr__(name: str):
    if name == "transformers":  # what adapts to it is more than a call of ffpa needs
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
