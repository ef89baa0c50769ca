"""This module holds attention of 8-bit floats, ffpa_fp8, and quantize_fp8, which makes its inputs."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F

from .backends import reference
from .checks import arguments, fp8_checks, words
from .operators import dispatch_keys, forms
from .specs.problem import FP8_BLOCK
from .triton_ops import launch as triton_launch


def quantize_fp8(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    per: str = "tensor",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (x8, scale) with x ≈ x8.float() * scale: the largest |x| becomes the largest finite number of `dtype`.

    x      [B, H, N, D], float16, bfloat16 or float32, finite.
    dtype  torch.float8_e4m3fn or torch.float8_e5m2.
    per    what shares a scale: "tensor" (scale has shape []), "head" ([B, H]), or "block" ([B, H, ceil(N / 128)]): 128
           rows of a head. Smaller parts lose less where magnitudes differ.

    scale is float32, and 1 where there is nothing but zeros. The result is deterministic, and nothing waits for a GPU.
    """
    from .backends import triton_fp8

    arguments.only_tensors(x=x)
    fp8_checks.to_quantize(x, dtype)
    arguments.one_of("per", per, ("tensor", "head", "block"))
    if triton_fp8.quantizes(x):
        with contextlib.suppress(triton_launch.Unable):
            return _quantized(x, dtype, per, triton_fp8.block_maxima, triton_fp8.divide)
    return _quantized(x, dtype, per, _block_maxima, _divide)


def _quantized(x, dtype, per, block_maxima, divide):
    # The zero that is added changes no maximum, and is the maximum of no rows.
    largest = block_maxima(x)
    if per == "tensor":
        largest = F.pad(largest.flatten(), (0, 1)).amax()
    elif per == "head":
        largest = F.pad(largest, (0, 1)).amax(-1)
    # A scale is at least the smallest normal float32, so that no quotient exceeds the limit by half a step.
    scale = (largest / torch.finfo(dtype).max).clamp_(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(largest == 0, 1.0, scale)
    return divide(x, reference.scale_by_block(scale, x), dtype), scale


def _block_maxima(x):
    rows = x.shape[2]
    of_row = torch.linalg.vector_norm(x, torch.inf, dim=-1, dtype=torch.float32)
    return F.pad(of_row, (0, -rows % FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK)).amax(-1)


def _divide(x, scale, dtype):
    return (x / reference.row_scales(scale, (0, x.shape[2]))).to(dtype)


def ffpa_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    v_transposed: bool = False,
    causal: bool | str = False,
    align: str = "bottom_right",
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    return_max_logits: bool = False,
    **unknown,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Computes attention of q * q_scale, k * k_scale, v * v_scale, as ffpa does, from 8-bit floats, without gradients.

    q [B, Hq, Nq, D], k [B, Hkv, Nk, D], v [B, Hkv, Nk, Dv], all float8_e4m3fn or all float8_e5m2, unit stride on the
    last dim; D and Dv multiples of 8, on a GPU (sm_89 and newer) up to 256, on Hopper up to 512.
    Returns [B, Hq, Nq, Dv], and with return_lse the natural-log sum of exponentials, float32 [B, Hq, Nq].

    q_scale, …    float32, of shape [] or [1] for the tensor, [B, H] for its heads, or [B, H, ceil(N / 128)] for blocks
                  of 128 rows, as quantize_fp8 gives them; None = 1. Those of q and k are 0 or more (checked on a GPU
                  under FFPA_CHECK=1 alone).
    out_dtype     bfloat16, float16, float32, or an 8-bit type, which saturates at its largest finite number.
    v_transposed  v is [B, Hkv, Dv, Nk].

    causal, align, scale (of scores), window, softcap, sinks and return_max_logits are those of ffpa. A row that sees no
    key gives 0, LSE -inf, or its sink.
    On a GPU the probabilities too are rounded to the inputs' type before they meet v.
    """
    if unknown:
        words.refuse(ffpa_fp8, unknown)
    tensors = {"q": q, "k": k, "v": v}
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    arguments.only_tensors(**tensors)
    arguments.tensors_or_none(**scales, sinks=sinks)
    fp8_checks.no_grad(**tensors, **scales, sinks=sinks)
    fp8_checks.output_type(out_dtype)
    name = forms.operator_name("fp8_forward", return_max_logits)
    of_scores = *scales.values(), sinks
    out, lse, *largest = dispatch_keys.at_once(name, q, k, v, *of_scores)(
        q, k, v, *of_scores, scale=arguments.scale(scale), **arguments.visibility(causal, align, window), softcap=arguments.softcap(softcap), out_dtype=out_dtype,
        v_transposed=arguments.flag("v_transposed", v_transposed), return_lse=arguments.flag("return_lse", return_lse),
    )  # fmt: skip
    return forms.results(out, lse, largest, return_lse)
