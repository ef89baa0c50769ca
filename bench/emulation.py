"""Runs a workload's kernels in the emulator, on a workload small enough for it: are they right? No speed is told.

The instances are those of the full size on a GPU; a machine without one proves them all the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from chip import ChipUse
from ffpa_attn.backends.levels import LevelPlan
from ffpa_attn.testing import emulate
from flops import nominal_flops
from forced import problem_of, run
from truth import Truth
from workload import Inputs, Workload

_KEY_TILES = 3  # more than one, so that what a tile leaves for the next one shows


class Emulation:
    """One workload on the emulator of a GPU."""

    def __init__(self, w: Workload, arch: str, seed: int):
        self.w, self.arch, self.seed = w, arch, seed
        self.truth = Truth(w, "cpu", seed)
        self.found: dict[LevelPlan, dict] = {}

    def run(self, use: ChipUse, plan: LevelPlan) -> ChipUse:
        """Returns `use` with what the emulator found: errors on the workload and on several tiles of keys; traffic and
        conflicts on the latter. What levels 1 and 2 run the same way, one column group, runs once.
        """
        plan = plan._replace(splits=1)  # the number of parts was that of the full size
        once = plan._replace(level=0)
        if once not in self.found:
            self.found[once] = self._find(use, plan)
        return replace(use, **self.found[once])

    def _find(self, use: ChipUse, plan: LevelPlan) -> dict:
        spec, w = plan.spec, self.w
        whole = Workload(1, 1, 1, spec.rows, _KEY_TILES * spec.keys, w.d, w.d_v, w.dtype)

        def attention(w: Workload, plan: LevelPlan):
            def compute(x: Inputs) -> tuple[torch.Tensor]:
                out = torch.empty(*x.q.shape[:-1], w.d_v, dtype=x.q.dtype)
                run(plan, problem_of(w, use.level, use.acc), x, out)
                return (out,)

            return compute

        sums = spec.acc_qk, spec.acc_pv
        with emulate("sm_90a" if self.arch == "sm_90" else "sm_80") as reports:
            of_workload = self.truth.verdict(attention(w, plan), sums)
            of_tiles = Truth(whole, "cpu", self.seed).verdict(attention(whole, plan._replace(tile_heads=1)), sums)
        return {
            "max_error": max(of_workload.max_error, of_tiles.max_error),
            "problem": of_workload.problem or of_tiles.problem,
            "bank_conflicts": reports[-1]["bank_conflict_ratio"],
            "bytes_per_flop": reports[-1]["bytes_global"] / nominal_flops(whole),
        }
