"""Calls of the mma forward with a given plan, on a GPU: what the sweep of tiles and the page of toggles measure."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
from ffpa_attn import mma, native
from ffpa_attn.spec import ForwardMma, Problem, Visibility
from ffpa_attn.toolchain import BuildError
from timing import Timer, measure_in_turn

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
_ALL = Visibility(-1, -1, False)
_WORTH_MORE = 16  # of those whose first call was the fastest
Name = TypeVar("Name", bound=Hashable)


def problem_of(d: int, dtype: str, level: int | None, heads: int, n: int, acc: str = "f32") -> Problem:
    return Problem(
        "forward", "cuda", "sm_90", dtype, 1, heads, heads, n, n, d, d, False, _ALL, d**-0.5, 0.0, None, False, level, acc, None
    )  # fmt: skip


def run(plan: mma.MmaPlan, p: Problem, q, k, v, out) -> None:
    rule = SimpleNamespace(visibility=p.visibility, scale=p.scale, softcap=p.softcap)
    mma.forward(plan, q, k, v, out, torch.empty(0, device=q.device), None, None, rule, 1 << 30)


class ForcedCalls:
    """One problem's tensors, and the speed of plans on them."""

    def __init__(self, problem: Problem):
        p = self.problem = problem
        self.qkv = [
            torch.randn(p.batch, p.heads_q, p.n_q, p.d_qk, device="cuda", dtype=DTYPES[p.dtype]) for _ in range(3)
        ]
        self.out = torch.empty_like(self.qkv[0])
        self.timer = Timer("cuda")

    def run(self, plan: mma.MmaPlan) -> None:
        run(plan, self.problem, *self.qkv, self.out)

    def milliseconds(self, plan: mma.MmaPlan) -> float:
        return self.timer.milliseconds(lambda: self.run(plan))

    def tflops(self, plans: Mapping[Name, mma.MmaPlan], iters: int) -> dict[Name, float]:
        """One call of each, and medians of more, in turn, of the fastest."""
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
        p = self.problem
        flops = 2 * p.batch * p.heads_q * p.n_q * p.n_k * (p.d_qk + p.d_v)
        return {name: flops / median(times.get(name, [first[name]])) * 1e-9 for name in plans}


def compiled(specs: list[ForwardMma]) -> set[ForwardMma]:
    """Those that compile without more spills than are allowed; many at a time."""

    def is_ready(spec: ForwardMma) -> bool:
        try:
            native.kernel(spec, native.gpu_of(torch.device("cuda")))
        except (BuildError, RuntimeError) as error:
            print(f"{spec.name}: {str(error).splitlines()[0]}", file=sys.stderr)
            return False
        return True

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {spec for spec, ready in zip(specs, pool.map(is_ready, specs), strict=True) if ready}
