"""Tests float32 where PyTorch may use TF32: SDPA's meaning, as exact as TF32's products, in float16's range or not."""

from contextlib import contextmanager

import compare
import pytest
import torch
import torch.nn.functional as F
from ffpa_attn import sdpa
from ffpa_attn.integrations import tf32
from test_sdpa import CALLS, PYTORCH, calls_in_the_graph, enabled, make, results, t
from torch.nn.attention import SDPBackend, sdpa_kernel

NAMES = ("out", "dq", "dk", "dv", "dmask")
SERVED = [name for name in CALLS if name not in ("no keys", "no rows", "empty batch")]
ALLOWED = tf32._allowed
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def served(monkeypatch):
    """Serves small calls on any device, and gives a list that grows with each."""
    calls, attention = [], tf32.attention
    monkeypatch.setattr(tf32, "_LEAST_WORK", 1)
    monkeypatch.setattr(tf32, "_allowed", lambda _: True)
    monkeypatch.setattr(tf32, "attention", lambda *args: (calls.append(args), attention(*args))[1])
    return calls


@contextmanager
def precision(name):
    """Sets "tf32", where products may be rounded, or "ieee", where not."""
    setting = torch.backends.cuda.matmul
    before, setting.fp32_precision = setting.fp32_precision, name
    try:
        yield
    finally:
        setting.fp32_precision = before


def attend(q, k, v, mask, **options):
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def rounded(x):
    """Rounds to TF32's 11 bits."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class Product(torch.autograd.Function):
    """Computes a @ b, and its gradients, of factors in TF32, summed in float32."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return rounded(a) @ rounded(b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return Product.apply(grad, b.mT), Product.apply(a.mT, grad)


def in_tf32(q, k, v, mask, is_causal=False, scale=None, enable_gqa=False):
    """Computes the yardstick: what PyTorch gives where it rounds to TF32."""
    if q.dim() == 4:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    bias = torch.zeros(q.shape[-2], k.shape[-2], device=q.device)
    if is_causal:
        bias = bias.masked_fill(torch.ones_like(bias, dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
    scores = Product.apply(q * (q.shape[-1] ** -0.5 if scale is None else scale), k.mT)
    return Product.apply(torch.softmax(scores + bias, -1), v)


def assert_as_exact_as_tf32(name, function, device):
    tensors, mask = make(CALLS[name], torch.float32, device)
    exact_mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    want = results(PYTORCH, [x.double() for x in tensors], exact_mask, CALLS[name].options)
    base = results(in_tf32, tensors, mask, CALLS[name].options)
    got = results(function, tensors, mask, CALLS[name].options)
    for part, ours, exact, theirs in zip(NAMES, got, want, base, strict=False):
        assert ours.dtype == torch.float32
        # A result is rounded to 11 bits, where TF32's products have the 24 of float32.
        compare.assert_close(part, ours, exact, theirs + exact.float() * 2.0**-11 * torch.sign(theirs - exact.float()))


@pytest.mark.parametrize("name", SERVED)
def test_as_exact_as_tf32(device, served, name):
    with sdpa():
        assert_as_exact_as_tf32(name, F.scaled_dot_product_attention, device)
    assert len(served) == 1


FACTORS = [  # factors of q, k, v and the gradient
    (1e6, 1e-6, 1, 1),
    (1e-8, 1e8, 1e20, 1e-12),
    (1, 1, 1e-20, 1e10),
    (0, 1, 1, 1),
    (0, 1e6, 1, 1),
    (1e6, 0, 1, 1),
    (1, 0, 1, 1),
    (1, 1, 0, 1),
    (1, 1, 1, 0),
]


@pytest.mark.parametrize("factors", FACTORS, ids=str)
def test_beyond_the_range_of_float16(device, served, factors):
    """The range is that of float32: results are the same but for these factors."""
    shape = (1, 2, 20, 64)
    plain = [t(*shape, dtype=torch.float32, device=device, seed=seed) for seed in range(4)]
    q, k, v, grad = (x * factor for x, factor in zip(plain, factors, strict=True))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with sdpa():
        out = F.scaled_dot_product_attention(*leaves)
        got = out, *torch.autograd.grad(out, leaves, grad)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = PYTORCH(*exact)
    want = out, *torch.autograd.grad(out, exact, grad.double())
    assert served
    for name, x, y in zip(NAMES, got, want, strict=False):
        torch.testing.assert_close(x, y.float(), rtol=0, atol=4e-3 * y.abs().max().item(), msg=name)


@pytest.mark.parametrize("rows_first", [False, True])
def test_what_others_hold_costs_nothing(device, served, rows_first):
    """Batch entries, heads, columns of v and of the gradient are millions of times as large as others, or zero."""
    q, k, v, grad = (
        t(2, 4 if i in (0, 3) else 2, 20, 64, dtype=torch.float32, device=device, seed=i) for i in range(4)
    )
    q[1] *= 1e10
    k[1] *= 1e-10
    q[0, 1] *= 1e10  # head 1 is of the group of heads 0 and 1
    k[0, 0] *= 1e-10
    v[1] *= 1e7
    v[:, 0] *= 1e-7
    v[1, ..., 5] *= 1e10
    v[..., 9] = 0
    grad[0] *= 1e-7
    grad[1, ..., 7] *= 1e7
    grad[:, 2:, :, 8] = 0
    if rows_first:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with sdpa():
        out = F.scaled_dot_product_attention(*leaves, enable_gqa=True)
        got = out, *torch.autograd.grad(out, leaves, grad)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = PYTORCH(*exact, enable_gqa=True)
    want = want, *torch.autograd.grad(want, exact, grad.double())
    assert served and out.stride() == q.stride()
    for name, dims, x, y in zip(NAMES, (2, (2, 3), (2, 3), 2), got, want, strict=False):
        error, size = (x - y).abs().amax(dims), y.abs().amax(dims)
        assert (error <= 4e-3 * size).all(), (name, error / size)


def test_a_mask_shared_by_heads_of_other_sizes(device, served):
    q, k, v, grad = (t(2, 2, 20, 64, dtype=torch.float32, device=device, seed=i) for i in range(4))
    grad *= torch.tensor([1e-4, 1.0], device=device)[:, None, None]
    mask = t(20, 20, dtype=torch.float32, device=device)
    got, want = [], []
    for dmasks, dtype, attention in (
        (got, torch.float32, F.scaled_dot_product_attention),
        (want, torch.float64, PYTORCH),
    ):
        leaf = mask.to(dtype).requires_grad_()
        with sdpa():
            out = attention(*(x.to(dtype) for x in (q, k, v)), leaf)
        dmasks += torch.autograd.grad(out, leaf, grad.to(dtype))
    assert served and (got[0] - want[0]).abs().max() < 2e-3 * want[0].abs().max()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("which", range(3))
def test_what_is_no_number_stays_in_its_rows(device, served, which, value):
    tensors = [t(1, 2, 6, 64, dtype=torch.float32, device=device, seed=seed) for seed in range(3)]
    tensors[which][0, 1, 2, 3] = value
    with sdpa():
        out = F.scaled_dot_product_attention(*tensors)
    q, k, v = tensors
    want = torch.softmax(q @ k.mT, -1) @ v  # PyTorch's own kernel for CPUs loses NaN
    assert served and torch.equal(out.isfinite(), want.isfinite()) and out[:, 0].isfinite().all()


@pytest.mark.parametrize("way", [sdpa, enabled])
def test_compiled(device, served, way):
    q = t(1, 2, 20, 64, dtype=torch.float32, device=device)
    out, called = calls_in_the_graph(lambda q: F.scaled_dot_product_attention(q, q, q), q, way=way)
    assert "ffpa_attn.forward" in called
    torch.testing.assert_close(out, PYTORCH(q, q, q), atol=2e-3, rtol=2e-3)


def test_compiled_backward(device, served):
    with sdpa():
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        assert_as_exact_as_tf32("grouped", compiled, device)
        q = t(1, 2, 20, 64, dtype=torch.float32, device=device).requires_grad_()
        assert torch.autograd.grad(compiled(q, q, q, None).square().sum(), q)[0].any()


def test_only_where_it_is_allowed_and_pays(monkeypatch):
    """The user must allow it, and there must be as much work as takes PyTorch longer than the casts do."""
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with precision("ieee"):
        assert not tf32._allowed(device)
    with precision("tf32"):
        assert tf32._allowed(device) and not tf32._allowed(torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        assert not tf32._allowed(device)
    monkeypatch.setattr(tf32, "_allowed", lambda _: True)
    few, many = (torch.empty(1, 16, n, 512, device="meta") for n in (512, 1024))
    assert tf32.serves(many, many, many) and not tf32.serves(few, few, few)
    assert not tf32.serves(many, many.half(), many) and not tf32.serves(*[many[0]] * 3)
    assert not tf32.serves(*[many.double()] * 3)


def test_compiled_anew_where_it_is_allowed(served, monkeypatch):
    """Compiled code does as the setting says when it runs."""
    monkeypatch.setattr(tf32, "_allowed", ALLOWED)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    seen = []

    def asks(x):
        return x + 1 if tf32._allowed(torch.device("cuda")) else x - 1

    compiled = torch.compile(asks, backend="eager", fullgraph=True)
    for name in ("ieee", "tf32", "ieee"):
        with precision(name):
            seen.append(compiled(torch.zeros(())).item())
    assert seen == [-1, 1, -1]


def test_the_cpu_is_left_to_pytorch(served, monkeypatch):
    monkeypatch.setattr(tf32, "_allowed", ALLOWED)
    q = t(1, 2, 20, 64, dtype=torch.float32)
    with sdpa(), precision("tf32"):
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), PYTORCH(q, q, q))
    assert not served


@GPU
def test_on_a_gpu_of_its_own_accord():
    """Results reach PyTorch's own with TF32, at a size that pays; without TF32, they have PyTorch's bits."""
    q, k, v = (torch.randn(1, 4, 2048, 512, device="cuda") for _ in range(3))
    exact = PYTORCH(*(x.double() for x in (q, k, v)))

    def error(out):
        return float((out - exact).square().mean().sqrt())

    with sdpa(), precision("ieee"):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), PYTORCH(q, k, v))
    with precision("tf32"):
        with sdpa_kernel(SDPBackend.MATH):
            theirs = PYTORCH(q, k, v)
        with sdpa():
            ours = F.scaled_dot_product_attention(q, k, v)
    assert not torch.equal(ours, PYTORCH(q, k, v)) and error(ours) <= 2 * error(theirs)
