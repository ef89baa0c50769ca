"""This is the contract in plain PyTorch: exact, deterministic, on any device, within the workspace cap.

Everything is computed tile by tile: a tile is a few heads x a block of query rows x a block of keys, small enough that
all its intermediates fit the workspace. The forward softmax sees whole rows, so its tiles span all visible keys; the
backward recomputes P from the LSE and can cut both ways. Products take 16-bit inputs and accumulate in f32.

Tensors of the query side are [H, N, D] views; a tile's rows are folded with the heads of their GQA group, so that
q_tile is [n, G * rows, D] and scores are [n, G * rows, keys] for n key/value heads.

Packed sequences and pages are read through offsets and tables on the device (reference_rows.py): no length is known here,
only the longest, so rows past a sequence's end are loaded as zeros, seen by nobody, and stored nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

from ..specs.problem import FP8_BLOCK, Visibility
from .reference_heads import Heads
from .reference_rows import Block, Dense, Sequence, dense_sequences

_INF = math.inf
_ROUNDINGS = 2.0**-21  # the error of an LSE, relative to it
_FAR = 2.0**14 * math.log(2)  # the LSE from which its rounding begins to show
_ENOUGH_BYTES = 256 << 20  # bytes in flight beyond which more gain nothing
_FORWARD_BYTES_PER_SCORE = 16  # bytes for f32 scores, one f32 temporary, P in 16 bits, masks
_BACKWARD_BYTES_PER_SCORE = 28  # bytes for f32 P, dP, dS and a temporary, 16-bit copies, masks
_THIN = 64  # rows (or keys) below which a tile's products are slow
_BYTES_PER_VALUE = 20  # bytes for a loaded element of q, k, v, o, dO: 16-bit copy, f32 copy, f32 partial results


class Rule(NamedTuple):
    """How raw q.k becomes the score that softmax sees: cap(scale * q.k) + mask, over the visible keys."""

    scale: float
    softcap: float
    visibility: Visibility


def align_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the mask with all four dims, as a view."""
    return None if mask is None else mask[(None,) * (4 - mask.dim())]


# ---- 8-bit tensors: a tile is loaded as the float32 that it means ----


def scale_by_block(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns [B, H, blocks] as a view of a scale of x [B, H, N, D]: one of all, [B, H], or [B, H, blocks]."""
    if scale.dim() == 2:
        scale = scale[..., None]
    return scale.expand(*x.shape[:2], -(-x.shape[2] // FP8_BLOCK))


def row_scales(scale: torch.Tensor, rows: Block) -> torch.Tensor:
    """Turns [..., blocks] into [..., rows, 1]."""
    first, last = rows[0] // FP8_BLOCK, -(-rows[1] // FP8_BLOCK)
    by_row = scale[..., first:last].repeat_interleave(FP8_BLOCK, -1)
    return by_row[..., rows[0] - first * FP8_BLOCK :][..., : rows[1] - rows[0], None]


class Dequantised:
    """A tensor x * scale [B, H, N, D] in float32, of which only what is asked for ever exists."""

    dtype = torch.float32

    def __init__(self, x: torch.Tensor, scale: torch.Tensor | None):
        self.x, self.scale, self.shape, self.device = x, scale, x.shape, x.device

    def __getitem__(self, at: tuple[int, slice, slice]) -> torch.Tensor:
        batch, heads, rows = at
        values = self.x[at].float()
        if self.scale is not None:
            values.mul_(row_scales(self.scale[batch, heads], (rows.start, rows.stop)))
        return values


# ---- one tile ----


def _matmul(a: torch.Tensor, b: torch.Tensor, like: torch.dtype) -> torch.Tensor:
    """Returns batched a @ b in f32: on a GPU from inputs rounded to a 16-bit type `like`, elsewhere from f32 inputs."""
    if a.is_cuda and like != torch.float32:
        return torch.bmm(a.to(like), b.to(like), out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


class Tile(NamedTuple):
    """It is some key/value heads of a sequence, with the query heads that share them, and some of the rows."""

    seq: Sequence
    heads: slice
    heads_q: slice
    rows: Block

    def load(self, x: torch.Tensor) -> torch.Tensor:
        """Loads [n, G * rows, D] of a tensor of the query side."""
        return self._fold(self.seq.queries.load(x, self.heads_q, self.rows))

    def load_lse(self, x: torch.Tensor) -> torch.Tensor:
        return self._fold(self.seq.queries.load(x, self.heads_q, self.rows, outside=-_INF))[..., None]

    def load_keys(self, x: torch.Tensor, keys: Block) -> torch.Tensor:
        return self.seq.keys.load(x, self.heads, keys)

    def store(self, x: torch.Tensor, value: torch.Tensor) -> None:
        if x.dtype.itemsize == 1:  # such a type may have no infinity
            largest = torch.finfo(x.dtype).max
            value = value.clamp(-largest, largest)
        self.seq.queries.store(x, self.heads_q, self.rows, self.by_head(value))

    def store_lse(self, x: torch.Tensor, value: torch.Tensor) -> None:
        self.seq.queries.store_lse(x, self.heads_q, self.rows, self.by_head(value).squeeze(-1))

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        """Turns [n, G * rows, D] into [n * G, rows, D]."""
        return x.view(-1, self.rows[1] - self.rows[0], x.shape[-1])

    def _fold(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(self.heads.stop - self.heads.start, -1, *x.shape[2:])


def _visible_keys(seq: Sequence, see: Visibility, rows: Block) -> Block:
    """Returns a range that holds every key that one of the rows may see; all keys where lengths are the device's."""
    n_k = seq.keys.length
    if not isinstance(seq.keys, Dense):
        return (0, n_k)
    shift = 0 if see.top_left else n_k - seq.queries.length
    lo = rows[0] + shift - see.left if see.left >= 0 else 0
    hi = rows[1] + shift + see.right if see.right >= 0 else n_k
    return (max(lo, 0), min(max(hi, 0), n_k))


def _hidden(seq: Sequence, see: Visibility, rows: Block, keys: Block, device) -> torch.Tensor | None:
    """Returns [rows, keys], True where the row may not see the key, or None where all are visible."""
    packed = not isinstance(seq.keys, Dense)
    if not packed and not see.bounded:
        return None
    row = torch.arange(*rows, dtype=torch.int32, device=device)[:, None]
    key = torch.arange(*keys, dtype=torch.int32, device=device)[None, :]
    if packed:
        lengths = seq.queries.true_length, seq.keys.true_length
        hidden = (row >= lengths[0]) | (key >= lengths[1])
    else:
        lengths = seq.queries.length, seq.keys.length
        hidden = None
    distance = key - row if see.top_left else key - row - (lengths[1] - lengths[0])
    too_early = [distance < -see.left] if see.left >= 0 else []
    for beyond in too_early + ([distance > see.right] if see.right >= 0 else []):
        hidden = beyond if hidden is None else hidden.logical_or_(beyond)
    return hidden


def _scores(raw, rule: Rule, tile: Tile, keys: Block) -> torch.Tensor:
    """Turns raw q.k [n, G * rows, keys] into scores, -inf where a row may not see a key, in place."""
    scores = raw.mul_(rule.scale)
    if rule.softcap:
        scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    by_head, mask = tile.by_head(scores), tile.seq.mask
    if mask is not None:
        parts = zip((tile.heads_q, slice(*tile.rows), slice(*keys)), mask.shape, strict=True)
        mask = mask[tuple(part if size > 1 else slice(None) for part, size in parts)]
    if mask is not None and mask.dtype == torch.bool:
        by_head.masked_fill_(~mask, -_INF)
    elif mask is not None:
        by_head.add_(mask).masked_fill_(mask == -_INF, -_INF)  # -inf hides a pair, whatever its score is
    hidden = _hidden(tile.seq, rule.visibility, tile.rows, keys, scores.device)
    if hidden is not None:
        by_head.masked_fill_(hidden, -_INF)
    return scores


# ---- how much at once ----


class Plan(NamedTuple):
    """Sizes of a tile: n key/value heads x rows x keys."""

    heads: int
    rows: int
    keys: int


def _blocks(lo: int, hi: int, step: int) -> Iterator[Block]:
    for start in range(lo, hi, step):
        yield (start, min(start + step, hi))


def _head_blocks(q, k, heads: int) -> Iterator[tuple[slice, slice]]:
    """Gives so many key/value heads at a time, with the query heads that share them."""
    group = q.shape[-3] // k.shape[-3]
    for h0, h1 in _blocks(0, k.shape[-3], heads):
        yield slice(h0, h1), slice(h0 * group, h1 * group)


def _tiles(q, k, seq: Sequence, plan: Plan) -> Iterator[Tile]:
    for heads, heads_q in _head_blocks(q, k, plan.heads):
        for rows in _blocks(0, seq.queries.length, plan.rows):
            yield Tile(seq, heads, heads_q, rows)


def _forward_plan(cap: int, q, k, v, seq: Sequence) -> Plan:
    """Plans tiles of whole key rows; half of the workspace is for scores, half for loaded rows."""
    half = min(cap, _ENOUGH_BYTES) // 2
    group = q.shape[-3] // k.shape[-3]
    n_q, n_k, width = seq.queries.length, max(seq.keys.length, 1), q.shape[-1] + v.shape[-1]
    row = group * (n_k * _FORWARD_BYTES_PER_SCORE + width * _BYTES_PER_VALUE)
    rows = max(min(n_q, half // row), 1)
    heads = max(min(k.shape[-3], half // (rows * row)), 1)
    keys = max(min(n_k, half // (heads * width * _BYTES_PER_VALUE)), 1)
    return Plan(heads, rows, keys)


def _backward_plan(cap: int, q, k, v, seq: Sequence) -> Plan:
    """Plans tiles: a third each is for scores, for what the query side loads, for what the key side loads and sums."""
    third = min(cap, _ENOUGH_BYTES) // 3
    group = q.shape[-3] // k.shape[-3]
    loaded = (q.shape[-1] + v.shape[-1]) * _BYTES_PER_VALUE
    keys = max(min(seq.keys.length, third // loaded), 1)
    rows = max(min(seq.queries.length, third // (group * loaded)), 1)
    while group * rows * keys * _BACKWARD_BYTES_PER_SCORE > third and rows * keys > 1:
        if rows > _THIN or keys <= _THIN:
            rows = -(-rows // 2)
        else:
            keys = -(-keys // 2)
    tile = max(keys * loaded, group * rows * max(loaded, keys * _BACKWARD_BYTES_PER_SCORE))
    return Plan(max(min(k.shape[-3], third // tile), 1), rows, keys)


# ---- forward ----


def forward(q, k, v, out, lse, sequences: Iterator[Sequence], rule: Rule, cap: int, heads: Heads) -> None:
    """Writes out and lse; both must come filled with what rows of no sequence give (0, -inf)."""
    for entry, seq in enumerate(sequences):
        plan = _forward_plan(cap, q, k, v, seq)
        for tile in _tiles(q, k, seq, plan):
            visible = _visible_keys(seq, rule.visibility, tile.rows)
            if visible[0] < visible[1]:
                row_max = _forward_tile(q, k, v, out, lse, tile, rule, visible, plan.keys, heads)
                if heads.largest is not None:
                    heads.keep_largest(entry, tile, row_max)
            elif heads.sinks is not None and lse is not None:
                tile.store_lse(lse, heads.sinks_of(tile))


def _forward_tile(q, k, v, out, lse, tile: Tile, rule: Rule, visible: Block, most_keys: int, heads: Heads):
    """Returns the largest score of each row, [n, G * rows, 1]."""
    q_tile = tile.load(q)
    scores = torch.empty(*q_tile.shape[:2], visible[1] - visible[0], dtype=torch.float32, device=q.device)
    blocks = list(_blocks(*visible, most_keys))
    for keys, part in zip(blocks, scores.split(most_keys, -1), strict=True):
        part.copy_(_matmul(q_tile, tile.load_keys(k, keys).mT, q.dtype))
    _scores(scores, rule, tile, visible)

    row_max = scores.amax(-1, keepdim=True)
    sinks = None if heads.sinks is None else heads.sinks_of(tile)
    top = row_max if sinks is None else torch.maximum(row_max, sinks)
    top = top.masked_fill(top == -_INF, 0.0)
    p = scores.sub_(top).exp_()
    row_sum = p.sum(-1, keepdim=True)
    if sinks is not None:
        row_sum += (sinks - top).exp_()

    o = torch.zeros(*q_tile.shape[:2], v.shape[-1], dtype=torch.float32, device=q.device)
    for keys, part in zip(blocks, p.split(most_keys, -1), strict=True):
        o += _matmul(part, tile.load_keys(v, keys), v.dtype)
    o.div_(row_sum.masked_fill(row_sum == 0, 1.0))
    tile.store(out, o)
    if lse is not None:
        tile.store_lse(lse, top + row_sum.log())
    return row_max


# ---- backward ----


def _is_far(lse: torch.Tensor) -> torch.Tensor:
    return (lse.abs() > _FAR) & lse.isfinite()


class _Gradients:
    """What one call of the backward knows: inputs, and how to recompute a tile of P and dS from them."""

    def __init__(self, grad_out, grad_lse, q, k, v, out, lse, rule: Rule):
        self.grad_out, self.grad_lse, self.q, self.k, self.v, self.out, self.lse = grad_out, grad_lse, q, k, v, out, lse
        self.rule = rule
        self.far = lse.is_cuda or bool(_is_far(lse).any())  # nobody waits for a GPU to hear that no row is far
        self.largest, self.shares = torch.full_like(lse, -_INF), torch.zeros_like(lse)

    def row_side(self, tile: Tile):
        """Gives q, dO: [n, G * rows, D]; reference (an LSE), delta = rowsum(dO * O) - dLSE, share: [n, G * rows, 1]."""
        q, d_out, out = map(tile.load, (self.q, self.grad_out, self.out))
        lse, largest, share = map(tile.load_lse, (self.lse, self.largest, self.shares))
        delta = (d_out.float() * out.float()).sum(-1, keepdim=True)
        if self.grad_lse is not None:
            delta -= tile.load_lse(self.grad_lse)
        # A row without keys passes on nothing, whatever it holds: P = exp(0 - inf) = 0.
        empty = lse == -_INF
        q, d_out, delta = (x.masked_fill(empty, 0) for x in (q, d_out, delta))
        reference = lse.masked_fill(empty, _INF).where(largest == -_INF, largest)
        return q, d_out, reference, delta, share.clamp(min=0)

    def scores_and_slope(self, tile: Tile, keys: Block, q, k):
        """Returns scores, and the slope of the softcap where there is one, 1 / cosh^2: [n, G * rows, keys], f32."""
        raw, rule = _matmul(q, k.mT, q.dtype), self.rule
        slope = raw.mul(rule.scale).div_(rule.softcap).cosh_().reciprocal_().square_() if rule.softcap else None
        return _scores(raw, rule, tile, keys), slope

    def find_shares(self, seq: Sequence, plan: Plan) -> None:
        """Gives a far row whose keys are all here, as its LSE says that these make, a softmax of its own: its largest
        score in place of the LSE, whose rounding shows in P, and ln of its sum as a share. Else keys of it are
        elsewhere, and the LSE is all.
        """
        if not self.far:
            return
        for tile in _tiles(self.q, self.k, seq, plan):
            q, _, lse, *_ = self.row_side(tile)
            largest, total = torch.full_like(lse, torch.finfo(lse.dtype).min), torch.zeros_like(lse)
            for keys in _blocks(*_visible_keys(seq, self.rule.visibility, tile.rows), plan.keys):
                scores, _ = self.scores_and_slope(tile, keys, q, tile.load_keys(self.k, keys))
                before, largest = largest, largest.maximum(scores.amax(-1, keepdim=True))
                total = total * (before - largest).exp() + scores.sub_(largest).exp_().sum(-1, keepdim=True)
            share = total.log()
            own = ((largest + share - lse).abs() <= lse.abs() * _ROUNDINGS) & _is_far(lse)
            tile.store_lse(self.largest, largest.where(own, -_INF))
            tile.store_lse(self.shares, share.where(own, 0.0))

    def pairs(self, tile: Tile, keys: Block, row_side, k, v):
        """Returns P, dS (of the score after softcap and mask), dS (of scale * q.k): [n, G * rows, keys], f32."""
        q, d_out, reference, delta, share = row_side
        scores, slope = self.scores_and_slope(tile, keys, q, k)
        p = scores.sub_(reference).clamp_(max=0).sub_(share).exp_()  # P above 1 would come from roundings
        d_score = _matmul(d_out, v.mT, v.dtype).sub_(delta).mul_(p)
        return p, d_score, d_score if slope is None else slope.mul_(d_score)


def backward(grad_out, grad_lse, q, k, v, out, lse, dq, dk, dv, sequences, rule: Rule, cap: int) -> None:
    """Adds dq, dk, dv to zeros. It needs out and lse of whole rows, which may be merged from several calls."""
    grads = _Gradients(grad_out, grad_lse, q, k, v, out, lse, rule)
    for seq in sequences:
        plan = _backward_plan(cap, q, k, v, seq)
        grads.find_shares(seq, plan)
        whole_rows = plan.keys >= seq.keys.length
        for heads, heads_q in _head_blocks(q, k, plan.heads):
            tiles = [Tile(seq, heads, heads_q, rows) for rows in _blocks(0, seq.queries.length, plan.rows)]
            for keys in _blocks(0, seq.keys.length, plan.keys):
                _key_gradients(grads, seq, heads, tiles, keys, dk, dv, dq if whole_rows else None)
            if not whole_rows:
                for tile in tiles:
                    _query_gradients(grads, tile, plan.keys, dq)


def _meet(seq: Sequence, see: Visibility, rows: Block, keys: Block) -> bool:
    lo, hi = _visible_keys(seq, see, rows)
    return max(lo, keys[0]) < min(hi, keys[1])


def _key_gradients(grads: _Gradients, seq, heads, tiles: list[Tile], keys, dk, dv, dq) -> None:
    """Computes dk, dv of a block of keys; with dq given the block holds all keys, and dq comes along."""
    scale = grads.rule.scale
    k, v = (seq.keys.load(x, heads, keys) for x in (grads.k, grads.v))
    sum_k, sum_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    for tile in tiles:
        if not _meet(seq, grads.rule.visibility, tile.rows, keys):
            continue
        q, d_out, *_ = row_side = grads.row_side(tile)
        p, _, ds = grads.pairs(tile, keys, row_side, k, v)
        sum_v += _matmul(p.mT, d_out, v.dtype)
        sum_k += _matmul(ds.mT, q, q.dtype)
        if dq is not None:
            tile.store(dq, _matmul(ds, k, q.dtype).mul_(scale))
    seq.keys.store(dk, heads, keys, sum_k.mul_(scale))
    seq.keys.store(dv, heads, keys, sum_v)


def _query_gradients(grads: _Gradients, tile: Tile, most_keys: int, dq) -> None:
    row_side = grads.row_side(tile)
    sum_q = torch.zeros(row_side[0].shape, dtype=torch.float32, device=dq.device)
    for keys in _blocks(*_visible_keys(tile.seq, grads.rule.visibility, tile.rows), most_keys):
        k, v = tile.load_keys(grads.k, keys), tile.load_keys(grads.v, keys)
        sum_q += _matmul(grads.pairs(tile, keys, row_side, k, v)[2], k, grads.q.dtype)
    tile.store(dq, sum_q.mul_(grads.rule.scale))


def mask_gradient(grad_out, grad_lse, q, k, v, out, lse, mask, d_mask, rule: Rule, cap: int) -> None:
    """Writes the gradient of an additive mask [B|1, H|1, n_q|1, n_k|1], summed over its broadcast dims.

    It goes over the mask block by block; all heads, rows and keys that share its elements are summed in f32.
    """
    grads = _Gradients(grad_out, grad_lse, q, k, v, out, lse, rule)
    sequences = list(dense_sequences(q, k, mask))
    sizes = len(sequences), k.shape[1], q.shape[2], k.shape[2]
    if 0 in sizes:
        return
    plan = _backward_plan(cap, q, k, v, sequences[0])
    for seq in sequences:
        grads.find_shares(seq, plan)
    group = q.shape[1] // k.shape[1]
    shared = [dim for dim, size in enumerate(mask.shape[1:]) if size == 1]
    # For each dim there are blocks of the mask, each with the blocks of batch entries, heads, rows or keys that share it.
    sharers = []
    for length, step, of_mask in zip(sizes, (1, 1, plan.rows, plan.keys), mask.shape, strict=True):
        blocks = list(_blocks(0, length, step))
        sharers.append([((0, 1), blocks)] if of_mask == 1 else [(block, [block]) for block in blocks])
    for (batch, in_batches), (heads, in_heads), (rows, in_rows), (keys, in_keys) in product(*sharers):
        mask_heads = slice(0, 1) if mask.shape[1] == 1 else slice(heads[0] * group, heads[1] * group)
        at = batch[0], mask_heads, slice(*rows), slice(*keys)
        total = torch.zeros(d_mask[at].shape, dtype=torch.float32, device=q.device)
        for (b, _), (h, _), tile_rows, tile_keys in product(in_batches, in_heads, in_rows, in_keys):
            if _meet(sequences[b], rule.visibility, tile_rows, tile_keys):
                tile = Tile(sequences[b], slice(h, h + 1), slice(h * group, (h + 1) * group), tile_rows)
                k_tile, v_tile = tile.load_keys(k, tile_keys), tile.load_keys(v, tile_keys)
                _, ds, _ = grads.pairs(tile, tile_keys, grads.row_side(tile), k_tile, v_tile)
                ds = tile.by_head(ds)
                total += ds.sum(shared, keepdim=True) if shared else ds
        d_mask[at] = total
