"""Edits one line at a time and expects the suite to fail: what survives shows what the tests do not see.

`PYTHONPATH=ffpa python .dev/mutants.py` runs all, with an argument WORD those whose name or file holds WORD. Works on a
copy of the tree, with a cache of its own for the emulator's module, which is rebuilt for each mutant of the kernel. Prints a Markdown table; exits with 1 if a mutant survives or no longer applies.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from ffpa_attn import env

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "ffpa/ffpa_attn/"


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str
    flags: dict[str, str]  # of the environment


def _in(file: str, tests: str, *edits: tuple[str, str, str], **flags: str) -> list[Mutant]:
    path = file if file.startswith(("csrc/", "bench/")) else PACKAGE + file
    return [Mutant(name, path, old, new, tests, flags) for name, old, new in edits]


def _kernel(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    """The emulator's modules of a debug build, and every emulated test that needs no other kernel."""
    return _in("csrc/" + file, "tests/test_mma.py -k 'emulated and not padded'", *edits, ENABLE_FFPA_DEBUG="1")


def _fused(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    """The narrowest of its instances, which is what most of its tests run."""
    return _in(file, "tests/test_fused.py -k 'd64 and not cuda and not large'", *edits, ENABLE_FFPA_DEBUG="1")


def _pair(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    tests = "tests/test_fused.py -k '(d384 or one_block) and not d384v and not cuda and not large'"
    return _in(file, tests, *edits, ENABLE_FFPA_DEBUG="1")


def _two_phase(file: str, *edits: tuple[str, str, str], only: str = "not cuda") -> list[Mutant]:
    return _in(file, f"tests/test_two_phase.py -k '{only}'", *edits, ENABLE_FFPA_DEBUG="1")


def _fp8(file: str, *edits: tuple[str, str, str], only: str = "wide and (d512 or d264) and not cuda") -> list[Mutant]:
    return _in(file, f"tests/test_fp8.py -k '{only}'", *edits, ENABLE_FFPA_DEBUG="1")


_SOME_BACKWARDS = "hopper and not cuda and (d320 or n130x50 or caps or schedules or sequences or pass_on or fp32 or repeat or last_row)"

_PACKED_CHUNKS = "not cuda and hopper and packed_in_chunks"

_RESULTS_OF_PRODUCTS = "hopper and not cuda and (n33x70-d448 or packed and d512 or caps or fp32)"


def _row_tiles(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    return _in(file, "tests/test_row_tiles.py -k 'not cuda'", *edits, ENABLE_FFPA_DEBUG="1")


def _backward(file: str, *edits: tuple[str, str, str], only: str = _SOME_BACKWARDS) -> list[Mutant]:
    return _in(file, f"tests/test_backward.py -k '{only}'", *edits, ENABLE_FFPA_DEBUG="1")


def _mask_gradient(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    tests = "tests/test_backward.py -k 'not cuda and not hopper and (mask_gradients or masks_shared or mask_of or pairs_of or additive)'"
    return _in(file, tests, *edits, ENABLE_FFPA_DEBUG="1")


def _emulator(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    tests = "tests/emulator -k 'ring or misuse or mbarrier'"
    return _in("csrc/ptx/emulated/machine/" + file, tests, *edits)


MUTANTS = [
    *_in(
        "reference.py",
        "tests/test_numerics.py",
        ("mask off by one to the right", "[distance > see.right]", "[distance > see.right + 1]"),
        ("window off by one to the left", "[distance < -see.left]", "[distance < -see.left - 1]"),
        ("diagonal shifted the wrong way", "key - row - (lengths[1] - lengths[0])", "key - row + (lengths[1] - lengths[0])"),
        ("key range too short", "hi = rows[1] + shift + see.right", "hi = rows[1] - 1 + shift + see.right"),
        ("key range starts late", "lo = rows[0] + shift - see.left", "lo = rows[0] + 1 + shift - see.left"),
        ("row without keys keeps -inf", "row_max.masked_fill_(row_max == -_INF, 0.0)", "pass"),
        ("row without keys divides by 0", "row_sum.masked_fill(row_sum == 0, 1.0)", "row_sum"),
        ("LSE in log2", "(row_max + row_sum.log())", "(row_max + row_sum.log2())"),
        ("LSE without the maximum", "(row_max + row_sum.log())", "row_sum.log()"),
        ("P left unnormalised", "    o.div_(row_sum.masked_fill(row_sum == 0, 1.0))\n", ""),
        ("scale forgotten in dQ", "tile_dq = _matmul(ds, key_side[0], grads.q.dtype).mul_(scale)", "tile_dq = _matmul(ds, key_side[0], grads.q.dtype)"),
        ("scale forgotten in dK", "sum_k.mul_(scale)", "sum_k"),
        ("softcap slope forgotten", "d_score if slope is None else slope.mul_(d_score)", "d_score"),
        ("softcap before the scale", "scores = raw.mul_(rule.scale)", "scores = raw"),
        ("delta forgotten", ".sub_(delta).mul_(p)", ".mul_(p)"),
        ("dLSE with the wrong sign", "delta -= _fold(", "delta += _fold("),
        ("empty row's P not 0 in the backward", "lse.masked_fill(empty, _INF)", "lse"),
        ("mask gradient of one batch only", "mask[b if mask.shape[0] > 1 else 0]", "mask[0]"),
        ("mask's hidden keys shown", "by_head.masked_fill_(~mask, -_INF)", "by_head.masked_fill_(mask, -_INF)"),
        ("rows past the end of a sequence", "(row >= lengths[0]) | (key >= lengths[1])", "(row >= lengths[0]) | (key > lengths[1])"),
        ("spare rows read", ".masked_fill_(~inside[:, None], 0)\n", "\n"),
        ("mask gradient loses a key/value head", "total += ds.sum", "total = ds.sum"),
        ("mask gradient with softcap's slope", "_, ds, _ = grads.tile", "_, _, ds = grads.tile"),
    ),
    *_in(
        "reference.py",
        "tests/test_memory.py",
        ("wrong head of the group", "slice(h0 * group, h1 * group)", "slice(h0, h0 + (h1 - h0) * group)"),
        ("cap ignored forward", "half = min(cap, _ENOUGH_BYTES) // 2", "half = _ENOUGH_BYTES // 2"),
        ("cap ignored backward", "third = min(cap, _ENOUGH_BYTES) // 3", "third = _ENOUGH_BYTES // 3"),
        ("dQ lost when keys are cut", "if not whole_rows:", "if False:"),
    ),
    *_in(
        "ops.py",
        "tests/test_ops.py tests/test_bad_input.py tests/test_choice.py",
        ("autocast type of the wrong device", "dtype = torch.get_autocast_dtype(device)", "dtype = torch.float16"),
        ("LSE not computed for a gradient", '{**options, "return_lse": True}', "{**options}"),
        ("values of offsets not checked", 'if cu_q.device.type == "cpu" or', "if"),
        ("flags not part of a plan", "form.key(), flags, *options.items())\n    plan = _plans.get(key) or _remember(key, _forward_plan", "form.key(), *options.items())\n    plan = _plans.get(key) or _remember(key, _forward_plan"),
        ("alignment not part of a plan", "x.data_ptr() % ROW_ALIGNMENT)", "0)"),
        ("strict ignored", 'if choice.fallback and flags["FFPA_STRICT"]:', "if False:"),
        ("unfused SDPA called", "== SDPBackend.MATH.value:", "== 99:"),
        ("past autocast", '        or torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu")\n', ""),
        ("past autograd", "        or (_C.is_grad_enabled() and _C._any_requires_grad(q, *others))\n", ""),
        ("past dispatch modes", "        or _C._len_torch_dispatch_stack()\n", ""),
        ("past function modes", "        or _C._len_torch_function_stack()\n", ""),
        ("past transforms", "        or _C._functorch.peek_interpreter_stack() is not None\n", ""),
        ("past traces", "        or _C._get_tracing_state()\n", ""),
        ("past profilers", "        or autograd.profiler._is_profiler_enabled\n", ""),
        ("past forward-mode AD", "        or forward_ad._current_level >= 0\n", ""),
        ("past meta tensors", "        or not (q.is_cuda or q.is_cpu)\n", ""),
        ("past subclasses", "(type(x) is not torch.Tensor or _C._dispatch_keys", "(_C._dispatch_keys"),
        ("past tensors of other keys", " or _C._dispatch_keys(x).raw_repr() & _BEYOND_PLAIN", ""),
    ),
    *_in(
        "choice.py",
        "tests/test_choice.py",
        ("SDPA for its other diagonal", "and not see.top_left and p.n_q != p.n_k", "and p.n_q > 10**9"),
        ("level falls back on a GPU", 'if p.device == "cuda" or backend not in', "if backend not in"),
    ),
    *_in(
        "attention.py",
        "tests/test_ops.py -k TestAtOnce",
        ("options of a call are changed", "        options = {**options, \"layout\": layout}\n", "        options[\"layout\"] = layout\n"),
        ("options of equal arguments of other types", "options = _known_options.get((types, args))", "types = ()\n        options = _known_options.get((types, args))"),
    ),
    *_in(
        "attention.py",
        "tests/test_merge.py",
        ("merge without the maximum", "top = torch.maximum(lse1, lse2)", "top = torch.minimum(lse1, lse2)"),
        ("merge passes on an empty part", "share * torch.where(share == 0, 0.0, o.float())", "share * o.float()"),
    ),
    *_kernel(
        "attention/forward_mma.cuh",
        ("ring: one step too many ahead", "step < key_feed_.ring.ahead(); ++step", "step < params_.stages; ++step"),
        ("ring: one step more in a tile", "if (++next.step < key_steps_ +", "if (++next.step <= key_steps_ +"),
        ("ring: V of the first column group for all", "group * kColumns : first_column_", "0 : first_column_"),
        ("ring: V of one column group only", "&& ++next.group < Config::column_groups(params_)", "&& false"),
        ("ring: K again for each column group", "      next.step = key_steps_;\n      return;", "      return;"),
        ("K's slot given back before it is read", "tile::add_product<Element, Config::kAhead, kKeyColumns / 16>(s, load_a, load_b);\n      feed<kOfKeys>().ring.end_use();", "feed<kOfKeys>().ring.end_use();\n      tile::add_product<Element, Config::kAhead, kKeyColumns / 16>(s, load_a, load_b);"),
        ("V's slot given back before it is read", "tile::add_product<Element, Config::kAhead, kValueRows / 16>(out, load_a, load_b);\n      feed<kOfValues>().ring.end_use();", "feed<kOfValues>().ring.end_use();\n      tile::add_product<Element, Config::kAhead, kValueRows / 16>(out, load_a, load_b);"),
        ("P inside the ring's last slot", "Config::all_slots_bytes(params)),", "Config::all_slots_bytes(params) - 1024),"),
        ("maxima read before they are there", "sync_team();  // the maxima", "//"),
        ("P and factors read before they are there", "sync_team();  // P and", "//"),
        ("sums read before they are there", "    sync_team();\n    float* lse_gmem", "    float* lse_gmem"),
        ("both teams at one barrier", "ptx::bar_sync(1 + team_, kTeamWarps * 32)", "ptx::bar_sync(1, kTeamWarps * 32)"),
        ("row block read before it is there", "    ptx::sync_block();  // the row block is there, and the barriers of the ring are\n", ""),
        ("next item begun while the last is in use", "ptx::sync_block();  // nobody reads Q", "//"),
        ("K read without the swizzle", "Config::key_layout().offset(score_key() + at.row, depth * 2 + at.column)", "((score_key() + at.row) * kKeyColumns * 2 + (depth * 2 + at.column) * 16)"),
        ("Q read without the swizzle", "Config::query_layout().offset(score_row() + at.row, depth * 2 + at.column)", "((score_row() + at.row) * kKeyColumns * 2 + (depth * 2 + at.column) * 16)"),
        ("V read without the swizzle", "Config::value_layout().offset(at.row, chunk + at.column)", "(at.row * kColumns * 2 + (chunk + at.column) * 16)"),
        ("P written without the swizzle", "Config::probability_layout().offset(row, chunk) + within_chunk", "row * kKeys * 2 + chunk * 16 + within_chunk"),
        ("P written one fragment to the right", "score_key() / tile::kChunkElements + n;", "score_key() / tile::kChunkElements + (n + 1) % kScoreN;"),
        ("P's pair swapped", "ptx::pack<Element>(p0, p1)", "ptx::pack<Element>(p1, p0)"),
        ("P's keys of another V step", "(step * kValueRows + depth * 16) / tile::kChunkElements", "(depth * 16) / tile::kChunkElements"),
        ("P of the other team's rows", "offset(out_row_begin() + at.row, chunk + at.column)", "offset(at.row, chunk + at.column)"),
        ("V step starts at the wrong key", "tile * kKeys + step * kValueRows", "tile * kKeys"),
        ("Q's first columns in every step", "tile::window_at(q_gmem, block_.first_row(), step * kKeyColumns)", "tile::window_at(q_gmem, block_.first_row(), 0)"),
        ("Q of the first row block", "tile::window_at(q_gmem, block_.first_row(), step * kKeyColumns)", "tile::window_at(q_gmem, 0, step * kKeyColumns)"),
        ("resident Q: first step always used", "params_.q_resident ? q_smem_ + step * Config::kQueryStepBytes", "params_.q_resident ? q_smem_"),
        ("Q copied over K in the slot", "copy_queries(slot + Config::kKeyStepBytes, step)", "copy_queries(slot, step)"),
        ("columns of the first group in every item", "first_column_ = item % groups * kColumns;", "first_column_ = 0;"),
        ("row that has seen no key: -inf minus -inf", "maximum == -kInfinity ? 0.0f : maximum", "maximum"),
        ("maxima of the first warp ignored", "for (int warp = 0; warp < Config::kScoreWarpsByKeys; ++warp) {\n          maximum", "for (int warp = 1; warp < Config::kScoreWarpsByKeys; ++warp) {\n          maximum"),
        ("maxima of half of the lanes ignored", "maximum = max_of(maximum, ptx::shfl_xor(maximum, 2));", ""),
        ("sums of the last warp ignored", "for (int warp = 0; warp < Config::kScoreWarpsByKeys; ++warp) sum", "for (int warp = 0; warp < Config::kScoreWarpsByKeys - 1; ++warp) sum"),
        ("sums of half of the lanes ignored", "sum += ptx::shfl_xor(sum, 2);", ""),
        ("reference does not stay while the maximum grows little", "if (!(maximum - row_max_[m][h] > kLazyGrowth)) maximum = row_max_[m][h];", "row_max_[m][h] = maximum - row_max_[m][h] > kLazyGrowth ? row_max_[m][h] : maximum;"),
        ("reference never follows the maximum", "if (!(maximum - row_max_[m][h] > kLazyGrowth)) maximum", "if (row_max_[m][h] > -kInfinity) maximum"),
        ("reference lazy with f16 sums", "sizeof(float) ? 8.0f : 0.0f", "sizeof(float) ? 8.0f : 20.0f"),
        ("factor of the new reference to itself", "ptx::ex2(row_max_[m][h] - reference)", "ptx::ex2(maximum - reference)"),
        ("row sum not rescaled", "row_sum_[m][h] * factor + sum;", "row_sum_[m][h] + sum;"),
        ("O not rescaled", "tile::scale_rows(out[m][n], factor[m]);", "(void)factor;"),
        ("O rescaled where the first row asks only", "any |= factor[m][h] != 1;", "any |= m + h == 0 && factor[m][h] != 1;"),
        ("factors of the other team's rows", "statistic(factor_smem_, out_row(m, h))", "statistic(factor_smem_, out_row(m, h) - out_row_begin())"),
        ("scratch of another block", "(int64_t(block_number()) * Config::column_groups(params_) + group)", "int64_t(group)"),
        ("scratch of another column group", "Config::column_groups(params_) + group) * Config::kWarps", "Config::column_groups(params_)) * Config::kWarps"),
        ("scratch of another warp", "(warp_of_all + thread_ / 32) * kWarpFloats", "(warp_of_all + thread_ / 32 / 2) * kWarpFloats"),
        ("scratch loaded before anything was saved", "if (tile > first_tile_) load(out, group);", "load(out, group);"),
        ("scratch not loaded", "if (tile > first_tile_) load(out, group);", ""),
        ("scratch not saved", "            save(out, group);\n", ""),
        ("output after the first tile", "if (tile < end_tile_ - 1) {", "if (tile > first_tile_ && tile < end_tile_ - 1) {"),
        ("output of rows without keys not written", "write(Out{}, group * kColumns);", "(void)group;"),
        ("columns of the next warp's fragments", "? pair * kTeamWarps : 0) + team_warp_) * 16", "? pair * kTeamWarps : 0) + (team_warp_ + 1) % kTeamWarps) * 16 * (pair > 0 || team_warp_ > 0)"),
        ("fragments written to the wrong column", "pair_column(fragment / 2) + fragment % 2 * 8", "pair_column(fragment / 2) + (fragment + 1) % 2 * 8"),
        ("row without keys divided by 0", "const float inverse = sum > 0 ? 1 / sum : 0.0f;\n        uint16_t*", "const float inverse = 1 / sum;\n        uint16_t*"),
        ("kernel's LSE in log2", "ptx::lg2(row_sum(row))) * kLn2", "ptx::lg2(row_sum(row)))"),
        ("kernel's LSE without the maximum", "(row_max_[m][h] + ptx::lg2", "(ptx::lg2"),
        ("LSE from every column group", "first_column_ > 0 || score_warp_by_keys() > 0", "score_warp_by_keys() > 0"),
        ("LSE from the last column group", "first_column_ > 0 || score_warp_by_keys() > 0", "first_column_ == 0 || score_warp_by_keys() > 0"),
        ("LSE written past the last row", "if (first_row + row > last_row) continue;\n        const float lse", "if (first_row + row > last_row + 1) continue;\n        const float lse"),
        ("output written past the last row", "row_exists = first_row + row <= last_row;", "row_exists = first_row + row <= last_row + 1;"),
        ("output written past the last column", "first_column + column < params_.d_v;", "first_column + column < params_.d_v + 8;"),
        ("output's last columns not written", "first_column + column < params_.d_v;", "first_column + column < params_.d_v - 8;"),
        ("output's pair swapped", "ptx::pack<Element>(values[2 * h] * inverse, values[2 * h + 1] * inverse)", "ptx::pack<Element>(values[2 * h + 1] * inverse, values[2 * h] * inverse)"),
        ("items of a block: only the first", "item += blocks_of_grid()) {", "item += items) {"),
    ),
    *_kernel(
        "attention/forward_mma_config.cuh",
        ("row statistics not part of shared memory", "(kScoreWarpsByKeys + 1) * kStatisticBytes", "0"),
        ("barriers not part of shared memory", "kStatisticBytes + kBarrierBytes +", "kStatisticBytes +"),
        ("slot too small for a Q that is not resident", "kKeyStepBytes + (params.q_resident ? 0 : kQueryStepBytes)", "kKeyStepBytes"),
        ("slot too small for V", "key_bytes : max_of(key_bytes, kValueStepBytes)", "key_bytes : key_bytes"),
        ("last columns of Q and K ignored", "ceil_div(params.d_qk, kKeyColumns)", "params.d_qk / kKeyColumns"),
        ("last column group ignored", "return ceil_div(params.d_v, kColumns);", "return max_of(params.d_v / kColumns, 1);"),
        ("last row block ignored", "ceil_div(params.n_q, kRows) * params.splits", "max_of(params.n_q / kRows, 1) * params.splits"),
    ),
    *_kernel(
        "tile/accumulator.cuh",
        ("f16 sums: pairs swapped where they are read", "ptx::unpack<Half>(c[1], values[2], values[3])", "ptx::unpack<Half>(c[1], values[3], values[2])"),
        ("f16 sums: lower rows lost", "c[1] = ptx::pack<Half>(values[2], values[3]);", ""),
        ("both rows by the first one's factor", "factor[e / 2]", "factor[0]"),
        ("rows scaled as columns", "factor[e / 2]", "factor[e % 2]"),
    ),
    *_kernel(
        "tile/multiply.cuh",
        ("A of the depth before", "a_rmem[depth % 2][m], now[0], now[1]", "a_rmem[(depth + 1) % 2][m], now[0], now[1]"),
        ("B of the next pair", "b_rmem[step % (kAhead + 1)];", "b_rmem[(step + 1) % (kAhead + 1)];"),
        ("second half of a pair from the first", "now[2], now[3]", "now[0], now[1]"),
    ),
    *_kernel(
        "attention/visible_keys.cuh",
        ("begin one key late", "max_of(block.first_row() + block.nearest(), 0)", "max_of(block.first_row() + block.nearest() + 1, 0)"),
        ("begin from the last row", "max_of(block.first_row() + block.nearest(), 0)", "max_of(block.last_row() + block.nearest(), 0)"),
        ("end one key early", "min_of(block.last_row() + block.farthest() + 1, block.n_k())", "min_of(block.last_row() + block.farthest(), block.n_k())"),
        ("end from the first row", "min_of(block.last_row() + block.farthest() + 1, block.n_k())", "min_of(block.first_row() + block.farthest() + 1, block.n_k())"),
        ("first tile skipped", "visible_keys_begin(block) / keys", "ceil_div(visible_keys_begin(block), keys)"),
        ("last tile skipped", "ceil_div(visible_keys_end(block), keys)", "visible_keys_end(block) / keys"),
        ("one tile too many", "ceil_div(visible_keys_end(block), keys)", "ceil_div(visible_keys_end(block), keys) + 1"),
        ("no mask one key too far to the right", "return min_of(block.first_row() + block.farthest() + 1, block.n_k());", "return min_of(block.first_row() + block.farthest() + 2, block.n_k());"),
        ("no mask one key too far to the left", "return block.last_row() + block.nearest();", "return block.last_row() + block.nearest() - 1;"),
        ("no mask one key past the end", "return min_of(block.first_row() + block.farthest() + 1, block.n_k());", "return min_of(block.first_row() + block.farthest() + 1, block.n_k() + 1);"),
    ),
    *_kernel(
        "attention/row_block.cuh",
        ("wrong K head of a group", "row_of(params.k, block.head / params.group", "row_of(params.k, block.head % (params.heads_q / params.group)"),
        ("wrong V head of a group", "row_of(params.v, block.head / params.group", "row_of(params.v, block.head % (params.heads_q / params.group)"),
        ("batch of the tensors ignored", "block.batch * x.batch_stride + head", "head"),
        ("batch of the LSE ignored", "block.batch * params.lse_batch_stride +", "0 +"),
        ("last row of a block missed", "min_of(block.first_row + rows, block.n_q) - 1", "min_of(block.first_row + rows, block.n_q) - 2"),
        ("row blocks: the last one missed", "(row_blocks - 1 - row_block % row_blocks) * rows", "(row_blocks - 2 - row_block % row_blocks) * rows"),
        ("row blocks: one too far", "(row_blocks - 1 - row_block % row_blocks) * rows", "(row_blocks - row_block % row_blocks) * rows"),
        ("alignment's diagonal with the wrong sign", "entry.n_k() - entry.n_q();", "entry.n_q() - entry.n_k();"),
        ("top_left ignored", "params.top_left ? 0 : ", ""),
        ("window without a left end taken literally", "params.left < 0 ? all_before : ", ""),
    ),
    *_kernel(
        "attention/score_rules.cuh",
        ("scale forgotten", "score *= params.score_factor", "(void)score"),
        ("hidden keys shown", "if (k < r + nearest || k > r + farthest || k >= n_k) score = -kInfinity;", "(void)r, (void)k;"),
        ("key right of the diagonal seen", "k > r + farthest", "k > r + farthest + 1"),
        ("key on the diagonal hidden", "k > r + farthest", "k >= r + farthest"),
        ("key left of the window seen", "k < r + nearest", "k < r + nearest - 1"),
        ("first key of the window hidden", "k < r + nearest", "k <= r + nearest"),
        ("key past the end seen", "|| k >= n_k)", "|| k > n_k)"),
        ("softcap without scale", "tanh_of(score * params.score_factor)", "tanh_of(score)"),
        ("softcap never reached", "params.softcap * tanh_of(score * params.score_factor)", "params.softcap * (score * params.score_factor)"),
        ("softcap in natural units", "* tanh_of(score * params.score_factor) * kLog2e", "* tanh_of(score * params.score_factor)"),
        ("softcap not scaled back", "params.softcap * tanh_of", "tanh_of"),
        ("tanh's polynomial without its cubic term", "- 0.33332598f", ""),
        ("tanh's polynomial too far out", "< 0.6f ?", "< 1.2f ?"),
        ("tanh's exponential too far in", "< 0.6f ?", "< 0.0f ?"),
        ("tanh without its sign", "std::copysign(large, x)", "large"),
    ),
    *_kernel(
        "attention/attention_params.h",
        ("cap ignored in the factor", "options.softcap > 0 ? options.scale / options.softcap : options.scale", "options.scale"),
        ("softcap that a float cannot hold", "max_of(finite_float(options.softcap), kSmallestFloat)", "finite_float(options.softcap)"),
        ("scale without log2(e)", "options.scale * 1.4426950408889634", "options.scale"),
        ("strides of a batch taken for those of a head", "strides[0], strides[1]", "strides[0], strides[0]"),
    ),
    *_kernel(
        "tile/tile_copy.cuh",
        ("rows that do not exist copied", "return row < window.rows && chunk", "return chunk"),
        ("columns that do not exist copied", "return row < window.rows && chunk * kChunkElements < window.columns;", "return row < window.rows;"),
        ("last row not copied", "return row < window.rows && chunk", "return row < window.rows - 1 && chunk"),
        ("window keeps the matrix's rows", "int(matrix.rows - row)", "matrix.rows"),
        ("window keeps the matrix's columns", "matrix.columns - column};", "matrix.columns};"),
        ("one row further for every pass but the first", "source += kTeams * window.row_stride;", "source += (kTeams + 1) * window.row_stride;"),
    ),
    *_kernel(
        "tile/stage_ring.cuh",
        ("ring: used before it is full", "    ptx::mbarrier_wait(full(use_), used_parity_);\n", ""),
        ("ring: filled while in use", "    if (filled_round_ > 0) ptx::mbarrier_wait(empty(fill_), (filled_round_ & 1) ^ 1);\n", ""),
        ("ring: wrong parity of full", "mbarrier_wait(full(use_), used_parity_)", "mbarrier_wait(full(use_), used_parity_ ^ 1)"),
        ("ring: wrong parity of empty", "(filled_round_ & 1) ^ 1", "filled_round_ & 1"),
        ("ring: parity of full never turns", "used_parity_ ^= 1;", ""),
        ("ring: another slot's full", "mbarrier_wait(full(use_), used_parity_)", "mbarrier_wait(full(0), used_parity_)"),
        ("ring: a thread never says full", "    ptx::cp_async_mbarrier_arrive(full(fill_));\n", "    if (fill_ > 0) ptx::cp_async_mbarrier_arrive(full(fill_));\n"),
        ("ring: full without waiting for copies", "ptx::cp_async_mbarrier_arrive(full(fill_))", "ptx::mbarrier_arrive(full(fill_))"),
        ("ring: a slot never given back", "ptx::mbarrier_arrive(empty(use_));", ""),
        ("ring: a slot given back by one lane", "ptx::mbarrier_arrive(empty(use_));", "if (ptx::lane_id() == 0) ptx::mbarrier_arrive(empty(use_));"),
        ("ring: fewer arrivals make it full", "mbarrier_init(full(slot), kThreads)", "mbarrier_init(full(slot), kThreads - 32)"),
        ("ring: fewer arrivals make it empty", "mbarrier_init(empty(slot), kThreads)", "mbarrier_init(empty(slot), kThreads - 32)"),
        ("ring: one ahead too many", "stages_ <= 2 ? stages_ - 1 : stages_ - 2", "stages_"),
        ("ring: one slot longer", "if (++use_ == stages_) {", "if (++use_ > stages_) {"),
        ("ring: barriers of full and empty overlap", "(kMaxStages + slot) * 8", "(1 + slot) * 8"),
    ),
    *_kernel(
        "tile/smem_layout.cuh",
        ("swizzle that leaves bank conflicts", ": row_bytes % 128 == 0 ? 7", ": row_bytes % 128 == 0 ? 3"),
        ("swizzle that maps two chunks to one", "(chunk ^ ((row >> row_shift_) & chunk_mask_))", "(chunk | ((row >> row_shift_) & chunk_mask_))"),
    ),
    *_kernel(
        "tile/fragments.cuh",
        ("ldmatrix of A: rows and columns", "ldmatrix_a(int lane) { return {lane % 16, lane / 16}; }", "ldmatrix_a(int lane) { return {lane % 8 + 8 * (lane / 16), lane / 8 % 2}; }"),
        ("ldmatrix of K: rows and columns", "ldmatrix_b_pair(int lane) { return {lane % 8 + 8 * (lane / 16), lane / 8 % 2}; }", "ldmatrix_b_pair(int lane) { return {lane % 16, lane / 16}; }"),
        ("ldmatrix of V: rows and columns", "ldmatrix_b_pair_trans(int lane) { return {lane % 16, lane / 16}; }", "ldmatrix_b_pair_trans(int lane) { return {lane % 8 + 8 * (lane / 16), lane / 8 % 2}; }"),
        ("C's second row is the next one", "return {lane / 4 + 8 * (value / 2), 2 * (lane % 4) + value % 2}", "return {lane / 4 + value / 2, 2 * (lane % 4) + value % 2}"),
        ("C's columns swapped in pairs", "return {lane / 4 + 8 * (value / 2), 2 * (lane % 4) + value % 2}", "return {lane / 4 + 8 * (value / 2), 2 * (lane % 4) + 1 - value % 2}"),
    ),
    *_in(
        "mma.py",
        "tests/test_plan.py -k shared_memory",
        ("shared memory: Q's part of a slot forgotten", "(0 if q_resident else query)", "0"),
        ("shared memory: one row statistic forgotten", "(score_warps_by_keys + 1) * spec.rows", "score_warps_by_keys * spec.rows"),
        ("shared memory: P forgotten", "slots + spec.rows * spec.keys * 2", "slots"),
        ("shared memory: last columns of a resident Q forgotten", "-(-d_qk // spec.key_columns) * query", "d_qk // spec.key_columns * query"),
        ENABLE_FFPA_DEBUG="1",
    ),
    *_in(
        "mma.py",
        "tests/test_plan.py -k 'not shared_memory'",
        ("limit of shared memory ignored", "q_resident, of_values) <= limit", "q_resident, of_values) <= 2 * limit"),
        ("shortest ring first", "_stages(p, flags, [4, 3, 2, 1])", "_stages(p, flags, [1, 2, 3, 4])"),
        ("resident Q never preferred", "(True, False) if resident is None", "(False, True) if resident is None"),
        ("toggle of a resident Q ignored", "if resident is None else (resident,)", ""),
        ("prefetch although forbidden", "return stages if prefetch is None else", "return stages if True else"),
        ("stages asked for ignored", "[p.num_stages] if p.num_stages else all_stages", "all_stages"),
        ("f16 accumulation of bf16 granted", 'if "f16" in (acc_qk, acc_pv) and p.dtype != "f16":', "if False:"),
        ("toggle of the accumulators ignored", 'if flags["ENABLE_FFPA_FORCE_PV_F16"] is not None:', "if False:"),
        ("too wide values accepted", "if p.level == 1 and p.d_v > MOST_COLUMNS:", "if False:"),
        ("unknown toggle ignored", "if flags[name] not in (None, value))", "if False)"),
        ("scratch beyond the cap", "min(blocks, workspace_cap // of_a_block)", "min(blocks, 4 * workspace_cap // of_a_block)"),
        ("scratch and partial results beyond the cap", "workspace_cap -= 4 * partial", ""),
        ("a block beyond the cap", "if of_a_block > cap:", "if False:"),
        ("scratch of whole rows of values forgotten", "return -(-d_v // spec.columns) * spec.columns * spec.rows * 4", "return d_v * spec.rows * 4"),
    ),
    *_in(
        "mma.py",
        "tests/test_toggles.py -k 'plan or stages_of or prefetch or grid_of'",
        ("toggle of the rings ignored", 'flags["ENABLE_FFPA_QKV_SMEM_SHARE"] is False or ', ""),
        ("stages of V ask for no ring", ' or flags["FFPA_PV_STAGES"] is not None', ""),
        ("stages of V ignored", '(flags["FFPA_PV_STAGES"] or n)', "n"),
        ("toggle of the fragments ignored", 'flags["ENABLE_FFPA_REGISTERS_PIPE_KV"] is False', "False"),
        ("toggle of the grid ignored", "packs_heads=packs_heads, grid_of_heads=grid_of_heads", "packs_heads=packs_heads"),
        ("padding of another operand", '{f"pad_{x}": flags[', '{f"pad_{dict(q=chr(107), k=chr(118), v=chr(113))[x]}": flags['),
        ("prefetch of V not looked at", '("FFPA_PV_STAGES", flags["FFPA_PV_STAGES"])', '("FFPA_PV_STAGES", None)'),
    ),
    *_in(
        "spec.py",
        "tests/test_plan.py",
        ("causal rows see all keys", "if see.bounded else p.n_k", "if False else p.n_k"),
        ("a window's left end ignored", "first = 0 if see.left < 0 else", "first = 0 if True else"),
    ),
    *_in(
        "mma.py",
        "tests/test_plan.py tests/test_mma_splits.py tests/test_mma_rows.py -k 'not emulated and not shared_memory'",
        ("splits beyond the workspace", "workspace_cap // 2 // max(bytes_of_one, 1)", "workspace_cap // max(bytes_of_one, 1) * 2"),
        ("few keys split", "p.n_k // (2 * shape.keys)", "p.n_k // 8"),
        ("no masks for kernels that know none", "if spec.plain and (p.mask or", "if spec.plain and (False or"),
    ),
    *_in(
        "csrc/attention/work_items.cuh",
        "tests/test_toggles.py -k 'emulated and groups or emulated and streamed'",
        ("batch entries of a grid of heads mixed up", "ptx::grid_x() * (ptx::block_y()", "ptx::grid_x() * (ptx::block_x()"),
        ("heads of a grid of heads mixed up", "ptx::grid_y() * ptx::block_z()", "ptx::block_z()"),
        ("grid of heads: blocks of one head only", "return ptx::grid_x() * ptx::grid_y() * ptx::grid_z();", "return ptx::grid_x();"),
        ("grid of heads larger than the scratch", "most / (y * z)", "most"),
        ENABLE_FFPA_DEBUG="1",
    ),
    *_in(
        "csrc/attention/forward_mma.cuh",
        "tests/test_toggles.py -k 'emulated and (rings or streamed)'",
        ("rings: V's ring begins in K's", "ptx::dynamic_smem() + params.stages * Config::slot_bytes(params)", "ptx::dynamic_smem() + Config::slot_bytes(params)"),
        ("rings: barriers shared", "+ Config::Ring::kBarrierBytes,\n", ",\n"),
        ("rings: V's steps counted on from K's", "next.step = kOnlyValues ? key_steps_ : 0;", "next.step = 0;"),
        ("rings: V brings K", "(!kOnlyValues && next.step < key_steps_)", "true"),
        ENABLE_FFPA_DEBUG="1",
    ),
    *_in(
        "csrc/attention/merge_splits.cuh",
        "tests/test_mma_splits.py tests/test_mma_packed.py -k 'emulated and d512 and not level2 and not 1536'",
        ("merge: last part ignored", "split < params.splits; ++split) {\n      const float weight", "split < params.splits - 1; ++split) {\n      const float weight"),
        ("merge: all parts weigh the same", "ptx::ex2((lse_of(split) - lse) * kLog2e)", "1.0f / params.splits"),
        ("merge: LSE in base 2", "ptx::lg2(sum) * kLn2;", "ptx::lg2(sum);"),
        ("merge: rows of the first sequence for all", "(rows.begin + row) * params.out.row_stride", "row * params.out.row_stride"),
        ("merge: rows past a sequence's end", "if (rows.begin + row >= rows.end) return;", ""),
        ("merge: LSE of another head", "head * params.lse_head_stride", "0"),
        ENABLE_FFPA_DEBUG="1",
    ),
    *_in(
        "csrc/attention/forward_mma_rows.cuh",
        "tests/test_mma_rows.py -k 'shipped or maxima or rules and (64 or 192)'",
        ("rows: scores of hidden keys kept", "hide_unseen(s, block, block.first_row() + warp_row, first_key, lane);", ""),
        ("rows: the last key of a tile hidden", "first_key + kKeys <= common_end", "first_key + kKeys < common_end + kKeys"),
        ("rows: maximum of half of the lanes", "most = larger_of(most, ptx::shfl_xor(most, 2)) * factor;", "most = most * factor;"),
        ("rows: sum of half of the lanes", "sum += ptx::shfl_xor(sum, 2);", ""),
        ("rows: O not rescaled", "tile::scale_rows(o[m][n], alpha);", "(void)alpha;"),
        ("rows: sum not rescaled", "row_sum[m][h] *= alpha[h];", ""),
        ("rows: reference never follows", "grew |= most - reference[m][h] > kMostGrowth;", "grew |= reference[m][h] == -kLargestFloat;"),
        ("rows: reference lazy with f16 sums", "sizeof(float) ? 8.0f : 0.0f", "sizeof(float) ? 8.0f : 20.0f"),
        ("rows: K used before it is there", "wait_for_next_tile();  // K of", "//"),
        ("rows: V used before it is there", "wait_for_next_tile();  // V of", "//"),
        ("rows: V of the next tile in this one's slot", "v_slots_smem + slot_before, tile_index", "v_slots_smem + slot, tile_index"),
        ("rows: K of another slot", "k_slots_smem + slot, tile_index + stages", "k_slots_smem + slot_before, tile_index + stages"),
        ("rows: P's second half from the first", "s[m][2 * depth + half][e] * factor", "s[m][2 * depth][e] * factor"),
        ("rows: factor of scores forgotten", "const float factor = plain ? params.score_factor : 1.0f;", "const float factor = 1.0f;"),
        ("rows: rules thought plain", "params.softcap == 0 && params.mask.kind == MaskKind::kNone && params.score_factor > 0", "params.softcap == 0"),
        ("rows: negative scales thought plain", "&& params.score_factor > 0", ""),
        ("rows: LSE in base 2", "(reference[m][h] + ptx::lg2(sum)) * kLn2", "(reference[m][h] + ptx::lg2(sum))"),
        ("rows: row without keys divided by 0", "sum > 0 ? ptx::rcp(sum) : 0.0f", "ptx::rcp(sum)"),
        ("rows: LSE past the last row", "lane % 4 == 0 && row <= last_row", "lane % 4 == 0 && row <= last_row + 1"),
        ("rows: output past the last row", "last_row + 1 - first_row_of_warp", "last_row + 2 - first_row_of_warp"),
        ("rows: output before it is all there", "  ptx::sync_warp();\n  const int first_row_of_warp", "  const int first_row_of_warp"),
        ENABLE_FFPA_DEBUG="1",
    ),
    *_in(
        "triton_kernels.py",
        "tests/test_triton.py -k 'forward or gradients or packed or softcaps or theirs or without_keys or nan'",
        ("triton: the last key of a window hidden", "(keys <= last)", "(keys < last)"),
        ("triton: a window one too wide", "(keys >= rows + (at.shift - rule.left))", "(keys >= rows + (at.shift - rule.left - 1))"),
        ("triton: dK of a row too many", "(rows >= keys - (at.shift + rule.right))", "(rows >= keys - (at.shift + rule.right) - 1)"),
        ("triton: dK of the next sequence's rows", "if PACKED and EDGE:", "if False:"),
        ("triton: dK of a window one too wide", "(rows <= keys - (at.shift - rule.left))", "(rows <= keys - (at.shift - rule.left) + 1)"),
        ("triton: the LSE of NaN", "seen = row_sum != 0", "seen = row_sum > 0"),
        ("triton: masks missing between the ends", "tl.minimum(first + 1 + after, other_end) // tile * tile", "tl.minimum(first + block + after, other_end) // tile * tile"),
        ("triton: a tile at the ends left out", "tl.where(first < all_begin, first,", "tl.where(first <= all_begin, first,"),
        ("triton: O not rescaled", "acc * alpha[:, None])", "acc)"),
        ("triton: sum not rescaled", "row_sum = row_sum * alpha + tl.sum(p, 1)", "row_sum = row_sum + tl.sum(p, 1)"),
        ("triton: rows without keys not guarded", "if EDGE or MASK != \"none\":", "if False:"),
        ("triton: LSE without the maximum", "top + tl.log(tl.where(seen, row_sum, 1.0))", "tl.log(tl.where(seen, row_sum, 1.0))"),
        ("triton: LSE of scores not scaled", "top = row_max * rule.scale if RAW else row_max", "top = row_max"),
        ("triton: another key/value head", "head_kv = head // sizes.group", "head_kv = head % (sizes.heads // sizes.group)"),
        ("triton: gradient of the LSE forgotten", "total -= tl.load(lse_grads", "total -= 0 * tl.load(lse_grads"),
        ("triton: gradients of rows without keys", "tl.where(blind, INF, row_lse * LOG2E)", "row_lse * LOG2E"),
        ("triton: delta of rows without keys", "tl.where(blind, 0.0, total)", "total"),
        ("triton: Q of rows without keys", "q_tile = tl.where(sighted, q_tile, 0.0)", "q_tile = q_tile"),
        ("triton: dO of rows without keys", "grad_tile = tl.where(sighted, grad_tile, 0.0)", "grad_tile = grad_tile"),
        ("triton: dQ of rows without keys", "tl.where(exponent[:, None] == INF, 0.0, dq_sum * rule.scale)", "dq_sum * rule.scale"),
        ("triton: softcap's slope forgotten", "ds *= 1 - tanh * tanh", "ds *= 1"),
        ("triton: dK not scaled", "dk_sum * rule.scale", "dk_sum"),
        ("triton: dQ not scaled", "dq_sum * rule.scale", "dq_sum"),
        ("triton: a group's last head forgotten", "for member in range(sizes.group):", "for member in range(tl.maximum(sizes.group - 1, 1)):"),
        ("triton: tanh of small scores", "tl.abs(x) < 0.1", "tl.abs(x) < 0.0"),
        ("triton: rows of the next sequence", "length = tl.minimum(tl.maximum(end - first, 0), longest)", "length = longest"),
        ("triton: columns past the head dim", "columns // 8 < D // 8", "columns // 8 <= D // 8"),
    ),
    *_in(
        "triton_attention.py",
        "tests/test_triton.py -k 'forward or gradients or packed or in_turn or without_keys'",
        ("triton: rows of no sequence keep what was there", "    if packed or nothing:  # rows of no sequence", "    if nothing:  # rows of no sequence"),
        ("triton: a first row without keys overlooked", "shift + right < 0", "shift + right < -1"),
        ("triton: a last row without keys overlooked", "total_q - 1 + shift - left >= total_k", "total_q - 1 + shift - left > total_k"),
        ("triton: packed rows without keys overlooked", "self.blind = see.bounded if packed", "self.blind = False if packed"),
        ("triton: statistics end with the rows", "padded = (-(-grad.shape[2] // _MOST_ROWS) + packed) * _MOST_ROWS", "padded = -(-grad.shape[2] // _STATISTICS_ROWS) * _STATISTICS_ROWS"),
        ("triton: edges taken for whole tiles", "edges = self.hides or self.longest_k % tiles.keys != 0", "edges = self.hides"),
        ("triton: a caller's strided gradient taken as it lies", "    if grad.stride(-1) != 1:", "    if False:"),
    ),
    *_in(
        "triton_fp8_kernels.py",
        "tests/test_fp8.py -k 'rules or scales or outputs or as_it_is or without_lse or nan or long_rows'",
        ("fp8: another order of V", ".permute([0, 2, 1, 3, 4]).reshape([KEYS, WIDTH])", ".permute([0, 1, 2, 3, 4]).reshape([KEYS, WIDTH])"),
        ("fp8: another order of a transposed V's keys", "columns % 8 // 2 * 4 + columns % 16 // 8 * 2", "columns % 8 // 2 * 2 + columns % 16 // 8 * 8"),
        ("fp8: K's order and not the masks'", "    if V_AS_IT_IS:\n        columns =", "    if False:\n        columns ="),
        ("fp8: P not in the order of V", ".permute([0, 1, 3, 2, 4])", ".permute([0, 1, 2, 3, 4])"),
        ("fp8: divided by the exact sum", "total = tl.max(row_sum, 1)", "total = exact_sum"),
        ("fp8: the LSE of the rounded sum", "tl.log(tl.where(seen, exact_sum, 1.0))", "tl.log(tl.where(seen, total, 1.0))"),
        ("fp8: K's scale of another block", "k_scales + first // SCALE_BLOCK * k_block", "k_scales + (first // SCALE_BLOCK + 1) // 2 * k_block"),
        ("fp8: V's scale of the first block", "v_scales + first // SCALE_BLOCK * v_block", "v_scales"),
        ("fp8: Q's scale of the first block", "at.batch, head, first_row // SCALE_BLOCK))", "at.batch, head, first_row * 0))"),
        ("fp8: one scale of K forgotten", "        scale *= tl.load(k_scales)", "        scale *= 1.0"),
        ("fp8: O not rescaled", "return acc * alpha[:, None] + product", "return acc + product"),
        ("fp8: outputs past the largest", "    if LARGEST_OUT < INF:", "    if False:"),
        ("fp8: scales of nothing", "    if RAW:\n        natural = tl.maximum", "    if False:\n        natural = tl.maximum"),
        ("fp8: the LSE of NaN", "seen = total != 0", "seen = total > 0"),
    ),
    *_in(
        "triton_fp8.py",
        "tests/test_fp8.py -k 'rules or scales or strided or as_it_is'",
        ("fp8: K of strided heads in one piece", "if n % 16 or not in_one_piece or not has_descriptor(k):", "if n % 16 or not has_descriptor(k):"),
        ("fp8: keys past the last sixteen", "if n % 16 or not in_one_piece", "if not in_one_piece"),
        ("fp8: blocks scaled alike", '"block" if scale.shape[2] > 1 and scale.stride(2) else', '"block" if False else'),
    ),
    *_in(
        "triton_persistent.py",
        "tests/test_triton_persistent.py",
        ("persistent: scratch read before it is written", "tl.where(first_key > begin, ROWS, 0)", "tl.where(first_key >= begin, ROWS, 0)"),
        ("persistent: scratch read that no tile wrote", "tl.where(begin < end, ROWS, 0)", "tl.where(begin <= end, ROWS, 0)"),
        ("persistent: scratch shared by all cores", "core.to(tl.int64) * (ROWS * WIDTH_V)", "core.to(tl.int64) * 0"),
        ("persistent: maxima shared by all cores", "max_gmem += core * ROWS", "max_gmem += core * 0"),
        ("persistent: O not rescaled", "acc * alpha[:, None])", "acc)"),
        ("persistent: another key/value head", "head_kv = head // sizes.group", "head_kv = head % (sizes.heads // sizes.group)"),
        ("persistent: only the first task of a core", "row_blocks * sizes.heads * batches, cores", "tl.minimum(cores, row_blocks * sizes.heads * batches), cores"),
        ("persistent: the last slice forgotten", "rows_end = tl.minimum(ROWS, at.n_q - first_row)", "rows_end = tl.minimum(ROWS, at.n_q - first_row) // SLICE * SLICE"),
    ),
    *_in("triton_attention.py", "tests/test_triton_persistent.py", ("persistent: cap ignored", "min(flags[\"FFPA_TRITON_CORES\"], most_cores)", "flags[\"FFPA_TRITON_CORES\"]")),
    *_in(
        "choice.py",
        "tests/test_choice.py",
        ("choice: rows are never few", "plan.splits > 1 and blocks", "plan.splits > 99 and blocks"),
        ("choice: Triton's forward where it is not measured", 'elif p.arch != "sm_90":', "elif False:"),
        ("choice: experiments lost to SDPA", "or asks_for_mma or widest", "or widest"),
    ),
    *_in(
        "bench/truth.py",
        "tests/test_bench.py",
        ("bench: f16 sums judged as f32", "self._base(sums)", "self._base(_F32)"),
        ("bench: the last head not looked at", "(w.batch - 1, w.heads_kv - 1)", "(0, 0)"),
    ),
    *_in("bench/flops.py", "tests/test_bench.py", ("bench: causal counted as the half square", "(n_kv * (n_kv + 1) - unseen * (unseen + 1)) // 2", "n_q * n_kv // 2")),
    *_in("bench/timing.py", "tests/test_bench.py", ("bench: no call to settle the clock", "_SETTLED_AFTER if settle else 0.0", "0.0")),
    *_in(
        "bench/chip.py",
        "tests/test_bench.py",
        ("bench: registers of f16 sums", "out // (2 if", "out // (1 if"),
        ("bench: whole rows of another tile", "head_dim=d, rows=64, keys=64", "head_dim=d, rows=64, keys=128"),
        ("bench: shared memory without V's stages", "plan.q_resident, plan.value_stages)", "plan.q_resident)"),
    ),
    *_in(
        "bench/emulation.py",
        "tests/test_bench.py tests/test_ffpa_attn.py -k 'emulator'",
        ("bench: bytes per FLOP of another workload", "/ nominal_flops(whole)", "/ nominal_flops(w)"),
        ("bench: errors of the workload overlooked", '"problem": of_workload.problem or of_tiles.problem', '"problem": of_tiles.problem'),
        ("bench: errors between tiles overlooked", '"problem": of_workload.problem or of_tiles.problem', '"problem": of_workload.problem'),
    ),
    *_in(
        "bench/readme.py",
        "tests/test_bench.py",
        ("bench: a dirty tree is shown", '(record.source["tree"] is None or "dirty" in record.source["tree"])', '(record.source["tree"] is None)'),
        ("bench: an old picture is shown", 'parts = [record.read_bytes(), *(', 'parts = [*('),
    ),
    *_in(
        "bench/cli.py",
        "tests/test_ffpa_attn.py -k 'fails or failure or emulator or ctrl'",
        ("bench: a wrong row is no failure", "130 if record.interrupted else 1 if wrong else 0", "130 if record.interrupted else 0"),
        ("bench: the emulator's rows unchecked", "checked += [use for", "_ = [use for"),
        ("bench: the small workload's kernels", "bench.run(w, full,", "bench.run(w, w,"),
    ),
    *_emulator(
        "shared_memory.cpp",
        ("copies to another block: the source written once they have landed", "word.copied_time > warp.clock.at[kAsyncAgent]", "false"),
    ),
    *_emulator(
        "tma.cpp",
        ("copies to another block: the source needs no fence", "  note_bulk_read_begin(from, source, bytes, warp, lane, site);\n", ""),
        ("copies to another block: over what is not read", "  note_write(to, destination, bytes, warp, lane, site, WriteKind::kAsyncIssue);\n  if (machine->options.poison) std::memset(target", "  if (machine->options.poison) std::memset(target"),
        ("copies to another block: a block that has exited", "if (has_exited(to))", "if (false)"),
    ),
    *_emulator(
        "mbarrier.cpp",
        ("tracked copies: phase ends with the first arrival", "if (barrier.copy_arrivals.empty() || barrier.pending_arrivals != barrier.copy_arrivals.size()) return;", ""),
        ("tracked copies: never land", "land_tracked_copies(*arrival.lane, arrival.time);", ""),
        ("tracked copies: a waiter learns nothing", "known = std::max(known, arrival.time);", ""),
        ("tracked copies: a waiter learns all the thread did", "barrier.copy_arrivals.push_back(", "barrier.arriving.join(current->warp->clock);\n  barrier.copy_arrivals.push_back("),
        ("tracked copies: those issued after the arrival, too", "current->copy_time++", "++current->copy_time"),
        ("tracked copies: arrivals not counted", "if (barrier.pending_arrivals == barrier.copy_arrivals.size()) {", "if (!barrier.pending_arrivals) {"),
        ("tracked copies: an ordinary arrival last", "land_copies_if_due(barrier, block, address & kOffsetMask);\n  complete", "complete"),
        ("bytes on sm_80's mbarriers", 'require_arch(kSm90, "mbarrier.arrive.expect_tx", site);', ""),
        ("other blocks' mbarriers on sm_80", 'require_arch(kSm90, "mapa", site);', ""),
    ),
    *_emulator(
        "memory_ops.cpp",
        ("tracked copies: all of the lane's", "if (copy.time > time) break;", ""),
        ("tracked copies: not known to be complete", "copy.complete = true;", ""),
        ("tracked copies: complete means awaited", "complete(lane, copy, Completion::kTracked)", "complete(lane, copy, Completion::kAwaited)"),
    ),
    *_emulator(
        "shared_memory.cpp",
        ("tracked copies: known to all", "word.copy_time && word.copy_time <= warp.clock.at[copies_of(word.writer)]", "word.copy_time"),
        ("tracked copies: known when it was the last copy", "word.copy_time = 0;", ""),
        ("tracked copies: a late wait for what is overwritten", "if (!word.in_flight || word.writer != warp.cluster_id || word.writer_lane != lane) continue;", ""),
        ("tracked copies: known only until awaited", "word.copy_time = copy_time;\n    if (completion == Completion::kTracked) continue;", "if (completion == Completion::kTracked) {\n      word.copy_time = copy_time;\n      continue;\n    }"),
    ),
    *_backward(
        "csrc/tile/box_ring.cuh",
        ("box ring: a slot is filled while it is read", "      ptx::mbarrier_wait(ring_.empty(at_.slot), at_.parity ^ 1);\n      ptx::mbarrier_arrive_expect_tx(full", "      ptx::mbarrier_arrive_expect_tx(full"),
        ("box ring: products before their boxes", "    ptx::mbarrier_wait(ring_.full(at_.slot), at_.parity);\n", ""),
        ("box ring: a slot given back while products read it", "release(slot_before(2));", "release(slot_before(1));"),
        ("box ring: all lanes wait for zeros", "    if (lane_ == 0) ptx::mbarrier_wait(ring_.empty(at_.slot), at_.parity ^ 1);\n    ptx::sync_warp();\n    FFPA_NO_UNROLL", "    ptx::mbarrier_wait(ring_.empty(at_.slot), at_.parity ^ 1);\n    FFPA_NO_UNROLL"),
        ("box ring: rows that must not count stay", "if (live >> row & 1) continue;", "continue;"),
        ("box ring: zeros without a proxy fence", "    ptx::fence_proxy_async();\n    ptx::sync_warp();\n    if (lane_ == 0) ptx::mbarrier_arrive(ring_.full(at_.slot));\n    at_.advance();\n  }\n\n  // A step of zeros", "    ptx::sync_warp();\n    if (lane_ == 0) ptx::mbarrier_arrive(ring_.full(at_.slot));\n    at_.advance();\n  }\n\n  // A step of zeros"),
        ("row stores: rows are overwritten before they are read", "    if (lane_ == 0) ptx::bulk_wait_group_read<kParts - 1>();  // those that were there are read\n", ""),
        ("row stores: copies before all lanes have written", "    ptx::fence_proxy_async();\n    ptx::sync_warp();\n    if (lane_ == 0) {\n      send(part_smem);", "    ptx::fence_proxy_async();\n    if (lane_ == 0) {\n      send(part_smem);"),
        ("row stores: always the first part", "    part_ = (part_ + 1) % kParts;\n", ""),
        ("box ring: the last step is left out", "for (int step = 0; step < steps; ++step) {\n      begin_step", "for (int step = 0; step < max_of(steps - 1, 1); ++step) {\n      begin_step"),
    ),
    *_backward(
        "csrc/attention/backward_rows.cuh",
        ("backward rows: dLSE with the wrong sign", "delta -= float_from_bits", "delta += float_from_bits"),
        ("backward rows: LSE in base e", "lse * kLog2e", "lse"),
        ("backward rows: rows without keys count", "live |= uint32_t(sees_keys) << i;", "live |= 1u << i;"),
        ("backward rows: what lies behind a sequence counts", "live |= uint32_t(!attention.is_packed()) << i;", "live |= 1u << i;"),
        ("backward rows: columns past the first 256 are left out", "column < attention.d_v; column += 32 * 8", "column < min_of(attention.d_v, 256); column += 32 * 8"),
    ),
    *_backward(
        "csrc/attention/backward_pairs.cuh",
        ("backward pairs: pairs that do not count pass on NaN", "  if (all_count) return;", "  return;"),
        ("backward pairs: rows without keys have P", "if (lse2[e / 2] == kInfinity) scores", "if (false) scores"),
        ("backward pairs: slopes of pairs that do not count", "where_not_0(p[i], slopes[i])", "slopes[i]"),
        ("backward pairs: dS without delta", "of_pair[i % 2 * 2] - delta[i % 2],", "of_pair[i % 2 * 2],"),
        ("backward pairs: rows that do not exist are read", "if (r <= rows.last_row()) ptx::ld_global_8", "ptx::ld_global_8"),
    ),
    *_backward(
        "csrc/attention/backward_pairs.cuh",
        ("backward pairs: dS without the derivative of the cap", "slope[e] = 1 - t * t;", "slope[e] = 1;"),
        only="hopper and not cuda and gradients and softcap",
    ),
    *_backward(
        "csrc/attention/backward_scores_wgmma.cuh",
        ("backward scores: the slopes of a cap come before P is stored", "        store(arguments_.p, box, p_of_box);\n        if (attention_.softcap > 0) apply_slopes<Element>(p_of_box, slopes);", "        if (attention_.softcap > 0) apply_slopes<Element>(p_of_box, slopes);\n        store(arguments_.p, box, p_of_box);"),
        only="hopper and not cuda and gradients and softcap",
    ),
    *_backward(
        "csrc/attention/backward_pairs.cuh",
        ("backward pairs: rows that an LSE leaves out are plain", "return all_seen && all_count", "return all_seen"),
        ("backward pairs: one row of a lane counts for both", "lse2[0] != kInfinity && lse2[1] != kInfinity", "lse2[0] != kInfinity"),
        ("backward pairs: dP as fp16", "if constexpr (std::is_same_v<Element, Half>)", "if constexpr (false)"),
        only="not cuda and (leaves_out or beyond_its_range)",
    ),
    *_backward(
        "csrc/attention/backward_tiles.cuh",
        ("backward tiles: nobody writes zeros", "has_visible_pairs(rows_of_tile(params_, entry_, batch_, tile, 0, kRowTile), first_key)", "has_visible_pairs(rows, first_key)"),
        ("backward tiles: the last key tile is left out", "min_of(seen.end, keys.end / kKeyTile) - first_key_tile_", "min_of(seen.end, keys.end / kKeyTile) - first_key_tile_ - 1"),
        ("backward tiles: rows of dK end early", "const int end = min_of(min_of(last_key - entry.nearest + 1", "const int end = min_of(min_of(last_key - entry.nearest"),
        ("backward tiles: a chunk's later heads are left out", "ceil_div(min_of(params.end_tile, all.end()) - all.first, all.of_head)", "max_of(params.first_tile - all.first, 0) / all.of_head + 1"),
    ),
    *_backward(
        "csrc/attention/backward_tiles.cuh",
        ("backward tiles: dQ over the keys of other chunks", "min_of(visible_keys_end(rows), keys.end), step);", "visible_keys_end(rows), step);"),
        ("backward tiles: dQ over the keys of earlier chunks again", "whole_steps(max_of(visible_keys_begin(rows), keys.begin),", "whole_steps(visible_keys_begin(rows),"),
        only="not cuda and smaller_than",
    ),
    *_backward(
        "csrc/attention/gradient_writer.cuh",
        ("gradient writer: sums of the last chunk alone", "continues_(tile.in_chunk(params).first > tile.summed(params).first)", "continues_(false)"),
        ("gradient writer: results after every chunk", "is_last_(tile.in_chunk(params).end >= tile.summed(params).end)", "is_last_(true)"),
        ("gradient writer: sums begin with the first chunk", "tile.in_chunk(params).first > tile.summed(params).first", "tile.in_chunk(params).first > 0"),
        only=_PACKED_CHUNKS,
    ),
    *_backward(
        "csrc/attention/packed_tiles.cuh",
        ("packed tiles: sequences share tiles", "row / rows + sequence;", "row / rows;"),
        ("packed tiles: the first tile is the sequence before's", "first_of_mine <= tile", "first_of_mine < tile"),
        ("packed tiles: a sequence ends with the first one of all", "first_tile_of_sequence(packed, sequence + 1, rows)", "first + 1"),
        only=_PACKED_CHUNKS,
    ),
    *_backward(
        "csrc/attention/backward_tiles.cuh",
        ("packed backward: bands go on in the next head", "clamp(place.tiles_of_head - place.tile, 1, kBand)", "kBand"),
        ("packed backward: bands stay in the first sequence", "batch_ = min_of(batch_ + 1, params_.attention.batch - 1);", ""),
        ("packed backward: live rows of the first sequence", "first_tile_of_sequence(attention.packed_q, batch, kLiveRows);", "0;"),
        ("packed backward: the last sequence of a chunk is left out", "key_tiles_of(params_, last_batch).end", "key_tiles_of(params_, last_batch).first"),
        ("packed backward: the first sequence of a chunk is left out", "key_tiles_of(params_, first_batch).first", "key_tiles_of(params_, first_batch).end"),
        ("packed backward: keys of the chunk as if of one sequence", "max_of(params.first_key - before, 0)", "params.first_key"),
        ("packed backward: rows of the first sequence in the workspace", "row_tiles_of(params, tile.batch).first_of(head) - params.first_tile", "head * row_tiles_of(params, tile.batch).of_head - params.first_tile"),
        ("packed backward: sums end with the first head", "return {all.first, all.end()};", "return {all.first, all.first_of(1)};"),
        only=_PACKED_CHUNKS,
    ),
    *_backward(
        "csrc/attention/backward_rows.cuh",
        ("packed backward: words of live rows count from the first sequence", "    word = of_sequence.tile;\n", ""),
        only=_PACKED_CHUNKS,
    ),
    *_backward(
        "csrc/attention/backward_scores_wgmma.cuh",
        ("backward scores: the block ends before its copies", "    stores.wait();\n  }", "  }"),
        ("backward scores: logits times the factor again", "plain ? attention_.score_factor : 1.0f", "attention_.score_factor"),
    ),
    *_backward(
        "csrc/attention/score_tile_queue.cuh",
        ("tile queue: a tile is overwritten while it is used", "    ptx::mbarrier_wait(empty(place_), parity_ ^ 1);\n", ""),
        ("tile queue: a tile is used before it is there", "    ptx::mbarrier_wait(full(place_), parity_);\n", ""),
    ),
    *_backward(
        "csrc/attention/gradient_writer.cuh",
        ("gradient writer: sums of earlier chunks are left out", "if (continues_) tile::add_fragment", "if (false) tile::add_fragment"),
        ("gradient writer: dV scaled as dK", "tile.product == Product::kDv ? 1.0f : params.scale", "params.scale"),
    ),
    *_backward(
        "csrc/attention/backward_products_wgmma.cuh",
        ("backward products: keys behind a sequence stay", "live_box_rows(rows.n_k() - key, attention_.is_packed())", "~uint64_t{0}"),
        ("backward products: all rows are said to count", "if (all_live(live, steps)) {", "if (true) {"),
        ("backward products: nothing for a tile without keys", "    if (run.begin == run.end) producer.bring_zeros();\n", ""),
    ),
    *_backward(
        "csrc/attention/backward_products_wgmma.cuh",
        ("backward products: the block ends before its copies", "    stores.wait();\n", ""),
        ("backward products: columns behind the last whole box", "        if constexpr (kWhole < kColumns / 8) write(std::integral_constant<int, kWhole>());\n", ""),
        only=_RESULTS_OF_PRODUCTS,
    ),
    *_backward(
        "csrc/attention/gradient_writer.cuh",
        ("gradient writer: boxes of rows that do not all exist", " && rows_ - row >= 16;", ";"),
        ("gradient writer: boxes of 32-bit gradients", " && !params_.float_gradients", ""),
        ("gradient writer: boxes of a last chunk's sums", "is_last_ && !continues_", "is_last_"),
        ("gradient writer: boxes of every chunk's sums", "is_last_ && !continues_", "!continues_"),
        only=_RESULTS_OF_PRODUCTS,
    ),
    *_backward(
        "csrc/tile/box_ring.cuh",
        ("shared boxes: a slot is empty when one block has read it", "kClusterBlocks * kReadingGroups * kGroupThreads", "kConsumerGroups * kGroupThreads"),
        ("shared boxes: one barrier for what has landed in any slot", "barriers_smem + (2 * kStages + i) * 8", "barriers_smem + 2 * kStages * 8"),
        ("shared boxes: arrivals in the own block alone", "mbarrier_arrive_remote(ring_.empty(slot), lane_)", "mbarrier_arrive(ring_.empty(slot))"),
        only="tiles_of_products and 256 and not cuda",
    ),
    *_backward(
        "csrc/attention/backward_products_wgmma.cuh",
        ("shared boxes: a block ends before the other", "    if constexpr (Ring::kClusterBlocks > 1) ring_.meet();\n", ""),
        ("shared boxes: both blocks bring the same", "rank_ * Ring::kOwnBoxesB + i", "i"),
        ("shared boxes: both blocks have the same rows of dQ", "* kRowTile + rank_ * kRows;", "* kRowTile;"),
        ("shared boxes: both blocks have the same keys", "rank_ * kRows;  // of P or dS", "0;"),
        ("shared boxes: both blocks write the same rows", "const int row = rank_ * kRows + ", "const int row = "),
        only="tiles_of_products and 256 and not cuda",
    ),
    *_mask_gradient(
        "backward.py",
        ("dS of a mask: tiles without visible pairs as they are", "            ds[: chunk.pairs].zero_()  # tiles without visible pairs are not written\n", "            pass\n"),
        ("dS of a mask: pairs of every chunk", " and chunk.of_q  # which every pair does once", ""),
        ("dS of a mask: nothing where there are no pairs", "for grad in (dq, dk, dv) if d_mask is None else (dq, dk, dv, d_mask):", "for grad in (dq, dk, dv):"),
    ),
    *_mask_gradient(
        "backward_mask.py",
        ("dS of a mask: always the first heads of a group", "head_kv * group + first_head", "head_kv * group"),
        ("dS of a mask: whole batch entries from the middle of one", "1 if head_kv else max(len(entries) // heads_kv, 1)", "max(len(entries) // heads_kv, 1)"),
        ("dS of a mask: the last chunk's alone", "(total.add_ if self.is_shared else total.copy_)", "total.copy_"),
        ("dS of a mask: rows behind the last", ": n_q - first_row, : n_k", ": n_q, : n_k"),
    ),
    *_mask_gradient(
        "ops.py",
        ("dS of a mask: with the softcap's slope", "None if plan.rule.softcap else d_mask", "d_mask"),
    ),
    *_in(
        "backward_chunks.py",
        "tests/test_backward.py -k 'chunks or tiles'",
        ("chunks: sums beside a full workspace", "left = cap - partial(key_parts[0][1])", "left = cap"),
        ("chunks: heads are cut anywhere", "    if most >= of_head:\n", "    if most >= of_head and False:\n"),
        ("chunks: twice as many entries as fit", "most = min(cap // of_entry, work.entries)", "most = min(2 * cap // of_entry, work.entries)"),
    ),
    *_two_phase(
        "csrc/attention/forward_two_phase.cuh",
        ("two-phase: upper rows of O stay as they were", "          out[0][4 * n + 2 * h] *= factor;\n", ""),
        ("two-phase: O does not follow its references", "growth(float_from_bits(ptx::ld_global_4(now - kRows)), float_from_bits(ptx::ld_global_4(now)))", "growth(float_from_bits(ptx::ld_global_4(now)), float_from_bits(ptx::ld_global_4(now)))"),
        ("two-phase: moves of one warp alone", "MovedTiles::next<tile::kGroupWarps>", "MovedTiles::next<1>"),
        ("two-phase: from every move the product begins anew", "max_of(chunk.steps(tile, next), 1), tile > 0);", "max_of(chunk.steps(tile, next), 1));"),
        ("two-phase: a reference kept for one tile alone", "scratch().references(ptx::block_x()) + tile_of_chunk * kRows + row;", "scratch().references(ptx::block_x()) + row;"),
        ("two-phase: O of chunks not rescaled", "growth(before[1], state.reference[1])", "1.0f"),
        ("two-phase: maxima of a thread's keys", "      maximum[h] = larger_of(maximum[h], ptx::shfl_xor(maximum[h], 2));\n", ""),
        ("two-phase: nobody waits for P to be written", "            stores.wait();\n", ""),
        ("two-phase: P announced, not fenced", "            ptx::fence_proxy_async_global();\n", ""),
        ("two-phase: the producer does not wait for P", "            ptx::bar_sync(kCompleteBarrier, kCompleteThreads);\n            ptx::fence_proxy_async_global();\n            bring_values(producer, kept.get(), chunk);", "            bring_values(producer, kept.get(), chunk);\n            ptx::bar_sync(kCompleteBarrier, kCompleteThreads);\n            ptx::fence_proxy_async_global();"),
        ("two-phase: moves read before the others have noted them", "            ptx::bar_sync(group_barrier(group), tile::kGroupThreads);  // all that its warps have noted is there\n", ""),
        ("two-phase: moves noted before the others have read", "            ptx::bar_sync(group_barrier(group), tile::kGroupThreads);  // all have read it\n", ""),
        ("two-phase: V behind a packed sequence as it is", "live_box_rows(rows.n_k() - key, params_.is_packed())", "~uint64_t{0}"),
        ("two-phase: nothing for rows without keys", "      if (chunk.steps() == 0) producer.bring_zeros();\n", "      if (chunk.steps() == 0) continue;\n"),
        ("two-phase: every second column group", "      column += now * tile::kBox;", "      column += 2 * now * tile::kBox;"),
        ("two-phase: boxes of rows that do not all exist", " && rows.last + 1 - first >= Config::Stores::kRows", ""),
        ("two-phase: boxes of a last chunk's O", "if (chunk.is_first && chunk.is_last", "if (chunk.is_last"),
        ("two-phase: boxes of the first chunk's O", "if (chunk.is_first && chunk.is_last", "if (chunk.is_first"),
        ("two-phase: the block ends before its copies", "    stores.wait();\n  }", "  }"),
        ("two-phase: few columns computed as many", "if (boxes == Config::kValueBoxes) {", "if (boxes > 0) {"),
        ("two-phase: heads of a group mixed up", "rows.head() / params_.group, map_batch(rows)", "rows.head() % (params_.heads_q / params_.group), map_batch(rows)"),
        ("two-phase: the tensor's batch entry for packed sequences", "return params_.is_packed() ? 0 : rows.batch();", "return rows.batch();"),
    ),
    *_fused(
        "csrc/attention/forward_fused.cuh",
        ("fused: the block ends before its copies", "    stores.wait();\n", ""),
        ("fused: Q before it is there", "          ptx::mbarrier_wait(queries().full(), parity);\n", ""),
        ("fused: Q given back before the last product with it", "              queue_scores(scores, group);\n", "              if (tile + 1 == tiles.end) queries().release(lane_);\n              queue_scores(scores, group);\n"),
        ("fused: O does not follow its references", "if (moved) rescale", "if (false) rescale"),
        ("fused: V is given back before its product is done", "              ptx::wgmma_wait_group<0>();\n              slots_.release(kSlotsOfValues);\n              if (moved)", "              slots_.release(kSlotsOfValues);\n              ptx::wgmma_wait_group<0>();\n              if (moved)"),
        ("fused: K is given back before its product is done", "              ptx::wgmma_wait_group<1>();\n              slots_.release(kSlotsOfKeys);\n", "              slots_.release(kSlotsOfKeys);\n              ptx::wgmma_wait_group<1>();\n"),
        ("fused: P while its product reads it", "              ptx::wgmma_wait_group<1>();\n              slots_.release(kSlotsOfKeys);\n", "              ptx::wgmma_wait_group<1>();\n              slots_.release(kSlotsOfKeys);\n              pack_probabilities<Element>(p, scores);\n"),
        ("fused: V behind a packed sequence as it is", "(tile - 1) * kKeys, n_k);", "(tile - 1) * kKeys, kLargestInt);"),
        ("fused: the first tile adds to O", "queue_product(out, p, tile > tiles.first + 1);", "queue_product(out, p, true);"),
        ("fused: a row tile without keys keeps what registers held", "for (float& sum : out) sum = 0;", "for (float& sum : out) sum = sum;"),
    ),
    *_in(
        "csrc/attention/forward_fused.cuh",
        "tests/test_fused.py -k 'value_columns128 and columns192 and bf16'",
        ("fused: a product with V as wide as Q", "kPartColumns = Config::kValuePartBoxes * tile::kBox", "kPartColumns = Config::kPartBoxes * tile::kBox"),
    ),
    *_in(
        "fused.py",
        "tests/test_fused.py -k what_runs",
        ("fused: O that is wider than the kernel's", "and p.d_v <= widths[1])", ")"),
    ),
    *_fused(
        "csrc/tile/box_ring.cuh",
        ("fused: slots before they have landed", "    ptx::mbarrier_wait(ring_.full(at_.slot), at_.parity);\n    const uint64_t boxes", "    const uint64_t boxes"),
        ("fused: a slot given back twice", "      if (lane_ == 0) ptx::mbarrier_arrive(ring_.empty(released_.slot));\n      released_.advance();\n", "      if (lane_ == 0) ptx::mbarrier_arrive(ring_.empty(released_.slot));\n"),
    ),
    *_fused(
        "csrc/attention/fused_steps.cuh",
        ("fused: boxes of rows that do not all exist", " && rows.last + 1 - first >= Stores::kRows) {", ") {"),
        ("fused: Q is overwritten while it is read", "      ptx::mbarrier_wait(empty(), parity);\n", ""),
        ("fused: O of the upper rows follows those of the lower", "factor[i / 2 % 2]", "factor[0]"),
        ("fused: all tiles are plain", "all_seen && params.softcap == 0", "params.softcap == 0"),
        ("fused: negative scales are plain", " &&\n                     params.score_factor * scale > 0;", ";"),
        ("fused: maxima of a thread's keys", "    maximum = larger_of(maximum, ptx::shfl_xor(maximum, 2));\n", ""),
    ),
    *_pair(
        "csrc/attention/forward_pair.cuh",
        ("pair: a block ends before the other", "    meet();  // nobody leaves while the other block still copies or arrives there\n", ""),
        ("pair: the block ends before its copies", "    stores.wait();\n", ""),
        ("pair: each block takes row tiles of its own", "      if (rank_ == 0) return items.take", "      return items.take"),
        ("pair: S of the first keys in both blocks", "place, first_key(tile, rank_));", "place, first_key(tile, 0));"),
        ("pair: V of the other keys first", "first_key(tile - 1, rank_), n_k);\n        bring_values(producer, place, first_key(tile - 1, 1 - rank_)", "first_key(tile - 1, 1 - rank_), n_k);\n        bring_values(producer, place, first_key(tile - 1, rank_)"),
        ("pair: V behind a packed sequence as it is", "live_box_rows(end - key, params_.is_packed())", "~uint64_t{0}"),
        ("pair: the first columns of V in both blocks", "place, rank_ * kOwnColumns + box", "place, box"),
        ("pair: the first columns of O from both blocks", "at.row(), rank_ * kOwnColumns,", "at.row(), 0,"),
        ("pair: keys hidden as if they were the other block's", "kept.get(), first_key(tile, rank_), at.row()", "kept.get(), first_key(tile, 1 - rank_), at.row()"),
        ("pair: a message over one that is not read", "    ptx::mbarrier_wait(message_empty(group), (messages_ & 1) ^ 1);\n", ""),
        ("pair: a message before it is there", "    ptx::mbarrier_wait(message_full(at.group()), messages_ & 1);\n", ""),
        ("pair: a message of what is not fenced", "    ptx::fence_proxy_async();\n    ptx::sync_warp();\n    if (ptx::elect_one()) {", "    ptx::sync_warp();\n    if (ptx::elect_one()) {"),
        ("pair: P acknowledged before its product is done", "              ptx::wgmma_wait_group<0>();\n              slots_.release(Config::kValueParts);\n              acknowledge(at.group());\n            }", "              acknowledge(at.group());\n              ptx::wgmma_wait_group<0>();\n              slots_.release(Config::kValueParts);\n            }"),
        ("pair: sums not acknowledged", "    acknowledge(at.group());\n  }\n", "  }"),
        ("pair: P over rows of O on their way", "    if (lane_ == 0) ptx::bulk_wait_group_read<0>();  // rows of O of the row tile before\n", ""),
        ("pair: Q given back before the last S", "              follow(out, of_out, state.reference);\n              queue_scores", "              follow(out, of_out, state.reference);\n              if (tile + 1 == tiles.end) queries().release(lane_);\n              queue_scores"),
        ("pair: K given back before its product is done", "              ptx::wgmma_wait_group<1>();\n              slots_.release();\n", "              slots_.release();\n              ptx::wgmma_wait_group<1>();\n"),
        ("pair: O does not follow the other block's references", "    follow(out, of_out, larger);\n    lower_their_p", "    lower_their_p"),
        ("pair: O does not follow the last tile's references", "            queries().release(lane_);\n            follow(out, of_out, state.reference);\n", "            queries().release(lane_);\n"),
        ("pair: P of smaller references as it came", "    if (ptx::vote_any(lower[0] || lower[1])) {", "    if (false) {"),
        ("pair: P of the upper rows lowered as that of the lower", "const float factor = growth(theirs[h], references[h]);", "const float factor = growth(theirs[0], references[0]);"),
        ("pair: P lowered behind the product's back", "      ptx::fence_proxy_async();\n    }\n", "    }\n"),
        ("pair: the product of P that another warp still lowers", "    ptx::bar_sync(1 + at.group(), tile::kGroupThreads);  // the product reads the rows of all its warps\n", ""),
        ("pair: P that came too early as it was", "              lower(scores, late);\n", ""),
        ("pair: sums do not follow the other block's references", "        state.sum[h] *= late[h];\n", ""),
        ("pair: sums of one block's keys", "state.sum[h] + note(at, r)", "state.sum[h]"),
    ),
    *_pair(
        "csrc/attention/item_queue.cuh",
        ("item queue: a copy of what is not fenced", "        ptx::fence_proxy_async();\n", ""),
        ("item queue: said in the own block", "ptx::mbarrier_arrive_remote(empty(place()), 0)", "ptx::mbarrier_arrive(empty(place()))"),
    ),
    *_two_phase(
        "csrc/attention/two_phase_tiles.cuh",
        ("two-phase: moves of the first 32 tiles alone", "warp * kBytes + tile / 32 * 4);", "warp * kBytes);"),
        ("two-phase: the first chunk adds scratch", "if (!chunk.is_first) tile::add_fragment", "tile::add_fragment"),
    ),
    *_two_phase(
        "csrc/attention/row_tiles.cuh",
        ("two-phase: the last heads taken for as many as the others", "min_of(together_, entries_ - section * together_)", "together_"),
    ),
    *_fused(
        "csrc/attention/row_state.cuh",
        ("row state: sums of a thread's keys", "    sum += ptx::shfl_xor(sum, 2);\n", ""),
        ("row state: sums not rescaled", "    sum[h] *= growth(before, reference[h]);\n", ""),
        ("row state: a move that nobody notes", "return before != -kInfinity && reference[h] != before;", "return false;"),
        ("row state: a row without keys refers to -inf", "return reference == -kInfinity ? 0.0f : reference;", "return reference;"),
        ("row state: references never move", "if (maximum - before > lazy_growth)", "if (before == -kInfinity && maximum > before)"),
    ),
    *_two_phase(
        "csrc/attention/head_rows.cuh",
        ("two-phase: rows behind the keys", "begin < end ? Run{begin / step * step, end} : Run{0, 0}", "Run{begin / step * step, max_of(end, begin / step * step)}"),
    ),
    *_two_phase(
        "csrc/tile/box_ring.cuh",
        ("row stores: no proxy fence", "    ptx::fence_proxy_async();\n    ptx::sync_warp();\n    if (lane_ == 0) {\n      send(part_smem);", "    ptx::sync_warp();\n    if (lane_ == 0) {\n      send(part_smem);"),
        ("two-phase: a slot given back while products read it", "        ptx::wgmma_wait_group<0>();\n        release(slot_before(1));\n      } else {", "        release(slot_before(1));\n      } else {"),
    ),
    *_two_phase(
        "csrc/attention/item_queue.cuh",
        ("item queue: every block takes all", "item = ptx::atom_add_global(counter_gmem, 1);", "item = items_;"),
        ("item queue: overwritten before all have read", "      ptx::mbarrier_wait(empty(place()), parity() ^ 1);\n", ""),
        ("item queue: read before it is there", "    ptx::mbarrier_wait(full(place()), parity());\n", ""),
        ("item queue: the other parity", "return items_ / kPlaces % 2;", "return items_ % 2;"),
    ),
    *_two_phase(
        "csrc/attention/forward_two_phase_mma.cuh",
        ("two-phase mma: O does not follow its references", "      follow_references(out, tile);\n", ""),
        ("two-phase mma: O follows the references of other rows", "references + m * 16 + h * 8;", "references + m * 16;"),
        ("two-phase mma: a row tile read before it is there", "    ptx::sync_block();\n    return int(", "    return int("),
        ("two-phase mma: nobody waits for P", "        ptx::sync_block();  // they are there\n", ""),
        ("two-phase mma: maxima of a quarter of the keys", "combine(values[i], value)", "values[i]"),
        ("two-phase mma: maxima written while others read", "    sync_quarters();  // all have read the maxima of the tile before\n", ""),
        ("two-phase mma: maxima read before they are there", "    sync_quarters();\n    FFPA_UNROLL\n    for (int i = 0; i < 2; ++i) {\n      FFPA_UNROLL", "    FFPA_UNROLL\n    for (int i = 0; i < 2; ++i) {\n      FFPA_UNROLL"),
        ("two-phase mma: sums of a quarter of the keys", "    share(state.sum, [](float a, float b) { return a + b; });\n", ""),
        ("two-phase mma: a reference kept for one tile alone", "keep_references(tile, state)", "keep_references(0, state)"),
        ("two-phase mma: a negative scale taken for plain", " && params_.score_factor > 0) return", ") return"),
        ("two-phase mma: P without the scale", "c[2 * h + 1] * factor - reference", "c[2 * h + 1] - reference"),
        ("two-phase mma: the same keys again", "begin_keys(chunk.first_tile + tile + 1)", "begin_keys(chunk.first_tile + tile)"),
        ("two-phase mma: V behind a packed sequence as it is", "return key < b_.rows && chunk * tile::kChunkElements < b_.columns;", "return chunk * tile::kChunkElements < b_.columns;"),
        ("two-phase mma: too many columns for the narrow core", "<= NarrowCore::kColumns", "<= 2 * NarrowCore::kColumns"),
        ("two-phase mma: O of all columns in one place", "scratch().out(ptx::block_x(), column)", "scratch().out(ptx::block_x(), 0)"),
        ("two-phase mma: lower rows rescaled as the upper ones", "of_row(factor, m, 1)", "of_row(factor, m, 0)"),
        only="mma and not cuda",
    ),
    *_two_phase(
        "two_phase.py",
        ("two-phase: scratch without the references", "of_tile = ROWS * (KEYS * 2 + 4)", "of_tile = ROWS * KEYS * 2"),
        ("two-phase: scratch without the last columns of O", "out = -(-d_v // columns) * columns * ROWS * 4", "out = d_v * ROWS * 4"),
        ("two-phase: a window's tiles end to end", "// KEYS + 1)", "// KEYS)"),
        ("two-phase: few blocks in a small workspace", "blocks < row_tiles.least_blocks(p) or chunk_keys", "chunk_keys"),
        ("two-phase: few keys in a small workspace", "chunk_keys < min(_LEAST_TILES, ", "chunk_keys < min(0, "),
    ),
    *_row_tiles(
        "csrc/attention/packed_tiles.cuh",
        ("packed tiles: as many as rows need", "return packed.total / rows + sequences;", "return packed.total / rows;"),
        ("packed tiles: offsets as they are", "clamp(int(ptx::ld_global_4(packed.offsets + sequence)), 0, packed.total)", "int(ptx::ld_global_4(packed.offsets + sequence))"),
        ("packed tiles: rows before the first sequence have no tiles", "return sequence == 0 ? 0 : row", "return row"),
        ("search: one round too few", "while (left > 1) {", "if (left > 1) {"),
        ("search: the last sequence of a round is left out", "left = ceil_div(left, 32);", "left = max_of(left / 32, 1);"),
        ("search: one sequence too early at a boundary", "first_of_mine <= tile", "first_of_mine < tile"),
        ("search: one sequence too early", "sequence += last_begun * left;", "sequence += max_of(last_begun - 1, 0) * left;"),
        ("search: lanes without a sequence have begun", "exists && first_of_mine <= tile", "first_of_mine <= tile"),
        ("search: lanes look behind the last sequence", "exists ? mine : 0", "mine"),
        ("search: the first tile of another lane's sequence", "ptx::shfl_idx(first_of_mine, last_begun)", "ptx::shfl_idx(first_of_mine, 0)"),
    ),
    *_row_tiles(
        "csrc/attention/row_tiles.cuh",
        ("row tiles: of packed sequences as of the longest", "params.is_packed() ? packed_tiles(params.packed_q, params.batch, kRows) : ceil_div", "ceil_div"),
        ("row tiles: of all packed sequences for each", "(params.is_packed() ? 1 : params.batch) * heads_kv_", "params.batch * heads_kv_"),
        ("row tiles: counted through all sequences", "      tile = of_sequence.tile;\n", ""),
    ),
    *_row_tiles(
        "row_tiles.py",
        ("row tiles: planned as of the longest", " if packed_rows is None else packed_rows // rows + batch)", ")"),
        ("row tiles: planned as rows need", "packed_rows // rows + batch)", "packed_rows // rows)"),
        ("row tiles: no sequences are computed", "if not (batch and n_q", "if not (n_q"),
    ),
    *_in(
        "row_tiles.py",
        "tests/test_fused.py -k 'what_runs or packed and d64 and not cuda'",
        ("row tiles: more positions of all sequences than 32 bits count", "if p.packed and max(p.packed) > MOST_POSITIONS:", "if False:"),
        ("row tiles: one for a single row", "if p.n_q <= ROWS // 2:", "if p.n_q <= 0:"),
        ("row tiles: more than 32 bits count", "if (tiles := count(p, rows)) > _MOST_TILES:", "if tiles := 0:"),
        ("row tiles: rows of no sequence left", "if offsets or not k.shape[-2]:", "if not k.shape[-2]:"),
        ("row tiles: a pair counts as a block", "(busy := tiles * blocks_of_tile)", "(busy := tiles)"),
        ENABLE_FFPA_DEBUG="1",
    ),
    *_fp8(
        "csrc/attention/forward_fp8.cuh",
        ("fp8: nobody waits for P", "    ptx::mbarrier_wait(p_full(maker), parity_of(counted));\n", ""),
        ("fp8: P overwritten", "    ptx::mbarrier_wait(p_empty(at.group), parity ^ 1);\n", ""),
        ("fp8: P not fenced", "    ptx::fence_proxy_async();\n    ptx::sync_warp();\n", "    ptx::sync_warp();\n"),
        ("fp8: sums overwritten", "    meet_other_group();  // these sums have been read\n", ""),
        ("fp8: sums read before they are there", "    meet_other_group();\n    FFPA_UNROLL", "    FFPA_UNROLL"),
        ("fp8: tiles lose count", "          --counted;  // the last turn had none to make to P\n", ""),
        ("fp8: rounded sums keep their reference", "      state.rounded[h] *= growth(state.of_out[h], larger[h]);\n", ""),
        ("fp8: O keeps its reference", "    for (Chunk& chunk : out) rescale(chunk, state.of_out, larger);\n", "    for (Chunk& chunk : out) (void)chunk;\n"),
        ("fp8: products to the reference of P", "(part[i / 2 % 2] * scale)", "scale"),
        ("fp8: sums to the reference of P", "state.rounded[1] += sums[2] * part[1];", "state.rounded[1] += sums[2];"),
        ("fp8: K's scale of its first block", "arguments_.params.k_scale, tile)", "arguments_.params.k_scale, 0)"),
        ("fp8: Q's scale of its first block", "rows.first / kScaledRows)", "0)"),
        ("fp8: V's scale of its first block", "arguments_.params.v_scale, tile)", "arguments_.params.v_scale, 0)"),
        ("fp8: K's scales of another head", "scales_of(k, rows.batch(), head_kv)", "scales_of(k, rows.batch(), 0)"),
        ("fp8: LSE of the own keys", "growth(state.reference[h], state.of_out[h]) +\n", "growth(state.reference[h], state.of_out[h]) + 0 *\n"),
        ("fp8: their sum to another reference", " * growth(float_from_bits(theirs[1]), state.of_out[h])", ""),
        ("fp8: LSE in units of P", "state.of_out[h] - kPExponent,", "state.of_out[h],"),
        ("fp8: P in the order of the scores", "{packed(i, 0), packed(i, 1), packed(i + 1, 0), packed(i + 1, 1)}", "{packed(i, 0), packed(i + 1, 0), packed(i, 1), packed(i + 1, 1)}"),
        ("fp8: sums of P of half of the keys", "ones + step * 2, step > 0)", "ones + step * 2, step != 2)"),
        ("fp8: chunks add up", "p + step * 2, v + step * 2, step > 0)", "p + step * 2, v + step * 2, chunk + step > 0)"),
        ("fp8: P above its range", "? 8.75f : 15.75f", "? 9.75f : 16.75f"),
        ("fp8: P's range wasted", "? 8.75f : 15.75f", "? 0.0f : 0.0f"),
        ("fp8: slots of V given back early", "      ptx::wgmma_wait_group<0>();\n      slots.release();\n", "      slots.release();\n      ptx::wgmma_wait_group<0>();\n"),
        ("fp8: slots of K given back early", "    ptx::wgmma_wait_group<0>();\n    slots.release();\n", "    slots.release();\n    ptx::wgmma_wait_group<0>();\n"),
        ("fp8: columns of the other warpgroup", "column = group * Config::kOwnColumns;", "column = (1 - group) * Config::kOwnColumns;"),
    ),
    *_fp8(
        "csrc/attention/fused_steps.cuh",
        ("fp8: logits of raw scores", "if (scale != 1) {", "if (false) {"),
        ("fp8: raw scores scaled twice", "plain ? params.score_factor * scale : 1.0f", "plain ? params.score_factor * scale : scale"),
        ("fp8: P of another exponent", " - exponent;", " - 1;"),
        ("fp8: references wait to grow", "maximum * factor, lazy_growth)", "maximum * factor)"),
    ),
    *_fp8(
        "csrc/attention/arrange_values.cuh",
        ("fp8: pairs of V side by side", "first_key + i % 2 + i / 2 * 8", "first_key + i % 2 + i / 2 * 2"),
        ("fp8: V read past its end", "if (key >= params.keys) return 0;", "if (key > params.keys) return 0;"),
        ("fp8: columns past V's", "if (column >= params.columns) return;", ""),
        ("fp8: strided V as words", "if (params.words)", "if (true)"),
        only="(wide and (d512 or d264)) or (v_transposed and rules and hopper)",
    ),
    *_fp8(
        "fused_fp8.py",
        ("fp8: rows that TMA cannot read", "if x.data_ptr() % 16 or any(step % 16 for step in steps) or padded:", "if padded:"),
        ("fp8: without keys", "    if not n_k:\n", "    if n_k < 0:\n"),
        ("fp8: 8-bit results not clamped", "out.copy_(written.clamp_(-largest, largest))", "out.copy_(written)"),
        only="hopper and not cuda",
    ),
    *_in(
        "csrc/attention/gradient_writer.cuh",
        f"tests/test_backward.py -k '{_PACKED_CHUNKS} or (not cuda and hopper and many_sequences)'",
        ("packed sums: always from the same place", "of_tile + params_.turn * half", "of_tile"),
        ("packed sums: to where they come from", "of_tile + (1 - params_.turn) * half", "of_tile + params_.turn * half"),
        ("packed sums: one place for both", "params_.workspace_columns() / Tiles::kRows", "0"),
        ("packed sums: of keys that are not there", "    if (row >= rows_) return;  // nor is there a place for their sums\n", ""),
        ENABLE_FFPA_DEBUG="1",
    ),
    *_in(
        "backward_chunks.py",
        "tests/test_backward.py -k 'not cuda and (enough or computed_once or many_sequences)'",
        ("packed sums: the same turn always", "enumerate(_row_parts(work, (cap - partial(all_keys[1])) // of_tile))", "((0, rows) for rows in _row_parts(work, (cap - partial(all_keys[1])) // of_tile))"),
        ("packed sums: room for one of two", "return min(keys, 2 * self.columns)", "return min(keys, self.columns)"),
        ("packed sums: room for all keys", "return min(keys, 2 * self.columns)", "return keys"),
        ("chunks: no row tile at a time", "of_head, most = work.tiles_of_head, max(most, 1)", "of_head = work.tiles_of_head"),
        ENABLE_FFPA_DEBUG="1",
    ),
    *_in(
        "integrations/transformers.py",
        "tests/test_transformers.py",
        ("transformers: window one too wide", "(width - 1, width - 1)", "(width, width - 1)"),
        ("transformers: scale of the layer dropped", "None if scaling is None else float(scaling)", "None"),
        ("transformers: softcap dropped", '"softcap": softcap or 0.0', '"softcap": 0.0'),
        ("transformers: the layer's causality beside a whole mask", "is_causal, sliding_window = False, None", "pass"),
        ("transformers: is_causal of the call ignored", "if is_causal is None else is_causal)", ")"),
        ("transformers: offsets of a mask ignored", "if mask.offsets is not None and offsets is None:", "if False:"),
        ("transformers: packed, and written as one sequence", "if mask is None and offsets:", "if False:"),
        ("transformers: strict ignored", 'if env.run_flags()["FFPA_STRICT"]:', "if False:"),
        ("transformers: said at every layer", "if said is None or said() is not model:", "if True:"),
        ("transformers: dropout ignored", "if dropout > 0:", "if False:"),
        ("transformers: sinks ignored", "if s_aux is not None:", "if False:"),
        ("transformers: any version", "[:2])) < OLDEST:", "[:2])) < (0, 0):"),
        ("transformers: bias shown to hidden keys", "torch.where(mask, bias, -torch.inf)", "bias"),
        ("transformers: bias without the rule", "_with_bias(_written(mask, query, key, is_causal, sliding_window, offsets), position_bias)", "_with_bias(None, position_bias)"),
        ("transformers: autocast not seen", "and not casts:", "and True:"),
        ("transformers: types left mixed", "return [x.to(half[0]) for x in tensors] if half else tensors", "return tensors"),
        ("transformers: rows that cannot be read", "if checks.rows_problem(x) else x", "if False else x"),
    ),
    *_in(
        "integrations/masks.py",
        "tests/test_transformers.py",
        ("masks: packed by any condition", "if part is not causal_mask_function and not made:", "if False:"),
        ("masks: packed without causality", '{"causal", "packed_sequence_mask"}', '{"packed_sequence_mask"}'),
        ("masks: the last token left out", "value=sequence.numel())", "value=sequence.numel() - 1)"),
        ("masks: entries of a batch run on", "starts = torch.ones_like(sequence, dtype=torch.bool)", "starts = torch.zeros_like(sequence, dtype=torch.bool)"),
        ("masks: padding unseen", "if keys.all():", "if True:"),
        ("masks: tokens in pieces taken for one text", "q_length == kv_length and _in_one_piece(keys)", "q_length == kv_length"),
        ("masks: any local size is a window", 'and local_size == getattr(config, "sliding_window", None)', ""),
        ("masks: a static cache's end is the last row's", "isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length", "isinstance(q_offset, int)"),
        ("masks: written with a window one too wide", "(behind.abs() < window)", "(behind.abs() <= window)"),
        ("masks: the first rows for the last", "(dim, end, step) == (2, size, 1)", "(dim, step) == (2, 1)"),
        ("masks: SDPA's own alignment", "allow_is_causal_skip=False,", "allow_is_causal_skip=True,"),
        ("masks: keys of before a cache's window", "padding[:, first : first + n_k]", "padding[:, :n_k]"),
    ),
]  # fmt: skip


def killed(mutant: Mutant, tree: Path, home: Path) -> str | None:
    """The first failing test (or what ended the run), or None when the mutant survives."""
    file = tree / mutant.file
    original = file.read_text()
    if original.count(mutant.old) < 1:
        raise LookupError(f"{mutant.name}: {mutant.old!r} is no longer in {mutant.file}")
    file.write_text(original.replace(mutant.old, mutant.new))
    try:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "--no-header",
            "--show-capture=no",
            *shlex.split(mutant.tests),
        ]
        environment = env.child_environment(HOME=str(home), **mutant.flags)
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=900)
    finally:
        file.write_text(original)
    if "BuildError" in run.stdout:
        raise SyntaxError(f"{mutant.name} does not compile:\n{run.stdout}")
    if run.returncode < 0:
        return f"signal {-run.returncode}"  # it left memory that is its own
    failures = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failures[0].split(" - ")[0].removeprefix("FAILED ") if run.returncode and failures else None


def main(word: str = "") -> int:
    chosen = [mutant for mutant in MUTANTS if word in mutant.name or word in mutant.file]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(
            ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "build", "tmp", "__pycache__")
        )
        print("| mutant | file | killed by |\n|---|---|---|")
        for mutant in chosen:
            by = killed(mutant, tree, Path(folder) / "home")
            survivors += by is None
            print(
                f"| {mutant.name} | {mutant.file.removeprefix(PACKAGE)} | {f'`{by}`' if by else '**SURVIVED**'} |",
                flush=True,
            )
    print(f"\n{len(chosen)} mutants, {survivors} survived")
    return int(survivors > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
