"""Tests the forward for small head dims, in which each warp owns whole rows."""

import pytest
import torch
from cases import Case, make_inputs
from ffpa_attn import env
from ffpa_attn.backends import levels
from ffpa_attn.backends.levels import LevelPlan
from ffpa_attn.launching import emulated, native
from ffpa_attn.operators import ops
from ffpa_attn.specs import archs
from ffpa_attn.specs.problem import Problem, Visibility
from ffpa_attn.specs.spec import ForwardMmaRows, aot_specs
from ffpa_attn.testing import emulate
from test_mma import call, check, check_moving_maxima

SHIPPED = [spec for spec in aot_specs(env.all_flags()) if isinstance(spec, ForwardMmaRows) and not spec.paged]
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
ACCS = {("f32", "f32"): "f32", ("f16", "f16"): "f16", ("f32", "f16"): "mixed"}
RULES = [
    {},
    {"causal": True},
    {"causal": True, "align": "top_left", "window": (40, -1)},
    {"scale": -0.3},
    {"scale": 0.0},
    {"scale": 1e-60, "causal": True},
    {"softcap": 5.0, "scale": 1.0, "causal": True},
]
PROBLEM = Problem(
    "forward", "cuda", "sm_90", "bf16", 1, 32, 32, 8192, 8192, 128, 128, None, Visibility(-1, -1, False), 0.09, 0.0, None, True, None, "f32", None
)  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("spec", SHIPPED, ids=[spec.name for spec in SHIPPED])
def test_every_shipped_kernel_emulated(spec, seed, monkeypatch):
    """There are two row tiles of two heads, with tails; as many mma as arithmetic says, and no bank conflicts."""
    d = spec.head_dim
    n_q, n_k = spec.rows + 5, 2 * spec.keys + 9
    case = Case(heads_kv=1, n_q=n_q, n_k=n_k, d=(d, d - 8, d)[seed], d_v=(d, d, d - 24)[seed], dtype=DTYPES[spec.dtype])
    case = case.with_(rule=RULES[seed], mask=None if spec.plain else (None, "additive-2d", "bool")[seed])
    monkeypatch.setattr(ops, "_plans", {})
    arch = ("sm_80", "sm_80", "sm_90a")[seed]
    limit = archs.shared_memory_bytes(arch.rstrip("a"))
    stages = next(n for n in ((1, 3, 4)[seed], 2, 1) if levels.smem_bytes(spec, d, n, True) <= limit)
    monkeypatch.setattr(levels, "plan", lambda p, flags: LevelPlan(spec, 1, stages, True))
    inputs = make_inputs(case, "cpu", seed)
    with emulate(arch, seed=seed) as reports:
        out, lse = call(case, inputs)
    (report,) = reports
    assert report["kernel"] == spec.name
    check(case, inputs, out, lse, spec.acc_qk, spec.acc_pv)
    if seed == 0:
        slices = 4 + 1 if spec.rows == 64 else 2 * spec.rows // 16  # of 16 rows; those without rows are left out
        assert report["mma"] == 2 * 3 * slices * (spec.keys // 8) * (d // 16) * 2
        assert report["bank_conflict_ratio"] <= 1.001


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    "d, mask", [(64, None), (128, None), (128, "bool-some-rows-empty"), (192, "additive-2d"), (256, None)]
)
def test_rules_emulated(d, mask, rule):
    case = Case(heads_q=4, heads_kv=2, n_q=70, n_k=150, d=d, dtype=torch.float16, mask=mask, rule=rule)
    inputs = make_inputs(case, "cpu")
    with emulate("sm_90a", seed=3) as reports:
        out, lse = call(case, inputs)
    assert reports[0]["kernel"].startswith("forward_mma_rows")
    check(case, inputs, out, lse)


@pytest.mark.parametrize("falling", [False, True], ids=["rising", "falling"])
@pytest.mark.parametrize("steepness", [1.0, 12.0])
@pytest.mark.parametrize("acc", ["f32", "mixed", "f16"])
def test_maxima_that_move_emulated(acc, steepness, falling):
    """The maximum of rows grows from tile to tile, slowly or fast, or is met in the first tile."""
    case = Case(n_q=20, n_k=1100, d=64, dtype=torch.float16)
    check_moving_maxima(case, 1, acc, steepness, falling, "forward_mma_rows")


def test_shared_memory_is_what_the_kernel_asks_for():
    for spec in SHIPPED:
        for stages in (1, 2):
            smem, _ = emulated.launch_shape(spec, d_qk=spec.head_dim, stages=stages, q_resident=True)
            assert levels.smem_bytes(spec, spec.head_dim, stages, True) == smem


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("d", [8, 64, 72, 96, 128, 192, 256])
def test_every_gpu_has_a_plan(arch, d):
    for mask in (None, "bool"):
        plan = levels.plan(PROBLEM._replace(arch=arch, d_qk=d, d_v=d, mask=mask), env.run_flags())
        assert plan.spec in SHIPPED and plan.spec.head_dim >= d
        assert not (mask and plan.spec.plain)


@pytest.mark.parametrize("value, family", [("0", "forward_mma_split"), ("1", "forward_mma_rows")])
def test_a_toggle_chooses_the_family(value, family, monkeypatch):
    monkeypatch.setenv("ENABLE_FFPA_PERSIST_KV_G2S", value)
    assert levels.plan(PROBLEM, env.run_flags()).spec.family == family


def test_what_does_not_fit_whole(monkeypatch):
    monkeypatch.setenv("ENABLE_FFPA_PERSIST_KV_G2S", "1")
    assert "whole tiles of K and V of up to 256 columns" in levels.plan(PROBLEM._replace(d_qk=320), env.run_flags())


# ---- on a GPU ----

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or native.record() is None, reason="needs a GPU and a built library"
)


@needs_gpu
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [40, 64, 96, 128, 192, 256])
def test_every_head_dim_on_a_gpu(d, dtype, rule):
    case = Case(heads_q=4, heads_kv=2, n_q=1000, n_k=1531, d=d, dtype=DTYPES[dtype], rule=rule)
    inputs = make_inputs(case, "cuda")
    for acc, name in ACCS.items():
        if dtype == "f16" or name == "f32":
            check(case, inputs, *call(case, inputs, level=1, acc=name), *acc)


@needs_gpu
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_bits_repeat_on_a_gpu(d):
    case = Case(heads_q=8, heads_kv=8, n_q=2000, n_k=2000, d=d, rule={"causal": True})
    inputs = make_inputs(case, "cuda")
    first = call(case, inputs, level=1)
    for _ in range(200):
        assert all(torch.equal(a, b) for a, b in zip(first, call(case, inputs, level=1), strict=True))
