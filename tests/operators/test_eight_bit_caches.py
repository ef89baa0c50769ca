"""Tests caches of e4m3 numbers: attention of the numbers times their scales, on the reference path, in the emulator and on a GPU."""

import pages
import pytest
import torch
from ffpa_attn import env, explain, ffpa_varlen, ffpa_with_kvcache
from ffpa_attn.backends import dequantised, levels, row_tiles, triton_attention
from ffpa_attn.integrations.flash_api import flash_attn_with_kvcache
from ffpa_attn.launching import attention_call, native
from ffpa_attn.operators import again, forms, ops
from ffpa_attn.specs.spec import E4M3_SHAPES, ForwardMmaKeys, aot_specs
from ffpa_attn.testing import emulate

E4M3 = torch.float8_e4m3fn
CAUSAL = {"causal": True}
# (d, d_v, layout of the pool, rows of a page, rows of q, keys, heads, rule)
CASES = [
    (64, 48, "NHD", 16, (70, 1, 0, 30), (150, 200, 40, 130), (4, 2), CAUSAL),
    (128, 128, "interleaved", 48, (3, 1, 3, 40), (150, 600, 0, 129), (4, 2), {"softcap": 20.0, **CAUSAL}),
    (256, 256, "HND", 64, (4, 1), (700, 300), (8, 2), {"window": (100, 0)}),
    (512, 512, "beside", 16, (2, 1), (150, 300), (8, 2), CAUSAL),
    (576, 512, "latent", 32, (2, 1), (270, 300), (16, 1), CAUSAL),
    (1024, 1008, "NHD", 16, (3, 2), (150, 300), (2, 1), {"window": (70, 30), "align": "top_left"}),
]
UNALIGNED = (72, 40, "HND", 16, (3, 2), (70, 30), (4, 2), CAUSAL)


@pytest.fixture(autouse=True)
def no_plan_is_kept(monkeypatch):
    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(again, "_known", {})


def eight_bits(pool: pages.Pool) -> pages.Pool:
    """Returns a pool of e4m3; what nobody may read is NaN there, too, and V that is in K stays there."""
    if pool.k.data_ptr() == pool.v.data_ptr():
        k = pool.k.to(E4M3)
        return pool._replace(k=k, v=k[..., : pool.v.shape[-1]])
    return pool._replace(k=pool.k.to(E4M3), v=pool.v.to(E4M3))


def keys_of(pool: pages.Pool, k_scale, v_scale, dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the keys and values of each sequence; powers of two as scales leave them exact."""

    def times(x, scale):
        return (x.float() * scale.expand(x.shape[2])[:, None]).to(dtype)

    return pool._replace(k=times(pool.k, k_scale), v=times(pool.v, v_scale)).sequences()


def scales(kind: str, heads: int, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "of heads":
        both = torch.tensor([0.5, 2.0, 0.25, 1.0])[:heads], torch.tensor([4.0, 0.125, 1.0, 2.0])[:heads]
    else:
        both = torch.tensor(0.5), torch.tensor([2.0])
    return tuple(x.to(device) for x in both)


def attend(case, kind: str, dtype=torch.bfloat16, device="cpu", one_scale=False, **more):
    d, d_v, layout, rows, of_q, of_k, heads, rule = case
    pool = eight_bits(pages.make(of_k, rows, heads[1], d, d_v, layout, dtype=torch.bfloat16)).to(device)
    q, offsets = pages.queries(of_q, heads[0], d, dtype=dtype, device=device)
    q = torch.cat([q, q[:3]])  # the last rows belong to no sequence
    k_scale, v_scale = scales(kind, heads[1], device)
    v_scale = k_scale if one_scale else v_scale
    given = {"block_table": pool.table, "seqused_k": pool.used, "k_scale": k_scale, "v_scale": v_scale}
    out, lse = ffpa_varlen(
        q, pool.k, pool.v, offsets, None, max(of_q), max(of_k), return_lse=True, **given, **rule, **more
    )
    assert not out[-3:].any() and lse[:, -3:].isneginf().all()
    keys = keys_of(pool, k_scale, v_scale, dtype)
    for i, of_sequence in enumerate(keys):
        some = slice(int(offsets[i]), int(offsets[i + 1]))
        if not len(of_sequence[0]):
            assert not out[some].any() and lse[:, some].isneginf().all()
        elif some.start < some.stop:
            results = (q[some], of_sequence, out[some], lse[:, some])
            pages.assert_attends(*results, **rule)
    return next(reversed(ops._plans.values())).choice.plan


@pytest.mark.parametrize("kind", ["of heads", "of all"])
@pytest.mark.parametrize("case", [*CASES, UNALIGNED], ids=str)
def test_the_reference_path_dequantises(case, kind):
    attend(case, kind, torch.float16)


@pytest.fixture(params=["emulated", "cuda"])
def device(request):
    if request.param == "cuda" and (not torch.cuda.is_available() or native.record() is None):
        pytest.skip("needs a GPU, and kernels for it")
    return "cpu" if request.param == "emulated" else "cuda"


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_convert_on_the_way(case, rows, device, monkeypatch):
    """Rows 16 have instances of their own up to 512 columns."""
    if rows == 16 and case[1] > 512:
        pytest.skip("32 rows are the fewest there")
    monkeypatch.setattr(levels, "E4M3_SHAPES", [shape for shape in E4M3_SHAPES if shape.rows == rows])
    dtype = torch.bfloat16 if case[0] in (128, 512) else torch.float16
    monkeypatch.setenv("FFPA_BACKEND", "mma")
    if device == "cuda":
        plan = attend(case, "of heads", dtype, "cuda")
    else:
        with emulate("sm_80", seed=3):
            plan = attend(case, "of heads", dtype)
    assert plan.spec.e4m3 and plan.spec.rows == rows


# Where warps own keys: more tiles than lanes know runs of, sequences that some warps have nothing of, steps of K.
OWN_KEYS = [
    (128, 128, "HND", 16, (3, 1, 4), (4500, 1, 2200), (4, 2), {"sinks": True, **CAUSAL}),
    (96, 80, "interleaved", 80, (2, 1, 1), (33, 2100, 0), (8, 1), {"window": (2000, 0), "softcap": 10.0}),
    (320, 128, "NHD", 32, (1, 16), (700, 130), (2, 2), {"window": (150, 20), "align": "top_left"}),
    (64, 64, "NHD", 16, (1, 5), (900, 2900), (4, 1), {"scale": 2.0}),  # references move often
]


@pytest.mark.parametrize("most_parts, stages", [(1, 4), (64, 3), (64, 2)])
@pytest.mark.parametrize("case", OWN_KEYS, ids=str)
def test_warps_own_keys(case, most_parts, stages, device, monkeypatch):
    monkeypatch.setattr(levels, "E4M3_SHAPES", E4M3_SHAPES[:1])
    monkeypatch.setattr(row_tiles, "MOST_PARTS", most_parts)
    monkeypatch.setattr(levels, "_stages", lambda *_: [stages])
    monkeypatch.setattr(attention_call, "_floats", lambda n, device: torch.full((n,), torch.nan, device=device))
    monkeypatch.setenv("FFPA_BACKEND", "mma")
    rule = dict(case[-1])
    if rule.pop("sinks", False):
        rule["sinks"] = torch.linspace(-2, 5, case[6][0], device="cpu" if device == "emulated" else device)
    case = *case[:-1], rule
    if device == "cuda":
        plans = [attend(case, "of heads", device="cuda") for _ in range(2)]
    else:
        with emulate("sm_80", seed=most_parts):
            plans = [attend(case, "of heads")]
    for plan in plans:
        assert isinstance(plan.spec, ForwardMmaKeys) and plan.stages == stages
        assert (plan.splits > 1) == (most_parts > 1 and max(case[5]) > 2000)


@pytest.mark.parametrize("where", ["pages", "left padding"])
def test_own_keys_of_a_cache(where, device, monkeypatch):
    """Parts of short sequences have no keys, and nobody writes zeros for them before the call."""
    monkeypatch.setattr(attention_call, "_floats", lambda n, device: torch.full((n,), torch.nan, device=device))
    monkeypatch.setenv("FFPA_BACKEND", "mma")
    lengths = (2500, 300, 1)
    pool = eight_bits(pages.make(lengths, 2560 if where == "left padding" else 64, 2, 128, dtype=torch.bfloat16))
    pool = pool.to(device)
    q = torch.randn(3, 2, 4, 128, dtype=torch.bfloat16, device=device)
    call = {"cache_seqlens": pool.used, "causal": True, "return_lse": True, "scale": 0.3}
    keys = keys_of(pool, torch.ones((), device=device), torch.ones((), device=device), torch.bfloat16)
    if where == "pages":
        call["block_table"] = pool.table
    else:
        call |= {
            "cache_batch_idx": pool.table[:, 0].contiguous(),
            "cache_leftpad": torch.tensor([37, 0, 0]).int().to(device),
        }
        keys[0] = tuple(x[37:] for x in keys[0])
    if device == "cuda":
        out, lse = ffpa_with_kvcache(q, pool.k, pool.v, **call)
    else:
        with emulate("sm_80", seed=3):
            out, lse = ffpa_with_kvcache(q, pool.k, pool.v, **call)
    plan = next(reversed(ops._plans.values())).choice.plan
    assert isinstance(plan.spec, ForwardMmaKeys) and plan.splits > 1
    for i, of_sequence in enumerate(keys):
        pages.assert_attends(q[i], of_sequence, out[i], lse[i], causal=True, scale=0.3)


@pytest.mark.parametrize("d, heads", [(128, (32, 8)), (256, (32, 8)), (512, (32, 4)), (1024, (16, 2))])
def test_prompts_are_dequantised_and_few_rows_are_converted_on_the_way(d, heads, monkeypatch):
    monkeypatch.setattr(triton_attention, "why_not", lambda: None)

    def chosen(n_q: int, n_k: int, dtype=torch.bfloat16):
        q = torch.empty(8, n_q, heads[0], d, dtype=dtype, device="meta")
        pool = torch.empty(100, 64, heads[1], d, dtype=E4M3, device="meta")
        table, used = (torch.empty(8, *more, dtype=torch.int32, device="meta") for more in ((n_k // 64,), ()))
        given = {"block_table": table, "seqused_k": used, "causal": True, "arch": "sm_90"}
        return explain(q, pool, pool.clone(), **given)

    assert chosen(1, 8192).backend == chosen(8, 8192).backend == chosen(2, 128).backend == "mma"
    assert chosen(64, 8192).backend == chosen(8192, 8192).backend == chosen(512, 32768).backend == "hopper"
    assert "is estimated to take" in str(chosen(1, 8192))
    assert chosen(8192, 8192, torch.float16).backend == "mma"  # what scales make of numbers may be more than it holds


@pytest.mark.parametrize("kind", ["powers of two", "zeros", "the largest", "far apart"])
def test_rows_of_any_magnitude_meet_8_bit_keys(kind, monkeypatch):
    """A row of bfloat16 becomes float16 on its way to the products, whatever its numbers are."""
    monkeypatch.setenv("FFPA_BACKEND", "mma")
    pool = eight_bits(pages.make([200], 16, 1, 128, dtype=torch.bfloat16))
    q = torch.randn(5, 2, 128).bfloat16()
    factors = {"zeros": 0.0, "the largest": 2.0**120}.get(kind, 1.0)
    q *= torch.tensor(factors).bfloat16()
    if kind == "powers of two":
        q *= (2.0 ** torch.arange(-60, 60, 12).view(5, 2, 1)).bfloat16()
    if kind == "far apart":
        q[..., ::2] *= 2.0**-25
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    given = {"block_table": pool.table, "seqused_k": pool.used, "scale": 2.0**-100 if kind == "the largest" else 0.1}
    with emulate("sm_80", seed=3):
        out, lse = ffpa_varlen(q, pool.k, pool.v, offsets, None, 5, 200, return_lse=True, **given)
    of_sequence = keys_of(pool, torch.ones(()), torch.ones(()), torch.bfloat16)[0]
    pages.assert_attends(q, of_sequence, out, lse, scale=given["scale"])


@pytest.mark.parametrize("together", [1, 2, 8])
@pytest.mark.parametrize("case", [*CASES, UNALIGNED], ids=str)
def test_rows_are_dequantised_for_wgmma(case, together, device, monkeypatch):
    d, d_v, _, page_rows, of_q, of_k, (_, heads_kv), _ = case
    if together != 2 and d not in (64, 576):
        pytest.skip("one number of sequences is enough at most head dims")
    columns, of_pages = d if case[2] == "latent" else d + d_v, -(-max(of_k) // page_rows) * page_rows
    monkeypatch.setattr(dequantised, "_BYTES_HELD", 2**30 // (together * heads_kv * of_pages * columns))
    monkeypatch.setenv("FFPA_WORKSPACE_MB", "1024")
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    if device == "cuda":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a GPU of Hopper")
        plan = attend(case, "of heads", torch.float16, "cuda", one_scale=True)
    else:
        with emulate("sm_90a", seed=3):
            plan = attend(case, "of heads", torch.float16, one_scale=True)
    assert isinstance(plan, dequantised.DequantisedPlan) and plan.together == min(together, len(of_q))


@pytest.mark.parametrize("how", ["latents", "left padding", "no table", "appended"])
def test_where_dequantised_rows_are(how, device, monkeypatch):
    """Beside the reference path."""
    heads, d, d_v = (1, 576, 512) if how == "latents" else (2, 128, 128)
    layout = "latent" if how == "latents" else "NHD"
    pool = eight_bits(pages.make([40, 90], 16, heads, d, d_v, layout, more=4, spare=60, dtype=torch.bfloat16)).to(
        device
    )
    q = torch.randn(2, 3, 4, d, dtype=torch.float16, device=device)
    call = {"k_scale": 0.5, "v_scale": 0.5, "causal": True, "return_lse": True}
    if how in ("left padding", "no table"):
        cache = torch.randn(2, 150, 2, d, device=device).to(E4M3), torch.randn(2, 150, 2, d, device=device).to(E4M3)
        call["cache_seqlens"] = torch.tensor([50, 130], dtype=torch.int32, device=device)
        if how == "left padding":
            call["cache_leftpad"] = torch.tensor([7, 31], dtype=torch.int32, device=device)
        else:
            call["max_seqlen_k"] = 130
    else:
        cache = pool.k, pool.v
        call |= {"cache_seqlens": pool.used, "block_table": pool.table}
    if how == "appended":
        new = torch.randn(2, 3, 2, d, dtype=torch.float16, device=device)
        call |= {"k": new, "v": new.flip(0)}

    def run():
        return ffpa_with_kvcache(q, *cache, **call)

    monkeypatch.setenv("FFPA_BACKEND", "reference")
    want = run()
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    if device == "cuda":
        got = run()
    else:
        with emulate("sm_90a", seed=3):
            got = run()
    plan = next(reversed(ops._plans.values())).choice.plan
    assert isinstance(plan, dequantised.DequantisedPlan) and plan.values_in_keys == (how == "latents")
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.float(), y.float(), atol=4e-3, rtol=4e-3)


def test_pages_that_are_nowhere_are_dequantised_to_zeros(monkeypatch):
    monkeypatch.setattr(forms.Paged, "check_values", lambda *args: None)
    pool = eight_bits(pages.make([100], 16, 1, 128, dtype=torch.bfloat16))
    zeros = pool.clone()
    for entry, page in ((1, -1), (3, 2**31 - 1), (4, len(pool.k))):
        zeros.k.view(torch.uint8)[zeros.table[0, entry]] = zeros.v.view(torch.uint8)[zeros.table[0, entry]] = 0
        pool.table[0, entry] = page
    q, offsets = pages.queries([5], 2, 128, dtype=torch.float16)
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    with emulate("sm_90a", seed=3):
        outs = [
            ffpa_varlen(q, x.k, x.v, offsets, None, 5, 100, block_table=x.table, seqused_k=x.used, causal=True)
            for x in (pool, zeros)
        ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("splits", [1, 3])
def test_parts_of_keys(splits, device, monkeypatch):
    monkeypatch.setattr(
        levels.row_tiles, "fastest_parts", lambda *args: (1.0, levels.row_tiles.Parts(splits, 256 if splits > 1 else 0))
    )
    case = (128, 128, "NHD", 64, (1, 2), (900, 500), (4, 2), CAUSAL)
    if device == "cuda":
        plan = attend(case, "of heads", torch.float16, "cuda", sinks=None)
    else:
        monkeypatch.setenv("FFPA_BACKEND", "mma")
        with emulate("sm_80", seed=3):
            plan = attend(case, "of heads", torch.float16)
    assert plan.splits == splits


def test_nan_in_a_key_is_nan():
    """The only NaN of e4m3 becomes one of 16 bits, and not 480."""
    pool = eight_bits(pages.make([40], 16, 1, 128, dtype=torch.bfloat16))
    pool.v.view(torch.uint8)[pool.table[0, 1], 3, 0, 5] = 0x7F
    q, offsets = pages.queries([2], 2, 128)
    given = {"block_table": pool.table, "seqused_k": pool.used}
    with emulate("sm_80", seed=3):
        out = ffpa_varlen(q, pool.k, pool.v, offsets, None, 2, 40, **given)
    assert out[..., 5].isnan().all() and not out[..., 6].isnan().any()


# ---- rows that are appended ----


@pytest.mark.parametrize(
    "d, layout, how",
    [(128, "NHD", "reference"), (128, "NHD", "emulated"), (72, "HND", "reference"), (64, "latent", "emulated")],
)
@pytest.mark.parametrize("already", [False, True])
def test_new_rows_are_rounded(d, layout, how, already):
    pool = eight_bits(pages.make([20, 5], 16, 2, d, 48 if layout == "latent" else d, layout, more=7))
    before, d_v = pool.k.float(), pool.v.shape[-1]
    new = torch.randn(2, 3, 2, d, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2)) * 30
    new[0, 0, 0, 0], new[1, 1, 1, 2] = 1e6, torch.nan
    k_scale, v_scale = torch.tensor([0.5, 2.0]), torch.tensor([0.5, 2.0])
    k, v = (new, new[..., :d_v]) if layout == "latent" else (new, new.flip(0)[..., :d_v].contiguous())
    stored = [(x.float() / scale[:, None]).clamp(-448, 448).to(E4M3) for x, scale in ((k, k_scale), (v, v_scale))]
    if already:
        k, v = stored[0], stored[0][..., :d_v] if layout == "latent" else stored[1]
    q = torch.randn(2, 3, 4, d, dtype=torch.bfloat16)
    call = {"cache_seqlens": pool.used, "block_table": pool.table, "k_scale": k_scale, "v_scale": v_scale}
    if how == "emulated":
        with emulate("sm_80", seed=3):
            ffpa_with_kvcache(q, pool.k, pool.v, k, v, causal=True, **call)
    else:
        ffpa_with_kvcache(q, pool.k, pool.v, k, v, causal=True, **call)
    for i, n in enumerate(pool.used.tolist()):
        for j in range(3):
            at = pool.table[i, (n + j) // 16], (n + j) % 16
            for x, want in ((pool.k, stored[0]), (pool.v, stored[0] if layout == "latent" else stored[1])):
                assert torch.equal(x[at].view(torch.uint8), want[i, j][..., : x.shape[-1]].view(torch.uint8))
    untouched = pool.k.float()
    assert (before.isnan() | (untouched == before)).all()


def test_numbers_as_scales():
    pool = eight_bits(pages.make([20], 16, 1, 64))
    q = torch.randn(1, 1, 2, 64, dtype=torch.bfloat16)
    call = {"cache_seqlens": pool.used, "block_table": pool.table}
    out = ffpa_with_kvcache(q, pool.k, pool.v, k_scale=0.5, v_scale=2, **call)
    want = ffpa_with_kvcache(q, pool.k, pool.v, k_scale=torch.tensor(0.5), v_scale=torch.tensor([2.0]), **call)
    assert torch.equal(out, want)


def test_under_the_names_of_flash_attn():
    pool = eight_bits(pages.make([20, 7], 16, 2, 64))
    q = torch.randn(2, 1, 4, 64, dtype=torch.bfloat16)
    k_scale, v_scale = scales("of heads", 2)
    call = {"cache_seqlens": pool.used, "block_table": pool.table, "causal": True}
    want = ffpa_with_kvcache(q, pool.k, pool.v, k_scale=k_scale, v_scale=v_scale, **call)
    out = flash_attn_with_kvcache(q, pool.k, pool.v, k_descale=k_scale.expand(2, 2), v_descale=v_scale, **call)
    assert torch.equal(out, want)


def test_scales_that_are_general_are_not_rounded():
    """A scale in 16 bits would move scores of large products."""
    pool = eight_bits(pages.make([300], 16, 1, 128, dtype=torch.bfloat16))
    q = torch.randn(1, 1, 1, 128, dtype=torch.float16) * 20
    scale = torch.tensor([1.2345678])
    call = {"cache_seqlens": pool.used, "block_table": pool.table, "k_scale": scale, "return_lse": True}
    keys = pool.sequences()[0][0].double()[:, 0]
    want = (keys @ q.double().flatten() * scale.double() * 128**-0.5).logsumexp(0)
    for arch in (None, "sm_80"):
        if arch is None:
            _, lse = ffpa_with_kvcache(q, pool.k, pool.v, **call)
        else:
            with emulate(arch, seed=3):
                _, lse = ffpa_with_kvcache(q, pool.k, pool.v, **call)
        assert abs(lse.item() - want.item()) < 1e-4 * abs(want.item())


# ---- bad input ----


def _call(**changed):
    pool = eight_bits(pages.make([20], 16, 2, 64))
    args = {"q": torch.randn(1, 1, 2, 64, dtype=torch.bfloat16), "k_cache": pool.k, "v_cache": pool.v}
    args |= {"cache_seqlens": pool.used, "block_table": pool.table}
    return ffpa_with_kvcache(**(args | changed))


_16_BITS = torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)
BAD = [
    (TypeError, "`v_cache` has dtype torch.bfloat16 but `k_cache`", {"v_cache": torch.zeros_like(_16_BITS).repeat(2, 1, 1, 1)[:5]}),
    (TypeError, "`k_cache` has dtype torch.float8_e5m2", {"k_cache": torch.zeros(5, 16, 2, 64).to(torch.float8_e5m2)}),
    (ValueError, r"`k_scale` has shape \(3,\)", {"k_scale": torch.ones(3)}),
    (ValueError, "`v_scale` holds", {"v_scale": torch.tensor([1.0, -1.0])}),
    (ValueError, "`v_scale` holds", {"v_scale": torch.inf}),
    (TypeError, "`k_scale` has dtype torch.float64", {"k_scale": torch.ones(2).double()}),
    (TypeError, "`k_scale` is 'x'|`k_scale` is a str|`k_scale` is", {"k_scale": "x"}),
    (TypeError, "`q` has dtype torch.float8_e4m3fn", {"q": torch.zeros(1, 1, 2, 64).to(E4M3)}),
    (ValueError, "`k_scale` is given but `k_cache` has dtype torch.bfloat16",
     {"k_cache": _16_BITS, "v_cache": _16_BITS.clone(), "k_scale": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize("error, message, changed", BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input_is_named(error, message, changed):
    with pytest.raises(error, match=message):
        _call(**changed)


def test_scales_without_pages_are_refused():
    q = torch.randn(3, 2, 64, dtype=torch.bfloat16)
    cu = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="`k_scale` is given without `block_table`"):
        ffpa_varlen(q, q, q, cu, cu, 3, 3, k_scale=0.5)


def test_the_operator_has_a_fake():
    pool = eight_bits(pages.make([20], 16, 2, 64))
    q = torch.randn(1, 1, 2, 64, dtype=torch.bfloat16)
    args = q, pool.k, pool.v, None, pool.used, pool.table, None, None, 0, 1, 20, None, torch.ones(2), torch.ones(1)
    torch.library.opcheck(torch.ops.ffpa_attn.paged_forward.default, args, test_utils="test_faketensor")


def test_all_shapes_are_in_a_wheel():
    built = {(spec.columns, spec.rows) for spec in aot_specs(env.all_flags()) if getattr(spec, "e4m3", False)}
    assert built == {shape[:2] for shape in E4M3_SHAPES}
