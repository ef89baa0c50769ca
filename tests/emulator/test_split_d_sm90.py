"""The sm_90a split-D test kernel is right under every schedule, and each bug put into it is found."""

import pytest
from attention_reference import SplitD

TOLERANCE = 2e-3


def run(emulator, kernel, head_dim, nq, nk, heads=1, **options):
    return SplitD(emulator, f"split_d_sm90/{kernel}", head_dim=head_dim).run(nq, nk, heads, arch=90, **options)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("kernel", "head_dim", "nq", "nk", "heads"),
    [
        ("64_2_1", 64, 64, 64, 1),
        ("64_2_1", 64, 200, 200, 2),
        ("128_3_1", 128, 70, 200, 1),
        ("128_2_2", 128, 256, 200, 1),
        ("128_3_4", 128, 300, 100, 1),
    ],
)
def test_right(emulator, kernel, head_dim, nq, nk, heads, seed):
    result = run(emulator, kernel, head_dim, nq, nk, heads, seed=seed, os_threads=2)
    assert not result.errors, result.status
    assert result.error < TOLERANCE


def test_large_head_dim_with_hopper_accumulation(emulator):
    result = run(emulator, "512_2_1", 512, 64, 80, accumulation="hopper")
    assert not result.errors, result.status
    assert result.error < TOLERANCE


# The position in this list is the value of `Sm90Bug` in split_d_sm90_kernel.cuh.
BUGS = [
    ("none", set()),
    ("no product wait", {"race", "wrong result", "wgmma", "exit"}),
    ("no full wait", {"race", "deadlock"}),
    ("no empty wait", {"race", "mbarrier", "deadlock"}),
    ("released before wait", {"race"}),
    ("expect too few bytes", {"race", "mbarrier", "deadlock", "exit"}),
    ("expect too many bytes", {"deadlock"}),
    ("no product fence", {"wgmma"}),
    ("wrong descriptor stride", {"wrong result"}),
    ("misaligned descriptor", {"wgmma"}),
    ("no sync after barrier init", {"mbarrier", "race"}),
    ("wrong empty parity", {"deadlock", "race"}),
    ("wrong operand major", {"wrong result", "race", "smem-oob"}),
    ("one warp releases", {"deadlock"}),
    ("only local release", {"deadlock"}),
    ("product skipped by one warp", {"wgmma"}),
    ("accumulators touched in flight", {"wgmma"}),
    ("misaligned destination", {"misaligned"}),
]


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("bug", range(len(BUGS)), ids=[name for name, _ in BUGS])
def test_bug_is_found(emulator, bug, seed):
    result = run(emulator, f"bug_{bug}", 128, 200, 200, seed=seed)
    kinds = set(result.kinds)
    if not kinds and not result.error < TOLERANCE:
        kinds.add("wrong result")
    expected = BUGS[bug][1]
    assert bool(kinds) == bool(expected), result.status
    assert kinds <= expected, result.status
