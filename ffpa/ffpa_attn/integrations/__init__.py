"""Has attention under the names that other libraries call it by; importing this imports none of them."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import transformers as transformers


def __getattr__(name: str):
    if name == "transformers":  # importing ffpa_attn does not take the time of importing what this module needs
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
