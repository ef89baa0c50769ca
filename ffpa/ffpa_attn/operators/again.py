"""A kind of call that was seen before goes from Python to its kernel by one lookup: no check, no plan, no dispatcher.

A kind is all that checks and the choice depend on. Calls of a kind differ in addresses and values alone, so what the
first of them found out holds for all. Only plain calls have a kind: where the dispatcher has work (`have_work`), where a
tensor to write into or a mask is given, where rows come before heads, or where offsets must be checked, calls go through
the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import env
from ..specs.spec import ROW_ALIGNMENT, LevelType, MMAAccType
from ..triton_ops.launch import Unable
from . import ops
from .dispatch_keys import have_work, want_gradients
from .forms import Dense, Packed, seen

_MOST_KINDS = 8192
_known: dict[tuple, Callable] = {}  # what runs the calls of a kind; it takes their tensors
_WINDOW = 3  # the place of `window` among a function's arguments
_PLAIN = {bool, int, float, str, tuple, type(None), LevelType, MMAAccType}  # values of these types never change

CHOOSE_AGAIN = Unable  # what a call raises that must go the long way once more


def kind(q, k, v, args: tuple, *offsets) -> tuple | None:
    """Returns the kind of a call, or None where there is none. `args` are the function's arguments but tensors and
    offsets; `offsets` are cu_seqlens and the longest lengths of packed sequences.
    """
    if torch.compiler.is_compiling() or not (type(q) is type(k) is type(v) is torch.Tensor):
        return None
    if want_gradients(q, k, v) or have_work(q, k, v, *offsets[:2]):
        return None
    flags = env.run_flags()
    if offsets:
        cu_q, cu_k, max_q, max_k = offsets
        if cu_q.device.type == "cpu" or cu_k.device.type == "cpu" or flags["FFPA_CHECK"]:
            return None
        args = (*args, seen(cu_q), seen(cu_k), max_q, max_k)
    try:
        return (
            (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype),
            (q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ROW_ALIGNMENT),
            flags,
            args,
            (*map(type, args), *map(type, args[_WINDOW])),  # 1 equals True and 1.0, which are not the same to a check
        )
    except TypeError:  # `window` is no tuple
        return None


def find(kind: tuple) -> Callable | None:
    """Returns what runs the calls of a kind, if there was one before."""
    try:
        return _known.get(kind)
    except TypeError:  # an argument has no hash
        return None


def forget(kind: tuple) -> None:
    _known.pop(kind, None)


def remember(kind: tuple, q, k, v, options: dict[str, Any], *offsets) -> None:
    """Keeps what runs a kind of call, whose first call went well."""
    _, _, flags, _, types = kind
    plan = ops.plan_of(Packed(*offsets) if offsets else Dense("BHND", None), q, k, v, options, flags)
    if plan is None or not _PLAIN.issuperset(types):  # another thread made room, or flags changed; or it may change
        return
    if len(_known) >= _MOST_KINDS:
        _known.clear()
    with_lse = options.get("return_lse", True)
    run = _packed(plan, with_lse, *offsets[2:]) if offsets else _dense(plan, with_lse, q)
    _known[kind] = run


def _dense(plan: ops.Plan, with_lse: bool, first_q: torch.Tensor) -> Callable:
    make = _results(plan, with_lse, first_q)

    def run(q, k, v):
        try:
            fresh = ops.fresh_result(plan, q, k, v) if plan.gives_fresh else None
            if fresh is not None:
                return fresh
            out, lse = make(q)
            if out.numel():
                ops.run(plan, "forward", q, k, v, out, lse, None, None)
        except torch.OutOfMemoryError as error:
            raise ops.no_memory(error, plan, q.dtype) from None
        return (out, lse) if with_lse else out

    return run


def _packed(plan: ops.Plan, with_lse: bool, max_q: int, max_k: int) -> Callable:
    def run(q, k, v, cu_q, cu_k):
        try:
            out, lse = q.new_empty(plan.out_shape), q.new_empty(plan.lse_shape, dtype=torch.float32)
            if out.numel():
                tensors = (x.transpose(0, 1) for x in (q, k, v, out))
                ops.run(plan, "forward", *tensors, lse, None, (cu_q, cu_k, max_q, max_k))
        except torch.OutOfMemoryError as error:
            raise ops.no_memory(error, plan, q.dtype) from None
        return (out, lse) if with_lse else out

    return run


def _results(plan: ops.Plan, with_lse: bool, first_q: torch.Tensor) -> Callable:
    """Returns what makes out and LSE, in the least of time: empty_like takes 1 µs less than new_empty."""
    if with_lse:
        return lambda q: (q.new_empty(plan.out_shape), q.new_empty(plan.lse_shape, dtype=torch.float32))
    no_lse = None
    is_like_q = first_q.shape == plan.out_shape

    def make(q):
        nonlocal no_lse
        if no_lse is None:
            with torch.inference_mode(False):  # calls in any mode may write to it
                no_lse = q.new_empty(0, dtype=torch.float32)
        return ops.empty_like(q, q.dtype) if is_like_q else q.new_empty(plan.out_shape), no_lse

    return make
