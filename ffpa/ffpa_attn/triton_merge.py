"""Attention over further keys, added in place to that over others: in Triton on GPUs, else by PyTorch's operators."""

from __future__ import annotations

import torch

from . import env, triton_attention, triton_launch
from .triton_launch import Launch, Tiles, kind_of, launch, memo_of, running, strides

TILES = Tiles(16, 128, 4, 1)  # rows and columns at a time


def merge_into(out, lse, more_out, more_lse) -> None:
    """out [B, H, N, D] and lse [B, H, N], float32, of attention over other keys than `more`. Each row sees a key in both."""
    forced = env.run_flags()["FFPA_BACKEND"] == "triton" and not torch.cuda.is_available()
    if (out.is_cuda or forced) and out.numel() and not triton_attention.why_not():
        try:
            return _by_triton(out, lse, more_out, more_lse)
        except triton_launch.Unable as error:
            triton_attention.give_up(str(error))
    share = torch.sigmoid(more_lse - lse)[..., None]
    out.mul_(1 - share).addcmul_(more_out, share)
    torch.logaddexp(lse, more_lse, out=lse)


def _by_triton(*tensors) -> None:
    from .triton_merge_kernels import merge_kernel

    out = tensors[0]
    batch, heads, n, d = out.shape

    def how() -> Launch:
        return Launch(-(-n // TILES.rows) * heads * batch, (*strides(*tensors), heads, n), {"D": d}, TILES)

    with running(out.device):
        launch(memo_of("merged", *kind_of(*tensors)), merge_kernel, tensors, how)
