"""Which kernel runs a problem, and why. Needs no tensors and no GPU.

Candidates are tried in order of speed (`_by_speed`); each plans how it would run a problem, or says why it cannot. Only what a caller
forces (`level=`, FFPA_BACKEND, FFPA_EMULATE) narrows the list, and on a GPU nothing else is then tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import env
from ..building import toolchain
from ..launching import native
from ..specs import archs
from ..specs.spec import LEAST_SCALE, KernelSpec, Problem, aot_specs
from ..support import private_torch
from . import backward, fused, fused_fp8, mma, triton_attention, triton_fp8, two_phase
from .backward import BackwardPlan
from .fused import FusedPlan
from .fused_fp8 import Fp8Plan
from .mma import MmaPlan
from .triton_attention import TritonPlan
from .two_phase import TwoPhasePlan

Flags = Mapping[str, Any]
Plan = MmaPlan | TritonPlan | BackwardPlan | FusedPlan | Fp8Plan | TwoPhasePlan


@dataclass(frozen=True)
class Choice:
    problem: Problem
    kernel: str  # the name of what runs
    backend: str
    plan: Plan | None  # how one of our kernels runs it
    why: str
    rejected: tuple[tuple[str, str], ...]  # (backend, why it cannot run this problem)
    fallback: str | None  # what to warn about (and to raise under FFPA_STRICT), or None

    def __str__(self) -> str:
        lines = [f"{self.problem}", f"  runs on {self.kernel}: {self.why}"]
        lines += [f"  not {backend}: {reason}" for backend, reason in self.rejected]
        return "\n".join(lines)


# A candidate answers with its plan, with None where it needs none, or with a reason why it cannot run the problem.
Candidate = Callable[[Problem, Flags], Plan | None | str]


def _hopper(p: Problem, flags: Flags) -> BackwardPlan | FusedPlan | Fp8Plan | TwoPhasePlan | str:
    if flags["FFPA_EMULATE"]:
        if p.device != "cpu":
            return f"the emulator takes CPU tensors, and these are on {p.device}"
        if flags["FFPA_EMULATE"] != "sm_90a":
            return f"hopper kernels run on sm_90a, and FFPA_EMULATE is {flags['FFPA_EMULATE']}"
        return _hopper_plan(p, flags)
    if p.device != "cuda":
        return f"hopper kernels run on CUDA GPUs, and the tensors are on the {p.device}"
    plan = _hopper_plan(p, flags)
    if isinstance(plan, str):
        return plan
    too_old = archs.why_not_on("sm_90a", p.arch)
    if too_old:
        return f"{plan.kernel} cannot run: {too_old}"
    if p.direction == "forward" and p.dtype not in _FP8_DTYPES and flags["FFPA_BACKEND"] != "hopper":
        is_fused = isinstance(plan, FusedPlan)
        reason = fused.why_slower(p, plan) if is_fused else two_phase.why_slower(p, "hopper", flags)
        if reason:
            return reason
    return _runnable(plan, p)


def _hopper_plan(p: Problem, flags: Flags) -> BackwardPlan | FusedPlan | Fp8Plan | TwoPhasePlan | str:
    if p.dtype in _FP8_DTYPES:
        return fused_fp8.plan(p, flags)
    if p.direction == "backward":
        return backward.plan(p, "hopper", flags["FFPA_WORKSPACE_MB"] << 20)
    if max(p.d_qk, p.d_v) < two_phase.LEAST_HEAD_DIM["hopper"]:
        return fused.plan(p, flags)
    return two_phase.plan(p, "hopper", flags)


def _mma(p: Problem, flags: Flags) -> MmaPlan | BackwardPlan | TwoPhasePlan | str:
    if flags["FFPA_EMULATE"]:
        if p.device != "cpu":
            return f"the emulator takes CPU tensors, and these are on {p.device}"
        return _mma_plan(p._replace(arch=flags["FFPA_EMULATE"].rstrip("a")), flags)
    if p.device != "cuda":
        return f"mma kernels run on CUDA GPUs, and the tensors are on the {p.device}"
    plan = _mma_plan(p, flags)
    if isinstance(plan, TwoPhasePlan) and isinstance(_runnable(plan, p), str):
        plan = mma.plan(p, flags)
    return _runnable(plan, p)


def _mma_plan(p: Problem, flags: Flags) -> MmaPlan | BackwardPlan | TwoPhasePlan | str:
    if p.direction == "backward":
        return backward.plan(p, "mma", flags["FFPA_WORKSPACE_MB"] << 20)
    if p.level is None and not two_phase.why_slower(p, "mma", flags):
        plan = two_phase.plan(p, "mma", flags)
        if not isinstance(plan, str):
            return plan
    return mma.plan(p, flags)


def _runnable(plan: Plan | str, p: Problem) -> Plan | str:
    """The plan, or why one of its kernels cannot run on the GPU."""
    if isinstance(plan, str):
        return plan
    why_not = _why_not_in_a_wheel if p.supposed else native.why_not
    return next((reason for spec in plan.specs if (reason := why_not(spec, p.arch))), plan)


def _why_not_in_a_wheel(spec: KernelSpec, gpu: str) -> str | None:
    """Why an installation that was built as the flags say could not run the kernel on this GPU; None where it could."""
    reason = archs.why_not_on(spec.arch, gpu)
    if reason:
        return f"{spec.name} cannot run: {reason}"
    flags = env.all_flags()
    targets = archs.targets(spec.arch, archs.requested(flags)) if spec in aot_specs(flags) else ()
    reason = None if any(archs.runs(target, gpu) for target in targets) else toolchain.why_no_build()
    return f"no wheel holds {spec.name} for {gpu}, and {reason}" if reason else None


_MOST_SDPA_HEADS = 65535  # a grid's second dimension


def _sdpa(p: Problem, flags: Flags) -> str | None:
    """PyTorch's own fused attention, only where it means exactly the same and never materialises N^2."""
    if private_torch.no_torch_sdpa:
        return private_torch.no_torch_sdpa
    if p.direction != "forward" or p.needs_lse:
        return "SDPA returns no LSE"
    if p.packed:
        return "SDPA takes no packed sequences"
    if p.mask:
        return "SDPA leaves open what a row without keys gives"
    if p.softcap:
        return "SDPA has no softcap"
    if p.scale < LEAST_SCALE:
        return "SDPA's fused kernels scale after masking, which a scale of 0 or less turns into NaN"
    see = p.visibility
    if see.left >= 0 or see.right > 0:
        return "SDPA has no window"
    if see.right == 0 and not see.top_left and p.n_q != p.n_k:
        return "SDPA's causal mask is top-left aligned"
    if p.heads_q != p.heads_kv:
        return "SDPA repeats K and V or materialises N^2 for grouped heads"
    if p.d_qk != p.d_v:
        return "SDPA materialises N^2 where D_qk differs from D_v"
    if p.heads_q > _MOST_SDPA_HEADS:
        return f"SDPA launches no more than {_MOST_SDPA_HEADS} heads"
    if not p.n_k:
        return "SDPA leaves open what a row without keys gives"
    if p.batch * p.heads_q * p.n_q * p.d_v * 2 > flags["FFPA_WORKSPACE_MB"] << 20:
        return "SDPA's own copy of the result is larger than the workspace"
    return None


def _reference(p: Problem, flags: Flags) -> None:
    return None


CANDIDATES: Mapping[str, Candidate] = {
    "hopper": _hopper,
    "mma": _mma,
    "triton": triton_attention.plan,
    "sdpa": _sdpa,
    "reference": _reference,
}
_OUR_KERNELS = ("hopper", "mma", "triton")


def _demand(p: Problem, flags: Flags) -> tuple[str, str] | None:
    """(backend, who asked) when the caller forces one."""
    backend = flags["FFPA_BACKEND"]
    if p.level is not None and p.direction == "forward":
        if backend not in ("auto", "mma"):
            raise ValueError(
                f"`level` is {p.level}, which means the mma family, but FFPA_BACKEND={backend}; unset one of them"
            )
        return "mma", f"level={p.level}"
    if backend != "auto":
        return backend, f"FFPA_BACKEND={backend}"
    if flags["FFPA_TRITON_CORES"] and p.direction == "forward":
        return "triton", f"FFPA_TRITON_CORES={flags['FFPA_TRITON_CORES']}"
    if flags["FFPA_EMULATE"]:
        hopper = p.direction == "backward" and flags["FFPA_EMULATE"] == "sm_90a"
        return "hopper" if hopper else "mma", f"FFPA_EMULATE={flags['FFPA_EMULATE']}"
    return None


def _chosen(p: Problem, name: str, plan: Plan | None, why: str, rejected=(), fallback: str | None = None) -> Choice:
    if p.supposed:
        why += f", in an installed wheel ({native.PYTHON_ONLY})"
    return Choice(p, plan.kernel if plan else name, name, plan, why, tuple(rejected), fallback)


def _few_rows(p: Problem, flags: Flags) -> bool:
    """Whether an mma kernel has work for the GPU where blocks of rows alone have not: it splits keys, or packs heads."""
    plan = _mma(p, flags)
    if not isinstance(plan, MmaPlan):
        return False
    blocks = -(-p.n_q // 128) * p.batch * p.heads_q
    return plan.packs_heads or (plan.splits > 1 and blocks <= archs.multiprocessors(p.arch) // 3)


_TRITON_BACKWARD_COLUMNS = 128  # up to which Triton's backward is the fastest: at 128 469 T, on wgmma 334


def _by_speed(p: Problem, flags: Flags) -> list[str]:
    """As measured (.dev/measurements.md), all on an H200: up to 64 columns SDPA's kernels there, cuDNN's, are the fastest, then
    Triton's; up to 128 cuDNN's where rows see all keys; else ours. Elsewhere, and past 256 columns, Triton's only turn is the
    backward, where it comes first up to 128 columns and last beyond. SDPA and Triton know nothing of stages, accumulators and
    experiments.
    """
    widest = max(p.d_qk, p.d_v)
    asks_for_mma = p.num_stages or p.acc != "f32" or any(flags[name] is not None for name in env.EXPERIMENTS)
    if p.device == "cuda" and p.direction == "backward":
        narrow = widest <= _TRITON_BACKWARD_COLUMNS
        order = "triton hopper mma sdpa reference" if narrow else "hopper mma triton sdpa reference"
    elif p.device != "cuda" or asks_for_mma or widest > triton_attention.MOST_COLUMNS:
        order = "hopper mma sdpa reference"
    elif p.arch != "sm_90":
        order = "hopper sdpa mma reference" if widest > 192 else "hopper mma sdpa reference"
    elif _few_rows(p, flags):
        order = "hopper mma sdpa triton reference"
    elif widest <= 64:
        order = "sdpa triton hopper mma reference"
    elif widest <= 128 and not p.visibility.bounded:
        order = "sdpa hopper triton mma reference"
    else:
        order = "hopper sdpa triton mma reference"
    return order.split()


_FP8_DTYPES = ("e4m3", "e5m2")


def _triton_fp8(p: Problem, flags: Flags) -> TritonPlan | str:
    too_old = archs.why_not_on(triton_fp8.ARCH, p.arch) if p.device == "cuda" else None
    return too_old or triton_fp8.plan(p, flags)


_FP8_CANDIDATES: Mapping[str, Candidate] = {"triton": _triton_fp8, "hopper": _hopper, "reference": _reference}


def _choose_fp8(p: Problem, flags: Flags) -> Choice:
    """On a GPU a kernel of ours, and nothing in its place: a slow path would lose what 8 bits are used for."""
    asked, on_kernels = flags["FFPA_BACKEND"], p.device == "cuda" or flags["FFPA_EMULATE"]
    names, why = [asked], f"FFPA_BACKEND={asked} asks for it"
    if asked == "auto":
        by_speed = ["triton", "hopper"] if max(p.d_qk, p.d_v) <= 128 else ["hopper", "triton"]
        names = ["hopper"] if flags["FFPA_EMULATE"] else by_speed if on_kernels else ["reference"]
        why = "what runs fp8 there"
    rejected = []
    for name in names:
        answer = _FP8_CANDIDATES[name](p, flags) if name in _FP8_CANDIDATES else f"{name} knows no 8-bit floats"
        if not isinstance(answer, str):
            return _chosen(p, name, answer, why, rejected)
        rejected.append((name, answer))
    if on_kernels:
        reasons = "; nor ".join(f"{name}: {answer}" for name, answer in rejected)
        way_out = f"; drop FFPA_BACKEND={asked}" if asked not in ("auto", *_FP8_CANDIDATES) else ""
        raise NotImplementedError(f"none can run {p}, not {reasons}{way_out}; or pass bfloat16 tensors to ffpa")
    fallback = f"FFPA_BACKEND={asked} is ignored: {rejected[0][1]}"
    return _chosen(p, "reference", None, "the other one that can", rejected, fallback)


def choose(p: Problem, flags: Flags) -> Choice:
    if p.dtype in _FP8_DTYPES:
        return _choose_fp8(p, flags)
    demand = _demand(p, flags)
    fallback = None
    if demand:
        backend, asked_by = demand
        answer = CANDIDATES[backend](p, flags)
        if not isinstance(answer, str):
            return _chosen(p, backend, answer, f"{asked_by} asks for it")
        if p.device == "cuda" or backend not in _OUR_KERNELS or flags["FFPA_EMULATE"]:
            raise NotImplementedError(f"{asked_by} cannot run {p}: {answer}; drop {asked_by} to choose automatically")
        fallback = f"{asked_by} is ignored: {answer}"

    rejected = []
    names = _by_speed(p, flags)
    for name in names:
        answer = CANDIDATES[name](p, flags)
        if not isinstance(answer, str):
            break
        rejected.append((name, answer))
    if p.device == "cuda" and name not in _OUR_KERNELS and "mma" in dict(rejected):
        fallback = f"runs on {name}, not on a kernel of ours: " + "; ".join(reason for _, reason in rejected)
    why = f"the first of {', '.join(names)} that can" if rejected else "the fastest that can"
    return _chosen(p, name, answer, why, rejected, fallback)
