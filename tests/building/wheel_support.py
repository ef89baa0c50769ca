"""Holds what the build's tests share: a compiler that is a shell script, and children without torch."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from ffpa_attn.building import jit
from ffpa_attn.specs.spec import ForwardMerge, KernelSpec

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ffpa" / "ffpa_attn"

# This script stands for nvcc: it writes what it is asked for, and says what ptxas would. Files beside it steer it.
_FAKE_NVCC = """#!/bin/sh
here=$(dirname "$0")
[ "$1" = --version ] && { echo "Cuda compilation tools, V$(cat "$here/release").$(cat "$here/version")"; exit 0; }
echo "$@" >> "$here/calls"
sleep "$(cat "$here/seconds")"
[ -e "$here/broken" ] && { echo "internal compiler error: out of luck"; exit 2; }
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && out=$2
  [ "$1" = -MF ] && echo "$2:" > "$2"
  shift
done
echo "$out" > "$out"
echo "ptxas info    : Compiling entry function 'k' for 'sm_90'"
echo "    0 bytes stack frame, $(cat "$here/spills") bytes spill stores, 0 bytes spill loads"
echo "ptxas info    : Used 32 registers"
"""

# The build's modules import no torch, as setup.py relies on: children start in a tenth of the time.
CHILD = f"""
import sys, types
package = types.ModuleType("ffpa_attn")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["ffpa_attn"] = package
from ffpa_attn.building import jit
from ffpa_attn.specs.spec import ForwardMerge
with jit.opened(ForwardMerge("f16"), "sm_90") as (path, _):
    print(path)
"""


def library(spec: KernelSpec, gpu: str) -> Path:
    """Returns where the cache has the library of a kernel; compiles it now if the cache does not hold it whole."""
    with jit.opened(spec, gpu) as (path, _):
        return path


class FakeNvcc:
    """A CUDA toolkit (set CUDA_HOME to `home`) whose compiler is a script."""

    def __init__(self, home: Path):
        self.home, self.bin = home, home / "bin"
        self.bin.mkdir(parents=True)
        (self.bin / "nvcc").write_text(_FAKE_NVCC)
        (self.bin / "nvcc").chmod(0o755)
        self.set(release="13.0", version="1", seconds="0", spills="0")

    def set(self, **files: str) -> None:
        for name, text in files.items():
            (self.bin / name).write_text(text)

    @property
    def calls(self) -> list[str]:
        path = self.bin / "calls"
        return path.read_text().splitlines() if path.exists() else []


@dataclass(frozen=True)
class Variant(ForwardMerge):
    """The smallest kernel under other names, which no wheel holds."""

    variant: int


needs_nvcc = pytest.mark.usefixtures("nvcc")
