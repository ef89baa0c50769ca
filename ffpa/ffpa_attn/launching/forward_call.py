"""Launches the forward kernels, on a GPU (csrc/torch_ops/attention_forward.cpp) or in the emulator. What calls of a
kind have in common is worked out for the first and kept: PyTorch takes 5 µs to hand 14 numbers to an operator.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ..specs.spec import KernelSpec
from . import native


class Numbers(NamedTuple):
    """ForwardOptions (csrc/attention/attention_params.h) and the longest lengths, in the order of the operator."""

    longest_q: int
    longest_k: int
    scale: float
    softcap: float
    left: int
    right: int
    top_left: bool
    stages: int = 0
    value_stages: int = 0
    q_resident: bool = False
    grid_of_heads: bool = False
    chunk_keys: int = 0
    blocks: int = 0
    splits: int = 1


class Call(NamedTuple):
    """Launches, in order, that take q, k, v, out, lse, mask, offsets, scratch, partial; floats of the last two."""

    launches: Sequence[Callable[..., None]] = ()
    scratch: int | None = None
    partial: int | None = None

    def __call__(self, q, k, v, out, lse, mask, offsets) -> None:
        scratch, partial = (
            None if count is None else torch.empty(count, dtype=torch.float32, device=q.device)
            for count in (self.scratch, self.partial)
        )
        for launch in self.launches:
            launch(q, k, v, out, lse, mask, *(offsets[:2] if offsets else (None, None)), scratch, partial)


Memo = dict[int, Call]  # number of multiprocessors -> the call
_PACKED = "2q2d10q"


def multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return native.multiprocessors(device)
    from . import emulated

    return emulated.RESIDENT_BLOCKS


def launch(spec: KernelSpec, numbers: Numbers, device: torch.device) -> Callable[..., None]:
    if device.type != "cuda":
        return partial(_emulated, spec, numbers)
    packed = torch.frombuffer(bytearray(struct.pack(_PACKED, *numbers)), dtype=torch.uint8)
    return partial(native.library().attention_forward.default, native.kernel(spec, native.gpu_of(device)), packed)


def _emulated(spec, numbers, *tensors) -> None:
    from . import emulated

    emulated.attention_forward(spec, numbers, *tensors)
