"""Defines what a mutant is, and which tests should notice the mutants of each kind."""

from __future__ import annotations

from typing import NamedTuple

PACKAGE = "ffpa/ffpa_attn/"
KERNEL_TESTS = "tests/backends/test_mma.py -k 'emulated and not padded'"


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str
    flags: dict[str, str]  # environment variables of the tests


def edits_in(file: str, tests: str, *edits: tuple[str, str, str], **flags: str) -> list[Mutant]:
    path = file if file.startswith(("csrc/", "bench/")) else PACKAGE + file
    return [Mutant(name, path, old, new, tests, flags) for name, old, new in edits]


def kernel(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    """Returns mutants of a file in csrc/, for the emulated tests that need no kernel but those of a debug build."""
    return edits_in("csrc/" + file, KERNEL_TESTS, *edits, ENABLE_FFPA_DEBUG="1")


def fused(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    """Returns mutants for the tests of a fused kernel's narrowest instance, which is what most of its tests run."""
    return edits_in(
        file, "tests/backends/test_fused.py -k 'd64 and not cuda and not large'", *edits, ENABLE_FFPA_DEBUG="1"
    )


def large_scores(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    tests = "tests/backends/test_large_scores.py -k '(fused or parts or bits) and not triton and not reference'"
    return edits_in(file, tests, *edits, ENABLE_FFPA_DEBUG="1")


def any_rounding(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    return edits_in(
        file, "tests/backends/test_large_scores.py -k 'at_any_rounding and not triton and not reference'", *edits
    )


def gradients(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    return edits_in(
        file, "tests/backends/test_large_scores.py -k 'gradients and (mma or hopper) and not fused'", *edits
    )


def score_rules(file: str, *edits: tuple[str, str, str], only: str = "") -> list[Mutant]:
    """Returns mutants of the faster ways for masks and softcaps."""
    return edits_in(file, f"tests/backends/test_score_rules.py -k 'not cuda{only}'", *edits)


def pair(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    tests = "tests/backends/test_fused.py -k '(d384 or one_block) and not d384v and not cuda and not large'"
    return edits_in(file, tests, *edits, ENABLE_FFPA_DEBUG="1")


def latent(file: str, *edits: tuple[str, str, str], only: str = "d576 or every_kernel and 576 or move") -> list[Mutant]:
    tests = f"tests/backends/test_latent.py -k '({only}) and not cuda'"
    return edits_in(file, tests, *edits, ENABLE_FFPA_DEBUG="1")


def two_phase(file: str, *edits: tuple[str, str, str], only: str = "not cuda") -> list[Mutant]:
    return edits_in(file, f"tests/backends/test_two_phase.py -k '{only}'", *edits, ENABLE_FFPA_DEBUG="1")


def two_phase_parts(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    return edits_in(file, "tests/backends/test_two_phase_parts.py -k 'not cuda'", *edits, ENABLE_FFPA_DEBUG="1")


def fp8(file: str, *edits: tuple[str, str, str], only: str = "wide and (d512 or d264) and not cuda") -> list[Mutant]:
    return edits_in(file, f"tests/backends/test_fp8.py -k '{only}'", *edits, ENABLE_FFPA_DEBUG="1")


SOME_BACKWARDS = "hopper and not cuda and (d320 or n130x50 or caps or schedules or sequences or pass_on or fp32 or repeat or last_row)"


PACKED_CHUNKS = "not cuda and hopper and packed_in_chunks"


BOXES = "not cuda and hopper and boxes"


RESULTS_OF_PRODUCTS = "hopper and not cuda and (n33x70-d448 or packed and d512 or caps or fp32 or boxes)"


def shared_tiles(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    tests = "tests/backends/test_shared_tiles.py -k '(d64 or lse or lanes or fall) and not cuda'"
    return edits_in(file, tests, *edits, ENABLE_FFPA_DEBUG="1")


def row_tiles(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    return edits_in(file, "tests/backends/test_row_tiles.py -k 'not cuda'", *edits, ENABLE_FFPA_DEBUG="1")


def backward(file: str, *edits: tuple[str, str, str], only: str = SOME_BACKWARDS) -> list[Mutant]:
    return edits_in(file, f"tests/backends/test_backward.py -k '{only}'", *edits, ENABLE_FFPA_DEBUG="1")


def short_backward(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    tests = "tests/backends/test_backward_short.py tests/backends/test_backward.py -k 'short and not cuda'"
    return edits_in(file, tests, *edits, ENABLE_FFPA_DEBUG="1")


def short_forward(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    return edits_in(file, "tests/backends/test_forward_short.py -k 'not cuda'", *edits, ENABLE_FFPA_DEBUG="1")


def mask_gradient(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    tests = "tests/backends/test_backward.py -k 'not cuda and not hopper and (mask_gradients or masks_shared or mask_of or pairs_of or additive)'"
    return edits_in(file, tests, *edits, ENABLE_FFPA_DEBUG="1")


def emulator(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    tests = "tests/emulator -k 'ring or misuse or mbarrier or global or gpu or bulk'"
    return edits_in("csrc/ptx/emulated/machine/" + file, tests, *edits)
