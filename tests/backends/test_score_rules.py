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
FORWARDS = [("mma", "sm_80", 64), ("mma", "sm_80", 320), ("hopper", "sm_90a", 128), ("hopper", "sm_90a", 384)]
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
    assert all(map(torch.equal, got[0], other) for other in got)


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


@KINDS
@BY_BACKWARD
def test_gradients_where_the_mask_hides_nan(backend, arch, d, kind, device, monkeypatch):
    """A key that the mask hides from all rows may hold anything."""
    case = Case(heads_q=2, heads_kv=1, n_q=40, n_k=320, d=d, mask=kind)
    q, k, v, mask = make_inputs(case, device)
    hidden = torch.tensor([3, 100, 256, 319], device=device)
    mask = mask.index_fill(3, hidden, False if kind == "bool" else -torch.inf)
    out, lse = ffpa_attn.ffpa(q, k, v, mask=mask, return_lse=True)
    g = random_like(out, 7)
    poisoned = k.index_fill(2, hidden, torch.nan), v.index_fill(2, hidden, torch.nan)
    for one in layouts(mask):
        with running(backend, arch, device, monkeypatch):
            want, got = (torch.ops.ffpa_attn.backward(g, None, q, *kv, out, lse, one)[:3] for kv in ((k, v), poisoned))
        assert all(map(torch.equal, got[1:], want[1:]))  # dQ is NaN: 0 · NaN of K


@BY_FAMILY
@pytest.mark.parametrize("n_k", [40, 300])
def test_a_softcap_does_not_depend_on_other_rows(backend, arch, d, n_k, device, monkeypatch):
    """Scores of one row are far beyond the softcap; the other rows have the bits that they have without it."""
    case = Case(heads_q=2, heads_kv=1, n_q=40, n_k=n_k, d=d, rule={"softcap": 30.0})
    q, k, v, _ = make_inputs(case, device)
    large = q.clone()
    large[:, :, 5] *= 100
    with running(backend, arch, device, monkeypatch):
        rows = [ffpa_attn.ffpa(x, k, v, return_lse=True, **case.rule) for x in (q, large)]
    others = torch.arange(40, device=device) != 5
    for one, other in zip(*rows, strict=True):
        assert torch.equal(one[:, :, others], other[:, :, others])
        assert not torch.equal(one, other)


@BY_BACKWARD
@pytest.mark.parametrize("n_k", [40, 300])
def test_gradients_of_a_softcap_do_not_depend_on_other_rows(backend, arch, d, n_k, device, monkeypatch):
    case = Case(heads_q=2, heads_kv=1, n_q=40, n_k=n_k, d=d, rule={"softcap": 30.0})
    q, k, v, _ = make_inputs(case, device)
    large = q.clone()
    large[:, :, 5] *= 100
    g = random_like(q, 7)
    others = torch.arange(40, device=device) != 5
    of_rows = []
    for x in (q, large):
        out, lse = ffpa_attn.ffpa(x, k, v, return_lse=True, **case.rule)
        with running(backend, arch, device, monkeypatch):
            of_rows.append(torch.ops.ffpa_attn.backward(g, None, x, k, v, out, lse, **case.rule)[0])
    assert torch.equal(*(grad[:, :, others] for grad in of_rows)) and not torch.equal(*of_rows)
