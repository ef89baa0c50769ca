"""Kernels compiled on demand: one library for one spec and one GPU, kept in a cache that only its owner can write.

A library appears in the cache whole or not at all: it is built in a directory of its own and renamed. Processes that
want the same one wait for the first on a file lock, which the kernel drops when its holder dies.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from . import archs, build, env, generation, toolchain
from .spec import KernelSpec
from .toolchain import BuildError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_directory() -> Path:
    return Path(env.run_flags()["FFPA_CACHE_DIR"] or "~/.cache/ffpa_attn").expanduser().absolute()


def _unusable(directory: Path, why: str) -> BuildError:
    return BuildError(f"the cache of compiled kernels, {directory}, {why}; or set FFPA_CACHE_DIR to one of your own")


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_out = "free some space there" if full else "make it writable"
        raise _unusable(directory, f"cannot be written ({error}): {way_out}") from error


def open_cache() -> Path:
    """The cache's directory, made if need be. Libraries in it are code that we run: nobody else may write there."""
    directory = cache_directory()
    with _writing(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    check_owner(directory)
    return directory


def check_owner(directory: Path) -> None:
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise _unusable(
            directory, f"belongs to user {status.st_uid}, and this is user {os.geteuid()}: change its owner"
        )
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise _unusable(directory, f"is writable by other users (mode {stat.S_IMODE(status.st_mode):o}): chmod 700 it")


def _key(spec: KernelSpec, target: str) -> str:
    parts = (generation.instance_source(spec), target, build.sources_hash(), toolchain.find_nvcc().release)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"ffpa_attn: waiting for another process that compiles {what}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def library(spec: KernelSpec, gpu: str) -> Path:
    """The library with this kernel for this GPU; compiled now if the cache does not hold it."""
    reason = toolchain.why_no_build()
    if reason:
        raise BuildError(f"{spec.name} is not built for {gpu}, and {reason}")
    target = archs.exact_target(spec.arch, gpu)
    directory = open_cache()
    stem = f"{spec.name}-{target}-{_key(spec, target)}"
    path = directory / f"{stem}.so"
    if not path.exists():
        with _writing(directory), _locked(directory / f"{stem}.lock", stem):
            if not path.exists():
                _compile(spec, target, path)
    return path


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
