"""This module has the body of the operator that writes new rows into a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterable

from .. import env
from ..backends import append
from ..checks import memory_checks, page_checks, page_values
from ..launching.attention_call import Pages
from .forms import seen, values_in_keys

_MOST_KINDS = 4096
_memos: dict[tuple, dict] = {}  # what each kind of call that was checked keeps


def check(k, v, k_pages, v_pages, cache_seqlens, block_table, cu_seqlens_k_new, k_scale=None, v_scale=None) -> None:
    """Checks what needs no memory."""
    page_checks.appended(k, v, k_pages, v_pages, cache_seqlens, block_table, cu_seqlens_k_new)
    page_checks.scales(k_pages, k_scale, v_scale)


def be_sure(*args, read: Iterable[int] = ()) -> dict:
    """Raises what appending would, and returns the memo of this kind of call; `args` are the operator's, and `read` are pages
    that will then be read, where these are known.
    """
    k, v, k_pages, v_pages, cache_seqlens, block_table, cu_seqlens_k_new, *scales = args
    scales += [None] * (2 - len(scales))
    flags = env.run_flags()
    in_pages, in_rows = values_in_keys(k_pages, v_pages), values_in_keys(k, v)
    key = (*map(seen, args), in_pages, in_rows, flags)
    memo = _memos.get(key)
    if memo is None:
        check(*args)
        page_checks.changed(k, k_pages, v_pages)
        if len(_memos) >= _MOST_KINDS:
            _memos.clear()
        memo = _memos[key] = {}
    page_checks.places(k, v, k_pages, v_pages)
    ahead = page_checks.one_storage(in_pages, in_rows, k_pages, v_pages)
    if ahead and block_table is None:
        page_checks.one_use(range(len(cache_seqlens)), (), ahead)
    if memory_checks.values_are_read(k, flags):
        page_values.scale_values(*scales)
        more, added = (k.shape[1], None) if cu_seqlens_k_new is None else (0, cu_seqlens_k_new)
        if added is not None:
            memory_checks.offsets_values(added, "cu_seqlens_k_new", k.shape[0], k.shape[0], "k")
        room = k_pages.shape[1] * (1 if block_table is None else block_table.shape[1])
        pages = Pages(cache_seqlens, block_table, room, None, added, more)
        ends = page_values.lengths(pages, k_pages, room, "cache_seqlens")
        written = page_values.table(pages, k_pages, list(zip(cache_seqlens.tolist(), ends, strict=True)))
        page_checks.one_use(written, read, ahead)
    return memo


def append_to_cache(
    k, v, k_pages, v_pages, cache_seqlens, block_table, cu_seqlens_k_new, k_scale=None, v_scale=None
) -> None:
    args = k, v, k_pages, v_pages, cache_seqlens, block_table, cu_seqlens_k_new, k_scale, v_scale
    write(be_sure(*args), *args)


def write(
    memo: dict, k, v, k_pages, v_pages, cache_seqlens, block_table, cu_seqlens_k_new, k_scale=None, v_scale=None
) -> None:
    """Appends rows that were checked; `memo` is that of this kind of call."""
    if block_table is None or block_table.shape[1]:
        where = cache_seqlens, block_table, cu_seqlens_k_new
        append.append(*append.as_stored(k, v, k_pages, v_pages, k_scale, v_scale), *where, memo)
