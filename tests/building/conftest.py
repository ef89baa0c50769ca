"""Provides the build's tests with fixtures: the wheel's library, a fake compiler, an empty cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ffpa_attn.building import build, toolchain
from ffpa_attn.building import cache as cache_module
from ffpa_attn.launching import native as native_module
from wheel_support import CHILD, ROOT, FakeNvcc


@pytest.fixture
def fake_nvcc(tmp_path, monkeypatch) -> FakeNvcc:
    toolchain.release_of.cache_clear()
    fake = FakeNvcc(tmp_path / "toolkit")
    monkeypatch.setenv("CUDA_HOME", str(fake.home))
    return fake


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Returns the path of an empty cache of compiled kernels."""
    monkeypatch.setenv("FFPA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compile_in_child():
    """Starts a process that asks the cache for one kernel and prints its path."""
    children = []

    def start() -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        child = subprocess.Popen([sys.executable, "-c", CHILD], text=True, start_new_session=True, **pipes)
        children.append(child)
        return child

    yield start
    for child in children:
        try:
            os.killpg(child.pid, 9)  # also ends the compiler that the child may have left behind
        except ProcessLookupError:
            pass
        child.communicate()


@pytest.fixture(scope="session")
def wheel_library(nvcc) -> Path:
    """Returns a directory with the library that a wheel holds, every kernel of it compiled, and its record."""
    directory = ROOT / "build" / "tests"
    directory.mkdir(parents=True, exist_ok=True)
    # setup.py builds in the same place under the same lock, so what it already compiled is not compiled again.
    with cache_module.locked(ROOT / "build" / "lock", "this package"):
        build.build_wheel_library(ROOT / "build" / "native", directory / build.LIBRARY)
    return directory


@pytest.fixture
def native(wheel_library, monkeypatch):
    """Gives ffpa_attn.launching.native, which then uses `wheel_library` whatever is installed."""
    remembered = (native_module.record, native_module.library, native_module.kernel, native_module._function)
    monkeypatch.setattr(native_module, "_PACKAGE", wheel_library)
    for function in remembered:
        function.cache_clear()
    yield native_module
    for function in remembered:
        function.cache_clear()
