"""Every test takes `device`: the CPU, and a GPU where there is one. A run in which nothing ran is a failure."""

import hashlib
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
sys.path += sorted({str(path.parent) for path in Path(__file__).parent.glob("*/test_*.py")})  # rooms share what checks

PYPI_HAS_NVCC = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, and no test sees it (clean_environment)
torch.set_num_threads(1)  # the tensors are small: on a busy machine, two threads wait more than they compute
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


def pytest_addoption(parser):
    parser.addoption(
        "--queue",
        metavar="FOLDER",
        type=Path,
        help="runs that are given the same empty folder share the suite: each takes the next tests that no other has taken",
    )
    parser.addoption("--sample", metavar="SECONDS", type=float, help="tests from all over the suite, for so long")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    folder, seconds = (session.config.getoption(name) for name in ("--queue", "--sample"))
    if not (folder or seconds) or session.config.option.collectonly:
        return None
    mine = _taken(session.items, folder) if folder else _sampled(session.items, seconds)
    item = next(mine, None)
    while item is not None:
        following = next(mine, None)
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def _taken(items, folder: Path):
    """Yields the tests that this run is the first to take."""
    for tests in _together(items):
        name = hashlib.sha256(tests[0].nodeid.encode()).hexdigest()[:16]
        try:
            (folder / name).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from tests


def _sampled(items, seconds: float):
    """Yields tests in an order that has nothing to do with where they stand, without those that take long, or need a
    library of every kernel.
    """
    end = time.monotonic() + seconds
    for item in sorted(items, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest()):
        if time.monotonic() > end:
            return
        if not (_seconds(item) or item.get_closest_marker("large") or "wheel_library" in item.fixturenames):
            yield item


def _together(items) -> list[list]:
    """Returns lists of the tests that one process runs; those that take long begin first."""
    large = [item for item in items if item.get_closest_marker("large")]
    long = sorted((item for item in items if _seconds(item) and item not in large), key=_seconds, reverse=True)
    rows: list[list] = []
    for item in items:
        if item in large or item in long:
            continue
        most = getattr(item.module, "TESTS_IN_A_ROW", 1)
        if rows and rows[-1][0].module is item.module and len(rows[-1]) < most:
            rows[-1].append(item)
        else:
            rows.append([item])
    return [large] * bool(large) + [[item] for item in long] + sorted(rows, key=len, reverse=True)


def _seconds(item) -> float:
    long = item.get_closest_marker("long")
    return long.kwargs["seconds"] if long else 0.0


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def share_memory(request):
    """Parts of the suite share a GPU, and PyTorch keeps what was freed. A large test waits till others have left it
    room, and takes all of it at once.
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
    """Waits for room and takes it: it stays with PyTorch's allocator, which hands it to the test."""
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
    """Finds the compiler. Where PyPI has one, its absence is a failure: that every kernel compiles is proven here."""
    from ffpa_attn.building import toolchain

    why = toolchain.why_no_build()
    if why and PYPI_HAS_NVCC:
        pytest.fail(f"{why}; `bash .dev/test.sh` fetches it", pytrace=False)
    if why:
        pytest.skip(why)
    return toolchain.find_nvcc().path


@pytest.fixture(autouse=True)
def no_kinds_of_calls():
    """A test meets each kind of call for the first time, as if it ran alone."""
    from ffpa_attn.operators import again

    again._known.clear()


@pytest.fixture
def emulated_gpu(monkeypatch):
    """Gives emulated_gpu(blocks): from then on the emulated GPU holds so many blocks of a kernel with scratch."""
    from ffpa_attn.launching import emulated
    from ffpa_attn.operators import again, ops

    def change(blocks: int) -> None:
        monkeypatch.setattr(emulated, "RESIDENT_BLOCKS", blocks)
        again._known.clear()
        ops._plans.clear()

    return change


@pytest.fixture
def no_short_forward(monkeypatch):
    """Leaves calls of few keys to the kernels that a test is about."""
    from ffpa_attn.backends import forward_short

    monkeypatch.setattr(forward_short, "plan", lambda p, flags: "a test leaves it out")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No flag of the caller's environment reaches a test."""
    from ffpa_attn import env

    for flag in env.FLAGS:
        if flag.scope == "run" and flag.name != "FFPA_CACHE_DIR":
            monkeypatch.delenv(flag.name, raising=False)
    if "torch._dynamo" in sys.modules:  # otherwise nothing was compiled, and importing it takes seconds
        torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ffpa_attn: ")
        yield


def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    ran = sum(len(reporter.stats.get(kind, ())) for kind in ("passed", "failed", "error", "xfailed")) if reporter else 1
    others_ran = session.config.getoption("--queue")
    if exitstatus == pytest.ExitCode.OK and not ran and not others_ran and not session.config.option.collectonly:
        reporter.write_line("nothing ran: every test was skipped or deselected, which proves nothing", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
