"""Tests the two-phase forwards where query heads share row tiles and keys are cut into parts: in the emulator and on a
GPU.
"""

import pytest
import test_large_scores as large
import torch
from cases import Case, PackedCase, among_neighbours, make_inputs, make_packed_inputs
from ffpa_attn import env, ffpa, ffpa_varlen
from ffpa_attn.backends import levels, row_tiles, two_phase
from ffpa_attn.backends.row_tiles import Parts
from ffpa_attn.checks import memory_checks
from ffpa_attn.launching import attention_call
from ffpa_attn.operators import again
from ffpa_attn.specs import archs
from ffpa_attn.specs.problem import Visibility
from test_mma import check
from test_two_phase import (  # noqa: F401
    COLUMNS,
    LARGE_D,
    PLACES,
    PROBLEM,
    attend,
    check_packed,
    forced,
    in_chunks,
    in_places,
    place,
    plan_parts,
    planned,
    run,
    steep_inputs,
)

F16 = torch.float16
ON_A_GPU = [where for where in PLACES if not where.emulated]


@pytest.fixture
def cut(place, monkeypatch):  # noqa: F811
    """Cuts keys into four parts, where there are so many tiles of them."""
    plan_parts(monkeypatch, 4)
    return place


_base = Case(heads_q=1, heads_kv=1, n_q=140, n_k=800, d=72, d_v=264)
CASES = [
    _base,
    _base.with_(n_q=1, n_k=1030, dtype=F16),
    _base.with_(batch=2, heads_q=4, heads_kv=2, n_q=9, n_k=520, d=24, d_v=520, layout="BNHD"),
    # some row tiles see fewer parts than others, or none
    *[_base.with_(n_q=300, rule={"causal": True, "align": align}) for align in ("bottom_right", "top_left")],
    _base.with_(n_q=600, n_k=520, rule={"causal": True}),
    _base.with_(n_q=1100, n_k=520, d=8, d_v=8, rule={"window": (0, -1), "align": "top_left"}),
    *[
        _base.with_(n_q=n_q, rule={"window": window, "align": align})
        for n_q, window, align in ((140, (300, 0), "bottom_right"), (270, (7, -1), "top_left"), (60, (600, 20), "bottom_right"))
    ],
    # masks, softcap, scales
    *[_base.with_(batch=2, n_q=37, mask=kind) for kind in ("bool-some-rows-empty", "bool-left-padded", "additive", "additive-f32")],
    _base.with_(n_q=70, dtype=F16, mask="additive-2d", rule={"causal": True, "softcap": 8.0, "window": (525, -1)}),
    *[_base.with_(n_q=70, rule={"softcap": 5.0, "scale": scale}) for scale in (1.0, -0.1)],
    _base.with_(n_q=20, d=520, d_v=640),
]  # fmt: skip


@in_places("case", CASES, few=[*CASES[1:4], *CASES[5:11:2], CASES[14]], ids=lambda case: case.id)
def test_cases(case, cut):
    inputs = make_inputs(case, cut.device)
    check(case, inputs, *attend(cut, case, inputs, seed=3)[0])


GROUPS = [
    # groups that fill a tile, that leave some of its rows over, and that leave most of them over
    *[Case(heads_q=group, heads_kv=1, n_q=n_q, n_k=n_k, d=24, d_v=72, rule={"causal": True}) for group, n_q, n_k in ((8, 1, 1030), (4, 40, 270), (129, 1, 30), (3, 50, 530), (5, 30, 300), (100, 2, 300), (128, 2, 90))],
    *[Case(batch=2, heads_q=6, heads_kv=2, n_q=45, n_k=300, d=24, d_v=72, mask=mask) for mask in ("bool", "bool-some-rows-empty", "additive-f32", "bias-by-head")],
    *[Case(heads_q=4, heads_kv=2, n_q=40, n_k=700, d=24, d_v=72, rule={"window": window, "align": align}, layout="BNHD") for window, align in (((250, 0), "bottom_right"), ((0, 9), "top_left"))],
    Case(heads_q=6, heads_kv=2, n_q=23, n_k=600, d=72, d_v=264, dtype=F16, rule={"softcap": 5.0, "causal": True, "scale": -0.1}),
    Case(heads_q=3, heads_kv=1, n_q=70, n_k=520, d=520, d_v=640, rule={"causal": True}),
]  # fmt: skip


@pytest.mark.parametrize("count", [1, 3])
@in_places("case", GROUPS, few=GROUPS, ids=lambda case: case.id)
def test_heads_that_share_tiles(case, count, place, monkeypatch):  # noqa: F811
    plan_parts(monkeypatch, count, shared=True)
    inputs = make_inputs(case, place.device)
    check(case, inputs, *attend(place, case, inputs, seed=3)[0])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "case",
    [
        PackedCase((1, 1, 1, 1), (700, 2, 0, 129), heads_q=8, heads_kv=2, d=64),
        PackedCase((5, 140, 0, 17), (33, 900, 12, 0), heads_q=6, heads_kv=2, d=64, spare=9, rule={"causal": True}),
        PackedCase((20, 50), (300, 30), d=72, d_v=24, heads_q=3, heads_kv=1, spare=70, rule={"window": (90, 0)}),
    ],
    ids=lambda case: case.id,
)
def test_heads_of_packed_sequences_that_share_tiles(case, count, place, monkeypatch):  # noqa: F811
    plan_parts(monkeypatch, count, shared=True)
    inputs = make_packed_inputs(case, place.device)
    check_packed(case, inputs, *attend_packed(place, inputs, case.rule))


def test_sharing_changes_no_bit(place, monkeypatch):  # noqa: F811
    case = Case(heads_q=6, heads_kv=2, n_q=45, n_k=400, d=64, d_v=264)
    inputs, results = steep_inputs(case, place.device, 6.0, False), []
    for shared in (False, True):
        plan_parts(monkeypatch, 1, shared)
        again.forget_all()
        results.append(attend(place, case, inputs)[0])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("falling", [False, True], ids=["rising", "falling"])
@pytest.mark.parametrize("rule", [{}, {"causal": True, "softcap": 20.0}, {"window": (900, 0)}], ids=str)
def test_parts_in_chunks(rule, falling, cut, monkeypatch):
    """A part has several chunks, the last of them shorter, in which references move."""
    in_chunks(monkeypatch)
    plan_parts(monkeypatch, 2)
    case = Case(heads_q=1, heads_kv=1, n_q=140, n_k=2300, d=64, d_v=264, dtype=F16, rule=rule)
    inputs = steep_inputs(case, cut.device, 12.0, falling)
    check(case, inputs, *attend(cut, case, inputs, seed=2)[0])


def test_more_parts_than_lanes(cut, monkeypatch):
    plan_parts(monkeypatch, 64)
    case = Case(heads_q=1, heads_kv=1, n_q=3, n_k=33 * 256 - 100, d=16, d_v=8)
    inputs = make_inputs(case, cut.device)
    check(case, inputs, *attend(cut, case, inputs)[0])


PACKED_CASES = [
    PackedCase((1, 1, 1, 1), (700, 2, 0, 129), heads_q=1, heads_kv=1, d=64, d_v=264),
    PackedCase((5, 140, 0, 17), (33, 900, 12, 0), heads_q=1, heads_kv=1, d=64, d_v=72, spare=9, rule={"causal": True}),
    PackedCase((30, 150), (600, 900), d=64, d_v=72, heads_q=2, heads_kv=1, rule={"window": (300, 0)}),
    PackedCase((20, 50), (700, 30), heads_q=1, heads_kv=1, d=64, spare=70, rule={"causal": True, "align": "top_left", "softcap": 6.0}),
]  # fmt: skip


def attend_packed(place, inputs, rule, seed: int = 3):  # noqa: F811
    return run(place, lambda: ffpa_varlen(*inputs, return_lse=True, **rule), seed)[0]


@pytest.mark.parametrize("chunks", [False, True], ids=["whole", "in-chunks"])
@pytest.mark.parametrize("case", PACKED_CASES, ids=[case.id for case in PACKED_CASES])
def test_packed_sequences(case, chunks, cut, monkeypatch):
    if chunks:
        monkeypatch.setattr(two_phase, "MOST_KEYS", two_phase.KEYS)
        plan_parts(monkeypatch, 2)
    inputs = make_packed_inputs(case, cut.device)
    check_packed(case, inputs, *attend_packed(cut, inputs, case.rule))


@pytest.mark.parametrize("rule", [{}, {"window": (400, 0)}], ids=str)
def test_neighbours_change_no_bit(rule, cut, emulated_gpu):
    """A sequence's result depends on the longest lengths that are allowed, not on how long those beside it are."""
    ours = make_packed_inputs(PackedCase((30,), (600,), heads_q=1, heads_kv=1, d=64), cut.device)
    results = []
    for lengths_q, lengths_k, at, blocks in (((30, 8), (600, 9), 0, 2), ((2, 30), (700, 600), 1, 5)):
        emulated_gpu(blocks)
        case = PackedCase(lengths_q, lengths_k, heads_q=1, heads_kv=1, d=64)
        tensors, of_q = among_neighbours(ours, case, at, (80, 2000), cut.device, seed=blocks)
        out, lse = attend_packed(cut, (*tensors, 40, 1000), rule, seed=blocks)
        results.append((out[of_q], lse[:, of_q]))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_bits_repeat(cut, emulated_gpu):
    """Bits repeat on any schedule, by any number of blocks."""
    case = Case(heads_q=2, heads_kv=1, n_q=200, n_k=800, d=72, d_v=264, rule={"causal": True})
    inputs, results = steep_inputs(case, cut.device, 6.0, False), []
    for seed, blocks in ((0, 2), (1, 5), (3, 1)) if cut.emulated else ((0, 2),) * 50:
        emulated_gpu(blocks)
        results.append(attend(cut, case, inputs, seed)[0])
    check(case, inputs, *results[0])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("size", [1e9, 1e30, -3e38])
def test_lse_of_large_scores(size, cut):
    """Parts agree on what a reference means, however large the scores are."""
    case = Case(heads_q=1, heads_kv=1, n_q=20, n_k=700, d=64)
    q, k, v, _ = make_inputs(case, cut.device)
    mask = torch.full((1, 1, 1, 700), size, device=q.device)
    out, lse = attend(cut, case, (q, k, v, mask))[0]
    torch.testing.assert_close(lse, torch.full_like(lse, size), rtol=1e-6, atol=0)
    torch.testing.assert_close(out.float(), v.float().mean(2, keepdim=True).expand_as(out), rtol=0, atol=0.02)


@pytest.mark.parametrize("dtype, size", large.SIZES, ids=str)
def test_large_scores_that_are_equal(dtype, size, cut):
    """The merge reads references as the kernel has made them, with slopes or without."""
    q, k, v, *want = large.tied(size, LARGE_D, dtype, 1)
    tensors = [x.to(cut.device) for x in (q, k, v)]
    large.expect(*(x.cpu() for x in run(cut, lambda: ffpa(*tensors, return_lse=True, scale=1.0))[0]), *want)


def test_offsets_that_fall(cut, monkeypatch):
    """Rows that no tile has get what rows without keys get, whatever lay in the memory of parts."""
    monkeypatch.setattr(memory_checks, "offsets_values", lambda *args: None)
    empty = attention_call._floats
    monkeypatch.setattr(attention_call, "_floats", lambda *of: empty(*of).fill_(torch.nan))
    lengths = (300, 5, 130, 40), (600, 300, 590, 20)
    inputs = list(make_packed_inputs(PackedCase(*lengths, heads_q=1, heads_kv=1, d=16), cut.device))
    inputs[3] = torch.tensor([200, 475, 90, 190, 10], dtype=torch.int32, device=inputs[0].device)
    out, lse = attend_packed(cut, inputs, {})
    assert torch.isfinite(out).all() and not lse.isnan().any()


@pytest.mark.parametrize("cap, blocks, chunk_keys", [(1_800_000, 4, 1024), (1_790_000, 2, 256), (1_300_000, 1, 512)])
def test_results_of_parts_count_as_workspace(cap, blocks, chunk_keys, cut, emulated_gpu, monkeypatch):
    """A smaller cap allows fewer keys at a time, and then fewer blocks, beside the results of parts."""
    emulated_gpu(4)
    plan_parts(monkeypatch, 2)
    monkeypatch.setattr(two_phase, "_columns", lambda d_v: max(COLUMNS))
    calls, cuts, make, cut_scratch = [], [], row_tiles.RowTilePlan._call, two_phase.cut
    monkeypatch.setattr(two_phase, "cut", lambda *args: cuts.append(cut_scratch(*args)) or cuts[-1])
    monkeypatch.setattr(
        two_phase.TwoPhasePlan, "_call", lambda plan, *args: calls.append(make(plan, *args[:-1], cap)) or calls[-1]
    )
    case = Case(heads_q=1, heads_kv=1, n_q=160, n_k=2000, d=16, d_v=520, rule={"causal": True})
    inputs = make_inputs(case, cut.device)
    (out, lse), report = attend(cut, case, inputs, seed=3)
    check(case, inputs, out, lse)
    (call,) = calls
    assert 4 * (call.scratch + call.partial) <= cap
    assert not cut.emulated or (report["blocks"], cuts[-1].chunk_keys) == (blocks, chunk_keys)


# ---- on a GPU ----


@pytest.mark.parametrize("place", ON_A_GPU, ids=str, indirect=True)
@pytest.mark.parametrize("d", [576, 1024])
def test_graph_replays_with_other_lengths(d, cut):
    case = PackedCase((30, 8, 1), (900, 5000, 64), heads_q=16, heads_kv=2, d=d)
    q, k, v, cu_q, cu_k, *_ = make_packed_inputs(case, cut.device)
    most = 64, 8000
    graph = torch.cuda.CUDAGraph()
    ffpa_varlen(q, k, v, cu_q, cu_k, *most, causal=True)
    with torch.cuda.graph(graph):
        got = ffpa_varlen(q, k, v, cu_q, cu_k, *most, causal=True)
    for of_q, of_k in (([0, 30, 38, 39], [0, 900, 5900, 5964]), ([0, 1, 2, 39], [0, 3000, 3001, 5964])):
        cu_q.copy_(torch.tensor(of_q)), cu_k.copy_(torch.tensor(of_k))
        graph.replay()
        assert torch.equal(got, ffpa_varlen(q, k, v, cu_q, cu_k, *most, causal=True))


@pytest.mark.parametrize("place", ON_A_GPU, ids=str, indirect=True)
@pytest.mark.parametrize("cap_mb", [8, 64, 1024])
@pytest.mark.parametrize("n_q, d", [(1, 1024), (100, 576), (256, 640)])
def test_planned_parts_within_a_cap(n_q, d, cap_mb, place, monkeypatch):  # noqa: F811
    """The parts are those that the estimate picks."""
    monkeypatch.undo()
    monkeypatch.setenv("FFPA_BACKEND", place.backend)
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap_mb))
    monkeypatch.setattr(two_phase, "why_slower", lambda *args: None)
    monkeypatch.setitem(two_phase.LEAST_HEAD_DIM, place.backend, 1)
    again.forget_all()
    case = Case(heads_q=8, heads_kv=2, n_q=n_q, n_k=9000, d=d, rule={"causal": True})
    q, k, v, _ = inputs = make_inputs(case, "cuda")
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, lse = ffpa(q, k, v, return_lse=True, causal=True)
    results = out.numel() * 2 + lse.numel() * 4
    assert torch.cuda.max_memory_allocated() - start <= results + (cap_mb << 20) + 4096
    check(case, inputs, out, lse)


# ---- the plan ----


def _plan(backend: str = "hopper", cap_mb: int = 1024, **changes):
    return two_phase.plan(PROBLEM._replace(**changes), backend, {**env.all_flags(), "FFPA_WORKSPACE_MB": cap_mb})


def test_what_is_cut():
    assert _plan().parts == Parts() == _plan(n_q=128, n_k=500).parts
    few = _plan(n_q=128, n_k=32768)
    assert few.parts.count > 1 and few.specs[1].family == "forward_merge" and few.microseconds > 1
    assert row_tiles.count(PROBLEM._replace(n_q=128)) * few.parts.count <= 132  # one wave
    of_window = _plan(n_q=128, n_k=32768, visibility=Visibility(4000, 0, False)).parts
    assert of_window.count > 1 and of_window.count * of_window.keys < 6000


@pytest.mark.parametrize("cap_mb", [1, 2, 8, 32, 200])
@pytest.mark.parametrize("backend, arch", [("hopper", "sm_90"), ("mma", "sm_80"), ("mma", "sm_86")])
def test_parts_and_scratch_fit_the_cap(cap_mb, backend, arch):
    """Half of the workspace holds the parts' results, the rest as many blocks as fit."""
    for n_q, n_k, d in ((1, 1 << 20, 1024), (64, 32768, 640), (200, 5000, 1152), (1000, 9000, 700)):
        p = PROBLEM._replace(n_q=n_q, n_k=n_k, d_qk=d, d_v=d, arch=arch)
        found = _plan(backend, cap_mb, **p._asdict())
        of_parts = 4 * n_q * p.heads_q * row_tiles.floats_of_row(found.parts, d) if found.parts.count > 1 else 0
        tiles = row_tiles.count(p, tile_heads=found.tile_heads) * found.parts.count
        blocks = archs.multiprocessors(arch)
        scratch = found.scratch(tiles, n_k, d, p.visibility, blocks, (cap_mb << 20) - of_parts)
        assert of_parts <= cap_mb << 19 and of_parts + scratch.scratch_bytes <= cap_mb << 20
        assert found.parts.count == 1 or scratch.chunk_keys <= found.parts.keys


@pytest.mark.parametrize("backend", ["hopper", "mma"])
def test_few_rows_run_where_they_are_estimated_to_be_faster(backend, monkeypatch):
    problem = PROBLEM._replace(n_q=128, n_k=32768, d_qk=1024, d_v=1024)
    found = planned(backend, monkeypatch, problem)
    assert found.kernel.startswith("forward_") and "two_phase" in found.kernel and found.parts.count > 1
    assert found.microseconds <= 1.01 * levels.plan(problem, env.all_flags()).microseconds
    decoding = problem._replace(n_q=1, batch=8)
    slower = planned(backend, monkeypatch, decoding)
    if backend == "hopper":
        assert "two_phase_bf16_columns384 is estimated to take" in slower and "forward_mma_split" in slower
    else:
        assert isinstance(slower, levels.LevelPlan)


def test_what_shares_tiles():
    for changes, tile_heads in (({"n_q": 1}, 4), ({"n_q": 129}, 4), ({"n_q": 128}, 1), ({"n_q": 64, "heads_q": 48}, 2)):
        assert _plan(**changes).tile_heads == tile_heads, changes


@pytest.mark.parametrize("backend", ["hopper", "mma"])
def test_few_rows_in_a_small_workspace_are_the_levels(backend, monkeypatch):
    problem = PROBLEM._replace(n_q=128, n_k=32768, d_qk=1024, d_v=1024)
    assert not isinstance(planned(backend, monkeypatch, problem, FFPA_WORKSPACE_MB=16), two_phase.TwoPhasePlan)
