"""The cache of kernels compiled on demand: one build for many processes, whole or not at all, its owner's alone."""

import errno
import os
import time
from pathlib import Path

import pytest
from ffpa_attn import build, jit, toolchain
from ffpa_attn.cache import cache_directory
from ffpa_attn.spec import ScaledCopy
from ffpa_attn.toolchain import BuildError
from wheel_support import needs_nvcc

SPEC = ScaledCopy("f16", 4)


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix not in (".so", ".json", ".lock")]


def test_compiled_once_with_a_line_on_stderr(fake_nvcc, cache, capfd):
    path = jit.library(SPEC, "sm_90")
    assert path.parent == cache and path.exists() and path.with_suffix(".json").exists()
    assert f"compiling {SPEC.name} for sm_90, once, into {cache}" in capfd.readouterr().err
    assert cache.stat().st_mode & 0o777 == 0o700
    calls = len(fake_nvcc.calls)
    assert jit.library(SPEC, "sm_90") == path
    assert len(fake_nvcc.calls) == calls and capfd.readouterr().err == "" and not leftovers(cache)


def test_the_default_cache_is_in_the_home(monkeypatch, tmp_path):
    monkeypatch.delenv("FFPA_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "ffpa_attn"


def test_another_source_compiler_spec_or_gpu_is_another_file(fake_nvcc, cache, monkeypatch):
    paths = [jit.library(SPEC, "sm_90"), jit.library(SPEC, "sm_80"), jit.library(ScaledCopy("f16", 8), "sm_90")]
    monkeypatch.setattr(build, "sources_hash", lambda: "changed")
    paths.append(jit.library(SPEC, "sm_90"))
    fake_nvcc.set(version="2")
    toolchain._release.cache_clear()
    paths.append(jit.library(SPEC, "sm_90"))
    assert len(set(paths)) == 5 and all(path.exists() for path in paths)


@pytest.mark.parametrize("how", ["on PATH", "NVCC_CCBIN", "NVCC_CCBIN, a directory"])
def test_another_host_compiler_is_another_file(fake_nvcc, cache, monkeypatch, tmp_path, how):
    """Another place, and another version in the same place."""
    seen = {jit.library(SPEC, "sm_90")}
    host = tmp_path / "host" / ("gcc" if how != "NVCC_CCBIN" else "clang++")
    host.parent.mkdir()
    if how == "on PATH":
        monkeypatch.setenv("PATH", f"{host.parent}{os.pathsep}{os.environ['PATH']}")
    else:
        monkeypatch.setenv("NVCC_CCBIN", str(host.parent if "directory" in how else host))
    for version in ("13.1", "14.2"):
        host.write_text(f"#!/bin/sh\necho {version}\n")
        host.chmod(0o755)
        toolchain._release.cache_clear()
        seen.add(jit.library(SPEC, "sm_90"))
    assert len(seen) == 3


@pytest.mark.parametrize("name", ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"])
def test_flags_that_nvcc_adds_are_another_file(fake_nvcc, cache, monkeypatch, name):
    before = jit.library(SPEC, "sm_90")
    monkeypatch.setenv(name, "-O1")
    assert jit.library(SPEC, "sm_90") != before


def test_sources_hash_follows_the_sources(tmp_path, monkeypatch):
    (tmp_path / "a.cuh").write_text("1")
    monkeypatch.setattr(build, "csrc", lambda: tmp_path)
    fresh = build.sources_hash.__wrapped__
    before = fresh()
    (tmp_path / "a.cuh").write_text("2")
    changed = fresh()
    assert changed != before
    (tmp_path / "ptx" / "emulated").mkdir(parents=True)
    (tmp_path / "ptx" / "emulated" / "a.cuh").write_text("3")  # no compiled kernel holds it
    assert fresh() == changed


def test_sixteen_processes_compile_once(fake_nvcc, cache, compile_in_child):
    fake_nvcc.set(seconds="0.5")
    children = [compile_in_child() for _ in range(16)]
    outputs = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0] * 16, outputs
    paths = {Path(out.strip()) for out, _ in outputs}
    assert len(paths) == 1 and paths.pop().parent == cache
    assert sum("compiling" in err for _, err in outputs) == 1
    assert len(fake_nvcc.calls) == 2 and not leftovers(cache)  # the kernel and the link


def test_a_killed_build_leaves_nothing_in_the_way(fake_nvcc, cache, compile_in_child):
    fake_nvcc.set(seconds="60")
    victim = compile_in_child()
    deadline = time.monotonic() + 30
    while not fake_nvcc.calls and time.monotonic() < deadline:
        time.sleep(0.02)
    waiting = compile_in_child()
    assert "waiting for another process" in waiting.stderr.readline()
    fake_nvcc.set(seconds="0")
    victim.kill()  # not its compiler: that one goes on, and must not disturb
    out, err = waiting.communicate(timeout=30)
    assert waiting.returncode == 0 and Path(out.strip()).parent == cache, err
    assert not leftovers(cache)


def test_a_failed_build_leaves_nothing(fake_nvcc, cache):
    fake_nvcc.set(broken="")
    with pytest.raises(BuildError, match="out of luck"):
        jit.library(SPEC, "sm_90")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    (fake_nvcc.bin / "broken").unlink()
    assert jit.library(SPEC, "sm_90").exists()


@pytest.mark.parametrize("code, way_out", [(errno.ENOSPC, "free some space"), (errno.EROFS, "make it writable")])
def test_a_cache_that_cannot_be_written(fake_nvcc, cache, monkeypatch, code, way_out):
    real = Path.rename

    def rename(self, target):
        if Path(target).suffix == ".so":
            raise OSError(code, os.strerror(code))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(
        BuildError, match=rf"{cache}, cannot be written .*{os.strerror(code)}.*{way_out}.*FFPA_CACHE_DIR"
    ):
        jit.library(SPEC, "sm_90")
    assert not list(cache.glob("*.so")) and not leftovers(cache)


def test_a_read_only_cache_serves_what_it_holds(fake_nvcc, cache, monkeypatch):
    path = jit.library(SPEC, "sm_90")
    real = Path.open

    def read_only(self, mode="r", *how, **more):
        if cache in self.parents and mode != "r":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(self, mode, *how, **more)

    monkeypatch.setattr(Path, "open", read_only)
    assert jit.library(SPEC, "sm_90") == path
    with pytest.raises(BuildError, match=rf"{cache}, cannot be written .*make it writable.*FFPA_CACHE_DIR"):
        jit.library(ScaledCopy("f16", 8), "sm_90")


def test_a_cache_that_is_a_file(fake_nvcc, cache):
    cache.write_text("")
    with pytest.raises(BuildError, match=rf"{cache}, cannot be written .*FFPA_CACHE_DIR"):
        jit.library(SPEC, "sm_90")


def test_a_cache_of_another_user(fake_nvcc, cache, monkeypatch):
    cache.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    with pytest.raises(BuildError, match=rf"{cache}, belongs to user \d+, and this is user \d+.*FFPA_CACHE_DIR"):
        jit.library(SPEC, "sm_90")
    assert not fake_nvcc.calls


def test_a_cache_that_others_can_write(fake_nvcc, cache):
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(BuildError, match=rf"{cache}, is writable by other users \(mode 777\): chmod 700"):
        jit.library(SPEC, "sm_90")


def test_no_compiler(cache, monkeypatch):
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    with pytest.raises(BuildError, match=rf'{SPEC.name} is not built for sm_90, and .*pip install "nvidia-cuda-nvcc'):
        jit.library(SPEC, "sm_90")
    assert not cache.exists()


@needs_nvcc
def test_the_real_compiler(cache, native):
    start = time.monotonic()
    path = jit.library(ScaledCopy("f16", 1), "sm_90")
    assert time.monotonic() - start < 30  # 2 to 5 s on an idle machine
    native.library().load_kernel(str(path), "scaled_copy_f16_unroll1", "scaled_copy_f16_unroll1@sm_90")
