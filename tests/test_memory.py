"""Peak memory is the tensors plus the workspace cap, whatever the cap; results do not depend on it."""

import pytest
import torch
from ffpa_attn import ops
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
    """Bytes that the body of an operator allocates at most, its results included."""
    if device == "cuda":
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
    """What is O(N) whatever the cap: a few f32 numbers for each row of a single head, and one row of scores."""
    return 16 * n_q * h * 4 + 64 * n_k + MB // 8


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("masked", [False, True])
def test_forward(inputs, device, cap, masked, monkeypatch):
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap))
    q, k, v, mask = inputs
    rule = {"causal": True, "softcap": 10.0}
    kept = []
    peak = peak_of(device, lambda: kept.append(ops._forward_dense(q, k, v, mask if masked else None, **rule)))
    assert peak <= bytes_of(*kept[0]) + cap * MB + small(300, 4, 300)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("masked", [False, True])
def test_backward(inputs, device, cap, masked, monkeypatch):
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap))
    q, k, v, mask = inputs
    rule = {"causal": True, "softcap": 10.0}
    mask = mask if masked else None
    out, lse = ops._forward_dense(q, k, v, mask, **rule)
    args, kept = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, mask), []
    peak = peak_of(device, lambda: kept.append(ops._backward_dense(*args, mask_grad=masked, **rule)))
    assert peak <= bytes_of(*kept[0]) + cap * MB + small(300, 4, 300)


@pytest.mark.parametrize("cap", CAPS)
def test_packed(inputs, device, cap, monkeypatch):
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap))
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in inputs[:3])
    cu = torch.tensor([0, 140, 140, 300], dtype=torch.int32, device=device)
    offsets, kept = (cu, cu, 160, 160), []
    peak = peak_of(device, lambda: kept.append(ops._forward_packed(q, k, v, *offsets, causal=True)))
    assert peak <= bytes_of(*kept[0]) + cap * MB + small(300, 4, 300)
    out, lse = kept.pop()
    args = (torch.randn_like(out), None, q, k, v, out, lse, *offsets)
    peak = peak_of(device, lambda: kept.append(ops._backward_packed(*args, causal=True)))
    assert peak <= bytes_of(*kept[0]) + cap * MB + small(300, 4, 300)


def test_no_copies_of_strided_inputs(device, monkeypatch):
    """Row stride 3 D, one head: the way image models pass q, k and v."""
    monkeypatch.setenv("FFPA_WORKSPACE_MB", "1")
    x = torch.randn(1, 1000, 3, 512).to(device, torch.bfloat16)
    q, k, v = (x[:, None, :, i] for i in range(3))
    kept = []
    peak = peak_of(device, lambda: kept.append(ops._forward_dense(q, k, v)))
    assert peak <= bytes_of(*kept[0]) + MB + small(1000, 1, 1000)


def test_the_cap_changes_speed_only(inputs, device, monkeypatch):
    q, k, v, _ = (x[..., :200, :64].contiguous() if x.shape[-1] == 512 else x for x in inputs)
    results = []
    for cap in (1, 256):
        monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap))
        out, lse = ops._forward_dense(q, k, v, causal=True)
        results.append((out, lse, *ops._backward_dense(torch.ones_like(out), None, q, k, v, out, lse, causal=True)[:3]))
    for small_cap, large_cap in zip(*results, strict=True):
        torch.testing.assert_close(small_cap, large_cap, atol=2e-2, rtol=2e-2)
