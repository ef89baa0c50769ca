"""Picks the mma.sync family that runs a problem, or says why none can. `plan` is pure but for what is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..launching import native
from ..specs.spec import FP8_DTYPES, Problem
from . import backward, backward_short, forward_short, levels, two_phase
from .backward import BackwardPlan
from .backward_short import ShortPlan
from .forward_short import ForwardShortPlan
from .levels import LevelPlan
from .two_phase import TwoPhasePlan

Plan = LevelPlan | ForwardShortPlan | TwoPhasePlan | BackwardPlan | ShortPlan


def plan(p: Problem, flags: Mapping[str, Any]) -> Plan | str:
    if p.dtype in FP8_DTYPES:
        return "mma knows no 8-bit floats"
    if flags["FFPA_EMULATE"]:
        if p.device != "cpu":
            return f"the emulator takes CPU tensors, and these are on {p.device}"
        return _family(p._replace(arch=flags["FFPA_EMULATE"].rstrip("a")), flags)
    if p.device != "cuda":
        return f"mma kernels run on CUDA GPUs, and the tensors are on the {p.device}"
    plan = _family(p, flags)
    if isinstance(plan, (TwoPhasePlan, ForwardShortPlan)) and native.why_not_all(plan, p):
        plan = levels.plan(p, flags)
    if isinstance(plan, ShortPlan):
        slower = None if flags["FFPA_BACKEND"] == "mma" else backward_short.why_slower(p)
        plan = _five_products(p, flags) if slower or native.why_not_all(plan, p) else plan
    return plan if isinstance(plan, str) else native.why_not_all(plan, p) or plan


def _family(p: Problem, flags: Mapping[str, Any]) -> Plan | str:
    if p.direction == "backward":
        short = backward_short.plan(p)
        return _five_products(p, flags) if isinstance(short, str) else short
    if p.level is None and not forward_short.why_slower(p):
        plan = forward_short.plan(p, flags)
        if not isinstance(plan, str):
            return plan
    if p.level is None and not two_phase.why_slower(p, "mma", flags):
        plan = two_phase.plan(p, "mma", flags)
        if not isinstance(plan, str):
            return plan
    return levels.plan(p, flags)


def _five_products(p: Problem, flags: Mapping[str, Any]) -> BackwardPlan | str:
    return backward.plan(p, "mma", flags["FFPA_WORKSPACE_MB"] << 20)
