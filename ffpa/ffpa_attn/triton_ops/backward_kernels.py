"""This module computes the gradients for small head dims in Triton: of Q by rows, of K and V by keys, what both need of
each row, and what scores that are too large for the fast arithmetic, or for an LSE, take beyond.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .forward_kernels import (
    FAR,
    INF,
    LOG2E,
    _edge_tile,
    _load,
    _offset,
    _rows,
    _scores,
    _sequence,
    _slope_of_tanh,
    _store,
    _tiles,
    _unit,
)

ROUNDINGS = tl.constexpr(2.0**-21)  # the error of an LSE, relative to it, from whichever kernels
LOWEST = tl.constexpr(-(2.0 - 2.0**-23) * 2.0**127)  # the smallest finite float32
STATISTICS_ROWS = tl.constexpr(64)  # rows that a program prepares, and that have one maximum
_LSES = tl.constexpr(1024)  # LSEs that are read at once


@triton.jit
def statistics_kernel(
    out, grad, given, lse, exponents, naturals, shares, largest, delta, out_strides, grad_strides, given_strides,
    lse_strides, strides, sizes, RAW: tl.constexpr, GIVEN: tl.constexpr, D_V: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """Prepares each row, and those that pad them to whole tiles: the LSE in natural units (RAW: as an exponent of 2,
    too), or INF, which makes P 0, for blind rows, those that see no key; a share of 0; and delta, the sum over columns
    of out * grad, less the gradient of the LSE: what dP is lowered by. `given` is that gradient ("grad_lse"), or "delta",
    or neither (None). Each block of rows gets its largest |LSE| that is far.
    """
    row_blocks = strides.head // STATISTICS_ROWS
    program = tl.program_id(0)
    head, batch = program // row_blocks % sizes.heads, program // row_blocks // sizes.heads
    first_row, start = program % row_blocks * STATISTICS_ROWS, tl.zeros([], tl.int32)
    rows = first_row + tl.arange(0, STATISTICS_ROWS)
    inside = rows < sizes.total_q
    total = tl.zeros([STATISTICS_ROWS], tl.float32)
    if GIVEN != "delta":
        out_rows = _rows(out, out_strides, batch, head, start, sizes.total_q, False)
        grad_rows = _rows(grad, grad_strides, batch, head, start, sizes.total_q, False)
        product = _load(out_rows, first_row, STATISTICS_ROWS, WIDTH_V, D_V, False).to(tl.float32)
        total = tl.sum(product * _load(grad_rows, first_row, STATISTICS_ROWS, WIDTH_V, D_V, False).to(tl.float32), 1)
    if GIVEN is not None:
        of_rows = given + _offset(given_strides, batch, head, start)
        numbers = tl.load(of_rows + rows.to(tl.int64) * given_strides.row, mask=inside, other=0.0)
        total = numbers if GIVEN == "delta" else total - numbers
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
def _p_and_ds(
    s, dp, exponent, share, row_delta, rows, keys, at, rule, mask, mask_strides, RAW: tl.constexpr, CAPPED: tl.constexpr,
    MASK: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Returns P, and the gradient of the products less their scale, from products and dP in either orientation. Not
    RAW: exponent is in the units of scores, and no P is above 1, however the score or the LSE was rounded.
    """
    if CAPPED:
        slope = _slope_of_tanh(s * (rule.scale / rule.softcap))
    s = _scores(s, rows, keys, at, rule, mask, mask_strides, RAW, CAPPED, MASK, EDGE)
    if RAW:
        p = tl.exp2(s * _unit(rule, RAW) - exponent)
    else:
        below = s - exponent
        p = tl.exp2(tl.where(below > 0, 0.0, below * LOG2E) - share)  # a NaN stays NaN
    ds = p * (dp - row_delta)
    if CAPPED:
        ds *= slope
    return p, ds


@triton.jit
def _add_rows(
    dk, dv, q, k_tile, v_tile, grad, exponents, shares, delta, first, keys, at, rule, mask, mask_strides, D_QK: tl.constexpr,
    D_V: tl.constexpr, PACKED: tl.constexpr, BLIND: tl.constexpr, TMA: tl.constexpr, RAW: tl.constexpr, CAPPED: tl.constexpr,
    MASK: tl.constexpr, EDGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds one more tile of rows. All is transposed, [keys, rows], so that P and dS are left operands as they come."""
    q_tile = _load(q, first, ROWS, k_tile.shape[1], D_QK, TMA)
    grad_tile = _load(grad, first, ROWS, v_tile.shape[1], D_V, TMA)
    rows = first + tl.arange(0, ROWS)
    if MASK != "none" or (BLIND and EDGE):  # the P of blind rows is 0, and 0 times NaN would be NaN
        sighted = (tl.load(exponents + rows, mask=rows < at.n_q, other=INF) != INF)[:, None]
        q_tile = tl.where(sighted, q_tile, 0.0)
        grad_tile = tl.where(sighted, grad_tile, 0.0)
    s = tl.dot(k_tile, tl.trans(q_tile))
    dp = tl.dot(v_tile, tl.trans(grad_tile))
    if PACKED and EDGE:  # rows past the end are those of the next sequence, whatever they hold
        inside = rows < at.n_q
        exponent = tl.load(exponents + rows, mask=inside, other=INF)
        row_delta = tl.load(delta + rows, mask=inside, other=0.0)
        share = row_delta if RAW else tl.load(shares + rows, mask=inside, other=0.0)  # RAW asks for no share
    else:
        exponent, row_delta = tl.load(exponents + rows), tl.load(delta + rows)
        share = row_delta if RAW else tl.load(shares + rows)
    p, ds = _p_and_ds(
        s, dp, exponent[None, :], share[None, :], row_delta[None, :], rows[None, :], keys[:, None], at, rule, mask, mask_strides,
        RAW, CAPPED, MASK, EDGE,
    )  # fmt: skip
    dv = tl.dot(p.to(grad_tile.dtype), grad_tile, dv)
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit
def _add_rows_of_head(
    dk, dv, q, k_tile, v_tile, grad, exponents, shares, delta, head, first, keys, at, rule, mask, q_strides, grad_strides,
    statistics_strides, mask_strides, D_QK: tl.constexpr, D_V: tl.constexpr, PACKED: tl.constexpr, BLIND: tl.constexpr,
    TMA: tl.constexpr, RAW: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds one more tile of rows of query head `head`."""
    q_rows = _rows(q, q_strides, at.batch, head, at.start_q, at.n_q, TMA)
    grad_rows = _rows(grad, grad_strides, at.batch, head, at.start_q, at.n_q, TMA)
    statistics = _offset(statistics_strides, at.batch, head, at.start_q)
    mask += at.batch.to(tl.int64) * mask_strides.batch + head.to(tl.int64) * mask_strides.head
    return _add_rows(
        dk, dv, q_rows, k_tile, v_tile, grad_rows, exponents + statistics, shares + statistics, delta + statistics, first, keys,
        at, rule, mask, mask_strides, D_QK, D_V, PACKED, BLIND, TMA, RAW, CAPPED, MASK, EDGE, ROWS,
    )  # fmt: skip


@triton.jit
def _keys_gradient(
    q, k, v, grad, exponents, shares, delta, dk, dv, mask, at, head_kv, first_key, q_strides, k_strides, v_strides, grad_strides,
    statistics_strides, dk_strides, dv_strides, mask_strides, sizes, rule, PACKED: tl.constexpr, EDGES: tl.constexpr,
    BLIND: tl.constexpr, RAW: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, TMA: tl.constexpr, D_QK: tl.constexpr,
    D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes dK and dV of a block of keys, summed in a fixed order over the row tiles of all its query heads that all keys
    see, and then over the others. BLIND: the rule blinds some rows.
    """
    k_rows = _rows(k, k_strides, at.batch, head_kv, at.start_k, at.n_k, TMA)
    v_rows = _rows(v, v_strides, at.batch, head_kv, at.start_k, at.n_k, TMA)
    dk_rows = _rows(dk, dk_strides, at.batch, head_kv, at.start_k, at.n_k, False)
    dv_rows = _rows(dv, dv_strides, at.batch, head_kv, at.start_k, at.n_k, False)

    k_tile = _load(k_rows, first_key, KEYS, WIDTH_QK, D_QK, TMA)
    v_tile = _load(v_rows, first_key, KEYS, WIDTH_V, D_V, TMA)
    keys = first_key + tl.arange(0, KEYS)
    dk_sum = tl.zeros([KEYS, WIDTH_QK], tl.float32)
    dv_sum = tl.zeros([KEYS, WIDTH_V], tl.float32)
    # A key sees the rows from `right` before its own to `left` after it. One loop has the row tiles of all heads that all
    # keys see, and one the others: each begins with loads that nothing hides.
    all_begin, all_end, begin, end = _tiles(first_key - at.shift, KEYS, at.n_q, rule.right, rule.left, ROWS)
    inside = tl.cdiv(all_end - all_begin, ROWS)
    for i in range(0, sizes.group * inside):
        head = head_kv * sizes.group + i // inside
        dk_sum, dv_sum = _add_rows_of_head(
            dk_sum, dv_sum, q, k_tile, v_tile, grad, exponents, shares, delta, head, all_begin + i % inside * ROWS, keys, at, rule,
            mask, q_strides, grad_strides, statistics_strides, mask_strides, D_QK, D_V, PACKED, BLIND, TMA, RAW, CAPPED, MASK,
            False, ROWS,
        )  # fmt: skip
    if EDGES:
        edges = tl.cdiv(end - begin, ROWS) - inside
        for i in tl.range(0, sizes.group * edges, disable_licm=True):
            head = head_kv * sizes.group + i // edges
            first = _edge_tile(begin + i % edges * ROWS, all_begin, all_end)
            dk_sum, dv_sum = _add_rows_of_head(
                dk_sum, dv_sum, q, k_tile, v_tile, grad, exponents, shares, delta, head, first, keys, at, rule, mask, q_strides,
                grad_strides, statistics_strides, mask_strides, D_QK, D_V, PACKED, BLIND, TMA, RAW, CAPPED, MASK, True, ROWS,
            )  # fmt: skip
    _store(dk_rows, first_key, dk_sum * rule.scale, KEYS, WIDTH_QK, D_QK)
    _store(dv_rows, first_key, dv_sum, KEYS, WIDTH_V, D_V)


@triton.jit
def keys_gradient_kernel(
    q, k, v, grad, exponents, shares, delta, dk, dv, mask, offsets_q, offsets_k, q_strides, k_strides, v_strides, grad_strides,
    statistics_strides, dk_strides, dv_strides, mask_strides, sizes, rule, PACKED: tl.constexpr, TOP_LEFT: tl.constexpr,
    EDGES: tl.constexpr, BLIND: tl.constexpr, RAW: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, TMA: tl.constexpr,
    D_QK: tl.constexpr, D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    key_blocks = tl.cdiv(sizes.longest_k, KEYS)
    heads_kv = sizes.heads // sizes.group
    program = tl.program_id(0)
    head_kv = program // key_blocks % heads_kv
    first_key = program % key_blocks * KEYS
    at = _sequence(offsets_q, offsets_k, sizes, program // key_blocks // heads_kv, PACKED, TOP_LEFT)
    if first_key < at.n_k:
        _keys_gradient(
            q, k, v, grad, exponents, shares, delta, dk, dv, mask, at, head_kv, first_key, q_strides, k_strides, v_strides,
            grad_strides, statistics_strides, dk_strides, dv_strides, mask_strides, sizes, rule, PACKED, EDGES, BLIND, RAW, CAPPED,
            MASK, TMA, D_QK, D_V, WIDTH_QK, WIDTH_V, ROWS, KEYS,
        )  # fmt: skip


@triton.jit
def _add_keys(
    dq, q_tile, k, v, grad_tile, exponent, share, row_delta, first, rows, at, rule, mask, mask_strides, D_QK: tl.constexpr,
    D_V: tl.constexpr, TMA: tl.constexpr, RAW: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Adds one more tile of keys."""
    k_tile = _load(k, first, KEYS, q_tile.shape[1], D_QK, TMA)
    v_tile = _load(v, first, KEYS, grad_tile.shape[1], D_V, TMA)
    s = tl.dot(q_tile, tl.trans(k_tile))
    dp = tl.dot(grad_tile, tl.trans(v_tile))
    keys = first + tl.arange(0, KEYS)
    _, ds = _p_and_ds(
        s, dp, exponent[:, None], share[:, None], row_delta[:, None], rows[:, None], keys[None, :], at, rule, mask, mask_strides,
        RAW, CAPPED, MASK, EDGE,
    )  # fmt: skip
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq)


@triton.jit
def _rows_gradient(
    q, k, v, grad, exponents, shares, delta, dq, mask, at, head, first_row, q_strides, k_strides, v_strides, grad_strides,
    statistics_strides, dq_strides, mask_strides, sizes, rule, EDGES: tl.constexpr, RAW: tl.constexpr, CAPPED: tl.constexpr,
    MASK: tl.constexpr, TMA: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes dQ of a block of rows."""
    head_kv = head // sizes.group
    q_rows = _rows(q, q_strides, at.batch, head, at.start_q, at.n_q, TMA)
    k_rows = _rows(k, k_strides, at.batch, head_kv, at.start_k, at.n_k, TMA)
    v_rows = _rows(v, v_strides, at.batch, head_kv, at.start_k, at.n_k, TMA)
    grad_rows = _rows(grad, grad_strides, at.batch, head, at.start_q, at.n_q, TMA)
    dq_rows = _rows(dq, dq_strides, at.batch, head, at.start_q, at.n_q, False)
    mask += at.batch.to(tl.int64) * mask_strides.batch + head.to(tl.int64) * mask_strides.head
    statistics = _offset(statistics_strides, at.batch, head, at.start_q)

    q_tile = _load(q_rows, first_row, ROWS, WIDTH_QK, D_QK, TMA)
    grad_tile = _load(grad_rows, first_row, ROWS, WIDTH_V, D_V, TMA)
    rows = first_row + tl.arange(0, ROWS)
    exponent, row_delta = tl.load(exponents + statistics + rows), tl.load(delta + statistics + rows)
    share = row_delta if RAW else tl.load(shares + statistics + rows)
    dq_sum = tl.zeros([ROWS, WIDTH_QK], tl.float32)
    all_begin, all_end, begin, end = _tiles(first_row + at.shift, ROWS, at.n_k, rule.left, rule.right, KEYS)
    for first in range(all_begin, all_end, KEYS):
        dq_sum = _add_keys(
            dq_sum, q_tile, k_rows, v_rows, grad_tile, exponent, share, row_delta, first, rows, at, rule, mask, mask_strides, D_QK,
            D_V, TMA, RAW, CAPPED, MASK, False, KEYS,
        )  # fmt: skip
    if EDGES:
        for edge in tl.range(begin, end - (all_end - all_begin), KEYS, disable_licm=True):
            dq_sum = _add_keys(
                dq_sum, q_tile, k_rows, v_rows, grad_tile, exponent, share, row_delta, _edge_tile(edge, all_begin, all_end), rows,
                at, rule, mask, mask_strides, D_QK, D_V, TMA, RAW, CAPPED, MASK, True, KEYS,
            )  # fmt: skip
    dq_sum = tl.where(exponent[:, None] == INF, 0.0, dq_sum * rule.scale)  # blind rows get 0, whatever they hold
    _store(dq_rows, first_row, dq_sum, ROWS, WIDTH_QK, D_QK)


@triton.jit
def rows_gradient_kernel(
    q, k, v, grad, exponents, shares, delta, dq, mask, offsets_q, offsets_k, q_strides, k_strides, v_strides, grad_strides,
    statistics_strides, dq_strides, mask_strides, sizes, rule, PACKED: tl.constexpr, TOP_LEFT: tl.constexpr, EDGES: tl.constexpr,
    RAW: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, TMA: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr,
    WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(sizes.longest_q, ROWS)
    program = tl.program_id(0)
    head = program // row_blocks % sizes.heads
    first_row = (row_blocks - 1 - program % row_blocks) * ROWS
    at = _sequence(offsets_q, offsets_k, sizes, program // row_blocks // sizes.heads, PACKED, TOP_LEFT)
    if first_row < at.n_q:
        _rows_gradient(
            q, k, v, grad, exponents, shares, delta, dq, mask, at, head, first_row, q_strides, k_strides, v_strides, grad_strides,
            statistics_strides, dq_strides, mask_strides, sizes, rule, EDGES, RAW, CAPPED, MASK, TMA, D_QK, D_V, WIDTH_QK,
            WIDTH_V, ROWS, KEYS,
        )  # fmt: skip


@triton.jit
def _has_far(naturals, largest, strides, at, first_head, heads, PACKED: tl.constexpr):
    """Says whether any row of a sequence is far, in so many heads. Packed sequences share blocks, and ask each row."""
    BLOCK: tl.constexpr = 1 if PACKED else STATISTICS_ROWS
    lses = (naturals if PACKED else largest) + _offset(strides, at.batch, first_head, at.start_q) // BLOCK
    count = tl.cdiv(at.n_q, BLOCK).to(tl.int64)
    found = tl.zeros([_LSES], tl.int32)
    for first in range(0, heads * count, _LSES):
        i = first + tl.arange(0, _LSES)
        places = i // count * (strides.head // BLOCK) + i % count
        found |= _is_far(tl.load(lses + places, mask=i < heads * count, other=0.0)).to(tl.int32)
    return tl.max(found, 0) > 0


@triton.jit
def _add_p(
    row_max, total, q_tile, k, first, rows, at, rule, mask, mask_strides, D_QK: tl.constexpr, TMA: tl.constexpr,
    CAPPED: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds one more tile of keys to (the largest score, the sum of exp(score - largest))."""
    k_tile = _load(k, first, KEYS, q_tile.shape[1], D_QK, TMA)
    s, keys = tl.dot(q_tile, tl.trans(k_tile)), first + tl.arange(0, KEYS)
    s = _scores(s, rows[:, None], keys[None, :], at, rule, mask, mask_strides, False, CAPPED, MASK, EDGE)
    new_max = tl.maximum(row_max, tl.max(s, 1))
    total = total * tl.exp2((row_max - new_max) * LOG2E) + tl.sum(tl.exp2((s - new_max[:, None]) * LOG2E), 1)
    return new_max, total


@triton.jit
def shares_kernel(
    q, k, naturals, shares, largest, mask, offsets_q, offsets_k, parts, q_strides, k_strides, statistics_strides, mask_strides,
    sizes, rule, PACKED: tl.constexpr, TOP_LEFT: tl.constexpr, EDGES: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr,
    TMA: tl.constexpr, D_QK: tl.constexpr, WIDTH_QK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gives far rows a softmax of their own where their keys are all here, as the LSE says that these make: in place of
    the LSE, whose rounding shows in P, their largest score, and as a share log2 of the sum that softmax divides by.
    Others keep the LSE and a share of 0: other keys of the row are elsewhere. So many programs take turns at the blocks
    of a head; where no row is far they end before they begin.
    """
    program = tl.program_id(0)
    heads_kv = sizes.heads // sizes.group
    part, head_kv = program % parts, program // parts % heads_kv
    at = _sequence(offsets_q, offsets_k, sizes, program // parts // heads_kv, PACKED, TOP_LEFT)
    if _has_far(naturals, largest, statistics_strides, at, head_kv * sizes.group, sizes.group, PACKED):
        k_rows = _rows(k, k_strides, at.batch, head_kv, at.start_k, at.n_k, TMA)
        row_blocks = tl.cdiv(at.n_q, ROWS)
        for block in range(part, sizes.group * row_blocks, parts):
            head, first_row = head_kv * sizes.group + block // row_blocks, block % row_blocks * ROWS
            rows = first_row + tl.arange(0, ROWS)
            places = _offset(statistics_strides, at.batch, head, at.start_q) + rows
            lse = tl.load(naturals + places, mask=rows < at.n_q, other=INF)
            if tl.max(_is_far(lse).to(tl.int32), 0) > 0:
                q_rows = _rows(q, q_strides, at.batch, head, at.start_q, at.n_q, TMA)
                head_mask = mask + at.batch.to(tl.int64) * mask_strides.batch + head.to(tl.int64) * mask_strides.head
                q_tile = _load(q_rows, first_row, ROWS, WIDTH_QK, D_QK, TMA)
                row_max, total = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)
                all_begin, all_end, begin, end = _tiles(first_row + at.shift, ROWS, at.n_k, rule.left, rule.right, KEYS)
                for first in range(all_begin, all_end, KEYS):
                    row_max, total = _add_p(
                        row_max, total, q_tile, k_rows, first, rows, at, rule, head_mask, mask_strides, D_QK, TMA, CAPPED, MASK,
                        False, KEYS,
                    )  # fmt: skip
                if EDGES:
                    for edge in tl.range(begin, end - (all_end - all_begin), KEYS, disable_licm=True):
                        row_max, total = _add_p(
                            row_max, total, q_tile, k_rows, _edge_tile(edge, all_begin, all_end), rows, at, rule, head_mask,
                            mask_strides, D_QK, TMA, CAPPED, MASK, True, KEYS,
                        )  # fmt: skip
                all_here = tl.abs(row_max + tl.log2(total) / LOG2E - lse) <= tl.abs(lse) * ROUNDINGS  # False for NaN
                own = all_here & _is_far(lse) & _is_far(row_max)  # a far row stays far to those who ask later
                tl.store(naturals + places, row_max, mask=own)
                tl.store(shares + places, tl.log2(total), mask=own)


@triton.jit
def far_gradients_kernel(
    q, k, v, grad, naturals, shares, largest, delta, dq, dk, dv, mask, offsets_q, offsets_k, parts, q_strides, k_strides,
    v_strides, grad_strides, statistics_strides, dq_strides, dk_strides, dv_strides, mask_strides, sizes, rule, PACKED: tl.constexpr,
    TOP_LEFT: tl.constexpr, EDGES: tl.constexpr, BLIND: tl.constexpr, TMA: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr,
    WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes RAW gradients once more, from scores and LSEs in natural units, for heads of K (and the heads of Q that
    share them) where a row is far. So many programs take turns at a head's blocks; where no row is far they end before
    they begin.
    """
    program = tl.program_id(0)
    heads_kv = sizes.heads // sizes.group
    part, head_kv = program % parts, program // parts % heads_kv
    at = _sequence(offsets_q, offsets_k, sizes, program // parts // heads_kv, PACKED, TOP_LEFT)
    if _has_far(naturals, largest, statistics_strides, at, head_kv * sizes.group, sizes.group, PACKED):
        for block in range(part, tl.cdiv(at.n_k, KEYS), parts):
            _keys_gradient(
                q, k, v, grad, naturals, shares, delta, dk, dv, mask, at, head_kv, block * KEYS, q_strides, k_strides, v_strides,
                grad_strides, statistics_strides, dk_strides, dv_strides, mask_strides, sizes, rule, PACKED, EDGES, BLIND, False,
                False, "none", TMA, D_QK, D_V, WIDTH_QK, WIDTH_V, ROWS, KEYS,
            )  # fmt: skip
        row_blocks = tl.cdiv(at.n_q, ROWS)
        for block in range(part, sizes.group * row_blocks, parts):
            _rows_gradient(
                q, k, v, grad, naturals, shares, delta, dq, mask, at, head_kv * sizes.group + block // row_blocks,
                block % row_blocks * ROWS, q_strides, k_strides, v_strides, grad_strides, statistics_strides, dq_strides,
                mask_strides, sizes, rule, EDGES, False, False, "none", TMA, D_QK, D_V, WIDTH_QK, WIDTH_V, ROWS, KEYS,
            )  # fmt: skip
