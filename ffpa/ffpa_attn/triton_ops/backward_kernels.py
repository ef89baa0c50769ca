"""This module computes the gradients for small head dims in Triton: of Q by rows, of K and V by keys, what both need of
each row, and what scores that are too large for the fast arithmetic, or for an LSE, take beyond.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from .forward_kernels import (
    FAR,
    INF,
    LOG2E,
    _load,
    _mask_of,
    _meet,
    _offset,
    _own_rows,
    _range,
    _rows,
    _scores,
    _sequence,
    _slope_of_tanh,
    _store,
    _tile_at,
    _unit,
)

ROUNDINGS = tl.constexpr(2.0**-21)  # the error of an LSE, relative to it, from whichever kernels
LOWEST = tl.constexpr(-(2.0 - 2.0**-23) * 2.0**127)  # the smallest finite float32
STATISTICS_ROWS = tl.constexpr(64)  # rows that a program prepares, and that have one maximum
_LSES = tl.constexpr(1024)  # LSEs that are read at once


BackwardStrides = namedtuple("BackwardStrides", "q k v grad statistics dq dk dv")


@triton.jit
def statistics_kernel(
    out, grad, grad_lse, lse, exponents, naturals, shares, largest, delta, out_strides, grad_strides, grad_lse_strides,
    lse_strides, strides, call, RAW: tl.constexpr, GRAD_LSE: tl.constexpr, D_V: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """Prepares each row, and those that pad them to whole tiles: the LSE in natural units (RAW: as an exponent of 2,
    too), or INF, which makes P 0, for blind rows, those that see no key; a share of 0; and delta, the sum over columns
    of out * grad, less the gradient of the LSE: what dP is lowered by. Each block of rows gets its largest |LSE| that
    is far.
    """
    row_blocks = strides.head // STATISTICS_ROWS
    program = tl.program_id(0)
    head, batch = program // row_blocks % call.heads, program // row_blocks // call.heads
    first_row, start = program % row_blocks * STATISTICS_ROWS, tl.zeros([], tl.int32)
    out_rows = _rows(out, out_strides, batch, head, start, call.total_q, False)
    grad_rows = _rows(grad, grad_strides, batch, head, start, call.total_q, False)
    product = _load(out_rows, first_row, STATISTICS_ROWS, WIDTH_V, D_V, False).to(tl.float32)
    total = tl.sum(product * _load(grad_rows, first_row, STATISTICS_ROWS, WIDTH_V, D_V, False).to(tl.float32), 1)
    rows = first_row + tl.arange(0, STATISTICS_ROWS)
    inside = rows < call.total_q
    if GRAD_LSE:
        lse_grads = grad_lse + _offset(grad_lse_strides, batch, head, start)
        total -= tl.load(lse_grads + rows.to(tl.int64) * grad_lse_strides.row, mask=inside, other=0.0)
    row_lse = tl.load(lse + _offset(lse_strides, batch, head, start) + rows, mask=inside, other=-INF)
    blind = tl.abs(row_lse) == INF
    natural = tl.where(blind, INF, row_lse)
    places = _offset(strides, batch, head, start) + rows
    if RAW:
        tl.store(exponents + places, natural * LOG2E)
    tl.store(naturals + places, natural)
    tl.store(shares + places, tl.zeros([STATISTICS_ROWS], tl.float32))
    tl.store(largest + program, tl.max(tl.where(_is_far(natural), tl.abs(natural), 0.0), 0))
    tl.store(delta + places, tl.where(blind, 0.0, total))


@triton.jit
def _is_far(lse):
    return (tl.abs(lse) > FAR / LOG2E) & (tl.abs(lse) < INF)


@triton.jit
def _p_and_ds(s, dp, exponent, share, row_delta, rows, keys, at, call, mask, HOW: tl.constexpr, EDGE: tl.constexpr):
    """Returns P, and the gradient of the products less their scale, from products and dP in either orientation. Not
    RAW: exponent is in the units of scores, and no P is above 1, however the score or the LSE was rounded.
    """
    if HOW.CAPPED:
        slope = _slope_of_tanh(s * (call.scale / call.softcap))
    s = _scores(s, rows, keys, at, call, mask, HOW, EDGE)
    if HOW.RAW:
        p = tl.exp2(s * _unit(call, HOW) - exponent)
    else:
        below = s - exponent
        p = tl.exp2(tl.where(below > 0, 0.0, below * LOG2E) - share)  # a NaN stays NaN
    ds = p * (dp - row_delta)
    if HOW.CAPPED:
        ds *= slope
    return p, ds


@triton.jit
def _add_rows(
    dk, dv, q, k_tile, v_tile, grad, exponents, shares, delta, first, keys, at, call, mask, HOW: tl.constexpr, EDGE: tl.constexpr
):  # fmt: skip
    """Adds one more tile of rows. All is transposed, [keys, rows], so that P and dS are left operands as they come."""
    q_tile = _load(q, first, HOW.ROWS, HOW.WIDTH_QK, HOW.D_QK, HOW.TMA)
    grad_tile = _load(grad, first, HOW.ROWS, HOW.WIDTH_V, HOW.D_V, HOW.TMA)
    rows = first + tl.arange(0, HOW.ROWS)
    if HOW.MASK != "none" or (HOW.BLIND and EDGE):  # the P of blind rows is 0, and 0 times NaN would be NaN
        sighted = (tl.load(exponents + rows, mask=rows < at.n_q, other=INF) != INF)[:, None]
        q_tile = tl.where(sighted, q_tile, 0.0)
        grad_tile = tl.where(sighted, grad_tile, 0.0)
    s = tl.dot(k_tile, tl.trans(q_tile))
    dp = tl.dot(v_tile, tl.trans(grad_tile))
    if HOW.PACKED and EDGE:  # rows past the end are those of the next sequence, whatever they hold
        inside = rows < at.n_q
        exponent = tl.load(exponents + rows, mask=inside, other=INF)
        row_delta = tl.load(delta + rows, mask=inside, other=0.0)
        share = row_delta if HOW.RAW else tl.load(shares + rows, mask=inside, other=0.0)  # RAW asks for no share
    else:
        exponent, row_delta = tl.load(exponents + rows), tl.load(delta + rows)
        share = row_delta if HOW.RAW else tl.load(shares + rows)
    p, ds = _p_and_ds(
        s, dp, exponent[None, :], share[None, :], row_delta[None, :], rows[None, :], keys[:, None], at, call, mask, HOW, EDGE
    )  # fmt: skip
    dv = tl.dot(p.to(grad_tile.dtype), grad_tile, dv)
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit
def _keys_gradient(
    q, k, v, grad, exponents, shares, delta, dk, dv, mask, at, head_kv, first_key, strides, call, HOW: tl.constexpr
):
    """Computes dK and dV of a block of keys, summed over its query heads in order."""
    k_rows = _rows(k, strides.k, at.batch, head_kv, at.start_k, at.n_k, HOW.TMA)
    v_rows = _rows(v, strides.v, at.batch, head_kv, at.start_k, at.n_k, HOW.TMA)
    dk_rows = _rows(dk, strides.dk, at.batch, head_kv, at.start_k, at.n_k, False)
    dv_rows = _rows(dv, strides.dv, at.batch, head_kv, at.start_k, at.n_k, False)

    k_tile = _load(k_rows, first_key, HOW.KEYS, HOW.WIDTH_QK, HOW.D_QK, HOW.TMA)
    v_tile = _load(v_rows, first_key, HOW.KEYS, HOW.WIDTH_V, HOW.D_V, HOW.TMA)
    keys = first_key + tl.arange(0, HOW.KEYS)
    dk_sum = tl.full([HOW.KEYS, HOW.WIDTH_QK], 0.0, tl.float32)
    dv_sum = tl.full([HOW.KEYS, HOW.WIDTH_V], 0.0, tl.float32)
    # A key sees the rows from `right` before its own to `left` after it.
    met = _meet(first_key - at.shift, HOW.KEYS, at.n_q, call.right, call.left, HOW.ROWS)
    for member in range(call.group):
        head = head_kv * call.group + member
        q_rows = _rows(q, strides.q, at.batch, head, at.start_q, at.n_q, HOW.TMA)
        grad_rows = _rows(grad, strides.grad, at.batch, head, at.start_q, at.n_q, HOW.TMA)
        statistics = _offset(strides.statistics, at.batch, head, at.start_q)
        head_mask = _mask_of(mask, at, head, call)
        for EDGE in tl.static_range(1 + HOW.EDGES):
            begin, end = _range(met, EDGE)
            for step in tl.range(begin, end, HOW.ROWS, disable_licm=EDGE):
                first = _tile_at(step, met, EDGE)
                dk_sum, dv_sum = _add_rows(
                    dk_sum, dv_sum, q_rows, k_tile, v_tile, grad_rows, exponents + statistics, shares + statistics,
                    delta + statistics, first, keys, at, call, head_mask, HOW, EDGE,
                )  # fmt: skip
    _store(dk_rows, first_key, dk_sum * call.scale, HOW.KEYS, HOW.WIDTH_QK, HOW.D_QK)
    _store(dv_rows, first_key, dv_sum, HOW.KEYS, HOW.WIDTH_V, HOW.D_V)


@triton.jit
def keys_gradient_kernel(
    q, k, v, grad, exponents, shares, delta, dk, dv, mask, offsets_q, offsets_k, strides, call, HOW: tl.constexpr
):
    key_blocks = tl.cdiv(call.longest_k, HOW.KEYS)
    heads_kv = call.heads // call.group
    program = tl.program_id(0)
    head_kv = program // key_blocks % heads_kv
    first_key = program % key_blocks * HOW.KEYS
    at = _sequence(offsets_q, offsets_k, call, program // key_blocks // heads_kv, HOW)
    if first_key < at.n_k:
        _keys_gradient(
            q, k, v, grad, exponents, shares, delta, dk, dv, mask, at, head_kv, first_key, strides, call, HOW
        )


@triton.jit
def _add_keys(
    dq, q_tile, k, v, grad_tile, exponent, share, row_delta, first, rows, at, call, mask, HOW: tl.constexpr, EDGE: tl.constexpr
):  # fmt: skip
    """Adds one more tile of keys."""
    k_tile = _load(k, first, HOW.KEYS, HOW.WIDTH_QK, HOW.D_QK, HOW.TMA)
    v_tile = _load(v, first, HOW.KEYS, HOW.WIDTH_V, HOW.D_V, HOW.TMA)
    s = tl.dot(q_tile, tl.trans(k_tile))
    dp = tl.dot(grad_tile, tl.trans(v_tile))
    keys = first + tl.arange(0, HOW.KEYS)
    _, ds = _p_and_ds(
        s, dp, exponent[:, None], share[:, None], row_delta[:, None], rows[:, None], keys[None, :], at, call, mask, HOW, EDGE
    )  # fmt: skip
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq)


@triton.jit
def _rows_gradient(
    q, k, v, grad, exponents, shares, delta, dq, mask, at, head, first_row, strides, call, HOW: tl.constexpr
):
    """Computes dQ of a block of rows."""
    head_kv = head // call.group
    q_rows = _rows(q, strides.q, at.batch, head, at.start_q, at.n_q, HOW.TMA)
    k_rows = _rows(k, strides.k, at.batch, head_kv, at.start_k, at.n_k, HOW.TMA)
    v_rows = _rows(v, strides.v, at.batch, head_kv, at.start_k, at.n_k, HOW.TMA)
    grad_rows = _rows(grad, strides.grad, at.batch, head, at.start_q, at.n_q, HOW.TMA)
    dq_rows = _rows(dq, strides.dq, at.batch, head, at.start_q, at.n_q, False)
    mask = _mask_of(mask, at, head, call)
    statistics = _offset(strides.statistics, at.batch, head, at.start_q)

    q_tile = _load(q_rows, first_row, HOW.ROWS, HOW.WIDTH_QK, HOW.D_QK, HOW.TMA)
    grad_tile = _load(grad_rows, first_row, HOW.ROWS, HOW.WIDTH_V, HOW.D_V, HOW.TMA)
    rows = first_row + tl.arange(0, HOW.ROWS)
    exponent, row_delta = tl.load(exponents + statistics + rows), tl.load(delta + statistics + rows)
    share = row_delta if HOW.RAW else tl.load(shares + statistics + rows)
    dq_sum = tl.full([HOW.ROWS, HOW.WIDTH_QK], 0.0, tl.float32)
    met = _meet(first_row + at.shift, HOW.ROWS, at.n_k, call.left, call.right, HOW.KEYS)
    for EDGE in tl.static_range(1 + HOW.EDGES):
        begin, end = _range(met, EDGE)
        for step in tl.range(begin, end, HOW.KEYS, disable_licm=EDGE):
            first = _tile_at(step, met, EDGE)
            dq_sum = _add_keys(
                dq_sum, q_tile, k_rows, v_rows, grad_tile, exponent, share, row_delta, first, rows, at, call, mask, HOW, EDGE
            )  # fmt: skip
    dq_sum = tl.where(exponent[:, None] == INF, 0.0, dq_sum * call.scale)  # blind rows get 0, whatever they hold
    _store(dq_rows, first_row, dq_sum, HOW.ROWS, HOW.WIDTH_QK, HOW.D_QK)


@triton.jit
def rows_gradient_kernel(
    q, k, v, grad, exponents, shares, delta, dq, mask, offsets_q, offsets_k, strides, call, HOW: tl.constexpr
):
    at, head, first_row = _own_rows(offsets_q, offsets_k, call, HOW)
    if first_row < at.n_q:
        _rows_gradient(q, k, v, grad, exponents, shares, delta, dq, mask, at, head, first_row, strides, call, HOW)


@triton.jit
def _far_heads(naturals, largest, offsets_q, offsets_k, parts, strides, call, HOW: tl.constexpr):
    """Returns (the program's part, its head of K, its sequence, whether any row is far in the heads of Q that share the
    head of K). Packed sequences share blocks, and ask each row.
    """
    program = tl.program_id(0)
    heads_kv = call.heads // call.group
    head_kv = program // parts % heads_kv
    at = _sequence(offsets_q, offsets_k, call, program // parts // heads_kv, HOW)
    BLOCK: tl.constexpr = 1 if HOW.PACKED else STATISTICS_ROWS
    lses = (naturals if HOW.PACKED else largest) + _offset(strides, at.batch, head_kv * call.group, at.start_q) // BLOCK
    count = tl.cdiv(at.n_q, BLOCK).to(tl.int64)
    found = tl.zeros([_LSES], tl.int32)
    for first in range(0, call.group * count, _LSES):
        i = first + tl.arange(0, _LSES)
        places = i // count * (strides.head // BLOCK) + i % count
        found |= _is_far(tl.load(lses + places, mask=i < call.group * count, other=0.0)).to(tl.int32)
    return program % parts, head_kv, at, tl.max(found, 0) > 0


@triton.jit
def _add_p(row_max, total, q_tile, k, first, rows, at, call, mask, HOW: tl.constexpr, EDGE: tl.constexpr):
    """Adds one more tile of keys to (the largest score, the sum of exp(score - largest))."""
    k_tile = _load(k, first, HOW.KEYS, HOW.WIDTH_QK, HOW.D_QK, HOW.TMA)
    s, keys = tl.dot(q_tile, tl.trans(k_tile)), first + tl.arange(0, HOW.KEYS)
    s = _scores(s, rows[:, None], keys[None, :], at, call, mask, HOW, EDGE)
    new_max = tl.maximum(row_max, tl.max(s, 1))
    total = total * tl.exp2((row_max - new_max) * LOG2E) + tl.sum(tl.exp2((s - new_max[:, None]) * LOG2E), 1)
    return new_max, total


@triton.jit
def shares_kernel(q, k, naturals, shares, largest, mask, offsets_q, offsets_k, parts, strides, call, HOW: tl.constexpr):
    """Gives far rows a softmax of their own where their keys are all here, as the LSE says that these make: in place of
    the LSE, whose rounding shows in P, their largest score, and as a share log2 of the sum that softmax divides by.
    Others keep the LSE and a share of 0: other keys of the row are elsewhere. So many programs take turns at the blocks
    of a head; where no row is far they end before they begin. Not RAW: scores are in natural units.
    """
    part, head_kv, at, has_far = _far_heads(
        naturals, largest, offsets_q, offsets_k, parts, strides.statistics, call, HOW
    )
    if has_far:
        k_rows = _rows(k, strides.k, at.batch, head_kv, at.start_k, at.n_k, HOW.TMA)
        row_blocks = tl.cdiv(at.n_q, HOW.ROWS)
        for block in range(part, call.group * row_blocks, parts):
            head, first_row = head_kv * call.group + block // row_blocks, block % row_blocks * HOW.ROWS
            rows = first_row + tl.arange(0, HOW.ROWS)
            places = _offset(strides.statistics, at.batch, head, at.start_q) + rows
            lse = tl.load(naturals + places, mask=rows < at.n_q, other=INF)
            if tl.max(_is_far(lse).to(tl.int32), 0) > 0:
                q_rows = _rows(q, strides.q, at.batch, head, at.start_q, at.n_q, HOW.TMA)
                head_mask = _mask_of(mask, at, head, call)
                q_tile = _load(q_rows, first_row, HOW.ROWS, HOW.WIDTH_QK, HOW.D_QK, HOW.TMA)
                row_max, total = tl.full([HOW.ROWS], LOWEST, tl.float32), tl.full([HOW.ROWS], 0.0, tl.float32)
                met = _meet(first_row + at.shift, HOW.ROWS, at.n_k, call.left, call.right, HOW.KEYS)
                for EDGE in tl.static_range(1 + HOW.EDGES):
                    begin, end = _range(met, EDGE)
                    for step in tl.range(begin, end, HOW.KEYS, disable_licm=EDGE):
                        first = _tile_at(step, met, EDGE)
                        row_max, total = _add_p(
                            row_max, total, q_tile, k_rows, first, rows, at, call, head_mask, HOW, EDGE
                        )
                all_here = tl.abs(row_max + tl.log2(total) / LOG2E - lse) <= tl.abs(lse) * ROUNDINGS  # False for NaN
                own = all_here & _is_far(lse) & _is_far(row_max)  # a far row stays far to those who ask later
                tl.store(naturals + places, row_max, mask=own)
                tl.store(shares + places, tl.log2(total), mask=own)


@triton.jit
def far_gradients_kernel(
    q, k, v, grad, naturals, shares, largest, delta, dq, dk, dv, mask, offsets_q, offsets_k, parts, strides, call,
    HOW: tl.constexpr,
):  # fmt: skip
    """Computes gradients of RAW scores once more, not RAW: from scores and LSEs in natural units, for heads of K (and
    the heads of Q that share them) where a row is far. So many programs take turns at a head's blocks; where no row is
    far they end before they begin.
    """
    part, head_kv, at, has_far = _far_heads(
        naturals, largest, offsets_q, offsets_k, parts, strides.statistics, call, HOW
    )
    if has_far:
        for block in range(part, tl.cdiv(at.n_k, HOW.KEYS), parts):
            first_key = block * HOW.KEYS
            _keys_gradient(
                q, k, v, grad, naturals, shares, delta, dk, dv, mask, at, head_kv, first_key, strides, call, HOW
            )
        row_blocks = tl.cdiv(at.n_q, HOW.ROWS)
        for block in range(part, call.group * row_blocks, parts):
            head, first_row = head_kv * call.group + block // row_blocks, block % row_blocks * HOW.ROWS
            _rows_gradient(q, k, v, grad, naturals, shares, delta, dq, mask, at, head, first_row, strides, call, HOW)
