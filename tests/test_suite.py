"""Tests the suite itself: a run in which nothing ran proves nothing, and says so."""

import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

CONFTEST = Path(__file__).parent / "conftest.py"
_spec = importlib.util.spec_from_file_location("conftest_of_the_suite", CONFTEST)  # folders below have one as well
conftest = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(conftest)


def suite_of(tmp_path, body, *options):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text().replace("__file__", repr(str(CONFTEST))))
    (tmp_path / "pyproject.toml").write_text((CONFTEST.parent.parent / "pyproject.toml").read_text())
    (tmp_path / "test_it.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path, *options]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    "body, exit_code",
    [("pass", 0), ("pytest.skip('no reason')", 1), ("assert False", 1)],
    ids=["one passes", "all are skipped", "one fails"],
)
def test_exit_code(tmp_path, body, exit_code):
    run = suite_of(tmp_path, f"import pytest\ndef test_it():\n    {body}\n")
    assert run.returncode == exit_code, run.stdout
    assert ("nothing ran" in run.stdout) == ("skip" in body)


ORDER = """import pytest
TESTS_IN_A_ROW = 2
MARKS = {3: [pytest.mark.large(gigabytes=9)], 5: [pytest.mark.large(gigabytes=9)]}
MARKS |= {1: [pytest.mark.long(seconds=20)], 6: [pytest.mark.long(seconds=30)]}
@pytest.mark.parametrize("i", [pytest.param(i, marks=MARKS.get(i, [])) for i in range(9)])
def test_it(i): print(end=f"<{i}>")
"""


def test_what_takes_long_begins_first_and_large_tests_are_one_process(tmp_path):
    (tmp_path / "queue").mkdir()
    run = suite_of(tmp_path, ORDER, "-s", "--queue", tmp_path / "queue")
    assert re.findall(r"<(\d)>", run.stdout) == list("356102478"), run.stdout
    assert len(list((tmp_path / "queue").iterdir())) == 6


def test_runs_that_share_a_queue_are_the_suite(tmp_path):
    """Each test runs in one of them; one that finds all taken runs nothing, which is right."""
    (tmp_path / "queue").mkdir()
    body = """import os, pathlib, pytest, time
started = pathlib.Path(__file__).parent / "started"
started.mkdir(exist_ok=True)
(started / str(os.getpid())).touch()
while len(list(started.iterdir())) < 2:  # neither takes all before the other has begun
    time.sleep(0.05)
@pytest.mark.parametrize("i", range(40))
def test_it(i):
    time.sleep(0.1)
    print(end=f"<{i}>")
    assert i != 7
"""
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda _: suite_of(tmp_path, body, "-s", "--queue", tmp_path / "queue"), range(2)))
    ran = [sorted(map(int, re.findall(r"<(\d+)>", run.stdout))) for run in runs]
    assert all(ran) and sorted(ran[0] + ran[1]) == list(range(40))
    assert sorted(run.returncode for run in runs) == [0, 1]
    late = suite_of(tmp_path, body, "--queue", tmp_path / "queue")
    assert late.returncode == 0 and "passed" not in late.stdout


def test_a_sample_is_from_all_over_the_suite(tmp_path):
    body = """import pytest, time
@pytest.mark.long(seconds=30)
def test_long(): print(end="<long>")
@pytest.mark.parametrize("i", range(200))
def test_it(i): time.sleep(0.02); print(end=f"<{i}>")
"""
    run = suite_of(tmp_path, body, "-s", "--sample", "1")
    ran = [int(i) for i in re.findall(r"<(\d+)>", run.stdout)]
    assert run.returncode == 0 and 5 < len(ran) < 100 and "<long>" not in run.stdout
    assert min(ran) < 50 and max(ran) > 150 and ran != sorted(ran)


def test_each_changed_file_has_its_tests():
    import check_change

    assert ("tests/operators", ()) not in list(
        check_change.tests_of("ffpa/ffpa_attn/operators/ops.py")
    )  # its mutants know
    assert list(check_change.tests_of("ffpa/ffpa_attn/launching/structs.py")) == [("tests/launching", ())]
    assert list(check_change.tests_of("csrc/torch_ops/versions.cpp")) == [("tests/building", ())]
    assert list(check_change.tests_of("docs/flags.md")) == list(check_change.tests_of("docs/design/build.md")) == []
    assert any("test_mma.py" in tests for tests, _ in check_change.tests_of("csrc/attention/forward/mma_split.cuh"))


# ---- tests that take much of a GPU's memory ----


class Gpu:
    """Stands for a GPU of 80 GB, which others leave bit by bit."""

    def __init__(self, monkeypatch, *free: int, total: int = 80):
        self.free, self.taken = list(free), []
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (self.now() << 30, total << 30))
        monkeypatch.setattr(torch, "empty", lambda size, **_: self.taken.append(size >> 30))
        monkeypatch.setattr(conftest.time, "sleep", lambda _: None)

    def now(self) -> int:
        return self.free.pop(0) if len(self.free) > 1 else self.free[0]


def test_a_large_test_waits_for_room(monkeypatch):
    gpu = Gpu(monkeypatch, 80, 10, 26, 20, 27)  # the first is asked for the total
    conftest.take_room(26)
    assert gpu.taken == [26] and gpu.free == [27]


def test_a_large_test_does_not_wait_for_ever(monkeypatch):
    gpu = Gpu(monkeypatch, 20)
    with pytest.raises(pytest.fail.Exception, match="needs 26 GB of a GPU's memory; for 0 s others have left 20"):
        conftest.take_room(26, seconds=0)
    assert not gpu.taken


def test_a_large_test_is_skipped_where_the_card_is_too_small_for_it_alone(monkeypatch):
    gpu = Gpu(monkeypatch, 24, total=24)
    with pytest.raises(pytest.skip.Exception, match="needs 26 GB of a GPU's memory, and this one has 24"):
        conftest.take_room(26)
    assert not gpu.taken


def test_parts_leave_room_for_the_largest():
    """Each large test says how much it takes: more than what a part may take beside others."""
    tests = "".join(file.read_text() for file in CONFTEST.parent.rglob("test_*.py") if file != Path(__file__))
    needs = [int(n) for n in re.findall(r"mark\.large\(gigabytes=(\d+)\)", tests)]
    script = (CONFTEST.parent.parent / ".dev/test.sh").read_text()
    assert len(needs) == tests.count("mark.large") and min(needs) > 8
    assert max(needs) == int(re.search(r"large = .*, (\d+)$", script, re.MULTILINE)[1])
