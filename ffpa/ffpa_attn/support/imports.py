"""This module acts on other packages' modules once somebody imports them: importing them here would take seconds."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType

_acts: list[tuple[re.Pattern, Callable[[ModuleType], None]]] = []


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Calls `act` on each module whose full name the expression matches: now if it is there, else once it comes."""
    for module in [module for found, module in list(sys.modules.items()) if re.fullmatch(name, found)]:
        act(module)
    _acts.append((re.compile(name), act))
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Finds those modules by Python's own means, and acts on them once they have run."""

    @staticmethod
    def find_spec(name, path, target=None):
        acts = [act for pattern, act in _acts if pattern.fullmatch(name)]
        spec = PathFinder.find_spec(name, path, target) if acts else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for act in acts:
                act(module)

        spec.loader.exec_module = exec_module
        return spec
