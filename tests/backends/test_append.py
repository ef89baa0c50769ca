"""Tests what appends rows to paged keys and values, by PyTorch and by the kernel in the emulator, against a loop."""

from contextlib import nullcontext

import pytest
import torch
from ffpa_attn.backends import append as module
from ffpa_attn.backends.append import append
from ffpa_attn.testing import emulate

by_way = pytest.mark.parametrize("emulated", [False, True], ids=["pytorch", "emulated"])
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
FREE = -7777  # bits of what nobody has written


def pools(kind: str, pages: int, rows: int, heads: int, d: int, d_v: int, dtype=torch.bfloat16):
    """Returns views [pages, rows, heads, columns] of pools, laid out as servers do."""

    def blank(*shape):
        return torch.full(shape, FREE, dtype=torch.int16).view(dtype)

    if kind == "NHD":
        return blank(pages, rows, heads, d), blank(pages, rows, heads, d_v)
    if kind == "HND":
        return blank(pages, heads, rows, d).transpose(1, 2), blank(pages, heads, rows, d_v).transpose(1, 2)
    if kind == "interleaved":
        return blank(pages, heads, rows, d + d_v).transpose(1, 2).split((d, d_v), -1)
    if kind == "latent":
        both = blank(pages, rows, heads, d)
        return both, both[..., :d_v]
    pages_of_both = blank(pages, 2, rows, heads, d)  # pages of K and of V take turns
    return pages_of_both[:, 0], pages_of_both[:, 1][..., :d_v]


def bits(x):
    return x.view(torch.int16)


def wanted(k, v, k_pages, v_pages, used, table, added):
    """Returns what the pools hold afterwards, by one row after the other."""
    found = [x.clone() for x in (k_pages, v_pages)]
    starts = [0] * len(used) if added is None else added.tolist()
    for b, before in enumerate(used.tolist()):
        count = k.shape[1] if added is None else starts[b + 1] - starts[b]
        for i in range(count):
            entry, row = divmod(before + i, k_pages.shape[1])
            if before < 0 or entry >= (1 if table is None else table.shape[1]):
                continue
            page = b if table is None else table[b, entry].item()
            if not 0 <= page < len(k_pages):
                continue
            for x, pages in zip((k, v), found, strict=True):
                bits(pages)[page, row] = bits(x)[b, i] if added is None else bits(x)[starts[b] + i]
    return found


def new_rows(*shape, dtype=torch.bfloat16, seed=0):
    """Returns rows of all bits, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(dtype)


def check(emulated: bool, k, v, k_pages, v_pages, used, table=None, added=None, memo=None):
    used = torch.tensor(used, dtype=torch.int32)
    table, added = (x if x is None else torch.tensor(x, dtype=torch.int32) for x in (table, added))
    want = wanted(k, v, k_pages, v_pages, used, table, added)
    with emulate("sm_80", seed=3) if emulated else nullcontext() as reports:
        append(k, v, k_pages, v_pages, used, table, added, memo)
    if emulated:
        assert [report["kernel"] for report in reports] == ["forward_append_rows"]
    for found, expected in zip((k_pages, v_pages), want, strict=True):
        assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("rows", [16, 48])
@pytest.mark.parametrize("kind", ["NHD", "HND", "interleaved", "turns"])
@by_way
def test_one_row_each_in_pools_of_any_strides(emulated, kind, rows, dtype):
    k_pages, v_pages = pools(kind, 7, rows, 2, 72, 64, dtype)
    k, v = new_rows(3, 1, 2, 72, dtype=dtype), new_rows(3, 1, 2, 64, dtype=dtype, seed=1)
    check(emulated, k, v, k_pages, v_pages, [0, rows - 1, 2 * rows], [[6, 1, 2], [3, 0, 5], [0, 2, 4]])


@pytest.mark.parametrize("heads, d", [(8, 128), (4, 512), (1, 8)])
@by_way
def test_rows_that_span_pages(emulated, heads, d):
    k_pages, v_pages = pools("NHD", 6, 16, heads, d, d)
    k, v = new_rows(2, 20, heads, d), new_rows(2, 20, heads, d, seed=1)
    check(emulated, k, v, k_pages, v_pages, [5, 15], [[0, 4, 1], [5, 2, 3]])


@by_way
def test_rows_without_a_place_change_nothing(emulated):
    """Lengths that are negative, or beyond the table; pages outside the pool; some rows of a sequence fit, others do not."""
    k_pages, v_pages = pools("NHD", 4, 16, 2, 64, 64)
    used = [-1, 31, 2**31 - 1, 14, 0, 15, -(2**31)]
    table = [[0, 1], [1, 0], [0, 1], [2, 4], [-3, 3], [2**31 - 1, -1], [0, 1]]
    k, v = new_rows(7, 3, 2, 64), new_rows(7, 3, 2, 64, seed=1)
    check(emulated, k, v, k_pages, v_pages, used, table)


@by_way
def test_no_row_has_a_place(emulated):
    k_pages, v_pages = pools("HND", 2, 16, 1, 64, 64)
    check(emulated, new_rows(2, 3, 1, 64), new_rows(2, 3, 1, 64, seed=1), k_pages, v_pages, [-1, 16])
    assert (bits(k_pages) == FREE).all()


@pytest.mark.parametrize("batch", [5, 40])
@by_way
def test_packed_rows(emulated, batch):
    """Sequences of no rows; rows before the first, and behind the last, are of no sequence; 40 take a warp two looks."""
    generator = torch.Generator().manual_seed(batch)
    counts = torch.randint(0, 4, (batch,), generator=generator)
    counts[1] = counts[-1] = 0
    added = [2, *(2 + counts.cumsum(0)).tolist()]
    k_pages, v_pages = pools("interleaved", 2 * batch, 16, 2, 64, 40)
    k, v = new_rows(added[-1] + 3, 2, 64), new_rows(added[-1] + 3, 2, 40, seed=1)
    table = torch.randperm(2 * batch, generator=generator).view(batch, 2).tolist()
    used = torch.randint(0, 30, (batch,), generator=generator).tolist()
    check(emulated, k, v, k_pages, v_pages, used, table, added)


@by_way
def test_sequences_that_have_a_row_of_the_cache_each(emulated):
    k_pages, v_pages = pools("NHD", 3, 21, 2, 64, 64)
    k, v = new_rows(2, 2, 2, 64), new_rows(2, 2, 2, 64, seed=1)
    check(emulated, k, v, k_pages, v_pages, [19, 20])
    check(emulated, k, v, k_pages, v_pages, [0, 20], [[2], [0]])


@by_way
def test_values_in_keys_are_written_once(emulated):
    k_pages, v_pages = pools("latent", 3, 16, 1, 576, 512)
    k = new_rows(2, 2, 1, 576)
    check(emulated, k, k[..., :512], k_pages, v_pages, [4, 15], [[1], [2]])


@by_way
def test_new_rows_of_any_strides(emulated):
    """BHND rows, and those that lie off 16 bytes."""
    k_pages, v_pages = pools("NHD", 2, 16, 2, 64, 64)
    k, off = new_rows(2, 2, 3, 64).transpose(1, 2), new_rows(1 + 2 * 3 * 2 * 64)
    check(emulated, k, off[1:].view(2, 3, 2, 64), k_pages, v_pages, [4, 10])


@by_way
def test_calls_of_a_kind_share_what_was_found_out(emulated):
    memo = {}
    k_pages, v_pages = pools("NHD", 4, 16, 1, 64, 64)
    for used in ([3, 1], [4, 15]):
        k, v = new_rows(2, 2, 1, 64, seed=used[0]), new_rows(2, 2, 1, 64, seed=9)
        check(emulated, k, v, k_pages, v_pages, used, [[3, 1], [0, 2]], memo=memo)
    assert len(memo) == 1


def test_types_that_no_kernel_has():
    k_pages, v_pages = (torch.zeros(2, 16, 1, 8) for _ in range(2))
    with emulate("sm_80"):
        append(
            *(torch.ones(1, 2, 1, 8) for _ in range(2)), k_pages, v_pages, torch.tensor([15]), torch.tensor([[1, 0]])
        )
    assert k_pages.sum() == v_pages.sum() == 16 and k_pages[1, 15].all() and k_pages[0, 0].all()


def test_nothing_to_append():
    k_pages, v_pages = pools("NHD", 0, 16, 1, 8, 8)
    append(new_rows(1, 1, 1, 8), new_rows(1, 1, 1, 8), k_pages, v_pages, torch.tensor([0]), torch.tensor([[0]]))
    k_pages, v_pages = pools("NHD", 1, 16, 1, 8, 8)
    append(new_rows(1, 0, 1, 8), new_rows(1, 0, 1, 8), k_pages, v_pages, torch.tensor([0]), torch.tensor([[0]]))
    assert (bits(k_pages) == FREE).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu(monkeypatch):
    """The kernel and PyTorch's operations write the same, also where the kernel is captured in a graph."""
    k, v = new_rows(64, 1, 4, 512).cuda(), new_rows(64, 1, 4, 512, seed=1).cuda()
    table = torch.randperm(256).view(64, 4).int().cuda()
    used = torch.randint(0, 70, (64,), dtype=torch.int32).cuda()  # some have no room
    found = []
    for way in ("kernel", "graph", "pytorch"):
        pages = [x.cuda() for x in pools("HND", 256, 16, 4, 512, 512)]
        if way == "pytorch":
            monkeypatch.setattr(module, "_launch", lambda *_: None)
        if way == "graph":
            before = used.clone()
            graph = torch.cuda.CUDAGraph()
            used.fill_(-1)
            with torch.cuda.graph(graph):
                append(k, v, *pages, used, table)
            used.copy_(before)
            graph.replay()
        else:
            append(k, v, *pages, used, table)
        found.append([bits(x).cpu() for x in pages])
    for pages in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], pages, strict=True))
