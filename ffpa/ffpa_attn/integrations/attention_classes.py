"""Serves models that look up the class of their attention by its implementation's name: SAM's, Falcon's, and others."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from ..support.imports import when_imported
from .fallback import say_once
from .sdpa_override import sdpa


@cache
def register(name: str) -> None:
    """Adds the name to each table of attention classes. Without it, a model raises KeyError when it is made."""
    when_imported(r"transformers\.models\..*\.modeling_\w+", lambda module: _add(name, module))


def _add(name: str, module: ModuleType) -> None:
    for variable, table in list(vars(module).items()):
        if variable.endswith("ATTENTION_CLASSES") and isinstance(table, dict) and "eager" in table:
            table.setdefault(
                name, _by_ffpa(table["sdpa"], module) if "sdpa" in table else _left(table["eager"], module)
            )


def _by_ffpa(calls_sdpa: type, module: ModuleType) -> type:
    """Returns that class, with ffpa in the place of PyTorch's function."""
    return _derived("Ffpa", calls_sdpa, module, {"forward": sdpa()(calls_sdpa.forward)})


def _left(computes_itself: type, module: ModuleType) -> type:
    """Returns that class, unchanged but for a warning: it has no call that ffpa could do."""

    def __init__(self, config, *args, **options):
        way_out = "choose another attn_implementation for this model"
        say_once(config, type(config).__name__.removesuffix("Config"), "attention of its own", way_out)
        computes_itself.__init__(self, config, *args, **options)

    return _derived("Unchanged", computes_itself, module, {"__init__": __init__})


def _derived(prefix: str, base: type, module: ModuleType, methods: dict) -> type:
    """Puts the new class into the module, where whoever unpickles a model looks for it."""
    new = type(prefix + base.__name__, (base,), {**methods, "__module__": module.__name__, "__doc__": base.__doc__})
    return vars(module).setdefault(new.__name__, new)
