"""Builds Python modules whose CUDA kernels run in the CPU emulator (csrc/ptx/emulated), with g++ and ninja alone.

A module is its own sources plus the emulator. Its directory in the cache is named after the compiler, the flags and the
names of the sources; ninja recompiles there what changed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from . import build, cache
from .toolchain import BuildError

_MACHINE = "ptx/emulated/machine/*.cpp"

# -ffp-contract=off: fused multiply-adds would change the last bit with the optimisation level.
# -g1: line tables, for debuggers; the source lines in reports come from the code itself.
_COMPILE_FLAGS = "-std=c++17 -O2 -g1 -fPIC -pthread -ffp-contract=off -fvisibility=hidden -Wall -Wextra -Wno-psabi"

_RULES = """
rule compile
  command = $cxx -x c++ $flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = $cxx -shared -pthread $in -o $out
"""


def _compiler() -> str:
    path = shutil.which("g++") or shutil.which("c++")
    if path is None:
        raise BuildError("the emulator needs a C++17 compiler, and neither g++ nor c++ is on PATH; install g++")
    return path


def _pybind11() -> Path:
    try:
        import pybind11
    except ImportError:
        raise BuildError("the emulator needs pybind11; the way out: pip install pybind11") from None
    return Path(pybind11.get_include())


def _machine_flags() -> list[str]:
    """AVX2 and F16C make the emulated tensor core about twice as fast; results do not change."""
    try:
        cpu = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    return ["-mavx2", "-mf16c"] if " avx2 " in cpu and " f16c " in cpu else []


def build_emulated_module(
    name: str,
    sources: Iterable[Path],
    include_dirs: Iterable[Path] = (),
    generated: Mapping[str, str] | None = None,
) -> Path:
    """Compiles sources and the emulator into the extension module `name`; returns the shared library's path.

    Sources may be .cpp or .cu files: all are read as C++, with csrc/ on the include path. `generated` holds more of them,
    file name -> text.
    """
    csrc, compiler, generated = build.csrc(), _compiler(), generated or {}
    sources = [*(Path(source).resolve() for source in sources), *sorted(csrc.glob(_MACHINE))]
    includes = [csrc, *(Path(place).resolve() for place in include_dirs), sysconfig.get_paths()["include"], _pybind11()]
    flags = [_COMPILE_FLAGS, *_machine_flags(), *(f"-I{build.quoted(place)}" for place in includes)]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    configuration = "\n".join([name, compiler, version, *flags, *map(str, sources), *generated])
    key = hashlib.sha256(configuration.encode()).hexdigest()[:16]
    directory = cache.open_cache() / "emulator" / f"{name}-{key}"
    target = directory / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"

    with cache.writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with cache.locked(directory / "lock", f"the emulator ({name})"):
            for file, text in generated.items():
                build.write_if_changed(directory / file, text)
            lines = [f"cxx = {build.quoted(compiler)}", f"flags = {' '.join(flags)}", _RULES]
            objects = []
            for source in (*sources, *(directory / file for file in generated)):
                folder = hashlib.sha256(str(source.parent).encode()).hexdigest()[:8]
                objects.append(f"{source.stem}-{folder}.o")
                lines.append(f"build {objects[-1]}: compile {build.escaped(source)}")
            lines += [f"build {target.name}: link {' '.join(objects)}", ""]
            build.write_if_changed(directory / "build.ninja", "\n".join(lines))
            if not target.exists():
                print(f"ffpa_attn: compiling {name} for the emulator, once, into {directory}", file=sys.stderr)
            build.run_ninja(directory)
    return target


def load_emulated_module(name: str, sources: Iterable[Path], **options):
    """Builds the module if its sources changed, and imports it."""
    path = build_emulated_module(name, sources, **options)
    unique = f"{path.parent.name}.{name}"  # under a name it has seen, pybind11 gives the module it has
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    spec.loader.exec_module(module)
    return module
