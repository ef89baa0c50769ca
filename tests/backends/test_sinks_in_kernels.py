"""Tests sinks and the largest score in every CUDA forward, as plans run them, in the emulator."""

import math
from dataclasses import dataclass

import oracle
import pytest
import torch
from ffpa_attn.backends.forward_short import ForwardShortPlan
from ffpa_attn.backends.fused import FusedPlan
from ffpa_attn.backends.fused_fp8 import Fp8Plan
from ffpa_attn.backends.levels import LevelPlan
from ffpa_attn.backends.reference import Rule
from ffpa_attn.backends.row_tiles import Parts
from ffpa_attn.backends.two_phase import TwoPhasePlan
from ffpa_attn.specs import spec as specs
from ffpa_attn.specs.problem import Visibility
from ffpa_attn.testing import emulate

F16, BF16 = torch.float16, torch.bfloat16
F32_SUMS = ("f32", "f32")
SINKS = (1.5, -math.inf, 60.0, -3.0, 0.25, 1e30, -1e4, 1e4)
CAP = 64 << 20


@dataclass(frozen=True)
class Kernel:
    """A kernel, the head dims that it is tested with, and the keys of which a part of its keys may consist."""

    name: str
    d: int
    d_v: int
    part_keys: int
    arch: str = "sm_80"

    def plan(self, dtype: torch.dtype, parts: int = 1, tile_heads: int = 1):
        of = "f16" if dtype == F16 else "bf16"
        cut = Parts(parts, self.part_keys) if parts > 1 else Parts()
        if self.name.startswith("rows"):
            shape = specs.rows_shapes(64)[0 if self.name == "rows128" else 1]
            return LevelPlan(specs.rows_spec(of, F32_SUMS, shape), 1, 1, True, parts, tile_heads=tile_heads)
        if self.name in ("L1", "L2"):
            shape = specs.register_shapes(512, F32_SUMS)[-1]
            return LevelPlan(
                specs.forward_spec(of, F32_SUMS, shape), int(self.name[1]), 2, False, parts, tile_heads=tile_heads
            )
        if self.name == "L3":
            spec = specs.forward_spec(of, F32_SUMS, specs.streamed_shapes(320, F32_SUMS)[-1], streamed=True)
            return LevelPlan(spec, 3, 2, False, parts, tile_heads=tile_heads)
        of_hopper = {
            "short": (ForwardShortPlan, specs.ForwardMmaShort, (64,)),
            "mma-two-phase": (TwoPhasePlan, specs.ForwardMmaTwoPhase, (specs.TWO_PHASE_MMA_COLUMNS,)),
            "wgmma-two-phase": (TwoPhasePlan, specs.ForwardWgmmaTwoPhase, (384,)),
            "fused": (FusedPlan, specs.ForwardWgmmaFused, (64, 64)),
            "pair": (FusedPlan, specs.ForwardWgmmaPair, (384,)),
            "latent": (FusedPlan, specs.ForwardWgmmaLatent, (576,)),
        }
        plan, family, columns = of_hopper[self.name]
        return plan(family(of, *columns), tile_heads, cut)


KERNELS = [
    Kernel("rows128", 64, 64, 128),
    Kernel("rows64", 64, 64, 64),
    Kernel("L1", 72, 264, 256),
    Kernel("L2", 64, 520, 256),
    Kernel("L3", 320, 320, 128),
    Kernel("short", 64, 64, 0),
    Kernel("mma-two-phase", 72, 264, 256),
    Kernel("wgmma-two-phase", 72, 264, 256, "sm_90a"),
    Kernel("fused", 64, 64, 128, "sm_90a"),
    Kernel("pair", 328, 328, 128, "sm_90a"),
    Kernel("latent", 576, 512, 128, "sm_90a"),
]
PLAIN = {"rows128"}  # no rules but a positive scale
WITHOUT_PARTS = {"short"}
by_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=[kernel.name for kernel in KERNELS])


def small_integers(*shape, dtype, seed: int):
    """Returns numbers whose products add up to the same float32 in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(kernel, plan, q, k, v, rule, mask=None, offsets=None, sinks=True, seed=3):
    """Returns (out, lse, largest) of tensors [B, H, N, D] or [H, T, D]."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = torch.full(q.shape[:-1], torch.nan, dtype=torch.float32)
    heads, batch = q.shape[-3], len(offsets[0]) - 1 if offsets else len(q)
    largest = torch.full((batch, heads), -math.inf)
    of_heads = torch.tensor([SINKS[i % len(SINKS)] for i in range(heads)]) if sinks else None
    with emulate(kernel.arch, seed=seed):
        plan.forward(q, k, v, out, lse, mask, offsets, rule, CAP, {}, of_heads, largest)
    return out, lse, largest


def with_sinks(out, lse, sinks):
    """Returns what sinks make of a result without them, in float64."""
    sinks = sinks.double()[:, None].expand_as(lse)
    share = torch.where(lse == -math.inf, 0.0, torch.sigmoid(lse - sinks))
    return out * share[..., None], torch.logaddexp(lse, sinks)


def largest_of(q, k, scale, softcap=0.0, hidden=None):
    """Returns the largest float32 score of each head; products of small integers are exact."""
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = q.float() @ k.float().mT * torch.tensor(scale, dtype=torch.float32)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    return (scores if hidden is None else scores.masked_fill(hidden, -math.inf)).amax((-2, -1))


def check(results, q, k, v, of_rule, mask=None, softcap=0.0):
    out, lse, largest = results
    scale = of_rule["scale"]
    want, want_lse = oracle.attention(q, k, v, mask=mask, softcap=softcap, **of_rule)
    sinks = torch.tensor([SINKS[i % len(SINKS)] for i in range(q.shape[1])])
    want, want_lse = with_sinks(want, want_lse, sinks)
    see = {name: of_rule[name] for name in ("causal", "window", "align") if name in of_rule}
    seen = oracle.visible(q.shape[2], k.shape[2], **see)
    hidden = ~(seen if mask is None else seen & mask).expand(len(q), q.shape[1], -1, -1)
    most = largest_of(q, k, scale, softcap, hidden)
    torch.testing.assert_close(largest, most, rtol=0 if not softcap else 5e-7, atol=0)
    eps = 2.0**-10 if q.dtype == F16 else 2.0**-7
    torch.testing.assert_close(out.double(), want, rtol=2 * eps, atol=eps)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-6, atol=2e-6)


def inputs(kernel, dtype, batch=1, heads=4, heads_kv=4, n_q=37, n_k=300):
    n_k = min(n_k, 50) if kernel.name == "short" else n_k
    q = small_integers(batch, heads, n_q, kernel.d, dtype=dtype, seed=1)
    k = small_integers(batch, heads_kv, n_k, kernel.d, dtype=dtype, seed=2)
    v = torch.randn(batch, heads_kv, n_k, kernel.d_v, generator=torch.Generator().manual_seed(3)).to(dtype)
    return q, k, k[..., : kernel.d_v] if kernel.name == "latent" else v


def everything(scale=0.05, softcap=0.0):
    return Rule(scale, softcap, Visibility(-1, -1, False))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
@by_kernel
def test_whole_rows_and_parts(kernel, dtype, parts):
    if parts > 1 and kernel.name in WITHOUT_PARTS:
        pytest.skip("all keys are in one tile")
    q, k, v = inputs(
        kernel, dtype, n_q=37 if dtype == F16 else 3, n_k=max(300, 2 * kernel.part_keys + 9 if parts > 1 else 0)
    )
    results = run(kernel, kernel.plan(dtype, parts), q, k, v, everything())
    check(results, q, k, v, {"scale": 0.05})


@pytest.mark.parametrize("parts", [1, 2])
@by_kernel
def test_rows_that_see_no_key_and_groups_that_share_tiles(kernel, parts):
    if kernel.name == "short" and parts > 1:
        pytest.skip("all keys are in one tile")
    tile_heads = 1 if kernel.name == "short" else 3
    q, k, v = inputs(kernel, F16, batch=2, heads=6, heads_kv=2, n_q=400 if kernel.name == "short" else 330, n_k=280)
    q, k, v = (x if kernel.d < 300 else x[:1] for x in (q, k, v))
    rule = Rule(0.05, 0.0, Visibility(100, 0, False))
    results = run(kernel, kernel.plan(F16, parts, tile_heads), q, k, v, rule)
    check(results, q, k, v, {"scale": 0.05, "causal": True, "window": (100, -1)})


@by_kernel
def test_masks_softcap_and_signs(kernel):
    if kernel.name in PLAIN:
        pytest.skip("the kernel has no rules")
    q, k, v = inputs(kernel, F16, n_q=20)
    mask = torch.rand(1, 4, 20, k.shape[2], generator=torch.Generator().manual_seed(5)) < 0.3
    mask[:, 1, 7:9] = False
    mask[:, 3] = False  # a head without a visible pair
    plan = kernel.plan(F16)
    for scale in (0.05, -0.05):
        check(run(kernel, plan, q, k, v, everything(scale), mask), q, k, v, {"scale": scale}, mask)
    check(run(kernel, plan, q, k, v, everything(0.05, 4.0), mask), q, k, v, {"scale": 0.05}, mask, 4.0)


@by_kernel
def test_packed_sequences_emulated(kernel):
    lengths = ((5, 40), (0, 9), (70, 0), (3, 50))  # (rows, keys)
    heads = 2
    rows, keys = (sum(x) for x in zip(*lengths, strict=True))
    spare = 4  # rows of no sequence
    q = small_integers(heads, rows + spare, kernel.d, dtype=F16, seed=1)
    k = small_integers(heads, keys, kernel.d, dtype=F16, seed=2)
    v = k[..., : kernel.d_v] if kernel.name == "latent" else torch.randn(heads, keys, kernel.d_v).to(F16)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in zip(*lengths, strict=True))
    offsets = cu_q, cu_k, 70, 50
    results = run(kernel, kernel.plan(F16), q, k, v, everything(), offsets=offsets)
    out, lse, largest = results
    for i, (n_q, n_k) in enumerate(lengths):
        of_q, of_k = slice(cu_q[i], cu_q[i] + n_q), slice(cu_k[i], cu_k[i] + n_k)
        q_i, k_i, v_i = q[None, :, of_q], k[None, :, of_k], v[None, :, of_k]
        if n_q and n_k:
            check((out[None, :, of_q], lse[None, :, of_q], largest[i : i + 1]), q_i, k_i, v_i, {"scale": 0.05})
        else:
            assert (out[:, of_q] == 0).all()
            assert torch.equal(lse[:, of_q], torch.tensor(SINKS[:heads])[:, None].expand(heads, n_q))
            assert (largest[i] == -math.inf).all()
    assert (out[:, rows:] == 0).all()
    assert (lse[:, rows:] == -math.inf).all()


@by_kernel
def test_sinks_change_no_bit_where_there_are_none(kernel, monkeypatch):
    q, k, v = inputs(kernel, BF16, n_q=9)
    plain = run(kernel, kernel.plan(BF16), q, k, v, everything(), sinks=False)
    monkeypatch.setattr("test_sinks_in_kernels.SINKS", (-math.inf,))
    results = run(kernel, kernel.plan(BF16), q, k, v, everything())
    assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))


@pytest.mark.parametrize("scale", [0.3, 1e-39], ids=["a-scale", "a-tiny-scale"])
@by_kernel
def test_tiles_with_a_little_more_than_those_before(kernel, scale):
    """The largest score is found to the last bit, whatever the order of row tiles, and however small the scale is."""
    if kernel.name in PLAIN and scale < 1e-30:
        pytest.skip("the kernel has no rules")
    q, k, v = (torch.zeros(1, 2, n, d, dtype=F16) for n, d in ((300, kernel.d), (40, kernel.d), (40, kernel.d_v)))
    q[..., 0] = k[..., 0] = 2048.0
    k[..., 1] = 1.0
    q[0, 0, :, 1] = torch.arange(300) // 100
    q[0, 1, :, 1] = -q[0, 0, :, 1]
    v = k[..., : kernel.d_v] if kernel.name == "latent" else v
    *_, largest = run(kernel, kernel.plan(F16), q, k, v, everything(scale), sinks=False)
    assert torch.equal(largest, largest_of(q, k, scale))


@pytest.mark.parametrize("size", [30.0, 1e6, 1e9])
@pytest.mark.parametrize("kernel", [KERNELS[1], KERNELS[8]], ids=["rows64", "fused"])
def test_sinks_as_large_as_scores(kernel, size, monkeypatch):
    """A sink that equals the only score has half of the denominator, but for the rounding of logits."""
    monkeypatch.setattr("test_sinks_in_kernels.SINKS", (size, -size))
    q, k, v = (torch.zeros(1, 2, n, 64, dtype=BF16) for n in (2, 1, 1))
    q[..., 0] = 1
    k[..., 0] = torch.tensor([1.0, -1.0])[:, None]
    v += 1
    out, lse, largest = run(kernel, kernel.plan(BF16), q, k, v, everything(size))
    sizes = torch.tensor([size, -size])[:, None]
    torch.testing.assert_close(out, torch.full_like(out, 0.5), rtol=0, atol=0.02 if size == 1e6 else 0)
    torch.testing.assert_close(lse[0], (sizes + math.log(2)).expand(2, 2))
    assert torch.equal(largest[0], sizes[:, 0])


@pytest.mark.parametrize("kind", [torch.float32, BF16, F16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kernel", [KERNELS[1], KERNELS[8]], ids=["rows64", "fused"])
def test_sinks_beside_additive_masks(kernel, kind, parts):
    q, k, v = inputs(kernel, F16, n_q=5, n_k=250)
    mask = torch.randn(1, 1, 5, k.shape[2], generator=torch.Generator().manual_seed(5)).to(kind)
    mask[..., 2, :] = -math.inf
    mask[..., 3, :] = -30000.0
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse, sinks = torch.empty(q.shape[:-1]), torch.tensor([1.5, -math.inf, -30000.0, 1e30])
    with emulate(kernel.arch):
        kernel.plan(F16, parts).forward(q, k, v, out, lse, mask, None, everything(), CAP, {}, sinks)
    want, want_lse = with_sinks(*oracle.attention(q, k, v, mask=mask, scale=0.05), sinks)
    torch.testing.assert_close(out.double(), want, rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@by_kernel
def test_calls_without_keys(kernel, packed):
    q, k, v = (torch.zeros(1, 2, n, d, dtype=F16) for n, d in ((5, kernel.d), (0, kernel.d), (0, kernel.d_v)))
    offsets = (torch.tensor([0, 3, 4]).int(), torch.zeros(3).int(), 2, 0) if packed else None
    of = (q[0], k[0], v[0]) if packed else (q, k, v)
    out, lse, largest = run(kernel, kernel.plan(F16), *of, everything(), offsets=offsets)
    belongs = torch.tensor([not packed or row in (0, 1, 3) for row in range(5)])
    want = torch.where(belongs, torch.tensor(SINKS[:2])[:, None], -math.inf)
    assert torch.equal(lse.reshape(2, 5), want)
    assert (out == 0).all()
    assert (largest == -math.inf).all()


def plan_of_8_bits(dtype: torch.dtype) -> Fp8Plan:
    of = "e4m3" if dtype == torch.float8_e4m3fn else "e5m2"
    return Fp8Plan(specs.ForwardWgmmaFp8(of, specs.FP8_COLUMNS[-1]))


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_8_bit_floats(dtype, softcap):
    kernel = Kernel("fp8", 64, 64, 0, "sm_90a")
    q, k = (small_integers(1, 4, n, 64, dtype=torch.float32, seed=n) for n in (70, 300))
    v = torch.randn(1, 2, 300, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    q, k = q.to(dtype), k[:, :2].to(dtype)
    scales = tuple(torch.full((1, heads, blocks), of) for heads, blocks, of in ((4, 1, 0.5), (2, 3, 0.25), (2, 3, 1.0)))
    out, lse = torch.empty(1, 4, 70, 64), torch.empty(1, 4, 70)
    largest, sinks = torch.full((1, 4), -math.inf), torch.tensor([1.5, -math.inf, 9.0, 1e30])
    rule = Rule(0.3, softcap, Visibility(-1, 0, True))
    with emulate(kernel.arch):
        plan_of_8_bits(dtype).forward_fp8(q, k, v, scales, out, lse, rule, CAP, {}, sinks, largest)
    q, k, v = q.double() * 0.5, k.double() * 0.25, v.double()
    hidden = ~oracle.visible(70, 300, causal=True, align="top_left")
    torch.testing.assert_close(largest, largest_of(q, k, 0.3, softcap, hidden), rtol=6e-7, atol=0)
    want = oracle.attention(q, k, v, scale=0.3, softcap=softcap, causal=True, align="top_left")
    want, want_lse = with_sinks(*want, sinks)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), want, rtol=0.15, atol=0.1)


def test_8_bit_rows_past_the_last_have_no_scores():
    """The rows of a tile that do not exist have products of 0, above all scores of those that do."""
    q, k = (torch.full((1, 2, n, 64), x).to(torch.float8_e4m3fn) for n, x in ((5, 1.0), (40, -1.0)))
    out, lse, largest = torch.empty(1, 2, 5, 64), torch.empty(1, 2, 5), torch.full((1, 2), -math.inf)
    with emulate("sm_90a"):
        plan = plan_of_8_bits(q.dtype)
        plan.forward_fp8(q, k, k, (None, None, None), out, lse, everything(0.25), CAP, {}, None, largest)
    torch.testing.assert_close(largest, torch.full((1, 2), -16.0), rtol=1e-6, atol=0)
