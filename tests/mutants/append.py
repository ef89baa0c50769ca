"""These mutants change what appends rows to keys and values in pages."""

from .kinds import Mutant, edits_in


def append(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    return edits_in(file, "tests/backends/test_append.py -k 'not gpu'", *edits, ENABLE_FFPA_DEBUG="1")


MUTANTS = [
    *append(
        "csrc/attention/forward/append_rows.cuh",
        ("append: the last chunks of a row are left out", "return ceil_div(params.heads * (params.columns + params.value_columns), 32 * kElements);", "return max_of(params.heads * (params.columns + params.value_columns) / (32 * kElements), 1);"),
        ("append: packed rows of no sequence are the first one's", "  return {-1, 0};\n}\n\nFFPA_DEVICE PageRow", "  return {0, row};\n}\n\nFFPA_DEVICE PageRow"),
        ("append: the first 32 sequences alone", "for (int first = 0; first < params.batch; first += 32) {", "for (int first = 0; first < min_of(params.batch, 32); first += 32) {"),
        ("append: packed rows are counted from the first one", "row - ptx::shfl_idx(begin, owner)", "row"),
        ("append: negative lengths count from the end", "if (used < 0 || entry >= uint32_t(paged.entries))", "if (int(position) < 0 || entry >= uint32_t(paged.entries))"),
        ("append: sequences longer than their table", "if (used < 0 || entry >= uint32_t(paged.entries))", "if (used < 0)"),
        ("append: tables of one entry a sequence", "at.sequence * paged.table_stride + entry", "at.sequence + entry"),
        ("append: pages past the pool", "uint32_t(page) < uint32_t(paged.pages)", "page >= 0"),
        ("append: pages before the pool", "uint32_t(page) < uint32_t(paged.pages)", "page < paged.pages"),
        ("append: the place in a page is that in the sequence", "int(position % uint32_t(paged.rows))", "int(position)"),
        ("append: V lies behind K", "if (of_values) column -= params.heads * params.columns;", ""),
        ("append: V is as wide as K", "of_values ? params.value_columns : params.columns", "params.columns"),
        ("append: lanes past the row write, too", "if (!exists || to.page == kNoPage) return;", "if (to.page == kNoPage) return;"),
        ("append: V goes among the keys", "of_values ? params.v_pages : params.k_pages", "params.k_pages"),
        ("append: rows of the first head", "row_of(of_values ? params.v : params.k, sequence, head, row)", "row_of(of_values ? params.v : params.k, sequence, 0, row)"),
    ),
    *append(
        "csrc/attention/params/append_params.h",
        ("append: packed rows count once for each sequence", "return is_packed() ? rows : int64_t{batch} * rows;", "return int64_t{batch} * rows;"),
    ),
    *append(
        "backends/append.py",
        ("append: V in K is written as V", "        v = v_pages = None\n", "        pass\n"),
        ("append: rows off 16 bytes", "    rows = _readable(k, v)\n", "    rows = [k, v]\n"),
        ("append by PyTorch: rows without a place change the first page", "new[some], pages[page[some], row[some]])", "new[some], new[some])"),
        ("append by PyTorch: rows without a place go where another goes", "torch.where(exists[:, None, None], new, stays)", "new"),
        ("append by PyTorch: rows before the first sequence", "(begin[sequence] <= number) & (number < end[sequence])", "number < end[sequence]"),
        ("append by PyTorch: rows behind the last sequence", "(begin[sequence] <= number) & (number < end[sequence])", "begin[sequence] <= number"),
        ("append by PyTorch: negative lengths", "exists & (used >= 0) & (entry <", "exists & (position >= 0) & (entry <"),
        ("append by PyTorch: pages before the pool", "exists & (page >= 0) & (page < len(pages))", "exists & (page < len(pages))"),
        ("append by PyTorch: pages past the pool", "exists & (page >= 0) & (page < len(pages))", "exists & (page >= 0)"),
    ),
]  # fmt: skip
