"""Reads from a kernel that Triton compiled what the driver is given at a launch, so that later calls of the kind need
none of Triton's Python. What is said here holds for Triton 3.6 to 3.9; whatever is not as expected, Triton launches.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

from ..launching.compiled import Address, Kernel, TensorMap

_NUMBERS = {"i32": "<i", "i64": "<q", "fp32": "<f"}
# Anything else asks for attributes of a launch, or memory beside it, that are not provided here.
_USUAL = {
    "num_ctas": 1,
    "warp_size": 32,
    "launch_pdl": False,
    "launch_cooperative_grid": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "instrumentation_mode": "",
}
_USUAL_MAP = {"fp4_padded": False, "is_im2col": False}
_OF_A_MAP = {"swizzle", "elem_size", "elem_type", "block_size"}
_MOST_SMEM = 227 << 10  # bytes; GPUs that have more ask for an attribute of the launch


def read(compiled, names: Sequence[str], programs: int, arguments: Sequence) -> Kernel | str:
    """Returns the kernel as the driver launches it with such arguments, of these names, or why Triton has to."""
    try:
        metadata = compiled.metadata
        if metadata.target.backend != "cuda" or metadata.shared > _MOST_SMEM:
            return f"{metadata.name} is for {metadata.target}, and takes {metadata.shared} bytes of shared memory"
        unusual = {name: getattr(metadata, name) for name, usual in _USUAL.items() if getattr(metadata, name) != usual}
        if unusual:
            return f"{metadata.name} has {unusual}"
        maps = iter(metadata.tensordesc_meta or ())
        signature = compiled.src.signature
        found = [
            x for name, value in zip(names, arguments, strict=True) for x in _of(signature[name], name, value, maps)
        ]
        found += [bytes(8)] * 2  # the addresses of scratch, of which there is none
        return Kernel(
            metadata.name, int(compiled.function), programs, metadata.num_warps * 32, metadata.shared, tuple(found)
        )
    except (AttributeError, ImportError, LookupError, OverflowError, TypeError, ValueError, struct.error) as error:
        return f"another Triton launches in another way: {error!r}"


def _of(kind, name: str, value, maps: Iterator[Mapping]) -> Iterator[bytes | Address | TensorMap]:
    """Yields the parameters that an argument becomes: none if Triton made a constant of it, as it does of a 1."""
    if isinstance(kind, tuple):
        for one_kind, one in zip(kind, value, strict=True):
            yield from _of(one_kind, name, one, maps)
    elif kind.startswith("*"):
        yield Address(name)
    elif kind.startswith("tensordesc<"):
        yield from _of_descriptor(name, value, next(maps, {}))
    elif kind != "constexpr":
        yield struct.pack(_NUMBERS[kind], value)


def _of_descriptor(name: str, x, as_compiled: Mapping) -> Iterator[bytes | TensorMap]:
    """Yields the descriptor as the driver encodes it, and the sizes and strides that Triton passes beside it."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    box, bytes_each = as_compiled["block_size"], as_compiled["elem_size"]
    more = {name: value for name, value in as_compiled.items() if name not in _OF_A_MAP}
    if not more.items() <= _USUAL_MAP.items() or x.padding != "zero" or getattr(x, "round_f32_to_tf32", False):
        raise ValueError(f"{x} as {as_compiled}")
    if not len(box) == len(x.shape) == len(x.strides) or x.strides[-1] != 1:
        raise ValueError(f"{x} in blocks of {box}")
    yield TensorMap(
        name,
        TMA_DTYPE_DEVICE_TO_HOST[as_compiled["elem_type"]],
        as_compiled["swizzle"],
        x.shape[::-1],
        [stride * bytes_each for stride in x.strides[-2::-1]],
        box[::-1],
    )
    yield from (struct.pack("<i", size) for size in x.shape)
    yield from (struct.pack("<q", stride) for stride in x.strides)
