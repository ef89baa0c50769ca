"""The split-D kernels on mma.sync: the shipped, unmodified ones, in the emulator everywhere and on a GPU where there is one."""

import math

import compare
import oracle
import pytest
import torch
from cases import CASES, Case, make_inputs
from ffpa_attn import emulated, env, ffpa, mma, native, ops
from ffpa_attn.choice import choose
from ffpa_attn.spec import ForwardMmaL1, Problem, Visibility, aot_specs
from ffpa_attn.testing import emulate

SHIPPED = [spec for spec in aot_specs(env.all_flags()) if isinstance(spec, ForwardMmaL1)]
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
PROBLEM = Problem(
    "forward", "cuda", "sm_90", "bf16", 1, 32, 32, 8192, 8192, 512, 512, False, Visibility(-1, -1, False), 0.04, 0.0, None, True, None, "f32", None
)  # fmt: skip


def by_id(cases):
    return pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])


def supported(case: Case) -> bool:
    return (case.d_v or case.d) <= 1024


def run(case: Case, inputs, **options):
    q, k, v, mask = inputs
    return ffpa(q, k, v, return_lse=True, mask=mask, layout=case.layout, **case.rule, **options)


def check(case: Case, inputs, out, lse):
    q, k, v, mask = inputs
    rule = {**case.rule, "layout": case.layout, "mask": mask}
    want, want_lse = oracle.attention(q, k, v, **rule)
    compare.assert_close("out", out, want, compare.baseline(q, k, v, **rule)[0])
    compare.assert_lse_close("lse", lse, want_lse, q, k, case.rule.get("scale"))


# ---- in the emulator ----

RULES = ({}, {"causal": True}, {"causal": "top_left", "window": (40, -1)})


def tiles_met(spec, n_q: int, n_k: int, rule) -> int:
    """Tiles of keys that the row blocks of one head meet, counted from the oracle's picture of who sees whom."""
    causal = rule.get("causal", False)
    align = causal if isinstance(causal, str) else "bottom_right"
    seen = oracle.visible(n_q, n_k, bool(causal), align, rule.get("window", (-1, -1)))
    tiles = 0
    for first in range(0, n_q, spec.rows):
        keys = seen[first : first + spec.rows].any(0).nonzero()
        tiles += int(keys.max() // spec.keys - keys.min() // spec.keys + 1) if len(keys) else 0
    return tiles


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("spec", SHIPPED, ids=[spec.name for spec in SHIPPED])
def test_every_shipped_kernel_emulated(spec, seed):
    """Two row blocks and three tiles of keys with tails; the mma count is the arithmetic one; no bank conflict matters."""
    rule = RULES[seed]
    d_qk = (spec.head_dim, 72, spec.head_dim - 8)[seed]
    n_q, n_k = spec.rows + 5, 2 * spec.keys + 9
    case = Case(heads_q=2, heads_kv=1, n_q=n_q, n_k=n_k, d=d_qk, d_v=spec.head_dim, dtype=DTYPES[spec.dtype])
    q, k, v, _ = inputs = make_inputs(case, "cpu", seed)
    with emulate("sm_80" if seed < 2 else "sm_90a", seed=seed) as reports:
        out, lse = ffpa(q, k, v, return_lse=True, **rule)
    (report,) = reports
    assert report["kernel"] == spec.name
    causal = rule.get("causal", False)
    plain_rule = {**rule, "causal": bool(causal), "align": causal if isinstance(causal, str) else "bottom_right"}
    check(case.with_(rule=plain_rule), inputs, out, lse)

    per_tile = (spec.rows // 16) * (-(-d_qk // 16) * (spec.keys // 8) + spec.keys // 16 * (spec.head_dim // 8))
    assert report["mma"] == 2 * tiles_met(spec, n_q, n_k, rule) * per_tile
    assert report["bank_conflict_ratio"] < 1.02


@by_id([case for case in CASES if supported(case) and not (case.batch * case.n_q == 0)])
def test_cases_emulated(case):
    inputs = make_inputs(case, "cpu")
    with emulate("sm_90a", seed=3) as reports:
        out, lse = run(case, inputs, level=1)
    assert len(reports) == 1
    check(case, inputs, out, lse)


@by_id([case for case in CASES if supported(case) and case.batch * case.n_q == 0])
def test_nothing_to_compute_emulated(case):
    with emulate():
        out, lse = ffpa(*make_inputs(case, "cpu")[:3], return_lse=True)
    assert not out.numel() and not lse.numel()


@pytest.mark.parametrize("q_resident", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("d", [128, 512])
def test_stages_and_resident_q_emulated(d, stages, q_resident, monkeypatch):
    monkeypatch.setenv("ENABLE_FFPA_PERSIST_Q_G2S", str(int(q_resident)))
    case = Case(n_q=40, n_k=300, d=d, dtype=torch.float16, rule={"causal": True})
    inputs = make_inputs(case, "cpu")
    for seed in (0, 5):
        with emulate("sm_90a", seed=seed):
            out, lse = ffpa(*inputs[:3], return_lse=True, num_stages=stages, **case.rule)
        check(case, inputs, out, lse)
    plan = mma.plan(PROBLEM._replace(num_stages=stages, d_qk=d, d_v=d), env.run_flags())
    assert (plan.stages, plan.q_resident) == (stages, q_resident)


@pytest.mark.parametrize("softcap", [1e-40, 1e-3, 0.8, 1e3, 1e7, 3e38])
@pytest.mark.parametrize("d", [64, 512])
def test_softcaps_of_any_size_emulated(d, softcap):
    """A cap far above the scores leaves them as they are, one far below them makes them equal."""
    case = Case(n_q=33, n_k=140, d=d, rule={"softcap": softcap, "scale": -0.05, "causal": True})
    inputs = make_inputs(case, "cpu")
    with emulate():
        check(case, inputs, *ffpa(*inputs[:3], return_lse=True, **case.rule))


def test_bit_exact_sums_emulated():
    case = Case(n_q=70, n_k=80, d=64)
    inputs = make_inputs(case, "cpu")
    lses = []
    for arch, exact in (("sm_80", False), ("sm_80", True), ("sm_90a", True)):
        with emulate(arch, exact=exact):
            out, lse = ffpa(*inputs[:3], return_lse=True)
        check(case, inputs, out, lse)
        lses.append(lse)
    assert not any(torch.equal(a, b) for a, b in ((lses[0], lses[1]), (lses[0], lses[2]), (lses[1], lses[2])))


@pytest.mark.parametrize("d, d_v, arch", [(1160, 64, "sm_80"), (2056, 512, "sm_80"), (3080, 704, "sm_90a")])
def test_scores_wider_than_the_values_emulated(d, d_v, arch):
    """Beyond 1024 columns of Q and K, where Q no longer stays in shared memory."""
    case = Case(heads_q=2, heads_kv=1, n_q=37, n_k=140, d=d, d_v=d_v, rule={"causal": True})
    inputs = make_inputs(case, "cpu")
    with emulate(arch, seed=4):
        check(case, inputs, *ffpa(*inputs[:3], return_lse=True, **case.rule))
    problem = PROBLEM._replace(arch=arch.rstrip("a"), d_qk=d, d_v=d_v)
    assert not mma.plan(problem, env.run_flags()).q_resident


def test_without_an_lse_emulated():
    inputs = make_inputs(Case(n_q=70, n_k=80, d=64), "cpu")
    with emulate():
        want, _ = ffpa(*inputs[:3], return_lse=True)
        assert torch.equal(ffpa(*inputs[:3]), want)


@pytest.mark.parametrize(
    "n_q, n_k, rule",
    [
        (1, 2**31 - 2000, {"window": (100, -1)}),
        (1, 2**31 - 2000, {"window": (100, 2**31 - 1)}),
        (40, 2**30 + 5, {"window": (100, 0)}),
    ],
    ids=str,
)
def test_positions_near_the_end_of_32_bits_emulated(n_q, n_k, rule):
    """One row, many times over (a stride of 0): what is seen counts in the LSE, and each out row is that of V."""
    q, k, v = (torch.randn(1, 1, 1, 64, dtype=torch.float16) for _ in range(3))
    with emulate("sm_90a"):
        out, lse = ffpa(
            q.expand(1, 1, n_q, 64), k.expand(1, 1, n_k, 64), v.expand(1, 1, n_k, 64), return_lse=True, **rule
        )
    assert torch.equal(out, v.expand(1, 1, n_q, 64))
    score = (q.float() * k.float()).sum() / 8
    torch.testing.assert_close(lse, (score + math.log(101)).expand(1, 1, n_q), atol=1e-3, rtol=1e-4)


def test_gradients_of_an_emulated_forward():
    """The backward takes out and LSE of whatever ran forward."""
    q, k, v, _ = (
        x if x is None else x.clone().requires_grad_() for x in make_inputs(Case(d=128, n_q=40, n_k=50), "cpu")
    )
    with emulate():
        ffpa(q, k, v, causal=True).float().square().sum().backward()
    got = q.grad.clone()
    q.grad = None
    ffpa(q, k, v, causal=True).float().square().sum().backward()
    torch.testing.assert_close(got, q.grad, atol=3e-2, rtol=3e-2)


# ---- plans ----


def test_shared_memory_is_what_the_kernel_asks_for():
    for spec in SHIPPED:
        for d_qk, stages, q_resident in ((8, 1, True), (spec.head_dim, 2, True), (1152, 4, False), (520, 3, True)):
            assert mma.smem_bytes(spec, d_qk, stages, q_resident) == emulated.smem_bytes(spec, d_qk, stages, q_resident)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("d", [64, 320, 512, 640, 1024])
def test_every_gpu_has_a_plan(arch, d, monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda spec, gpu: None)
    choice = choose(PROBLEM._replace(arch=arch, d_qk=d, d_v=d), env.run_flags())
    assert choice.backend == "mma" and choice.kernel == choice.plan.spec.name and choice.plan.spec in SHIPPED
    limit = {"sm_80": 163, "sm_90": 227}.get(arch, 99) * 1024
    assert mma.smem_bytes(choice.plan.spec, d, choice.plan.stages, choice.plan.q_resident) <= limit


@pytest.mark.parametrize(
    "d, needs_lse, backend",
    [(128, False, "sdpa"), (128, True, "mma"), (512, False, "mma"), (1024, False, "mma"), (1024, True, "mma")],
)
def test_the_faster_of_two_runs_without_a_word(d, needs_lse, backend, monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda spec, gpu: None)
    choice = choose(PROBLEM._replace(d_qk=d, d_v=d, needs_lse=needs_lse), env.run_flags())
    assert choice.backend == backend and choice.fallback is None


@pytest.mark.parametrize(
    "arch, d, settings",
    [("sm_90", 512, (4, True)), ("sm_80", 512, (2, True)), ("sm_86", 320, (1, False)), ("sm_86", 768, (2, False))],
)
def test_what_a_plan_prefers(arch, d, settings, monkeypatch):
    """(stages, q_resident): a resident Q if two stages fit beside it, else the longest ring without it."""
    problem = PROBLEM._replace(arch=arch, d_qk=d, d_v=d)
    assert mma.plan(problem, env.run_flags())[1:] == settings
    monkeypatch.setenv("ENABLE_FFPA_PREFETCH_QKV", "0")
    assert mma.plan(problem, env.run_flags()).stages == 1


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"direction": "backward"}, "no mma backward"),
        ({"level": 3}, "no mma kernel of level 3"),
        ({"packed": True}, "no packed sequences"),
        ({"acc": "f16"}, "accumulates in f32, not f16"),
        ({"d_v": 1152}, "registers"),
        ({"arch": "sm_86", "num_stages": 4}, "more shared memory than sm_86 has"),
        ({"n_q": 1, "n_k": 2**31}, "counts positions in 32 bits"),
        ({"n_q": 1, "batch": 2**16, "heads_q": 2**16}, "more blocks than a grid holds"),
    ],
    ids=str,
)
def test_reasons(changes, words):
    assert words in mma.plan(PROBLEM._replace(**changes), env.run_flags())


def test_a_toggle_it_does_not_know_is_refused(monkeypatch):
    monkeypatch.setenv("ENABLE_FFPA_SMEM_SWIZZLE_K", "0")
    with pytest.raises(NotImplementedError, match="does not know ENABLE_FFPA_SMEM_SWIZZLE_K=0"), emulate():
        x = torch.randn(1, 1, 8, 512, dtype=torch.float16)
        ffpa(x, x, x, level=1)


@pytest.mark.parametrize(
    "prefetch, num_stages, possible", [("0", None, {1}), ("1", None, {2, 3, 4}), ("1", 2, {2}), ("0", 1, {1})]
)
def test_prefetch_decides_the_stages(prefetch, num_stages, possible, monkeypatch):
    monkeypatch.setenv("ENABLE_FFPA_PREFETCH_QKV", prefetch)
    assert mma.plan(PROBLEM._replace(num_stages=num_stages), env.run_flags()).stages in possible


@pytest.mark.parametrize("prefetch, num_stages", [("0", 3), ("1", 1)])
def test_prefetch_and_stages_may_clash(prefetch, num_stages, monkeypatch):
    monkeypatch.setenv("ENABLE_FFPA_PREFETCH_QKV", prefetch)
    reason = mma.plan(PROBLEM._replace(num_stages=num_stages), env.run_flags())
    assert f"PREFETCH_QKV={prefetch} and num_stages={num_stages} exclude each other" in reason


# ---- on a GPU ----

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or native.record() is None, reason="needs a GPU and a built library"
)


@needs_gpu
@by_id([case for case in CASES if supported(case)])
def test_cases_on_a_gpu(case):
    inputs = make_inputs(case, "cuda")
    check(case, inputs, *run(case, inputs, level=1))


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", range(64, 1025, 64))
@pytest.mark.parametrize("rule", [{}, {"causal": True, "align": "bottom_right"}], ids=str)
def test_every_head_dim_on_a_gpu(d, dtype, rule):
    case = Case(heads_q=4, heads_kv=2, n_q=1000, n_k=1531, d=d, dtype=DTYPES[dtype], rule=rule)
    inputs = make_inputs(case, "cuda")
    check(case, inputs, *ffpa(*inputs[:3], return_lse=True, level=1, **rule))


@needs_gpu
@pytest.mark.parametrize("d", [320, 512, 1024])
def test_bits_repeat_on_a_gpu(d):
    inputs = make_inputs(Case(heads_q=8, heads_kv=8, n_q=2000, n_k=2000, d=d), "cuda")
    first = ffpa(*inputs[:3], level=1, causal=True, return_lse=True)
    for _ in range(200):
        again = ffpa(*inputs[:3], level=1, causal=True, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@needs_gpu
def test_emulator_and_gpu_agree():
    """With the tensor cores' own sums, to one unit in the last place of the output (ex2 differs in its last bits)."""
    inputs = make_inputs(Case(n_q=100, n_k=200, d=320, dtype=torch.float16, rule={"causal": True}), "cpu")
    with emulate("sm_90a", exact=True):
        emulated_out = ffpa(*inputs[:3], causal=True, level=1)
    gpu_out = ffpa(*(x.cuda() for x in inputs[:3]), causal=True, level=1).cpu()
    torch.testing.assert_close(gpu_out, emulated_out, atol=5e-4, rtol=1e-3)


def test_the_backend_table_knows_it():
    assert ops._FORWARD["mma"]
