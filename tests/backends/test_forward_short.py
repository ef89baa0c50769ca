"""Tests the forward whose keys fit one tile: shipped kernels, in the emulator and on a GPU."""

from contextlib import nullcontext

import pytest
import test_large_scores as large
import torch
from cases import CASES as CASES_OF_ALL
from cases import PACKED_CASES as PACKED_CASES_OF_ALL
from cases import Case, PackedCase, attending, make_inputs, make_packed_inputs
from ffpa_attn import ffpa, ffpa_varlen
from ffpa_attn.backends.choice import choose
from ffpa_attn.env import run_flags
from ffpa_attn.launching import native
from ffpa_attn.operators import ops
from ffpa_attn.specs.problem import Problem, Visibility
from ffpa_attn.specs.spec import SHORT_COLUMNS, ForwardMmaShort
from ffpa_attn.testing import emulate
from test_mma import check
from test_two_phase import check_packed

TILE = ForwardMmaShort.tile
SHIPPED = {ForwardMmaShort(dtype, columns).name for dtype in ("f16", "bf16") for columns in SHORT_COLUMNS}


@pytest.fixture(params=["emulated", "cuda"])
def device(request, monkeypatch):
    if request.param == "cuda" and (not torch.cuda.is_available() or native.record() is None):
        pytest.skip("needs a GPU, and kernels for it")
    monkeypatch.setenv("FFPA_BACKEND", "mma")
    monkeypatch.setattr(ops, "_plans", {})
    return "cpu" if request.param == "emulated" else "cuda"


def run(device: str, function, seed: int = 0):
    """Returns what `function` gives, from one kernel for short sequences."""
    with emulate("sm_80", seed=seed) if device == "cpu" else nullcontext() as reports:
        result = function()
    if reports is None:
        torch.cuda.synchronize()
    else:
        (report,) = attending(reports)
        assert report["kernel"] in SHIPPED and report["bank_conflict_ratio"] < 1.2
    return result


def attend(device: str, case: Case, inputs, seed: int = 0, **options):
    q, k, v, mask = inputs
    return run(
        device,
        lambda: ffpa(q, k, v, return_lse=True, mask=mask, layout=case.layout, **case.options(device), **options),
        seed,
    )


def packs_heads(case) -> bool:
    return case.n_q == 1 and case.heads_q > case.heads_kv


CASES = [
    case for case in CASES_OF_ALL if case.n_k <= TILE and case.batch * case.n_q * case.n_k and not packs_heads(case)
]
CASES += [
    # row tiles that end amid a warp, columns that end amid a step, and a tile of keys that is whole or almost so
    *[Case(heads_q=4, heads_kv=2, n_q=70, n_k=n_k, d=d, d_v=d_v) for n_k, d, d_v in ((64, 72, 136), (63, 136, 8), (1, 8, 264))],
    # rows that see all keys, some, or none, in several row tiles
    *[Case(n_q=200, n_k=60, d=d, rule={"causal": True}) for d in (64, 200)],
    *[Case(n_q=90, n_k=64, d=d, rule={"causal": True, "align": "top_left", "window": (9, -1)}) for d in (40, 128)],
    # all that happens to scores
    *[Case(n_q=70, n_k=50, d=72, dtype=torch.float16, mask=mask) for mask in ("bool-some-rows-empty", "additive", "additive-f32")],
    *[Case(n_q=70, n_k=50, d=72, mask=mask, rule={"softcap": 3.0, "causal": True}) for mask in (None, "additive-some-rows-empty")],
    *[Case(n_q=30, n_k=50, d=72, rule={"scale": scale}) for scale in (0.0, -0.4)],
]  # fmt: skip
PACKED = [
    case
    for case in PACKED_CASES_OF_ALL
    if case.lengths_k and 0 < max(case.lengths_k) <= TILE and max(case.lengths_q) > 0
]
PACKED += [PackedCase((100, 0, 3, 64), (64, 5, 0, 33), d=d, rule={"causal": True}) for d in (64, 136)]


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_cases(case, device):
    inputs = make_inputs(case, device)
    out, lse = attend(device, case, inputs, seed=len(case.id) % 3)
    check(case, inputs, out, lse)


@pytest.mark.parametrize("case", PACKED, ids=[case.id for case in PACKED])
def test_packed_sequences(case, device):
    inputs = make_packed_inputs(case, device)
    out, lse = run(device, lambda: ffpa_varlen(*inputs, return_lse=True, **case.options(device)))
    check_packed(case, inputs, out, lse)


@pytest.mark.parametrize("d", [64, 200])
def test_bits_repeat(d, device):
    """Bits depend on no schedule of the emulator, and on no mood of a GPU."""
    case = Case(heads_q=4, heads_kv=2, n_q=130, n_k=60, d=d, rule={"causal": True})
    inputs = make_inputs(case, device)
    first = attend(device, case, inputs)
    for seed in range(1, 4 if device == "cpu" else 200):
        again = attend(device, case, inputs, seed=seed)
        assert all(map(torch.equal, first, again)), seed


@pytest.mark.parametrize("align, seen", [("top_left", slice(0, 35)), ("bottom_right", slice(25, 60))])
def test_keys_that_no_row_sees_are_not_read(align, seen, device):
    """The first rows see the first keys, the last rows the last ones; the others may hold anything."""
    case = Case(heads_q=1, heads_kv=1, n_q=30, n_k=60, d=72, rule={"window": (5, 5), "align": align})
    q, k, v, _ = make_inputs(case, device)
    unseen = torch.ones(60, dtype=torch.bool, device=k.device)
    unseen[seen] = False
    k[:, :, unseen], v[:, :, unseen] = torch.nan, torch.inf
    out, lse = attend(device, case, (q, k, v, None))
    k[:, :, unseen] = v[:, :, unseen] = 0
    check(case, (q, k, v, None), out, lse)


@pytest.fixture
def attend_fused(device, monkeypatch):
    """Does what test_large_scores.attend does, with so few keys that this forward runs."""
    monkeypatch.setattr(large, "N_K", 60)
    if device == "cpu":
        monkeypatch.setenv("ENABLE_FFPA_DEBUG", "1")  # few kernels to compile

    def run(function, *args, **options):
        args, options = (
            [x.to(device) for x in args],
            {name: getattr(x, "to", lambda _, x=x: x)(device) for name, x in options.items()},
        )
        with emulate("sm_80", fused=True) if device == "cpu" else nullcontext() as reports:
            results = [x.cpu() for x in function(*args, **options)]
        assert reports is None or {report["kernel"] for report in reports} <= SHIPPED
        return results

    run.backend, run.name = "mma", "mma fused"
    return run


@pytest.mark.parametrize("dtype, size", large.SIZES, ids=str)
def test_equal_scores(dtype, size, attend_fused):
    large.test_equal_scores(dtype, size, 1, attend_fused)
    large.test_equal_scores(dtype, size, -1, attend_fused)


def test_equal_scores_whose_logits_a_float_does_not_hold(attend_fused):
    large.test_equal_scores_whose_logits_a_float_does_not_hold(attend_fused)


def test_minus_infinity_in_a_mask_hides_nan(attend_fused):
    large.test_minus_infinity_in_a_mask_hides_nan(attend_fused)


def test_nan_stays_in_its_row(device):
    case = Case(heads_q=1, heads_kv=1, n_q=64, n_k=64, d=72)
    q, k, v, _ = make_inputs(case, device)
    want, _ = attend(device, case, (q, k, v, None))
    q[:, :, 17, 3] = torch.nan
    out, lse = attend(device, case, (q, k, v, None))
    others = torch.arange(64, device=q.device) != 17
    assert out[:, :, 17].isnan().all() and lse[:, :, 17].isnan().all()
    assert torch.equal(out[:, :, others], want[:, :, others])


def problem(**changes) -> Problem:
    of_many = Problem(
        "forward", "cuda", "sm_90", "bf16", 64, 16, 16, 64, 64, 64, 64, None, Visibility(-1, -1, False), 0.1, 0.0, None, False, None, "f32", None
    )  # fmt: skip
    return of_many._replace(**changes)


@pytest.mark.parametrize(
    "changes, short",
    [
        ({}, True),
        ({"d_qk": 512, "d_v": 512}, True),
        ({"n_k": TILE + 1}, False),
        ({"n_q": 4096}, True),
        ({"n_q": 4096, "d_qk": 128, "d_v": 128}, False),  # PyTorch's kernels read few keys faster
        ({"n_q": 1, "heads_kv": 4}, False),  # levels pack the heads of a group
        ({"level": 1}, False),
        ({"acc": "f16", "dtype": "f16"}, False),
        ({"num_stages": 2}, False),
    ],
)
def test_choice(changes, short, monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda spec, gpu: None)
    kernel = choose(problem(**changes), run_flags()).kernel
    assert (kernel in SHIPPED) == short, kernel


def test_levels_where_the_kernel_cannot_be_had(monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda spec, gpu: "it is left out" if "short" in spec.name else None)
    assert choose(problem(arch="sm_80"), run_flags()).kernel.startswith("forward_mma_rows")
    assert choose(problem(), run_flags()).kernel == "sdpa"


def test_one_key_more_goes_elsewhere(device):
    case = Case(n_q=TILE, n_k=TILE + 1)
    inputs = make_inputs(case, device)
    with emulate("sm_80") if device == "cpu" else nullcontext() as reports:
        out, lse = ffpa(*inputs[:3], return_lse=True)
    check(case, inputs, out, lse)
    assert reports is None or reports[0]["kernel"] not in SHIPPED
