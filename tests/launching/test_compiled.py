"""Tests what C hands to the driver for kernels that Triton compiled; the driver is one that writes it down."""

import ctypes
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ffpa_attn.building import build, toolchain
from ffpa_attn.launching import compiled, native
from ffpa_attn.launching.compiled import Address, Kernel, TensorMap

TESTS_IN_A_ROW = 16  # they share a library

MAP = TensorMap("q", 9, 3, [64, 70, 4, 2], [128, 8960, 35840], [64, 32, 1, 1])
KERNELS = [
    Kernel("first", 11, 5, 128, 4096, [Address("q"), struct.pack("<i", 7), MAP, struct.pack("<q", 8), bytes(8)]),
    Kernel("second", 12, 6, 256, 0, [struct.pack("<f", 0.5), Address("delta"), Address("out")]),
]
PLACES = {"q": (0, 0), "out": (1, 0), "statistics": (2, 0), "delta": (2, 48)}


@pytest.fixture(scope="module")
def built(nvcc, tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("launch") / "library.so"
    sources = build.csrc() / "torch_ops" / "launch.cpp", Path(__file__).with_name("no_driver.cpp")
    flags = f"-std=c++17 -shared -cudart=none -Xcompiler=-fPIC,-fvisibility=hidden,-Wall -DTORCH_TARGET_VERSION={build.TORCH_TARGET_VERSION}"
    includes = "-isystem", toolchain.find_torch().include, f"-I{build.csrc()}"
    done = subprocess.run([nvcc, *flags.split(), *includes, *sources, "-o", library], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return library


@pytest.fixture
def driver(built, tmp_path, monkeypatch):
    """Gives the library, with nothing written down yet; its kernels take what those above have."""
    own = tmp_path / built.name
    own.write_bytes(built.read_bytes())
    monkeypatch.setattr(build, "LIBRARY", str(own))
    monkeypatch.setattr(native, "library", lambda: None)
    native._function.cache_clear()
    library = ctypes.CDLL(str(own))
    for kernel in KERNELS:
        takes(library, kernel, compiled.image(kernel.parameters)[2])
    yield library
    native._function.cache_clear()


def takes(library, kernel: Kernel, sizes: list[int]) -> None:
    library.a_kernel_takes(ctypes.c_void_p(kernel.function), (ctypes.c_int * len(sizes))(*sizes), len(sizes))


def heard(library) -> bytes:
    text = ctypes.c_char_p()
    library.what_was_heard.restype = ctypes.c_size_t
    size = library.what_was_heard(ctypes.byref(text))
    return ctypes.string_at(text, size)


def launches(q: int, out: int, statistics: int) -> bytes:
    """Returns what is written down of both kernels."""
    encoded = struct.pack("<Q6i", q, 9, 4, 0, 3, 2, 0)
    encoded += b"".join(struct.pack("<3i", *x) for x in zip(MAP.size, MAP.box, [*MAP.stride_bytes, 0], strict=True))
    first = struct.pack("<Q7iQQ", 11, 5, 1, 1, 128, 1, 1, 4096, 1003, 0)
    first += struct.pack("<Qi", q, 7) + encoded.ljust(128, b"\0") + struct.pack("<qQ", 8, 0)
    second = struct.pack("<Q7iQQ", 12, 6, 1, 1, 256, 1, 1, 0, 1003, 0)
    return first + second + struct.pack("<fQQ", 0.5, statistics + 48, out)


def test_what_the_driver_is_given(driver):
    """A call's addresses reach parameters and descriptors; a thread without a context gets one."""
    launch = compiled.launcher(KERNELS, PLACES, 3)
    launch(1 << 40, 32, 64)
    assert heard(driver) == launches(1 << 40, 32, 64)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(launch, 16, 48, 2**63).result()
    assert heard(driver) == launches(1 << 40, 32, 64) + launches(16, 48, 2**63)


@pytest.mark.parametrize(
    "sizes, why",
    [
        ([8, 8, 128, 8, 8], "first cannot be launched from here: parameter 1 has 8 bytes, not 4"),
        ([8, 4, 128, 8], "of a parameter the driver says"),
        ([8, 4, 128, 8, 8, 8], "it has more than 5 parameters"),
    ],
)
def test_a_kernel_that_takes_others(driver, sizes, why):
    takes(driver, KERNELS[0], sizes)
    with pytest.raises(RuntimeError, match=why):
        compiled.launcher(KERNELS, PLACES, 3)


def test_a_kernel_of_too_many_parameters(driver):
    kernel = KERNELS[0]._replace(parameters=[bytes(4)] * 129)
    with pytest.raises(RuntimeError, match="too many parameters"):
        compiled.launcher([kernel], PLACES, 3)


def test_an_old_driver(driver):
    driver.answers(0, ctypes.c_bool(True))
    with pytest.raises(RuntimeError, match="it lacks a function that is needed"):
        compiled.launcher(KERNELS, PLACES, 3)


def test_a_launch_that_fails(driver):
    launch = compiled.launcher(KERNELS, PLACES, 3)
    driver.answers(701, ctypes.c_bool(False))
    with pytest.raises(
        RuntimeError, match="launching Triton's first failed: too much; grid 5, 128 threads, 4096 bytes"
    ):
        launch(16, 32, 64)
    assert not heard(driver)
    driver.answers(0, ctypes.c_bool(False))
    launch(16, 32, 64)
    assert heard(driver) == launches(16, 32, 64)
