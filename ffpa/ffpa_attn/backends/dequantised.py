"""This is the forward of 8-bit pages for many rows: keys and values are dequantised into the workspace, those of some sequences at
a time, in Triton or else by PyTorch's operators, and a forward on wgmma attends to them. A number times its scale is rounded to
the type of Q there, as no kernel on wgmma knows scales. `plan` is pure but for whether Triton is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..launching.attention_call import Call, Pages
from ..launching.launch import multiprocessors
from ..specs.problem import Problem
from ..support.private_torch import PlainTorch
from ..triton_ops.launch import Launch, Tiles, Unable, kind_of, launch_alone, memo_of, strides
from . import triton_attention
from .row_tiles import RowTilePlan

TILES = Tiles(16, 128, 4, 1)  # rows and columns at a time
_BYTES_HELD = 3  # bytes of a number in the workspace: as PyTorch gathers it, and as it is dequantised
_MICROSECONDS_OF_LAUNCHES = 20.0  # more launches, and what the host does for them, for some sequences
_MICROSECONDS_OF_NUMBER = 1.1e-6  # to dequantise one in Triton, on an H200
_MICROSECONDS_IN_PYTORCH = 5.8e-6  # and without Triton


class DequantisedPlan(NamedTuple):
    attention: RowTilePlan
    together: int  # sequences that are dequantised at a time
    values_in_keys: bool
    microseconds: float  # an estimate

    @property
    def kernel(self) -> str:
        return self.attention.kernel

    @property
    def specs(self) -> tuple:
        return self.attention.specs

    def forward(
        self, q, k, v, out, lse, mask, offsets, rule, workspace_cap: int, memo: dict, sinks=None, largest=None, pages=None
    ) -> None:  # fmt: skip
        """Does what RowTilePlan.forward does."""
        if offsets:  # rows of no sequence get these
            out.zero_()
            lse.fill_(-float("inf"))
        together = max(1, min(self.together, workspace_cap // self._bytes_of_sequence(k, v, pages)))
        for first in range(0, len(pages.used), together):
            some = slice(first, first + together)
            rows = [q, out, lse] if offsets else [x[some] if x.numel() else x for x in (q, out, lse)]
            of_q = (offsets[0][first : some.stop + 1], *offsets[1:]) if offsets else None
            with PlainTorch(q.device):
                keys = _dequantised(k, pages, some, pages.k_scale, q.dtype)
                values = keys[..., : v.shape[-1]]
                if not self.values_in_keys:
                    values = _dequantised(v, pages, some, pages.v_scale, q.dtype)
            where = _without_table(pages, some)
            call = memo.get(len(where.used)) or self._call(
                rows[0], keys, values, rows[1], of_q, rule, where, workspace_cap
            )
            memo[len(where.used)] = call
            of_largest = None if largest is None else largest[some]
            call(rows[0], keys, values, *rows[1:], None, of_q, sinks, of_largest, where)

    def _bytes_of_sequence(self, k, v, pages: Pages) -> int:
        entries, rows = _held(k, pages)
        columns = k.shape[3] + (0 if self.values_in_keys else v.shape[3])
        return max(_BYTES_HELD * entries * rows * k.shape[1] * columns, 1)

    def _call(self, q, k, v, out, offsets, rule, pages: Pages, workspace_cap: int) -> Call:
        left = max(workspace_cap - (1 if self.values_in_keys else 2) * k.nbytes, 0)
        return self.attention._call(
            q, k, v, out, None, offsets, rule, pages, multiprocessors(q.device), left, clears=False
        )


def _held(pool, pages: Pages) -> tuple[int, int]:
    """Returns how many pages of each sequence are dequantised, and how many rows of each."""
    if pages.first is not None:  # a sequence may begin on any row of its page
        return 1, pool.shape[2]
    if pages.table is None or pages.table.shape[1] == 1:
        return 1, min(pages.longest, pool.shape[2])
    return -(-pages.longest // pool.shape[2]), pool.shape[2]


def _dequantised(pool, pages: Pages, some: slice, scale, dtype) -> torch.Tensor:
    """Returns the rows of some sequences, [B, heads, rows, columns], from the first row of their first pages on. Rows behind a
    sequence's last key hold anything.
    """
    if (pool.is_cuda or triton_attention.interprets()) and not triton_attention.why_not():
        with contextlib.suppress(Unable):
            return _by_triton(pool, pages, some, scale, dtype)
    entries, rows = _held(pool, pages)
    bits = pool.view(torch.uint8).transpose(1, 2)[:, :rows]  # rows before heads, as they come of several pages
    if pages.table is None:
        bits = bits[some]
    else:
        table = pages.table[some, :entries].long()
        there = (table >= 0) & (table < len(pool))
        bits = bits[torch.where(there, table, 0)].masked_fill_(~there[..., None, None, None], 0).flatten(1, 2)
    numbers = bits.view(pool.dtype).to(dtype, memory_format=torch.contiguous_format)
    if scale is not None:
        numbers.mul_(scale.reshape(-1, 1))
    return numbers.transpose(1, 2)


def _by_triton(pool, pages: Pages, some: slice, scale, dtype) -> torch.Tensor:
    from ..triton_ops.page_kernels import dequantise_kernel

    used, table, added = pages.used[some], pages.table, pages.added
    entries, page_rows = _held(pool, pages)
    if table is None:
        pool = pool[some]
    else:
        table = table[some]
    heads, d = pool.shape[1], pool.shape[3]
    result = torch.empty(len(used), entries * page_rows, heads, d, dtype=dtype, device=pool.device)
    options = {"D": d, "ADDED": added is not None, "TABLE": table is not None, "SCALED": scale is not None}
    # A tensor that there is none of is not read: any other will do.
    added = used if added is None else added[some.start : some.stop + 1]
    tensors = pool, used, added, used if table is None else table, pool if scale is None else scale, result

    def how() -> Launch:
        steps = table.stride(0) if options["TABLE"] else 0, int(options["SCALED"] and scale.numel() > 1)
        numbers = *strides(pool), *steps, len(pool), entries, page_rows, heads, pages.more
        return Launch(-(-page_rows // TILES.rows) * entries * len(used) * heads, numbers, options, TILES)

    memo = memo_of("dequantised", *options.values(), pages.more, *kind_of(*tensors))
    launch_alone(memo, dequantise_kernel, tensors, how)
    return result.transpose(1, 2)


def _without_table(pages: Pages, some: slice) -> Pages:
    """Returns where the rows of _dequantised() are."""
    first, added = pages.first, pages.added
    return Pages(
        pages.used[some], None, pages.longest, None if first is None else first[some],
        None if added is None else added[some.start : some.stop + 1], pages.more,
    )  # fmt: skip


def plan(p: Problem, flags: Mapping[str, Any], attention: Callable) -> DequantisedPlan | str:
    """Returns what runs the problem, or why it cannot; attention(p, flags) plans one whose keys have 16 bits."""
    if not p.n_k:
        return "there are no keys"
    columns = p.d_qk + (0 if p.values_in_keys else p.d_v)
    page_rows, entries = p.pages
    rows = -(-p.n_k // page_rows) * page_rows if entries > 1 else p.n_k
    numbers = p.heads_kv * rows * columns  # of a sequence
    together = min(p.batch, (flags["FFPA_WORKSPACE_MB"] << 20) // (_BYTES_HELD * numbers))
    if not together:
        return f"FFPA_WORKSPACE_MB={flags['FFPA_WORKSPACE_MB']} does not hold the dequantised keys of a sequence"
    found = attention(p._replace(cache=None, pages=(p.n_k, 1), batch=together), flags)
    if isinstance(found, str):
        return found
    times = -(-p.batch // together)
    of_attention = times * (found.microseconds + _MICROSECONDS_OF_LAUNCHES)
    of_number = _MICROSECONDS_IN_PYTORCH if triton_attention.why_not() else _MICROSECONDS_OF_NUMBER
    microseconds = of_attention + p.batch * numbers * of_number
    return DequantisedPlan(found, together, p.values_in_keys, microseconds)
