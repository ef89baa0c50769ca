"""Tests what the campaign knows of sinks and the largest logits: their truth, its bounds, and that it finds mistakes."""

import contextlib
import math

import campaign
import campaign_check
import campaign_stress
import campaign_tensors as tensors
import campaign_truth as truth
import compare
import oracle
import pytest
import torch
from campaign_draw import generate
from campaign_problems import FP8, Layout, Mask, Problem, Sinks
from campaign_shrink import as_test, shrink
from ffpa_attn.backends.reference_heads import Heads
from ffpa_attn.operators import dispatch_keys, ops


@pytest.fixture(autouse=True)
def new_plans(monkeypatch):
    monkeypatch.setattr(ops, "_plans", {})


# ---- bounds ----


def as_kernels_do(q, k, v, grad, grad_lse, sinks, **see):
    """Returns (out, LSE, dsinks) of one head: 16-bit P below 1 meets V, delta is of the rounded output."""
    scores = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).masked_fill(
        ~oracle.visible(q.shape[2], k.shape[2], **see), -math.inf
    )
    top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    below_1 = torch.exp(scores - top)
    total = below_1.sum(-1, keepdim=True) + torch.exp(sinks - top)
    out = (below_1.to(q.dtype).float() @ v.float() / total).to(q.dtype)
    lse = top + total.log()
    delta = (grad.float() * out.float()).sum(-1, keepdim=True) - grad_lse[..., None]
    return out, lse[..., 0], -(torch.exp(sinks - lse).clamp_max(1.0) * delta).sum().reshape(1)


def one_head(seed: int, rows: int, dtype, size: float = 1.0):
    q, k, v, grad = (tensors.normal((1, 1, rows, 64), 9 * seed + i, "cpu") for i in range(4))
    q, k = q * size, k * size
    return [x.to(dtype) for x in (q, k, v, grad)], tensors.normal((1, 1, rows), 9 * seed + 5, "cpu")


@pytest.mark.parametrize("see", [{}, {"causal": True}, {"window": (0, 0)}], ids=str)
@pytest.mark.parametrize("rows", [600, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_kernels_round_passes(dtype, rows, see):
    """It errs by much of what is allowed; a tenth more does not pass, nor does a gradient without that of the LSE."""
    most = 0.0
    for seed in range(12):
        qkvg, grad_lse = one_head(seed, rows, dtype)
        sinks = torch.tensor([(-3.0, 0.3, 2.0, 6.0)[seed % 4]])
        out, lse, got = as_kernels_do(*qkvg, grad_lse, sinks, **see)
        q, k, v, grad = qkvg
        found = truth.expected(q, k, v, grad=grad, grad_lse=grad_lse, sinks=sinks, **see)
        compare.assert_close("out", out, *found["out"])
        compare.assert_lse_close("lse", lse, found["lse"].want, q, k, None)
        want, bases, moved, least = found["dsinks"]
        compare.assert_close("dsinks", got, want, bases, moved, least)
        assert moved is None
        most = max(most, float(((got - want).abs() / least).max()))
        without = as_kernels_do(*qkvg, grad_lse * 0, sinks, **see)[2]
        for wrong in (want * 1.1, without.double()) if rows > 5 else ():
            if (wrong - want).abs() > 0.1 * want.abs().clamp_min(0.1):
                with pytest.raises(AssertionError):
                    compare.assert_close("dsinks", wrong.float(), want, bases, moved, least)
    assert 0.1 < most < 1.0


def test_a_gradient_one_percent_off_is_found():
    (q, k, v, grad), grad_lse = one_head(1, 600, torch.float16)
    grad_lse = grad_lse.abs()
    want, *allowed = truth.expected(q, k, v, grad=grad, grad_lse=grad_lse, sinks=torch.zeros(1))["dsinks"]
    compare.assert_close("dsinks", want.float(), want, *allowed)
    with pytest.raises(AssertionError):
        compare.assert_close("dsinks", want.float() * 1.01, want, *allowed)


@pytest.mark.parametrize("size", [30.0, 300.0, 3000.0])
def test_sinks_beside_large_scores(size):
    """Sinks are as near to scores as float32 tells; one far above leaves nothing of its row, one far below all of it. At
    10^7 scores are rounded by more than 1, and P may be anything.
    """
    for seed in range(4):
        (q, k, v, grad), grad_lse = one_head(seed, 16, torch.bfloat16, size)
        q = q[:, :, :1].expand(q.shape)
        largest = float((q.float() @ k.float().mT).amax() / 8)
        for more in (0.0, 0.1 * largest, -0.1 * largest):
            sinks = torch.tensor([largest + more])
            out, lse, of_sinks = as_kernels_do(q, k, v, grad, grad_lse, sinks)
            found = truth.expected(q, k, v, grad=grad, grad_lse=grad_lse, sinks=sinks)
            compare.assert_close("out", out, *found["out"])
            compare.assert_lse_close("lse", lse, found["lse"].want, q, k, None, None, found["lse"].moved)
            compare.assert_close("dsinks", of_sinks, *found["dsinks"])
            if more and size < 3000:
                wrong = as_kernels_do(q, k, v, grad, grad_lse, torch.tensor([largest - more]))
                for name, x in zip(("out", "dsinks"), (wrong[0], wrong[2]), strict=True):
                    with pytest.raises(AssertionError):
                        compare.assert_close(name, x, *found[name])


def test_equal_keys_share_their_rounding_beside_sinks():
    """It moves them from their sink alone, and where that is no sink, or far away, from nothing."""
    q, k, v = (tensors.normal((1, 3, 8, 64), seed, "cpu") for seed in (1, 2, 3))
    q, k, v = (q[:, :1] * 3000).expand(q.shape).half(), (k[:, :1, :1] * 3000).expand(k.shape).half(), v.half()
    score = float((q[0, 0, 0].double() * k[0, 0, 0].double()).sum() / 8)
    sinks = torch.tensor([score, -math.inf, -1e30])
    want = truth.expected(q[:, :, :1], k, v, sinks=sinks)["out"]
    assert want.moved[:, 0].max() > 0.1 and want.moved[:, 1:].max() < 1e-6


@pytest.mark.parametrize("sink, may_vanish", [(-89.0, True), (-70.0, False), (-87.3364, True)])
def test_a_sink_below_normal_numbers_may_have_no_gradient(sink, may_vanish):
    q, k, v = (torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16) for _ in range(3))
    want, *allowed = truth.expected(q, k, v + 1, grad=torch.ones_like(q), sinks=torch.tensor([sink]))["dsinks"]
    assert want.abs().max() > 0
    compare.assert_close("dsinks", want.float(), want, *allowed)
    with contextlib.nullcontext() if may_vanish else pytest.raises(AssertionError):
        compare.assert_close("dsinks", want.float() * 0, want, *allowed)


# ---- problems ----


def test_problems_have_every_kind_of_sinks():
    found = [generate(seed, device) for device in ("cuda", "emulator", "cpu") for seed in range(1500)]
    of_sinks = [p for p in found if p.sinks]
    assert 0.1 < len(of_sinks) / len(found) < 0.4
    for field in Sinks.__dataclass_fields__:
        assert len({getattr(p.sinks, field) for p in of_sinks}) > 1, field
    backends = {p.backend for p in found} - {"sdpa"}
    for what in (of_sinks, [p for p in found if p.max_logits]):
        assert {p.backend for p in what} == backends
        for chosen in (
            lambda p: p.packed,
            lambda p: p.dtype in FP8,
            lambda p: p.mask and p.mask.dtype != "bool",
            lambda p: p.backward,
            lambda p: p.level,
            lambda p: p.out,
            lambda p: p.group > 1,
        ):
            assert sum(map(bool, map(chosen, what))) > 5
    assert {p.wanted for p in of_sinks if p.backward} >= {"s", "qkv", "qkvs", "qkvms"}
    values = [tensors.make(p, "cpu").sinks for p in of_sinks if p.device == "cpu" and p.dtype not in FP8]
    every = torch.cat([x.float() for x in values])
    assert (every == -math.inf).any() and every.abs().max() > 1e29 and not every.isnan().any()
    assert any(not x.is_contiguous() for x in values) and all((x.float() < math.inf).all() for x in values)


def test_sinks_like_scores_are_scores():
    plain = Problem(device="cpu", heads_kv=2, group=2, scale=1.0, softcap=5.0, sinks=Sinks(like="scores", size=0.0))
    for p in (plain, plain.with_(layout="BNHD"), plain.with_(lengths_q=(30, 34), lengths_k=(30, 34))):
        x = tensors.make(p, "cpu")
        q, k = (tensors.heads_first(p, t).double() for t in (x.q, x.k))
        scores = 5.0 * torch.tanh(q[0] @ k[0].repeat_interleave(2, 0).mT / 5.0)
        near = (scores - x.sinks[:, None, None]).abs().amin((1, 2))
        assert near.max() < 1e-5 and x.sinks.abs().max() > 1.0


# ---- what it finds ----


def twice(sinks_of, heads, tile):
    return sinks_of(heads, tile) + math.log(2)


def all_of_the_last_head(sinks_of, heads, tile):
    return sinks_of(heads._replace(sinks=heads.sinks[-1:].expand_as(heads.sinks)), tile)


def sinks_as_scores(keep_largest, heads, entry, tile, largest):
    keep_largest(heads, entry, tile, largest if heads.sinks is None else largest.maximum(heads.sinks_of(tile)))


def all_of_the_first_entry(keep_largest, heads, entry, *rest):
    keep_largest(heads, 0, *rest)


def what_a_mask_adds(_, form, q, k, v, out, options):
    plan = ops._decide(form, "forward", q, k, v, options, ops.env.run_flags(), out)
    results = ops.run_forward(plan, form, q, k, v, out)
    return results if out is None else results[1:]


def without_that_of_the_lse(gradient, grad_out, grad_lse, *rest, **more):
    return gradient(grad_out, None, *rest, **more)


def half(gradient, *args, **more):
    of_sinks, delta = gradient(*args, **more)
    return of_sinks / 2, delta


FAULTS = [  # where each is, and what a problem needs to show it: s(inks), m(ax logits)
    (Heads, "sinks_of", twice, "s"),
    (Heads, "sinks_of", all_of_the_last_head, "s"),
    (Heads, "keep_largest", sinks_as_scores, "sm"),
    (Heads, "keep_largest", all_of_the_first_entry, "m"),
    (ops, "_forward_of_added_mask", what_a_mask_adds, "m"),
    (dispatch_keys, "gradient_of_sinks", without_that_of_the_lse, "s"),
    (dispatch_keys, "gradient_of_sinks", half, "s"),
]


@pytest.mark.parametrize("place, name, fault, needs", FAULTS, ids=[fault.__name__ for _, _, fault, _ in FAULTS])
def test_planted_faults(place, name, fault, needs, monkeypatch):
    """A few problems find each; what is left of the first has what it is about, and fails as the test that it prints."""
    right = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args, **more: fault(right, *args, **more))
    ended = [(p, *campaign.outcome(p)) for p in (generate(seed, "cpu", "sinks") for seed in range(40))]
    wrong = [(p, why) for p, how, why in ended if how == "wrong"]
    assert len(wrong) > 1 and {how for _, how, _ in ended} == {"right", "wrong"}
    p, ended, why = shrink(*wrong[0], campaign.outcome, 6.0)
    assert ended == "wrong" and why.startswith("Wrong: ")
    assert (p.sinks is not None, p.max_logits) == ("s" in needs, "m" in needs)
    found = {}
    exec(as_test(p, why), found)
    with pytest.raises(campaign_check.Wrong):
        found[f"test_found_cpu_{p.seed}"]()


def test_a_problem_loses_its_sinks_first():
    p = Problem(
        device="cpu",
        backward=True,
        wanted="s",
        sinks=Sinks("f16", raised=30.0),
        max_logits=True,
        n_q=9,
        q=Layout("NBH"),
    )
    tried = []

    def outcome(x):
        tried.append(x)
        return "wrong", "Wrong"

    shrink(p, "Wrong", outcome, 10.0)
    assert tried[0] == p.with_(sinks=None, wanted="qkv") and tried[1] == tried[0].with_(max_logits=False)
    tried = []
    smaller, *_ = shrink(p, "Wrong", lambda x: ("wrong" if x.sinks and x.sinks.raised else "right", "Wrong"), 10.0)
    assert smaller == Problem(
        device="cpu", backward=True, wanted="s", sinks=Sinks(raised=30.0), n_q=1, n_k=1, d=8, d_v=8, seed=p.seed
    ).with_(wanted=smaller.wanted)


def test_a_head_with_a_nan_may_have_any_largest_logit():
    """All others are held to theirs."""
    p = Problem(device="cpu", backend="reference", heads_kv=2, max_logits=True, numbers="nan_row")
    assert campaign.outcome(p) == ("right", "")
    x = tensors.make(p, "cpu")
    results, grads = campaign_check.run(p, x)
    for head, right in ((1, True), (0, False)):
        results["max_logits"][0, head] = 99.0
        with contextlib.nullcontext() if right else pytest.raises(AssertionError):
            compare.settle(*campaign_check._compare_dense(p, x, results, grads))


# ---- allocations that fail ----

_BACKWARD = Problem(backward=True, n_q=30, n_k=40, heads_kv=2, grad_lse=True, sinks=Sinks(), wanted="qkvs")
RUN_OUT = {
    "reference": _BACKWARD.with_(device="cpu", backend="reference", max_logits=True),
    "sinks alone": _BACKWARD.with_(device="emulator", backend="mma", wanted="s"),
    "mma": _BACKWARD.with_(device="emulator", backend="mma"),
    "beside a mask": Problem(
        device="emulator", backend="mma", level=3, n_q=30, n_k=40, sinks=Sinks(), max_logits=True, mask=Mask("f32")
    ),
}


@pytest.mark.parametrize("name", RUN_OUT)
def test_allocations_that_fail(name):
    failures, wrong = campaign_stress.run_out(campaign_stress.Kind(RUN_OUT[name]))
    assert failures >= 3 and not wrong, wrong
