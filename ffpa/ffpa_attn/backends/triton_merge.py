"""Adds attention over further keys, in place, to that over others: in Triton on GPUs, else by PyTorch's operators."""

from __future__ import annotations

import contextlib

import torch

from ..triton_ops import launch as triton_launch
from ..triton_ops.launch import Launch, Tiles, kind_of, launch_alone, memo_of, strides
from . import triton_attention

TILES = Tiles(16, 128, 4, 1)  # rows and columns at a time


def merge_into(out, top, total, more_out, more_lse, first: bool) -> None:
    """Adds `more`, [M, B, H, N, D] and [M, B, H, N], to float32 out [B, H, N, D], top and total [B, H, N], of attention
    over other keys each; the `first` time these hold nothing yet. A row that sees no key has LSE -inf, and out 0.

    top is the largest LSE so far, and total the sum of exponentials of all relative to it: their LSE is top +
    log(total), which would be rounded at each merge where numbers are large.
    """
    if (out.is_cuda or triton_attention.interprets()) and out.numel() and not triton_attention.why_not():
        with contextlib.suppress(triton_launch.Unable):
            return _by_triton(out, top, total, more_out, more_lse, first)
    if first:
        top.fill_(-torch.inf)
        out.zero_()
        total.zero_()
    new_top = torch.maximum(top, more_lse.amax(0))
    reference = torch.where(new_top == -torch.inf, 0.0, new_top)
    kept, weights = total * (top - reference).exp(), (more_lse - reference).exp()
    new_total = kept + weights.sum(0)
    divisor = torch.where(new_total == 0, 1.0, new_total)
    out.mul_((kept / divisor)[..., None])
    for one_out, weight in zip(more_out, weights, strict=True):
        out.addcmul_(one_out, (weight / divisor)[..., None])
    top.copy_(new_top)
    total.copy_(new_total)


def _by_triton(out, top, total, more_out, more_lse, first: bool) -> None:
    from ..triton_ops.merge_kernels import merge_kernel

    batch, heads, n, d = out.shape
    tensors = (out, top, total, more_out, more_lse)

    def how() -> Launch:
        numbers = (*strides(out, top, more_out[0], more_lse[0]), more_out.stride(0), more_lse.stride(0), heads, n)
        options = {"D": d, "MORE": len(more_out), "FIRST": first}
        return Launch(-(-n // TILES.rows) * heads * batch, numbers, options, TILES)

    launch_alone(memo_of("merged", first, *kind_of(*tensors)), merge_kernel, tensors, how)
