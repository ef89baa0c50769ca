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
    path = file if file.startswith("csrc/") else PACKAGE + file
    return [Mutant(name, path, old, new, tests, flags) for name, old, new in edits]


def _kernel(file: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    """The emulator's module with D = 512 alone, and every emulated test that needs no other width."""
    return _in("csrc/" + file, "tests/test_mma.py -k 'emulated and 512'", *edits, ENABLE_FFPA_DEBUG="1")


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
    ),
    *_in(
        "choice.py",
        "tests/test_choice.py",
        ("SDPA for its other diagonal", "and not see.top_left and p.n_q != p.n_k", "and p.n_q > 10**9"),
        ("level falls back on a GPU", 'if p.device == "cuda" or backend not in', "if backend not in"),
    ),
    *_in(
        "attention.py",
        "tests/test_merge.py",
        ("merge without the maximum", "top = torch.maximum(lse1, lse2)", "top = torch.minimum(lse1, lse2)"),
        ("merge passes on an empty part", "share * torch.where(share == 0, 0.0, o.float())", "share * o.float()"),
    ),
    *_kernel(
        "attention/forward_mma_l1.cuh",
        ("ring: a step used before it has landed", "tile::wait_for_copies(stages - 2)", "tile::wait_for_copies(stages - 1)"),
        ("ring: the only slot used before it is filled", "tile::wait_for_copies(0)", "tile::wait_for_copies(1)"),
        ("ring: the only slot filled while in use", "ptx::sync_block();  // everybody has used the only slot", ""),
        ("ring: other threads' copies into the only slot not awaited", "ptx::sync_block();  // everybody's copies have landed\n", "\n"),
        ("ring: no barrier for a step", "ptx::sync_block();  // everybody's copies have landed, and", "//"),
        ("ring: one step too many ahead", "step < stages - 1; ++step) load_next_step()", "step < stages; ++step) load_next_step()"),
        ("ring: one step too few ahead", "step < stages - 1; ++step) load_next_step()", "step < stages - 2; ++step) load_next_step()"),
        ("ring: one step more in a tile", "++load_step == key_steps + kValueSteps", "++load_step == key_steps + kValueSteps + 1"),
        ("P inside the ring's last slot", "slots_smem + params.stages * slot_bytes", "slots_smem + (params.stages - 1) * slot_bytes"),
        ("row statistics not part of shared memory", "(kScoreWarpsByKeys + 1) * kStatisticBytes", "0"),
        ("maxima read before they are there", "ptx::sync_block();  // the maxima of all warps over a row are there", ""),
        ("sums read before they are there", "ptx::sync_block();  // the sums of all warps are there, and", "//"),
        ("K read without the swizzle", "kStepLayout.offset(score_key + n * 8 + at.row, depth / 8 + at.column)", "(score_key + n * 8 + at.row) * kKeyColumns * 2 + (depth / 8 + at.column) * 16"),
        ("V read without the swizzle", "kValueLayout.offset(depth * 16 + at.row, v_chunk + at.column)", "(depth * 16 + at.row) * Config::kHeadDim * 2 + (v_chunk + at.column) * 16"),
        ("P written without the swizzle", "kProbabilityLayout.offset(row, chunk) + within_chunk", "row * kKeys * 2 + chunk * 16 + within_chunk"),
        ("P written one fragment to the right", "(score_key + n * 8) / tile::kChunkElements", "(score_key + (n + 1) % kScoreN * 8) / tile::kChunkElements"),
        ("P's pair swapped", "ptx::pack<Element>(p0, p1)", "ptx::pack<Element>(p1, p0)"),
        ("P's keys of another V step", "(step * kValueRows + depth * 16) / tile::kChunkElements", "(depth * 16) / tile::kChunkElements"),
        ("first tile skipped", "first_tile = visible.begin() / kKeys", "first_tile = ceil_div(visible.begin(), kKeys)"),
        ("last tile skipped", "ceil_div(visible.end(), kKeys) - first_tile", "visible.end() / kKeys - first_tile"),
        ("one tile too many", "ceil_div(visible.end(), kKeys) - first_tile", "ceil_div(visible.end(), kKeys) + 1 - first_tile"),
        ("last rows of the last block see too little", "first_row + kRows, params.n_q) - 1", "first_row + kRows, params.n_q) - 2"),
        ("wrong K and V head of a group", "head / params.group", "head % (params.heads_q / params.group)"),
        ("batch of the inputs ignored", "batch * x.batch_stride + of_head", "of_head"),
        ("batch of the output ignored", "batch * params.out.batch_stride + head", "head"),
        ("batch of the LSE ignored", "int64_t(head_of_all) * params.n_q", "head * params.n_q"),
        ("V step starts at the wrong key", "key + (load_step - key_steps) * kValueRows", "key + load_step * kValueRows"),
        ("Q's first columns with every step of K", "tile::window_at(q_gmem, 0, column)", "tile::window_at(q_gmem, 0, 0)"),
        ("Q's first columns in every resident step", "tile::window_at(q_gmem, 0, step * kKeyColumns)", "tile::window_at(q_gmem, 0, 0)"),
        ("resident Q: first step always used", "params.q_resident ? q_smem + step * Config::kQueryStepBytes", "params.q_resident ? q_smem"),
        ("Q copied over K in the slot", "copy_tile_async<kRows, kKeyColumns, Config::kThreads>(slot + Config::kKeyStepBytes", "copy_tile_async<kRows, kKeyColumns, Config::kThreads>(slot"),
        ("columns of zeros multiplied", "depth < min_of(kKeyColumns, columns)", "depth < kKeyColumns"),
        ("S not cleared", "s[m][n][e] = 0", "(void)0"),
        ("O not cleared", "o[m][n][e] = 0", "(void)0"),
        ("row that has seen no key: -inf minus -inf", "new_max == -kInfinity ? 0.0f : new_max", "new_max"),
        ("maxima of the first warp ignored", "for (int by_keys = 0; by_keys < Config::kScoreWarpsByKeys; ++by_keys) {\n          new_max", "for (int by_keys = 1; by_keys < Config::kScoreWarpsByKeys; ++by_keys) {\n          new_max"),
        ("maxima of half of the lanes ignored", "tile_max = max_of(tile_max, ptx::shfl_xor(tile_max, 2));", ""),
        ("sums of the last warp ignored", "by_keys < Config::kScoreWarpsByKeys; ++by_keys) {\n      sum", "by_keys < Config::kScoreWarpsByKeys - 1; ++by_keys) {\n      sum"),
        ("sums of half of the lanes ignored", "sum += ptx::shfl_xor(sum, 2);", ""),
        ("row sum not rescaled", "row_sum[m][h] * factor + tile_sum", "row_sum[m][h] + tile_sum"),
        ("O not rescaled", "o[m][n][2 * h] *= factor;", ""),
        ("O rescaled in every V step", "if (step == 0) {", "{"),
        ("row without keys divided by 0", "sum > 0 ? 1 / sum : 0.0f", "1 / sum"),
        ("kernel's LSE in log2", "whole_row_sum(row))) * kLn2", "whole_row_sum(row)))"),
        ("kernel's LSE without the maximum", "(row_max[m][h] + ptx::lg2", "(ptx::lg2"),
        ("LSE written past the last row", "if (first_row + row < params.n_q) {", "if (first_row + row <= params.n_q) {"),
        ("output written past the last row", "if (first_row + row >= params.n_q) continue;", "if (first_row + row > params.n_q) continue;"),
        ("output written past the last column", "if (column < params.d_v) {", "if (column < params.d_v + 8) {"),
        ("output's last columns not written", "if (column < params.d_v) {", "if (column < params.d_v - 8) {"),
        ("output's pair swapped", "o[m][n][2 * h] * inverse, o[m][n][2 * h + 1] * inverse", "o[m][n][2 * h + 1] * inverse, o[m][n][2 * h] * inverse"),
    ),
    *_kernel(
        "attention/visible_keys.cuh",
        ("key right of the diagonal seen", "key <= diagonal + params.right", "key <= diagonal + params.right + 1"),
        ("key on the diagonal hidden", "key <= diagonal + params.right", "key < diagonal + params.right"),
        ("key left of the window seen", "key >= diagonal - params.left", "key >= diagonal - params.left - 1"),
        ("first key of the window hidden", "key >= diagonal - params.left", "key > diagonal - params.left"),
        ("key past the end seen", "&& key < params.n_k;", "&& key <= params.n_k;"),
        ("begin one key late", "max_of(first_row_low_, 0)", "max_of(first_row_low_ + 1, 0)"),
        ("begin from the last row", "max_of(first_row_low_, 0)", "max_of(last_row_low_, 0)"),
        ("end one key early", "min_of(last_row_high_ + 1, n_k_)", "min_of(last_row_high_, n_k_)"),
        ("end from the first row", "min_of(last_row_high_ + 1, n_k_)", "min_of(first_row_high_ + 1, n_k_)"),
        ("no mask one key too far to the right", "key + count - 1 <= first_row_high_", "key + count - 2 <= first_row_high_"),
        ("no mask one key too far to the left", "key >= last_row_low_", "key + 1 >= last_row_low_"),
        ("no mask one key past the end", "key + count <= n_k_", "key + count - 1 <= n_k_"),
    ),
    *_kernel(
        "attention/score_rules.cuh",
        ("scale forgotten", "score *= params.score_factor", "(void)score"),
        ("hidden keys shown", "if (!row_sees_key(params, r, k)) score = -kInfinity;", ""),
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
        ("alignment's shift with the wrong sign", "params.n_k - params.n_q", "params.n_q - params.n_k"),
        ("top_left ignored", "options.top_left ? 0 : ", ""),
        ("window without a left end taken literally", "options.left < 0 || ", ""),
        ("strides of a batch taken for those of a head", "strides[0], strides[1]", "strides[0], strides[0]"),
    ),
    *_kernel(
        "tile/tile_copy.cuh",
        ("rows that do not exist copied", "row_exists = row < window.rows", "row_exists = true"),
        ("columns that do not exist copied", "clamp(window.columns - column, 0, kChunkElements)", "kChunkElements"),
        ("last row not copied", "row_exists = row < window.rows", "row_exists = row < window.rows - 1"),
        ("window keeps the matrix's rows", "int(matrix.rows - row)", "matrix.rows"),
        ("window keeps the matrix's columns", "matrix.columns - column};", "matrix.columns};"),
        ("tile written without the swizzle", "cp_async_16(tile_smem + layout.offset(row, chunk)", "cp_async_16(tile_smem + row * kColumns * 2 + chunk * 16"),
    ),
    *_kernel(
        "tile/stage_ring.cuh",
        ("ring one slot longer", "if (index_ == stages_)", "if (index_ > stages_)"),
        ("ring one slot shorter", "if (index_ == stages_)", "if (index_ >= stages_ - 1)"),
        ("wait for two pending waits for three", "ptx::cp_async_wait_group<2>()", "ptx::cp_async_wait_group<3>()"),
    ),
    *_kernel(
        "tile/smem_layout.cuh",
        ("swizzle that leaves bank conflicts", "row_bytes >= 128  ? 7", "row_bytes >= 128  ? 3"),
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
        "tests/test_mma.py -k shared_memory",
        ("shared memory: Q's part of a slot forgotten", "(0 if q_resident else query_step)", "0"),
        ("shared memory: one row statistic forgotten", "(spec.keys // 32 + 1)", "(spec.keys // 32)"),
        ("shared memory: P forgotten", "stages * slot + spec.rows * spec.keys * 2", "stages * slot"),
        ("shared memory: last columns of a resident Q forgotten", "-(-d_qk // key_columns)", "d_qk // key_columns"),
        ENABLE_FFPA_DEBUG="1",
    ),
    *_in(
        "mma.py",
        "tests/test_mma.py -k 'plan or reasons or prefer'",
        ("limit of shared memory ignored", ") <= limit", ") <= 2 * limit"),
        ("shortest ring first", "else [3, 2, 1]", "else [1, 2, 3]"),
        ("resident Q never preferred", "(True, False) if resident is None", "(False, True) if resident is None"),
        ("resident Q at any price", "(n > 1 or not q_resident or stages == [1] or resident) and ", ""),
        ("prefetch although forbidden", "stages = [s for s in stages if s == 1]", "pass"),
        ("f16 accumulation granted", 'if p.acc != "f32":', "if False:"),
        ("too wide values accepted", "if p.d_v > L1_HEAD_DIMS[-1]:", "if p.d_v > 2 * L1_HEAD_DIMS[-1]:"),
        ("level 3 granted", "if p.level in (2, 3):", "if p.level == 2:"),
    ),
    *_in(
        "mma.py",
        "tests/test_mma.py -k 'toggle or stages and 512'",
        ("unknown toggle ignored", "if flags[name] not in (None, value):", "if False:"),
        ("stages asked for ignored", "[p.num_stages] if p.num_stages else", "[2] if p.num_stages else"),
        ("toggle of a resident Q ignored", "if resident is None else (resident,)", ""),
        ENABLE_FFPA_DEBUG="1",
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
]  # fmt: skip


def killed(mutant: Mutant, tree: Path, home: Path) -> str | None:
    """The first failing test, or None when the mutant survives."""
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
    if "EmulatorBuildError" in run.stdout:
        raise SyntaxError(f"{mutant.name} does not compile:\n{run.stdout}")
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
