"""The suite itself: a run in which nothing ran proves nothing, and says so."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"


def suite_of(tmp_path, body, *options):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text().replace("__file__", repr(str(CONFTEST))))
    (tmp_path / "pyproject.toml").write_text((CONFTEST.parent.parent / "pyproject.toml").read_text())
    (tmp_path / "test_it.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path, *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    "body, exit_code",
    [("pass", 0), ("pytest.skip('no reason')", 1), ("assert False", 1)],
    ids=["one passes", "all are skipped", "one fails"],
)
def test_exit_code(tmp_path, body, exit_code):
    run = suite_of(tmp_path, f"import pytest\ndef test_it():\n    {body}\n")
    assert run.returncode == exit_code, run.stdout
    assert ("nothing ran" in run.stdout) == ("skip" in body)


def test_parts_are_the_suite(tmp_path):
    """Each test in one of them, those that no two of may run at once in the first."""
    body = """import pytest
@pytest.mark.parametrize("i", [pytest.param(i, marks=[pytest.mark.large] * (i in (3, 4))) for i in range(8)])
def test_it(i): pass
"""
    runs = [suite_of(tmp_path, body, "--collect-only", f"--part={part}/3").stdout for part in (1, 2, 3)]
    parts = [[int(line.split("[")[1][0]) for line in run.splitlines() if "::" in line] for run in runs]
    assert parts == [[0, 3, 4, 6], [1, 7], [2, 5]]
    assert all(suite_of(tmp_path, body, f"--part={part}").returncode == 4 for part in ("0/2", "3/2"))
