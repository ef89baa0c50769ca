"""This module holds the forms of a call, dense tensors, packed sequences and keys in pages, makes them of the operators'
arguments, and describes a call's problem.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from ..backends.reference_rows import needed_keys
from ..checks import arguments, memory_checks, page_checks, page_values
from ..launching import native
from ..launching.attention_call import Pages, entries_of
from ..specs.problem import E4M3, ROW_ALIGNMENT, Problem, Visibility


def seen(x) -> tuple | None:
    """Returns all that a check or a choice may depend on, in one hashable value."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ROW_ALIGNMENT)


class Dense:
    """Dense tensors, [B, H, N, D] or [B, N, H, D], with a mask, and with sinks [Hq], or without; `largest` asks for the
    largest score of each head.
    """

    offsets = pages = None

    def __init__(self, layout: str = "BHND", mask=None, sinks: torch.Tensor | None = None, largest: bool = False):
        self.layout, self.mask, self.sinks, self.largest = layout, mask, sinks, largest

    def key(self) -> tuple:
        return (self.layout, seen(self.mask), seen(self.sinks), self.largest)

    def check(self, q, k, v) -> None:
        arguments.dense(q, k, v, self.mask, self.layout)
        arguments.sinks(self.sinks, q, q.shape[1 if self.layout == "BHND" else 2])

    def check_values(self, q, k, flags) -> None:
        pass

    def sizes(self, q, k) -> tuple[int, int, int, int, int]:
        """Returns (batch, heads_q, heads_kv, n_q, n_k)."""
        n, h = (2, 1) if self.layout == "BHND" else (1, 2)
        return q.shape[0], q.shape[h], k.shape[h], q.shape[n], k.shape[n]

    def packed(self, q, k) -> None:
        return None

    def named(self, q, k, v) -> dict[str, torch.Tensor]:
        """Returns the tensors by the names that operators have for them."""
        return {"q": q, "k": k, "v": v}

    def lse_shape(self, q) -> tuple:
        batch, heads, _, rows, _ = self.sizes(q, q)
        return (batch, heads, rows)

    def largest_shape(self, q) -> tuple:
        return self.lse_shape(q)[:2]

    def heads_first(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [B, H, N, D] as a view."""
        return x if self.layout == "BHND" else x.transpose(1, 2)


class Packed:
    """Packed sequences, [T, H, D], with their offsets [B + 1], and with sinks and `largest` as dense ones."""

    mask = pages = None
    layout = "BHND"  # packed sequences have no layout to choose

    def __init__(self, cu_seqlens_q, cu_seqlens_k, max_seqlen_q: int, max_seqlen_k: int, sinks=None, largest=False):
        self.offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        self.sinks, self.largest = sinks, largest

    def key(self) -> tuple:
        cu_q, cu_k, max_q, max_k = self.offsets
        return (seen(cu_q), seen(cu_k), max_q, max_k, seen(self.sinks), self.largest)

    def check(self, q, k, v) -> None:
        cu_q, cu_k, max_q, max_k = self.offsets
        arguments.packed(q, k, v, cu_q, cu_k)
        arguments.max_seqlen("max_seqlen_q", max_q)
        arguments.max_seqlen("max_seqlen_k", max_k)
        arguments.sinks(self.sinks, q, q.shape[1])

    def check_values(self, q, k, flags) -> None:
        """Checks offsets at every call where that costs no wait for a GPU; on a GPU only under FFPA_CHECK=1."""
        cu_q, cu_k, max_q, max_k = self.offsets
        if cu_q.device.type == "cpu" or flags["FFPA_CHECK"]:
            memory_checks.offsets_values(cu_q, "cu_seqlens_q", q.shape[0], max_q, "max_seqlen_q")
            memory_checks.offsets_values(cu_k, "cu_seqlens_k", k.shape[0], max_k, "max_seqlen_k")

    def sizes(self, q, k) -> tuple[int, int, int, int, int]:
        cu_q, _, max_q, max_k = self.offsets
        return cu_q.shape[0] - 1, q.shape[1], k.shape[1], min(max_q, q.shape[0]), min(max_k, k.shape[0])

    def packed(self, q, k) -> tuple[int, int]:
        """Returns the rows and the keys of all sequences together."""
        return q.shape[0], k.shape[0]

    named = Dense.named

    def lse_shape(self, q) -> tuple:
        return (q.shape[1], q.shape[0])

    def largest_shape(self, q) -> tuple:
        return (self.offsets[0].shape[0] - 1, q.shape[1])

    def heads_first(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [H, T, D] as a view."""
        return x.transpose(0, 1)


class Paged:
    """Queries [T, H, D] with their offsets, or [B, N, H, D] without, whose keys are in pages [pages, rows, H, D]; `rule` are
    the operator's options, and `scales` what 8-bit keys and values are to be multiplied with. Sinks and `largest` are as those of
    dense tensors.
    """

    mask = None
    layout = "BNHD"

    def __init__(
        self, k_pages, cu_q, used, table, first, added, more, max_q, max_k, sinks=None, largest=False, rule=None,
        scales=(None, None),
    ):  # fmt: skip
        self._pool, self.cu_q, self.max_q, self.max_k = k_pages, cu_q, max_q, max_k
        self.of_keys = used, table, first, added, more
        self.sinks, self.largest, self._rule, self.scales = sinks, largest, rule or {}, scales
        self.read: list[int] = []  # pages that hold keys which rows see, once values are checked

    @cached_property
    def pages(self) -> Pages:
        used, table, first, added, more = self.of_keys
        k_scale, v_scale = (None if scale is None else scale.contiguous() for scale in self.scales)
        pages, rows = self._pool.shape[:2]
        held = rows * entries_of(table) if pages else 0
        return Pages(used, table, min(self.max_k, held), first, added, more, k_scale, v_scale)

    @property
    def offsets(self) -> tuple | None:
        return None if self.cu_q is None else (self.cu_q, None, self.max_q, self.pages.longest)

    def key(self) -> tuple:
        *tensors, more = self.of_keys
        return (
            "pages",
            seen(self.cu_q),
            *map(seen, tensors),
            more,
            self.max_q,
            self.max_k,
            seen(self.sinks),
            self.largest,
            *map(seen, self.scales),
            self.have_one_scale,
        )

    @property
    def have_one_scale(self) -> bool:
        """Says whether keys and values surely have the same scale, which nobody reads."""
        return self.scales[0] is self.scales[1]

    def check(self, q, k, v) -> None:
        page_checks.paged(q, k, v, self.cu_q, *self.of_keys)
        page_checks.scales(k, *self.scales)
        arguments.max_seqlen("max_seqlen_q", self.max_q)
        arguments.max_seqlen("max_seqlen_k", self.max_k)
        arguments.sinks(self.sinks, q, q.shape[-2])

    def check_values(self, q, k, flags) -> None:
        """Checks what tensors hold at every call where that costs no wait for a GPU; on a GPU only under FFPA_CHECK=1."""
        if memory_checks.values_are_read(k, flags):
            page_values.scale_values(*self.scales)
            rows = [q.shape[1]] * len(q)
            if self.cu_q is not None:
                memory_checks.offsets_values(self.cu_q, "cu_seqlens_q", q.shape[0], self.max_q, "max_seqlen_q")
                rows = self.cu_q.diff().tolist()
            lengths = page_values.lengths(self.pages, k, self.max_k)
            see = visibility(self._rule)
            needed = [needed_keys(see, *both) for both in zip(rows, lengths, strict=True)]
            self.read = page_values.table(
                self.pages, k, [(least, min(end, n)) for (least, end), n in zip(needed, lengths, strict=True)]
            )

    def sizes(self, q, k) -> tuple[int, int, int, int, int]:
        used, rows = self.of_keys[0], q.shape[-3]
        return (
            used.shape[0],
            q.shape[-2],
            k.shape[2],
            min(self.max_q, rows) if q.dim() == 3 else rows,
            self.pages.longest,
        )

    def packed(self, q, k) -> tuple[int, int] | None:
        """Returns the rows and the keys of all sequences together, at most."""
        return None if self.cu_q is None else (q.shape[0], self.of_keys[0].shape[0] * self.pages.longest)

    def named(self, q, k, v) -> dict[str, torch.Tensor]:
        return {"q": q, "k_pages": k, "v_pages": v}

    def lse_shape(self, q) -> tuple:
        return (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])

    def largest_shape(self, q) -> tuple:
        return (self.of_keys[0].shape[0], q.shape[-2])

    def heads_first(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [H, T, D], or [B, H, N, D] and [pages, H, rows, D], as a view."""
        return x.transpose(-3, -2)


def for_any_rows(key: tuple, form, q, out) -> tuple | None:
    """Returns what a call has in common with those that differ in their number of packed rows alone, of the key of its plan, which begins
    with what is seen of q, k, v and out; or None where a check may ask for the number. One row has any stride.
    """
    rows = q.shape[0]
    if not isinstance(form, Paged) or form.cu_q is None or rows < 2 or type(form.max_q) is not int:
        return None
    if out is not None and out.shape[:1] != (rows,):
        return None
    (shape, *of_q), of_k, of_v, of_out, *others = key
    of_out = of_out and (of_out[0][1:], *of_out[1:])
    return "any rows", min(rows, form.max_q), shape[1:], *of_q, of_k, of_v, of_out, *others


MAX_LOGITS = "_max_logits"  # the end of an operator's name: it returns the largest scores, too


def operator_name(name: str, return_max_logits: bool) -> str:
    """Returns the name of the operator that gives what a caller asks a forward for."""
    return name + MAX_LOGITS if arguments.flag("return_max_logits", return_max_logits) else name


def results(out, lse, largest: list[torch.Tensor], return_lse: bool) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Returns what a caller asked for; `largest` is empty where that is not the largest scores."""
    if largest:
        return (out, lse, *largest) if return_lse else (out, *largest)
    return (out, lse) if return_lse else out


def operators(forward: Callable, backward: Callable) -> dict[str, Callable]:
    """Returns functions that take the operators' arguments, made of two that do for all forms what they do:
    forward(form, q, k, v, out, options), and backward(form, tensors, fp32_grads, mask_grad, options), whose tensors are
    those from `grad_out` to `lse` and `delta`, and whose `mask_grad` is None for packed sequences, as these have no mask.
    Keys in pages have no backward.
    """

    def of_pages(k, given: tuple, largest: bool, options) -> Paged:
        *of_keys, sinks, k_scale, v_scale = (*given, None, None, None)[:11]  # the last three may be left away
        return Paged(k, *of_keys, sinks, largest, options, (k_scale, v_scale))

    def forwards(more: str, largest: bool) -> dict[str, Callable]:
        def dense(q, k, v, mask=None, sinks=None, *, layout="BHND", **options):
            return forward(Dense(layout, mask, sinks, largest), q, k, v, None, options)

        def dense_out(q, k, v, out, mask=None, sinks=None, *, layout="BHND", **options):
            return forward(Dense(layout, mask, sinks, largest), q, k, v, out, options)

        def packed(q, k, v, cu_q, cu_k, max_q, max_k, sinks=None, **options):
            return forward(Packed(cu_q, cu_k, max_q, max_k, sinks, largest), q, k, v, None, options)

        def packed_out(q, k, v, out, cu_q, cu_k, max_q, max_k, sinks=None, **options):
            return forward(Packed(cu_q, cu_k, max_q, max_k, sinks, largest), q, k, v, out, options)

        def paged(q, k, v, *pages_and_sinks, **options):
            return forward(of_pages(k, pages_and_sinks, largest, options), q, k, v, None, options)

        def paged_out(q, k, v, out, *pages_and_sinks, **options):
            return forward(of_pages(k, pages_and_sinks, largest, options), q, k, v, out, options)

        return {
            f"forward{more}": dense,
            f"forward_out{more}": dense_out,
            f"varlen_forward{more}": packed,
            f"varlen_forward_out{more}": packed_out,
            f"paged_forward{more}": paged,
            f"paged_forward_out{more}": paged_out,
        }

    def dense_backward(
        grad_out, grad_lse, q, k, v, out, lse, mask=None, delta=None, *, layout="BHND", mask_grad=False, fp32_grads=False, **options
    ):  # fmt: skip
        tensors = grad_out, grad_lse, q, k, v, out, lse, delta
        return backward(Dense(layout, mask), tensors, fp32_grads, mask_grad, options)

    def packed_backward(
        grad_out, grad_lse, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, delta=None, *, fp32_grads=False, **options
    ):
        tensors = grad_out, grad_lse, q, k, v, out, lse, delta
        return backward(Packed(cu_q, cu_k, max_q, max_k), tensors, fp32_grads, None, options)

    return {
        **forwards("", False),
        **forwards(MAX_LOGITS, True),
        "backward": dense_backward,
        "varlen_backward": packed_backward,
    }


def visibility(options) -> Visibility:
    get = options.get
    window = get("window_left", -1), get("window_right", -1)
    return Visibility.of(get("causal", False), get("align", "bottom_right"), *window)


def values_in_keys(k, v) -> bool:
    """Says whether V is the first columns of K, in one storage; tensors without memory may have one, too."""
    if memory_checks.is_wrapped(k) or memory_checks.is_wrapped(v):
        return False
    of_k, of_v = ((x.untyped_storage()._cdata, x.storage_offset()) for x in (k, v))
    if of_k != of_v or v.shape[-1] > k.shape[-1] or k.ndim != v.ndim:
        return False
    # Nobody steps along a dim of one, whose stride may be anything.
    return k.stride() == v.stride() or all(
        n == 1 or step == other for n, step, other in zip(k.shape, k.stride(), v.stride(), strict=True)
    )


def _cache(q, k, v) -> str | None:
    """Returns what keys and values are stored as, if not as q: kernels read 8-bit rows 16 bytes at a time."""
    if k.dtype == q.dtype:
        return None
    fits = all(x.shape[-1] % ROW_ALIGNMENT == 0 and memory_checks.rows_problem(x) is None for x in (k, v))
    return E4M3 if fits else f"{E4M3} not aligned"


_DTYPES = arguments.DTYPES | arguments.FP8


def describe(
    form, direction, q, k, v, options, out=None, device: str | None = None, arch: str | None = None
) -> Problem:
    """Returns the problem of a call with checked arguments; device and arch are those asked for, or the tensors'."""
    get, scale = options.get, options.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    is_forward, mask = direction == "forward", arguments.mask_kind(form.mask)
    return Problem(
        direction, device or q.device.type, arch or (native.gpu_of(q.device) if q.is_cuda else None), _DTYPES[q.dtype], *form.sizes(q, k),
        q.shape[-1], v.shape[-1], form.packed(q, k), visibility(options), scale, float(get("softcap", 0.0)), mask,
        get("return_lse", True), get("level"), get("acc", "f32"), get("num_stages"),
        values_in_keys=values_in_keys(k, v) and (form.pages is None or form.have_one_scale), copied=out is not None or form.layout != "BHND" or not q.is_contiguous(),
        sinks=is_forward and form.sinks is not None, largest=is_forward and form.largest and not arguments.is_added(form.mask),
        pages=form.pages and (k.shape[1], form.pages.entries), cache=_cache(q, k, v),
    )  # fmt: skip
