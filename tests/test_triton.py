"""The Triton kernels for small head dims: every case of the matrix, in Triton's interpreter where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ffpa_attn
import pytest
import test_numerics
import torch
from cases import CASES, PACKED_CASES, Case, make_inputs
from ffpa_attn import archs, env, ops, triton_attention
from ffpa_attn.spec import Problem, Visibility

pytest.importorskip("triton", reason="Triton is an extra")

SMALL = [case for case in CASES if max(case.d, case.d_v or 0) <= triton_attention.MOST_COLUMNS]
SMALL_PACKED = [case for case in PACKED_CASES if max(case.d, case.d_v or 0) <= triton_attention.MOST_COLUMNS]


@pytest.fixture(autouse=True)
def launches(request, monkeypatch):
    """Forces the backend, and counts its calls: [forward, backward]."""
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, Triton compiles for it and interprets nothing")
    monkeypatch.setenv("FFPA_BACKEND", "triton")
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    counts = [0, 0]
    for i, name in enumerate(("forward", "backward")):
        table = ops._FORWARD if name == "forward" else ops._BACKWARD

        def counted(*args, i=i, body=table["triton"]):
            counts[i] += 1
            body(*args)

        monkeypatch.setitem(table, "triton", counted)
    return counts


@test_numerics.by_id(SMALL)
def test_forward(case, device, launches):
    test_numerics.test_forward(case, device)
    assert launches == [3 * bool(case.batch * case.n_q), 0]


@test_numerics.by_id(SMALL)
def test_gradients(case, device, launches):
    test_numerics.test_gradients(case, device)
    assert launches == [bool(case.batch * case.n_q), 1]


@test_numerics.by_id(SMALL_PACKED)
def test_packed(case, device, launches, monkeypatch):
    test_numerics.test_packed(case, device, "read", monkeypatch)
    assert launches == [2 * bool((case.lengths_q and max(case.lengths_q)) or case.spare), 1]


# ---- which tiles, and whether they compile ----

PROBLEM = Problem(
    "forward", "cuda", "sm_90", "bf16", 1, 32, 32, 8192, 8192, 128, 128, False, Visibility(-1, -1, False), 0.1, 0.0, None, True, None, "f32", None
)  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
def test_kernels_compile_for_gpus(arch):
    """With tensor cores, within the GPU's shared memory: the GPU itself need not be there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name("triton_offline.py"), arch]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 12
    for name, (shared_bytes, products) in found.items():
        assert 0 < shared_bytes <= archs.shared_memory_bytes(arch), name
        assert products > 0, name


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("d", [8, 16, 64, 72, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100"])
def test_every_gpu_has_a_plan(arch, d, direction):
    plan = triton_attention.plan(PROBLEM._replace(arch=arch, d_qk=d, direction=direction), env.run_flags())
    assert plan.widths == (max(16, 1 << (d - 1).bit_length()), 128) and (plan.over_keys is None) == (
        direction == "forward"
    )
    assert plan.kernel.startswith(f"triton_{direction}_head_dim{max(plan.widths)}_rows")


@pytest.mark.parametrize(
    "change, flag, reason",
    [
        ({"d_v": 264}, {}, "up to 256 columns and not 264"),
        ({"acc": "f16", "dtype": "f16"}, {}, "accumulate in f32, not as acc='f16'"),
        ({"n_k": 2**29}, {}, "count positions in 32 bits"),
        ({"num_stages": 4, "d_qk": 256, "d_v": 256, "arch": "sm_86"}, {}, "4 stages of 256 columns do not fit"),
        ({}, {"ENABLE_FFPA_SMEM_SWIZZLE_Q": "0"}, "do not know ENABLE_FFPA_SMEM_SWIZZLE_Q=0"),
        ({"device": "cpu"}, {"TRITON_INTERPRET": "0"}, "set TRITON_INTERPRET=1"),
    ],
)
def test_what_triton_cannot(change, flag, reason, monkeypatch):
    for name, value in flag.items():
        monkeypatch.setenv(name, value)
    assert reason in triton_attention.plan(PROBLEM._replace(**change), env.run_flags())


def test_without_triton(monkeypatch):
    monkeypatch.setattr(triton_attention, "why_not", lambda: "Triton is not installed")
    assert triton_attention.plan(PROBLEM, env.run_flags()) == "Triton is not installed"


def test_explain_names_the_kernel():
    q = torch.empty(1, 2, 100, 128, dtype=torch.bfloat16, device="meta")
    choice = ffpa_attn.explain(q, q, q, arch="sm_90")
    assert choice.backend == "triton" and choice.kernel == "triton_forward_head_dim128_rows128_keys64"
    assert "FFPA_BACKEND=triton asks for it" in choice.why


@pytest.mark.parametrize("softcap", [1e-60, 1e-40, 1e-3, 0.8, 1e3, 1e7, 3e38])
def test_softcaps_of_any_size(softcap, device):
    case = Case(n_q=33, n_k=140, d=64, dtype=torch.float16, rule={"softcap": softcap, "scale": -0.05, "causal": True})
    test_numerics.test_forward(case, device)


def test_gradients_from_merged_results(device):
    """The backward takes out and LSE of all the keys, and gives its own keys' share of the gradients."""
    q, k, v, _ = make_inputs(Case(n_q=40, n_k=90, d=64, dtype=torch.float16), device)
    out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True)
    grad = test_numerics.random_like(out, 3)
    whole = torch.ops.ffpa_attn.backward(grad, None, q, k, v, out, lse)
    parts = [
        torch.ops.ffpa_attn.backward(grad, None, q, k[:, :, keys], v[:, :, keys], out, lse, fp32_grads=True)
        for keys in (slice(0, 50), slice(50, 90))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0].float(), atol=2e-3, rtol=2e-3)
    for i in (1, 2):
        joined = torch.cat([part[i] for part in parts], 2)
        assert joined.dtype == torch.float32
        torch.testing.assert_close(joined, whole[i].float(), atol=2e-3, rtol=2e-3)


def test_an_expanded_gradient_is_read_where_it_lies(device):
    q, k, v, _ = make_inputs(Case(n_q=40, n_k=50, d=64, dtype=torch.float16), device)
    leaves = [[x.detach().clone().requires_grad_() for x in (q, k, v)] for _ in range(2)]
    ffpa_attn.ffpa(*leaves[0]).sum().backward()
    out = ffpa_attn.ffpa(*leaves[1])
    out.backward(torch.ones_like(out))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*leaves, strict=True))


def test_bits_repeat(device):
    case = Case(heads_q=4, heads_kv=2, n_q=70, n_k=90, d=64, dtype=torch.float16, rule={"causal": True})
    runs = []
    for _ in range(3):
        leaves = [x.detach().clone().requires_grad_() for x in make_inputs(case, device)[:3]]
        ffpa_attn.ffpa(*leaves, **case.rule).square().sum().backward()
        runs.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
