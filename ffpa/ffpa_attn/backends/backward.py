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
from ..launching.launch import CHANGE, READ, WRITE, Launch, multiprocessors
from ..specs import archs
from ..specs.spec import (
    MMA_PRODUCT_TILES,
    MOST_POSITIONS,
    PRODUCT_TILES,
    BackwardMmaProducts,
    BackwardMmaScores,
    BackwardRows,
    BackwardWgmmaProducts,
    BackwardWgmmaScores,
    Problem,
    Visibility,
    visible_keys,
)
from . import backward_chunks
from .backward_chunks import KEY_TILE, LIVE_ROWS, ROW_TILE, Chunk, Cut, Packed, Work
from .backward_mask import MaskGradient
from .reference_plan import mask_gradient


class BackwardPlan(NamedTuple):
    rows: BackwardRows
    scores: BackwardWgmmaScores | BackwardMmaScores
    of_q: BackwardWgmmaProducts | BackwardMmaProducts
    of_k: BackwardWgmmaProducts | BackwardMmaProducts
    chunks: tuple[Chunk, ...]
    entries: int  # entries that have these chunks one after the other; 1 where they hold all entries
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

    def backward(self, saved, grads, d_mask, mask, offsets, rule, workspace_cap: int, memo: dict) -> None:
        """Does what triton_attention.TritonPlan.backward does, on these kernels."""
        of_scores = None if rule.softcap else d_mask  # what is kept is the gradient of a score before its softcap
        _gradients(self, *saved, *grads, of_scores, mask, offsets, rule, memo)
        if of_scores is None:
            mask_gradient(saved, d_mask, mask, rule, workspace_cap)


# These are the kernels of a backend, and the tiles of its products.
_FAMILIES = {
    "hopper": (BackwardWgmmaScores, BackwardWgmmaProducts, PRODUCT_TILES),
    "mma": (BackwardMmaScores, BackwardMmaProducts, MMA_PRODUCT_TILES),
}


def plan(p: Problem, backend: str, cap: int) -> BackwardPlan | str:
    """Plans for a `backend`, hopper or mma. Whether its kernels are built is another question."""
    scores, products, tiles = _FAMILIES[backend]
    packed = p.packed and Packed(p.batch, *p.packed)
    positions = max(p.n_q + p.n_k, sum(packed.tiles(n, KEY_TILE) * KEY_TILE for n in p.packed) if packed else 0)
    if positions > MOST_POSITIONS:
        return f"the backward counts positions in 32 bits, and {positions} of rows and keys are too many"
    seen = visible_keys(p) / p.n_k if p.n_k else 1.0
    if packed and p.batch * p.n_k:
        seen *= min(packed.keys / (packed.sequences * p.n_k), 1.0)  # this takes lengths to be the same
    see, diagonal = p.visibility, 0 if p.visibility.top_left else p.n_k - p.n_q
    work = Work(
        entries=p.heads_kv * (1 if packed else p.batch),
        group=p.group,
        n_q=p.n_q,
        n_k=p.n_k,
        d_qk=p.d_qk,
        d_v=p.d_v,
        seen=seen,
        multiprocessors=archs.multiprocessors(p.arch or "sm_90"),
        packed=packed,
        nearest=None if see.left < 0 else diagonal - see.left,
        farthest=None if see.right < 0 else diagonal + see.right,
    )
    if p.batch * p.heads_kv * p.n_q * p.n_k:
        cut = backward_chunks.cut(work, tiles, cap)
    else:
        cut = Cut([], 1, tiles[0], tiles[0])
    pairs = max((c.rows * work.columns_of(c.keys) for c in cut.chunks), default=0)
    of_tile = ROW_TILE * backward_chunks.sums_of_row(work, cut.of_q.columns)
    of_key = backward_chunks.sums_of_key(work, cut.of_k.columns)
    sums_q, sums_k = cut.row_tiles_kept * of_tile, cut.keys_kept * of_key
    sums_of_k_at = sums_q if any(c.of_q and c.of_k for c in cut.chunks) else 0  # else sums of dQ are done with by then
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
        pairs,
        partial,
        sums_of_k_at,
        of_tile,
        of_key,
    )


def as_read(x: torch.Tensor, memo: dict) -> torch.Tensor:
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


Memo = dict  # it has the launches of `specs` for a number of multiprocessors, and what as_read found out
_OF_ATTENTION = "q.data", "k.data", "v.data", "out.data", "lse", "mask.data", "packed_q.offsets", "packed_k.offsets"
INPUTS = dict.fromkeys((*(f"attention.{field}" for field in _OF_ATTENTION), "grad_out.data", "grad_lse"), READ)
_GRADIENTS = "dq.data", "dk.data", "dv.data"
_WORKSPACE = "statistics", "p", "ds", "partial"


def gradients(offsets) -> dict[str, str]:
    """Returns how a kernel uses the gradients' memory: in packed ones, rows of no sequence are written before."""
    return dict.fromkeys(_GRADIENTS, CHANGE if offsets else WRITE)


def describe(q, k, v, out, grad_out, dq, dk, dv, mask, offsets, rule, **settings) -> ctypes.Structure:
    """Returns BackwardParams without addresses; `settings` are fields of its AttentionParams that a plan decides."""
    params = structs.struct("BackwardParams")()
    attention_call.describe(params.attention, q, k, v, out, mask, offsets, rule, **settings)
    for name, x in (("grad_out", grad_out), ("dq", dq), ("dk", dk), ("dv", dv)):
        attention_call.strides(getattr(params, name), x)
    params.float_gradients = dq.dtype == torch.float32
    return params


def _launches(plan: BackwardPlan, q, k, v, out, grad_out, dq, dk, dv, mask, offsets, rule, blocks: int) -> list[Launch]:
    """Returns the launches of a plan's kernels, which take inputs, live rows, gradients and workspace, in the order in
    which these are named here, and the place of a chunk.
    """
    params = describe(q, k, v, out, grad_out, dq, dk, dv, mask, offsets, rule, resident_blocks=blocks)
    inputs = INPUTS | {"live_rows": CHANGE}
    first = inputs | gradients(offsets) | dict.fromkeys(_WORKSPACE, WRITE)
    later = inputs | dict.fromkeys((*_GRADIENTS, *_WORKSPACE), CHANGE)
    uses = (first, later, later, later)
    return [Launch(*of, q.device, "first_entry") for of in zip(plan.specs, (params,) * 4, uses, strict=True)]


def _gradients(
    plan: BackwardPlan, grad_out, grad_lse, q, k, v, out, lse, dq, dk, dv, d_mask, mask, offsets, rule, memo: Memo
) -> None:
    """Computes gradients. All but lse are [B, H, N, D] views, or packed [H, T, D] with offsets and longest lengths.

    d_mask is [B|1, H|1, n_q|1, n_k|1], where it is wanted and there is no softcap.
    """
    if offsets or not plan.chunks:  # rows of no sequence get zeros
        for grad in (dq, dk, dv) if d_mask is None else (dq, dk, dv, d_mask):
            grad.zero_()
    if not plan.chunks:
        return

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    p, ds = (empty(plan.pairs, dtype=q.dtype) for _ in range(2))
    partial = empty(plan.partial_floats, dtype=torch.float32) if plan.partial_floats else None
    statistics = empty(*lse.shape, 4, dtype=torch.float32)  # laid out as in params/backward_params.h
    heads, n_q = q.shape[:-2].numel(), q.shape[-2]
    # Packed sequences have as many words as rows/packed_tiles.cuh counts tiles.
    live_words = n_q // LIVE_ROWS + len(offsets[0]) - 1 if offsets else -(-n_q // LIVE_ROWS)
    live_rows = empty(heads * live_words, dtype=torch.int64)

    grad_out, lse, grad_lse = (
        as_read(grad_out, memo),
        lse.contiguous(),
        None if grad_lse is None else grad_lse.contiguous(),
    )
    blocks = multiprocessors(q.device)
    launches = memo.get(blocks)
    if launches is None:
        launches = memo[blocks] = _launches(plan, q, k, v, out, grad_out, dq, dk, dv, mask, offsets, rule, blocks)
    rows, scores, of_q, of_k = launches
    call = q, k, v, out, lse, mask, *(offsets[:2] if offsets else (None, None)), grad_out, grad_lse
    call = *call, live_rows, dq, dk, dv, statistics, p, ds

    see = rule.visibility
    of_mask = None if d_mask is None else MaskGradient(d_mask, q, k, has_all_pairs=not see.bounded)
    rows(*call, partial, ints=plan.chunks[0].place)
    if see.bounded and not offsets:
        _clear_what_is_not_seen(see, dq, dk, dv)

    def sums(chunk: Chunk, of_q: bool) -> torch.Tensor | None:
        at = plan.sums_at(chunk, of_q)
        return partial[at:] if at else partial

    for chunk in plan.all_chunks:
        gives_mask = of_mask is not None and chunk.of_q  # every visible pair is in one such chunk
        if gives_mask and see.bounded:
            ds[: chunk.pairs].zero_()  # tiles without visible pairs are not written
        scores(*call, None, ints=chunk.place)
        if chunk.of_q:
            of_q(*call, sums(chunk, True), ints=chunk.place)
        if chunk.of_k:
            of_k(*call, sums(chunk, False), ints=chunk.place)
        if gives_mask:
            of_mask.add(ds, chunk, scratch=p.view(torch.float32))  # products have read P
    if of_mask is not None:
        of_mask.finish()
