"""Tests the script that builds and runs the conformance programs, with stand-ins for its compilers."""

import os
import subprocess
from pathlib import Path

from ffpa_attn import env

ROOT = Path(__file__).resolve().parents[2]

# This compiler writes a program that succeeds.
COMPILER = """#!/bin/sh
while [ $# -gt 1 ]; do
  [ "$1" = -o ] && { printf '#!/bin/sh\\n' > "$2"; chmod +x "$2"; }
  shift
done
"""


def test_the_output_directory_is_a_path_whatever_its_name(tmp_path):
    """The name of the directory may hold characters that mean something to a shell."""
    tools, ran = tmp_path / "tools", ROOT / f"ran-{os.getpid()}"
    tools.mkdir()
    for name in ("nvcc", "g++"):
        (tools / name).write_text(COMPILER)
        (tools / name).chmod(0o755)
    out = tmp_path / f'a b\'"; touch {ran.name}; "$(touch {ran.name})'
    environment = env.child_environment(PATH=f"{tools}:{env.child_environment()['PATH']}", FFPA_CONFORM_BUILD_ONLY="1")
    command = ["bash", ROOT / ".dev" / "conform.sh", out]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    was_run = ran.exists()
    ran.unlink(missing_ok=True)
    assert done.returncode == 0 and "built both programs" in done.stdout, done.stderr
    assert (out / "conform_gpu").exists() and (out / "conform.cu.o").exists() and not was_run
