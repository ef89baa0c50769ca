"""A ring of cp.async stages on mbarriers is right on sm_80 and later, and what misuses it is found."""

import numpy as np
import pytest
import scalar

STEPS = 9  # every ring of up to 4 slots comes round twice


class Ring:
    """One run: what was found, and whether the result is right."""

    def __init__(self, emulator, threads=64, slots=2, bug="none", **options):
        words = np.random.default_rng(slots).integers(0, 2**32, (1 + STEPS) * threads * 4, dtype=np.uint32)
        output = np.full(STEPS * threads * 4, 0xCDCDCDCD, np.uint32)
        run = emulator.run(f"copy_ring/{threads}", [words], [output], [STEPS, slots, list(BUGS).index(bug)], **options)
        self.kinds, self.errors, self.status = run.kinds, run.errors, run.status
        self.right = np.array_equal(output, scalar.copy_ring(words, threads, slots))


# The bugs are in the order of `RingBug` in copy_ring_kernel.cuh, with the kinds of errors that must be found. Of
# several kinds any one will do, as the schedule says which comes first. What follows a race may be found as well.
BUGS = {
    "none": set(),
    "no full wait": {"race"},
    "full wait in first round only": {"race"},
    "no empty wait": {"race"},
    "wrong full parity": {"race", "deadlock"},
    "wrong empty parity": {"deadlock"},
    "waits for another slot": {"race"},
    "arrives before its copy": {"race"},
    "ordinary arrival": {"race"},
    "one lane arrives for its warp": {"race"},
    "one thread never arrives": {"deadlock"},
    "one warp never releases": {"deadlock"},
    "one thread arrives twice": {"mbarrier"},
    "no sync after init": {"race", "mbarrier"},
    "one step too many": {"exit"},
}
RIGHT_WITH_ONE_SLOT = {"waits for another slot", "no sync after init", "one step too many"}


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("threads", [64, 256])
def test_ring(emulator, threads, slots, arch):
    for seed in range(8):
        ring = Ring(emulator, threads, slots, arch=arch, seed=seed)
        assert not ring.kinds and ring.right, ring.status


@pytest.mark.parametrize(
    ("bug", "slots"),
    [(bug, n) for bug in BUGS for n in range(1, 5) if bug != "none" and (n > 1 or bug not in RIGHT_WITH_ONE_SLOT)],
)
def test_bug_is_found(emulator, bug, slots):
    for seed in range(8):
        ring = Ring(emulator, 64, slots, bug, seed=seed)
        if bug == "one step too many" and seed >= 2 and not ring.errors:
            continue  # the last copy may have landed in time
        assert ring.kinds & BUGS[bug], (seed, ring.status)
        if "race" not in ring.kinds:  # a race may have any consequence
            assert ring.kinds <= BUGS[bug], (seed, ring.status)
        assert ring.errors[0]["file"].endswith("copy_ring_kernel.cuh") and ring.errors[0]["line"] > 0


@pytest.mark.parametrize("bug", ["no full wait", "ordinary arrival", "arrives before its copy", "no empty wait"])
def test_poison_makes_missing_waits_visible(emulator, bug):
    assert any(not Ring(emulator, 256, 2, bug, seed=seed, check_races=False).right for seed in range(6))
