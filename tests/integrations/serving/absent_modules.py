"""Stands in for modules that a server's Python files import and that are not installed, as compiled kernels.

A stand-in has any name that it is asked for, as a class that does nothing; only what a check calls has to be there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types


class _Anything(type):
    """Is the type of the classes of stand-ins, which take part in any expression of a class body."""

    def __new__(meta, name, bases, body, **keywords):
        return super().__new__(meta, name, bases, body)

    def __init__(cls, name, bases, body, **keywords):
        super().__init__(name, bases, body)

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(name)

    def __call__(cls, *args, **keywords):
        is_decorator = len(args) == 1 and not keywords and callable(args[0])
        return args[0] if is_decorator else super().__call__()

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __iter__(cls):
        return iter(())

    def __getitem__(cls, index):
        return cls

    def __setitem__(cls, index, value):
        pass

    def __contains__(cls, item):
        return False

    def __len__(cls):
        return 0

    def __bool__(cls):
        return True


def _thing(name: str) -> type:
    def attribute(self, wanted):
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return _thing(wanted)

    body = {
        "__init__": lambda self, *args, **keywords: None,
        "__init_subclass__": classmethod(lambda cls, **keywords: None),
        "__getattr__": attribute,
        "__get_pydantic_core_schema__": classmethod(lambda cls, source, handler: {"type": "any"}),
    }
    return _Anything(name, (), body)


class StandIn(types.ModuleType):
    """Is a module that has every name."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        thing = _thing(name)
        setattr(self, name, thing)
        return thing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds, last of all, what a package of this name, or a stand-in, imports."""

    def __init__(self, package: str):
        self._package, self.names = package, set()

    def find_spec(self, name, path, target=None):
        top = name.split(".")[0]
        if top in self.names or (top != self._package and path is None and self._is_asked_by_it()):
            self.names.add(top)
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def _is_asked_by_it(self) -> bool:
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if not name.startswith("importlib"):
                return name.split(".")[0] == self._package or name.split(".")[0] in self.names
            frame = frame.f_back
        return False

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def stand_in_for_what_is_missing(package: str) -> set[str]:
    """Lets a package be imported without what it needs; returns the set of names that come to be stood in for."""
    finder = _Finder(package)
    sys.meta_path.append(finder)
    return finder.names
