"""These tests cover bank conflicts, counters, schedules, and what a launch refuses."""

import numpy as np
import pytest


@pytest.mark.parametrize(("stride", "ways"), [(0, 1), (1, 1), (2, 2), (3, 1), (4, 4), (8, 8), (32, 32)])
def test_bank_conflicts_of_4_byte_stores(emulator, stride, ways):
    (entry,) = emulator.run("banks/store_4", integers=[stride], check_races=False).conflicts_of("st.shared")
    assert (entry["wavefronts"], entry["ideal_wavefronts"], entry["worst_way"]) == (ways, 1, ways)


@pytest.mark.parametrize(("stride", "wavefronts"), [(4, 4), (8, 8), (20, 4), (32, 32)])
def test_bank_conflicts_of_16_byte_stores(emulator, stride, wavefronts):
    (entry,) = emulator.run("banks/store_16", integers=[stride], check_races=False).conflicts_of("st.shared")
    assert (entry["wavefronts"], entry["ideal_wavefronts"]) == (wavefronts, 4)


@pytest.mark.parametrize(("stride", "wavefronts"), [(4, 4), (12, 4), (8, 8), (16, 16), (32, 32), (36, 4)])
def test_bank_conflicts_of_ldmatrix(emulator, stride, wavefronts):
    (entry,) = emulator.run("banks/ldmatrix_x4", integers=[stride]).conflicts_of("ldmatrix")
    assert (entry["wavefronts"], entry["ideal_wavefronts"]) == (wavefronts, 4)
    assert entry["file"].endswith("misuse_kernels.cuh") and entry["line"] > 0


def test_counters(emulator):
    words = np.arange(2048, dtype=np.uint32)
    _, run = emulator.run_case("cp_async_wait_group", words, 2048)
    assert run.counters["bytes_global_to_shared"] == 4 * 32 * 16
    assert run.counters["bytes_global_stored"] == 4 * 32 * 16
    _, run = emulator.run_case("cp_async_16_or_zero", words, 128)
    assert run.counters["bytes_global_to_shared"] == 16 * 16
    _, run = emulator.run_case("sync_block", words, 128)
    assert run.counters["barriers"] == 1 and run.counters["blocks"] == 1


def test_reports_do_not_leak_into_the_next_run(emulator):
    failed = emulator.run("misuse/deadlock", [np.zeros(4, np.uint32)], [np.zeros(4, np.uint32)])
    assert failed.errors
    assert not emulator.run("banks/store_4", integers=[1]).errors


@pytest.mark.parametrize(
    ("integers", "options", "sentence"),
    [
        ([1, 1, 40], {}, "multiple of 32"),
        ([1, 1, 2048], {}, "up to 1024"),
        ([1, 1, 32, 164 << 10], {"arch": 80}, "sm_80 has 166912"),
        ([1, 1, 32, 100 << 10], {"arch": 89}, "sm_89 has 101376"),
        ([1, 0], {}, "grid of 0"),
    ],
)
def test_impossible_launches(emulator, integers, options, sentence):
    run = emulator.run("banks/store_4", integers=integers, **options)
    assert run.kinds == {"launch"}
    assert sentence in run.status


def test_shared_memory_of_the_architecture(emulator):
    assert not emulator.run("banks/store_4", integers=[1, 1, 32, 200 << 10], arch=90).errors


def test_many_blocks_on_two_os_threads(emulator):
    run = emulator.run("banks/store_4", integers=[1, 100], os_threads=2)
    assert not run.errors and run.counters["blocks"] == 100
    (entry,) = run.conflicts_of("st.shared")
    assert entry["executions"] == 100
