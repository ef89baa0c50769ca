"""Computes float32 attention where PyTorch may round products to TF32: in float16, which keeps 11 bits, as TF32 does.

What TF32 has beyond that is range. So q and k of a head, and each column of its v and dO, are scaled into that of
float16, by powers of two that are found on the device: no call waits for it. Numbers lose bits where the largest that
they share a factor with is a hundred thousand times as large; and as only the balance of q and k is free, where the
product of their largest ones is below 1e-8 (gradients; scores are nothing then), or above 1e9.
"""

from __future__ import annotations

from math import inf

import torch
from torch import nn

from ..operators.first_order import first_order_only
from ..support.private_torch import FakeTensor

_LEAST_WORK = 1 << 35  # operations of a forward: with less, the host takes as long as PyTorch's kernel does
_LARGEST_OF_V, _LARGEST_OF_GRAD = 2.0**12, 2.0**4
_LARGEST_OF_SCORES = 2.0**15  # |dO · (V - O)|: no gradient of a score overflows


def serves(q, k, v) -> bool:
    """Says whether the user allows it for these [B, H, N, D], and it is faster."""
    plain = all(type(x) in (torch.Tensor, nn.Parameter, FakeTensor) and x.dtype == torch.float32 for x in (q, k, v))
    if not plain or not all(x.dim() == 4 for x in (q, k, v)) or not _allowed(q.device):
        return False
    return 2 * q.shape[:-1].numel() * k.shape[2] * (q.shape[3] + v.shape[3]) >= _LEAST_WORK


def _allowed(device: torch.device) -> bool:
    if device.type != "cuda" or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


# Compiled code is guarded by this setting anyway. (torch.compiler.assume_constant_result does no more, but takes
# seconds to import.)
_allowed._dynamo_marked_constant = True


def attention(q, k, v, mask, rule: dict) -> torch.Tensor:
    """Runs ffpa's operator on float32; `rule` holds its keyword arguments. The result lies in memory as q does."""
    # The compiler takes no tensor for two arguments, but it takes views of one.
    return _Attention.apply(q, k.view_as(k), v.view_as(v), mask, rule)[0]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, rule):
        group = q.shape[1] // k.shape[1]
        # q and k shrink and grow by as much, so that their products stay.
        of_q, of_k = _of_group(_largest(q, (2, 3)), group), _largest(k, (2, 3))
        # One that is zero limits nothing.
        of_q, of_k = torch.where(of_q > 0, of_q, 1 / of_k), torch.where(of_k > 0, of_k, 1 / of_q)
        balance = _power_of_two((of_q / of_k).sqrt())
        of_v = _power_of_two(_LARGEST_OF_V / _largest(v, 2))
        layout = "BNHD" if q.stride(1) < q.stride(2) else "BHND"
        q, k, v = _times(q, _of_queries(1 / balance, group)), _times(k, balance), _times(v, of_v)
        rows = (x.transpose(1, 2) if layout == "BNHD" else x for x in (q, k, v))
        out, lse = torch.ops.ffpa_attn.forward(*rows, mask, layout=layout, **rule)
        out = out.transpose(1, 2) if layout == "BNHD" else out
        ctx.save_for_backward(q, k, v, mask, out, lse, balance, of_v)
        ctx.rule = rule
        return out * _of_queries(1 / of_v, group), lse  # by the LSE autograd learns that gradients come from here

    @staticmethod
    @first_order_only
    def backward(ctx, saved, grad_out, _):
        q, k, v, mask, out, lse, balance, of_v = saved
        group = q.shape[1] // k.shape[1]
        largest, largest_of_v = _of_group(_largest(grad_out, 2), group), _largest(v, 2) / of_v
        of_grad = _power_of_two(_LARGEST_OF_GRAD / largest)
        of_scores = _LARGEST_OF_SCORES / (2 * v.shape[3]) / (largest * largest_of_v).amax(3, keepdim=True)
        of_scores = _power_of_two(of_scores)
        if ctx.needs_input_grad[3]:
            of_scores = of_scores.amin().expand_as(of_scores)  # heads may share an element of the mask
        # As dO grows, V and O shrink: column by column, so that each has its part in dO · (V - O).
        again = torch.where(largest > 0, of_scores / of_grad / of_v, 0.0)
        dq, dk, dv, dmask = torch.ops.ffpa_attn.backward(
            _times(grad_out, _of_queries(of_grad, group)), None, q, k, _times(v, again),
            _times(out, _of_queries(again, group)), lse, mask,
            **ctx.rule, fp32_grads=True, mask_grad=ctx.needs_input_grad[3],
        )  # fmt: skip
        dq.mul_(_of_queries(1 / of_scores / balance, group))
        dmask = dmask.div_(of_scores.amin()) if ctx.needs_input_grad[3] else None
        return dq, dk.mul_(balance / of_scores), dv.div_(of_grad), dmask, None


def _largest(x: torch.Tensor, dims) -> torch.Tensor:
    return torch.linalg.vector_norm(x, inf, dim=dims, keepdim=True)


def _of_group(x: torch.Tensor, group: int) -> torch.Tensor:
    """Returns the largest of the query heads that share a head of k and v."""
    return x.unflatten(1, (-1, group)).amax(2)


def _of_queries(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.repeat_interleave(group, 1)


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Returns the next one below; 1 where that says nothing, since all is zero or something is no number."""
    power = torch.exp2(torch.log2(x).floor().clamp(-120, 120))
    return torch.where((x > 0) & (x < inf), power, 1.0)


def _times(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=torch.float16))
