"""Dequantises pages: the 8-bit rows of sequences pass once through the chip, and are written one after the other in 16 bits."""

from __future__ import annotations

import triton
import triton.language as tl

from .forward_kernels import _offset


@triton.jit
def dequantise_kernel(
    pool, used, added, table, scale, result, pool_strides, table_step, scale_step, pages, entries, page_rows, heads, more,
    D: tl.constexpr, ADDED: tl.constexpr, TABLE: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Writes result, [B, entries * page_rows, heads, D] without gaps. A program has ROWS rows of a page of one sequence and
    one head, and passes over their D columns, KEYS at a time; it does nothing if they are behind the sequence's last key.
    Rows of a page that the pool does not have are zeros. Without a TABLE sequence i has page i.

    Numbers are multiplied in float32 and rounded once, as PyTorch does it: both 16-bit types hold all of e4m3. Eight columns
    are a dim of their own, so that the thread that loads them stores them; else they would pass through shared memory.
    """
    blocks = tl.cdiv(page_rows, ROWS)
    head, program = tl.program_id(0) % heads, tl.program_id(0) // heads
    first, program = program % blocks * ROWS, program // blocks
    entry, sequence = program % entries, program // entries
    row = entry.to(tl.int64) * page_rows + first
    end = tl.load(used + sequence).to(tl.int64) + more
    if ADDED:
        end += tl.load(added + sequence + 1).to(tl.int64) - tl.load(added + sequence)
    if row < end:
        page, held = sequence, page_rows
        if TABLE:
            page = tl.load(table + sequence.to(tl.int64) * table_step + entry)
            held = tl.where((page >= 0) & (page < pages), page_rows, 0)
        rows = tl.arange(0, ROWS).to(tl.int64)
        inside, there = first + rows < page_rows, first + rows < held
        factor = tl.load(scale + head * scale_step) if SCALED else 1.0
        source = pool + (_offset(pool_strides, page, head, first) + rows * pool_strides.row)[:, None, None]
        to = result + (((sequence.to(tl.int64) * entries * page_rows + row + rows) * heads + head) * D)[:, None, None]
        for eight in range(0, D // 8, KEYS // 8):
            eights = eight + tl.arange(0, KEYS // 8)[None, :, None]
            columns = eights * 8 + tl.arange(0, 8)[None, None, :]
            real = eights < D // 8
            numbers = tl.load(source + columns, mask=there[:, None, None] & real, other=0.0).to(tl.float32) * factor
            tl.store(to + columns, numbers.to(result.dtype.element_ty), mask=inside[:, None, None] & real)
