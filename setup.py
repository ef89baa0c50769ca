"""Builds the wheel: the Python package, the C++ sources that it compiles on demand, and, where there is an nvcc, the
library of kernels compiled ahead of time."""

import shutil
import sys
import types
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

# The package's own modules do the work, but importing the package would import torch.
_package = types.ModuleType("ffpa_attn")
_package.__path__ = [str(ROOT / "ffpa" / "ffpa_attn")]
sys.modules["ffpa_attn"] = _package

from ffpa_attn.building import build, cache, toolchain  # noqa: E402


class BuildPackage(build_py):
    """Ships csrc/ inside the package; an editable install finds it in the repository."""

    def run(self):
        package = Path(self.build_lib) / "ffpa_attn"
        sources = package.resolve() == ROOT / "ffpa" / "ffpa_attn"
        if not (self.editable_mode or sources):  # an earlier build may have left modules there that are no more
            shutil.rmtree(package, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            shutil.copytree(ROOT / "csrc", package / "csrc")


class BuildLibrary(build_ext):
    """Compiles the kernels with our own ninja build; setuptools only says where the result belongs."""

    def build_extension(self, ext):
        build.build_wheel_library(ROOT / "build" / "native", Path(self.get_ext_fullpath(ext.name)))

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        package = self.get_finalized_command("build_py").get_package_dir("ffpa_attn")
        shutil.copy(Path(self.build_lib) / "ffpa_attn" / build.RECORD, package)


def main():
    missing = None if toolchain.find_nvcc() else toolchain.why_no_build()
    if missing:  # Triton's and PyTorch's kernels need no library
        print(f"ffpa_attn: building a Python-only package: {missing}", file=sys.stderr)
    directory = ROOT / "build"
    directory.mkdir(exist_ok=True)
    with cache.locked(directory / "lock", "this package"):  # ninja and setuptools both keep their files in there
        setup(
            cmdclass={"build_py": BuildPackage, "build_ext": BuildLibrary},
            ext_modules=[] if missing else [Extension("ffpa_attn._native", sources=[], py_limited_api=True)],
            options={} if missing else {"bdist_wheel": {"py_limited_api": "cp310"}},
        )


try:
    main()
except (build.BuildError, ValueError) as error:  # ValueError: a flag in the environment that is not allowed
    sys.exit(f"ffpa_attn: {error}")
