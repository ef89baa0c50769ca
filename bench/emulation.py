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
from workload import Inputs, Workload, make_inputs

_KEY_TILES = 3  # so that what a tile leaves for the next one shows


class Emulation:
    """One workload on the emulator of a GPU."""

    def __init__(self, w: Workload, arch: str, seed: int):
        self.w, self.arch, self.seed = w, arch, seed
        self.truth = Truth(w, "cpu", seed)

    def run(self, use: ChipUse, plan: MmaPlan) -> ChipUse:
        """The same with what the emulator found: errors on the workload, traffic and conflicts on whole tiles."""
        plan = plan._replace(splits=1)  # the parts were those of the full size
        spec, w = plan.spec, self.w
        whole = Workload(1, 1, 1, spec.rows, _KEY_TILES * spec.keys, w.d, w.d_v, w.dtype)

        def attention(x: Inputs, w: Workload = w) -> tuple[torch.Tensor]:
            out = torch.empty(*x.q.shape[:-1], w.d_v, dtype=x.q.dtype)
            run(plan._replace(packs_heads=plan.packs_heads and w != whole), problem_of(w, use.level, use.acc), x, out)
            return (out,)

        with emulate("sm_90a" if self.arch == "sm_90" else "sm_80") as reports:
            verdict = self.truth.verdict(attention, (spec.acc_qk, spec.acc_pv))
            attention(make_inputs(whole, "cpu", self.seed), whole)
        return replace(
            use,
            max_error=verdict.max_error,
            problem=verdict.problem,
            bank_conflicts=reports[-1]["bank_conflict_ratio"],
            bytes_per_flop=reports[-1]["bytes_global"] / nominal_flops(whole),
        )
