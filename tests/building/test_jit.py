"""Tests the cache of kernels built on demand: one build for many processes, whole or not at all, its owner's alone."""

import errno
import fcntl
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ffpa_attn import env
from ffpa_attn.building import build, jit, toolchain
from ffpa_attn.building import cache as cache_module
from ffpa_attn.building.cache import cache_directory
from ffpa_attn.building.toolchain import BuildError
from ffpa_attn.specs.spec import ForwardMerge
from ffpa_attn.support.transient import is_transient
from wheel_support import CHILD, Variant, library, needs_nvcc

SPEC = ForwardMerge("f16")


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix not in (".so", ".lock")]


def test_letters_in_a_path_where_the_locale_has_none(fake_nvcc, tmp_path):
    cache = tmp_path / "jürgen-µ"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = env.child_environment(FFPA_CACHE_DIR=str(cache), CUDA_HOME=str(fake_nvcc.home), **locale)
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and Path(done.stdout.strip()).parent == cache, done.stderr
    assert len(fake_nvcc.calls) == 2  # a kernel and the link, once


def test_compiled_once_with_a_line_on_stderr(fake_nvcc, cache, capfd):
    path = library(SPEC, "sm_90")
    assert path.parent == cache and path.exists()
    assert b'"registers": 32' in path.read_bytes()  # what the compiler said is part of the file
    assert f"compiling {SPEC.name} for sm_90, once, into {cache}" in capfd.readouterr().err
    assert cache.stat().st_mode & 0o777 == 0o700
    calls = len(fake_nvcc.calls)
    assert library(SPEC, "sm_90") == path
    assert len(fake_nvcc.calls) == calls and capfd.readouterr().err == "" and not leftovers(cache)


def test_the_default_cache_is_in_the_home(monkeypatch, tmp_path):
    monkeypatch.delenv("FFPA_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "ffpa_attn"


def test_a_user_without_a_home(monkeypatch):
    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FFPA_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(BuildError, match="no place for the cache .* Set FFPA_CACHE_DIR"):
        cache_directory()


def test_another_source_compiler_spec_or_gpu_is_another_file(fake_nvcc, cache, monkeypatch):
    paths = [library(SPEC, "sm_90"), library(SPEC, "sm_80"), library(Variant("f16", 8), "sm_90")]
    monkeypatch.setattr(build, "sources_hash", lambda: "changed")
    paths.append(library(SPEC, "sm_90"))
    fake_nvcc.set(version="2")
    toolchain.release_of.cache_clear()
    paths.append(library(SPEC, "sm_90"))
    assert len(set(paths)) == 5 and all(path.exists() for path in paths)


@pytest.mark.parametrize("how", ["on PATH", "NVCC_CCBIN", "NVCC_CCBIN, a directory"])
def test_another_host_compiler_is_another_file(fake_nvcc, cache, monkeypatch, tmp_path, how):
    """A compiler in another place, and another version in the same place, each give another file."""
    seen = {library(SPEC, "sm_90")}
    host = tmp_path / "host" / ("gcc" if how != "NVCC_CCBIN" else "clang++")
    host.parent.mkdir()
    if how == "on PATH":
        monkeypatch.setenv("PATH", f"{host.parent}{os.pathsep}{os.environ['PATH']}")
    else:
        monkeypatch.setenv("NVCC_CCBIN", str(host.parent if "directory" in how else host))
    for version in ("13.1", "14.2"):
        host.write_text(f"#!/bin/sh\necho {version}\n")
        host.chmod(0o755)
        toolchain.release_of.cache_clear()
        seen.add(library(SPEC, "sm_90"))
    assert len(seen) == 3


@pytest.mark.parametrize("name", ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"])
def test_flags_that_nvcc_adds_are_another_file(fake_nvcc, cache, monkeypatch, name):
    before = library(SPEC, "sm_90")
    monkeypatch.setenv(name, "-O1")
    assert library(SPEC, "sm_90") != before


def test_sources_hash_follows_the_sources(tmp_path, monkeypatch):
    (tmp_path / "a.cuh").write_text("1")
    monkeypatch.setattr(build, "csrc", lambda: tmp_path)
    fresh = build.sources_hash.__wrapped__
    before = fresh()
    (tmp_path / "a.cuh").write_text("2")
    changed = fresh()
    assert changed != before
    (tmp_path / "ptx" / "emulated").mkdir(parents=True)
    (tmp_path / "ptx" / "emulated" / "a.cuh").write_text("3")  # no compiled kernel includes this file
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
    victim.kill()  # its compiler is not killed: that one goes on, and must not disturb
    out, err = waiting.communicate(timeout=30)
    assert waiting.returncode == 0 and Path(out.strip()).parent == cache, err
    assert not leftovers(cache)


def test_a_failed_build_leaves_nothing(fake_nvcc, cache):
    fake_nvcc.set(broken="")
    with pytest.raises(BuildError, match="out of luck"):
        library(SPEC, "sm_90")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    (fake_nvcc.bin / "broken").unlink()
    assert library(SPEC, "sm_90").exists()


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
        library(SPEC, "sm_90")
    assert not list(cache.glob("*.so")) and not leftovers(cache)


def test_a_read_only_cache_serves_what_it_holds(fake_nvcc, cache, monkeypatch):
    path = library(SPEC, "sm_90")
    real = os.open

    def read_only(name, flags, *how, **more):
        if cache in Path(name).parents and flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(name, flags, *how, **more)

    monkeypatch.setattr(os, "open", read_only)
    assert library(SPEC, "sm_90") == path
    with pytest.raises(BuildError, match=rf"{cache}, cannot be written .*make it writable.*FFPA_CACHE_DIR"):
        library(Variant("f16", 8), "sm_90")


def test_a_cache_that_is_a_file(fake_nvcc, cache):
    cache.write_text("")
    with pytest.raises(BuildError, match=rf"{cache}, cannot be written .*FFPA_CACHE_DIR"):
        library(SPEC, "sm_90")


def test_a_cache_that_cannot_be_made(fake_nvcc, monkeypatch):
    monkeypatch.setenv("FFPA_CACHE_DIR", "/proc/none/cache")
    with pytest.raises(BuildError, match=r"/proc/none/cache, cannot be .*FFPA_CACHE_DIR"):
        library(SPEC, "sm_90")


def test_a_cache_of_another_user(fake_nvcc, cache, monkeypatch):
    cache.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    with pytest.raises(BuildError, match=rf"{cache}, belongs to user \d+, and this is user \d+.*FFPA_CACHE_DIR"):
        library(SPEC, "sm_90")
    assert not fake_nvcc.calls


def test_a_cache_that_others_can_write(fake_nvcc, cache):
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(BuildError, match=rf"{cache}, is writable by other users \(mode 777\): chmod 700"):
        library(SPEC, "sm_90")


def test_no_compiler(cache, monkeypatch):
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    with pytest.raises(BuildError, match=rf'{SPEC.name} is not built for sm_90, and .*pip install "nvidia-cuda-nvcc'):
        library(SPEC, "sm_90")
    assert not cache.exists()


# ---- what others can do ----


@pytest.fixture
def mask():
    """Gives os.umask, and restores the umask afterwards."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o027])
def test_what_is_kept_is_its_owners_whatever_the_umask(fake_nvcc, cache, monkeypatch, mask, umask):
    cache.mkdir(mode=0o755)
    mask(umask)
    library(SPEC, "sm_90")
    assert {path.suffix: path.stat().st_mode & 0o777 for path in cache.iterdir()} == {".so": 0o600, ".lock": 0o600}
    monkeypatch.setenv("FFPA_CACHE_DIR", str(cache.parent / "new" / "deep" / "cache"))
    path = library(SPEC, "sm_90")
    assert {place.stat().st_mode & 0o777 for place in list(path.parents)[:3]} == {0o700}


@pytest.mark.parametrize("how", ["others can write it", "a link", "another user's"])
def test_a_library_that_others_may_have_written_is_built_again(fake_nvcc, cache, monkeypatch, how):
    path = library(SPEC, "sm_90")
    calls = len(fake_nvcc.calls)
    if how == "a link":
        path.rename(cache.parent / "other.so")
        path.symlink_to(cache.parent / "other.so")
    elif how == "others can write it":
        path.chmod(0o666)
    else:
        real, wrong = os.fstat, path.stat().st_ino

        def fstat(file):
            status = real(file)
            return os.stat_result((*status[:4], status.st_uid + 1, *status[5:])) if status.st_ino == wrong else status

        monkeypatch.setattr(os, "fstat", fstat)
    with jit.opened(SPEC, "sm_90") as (_, found):
        assert found.content and Path(found.name).stat().st_mode & 0o777 == 0o600
    assert len(fake_nvcc.calls) > calls and not path.is_symlink()


def test_what_was_checked_is_what_is_loaded(fake_nvcc, cache):
    with jit.opened(SPEC, "sm_90") as (path, found):
        path.unlink()
        path.write_text("of somebody else")
        assert Path(found.name).read_bytes().startswith(found.content)
    assert library(SPEC, "sm_90") == path and b"somebody" not in path.read_bytes()


def test_no_two_libraries_have_one_name(fake_nvcc, cache):
    """If two have one name, the dynamic loader may give the first for the second, whose file may have its inode."""
    names = set()
    for gpu in ("sm_80", "sm_90"):
        with jit.opened(SPEC, gpu) as (_, found):
            names.add(found.name)
    assert len(names) == 2


def test_a_link_that_is_set_to_another_directory_meanwhile(fake_nvcc, cache, monkeypatch):
    mine, others = cache.parent / "mine", cache.parent / "others"
    mine.mkdir(mode=0o700)
    others.mkdir(mode=0o700)
    cache.symlink_to(mine)
    real = cache_module.open_cache

    def open_cache():
        place = real()
        cache.unlink()
        cache.symlink_to(others)
        return place

    monkeypatch.setattr(cache_module, "open_cache", open_cache)
    assert library(SPEC, "sm_90").parent == mine and not list(others.iterdir())


def test_another_user_cannot_hold_a_lock(tmp_path, mask):
    mask(0)
    with cache_module.locked(tmp_path / "lock", "x"):
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


# ---- what goes wrong in between ----


@pytest.mark.parametrize("left", [0, 1, 20, -1])
def test_half_a_library_is_built_again_once(fake_nvcc, cache, left):
    path = library(SPEC, "sm_90")
    whole, calls = path.read_bytes(), len(fake_nvcc.calls)
    path.write_bytes(whole[:left])
    for _ in range(2):
        assert library(SPEC, "sm_90") == path and path.read_bytes() == whole
        assert len(fake_nvcc.calls) == 2 * calls


def test_a_disk_that_keeps_nothing_is_an_error(fake_nvcc, cache, monkeypatch):
    monkeypatch.setattr(cache_module, "keep", lambda content, path, fresh: path.write_bytes(content))
    with pytest.raises(BuildError, match=r"what was written there a moment ago is gone.*FFPA_CACHE_DIR") as caught:
        library(SPEC, "sm_90")
    assert is_transient(caught.value)


def test_the_cache_may_be_removed_meanwhile(fake_nvcc, cache, monkeypatch):
    """Removing the cache is safe at any time: the next call makes it again."""
    real = build.compile_library

    def compile_library(*how):
        result = real(*how)
        shutil.rmtree(cache)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(build, "compile_library", compile_library)
        with pytest.raises(FileNotFoundError) as caught:
            library(SPEC, "sm_90")
        assert is_transient(caught.value)
    assert library(SPEC, "sm_90").exists()


def test_the_hosts_architecture_is_another_file(fake_nvcc, cache, monkeypatch):
    before = library(SPEC, "sm_90")
    monkeypatch.setattr(platform, "machine", lambda: "another")
    assert library(SPEC, "sm_90") != before


def test_a_fork_does_not_keep_the_lock(tmp_path):
    """Another thread forks while one compiles: a data loader's worker, which lives on."""
    inside, done = threading.Event(), threading.Event()

    def compile():
        with cache_module.locked(tmp_path / "lock", "x"):
            inside.set()
            done.wait()

    thread = threading.Thread(target=compile)
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        done.set()
        thread.join()
        with open(tmp_path / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_machine_that_does_not_see_our_lock_leaves_our_build_alone(fake_nvcc, cache):
    """Only what a dead process of this machine left, or nobody touched for a day, is removed."""
    path = library(SPEC, "sm_90")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = {"here": f"{jit._machine()}.{os.getpid()}", "dead": f"{jit._machine()}.{dead.pid}", "there": "host.b.7"}
    attempts = {name: cache / f"{path.stem}.{text}.x.tmp" for name, text in [*names.items(), ("old", "host.b.8")]}
    for attempt in attempts.values():
        attempt.mkdir()
    os.utime(attempts["old"], (time.time() - 2 * 24 * 3600,) * 2)
    path.unlink()
    library(SPEC, "sm_90")
    assert {name for name, attempt in attempts.items() if attempt.exists()} == {"here", "there"}


@pytest.mark.parametrize("how", ["broken", "closed", "none"])
def test_a_build_needs_no_stderr(fake_nvcc, cache, monkeypatch, how):
    if how == "broken":
        reader, writer = os.pipe()
        os.close(reader)
        monkeypatch.setattr(sys, "stderr", os.fdopen(writer, "w"))
    elif how == "closed":
        monkeypatch.setattr(sys, "stderr", open(os.devnull, "w"))
        sys.stderr.close()
    else:
        monkeypatch.setattr(sys, "stderr", None)
    assert library(SPEC, "sm_90").exists()


def test_a_time_limit_reaches_the_program_as_it_is(fake_nvcc, cache, monkeypatch):
    def late(*how):
        raise TimeoutError("of the program")

    monkeypatch.setattr(build, "compile_library", late)
    with pytest.raises(TimeoutError, match="of the program"):
        library(SPEC, "sm_90")
    assert not leftovers(cache)


# ---- places that are relative ----


@pytest.mark.parametrize("how", ["CUDA_HOME", "PATH", "NVCC_CCBIN"])
def test_a_relative_place(fake_nvcc, cache, monkeypatch, how):
    """The compiler runs in another directory than this one."""
    home = fake_nvcc.home
    monkeypatch.chdir(home.parent)
    if how == "NVCC_CCBIN":
        (fake_nvcc.bin / "g++").write_text("#!/bin/sh\necho 1\n")
        (fake_nvcc.bin / "g++").chmod(0o755)
        script = fake_nvcc.bin / "nvcc"
        script.write_text(script.read_text().replace("sleep", '"$NVCC_CCBIN" > /dev/null || exit 1\nsleep'))
        monkeypatch.setenv("NVCC_CCBIN", f"{home.name}/bin/g++")
    elif how == "PATH":
        monkeypatch.delenv("CUDA_HOME")
        monkeypatch.setenv("PATH", f"{home.name}/bin{os.pathsep}{os.environ['PATH']}")
        script = fake_nvcc.bin / "nvcc"
        script.write_text(script.read_text().replace("sleep", f"which nvcc | grep -q {home} || exit 1\nsleep"))
    else:
        monkeypatch.setenv("CUDA_HOME", home.name)
    assert toolchain.find_nvcc().path == fake_nvcc.bin / "nvcc"
    assert library(SPEC, "sm_90").exists()


@needs_nvcc
def test_the_real_compiler(cache, native):
    start = time.monotonic()
    with jit.opened(Variant("f16", 1), "sm_90") as (_, compiled):
        assert time.monotonic() - start < 30  # 2 to 5 s on an idle machine
        native.load_kernel(compiled.name, "forward_merge_f16_variant1", "forward_merge_f16_variant1@sm_90")
