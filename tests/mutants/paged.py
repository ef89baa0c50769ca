"""These mutants change how the forwards on wgmma read keys in pages."""

from .kinds import edits_in

_TESTS = "tests/backends/test_paged_kernels.py -k 'not cuda'"

MUTANTS = [
    *edits_in(  # copies by maps read zeros outside of a pool, whoever asks: cp.async's do not
        "csrc/attention/rows/key_pages.cuh",
        "tests/backends/test_mma_pages.py -k outside_the_pool",
        ("pages: numbers beyond the pool", "uint32_t(found) < uint32_t(paged.pages) &&", "found >= 0 &&"),
        ("pages: numbers before the pool", "uint32_t(found) < uint32_t(paged.pages) &&", "found < paged.pages &&"),
    ),
    *edits_in(
        "csrc/attention/rows/key_pages.cuh",
        _TESTS,
        ("pages: the first page for all keys", "paged.entries == 1 ? 0 : rows_.quotient(key)", "0 * key"),
        ("pages: rows counted on", "first_row + key - entry_of(paged, key) * rows_.value", "first_row + key"),
        ("pages: the table of the first sequence", "paged.table + place.batch * paged.table_stride + entry", "paged.table + entry"),
        ("pages: keys before a window are read", "if (first + together_ <= seen.begin || first >= seen.end ||", "if (first >= seen.end ||"),
        ("pages: keys that begin a window are not read", "first + together_ <= seen.begin", "first < seen.begin"),
        ("pages: 64 keys in one page", "params.paged.rows % together_ != 0", "false"),
    ),
    *edits_in(
        "csrc/attention/key_boxes.cuh",
        _TESTS,
        ("pages: boxes of V beyond a row", "KeyPages(params).has_whole_boxes();", "true;"),
        ("pages: the first box of V", "column + box * tile::kBox, at.row, 0,", "column, at.row, 0,"),
        ("pages: V of the first columns", "0, at.row, column / tile::kBox,", "0, at.row, 0 * column,"),
        ("pages: K of the first columns", "column + box * tile::kBox, at.row, head_,", "column, at.row, head_,"),
        ("pages: K of the first head", "box * tile::kBox, at.row, head_, at.page", "box * tile::kBox, at.row, 0, at.page"),
        ("pages: all warps bring the same keys", "uint32_t(key + warp_ * kPageStep + i * tile::kBox)", "uint32_t(key + i * tile::kBox)"),
        ("pages: blocks that were left", "if (block != now_ && block != now_ - 1) look_up(block);", "if (block > now_) look_up(block);"),
        ("pages: blocks of the other lanes", "(lane / 16 ^ last) & 1", "lane / 16 & 1"),
        ("pages: rows of the block after", "place.row, run_of_lane(last - 1));", "place.row, run_of_lane(last));"),
    ),
    *edits_in(
        "csrc/tile/box_ring.cuh",
        _TESTS,
        ("pages: zeros where boxes lie one after the other", "(row / kTogether * boxes + box) * kTogether + row % kTogether", "box * 64 + row"),
        ("pages: a step is full when one warp has brought its part", "ptx::mbarrier_init(full(i), producers);", "ptx::mbarrier_init(full(i), 1);"),
    ),
    *edits_in(
        "csrc/attention/forward/wgmma_fused.cuh",
        _TESTS,
        ("pages: V behind a sequence as it is", "keys.live_rows(key, end)", "~uint64_t{end < 0}"),
    ),
    *edits_in(
        "csrc/attention/forward/wgmma_pair.cuh",
        _TESTS,
        ("pages: pairs' V behind a sequence as it is", "keys.live_rows(key, end)", "~uint64_t{end < 0}"),
        ("pages: the first columns of V in both blocks", "arguments_.v, rank_ * kOwnColumns", "arguments_.v, 0 * kOwnColumns"),
    ),
    *edits_in(
        "backends/row_tiles.py",
        "tests/backends/test_paged_kernels.py -k 'unknown_lengths or far_below or windows_are_cut'",
        ("parts of pages: one sequence is as long as its bound", "if p.batch == 1 and _decodes_pages", "if p.batch == 0 and _decodes_pages"),
        ("parts of pages: the number of items is known", "all_items / math.sqrt(12 * batch) * _SPREAD", "0.01"),
        ("parts of pages: all parts have keys", "(all_items + tiles) / 2 if is_random", "all_items if is_random"),
        ("parts of pages: a last wave of few blocks takes as long as all", "alone * x if x <= enough else (alone * enough + together * x * x) / 2", "together * x"),
        ("parts of pages: windows see all keys", "and 2 * visible_keys(p) > p.n_k", "or 2 * visible_keys(p) > p.n_k"),
    ),
    *edits_in(
        "csrc/attention/forward/wgmma_block.cuh",
        _TESTS,
        ("pages: parts without keys that nobody hears of leave sums of anything", "-kInfinity, -kInfinity, 0, true);", "-kInfinity, -kInfinity, 0, false);"),
        ("pages: parts with keys end with those without", "if (has_keys(rows)) return false;", "if (!has_keys(rows)) return false;"),
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
