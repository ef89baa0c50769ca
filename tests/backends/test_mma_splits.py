"""Tests few rows and many keys: parts of the keys share the GPU, and the query heads of one row share a tile."""

import pytest
import torch
from cases import Case, make_inputs
from ffpa_attn import env
from ffpa_attn.backends import levels
from ffpa_attn.launching import native
from ffpa_attn.operators import ops
from ffpa_attn.specs.spec import Problem, Visibility
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
]  # fmt: skip
PROBLEM = Problem(
    "forward", "cuda", "sm_90", "bf16", 1, 32, 32, 8192, 8192, 512, 512, None, Visibility(-1, -1, False), 0.04, 0.0, None, True, None, "f32", None
)  # fmt: skip


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_emulated(case, level, monkeypatch):
    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(levels, "_splits", lambda *_: 3)
    inputs = make_inputs(case, "cpu")
    with emulate("sm_90a", seed=3) as reports:
        out, lse = call(case, inputs, level=level)
    one_key = case == ONE_ROW.with_(rule={"causal": True, "align": "top_left"})  # it is all that the row sees
    merges = [] if one_key else ["forward_merge_f16"]
    assert [report["kernel"] for report in reports][1:] == merges
    check(case, inputs, out, lse)


@pytest.mark.skipif(not torch.cuda.is_available() or native.record() is None, reason="needs a GPU and a built library")
@pytest.mark.parametrize("level", [None, 1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_on_a_gpu(case, level):
    inputs = make_inputs(case, "cuda")
    check(case, inputs, *call(case, inputs, level=level))


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
        assert chosen.splits <= n_k // (2 * chosen.spec.keys)


def test_parts_stay_within_the_workspace(monkeypatch):
    changes = {"n_q": 1024, "heads_q": 4, "heads_kv": 4, "n_k": 65536}
    unbounded = plan(**changes).splits
    monkeypatch.setenv("FFPA_WORKSPACE_MB", "16")
    splits = plan(**changes).splits
    assert unbounded >= splits and splits * 4 * 1024 * 514 * 4 <= 16 << 20


@pytest.mark.parametrize(
    "changes, packs", [({}, True), ({"heads_kv": 32}, False), ({"n_q": 2}, False), ({"packed": True}, False)], ids=str
)
def test_heads_of_one_row_share_a_tile(changes, packs):
    assert plan(**{"n_q": 1, "heads_kv": 4, **changes}).packs_heads == packs
