"""Kernels compiled on demand: one library for one spec and one GPU, kept in a cache that only its owner can write.

A library appears in the cache whole or not at all: it is built in a directory of its own and renamed. Processes that
want the same one wait for the first on a file lock, which the kernel drops when its holder dies.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from . import archs, build, cache, generation, toolchain
from .spec import KernelSpec
from .toolchain import BuildError


def _key(spec: KernelSpec, target: str) -> str:
    parts = (generation.instance_source(spec), target, build.sources_hash(), toolchain.compilers())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def library(spec: KernelSpec, gpu: str) -> Path:
    """The library with this kernel for this GPU; compiled now if the cache does not hold it."""
    reason = toolchain.why_no_build()
    if reason:
        raise BuildError(f"{spec.name} is not built for {gpu}, and {reason}")
    target = archs.exact_target(spec.arch, gpu)
    directory = cache.open_cache()
    stem = f"{spec.name}-{target}-{_key(spec, target)}"
    path = directory / f"{stem}.so"
    if not path.exists():
        with cache.writing(directory), cache.locked(directory / f"{stem}.lock", stem):
            if not path.exists():
                _compile(spec, target, path)
    return path


def resources(spec: KernelSpec, gpu: str) -> dict[str, build.Resources]:
    """target -> what the compiler says of the kernel; compiled now if the cache does not hold it."""
    record = json.loads(library(spec, gpu).with_suffix(".json").read_text())
    return {target: build.Resources(**used) for target, used in record.items()}


def _compile(spec: KernelSpec, target: str, path: Path) -> None:
    for abandoned in path.parent.glob(f"{path.stem}.*.tmp"):  # by a process that was killed
        shutil.rmtree(abandoned, ignore_errors=True)
    where = f"{spec.name} for {target}, once, into {path.parent}"
    print(f"ffpa_attn: compiling {where} ...", file=sys.stderr, end="", flush=True)
    start = time.monotonic()
    attempt = Path(tempfile.mkdtemp(prefix=f"{path.stem}.", suffix=".tmp", dir=path.parent))
    try:
        built, resources = build.compile_library({spec: (target,)}, attempt)
        record = attempt / "record.json"
        record.write_text(json.dumps({name: asdict(used) for name, used in resources[spec.name].items()}))
        record.rename(path.with_suffix(".json"))
        built.rename(path)
        print(f" {time.monotonic() - start:.1f} s", file=sys.stderr)
    except BaseException:
        print(" failed", file=sys.stderr)
        raise
    finally:
        shutil.rmtree(attempt, ignore_errors=True)
