"""These mutants change what clears the rows of packed results that belong to no sequence."""

from .kinds import Mutant, edits_in

_TESTS = "tests/backends/test_clear_rows.py -k 'not cuda'"

MUTANTS: list[Mutant] = [
    *edits_in(
        "csrc/attention/forward/clear_rows.cuh",
        _TESTS,
        ("clear: the rows before the first sequence stay", "const RowRange gap = {max_of(before.end,", "const RowRange gap = {max_of(sequence == 0 ? next : before.end,"),
        ("clear: the rows behind the last sequence stay", "const bool exists = sequence <= params.batch;", "const bool exists = sequence < params.batch;"),
        ("clear: the first sequences alone", "first <= params.batch; first += 32", "first <= min_of(params.batch, 31); first += 32"),
        ("clear: one gap of 32", "gaps -= 1u << owner;", "gaps = 0;"),
        ("clear: nobody sees that offsets fall", "if (!ptx::vote_any(falls)) return;", "return;"),
        ("clear: falls among the first sequences alone", "falls = falls || next < before.begin;", "falls = next < before.begin;"),
        ("clear: all that may be is cleared", "if (!ptx::vote_any(falls)) return;", ""),
        ("clear: an LSE of 0", "float_bits(-kInfinity)", "0"),
        ("clear: one head", "head < params.heads_q", "head < 1"),
        ENABLE_FFPA_DEBUG="1",
    ),
    *edits_in(
        "launching/attention_call.py",
        "tests/backends/test_mma_packed.py tests/backends/test_fused.py -k 'packed and not cuda'",
        ("packed calls: rows of no sequence stay", "specs = (*specs, ForwardClearRows())", "pass"),
        ENABLE_FFPA_DEBUG="1",
    ),
    *edits_in(
        "backends/dequantised.py",
        "tests/operators/test_eight_bit_caches.py -k 'for_wgmma and not cuda'",
        ("dequantised: each call clears what others wrote", "left, clears=False\n", "left\n"),
        ("dequantised: rows of no sequence stay", "            clear(q, k, v, out, lse, None, offsets)\n", ""),
        ENABLE_FFPA_DEBUG="1",
    ),
]  # fmt: skip
