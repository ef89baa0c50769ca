"""Tests few rows and many keys in the mma kernels: query heads share row tiles, and keys are cut into parts."""

import pytest
import torch
from cases import Case, make_inputs
from ffpa_attn import env
from ffpa_attn.backends import levels, row_tiles
from ffpa_attn.launching import native
from ffpa_attn.operators import again, ops
from ffpa_attn.specs.problem import Problem, Visibility
from ffpa_attn.testing import emulate
from test_mma import call, check

F16 = torch.float16
ONE_ROW = Case(heads_q=8, heads_kv=2, n_q=1, n_k=1700, d=512, dtype=F16)
CASES = [
    ONE_ROW,
    ONE_ROW.with_(rule={"causal": True}),
    ONE_ROW.with_(rule={"causal": True, "align": "top_left"}),
    ONE_ROW.with_(rule={"window": (700, 0)}),
    ONE_ROW.with_(rule={"window": (3, 900), "align": "top_left"}),
    ONE_ROW.with_(batch=2, layout="BNHD", d_v=320),
    *[ONE_ROW.with_(batch=2, heads_q=4, heads_kv=1, mask=kind) for kind in ("bool", "bool-keys", "bias-by-head", "additive-2d", "additive-f32")],
    Case(heads_q=1, heads_kv=1, n_q=40, n_k=1800, d=512, dtype=F16, rule={"causal": True}),
    Case(heads_q=2, heads_kv=1, n_q=70, n_k=1700, d=320, dtype=F16, rule={"window": (900, -1)}),
    # all but the first part of the keys, or all of them, are hidden from some rows
    Case(heads_q=1, heads_kv=1, n_q=3, n_k=1800, d=512, dtype=F16, rule={"causal": True, "align": "top_left"}),
    Case(heads_q=1, heads_kv=1, n_q=840, n_k=768, d=320, dtype=F16, rule={"causal": True}),
    # groups that fill a tile, that leave some of its rows over, and that leave most of them over
    *[Case(heads_q=group, heads_kv=1, n_q=n_q, n_k=600, d=d, dtype=F16, rule={"causal": True}) for d in (64, 512) for group, n_q in ((2, 65), (3, 50), (7, 19), (6, 64), (96, 1))],
    *[Case(batch=2, heads_q=6, heads_kv=2, n_q=45, n_k=700, d=64, dtype=F16, mask=mask) for mask in ("bool", "bool-some-rows-empty", "additive", "additive-f32", "additive-2d", "bias-by-head", "bool-left-padded")],
    *[Case(heads_q=6, heads_kv=2, n_q=9, n_k=700, d=512, dtype=F16, mask=mask, rule={"softcap": 5.0}) for mask in ("bool", "bias-by-head")],
    *[Case(heads_q=4, heads_kv=2, n_q=10, n_k=700, d=d, dtype=F16, rule={"window": window, "align": align}, layout="BNHD") for d in (64, 320) for window in ((100, 0), (-1, 20), (250, -1)) for align in ("bottom_right", "top_left")],
    Case(heads_q=8, heads_kv=2, n_q=700, n_k=100, d=64, dtype=F16, rule={"causal": True}),  # rows before all keys
    Case(heads_q=4, heads_kv=2, n_q=40, n_k=700, d=200, d_v=72, dtype=F16, rule={"scale": -0.1, "causal": True}),
    Case(heads_q=16, heads_kv=1, n_q=5, n_k=700, d=576, d_v=512, dtype=F16, mask="additive"),
]  # fmt: skip
PROBLEM = Problem(
    "forward", "cuda", "sm_90", "bf16", 1, 32, 32, 8192, 8192, 512, 512, None, Visibility(-1, -1, False), 0.04, 0.0, None, True, None, "f32", None
)  # fmt: skip


LEVELS = [(case, level) for case in CASES for level in ((1, 3) if case.d > 256 else (None,))]
by_level_and_case = pytest.mark.parametrize(
    "case, level", LEVELS, ids=[f"{case.id}-level{level or ''}" for case, level in LEVELS]
)


@pytest.mark.parametrize("splits", [1, 3])
@by_level_and_case
def test_emulated(case, level, splits, monkeypatch, no_short_forward):
    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(levels, "_splits", lambda *_: splits)
    inputs = make_inputs(case, "cpu")
    with emulate("sm_90a", seed=3) as reports:
        out, lse = call(case, inputs, level=level)
    one_key = case == ONE_ROW.with_(rule={"causal": True, "align": "top_left"})  # it is all that the row sees
    merges = [] if one_key or splits == 1 or case.n_k < 200 else ["forward_merge_f16"]
    assert [report["kernel"] for report in reports][1:] == merges
    check(case, inputs, out, lse)


def test_wide_results_of_many_parts(monkeypatch, no_short_forward):
    """The merge adds 20 parts in two groups of threads, and more columns than these have at a time."""
    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(levels, "_splits", lambda *_: 20)
    case = Case(heads_q=2, heads_kv=1, n_q=1, n_k=5100, d=64, d_v=1024, dtype=F16)
    inputs = make_inputs(case, "cpu")
    with emulate("sm_90a", seed=1) as reports:
        out, lse = call(case, inputs, level=2)
    assert next(reversed(ops._plans.values())).choice.plan.splits == 20 and len(reports) == 2
    check(case, inputs, out, lse)


@pytest.mark.skipif(not torch.cuda.is_available() or native.record() is None, reason="needs a GPU and a built library")
@pytest.mark.parametrize("level", [None, 1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_on_a_gpu(case, level, monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", "mma")
    inputs = make_inputs(case, "cuda")
    check(case, inputs, *call(case, inputs, level=level))


@pytest.mark.parametrize("d, level", [(64, None), (320, 1), (320, 3)])
def test_sharing_changes_no_bit_of_rows_that_see_all_keys(d, level, monkeypatch, no_short_forward):
    case = Case(heads_q=6, heads_kv=2, n_q=45, n_k=256, d=d, dtype=F16)
    inputs, results = make_inputs(case, "cpu"), []
    monkeypatch.setattr(levels, "_splits", lambda *_: 1)
    for heads in (1, 3):
        again.forget_all()
        monkeypatch.setattr(ops, "_plans", {})
        monkeypatch.setattr(row_tiles, "shared_heads", lambda p, rows, heads=heads: heads)
        with emulate("sm_90a"):
            results.append(call(case, inputs, level=level))
        assert next(reversed(ops._plans.values())).choice.plan.tile_heads == heads
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def plan(**changes):
    return levels.plan(PROBLEM._replace(**changes), env.run_flags())


def test_where_the_rows_fill_the_gpu_nothing_is_split():
    assert plan().splits == 1 and plan(n_q=1, batch=1024, heads_q=8, heads_kv=1).splits == 1


@pytest.mark.parametrize("changes", [{"n_q": 1}, {"n_q": 64, "heads_q": 4, "heads_kv": 4}], ids=str)
def test_few_rows_are_split(changes):
    assert plan(**changes, n_k=32768).splits > 1
    assert plan(**changes, n_k=200).splits == 1
    for n_k in (1000, 2000, 4000):
        chosen = plan(**changes, n_k=n_k)
        assert chosen.splits <= n_k // chosen.spec.keys


def test_parts_stay_within_the_workspace(monkeypatch):
    changes = {"n_q": 1024, "heads_q": 4, "heads_kv": 4, "n_k": 65536}
    unbounded = plan(**changes).splits
    monkeypatch.setenv("FFPA_WORKSPACE_MB", "16")
    splits = plan(**changes).splits
    assert unbounded >= splits and splits * 4 * 1024 * 514 * 4 <= 16 << 20


@pytest.mark.parametrize(
    "changes, heads",
    [
        ({}, 8),
        ({"n_q": 4}, 8),
        ({"n_q": 65}, 8),  # nine tiles of 64 rows instead of sixteen
        ({"n_q": 128}, 1),  # as many tiles
        ({"heads_kv": 32}, 1),
        ({"heads_q": 131, "heads_kv": 1}, 1),  # more than a tile has
        ({"heads_q": 96, "heads_kv": 3}, 32),
        ({"n_q": 3, "packed": (60, 8192), "batch": 20}, 8),
    ],
    ids=str,
)
@pytest.mark.parametrize("d", [128, 512])
def test_which_heads_share_tiles(changes, heads, d):
    assert plan(**{"n_q": 1, "heads_kv": 4, "d_qk": d, "d_v": d, **changes}).tile_heads == heads
