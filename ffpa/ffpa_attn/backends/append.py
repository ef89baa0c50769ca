"""Appends new rows to keys and values that lie in pages, as one launch of csrc/attention/forward/append_rows.cuh wherever
our kernels run, and as PyTorch's index operations elsewhere. Nobody reads tables or lengths on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from .. import env
from ..checks import memory_checks
from ..launching import native, structs
from ..launching.launch import CHANGE, READ, Kernel, Launch
from ..specs.spec import ForwardAppendRows
from ..support.private_torch import PlainTorch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_ELEMENTS = 2**34  # of K: a grid has threads for so many


def append(k, v, k_pages, v_pages, cache_seqlens, table=None, added=None, memo: dict | None = None) -> None:
    """Writes new rows k, v [B, N, Hkv, D], or packed [T, Hkv, D] with offsets `added` [B + 1], into pools [pages, rows,
    Hkv, D] of any strides: row i of sequence b becomes its key cache_seqlens[b] + i, in the page that `table` [B, entries]
    names, or in page b where there is no table. Rows without a place are written nowhere. V that is the first columns of
    K, in one storage, is written as K. What calls of a kind need is the same, and kept in `memo`.
    """
    if not (k.numel() and k_pages.numel() and cache_seqlens.shape[0]):
        return
    if _is_one(k_pages, v_pages):
        v = v_pages = None
    memo = {} if memo is None else memo
    kind = "append K" if v is None else "append"
    if kind not in memo:
        memo[kind] = _launch(k, v, k_pages, v_pages, cache_seqlens, table)
    if memo[kind] is not None:
        memo[kind](k, v, k_pages, v_pages, cache_seqlens, table, added)
        return
    with PlainTorch(k.device):
        for new, pages in ((k, k_pages), (v, v_pages)):
            if new is not None:
                _by_pytorch(new, pages, cache_seqlens, table, added)


def _is_one(k_pages, v_pages) -> bool:
    """Says whether values are the first columns of keys, in one storage."""
    return k_pages.data_ptr() == v_pages.data_ptr() and k_pages.stride() == v_pages.stride()


_LARGEST_E4M3 = 448.0


def as_stored(k, v, k_pages, v_pages, k_scale, v_scale) -> tuple[torch.Tensor, ...]:
    """Returns rows and pools as append() takes them. Of 8-bit pools, rows are rounded to x / scale, and all are pairs of elements
    where these are aligned. V that is the first columns of K, in one storage, is rounded as K.
    """
    if k_pages.element_size() > 1 or not (k.numel() and k_pages.numel()):
        return k, v, k_pages, v_pages
    with PlainTorch(k.device):
        pools = [_with_even_strides(x) for x in (k_pages, v_pages)]
        k = _rounded(k, k_scale, k_pages.dtype)
        v = k[..., : v.shape[-1]] if _is_one(*pools) else _rounded(v, v_scale, v_pages.dtype)
        if all(x.shape[-1] % 16 == 0 and memory_checks.rows_problem(x) is None for x in pools):
            k, v = (_with_even_strides(memory_checks.made_readable(x)) for x in (k, v))
            return tuple(x.view(torch.int16) for x in (k, v, *pools))
        return tuple(x.view(torch.uint8) for x in (k, v, *pools))


def _with_even_strides(x: torch.Tensor) -> torch.Tensor:
    """Returns x with a stride of 0 where nobody steps: a view as pairs of elements asks for even strides, even there."""
    return x.as_strided(
        x.shape, [step if n > 1 else 0 for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True)] + [1]
    )


def _rounded(x, scale, dtype) -> torch.Tensor:
    if x.dtype == dtype:
        return x
    x = x.float() if scale is None else x / scale.reshape(-1, 1)  # a quotient is float32, as scales are
    return x.clamp_(-_LARGEST_E4M3, _LARGEST_E4M3).to(dtype)


def _launch(k, v, k_pages, v_pages, cache_seqlens, table) -> Callable | None:
    """Returns the kernel's launch, or None where PyTorch does it."""
    flags, spec = env.run_flags(), ForwardAppendRows()
    if k.element_size() != 2 or k.numel() > _MOST_ELEMENTS:
        return None
    if any(x is not None and (x.shape[-1] % 8 or memory_checks.rows_problem(x)) for x in (k_pages, v_pages)):
        return None
    if k.device.type == "cuda" and flags["FFPA_BACKEND"] != "reference":
        gpu = native.gpu_of(k.device)
        if native.why_not(spec, gpu) is not None or not native.make_ready(spec, gpu):
            return None
    elif k.device.type != "cpu" or not flags["FFPA_EMULATE"]:
        return None
    rows = _readable(k, v)
    shapes = (None if x is None else (tuple(x.shape), x.stride()) for x in (*rows, k_pages, v_pages))
    entries, stride = (1, 0) if table is None else (table.shape[1], table.stride(0))
    launch = _launch_of(spec, k.device, *shapes, len(cache_seqlens), entries, stride)
    as_they_lie = all(x is y for x, y in zip((k, v), rows, strict=True))
    return launch if as_they_lie else lambda k, v, *rest: launch(*_readable(k, v), *rest)


def _readable(*rows: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if x is None else memory_checks.made_readable(x) for x in rows]


@lru_cache(maxsize=256)
def _launch_of(
    spec, device: torch.device, k, v, k_pages, v_pages, batch: int, entries: int, table_stride: int
) -> Launch:
    params = structs.struct("AppendParams")()
    views = {"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages}
    for name, (_, steps) in ((name, x) for name, x in views.items() if x):
        view = getattr(params, name)
        view.row_stride, view.head_stride = steps[-3:-1]
        view.batch_stride = steps[0] if len(steps) == 4 else 0
    params.batch, (params.rows, params.heads, params.columns) = batch, k[0][-3:]
    params.value_columns = v[0][-1] if v else 0
    params.paged.pages, params.paged.rows = k_pages[0][:2]
    params.paged.entries, params.paged.table_stride = entries, table_stride
    memory = dict.fromkeys(("k.data", "v.data"), READ) | dict.fromkeys(("k_pages.data", "v_pages.data"), CHANGE)
    memory |= {f"paged.{name}": READ for name in ("used", "table", "added")}
    return Launch([Kernel(spec, params, memory)], device)


def _by_pytorch(new, pages, cache_seqlens, table, added) -> None:
    """Scatters rows. A row without a place goes where a row that has one goes, with that row's numbers; where none has
    one, all write what is there.
    """
    page, row, exists = (x.flatten() for x in _places(new, pages, cache_seqlens, table, added))
    bits = _BITS[new.element_size()]
    new, pages = new.flatten(0, -3).view(bits), pages.view(bits)
    some = exists.int().argmax()[None]  # the first row that has a place
    page, row = (torch.where(exists, x, x[some]) for x in (page, row))
    stays = torch.where(exists[some], new[some], pages[page[some], row[some]])
    pages[page, row] = torch.where(exists[:, None, None], new, stays)


def _places(new, pages, cache_seqlens, table, added) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns each row's page, its row there, and whether it has them; where it does not, these are 0."""
    batch, device = len(cache_seqlens), new.device
    number = torch.arange(new.shape[-3], device=device)
    if added is None:
        sequence = torch.arange(batch, device=device)[:, None]
        exists = torch.ones((), dtype=torch.bool, device=device)
    else:
        begin, end = added[:-1].clamp(min=0), added[1:].contiguous()
        sequence = torch.searchsorted(end, number.int(), right=True).clamp(max=batch - 1)
        exists = (begin[sequence] <= number) & (number < end[sequence])
        number = number - begin[sequence]
    used = cache_seqlens[sequence].long()
    position = used + number
    entry, row = position // pages.shape[1], position % pages.shape[1]
    exists = exists & (used >= 0) & (entry < (1 if table is None else table.shape[1]))
    page = sequence.expand_as(entry)
    if table is not None:
        page = table[sequence, torch.where(exists, entry, 0)].long()
    exists = exists & (page >= 0) & (page < len(pages))
    return torch.where(exists, page, 0), torch.where(exists, row, 0), exists
