"""Judges whether a provider is right: its results on random normal data, against the float64 oracle.

The tests' comparator judges. Whole matrices in float64 do not fit at the sizes that are measured, so a sample is
compared: the first and the last heads of K and V with all their query heads; forward, a few blocks of rows; backward,
all rows, block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import compare
import oracle
import torch
from workload import DTYPES, Inputs, Workload, make_inputs, rows_of

_ROWS = 64  # rows of a sampled block
_SCORES = 1 << 23  # most scores of a block, where all rows count
_SEED_OFFSET = 1000  # gives other numbers than those that are timed


class Verdict(NamedTuple):
    max_error: float
    problem: str | None  # why the result is wrong


Sums = tuple[str, str]  # types that QK^T and PV accumulate in
_F32: Sums = ("f32", "f32")


class _Sample(NamedTuple):
    """Query rows of the heads that share one head of K and V, and the true results there."""

    sequence: int
    head_kv: int
    rows: list[tuple[int, int]]
    want: list[torch.Tensor]  # float64


class Truth:
    """The true results, computed once per workload and compared once per provider."""

    def __init__(self, w: Workload, device: str, seed: int):
        self.w = w
        self.inputs = make_inputs(w, device, seed + _SEED_OFFSET)
        ends = {(0, 0), (w.batch - 1, w.heads_kv - 1)}
        self.samples = [self._sample(sequence, head_kv) for sequence, head_kv in sorted(ends)]
        self._bases: dict[Sums, list[list[torch.Tensor]]] = {}

    def verdict(self, run: Callable[[Inputs], tuple[torch.Tensor, ...]], sums: Sums = _F32) -> Verdict:
        """Judges run: inputs -> (out,) or, backward, (dq, dk, dv), by PyTorch's own error with such sums."""
        results = [x.detach() for x in run(self.inputs)]
        names = ("dq", "dk", "dv") if self.w.backward else ("out",)
        worst, problems = 0.0, []
        for i, name in enumerate(names):
            got = torch.cat([self._part(results[i], sample, of_keys=i > 0).flatten() for sample in self.samples])
            want = torch.cat([sample.want[i].flatten() for sample in self.samples])
            base = torch.cat([results_of[i].flatten() for results_of in self._base(sums)])
            error = float((got.double() - want).abs().max()) if want.numel() else 0.0
            worst = math.inf if math.isnan(error) else max(worst, error)
            try:
                compare.assert_close(name, got, want, base)
            except AssertionError as wrong:
                problems.append(str(wrong))
        return Verdict(worst, "; ".join(problems) or None)

    def _part(self, x: torch.Tensor, sample: _Sample, of_keys: bool) -> torch.Tensor:
        """Returns the sampled part of a result."""
        group = self.w.heads // self.w.heads_kv
        x = rows_of(self.w, x, sample.sequence, of_keys)
        if of_keys:
            return x[:, sample.head_kv, None]
        x = x[:, sample.head_kv * group : (sample.head_kv + 1) * group]
        return torch.cat([x[:, :, slice(*rows)] for rows in sample.rows], dim=2)

    def _sample(self, sequence: int, head_kv: int) -> _Sample:
        n_q, n_kv = self.w.sequences[sequence]
        step = max(_ROWS, _SCORES // n_kv) if self.w.backward else _ROWS
        blocks = [(start, min(start + step, n_q)) for start in range(0, n_q, step)]
        if not self.w.backward:
            blocks = [blocks[i] for i in sorted({0, len(blocks) // 2, len(blocks) - 1})]
        want = self._compute(oracle.attention, torch.float64, sequence, head_kv, blocks)
        return _Sample(sequence, head_kv, blocks, want)

    def _base(self, sums: Sums) -> list[list[torch.Tensor]]:
        """Returns PyTorch's own results for each sample."""
        if sums not in self._bases:
            attention = partial(compare.baseline, acc_qk=sums[0], acc_pv=sums[1])
            dtype = DTYPES[self.w.dtype]
            self._bases[sums] = [
                self._compute(attention, dtype, sample.sequence, sample.head_kv, sample.rows) for sample in self.samples
            ]
        return self._bases[sums]

    def _compute(self, attention, dtype, sequence, head_kv, blocks) -> list[torch.Tensor]:
        """Returns [out] of the blocks, or [dq, dk, dv] with dk and dv summed up over blocks and heads."""
        w, x = self.w, self.inputs
        group = w.heads // w.heads_kv
        k, v = (rows_of(w, t, sequence, True)[:, head_kv, None] for t in (x.k, x.v))
        n_q, n_kv = w.sequences[sequence]
        wide = torch.promote_types(dtype, torch.float32)
        dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (k, v))
        by_head = []  # out or dq
        for head in range(head_kv * group, (head_kv + 1) * group):
            q = rows_of(w, x.q, sequence, False)[:, head, None]
            parts = []
            for rows in blocks:
                # The last row of a block sees these keys at most; with them alone the diagonal is at the bottom right.
                keys = max(n_kv - (n_q - rows[1]), 0) if w.causal else n_kv
                block = [t.to(dtype) for t in (q[:, :, slice(*rows)], k[:, :, :keys], v[:, :, :keys])]
                if not w.backward:
                    parts.append(attention(*block, causal=w.causal)[0])
                    continue
                leaves = [t.detach().requires_grad_() for t in block]
                out = attention(*leaves, causal=w.causal)[0]
                grad = rows_of(w, x.grad, sequence, False)[:, head, None, slice(*rows)].to(out.dtype)
                grads = torch.autograd.grad(out, leaves, grad, materialize_grads=True)
                parts.append(grads[0])
                dk[:, :, :keys] += grads[1]
                dv[:, :, :keys] += grads[2]
            by_head.append(torch.cat(parts, dim=2))
        result = torch.cat(by_head, dim=1)
        return [result, dk.to(dtype), dv.to(dtype)] if w.backward else [result]
