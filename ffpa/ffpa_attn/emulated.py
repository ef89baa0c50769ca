"""The shipped kernels on CPU tensors, in the emulator: what FFPA_EMULATE and `emulate()` switch on.

One module holds every kernel of the wheel; it is built on first use (about a minute with g++) and kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from . import env, generation
from .emulator_build import default_cache_dir, find_csrc, load_emulated_module
from .spec import KernelSpec, ScaledCopy, aot_specs


@dataclass
class Settings:
    seed: int = 0
    exact: bool = False  # sums as the tensor cores form them, bit for bit: about nine times slower


_settings = Settings()
reports: list[dict] = []  # one for each kernel run: counts of mma and barriers, bytes, bank conflicts


@cache
def _module(extra: KernelSpec | None = None):
    specs = [spec for spec in aot_specs(env.all_flags()) if not isinstance(spec, ScaledCopy)]
    if extra is not None:
        specs.append(extra)
    texts = {spec.name: generation.emulated_source(spec) for spec in specs}
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:16]
    folder = default_cache_dir() / f"instances-{digest}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    sources = []
    for name, text in texts.items():
        source = folder / f"{name}.cpp"
        if not source.exists() or source.read_text() != text:
            temporary = source.with_suffix(f".{os.getpid()}")
            temporary.write_text(text)
            temporary.replace(source)
        sources.append(source)
    return load_emulated_module("ffpa_emulated", [find_csrc() / "launch" / "emulated" / "module.cpp", *sources])


def smem_bytes(spec: KernelSpec, d_qk: int, stages: int, q_resident: bool) -> int:
    """What the kernel itself asks for."""
    return _module().smem_bytes(spec.name, d_qk, stages, q_resident)


def _described(x: torch.Tensor) -> tuple:
    return x.data_ptr(), list(x.shape), list(x.stride())


def attention_forward(spec: KernelSpec, q, k, v, out, lse, *options) -> None:
    known = spec in aot_specs(env.all_flags())
    module = _module() if known else _module(spec)
    arch = env.run_flags()["FFPA_EMULATE"]
    module.configure(int(arch.removeprefix("sm_").rstrip("a")), _settings.seed, _settings.exact, os.cpu_count() or 1)
    message = module.attention_forward(
        spec.name, *map(_described, (q, k, v, out)), lse.data_ptr() if lse.numel() else 0, *options
    )
    reports.append({"kernel": spec.name, **module.take_report()})
    if message:
        raise RuntimeError(f"ffpa_attn: {spec.name}: {message}")


@contextlib.contextmanager
def emulate(arch: str = "sm_80", seed: int = 0, exact: bool = False) -> Iterator[list[dict]]:
    """CPU tensors run on the CUDA kernels of `arch` in the emulator; gives the list that the runs' reports go to.

    seed 0 and 1 run warps in order and in reverse, others in random order with preemption. `exact` adds up as the
    tensor cores of that GPU do. A call that no kernel can run raises.
    """
    global _settings
    before = _settings
    _settings = Settings(seed, exact)
    reports.clear()
    with env.overridden("FFPA_EMULATE", arch):
        try:
            yield reports
        finally:
            _settings = before
