"""compare_results.py notices what it is there to notice."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compare_results import HEADER

HERE = Path(__file__).resolve().parent
LIST = "exact 80 2\napproximate 80 1\nhopper_only 90 1\n"


def write(path, cases):
    with open(path, "wb") as file:
        for name, (bound, words) in cases.items():
            file.write(HEADER.pack(name.encode(), bound, len(words)))
            file.write(np.asarray(words, np.uint32).tobytes())


def cases():
    return {"exact/a": (0, [1, 2, 3]), "exact/b": (0, [4]), "approximate": (2, [0x3F800000, 0xBF800000])}


def compare(tmp_path, gpu, emulated, arch=80):
    write(tmp_path / "gpu.bin", gpu)
    write(tmp_path / "emu.bin", emulated)
    (tmp_path / "list.txt").write_text(LIST)
    command = [
        sys.executable,
        str(HERE / "compare_results.py"),
        "gpu.bin",
        "emu.bin",
        "--list",
        "list.txt",
        "--arch",
        str(arch),
    ]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)


def test_equal(tmp_path):
    result = compare(tmp_path, cases(), cases())
    assert result.returncode == 0, result.stdout
    assert "compared 2 listed functions, 3 configurations, 6 values" in result.stdout


def test_within_the_bound(tmp_path):
    emulated = cases() | {"approximate": (2, [0x3F800002, 0xBF7FFFFF])}
    assert compare(tmp_path, cases(), emulated).returncode == 0


@pytest.mark.parametrize(
    ("name", "words"), [("exact/a", [1, 2, 4]), ("exact/b", [4, 4]), ("approximate", [0x3F800003, 0xBF800000])]
)
def test_difference(tmp_path, name, words):
    emulated = cases() | {name: (cases()[name][0], words)}
    result = compare(tmp_path, cases(), emulated)
    assert result.returncode == 1 and f"WRONG {name}" in result.stdout


def test_missing_on_one_side(tmp_path):
    emulated = cases()
    del emulated["exact/b"]
    assert compare(tmp_path, cases(), emulated).returncode == 1


def test_fewer_than_the_list_says(tmp_path):
    fewer = {name: case for name, case in cases().items() if name != "exact/b"}
    result = compare(tmp_path, fewer, fewer)
    assert result.returncode == 1 and "exact: 1 configurations compared, the list asks for 2" in result.stdout
    assert compare(tmp_path, cases(), cases(), arch=90).returncode == 1
