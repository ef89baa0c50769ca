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
        "attention/forward_mma.cuh",
        ("P written before all have used that of the tile before", "sync_team();  // the maxima of all warps are there, and all have used P of the tile before", ""),
        ("P read before it is there", "sync_team();  // P and", "//"),
        ("row sums read before they are there", "    sync_team();\n    float* lse_gmem", "    float* lse_gmem"),
        ("items of a persistent grid meet", "      ptx::sync_block();  // nobody reads Q", "      // nobody reads Q"),
        ("row block read before it is there", "    ptx::sync_block();  // the row block is there", "    // the row block is there"),
        ("first tile skipped", "first_tile_ = tiles.first;", "first_tile_ = tiles.first + 1;"),
        ("last tile skipped", "end_tile_ = tiles.end;", "end_tile_ = tiles.end - 1;"),
        ("V step starts at the wrong key", "key + (load_step_ - key_steps_) * kValueRows", "key + load_step_ * kValueRows"),
        ("V of the first column group for all", "load_group_ * kColumns : first_column_", "0 : first_column_"),
        ("column group of level 2 ignored by V", "load_group_ * kColumns : first_column_", "load_group_ * kColumns : 0"),
        ("column group of level 2 ignored by O", "write(out, first_column_);", "write(out, 0);"),
        ("O not rescaled", "if (!ptx::vote_any(any)) return;", "return;"),
        ("reference follows too late", "? 8.0f : 0.0f", "? 400.0f : 0.0f"),
        ("reference not kept", "row_max_[m][h] = maximum;", ""),
        ("row sum not rescaled", "row_sum_[m][h] * factor + sum", "row_sum_[m][h] + sum"),
        ("row without keys has a NaN for a reference", "maximum == -kInfinity ? 0.0f : maximum", "maximum"),
        ("row without keys divided by 0", "sum > 0 ? 1 / sum : 0.0f", "1 / sum"),
        ("P's pair swapped", "ptx::pack<Element>(p0, p1)", "ptx::pack<Element>(p1, p0)"),
        ("P's keys of another V step", "(step * kValueRows + depth * 16) / tile::kChunkElements", "(depth * 16) / tile::kChunkElements"),
        ("maxima of half of the lanes ignored", "maximum = max_of(maximum, ptx::shfl_xor(maximum, 2));", ""),
        ("sums of half of the lanes ignored", "sum += ptx::shfl_xor(sum, 2);", ""),
        ("sums of the last warp ignored", "warp < Config::kScoreWarpsByKeys; ++warp) sum +=", "warp < Config::kScoreWarpsByKeys - 1; ++warp) sum +="),
        ("LSE in log2", "ptx::lg2(row_sum(row))) * kLn2", "ptx::lg2(row_sum(row)))"),
        ("scratch of another group", "Config::column_groups(params_) + group) * Config::kWarps", "Config::column_groups(params_)) * Config::kWarps"),
        ("scratch of another warp", "(warp_of_all + thread_ / 32) * kWarpFloats", "warp_of_all * kWarpFloats"),
        ("output written past the last row", "const bool row_exists = first_row + row <= last_row;", "const bool row_exists = true;"),
        ("output's last columns not written", "first_column + column < params_.d_v;", "first_column + column < params_.d_v - 8;"),
        ("output's fragment in the wrong place", "pair_column(fragment / 2) + fragment % 2 * 8", "pair_column(fragment / 2)"),
    ),
    *_kernel(
        "tile/stage_ring.cuh",
        ("slot filled while in use", "if (filled_round_ > 0) ptx::mbarrier_wait", "if (false) ptx::mbarrier_wait"),
        ("slot waited for a round late", "(filled_round_ & 1) ^ 1", "filled_round_ & 1"),
        ("slot used before it is full", "    ptx::mbarrier_wait(full(use_), used_parity_);\n", ""),
        ("parity of full kept", "      used_parity_ ^= 1;\n", ""),
        ("one slot too many ahead", "stages_ <= 2 ? stages_ - 1 : stages_ - 2", "stages_"),
    ),
    *_kernel(
        "attention/row_block.cuh",
        ("rows of packed Q from the start", "block.q = row_of(params.q, block.head, q.begin);", "block.q = row_of(params.q, block.head, 0);"),
        ("rows of packed K from the start", "block.head / params.group, k.begin);\n  block.v", "block.head / params.group, 0);\n  block.v"),
        ("wrong K and V head of a group", "block.k = row_of(params.k, block.head / params.group", "block.k = row_of(params.k, block.head % params.group"),
        ("offsets beyond the tensor taken", "sequence + 1)), 0, packed.total)", "sequence + 1)), 0, 1 << 30)"),
        ("alignment's diagonal with the wrong sign", "0 : block.n_k - block.n_q;", "0 : block.n_q - block.n_k;"),
        ("top_left ignored", "params.top_left ? 0 :", "false ? 0 :"),
        ("last rows of the last block see too little", "min_of(first_row + rows, block.n_q) - 1", "min_of(first_row + rows, block.n_q) - 2"),
        ("LSE of another head", "block.head * params.lse_head_stride", "0"),
        ("batch of the inputs ignored", "x.data + block.batch * x.batch_stride", "x.data"),
    ),
    *_kernel(
        "attention/visible_keys.cuh",
        ("begin one key late", "max_of(block.first_row() + block.nearest(), 0)", "max_of(block.first_row() + block.nearest() + 1, 0)"),
        ("end one key early", "block.last_row() + block.farthest() + 1, block.n_k()", "block.last_row() + block.farthest(), block.n_k()"),
        ("no mask one key too far", "key + count <= common_keys_end(block)", "key + count <= common_keys_end(block) + 1"),
    ),
    *_kernel(
        "attention/score_rules.cuh",
        ("key right of the diagonal seen", "k > r + farthest", "k > r + farthest + 1"),
        ("key left of the window seen", "k < r + nearest", "k < r + nearest - 1"),
        ("key past the end seen", "k >= n_k) score", "k > n_k) score"),
    ),
    *_kernel(
        "tile/tile_copy.cuh",
        ("rows that do not exist copied", "return row < window.rows && chunk", "return chunk"),
        ("columns that do not exist copied", "row < window.rows && chunk * kChunkElements < window.columns", "row < window.rows"),
    ),
    *_in(
        "mma.py",
        "tests/test_plan.py",
        ("shared memory: Q's part of a slot forgotten", "+ (0 if q_resident else query)", ""),
        ("longest ring last", "[4, 3, 2, 1]", "[1, 2, 3, 4]"),
        ("f16 accumulation of bf16 granted", 'and p.dtype != "f16"', 'and p.dtype == "f64"'),
        ("one stage although two fit", "cost *= 8", "cost *= 1"),
    ),
    *_kernel(
        "attention/merge_splits.cuh",
        ("parts weigh the same", "const float weight = ptx::ex2((lse_of(split) - lse) * kLog2e);", "const float weight = 1.0f;"),
        ("LSE of the merge without the sum", "maximum + ptx::lg2(sum) * kLn2", "maximum"),
    ),
    *_kernel(
        "attention/score_rules.cuh",
        ("scale forgotten", "score *= params.score_factor", "(void)score"),
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
        ("window keeps the matrix's rows", "int(matrix.rows - row)", "matrix.rows"),
        ("window keeps the matrix's columns", "matrix.columns - column};", "matrix.columns};"),
    ),
    *_kernel(
        "tile/smem_layout.cuh",
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
        ("shared memory: P forgotten", "stages * slot + spec.rows * spec.keys * 2", "stages * slot"),
        ENABLE_FFPA_DEBUG="1",
    ),
    *_in(
        "mma.py",
        "tests/test_mma.py -k 'plan or reasons or prefer'",
        ("limit of shared memory ignored", ") <= limit", ") <= 2 * limit"),
        ("resident Q never preferred", "(True, False) if resident is None", "(False, True) if resident is None"),
    ),
    *_in(
        "mma.py",
        "tests/test_mma.py -k 'toggle or stages and 512'",
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
