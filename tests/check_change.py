"""Proves a change in about three minutes: for each file that differs from a commit, some of the tests that notice mistakes
there, as its mutants name them, or else those of its room. `bash .dev/check.sh` sets up, formats, and calls this.

    python tests/check_change.py --since HEAD~1 --seconds 150
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "ffpa"), str(ROOT / "tests")]

from ffpa_attn import env  # noqa: E402
from mutants import MUTANTS  # noqa: E402

ALWAYS = "tests/test_layers.py tests/test_mutants.py tests/test_readme.py"
ROOMS = {
    "csrc/ptx": "tests/emulator",
    "csrc/torch_ops": "tests/building",
    "csrc": "tests/backends",
    "bench": "tests/test_bench.py",
}


def changed(since: str) -> list[str]:
    git = ("git", "diff", "--name-only", since), ("git", "ls-files", "--others", "--exclude-standard")
    listed = (subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout for command in git)
    return sorted({file for lines in listed for file in lines.split()})


def tests_of(file: str) -> Iterator[tuple[str, tuple]]:
    """Yields (arguments of pytest, environment variables)."""
    named = dict.fromkeys((mutant.tests, tuple(mutant.flags.items())) for mutant in MUTANTS if mutant.file == file)
    if named:
        yield from named
        return
    parts = file.split("/")
    room = next((tests for folder, tests in ROOMS.items() if file.startswith(f"{folder}/")), None)
    if file.startswith("ffpa/ffpa_attn/"):
        room = f"tests/{parts[2]}" if len(parts) > 3 else f"tests/test_{parts[2]}"
    elif file.startswith("tests/") and "/test_" in file:
        room = file
    if room and (ROOT / room).exists():
        yield room, ()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--since", default="HEAD", help="the commit that the working tree is compared with")
    parser.add_argument("--seconds", type=float, default=150)
    given = parser.parse_args()
    runs = dict.fromkeys([(ALWAYS, ()), *(run for file in changed(given.since) for run in tests_of(file))])
    end, failed = time.monotonic() + given.seconds, []
    for left, (tests, flags) in zip(range(len(runs), 0, -1), runs, strict=True):
        sample = max((end - time.monotonic()) / left, 2)
        print(f"== {sample:.0f} s of {' '.join(f'{name}={value}' for name, value in flags)} {tests}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", f"--sample={sample}"]
        done = subprocess.run([*command, *shlex.split(tests)], cwd=ROOT, env=env.child_environment(**dict(flags)))
        failed += [tests] * bool(done.returncode)
    print(f"{len(runs)} kinds of tests, {len(failed)} failed", *failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
