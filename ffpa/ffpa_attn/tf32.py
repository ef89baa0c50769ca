"""Attention of float32 tensors where PyTorch may round products to TF32: in float16, which keeps 11 bits of a number, as TF32 does.

What TF32 has beyond that is range. Tensors are scaled into that of float16 by factors found on the device: no call waits for it.
"""

from __future__ import annotations

from math import inf

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_LEAST_WORK = 1 << 33  # operations of a forward: with less, the host takes as long as PyTorch's kernel does


def serves(q, k, v) -> bool:
    """Whether the user allows it for these [B, H, N, D], and it is faster."""
    plain = all(type(x) in (torch.Tensor, nn.Parameter, FakeTensor) and x.dtype == torch.float32 for x in (q, k, v))
    if not plain or not all(x.dim() == 4 for x in (q, k, v)) or not _allowed(q.device):
        return False
    return 2 * q.shape[:-1].numel() * k.shape[2] * (q.shape[3] + v.shape[3]) >= _LEAST_WORK


def _allowed(device: torch.device) -> bool:
    if device.type != "cuda" or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


# Compiled code is guarded by this setting anyway. (torch.compiler.assume_constant_result does no more, but takes seconds to import.)
_allowed._dynamo_marked_constant = True


def attention(q, k, v, mask, layout: str, rule: dict) -> torch.Tensor:
    """ffpa's operator on float32; `rule` are its keyword arguments."""
    # The compiler takes no tensor for two arguments; views of one it does.
    return _Attention.apply(q, k.view_as(k), v.view_as(v), mask, layout, rule)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, layout, rule):
        # q and k shrink and grow by as much, so that their products stay.
        balance = _power_of_two((_largest(q) / _largest(k)).sqrt())
        of_v = _power_of_two(_LARGEST_OF_V / _largest(v))
        q, k, v = _times(q, 1 / balance), _times(k, balance), _times(v, of_v)
        out, lse = torch.ops.ffpa_attn.forward(q, k, v, mask, layout=layout, **rule)
        ctx.save_for_backward(q, k, v, mask, out, lse, balance, of_v)
        ctx.layout, ctx.rule = layout, rule
        return _times(out, 1 / of_v, torch.float32)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        q, k, v, mask, out, lse, balance, of_v = ctx.saved_tensors
        of_grad = _power_of_two(_LARGEST_OF_SCORES / (2 * _LARGEST_OF_V * v.shape[-1]) / _largest(grad_out))
        dq, dk, dv, dmask = torch.ops.ffpa_attn.backward(
            _times(grad_out, of_grad), None, q, k, v, out, lse, mask,
            layout=ctx.layout, **ctx.rule, fp32_grads=True, mask_grad=ctx.needs_input_grad[3],
        )  # fmt: skip
        of_scores = 1 / of_grad / of_v
        dmask = dmask * of_scores if ctx.needs_input_grad[3] else None
        return dq * (of_scores / balance), dk * (of_scores * balance), dv / of_grad, dmask, None, None


_LARGEST_OF_V = 8.0
_LARGEST_OF_SCORES = 2.0**15  # no gradient of a score, |dO · (V - O)|, can overflow


def _largest(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, inf).view(1)  # of one dim: numbers without dims would become float16's


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The next below; 1 where that says nothing, since a tensor is zero or has elements that are no numbers."""
    power = torch.exp2(torch.log2(x).floor().clamp(-120, 120))
    return torch.where((x > 0) & (x < inf), power, 1.0)


def _times(x: torch.Tensor, factor: torch.Tensor, dtype=torch.float16) -> torch.Tensor:
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))
