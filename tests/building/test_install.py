"""Tests every way to build and install, from a copy of the repository, with and without a compiler."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from wheel_support import CHILD, ROOT, needs_nvcc

TESTS_IN_A_ROW = 100  # all tests of this file: what one has compiled, the next need not
_MOST_BYTES = 60 << 20
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_HERE = ("--no-build-isolation", "--no-deps", "--no-index")


def start(*command, cwd: Path, **changes: str) -> subprocess.Popen:
    # Few kernels are built, for one GPU: the tests are about how they get there.
    environment = {**os.environ, "ENABLE_FFPA_DEBUG": "1", "FFPA_CUDA_ARCHS": "9.0", "MAX_JOBS": "2", **changes}
    environment = {name: value for name, value in environment.items() if value}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def printed(process: subprocess.Popen) -> str:
    """Returns all that a process prints, once it has ended; raises with that text when the process fails."""
    out, _ = process.communicate()
    assert process.returncode == 0, f"{process.args}:\n{out}"
    return out


def run(*command, cwd: Path, **changes: str) -> str:
    return printed(start(*command, cwd=cwd, **changes))


def compiler_packages() -> set[str]:
    """Returns the names of the nvidia packages that the extra `jit` asks PyPI for."""
    extra = re.search(r"^jit = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE).group(1)
    return {name for name in re.findall(r'"([^"]+)"', extra) if name.startswith("nvidia-")}


def copy_of_the_repository(copy: Path) -> Path:
    """Copies the repository as a user has it."""
    files = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "env.py")
    for name in (*files, "csrc", "ffpa", "tests", "bench", ".dev"):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("_native*", "__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            copy.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    return copy


TESTS_IN_A_ROW = 100  # all tests of this file: what one has compiled, the next need not


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Returns a copy whose path has a space, with the first few kernels alone; tests share what is compiled there."""
    copy = copy_of_the_repository(tmp_path_factory.mktemp("install") / "a copy")
    spec, every = copy / "ffpa" / "ffpa_attn" / "specs" / "spec.py", "return tuple(dict.fromkeys(kernels))"
    assert spec.read_text().count(every) == 1
    spec.write_text(spec.read_text().replace(every, f"{every}[:4]"))
    return copy


@pytest.fixture
def no_toolkit(tmp_path) -> dict[str, str]:
    """Returns an environment without a CUDA toolkit, whatever this machine has."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sh", "uname", "cat", "gcc", "g++", "as", "ld"):
        if shutil.which(tool):
            (tools / tool).symlink_to(shutil.which(tool))
    return {"PATH": str(tools), "CUDA_HOME": "", "NVCC_CCBIN": ""}


@pytest.fixture
def no_nvcc(tmp_path, no_toolkit) -> dict[str, str]:
    """Returns an environment without a CUDA toolkit and without a compiler from PyPI."""
    hidden = tmp_path / "packages" / "nvidia"  # a place on the path before the one that would hold PyPI's compiler
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").touch()
    return {**no_toolkit, "PYTHONPATH": str(hidden.parent)}


@pytest.fixture
def pypi_nvcc(no_toolkit) -> dict[str, str]:
    """Returns an environment whose only compiler is PyPI's: the one installed here, or one fetched into build/ once."""
    if any(list(Path(path).glob("nvidia/cu*/bin/nvcc")) for path in sys.path):
        return no_toolkit
    place = ROOT / "build" / "pypi_nvcc"
    if not place.exists():
        fresh = place.with_suffix(".new")
        command = [*_PIP, "install", "--quiet", "--upgrade", "--target", str(fresh), *sorted(compiler_packages())]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:  # this happens only beside a toolkit: without one, set-up fetched nvcc into the environment
            pytest.skip(f"PyPI's nvcc cannot be fetched: {done.stderr[-500:]}")
        (fresh / "nvidia" / "__init__.py").touch()  # otherwise another one in the environment would hide it
        fresh.rename(place)
    return {**no_toolkit, "PYTHONPATH": str(place)}


def doctor(cwd: Path, python: str = sys.executable, **changes: str) -> str:
    return run(python, "-m", "ffpa_attn.doctor", cwd=cwd, **changes)


@needs_nvcc
def test_pip_wheel_and_pip_install(source, tmp_path):
    run(*_PIP, "wheel", str(source), *_HERE, "-w", str(tmp_path), cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-cp310-abi3-{sysconfig.get_platform().replace('-', '_')}.whl")
    assert wheel.stat().st_size <= _MOST_BYTES
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        *(
            "_native.abi3.so",
            "_native.json",
            "env.py",
            "py.typed",
            "csrc/launch/launcher.cuh",
            "csrc/torch_ops/launch.cpp",
        ),
        *(
            "testing/__init__.py",
            "csrc/launch/emulated/module.cpp",
            "csrc/ptx/emulated/machine/run.cpp",
        ),  # sources of the emulator
    ):
        assert f"ffpa_attn/{name}" in names
    assert not [name for name in names if name.endswith((".o", ".cu", ".pyc"))]

    site = tmp_path / "site"
    run(*_PIP, "install", str(source), *_HERE, "--target", str(site), cwd=tmp_path)
    assert f"in {site}/ffpa_attn" in doctor(tmp_path, PYTHONPATH=str(site))
    kernels = "from ffpa_attn.building import build; from ffpa_attn.launching import native; print(build.csrc(), *native.record()['kernels'])"
    csrc, *names = run(sys.executable, "-c", kernels, cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert csrc == f"{site}/ffpa_attn/csrc" and names


def test_two_builds_at_once(fake_nvcc, tmp_path):
    """The second build waits, then finds everything compiled."""
    source = copy_of_the_repository(tmp_path / "source")
    fake_nvcc.set(seconds="0.3")
    places = [tmp_path / "one", tmp_path / "two"]
    builds = [start(*_PIP, "wheel", str(source), *_HERE, "-w", str(place), cwd=tmp_path) for place in places]
    for build in builds:
        printed(build)
    (one,), (two,) = (place.glob("*.whl") for place in places)
    names = zipfile.ZipFile(one).namelist()
    assert names == zipfile.ZipFile(two).namelist() and "ffpa_attn/_native.abi3.so" in names
    results = [call.split(" -o ")[1].split()[0] for call in fake_nvcc.calls]
    assert results and len(results) == len(set(results))


@needs_nvcc
def test_setup_py_bdist_wheel(source, tmp_path):
    run(sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path), cwd=source)
    (wheel,) = tmp_path.glob("*-cp310-abi3-*.whl")
    assert "ffpa_attn/_native.abi3.so" in zipfile.ZipFile(wheel).namelist()


def test_sdist(fake_nvcc, tmp_path):
    """An sdist holds what builds and proves, and nothing that a build made; a wheel comes out of it alone."""
    source = copy_of_the_repository(tmp_path / "source")
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    for generated in ("ffpa/ffpa_attn/_native.json", "ffpa/ffpa_attn/_native.abi3.so", "tests/__pycache__/a.pyc"):
        (source / generated).parent.mkdir(exist_ok=True)
        (source / generated).touch()
    run(sys.executable, "setup.py", "-q", "sdist", "-d", str(tmp_path), cwd=source)
    (sdist,) = tmp_path.glob("ffpa_cuda-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not files - names
    assert not [name for name in names if re.search(r"/_native\.|__pycache__/.|\.(so|o|pyc)$", name)]

    run(*_PIP, "wheel", str(sdist), *_HERE, "-w", str(tmp_path), cwd=tmp_path)
    (wheel,) = tmp_path.glob("*-cp310-abi3-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"ffpa_attn/_native.abi3.so", "ffpa_attn/env.py", "ffpa_attn/csrc/launch/launcher.cuh"} <= set(names)


@needs_nvcc
def test_editable(source, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"), cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    ours = [path for path in sys.path if path.endswith("-packages")]  # torch, pip and setuptools
    (site / "ours.pth").write_text("\n".join(ours))
    run(str(python), "-m", "pip", "install", "-e", str(source), *_HERE, cwd=tmp_path)
    try:
        assert f"in {source}/ffpa/ffpa_attn" in doctor(tmp_path, str(python))
        where = "from ffpa_attn.building import build; from ffpa_attn.launching import native; native.library(); print(build.csrc())"
        assert run(str(python), "-c", where, cwd=tmp_path).strip() == str(source / "csrc")
    finally:
        for path in (source / "ffpa" / "ffpa_attn").glob("_native*"):
            path.unlink()


@needs_nvcc
def test_a_kernel_compiles_with_pypis_nvcc_and_gcc_alone(pypi_nvcc, tmp_path):
    code = f"{CHILD}\nfrom ffpa_attn.building import toolchain\nprint(toolchain.find_nvcc().found)"
    *_, path, found = run(
        sys.executable, "-c", code, cwd=tmp_path, FFPA_CACHE_DIR=str(tmp_path / "cache"), **pypi_nvcc
    ).splitlines()
    assert found == "PyPI's nvidia-cuda-nvcc"
    assert Path(path).parent == tmp_path / "cache" and ctypes.CDLL(path)["ffpa_instance_forward_merge_f16"]


def test_set_up_fetches_nvcc_once(no_nvcc, fake_nvcc):
    """setup_nvcc of setup_env.sh asks for the four packages where no nvcc is found, and for nothing where one is."""
    script = f'. "{ROOT}/.dev/setup_env.sh"; _install() {{ echo "install $*"; }}; PATH=$1 CUDA_HOME=$2 setup_nvcc'
    here = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]

    def fetched(home: str) -> str:
        environment = {"PATH": here, "PYTHONPATH": no_nvcc["PYTHONPATH"]}
        return run("bash", "-c", script, "bash", no_nvcc["PATH"], home, cwd=ROOT, **environment)

    assert set(re.findall(r"[^ \n]+==\S+", fetched(""))) == compiler_packages()
    assert fetched(str(fake_nvcc.home)) == ""


def test_python_only(source, tmp_path, no_nvcc):
    out = run(*_PIP, "wheel", "-v", str(source), *_HERE, "-w", str(tmp_path), cwd=tmp_path, **no_nvcc)
    assert "building a Python-only package: there is no nvcc" in out
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    packages = os.pathsep.join((str(tmp_path / "site"), no_nvcc["PYTHONPATH"]))
    out = doctor(tmp_path, **{**no_nvcc, "PYTHONPATH": packages})
    assert "this installation holds no CUDA kernels" in out and "nothing is broken" in out


def test_a_module_that_is_no_more_is_in_no_later_wheel(no_nvcc, tmp_path):
    source = copy_of_the_repository(tmp_path / "source")
    module = source / "ffpa" / "ffpa_attn" / "short_lived.py"
    module.touch()
    for there in (True, False):
        run(sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path), cwd=source, **no_nvcc)
        (wheel,) = tmp_path.glob("*-py3-none-any.whl")
        assert ("ffpa_attn/short_lived.py" in zipfile.ZipFile(wheel).namelist()) == there
        module.unlink(missing_ok=True)


def test_a_compiler_that_fails_leaves_no_wheel(fake_nvcc, tmp_path):
    source = copy_of_the_repository(tmp_path / "source")
    fake_nvcc.set(broken="")
    build = start(sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path), cwd=source)
    out, _ = build.communicate()
    assert build.returncode != 0 and "out of luck" in out and "Traceback" not in out
    assert out.splitlines()[-1].startswith("ffpa_attn: `")
    assert not list(tmp_path.glob("*.whl")) and not list(source.rglob("_native*"))


def test_a_wrong_flag_is_one_line(source):
    environment = {**os.environ, "MAX_JOBS": "many", "CUDA_HOME": ""}
    command = [sys.executable, "setup.py", "-q", "build"]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert (
        done.returncode != 0 and "ffpa_attn: MAX_JOBS='many' is not allowed; set it to an integer >= 1" in done.stderr
    )
    assert "Traceback" not in done.stderr
