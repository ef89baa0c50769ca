"""Includes and imports go one way, and a few things have one place."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "ffpa" / "ffpa_attn"

# Lowest first: a layer reads what is below it, and itself.
CXX_LAYERS = ("base", "ptx", "tile", "attention", "launch", "torch_ops")
# Lowest first: a module imports only from lines above its own.
PYTHON_LAYERS = (
    (
        "env",
        "imports",
        "namesake",
        "peer_memory",
        "private_torch",
        "progress",
        "sessions",
        "transient",
        "version",
        "words",
    ),
    ("agreement", "first_order", "plain_torch", "tiles", "triton_tiles"),
    ("spec",),
    ("archs", "backward_chunks", "generation", "memory_checks", "toolchain"),
    ("cache", "flops", "mapped"),
    ("backward_mask", "build"),
    ("jit", "emulator_build"),
    ("native", "emulated", "triton_kernels", "triton_interpreter"),
    ("triton_backward_kernels", "triton_fp8_kernels", "triton_launch"),
    ("triton_persistent", "triton_merge_kernels"),
    ("forward_call",),
    ("mma", "triton_attention", "row_tiles"),
    ("fused", "fused_fp8", "two_phase", "triton_merge"),
    ("triton_fp8", "checks"),
    ("fp8_checks",),
    ("backward",),
    ("choice", "reference", "sharding"),
    ("dispatch_keys", "forms", "out_of_memory"),
    ("ops",),
    ("attention", "exchange", "fp8", "sequence_shards", "tf32"),
    ("sdpa_override",),
    ("flash_api",),
    ("ring", "ulysses"),
    ("distributed",),
    ("integrations",),
    ("__init__", "doctor", "testing"),
)
FIBERS = "ptx/emulated/machine/context_switch.cpp"  # the emulator's one file in assembly

CXX_FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh", ".cpp", ".cu"))
MODULES = sorted(PACKAGE.rglob("*.py"))


def layer(path: Path) -> str:
    return path.relative_to(CSRC).parts[0]


def code(path: Path) -> str:
    """The text without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def offenders(pattern: str, allowed) -> list[str]:
    """C++ files outside the allowed places whose code matches."""
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


def test_torch_headers_only_in_torch_ops():
    assert not offenders(r"#\s*include\s*<(torch|ATen|c10)/", lambda name: name.startswith("torch_ops/"))


def test_one_launch():
    launch = r"<<<|\bcu(da)?Launch(Cooperative)?Kernel\w*\s*\("
    assert not offenders(launch, lambda name: name == "ptx/native/grid_launch.cuh")
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
    """Once for each kernel and GPU: the attribute is the kernel's, and a launch that lowered it would fail another's."""
    users = offenders(r"MaxDynamicSharedMemorySize\b", lambda name: False)
    assert users == ["csrc/launch/launcher.cuh"]


def rank(module: str) -> int:
    """Of a module of the package, "ops"; a module that is nowhere in the list has to be put there."""
    return next(i for i, names in enumerate(PYTHON_LAYERS) if module in names)


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("ffpa_attn")):
            module = (node.module or "").removeprefix("ffpa_attn").strip(".")
            names |= {module.split(".")[0]} if module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ffpa_attn.")}
    return names - {"__version__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_go_down(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in imported(path) - {own}:
        assert rank(module) < rank(own), module


@pytest.mark.parametrize(
    "module",
    [
        "env",
        "version",
        "progress",
        "sessions",
        "tiles",
        "spec",
        "archs",
        "generation",
        "toolchain",
        "build",
        "cache",
        "jit",
        "emulator_build",
    ],
)
def test_what_the_build_uses_imports_no_torch(module):
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    assert not {name for name in names if name.split(".")[0] == "torch"}


def test_one_reader_of_the_environment():
    skipped = {"tests", "build", ".venv", "tmp", "dist", ".git", "env.py"}  # the last is the package's
    files = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in skipped]
    reads = re.compile(r"\bos\s*\.\s*(environ|getenv|putenv)|from os import[^\n]*\b(environ|getenv)")
    found = {path.resolve() for path in files if reads.search(path.read_text())}
    assert found == {PACKAGE / "env.py"}


def test_numpy_is_not_needed():
    """PyTorch runs without it, and so do we."""
    code = "import sys; sys.modules['numpy'] = None; import ffpa_attn; print(ffpa_attn.ffpa.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.stdout.strip() == "ffpa", done.stderr
