"""Reads the structs that kernels take, such as AttentionParams, from the headers that declare them, so that each number
of a call is declared once: in csrc/attention/params.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from functools import cache

from ..building import build

_HEADERS = ("attention_params.h", "append_params.h", "backward_params.h", "compiled_kernel.h", "fp8_params.h")
_HEADERS += ("kernel_launches.h", "sink_gradient_params.h")
_ADDRESS = ctypes.c_uint64
_NUMBERS = {"int": ctypes.c_int, "bool": ctypes.c_bool, "float": ctypes.c_float, "int64_t": ctypes.c_int64}
_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_ENUM = re.compile(r"^enum class (\w+) : int \{([^}]*)\};", re.MULTILINE)
_FIELDS = re.compile(r"^  (?:const )?(\w+)(\*?) (\w+(?:, \w+)*);$", re.MULTILINE)  # functions have parentheses


@cache
def _declared() -> tuple[dict[str, type[ctypes.Structure]], dict[str, list[str]]]:
    structs, enums = {}, {}
    for header in _HEADERS:
        text = re.sub(r" *//.*", "", (build.csrc() / "attention" / "params" / header).read_text("utf-8"))
        enums |= {name: re.findall(r"\w+", names) for name, names in _ENUM.findall(text)}
        for name, body in _STRUCT.findall(text):
            fields = list(_fields(body, structs, enums))
            structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs, enums


def _fields(body: str, structs, enums) -> Iterator[tuple[str, type]]:
    for kind, star, names in _FIELDS.findall(body):
        number = _ADDRESS if star else ctypes.c_int if kind in enums else _NUMBERS.get(kind) or structs[kind]
        yield from ((name, number) for name in names.split(", "))


def struct(name: str) -> type[ctypes.Structure]:
    return _declared()[0][name]


def enumerator(enum: str, name: str) -> int:
    return _declared()[1][enum].index(name)


@cache
def offset(kind: type[ctypes.Structure], path: str) -> int:
    """Returns where a field lies, in bytes; `path` is `lse` or `q.data`."""
    at = 0
    for name in path.split("."):
        at += getattr(kind, name).offset
        kind = dict(kind._fields_)[name]
    return at
