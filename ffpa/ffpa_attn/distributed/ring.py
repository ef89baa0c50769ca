"""In ring attention a rank keeps its rows of q; K and V of others come in turn, while those at hand are computed on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..attention import ffpa
from ..backends.triton_merge import merge_into
from ..operators import forms
from ..operators.dispatch_keys import gradient_of_sinks
from ..operators.first_order import first_order_only
from . import sequence_shards
from .exchange import Exchange, Wait, exchange


@sequence_shards.untraced
def ring_attention(
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
    """Runs ffpa over a sequence whose rows lie on the ranks of `group` (None: all); every rank calls it with its part.

    q [B, Hq, N/W, D], k [B, Hkv, N/W, D], v [B, Hkv, N/W, Dv] on each of W ranks, as `shard_sequence` cuts them; all
    ranks call it alike, and all run the backward. Returns this rank's part of the result, [B, Hq, N/W, Dv], and with
    return_lse its natural-log sum of exponentials over all keys, float32 [B, Hq, N/W]. Both are differentiable, and
    deterministic. return_max_logits adds the largest score of each head in the whole sequence, float32 [B, Hq], the
    same on all ranks.

    layout      "zigzag": of 2W equal chunks rank r holds r and 2W - 1 - r, which makes causal work equal; "contiguous":
                of W chunks rank r holds r, and the last one has the most to do.
    causal, scale, softcap as in ffpa.
    sinks       [Hq], as in ffpa: those of all heads, on every rank. A rank's gradient of them is its own share, to be
                added up over the ranks (all-reduced) as that of any parameter that all of them hold.

    While a rank computes on one rank's K and V, those of the next one travel. The backward sends them once more, and
    their gradients home one step later, where they are summed in float32. GPUs of one host copy into each other's
    memory, which a group keeps; others send messages. An error on one rank leaves the others waiting, copies without
    NCCL's timeout.

    Before anything moves, the hosts of the ranks compare each kind of call (shapes, dtype, options, whether a gradient
    is wanted) that is new to the group, and where it differs all raise; at every call on the CPU, and under
    FFPA_CHECK=1. A rank alone with a new kind raises after the process group's timeout, while the others, whose kind is
    known, wait for it. Ranks whose kinds are different but known compute what is wrong, and are told so no more than
    512 calls later. A group whose ranks may no longer be at the same call raises at every later one.
    """
    given = causal, scale, softcap, return_lse, sinks, return_max_logits
    q, k, v, rule = sequence_shards.checked(ring_attention, unknown, group, q, k, v, layout, *given)
    rank, world = sequence_shards.rank_and_world(group)
    if world == 1:
        return ffpa(q, k, v, **rule, return_lse=return_lse, sinks=sinks, return_max_logits=return_max_logits)
    ring = _Ring(group, rank, world, layout, rule.pop("causal"), rule, return_max_logits)
    out, lse, *largest = _RingAttention.apply(q, k, v, sinks, ring)
    return forms.results(out, lse, largest, return_lse)


class _Part(NamedTuple):
    """The rows at home that see some of the K and V at hand, and what they see of it."""

    first: int  # first row
    end: int  # end of the keys
    causal: bool

    def rows(self, x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[:, :, self.first :]

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, : self.end]


class _Ring(NamedTuple):
    """Who the ranks of a call are, and what they compute."""

    group: dist.ProcessGroup | None
    rank: int
    world: int
    layout: str
    causal: bool
    rule: dict  # the operators' other keyword arguments
    finds_largest: bool  # the largest scores are wanted

    def turns(self, k, v) -> Iterator[tuple[int, _Part | None, list[torch.Tensor]]]:
        """Gives this rank's own K and V, then each earlier rank's; while the caller computes, the next ones travel."""
        own = at_hand = [x.contiguous() for x in (k, v)]
        keys = exchange(self.group, own, min(3, self.world - 1), ahead=True)
        for step in range(self.world):
            is_last = step == self.world - 1
            wait = None if is_last else keys.post(own, self.at(step + 1), self.at(-step - 1), k.shape[2])
            yield step, self.visible(self.rank, self.at(-step), k.shape[2]), at_hand
            at_hand = None if is_last else wait()
        keys.finish()

    def at(self, distance: int) -> int:
        return (self.rank + distance) % self.world

    def visible(self, rank: int, source: int, rows: int) -> _Part | None:
        """Returns what a rank sees of the K and V of another."""
        if source == rank or not self.causal:
            return _Part(0, rows, self.causal)
        earlier = source < rank
        if self.layout == "contiguous":
            return _Part(0, rows, False) if earlier else None
        # An earlier rank's first chunk lies before both of ours and its second after both; a later rank's chunks lie
        # between ours.
        return _Part(0, rows // 2, False) if earlier else _Part(rows // 2, rows, False)

    def give_home(self, home: Exchange, step: int, grads: Sequence[torch.Tensor], rows: int) -> Wait:
        """Sends gradients to the rank whose K and V that step had at hand; the rank that had ours has some for us."""
        to, source = self.at(-step), self.at(step)
        for_us = self.visible(source, self.rank, rows)
        grads = [x.contiguous() for x in grads]
        return home.post(grads, to, source if for_us else None, for_us.end if for_us else 0)


# So many results are merged in one pass, which reads and writes the sums in float32; till then they take memory.
_MERGED_AT_ONCE = 4


class _Sums:
    """Attention over all turns' keys: float32 sums, and the last turns' results, of the same rows, to be merged in."""

    def __init__(self, q, d_v: int, at_once: int):
        self.first_row = 0
        self.results = q.new_empty(at_once, *q.shape[:-1], d_v)
        self.lses: list[torch.Tensor] = []  # LSEs of the results that wait
        self.out = self.top = self.total = None

    def place_for(self, first_row: int) -> torch.Tensor:
        """Returns where to write the next result."""
        if first_row != self.first_row or len(self.lses) == len(self.results):
            self.merge()
            self.first_row = first_row
        return self.results[len(self.lses)]

    def merge(self) -> None:
        first = self.out is None  # the first results are of all rows, as each sees itself
        if first:
            self.out = self.results.new_empty(self.results.shape[1:], dtype=torch.float32)
            self.top, self.total = (torch.empty_like(self.lses[0]) for _ in range(2))
        out, results = (x[..., self.first_row :, :] for x in (self.out, self.results[: len(self.lses)]))
        sums = (x[:, :, self.first_row :] for x in (self.top, self.total))
        merge_into(out, *sums, results, torch.stack(self.lses), first)
        self.lses.clear()

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Adds the sinks as a part of the keys whose LSE they are, and whose result is 0."""
        self.place_for(0).zero_()
        self.lses.append(sinks.to(torch.float32)[:, None].expand(self.results.shape[1:-1]))

    def lse(self) -> torch.Tensor:
        return self.total.log_().add_(self.top)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, ring: _Ring):
        sums = _Sums(q, v.shape[3], min(ring.world, _MERGED_AT_ONCE))
        largest = [q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)] if ring.finds_largest else []
        forward = torch.ops.ffpa_attn.forward_out_max_logits if largest else torch.ops.ffpa_attn.forward_out
        for _, part, at_hand in ring.turns(k, v):
            if part:
                place = part.rows(sums.place_for(part.first))
                results = forward(part.rows(q), *map(part.keys, at_hand), place, causal=part.causal, **ring.rule)
                sums.lses.append(results[0] if largest else results)
                for here in largest:
                    torch.maximum(here, results[1], out=here)
        if sinks is not None:
            sums.add_sinks(sinks)
        sums.merge()
        out, lse = sums.out.to(q.dtype), sums.lse()
        for here in largest:
            dist.all_reduce(here, dist.ReduceOp.MAX, ring.group)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.ring = ring
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*largest)
        return out, lse, *largest

    @staticmethod
    @first_order_only
    def backward(ctx, saved, grad_out, grad_lse, *_):
        q, k, v, out, lse, sinks = saved
        ring: _Ring = ctx.ring
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        of_sinks = delta = None
        if ctx.needs_input_grad[3]:
            of_sinks, delta = gradient_of_sinks(grad_out, grad_lse, out, lse, sinks)
        if not any(ctx.needs_input_grad[:3]):
            return None, None, None, of_sinks, None
        dq = sums = home = None  # `sums` are those of the gradients of this rank's K and V
        pieces = []
        for step, part, at_hand in ring.turns(k, v):
            # While this step is computed, gradients travel that the last one gave for others' K and V.
            wait = ring.give_home(home, step - 1, pieces, k.shape[2]) if step > 1 else None
            pieces = []
            if part:
                *pieces, _ = torch.ops.ffpa_attn.backward(
                    *map(part.rows, (grad_out, grad_lse, q)), *map(part.keys, at_hand), *map(part.rows, (out, lse)),
                    delta=part.rows(delta), causal=part.causal, **ring.rule, fp32_grads=True,
                )  # fmt: skip
            if step == 0:
                dq, *sums = pieces
                home = exchange(ring.group, sums, 1, ahead=False)
            elif part:
                part.rows(dq).add_(pieces.pop(0))
            if wait:
                _add(sums, wait())
        wait = ring.give_home(home, ring.world - 1, pieces, k.shape[2])
        _add(sums, wait())
        home.finish()
        return dq.to(q.dtype), *(x.to(q.dtype) for x in sums), of_sinks, None


def _add(sums: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
    """Adds pieces to the first rows of the sums."""
    for total, piece in zip(sums, pieces):  # noqa: B905 - no rank may have seen these keys
        total[:, :, : piece.shape[2]].add_(piece)
