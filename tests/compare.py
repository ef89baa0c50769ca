"""The one comparator: how far a result may be from the float64 oracle.

The yardstick is PyTorch itself: the same computation, matmuls in the input type and softmax in float32. A result may
err twice as much as that, plus one unit in the last place; NaN and infinities must sit exactly where the oracle has them.
"""

from __future__ import annotations

import oracle
import torch

_MMA_DEPTH = 16  # products that a tensor core adds up before it rounds the sum
_ULP = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-23}


def _matmul(a, b, acc: str):
    """a @ b, accumulated in "f32" or "f16".

    PyTorch has the latter on GPUs alone (torch.backends.cuda.matmul.allow_fp16_accumulation). What it means is the same
    everywhere: the sum is an f16 number, rounded after every 16 products. Rounding is all that makes such sums worse, so
    this is no looser a yardstick than an eager matmul on the tensor cores would be.
    """
    if acc == "f32":
        return a @ b
    total = torch.zeros((), dtype=torch.float16, device=a.device)
    for k in range(0, a.shape[-1], _MMA_DEPTH):
        products = a[..., k : k + _MMA_DEPTH].float() @ b[..., k : k + _MMA_DEPTH, :].float()
        total = (total.float() + products).to(torch.float16)
    return total.expand(*a.shape[:-1], b.shape[-1])


def baseline(
    q, k, v, *, causal=False, align="bottom_right", scale=None, window=(-1, -1), softcap=0.0, mask=None, layout="BHND",
    acc_qk="f32", acc_pv="f32",
):  # fmt: skip
    """PyTorch's own attention in the input type: (out, lse), differentiable. Rows without keys give (0, 0)."""
    if layout == "BNHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = _matmul(q, k.transpose(2, 3), acc_qk).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = ~oracle.visible(q.shape[2], k.shape[2], causal, align, window, q.device)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        scores = scores + mask.float()
        hidden = hidden | (mask == -torch.inf)
    hidden = hidden.expand(scores.shape)
    empty = hidden.all(-1, keepdim=True)
    scores = torch.where(empty, 0.0, scores.masked_fill(hidden, -torch.inf))
    out = _matmul(torch.where(empty, 0.0, torch.softmax(scores, -1)).to(v.dtype), v, acc_pv)
    lse = torch.where(empty, 0.0, scores.logsumexp(-1, keepdim=True) if scores.shape[-1] else 0.0).squeeze(-1)
    return (out.transpose(1, 2) if layout == "BNHD" else out), lse


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, base: torch.Tensor) -> None:
    """got: what we computed; want: the oracle's, float64; base: PyTorch's own, in got's type."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    ulp = _ULP[base.dtype]
    got, want, base = got.detach().double(), want.detach(), base.detach().double()
    for what, is_it in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = is_it(got) != is_it(want)
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ in being {what}"
    finite = torch.isfinite(want)
    got, want, base = got[finite], want[finite], base[finite]
    if not want.numel():
        return
    error, base_error = (got - want).abs(), (base - want).abs()
    allowed = 2 * base_error.max() + ulp * want.abs()
    worst = int((error - allowed).argmax())
    assert (error <= allowed).all(), (
        f"{name}: {int((error > allowed).sum())} of {error.numel()} elements are too far off; worst: {got[worst]:.6g} "
        f"for {want[worst]:.6g}, error {error[worst]:.3g}, allowed {allowed[worst]:.3g}"
    )
    rms, base_rms, size = (float(x.square().mean().sqrt()) for x in (error, base_error, want))
    assert rms <= 2 * base_rms + ulp * size / 2, f"{name}: RMS error {rms:.3g}, PyTorch's own {base_rms:.3g}"


def assert_lse_close(name: str, got: torch.Tensor, want: torch.Tensor, q, k, scale, base=None) -> None:
    """LSE is float32 whatever the inputs: its error is that of float32 sums of D products (and of nothing coarser).

    Where scores are f16 sums, `base` is the baseline's LSE with such sums, and twice its error is allowed as well.
    """
    assert got.dtype == torch.float32, f"{name}: {got.dtype}"
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert torch.equal(torch.isneginf(got), torch.isneginf(want)), f"{name}: -inf in other places"
    finite = torch.isfinite(want)
    assert torch.isfinite(got[finite]).all(), f"{name}: NaN or inf"
    largest = float(q.abs().max() * k.abs().max()) * q.shape[-1] if q.numel() and k.numel() else 0.0
    allowed = 1e-5 + 2.0**-22 * largest * abs(q.shape[-1] ** -0.5 if scale is None else scale)
    if base is not None and finite.any():
        allowed += 2 * float((base.double() - want)[finite].abs().max())
    error = (got.double() - want)[finite].abs()
    assert not error.numel() or error.max() <= allowed, f"{name}: error {error.max():.3g}, allowed {allowed:.3g}"
