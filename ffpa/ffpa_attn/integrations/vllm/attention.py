"""This module is the attention that vLLM gets, of plain tensors: keys and values lie in pages. It imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ... import env
from ...attention import ffpa_varlen
from ...operators import again, steps
from ...operators.options import options_of

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

    def __setattr__(self, name: str, value) -> None:
        """Also forgets what was settled of the batch as it was."""
        self.__dict__.pop("step", None)
        super().__setattr__(name, value)

    @cached_property
    def step(self) -> steps.Step:
        """Holds what calls of all layers need of the batch."""
        longest = self.max_query_len, self.max_seq_len
        return steps.Step(self.query_start_loc, self.seq_lens, self.block_table, *longest)


@dataclass(frozen=True, eq=False)
class Rule:
    """A layer's scores go by a rule."""

    scale: float
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    @cached_property
    def how(self) -> dict:
        """Returns ffpa's keywords for it, but sinks."""
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap}

    @cached_property
    def kind(self) -> tuple[tuple, tuple]:
        """Returns the values of these, and their types: 1 equals True and 1.0, which are not the same to a check."""
        values = tuple(self.how.values())
        return values, (*map(type, values), *map(type, self.window))


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
    cache: torch.Tensor,
    batch: Batch,
    out: torch.Tensor,
    rule: Rule,
    columns: int,
    dtype: torch.dtype,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Writes the attention of packed rows q [T, H, D] to out [T, H, Dv]; rows behind the last request's give 0.

    cache             vLLM's pool, of which `pools` makes views, given columns and dtype.
    batch             says which rows and pages are whose.
    rule              scale, window, softcap and sinks of the layer.
    k_scale, v_scale  what 8-bit keys and values are to be multiplied with.
    """
    call = steps.Call(q, cache, out, rule.sinks, k_scale, v_scale)
    _run(batch, call, rule, pools, columns, dtype)
    images = batch.images
    if images is not None:
        packed = images.query_start_loc, None, images.max_query_len, images.max_seq_len
        where = {"block_table": images.block_table, "seqused_k": images.seq_lens}
        views = pools(cache, columns, dtype)
        of_images = ffpa_varlen(q.index_select(0, images.rows), *views, *packed, **where, **rule.how, **_of_heads(call))
        out.index_copy_(0, images.rows, of_images)


def _of_heads(call: steps.Call) -> dict[str, torch.Tensor | None]:
    return {"sinks": call.sinks, "k_scale": call.k_scale, "v_scale": call.v_scale}


def attend_latent(
    q: torch.Tensor, cache: torch.Tensor, batch: Batch, rule: Rule, columns: int, kv_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the attention [T, H, columns] of q [T, H, D] on latent vectors, cache [pages, rows, D], of which values
    are the first `columns`; kv_scale is what 8-bit ones are to be multiplied with.
    """
    return _run(batch, steps.Call(q, cache, None, None, kv_scale, kv_scale), rule, _latents, columns)


def _latents(cache: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    pages = cache.unsqueeze(2)
    return pages, pages[..., :columns]


def _run(batch: Batch, call: steps.Call, rule: Rule, views_of: Callable, *of_views) -> torch.Tensor:
    """Returns the causal attention of a call, whose keys and values are these views of its cache."""
    step, (values, types) = batch.step, rule.kind
    kind = steps.kind(step, call, (values, views_of, of_views), types)
    if kind is not None and (result := again.run(kind, step, call)) is not None:
        return result
    views, (offsets, lengths, table) = views_of(call.cache, *of_views), step.tensors

    def is_remembered() -> bool:
        if kind is None:
            return False
        options = options_of(True, "bottom_right", *values, None, None, "f32", False)
        return steps.remember(kind, step, call, views, options)

    if is_remembered() and (result := again.run(kind, step, call)) is not None:
        return result
    where = {"block_table": table, "seqused_k": lengths, "out": call.out}
    how = {"causal": True, **rule.how, **_of_heads(call)}
    result = ffpa_varlen(call.q, *views, offsets, None, *step.longest, **where, **how)
    is_remembered()
    return result


def reserve(device: torch.device) -> None:
    """Takes what a call may take as its workspace, and gives it back: a run that measures memory shall see it."""
    torch.empty(env.run_flags()["FFPA_WORKSPACE_MB"] << 20, dtype=torch.uint8, device=device)
