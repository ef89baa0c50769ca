"""Picks the family of CUDA kernels that runs a problem, on wgmma and TMA ("hopper") or on mma.sync ("mma"), or says why
none can. This is pure but for what is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..launching import native
from ..specs import archs
from ..specs.problem import FP8_DTYPES, Problem
from . import backward, backward_short, dequantised, forward_short, fused, fused_fp8, levels, two_phase
from .backward import BackwardPlan
from .backward_short import ShortPlan
from .dequantised import DequantisedPlan
from .forward_short import ForwardShortPlan
from .fused import FusedPlan
from .fused_fp8 import Fp8Plan
from .levels import LevelPlan
from .two_phase import TwoPhasePlan

Plan = BackwardPlan | DequantisedPlan | ForwardShortPlan | Fp8Plan | FusedPlan | LevelPlan | ShortPlan | TwoPhasePlan


def hopper(p: Problem, flags: Mapping[str, Any]) -> Plan | str:
    elsewhere = _why_not_here("hopper", p, flags)
    if elsewhere:
        return elsewhere
    if flags["FFPA_EMULATE"]:
        if flags["FFPA_EMULATE"] != "sm_90a":
            return f"hopper kernels run on sm_90a, and FFPA_EMULATE is {flags['FFPA_EMULATE']}"
        return _on_wgmma(p._replace(arch="sm_90"), flags)
    plan = _on_wgmma(p, flags)
    if isinstance(plan, str):
        return plan
    too_old = archs.why_not_on("sm_90a", p.arch)
    if too_old:
        return f"{plan.kernel} cannot run: {too_old}"
    slower = None if flags["FFPA_BACKEND"] == "hopper" else _why_slower_on_wgmma(p, plan, flags)
    return slower or native.why_not_all(plan, p) or plan


def mma(p: Problem, flags: Mapping[str, Any]) -> Plan | str:
    elsewhere = "mma knows no 8-bit floats" if p.dtype in FP8_DTYPES else _why_not_here("mma", p, flags)
    if elsewhere:
        return elsewhere
    if flags["FFPA_EMULATE"]:
        return _on_mma(p._replace(arch=flags["FFPA_EMULATE"].rstrip("a")), flags)
    plan = _on_mma(p, flags)
    if isinstance(plan, (TwoPhasePlan, ForwardShortPlan)) and native.why_not_all(plan, p):
        plan = levels.plan(p, flags)
    if isinstance(plan, ShortPlan):
        slower = None if flags["FFPA_BACKEND"] == "mma" else backward_short.why_slower(p)
        plan = _five_products(p, "mma", flags) if slower or native.why_not_all(plan, p) else plan
    return plan if isinstance(plan, str) else native.why_not_all(plan, p) or plan


def _why_not_here(backend: str, p: Problem, flags: Mapping[str, Any]) -> str | None:
    if flags["FFPA_EMULATE"]:
        return None if p.device == "cpu" else f"the emulator takes CPU tensors, and these are on {p.device}"
    return None if p.device == "cuda" else f"{backend} kernels run on CUDA GPUs, and the tensors are on the {p.device}"


def _on_wgmma(p: Problem, flags: Mapping[str, Any]) -> Plan | str:
    if p.cache:
        return dequantised.plan(p, flags, _on_wgmma)
    if p.dtype in FP8_DTYPES:
        return fused_fp8.plan(p, flags)
    if p.direction == "backward":
        return _five_products(p, "hopper", flags)
    if max(p.d_qk, p.d_v) < two_phase.LEAST_HEAD_DIM["hopper"] or fused.is_faster_than_two_phases(p):
        return fused.plan(p, flags)
    return two_phase.plan(p, "hopper", flags)


def _why_slower_on_wgmma(p: Problem, plan: Plan, flags: Mapping[str, Any]) -> str | None:
    """Says why another forward is to be preferred, or None: the mma forward's instances for 16-bit pages are for GPUs that have
    nothing else.
    """
    if p.cache:
        too_large = "8-bit numbers times their scales, of any size, are not for the workspace in float16"
        return too_large if p.dtype == "f16" else levels.why_faster(p, plan, flags)
    if p.pages:
        return None
    if isinstance(plan, FusedPlan):
        return fused.why_slower(p, plan, flags)
    return two_phase.why_slower(p, plan, flags) if isinstance(plan, TwoPhasePlan) else None


def _on_mma(p: Problem, flags: Mapping[str, Any]) -> Plan | str:
    """Returns the plan of the first that knows the problem: those for some problems alone come before those for all."""
    found = "it is for the others"
    if p.direction == "backward":
        found = backward_short.plan(p)
        return _five_products(p, "mma", flags) if isinstance(found, str) else found
    if p.level is None and not forward_short.why_slower(p):
        found = forward_short.plan(p, flags)
    if isinstance(found, str) and p.level is None:
        found = two_phase.plan(p, "mma", flags)
        found = found if isinstance(found, str) else two_phase.why_slower(p, found, flags) or found
    return levels.plan(p, flags) if isinstance(found, str) else found


def _five_products(p: Problem, backend: str, flags: Mapping[str, Any]) -> BackwardPlan | str:
    return backward.plan(p, backend, flags["FFPA_WORKSPACE_MB"] << 20)
