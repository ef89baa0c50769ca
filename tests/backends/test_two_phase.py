"""Tests the forward for wide head dims in two phases, of both backends: shipped kernels, emulated and on a GPU."""

import re
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import compare
import oracle
import pytest
import test_large_scores as large
import torch
from cases import CASES as CASES_OF_ALL
from cases import PACKED_CASES as PACKED_CASES_OF_ALL
from cases import Case, PackedCase, attending, make_inputs, make_packed_inputs
from ffpa_attn import env, ffpa, ffpa_varlen
from ffpa_attn.backends import fused, row_tiles, two_phase
from ffpa_attn.backends.choice import CANDIDATES
from ffpa_attn.backends.levels import LevelPlan
from ffpa_attn.backends.row_tiles import ROWS
from ffpa_attn.backends.two_phase import TwoPhasePlan
from ffpa_attn.building import build
from ffpa_attn.launching import native
from ffpa_attn.operators import ops
from ffpa_attn.specs import archs
from ffpa_attn.specs.problem import Problem, Visibility
from ffpa_attn.specs.spec import ForwardMmaSplit, ForwardMmaTwoPhase, ForwardWgmmaTwoPhase, aot_specs
from ffpa_attn.testing import emulate
from test_mma import check, far_apart

ARCHS = {"hopper": "sm_90a", "mma": "sm_80"}  # backend -> architecture that emulates it
KERNELS = {"hopper": ForwardWgmmaTwoPhase, "mma": ForwardMmaTwoPhase}
SHIPPED = [
    spec
    for spec in aot_specs(env.all_flags())
    if isinstance(spec, tuple(KERNELS.values())) and not getattr(spec, "paged", False)
]
COLUMNS = {spec.columns for spec in SHIPPED if isinstance(spec, ForwardWgmmaTwoPhase)}
F16, BF16 = torch.float16, torch.bfloat16


class Place(NamedTuple):
    backend: str
    device: str  # "cuda", or "cpu" for the emulator

    @property
    def emulated(self) -> bool:
        return self.device == "cpu"

    def why_not(self) -> str | None:
        if self.emulated:
            return None
        if not torch.cuda.is_available() or native.record() is None:
            return "needs a GPU, and kernels for it"
        major, minor = torch.cuda.get_device_capability()
        return archs.why_not_on(ARCHS[self.backend], f"sm_{major}{minor}")

    def __str__(self) -> str:
        return f"{self.backend}-{'emulated' if self.emulated else self.device}"


PLACES = [Place(backend, device) for device in ("cpu", "cuda") for backend in ARCHS]


SHARED_HEADS = row_tiles.shared_heads


def plan_parts(monkeypatch, count: int, shared: bool = False) -> None:
    """Makes plans with keys in at most `count` parts, in which query heads share row tiles, or do not."""

    def cut(p, spec, tile_heads, flags):
        return 1.0, row_tiles.cut_keys(p.n_q, p.n_k, p.visibility, ROWS // tile_heads, two_phase.KEYS, count)

    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(two_phase, "_parts", cut)
    monkeypatch.setattr(row_tiles, "shared_heads", SHARED_HEADS if shared else lambda p, rows=ROWS: 1)


@pytest.fixture
def forced(monkeypatch, no_short_forward):
    """Gives forced(backend): from then on it is the one to run, for any number of rows, with all keys in one
    part, and rows of one head in a tile."""

    def force(backend: str) -> None:
        monkeypatch.setenv("FFPA_BACKEND", backend)
        plan_parts(monkeypatch, 1)
        monkeypatch.setattr(two_phase, "why_slower", lambda *args: None)
        monkeypatch.setattr(fused, "is_faster_than_two_phases", lambda p: False)
        for known in ARCHS:
            monkeypatch.setitem(two_phase.LEAST_HEAD_DIM, known, 1)

    return force


@pytest.fixture(params=PLACES, ids=str)
def place(request, monkeypatch, forced):
    if why_not := request.param.why_not():
        pytest.skip(why_not)
    forced(request.param.backend)
    columns = two_phase._columns  # a debug build has one width
    monkeypatch.setattr(two_phase, "_columns", lambda d_v: columns(d_v) if len(COLUMNS) > 1 else max(COLUMNS))
    return request.param


def in_chunks(monkeypatch) -> None:
    """Makes chunks of two tiles of keys."""
    monkeypatch.setattr(two_phase, "MOST_KEYS", 2 * two_phase.KEYS)


def in_places(name: str, values, few, ids=str):
    """Runs every value in every place, but few in the emulator of mma.sync: most of them are not about it."""
    pairs = [(place, x) for place in PLACES for x in (few if place == Place("mma", "cpu") else values)]
    return pytest.mark.parametrize(
        f"place, {name}", pairs, ids=[f"{place}-{ids(x)}" for place, x in pairs], indirect=["place"]
    )


def run(place: Place, function, seed: int = 0, fused: bool = False):
    """Returns what `function` gives, by our kernel for certain, and the emulator's report."""
    with emulate(ARCHS[place.backend], seed=seed, fused=fused) if place.emulated else nullcontext() as reports:
        result = function()
    if reports is None:
        torch.cuda.synchronize()
        return result, None
    report, *merges = attending(reports)
    assert report["kernel"] in {spec.name for spec in SHIPPED if isinstance(spec, KERNELS[place.backend])}
    plan = next(reversed(ops._plans.values())).choice.plan
    assert [merge["kernel"][:14] for merge in merges] == ["forward_merge_"] * (plan.parts.count > 1)
    return result, report


def attend(place: Place, case: Case, inputs, seed: int = 0, **options):
    q, k, v, mask = inputs
    rule = {**case.options(q.device), **options}
    return run(place, lambda: ffpa(q, k, v, return_lse=True, mask=mask, layout=case.layout, **rule), seed)


def by_id(cases):
    return pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])


_base = Case(n_q=140, n_k=300, d=520)
_one_head = _base.with_(heads_q=1, heads_kv=1)

CASES = [
    # head dims: every width of a tile of O, tails of it and of a step, both types
    *[_base.with_(d=d, dtype=dtype) for d, dtype in ((520, F16), (576, BF16), (640, F16), (768, BF16))],
    *[_one_head.with_(n_q=70, d=d, dtype=dtype) for d, dtype in ((1024, F16), (1152, BF16))],
    # values of their own width
    *[_base.with_(d=d, d_v=d_v, n_k=270, rule={"causal": True}) for d, d_v in ((576, 512), (64, 576), (8, 904), (712, 8))],
    # lengths: tails, single rows
    *[_base.with_(n_q=n_q, n_k=n_k) for n_q, n_k in ((1, 1), (129, 1), (1, 513), (256, 256), (64, 65), (191, 257))],
    # heads
    *[
        _base.with_(batch=batch, heads_q=h_q, heads_kv=h_kv, n_q=40, n_k=72)
        for batch, h_q, h_kv in ((2, 4, 2), (1, 5, 1), (3, 1, 1))
    ],
    # causal and windows, at both alignments, with more keys than rows and fewer; rows that see nothing
    *[
        _one_head.with_(n_q=n_q, n_k=n_k, dtype=dtype, rule={"causal": True, "align": align})
        for n_q, n_k in ((200, 200), (100, 530), (530, 100))
        for align, dtype in (("bottom_right", BF16), ("top_left", F16))
    ],
    *[
        _one_head.with_(n_q=n_q, n_k=n_k, rule={"window": window, "align": align})
        for n_q, n_k in ((270, 270), (140, 600), (300, 140))
        for window, align in (((16, 0), "bottom_right"), ((0, 9), "top_left"), ((-1, 20), "bottom_right"), ((7, -1), "top_left"))
    ],
    _base.with_(n_q=290, n_k=260, rule={"causal": True, "window": (10, 30)}),
    _base.with_(n_q=400, n_k=100, rule={"window": (0, -1), "align": "top_left"}),  # whole row tiles lie behind all keys
    # visible keys that begin or end one key from the edge of a tile
    *[
        _base.with_(n_q=30, n_k=n_k, rule={"window": window})
        for n_k, window in ((513, (228, 0)), (284, (-1, 0)), (600, (342, -1)), (255, (-1, -1)))
    ],
    # scale and softcap
    *[_base.with_(n_k=90, rule={"scale": scale, "causal": True}) for scale in (1.0, 0.0, -0.3)],
    *[_base.with_(n_k=270, dtype=F16, rule={"softcap": cap, "scale": 1.0, "causal": causal}) for cap, causal in ((5.0, False), (30.0, True), (1e-40, False), (1e7, True))],
    # masks
    *[
        _base.with_(batch=2, heads_kv=1, n_q=37, n_k=261, mask=kind)
        for kind in ("bool", "bool-keys", "bool-left-padded", "bool-some-rows-empty", "additive", "additive-2d", "additive-f32", "bias-by-head")
    ],
    _base.with_(n_q=150, n_k=261, dtype=F16, mask="additive-2d", rule={"causal": True, "softcap": 8.0, "window": (125, -1)}),
    _base.with_(batch=2, n_q=61, n_k=61, mask="bool-left-padded", rule={"causal": True}),
    # layout
    _base.with_(batch=2, heads_q=4, heads_kv=2, n_q=137, n_k=61, d_v=456, layout="BNHD", mask="bool", rule={"causal": True}),
]  # fmt: skip


@in_places("case", CASES, few=CASES[::3], ids=lambda case: case.id)
def test_cases(case, place):
    inputs = make_inputs(case, place.device)
    (out, lse), report = attend(place, case, inputs, seed=3)
    check(case, inputs, out, lse)
    assert report is None or report["bank_conflict_ratio"] <= 1.001


@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_scales_of_tiles_that_every_row_sees(scale, place):
    case = Case(heads_q=1, heads_kv=1, n_q=128, n_k=512, d=72, d_v=520, dtype=F16, rule={"scale": scale})
    inputs = make_inputs(case, place.device)
    check(case, inputs, *attend(place, case, inputs)[0])


@pytest.mark.parametrize("n_q, n_k", [(0, 5), (5, 0)])
def test_nothing_to_compute(n_q, n_k, monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    case = _base.with_(n_q=n_q, n_k=n_k)
    with emulate("sm_90a") as reports:
        out, lse = ffpa(*make_inputs(case, "cpu")[:3], return_lse=True)
    assert not reports and not out.any() and torch.isneginf(lse).all()


def products(case: Case, columns: list[int], step: int, rows: int) -> list[tuple[int, int]]:
    """Returns columns of each `rows` rows that exist, and steps over them: S once, in whole tiles; O by columns, over
    keys.
    """
    seen = oracle.visible(
        case.n_q, case.n_k, **{x: y for x, y in case.rule.items() if x in ("causal", "align", "window")}
    )
    found = []
    for first in range(0, case.n_q, two_phase.ROWS):
        keys = seen[first : first + two_phase.ROWS].any(0).nonzero()
        begin, end = int(keys.min()), int(keys.max()) + 1
        tiles = -(-end // two_phase.KEYS) - begin // two_phase.KEYS
        of_rows = [(two_phase.KEYS, tiles * -(-case.d // step))]
        of_rows += [(width, -(-end // step) - begin // step) for width in columns]
        found += of_rows * -(-min(case.n_q - first, two_phase.ROWS) // rows)
    return found * case.batch * case.heads_q


@pytest.mark.parametrize("seed", [0, 1, 5])
@pytest.mark.parametrize("spec", SHIPPED, ids=[spec.name for spec in SHIPPED])
def test_every_shipped_kernel_emulated(spec, seed, forced, monkeypatch):
    """Kernels are right on any schedule, with as many products as arithmetic says."""
    backend = next(backend for backend, kernel in KERNELS.items() if isinstance(spec, kernel))
    forced(backend)
    monkeypatch.setattr(two_phase, "_columns", lambda d_v: spec.columns)
    dtype = F16 if spec.dtype == "f16" else BF16
    rule = [{}, {"causal": True}, {"window": (100, 30)}][seed % 3]
    columns = [spec.columns, spec.columns - 64] if backend == "hopper" else [spec.columns, spec.columns, 128]
    case = Case(heads_kv=1, n_q=135, n_k=280, d=520, d_v=sum(columns) - 40, dtype=dtype, rule=rule)
    inputs = make_inputs(case, "cpu", seed)
    (out, lse), report = attend(Place(backend, "cpu"), case, inputs, seed)
    check(case, inputs, out, lse)
    assert report["kernel"] == spec.name
    if backend == "hopper":  # each warp counts; multiples of 16 in a step; at most 256 columns at once
        assert report["wgmma"] == sum(
            -(-width // 256) * steps * 4 * 4 for width, steps in products(case, columns, 64, 64)
        )
    else:  # fragments of 16 x 8
        assert report["mma"] == sum(width // 8 * 8 * steps * 2 for width, steps in products(case, columns, 32, 128))


def steep_inputs(case: Case, device: str, steepness: float, falling: bool):
    q, k, v, _ = make_inputs(case, device)
    slope = torch.linspace(0.02, steepness, case.n_k, device=device)
    return q, (k.float() * (slope.flip(0) if falling else slope).unsqueeze(1)).to(case.dtype), v, None


@pytest.mark.parametrize("chunks", [False, True], ids=["whole", "in-chunks"])
@in_places("falling", [False, True], few=[False], ids=lambda falling: "falling" if falling else "rising")
@pytest.mark.parametrize("steepness, dtype", [(1.0, F16), (12.0, F16), (12.0, BF16)], ids=str)
def test_references_that_move(steepness, dtype, falling, chunks, place, monkeypatch):
    """O follows the references that move: between tiles, and from chunk to chunk."""
    if chunks:
        in_chunks(monkeypatch)
    case = Case(heads_q=1, heads_kv=1, n_q=140, n_k=1100, d=136, d_v=520, dtype=dtype)
    inputs = steep_inputs(case, place.device, steepness, falling)
    (out, lse), _ = attend(place, case, inputs, seed=2)
    check(case, inputs, out, lse)


def test_rows_move_one_by_one(place):
    """Some rows of each pair, warp and quad move in the second tile, some in the fourth, some never."""
    case = Case(heads_q=1, heads_kv=1, n_q=128, n_k=1030, d=64, d_v=520, dtype=F16)
    q, k, v, _ = (x if x is None else x.clone() for x in make_inputs(case, place.device))
    q[..., :2] = 0
    q[:, :, 3::7, 0], q[:, :, 5::11, 1] = 16.0, 24.0
    k[..., :2] = 0
    k[:, :, 300, 0], k[:, :, 900, 1] = 12.0, 20.0
    (out, lse), _ = attend(place, case, (q, k, v, None), seed=3)
    check(case, (q, k, v, None), out, lse)


def test_a_move_behind_many_tiles(place):
    """One word tells of moves in 32 tiles; this move comes behind them."""
    case = Case(heads_q=1, heads_kv=1, n_q=3, n_k=36 * 256, d=16, d_v=264, dtype=F16)
    q, k, v, _ = make_inputs(case, place.device)
    k = k.clone()
    k[:, :, 34 * 256 + 5] = 12.0 * q[:, :, 1]
    (out, lse), _ = attend(place, case, (q, k, v, None), seed=2)
    check(case, (q, k, v, None), out, lse)


def test_rows_that_see_nothing_for_long(place, monkeypatch):
    """The first key of some rows comes in a later tile, a later chunk, or never."""
    in_chunks(monkeypatch)
    case = Case(heads_kv=1, n_q=140, n_k=1100, d=64, d_v=520)
    q, k, v, _ = make_inputs(case, place.device)
    first = (torch.arange(140) * 9).view(1, 1, -1, 1)
    mask = (torch.arange(1100).view(1, 1, 1, -1) >= first).to(q.device)
    (out, lse), _ = attend(place, case, (q, k, v, mask), seed=4)
    check(case, (q, k, v, mask), out, lse)
    assert torch.isneginf(lse[:, :, -17:]).all() and not out[:, :, -17:].any()


@pytest.mark.parametrize("rule", [{"causal": True, "softcap": 20.0}, {"window": (400, 30)}], ids=str)
@pytest.mark.parametrize("cap, blocks, chunk_keys", [(1_300_000, 2, 768), (950_000, 2, 256), (800_000, 1, 1536)])
@pytest.mark.parametrize("backend", ARCHS)
def test_any_cap(backend, cap, blocks, chunk_keys, rule, forced, monkeypatch):
    """A smaller cap allows fewer keys at a time, and then fewer blocks."""
    forced(backend)
    monkeypatch.setattr(two_phase, "_columns", lambda d_v: max(COLUMNS))
    cut, cuts = two_phase.cut, []
    monkeypatch.setattr(two_phase, "cut", lambda *args: cuts.append(cut(*args[:-1], cap)) or cuts[-1])
    case = Case(heads_q=1, heads_kv=1, n_q=140, n_k=2600, d=64, d_v=520, rule=rule)
    inputs = make_inputs(case, "cpu")
    (out, lse), report = attend(Place(backend, "cpu"), case, inputs, seed=3)
    check(case, inputs, out, lse)
    assert cuts[-1].scratch_bytes <= cap and report["blocks"] == cuts[-1].blocks
    assert cuts[-1][:2] == (blocks, chunk_keys) or "window" in rule


# ---- scores of any size (test_large_scores.py has what they should give) ----


@pytest.fixture(params=[False, True], ids=["", "fused"])
def attend_large(request, place, monkeypatch):
    """Gives attend_large(q, k, v, **options) in two phases; emulated, also with multiply-adds fused as by nvcc."""
    if request.param and not place.emulated:
        pytest.skip("a GPU runs what nvcc made")
    if request.param:
        monkeypatch.setenv("ENABLE_FFPA_DEBUG", "1")  # few kernels to compile

    def attend(q, k, v, mask=None, **options):
        tensors = [x if x is None else x.to(place.device) for x in (q, k, v, mask)]
        function = partial(ffpa, *tensors[:3], mask=tensors[3], return_lse=True, **options)
        return [x.cpu() for x in run(place, function, seed=3, fused=request.param)[0]]

    return attend


LARGE_D = 72  # a step of columns, and a tail


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("dtype, size", large.SIZES, ids=str)
def test_large_scores_that_are_equal(dtype, size, sign, attend_large):
    q, k, v, *want = large.tied(size, LARGE_D, dtype, sign)
    large.expect(*attend_large(q, k, v, scale=1.0), *want)


def test_large_scores_whose_logits_a_float_does_not_hold(attend_large):
    q, k = (torch.full((1, 1, n, LARGE_D), a, dtype=F16) for n, a in ((70, 40960.0), (300, 6000.0)))
    v = large.values(300, LARGE_D, F16)
    score = float(q[0, 0, 0].double() @ k[0, 0, 0].double())
    want = v.double().mean(2, keepdim=True).float().expand(q.shape)
    lse = torch.full((1, 1, 70), score + float(torch.tensor(300).log()))
    large.expect(*attend_large(q, k, v, scale=1.0), want, lse)


@pytest.mark.parametrize("dtype, value", large.MASKS, ids=str)
def test_masks_of_any_size(dtype, value, attend_large):
    """Some rows have left padding, and some see nothing else."""
    q, k, v = (large.values(n, LARGE_D, dtype)[:, :, -300:] for n in (70, 301, 300))
    mask = torch.zeros(1, 1, 70, 300)
    mask[..., ::2, :] = value
    mask[..., 1::2, :150] = value
    large.expect(*attend_large(q, k, v, mask), *large.softmax_in_float32(q, k, v, mask, LARGE_D**-0.5))


def test_nan_stays_nan_and_rows_without_keys_leave_others_alone(attend_large):
    """Other rows stay the same to the last bit."""
    q, k, v = (large.values(n, LARGE_D, F16)[:, :, -300:] for n in (70, 301, 300))
    q[..., 0] = k[..., 0] = 64.0
    q[:, :, 5] = torch.nan
    mask = torch.zeros(1, 1, 70, 300)
    want = attend_large(q, k, v, mask)
    mask[..., ::2, :] = -torch.inf
    out, lse = attend_large(q, k, v, mask)
    for both in zip((out, lse), want, strict=True):
        torch.testing.assert_close(*(x[:, :, 1::2] for x in both), rtol=0, atol=0, equal_nan=True)
    assert not out[:, :, ::2].any() and torch.isneginf(lse[:, :, ::2]).all()
    assert torch.isnan(out[:, :, 5]).all() and torch.isnan(lse[:, :, 5]).all()
    assert torch.isfinite(out[:, :, 7:]).all()


def test_more_heads_than_the_cache_holds(place):
    """The cache holds K and V of three heads of four at a time."""
    rule = {"window": (16, 0)}
    case = Case(batch=2, heads_q=4, heads_kv=2, n_q=140, n_k=10000, d=264, rule=rule)
    inputs = make_inputs(case, place.device)
    check(case, inputs, *attend(place, case, inputs, seed=3)[0])


def test_bits_repeat(place, emulated_gpu):
    """Bits repeat on any schedule, by any number of blocks."""
    case = Case(heads_kv=1, n_q=200, n_k=530, d=136, d_v=576, rule={"causal": True})
    inputs = steep_inputs(case, place.device, 6.0, False)
    results = []
    for seed, blocks in ((0, 2), (1, 3), (3, 1), (7, 2)) if place.emulated else ((0, 2),) * 50:
        emulated_gpu(blocks)
        results.append(attend(place, case, inputs, seed)[0])
    check(case, inputs, *results[0])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


PACKED_CASES = [
    PackedCase((64, 1, 133), (64, 1, 133), d=520, rule={"causal": True}),
    PackedCase((5, 140, 0, 17), (33, 40, 12, 0), d=576),
    PackedCase((5, 40, 0, 17), (33, 20, 12, 0), d=520, heads_q=4, heads_kv=1, dtype=F16, rule={"causal": True}),
    PackedCase((150, 20), (30, 360), d=64, d_v=576, spare=9, rule={"window": (8, 3)}),
    PackedCase((20, 50), (300, 30), d=520, spare=70, rule={"causal": True, "align": "top_left", "softcap": 6.0}),
    PackedCase((400, 1), (0, 30), d=520, rule={"window": (0, -1), "align": "top_left"}),
    PackedCase((0, 0), (0, 0), d=520, spare=4),
    PackedCase((), (), d=520),
]


def check_packed(case: PackedCase, inputs, out, lse):
    q, k, v, cu_q, cu_k, *_ = inputs
    for i in range(len(case.lengths_q)):
        of_q, of_k = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        dense = [x[rows].transpose(0, 1).unsqueeze(0) for x, rows in ((q, of_q), (k, of_k), (v, of_k))]
        want, want_lse = oracle.attention(*dense, **case.options(q.device))
        base, _ = compare.baseline(*dense, **case.options(q.device))
        compare.assert_close(f"out {i}", out[of_q].transpose(0, 1), want[0], base[0])
        compare.assert_lse_close(f"lse {i}", lse[:, of_q], want_lse[0], *dense[:2], case.rule.get("scale"))
    rest = slice(sum(case.lengths_q), None)
    assert not out[rest].any() and torch.isneginf(lse[:, rest]).all()


@pytest.mark.parametrize("case", PACKED_CASES, ids=[case.id for case in PACKED_CASES])
def test_packed_sequences(case, place):
    inputs = make_packed_inputs(case, place.device)
    computes = min(inputs[5:]) > 0
    with emulate(ARCHS[place.backend], seed=3) if place.emulated else nullcontext() as reports:
        out, lse = ffpa_varlen(*inputs, return_lse=True, **case.options(place.device))
    kernels = [KERNELS[place.backend].family] * computes
    families = [r["kernel"].partition("_bf16")[0].partition("_f16")[0] for r in attending(reports or [])]
    assert reports is None or families == kernels
    check_packed(case, inputs, out, lse)


def test_packed_in_chunks(place, monkeypatch):
    in_chunks(monkeypatch)
    case = PackedCase((140, 30), (270, 620), d=64, d_v=520, spare=3, rule={"causal": True})
    inputs = make_packed_inputs(case, place.device)
    (out, lse), _ = run(place, lambda: ffpa_varlen(*inputs, return_lse=True, **case.options(place.device)), seed=3)
    check_packed(case, inputs, out, lse)


def test_packed_qkv(place):
    """q, k and v are columns of one tensor, each three head dims apart; the result goes into a strided tensor."""
    case = Case(n_q=140, n_k=140, d=520, layout="BNHD", rule={"causal": True})
    x = torch.randn(1, 140, 3, 2, 520, generator=torch.Generator().manual_seed(0)).to(place.device, BF16)
    inputs = (*x.unbind(2), None)
    out = torch.full((1, 140, 3, 520), torch.nan, dtype=BF16, device=x.device)
    (_, lse), _ = attend(place, case, inputs, out=out[:, :, :2])
    check(case, inputs, out[:, :, :2], lse)
    assert out[:, :, 2].isnan().all()


def test_rows_that_share_memory(place):
    """All keys are one row, all values another."""
    case = Case(n_q=140, n_k=90, d=520)
    q, k, v, _ = make_inputs(case, place.device)
    inputs = (q, *(x[:, :, :1].clone().expand_as(x) for x in (k, v)), None)
    check(case, inputs, *attend(place, case, inputs)[0])


def test_without_an_lse(place):
    inputs = make_inputs(_base, place.device)
    want = attend(place, _base, inputs)[0][0]
    assert torch.equal(run(place, lambda: ffpa(*inputs[:3]))[0], want)


def test_gradients_of_the_forward_emulated(monkeypatch):
    """The backward takes out and LSE of whatever ran forward."""
    case = Case(n_q=20, n_k=30, d=520, rule={"causal": True})
    q, k, v = (x.clone().requires_grad_() for x in make_inputs(case, "cpu")[:3])
    with emulate("sm_90a"), env.overridden("FFPA_BACKEND", "hopper"):
        out = ffpa(q, k, v, causal=True)
    out.float().square().sum().backward()
    got, q.grad = q.grad.clone(), None
    ffpa(q, k, v, causal=True).float().square().sum().backward()
    torch.testing.assert_close(got, q.grad, atol=3e-2, rtol=3e-2)


@pytest.mark.large(gigabytes=10)
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "head", "row"])
def test_more_than_31_bits_of_offsets(dim, place, monkeypatch):
    """Views of 4 GB are never written but where the tensors are."""
    case, inputs, out = far_apart(dim, place.device)
    (_, lse), _ = attend(place, case, inputs, out=out)
    check(case, inputs, out, lse)


# ---- on a GPU ----


@pytest.fixture(params=PLACES[len(ARCHS) :], ids=str)
def on_a_gpu(request, monkeypatch, forced):
    """Lets any head dim run on a GPU."""
    if why_not := request.param.why_not():
        pytest.skip(why_not)
    forced(request.param.backend)
    return request.param


@by_id([case for case in CASES_OF_ALL if case.batch * case.n_q * case.n_k])
def test_cases_of_all_on_a_gpu(case, on_a_gpu):
    inputs = make_inputs(case, "cuda")
    check(case, inputs, *attend(on_a_gpu, case, inputs)[0])


@pytest.mark.parametrize("case", PACKED_CASES_OF_ALL, ids=[case.id for case in PACKED_CASES_OF_ALL])
def test_packed_cases_of_all_on_a_gpu(case, on_a_gpu):
    inputs = make_packed_inputs(case, "cuda")
    check_packed(case, inputs, *ffpa_varlen(*inputs, return_lse=True, **case.options("cuda")))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("d", [*range(544, 1025, 32), 1152, 1536, 2048])
@pytest.mark.parametrize("rule", [{}, {"causal": True}], ids=str)
def test_every_head_dim_on_a_gpu(d, dtype, rule, on_a_gpu):
    case = Case(heads_q=4, heads_kv=2, n_q=1000, n_k=1531, d=d, dtype=dtype, rule=rule)
    inputs = make_inputs(case, "cuda")
    check(case, inputs, *attend(on_a_gpu, case, inputs)[0])


@pytest.mark.parametrize("cap_mb", [2, 64, 1024])
@pytest.mark.parametrize("n", [4096, pytest.param(16384, marks=pytest.mark.large(gigabytes=26))])
def test_long_sequences_on_a_gpu(n, cap_mb, on_a_gpu, monkeypatch):
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap_mb))
    case = Case(heads_q=2, heads_kv=1, n_q=n, n_k=n, d=640, rule={"causal": True})
    inputs = make_inputs(case, "cuda")
    check(case, inputs, *attend(on_a_gpu, case, inputs)[0])


def check_bits_repeat(d: int, run) -> None:
    """Checks run(case, inputs): many row tiles for each block, references that move, and a GPU in other moods."""
    case = Case(heads_q=16, heads_kv=8, n_q=3000, n_k=3000, d=d, rule={"causal": True})
    inputs = steep_inputs(case, "cuda", 6.0, False)
    first = run(case, inputs)[0]
    check(case, inputs, *first)
    for _ in range(200):
        again = run(case, inputs)[0]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("chunks", [False, True], ids=["whole", "in-chunks"])
def test_bits_repeat_on_a_gpu(chunks, on_a_gpu, monkeypatch):
    if chunks:
        in_chunks(monkeypatch)
    check_bits_repeat(576, partial(attend, on_a_gpu))


def check_graph_replays(d: int) -> None:
    """Each replay counts its row tiles anew."""
    q, k, v, _ = make_inputs(Case(heads_q=16, heads_kv=16, n_q=1000, n_k=1000, d=d), "cuda")
    want = ffpa(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ffpa(q, k, v, causal=True)
    for _ in range(3):
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, want)


def test_graph_replays_on_a_gpu(on_a_gpu):
    check_graph_replays(512)


# ---- the plan ----

PROBLEM = Problem(
    "forward", "cuda", "sm_90", "bf16", 1, 32, 8, 8192, 8192, 640, 640, None, Visibility(-1, -1, False), 0.04, 0.0, None, True, None, "f32", None
)  # fmt: skip


def planned(backend: str, monkeypatch, problem: Problem, **flags):
    monkeypatch.setattr(native, "why_not", lambda spec, arch: None)
    return CANDIDATES[backend](problem, {**env.all_flags(), **flags})


def test_what_runs_on_wgmma(monkeypatch):
    hopper = partial(planned, "hopper", monkeypatch)
    assert hopper(PROBLEM).spec.family == "forward_wgmma_two_phase"
    for d_v, columns in (
        (8, 256),
        (264, 320),
        (448, 256),
        (576, 320),
        (768, 384),
        (896, 320),
        (1024, 384),
        (1152, 384),
    ):
        assert hopper(PROBLEM._replace(d_v=d_v, packed=(8192, 8192))).spec.columns == columns
    for changes, why in (
        ({"acc": "f16", "dtype": "f16"}, "accumulates in f32"),
        ({"num_stages": 2}, "num_stages"),
        ({"n_q": 2**31 - 9000}, "32 bits"),
        ({"n_q": 1}, "is estimated to take"),
        ({"packed": (8192, 8192), "batch": 2**26 - 2**11 - 63}, "row tiles in 32 bits"),
    ):
        assert why in hopper(PROBLEM._replace(**changes)), changes
    assert hopper(PROBLEM._replace(packed=(8192, 8192), batch=2**26 - 2**11 - 64)).kernel
    assert hopper(PROBLEM._replace(n_q=64, batch=100)).tile_heads == 4
    assert "SWIZZLE_Q" in hopper(PROBLEM, ENABLE_FFPA_SMEM_SWIZZLE_Q=True)
    assert hopper(PROBLEM._replace(n_q=1), FFPA_BACKEND="hopper").kernel
    assert "MiB of workspace" in hopper(PROBLEM._replace(d_v=4096), FFPA_WORKSPACE_MB=1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_what_runs_on_mma(arch, monkeypatch):
    """The levels run where they are asked for, and where two phases cannot run or are slower."""
    mma, problem = partial(planned, "mma", monkeypatch), PROBLEM._replace(arch=arch)
    assert mma(problem).spec == ForwardMmaTwoPhase("bf16", 256)
    assert mma(problem._replace(d_qk=64, packed=(8192, 8192))).spec.family == "forward_mma_two_phase"
    for changes in (
        {"d_qk": 512, "d_v": 512},
        {"level": 2},
        {"acc": "f16", "dtype": "f16"},
        {"num_stages": 2},
        {"n_q": 64, "batch": 100, "heads_kv": 32},  # half of each tile is empty
        {"n_q": 1, "batch": 100},
    ):
        assert isinstance(mma(problem._replace(**changes)), LevelPlan), changes
    assert mma(problem._replace(n_q=256, heads_q=8)).parts.count > 1
    assert isinstance(mma(problem, ENABLE_FFPA_SMEM_SWIZZLE_Q=True), LevelPlan)
    assert isinstance(mma(problem._replace(d_v=4096), FFPA_WORKSPACE_MB=1), LevelPlan)


@pytest.mark.parametrize("backend, least_mb", [("hopper", 75), ("mma", 83)])
def test_small_workspaces_are_the_levels(backend, least_mb, monkeypatch):
    """The levels run where too few blocks fit, or chunks of less than four tiles of keys where there are more."""
    run_by = partial(planned, backend, monkeypatch)
    assert isinstance(run_by(PROBLEM, FFPA_WORKSPACE_MB=least_mb), TwoPhasePlan)
    assert isinstance(run_by(PROBLEM._replace(n_k=256), FFPA_WORKSPACE_MB=9), TwoPhasePlan)
    for problem, mb in ((PROBLEM, least_mb - 1), (PROBLEM, 1), (PROBLEM._replace(d_v=2048), 2)):
        assert not isinstance(run_by(problem, FFPA_WORKSPACE_MB=mb), TwoPhasePlan), (problem, mb)
    assert planned("hopper", monkeypatch, PROBLEM, FFPA_WORKSPACE_MB=1, FFPA_BACKEND="hopper").kernel


@pytest.mark.parametrize(
    "failing, runs",
    [((ForwardWgmmaTwoPhase,), ForwardMmaTwoPhase), ((ForwardWgmmaTwoPhase, ForwardMmaTwoPhase), ForwardMmaSplit)],
    ids=["wgmma", "both"],
)
def test_without_kernels_that_cannot_be_compiled(failing, runs, monkeypatch):
    def kernel(spec, gpu):
        if isinstance(spec, failing):
            raise RuntimeError("nvcc failed")

    monkeypatch.setattr(native, "_unready", {})
    monkeypatch.setattr(native, "kernel", kernel)
    monkeypatch.setattr(native, "why_not", lambda spec, gpu: native._unready.get((spec, gpu)))
    assert isinstance(ops._ready_choice(PROBLEM, env.all_flags()).plan.spec, runs)


def test_lists_of_moves_hold_the_longest_chunk():
    source = (build.csrc() / "attention/forward/two_phase_tiles.cuh").read_text()
    assert int(re.search(r"kMostTiles = (\d+);", source)[1]) * two_phase.KEYS == two_phase.MOST_KEYS


def test_it_cannot_be_emulated_elsewhere(monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    q, k, v, _ = make_inputs(_base, "cpu")
    with emulate("sm_80"), pytest.raises(NotImplementedError, match="FFPA_BACKEND=hopper cannot run .*sm_90a"):
        ffpa(q, k, v)


@pytest.mark.parametrize("cap_mb", [1, 3, 20, 100, 1024])
@pytest.mark.parametrize("n_k", [1, 256, 5000, 1 << 20])
@pytest.mark.parametrize("see", [Visibility(-1, -1, False), Visibility(-1, 0, False), Visibility(700, 0, False)])
def test_scratch_fits_the_cap(cap_mb, n_k, see):
    for tiles, d_v in ((1, 520), (100, 640), (5000, 1152), *([(100, 4096)] if n_k <= 256 else [])):
        blocks, chunk_keys, nbytes = two_phase.cut(tiles, n_k, see, d_v, 256, 132, cap_mb << 20)
        assert nbytes <= cap_mb << 20 and 1 <= blocks <= min(tiles, 132)
        assert chunk_keys >= two_phase.KEYS and chunk_keys % two_phase.KEYS == 0
