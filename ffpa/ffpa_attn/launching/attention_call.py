"""Fills in the numbers of a call (csrc/attention/params/attention_params.h) from checked tensors, and launches forward kernels.

What calls of a kind have in common is worked out for the first and kept: the others bring addresses alone.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..specs.spec import ForwardClearRows, ForwardMerge, KernelSpec
from . import structs
from .launch import CHANGE, READ, WRITE, Kernel, Launch

_LARGEST_INT = 2**31 - 1
_LARGEST_FLOAT, _SMALLEST_FLOAT = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_OF_PAGES = ("used", "table", "first", "added", "k_scale", "v_scale")
NO_PAGES = (None,) * len(_OF_PAGES)
_MASK_KINDS = {torch.bool: "kBool", torch.float16: "kHalf", torch.bfloat16: "kBFloat16", torch.float32: "kFloat"}


class Pages(NamedTuple):
    """Where keys lie that are in pages: k and v are pools, [pages, heads, rows of a page, columns] views. Nobody reads what the
    tensors hold on the host; all but scales are int32, and None where a call has nothing of the kind.
    """

    used: torch.Tensor  # [B], keys of each sequence
    table: torch.Tensor | None  # [B, entries], the pages of each sequence; None: sequence i has page i
    longest: int  # a bound of all sequences' keys, no more than pages hold
    first: torch.Tensor | None = None  # [B], the row on which a sequence of one page begins
    added: torch.Tensor | None = None  # [B + 1], offsets of rows that sequences have beside those that `used` counts
    more: int = 0  # rows that each sequence has beside those
    k_scale: torch.Tensor | None = None  # of 8-bit keys: float32, one number or one for each head; None: 1
    v_scale: torch.Tensor | None = None

    @property
    def entries(self) -> int:
        """Returns the most pages of a sequence."""
        return entries_of(self.table)


def entries_of(table: torch.Tensor | None) -> int:
    return 1 if table is None else table.shape[1]


def _float(x: float) -> float:
    return ctypes.c_float(min(max(x, -_LARGEST_FLOAT), _LARGEST_FLOAT)).value


def _four(dims: Sequence[int], missing: int) -> list[int]:
    """Returns what belongs to [batch, heads, rows, columns], where the first ones may be missing."""
    return [missing] * (4 - len(dims)) + list(dims)


def strides(view: ctypes.Structure, x: torch.Tensor, together: int = 1) -> None:
    """Sets the strides of a TensorView or a GradientView, counted in so many elements together."""
    view.batch_stride, view.head_stride, view.row_stride, _ = (step // together for step in _four(x.stride(), 0))


def _mask(view: ctypes.Structure, mask: torch.Tensor) -> None:
    """Describes a mask. In a dim of size one all share its element, whatever the stride is."""
    sizes, steps = _four(mask.shape, 1), _four(mask.stride(), 0)
    steps = [0 if size == 1 else step * mask.itemsize for size, step in zip(sizes, steps, strict=True)]
    view.batch_stride, view.head_stride, view.row_stride, view.key_stride = steps
    view.kind = structs.enumerator("MaskKind", _MASK_KINDS[mask.dtype])


def _pages(view: ctypes.Structure, pages: Pages, pool: torch.Tensor) -> None:
    view.pages, view.rows = (min(n, _LARGEST_INT) for n in (pool.shape[0], pool.shape[-2]))
    view.entries, view.more = min(pages.entries, _LARGEST_INT), min(pages.more, _LARGEST_INT)
    view.table_stride = 0 if pages.table is None else pages.table.stride(0)
    view.k_scale_stride, view.v_scale_stride = (
        int(scale is not None and scale.numel() > 1) for scale in (pages.k_scale, pages.v_scale)
    )


def lengths(q, k, offsets, pages: Pages | None = None) -> tuple[int, int]:
    """Returns the rows and the keys of the longest sequence."""
    n_q, n_k = q.shape[-2], k.shape[-2] if pages is None else pages.longest
    if offsets:
        n_q = min(n_q, offsets[2])
        n_k = n_k if pages else min(n_k, offsets[3])
    return n_q, n_k


def entries(q, offsets) -> int:
    return len(offsets[0]) - 1 if offsets else len(q)


def describe(
    params: ctypes.Structure, q, k, v, out, mask, offsets, rule, pages: Pages | None = None, **settings
) -> None:
    """Fills in AttentionParams: all but addresses. Tensors are [B, H, N, D] views, or packed [H, T, D] with the offsets
    of q and k and the longest lengths; of k and v in `pages`, these have no offsets. `settings` are fields that a plan
    decides.
    """
    heads, rows, d_qk = q.shape[-3:]
    heads_kv, keys = k.shape[-3], k.shape[-2] if pages is None else pages.longest
    for name, x in (("q", q), ("out", out)):
        strides(getattr(params, name), x)
    for name, x in (("k", k), ("v", v)):  # numbers of 8 bits count as pairs, elements of q's size
        strides(getattr(params, name), x, q.element_size() // x.element_size())
    if mask is not None:
        _mask(params.mask, mask)
    params.batch = entries(q, offsets)
    params.heads_q, params.group = heads, heads // heads_kv
    params.packed_q.total, params.packed_k.total = (min(n, _LARGEST_INT) for n in (rows, keys))
    params.n_q, params.n_k = (min(n, _LARGEST_INT) for n in lengths(q, k, offsets, pages))
    if pages:
        _pages(params.paged, pages, k)
    params.lse_head_stride, params.lse_batch_stride = rows, 0 if offsets else heads * rows
    params.d_qk, params.d_v = d_qk, out.shape[-1]
    see, scale, softcap = rule.visibility, rule.scale, rule.softcap
    params.left, params.right, params.top_left = min(see.left, _LARGEST_INT), min(see.right, _LARGEST_INT), see.top_left
    params.scale = _float(scale)
    params.score_factor = _float(scale / softcap if softcap > 0 else scale * math.log2(math.e))
    params.softcap = max(_float(softcap), _SMALLEST_FLOAT) if softcap > 0 else 0.0  # a tiny one is still a cap
    params.splits = params.tile_heads = params.tile_rows = 1
    for name, value in settings.items():
        setattr(params, name, value)


def forward_launch(
    specs: Sequence[KernelSpec], q, k, v, out, mask, offsets, rule, pages: Pages | None = None, clears=True, **settings
) -> Launch:
    """Returns the launch of a forward's kernels, which takes q, k, v, out, lse, mask, offsets of q and k, scratch, partial,
    sinks, largest, and the tensors of pages (_OF_PAGES). At last, rows of no sequence are cleared, unless `clears` is
    false: of calls for some sequences each, none may clear what another wrote.
    """
    params = structs.struct("AttentionParams")()
    describe(params, q, k, v, out, mask, offsets, rule, pages, **settings)
    if offsets and clears:
        specs = (*specs, ForwardClearRows())
    return Launch([Kernel(spec, params, _uses(spec, WRITE if clears else CHANGE)) for spec in specs], q.device)


def _uses(spec: KernelSpec, result: str) -> dict[str, str]:
    if isinstance(spec, ForwardClearRows):
        result = CHANGE
    memory = {"q.data": READ, "k.data": READ, "v.data": READ, "out.data": result, "lse": result, "mask.data": READ}
    memory |= {"packed_q.offsets": READ, "packed_k.offsets": READ, "scratch": WRITE}
    memory |= {"partial": READ if isinstance(spec, ForwardMerge) else result, "sinks": READ, "largest": CHANGE}
    return memory | {f"paged.{name}": READ for name in _OF_PAGES}


def fill_without_keys(lse: torch.Tensor, sinks: torch.Tensor | None, offsets) -> None:
    """Writes the LSE of a call without keys, that of its sinks alone; for rows of no sequence there are none."""
    lse.fill_(-float("inf"))
    if sinks is None:
        return
    if not offsets:
        lse.copy_(sinks[:, None].expand_as(lse))
        return
    (cu_q, _, longest), rows = offsets[:3], lse.shape[-1]
    begin = cu_q[:-1].clamp(0, rows)
    end = torch.minimum(cu_q[1:].clamp(0, rows), begin + longest).maximum(begin)
    begun = torch.zeros(rows + 1, dtype=torch.int32, device=lse.device)  # sequences that begin, less those that end
    begun.index_add_(0, begin, torch.ones_like(begin)).index_add_(0, end, -torch.ones_like(end))
    belongs = begun[:-1].cumsum(0) > 0
    lse.copy_(torch.where(belongs, sinks[:, None], lse))


def _floats(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.float32, device=device)


class Call(NamedTuple):
    """A call of a kind has the launch of a forward's kernels, if there are any, and the floats of their scratch, of their
    partial results, and of zeros at the end of these. `scratch_of` gives blocks, keys of a chunk and bytes of scratch for
    so many packed rows.
    """

    launch: Launch | None = None
    scratch: int | None = None
    partial: int | None = None
    zeros: int = 0
    scratch_of: Callable[[int], tuple[int, int, int]] | None = None

    def of_rows(self, rows: int) -> Call:
        """Returns what launches a call of so many packed rows, where all else is the same."""
        first = self.launch.kernels[0].params
        params = type(first).from_buffer_copy(first)
        params.packed_q.total, params.lse_head_stride = min(rows, _LARGEST_INT), rows
        params.resident_blocks, params.chunk_keys, nbytes = self.scratch_of(rows)
        return self._replace(launch=self.launch.with_params(params), scratch=nbytes // 4 or None)

    def __call__(
        self, q, k, v, out, lse, mask, offsets, sinks=None, largest=None, pages: Pages | None = None, ahead: int = 0
    ) -> None:
        """Launches the kernels; values may begin so many bytes `ahead` of v's first, and lse may be None."""
        if self.launch is None:
            return
        scratch = None if self.scratch is None else _floats(self.scratch, q.device)
        partial = None if self.partial is None else _floats(self.partial, q.device)
        cu_q, cu_k = offsets[:2] if offsets else (None, None)
        if self.zeros:
            partial[-self.zeros :].zero_()
        if lse is not None and not lse.numel():
            lse = None
        of_pages = NO_PAGES
        if pages:
            of_pages = pages.used, pages.table, pages.first, pages.added, pages.k_scale, pages.v_scale
        self.launch(q, k, v, out, lse, mask, cu_q, cu_k, scratch, partial, sinks, largest, *of_pages, ahead=ahead)


Memo = dict[str, Call]  # "call" -> what a plan has worked out for the calls of a kind
