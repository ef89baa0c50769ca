"""Tests what the campaign knows of keys in pages: that problems have them, and that it finds mistakes."""

import campaign_check
import campaign_tensors as tensors
import pytest
import torch
from campaign_draw import generate
from campaign_problems import Pages, Problem
from campaign_shrink import as_test, shrink
from ffpa_attn.backends import reference_rows
from ffpa_attn.operators import again, ops

LENGTHS = {"lengths_q": (3, 40, 0), "lengths_k": (70, 100, 33)}


@pytest.fixture(autouse=True)
def new_plans(monkeypatch):
    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(again, "_known", {})


def outcome(p: Problem) -> tuple[str, str]:
    try:
        campaign_check.check(p)
    except campaign_check.Wrong as error:
        return "wrong", f"Wrong: {error}"
    return "right", ""


def test_problems_have_every_kind_of_pages():
    found = [generate(seed, device) for device in ("cuda", "emulator", "cpu") for seed in range(1500)]
    of_pages = [p for p in found if p.pages]
    assert 0.02 < len(of_pages) / len(found) < 0.2
    for field in Pages.__dataclass_fields__:
        assert len({getattr(p.pages, field) for p in of_pages}) > 1, field
    assert {p.backend for p in of_pages} == {"auto", "hopper", "mma", "reference"}
    assert {p.pages.layout for p in of_pages} == {"NHD", "HND", "interleaved", "beside", "latent"}
    for chosen in (
        lambda p: p.sinks,
        lambda p: p.max_logits,
        lambda p: p.level,
        lambda p: p.out,
        lambda p: p.odd_offsets,
        lambda p: p.pages.eight_bits,
    ):
        assert sum(map(bool, map(chosen, of_pages))) > 5
    assert all(generate(seed, "cpu", "pages").packed for seed in range(50))


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved", "beside", "latent"])
def test_pools_hold_the_keys_and_nan_elsewhere(layout):
    of_pages = Pages(rows=16, layout=layout, shared=True, spare=2)
    p = Problem(device="cpu", heads_kv=2, d_v=32, v_in_k=layout == "latent", pages=of_pages, **LENGTHS)
    x = tensors.make(p, "cpu")
    assert x.pool.table.shape == (3, 7 + 2) and x.pool.table[1, 0] == x.pool.table[0, 0]
    for (_, keys), of_sequence in zip(x.spans, x.pool.sequences(), strict=True):
        for got, packed in zip(of_sequence, (x.k, x.v), strict=True):
            assert torch.equal(got, packed[keys])
    for pool in x.pool[:2]:
        assert pool.isfinite().sum() == (70 + 100 + 33 - 2 * 16) * pool[0, 0].numel()


@pytest.mark.parametrize("dtype, size, v_in_k", [("f16", 1e3, False), ("bf16", 1e-2, True)])
def test_pools_of_8_bits_hold_the_keys_over_their_scale(dtype, size, v_in_k):
    p = Problem(
        device="cpu",
        dtype=dtype,
        heads_kv=2,
        d_v=32,
        v_in_k=v_in_k,
        size_k=size,
        pages=Pages(eight_bits=True),
        **LENGTHS,
    )
    x = tensors.make(p, "cpu")
    assert x.pool.k.dtype == torch.float8_e4m3fn and (x.pool.k.data_ptr() == x.pool.v.data_ptr()) == v_in_k
    for (_, keys), of_sequence in zip(x.spans, x.pool.sequences(), strict=True):
        for got, packed, scale in zip(of_sequence, (x.k, x.v), x.scales, strict=True):
            assert torch.equal(got.float() * scale[:, None], packed[keys].float()) and packed[keys].any()


def test_a_scale_that_is_left_out_is_found(monkeypatch):
    monkeypatch.setattr(
        reference_rows.ScaledPool, "rows", lambda self, heads, page, row: self.pool[:, heads][page, :, row].float()
    )
    ended, why = outcome(
        Problem(device="cpu", backend="reference", heads_kv=2, pages=Pages(eight_bits=True), **LENGTHS)
    )
    assert ended == "wrong" and "out" in why


def test_an_input_that_is_written_is_found(monkeypatch):
    forward = reference_rows.Paged.load

    def load(self, x, *where):
        value = forward(self, x, *where)
        x[0, 0, 0, 0] = 1.0
        return value

    monkeypatch.setattr(reference_rows.Paged, "load", load)
    ended, why = outcome(Problem(device="cpu", backend="reference", pages=Pages(), **LENGTHS))
    assert ended == "wrong" and "written" in why


@pytest.mark.parametrize("what", ["rows", "lengths"])
def test_mistakes_are_found_and_made_smaller(what, monkeypatch):
    init = reference_rows.Paged.__init__

    def planted(self, table, first, true_length, bound, needed):
        if what == "rows":
            first = first + 1
        else:
            true_length = true_length - 1
        init(self, table, first, true_length, bound, needed)

    monkeypatch.setattr(reference_rows.Paged, "__init__", planted)
    p = Problem(device="cpu", backend="reference", pages=Pages(48, "HND", spare=3), **LENGTHS)
    ended, why = outcome(p)
    assert ended == "wrong"
    smaller, _, why = shrink(p, why, outcome, 3)
    assert smaller.pages == Pages(48) and sum(smaller.lengths_k) < sum(p.lengths_k)
    assert "Pages(rows=48" in as_test(smaller, why)


def test_fixed_seeds():
    for seed in range(60):
        assert outcome(generate(seed, "cpu", "pages")) == ("right", ""), seed
