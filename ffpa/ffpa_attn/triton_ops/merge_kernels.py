"""Adds attention over several sets of keys to that over others: rows and LSEs of all pass once through the chip."""

from __future__ import annotations

import triton
import triton.language as tl

from .forward_kernels import _offset


@triton.jit
def merge_kernel(
    out, top, total, more_out, more_lse, out_strides, sum_strides, more_out_strides, more_lse_strides, more_out_step, more_lse_step, heads, n,
    D: tl.constexpr, MORE: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Updates out, top and total in place, which it does not read the FIRST time, with MORE results that lie a step
    apart. A program has some rows of a head, and passes over their D columns, KEYS at a time.

    Several warps read the same sums, and nothing makes a tile's reader its writer: barriers part reads and writes.
    """
    blocks = tl.cdiv(n, ROWS)
    program = tl.program_id(0)
    head, batch = program // blocks % heads, program // blocks // heads
    first = program % blocks * ROWS
    rows = tl.arange(0, ROWS)
    there = first + rows < n
    sums_at = _offset(sum_strides, batch, head, first) + rows * sum_strides.row
    more_lse += _offset(more_lse_strides, batch, head, first) + rows * more_lse_strides.row
    own_top = tl.full((ROWS,), -float("inf"), tl.float32)
    own = tl.zeros((ROWS,), tl.float32)
    if not FIRST:
        own_top = tl.load(top + sums_at, mask=there, other=0.0)
        own = tl.load(total + sums_at, mask=there, other=0.0)
    new_top = own_top
    lse_at = more_lse
    for _ in tl.static_range(MORE):
        new_top = tl.maximum(new_top, tl.load(lse_at, mask=there, other=0.0))
        lse_at += more_lse_step
    reference = tl.where(new_top == -float("inf"), 0.0, new_top)  # rows may have no keys
    own *= tl.exp(own_top - reference)
    new_total = own
    lse_at = more_lse
    for _ in tl.static_range(MORE):
        new_total += tl.exp(tl.load(lse_at, mask=there, other=0.0) - reference)
        lse_at += more_lse_step
    divisor = tl.where(new_total == 0, 1.0, new_total)
    tl.debug_barrier()  # all have read the sums: they may be overwritten
    tl.store(top + sums_at, new_top, mask=there)
    tl.store(total + sums_at, new_total, mask=there)
    out += _offset(out_strides, batch, head, first)
    more_out += _offset(more_out_strides, batch, head, first)
    for column in range(0, D, KEYS):
        columns = column + tl.arange(0, KEYS)
        inside = there[:, None] & (columns < D)[None, :]
        at = out + rows[:, None] * out_strides.row + columns[None, :]
        value = tl.zeros((ROWS, KEYS), tl.float32)
        if not FIRST:
            value += tl.load(at, mask=inside, other=0.0) * (own / divisor)[:, None]
        lse_at = more_lse
        more_at = more_out + rows[:, None] * more_out_strides.row + columns[None, :]
        for _ in tl.static_range(MORE):
            share = tl.exp(tl.load(lse_at, mask=there, other=0.0) - reference) / divisor
            value += tl.load(more_at, mask=inside, other=0.0) * share[:, None]
            lse_at += more_lse_step
            more_at += more_out_step
        tl.debug_barrier()
        tl.store(at, value, mask=inside)
