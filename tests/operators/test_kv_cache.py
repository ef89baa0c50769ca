"""Tests attention to keys in pages: ffpa_varlen with a table, against the oracle, with NaN wherever nothing may be read."""

from functools import partial

import ffpa_attn
import pages
import pytest
import torch
from ffpa_attn import ffpa_varlen
from ffpa_attn.backends import reference_rows
from ffpa_attn.operators import forms
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

BF16, F16 = torch.bfloat16, torch.float16
OPS = torch.ops.ffpa_attn
LENGTHS, ROWS = (37, 1, 64, 0, 80), (5, 1, 64, 3, 0)


@pytest.fixture(params=["read", "on the device"])
def where_lengths_are(request, monkeypatch):
    """A GPU has lengths on the device, where nobody reads them."""
    if request.param == "on the device":
        monkeypatch.setattr(reference_rows, "_lengths_may_be_read", lambda lengths: False)


def attend(pool, q, cu, max_q=64, max_k=None, **options):
    max_k = pool.table.shape[1] * pool.k.shape[1] if max_k is None else max_k
    return ffpa_varlen(
        q, pool.k, pool.v, cu, None, max_q, max_k, block_table=pool.table, seqused_k=pool.used, **options
    )


def check(pool, q, cu, rows, **rule):
    """Calls with all results, and compares those of each sequence."""
    out, lse, largest = attend(pool, q, cu, return_lse=True, return_max_logits=True, **rule)
    assert out.shape == (*q.shape[:2], pool.v.shape[-1]) and out.is_contiguous()
    sequences, start = pool.sequences(), 0
    for i, n in enumerate(rows):
        at = slice(start, start + n)
        if n:
            pages.assert_attends(q[at], sequences[i], out[at], lse[:, at], largest[i], **rule)
        start += n
    return out, lse, largest


RULES = [
    {},
    {"causal": True},
    {"causal": True, "align": "top_left", "scale": 0.3},
    {"window": (9, 2), "softcap": 4.0},
    {"window": (5, 0), "align": "top_left"},
]


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved", "beside"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_varlen(device, layout, rule, where_lengths_are):
    pool = pages.make(LENGTHS, layout=layout, shared=True, device=device)
    q, cu = pages.queries(ROWS, device=device)
    check(pool, q, cu, ROWS, **rule)


@pytest.mark.parametrize("rows_of_page", [16, 48, 64, 256])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_pages_of_any_multiple_of_16_rows(device, rows_of_page, dtype):
    pool = pages.make(LENGTHS, rows_of_page, device=device, dtype=dtype)
    q, cu = pages.queries(ROWS, device=device, dtype=dtype)
    check(pool, q, cu, ROWS, causal=True)


@pytest.mark.parametrize("heads_q, heads, d, d_v", [(4, 1, 64, 64), (3, 3, 72, 40), (4, 2, 64, 136), (2, 1, 512, 512)])
def test_heads_and_columns(device, heads_q, heads, d, d_v):
    pool = pages.make(LENGTHS, heads=heads, d=d, d_v=d_v, device=device)
    q, cu = pages.queries(ROWS, heads_q, d, device=device)
    check(pool, q, cu, ROWS, causal=True)


def test_values_in_keys(device, where_lengths_are):
    """MLA's pages have 576 columns, of which 512 are V."""
    pool = pages.make(LENGTHS, heads=1, d=576, d_v=512, layout="latent", device=device)
    q, cu = pages.queries(ROWS, 8, 576, device=device)
    check(pool, q, cu, ROWS, causal=True)


def test_sinks(device):
    pool = pages.make(LENGTHS, device=device)
    q, cu = pages.queries(ROWS, device=device)
    sinks = torch.tensor([0.5, -1.0, 3.0, -torch.inf], device=device)
    check(pool, q, cu, ROWS, causal=True, sinks=sinks)


@pytest.mark.parametrize("left", [0, 7, 20])
@pytest.mark.parametrize("rows", [(1, 1, 1), (4, 17, 2)])
def test_pages_before_a_window_may_be_anything(device, left, rows, where_lengths_are):
    used = (150, 33, 80)
    needed = left + max(rows)
    pool = pages.make(used, window=needed, device=device)
    q, cu = pages.queries(rows, device=device)
    out = attend(pool, q, cu, causal=True, window=(left, -1))
    start = 0
    for i, n in enumerate(rows):
        first = max(used[i] - needed, 0)
        keys = [torch.stack([x[pool.table[i, j // 16], j % 16] for j in range(first, used[i])]) for x in pool[:2]]
        pages.assert_attends(q[start : start + n], keys, out[start : start + n], causal=True, window=(left, -1))
        start += n


def test_pages_outside_the_pool_count_as_zeros(device, where_lengths_are, monkeypatch):
    """A CPU refuses such tables, and a GPU does not look."""
    monkeypatch.setattr(forms.Paged, "check_values", lambda *args: None)
    pool = pages.make((80, 100), device=device)
    q, cu = pages.queries((3, 20), device=device)
    for entry, page in enumerate(pages.ANYTHING):
        pool.table[1, entry] = page
    zeros = [torch.cat([x, torch.zeros_like(x[:1])]) for x in (pool.k, pool.v)]
    table = pool.table.where((pool.table >= 0) & (pool.table < len(pool.k)), len(pool.k))
    want = attend(pages.Pool(*zeros, table, pool.used), q, cu, causal=True, return_lse=True)
    got = attend(pool, q, cu, causal=True, return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_rows_of_no_sequence_and_out(device):
    pool = pages.make((20, 33), device=device)
    q, cu = pages.queries((4, 6), device=device)
    q = torch.cat([q, torch.full_like(q[:3], torch.nan)])
    out = torch.full((13, 4, 64), 7.0, dtype=BF16, device=device)
    got, lse = attend(pool, q, cu, out=out, return_lse=True)
    assert got is out and not out[10:].any() and (lse[:, 10:] == -torch.inf).all()
    want, of_lse = attend(pool, q[:10], cu, return_lse=True)
    assert torch.equal(out[:10], want) and torch.equal(lse[:, :10], of_lse)
    with_max = attend(pool, q, cu, out=out, return_max_logits=True)
    assert with_max[0] is out and with_max[1].shape == (2, 4)


def test_no_sequence_and_no_keys(device, where_lengths_are):
    pool = pages.make((), device=device)
    q, cu = pages.queries((), device=device)
    assert attend(pool, q, cu).shape == (0, 4, 64)
    pool = pages.make((0, 0), spare=0, device=device)
    assert not pool.k.numel()
    q, cu = pages.queries((2, 1), device=device)
    out, lse = attend(pool, q, cu, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()


def test_lengths_count_as_clamped(device):
    """On a GPU nobody checks them."""
    used, first, added = ([50, -3, 20], [2, 0, 30], [0, 4, 5, 5])
    used, first, added = (torch.tensor(x, dtype=torch.int32, device=device) for x in (used, first, added))
    of = partial(reference_rows.Pages, used, None, 32)
    assert reference_rows.key_lengths(of()).tolist() == [32, 0, 20]
    assert reference_rows.key_lengths(of(added=added, more=3)).tolist() == [32, 1, 23]
    assert reference_rows.key_lengths(of(first=first)).tolist() == [32, 0, 0]


def test_a_maximum_may_be_longer_than_what_pages_hold(device):
    pool = pages.make((20, 33), device=device)
    q, cu = pages.queries((4, 6), device=device)
    assert torch.equal(attend(pool, q, cu, max_k=10**12), attend(pool, q, cu))
    form = forms.Paged(pool.k, cu, pool.used, pool.table, None, None, 0, 6, 10**12)
    assert form.pages.longest == 16 * pool.table.shape[1]


@pytest.mark.parametrize("stride", ["row", "shared"])
def test_tables_of_any_row_stride(device, stride):
    pool = pages.make((30, 30), device=device)
    q, cu = pages.queries((4, 4), device=device)
    if stride == "shared":
        pool = pool._replace(table=pool.table[:1].expand(2, -1))
    else:
        wide = torch.full((2, 9), -1, dtype=torch.int32, device=device)
        wide[:, : pool.table.shape[1]] = pool.table
        pool = pool._replace(table=wide[:, : pool.table.shape[1]])
    check(pool, q, cu, (4, 4), causal=True)


def paged_arguments(pool, q, cu, max_q=64, sinks=()):
    return (
        q,
        pool.k,
        pool.v,
        cu,
        pool.used,
        pool.table,
        None,
        None,
        0,
        max_q,
        pool.table.shape[1] * pool.k.shape[1],
        *sinks,
    )


class TestOperators:
    def made(self, device):
        # opcheck compares results of calls, so that no NaN may be there.
        pool = pages.make((20, 33, 0), device=device)
        return pool._replace(k=pool.k.nan_to_num(), v=pool.v.nan_to_num()), *pages.queries((4, 6, 2), device=device)

    @pytest.mark.parametrize("rule", [{}, {"causal": True, "softcap": 3.0}, {"return_lse": False}], ids=str)
    @pytest.mark.parametrize("name", ["paged_forward", "paged_forward_max_logits"])
    def test_opcheck(self, device, name, rule):
        torch.library.opcheck(getattr(OPS, name).default, paged_arguments(*self.made(device)), rule)

    @pytest.mark.parametrize("name", ["paged_forward_out", "paged_forward_out_max_logits"])
    def test_opcheck_out(self, device, name):
        args = paged_arguments(*self.made(device))
        torch.library.opcheck(getattr(OPS, name).default, (*args[:3], torch.empty_like(args[0]), *args[3:]))

    def test_dense_queries(self, device):
        pool, q, _ = self.made(device)
        q = q.view(3, 4, 4, 64)
        args = paged_arguments(pool, q, None, 4)
        torch.library.opcheck(OPS.paged_forward.default, args, {"causal": True})
        out, lse = OPS.paged_forward(*args, causal=True)
        assert out.shape == (3, 4, 4, 64) and lse.shape == (3, 4, 4)
        for i, keys in enumerate(pool.sequences()):
            pages.assert_attends(q[i], keys, out[i], lse[i], causal=True)

    @pytest.mark.parametrize("packed", [False, True])
    def test_opcheck_append(self, device, packed):
        pool, _, _ = self.made(device)
        k, v = (torch.randn(3, 5, 2, 64, device=device).to(BF16) for _ in range(2))
        added = torch.tensor([0, 2, 3, 15], dtype=torch.int32, device=device) if packed else None
        k, v = (x.view(15, 2, 64) if packed else x for x in (k, v))
        used = torch.tensor([20, 26, 0], dtype=torch.int32, device=device)
        table = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32, device=device)
        torch.library.opcheck(OPS.append_to_cache.default, (k, v, pool.k, pool.v, used, table, added))

    def test_autocast(self, device):
        pool, q, cu = self.made(device)
        with torch.autocast(device, dtype=BF16):
            out = attend(pool, q.float(), cu, causal=True)
        assert torch.equal(out, attend(pool, q, cu, causal=True))

    def test_no_gradients(self, device):
        pool, q, cu = self.made(device)
        with pytest.raises(NotImplementedError, match="`q` requires grad.*no_grad"):
            attend(pool, q.requires_grad_(), cu)
        with pytest.raises(NotImplementedError, match="`k` requires grad.*no_grad"):
            attend(pool._replace(k=pool.k.clone().requires_grad_()), q.detach(), cu)
        with pytest.raises(NotImplementedError, match="no gradients"):
            OPS.paged_forward(*paged_arguments(pool, q, cu))
        with torch.no_grad():
            assert not attend(pool, q, cu).requires_grad

    def test_compiled(self, device):
        """One graph holds for every length."""
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(lambda pool, q, cu: attend(pool, q, cu, causal=True), backend=counter, fullgraph=True)
        for lengths, rows in (((20, 33, 1), (4, 6, 2)), ((70, 3, 40), (9, 3, 30)), ((9, 3, 4), (5, 3, 1))):
            pool = pages.make(lengths, device=device)
            q, cu = pages.queries(rows, device=device)
            torch._dynamo.mark_dynamic(q, 0)
            torch._dynamo.mark_dynamic(pool.table, 1)
            torch._dynamo.mark_dynamic(pool.k, 0)
            torch._dynamo.mark_dynamic(pool.v, 0)
            assert torch.equal(compiled(pool, q, cu), attend(pool, q, cu, causal=True))
        assert counter.frame_count == 1

    def test_vmap(self, device):
        pool, q, cu = self.made(device)
        many = torch.stack([q, q * 2])
        got = torch.vmap(lambda q: attend(pool, q, cu, causal=True))(many)
        assert torch.equal(got, torch.stack([attend(pool, x, cu, causal=True) for x in many]))

    def test_flops(self, device):
        pool, q, cu = self.made(device)
        with FlopCounterMode(display=False) as counter:
            attend(pool, q, cu)
        assert counter.get_total_flops() == 4 * (4 * 20 + 6 * 33) * 2 * 128

    def test_names_are_exported(self):
        assert {"ffpa_with_kvcache", "flash_attn_with_kvcache"} <= set(ffpa_attn.__all__)
