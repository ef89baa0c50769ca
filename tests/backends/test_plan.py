"""Tests which instance and settings of the mma family a problem gets: pure, but for what the kernel says of itself."""

import oracle
import pytest
import torch
from ffpa_attn import env, ffpa
from ffpa_attn.backends import levels
from ffpa_attn.backends.choice import choose
from ffpa_attn.backends.reference import Rule
from ffpa_attn.backends.two_phase import TwoPhasePlan
from ffpa_attn.launching import emulated, native, structs
from ffpa_attn.specs import archs
from ffpa_attn.specs.problem import Problem, Visibility, visible_keys
from ffpa_attn.specs.spec import ForwardMmaSplit, aot_specs
from ffpa_attn.testing import emulate

SHIPPED = [spec for spec in aot_specs(env.all_flags()) if isinstance(spec, ForwardMmaSplit) and not spec.paged]
PROBLEM = Problem(
    "forward", "cuda", "sm_90", "bf16", 1, 32, 32, 8192, 8192, 512, 512, None, Visibility(-1, -1, False), 0.04, 0.0, None, True, None, "f32", None
)  # fmt: skip
GPUS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"]
HEAD_DIMS = [264, 320, 512, 640, 1024, 1152, 2048]


def plan(**changes):
    return levels.plan(PROBLEM._replace(**changes), env.run_flags())


def fits(spec, d_qk, stages, q_resident, arch):
    return levels.smem_bytes(spec, d_qk, stages, q_resident) <= archs.shared_memory_bytes(arch)


def test_shared_memory_is_what_the_kernel_asks_for():
    for spec in SHIPPED:
        for d_qk, stages, q_resident in ((8, 1, True), (spec.columns, 2, True), (1152, 4, False), (520, 3, True)):
            assert (
                levels.smem_bytes(spec, d_qk, stages, q_resident)
                == emulated.launch_shape(spec, d_qk=d_qk, stages=stages, q_resident=q_resident)[0]
            )


@pytest.mark.parametrize("level", [None, 1, 2, 3])
@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_every_gpu_has_a_plan(arch, d, level, monkeypatch):
    if level == 1 and d > 1024:
        return
    monkeypatch.setattr(native, "why_not", lambda spec, gpu: None)
    for dtype, acc in (("bf16", "f32"), ("f16", "f32"), ("f16", "f16"), ("f16", "mixed")):
        problem = PROBLEM._replace(arch=arch, d_qk=d, d_v=d, dtype=dtype, acc=acc, level=level)
        choice = choose(problem, env.run_flags())
        if choice.backend == "hopper":
            assert arch == "sm_90" and d > 64 and level is None and acc == "f32"
            choice = choose(problem, {**env.run_flags(), "FFPA_BACKEND": "mma"})
        chosen = choice.plan
        if isinstance(chosen, TwoPhasePlan):
            assert choice.backend == "mma" and d >= 640 and level is None and acc == "f32"
            continue
        assert choice.backend == "mma" and choice.kernel == chosen.spec.name and chosen.spec in SHIPPED
        assert fits(chosen.spec, d, chosen.stages, chosen.q_resident, arch) and chosen.stages > 1
        assert chosen.level == (level or chosen.level)
        assert chosen.spec.streamed == (chosen.level == 3)
        assert chosen.spec.columns >= d or chosen.level > 1


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_what_a_plan_prefers(arch, d, monkeypatch):
    """A plan prefers a resident Q if two stages fit beside it, else the longest ring without it."""
    chosen = plan(arch=arch, d_qk=d, d_v=d)
    longest = {
        resident: max((n for n in (1, 2, 3, 4) if fits(chosen.spec, d, n, resident, arch)), default=0)
        for resident in (False, True)
    }
    resident = longest[True] >= 2
    assert (chosen.stages, chosen.q_resident) == (longest[resident], resident)
    monkeypatch.setenv("ENABLE_FFPA_PREFETCH_QKV", "0")
    assert plan(arch=arch, d_qk=d, d_v=d).stages == 1


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("resident", [False, True])
def test_what_is_asked_for_is_planned(stages, resident, monkeypatch):
    monkeypatch.setenv("ENABLE_FFPA_PERSIST_Q_G2S", str(int(resident)))
    for level in (1, 2, 3):
        chosen = plan(level=level, num_stages=stages)
        assert (chosen.level, chosen.stages, chosen.q_resident) == (level, stages, resident)


@pytest.mark.parametrize("d", HEAD_DIMS[:4])
def test_a_gpu_of_163_kb_is_not_left_with_the_tile_of_99(d):
    """Each GPU has the largest step that fits it."""
    steps = [plan(arch=arch, d_qk=d, d_v=d, level=1).spec.key_columns for arch in ("sm_90", "sm_80", "sm_89")]
    assert steps == sorted(steps, reverse=True) and steps[1] > steps[2]


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("left, right", [(-1, -1), (-1, 0), (200, 0), (-1, 300), (100, 50), (0, 700)])
@pytest.mark.parametrize("n_q, n_k", [(1000, 1000), (400, 1000), (1000, 400)])
def test_visible_keys_of_a_row(n_q, n_k, left, right, top_left):
    """The few rows that a plan looks at see about as many as all do."""
    problem = PROBLEM._replace(n_q=n_q, n_k=n_k, visibility=Visibility(left, right, top_left))
    align = "top_left" if top_left else "bottom_right"
    rule = {"causal": True, "window": (left, -1)} if right == 0 else {"window": (left, right)}
    seen = oracle.visible(n_q, n_k, align=align, **rule).sum(1).double().mean()
    assert abs(visible_keys(problem) - seen) <= 0.02 * n_k


def test_values_too_wide_for_registers_are_streamed():
    assert plan(d_v=1024, level=1).level == 1 and plan(d_v=1032).level == 3
    assert "registers" in plan(d_v=1032, level=1)


def test_level_2_takes_the_fewest_groups():
    """Each of the groups computes the scores again."""
    for d_v in (320, 648, 1152, 2048):
        columns = plan(level=2, d_v=d_v).spec.columns
        groups = -(-d_v // columns)
        most = max(
            spec.columns for spec in SHIPPED if not spec.streamed and spec.columns <= levels._MOST_GROUPED_COLUMNS
        )
        assert groups == -(-d_v // most)


@pytest.mark.parametrize("pv", [None, "0", "1"])
@pytest.mark.parametrize("qk", [None, "0", "1"])
@pytest.mark.parametrize("level", [None, 1, 2, 3])
@pytest.mark.parametrize("d", [128, 512])
def test_any_pair_of_accumulators_has_a_plan(d, level, qk, pv, monkeypatch):
    for name, value in (("QK", qk), ("PV", pv)):
        if value:
            monkeypatch.setenv(f"ENABLE_FFPA_FORCE_{name}_F16", value)
    for acc, (acc_qk, acc_pv) in (("f32", ("f32", "f32")), ("f16", ("f16", "f16")), ("mixed", ("f32", "f16"))):
        spec = plan(dtype="f16", acc=acc, d_qk=d, d_v=d, level=level).spec
        of = {None: None, "0": "f32", "1": "f16"}
        assert (spec.acc_qk, spec.acc_pv) == (of[qk] or acc_qk, of[pv] or acc_pv)


@pytest.mark.parametrize("acc, expected", [("f32", ("f32", "f32")), ("f16", ("f16", "f16")), ("mixed", ("f32", "f16"))])
def test_accumulators(acc, expected, monkeypatch):
    def accumulators():
        spec = plan(dtype="f16", acc=acc).spec
        return spec.acc_qk, spec.acc_pv

    assert accumulators() == expected
    monkeypatch.setenv("ENABLE_FFPA_FORCE_QK_F16", "0")
    assert accumulators() == ("f32", expected[1])
    monkeypatch.setenv("ENABLE_FFPA_FORCE_PV_F16", "1")
    assert accumulators() == ("f32", "f16")
    monkeypatch.setenv("ENABLE_FFPA_FORCE_PV_F16", "0")
    assert accumulators() == ("f32", "f32")


@pytest.mark.parametrize(
    "d, needs_lse, backend",
    [
        (128, False, "sdpa"),
        (256, False, "sdpa"),
        (256, True, "hopper"),
        (512, False, "hopper"),
        (1024, False, "hopper"),
        (1024, True, "hopper"),
    ],
)
def test_the_faster_of_two_runs_without_a_word(d, needs_lse, backend, monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda spec, gpu: None)
    choice = choose(PROBLEM._replace(d_qk=d, d_v=d, needs_lse=needs_lse), env.run_flags())
    assert choice.backend == backend and choice.fallback is None


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"acc": "f16"}, "accumulate products of bf16 in f32 only"),
        ({"acc": "mixed"}, "accumulate products of bf16 in f32 only"),
        ({"level": 1, "d_v": 1152}, "level 1 keeps O in registers"),
        ({"arch": "sm_86", "num_stages": 4}, "more shared memory than sm_86 has"),
        ({"n_q": 1, "n_k": 2**31}, "counts positions in 32 bits"),
        ({"n_q": 9, "n_k": 9, "packed": (2**31, 9)}, "2147483648 of all sequences are too many"),
        ({"n_q": 2, "batch": 2**16, "heads_q": 2**16, "heads_kv": 2**16}, "more blocks than a grid holds"),
    ],
    ids=str,
)
def test_reasons(changes, words):
    assert words in plan(**changes)


def test_a_toggle_it_does_not_know_is_refused(monkeypatch):
    monkeypatch.setenv("ENABLE_FFPA_PERSIST_KV_G2S", "1")
    with pytest.raises(NotImplementedError, match="does not know ENABLE_FFPA_PERSIST_KV_G2S=1"), emulate():
        x = torch.randn(1, 1, 8, 512, dtype=torch.float16)
        ffpa(x, x, x, level=1)


@pytest.mark.parametrize(
    "prefetch, num_stages, possible", [("0", None, {1}), ("1", None, {2, 3, 4}), ("1", 2, {2}), ("0", 1, {1})]
)
def test_prefetch_decides_the_stages(prefetch, num_stages, possible, monkeypatch):
    monkeypatch.setenv("ENABLE_FFPA_PREFETCH_QKV", prefetch)
    assert plan(num_stages=num_stages).stages in possible


@pytest.mark.parametrize("prefetch, num_stages", [("0", 3), ("1", 1)])
def test_prefetch_and_stages_may_clash(prefetch, num_stages, monkeypatch):
    monkeypatch.setenv("ENABLE_FFPA_PREFETCH_QKV", prefetch)
    assert f"PREFETCH_QKV={prefetch} and num_stages={num_stages} exclude each other" in plan(num_stages=num_stages)


def workspace_of(chosen, n_q, n_k, d, d_v, cap, monkeypatch):
    """Returns (bytes of scratch, its blocks, bytes of partial results) that a call takes."""
    calls = []
    monkeypatch.setattr(emulated, "launch", lambda spec, params, memory: calls.append((params, memory)))
    monkeypatch.setattr(emulated, "RESIDENT_BLOCKS", 132)
    q, k, v, out = (
        torch.empty(1, 1, n, width, device="meta", dtype=torch.float16)
        for n, width in ((n_q, d), (n_k, d), (n_k, d_v), (n_q, d_v))
    )
    rule = Rule(1.0, 0.0, Visibility(-1, -1, False))
    memo = {}
    chosen.forward(q, k, v, out, torch.empty(0), None, None, rule, cap, memo)
    params = structs.struct("AttentionParams").from_buffer_copy(calls[0][0])
    (call,) = memo.values()
    taken = sum(x.nbytes for x, use in calls[0][1][4:] if use == "write")
    assert taken == 4 * ((call.scratch or 0) + (call.partial or 0))
    return 4 * (call.scratch or 0), params.resident_blocks, 4 * (call.partial or 0)


@pytest.mark.parametrize("d_v", [512, 520, 1152, 2048])
def test_scratch_of_level_3_does_not_depend_on_lengths(d_v, monkeypatch):
    """The scratch is O of each resident block in f32, for no more blocks than the cap has room for."""
    chosen = plan(level=3, d_v=d_v)
    of_block = -(-d_v // chosen.spec.columns) * chosen.spec.columns * chosen.spec.rows * 4
    for n in (1, 1000, 10**6):
        assert workspace_of(chosen, n, n, 512, d_v, 1 << 30, monkeypatch) == (132 * of_block, 132, 0)
        for cap in (of_block, 7 * of_block + 1):
            blocks = cap // of_block
            assert workspace_of(chosen, n, n, 512, d_v, cap, monkeypatch) == (blocks * of_block, blocks, 0)


@pytest.mark.parametrize("d, n_k, cap_mb", [(1024, 131072, 16), (2048, 65536, 64), (2048, 65536, 2), (512, 32768, 1)])
@pytest.mark.parametrize("level", [None, 3])
def test_the_workspace_of_a_call_stays_within_the_cap(d, n_k, cap_mb, level, monkeypatch):
    """The workspace is scratch and partial results together."""
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap_mb))
    changes = {"heads_q": 1, "heads_kv": 1, "n_q": 128, "n_k": n_k, "d_qk": d, "d_v": d, "level": level}
    chosen = plan(**changes)
    scratch, _, partial = workspace_of(chosen, 128, n_k, d, d, cap_mb << 20, monkeypatch)
    assert scratch + partial <= cap_mb << 20 and (chosen.splits > 1 or cap_mb < 16)


@pytest.mark.parametrize("batch, heads_kv, n_k", [(8, 4, 8192), (8, 8, 8192), (1, 8, 32768)])
@pytest.mark.parametrize("d", [576, 640])
def test_parts_that_read_from_other_channels(d, batch, heads_kv, n_k):
    """Parts a multiple of 1,024 keys apart were up to a fifth slower, where rows have 9 · 2^7 or 5 · 2^8 bytes."""
    changes = {"arch": "sm_90", "batch": batch, "heads_kv": heads_kv, "n_q": 1, "n_k": n_k, "d_qk": d, "d_v": d}
    chosen = levels.plan(PROBLEM._replace(**changes), env.run_flags())
    keys = -(-n_k // (chosen.spec.keys * chosen.splits)) * chosen.spec.keys
    assert chosen.splits > 1 and keys % 1024


def test_a_block_larger_than_the_workspace(monkeypatch):
    monkeypatch.setenv("FFPA_WORKSPACE_MB", "1")
    assert plan(level=3, d_v=4096).spec.rows == 64
    assert "needs 2 MiB of workspace for a block of 64 rows" in plan(level=3, d_v=8192)
