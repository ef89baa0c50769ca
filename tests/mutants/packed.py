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
        ("clear: sums of the first part alone", "params.all_rows() * params.splits : 0", "params.all_rows() : 0"),
        ("clear: an LSE of 0", "float_bits(-kInfinity)", "0"),
        ("clear: one head", "head < params.heads_q", "head < 1"),
        ("clear: results that are not there", "params.out.data != nullptr && ", ""),
        ENABLE_FFPA_DEBUG="1",
    ),
    *edits_in(
        "launching/attention_call.py",
        "tests/backends/test_shared_tiles.py -k 'fall and not cuda'",
        ("parts: sums of rows without a tile are what memory held", "self.clear(out, lse, cu_q, partial)", "self.clear(out, lse, cu_q, None)"),
        ENABLE_FFPA_DEBUG="1",
    ),
    *edits_in(
        "backends/dequantised.py",
        "tests/backends/test_dequantised.py -k 'not cuda'",
        ("dequantised: each call clears what others wrote", ", where, clears_rows=False)", ", where)"),
        ("dequantised: rows of no sequence stay", "            clear(out, lse if lse.numel() else None, offsets[0], None)\n", ""),
        ENABLE_FFPA_DEBUG="1",
    ),
    *edits_in(
        "backends/row_tiles.py",
        "tests/backends/test_fused.py -k 'packed and d64 and not cuda'",
        ("row tiles: rows of no sequence left", "offsets, rule, **self.parts.settings) if offsets else None", "offsets, rule, **self.parts.settings) if not offsets else None"),
        ENABLE_FFPA_DEBUG="1",
    ),
    *edits_in(
        "backends/levels.py",
        "tests/backends/test_mma_packed.py -k 'not cuda'",
        ("levels: rows of no sequence left", "offsets, rule, **of_keys.settings) if offsets else None", "offsets, rule, **of_keys.settings) if not offsets else None"),
        ENABLE_FFPA_DEBUG="1",
    ),
]  # fmt: skip
