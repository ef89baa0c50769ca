"""One way to compute attention, as the bench sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from workload import Inputs, Workload

SDPA_TAG = "(sdpa)"


class Unavailable(Exception):
    """The reason why a provider cannot run a workload here."""


@dataclass(frozen=True)
class Provider:
    tag: str
    kernel: str  # name of what runs
    attention: Callable[[Inputs], torch.Tensor] | None  # None: it runs in another process
    is_ffpa: bool = False  # called through this project's functions: must run, and must be right
    own_kernel: bool = False  # true for ffpa's calls that do not fall back
    acc: str | None = None  # type of sums that was forced, or None
    level: int | None = None
    num_stages: int | None = None
    sums: tuple[str, str] = ("f32", "f32")  # types that QK^T and PV accumulate in
    settings: dict = field(default_factory=dict)  # settings of the plan of one of our kernels
    fallback: str | None = None  # reason why none of our kernels runs, where one should

    def prepare(self, w: Workload, x: Inputs) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Returns the call that is timed: () -> (out,), or the gradients alone, () -> (dq, dk, dv)."""
        if not w.backward:
            return lambda: (self.attention(x),)
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        out = self.attention(x._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
        return lambda: torch.autograd.grad(out, leaves, x.grad, retain_graph=True)
