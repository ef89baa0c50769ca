"""This module checks what a caller passes with keys in pages; messages as in `arguments.py`. Names are those of the operators;
functions that have others put these in their place (`renamed`). What tensors hold is checked in `page_values.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from numbers import Integral

import torch

from ..specs.problem import ROW_ALIGNMENT
from . import arguments, memory_checks, page_values

PAGE_ROWS = 16  # the rows of a page are a multiple of it, where a sequence may have several pages
EIGHT_BITS = torch.float8_e4m3fn  # what keys and values may be stored as, whatever q is
OF_TABLES = "[B, entries], the pages of each sequence"
_ALLOCATE = "allocate the cache otherwise: a copy of it would take the rows, and be lost"


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """Returns the error with a caller's own names of arguments. What is an English word, too, is a name where it is quoted,
    given or has a method called.
    """
    words = (x if "_" in x or len(x) == 1 else rf"{x}(?=`|=|\.\w|\[)" for x in sorted(names, key=len, reverse=True))
    return type(error)(re.sub(rf"\b({'|'.join(words)})\b", lambda found: names[found[1]], str(error)))


def no_gradients(**named) -> None:
    if not torch.is_grad_enabled():
        return
    for name, x in named.items():
        if x is not None and x.requires_grad:
            raise NotImplementedError(
                f"`{name}` requires grad, and attention to keys in pages has no gradients: call under torch.no_grad(), or pass "
                f"{name}.detach(); ffpa_varlen has gradients of packed keys"
            )


def varlen(cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, max_seqlen_q, max_seqlen_k) -> None:
    """Checks what ffpa_varlen takes in place of offsets of keys."""
    if block_table is None:
        raise ValueError(
            "`seqused_k` is given without `block_table`; packed sequences end where cu_seqlens_k says: leave it away, or pass "
            "block_table, and k and v as pools of pages"
        )
    _lengths_alone(cu_seqlens_k, block_table, seqused_k)
    arguments.only_tensors(cu_seqlens_q=cu_seqlens_q, block_table=block_table, seqused_k=seqused_k)
    arguments.max_seqlen("max_seqlen_q", max_seqlen_q)
    arguments.max_seqlen("max_seqlen_k", max_seqlen_k)


def _lengths_alone(cu_seqlens_k, block_table, seqused_k) -> None:
    if seqused_k is None:
        raise ValueError(
            "`block_table` is given without `seqused_k`; pass the number of keys of each sequence, int32 [B]: with "
            "cu_seqlens_k it is cu_seqlens_k.diff()"
        )
    if cu_seqlens_k is not None:
        raise ValueError(
            f"`cu_seqlens_k` and `{'seqused_k' if block_table is None else 'block_table'}` are both given; seqused_k "
            "says how long sequences in pages are: pass cu_seqlens_k=None"
        )


def paged(q, k, v, cu_seqlens_q, seqused_k, block_table, leftpad_k, cu_seqlens_k_new, more_k) -> None:
    """Checks the tensors of a forward of keys in pages."""
    queries(q, cu_seqlens_q)
    _pools(q, k, v)
    _pages(k, q, *sequences(q, cu_seqlens_q), seqused_k, block_table, leftpad_k, cu_seqlens_k_new, "seqused_k")
    arguments.max_seqlen("more_k", more_k)


def queries(q, cu_seqlens_q) -> None:
    packed = cu_seqlens_q is not None
    of_q = "[T, H, D], the sequences one after the other" if packed else "[B, N, H, D], or [T, H, D] with cu_seqlens_q"
    arguments.has_rank("q", q, 3 if packed else 4, of_q)
    if packed:
        _offsets("cu_seqlens_q", cu_seqlens_q, q, "q")


def sequences(q, cu_seqlens_q) -> tuple[int, str]:
    """Returns how many there are, and which argument says so."""
    return (q.shape[0], "q") if cu_seqlens_q is None else (cu_seqlens_q.shape[0] - 1, "cu_seqlens_q")


def new_rows(k, cu_seqlens_k_new) -> int:
    """Returns how many each sequence has, where all have as many."""
    return k.shape[1] if k is not None and cu_seqlens_k_new is None and k.dim() == 4 else 0


def changed(q, k_pages, v_pages) -> None:
    """Checks pages that are written to and then read beside q: no two elements of them share memory, and no copy of them would
    do.
    """
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        if x.device != q.device:
            raise ValueError(f"`{name}` is on {x.device} but `q` is on {q.device}; move q, k and v: .to({name}.device)")
        if x.dtype not in (q.dtype, EIGHT_BITS):
            raise TypeError(
                f"`{name}` has dtype {x.dtype} but `q` has {q.dtype}; cast q, k and v, or allocate the cache in their type: a "
                "copy of it would take the rows, and be lost"
            )
        if torch.compiler.is_compiling():
            continue
        problem = memory_checks.rows_problem(x, ROW_ALIGNMENT if x.dtype != EIGHT_BITS else 1)
        if not problem and x.numel() and not memory_checks.has_own_places(x):
            problem = "is expanded" if memory_checks.is_expanded(x) else "has rows that overlap or interleave"
            problem += f" (strides {x.stride()}), and new rows need places of their own"
        if problem:
            raise ValueError(f"`{name}` {problem}; {_ALLOCATE}")


def beside(out, **pools) -> None:
    """Checks that a result lies outside of pages: no rows of theirs are free, whatever strides say."""
    for name, x in pools.items():
        here = out.device == x.device and memory_checks.has_memory(out) and memory_checks.has_memory(x)
        if here and out.numel() and x.numel() and memory_checks.in_range(out, x):
            raise ValueError(f"`out` overlaps the memory of `{name}`, or lies among its rows; pass a buffer of its own")


def appended(k, v, k_pages, v_pages, cache_seqlens, block_table, cu_seqlens_k_new) -> None:
    """Checks the tensors of rows that are to be written into pages."""
    packed = cu_seqlens_k_new is not None
    of_k = "[T, H, D], the rows of each sequence one after the other"
    of_k = of_k if packed else "[B, N, H, D], or [T, H, D] with cu_seqlens_k_new"
    for name, x in (("k", k), ("v", v)):
        arguments.has_rank(name, x, 3 if packed else 4, of_k)
        pool = k_pages if name == "k" else v_pages
        arguments.has_rank(f"{name}_pages", pool, 4, "[pages, rows, H, D]")
        to_be_rounded = pool.dtype == EIGHT_BITS and x.dtype in arguments.DTYPES
        if x.dtype not in arguments.DTYPES and not x.dtype == pool.dtype == EIGHT_BITS:
            allowed, is_scaled = arguments.names_of(arguments.DTYPES), pool.dtype == EIGHT_BITS
            rows = (
                f", {EIGHT_BITS}; pass rows in the dtype of q, which are divided by {name}_scale" if is_scaled else ""
            )
            raise TypeError(f"`{name}` has dtype {x.dtype}; allowed: {allowed}{rows}")
        if x.dtype != pool.dtype and not to_be_rounded:
            raise TypeError(
                f"`{name}` has dtype {x.dtype} but `{name}_pages` has {pool.dtype}; they must agree: {name}.to({pool.dtype})"
            )
        arguments.is_where(name, x, "k_pages", k_pages)
        arguments.is_where(f"{name}_pages", pool, "k_pages", k_pages)
        if x.shape[-2:] != pool.shape[-2:]:
            raise ValueError(
                f"`{name}` has {tuple(x.shape[-2:])} heads and columns but `{name}_pages` has {tuple(pool.shape[-2:])}; a row "
                "must be as those of the pages are"
            )
    if v_pages.dtype != k_pages.dtype or v.dtype != k.dtype:
        raise TypeError(
            f"`v_pages` has dtype {v_pages.dtype} and `v` {v.dtype}, but `k_pages` has {k_pages.dtype} and `k` {k.dtype}; keys and "
            "values must be alike"
        )
    if v.shape[:-2] != k.shape[:-2]:
        raise ValueError(
            f"`v` has rows {tuple(v.shape[:-2])} but `k` has {tuple(k.shape[:-2])}; each key needs one value"
        )
    if v_pages.shape[:2] != k_pages.shape[:2]:
        raise ValueError(
            f"`v_pages` has {tuple(v_pages.shape[:2])} pages and rows but `k_pages` has {tuple(k_pages.shape[:2])}; each key "
            "needs one value"
        )
    if packed:
        _offsets("cu_seqlens_k_new", cu_seqlens_k_new, k_pages, "k_pages")
    batch, whose = (cu_seqlens_k_new.shape[0] - 1, "cu_seqlens_k_new") if packed else (k.shape[0], "k")
    _pages(k_pages, k_pages, batch, whose, cache_seqlens, block_table, None, None, "cache_seqlens")


def _pools(q, k, v) -> None:
    try:
        for name, x in (("k", k), ("v", v)):
            arguments.has_rank(name, x, 4, "[pages, rows, H, D]")
        if k.dtype in arguments.FP8 or v.dtype in arguments.FP8:
            arguments.one_dtype_and_device(q, q, q, arguments.DTYPES)
            _eight_bits(k, v)
            for name, x in (("k", k), ("v", v)):
                arguments.is_where(name, x, "q", q)
        else:
            arguments.one_dtype_and_device(q, k, v, arguments.DTYPES)
        arguments.agree("v", v.shape[0], "k", k.shape[0], "{} pages", "each key needs one value")
        arguments.rows_and_heads(q, k, v, 1, -2, "each key needs one value")
    except (TypeError, ValueError) as error:
        raise renamed(error, {"k": "k_pages", "v": "v_pages"}) from None


def _eight_bits(k, v) -> None:
    for name, x in (("k", k), ("v", v)):
        if x.dtype not in arguments.DTYPES and x.dtype != EIGHT_BITS:
            raise TypeError(
                f"`{name}` has dtype {x.dtype}; allowed: the dtype of q, or {EIGHT_BITS} for keys and values"
            )
    if k.dtype != v.dtype:
        raise TypeError(f"`v` has dtype {v.dtype} but `k` has {k.dtype}; keys and values must be stored alike")


def scales(k_pages, k_scale, v_scale) -> None:
    """Checks what 8-bit keys and values are to be multiplied with."""
    heads = k_pages.shape[2]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if k_pages.dtype != EIGHT_BITS:
            raise ValueError(
                f"`{name}` is given but `k_pages` has dtype {k_pages.dtype}; scales belong to {EIGHT_BITS}: leave it away"
            )
        arguments.has_dtype(name, scale, torch.float32, f": {name}.float()")
        arguments.is_where(name, scale, "k_pages", k_pages)
        if tuple(scale.shape) not in ((), (1,), (heads,)):
            raise ValueError(
                f"`{name}` has shape {tuple(scale.shape)}; allowed: () or (1,) for all heads, or [Hkv] = ({heads},)"
            )


def scales_of(k_scale, v_scale, pool, full=torch.full) -> tuple:
    """Returns scales as operators take them: tensors, which `full` makes of numbers where the pool is, one where two are
    equal. A pool that is no tensor is refused elsewhere.
    """
    if not isinstance(pool, torch.Tensor):
        return k_scale, v_scale

    def of(name: str, scale):
        if scale is None or isinstance(scale, torch.Tensor):
            return scale
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(
                f"`{name}` is {arguments.described(scale)}; pass a float, or a float32 tensor of () or [Hkv]"
            )
        return full((1,), float(scale), dtype=torch.float32, device=pool.device)

    of_k, of_v = of("k_scale", k_scale), of("v_scale", v_scale)
    are_numbers = not isinstance(k_scale, torch.Tensor) and not isinstance(v_scale, torch.Tensor)
    return of_k, of_k if are_numbers and k_scale == v_scale else of_v


def no_scales(k_scale, v_scale) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            raise ValueError(f"`{name}` is given without `block_table`; keys in pages have scales: leave it away")


def _pages(pool, x, batch: int, whose: str, used, table, first, added, of_lengths: str) -> None:
    """Checks lengths and pages of so many sequences, those of the argument `whose`; x is on their device."""
    for name, lengths in ((of_lengths, used), ("leftpad_k", first)):
        if lengths is not None:
            _int32(name, lengths, 1, "[B], a number for each sequence", x)
            _contiguous(name, lengths)
            arguments.agree(name, lengths.shape[0], whose, batch, "{} sequences", "they must agree")
    if added is not None:
        _offsets("cu_seqlens_k_new", added, x, "q")
        arguments.agree(
            "cu_seqlens_k_new", added.shape[0] - 1, whose, batch, "{} sequences", "both must hold B + 1 offsets"
        )
    if table is None:
        if pool.shape[0] < batch:
            raise ValueError(
                f"`k_pages` has {pool.shape[0]} sequences but `{whose}` has {batch}; it must have one for each, or pass "
                "block_table, which says where they are"
            )
        return
    _int32("block_table", table, 2, OF_TABLES, x)
    arguments.agree("block_table", table.shape[0], whose, batch, "{} sequences", "a row of it has the pages of each")
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise ValueError(
            f"`block_table` has stride {table.stride(1)} in its last dim; it must be 1; make a copy with block_table.contiguous()"
        )
    rows = pool.shape[1]
    if table.shape[1] > 1 and (rows == 0 or rows % PAGE_ROWS):
        raise ValueError(
            f"`k_pages` has pages of {rows} rows; allowed: multiples of {PAGE_ROWS} where a sequence may have several; lay the "
            f"pool out in pages of {max(-(-rows // PAGE_ROWS), 1) * PAGE_ROWS}"
        )
    if first is not None and table.shape[1] != 1:
        raise ValueError(
            f"`leftpad_k` is given but `block_table` has {table.shape[1]} pages for each sequence; left padding goes with one: "
            "leave it away, and begin each sequence on the first row of its first page"
        )


def _int32(name: str, x, rank: int, means: str, of) -> None:
    arguments.has_dtype(name, x, torch.int32, f": {name}.to(torch.int32)")
    arguments.has_rank(name, x, rank, means)
    arguments.is_where(name, x, "q", of)


def _contiguous(name: str, x) -> None:
    if not x.is_contiguous():
        raise ValueError(f"`{name}` is not contiguous; make a copy with {name}.contiguous()")


def _offsets(name: str, cu, x, whose: str) -> None:
    arguments.has_dtype(name, cu, torch.int32, f": {name}.to(torch.int32)")
    arguments.has_rank(name, cu, 1, "[B + 1], offsets of the sequences")
    if cu.shape[0] < 1:
        raise ValueError(f"`{name}` is empty; it must hold B + 1 offsets")
    arguments.is_where(name, cu, whose, x)
    _contiguous(name, cu)


def places(k, v, k_pages, v_pages) -> None:
    """Checks that no element of pages is one of the rows that are written to them."""
    for name, x, other, y in (
        ("k", k, "k_pages", k_pages), ("v", v, "v_pages", v_pages), ("k", k, "v_pages", v_pages), ("v", v, "k_pages", k_pages),
    ):  # fmt: skip
        if x.numel() and y.numel() and memory_checks.surely_overlap(x, y):
            raise ValueError(
                f"`{name}` overlaps the memory of `{other}`, which it is to be written to; pass {name}.clone()"
            )


def one_storage(in_pages: bool, in_rows: bool, k_pages, v_pages) -> int:
    """Checks pages that share memory: their values may be the first columns of their keys, and then those of rows are; or both
    are pages of one pool. Returns how many pages the values are ahead of the keys there, else 0.
    """
    if in_pages and not in_rows:
        raise ValueError(
            "`v_pages` is a view of `k_pages`, but `v` is none of `k`: both would be written to one place; pass "
            "v=k[..., : v_pages.shape[-1]]"
        )
    if in_pages or not k_pages.numel() or not v_pages.numel() or not memory_checks.may_meet(k_pages, v_pages):
        return 0
    if len(k_pages) > 1 and k_pages.stride() == v_pages.stride():
        ahead, rest = divmod((v_pages.data_ptr() - k_pages.data_ptr()) // k_pages.element_size(), k_pages.stride(0))
        if ahead and not rest:
            return ahead
    raise ValueError(
        "`v_pages` overlaps the memory of `k_pages`, or interleaves with it in no known way; pass pools of their own, or the "
        "first columns of the keys as values: v_pages=k_pages[..., :D_v]"
    )


def one_use(written: Iterable[int], read: Iterable[int], ahead: int) -> None:
    """Checks pages that a call writes to and reads, where values are so many pages ahead of keys in one pool."""
    written, named = set(written), {*written, *read}
    for n in sorted(named):
        if ahead and n + ahead in named and not written.isdisjoint((n, n + ahead)):
            raise ValueError(
                f"`v_pages` overlaps the memory of `k_pages`: page {n} of values is page {n + ahead} of keys, and the call has "
                "both; give sequences pages that are not so far apart, or pass pools of their own"
            )


# ---- ffpa_with_kvcache ----


def one_of_both(name: str, x, other: str, y, why: str) -> None:
    if x is not None and y is not None:
        raise ValueError(f"`{name}` and `{other}` are both given; {why}")


def of_cache(
    q, k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new,
    max_seqlen_q,
) -> None:  # fmt: skip
    """Checks which arguments go together."""
    arguments.only_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    arguments.tensors_or_none(
        k=k, v=v, block_table=block_table, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
    )  # fmt: skip
    queries(q, cu_seqlens_q)
    arguments.has_rank("k_cache", k_cache, 4, "[B_cache, rows, H, D], or [pages, rows, H, D] with block_table")
    if (k is None) != (v is None):
        given, missing = ("k", "v") if v is None else ("v", "k")
        raise ValueError(f"`{given}` is given without `{missing}`; pass the new rows of both, or of none")
    if k is None and cu_seqlens_k_new is not None:
        raise ValueError("`cu_seqlens_k_new` is given without `k`; it has the offsets of new rows: pass k and v, too")
    one_of_both(
        "cache_batch_idx", cache_batch_idx, "block_table", block_table, "a table says where sequences are: pass one"
    )
    one_of_both(
        "cache_leftpad", cache_leftpad, "block_table", block_table,
        "sequences in pages begin on the first row of their first page: leave cache_leftpad away",
    )  # fmt: skip
    if block_table is not None:
        _int32("block_table", block_table, 2, OF_TABLES, q)
    if not isinstance(cache_seqlens, torch.Tensor):
        if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, (Integral, torch.SymInt)):
            raise TypeError(
                f"`cache_seqlens` is {arguments.described(cache_seqlens)}; pass an int32 tensor [B] with the keys of each "
                "sequence before new ones are written, or an int where all have as many"
            )
        if not torch.compiler.is_compiling():
            room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
            page_values.length("cache_seqlens", cache_seqlens, new_rows(k, cu_seqlens_k_new), room, 0)
    _longest_of_q(cu_seqlens_q, max_seqlen_q)
    if cache_batch_idx is not None:
        _int32("cache_batch_idx", cache_batch_idx, 1, "[B], the entry of the cache that each sequence has", q)
        batch, whose = sequences(q, cu_seqlens_q)
        arguments.agree("cache_batch_idx", len(cache_batch_idx), whose, batch, "{} sequences", "it must be [B]")


def _longest_of_q(cu_seqlens_q, max_seqlen_q) -> None:
    if cu_seqlens_q is not None and max_seqlen_q is None:
        raise ValueError("`max_seqlen_q` is None but `cu_seqlens_q` is given; pass the longest length of q as an int")
    if cu_seqlens_q is None and max_seqlen_q is not None:
        raise ValueError(
            "`max_seqlen_q` is given without `cu_seqlens_q`; leave it away, or pass q packed, with its offsets"
        )


def maxima(q, k, block_table, max_seqlen_q, max_seqlen_k) -> tuple[int, int]:
    """Returns the longest lengths; one that is not given is what q, or the cache, has room for."""
    room = k.shape[1] * (1 if block_table is None else block_table.shape[1])
    return q.shape[1] if max_seqlen_q is None else max_seqlen_q, room if max_seqlen_k is None else max_seqlen_k


# ---- explain ----


def explained(
    q, k, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, max_seqlen_q, max_seqlen_k, mask, layout, direction
) -> None:
    """Checks which arguments go together where keys are in pages, or in a cache without pages."""
    _lengths_alone(cu_seqlens_k, block_table, seqused_k)
    arguments.only_tensors(seqused_k=seqused_k)
    arguments.tensors_or_none(cu_seqlens_q=cu_seqlens_q, block_table=block_table)
    arguments.no_mask_and_layout("seqused_k", mask, layout)
    if direction == "backward":
        raise NotImplementedError(
            "`direction` is 'backward', and attention to keys in pages has no gradients; those of packed keys exist"
        )
    queries(q, cu_seqlens_q)
    _longest_of_q(cu_seqlens_q, max_seqlen_q)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is not None:
            arguments.max_seqlen(name, longest)
    arguments.has_rank("k", k, 4, "[pages, rows, H, D]")
    if block_table is not None:
        _int32("block_table", block_table, 2, OF_TABLES, q)
