"""This module is attention for small head dims in Triton: the forward, and what the gradients have in common with it.

Each program owns a block of rows (or, for the gradients of K and V, of keys) with its whole head dim and goes over the
tiles that it meets: first those in which all pairs see each other, then those at the edges, where some are hidden.

Nothing here is CUDA's alone: dots, exponentials, loops, and tiles read by pointers, or (TMA) by tensor descriptors.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))
FAR = tl.constexpr(2.0**14)  # an exponent of 2, beyond which a float leaves more than 1/1024 of it unsaid


# ---- what a launch hands over ----


# Strides of [B, H, N, D], [B, H, N] or a mask [B, H, Nq, Nk] are counted in elements; columns lie side by side, and what
# is broadcast has a stride of 0.
Strides = namedtuple("Strides", "batch head row")
MaskStrides = namedtuple("MaskStrides", "batch head row key")
ForwardStrides = namedtuple("ForwardStrides", "q k v out lse")

# These are the numbers of a call: there are `group` heads of Q to one of K; lengths of packed sequences are those of the
# longest ones, and of all.
Call = namedtuple("Call", "heads group longest_q longest_k total_q total_k scale softcap left right mask_strides")


class How(NamedTuple):
    """This is what a kernel is compiled for."""

    PACKED: bool
    TOP_LEFT: bool
    RAW: bool  # scores are products still
    CAPPED: bool
    MASK: str  # none, bool or additive
    TMA: bool
    D_QK: int
    D_V: int
    WIDTH_QK: int  # columns of a tile
    WIDTH_V: int
    EDGES: bool = True  # some pairs are hidden in some tiles
    BLIND: bool = False  # the rule blinds some rows
    LSE: bool = False
    FP8: tuple | None = None  # what fp8_kernels are compiled for
    SLICE: int = 0  # rows of the persistent kernel's tiles that are on chip at once
    ROWS: int = 0
    KEYS: int = 0


# ---- where things are ----


# A Sequence is one head of an entry of the batch, or of a packed sequence. The diagonal of row r is key r + shift.
Sequence = namedtuple("Sequence", "batch start_q n_q start_k n_k shift")

# The rows of a head come with a pointer to the first, or with a descriptor of the whole tensor and where the head begins.
Rows = namedtuple("Rows", "source batch head stride length")

# What a block meets of the others (rows or keys) is the range, in whole tiles, that all of it meet, and a range that
# some meet.
Met = namedtuple("Met", "all_begin all_end begin end")


@triton.jit
def _span(offsets, sequence, longest, total, PACKED: tl.constexpr):
    """Returns (first row, rows) of a sequence. Packed: lengths count as clamped, and no row leaves the tensor.

    Triton makes a constant of a 1 that it is given. With a single key the compiler then knew the P of all others to be
    0, gave products the same register several times, and results on a GPU were wrong: hence a factor of 1 that it does
    not know, and which leaves it what divides the length.
    """
    first, length = tl.zeros([], tl.int32), longest * (tl.program_id(1) + 1)
    if PACKED:
        first = tl.minimum(tl.maximum(tl.load(offsets + sequence), 0), total)
        end = tl.minimum(tl.maximum(tl.load(offsets + sequence + 1), 0), total)
        length = tl.minimum(tl.maximum(end - first, 0), longest)
    return first, length


@triton.jit
def _sequence(offsets_q, offsets_k, call, sequence, HOW: tl.constexpr):
    start_q, n_q = _span(offsets_q, sequence, call.longest_q, call.total_q, HOW.PACKED)
    start_k, n_k = _span(offsets_k, sequence, call.longest_k, call.total_k, HOW.PACKED)
    batch = sequence if not HOW.PACKED else tl.zeros([], tl.int32)
    shift = 0 if HOW.TOP_LEFT else n_k - n_q
    return Sequence(batch, start_q, n_q, start_k, n_k, shift)


@triton.jit
def _own_rows(offsets_q, offsets_k, call, HOW: tl.constexpr):
    """Returns the (sequence, head, first row) of a program that owns rows. Causal rows at the end see the most: they
    go first.
    """
    row_blocks = tl.cdiv(call.longest_q, HOW.ROWS)
    program = tl.program_id(0)
    head = program // row_blocks % call.heads
    first_row = (row_blocks - 1 - program % row_blocks) * HOW.ROWS
    return _sequence(offsets_q, offsets_k, call, program // row_blocks // call.heads, HOW), head, first_row


@triton.jit
def _aligned(step, source):
    """Returns a stride, in a form that shows what rows of 16-bit floats always have: they begin at 16 bytes. The
    compiler asks numbers for multiples of 16 alone, and read other rows by single elements, with no copies under way.
    """
    if source.dtype.element_ty.primitive_bitwidth == 16:
        step = step // 8 * 8
    return step


@triton.jit
def _offset(strides, batch, head, first):
    """Returns the offset of a row in its tensor, in 64 bits."""
    return batch.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head + first.to(tl.int64) * strides.row


@triton.jit
def _rows(source, strides, batch, head, first, length, TMA: tl.constexpr):
    step = strides.row
    if not TMA:
        step = _aligned(step, source)
        source += _offset(
            Strides(_aligned(strides.batch, source), _aligned(strides.head, source), step), batch, head, first
        )
    return Rows(source, batch, head, step, length)


@triton.jit
def _real(columns, D: tl.constexpr):
    """Says which columns a head has, in a form that shows eight of them to be alike, so that they are read at once."""
    return columns // 8 < D // 8


@triton.jit
def _pointers(x, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr):
    """Returns (where they lie, which of them there are) of [ROWS, COLUMNS] from row `first` on."""
    rows, columns = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    there = (rows < x.length)[:, None]
    if COLUMNS != D:
        there = there & _real(columns, D)[None, :]
    return x.source + rows.to(tl.int64)[:, None] * x.stride + columns[None, :], there


@triton.jit
def _load(x, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """Loads [ROWS, COLUMNS] from row `first` on; what lies outside is 0."""
    if TMA:
        tile = x.source.load([x.batch, x.head, first, 0]).reshape([ROWS, COLUMNS])
    else:
        pointers, there = _pointers(x, first, ROWS, COLUMNS, D)
        tile = tl.load(pointers, mask=there, other=0.0)
    return tile


@triton.jit
def _store(x, first, values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr):
    pointers, there = _pointers(x, first, ROWS, COLUMNS, D)
    tl.store(pointers, values.to(x.source.dtype.element_ty), mask=there)


@triton.jit
def _meet(first, block: tl.constexpr, other_end, before, after, tile: tl.constexpr):
    """Returns what a block from `first` on meets. One meets the others from before to after it."""
    begin = tl.maximum(first - before, 0) // tile * tile
    end = tl.maximum(tl.minimum(first + block + after, other_end), begin)
    all_begin = (tl.maximum(first + block - 1 - before, 0) + tile - 1) // tile * tile
    all_begin = tl.minimum(tl.maximum(all_begin, begin), tl.cdiv(end, tile) * tile)
    all_end = tl.maximum(tl.minimum(first + 1 + after, other_end) // tile * tile, all_begin)
    return Met(all_begin, all_end, begin, end)


@triton.jit
def _range(met, EDGE: tl.constexpr):
    """Returns where the whole tiles begin and end, or the edges, as one range that leaves out what is between them."""
    begin, end = met.all_begin, met.all_end
    if EDGE:
        begin, end = met.begin, met.end - (met.all_end - met.all_begin)
    return begin, end


@triton.jit
def _tile_at(first, met, EDGE: tl.constexpr):
    """Returns where the tile lies that is at `first` in such a range."""
    if EDGE:
        first = tl.where(first < met.all_begin, first, first + (met.all_end - met.all_begin))
    return first


# ---- scores ----


@triton.jit
def _tanh(x):
    """Computes tanh, also for tiny x, where 1 - 2 / (e^2x + 1) has no digits left."""
    square = x * x
    near_0 = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(tl.abs(x) < 0.1, near_0, 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1))


@triton.jit
def _slope_of_tanh(x):
    """Computes 1 - tanh^2, with all its digits where tanh is almost 1."""
    small = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    return 4 * small / ((1 + small) * (1 + small))


@triton.jit
def _unit(call, HOW: tl.constexpr):
    """Returns the factor from a score of _scores to its exponent of 2. RAW scores are products; it scales them, too."""
    return call.scale * LOG2E if HOW.RAW else LOG2E


@triton.jit
def _rounded_product(x, factor):
    """Returns x * factor, the same for all users: a compiler joins no such sum to another, as it joins a product."""
    return tl.fma(x, factor, 0.0)


@triton.jit
def _visible(s, rows, keys, at, call):
    """Returns scores, -INF where a row does not see a key: [rows, keys], or transposed (of rows that are there, or
    whose P is 0). It compares bounds for what a thread has few of with what it has many of: that takes the fewest
    registers.
    """
    if rows.shape[1] == 1:
        last = tl.minimum(rows + (at.shift + call.right), at.n_k - 1)
        seen = (keys >= rows + (at.shift - call.left)) & (keys <= last)
    else:
        seen = (rows >= keys - (at.shift + call.right)) & (rows <= keys - (at.shift - call.left))
    return tl.where(seen, s, -INF)


@triton.jit
def _mask_of(mask, at, head, call):
    """Returns the mask of a head."""
    return mask + at.batch.to(tl.int64) * call.mask_strides.batch + head.to(tl.int64) * call.mask_strides.head


@triton.jit
def _scores(s, rows, keys, at, call, mask, HOW: tl.constexpr, EDGE: tl.constexpr):
    """Makes scores of products. rows and keys broadcast to the shape of s. EDGE: some of these pairs are hidden."""
    if HOW.CAPPED:
        s = _rounded_product(_tanh(s * (call.scale / call.softcap)), call.softcap)
    elif not HOW.RAW:
        s = _rounded_product(s, call.scale)
    if HOW.MASK != "none":
        pointers = mask + rows.to(tl.int64) * call.mask_strides.row + keys.to(tl.int64) * call.mask_strides.key
        inside = (rows < at.n_q) & (keys < at.n_k)
        if HOW.MASK == "bool":
            s = tl.where(tl.load(pointers, mask=inside, other=0) != 0, s, -INF)
        else:
            added = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
            s = tl.where(added == -INF, -INF, s + added)  # -INF hides a pair, whatever the score is
    if EDGE:
        s = _visible(s, rows, keys, at, call)
    return s


@triton.jit
def _softmax(s, row_max, unit, EXPONENT: tl.constexpr, FAST: tl.constexpr, GUARDED: tl.constexpr):
    """Returns (P times 2^EXPONENT of a tile of scores, the new maximum, by what earlier sums are multiplied). FAST: the
    maximum is an exponent of 2, -FAR or more; else it is in units of scores. GUARDED: rows may have seen no key yet.
    """
    if FAST:
        new_max = tl.maximum(row_max, tl.max(s, 1) * unit)
        p = tl.exp2(s * unit - (new_max - EXPONENT)[:, None])
        alpha = tl.exp2(row_max - new_max)
    else:
        new_max = tl.maximum(row_max, tl.max(s, 1))
        reference = tl.where(new_max == -INF, 0.0, new_max) if GUARDED else new_max
        exponents = (s - reference[:, None]) * unit
        p = tl.exp2(exponents + EXPONENT if EXPONENT else exponents)
        alpha = tl.exp2((row_max - reference) * unit)
    return p, new_max, alpha


# ---- forward ----


@triton.jit
def _attend(
    acc, row_max, row_sum, q_tile, k, v, first, rows, at, call, mask, HOW: tl.constexpr, FAST: tl.constexpr, EDGE: tl.constexpr
):  # fmt: skip
    """Adds one more tile of keys."""
    k_tile = _load(k, first, HOW.KEYS, HOW.WIDTH_QK, HOW.D_QK, HOW.TMA)
    s = tl.dot(q_tile, tl.trans(k_tile))
    keys = first + tl.arange(0, HOW.KEYS)
    s = _scores(s, rows[:, None], keys[None, :], at, call, mask, HOW, EDGE)
    p, new_max, alpha = _softmax(s, row_max, _unit(call, HOW), 0, FAST, EDGE or HOW.MASK != "none")
    row_sum = row_sum * alpha + tl.sum(p, 1)
    v_tile = _load(v, first, HOW.KEYS, HOW.WIDTH_V, HOW.D_V, HOW.TMA)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
    return acc, new_max, row_sum


@triton.jit
def _attend_all(q_tile, k, v, first_row, rows, at, call, mask, HOW: tl.constexpr, FAST: tl.constexpr):
    """Goes over all keys that the rows see: (O times the sum, the maximum as _softmax has it, the sum)."""
    acc = tl.full([HOW.ROWS, HOW.WIDTH_V], 0.0, tl.float32)
    row_max = tl.full([HOW.ROWS], -FAR if FAST else -INF, tl.float32)
    row_sum = tl.full([HOW.ROWS], 0.0, tl.float32)
    met = _meet(first_row + at.shift, HOW.ROWS, at.n_k, call.left, call.right, HOW.KEYS)
    for EDGE in tl.static_range(1 + HOW.EDGES):
        begin, end = _range(met, EDGE)
        for step in tl.range(begin, end, HOW.KEYS, disable_licm=EDGE):
            first = _tile_at(step, met, EDGE)
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q_tile, k, v, first, rows, at, call, mask, HOW, FAST, EDGE
            )
    return acc, row_max, row_sum


@triton.jit
def forward_kernel(q, k, v, out, lse, mask, offsets_q, offsets_k, strides, call, HOW: tl.constexpr):
    at, head, first_row = _own_rows(offsets_q, offsets_k, call, HOW)
    if first_row < at.n_q:
        head_kv = head // call.group
        q_rows = _rows(q, strides.q, at.batch, head, at.start_q, at.n_q, HOW.TMA)
        k_rows = _rows(k, strides.k, at.batch, head_kv, at.start_k, at.n_k, HOW.TMA)
        v_rows = _rows(v, strides.v, at.batch, head_kv, at.start_k, at.n_k, HOW.TMA)
        out_rows = _rows(out, strides.out, at.batch, head, at.start_q, at.n_q, False)
        mask = _mask_of(mask, at, head, call)

        q_tile = _load(q_rows, first_row, HOW.ROWS, HOW.WIDTH_QK, HOW.D_QK, HOW.TMA)
        rows = first_row + tl.arange(0, HOW.ROWS)
        acc, row_max, row_sum = _attend_all(q_tile, k_rows, v_rows, first_row, rows, at, call, mask, HOW, HOW.RAW)
        top = row_max
        if HOW.RAW:
            top = row_max / LOG2E
            far = (tl.abs(row_max) >= FAR) & (rows < at.n_q)
            if tl.max(far.to(tl.int32), 0) > 0:  # these rows are far, or see no key
                acc, row_max, row_sum = _attend_all(q_tile, k_rows, v_rows, first_row, rows, at, call, mask, HOW, False)
                top = row_max * call.scale
        seen = row_sum != 0  # NaN counts as seen
        values = acc * (1.0 / tl.where(seen, row_sum, 1.0))[:, None]
        _store(out_rows, first_row, values, HOW.ROWS, HOW.WIDTH_V, HOW.D_V)
        if HOW.LSE:
            value = tl.where(seen, top + tl.log(tl.where(seen, row_sum, 1.0)), -INF)
            tl.store(lse + _offset(strides.lse, at.batch, head, at.start_q) + rows, value, mask=rows < at.n_q)
