"""These mutants change how scores of any size are treated, forward and backward."""

from .kinds import any_rounding, edits_in, gradients, large_scores, score_rules

MUTANTS = [
    *edits_in(
        "backends/reference.py",
        "tests/backends/test_large_scores.py -k 'reference and gradients'",
        ("keys that share a score have a P of 1 each", ".sub_(share).exp_()", ".exp_()"),
    ),
    *edits_in(
        "triton_ops/forward_kernels.py",
        "tests/triton_ops/test_triton_scores.py -k contracted",
        ("triton: scores that are products still", "return tl.fma(x, factor, 0.0)", "return x * factor"),
        ("triton: far rows gone over once", "tl.max(far.to(tl.int32), 0) > 0", "tl.max(far.to(tl.int32), 0) > 1"),
        ("triton: a first tile far below", "-FAR if FAST else -INF", "-INF"),
        ("triton: the base changed before the difference", "p = tl.exp2((s - reference[:, None]) * unit)", "p = tl.exp2(s * unit - (reference * unit)[:, None])"),
    ),
    *score_rules(
        "csrc/attention/mask_pairs.cuh",
        ("pairs: rows that begin at odd places", " && places % (2 * size) == 0", ""),
        ("pairs: every second key", "mask.key_stride == size && ", ""),
        ("pairs: the first key of two for both", "if ((word & 0xff00) == 0)", "if ((word & 0x00ff) == 0)"),
        ("pairs: -inf is added", "number = mask == -kInfinity ? mask : ", "number = "),
        ("pairs: halves are bfloat16", "} else if (kind_ == MaskKind::kHalf) {", "} else if (false) {"),
        ("pairs: the first of two rows for both", "words[i] = ptx::ld_global_4(rows[i % 2]", "words[i] = ptx::ld_global_4(rows[0]"),
        ("pairs: the first head for all", "at.head * mask.head_stride", "0 * mask.head_stride"),
        ("pairs: tiles ahead have the first tile's", "rows_[0] + keys, rows_[1] + keys", "rows_[0], rows_[1]"),
        ("pairs: keys past the end ahead", "is_there_ = key + kSteps * kN * tile::kMmaN <= keys_;", "is_there_ = key < keys_;"),
        ("pairs: rows past the last one", "min_of(at.row, block.n_q() - 1)", "at.row"),
        only=" and mask",
    ),
    *score_rules(
        "csrc/attention/score_rules.cuh",
        ("softcap: large scores are small where another is", "most = larger_of(most, ", "most = smaller_of(most, "),
        only=" and softcap",
    ),
    *score_rules(
        "csrc/attention/backward/pairs.cuh",
        ("softcap: small scores without a slope", "slopes_of_pair[e] = of_score.slope * kSlopes<Element>;", "slopes_of_pair[e] = kSlopes<Element>;"),
        only=" and softcap",
    ),
    *edits_in(
        "csrc/attention/score_rules.cuh",
        "tests/backends/test_latent.py -k 'mask and window and not cuda'",
        ("pairs: tiles that begin at odd keys", " && key % 2 == 0", ""),
    ),
    *score_rules(
        "csrc/attention/score_rules.cuh",
        ("pairs: keys past the end", " && key + kN * tile::kMmaN <= block.n_k()", ""),
        only=" and masks",
    ),
    *score_rules(
        "csrc/attention/backward/wgmma_scores.cuh",
        ("backward scores: words of keys past the end", "mask_has_words && tile.first_key() + kKeyTile <= tile.n_k()", "mask_has_words"),
        ("backward scores: words of the box before", "words[(box + 1) % 2], fragment + kBoxFragments", "words[(box + 1) % 2], fragment"),
        ("backward scores: masks are added to rounded logits", "if (is_added(attention_.mask)) {", "if (false) {"),
        ("backward scores: large scores are small", "few_rules && are_small(pairs_of<kKeyTile / 8>(sums, 0), attention_.score_factor)", "few_rules"),
    ),
    *score_rules(
        "csrc/tile/register_parts.cuh",
        ("parts of registers: all are the first", "if (part * kPart == kFirst)", "if (part * kPart >= kFirst)"),
    ),
    *edits_in(
        "triton_ops/backward_kernels.py",
        "tests/triton_ops/test_triton_scores.py -k 'gradients and contracted'",
        ("triton: keys that share a score have a P of 1 each", "below * LOG2E) - share)", "below * LOG2E))"),
        ("triton: far rows of rounded LSEs", "own = all_here & ", "own = (total < 0) & "),
        ("triton: a sum that a larger score does not lower", "total * tl.exp2((row_max - new_max) * LOG2E)", "total"),
        ("triton: far rows where a float says nothing", "tl.abs(lse) > FAR / LOG2E", "tl.abs(lse) > 2048 * FAR / LOG2E"),
        ("triton: far rows of the first head alone", "range(0, heads * count, _LSES)", "range(0, count, _LSES)"),
        ("triton: far rows of the next sequence", "BLOCK: tl.constexpr = 1 if PACKED else STATISTICS_ROWS", "BLOCK: tl.constexpr = STATISTICS_ROWS"),
        ("triton: dQ of far rows of the first head alone", "range(part, sizes.group * row_blocks, parts)", "range(part, row_blocks, parts)"),
        ("triton: far keys of one part", "for block in range(part, tl.cdiv(at.n_k, KEYS), parts)", "for block in range(part, part + 1, parts)"),
    ),
    *large_scores(
        "csrc/attention/logits.cuh",
        ("large scores: the largest overflow in base 2", "half - kFlatOffset", "-kInfinity"),
        ("large scores: LSEs of the largest as if they were not flat", "std::fabs(logit) <= kFlatLogit ?", "true ?"),
    ),
    *large_scores(
        "csrc/attention/softmax.cuh",
        ("slopes: no row is large", "0x1p27f", "0x1p120f"),
        ("slopes: those of large rows are rounded products", ": coarse;", ": factor;"),
        ("slopes: references by the factor alone", "return x * at(x * factor);", "return x * factor;"),
        ("slopes: LSEs of large rows by the factor", "if (std::fabs(logit) <= Slopes::kMostFine) return", "if (true) return"),
        ("softmax: the largest overflow in base 2", "score = in_base_2(score);", "score = ptx::mul_rn(score, kLog2e);"),
    ),
    *edits_in(
        "triton_ops/backward_kernels.py",
        "tests/backends/test_large_scores.py -k 'infinite_lse and triton'",
        ("triton: an infinite LSE is NaN", "natural = tl.where(blind, INF, row_lse)", 'natural = tl.where(row_lse == INF, float("nan"), tl.where(blind, INF, row_lse))'),
    ),
    *gradients(
        "csrc/attention/backward/pairs.cuh",
        ("backward pairs: scores that are the largest, but for rounding, are not", "x > least_own ? 0.0f : x - reference", "x - reference"),
        ("backward pairs: slopes of halves lose digits", "0x1p15f", "1"),
        ("backward pairs: far rows are linear", "return none_far(lse2) && ", "return "),
        ("backward pairs: far rows by their LSE", "far ? shares[h].share : lse2[h]", "far ? 0.0f : lse2[h]"),
    ),
    *gradients(
        "csrc/attention/backward/row_shares.cuh",
        ("shares: no row is far", "0x1p14f", "0x1p120f"),
        ("shares: keys share nothing", "RowShare{largest, share}", "RowShare{largest, 0}"),
        ("shares: rows keep their LSE", "RowShare{largest, share}", "RowShare{lse, 0}"),
        ("shares: rows 8 further have those of the first", "if (lane / 8 != h) continue;", "if (h != 0) continue;"),
    ),
    *gradients(
        "csrc/attention/score_rules.cuh",
        ("rules: a slope is what tanh leaves", "4 * rest * (1 - rest)};", "1 - (1 - 2 * rest) * (1 - 2 * rest)};"),
    ),
    *gradients(
        "csrc/attention/params/backward_params.h",
        ("backward: P of halves loses digits", "Half> ? 12 : 0", "Half> ? 0 : 0"),
    ),
    *any_rounding(
        "csrc/attention/backward/row_shares.cuh",
        ("large scores: no score is the largest but for rounding", "0x1p-22f", "0x1p-60f"),
    ),
    *large_scores(
        "csrc/attention/score_rules.cuh",
        ("rules: -inf in a mask does not hide NaN", "if (mask == -kInfinity) return mask;", ""),
    ),
    *large_scores(
        "csrc/attention/forward/merge.cuh",
        ("merge: NaN becomes 0", "weights[i] = float_from_bits(bits[1]);", "weights[i] = larger_of(float_from_bits(bits[1]), 0.0f);"),
        ("merge: references of parts without keys are NaN", "growth(references[i], reference)", "ptx::ex2(references[i] - reference)"),
    ),
    *large_scores(
        "csrc/attention/backward/rows.cuh",
        ("backward rows: the LSE overflows", "in_base_2(lse)", "lse * kLog2e"),
    ),
]  # fmt: skip
