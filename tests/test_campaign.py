"""Tests the campaign: its truth, its bounds, what it finds; runs fixed seeds for minutes, and what seeds once found."""

import collections
import contextlib
import json
import math
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import campaign
import campaign_check
import campaign_families as families
import campaign_problems
import campaign_stress
import campaign_tensors as tensors
import campaign_truth as truth
import compare
import oracle
import pytest
import test_numerics
import torch
from campaign_draw import generate
from campaign_problems import DEVICES, FP8, Layout, Mask, Problem
from campaign_shrink import as_test, shrink
from ffpa_attn import env
from ffpa_attn.backends import choice
from ffpa_attn.checks import memory_checks
from ffpa_attn.launching import emulated
from ffpa_attn.operators import ops, out_of_memory
from ffpa_attn.specs.spec import BackwardMmaProducts, BackwardWgmmaProducts, aot_specs
from torch.utils._python_dispatch import TorchDispatchMode

with contextlib.suppress(
    ImportError
):  # Triton is an extra, and reads TRITON_INTERPRET when it is imported, before any test
    import triton  # noqa: F401


@pytest.fixture(autouse=True)
def new_plans(monkeypatch):
    monkeypatch.setattr(ops, "_plans", {})


# ---- the truth ----


def dense(seed: int) -> Problem:
    """Returns a small problem that autograd through the oracle can do."""
    p = generate(seed, "cpu", "backward")
    p = p.with_(
        dtype="bf16", n_q=min(p.n_q, 40), n_k=min(p.n_k, 50), d=min(p.d, 64), d_v=min(p.d_v, 64), batch=max(p.batch, 1)
    )
    if (
        p.mask and -torch.inf < p.mask.hidden < -1e9
    ):  # float64 loses there what float32 does: autograd's LSE has no gradient
        p = p.with_(mask=replace(p.mask, hidden=-1e9))
    if p.softcap:  # autograd's slope is 1 - tanh^2, in float64 too: nothing where tanh is 1
        p = p.with_(softcap=max(p.softcap, 5.0), scale=None, size_q=1.0, size_k=1.0)
    return p.with_(lengths_q=None, lengths_k=None, spare=0)


@pytest.mark.parametrize("most_scores", [1 << 22, 100], ids=["whole", "in blocks"])
def test_the_truth_is_the_oracles(most_scores, monkeypatch):
    """The truth is the oracle's, and its yardstick the comparator's."""
    monkeypatch.setattr(truth, "_MOST_SCORES", most_scores)
    seen = collections.Counter()
    for seed in range(60):
        p = dense(seed)
        x = tensors.make(p, "cpu")
        q, k, v = (tensors.heads_first(p, t) for t in (x.q, x.k, x.v))
        given = {"q": q, "k": k, "v": v, "mask": x.mask, "sinks": x.sinks}
        exact = {name: t if t.dtype == torch.bool else t.double() for name, t in given.items() if t is not None}
        leaves = dict(zip(exact, test_numerics.leaves(*exact.values()), strict=True))
        out, lse = oracle.attention(**leaves, **p.rule)
        grads = test_numerics.random_like(out, 1), test_numerics.random_like(lse, 2) * torch.isfinite(lse)
        gradients = test_numerics.gradients((out, lse), grads, leaves.values())
        want = {"out": out, "lse": lse, "max_logits": oracle.largest_scores(q, k, mask=x.mask, **p.rule)}
        want |= zip([f"d{name}" for name, t in leaves.items() if t.requires_grad], gradients, strict=True)
        how = {"mask": x.mask, "sinks": x.sinks, **p.rule}
        found = truth.expected(q, k, v, grad=grads[0], grad_lse=grads[1], max_logits=True, **how)
        assert found.keys() == want.keys()
        for name, g in want.items():
            size = float(g.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()) if g.numel() else 0.0
            torch.testing.assert_close(
                found[name].want.reshape(g.shape), g.detach().double(), atol=1e-9 * size, rtol=1e-9, msg=f"{name}: {p}"
            )
            seen[name] += size > 0
        base = compare.baseline(q, k, v, **how)[0]
        difference = (found["out"].bases[0] - base).abs()
        assert not base.numel() or not v.numel() or difference.max() <= 2 * compare._ULP[base.dtype] * v.abs().max(), p
    assert sum(seen.values()) > 300 and min(seen[name] for name in ("dmask", "dsinks")) > 5, seen


def rows_of(q, k, v, **rule):
    """Computes one head: (expected, what softmax in float32 of float32 scores gives)."""
    found = truth.expected(q, k, v, **rule)
    mask, scale = rule.get("mask"), rule.get("scale", q.shape[-1] ** -0.5)
    scores = q.float() @ k.float().mT * scale
    scores = scores if mask is None else scores + mask.float()
    return found, torch.softmax(scores, -1) @ v.float(), torch.logsumexp(scores, -1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [30.0, 300.0, 3000.0])
def test_what_large_scores_may_move(size, dtype):
    """The float32 computation passes; sixteen times the result does not, nor does NaN."""
    q, k, v = (tensors.normal((1, 2, 16, 32), seed, "cpu") for seed in (1, 2, 3))
    q, k, v = (q * size).to(dtype), (k * size).to(dtype), (v.abs() + 0.5).to(dtype)
    found, out, lse = rows_of(q, k, v)
    want, bases, moved, least = found["out"]
    assert bool(moved.max() > 1e-30) == (size > 100)  # below that, it is of a P below normal numbers
    compare.assert_close("out", out.to(dtype), want, bases, moved, least)
    compare.assert_lse_close("lse", lse, found["lse"].want, q, k, None, None, found["lse"].moved)
    for wrong in (out * 16, out * torch.nan):
        with pytest.raises(AssertionError):
            compare.assert_close("out", wrong.to(dtype), want, bases, moved, least)


def test_equal_keys_share_their_rounding():
    """Products of keys that are alike are alike too: P does not move, however large they are."""
    q, k, v = (tensors.normal((1, 1, 8, 64), seed, "cpu") for seed in (1, 2, 3))
    q, k, v = (q * 3000).half(), (k[:, :, :1] * 3000).expand(k.shape).half(), v.half()
    want = truth.expected(q, k, v)["out"]
    assert want.moved is not None and want.moved.max() < 1e-6
    assert truth.expected(q, k, v, ordered=False)["out"].moved.max() > 0.1
    out = v.float().mean(2, keepdim=True).expand(v.shape).half()
    compare.assert_close("out", out, *want)
    with pytest.raises(AssertionError):
        compare.assert_close("out", out * 0, *want)


@pytest.mark.parametrize("hidden", [torch.finfo(torch.bfloat16).min, -1e9, -1e30])
def test_a_hidden_key_moves_nobody_else(hidden):
    """The hidden key's own score moves far, and is far below all others."""
    q, k, v = (tensors.normal((1, 1, 8, 64), seed, "cpu").to(torch.bfloat16) for seed in (1, 2, 3))
    mask = torch.zeros(1, 1, 8, 8)
    mask[..., :3] = hidden
    moved = truth.expected(q, k, v, mask=mask)["out"].moved
    assert moved is not None and moved.max() < 1e-4


def test_ordinary_scores_move_nothing():
    for seed in range(200):
        p = generate(seed, "cpu", "forward")
        if (
            p.packed
            or p.dtype in FP8
            or p.mask
            or p.size_q * p.size_k * abs(p.scale or 1) > 1.0
            or p.numbers == "nan_row"
            or 0 < p.softcap < 1
        ):
            continue
        x = tensors.make(p, "cpu")
        found = truth.expected(*(tensors.heads_first(p, t) for t in (x.q, x.k, x.v)), **p.rule)
        assert all(one.moved is None or one.moved.max() < 1e-30 for one in found.values())


def test_the_largest_of_many_errors():
    """More numbers allow a larger one, and no more than that."""
    largest = [float(tensors.normal((count,), 5, "cpu").abs().max()) for count in (10, 1000, 1_000_000)]
    allowed = [compare.deviations(count) for count in (10, 1000, 1_000_000)]
    assert all(one < limit < one + 3 for one, limit in zip(largest, allowed, strict=True))
    assert compare.deviations(0) == compare.deviations(1) == 4.0


def test_the_last_place_below_normal_numbers():
    """Half precision has a number every 6e-8 there; PyTorch's own may be the nearest one by luck."""
    least = 2.0**-24
    want = torch.tensor([[10.2, 1000.3, -2.4]], dtype=torch.float64) * least
    base = want.half()
    compare.assert_close("out", base + torch.tensor([[-least, least, 0.0]]).half(), want, base, least=want * 0)
    with pytest.raises(AssertionError):
        compare.assert_close("out", base + torch.tensor([[-2 * least, 0.0, 0.0]]).half(), want, base, least=want * 0)


@pytest.mark.parametrize(
    "largest, score, may_vanish",
    [(0.0, -89.0, True), (0.0, -70.0, False), (0.0, -87.3364, True), (1e5, -87.3125, True), (1e5, -87.0, False)],
)
def test_a_p_below_normal_numbers_may_be_0(largest, score, may_vanish):
    """exp(-89) is 2e-39, which hardware's exp2 gives as 0; exp(-70) is 4e-31, which it does not. What is a little more
    than the least normal number, 2^-126, may be less as its score is rounded, the more so the larger scores are.
    """
    q, k, v = (torch.zeros(1, 1, n, 8, dtype=torch.bfloat16) for n in (1, 2, 2))
    q[..., 0], k[0, 0, 1, 1] = 1.0, 1.0
    v[0, 0, 1] = 2.0
    mask = torch.tensor([largest, largest + score]).reshape(1, 1, 1, 2)
    found = truth.expected(q, k, v, mask=mask, grad=torch.ones_like(q))
    for name, at in (("dq", ...), ("dk", (0, 0, 1)), ("dv", (0, 0, 1)), ("dmask", (..., 1))):
        want, bases, moved, least = found[name]
        got = want.to(bases[0].dtype)
        compare.assert_close(name, got, want, bases, moved, least)
        assert got[at].abs().max() > 0
        got[at] = 0.0
        with contextlib.nullcontext() if may_vanish else pytest.raises(AssertionError):
            compare.assert_close(name, got, want, bases, moved, least)


def test_a_scale_moves_its_gradients():
    """A scale moves them as much where it is a part of q."""
    q, k, v, grad = (tensors.normal((1, 1, 80, 16), seed, "cpu").bfloat16() for seed in (1, 2, 3, 4))
    found, same = (truth.expected(q * by, k, v, scale=2.0**13 / by, grad=grad) for by in (1.0, 2.0**6))
    assert found["dk"].moved.max() > 1.0
    torch.testing.assert_close(same["dk"].moved, found["dk"].moved)
    torch.testing.assert_close(same["dq"].moved * 2.0**6, found["dq"].moved)


def as_kernels_round(q, k, v, grad, scores, slope=1.0, grad_lse=0.0) -> dict[str, torch.Tensor]:
    """Rounds to 16 bits: P below 1, with its sum apart, P, dP - delta and dS; delta is of the rounded output."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5
    below_1 = torch.exp2((scores - scores.amax(-1, keepdim=True)) * math.log2(math.e) - 0.4)
    total = below_1.sum(-1, keepdim=True)
    out = (below_1.to(dtype).float() @ v.float() / total).to(dtype)
    p = below_1 / total
    delta = (grad.float() * out.float()).sum(-1, keepdim=True) - grad_lse
    d_score = (p.to(dtype) * (grad.float() @ v.float().mT - delta).to(dtype)).to(dtype).float()
    ds = (d_score * slope).to(dtype).float()
    found = {
        "dq": scale * (ds @ k.float()),
        "dk": scale * (ds.mT @ q.float()),
        "dv": p.to(dtype).float().mT @ grad.float(),
    }
    return {"out": out, **{name: x.to(dtype) for name, x in found.items()}, "dmask": d_score}


ROUNDED = {
    "plain": {},
    "one key": {"window": (0, 0)},
    "two keys": {"window": (1, 0)},
    "causal": {"causal": True},
    "a slope of 0 nearly everywhere": {"softcap": 1e-3},
}


@pytest.mark.parametrize("alike", [False, True], ids=["", "equal keys"])
@pytest.mark.parametrize("rows", [600, 5])
@pytest.mark.parametrize("rule", ROUNDED.values(), ids=ROUNDED)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 1, 0), (1, 1, 0, 1), (1, 1, 0, 0)], ids=str)
def test_roundings_to_16_bits_pass(shape, rule, rows, alike):
    """Roundings pass though PyTorch's are small by luck: P of one key is 1, and of two alike a half, without error."""
    softcap = rule.get("softcap", 0.0)
    shape = [n or rows for n in shape]
    for seed in range(4):
        q, k, v, grad = (tensors.normal((1, 1, rows, 64), 9 * seed + i, "cpu").bfloat16() for i in range(4))
        k = k[:, :, :1].expand(k.shape) if alike else k
        mask = tensors.normal(shape, seed, "cpu") * (not alike)
        found = truth.expected(q, k, v, mask=mask, grad=grad, **rule)
        scores, slope = q.float() @ k.float().mT / 8, 1.0
        if softcap:
            scores, slope = (f(scores / softcap) for f in (torch.tanh, lambda x: 1 / torch.cosh(x) ** 2))
            scores = softcap * scores
        seen = oracle.visible(
            rows, rows, rule.get("causal", False), "bottom_right", rule.get("window", (-1, -1)), "cpu"
        )
        got = as_kernels_round(q, k, v, grad, (scores + mask).masked_fill(~seen, -torch.inf), slope)
        got["dmask"] = got["dmask"].double().sum_to_size(shape).float()
        for name, x in got.items():
            want, bases, moved, least = found[name]
            compare.assert_close(name, x, want, bases, moved, least)


def test_keys_that_share_an_element_share_a_rounding():
    """dP - delta of such keys is nearly the gradient of LSE alone, so all are rounded in the same direction."""
    for seed in range(20):
        q, k, v, grad = (tensors.normal((1, 1, 3, 64), 9 * seed + i, "cpu").bfloat16() for i in range(4))
        v, grad_lse, mask = v * 1e-6, tensors.normal((1, 1, 3), seed, "cpu"), torch.zeros(1, 1, 3, 1)
        want, bases, moved, least = truth.expected(q, k, v, mask=mask, grad=grad, grad_lse=grad_lse)["dmask"]
        got = as_kernels_round(q, k, v, grad, q.float() @ k.float().mT / 8, grad_lse=grad_lse[..., None])
        compare.assert_close("dmask", got["dmask"].sum(-1, keepdim=True), want, bases, moved, least)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 1, 600), (1, 1, 600, 1)])
def test_masks_of_few_elements(shape):
    """What rounds to 16 bits errs by much of what is allowed; a tenth more does not pass."""
    most = 0.0
    for seed in range(12):
        q, k, v, grad = (tensors.normal((1, 1, 600, 64), 9 * seed + i, "cpu").bfloat16() for i in range(4))
        mask = tensors.normal(shape, seed, "cpu")
        want, bases, moved, least = truth.expected(q, k, v, mask=mask, grad=grad)["dmask"]
        got = (
            as_kernels_round(q, k, v, grad, q.float() @ k.float().mT / 8 + mask)["dmask"]
            .double()
            .sum_to_size(shape)
            .float()
        )
        most = max(most, float(((got - want).abs() / least).max()))
        if shape[-1] > 1:
            got.view(-1)[int(want.abs().argmax())] *= 1.1
            with pytest.raises(AssertionError):
                compare.assert_close("dmask", got, want, bases, moved, least)
    assert 0.2 < most < 1.0


@pytest.mark.parametrize("rows, rule", [(600, {}), (600, {"window": (0, 0)}), (600, {"causal": True}), (40, {})])
def test_a_gradient_one_percent_off_is_found(rows, rule):
    """The error is in one row, or one column, of many numbers and of few."""
    q, k, v, grad = (tensors.normal((1, 1, rows, 64), seed, "cpu").half() for seed in (1, 2, 3, 4))
    grad_lse = tensors.normal((1, 1, rows), 5, "cpu")
    found = truth.expected(q, k, v, grad=grad, grad_lse=grad_lse, **rule)
    for name in ("dq", "dk", "dv"):
        want, bases, moved, least = found[name]
        right = want.half()
        compare.assert_close(name, right, want, bases, moved, least)
        row, column = divmod(int(want.abs().argmax()), 64)
        for at in ((0, 0, row), (0, 0, slice(None), column)):
            wrong = right.clone()
            wrong[at] *= 1.01
            with pytest.raises(AssertionError):
                compare.assert_close(name, wrong, want, bases, moved, least)


def test_a_gpu_is_waited_for_seldom(monkeypatch):
    """Sixteen processes share a GPU, and each has to wait for its turn."""

    class Waits(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            waits = "_local_scalar_dense", "nonzero", "equal", "masked_select"
            self.count += function.overloadpacket.__name__ in waits
            self.count += function is torch.ops.aten.index.Tensor and any(
                x.dtype == torch.bool for x in args[1] if x is not None
            )
            return function(*args, **(kwargs or {}))

    p = Problem(
        device="cpu", backend="reference", backward=True, grad_lse=True, n_q=300, n_k=40, causal=True, softcap=5.0
    )
    monkeypatch.setattr(truth, "_MOST_SCORES", 4000)  # several blocks
    with Waits() as waits, warnings.catch_warnings():
        campaign_check.check(p)
    assert waits.count <= 3 + 1, waits.count  # the reference path asks once, on a CPU, whether a row is far


# ---- problems ----


def test_seeds_are_the_same_everywhere():
    p = generate(7, "cuda")
    assert repr(p) == repr(generate(7, "cuda")) and p != generate(8, "cuda")
    assert [int(x) for x in tensors.bits((4,), 7, "cpu") % 1000003] == BITS
    numbers = tensors.normal((10_000,), 3, "cpu")
    assert abs(float(numbers.mean())) < 0.03 and abs(float(numbers.std()) - 1) < 0.03


BITS = [328366, 907389, 280429, 66322]


@pytest.mark.parametrize("device", DEVICES)
def test_a_problem_prints_as_itself(device):
    for seed in range(100):
        p = generate(seed, device)
        assert eval(repr(p), vars(campaign_problems)) == p


def test_problems_cover_every_argument():
    found = [generate(seed, "cuda") for seed in range(3000)]
    for name in Problem.__dataclass_fields__:
        values = {getattr(p, name) for p in found}
        assert len(values) > 1 or name in ("device", "exact"), name
    refused_by_triton = [p for p in found if p.backend == "triton" and max(p.d, p.d_v) > 256]
    assert not refused_by_triton
    assert max(p.n_q for p in found) > 4000 and {p.d % 16 for p in found} == {0, 8}


@pytest.mark.parametrize("kind", [None, "backward"])
def test_families_share_kernels(kind):
    """A thousand problems are four families: Triton compiles few kernels for them, and others for the next four."""
    pytest.importorskip("triton", reason="Triton is an extra")
    import campaign_kernels

    found = []
    for first in (10_000_000, 70_000_000):
        problems = [p for p in (generate(first + i, "cuda", kind) for i in range(1000)) if p.dtype not in FP8]
        of_each = [campaign_kernels.compiled(p) for p in problems if families.compiles(p)]
        assert sum(map(bool, of_each)) > 150 and len({p.n_q for p in problems}) > 100
        found.append(set().union(*of_each))
        assert 4 <= len(found[-1]) <= 40
    assert len(found[0] & found[1]) <= 3


def test_layouts_hold_what_was_asked_for_and_nan_around():
    for seed in range(200):
        p = generate(seed, "cpu")
        if p.dtype in FP8 or p.packed:
            continue
        x = tensors.make(p, "cpu")
        if p.v_in_k:
            assert x.v.data_ptr() == x.k.data_ptr() and x.v.stride() == x.k.stride()
        for t, block in zip((x.q, x.k) if p.v_in_k else (x.q, x.k, x.v), x.blocks, strict=False):
            if t.numel() and 0 not in t.stride():
                assert int(block.isnan().sum()) == block.numel() - t.numel() + int(t.isnan().sum())
            assert not memory_checks.rows_problem(t) or t.numel() == 0


# ---- what it finds, and what it says ----


def test_wrong_numbers_are_found(monkeypatch):
    """One part in fifty of an element, a mask written to, what lies beside `out`, an unknown error: all are found."""
    p = Problem(device="cpu", backend="reference", n_q=20, n_k=30, out=Layout(slack=(0, 1, 8)), mask=Mask("f32"))
    assert campaign.outcome(p) == ("right", "")
    run = ops.run

    def spoilt(change):
        def spoiling(plan, direction, q, k, v, out, *rest, **more):
            run(plan, direction, q, k, v, out, *rest, **more)
            change(q, out)

        monkeypatch.setattr(ops, "run", spoiling)
        return campaign.outcome(p)[0]

    def raises(q, out):
        raise RuntimeError("no")

    assert spoilt(lambda q, out: out[0, 0, 3].mul_(1.5)) == "wrong"
    assert spoilt(lambda q, out: q[0, 0, 3].mul_(2.0)) == "wrong"
    assert spoilt(lambda q, out: out.as_strided((1,), (1,), out.storage_offset() + 65).fill_(2.0)) == "wrong"
    assert spoilt(raises) == "wrong"
    assert spoilt(lambda q, out: None) == "right"


def test_a_wrong_problem_is_made_smaller():
    p = generate(11, "cpu", "forward").with_(
        lengths_q=None, lengths_k=None, n_q=300, n_k=200, d=64, heads_kv=4, causal=True
    )
    smaller, ended, why = shrink(
        p, "Wrong: at first", lambda x: ("wrong", "Wrong: small") if x.n_q >= 7 and x.causal else ("right", ""), 60.0
    )
    assert (ended, why) == ("wrong", "Wrong: small")
    assert smaller.n_q == 7 and smaller.n_k == 1 and smaller.d == 8 and smaller.causal and smaller.heads_kv == 1
    assert repr(smaller) in as_test(smaller, "why")
    compile(as_test(smaller, "of two\nlines"), "test", "exec")


def test_a_smaller_problem_fails_in_the_same_way():
    p = Problem(device="cpu", n_q=8)
    smaller, _, why = shrink(
        p, "Wrong: 8", lambda x: ("wrong", f"Wrong: {x.n_q}" if x.n_q > 3 else "IndexError: other"), 60.0
    )
    assert smaller.n_q == 4 and why == "Wrong: 4"


@pytest.mark.parametrize("odd", ["", "first", "last", "falls"])
@pytest.mark.parametrize("lengths", [(), (0,), (5,), (0, 0)])
def test_any_number_of_sequences_has_offsets(lengths, odd):
    """Problems that are made smaller come to have no sequences."""
    x = tensors.make(Problem(lengths_q=lengths, lengths_k=lengths, odd_offsets=odd), "cpu")
    assert len(x.offsets[0]) == len(lengths) + 1 and len(x.spans) == len(lengths)
    assert all(0 <= part.start <= part.stop <= sum(lengths) for span in x.spans for part in span)


def run_campaign(*args: str) -> tuple[int, dict, str]:
    script = Path(__file__).with_name("campaign.py")
    done = subprocess.run([sys.executable, script, *args], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_recorded_calls_show_what_differs(tmp_path):
    """The same calls give the same record; a record with other bits is told from it."""
    kept = tmp_path / "calls.json"
    command = [
        sys.executable,
        campaign.__file__.replace("campaign.py", "recorded_calls.py"),
        "--device",
        "cpu",
        "--calls",
        "6",
    ]
    assert subprocess.run([*command, "--out", kept], capture_output=True).returncode == 0
    calls = json.loads(kept.read_text())
    assert len(calls) == 6 and all(call["bits"].get("out") for call in calls.values())
    same = subprocess.run([*command, "--against", kept], capture_output=True, text=True)
    assert same.returncode == 0 and "0 differ" in same.stdout
    calls["3"]["bits"]["out"] = "0" * 16
    kept.write_text(json.dumps(calls))
    other = subprocess.run([*command, "--against", kept], capture_output=True, text=True)
    assert other.returncode == 1 and "seed 3: " in other.stdout and "1 differ" in other.stdout


def test_the_program(tmp_path):
    summary = tmp_path / "summary.json"
    code, said = run_campaign(
        "--device", "cpu", "--seconds", "100", "--problems", "30", "--processes", "2", "--json", str(summary)
    )
    found = json.loads(summary.read_text())
    assert code == 0, said
    assert (
        found["right"] >= 30
        and found["wrong"] == 0
        and sum(map(sum, (x.values() for x in found["kinds"].values()))) == found["problems"]
    )
    code, said = run_campaign("--device", "cpu", "--only", "3")
    assert code == 0 and repr(generate(3, "cpu")) in said and "right" in said


def run_sabotaged(tmp_path, check: str, *args: str) -> tuple[int, dict, str]:
    """Runs the program with this source as what checks a problem."""
    here = Path(__file__).parent
    (tmp_path / "ffpa").symlink_to(here.parent / "ffpa")
    (tmp_path / "tests").mkdir()
    for name in ("campaign*.py", "compare.py", "oracle.py", "pages.py"):
        for path in here.glob(name):
            (tmp_path / "tests" / path.name).write_text(path.read_text())
    checks = tmp_path / "tests" / "campaign_check.py"
    checks.write_text(checks.read_text() + check)
    command = [sys.executable, tmp_path / "tests" / "campaign.py", "--device", "cpu", "--seconds", "1000", *args]
    done = subprocess.run(
        [*command, "--kind", "forward", "--json", tmp_path / "found"], capture_output=True, text=True, timeout=1100
    )
    return done.returncode, json.loads((tmp_path / "found").read_text()), done.stdout + done.stderr


def test_processes_that_die_or_hang(tmp_path):
    """Each process is reported with its seed, and another goes on behind it. Other problems take no time, so that a
    hang is what it is however busy the machine may be.
    """
    sabotage = """
def check(p):
    import os, time
    if p.seed == 3:
        os._exit(7)
    if p.seed == 5:
        time.sleep(100000)
    return p.backend
"""
    code, summary, said = run_sabotaged(tmp_path, sabotage, "--problems", "8", "--timeout", "20")
    found = {one["seed"]: one["why"] for one in summary["found"]}
    assert code == 1 and set(found) == {3, 5}, said
    assert "died with 7" in found[3] and "hung" in found[5] and summary["right"] >= 6


def test_a_process_that_dies_has_used_what_it_made_smaller(tmp_path):
    """Where all problems are wrong and a smaller one ends its process, those that follow make nothing smaller again."""
    sabotage = """
_seen = set()

def check(p):
    import os
    if p.seed in _seen:
        os._exit(7)
    _seen.add(p.seed)
    raise Wrong("as all are")
"""
    code, summary, said = run_sabotaged(tmp_path, sabotage, "--problems", "4")
    assert code == 1 and summary["wrong"] >= 4 and summary["right"] == 0, said
    assert said.count("is made smaller") == 1, said


# ---- allocations that fail ----

RUN_OUT = {
    "reference": Problem(device="cpu", backend="reference", backward=True, n_q=30, n_k=40, heads_kv=2, grad_lse=True),
    "reference packed": Problem(
        device="cpu", backend="reference", backward=True, lengths_q=(9, 0, 20), lengths_k=(9, 4, 20)
    ),
    "mma, level 3": Problem(device="emulator", backend="mma", level=3, n_q=30, n_k=40),
    "backward on mma": Problem(device="emulator", backend="mma", backward=True, n_q=30, n_k=40),
    "backward on hopper": Problem(device="emulator", backend="hopper", backward=True, n_q=30, n_k=40, arch="sm_90a"),
}


@pytest.mark.parametrize("name", list(RUN_OUT))
def test_allocations_that_fail(name):
    """Each fails in turn: its error names the workspace and the least that works; the next call has the old bits."""
    failures, wrong = campaign_stress.run_out(campaign_stress.Kind(RUN_OUT[name]))
    assert failures >= 3 and not wrong, wrong


@pytest.mark.parametrize("columns", [72, 448])
def test_the_least_workspace_is_one_that_works(columns):
    """A workspace below the least is refused, where the error names more than 1 MiB."""
    p = Problem(device="emulator", backend="mma", level=3, n_q=20, n_k=20, d=columns, d_v=columns)
    if columns > 72:
        p = p.with_(d_v=4200)
    kind = campaign_stress.Kind(p)
    with (
        campaign_check.running(p),
        campaign_stress.failing_allocation(1),
        pytest.raises(torch.OutOfMemoryError) as error,
    ):
        kind()
    least = int(re.search(r"set FFPA_WORKSPACE_MB=(\d+), the least", str(error.value))[1])
    assert (
        least == (1 if columns == 72 else 2)
        and "workspace of " in str(error.value)
        and "(FFPA_WORKSPACE_MB=1024)" in str(error.value)
    )
    with campaign_check.running(p.with_(flags=(("FFPA_WORKSPACE_MB", str(least)),))):
        kind()
    if least > 1:
        with (
            campaign_check.running(p.with_(flags=(("FFPA_WORKSPACE_MB", str(least - 1)),))),
            pytest.raises(NotImplementedError),
        ):
            kind()


def test_the_least_workspace_keeps_the_backend(monkeypatch):
    """Another backend would run with less."""
    monkeypatch.setattr(
        choice, "choose", lambda p, flags: Answer(p, "mma" if flags["FFPA_WORKSPACE_MB"] >= 37 else "reference")
    )
    assert [out_of_memory.least_cap(Answer(None, "mma"), {"FFPA_WORKSPACE_MB": cap}) for cap in (37, 38, 1024)] == [
        37
    ] * 3
    assert out_of_memory.least_cap(Answer(None, "reference"), {"FFPA_WORKSPACE_MB": 30}) == 1


class Answer(NamedTuple):
    problem: Problem | None
    backend: str


# ---- seeds ----

SEEDS = {"emulator": 400, "fused": 200, "interpreter": 80, "cpu": 800, "cuda": 800}
# Each of the four parts takes so many seconds.
SECONDS = {"emulator": 30, "fused": 55, "interpreter": 30, "cpu": 12, "cuda": 45}


@pytest.fixture
def shipped_kernels_alone(monkeypatch):
    """Allows no kernel built for one problem, but a few backward products, where few kernels are shipped."""
    module = emulated._module_with

    def of_shipped(spec):
        few = isinstance(spec, (BackwardMmaProducts, BackwardWgmmaProducts))
        if not few and spec not in aot_specs(env.all_flags()):
            raise NotImplementedError(f"{spec.name} is not shipped")
        return module(spec)

    monkeypatch.setattr(emulated, "_module_with", of_shipped)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(
    "device", [pytest.param(device, marks=pytest.mark.long(seconds=SECONDS[device])) for device in SEEDS]
)
def test_fixed_seeds(device, part, shipped_kernels_alone):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if device == "interpreter":
        pytest.importorskip("triton", reason="Triton is an extra")
        if torch.cuda.is_available():
            pytest.skip("where there is a GPU, Triton compiles for it and interprets nothing")
    ended = {}
    for seed in range(part, SEEDS[device], 4):
        p = generate(seed, device)
        how, why = campaign.outcome(p)
        ended[how] = ended.get(how, 0) + 1
        assert how in ("right", "refused"), f"{why}\n{as_test(p, why)}"
    assert ended["right"] > 0.7 * sum(ended.values()), ended
