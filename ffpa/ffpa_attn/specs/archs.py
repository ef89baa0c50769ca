"""This module has GPU architectures as values: what a build asks for, what a kernel is compiled to, what GPU runs it.

There are three ways to write one: a request as PyTorch writes it ("9.0a", "8.0+PTX"), a compiled target as nvcc writes
it ("sm_90a", machine code; "compute_80", PTX), and a GPU ("sm_90").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_REQUEST = re.compile(r"(\d+)\.(\d)[af]?(\+PTX)?")
# These are PyTorch's names of architectures and the numbers they stand for.
_FAMILIES = {
    "Kepler": "3.5+PTX", "Kepler+Tesla": "3.7", "Maxwell": "5.0;5.2+PTX", "Maxwell+Tegra": "5.3", "Pascal": "6.0;6.1+PTX",
    "Volta": "7.0+PTX", "Volta+Tegra": "7.2", "Turing": "7.5+PTX", "Ampere": "8.0;8.6+PTX", "Ampere+Tegra": "8.7",
    "Ada": "8.9+PTX", "Hopper": "9.0+PTX", "Blackwell": "10.0;10.3;12.0;12.1+PTX", "Blackwell+Tegra": "11.0",
}  # fmt: skip
_SEPARATORS = re.compile(r"[;,\s]+")
_ARCH = re.compile(r"(sm|compute)_(\d+)([af]?)")


class Request(NamedTuple):
    number: int  # 90 means 9.0
    ptx: bool  # PTX is wanted too, which newer GPUs compile when they load it


def requested(flags: Mapping[str, Any]) -> tuple[Request, ...]:
    """Returns the architectures that the build flags ask for."""
    for name in ("FFPA_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"):
        if flags[name]:
            words = _SEPARATORS.split(flags[name].strip("; ,"))
            words = [number for word in words for number in _FAMILIES.get(word, word).split(";")]
            return tuple(_request(name, flags[name], word) for word in words)
    ampere = (Request(80, ptx=True),) if flags["ENABLE_FFPA_AMPERE"] else ()
    hopper = (Request(90, ptx=False),) if flags["ENABLE_FFPA_HOPPER"] else ()
    return ampere + hopper


def _request(flag: str, value: str, word: str) -> Request:
    match = _REQUEST.fullmatch(word)
    if match is None:
        raise ValueError(
            f"{flag}={value!r}: {word!r} is no architecture; write numbers such as `8.0+PTX;9.0a`, "
            f"or names such as `Hopper`; or unset it"
        )
    major, minor, ptx = match.groups()
    return Request(int(major) * 10 + int(minor), ptx is not None)


def _parse(arch: str) -> tuple[str, int, str]:
    kind, number, letter = _ARCH.fullmatch(arch).groups()
    return kind, int(number), letter


def targets(kernel: str, requests: tuple[Request, ...]) -> tuple[str, ...]:
    """Lists what a kernel of this arch is compiled to: "sm_80" to all requested from there up, "sm_90a" to itself."""
    _, oldest, letter = _parse(kernel)
    fit = [r for r in requests if (r.number == oldest if letter else r.number >= oldest)]
    machine_code = dict.fromkeys(f"sm_{r.number}{letter}" for r in fit)
    ptx = dict.fromkeys(f"compute_{r.number}{letter}" for r in fit if r.ptx)
    return (*machine_code, *ptx)


def why_not_on(kernel: str, gpu: str) -> str | None:
    """Says why a GPU cannot run a kernel of this arch however it is compiled; None when it can."""
    _, oldest, letter = _parse(kernel)
    _, number, _ = _parse(gpu)
    if letter and number != oldest:
        return f"it uses instructions that only {kernel} has, and the GPU is {gpu}"
    if number < oldest:
        return f"it needs {kernel} or newer, and the GPU is {gpu}"
    return None


def runs(target: str, gpu: str) -> bool:
    """Machine code runs from its minor version up within its major one, PTX on all that is newer."""
    kind, built, letter = _parse(target)
    _, number, _ = _parse(gpu)
    if letter == "a":
        return number == built
    if kind == "sm" or letter == "f":
        return number // 10 == built // 10 and number >= built
    return number >= built


def exact_target(kernel: str, gpu: str) -> str:
    """Returns what a kernel is compiled to for this GPU alone."""
    return f"sm_{_parse(gpu)[1]}{_parse(kernel)[2]}"


def shared_memory_bytes(gpu: str) -> int:
    """Returns the bytes a block may ask for. GPUs like 8.6 have less than 8.0; unknown ones after 9.0 count as 9.0."""
    _, number, _ = _parse(gpu)
    kilobytes = {80: 163, 87: 163, 86: 99, 89: 99, 120: 99, 121: 99}.get(number, 227 if number >= 90 else 99)
    return kilobytes << 10


def multiprocessors(gpu: str) -> int:
    """Returns how many the best-known GPU of this kind has, so that plans, and so bits, are equal on all of a kind."""
    _, number, _ = _parse(gpu)
    return {80: 108, 86: 84, 87: 16, 89: 128, 90: 132, 100: 148, 120: 170}.get(number, 132)
