"""Makes one small mistake at a time and expects the suite to fail: what survives shows what the tests do not see.

`PYTHONPATH=ffpa:tests python -m mutants` makes all, with an argument WORD those whose name or file holds WORD. It works
on a copy of the tree, with a cache of its own for the emulator's module, which is rebuilt for each mutant of a kernel.
It prints a Markdown table, and exits with 1 if a mutant survives or no longer applies.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ffpa_attn import env

from . import MUTANTS
from .kinds import PACKAGE, Mutant

ROOT = Path(__file__).resolve().parents[2]


def killed(mutant: Mutant, tree: Path, home: Path) -> str | None:
    """Returns the first failing test (or what ended the run), or None when the mutant survives."""
    file = tree / mutant.file
    original = file.read_text()
    if original.count(mutant.old) < 1:
        raise LookupError(f"{mutant.name}: {mutant.old!r} is no longer in {mutant.file}")
    file.write_text(original.replace(mutant.old, mutant.new))
    try:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "--no-header",
            "--show-capture=no",
            *shlex.split(mutant.tests),
        ]
        environment = env.child_environment(HOME=str(home), **mutant.flags)
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=900)
    finally:
        file.write_text(original)
    if "BuildError" in run.stdout and mutant.file.startswith("csrc/"):
        raise SyntaxError(f"{mutant.name} does not compile:\n{run.stdout}")
    if run.returncode < 0:
        return f"signal {-run.returncode}"  # the mutant accessed memory that is not its own
    failures = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failures[0].split(" - ")[0].removeprefix("FAILED ") if run.returncode and failures else None


def main(word: str = "") -> int:
    chosen = [mutant for mutant in MUTANTS if word in mutant.name or word in mutant.file]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(
            ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "build", "tmp", "__pycache__")
        )
        print("| mutant | file | killed by |\n|---|---|---|")
        for mutant in chosen:
            by = killed(mutant, tree, Path(folder) / "home")
            survivors += by is None
            print(
                f"| {mutant.name} | {mutant.file.removeprefix(PACKAGE)} | {f'`{by}`' if by else '**SURVIVED**'} |",
                flush=True,
            )
    print(f"\n{len(chosen)} mutants, {survivors} survived")
    return int(survivors > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
