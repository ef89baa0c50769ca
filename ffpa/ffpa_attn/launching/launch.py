"""Launches a kernel, on a GPU or in the emulator, with the same bytes: the struct of numbers that kernel takes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from functools import cache, partial

import torch

from ..specs.spec import KernelSpec
from . import native, structs

# What a kernel does with memory: it reads it, writes all that it will ever hold, or changes what it holds.
READ, WRITE, CHANGE = "read", "write", "change"


class Launch:
    """A kernel with the numbers that calls of a kind have in common. A call brings tensors, whose addresses go to the
    fields that `memory` names, and numbers for the ints from field `first_int` on.
    """

    def __init__(
        self,
        spec: KernelSpec,
        params: ctypes.Structure,
        memory: Mapping[str, str],
        device: torch.device,
        first_int: str | None = None,
    ):
        self._params = bytes(params)
        self._places = tuple(structs.offset(type(params), field) // 8 for field in memory)
        self._ints_at = first_int and structs.offset(type(params), first_int)
        if device.type == "cuda":
            enqueue = native.launcher(native.kernel(spec, native.gpu_of(device)), device.index)
            self._run = lambda params, _: enqueue(params)
        else:
            self._run = partial(_emulated, spec, tuple(memory.values()))

    def __call__(self, *tensors: torch.Tensor | None, ints: tuple[int, ...] = ()) -> None:
        params = bytearray(self._params)
        words = memoryview(params).cast("Q")
        for place, x in zip(self._places, tensors, strict=True):
            if x is not None:
                words[place] = x.data_ptr()
        if ints:
            struct.pack_into(f"{len(ints)}i", params, self._ints_at, *ints)
        self._run(bytes(params), tensors)


def _emulated(spec: KernelSpec, uses: tuple[str, ...], params: bytes, tensors) -> None:
    from . import emulated

    memory = [(x, use) for x, use in zip(tensors, uses, strict=True) if x is not None and x.numel()]
    emulated.launch(spec, params, memory)


_properties = cache(torch.cuda.get_device_properties)


def multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return _properties(device).multi_processor_count
    from . import emulated

    return emulated.RESIDENT_BLOCKS
