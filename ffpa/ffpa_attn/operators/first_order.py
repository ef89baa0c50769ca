"""This module makes gradients that say so when somebody differentiates them again."""

from __future__ import annotations

import functools

import torch
from torch.autograd import forward_ad

from ..support.private_torch import find

_MESSAGE = (
    b"ffpa's gradients cannot be differentiated again; where second derivatives are needed, call "
    b"torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)


_error_of_pytorch = find("torch._C._functions.DelayedError")
_transformed = find("torch._C._are_functorch_transforms_active") or (lambda: False)


def first_order_only(backward):
    """Wraps a Function's backward so that its gradients raise when they are differentiated. It is called with what the
    forward saved, which hooks of PyTorch allow to be unpacked once, and the incoming gradients.

    The error hangs on all that the gradients depend on: autograd leaves out what no path leads from to the inputs that
    a caller names. So a forward saves its inputs, or one of its outputs, from which autograd finds them. (PyTorch's
    once_differentiable hangs the error on leaves of its own, or on nothing where the incoming gradients are constants.)
    """

    @functools.wraps(backward)
    def once(ctx, *grads):
        saved = ctx.saved_tensors
        if getattr(forward_ad, "_current_level", -1) >= 0 and any(x is not None and _has_tangent(x) for x in grads):
            raise RuntimeError(_MESSAGE.decode())
        with torch.no_grad():
            results = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():
            return results
        if _error_of_pytorch is None or _transformed():
            return _once_at_each_level(results, (*saved, *grads))
        sources = [x for x in (*saved, *grads) if x is not None and x.requires_grad]
        error = _error_of_pytorch(_MESSAGE, len(results) + len(sources))
        return error(*results, *sources)[: len(results)]

    return once


def _once_at_each_level(results, sources):
    """Puts the error into the graphs of torch.func's levels, which the error above does not reach."""
    known = [x for x in results if x is not None]
    checked = iter(_Once.apply(len(known), *known, *(x for x in sources if x is not None)))
    return tuple(None if x is None else next(checked) for x in results)


class _Once(torch.autograd.Function):
    """A Function that returns the first `count` of its tensors as they are, and raises when it is differentiated."""

    @staticmethod
    def forward(count, *tensors):
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, count, *tensors):
        return _Once.apply(count, *tensors), in_dims[1 : 1 + count]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(_MESSAGE.decode())

    jvp = backward


def _has_tangent(x: torch.Tensor) -> bool:
    try:
        return forward_ad.unpack_dual(x).tangent is not None
    except RuntimeError:  # vmap has no rule for that, and maps over tangents where it is part of jacfwd or hessian
        return True
