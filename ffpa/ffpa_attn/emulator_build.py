"""Builds Python modules whose CUDA kernels run in the CPU emulator (csrc/ptx/emulated), with g++ and ninja alone.

A module is its own sources plus the emulator. The build directory is named after the compiler and its flags; a stamp
of all sources' contents tells whether anything changed, and ninja then recompiles what did.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

EMULATOR_SOURCES = "ptx/emulated/machine/*.cpp"

# -ffp-contract=off: fused multiply-adds would change the last bit with the optimisation level.
# -g1: line tables, for debuggers; the source lines in reports come from the code itself.
COMPILE_FLAGS = [
    "-std=c++17",
    "-O2",
    "-g1",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
]


class EmulatorBuildError(RuntimeError):
    """The compiler or ninja failed; the message carries their output."""


def find_csrc() -> Path:
    """The C++ sources: inside the installed package, or at the root of a checkout."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "csrc", package.parents[1] / "csrc"):
        if (candidate / "ptx" / "emulated").is_dir():
            return candidate
    raise EmulatorBuildError(f"no csrc directory with the emulator beside {package}")


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "ffpa_attn" / "emulator"


def _compiler() -> str:
    for name in ("g++", "c++"):
        path = shutil.which(name)
        if path:
            return path
    raise EmulatorBuildError("the emulator needs a C++17 compiler: neither g++ nor c++ is on PATH")


def _ninja() -> str:
    try:
        import ninja

        candidate = Path(ninja.BIN_DIR) / "ninja"
        if candidate.exists():
            return str(candidate)
    except ImportError:
        pass
    path = shutil.which("ninja")
    if path:
        return path
    raise EmulatorBuildError("the emulator is built with ninja: pip install ninja")


def _machine_flags() -> list[str]:
    """AVX2 and F16C make the emulated tensor core about twice as fast; results do not change."""
    try:
        cpu = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    return ["-mavx2", "-mf16c"] if " avx2 " in cpu and " f16c " in cpu else []


def _digest_of_sources(directories: list[Path], files: list[Path]) -> str:
    digest = hashlib.sha256()
    paths = set(files)
    for directory in directories:
        for pattern in ("*.h", "*.cuh", "*.cpp", "*.cu"):
            paths.update(directory.rglob(pattern))
    for path in sorted(paths):
        digest.update(str(path).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(directory: Path):
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _ninja_escape(path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _write_ninja_file(path: Path, compiler: str, flags: list[str], sources: list[Path], target: Path) -> None:
    lines = [
        "ninja_required_version = 1.5",
        f"cxx = {shlex.quote(compiler)}",
        f"flags = {' '.join(shlex.quote(flag) for flag in flags)}",
        "rule compile",
        "  command = $cxx -x c++ $flags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  command = $cxx -shared -pthread $in -o $out",
    ]
    objects = []
    for source in sources:
        tag = hashlib.sha256(str(source.parent).encode()).hexdigest()[:8]
        objects.append(f"{source.stem}-{tag}.o")
        lines.append(f"build {objects[-1]}: compile {_ninja_escape(source)}")
    lines.append(f"build {_ninja_escape(target.name)}: link {' '.join(objects)}")
    text = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def build_emulated_module(
    name: str,
    sources: list[Path],
    include_dirs: list[Path] = (),
    extra_flags: list[str] = (),
    cache_dir: Path | None = None,
    jobs: int | None = None,
) -> Path:
    """Compiles ``sources`` and the emulator into the extension module ``name``; returns the shared library's path.

    ``sources`` may be .cpp or .cu files: all are read as C++. csrc is on the include path. pybind11's headers are added
    when it is installed.
    """
    csrc = find_csrc()
    compiler = _compiler()
    sources = [Path(source).resolve() for source in sources] + sorted(csrc.glob(EMULATOR_SOURCES))
    include_dirs = [csrc, *(Path(directory).resolve() for directory in include_dirs)]
    includes = [*include_dirs, Path(sysconfig.get_paths()["include"])]
    with contextlib.suppress(ImportError):
        import pybind11

        includes.append(Path(pybind11.get_include()))
    flags = [*COMPILE_FLAGS, *_machine_flags(), *extra_flags, *(f"-I{directory}" for directory in includes)]

    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    configuration = "\n".join([name, compiler, version, *flags, *map(str, sources)])
    key = hashlib.sha256(configuration.encode()).hexdigest()[:16]
    build_dir = (cache_dir or default_cache_dir()) / f"{name}-{key}"
    build_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = build_dir / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    stamp = build_dir / "sources.sha256"

    with _locked(build_dir):
        digest = _digest_of_sources(include_dirs, sources)
        if target.exists() and stamp.exists() and stamp.read_text() == digest:
            return target
        _write_ninja_file(build_dir / "build.ninja", compiler, flags, sources, target)
        command = [_ninja(), "-C", str(build_dir), "-j", str(jobs or os.cpu_count() or 1)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise EmulatorBuildError(f"{shlex.join(command)} failed:\n{result.stdout}{result.stderr}")
        stamp.write_text(digest)
    return target


def load_emulated_module(name: str, sources: list[Path], **options):
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
