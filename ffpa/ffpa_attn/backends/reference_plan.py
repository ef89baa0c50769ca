"""This is the backend that runs everything, everywhere: the contract in PyTorch's operators (reference.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..specs.problem import Problem
from ..support.private_torch import PlainTorch
from . import reference
from .reference_heads import Heads
from .reference_rows import ScaledPool, Sequence, dense_sequences, packed_sequences, paged_sequences


class ReferencePlan(NamedTuple):
    kernel = "reference"
    specs = ()

    def forward(
        self, q, k, v, out, lse, mask, offsets, rule, workspace_cap: int, memo: dict, sinks=None, largest=None, pages=None
    ) -> None:  # fmt: skip
        with PlainTorch(q.device):
            out.zero_()
            lse.fill_(-float("inf"))
            wanted, sequences = lse if lse.dim() > 1 else None, _sequences(q, k, mask, offsets)
            if pages is not None:
                sequences = paged_sequences(q, k, offsets, pages, rule.visibility)
                if k.dtype != q.dtype:
                    k, v = ScaledPool(k, pages.k_scale), ScaledPool(v, pages.v_scale)
            reference.forward(q, k, v, out, wanted, sequences, rule, workspace_cap, Heads(sinks, largest))

    def forward_fp8(self, q, k, v, scales, out, lse, rule, workspace_cap: int, memo: dict, sinks=None, largest=None):
        q, k, v = map(reference.Dequantised, (q, k, v), scales)
        lse = out.new_empty(0, dtype=torch.float32) if lse is None else lse
        self.forward(q, k, v, out, lse, None, None, rule, workspace_cap, memo, sinks, largest)

    def backward(self, saved, grads, d_mask, mask, offsets, rule, workspace_cap: int, memo: dict) -> None:
        with PlainTorch(saved[0].device):
            for grad in grads:
                grad.zero_()
            sequences = _sequences(saved[2], saved[3], mask, offsets)
            reference.backward(*saved[:7], *grads, sequences, rule, workspace_cap)
        mask_gradient(saved, d_mask, mask, rule, workspace_cap)


def _sequences(q, k, mask, offsets) -> Iterator[Sequence]:
    if offsets is None:
        return dense_sequences(q, k, reference.align_mask(mask))
    return packed_sequences(q, k, *offsets)


def mask_gradient(saved, d_mask, mask, rule, workspace_cap: int) -> None:
    """Computes a mask's gradient for plans whose kernels give none; d_mask is None where it is not wanted."""
    if d_mask is not None:
        with PlainTorch(d_mask.device):
            d_mask.zero_()
            reference.mask_gradient(*saved[:7], reference.align_mask(mask), d_mask, rule, workspace_cap)


def plan(p: Problem, flags: Mapping[str, Any]) -> ReferencePlan:
    return ReferencePlan()
