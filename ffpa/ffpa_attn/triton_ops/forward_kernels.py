"""This module is attention for small head dims in Triton: the forward, and what the gradients have in common with it.

Each program owns a block of rows (or, for the gradients of K and V, of keys) with its whole head dim and goes over the
tiles that it meets: first those in which all pairs see each other, then those at the edges, where some are hidden.

Nothing here is CUDA's alone: dots, exponentials, loops, and tiles read by pointers, or (TMA) by tensor descriptors.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))
FAR = tl.constexpr(2.0**14)  # an exponent of 2, beyond which a float leaves more than 1/1024 of it unsaid


# ---- what a launch hands over ----


class Strides(NamedTuple):
    """Strides of [B, H, N, D] or [B, H, N], in elements; columns lie side by side."""

    batch: tl.tensor
    head: tl.tensor
    row: tl.tensor


class MaskStrides(NamedTuple):
    """Strides of a mask; they are 0 where it is broadcast."""

    batch: tl.tensor
    head: tl.tensor
    row: tl.tensor
    key: tl.tensor


class Sizes(NamedTuple):
    """Sizes of a call; of packed sequences, those of the longest ones, and of all."""

    heads: tl.tensor  # heads of Q
    group: tl.tensor  # heads of Q to one of K
    longest_q: tl.tensor
    longest_k: tl.tensor
    total_q: tl.tensor
    total_k: tl.tensor


class Rule(NamedTuple):
    scale: tl.tensor
    softcap: tl.tensor
    left: tl.tensor
    right: tl.tensor


# ---- where things are ----


class Sequence(NamedTuple):
    """One head of one sequence, which is an entry of the batch, or packed."""

    batch: tl.tensor
    start_q: tl.tensor
    n_q: tl.tensor
    start_k: tl.tensor
    n_k: tl.tensor
    shift: tl.tensor  # the diagonal of row r is key r + shift


class Rows(NamedTuple):
    """The rows of a head: a pointer to the first, or a descriptor of the whole tensor and where the head begins."""

    source: tl.tensor
    batch: tl.tensor
    head: tl.tensor
    stride: tl.tensor
    length: tl.tensor


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
def _sequence(offsets_q, offsets_k, sizes, sequence, PACKED: tl.constexpr, TOP_LEFT: tl.constexpr):
    start_q, n_q = _span(offsets_q, sequence, sizes.longest_q, sizes.total_q, PACKED)
    start_k, n_k = _span(offsets_k, sequence, sizes.longest_k, sizes.total_k, PACKED)
    batch = sequence if not PACKED else tl.zeros([], tl.int32)
    shift = 0 if TOP_LEFT else n_k - n_q
    return Sequence(batch, start_q, n_q, start_k, n_k, shift)


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
def _load(x, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """Loads [ROWS, COLUMNS] from row `first` on; what lies outside is 0."""
    if TMA:
        tile = x.source.load([x.batch, x.head, first, 0]).reshape([ROWS, COLUMNS])
    else:
        rows, columns = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        pointers = x.source + rows.to(tl.int64)[:, None] * x.stride + columns[None, :]
        if COLUMNS == D:
            tile = tl.load(pointers, mask=(rows < x.length)[:, None], other=0.0)
        else:
            tile = tl.load(pointers, mask=(rows < x.length)[:, None] & _real(columns, D)[None, :], other=0.0)
    return tile


@triton.jit
def _store(x, first, values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr):
    rows, columns = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    pointers = x.source + rows.to(tl.int64)[:, None] * x.stride + columns[None, :]
    tl.store(
        pointers, values.to(x.source.dtype.element_ty), mask=(rows < x.length)[:, None] & _real(columns, D)[None, :]
    )


@triton.jit
def _tiles(first, block: tl.constexpr, other_end, before, after, tile: tl.constexpr):
    """Returns what a block meets of the others (rows or keys): the range, in whole tiles, that all of `block` from
    `first` on meet, and where the range that some meet begins and ends. One meets the others from before to after it.
    """
    begin = tl.maximum(first - before, 0) // tile * tile
    end = tl.maximum(tl.minimum(first + block + after, other_end), begin)
    all_begin = (tl.maximum(first + block - 1 - before, 0) + tile - 1) // tile * tile
    all_begin = tl.minimum(tl.maximum(all_begin, begin), tl.cdiv(end, tile) * tile)
    all_end = tl.maximum(tl.minimum(first + 1 + after, other_end) // tile * tile, all_begin)
    return all_begin, all_end, begin, end


@triton.jit
def _edge_tile(first, all_begin, all_end):
    """The edges are gone through as one range, which leaves out what is between all_begin and all_end."""
    return tl.where(first < all_begin, first, first + (all_end - all_begin))


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
def _unit(rule, RAW: tl.constexpr):
    """Returns the factor from a score of _scores to its exponent of 2. RAW scores are products; it scales them, too."""
    return rule.scale * LOG2E if RAW else LOG2E


@triton.jit
def _rounded_product(x, factor):
    """Returns x * factor, the same for all users: a compiler joins no such sum to another, as it joins a product."""
    return tl.fma(x, factor, 0.0)


@triton.jit
def _visible(s, rows, keys, at, rule):
    """Returns scores, -INF where a row does not see a key: [rows, keys], or transposed (of rows that are there, or
    whose P is 0). It compares bounds for what a thread has few of with what it has many of: that takes the fewest
    registers.
    """
    if rows.shape[1] == 1:
        last = tl.minimum(rows + (at.shift + rule.right), at.n_k - 1)
        seen = (keys >= rows + (at.shift - rule.left)) & (keys <= last)
    else:
        seen = (rows >= keys - (at.shift + rule.right)) & (rows <= keys - (at.shift - rule.left))
    return tl.where(seen, s, -INF)


@triton.jit
def _scores(
    s, rows, keys, at, rule, mask, mask_strides, RAW: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr
):  # fmt: skip
    """Makes scores of products. rows and keys broadcast to the shape of s. EDGE: some of these pairs are hidden."""
    if CAPPED:
        s = _rounded_product(_tanh(s * (rule.scale / rule.softcap)), rule.softcap)
    elif not RAW:
        s = _rounded_product(s, rule.scale)
    if MASK != "none":
        pointers = mask + rows.to(tl.int64) * mask_strides.row + keys.to(tl.int64) * mask_strides.key
        inside = (rows < at.n_q) & (keys < at.n_k)
        if MASK == "bool":
            s = tl.where(tl.load(pointers, mask=inside, other=0) != 0, s, -INF)
        else:
            added = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
            s = tl.where(added == -INF, -INF, s + added)  # -INF hides a pair, whatever the score is
    if EDGE:
        s = _visible(s, rows, keys, at, rule)
    return s


# ---- forward ----


@triton.jit
def _attend(
    acc, row_max, row_sum, q_tile, k, v, first, rows, at, rule, mask, mask_strides, D_QK: tl.constexpr, D_V: tl.constexpr,
    TMA: tl.constexpr, RAW: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, FAST: tl.constexpr, EDGE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Adds one more tile of keys. FAST: row_max is an exponent of 2, -FAR or more; else it is in units of scores."""
    unit = _unit(rule, RAW)
    k_tile = _load(k, first, KEYS, q_tile.shape[1], D_QK, TMA)
    s = tl.dot(q_tile, tl.trans(k_tile))
    keys = first + tl.arange(0, KEYS)
    s = _scores(s, rows[:, None], keys[None, :], at, rule, mask, mask_strides, RAW, CAPPED, MASK, EDGE)
    if FAST:
        new_max = tl.maximum(row_max, tl.max(s, 1) * unit)
        p = tl.exp2(s * unit - new_max[:, None])
        alpha = tl.exp2(row_max - new_max)
    else:
        new_max = tl.maximum(row_max, tl.max(s, 1))
        reference = new_max
        if EDGE or MASK != "none":
            reference = tl.where(new_max == -INF, 0.0, new_max)  # rows may have seen no key yet
        p = tl.exp2((s - reference[:, None]) * unit)
        alpha = tl.exp2((row_max - reference) * unit)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    v_tile = _load(v, first, KEYS, acc.shape[1], D_V, TMA)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
    return acc, new_max, row_sum


@triton.jit
def _attend_all(
    q_tile, k, v, first_row, rows, at, rule, mask, mask_strides, D_QK: tl.constexpr, D_V: tl.constexpr, TMA: tl.constexpr,
    EDGES: tl.constexpr, RAW: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """Goes over all keys that the rows see: (O times the sum, the maximum as _attend has it, the sum)."""
    acc = tl.zeros([ROWS, WIDTH_V], tl.float32)
    row_max = tl.full([ROWS], -FAR if FAST else -INF, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    all_begin, all_end, begin, end = _tiles(first_row + at.shift, ROWS, at.n_k, rule.left, rule.right, KEYS)
    for first in range(all_begin, all_end, KEYS):
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q_tile, k, v, first, rows, at, rule, mask, mask_strides, D_QK, D_V, TMA, RAW, CAPPED, MASK,
            FAST, False, KEYS,
        )  # fmt: skip
    if EDGES:
        for edge in tl.range(begin, end - (all_end - all_begin), KEYS, disable_licm=True):
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q_tile, k, v, _edge_tile(edge, all_begin, all_end), rows, at, rule, mask, mask_strides,
                D_QK, D_V, TMA, RAW, CAPPED, MASK, FAST, True, KEYS,
            )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def _join_sink(top, sink):
    """Returns what a row's maximum becomes where its head has a sink, what multiplies its sum and O, and what the sink
    adds to its sum. No factor is above 1, whatever the sink is; a row that sees no key has a maximum of -INF.
    """
    new_top = tl.maximum(top, sink)
    reference = tl.where(new_top == -INF, 0.0, new_top)  # there may be no sink, either
    return new_top, tl.exp(top - reference), tl.exp(sink - reference)


@triton.jit
def _raise_largest(largest, top, there):
    """Raises a head's largest score to that of rows that are there. A maximum is the same in any order."""
    best = tl.max(tl.where(there, top, -INF), 0)
    # Floats are compared by their bits, of which those of -0.0 are below all others in some releases of Triton.
    tl.atomic_max(largest, tl.where(best == 0.0, 0.0, best), sem="relaxed")


@triton.jit
def forward_kernel(
    q, k, v, out, lse, mask, offsets_q, offsets_k, sinks, largest, q_strides, k_strides, v_strides, out_strides, lse_strides,
    mask_strides, sizes, rule, PACKED: tl.constexpr, TOP_LEFT: tl.constexpr, EDGES: tl.constexpr, RAW: tl.constexpr,
    CAPPED: tl.constexpr, MASK: tl.constexpr, LSE: tl.constexpr, SINKS: tl.constexpr, LARGEST: tl.constexpr, TMA: tl.constexpr,
    D_QK: tl.constexpr, D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """SINKS: `sinks` [heads] join the sums. LARGEST: `largest` [sequences, heads] is raised to the largest score."""
    row_blocks = tl.cdiv(sizes.longest_q, ROWS)
    program = tl.program_id(0)
    head = program // row_blocks % sizes.heads
    first_row = (row_blocks - 1 - program % row_blocks) * ROWS  # causal rows at the end see the most: they go first
    at = _sequence(offsets_q, offsets_k, sizes, program // row_blocks // sizes.heads, PACKED, TOP_LEFT)
    if first_row < at.n_q:
        head_kv = head // sizes.group
        q_rows = _rows(q, q_strides, at.batch, head, at.start_q, at.n_q, TMA)
        k_rows = _rows(k, k_strides, at.batch, head_kv, at.start_k, at.n_k, TMA)
        v_rows = _rows(v, v_strides, at.batch, head_kv, at.start_k, at.n_k, TMA)
        out_rows = _rows(out, out_strides, at.batch, head, at.start_q, at.n_q, False)
        mask += at.batch.to(tl.int64) * mask_strides.batch + head.to(tl.int64) * mask_strides.head

        q_tile = _load(q_rows, first_row, ROWS, WIDTH_QK, D_QK, TMA)
        rows = first_row + tl.arange(0, ROWS)
        acc, row_max, row_sum = _attend_all(
            q_tile, k_rows, v_rows, first_row, rows, at, rule, mask, mask_strides, D_QK, D_V, TMA, EDGES, RAW, CAPPED, MASK,
            RAW, ROWS, KEYS, WIDTH_V,
        )  # fmt: skip
        top = row_max
        if RAW:
            top = row_max / LOG2E
            far = (tl.abs(row_max) >= FAR) & (rows < at.n_q)
            if tl.max(far.to(tl.int32), 0) > 0:  # these rows are far, or see no key
                acc, row_max, row_sum = _attend_all(
                    q_tile, k_rows, v_rows, first_row, rows, at, rule, mask, mask_strides, D_QK, D_V, TMA, EDGES, RAW, CAPPED,
                    MASK, False, ROWS, KEYS, WIDTH_V,
                )  # fmt: skip
                top = row_max * rule.scale
        if LARGEST:
            _raise_largest(largest + program // row_blocks, top, rows < at.n_q)
        if SINKS:
            top, kept, added = _join_sink(top, tl.load(sinks + head))
            row_sum = row_sum * kept + added
        seen = row_sum != 0  # NaN counts as seen
        weight = 1.0 / tl.where(seen, row_sum, 1.0)
        if SINKS:
            weight *= kept
        _store(out_rows, first_row, acc * weight[:, None], ROWS, WIDTH_V, D_V)
        if LSE:
            value = tl.where(seen, top + tl.log(tl.where(seen, row_sum, 1.0)), -INF)
            tl.store(lse + _offset(lse_strides, at.batch, head, at.start_q) + rows, value, mask=rows < at.n_q)
