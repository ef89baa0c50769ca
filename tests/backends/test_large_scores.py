"""Scores and masks of any size that a float holds give what softmax in float32 of float32 scores gives; NaN stays NaN.

Inputs are made so that scores are exact in float32: rows whose largest score some keys share give the mean of those
keys' values. What hangs on the rounding of a product shows in the emulator where its kernels fuse multiply-adds, as
nvcc has them.
"""

from contextlib import nullcontext

import pytest
import torch
from ffpa_attn import ffpa, ffpa_fp8, ffpa_varlen
from ffpa_attn.backends import levels
from ffpa_attn.launching import native
from ffpa_attn.operators import ops
from ffpa_attn.specs import archs
from ffpa_attn.testing import emulate

F16, BF16 = torch.float16, torch.bfloat16
ARCHS = {"mma": "sm_80", "hopper": "sm_90a"}
SMALLEST = {dtype: torch.finfo(dtype).min for dtype in (F16, BF16, torch.float32)}


@pytest.fixture(params=["reference", "mma fused", "hopper fused", "mma", "hopper", "triton"])
def attend(request, monkeypatch):
    """Gives attend(function, *args, **options) on one backend: on a GPU, or here in the emulator, as fused as nvcc has
    it, or in Triton's interpreter.
    """
    backend, _, fused = request.param.partition(" ")
    here = not torch.cuda.is_available()
    if fused and not here:
        pytest.skip("a GPU runs what nvcc made")
    if not here and backend != "reference" and native.record() is None:
        pytest.skip("needs a built library")
    if not here and backend == "hopper" and archs.why_not_on("sm_90a", native.gpu_of(torch.device("cuda", 0))):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setenv("FFPA_BACKEND", backend)
    if fused:
        monkeypatch.setenv("ENABLE_FFPA_DEBUG", "1")  # few kernels to compile
    monkeypatch.setattr(ops, "_plans", {})
    if here and backend == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")

    def run(function, *args, **options):
        if not here:
            args = [x.cuda() if isinstance(x, torch.Tensor) else x for x in args]
            options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        emulated = emulate(ARCHS[backend], seed=3, fused=bool(fused)) if here and backend in ARCHS else nullcontext()
        with emulated:
            return [x.cpu() for x in function(*args, **options)]

    run.backend, run.name = backend, request.param
    return run


def dims_of(attend) -> tuple[int, ...]:
    """Returns head dims whose kernels differ: of the backend, among the few that are compiled."""
    return {"triton": (16, 64), "mma": (64, 512), "hopper": (64, 512), "reference": (64,)}[attend.backend]


def values(n: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(1, 1, n, d, generator=torch.Generator().manual_seed(n)).to(dtype)


def expect(out, lse, want, want_lse) -> None:
    """Allows what rounding P and O to 16 bits leaves; of the LSE, a few roundings of float32."""
    ulp = 2.0**-10 if out.dtype == F16 else 2.0**-7
    assert torch.isfinite(out).all()
    assert (out.float() - want).abs().max() <= ulp * want.abs().max()
    torch.testing.assert_close(lse, want_lse, rtol=2**-21, atol=1e-5)


N_Q, N_K = 70, 300


def tied(size: float, d: int, dtype: torch.dtype, sign: int = 1):
    """Returns (q, k, v, out, lse): a third of the keys share the largest score, about ± size; others have half."""
    root = 2.0 ** int(torch.tensor(size).log2().item() / 2)
    q, k = torch.zeros(1, 1, N_Q, d, dtype=dtype), torch.zeros(1, 1, N_K, d, dtype=dtype)
    larger, smaller = 1.75 * root, 0.875 * root
    q[..., 0], k[..., 0] = root, sign * (larger if sign < 0 else smaller)
    k[..., 1::3, 0] = sign * (smaller if sign < 0 else larger)
    v = values(N_K, d, dtype)
    score = float(q[0, 0, 0].double() @ k[0, 0, 1].double())
    want = v[..., 1::3, :].double().mean(2, keepdim=True).float().expand(1, 1, N_Q, d)
    lse = (
        torch.full((1, 1, N_Q), score, dtype=torch.float64) + torch.tensor(float(len(range(1, N_K, 3)))).log().double()
    )
    return q, k, v, want, lse.float()


SIZES = [(F16, 3e4), (F16, 1e6), (F16, 4e8), (F16, 1e9), (BF16, 1e5), (BF16, 1e9), (BF16, 1e20), (BF16, 2.0**126)]  # fmt: skip


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("dtype, size", SIZES, ids=str)
def test_equal_scores(dtype, size, sign, attend):
    for d in dims_of(attend):
        q, k, v, want, want_lse = tied(size, d, dtype, sign)
        for causal in (False, True):
            out, lse = attend(ffpa, q[..., -1:, :] if causal else q, k, v, scale=1.0, causal=causal, return_lse=True)
            expect(out, lse, want[:, :, : out.shape[2]], want_lse[:, :, : out.shape[2]])


def test_equal_scores_whose_logits_a_float_does_not_hold(attend):
    """The scores' rounding alone is 2^10 and more in P where not all have it. Sums are exact, in any order."""
    for d in dims_of(attend):
        for a, b in ((4000.0, 5120.0), (3000.0, 7168.0), (40960.0, 6000.0)):
            q, k = torch.full((1, 1, N_Q, d), a, dtype=F16), torch.full((1, 1, N_K, d), b, dtype=F16)
            v = values(N_K, d, F16)
            scale = 2.0**-4
            want = v.double().mean(2, keepdim=True).float().expand(1, 1, N_Q, d)
            score = float(q[0, 0, 0].double() @ k[0, 0, 0].double()) * scale
            want_lse = torch.full((1, 1, N_Q), score + float(torch.tensor(N_K).log()))
            expect(*attend(ffpa, q, k, v, scale=scale, return_lse=True), want, want_lse)


@pytest.mark.parametrize("scale", [1.0, 60.0, 3e3, 1e6, 1e20])
def test_equal_scores_in_8_bits(scale, attend):
    """P of 8 bits is scaled up, by an exponent that a large reference would swallow."""
    if attend.backend == "mma":
        pytest.skip("mma kernels know no 8-bit floats")
    d = 64 if attend.backend == "triton" else 192
    q, k = torch.full((1, 1, N_Q, d), 96.0), torch.full((1, 1, N_K, d), 120.0)
    v = values(N_K, d, BF16).clamp(-3, 3)
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    want = v.double().mean(2, keepdim=True).float().expand(1, 1, N_Q, d)
    out, lse = attend(ffpa_fp8, q, k, v, scale=scale, return_lse=True)
    assert (out.float() - want).abs().max() <= 2**-6
    torch.testing.assert_close(
        lse, torch.full_like(lse, 96.0 * 120 * d * scale + float(torch.tensor(N_K).log())), rtol=2**-20, atol=0
    )


def test_minus_infinity_in_a_mask_hides_nan(attend):
    for d in dims_of(attend):
        q, k, v = values(N_Q, d, BF16), values(N_K, d, BF16), values(N_K, d, BF16)
        q[..., 5, :] = torch.nan
        mask = torch.zeros(1, 1, N_Q, N_K)
        mask[..., 5, :] = -torch.inf
        out, lse = attend(ffpa, q, k, v, mask=mask, return_lse=True)
        assert not out[..., 5, :].any() and torch.isneginf(lse[..., 5]).all()
        assert torch.isfinite(out).all() and torch.isfinite(lse[..., 6:]).all()


def test_rows_that_see_nothing_leave_others_alone(attend):
    """Other rows keep every bit: a row without keys has no largest score, and not one that is large."""
    for d in dims_of(attend):
        q, k, v = values(N_Q, d, F16), values(N_K + 1, d, F16)[:, :, 1:], values(N_K, d, F16)
        q[..., 0] = k[..., 0] = 64.0  # all scores are in the hundreds, where it shows which products are rounded
        mask = torch.zeros(1, 1, N_Q, N_K)
        want = attend(ffpa, q, k, v, mask=mask, return_lse=True)
        mask[..., ::2, :] = -torch.inf
        got = attend(ffpa, q, k, v, mask=mask, return_lse=True)
        for both in zip(got, want, strict=True):
            torch.testing.assert_close(*(x[:, :, 1::2] for x in both), rtol=0, atol=0)
        assert not got[0][:, :, ::2].any() and torch.isneginf(got[1][:, :, ::2]).all()


MASKS = [(F16, -1e9), (BF16, -1e10), (F16, -1.5e9), (BF16, -3e10), (BF16, -1e30), (F16, 1e30), *[(BF16, SMALLEST[x]) for x in SMALLEST]]  # fmt: skip


def softmax_in_float32(q, k, v, mask, scale: float):
    scores = (q.double() @ k.double().mT * scale).float() + mask.float()
    return (torch.softmax(scores.double(), -1) @ v.double()).float(), scores.double().logsumexp(-1).float()


@pytest.mark.parametrize("mask_dtype", [torch.float32, None], ids=["float32", "its own type"])
@pytest.mark.parametrize("dtype, value", MASKS, ids=str)
def test_finite_masks(dtype, value, mask_dtype, attend):
    """Some rows have left padding, and some see nothing else: these take the mean of all values."""
    mask_dtype = mask_dtype or dtype
    if abs(value) > torch.finfo(mask_dtype).max:
        pytest.skip("infinite in that type")
    for d in dims_of(attend):
        q, k, v = values(N_Q, d, dtype), values(N_K + 1, d, dtype)[:, :, 1:], values(N_K, d, dtype)
        mask = torch.zeros(1, 1, N_Q, N_K)
        mask[..., ::2, :] = value
        mask[..., 1::2, : N_K // 2] = value
        mask = mask.to(mask_dtype)
        want, want_lse = softmax_in_float32(q, k, v, mask, d**-0.5)
        expect(*attend(ffpa, q, k, v, mask=mask, return_lse=True), want, want_lse)


@pytest.mark.parametrize("value", [SMALLEST[torch.float32], -1e30, -1e9])
def test_rows_that_finite_masks_hide_pass_on_nothing(value, attend):
    """Such rows' dO is 0, and so is what they add to gradients, even if LSE · log2(e) overflows a float."""
    for d in dims_of(attend):
        q, k, v = values(N_Q, d, BF16), values(N_K + 1, d, BF16)[:, :, 1:], values(N_K, d, BF16)
        mask = torch.zeros(1, 1, N_Q, N_K)
        mask[..., ::2, :] = value
        grad = values(N_Q, d, BF16)
        grad[..., ::2, :] = 0

        def gradients(q, k, v, mask, grad):
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            return torch.autograd.grad(ffpa(q, k, v, mask=mask), (q, k, v), grad)

        got = attend(gradients, q.clone(), k.clone(), v.clone(), mask, grad)
        seen = slice(1, None, 2)
        alone = attend(gradients, q[:, :, seen].clone(), k.clone(), v.clone(), None, grad[:, :, seen].contiguous())
        assert not got[0][..., ::2, :].any()
        torch.testing.assert_close(got[0][:, :, seen], alone[0], rtol=2e-2, atol=1e-2)
        for both in zip(got[1:], alone[1:], strict=True):
            torch.testing.assert_close(*both, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype, size", SIZES, ids=str)
def test_gradients_where_one_key_takes_all(dtype, size, attend):
    """P of that key is 1 whatever its score: dV is the sum of dO, and nothing reaches Q and K."""
    for d in dims_of(attend):
        q, k, v, *_ = tied(size, d, dtype)
        k[..., 0] = k[..., 0, 0].item()
        k[..., 7, 0] *= 1.75
        grad = values(N_Q, d, dtype)

        def gradients(q, k, v, grad):
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            return torch.autograd.grad(ffpa(q, k, v, scale=1.0), (q, k, v), grad)

        _, _, dv = attend(gradients, q, k, v, grad)
        want = torch.zeros(1, 1, N_K, d)
        want[..., 7, :] = grad.float().sum(2)
        torch.testing.assert_close(dv.float(), want, rtol=1e-2, atol=1e-2)


def gradients_in_float64(q, k, v, mask, scale: float, grad):
    """Computes the gradients of softmax of the scores as float32 has them."""
    scores = (q.double() @ k.double().mT * scale).float()
    scores = (scores if mask is None else scores + mask.float()).double()
    p = torch.softmax(scores, -1)
    dp = grad.double() @ v.double().mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    return ds @ k.double(), ds.mT @ q.double(), p.mT @ grad.double()


def expect_gradients(got, want, rtol: float) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=rtol, atol=rtol * max(float(y.abs().max()), 1e-3))


@pytest.mark.parametrize("dtype, value", MASKS, ids=str)
def test_gradients_of_rows_that_finite_masks_hide(dtype, value, attend):
    """Each key of such a row has its part of P, though the row's LSE is rounded to the score that they share."""
    for d in dims_of(attend):
        q, k, v = values(N_Q, d, dtype), values(N_K + 1, d, dtype)[:, :, 1:], values(N_K, d, dtype)
        mask = torch.zeros(1, 1, N_Q, N_K)
        mask[..., ::2, :] = value
        mask[..., 1::2, : N_K // 2] = value
        grad = values(N_Q, d, dtype)

        def gradients(q, k, v, mask, grad):
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            return torch.autograd.grad(ffpa(q, k, v, mask=mask, causal=True), (q, k, v), grad)

        got = attend(gradients, q.clone(), k.clone(), v.clone(), mask, grad)
        seen = torch.ones(N_Q, N_K).tril(N_K - N_Q).bool()
        want = gradients_in_float64(q, k, v, mask.masked_fill(~seen, -torch.inf), d**-0.5, grad)
        expect_gradients(got, want, 2e-2)


@pytest.mark.parametrize("dtype, size", SIZES, ids=str)
def test_gradients_of_keys_that_share_the_largest_score(dtype, size, attend):
    for d in dims_of(attend):
        q, k, v, *_ = tied(size, d, dtype)
        grad = values(N_Q, d, dtype)

        def gradients(q, k, v, grad):
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            return torch.autograd.grad(ffpa(q, k, v, scale=1.0), (q, k, v), grad)

        _, _, dv = attend(gradients, *(x.clone() for x in (q, k, v)), grad)
        *_, want = gradients_in_float64(q, k, v, None, 1.0, grad)
        expect_gradients([dv], [want], 2e-2)


def test_gradients_where_all_keys_are_alike(attend):
    """P adds up to 1 though scores of 10^5, and a float32 LSE, are rounded: what all keys share reaches no query."""
    for d in dims_of(attend):
        size, scale = 300.0, 0.8 / d**0.5
        q, k, v, grad = (values(n, d, BF16) for n in (N_Q, N_K + 1, N_K, N_Q))
        q, k = q * size, (k[:, :, :1] * size).expand(1, 1, N_K, d).contiguous()

        def gradients(q, k, v, grad, scale=scale):
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            out, lse = ffpa(q, k, v, scale=scale, return_lse=True)
            return torch.autograd.grad((out, lse), (q, k, v), (grad, torch.full_like(lse, 8.0)))

        dq, _, dv = attend(gradients, *(x.clone() for x in (q, k, v)), grad)
        want = 8 * scale * k[:, :, :1].float().expand(1, 1, N_Q, d)  # gradient of the LSE
        assert (dq.float() - want).abs().max() <= 2**-7 * want.abs().max()
        torch.testing.assert_close(
            dv.float(), (grad.float().sum(2, keepdim=True) / N_K).expand(dv.shape), rtol=2e-2, atol=2e-2
        )


def test_gradients_under_a_small_softcap(attend):
    """Slopes are of 10^-6: 1 - tanh² in float32 has few bits of them, and so has float16."""
    for d in dims_of(attend):
        q, k, v, grad = (values(n, d, F16) for n in (N_Q, N_K + 1, N_K, N_Q))
        k = k[:, :, 1:]
        q[..., 0], k[..., 0] = 0.5, 15.0
        q[..., 1:] /= 64

        def gradients(q, k, v, grad):
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            return torch.autograd.grad(ffpa(q, k, v, scale=0.5, softcap=0.5), (q, k, v), grad)

        dq, _, _ = attend(gradients, *(x.clone() for x in (q, k, v)), 512 * grad)
        x = [t.double().requires_grad_() for t in (q, k, v)]
        p = torch.softmax(torch.tanh(x[0] @ x[1].mT) / 2, -1)
        want = torch.autograd.grad(p @ x[2], x[0], 512 * grad.double())[0]
        expect_gradients([dq], [want], 2e-2)


@pytest.mark.parametrize("x", [0.62, 1.3, 3.0])
def test_gradients_under_a_large_softcap(x, attend):
    """Equal scores have equal P: P and what a far row's comes from take the same tanh, to the last bit."""
    for d in dims_of(attend):
        q, k = torch.zeros(1, 1, N_Q, d, dtype=BF16), torch.zeros(1, 1, N_K, d, dtype=BF16)
        q[..., 0] = k[..., 0] = 2.0**15
        v, grad = values(N_K, d, BF16), values(N_Q, d, BF16)

        def gradients(q, k, v, grad):
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            return torch.autograd.grad(ffpa(q, k, v, scale=1.0, softcap=2.0**30 / x), (q, k, v), grad)

        dv = attend(gradients, *(t.clone() for t in (q, k, v)), grad)[2]
        want = (grad.float().sum(2, keepdim=True) / N_K).expand(dv.shape)
        torch.testing.assert_close(dv.float(), want, rtol=2e-2, atol=2e-3)


def test_gradients_of_keys_that_hardly_count(attend):
    """P is of 10^-6, of which float16 has four bits, and does not lose them before it meets dP."""
    for d in dims_of(attend):
        q, k, v, grad = (values(n, d, F16) for n in (N_Q, N_K + 1, N_K, N_Q))
        q, k, grad = q.abs().fill_(0.125), k[:, :, 1:] / 8, 64 * grad
        k[..., 7, :] = 14 / (0.125 * d)

        def gradients(q, k, v, grad):
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            return torch.autograd.grad(ffpa(q, k, v, scale=1.0), (q, k, v), grad)

        _, dk, _ = attend(gradients, *(x.clone() for x in (q, k, v)), grad)
        _, want, _ = gradients_in_float64(q, k, v, None, 1.0, grad)
        rest = [i for i in range(N_K) if i != 7]
        expect_gradients([dk[..., rest, :]], [want[..., rest, :]], 4e-3)


@pytest.mark.parametrize(
    "d, a, b", [(1000, 49888, 36384), (848, 42240, 38336), (760, 51328, 55232), (320, 43936, 45632), (64, 33333, 7777)]
)
def test_one_key_takes_all_at_any_rounding(d, a, b, attend):
    """The key's score, and the LSE that a forward made of it, are rounded by other steps than in the backward."""
    if (attend.backend == "triton" and d > 256) or ("fused" in attend.name and d != 64):
        pytest.skip("not of this backend, or not compiled for it")
    q, k, v, grad = torch.zeros(1, 1, 20, d), torch.zeros(1, 1, 40, d), values(40, d, F16), values(20, d, F16)
    q[..., 0], k[..., 7, 0] = a, b

    def gradients(q, k, v, grad):
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        return torch.autograd.grad(ffpa(q, k, v), (q, k, v), grad)

    _, _, dv = attend(gradients, q.to(F16), k.to(F16), v, grad)
    torch.testing.assert_close(dv[..., 7, :].float(), grad.float().sum(2), rtol=1e-2, atol=1e-2)
    assert not dv[..., :7, :].any()


def test_an_infinite_lse_says_that_a_row_sees_no_key(attend):
    """A caller's infinite LSE may have either sign: no gradient comes from the row."""
    for d in dims_of(attend):
        q, k, v = values(N_Q, d, BF16), values(N_K + 1, d, BF16)[:, :, 1:], values(N_K, d, BF16)
        out, lse = attend(ffpa, q, k, v, return_lse=True)
        grad, both = values(N_Q, d, BF16), []
        for infinite in (torch.inf, -torch.inf):
            lse[..., 5] = infinite
            both.append(attend(torch.ops.ffpa_attn.backward, grad, None, q, k, v, out, lse)[:3])
        assert not both[0][0][..., 5, :].any() and both[0][0][..., 6, :].any()
        for x, y in zip(*both, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_stays_nan(where, attend):
    for d in dims_of(attend):
        x = {name: values(n, d, BF16) for name, n in (("q", N_Q), ("k", N_K), ("v", N_K))}
        x[where][..., 5, :] = torch.nan
        out, lse = attend(ffpa, x["q"], x["k"], x["v"], return_lse=True)
        rows = slice(5, 6) if where == "q" else slice(None)
        assert torch.isnan(out[:, :, rows]).all()
        assert torch.isnan(lse[:, :, rows]).all() or where == "v"
        if where == "q":
            assert torch.isfinite(out[:, :, 6:]).all() and torch.isfinite(lse[:, :, :5]).all()


# ---- keys in parts ----


@pytest.fixture
def in_parts(monkeypatch):
    """Gives ffpa of one query row, its keys in four parts."""
    monkeypatch.setenv("FFPA_BACKEND", "mma")
    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(levels, "_splits", lambda *_: 4)

    def run(q, k, v, **options):
        if torch.cuda.is_available():
            if native.record() is None:
                pytest.skip("needs a built library")
            tensors = [x.cuda() for x in (q, k, v)]
            options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
            return [x.cpu() for x in ffpa(*tensors, return_lse=True, **options)]
        with emulate("sm_90a", fused=True) as reports:
            result = ffpa(q, k, v, return_lse=True, **options)
        assert any(report["kernel"].startswith("forward_merge") for report in reports)
        return result

    monkeypatch.setenv("ENABLE_FFPA_DEBUG", "1")
    return run


PARTS_OF = pytest.mark.parametrize("d", [64, 512])  # both kernels that have parts


def few_rows(d: int):
    return values(1, d, F16), values(1701, d, F16)[:, :, 1:], values(1700, d, F16)


@PARTS_OF
@pytest.mark.parametrize("value", [-1e9, -1e30, SMALLEST[torch.float32]])
def test_parts_that_one_finite_mask_value_hides(value, in_parts, d):
    q, k, v = few_rows(d)
    mask = torch.full((1, 1, 1, 1700), value)
    expect(*in_parts(q, k, v, mask=mask), *softmax_in_float32(q, k, v, mask, d**-0.5))


@PARTS_OF
@pytest.mark.parametrize("size", [1e5, 4e5, 1.6e6, 1e9])
def test_parts_with_large_scores(size, in_parts, d):
    """Some keys of every part share the largest score."""
    q, k, v = few_rows(d)
    root = 2.0 ** round(torch.tensor(size).log2().item() / 2)
    q[:], k[:] = 0, 0
    q[..., 0], k[..., 0], k[..., ::5, 0] = root, root / 2, root * 1.25
    want = v[..., ::5, :].double().mean(2, keepdim=True).float()
    want_lse = torch.full((1, 1, 1), root * root * 1.25 + float(torch.tensor(340.0).log()))
    expect(*in_parts(q, k, v, scale=1.0), want, want_lse)


@PARTS_OF
def test_parts_with_nan(in_parts, d):
    q, k, v = few_rows(d)
    out, lse = in_parts(torch.full_like(q, torch.nan), k, v)
    assert torch.isnan(out).all() and torch.isnan(lse).all()
    k[..., 900, 3] = torch.nan
    out, lse = in_parts(q, k, v)
    assert torch.isnan(out).all() and torch.isnan(lse).all()


@PARTS_OF
def test_parts_that_see_no_key(in_parts, d):
    q, k, v = few_rows(d)
    mask = torch.zeros(1, 1, 1, 1700, dtype=torch.bool)
    out, lse = in_parts(q, k, v, mask=mask)
    assert not out.any() and torch.isneginf(lse).all()
    mask[..., 3] = True
    out, lse = in_parts(q, k, v, mask=mask)
    expect(out, lse, v[..., 3:4, :].float(), (q.double() @ k[..., 3:4, :].double().mT * d**-0.5)[..., 0].float())


def test_packed_sequences(attend):
    """Two sequences have equal scores; one has two tiles of keys."""
    for d in dims_of(attend):
        q, k, v, want, want_lse = tied(1e9, d, F16)
        q, k, v = (torch.cat([x[0, 0], x[0, 0, :37]])[:, None] for x in (q, k, v))
        cu_q, cu_k = (
            torch.tensor([0, N_Q, N_Q + 37], dtype=torch.int32),
            torch.tensor([0, N_K, N_K + 37], dtype=torch.int32),
        )
        out, lse = attend(ffpa_varlen, q, k, v, cu_q, cu_k, N_Q, N_K, scale=1.0, return_lse=True)
        short = v[N_K:][1::3, 0].double().mean(0).float()
        expect(out[:N_Q, 0], lse[:, :N_Q], want[0, 0], want_lse[0])
        expect(out[N_Q:, 0], lse[:, N_Q:], short.expand(37, d), want_lse[0, :, :37])
