"""The suite itself: a run in which nothing ran proves nothing, and says so."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"


@pytest.mark.parametrize(
    "body, exit_code",
    [("pass", 0), ("pytest.skip('no reason')", 1), ("assert False", 1)],
    ids=["one passes", "all are skipped", "one fails"],
)
def test_exit_code(tmp_path, body, exit_code):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text().replace("__file__", repr(str(CONFTEST))))
    (tmp_path / "test_it.py").write_text(f"import pytest\ndef test_it():\n    {body}\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path], capture_output=True, text=True
    )
    assert run.returncode == exit_code, run.stdout
    assert ("nothing ran" in run.stdout) == ("skip" in body)
