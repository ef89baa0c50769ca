"""A call without memory says how much it wants, and which workspace helps. (test_campaign.py fails each allocation.)"""

import contextlib
import re

import campaign_stress
import ffpa_attn
import pytest
import torch
from ffpa_attn.operators import ops
from ffpa_attn.testing import emulate

with contextlib.suppress(ImportError):  # Triton is an extra; it reads TRITON_INTERPRET when imported, before any test
    import triton  # noqa: F401


@pytest.fixture(autouse=True)
def new_plans(monkeypatch):
    monkeypatch.setattr(ops, "_plans", {})


@pytest.fixture
def on_triton(monkeypatch):
    pytest.importorskip("triton", reason="Triton is an extra")
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, Triton compiles for it and interprets nothing")
    monkeypatch.setenv("FFPA_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def inputs(n: int = 20, d: int = 64):
    return torch.randn(3, 1, 2, n, d, generator=torch.Generator().manual_seed(0)).bfloat16()


def gradients():
    q, k, v = (x.requires_grad_() for x in inputs())
    return torch.autograd.grad(ffpa_attn.ffpa(q, k, v).sum(), (q, k, v))


def fp8():
    return ffpa_attn.ffpa_fp8(*(x.to(torch.float8_e4m3fn) for x in inputs()))


def said_where_each_allocation_fails(call) -> list[str]:
    said = []
    while True:
        with campaign_stress.failing_allocation(len(said) + 1):
            try:
                call()
            except torch.OutOfMemoryError as error:
                said.append(str(error))
            else:
                return said


def bytes_allocated(call, monkeypatch) -> int:
    """Returns the bytes allocated inside the package, beside what is as large as other tensors."""
    total, empty = [], torch.empty

    def counted(*args, **options):
        total.append(empty(*args, **options).nbytes)
        return empty(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", counted)
        call()
    return sum(total)


@pytest.mark.parametrize(
    "call", [lambda: ffpa_attn.ffpa(*inputs()), gradients, fp8], ids=["forward", "gradients", "fp8"]
)
def test_triton_without_a_workspace(call, on_triton, monkeypatch):
    """A smaller cap is no way out, as the same is then asked for."""
    said = said_where_each_allocation_fails(call)
    assert len(said) >= 2
    for sentence in said:
        assert "it has no workspace, and FFPA_WORKSPACE_MB=1, the least that works, takes no less than 1024" in sentence
        assert "set FFPA_WORKSPACE_MB" not in sentence
    with_most = bytes_allocated(call, monkeypatch)
    monkeypatch.setenv("FFPA_WORKSPACE_MB", "1")
    assert bytes_allocated(call, monkeypatch) == with_most


def test_triton_with_a_workspace(on_triton, monkeypatch):
    """Each core has accumulators: what is said is what is asked for, and the least takes less."""
    monkeypatch.setenv("FFPA_TRITON_CORES", "20")
    (q, _, _), (_, k, _), (_, _, v) = inputs(10 * 128 + 1, 16), inputs(16, 16), inputs(16, 256)

    def call():
        ffpa_attn.ffpa(q, k, v)

    said = said_where_each_allocation_fails(call)
    assert len(said) == 5  # two results, three kinds of scratch
    for sentence in said:
        assert "set FFPA_WORKSPACE_MB=1, the least that works" in sentence and "workspace of 2.52 MiB" in sentence
    with_most = bytes_allocated(call, monkeypatch)
    assert with_most == 20 * 128 * 258 * 4
    monkeypatch.setenv("FFPA_WORKSPACE_MB", "1")
    assert bytes_allocated(call, monkeypatch) <= 1 << 20


def test_kernels_without_a_workspace(monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    with emulate("sm_90a"):
        first, *_ = said_where_each_allocation_fails(lambda: ffpa_attn.ffpa(*inputs()))
    assert "it has no workspace" in first


def test_a_workspace_that_is_not_known_yet(monkeypatch):
    """Results come first: how much else is asked for hangs on the GPU."""
    monkeypatch.setenv("FFPA_BACKEND", "mma")
    with emulate("sm_80"):
        first, second, third = said_where_each_allocation_fails(lambda: ffpa_attn.ffpa(*inputs(d=512), level=3))
    assert all("workspace of up to 1024 MiB (FFPA_WORKSPACE_MB=1024)" in sentence for sentence in (first, second))
    assert float(re.search(r"workspace of ([\d.]+) MiB", third)[1]) > 0.1
