"""This is the forward of short sequences: a block of threads has all keys at once, and so a softmax of one step
(csrc/attention/forward/mma_short.cuh). `plan` is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..specs.problem import Problem, Visibility
from ..specs.spec import SHORT_COLUMNS, ForwardMmaShort
from . import row_tiles
from .row_tiles import Scratch

_TILE = ForwardMmaShort.tile


class ForwardShortPlan(row_tiles.RowTilePlan):
    __slots__ = ()
    rows = _TILE
    workspace_bytes = 0

    def scratch(self, tiles: int, n_k: int, d_v: int, see: Visibility, multiprocessors: int, cap: int) -> Scratch:
        """Returns a block for each tile."""
        return Scratch(tiles, 0, 0)


def plan(p: Problem, flags: Mapping[str, Any]) -> ForwardShortPlan | str:
    """Returns what runs the problem, or why it is not short. Whether the kernel is built is another question."""
    if p.pages:
        return "the short forward knows no pages"
    if p.n_k > _TILE:
        return f"{p.n_k} keys do not fit one tile of {_TILE}"
    columns = next((columns for columns in SHORT_COLUMNS if max(p.d_qk, p.d_v) <= columns), SHORT_COLUMNS[-1])
    return row_tiles.why_not(p, "short", flags, _TILE) or ForwardShortPlan(ForwardMmaShort(p.dtype, columns))


def why_slower(p: Problem) -> str | None:
    """Says why the levels of the mma forward are faster, or None: the heads of a group share their tiles."""
    return "the heads of a group share tiles of the levels" if p.n_q == 1 and p.group > 1 and not p.packed else None
