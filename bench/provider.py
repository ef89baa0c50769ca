"""One way to compute attention, as the bench sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from workload import Inputs, Workload

SDPA_TAG = "(sdpa)"


class Unavailable(Exception):
    """Why a provider cannot run a workload here."""


@dataclass(frozen=True)
class Provider:
    tag: str
    kernel: str  # what runs
    attention: Callable[[Inputs], torch.Tensor] | None  # None: in another process
    is_ffpa: bool = False  # called through this project's functions: must run, and must be right
    own_kernel: bool = False  # and does not fall back
    acc: str | None = None  # what was forced, or None
    level: int | None = None
    num_stages: int | None = None
    sums: tuple[str, str] = ("f32", "f32")  # what QK^T and PV accumulate in
    settings: dict = field(default_factory=dict)  # of one of our kernels
    fallback: str | None = None  # why none of our kernels runs, where one should

    def prepare(self, w: Workload, x: Inputs) -> Callable[[], tuple[torch.Tensor, ...]]:
        """What is timed: () -> (out,), or the gradients alone, () -> (dq, dk, dv)."""
        if not w.backward:
            return lambda: (self.attention(x),)
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        out = self.attention(x._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
        return lambda: torch.autograd.grad(out, leaves, x.grad, retain_graph=True)
