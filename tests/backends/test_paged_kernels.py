"""Tests the wgmma forwards that read keys in pages: each gives what the same kernel gives for packed keys, to the bit."""

from contextlib import nullcontext
from itertools import accumulate

import pages
import pytest
import torch
from ffpa_attn import env, ffpa_varlen, ffpa_with_kvcache
from ffpa_attn.backends import fused, levels, row_tiles, two_phase
from ffpa_attn.launching import attention_call, native
from ffpa_attn.operators import forms, ops
from ffpa_attn.specs.problem import E4M3, Problem, Visibility
from ffpa_attn.specs.spec import (
    ForwardMmaRows,
    ForwardMmaSplit,
    ForwardWgmmaFused,
    ForwardWgmmaLatent,
    ForwardWgmmaPair,
    ForwardWgmmaTwoPhase,
    aot_specs,
)
from ffpa_attn.testing import emulate
from test_fused import plan_tiles

CAUSAL = {"causal": True}
FAMILIES = ForwardWgmmaFused, ForwardWgmmaPair, ForwardWgmmaLatent, ForwardWgmmaTwoPhase
# (d, d_v, layout of the pool, rows of a page, rows of q, keys, heads, rule): pages of each size, and lengths that end anywhere.
CASES = [
    (64, 64, "NHD", 16, (70, 1, 0, 130), (150, 200, 40, 130), (4, 2), CAUSAL),
    (128, 128, "HND", 48, (70, 1, 3, 130), (150, 300, 0, 129), (4, 2), CAUSAL),
    (128, 128, "interleaved", 64, (70, 1), (350, 300), (4, 2), {"window": (100, 0)}),
    (192, 128, "beside", 16, (40, 2), (150, 300), (2, 1), {"window": (30, 9), "align": "top_left"}),
    (256, 256, "NHD", 256, (40, 2), (150, 300), (2, 1), {"softcap": 20.0, **CAUSAL}),
    (256, 200, "HND", 16, (40, 2), (150, 300), (2, 1), CAUSAL),
    (320, 320, "NHD", 32, (40, 2), (150, 300), (2, 1), CAUSAL),
    (384, 384, "beside", 16, (40, 2), (150, 300), (2, 1), CAUSAL),
    (512, 512, "interleaved", 16, (40, 2, 0), (150, 300, 20), (2, 1), CAUSAL),
    (512, 328, "HND", 32, (140, 2), (350, 300), (2, 1), {}),
    (512, 512, "NHD", 64, (140, 2), (350, 300), (2, 1), {"window": (70, 0)}),
    (576, 512, "NHD", 16, (40, 2), (150, 300), (2, 1), CAUSAL),
    (576, 512, "latent", 16, (4, 2, 1), (150, 300, 64), (16, 1), CAUSAL),
    (512, 512, "latent", 64, (4, 2, 1), (150, 300, 63), (16, 1), CAUSAL),
    (640, 640, "NHD", 16, (70, 2), (150, 300), (2, 1), CAUSAL),
    (640, 640, "HND", 16, (3, 20), (850, 700), (2, 1), {}),
    (1024, 1000, "HND", 48, (70, 2), (650, 600), (2, 1), {"window": (100, 30)}),
]


@pytest.fixture(params=["emulated", "cuda"])
def device(request, monkeypatch, no_short_forward):
    if request.param == "cuda":
        if not torch.cuda.is_available() or native.record() is None or torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a GPU of Hopper, and kernels for it")
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    return "cpu" if request.param == "emulated" else "cuda"


def attend(device: str, pool: pages.Pool, q, offsets, max_q: int, rule, dtype=torch.float16):
    """Returns (out, LSE) of keys in pages, (out, LSE) of the same keys packed, and the paged kernel."""
    lengths = pool.used.tolist()
    keys = pool.sequences()
    k, v = (torch.cat(parts) for parts in zip(*keys, strict=True))
    of_latents = pool.k.data_ptr() == pool.v.data_ptr()
    cu_k = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    pool, (q, offsets, k) = pool.to(device), (x.to(device) for x in (q, offsets, k))
    v = k[..., : v.shape[-1]] if of_latents else v.to(device)
    of_pages = {"block_table": pool.table, "seqused_k": pool.used}
    max_k = max(lengths)

    def both():
        paged = ffpa_varlen(q, pool.k, pool.v, offsets, None, max_q, max_k, return_lse=True, **of_pages, **rule)
        plan = next(reversed(ops._plans.values())).choice.plan
        return paged, ffpa_varlen(q, k, v, offsets, cu_k, max_q, max_k, return_lse=True, **rule), plan

    if device == "cuda":
        return both()
    with emulate("sm_90a", seed=3):
        return both()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}-pages{c[3]}")
def test_pages_give_the_bits_of_packed_keys(case, parts, device, monkeypatch):
    d, d_v, layout, rows, of_q, of_k, heads, rule = case
    plan_tiles(monkeypatch, shared=parts > 1, count=parts)
    if parts == 1:
        monkeypatch.setattr(two_phase, "_parts", lambda *args: (1.0, row_tiles.Parts()))
    pool = pages.make(of_k, rows, heads[1], d, d_v, layout, shared=True, dtype=torch.float16)
    q, offsets = pages.queries(of_q, heads[0], d, dtype=torch.float16)
    (out, lse), (want, want_lse), plan = attend(device, pool, q, offsets, max(of_q), rule)
    assert plan.spec.paged and isinstance(plan.spec, FAMILIES)
    assert isinstance(plan.spec, ForwardWgmmaLatent) == (layout == "latent")
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("layout, d", [("NHD", 128), ("NHD", 512), ("latent", 576), ("NHD", 640)])
def test_parts_without_keys_leave_sums_of_zero(layout, d, device, monkeypatch):
    """Most parts have no keys, and end before the warps that multiply hear of them; results begin as NaN."""
    plan_tiles(monkeypatch, shared=True, count=6)
    six = row_tiles.cut_keys(2, 700, Visibility(-1, 0, False), 32, 128, 6)
    monkeypatch.setattr(two_phase, "_parts", lambda *args: (1.0, six))
    monkeypatch.setattr(attention_call, "_floats", lambda count, device: torch.full((count,), torch.nan, device=device))
    heads_kv, d_v = (1, 512) if layout == "latent" else (2, d)
    pool = pages.make((700, 3, 0, 130, 64, 1), 64, heads_kv, d, d_v, layout, dtype=torch.float16)
    q, offsets = pages.queries((2,) * 6, 4, d, dtype=torch.float16)
    (want, want_lse), _, plan = attend(device, pool, q, offsets, 2, CAUSAL)
    pool, q = pool.to(device), q.to(device).view(6, 2, 4, d)
    lengths = {"cache_seqlens": pool.used, "max_seqlen_k": 700, "block_table": pool.table}
    with emulate("sm_90a", seed=5) if device == "cpu" else nullcontext():
        out, lse = ffpa_with_kvcache(q, pool.k, pool.v, **lengths, causal=True, return_lse=True)
    assert plan.parts.count == 6 and plan.spec.paged
    assert torch.equal(out.flatten(0, 1), want) and torch.equal(lse.transpose(0, 1).flatten(1), want_lse)


@pytest.mark.parametrize("rows", [16, 64])
def test_latent_vectors_under_a_window(rows, device, monkeypatch):
    """In pages their tiles begin elsewhere than packed, so that sums differ in their order."""
    plan_tiles(monkeypatch, shared=False, count=1)
    pool = pages.make((300, 421), rows, 1, 576, 512, "latent", dtype=torch.float16)
    q, offsets = pages.queries((3, 20), 16, 576, dtype=torch.float16)
    (out, lse), (want, want_lse), plan = attend(device, pool, q, offsets, 20, {"window": (100, 0)})
    assert isinstance(plan.spec, ForwardWgmmaLatent) and plan.spec.paged
    assert torch.allclose(out.float(), want.float(), atol=2e-3) and torch.allclose(lse, want_lse, atol=1e-4)


@pytest.mark.parametrize("d, layout", [(128, "NHD"), (512, "HND"), (512, "latent"), (640, "NHD")])
def test_pages_that_are_nowhere_count_as_zeros(d, layout, device, monkeypatch):
    """The emulator faults where a kernel touches what is no tensor's."""
    monkeypatch.setattr(forms.Paged, "check_values", lambda *args: None)
    plan_tiles(monkeypatch, shared=False, count=1)
    pool = pages.make((100, 200), 16, 1, d, None, layout, dtype=torch.float16)
    q, offsets = pages.queries((3, 70), 4, d, dtype=torch.float16)
    for entry, page in ((1, -1), (4, len(pool.k)), (6, 2**31 - 1), (9, -(2**31))):
        pool.table[1, entry] = page
    zeros, table = pool.clone(), pool.table.clone()
    extended = [torch.cat([x, torch.zeros_like(x[:1])]) for x in (zeros.k, zeros.v)]
    in_pool = (table >= 0) & (table < len(pool.k))
    of_zeros = pages.Pool(*extended, torch.where(in_pool, table, len(pool.k)), pool.used)
    (out, lse), *_ = attend_pages(device, pool, q, offsets, 70)
    (want, want_lse), *_ = attend_pages(device, of_zeros, q, offsets, 70)
    if layout == "latent":  # a copy of the pool has V of its own, and another kernel
        assert torch.allclose(out.float(), want.float(), atol=2e-3) and torch.allclose(lse, want_lse, atol=1e-4)
    else:
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("backend", ["hopper", "mma"])
@pytest.mark.parametrize("d, layout", [(128, "NHD"), (320, "HND"), (512, "HND"), (576, "latent"), (640, "NHD")])
def test_pages_before_a_window_may_be_anything(d, layout, backend, device, monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", backend)
    plan_tiles(monkeypatch, shared=False, count=1)
    pool = pages.make((300, 420), 16, 1, d, 512 if d == 576 else d, layout, dtype=torch.float16)
    q, offsets = pages.queries((1, 5), 2, d, dtype=torch.float16)
    rule = {"window": (70, 0)}
    (want, want_lse), _ = attend_pages(device, pool, q, offsets, 5, **rule)
    for sequence, first in ((0, 299 - 70), (1, 415 - 70)):  # the first keys that rows see
        for entry in range(first // 16):
            for x in (pool.k, pool.v):
                x[pool.table[sequence, entry]] = torch.nan
            if entry % 2:
                pool.table[sequence, entry] = pages.ANYTHING[entry // 2 % len(pages.ANYTHING)]
    (out, lse), _ = attend_pages(device, pool, q, offsets, 5, **rule)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def attend_pages(device: str, pool: pages.Pool, q, offsets, max_q: int, max_k: int | None = None, **rule):
    pool, (q, offsets) = pool.to(device), (x.to(device) for x in (q, offsets))
    max_k = int(pool.used.max()) if max_k is None else max_k
    call = q, pool.k, pool.v, offsets, None, max_q, max_k
    options = {"block_table": pool.table, "seqused_k": pool.used, "return_lse": True, **rule}
    if device == "cuda":
        return ffpa_varlen(*call, **options), None
    with emulate("sm_90a", seed=3):
        return ffpa_varlen(*call, **options), None


@pytest.mark.parametrize("d", [128, 512])
def test_lengths_beyond_what_is_there_are_cut(d, device, monkeypatch):
    """Lengths count as clamped to [0, max_seqlen_k], which is cut to what a table's pages hold."""
    monkeypatch.setattr(forms.Paged, "check_values", lambda *args: None)
    plan_tiles(monkeypatch, shared=False, count=1)
    pool = pages.make((100, 96), 16, 1, d, None, dtype=torch.float16)
    pool = pool._replace(table=pool.table[:, :6].contiguous())
    q, offsets = pages.queries((3, 5), 2, d, dtype=torch.float16)
    (want, _), _ = attend_pages(device, pool._replace(used=torch.tensor([96, 0], dtype=torch.int32)), q, offsets, 5, 96)
    odd = pool._replace(used=torch.tensor([2**31 - 1, -5], dtype=torch.int32))
    (out, _), _ = attend_pages(device, odd, q, offsets, 5, 10**6)
    assert torch.equal(out, want) and not out[3:].any()


def test_each_family_has_instances_for_pages():
    specs = [spec for spec in aot_specs(env.all_flags()) if getattr(spec, "paged", False)]
    assert {type(spec) for spec in specs} == {*FAMILIES, ForwardMmaRows, ForwardMmaSplit}


# How much longer than the fastest number of parts these take, measured on an H200 (one row, ragged lengths up to the longest):
# (D, kind of cache, sequences, longest): {parts: factor}. A number that is not here is judged by the nearest one that is.
SLOWER = {
    (128, None, 8, 131072): {2: 1.18, 4: 1.26, 6: 1.01, 8: 1.09, 10: 1.0, 12: 1.05, 16: 1.03, 24: 1.01, 32: 1.0, 64: 1.01},
    (128, None, 16, 32768): {1: 1.32, 2: 1.16, 4: 1.05, 8: 1.0, 12: 1.0, 16: 1.0, 24: 1.02, 32: 1.04, 64: 1.17},
    (128, None, 64, 4096): {1: 1.04, 2: 1.01, 3: 1.0, 4: 1.02, 6: 1.07, 8: 1.15, 12: 1.28},
    (256, None, 256, 4096): {1: 1.0, 2: 1.02, 4: 1.03, 8: 1.07, 12: 1.12, 16: 1.24},
    (512, None, 4, 32768): {4: 1.18, 5: 1.06, 6: 1.0, 8: 1.22, 10: 1.11, 12: 1.04, 16: 1.08, 32: 1.12, 64: 1.26},
    (512, None, 8, 131072): {4: 1.32, 6: 1.04, 8: 1.12, 10: 1.0, 12: 1.08, 16: 1.04, 24: 1.02, 32: 1.02, 48: 1.03, 64: 1.06},
    (512, None, 16, 32768): {1: 1.36, 2: 1.16, 4: 1.04, 8: 1.0, 12: 1.01, 16: 1.03, 24: 1.06, 32: 1.1, 64: 1.33},
    (576, None, 8, 32768): {8: 1.23, 10: 1.08, 12: 1.0, 16: 1.26, 24: 1.17, 32: 1.22, 48: 1.32},
    (576, None, 16, 32768): {4: 1.35, 5: 1.15, 6: 1.0, 8: 1.19, 10: 1.25, 12: 1.11, 24: 1.15, 32: 1.21},
    (576, None, 32, 4096): {1: 1.6, 2: 1.15, 3: 1.0, 4: 1.13, 6: 1.1, 8: 1.18, 12: 1.31},
    (128, E4M3, 16, 32768): {4: 1.4, 6: 1.38, 8: 1.13, 10: 1.02, 12: 1.01, 16: 1.0, 32: 1.01, 64: 1.16},
    (512, E4M3, 4, 32768): {16: 1.17, 20: 1.09, 24: 1.0, 32: 1.22, 40: 1.23, 48: 1.11},
    (512, E4M3, 8, 131072): {8: 1.4, 10: 1.15, 12: 1.0, 16: 1.37, 20: 1.22, 24: 1.06, 32: 1.13, 40: 1.01, 64: 1.04},
    (512, E4M3, 64, 4096): {1: 1.23, 2: 1.12, 3: 1.11, 4: 1.01, 6: 1.0, 8: 1.03, 12: 1.03, 16: 1.2},
}  # fmt: skip
HEADS = {128: (32, 8), 256: (32, 8), 512: (32, 4), 576: (128, 1)}


@pytest.mark.parametrize("cell", SLOWER, ids=lambda cell: "-".join(map(str, cell)))
def test_parts_of_sequences_of_unknown_lengths_are_among_the_fastest(cell):
    d, cache, batch, longest = cell
    p = Problem(
        "forward", "cuda", "sm_90", "bf16", batch, *HEADS[d], 1, longest, d, min(d, 512), None, Visibility(-1, 0, False), d**-0.5,
        0.0, None, False, None, "f32", None, values_in_keys=d == 576, pages=(64, longest // 64), cache=cache,
    )  # fmt: skip
    plan = (levels if cache else fused).plan(p, env.run_flags())
    parts = plan.splits if cache else plan.parts.count
    nearest = min(SLOWER[cell], key=lambda count: abs(count - parts) / count)
    assert SLOWER[cell][nearest] <= 1.06


def decoding_of_one(d: int, longest: int, window: int = -1) -> Problem:
    return Problem(
        "forward", "cuda", "sm_90", "bf16", 1, *HEADS[d], 1, longest, d, min(d, 512), None, Visibility(window, 0, False), d**-0.5,
        0.0, None, False, None, "f32", None, values_in_keys=d == 576, pages=(64, longest // 64),
    )  # fmt: skip


@pytest.mark.parametrize("d", HEADS)
def test_one_sequence_far_below_its_bound_is_read_by_several_blocks(d):
    """A CUDA graph holds the bound of the longest context; at 1/16 of it, 16 parts would leave one with keys."""
    p = decoding_of_one(d, 1 << 17)
    paged, packed = (fused.plan(x, env.run_flags()) for x in (p, p._replace(pages=None)))
    assert paged.parts.keys <= p.n_k // 32
    pace = fused._pace(p, paged.spec)
    paged_us, packed_us = (row_tiles.microseconds(p, pace, x.tile_heads, x.parts) for x in (paged, packed))
    assert paged_us <= 1.03 * packed_us


@pytest.mark.parametrize("batch", [1, 2, 70000])
@pytest.mark.parametrize("keys", [0, 1, 63, 64, 200])
def test_few_keys_or_none_have_an_estimate(keys, batch):
    for d in HEADS:
        p = decoding_of_one(d, keys)._replace(batch=batch, pages=(64, 4))
        for window in (-1, 0, 100):
            plan = fused.plan(p._replace(visibility=Visibility(window, 0, False)), env.run_flags())
            assert 0 < plan.microseconds < batch * 1e3


def test_windows_are_cut_as_they_see():
    """Most sequences are longer than a narrow window, so pages and tensors are cut alike."""
    p = decoding_of_one(256, 1 << 17, window=1023)._replace(batch=8)
    paged, packed = (fused.plan(x, env.run_flags()) for x in (p, p._replace(pages=None)))
    assert (paged.parts, paged.microseconds) == (packed.parts, packed.microseconds)
