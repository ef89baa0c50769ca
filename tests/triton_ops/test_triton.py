"""Tests the Triton kernels for small head dims: every case, in Triton's interpreter where there is no GPU."""

import importlib
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import ffpa_attn
import pytest
import test_numerics
import torch
from cases import CASES, PACKED_CASES, Case, make_inputs
from ffpa_attn import env
from ffpa_attn.backends import triton_attention
from ffpa_attn.backends.choice import choose
from ffpa_attn.operators import ops
from ffpa_attn.specs import archs
from ffpa_attn.specs.problem import Problem, Visibility
from ffpa_attn.triton_ops import interpreter
from ffpa_attn.triton_ops import launch as triton_launch
from ffpa_attn.triton_ops.launch import Tiles
from ffpa_attn.triton_ops.tiles import DEFAULT, MEASURED

triton = pytest.importorskip("triton", reason="Triton is an extra")
of_triton = pytest.importorskip("triton.runtime.interpreter")

SMALL = [case for case in CASES if max(case.d, case.d_v or 0) <= triton_attention.MOST_COLUMNS]
SMALL_PACKED = [case for case in PACKED_CASES if max(case.d, case.d_v or 0) <= triton_attention.MOST_COLUMNS]

TESTS_IN_A_ROW = 64  # tests that one process runs: they share kernels, seconds each, and a process compiles its own


@pytest.fixture(autouse=True)
def launches(request, monkeypatch):
    """Forces the backend, and counts its calls: [forward, backward]."""
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, Triton compiles for it and interprets nothing")
    monkeypatch.setenv("FFPA_BACKEND", "triton")
    ops._plans.clear()  # plans hold what earlier calls were launched with
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    counts, run = [0, 0], ops.run

    def counted(plan, direction, *args, **more):
        counts[("forward", "backward").index(direction)] += plan.choice.backend == "triton"
        run(plan, direction, *args, **more)

    monkeypatch.setattr(ops, "run", counted)
    return counts


@test_numerics.by_id(SMALL)
def test_forward(case, device, launches):
    test_numerics.test_forward(case, device)
    adds = (case.mask or "bool").partition("-")[0] != "bool"  # then the largest logits are found in a call of their own
    assert launches == [(4 + adds) * bool(case.batch * case.n_q), 0]


@test_numerics.by_id(SMALL)
def test_gradients(case, device, launches):
    test_numerics.test_gradients(case, device)
    assert launches == [bool(case.batch * case.n_q), 1]


@test_numerics.by_id(SMALL_PACKED)
def test_packed(case, device, launches, monkeypatch):
    test_numerics.test_packed(case, device, "read", monkeypatch)
    assert launches == [3 * bool((case.lengths_q and max(case.lengths_q)) or case.spare), 1]


@test_numerics.by_id(SMALL[::5])
def test_without_descriptors(case, device, launches, monkeypatch):
    monkeypatch.setattr(triton_attention, "has_descriptor", lambda x: False)
    test_numerics.test_gradients(case, device)
    assert launches == [bool(case.batch * case.n_q), 1]


# ---- which tiles, and whether they compile ----

PROBLEM = Problem(
    "forward", "cuda", "sm_90", "bf16", 1, 32, 32, 8192, 8192, 128, 128, None, Visibility(-1, -1, False), 0.1, 0.0, None, True, None, "f32", None
)  # fmt: skip


def compiled_offline(*words):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name("triton_offline.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long(seconds=25)
@pytest.mark.parametrize("d", ["64", "256", "72"])
@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_kernels_compile_for_gpus(arch, d):
    """Kernels compile to tensor cores, within the GPU's shared memory, and take the parameters that we launch them with:
    the GPU itself need not be there.
    """
    found = compiled_offline(arch, d)
    assert len(found) == 13
    for name, (shared_bytes, products, hasty_stores, difference) in found.items():
        assert not difference, name
        assert shared_bytes <= archs.shared_memory_bytes(arch), name
        assert hasty_stores == 0 or not name.startswith("merge"), "its stores are to what other warps may yet read"
        without = ("statistics", "arrange", "block_maxima", "quantize", "merge", "dequantise")
        assert products > 0 or name.startswith(without), name


@pytest.mark.long(seconds=25)
def test_odd_rows_are_copied_by_16_bytes():
    """Rows may be apart by odd multiples of 16 bytes, have narrow values, or be copied in one stage: by single elements
    they came through one place, and ptxas 12.8 lost the descriptors of what lay there.
    """
    found = compiled_offline("sm_90", "odd")
    assert len(found) == 5
    for name, (copies, wrong) in found.items():
        assert copies >= 8, f"{name} has {copies} copies of 16 bytes"
        assert not wrong, (name, wrong)


def test_tiles_are_what_kernels_count_on():
    """Statistics of rows are padded to 128, and 8-bit keys come in blocks of sixteen that share a scale."""
    kinds = [(work, row) for (work, _), row in MEASURED["sm_90"].items()] + list(DEFAULT.items())
    for work, row in kinds:
        for tiles in (
            Tiles(*found)
            for by_width in row.values()
            for found in ([by_width] if isinstance(by_width, tuple) else by_width)
        ):
            assert 128 % tiles.rows == 0 and 128 % tiles.keys == 0 and tiles.keys % 16 == 0, (work, tiles)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_threads_take_turns_in_the_interpreter():
    """What is mended for one thread would otherwise be undone by another."""
    entered, mended = threading.Event(), []

    def other():
        with interpreter.exact():
            entered.set()
            mended.append(of_triton._patch_lang)

    thread = threading.Thread(target=other)
    theirs = of_triton._patch_lang
    with interpreter.exact():
        thread.start()
        assert not entered.wait(0.2)
    thread.join()
    assert entered.is_set() and of_triton._patch_lang is theirs
    assert theirs in [cell.cell_contents for cell in mended[0].__closure__]  # the other thread's would grow a chain


def test_without_triton(monkeypatch):
    monkeypatch.setattr(triton_attention, "why_not", lambda: "Triton is not installed")
    assert triton_attention.plan(PROBLEM, env.run_flags()) == "Triton is not installed"


def test_explain_names_the_kernel():
    q = torch.empty(1, 2, 100, 128, dtype=torch.bfloat16, device="meta")
    choice = ffpa_attn.explain(q, q, q, arch="sm_90")
    assert choice.backend == "triton" and choice.kernel.startswith("triton_forward_head_dim128_rows")
    assert "FFPA_BACKEND=triton asks for it" in choice.why


@pytest.mark.parametrize("softcap", [1e-60, 1e-40, 1e-3, 0.8, 1e3, 1e7, 3e38])
def test_softcaps_of_any_size(softcap, device):
    case = Case(n_q=33, n_k=140, d=64, dtype=torch.float16, rule={"softcap": softcap, "scale": -0.05, "causal": True})
    test_numerics.test_forward(case, device)


def test_gradients_of_a_sum(device):
    """The gradient of a sum is one number, expanded."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 40, 64, device=device, dtype=torch.float16))
    out = ffpa_attn.ffpa(q, k, v)
    got = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    assert all(map(torch.equal, got, torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_delta_is_taken_as_it_is(packed, device):
    """Where it is known, neither O nor the gradient of the LSE is read; the last row sees no key."""
    shape = (70, 2, 64) if packed else (2, 2, 70, 64)
    q, k, v, grad, out = torch.randn(5, *shape, device=device, dtype=torch.float16)
    lse, of_lse = torch.randn(2, *(shape[1::-1] if packed else shape[:3]), device=device)
    lse = lse.abs() + 6
    lse[..., -1] = -torch.inf
    delta = torch.ops.ffpa_attn.sink_gradient_delta(grad, of_lse, out, lse, torch.zeros(2, device=device))[1]
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32, device=device)
    name, more = ("varlen_backward", (offsets, offsets, 40, 40)) if packed else ("backward", (None,))
    operator = getattr(torch.ops.ffpa_attn, name)
    want = operator(grad, of_lse, q, k, v, out, lse, *more)
    got = operator(grad, torch.full_like(lse, torch.nan), q, k, v, torch.full_like(out, torch.nan), lse, *more, delta)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3)


def test_gradients_of_tiles_longer_than_the_rows(device, monkeypatch):
    """Where there are no rows, P is 0 even beside rows whose scores are so low that it would be infinite."""
    monkeypatch.setitem(DEFAULT["keys"], 64, [(128, 64, 4, 2)])
    monkeypatch.setitem(MEASURED, "sm_90", {})
    q, v = torch.randn(2, 1, 3, 64, 64, device=device, dtype=torch.float16)
    q = q.abs() + 10
    q, k, v = (x.requires_grad_() for x in (q, -q, v))
    out = ffpa_attn.ffpa(q, k, v)
    got = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(x.isfinite().all() for x in got)


def test_what_other_sequences_hold_stays_theirs(device):
    """The next sequence's NaN, and that of rows of no sequence, reaches no gradient of this one."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 60, 2, 64, device=device, dtype=torch.float16))
    ends = torch.tensor([0, 20, 40], dtype=torch.int32, device=device)
    out = ffpa_attn.ffpa_varlen(q, k, v, ends, ends, 20, 20)
    grad = torch.randn_like(out)
    want = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    grad[20:] = torch.nan
    got = torch.autograd.grad(out, (q, k, v), grad)
    for gradient, clean in zip(got, want, strict=True):
        assert torch.equal(gradient[:20], clean[:20]) and not gradient[40:].any()


def some_rows_masked(n_q, n_k, device):
    mask = torch.ones(n_q, n_k, dtype=torch.bool, device=device)
    mask[3:70] = False
    return mask


@pytest.mark.parametrize(
    ("n_q", "n_k", "rule"),
    [
        (100, 70, "mask"),
        (100, 70, "additive mask"),
        (200, 130, {"causal": True}),
        (140, 139, {"causal": True}),
        (140, 70, {"window": (5, 0), "align": "top_left"}),
        (140, 134, {"window": (5, 0), "align": "top_left"}),
        (140, 136, {"window": (-1, 3)}),
    ],
    ids=str,
)
def test_rows_without_keys_pass_on_nothing(n_q, n_k, rule, device):
    """Rows pass on nothing, whatever their Q, dO and dLSE hold."""
    q, k, v = (torch.randn(1, 2, n, 64, device=device, dtype=torch.float16) for n in (n_q, n_k, n_k))
    if isinstance(rule, str):
        mask = some_rows_masked(n_q, n_k, device)
        bias = torch.zeros(n_q, n_k, device=device).masked_fill_(~mask, -torch.inf).to(q.dtype)
        rule = {"mask": mask if rule == "mask" else bias}

    def gradients(anything: float):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        if "mask" not in rule or rule["mask"].dtype == torch.bool:  # NaN hides from a sum with -inf
            inputs[0].data.masked_fill_(blind[..., None], anything)
        out, lse = ffpa_attn.ffpa(*inputs, return_lse=True, **rule)
        grads = [torch.ones_like(x).masked_fill_(blind if x is lse else blind[..., None], anything) for x in (out, lse)]
        return torch.autograd.grad((out, lse), inputs, grads)

    _, lse = ffpa_attn.ffpa(q, k, v, return_lse=True, **rule)
    blind = lse.isneginf()
    assert blind.any() and not blind.all()
    got, want = gradients(torch.nan), gradients(0.0)
    assert all(map(torch.equal, got, want)) and not got[0][blind].any()


def test_packed_rows_without_keys_pass_on_nothing(device):
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 60, 2, 64, device=device, dtype=torch.float16))
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 10, 60), (0, 10, 30)))
    out = ffpa_attn.ffpa_varlen(q, k, v, ends_q, ends_k, 50, 20, causal=True)
    grad = torch.ones_like(out)
    grad[10:40] = 0
    want = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    grad[10:40] = torch.nan
    got = torch.autograd.grad(out, (q, k, v), grad)
    assert all(map(torch.equal, got, want)) and not got[0][10:40].any()


def test_nan_stays(device):
    q, k, v = torch.randn(3, 1, 2, 40, 64, device=device, dtype=torch.float16)
    q[0, 0, 3, 5] = torch.nan
    out, lse = ffpa_attn.ffpa(q, k, v, causal=True, return_lse=True)
    assert out[0, 0, 3].isnan().all() and lse[0, 0, 3].isnan()
    assert out.isnan().sum() == 64 and lse.isnan().sum() == 1


def test_a_kernel_that_does_not_compile_leaves_calls_to_others(monkeypatch):
    """Automatic calls of its kind go on; those that ask for Triton say what failed. Other kinds stay."""
    monkeypatch.setattr(triton_attention, "_gave_up", [])
    others = [
        PROBLEM._replace(**changes)
        for changes in (
            {"direction": "backward"}, {"dtype": "f16"}, {"arch": "sm_80"}, {"d_v": 64}, {"d_qk": 120}, {"softcap": 3.0}, {"scale": -1.0},
            {"mask": "bool"}, {"packed": (8192, 8192)}, {"visibility": Visibility(-1, 0, False)}, {"needs_lse": False},
            {"sinks": True}, {"largest": True},
        )
    ]  # fmt: skip
    plan = triton_attention.plan(PROBLEM, env.run_flags())
    triton_attention.give_up(PROBLEM, plan, "Triton failed here, at forward_kernel: out of resources")
    for problem in (PROBLEM, PROBLEM._replace(n_q=3, n_k=77, batch=2, heads_q=8, heads_kv=2, scale=0.3)):
        assert "out of resources" in triton_attention.plan(problem, env.run_flags())
    assert not any(isinstance(triton_attention.plan(problem, env.run_flags()), str) for problem in others)
    assert triton_attention.why_not() is None
    with pytest.raises(NotImplementedError, match="FFPA_BACKEND=triton cannot run .*out of resources"):
        choose(PROBLEM, env.run_flags())
    monkeypatch.delenv("FFPA_BACKEND")
    first_here = PROBLEM._replace(direction="backward")
    assert choose(first_here, env.run_flags()).backend == "triton"
    triton_attention.give_up(first_here, triton_attention.plan(first_here, env.run_flags()), "out of resources")
    assert "out of resources" in dict(choose(first_here, env.run_flags()).rejected)["triton"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_call_whose_kernel_does_not_compile_is_made_by_another(monkeypatch):
    monkeypatch.setattr(triton_attention, "_gave_up", [])
    monkeypatch.setattr(triton_launch, "_unable", {})
    monkeypatch.delenv("FFPA_BACKEND")
    x = torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    want = ffpa_attn.ffpa(x.cpu(), x.cpu(), x.cpu())

    def failing(*args, **options):
        raise RuntimeError("no compiler")

    ops._plans.clear()
    with warnings.catch_warnings(), monkeypatch.context() as patch:
        patch.setattr(triton.runtime.JITFunction, "run", failing)
        warnings.simplefilter("ignore")
        out = ffpa_attn.ffpa(x, x, x)
        out.sum().backward()
    torch.testing.assert_close(out.cpu(), want, atol=2e-3, rtol=0)
    assert triton_attention._gave_up and all("no compiler" in reason for _, reason in triton_attention._gave_up)
    ops._plans.clear()
    ffpa_attn.ffpa(x, x, x, softcap=3.0)  # a call of another kind
    assert [plan.choice.backend for plan in ops._plans.values()] == ["triton"]


def test_gradients_of_both_types_in_turn(device):
    """What is kept of one call is not taken for the other's."""
    q, k, v, _ = make_inputs(Case(n_q=40, n_k=90, d=64, dtype=torch.float16), device)
    out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True)
    saved = test_numerics.random_like(out, 3), None, q, k, v, out, lse
    in_turn = [torch.ops.ffpa_attn.backward(*saved, fp32_grads=wide)[:3] for wide in (False, True, False, True)]
    for narrow, wide, narrow_again, wide_again in zip(*in_turn, strict=True):
        assert narrow.dtype == torch.float16 and wide.dtype == torch.float32
        assert torch.equal(narrow, wide.half()) and torch.equal(narrow, narrow_again) and torch.equal(wide, wide_again)


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


def test_an_expanded_gradient(device):
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


def test_no_kernel_reads_a_global_nan():
    """Triton compares what a kernel read of its module when it was compiled with what is there now, and NaN is no NaN's
    equal: on a GPU the second call of such a kernel fails.
    """
    package = Path(triton_attention.__file__).parents[1]
    files = (*package.glob("triton_ops/[a-z]*.py"), *package.glob("backends/triton_*.py"))
    modules = [importlib.import_module(f"ffpa_attn.{path.parent.name}.{path.stem}") for path in files]
    constants = {
        f"{module.__name__}.{name}": getattr(value, "value", value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, (float, triton.language.constexpr))
    }
    assert len(constants) > 10
    assert not [name for name, value in constants.items() if value != value]
