"""Builds Python modules whose CUDA kernels run in the CPU emulator (csrc/ptx/emulated), with g++ and ninja alone.

A module is its own sources plus the emulator. All modules of one compiler and set of flags are built in one directory
of the cache and share the objects that are no module's alone; ninja recompiles there what changed.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..support.progress import say
from . import build, cache, toolchain
from .toolchain import BuildError

_MACHINE = "ptx/emulated/machine/*.cpp"

# -ffp-contract=off keeps the last bit the same at every optimisation level, as no multiply-adds are fused; a module may
# ask for them. -g1 gives line tables to debuggers; the source lines in reports come from the code itself.
_COMPILE_FLAGS = "-std=c++17 -g1 -fPIC -pthread -ffp-contract=off -fvisibility=hidden -Wall -Wextra -Wno-psabi"
# The machine is where time goes; kernels run as fast with -O1, which compiles them in three quarters of the time.
_MACHINE_FLAGS, _MODULE_FLAGS = "-O2", "-O1"
_FUSED_FLAGS = "-O2 -ffp-contract=fast"  # at -O1 g++ fuses nothing

_RULES = """
rule compile
  command = $cxx -x c++ $flags $own_flags -MMD -MF $out.d -c $in -o $out || exit 1
  depfile = $out.d
  deps = gcc
rule link
  command = $cxx -shared -pthread $in -o $out.part && $seal $out.part $out
"""


def _compiler() -> Path:
    path = toolchain.which("g++") or toolchain.which("c++")
    if path is None:
        raise BuildError("the emulator needs a C++17 compiler, and neither g++ nor c++ is on PATH; install g++")
    return path


def _pybind11() -> Path:
    try:
        import pybind11
    except ImportError:
        raise BuildError("the emulator needs pybind11; the way out: pip install pybind11") from None
    return Path(pybind11.get_include())


def _has(*features: str) -> bool:
    """Says whether the processor has these, as far as the system tells."""
    try:
        return set(features) <= set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False


def _fused_flags() -> str:
    """Returns the flags to fuse multiply-adds, which all processors have but old ones of Intel's and AMD's."""
    if platform.machine() != "x86_64":
        return _FUSED_FLAGS
    if not _has("fma"):
        raise BuildError("the emulator's fused multiply-adds need a processor that has them, and this one has none")
    return f"{_FUSED_FLAGS} -mfma"


def _hash(*words: str) -> str:
    return hashlib.sha256(os.fsencode("\n".join(words))).hexdigest()[:16]


def build_emulated_module(
    name: str,
    sources: Iterable[Path],
    include_dirs: Iterable[Path] = (),
    generated: Mapping[str, str] | None = None,
    fused: bool = False,
) -> Path:
    """Compiles sources and the emulator into the extension module `name`; returns the shared library's path.

    Sources may be .cpp or .cu files: all are read as C++, with csrc/ on the include path. `generated` holds more of
    them, file name -> text. With `fused`, products and sums become fused multiply-adds wherever C++ allows it.
    """
    csrc, compiler, generated = build.csrc(), _compiler(), generated or {}
    machine = [f'#include "{source}"' for source in sorted(csrc.glob(_MACHINE))]
    module_flags = _fused_flags() if fused else _MODULE_FLAGS
    own_flags = " ".join([module_flags, *(f"-I{build.quoted(Path(place).resolve())}" for place in include_dirs)])
    shared = {Path(source).resolve(): own_flags for source in sources}
    places = [csrc, sysconfig.get_paths()["include"], _pybind11()]
    # With AVX2 and F16C the emulated tensor core is about twice as fast, and results are the same.
    machine_flags = ["-mavx2", "-mf16c"] if _has("avx2", "f16c") else []
    flags = [_COMPILE_FLAGS, *machine_flags, *(f"-I{build.quoted(place)}" for place in places)]
    version = toolchain.release_of(compiler)
    directory = cache.open_cache() / "emulator" / _hash(str(compiler), version, platform.machine(), *flags)
    own = directory / f"{name}-{_hash(own_flags, *map(str, shared), *generated)}"
    target = own / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"

    with cache.writing(directory):
        cache.make_private(own)
        for place in (directory.parent, directory, own):
            cache.check_owner(place)
        with cache.locked(directory / "lock", f"the emulator ({name})") as lock:
            shared[directory / "machine.cpp"] = _MACHINE_FLAGS  # one file, as headers take most of the time of many
            build.write_if_changed(directory / "machine.cpp", "\n".join([*machine, ""]))
            for file, text in generated.items():
                build.write_if_changed(own / file, text)
            objects = {
                f"{source.stem}-{_hash(str(source), more)}.o": build.Object("compile", source, more)
                for source, more in (shared | {own / file: own_flags for file in generated}).items()
            }
            variables = {
                "cxx": build.quoted(compiler),
                "flags": " ".join(flags),
                "seal": build.python_that(cache.SEALS),
            }
            build.write_ninja(own / "build.ninja", _RULES, variables, objects, str(target.relative_to(directory)))
            with cache.opened(target) as found:
                if found is None:
                    say(f"ffpa_attn: compiling {name} for the emulator, once, into {own}")
                    target.unlink(missing_ok=True)  # ninja would take it for whole
            build.run_ninja(directory, lock, file=own / "build.ninja", umask=cache.PRIVATE)
    return target


def load_emulated_module(name: str, sources: Iterable[Path], **options):
    """Builds the module if its sources changed, and imports it."""
    path = build_emulated_module(name, sources, **options)
    unique = f"{path.parent.name}.{name}"  # for a name that it has seen, pybind11 gives the module it has
    if unique in sys.modules:
        return sys.modules[unique]
    with cache.opened(path) as found:
        if found is None:
            raise BuildError(f"{path} is not what was built there a moment ago; set FFPA_CACHE_DIR to another disk")
        loader = importlib.machinery.ExtensionFileLoader(unique, found.name)
        spec = importlib.util.spec_from_loader(unique, loader)
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    module.__file__ = str(path)
    sys.modules[unique] = module
    return module
