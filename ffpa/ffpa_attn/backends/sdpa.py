"""This backend is PyTorch's own fused attention, only where that means exactly the same and never materialises N^2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from ..specs.spec import FP8_DTYPES, LEAST_SCALE, Problem
from ..support import private_torch
from ..support.private_torch import PlainTorch
from .reference_plan import ReferencePlan

_MOST_HEADS = 65535  # heads in a grid's second dimension
# The function in torch.nn.functional may be ours (integrations/sdpa_override.py).
torch_sdpa = private_torch.find("torch._C._nn.scaled_dot_product_attention") or F.scaled_dot_product_attention
# PyTorch's global switches, which decide with a kind of call which of its backends it takes.
_SWITCHES = [
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
]
_priorities = private_torch.find("torch._C._get_sdp_priority_order") or tuple


def _switches() -> tuple:
    return (*[switch() for switch in _SWITCHES], *_priorities())


class SdpaPlan(NamedTuple):
    kernel = "sdpa"
    specs = ()

    def forward(self, q, k, v, out, lse, mask, offsets, rule, workspace_cap: int, memo: dict) -> None:
        with PlainTorch(q.device):
            result = self.fresh(q, k, v, rule, workspace_cap, memo)
            if result is not None:
                out.copy_(result)
        if result is None:
            ReferencePlan().forward(q, k, v, out, lse, mask, offsets, rule, workspace_cap, memo)

    def fresh(self, q, k, v, rule, workspace_cap: int, memo: dict) -> torch.Tensor | None:
        """Returns SDPA's own tensor, or None where it would materialise N^2."""
        causal, switches = rule.visibility.right == 0, _switches()
        fuses = memo.get(switches)
        if fuses is None:
            chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=rule.scale)
            fuses = memo[switches] = chosen != SDPBackend.MATH.value
        return torch_sdpa(q, k, v, is_causal=causal, scale=rule.scale) if fuses else None


def plan(p: Problem, flags: Mapping[str, Any]) -> SdpaPlan | str:
    see = p.visibility
    bytes_of_out = p.batch * p.heads_q * p.n_q * p.d_v * 2
    refusals = (
        (p.dtype in FP8_DTYPES, "sdpa knows no 8-bit floats"),
        (private_torch.no_torch_sdpa, private_torch.no_torch_sdpa),
        (p.direction != "forward" or p.needs_lse, "SDPA returns no LSE"),
        (p.packed, "SDPA takes no packed sequences"),
        (p.mask, "SDPA leaves open what a row without keys gives"),
        (p.softcap, "SDPA has no softcap"),
        (p.scale < LEAST_SCALE, "SDPA's fused kernels scale after masking, which a scale of 0 or less turns into NaN"),
        (see.left >= 0 or see.right > 0, "SDPA has no window"),
        (see.right == 0 and not see.top_left and p.n_q != p.n_k, "SDPA's causal mask is top-left aligned"),
        (p.heads_q != p.heads_kv, "SDPA repeats K and V or materialises N^2 for grouped heads"),
        (p.d_qk != p.d_v, "SDPA materialises N^2 where D_qk differs from D_v"),
        (p.heads_q > _MOST_HEADS, f"SDPA launches no more than {_MOST_HEADS} heads"),
        (not p.n_k, "SDPA leaves open what a row without keys gives"),
        (bytes_of_out > flags["FFPA_WORKSPACE_MB"] << 20, "SDPA's own copy of the result is larger than the workspace"),
    )
    return next((reason for holds, reason in refusals if holds), None) or SdpaPlan()
