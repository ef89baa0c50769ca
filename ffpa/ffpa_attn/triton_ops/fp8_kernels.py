"""This module is the forward on fp8 values: 8-bit products of Q and K, and of P, rounded to fp8 as well, and V.

What keeps it exact: P is scaled up to the whole range of its type; each tile's products with V, and its sum of P, are
sums of their own, added in float32 (Hopper adds fp8 products in 14 bits); rows are divided by the sum of rounded P.

8-bit products want V with its keys side by side, and P of a row with four keys side by side in a thread, where the
scores leave two: sixteen columns go as 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15. A V that is transposed already is used
as it is, and TMA brings rows of K in an order that makes up for it. Else V is arranged once, transposed and in that
order.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from .forward_kernels import (
    FAR,
    INF,
    LOG2E,
    Rows,
    _load,
    _meet,
    _offset,
    _own_rows,
    _range,
    _rounded_product,
    _rows,
    _softmax,
    _store,
    _tanh,
    _tile_at,
    _visible,
)

SCALE_BLOCK = tl.constexpr(128)  # rows that share a scale
LEAST_SCALE = tl.constexpr(2.0**-100)  # the same as spec.LEAST_SCALE: a float holds it
_SUM_COLUMNS = tl.constexpr(16)  # columns of the narrowest product there is


Fp8Strides = namedtuple("Fp8Strides", "q k v out lse q_scale k_scale v_scale")


class Fp8How(NamedTuple):
    """This is what the forward is compiled for beside what all are."""

    # k is then a descriptor of all its rows [sixteens, 2, 4, 2, D], dims of a row's place in the order 2, 1, 3.
    V_AS_IT_IS: bool
    Q_SCALED: bool
    K_SCALE: str  # none, head (or all of it) or block
    V_SCALE: str
    P_EXPONENT: int  # P is times 2 to this
    LARGEST_OUT: float


@triton.jit
def _block(heads, n, ROWS: tl.constexpr):
    """Returns the (batch, head, first row) of a program, of which each block of ROWS rows has one."""
    blocks = tl.cdiv(n, ROWS)
    program = tl.program_id(0)
    batch, head = program // blocks // heads, program // blocks % heads
    return batch.to(tl.int64), head.to(tl.int64), program % blocks * ROWS


@triton.jit
def _of_columns(x, strides, column_stride, heads, n, first, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns (where they lie, which of them there are) of the rows of the program's block, from column `first` on."""
    batch, head, first_row = _block(heads, n, ROWS)
    rows, columns = first_row + tl.arange(0, ROWS), first + tl.arange(0, COLUMNS)
    base = x + batch * strides.batch + head * strides.head
    pointers = base + rows.to(tl.int64)[:, None] * strides.row + columns.to(tl.int64)[None, :] * column_stride
    return pointers, (rows < n)[:, None] & (columns < D)[None, :]


@triton.jit
def arrange_values_kernel(
    v, arranged, v_strides, v_column_stride, heads, n, D: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr
):
    """Writes [B, H, N, D] as [B, H, D, whole KEYS], with keys in the order of P and zeros past the end."""
    pointers, there = _of_columns(v, v_strides, v_column_stride, heads, n, 0, D, KEYS, WIDTH)
    tile = tl.load(pointers, mask=there, other=0.0)
    tile = tile.reshape([KEYS // 16, 2, 4, 2, WIDTH]).permute([0, 2, 1, 3, 4]).reshape([KEYS, WIDTH])
    batch, head, first = _block(heads, n, KEYS)
    keys, columns = first + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    target = arranged + ((batch * heads + head) * D + columns)[:, None] * (tl.cdiv(n, KEYS) * KEYS) + keys[None, :]
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


# A block of rows has a scale of its scores (without K's, where blocks of K have one each), and pointers to those of K and
# V, whose blocks are so far apart.
Scales = namedtuple("Scales", "scores k v k_block v_block")


@triton.jit
def _attend(
    acc, row_max, row_sum, exact_sum, q_tile, k, v, ones, scales, first, rows, at, call, HOW: tl.constexpr, FAST: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Adds one more tile of keys."""
    if HOW.FP8.V_AS_IT_IS:
        k_tile = k.source.load([k.head + first // 16, 0, 0, 0, 0]).reshape([HOW.KEYS, HOW.WIDTH_QK])
    else:
        k_tile = _load(k, first, HOW.KEYS, HOW.WIDTH_QK, HOW.D_QK, HOW.TMA)
    if HOW.TMA:  # this comes right after K, so that both are waited for at once
        v_tile = v.source.load([v.batch, v.head, 0, first]).reshape([HOW.WIDTH_V, HOW.KEYS])
    else:
        v_rows = Rows(v.source + first, v.batch, v.head, v.stride, v.length)
        v_tile = _load(v_rows, 0, HOW.WIDTH_V, HOW.KEYS, HOW.KEYS, False)
    s = tl.dot(q_tile, tl.trans(k_tile))
    natural = scales.scores
    if HOW.FP8.K_SCALE == "block":
        natural *= tl.load(scales.k + first // SCALE_BLOCK * scales.k_block)
    if HOW.CAPPED:
        s = _rounded_product(_tanh(s * (natural / call.softcap)), call.softcap)
    elif not FAST:
        s = _rounded_product(s, natural)
    if EDGE:
        s = _visible(s, rows[:, None], _keys(first, HOW.KEYS, HOW.FP8.V_AS_IT_IS)[None, :], at, call)
    # 0 times the -INF of hidden keys would be NaN.
    unit = tl.maximum(natural, LEAST_SCALE) * LOG2E if FAST else LOG2E
    p, new_max, alpha = _softmax(s, row_max, unit, HOW.FP8.P_EXPONENT, FAST, EDGE)
    p_tile = _as_arranged(p.to(q_tile.dtype), HOW.ROWS, HOW.KEYS)
    row_sum = row_sum * alpha[:, None] + tl.dot(p_tile, ones, max_num_imprecise_acc=HOW.KEYS)
    if HOW.LSE:
        exact_sum = exact_sum * alpha + tl.sum(p, 1)
    product = tl.dot(p_tile, tl.trans(v_tile), max_num_imprecise_acc=HOW.KEYS)
    if HOW.FP8.V_SCALE == "block":
        product *= tl.load(scales.v + first // SCALE_BLOCK * scales.v_block)
    return acc * alpha[:, None] + product, new_max, row_sum, exact_sum


@triton.jit
def _attend_all(q_tile, k, v, ones, scales, first_row, rows, at, call, HOW: tl.constexpr, FAST: tl.constexpr):
    """Goes over all keys rows see: (O times the sum, the maximum of _softmax, the sum of the rounded P, that of P)."""
    acc = tl.full([HOW.ROWS, HOW.WIDTH_V], 0.0, tl.float32)
    row_max = tl.full([HOW.ROWS], -FAR if FAST else -INF, tl.float32)
    row_sum = tl.full([HOW.ROWS, _SUM_COLUMNS], 0.0, tl.float32)
    exact_sum = tl.full([HOW.ROWS], 0.0, tl.float32)
    met = _meet(first_row + at.shift, HOW.ROWS, at.n_k, call.left, call.right, HOW.KEYS)
    for EDGE in tl.static_range(1 + HOW.EDGES):
        begin, end = _range(met, EDGE)
        for step in tl.range(begin, end, HOW.KEYS, disable_licm=EDGE):
            first = _tile_at(step, met, EDGE)
            acc, row_max, row_sum, exact_sum = _attend(
                acc, row_max, row_sum, exact_sum, q_tile, k, v, ones, scales, first, rows, at, call, HOW, FAST, EDGE
            )
    return acc, row_max, row_sum, exact_sum


@triton.jit
def fp8_forward_kernel(q, k, v, out, lse, q_scales, k_scales, v_scales, strides, call, HOW: tl.constexpr):
    """Attends; v is transposed."""
    at, head, first_row = _own_rows(lse, lse, call, HOW)
    head_kv = head // call.group
    q_rows = _rows(q, strides.q, at.batch, head, at.start_q, at.n_q, HOW.TMA)
    k_rows = _rows(k, strides.k, at.batch, head_kv, at.start_k, at.n_k, HOW.TMA)
    if HOW.FP8.V_AS_IT_IS:
        sixteens = at.n_k // 16
        k_rows = Rows(k, at.batch, (at.batch * (call.heads // call.group) + head_kv) * sixteens, sixteens, at.n_k)
    v_columns = _rows(v, strides.v, at.batch, head_kv, at.start_k, HOW.D_V, HOW.TMA)
    out_rows = _rows(out, strides.out, at.batch, head, at.start_q, at.n_q, False)
    k_scales += _offset(strides.k_scale, at.batch, head_kv, at.start_k)
    v_scales += _offset(strides.v_scale, at.batch, head_kv, at.start_k)
    scale = call.scale
    if HOW.FP8.Q_SCALED:
        scale *= tl.load(q_scales + _offset(strides.q_scale, at.batch, head, first_row // SCALE_BLOCK))
    if HOW.FP8.K_SCALE == "head":
        scale *= tl.load(k_scales)
    scales = Scales(scale, k_scales, v_scales, strides.k_scale.row, strides.v_scale.row)

    q_tile = _load(q_rows, first_row, HOW.ROWS, HOW.WIDTH_QK, HOW.D_QK, HOW.TMA)
    ones = tl.trans(tl.full([_SUM_COLUMNS, HOW.KEYS], 1.0, tl.float32).to(q_tile.dtype))
    rows = first_row + tl.arange(0, HOW.ROWS)
    acc, row_max, row_sum, exact_sum = _attend_all(
        q_tile, k_rows, v_columns, ones, scales, first_row, rows, at, call, HOW, HOW.RAW
    )
    top = row_max
    if HOW.RAW:
        top = row_max / LOG2E
        far = (tl.abs(row_max) >= FAR) & (rows < at.n_q)
        if tl.max(far.to(tl.int32), 0) > 0:  # these rows are far, or see no key
            acc, row_max, row_sum, exact_sum = _attend_all(
                q_tile, k_rows, v_columns, ones, scales, first_row, rows, at, call, HOW, False
            )
            top = row_max
    total = tl.max(row_sum, 1)  # the columns are all alike
    seen = total != 0
    values = acc * (1.0 / tl.where(seen, total, 1.0))[:, None]
    if HOW.FP8.V_SCALE == "head":
        values *= tl.load(v_scales)
    if HOW.FP8.LARGEST_OUT < INF:
        values = tl.where(values > HOW.FP8.LARGEST_OUT, HOW.FP8.LARGEST_OUT, values)
        values = tl.where(values < -HOW.FP8.LARGEST_OUT, -HOW.FP8.LARGEST_OUT, values)  # a NaN stays NaN
    _store(out_rows, first_row, values, HOW.ROWS, HOW.WIDTH_V, HOW.D_V)
    if HOW.LSE:
        value = tl.where(seen, top + (tl.log(tl.where(seen, exact_sum, 1.0)) - HOW.FP8.P_EXPONENT / LOG2E), -INF)
        tl.store(lse + _offset(strides.lse, at.batch, head, at.start_q) + rows, value, mask=rows < at.n_q)
