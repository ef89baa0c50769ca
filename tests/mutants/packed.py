"""These mutants change what clears the rows of packed results that belong to no sequence."""

from .kinds import Mutant, edits_in

_TESTS = "tests/backends/test_clear_rows.py -k 'not cuda'"

MUTANTS: list[Mutant] = [
    *edits_in(
        "csrc/attention/forward/clear_rows.cuh",
        _TESTS,
        ("clear: the rows before the first sequence stay", "  RowRange before = {0, 0};\n", "  RowRange before = {0, sequence == 0 ? params.packed_q.total : 0};\n"),
        ("clear: the rows behind the last sequence stay", "gaps = params.batch + 1;", "gaps = params.batch;"),
        ("clear: the first sequences alone", "first < gaps; first += 32", "first < min_of(gaps, 32); first += 32"),
        ("clear: the first look alone", "i < gaps; i += Config::kThreads", "i < min_of(gaps, 32); i += Config::kThreads"),
        ("clear: one gap of 32", "left -= 1u << owner;", "left = 0;"),
        ("clear: what one warp has found", "other < Config::kWarps; ++other", "other < 0; ++other"),
        ("clear: nobody sees that offsets fall", "if ((found & kFalls) == 0) return;", "return;"),
        ("clear: gaps of offsets that fall", "if (found == kHasRows) {", "if (found & kHasRows) {"),
        ("clear: all rows where offsets fall", "if (!has_tile(params, row))", ""),
        ("clear: rows of sequences have tiles", ".sequence == sequence) return true;", ".sequence >= 0) return true;"),
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
        ("dequantised: each call clears what others wrote", "left, clears=False", "left"),
        ("dequantised: rows of no sequence stay", "            out.zero_()\n", ""),
        ENABLE_FFPA_DEBUG="1",
    ),
]  # fmt: skip
