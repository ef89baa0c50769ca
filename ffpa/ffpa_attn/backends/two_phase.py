"""This is the forward for wide head dims in two phases: P of a row tile goes to scratch; the product with V reads it.

Neither registers nor shared memory hold O of such a head dim. P costs less to store than S to compute again, or O to
move for every tile of keys. `plan` and `cut` are pure: shape, cap and the number of multiprocessors decide the order of
sums, and so every bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..specs import archs
from ..specs.problem import Problem, Visibility
from ..specs.spec import TWO_PHASE_COLUMNS, TWO_PHASE_MMA_COLUMNS, ForwardMmaTwoPhase, ForwardWgmmaTwoPhase
from . import levels, row_tiles
from .row_tiles import HEAD_BYTES, ROWS, Pace, Parts, Scratch

KEYS, BOX = 256, 64  # keys of a tile; rows and columns of a box of TMA's: csrc/attention/forward/*_two_phase.cuh
MOST_KEYS = 1 << 19  # keys of a chunk, a multiple of KEYS: kernels have bits for so many tiles
# These are measured on an H200: below, what registers hold is faster; at 576 levels are as fast as two phases on mma.
LEAST_HEAD_DIM = {"hopper": 513, "mma": 640}
# These are estimates; on an H100 the parts they choose were within 3% of the fastest in 15 of 16 shapes.
_SPEED = {ForwardWgmmaTwoPhase: 4.8, ForwardMmaTwoPhase: 2.75}  # TFLOPS of a multiprocessor, over computed columns
_ENDS = {ForwardWgmmaTwoPhase: 8.0, ForwardMmaTwoPhase: 10.0}  # microseconds of an item's ends, and of its wait for P
_BANDWIDTH = 3.4e6  # bytes of K and V a microsecond, on an H200, beside P
_MMA_STEP, _MMA_COLUMNS = 32, 128  # columns of a step of S, and the fewest of O, on mma.sync
_LEAST_TILES = 4  # tiles of a chunk, if there are more: with fewer, moving O between chunks takes what the levels would

_Spec = ForwardWgmmaTwoPhase | ForwardMmaTwoPhase


class TwoPhasePlan(row_tiles.RowTilePlan):
    __slots__ = ()

    def scratch(self, tiles: int, n_k: int, d_v: int, see: Visibility, multiprocessors: int, cap: int) -> Scratch:
        return cut(tiles, _keys_of_item(n_k, self.parts), see, d_v, self.spec.columns, multiprocessors, cap)


def why_slower(p: Problem, plan: TwoPhasePlan, flags: Mapping[str, Any]) -> str | None:
    """Says why the levels of the mma forward are faster, or None: they need less workspace, and have smaller tiles."""
    workspace_cap = flags["FFPA_WORKSPACE_MB"] << 20
    (blocks, chunk_keys, _), items = _cut(p, plan.spec, plan.tile_heads, plan.parts, workspace_cap)
    tiles = _tiles(_keys_of_item(p.n_k, plan.parts), p.visibility)
    if blocks < min(items, row_tiles.least_blocks(p)) or chunk_keys < min(_LEAST_TILES, tiles) * KEYS:
        return f"FFPA_WORKSPACE_MB={flags['FFPA_WORKSPACE_MB']} holds {blocks} blocks and {chunk_keys} keys of each, too few"
    return levels.why_faster(p, plan, flags) if row_tiles.why_slower(p) else None


def _keys_of_item(n_k: int, parts: Parts) -> int:
    return min(n_k, parts.keys) if parts.count > 1 else n_k


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
    of_all = all_tiles * of_tile
    if all_tiles * KEYS <= MOST_KEYS and (blocks * of_all <= cap or of_all <= cap < of_tile + out):
        blocks = min(blocks, cap // of_all)
        return Scratch(blocks, all_tiles * KEYS, HEAD_BYTES + blocks * of_all)
    blocks = max(1, min(blocks, cap // (of_tile + out)))
    most = min(all_tiles, MOST_KEYS // KEYS, max(1, (cap // blocks - out) // of_tile))
    tiles = -(-all_tiles // -(-all_tiles // most))  # tiles of each chunk, all about as large
    return Scratch(blocks, tiles * KEYS, HEAD_BYTES + blocks * (tiles * of_tile + out))


def _columns(d_v: int) -> int:
    """Returns the most columns of O at a time on wgmma: as many as registers hold, and about as many each time."""
    boxes = -(-d_v // BOX)
    times = -(-boxes * BOX // TWO_PHASE_COLUMNS[-1])
    return max(-(-boxes // times) * BOX, TWO_PHASE_COLUMNS[0])


def _spec(p: Problem, backend: str) -> _Spec:
    if backend == "mma":
        return ForwardMmaTwoPhase(p.dtype, TWO_PHASE_MMA_COLUMNS)
    return ForwardWgmmaTwoPhase(p.dtype, _columns(p.d_v), p.pages is not None)


def _cut(p: Problem, spec: _Spec, tile_heads: int, parts: Parts, cap: int) -> tuple[Scratch, int] | None:
    """Returns the scratch beside the results of parts, and how many items share it; None where the cap holds no block."""
    rows = p.batch * p.heads_q * p.n_q
    cap -= 4 * rows * row_tiles.floats_of_row(parts, p.d_v) if parts.count > 1 else 0
    items = max(row_tiles.count(p, tile_heads=tile_heads), 1) * parts.count
    keys, multiprocessors = _keys_of_item(max(p.n_k, 1), parts), archs.multiprocessors(p.arch or "sm_90")
    scratch = cut(items, keys, p.visibility, p.d_v, spec.columns, multiprocessors, cap)
    return (scratch, items) if scratch.scratch_bytes <= cap else None


def _microseconds(p: Problem, spec: _Spec, tile_heads: int, workspace_cap: int, parts: Parts) -> float:
    """Estimates a call on an otherwise idle GPU, with as many blocks as the workspace holds."""
    found = _cut(p, spec, tile_heads, parts, workspace_cap)
    if found is None:
        return float("inf")
    (blocks, _, _), items = found
    multiprocessors = archs.multiprocessors(p.arch or "sm_90")
    blocks = multiprocessors if blocks == min(items, multiprocessors) else blocks
    of_qk, of_v = (BOX, BOX) if isinstance(spec, ForwardWgmmaTwoPhase) else (_MMA_STEP, _MMA_COLUMNS)
    computed = -(-p.d_qk // of_qk) * of_qk + -(-p.d_v // of_v) * of_v
    of_key = 2 * ROWS * computed / (_SPEED[type(spec)] * 1e6)
    pace = Pace(ROWS, KEYS, blocks, of_key, _ENDS[type(spec)], p.d_qk + p.d_v, _BANDWIDTH)
    return row_tiles.microseconds(p, pace, tile_heads, parts)


def _parts(p: Problem, spec: _Spec, tile_heads: int, flags: Mapping[str, Any]) -> tuple[float, Parts]:
    """Returns the parts that take the shortest, and how long."""
    cap = flags["FFPA_WORKSPACE_MB"] << 20
    return row_tiles.fastest_parts(p, ROWS, KEYS, tile_heads, cap, _microseconds, spec, tile_heads, cap)


def plan(p: Problem, backend: str, flags: Mapping[str, Any]) -> TwoPhasePlan | str:
    """Returns what runs the problem, or why it cannot. `backend` is hopper or mma."""
    if p.pages and backend == "mma":
        return "the two-phase forward on mma knows no pages"
    if max(p.d_qk, p.d_v) < LEAST_HEAD_DIM[backend]:
        return f"there is no {backend} kernel for a two-phase forward of fewer than {LEAST_HEAD_DIM[backend]} columns"
    if reason := row_tiles.why_not(p, "two-phase", flags):
        return reason
    spec = _spec(p, backend)
    least = cut(1, max(p.n_k, 1), p.visibility, p.d_v, spec.columns, 1, flags["FFPA_WORKSPACE_MB"] << 20).scratch_bytes
    if least > flags["FFPA_WORKSPACE_MB"] << 20:
        return f"the two-phase forward needs {-(-least >> 20)} MiB of workspace for {ROWS} rows"
    tile_heads = row_tiles.shared_heads(p)
    microseconds, parts = _parts(p, spec, tile_heads, flags)
    return TwoPhasePlan(spec, tile_heads, parts, microseconds)
