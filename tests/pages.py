"""Makes pools of pages for tests: random tables, with NaN wherever nothing may be read."""

from __future__ import annotations

from typing import NamedTuple

import compare
import oracle
import torch
from ffpa_attn.backends import reference_rows
from ffpa_attn.checks import memory_checks
from ffpa_attn.operators import again, ops

ANYTHING = (-1, -(2**31), 2**31 - 1, 10**6)  # entries that nobody needs may be these


def forget_and_read_nothing(monkeypatch) -> None:
    """Makes all kinds of calls unknown, and has tables and lengths not read, as on a GPU."""
    monkeypatch.setattr(again, "_known", {})
    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(memory_checks, "values_are_read", lambda x, flags: flags["FFPA_CHECK"])
    monkeypatch.setattr(reference_rows, "_lengths_may_be_read", lambda lengths: False)


class Pool(NamedTuple):
    k: torch.Tensor  # [pages, rows, Hkv, D]
    v: torch.Tensor
    table: torch.Tensor  # int32 [B, entries]
    used: torch.Tensor  # int32 [B]

    def to(self, device) -> Pool:
        """Returns it elsewhere, laid out as it is; K and V that are of one storage are of one there."""
        storage = torch.empty(0, dtype=self.k.dtype, device=self.k.device).set_(self.k.untyped_storage())
        one = self.k.untyped_storage().data_ptr() == self.v.untyped_storage().data_ptr()
        moved = (
            [storage.to(device, copy=True)] * 2 if one else [_whole(x).to(device, copy=True) for x in (self.k, self.v)]
        )
        k, v = (
            whole.as_strided(x.shape, x.stride(), x.storage_offset())
            for whole, x in zip(moved, (self.k, self.v), strict=True)
        )
        return Pool(k, v, self.table.to(device), self.used.to(device))

    def clone(self) -> Pool:
        return self.to(self.k.device)

    def sequences(self, lengths=None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the keys and values of each sequence, [n, Hkv, D]."""
        rows, result = self.k.shape[1], []
        for pages, n in zip(self.table.tolist(), lengths or self.used.tolist(), strict=True):
            at = [(pages[i // rows], i % rows) for i in range(n)]
            result.append(
                tuple(torch.stack([x[i] for i in at]) if at else x.new_empty(0, *x.shape[2:]) for x in self[:2])
            )
        return result


def _whole(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def empty(pages: int, rows: int, heads: int, d: int, d_v: int, layout: str, dtype=torch.bfloat16):
    """Returns pools of NaN: "NHD", "HND" (heads before rows in memory), "interleaved" (a page of K, then one of V),
    "beside" (K, then V in each row) or "latent" (V is the first columns of K).
    """

    def of(*shape):
        return torch.full(shape, torch.nan, dtype=dtype)

    if layout == "NHD":
        return of(pages, rows, heads, d), of(pages, rows, heads, d_v)
    if layout == "HND":
        return of(pages, heads, rows, d).transpose(1, 2), of(pages, heads, rows, d_v).transpose(1, 2)
    if layout == "interleaved":
        both = of(pages, 2, rows, heads, max(d, d_v))
        return both[:, 0, ..., :d], both[:, 1, ..., :d_v]
    if layout == "beside":
        return of(pages, heads, rows, d + d_v).transpose(1, 2).split([d, d_v], -1)
    k = of(pages, rows, heads, d)
    return k, k[..., :d_v]


def make(
    lengths, rows=16, heads=2, d=64, d_v=None, layout="NHD", shared=False, spare=3, more=0, window=None, seed=0,
    dtype=torch.bfloat16, device="cpu",
) -> Pool:  # fmt: skip
    """Returns a pool of these sequences, in random pages, with `spare` pages that nobody names. `shared` lets sequences
    have the first page in common; each has room for `more` rows; keys before the last `window` ones are NaN, in pages of
    any number; on a GPU, whose kernels read whole pages, those in a page with one of the last ones are not.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(n + more) // rows) for n in lengths]
    entries = max([*counts, 1]) + 1
    order = torch.randperm(sum(counts) + spare, generator=generator).tolist()
    k, v = empty(len(order), rows, heads, d, d if d_v is None else d_v, layout, dtype)
    odd = torch.randint(len(ANYTHING), (len(lengths), entries), generator=generator)
    table = torch.tensor(ANYTHING)[odd].int()
    for i, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = [order.pop() for _ in range(count)]
        if shared and i and n >= rows and lengths[0] >= rows:
            pages[0] = int(table[0, 0])
        table[i, :count] = torch.tensor(pages, dtype=torch.int32)
        first = 0 if window is None else max(n - window, 0)
        unseen = first // rows  # pages
        for j in range(first if torch.device(device).type == "cpu" else unseen * rows, n):
            for x in (k, v)[: 1 if layout == "latent" else 2]:
                x[pages[j // rows], j % rows] = torch.randn(x.shape[2:], generator=generator).to(dtype)
        table[i, :unseen] = ANYTHING[i % len(ANYTHING)]
    return Pool(k, v, table, torch.tensor(lengths, dtype=torch.int32)).to(device)


def queries(rows, heads=4, d=64, seed=1, dtype=torch.bfloat16, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Returns packed q, [T, heads, d], and its offsets."""
    q = torch.randn(sum(rows), heads, d, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return q, torch.tensor([0, *rows], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def assert_attends(q, keys, out, lse=None, largest=None, **rule) -> None:
    """Compares the results of one sequence with the oracle: q [n, Hq, D], keys: its K and V, [n_k, Hkv, D]; out as q, lse
    [Hq, n], largest [Hq].
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (q, *keys))
    want, of_lse = oracle.attention(q, k, v, **rule)
    base = compare.baseline(q, k, v, **rule)
    compare.assert_close("out", out.transpose(0, 1)[None], want, base[0])
    if lse is not None:
        compare.assert_lse_close("lse", lse[None], of_lse, q, k, rule.get("scale"))
    if largest is not None:
        rule.pop("sinks", None)
        compare.assert_lse_close(
            "largest", largest[None, :, None], oracle.largest_scores(q, k, **rule)[..., None], q, k, None
        )
