"""PyPI's `ffpa-attn` has the same module: where it is installed too, the import says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "ffpa"


def imported(*sites: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (PACKAGE, *sites)))}
    return subprocess.run(
        [sys.executable, "-c", "import ffpa_attn"], env=environment, capture_output=True, text=True, cwd=PACKAGE
    )


def install(site: Path, name: str, *files: str) -> None:
    for file in files:  # newer Pythons name only what is there
        (site / file).parent.mkdir(exist_ok=True)
        (site / file).touch()
    folder = site / f"{name.replace('-', '_')}-0.2.4.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.2.4\n")
    (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.mark.parametrize("name", ["ffpa-attn", "FFPA_Attn"])
def test_the_other_package_is_refused(name, tmp_path):
    leftover = tmp_path / "leftover"
    leftover.mkdir()
    install(leftover, name, "something_else.py")
    install(tmp_path, name, "ffpa_attn/__init__.py", "ffpa_attn/functional.py")
    run = imported(leftover, tmp_path)
    assert run.returncode == 1
    said = run.stderr.splitlines()[-1]
    assert said.startswith("ImportError: ffpa-attn 0.2.4 is installed as well as ffpa-cuda")
    assert "pip uninstall -y ffpa-attn ffpa-cuda" in said


def test_the_other_package_without_a_list_of_its_files(tmp_path):
    install(tmp_path, "ffpa-attn", "ffpa_attn/__init__.py")
    (tmp_path / "ffpa_attn-0.2.4.dist-info" / "RECORD").unlink()
    assert "is installed as well" in imported(tmp_path).stderr


@pytest.mark.parametrize(
    "name, files", [("ffpa-attn", ["something_else.py"]), ("ffpa-cuda", ["ffpa_attn/__init__.py"])]
)
def test_others_are_not(name, files, tmp_path):
    """Leftovers of a package that no longer have the module do not count, and neither does our own distribution."""
    install(tmp_path, name, *files)
    run = imported(tmp_path)
    assert run.returncode == 0, run.stderr
