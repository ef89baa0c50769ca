"""Ring attention: each rank keeps its rows of q; K and V go from rank to rank, while those at hand are computed on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from . import sequence_shards
from .first_order import first_order_only
from .triton_merge import merge_into


@sequence_shards.untraced
def ring_attention(q, k, v, group=None, causal=True, layout="zigzag", *, scale=None, softcap=0.0, return_lse=False):
    """ffpa over a sequence whose rows lie on the ranks of `group` (None: all); every rank calls it with its part.

    q [B, Hq, N/W, D], k [B, Hkv, N/W, D], v [B, Hkv, N/W, Dv] on each of W ranks, as `shard_sequence` cuts them; all
    ranks call it alike, and all run the backward. (That they agree is checked on the CPU, on GPUs under FFPA_CHECK=1: it
    would wait for them.) Returns this rank's part of the result, [B, Hq, N/W, Dv], and
    with return_lse its natural-log sum of exponentials over all keys, float32 [B, Hq, N/W]. Both are differentiable, and
    deterministic.

    layout      "zigzag": of 2W equal chunks rank r holds r and 2W - 1 - r, which makes causal work equal; "contiguous":
                of W chunks rank r holds r, and the last one has the most to do.
    causal, scale, softcap as in ffpa.

    K and V are sent on before a step computes and awaited after it. The backward sends them round again, and behind them
    their gradients, summed in float32, which end at home.
    """
    rank, world = sequence_shards.rank_and_world(group)
    q, k, v = sequence_shards.inputs(q, k, v, layout)
    rule = sequence_shards.options(causal, scale, softcap, return_lse)
    sequence_shards.check_that_ranks_agree(group, q, k, v, {"layout": layout, **rule})
    out, lse = _RingAttention.apply(q, k, v, _Ring(group, rank, world, layout, rule.pop("causal"), rule))
    return (out, lse) if return_lse else out


class _Part(NamedTuple):
    """What of the rows at home sees what of the K and V at hand."""

    first: int  # row
    end: int  # of the keys
    causal: bool

    def rows(self, x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[:, :, self.first :]

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, : self.end]


class _Ring(NamedTuple):
    group: dist.ProcessGroup | None
    rank: int
    world: int
    layout: str
    causal: bool
    rule: dict  # the operators' other keyword arguments

    def turns(self, k, v) -> Iterator[tuple[_Part | None, list[torch.Tensor]]]:
        """First this rank's own K and V, then those of each other; while the caller computes, the next ones travel.

        Kernels fill a GPU: a message that waits for one would start as late as the next one ends. So messages do not wait for what
        is computed meanwhile, but for what was computed before that, in whose place the next K and V arrive.
        """
        beside = torch.cuda.Stream(k.device) if k.is_cuda and self.world > 1 else None
        at_hand = [x.contiguous() for x in (k, v)] if self.world > 1 else [k, v]
        places = [[torch.empty_like(x) for x in at_hand] for _ in range(min(self.world - 1, 3))]
        if beside:
            beside.wait_stream(torch.cuda.current_stream(k.device))
        arriving, computed = None, []
        for step in range(self.world):
            if arriving:
                at_hand = arriving.wait()
            if step < self.world - 1:
                with torch.cuda.stream(beside):
                    if beside and arriving:
                        arriving.wait()
                    if beside and step > 1:
                        beside.wait_event(computed[step - 2])
                    arriving = self.pass_on(at_hand, places[step % 3])
            yield self._visible((self.rank - step) % self.world, k.shape[2]), at_hand
            if beside:
                computed.append(torch.cuda.current_stream(k.device).record_event())

    def _visible(self, source: int, rows: int) -> _Part | None:
        if source == self.rank or not self.causal:
            return _Part(0, rows, self.causal)
        earlier = source < self.rank
        if self.layout == "contiguous":
            return _Part(0, rows, False) if earlier else None
        # Of an earlier rank's chunks the first lies before both of ours and the second after both; a later rank's lie
        # between ours.
        return _Part(0, rows // 2, False) if earlier else _Part(rows // 2, rows, False)

    def pass_on(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor] | None = None) -> _Arriving:
        """Sends them to the next rank, and asks the one before for its own."""
        received = places or [torch.empty_like(x) for x in tensors]
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        messages = [dist.P2POp(dist.isend, x, group=self.group, group_peer=after) for x in tensors]
        messages += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=before) for x in received]
        return _Arriving(dist.batch_isend_irecv(messages), list(tensors), list(received))


class _Arriving(NamedTuple):
    works: list[dist.Work]
    sent: list[torch.Tensor]
    received: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        """What this stream does from now on finds them there."""
        for work in self.works:
            work.wait()
        self.sent.clear()  # they have left, and need no memory here
        return self.received


# Results that are merged in one pass over the sums, which reads and writes these in float32; till then they take memory.
_MERGED_AT_ONCE = 4


class _Sums:
    """Attention over the keys of all turns: float32 sums, and results of the last turns, all of the same rows, to be merged into them."""

    def __init__(self, q, d_v: int, at_once: int):
        self.first_row = 0
        self.results = q.new_empty(at_once, *q.shape[:-1], d_v)
        self.lses: list[torch.Tensor] = []  # of as many results
        self.out = self.lse = None

    def place_for(self, first_row: int) -> torch.Tensor:
        """Where to write the next result."""
        if first_row != self.first_row or len(self.lses) == len(self.results):
            self.merge()
            self.first_row = first_row
        return self.results[len(self.lses)]

    def merge(self) -> None:
        first = self.out is None  # of all rows: each sees itself
        if first:
            self.out = self.results.new_empty(self.results.shape[1:], dtype=torch.float32)
            self.lse = self.lses[0].new_empty(self.lses[0].shape)
        out, results = (x[..., self.first_row :, :] for x in (self.out, self.results[: len(self.lses)]))
        merge_into(out, self.lse[:, :, self.first_row :], results, torch.stack(self.lses), first)
        self.lses.clear()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring: _Ring):
        if ring.world == 1:
            out, lse = torch.ops.ffpa_attn.forward(q, k, v, causal=ring.causal, **ring.rule)
        else:
            sums = _Sums(q, v.shape[3], min(ring.world, _MERGED_AT_ONCE))
            for part, at_hand in ring.turns(k, v):
                if part:
                    place = part.rows(sums.place_for(part.first))
                    sums.lses.append(
                        torch.ops.ffpa_attn.forward_out(
                            part.rows(q), *map(part.keys, at_hand), place, causal=part.causal, **ring.rule
                        )
                    )
            sums.merge()
            out, lse = sums.out.to(q.dtype), sums.lse
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order_only
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        dq = grads = spare = None  # `grads` of the K and V at hand, summed by the ranks that had them
        for part, at_hand in ring.turns(k, v):
            arriving = ring.pass_on(grads, spare) if grads else None  # one step behind K and V
            pieces = []
            if part:
                *pieces, _ = torch.ops.ffpa_attn.backward(
                    *map(part.rows, (grad_out, grad_lse, q)), *map(part.keys, at_hand), *map(part.rows, (out, lse)),
                    causal=part.causal, **ring.rule, fp32_grads=ring.world > 1,
                )  # fmt: skip
            if arriving:
                grads, spare = arriving.wait(), grads
                if part:
                    _add((part.rows(dq), *map(part.keys, grads)), pieces)
            else:
                dq, *grads = pieces
            del pieces  # or they would take memory while the next ones are computed
        grads = [grad.to(q.dtype) for grad in grads]
        arriving = ring.pass_on(grads) if ring.world > 1 else None  # home, where nothing more is added
        return dq.to(q.dtype), *(arriving.wait() if arriving else grads), None


def _add(totals: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
    for total, piece in zip(totals, pieces, strict=True):
        total.add_(piece)
