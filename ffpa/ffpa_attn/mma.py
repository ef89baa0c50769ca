"""The forward on mma.sync: which kernel, which instance and which run-time settings a problem gets, and the call of it.

`plan` is pure. The same plan runs natively on a GPU and, with FFPA_EMULATE, in the emulator on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import archs
from .spec import L1_HEAD_DIMS, ROWS_HEAD_DIMS, ForwardMmaL1, ForwardMmaRows, KernelSpec, Problem

# What the kernels do, whatever is asked: a toggle forced to anything else cannot be honoured.
_FIXED = {
    "ENABLE_FFPA_FORCE_QK_F16": False,
    "ENABLE_FFPA_FORCE_PV_F16": False,
    "ENABLE_FFPA_QKV_SMEM_SHARE": False,
    "ENABLE_FFPA_SMEM_SWIZZLE_Q": True,
    "ENABLE_FFPA_SMEM_SWIZZLE_K": True,
    "ENABLE_FFPA_SMEM_SWIZZLE_V": True,
    "ENABLE_FFPA_LAUNCH_GRID_DNHB": False,
}
_L1_FIXED = _FIXED | {
    "ENABLE_FFPA_PERSIST_KV_G2S": False,
    "ENABLE_FFPA_PERSIST_Q_S2R": False,
    "ENABLE_FFPA_PERSIST_V_S2R": False,
    "ENABLE_FFPA_REGISTERS_PIPE_KV": False,
}
_ROWS_FIXED = _FIXED | {
    "ENABLE_FFPA_PERSIST_Q_G2S": True,
    "ENABLE_FFPA_PERSIST_KV_G2S": True,
    "ENABLE_FFPA_PERSIST_V_S2R": True,  # a fragment of V is loaded once a tile, for all rows of a warp
    "ENABLE_FFPA_REGISTERS_PIPE_KV": True,
}

_MOST_POSITIONS = 2**31 - 1024  # row + key, and a tile beyond both
_MOST_BLOCKS = 2**31 - 1
_RESERVED = 1024  # bytes of shared memory that each block takes for itself
_MOST_HEADS = 65535  # and batches: a grid's second and third dimension


class MmaPlan(NamedTuple):
    spec: KernelSpec
    stages: int
    q_resident: bool


def smem_bytes(spec: KernelSpec, d_qk: int, stages: int, q_resident: bool) -> int:
    """As the Config's launch_shape says; a test compares the two."""
    if isinstance(spec, ForwardMmaRows):
        return (spec.rows + stages * 2 * spec.keys) * spec.head_dim * 2
    key_columns = min(32768 // (spec.keys * 2), 128)
    value_rows = 64 if spec.head_dim <= 128 else 32 if spec.head_dim <= 512 else 16
    query_step = spec.rows * key_columns * 2
    slot = max(spec.keys * key_columns * 2 + (0 if q_resident else query_step), value_rows * spec.head_dim * 2)
    statistics = (spec.keys // 32 + 1) * spec.rows * 4
    resident = -(-d_qk // key_columns) * query_step if q_resident else 0
    return stages * slot + spec.rows * spec.keys * 2 + statistics + resident


def _settings(spec, p: Problem, flags: Mapping[str, Any], limit: int) -> tuple[int, bool] | str:
    """(stages, q_resident), or why not: a resident Q before a longer ring, a ring as long as fits, if nothing is forced."""
    stages = [p.num_stages] if p.num_stages else [4, 3, 2, 1]
    prefetch, resident = flags["ENABLE_FFPA_PREFETCH_QKV"], flags["ENABLE_FFPA_PERSIST_Q_G2S"]
    if prefetch is not None:  # one stage is what there is without
        stages = [n for n in stages if (n > 1) == prefetch]
    if not stages:
        return f"ENABLE_FFPA_PREFETCH_QKV={int(prefetch)} and num_stages={p.num_stages} exclude each other"
    for q_resident in (True, False) if resident is None else (resident,):
        for n in stages:
            last_choice = q_resident and n == 1 and resident is None and len(stages) > 1
            if not last_choice and smem_bytes(spec, p.d_qk, n, q_resident) <= limit:
                return n, q_resident
    return f"{spec.name} with these settings needs more shared memory than {p.arch} has"


def _not_fixed(flags: Mapping[str, Any], fixed: Mapping[str, bool], kernel: str) -> str | None:
    for name, value in fixed.items():
        if flags[name] not in (None, value):
            return f"the {kernel} forward does not know {name}={int(flags[name])}"
    return None


def _rows_plan(p: Problem, flags: Mapping[str, Any]) -> MmaPlan | str:
    """Small head dims: whole tiles of K and V in shared memory, S and P in registers."""
    if max(p.d_qk, p.d_v) > ROWS_HEAD_DIMS[-1]:
        return f"whole tiles of K and V are kept for head dims up to {ROWS_HEAD_DIMS[-1]}"
    reason = _not_fixed(flags, _ROWS_FIXED, "small head dim")
    if reason:
        return reason
    spec = ForwardMmaRows.of(p.dtype, max(p.d_qk, p.d_v), flags["ENABLE_FFPA_PERSIST_Q_S2R"])
    if max(p.batch, p.heads_q) > _MOST_HEADS:
        return f"{spec.name} takes no more than {_MOST_HEADS} heads and batches"
    prefetch = flags["ENABLE_FFPA_PREFETCH_QKV"]
    stages = [p.num_stages] if p.num_stages else [2, 1]
    if prefetch is not None:  # one stage is what there is without
        stages = [n for n in stages if (n > 1) == prefetch]
    # As many blocks on an SM as the spec is made for come first, then a second stage.
    block = archs.shared_memory_bytes(p.arch)
    share = (block + _RESERVED) // spec.blocks - _RESERVED
    for limit in (share, block):
        for n in stages:
            if smem_bytes(spec, p.d_qk, n, True) <= limit:
                return MmaPlan(spec, n, True)
    return f"{spec.name} with these settings needs more shared memory than {p.arch} has"


def _l1_plan(p: Problem, flags: Mapping[str, Any]) -> MmaPlan | str:
    """Split-D: K and V in steps along the head dim."""
    if p.d_v > L1_HEAD_DIMS[-1]:
        return f"level 1 keeps O in registers, which hold {L1_HEAD_DIMS[-1]} columns of it and not {p.d_v}"
    reason = _not_fixed(flags, _L1_FIXED, "split-D")
    if reason:
        return reason
    spec = ForwardMmaL1.of(p.dtype, p.d_v)
    if -(-p.n_q // spec.rows) * p.batch * p.heads_q > _MOST_BLOCKS:
        return f"{spec.name} needs more blocks than a grid holds"
    settings = _settings(spec, p, flags, archs.shared_memory_bytes(p.arch))
    return settings if isinstance(settings, str) else MmaPlan(spec, *settings)


def plan(p: Problem, flags: Mapping[str, Any]) -> MmaPlan | str:
    """What runs the problem, or why nothing of this family can (whether it is built is another question)."""
    if p.direction != "forward":
        return "there is no mma backward kernel"
    if p.level in (2, 3):
        return f"there is no mma kernel of level {p.level}"
    for wanted, what in ((p.packed, "packed sequences"), (p.mask, "masks"), (p.softcap, "softcap")):
        if wanted:
            return f"the mma forward has no {what}"
    if p.acc != "f32":
        return f"the mma forward accumulates in f32, not {p.acc}"
    if p.n_q + p.n_k > _MOST_POSITIONS:
        return f"the mma forward counts positions in 32 bits, and {p.n_q} rows with {p.n_k} keys are too many"
    rows = _rows_plan(p, flags)
    if not isinstance(rows, str):
        return rows
    l1 = _l1_plan(p, flags)
    return f"{rows}; {l1}" if isinstance(l1, str) else l1


def forward(plan: MmaPlan, q, k, v, out, lse, rule) -> None:
    """q, k, v, out: [B, H, N, D]; lse [B, H, N] or empty."""
    if not out.numel():
        return
    see = rule.visibility
    options = (rule.scale, see.left, see.right, see.top_left, plan.stages, plan.q_resident)
    if q.is_cuda:
        from . import native

        kernel = native.kernel(plan.spec, native.gpu_of(q.device))
        native.library().attention_forward(kernel, q, k, v, out, lse, *options)
    else:
        from . import emulated

        emulated.attention_forward(plan.spec, q, k, v, out, lse, *options)
