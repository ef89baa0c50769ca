"""This module has the operators torch.ops.ffpa_attn.*: fakes, and the way from a call to its backend (`schemas.py` has what
they take, `dispatch_keys.py` autograd and autocast, `appending.py` the one that writes into a cache).

Checks and the choice of a backend happen inside an operator at run time, once for each new kind of call; traced code
holds nothing but the operator. The first choice imports the backends, a third of the package.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import env
from ..backends import reference
from ..checks import arguments, fp8_checks, memory_checks
from ..launching import native
from ..specs.problem import HEAD_DIM_STEP, Problem
from ..support import progress
from ..support.private_torch import PlainTorch
from ..triton_ops import launch as triton_launch
from . import appending, dispatch_keys, out_of_memory
from .forms import Dense, describe, for_any_rows, operators, seen
from .schemas import SCHEMAS

if TYPE_CHECKING:
    from ..backends.choice import Choice

_lib = torch.library.Library("ffpa_attn", "DEF")
for _schema in SCHEMAS:
    # The compiler must hand over q, k and v with the strides the user gave them: rows are read where they lie.
    _lib.define(_schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))


# ---- from a call to a choice ----


class Plan(NamedTuple):
    """It says what a checked call does, and is kept for the next call of the same kind."""

    choice: Choice
    rule: reference.Rule
    out_shape: tuple
    lse_shape: tuple
    workspace_cap: int
    memo: dict  # what a backend keeps for itself between calls
    gives_fresh: bool  # whether the backend may give a result of its own making


_MOST_PLANS = 8192
_plans: dict[tuple, Plan] = {}
_warned: set[str] = set()


def _decide(form, direction, q, k, v, options, flags, out=None) -> Plan:
    problem = describe(form, direction, q, k, v, options, out)
    choice = _ready_choice(problem, flags)
    if choice.fallback and flags["FFPA_STRICT"]:
        raise NotImplementedError(f"FFPA_STRICT=1: {problem}: {choice.fallback}")
    if choice.fallback and choice.fallback not in _warned:
        _warned.add(choice.fallback)
        message = f"ffpa_attn: {problem}: {choice.fallback} (this is said once)"
        progress.warn(message, stacklevel=_frames_to_the_caller())
    if flags["FFPA_LOG"]:
        progress.say(f"ffpa_attn: {choice}")
    rule = reference.Rule(problem.scale, problem.softcap, problem.visibility)
    lse_shape = form.lse_shape(q) if problem.needs_lse else (0,)
    out_shape, cap = (*q.shape[:-1], v.shape[-1]), flags["FFPA_WORKSPACE_MB"] << 20
    gives_fresh = hasattr(choice.plan, "fresh") and form.layout == "BHND" and 0 not in out_shape
    return Plan(choice, rule, out_shape, lse_shape, cap, {}, gives_fresh)


def _ready_choice(problem: Problem, flags) -> Choice:
    """Returns a choice with its kernels ready; one that cannot be compiled or loaded yields to the next candidate."""
    from ..backends.choice import CANDIDATES, choose

    for _ in CANDIDATES:
        choice = choose(problem, flags)
        if problem.device != "cuda" or all(
            native.make_ready(spec, problem.arch) for spec in native.needed(choice.plan, problem)
        ):
            break
    return choice


def _without_triton(error: triton_launch.Unable, key: tuple, plan: Plan) -> None:
    """Leaves this call, and all that follow of its kind, to the next candidate."""
    from ..backends import triton_attention

    of_triton = getattr(plan.choice.plan, "otherwise", plan.choice.plan)
    triton_attention.give_up(plan.choice.problem, of_triton, str(error))
    _plans.pop(key, None)


def _frames_to_the_caller() -> int:
    """Counts frames, as warnings.warn in the function above does, to the first one outside this package and PyTorch."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("ffpa_attn", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def run(plan: Plan, what: str, *call, **of_heads) -> torch.Tensor | None:
    """Does what the plan's method of this name does."""
    return getattr(plan.choice.plan, what)(*call, plan.rule, plan.workspace_cap, plan.memo, **of_heads)


def _remember(key: tuple, plan: Plan) -> Plan:
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


# ---- forward ----


def _forward_key(form, q, k, v, out, options, flags) -> tuple:
    in_one_place = k.data_ptr() == v.data_ptr()  # V may lie in K
    return (seen(q), seen(k), seen(v), seen(out), in_one_place, form.key(), flags, *options.items())


def plan_of(form, q, k, v, options, flags, out=None) -> Plan | None:
    """Returns the plan of a forward, if it is kept, or follows from what is kept."""
    key = _forward_key(form, q, k, v, out, options, flags)
    return _plans.get(key) or _of_other_rows(key, form, q, k, out, flags)


def _remember_for_any_rows(key: tuple, plan: Plan, form, q, out) -> Plan:
    """Keeps a plan also for calls that differ in the number of packed rows alone and are to be launched alike."""
    alike, any_rows = getattr(plan.choice.plan, "alike", None), for_any_rows(key, form, q, out)
    if any_rows is not None and alike is not None:
        _remember(any_rows, plan)
        _remember((any_rows, alike), plan)
    return _remember(key, plan)


def _of_other_rows(key: tuple, form, q, k, out, flags) -> Plan | None:
    """Returns the plan of a call whose like was seen with another number of packed rows, for which no check asks: that of a call for
    which the same was chosen as for this one.
    """
    any_rows = for_any_rows(key, form, q, out)
    known = any_rows and _plans.get(any_rows)
    if not known or flags["FFPA_LOG"]:
        return None
    from ..backends.choice import choose

    choice = choose(known.choice.problem._replace(packed=form.packed(q, k)), flags)
    like = _plans.get((any_rows, getattr(choice.plan, "alike", None)))
    call = like and like.memo.get("call")
    if call is None or call.launch is None or choice.fallback:
        return None
    lse_shape = form.lse_shape(q) if choice.problem.needs_lse else (0,)
    shapes = {"out_shape": (*q.shape[:-1], like.out_shape[-1]), "lse_shape": lse_shape}
    return _remember(key, like._replace(choice=choice, memo={"call": call.of_rows(q.shape[0])}, **shapes))


def fresh_result(plan: Plan, q, k, v) -> torch.Tensor | None:
    """Returns a result of the backend's own making, laid out as fakes say, and no view, or None if it makes none."""
    fresh = run(plan, "fresh", q, k, v)
    if fresh is None or (fresh.is_contiguous() and not fresh._is_view()):
        return fresh
    return fresh.clone(memory_format=torch.contiguous_format)


def _forward(form, q, k, v, out, options):
    if form.largest and arguments.is_added(form.mask):
        return _forward_of_added_mask(form, q, k, v, out, options)
    key, plan = _checked(form, q, k, v, out, options)
    try:
        results = run_forward(plan, form, q, k, v, out)
    except triton_launch.Unable as error:
        _without_triton(error, key, plan)
        return _forward(form, q, k, v, out, options)
    return results if out is None else results[1] if len(results) == 2 else results[1:]


def _checked(form, q, k, v, out, options) -> tuple[tuple, Plan]:
    """Returns what runs a forward, and its key, or raises what the forward would."""
    flags = env.run_flags()
    key = _forward_key(form, q, k, v, out, options, flags)
    plan = _plans.get(key) or _of_other_rows(key, form, q, k, out, flags)
    if plan is None:
        plan = _remember_for_any_rows(key, _forward_plan(form, q, k, v, out, options, flags), form, q, out)
    form.check_values(q, k, flags)
    if out is not None:
        # This depends on addresses, which no plan can know.
        memory_checks.writable(out, **form.named(q, k, v), mask=form.mask, sinks=form.sinks)
    return key, plan


def be_sure(form, q, k, v, out, options) -> None:
    """Raises what a forward would, so that a caller may write into its caches first. Without memory there is no plan."""
    if all(memory_checks.has_memory(x) for x in (q, k, v)):
        _checked(form, q, k, v, out, options)
    else:
        form.check(q, k, v)


def _forward_of_added_mask(form, q, k, v, out, options) -> tuple:
    """Finds the largest scores in a call of their own: numbers that a mask adds do not count, and no kernel has the
    scores without them. It takes few columns of V, and whom the mask lets through as a bool mask.
    """
    without = Dense(form.layout, form.mask, form.sinks)
    results = _forward(without, q, k, v, out, options)
    once = tuple(slice(None) if stride else slice(0, 1) for stride in form.mask.stride())  # a mask may be expanded
    mask = form.mask[once]
    try:
        visible = torch.ne(mask, -math.inf, out=mask.new_empty(mask.shape, dtype=torch.bool))
    except torch.OutOfMemoryError as error:
        plan = _plans[_forward_key(without, q, k, v, out, options, env.run_flags())]
        result_bytes = math.prod(plan.out_shape) * q.dtype.itemsize + mask.numel()
        raise no_memory(error, plan, q.dtype, result_bytes) from None
    of_largest = Dense(form.layout, visible, largest=True)
    *_, largest = _forward(of_largest, q, k, v[..., :HEAD_DIM_STEP], None, {**options, "return_lse": False})
    return (*results, largest) if out is None else (results, largest)


def run_forward(plan: Plan, form, q, k, v, out=None) -> tuple[torch.Tensor, ...]:
    """Returns the result, which is `out` if that is given, the LSE, and the largest scores if they are wanted."""
    try:
        lse = q.new_empty(plan.lse_shape, dtype=torch.float32)
        if out is None and plan.gives_fresh:
            with PlainTorch(q.device):
                fresh = fresh_result(plan, q, k, v)
            if fresh is not None:
                return fresh, lse
        if out is None:
            out = empty_like(q, q.dtype) if plan.out_shape == q.shape else q.new_empty(plan.out_shape)
        of_heads = _of_heads(form, q)
        if out.numel():
            run(plan, "forward", *map(form.heads_first, (q, k, v, out)), lse, form.mask, form.offsets, **of_heads)
    except torch.OutOfMemoryError as error:
        raise no_memory(error, plan, q.dtype) from None
    return (out, lse, of_heads["largest"]) if form.largest else (out, lse)


def _of_heads(form, q) -> dict[str, torch.Tensor]:
    """Returns what a plan is given beside rows, if there is anything: sinks, pages, a place for the largest scores."""
    given = {} if form.sinks is None else {"sinks": as_read(form.sinks)}
    if form.pages is not None:
        given["pages"] = form.pages
    if form.largest:
        given["largest"] = q.new_full(form.largest_shape(q), -math.inf, dtype=torch.float32)
    return given


def as_read(sinks: torch.Tensor) -> torch.Tensor:
    """Returns sinks as plans read them, in float32 and contiguous."""
    return sinks.to(torch.float32).contiguous()


def empty_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a contiguous tensor of this shape, in half the time that `torch.empty` takes."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def no_memory(
    error: torch.OutOfMemoryError, plan: Plan, dtype: torch.dtype, result_bytes: int | None = None
) -> torch.OutOfMemoryError:
    """Returns the error of a call without memory; its results are out of `dtype`, or of so many bytes."""
    if result_bytes is None:
        result_bytes = math.prod(plan.out_shape) * dtype.itemsize
    return out_of_memory.explained(error, plan.choice, plan.memo, result_bytes, env.run_flags())


def _forward_plan(form, q, k, v, out, options, flags) -> Plan:
    form.check(q, k, v)
    arguments.options(options, form.layout)
    memory_checks.rows(**form.named(q, k, v))
    if out is not None:
        arguments.output("out", out, (*q.shape[:-1], v.shape[-1]), q)
        memory_checks.rows(out=out)
    return _decide(form, "forward", q, k, v, options, flags, out)


# ---- backward ----


def _backward_key(form, tensors, fp32_grads, options, flags) -> tuple:
    return (*map(seen, tensors), fp32_grads, form.key(), flags, *options.items())


def plan_of_backward(form, tensors, options, flags) -> Plan | None:
    """Returns the plan of a backward whose gradients have their tensors' types, if it is kept."""
    return _plans.get(_backward_key(form, tensors, False, options, flags))


def _backward(form, tensors, fp32_grads, mask_grad, options) -> tuple:
    """Computes gradients from out and LSE of whole rows, maybe merged from several calls: P is exp(score - LSE), at
    most 1. An infinite LSE of either sign says that the row sees no key, so no gradient comes from it; NaN stays NaN.
    """
    flags = env.run_flags()
    key = _backward_key(form, tensors, fp32_grads, options, flags)
    plan = _plans.get(key) or _remember(key, _backward_plan(form, *tensors, options, flags))
    form.check_values(*tensors[2:4], flags)
    if mask_grad:
        arguments.mask_gradient(form.mask)
    try:
        return run_backward(plan, form, *tensors, fp32_grads, mask_grad)
    except triton_launch.Unable as error:
        _without_triton(error, key, plan)
        return _backward(form, tensors, fp32_grads, mask_grad, options)


def run_backward(
    plan: Plan, form, grad_out, grad_lse, q, k, v, out, lse, delta=None, fp32_grads=False, mask_grad: bool | None = None
) -> tuple:
    """Returns dq, dk and dv; unless `mask_grad` is None, also dmask, of no elements where it is not wanted."""
    dtype, first = torch.float32 if fp32_grads else q.dtype, form.heads_first
    try:
        dq, dk, dv = empty_like(q, dtype), empty_like(k, dtype), empty_like(v, dtype)
        of_mask = () if mask_grad is None else (form.mask.new_empty(form.mask.shape) if mask_grad else q.new_empty(0),)
        d_mask = reference.align_mask(*of_mask) if mask_grad else None
        saved = [first(grad_out), grad_lse, first(q), first(k), first(v), first(out), lse, delta]
        run(plan, "backward", saved, [first(dq), first(dk), first(dv)], d_mask, form.mask, form.offsets)
    except torch.OutOfMemoryError as error:
        result_bytes = sum(x.numel() for x in (q, k, v)) * dtype.itemsize + (form.mask.nbytes if mask_grad else 0)
        raise no_memory(error, plan, q.dtype, result_bytes) from None
    return dq, dk, dv, *of_mask


def _backward_plan(form, grad_out, grad_lse, q, k, v, out, lse, delta, options, flags) -> Plan:
    form.check(q, k, v)
    arguments.options(options, form.layout)
    for name, x in (("out", out), ("grad_out", grad_out)):
        arguments.output(name, x, (*q.shape[:-1], v.shape[-1]), q)
    for name, x in (("lse", lse), ("grad_lse", grad_lse), ("delta", delta)):
        if x is not None:
            arguments.saved_lse(name, x, form.lse_shape(q), q)
    memory_checks.rows(q=q, k=k, v=v, out=out)
    return _decide(form, "backward", q, k, v, options, flags)


def _sink_gradient(*tensors, layout="BHND") -> torch.Tensor:
    return _sink_gradient_delta(*tensors, layout=layout, wants_delta=False)[0]


def _sink_gradient_delta(grad_out, grad_lse, out, lse, sinks, *, layout="BHND", wants_delta: bool = True) -> tuple:
    from ..backends.sink_gradient import sink_gradient, workspace_bytes

    _check_sink_gradient(grad_out, grad_lse, out, lse, sinks, layout)
    if out.dim() == 3:
        grad_out, out = grad_out.transpose(0, 1), out.transpose(0, 1)
    elif layout == "BNHD":
        grad_out, out = grad_out.transpose(1, 2), out.transpose(1, 2)
    try:
        delta = empty_like(lse, torch.float32) if wants_delta else None
        return sink_gradient(grad_out, grad_lse, out, lse, sinks, delta), delta
    except torch.OutOfMemoryError as error:
        result_bytes = 4 * (lse.shape[-2] + wants_delta * lse.numel())
        raise out_of_memory.of_sink_gradient(error, out, workspace_bytes(out), result_bytes, env.run_flags()) from None


def _check_sink_gradient(grad_out, grad_lse, out, lse, sinks, layout) -> None:
    if out.dim() != 3:
        arguments.has_rank("out", out, 4, "that of a forward, or [T, H, D] of packed sequences")
    arguments.layout(layout)
    rows_first = out.dim() == 3 or layout == "BNHD"
    lse_shape = (out.transpose(-3, -2) if rows_first else out).shape[:-1]
    arguments.output("grad_out", grad_out, out.shape, out, "out")
    for name, x in (("lse", lse), ("grad_lse", grad_lse)):
        if x is not None:
            arguments.saved_lse(name, x, lse_shape, out, "out")
    arguments.sinks(sinks, out, lse_shape[-2], "out")


# ---- forward of 8-bit floats ----


def _fp8_plan(form, q, k, v, scales, out_dtype, v_transposed, options, flags) -> Plan:
    fp8_checks.inputs(q, k, v, scales, out_dtype, v_transposed)
    arguments.sinks(form.sinks, q, q.shape[1])
    arguments.options(options)
    memory_checks.rows(alignment=1, q=q, k=k, v=v)  # a row of D = 72 has 72 bytes, one of a transposed v has N
    return _decide(form, "forward", q, k, v.mT if v_transposed else v, options, flags)


def _fp8_max_logits(*args, **options):
    return _forward_fp8(*args, **options, largest=True)


def _forward_fp8(
    q, k, v, q_scale=None, k_scale=None, v_scale=None, sinks=None, *, out_dtype, v_transposed=False, largest=False, **options
):  # fmt: skip
    flags = env.run_flags()
    scales, form = (q_scale, k_scale, v_scale), Dense(sinks=sinks, largest=largest)
    key = ("fp8", *map(seen, (q, k, v, *scales)), form.key(), out_dtype, v_transposed, flags, *options.items())
    plan = _plans.get(key) or _remember(key, _fp8_plan(form, q, k, v, scales, out_dtype, v_transposed, options, flags))
    fp8_checks.scale_values(q_scale, k_scale, flags["FFPA_CHECK"])
    rows = q, k, v.mT if v_transposed else v
    try:
        out = q.new_empty(plan.out_shape, dtype=out_dtype)
        lse, of_heads = q.new_empty(plan.lse_shape, dtype=torch.float32), _of_heads(form, q)
        if out.numel():
            pairs = zip(scales, rows, strict=True)
            by_block = [None if scale is None else reference.scale_by_block(scale, x) for scale, x in pairs]
            run(plan, "forward_fp8", *rows, by_block, out, lse if lse.dim() > 1 else None, **of_heads)
    except triton_launch.Unable as error:
        _without_triton(error, key, plan)
        options |= {"out_dtype": out_dtype, "v_transposed": v_transposed, "largest": largest}
        return _forward_fp8(q, k, v, *scales, sinks, **options)
    except torch.OutOfMemoryError as error:
        raise no_memory(error, plan, out_dtype) from None
    return (out, lse, of_heads["largest"]) if largest else (out, lse)


# ---- the operators ----

# Each call looks these two up by name: tests make them run elsewhere.
_BODIES = operators(lambda *call: _forward(*call), lambda *call: _backward(*call)) | {
    "append_to_cache": appending.append_to_cache,
    "sink_gradient": _sink_gradient,
    "sink_gradient_delta": _sink_gradient_delta,
    "fp8_forward": _forward_fp8,
    "fp8_forward_max_logits": _fp8_max_logits,
}
for _name, _body in _BODIES.items():
    _lib.impl(_name, _body, "CPU")
    _lib.impl(_name, _body, "CUDA")


# ---- fakes: shapes, types and the checks that need no memory ----


def _fake_forward(form, q, k, v, out, options):
    if out is not None:
        arguments.output("out", out, (*q.shape[:-1], v.shape[-1]), q)
    form.check(q, k, v)
    lse = q.new_empty(form.lse_shape(q) if options.get("return_lse", True) else (0,), dtype=torch.float32)
    results = [] if out is not None else [q.new_empty((*q.shape[:-1], v.shape[-1]))]
    results += [lse, *_fake_largest(form, q)]
    return tuple(results) if len(results) > 1 else lse


def _fake_largest(form, q) -> list[torch.Tensor]:
    return [q.new_empty(form.largest_shape(q), dtype=torch.float32)] if form.largest else []


def _fake_backward(form, tensors, fp32_grads, mask_grad, options):
    _, _, q, k, v, *_ = tensors
    form.check(q, k, v)
    dtype = torch.float32 if fp32_grads else q.dtype
    grads = [x.new_empty(x.shape, dtype=dtype) for x in (q, k, v)]
    if mask_grad is None:
        return tuple(grads)
    return *grads, form.mask.new_empty(form.mask.shape) if mask_grad else q.new_empty(0)


def _fake_sink_gradient(grad_out, grad_lse, out, lse, sinks, *, layout="BHND"):
    _check_sink_gradient(grad_out, grad_lse, out, lse, sinks, layout)
    return sinks.new_empty(sinks.shape, dtype=torch.float32)


def _fake_forward_fp8(
    q, k, v, q_scale=None, k_scale=None, v_scale=None, sinks=None, *, out_dtype, v_transposed=False, return_lse=True, largest=False,
    **options,
):  # fmt: skip
    fp8_checks.inputs(q, k, v, (q_scale, k_scale, v_scale), out_dtype, v_transposed)
    arguments.sinks(sinks, q, q.shape[1])
    d_v = v.shape[2] if v_transposed else v.shape[3]
    lse = q.new_empty(q.shape[:3] if return_lse else (0,), dtype=torch.float32)
    return q.new_empty((*q.shape[:3], d_v), dtype=out_dtype), lse, *_fake_largest(Dense(largest=largest), q)


def _fake_fp8_max_logits(*args, **options):
    return _fake_forward_fp8(*args, **options, largest=True)


def _fake_sink_gradient_delta(grad_out, grad_lse, out, lse, sinks, *, layout="BHND"):
    return _fake_sink_gradient(grad_out, grad_lse, out, lse, sinks, layout=layout), lse.new_empty(lse.shape)


_FAKES = {
    **operators(_fake_forward, _fake_backward),
    "append_to_cache": appending.check,
    "sink_gradient": _fake_sink_gradient,
    "sink_gradient_delta": _fake_sink_gradient_delta,
    "fp8_forward": _fake_forward_fp8,
    "fp8_forward_max_logits": _fake_fp8_max_logits,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"ffpa_attn::{_name}", _fake, lib=_lib)

dispatch_keys.register(_lib, _BODIES)
