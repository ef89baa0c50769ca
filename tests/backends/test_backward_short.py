"""Tests the backward whose keys fit one tile, in the emulator and on a GPU; test_backward.py has what it shares with others."""

import compare
import ffpa_attn
import oracle
import pytest
import test_backward
import test_numerics
import torch
from cases import CASES, PACKED_CASES, Case, PackedCase, make_inputs
from ffpa_attn.backends import backward_short
from ffpa_attn.backends.backward_short import ShortPlan
from ffpa_attn.operators import ops
from ffpa_attn.specs.problem import Problem, Visibility

forced = test_backward.forced

PROBLEM = Problem(
    "backward", "cuda", "sm_90", "bf16", 2, 4, 4, 64, 64, 64, 64, None, Visibility(-1, -1, False), 0.1, 0.0, None, True, None, "f32", None
)  # fmt: skip
# It has two heads of two row tiles each, which share K and V, and ends amid tiles.
TWO_TILES = Case(heads_q=2, heads_kv=1, n_q=70, n_k=60, d=136, d_v=72, rule={"causal": True})


def is_short(group: int, n_q: int, n_k: int, batch: int = 1, d: int = 64) -> bool:
    problem = PROBLEM._replace(batch=batch, heads_q=4 * group, n_q=n_q, n_k=n_k, d_qk=d, d_v=d)
    return isinstance(backward_short.plan(problem), ShortPlan)


SHORT = [case for case in CASES if is_short(case.heads_q // case.heads_kv, case.n_q, case.n_k, case.batch, case.d)]
SHORT_PACKED = [
    case
    for case in PACKED_CASES
    if case.lengths_q and is_short(case.heads_q // case.heads_kv, max(case.lengths_q), max(case.lengths_k))
]


MORE = [TWO_TILES, TWO_TILES.with_(n_q=128, n_k=128, mask="additive"), TWO_TILES.with_(heads_q=12, n_q=9, d=24)]


@test_numerics.by_id([*SHORT, *MORE])
def test_gradients(case, device, forced):
    reports = forced("short", device, seed=len(case.id) % 3)
    test_numerics.test_gradients(case, device)
    if device == "cpu":
        (report,) = reports  # one launch
        assert report["kernel"].startswith("backward_mma_short") and report["bank_conflict_ratio"] < 1.2


@test_numerics.by_id([*SHORT_PACKED, PackedCase((128, 3, 0, 70), (100, 0, 5, 128), d=72, rule={"causal": True})])
def test_packed(case, device, forced, monkeypatch):
    forced("short", device)
    test_numerics.test_packed(case, device, "read", monkeypatch)


@pytest.mark.parametrize("n", [64, 128])
def test_bits_do_not_depend_on_the_schedule(n, device, forced):
    case = TWO_TILES.with_(n_q=n, n_k=n, dtype=torch.float16, mask="bool-some-rows-empty")
    firsts = None
    for seed in (0, 1, 2, 3):
        forced("short", device, seed)
        gradients = test_backward.gradients_of(case, device)
        firsts = firsts or gradients
        assert all(map(torch.equal, firsts, gradients)), seed


def test_row_tiles_add_up(device, forced):
    """Heads that share K and V give the sums of what each gives alone, and dV of one row tile is dV of many."""
    forced("short", device)
    q, k, v, _ = make_inputs(Case(heads_q=2, heads_kv=1, n_q=60, n_k=64, d=72), device)
    out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True)
    g = test_numerics.random_like(out, 7)

    def run(head):
        return torch.ops.ffpa_attn.backward(
            g[:, head], None, q[:, head], k, v, out[:, head], lse[:, head], fp32_grads=True
        )

    whole, parts = run(slice(0, 2)), [run(slice(i, i + 1)) for i in range(2)]
    assert torch.equal(whole[0], torch.cat([part[0] for part in parts], 1))
    for i in (1, 2):
        torch.testing.assert_close(parts[0][i] + parts[1][i], whole[i], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("n_k", [40, 64, 128])
@pytest.mark.parametrize("share", [0.5, 1e-3])
def test_keys_that_are_elsewhere(n_k, share, device, forced):
    """The LSE of some rows covers keys of another part, as in a ring: parts give what all keys give together."""
    case = Case(heads_q=2, heads_kv=2, n_q=70, n_k=2 * n_k, d=72, d_v=40)
    q, k, v, _ = make_inputs(case, device)
    k = k.clone()
    k[:, :, n_k:] -= float(torch.tensor(1 / share - 1).log()) * 72**0.5 * q.mean(2, keepdim=True).sign() / 72
    x = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    bases = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    g = test_numerics.random_like(torch.empty(1, 2, 70, 40), 5).to(q)
    want = torch.autograd.grad(oracle.attention(*x)[0], x, g.double())
    base = torch.autograd.grad(compare.baseline(*bases)[0], bases, g)
    out, lse = (t.to(device) for t in oracle.attention(q, k, v))
    forced("short", device)
    parts = [
        torch.ops.ffpa_attn.backward(g, None, q, k[:, :, of], v[:, :, of], out.to(q), lse.float(), fp32_grads=True)
        for of in (slice(0, n_k), slice(n_k, 2 * n_k))
    ]
    compare.assert_close("dq", parts[0][0] + parts[1][0], want[0], base[0])
    for i, name in ((1, "dk"), (2, "dv")):
        compare.assert_close(name, torch.cat([part[i] for part in parts], 2), want[i], base[i])


def test_rows_that_hold_nan_keep_to_themselves(device, forced):
    """dO·O of a row comes from a product of many rows; neither O nor LSE of another one is in it."""
    forced("short", device)
    q, k, v, _ = make_inputs(Case(heads_q=1, heads_kv=1, n_q=30, n_k=40, d=72), device)
    q, k, v = (x.clone() for x in (q, k, v))
    out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True)
    g, dead = test_numerics.random_like(out, 7), torch.zeros_like(lse, dtype=torch.bool)
    dead[..., [3, 9, 29]] = True
    for infinite in (-torch.inf, torch.inf):
        lse = lse.masked_fill(dead, infinite)
        clean = torch.ops.ffpa_attn.backward(g, None, q, k, v, out, lse)[:3]
        bad = [x.masked_fill(dead[..., None], torch.nan) for x in (g, q, out)]
        dirty = torch.ops.ffpa_attn.backward(bad[0], None, bad[1], k, v, bad[2], lse)[:3]
        assert all(map(torch.equal, clean, dirty)) and not dirty[0][dead].any()


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"n_q": 0}, "there are no pairs"),
        ({"n_k": 129}, "129 keys do not fit one tile"),
        ({"heads_q": 64, "n_q": 65}, "P and dS of 16 x 65 rows and 64 keys leave too little"),
        ({"n_k": 128, "arch": "sm_86"}, "leave too little"),
        ({"d_v": 1 << 16}, "65536 columns"),
        ({"batch": 1 << 30}, "4294967296 key/value heads are too many"),
    ],
    ids=str,
)
def test_what_is_not_short(changes, why):
    assert why in backward_short.plan(PROBLEM._replace(**changes))


@pytest.mark.parametrize(
    "changes, tile, stages",
    [
        ({}, 64, 3),
        ({"n_q": 500}, 64, 3),
        ({"n_k": 65}, 128, 4),
        ({"n_k": 65, "arch": "sm_80"}, 128, 3),
        ({"n_k": 65, "n_q": 129}, 128, 3),
        ({"arch": "sm_86", "heads_q": 8}, 64, 3),
        ({"heads_q": 48}, 64, 2),
        ({"heads_q": 44, "d_qk": 512, "d_v": 512}, 64, 2),
    ],
    ids=str,
)
def test_tiles(changes, tile, stages):
    plan = backward_short.plan(PROBLEM._replace(**changes))
    assert (plan.spec.tile, plan.stages) == (tile, stages) and plan.workspace_bytes == 0


@pytest.mark.parametrize("n_q, n_k, slower", [(129, 64, True), (128, 64, False), (256, 65, False), (257, 65, True)])
def test_many_row_tiles_in_a_block(n_q, n_k, slower):
    assert bool(backward_short.why_slower(PROBLEM._replace(n_q=n_q, n_k=n_k))) == slower


def test_nothing_grows_with_batch_and_heads(device, forced):
    """One launch, and no memory but the gradients, for any number of heads."""
    reports = forced("short", device)
    case = Case(batch=3, heads_q=4, heads_kv=2, n_q=20, n_k=30, d=24)
    dq, dk, dv = test_backward.gradients_of(case, device)
    assert len(reports) == (device == "cpu")
    assert [x.shape for x in (dq, dk, dv)] == [(3, 4, 20, 24), (3, 2, 30, 24), (3, 2, 30, 24)]
    assert next(reversed(ops._plans.values())).choice.plan.workspace_bytes == 0
