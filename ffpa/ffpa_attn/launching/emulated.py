"""This module runs the shipped kernels on CPU tensors, in the emulator, which FFPA_EMULATE and `emulate()` switch on.

One module holds every kernel of the wheel; it is built on first use (about a minute with g++) and kept.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from .. import env
from ..building import build, generation
from ..building.emulator_build import load_emulated_module
from ..specs.spec import KernelSpec, aot_specs
from . import structs
from .launch import READ, WRITE


@dataclass
class Settings:
    seed: int = 0
    exact: bool = False  # sums are as the tensor cores form them, bit for bit: two to three times slower
    fused: bool = False  # products and sums are one instruction wherever a compiler may make them one
    reports: list[dict] | None = None  # a report for each kernel run: counts of mma and barriers, bytes, bank conflicts


_settings = Settings()


_KERNELS_PER_FILE = 12  # reading the headers costs as much as two kernels


@cache
def _module(specs: tuple[KernelSpec, ...], fused: bool):
    parts = [specs[i : i + _KERNELS_PER_FILE] for i in range(0, len(specs), _KERNELS_PER_FILE)]
    texts = {f"{part[0].name}.cpp": generation.emulated_source(part) for part in parts}
    sources = [build.csrc() / "launch" / "emulated" / "module.cpp"]
    return load_emulated_module("ffpa_emulated", sources, generated=texts, fused=fused)


def _module_with(spec: KernelSpec):
    """Returns the module that holds the kernel: one for all shipped kernels, or one for this kernel alone."""
    shipped = tuple(aot_specs(env.all_flags()))
    return _module(shipped if spec in shipped else (spec,), _settings.fused)


RESIDENT_BLOCKS = 2  # the emulated GPU holds so many blocks of a kernel with scratch


def launch_shape(spec: KernelSpec, **numbers: int) -> tuple[int, tuple[int, int, int]]:
    """Returns (bytes of shared memory, grid) as the kernel itself says, for one row tile of each head and these numbers
    of its AttentionParams.
    """
    ones = dict.fromkeys(("d_v", "n_q", "heads_q", "group", "batch", "splits", "tile_heads"), 1)
    params = structs.struct("AttentionParams")(**{**ones, "resident_blocks": 2**31 - 1, **numbers})
    smem, *grid = _module_with(spec).launch_shape(spec.name, bytes(params))
    return smem, tuple(grid)


def _extent(x: torch.Tensor) -> int:
    """Returns the bytes from a tensor's first element to the end of its last."""
    return (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1) * x.itemsize


def launch(spec: KernelSpec, params: bytes, memory: list[tuple[torch.Tensor, str]]) -> None:
    """Runs a kernel, which may touch no other memory than this. Where it is to write all, NaN shows what it leaves
    unwritten, or reads before it writes.
    """
    for x, use in memory:
        if use == WRITE:
            x.fill_(torch.nan if x.is_floating_point() else 0x7F)  # this is NaN in 8-bit floats
    ranges = [(x.data_ptr(), _extent(x), use != READ) for x, use in memory]
    arch = int(env.run_flags()["FFPA_EMULATE"].removeprefix("sm_").rstrip("a"))
    options = arch, _settings.seed, _settings.exact, os.cpu_count() or 1
    message, report = _module_with(spec).run(spec.name, params, ranges, *options)
    if _settings.reports is not None:
        _settings.reports.append({"kernel": spec.name, **report})
    if message:
        raise RuntimeError(f"ffpa_attn: {spec.name}: {message}")


@contextlib.contextmanager
def emulate(arch: str = "sm_80", seed: int = 0, exact: bool = False, fused: bool = False) -> Iterator[list[dict]]:
    """Runs CPU tensors on the CUDA kernels of `arch` in the emulator; gives the list that the runs' reports go to.

    seed 0 and 1 run warps in order and in reverse, others in random order with preemption. `exact` adds up as the
    tensor cores of that GPU do. `fused` compiles the kernels with fused multiply-adds, as nvcc does wherever it may: a
    result that hangs on a product's own rounding shows. A call that no kernel can run raises.
    """
    global _settings
    before = _settings
    _settings = Settings(seed, exact, fused, reports=[])
    with env.overridden("FFPA_EMULATE", arch):
        try:
            yield _settings.reports
        finally:
            _settings = before
