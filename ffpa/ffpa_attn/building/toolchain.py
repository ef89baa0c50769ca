"""This module finds what a build needs: nvcc, ninja, and PyTorch's headers. It imports neither torch nor CUDA."""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from .. import env

MEASURED_NVCC = "13.0"  # the release whose kernels are measured, and that CI holds to the last spilled register
NVCC_OF_PYPI = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime")  # one release throughout
_PACKAGES = " ".join(f'"{name}=={MEASURED_NVCC}.*"' for name in NVCC_OF_PYPI)
GET_NVCC = f"pip install {_PACKAGES} ninja, or set CUDA_HOME to a CUDA toolkit"
NO_NINJA = "there is no ninja on PATH or from PyPI; the way out: pip install ninja"
OLDEST_NVCC = 12  # the first release that knows sm_90a
_NO_PROGRAM = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP)


class BuildError(RuntimeError):
    """Says that something could not be compiled; the message says what, why, and the way out."""


class Nvcc(NamedTuple):
    path: Path
    found: str  # how it was found

    @property
    def release(self) -> str:
        """Returns what `nvcc --version` prints."""
        try:
            return release_of(self.path)
        except BuildError as error:
            raise BuildError(f"{error}; the way out: {GET_NVCC}") from None

    @property
    def version(self) -> str:
        words = self.release.replace(",", " ").split()
        return next((word[1:] for word in words if word.startswith("V") and word[1:2].isdigit()), "0 (unknown)")

    @property
    def major(self) -> int:
        return int(self.version.split()[0].split(".")[0])

    @property
    def library_path(self) -> Path | None:
        """Returns where PyPI's package keeps libcudart_static.a; a toolkit's nvcc knows its own place."""
        lib = self.path.parent.parent / "lib"
        return lib if (lib / "libcudart_static.a").exists() else None


@cache
def release_of(path: Path) -> str:
    """Returns what a compiler prints when it is asked for its version."""
    try:
        ask = {"capture_output": True, "text": True, "errors": "replace", "check": True, "env": build_environment()}
        return subprocess.run([path, "--version"], **ask).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        # A program that could not be started for want of memory, or was killed, may answer another time.
        lasting = error.errno in _NO_PROGRAM if isinstance(error, OSError) else error.returncode > 0
        if not lasting:
            raise
        raise BuildError(f"`{path} --version` failed: {error}") from None


def find_nvcc() -> Nvcc | None:
    """Looks in CUDA_HOME, then on PATH, then for what PyPI's nvidia-cuda-nvcc put beside the other packages."""
    if home := env.all_flags()["CUDA_HOME"]:
        nvcc = Path(home).absolute() / "bin" / "nvcc"
        if not nvcc.exists():
            raise BuildError(f"CUDA_HOME={home!r} holds no bin/nvcc; set it to a CUDA toolkit, or unset it")
        return Nvcc(nvcc, "CUDA_HOME")
    if on_path := which("nvcc"):
        return Nvcc(on_path, "PATH")
    for place in _places("nvidia"):
        for nvcc in sorted(place.glob("cu[0-9]*/bin/nvcc"), reverse=True):
            return Nvcc(nvcc, "PyPI's nvidia-cuda-nvcc")
    return None


def _places(package: str) -> list[Path]:
    """Returns the folders of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]


def which(name: str, path: str | None = None) -> Path | None:
    """Returns a program's absolute place: PATH may have relative ones, and it is called in another directory."""
    found = shutil.which(name, path=path)
    return Path(found).absolute() if found else None


def build_environment() -> dict[str, str]:
    """Returns what a compiler is started with. It runs in another directory, so places relative to this one become
    absolute; it speaks English, for `transient.py` reads what it says.
    """
    here = env.child_environment()
    places = {"PATH": os.pathsep.join(str(Path(place).absolute()) for place in os.get_exec_path(here))}
    chosen = here.get("NVCC_CCBIN", "")
    if chosen and (os.sep in chosen or Path(chosen).is_dir()):  # else it is a name, to be found on PATH
        places["NVCC_CCBIN"] = str(Path(chosen).absolute())
    return {**here, **places, "LC_ALL": "C"}


def compilers() -> str:
    """Returns all that decides what becomes of a source and our flags: nvcc, the host compilers it calls and what they
    compile for, and the flags it adds itself.
    """
    flags = env.all_flags()
    chosen = flags["NVCC_CCBIN"]
    if chosen and not Path(chosen).is_dir():
        hosts = [which(chosen)]
    else:
        hosts = [which(name, path=chosen) for name in ("gcc", "g++")]  # the first compiles, the second links
    releases = [f"{host}\n{release_of(host)}" for host in hosts if host]
    added = [f"{name}={flags[name]}" for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")]
    return "\n".join([find_nvcc().release, *releases, platform.machine(), *added])


def find_ninja() -> Path | None:
    """Prefers this environment's ninja to PATH's: of two releases, each takes all the other made for out of date."""
    for place in _places("ninja"):
        for ninja in (place / "data" / "bin" / "ninja", place.parents[3] / "bin" / "ninja"):
            if ninja.exists():
                return ninja.absolute()
    return which("ninja")


def why_no_build() -> str | None:
    """Says why nothing can be compiled here, and the way out; None when it can."""
    try:
        nvcc = find_nvcc()
        if nvcc is None:
            return f"there is no nvcc in CUDA_HOME, on PATH or from PyPI; the way out: {GET_NVCC}"
        if nvcc.major < OLDEST_NVCC:
            return f"{nvcc.path} is nvcc {nvcc.version}, and {OLDEST_NVCC}.0 is the oldest that will do; {GET_NVCC}"
    except (BuildError, ValueError) as error:  # ValueError: a build flag that is not allowed
        return str(error)
    if find_ninja() is None:
        return NO_NINJA
    if not (env.all_flags()["NVCC_CCBIN"] or shutil.which("g++")):
        return "there is no g++ on PATH, which nvcc needs; on Debian or Ubuntu: apt-get install g++"
    return None


class Torch(NamedTuple):
    include: Path
    lib: Path
    version: str

    @property
    def release(self) -> tuple[int, int]:
        return tuple(map(int, re.findall(r"\d+", self.version)[:2]))


def find_torch() -> Torch | None:
    """Finds the installed PyTorch without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    root = Path(spec.origin).parent
    return Torch(root / "include", root / "lib", version("torch"))
