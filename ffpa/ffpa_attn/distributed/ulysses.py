"""In Ulysses attention ranks change parts of the sequence for heads of all of it, compute on those, and change back."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..operators import forms
from ..operators.dispatch_keys import gradient_of_sinks
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
    sinks: torch.Tensor | None = None,
    return_max_logits: bool = False,
    **unknown,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Does what ring_attention does, with its arguments, results and comparison of calls, by all-to-all instead of a
    ring: each rank computes Hq / W of the heads. Here layout only says where rows lie: all ranks have equal work in
    either.

    Hq must be a multiple of W. Where Hkv is none, its heads are sent as often as it takes, and their gradients are
    summed in float32. A rank's gradient of `sinks` is that of its heads, and 0 at the others: their sum over the ranks
    is the whole.
    """
    given = causal, scale, softcap, return_lse, sinks, return_max_logits
    q, k, v, options = sequence_shards.checked(ulysses_attention, unknown, group, q, k, v, layout, *given)
    rank, world = sequence_shards.rank_and_world(group)
    if q.shape[1] % world:
        raise ValueError(
            f"`q` has {q.shape[1]} heads; ulysses_attention on {world} ranks needs a multiple of {world}: use a smaller "
            "group, or ring_attention, which takes any number"
        )
    ranks = _Ranks(group, rank, world, layout)
    out, lse, *largest = _UlyssesAttention.apply(q, k, v, sinks, ranks, options, return_max_logits)
    return forms.results(out, lse, largest, return_lse)


class _Ranks(NamedTuple):
    """The ranks of a call, which exchange rows for heads."""

    group: dist.ProcessGroup | None
    rank: int
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

    def own_heads(self, heads: int) -> slice:
        """Returns which of so many heads this rank computes."""
        own = heads // self.world
        return slice(self.rank * own, (self.rank + 1) * own)

    def of_all_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the largest scores [B, H] on every rank, from [B, H/W] of each rank's heads."""
        heads = x.shape[1] * self.world
        whole = x.new_full((x.shape[0], heads), -torch.inf)
        whole[:, self.own_heads(heads)] = x
        dist.all_reduce(whole, dist.ReduceOp.MAX, self.group)
        return whole

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
    def forward(ctx, q, k, v, sinks, ranks: _Ranks, options: dict, finds_largest: bool):
        ctx.ranks, ctx.options = ranks, options
        if sinks is not None:
            sinks = sinks[ranks.own_heads(q.shape[1])]
        ctx.copies = ranks.world // gcd(k.shape[1], ranks.world)  # the fewest that make heads of K a multiple of W
        if ctx.copies > 1:
            k, v = (x.repeat_interleave(ctx.copies, 1) for x in (k, v))
        q, k, v = ranks.to_heads(q, k, v)
        operators = torch.ops.ffpa_attn
        forward = operators.forward_max_logits if finds_largest else operators.forward
        out, lse, *largest = forward(q, k, v, **options, sinks=sinks)
        largest = [ranks.of_all_heads(x) for x in largest]
        rows_out, rows_lse = ranks.to_rows(out, lse[..., None])
        rows_lse = rows_lse[..., 0]
        ctx.save_for_backward(q, k, v, sinks, out, lse, rows_lse)  # the last is for first_order_only alone
        ctx.mark_non_differentiable(*largest)
        return rows_out, rows_lse, *largest

    @staticmethod
    @first_order_only
    def backward(ctx, saved, grad_out, grad_lse, *_):
        """Sends both gradients, zeros where a rank has no use for one: all must take part."""
        q, k, v, sinks, out, lse, _ = saved
        grad_out, grad_lse = ctx.ranks.to_heads(grad_out, grad_lse[..., None])
        of_sinks = delta = None
        if ctx.needs_input_grad[3]:
            heads = len(sinks) * ctx.ranks.world
            of_sinks = sinks.new_zeros(heads)
            own, delta = gradient_of_sinks(grad_out, grad_lse[..., 0], out, lse, sinks)
            of_sinks[ctx.ranks.own_heads(heads)] = own
        if not any(ctx.needs_input_grad[:3]):
            return None, None, None, of_sinks, None, None, None
        dq, dk, dv, _ = torch.ops.ffpa_attn.backward(
            grad_out, grad_lse[..., 0], q, k, v, out, lse, delta=delta, **ctx.options, fp32_grads=ctx.copies > 1
        )
        dq, dk, dv = ctx.ranks.to_rows(dq.to(q.dtype), dk, dv)
        if ctx.copies > 1:
            dk, dv = (x.unflatten(1, (-1, ctx.copies)).sum(2).to(q.dtype) for x in (dk, dv))
        return dq, dk, dv, of_sinks, None, None, None
