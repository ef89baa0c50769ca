"""This module chooses which kernel runs a problem, and says why. It needs no tensors and no GPU.

Candidates are tried in order of speed (`_by_speed`). Each gives a plan, which runs the problem, or says why it cannot.
Only what a caller forces (`level=`, FFPA_BACKEND, FFPA_EMULATE) narrows the list; on a GPU nothing else is then tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from .. import env
from ..launching import native
from ..specs import archs
from ..specs.problem import FP8_DTYPES, Problem
from . import families, reference_plan, row_tiles, sdpa, triton_attention, triton_fp8
from .backward_short import ShortPlan
from .forward_short import ForwardShortPlan
from .fused import FusedPlan

Flags = Mapping[str, Any]


class Plan(Protocol):
    """How a backend runs a problem. Tensors are [B, H, N, D] in any strides, or [H, T, D] of packed sequences, whose
    offsets and longest lengths come along; lse is [B, H, N], [H, T], or empty where none is wanted; the mask is the
    caller's. `memo` is the same for calls that differ in addresses alone. `sinks` are float32 [Hq]; `largest` is float32
    [B, Hq] (of packed sequences one row each), holds -inf, and takes the largest scores; each is None where the problem
    has none, and then it may be left away. `pages` say where the keys of k and v lie that are pools (attention_call.Pages);
    plans of other problems need not know it. A plan has those of the methods that it is chosen for. One that may give a
    result of its own making has `fresh`, which takes q, k and v of a dense call without mask, sinks, LSE and largest
    scores, and returns the result, or None where `forward` must be called.
    """

    kernel: str  # the name of what runs
    specs: tuple  # what nvcc compiles for it

    def forward(
        self, q, k, v, out, lse, mask, offsets, rule, workspace_cap: int, memo: dict, sinks=None, largest=None
    ) -> None: ...

    def forward_fp8(
        self, q, k, v, scales, out, lse, rule, workspace_cap: int, memo: dict, sinks=None, largest=None
    ) -> None: ...

    def backward(self, saved, grads, d_mask, mask, offsets, rule, workspace_cap: int, memo: dict) -> None: ...


@dataclass(frozen=True)
class Choice:
    problem: Problem
    kernel: str  # the name of what runs
    backend: str
    plan: Plan
    why: str
    rejected: tuple[tuple[str, str], ...]  # (backend, why it cannot run this problem)
    fallback: str | None  # what to warn about (and to raise under FFPA_STRICT), or None

    def __str__(self) -> str:
        lines = [f"{self.problem}", f"  runs on {self.kernel}: {self.why}"]
        if self.problem.arch == "sm_90" and (microseconds := getattr(self.plan, "microseconds", 0)):
            lines.append(f"  estimated to take {microseconds:.3g} µs of an otherwise idle H200")
        if isinstance(self.plan, sdpa.SdpaPlan) and not isinstance(self.plan.otherwise, sdpa.Refusal):
            lines.append(f"  or on {self.plan.otherwise.kernel}, where PyTorch takes no kernel that is as fast")
        lines += [f"  not {backend}: {reason}" for backend, reason in self.rejected]
        return "\n".join(lines)


def _triton(p: Problem, flags: Flags) -> Plan | str:
    if p.dtype not in FP8_DTYPES:
        return triton_attention.plan(p, flags)
    too_old = archs.why_not_on(triton_fp8.ARCH, p.arch) if p.device == "cuda" else None
    return too_old or triton_fp8.plan(p, flags)


CANDIDATES: Mapping[str, Callable[[Problem, Flags], Plan | str]] = {
    "hopper": families.hopper,
    "mma": families.mma,
    "triton": _triton,
    "sdpa": sdpa.plan,
    "reference": reference_plan.plan,
}
_OUR_KERNELS = ("hopper", "mma", "triton")


def _demand(p: Problem, flags: Flags) -> tuple[str, str] | None:
    """Returns (backend, who asked) when the caller forces one."""
    backend, fp8 = flags["FFPA_BACKEND"], p.dtype in FP8_DTYPES
    if p.level is not None and p.direction == "forward":
        if backend not in ("auto", "mma"):
            raise ValueError(
                f"`level` is {p.level}, which means the mma family, but FFPA_BACKEND={backend}; unset one of them"
            )
        return "mma", f"level={p.level}"
    if backend != "auto":
        return backend, f"FFPA_BACKEND={backend}"
    if flags["FFPA_TRITON_CORES"] and p.direction == "forward" and not fp8:
        return "triton", f"FFPA_TRITON_CORES={flags['FFPA_TRITON_CORES']}"
    if flags["FFPA_EMULATE"]:
        on_wgmma = fp8 or (p.direction == "backward" and flags["FFPA_EMULATE"] == "sm_90a")
        return "hopper" if on_wgmma else "mma", f"FFPA_EMULATE={flags['FFPA_EMULATE']}"
    return None


_MOST_ROWS_OF_SHORT = 128  # rows of a head beyond which others read few keys faster, but for narrow heads
_TRITON_BACKWARD_COLUMNS = 128  # widest where Triton's backward is the fastest: at 128 it has 469 T, wgmma 334
_LEAST_KEYS_BESIDE_RULES = (
    1024  # keys from which on wgmma's narrow backward was measured beside a softcap or a bool mask
)


def _is_backward_for_triton(p: Problem) -> bool:
    """Says whether Triton's backward is the fastest. A mask or a softcap takes half of its speed or more, and up to a quarter
    of wgmma's (D = 64 and 128, 1,024 and 4,096 keys, H200), which reads masks of 32 bits slowly, and those of 16 bits
    beside a softcap.
    """
    rules = p.mask == "bool" or (p.mask == "16-bit additive" and not p.softcap) or (not p.mask and p.softcap > 0)
    many_keys = p.n_k >= _LEAST_KEYS_BESIDE_RULES and not p.packed
    return max(p.d_qk, p.d_v) <= _TRITON_BACKWARD_COLUMNS and not (p.arch == "sm_90" and rules and many_keys)


def _is_soon_done(p: Problem, of_mma: Plan | str) -> bool:
    """Says whether the mma forward runs, and takes a GPU no longer than others do: all keys are in one tile; or so few
    are there that, on a GPU of Hopper, a call takes no longer than its launch, which costs the host least on mma.
    """
    widest = max(p.d_qk, p.d_v)
    if isinstance(of_mma, str):
        return False
    if isinstance(of_mma, ForwardShortPlan) and (widest <= 64 or p.n_q <= _MOST_ROWS_OF_SHORT):
        return True
    most_keys = 256 if widest <= 64 else 128 if widest <= 256 else 0
    return p.arch == "sm_90" and p.n_k <= most_keys and row_tiles.count(p, 64) <= archs.multiprocessors(p.arch)


def _has_few_rows(p: Problem, widest: int) -> bool:
    """Says whether a GPU of Hopper has too few row tiles of one head: our kernels then share tiles, or cut keys. Up to
    128 columns SDPA and Triton are as fast, but where keys are many more than rows.
    """
    if widest > 128:
        return row_tiles.why_slower(p) is not None
    if p.n_q <= row_tiles.ROWS // 2 and p.n_k >= 16 * p.n_q:
        return True
    many_keys = p.n_k >= 4 * p.n_q and not p.mask
    return many_keys and p.n_q < 1024 and row_tiles.count(p) < row_tiles.least_blocks(p)


_LEAST_KEYS_TO_CUT = 2048  # keys from which on parts and their merge are faster than cuDNN's whole rows
_CUDNN_ABOVE_128 = ((192, 128), (256, 256))  # wider D_qk and D_v for which cuDNN's forward was measured


def _is_for_cudnn(p: Problem, widest: int, of_hopper: Plan | str) -> bool:
    """Says whether cuDNN's forward is the fastest on a GPU of Hopper (1.02 to 1.3 times as fast as ours, on an H100), and
    lengths are likely to come again: it takes 40 ms to plan for those that it has not seen.

    It is for rows that see all keys; and, where heads are not grouped, for causal ones up to 64 columns, or with tiles so
    few that ours do not balance what rows see. Causal calls of grouped heads are prompts, each of another length. Our
    kernels have calls of few rows, too, and those whose row tiles leave half of the GPU idle, as they cut keys; and
    results that lie where a caller says, to which SDPA's would be copied (that was not measured).
    """
    if p.copied or not (widest <= 128 or (p.d_qk, p.d_v) in _CUDNN_ABOVE_128):
        return False
    tiles, multiprocessors = row_tiles.count(p), archs.multiprocessors(p.arch)
    half_empty = p.n_q <= row_tiles.ROWS // 2 and (p.group > 1 or widest > 128)
    if half_empty or (widest <= 128 and _has_few_rows(p, widest)) or _leaves_half_idle(p, of_hopper):
        return False
    if not p.visibility.bounded:
        return True
    return p.group == 1 and (widest <= 64 or (widest <= 192 and tiles <= multiprocessors))


def _is_mask_for_triton(p: Problem, widest: int) -> bool:
    """Says whether Triton's forward is the fastest up to 128 columns as there is a mask. With more than 64, wgmma takes 0.7
    of its time beside a bool mask of many keys, and 0.95 beside one of 16 bits that is added.
    """
    return bool(p.mask) and (p.mask == "additive" or widest <= 64 or p.n_k < _LEAST_KEYS_BESIDE_RULES)


def _leaves_half_idle(p: Problem, of_hopper: Plan | str) -> bool:
    """Says whether the row tiles leave half of the GPU idle, and the keys that they see are worth a merge."""
    cuts_keys = isinstance(of_hopper, FusedPlan) and of_hopper.parts.count > 1 and p.n_k >= _LEAST_KEYS_TO_CUT
    return cuts_keys and 2 * row_tiles.count(p) <= archs.multiprocessors(p.arch)


def _is_for_triton(p: Problem) -> bool:
    """Says whether Triton's forward is faster than ours up to 64 columns, on a GPU of Hopper: its programs are small and
    start soon, but where they make up one wave or two, ours share the work more evenly, and cut many keys.
    """
    tiles, multiprocessors = row_tiles.count(p), archs.multiprocessors(p.arch)
    fills_waves = tiles >= 3 * multiprocessors
    is_soon_done = p.n_k < 4 * p.n_q and (tiles <= multiprocessors or p.n_k < 1024)
    return not p.packed and (fills_waves or is_soon_done)


def _by_speed(p: Problem, flags: Flags, answer: Callable[[str], Plan | str]) -> list[str]:
    """Returns candidates in order of speed, measured on H200s and H100s (.dev/measurements.md, bench/results/shapes),
    where SDPA's kernels are cuDNN's. On other GPUs Triton's forward is not measured. SDPA and Triton know nothing of
    stages, accumulators and experiments. For 8-bit floats a GPU gets a kernel of ours, and nothing in its place: a slow
    path would lose what 8 bits are used for.
    """
    widest = max(p.d_qk, p.d_v)
    asks_for_mma = p.num_stages or p.acc != "f32" or any(flags[name] is not None for name in env.EXPERIMENTS)
    if p.dtype in FP8_DTYPES:
        order = "reference" if p.device != "cuda" else "triton hopper" if widest <= 128 else "hopper triton"
    elif p.pages:
        order = "hopper mma reference"
    elif p.device == "cuda" and p.direction == "backward":
        for_triton, short = _is_backward_for_triton(p), isinstance(answer("mma"), ShortPlan)
        wide = widest > _TRITON_BACKWARD_COLUMNS
        order = "hopper mma triton sdpa reference" if wide else "hopper triton mma sdpa reference"
        order = "triton hopper mma sdpa reference" if for_triton else order
        order = "mma hopper triton sdpa reference" if short else order
    elif p.device == "cuda" and not asks_for_mma and _is_soon_done(p, answer("mma")):
        order = "mma hopper sdpa triton reference"
    elif p.device != "cuda" or asks_for_mma or widest > triton_attention.MOST_COLUMNS:
        order = "hopper mma sdpa reference"
    elif p.arch != "sm_90":
        order = "hopper sdpa mma reference" if widest > 192 else "hopper mma sdpa reference"
    else:
        narrow = (widest <= 64 and _is_for_triton(p)) or (widest <= 128 and _is_mask_for_triton(p, widest))
        ours = "triton hopper mma" if narrow else "hopper triton mma"
        of_hopper = answer("hopper")
        few = _has_few_rows(p, widest) or _leaves_half_idle(p, of_hopper)
        ours = "hopper mma triton" if few else ours
        order = f"sdpa {ours} reference" if _is_for_cudnn(p, widest, of_hopper) else f"{ours} sdpa reference"
    return order.split()


def _chosen(p: Problem, name: str, plan: Plan, why: str, rejected=(), fallback: str | None = None) -> Choice:
    if p.supposed:
        why += f", in an installed wheel ({native.PYTHON_ONLY})"
    return Choice(p, plan.kernel, name, plan, why, tuple(rejected), fallback)


def _impossible(p: Problem, asked_by: str | None, rejected: list[tuple[str, str]]) -> NotImplementedError:
    """Returns the error of a call that none may run."""
    if p.dtype not in FP8_DTYPES:
        return NotImplementedError(
            f"{asked_by} cannot run {p}: {rejected[0][1]}; drop {asked_by} to choose automatically"
        )
    reasons = "; nor ".join(f"{name}: {answer}" for name, answer in rejected)
    way_out = f"; drop {asked_by}" if rejected[0][0] in ("mma", "sdpa") else ""
    return NotImplementedError(f"none can run {p}, not {reasons}{way_out}; or pass bfloat16 tensors to ffpa")


_ARCHS_OF = {163: "sm_80", 99: "sm_86"}  # a kind of GPU with so many KB of shared memory


def choose(p: Problem, flags: Flags) -> Choice:
    limit = flags["FFPA_SMEM_KB"]
    if not limit or p.device != "cuda" or archs.shared_memory_bytes(p.arch) <= limit << 10:
        return _choose(p, flags)
    choice = _choose(p._replace(arch=_ARCHS_OF[limit], at_hand=p.arch), flags)
    return replace(choice, why=f"{choice.why}, as on a GPU with {limit} KB of shared memory (FFPA_SMEM_KB)")


def _choose(p: Problem, flags: Flags) -> Choice:
    answers: dict[str, Plan | str] = {}

    def answer(name: str) -> Plan | str:
        if name not in answers:
            answers[name] = CANDIDATES[name](p, flags)
        return answers[name]

    demand, fallback = _demand(p, flags), None
    if demand:
        backend, asked_by = demand
        plan = answer(backend)
        if not isinstance(plan, str):
            return _chosen(p, backend, plan, f"{asked_by} asks for it")
        of_ours = backend in _OUR_KERNELS or p.dtype in FP8_DTYPES
        if p.device == "cuda" or flags["FFPA_EMULATE"] or not of_ours:
            raise _impossible(p, asked_by, [(backend, plan)])
        fallback = f"{asked_by} is ignored: {plan}"

    rejected = []
    names = _by_speed(p, flags, answer)
    for name in names:
        plan = answer(name)
        if not isinstance(plan, str):
            break
        rejected.append((name, plan))
    else:
        raise _impossible(p, None, rejected)
    if isinstance(plan, sdpa.SdpaPlan):
        behind = (answer(name) for name in names[len(rejected) + 1 :])
        plan = sdpa.beside(next(other for other in behind if not isinstance(other, str)), p)
    if p.device == "cuda" and name not in _OUR_KERNELS and "mma" in dict(rejected):
        fallback = f"runs on {name}, not on a kernel of ours: " + "; ".join(reason for _, reason in rejected)
    why = f"the first of {', '.join(names)} that can" if rejected else "the fastest that can"
    return _chosen(p, name, plan, why, rejected, fallback)
