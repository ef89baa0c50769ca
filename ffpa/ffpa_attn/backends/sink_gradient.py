"""Computes the gradient of sinks, which needs no keys: -exp(sink - LSE) δ, δ = dO·O - dLSE, summed over the rows of a head.

Wherever our kernels run, one of them does it (csrc/attention/backward/sink_gradient.cuh); elsewhere PyTorch does. Every
run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import torch

from .. import env
from ..launching import native, structs
from ..launching.launch import READ, WRITE, Kernel, Launch
from ..specs.spec import BackwardSinkGradient
from ..support.private_torch import PlainTorch
from .backward import as_read

_DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}
_ROWS = 64  # rows of a block, as kSinkRows says
_MOST_BLOCKS = 2**31 - 1
_BYTES_PER_ELEMENT = 12  # bytes for an element of dO and O in PyTorch: both in float32, and their product
_MOST_ELEMENTS = 1 << 24  # elements at a time beyond which more gain nothing


def sink_gradient(grad_out, grad_lse, out, lse, sinks, delta: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the gradient of sinks, float32 [H], from tensors [B, H, N, D] and LSEs [B, H, N], or from those of packed
    sequences without their batch dim. Rows whose LSE is infinite have no part in it. Where `delta` is given, contiguous
    and of the LSE's shape, δ of all rows is written to it, 0 for these.
    """
    grad_out, out, lse = (x[None] if lse.dim() == 2 else x for x in (grad_out, out, lse))
    grad_lse, delta = (None if x is None else x.reshape(lse.shape) for x in (grad_lse, delta))
    sinks = sinks.float().contiguous()
    if not out.numel():
        return torch.zeros_like(sinks)
    spec = _kernel(out)
    if spec is None:
        with PlainTorch(out.device):
            return _by_pytorch(grad_out, grad_lse, out, lse, sinks, delta)
    grad_out, out = as_read(grad_out, {}), as_read(out, {})
    partial = torch.empty(out.shape[1], _blocks(out) // out.shape[1], dtype=torch.float32, device=out.device)
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    launch = _launch(spec, out.device, tuple(out.shape), out.stride(), grad_out.stride())
    launch(out, grad_out, lse.contiguous(), grad_lse, sinks, partial, delta)
    return partial.sum(1)


def workspace_bytes(out: torch.Tensor) -> int | None:
    """Returns what it takes beside O(N), or None where that is as much as the workspace holds."""
    return 0 if _kernel(out[None] if out.dim() == 3 else out) else None


def _blocks(out: torch.Tensor) -> int:
    batch, heads, rows, _ = out.shape
    return batch * heads * -(-rows // _ROWS)


def _kernel(out: torch.Tensor) -> BackwardSinkGradient | None:
    """Returns the kernel that can run, or None."""
    flags = env.run_flags()
    if out.dtype not in _DTYPES or out.shape[-1] % 8 or _blocks(out) > _MOST_BLOCKS:
        return None
    spec = BackwardSinkGradient(_DTYPES[out.dtype])
    if flags["FFPA_EMULATE"] and out.device.type == "cpu":
        return spec
    if out.device.type != "cuda" or flags["FFPA_BACKEND"] == "reference":
        return None
    gpu = native.gpu_of(out.device)
    return spec if native.why_not(spec, gpu) is None and native.make_ready(spec, gpu) else None


@lru_cache(maxsize=64)
def _launch(spec: BackwardSinkGradient, device: torch.device, shape, of_out, of_grad) -> Launch:
    params = structs.struct("SinkGradientParams")()
    for view, steps in ((params.out, of_out), (params.grad_out, of_grad)):
        view.batch_stride, view.head_stride, view.row_stride = steps[:3]
    params.batch, params.heads, params.rows, params.columns = shape
    memory = dict.fromkeys(("out.data", "grad_out.data", "lse", "grad_lse", "sinks"), READ)
    return Launch([Kernel(spec, params, memory | {"partial": WRITE, "delta": WRITE})], device)


def _by_pytorch(grad_out, grad_lse, out, lse, sinks, delta) -> torch.Tensor:
    total = torch.zeros_like(sinks)
    for at in _pieces(out.shape):
        heads = at[1]
        of_rows = (grad_out[at].float() * out[at]).sum(-1)
        if grad_lse is not None:
            of_rows -= grad_lse[at]
        p = torch.exp((sinks[heads, None] - lse[at]).clamp(max=0.0))  # above 1 it would come from roundings
        p = torch.where(lse[at].isinf(), 0.0, p)
        total[heads] -= torch.where(p == 0, 0.0, p * of_rows).sum(1)
        if delta is not None:
            delta[at] = torch.where(lse[at].isinf(), 0.0, of_rows)
    return total


def _pieces(shape) -> Iterator[tuple[int, slice, slice]]:
    """Gives the entry, the heads and the rows of what the workspace holds at a time."""
    batch, heads, rows, columns = shape
    elements = min((env.run_flags()["FFPA_WORKSPACE_MB"] << 20) // _BYTES_PER_ELEMENT, _MOST_ELEMENTS)
    rows_at_a_time = max(elements // columns, 1)
    heads_at_a_time = max(rows_at_a_time // rows, 1)
    for entry, head, row in product(range(batch), range(0, heads, heads_at_a_time), range(0, rows, rows_at_a_time)):
        yield entry, slice(head, head + heads_at_a_time), slice(row, row + rows_at_a_time)
