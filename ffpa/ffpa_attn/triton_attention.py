"""Attention in Triton for head dims up to 256, forward and backward: which tiles a problem gets, and the launch.

Importing this module imports no Triton; a launch does. On the CPU the same kernels run in Triton's interpreter
(TRITON_INTERPRET=1, to be set before Triton is imported).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from . import archs, env
from .spec import Problem

MOST_COLUMNS = 256
_MOST_POSITIONS = 2**29  # of rows and keys: twice their sum is counted in 32 bits
_DELTA_ROWS = 64
_SLACK_BYTES = 1 << 10
_LEAST_CAP, _LARGEST_CAP = 1e-30, 1e30  # beyond: all scores are 0, or as they are without a cap


class Tiles(NamedTuple):
    rows: int
    keys: int
    warps: int
    stages: int


class TritonPlan(NamedTuple):
    direction: str
    widths: tuple[int, int]  # of Q and K, of V: powers of 2
    over_rows: Tiles  # forward, and dQ: programs own rows
    over_keys: Tiles | None  # dK and dV: programs own keys

    @property
    def kernel(self) -> str:
        rows, keys, *_ = self.over_rows
        return f"triton_{self.direction}_head_dim{max(self.widths)}_rows{rows}_keys{keys}"


# By width, the first that fits shared memory.
_FORWARD = {
    64: (Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2)),
    128: (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)),
    256: (Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1)),
}
_ROWS_GRADIENT = {
    64: (Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2)),
    128: (Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 1)),
    256: (Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 1)),
}
_KEYS_GRADIENT = {
    64: (Tiles(64, 128, 4, 3), Tiles(64, 64, 4, 2)),
    128: (Tiles(64, 128, 8, 2), Tiles(32, 64, 4, 2), Tiles(32, 64, 4, 1)),
    256: (Tiles(32, 64, 8, 2), Tiles(32, 32, 4, 1)),
}


@cache
def why_not() -> str | None:
    """Why Triton cannot run here at all."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install 'ffpa-attn[triton]'"
    return None


def _width(d: int) -> int:
    """Triton's tiles have powers of 2."""
    return max(16, 1 << (d - 1).bit_length())


def _smem_bytes(tiles: Tiles, widths: tuple[int, int], direction: str, owns_keys: bool) -> int:
    """At most, as Triton lays them out: own rows (or keys) once, the others in every stage, and P or dS on its way."""
    own, others = (tiles.keys, tiles.rows) if owns_keys else (tiles.rows, tiles.keys)
    resident = own * (widths[0] if direction == "forward" else sum(widths)) * 2
    return resident + tiles.stages * others * sum(widths) * 2 + own * others * 2 + _SLACK_BYTES


def _first_that_fits(table: Mapping[int, tuple[Tiles, ...]], p: Problem, owns_keys: bool = False) -> Tiles | str:
    widths = _width(p.d_qk), _width(p.d_v)
    for tiles in table[max(64, *widths)]:
        tiles = tiles._replace(stages=p.num_stages or tiles.stages)
        if _smem_bytes(tiles, widths, p.direction, owns_keys) <= archs.shared_memory_bytes(p.arch or "sm_80"):
            return tiles
    return f"{p.num_stages} stages of {max(widths)} columns do not fit the shared memory of {p.arch}"


def plan(p: Problem, flags: Mapping[str, Any]) -> TritonPlan | str:
    """What runs the problem, or why Triton cannot."""
    reason = why_not()
    if reason:
        return reason
    if p.device != "cuda" and not flags["TRITON_INTERPRET"]:
        return "Triton runs CPU tensors in its interpreter alone; set TRITON_INTERPRET=1 before it is imported"
    if max(p.d_qk, p.d_v) > MOST_COLUMNS:
        return f"the Triton kernels keep whole rows on chip, up to {MOST_COLUMNS} columns and not {max(p.d_qk, p.d_v)}"
    if p.acc != "f32":
        return f"the Triton kernels accumulate in f32, not as acc={p.acc!r}"
    if p.n_q + p.n_k > _MOST_POSITIONS:
        return f"the Triton kernels count positions in 32 bits, and {p.n_q} rows with {p.n_k} keys are too many"
    experiment = next((name for name in env.EXPERIMENTS if flags[name] is not None), None)
    if experiment:
        return f"the Triton kernels do not know {experiment}={int(flags[experiment])}"
    widths = _width(p.d_qk), _width(p.d_v)
    if p.direction == "forward":
        over_rows, over_keys = _first_that_fits(_FORWARD, p), None
    else:
        over_rows, over_keys = _first_that_fits(_ROWS_GRADIENT, p), _first_that_fits(_KEYS_GRADIENT, p, True)
    refused = next((answer for answer in (over_rows, over_keys) if isinstance(answer, str)), None)
    return refused or TritonPlan(p.direction, widths, over_rows, over_keys)


# ---- launches ----


def _dense(x: torch.Tensor, packed: bool) -> torch.Tensor:
    """[B, H, N, D] of dense tensors; packed ones, [H, T, D], as one batch entry."""
    return x.unsqueeze(0) if packed else x


def _readable(x: torch.Tensor) -> torch.Tensor:
    """The interpreter multiplies the bits of bfloat16 as integers: it gets f32."""
    return x.float() if x.dtype == torch.bfloat16 and x.device.type == "cpu" else x


@contextlib.contextmanager
def _writable(*results: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """What a kernel writes; see _readable."""
    targets = [_readable(x) for x in results]
    yield targets
    for x, target in zip(results, targets, strict=True):
        if target is not x:
            x.copy_(target)


def _mask_of(mask: torch.Tensor | None, q: torch.Tensor) -> tuple[str, torch.Tensor, tuple[int, ...]]:
    """(kind, tensor, strides over batch, heads, rows and keys: 0 where it is broadcast)."""
    if mask is None:
        return "none", q, (0, 0, 0, 0)
    mask = mask[(None,) * (4 - mask.dim())]
    strides = tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    return ("bool", mask.view(torch.uint8), strides) if mask.dtype == torch.bool else ("additive", mask, strides)


class _Call:
    """What all kernels of a call are given alike."""

    def __init__(self, plan: TritonPlan, q, k, v, mask, offsets, rule):
        packed = offsets is not None
        cu_q, cu_k, longest_q, longest_k = offsets if packed else (q, k, q.shape[-2], k.shape[-2])
        self.packed, self.sequences = packed, len(cu_q) - 1 if packed else q.shape[0]
        self.q, self.k, self.v = (_dense(_readable(x), packed) for x in (q, k, v))
        self.heads, self.heads_kv = self.q.shape[1], self.k.shape[1]
        total_q, total_k = self.q.shape[2], self.k.shape[2]
        self.longest_q, self.longest_k = min(longest_q, total_q), min(longest_k, total_k)
        self.offsets = cu_q, cu_k
        kind, self.mask, self.mask_strides = _mask_of(mask, self.q)
        see, cap, scale = rule.visibility, rule.softcap, rule.scale
        if cap and cap < _LEAST_CAP:
            cap, scale = 0.0, 0.0
        capped = 0 < cap < _LARGEST_CAP
        everything = self.longest_q + self.longest_k
        self.numbers = (
            self.heads // self.heads_kv, self.longest_q, self.longest_k, total_q, total_k, self.q.shape[3], self.v.shape[3],
            float(scale), float(cap if capped else 0.0), *(everything if x < 0 else min(x, everything) for x in (see.left, see.right)),
        )  # fmt: skip
        self.options = {
            "PACKED": packed,
            "TOP_LEFT": see.top_left,
            "CAPPED": capped,
            "MASK": kind,
            "WIDTH_QK": plan.widths[0],
            "WIDTH_V": plan.widths[1],
            "PAD_QK": plan.widths[0] != self.q.shape[3],
            "PAD_V": plan.widths[1] != self.v.shape[3],
        }

    def blocks(self, length: int, block: int, heads: int) -> tuple[int]:
        return (-(-length // block) * heads * self.sequences,)


def _how(tiles: Tiles) -> dict[str, int]:
    return {"ROWS": tiles.rows, "KEYS": tiles.keys, "num_warps": tiles.warps, "num_stages": tiles.stages}


def forward(plan: TritonPlan, q, k, v, out, lse, mask, offsets, rule) -> None:
    """q, k, v, out: [B, H, N, D]; lse [B, H, N] or empty; packed sequences [H, T, D], [H, T] and their offsets."""
    from .triton_kernels import forward_kernel

    if offsets:  # rows of no sequence
        out.zero_()
        lse.fill_(-float("inf"))
    call = _Call(plan, q, k, v, mask, offsets, rule)
    if not out.numel() or not call.sequences or not call.longest_q:
        return
    with_lse = lse.dim() > 1
    lse = _dense(lse, call.packed) if with_lse else lse.view(1, 1, -1)
    with _writable(_dense(out, call.packed)) as (out,):
        forward_kernel[call.blocks(call.longest_q, plan.over_rows.rows, call.heads)](
            call.q, call.k, call.v, out, lse, call.mask, *call.offsets,
            *(stride for x in (call.q, call.k, call.v, out) for stride in x.stride()[:3]), *lse.stride()[:2],
            *call.mask_strides, call.heads, *call.numbers, LSE=with_lse, **call.options, **_how(plan.over_rows),
        )  # fmt: skip


def backward(plan: TritonPlan, grad, grad_lse, q, k, v, out, lse, dq, dk, dv, mask, offsets, rule) -> None:
    """dq, dk, dv are zero where no row is written: rows of no sequence."""
    from .triton_kernels import delta_kernel, keys_gradient_kernel, rows_gradient_kernel

    call = _Call(plan, q, k, v, mask, offsets, rule)
    if not call.sequences or not call.longest_q or not call.longest_k:
        return
    grad, out = (_dense(_readable(x), call.packed) for x in (grad, out))
    lse = _dense(lse.contiguous(), call.packed)
    delta = torch.empty_like(lse)
    with_lse = grad_lse is not None
    grad_lse = _dense(grad_lse, call.packed) if with_lse else lse
    over_rows, over_keys = plan.over_rows, plan.over_keys
    batch, heads, n_q, d_v = grad.shape
    delta_kernel[(-(-n_q // _DELTA_ROWS) * heads * batch,)](
        out, grad, grad_lse, delta, *out.stride()[:3], *grad.stride(), *lse.stride()[:2], *grad_lse.stride(), heads, n_q, d_v,
        GRAD_LSE=with_lse, WIDTH_V=plan.widths[1], PAD_V=plan.widths[1] != d_v, ROWS=_DELTA_ROWS,
    )  # fmt: skip
    inputs = (call.q, call.k, call.v, grad, lse, delta)
    strides = (
        *(stride for x in (call.q, call.k, call.v) for stride in x.stride()[:3]), *grad.stride(), *lse.stride()[:2],
    )  # fmt: skip
    with _writable(*(_dense(x, call.packed) for x in (dq, dk, dv))) as (dq, dk, dv):
        keys_gradient_kernel[call.blocks(call.longest_k, over_keys.keys, call.heads_kv)](
            *inputs, dk, dv, call.mask, *call.offsets, *strides, *dk.stride()[:3], *dv.stride()[:3], *call.mask_strides,
            call.heads_kv, *call.numbers, **call.options, **_how(over_keys),
        )  # fmt: skip
        rows_gradient_kernel[call.blocks(call.longest_q, over_rows.rows, call.heads)](
            *inputs, dq, call.mask, *call.offsets, *strides, *dq.stride()[:3], *call.mask_strides,
            call.heads, *call.numbers, **call.options, **_how(over_rows),
        )  # fmt: skip
