"""Every test takes `device`: the CPU, and a GPU where there is one. A run in which nothing ran is a failure."""

import os
import platform
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # oracle, compare, cases
sys.path.insert(0, str(Path(__file__).parent.parent / "ffpa"))  # the package, installed or not

PYPI_HAS_NVCC = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, and no test sees it (clean_environment)
torch.set_num_threads(1)  # the tensors are small: on a busy machine, two threads wait more than they compute
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        metavar="I/N",
        help="the I-th of N runs that, side by side, are the suite and take about as long. The first "
        "has all that are marked large; TESTS_IN_A_ROW of a module, which share what is compiled for them, are one run's.",
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--part"):
        return
    part, parts = map(int, config.getoption("--part").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--part={part}/{parts}: parts count from 1")
    chosen = _dealt(items, parts)[part - 1]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _dealt(items, parts: int) -> list[set]:
    """The tests of each part. What belongs together goes to the part that has the least to do so far."""
    tests_of, seconds_of = [set() for _ in range(parts)], [0.0] * parts
    for tests in _together(items):
        large = [test for test in tests if test.get_closest_marker("large")]
        others = [test for test in tests if test not in large]
        for part, dealt in ((0, large), (seconds_of.index(min(seconds_of)), others)):
            tests_of[part].update(dealt)
            seconds_of[part] += sum(map(_seconds, dealt))
    return tests_of


def _together(items):
    """Lists of the tests that are to run in one process."""
    tests = []
    for item in items:
        if tests and (item.module is not tests[0].module or len(tests) == getattr(item.module, "TESTS_IN_A_ROW", 1)):
            yield tests
            tests = []
        tests.append(item)
    if tests:
        yield tests


def _seconds(test) -> float:
    long = test.get_closest_marker("long")
    return long.kwargs["seconds"] if long else 0.7


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def share_memory(request):
    """Parts of the suite share a GPU, and PyTorch keeps what was freed. A large test waits till others have left it room, and
    takes all of it at once.
    """
    large = request.node.get_closest_marker("large")
    if large and torch.cuda.is_available() and not runs_on_the_cpu(request.node):
        take_room(large.kwargs["gigabytes"])
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 28:
        torch.cuda.empty_cache()


def runs_on_the_cpu(item) -> bool:
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(x == "cpu" or getattr(x, "emulated", False) for x in parameters)


def take_room(gigabytes: int, seconds: float = 600) -> None:
    """It stays with PyTorch's allocator, which gives the test of it."""
    total = torch.cuda.mem_get_info()[1] >> 30
    if gigabytes >= total:
        pytest.skip(f"needs {gigabytes} GB of a GPU's memory, and this one has {total}")
    end = time.monotonic() + seconds
    while True:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        try:
            if free > gigabytes << 30:
                torch.empty(gigabytes << 30, dtype=torch.uint8, device="cuda")
                return
        except torch.OutOfMemoryError:
            pass  # somebody was faster
        if time.monotonic() > end:
            pytest.fail(f"needs {gigabytes} GB of a GPU's memory; for {seconds:.0f} s others have left {free >> 30}")
        time.sleep(0.5)


@pytest.fixture(scope="session")
def nvcc() -> Path:
    """The compiler of kernels. Where PyPI has one, its absence is a failure: that every kernel compiles is proven here."""
    from ffpa_attn import toolchain

    why = toolchain.why_no_build()
    if why and PYPI_HAS_NVCC:
        pytest.fail(f"{why}; `bash .dev/test.sh` fetches it", pytrace=False)
    if why:
        pytest.skip(why)
    return toolchain.find_nvcc().path


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No flag of the caller's environment reaches a test."""
    from ffpa_attn import env

    for flag in env.FLAGS:
        if flag.scope == "run" and flag.name != "FFPA_CACHE_DIR":
            monkeypatch.delenv(flag.name, raising=False)
    if "torch._dynamo" in sys.modules:  # else nothing was compiled, and importing it takes seconds
        torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ffpa_attn: ")
        yield


def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    ran = sum(len(reporter.stats.get(kind, ())) for kind in ("passed", "failed", "error", "xfailed")) if reporter else 1
    if exitstatus == pytest.ExitCode.OK and not ran and not session.config.option.collectonly:
        reporter.write_line("nothing ran: every test was skipped or deselected, which proves nothing", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
