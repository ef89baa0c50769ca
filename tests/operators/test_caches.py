"""Tests ffpa_with_kvcache: rows that it writes, where, and what it then attends to."""

import pages
import pytest
import torch
from ffpa_attn import ffpa_varlen, ffpa_with_kvcache, flash_attn_varlen_func, flash_attn_with_kvcache
from ffpa_attn.checks import memory_checks
from test_kv_cache import where_lengths_are  # noqa: F401
from torch._dynamo.testing import CompileCounterWithBackend

BF16 = torch.bfloat16


def i32(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def t(*shape, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, BF16)


def contiguous(lengths, rows=40, heads=2, d=64, d_v=64, spare=2, device="cpu", seed=0):
    """Returns caches [B_cache, rows, Hkv, D], NaN past the lengths of the first entries."""
    caches = [torch.full((len(lengths) + spare, rows, heads, n), torch.nan, dtype=BF16) for n in (d, d_v)]
    for i, n in enumerate(lengths):
        for cache in caches:
            cache[i, :n] = t(n, heads, cache.shape[-1], seed=seed + i)
    return [x.to(device) for x in caches]


LENGTHS = (17, 0, 40, 3)


@pytest.mark.parametrize("rule", [{}, {"causal": True}, {"window": (6, 0)}, {"softcap": 3.0, "scale": 0.2}], ids=str)
@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.usefixtures("where_lengths_are")
def test_contiguous_caches(device, rule, n):
    k, v = contiguous(LENGTHS, d_v=72, device=device)
    q = t(4, n, 4, 64, seed=5, device=device)
    out, lse, largest = ffpa_with_kvcache(
        q, k, v, cache_seqlens=i32(*LENGTHS, device=device), return_lse=True, return_max_logits=True, **rule
    )
    assert out.shape == (4, n, 4, 72) and lse.shape == (4, 4, n) and largest.shape == (4, 4)
    for i, length in enumerate(LENGTHS):
        pages.assert_attends(q[i], (k[i, :length], v[i, :length]), out[i], lse[i], largest[i], **rule)


def test_an_int_is_the_length_of_all(device):
    k, v = contiguous((9,) * 3, device=device)
    q = t(3, 2, 4, 64, device=device)
    want = ffpa_with_kvcache(q, k, v, cache_seqlens=i32(9, 9, 9, device=device))
    assert torch.equal(ffpa_with_kvcache(q, k, v, cache_seqlens=9), want)


def test_batch_index(device):
    k, v = contiguous(LENGTHS, device=device)
    q, index = t(3, 2, 4, 64, device=device), i32(2, 0, 2, device=device)
    used = i32(40, 17, 25, device=device)
    out = ffpa_with_kvcache(q, k, v, cache_seqlens=used, cache_batch_idx=index, causal=True)
    for i, (entry, n) in enumerate(((2, 40), (0, 17), (2, 25))):
        pages.assert_attends(q[i], (k[entry, :n], v[entry, :n]), out[i], causal=True)


@pytest.mark.usefixtures("where_lengths_are")
@pytest.mark.parametrize("new", [False, True])
def test_left_padding(device, new):
    """Rows before the padding's end are no keys, whatever they hold; positions count from row 0."""
    k, v = contiguous(LENGTHS, rows=44, device=device)
    first = (5, 0, 40, 1)
    for i, n in enumerate(first):
        k[i, :n] = v[i, :n] = torch.nan
    q, more = t(4, 3, 4, 64, device=device), [t(4, 3, 2, 64, seed=seed, device=device) for seed in (1, 2)]
    used, padding = i32(*LENGTHS, device=device), i32(*first, device=device)
    out, lse = ffpa_with_kvcache(
        q, k, v, *(more if new else ()), cache_seqlens=used, cache_leftpad=padding, causal=True, return_lse=True
    )
    for i, length in enumerate(LENGTHS):
        end = length + 3 * new
        pages.assert_attends(q[i], (k[i, first[i] : end], v[i, first[i] : end]), out[i], lse[i], causal=True)
        assert not new or torch.equal(k[i, length:end], more[0][i])


@pytest.mark.usefixtures("where_lengths_are")
@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved", "beside"])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_written_and_seen(device, layout, packed):
    lengths, new = (17, 0, 30, 3), (4, 2, 0, 4) if packed else (4,) * 4
    pool = pages.make(lengths, layout=layout, more=4, d_v=72, device=device)
    before = pool.clone()
    k, v = t(sum(new), 2, 64, seed=1, device=device), t(sum(new), 2, 72, seed=2, device=device)
    q, cu = pages.queries(new, device=device)
    if packed:
        more = {"cu_seqlens_k_new": cu, "cu_seqlens_q": cu, "max_seqlen_q": 4}
        given = q, k, v
    else:
        more, given = {}, tuple(x.view(4, 4, *x.shape[1:]) for x in (q, k, v))
    out, lse = ffpa_with_kvcache(
        given[0], pool.k, pool.v, *given[1:], cache_seqlens=pool.used, block_table=pool.table, causal=True,
        return_lse=True, **more,
    )  # fmt: skip
    out, lse = (out, lse) if packed else (out.flatten(0, 1), lse.transpose(0, 1).flatten(1))
    ends = [n + m for n, m in zip(lengths, new, strict=True)]
    start = 0
    for i, (keys, m) in enumerate(zip(pool.sequences(ends), new, strict=True)):
        at = slice(start, start + m)
        assert torch.equal(keys[0][lengths[i] :], k[at]) and torch.equal(keys[1][lengths[i] :], v[at])
        if m:
            pages.assert_attends(q[at], keys, out[at], lse[:, at], causal=True)
        for x, old in zip(keys, before.sequences()[i], strict=True):
            assert torch.equal(x[: lengths[i]], old)
        start += m
    changed = sum(
        int((~torch.eq(x, y) & ~(x.isnan() & y.isnan())).any(-1).sum())
        for x, y in zip(pool[:2], before[:2], strict=True)
    )
    assert changed == 2 * 2 * sum(new), "rows that are nobody's were written"


def test_rows_of_keys_that_hold_the_values(device):
    pool = pages.make((17, 30), heads=1, d=128, d_v=96, layout="latent", more=2, device=device)
    k, q = t(2, 2, 1, 128, device=device), t(2, 2, 4, 128, seed=3, device=device)
    out = ffpa_with_kvcache(
        q, pool.k, pool.v, k, k[..., :96], cache_seqlens=pool.used, block_table=pool.table, causal=True
    )
    for i, keys in enumerate(pool.sequences([19, 32])):
        assert torch.equal(keys[0][-2:], k[i])
        pages.assert_attends(q[i], keys, out[i], causal=True)
    with pytest.raises(ValueError, match="`v_cache` is a view of `k_cache`, but `v` is none"):
        ffpa_with_kvcache(
            q, pool.k, pool.v, k, k[..., :96].clone(), cache_seqlens=pool.used, block_table=pool.table, causal=True
        )


def test_out_and_sinks(device):
    pool = pages.make((17, 30), more=1, device=device)
    q, k, v = (
        t(2, 1, 4, 64, device=device),
        t(2, 1, 2, 64, seed=1, device=device),
        t(2, 1, 2, 64, seed=2, device=device),
    )
    sinks, out = torch.tensor([1.0, -2.0, 0.0, 4.0], device=device), torch.empty_like(q)
    cache = {"cache_seqlens": pool.used, "block_table": pool.table, "max_seqlen_k": 31}
    got, largest = ffpa_with_kvcache(q, pool.k, pool.v, k, v, **cache, out=out, sinks=sinks, return_max_logits=True)
    assert got is out
    for i, keys in enumerate(pool.sequences([18, 31])):
        pages.assert_attends(q[i], keys, out[i], None, largest[i], sinks=sinks)


def test_decoding_is_as_without_a_cache(device):
    """Chunks of a prompt, then row by row, give what one causal call over all of it gives."""
    n, rows = 45, 16
    q, k, v = (t(n, heads, 64, seed=heads, device=device) for heads in (4, 2, 2))
    pool = pages.make((0,), more=n, device=device)
    got, used = [], 0
    for size in (20, 16, *(1,) * 9):
        at = slice(used, used + size)
        got.append(
            ffpa_with_kvcache(
                q[None, at], pool.k, pool.v, k[None, at], v[None, at], cache_seqlens=i32(used, device=device),
                block_table=pool.table, causal=True,
            )[0]
        )  # fmt: skip
        used += size
    assert pool.k.shape[1] == rows
    pages.assert_attends(q, (k, v), torch.cat(got), causal=True)


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_compiled(device, kind):
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k_cache, v_cache, k, v, used, table, cu):
        more = {"cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "max_seqlen_q": 3} if cu is not None else {}
        return ffpa_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=used, block_table=table, causal=True, return_lse=True, **more
        )

    pool = pages.make((17, 30), more=8, device=device)
    twin = pool.clone()
    cu = i32(0, 3, 6, device=device) if kind == "packed" else None
    shape = (6,) if kind == "packed" else (2, 3)
    q, k, v = (t(*shape, heads, 64, seed=heads, device=device) for heads in (4, 2, 2))
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for used in (pool.used, pool.used + 3):
        got = compiled(q, pool.k, pool.v, k, v, used, pool.table, cu)
        want = step(q, twin.k, twin.v, k, v, used, twin.table, cu)
        assert all(map(torch.equal, got, want))
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(pool[:2], twin[:2], strict=True))
    assert counter.frame_count == 1


def test_autocast_casts_rows_and_queries(device):
    pool = pages.make((17, 30), more=1, device=device)
    q, k, v = (
        t(2, 1, 4, 64, device=device),
        t(2, 1, 2, 64, seed=1, device=device),
        t(2, 1, 2, 64, seed=2, device=device),
    )
    cache = {"cache_seqlens": pool.used, "block_table": pool.table}
    with torch.autocast(device, dtype=BF16):
        got = ffpa_with_kvcache(q.float(), pool.k, pool.v, k.float(), v.float(), **cache)
    assert torch.equal(got, ffpa_with_kvcache(q, pool.k, pool.v, k, v, **cache))


def test_autocast_leaves_values_in_keys(device):
    pool = pages.make((17, 30), heads=1, d=128, d_v=96, layout="latent", more=1, device=device)
    twin, k, q = pool.clone(), t(2, 1, 1, 128, device=device), t(2, 1, 4, 128, seed=3, device=device)
    cache = {"cache_seqlens": pool.used, "block_table": pool.table}
    with torch.autocast(device, dtype=BF16):
        latents = k.float()
        got = ffpa_with_kvcache(q.float(), pool.k, pool.v, latents, latents[..., :96], **cache)
    assert torch.equal(got, ffpa_with_kvcache(q, twin.k, twin.v, k, k[..., :96], **cache))
    assert torch.equal(pool.k.nan_to_num(), twin.k.nan_to_num())


@pytest.mark.parametrize("ahead", [1, 3])
def test_keys_and_values_are_pages_of_one_pool(device, ahead):
    """Values are the layout of keys, whole pages on; tables name each second page, or those of the first half."""
    one = torch.full((12, 16, 2, 64), torch.nan, dtype=BF16, device=device)
    k_pages, v_pages = one[:-ahead], one[ahead:]
    table = torch.tensor([[0, 2], [6, 8]] if ahead == 1 else [[0, 1], [6, 7]], dtype=torch.int32, device=device)
    q, k, v = (t(2, 20, heads, 64, seed=seed, device=device) for heads, seed in ((4, 0), (2, 1), (2, 2)))
    got = ffpa_with_kvcache(q, k_pages, v_pages, k, v, cache_seqlens=0, block_table=table, causal=True)
    for i in range(2):
        assert torch.equal(k_pages[table[i].long()].flatten(0, 1)[:20], k[i])
        assert torch.equal(v_pages[table[i].long()].flatten(0, 1)[:20], v[i])
        pages.assert_attends(q[i], (k[i], v[i]), got[i], causal=True)
    assert one.isnan().any(-1).sum() == (12 * 16 - 80) * 2


def test_new_rows_of_no_sequence_are_written_nowhere(device):
    pool = pages.make((17, 30), more=1, device=device)
    before, q = pool.clone(), t(5, 4, 64, device=device)
    cu, none = i32(0, device=device), pool.table[:0]
    rows = {"cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "max_seqlen_q": 3, "cache_seqlens": 3, "block_table": none}
    out = ffpa_with_kvcache(q, pool.k, pool.v, q[:, :2], q[:, 2:], **rows)
    assert not out.any() and torch.equal(pool.k.nan_to_num(), before.k.nan_to_num())


def test_under_a_profiler(device):
    pool = pages.make((17, 30), more=1, device=device)
    q, k, v = (
        t(2, 1, 4, 64, device=device),
        t(2, 1, 2, 64, seed=1, device=device),
        t(2, 1, 2, 64, seed=2, device=device),
    )
    cache = {"cache_seqlens": pool.used, "block_table": pool.table}
    with torch.profiler.profile() as profile:
        got = ffpa_with_kvcache(q, pool.k, pool.v, k, v, **cache)
    assert {"ffpa_attn::append_to_cache", "ffpa_attn::paged_forward"} <= {event.name for event in profile.events()}
    assert torch.equal(got, ffpa_with_kvcache(q, pool.k, pool.v, k, v, **cache))


def test_no_gradients(device):
    pool = pages.make((17, 30), more=1, device=device)
    q, k, v = (
        t(2, 1, 4, 64, device=device),
        t(2, 1, 2, 64, seed=1, device=device),
        t(2, 1, 2, 64, seed=2, device=device),
    )
    cache = {"cache_seqlens": pool.used, "block_table": pool.table}
    before = pool.clone()
    for name, i in (("q", 0), ("k", 1), ("v", 2)):
        given = [x.clone().requires_grad_(i == j) for j, x in enumerate((q, k, v))]
        with pytest.raises(NotImplementedError, match=f"`{name}` requires grad.*no_grad"):
            ffpa_with_kvcache(given[0], pool.k, pool.v, *given[1:], **cache)
    sinks = torch.zeros(4, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="`sinks` requires grad"):
        ffpa_with_kvcache(q, pool.k, pool.v, k, v, sinks=sinks, **cache)
    assert torch.equal(pool.k.nan_to_num(), before.k.nan_to_num())
    with torch.no_grad():
        ffpa_with_kvcache(q.requires_grad_(), pool.k, pool.v, k, v, sinks=sinks, **cache)


def test_no_map_writes_rows(device):
    pool = pages.make((17, 30), more=1, device=device)
    q, k = t(3, 2, 1, 4, 64, device=device), t(3, 2, 1, 2, 64, device=device)
    cache = {"cache_seqlens": pool.used, "block_table": pool.table}
    with pytest.raises(NotImplementedError, match="under torch.vmap.*call ffpa_with_kvcache once"):
        torch.vmap(lambda q, k: ffpa_with_kvcache(q, pool.k, pool.v, k, k, **cache))(q, k)


def test_a_mapped_call_that_is_refused_writes_nothing(device):
    pool = pages.make((17, 30), more=1, device=device)
    before, k = pool.clone(), t(2, 1, 2, 64, device=device)
    cache = {"cache_seqlens": pool.used, "block_table": pool.table}
    with pytest.raises(ValueError, match="`q` has 3 heads but `k_cache` has 2"):
        torch.vmap(lambda q: ffpa_with_kvcache(q, pool.k, pool.v, k, k, **cache))(t(3, 2, 1, 3, 64, device=device))
    assert torch.equal(pool.k.nan_to_num(), before.k.nan_to_num())


# ---- under flash-attn's names ----


def test_flash_attn_with_kvcache(device):
    k, v = contiguous(LENGTHS, device=device)
    q, used = t(4, 2, 4, 64, device=device), i32(*LENGTHS, device=device)
    got = flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=used,
        softmax_scale=0.2,
        causal=True,
        window_size=(9, -1),
        return_softmax_lse=True,
        num_splits=3,
    )
    want = ffpa_with_kvcache(q, k, v, cache_seqlens=used, scale=0.2, causal=True, window=(9, -1), return_lse=True)
    assert len(got) == 2 and all(map(torch.equal, got, want))


@pytest.mark.parametrize("odd", ["columns", "start", "rows"])
def test_flash_attn_copies_queries_that_cannot_be_read(device, odd):
    k, v = contiguous((40,) * 2, spare=0, device=device)
    q = t(2, 3, 4, 64, device=device)
    made = {
        "columns": lambda: q.mT.contiguous().mT,
        "start": lambda: torch.cat([q.flatten()[:1], q.flatten()])[1:].view(q.shape),
        "rows": lambda: torch.cat([q, q[..., :4]], -1)[..., :64],
    }[odd]()
    assert torch.equal(made, q) and not memory_checks.readable(made)
    assert torch.equal(flash_attn_with_kvcache(made, k, v), flash_attn_with_kvcache(q, k, v))


def test_flash_attn_sees_all_of_a_cache_without_lengths(device):
    k, v = contiguous((40,) * 2, spare=0, device=device)
    q = t(2, 3, 4, 64, device=device)
    assert torch.equal(flash_attn_with_kvcache(q, k, v), ffpa_with_kvcache(q, k, v, cache_seqlens=40))


@pytest.mark.parametrize("name", ["block_table", "page_table"])
def test_flash_attn_writes_rows_into_pages(device, name):
    pool = pages.make((17, 30), more=4, device=device)
    twin, sinks = pool.clone(), torch.tensor([1.0, -2.0, 0.0, 4.0], device=device)
    q, k, v = (t(2, 4, heads, 64, seed=heads, device=device) for heads in (4, 2, 2))
    got = flash_attn_with_kvcache(
        q, pool.k, pool.v, k, v, cache_seqlens=pool.used, causal=True, s_aux=sinks, **{name: pool.table}
    )
    want = ffpa_with_kvcache(
        q, twin.k, twin.v, k, v, cache_seqlens=twin.used, block_table=twin.table, causal=True, sinks=sinks
    )
    assert torch.equal(got, want) and torch.equal(pool.k.nan_to_num(), twin.k.nan_to_num())


def test_flash_attn_takes_packed_queries(device):
    pool = pages.make((17, 30), device=device)
    q, cu = pages.queries((2, 5), device=device)
    rest = {"cu_seqlens_q": cu, "max_seqlen_q": 5, "causal": True}
    got = flash_attn_with_kvcache(q, pool.k, pool.v, cache_seqlens=pool.used, page_table=pool.table, **rest)
    want = ffpa_varlen(q, pool.k, pool.v, cu, None, 5, 32, block_table=pool.table, seqused_k=pool.used, causal=True)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("by", ["offsets", "lengths"])
def test_flash_attn_varlen_func(device, by):
    pool = pages.make((17, 30), device=device)
    q, cu = pages.queries((2, 5), device=device)
    cu_k, used = (i32(0, 17, 47, device=device), None) if by == "offsets" else (None, pool.used)
    got = flash_attn_varlen_func(
        q, pool.k, pool.v, cu, cu_k, 5, 30, causal=True, block_table=pool.table, seqused_k=used
    )
    want = ffpa_varlen(q, pool.k, pool.v, cu, None, 5, 30, block_table=pool.table, seqused_k=pool.used, causal=True)
    assert torch.equal(got, want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("d, layout", [(128, "NHD"), (512, "HND"), (576, "latent")])
def test_a_captured_call_serves_other_tables_and_lengths(d, layout):
    heads = 1 if layout == "latent" else 2
    pool = pages.make((100, 37, 250), heads=heads, d=d, d_v=min(d, 512), layout=layout, more=2, device="cuda")
    q, k = t(3, 2, 4, d, seed=1, device="cuda"), t(3, 2, heads, d, seed=2, device="cuda")
    v = k[..., : min(d, 512)] if layout == "latent" else t(3, 2, heads, d, seed=3, device="cuda")

    def call(pool):
        how = {"cache_seqlens": pool.used, "block_table": pool.table, "causal": True, "max_seqlen_k": 256}
        return ffpa_with_kvcache(q, pool.k, pool.v, k, v, **how)

    call(pool.clone())  # kernels are loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(pool)
    for _ in range(3):
        eager = pool.clone()
        want = call(eager)
        graph.replay()
        assert torch.equal(out, want) and torch.equal(pool.k.nan_to_num(), eager.k.nan_to_num())
        assert torch.equal(pool.v.nan_to_num(), eager.v.nan_to_num())
        pool.used.copy_(pool.used.roll(1) // 2)
        pool.table.copy_(pool.table.roll(1, 0))
