"""Triton kernels give for scores and masks of any finite size what softmax in float32 of float32 scores gives."""

import math

import ffpa_attn
import pytest
import torch
from ffpa_attn.backends import triton_attention
from ffpa_attn.operators import ops

pytest.importorskip("triton", reason="Triton is an extra")
interpreter = pytest.importorskip("triton.runtime.interpreter")

_f16, _bf16, _f32 = torch.float16, torch.bfloat16, torch.float32
ULP = 2.0**-23

TESTS_IN_A_ROW = 64  # tests that one process runs: they share kernels, seconds each, and a process compiles its own


@pytest.fixture(autouse=True, params=["forward", "persistent"])
def backend(request, monkeypatch):
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, Triton compiles for it and interprets nothing")
    monkeypatch.setenv("FFPA_BACKEND", "triton")
    if request.param == "persistent":
        monkeypatch.setenv("FFPA_TRITON_CORES", "3")
    ops._plans.clear()
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return request.param


@pytest.fixture(autouse=True, params=[False, True], ids=["apart", "contracted"])
def contracted(request, monkeypatch):
    """Rounds a product and the sum that takes it once, as GPUs' compilers do where they can, or each by itself."""
    if request.param and torch.cuda.is_available():
        pytest.skip("a GPU's compiler decides that by itself")
    builder = interpreter.InterpreterBuilder
    multiply, plain = builder.create_fmul, {"create_fadd": builder.create_fadd, "create_fsub": builder.create_fsub}

    def product(self, a, b):
        result = multiply(self, a, b)
        if result.data.dtype == "float32":
            result.exact = a.data.astype("float64") * b.data.astype("float64")
        return result

    def add(self, a, b, name):
        result = plain[name](self, a, b)
        if hasattr(a, "exact") or hasattr(b, "exact"):
            a, b = (getattr(x, "exact", x.data.astype("float64")) for x in (a, b))
            result.data = (a + b if name == "create_fadd" else a - b).astype("float32")
        return result

    if request.param:
        monkeypatch.setattr(builder, "create_fmul", product)
        for name in plain:
            monkeypatch.setattr(builder, name, lambda self, a, b, name=name: add(self, a, b, name))


def scores_of(q, k, rule) -> torch.Tensor:
    """Returns scores in float32; hidden ones are -inf."""
    scores = (q.float() @ k.float().mT) * rule.get("scale", q.shape[-1] ** -0.5)
    mask = rule.get("mask")
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
    if rule.get("causal"):
        n_q, n_k = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(n_q, n_k, device=q.device).tril(n_k - n_q) == 0, -torch.inf)
    return scores


def softmax_of(scores, v):
    """Returns a float32 softmax, and how far each score's rounding may take it: by columns of V, a row's spread."""
    p = scores.softmax(-1)
    rounding = (scores.where(scores.isfinite(), 0.0).abs() * ULP).clamp(max=80)
    low, high = (scores - rounding).softmax(-1), (scores + rounding).softmax(-1)
    moved = torch.maximum((low - p).abs(), (high - p).abs()) if float(rounding.max()) < 1 else p * 0
    spread = (moved + p * 2 * rounding.amax(-1, keepdim=True).clamp(max=1)).sum(-1, keepdim=True)
    return p @ v.float(), scores.logsumexp(-1), spread.clamp(max=2) * v.float().abs().amax((-1, -2), keepdim=True)


def check(q, k, v, exact: bool, **rule):
    """Checks a result; `exact`: rounding moves all scores of a row alike, or so few that P stays."""
    out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True, **rule)
    want, want_lse, allowed = softmax_of(scores_of(q, k, rule), v)
    assert out.isfinite().all() and lse.isfinite().all()
    slack = (2.0**-7 if q.dtype == _bf16 else 2.0**-9) * (1 + want.abs())
    error = (out.float() - want).abs()
    assert (error <= slack + (0 if exact else allowed)).all(), f"off by {error.max():.3g}"
    sums = (q.float().abs() @ k.float().abs().mT).amax(-1) * abs(rule.get("scale", q.shape[-1] ** -0.5))
    assert ((lse - want_lse).abs() <= 2.0**-22 * torch.maximum(sums, want_lse.abs()) + 1e-4).all()


def inputs(dtype, device, n_q=100, n_k=150, d=64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, 2, n, d, generator=generator).to(device, dtype) for n in (n_q, n_k, n_k)]


MASKED = [
    (_f16, torch.finfo(_f16).min), (_bf16, torch.finfo(_bf16).min), (_bf16, torch.finfo(_f32).min), (_f16, -1e9),
    (_bf16, -1e10), (_f16, -1.5e9), (_bf16, -3e10), (_bf16, -1e30), (_f16, 1e30), (_bf16, 1e30),
]  # fmt: skip


def mask_of(value, dtype, device, where):
    own = _f32 if abs(value) > torch.finfo(dtype).max else dtype
    return torch.zeros(1, 1, 100, 150, dtype=own, device=device).masked_fill_(where.to(device), value)


@pytest.mark.parametrize(("dtype", "value"), MASKED, ids=str)
@pytest.mark.parametrize("what", ["left padding", "whole rows", "every other key"])
def test_finite_masks(dtype, value, what, device, backend):
    """Rows that see padding alone take part in it, as in a float32 softmax."""
    if backend == "persistent":
        pytest.skip("it takes no mask")
    keys, rows = torch.arange(150), torch.arange(100)[:, None]
    where = {
        "left padding": (keys < 90) & (rows >= 0),
        "whole rows": (rows % 3 == 0) & (keys >= 0),
        "every other key": (keys % 2 == 0) & (rows >= 0),
    }[what]
    q, k, v = inputs(dtype, device)
    for causal in (False, True):
        if causal and what == "left padding":
            where = where & (rows > 60)
        check(q, k, v, False, mask=mask_of(value, dtype, device, where), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("score", [3e4, 1e6, 3e7, 4e8, 8e8, 5e9, -3e4, -1e6, -8e8])
def test_equal_scores_of_any_size(score, causal, device):
    """Finite inputs of 16 bits give the mean of V."""
    _, _, v = inputs(_f16, device)
    size = min(abs(score) / 64, 3e4)
    q, k = (
        torch.full((1, 2, 100, 64), size, dtype=_f16, device=device),
        torch.ones(1, 2, 150, 64, dtype=_f16, device=device),
    )
    check(q * math.copysign(1, score), k, v, True, scale=abs(score) / (size * 64), causal=causal)


@pytest.mark.parametrize("dtype", [_f16, _bf16], ids=str)
@pytest.mark.parametrize("scale", [1e3, 1e6, 1e9, -1e6])
def test_distinct_scores_of_any_size(dtype, scale, device):
    """One key of each row wins."""
    q, k, v = inputs(dtype, device)
    check(q, k, v, False, scale=scale)


@pytest.mark.parametrize("rule", [{}, {"causal": True}, {"scale": 1e5}], ids=str)
def test_scores_that_climb_from_far_below(rule, device):
    """Scores climb tile after tile: what a first tile has left does not spoil what comes."""
    _, _, v = inputs(_f16, device)
    q = torch.full((1, 2, 100, 64), 100.0, dtype=_f16, device=device)
    k = torch.linspace(-6e4, 0, 150, device=device).to(_f16).view(1, 1, -1, 1).expand(1, 2, 150, 64).contiguous()
    check(q, k, v, False, **rule)


def gradients(q, k, v, grad, **rule):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(ffpa_attn.ffpa(*leaves, **rule), leaves, grad)


@pytest.mark.parametrize(("dtype", "value"), MASKED[:8], ids=str)
def test_gradients_beside_masked_rows(dtype, value, device, backend):
    """Rows whose dO is 0 pass on nothing, whatever their LSE is; the others pass on what they would without them."""
    if backend == "persistent":
        pytest.skip("it has no gradients of its own")
    rows = torch.arange(100)[:, None]
    padded = (rows < 30) & (torch.arange(150) >= 0)
    q, k, v = inputs(dtype, device)
    grad = torch.randn_like(q)
    grad[:, :, :30] = 0
    got = gradients(q, k, v, grad, mask=mask_of(value, dtype, device, padded))
    want = gradients(q[:, :, 30:], k, v, grad[:, :, 30:])
    assert not got[0][:, :, :30].any()
    tolerance = 2.0**-6 if dtype == _bf16 else 2.0**-9
    for mine, theirs in zip((got[0][:, :, 30:], *got[1:]), want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [1e3, 1e6, 1e9])
def test_gradients_of_large_scores(scale, masked, device, backend):
    """Gradients are finite, and come from a P of 1 at most."""
    if backend == "persistent":
        pytest.skip("it has no gradients of its own")
    q, k, v = inputs(_bf16, device)
    rule = {"scale": scale} | ({"mask": torch.ones(1, 1, 100, 150, dtype=torch.bool, device=device)} if masked else {})
    grad = torch.randn_like(q)
    got = gradients(q, k, v, grad, **rule)
    assert all(x.isfinite().all() for x in got)
    assert (got[2].abs() <= 1.01 * grad.abs().float().sum(2, keepdim=True)).all()


SIZES = [3e4, 1e6, 4e8, 1e9]
SCALE = 1.1


def one_key_takes_all(size, dtype, device, n_q=100, n_k=150):
    """Returns (q, k, v, dO, dLSE; dQ, dK, dV) of two query heads to one of keys: each row of the second has one key, of
    sixteen, whose score is about size, and others of half of it; the first has scores and gradients of 0. All sums are
    of numbers that floats hold, so nothing may be off by a bit.
    """
    d, generator = 64, torch.Generator().manual_seed(2)
    root = 2.0 ** int(math.log2(size) / 2)
    rows, classes = torch.arange(n_q), torch.arange(16)
    q, k = torch.zeros(1, 2, n_q, d), torch.full((1, 1, n_k, d), 0.84375 * root)
    q[:, 1, rows, rows % 16] = root
    k[:, :, 3 * classes, classes] = 1.7109375 * root
    v = torch.randint(-2, 3, (1, 1, n_k, d), generator=generator)
    grad = torch.randint(-1, 2, (1, 2, n_q, d), generator=generator)
    grad_lse = torch.zeros(1, 2, n_q)
    grad[:, 0] = 0
    grad_lse[:, 1, :16] = torch.tensor([1.0, -1.0] * 8)
    dq = grad_lse[..., None] * k[:, :, rows % 16 * 3] * SCALE
    dk, dv = torch.zeros_like(k), torch.zeros(1, 1, n_k, d)
    dk.index_add_(2, rows % 16 * 3, (grad_lse[..., None] * q).sum(1, keepdim=True))
    dv.index_add_(2, rows % 16 * 3, grad.sum(1, keepdim=True).float())
    tensors = q, k, v, grad, grad_lse, dq, dk * SCALE, dv
    return [x.to(device, torch.float32 if x is grad_lse else dtype) for x in tensors]


def expect_bits(got, want):
    for name, mine, wanted in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert torch.equal(mine, wanted), f"{name} is off by {(mine.float() - wanted.float()).abs().max():.3g}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [_f16, _bf16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_where_one_key_takes_all(size, dtype, causal, device, backend, monkeypatch):
    """P of that key is 1, whatever the score: dV has dO, Q and K have what comes through the LSE, and all else is 0."""
    if backend == "persistent":
        pytest.skip("it has no gradients of its own")
    if causal:
        monkeypatch.setattr(triton_attention, "_FAR_PROGRAMS", 2)  # two programs, which take turns
    q, k, v, grad, grad_lse, *want = one_key_takes_all(size, dtype, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results = ffpa_attn.ffpa(*leaves, scale=SCALE, causal=causal, return_lse=True)
    expect_bits(torch.autograd.grad(results, leaves, (grad, grad_lse)), want)


def packed_gradients(*parts, causal, scale=SCALE):
    """Computes dQ, dK, dV of each sequence; a sequence is (q, k, v, dO, dLSE) of a batch of one."""
    tensors = [torch.cat([part[i][0].transpose(0, 1) for part in parts]) for i in range(4)]
    grad_lse = torch.cat([part[4][0] for part in parts], -1)
    lengths = [[part[i].shape[2] for part in parts] for i in (0, 1)]
    ends = [torch.tensor([0, *n], device=grad_lse.device).cumsum(0).int() for n in lengths]
    leaves = [x.contiguous().requires_grad_() for x in tensors[:3]]
    results = ffpa_attn.ffpa_varlen(*leaves, *ends, *map(max, lengths), scale=scale, causal=causal, return_lse=True)
    got = torch.autograd.grad(results, leaves, (tensors[3], grad_lse))
    split = [x.split(lengths[i > 0]) for i, x in enumerate(got)]
    return [[x[i].transpose(0, 1)[None] for x in split] for i in range(len(parts))]


def small_scores(dtype, device, n_q, n_k):
    generator = torch.Generator().manual_seed(3)
    shapes = (2, n_q), (1, n_k), (1, n_k), (2, n_q)
    tensors = [torch.randn(1, h, n, 64, generator=generator).to(device, dtype) for h, n in shapes]
    return [*tensors, torch.zeros(1, 2, n_q, device=device)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [_f16, _bf16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_packed_gradients_where_one_key_takes_all(size, dtype, causal, device, backend):
    """The sequence before, which shares blocks of rows with it, has the bits that it has beside any other."""
    if backend == "persistent":
        pytest.skip("it has no gradients of its own")
    *large, dq, dk, dv = one_key_takes_all(size, dtype, device)
    small = small_scores(dtype, device, 37, 70)
    before, got = packed_gradients(small, large, causal=causal)
    expect_bits(got, (dq, dk, dv))
    expect_bits(before, packed_gradients(small, small_scores(dtype, device, 100, 150), causal=causal)[0])


def gradients_in_float64(q, k, v, grad, mask=None, scale=1.0, softcap=0.0, causal=False):
    """Computes gradients of softmax of the scores as float32 has them; heads of Q share one of K."""
    q, k, v, grad = (x.double() for x in (q, k, v, grad))
    capped = q @ k.mT * scale
    slope = 1.0
    if softcap:
        capped = softcap * (capped / softcap).tanh()
        slope = 1 - (capped / softcap) ** 2
    scores = capped.float() if mask is None else capped.float() + mask
    if causal:
        n_q, n_k = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(n_q, n_k, device=q.device).tril(n_k - n_q) == 0, -torch.inf)
    p = scores.double().softmax(-1)
    dp = grad @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * slope * scale
    return ds @ k, (ds.mT @ q).sum(1, keepdim=True), (p.mT @ grad).sum(1, keepdim=True)


def expect_near(got, want, but_a_column: bool):
    for name, mine, wanted in zip(("dq", "dk", "dv"), got, want, strict=True):
        if but_a_column and name != "dv":
            mine, wanted = mine[..., 1:], wanted[..., 1:]
        error = float((mine.double() - wanted).abs().max())
        assert error <= 2e-2 * max(float(wanted.abs().max()), 1e-3), f"{name} is off by {error:.3g}"


def keys_that_share_one_score(dtype, device):
    """Returns (q, k, v, dO) of two query heads to one of keys: a third of the rows of the second has the score 2^29
    with every key, by a column in whose gradients the roundings of dS show.
    """
    q, k, v, grad, _ = small_scores(dtype, device, 100, 150)
    q[..., 0], k[..., 0] = 0, 2.0**14
    q[:, 1, ::3] = 0
    q[:, 1, ::3, 0] = 2.0**15
    return q, k, v, grad


@pytest.mark.parametrize("rule", ["causal", "mask", "softcap"])
@pytest.mark.parametrize("dtype", [_f16, _bf16], ids=str)
def test_gradients_of_keys_that_share_one_score(dtype, rule, device, backend):
    """Each key has its part of P, which the LSE does not say."""
    if backend == "persistent":
        pytest.skip("it has no gradients of its own")
    if rule == "causal":
        q, k, v, grad = keys_that_share_one_score(dtype, device)
        options = {"causal": True, "scale": 1.0}
    else:
        q, k, v, grad, _ = small_scores(dtype, device, 100, 150)
        mask = torch.zeros(1, 1, 100, 150, device=device)
        mask[:, :, ::3] = -4e8
        options = {"mask": mask, "scale": 0.125, "softcap": 20.0 if rule == "softcap" else 0.0}
    expect_near(gradients(q, k, v, grad, **options), gradients_in_float64(q, k, v, grad, **options), rule == "causal")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [_f16, _bf16], ids=str)
def test_packed_gradients_of_keys_that_share_one_score(dtype, causal, device, backend):
    """The sequences around, which share blocks of rows with it, have the bits that they have beside any other."""
    if backend == "persistent":
        pytest.skip("it has no gradients of its own")
    large = keys_that_share_one_score(dtype, device)
    before, after = small_scores(dtype, device, 37, 70), small_scores(dtype, device, 5, 80)
    no_grad_lse = torch.zeros(1, 2, 100, device=device)
    around = packed_gradients(before, small_scores(dtype, device, 100, 150), after, causal=causal)
    first, got, last = packed_gradients(before, (*large, no_grad_lse), after, causal=causal)
    expect_near(got, gradients_in_float64(*large, scale=SCALE, causal=causal), True)
    expect_bits(first, around[0])
    expect_bits(last, around[2])


@pytest.mark.parametrize("by", ["triton", "reference"])
@pytest.mark.parametrize("rule", ["plain", "causal", "mask", "packed", "the last of many heads"])
def test_gradients_of_far_rows_add_up(rule, by, device, backend, monkeypatch):
    """P of a row is that of its scores, not of a rounded LSE, and adds up to 1: what cancels in dQ is gone. The float32
    after 2^18 is 2^-5 more. One key stands out, more in one row than in another; others have less of it than an LSE's
    rounding.
    """
    if backend == "persistent":
        pytest.skip("it has no gradients of its own")
    monkeypatch.setenv("FFPA_BACKEND", by)
    q, k, v, grad, no_grad_lse = small_scores(_f16, device, 100, 150)
    q[:], k[:] = 0, 0
    q[..., 0], k[..., 0] = 512, 512
    q[..., 1], k[..., 140, 1] = torch.arange(100, device=device) % 11, 1
    options = {"causal": rule == "causal", "scale": 1.0}
    # There are more rows here than are asked at once; one program has all blocks of a head.
    if rule == "the last of many heads":
        monkeypatch.setattr(triton_attention, "_FAR_PROGRAMS", 1)
        q, grad = (x[:, -1:].repeat(1, 12, 1, 1) for x in (q, grad))
        q[:, :-1], no_grad_lse = 0, no_grad_lse[:, -1:].repeat(1, 12, 1)
        got = packed_gradients((q, k, v, grad, no_grad_lse), **options)[0]
    elif rule == "packed":
        parts = small_scores(_f16, device, 37, 70), (q, k, v, grad, no_grad_lse)
        got = packed_gradients(*parts, **options)[1]
    else:
        if rule == "mask":
            options["mask"] = torch.zeros(1, 1, 100, 150, device=device)
            options["mask"][..., ::3] = -0.5
        got = gradients(q, k, v, grad, **options)
    want = gradients_in_float64(q, k, v, grad, **options)
    # This bounds the rounding of dS, by the column that cancels.
    rounded = 2.0**-9 * 512 * float((grad.float() @ v.float().mT).abs().max())
    allowed = rounded, rounded, 2.0**-9 * float(want[2].abs().max())
    for name, mine, wanted, most in zip(("dq", "dk", "dv"), got, want, allowed, strict=True):
        error = float((mine.double() - wanted).abs().max())
        assert error <= most, f"{name} is off by {error:.3g}, more than {most:.3g}"


@pytest.mark.parametrize("n_k", [150, 70])
def test_gradients_beside_one_large_score(n_k, device, backend):
    """Other batch entries and heads of K keep their bits, and rows of its own head what they had; rows without keys
    pass on nothing, and NaN stays NaN.
    """
    if backend == "persistent":
        pytest.skip("it has no gradients of its own")
    q, k, v = (torch.cat([x, x.flip(2)]) for x in inputs(_bf16, device, n_k=n_k))
    grad = torch.randn_like(q)
    grad[0, 0, 60] = 0
    small = gradients(q, k, v, grad, causal=True)
    q[0, 0, 60] *= 3e4
    grad[..., : max(100 - n_k, 0), :] = torch.nan
    got = gradients(q, k, v, grad, causal=True)
    for mine, before in zip(got, small, strict=True):
        assert torch.equal(mine[1], before[1]) and torch.equal(mine[0, 1], before[0, 1])
        torch.testing.assert_close(mine, before, rtol=2.0**-6, atol=2.0**-9)
    q[0, 0, 61] = torch.nan
    dq, dk, dv = gradients(q, k, v, grad, causal=True)
    assert dq[0, 0, 61].isnan().all() and dq[0, 0, :61].isfinite().all() and dq[0, 0, 62:].isfinite().all()
    seen_by_it = 61 + n_k - 100 + 1
    assert dk[0, 0, :seen_by_it].isnan().all() and dv[0, 0, :seen_by_it].isnan().all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0, 3e4])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_equal_scores_of_8_bits(dtype, scale, device, backend):
    """The result is a mean of V."""
    if backend == "persistent":
        pytest.skip("it takes no 8-bit floats")
    _, _, v = inputs(_bf16, device)
    q, k = (torch.full((1, 2, n, 64), 448.0, device=device).to(dtype) for n in (100, 150))
    out, lse = ffpa_attn.ffpa_fp8(q, k, v.to(dtype), scale=scale, causal=True, return_lse=True, out_dtype=_f32)
    want, want_lse, _ = softmax_of(scores_of(q, k, {"scale": scale, "causal": True}), v.to(dtype))
    assert (out - want).abs().max() < 2e-3
    assert ((lse - want_lse).abs() <= 2.0**-22 * want_lse.abs() + 1e-4).all()
