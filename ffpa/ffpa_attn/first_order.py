"""Gradients that say so when somebody differentiates them again."""

from __future__ import annotations

import functools

import torch

_MESSAGE = (
    b"ffpa's gradients cannot be differentiated again; where second derivatives are needed, call "
    b"torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)


def first_order_only(backward):
    """A Function's backward, whose gradients raise when they are differentiated. (PyTorch's once_differentiable has them be
    constants where what it is given requires no grad, as the gradient of a sum: a penalty on gradients then has none itself.)
    """

    @functools.wraps(backward)
    def once(ctx, *grads):
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        error = torch._C._functions.DelayedError(_MESSAGE, len(results))
        return error(*(None if x is None else x.detach().requires_grad_() for x in results))

    return once
