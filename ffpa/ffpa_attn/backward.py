"""The backward on our kernels: P and dS are computed once, into a workspace, and the gradients are three products of them.

At large head dims the N² intermediates cost less to store than to compute again. Chunk after chunk of the problem fits the
workspace. `plan` and `chunks` are pure: the order of sums, and with it every bit, follows from shape and cap alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from . import checks
from .spec import (
    MMA_PRODUCT_TILES,
    PRODUCT_TILES,
    BackwardProductsMma,
    BackwardProductsWgmma,
    BackwardRows,
    BackwardScoresMma,
    BackwardScoresWgmma,
    Problem,
)

ROW_TILE, KEY_TILE, LIVE_ROWS = 256, 256, 64  # as csrc/attention/backward_params.h
_BYTES_OF_PAIR = 4  # P and dS
_ENOUGH_TILES = 2048  # of a chunk: more gain nothing
_MOST_POSITIONS = 2**31 - 1024  # row + key, and a tile beyond both


class BackwardPlan(NamedTuple):
    rows: BackwardRows
    scores: BackwardScoresWgmma | BackwardScoresMma
    of_q: BackwardProductsWgmma | BackwardProductsMma
    of_k: BackwardProductsWgmma | BackwardProductsMma

    @property
    def kernel(self) -> str:
        return self.scores.name

    @property
    def specs(self) -> tuple:
        return tuple(self)


class Chunk(NamedTuple):
    """Of the key/value heads of all batch entries [first_entry, + entries); of the row tiles of each, and of the keys."""

    first_entry: int
    entries: int
    first_tile: int
    end_tile: int
    first_key: int
    end_key: int
    of_q: bool  # gives dQ
    of_k: bool  # gives dK and dV, or a part of their sums


# The kernels of a backend, and the tiles of its products.
_FAMILIES = {
    "hopper": (BackwardScoresWgmma, BackwardProductsWgmma, PRODUCT_TILES),
    "mma": (BackwardScoresMma, BackwardProductsMma, MMA_PRODUCT_TILES),
}


def _product_tile(tiles: tuple[tuple[int, ...], ...], *head_dims: int) -> tuple[int, ...]:
    """The tile that computes the fewest columns in vain; the widest one of equals."""
    return min(reversed(tiles), key=lambda tile: sum(-(-d // tile[-1]) * tile[-1] for d in head_dims))


def plan(p: Problem, backend: str) -> BackwardPlan | str:
    """`backend`: hopper or mma. Whether its kernels are built is another question."""
    if p.n_q + p.n_k > _MOST_POSITIONS:
        return f"the backward counts positions in 32 bits, and {p.n_q} rows with {p.n_k} keys are too many"
    scores, products, tiles = _FAMILIES[backend]
    tile = _product_tile(tiles, p.d_qk, p.d_qk, p.d_v)
    of_q, of_k = (products(p.dtype, *tile, of_q) for of_q in (True, False))
    return BackwardPlan(BackwardRows(p.dtype), scores(p.dtype), of_q, of_k)


class _Sizes(NamedTuple):
    """What a chunk is cut from."""

    entries: int
    group: int
    n_q: int
    n_k: int
    partial_of_key: int  # bytes of fp32 sums of dK and dV

    @property
    def tiles(self) -> int:
        return self.group * -(-self.n_q // ROW_TILE)

    @property
    def keys(self) -> int:
        return -(-self.n_k // KEY_TILE) * KEY_TILE


def _parts(count: int, most: int) -> Iterator[tuple[int, int]]:
    """[0, count) in parts of at most `most`, all about as large."""
    parts = -(-count // max(most, 1))
    size = -(-count // parts)
    for first in range(0, count, size):
        yield first, min(first + size, count)


def chunks(sizes: _Sizes, cap: int) -> Iterator[Chunk]:
    """Whole entries if one fits; else row tiles of one; and if the sums of dK and dV do not fit beside them, dQ by row tiles,
    and then dK and dV by keys.
    """
    cap = min(cap, _ENOUGH_TILES * ROW_TILE * KEY_TILE * _BYTES_OF_PAIR)
    of_tile = ROW_TILE * sizes.keys * _BYTES_OF_PAIR
    of_entry = sizes.tiles * of_tile
    if of_entry <= cap:
        for first, end in _parts(sizes.entries, cap // of_entry):
            yield Chunk(first, end - first, 0, sizes.tiles, 0, sizes.keys, True, True)
        return
    partial = sizes.keys * sizes.partial_of_key
    for entry in range(sizes.entries):
        if partial + of_tile * 4 <= cap:
            for first, end in _parts(sizes.tiles, (cap - partial) // of_tile):
                yield Chunk(entry, 1, first, end, 0, sizes.keys, True, True)
            continue
        for first, end in _parts(sizes.tiles, cap // of_tile):
            yield Chunk(entry, 1, first, end, 0, sizes.keys, True, False)
        of_key_tile = KEY_TILE * (ROW_TILE * _BYTES_OF_PAIR + sizes.partial_of_key)  # with one row tile
        key_tiles = max(1, min(sizes.keys // KEY_TILE, cap // 4 // of_key_tile))
        for first_key, end_key in _parts(sizes.keys // KEY_TILE, key_tiles):
            keys = (end_key - first_key) * KEY_TILE
            row_tiles = (cap - keys * sizes.partial_of_key) // (ROW_TILE * keys * _BYTES_OF_PAIR)
            for first, end in _parts(sizes.tiles, row_tiles):
                yield Chunk(entry, 1, first, end, first_key * KEY_TILE, end_key * KEY_TILE, False, True)


def _as_read(x: torch.Tensor) -> torch.Tensor:
    """dO as autograd made it may have no rows that could be read where they lie: that of a sum is one number."""
    expanded = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if expanded or checks.rows_problem(x) else x


def backward(
    plan: BackwardPlan, grad_out, grad_lse, q, k, v, out, lse, dq, dk, dv, mask, offsets, rule, workspace_cap: int
) -> None:
    """All but lse as [B, H, N, D] views, or [H, T, D] with offsets and longest lengths of packed sequences."""
    if offsets:  # rows of no sequence
        for grad in (dq, dk, dv):
            grad.zero_()
    longest_q, longest_k = offsets[2:] if offsets else (q.shape[-2], k.shape[-2])
    n_q, n_k = min(longest_q, q.shape[-2]), min(longest_k, k.shape[-2])
    batch = len(offsets[0]) - 1 if offsets else len(q)
    heads_q, heads_kv = q.shape[-3], k.shape[-3]
    if not (n_q and n_k and batch and heads_q):
        for grad in (dq, dk, dv):
            grad.zero_()
        return
    if q.is_cuda:
        from . import native

        gpu, run, blocks = (
            native.gpu_of(q.device),
            native.library().attention_backward,
            native.multiprocessors(q.device),
        )

        def kernel(spec):
            return native.kernel(spec, gpu)
    else:
        from . import emulated

        run, blocks = emulated.attention_backward, emulated.RESIDENT_BLOCKS

        def kernel(spec):
            return spec

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    columns = plan.of_k.columns
    sums_of_key = (-(-q.shape[-1] // columns) - (-v.shape[-1] // columns)) * columns
    sizes = _Sizes(batch * heads_kv, heads_q // heads_kv, n_q, n_k, sums_of_key * 4)
    all_chunks = list(chunks(sizes, workspace_cap))
    pairs = max(c.entries * (c.end_tile - c.first_tile) * ROW_TILE * (c.end_key - c.first_key) for c in all_chunks)
    in_parts = any(c.of_k and c.end_tile - c.first_tile < sizes.tiles for c in all_chunks)
    most_keys = max(c.end_key - c.first_key for c in all_chunks if c.of_k)
    p, ds = (empty(pairs, dtype=q.dtype) for _ in range(2))
    partial = empty(most_keys * sums_of_key, dtype=torch.float32) if in_parts else None
    statistics = empty(*lse.shape, 2, dtype=torch.float32)
    live_rows = empty(batch * heads_q * -(-n_q // LIVE_ROWS), dtype=torch.int64)

    see = rule.visibility
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    call = (
        q, k, v, out, _as_read(grad_out), lse.contiguous(), grad_lse, mask, *(offsets or (None, None, 0, 0)), rule.scale, rule.softcap, see.left, see.right,
        see.top_left, blocks, dq, dk, dv, statistics, live_rows, p, ds, partial,
    )  # fmt: skip
    run(kernel(plan.rows), *call, *all_chunks[0][:6])
    for chunk in all_chunks:
        run(kernel(plan.scores), *call, *chunk[:6])
        if chunk.of_q:
            run(kernel(plan.of_q), *call, *chunk[:6])
        if chunk.of_k:
            run(kernel(plan.of_k), *call, *chunk[:6])
