"""Tests what is special about the backward on mma.sync, in the emulator; test_backward.py has what it computes."""

import ffpa_attn
import pytest
import test_numerics
import torch
from cases import Case, make_inputs
from ffpa_attn import env
from ffpa_attn.backends import backward
from ffpa_attn.operators import ops
from ffpa_attn.specs.problem import Problem, Visibility
from ffpa_attn.specs.spec import MMA_PRODUCT_TILES
from ffpa_attn.testing import emulate

# This has several row tiles of two heads that share K and V, more tiles than emulated blocks, and ends amid tiles.
LONGER = Case(heads_q=2, heads_kv=1, n_q=300, n_k=520, rule={"causal": True})


def gradients(case: Case, arch: str = "sm_80", seed: int = 0, exact: bool = False):
    """Returns dQ, dK, dV and the reports of the emulator."""
    q, k, v, mask = make_inputs(case, "cpu")
    out, lse = ffpa_attn.ffpa(q, k, v, mask=mask, return_lse=True, **case.rule)
    with env.overridden("FFPA_BACKEND", "mma"), emulate(arch, seed=seed, exact=exact) as reports:
        grads = torch.ops.ffpa_attn.backward(
            test_numerics.random_like(out, 7), None, q, k, v, out, lse, mask, **case.rule
        )
    return grads[:3], reports


@pytest.mark.parametrize("tile", MMA_PRODUCT_TILES)
def test_shared_memory_without_bank_conflicts(tile, monkeypatch):
    *kernels, _ = backward._FAMILIES["mma"]
    monkeypatch.setitem(backward._FAMILIES, "mma", (*kernels, (tile,)))
    monkeypatch.setattr(ops, "_plans", {})
    _, reports = gradients(LONGER.with_(d=264, d_v=136))
    names = [report["kernel"].removesuffix("_of_q") for report in reports]
    assert [name.endswith(f"_columns{tile.columns}") for name in names] == [False, False, True, True]
    assert [report["bank_conflict_ratio"] for report in reports] == [1.0] * 4


@pytest.mark.parametrize("d", [24, 264])
def test_products_are_computed_for_visible_pairs_alone(d):
    """Products are of whole tiles, in steps of 32 columns."""
    _, (_, scores, *_) = gradients(LONGER.with_(d=d, n_q=512, n_k=512, rule={"causal": True}))
    tiles = 2 * (1 + 1 + 2 + 2)  # tiles of 128 x 256, in two heads
    assert scores["mma"] == tiles * 2 * -(-d // 32) * (128 // 16) * (256 // 8) * 2


def test_bits_do_not_depend_on_the_schedule():
    case = LONGER.with_(n_k=300, d=96, d_v=136, dtype=torch.float16, mask="bool-some-rows-empty")
    first, _ = gradients(case)
    for seed in (1, 2, 3):
        assert all(map(torch.equal, first, gradients(case, seed=seed)[0])), seed


def test_sums_as_the_tensor_cores_form_them():
    case = LONGER.with_(d=136, rule={"softcap": 5.0})
    plain, exact = gradients(case)[0], gradients(case, exact=True)[0]
    assert not all(map(torch.equal, plain, exact))
    for x, y in zip(plain, exact, strict=True):
        assert (x - y).abs().max() <= 2**-7 * x.abs().max()


def test_runs_on_a_hopper_gpu_too():
    case = LONGER.with_(n_k=300)
    assert all(map(torch.equal, gradients(case, "sm_80")[0], gradients(case, "sm_90a")[0]))


@pytest.mark.parametrize("d, columns", [(64, 128), (136, 192), (256, 256), (320, 192), (512, 256), (1024, 256)])
def test_tiles_fit_head_dims(d, columns):
    see = Visibility(-1, -1, False)
    problem = Problem(
        "backward", "cuda", "sm_80", "bf16", 1, 32, 32, 8192, 8192, d, d, None, see, 0.1, 0.0, None, True, None, "f32", None
    )  # fmt: skip
    plan = backward.plan(problem, "mma", 1 << 30)
    assert plan.of_q.columns == plan.of_k.columns == columns
