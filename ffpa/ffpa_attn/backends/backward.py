"""This is the backward on our kernels: P and dS go to a workspace once, and the gradients are three products of them.

At large head dims the N² intermediates cost less to store than to compute again. Chunk after chunk of the problem fits
the workspace (backward_chunks.py). `plan` is pure: shape and cap alone decide the order of sums, and so every bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..checks import memory_checks
from ..launching import attention_call, structs
from ..launching.launch import CHANGE, READ, WRITE, Kernel, Launch, multiprocessors
from ..specs.problem import MOST_POSITIONS, Problem, Visibility
from ..specs.spec import (
    MMA_PRODUCT_TILES,
    PRODUCT_TILES,
    BackwardMmaProducts,
    BackwardMmaScores,
    BackwardRows,
    BackwardWgmmaProducts,
    BackwardWgmmaScores,
)
from . import backward_chunks
from .backward_chunks import BAND_STEP, KEY_TILE, LIVE_ROWS, ROW_TILE, SCORE_ROWS, Chunk, Cut, Work
from .reference_plan import mask_gradient

Memo = dict  # it has the launches for a number of multiprocessors, and what as_read found out


class BackwardPlan(NamedTuple):
    rows: BackwardRows
    scores: BackwardWgmmaScores | BackwardMmaScores
    of_q: BackwardWgmmaProducts | BackwardMmaProducts
    of_k: BackwardWgmmaProducts | BackwardMmaProducts
    chunks: tuple[Chunk, ...]
    entries: int  # entries that have these chunks one after the other; 1 where they hold all entries
    most_columns: int  # keys of a row of the workspace, at most
    pairs: int  # elements of P, and of dS, in the largest chunk
    partial_floats: int  # floats of sums between chunks: of dQ, and from `sums_of_k_at` on of dK and dV
    sums_of_k_at: int
    sums_of_tile: int  # floats of dQ of a row tile
    sums_of_key: int  # floats of dK and dV of a key

    @property
    def kernel(self) -> str:
        return self.scores.name

    @property
    def workspace_bytes(self) -> int:
        return 4 * (self.pairs + self.partial_floats)

    @property
    def all_chunks(self) -> Iterator[Chunk]:
        for entry in range(self.entries):
            for chunk in self.chunks:
                yield chunk._replace(first_entry=chunk.first_entry + entry)

    def sums_at(self, chunk: Chunk, of_q: bool) -> int:
        """Returns where a chunk's sums begin, among those that wait."""
        if of_q:
            return chunk.tiles_before * self.sums_of_tile
        return self.sums_of_k_at + chunk.keys_before * self.sums_of_key

    @property
    def specs(self) -> tuple:
        return self[:4]

    def backward(self, saved, grads, d_mask, mask, offsets, rule, workspace_cap: int, memo: Memo) -> None:
        """Does what triton_attention.TritonPlan.backward does, on these kernels."""
        of_scores = None if rule.softcap else d_mask  # what is kept is the gradient of a score before its softcap
        if offsets or not self.chunks:  # rows of no sequence get zeros
            for grad in grads if of_scores is None else (*grads, of_scores):
                grad.zero_()
        if self.chunks:
            self._launch(inputs_of(saved, mask, offsets, memo), grads, of_scores, offsets, rule, memo)
        if of_scores is None:
            mask_gradient(saved, d_mask, mask, rule, workspace_cap)

    def _launch(self, inputs: tuple, grads, d_mask, offsets, rule, memo: Memo) -> None:
        q, k, *_ = inputs

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=q.device)

        p, ds = (empty(self.pairs, dtype=q.dtype) for _ in range(2))
        partial = empty(self.partial_floats, dtype=torch.float32) if self.partial_floats else None
        statistics = empty(*q.shape[:-1], 4, dtype=torch.float32)  # laid out as in params/backward_params.h
        heads, n_q = q.shape[:-2].numel(), q.shape[-2]
        # Packed sequences have as many words as rows/packed_tiles.cuh counts tiles.
        live_words = n_q // LIVE_ROWS + len(offsets[0]) - 1 if offsets else -(-n_q // LIVE_ROWS)
        live_rows = empty(heads * live_words + 1, dtype=torch.int64)  # and two counters of 32 bits
        blocks = multiprocessors(q.device)
        if blocks not in memo:
            memo[blocks] = self._launches(inputs, grads, offsets, rule, blocks)
        rows, scores, of_q, of_k = memo[blocks]
        call = *inputs, live_rows, *grads, statistics, p, ds

        see = rule.visibility
        of_mask = None if d_mask is None else MaskGradient(d_mask, q, k, see, self.most_columns)
        rows(*call, partial, ints=self.chunks[0].place)
        if see.bounded and not offsets:
            _clear_what_is_not_seen(see, *grads)
        for chunk in self.all_chunks:
            gives_mask = of_mask is not None and chunk.of_q  # every visible pair is in one such chunk
            if gives_mask and see.bounded:
                ds[: of_mask.pairs(chunk)].zero_()  # tiles without visible pairs are not written
            scores(*call, None, ints=chunk.place)
            for launch, gives, is_of_q in (of_q, chunk.of_q, True), (of_k, chunk.of_k, False):
                if gives:
                    at = self.sums_at(chunk, is_of_q)
                    launch(*call, partial[at:] if at else partial, ints=chunk.place)
            if gives_mask:
                of_mask.add(ds, chunk, scratch=p.view(torch.float32))  # products have read P
        if of_mask is not None:
            of_mask.finish()

    def _launches(self, inputs: tuple, grads, offsets, rule, blocks: int) -> list[Launch]:
        """Returns the launches of the kernels, which take inputs, live rows, gradients and workspace, in the order in
        which these are named below, and the place of a chunk.
        """
        params = describe(inputs, grads, offsets, rule, resident_blocks=blocks)
        params.most_columns = self.most_columns
        reads = INPUTS | {"live_rows": CHANGE}
        first = reads | uses_of_gradients(offsets) | dict.fromkeys(_WORKSPACE, WRITE)
        later = reads | dict.fromkeys((*_GRADIENTS, *_WORKSPACE), CHANGE)
        return [
            Launch([Kernel(spec, params, first if spec is self.rows else later)], inputs[0].device, "first_entry")
            for spec in self.specs
        ]


# These are the kernels of a backend, and the tiles of its products.
_FAMILIES = {
    "hopper": (BackwardWgmmaScores, BackwardWgmmaProducts, PRODUCT_TILES),
    "mma": (BackwardMmaScores, BackwardMmaProducts, MMA_PRODUCT_TILES),
}


def plan(p: Problem, backend: str, cap: int) -> BackwardPlan | str:
    """Plans for a `backend`, hopper or mma. Whether its kernels are built is another question."""
    scores, products, tiles = _FAMILIES[backend]
    work = Work(p)
    of_packed = sum(work.packed.tiles(n, KEY_TILE) * KEY_TILE for n in p.packed) if p.packed else 0
    of_band = work.columns if work.columns < work.keys_of_longest else 0  # a band may end past the last key
    positions = max(p.n_q + p.n_k + of_band, of_packed)
    if positions > MOST_POSITIONS:
        return f"the backward counts positions in 32 bits, and {positions} of rows and keys are too many"
    if p.batch * p.heads_kv * p.n_q * p.n_k:
        cut = backward_chunks.cut(work, tiles, cap)
    else:
        cut = Cut([], 1, tiles[0], tiles[0])
    pairs = max((c.rows * work.columns_of(c.keys) for c in cut.chunks), default=0)
    of_tile = ROW_TILE * backward_chunks.sums_of_row(work, cut.of_q.columns)
    of_key = backward_chunks.sums_of_key(work, cut.of_k.columns)
    sums_q, sums_k = cut.row_tiles_kept * of_tile, cut.keys_kept * of_key
    # Where a chunk gives all gradients, dK and dV are begun while dQ is computed; else sums of dQ are done with by then.
    sums_of_k_at = sums_q if any(c.of_q and c.of_k for c in cut.chunks) else 0
    partial = max(sums_q, sums_of_k_at + sums_k)
    needed = 4 * (pairs + partial)
    if needed > cap:
        return f"the backward needs {-(-needed >> 20)} MiB of workspace, and FFPA_WORKSPACE_MB is {cap >> 20}"
    return BackwardPlan(
        BackwardRows(p.dtype),
        scores(p.dtype),
        products(p.dtype, cut.of_q.columns, True),
        products(p.dtype, cut.of_k.columns, False),
        tuple(cut.chunks),
        cut.entries,
        work.columns,
        pairs,
        partial,
        sums_of_k_at,
        of_tile,
        of_key,
    )


def as_read(x: torch.Tensor, memo: Memo) -> torch.Tensor:
    """Returns dO in rows that can be read where they lie, which autograd's may not have: that of a sum is one number.
    Heads that share their rows go on sharing them. What calls of a kind need is the same, and found out once.
    """
    if "reads dO" not in memo:
        memo["reads dO"] = not memory_checks.rows_problem(x) and bool(x.stride(-2) or x.shape[-2] == 1)
    if memo["reads dO"]:
        return x
    once = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()[:-2])]
    return once.clone(memory_format=torch.contiguous_format).expand(x.shape)  # rows may lie off 16 bytes


def _clear_what_is_not_seen(see: Visibility, dq, dk, dv) -> None:
    """Clears the gradients of rows without keys and of keys without rows, of which no kernel may hear."""
    n_q, n_k = dq.shape[-2], dk.shape[-2]
    diagonal = 0 if see.top_left else n_k - n_q
    first_row, end_row = 0, n_q  # the rows that see a key
    first_key, end_key = 0, n_k
    if see.left >= 0:
        end_row, first_key = n_k - diagonal + see.left, diagonal - see.left
    if see.right >= 0:
        first_row, end_key = -diagonal - see.right, n_q + diagonal + see.right
    for n, first, end, gradients in ((n_q, first_row, end_row, (dq,)), (n_k, first_key, end_key, (dk, dv))):
        for x in gradients:
            if first > 0:
                x[..., :first, :].zero_()
            if end < n:
                x[..., end:, :].zero_()


_OF_ATTENTION = "q.data", "k.data", "v.data", "out.data", "lse", "mask.data", "packed_q.offsets", "packed_k.offsets"
_OF_ROWS = "grad_out.data", "grad_lse", "delta"
INPUTS = dict.fromkeys((*(f"attention.{field}" for field in _OF_ATTENTION), *_OF_ROWS), READ)
_GRADIENTS = "dq.data", "dk.data", "dv.data"
_WORKSPACE = "statistics", "p", "ds", "partial"


def inputs_of(saved, mask, offsets, memo: Memo) -> tuple:
    """Returns INPUTS. All but lse are [B, H, N, D] views, or packed [H, T, D] with offsets and longest lengths."""
    grad_out, grad_lse, q, k, v, out, lse, delta = saved
    cu_q, cu_k = offsets[:2] if offsets else (None, None)
    of_rows = (None if x is None else x.contiguous() for x in (grad_lse, delta))
    return q, k, v, out, lse.contiguous(), mask, cu_q, cu_k, as_read(grad_out, memo), *of_rows


def uses_of_gradients(offsets) -> dict[str, str]:
    """Returns how a kernel uses the gradients' memory: in packed ones, rows of no sequence are written before."""
    return dict.fromkeys(_GRADIENTS, CHANGE if offsets else WRITE)


def describe(inputs: tuple, grads, offsets, rule, **settings) -> ctypes.Structure:
    """Returns BackwardParams without addresses; `settings` are fields of its AttentionParams that a plan decides."""
    q, k, v, out, _, mask, _, _, grad_out, *_ = inputs
    params = structs.struct("BackwardParams")()
    attention_call.describe(params.attention, q, k, v, out, mask, offsets, rule, **settings)
    for name, x in zip(("grad_out", "dq", "dk", "dv"), (grad_out, *grads), strict=True):
        attention_call.strides(getattr(params, name), x)
    params.float_gradients = grads[0].dtype == torch.float32
    return params


# ---- the gradient of an additive mask ----


Blocks = Iterator[tuple[tuple[int, int, int, int], torch.Tensor]]


def _blocks(ds: torch.Tensor, chunk: Chunk, heads_kv: int, group: int, n_q: int) -> Blocks:
    """Gives a chunk's dS as views [batch, query heads, rows, columns] of existing rows, each with the place of its first
    pair: batch entry, query head, row, key.

    Entries are the heads of one batch entry after the other: what a chunk has of the first batch entry is a block, and
    so are all whole ones together, and what it has of the last.
    """
    tiles_of_head = -(-n_q // ROW_TILE)
    first_head, first_tile = divmod(chunk.first_tile, tiles_of_head)
    first_row, heads = first_tile * ROW_TILE, max(chunk.row_tiles // tiles_of_head, 1)
    entries = ds.view(chunk.entries, heads, chunk.rows // (chunk.entries * heads), -1)[:, :, : n_q - first_row]
    while len(entries):
        batch, head_kv = divmod(chunk.first_entry + chunk.entries - len(entries), heads_kv)
        batches = 1 if head_kv else max(len(entries) // heads_kv, 1)
        block, entries = entries.tensor_split([batches * heads_kv - head_kv])
        place = batch, head_kv * group + first_head, first_row, chunk.first_key
        yield place, block.unflatten(0, (batches, -1)).flatten(1, 2)


def _bands(blocks: Blocks, nearest: int) -> Blocks:
    """Gives the rows of blocks that have the same key in column 0, as FirstKeys in csrc/attention/backward has it."""
    for (batch, head, first_row, _), block in blocks:
        for i, rows in enumerate(block.split(SCORE_ROWS, dim=-2)):
            row = first_row + i * SCORE_ROWS
            yield (batch, head, row, max((row + nearest) // BAND_STEP * BAND_STEP, 0)), rows


class MaskGradient:
    """Writes d_mask [B|1, H|1, n_q|1, n_k|1] from the dS in the workspace: without a softcap dS is the gradient of what
    the mask was added to, and an element's is the sum over all pairs that share it, in fp32, in the order of chunks.
    Pairs that no chunk has get zeros.
    """

    def __init__(self, d_mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, see: Visibility, most_columns: int):
        (batch, heads_q, n_q, _), (_, heads_kv, n_k, _) = q.shape, k.shape
        self.sizes, self.keys, self.most_columns = (heads_kv, heads_q // heads_kv, n_q), n_k, most_columns
        self.nearest = max((0 if see.top_left else n_k - n_q) - see.left, -n_q)  # BatchEntry::nearest, under a window
        self.is_shared = d_mask.shape != (batch, heads_q, n_q, n_k)  # else an element is written once
        in_place = not self.is_shared or d_mask.dtype == torch.float32
        self.d_mask, self.total = d_mask, d_mask if in_place else torch.empty_like(d_mask, dtype=torch.float32)
        if self.is_shared or see.bounded:
            self.total.zero_()

    def pairs(self, chunk: Chunk) -> int:
        """Returns the elements that a chunk has in the workspace."""
        return chunk.rows * min(chunk.keys, self.most_columns)

    def add(self, ds: torch.Tensor, chunk: Chunk, scratch: torch.Tensor) -> None:
        """Adds a chunk; `scratch` has a float for every second element that the chunk has in the workspace."""
        blocks = _blocks(ds[: self.pairs(chunk)], chunk, *self.sizes)
        for (*place, key), block in blocks if chunk.keys <= self.most_columns else _bands(blocks, self.nearest):
            first_key = max(key, chunk.first_key)
            block = block[..., first_key - key : max(min(chunk.end_key, self.keys) - key, 0)]  # the chunk's keys
            if not block.shape[-1]:
                continue
            place = *place, first_key
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
