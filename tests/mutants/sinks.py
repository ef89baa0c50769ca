"""These mutants change what sinks do, the largest scores, and the gradient of sinks."""

from .kinds import Mutant, edits_in

SINKS = "tests/backends/test_sinks_in_kernels.py"
GRADIENT = "tests/backends/test_sink_gradient.py"


def sinks(file: str, *edits: tuple[str, str, str], only: str = "rows64 or fused or 8_bit") -> list[Mutant]:
    return edits_in(file, f"{SINKS} -k '{only}'", *edits, ENABLE_FFPA_DEBUG="1")


def gradient(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    return edits_in(file, GRADIENT, *edits, ENABLE_FFPA_DEBUG="1")


MUTANTS = [
    *sinks(
        "csrc/attention/softmax.cuh",
        ("sinks: the LSE lacks them", "above > 0 ? of_sink : of_keys};", "score(logit)};"),
        ("sinks: O is not less for them", "return factor * end.share;", "return factor;"),
        ("sinks: those above the scores are taken for those below", "(above > 0 ? smaller : 1) *", "(above < 0 ? smaller : 1) *"),
        ("sinks: the sum of P is one", ": above - log_of_sum;", ": above;"),
        ("sinks: natural units taken for base 2", "std::fma(sink, kLog2e, -reference)", "sink - reference"),
        ("sinks: large logits are those of plain slopes", "const bool is_logit = std::fabs(reference) <= Slopes::kMostFine;", "const bool is_logit = true;"),
        ("sinks: of the first head for all", "params.sinks + head)", "params.sinks)"),
        ("sinks: -inf joins rows without keys", "above = sink == -kInfinity ? sink : above - log_of_sum;", "above -= log_of_sum;"),
        ("sinks: parts join them, too", "  if (params.splits > 1) {\n    if (writes", "  sum += params.sinks != nullptr;\n  if (params.splits > 1) {\n    if (writes"),
        ("largest: products taken for scores", "  return are_raw(params) ? ptx::mul_rn(x, params.scale) : x;\n}\n\n// Tells", "  return x;\n}\n\n// Tells"),
        ("largest: that of the last tile", "top = larger_of(top, which % 2 ? largest[1] : largest[0]);", "top = which % 2 ? largest[1] : largest[0];"),
        ("largest: the second half of rows is that of the first", "which % 2 ? largest[1] : largest[0]);", "largest[0]);"),
        ("largest: all are in the first half of rows", "tile::c_coordinate(lane, lane % 2 * 2).row);", "tile::c_coordinate(lane, 0).row);"),
    ),
    *sinks(
        "csrc/attention/forward/wgmma_latent.cuh",
        ("latent: the sink of the warp's first row", "sink_of(params_, kept.get(), row + r)", "sink_of(params_, kept.get(), row)"),
        only="latent",
    ),
    *sinks(
        "csrc/attention/largest_score.cuh",
        ("largest: negative scores as if they were none", "  if (bits >> 31) {", "  if (false) {"),
        ("largest: rows past the last count", "  if (at.row > rows.last) score = -kInfinity;\n", ""),
        ("largest: heads that share tiles tell of the first", "params.tile_heads == 1 ? rows.head() : at.head", "rows.head()"),
        ("largest: of the first batch entry for all", "rows.batch() * int64_t{params.heads_q} + head", "head"),
        ("largest: of some lanes", "int distance = 16; distance > 0", "int distance = 4; distance > 0"),
    ),
    *sinks(
        "csrc/attention/forward/wgmma_fp8.cuh",
        ("largest: 8-bit logits taken for scores", "tell_largest(ptx::mul_rn(state.top, kLn2), params_", "tell_largest(state.top, params_"),
    ),
    *sinks(
        "csrc/attention/forward/mma_rows.cuh",
        ("largest: warps of 32 rows tell of no tile", "if (kM > 1) tell_if_asked", "if (false) tell_if_asked"),
        only="rows128",
    ),
    *sinks(
        "csrc/attention/forward/mma_two_phase.cuh",
        ("largest: quarters tell of one row of two", "params_, rows, row_of_lane(quarter()));", "params_, rows, row_of_lane(0));"),
        only="mma-two-phase",
    ),
    *sinks(
        "csrc/attention/forward/merge.cuh",
        ("sinks: the merge leaves O as it is", "end.share / sum", "1 / sum"),
    ),
    *sinks(
        "launching/attention_call.py",
        ("sinks: rows of no sequence have them, too", "torch.where(belongs, sinks[:, None], lse)", "sinks[:, None].expand_as(lse)"),
        ("sinks: sequences longer than the longest", "begin + longest)", "begin + longest + 1)"),
    ),
    *gradient(
        "csrc/attention/backward/sink_gradient.cuh",
        ("sink gradient: infinite LSEs count", "const bool sees_keys = std::fabs(lse) != kInfinity;", "const bool sees_keys = exists;"),
        ("sink gradient: rows that do not count are read", "is_read ? params.columns : 0", "exists ? params.columns : 0"),
        ("sink gradient: sinks above what holds them", "sink > lse ? 0 : sink - lse", "sink - lse"),
        ("sink gradient: the sign", "sum -= p * delta;", "sum += p * delta;"),
        ("sink gradient: every lane adds the row", "if (lane == 0 && p != 0) sum", "if (p != 0) sum"),
        ("sink gradient: without the gradient of the LSE", "if (is_read && params.grad_lse != nullptr)", "if (false)"),
        ("sink gradient: rows past the last", "row_of_block < kSinkRows && row < params.rows;", "row_of_block < kSinkRows;"),
        ("delta: rows of no share have none", "p != 0 || (sees_keys && params.delta != nullptr)", "p != 0"),
        ("delta: of rows that see a key alone", "lane == 0 && exists && params.delta", "lane == 0 && sees_keys && params.delta"),
        ("sink gradient: some warps are left out", "warp < kThreads / 32; ++warp", "warp < kThreads / 64; ++warp"),
        ("sink gradient: sums before they are there", "  ptx::sync_block();\n", ""),
        ("sink gradient: heads of the first batch entry", "int64_t(batch) * params.heads + head", "int64_t(head)"),
    ),
    *gradient(
        "csrc/attention/backward/row_dot.cuh",
        ("sink gradient: columns of the first step", "column += lanes * kLaneColumns", "column += 4 * lanes * kLaneColumns"),
        ("sink gradient: half of the lanes", "int distance = lanes / 2;", "int distance = lanes / 4;"),
    ),
    *gradient(
        "csrc/attention/backward/rows.cuh",
        ("delta: computed where it is known", "if (params.delta != nullptr) {", "if (false) {"),
        ("delta: the gradient of the LSE once more", "delta = own_number(params.delta);", "delta = own_number(params.delta) - own_number(params.grad_lse);"),
    ),
    *gradient(
        "backends/sink_gradient.py",
        ("delta by PyTorch: of rows without keys", "delta[at] = torch.where(lse[at].isinf(), 0.0, of_rows)", "delta[at] = of_rows"),
        ("sink gradient by PyTorch: infinite LSEs count", "torch.where(lse[at].isinf(), 0.0, p)", "p"),
        ("sink gradient by PyTorch: rows that do not count", "torch.where(p == 0, 0.0, p * of_rows)", "(p * of_rows)"),
        ("sink gradient by PyTorch: sinks above what holds them", ".clamp(max=0.0)", ""),
        ("sink gradient by PyTorch: the last rows alone", "total[heads] -= ", "total[heads] = -"),
        ("sink gradient by PyTorch: the first heads' sinks", "sinks[heads, None] - lse", "sinks[: heads.stop - heads.start, None] - lse"),
    ),
]  # fmt: skip
