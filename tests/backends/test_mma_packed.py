"""Tests packed sequences in the mma kernels: at every level, and with the keys of each in parts."""

import compare
import oracle
import pytest
import torch
from cases import PACKED_CASES, PackedCase, attending, make_packed_inputs
from ffpa_attn import ffpa_varlen
from ffpa_attn.backends import levels, row_tiles
from ffpa_attn.launching import native
from ffpa_attn.operators import ops
from ffpa_attn.testing import emulate
from test_numerics import by_sequence

F16 = torch.float16
LONG = [
    PackedCase((1, 0, 1, 1), (1100, 30, 0, 600), heads_q=2, heads_kv=1, d=512, dtype=F16, rule={"causal": True}),
    PackedCase((3, 40), (1300, 700), heads_q=2, heads_kv=1, d=128, dtype=F16, spare=5, rule={"window": (900, -1)}),
]
NONEMPTY = [case for case in PACKED_CASES if sum(case.lengths_q)] + LONG
LEVELS = [(case, level) for case in NONEMPTY for level in ((None, 1, 2, 3) if case.d > 256 else (None, 3))]
by_level_and_case = pytest.mark.parametrize(
    "case, level", LEVELS, ids=[f"{case.id}-level{level or ''}" for case, level in LEVELS]
)


def check(case: PackedCase, device: str, level):
    q, k, v, *offsets = make_packed_inputs(case, device)
    rows, keys = q.shape[0] - case.spare, k.shape[0] - case.spare
    out, lse = ffpa_varlen(q, k, v, *offsets, return_lse=True, level=level, **case.options(device))
    assert not out[rows:].any() and torch.isneginf(lse[:, rows:]).all(), "rows of no sequence"
    want, want_lse = by_sequence(case, oracle.attention, q, k, v)
    compare.assert_close("out", out[:rows], want, by_sequence(case, compare.baseline, q, k, v)[0])
    compare.assert_lse_close("lse", lse[:, :rows], want_lse, q[:rows], k[:keys], case.rule.get("scale"))


@pytest.mark.parametrize("splits", [1, 3])
@by_level_and_case
def test_emulated(case, level, splits, monkeypatch, no_short_forward):
    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(levels, "_splits", lambda *_: splits)
    cut, cuts = row_tiles.cut_keys, []
    monkeypatch.setattr(row_tiles, "cut_keys", lambda *of: cuts.append(cut(*of)) or cuts[-1])
    with emulate("sm_90a", seed=3) as reports:
        check(case, "cpu", level)
    assert cuts[-1].count == splits if case in LONG else cuts[-1].count <= splits
    assert reports[-1]["kernel"] == "forward_clear_rows"
    merges = ["merge" in report["kernel"] for report in attending(reports)]
    assert merges == [False, True][: 1 + (cuts[-1].count > 1)]


@pytest.mark.skipif(not torch.cuda.is_available() or native.record() is None, reason="needs a GPU and a built library")
@by_level_and_case
def test_on_a_gpu(case, level, no_short_forward):
    check(case, "cuda", level)
