"""Tests the persistent Triton forward: so many programs, O in global memory; it is interpreted where there is no GPU.

Its scratch is full of NaN before every launch: what a kernel reads before it wrote it shows up in the result.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import compare
import ffpa_attn
import oracle
import pytest
import test_numerics
import torch
from cases import Case, make_inputs
from ffpa_attn import env
from ffpa_attn.backends import triton_attention
from ffpa_attn.specs.problem import Problem, Visibility

pytest.importorskip("triton", reason="Triton is an extra")

_f16, _bf16 = torch.float16, torch.bfloat16
CORES = 3

TESTS_IN_A_ROW = 64  # tests that one process runs: they share kernels, seconds each, and a process compiles its own


@pytest.fixture(autouse=True)
def scratch(request, monkeypatch):
    """Forces the variant; gives all scratch of its launches, in turn: accumulators, maxima, sums."""
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, Triton compiles for it and interprets nothing")
    monkeypatch.setenv("FFPA_BACKEND", "triton")
    monkeypatch.setenv("FFPA_TRITON_CORES", str(CORES))
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    from ffpa_attn.triton_ops import persistent_kernels  # Triton reads the line above when a kernel is defined

    given = []

    def poisoned(*sizes):
        made = [x.fill_(torch.nan) for x in scratch(*sizes)]
        given.extend(made)
        return made

    scratch = persistent_kernels.scratch
    monkeypatch.setattr(persistent_kernels, "scratch", poisoned)
    return given


def accumulators(scratch) -> list[tuple]:
    """Returns the shapes of accumulators, [cores, rows of a block, columns], one for each launch."""
    return [tuple(x.shape) for x in scratch[::3]]


def check(case: Case, device):
    q, k, v, _ = make_inputs(case, device)
    out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True, **case.rule)
    want, want_lse = oracle.attention(q, k, v, **case.rule)
    compare.assert_close("out", out, want, compare.baseline(q, k, v, **case.rule)[0])
    compare.assert_lse_close("lse", lse, want_lse, q, k, case.rule.get("scale"))
    return out, lse


@pytest.mark.parametrize("dtype", [_f16, _bf16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 128, 128), (1, 2, 256, 256), *[(4, 32, 1024, 64), (4, 32, 4096, 64)] * torch.cuda.is_available()],
    ids=str,
)
def test_shapes(shape, dtype, device, scratch):
    z, h, n, d = shape
    case = Case(batch=z, heads_q=h, heads_kv=h, n_q=n, n_k=n, d=d, dtype=dtype, rule={"scale": 0.5})
    if n < 4096:
        check(case, device)
    else:  # the oracle holds N^2 numbers in float64: one batch entry after the other
        q, k, v, _ = make_inputs(case, device)
        out = ffpa_attn.ffpa(q, k, v, **case.rule)
        for i in range(z):
            entry = [x[i : i + 1] for x in (q, k, v)]
            want, _ = oracle.attention(*entry, **case.rule)
            compare.assert_close("out", out[i : i + 1], want, compare.baseline(*entry, **case.rule)[0])
    assert accumulators(scratch) == [(min(CORES, z * h * (-(-n // 128))), 128, d)]


_base = Case(dtype=_f16)
CASES = [
    *[
        _base.with_(n_q=n_q, n_k=n_k, d=d, dtype=dtype, rule={"causal": True, "align": align})
        for n_q, n_k, d in ((50, 230, 64), (230, 50, 64), (40, 70, 256))  # the second has rows without keys
        for align, dtype in (("bottom_right", _f16), ("top_left", _bf16))
    ],
    *[
        _base.with_(n_q=n_q, n_k=n_k, rule={"window": window, "align": align})
        for n_q, n_k, window, align in (
            (140, 210, (16, 0), "bottom_right"), (210, 140, (0, 9), "top_left"), (140, 70, (-1, 20), "bottom_right"),
            (40, 210, (7, -1), "top_left"),
        )
    ],
    # the first tile that a block meets is not the first there is
    _base.with_(n_q=160, n_k=400, d=128, rule={"causal": True, "window": (70, -1)}),
    _base.with_(n_k=90, d=256, rule={"softcap": 5.0, "scale": 1.0}),
    _base.with_(n_k=90, dtype=_bf16, rule={"softcap": 30.0, "scale": 1.0, "causal": True}),
    _base.with_(batch=2, heads_q=4, heads_kv=2, n_q=40, n_k=72, d=128),
    _base.with_(batch=2, heads_q=4, heads_kv=1, n_q=37, n_k=61, layout="BNHD", rule={"causal": True}),
    _base.with_(n_q=100, n_k=100, d=72, d_v=40, dtype=_bf16),
    _base.with_(n_q=100, n_k=100, d=40, d_v=136, rule={"causal": True}),
    _base.with_(n_q=1, n_k=1, d=8),
    _base.with_(n_q=5, n_k=0),
    _base.with_(batch=0),
    _base.with_(n_q=70, n_k=70, rule={"scale": 0.0}),
    _base.with_(n_q=70, n_k=70, rule={"scale": -0.3, "causal": True}),
]  # fmt: skip


@test_numerics.by_id(CASES)
def test_forward(case, device, scratch):
    test_numerics.test_forward(case, device)
    assert len(accumulators(scratch)) == 4 * bool(case.batch)


SIX_TASKS = Case(heads_q=2, heads_kv=1, n_q=300, n_k=70, d=64, dtype=_f16, rule={"causal": True, "align": "top_left"})


def test_any_number_of_cores_gives_the_same_bits(device, scratch, monkeypatch):
    results = []
    for cores in (1, 4, 6, 1000):
        monkeypatch.setenv("FFPA_TRITON_CORES", str(cores))
        results.append(check(SIX_TASKS, device))
    assert [cores for cores, _, _ in accumulators(scratch)] == [1, 4, 6, 6]
    assert not any(x[:, 0].isnan().any() for x in scratch), "each core has scratch of its own, and wrote it"
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_contents_of_scratch_do_not_matter(device, scratch, monkeypatch):
    from ffpa_attn.triton_ops import persistent_kernels

    poisoned = check(SIX_TASKS, device)
    make = persistent_kernels.scratch
    monkeypatch.setattr(persistent_kernels, "scratch", lambda *sizes: [x.zero_() for x in make(*sizes)])
    assert len(accumulators(scratch)) == 1
    assert all(torch.equal(a, b) for a, b in zip(poisoned, check(SIX_TASKS, device), strict=True))


def test_scratch_does_not_grow_with_n(device, scratch):
    for n_q, n_k in ((130, 20), (300, 20), (130, 300)):
        check(Case(heads_q=2, heads_kv=2, n_q=n_q, n_k=n_k, d=16, dtype=_f16), device)
    assert accumulators(scratch) == [(CORES, 128, 16)] * 3


def test_scratch_stays_within_the_workspace(device, scratch, monkeypatch):
    monkeypatch.setenv("FFPA_TRITON_CORES", "1000")
    monkeypatch.setenv("FFPA_WORKSPACE_MB", "1")
    check(Case(heads_q=10, heads_kv=10, n_q=4, n_k=4, d=8, d_v=256, dtype=_f16), device)
    assert accumulators(scratch) == [(7, 128, 256)]


def test_gradients(device, scratch):
    test_numerics.test_gradients(Case(n_q=50, n_k=70, dtype=_f16, rule={"causal": True}), device)
    assert len(accumulators(scratch)) == 1


# ---- the plan ----

PROBLEM = Problem(
    "forward", "cuda", "sm_90", "bf16", 1, 32, 32, 8192, 8192, 128, 128, None, Visibility(-1, -1, False), 0.1, 0.0, None, True, None, "f32", None
)  # fmt: skip


def test_the_plan_says_so():
    plan = triton_attention.plan(PROBLEM, env.run_flags())
    assert plan.kernel == "triton_persistent_forward_head_dim128_rows128_keys64" and plan.cores == CORES
    backward = triton_attention.plan(PROBLEM._replace(direction="backward", mask="bool"), env.run_flags())
    assert backward.kernel.startswith("triton_backward_") and backward.cores is None


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"mask": "bool"}, "the persistent Triton kernel (FFPA_TRITON_CORES=3) takes no mask"),
        ({"packed": (8192, 8192)}, "takes no packed sequences"),
        ({"num_stages": 2}, "has one stage, not 2"),
        ({"d_v": 264}, "up to 256 columns and not 264"),
    ],
)
def test_what_it_cannot(change, reason):
    assert reason in triton_attention.plan(PROBLEM._replace(**change), env.run_flags())


@pytest.mark.parametrize("d", ["64", "256", "72"])
def test_compiles_for_a_gpu_that_is_not_cudas(d):
    """Nothing in the kernel is CUDA's alone. For CUDA's GPUs, tests/triton_ops/test_triton.py compiles it with the others."""
    ours = "TRITON_INTERPRET", "FFPA_TRITON_CORES"  # variables that this file's tests set
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, Path(__file__).with_name("triton_offline.py"), "gfx942", d]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ((shared_bytes, products, *_),) = found.values()
    assert 0 < shared_bytes <= 64 << 10 and products > 0
