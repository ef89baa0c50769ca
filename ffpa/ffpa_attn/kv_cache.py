"""Users call ffpa_with_kvcache with a cache of keys and values: it writes new rows there, and attends to what is there."""

from __future__ import annotations

from numbers import Integral

import torch

from . import env
from .checks import arguments, memory_checks, page_checks, page_values, words
from .operators import again, again_paged, paged
from .operators.options import options_of

_NAMES = {"k_pages": "k_cache", "v_pages": "v_cache", "seqused_k": "cache_seqlens", "leftpad_k": "cache_leftpad"}


def ffpa_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor | int,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool | str = False,
    align: str = "bottom_right",
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_max_logits: bool = False,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    **unknown,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Writes new keys and values into a cache, in place, and attends to all that it then has of each sequence.

    q [B, N, Hq, D], or packed [T, Hq, D] with cu_seqlens_q (int32 [B + 1]) and max_seqlen_q. It returns what q has rows
    for, with Dv columns, and with return_lse the LSE, [B, Hq, N] or [Hq, T]. The rule is that of ffpa: rows of q meet at
    the last keys, new ones included.

    k_cache, v_cache  [B_cache, rows, Hkv, D] and [B_cache, rows, Hkv, Dv]; with block_table pools [pages, rows, Hkv, D],
                      whose pages have a multiple of 16 rows. Any strides of a multiple of 8, with unit stride on the last
                      dim and a start at 16 bytes.
    k, v              new rows [B, N_new, Hkv, D], or packed [T_new, Hkv, D] with cu_seqlens_k_new: row i of sequence b
                      becomes its key cache_seqlens[b] + i. None: the cache is only read.
    cache_seqlens     int32 [B], the keys of each sequence before new ones are written; an int where all have as many.
    block_table       int32 [B, entries], the pages of each sequence.
    cache_batch_idx   int32 [B], which entry of a cache without pages each sequence has, if not its own number.
    cache_leftpad     int32 [B], the row of a cache without pages on which each sequence begins; cache_seqlens counts from
                      row 0.
    k_scale, v_scale  of caches of torch.float8_e4m3fn, which hold keys / k_scale and values / v_scale while q has 16 bits:
                      floats, or float32 tensors of one number or of one for each head, [Hkv]; None is 1. The result is the
                      attention of the numbers times their scales. New rows are rounded to the nearest, at most 448 times the
                      scale, unless they are e4m3 already. Where values are the first columns of keys, k_scale rounds both.
    max_seqlen_k      a bound of the keys of a sequence, new ones included; what the cache can hold if it is not given.
                      A call whose sequences are much shorter is faster with it.

    What the tensors of lengths and pages hold is never read on the host: calls can be captured in CUDA graphs. On a GPU
    a length counts as clamped, a page outside the pool as zeros, and a new row without room is written nowhere;
    FFPA_CHECK=1 checks them and waits for the GPU. A call that is refused leaves the cache as it was, unless torch.compile
    runs it: there rows are written before what lies in memory is checked. There are no gradients.
    """
    if unknown:
        words.refuse(ffpa_with_kvcache, unknown)
    args = causal, align, scale, window, softcap, None, None, "f32", return_lse
    k_scale, v_scale = page_checks.scales_of(k_scale, v_scale, k_cache)
    call = again_paged.Call(
        q, k_cache, v_cache, out, sinks, cu_seqlens_q, cache_seqlens, block_table, cache_leftpad, cu_seqlens_k_new, k_scale,
        v_scale, k, v,
    )  # fmt: skip
    plain = cache_batch_idx is None and return_max_logits is False
    kind = again_paged.kind(call, (*args, max_seqlen_q, max_seqlen_k, "cache")) if plain else None
    if kind is not None and (results := again.run(kind, call)) is not None:
        return results
    page_checks.of_cache(
        q, k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new,
        max_seqlen_q,
    )  # fmt: skip
    options = options_of(*args)
    names = _NAMES
    if cache_batch_idx is not None:
        block_table, names = cache_batch_idx[:, None], _NAMES | {"block_table": "cache_batch_idx"}
        if k is not None and not torch.compiler.is_compiling() and memory_checks.has_memory(cache_batch_idx):
            if memory_checks.values_are_read(cache_batch_idx, env.run_flags()):
                page_values.distinct(cache_batch_idx)
    if isinstance(cache_seqlens, torch.Tensor):
        arguments.only_tensors(cache_seqlens=cache_seqlens)
    else:
        batch, _ = page_checks.sequences(q, cu_seqlens_q)
        n = int(cache_seqlens) if isinstance(cache_seqlens, Integral) else cache_seqlens
        cache_seqlens = torch.full((batch,), n, dtype=torch.int32, device=q.device)
    maxima = page_checks.maxima(q, k_cache, block_table, max_seqlen_q, max_seqlen_k)
    more = page_checks.new_rows(k, cu_seqlens_k_new)
    where = paged.Where(
        cu_seqlens_q, cache_seqlens, block_table, *maxima, cache_leftpad, cu_seqlens_k_new, more, k_scale, v_scale
    )
    wanted = return_lse, return_max_logits
    new = None if k is None else (k, v)
    results = paged.attend(q, k_cache, v_cache, where, sinks, out, options, *wanted, new, names=names)
    if kind is not None:
        again_paged.remember(kind, call, where, options)
    return results
