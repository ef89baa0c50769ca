"""Attention over further keys, added to that over others: rows of both, and their LSE, once through the chip."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import _offset


@triton.jit
def merge_kernel(
    out, lse, more_out, more_lse, out_strides, lse_strides, more_out_strides, more_lse_strides, heads, n,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """out and lse in place. A program has some rows of a head, and passes over their D columns, KEYS at a time.

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
    a = tl.load(lse + rows * lse_strides.row, mask=there, other=0.0)
    b = tl.load(more_lse + rows * more_lse_strides.row, mask=there, other=0.0)
    top = tl.maximum(a, b)
    a, b = tl.exp(a - top), tl.exp(b - top)
    total = a + b
    tl.debug_barrier()  # all have read the LSE: it may be overwritten
    tl.store(lse + rows * lse_strides.row, top + tl.log(total), mask=there)
    out += _offset(out_strides, batch, head, first)
    more_out += _offset(more_out_strides, batch, head, first)
    for column in range(0, D, KEYS):
        columns = column + tl.arange(0, KEYS)
        inside = there[:, None] & (columns < D)[None, :]
        at = out + rows[:, None] * out_strides.row + columns[None, :]
        more = tl.load(more_out + rows[:, None] * more_out_strides.row + columns[None, :], mask=inside, other=0.0)
        value = tl.load(at, mask=inside, other=0.0) * (a / total)[:, None] + more * (b / total)[:, None]
        tl.debug_barrier()
        tl.store(at, value, mask=inside)
