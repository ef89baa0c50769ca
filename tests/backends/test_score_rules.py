"""Tests the two ways that kernels have for masks and for softcaps: the faster one where it can be, and the same numbers."""

import contextlib

import compare
import ffpa_attn
import oracle
import pytest
import torch
from cases import Case, make_inputs
from ffpa_attn import env
from ffpa_attn.operators import ops
from ffpa_attn.testing import emulate
from test_numerics import gradients, leaves, random_like

# A kernel of each family: its backend, the GPU that is emulated, the head dim.
FORWARDS = [
    *(("mma", "sm_80", d) for d in (64, 320)),
    *(("hopper", "sm_90a", d) for d in (128, 192, 256, 320, 384, 768)),
]
BACKWARDS = [("mma", "sm_80", 24), ("hopper", "sm_90a", 24)]
BY_FAMILY = pytest.mark.parametrize("backend, arch, d", FORWARDS)
BY_BACKWARD = pytest.mark.parametrize("backend, arch, d", BACKWARDS)
KINDS = pytest.mark.parametrize("kind", ["bool", "additive", "additive-f32"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def later(mask: torch.Tensor) -> torch.Tensor:
    return mask.new_empty(mask.numel() + 1)[1:].view(mask.shape)


def odd_rows(mask: torch.Tensor) -> torch.Tensor:
    return mask.new_empty(*mask.shape[:3], mask.shape[3] + 1)[..., :-1]


def every_second(mask: torch.Tensor) -> torch.Tensor:
    return mask.new_empty(*mask.shape[:3], 2 * mask.shape[3])[..., ::2]


def keys_outside(mask: torch.Tensor) -> torch.Tensor:
    return mask.new_empty(mask.transpose(2, 3).shape).transpose(2, 3)


LAYOUTS = (later, odd_rows, every_second, keys_outside)  # none of them has pairs of keys in a word


def layouts(mask: torch.Tensor):
    """Gives a mask as it is, and in each layout."""
    yield mask
    for layout in LAYOUTS:
        yield layout(mask).copy_(mask)


@contextlib.contextmanager
def running(backend: str, arch: str, device: str, monkeypatch):
    """Lets a kernel run for certain, emulated or on a GPU."""
    if device == "cuda" and backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(ops, "_plans", {})
    with env.overridden("FFPA_BACKEND", backend), emulate(arch) if device == "cpu" else contextlib.nullcontext():
        yield


@KINDS
@DTYPES
@BY_FAMILY
def test_masks_in_any_layout(backend, arch, d, dtype, kind, device, monkeypatch):
    """The last keys are no whole tile, and their number is even."""
    case = Case(batch=2, heads_q=2, heads_kv=1, n_q=40, n_k=332, d=d, dtype=dtype, mask=kind)
    q, k, v, mask = make_inputs(case, device)
    with running(backend, arch, device, monkeypatch):
        got = [ffpa_attn.ffpa(q, k, v, mask=one, return_lse=True) for one in layouts(mask)]
    want, want_lse = oracle.attention(q, k, v, mask=mask)
    compare.assert_close("out", got[0][0], want, compare.baseline(q, k, v, mask=mask)[0])
    compare.assert_lse_close("lse", got[0][1], want_lse, q, k, None)
    assert all(torch.equal(*pair) for other in got for pair in zip(got[0], other, strict=True))


@KINDS
@DTYPES
@BY_BACKWARD
def test_gradients_of_masks_in_any_layout(backend, arch, d, dtype, kind, device, monkeypatch):
    case = Case(batch=2, heads_q=2, heads_kv=1, n_q=150, n_k=332, d=d, dtype=dtype, mask=kind, rule={"causal": True})
    *inputs, mask = make_inputs(case, device)
    out, lse = ffpa_attn.ffpa(*inputs, mask=mask, return_lse=True, **case.rule)
    grads = random_like(out, 7), random_like(lse, 8) * torch.isfinite(lse)
    oracles, bases = leaves(*inputs), leaves(*inputs)
    want = gradients(oracle.attention(*oracles, mask=mask, **case.rule), grads, oracles)
    base = gradients(compare.baseline(*bases, mask=mask, **case.rule), grads, bases)
    for one in layouts(mask):
        with running(backend, arch, device, monkeypatch):
            got = torch.ops.ffpa_attn.backward(*grads, *inputs, out, lse, one, **case.rule)[:3]
        for name, *numbers in zip("qkv", got, want, base, strict=True):
            compare.assert_close(f"d{name}", *numbers)


def with_hidden_keys(d: int, kind: str, device):
    """Returns q, k, v and a mask that hides some keys from all rows, and a function that makes NaN of these keys."""
    q, k, v, mask = make_inputs(Case(heads_q=2, heads_kv=1, n_q=40, n_k=320, d=d, mask=kind), device)
    hidden = torch.tensor([3, 100, 256, 319], device=device)
    mask = mask.index_fill(3, hidden, False if kind == "bool" else -torch.inf)
    return (q, k, v, mask), lambda x: x.index_fill(2, hidden, torch.nan)


@KINDS
@BY_BACKWARD
def test_gradients_where_the_mask_hides_nan(backend, arch, d, kind, device, monkeypatch):
    """A key that the mask hides from all rows may hold anything."""
    (q, k, v, mask), poison = with_hidden_keys(d, kind, device)
    out, lse = ffpa_attn.ffpa(q, k, v, mask=mask, return_lse=True)
    g = random_like(out, 7)
    poisoned = poison(k), poison(v)
    for one in layouts(mask):
        with running(backend, arch, device, monkeypatch):
            want, got = (torch.ops.ffpa_attn.backward(g, None, q, *kv, out, lse, one)[:3] for kv in ((k, v), poisoned))
        assert all(map(torch.equal, got[1:], want[1:]))  # dQ is NaN: 0 · NaN of K


@KINDS
@BY_FAMILY
def test_a_mask_hides_nan(backend, arch, d, kind, device, monkeypatch):
    """A key that the mask hides from all rows may hold anything, if V is finite."""
    (q, k, v, mask), poison = with_hidden_keys(d, kind, device)
    with running(backend, arch, device, monkeypatch):
        want, got = (ffpa_attn.ffpa(q, x, v, mask=mask, return_lse=True) for x in (k, poison(k)))
    assert all(map(torch.equal, got, want)) and got[0].isfinite().all()


@BY_BACKWARD
def test_masks_that_cancel_large_scores(backend, arch, d, device, monkeypatch):
    """What is left of a score beside its mask is small, and so is the LSE: sums are rounded, and not logits."""
    case = Case(heads_q=2, heads_kv=1, n_q=40, n_k=512, d=d, dtype=torch.bfloat16, rule={"scale": 1.0})
    q, k, v, _ = make_inputs(case, device)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = k[..., 0] = 2.0**15
    mask = torch.full((1, 1, 1, 512), -(2.0**30), dtype=torch.bfloat16, device=device)
    out, lse = ffpa_attn.ffpa(q, k, v, mask=mask, return_lse=True, scale=1.0)
    g = random_like(out, 7)
    with running(backend, arch, device, monkeypatch):
        dv = torch.ops.ffpa_attn.backward(g, None, q, k, v, out, lse, mask, scale=1.0)[2]
    want = (g.double().sum((1, 2), keepdim=True) / 512).expand_as(dv)
    torch.testing.assert_close(dv.double(), want, rtol=2**-7, atol=1e-4)


def of_one_large_row(case: Case, device):
    """Returns q, and q with a row whose scores are far beyond the softcap, and k and v."""
    q, k, v, _ = make_inputs(case, device)
    large = q.clone()
    large[:, :, 5] *= 100
    return (q, large), k, v


OTHERS = [row for row in range(40) if row != 5]
BY_KEYS = pytest.mark.parametrize("n_k", [40, 300])


@DTYPES
@BY_KEYS
@BY_FAMILY
def test_a_softcap_does_not_depend_on_other_rows(backend, arch, d, n_k, dtype, device, monkeypatch):
    """Where one row is large, other rows have the bits that they have without it."""
    case = Case(heads_q=2, heads_kv=1, n_q=40, n_k=n_k, d=d, dtype=dtype, rule={"softcap": 30.0})
    qs, k, v = of_one_large_row(case, device)
    with running(backend, arch, device, monkeypatch):
        got = [ffpa_attn.ffpa(q, k, v, return_lse=True, **case.rule) for q in qs]
    for q, (out, lse) in zip(qs, got, strict=True):
        want, want_lse = oracle.attention(q, k, v, **case.rule)
        compare.assert_close("out", out, want, compare.baseline(q, k, v, **case.rule)[0])
        compare.assert_lse_close("lse", lse, want_lse, q, k, None)
    assert all(torch.equal(x[:, :, OTHERS], y[:, :, OTHERS]) for x, y in zip(*got, strict=True))


@DTYPES
@BY_KEYS
@BY_BACKWARD
def test_gradients_of_a_softcap_do_not_depend_on_other_rows(backend, arch, d, n_k, dtype, device, monkeypatch):
    case = Case(heads_q=2, heads_kv=1, n_q=40, n_k=n_k, d=d, dtype=dtype, rule={"softcap": 30.0})
    qs, k, v = of_one_large_row(case, device)
    of_rows = []
    for q in qs:
        out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True, **case.rule)
        grads = random_like(out, 7), random_like(lse, 8)
        with running(backend, arch, device, monkeypatch):
            got = torch.ops.ffpa_attn.backward(*grads, q, k, v, out, lse, **case.rule)[:3]
        oracles, bases = leaves(q, k, v), leaves(q, k, v)
        want = gradients(oracle.attention(*oracles, **case.rule), grads, oracles)
        base = gradients(compare.baseline(*bases, **case.rule), grads, bases)
        for name, *numbers in zip("qkv", got, want, base, strict=True):
            compare.assert_close(f"d{name}", *numbers)
        of_rows.append(got[0][:, :, OTHERS])
    assert torch.equal(*of_rows)
