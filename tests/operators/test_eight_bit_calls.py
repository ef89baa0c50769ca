"""Tests calls with caches of e4m3 in float64, on the reference path: scales of any kind, and rows however they lie."""

import pages
import pytest
import torch
from ffpa_attn import ffpa_with_kvcache
from ffpa_attn.testing import emulate

E4M3 = torch.float8_e4m3fn
OPS = torch.ops.ffpa_attn


def pool_of(lengths=(40, 5), heads=2, d=64, d_v=None, layout="NHD", more=4, finite=False) -> pages.Pool:
    pool = pages.make(lengths, 16, heads, d, d_v, layout, more=more)
    fill = torch.nan_to_num if finite else torch.clone
    k = fill(pool.k).to(E4M3)
    if layout == "latent":
        return pool._replace(k=k, v=k[..., : pool.v.shape[-1]])
    return pool._replace(k=k, v=fill(pool.v).to(E4M3))


def where(pool: pages.Pool) -> dict:
    return {"cache_seqlens": pool.used, "block_table": pool.table}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def times(x: torch.Tensor, scale) -> torch.Tensor:
    return x.double() if scale is None else x.double() * torch.as_tensor(scale).double().reshape(-1, 1)


def in_float64(q, k, v, causal=False, window=None, softcap=0.0, sinks=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention of one sequence and its LSE: q [n, Hq, D], k [n_k, Hkv, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    seen = (behind >= 0) if causal or window else torch.ones_like(behind, dtype=torch.bool)
    if window:
        seen &= behind <= window[0]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1)[..., : len(k)], v), scores.logsumexp(-1)


def assert_attends(pool: pages.Pool, q, out, lse, k_scale, v_scale, **rule) -> None:
    """An output of 16 bits is rounded once; nothing else is."""
    for i, (k, v) in enumerate(pool.sequences()):
        want, of_lse = in_float64(q[i], times(k.float(), k_scale), times(v.float(), v_scale), **rule)
        assert out.dtype == q.dtype
        assert (out[i].double() - want).abs().max() < 1e-3 * want.abs().max()
        assert (lse[i].double() - of_lse).abs().max() < 1e-4


OF_HEADS = torch.tensor([0.3137, 1.7, 0.09, 0.77])
SCALES = {
    "none": lambda heads: (None, None),
    "numbers": lambda heads: (0.3137, 1.7),
    "of heads": lambda heads: (OF_HEADS[:heads], OF_HEADS.flip(0)[:heads]),
    "one alone": lambda heads: (torch.tensor([1.3]), None),
    "strided": lambda heads: (OF_HEADS.repeat_interleave(2)[::2][:heads], torch.tensor(0.77).expand(heads)),
}
RULES = [
    {"causal": True},
    {"window": (7, 0)},
    {"softcap": 5.0},
    {"causal": True, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize(
    "d, d_v, heads, layout", [(64, 48, 2, "NHD"), (72, 40, 2, "HND"), (320, 320, 4, "beside"), (576, 512, 1, "latent")]
)
def test_scales_are_exact(d, d_v, heads, layout, kind, rule):
    pool, (k_scale, v_scale) = pool_of(heads=heads, d=d, d_v=d_v, layout=layout), SCALES[kind](heads)
    q = torch.randn(2, 3, 4, d, dtype=torch.float16)
    call = where(pool) | rule | {"k_scale": k_scale, "v_scale": v_scale, "return_lse": True}
    out, lse = ffpa_with_kvcache(q, pool.k, pool.v, **call)
    assert_attends(pool, q, out, lse, k_scale, v_scale, **rule)


@pytest.mark.parametrize("already", [False, True])
def test_latents_are_rounded_as_keys(already):
    """Strides of a dim of one may differ: V is in K all the same."""
    k_pages = torch.zeros(4, 16, 1, 576).to(E4M3)
    v_pages = k_pages.as_strided((4, 16, 1, 512), (16 * 576, 576, 512, 1))
    q, new = torch.randn(1, 2, 2, 576).half(), torch.randn(1, 2, 1, 576).half()
    want = (new.float() / 0.5).to(E4M3)
    new = want if already else new
    pool = pages.Pool(k_pages, v_pages, torch.tensor([[1, 2]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    scales = {"k_scale": 0.5, "v_scale": 4.0}
    out, lse = ffpa_with_kvcache(
        q, k_pages, v_pages, new, new[..., :512], **where(pool), **scales, causal=True, return_lse=True
    )
    assert torch.equal(bits(k_pages[1, :2]), bits(want[0]))
    assert_attends(pool._replace(used=pool.used + 2), q, out, lse, 0.5, 4.0, causal=True)


def _columns_last():
    return [torch.randn(5, 16, 64, 1).to(E4M3).transpose(2, 3) for _ in range(2)], [0, 1]


def _one_odd_page():
    def page():
        return torch.randn(16 * 128 + 1).to(E4M3).as_strided((1, 16, 2, 64), (16 * 128 + 1, 128, 64, 1))

    return [page(), page()], [0]


def _odd_start():
    memory = torch.zeros(5 * 16 * 2 * 64 + 3, dtype=torch.uint8).view(E4M3)
    return [memory[3:].view(5, 16, 2, 64), torch.randn(5, 16, 2, 64).to(E4M3)], [3, 1]


@pytest.mark.parametrize("already", [False, True])
@pytest.mark.parametrize("made", [_columns_last, _one_odd_page, _odd_start], ids=lambda f: f.__name__)
def test_where_rows_are_written(made, already):
    (k_pages, v_pages), table = made()
    heads, used = k_pages.shape[2], torch.tensor([6], dtype=torch.int32)
    table = torch.tensor([table], dtype=torch.int32)
    new = [torch.randn(1, 3, 64, heads).half().transpose(2, 3) for _ in range(2)]
    stored = [(x.float() / scale).to(E4M3) for x, scale in zip(new, (0.5, 0.3), strict=True)]
    pool, q = pages.Pool(k_pages, v_pages, table, used), torch.randn(1, 3, 2, 64).half()
    call = where(pool) | {"k_scale": 0.5, "v_scale": 0.3, "causal": True, "return_lse": True}
    out, lse = ffpa_with_kvcache(q, k_pages, v_pages, *(stored if already else new), **call)
    for pages_of, want in zip((k_pages, v_pages), stored, strict=True):
        assert torch.equal(bits(pages_of[table[0, 0], 6:9]), bits(want[0]))
    assert_attends(pool._replace(used=used + 3), q, out, lse, 0.5, 0.3, causal=True)


@pytest.mark.parametrize("already", [False, True])
@pytest.mark.parametrize("made", [_columns_last, _one_odd_page], ids=lambda f: f.__name__)
def test_where_the_kernel_writes(made, already):
    (k_pages, v_pages), table = made()
    new = torch.randn(1, 3, 64, k_pages.shape[2]).half().transpose(2, 3)
    stored = new.to(E4M3)
    rows = stored if already else new
    args = torch.tensor([6], dtype=torch.int32), torch.tensor([table], dtype=torch.int32), None
    with emulate("sm_80", seed=3):
        OPS.append_to_cache(rows, rows.clone(), k_pages, v_pages, *args)
    for pages_of in (k_pages, v_pages):
        assert torch.equal(bits(pages_of[table[0], 6:9]), bits(stored[0]))


def test_no_rows_are_written():
    pool = pool_of(lengths=(20,))
    before, none = bits(pool.k), torch.empty(1, 64, 2, 0).permute(0, 3, 2, 1)
    for dtype in (torch.float16, E4M3):
        ffpa_with_kvcache(
            torch.randn(1, 2, 2, 64).half(), pool.k, pool.v, none.to(dtype), none.to(dtype), **where(pool)
        )
    assert torch.equal(bits(pool.k), before)


def test_rows_of_the_caller_stay_as_they_are():
    pool, new = pool_of(), torch.full((2, 1, 2, 64), 1000.0).half()
    ffpa_with_kvcache(torch.randn(2, 1, 4, 64).half(), pool.k, pool.v, new, new.clone(), **where(pool))
    assert (new == 1000).all()


# ---- what is above the operators ----


@pytest.mark.parametrize("scales", [(0.5, None), (None, 2.0), (0.5, 0.5), (torch.tensor([0.5, 2.0]), 3.0)], ids=str)
def test_under_autocast_and_compiled(scales):
    """The dispatcher leaves away what is None at the end."""
    pool = pool_of(more=8)
    q, k, v = torch.randn(2, 1, 4, 64).bfloat16(), *torch.randn(2, 2, 1, 2, 64).bfloat16()
    call = where(pool) | {"k_scale": scales[0], "v_scale": scales[1], "causal": True}

    def run(pool, q, k, v):
        return ffpa_with_kvcache(q, pool.k, pool.v, k, v, **call)

    want_pool = pool.clone()
    want = run(want_pool, q, k, v)

    def check(out, pool):
        assert torch.equal(out, want)
        assert torch.equal(bits(pool.k), bits(want_pool.k)) and torch.equal(bits(pool.v), bits(want_pool.v))

    with torch.autocast("cpu", torch.bfloat16):
        cast = pool.clone()
        check(run(cast, q.float(), k.float(), v.float()), cast)
    graphed = pool.clone()
    check(torch.compile(run, backend="aot_eager", fullgraph=True)(graphed, q, k, v), graphed)


CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # test_schema multiplies e4m3


@pytest.mark.parametrize("name", ["paged_forward", "paged_forward_max_logits", "paged_forward_out"])
def test_opcheck(name):
    pool = pool_of((20, 7), finite=True)
    q = torch.randn(2, 1, 2, 64, dtype=torch.bfloat16)
    out = (torch.empty_like(q),) if name == "paged_forward_out" else ()
    args = (
        q,
        pool.k,
        pool.v,
        *out,
        None,
        pool.used,
        pool.table,
        None,
        None,
        0,
        1,
        20,
        None,
        torch.ones(2),
        torch.ones(1),
    )
    torch.library.opcheck(getattr(OPS, name).default, args, test_utils=CHECKS)


@pytest.mark.parametrize(
    "scales", [(), (torch.ones(2),), (None, torch.ones(1)), (torch.ones(2), torch.ones(()))], ids=len
)
def test_opcheck_append(scales):
    pool, (k, v) = pool_of((20, 7), finite=True), torch.randn(2, 2, 2, 2, 64, dtype=torch.bfloat16)
    args = (k, v, pool.k, pool.v, pool.used, pool.table, None, *scales)
    torch.library.opcheck(OPS.append_to_cache.default, args, test_utils=CHECKS)


def test_mapped_scales():
    pool, q, scale = pool_of(), torch.randn(3, 2, 1, 4, 64).half(), torch.tensor([[0.5, 2.0], [1.0, 0.3], [0.7, 0.7]])

    def run(q, scale):
        return ffpa_with_kvcache(q, pool.k, pool.v, **where(pool), k_scale=scale)

    assert torch.equal(torch.vmap(run)(q, scale), torch.stack([run(*both) for both in zip(q, scale, strict=True)]))


# ---- bad input ----

ROWS = torch.zeros(2, 1, 2, 64)
BAD = [
    (TypeError, r"`k` has dtype torch.float32; allowed: .*torch.float8_e4m3fn; pass rows in the dtype of q", ROWS, ROWS, {}),
    (TypeError, "`k` has dtype torch.float8_e5m2; allowed: ", ROWS.to(torch.float8_e5m2), ROWS.to(torch.float8_e5m2), {}),
    (TypeError, "`v_cache` has dtype .* and `v` torch.float16.*must be alike", ROWS.to(E4M3), ROWS.half(), {}),
    (ValueError, "`v_scale` holds .*greater than 0", ROWS.half(), ROWS.half(), {"v_scale": float("nan")}),
    (ValueError, r"`k_scale` holds \[0.0\]", ROWS.half(), ROWS.half(), {"k_scale": 0}),
    (TypeError, r"`k_scale` is True \(bool\)", ROWS.half(), ROWS.half(), {"k_scale": True}),
    (NotImplementedError, "`k_scale` requires grad.*k_scale.detach", ROWS.half(), ROWS.half(),
     {"k_scale": torch.ones(2, requires_grad=True)}),
]  # fmt: skip


@pytest.mark.parametrize("error, message, k, v, more", BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_rows_write_nothing(error, message, k, v, more):
    pool = pool_of()
    before = bits(pool.k), bits(pool.v)
    with pytest.raises(error, match=message):
        ffpa_with_kvcache(torch.randn(2, 1, 4, 64).half(), pool.k, pool.v, k, v, **where(pool), **more)
    assert torch.equal(bits(pool.k), before[0]) and torch.equal(bits(pool.v), before[1])


def test_rows_of_e4m3_do_not_go_into_16_bits():
    cache = torch.zeros(2, 16, 2, 64, dtype=torch.float16)
    with pytest.raises(TypeError, match="`k` has dtype torch.float8_e4m3fn; allowed: torch.float16, torch.bfloat16$"):
        ffpa_with_kvcache(
            torch.randn(2, 1, 4, 64).half(), cache, cache.clone(), ROWS.to(E4M3), ROWS.to(E4M3), cache_seqlens=3
        )
