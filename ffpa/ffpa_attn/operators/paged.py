"""This module calls the operators of keys in pages, for functions that have names of their own for the operators' arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..checks import arguments, memory_checks, page_checks
from . import appending, dispatch_keys, forms, ops

_MOST_KINDS = 4096
_writable: set[tuple] = set()  # kinds of caches that were found fit to be written to


class Where(NamedTuple):
    """Where the rows of sequences are, and how many; in another order than operators have it."""

    cu_seqlens_q: torch.Tensor | None
    seqused_k: torch.Tensor
    block_table: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    leftpad_k: torch.Tensor | None = None
    cu_seqlens_k_new: torch.Tensor | None = None
    more_k: int = 0
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def arguments(self) -> tuple:
        """Returns the operators' arguments, in order."""
        cu_q, used, table, max_q, max_k, first, added, more, *_ = self
        return cu_q, used, table, first, added, more, max_q, max_k

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        """Returns those that are given, by name: 8-bit pools have them."""
        both = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: scale for name, scale in both.items() if scale is not None}


def attend(
    q, k_pages, v_pages, where: Where, sinks, out, options: Mapping, return_lse: bool, return_max_logits: bool,
    new: tuple[torch.Tensor, torch.Tensor] | None = None, *, names: Mapping[str, str],
) -> torch.Tensor | tuple[torch.Tensor, ...]:  # fmt: skip
    """Attends to keys in pages, once the rows of `new` keys and values are written there; a call that is refused writes
    nothing. `names` are the caller's for arguments of the operators that have others.
    """
    try:
        return _attend(q, k_pages, v_pages, where, sinks, out, options, return_lse, return_max_logits, new)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise page_checks.renamed(error, names) from None


def _attend(q, k_pages, v_pages, where, sinks, out, options, return_lse, return_max_logits, new):
    arguments.only_tensors(q=q, k_pages=k_pages, v_pages=v_pages, seqused_k=where.seqused_k)
    arguments.tensors_or_none(sinks=sinks, out=out, **where.scales)
    name = forms.operator_name("paged_forward" if out is None else "paged_forward_out", return_max_logits)
    rest = (*where.arguments(), sinks)
    if where.scales:
        rest += where.k_scale, where.v_scale
    tensors = [x for x in (k_pages, v_pages, out, *rest) if isinstance(x, torch.Tensor)]
    page_checks.no_gradients(q=q, k_pages=k_pages, v_pages=v_pages, sinks=sinks, out=out, **where.scales)
    if out is not None and not torch.compiler.is_compiling():
        page_checks.beside(out, k_pages=k_pages, v_pages=v_pages)
    if new is not None:
        q, *new = _cast(q, *new)
        _append(q, k_pages, v_pages, out, where, sinks, options, return_max_logits, new)
    run = dispatch_keys.at_once(name, q, *tensors)
    results = run(q, k_pages, v_pages, *(() if out is None else (out,)), *rest, **options)
    if out is not None:
        results = (out, *results) if return_max_logits else (out, results)
    out, lse, *largest = results
    return forms.results(out, lse, largest, return_lse)


def _cast(q, k, v) -> list[torch.Tensor]:
    """Returns them as autocast would have them; values that are columns of the keys stay so."""
    if torch.compiler.is_compiling() or k.dtype != torch.float32 or not forms.values_in_keys(k, v):
        return dispatch_keys.as_autocast_would(q, k, v, cast=torch.Tensor.to)
    q, k = dispatch_keys.as_autocast_would(q, k, cast=torch.Tensor.to)
    return [q, k, k[..., : v.shape[-1]]]


def _append(q, k_pages, v_pages, out, where, sinks, options, largest, new) -> None:
    page_checks.no_gradients(k=new[0], v=new[1])
    args = *new, k_pages, v_pages, where.seqused_k, where.block_table, where.cu_seqlens_k_new
    if where.scales:
        args += where.k_scale, where.v_scale
    tensors = [x for x in args if x is not None]
    if torch.compiler.is_compiling():
        page_checks.changed(q, k_pages, v_pages)
    else:
        _be_sure(q, k_pages, v_pages, out, where, sinks, options, largest, args)
    dispatch_keys.at_once("append_to_cache", *tensors)(*args)


def _be_sure(q, k_pages, v_pages, out, where, sinks, options, largest, args) -> None:
    """Raises what appending and the forward would."""
    form = forms.Paged(k_pages, *where.arguments(), sinks, largest, options, (where.k_scale, where.v_scale))
    if not all(memory_checks.has_memory(x) for x in (q, *args) if x is not None):
        page_checks.changed(q, k_pages, v_pages)
        form.check(q, k_pages, v_pages)
        appending.check(*args)
        return
    kind = q.dtype, q.device, forms.seen(k_pages), forms.seen(v_pages)
    if kind not in _writable:
        page_checks.changed(q, k_pages, v_pages)
        if len(_writable) >= _MOST_KINDS:
            _writable.clear()
        _writable.add(kind)
    ops.be_sure(form, q, k_pages, v_pages, out, options)
    appending.be_sure(*args, read=form.read)
