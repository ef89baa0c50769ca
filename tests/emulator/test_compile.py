"""What the emulator runs is what nvcc compiles, and the build of the emulator itself holds what it promises."""

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"

# These sources take part in a device compilation; the launches by name come along.
SM80_SOURCES = ["split_d_kernels.cu", "misuse_kernels.cu", "misuse_flag_kernels.cu", "case_table_sm80.cu"]
SM90_SOURCES = ["split_d_sm90_kernels.cu", "misuse_sm90_kernels.cu", "misuse_bulk_store_kernels.cu", "case_table.cu"]


@pytest.mark.parametrize(
    ("source", "arch"),
    [(source, "80") for source in SM80_SOURCES] + [(source, "90a") for source in SM90_SOURCES],
)
def test_nvcc_compiles_the_same_sources(nvcc, tmp_path, source, arch):
    path = HERE / source
    if source == "case_table_sm80.cu":  # the cases without those that sm_80 has no instructions for
        path = tmp_path / source
        headers = ["arithmetic", "flags", "matrix", "mbarrier", "memory", "special_registers", "tile", "warp"]
        path.write_text(
            "".join(f'#include "cases/{header}.cuh"\n' for header in headers)
            + "const std::vector<ffpa::cases::Case> table = ffpa::cases::sm80_cases();\n"
        )
    command = [
        str(nvcc),
        "-std=c++17",
        "-O3",
        "-Xcompiler",
        "-Wall,-Wextra",
        "-gencode",
        f"arch=compute_{arch},code=sm_{arch}",
    ]
    command += [f"-I{CSRC}", f"-I{HERE}", "-c", str(path), "-o", str(tmp_path / "out.o")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr, result.stderr


def build_standalone(tmp_path, flags):
    """Builds standalone_main.cpp and the emulator in one translation unit, and returns the program."""
    program = tmp_path / "standalone"
    unity = tmp_path / "unity.cpp"
    parts = [HERE / "standalone_main.cpp", *sorted((CSRC / "ptx/emulated/machine").glob("*.cpp"))]
    unity.write_text("".join(f'#include "{part}"\n' for part in parts))
    command = ["g++", "-std=c++17", "-O1", "-g1", "-pthread", "-ffp-contract=off", *flags, f"-I{CSRC}", f"-I{HERE}"]
    subprocess.run([*command, str(unity), "-o", str(program)], check=True)
    return program


def run_standalone(program, *arguments):
    # A lane that is given up never returns, and what its frames own is lost: leaks are no finding.
    command = ["env", "ASAN_OPTIONS=detect_leaks=0", str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_ucontext_fallback(tmp_path):
    """Other machines than x86-64 switch contexts through libc."""
    result = run_standalone(build_standalone(tmp_path, ["-DFFPA_EMU_UCONTEXT"]))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all right" in result.stdout


def test_address_sanitizer_sees_register_array_overruns(tmp_path):
    """Arrays that are registers on a GPU are outside the emulator's sight; AddressSanitizer understands its stacks."""
    program = build_standalone(tmp_path, ["-fsanitize=address"])
    result = run_standalone(program)
    assert result.returncode == 0, result.stdout + result.stderr
    result = run_standalone(program, "overrun")
    assert result.returncode != 0
    assert "stack-buffer-overflow" in result.stderr
