"""This is the forward of 8-bit floats on wgmma (csrc/attention/forward/wgmma_fp8.cuh). `plan` is pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..launching import attention_call, structs
from ..launching.launch import CHANGE, READ, WRITE, Kernel, Launch, multiprocessors
from ..specs.problem import FP8_BLOCK, Problem
from ..specs.spec import FP8_COLUMNS, ForwardArrangeValues, ForwardWgmmaFp8
from . import row_tiles

ROWS = 64  # rows of a tile
MOST_COLUMNS = FP8_COLUMNS[-1]
_MOST_BLOCKS = 2**31 - 1  # blocks of a grid
_PAIR = torch.int16  # two 8-bit floats, as TMA sees them
# Types that the kernel writes, and their names in Fp8Output.
_OUTPUTS = {torch.float16: "kHalf", torch.bfloat16: "kBFloat16", torch.float32: "kFloat"}


class Fp8Plan(NamedTuple):
    spec: ForwardWgmmaFp8

    workspace_bytes = 0  # no bytes but those that blocks share

    @property
    def kernel(self) -> str:
        return self.spec.name

    @property
    def specs(self) -> tuple:
        return (ForwardArrangeValues(), self.spec)

    def forward_fp8(
        self, q, k, v, scales, out, lse, rule, workspace_cap: int, memo: dict, sinks=None, largest=None
    ) -> None:
        """Does what triton_fp8.TritonFp8Plan.forward_fp8 does, on wgmma."""
        batch, heads, n_q, _ = q.shape
        heads_kv, n_k, d_v = v.shape[1:]
        if not n_k:
            out.zero_()
            if lse is not None:
                attention_call.fill_without_keys(lse, sinks, None)
            return
        keys = -(-n_k // FP8_BLOCK) * FP8_BLOCK
        arranged = torch.empty(batch, heads_kv, d_v, keys, dtype=torch.uint8, device=v.device)
        written = out if out.dtype in _OUTPUTS else torch.empty_like(out, dtype=torch.float32)
        scratch = torch.empty(row_tiles.HEAD_BYTES // 4, dtype=torch.float32, device=q.device)
        v, pairs = v.view(torch.uint8), (_pairs(q), _pairs(k), arranged.view(_PAIR))
        blocks = min(-(-n_q // ROWS) * batch * heads, multiprocessors(q.device))
        if blocks not in memo:
            memo[blocks] = self._arranging(v, arranged), self._attending(*pairs, scales, written, rule, blocks)
        arrange, attend = memo[blocks]
        arrange(v, arranged)
        attend(*pairs, *scales, written, lse, scratch, sinks, largest)
        if written is not out:
            most = torch.finfo(out.dtype).max
            out.copy_(written.clamp_(-most, most))

    def _arranging(self, v, arranged) -> Launch:
        batch, heads, keys, columns = v.shape
        *steps, of_column = v.stride()
        params = structs.struct("ArrangeParams")(batch=batch, heads=heads, keys=keys, columns=columns)
        params.arranged_keys = arranged.shape[3]
        params.batch_stride, params.head_stride, params.key_stride, params.column_stride = *steps, of_column
        params.words = of_column == 1 and not any(x % 4 for x in (*steps, v.data_ptr()))
        return Launch([Kernel(ForwardArrangeValues(), params, {"v": READ, "arranged": WRITE})], v.device)

    def _attending(self, q, k, v, scales, out, rule, blocks: int) -> Launch:
        params = structs.struct("Fp8Params")()
        attention_call.describe(params.attention, q, k, v, out, None, None, rule, resident_blocks=blocks)
        params.arranged_keys, params.output = v.shape[3], structs.enumerator("Fp8Output", _OUTPUTS[out.dtype])
        for name, scale in zip(("q_scale", "k_scale", "v_scale"), scales, strict=True):
            if scale is not None:
                view = getattr(params, name)
                view.batch_stride, view.head_stride, view.block_stride = scale.stride()
        memory = {f"attention.{name}.data": READ for name in "qkv"}
        memory |= dict.fromkeys(("q_scale.data", "k_scale.data", "v_scale.data"), READ)
        memory |= dict.fromkeys(("attention.out.data", "attention.lse", "attention.scratch"), WRITE)
        memory |= {"attention.sinks": READ, "attention.largest": CHANGE}
        return Launch([Kernel(self.spec, params, memory)], q.device)


def plan(p: Problem, flags: Mapping[str, Any]) -> Fp8Plan | str:
    """Returns what runs the problem, or why it cannot."""
    widest = max(p.d_qk, p.d_v)
    if widest > MOST_COLUMNS:
        return f"registers hold {MOST_COLUMNS} columns of O in the fp8 forward, not {widest}"
    blocks_of_v = p.batch * p.heads_kv * -(-p.n_k // FP8_BLOCK) * -(-p.d_v // 64)
    if blocks_of_v > _MOST_BLOCKS:
        return f"one launch arranges {_MOST_BLOCKS} blocks of V, and {blocks_of_v} are too many"
    columns = next(columns for columns in FP8_COLUMNS if columns >= widest)
    return row_tiles.why_not(p, "fp8", flags, ROWS) or Fp8Plan(ForwardWgmmaFp8(p.dtype, columns))


def _pairs(x: torch.Tensor) -> torch.Tensor:
    """Returns [B, H, N, D / 2] of 16 bits, as TMA reads it: rows, heads, entries begin at 16 bytes, maybe in a copy."""
    padded = -x.shape[3] % 16
    steps = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    if x.data_ptr() % 16 or any(step % 16 for step in steps) or padded:
        x = F.pad(x.view(torch.uint8), (0, padded)).contiguous()
    return x.view(_PAIR)
