"""Calls of the mma forward with a given plan, for the sweep of tiles, the page of toggles and the emulation."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
from ffpa_attn.backends import levels
from ffpa_attn.backends.reference import Rule
from ffpa_attn.building.toolchain import BuildError
from ffpa_attn.launching import native
from ffpa_attn.specs.problem import Problem, Visibility
from ffpa_attn.specs.spec import ForwardMmaSplit
from flops import nominal_flops
from timing import Timer, measure_in_turn
from workload import Inputs, Workload, make_inputs

SHORT = {"fp16": "f16", "bf16": "bf16"}
_WORTH_MORE = 16  # plans, those with the fastest first calls, that are measured further
Name = TypeVar("Name", bound=Hashable)


def square(d: int, dtype: str, heads: int, n: int) -> Workload:
    return Workload(1, heads, heads, n, n, d, d, dtype)


def problem_of(w: Workload, level: int | None, acc: str = "f32", arch: str = "sm_90") -> Problem:
    see = Visibility.of(w.causal, "bottom_right", -1, -1)
    packed = (w.batch * w.n_q, w.batch * w.n_kv) if w.packed else None
    return Problem(
        "forward", "cuda", arch, SHORT[w.dtype], w.batch, w.heads, w.heads_kv, w.n_q, w.n_kv, w.d, w.d_v, packed, see,
        w.d**-0.5, 0.0, None, False, level, acc, None,
    )  # fmt: skip


def run(plan: levels.LevelPlan, p: Problem, x: Inputs, out: torch.Tensor) -> None:
    rule = Rule(p.scale, p.softcap, p.visibility)
    q, k, v, o = (t.transpose(0, 1) if p.packed else t for t in (x.q, x.k, x.v, out))
    plan.forward(q, k, v, o, torch.empty(0, device=q.device), None, x.offsets or None, rule, 1 << 30, {})


class ForcedCalls:
    """One problem's tensors, and the speed of plans on them."""

    def __init__(self, w: Workload):
        self.w, self.problem = w, problem_of(w, None)
        self.inputs = make_inputs(w, "cuda", seed=0)
        self.out = torch.empty_like(self.inputs.q)
        self.timer = Timer("cuda")

    def run(self, plan: levels.LevelPlan) -> None:
        run(plan, self.problem, self.inputs, self.out)

    def milliseconds(self, plan: levels.LevelPlan) -> float:
        return self.timer.milliseconds(lambda: self.run(plan))

    def tflops(self, plans: Mapping[Name, levels.LevelPlan], iters: int) -> dict[Name, float]:
        """Returns TFLOPS by name: one call of each plan, and medians of more calls, in turn, of the fastest."""
        first = {}
        for name, plan in plans.items():
            self.run(plan)
            first[name] = self.milliseconds(plan)
        fastest = sorted(first, key=first.__getitem__)[:_WORTH_MORE]
        times: dict[Name, list[float]] = {}
        if fastest:
            measure_in_turn(
                {name: lambda plan=plans[name]: self.milliseconds(plan) for name in fastest},
                iters,
                times,
                lambda name: None,
                settle=True,
            )
        return {name: nominal_flops(self.w) / median(times.get(name, [first[name]])) * 1e-9 for name in plans}


def compiled(specs: list[ForwardMmaSplit]) -> set[ForwardMmaSplit]:
    """Returns the specs that compile without more spills than are allowed; many compile at a time."""

    def is_ready(spec: ForwardMmaSplit) -> bool:
        try:
            native.kernel(spec, native.gpu_of(torch.device("cuda")))
        except (BuildError, RuntimeError) as error:
            print(f"{spec.name}: {str(error).splitlines()[0]}", file=sys.stderr)
            return False
        return True

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {spec for spec, ready in zip(specs, pool.map(is_ready, specs), strict=True) if ready}
