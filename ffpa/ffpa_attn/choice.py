"""Which kernel runs a problem, and why. Pure: no tensors, no GPU, no torch.

Candidates are tried in order of speed; each says why it cannot run a problem, or None when it can. Only what a caller
forces (`level=`, FFPA_BACKEND) narrows the list, and on a GPU nothing else is then tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .spec import Problem


@dataclass(frozen=True)
class Choice:
    problem: Problem
    kernel: str  # the name of what runs
    backend: str
    why: str
    rejected: tuple[tuple[str, str], ...]  # (backend, why it cannot run this problem)
    fallback: str | None  # what to warn about (and to raise under FFPA_STRICT), or None

    def __str__(self) -> str:
        lines = [f"{self.problem}", f"  runs on {self.kernel}: {self.why}"]
        lines += [f"  not {backend}: {reason}" for backend, reason in self.rejected]
        return "\n".join(lines)


def _no_kernel(family: str) -> Callable[[Problem], str | None]:
    def why_not(p: Problem) -> str | None:
        if p.device != "cuda":
            return f"{family} kernels run on CUDA GPUs, and the tensors are on the {p.device}"
        return f"this installation holds no {family} kernel"

    return why_not


def _sdpa_why_not(p: Problem) -> str | None:
    """PyTorch's own fused attention, only where it means exactly the same and never materialises N^2."""
    if p.direction != "forward" or p.needs_lse:
        return "SDPA returns no LSE"
    if p.packed:
        return "SDPA takes no packed sequences"
    if p.mask:
        return "SDPA leaves open what a row without keys gives"
    if p.softcap:
        return "SDPA has no softcap"
    see = p.visibility
    if see.left >= 0 or see.right > 0:
        return "SDPA has no window"
    if see.right == 0 and not see.top_left and p.n_q != p.n_k:
        return "SDPA's causal mask is top-left aligned"
    if p.heads_q != p.heads_kv:
        return "SDPA repeats K and V or materialises N^2 for grouped heads"
    if p.d_qk != p.d_v:
        return "SDPA materialises N^2 where D_qk differs from D_v"
    if not (p.batch and p.n_q and p.n_k):
        return "there is nothing to compute"
    return None


def _reference_why_not(p: Problem) -> str | None:
    return None


CANDIDATES: Mapping[str, Callable[[Problem], str | None]] = {
    "hopper": _no_kernel("hopper"),
    "mma": _no_kernel("mma"),
    "triton": _no_kernel("triton"),
    "sdpa": _sdpa_why_not,
    "reference": _reference_why_not,
}
_OUR_KERNELS = ("hopper", "mma", "triton")


def _demand(p: Problem, flags: Mapping[str, Any]) -> tuple[str, str] | None:
    """(backend, who asked) when the caller forces one."""
    backend = flags["FFPA_BACKEND"]
    if p.level is not None and p.direction == "forward":
        if backend not in ("auto", "mma"):
            raise ValueError(
                f"`level` is {p.level}, which means the mma family, but FFPA_BACKEND={backend}; unset one of them"
            )
        return "mma", f"level={p.level}"
    return None if backend == "auto" else (backend, f"FFPA_BACKEND={backend}")


def choose(p: Problem, flags: Mapping[str, Any]) -> Choice:
    if flags["FFPA_EMULATE"] is not None:
        raise NotImplementedError(
            f"FFPA_EMULATE={flags['FFPA_EMULATE']}: this installation holds no kernel to emulate for {p}"
        )
    demand = _demand(p, flags)
    names = list(CANDIDATES)
    fallback = None
    if demand:
        backend, asked_by = demand
        reason = CANDIDATES[backend](p)
        if reason is None:
            return Choice(p, backend, backend, f"{asked_by} asks for it", (), None)
        if p.device == "cuda" or backend not in _OUR_KERNELS:
            raise NotImplementedError(f"{asked_by} cannot run {p}: {reason}; drop {asked_by} to choose automatically")
        fallback = f"{asked_by} is ignored: {reason}"

    rejected = []
    for name in names:
        reason = CANDIDATES[name](p)
        if reason is None:
            break
        rejected.append((name, reason))
    if p.device == "cuda" and name not in _OUR_KERNELS:
        fallback = f"runs on {name}, not on a kernel of ours: " + "; ".join(reason for _, reason in rejected)
    why = "the first of hopper, mma, triton, sdpa and reference that can" if rejected else "the fastest that can"
    return Choice(p, name, name, why, tuple(rejected), fallback)
