"""In Ulysses attention ranks change parts of the sequence for heads of all of it, compute on those, and change back."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..operators.first_order import first_order_only
from . import sequence_shards


@sequence_shards.untraced
def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    layout: str = "zigzag",
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    **unknown,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Does what ring_attention does, with its arguments, results and comparison of calls, by all-to-all instead of a
    ring: each rank computes Hq / W of the heads. Here layout only says where rows lie: all ranks have equal work in
    either.

    Hq must be a multiple of W. Where Hkv is none, its heads are sent as often as it takes, and their gradients are
    summed in float32.
    """
    given = causal, scale, softcap, return_lse
    q, k, v, options = sequence_shards.checked(ulysses_attention, unknown, group, q, k, v, layout, *given)
    _, world = sequence_shards.rank_and_world(group)
    if q.shape[1] % world:
        raise ValueError(
            f"`q` has {q.shape[1]} heads; ulysses_attention on {world} ranks needs a multiple of {world}: use a smaller "
            "group, or ring_attention, which takes any number"
        )
    out, lse = _UlyssesAttention.apply(q, k, v, _Ranks(group, world, layout), options)
    return (out, lse) if return_lse else out


class _Ranks(NamedTuple):
    """The ranks of a call, which exchange rows for heads."""

    group: dist.ProcessGroup | None
    world: int
    layout: str

    def to_heads(self, *tensors) -> list[torch.Tensor]:
        """Turns [B, H, N/W, D], a part of the sequence, into [B, H/W, N, D], a part of the heads."""
        if self.world == 1:
            return list(tensors)
        for_ranks = [x.unflatten(1, (self.world, x.shape[1] // self.world)).movedim(1, 0) for x in tensors]
        return [sequence_shards.together(x, 2, self.layout) for x in self._all_to_all(for_ranks)]

    def to_rows(self, *tensors) -> list[torch.Tensor]:
        """Turns [B, H/W, N, D], a part of the heads, back into a part of the sequence."""
        if self.world == 1:
            return list(tensors)
        for_ranks = [torch.stack(sequence_shards.apart(x, 2, self.layout, self.world)) for x in tensors]
        return [x.movedim(0, 1).flatten(1, 2) for x in self._all_to_all(for_ranks)]

    def _all_to_all(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Entry i of a tensor goes to rank i; entry i of what comes back is from there."""
        sent = [x.contiguous() for x in tensors]
        received = [torch.empty_like(x) for x in sent]
        pairs = zip(received, sent, strict=True)
        works = [dist.all_to_all_single(to, of, group=self.group, async_op=True) for to, of in pairs]
        for work in works:
            work.wait()
        return received


class _UlyssesAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ranks: _Ranks, options: dict):
        ctx.ranks, ctx.options = ranks, options
        ctx.copies = ranks.world // gcd(k.shape[1], ranks.world)  # the fewest that make heads of K a multiple of W
        if ctx.copies > 1:
            k, v = (x.repeat_interleave(ctx.copies, 1) for x in (k, v))
        q, k, v = ranks.to_heads(q, k, v)
        out, lse = torch.ops.ffpa_attn.forward(q, k, v, **options)
        rows_out, rows_lse = ranks.to_rows(out, lse[..., None])
        rows_lse = rows_lse[..., 0]
        ctx.save_for_backward(q, k, v, out, lse, rows_lse)  # the last is for first_order_only alone
        return rows_out, rows_lse

    @staticmethod
    @first_order_only
    def backward(ctx, saved, grad_out, grad_lse):
        """Sends both gradients, zeros where a rank has no use for one: all must take part."""
        q, k, v, out, lse, _ = saved
        grad_out, grad_lse = ctx.ranks.to_heads(grad_out, grad_lse[..., None])
        dq, dk, dv, _ = torch.ops.ffpa_attn.backward(
            grad_out, grad_lse[..., 0], q, k, v, out, lse, **ctx.options, fp32_grads=ctx.copies > 1
        )
        dq, dk, dv = ctx.ranks.to_rows(dq.to(q.dtype), dk, dv)
        if ctx.copies > 1:
            dk, dv = (x.unflatten(1, (-1, ctx.copies)).sum(2).to(q.dtype) for x in (dk, dv))
        return dq, dk, dv, None, None
