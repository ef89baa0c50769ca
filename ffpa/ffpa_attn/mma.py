"""The forward on mma.sync: which instance and which run-time settings a problem gets, and the call of it.

Up to 256 columns warps own whole rows; wider head dims, and levels 2 and 3, are split. `plan` is pure. The same plan runs natively on a GPU and, with FFPA_EMULATE, in the emulator on CPU tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from . import archs
from .spec import (
    COLUMNS,
    MOST_COLUMNS,
    ROWS_HEAD_DIMS,
    STREAMED_COLUMNS,
    ForwardMma,
    ForwardMmaRows,
    Problem,
    forward_specs,
    rows_specs,
)

# What the kernels do now, whatever is asked: a toggle forced to anything else cannot be honoured.
_SPLIT_FIXED = {
    "ENABLE_FFPA_QKV_SMEM_SHARE": True,  # K and V steps, and those of a Q that is not resident, share one ring
    "ENABLE_FFPA_PERSIST_KV_G2S": False,
    "ENABLE_FFPA_PERSIST_Q_S2R": False,
    "ENABLE_FFPA_PERSIST_V_S2R": False,
    "ENABLE_FFPA_REGISTERS_PIPE_KV": True,
    "ENABLE_FFPA_LAUNCH_GRID_DNHB": False,
}
_ROWS_FIXED = {
    "ENABLE_FFPA_QKV_SMEM_SHARE": False,
    "ENABLE_FFPA_SMEM_SWIZZLE_Q": True,
    "ENABLE_FFPA_SMEM_SWIZZLE_K": True,
    "ENABLE_FFPA_SMEM_SWIZZLE_V": True,
    "ENABLE_FFPA_PERSIST_Q_G2S": True,
    "ENABLE_FFPA_PERSIST_KV_G2S": True,
    "ENABLE_FFPA_PERSIST_V_S2R": True,  # a fragment of V is loaded once a tile, for all rows of a warp
    "ENABLE_FFPA_REGISTERS_PIPE_KV": True,
    "ENABLE_FFPA_LAUNCH_GRID_DNHB": False,
}

_MOST_POSITIONS = 2**31 - 1024  # row + key, and a tile beyond both
_MOST_BLOCKS = 2**31 - 1
_MOST_COLUMNS_OF_Q = 192  # in registers
_RESERVED = 1024  # bytes of shared memory that each block takes for itself
_BLOCKS_OF_ROWS = 2  # that an SM should hold of the kernel whose warps own rows
_MOST_GROUPED_COLUMNS = 640  # of a column group of level 2: the fewest groups recompute the least


class MmaPlan(NamedTuple):
    spec: ForwardMma | ForwardMmaRows
    level: int
    stages: int
    q_resident: bool


def smem_bytes(spec: ForwardMma | ForwardMmaRows, d_qk: int, stages: int, q_resident: bool) -> int:
    """As the Config's launch_shape says; a test compares the two."""
    if isinstance(spec, ForwardMmaRows):
        return (spec.rows + stages * 2 * spec.keys) * spec.head_dim * 2

    def step(rows: int, columns: int, padded: bool) -> int:
        return rows * (columns * 2 + 16 * padded)

    query = step(spec.rows, spec.key_columns, spec.pad_q)
    key = step(spec.keys, spec.key_columns, spec.pad_k) + (0 if q_resident else query)
    slot = max(key, step(spec.value_rows, spec.columns, spec.pad_v))
    score_warps_by_keys = 4 if spec.rows == 64 else 8
    statistics = (score_warps_by_keys + 1) * spec.rows * 4
    resident = -(-d_qk // spec.key_columns) * query if q_resident else 0
    return stages * slot + spec.rows * spec.keys * 2 + statistics + 64 + resident


def _accumulators(p: Problem, flags: Mapping[str, Any]) -> tuple[str, str] | str:
    """(acc_qk, acc_pv) as `acc` and the toggles say."""
    acc_qk = "f16" if p.acc == "f16" else "f32"
    acc_pv = "f32" if p.acc == "f32" else "f16"
    if flags["ENABLE_FFPA_FORCE_QK_F16"] is not None:
        acc_qk = "f16" if flags["ENABLE_FFPA_FORCE_QK_F16"] else "f32"
    if flags["ENABLE_FFPA_FORCE_PV_F16"] is not None:
        acc_pv = "f16" if flags["ENABLE_FFPA_FORCE_PV_F16"] else "f32"
    if "f16" in (acc_qk, acc_pv) and p.dtype != "f16":
        return f"tensor cores accumulate products of {p.dtype} in f32 only"
    return acc_qk, acc_pv


def _columns(d_v: int) -> int:
    return max(-(-d_v // 64) * 64, COLUMNS[0])


def _candidates(p: Problem, acc: tuple[str, str]) -> Iterator[tuple[int, ForwardMma]]:
    """(level, spec), the fastest first as measured on an H200 (.dev/measurements.md)."""
    groups = -(-p.d_v // _MOST_GROUPED_COLUMNS)
    of_level = {
        1: forward_specs(p.dtype, *acc, _columns(p.d_v)) if p.d_v <= MOST_COLUMNS else [],
        2: forward_specs(p.dtype, *acc, _columns(-(-p.d_v // groups))),
        3: forward_specs(p.dtype, *acc, STREAMED_COLUMNS, streamed=True),
    }
    for level in (p.level,) if p.level else (1, 3):
        for spec in of_level[level]:
            yield level, spec


def _with_padding(spec: ForwardMma, flags: Mapping[str, Any]) -> ForwardMma:
    pads = {f"pad_{x}": flags[f"ENABLE_FFPA_SMEM_SWIZZLE_{x.upper()}"] is False for x in "qkv"}
    return replace(spec, **pads)


def _stages(p: Problem, flags: Mapping[str, Any], all_stages: list[int]) -> list[int]:
    """Those that may be, the first ones preferred."""
    prefetch = flags["ENABLE_FFPA_PREFETCH_QKV"]
    stages = [p.num_stages] if p.num_stages else all_stages
    return (
        stages if prefetch is None else [n for n in stages if (n > 1) == prefetch]
    )  # one stage is what there is without


def _settings(spec, p: Problem, flags: Mapping[str, Any], limit: int) -> tuple[int, bool] | None:
    """(stages, q_resident) that fit: a resident Q before a longer ring, a ring as long as fits, if nothing is forced."""
    stages, resident = _stages(p, flags, [4, 3, 2, 1]), flags["ENABLE_FFPA_PERSIST_Q_G2S"]
    for q_resident in (True, False) if resident is None else (resident,):
        for n in stages:
            last_choice = q_resident and n == 1 and resident is None and len(stages) > 1
            if not last_choice and smem_bytes(spec, p.d_qk, n, q_resident) <= limit:
                return n, q_resident
    return None


def _not_known(flags: Mapping[str, Any], fixed: Mapping[str, bool], family: str) -> str | None:
    forced = (name for name, value in fixed.items() if flags[name] not in (None, value))
    return next((f"the {family} does not know {name}={int(flags[name])}" for name in forced), None)


def _too_large(spec: ForwardMma | ForwardMmaRows, p: Problem, blocks: int) -> str:
    if blocks > _MOST_BLOCKS:
        return f"{spec.name} needs more blocks than a grid holds"
    return f"{spec.name} with these settings needs more shared memory than {p.arch} has"


def _rows_plan(p: Problem, acc: tuple[str, str], flags: Mapping[str, Any]) -> MmaPlan | str:
    """Warps own whole rows, and whole tiles of K and V are in shared memory."""
    head_dim = max(p.d_qk, p.d_v)
    if head_dim > ROWS_HEAD_DIMS[-1]:
        return f"whole tiles of K and V are kept for up to {ROWS_HEAD_DIMS[-1]} columns, not {head_dim}"
    reason = _not_known(flags, _ROWS_FIXED, "mma forward for small head dims")
    if reason:
        return reason
    specs = rows_specs(p.dtype, *acc, next(d for d in ROWS_HEAD_DIMS if head_dim <= d))
    if p.mask or p.softcap or p.scale <= 0:
        specs = specs[-1:]
    in_registers = flags["ENABLE_FFPA_PERSIST_Q_S2R"]
    if in_registers and head_dim > _MOST_COLUMNS_OF_Q:
        return f"registers hold {_MOST_COLUMNS_OF_Q} columns of Q beside S and O, not {head_dim}"
    if in_registers is not None:  # 128 rows of Q are too many
        specs = [replace(spec, q_in_registers=in_registers) for spec in (specs[-1:] if in_registers else specs)]
    # First as many blocks on an SM as the kernel is made for, then a second stage.
    limit = archs.shared_memory_bytes(p.arch)
    share = (limit + _RESERVED) // _BLOCKS_OF_ROWS - _RESERVED
    stages = _stages(p, flags, [2, 1])
    for bytes_of_a_block, spec, n in itertools.product((share, limit), specs, stages):
        blocks = -(-p.n_q // spec.rows) * p.batch * p.heads_q
        if smem_bytes(spec, p.d_qk, n, True) <= bytes_of_a_block and blocks <= _MOST_BLOCKS:
            return MmaPlan(spec, 1, n, True)
    return _too_large(spec, p, blocks)


def _split_plan(p: Problem, acc: tuple[str, str], flags: Mapping[str, Any]) -> MmaPlan | str:
    """K and V come in steps along the head dim and along the keys."""
    if p.level == 1 and p.d_v > MOST_COLUMNS:
        return f"level 1 keeps O in registers, which hold {MOST_COLUMNS} columns of it and not {p.d_v}"
    reason = _not_known(flags, _SPLIT_FIXED, "split-D mma forward")
    if reason:
        return reason
    limit = archs.shared_memory_bytes(p.arch)
    fits = []
    for level, spec in _candidates(p, acc):
        spec = _with_padding(spec, flags)
        blocks = -(-p.n_q // spec.rows) * p.batch * p.heads_q * -(-p.d_v // spec.columns)
        settings = _settings(spec, p, flags, limit)
        if settings and blocks <= _MOST_BLOCKS:
            fits.append(MmaPlan(spec, level, *settings))
    if not fits:
        return _too_large(spec, p, blocks)
    return next((plan for plan in fits if plan.stages > 1), fits[0])


def plan(p: Problem, flags: Mapping[str, Any]) -> MmaPlan | str:
    """What runs the problem, or why nothing of this family can (whether it is built is another question)."""
    if p.direction != "forward":
        return "there is no mma backward kernel"
    if p.packed:
        return "the mma forward has no packed sequences"
    acc = _accumulators(p, flags)
    if isinstance(acc, str):
        return acc
    if p.n_q + p.n_k > _MOST_POSITIONS:
        return f"the mma forward counts positions in 32 bits, and {p.n_q} rows with {p.n_k} keys are too many"
    prefetch = flags["ENABLE_FFPA_PREFETCH_QKV"]
    if prefetch is not None and p.num_stages and prefetch != (p.num_stages > 1):
        return f"ENABLE_FFPA_PREFETCH_QKV={int(prefetch)} and num_stages={p.num_stages} exclude each other"

    keeps_whole_tiles = max(p.d_qk, p.d_v) <= ROWS_HEAD_DIMS[-1] or flags["ENABLE_FFPA_PERSIST_KV_G2S"]
    families = (_rows_plan, _split_plan) if keeps_whole_tiles and p.level in (None, 1) else (_split_plan,)
    reasons = []
    for family in families:
        answer = family(p, acc, flags)
        if not isinstance(answer, str):
            return answer
        reasons.append(answer)
    return "; ".join(reasons)


def _scratch(plan: MmaPlan, q, v, blocks: int, workspace_cap: int):
    """O in fp32 for each resident block, of level 3; fewer blocks run where the cap asks for it."""
    spec = plan.spec
    of_block = -(-v.shape[-1] // spec.columns) * spec.columns * spec.rows
    blocks = max(1, min(blocks, workspace_cap // (of_block * 4)))
    return torch.empty(blocks * of_block, dtype=torch.float32, device=q.device), blocks


def forward(plan: MmaPlan, q, k, v, out, lse, mask, rule, workspace_cap: int) -> None:
    """q, k, v, out: [B, H, N, D]; lse [B, H, N] or empty; mask as the caller gave it, or None."""
    if not out.numel():
        return
    if q.is_cuda:
        from . import native

        kernel, run = native.kernel(plan.spec, native.gpu_of(q.device)), native.library().attention_forward
        blocks = native.multiprocessors(q.device) if plan.spec.streamed else 0
    else:
        from . import emulated

        kernel, run, blocks = plan.spec, emulated.attention_forward, emulated.RESIDENT_BLOCKS
    scratch = None
    if plan.spec.streamed:
        scratch, blocks = _scratch(plan, q, v, blocks, workspace_cap)
    see = rule.visibility
    options = (rule.scale, rule.softcap, see.left, see.right, see.top_left, plan.stages, plan.q_resident)
    run(kernel, q, k, v, out, lse, mask, *options, scratch, blocks)
