"""A server's step calls attention once for each layer, with the same offsets, lengths and table, and each layer has its keys and
values in one cache. Such a call goes to its kernels by a shorter way than that of `again_paged.py`.

What depends on the step alone is settled once, in `Step`. A kind of call is told by all that tells one in `again_paged.py`:
the cache and how it is viewed stand for keys and values. A call of a known kind makes no views. Others, and those whose
result may lie in what is read, go through the functions that all calls have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .. import env
from ..checks import memory_checks
from ..launching.attention_call import Pages
from . import again, again_paged, ops
from .dispatch_keys import have_work, want_gradients
from .forms import seen
from .paged import Where


class Step:
    """The calls of a step share `tensors`, offsets, lengths and a table, and the `longest` lengths of rows and keys. `kind` is their
    part of a kind of call, or None where there is none.
    """

    def __init__(self, cu_seqlens_q, seqused_k, block_table, max_seqlen_q: int, max_seqlen_k: int):
        self.tensors, self.longest = (cu_seqlens_q, seqused_k, block_table), (max_seqlen_q, max_seqlen_k)
        self.kind = None
        plain = all(type(x) is torch.Tensor for x in self.tensors) and all(type(n) is int for n in self.longest)
        if plain and not have_work(*self.tensors):
            # Nobody else has these views, so nobody can give them another shape or other memory.
            self.tensors = tuple(x.detach() for x in self.tensors)
            self.kind = (*map(seen, self.tensors), *self.longest)


class Call(NamedTuple):
    """A layer's tensors."""

    q: torch.Tensor
    cache: torch.Tensor
    out: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def kind(step: Step, call: Call, rule: tuple, types: tuple) -> tuple | None:
    """Returns the kind of a call, or None where there is none. `rule` is all that it depends on but tensors, how the cache is
    viewed included, and `types` has the types of these values.
    """
    q, cache, *_, k_scale, v_scale = call
    plain = step.kind is not None and type(q) is type(cache) is torch.Tensor
    if not plain or have_work(*call) or want_gradients(*call):
        return None
    flags = env.run_flags()
    if memory_checks.values_are_read(q, flags):
        return None
    return (*map(seen, call), k_scale is v_scale, step.kind, flags, rule, types)


def remember(kind: tuple, step: Step, call: Call, views: tuple, options: Mapping[str, Any]) -> bool:
    """Keeps what runs an unknown kind of call, if there is a plan for it, and says whether it does: of a first call that went well,
    or of one with another number of rows. Keys and values are these views of the cache, of which keys begin where the
    cache does.
    """
    if again.knows(kind):
        return False
    q, cache, out, sinks, *scales = call
    *_, flags, _, _ = kind
    where = Where(*step.tensors, *step.longest, k_scale=scales[0], v_scale=scales[1])
    plan, form = again_paged.plan_of(again_paged.Call(q, *views, out, sinks, *step.tensors), where, options, flags)
    if plan is None or not plan.memo:  # nothing has run
        return False
    launched, lies_apart = again_paged.launches_of(plan), _lies_apart(call)
    if launched is None or not all(x is None or x.is_contiguous() for x in scales):
        again.keep(kind, _no_result)
    elif lies_apart(call):
        ahead = views[1].data_ptr() - cache.data_ptr()
        again.keep(kind, _runner(plan, launched, form.pages.longest, form.max_q, lies_apart, ahead))
    return again.knows(kind)


def _no_result(step: Step, call: Call) -> None:
    """Runs the kinds of calls that always go the long way."""


def _runner(plan, launched, longest: int, max_q: int, lies_apart: Callable, ahead: int) -> Callable:
    """Returns a function that runs a call of a step, or gives None where it has to go the long way."""

    def run(step: Step, call: Call):
        if not lies_apart(call):
            return None
        q, cache, out, sinks, k_scale, v_scale = call
        cu_q, used, table = step.tensors
        try:
            if out is None:
                out = q.new_empty(plan.out_shape)
            if sinks is not None:
                sinks = ops.as_read(sinks)
            pages = Pages(used, table, longest, None, None, 0, k_scale, v_scale)
            launched(q, cache, cache, out, None, None, (cu_q, None, max_q, longest), sinks, None, pages, ahead)
        except torch.OutOfMemoryError as error:
            raise ops.no_memory(error, plan, q.dtype) from None
        return out

    return run


def _lies_apart(first: Call) -> Callable[[Call], bool]:
    """Returns a function that says whether the result certainly lies apart from q, the cache and sinks."""
    of_out, of_q, of_cache, of_sinks = (
        0 if x is None else memory_checks.extent(x) for x in (first.out, *first[:2], first.sinks)
    )

    def lies_apart(call: Call) -> bool:
        q, cache, out, sinks, *_ = call
        if out is None:
            return True
        begin = out.data_ptr()
        end, at_q, at_cache = begin + of_out, q.data_ptr(), cache.data_ptr()
        if (begin < at_q + of_q and at_q < end) or (begin < at_cache + of_cache and at_cache < end):
            return False
        return sinks is None or not (begin < sinks.data_ptr() + of_sinks and sinks.data_ptr() < end)

    return lies_apart
