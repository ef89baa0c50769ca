"""Picks the wgmma/TMA family that runs a problem, or says why none can. `plan` is pure but for what is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..launching import native
from ..specs import archs
from ..specs.spec import FP8_DTYPES, Problem
from . import backward, fused, fused_fp8, two_phase
from .backward import BackwardPlan
from .fused import FusedPlan
from .fused_fp8 import Fp8Plan
from .two_phase import TwoPhasePlan

Plan = BackwardPlan | FusedPlan | Fp8Plan | TwoPhasePlan


def plan(p: Problem, flags: Mapping[str, Any]) -> Plan | str:
    if flags["FFPA_EMULATE"]:
        if p.device != "cpu":
            return f"the emulator takes CPU tensors, and these are on {p.device}"
        if flags["FFPA_EMULATE"] != "sm_90a":
            return f"hopper kernels run on sm_90a, and FFPA_EMULATE is {flags['FFPA_EMULATE']}"
        return _family(p._replace(arch="sm_90"), flags)
    if p.device != "cuda":
        return f"hopper kernels run on CUDA GPUs, and the tensors are on the {p.device}"
    plan = _family(p, flags)
    if isinstance(plan, str):
        return plan
    too_old = archs.why_not_on("sm_90a", p.arch)
    if too_old:
        return f"{plan.kernel} cannot run: {too_old}"
    slower = None if flags["FFPA_BACKEND"] == "hopper" else _why_slower(p, plan, flags)
    return slower or native.why_not_all(plan, p) or plan


def _family(p: Problem, flags: Mapping[str, Any]) -> Plan | str:
    if p.dtype in FP8_DTYPES:
        return fused_fp8.plan(p, flags)
    if p.direction == "backward":
        return backward.plan(p, "hopper", flags["FFPA_WORKSPACE_MB"] << 20)
    if max(p.d_qk, p.d_v) < two_phase.LEAST_HEAD_DIM["hopper"] or fused.is_faster_in_pairs(p):
        return fused.plan(p, flags)
    return two_phase.plan(p, "hopper", flags)


def _why_slower(p: Problem, plan: Plan, flags: Mapping[str, Any]) -> str | None:
    """Says why the mma forward is faster, or None."""
    if isinstance(plan, FusedPlan):
        return fused.why_slower(p, plan, flags)
    return two_phase.why_slower(p, "hopper", flags) if isinstance(plan, TwoPhasePlan) else None
