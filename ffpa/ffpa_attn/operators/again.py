"""A kind of call that was seen before goes from Python to its kernel by one lookup: no check, no plan, no dispatcher.

A kind is all that checks and the choice depend on. Calls of a kind differ in addresses and values alone, so what the
first of them found out holds for all. Only plain calls have a kind: where the dispatcher has work (`have_work`), where a
tensor to write into or a mask is given, where rows come before heads, where offsets must be checked, where the largest scores
are wanted, or gradients beside sinks, or where autograd is left out or saves through hooks, calls go through the operators.
Gradients of a kind of call have kinds of their own. Those of keys in pages are in `again_paged.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import env
from ..specs.problem import ROW_ALIGNMENT, LevelType, MMAAccType
from ..triton_ops.launch import Unable
from . import ops
from .dispatch_keys import KnownAttention, gradients_of, have_work, is_recorded_as_it_is, rule_of, want_gradients
from .forms import Dense, Packed, seen

_MOST_KINDS, _MOST_GRADIENTS = 8192, 16  # kinds of calls, and of gradients of each
# What runs the calls of a kind: it takes their tensors, and gives None for a call that must go the long way.
_known: dict[tuple, Callable] = {}
WINDOW = 3  # the place of `window` among a function's arguments
PLAIN = {bool, int, float, str, tuple, type(None), LevelType, MMAAccType}  # values of these types never change

_DENSE = Dense()


def kind(q, k, v, args: tuple, *offsets, sinks=None) -> tuple | None:
    """Returns the kind of a call, or None where there is none. `args` are the function's arguments but tensors and
    offsets; `offsets` are cu_seqlens and the longest lengths of packed sequences.
    """
    if not (type(q) is type(k) is type(v) is torch.Tensor) or have_work(q, k, v, *offsets[:2], sinks):
        return None
    wanted = want_gradients(q, k, v, sinks)
    if wanted and (sinks is not None or not is_recorded_as_it_is()):
        return None
    flags = env.run_flags()
    if sinks is not None:
        args = (*args, seen(sinks))
    if offsets:
        cu_q, cu_k, max_q, max_k = offsets
        if cu_q.device.type == "cpu" or cu_k.device.type == "cpu" or flags["FFPA_CHECK"]:
            return None
        args = (*args, seen(cu_q), seen(cu_k), max_q, max_k)
    of_k, of_v = k.data_ptr(), v.data_ptr()
    try:
        return (
            (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype),
            (q.device, k.device, v.device, (q.data_ptr() | of_k | of_v) % ROW_ALIGNMENT, of_k == of_v),
            flags,
            wanted,
            args,
            (*map(type, args), *map(type, args[WINDOW])),  # 1 equals True and 1.0, which are not the same to a check
        )
    except TypeError:  # `window` is no tuple
        return None


def run(kind: tuple, *tensors):
    """Returns the results of a call, if its kind was seen before, else None: it must go the long way, maybe once more."""
    try:
        run_it = _known.get(kind)
    except TypeError:  # an argument has no hash
        return None
    if run_it is not None:
        try:
            return run_it(*tensors)
        except Unable:  # another kernel is to be chosen
            pass
    return None


def knows(kind: tuple) -> bool:
    try:
        return kind in _known
    except TypeError:  # an argument has no hash
        return False


def forget_all() -> None:
    _known.clear()


def remember(kind: tuple, q, k, v, options: dict[str, Any], *offsets, sinks=None) -> None:
    """Keeps what runs a kind of call, whose first call went well."""
    _, _, flags, wanted, *_ = kind
    with_lse = options.get("return_lse", True)
    if wanted:  # the backward needs the LSE
        options = {**options, "return_lse": True}
    form = Packed(*offsets, sinks) if offsets else Dense(sinks=sinks)
    plan = ops.plan_of(form, q, k, v, options, flags)
    if plan is None:  # another thread made room, or flags changed
        return
    run = _packed(plan, with_lse or wanted, *offsets[2:]) if offsets else _dense(plan, with_lse or wanted, q)
    keep(kind, _Recorded(run, options, with_lse, *offsets[2:]) if wanted else run)


def keep(kind: tuple, run: Callable) -> None:
    """Keeps what runs a kind, unless one of its arguments, whose types come last in it, may change."""
    if not PLAIN.issuperset(kind[-1]):
        return
    if len(_known) >= _MOST_KINDS:
        _known.clear()
    _known[kind] = run


def _dense(plan: ops.Plan, with_lse: bool, first_q: torch.Tensor) -> Callable:
    """Does what `ops.run_forward` does, in the least of time."""
    forward, of_plan = plan.choice.plan.forward, (plan.rule, plan.workspace_cap, plan.memo)
    gives_fresh, is_empty, is_like_q = plan.gives_fresh, 0 in plan.out_shape, first_q.shape == plan.out_shape
    none = None

    def run(q, k, v, *sinks):
        nonlocal none
        try:
            fresh = ops.fresh_result(plan, q, k, v) if gives_fresh else None
            if fresh is not None:
                return fresh
            out = ops.empty_like(q, q.dtype) if is_like_q else q.new_empty(plan.out_shape)
            if none is None and not with_lse:
                none = no_lse(q)
            lse = q.new_empty(plan.lse_shape, dtype=torch.float32) if with_lse else none
            if not is_empty:
                forward(q, k, v, out, lse, None, None, *of_plan, *map(ops.as_read, sinks))
        except torch.OutOfMemoryError as error:
            raise ops.no_memory(error, plan, q.dtype) from None
        return (out, lse) if with_lse else out

    return run


def no_lse(q) -> torch.Tensor:
    """Returns what stands for the LSE where nobody wants it, in calls of any mode."""
    with torch.inference_mode(False):
        return q.new_empty(0, dtype=torch.float32)


def _packed(plan: ops.Plan, with_lse: bool, max_q: int, max_k: int) -> Callable:
    def run(q, k, v, cu_q, cu_k, *sinks):
        out, lse = ops.run_forward(plan, Packed(cu_q, cu_k, max_q, max_k, *sinks), q, k, v)
        return (out, lse) if with_lse else out

    return run


class _Recorded:
    """It runs the calls of a kind that want gradients, and computes these, by one lookup among kinds of gradients."""

    def __init__(self, forward: Callable, options: dict[str, Any], with_lse: bool, *longest: int):
        self.forward, self._with_lse, self._longest = forward, with_lse, longest
        self._rule, self._plans = rule_of(options), {}

    def __call__(self, *tensors):
        out, lse = KnownAttention.apply(self, *tensors)
        return (out, lse) if self._with_lse else out

    def backward(self, saved, grad_out, grad_lse) -> tuple:
        q, k, v, out, lse, *offsets = saved
        if grad_out is None or have_work(grad_out, grad_lse):
            return gradients_of(grad_out, grad_lse, saved, self._longest, **self._rule)[:3]
        flags = env.run_flags()
        kind = (
            (q.shape, k.shape, v.shape, out.shape, lse.shape),
            (q.stride(), k.stride(), v.stride(), out.stride(), lse.stride()),
            (q.dtype, k.dtype, v.dtype, out.dtype, lse.dtype, q.device, k.device, v.device, out.device, lse.device),
            (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) % ROW_ALIGNMENT,
            seen(grad_out),
            seen(grad_lse),
            flags,
        )
        plan = self._plans.get(kind)
        form = Packed(*offsets, *self._longest) if offsets else _DENSE
        if plan is not None:
            try:
                return ops.run_backward(plan, form, grad_out, grad_lse, q, k, v, out, lse)
            except Unable:
                self._plans.clear()
        grads = gradients_of(grad_out, grad_lse, saved, self._longest, **self._rule)[:3]
        tensors = grad_out, grad_lse, q, k, v, out, lse, None  # δ is not known
        plan = ops.plan_of_backward(form, tensors, self._rule, flags)
        if plan is not None and not (offsets and flags["FFPA_CHECK"]):  # such offsets are checked at each call
            if len(self._plans) >= _MOST_GRADIENTS:
                self._plans.clear()
            self._plans[kind] = plan
        return grads
