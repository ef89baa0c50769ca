"""Tests every experiment that the environment can ask for: what a plan makes of it, and that results stay right."""

import math

import pytest
import torch
from cases import Case, make_inputs
from ffpa_attn import env
from ffpa_attn.backends import levels
from ffpa_attn.backends.choice import choose
from ffpa_attn.launching import emulated, native
from ffpa_attn.operators import ops
from ffpa_attn.testing import emulate
from test_mma import call, check
from test_plan import PROBLEM

CASE = Case(batch=2, heads_q=2, heads_kv=1, n_q=70, n_k=300, d=320, rule={"causal": True})
SMALL = CASE.with_(d=64, n_q=150)

PADDED = {f"ENABLE_FFPA_SMEM_SWIZZLE_{x}": "0" for x in "QKV"}
OWN_RINGS = {"ENABLE_FFPA_QKV_SMEM_SHARE": "0"}
SERIAL = {"ENABLE_FFPA_REGISTERS_PIPE_KV": "0"}
GRID_OF_HEADS = {"ENABLE_FFPA_LAUNCH_GRID_DNHB": "1"}
WHOLE_TILES = {"ENABLE_FFPA_PERSIST_KV_G2S": "1"}

# Each row has a name, the flags, the head dims it is for, and what it makes of a plan or of its spec.
SMALL_D, LARGE_D = (64, 128, 192), (320, 512, 1024)
TOGGLES = [
    ("padded Q", {"ENABLE_FFPA_SMEM_SWIZZLE_Q": "0"}, SMALL_D + LARGE_D, {"pad_q": True, "pad_k": False}),
    ("padded K", {"ENABLE_FFPA_SMEM_SWIZZLE_K": "0"}, SMALL_D + LARGE_D, {"pad_k": True, "pad_v": False}),
    ("padded V", {"ENABLE_FFPA_SMEM_SWIZZLE_V": "0"}, SMALL_D + LARGE_D, {"pad_v": True, "pad_q": False}),
    ("swizzled", {name: "1" for name in PADDED}, LARGE_D, {"pad_q": False, "pad_k": False, "pad_v": False}),
    ("swizzled whole tiles", {name: "1" for name in PADDED}, SMALL_D, {"family": "forward_mma_rows"}),
    ("rings of their own", OWN_RINGS, LARGE_D, {"own_rings": True}),
    ("one ring", {"ENABLE_FFPA_QKV_SMEM_SHARE": "1"}, SMALL_D + LARGE_D, {"own_rings": False}),
    ("a ring of V", {"FFPA_PV_STAGES": "1"}, SMALL_D + LARGE_D, {"own_rings": True, "value_stages": 1}),
    ("serial", SERIAL, SMALL_D + LARGE_D, {"serial": True}),
    ("ahead", {"ENABLE_FFPA_REGISTERS_PIPE_KV": "1"}, SMALL_D + LARGE_D, {"serial": False}),
    ("grid of heads", GRID_OF_HEADS, SMALL_D + LARGE_D, {"grid_of_heads": True}),
    ("one dim", {"ENABLE_FFPA_LAUNCH_GRID_DNHB": "0"}, SMALL_D + LARGE_D, {"grid_of_heads": False}),
    ("no prefetch", {"ENABLE_FFPA_PREFETCH_QKV": "0"}, SMALL_D + LARGE_D, {"stages": 1}),
    ("Q streamed", {"ENABLE_FFPA_PERSIST_Q_G2S": "0"}, LARGE_D, {"q_resident": False}),
    ("Q resident", {"ENABLE_FFPA_PERSIST_Q_G2S": "1"}, LARGE_D, {"q_resident": True}),
    ("whole tiles", WHOLE_TILES, SMALL_D, {"family": "forward_mma_rows"}),
    ("whole tiles, V in registers", {**WHOLE_TILES, "ENABLE_FFPA_PERSIST_V_S2R": "1"}, SMALL_D, {"family": "forward_mma_rows"}),
    ("Q in registers", {"ENABLE_FFPA_PERSIST_Q_S2R": "1"}, SMALL_D, {"q_in_registers": True}),
    ("Q read again", {"ENABLE_FFPA_PERSIST_Q_S2R": "0"}, SMALL_D, {"q_in_registers": False}),
    ("tiles in steps", {"ENABLE_FFPA_PERSIST_KV_G2S": "0"}, SMALL_D, {"family": "forward_mma_split"}),
    ("V not in registers", {"ENABLE_FFPA_PERSIST_V_S2R": "0"}, SMALL_D, {"family": "forward_mma_split"}),
]  # fmt: skip
ALL = [(name, flags, d, effect) for name, flags, head_dims, effect in TOGGLES for d in head_dims]
by_toggle = pytest.mark.parametrize("name, flags, d, effect", ALL, ids=[f"{name}-{d}" for name, _, d, _ in ALL])


def levels_of(d: int) -> tuple[int | None, ...]:
    """Returns the levels of a head dim: whole tiles are level 1 alone."""
    return (None, 1) if d <= 256 else (None, 1, 2, 3)


def set_all(monkeypatch, flags):
    for name, value in flags.items():
        monkeypatch.setenv(name, value)


@by_toggle
def test_what_becomes_of_a_plan(name, flags, d, effect, monkeypatch):
    set_all(monkeypatch, flags)
    for level in levels_of(d):
        plan = levels.plan(PROBLEM._replace(d_qk=d, d_v=d, level=level), env.run_flags())
        for field, value in effect.items():
            assert getattr(plan if field in plan._fields else plan.spec, field) == value, (level, plan)


@pytest.mark.parametrize("stages, of_values", [(2, 3), (1, 4), (4, 1)])
def test_stages_of_v_are_its_own(stages, of_values, monkeypatch):
    monkeypatch.setenv("FFPA_PV_STAGES", str(of_values))
    plan = levels.plan(PROBLEM._replace(num_stages=stages, d_qk=320, d_v=320), env.run_flags())
    assert (plan.stages, plan.value_stages) == (stages, of_values)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"ENABLE_FFPA_QKV_SMEM_SHARE": "1", "FFPA_PV_STAGES": "2"}, "a ring of V alone"),
        ({"FFPA_PV_STAGES": "5"}, "FFPA_PV_STAGES='5' is not allowed"),
    ],
)
def test_contradictions(flags, words, monkeypatch):
    set_all(monkeypatch, flags)
    with pytest.raises(ValueError, match=words):
        env.run_flags()


@pytest.mark.parametrize("name", env.EXPERIMENTS)
@pytest.mark.parametrize("value", ["0", "1"])
def test_none_is_passed_over_for_a_faster_backend(name, value, monkeypatch):
    """At D = 128 SDPA comes first otherwise; a toggle that ours does not know is refused, which gives a warning."""
    if (name, value) == ("FFPA_PV_STAGES", "0"):
        return
    monkeypatch.setattr(native, "why_not", lambda spec, gpu: None)
    monkeypatch.setenv(name, value)
    problem = PROBLEM._replace(d_qk=128, d_v=128, needs_lse=False, dtype="f16")
    choice = choose(problem, env.run_flags())
    assert choice.backend == "mma" or name in choice.fallback
    monkeypatch.delenv(name)
    assert choose(problem, env.run_flags()).backend == "sdpa"
    assert choose(problem._replace(num_stages=2), env.run_flags()).backend == "mma"
    assert choose(problem._replace(acc="mixed"), env.run_flags()).backend == "mma"


def test_prefetch_is_of_v_too(monkeypatch):
    set_all(monkeypatch, {"ENABLE_FFPA_PREFETCH_QKV": "0", "FFPA_PV_STAGES": "2"})
    assert "exclude each other" in levels.plan(PROBLEM, env.run_flags())


def test_a_grid_of_too_many_heads(monkeypatch):
    set_all(monkeypatch, GRID_OF_HEADS)
    assert "too large" in levels.plan(PROBLEM._replace(heads_q=2**16, heads_kv=2**16), env.run_flags())


# These are tested together, since each kernel of its own takes the emulator seconds to compile.
TOGETHER = [
    ("padded", 1, CASE, PADDED, "pad_q_pad_k_pad_v"),
    ("rings", 1, CASE, {**OWN_RINGS, **GRID_OF_HEADS}, "own_rings"),
    ("streamed", 3, CASE.with_(d_v=520, n_q=140), {**OWN_RINGS, **SERIAL, **GRID_OF_HEADS}, "streamed_own_rings_serial"),
    ("groups", 2, CASE.with_(d_v=520), GRID_OF_HEADS, ""),
    ("whole tiles", 1, SMALL, {**SERIAL, **GRID_OF_HEADS}, "serial"),
]  # fmt: skip


RINGS = [(None, None), (1, 3), (3, 1), (2, 2)]  # stages, and stages of V
EMULATED = [
    (*row, rings) for row in TOGETHER for rings in (RINGS if "ENABLE_FFPA_QKV_SMEM_SHARE" in row[3] else RINGS[:1])
]


@pytest.mark.parametrize(
    "level, case, flags, words, rings", [row[1:] for row in EMULATED], ids=[f"{row[0]}-{row[-1]}" for row in EMULATED]
)
def test_emulated(level, case, flags, words, rings, monkeypatch):
    stages, of_values = rings
    set_all(monkeypatch, {**flags, **({"FFPA_PV_STAGES": str(of_values)} if of_values else {})})
    inputs = make_inputs(case, "cpu")
    plans, choose = [], levels.plan
    monkeypatch.setattr(levels, "plan", lambda p, flags: plans.append(choose(p, flags)) or plans[-1])
    monkeypatch.setattr(ops, "_plans", {})
    with emulate("sm_90a", seed=4) as reports:
        out, lse = call(case, inputs, level=level, num_stages=stages)
    check(case, inputs, out, lse)
    (report,) = reports
    assert report["kernel"].endswith(words) and report["bank_conflict_ratio"] <= 1.001

    plan = plans[-1]
    names = "stages", "q_resident", "value_stages", "grid_of_heads"
    numbers = {name: getattr(plan, name) for name in names}
    smem, grid = emulated.launch_shape(plan.spec, d_qk=case.d, heads_q=3, batch=2, **numbers)
    assert smem == levels.smem_bytes(plan.spec, case.d, plan.stages, plan.q_resident, plan.value_stages)
    assert grid[1:] == ((3, 2) if "ENABLE_FFPA_LAUNCH_GRID_DNHB" in flags else (1, 1)) and math.prod(grid) == 6


@pytest.mark.skipif(not torch.cuda.is_available() or native.record() is None, reason="needs a GPU and a built library")
@by_toggle
def test_on_a_gpu(name, flags, d, effect, monkeypatch):
    """Kernels are compiled on demand where the wheel has none."""
    set_all(monkeypatch, flags)
    case = Case(batch=2, heads_q=4, heads_kv=2, n_q=500, n_k=1100, d=d, rule={"causal": True})
    inputs = make_inputs(case, "cuda")
    for level in levels_of(d):
        check(case, inputs, *call(case, inputs, level=level))
