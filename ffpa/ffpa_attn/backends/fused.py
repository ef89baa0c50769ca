"""This is the forward on wgmma for head dims whose O fits the registers of one block, or of two that exchange P. S, P
and O never see global memory before they are done. `plan` is pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ..specs.spec import FUSED_COLUMNS, PAIR_COLUMNS, ForwardWgmmaFused, ForwardWgmmaPair, Problem, Visibility
from . import row_tiles
from .row_tiles import Scratch

MOST_COLUMNS = PAIR_COLUMNS[-1]


class FusedPlan(row_tiles.RowTilePlan):
    __slots__ = ()
    workspace_bytes = 0  # no bytes but those that blocks share

    def scratch(self, tiles: int, n_k: int, d_v: int, see: Visibility, multiprocessors: int, cap: int) -> Scratch:
        """Returns scratch for nothing but a count of row tiles."""
        return Scratch(min(tiles * self.spec.blocks, multiprocessors), 0, row_tiles.HEAD_BYTES)


def plan(p: Problem, flags: Mapping[str, Any]) -> FusedPlan | str:
    """Returns what runs the problem, or why it cannot."""
    widest = max(p.d_qk, p.d_v)
    if widest > MOST_COLUMNS:
        return f"registers hold {MOST_COLUMNS} columns of O in the fused forward, not {widest}"
    fused = (
        ForwardWgmmaFused(p.dtype, *widths) for widths in FUSED_COLUMNS if p.d_qk <= widths[0] and p.d_v <= widths[1]
    )
    pairs = (ForwardWgmmaPair(p.dtype, columns) for columns in PAIR_COLUMNS if widest <= columns)
    return row_tiles.why_not(p, "fused", flags) or FusedPlan(next(itertools.chain(fused, pairs)))


def why_slower(p: Problem, plan: FusedPlan) -> str | None:
    """Says why the mma forward is faster, or None."""
    return row_tiles.why_slower(p, plan.spec.blocks)
