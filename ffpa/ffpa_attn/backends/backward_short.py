"""This is the backward of short sequences: one launch, in which a block of threads has a key/value head and all its keys.

P and dS of the head's rows stay in shared memory (csrc/attention/backward/mma_short.cuh), so nothing needs a workspace,
and what the host does is the same for any number of heads.
"""

from __future__ import annotations

from typing import NamedTuple

from ..launching.launch import Kernel, Launch
from ..specs import archs
from ..specs.problem import Problem
from ..specs.spec import SHORT_TILES, BackwardMmaShort, short_columns
from . import backward
from .reference_plan import mask_gradient

_STEP_COLUMNS = 64  # columns of a step, as in csrc/attention/backward/mma_short.cuh
_MOST_COLUMNS = 1 << 15
_MOST_ROW_TILES = 2  # in a block that nobody asks for
_LEAST_STAGES, _MOST_STAGES = 2, {64: 3, 128: 4}  # slots; three blocks share a multiprocessor at 64


class ShortPlan(NamedTuple):
    spec: BackwardMmaShort
    stages: int
    workspace_bytes = 0

    @property
    def kernel(self) -> str:
        return self.spec.name

    @property
    def specs(self) -> tuple:
        return (self.spec,)

    def backward(self, saved, grads, d_mask, mask, offsets, rule, workspace_cap: int, memo: dict) -> None:
        """Does what triton_attention.TritonPlan.backward does, with one kernel."""
        if offsets:  # rows of no sequence get zeros
            for grad in grads:
                grad.zero_()
        inputs = backward.inputs_of(saved, mask, offsets, memo)
        launch = memo.get("launch")
        if launch is None:
            params = backward.describe(inputs, grads, offsets, rule, stages=self.stages)
            memory = backward.INPUTS | backward.uses_of_gradients(offsets)
            launch = memo["launch"] = Launch([Kernel(self.spec, params, memory)], inputs[0].device)
        launch(*inputs, *grads)
        mask_gradient(saved, d_mask, mask, rule, workspace_cap)


def plan(p: Problem) -> ShortPlan | str:
    """Returns what runs the problem, or why it is not short. Whether the kernel is built is another question."""
    if not p.batch * p.heads_kv * p.n_q * p.n_k:
        return "there are no pairs of a row and a key"
    tile = next((tile for tile in SHORT_TILES if p.n_k <= tile), None)
    if tile is None:
        return f"{p.n_k} keys do not fit one tile"
    if p.batch * p.heads_kv >= 2**31:
        return f"{p.batch * p.heads_kv} key/value heads are too many"
    if max(p.d_qk, p.d_v) > _MOST_COLUMNS:
        return f"{max(p.d_qk, p.d_v)} columns are too many for steps of {_STEP_COLUMNS}"
    row_tiles = p.group * -(-p.n_q // tile)
    steps = 4 * (p.d_qk // _STEP_COLUMNS + 1) + 2 * (p.d_v // _STEP_COLUMNS + 1)
    needed = 512 + (tile * 12 if tile > 64 else 0) + row_tiles * (2 * tile * tile * 2 + tile // 8 + 16 * steps)
    stages = (archs.shared_memory_bytes(p.arch or "sm_80") - needed) // (2 * tile * _STEP_COLUMNS * 2)
    if stages < _LEAST_STAGES:
        return f"P and dS of {p.group} x {p.n_q} rows and {p.n_k} keys leave too little shared memory"
    of_step = short_columns(tile)
    columns = next((columns for columns in of_step if max(p.d_qk, p.d_v) <= columns), of_step[-1])
    return ShortPlan(BackwardMmaShort(p.dtype, tile, columns), min(stages, _MOST_STAGES[tile]))


def why_slower(p: Problem) -> str | None:
    """Says why a GPU gets other kernels where nobody asks for this one, or None: one row tile follows the other in a block,
    and more than two were not measured.
    """
    tiles = p.group * -(-p.n_q // (64 if p.n_k <= 64 else 128))
    return f"one block would go over {tiles} row tiles" if tiles > _MOST_ROW_TILES else None
