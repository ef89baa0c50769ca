"""The forward for head dims whose O registers hold, on wgmma: S, P and O never leave the multiprocessor. `plan` is pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import row_tiles
from .spec import FUSED_COLUMNS, ForwardFused, Problem

MOST_COLUMNS = FUSED_COLUMNS[-1]


class FusedPlan(row_tiles.RowTilePlan):
    __slots__ = ()


def plan(p: Problem, flags: Mapping[str, Any]) -> FusedPlan | str:
    """What runs the problem, or why it cannot."""
    widest = max(p.d_qk, p.d_v)
    if widest > MOST_COLUMNS:
        return f"registers hold {MOST_COLUMNS} columns of O in the fused forward, not {widest}"
    columns = next(columns for columns in FUSED_COLUMNS if columns >= widest)
    return row_tiles.why_not(p, "fused", flags) or FusedPlan(ForwardFused(p.dtype, columns))


def forward(plan: FusedPlan, q, k, v, out, lse, mask, offsets, rule, workspace_cap: int) -> None:
    """As row_tiles.forward; scratch is a count of row tiles."""

    def scratch_of(tiles: int, n_k: int, multiprocessors: int) -> row_tiles.Scratch:
        return row_tiles.Scratch(min(tiles, multiprocessors), 0, row_tiles.HEAD_BYTES)

    row_tiles.forward(plan.spec, q, k, v, out, lse, mask, offsets, rule, scratch_of)
