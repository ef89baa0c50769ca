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
    ForwardStrides,
    _load,
    _meet,
    _offset,
    _rows,
    _scores,
    _sequence,
    _softmax,
    _store,
    _unit,
)
from .launch import Launch, Memo, launch, strides


@triton.jit
def _attend_slice(
    acc_gmem, max_gmem, sum_gmem, written, q, k_tile, v_tile, first_row, first, keys, at, call, HOW: tl.constexpr
):
    """Adds what one tile of keys gives to the rows [first, first + SLICE) of the block.

    Scratch holds the maximum, the sum and O times the sum over the tiles so far: before the call for the first
    `written` rows (all or none), after it for this slice as well. Barriers part reads and writes of scratch, since the
    layouts of both need not give an element to the same thread.
    """
    slots = first + tl.arange(0, HOW.SLICE)
    rows = first_row + slots
    columns = tl.arange(0, HOW.WIDTH_V)
    acc_pointers = acc_gmem + slots[:, None] * HOW.WIDTH_V + columns[None, :]
    q_tile = _load(q, first_row + first, HOW.SLICE, HOW.WIDTH_QK, HOW.D_QK, False)
    no_mask = q.source
    s = _scores(tl.dot(q_tile, tl.trans(k_tile)), rows[:, None], keys[None, :], at, call, no_mask, HOW, True)
    there = slots < written
    row_max = tl.load(max_gmem + slots, mask=there, other=-INF)
    row_sum = tl.load(sum_gmem + slots, mask=there, other=0.0)
    acc = tl.load(acc_pointers, mask=there[:, None], other=0.0)
    p, new_max, alpha = _softmax(s, row_max, _unit(call, HOW), 0, False, True)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
    tl.debug_barrier()  # all warps have read the slice: it may be overwritten
    tl.store(max_gmem + slots, new_max)
    tl.store(sum_gmem + slots, row_sum * alpha + tl.sum(p, 1))
    tl.store(acc_pointers, acc)
    tl.debug_barrier()  # all warps have written it: it may be read


@triton.jit
def persistent_forward_kernel(
    q, k, v, out, lse, acc_gmem, max_gmem, sum_gmem, batches, strides, call, HOW: tl.constexpr
):
    """Attends with scratch of any contents: acc_gmem [cores, ROWS, WIDTH_V], max_gmem and sum_gmem [cores, ROWS]."""
    ROWS: tl.constexpr = HOW.ROWS
    WIDTH_V: tl.constexpr = HOW.WIDTH_V
    core, cores = tl.program_id(0), tl.num_programs(0)
    acc_gmem += core.to(tl.int64) * (ROWS * WIDTH_V)
    max_gmem += core * ROWS
    sum_gmem += core * ROWS
    row_blocks = tl.cdiv(call.longest_q, ROWS)
    for task in range(core, row_blocks * call.heads * batches, cores):
        first_row = task % row_blocks * ROWS
        head = task // row_blocks % call.heads
        head_kv = head // call.group
        at = _sequence(lse, lse, call, task // row_blocks // call.heads, HOW)
        q_rows = _rows(q, strides.q, at.batch, head, at.start_q, at.n_q, False)
        k_rows = _rows(k, strides.k, at.batch, head_kv, at.start_k, at.n_k, False)
        v_rows = _rows(v, strides.v, at.batch, head_kv, at.start_k, at.n_k, False)
        out_rows = _rows(out, strides.out, at.batch, head, at.start_q, at.n_q, False)
        rows_end = tl.minimum(ROWS, at.n_q - first_row)
        met = _meet(first_row + at.shift, ROWS, at.n_k, call.left, call.right, HOW.KEYS)
        for first_key in range(met.begin, met.end, HOW.KEYS):
            keys = first_key + tl.arange(0, HOW.KEYS)
            k_tile = _load(k_rows, first_key, HOW.KEYS, HOW.WIDTH_QK, HOW.D_QK, False)
            v_tile = _load(v_rows, first_key, HOW.KEYS, WIDTH_V, HOW.D_V, False)
            written = tl.where(first_key > met.begin, ROWS, 0)
            for first in range(0, rows_end, HOW.SLICE):
                _attend_slice(
                    acc_gmem, max_gmem, sum_gmem, written, q_rows, k_tile, v_tile, first_row, first, keys, at, call, HOW
                )

        for first in range(0, rows_end, HOW.SLICE):
            slots = first + tl.arange(0, HOW.SLICE)
            there = slots < tl.where(met.begin < met.end, ROWS, 0)
            row_sum = tl.load(sum_gmem + slots, mask=there, other=0.0)
            acc_pointers = acc_gmem + slots[:, None] * WIDTH_V + tl.arange(0, WIDTH_V)[None, :]
            acc = tl.load(acc_pointers, mask=there[:, None], other=0.0)
            seen = row_sum != 0  # NaN counts as seen
            safe_sum = tl.where(seen, row_sum, 1.0)
            _store(out_rows, first_row + first, acc / safe_sum[:, None], HOW.SLICE, WIDTH_V, HOW.D_V)
            if HOW.LSE:
                row_max = tl.load(max_gmem + slots, mask=there, other=-INF)
                top = row_max * call.scale if HOW.RAW else row_max
                value = tl.where(seen, top + tl.log(safe_sum), -INF)
                lse_rows = lse + _offset(strides.lse, at.batch, head, at.start_q) + first_row
                tl.store(lse_rows + slots, value, mask=first_row + slots < at.n_q)


def _scratch(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


def forward(plan, kind, q, k, v, out, lse, with_lse: bool, memo: Memo) -> None:
    """Runs the forward of a TritonPlan with cores."""
    tiles = plan.over_rows
    cores = min(plan.cores, -(-kind.longest_q // tiles.rows) * kind.heads * kind.sequences)
    scratch = [_scratch(cores, tiles.rows, *more, device=q.device) for more in ((plan.widths[1],), (), ())]

    def how() -> Launch:
        numbers = kind.sequences, ForwardStrides(*strides(q, k, v, out, lse)), kind.call
        return Launch(cores, numbers, kind.options(tiles, LSE=with_lse, SLICE=plan.slice_rows), tiles)

    launch(memo, persistent_forward_kernel, (q, k, v, out, lse, *scratch), how)
