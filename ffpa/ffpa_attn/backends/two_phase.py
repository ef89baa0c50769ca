"""This is the forward for wide head dims in two phases: P of a row tile goes to scratch; the product with V reads it.

Neither registers nor shared memory hold O of such a head dim. P costs less to store than S to compute again, or O to
move for every tile of keys. `plan` and `cut` are pure: shape, cap and the number of multiprocessors decide the order of
sums, and so every bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..specs import archs
from ..specs.spec import (
    TWO_PHASE_COLUMNS,
    TWO_PHASE_MMA_COLUMNS,
    ForwardMmaTwoPhase,
    ForwardWgmmaTwoPhase,
    Problem,
    Visibility,
)
from . import row_tiles
from .row_tiles import HEAD_BYTES, ROWS, Scratch

KEYS, BOX = 256, 64  # keys of a tile; rows and columns of a box of TMA's: csrc/attention/forward/*_two_phase.cuh
MOST_KEYS = 1 << 19  # keys of a chunk, a multiple of KEYS: kernels have bits for so many tiles
# These are measured on an H200: below, what registers hold is faster; at 576 levels are as fast as two phases on mma.
LEAST_HEAD_DIM = {"hopper": 513, "mma": 640}
_LEAST_TILES = 4  # tiles of a chunk, if there are more: with fewer, moving O between chunks takes what the levels would


class TwoPhasePlan(row_tiles.RowTilePlan):
    __slots__ = ()

    def scratch(self, tiles: int, n_k: int, d_v: int, see: Visibility, multiprocessors: int, cap: int) -> Scratch:
        return cut(tiles, n_k, see, d_v, self.spec.columns, multiprocessors, cap)


def why_slower(p: Problem, backend: str, flags: Mapping[str, Any]) -> str | None:
    """Says why the levels of the mma forward are faster, or None: see row_tiles; and they need less workspace."""
    if reason := row_tiles.why_slower(p):
        return reason
    tiles, multiprocessors = row_tiles.count(p), archs.multiprocessors(p.arch)
    blocks, chunk_keys, _ = _cut(p, backend, tiles, multiprocessors, flags)
    if blocks < row_tiles.least_blocks(p) or chunk_keys < min(_LEAST_TILES, _tiles(p.n_k, p.visibility)) * KEYS:
        return f"FFPA_WORKSPACE_MB={flags['FFPA_WORKSPACE_MB']} holds {blocks} blocks and {chunk_keys} keys of each, too few"
    return None


def _tiles(n_k: int, see: Visibility) -> int:
    """Returns how many tiles of keys one row tile meets at most."""
    tiles = -(-n_k // KEYS)
    if see.left >= 0 and see.right >= 0:
        tiles = min(tiles, (see.left + see.right + ROWS + KEYS - 2) // KEYS + 1)
    return tiles


def cut(
    row_tiles_in_all: int, n_k: int, see: Visibility, d_v: int, columns: int, multiprocessors: int, cap: int
) -> Scratch:
    """Takes all keys at once if they fit; else as many as do, beside O, which then waits in fp32; and if not even a
    tile of them does for all blocks, fewer blocks.
    """
    cap -= HEAD_BYTES
    of_tile = ROWS * (KEYS * 2 + 4)  # bytes of P, and of the references of its rows
    out = -(-d_v // columns) * columns * ROWS * 4
    blocks, all_tiles = min(row_tiles_in_all, multiprocessors), _tiles(n_k, see)
    if blocks * all_tiles * of_tile <= cap and all_tiles * KEYS <= MOST_KEYS:
        return Scratch(blocks, all_tiles * KEYS, HEAD_BYTES + blocks * all_tiles * of_tile)
    blocks = max(1, min(blocks, cap // (of_tile + out)))
    most = min(all_tiles, MOST_KEYS // KEYS, max(1, (cap // blocks - out) // of_tile))
    tiles = -(-all_tiles // -(-all_tiles // most))  # tiles of each chunk, all about as large
    return Scratch(blocks, tiles * KEYS, HEAD_BYTES + blocks * (tiles * of_tile + out))


def _columns(d_v: int) -> int:
    """Returns the most columns of O at a time on wgmma: as many as registers hold, and about as many each time."""
    boxes = -(-d_v // BOX)
    times = -(-boxes * BOX // TWO_PHASE_COLUMNS[-1])
    return max(-(-boxes // times) * BOX, TWO_PHASE_COLUMNS[0])


def _spec(p: Problem, backend: str) -> ForwardWgmmaTwoPhase | ForwardMmaTwoPhase:
    if backend == "mma":
        return ForwardMmaTwoPhase(p.dtype, TWO_PHASE_MMA_COLUMNS)
    return ForwardWgmmaTwoPhase(p.dtype, _columns(p.d_v))


def _cut(p: Problem, backend: str, row_tiles_in_all: int, multiprocessors: int, flags: Mapping[str, Any]) -> Scratch:
    columns, cap = _spec(p, backend).columns, flags["FFPA_WORKSPACE_MB"] << 20
    return cut(row_tiles_in_all, max(p.n_k, 1), p.visibility, p.d_v, columns, multiprocessors, cap)


def plan(p: Problem, backend: str, flags: Mapping[str, Any]) -> TwoPhasePlan | str:
    """Returns what runs the problem, or why it cannot. `backend` is hopper or mma."""
    if max(p.d_qk, p.d_v) < LEAST_HEAD_DIM[backend]:
        return f"there is no {backend} kernel for a two-phase forward of fewer than {LEAST_HEAD_DIM[backend]} columns"
    if reason := row_tiles.why_not(p, "two-phase", flags):
        return reason
    least = _cut(p, backend, 1, 1, flags).scratch_bytes
    if least > flags["FFPA_WORKSPACE_MB"] << 20:
        return f"the two-phase forward needs {-(-least >> 20)} MiB of workspace for {ROWS} rows"
    return TwoPhasePlan(_spec(p, backend))
