"""Launches kernels, on a GPU or in the emulator, with the same bytes: the struct of numbers that each kernel takes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch

from ..specs.spec import KernelSpec
from . import native, structs

# What a kernel does with memory: it reads it, writes all that it will ever hold, or changes what it holds.
READ, WRITE, CHANGE = "read", "write", "change"


class Kernel(NamedTuple):
    """A kernel comes with the numbers that calls of a kind have in common; `memory` has the fields for a call's addresses,
    and says what the kernel does with what lies there.
    """

    spec: KernelSpec
    params: ctypes.Structure
    memory: Mapping[str, str]


class Launch:
    """A launch has kernels that a call runs one after another; they take params of one type. A call brings tensors, whose addresses go
    to the fields that each kernel's `memory` names, and, for one kernel, numbers for the ints from field `first_int` on.
    """

    def __init__(self, kernels: Sequence[Kernel], device: torch.device, first_int: str | None = None):
        self.kernels, self._device = kernels, device
        kind, fields = type(kernels[0].params), tuple(kernels[0].memory)
        assert all(type(params) is kind and tuple(memory) == fields for _, params, memory in kernels)
        assert first_int is None or len(kernels) == 1
        places = [structs.offset(kind, field) for field in fields]
        self._pack = struct.Struct(f"{len(fields)}Q").pack
        self._params = bytes(kernels[0].params)
        self._ints_at = first_int and structs.offset(kind, first_int)
        if device.type == "cuda":
            gpu = native.gpu_of(device)
            names, params = [native.kernel(of.spec, gpu) for of in kernels], [bytes(of.params) for of in kernels]
            self._enqueue = native.launcher(names, params, places, device.index)
        else:
            self._enqueue = None
            self._emulated = [
                partial(_emulated, spec, bytes(params), places, memory) for spec, params, memory in kernels
            ]

    def with_params(self, params: ctypes.Structure) -> Launch:
        """Returns the launch of the same kernels with other numbers, the same for all."""
        return Launch([kernel._replace(params=params) for kernel in self.kernels], self._device)

    def __call__(self, *tensors: torch.Tensor | None, ints: tuple[int, ...] = (), ahead: int = 0) -> None:
        """`ahead` has the third tensor's data begin so many bytes behind its own first."""
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        if ahead:
            addresses[2] += ahead
        addresses = self._pack(*addresses)
        params = None
        if ints:
            params = bytearray(self._params)
            struct.pack_into(f"{len(ints)}i", params, self._ints_at, *ints)
            params = bytes(params)
        if self._enqueue is not None:
            self._enqueue(addresses, params)
            return
        for run in self._emulated:
            run(addresses, params, tensors)


def _emulated(
    spec: KernelSpec, of_all: bytes, places, uses: Mapping[str, str], addresses: bytes, params, tensors
) -> None:
    from . import emulated

    filled = bytearray(params or of_all)
    for place, address in zip(places, memoryview(addresses).cast("Q"), strict=True):
        struct.pack_into("Q", filled, place, address)
    memory = [(x, use) for x, use in zip(tensors, uses.values(), strict=True) if x is not None and x.numel()]
    emulated.launch(spec, bytes(filled), memory)


_properties = cache(torch.cuda.get_device_properties)


def multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return _properties(device).multi_processor_count
    from . import emulated

    return emulated.RESIDENT_BLOCKS
