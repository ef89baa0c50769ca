"""Tests that Triton dequantises pages to the bits that PyTorch's operators give."""

import contextlib

import pages
import pytest
import test_eight_bit_caches as caches
import torch
from ffpa_attn.backends import dequantised, triton_attention
from ffpa_attn.launching.attention_call import Pages
from ffpa_attn.testing import emulate
from ffpa_attn.triton_ops import launch as triton_launch

with contextlib.suppress(ImportError):  # Triton is an extra; it reads TRITON_INTERPRET when imported, before any test
    import triton  # noqa: F401

E4M3 = torch.float8_e4m3fn
# (layout of the pool, d, d_v, rows of a page, heads, dtype)
CASES = [
    ("NHD", 64, 48, 16, 2, torch.bfloat16),
    ("HND", 320, 128, 48, 3, torch.float16),
    ("interleaved", 128, 72, 16, 1, torch.bfloat16),
    ("beside", 40, 512, 32, 2, torch.float16),
    ("latent", 576, 512, 64, 1, torch.bfloat16),
]
SCALES = {
    "none": None,
    "one": torch.tensor([1.2345678]),
    "no dim": torch.tensor(3e-41),  # a float32 that is not normal
    "of heads": torch.tensor([0.7654321, 1e30, 1e-5]),
}


@pytest.fixture
def by_triton(device, monkeypatch):
    """Gives what dequantises in Triton, and leaves 7 where it writes nothing; checks that Triton could."""
    pytest.importorskip("triton", reason="Triton is an extra")
    if device == "cpu":
        if torch.cuda.is_available():
            pytest.skip("where there is a GPU, Triton compiles for it and interprets nothing")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setenv("FFPA_BACKEND", "triton")
    monkeypatch.setattr(triton_launch, "_unable", {})
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(shape, 7.0, **how))
    yield lambda *call: dequantised._dequantised(*call)
    assert not triton_launch._unable


def by_operators(*call) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "why_not", lambda: "not wanted")
        return dequantised._dequantised(*call)


def pools(device, *of, seed=0) -> list[torch.Tensor]:
    """Returns pools of K and V, [pages, heads, rows, columns], that hold all that 8 bits can be."""
    made = pages.Pool(*pages.empty(*of, dtype=E4M3), torch.empty(0), torch.empty(0))
    for x in made[:2]:
        pages._whole(x).view(torch.uint8).random_(generator=torch.Generator().manual_seed(seed))
    return [x.transpose(1, 2) for x in made.to(device)[:2]]


def assert_same(got, want, ends: list[int]) -> None:
    """Compares the bits of rows before the end of each sequence, but for those of NaN, and the strides."""
    assert got.stride() == want.stride() and got.dtype == want.dtype and got.shape == want.shape
    for one, other, end in zip(got, want, ends, strict=True):
        one, other = (x[:, : max(end, 0)] for x in (one, other))
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(*(x.masked_fill(other.isnan(), 0).contiguous().view(torch.int16) for x in (one, other)))


@pytest.mark.parametrize(
    "case, scale", [*((CASES[0], scale) for scale in SCALES), *zip(CASES[1:], SCALES, strict=True)], ids=str
)
def test_pages(device, by_triton, case, scale):
    """Tables name pages twice, and pages that are nowhere."""
    layout, d, d_v, rows, heads, dtype = case
    of_k, of_v = pools(device, 7, rows, heads, d, d_v, layout)
    table = torch.tensor([[6, -1, 2, 0], [7, 3, 2**31 - 1, 6], [2, -(2**31), 5, 2**30]], dtype=torch.int32)
    table = table.to(device)[:, :3]  # its rows are further apart than they are long
    used = [2 * rows + 3, 10**9, 0]
    scale = SCALES[scale]
    if scale is not None:
        scale = scale[:heads].to(device) if scale.dim() else scale.to(device)
    where = Pages(torch.tensor(used, dtype=torch.int32, device=device), table, 2 * rows + 9)
    for pool in (of_k, of_v):
        for some in (slice(0, 3), slice(1, 3)):
            got, want = (how(pool, where, some, scale, dtype) for how in (by_triton, by_operators))
            assert_same(got, want, used[some])
            assert (got[-1] == 7).all(), "it has no keys"


@pytest.mark.parametrize("table", [None, [[2], [0], [-1]]], ids=["no table", "table"])
@pytest.mark.parametrize("first", [None, [0, 7, 30]], ids=["from the first row", "from any row"])
@pytest.mark.parametrize("rows", [1, 37])
def test_caches_without_pages(device, by_triton, rows, first, table):
    """Their rows are any number; there may be more caches than sequences, and fewer keys than rows."""
    pool = pools(device, 4, rows, 2, 72, 72, "NHD")[1]
    used, first, table = (
        None if x is None else torch.tensor(x, dtype=torch.int32, device=device) for x in ([rows, -5, 1], first, table)
    )
    where = Pages(used, table, -(-rows * 3 // 4), first)
    for some in (slice(0, 3), slice(1, 3)):
        got, want = (how(pool, where, some, None, torch.float16) for how in (by_triton, by_operators))
        assert_same(got, want, used[some].tolist())
        assert (got[1 - some.start] == 7).all(), "it has no keys, and belongs to no other sequence"


@pytest.mark.parametrize("more, added", [(20, None), (0, [0, 20, 22, 24]), (3, [5, 2, 40, 40])])
def test_rows_that_were_added(device, by_triton, more, added):
    """Programs work up to the last key, and no further."""
    pool = pools(device, 9, 16, 1, 64, 64, "NHD")[0]
    table = torch.arange(9, dtype=torch.int32, device=device).reshape(3, 3)
    used, ends = [10, 2**31 - 1, 15], [10 + more, 2**31 - 1 + more, 15 + more]
    if added is not None:
        ends = [end + after - before for end, before, after in zip(ends, added, added[1:], strict=False)]
        added = torch.tensor(added, dtype=torch.int32, device=device)
    where = Pages(torch.tensor(used, dtype=torch.int32, device=device), table, 48, None, added, more)
    for some in (slice(0, 3), slice(1, 3)):
        got, want = (how(pool, where, some, None, torch.bfloat16) for how in (by_triton, by_operators))
        assert_same(got, want, ends[some])
        for one, end in zip(got, ends[some], strict=True):
            assert (one[:, -(-end // 16) * 16 :] == 7).all()


@pytest.mark.parametrize("case", caches.CASES[1:5], ids=str)
def test_attention_reads_no_row_that_is_not_written(case, by_triton, device, monkeypatch):
    if device == "cuda":
        pytest.skip("the emulator's kernels read what Triton's interpreter wrote")
    full = torch.full
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: full(shape, torch.nan, **how))
    monkeypatch.setattr(triton_attention, "interprets", lambda: True)
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    with emulate("sm_90a", seed=3):
        plan = caches.attend(case, "of heads", torch.float16)
    assert isinstance(plan, dequantised.DequantisedPlan)
