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
# Tests of files that no mutant names: the first that a path begins with.
ROOMS = {
    "csrc/ptx/": "tests/emulator",
    "csrc/torch_ops/": "tests/building",
    "csrc/": "tests/backends",
    "bench/": "tests/test_bench.py",
    "ffpa/ffpa_attn/fp8.py": "tests/backends/test_fp8.py",
    "ffpa/ffpa_attn/doctor.py": "tests/launching",
    "ffpa/ffpa_attn/specs/archs.py": "tests/building/test_archs.py",
    "ffpa/ffpa_attn/specs/": "tests/backends/test_plan.py",
    "ffpa/ffpa_attn/testing/": "tests/emulator",
    "ffpa/ffpa_attn/__init__.py": "tests/test_source_designs.py",
    "tests/campaign": "tests/test_campaign.py",
    "tests/recorded_calls.py": "tests/test_campaign.py",
    "tests/conftest.py": "tests/test_suite.py",
    "tests/check_change.py": "tests/test_suite.py",
    "tests/mutants/": "tests/test_mutants.py",
    **{f"tests/{name}.py": "tests/backends/test_numerics.py" for name in ("cases", "compare", "oracle")},
    "setup.py": "tests/building/test_build.py",
    "pyproject.toml": "tests/building/test_build.py",
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
    folder, _, name = file.rpartition("/")
    guesses = [
        file if name.startswith("test_") else "",
        next((tests for start, tests in ROOMS.items() if file.startswith(start)), ""),
        folder.replace("ffpa/ffpa_attn", "tests") if folder.startswith("ffpa/ffpa_attn/") else "",
        f"tests/test_{name}" if folder == "ffpa/ffpa_attn" else "",
        folder if folder.startswith("tests/") else "",
    ]
    room = next((guess for guess in guesses if guess and guess != "tests" and (ROOT / guess).exists()), None)
    if room:
        yield room, ()
    elif not file.endswith((".md", ".json", ".png")):
        print(f"no tests of its own: {file}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--since", default="HEAD", help="the commit that the working tree is compared with")
    parser.add_argument("--seconds", type=float, default=150)
    given = parser.parse_args()
    runs = dict.fromkeys([(ALWAYS, ()), *(run for file in changed(given.since) for run in tests_of(file))])
    end, failed, left_out = time.monotonic() + given.seconds, [], []
    for left, (tests, flags) in zip(range(len(runs), 0, -1), runs, strict=True):
        seconds = end - time.monotonic()
        if seconds < 0:
            left_out.append(tests)
            continue
        sample = max(seconds / left, 2)
        print(f"== {sample:.0f} s of {' '.join(f'{name}={value}' for name, value in flags)} {tests}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", f"--sample={sample}"]
        done = subprocess.run([*command, *shlex.split(tests)], cwd=ROOT, env=env.child_environment(**dict(flags)))
        failed += [tests] * bool(done.returncode)
    print(f"{len(runs)} kinds of tests, {len(failed)} failed", *failed, sep="\n")
    print(*(f"no time was left for {tests}" for tests in left_out), sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
