"""Attention over further keys, added in place to that over others: in Triton on GPUs, else by PyTorch's operators."""

from __future__ import annotations

import contextlib

import torch

from . import triton_attention, triton_launch
from .triton_launch import Launch, Tiles, kind_of, launch, memo_of, running, strides

TILES = Tiles(16, 128, 4, 1)  # rows and columns at a time


def merge_into(out, lse, more_out, more_lse, first: bool) -> None:
    """Adds `more`, [M, B, H, N, D] and [M, B, H, N], to float32 out [B, H, N, D] and lse [B, H, N], of attention over other keys each; the
    `first` time these hold nothing yet. Each row sees a key in every one.
    """
    if (out.is_cuda or triton_attention.interprets()) and out.numel() and not triton_attention.why_not():
        with contextlib.suppress(triton_launch.Unable):
            return _by_triton(out, lse, more_out, more_lse, first)
    if first:
        out.copy_(more_out[0])
        lse.copy_(more_lse[0])
    for one_out, one_lse in zip(more_out[first:], more_lse[first:], strict=True):
        share = torch.sigmoid(one_lse - lse)[..., None]
        out.mul_(1 - share).addcmul_(one_out, share)
        torch.logaddexp(lse, one_lse, out=lse)


def _by_triton(out, lse, more_out, more_lse, first: bool) -> None:
    from .triton_merge_kernels import merge_kernel

    batch, heads, n, d = out.shape
    tensors = (out, lse, more_out, more_lse)

    def how() -> Launch:
        numbers = (*strides(out, lse, more_out[0], more_lse[0]), more_out.stride(0), more_lse.stride(0), heads, n)
        options = {"D": d, "MORE": len(more_out), "FIRST": first}
        return Launch(-(-n // TILES.rows) * heads * batch, numbers, options, TILES)

    with running(out.device):
        launch(memo_of("merged", first, *kind_of(*tensors)), merge_kernel, tensors, how)
