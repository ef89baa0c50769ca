"""The split-D test kernel is right, under every schedule, and each bug put into it is found by the named detector."""

import pytest
from attention_reference import SplitD

TOLERANCE = {"f16": 2e-3, "bf16": 1.2e-2}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("nq", "nk"), [(64, 64), (64, 128), (200, 200), (17, 3)])
def test_f16(emulator, nq, nk, seed):
    run = SplitD(emulator, "split_d/f16_64").run(nq, nk, heads=2, seed=seed, os_threads=2)
    assert not run.errors, run.status
    assert run.error < TOLERANCE["f16"]
    tiles = 2 * -(-nq // 64) * -(-nk // 64)
    assert run.counters["mma"] == tiles * 4 * (2 * 64 * 64 * 64) // (16 * 8 * 16) // 4


def test_bf16(emulator):
    run = SplitD(emulator, "split_d/bf16_64", "bf16").run(200, 200, seed=3, os_threads=2)
    assert not run.errors, run.status
    assert run.error < TOLERANCE["bf16"]


@pytest.mark.parametrize("accumulation", ["plain", "ampere", "hopper"])
def test_large_head_dim(emulator, accumulation):
    run = SplitD(emulator, "split_d/f16_320", head_dim=320).run(64, 100, accumulation=accumulation)
    assert not run.errors, run.status
    assert run.error < TOLERANCE["f16"]


# The position in this list is the value of `Bug` in split_d_kernel.cuh. "wrong result" is what the comparison with the
# reference sees: these bugs break no rule of the machine, and NaN poison makes sure that they show.
BUGS = [
    ("none", set()),
    ("no sync after wait", {"race"}),
    ("no sync before refill", {"race"}),
    ("no wait", {"race"}),
    ("wait too short", {"race"}),
    ("reader swizzle differs", {"wrong result"}),
    ("no swizzle", {"bank conflicts"}),
    ("no row guard", {"gmem-oob"}),
    ("shared memory overrun", {"smem-oob"}),
    ("wrong shuffle", {"wrong result"}),
    ("barrier in one lane", {"divergence"}),
    ("mma skipped by one lane", {"divergence"}),
    ("misaligned source", {"misaligned"}),
    ("no column mask", {"wrong result"}),
    ("uninitialised scores", {"wrong result"}),
    ("stages overlap", {"race"}),
    ("no syncwarp before store", {"race"}),
    ("no syncwarp after store", {"race"}),
    ("store to input", {"gmem-readonly"}),
    ("no row guard on store", {"gmem-oob"}),
]


def found(run):
    kinds = set(run.kinds)
    if not kinds and not run.error < TOLERANCE["f16"]:
        kinds.add("wrong result")
    if any(entry["wavefronts"] > entry["ideal_wavefronts"] for entry in run.conflicts_of("ldmatrix")):
        kinds.add("bank conflicts")
    return kinds


@pytest.mark.parametrize("bug", range(len(BUGS)), ids=[name for name, _ in BUGS])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_bug_is_found(emulator, bug, seed):
    run = SplitD(emulator, "split_d/f16_64").run(200, 200, bug=bug, seed=seed)
    expected = BUGS[bug][1]
    assert expected <= found(run), run.status
    if "race" not in expected:  # a race may have any consequence
        assert found(run) == expected, run.status
    for error in run.errors:  # includes the tile functions' errors, which name their caller's line
        assert error["file"].endswith("split_d_kernel.cuh") and error["line"] > 0


# Without the race check, deferral and poison alone have to show these as wrong numbers, under some seed.
NUMERICALLY_VISIBLE = ["no wait", "wait too short", "stages overlap"]


@pytest.mark.parametrize("name", NUMERICALLY_VISIBLE)
def test_poison_makes_missing_waits_visible(emulator, name):
    bug = [entry[0] for entry in BUGS].index(name)
    errors = [
        SplitD(emulator, "split_d/f16_64").run(64, 130, bug=bug, seed=s, check_races=False).error for s in range(6)
    ]
    assert any(not error < TOLERANCE["f16"] for error in errors)
