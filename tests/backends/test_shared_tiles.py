"""Tests the fused forwards where query heads share row tiles and keys are cut into parts: in the emulator and on a GPU."""

import pytest
import torch
from cases import CASES as CASES_OF_ALL
from cases import PACKED_CASES as PACKED_CASES_OF_ALL
from cases import Case, PackedCase, among_neighbours, attending, make_inputs, make_packed_inputs
from ffpa_attn import env, ffpa_varlen
from ffpa_attn.backends import fused, row_tiles
from ffpa_attn.backends.row_tiles import Parts
from ffpa_attn.checks import memory_checks
from ffpa_attn.launching import attention_call
from ffpa_attn.operators import again, ops
from ffpa_attn.specs.problem import Visibility
from ffpa_attn.testing import emulate
from test_fused import PROBLEM, attend, check_bits_of_schedules, device, fits, plan_tiles  # noqa: F401
from test_mma import check
from test_two_phase import check_packed, steep_inputs

F16, BF16 = torch.float16, torch.bfloat16
WAYS = [(True, 1), (True, 3), (False, 4)]
by_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: ("shared" if way[0] else "alone") + f"-{way[1]}")


@pytest.fixture
def planned(way, device, monkeypatch):  # noqa: F811
    plan_tiles(monkeypatch, *way)
    return device


CASES = [
    case for case in CASES_OF_ALL if fits(case) and case.heads_q > case.heads_kv and case.batch * case.n_q * case.n_k
]
CASES += [
    # groups that fill a tile, that leave some of its rows over, and that leave most of them over
    *[Case(heads_q=group, heads_kv=1, n_q=n_q, n_k=300, d=64, rule={"causal": True}) for group, n_q in ((129, 1), (6, 64), (2, 65), (3, 50), (5, 30), (7, 19), (16, 9), (48, 3), (100, 2), (128, 2))],
    *[Case(batch=2, heads_q=6, heads_kv=2, n_q=45, n_k=600, d=64, mask=mask) for mask in ("bool", "bool-some-rows-empty", "additive", "additive-f32", "additive-2d", "bias-by-head", "bool-left-padded")],
    *[Case(heads_q=4, heads_kv=2, n_q=40, n_k=700, d=64, rule={"window": window, "align": align}, layout="BNHD") for window in ((100, 0), (0, 9), (-1, 20), (250, -1)) for align in ("bottom_right", "top_left")],
    *[Case(heads_q=6, heads_kv=2, n_q=50, n_k=400, d=d, d_v=d_v, dtype=F16, rule={"causal": True}) for d, d_v in ((192, 128), (128, 8), (40, 72), (320, 320), (512, 8), (8, 384), (448, 200), (512, 512))],
    Case(heads_q=4, heads_kv=2, n_q=40, n_k=500, d=64, rule={"softcap": 5.0, "causal": True}),
    Case(heads_q=4, heads_kv=2, n_q=40, n_k=500, d=384, mask="additive", rule={"softcap": 5.0, "scale": -0.1}),
    Case(heads_q=4, heads_kv=2, n_q=700, n_k=100, d=64, rule={"causal": True}),  # rows before all keys
    Case(heads_q=8, heads_kv=1, n_q=1, n_k=1300, d=128),
    Case(heads_q=8, heads_kv=1, n_q=1, n_k=1, d=384),
    Case(heads_q=16, heads_kv=1, n_q=5, n_k=400, d=576, d_v=512, mask="additive"),
]  # fmt: skip
PACKED_CASES = [case for case in PACKED_CASES_OF_ALL if fits(case) and case.lengths_q]
PACKED_CASES += [
    PackedCase((1, 1, 1, 1), (700, 1, 0, 129), d=64, heads_q=8, heads_kv=2),
    PackedCase((5, 140, 0, 17), (33, 900, 12, 0), d=64, heads_q=6, heads_kv=2, spare=9, rule={"causal": True}),
    PackedCase((30, 2, 64), (600, 900, 30), d=384, heads_q=4, heads_kv=1, rule={"window": (300, 0)}),
    PackedCase((20, 50), (300, 30), d=128, d_v=72, heads_q=3, heads_kv=1, spare=70, rule={"causal": True, "align": "top_left"}),
]  # fmt: skip


@by_way
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_cases(case, planned):
    inputs = make_inputs(case, planned)
    check(case, inputs, *attend(planned, case, inputs, seed=3)[0])


@pytest.mark.parametrize("way", [(True, 45), (True, 64)], ids=["shared-45", "shared-64"])
def test_more_parts_than_lanes(planned):
    for case in (
        Case(heads_q=8, heads_kv=1, n_q=1, n_k=8200, d=64, d_v=8),
        Case(heads_q=8, heads_kv=1, n_q=1, n_k=5700, d=64),
        Case(heads_q=4, heads_kv=1, n_q=3, n_k=5700, d=64, rule={"causal": True, "window": (5600, 0)}),
    ):
        inputs = make_inputs(case, planned)
        check(case, inputs, *attend(planned, case, inputs)[0])


@by_way
@pytest.mark.parametrize("case", PACKED_CASES, ids=[case.id for case in PACKED_CASES])
def test_packed_sequences(case, planned, emulated_gpu):
    emulated_gpu(4)
    inputs = make_packed_inputs(case, planned)
    out, lse = _attend_packed(planned, inputs, case.options(planned))
    check_packed(case, inputs, out, lse)


def _attend_packed(device, inputs, rule, seed: int = 3):  # noqa: F811
    if device == "cuda":
        return ffpa_varlen(*inputs, return_lse=True, **rule)
    with emulate("sm_90a", seed=seed) as reports:
        result = ffpa_varlen(*inputs, return_lse=True, **rule)
    plan = next(reversed(ops._plans.values())).choice.plan
    assert len(attending(reports)) == (1 + (plan.parts.count > 1)) * (min(inputs[5:]) > 0)
    return result


@by_way
@pytest.mark.parametrize("d", [64, 384])
@pytest.mark.parametrize("rule", [{}, {"causal": True}, {"window": (200, 0)}], ids=str)
def test_neighbours_change_no_bit(d, rule, planned, emulated_gpu):
    """A sequence's result depends on the longest lengths that are allowed, not on how long those beside it are."""
    ours = make_packed_inputs(PackedCase((30,), (500,), heads_q=4, heads_kv=2, d=d), planned)
    results = []
    for lengths_q, lengths_k, at, blocks in (
        ((30, 8, 20), (500, 100, 9), 0, 2),
        ((2, 30, 40), (700, 500, 3), 1, 6),
        ((1, 0, 30), (700, 700, 500), 2, 4),
    ):
        emulated_gpu(blocks)
        case = PackedCase(lengths_q, lengths_k, heads_q=4, heads_kv=2, d=d)
        tensors, of_q = among_neighbours(ours, case, at, (80, 2000), planned, seed=blocks)
        out, lse = _attend_packed(planned, (*tensors, 40, 700), rule, seed=blocks)
        results.append((out[of_q], lse[:, of_q]))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@by_way
def test_bits_repeat(planned, emulated_gpu):
    case = Case(batch=2, heads_q=8, heads_kv=2, n_q=70, n_k=900, d=64, rule={"causal": True})
    check_bits_of_schedules(planned, case, steep_inputs(case, planned, 6.0, False), emulated_gpu)


@by_way
@pytest.mark.parametrize("size", [1e9, 1e30, -3e38])
def test_lse_of_large_scores(size, planned):
    """Parts agree on what a reference means, however large the scores are."""
    case = Case(heads_q=4, heads_kv=2, n_q=20, n_k=700, d=64)
    q, k, v, _ = make_inputs(case, planned)
    mask = torch.full((1, 1, 1, 700), size, device=q.device)
    out, lse = attend(planned, case, (q, k, v, mask))[0]
    torch.testing.assert_close(lse, torch.full_like(lse, size), rtol=1e-6, atol=0)
    want = v.float().mean(2).repeat_interleave(2, 1)[:, :, None].expand_as(out)
    torch.testing.assert_close(out.float(), want, rtol=0, atol=0.02)


@by_way
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("d", [64, 256, 512])
def test_graph_replays_with_other_lengths(d, planned):
    case = PackedCase((30, 8, 1), (900, 5000, 64), heads_q=16, heads_kv=2, d=d)
    q, k, v, cu_q, cu_k, *_ = make_packed_inputs(case, planned)
    most = 64, 8000
    graph = torch.cuda.CUDAGraph()
    ffpa_varlen(q, k, v, cu_q, cu_k, *most, causal=True)
    with torch.cuda.graph(graph):
        got = ffpa_varlen(q, k, v, cu_q, cu_k, *most, causal=True)
    for of_q, of_k in (([0, 30, 38, 39], [0, 900, 5900, 5964]), ([0, 1, 2, 39], [0, 3000, 3001, 5964])):
        cu_q.copy_(torch.tensor(of_q)), cu_k.copy_(torch.tensor(of_k))
        graph.replay()
        assert torch.equal(got, ffpa_varlen(q, k, v, cu_q, cu_k, *most, causal=True))


@pytest.mark.parametrize("way", [(False, 3)], ids=["alone-3"])
def test_offsets_that_fall(planned, monkeypatch):
    """Rows that no tile has get what rows without keys get, whatever lay in the memory of parts."""
    monkeypatch.setattr(memory_checks, "offsets_values", lambda *args: None)
    empty = attention_call._floats
    monkeypatch.setattr(attention_call, "_floats", lambda *of: empty(*of).fill_(torch.nan))
    inputs = list(make_packed_inputs(PackedCase((300, 5, 130, 40), (400, 300, 390, 200), d=64), planned))
    inputs[3] = torch.tensor([200, 475, 90, 190, 10], dtype=torch.int32, device=inputs[0].device)
    out, lse = _attend_packed(planned, inputs, {})
    assert torch.isfinite(out).all() and not lse.isnan().any()


@pytest.mark.parametrize("way", [(False, 3)], ids=["alone-3"])
def test_offsets_that_end_with_zeros(planned, monkeypatch):
    """Entries that nobody uses may be zeros, as servers pad them: the sequences before them are computed all the same."""
    monkeypatch.setattr(memory_checks, "offsets_values", lambda *args: None)
    case = PackedCase((30, 20, 0, 0), (400, 300, 0, 0), heads_q=4, heads_kv=2, d=64, spare=9)
    inputs = list(make_packed_inputs(case, planned))
    want = _attend_packed(planned, inputs, {})
    for i in (3, 4):
        inputs[i] = torch.cat([inputs[i][:3], torch.zeros(2, dtype=torch.int32, device=inputs[i].device)])
    again.forget_all()
    assert all(torch.equal(a, b) for a, b in zip(_attend_packed(planned, inputs, {}), want, strict=True))


def test_sharing_changes_no_bit(device, monkeypatch):  # noqa: F811
    for case in (
        Case(heads_q=6, heads_kv=2, n_q=45, n_k=300, d=64, rule={"causal": True}),
        Case(heads_q=4, heads_kv=1, n_q=40, n_k=400, d=384),
    ):
        inputs, results = steep_inputs(case, device, 6.0, False), []
        for shared in (False, True):
            plan_tiles(monkeypatch, shared, 1)
            again.forget_all()
            results.append(attend(device, case, inputs)[0])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- the plan ----


ALL = Visibility(-1, -1, False)


@pytest.mark.parametrize("n_k", [1, 127, 128, 129, 1000, 8192])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("window", [None, 1, 129, 400])
def test_parts_cover_all_keys(n_k, count, window):
    see = Visibility(window - 1, 0, False) if window else ALL
    of_keys = row_tiles.cut_keys(16, n_k, see, 1, 128, count)
    assert of_keys.count <= count and of_keys.keys % 128 == 0
    for begin in range(n_k) if window else (0,):  # wherever the visible keys begin
        tiles = -(-min(begin + (window or n_k), n_k) // 128) - begin // 128
        assert of_keys.count == 1 or of_keys.count * of_keys.keys >= tiles * 128


def test_parts_are_even():
    for count in (2, 4, 16, 32, 64):
        assert row_tiles.cut_keys(1, 64 * 256, ALL, 1, 256, count) == Parts(count, 64 // count * 256)
    for see, keys in (
        (Visibility(100, 0, False), 300),
        (Visibility(100, 30, False), 300),
        (Visibility(-1, 5, True), 128),
        (Visibility(100, -1, False), 320),
    ):
        of_keys = row_tiles.cut_keys(60, 9000, see, 16, 64, 64)
        assert of_keys.count * of_keys.keys <= keys, see
    assert row_tiles.cut_keys(60, 9000, Visibility(-1, 5, False), 16, 64, 64).count > 40


def _plan(**changes):
    return fused.plan(PROBLEM._replace(**changes), env.all_flags())


def test_what_shares_tiles():
    for changes, tile_heads in (
        ({"n_q": 1}, 4),
        ({"n_q": 64}, 4),
        ({"n_q": 65}, 4),
        ({"n_q": 128}, 1),  # as many tiles
        ({"n_q": 129}, 4),
        ({"n_q": 8190}, 1),  # hardly fewer
        ({"n_q": 1, "heads_kv": 32}, 1),
        ({"n_q": 1, "heads_q": 128, "heads_kv": 1}, 128),
        ({"n_q": 1, "heads_q": 129, "heads_kv": 1}, 43),  # a tile has no more rows than 128
        ({"n_q": 1, "heads_q": 131, "heads_kv": 1}, 1),
        ({"n_q": 64, "heads_q": 6, "heads_kv": 1}, 2),  # three whole tiles; all six would take four
        ({"n_q": 20, "packed": (100, 8192), "batch": 9}, 4),
    ):
        assert _plan(**changes).tile_heads == tile_heads, changes


def test_what_is_for_pairs():
    wide = PROBLEM._replace(d_qk=576, d_v=512, heads_q=128, heads_kv=1, scale=0.04)
    for changes, pairs in (
        ({"n_q": 1}, True),
        ({"n_q": 8, "batch": 8}, True),
        ({}, False),
        ({"n_q": 1, "d_qk": 584}, False),
    ):
        assert fused.is_faster_than_two_phases(wide._replace(**changes)) == pairs, changes
    assert not fused.is_faster_than_two_phases(PROBLEM._replace(n_q=1))


def test_what_is_cut():
    assert _plan().parts == Parts() == _plan(n_q=128, n_k=200).parts
    few = _plan(n_q=128, n_k=32768)
    assert few.parts.count > 1 and few.specs[1].family == "forward_merge"
    assert row_tiles.count(PROBLEM._replace(n_q=128)) * few.parts.count <= 132  # one wave
    windowed = PROBLEM._replace(n_q=128, n_k=32768, visibility=Visibility(4000, 0, False))
    of_window = fused.plan(windowed, env.all_flags()).parts
    assert of_window.count > 1 and of_window.count * of_window.keys < 5000
    for cap in (8, 32):
        of_keys = fused.plan(PROBLEM._replace(n_q=128, n_k=32768), {**env.all_flags(), "FFPA_WORKSPACE_MB": cap}).parts
        assert 128 * 32 * row_tiles.floats_of_row(of_keys, 256) * 4 <= cap << 20
        assert of_keys.count > 1 or cap == 8
    assert fused.plan(PROBLEM, env.all_flags()).workspace_bytes == 0 and few.workspace_bytes is None
