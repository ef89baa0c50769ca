"""This module says whether what a plan launches can run here, or in an installed wheel."""

from __future__ import annotations

from .. import env
from ..building import toolchain
from ..specs import archs
from ..specs.spec import KernelSpec, Problem, aot_specs
from . import native


def why_not(plan, p: Problem) -> str | None:
    """Says why one of the plan's kernels cannot run on the problem's GPU, or None."""
    of_one = _why_not_in_a_wheel if p.supposed else native.why_not
    return next((reason for spec in plan.specs if (reason := of_one(spec, p.arch))), None)


def _why_not_in_a_wheel(spec: KernelSpec, gpu: str) -> str | None:
    """Says why an installation built as the flags say could not run the kernel on this GPU; None where it could."""
    reason = archs.why_not_on(spec.arch, gpu)
    if reason:
        return f"{spec.name} cannot run: {reason}"
    flags = env.all_flags()
    targets = archs.targets(spec.arch, archs.requested(flags)) if spec in aot_specs(flags) else ()
    reason = None if any(archs.runs(target, gpu) for target in targets) else toolchain.why_no_build()
    return f"no wheel holds {spec.name} for {gpu}, and {reason}" if reason else None
