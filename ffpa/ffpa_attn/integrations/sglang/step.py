"""Finds where SGLang's pools have the keys of each sequence, and attends to them. Nothing here imports SGLang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...attention import ffpa_varlen
from .refusals import Rule


@dataclass(slots=True)
class Sequences:
    """Holds what all layers of a forward share. A captured graph's are views of buffers, which each replay fills anew."""

    cu_seqlens_q: torch.Tensor  # int32 [B + 1]
    seqused_k: torch.Tensor  # int32 [B], the keys of each sequence
    table: torch.Tensor  # int32 [B, entries], its pages
    max_seqlen_q: int
    max_seqlen_k: int
    longer: int = 0  # keys that SGLang does not count yet
    window_table: torch.Tensor | None = None  # its pages in the pool of layers with windows
    window_slots: torch.Tensor | None = None  # int64 [T], where that pool gets new rows


def fill(
    s: Sequences, lengths: torch.Tensor, slots_of: torch.Tensor, requests: torch.Tensor, page_size: int,
    to_window: Callable[[torch.Tensor], torch.Tensor] | None = None, new_slots: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Writes lengths and pages, in place and without a look at numbers, so that a graph can hold it.

    lengths     [B], the keys that SGLang counts.
    slots_of    int32 [requests, tokens], the slots of each request's tokens.
    requests    [B], the request of each sequence.
    to_window   says where slots are in the pool of layers with windows.
    new_slots   [T] at least, those to be written.
    """
    torch.add(lengths, s.longer, out=s.seqused_k)
    slots = slots_of[:, ::page_size].index_select(0, requests)
    torch.div(slots, page_size, rounding_mode="floor", out=s.table)
    if to_window is not None:
        torch.div(to_window(slots), page_size, rounding_mode="floor", out=s.window_table)
        if new_slots is not None:
            s.window_slots.copy_(to_window(new_slots[: s.window_slots.shape[0]]))


def entries(slots_of: torch.Tensor, page_size: int) -> int:
    """Returns how many pages a row of the table has."""
    return -(-slots_of.shape[1] // page_size)


def bound(n: int, most: int) -> int:
    """Returns the next power of two, or `most`: calls are planned once for each bound of lengths."""
    return min(1 << max(n - 1, 0).bit_length(), most)


def attend(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, rule: Rule, s: Sequences, *,
    sinks: torch.Tensor | None = None, k_scale=None, v_scale=None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attends to pages [pages, rows, Hkv, D]: q [T, H, D] gives [T, H, Dv]. Rows of a sequence are its last ones."""
    table = s.window_table if rule.in_window_pool else s.table
    return ffpa_varlen(
        q, k_pages, v_pages, s.cu_seqlens_q, None, s.max_seqlen_q, s.max_seqlen_k, causal=True, window=rule.window,
        scale=rule.scale, softcap=rule.softcap, sinks=sinks, block_table=table, seqused_k=s.seqused_k, k_scale=k_scale,
        v_scale=v_scale, out=out,
    )  # fmt: skip


def attend_to_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule, s: Sequences, *,
    sinks: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attends to the keys that come with the call, [T, Hkv, D], as MLA's prefill without a cached prefix does."""
    offsets, longest = s.cu_seqlens_q, s.max_seqlen_q
    return ffpa_varlen(
        q, k, v, offsets, offsets, longest, longest, causal=True, window=rule.window, scale=rule.scale,
        softcap=rule.softcap, sinks=sinks, out=out,
    )  # fmt: skip
