"""This module is the attention that vLLM gets, of plain tensors: keys and values lie in pages. It imports no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ... import env
from ...attention import ffpa_varlen

EIGHT_BITS = torch.float8_e4m3fn


class Images(NamedTuple):
    """The images of a step are packed sequences of their own, whose rows see each other; `images.py` finds them."""

    rows: torch.Tensor  # int64 [R], where they are among all rows
    query_start_loc: torch.Tensor  # int32 [S + 1]
    seq_lens: torch.Tensor  # int32 [S], the keys up to the last of each image
    block_table: torch.Tensor  # int32 [S, entries], the pages of the request of each
    max_query_len: int
    max_seq_len: int


@dataclass
class Batch:
    """All layers of a kind share a batch in one step; the names are those of vLLM's own backends."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor  # int32 [B + 1]
    max_seq_len: int
    seq_lens: torch.Tensor  # int32 [B], the keys of each request, those of this step included
    block_table: torch.Tensor  # int32 [B, entries]
    slot_mapping: torch.Tensor  # int64, the place of each new row
    causal: bool = True
    images: Images | None = None


class Rule(NamedTuple):
    """A layer's scores go by a rule."""

    scale: float
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


def bound(n: int) -> int:
    """Returns a bound of n, at most an eighth more: a kind of call is planned once, and few bounds make few kinds."""
    step = 1 << max(n.bit_length() - 4, 0)
    return -(-n // step) * step


def longest_keys(keys: int, decoded: int, most: int) -> int:
    """Returns a bound of the keys of a batch whose requests decode so many rows at most, 0 if it is no such batch.

    If they have no keys but of these rows, the batch may be the one by which vLLM warms up for the capture of a graph.
    Its bound is then that of the captured call, `most`, so that nothing is left to plan or to load in a capture.
    """
    return bound(max(keys, most) if keys <= decoded else keys)


def pools(cache: torch.Tensor, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views of vLLM's pool [pages, heads, rows, D of K and D of V]: keys and values [pages, rows, heads, D]."""
    if cache.dtype != dtype:
        cache = cache.view(dtype)
    return cache.transpose(1, 2).split_with_sizes((columns, cache.shape[3] - columns), 3)


def attend(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: Batch,
    out: torch.Tensor,
    rule: Rule,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Writes the attention of packed rows q [T, H, D] to out [T, H, Dv]; rows behind the last request's give 0.

    k_pages, v_pages  what `pools` gives.
    batch             says which rows and pages are whose.
    rule              scale, window, softcap and sinks of the layer.
    k_scale, v_scale  what 8-bit keys and values are to be multiplied with.
    """
    how = {**rule._asdict(), "k_scale": k_scale, "v_scale": v_scale}
    packed = batch.query_start_loc, None, batch.max_query_len, batch.max_seq_len
    where = {"block_table": batch.block_table, "seqused_k": batch.seq_lens}
    ffpa_varlen(q, k_pages, v_pages, *packed, out=out, causal=True, **where, **how)
    images = batch.images
    if images is not None:
        packed = images.query_start_loc, None, images.max_query_len, images.max_seq_len
        where = {"block_table": images.block_table, "seqused_k": images.seq_lens}
        both_ways = ffpa_varlen(q.index_select(0, images.rows), k_pages, v_pages, *packed, **where, **how)
        out.index_copy_(0, images.rows, both_ways)


def attend_latent(
    q: torch.Tensor, cache: torch.Tensor, batch: Batch, scale: float, columns: int, kv_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the attention [T, H, columns] of q [T, H, D] on latent vectors, cache [pages, rows, D], of which values
    are the first `columns`; kv_scale is what 8-bit ones are to be multiplied with.
    """
    pages = cache.unsqueeze(2)
    packed = batch.query_start_loc, None, batch.max_query_len, batch.max_seq_len
    where = {"block_table": batch.block_table, "seqused_k": batch.seq_lens}
    how = {"causal": True, "scale": scale, "k_scale": kv_scale, "v_scale": kv_scale}
    return ffpa_varlen(q, pages, pages[..., :columns], *packed, **where, **how)


def reserve(device: torch.device) -> None:
    """Takes what a call may take as its workspace, and gives it back: a run that measures memory shall see it."""
    torch.empty(env.run_flags()["FFPA_WORKSPACE_MB"] << 20, dtype=torch.uint8, device=device)
