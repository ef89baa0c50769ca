"""Attention for small head dims in Triton: one kernel forward, two backward.

Each program owns a block of rows (or, for the gradients of K and V, of keys) with its whole head dim and goes over the
tiles that it meets. Hidden pairs, and rows or keys past the end, are looked at in the first and the last of these tiles
alone; those between hold visible pairs only. Scores and LSE are natural, so that a row of one key has P = 1 to the bit.

Nothing here is CUDA's alone: pointers, dots, exponentials and loops, as any Triton backend has them.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


# ---- where things are ----


@triton.jit
def _span(offsets, sequence, longest, total, PACKED: tl.constexpr):
    """(first row, rows) of a sequence. Packed: lengths count as clamped, and no row leaves the tensor."""
    first, length = tl.zeros([], tl.int32), longest
    if PACKED:
        first = tl.minimum(tl.maximum(tl.load(offsets + sequence), 0), total)
        end = tl.minimum(tl.maximum(tl.load(offsets + sequence + 1), 0), total)
        length = tl.minimum(tl.maximum(end - first, 0), longest)
    return first, length


@triton.jit
def _load(base, rows, length, row_stride, columns, column_stride, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[rows, columns]; ROWS, COLUMNS: some may lie outside, and are 0."""
    pointers = base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :] * column_stride
    if ROWS and COLUMNS:
        return tl.load(pointers, mask=(rows < length)[:, None] & (columns < d)[None, :], other=0.0)
    if ROWS:
        return tl.load(pointers, mask=(rows < length)[:, None], other=0.0)
    if COLUMNS:
        return tl.load(pointers, mask=(columns < d)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _store(base, rows, length, row_stride, columns, d, x):
    pointers = base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=(rows < length)[:, None] & (columns < d)[None, :])


@triton.jit
def _tiles(first, block: tl.constexpr, other_first, other_end, before, after, tile: tl.constexpr):
    """Of the others (rows or keys) in [other_first, other_end): the range that one of `block` from `first` on meets, and
    within it, in whole tiles, the range that all of them meet. One meets the others from before to after it.
    """
    begin = tl.maximum(first - before, other_first) // tile * tile
    end = tl.maximum(tl.minimum(first + block + after, other_end), begin)
    all_begin = (tl.maximum(first + block - 1 - before, other_first) + tile - 1) // tile * tile
    all_end = tl.minimum(first + 1 + after, other_end) // tile * tile
    all_begin = tl.minimum(tl.maximum(all_begin, begin), end)
    return begin, all_begin, tl.maximum(all_end, all_begin), end


# ---- scores ----


@triton.jit
def _tanh(x):
    """Also of tiny x, where 1 - 2 / (e^2x + 1) has no digits left."""
    square = x * x
    near_0 = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(tl.abs(x) < 0.1, near_0, 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1))


@triton.jit
def _scores(
    s, rows, keys, n_q, n_k, scale, softcap, mask, mask_row_stride, mask_key_stride, left, right, shift,
    CAPPED: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """(scores, tanh) of raw products. rows and keys broadcast to the shape of s. EDGE: some are hidden."""
    tanh = s
    if CAPPED:
        tanh = _tanh(s * (scale / softcap))
        s = tanh * softcap
    else:
        s = s * scale
    inside = (rows < n_q) & (keys < n_k)
    if MASK != "none":
        pointers = mask + rows.to(tl.int64) * mask_row_stride + keys.to(tl.int64) * mask_key_stride
        if MASK == "bool":
            s = tl.where(tl.load(pointers, mask=inside, other=0) != 0, s, -INF)
        else:
            s += tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    if EDGE:
        distance = keys - rows - shift
        s = tl.where(inside & (distance >= -left) & (distance <= right), s, -INF)
    return s, tanh


# ---- forward ----


@triton.jit
def _attend(
    acc, row_max, row_sum, q, k, v, begin, end, rows, n_q, n_k, k_row_stride, v_row_stride, columns_qk, columns_v, d_qk, d_v,
    scale, softcap, mask, mask_row_stride, mask_key_stride, left, right, shift,
    PAD_QK: tl.constexpr, PAD_V: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    for first in range(begin, end, KEYS):
        keys = first + tl.arange(0, KEYS)
        k_tile = _load(k, keys, n_k, k_row_stride, columns_qk, 1, d_qk, EDGE, PAD_QK)
        s = tl.dot(q, tl.trans(k_tile))
        s, _ = _scores(
            s, rows[:, None], keys[None, :], n_q, n_k, scale, softcap, mask, mask_row_stride, mask_key_stride, left, right,
            shift, CAPPED, MASK, EDGE,
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(s, 1))
        reference = new_max
        if EDGE or MASK != "none":
            reference = tl.where(new_max == -INF, 0.0, new_max)  # of rows that have seen no key yet
        p = tl.exp2((s - reference[:, None]) * LOG2E)
        alpha = tl.exp2((row_max - reference) * LOG2E)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = _load(v, keys, n_k, v_row_stride, columns_v, 1, d_v, EDGE, PAD_V)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def forward_kernel(
    q, k, v, out, lse, mask, offsets_q, offsets_k,
    q_batch_stride, q_head_stride, q_row_stride, k_batch_stride, k_head_stride, k_row_stride, v_batch_stride, v_head_stride,
    v_row_stride, out_batch_stride, out_head_stride, out_row_stride, lse_batch_stride, lse_head_stride,
    mask_batch_stride, mask_head_stride, mask_row_stride, mask_key_stride,
    heads, group, longest_q, longest_k, total_q, total_k, d_qk, d_v, scale, softcap, left, right,
    PACKED: tl.constexpr, TOP_LEFT: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, LSE: tl.constexpr,
    WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, PAD_QK: tl.constexpr, PAD_V: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(longest_q, ROWS)
    program = tl.program_id(0)
    head, sequence = program // row_blocks % heads, program // row_blocks // heads
    first_row = (row_blocks - 1 - program % row_blocks) * ROWS  # causal rows at the end see the most: they go first
    start_q, n_q = _span(offsets_q, sequence, longest_q, total_q, PACKED)
    start_k, n_k = _span(offsets_k, sequence, longest_k, total_k, PACKED)
    if first_row < n_q:
        batch = sequence.to(tl.int64) if not PACKED else tl.zeros([], tl.int64)
        head_kv = head // group
        q += batch * q_batch_stride + head.to(tl.int64) * q_head_stride + start_q.to(tl.int64) * q_row_stride
        k += batch * k_batch_stride + head_kv.to(tl.int64) * k_head_stride + start_k.to(tl.int64) * k_row_stride
        v += batch * v_batch_stride + head_kv.to(tl.int64) * v_head_stride + start_k.to(tl.int64) * v_row_stride
        mask += batch * mask_batch_stride + head.to(tl.int64) * mask_head_stride
        shift = 0 if TOP_LEFT else n_k - n_q

        rows = first_row + tl.arange(0, ROWS)
        columns_qk, columns_v = tl.arange(0, WIDTH_QK), tl.arange(0, WIDTH_V)
        q_tile = _load(q, rows, n_q, q_row_stride, columns_qk, 1, d_qk, True, PAD_QK)
        acc = tl.zeros([ROWS, WIDTH_V], tl.float32)
        row_max = tl.full([ROWS], -INF, tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        begin, all_begin, all_end, end = _tiles(first_row + shift, ROWS, 0, n_k, left, right, KEYS)
        for part in tl.static_range(3):
            lower = begin if part == 0 else (all_begin if part == 1 else all_end)
            upper = all_begin if part == 0 else (all_end if part == 1 else end)
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q_tile, k, v, lower, upper, rows, n_q, n_k, k_row_stride, v_row_stride, columns_qk,
                columns_v, d_qk, d_v, scale, softcap, mask, mask_row_stride, mask_key_stride, left, right, shift,
                PAD_QK, PAD_V, CAPPED, MASK, part != 1, KEYS,
            )  # fmt: skip
        seen = row_sum > 0
        acc = acc / tl.where(seen, row_sum, 1.0)[:, None]
        out += batch * out_batch_stride + head.to(tl.int64) * out_head_stride + start_q.to(tl.int64) * out_row_stride
        _store(out, rows, n_q, out_row_stride, columns_v, d_v, acc)
        if LSE:
            lse += batch * lse_batch_stride + head.to(tl.int64) * lse_head_stride + start_q
            value = tl.where(seen, row_max + tl.log(tl.where(seen, row_sum, 1.0)), -INF)
            tl.store(lse + rows, value, mask=rows < n_q)


# ---- backward ----


@triton.jit
def delta_kernel(
    out, grad, grad_lse, delta,
    out_batch_stride, out_head_stride, out_row_stride, grad_batch_stride, grad_head_stride, grad_row_stride, grad_column_stride,
    lse_batch_stride, lse_head_stride, grad_lse_batch_stride, grad_lse_head_stride, grad_lse_row_stride,
    heads, n_q, d_v, GRAD_LSE: tl.constexpr, WIDTH_V: tl.constexpr, PAD_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta = sum over columns of out * grad, less the gradient of the LSE: what dP is lowered by."""
    row_blocks = tl.cdiv(n_q, ROWS)
    program = tl.program_id(0)
    rows = program % row_blocks * ROWS + tl.arange(0, ROWS)
    head = (program // row_blocks % heads).to(tl.int64)
    batch = (program // row_blocks // heads).to(tl.int64)
    columns = tl.arange(0, WIDTH_V)
    out += batch * out_batch_stride + head * out_head_stride
    grad += batch * grad_batch_stride + head * grad_head_stride
    product = _load(out, rows, n_q, out_row_stride, columns, 1, d_v, True, PAD_V).to(tl.float32)
    product *= _load(grad, rows, n_q, grad_row_stride, columns, grad_column_stride, d_v, True, PAD_V).to(tl.float32)
    total = tl.sum(product, 1)
    if GRAD_LSE:
        grad_lse += batch * grad_lse_batch_stride + head * grad_lse_head_stride
        total -= tl.load(grad_lse + rows.to(tl.int64) * grad_lse_row_stride, mask=rows < n_q, other=0.0)
    tl.store(delta + batch * lse_batch_stride + head * lse_head_stride + rows, total, mask=rows < n_q)


@triton.jit
def _row_statistics(lse, delta, rows, n_q):
    """(LSE, delta); rows without keys, and those past the end, get an LSE that makes P 0."""
    inside = rows < n_q
    row_lse = tl.load(lse + rows, mask=inside, other=INF)
    return tl.where(row_lse == -INF, INF, row_lse), tl.load(delta + rows, mask=inside, other=0.0)


@triton.jit
def _keys_over_rows(
    dk, dv, q, k_tile, v_tile, grad, lse, delta, begin, end, keys, n_q, n_k, q_row_stride, grad_row_stride, grad_column_stride, columns_qk, columns_v,
    d_qk, d_v, scale, softcap, mask, mask_row_stride, mask_key_stride, left, right, shift,
    PAD_QK: tl.constexpr, PAD_V: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Everything transposed, [keys, rows], so that P and dS are left operands as they come."""
    for first in range(begin, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        q_tile = _load(q, rows, n_q, q_row_stride, columns_qk, 1, d_qk, EDGE, PAD_QK)
        grad_tile = _load(grad, rows, n_q, grad_row_stride, columns_v, grad_column_stride, d_v, EDGE, PAD_V)
        row_lse, row_delta = _row_statistics(lse, delta, rows, n_q)
        s = tl.dot(k_tile, tl.trans(q_tile))
        s, tanh = _scores(
            s, rows[None, :], keys[:, None], n_q, n_k, scale, softcap, mask, mask_row_stride, mask_key_stride, left, right,
            shift, CAPPED, MASK, EDGE,
        )  # fmt: skip
        p = tl.exp2((s - row_lse[None, :]) * LOG2E)
        dv = tl.dot(p.to(grad_tile.dtype), grad_tile, dv)
        dp = tl.dot(v_tile, tl.trans(grad_tile))
        ds = p * (dp - row_delta[None, :])
        if CAPPED:
            ds *= 1 - tanh * tanh
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit
def keys_gradient_kernel(
    q, k, v, grad, lse, delta, dk, dv, mask, offsets_q, offsets_k,
    q_batch_stride, q_head_stride, q_row_stride, k_batch_stride, k_head_stride, k_row_stride, v_batch_stride, v_head_stride,
    v_row_stride, grad_batch_stride, grad_head_stride, grad_row_stride, grad_column_stride, lse_batch_stride, lse_head_stride,
    dk_batch_stride, dk_head_stride, dk_row_stride, dv_batch_stride, dv_head_stride, dv_row_stride,
    mask_batch_stride, mask_head_stride, mask_row_stride, mask_key_stride,
    heads_kv, group, longest_q, longest_k, total_q, total_k, d_qk, d_v, scale, softcap, left, right,
    PACKED: tl.constexpr, TOP_LEFT: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr,
    WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, PAD_QK: tl.constexpr, PAD_V: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys, summed over the query heads of its group in their order."""
    key_blocks = tl.cdiv(longest_k, KEYS)
    program = tl.program_id(0)
    head_kv, sequence = program // key_blocks % heads_kv, program // key_blocks // heads_kv
    first_key = program % key_blocks * KEYS
    start_q, n_q = _span(offsets_q, sequence, longest_q, total_q, PACKED)
    start_k, n_k = _span(offsets_k, sequence, longest_k, total_k, PACKED)
    if first_key < n_k:
        batch = sequence.to(tl.int64) if not PACKED else tl.zeros([], tl.int64)
        k += batch * k_batch_stride + head_kv.to(tl.int64) * k_head_stride + start_k.to(tl.int64) * k_row_stride
        v += batch * v_batch_stride + head_kv.to(tl.int64) * v_head_stride + start_k.to(tl.int64) * v_row_stride
        shift = 0 if TOP_LEFT else n_k - n_q

        keys = first_key + tl.arange(0, KEYS)
        columns_qk, columns_v = tl.arange(0, WIDTH_QK), tl.arange(0, WIDTH_V)
        k_tile = _load(k, keys, n_k, k_row_stride, columns_qk, 1, d_qk, True, PAD_QK)
        v_tile = _load(v, keys, n_k, v_row_stride, columns_v, 1, d_v, True, PAD_V)
        dk_sum = tl.zeros([KEYS, WIDTH_QK], tl.float32)
        dv_sum = tl.zeros([KEYS, WIDTH_V], tl.float32)
        # A key sees the rows from `right` before its own to `left` after it.
        begin, all_begin, all_end, end = _tiles(first_key - shift, KEYS, 0, n_q, right, left, ROWS)
        for member in range(group):
            head = (head_kv * group + member).to(tl.int64)
            q_head = q + batch * q_batch_stride + head * q_head_stride + start_q.to(tl.int64) * q_row_stride
            grad_head = (
                grad + batch * grad_batch_stride + head * grad_head_stride + start_q.to(tl.int64) * grad_row_stride
            )
            statistics = batch * lse_batch_stride + head * lse_head_stride + start_q
            mask_head = mask + batch * mask_batch_stride + head * mask_head_stride
            for part in tl.static_range(3):
                lower = begin if part == 0 else (all_begin if part == 1 else all_end)
                upper = all_begin if part == 0 else (all_end if part == 1 else end)
                dk_sum, dv_sum = _keys_over_rows(
                    dk_sum, dv_sum, q_head, k_tile, v_tile, grad_head, lse + statistics, delta + statistics, lower, upper, keys,
                    n_q, n_k, q_row_stride, grad_row_stride, grad_column_stride, columns_qk, columns_v, d_qk, d_v, scale, softcap, mask_head,
                    mask_row_stride, mask_key_stride, left, right, shift, PAD_QK, PAD_V, CAPPED, MASK, part != 1, ROWS,
                )  # fmt: skip
        dk += batch * dk_batch_stride + head_kv.to(tl.int64) * dk_head_stride + start_k.to(tl.int64) * dk_row_stride
        dv += batch * dv_batch_stride + head_kv.to(tl.int64) * dv_head_stride + start_k.to(tl.int64) * dv_row_stride
        _store(dk, keys, n_k, dk_row_stride, columns_qk, d_qk, dk_sum * scale)
        _store(dv, keys, n_k, dv_row_stride, columns_v, d_v, dv_sum)


@triton.jit
def _rows_over_keys(
    dq, q_tile, k, v, grad_tile, row_lse, row_delta, begin, end, rows, n_q, n_k, k_row_stride, v_row_stride, columns_qk, columns_v,
    d_qk, d_v, scale, softcap, mask, mask_row_stride, mask_key_stride, left, right, shift,
    PAD_QK: tl.constexpr, PAD_V: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    for first in range(begin, end, KEYS):
        keys = first + tl.arange(0, KEYS)
        k_tile = _load(k, keys, n_k, k_row_stride, columns_qk, 1, d_qk, EDGE, PAD_QK)
        v_tile = _load(v, keys, n_k, v_row_stride, columns_v, 1, d_v, EDGE, PAD_V)
        s, tanh = _scores(
            tl.dot(q_tile, tl.trans(k_tile)), rows[:, None], keys[None, :], n_q, n_k, scale, softcap, mask, mask_row_stride,
            mask_key_stride, left, right, shift, CAPPED, MASK, EDGE,
        )  # fmt: skip
        p = tl.exp2((s - row_lse[:, None]) * LOG2E)
        ds = p * (tl.dot(grad_tile, tl.trans(v_tile)) - row_delta[:, None])
        if CAPPED:
            ds *= 1 - tanh * tanh
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq)
    return dq


@triton.jit
def rows_gradient_kernel(
    q, k, v, grad, lse, delta, dq, mask, offsets_q, offsets_k,
    q_batch_stride, q_head_stride, q_row_stride, k_batch_stride, k_head_stride, k_row_stride, v_batch_stride, v_head_stride,
    v_row_stride, grad_batch_stride, grad_head_stride, grad_row_stride, grad_column_stride, lse_batch_stride, lse_head_stride,
    dq_batch_stride, dq_head_stride, dq_row_stride, mask_batch_stride, mask_head_stride, mask_row_stride, mask_key_stride,
    heads, group, longest_q, longest_k, total_q, total_k, d_qk, d_v, scale, softcap, left, right,
    PACKED: tl.constexpr, TOP_LEFT: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr,
    WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr, PAD_QK: tl.constexpr, PAD_V: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """dQ of a block of rows."""
    row_blocks = tl.cdiv(longest_q, ROWS)
    program = tl.program_id(0)
    head, sequence = program // row_blocks % heads, program // row_blocks // heads
    first_row = (row_blocks - 1 - program % row_blocks) * ROWS
    start_q, n_q = _span(offsets_q, sequence, longest_q, total_q, PACKED)
    start_k, n_k = _span(offsets_k, sequence, longest_k, total_k, PACKED)
    if first_row < n_q:
        batch = sequence.to(tl.int64) if not PACKED else tl.zeros([], tl.int64)
        head_kv = head // group
        q += batch * q_batch_stride + head.to(tl.int64) * q_head_stride + start_q.to(tl.int64) * q_row_stride
        k += batch * k_batch_stride + head_kv.to(tl.int64) * k_head_stride + start_k.to(tl.int64) * k_row_stride
        v += batch * v_batch_stride + head_kv.to(tl.int64) * v_head_stride + start_k.to(tl.int64) * v_row_stride
        grad += (
            batch * grad_batch_stride + head.to(tl.int64) * grad_head_stride + start_q.to(tl.int64) * grad_row_stride
        )
        mask += batch * mask_batch_stride + head.to(tl.int64) * mask_head_stride
        statistics = batch * lse_batch_stride + head.to(tl.int64) * lse_head_stride + start_q
        shift = 0 if TOP_LEFT else n_k - n_q

        rows = first_row + tl.arange(0, ROWS)
        columns_qk, columns_v = tl.arange(0, WIDTH_QK), tl.arange(0, WIDTH_V)
        q_tile = _load(q, rows, n_q, q_row_stride, columns_qk, 1, d_qk, True, PAD_QK)
        grad_tile = _load(grad, rows, n_q, grad_row_stride, columns_v, grad_column_stride, d_v, True, PAD_V)
        row_lse, row_delta = _row_statistics(lse + statistics, delta + statistics, rows, n_q)
        dq_sum = tl.zeros([ROWS, WIDTH_QK], tl.float32)
        begin, all_begin, all_end, end = _tiles(first_row + shift, ROWS, 0, n_k, left, right, KEYS)
        for part in tl.static_range(3):
            lower = begin if part == 0 else (all_begin if part == 1 else all_end)
            upper = all_begin if part == 0 else (all_end if part == 1 else end)
            dq_sum = _rows_over_keys(
                dq_sum, q_tile, k, v, grad_tile, row_lse, row_delta, lower, upper, rows, n_q, n_k, k_row_stride, v_row_stride,
                columns_qk, columns_v, d_qk, d_v, scale, softcap, mask, mask_row_stride, mask_key_stride, left, right, shift,
                PAD_QK, PAD_V, CAPPED, MASK, part != 1, KEYS,
            )  # fmt: skip
        dq += batch * dq_batch_stride + head.to(tl.int64) * dq_head_stride + start_q.to(tl.int64) * dq_row_stride
        _store(dq, rows, n_q, dq_row_stride, columns_qk, d_qk, dq_sum * scale)
