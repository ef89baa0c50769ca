"""Launches kernels that Triton compiled: all of a call's by one call of C, which is given addresses of tensors."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from . import native, structs


class Address(NamedTuple):
    """This parameter is the address of a tensor of this name."""

    tensor: str


class TensorMap(NamedTuple):
    """This parameter is a TMA descriptor of a tensor of this name; its dimensions are innermost first."""

    tensor: str
    type: int  # CUtensorMapDataType
    swizzle: int  # CUtensorMapSwizzle
    size: Sequence[int]
    stride_bytes: Sequence[int]
    box: Sequence[int]


_SIZES = {Address: 8, TensorMap: 128}


class Kernel(NamedTuple):
    name: str
    function: int  # its CUfunction
    programs: int
    threads: int
    smem_bytes: int
    parameters: Sequence[bytes | Address | TensorMap]


def image(parameters: Sequence[bytes | Address | TensorMap]) -> tuple[bytes, list[int], list[int]]:
    """Returns (the bytes of all parameters, where each begins, its size); what a call fills in is 0."""
    data, places, sizes = bytearray(), [], []
    for parameter in parameters:
        content = parameter if isinstance(parameter, bytes) else bytes(_SIZES[type(parameter)])
        data += bytes(-len(data) % len(content))  # each is aligned to its own size
        places.append(len(data))
        sizes.append(len(content))
        data += content
    return bytes(data), places, sizes


def launcher(kernels: Sequence[Kernel], places: Mapping[str, tuple[int, int]], device: int) -> Callable[..., None]:
    """Returns what enqueues the kernels, in order, on PyTorch's current stream, given the addresses of a call's tensors:
    `places` has a tensor's number among them, and how many bytes after that address it begins. It raises a RuntimeError
    where that cannot be done here.
    """
    kept = []  # arrays that C reads at every launch

    def pointer(kind: type, values: Sequence) -> int:
        kept.append((kind * len(values))(*values))
        return ctypes.addressof(kept[-1])

    def base(start: int, of: Address | TensorMap) -> ctypes.Structure:
        return structs.struct("AddressParameter")(start, *places[of.tensor])

    def tensor_map(start: int, x: TensorMap) -> ctypes.Structure:
        lists = (ctypes.c_uint64, x.size), (ctypes.c_uint64, x.stride_bytes), (ctypes.c_uint32, x.box)
        pointers = [pointer(*one) for one in lists]
        return structs.struct("MapParameter")(base(start, x), x.type, x.swizzle, len(x.size), *pointers)

    def described(kernel: Kernel) -> ctypes.Structure:
        data, starts, sizes = image(kernel.parameters)
        placed = list(zip(starts, kernel.parameters, strict=True))
        addresses = [base(start, x) for start, x in placed if isinstance(x, Address)]
        maps = [tensor_map(start, x) for start, x in placed if isinstance(x, TensorMap)]
        return structs.struct("CompiledKernel")(
            name=pointer(ctypes.c_char, kernel.name.encode() + b"\0"),
            function=kernel.function,
            programs=kernel.programs,
            threads=kernel.threads,
            smem_bytes=kernel.smem_bytes,
            parameters=len(sizes),
            image_bytes=len(data),
            place=pointer(ctypes.c_int, starts),
            bytes=pointer(ctypes.c_int, sizes),
            image=pointer(ctypes.c_uint8, data),
            addresses=len(addresses),
            maps=len(maps),
            address=pointer(structs.struct("AddressParameter"), addresses),
            map=pointer(structs.struct("MapParameter"), maps),
        )

    every = (structs.struct("CompiledKernel") * len(kernels))(*map(described, kernels))
    enqueue = native.compiled_launcher(every, device)
    pack = struct.Struct(f"{1 + max(number for number, _ in places.values())}Q").pack

    def launch(*addresses: int) -> None:
        enqueue(pack(*addresses))

    launch.kept = kept  # they live as long as what launches
    return launch
