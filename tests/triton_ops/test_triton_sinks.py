"""Tests sinks and the largest score in Triton's forward kernels, at their plans; interpreted where there is no GPU."""

import pytest
import torch
from ffpa_attn import env
from ffpa_attn.backends import triton_attention, triton_fp8
from ffpa_attn.backends.reference import Rule
from ffpa_attn.specs.problem import Problem, Visibility

pytest.importorskip("triton", reason="Triton is an extra")

TESTS_IN_A_ROW = 64  # tests that one process runs: they share kernels, seconds each, and a process compiles its own
INF = float("inf")
SINKS = {
    "none": None,
    "usual": [0.5, 3.0, -2.0, -INF],
    "huge": [1e30, 3e38, -1e30, -3e38],
}
HEADS, HEADS_KV = 4, 2


@pytest.fixture(autouse=True)
def interpreted(request, monkeypatch):
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, Triton compiles for it and interprets nothing")
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def plan_of(module, device: str, dtype: str, d: int, see: Visibility, scale=0.1, cap=0.0, **options):
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else None
    cores = options.pop("cores", 0)
    problem = Problem(
        "forward", device, arch, dtype, 2, HEADS, HEADS_KV, 70, 150, d, d, None, see, scale, cap, None, True, None, "f32", None
    )._replace(**options)  # fmt: skip
    plan = module.plan(problem, {**env.run_flags(), "FFPA_TRITON_CORES": cores})
    assert not isinstance(plan, str), plan
    return plan, Rule(scale, cap, see)


def inputs(device, dtype, n_q: int, n_k: int, d: int, batch: int = 2):
    generator = torch.Generator().manual_seed(n_q + n_k)
    shapes = (batch, HEADS, n_q, d), (batch, HEADS_KV, n_k, d), (batch, HEADS_KV, n_k, d)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def truth(q, k, v, sinks, see: Visibility, scale=0.1, cap=0.0, mask=None):
    """Returns (out, LSE, largest) in float64."""
    q, k, v = q.double(), *(x.double().repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
    n_q, n_k = q.shape[2], k.shape[2]
    scores = q @ k.mT * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    ahead = torch.arange(n_k, device=q.device) - torch.arange(n_q, device=q.device)[:, None] - (n_k - n_q)
    seen = torch.ones_like(ahead, dtype=torch.bool) if mask is None else mask
    if see.left >= 0:
        seen = seen & (ahead >= -see.left)
    if see.right >= 0:
        seen = seen & (ahead <= see.right)
    scores = scores.masked_fill(~seen, -INF)
    largest = scores.flatten(2).amax(-1) if n_q and n_k else scores.new_full(scores.shape[:2], -INF)
    sink = scores.new_full((HEADS,), -INF) if sinks is None else sinks.double()
    scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    lse = scores.logsumexp(-1)
    p = (scores - torch.where(lse.isinf(), 0.0, lse)[..., None]).exp()[..., :-1]
    return p @ v, lse, largest


def sinks_of(kind: str, device):
    return None if SINKS[kind] is None else torch.tensor(SINKS[kind], dtype=torch.float32, device=device)


def full(device, *shape):
    return torch.full(shape, -INF, device=device)


def check(found, want, tolerance: float = 8e-3, relative: float = 0.0) -> None:
    """Checks out, LSE and largest; either of the latter may not have been asked for."""
    for got, exact, most in zip(found, want, (tolerance, 2e-5, 2e-5), strict=True):
        if got is not None:
            torch.testing.assert_close(got.double(), exact, atol=most, rtol=max(1e-6, relative))


PLAIN, CAUSAL = Visibility(-1, -1, False), Visibility(-1, 0, False)
CASES = {
    "plain": {},
    "causal": {"see": CAUSAL},
    "rows without keys": {"see": CAUSAL, "n_q": 150, "n_k": 70},
    "a window": {"see": Visibility(16, 3, False)},
    "capped": {"cap": 3.0},
    "a negative scale": {"scale": -0.1},
    "far scores": {"scale": 1e4},
    "far below": {"scale": 1e4, "below": True},
    "no scores": {"scale": 0.0},
    "no keys": {"n_k": 0},
    "bool": {"mask": True},
    "rows that the mask hides": {"mask": True, "see": CAUSAL, "n_q": 150, "n_k": 70},
}


@pytest.mark.parametrize("cores", [0, 3], ids=["forward", "persistent"])
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("case", CASES)
def test_dense(case, sinks, cores, device):
    options = {"see": PLAIN, "n_q": 70, "n_k": 150, "mask": False, "below": False} | CASES[case]
    see, n_q, n_k, masked, below = (options.pop(x) for x in ("see", "n_q", "n_k", "mask", "below"))
    if masked and cores:
        pytest.skip("the persistent kernel takes no mask")
    q, k, v = inputs(device, torch.float16, n_q, n_k, 64)
    if below:
        q, k = q.abs(), -k.abs()
    mask = None
    if masked:
        mask = torch.rand(1, 1, n_q, n_k, generator=torch.Generator().manual_seed(0)).to(device) < 0.3
        mask[:, :, 5:40] = False
    plan, rule = plan_of(
        triton_attention, device, "f16", 64, see, **options, cores=cores, n_q=n_q, n_k=n_k, mask="bool" if masked else None
    )  # fmt: skip
    s = sinks_of(sinks, device)
    out, lse, largest = torch.full_like(q, torch.nan), full(device, 2, HEADS, n_q), full(device, 2, HEADS)
    plan.forward(q, k, v, out, lse, mask, None, rule, 1 << 30, {}, s, largest)
    check((out, lse, largest), truth(q, k, v, s, see, mask=mask, **options))
    again = torch.full_like(q, torch.nan)
    plan.forward(q, k, v, again, lse.new_empty(0), mask, None, rule, 1 << 30, {}, s)
    assert torch.equal(again, out)


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("causal", [False, True])
def test_packed(causal, sinks, device):
    """Each sequence has its own largest scores; rows of no sequence have no sink."""
    see = CAUSAL if causal else PLAIN
    cuts_q, cuts_k = [0, 33, 33, 103, 110], [0, 20, 90, 130, 130]
    q, k, v = (x[0] for x in inputs(device, torch.bfloat16, 120, 140, 64, batch=1))
    plan, rule = plan_of(triton_attention, device, "bf16", 64, see, packed=(120, 140), batch=4)
    offsets = *(torch.tensor(x, dtype=torch.int32, device=device) for x in (cuts_q, cuts_k)), 70, 70
    s = sinks_of(sinks, device)
    out, lse, largest = torch.full_like(q, torch.nan), full(device, HEADS, 120), full(device, 4, HEADS)
    plan.forward(q, k, v, out, lse, None, offsets, rule, 1 << 30, {}, s, largest)
    for i in range(4):
        rows, keys = slice(*cuts_q[i : i + 2]), slice(*cuts_k[i : i + 2])
        want_out, want_lse, want_largest = truth(q[None, :, rows], k[None, :, keys], v[None, :, keys], s, see)
        check((out[:, rows], lse[:, rows], largest[i]), (want_out[0], want_lse[0], want_largest[0]), 0.03)
    assert not out[:, 110:].any() and lse[:, 110:].isneginf().all()


@pytest.mark.parametrize("v_transposed", [False, True])
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("case", ["plain", "causal", "rows without keys", "capped", "far scores", "no keys"])
def test_8_bits(case, sinks, v_transposed, device):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    options = {"see": PLAIN, "n_q": 70, "n_k": 160} | CASES[case]
    see, n_q, n_k = (options.pop(x) for x in ("see", "n_q", "n_k"))
    q, k, v = inputs(device, torch.float8_e4m3fn, n_q, n_k, 64)
    v = v.mT.contiguous().mT if v_transposed else v
    plan, rule = plan_of(triton_fp8, device, "e4m3", 64, see, **options, n_q=n_q, n_k=n_k)
    blocks = -(-n_k // 128)
    k_scale = torch.linspace(0.5, 1.5, HEADS_KV * blocks, device=device).view(1, HEADS_KV, blocks).expand(2, -1, -1)
    s = sinks_of(sinks, device)
    out = torch.full(q.shape, torch.nan, dtype=torch.bfloat16, device=device)
    lse, largest = full(device, 2, HEADS, n_q), full(device, 2, HEADS)
    plan.forward_fp8(q, k, v, (None, k_scale, None), out, lse, rule, 1 << 30, {}, s, largest)
    scaled = k.double() * k_scale.repeat_interleave(128, 2)[:, :, :n_k, None]
    check((out, lse, largest), truth(q, scaled, v, s, see, **options), 0.06, 1e-2)


@pytest.mark.parametrize("score", [0.0, -0.0, -3.0, 3.0])
def test_scores_that_are_all_one_number(score, device):
    """-0.0 is below all other numbers by its bits; heads that see nothing before it have -inf."""
    q = torch.ones(1, HEADS, 70, 64, dtype=torch.float16, device=device)
    k = torch.full((1, HEADS_KV, 70, 64), score / 64, dtype=torch.float16, device=device)
    plan, rule = plan_of(triton_attention, device, "f16", 64, PLAIN, scale=-1.0)
    largest = full(device, 1, HEADS)
    plan.forward(q, k, k, torch.empty_like(q), largest.new_empty(0), None, None, rule, 1 << 30, {}, None, largest)
    torch.testing.assert_close(largest, torch.full_like(largest, -score), atol=2e-3, rtol=0)


@pytest.mark.parametrize("far", [0.0, 32768.0])
@pytest.mark.parametrize("softcap", [0.0, 1e6])
def test_gradients(far, softcap, device, monkeypatch):
    """P comes from an LSE that has the sink in it; a far row whose LSE covers more than its keys keeps to it."""
    monkeypatch.setenv("FFPA_BACKEND", "triton")
    q, k, v = (x.mul_(0.3) for x in inputs(device, torch.float16, 70, 150, 64))
    q[..., 0], k[..., 0] = far / 256, 256.0
    sinks = torch.tensor([far + 2, far - 1, far + 1, -INF], device=device)
    rule = {"scale": 1.0, "cap": softcap}
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want, lse, _ = truth(*leaves, sinks, PLAIN, **rule)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
    wanted = torch.autograd.grad(want, leaves, grad.double())
    saved = grad, None, q, k, v, want.detach().half(), lse.detach().float()
    got = torch.ops.ffpa_attn.backward(*saved, scale=1.0, softcap=softcap)[:3]
    for mine, exact in zip(got, wanted, strict=True):
        error = (mine.double() - exact)[..., 1:].norm() / exact[..., 1:].norm()
        assert error < (0.02 if far else 0.004), error


def test_nan_stays(device):
    q, k, v = inputs(device, torch.float16, 70, 150, 64)
    q[0, 0, 3, 5] = torch.nan
    plan, rule = plan_of(triton_attention, device, "f16", 64, PLAIN)
    out, lse, s = torch.empty_like(q), full(device, 2, HEADS, 70), sinks_of("huge", device)
    plan.forward(q, k, v, out, lse, None, None, rule, 1 << 30, {}, s, None)
    assert out[0, 0, 3].isnan().all() and lse[0, 0, 3].isnan() and out.isnan().sum() == 64
