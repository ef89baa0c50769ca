"""Tells without a GPU which kernels Triton would compile for a problem on Hopper, from tensors that have no memory."""

from __future__ import annotations

import contextlib
from functools import partial
from unittest import mock

import campaign_check
import campaign_tensors as tensors
import torch
from campaign_problems import Problem
from ffpa_attn import env
from ffpa_attn.backends import triton_attention
from ffpa_attn.launching import native
from ffpa_attn.operators import forms, ops
from ffpa_attn.triton_ops import launch as triton_launch

_LARGE = 2**31


def _seen_of(x):
    """Returns what Triton's compiler is told of an argument."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.storage_offset() * x.element_size() % 16 == 0
    if hasattr(x, "block_shape"):
        return x.base.dtype, tuple(x.block_shape)
    if isinstance(x, tuple):
        return tuple(map(_seen_of, x))
    if isinstance(x, int) and not isinstance(x, bool):
        return x == 1, x % 16 == 0, abs(x) >= _LARGE
    return type(x)


def compiled(p: Problem) -> set[tuple]:
    """Returns what would be compiled for a problem of 16-bit floats."""
    found = set()

    def launch(memo, kernel, given, how) -> None:
        _, numbers, options, tiles = how()
        options = {name: value for name, value in options.items() if name in kernel.arg_names}
        found.add((kernel.__name__, tiles, *options.items(), *map(_seen_of, (*given, *numbers))))

    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():  # whoever imports the kernels first decides for all who interpret them later
            stack.enter_context(env.overridden("TRITON_INTERPRET", "1"))
        stack.enter_context(mock.patch.object(triton_launch, "launch", launch))
        stack.enter_context(mock.patch.object(triton_launch, "running", lambda device: contextlib.nullcontext()))
        stack.enter_context(mock.patch.object(ops, "describe", partial(ops.describe, device="cuda", arch="sm_90")))
        stack.enter_context(
            mock.patch.object(ops.memory_checks, "writable", lambda *_, **__: None)
        )  # all tensors lie at address 0
        stack.enter_context(mock.patch.object(native, "why_not", lambda *_: None))
        stack.enter_context(mock.patch.object(native, "make_ready", lambda *_: True))
        stack.enter_context(mock.patch.object(triton_attention, "_lacks_compiler", lambda: False))
        run = ops.run

        def run_triton_alone(plan, *args, **of_heads) -> None:
            if plan.choice.backend == "triton":
                run(plan, *args, **of_heads)

        stack.enter_context(mock.patch.object(ops, "run", run_triton_alone))
        stack.enter_context(campaign_check.running(p))
        _call(p)
    return found


def _call(p: Problem) -> None:
    x = tensors.make(p, "meta")
    of_heads = x.sinks, p.max_logits
    form = forms.Packed(*x.offsets, *of_heads) if p.packed else forms.Dense(p.layout, x.mask, *of_heads)
    left, right = p.window
    rule = {"causal": p.causal, "align": p.align, "scale": p.scale, "softcap": p.softcap}
    rule |= {"window_left": left, "window_right": right}
    options = rule | {"level": p.level, "acc": p.acc, "num_stages": p.num_stages}
    options["return_lse"] = p.return_lse or p.backward
    given = None if p.out is None else campaign_check.own_output(p, x)[0]
    found = ops._forward(form, x.q, x.k, x.v, given, options)
    if p.backward:
        out, lse, *_ = found
        grad, grad_lse = campaign_check.random_gradients(p, out, lse, None)
        ops._backward(form, (grad, grad_lse, x.q, x.k, x.v, out, lse, None), False, False, rule)
