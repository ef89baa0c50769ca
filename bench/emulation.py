"""The kernels of a workload in the emulator, on one that is small enough: are they right? No speed is told.

The instances are those of the full size on a GPU; a machine without one proves them all the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from chip import ChipUse
from ffpa_attn.mma import MmaPlan
from ffpa_attn.testing import emulate
from flops import nominal_flops
from forced import problem_of, run
from truth import Truth
from workload import DTYPES, Workload, make_inputs


class Emulation:
    """One workload on the emulator of a GPU."""

    def __init__(self, w: Workload, arch: str, seed: int):
        self.w, self.arch = w, arch
        self.truth, self.inputs = Truth(w, "cpu", seed), make_inputs(w, "cpu", seed)

    def run(self, use: ChipUse, plan: MmaPlan) -> ChipUse:
        """The same with what the emulator found."""
        w = self.w
        plan = plan._replace(splits=1)  # the parts were those of the full size
        problem = problem_of(w, use.level, use.acc, self.arch)

        def attention(x) -> tuple[torch.Tensor, ...]:
            out = torch.empty(*x.q.shape[:-1], w.d_v, dtype=DTYPES[w.dtype])
            run(plan, problem, x, out)
            return (out,)

        with emulate("sm_90a" if self.arch == "sm_90" else "sm_80") as reports:
            verdict = self.truth.verdict(attention, (plan.spec.acc_qk, plan.spec.acc_pv))
            out = attention(self.inputs)[0].flatten()
        return replace(
            use,
            values=[*out[:2].tolist(), *out[-1:].tolist()],
            max_error=verdict.max_error,
            problem=verdict.problem,
            bank_conflicts=reports[-1]["bank_conflict_ratio"],
            bytes_per_flop=reports[-1]["bytes_global"] / nominal_flops(w),
        )
