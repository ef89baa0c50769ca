"""Tests the split-D kernels on mma.sync: the shipped ones, in the emulator everywhere, and on a GPU if there is one."""

import math

import compare
import oracle
import pytest
import torch
from cases import CASES, Case, make_inputs
from ffpa_attn import env, ffpa
from ffpa_attn.backends import levels
from ffpa_attn.backends.levels import LevelPlan
from ffpa_attn.launching import native
from ffpa_attn.operators import ops
from ffpa_attn.specs import archs
from ffpa_attn.specs.spec import ROWS_HEAD_DIMS, ForwardMmaRows, ForwardMmaSplit, aot_specs
from ffpa_attn.testing import emulate

SHIPPED = [spec for spec in aot_specs(env.all_flags()) if isinstance(spec, ForwardMmaSplit) and not spec.paged]
WIDTHS = {spec.columns for spec in SHIPPED if not spec.streamed}
WIDTHS |= {spec.head_dim for spec in aot_specs(env.all_flags()) if isinstance(spec, ForwardMmaRows)}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
LEVELS = (1, 2, 3)
ACCS = {"f32": ("f32", "f32"), "mixed": ("f32", "f16"), "f16": ("f16", "f16")}


def by_id(cases):
    return pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])


def by_level(levels=LEVELS):
    return pytest.mark.parametrize("level", levels, ids=[f"level{level}" for level in levels])


def level_1_is_built(d_qk: int, d_v: int) -> bool:
    """Level 1 has a kernel for each width of O up to 1024; a debug build has few of them."""
    whole = next((d for d in ROWS_HEAD_DIMS if d >= max(d_qk, d_v)), None)
    return (whole or max(-(-d_v // 64) * 64, 256)) in WIDTHS


def by_level_and(name: str, values, widths=lambda value: (value, value)):
    """Runs a test at every level with every value."""
    pairs = [(level, x) for level in LEVELS for x in values if level > 1 or level_1_is_built(*widths(x))]
    ids = [f"level{level}-{getattr(value, 'id', value)}" for level, value in pairs]
    return pytest.mark.parametrize(f"level, {name}", pairs, ids=ids)


def by_level_and_case(cases):
    return by_level_and("case", cases, lambda case: (case.d, case.d_v or case.d))


def call(case: Case, inputs, **options):
    q, k, v, mask = inputs
    return ffpa(q, k, v, return_lse=True, mask=mask, layout=case.layout, **case.options(q.device), **options)


def check(case: Case, inputs, out, lse, acc_qk="f32", acc_pv="f32"):
    q, k, v, mask = inputs
    rule = {**case.options(q.device), "layout": case.layout, "mask": mask}
    want, want_lse = oracle.attention(q, k, v, **rule)
    base, base_lse = compare.baseline(q, k, v, **rule, acc_qk=acc_qk, acc_pv=acc_pv)
    compare.assert_close("out", out, want, base)
    base_lse = base_lse if acc_qk == "f16" else None
    compare.assert_lse_close("lse", lse, want_lse, q, k, case.rule.get("scale"), base_lse)


# ---- in the emulator ----


def shipped(level: int, dtype: torch.dtype = torch.bfloat16, columns: int = 128) -> ForwardMmaSplit:
    """Returns the level's smallest kernel with f32 sums and, unless it streams them, at least so many columns."""
    fit = [
        spec
        for spec in SHIPPED
        if spec.streamed == (level == 3)
        and DTYPES[spec.dtype] == dtype
        and spec.acc_qk == spec.acc_pv == "f32"
        and (spec.streamed or spec.columns >= columns)
    ]
    return min(fit, key=lambda spec: (spec.columns, levels.smem_bytes(spec, 0, 4, False)))


def plan_of(spec: ForwardMmaSplit, level: int, d_qk: int, stages: int = 2, q_resident: bool = False, arch="sm_80"):
    """Returns a plan, with fewer stages where so many do not fit."""
    limit = archs.shared_memory_bytes(arch.rstrip("a"))
    return LevelPlan(
        spec,
        level,
        max(n for n in range(1, stages + 1) if levels.smem_bytes(spec, d_qk, n, q_resident) <= limit),
        q_resident,
    )


@pytest.fixture
def emulated_run(monkeypatch, no_short_forward):
    """Gives emulated_run(plan, case, inputs, …) → (out, lse, report), whatever plan would be chosen."""

    def run(plan, case, inputs, arch="sm_80", seed=0):
        monkeypatch.setattr(levels, "plan", lambda p, flags: plan)
        monkeypatch.setattr(ops, "_plans", {})
        with emulate(arch, seed=seed) as reports:
            out, lse = call(case, inputs)
        (report,) = reports
        assert report["kernel"] == plan.spec.name
        return out, lse, report

    return run


def tiles_met(spec, case: Case) -> int:
    """Counts the tiles of keys that row tiles of one head meet, from the oracle's picture of who sees whom."""
    seen = oracle.visible(
        case.n_q, case.n_k, **{x: y for x, y in case.rule.items() if x in ("causal", "align", "window")}
    )
    tiles = 0
    for first in range(0, case.n_q, spec.rows):
        keys = seen[first : first + spec.rows].any(0).nonzero()
        tiles += int(keys.max() // spec.keys - keys.min() // spec.keys + 1) if len(keys) else 0
    return tiles


def products(spec, case: Case) -> int:
    """Returns how many mma there should be: level 2 computes S for each column group, level 3 once."""
    groups = -(-(case.d_v or case.d) // spec.columns)
    warps = 8 if spec.rows < 64 else 4  # warps of a team, which share columns of O in pairs of fragments
    depth = -(-case.d // spec.key_columns) * spec.key_columns
    scores = spec.rows // 16 * depth // 16 * spec.keys // 8
    values = spec.rows // 16 * spec.keys // 16 * (-(-spec.columns // (16 * warps)) * warps * 2)
    tiles = tiles_met(spec, case) * case.batch * case.heads_q
    return tiles * (scores + groups * values if spec.streamed else groups * (scores + values))


TOP_LEFT_WINDOW = {"causal": True, "align": "top_left", "window": (40, -1)}


def shipped_case(spec, seed: int) -> tuple[Case, LevelPlan, str]:
    """Returns two row tiles, two heads, or both, with tails; seeds differ in rules, level, ring, head dim."""
    d = 2 * spec.columns if spec.streamed else spec.columns
    heads, n_q, d_qk, d_v, rule, mask, tiles, level, stages, q_resident, arch = [
        (1, spec.rows + 5, spec.columns, d, {}, None, 1, 1, 4, True, "sm_90a"),
        (2, spec.rows - 3, 72, d + 40, {"causal": True, "softcap": 8.0}, "additive-2d", 2, 2, 2, False, "sm_80"),
        (2, spec.rows + 5, spec.columns - 8, d - 24, TOP_LEFT_WINDOW, "bool", 2, 1, 3, False, "sm_90a"),
    ][seed]
    level = 3 if spec.streamed else level
    shape = {"heads_q": heads, "heads_kv": 1, "n_q": n_q, "n_k": tiles * spec.keys + 9, "d": d_qk, "d_v": d_v}
    case = Case(**shape, dtype=DTYPES[spec.dtype], mask=mask, rule=rule)
    return case, plan_of(spec, level, d_qk, stages, q_resident, arch), arch


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("spec", SHIPPED, ids=[spec.name for spec in SHIPPED])
def test_every_shipped_kernel_emulated(spec, seed, emulated_run):
    """Kernels are right, with as many mma as arithmetic says, and no bank conflict that matters."""
    case, plan, arch = shipped_case(spec, seed)
    inputs = make_inputs(case, "cpu", seed)
    out, lse, report = emulated_run(plan, case, inputs, arch, seed)
    check(case, inputs, out, lse, spec.acc_qk, spec.acc_pv)
    assert report["mma"] == products(spec, case)
    assert report["bank_conflict_ratio"] <= 1.001


@by_level_and_case([case for case in CASES if case.batch * case.n_q])
def test_cases_emulated(level, case, emulated_run):
    """Level 2 has narrow column groups, so that there are several; the others run as they are chosen."""
    inputs = make_inputs(case, "cpu")
    if level == 2:
        plan = plan_of(shipped(2, case.dtype), 2, case.d, stages=3, arch="sm_90a")
        out, lse, _ = emulated_run(plan, case, inputs, "sm_90a", seed=3)
    else:
        with emulate("sm_90a", seed=3) as reports:
            out, lse = call(case, inputs, level=level)
        assert reports
    check(case, inputs, out, lse)


@by_id([case for case in CASES if not case.batch * case.n_q])
def test_nothing_to_compute_emulated(case):
    with emulate():
        out, lse = ffpa(*make_inputs(case, "cpu")[:3], return_lse=True)
    assert not out.numel() and not lse.numel()


@pytest.mark.parametrize("q_resident", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@by_level()
def test_stages_and_resident_q_emulated(level, stages, q_resident, emulated_run):
    """Kernels are right on any schedule, and always with the same bits."""
    spec = shipped(level, torch.float16)
    d_v = spec.columns if level == 1 else spec.columns + 64
    case = Case(heads_q=1, heads_kv=1, n_q=40, n_k=300, d=200, d_v=d_v, dtype=torch.float16, rule={"causal": True})
    plan = plan_of(spec, level, case.d, stages, q_resident, "sm_90a")
    assert plan.stages == stages
    inputs = make_inputs(case, "cpu")
    results = [emulated_run(plan, case, inputs, "sm_90a", seed)[:2] for seed in (0, 1, 5)]
    check(case, inputs, *results[0])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("d", [1152, 2048])
@by_level((2, 3))
def test_wide_heads_on_one_instance_emulated(level, d, emulated_run):
    """However wide the values are, on chip there is never more than the kernel's own columns."""
    spec = shipped(level, columns=256)
    case = Case(heads_q=1, heads_kv=1, n_q=70, n_k=140, d=d)
    inputs = make_inputs(case, "cpu")
    out, lse, report = emulated_run(plan_of(spec, level, d), case, inputs)
    check(case, inputs, out, lse)
    assert report["mma"] == products(spec, case)


def check_moving_maxima(case: Case, level: int, acc: str, steepness: float, falling: bool, kernel: str):
    q, k, v, _ = make_inputs(case, "cpu")
    slope = torch.linspace(0.02, steepness, case.n_k)
    k = (k.float() * (slope.flip(0) if falling else slope).unsqueeze(1)).to(case.dtype)
    with emulate(seed=2) as reports:
        out, lse = ffpa(q, k, v, level=level, acc=acc, return_lse=True)
    assert reports[0]["kernel"].startswith(kernel)
    check(case, (q, k, v, None), out, lse, *ACCS[acc])


@pytest.mark.parametrize("falling", [False, True], ids=["rising", "falling"])
@pytest.mark.parametrize("steepness", [1.0, 12.0])
@pytest.mark.parametrize("acc", ["f32", "mixed", "f16"])
@by_level((1, 3))
def test_maxima_that_move_emulated(level, acc, steepness, falling):
    """The maximum of rows grows from tile to tile, slowly or fast, or is met in the first tile."""
    case = Case(heads_q=1, heads_kv=1, n_q=20, n_k=1100, d=512 if level == 1 else 64, d_v=512, dtype=torch.float16)
    check_moving_maxima(case, level, acc, steepness, falling, "forward_mma_split_f16")


def test_fewer_resident_blocks_change_no_bit_emulated(monkeypatch, emulated_run, emulated_gpu):
    """In level 3 a cap on the workspace takes blocks away, and each of the others gets more items."""
    spec = shipped(3)
    half_mb = (1 << 19) // (spec.columns * spec.rows * 4)  # number of column groups whose scratch takes half a MiB
    case = Case(heads_kv=1, n_q=spec.rows + 3, n_k=spec.keys + 7, d=64, d_v=half_mb * spec.columns)
    inputs, results = make_inputs(case, "cpu"), []
    for resident, cap_mb, blocks in ((3, 1024, 3), (3, 1, 2), (1, 1024, 1)):
        emulated_gpu(resident)
        monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap_mb))
        out, lse, report = emulated_run(plan_of(spec, 3, case.d), case, inputs)
        assert report["blocks"] == blocks
        results.append((out, lse))
    check(case, inputs, *results[0])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("softcap", [1e-60, 1e-40, 1e-3, 0.8, 1e3, 1e7, 3e38])
@by_level((1, 3))
def test_softcaps_of_any_size_emulated(level, softcap):
    """A cap far above the scores leaves them as they are, one far below them makes them equal."""
    case = Case(n_q=33, n_k=140, d=512 if level == 1 else 64, rule={"softcap": softcap, "scale": -0.05, "causal": True})
    inputs = make_inputs(case, "cpu")
    with emulate():
        check(case, inputs, *call(case, inputs, level=level))


def test_bit_exact_sums_emulated():
    case = Case(n_q=70, n_k=80, d=64)
    inputs = make_inputs(case, "cpu")
    lses = []
    for arch, exact in (("sm_80", False), ("sm_80", True), ("sm_90a", True)):
        with emulate(arch, exact=exact):
            out, lse = call(case, inputs, level=3)
        check(case, inputs, out, lse)
        lses.append(lse)
    assert not any(torch.equal(a, b) for a, b in ((lses[0], lses[1]), (lses[0], lses[2]), (lses[1], lses[2])))


@pytest.mark.parametrize("level, d, d_v, arch", [(1, 2056, 512, "sm_80"), (3, 3080, 64, "sm_90a")])
def test_scores_wider_than_the_values_emulated(level, d, d_v, arch):
    """Q and K have beyond 1024 columns."""
    case = Case(heads_kv=1, n_q=37, n_k=140, d=d, d_v=d_v, rule={"causal": True})
    inputs = make_inputs(case, "cpu")
    with emulate(arch, seed=4):
        check(case, inputs, *call(case, inputs, level=level))


@by_level((1, 3))
def test_without_an_lse_emulated(level):
    inputs = make_inputs(Case(n_q=70, n_k=80, d=512), "cpu")
    with emulate():
        want, _ = ffpa(*inputs[:3], level=level, return_lse=True)
        assert torch.equal(ffpa(*inputs[:3], level=level), want)


@pytest.mark.parametrize(
    "n_q, n_k, rule",
    [
        (1, 2**31 - 2000, {"window": (100, -1)}),
        (1, 2**31 - 2000, {"window": (100, 2**31 - 1)}),
        (40, 2**30 + 5, {"window": (100, 0)}),
    ],
    ids=str,
)
@by_level((1, 3))
def test_positions_near_the_end_of_32_bits_emulated(level, n_q, n_k, rule):
    """One row is there many times over (a stride of 0): the LSE counts what is seen, and each out row is that of V."""
    d = 512
    q, k, v = (torch.randn(1, 1, 1, d, dtype=torch.float16) for _ in range(3))
    expanded = (q.expand(1, 1, n_q, d), k.expand(1, 1, n_k, d), v.expand(1, 1, n_k, d))
    with emulate("sm_90a"):
        out, lse = ffpa(*expanded, level=level, return_lse=True, **rule)
    assert torch.equal(out, v.expand(1, 1, n_q, d))
    score = (q.float() * k.float()).sum() / d**0.5
    torch.testing.assert_close(lse, (score + math.log(101)).expand(1, 1, n_q), atol=1e-3, rtol=1e-4)


def far_apart(dim: int, device, d: int = 512) -> tuple[Case, list[torch.Tensor], torch.Tensor]:
    """Returns q, k, v and out whose last rows, heads or batch entries lie 2^31 elements behind their first ones."""
    case = Case(batch=2, n_q=33, n_k=33, d=d)
    shape = (case.batch, case.heads_q, case.n_q, case.d)
    strides = list(torch.empty(case.batch, case.heads_q, case.n_q, 3 * case.d, device="meta").stride())
    strides[dim] = 2**31 // (shape[dim] - 1)
    if dim == 2:  # heads and batch entries lie between two rows
        strides[:2] = [2 * 3 * case.d, 3 * case.d]
    extent = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 3 * case.d
    blocks = [torch.empty(extent, dtype=case.dtype, device=device) for _ in range(2)]  # memory of inputs and of out
    views = [blocks[0].as_strided(shape, strides, i * case.d) for i in range(3)]
    for view, x in zip(views, make_inputs(case, device), strict=False):
        view.copy_(x)
    return case, [*views, None], blocks[1].as_strided(shape, strides)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "head", "row"])
@by_level()
def test_more_than_31_bits_of_offsets_emulated(level, dim):
    """Memory that nobody touches takes none: the tensors are views of 4 GB that are never written."""
    case, inputs, out = far_apart(dim, "cpu")
    with emulate():
        _, lse = call(case, inputs, level=level, out=out)
    check(case, inputs, out, lse)


def test_gradients_of_an_emulated_forward():
    """The backward takes out and LSE of whatever ran forward."""
    q, k, v, _ = (
        x if x is None else x.clone().requires_grad_() for x in make_inputs(Case(d=128, n_q=40, n_k=50), "cpu")
    )
    with emulate():
        ffpa(q, k, v, causal=True, level=3).float().square().sum().backward()
    got = q.grad.clone()
    q.grad = None
    ffpa(q, k, v, causal=True).float().square().sum().backward()
    torch.testing.assert_close(got, q.grad, atol=3e-2, rtol=3e-2)


# ---- on a GPU ----

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or native.record() is None, reason="needs a GPU and a built library"
)


@needs_gpu
@by_level_and_case(CASES)
def test_cases_on_a_gpu(level, case):
    inputs = make_inputs(case, "cuda")
    check(case, inputs, *call(case, inputs, level=level))


@needs_gpu
@pytest.mark.parametrize("dtype, acc", [("bf16", "f32"), ("f16", "f32"), ("f16", "mixed"), ("f16", "f16")])
@by_level_and("d", [*range(64, 1025, 64), 1152, 2048])
@pytest.mark.parametrize("rule", [{}, {"causal": True, "align": "bottom_right"}], ids=str)
def test_every_head_dim_on_a_gpu(level, d, dtype, acc, rule):
    case = Case(heads_q=4, heads_kv=2, n_q=1000, n_k=1531, d=d, dtype=DTYPES[dtype], rule=rule)
    inputs = make_inputs(case, "cuda")
    check(case, inputs, *call(case, inputs, level=level, acc=acc), *ACCS[acc])


@needs_gpu
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("q_resident", [False, True])
@by_level()
def test_stages_and_resident_q_on_a_gpu(level, stages, q_resident, monkeypatch):
    monkeypatch.setattr(ops, "_plans", {})
    case = Case(heads_q=4, heads_kv=2, n_q=500, n_k=700, d=256, dtype=torch.float16, rule={"causal": True})
    plan = LevelPlan(shipped(level, torch.float16, 256), level, stages, q_resident)
    monkeypatch.setattr(levels, "plan", lambda p, flags: plan)
    inputs = make_inputs(case, "cuda")
    check(case, inputs, *call(case, inputs, level=level))


@needs_gpu
@pytest.mark.parametrize("n", [4096, pytest.param(16384, marks=pytest.mark.large(gigabytes=14))])
@by_level_and("d", [320, 1024])
def test_long_sequences_on_a_gpu(level, d, n):
    case = Case(heads_q=1, heads_kv=1, n_q=n, n_k=n, d=d, rule={"causal": True})
    inputs = make_inputs(case, "cuda")
    check(case, inputs, *call(case, inputs, level=level))


@needs_gpu
@by_level_and("d", [320, 512, 1024, 1152])
def test_bits_repeat_on_a_gpu(level, d):
    case = Case(heads_q=8, heads_kv=8, n_q=2000, n_k=2000, d=d, rule={"causal": True})
    inputs = make_inputs(case, "cuda")
    first = call(case, inputs, level=level)
    for _ in range(200):
        again = call(case, inputs, level=level)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@needs_gpu
@by_level()
def test_another_stream_on_a_gpu(level):
    """Work that the caller queued there before is waited for; the default stream's is not needed."""
    case = Case(heads_q=8, heads_kv=8, n_q=1500, n_k=1500, d=640)
    inputs = make_inputs(case, "cuda")
    late = [torch.full_like(x, torch.nan) for x in inputs[:3]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for empty, x in zip(late, inputs, strict=False):
            empty.copy_(x)
        out, lse = call(case, [*late, None], level=level)
    stream.synchronize()
    check(case, inputs, out, lse)


@needs_gpu
@pytest.mark.large(gigabytes=10)
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "head", "row"])
@by_level()
def test_more_than_31_bits_of_offsets_on_a_gpu(level, dim):
    case, inputs, out = far_apart(dim, "cuda")
    _, lse = call(case, inputs, level=level, out=out)
    check(case, inputs, out, lse)


@needs_gpu
@by_level((1, 3))
def test_emulator_and_gpu_agree(level):
    """Outputs agree to one unit in the last place, by the tensor cores' own sums (ex2 differs in its last bits)."""
    inputs = make_inputs(Case(n_q=100, n_k=200, d=320, dtype=torch.float16, rule={"causal": True}), "cpu")
    with emulate("sm_90a", exact=True):
        emulated_out = ffpa(*inputs[:3], causal=True, level=level)
    gpu_out = ffpa(*(x.cuda() for x in inputs[:3]), causal=True, level=level).cpu()
    torch.testing.assert_close(gpu_out, emulated_out, atol=5e-4, rtol=1e-3)
