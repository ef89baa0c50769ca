"""Attention over several sets of keys, added to that over others: rows of all, and their LSEs, once through the chip."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import _offset


@triton.jit
def merge_kernel(
    out, lse, more_out, more_lse, out_strides, lse_strides, more_out_strides, more_lse_strides, more_out_step, more_lse_step, heads, n,
    D: tl.constexpr, MORE: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """out and lse in place, of which the FIRST time nothing is read, and MORE that lie a step apart. A program has some rows of a
    head, and passes over their D columns, KEYS at a time.

    Several warps read the same LSE, and nothing makes a tile's reader its writer: barriers part reads and writes.
    """
    blocks = tl.cdiv(n, ROWS)
    program = tl.program_id(0)
    head, batch = program // blocks % heads, program // blocks // heads
    first = program % blocks * ROWS
    rows = tl.arange(0, ROWS)
    there = first + rows < n
    lse += _offset(lse_strides, batch, head, first)
    more_lse += _offset(more_lse_strides, batch, head, first)
    own = tl.full((ROWS,), -float("inf"), tl.float32)
    if not FIRST:
        own = tl.load(lse + rows * lse_strides.row, mask=there, other=0.0)
    more_lse += rows * more_lse_strides.row
    top = own
    lse_at = more_lse
    for _ in tl.static_range(MORE):
        top = tl.maximum(top, tl.load(lse_at, mask=there, other=0.0))
        lse_at += more_lse_step
    total = tl.exp(own - top)
    lse_at = more_lse
    for _ in tl.static_range(MORE):
        total += tl.exp(tl.load(lse_at, mask=there, other=0.0) - top)
        lse_at += more_lse_step
    tl.debug_barrier()  # all have read the LSE: it may be overwritten
    tl.store(lse + rows * lse_strides.row, top + tl.log(total), mask=there)
    out += _offset(out_strides, batch, head, first)
    more_out += _offset(more_out_strides, batch, head, first)
    for column in range(0, D, KEYS):
        columns = column + tl.arange(0, KEYS)
        inside = there[:, None] & (columns < D)[None, :]
        at = out + rows[:, None] * out_strides.row + columns[None, :]
        value = tl.zeros((ROWS, KEYS), tl.float32)
        if not FIRST:
            value += tl.load(at, mask=inside, other=0.0) * (tl.exp(own - top) / total)[:, None]
        lse_at = more_lse
        more_at = more_out + rows[:, None] * more_out_strides.row + columns[None, :]
        for _ in tl.static_range(MORE):
            share = tl.exp(tl.load(lse_at, mask=there, other=0.0) - top) / total
            value += tl.load(more_at, mask=inside, other=0.0) * share[:, None]
            lse_at += more_lse_step
            more_at += more_out_step
        tl.debug_barrier()
        tl.store(at, value, mask=inside)
