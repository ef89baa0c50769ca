"""One attention problem to be measured, and its tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Workload:
    batch: int
    heads: int
    heads_kv: int
    n_q: int  # rows; packed: those of the longest sequence
    n_kv: int
    d: int
    d_v: int
    dtype: str = "fp16"
    causal: bool = False  # bottom right: row r meets the keys up to r + n_kv - n_q
    packed: bool = False  # `batch` sequences of growing length, one after the other
    backward: bool = False  # the gradients alone, without the forward

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Lists (rows, keys) of each batch entry."""
        if not self.packed:
            return [(self.n_q, self.n_kv)] * self.batch
        return [tuple(max(n * (i + 1) // self.batch, 1) for n in (self.n_q, self.n_kv)) for i in range(self.batch)]

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        lengths = f"{self.n_q}" if self.n_q == self.n_kv else f"{self.n_q}x{self.n_kv}"
        dims = f"{self.d}" if self.d == self.d_v else f"{self.d}/{self.d_v}"
        return ", ".join([f"B={self.batch}, H={heads}, N={lengths}, D={dims}", *self.kind()])

    def kind(self) -> list[str]:
        """Lists in words whatever is not a size."""
        words = {"causal": self.causal, "varlen": self.packed, "backward": self.backward}
        return [self.dtype, *(word for word, holds in words.items() if holds)]

    def as_dict(self) -> dict:
        return asdict(self)


def without_head_dim(w: Workload) -> str:
    """Describes the workload in words."""
    return ", ".join(part for part in str(w).split(", ") if not part.startswith("D="))


class Inputs(NamedTuple):
    """q [B, H, Nq, D], k [B, Hkv, Nkv, D], v [B, Hkv, Nkv, Dv]; packed: [T, H, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    offsets: tuple  # () or (cu_seqlens_q, cu_seqlens_k, longest q, longest k)
    grad: torch.Tensor | None  # gradient of the output, for a backward


def make_inputs(w: Workload, device: str, seed: int, ones: Collection[str] = ()) -> Inputs:
    """Makes random normal inputs, or all ones for the tensors named ("q", "k", "v")."""
    generator = torch.Generator(device).manual_seed(seed)

    def tensor(name: str, heads: int, length: int, rows: int, d: int) -> torch.Tensor:
        shape = (rows, heads, d) if w.packed else (w.batch, heads, length, d)
        options = {"dtype": DTYPES[w.dtype], "device": device}
        return torch.ones(shape, **options) if name in ones else torch.randn(shape, generator=generator, **options)

    lengths_q, lengths_kv = zip(*w.sequences, strict=True)
    queries, keys = (w.n_q, sum(lengths_q)), (w.n_kv, sum(lengths_kv))
    return Inputs(
        q=tensor("q", w.heads, *queries, w.d),
        k=tensor("k", w.heads_kv, *keys, w.d),
        v=tensor("v", w.heads_kv, *keys, w.d_v),
        offsets=(*(_offsets(x, device) for x in (lengths_q, lengths_kv)), w.n_q, w.n_kv) if w.packed else (),
        grad=tensor("grad", w.heads, *queries, w.d_v) if w.backward else None,
    )


def _offsets(lengths, device: str) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def rows_of(w: Workload, x: torch.Tensor, sequence: int, of_keys: bool) -> torch.Tensor:
    """Returns one batch entry of a tensor, as a view [1, H, N, D]."""
    if not w.packed:
        return x[sequence : sequence + 1]
    lengths = [lengths[of_keys] for lengths in w.sequences]
    start = sum(lengths[:sequence])
    return x[start : start + lengths[sequence]].transpose(0, 1)[None]


def halved(w: Workload) -> Workload | None:
    """Returns a workload of less work and the same kind, or None when it is small already."""
    if w.heads_kv > 1:
        group = w.heads // w.heads_kv
        return replace(w, heads=w.heads_kv // 2 * group, heads_kv=w.heads_kv // 2)
    if max(w.n_q, w.n_kv) > 64:
        return replace(w, n_q=max(w.n_q // 2, 1), n_kv=max(w.n_kv // 2, 1))
    return replace(w, batch=w.batch // 2) if w.batch > 1 else None
