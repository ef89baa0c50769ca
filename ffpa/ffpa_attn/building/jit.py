"""Compiles kernels on demand: one library for one spec and one GPU, which appears in the cache whole or not at all.

Processes that want the same one wait for the first on a file lock; where another machine does not see that lock, both
build, and the last rename stands.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..specs import archs
from ..specs.spec import KernelSpec
from ..support.progress import say
from . import build, cache, generation, toolchain
from .toolchain import BuildError

_LONGEST_BUILD = 24 * 3600  # seconds


@contextmanager
def opened(spec: KernelSpec, gpu: str) -> Iterator[tuple[Path, cache.Library]]:
    """Gives the library of this kernel for this GPU, ready to load, compiled now if the cache lacks a whole one."""
    if reason := toolchain.why_no_build():
        raise BuildError(f"{spec.name} is not built for {gpu}, and {reason}")
    target = archs.exact_target(spec.arch, gpu)
    directory = cache.open_cache()
    compiled_from = (generation.instance_source(spec), target, build.sources_hash(), toolchain.compilers())
    key = hashlib.sha256(os.fsencode("\0".join(compiled_from))).hexdigest()[:16]
    stem = f"{spec.name}-{target}-{key}"
    path = directory / f"{stem}.so"
    with ExitStack() as closing:
        found = closing.enter_context(cache.opened(path))
        if found is None:
            with cache.writing(directory), cache.locked(directory / f"{stem}.lock", stem):
                found = closing.enter_context(cache.opened(path))  # another process may have been first
                if found is None:
                    _compile(spec, target, path)
                    found = closing.enter_context(cache.opened(path))
                if found is None:
                    raise OSError(errno.EIO, "what was written there a moment ago is gone, or another", str(path))
        yield path, found


def _compile(spec: KernelSpec, target: str, path: Path) -> None:
    attempt = Path(tempfile.mkdtemp(prefix=f"{path.stem}.{_machine()}.{os.getpid()}.", suffix=".tmp", dir=path.parent))
    try:
        _remove_abandoned(path, attempt)
        say(f"ffpa_attn: compiling {spec.name} for {target}, once, into {path.parent} ...", end="")
        start = time.monotonic()
        try:
            built, resources = build.compile_library({spec: (target,)}, attempt)
            record = {name: used._asdict() for name, used in resources[spec.name].items()}
            cache.keep(built.read_bytes() + b"\n" + json.dumps(record).encode(), path, attempt / "sealed")
        except BaseException:
            say(" failed")
            raise
        say(f" {time.monotonic() - start:.1f} s")
    finally:
        shutil.rmtree(attempt, ignore_errors=True)


def _machine() -> str:
    """Returns a name of this machine that changes each time it starts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return platform.node()


def _remove_abandoned(path: Path, attempt: Path) -> None:
    """Removes what killed builds left. Another machine may build beside us, whose file system hides our lock."""
    for other in path.parent.glob(f"{path.stem}.*.tmp"):
        with suppress(OSError):
            old = attempt.stat().st_mtime - other.stat().st_mtime > _LONGEST_BUILD
            if old or _is_of_a_dead_process(other.name.removeprefix(f"{path.stem}.")):
                shutil.rmtree(other, ignore_errors=True)


def _is_of_a_dead_process(attempt: str) -> bool:
    machine, process, *_ = attempt.rsplit(".", 3)
    return machine == _machine() and not Path(f"/proc/{process}/exe").exists()  # a zombie has no exe
