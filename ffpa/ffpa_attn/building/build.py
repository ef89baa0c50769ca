"""This module has one ninja build for the wheel's library and for one compiled on demand, and a gate for every kernel.

Instructions of wgmma that had to be serialized fail the build: they cost more than the kernel gains. So do spills above
the spec's allowance, with the nvcc release that the kernels are measured with; another may keep registers in other
ways, and its spills are told in one sentence.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from os import cpu_count
from pathlib import Path
from typing import NamedTuple

from .. import env
from ..specs import archs
from ..specs.spec import KernelSpec, aot_specs
from ..support.progress import say
from . import generation, sessions, toolchain
from .cache import locked
from .toolchain import BuildError

# The wheel's library is compiled for this release, and runs on it and all later ones.
OLDEST_TORCH = (2, 10)
TORCH_TARGET_VERSION = f"0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"

_COMPILE_FLAGS = "-std=c++17 -O3 -Xcompiler=-fPIC,-fvisibility=hidden,-Wall"
_LINK_FLAGS = "-shared -cudart=static -Xlinker=--exclude-libs,ALL,--no-undefined"
_FIRST_LINES, _LAST_LINES = 40, 5  # lines of a failed build's output that its error shows


def csrc() -> Path:
    """Returns where the C++ sources are: in the package if installed from a wheel, in the repository if editable."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / "csrc", package.parents[1] / "csrc"):
        if place.is_dir():
            return place
    raise BuildError(f"the C++ sources (csrc/) are not in {package}; install ffpa-cuda again")


def _hash_of(files: Iterable[Path]) -> str:
    content = b"".join(f"{file.name}\0".encode() + file.read_bytes() + b"\0" for file in files)
    return hashlib.sha256(content).hexdigest()[:16]


@cache
def sources_hash() -> str:
    """Returns a hash that changes with what nvcc reads and with the text around it; the emulator is neither."""
    root = csrc()
    files = sorted(path for path in root.rglob("*") if path.suffix in (".h", ".cuh", ".cpp"))
    compiled = [file for file in files if "emulated" not in file.relative_to(root).parts]
    return _hash_of([*compiled, Path(generation.__file__), Path(__file__)])


@cache
def params_hash() -> str:
    """Returns a hash of the structs that Python fills in for kernels."""
    return _hash_of(sorted((csrc() / "attention" / "params").glob("*.h")))


# ---- the gate ----


class Resources(NamedTuple):
    """This is what ptxas says about a kernel on one GPU, the worst of its functions where a spec has several."""

    registers: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0  # bytes of stores + loads
    smem_bytes: int = 0  # bytes of static shared memory


_FUNCTION = re.compile(r"Compiling entry function '\S+' for '(\w+)'")
# These find the numbers of Resources, in the same order.
_USAGE = (
    r"Used (\d+) registers",
    r"(\d+) bytes stack frame",
    r"(\d+) bytes spill (?:stores|loads)",
    r"(\d+) bytes smem",
)
_WGMMA = re.compile(r"^.*\(C75\d\d\).*$", re.MULTILINE)


def parse_ptxas(log: str) -> dict[str, Resources]:
    """Returns target -> resources, from the output of `ptxas -v`."""
    used: dict[str, Resources] = {}
    pieces = _FUNCTION.split(log)  # [what comes before, then target, text of each function]
    for target, text in zip(pieces[1::2], pieces[2::2], strict=True):
        numbers = (sum(map(int, re.findall(pattern, text))) for pattern in _USAGE)
        used[target] = Resources(*map(max, used.get(target, Resources()), numbers))
    return used


def gate(spec: KernelSpec, log: str) -> tuple[dict[str, Resources], list[str]]:
    """Returns (a kernel's resources, its spills beyond the allowance); raises if it must not ship, whoever built it."""
    used = parse_ptxas(log)
    if not used:
        raise BuildError(f"{spec.name}: the compiler's output names no kernel:\n{log}")
    spills = [
        f"{spec.name} spills {resources.spill_bytes} bytes on {target} ({resources.registers} registers), "
        f"allowed are {spec.allowed_spill_bytes}"
        for target, resources in used.items()
        if resources.spill_bytes > spec.allowed_spill_bytes
    ]
    warnings = sorted(_WGMMA.findall(log), key=lambda line: "Performance Loss" not in line)  # the worst comes first
    if warnings:
        raise BuildError(f"{spec.name}: ptxas had to serialize or repair its wgmma instructions: {warnings[0].strip()}")
    return used, spills


# ---- ninja ----


def quoted(path: Path | str) -> str:
    """Quotes a path for a command that ninja hands to the shell."""
    return shlex.quote(str(path)).replace("$", "$$")


def python_that(does: str) -> str:
    """Returns a command for ninja that runs `does` in Python: PATH may hold compilers alone. Arguments may follow."""
    return f"{quoted(sys.executable)} -ISc {quoted(does)}"


def _escaped(path: Path | str) -> str:
    """Escapes a path that ninja itself reads."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


_TEXT = {"encoding": "utf-8", "errors": "surrogateescape"}  # paths may hold any bytes, whatever the locale


def write_if_changed(path: Path, text: str) -> None:
    """Leaves a file with the same text alone: ninja compiles again what is newer than its result."""
    if not path.exists() or path.read_text(**_TEXT) != text:
        path.write_text(text, **_TEXT)


# With `||` the shell stays, and says which signal killed its child. Ninja before 1.11 takes half a library for a whole
# one, so the linker writes under another name.
_RULES = """
rule kernel
  command = $nvcc $flags $own_flags -Xptxas=-v -MD -MF $out.d -c $in -o $out > $out.log 2>&1 || (cat $out.log; exit 1)
  description = compile $out
  depfile = $out.d
  deps = gcc
rule host
  command = $nvcc $flags $torch_flags -MD -MF $out.d -c $in -o $out || exit 1
  description = compile $out
  depfile = $out.d
  deps = gcc
rule link
  command = $nvcc $link_flags $in -o $out.part $libraries && $replace $out.part $out
  description = link $out
"""


class Object(NamedTuple):
    rule: str
    source: Path
    flags: str = ""  # flags for this object alone


def write_ninja(
    file: Path, rules: str, variables: Mapping[str, str], objects: Mapping[str, Object], library: str
) -> None:
    """Writes what ninja reads, to compile the objects and to link them."""
    lines = [*(f"{name} = {value}" for name, value in variables.items()), rules]
    for name, made in objects.items():
        lines += [f"build {name}: {made.rule} {_escaped(made.source)}", f"  own_flags = {made.flags}"]
    lines += [f"build {_escaped(library)}: link {' '.join(objects)}", ""]
    write_if_changed(file, "\n".join(lines))


def compile_library(
    kernels: Mapping[KernelSpec, tuple[str, ...]],
    directory: Path,
    torch: toolchain.Torch | None = None,
) -> tuple[Path, dict[str, dict[str, Resources]]]:
    """Compiles each spec to its targets in `directory`; returns the library, and spec name -> target -> resources.

    With `torch` this is the wheel's library: the registry and the operators are part of it, and ninja is heard.
    """
    if why := toolchain.why_no_build():
        raise BuildError(why)
    nvcc, root = toolchain.find_nvcc(), csrc()
    directory.mkdir(parents=True, exist_ok=True)
    variables = {
        "nvcc": quoted(nvcc.path),
        "flags": f"{_COMPILE_FLAGS} -I{quoted(root)}",
        "link_flags": _LINK_FLAGS,
        "libraries": f"-L{quoted(nvcc.library_path)} " if nvcc.library_path else "",
        "replace": python_that("import os, sys; os.replace(*sys.argv[1:])"),
    }
    with locked(directory / "lock", f"in {directory}") as lock:
        objects = {}
        for spec, targets in kernels.items():
            source = directory / f"{spec.name}.cu"
            write_if_changed(source, generation.instance_source(spec))
            codes = (f"-gencode=arch={target.replace('sm_', 'compute_')},code={target}" for target in targets)
            objects[f"{spec.name}.o"] = Object("kernel", source, " ".join(codes))
        if torch:
            variables["torch_flags"] = f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION} -isystem {quoted(torch.include)}"
            variables["libraries"] += f"-L{quoted(torch.lib)} -ltorch_cpu"
            table = directory / "table.cpp"
            write_if_changed(table, generation.table_source(kernels))
            objects["table.o"] = Object("host", table)
            for source in sorted(root.glob("torch_ops/*.cpp")):
                objects[f"{source.parent.name}_{source.stem}.o"] = Object("host", source)
        library = directory / "library.so"
        write_ninja(directory / "build.ninja", _RULES, variables, objects, library.name)
        run_ninja(directory, lock, verbose=torch is not None)
        return library, _gate_all(kernels, directory, nvcc)


def _gate_all(specs: Iterable[KernelSpec], directory: Path, nvcc: toolchain.Nvcc) -> dict[str, dict[str, Resources]]:
    """Passes every kernel through the gate; what is wrong with any of them is one error."""
    used, wrong, spills = {}, [], []
    for spec in specs:
        try:
            used[spec.name], more = gate(spec, (directory / f"{spec.name}.o.log").read_text(errors="replace"))
            spills += more
        except BuildError as error:
            wrong.append(str(error))
    if nvcc.version.startswith(f"{toolchain.MEASURED_NVCC}."):
        wrong += [f"{spill}; shrink its tile, or raise its spec's allowed_spill_bytes" for spill in spills]
    if wrong:
        raise BuildError("\n".join(wrong))
    if spills:
        more = f" (and {len(spills) - 1} more)" if len(spills) > 1 else ""
        say(
            f"ffpa_attn: with nvcc {nvcc.version} {spills[0]}{more}; results are the same, and may come later than from "
            f"nvcc {toolchain.MEASURED_NVCC}, which this version was measured with"
        )
    return used


def run_ninja(
    directory: Path, lock: int, verbose: bool = False, file: Path | str = "build.ninja", umask: int = -1
) -> None:
    """Runs ninja. The directory's lock is held while ninja or a compiler runs, whatever becomes of this process."""
    ninja = toolchain.find_ninja()
    if ninja is None:
        raise BuildError(toolchain.NO_NINJA)
    jobs = env.all_flags()["MAX_JOBS"] or cpu_count() or 1
    command = [str(ninja), "-C", str(directory), "-f", str(file), "-j", str(jobs)]
    output = []

    def heard(line: str) -> None:
        output.append(line)
        if verbose:
            print(line, end="", flush=True)

    status = sessions.run(command, heard, toolchain.build_environment(), pass_fds=(lock,), umask=umask)
    if status != 0:
        failed = next((i for i, line in enumerate(output) if line.startswith("FAILED")), 0)
        lines = output[failed:]
        if len(lines) > _FIRST_LINES + _LAST_LINES:  # they say what went wrong first, and what ninja says of it last
            lines[_FIRST_LINES:-_LAST_LINES] = ["...\n"]
        shown = "see above" if verbose else "\n" + "".join(lines).rstrip()
        cause = subprocess.CalledProcessError(status, command) if status < 0 else None
        raise BuildError(f"`{shlex.join(command)}` failed: {shown}") from cause


# ---- the wheel's library ----

LIBRARY = "_native.abi3.so"
RECORD = "_native.json"


def wheel_kernels() -> dict[KernelSpec, tuple[str, ...]]:
    """Returns spec -> what to compile it to, as the build flags ask."""
    flags = env.all_flags()
    requests = archs.requested(flags)
    kernels = {spec: targets for spec in aot_specs(flags) if (targets := archs.targets(spec.arch, requests))}
    if not kernels:
        asked = flags["FFPA_CUDA_ARCHS"] or flags["TORCH_CUDA_ARCH_LIST"] or "no architecture"
        raise BuildError(
            f"the build flags ask for {asked}, and no kernel runs there; set FFPA_CUDA_ARCHS to 8.0 or newer, or unset "
            "it and TORCH_CUDA_ARCH_LIST"
        )
    return kernels


def build_wheel_library(directory: Path, destination: Path) -> None:
    """Compiles the wheel's library to `destination`, with its record beside it."""
    torch = toolchain.find_torch()
    if torch is None:
        raise BuildError(
            "nvcc is here but PyTorch is not, and the operators need its headers; install torch >= 2.10 and build "
            "with `pip install --no-build-isolation`"
        )
    if torch.release < OLDEST_TORCH:
        raise BuildError(f"PyTorch is {torch.version}; its headers are needed from 2.10 on: install a newer one")
    kernels = wheel_kernels()
    library, resources = compile_library(kernels, directory, torch)
    destination.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "sources": sources_hash(),
        "params": params_hash(),
        "nvcc": toolchain.find_nvcc().version,
        "torch": torch.version,
        "kernels": {
            spec.name: {
                "targets": targets,
                "resources": {target: used._asdict() for target, used in resources[spec.name].items()},
            }
            for spec, targets in kernels.items()
        },
    }
    fresh, fresh_record = destination.with_suffix(".new"), destination.with_name(f"{RECORD}.new")
    shutil.copy(library, fresh)
    fresh_record.write_text(json.dumps(record, indent=1) + "\n")
    fresh.replace(destination)  # a process that runs on the old library keeps it
    fresh_record.replace(destination.with_name(RECORD))
