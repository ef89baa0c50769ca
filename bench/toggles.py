"""Measures what each experiment with the mma forward buys, and what the levels take of the chip.

`python bench/toggles.py` on a GPU prints the page docs/design/toggles.md. Without one, `--resources` prints its second
half.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
from chip import resources
from ffpa_attn import env
from ffpa_attn.backends import levels
from ffpa_attn.backends.levels import LevelPlan
from ffpa_attn.specs import archs
from ffpa_attn.testing import emulate
from forced import ForcedCalls, compiled, problem_of, run, square
from workload import Workload, make_inputs

HEAD_DIMS = (320, 512, 1024)
LEVELS = (1, 2, 3)
TOGGLES: list[tuple[str, dict[str, str], int | None]] = [  # description, flags, num_stages
    ("Q, K and V padded, not swizzled", {f"ENABLE_FFPA_SMEM_SWIZZLE_{x}": "0" for x in "QKV"}, None),
    ("a ring each for K and V", {"ENABLE_FFPA_QKV_SMEM_SHARE": "0"}, None),
    ("the same, one stage of V", {"FFPA_PV_STAGES": "1"}, None),
    ("Q with each step of K", {"ENABLE_FFPA_PERSIST_Q_G2S": "0"}, None),
    ("Q resident", {"ENABLE_FFPA_PERSIST_Q_G2S": "1"}, None),
    ("fragments loaded when needed", {"ENABLE_FFPA_REGISTERS_PIPE_KV": "0"}, None),
    ("no prefetch (1 stage)", {"ENABLE_FFPA_PREFETCH_QKV": "0"}, None),
    ("2 stages", {}, 2),
    ("3 stages", {}, 3),
    ("4 stages", {}, 4),
    ("grid (N/Br, H, B)", {"ENABLE_FFPA_LAUNCH_GRID_DNHB": "1"}, None),
]


def plan_of(d: int, level: int, flags: dict[str, str], num_stages: int | None, args) -> LevelPlan | None:
    """Returns the plan with these settings, or None where they do not fit."""
    with contextlib.ExitStack() as stack:
        for name, value in flags.items():
            stack.enter_context(env.overridden(name, value))
        problem = problem_of(square(d, "bf16", args.H, args.N), level)._replace(num_stages=num_stages)
        plan = levels.plan(problem, env.run_flags())
    return None if isinstance(plan, str) else plan


def toggles_page(args) -> list[str]:
    cells = [(d, level) for d in HEAD_DIMS for level in LEVELS]
    rows = [("as it is chosen", {}, None), *TOGGLES]
    plans = {(cell, row[0]): plan_of(*cell, *row[1:], args) for cell in cells for row in rows}
    ready = compiled(list(dict.fromkeys(plan.spec for plan in plans.values() if plan)))
    speeds: dict[tuple, float] = {}
    for cell in cells:
        calls = ForcedCalls(square(cell[0], "bf16", args.H, args.N))
        of_cell = {name: plan for (where, name), plan in plans.items() if where == cell and plan and plan.spec in ready}
        speeds |= {(cell, name): speed for name, speed in calls.tflops(of_cell, args.iters).items()}

    def shown(cell: tuple[int, int], name: str) -> str:
        speed, base = speeds.get((cell, name)), speeds[cell, rows[0][0]]
        if speed is None:
            return "-"
        return f"{speed:.0f}" if name == rows[0][0] else f"{speed:.0f} ({speed / base - 1:+.0%})"

    head = [f"L{level}, D={d}" for d, level in cells]
    return [
        f"TFLOPS at B=1, H={args.H}, N={args.N}, bf16, on {torch.cuda.get_device_name()}; - does not fit.",
        "",
        "| | " + " | ".join(head) + " |",
        "|---|" + "---|" * len(cells),
        *(f"| {name} | " + " | ".join(shown(cell, name) for cell in cells) + " |" for name, *_ in rows),
    ]


def resources_page(args) -> list[str]:
    """Returns what the compiler and the emulator say of the kernels chosen on an H200."""
    lines = [
        "| D | level | tile | stages | Q | registers | spills, B | shared memory, KB | barriers a tile | bank conflicts |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for d in HEAD_DIMS:
        for level in LEVELS:
            plan = plan_of(d, level, {}, None, args)
            spec = plan.spec
            used = resources(spec, "sm_90")
            with emulate("sm_90a") as reports:
                w = Workload(1, 1, 1, 2 * spec.rows, 3 * spec.keys, d, d, "bf16")
                x = make_inputs(w, "cpu", seed=0)
                run(plan, problem_of(w, level), x, torch.empty_like(x.q))
            tiles = 3 * 2 * (-(-d // spec.columns) if level == 2 else 1)
            smem = levels.smem_bytes(spec, d, plan.stages, plan.q_resident, plan.value_stages)
            lines.append(
                f"| {d} | L{level} | {spec.rows} x {spec.keys}, {spec.columns} columns; steps {spec.key_columns}, {spec.value_rows} "
                f"| {plan.stages} | {'resident' if plan.q_resident else 'streamed'} | {used.registers} | {used.spill_bytes} "
                f"| {smem / 1024:.0f} of {archs.shared_memory_bytes('sm_90') >> 10} "
                f"| {reports[0]['barriers'] / tiles:.1f} | {reports[0]['bank_conflict_ratio']:.2f} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--resources", action="store_true", help="no speeds")
    parser.add_argument("--N", type=int, default=8192)
    parser.add_argument("--H", type=int, default=32)
    parser.add_argument("--iters", type=int, default=7)
    args = parser.parse_args()
    if not args.resources:
        print("\n".join(toggles_page(args)), flush=True)
        print()
    print("\n".join(resources_page(args)))


if __name__ == "__main__":
    main()
