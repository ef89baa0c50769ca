"""This is the forward of 8-bit pages for many rows: PyTorch dequantises keys and values into the workspace, those of some sequences
at a time, and a forward on wgmma attends to them. A number times its scale is rounded to the type of Q there, as no kernel on
wgmma knows scales. `plan` is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..launching.attention_call import Call, Pages
from ..launching.launch import multiprocessors
from ..specs.problem import Problem
from ..support.private_torch import PlainTorch
from .row_tiles import RowTilePlan

_BYTES_HELD = 3  # bytes of a number in the workspace: as it is gathered, and as it is dequantised


class DequantisedPlan(NamedTuple):
    attention: RowTilePlan
    together: int  # sequences that are dequantised at a time
    values_in_keys: bool

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
        for first in range(0, len(pages.used), self.together):
            some = slice(first, first + self.together)
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

    def _call(self, q, k, v, out, offsets, rule, pages: Pages, workspace_cap: int) -> Call:
        left = max(workspace_cap - (1 if self.values_in_keys else 2) * k.nbytes, 0)
        return self.attention._call(q, k, v, out, None, offsets, rule, pages, multiprocessors(q.device), left)


def _dequantised(pool, pages: Pages, some: slice, scale, dtype) -> torch.Tensor:
    """Returns the rows of some sequences, [B, heads, rows, columns], from the first row of their first pages on."""
    bits = pool.view(torch.uint8).transpose(1, 2)  # rows before heads, as they come of several pages
    whole = pages.first is not None  # a sequence may begin on any row of its page
    if pages.table is None:
        bits = bits[some] if whole else bits[some, : pages.longest]
    else:
        table = pages.table[some, : 1 if whole else -(-pages.longest // pool.shape[2])].long()
        there = (table >= 0) & (table < len(pool))
        bits = bits[torch.where(there, table, 0)].masked_fill_(~there[..., None, None, None], 0).flatten(1, 2)
    numbers = bits.view(pool.dtype).to(dtype, memory_format=torch.contiguous_format)
    if scale is not None:
        numbers.mul_(scale.reshape(-1, 1))
    return numbers.transpose(1, 2)


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
    numbers = p.heads_kv * p.n_k * columns  # of a sequence
    together = min(p.batch, (flags["FFPA_WORKSPACE_MB"] << 20) // (_BYTES_HELD * numbers))
    if not together:
        return f"FFPA_WORKSPACE_MB={flags['FFPA_WORKSPACE_MB']} does not hold the dequantised keys of a sequence"
    found = attention(p._replace(cache=None, pages=(p.n_k, 1), batch=together), flags)
    if isinstance(found, str):
        return found
    return DequantisedPlan(found, together, p.values_in_keys)
