"""Edits one line at a time and expects the suite to fail: what survives shows what the tests do not see.

`python .dev/mutants.py` runs all, `python .dev/mutants.py WORD` those whose name holds WORD. Works on a copy of the tree.
Prints a Markdown table; exits with 1 if a mutant survives or no longer applies.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "ffpa/ffpa_attn/"


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str


def _in(file: str, tests: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    return [Mutant(name, PACKAGE + file, old, new, tests) for name, old, new in edits]


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
        ("dLSE with the wrong sign", "delta -= d_lse", "delta += d_lse"),
        ("empty row's P not 0 in the backward", "lse = lse.masked_fill(lse == -_INF, _INF)", "pass"),
        ("mask gradient of one batch only", "mask[b if mask.shape[0] > 1 else 0]", "mask[0]"),
        ("mask's hidden keys shown", "by_head.masked_fill_(~mask, -_INF)", "by_head.masked_fill_(mask, -_INF)"),
        ("rows past the end of a sequence", "(row >= lengths[0]) | (key >= lengths[1])", "(row >= lengths[0]) | (key > lengths[1])"),
        ("spare rows read", ".masked_fill_(~inside[:, None], 0)\n", "\n"),
        ("spare rows written", "value.masked_fill(~inside[:, None], 0)", "value"),
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
        ("level falls back on a GPU", 'if p.device == "cuda" or backend not in _OUR_KERNELS:', "if backend not in _OUR_KERNELS:"),
    ),
    *_in(
        "attention.py",
        "tests/test_merge.py",
        ("merge without the maximum", "top = torch.maximum(lse1, lse2)", "top = torch.minimum(lse1, lse2)"),
        ("merge passes on an empty part", "torch.where(share == 0, 0.0, share * o.float())", "share * o.float()"),
    ),
]  # fmt: skip


def killed(mutant: Mutant, tree: Path) -> str | None:
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
            *mutant.tests.split(),
        ]
        run = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=900)
    finally:
        file.write_text(original)
    failures = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failures[0].split(" - ")[0].removeprefix("FAILED ") if run.returncode and failures else None


def main(word: str = "") -> int:
    chosen = [mutant for mutant in MUTANTS if word in mutant.name]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(
            ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "build", "tmp", "__pycache__")
        )
        print("| mutant | file | killed by |\n|---|---|---|")
        for mutant in chosen:
            by = killed(mutant, tree)
            survivors += by is None
            print(
                f"| {mutant.name} | {mutant.file.removeprefix(PACKAGE)} | {f'`{by}`' if by else '**SURVIVED**'} |",
                flush=True,
            )
    print(f"\n{len(chosen)} mutants, {survivors} survived")
    return int(survivors > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
