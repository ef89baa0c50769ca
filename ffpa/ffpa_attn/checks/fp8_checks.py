"""This module checks what the 8-bit functions take. Its messages are like those of arguments.py."""

from __future__ import annotations

import torch

from ..specs.problem import FP8_BLOCK
from . import arguments

_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32, *arguments.FP8)


def inputs(q, k, v, scales, out_dtype, v_transposed: bool) -> None:
    """Checks the inputs; `scales` are those of q, k and v, each a tensor or None."""
    arguments.has_rank("v", v, 4, "[B, H, D, N] (v_transposed=True)" if v_transposed else "[B, H, N, D]")
    if k.dim() == 4:
        _orientation(v, k.shape[2], v_transposed)
    arguments.dense(q, k, v.mT if v_transposed else v, None, "BHND", arguments.FP8)
    for name, x, scale in zip("qkv", (q, k, v), scales, strict=True):
        if scale is not None:
            rows = k.shape[2] if name == "v" else x.shape[2]
            _scale(f"{name}_scale", scale, name, x, (*x.shape[:2], -(-rows // FP8_BLOCK)))
    output_type(out_dtype)


def scale_values(q_scale, k_scale, wait: bool) -> None:
    """Checks that scales are not negative; it looks at scales on a GPU, which waits for it, only where asked to."""
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
        if scale is not None and (wait or scale.device.type == "cpu") and bool((scale < 0).any()):
            raise ValueError(
                f"`{name}` holds {scale.min().item():g}; scales of q and k are 0 or more: turn the signs of {name[0]} instead"
            )


def output_type(out_dtype) -> None:
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"`out_dtype` is {arguments.described(out_dtype)}; pass one of {arguments.names_of(_OUTPUTS)}")
    if out_dtype not in _OUTPUTS:
        raise TypeError(
            f"`out_dtype` is {out_dtype}; allowed: {arguments.names_of(_OUTPUTS)}; cast the result afterwards"
        )


def _orientation(v, keys: int, transposed: bool) -> None:
    found, other = (v.shape[3], v.shape[2]) if transposed else (v.shape[2], v.shape[3])
    if found == keys:
        return
    way, other_way = ("[B, H, Dv, Nk]", "[B, H, Nk, Dv]") if transposed else ("[B, H, Nk, Dv]", "[B, H, Dv, Nk]")
    said = f"`v` has shape {tuple(v.shape)}, read as {way} (v_transposed={transposed}): {found} rows but `k` has {keys}"
    if other == keys:
        raise ValueError(f"{said}; it looks like {other_way}: pass v_transposed={not transposed}, or v.mT.contiguous()")
    raise ValueError(f"{said}; each key needs one value")


def _scale(name: str, scale, of: str, x, blocks: tuple) -> None:
    arguments.has_dtype(name, scale, torch.float32, f": {name}.float()")
    arguments.is_where(name, scale, of, x)
    if tuple(scale.shape) not in ((), (1,), blocks[:2], blocks):
        raise ValueError(
            f"`{name}` has shape {tuple(scale.shape)}; allowed: () or (1,) for the tensor, [B, H] = {blocks[:2]} for its heads, "
            f"[B, H, ceil(N / {FP8_BLOCK})] = {blocks} for blocks of {FP8_BLOCK} rows; ffpa_attn.quantize_fp8 makes them"
        )


def no_grad(**named) -> None:
    if not torch.is_grad_enabled():
        return
    for name, x in named.items():
        if x is not None and x.requires_grad:
            raise ValueError(
                f"`{name}` requires grad, and ffpa_fp8 has no gradients; pass {name}.detach(), call under "
                "torch.no_grad(), or train with ffpa"
            )


def to_quantize(x, dtype) -> None:
    arguments.has_rank("x", x, 4, "[B, H, N, D]")
    allowed = (*arguments.DTYPES, torch.float32)
    if x.dtype not in allowed:
        names = arguments.names_of(allowed)
        raise TypeError(f"`x` has dtype {x.dtype}; allowed: {names}; cast with .to(torch.float32)")
    if not x.shape[3]:
        raise ValueError("`x` has head dim 0; it needs at least one column")
    if dtype not in arguments.FP8:
        raise TypeError(f"`dtype` is {dtype}; allowed: {arguments.names_of(arguments.FP8)}")
