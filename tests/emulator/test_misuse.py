"""Each misuse is reported, under the right name, with its source line, and never takes the process down."""

import re
from pathlib import Path

import numpy as np
import pytest

SOURCE = Path(__file__).with_name("misuse_kernels.cuh")

MISUSE = {
    "deadlock": "deadlock",
    "barrier_count": "barrier or deadlock",
    "barrier_not_a_warp_multiple": "barrier",
    "exit_before_collective": "deadlock",
    "divergent_shuffle": "divergence",
    "copy_never_awaited": "exit",
    "copy_never_committed": "race",
    "tracked_copy_not_awaited": "race",
    "store_before_tracked_copy": "race",
    "wait_for_overwritten_copy": "race",
    "misaligned_shared": "misaligned",
    "misaligned_ldmatrix": "misaligned",
    "misaligned_global": "misaligned",
    "shared_past_end": "smem-oob",
    "shared_without_base": "smem-oob",
    "global_past_end": "gmem-oob",
    "global_before_start": "gmem-oob",
    "store_to_read_only": "gmem-readonly",
    "plain_pointer": "segfault",
    "endless_loop": "hang",
    "no_syncwarp": "race",
    "no_syncthreads": "race",
    "write_write": "race",
    "blocks_write_the_same": "race",
    "block_reads_what_another_wrote": "race",
}


def lines_of(kernel):
    """Returns the line numbers of the body of a kernel in misuse_kernels.cuh."""
    lines = SOURCE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if re.search(rf"\b{kernel}_kernel\(", line))
    end = next(
        i
        for i in range(start, len(lines))
        if re.search(r"^}|\}$", lines[i]) and lines[i].count("}") >= 1 and not lines[i].startswith("  ")
    )
    return range(start + 1, end + 2)


@pytest.mark.parametrize("seed", [0, 1, 2, 7])
@pytest.mark.parametrize("name", sorted(MISUSE))
def test_misuse_is_reported(emulator, name, seed):
    data = np.zeros(1024, np.uint32)
    max_steps = 100_000 if name == "endless_loop" else 1 << 31
    run = emulator.run(f"misuse/{name}", [data], [np.zeros(1024, np.uint32)], seed=seed, max_steps=max_steps)
    assert len(run.kinds) == 1 and run.kinds <= set(MISUSE[name].split(" or ")), run.status
    if MISUSE[name] != "segfault":
        assert run.errors[0]["file"].endswith("misuse_kernels.cuh")
        assert run.errors[0]["line"] in lines_of(name)


MISUSE_SM90 = {
    "no_proxy_fence": "race",
    "mbarrier_without_init": "mbarrier",
    "mbarrier_too_many_arrivals": "mbarrier",
    "mbarrier_never_completes": "deadlock",
    "misaligned_mbarrier": "misaligned",
    "cluster_wait_without_arrive": "cluster",
    "remote_rank": "cluster",
    "products_in_flight_at_exit": "exit",
    "descriptor_past_end": "smem-oob",
    "tma_in_flight_at_exit": "exit",
    "store_under_tma": "race",
    "copy_without_proxy_fence": "race",
    "copy_read_early": "race",
    "copy_over_unread": "race",
    "copy_of_overwritten": "race",
    "copy_to_a_block_that_left": "cluster",
}


@pytest.mark.parametrize("seed", [0, 1, 4])
@pytest.mark.parametrize("name", sorted(MISUSE_SM90))
def test_sm90_misuse_is_reported(emulator, name, seed):
    data = [np.zeros(1024, np.uint32)], [np.zeros(1024, np.uint32)]
    run = emulator.run(f"misuse_sm90/{name}", *data, arch=90, seed=seed)
    if name == "tma_in_flight_at_exit" and seed >= 2 and not run.errors:
        return  # the copy may have landed in time
    assert run.kinds == {MISUSE_SM90[name]}, run.status


@pytest.mark.parametrize(
    "name, message",
    [
        ("copy_without_proxy_fence", "fence.proxy.async missing"),
        ("copy_read_early", "read of bytes that an asynchronous copy still writes|read after write"),
        ("copy_over_unread", "after read|after write|copy still writes"),
        ("copy_of_overwritten", "a copy to another block may still read"),
        ("copy_to_a_block_that_left", "which has exited|that has exited"),
    ],
)
def test_what_is_said_of_a_copy_to_another_block(emulator, name, message):
    data = [np.zeros(1024, np.uint32)], [np.zeros(1024, np.uint32)]
    for seed in range(12):
        run = emulator.run(f"misuse_sm90/{name}", *data, arch=90, seed=seed)
        assert any(re.search(message, error["message"]) for error in run.errors), (seed, run.status)


def test_a_copy_that_lands_where_nobody_is(emulator):
    data = [np.zeros(1024, np.uint32)], [np.zeros(1024, np.uint32)]
    run = emulator.run("misuse_sm90/copy_to_a_block_that_left", *data, arch=90, seed=1)  # block 0's copy lands first
    assert "a copy lands in a block that has exited" in run.errors[0]["message"], run.status


MISUSE_BULK_STORES = {
    "never_awaited": ("exit", "no wait for its group"),
    "before_the_tensor": ("tma", "negative coordinate"),
    "to_an_odd_column": ("tma", "not a multiple of 16 bytes"),
    "never_committed": ("exit", "in no group"),
    "awaited_by_another": ("exit", "no wait for its group"),
    "no_proxy_fence": ("race", "fence.proxy.async missing"),
    "wrong_fence": ("race", "fence.proxy.async missing"),
    "no_barrier_before": ("race", "no __syncwarp between"),
    "source_overwritten": ("race", "bulk_wait_group_read missing"),
    "source_overwritten_by_lane": ("race", "write after read by another lane|bulk_wait_group_read missing"),
    "source_overwritten_by_warp": ("race", "write after read|bulk_wait_group_read missing"),
    "younger_source_overwritten": ("race", "bulk_wait_group_read missing"),
    "source_overwritten_by_load": ("race", "bulk_wait_group_read missing"),
    "load_before_complete": ("race", "TMA load: .*not complete"),
    "ordinary_load_before_complete": ("race", "ld.global: .*not complete"),
    "ordinary_store_before_complete": ("race", "st.global: .*not complete"),
    "two_stores_to_one_row": ("race", "TMA store: .*not complete"),
    "no_fence": ("race", "fence_proxy_async_global missing"),
    "fence_before_wait": ("race", "fence_proxy_async_global missing"),
    "late_fence": ("race", "fence_proxy_async_global missing"),
    "shared_fence": ("race", "fence_proxy_async_global missing"),
    "no_barrier": ("race", "no barrier after its bulk_wait_group|not complete"),
    "no_syncwarp": ("race", "no __syncwarp after its bulk_wait_group"),
    "misaligned_source": ("misaligned", "not a multiple of 128"),
    "source_past_end": ("smem-oob", "TMA store"),
    "wrong_rank": ("tma", "4 coordinates for a tensor map of rank 2"),
    "to_read_only": ("gmem-readonly", "TMA store"),
    "past_end": ("gmem-oob", "TMA store: .*past a range"),
    "told_without_fence": ("race", "TMA load: .*another block wrote: .*fence_proxy_async_global missing"),
    "told_before_complete": (
        "race",
        "TMA load: .*another block wrote: .*not complete|TMA load: .*another block wrote: .*no release",
    ),
    "told_before_it_is_loaded": ("race", "TMA (store|load): .*another block (read|wrote): .*TMA (load|store)"),
    "added_over_the_source": ("race", "bulk_wait_group_read missing"),
    "added_twice": ("race", "cp.reduce.async.bulk: .*not complete"),
    "added_in_any_order": ("race", "cp.reduce.async.bulk: .*another block wrote: .*cp.reduce.async.bulk"),
    "added_without_fence": ("race", "cp.reduce.async.bulk: .*another block wrote: .*fence_proxy_async_global missing"),
    "added_odd_bytes": ("misaligned", "100 bytes"),
    "blocks_store_the_same": ("race", "TMA store: .*which another block wrote"),
    "block_loads_what_another_stored": (
        "race",
        "TMA load: .*which another block wrote|TMA store: .*which another block read",
    ),
}


def run_bulk_store(emulator, name, **options):
    output = np.zeros(1024, np.uint32)
    run = emulator.run(f"misuse_bulk/{name}", [np.zeros(1024, np.uint32)], [output], arch=90, **options)
    return output, run


@pytest.mark.parametrize("seed", [0, 1, 4, 9])
@pytest.mark.parametrize("name", sorted(MISUSE_BULK_STORES))
def test_misuse_of_a_bulk_store_is_reported(emulator, name, seed):
    kind, message = MISUSE_BULK_STORES[name]
    _, run = run_bulk_store(emulator, name, seed=seed)
    assert run.kinds == {kind}, run.status
    assert any(re.search(message, error["message"]) for error in run.errors), run.status
    assert run.errors[0]["file"].endswith("misuse_bulk_store_kernels.cuh")


@pytest.mark.parametrize("seed", [0, 1, 4, 9])
@pytest.mark.parametrize("name", ["storer_fences", "loader_fences", "same_lane"])
def test_what_a_bulk_store_wrote_can_be_read_back(emulator, name, seed):
    output, run = run_bulk_store(emulator, name, seed=seed)
    assert not run.errors, run.status
    assert output[0] == output[512] == 0x3C003C00


@pytest.mark.parametrize("seed", range(8))
def test_what_tma_wrote_can_be_read_by_another_block(emulator, seed):
    for name in ("told", "told_to_ordinary_loads"):
        output, run = run_bulk_store(emulator, name, seed=seed)
        assert not run.errors and output[512] == 0x3C003C00, run.status
    output, run = run_bulk_store(emulator, "added", seed=seed)
    assert not run.errors and (output[:32].view(np.float32) == 2 * np.uint32([0x3C003C00]).view(np.float32)).all()


def test_bulk_stores_are_late(emulator):
    """Without the race check, what is missing shows in the data."""
    output, run = run_bulk_store(emulator, "source_overwritten", check_races=False)
    assert not run.errors and (output[:32] == 0x40004000).all()
    for name in ("load_before_complete", "ordinary_load_before_complete"):
        output, run = run_bulk_store(emulator, name, check_races=False)
        assert not run.errors and output[0] == 0x3C003C00 and output[512] == 0xFFFFFFFF


UNORDERED = ("race", "another block (wrote|read): .*no release and acquire between")
MISUSE_FLAGS = {
    "wait_for_each_other": (
        "deadlock",
        r"(?=.*Block \(0, 0, 0\)[^;]*;[^;]*:16 \(\S+ is 0 and never 1)(?=.*Block \(1, 0, 0\)[^;]*;[^;]*:19 \(\S+ is 0 and)",
    ),
    "wait_for_too_much": ("deadlock", r"is 1 and never 2, last changed by block \(0, 0, 0\) in st.release.global"),
    "wait_for_the_block_before": ("deadlock", "[0-9]+ blocks have not begun"),
    "wait_for_blocks_that_have_not_begun": ("deadlock", "[0-9]+ blocks have not begun"),
    "more_blocks_than_a_gpu_holds": ("launch", "sm_90 holds 4224 of them at once"),
    "overwrites_after_reader_0": UNORDERED,
    "overwrites_after_reader_1": UNORDERED,
    "set_before_the_data": UNORDERED,
    "set_without_barrier": UNORDERED,
    "no_barrier_after_wait": UNORDERED,
    "no_wait": UNORDERED,
    "reads_flag_as_data": ("race", "ld.global: .*st.release.global|st.release.global: .*ld.global"),
    "no_fence": UNORDERED,
    "no_fence_before": UNORDERED,
    "reads_after_release": UNORDERED,
    "set_by_ordinary_store": ("race", "wait_global_at_least: .*st.global|st.global: .*wait_global_at_least"),
}


def run_flags(emulator, name, **options):
    return emulator.run(
        f"misuse_flags/{name}", [np.zeros(512, np.uint32)], [np.zeros(1024, np.uint32)], arch=90, **options
    )


@pytest.mark.parametrize("seed", [0, 1, 4, 6, 9])
@pytest.mark.parametrize("name", sorted(MISUSE_FLAGS))
def test_misuse_of_a_flag_is_reported(emulator, name, seed):
    kind, message = MISUSE_FLAGS[name]
    run = run_flags(emulator, name, seed=seed)
    if name == "wait_for_the_block_before" and not run.errors and seed != 1:
        return  # blocks may begin in the order of their numbers
    assert run.kinds == {kind}, run.status
    assert re.search(message, run.status), run.status
    assert kind == "launch" or run.errors[0]["line"] > 0


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("os_threads", [1, 3])
def test_blocks_wait_for_each_other_on_any_os_thread(emulator, seed, os_threads):
    for name in ("none", "overwrites_after_its_reader", "flag_of_each_warp"):
        assert not run_flags(emulator, name, seed=seed, os_threads=os_threads).errors
    run = run_flags(emulator, "wait_for_each_other", seed=seed, os_threads=os_threads)
    assert run.kinds == {"deadlock"}, run.status


def test_proxy_fence_present(emulator):
    output, run = emulator.run_case("misuse_sm90/proxy_fence_present", np.zeros(4, np.uint32), 128, arch=90)
    assert not run.errors
    assert (output.view(np.float32) == 16).all()


@pytest.mark.parametrize(
    "name", ["stmatrix_x4", "tma_load_2d/inside", "tma_store_2d/inside", "wgmma_ss/f16_64", "elect_one"]
)
def test_sm90_instructions_are_refused_on_sm80(emulator, name):
    case = next(case for case in emulator.module.cases() if case["name"] == name)
    words = np.zeros(case["input_words"], np.uint32)
    _, run = emulator.run_case(name, words, case["output_words"], arch=80)
    assert run.kinds == {"unsupported"}


@pytest.mark.parametrize(
    ("name", "instruction"), [("mbarrier_too_many_arrivals", "mbarrier.arrive.expect_tx"), ("remote_rank", "mapa")]
)
def test_what_mbarriers_have_since_sm90_is_refused_on_sm80(emulator, name, instruction):
    _, run = emulator.run_case(f"misuse_sm90/{name}", np.zeros(4, np.uint32), 4, arch=80)
    assert run.kinds == {"unsupported"} and f"{instruction} needs sm_90" in run.status


def test_clusters_are_refused_on_sm80(emulator):
    _, run = emulator.run_case("tma_load_4d_multicast", np.zeros(512, np.uint32), 1024, arch=80)
    assert run.kinds == {"launch"}


def test_the_emulator_works_after_a_segfault(emulator):
    for _ in range(3):
        run = emulator.run("misuse/plain_pointer", [np.zeros(4, np.uint32)], [np.zeros(4, np.uint32)])
        assert run.kinds == {"segfault"}
    assert not emulator.run("banks/store_4", integers=[1]).errors


def test_fresh_shared_memory_is_nan(emulator):
    output, run = emulator.run_case("misuse/read_uninitialised", np.zeros(4, np.uint32), 32)
    assert not run.errors
    assert np.isnan(output.view(np.float32)).all()
