"""An emulated module is built into the cache, once, and without torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from ffpa_attn import env

PACKAGE = Path(env.__file__).parent

# This compiler writes the files that it is asked for.
FAKE_COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo "g++ 1"; exit 0; }
echo "$@" >> "$(dirname "$0")/calls"
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && out=$2
  [ "$1" = -MF ] && echo "$2:" > "$2"
  shift
done
echo "$out" > "$out"
"""

CHILD = f"""
import sys, types
package = types.ModuleType("ffpa_attn")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["ffpa_attn"] = package
from ffpa_attn.building.emulator_build import build_emulated_module
print(build_emulated_module("module", [], generated={{"one.cpp": sys.argv[1]}}))
assert "torch" not in sys.modules
"""


@pytest.fixture
def build(tmp_path):
    """Returns a function that starts a build in a child, with a text as source, and returns the child."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "g++").write_text(FAKE_COMPILER)
    (tools / "g++").chmod(0o755)
    path = f"{tools}:{Path(sys.executable).parent}:{env.child_environment()['PATH']}"

    def start(text: str, before: str = "", cache: str = "cache", **more: str) -> subprocess.Popen:
        environment = env.child_environment(PATH=path, FFPA_CACHE_DIR=str(tmp_path / cache), **more)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", before + CHILD, text], text=True, env=environment, **pipes)

    return start


def test_once_in_the_cache(build, tmp_path):
    children = [build("1") for _ in range(4)]
    outputs = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0] * 4, outputs
    (module,) = {Path(out.strip()) for out, _ in outputs}
    assert module.is_file() and tmp_path / "cache" / "emulator" == module.parents[2]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert sum("compiling module for the emulator" in err for _, err in outputs) == 1
    calls = (tmp_path / "tools" / "calls").read_text().splitlines()
    assert len(calls) == len(set(calls)) == 3  # the machine, the module, the link
    build("2").communicate()
    again = (tmp_path / "tools" / "calls").read_text().splitlines()[len(calls) :]
    assert len(again) == 2 and "one.cpp" in again[0]  # what changed, and the link


def test_letters_in_a_path_where_the_locale_has_none(build, tmp_path):
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for text in ("1", "1", "2"):
        child = build(text, cache="jürgen-µ", **locale)
        said = child.communicate()
        assert child.returncode == 0 and Path(said[0].strip()).is_relative_to(tmp_path / "jürgen-µ"), said


@pytest.mark.parametrize("left", [0, 10, -1])
def test_half_a_module_is_linked_again_once(build, tmp_path, left):
    module = Path(build("1").communicate()[0].strip())
    whole = module.read_bytes()
    module.write_bytes(whole[:left])
    calls = tmp_path / "tools" / "calls"
    before = len(calls.read_text().splitlines())
    for _ in range(2):
        assert Path(build("1").communicate()[0].strip()) == module and module.read_bytes() == whole
    assert len(calls.read_text().splitlines()) == before + 1


def test_another_architecture_shares_nothing(build, tmp_path):
    """Two machines with one home keep a library each, even if their compilers say the same of themselves."""
    build("1").communicate()
    build("1", "import platform\nplatform.machine = lambda: 'another'\n").communicate()
    assert len(list((tmp_path / "cache" / "emulator").iterdir())) == 2


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_modules_are_their_owners_whatever_the_umask(build, tmp_path, umask):
    (tmp_path / "cache").mkdir(mode=0o755)
    module = Path(build("1", f"import os; os.umask({umask})\n").communicate()[0].strip())
    assert (tmp_path / "cache" / "emulator").stat().st_mode & 0o777 == 0o700
    assert module.stat().st_mode & 0o077 == 0


def test_a_directory_in_the_cache_that_others_can_write(build, tmp_path):
    (tmp_path / "cache" / "emulator").mkdir(parents=True, mode=0o755)
    (tmp_path / "cache").chmod(0o755)
    (tmp_path / "cache" / "emulator").chmod(0o777)
    child = build("1")
    assert "emulator, is writable by other users" in child.communicate()[1] and child.returncode


def test_a_cache_that_others_can_write(build, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    child = build("1")
    assert "is writable by other users" in child.communicate()[1] and child.returncode
