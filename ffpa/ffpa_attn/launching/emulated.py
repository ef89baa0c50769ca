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
from ..specs.spec import BackwardRows, KernelSpec, MergeSplits, ScaledCopy, aot_specs


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
    shipped = tuple(spec for spec in aot_specs(env.all_flags()) if not isinstance(spec, ScaledCopy))
    return _module(shipped if spec in shipped else (spec,), _settings.fused)


def launch_shape(
    spec: KernelSpec,
    d_qk: int,
    stages: int,
    q_resident: bool,
    value_stages: int = 0,
    grid_of_heads: bool = False,
    heads: int = 1,
    batch: int = 1,
) -> tuple[int, tuple[int, int, int]]:
    """Returns (bytes of shared memory, grid) as the kernel itself says, for one row block of each head."""
    smem, *grid = _module_with(spec).launch_shape(
        spec.name, d_qk, stages, value_stages, q_resident, grid_of_heads, heads, batch
    )
    return smem, tuple(grid)


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None or not x.numel() else x.data_ptr()


def _floats(x: torch.Tensor | None) -> tuple[int, int]:
    return _address(x), 0 if x is None else x.numel()


def _described(x: torch.Tensor) -> tuple:
    return x.data_ptr(), list(x.shape), list(x.stride())


FP8_OUTPUTS = (torch.float16, torch.bfloat16, torch.float32)  # these are in the order of Fp8Output
RESIDENT_BLOCKS = 2  # the emulated GPU holds so many blocks of a kernel with scratch


def _described_mask(mask: torch.Tensor | None) -> tuple | None:
    return None if mask is None else (str(mask.dtype), *_described(mask))


def _configured(spec: KernelSpec):
    module = _module_with(spec)
    arch = env.run_flags()["FFPA_EMULATE"]
    module.configure(int(arch.removeprefix("sm_").rstrip("a")), _settings.seed, _settings.exact, os.cpu_count() or 1)
    return module


def _finish(spec: KernelSpec, module, message: str) -> None:
    report = module.take_report()
    if _settings.reports is not None:
        _settings.reports.append({"kernel": spec.name, **report})
    if message:
        raise RuntimeError(f"ffpa_attn: {spec.name}: {message}")


def attention_forward(
    spec: KernelSpec, numbers, q, k, v, out, lse, mask, offsets_q, offsets_k, scratch, partial
) -> None:
    module = _configured(spec)
    *options, blocks, splits = numbers
    # NaN shows what a kernel leaves unwritten, or reads before it writes. Rows of no sequence are written before.
    written = () if offsets_q is not None else (out, lse)
    for x in (*written, *(() if isinstance(spec, MergeSplits) else (scratch, partial))):
        if x is not None:
            x.fill_(torch.nan)
    message = module.attention_forward(
        spec.name,
        *map(_described, (q, k, v, out)),
        _address(lse),
        _described_mask(mask),
        _address(offsets_q),
        _address(offsets_k),
        0 if offsets_q is None else len(offsets_q) - 1,
        *options,
        *_floats(scratch),
        blocks,
        splits,
        *_floats(partial),
    )
    _finish(spec, module, message)


def arrange_values(spec: KernelSpec, v, arranged) -> None:
    module = _configured(spec)
    arranged.fill_(0x7F)  # NaN
    _finish(spec, module, module.arrange_values(spec.name, _described(v), _described(arranged)))


def fp8_forward(
    spec: KernelSpec,
    q,
    k,
    v,
    q_scale,
    k_scale,
    v_scale,
    out,
    lse,
    scale,
    softcap,
    left,
    right,
    top_left,
    scratch,
    blocks,
) -> None:
    module = _configured(spec)
    for x in (out, lse, scratch):
        x.fill_(torch.nan)
    message = module.fp8_forward(
        spec.name,
        [_described(x) for x in (q, k, v, out)],
        [None if x is None else _described(x) for x in (q_scale, k_scale, v_scale)],
        _address(lse),
        scale,
        softcap,
        left,
        right,
        top_left,
        *_floats(scratch),
        blocks,
        FP8_OUTPUTS.index(out.dtype),
    )
    _finish(spec, module, message)


def attention_backward(
    spec: KernelSpec, q, k, v, out, grad_out, lse, grad_lse, mask, offsets_q, offsets_k, longest_q, longest_k, scale, softcap,
    left, right, top_left, blocks, dq, dk, dv, statistics, live_rows, p, ds, partial, *chunk,
) -> None:  # fmt: skip
    module = _configured(spec)
    if isinstance(spec, BackwardRows):  # this kernel runs first; NaN shows what is read before it is written
        written = () if offsets_q is not None else (dq, dk, dv)
        for x in (*written, statistics, p, ds, partial):
            if x is not None:
                x.fill_(torch.nan)
    memory = (lse, grad_lse, offsets_q, offsets_k, statistics, live_rows, p, ds, partial)
    message = module.attention_backward(
        spec.name,
        [_described(x) for x in (q, k, v, out, grad_out, dq, dk, dv)],
        [(_address(x), 0 if x is None else x.nbytes) for x in memory],
        _described_mask(mask),
        0 if offsets_q is None else len(offsets_q) - 1,
        longest_q,
        longest_k,
        scale,
        softcap,
        left,
        right,
        top_left,
        blocks,
        dq.dtype == torch.float32,
        *chunk,
    )
    _finish(spec, module, message)


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
