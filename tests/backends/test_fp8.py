"""Tests 8-bit floats: ffpa_fp8 against float64 attention of dequantised values, quantize_fp8, and what they refuse."""

import math
import re

import oracle
import pytest
import torch
from ffpa_attn import env, ffpa_fp8, fp8, quantize_fp8
from ffpa_attn.backends import choice, triton_fp8
from ffpa_attn.launching import native
from ffpa_attn.operators import ops
from ffpa_attn.specs.problem import Problem, Visibility
from ffpa_attn.testing import emulate
from ffpa_attn.triton_ops import launch as triton_launch
from torch._dynamo.testing import CompileCounterWithBackend

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32, E4M3, E5M2)
BLOCK = 128
HOPPER_SUM = 2.0**-13  # Hopper's tensor cores keep so much of a sum of 32 products of 8-bit floats
F32_SUM = 2.0**-24
LEAST_NORMAL = 2.0**-126  # a P below it may be 0
# Where references are integers, P = 1 may be as little as this part of the unit.
LEAST_OF_UNIT = {"triton": 1.0, "hopper": 2.0**-0.25}
P_UNIT = {torch.float8_e4m3fn: 2.0**8, torch.float8_e5m2: 2.0**15}  # what P = 1 is before it is rounded

TESTS_IN_A_ROW = 64  # tests that one process runs: they share kernels, seconds each, and a process compiles its own


# ---- both paths ----


@pytest.fixture(params=["reference", "triton", "hopper"])
def path(request, monkeypatch) -> str:
    device = request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"
    launches, run = [], ops.run
    if request.param == "hopper":
        if device == "cuda" and (torch.cuda.get_device_capability() != (9, 0) or native.record() is None):
            pytest.skip("needs a Hopper GPU and a built library")
        if device == "cpu":
            monkeypatch.setenv("FFPA_EMULATE", "sm_90a")
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton is an extra")
        if device == "cpu" and torch.cuda.is_available():
            pytest.skip("where there is a GPU, Triton compiles for it and interprets nothing")
        if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this GPU has no 8-bit floats")
        if device == "cpu":
            monkeypatch.setenv("TRITON_INTERPRET", "1")

    def noted(plan, *args, **more):
        launches.append(plan.choice.backend)
        run(plan, *args, **more)

    monkeypatch.setattr(ops, "run", noted)
    monkeypatch.setenv("FFPA_BACKEND", request.param)
    yield request.param
    if request.param != "reference":
        assert request.param in launches, "the kernel was never launched"


def dequantised(x8, scale):
    """Returns x8 * scale in float64, written row by row."""
    if scale is None:
        return x8.double()
    scale = scale.double()
    if scale.numel() == 1 and scale.dim() < 2:
        return x8.double() * scale.reshape(())
    if scale.dim() == 2:
        return x8.double() * scale[:, :, None, None]
    rows = torch.arange(x8.shape[2], device=x8.device) // BLOCK
    return x8.double() * scale[:, :, rows, None]


def half_ulp(x, dtype):
    """Returns half an ulp, at most, of numbers as large as |x|: that of normal numbers, or of the smallest."""
    info = torch.finfo(dtype)
    return torch.maximum(x.abs() * (info.eps / 2), torch.full_like(x, info.smallest_normal * info.eps / 2))


def probabilities(q, k, scale, rule):
    """Returns (P, each row's sum of exp(score - largest), the largest sum of |scale q k| of a score), in float64."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    eye = torch.eye(k.shape[2], dtype=torch.float64, device=q.device).expand(*k.shape[:3], -1)
    p, _ = oracle.attention(q, k, eye, scale=scale, **rule)
    total = 1 / p.amax(-1, keepdim=True) if p.shape[-1] else p.new_ones(*p.shape[:3], 1)
    products = q.abs() @ k.abs().mT * abs(q.shape[-1] ** -0.5 if scale is None else scale)
    return p, total, float(products.max()) if products.numel() else 0.0


def assert_right(got, lse, q, k, v, dtype, path, scale=None, sinks=None, largest=None, **rule):
    """Checks a result; q, k, v: what the 8-bit tensors mean, float64; lse and largest logits may be None.

    The only error beyond that of float32 sums is that of P, rounded to `dtype` before it meets V by our kernels: half a
    unit in the last place of each exp(score - largest). It is bounded for each element, all rounded in the worst
    direction; and for all elements together, where rounding is as likely up as down: the squares add up, and a mean
    square of a third of the largest is what evenly spread rounding has, so the bound has room for three times that.
    """
    want, want_lse = oracle.attention(q, k, v, scale=scale, sinks=sinks, **rule)
    out_dtype = got.dtype
    assert got.shape == want.shape and got.is_contiguous()
    got, most = got.double(), torch.finfo(out_dtype).max
    empty = torch.isneginf(want_lse)
    assert torch.isfinite(got).all() and (got[empty] == 0).all()

    p, total, products = probabilities(q, k, scale, {**rule, "sinks": sinks})
    mean = want
    if sinks is not None and path == "hopper":  # a sink takes its share of a result that has been divided
        mean, _ = oracle.attention(q, k, v, scale=scale, **rule)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    on_tensor_cores = q.is_cuda and path != "reference"
    unit, terms = (HOPPER_SUM, -(-q.shape[3] // 32)) if on_tensor_cores else (F32_SUM, q.shape[3])
    score_error = (terms + 8) * unit * products + 2.0**-20
    sum_error = 2 * score_error + ((min(k.shape[2], 128) // 32 if on_tensor_cores else k.shape[2]) + 8) * unit
    weighed = p @ v.abs()
    tiny = torch.where(p < LEAST_NORMAL * (1 + sum_error), p, 0.0)  # beside a sink that may be all that a row has
    exact = sum_error * weighed + tiny @ v.abs()
    rounded = torch.zeros_like(want)
    spread = torch.zeros_like(want)
    if path != "reference":
        seen = (p > 0).double()
        relative, least = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
        least /= P_UNIT[dtype] * LEAST_OF_UNIT[path]

        def squares(weights):
            """Returns the sum of the squares of how far values are from their mean, so weighed."""
            found = weights @ v.square() - 2 * mean * (weights @ v) + mean.square() * weights.sum(-1, keepdim=True)
            return found.clamp(min=0)

        # As it is divided by the sum of the rounded P, a row errs in how far its values are from their mean.
        deviation, counted = squares(p).sqrt(), squares(seen)
        few = least / total * (seen.sum(-1, keepdim=True) * counted).sqrt()
        rounded = (relative * deviation + few) / (1 - relative)
        spread = squares((relative * p + least * seen / total).square()) / (1 - relative) ** 2

    allowed = exact + rounded
    allowed = allowed + half_ulp(want.abs() + allowed, out_dtype)
    clamped = want.clamp(-most, most)
    error = (got - clamped).abs()
    assert (error <= allowed).all(), f"{int((error > allowed).sum())} of {error.numel()} too far off: {error.max():.3g}"
    if error.numel() > 1000:
        together = spread + (exact + half_ulp(want, out_dtype)).square()
        assert error.square().mean().sqrt() <= together.mean().sqrt(), "far off, all in all"

    if lse is not None:
        assert lse.dtype == torch.float32 and lse.shape == want_lse.shape
        assert torch.equal(torch.isneginf(lse), empty)
        error = (lse.double() - want_lse)[~empty].abs()
        assert (error <= sum_error + 2.0**-22 * want_lse[~empty].abs()).all()
    if largest is not None:
        want = oracle.largest_scores(q, k, scale=scale, **rule)
        assert largest.dtype == torch.float32 and largest.shape == want.shape
        assert torch.equal(torch.isneginf(largest), torch.isneginf(want))
        error = (largest.double() - want)[torch.isfinite(want)].abs()
        assert (error <= score_error + 2.0**-22 * want[torch.isfinite(want)].abs()).all(), "largest logits"


def random8(shape, dtype, per, device, seed):
    """Returns (x8, scale); heads and blocks differ by factors of 1 to 4: no scale stands in for another."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    heads = torch.arange(shape[0] * shape[1]).view(*shape[:2], 1, 1)
    blocks = torch.arange(shape[2])[:, None] // BLOCK
    x = (x * 2.0 ** ((heads + 2 * blocks) % 3)).to(device)
    if per is None:
        return x.clamp(-8, 8).to(dtype), None
    return quantize_fp8(x, dtype, per)


def run(
    device, path, dtype, *, heads=(2, 2), n=(200, 200), d=64, d_v=None, per=("tensor",) * 3, v_transposed=False,
    out_dtype=torch.float32, batch=2, **rule,
):  # fmt: skip
    (q, qs), (k, ks), (v, vs) = (
        random8((batch, h, rows, width), dtype, one, device, seed)
        for seed, (h, rows, width, one) in enumerate(
            zip((heads[0], heads[1], heads[1]), (n[0], n[1], n[1]), (d, d, d_v or d), per, strict=True)
        )
    )
    given = v.mT.contiguous() if v_transposed else v
    out, lse = ffpa_fp8(
        q, k, given, q_scale=qs, k_scale=ks, v_scale=vs, out_dtype=out_dtype, v_transposed=v_transposed,
        return_lse=True, **rule,
    )  # fmt: skip
    assert out.dtype == out_dtype
    meant = [dequantised(x, scale) for x, scale in ((q, qs), (k, ks), (v, vs))]
    assert_right(out, lse, *meant, dtype, path, **rule)


RULES = {
    "all": {},
    "causal": {"causal": True},
    "bottom_right": {"causal": True, "n": (70, 200)},
    "top_left": {"causal": True, "align": "top_left", "n": (70, 200)},
    "bottom_right_empty_rows": {"causal": True, "n": (200, 70)},
    "top_left_more_rows": {"causal": True, "align": "top_left", "n": (200, 70)},
    "window": {"window": (40, 9)},
    "window_top_left": {"window": (20, 0), "align": "top_left", "n": (130, 90)},
    "causal_window": {"causal": True, "window": (33, -1)},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.05, "causal": True},
    "negative_scale": {"scale": -0.05},
    "gqa": {"heads": (4, 2), "causal": True},
    "one_row": {"n": (1, 260), "heads": (4, 2), "causal": True},
    "one_key": {"n": (33, 1)},
    "no_keys": {"n": (33, 0)},
    "d72": {"d": 72, "d_v": 64},
    "d128": {"d": 128, "d_v": 72},
    "d8": {"d": 8, "d_v": 128},
    "v_transposed": {"n": (140, 256), "heads": (4, 2), "v_transposed": True},
    "v_transposed_causal": {"n": (150, 208), "heads": (4, 2), "v_transposed": True, "causal": True, "d": 80, "d_v": 40},
    "v_transposed_odd": {"n": (70, 90), "v_transposed": True, "causal": True},
    "three_blocks": {"n": (300, 290), "batch": 1, "per": ("block",) * 3},
}


# Types take turns in the interpreter, which takes seconds for each.
TYPED_RULES = [
    pytest.param(rule, dtype, id=f"{name}-{dtype}")
    for i, (name, rule) in enumerate(RULES.items())
    for dtype in ((E4M3, E5M2) if torch.cuda.is_available() else ((E4M3, E5M2)[i % 2],))
]


@pytest.mark.parametrize("rule, dtype", TYPED_RULES)
def test_rules(rule, dtype, device, path):
    run(device, path, dtype, **{"heads": (2, 1), **rule})


# Head dims past Triton's have tiles of their own, which Q and K or V may not fill; TMA cannot read some rows.
WIDE = [
    {"d": 512, "n": (70, 200)},
    {"d": 512, "n": (130, 300), "causal": True, "heads": (4, 2), "per": ("block",) * 3},
    {"d": 448, "n": (65, 129)},
    {"d": 384, "n": (200, 400), "window": (40, 9)},
    {"d": 320, "n": (33, 257), "v_transposed": True},
    {"d": 264, "d_v": 512, "n": (70, 140)},
    {"d": 512, "d_v": 40, "n": (66, 90)},
    {"d": 192, "d_v": 128, "n": (100, 300), "causal": True},
    {"d": 256, "n": (130, 200), "window": (50, 3)},
    {"d": 392, "d_v": 328, "n": (100, 130), "per": ("block",) * 3, "softcap": 5.0},
]


@pytest.mark.parametrize("seed", [0, 1, 5])
@pytest.mark.parametrize("case", WIDE, ids=lambda case: f"d{case['d']}-{case.get('d_v', case['d'])}")
def test_wide_heads(case, seed, device, monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    if device == "cuda":
        if torch.cuda.get_device_capability() != (9, 0) or native.record() is None:
            pytest.skip("needs a Hopper GPU and a built library")
        return run(device, "hopper", (E4M3, E5M2)[seed % 2], **case)
    with emulate("sm_90a", seed=seed) as reports:
        run(device, "hopper", E4M3 if seed else E5M2, batch=1, **case)
    assert [report["kernel"].partition("_e")[0] for report in reports] == [
        "forward_arrange_values",
        "forward_wgmma_fp8",
    ]
    assert max(report["bank_conflict_ratio"] for report in reports) <= 1.01


PER = [None, "tensor", "head", "block"]


@pytest.mark.parametrize("v_transposed", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    "per",
    [*((one,) * 3 for one in PER), ("block", None, "head"), ("head", "block", "tensor"), (None, "head", "block")],
    ids=str,
)
def test_scales(per, dtype, v_transposed, device, path):
    run(device, path, dtype, per=per, v_transposed=v_transposed, heads=(4, 2), n=(140, 200), d_v=72, batch=1)


@pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_outputs(dtype, out_dtype, device, path):
    run(device, path, dtype, out_dtype=out_dtype, per=("block",) * 3, n=(130, 200), causal=True, batch=1)


@pytest.mark.parametrize("out_dtype", [E4M3, E5M2], ids=str)
def test_outputs_saturate(out_dtype, device, path):
    q, k, v = (random8((1, 2, 40, 16), E4M3, None, device, seed)[0] for seed in range(3))
    v = (v.float().abs() + 1).to(E4M3)
    v_scale = torch.tensor([[1e6, -1e6]], device=device)
    out = ffpa_fp8(q, k, v, v_scale=v_scale, out_dtype=out_dtype).float()
    largest = torch.finfo(out_dtype).max
    assert (out[:, 0] == largest).all() and (out[:, 1] == -largest).all()


@pytest.mark.parametrize(
    "shape", [(1, 2, 128, 64), (2, 4, 256, 64), *([(4, 8, 512, 128)] * torch.cuda.is_available())], ids=str
)
def test_all_in_e4m3_with_a_transposed_v(shape, device, path):
    """Other code calls it so: q and k are [B * H, N, D], v is [B * H, D, N]; no scales, e4m3 out."""
    batch, heads, n, d = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch * heads, n, d, generator=generator).to(device, E4M3) for _ in range(3))
    v_by_column = v.mT.contiguous()
    out = ffpa_fp8(
        q.view(shape), k.view(shape), v_by_column.view(batch, heads, d, n), v_transposed=True, out_dtype=E4M3
    )
    assert out.dtype == E4M3
    assert_right(out, None, *(x.view(shape).double() for x in (q, k, v)), E4M3, path)


def test_strided_inputs_are_read_where_they_lie(device, path):
    """The inputs are chunks of one packed tensor, and heads expanded from one."""
    qkv, _ = random8((1, 2, 90, 3 * 24), E4M3, None, device, 5)
    q, k, v = qkv.chunk(3, -1)
    k = k[:, :1].expand(-1, 2, -1, -1)
    out, lse = ffpa_fp8(q, k, v, out_dtype=torch.float32, return_lse=True)
    assert_right(out, lse, q.double(), k.double(), v.double(), E4M3, path)


def test_without_lse(device, path):
    q, k, v = (random8((1, 2, 50, 16), E4M3, None, device, seed)[0] for seed in range(3))
    assert torch.equal(ffpa_fp8(q, k, v, causal=True), ffpa_fp8(q, k, v, causal=True, return_lse=True)[0])


@pytest.mark.parametrize("scale", [0.0, 1e-25, 1e-30, 1e-38])
def test_scales_of_nearly_nothing(scale, device, path):
    """All keys count alike, and hidden ones not at all."""
    q, k, v = (random8((1, 2, 50, 16), E4M3, None, device, seed)[0] for seed in range(3))
    tiny = torch.tensor(scale, device=device)
    for per_block in (tiny, tiny.expand(1, 2, 1)):
        out, lse = ffpa_fp8(
            q, k, v, q_scale=tiny, k_scale=per_block, causal=True, out_dtype=torch.float32, return_lse=True
        )
        want, want_lse = oracle.attention(q.float(), k.float(), v.float(), causal=True, scale=0.0)
        torch.testing.assert_close(out.double(), want, atol=2.0**-6, rtol=0)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["q_scale", "k_scale"])
def test_negative_scales_are_refused(name, device, monkeypatch):
    q, k, v = (random8((1, 2, 50, 16), E4M3, None, device, seed)[0] for seed in range(3))
    monkeypatch.setenv("FFPA_CHECK", "1")
    with pytest.raises(ValueError, match=f"`{name}` holds -1; scales of q and k are 0 or more"):
        ffpa_fp8(q, k, v, **{name: torch.tensor([[1.0, -1.0]], device=device)})


def test_long_rows_are_divided_by_all_of_their_sum(device, path):
    """A sum in the 14 bits of Hopper's products would have lost a tenth of it."""
    n = 16384 if device == "cuda" else 700
    q, k = (random8((1, 1, rows, 64), E4M3, None, device, seed)[0] for seed, rows in enumerate((70, n)))
    ones = torch.ones(1, 1, n, 64, device=device).to(E4M3)
    out, lse = ffpa_fp8(q, k, ones, out_dtype=torch.float32, return_lse=True)
    torch.testing.assert_close(out, torch.ones_like(out), atol=1e-5, rtol=0)
    want = torch.logsumexp(q.double() @ k.double().mT / 8, -1)
    # Products reach 150, and Hopper adds them in 14 bits: an H200 errs by 2.5e-3, a model with a bit less by 4.1e-3.
    torch.testing.assert_close(lse.double(), want, atol=4e-3 if device == "cuda" else 1e-5, rtol=0)


def test_what_hoppers_sums_lose_is_the_same_part_of_values_and_of_p(monkeypatch):
    """14 bits lose 6e-4 of either, and so nothing of their quotient."""
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    q, k = (random8((1, 1, rows, 192), E4M3, None, "cpu", seed)[0] for seed, rows in enumerate((20, 300)))
    ones = torch.ones(1, 1, 300, 192).to(E4M3)
    with emulate("sm_90a", exact=True):
        out = ffpa_fp8(q, k, ones, out_dtype=torch.float32)
    torch.testing.assert_close(out, torch.ones_like(out), atol=1e-6, rtol=0)


@pytest.mark.parametrize("out_dtype", [torch.float32, E4M3, E5M2], ids=str)
def test_nan_stays(out_dtype, device, path):
    q, k, v = (random8((1, 1, 40, 16), E4M3, None, device, seed)[0] for seed in range(3))
    q = q.float()
    q[0, 0, 3, 5] = torch.nan
    out, lse = ffpa_fp8(q.to(E4M3), k, v, out_dtype=out_dtype, return_lse=True)
    assert out[0, 0, 3].isnan().all() and lse[0, 0, 3].isnan()
    assert out.isnan().sum() == 16 and lse.isnan().sum() == 1


def test_shapes_of_one_scale(device, path):
    """[] and [1] say the same as a scale for each head or block."""
    q, k, v = (random8((2, 2, 150, 16), E4M3, None, device, seed)[0] for seed in range(3))
    two = torch.tensor(2.0, device=device)
    outs = [ffpa_fp8(q, k, v, q_scale=two.expand(shape)) for shape in ((), (1,), (2, 2), (2, 2, 2))]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert not torch.equal(outs[0], ffpa_fp8(q, k, v))


def test_a_small_workspace_changes_nothing_but_speed(monkeypatch):
    """Tiles have a few rows: blocks of scales start and end inside of them."""
    monkeypatch.setenv("FFPA_WORKSPACE_MB", "1")
    run("cpu", "reference", E4M3, n=(150, 3000), d=256, per=("block",) * 3, causal=True, batch=1)


def test_rows_of_scales():
    """Any piece of the rows has its scales, wherever the blocks of scales begin."""
    from ffpa_attn.backends import reference

    scale = torch.arange(6.0).view(2, 3)
    whole = scale.repeat_interleave(BLOCK, 1)[..., None]
    for rows in ((0, 300), (0, 1), (127, 129), (128, 256), (130, 140), (255, 300), (7, 7)):
        assert torch.equal(reference.row_scales(scale, rows), whole[:, rows[0] : rows[1]]), rows


# ---- what the kernel is given ----


def test_what_the_kernel_is_given(monkeypatch):
    calls = []
    monkeypatch.setattr(ops, "run", lambda *args, **more: calls.append(args))
    monkeypatch.setattr(choice.triton_attention, "why_not", lambda: None)
    monkeypatch.setenv("FFPA_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, v = (torch.zeros(shape, dtype=E4M3) for shape in ((2, 4, 50, 64), (2, 2, 200, 64), (2, 2, 72, 200)))
    k_scale, v_scale = torch.rand(2, 2), torch.rand(2, 2, 2)
    options = {"v_transposed": True, "causal": "top_left", "softcap": 3.0, "out_dtype": E5M2}
    ffpa_fp8(q, k, v, k_scale=k_scale, v_scale=v_scale, **options)
    (plan, direction, got_q, got_k, got_v, (q_scale, by_k, by_v), out, lse) = calls[0]
    rule = plan.rule
    assert (plan.choice.backend, direction) == ("triton", "forward_fp8")
    assert (got_q.data_ptr(), got_k.data_ptr(), got_v.data_ptr()) == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert got_v.shape == (2, 2, 200, 72) and got_v.stride(3) == 200
    assert q_scale is None
    assert by_k.shape == (2, 2, 2) and by_k.stride() == (2, 1, 0) and by_k.data_ptr() == k_scale.data_ptr()
    assert by_v.data_ptr() == v_scale.data_ptr() and by_v.shape == (2, 2, 2)
    assert {x.dtype for x in (by_k, by_v)} == {torch.float32}
    assert out.shape == (2, 4, 50, 72) and out.dtype == E5M2 and lse is None
    assert rule == (64**-0.5, 3.0, Visibility(-1, 0, True))
    ffpa_fp8(q, k, v, return_lse=True, **options)
    assert calls[1][-1].shape == (2, 4, 50) and calls[1][-1].dtype == torch.float32


@pytest.mark.parametrize(
    ("n_k", "k_of", "arranged"),
    [(128, "rows", False), (144, "rows", False), (136, "rows", True), (128, "packed heads", True)],
)
@pytest.mark.parametrize("path", ["triton"], indirect=True)
def test_a_transposed_v_is_used_as_it_is(n_k, k_of, arranged, monkeypatch, device, path):
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no TMA")
    launched = []
    launch = triton_launch.launch
    monkeypatch.setattr(
        triton_launch,
        "launch",
        lambda memo, kernel, *args: (launched.append(kernel.__name__), launch(memo, kernel, *args)),
    )
    q, k, v = (random8((1, 2, n, 64), E4M3, None, device, seed)[0] for seed, n in enumerate((40, n_k, n_k)))
    if k_of == "packed heads":
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    transposed = torch.empty(1, 2, 64, -(-n_k // 16) * 16, dtype=E4M3, device=device)[..., :n_k]  # its rows fit TMA
    transposed.copy_(v.mT)
    out = ffpa_fp8(q, k, transposed, v_transposed=True, out_dtype=torch.float32)
    assert ("arrange_values_kernel" in launched) == arranged
    want = ffpa_fp8(q, k, v, out_dtype=torch.float32)
    torch.testing.assert_close(
        out, want, atol=2.0**-7, rtol=0
    )  # tensor cores sum products in groups, now of other keys


# ---- quantize_fp8 ----


@pytest.fixture(params=["torch", "triton"])
def quantizer(request, device, monkeypatch) -> str:
    """Chooses which operators make 8-bit floats."""
    if request.param == "torch":
        monkeypatch.setattr(triton_fp8, "quantizes", lambda x: False)
        return "torch"
    pytest.importorskip("triton", reason="Triton is an extra")
    if device == "cpu":
        if torch.cuda.is_available():
            pytest.skip("where there is a GPU, Triton compiles for it and interprets nothing")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setenv("FFPA_BACKEND", "triton")
    assert triton_fp8.quantizes(torch.ones(1, 1, 1, 8, device=device))
    return "triton"


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
@pytest.mark.parametrize("layout", ["BHND", "BNHD", "every second column"])
def test_both_quantizers_give_the_same_bits(layout, per, device, quantizer):
    x = torch.randn(2, 3, 300, 80, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    x = (
        x[..., ::2]
        if layout == "every second column"
        else x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "BNHD"
        else x
    )
    got, scale = quantize_fp8(x, per=per)
    want, meant = fp8._quantized(x, E4M3, per, fp8._block_maxima, fp8._divide)
    assert torch.equal(scale, meant) and got.stride() == want.stride()
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("of", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_round_trip(of, dtype, per, device, quantizer):
    x = (torch.randn(2, 3, 300, 40, generator=torch.Generator().manual_seed(0)) * 7).to(device, of)
    x8, scale = quantize_fp8(x, dtype, per)
    assert x8.dtype == dtype and x8.shape == x.shape and scale.dtype == torch.float32
    assert scale.shape == {"tensor": (), "head": (2, 3), "block": (2, 3, 3)}[per]
    meant = dequantised(torch.ones_like(x, dtype=torch.float32), scale)
    error = (dequantised(x8, scale) - x.double()).abs()
    # An error is half a unit of 8 bits, and the division's rounding, which may cross the middle of two numbers.
    assert (error <= half_ulp(x.double() / meant, dtype) * meant + 2.0**-22 * x.double().abs()).all()
    again, same = quantize_fp8(x, dtype, per)
    assert torch.equal(again.view(torch.uint8), x8.view(torch.uint8)) and torch.equal(same, scale)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_each_part_has_its_own_largest(dtype, device, quantizer):
    x = torch.ones(1, 2, 260, 8, device=device)
    largest = torch.tensor([[[3.0, 50.0, 7.0], [0.25, 2.0, 900.0]]], device=device)
    for (head, block), row in {(0, 0): 127, (0, 1): 128, (0, 2): 256, (1, 0): 0, (1, 1): 255, (1, 2): 259}.items():
        x[:, head, BLOCK * block : BLOCK * (block + 1)] *= 0.1
        x[0, head, row, 3] = -largest[0, head, block]
    limit = torch.finfo(dtype).max
    for per, want in (("block", largest), ("head", largest.amax(-1)), ("tensor", largest.amax())):
        x8, scale = quantize_fp8(x, dtype, per)
        torch.testing.assert_close(scale, want / limit, rtol=1e-6, atol=0)
        assert x8.float().min() == -limit
    x8 = quantize_fp8(x, dtype, "block")[0].float()
    assert all((part.amin() == -limit) for part in x8[0].flatten(1).split(BLOCK * 8, 1))


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_zeros_have_scale_one(per, device, quantizer):
    x = torch.zeros(1, 2, 200, 16, device=device)
    x8, scale = quantize_fp8(x, per=per)
    assert (scale == 1).all() and (x8.float() == 0).all()
    x[0, 1, 150] = 3.5  # 448 / 128
    x8, scale = quantize_fp8(x, per=per)
    want = {"tensor": 2**-7, "head": [[1, 2**-7]], "block": [[[1, 1], [1, 2**-7]]]}[per]
    assert torch.equal(scale.cpu(), torch.tensor(want)) and torch.equal(dequantised(x8, scale), x.double())


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("size", [1e-45, 8.8e-43, 1.15e-40, 1e-30, 3e38])
def test_numbers_of_any_size(size, dtype, device, quantizer):
    """Where the scale would have few bits in float32, it is the smallest number that has all."""
    x8, scale = quantize_fp8(torch.full((1, 1, 4, 8), size, device=device), dtype)
    assert torch.isfinite(x8.float()).all() and torch.isfinite(scale) and scale > 0


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
@pytest.mark.parametrize("shape", [(1, 2, 0, 8), (0, 2, 5, 8)], ids=str)
def test_no_rows(shape, per, device, quantizer):
    x8, scale = quantize_fp8(torch.zeros(shape, device=device), per=per)
    assert x8.shape == shape and (scale == 1).all()
    out, lse = ffpa_fp8(x8, x8, x8, q_scale=scale, v_scale=scale, return_lse=True) if device == "cpu" else (x8, None)
    assert out.shape == shape and (lse is None or lse.shape == shape[:3])


# ---- the operator ----


def test_opcheck(device, monkeypatch):
    """opcheck compares inputs before and after with torch.allclose, which knows no 8-bit floats."""
    monkeypatch.setenv("FFPA_BACKEND", "reference")
    allclose = torch.allclose

    def of_numbers(a, b, **options):
        a, b = (x.float() if x.dtype in (E4M3, E5M2) else x for x in (a, b))
        return allclose(a, b, **options)

    monkeypatch.setattr(torch, "allclose", of_numbers)
    (q, qs), (k, ks), (v, vs) = (random8((1, 2, 140, 16), E4M3, per, device, 0) for per in ("tensor", "head", "block"))
    forward = torch.ops.ffpa_attn.fp8_forward.default
    for options in (
        {"out_dtype": torch.bfloat16, "causal": True},
        {"out_dtype": torch.float32, "return_lse": False, "softcap": 2.0},
        {"out_dtype": torch.float16, "v_transposed": True},
    ):
        given = v.mT.contiguous() if options.get("v_transposed") else v
        torch.library.opcheck(forward, (q, k, given, qs, ks, vs), options)
        torch.library.opcheck(forward, (q, k, given), options)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    counter = CompileCounterWithBackend("aot_eager")

    def attend(q, k, v):
        (q, qs), (k, ks), (v, vs) = (quantize_fp8(x, per=per) for x, per in ((q, "block"), (k, "head"), (v, "tensor")))
        options = {"causal": True, "out_dtype": E4M3, "return_lse": True}
        return ffpa_fp8(q, k, v, q_scale=qs, k_scale=ks, v_scale=vs, **options)

    compiled, frames = torch.compile(attend, backend=counter, fullgraph=True, dynamic=dynamic), []
    for n in (150, 270, 300) if dynamic else (150,):
        q, k, v = (torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(n)) for _ in range(3))
        (out, lse), (want, want_lse) = compiled(q, k, v), attend(q, k, v)
        assert out.dtype == E4M3 and torch.equal(out.float(), want.float()) and torch.equal(lse, want_lse)
        frames.append(counter.frame_count)
    assert frames == frames[:1] * len(frames) and counter.op_count


def test_fakes_and_meta_tensors():
    q, k = (torch.empty(1, heads, 100, 64, dtype=E4M3, device="meta") for heads in (4, 2))
    v = torch.empty(1, 2, 72, 100, dtype=E4M3, device="meta")
    out, lse = ffpa_fp8(q, k, v, v_transposed=True, out_dtype=torch.float16, return_lse=True)
    assert out.shape == (1, 4, 100, 72) and out.dtype == torch.float16 and lse.shape == (1, 4, 100)


# ---- which path, and what none can ----

PROBLEM = Problem(
    "forward", "cuda", "sm_90", "e4m3", 1, 8, 8, 4096, 4096, 128, 128, None, Visibility(-1, -1, False), 0.1, 0.0, None, True, None, "f32", None
)  # fmt: skip


def chosen(monkeypatch, backend=None, triton=None, **change):
    monkeypatch.setattr(choice.triton_attention, "why_not", lambda: triton)
    if backend:
        monkeypatch.setenv("FFPA_BACKEND", backend)
    return choice.choose(PROBLEM._replace(**change), env.run_flags())


@pytest.mark.parametrize(
    "backend, change, runs",
    [
        (None, {}, "triton"),
        (None, {"arch": "sm_89", "dtype": "e5m2"}, "triton"),
        (None, {"device": "cpu", "arch": None, "d_qk": 512}, "reference"),
        ("triton", {"d_qk": 256}, "triton"),
        (None, {"d_v": 136}, "hopper"),
        (None, {"d_qk": 256, "arch": "sm_89"}, "triton"),
        (None, {"triton": "Triton is not installed"}, "hopper"),
        ("hopper", {}, "hopper"),
        ("reference", {"arch": "sm_80"}, "reference"),
    ],
)
def test_what_runs(backend, change, runs, monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda spec, gpu: None)
    choice = chosen(monkeypatch, backend, **change)
    assert choice.backend == runs and choice.fallback is None
    assert choice.kernel.startswith(
        {"reference": "reference", "hopper": "forward_wgmma_fp8"}.get(runs, "triton_fp8_head_dim")
    )


@pytest.mark.parametrize(
    "backend, change, words",
    [
        (None, {"arch": "sm_80"}, r"none can run forward e4m3 .*not triton: .*sm_89 or newer, and the GPU is sm_80; nor hopper: .*sm_80; or pass bfloat16 tensors to ffpa"),
        (None, {"arch": "sm_86", "dtype": "e5m2"}, "forward e5m2 .*the GPU is sm_86"),
        (None, {"d_qk": 264, "arch": "sm_100"}, "not hopper: .*sm_100; nor triton: .*up to 256 columns and not 264; or pass bfloat16 tensors to ffpa"),
        (None, {"d_qk": 520}, "not hopper: registers hold 512 columns.*; nor triton: .*up to 256 columns and not 520"),
        ("triton", {"d_v": 512}, "up to 256 columns and not 512"),
        ("mma", {}, "not mma: mma knows no 8-bit floats; drop FFPA_BACKEND=mma"),
        (None, {"triton": "Triton is not installed", "arch": "sm_89"}, "Triton is not installed"),
    ],
)  # fmt: skip
def test_what_no_gpu_can(backend, change, words, monkeypatch):
    with pytest.raises(NotImplementedError, match=words):
        chosen(monkeypatch, backend, **change)


def test_what_is_asked_for_in_vain_on_the_cpu(monkeypatch):
    q = torch.ones(1, 1, 4, 8).to(E4M3)
    monkeypatch.setenv("FFPA_BACKEND", "triton")
    assert "set TRITON_INTERPRET=1" in chosen(monkeypatch, device="cpu", arch=None).fallback
    assert (ffpa_fp8(q, q, q).float() == 1).all()
    monkeypatch.setenv("FFPA_STRICT", "1")
    with pytest.raises(NotImplementedError, match="FFPA_STRICT=1.*FFPA_BACKEND=triton is ignored"):
        ffpa_fp8(q, q, q)


# ---- bad input ----


def t(*shape, dtype=E4M3, device="cpu"):
    return torch.ones(shape, device=device).to(dtype)


def f32(*shape, device="cpu"):
    return torch.ones(shape, device=device)


def call(q=None, k=None, v=None, **keywords):
    """Calls ffpa_fp8, with good tensors where none is given: two blocks of rows of q, three of k."""
    q = t(2, 4, 200, 64) if q is None else q
    k, v = (t(2, 2, 300, 64) if x is None else x for x in (k, v))
    return ffpa_fp8(q, k, v, **keywords)


BAD = [
    ("q is None", lambda: ffpa_fp8(None, t(1), t(1)), TypeError, "`q` is None.*torch.Tensor"),
    ("k_scale a number", lambda: call(k_scale=0.5), TypeError, "`k_scale` is 0.5.*torch.Tensor"),
    ("q in bfloat16", lambda: call(t(2, 4, 200, 64, dtype=torch.bfloat16)), TypeError, "`q` has dtype torch.bfloat16; allowed: torch.float8_e4m3fn, torch.float8_e5m2; .*quantize_fp8.*ffpa"),
    ("another 8-bit type", lambda: call(t(2, 4, 200, 64, dtype=torch.float8_e4m3fnuz)), TypeError, "`q` has dtype torch.float8_e4m3fnuz; allowed"),
    ("mixed types", lambda: call(v=t(2, 2, 300, 64, dtype=E5M2)), TypeError, "`v` has dtype torch.float8_e5m2 but `q` has torch.float8_e4m3fn"),
    ("k elsewhere", lambda: call(k=t(2, 2, 300, 64, device="meta")), ValueError, "`k` is on meta but `q` is on cpu"),
    ("3-D q", lambda: call(t(4, 200, 64)), ValueError, r"`q` has 3 dims.*\[B, H, N, D\]"),
    ("3-D v transposed", lambda: call(v=t(2, 64, 300), v_transposed=True), ValueError, r"`v` has 3 dims.*\[B, H, D, N\] \(v_transposed=True\)"),
    ("head dims", lambda: call(k=t(2, 2, 300, 72)), ValueError, "`k` has head dim 72 but `q` has 64"),
    ("head dim 60", lambda: call(t(2, 4, 200, 60), t(2, 2, 300, 60)), ValueError, "`q` has head dim 60; allowed: multiples of 8"),
    ("heads", lambda: call(t(2, 3, 200, 64)), ValueError, "`q` has 3 heads but `k` has 2"),
    ("v not transposed as said", lambda: call(v_transposed=True), ValueError, r"`v` has shape \(2, 2, 300, 64\), read as \[B, H, Dv, Nk\] \(v_transposed=True\): 64 rows but `k` has 300; it looks like \[B, H, Nk, Dv\]: pass v_transposed=False"),
    ("v transposed and not said", lambda: call(v=t(2, 2, 64, 300)), ValueError, r"`v` has shape \(2, 2, 64, 300\).*it looks like \[B, H, Dv, Nk\]: pass v_transposed=True"),
    ("rows of v", lambda: call(v=t(2, 2, 299, 64)), ValueError, "v_transposed=False.: 299 rows but `k` has 300; each key needs one value"),
    ("v_transposed a number", lambda: call(v_transposed=1), TypeError, r"`v_transposed` is 1 \(int\); pass True or False"),
    ("q strided", lambda: call(t(2, 4, 200, 128)[..., ::2]), ValueError, r"`q` has stride 2 in its last dim; it must be 1; .*q.contiguous\(\)"),
    ("v turned by a view", lambda: call(v=t(2, 2, 64, 300).mT), ValueError, "`v` has stride 300 in its last dim"),
    ("scale in float64", lambda: call(q_scale=torch.ones((), dtype=torch.float64)), TypeError, r"`q_scale` has dtype torch.float64; it must be torch.float32: q_scale.float\(\)"),
    ("scale elsewhere", lambda: call(v_scale=f32(device="meta")), ValueError, r"`v_scale` is on meta but `v` is on cpu; move it: v_scale.to\(v.device\)"),
    ("scale by q's heads for k", lambda: call(k_scale=f32(2, 4)), ValueError, r"`k_scale` has shape \(2, 4\); allowed: .*\(2, 2\).*\(2, 2, 3\) for blocks of 128 rows.*quantize_fp8"),
    ("too few blocks", lambda: call(q_scale=f32(2, 4, 1)), ValueError, r"`q_scale` has shape \(2, 4, 1\).*\(2, 4, 2\)"),
    ("blocks of a transposed v", lambda: call(v=t(2, 2, 64, 300), v_transposed=True, v_scale=f32(2, 2, 1)), ValueError, r"`v_scale` has shape \(2, 2, 1\).*\(2, 2, 3\)"),
    ("scales of two", lambda: call(q_scale=f32(2)), ValueError, r"`q_scale` has shape \(2,\)"),
    ("scales of columns", lambda: call(q_scale=f32(2, 4, 200, 64)), ValueError, "`q_scale` has shape"),
    ("out_dtype float64", lambda: call(out_dtype=torch.float64), TypeError, "`out_dtype` is torch.float64; allowed: torch.bfloat16, .*torch.float8_e5m2; cast"),
    ("out_dtype a name", lambda: call(out_dtype="bfloat16"), TypeError, r"`out_dtype` is 'bfloat16' \(str\); pass one of"),
    ("grad of q", lambda: call(t(2, 4, 200, 64).requires_grad_()), ValueError, r"`q` requires grad.*ffpa_fp8 has no gradients; pass q.detach\(\).*ffpa"),
    ("grad of a scale", lambda: call(v_scale=f32().requires_grad_()), ValueError, "`v_scale` requires grad"),
    ("grad of what was quantised", lambda: call(quantize_fp8(f32(2, 4, 200, 64).requires_grad_())[0]), ValueError, "`q` requires grad"),
    ("window", lambda: call(window=3), TypeError, "`window` is 3"),
    ("softcap", lambda: call(softcap=-1.0), ValueError, "`softcap` is -1.0"),
    ("scale NaN", lambda: call(scale=math.nan), ValueError, "`scale` is nan"),
    ("align", lambda: call(align="left"), ValueError, "`align` is 'left'"),
    ("causal", lambda: call(causal=1), TypeError, "`causal` is 1"),
    ("return_lse", lambda: call(return_lse="yes"), TypeError, "`return_lse` is 'yes'"),
    ("operator: out_dtype", lambda: torch.ops.ffpa_attn.fp8_forward(t(1, 1, 4, 8), t(1, 1, 4, 8), t(1, 1, 4, 8), out_dtype=torch.int8), TypeError, "`out_dtype` is torch.int8"),
    ("operator: window", lambda: torch.ops.ffpa_attn.fp8_forward(t(1, 1, 4, 8), t(1, 1, 4, 8), t(1, 1, 4, 8), out_dtype=E4M3, window_left=-7), ValueError, "`window` is"),
    ("quantize: not a tensor", lambda: quantize_fp8([1.0]), TypeError, "`x` is list.*torch.Tensor"),
    ("quantize: rank", lambda: quantize_fp8(f32(4, 8)), ValueError, "`x` has 2 dims"),
    ("quantize: float64", lambda: quantize_fp8(f32(1, 1, 4, 8).double()), TypeError, "`x` has dtype torch.float64; allowed: .*torch.float32"),
    ("quantize: no columns", lambda: quantize_fp8(f32(1, 1, 4, 0)), ValueError, "`x` has head dim 0"),
    ("quantize: dtype", lambda: quantize_fp8(f32(1, 1, 4, 8), torch.int8), TypeError, "`dtype` is torch.int8; allowed: torch.float8_e4m3fn, torch.float8_e5m2"),
    ("quantize: per", lambda: quantize_fp8(f32(1, 1, 4, 8), per="row"), ValueError, "`per` is 'row'; allowed: .*tensor.*head.*block"),
]  # fmt: skip


@pytest.mark.parametrize("wrong, call_it, exception, words", BAD, ids=[entry[0] for entry in BAD])
def test_bad_input(wrong, call_it, exception, words):
    with pytest.raises(exception) as caught:
        call_it()
    assert re.search(words, str(caught.value)), f"the message does not say it: {caught.value}"


def test_no_grad_is_enough():
    with torch.no_grad():
        assert not call(t(2, 4, 200, 64).requires_grad_()).requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_quantizing_waits_for_no_gpu():
    x = torch.randn(1, 2, 300, 64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for per in ("tensor", "head", "block"):
            quantize_fp8(x, per=per)
    finally:
        torch.cuda.set_sync_debug_mode("default")
