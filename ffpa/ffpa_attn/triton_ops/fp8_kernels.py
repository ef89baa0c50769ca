"""This module is the forward on fp8 values: 8-bit products of Q and K, and of P, rounded to fp8 as well, and V.

What keeps it exact: P is scaled up to the whole range of its type; each tile's products with V, and its sum of P, are
sums of their own, added in float32 (Hopper adds fp8 products in 14 bits); rows are divided by the sum of rounded P.

8-bit products want V with its keys side by side, and P of a row with four keys side by side in a thread, where the
scores leave two: sixteen columns go as 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15. A V that is transposed already is used
as it is, and TMA brings rows of K in an order that makes up for it. Else V is arranged once, transposed and in that
order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .forward_kernels import (
    FAR,
    INF,
    LOG2E,
    Rows,
    _edge_tile,
    _join_sink,
    _load,
    _offset,
    _raise_largest,
    _rounded_product,
    _rows,
    _sequence,
    _store,
    _tanh,
    _tiles,
    _visible,
)

SCALE_BLOCK = tl.constexpr(128)  # rows that share a scale
LEAST_SCALE = tl.constexpr(2.0**-100)  # the same as problem.LEAST_SCALE: a float holds it
_SUM_COLUMNS = tl.constexpr(16)  # columns of the narrowest product there is


@triton.jit
def _of_columns(x, strides, column_stride, heads, n, first, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns (where they lie, which of them there are) of the rows of the program's block, from column `first` on."""
    blocks = tl.cdiv(n, ROWS)
    program = tl.program_id(0)
    head, batch = (program // blocks % heads).to(tl.int64), (program // blocks // heads).to(tl.int64)
    rows, columns = program % blocks * ROWS + tl.arange(0, ROWS), first + tl.arange(0, COLUMNS)
    base = x + batch * strides.batch + head * strides.head
    pointers = base + rows.to(tl.int64)[:, None] * strides.row + columns.to(tl.int64)[None, :] * column_stride
    return pointers, (rows < n)[:, None] & (columns < D)[None, :]


@triton.jit
def arrange_values_kernel(
    values, arranged, values_strides, column_stride, heads, n, arranged_n, D: tl.constexpr, WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Writes [B, H, N, D] as [B, H, D, arranged_n], with keys in the order of P and zeros past the end."""
    pointers, there = _of_columns(values, values_strides, column_stride, heads, n, 0, D, KEYS, WIDTH)
    tile = tl.load(pointers, mask=there, other=0.0)
    tile = tile.reshape([KEYS // 16, 2, 4, 2, WIDTH]).permute([0, 2, 1, 3, 4]).reshape([KEYS, WIDTH])
    blocks, columns = arranged_n // KEYS, tl.arange(0, WIDTH)
    head, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * KEYS
    target = arranged + (head.to(tl.int64) * D + columns)[:, None] * arranged_n + (first + tl.arange(0, KEYS))[None, :]
    tl.store(target, tl.trans(tile), mask=(columns < D)[:, None])


@triton.jit
def block_maxima_kernel(
    x, maxima, x_strides, x_column_stride, heads, n, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """Finds the largest |x| of each block of ROWS rows; it reads KEYS columns at a time."""
    largest = tl.zeros([ROWS], tl.float32)
    for first in range(0, D, KEYS):
        pointers, there = _of_columns(x, x_strides, x_column_stride, heads, n, first, D, ROWS, KEYS)
        numbers = tl.load(pointers, mask=there, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(numbers), 1))
    tl.store(maxima + tl.program_id(0), tl.max(largest, 0))


@triton.jit
def quantize_kernel(
    x, scale, x8, x_strides, x8_strides, x_column_stride, x8_column_stride, heads, n, D: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Divides x by the scale of its block, and stores 8-bit floats."""
    divisor = tl.load(scale + tl.program_id(0))
    for first in range(0, D, KEYS):
        pointers, there = _of_columns(x, x_strides, x_column_stride, heads, n, first, D, ROWS, KEYS)
        numbers = tl.load(pointers, mask=there, other=0.0).to(tl.float32)
        targets, _ = _of_columns(x8, x8_strides, x8_column_stride, heads, n, first, D, ROWS, KEYS)
        tl.store(targets, tl.math.div_rn(numbers, divisor).to(x8.dtype.element_ty), mask=there)


@triton.jit
def _keys(first, KEYS: tl.constexpr, V_AS_IT_IS: tl.constexpr):
    """Returns which keys the columns of a tile of scores are."""
    columns = tl.arange(0, KEYS)
    if V_AS_IT_IS:
        columns = columns // 16 * 16 + columns % 8 // 2 * 4 + columns % 16 // 8 * 2 + columns % 2
    return first + columns


@triton.jit
def _as_arranged(p, ROWS: tl.constexpr, KEYS: tl.constexpr):
    return p.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, KEYS])


@triton.jit
def _attend(
    acc, row_max, row_sum, exact_sum, q_tile, k, v, ones, scale, k_scales, v_scales, k_block, v_block, first, rows, at, rule,
    FAST: tl.constexpr, CAPPED: tl.constexpr, LSE: tl.constexpr, TMA: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, EDGE: tl.constexpr,
    P_EXPONENT: tl.constexpr, V_AS_IT_IS: tl.constexpr, D_QK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds one more tile of keys. FAST: row_max is an exponent of 2, -FAR or more; else it is in units of scores."""
    if V_AS_IT_IS:
        k_tile = k.source.load([k.head + first // 16, 0, 0, 0, 0]).reshape([KEYS, q_tile.shape[1]])
    else:
        k_tile = _load(k, first, KEYS, q_tile.shape[1], D_QK, TMA)
    if TMA:  # this comes right after K, so that both are waited for at once
        v_tile = v.source.load([v.batch, v.head, 0, first]).reshape([acc.shape[1], KEYS])
    else:
        v_tile = _load(Rows(v.source + first, v.batch, v.head, v.stride, v.length), 0, acc.shape[1], KEYS, KEYS, False)
    s = tl.dot(q_tile, tl.trans(k_tile))
    natural = scale
    if K_SCALE == "block":
        natural *= tl.load(k_scales + first // SCALE_BLOCK * k_block)
    if CAPPED:
        s = _rounded_product(_tanh(s * (natural / rule.softcap)), rule.softcap)
    elif not FAST:
        s = _rounded_product(s, natural)
    if EDGE:
        s = _visible(s, rows[:, None], _keys(first, KEYS, V_AS_IT_IS)[None, :], at, rule)
    if FAST:
        unit = tl.maximum(natural, LEAST_SCALE) * LOG2E  # 0 times the -INF of hidden keys would be NaN
        new_max = tl.maximum(row_max, tl.max(s, 1) * unit)
        p = tl.exp2(s * unit - (new_max - P_EXPONENT)[:, None])
        alpha = tl.exp2(row_max - new_max)
    else:
        new_max = tl.maximum(row_max, tl.max(s, 1))
        reference = new_max
        if EDGE:
            reference = tl.where(new_max == -INF, 0.0, new_max)
        p = tl.exp2((s - reference[:, None]) * LOG2E + P_EXPONENT)
        alpha = tl.exp2((row_max - reference) * LOG2E)
    p_tile = _as_arranged(p.to(q_tile.dtype), q_tile.shape[0], KEYS)
    row_sum = row_sum * alpha[:, None] + tl.dot(p_tile, ones, max_num_imprecise_acc=KEYS)
    if LSE:
        exact_sum = exact_sum * alpha + tl.sum(p, 1)
    product = tl.dot(p_tile, tl.trans(v_tile), max_num_imprecise_acc=KEYS)
    if V_SCALE == "block":
        product *= tl.load(v_scales + first // SCALE_BLOCK * v_block)
    return acc * alpha[:, None] + product, new_max, row_sum, exact_sum


@triton.jit
def _attend_all(
    q_tile, k, v, ones, scale, k_scales, v_scales, k_block, v_block, first_row, rows, at, rule, EDGES: tl.constexpr,
    FAST: tl.constexpr, CAPPED: tl.constexpr, LSE: tl.constexpr, TMA: tl.constexpr, K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr, P_EXPONENT: tl.constexpr, V_AS_IT_IS: tl.constexpr, D_QK: tl.constexpr, WIDTH_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Goes over all keys rows see: (O times the sum, the maximum of _attend, the sum of the rounded P, that of P)."""
    acc = tl.zeros([ROWS, WIDTH_V], tl.float32)
    row_max = tl.full([ROWS], -FAR if FAST else -INF, tl.float32)
    row_sum = tl.zeros([ROWS, _SUM_COLUMNS], tl.float32)
    exact_sum = tl.zeros([ROWS], tl.float32)
    all_begin, all_end, begin, end = _tiles(first_row + at.shift, ROWS, at.n_k, rule.left, rule.right, KEYS)
    for first in range(all_begin, all_end, KEYS):
        acc, row_max, row_sum, exact_sum = _attend(
            acc, row_max, row_sum, exact_sum, q_tile, k, v, ones, scale, k_scales, v_scales, k_block, v_block, first, rows, at,
            rule, FAST, CAPPED, LSE, TMA, K_SCALE, V_SCALE, False, P_EXPONENT, V_AS_IT_IS, D_QK, KEYS,
        )  # fmt: skip
    if EDGES:
        for edge in tl.range(begin, end - (all_end - all_begin), KEYS, disable_licm=True):
            acc, row_max, row_sum, exact_sum = _attend(
                acc, row_max, row_sum, exact_sum, q_tile, k, v, ones, scale, k_scales, v_scales, k_block, v_block,
                _edge_tile(edge, all_begin, all_end), rows, at, rule, FAST, CAPPED, LSE, TMA, K_SCALE, V_SCALE, True,
                P_EXPONENT, V_AS_IT_IS, D_QK, KEYS,
            )  # fmt: skip
    return acc, row_max, row_sum, exact_sum


@triton.jit
def fp8_forward_kernel(
    q, k, v, out, lse, q_scales, k_scales, v_scales, sinks, largest, q_strides, k_strides, v_strides, out_strides, lse_strides,
    q_scale_strides, k_scale_strides, v_scale_strides, sizes, rule,
    TOP_LEFT: tl.constexpr, EDGES: tl.constexpr, RAW: tl.constexpr, CAPPED: tl.constexpr, LSE: tl.constexpr,
    SINKS: tl.constexpr, LARGEST: tl.constexpr, TMA: tl.constexpr, V_AS_IT_IS: tl.constexpr, Q_SCALED: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, P_EXPONENT: tl.constexpr, LARGEST_OUT: tl.constexpr, D_QK: tl.constexpr,
    D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """v is transposed. V_AS_IT_IS: k is a descriptor of all its rows [sixteens, 2, 4, 2, D], dims of a row's place in
    the order 2, 1, 3. K_SCALE and V_SCALE are none, head (or all of it) or block. P_EXPONENT: P is times 2 to this.
    """
    row_blocks = tl.cdiv(sizes.longest_q, ROWS)
    program = tl.program_id(0)
    head = program // row_blocks % sizes.heads
    first_row = (row_blocks - 1 - program % row_blocks) * ROWS
    at = _sequence(lse, lse, sizes, program // row_blocks // sizes.heads, False, TOP_LEFT)
    head_kv = head // sizes.group
    q_rows = _rows(q, q_strides, at.batch, head, at.start_q, at.n_q, TMA)
    k_rows = _rows(k, k_strides, at.batch, head_kv, at.start_k, at.n_k, TMA)
    if V_AS_IT_IS:
        sixteens = at.n_k // 16
        k_rows = Rows(k, at.batch, (at.batch * (sizes.heads // sizes.group) + head_kv) * sixteens, sixteens, at.n_k)
    v_columns = _rows(v, v_strides, at.batch, head_kv, at.start_k, D_V, TMA)
    out_rows = _rows(out, out_strides, at.batch, head, at.start_q, at.n_q, False)
    k_scales += _offset(k_scale_strides, at.batch, head_kv, at.start_k)
    v_scales += _offset(v_scale_strides, at.batch, head_kv, at.start_k)
    scale = rule.scale
    if Q_SCALED:
        scale *= tl.load(q_scales + _offset(q_scale_strides, at.batch, head, first_row // SCALE_BLOCK))
    if K_SCALE == "head":
        scale *= tl.load(k_scales)

    q_tile = _load(q_rows, first_row, ROWS, WIDTH_QK, D_QK, TMA)
    ones = tl.trans(tl.full([_SUM_COLUMNS, KEYS], 1.0, tl.float32).to(q_tile.dtype))
    rows = first_row + tl.arange(0, ROWS)
    acc, row_max, row_sum, exact_sum = _attend_all(
        q_tile, k_rows, v_columns, ones, scale, k_scales, v_scales, k_scale_strides.row, v_scale_strides.row, first_row, rows,
        at, rule, EDGES, RAW, CAPPED, LSE, TMA, K_SCALE, V_SCALE, P_EXPONENT, V_AS_IT_IS, D_QK, WIDTH_V, ROWS, KEYS,
    )  # fmt: skip
    top = row_max
    if RAW:
        top = row_max / LOG2E
        far = (tl.abs(row_max) >= FAR) & (rows < at.n_q)
        if tl.max(far.to(tl.int32), 0) > 0:  # these rows are far, or see no key
            acc, row_max, row_sum, exact_sum = _attend_all(
                q_tile, k_rows, v_columns, ones, scale, k_scales, v_scales, k_scale_strides.row, v_scale_strides.row, first_row,
                rows, at, rule, EDGES, False, CAPPED, LSE, TMA, K_SCALE, V_SCALE, P_EXPONENT, V_AS_IT_IS, D_QK, WIDTH_V, ROWS,
                KEYS,
            )  # fmt: skip
            top = row_max
    total = tl.max(row_sum, 1)  # the columns are all alike
    if LARGEST:
        _raise_largest(largest + program // row_blocks, top, rows < at.n_q)
    if SINKS:
        top, kept, added = _join_sink(top, tl.load(sinks + head))
        added *= 2.0**P_EXPONENT
        total = total * kept + added
        exact_sum = exact_sum * kept + added
    seen = total != 0
    weight = 1.0 / tl.where(seen, total, 1.0)
    if SINKS:
        weight *= kept
    values = acc * weight[:, None]
    if V_SCALE == "head":
        values *= tl.load(v_scales)
    if LARGEST_OUT < INF:
        values = tl.where(
            values > LARGEST_OUT, LARGEST_OUT, tl.where(values < -LARGEST_OUT, -LARGEST_OUT, values)
        )  # a NaN stays NaN
    _store(out_rows, first_row, values, ROWS, WIDTH_V, D_V)
    if LSE:
        value = tl.where(seen, top + (tl.log(tl.where(seen, exact_sum, 1.0)) - P_EXPONENT / LOG2E), -INF)
        tl.store(lse + _offset(lse_strides, at.batch, head, at.start_q) + rows, value, mask=rows < at.n_q)
