"""This module is what the operators do above their kernels, at PyTorch's dispatch keys: autograd, autocast and
torch.func. Here, too, DTensor and the counter of operations learn of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import _C, autograd
from torch.autograd import forward_ad

from ..checks import memory_checks
from ..support import private_torch
from ..support.private_torch import FakeTensor
from . import flops, mapped
from .first_order import first_order_only
from .forms import MAX_LOGITS


def register(lib: torch.library.Library, bodies: Mapping[str, Callable]) -> None:
    """Registers all `bodies`. (At the Autograd key a plain Function costs a call half of register_autograd's time.)"""
    for name, body in bodies.items():
        _operators[name], _bodies[name] = getattr(torch.ops.ffpa_attn, name).default, body
    for name in (x + more for x in ("forward", "varlen_forward") for more in ("", MAX_LOGITS)):
        op, body = _operators[name], bodies[name]
        kernel = _plain_calls_alone if private_torch.no_gradients else _autograd
        lib.impl(name, kernel(op, body), "Autograd", with_keyset=True)
        if _is_excluded and not (private_torch.no_gradients or private_torch.no_short_way):
            _recorders[name] = partial(_recorded, body)
    for name in PAGED:
        kernel = _plain_calls_alone if private_torch.no_gradients else _without_gradients
        lib.impl(name, kernel(_operators[name], bodies[name]), "Autograd", with_keyset=True)
    forwards = ("forward", "forward_out", "varlen_forward", "varlen_forward_out", "paged_forward", "paged_forward_out")
    for name in (x + more for x in forwards for more in ("", MAX_LOGITS)):
        lib.impl(name, _autocast(_operators[name], "cuda"), "AutocastCUDA")
        lib.impl(name, _autocast(_operators[name], "cpu"), "AutocastCPU")
    mapped.register(lib)
    flops.register()


PAGED = (*(f"paged_forward{out}{more}" for out in ("", "_out") for more in ("", MAX_LOGITS)), "append_to_cache")
_operators: dict[str, Callable] = {}
_bodies: dict[str, Callable] = {}
_recorders: dict[str, Callable] = {}  # they record calls as the Autograd key would, without the dispatcher's 10 µs
_is_excluded = private_torch.find("torch._C._dispatch_tls_is_dispatch_key_excluded")


def at_once(name: str, q, *others) -> Callable:
    """Returns what runs the operator: its body, or what records it, if the dispatcher does no more in its 10 µs, else
    the operator.
    """
    if have_work(q, *others):
        return _operators[name]
    if want_gradients(q, *others):
        return recorder(name) or _operators[name]
    return _bodies[name]


def recorder(name: str) -> Callable | None:
    """Returns what records a call that wants gradients and nothing else; None where the thread leaves autograd out."""
    return None if not _recorders or _is_excluded(_C.DispatchKey.AutogradFunctionality) else _recorders.get(name)


def _recorded(body, *args, **options):
    return _Attention.apply(None, body, None, options, *_sinks_first(args))  # no keys are left: the body comes next


def _sinks_first(args: tuple) -> tuple:
    """Returns the arguments of a forward with its sinks, or None, before q, k and v: they are last, where they are given,
    behind a mask or None, or behind the four offsets of packed sequences.
    """
    return (args[-1], *args[:-1]) if len(args) in (5, 8) else (None, *args)


def is_recorded_as_it_is() -> bool:
    """Says whether a call that wants gradients may be recorded by `KnownAttention`: autograd is on, and no hook changes what is
    saved.
    """
    return recorder("forward") is not None and _saved_hooks is not None and _saved_hooks(True) is None


_saved_hooks = private_torch.find("torch._C._autograd._top_saved_tensors_default_hooks")


def gradients_of(grad_out, grad_lse, saved, longest, delta: torch.Tensor | None = None, **options) -> tuple:
    """Runs an operator of gradients, or its body, if the dispatcher does no more; `saved` are the tensors that came to
    the forward and from it, `longest` is (), or both max_seqlen, and δ may be known.
    """
    if grad_out is None:
        grad_out = torch.zeros_like(saved[3])
    run = at_once("varlen_backward" if longest else "backward", grad_out, grad_lse, *saved, delta)
    return run(grad_out, grad_lse, *saved, *longest, delta=delta, **options)


def rule_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that a backward has, too."""
    return {name: x for name, x in options.items() if name not in ("return_lse", "level", "acc", "num_stages")}


def gradient_of_sinks(grad_out, grad_lse, out, lse, sinks, layout: str = "BHND") -> tuple[torch.Tensor, torch.Tensor]:
    """Returns it in the type of sinks, and δ, which the other gradients need as well; the LSE includes sinks."""
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    run = at_once("sink_gradient_delta", grad_out, grad_lse, out, lse, sinks)
    of_sinks, delta = run(grad_out, grad_lse, out, lse, sinks, layout=layout)
    return of_sinks.to(sinks.dtype), delta


class _Rules:
    """How both forms are computed and differentiated; `rest` is (), (mask,) or (both cu_seqlens, both max_seqlen)."""

    @staticmethod
    def forward(ctx, op, body, keyset, options, sinks, q, k, v, *rest):
        args = (q, k, v, *rest) if sinks is None else (q, k, v, *rest, sinks)
        # return_lse=False only allows to leave the LSE out: the backward needs it.
        out, lse, *largest = _below_autograd(op, body, keyset, args, {**options, "return_lse": True})
        ctx.save_for_backward(q, k, v, out, lse, *rest[:2], sinks)
        ctx.longest, ctx.options = rest[2:], options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*largest)
        return out, lse, *largest

    @staticmethod
    @first_order_only
    def backward(ctx, saved, grad_out, grad_lse, *_):
        *saved, sinks = saved
        rule, needs = rule_of(ctx.options), ctx.needs_input_grad[4:]
        of_sinks, delta, grads, mask_grad = None, None, (), any(needs[4:])
        if needs[0]:
            of_sinks, delta = gradient_of_sinks(grad_out, grad_lse, *saved[3:5], sinks, rule.get("layout", "BHND"))
        if mask_grad:
            rule["mask_grad"] = True
        if any(needs[1:]):
            grads = gradients_of(grad_out, grad_lse, saved, ctx.longest, delta, **rule)[: 4 if mask_grad else 3]
        return None, None, None, None, of_sinks, *grads, *(None,) * (len(needs) - 1 - len(grads))

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(
            "ffpa has no forward-mode derivatives (jvp, jacfwd, hessian); take those of torch.func.vjp or jacrev, or call "
            "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


class _Attention(_Rules, autograd.Function):
    """The Function that autograd records."""


class KnownAttention(_Rules, autograd.Function):
    """The Function of calls whose kind was seen before: it runs known.forward(*tensors), and to get the gradients of q, k
    and v known.backward(saved, grad_out, grad_lse).
    """

    @staticmethod
    def forward(ctx, known, *tensors):
        out, lse = known.forward(*tensors)
        ctx.save_for_backward(*tensors[:3], out, lse, *tensors[3:])
        ctx.known, ctx.others = known, len(tensors) - 3
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order_only
    def backward(ctx, saved, grad_out, grad_lse):
        return None, *ctx.known.backward(saved, grad_out, grad_lse), *(None,) * ctx.others


if not private_torch.no_torch_func:

    class _AttentionOfOneLevel(_Rules, autograd.function._SingleLevelFunction):
        """What torch.func does to a call it does to the operator, level by level, before the call comes here. A
        Function would have it do so again, with one of another form; this is what that calls at each level.
        """


def _autograd(op, body):
    def kernel(keyset, *args, **options):
        # Calls under forward-mode AD must come to the Function too, which says there that it has no formula.
        if want_gradients(*args) or forward_ad._current_level >= 0:
            return _differentiably(op, body, keyset, options, *_sinks_first(args))
        return _below_autograd(op, body, keyset, args, options)

    return kernel


def _without_gradients(op, body):
    """Makes the kernel of an operator that has no gradients, and says so where one is wanted."""

    def kernel(keyset, *args, **options):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        tangents = forward_ad._current_level >= 0 and any(
            forward_ad.unpack_dual(x).tangent is not None for x in tensors
        )
        if tangents or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            raise NotImplementedError(
                f"{op} has no gradients: call it under torch.no_grad(), or with detached tensors; ffpa_varlen has gradients "
                "of packed keys"
            )
        return _below_autograd(op, body, keyset, args, options)

    return kernel


def _plain_calls_alone(op, body):
    """Without what stops autograd below an operator, no other call can be told from one that wants gradients."""

    def kernel(keyset, *args, **options):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        plain = all(type(x) is torch.Tensor and memory_checks.has_memory(x) for x in tensors)
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if wanted or not plain or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise NotImplementedError(private_torch.no_gradients)
        return body(*args, **options)

    return kernel


def _differentiably(*args):
    if private_torch.no_torch_func:
        try:
            return _Attention.apply(*args)
        except RuntimeError as error:
            if "setup_context" in str(error):  # PyTorch asks for setup_context in torch.func's transforms alone
                raise NotImplementedError(private_torch.no_torch_func) from None
            raise
    if not _C._are_functorch_transforms_active():
        return _Attention.apply(*args)
    with torch._functorch.utils.enable_single_level_autograd_function():
        return _AttentionOfOneLevel.apply(*args)


def _below_autograd(op, body, keyset, args, options):
    if keyset is None or (_OUR_BODIES and keyset.raw_repr() & _BELOW_AUTOGRAD in _OUR_BODIES):
        return body(*args, **options)  # this is what the dispatcher would call next, without its 10 µs
    place_dtensors(args)
    with _C._AutoDispatchBelowAutograd():
        if not _OUR_BODIES:
            return op(*args, **options)
        return op.redispatch(keyset & _C._after_autograd_keyset, *args, **options)


def place_dtensors(args) -> None:
    """Sees to it that DTensor knows our operators. Importing it takes seconds; if nobody has, no argument is one."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is not None and any(isinstance(x, dtensor.DTensor) for x in args):
        try:
            from . import sharding

            sharding.register()
        except (ImportError, AttributeError) as error:
            raise private_torch.off("DTensors", error) from None


def want_gradients(*tensors) -> bool:
    return _C.is_grad_enabled() and _C._any_requires_grad(*tensors)


def have_work(q, *others) -> bool:
    """Says whether the dispatcher must do more than record a call for autograd: for subclasses of tensors, for what
    traces, replaces or casts, and for tensors that are lazy negatives or zeros, batched, sparse or nested.
    """
    if (
        torch.compiler.is_compiling()
        or _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._get_tracing_state()
        or autograd.profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
        or not (q.is_cuda or q.is_cpu)
        or torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu")
    ):
        return True
    for x in (q, *others):
        if x is not None and (type(x) not in _PLAIN_TYPES or _C._dispatch_keys(x).raw_repr() & _BEYOND_PLAIN):
            place_dtensors((q, *others))
            return True
    return False


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)  # sinks are parameters of a model


def _plain_keys() -> int:
    plain = _C._dispatch_keys(torch.empty(0)).raw_repr()
    for key in ("CUDA", "AutogradCUDA", "AutocastCUDA", "AutocastCPU"):
        plain |= _C.DispatchKeySet(getattr(_C.DispatchKey, key)).raw_repr()
    return plain


def _always_work(*tensors) -> bool:
    place_dtensors(tensors)
    return True


if private_torch.no_short_way:
    have_work = want_gradients = _always_work
    _OUR_BODIES = ()
else:
    _BEYOND_PLAIN = ~_plain_keys()
    _BELOW_AUTOGRAD = _C._after_autograd_keyset.raw_repr()
    _OUR_BODIES = tuple(_C.DispatchKeySet(key).raw_repr() for key in (_C.DispatchKey.CPU, _C.DispatchKey.CUDA))


def as_autocast_would(*tensors, cast: Callable | None = None) -> list[torch.Tensor]:
    """Returns what operators get under autocast; in a call that is only asked about, fakes stand for what is cast."""
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [(cast or _fake)(x, dtype) if x.dtype == torch.float32 else x for x in tensors]


def _fake(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.is_meta or isinstance(x, FakeTensor):
        return x.to(dtype)
    make = private_torch.find("torch._subclasses.fake_tensor.FakeTensorMode")
    return (make(allow_non_fake_inputs=True).from_tensor(x.detach()) if make else x.detach()).to(dtype)


def _autocast(op, device: str):
    """Makes the kernel that casts float32 q, k and v to the autocast type; masks and LSE keep theirs."""
    guard, key = map(
        private_torch.find, ("torch._C._ExcludeDispatchKeyGuard", f"torch._C.DispatchKey.Autocast{device.upper()}")
    )
    keys = private_torch.find("torch._C.DispatchKeySet")
    without_autocast = partial(torch.autocast, device, enabled=False)
    if guard and key and keys:
        without_autocast = partial(guard, keys(key))  # this is entered in a fifth of the time

    def kernel(q, k, v, *rest, **options):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) if x.dtype == torch.float32 and x.device.type == device else x for x in (q, k, v))
        with without_autocast():
            return op(q, k, v, *rest, **options)

    return kernel
