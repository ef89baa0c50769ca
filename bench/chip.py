"""What kernels take of a GPU's chip: those that a workload would get at its full size, with the flags as they are."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ffpa_attn import env
from ffpa_attn.backends import levels
from ffpa_attn.backends.levels import LevelPlan
from ffpa_attn.building import build, jit
from ffpa_attn.launching import native
from ffpa_attn.specs import archs
from ffpa_attn.specs.problem import ACCS, LEVELS
from ffpa_attn.specs.spec import ForwardMmaRows, ForwardMmaSplit, KernelSpec
from forced import problem_of
from workload import Workload

MOST_REGISTERS = 255  # registers of one thread
MARKS = {"f32": "*", "f16": "^", "mixed": "*^"}  # marks for the types of sums


@dataclass(frozen=True)
class ChipUse:
    """One level with one kind of sums at one head dim."""

    level: int
    acc: str
    kernel: str
    shared_bytes: int  # bytes of one block
    most_shared_bytes: int  # bytes that a block may have there
    accumulators: int  # registers of one thread that hold O and S
    registers: int | None  # registers of one thread in all; None: was not compiled here
    spill_bytes: int | None
    # The emulator finds these (emulation.py):
    max_error: float | None = None
    problem: str | None = None  # why the result is wrong
    bank_conflicts: float | None = None  # 1: no conflicts
    bytes_per_flop: float | None = None  # traffic of one block of rows between global memory and the chip

    @property
    def tag(self) -> str:
        return f"(ffpa+acc+{self.acc}+L{self.level})"

    @property
    def series(self) -> str:
        return f"L{self.level}{MARKS[self.acc]}"


def accumulators(spec: ForwardMmaSplit | ForwardMmaRows) -> int:
    """Returns how many registers of one thread hold O and S."""
    if isinstance(spec, ForwardMmaRows):
        out, scores = spec.rows * spec.head_dim // 128, spec.rows * spec.keys // 128
    else:
        warps = 4 if spec.rows >= 64 else 8  # warps of a team, which share the columns of O in pairs of fragments
        out = spec.rows // (8 // warps) // 16 * (-(-spec.columns // (16 * warps)) * 2) * 4
        scores = spec.rows * spec.keys // 256
    return out // (2 if spec.acc_pv == "f16" else 1) + scores // (2 if spec.acc_qk == "f16" else 1)


def flash_attention_2(d: int) -> tuple[int, int]:
    """Returns (bytes of shared memory, accumulators) of a tiling with 64 rows, 64 keys and whole rows of Q, K, V and O.

    Up to D = 256 this project has such kernels; beyond, these are what the same tiling would need.
    """
    spec = ForwardMmaRows("f16", "f32", "f32", head_dim=d, rows=64, keys=64)
    return levels.smem_bytes(spec, d, 1, True), accumulators(spec)


def resources(spec: KernelSpec, gpu: str) -> build.Resources:
    """Returns what the compiler says of the kernel; compiles it now if the cache does not hold it."""
    with jit.opened(spec, gpu) as (_, found):
        (used,) = json.loads(found.content.rpartition(b"\n")[2]).values()
    return build.Resources(**used)


def _compiled(spec: ForwardMmaSplit | ForwardMmaRows, arch: str, afresh: bool) -> build.Resources | None:
    """Returns what ptxas says of the kernel: as the build wrote it down, or in a compilation now."""
    target = archs.exact_target(spec.arch, arch)
    if afresh:
        with tempfile.TemporaryDirectory() as empty, env.overridden("FFPA_CACHE_DIR", empty):
            return resources(spec, arch)
    known = (native.record() or {"kernels": {}})["kernels"].get(spec.name, {"resources": {}})["resources"]
    return build.Resources(**known[target]) if target in known else None


def chip_uses(
    w: Workload, arch: str, tags: Sequence[str] = (), afresh: bool = False
) -> Iterator[tuple[str, ChipUse | None, LevelPlan | str]]:
    """Yields (tag, use, plan) of every level and kind of sums, or (tag, None, why such a GPU cannot run the workload).

    `tags` are parts of tags: only tags with one of them count, or all if there are none. With `afresh`, each kernel is
    compiled now.
    """
    kinds = ACCS if w.dtype == "fp16" else ACCS[:1]
    for acc, level in product(kinds, LEVELS) if not w.backward else ():
        tag = f"(ffpa+acc+{acc}+L{level})"
        if tags and not any(part in tag for part in tags):
            continue
        plan = levels.plan(problem_of(w, level, acc, arch), env.run_flags())
        if isinstance(plan, str):
            yield tag, None, plan
            continue
        used = _compiled(plan.spec, arch, afresh)
        use = ChipUse(
            level,
            acc,
            plan.spec.name,
            levels.smem_bytes(plan.spec, w.d, plan.stages, plan.q_resident, plan.value_stages),
            archs.shared_memory_bytes(arch),
            accumulators(plan.spec),
            used and used.registers,
            used and used.spill_bytes,
        )
        yield tag, use, plan
