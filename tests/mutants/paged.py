"""These mutants change how the forwards on wgmma read keys in pages."""

from .kinds import edits_in

_TESTS = "tests/backends/test_paged_kernels.py -k 'not cuda'"

MUTANTS = [
    *edits_in(
        "csrc/attention/rows/key_pages.cuh",
        _TESTS,
        ("pages: the first page for all keys", "paged.entries == 1 ? 0 : rows_.quotient(key)", "0 * key"),
        ("pages: rows counted on", "place.row + key - entry * rows_.value", "place.row + key"),
        ("pages: the table of the first sequence", "paged.table + place.batch * paged.table_stride + entry", "paged.table + entry"),
        ("pages: numbers beyond the pool", "uint32_t(page) < uint32_t(paged.pages) &&", "page >= 0 &&"),
        ("pages: numbers before the pool", "uint32_t(page) < uint32_t(paged.pages) &&", "page < paged.pages &&"),
        ("pages: keys before a window are read", "if (key + count <= seen.begin || key >= seen.end)", "if (key >= seen.end)"),
        ("pages: keys that begin a window are not read", "key + count <= seen.begin", "key < seen.begin"),
        ("pages: 64 keys in one page", "params.paged.rows % together_ != 0", "false"),
    ),
    *edits_in(
        "csrc/attention/page_boxes.cuh",
        _TESTS,
        ("pages: boxes of V beyond a row", "KeyPages(params).has_whole_boxes();", "true;"),
        ("pages: the first box of V", "box * tile::kBox, at.row, 0,\n                         sequence.head", "0 * box, at.row, 0,\n                         sequence.head"),
        ("pages: V of the first columns", "0, at.row, column / tile::kBox, sequence.head", "0, at.row, 0 * column, sequence.head"),
        ("pages: K of the first columns", "barrier, column + box * tile::kBox, at.row,\n                         sequence.head, at.page", "barrier, column, at.row,\n                         sequence.head, at.page"),
        ("pages: K of the first head", "sequence.head, at.page);\n      }\n    }\n  }\n\n  // Loads `keys`", "0, at.page);\n      }\n    }\n  }\n\n  // Loads `keys`"),
        ("pages: the same keys of V again", "find(key + row, kPageStep)", "find(key, kPageStep)"),
        ("pages: the same keys of K again", "find(key + row, together)", "find(key, together)"),
    ),
    *edits_in(
        "csrc/tile/box_ring.cuh",
        _TESTS,
        ("pages: zeros where boxes lie one after the other", "(row / kTogether * boxes + box) * kTogether + row % kTogether", "box * 64 + row"),
        ("pages: all warps bring all steps", "if (kWarps == 1 || at_.slot % kWarps == warp_) return false;", "return false;"),
    ),
    *edits_in(
        "csrc/attention/forward/wgmma_fused.cuh",
        _TESTS,
        ("pages: V behind a sequence as it is", "live_box_rows(end - key, true)", "~uint64_t{0}"),
    ),
    *edits_in(
        "csrc/attention/forward/wgmma_pair.cuh",
        _TESTS,
        ("pages: pairs' V behind a sequence as it is", "live_box_rows(end - key, others_follow)", "(void(others_follow), ~uint64_t{0})"),
        ("pages: the first columns of V in both blocks", "barrier, rank_ * kOwnColumns, Config::kValueBoxes", "barrier, 0, Config::kValueBoxes"),
    ),
    *edits_in(
        "csrc/attention/forward/wgmma_latent.cuh",
        _TESTS,
        ("pages: tiles begin where a window does", "kFirstStep = Fields::kPaged ? tile::kBox : 1", "kFirstStep = 1"),
    ),
    *edits_in(
        "csrc/attention/rows/row_tile.cuh",
        _TESTS,
        ("pages: lengths of the first sequence", "ld_global_4(paged.used + sequence)", "ld_global_4(paged.used)"),
        ("pages: lengths beyond the longest", "clamp(count - begin, int64_t{0}, int64_t{longest})", "max_of(count - begin, int64_t{0})"),
    ),
]  # fmt: skip
