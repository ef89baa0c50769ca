"""Persistent forwards count row tiles of packed sequences by the rows there are, whatever the longest may be."""

from itertools import pairwise
from typing import NamedTuple

import compare
import oracle
import pytest
import torch
from cases import PackedCase, attending, make_packed_inputs, poisoned
from ffpa_attn import ffpa_varlen
from ffpa_attn.backends import fused, row_tiles, two_phase
from ffpa_attn.checks import memory_checks
from ffpa_attn.launching import emulated, native
from ffpa_attn.specs import archs
from ffpa_attn.specs.spec import FUSED_COLUMNS, PAIR_COLUMNS, TWO_PHASE_COLUMNS, ForwardClearRows, ForwardWgmmaPair
from ffpa_attn.testing import emulate
from test_fused import PROBLEM, plan_tiles


class Forward(NamedTuple):
    family: str
    backend: str
    arch: str
    d: int  # head dim of the family's narrowest instance
    blocks: int = 1  # blocks that take a row tile together


FORWARDS = [
    Forward("forward_wgmma_fused", "hopper", "sm_90a", FUSED_COLUMNS[0][0]),
    Forward("forward_wgmma_pair", "hopper", "sm_90a", PAIR_COLUMNS[0], blocks=2),
    Forward("forward_wgmma_two_phase", "hopper", "sm_90a", 64),
    Forward("forward_mma_two_phase", "mma", "sm_80", 64),
]
FUSED = pytest.mark.parametrize("forward", FORWARDS[:1], ids=["forward_wgmma_fused"], indirect=True)


def with_all(cases: dict, few: tuple):
    """Runs every case with the fastest forward; a few with the others, which share what finds a row tile."""
    pairs = [(forward, name) for forward in FORWARDS for name in cases if forward == FORWARDS[0] or name in few]
    return pytest.mark.parametrize(
        "forward, case",
        [(forward, cases[name]) for forward, name in pairs],
        ids=[f"{forward.family}-{name}" for forward, name in pairs],
        indirect=["forward"],
    )


@pytest.fixture(params=["emulated", "cuda"])
def device(request):
    if request.param == "cuda" and (not torch.cuda.is_available() or native.record() is None):
        pytest.skip("needs a GPU, and kernels for it")
    return "cpu" if request.param == "emulated" else "cuda"


@pytest.fixture
def forward(request, device, monkeypatch, no_short_forward):
    """Makes a forward run for certain, on any offsets."""
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        if why_not := archs.why_not_on(request.param.arch, f"sm_{major}{minor}"):
            pytest.skip(why_not)
    monkeypatch.setenv("FFPA_BACKEND", request.param.backend)
    plan_tiles(monkeypatch, shared=False, count=1)
    monkeypatch.setattr(two_phase, "why_slower", lambda *args: None)
    monkeypatch.setattr(memory_checks, "offsets_values", lambda *args: None)
    if "two_phase" in request.param.family:
        monkeypatch.setitem(two_phase.LEAST_HEAD_DIM, request.param.backend, 1)
        monkeypatch.setattr(fused, "is_faster_than_two_phases", lambda p: False)
        monkeypatch.setattr(two_phase, "_columns", lambda d_v: TWO_PHASE_COLUMNS[-1])  # a debug build has one width
    return request.param


class Ran(NamedTuple):
    items: int  # items that blocks have taken
    products: int  # fragments of products


def attend(forward: Forward, inputs, monkeypatch, **rule) -> tuple[torch.Tensor, torch.Tensor, Ran | None]:
    """Returns (out, lse, what the emulator says of it)."""
    if inputs[0].is_cuda:
        return *ffpa_varlen(*inputs, return_lse=True, **rule), None
    launch, taken = emulated.launch, []

    def run(spec, params, memory):
        launch(spec, params, memory)
        if spec != ForwardClearRows():
            scratch, _ = memory[-1]
            taken.append(int(scratch.view(torch.int32)[0]))  # the counter at the head of the scratch

    with monkeypatch.context() as patch, emulate(forward.arch, seed=3) as reports:
        patch.setattr(emulated, "launch", run)
        out, lse = ffpa_varlen(*inputs, return_lse=True, **rule)
    (report,) = attending(reports)
    assert report["kernel"].startswith(f"{forward.family}_bf16")
    # Each block begins with the item of its own number, and asks once more than there are items for it: as often as items.
    return out, lse, Ran(taken[0], report["mma"])


def ranges(offsets: torch.Tensor, total: int, longest: int) -> list[slice]:
    """Returns what offsets mean, whatever they are."""
    clamped = [min(max(x, 0), total) for x in offsets.tolist()]
    return [slice(a, a + min(max(b - a, 0), longest)) for a, b in pairwise(clamped)]


def check(inputs, out, lse, **rule) -> list[slice]:
    """Checks that rows of sequences are the oracle's, the others 0 and -inf; returns the rows of each sequence."""
    q, k, v, cu_q, cu_k, longest_q, longest_k = inputs
    rest = torch.ones(len(q), dtype=torch.bool, device=q.device)
    of_all = ranges(cu_q, len(q), longest_q)
    for i, (of_q, of_k) in enumerate(zip(of_all, ranges(cu_k, len(k), longest_k), strict=True)):
        if of_q.start == of_q.stop:
            continue
        rest[of_q] = False
        dense = [x[rows].transpose(0, 1).unsqueeze(0) for x, rows in ((q, of_q), (k, of_k), (v, of_k))]
        want, want_lse = oracle.attention(*dense, **rule)
        base, _ = compare.baseline(*dense, **rule)
        compare.assert_close(f"out {i}", out[of_q].transpose(0, 1), want[0], base[0])
        compare.assert_lse_close(f"lse {i}", lse[:, of_q], want_lse[0], *dense[:2], None)
    assert not out[rest].any() and torch.isneginf(lse[:, rest]).all()
    return of_all


def packed(q_lengths, heads: int = 1, d: int = 64, keys: int = 9, **options) -> PackedCase:
    """Returns a case of sequences with few keys each."""
    k_lengths = tuple((7 * i + 3) % keys + 1 for i in range(len(q_lengths)))
    return PackedCase(tuple(q_lengths), k_lengths, heads_q=heads, heads_kv=1, d=d, **options)


def some(count: int, of: dict[int, int]) -> list[int]:
    """Returns so many lengths, of which a few have rows."""
    return [of.get(i, 0) for i in range(count)]


LENGTHS = {
    "many short ones beside a long one": [3, 1, 2, 300, 5, 1],
    "none at both ends and in the middle": [0, 0, 4, 0, 0, 130, 0, 7, 0, 0],
    "whole tiles": [128, 256, 1, 127, 0, 128],
    "a single one": [129],
    "as many as a warp has lanes": some(32, {0: 1, 1: 2, 30: 130, 31: 1}),
    "one more": some(33, {0: 1, 1: 2, 2: 1, 30: 1, 31: 3, 32: 130}),
    "two rounds of a search": some(100, {1: 2, 3: 1, 4: 1, 5: 130, 7: 1, 95: 1, 96: 2}),
}


@with_all(LENGTHS, few=("two rounds of a search",))
def test_each_row_is_computed_once(case, forward, device, monkeypatch):
    """Blocks take as many items as planned, however long the longest sequence may be."""
    heads = 2 if forward == FORWARDS[0] else 1
    inputs = list(make_packed_inputs(packed(case, heads, forward.d), device))
    inputs[5:] = 1 << 20, 1 << 20
    out, lse, ran = attend(forward, inputs, monkeypatch)
    check(inputs, out, lse)
    if ran is None:
        return
    assert ran.items == heads * (sum(case) // row_tiles.ROWS + len(case))
    alone = make_packed_inputs(packed([1], 1, forward.d), device)
    once = attend(forward, alone, monkeypatch)[2].products
    # A warpgroup without rows multiplies nothing.
    rows = row_tiles.ROWS // 2 if forward.backend == "hopper" else row_tiles.ROWS
    assert ran.products == once * heads * sum(-(-length // rows) for length in case)


@FUSED
def test_three_rounds_of_a_search(forward, device, monkeypatch):
    lengths = some(1030, {0: 2, 32: 1, 33: 1, 34: 1, 65: 1, 66: 130, 1022: 1, 1023: 2, 1024: 1, 1029: 3})
    inputs = make_packed_inputs(packed(lengths), device)
    out, lse, _ = attend(forward, inputs, monkeypatch)
    check(inputs, out, lse)


@FUSED
def test_a_search_among_sequences_that_all_have_rows(forward, device, monkeypatch):
    inputs = make_packed_inputs(packed([1 + i % 3 for i in range(40)]), device)
    out, lse, _ = attend(forward, inputs, monkeypatch, causal=True)
    check(inputs, out, lse, causal=True)


OFFSETS = {
    "rows of no sequence at both ends": ([150, 153, 153, 283, 285], 500, 1 << 20),
    "all beyond the tensor": ([-700, -300, 140, 290, 900, 901], 300, 1 << 20),
    "longer than the longest": ([0, 300, 301, 480, 485], 500, 140),
    "longer than the longest, which is nothing": ([0, 300, 300, 310], 310, 0),
}


@with_all(OFFSETS, few=("rows of no sequence at both ends",))
def test_rows_that_do_not_count(case, forward, device, monkeypatch):
    offsets, total, longest = case
    generator = torch.Generator().manual_seed(1)
    q, k, v = (poisoned((rows, 1, forward.d), torch.bfloat16, device, generator) for rows in (total, 50, 50))
    cu_q, cu_k = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (offsets, [3 + 8 * i for i in range(len(offsets))])
    )
    inputs = (q, k, v, cu_q, cu_k, longest, 1 << 20)
    out, lse = attend(forward, inputs, monkeypatch)[:2] if longest else ffpa_varlen(*inputs, return_lse=True)
    check(inputs, out, lse)


@FUSED
def test_no_sequences(forward, device):
    """There are no sequences, whatever the longest of them may be."""
    q = torch.randn(300, 1, forward.d, device=device).to(torch.bfloat16)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    out, lse = ffpa_varlen(q, q, q, none, none, 9, 9, return_lse=True)
    assert not out.any() and torch.isneginf(lse).all()


@FUSED
def test_offsets_that_fall_reach_nothing_else(forward, device, monkeypatch):
    """Which rows are computed then is open; the emulator fails where they are not of this tensor, or of two tiles."""
    inputs = list(make_packed_inputs(packed([300, 5, 130, 40]), device))
    inputs[3] = torch.tensor([200, 475, 90, 190, 10], dtype=torch.int32, device=device)
    attend(forward, inputs, monkeypatch)


# ---- the plan ----


def test_a_packed_call_needs_what_clears_rows():
    """It is made ready, or found missing, with the plan's own kernels."""
    packed = PROBLEM._replace(packed=(1024, 1024))
    plan = row_tiles.RowTilePlan(ForwardWgmmaPair("bf16", PAIR_COLUMNS[0]))
    assert native.needed(plan, PROBLEM) == plan.specs
    assert native.needed(plan, packed) == (*plan.specs, ForwardClearRows())
    assert native.needed(plan, packed._replace(direction="backward")) == plan.specs


def test_counts():
    """Dense problems have all tiles; packed ones, as many as the rows may have, not as the longest would."""
    assert row_tiles.count(PROBLEM._replace(n_q=129, batch=3)) == 2 * 3 * 32
    short = PROBLEM._replace(batch=256, heads_q=8, n_q=32768, n_k=32768, packed=(256 * 128, 256 * 128))
    assert row_tiles.count(short) == 8 * 512
    assert row_tiles.count(short._replace(n_q=200)) == 8 * 512
    assert row_tiles.count(short._replace(packed=(256 * 128 - 1, 9))) == 8 * 511


def test_a_longest_that_may_be_far_longer_keeps_no_gpu_busy():
    few = PROBLEM._replace(batch=4, packed=(1024 - 128, 1024), heads_q=8)
    assert "88 row tiles keep 88 of 132" in row_tiles.why_slower(few)
    assert row_tiles.why_slower(few, ForwardWgmmaPair.blocks) is None
    assert row_tiles.why_slower(few._replace(packed=(2048, 1024))) is None
