"""Peak memory is the tensors plus the workspace cap, whatever the cap; results are right with any."""

import compare
import oracle
import pytest
import torch
from cases import Case, make_inputs
from ffpa_attn.operators import ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

MB = 1 << 20


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all live storages that operators made while it was active."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = WeakIdKeyDictionary(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before:
                self.storages[x.untyped_storage()] = x.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self.storages.values()))
        return results


def peak_of(device, function):
    """Returns the bytes that the body of an operator allocates at most, its results included."""
    if device == "cuda":
        torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))  # cuBLAS takes 32 MiB once, and keeps it
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - start
    with torch.no_grad(), PeakMemory() as memory:
        function()
    return memory.peak


def bytes_of(*tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.fixture
def inputs(device):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 300, 256, generator=generator).to(device, torch.bfloat16) for h in (4, 2, 2))
    mask = torch.randn(1, 1, 300, 300, generator=generator).to(device)
    return q, k, v, mask


CAPS = [1, 4, 64]


def small(n_q, h, n_k):
    """Returns what is O(N) whatever the cap: a few f32 numbers for each row of one head, and one row of scores."""
    return 16 * n_q * h * 4 + 64 * n_k + MB // 8


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("masked", [False, True])
def test_forward(inputs, device, cap, masked, monkeypatch):
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap))
    q, k, v, mask = inputs
    rule = {"causal": True, "softcap": 10.0}
    kept = []
    peak = peak_of(device, lambda: kept.append(ops._BODIES["forward"](q, k, v, mask if masked else None, **rule)))
    assert peak <= bytes_of(*kept[0]) + cap * MB + small(300, 4, 300)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("masked", [False, True])
def test_backward(inputs, device, cap, masked, monkeypatch):
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap))
    q, k, v, mask = inputs
    rule = {"causal": True, "softcap": 10.0}
    mask = mask if masked else None
    out, lse = ops._BODIES["forward"](q, k, v, mask, **rule)
    args, kept = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, mask), []
    peak = peak_of(device, lambda: kept.append(ops._BODIES["backward"](*args, mask_grad=masked, **rule)))
    assert peak <= bytes_of(*kept[0]) + cap * MB + small(300, 4, 300)


@pytest.mark.parametrize("cap", CAPS)
def test_packed(inputs, device, cap, monkeypatch):
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap))
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in inputs[:3])
    cu = torch.tensor([0, 140, 140, 300], dtype=torch.int32, device=device)
    offsets, kept = (cu, cu, 160, 160), []
    peak = peak_of(device, lambda: kept.append(ops._BODIES["varlen_forward"](q, k, v, *offsets, causal=True)))
    assert peak <= bytes_of(*kept[0]) + cap * MB + small(300, 4, 300)
    out, lse = kept.pop()
    args = (torch.randn_like(out), None, q, k, v, out, lse, *offsets)
    peak = peak_of(device, lambda: kept.append(ops._BODIES["varlen_backward"](*args, causal=True)))
    assert peak <= bytes_of(*kept[0]) + cap * MB + small(300, 4, 300)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("masked", [False, True])
def test_sinks_and_the_largest_scores(inputs, device, cap, masked, monkeypatch):
    """Beside an additive mask a second call, of eight columns of V and a bool mask, finds the largest scores."""
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap))
    q, k, v, mask = inputs
    sinks, kept = torch.randn(4).to(device), []
    args = q, k, v, mask if masked else None, sinks
    peak = peak_of(device, lambda: kept.append(ops._BODIES["forward_max_logits"](*args, causal=True)))
    more = mask.numel() + bytes_of(kept[0][0][..., :8]) if masked else 0
    assert peak <= bytes_of(*kept[0]) + more + cap * MB + small(300, 4, 300)
    out, lse, _ = kept.pop()
    args = torch.randn_like(out), torch.randn_like(lse), out, lse, sinks
    for name, results in (("sink_gradient", 0), ("sink_gradient_delta", lse.nbytes)):
        peak = peak_of(device, lambda name=name: kept.append(ops._BODIES[name](*args)))
        assert peak <= results + cap * MB + small(300, 4, 0)


def test_no_copies_of_strided_inputs(device, monkeypatch):
    """Image models pass q, k and v so: row stride 3 D, one head."""
    monkeypatch.setenv("FFPA_WORKSPACE_MB", "1")
    x = torch.randn(1, 1000, 3, 512).to(device, torch.bfloat16)
    q, k, v = (x[:, None, :, i] for i in range(3))
    kept = []
    peak = peak_of(device, lambda: kept.append(ops._BODIES["forward"](q, k, v)))
    assert peak <= bytes_of(*kept[0]) + MB + small(1000, 1, 1000)


@pytest.mark.parametrize("cap", CAPS)
def test_sdpa_counts_too(inputs, device, cap, monkeypatch):
    """Without an LSE PyTorch's own attention may run, whose result is copied."""
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap))
    q, kept = inputs[0].repeat(1, 1, 2, 1), []
    peak = peak_of(device, lambda: kept.append(ops._BODIES["forward"](q, q, q, return_lse=False)))
    assert peak <= bytes_of(*kept[0]) + cap * MB + small(600, 4, 600)


@pytest.mark.parametrize("cap", CAPS)
def test_an_expanded_gradient_is_not_copied(inputs, device, cap, monkeypatch):
    """sum().backward() hands over one scalar with strides 0."""
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap))
    q, k, v, _ = inputs
    out, lse = ops._BODIES["forward"](q, k, v)
    grad, kept = torch.ones((), dtype=out.dtype, device=device).expand(out.shape), []
    peak = peak_of(device, lambda: kept.append(ops._BODIES["backward"](grad, None, q, k, v, out, lse)))
    assert peak <= bytes_of(*kept[0]) + cap * MB + small(300, 4, 300)


@pytest.mark.parametrize("cap", [1, 256])
def test_any_cap_gives_the_same(device, cap, monkeypatch):
    """Every way of cutting a problem into tiles is held to the oracle."""
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap))
    case = Case(heads_q=4, heads_kv=2, n_q=200, n_k=230, d=64, rule={"causal": True})
    q, k, v, _ = make_inputs(case, device)
    out, lse = ops._BODIES["forward"](q, k, v, causal=True)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    got = (out, *ops._BODIES["backward"](g, None, q, k, v, out, lse, causal=True)[:3])
    results = [got]
    for function in (lambda *x: oracle.attention(*x, causal=True)[0], lambda *x: compare.baseline(*x, causal=True)[0]):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        result = function(*leaves)
        results.append((result.detach(), *torch.autograd.grad(result, leaves, g.to(result.dtype))))
    for name, ours, want, base in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        compare.assert_close(name, ours, want, base)
