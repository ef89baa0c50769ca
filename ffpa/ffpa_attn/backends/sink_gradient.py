"""Computes the gradient of sinks, which needs no keys: -exp(sink - LSE) (dO·O - dLSE), summed over the rows of a head.

Wherever our kernels run, one of them does it (csrc/attention/backward/sink_gradient.cuh); elsewhere PyTorch does. Every
run gives the same bits.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from .. import env
from ..launching import native, structs
from ..launching.launch import READ, WRITE, Launch
from ..specs.spec import BackwardSinkGradient
from ..support.private_torch import PlainTorch
from .backward import as_read

_DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}
_ROWS = 64  # rows of a block, as kSinkRows says
_MOST_BLOCKS = 2**31 - 1
_CHUNK_FLOATS = 1 << 24  # floats of dO that PyTorch has at a time, at most
_BYTES_PER_FLOAT = 8  # bytes for dO in f32, and its product with O


def sink_gradient(grad_out, grad_lse, out, lse, sinks, workspace_cap: float = math.inf) -> torch.Tensor:
    """Returns the gradient of sinks, float32 [H], from tensors [B, H, N, D] and LSEs [B, H, N], or from those of packed
    sequences without their batch dim. Rows whose LSE is infinite have no part in it.
    """
    grad_out, out, lse = (x[None] if lse.dim() == 2 else x for x in (grad_out, out, lse))
    grad_lse = None if grad_lse is None else grad_lse.reshape(lse.shape)
    sinks = sinks.float().contiguous()
    if not out.numel():
        return torch.zeros_like(sinks)
    spec = _kernel(out)
    if spec is None:
        with PlainTorch(out.device):
            return _by_pytorch(grad_out, grad_lse, out, lse, sinks, workspace_bytes(out, workspace_cap))
    grad_out, out = as_read(grad_out, {}), as_read(out, {})
    partial = torch.empty(out.shape[1], _blocks(out) // out.shape[1], dtype=torch.float32, device=out.device)
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    launch = _launch(spec, out.device, tuple(out.shape), out.stride(), grad_out.stride())
    launch(out, grad_out, lse.contiguous(), grad_lse, sinks, partial)
    return partial.sum(1)


def workspace_bytes(out: torch.Tensor, cap: float) -> int:
    """Returns the bytes that it takes beside what is O(N); `out` is [B, H, N, D] or [H, N, D]."""
    return 0 if _kernel(out) else min(cap, _CHUNK_FLOATS * _BYTES_PER_FLOAT, out.numel() * _BYTES_PER_FLOAT)


def _blocks(out: torch.Tensor) -> int:
    *heads, rows, _ = out.shape
    return math.prod(heads) * -(-rows // _ROWS)


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
    return Launch(spec, params, memory | {"partial": WRITE}, device)


def _by_pytorch(grad_out, grad_lse, out, lse, sinks, most_bytes: int) -> torch.Tensor:
    total = torch.zeros_like(sinks)
    batch, heads, rows, columns = out.shape
    step = max(most_bytes // (batch * heads * columns * _BYTES_PER_FLOAT), 1)
    for first in range(0, rows, step):
        of_rows = slice(first, first + step)
        delta = (grad_out[:, :, of_rows].float() * out[:, :, of_rows]).sum(-1)
        if grad_lse is not None:
            delta -= grad_lse[:, :, of_rows]
        p = torch.exp((sinks[:, None] - lse[:, :, of_rows]).clamp(max=0.0))  # above 1 it would come from roundings
        p = torch.where(lse[:, :, of_rows].isinf(), 0.0, p)
        total -= torch.where(p == 0, 0.0, p * delta).sum((0, 2))
    return total
