"""This is the gradient of sinks: d_sink[h] = -sum of exp(sink - LSE) * (dO . O - dLSE), over the batch and its rows."""

from __future__ import annotations

import torch

from ..support.private_torch import PlainTorch

_MOST_BYTES = 64 << 20  # bytes of what is in float32 at a time: two tensors of some rows
_INF = float("inf")


def sink_gradient(grad_out, grad_lse, out, lse, sinks) -> torch.Tensor:
    """Returns float32 [Hq], from views [B, H, N, D] with lse [B, H, N], or [H, T, D] of packed sequences with lse [H, T];
    grad_lse is laid out as lse, or None. An LSE that is infinite gives nothing, whatever its row holds.
    """
    with PlainTorch(out.device):
        delta = _delta(grad_out, out)
        if grad_lse is not None:
            delta -= grad_lse
        of_sink = (sinks.float()[:, None] - lse).clamp_(max=0.0).exp_()  # P above 1 would come from roundings
        of_sink.mul_(delta).masked_fill_(lse.abs() == _INF, 0.0)
        return -(of_sink.sum(-1) if lse.dim() == 2 else of_sink.sum((0, 2)))


def _delta(grad_out, out) -> torch.Tensor:
    """Returns the sum of dO * O of each row, in float32."""
    rows, row_bytes = out.shape[-2], 8 * out.shape[-1] * out.shape[:-2].numel()
    step = max(_MOST_BYTES // max(row_bytes, 1), 1)
    delta = torch.empty(out.shape[:-1], dtype=torch.float32, device=out.device)
    for first in range(0, rows, step):
        here = slice(first, first + step)
        product = grad_out[..., here, :].float() * out[..., here, :].float()
        delta[..., here] = product.sum(-1)
    return delta
