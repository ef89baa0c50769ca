"""The forward for wide head dims in two phases: P of a row tile into scratch, and from there the product with V.

Neither registers nor shared memory hold O of such a head dim. P costs less to store than S to compute again, or O to move for
every tile of keys. `plan` and `cut` are pure: the order of sums, and with it every bit, follows from shape, cap and the number
of multiprocessors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from . import archs, env
from .spec import (
    MOST_POSITIONS,
    TWO_PHASE_COLUMNS,
    TWO_PHASE_MMA_COLUMNS,
    ForwardTwoPhase,
    ForwardTwoPhaseMma,
    Problem,
    Visibility,
)

ROWS, KEYS, BOX = 128, 256, 64  # of a tile, and of what TMA brings at a time, as csrc/attention/forward_two_phase*.cuh
MOST_KEYS = 1 << 19  # of a chunk, a multiple of KEYS: as many tiles as the kernels have bits for
# As measured on an H200: below, cuDNN is faster than wgmma; and, at 576, the levels are as fast as two phases on mma.sync.
LEAST_HEAD_DIM = {"hopper": 257, "mma": 640}
_HEAD_BYTES = 512  # of the scratch: what blocks share
_LEAST_TILES = 4  # of a chunk, if there are more: with fewer, moving O between chunks takes what the levels would
_MOST_ROW_TILES = 2**31 - 2**16  # counted in 32 bits, in which each block takes one more than there are


class TwoPhasePlan(NamedTuple):
    spec: ForwardTwoPhase | ForwardTwoPhaseMma

    @property
    def kernel(self) -> str:
        return self.spec.name

    @property
    def specs(self) -> tuple:
        return (self.spec,)


class Cut(NamedTuple):
    """How many blocks run, and for how many keys each has room for P."""

    blocks: int
    chunk_keys: int
    scratch_bytes: int


def _row_tiles(p: Problem) -> int:
    return -(-p.n_q // ROWS) * p.batch * p.heads_q


def why_slower(p: Problem, backend: str, flags: Mapping[str, Any]) -> str | None:
    """Why the levels of the mma forward are faster, or None: they have smaller tiles, split keys, pack heads and need less
    workspace.
    """
    tiles, multiprocessors = _row_tiles(p), archs.multiprocessors(p.arch)
    enough = multiprocessors * 3 // 4
    if tiles < enough:
        return (
            f"{tiles} row tiles leave most of {multiprocessors} multiprocessors idle, and the mma forward splits keys"
        )
    if p.n_q <= ROWS // 2:
        return f"{p.n_q} rows leave half of a tile of {ROWS} empty"
    blocks, chunk_keys, _ = _cut(p, backend, tiles, multiprocessors, flags)
    if blocks < enough or chunk_keys < min(_LEAST_TILES, _tiles(p.n_k, p.visibility)) * KEYS:
        return f"FFPA_WORKSPACE_MB={flags['FFPA_WORKSPACE_MB']} holds {blocks} blocks and {chunk_keys} keys of each, too few"
    return None


def _tiles(n_k: int, see: Visibility) -> int:
    """Of keys, that one row tile meets at most."""
    tiles = -(-n_k // KEYS)
    if see.left >= 0 and see.right >= 0:
        tiles = min(tiles, (see.left + see.right + ROWS + KEYS - 2) // KEYS + 1)
    return tiles


def cut(row_tiles: int, n_k: int, see: Visibility, d_v: int, columns: int, multiprocessors: int, cap: int) -> Cut:
    """All keys at once if they fit; else as many as do, beside O, which then waits in fp32; and if not even a tile of them
    does for all blocks, fewer blocks.
    """
    cap -= _HEAD_BYTES
    of_tile = ROWS * (KEYS * 2 + 4)  # P, and the references of its rows
    out = -(-d_v // columns) * columns * ROWS * 4
    blocks, all_tiles = min(row_tiles, multiprocessors), _tiles(n_k, see)
    if blocks * all_tiles * of_tile <= cap and all_tiles * KEYS <= MOST_KEYS:
        return Cut(blocks, all_tiles * KEYS, _HEAD_BYTES + blocks * all_tiles * of_tile)
    blocks = max(1, min(blocks, cap // (of_tile + out)))
    most = min(all_tiles, MOST_KEYS // KEYS, max(1, (cap // blocks - out) // of_tile))
    tiles = -(-all_tiles // -(-all_tiles // most))  # of chunks all about as large
    return Cut(blocks, tiles * KEYS, _HEAD_BYTES + blocks * (tiles * of_tile + out))


def _columns(d_v: int) -> int:
    """The most of O at a time on wgmma: as many as there are registers for, and about as many each time."""
    boxes = -(-d_v // BOX)
    times = -(-boxes * BOX // TWO_PHASE_COLUMNS[-1])
    return max(-(-boxes // times) * BOX, TWO_PHASE_COLUMNS[0])


def _spec(p: Problem, backend: str) -> ForwardTwoPhase | ForwardTwoPhaseMma:
    if backend == "mma":
        return ForwardTwoPhaseMma(p.dtype, TWO_PHASE_MMA_COLUMNS)
    return ForwardTwoPhase(p.dtype, _columns(p.d_v))


def _cut(p: Problem, backend: str, row_tiles: int, multiprocessors: int, flags: Mapping[str, Any]) -> Cut:
    columns, cap = _spec(p, backend).columns, flags["FFPA_WORKSPACE_MB"] << 20
    return cut(row_tiles, max(p.n_k, 1), p.visibility, p.d_v, columns, multiprocessors, cap)


def plan(p: Problem, backend: str, flags: Mapping[str, Any]) -> TwoPhasePlan | str:
    """What runs the problem, or why it cannot. `backend`: hopper or mma."""
    if max(p.d_qk, p.d_v) < LEAST_HEAD_DIM[backend]:
        return f"there is no {backend} kernel for a two-phase forward of fewer than {LEAST_HEAD_DIM[backend]} columns"
    if p.acc != "f32":
        return f"the two-phase forward accumulates in f32, not {p.acc}"
    if p.num_stages:
        return "the two-phase forward has a ring of its own, and `num_stages` no meaning"
    forced = next((name for name in env.EXPERIMENTS if flags[name] is not None), None)
    if forced:
        return f"the two-phase forward knows no {forced}"
    if p.n_q + p.n_k > MOST_POSITIONS:
        return f"the two-phase forward counts positions in 32 bits, and {p.n_q} rows with {p.n_k} keys are too many"
    if _row_tiles(p) > _MOST_ROW_TILES:
        return f"the two-phase forward counts row tiles in 32 bits, and {_row_tiles(p)} are too many"
    least = _cut(p, backend, 1, 1, flags).scratch_bytes
    if least > flags["FFPA_WORKSPACE_MB"] << 20:
        return f"the two-phase forward needs {-(-least >> 20)} MiB of workspace for {ROWS} rows"
    return TwoPhasePlan(_spec(p, backend))


def forward(plan: TwoPhasePlan, q, k, v, out, lse, mask, offsets, rule, workspace_cap: int) -> None:
    """q, k, v, out: [B, H, N, D]; lse [B, H, N] or empty; mask as the caller gave it, or None.

    Packed sequences: [H, T, D], [H, T], no mask, and their offsets and longest lengths.
    """
    longest_q, longest_k = offsets[2:] if offsets else (q.shape[-2], k.shape[-2])
    n_q, n_k = min(longest_q, q.shape[-2]), min(longest_k, k.shape[-2])
    tiles = (len(offsets[0]) - 1 if offsets else len(q)) * q.shape[-3] * -(-n_q // ROWS)
    if offsets or not n_k:  # rows of no sequence, rows without keys
        out.zero_()
        lse.fill_(-float("inf"))
    if not (tiles and n_k and out.numel()):
        return
    if q.is_cuda:
        from . import native

        kernel, run = native.kernel(plan.spec, native.gpu_of(q.device)), native.library().attention_forward
        multiprocessors = native.multiprocessors(q.device)
    else:
        from . import emulated

        kernel, run, multiprocessors = plan.spec, emulated.attention_forward, emulated.RESIDENT_BLOCKS
    see = rule.visibility
    blocks, chunk_keys, nbytes = cut(tiles, n_k, see, v.shape[-1], plan.spec.columns, multiprocessors, workspace_cap)
    scratch = torch.empty(nbytes // 4, dtype=torch.float32, device=q.device)
    run(
        kernel, q, k, v, out, lse, mask, *(offsets or (None, None, 0, 0)), rule.scale, rule.softcap, see.left, see.right, see.top_left, 0, 0, False, False,
        chunk_keys, scratch, blocks, 1, None,
    )  # fmt: skip
