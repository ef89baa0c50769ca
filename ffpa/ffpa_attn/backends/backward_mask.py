"""This module makes the gradient of an additive mask, from the dS that the backward's kernels leave in the workspace.

Without a softcap, dS is the gradient of what the mask was added to; an element's gradient is the sum over all pairs
that share it: in fp32, in the order of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .backward_chunks import ROW_TILE, Chunk

Place = tuple[int, int, int, int]  # batch entry, query head, row, key


def blocks(
    ds: torch.Tensor, chunk: Chunk, heads_kv: int, group: int, n_q: int, n_k: int
) -> Iterator[tuple[Place, torch.Tensor]]:
    """Gives a chunk's existing pairs as views [batch, query heads, rows, keys] of its dS, each with its first pair's
    place.

    Entries are the heads of one batch entry after the other: what a chunk has of the first batch entry is a block, and
    so are all whole ones together, and what it has of the last.
    """
    tiles_of_head = -(-n_q // ROW_TILE)
    first_head, first_tile = divmod(chunk.first_tile, tiles_of_head)
    first_row, heads = first_tile * ROW_TILE, max(chunk.row_tiles // tiles_of_head, 1)
    whole_tiles = ds[: chunk.pairs].view(chunk.entries, heads, -1, chunk.keys)
    entries = whole_tiles[:, :, : n_q - first_row, : n_k - chunk.first_key]
    while len(entries):
        batch, head_kv = divmod(chunk.first_entry + chunk.entries - len(entries), heads_kv)
        batches = 1 if head_kv else max(len(entries) // heads_kv, 1)
        block, entries = entries.tensor_split([batches * heads_kv - head_kv])
        place = batch, head_kv * group + first_head, first_row, chunk.first_key
        yield place, block.unflatten(0, (batches, -1)).flatten(1, 2)


class MaskGradient:
    """Writes d_mask [B|1, H|1, n_q|1, n_k|1]. Pairs that no chunk has get zeros."""

    def __init__(self, d_mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, has_all_pairs: bool = True):
        (batch, heads_q, n_q, _), (_, heads_kv, n_k, _) = q.shape, k.shape
        self.sizes = heads_kv, heads_q // heads_kv, n_q, n_k
        self.is_shared = d_mask.shape != (batch, heads_q, n_q, n_k)  # else an element is written once
        in_place = not self.is_shared or d_mask.dtype == torch.float32
        self.d_mask, self.total = d_mask, d_mask if in_place else torch.empty_like(d_mask, dtype=torch.float32)
        if self.is_shared or not has_all_pairs:
            self.total.zero_()

    def add(self, ds: torch.Tensor, chunk: Chunk, scratch: torch.Tensor) -> None:
        """Adds a chunk; `scratch` has a float for every second pair of it."""
        for place, block in blocks(ds, chunk, *self.sizes):
            sizes = zip(place, block.shape, self.total.shape, strict=True)
            at = tuple(slice(0, 1) if of_mask == 1 else slice(i, i + size) for i, size, of_mask in sizes)
            total = self.total[at]
            shared = [dim for dim in range(4) if total.shape[dim] < block.shape[dim]]
            if shared:
                sums = scratch[: total.numel()].view(total.shape)
                block = torch.sum(block, shared, keepdim=True, dtype=torch.float32, out=sums)
            (total.add_ if self.is_shared else total.copy_)(block)

    def finish(self) -> None:
        if self.total is not self.d_mask:
            self.d_mask.copy_(self.total)
