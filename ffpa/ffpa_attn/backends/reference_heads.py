"""This is what a forward of the reference path has, and gives, for each head beside its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .reference import Tile


class Heads(NamedTuple):
    """Sinks [Hq], each a logit of no value, and a place [B, Hq] for the largest scores, which holds -inf; both are
    float32, and either may be None.
    """

    sinks: torch.Tensor | None = None
    largest: torch.Tensor | None = None

    def sinks_of(self, tile: Tile) -> torch.Tensor:
        """Returns [n, G * rows, 1]."""
        of_rows = self.sinks[tile.heads_q, None].expand(-1, tile.rows[1] - tile.rows[0])
        return of_rows.reshape(tile.heads.stop - tile.heads.start, -1, 1)

    def keep_largest(self, entry: int, tile: Tile, row_max: torch.Tensor) -> None:
        largest = self.largest[entry, tile.heads_q]
        torch.maximum(largest, tile.by_head(row_max).amax((1, 2)), out=largest)
