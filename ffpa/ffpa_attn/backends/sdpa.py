"""This backend is PyTorch's own fused attention, only where that means exactly the same and never materialises N^2.

PyTorch's switches decide at each call which of its kernels it takes. Where that is none that `SdpaPlan` takes, another
plan runs the call: the one that would be chosen if there were no SDPA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from ..specs.problem import FP8_DTYPES, LEAST_SCALE, Problem
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


_CUDNN, _FLASH = SDPBackend.CUDNN_ATTENTION.value, SDPBackend.FLASH_ATTENTION.value
_EFFICIENT = SDPBackend.EFFICIENT_ATTENTION.value


class Refusal(NamedTuple):
    """It takes the place of another plan where FFPA_BACKEND=sdpa asks for PyTorch and nothing else."""

    kernel = "nothing"
    specs = ()

    def forward(self, q, k, v, *_) -> None:
        raise NotImplementedError(
            "FFPA_BACKEND=sdpa cannot run this call: as its switches are, PyTorch takes a kernel for q of "
            f"{tuple(q.shape)} and k of {tuple(k.shape)} that materialises N^2 or repeats K and V; drop FFPA_BACKEND=sdpa"
        )


class SdpaPlan(NamedTuple):
    otherwise: Any = ReferencePlan()  # the plan of calls for which PyTorch takes none of these kernels
    takes: tuple[int, ...] = (_CUDNN, _FLASH, _EFFICIENT)
    kernel = "sdpa"

    @property
    def specs(self) -> tuple:
        return self.otherwise.specs

    def forward(self, q, k, v, out, lse, mask, offsets, rule, workspace_cap: int, memo: dict) -> None:
        with PlainTorch(q.device):
            result = self.fresh(q, k, v, rule, workspace_cap, memo)
            if result is not None:
                out.copy_(result)
        if result is None:
            self.otherwise.forward(q, k, v, out, lse, mask, offsets, rule, workspace_cap, memo)

    def fresh(self, q, k, v, rule, workspace_cap: int, memo: dict) -> torch.Tensor | None:
        """Returns SDPA's own tensor, or None where the other plan is to run."""
        causal, grouped, switches = rule.visibility.right == 0, q.shape[1] != k.shape[1], _switches()
        fuses = memo.get(switches)
        if fuses is None:
            try:
                chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=rule.scale, enable_gqa=grouped)
            except RuntimeError:  # the switches leave PyTorch no kernel
                chosen = SDPBackend.ERROR.value
            # Some releases of PyTorch give the memory-efficient kernel K and V once for each query head of a group.
            fuses = memo[switches] = chosen in self.takes and not (grouped and chosen == _EFFICIENT)
        return torch_sdpa(q, k, v, is_causal=causal, scale=rule.scale, enable_gqa=grouped) if fuses else None


def beside(otherwise: Any, p: Problem) -> SdpaPlan:
    """Returns a plan that takes what is faster than the other one. A GPU of Hopper has that from cuDNN alone; the
    memory-efficient kernel is faster than nothing but the reference path.
    """
    if isinstance(otherwise, (ReferencePlan, Refusal)):
        return SdpaPlan(otherwise)
    return SdpaPlan(otherwise, (_CUDNN,) if p.arch == "sm_90" else (_CUDNN, _FLASH))


_UNEQUAL = (192, 128)  # wider Q and K than V for which cuDNN has a kernel; PyTorch's other fast ones want them equal


def plan(p: Problem, flags: Mapping[str, Any]) -> SdpaPlan | str:
    see = p.visibility
    bytes_of_out = p.batch * p.heads_q * p.n_q * p.d_v * 2
    refusals = (
        (p.dtype in FP8_DTYPES, "sdpa knows no 8-bit floats"),
        (private_torch.no_torch_sdpa, private_torch.no_torch_sdpa),
        (p.direction != "forward" or p.needs_lse, "SDPA returns no LSE"),
        (p.packed, "SDPA takes no packed sequences"),
        (p.pages, "SDPA knows no pages"),
        (p.sinks, "SDPA has no sinks"),
        (p.largest, "SDPA returns no largest logits"),
        (p.mask, "SDPA leaves open what a row without keys gives"),
        (p.softcap, "SDPA has no softcap"),
        (p.scale < LEAST_SCALE, "SDPA's fused kernels scale after masking, which a scale of 0 or less turns into NaN"),
        (see.left >= 0 or see.right > 0, "SDPA has no window"),
        (see.right == 0 and not see.top_left and p.n_q != p.n_k, "SDPA's causal mask is top-left aligned"),
        (
            p.d_qk != p.d_v and (p.d_qk, p.d_v) != _UNEQUAL,
            "SDPA has no fused kernel where D_qk differs from D_v, but for 192 and 128",
        ),
        (p.heads_q > _MOST_HEADS, f"SDPA launches no more than {_MOST_HEADS} heads"),
        (not p.n_k, "SDPA leaves open what a row without keys gives"),
        (bytes_of_out > flags["FFPA_WORKSPACE_MB"] << 20, "SDPA's own copy of the result is larger than the workspace"),
    )
    reason = next((reason for holds, reason in refusals if holds), None)
    return reason or (SdpaPlan(Refusal()) if p.device == "cuda" else SdpaPlan())
