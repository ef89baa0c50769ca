"""This is the Triton forward for machines with a fixed number of cores and little room on each, such as NPUs.

There are as many programs as cores; each goes over its share of the row tiles. K and V are loaded once for each tile
of keys and all rows of the block, while O, in float32, lives in global memory: a slice of it at a time comes on chip,
takes what the tile adds, and goes back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .forward_kernels import (
    INF,
    _join_sink,
    _load,
    _offset,
    _raise_largest,
    _rows,
    _scores,
    _sequence,
    _store,
    _tiles,
    _unit,
)


@triton.jit
def _attend_slice(
    acc_gmem, max_gmem, sum_gmem, written, q, k_tile, v_tile, first_row, first, keys, at, rule, RAW: tl.constexpr,
    CAPPED: tl.constexpr, D_QK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Adds what one tile of keys gives to the rows [first, first + SLICE) of the block.

    Scratch holds the maximum, the sum and O times the sum over the tiles so far: before the call for the first
    `written` rows (all or none), after it for this slice as well. Barriers part reads and writes of scratch, since the
    layouts of both need not give an element to the same thread.
    """
    slots = first + tl.arange(0, SLICE)
    rows = first_row + slots
    columns = tl.arange(0, v_tile.shape[1])
    acc_pointers = acc_gmem + slots[:, None] * v_tile.shape[1] + columns[None, :]
    unit = _unit(rule, RAW)
    q_tile = _load(q, first_row + first, SLICE, k_tile.shape[1], D_QK, False)
    s = _scores(  # there is no mask: q and rule stand for it and its strides
        tl.dot(q_tile, tl.trans(k_tile)), rows[:, None], keys[None, :], at, rule, q.source, rule, RAW, CAPPED, "none", True
    )  # fmt: skip
    there = slots < written
    row_max = tl.load(max_gmem + slots, mask=there, other=-INF)
    row_sum = tl.load(sum_gmem + slots, mask=there, other=0.0)
    acc = tl.load(acc_pointers, mask=there[:, None], other=0.0)
    new_max = tl.maximum(row_max, tl.max(s, 1))
    reference = tl.where(new_max == -INF, 0.0, new_max)  # rows may have seen no key yet
    p = tl.exp2((s - reference[:, None]) * unit)
    alpha = tl.exp2((row_max - reference) * unit)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
    tl.debug_barrier()  # all warps have read the slice: it may be overwritten
    tl.store(max_gmem + slots, new_max)
    tl.store(sum_gmem + slots, row_sum * alpha + tl.sum(p, 1))
    tl.store(acc_pointers, acc)
    tl.debug_barrier()  # all warps have written it: it may be read


@triton.jit
def _top(max_gmem, slots, there, rule, RAW: tl.constexpr):
    """Returns the largest scores of rows, -INF where no tile of keys was met."""
    row_max = tl.load(max_gmem + slots, mask=there, other=-INF)
    return row_max * rule.scale if RAW else row_max


@triton.jit
def persistent_forward_kernel(
    q, k, v, out, lse, acc_gmem, max_gmem, sum_gmem, sinks, largest, q_strides, k_strides, v_strides, out_strides, lse_strides,
    batches, sizes, rule, TOP_LEFT: tl.constexpr, RAW: tl.constexpr, CAPPED: tl.constexpr, LSE: tl.constexpr,
    SINKS: tl.constexpr, LARGEST: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, WIDTH_QK: tl.constexpr,
    WIDTH_V: tl.constexpr, SLICE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attends with scratch of any contents: acc_gmem [cores, ROWS, WIDTH_V], max_gmem and sum_gmem [cores, ROWS]."""
    core, cores = tl.program_id(0), tl.num_programs(0)
    acc_gmem += core.to(tl.int64) * (ROWS * WIDTH_V)
    max_gmem += core * ROWS
    sum_gmem += core * ROWS
    row_blocks = tl.cdiv(sizes.longest_q, ROWS)
    for task in range(core, row_blocks * sizes.heads * batches, cores):
        first_row = task % row_blocks * ROWS
        head = task // row_blocks % sizes.heads
        head_kv = head // sizes.group
        at = _sequence(lse, lse, sizes, task // row_blocks // sizes.heads, False, TOP_LEFT)
        q_rows = _rows(q, q_strides, at.batch, head, at.start_q, at.n_q, False)
        k_rows = _rows(k, k_strides, at.batch, head_kv, at.start_k, at.n_k, False)
        v_rows = _rows(v, v_strides, at.batch, head_kv, at.start_k, at.n_k, False)
        out_rows = _rows(out, out_strides, at.batch, head, at.start_q, at.n_q, False)
        rows_end = tl.minimum(ROWS, at.n_q - first_row)
        _, _, begin, end = _tiles(first_row + at.shift, ROWS, at.n_k, rule.left, rule.right, KEYS)
        for first_key in range(begin, end, KEYS):
            keys = first_key + tl.arange(0, KEYS)
            k_tile = _load(k_rows, first_key, KEYS, WIDTH_QK, D_QK, False)
            v_tile = _load(v_rows, first_key, KEYS, WIDTH_V, D_V, False)
            for first in range(0, rows_end, SLICE):
                _attend_slice(
                    acc_gmem, max_gmem, sum_gmem, tl.where(first_key > begin, ROWS, 0), q_rows, k_tile, v_tile, first_row, first,
                    keys, at, rule, RAW, CAPPED, D_QK, SLICE,
                )  # fmt: skip

        for first in range(0, rows_end, SLICE):
            slots = first + tl.arange(0, SLICE)
            there = slots < tl.where(begin < end, ROWS, 0)
            row_sum = tl.load(sum_gmem + slots, mask=there, other=0.0)
            acc_pointers = acc_gmem + slots[:, None] * WIDTH_V + tl.arange(0, WIDTH_V)[None, :]
            acc = tl.load(acc_pointers, mask=there[:, None], other=0.0)
            if LARGEST:
                top = _top(max_gmem, slots, there, rule, RAW)
                _raise_largest(largest + task // row_blocks, top, first_row + slots < at.n_q)
            if SINKS:
                top, kept, added = _join_sink(_top(max_gmem, slots, there, rule, RAW), tl.load(sinks + head))
                row_sum = row_sum * kept + added
                acc *= kept[:, None]
            seen = row_sum != 0  # NaN counts as seen
            safe_sum = tl.where(seen, row_sum, 1.0)
            _store(out_rows, first_row + first, acc / safe_sum[:, None], SLICE, WIDTH_V, D_V)
            if LSE:
                if not SINKS:
                    top = _top(max_gmem, slots, there, rule, RAW)
                lse_rows = lse + _offset(lse_strides, at.batch, head, at.start_q) + first_row
                tl.store(
                    lse_rows + slots, tl.where(seen, top + tl.log(safe_sum), -INF), mask=first_row + slots < at.n_q
                )


def scratch(cores: int, rows: int, columns: int, device: torch.device) -> list[torch.Tensor]:
    """Returns memory for O, maxima and sums."""
    return [torch.empty(cores, rows, *of, dtype=torch.float32, device=device) for of in ((columns,), (), ())]
