"""This says how a forward cuts keys into parts that become work items of their own, whose results are merged
(AttentionParams::splits). All is known from shapes, options and the kind of GPU: no result depends on anything else.
"""

from __future__ import annotations

from typing import NamedTuple

from ..specs.spec import Visibility

COLUMNS = 64  # columns of O that a part's rows are rounded up to, as AttentionParams::part_columns does
MOST = 64


class Parts(NamedTuple):
    """The parts of a row tile's keys: how many there may be, and the keys of each. One part has all keys."""

    count: int = 1
    keys: int = 0

    @property
    def settings(self) -> dict[str, int]:
        return {"splits": self.count, "part_keys": self.keys}


def cut(n_q: int, n_k: int, see: Visibility, rows: int, tile_keys: int, count: int) -> Parts:
    """Cuts what a tile of so many adjacent rows of a head sees at most into `count` parts of whole tiles, or fewer."""
    visible = n_k
    if see.left >= 0 and see.right >= 0:
        visible = min(visible, see.left + see.right + rows)
    if see.top_left and see.right >= 0:
        visible = min(visible, n_q + see.right)
    tiles = max(min((visible + 2 * tile_keys - 2) // tile_keys, -(-n_k // tile_keys)), 1)  # they begin anywhere
    tiles_of_part = -(-tiles // count)
    parts = -(-tiles // tiles_of_part)
    return Parts(parts, tiles_of_part * tile_keys) if parts > 1 else Parts()


def floats_of_row(parts: Parts, d_v: int) -> int:
    """Returns the floats that all parts of one row take: O, a reference and a sum."""
    return parts.count * (-(-d_v // COLUMNS) * COLUMNS + 2)


def sums_to_zero(parts: Parts, rows: int, offsets) -> int:
    """Returns how many floats at the end of the results are zeros before a call with so many rows of all heads: offsets
    that fall may leave rows to no tile, and the merge reads their sums all the same.
    """
    return 2 * rows * parts.count if offsets and parts.count > 1 else 0
