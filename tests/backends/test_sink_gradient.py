"""Tests the gradient of sinks, by PyTorch and by the kernel in the emulator, against float64 and autograd."""

import math
from contextlib import nullcontext

import pytest
import torch
from ffpa_attn import env
from ffpa_attn.backends import sink_gradient as module
from ffpa_attn.backends.sink_gradient import sink_gradient
from ffpa_attn.testing import emulate

F16, BF16 = torch.float16, torch.bfloat16
by_way = pytest.mark.parametrize("emulated", [False, True], ids=["pytorch", "emulated"])


def run(emulated: bool, *tensors, **more):
    with emulate("sm_80", seed=3) if emulated else nullcontext() as reports:
        gradient = sink_gradient(*tensors, **more)
    if emulated:
        assert [report["kernel"][:22] for report in reports] == ["backward_sink_gradient"]
    return gradient


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def above(sinks, *shape, seed=0):
    """Returns LSEs of rows whose denominators have the sinks in them."""
    return sinks.float()[:, None] + random(*shape, seed=seed).abs()


def wanted(grad_out, grad_lse, out, lse, sinks):
    terms = -torch.exp(sinks.double()[:, None] - lse.double()) * wanted_delta(grad_out, grad_lse, out, lse)
    terms = torch.where(lse.isinf(), 0.0, terms)
    return terms.sum(-1) if lse.dim() == 2 else terms.sum((0, 2))


def wanted_delta(grad_out, grad_lse, out, lse):
    delta = (grad_out.double() * out.double()).sum(-1) - (0 if grad_lse is None else grad_lse.double())
    return torch.where(lse.isinf(), 0.0, delta)


SHAPES = [(2, 3, 100, 64), (1, 2, 1, 8), (1, 2, 65, 72), (1, 1, 130, 328), (3, 70, 520), (2, 1, 64)]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@by_way
def test_sums_over_rows(emulated, shape, dtype):
    grad_out, out = random(*shape, dtype=dtype, seed=1), random(*shape, dtype=dtype, seed=2)
    grad_lse, sinks = random(*shape[:-1], seed=4), random(shape[-3], seed=5)
    lse = above(sinks, *shape[:-1], seed=3)
    lse[..., ::3] = -math.inf
    lse[..., 1::7] = math.inf
    sinks[0] = -math.inf
    for of_lse in (grad_lse, None):
        tensors = grad_out, of_lse, out, lse, sinks
        gradient = run(emulated, *tensors)
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.double(), wanted(*tensors), rtol=1e-4, atol=1e-4)
        assert torch.equal(gradient, run(emulated, *tensors))
        delta = torch.full_like(lse, math.nan)
        assert torch.equal(gradient, run(emulated, *tensors, delta=delta))
        torch.testing.assert_close(delta.double(), wanted_delta(*tensors[:4]), rtol=1e-4, atol=1e-4)


@by_way
def test_rows_of_any_strides(emulated):
    """BNHD tensors, a dO that all rows share, sinks of 16 bits, and rows that do not count, which hold NaN."""
    out = random(2, 9, 3, 64, dtype=F16).transpose(1, 2)
    out[:, :, 4] = math.nan
    sinks = random(3, dtype=BF16)
    lse = above(sinks, 2, 3, 9)
    lse[..., 4] = -math.inf
    for grad_out in (random(2, 9, 3, 64, dtype=F16).transpose(1, 2), torch.ones((), dtype=F16).expand(out.shape)):
        want, delta = wanted(grad_out, None, out.nan_to_num(), lse, sinks.float()), torch.empty_like(lse)
        found = run(emulated, grad_out, None, out, lse, sinks, delta=delta)
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)
        want = wanted_delta(grad_out, None, out.nan_to_num(), lse)
        torch.testing.assert_close(delta.double(), want, rtol=1e-4, atol=1e-4)


@by_way
def test_a_sink_has_no_more_than_all_of_a_row(emulated):
    """A large LSE may be rounded to less than the sink that it holds."""
    out, grad_out, sinks = random(1, 2, 5, 16, dtype=F16), random(1, 2, 5, 16, dtype=F16, seed=1), torch.full((2,), 1e6)
    gradient = run(emulated, grad_out, None, out, (sinks - 0.0625)[None, :, None].expand(1, 2, 5), sinks)
    torch.testing.assert_close(gradient, -(grad_out.float() * out).sum((0, 2, 3)), rtol=1e-4, atol=1e-4)


def test_autograd_agrees():
    q, k, v = (random(1, 2, n, 8, dtype=torch.float64, seed=n) for n in (5, 6, 7))
    k, v, sinks = k, v[:, :, :6], torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    scores = torch.cat((q @ k.mT, sinks[:, None, None].expand(1, 2, 5, 1)), -1)
    out, lse = scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    torch.autograd.backward((out, lse), (grad_out, grad_lse))
    got = sink_gradient(*(x.detach().float() for x in (grad_out, grad_lse, out, lse, sinks)))
    torch.testing.assert_close(got.double(), sinks.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("elements", [1, 700, 1700, 3000])
def test_pytorch_takes_some_rows_or_heads_at_a_time(elements, monkeypatch):
    sinks = random(3)
    tensors = random(2, 3, 50, 16), None, random(2, 3, 50, 16, seed=1), above(sinks, 2, 3, 50, seed=2), sinks
    monkeypatch.setattr(module, "_MOST_ELEMENTS", elements)
    torch.testing.assert_close(sink_gradient(*tensors).double(), wanted(*tensors), rtol=1e-5, atol=1e-5)


def test_no_rows():
    none = torch.zeros(1, 2, 0, 8)
    assert torch.equal(sink_gradient(none, None, none, none[..., 0], torch.ones(2)), torch.zeros(2))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("arch, backend", [("sm_80", "mma"), ("sm_90a", "hopper")])
def test_other_gradients_take_delta_without_reading_out(arch, backend, packed):
    """They have the same bits as those that compute δ themselves; the last row sees no key."""
    q, grad_out, out = (random(1, 2, 70, 72, dtype=BF16, seed=i) for i in range(3))
    k, v = (random(1, 2, 280 if packed else 140, 72, dtype=BF16, seed=i) for i in (3, 4))
    lse, grad_lse = random(1, 2, 70).abs() + 6, random(1, 2, 70, seed=1)
    lse[..., -1] = -math.inf
    tensors, more, name = [grad_out, grad_lse, q, k, v, out, lse], (None,), "backward"
    if packed:
        tensors = [x[0].transpose(0, 1) if x.dim() == 4 else x[0] for x in tensors]
        offsets = [torch.tensor([0, *ends], dtype=torch.int32) for ends in ((30, 70), (140, 280))]
        more, name = (*offsets, 40, 140), "varlen_backward"
    operator = getattr(torch.ops.ffpa_attn, name)
    with emulate(arch, seed=4) as reports, env.overridden("FFPA_BACKEND", backend):
        want = operator(*tensors, *more)
        _, delta = torch.ops.ffpa_attn.sink_gradient_delta(*tensors[:2], *tensors[5:], torch.zeros(2))
        tensors[5] = torch.full_like(tensors[5], math.nan)
        got = operator(*tensors, *more, delta)
    assert sum("backward_rows" in report["kernel"] for report in reports) == 2
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y) and not x.isnan().any()
