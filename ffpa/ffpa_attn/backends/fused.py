"""This is the forward on wgmma for head dims whose O fits the registers of one block, or of two that exchange P; and for
latent vectors, of which V is the first columns. S, P and O never see global memory before they are done, but where the keys of few row tiles are cut into parts. `plan` is
pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ..specs import archs
from ..specs.problem import Problem, Visibility
from ..specs.spec import (
    FUSED_COLUMNS,
    LATENT_COLUMNS,
    PAGED_PAIR_COLUMNS,
    PAIR_COLUMNS,
    ForwardWgmmaFused,
    ForwardWgmmaLatent,
    ForwardWgmmaPair,
)
from . import forward_short, levels, row_tiles
from .row_tiles import Pace, Parts, Scratch

MOST_COLUMNS = ForwardWgmmaPair.most_value_columns  # of V and O
_TILE_KEYS = 128  # keys of a part are a multiple of it: of the tiles of all these kernels
_SPEED = 4.7  # TFLOPS of a multiprocessor, over the columns that a kernel has
_SPEED_OF_LATENTS = 4.6
_SPEED_OF_SMALL_SLOTS = 4.3  # in pairs with a Q of 576 columns
_ENDS = 200  # begin and end of a work item take as long as so many keys
_BANDWIDTH = {1: 4.0e6, 2: 3.7e6}  # bytes of K and V a microsecond, by blocks that share a tile; on an H200


class FusedPlan(row_tiles.RowTilePlan):
    __slots__ = ()

    @property
    def rows(self) -> int:
        return self.spec.rows

    @property
    def workspace_bytes(self) -> int | None:
        """Says that there is no workspace where keys are not cut; otherwise the call knows how much."""
        return 0 if self.parts.count == 1 else None

    def scratch(self, tiles: int, n_k: int, d_v: int, see: Visibility, multiprocessors: int, cap: int) -> Scratch:
        """Returns scratch for nothing but a count of row tiles."""
        return Scratch(min(tiles * self.spec.blocks, multiprocessors), 0, row_tiles.HEAD_BYTES)


def has_latents(p: Problem) -> bool:
    """Says whether V is the first columns of K, in one storage, and K is wider than what one block has else."""
    return p.values_in_keys and p.d_v <= MOST_COLUMNS and FUSED_COLUMNS[-1][0] < p.d_qk <= LATENT_COLUMNS[-1]


def _specs(p: Problem) -> list[ForwardWgmmaFused | ForwardWgmmaPair | ForwardWgmmaLatent]:
    """Returns the narrowest kernels that can run the problem: the one for latent vectors, and one for all."""
    fitting = (columns for columns in LATENT_COLUMNS if has_latents(p) and p.d_qk <= columns)
    paged = p.pages is not None
    latents = (ForwardWgmmaLatent(p.dtype, columns, paged) for columns in itertools.islice(fitting, 1))
    fused = (
        ForwardWgmmaFused(p.dtype, *widths, paged)
        for widths in FUSED_COLUMNS
        if p.d_qk <= widths[0] and p.d_v <= widths[1]
    )
    of_pairs = PAGED_PAIR_COLUMNS if paged else PAIR_COLUMNS
    pairs = (ForwardWgmmaPair(p.dtype, columns, paged) for columns in of_pairs if max(p.d_qk, p.d_v) <= columns)
    return [*latents, next(itertools.chain(fused, pairs))]


def is_faster_than_two_phases(p: Problem) -> bool:
    """Says whether wider Q and K than V are faster here: latent vectors, and few rows, which leave two phases idle."""
    in_pairs = MOST_COLUMNS < p.d_qk <= PAIR_COLUMNS[-1] and p.d_v <= MOST_COLUMNS
    return has_latents(p) or (in_pairs and bool(row_tiles.why_slower(p)))


def _pace(p: Problem, spec) -> Pace:
    blocks = archs.multiprocessors(p.arch or "sm_90") // spec.blocks
    is_latent = isinstance(spec, ForwardWgmmaLatent)
    speed = _SPEED_OF_LATENTS if is_latent else _SPEED_OF_SMALL_SLOTS if spec.columns > MOST_COLUMNS else _SPEED
    of_key = 2 * spec.rows * (spec.columns + spec.value_columns) / (speed * 1e6 * spec.blocks)
    columns = p.d_qk if is_latent else p.d_qk + p.d_v
    return Pace(spec.rows, _TILE_KEYS, blocks, of_key, _ENDS * of_key, columns, _BANDWIDTH[spec.blocks])


def _parts(p: Problem, spec, tile_heads: int, workspace_cap: int) -> tuple[float, Parts]:
    """Returns the parts that take the shortest, and how long."""
    how = row_tiles.microseconds, _pace(p, spec), tile_heads
    return row_tiles.fastest_parts(p, spec.rows, _TILE_KEYS, tile_heads, workspace_cap, *how)


def _tile_heads(p: Problem, spec) -> int:
    """Returns how many heads share row tiles. Under a window, heads of few positions see fewer keys than many positions
    of one head; and tiles of latent vectors, which begin at any key, have no more of them.
    """
    if not (isinstance(spec, ForwardWgmmaLatent) and p.visibility.is_window):
        return row_tiles.shared_heads(p, spec.rows)
    window = p.visibility.left + p.visibility.right + 1

    def cost(heads: int) -> int:
        tiles_of_keys = -(-min(window + spec.rows // heads - 1, p.n_k) // _TILE_KEYS)
        return row_tiles.count(p, spec.rows, heads) * (tiles_of_keys * _TILE_KEYS + _ENDS)

    return min((heads for heads in range(1, min(p.group, spec.rows) + 1) if p.group % heads == 0), key=cost)


def plan(p: Problem, flags: Mapping[str, Any]) -> FusedPlan | str:
    """Returns what runs the problem, or why it cannot."""
    if p.d_v > MOST_COLUMNS:
        return f"registers hold {MOST_COLUMNS} columns of O in the fused forward, not {p.d_v}"
    if p.d_qk > PAIR_COLUMNS[-1]:
        return f"shared memory holds {PAIR_COLUMNS[-1]} columns of Q in the fused forward, not {p.d_qk}"
    plans = []
    for spec in _specs(p):
        if reason := row_tiles.why_not(p, "fused", flags, spec.rows):
            return reason
        tile_heads = _tile_heads(p, spec)
        microseconds, of_keys = _parts(p, spec, tile_heads, flags["FFPA_WORKSPACE_MB"] << 20)
        plans.append(FusedPlan(spec, tile_heads, of_keys, microseconds))
    return min(plans, key=lambda plan: plan.microseconds)


def why_slower(p: Problem, plan: FusedPlan, flags: Mapping[str, Any]) -> str | None:
    """Says why the mma forward is faster, or None."""
    if row_tiles.why_slower(p, plan.spec.blocks) is None:
        return None
    if not (isinstance(forward_short.plan(p, flags), str) or forward_short.why_slower(p)):
        return "all keys fit one tile of the short forward"
    return levels.why_faster(p, plan, flags)
