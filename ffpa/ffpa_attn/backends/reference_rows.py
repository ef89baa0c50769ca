"""These are the rows of a sequence as the reference path loads and stores them: dense, packed, or in the pages of a pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..launching.attention_call import Pages
from ..specs.problem import Visibility

Block = tuple[int, int]  # [first, past the last)

_INF = float("inf")


class Dense:
    """The rows of one batch entry: everything is a slice."""

    def __init__(self, batch: int, length: int):
        self.batch, self.length, self.true_length = batch, length, length

    def load(self, x: torch.Tensor, heads: slice, rows: Block, outside: float = 0) -> torch.Tensor:
        return x[self.batch, heads, rows[0] : rows[1]]

    def store(self, x: torch.Tensor, heads: slice, rows: Block, value: torch.Tensor) -> None:
        x[self.batch, heads, rows[0] : rows[1]] = value

    store_lse = store


class Packed:
    """The rows of one packed sequence: start and length live on the device, `length` is only their bound."""

    def __init__(self, start: torch.Tensor, true_length: torch.Tensor, bound: int, total: int):
        self.start, self.true_length, self.length, self.total = start, true_length, bound, total

    def _index(self, rows: Block) -> tuple[torch.Tensor, torch.Tensor]:
        position = torch.arange(*rows, device=self.start.device)
        return (self.start + position).clamp(0, self.total - 1), position >= self.true_length

    def load(self, x: torch.Tensor, heads: slice, rows: Block, outside: float = 0) -> torch.Tensor:
        index, beyond = self._index(rows)
        value = x[heads].index_select(1, index)
        return value.masked_fill_(beyond.view(-1, *(1,) * (x.dim() - 2)), outside)

    def store(self, x: torch.Tensor, heads: slice, rows: Block, value: torch.Tensor) -> None:
        """Adds values to zeros: rows outside add 0 to wherever their clamped index points, so no row is ever lost."""
        index, beyond = self._index(rows)
        x[heads].index_add_(1, index, value.masked_fill(beyond[:, None], 0).to(x.dtype))

    def store_lse(self, x: torch.Tensor, heads: slice, rows: Block, value: torch.Tensor) -> None:
        index, beyond = self._index(rows)
        value = value.masked_fill(beyond, -_INF)
        x[heads].scatter_reduce_(1, index.expand_as(value), value, "amax")


class ScaledPool:
    """8-bit numbers in pages times the scale of their head, of which only what is asked for ever exists, in float32."""

    dtype = torch.float32

    def __init__(self, pool: torch.Tensor, scale: torch.Tensor | None):
        self.pool, self.scale, self.shape, self.device = pool, scale, pool.shape, pool.device

    def rows(self, heads: slice, page: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Returns rows of these heads, [rows, heads, columns]."""
        values = self.pool.view(torch.uint8)[:, heads][page, :, row].view(self.pool.dtype).float()
        return values if self.scale is None else values.mul_(self.scale.expand(self.shape[1])[heads, None])


class Paged:
    """The keys of one sequence, in pages of a pool [pages, heads, rows of a page, columns]: `table` has the pages, `first`
    the row on which the first begins. Only the keys of `needed` are read, [first, past the last) on the device: elsewhere,
    and where the pool has no such row, keys are zeros.
    """

    def __init__(self, table: torch.Tensor, first, true_length: torch.Tensor, bound: int, needed: tuple):
        self.table, self.first, self.true_length, self.length, self.needed = table, first, true_length, bound, needed

    def load(self, x: torch.Tensor, heads: slice, rows: Block, outside: float = 0) -> torch.Tensor:
        pages, _, rows_of_page, _ = x.shape
        position = torch.arange(*rows, device=x.device)
        least, end = self.needed
        row = position + self.first
        page = self.table[(row // rows_of_page).clamp(0, len(self.table) - 1)]
        there = (row >= 0) & (row < len(self.table) * rows_of_page) & (page >= 0) & (page < pages)
        there &= (position >= least) & (position < end) & (position < self.true_length)
        if not pages:
            return torch.zeros(x.shape[1], len(position), x.shape[3], dtype=x.dtype, device=x.device)[heads]
        place = torch.where(there, page, 0), row % rows_of_page
        value = x.rows(heads, *place) if isinstance(x, ScaledPool) else x[:, heads][place[0], :, place[1]]
        value = value.transpose(0, 1)
        return value.masked_fill_(~there[:, None], outside)


class Sequence(NamedTuple):
    """Queries and keys that meet each other, and the mask between them ([H|1, n_q|1, n_k|1] or None)."""

    queries: Dense | Packed
    keys: Dense | Packed | Paged
    mask: torch.Tensor | None


def dense_sequences(q, k, mask) -> Iterator[Sequence]:
    """Gives the sequences of q and k [B, H, N, D], with their parts of mask [B|1, H|1, n_q|1, n_k|1] or None."""
    for b in range(q.shape[0]):
        entry = None if mask is None else mask[b if mask.shape[0] > 1 else 0]
        yield Sequence(Dense(b, q.shape[2]), Dense(b, k.shape[2]), entry)


def packed_sequences(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q: int, max_seqlen_k: int) -> Iterator[Sequence]:
    """Splits q and k [H, T, D]. A length counts as clamped to [0, max_seqlen], and no row leaves the tensor."""
    sides = _packed_side(q, cu_seqlens_q, max_seqlen_q), _packed_side(k, cu_seqlens_k, max_seqlen_k)
    for queries, keys in zip(*sides, strict=True):
        yield Sequence(queries, keys, None)


def paged_sequences(q, k, offsets, pages: Pages, see: Visibility) -> Iterator[Sequence]:
    """Gives the sequences of q, [B, H, N, D] or [H, T, D] with offsets, whose keys are in the pages of k."""
    queries = _packed_side(q, offsets[0], offsets[2]) if offsets else [Dense(b, q.shape[2]) for b in range(len(q))]
    lengths = key_lengths(pages)
    bounds = _bounds(lengths, pages.longest)
    for i, (rows, length, bound) in enumerate(zip(queries, lengths, bounds, strict=True)):
        table = torch.full((1,), i, device=k.device) if pages.table is None else pages.table[i]
        first = 0 if pages.first is None else pages.first[i].long()
        yield Sequence(
            rows, Paged(table.long(), first, length, bound, needed_keys(see, rows.true_length, length)), None
        )


def key_lengths(pages: Pages) -> torch.Tensor:
    """Returns the keys of each sequence, int64 [B], on the device."""
    lengths = pages.used.long() + pages.more
    if pages.added is not None:
        lengths = lengths + pages.added.long().diff()
    if pages.first is not None:
        lengths = lengths - pages.first
    return lengths.clamp(0, pages.longest)


def needed_keys(see: Visibility, n_q, n_k) -> tuple:
    """Returns a range [first, past the last) that holds all keys that rows of a sequence see; it may be longer than n_k."""
    shift = 0 if see.top_left else n_k - n_q
    return shift - see.left if see.left >= 0 else 0, n_k if see.right < 0 else n_q + shift + see.right


def _packed_side(x, cu: torch.Tensor, longest: int) -> list[Packed]:
    total = x.shape[1]
    bound = min(longest, total)
    starts = cu[:-1].clamp(0, total)
    lengths = torch.minimum((cu[1:].clamp(0, total) - starts), torch.full_like(starts, bound)).clamp_(min=0)
    return [Packed(*one, total) for one in zip(starts, lengths, _bounds(lengths, bound), strict=True)]


def _lengths_may_be_read(lengths: torch.Tensor) -> bool:
    """Says whether lengths can be read without waiting for a GPU: the true lengths save work."""
    return not lengths.is_cuda


def _bounds(lengths: torch.Tensor, longest: int) -> list[int]:
    return lengths.tolist() if _lengths_may_be_read(lengths) else [longest] * len(lengths)
