"""Tests ninja and its compilers: Ctrl-C is the program's to handle; an exception there, whatever it is, ends them."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ffpa_attn import env
from ffpa_attn.building import build, sessions, toolchain
from ffpa_attn.building.toolchain import BuildError
from ffpa_attn.specs.spec import ForwardMerge
from ffpa_attn.support.transient import is_transient
from wheel_support import CHILD

KERNELS = {ForwardMerge("f16"): ("sm_90",)}


def alive(process: int) -> bool:
    return Path(f"/proc/{process}/exe").exists()  # a zombie has no such file


def waited_for(what, seconds=20):
    end = time.monotonic() + seconds
    while not (got := what()) and time.monotonic() < end:
        time.sleep(0.02)
    return got


class Late(Exception):
    pass


@pytest.fixture
def alarm():
    """Gives a function that makes a signal handler raise an error of the program after so many seconds."""

    def late(*how):
        raise error

    def set_to(raised, seconds):
        nonlocal error
        error = raised
        signal.setitimer(signal.ITIMER_REAL, seconds)

    error, before = None, signal.signal(signal.SIGALRM, late)
    yield set_to
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Late, TimeoutError])
@pytest.mark.parametrize("stubborn", [False, True], ids=["", "stubborn"])
def test_an_exception_ends_what_runs(fake_nvcc, tmp_path, alarm, monkeypatch, error, stubborn):
    """What runs ends at once where it can be asked to, and by force where it ignores that."""
    monkeypatch.setattr(sessions, "_PATIENCE", 0.3)
    script = fake_nvcc.bin / "nvcc"
    ignores = "trap '' TERM INT HUP\n" if stubborn else ""
    script.write_text(script.read_text().replace("sleep", f'{ignores}echo $$ > "$here/process"\nsleep'))
    fake_nvcc.set(seconds="60")
    alarm(error, 1.0)
    start = time.monotonic()
    with pytest.raises(error):
        build.compile_library(KERNELS, tmp_path / "build")
    assert time.monotonic() - start < 10
    process = int((fake_nvcc.bin / "process").read_text())
    assert waited_for(lambda: not alive(process), 5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_the_program_handles_leaves_the_build_alone(fake_nvcc, cache, number):
    """Ctrl-C of a terminal comes to each process of the program's group."""
    fake_nvcc.set(seconds="1")
    handled = f"import signal\nsignal.signal({int(number)}, lambda *how: None)\n"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, "-c", handled + CHILD], start_new_session=True, **pipes)
    assert waited_for(lambda: fake_nvcc.calls)
    os.killpg(child.pid, number)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0 and Path(out.strip()).exists(), err


def test_a_directory_stays_locked_while_anything_of_a_killed_build_runs(fake_nvcc, tmp_path):
    """Two builds at once would write the same files."""
    code = CHILD.split("from ffpa_attn.building import jit")[0] + (
        "from pathlib import Path\nfrom ffpa_attn.building import build\nfrom ffpa_attn.specs.spec import ForwardMerge\n"
        f"build.compile_library({{ForwardMerge('f16'): ('sm_90',)}}, Path({str(tmp_path / 'build')!r}))"
    )
    fake_nvcc.set(seconds="3")
    victim = subprocess.Popen([sys.executable, "-c", code], env=env.child_environment())
    assert waited_for(lambda: fake_nvcc.calls)
    time.sleep(0.3)  # the compiler has read by now for how long it is to sleep
    start = time.monotonic()
    fake_nvcc.set(seconds="0")
    victim.kill()
    victim.wait()
    build.compile_library(KERNELS, tmp_path / "build")
    assert time.monotonic() - start > 1.5 and (tmp_path / "build" / "library.so").exists()


@pytest.mark.parametrize("who", ["kernel", "link", "ninja"])
def test_what_was_killed_may_go_better(fake_nvcc, tmp_path, who):
    """The system may have killed any of them for want of memory: a compiler, the link, or ninja."""
    script = fake_nvcc.bin / "nvcc"
    where = {"kernel": '[ "$1" = -std=c++17 ] && ', "link": '[ "$1" = -shared ] && ', "ninja": ""}[who]
    victim = "$PPID" if who != "ninja" else "$(ps -o ppid= -p $PPID)"
    victim = "$$" if who != "ninja" else victim
    script.write_text(script.read_text().replace("sleep", f"{where}kill -9 {victim}\nsleep"))
    with pytest.raises(BuildError) as caught:
        build.compile_library(KERNELS, tmp_path / "build")
    assert is_transient(caught.value), caught.value


def test_a_full_disk_is_seen_at_the_end_of_a_long_output(fake_nvcc, tmp_path):
    script = fake_nvcc.bin / "nvcc"
    lines = 'seq 1000\necho "fatal error: No space left on device"\nexit 1\n'
    script.write_text(script.read_text().replace("sleep", f"{lines}sleep"))
    with pytest.raises(BuildError, match=r"1\n2\n[\s\S]*\n\.\.\.\n[\s\S]*No space left") as caught:
        build.compile_library(KERNELS, tmp_path / "build")
    assert is_transient(caught.value) and len(str(caught.value).splitlines()) < 60


def test_tools_speak_english(fake_nvcc, tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    script = fake_nvcc.bin / "nvcc"
    script.write_text(script.read_text().replace("sleep", 'echo "$LC_ALL" > "$here/locale"\nsleep'))
    build.compile_library(KERNELS, tmp_path / "build")
    assert (fake_nvcc.bin / "locale").read_text() == "C\n"


@pytest.mark.parametrize("code", ["EMFILE", "EAGAIN", "ENOMEM"])
def test_a_compiler_that_cannot_be_asked_now_is_asked_again(fake_nvcc, monkeypatch, code):
    """A compiler that cannot be started now is no reason to go without it from then on."""

    def busy(*how, **more):
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    with monkeypatch.context() as patch:
        patch.setattr(toolchain.subprocess, "run", busy)
        with pytest.raises(OSError) as caught:
            toolchain.why_no_build()
        assert is_transient(caught.value)
    assert toolchain.why_no_build() is None


@pytest.mark.parametrize("victim", ["ninja", "the compiler's shell"])
def test_nothing_writes_once_the_error_is_there(fake_nvcc, tmp_path, victim):
    """Once the error is raised, whoever holds the lock may write the same files."""
    script = fake_nvcc.bin / "nvcc"
    script.write_text(script.read_text().replace("sleep", 'echo $$ $PPID > "$here/process"\nsleep'))
    fake_nvcc.set(seconds="60")
    told = fake_nvcc.bin / "process"

    def kill():
        waited_for(lambda: told.exists() and len(told.read_text().split()) == 2)
        process, parent = map(int, told.read_text().split())
        os.kill(os.getsid(process) if victim == "ninja" else parent, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(BuildError, match="failed"):
        build.compile_library(KERNELS, tmp_path / "build")
    assert not alive(int(told.read_text().split()[0]))
    killer.join()
