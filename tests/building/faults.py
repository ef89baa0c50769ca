"""Injects faults at random moments of builds with a stand-in compiler: after a retry without one, the library is right.

`python tests/building/faults.py NUMBER [PROCESSES [SEED]]` injects so many faults, each beside so many processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ffpa" / "ffpa_attn"
sys.path.insert(0, str(PACKAGE.parent))

from ffpa_attn import env  # noqa: E402
from ffpa_attn.building import cache, sessions  # noqa: E402

# This script stands for nvcc and g++: what it writes, piece by piece, follows from what it reads.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo "Cuda compilation tools, V13.0.1"; exit 0; }
here=$(dirname "$0")
while [ $# -gt 0 ]; do
  case $1 in
    -o) out=$2; shift ;;
    -MF) echo "x:" > "$2"; shift ;;
    -x) shift ;;
    *.cu | *.cpp | *.o) inputs="$inputs $1" ;;
  esac
  shift
done
: > "$out"
for part in 1 2 3; do
  sleep "$(cat "$here/seconds")"
  { echo "part $part"; cat $inputs; } >> "$out" || { echo "$out: No space left on device"; exit 1; }
done
echo "ptxas info    : Compiling entry function 'k' for 'sm_90'"
echo "ptxas info    : Used 32 registers"
"""
SECONDS = 0.06  # time that the stand-in takes for each piece

_START = f"""
import os, signal, sys, threading, time, types
package = types.ModuleType("ffpa_attn")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["ffpa_attn"] = package
from ffpa_attn.building import jit
from ffpa_attn.building.emulator_build import build_emulated_module
from ffpa_attn.specs.spec import ForwardMerge
"""
BUILDS = {
    "on demand": 'with jit.opened(ForwardMerge("f16"), "sm_90") as (path, _):\n    print(path)',
    "emulator": 'print(build_emulated_module("module", [], generated={"one.cpp": "one\\n" * 3000}))',
}
_NO_LOCKS = "import fcntl; fcntl.flock = lambda *how: None\n"
_FORK = """
def fork(wait):
    time.sleep(wait)
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
threading.Thread(target=fork, args=({wait},), daemon=True).start()
"""
_TIME_LIMIT = """
def late(*how):
    raise TimeoutError
signal.signal(signal.SIGALRM, late)
signal.setitimer(signal.ITIMER_REAL, {wait})
"""
_GRACEFUL = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *how: None)
"""
_STDERR = {
    "broken": "ends = os.pipe(); os.close(ends[0]); os.dup2(ends[1], 2)\n",
    "closed": "sys.stderr.close()\n",
    "none": "sys.stderr = None; os.close(0); os.close(2)\n",
}


class Builds:
    """Runs builds of one kind in a cache of their own."""

    def __init__(self, root: Path, kind: str, chance: random.Random, processes: int):
        self.kind, self.chance, self.processes = kind, chance, processes
        self.tools, self.cache = root / "bin", root / "cache"
        self.tools.mkdir(parents=True)
        for name in ("nvcc", "g++"):
            (self.tools / name).write_text(COMPILER)
            (self.tools / name).chmod(0o755)
        self.pace(SECONDS)
        self.children: list[subprocess.Popen] = []

    def pace(self, seconds: float) -> None:
        (self.tools / "seconds").write_text(f"{seconds}")

    def start(self, fault: str = "") -> subprocess.Popen:
        path = f"{self.tools}:{Path(sys.executable).parent}:{env.child_environment()['PATH']}"
        environment = env.child_environment(PATH=path, CUDA_HOME=str(self.tools.parent), FFPA_CACHE_DIR=str(self.cache))
        code = f"{_START}{fault}\n{BUILDS[self.kind]}"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        child = subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True, **pipes)
        self.children.append(child)
        return child

    def together(self, fault: str = "") -> list[subprocess.Popen]:
        return [self.start(fault) for _ in range(self.processes)]

    def moment(self) -> float:
        """Returns a random moment of a build, in seconds after its process began (Python's own start comes first)."""
        return self.chance.uniform(0.05, 0.3 + 8 * SECONDS)

    def wait(self) -> None:
        """Waits for the processes that were started, and not for forks of them that hold their pipes."""
        for child in self.children:
            child.wait(60)

    def end(self) -> None:
        for child in self.children:
            sessions.end(child.pid)
            child.wait()
            child.stdout.close()
            child.stderr.close()

    def result(self, limit: float = 30) -> bytes:
        """Returns what a build without a fault gives; raises where it gives nothing, or nothing whole."""
        self.pace(0)
        child = self.start()
        out, err = child.communicate(timeout=limit)
        if child.returncode:
            raise AssertionError(f"a retry failed: {err}")
        with cache.opened(Path(out.strip())) as found:
            assert found is not None, f"{out.strip()} is not whole"
            return found.content


def _tree(root: int) -> list[int]:
    """Returns a process and all that it started, in whatever sessions they are."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


# ---- the faults ----


def killed(builds: Builds) -> None:
    """Kills a process, its ninja or its compiler, or all it started, at a random moment beside other processes."""
    children = builds.together()
    for child in builds.chance.sample(children, builds.chance.randint(1, len(children))):
        time.sleep(builds.moment() / len(children))
        tree = _tree(child.pid)
        for victim in tree if builds.chance.random() < 0.3 else [builds.chance.choice(tree)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
    builds.wait()


def truncated(builds: Builds) -> None:
    """Cuts off the end of a library, or changes its bytes."""
    builds.result()
    for path in builds.cache.rglob("*.so"):
        size = path.stat().st_size
        with path.open("r+b") as file:
            if builds.chance.random() < 0.7:
                file.truncate(builds.chance.choice((0, size - 1, builds.chance.randrange(size))))
            else:
                file.seek(builds.chance.randrange(size))
                file.write(b"\0")


@contextlib.contextmanager
def _small_disk(builds: Builds, options: str) -> Iterator[bool]:
    """Puts the cache on a disk of its own, where this user may mount one; yields whether it could."""
    builds.cache.mkdir(mode=0o700, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "none", str(builds.cache)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
        builds.wait()
    finally:
        if mounted:
            for child in builds.children:
                child.wait()
            subprocess.run(["umount", "-l", str(builds.cache)], check=True)


def full(builds: Builds) -> None:
    """Gives the cache a disk with room for some of what is written; the retry comes when there is more room."""
    with _small_disk(builds, f"size={4096 * builds.chance.randint(1, 60)}") as mounted:
        if not mounted:
            _with_compiler(builds, f"echo 'fatal error: {os.strerror(errno.ENOSPC)}'; exit 1")
        builds.together()
        builds.wait()
        if mounted:
            shutil.copytree(builds.cache, kept := builds.cache.with_name("kept"))
    if mounted:
        shutil.rmtree(builds.cache)  # this removes what was there before the disk was mounted
        kept.rename(builds.cache)


def read_only(builds: Builds) -> None:
    with _small_disk(builds, "size=8m") as mounted:
        builds.together()
        time.sleep(builds.moment())
        if mounted:
            subprocess.run(
                ["mount", "-o", "remount,ro", str(builds.cache)], capture_output=True
            )  # the remount fails while builds write
        else:
            builds.cache.chmod(0o500)
        builds.together()
        builds.wait()
        if not mounted:
            builds.cache.chmod(0o700)


def _with_compiler(builds: Builds, line: str) -> None:
    """Replaces the compiler by one that runs `line`, for as long as the fault lasts."""
    builds.pace(0)
    for name in ("nvcc", "g++"):
        script = COMPILER.splitlines()
        (builds.tools / name).write_text("\n".join([*script[:2], line, ""]))
    builds.together()
    builds.wait()
    for name in ("nvcc", "g++"):
        (builds.tools / name).write_text(COMPILER)
    builds.pace(SECONDS)


def any_umask(builds: Builds) -> None:
    umask = builds.chance.choice((0o000, 0o002, 0o022, 0o027, 0o077))
    if builds.chance.random() < 0.5:
        builds.cache.mkdir(mode=0o755, exist_ok=True)
        builds.cache.chmod(0o755)
    builds.together(f"os.umask({umask})\n")
    builds.wait()
    for path in (*builds.cache.iterdir(), *builds.cache.rglob("*.so")):
        assert not (mode := path.lstat().st_mode & 0o077), f"{path} is for others, too: {mode:o}"


def forked(builds: Builds) -> None:
    """Another thread forks during the build, which a time limit may end; the fork lives on."""
    fault = _FORK.format(wait=builds.moment())
    if builds.chance.random() < 0.7:
        fault += _TIME_LIMIT.format(wait=builds.moment())
    builds.start(fault)
    builds.wait()


def without_stderr(builds: Builds) -> None:
    children = [builds.start(builds.chance.choice(list(_STDERR.values()))) for _ in range(builds.processes)]
    builds.wait()
    assert all(child.returncode == 0 for child in children), [child.stderr.read() for child in children]


def interrupted(builds: Builds) -> None:
    """Sends Ctrl-C and the like to the whole group of a program that handles the signal, or dies of it."""
    graceful = builds.chance.random() < 0.5
    children = builds.together(_GRACEFUL if graceful else "")
    time.sleep(builds.moment())
    number = builds.chance.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
    builds.wait()


def late(builds: Builds) -> None:
    """Ends the build by a time limit of the program, and checks that nothing of the build runs on."""
    child = builds.start(_TIME_LIMIT.format(wait=builds.moment()))
    seen = set()
    while child.poll() is None:
        seen |= set(_tree(child.pid)[1:])
        time.sleep(0.01)
    alive = [process for process in seen if Path(f"/proc/{process}/exe").exists()]
    assert not alive, f"{len(alive)} processes run on"


def another_machine(builds: Builds) -> None:
    """Builds on two machines whose locks do not meet, in one cache of kernels; the emulator's cache needs locks."""
    fault = _NO_LOCKS if builds.kind == "on demand" else ""
    children = [builds.start(fault)]
    time.sleep(builds.moment() / 2)
    children.append(builds.start(fault))
    builds.wait()
    assert all(child.returncode == 0 for child in children), [child.stderr.read() for child in children]


FAULTS: tuple[Callable[[Builds], None], ...] = (
    killed, truncated, full, read_only, any_umask, forked, without_stderr, interrupted, late, another_machine,
)  # fmt: skip


def inject(number: int, processes: int, seed: int, say: Callable[[str], None] = lambda text: None) -> Counter:
    """Injects so many faults, one to three before each retry; raises where a library is missing, wrong or half."""
    chance, injected = random.Random(seed), Counter()
    right: dict[str, bytes] = {}
    turns = [fault for _ in range(number // len(FAULTS) + 1) for fault in chance.sample(FAULTS, len(FAULTS))]
    while injected.total() < number:
        kind = chance.choice(list(BUILDS))
        with tempfile.TemporaryDirectory(prefix="faults") as root:
            if kind not in right:
                undisturbed = Builds(Path(root) / "undisturbed", kind, chance, 1)
                right[kind] = undisturbed.result()
                undisturbed.end()
            builds = Builds(Path(root) / "disturbed", kind, chance, processes)
            try:
                faults = [turns.pop() for _ in range(min(chance.randint(1, 3), number - injected.total()))]
                for fault in faults:
                    builds.pace(SECONDS)
                    fault(builds)
                    injected[fault.__name__] += 1
                names = f"{kind}: {', '.join(fault.__name__ for fault in faults)}"
                assert builds.result() == right[kind], f"{names}: a wrong library"
                say(f"{injected.total()} {names}")
            finally:
                builds.end()
    return injected


def main() -> None:
    number, processes, seed = (int(word) for word in (*sys.argv[1:], "4", str(random.randrange(1 << 30)))[:3])
    print(f"seed {seed}, {processes} processes")
    injected = inject(number, processes, seed, lambda text: print(text, flush=True))
    print(f"{injected.total()} faults, each library whole and right after a retry: {dict(injected)}")


if __name__ == "__main__":
    main()
