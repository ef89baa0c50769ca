"""Checks a problem of 8-bit floats: the call is held to the bound of test_fp8.py."""

from __future__ import annotations

import campaign_tensors as tensors
import ffpa_attn
import test_fp8
import torch
from campaign_check import Refused, Wrong, running
from campaign_problems import Problem


def _quantised(p: Problem, heads: int, rows: int, columns: int, per: str | None, seed: int, device):
    """Magnitudes differ by factors of 1 to 4 between heads and blocks, so that no scale stands in for another."""
    x = tensors.normal((p.batch, heads, rows, columns), p.seed * 7 + seed, device)
    head = torch.arange(p.batch * heads, device=device).view(p.batch, heads, 1, 1)
    block = torch.arange(rows, device=device)[:, None] // test_fp8.BLOCK
    x = x * 2.0 ** ((head + 2 * block) % 3)
    dtype = tensors.DTYPES[p.dtype]
    return (x.clamp(-8, 8).to(dtype), None) if per is None else ffpa_attn.quantize_fp8(x, dtype, per)


def run_fp8(p: Problem):
    """Returns (results by name, (what q, k and v mean, sinks))."""
    device = "cuda" if p.device == "cuda" else "cpu"
    with running(p), torch.no_grad():
        sizes = ((p.heads_q, p.n_q, p.d), (p.heads_kv, p.n_k, p.d), (p.heads_kv, p.n_k, p.d_v))
        made = [_quantised(p, *size, per, i, device) for i, (size, per) in enumerate(zip(sizes, p.scales, strict=True))]
        (q, q_scale), (k, k_scale), (v, v_scale) = made
        given = v.mT.contiguous() if p.v_transposed else v
        out_dtype = tensors.DTYPES[p.out_dtype]
        meant = [test_fp8.dequantised(x, scale) for x, scale in made]
        sinks = tensors.make_sinks(p.sinks, p, *meant[:2]).view if p.sinks else None
        try:
            results = ffpa_attn.ffpa_fp8(
                q, k, given, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out_dtype=out_dtype, v_transposed=p.v_transposed,
                return_lse=True, sinks=sinks, return_max_logits=p.max_logits, **p.rule,
            )  # fmt: skip
        except NotImplementedError as error:
            raise Refused(str(error)) from None
    return dict(zip(("out", "lse", "max_logits"), results, strict=False)), (*meant, sinks)


def check_fp8(p: Problem) -> str:
    results, (*meant, sinks) = run_fp8(p)
    with torch.no_grad():
        path = p.backend if p.backend != "auto" else "triton" if max(p.d, p.d_v) <= 128 else "hopper"
        dtype, largest = tensors.DTYPES[p.dtype], results.get("max_logits")
        try:
            test_fp8.assert_right(
                results["out"], results["lse"], *meant, dtype, path, sinks=sinks, largest=largest, **p.rule
            )
        except AssertionError as error:
            raise Wrong(str(error)) from None
    return p.backend
