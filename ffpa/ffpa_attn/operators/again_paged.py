"""A call of keys in pages whose kind was seen before goes to its kernels by one lookup, as in `again.py`.

Only addresses tell whether what a call writes lies apart from what it reads, so that is looked at in every call. Where that
does not settle it, the call goes the long way, which knows more, or says what overlaps. Calls have no kind where what tables
and lengths hold is checked, nor under autograd, autocast and PyTorch's modes; calls with `cache_batch_idx`, `o`, largest logits
or one number for all lengths go the long way, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .. import env
from ..checks import memory_checks
from ..launching.attention_call import Pages
from . import again, appending, ops
from .dispatch_keys import have_work, want_gradients
from .forms import Paged, seen


class Call(NamedTuple):
    """The tensors of a call, or what a caller passes in their places."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    out: torch.Tensor | None
    sinks: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    seqused_k: torch.Tensor
    block_table: torch.Tensor | None
    leftpad_k: torch.Tensor | None = None
    cu_seqlens_k_new: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k: torch.Tensor | None = None  # new rows, which are appended before they are read
    v: torch.Tensor | None = None


def kind(call: Call, args: tuple) -> tuple | None:
    """Returns the kind of a call, or None where there is none. `args` are all arguments but tensors, `ffpa`'s first."""
    q, k_pages, v_pages, *_, k, v = call
    if not (type(q) is type(k_pages) is type(v_pages) is torch.Tensor) or have_work(*call) or want_gradients(*call):
        return None
    flags = env.run_flags()
    if memory_checks.values_are_read(q, flags):
        return None
    try:
        types = (*map(type, args), *map(type, args[again.WINDOW]))  # as in again.py
        if not again.PLAIN.issuperset(types):
            return None
        return (
            tuple(map(seen, call)),
            k_pages.data_ptr() == v_pages.data_ptr(),
            k is not None and v is not None and k.data_ptr() == v.data_ptr(),
            call.k_scale is call.v_scale,
            flags,
            args,
            types,
        )
    except TypeError:  # `window` is no tuple
        return None


def remember(kind: tuple, call: Call, where, options: Mapping[str, Any]) -> None:
    """Keeps what runs a kind of call, whose first call went well; `where` is that of `paged.attend`."""
    *_, flags, _, _ = kind
    (plan, form), lie_apart = plan_of(call, where, options, flags), _lie_apart(call)
    if plan is not None and lie_apart(call):
        again.keep(kind, _runner(plan, form, call, lie_apart, options.get("return_lse", True)))


def plan_of(call: Call, where, options: Mapping[str, Any], flags) -> tuple[ops.Plan | None, Paged]:
    """Returns the plan of a call, if it is kept, and the call's form."""
    form = Paged(call.k_pages, *where.arguments(), call.sinks, scales=(where.k_scale, where.v_scale))
    return ops.plan_of(form, *call[:3], options, flags, call.out), form


def launches_of(plan: ops.Plan):
    """Returns the first call's launches, of plans that keep them so, or None."""
    launched = plan.memo.get("call")
    return None if launched is None or launched.launch is None else launched


def _runner(plan: ops.Plan, form: Paged, first: Call, lie_apart: Callable, with_lse: bool) -> Callable:
    """Returns a function that does what `paged.attend` does, as fast as possible; it gives None where that has to be asked."""
    forward, of_plan = plan.choice.plan.forward, (plan.rule, plan.workspace_cap, plan.memo)
    is_empty, is_like_q, no_lse = 0 in plan.out_shape, first.q.shape == plan.out_shape, None
    longest, more, max_q = form.pages.longest, form.pages.more, form.max_q
    memo = None if first.k is None else appending.be_sure(*_appended(first))
    launched = launches_of(plan)

    def run(call: Call):
        nonlocal no_lse
        if not lie_apart(call):
            return None
        if memo is not None:
            appending.write(memo, *_appended(call))
        q, k, v, out, sinks, cu_q, used, table, left, added, k_scale, v_scale, _, _ = call
        try:
            if out is None:
                out = ops.empty_like(q, q.dtype) if is_like_q else q.new_empty(plan.out_shape)
            if no_lse is None and not with_lse:
                no_lse = again.no_lse(q)
            lse = q.new_empty(plan.lse_shape, dtype=torch.float32) if with_lse else no_lse
            if not is_empty:
                scales = (x if x is None else x.contiguous() for x in (k_scale, v_scale))
                pages = Pages(used, table, longest, left, added, more, *scales)
                offsets = None if cu_q is None else (cu_q, None, max_q, longest)
                sinks = None if sinks is None else ops.as_read(sinks)
                if launched is not None:  # it takes addresses alone, which are those of the views below
                    launched(q, k, v, out, lse, None, offsets, sinks, None, pages)
                else:
                    rows = (x.transpose(-3, -2) for x in (q, k, v, out))
                    forward(*rows, lse, None, offsets, *of_plan, sinks=sinks, pages=pages)
        except torch.OutOfMemoryError as error:
            raise ops.no_memory(error, plan, q.dtype) from None
        return (out, lse) if with_lse else out

    return run


def _appended(call: Call) -> tuple:
    """Returns the arguments of the operator that appends rows."""
    where = call.seqused_k, call.block_table, call.cu_seqlens_k_new
    return call.k, call.v, call.k_pages, call.v_pages, *where, call.k_scale, call.v_scale


def _lie_apart(first: Call) -> Callable[[Call], bool]:
    """Returns a function that says whether a call certainly writes nothing that it reads. Pages of keys and of values may lie
    in one pool as far from each other as those of the first call, which were checked.
    """
    pairs = [] if first.out is None else [("out", x) for x in ("q", "k_pages", "v_pages", "sinks")]
    ahead = None
    if first.k is not None:
        pairs += [(pool, x) for pool in ("k_pages", "v_pages") for x in ("k", "v")]
        if memory_checks.in_range(first.k_pages, first.v_pages):
            ahead = first.v_pages.data_ptr() - first.k_pages.data_ptr()
        else:
            pairs.append(("k_pages", "v_pages"))
    places = [[Call._fields.index(name) for name in pair] for pair in pairs if getattr(first, pair[1]) is not None]
    pairs = [(i, memory_checks.extent(first[i]), j, memory_checks.extent(first[j])) for i, j in places]

    def lie_apart(call: Call) -> bool:
        for i, extent, j, other_extent in pairs:
            begin, other = call[i].data_ptr(), call[j].data_ptr()
            if begin < other + other_extent and other < begin + extent:
                return False
        return ahead is None or call.v_pages.data_ptr() - call.k_pages.data_ptr() == ahead

    return lie_apart
