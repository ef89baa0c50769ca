"""This is the fp8 forward in Triton: it finds which tiles a problem gets, and what its kernels are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..launching import native
from ..specs import archs
from ..specs.problem import FP8_BLOCK, Problem
from ..triton_ops.launch import (
    Launch,
    Memo,
    Step,
    Tiles,
    describer,
    has_descriptor,
    kind_of,
    launch_alone,
    memo_of,
    run,
    strides,
)
from . import triton_attention
from .triton_attention import Kind, TritonPlan, _or, _wanted, tiles_of

_P_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}  # the largest power of 2 below a type's largest value
_LEAST_DEPTH = 32  # the least depth of a product of fp8 values
_ARRANGED = Tiles(FP8_BLOCK, FP8_BLOCK, 4, 1)
QUANTIZED = Tiles(FP8_BLOCK, 64, 4, 1)  # rows and columns at a time
_TENSORS = "values q k v out lse q_scales k_scales v_scales sinks largest".split()
ARCH = "sm_89"  # the first arch that has 8-bit floats


class TritonFp8Plan(TritonPlan):
    __slots__ = ()

    def forward_fp8(
        self, q, k, v, scales, out, lse, rule, workspace_cap: int, memo: Memo, sinks=None, largest=None
    ) -> None:
        """Runs on q, k, v, out [B, H, N, D] in any strides (columns of q, k and out side by side), scales [B, H, blocks
        of 128 rows], shared ones expanded, or None, lse [B, H, N] or None, and sinks and largest as `forward` does.
        """
        from ..triton_ops.fp8_kernels import arrange_values_kernel, fp8_forward_kernel

        q_scale, k_scale, v_scale = scales
        batch, heads, n_q, _ = q.shape
        heads_kv, n_k, d_v = v.shape[1:]
        if not n_k:
            out.zero_()
            return None if lse is None else lse.copy_(sinks[:, None]) if sinks is not None else lse.fill_(-float("inf"))
        tiles, widths = self.over_rows, self.widths
        blocks = -(-n_k // FP8_BLOCK)
        # A tensor that there is none of is neither read nor written: any other will do.
        lse_there, *scales = _or(out, lse, q_scale, k_scale, v_scale)
        wanted = _or(out, sinks, largest)
        if "reads" not in memo:
            by_tma = self.descriptors and has_descriptor(q)
            in_sixteens = _in_sixteens(k) if by_tma and v.stride(2) == 1 and has_descriptor(v.mT) else None
            v_as_it_is = in_sixteens is not None
            memo["reads"] = v_as_it_is, by_tma and (v_as_it_is or has_descriptor(k))
        v_as_it_is, by_tma = memo["reads"]
        v_read = v.mT
        if not v_as_it_is:
            v_read = torch.empty(batch, heads_kv, d_v, blocks * FP8_BLOCK, dtype=v.dtype, device=v.device)

        def how_to_arrange() -> Launch:
            numbers = *strides(v), v.stride(3), heads_kv, n_k, blocks * FP8_BLOCK
            return Launch(blocks * heads_kv * batch, numbers, {"D": d_v, "WIDTH": widths[1]}, _ARRANGED)

        def how() -> Launch:
            kind, tensors = Kind(self, q, k, v, None, None, rule), (q, k, v_read, out, lse_there, *scales)
            options = kind.options | _wanted(sinks, largest)
            options |= {
                "EDGES": kind.hides or n_k % tiles.keys != 0,
                "LSE": lse is not None,
                "TMA": by_tma,
                "V_AS_IT_IS": v_as_it_is,
                "Q_SCALED": q_scale is not None,
                "K_SCALE": _kind_of(k_scale),
                "V_SCALE": _kind_of(v_scale),
                "P_EXPONENT": _P_EXPONENT[q.dtype],
                "LARGEST_OUT": torch.finfo(out.dtype).max if out.dtype.itemsize == 1 else float("inf"),
            }
            programs = -(-n_q // tiles.rows) * heads * batch
            return Launch(programs, (*strides(*tensors), *kind.numbers[1:]), options, tiles)

        def steps() -> Iterator[Step]:
            if not v_as_it_is:
                yield arrange_values_kernel, (v, v_read), how_to_arrange
            sources = q, _in_sixteens(k) if v_as_it_is else k, v_read
            if by_tma:
                if "describers" not in memo:
                    k_block = (tiles.keys // 16, 2, 4, 2, widths[0]) if v_as_it_is else (tiles.keys, widths[0])
                    blocks_read = (tiles.rows, widths[0]), k_block, (widths[1], tiles.keys)
                    memo["describers"] = [describer(x, *block) for x, block in zip(sources, blocks_read, strict=True)]
                sources = [describe(x) for describe, x in zip(memo["describers"], sources, strict=True)]
            yield fp8_forward_kernel, (*sources, out, lse_there, *scales, *wanted), how

        run(memo, (v, q, k, v_read, out, lse_there, *scales, *wanted), _TENSORS, steps, {"arranged": ("v", 0)})


def plan(p: Problem, flags: Mapping[str, Any]) -> TritonFp8Plan | str:
    """Returns what runs the problem, or why Triton cannot."""
    reason = triton_attention.refusal(p, flags)
    if reason:
        return reason
    widths = max(_LEAST_DEPTH, triton_attention.width(p.d_qk)), triton_attention.width(p.d_v)
    tiles = tiles_of("fp8", p, widths)
    if isinstance(tiles, str):
        return tiles
    plan = TritonFp8Plan("fp8", widths, tiles, None, triton_attention.reads_by_descriptors(p))
    return triton_attention.if_able(p, plan)


def _in_sixteens(k: torch.Tensor) -> torch.Tensor | None:
    """Returns [B, H, N, D] as [sixteens of rows, 2, 4, 2, D], so that blocks of it hold them in the order that P wants
    (see the kernel); None where strides do not allow it.
    """
    batch, heads, n, d = k.shape
    row = k.stride(2)
    in_one_piece = (batch == 1 or k.stride(0) == heads * n * row) and (heads == 1 or k.stride(1) == n * row)
    if n % 16 or not in_one_piece or not has_descriptor(k):
        return None
    return k.as_strided((batch * heads * n // 16, 2, 4, 2, d), (16 * row, 2 * row, 4 * row, row, 1))


def _kind_of(scale: torch.Tensor | None) -> str:
    return "none" if scale is None else "block" if scale.shape[2] > 1 and scale.stride(2) else "head"


def quantizes(x: torch.Tensor) -> bool:
    """Says whether these kernels quantize x. A compiler makes its own kernels; autograd wants PyTorch's operators."""
    on_gpu = x.is_cuda and not archs.why_not_on(ARCH, native.gpu_of(x.device))
    wanted = (on_gpu or triton_attention.interprets()) and x.numel() > 0
    plain = type(x) is torch.Tensor and not torch.compiler.is_compiling()
    recorded = x.requires_grad and torch.is_grad_enabled()
    return wanted and plain and not recorded and not triton_attention.why_not()


def _over_blocks(x: torch.Tensor, *others: torch.Tensor) -> Launch:
    batch, heads, rows, d = x.shape
    tensors = x, *others
    numbers = *strides(*tensors), *(tensor.stride(3) for tensor in tensors), heads, rows
    return Launch(-(-rows // FP8_BLOCK) * heads * batch, numbers, {"D": d}, QUANTIZED)


def block_maxima(x: torch.Tensor) -> torch.Tensor:
    """Returns the largest |x| of each block of 128 rows: float32 [B, H, blocks]."""
    from ..triton_ops.fp8_kernels import block_maxima_kernel

    maxima = x.new_empty((*x.shape[:2], -(-x.shape[2] // FP8_BLOCK)), dtype=torch.float32)
    launch_alone(memo_of("maxima", *kind_of(x)), block_maxima_kernel, (x, maxima), lambda: _over_blocks(x))
    return maxima


def divide(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns x / scale [B, H, blocks] as 8-bit floats."""
    from ..triton_ops.fp8_kernels import quantize_kernel

    x8 = torch.empty_like(x, dtype=dtype)
    memo = memo_of("divided", dtype, *kind_of(x, scale, x8))
    launch_alone(memo, quantize_kernel, (x, scale.contiguous(), x8), lambda: _over_blocks(x, x8))
    return x8
