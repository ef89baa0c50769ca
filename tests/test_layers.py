"""Checks that includes and imports go one way, and that a few things have one place."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import ffpa_attn
import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "ffpa" / "ffpa_attn"

# Layers are listed lowest first: a layer reads what is below it, and itself.
CXX_LAYERS = ("base", "ptx", "tile", "attention", "launch", "torch_ops")
# Rooms of csrc/attention likewise; "" is its own files, and the two directions know nothing of each other.
ATTENTION_ROOMS = {"params": 0, "rows": 1, "": 2, "forward": 3, "backward": 3}
# Floors are listed lowest first: a room, which is a file or a folder of the package, imports only from floors below.
FLOORS = (
    ("env", "specs", "support"),
    ("building", "checks"),
    ("launching",),
    ("testing", "triton_ops"),
    ("backends",),
    ("doctor", "operators"),
    ("attention", "fp8", "kv_cache"),
    ("demo", "distributed", "integrations"),
    ("__init__",),
)
FIBERS = "ptx/emulated/machine/context_switch.cpp"  # the emulator's one file in assembly

CXX_FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh", ".cpp", ".cu"))
MODULES = sorted(PACKAGE.rglob("*.py"))


def layer(path: Path) -> str:
    return path.relative_to(CSRC).parts[0]


def code(path: Path) -> str:
    """Returns the text without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def offenders(pattern: str, allowed) -> list[str]:
    """Returns the C++ files outside the allowed places whose code matches."""
    found = re.compile(pattern)
    files = [path for path in CXX_FILES if not allowed(path.relative_to(CSRC).as_posix())]
    return [str(path.relative_to(ROOT)) for path in files if found.search(code(path))]


def test_there_is_something_to_check():
    assert {layer(path) for path in CXX_FILES} <= set(CXX_LAYERS) and CXX_FILES and MODULES


@pytest.mark.parametrize("path", CXX_FILES, ids=lambda path: path.relative_to(CSRC).as_posix())
def test_includes_go_down(path):
    for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
        assert (CSRC / included).is_file(), f"{included}: includes are written from csrc/"
        assert CXX_LAYERS.index(included.split("/")[0]) <= CXX_LAYERS.index(layer(path)), included


ATTENTION = CSRC / "attention"


@pytest.mark.parametrize(
    "path", sorted(ATTENTION.rglob("*.*h")), ids=lambda path: path.relative_to(ATTENTION).as_posix()
)
def test_includes_within_attention_go_down(path):
    own = path.relative_to(ATTENTION).parent.as_posix().strip(".")
    for room in re.findall(r'^#include "attention/(?:(\w+)/)?\w+\.c?u?h"', path.read_text(), re.MULTILINE):
        assert room == own or ATTENTION_ROOMS[room] < ATTENTION_ROOMS[own], room


def test_torch_headers_only_in_torch_ops():
    assert not offenders(r"#\s*include\s*<(torch|ATen|c10)/", lambda name: name.startswith("torch_ops/"))


def test_one_launch():
    launch = r"<<<|\bcu(da)?Launch(Cooperative)?Kernel\w*\s*\("
    assert not offenders(launch, lambda name: name == "ptx/native/driver.h")
    callers = offenders(r"\blaunch_grid\b", lambda name: name.startswith("ptx/"))
    assert callers == ["csrc/launch/launch.cuh"]


def test_assembly_only_in_native():
    assert not offenders(r"\basm\b|__asm", lambda name: name.startswith("ptx/native/") or name == FIBERS)


def test_only_base_and_ptx_ask_who_compiles():
    macros = r"__CUDA_ARCH|__CUDACC__|\bFFPA_CUDA\b|\bFFPA_EMULATE"
    assert not offenders(macros, lambda name: name.startswith(("base/", "ptx/")))


def test_only_ptx_and_the_emulators_module_know_the_machine():
    allowed = lambda name: name.startswith(("ptx/emulated/", "launch/emulated/"))  # noqa: E731
    assert not offenders(r"\bemu::", allowed)


def test_shared_memory_is_allowed_in_one_place():
    """Each kernel and GPU asks once: the attribute is the kernel's, and lowering it would fail another launch."""
    users = offenders(r"MaxDynamicSharedMemorySize\b", lambda name: False)
    assert users == ["csrc/launch/launcher.cuh"]


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor(name: str) -> int:
    """Returns where a room lies; one that is on no floor has to be put there."""
    return next(i for i, rooms in enumerate(FLOORS) if name in rooms)


def imported(path: Path) -> set[str]:
    """Returns the rooms that a file imports from, anywhere in it, beside its own."""
    depth = len(path.relative_to(PACKAGE).parts)
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            written = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(name.split(".")[0] == "ffpa_attn" for name in written), "imports here are relative"
    return names - {room(path)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_go_down(path):
    for name in imported(path):
        assert floor(name) < floor(room(path)), name


def test_every_room_has_one_floor():
    assert sorted(name for rooms in FLOORS for name in rooms) == sorted({room(path) for path in MODULES})


WITHOUT_TORCH = [
    path
    for path in MODULES
    if room(path) in ("building", "env", "specs") or path.name in ("namesake.py", "progress.py", "version.py")
]


@pytest.mark.parametrize("path", WITHOUT_TORCH, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_what_the_build_uses_imports_no_torch(path):
    tree = ast.parse(path.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    assert not {name for name in names if name.split(".")[0] == "torch"}


def test_one_reader_of_the_environment():
    skipped = {"tests", "build", ".venv", "tmp", "dist", ".git", "env.py"}  # env.py is the package's
    files = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in skipped]
    reads = re.compile(r"\bos\s*\.\s*(environ|getenv|putenv)|from os import[^\n]*\b(environ|getenv)")
    found = {path.resolve() for path in files if reads.search(path.read_text())}
    assert found == {PACKAGE / "env.py"}


def test_programs_in_texts_import_what_there_is():
    """A program that a test hands to another process is a text, and some run on GPUs alone: imports in it are looked up."""
    found = re.compile(r"^\s*from (ffpa_attn[\w.]*) import ([\w, ]+)$", re.MULTILINE)
    written = {match for path in sorted((ROOT / "tests").rglob("*.py")) for match in found.findall(path.read_text())}
    for module, names in sorted(written):
        for name in re.findall(r"(\w+)(?: as \w+)?", names):
            there = hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")
            assert there, f"from {module} import {name}"


def test_numpy_is_not_needed():
    """PyTorch runs without it, and so do we."""
    code = "import sys; sys.modules['numpy'] = None; import ffpa_attn; print(ffpa_attn.ffpa.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.stdout.strip() == "ffpa", done.stderr


@pytest.mark.parametrize("name", [name for name in ffpa_attn.__all__ if inspect.isfunction(getattr(ffpa_attn, name))])
def test_public_functions_are_annotated(name):
    signature = inspect.signature(getattr(ffpa_attn, name))
    named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert not [p.name for p in named if p.annotation is p.empty]
    assert signature.return_annotation is not signature.empty
    assert (PACKAGE / "py.typed").is_file()
