"""The command line of the bench: which workloads to measure, and what to show and keep."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import torch
from console import Progress, chip_line, first_values, headline, row_line
from ffpa_attn import env
from ffpa_attn.launching.native import gpu_of
from flops import nominal_flops
from measure import Bench, Measured, Settings
from providers import PEERS
from record import Record, clocks, machine, source
from tables import markdown
from workload import DTYPES, Workload, halved, without_head_dim

_SIZES = {"B": 1, "H": 48, "N": 8192}
_VARLEN_BATCH = 4
_CPU_FLOPS = 0.1e9  # most FLOPs of a call on a CPU, some 3 ms


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="test_ffpa_attn.py", description="Measure ffpa against PyTorch's SDPA and others.", allow_abbrev=False
    )
    group = parser.add_argument_group
    add = group("what is computed").add_argument
    add("--B", type=_positive, help="batch; default 1 (4 sequences with --varlen)")
    add("--H", type=_positive, help="query heads; default 48")
    add("--N", type=_positive, help="rows and keys; default 8192")
    add("--D", type=_positives, metavar="D[,D]", help="head dims; default: every one from 320 to MAX-D in steps of 64")
    add("--MAX-D", "--MD", type=_positive, default=1024)
    add("--D-v", "--dv", type=_positive, help="head dim of V; default: D")
    add("--heads-kv", type=_positive, help="heads of K and V (GQA); default: as many as query heads")
    add("--n-q", type=_positive, help="rows; default N (1 = decode)")
    add("--n-kv", type=_positive, help="keys; default N (cross-attention)")
    add("--causal", action="store_true", help="bottom right: row r meets the keys up to r + n_kv - n_q")
    add("--varlen", action="store_true", help="B packed sequences, of N/B, 2N/B, ... N rows")
    add("--backward", action="store_true", help="time the gradients (alone)")
    add("--dtype", choices=DTYPES, default="fp16")
    for name, short, what in (("q", "rq", "Q"), ("k", "rk", "K"), ("v", "rv", "V"), ("qkv", "rqkv", "Q, K and V")):
        add(
            f"--no-rand-{name}",
            f"--no-{short}",
            action="store_true",
            help=f"time with {what} all ones (random normal else)",
        )
    add("--seed", type=int, default=0)

    add = group("who computes it").add_argument
    add("--run-torch-unfused", "--torch", action="store_true", help="also matmul, softmax, matmul in PyTorch")
    add("--run-flash-attn", "--flash", action="store_true", help="also flash-attn, where D <= 256")
    add(
        "--peers",
        type=_peers,
        default=(),
        metavar="A,B",
        help=f"also these, where they run: all, or of {', '.join(PEERS)}",
    )
    add("--pypi", type=Path, metavar="DIR", help="also PyPI's ffpa-attn: pip install --target DIR ffpa-attn")
    add(
        "--tag-hints",
        "--tags",
        "--hints",
        type=_words,
        default=(),
        metavar="A,B",
        help="only rows whose tag holds one of these",
    )
    add(
        "--force-build",
        "--build",
        action="store_true",
        help="compile the levels' kernels afresh, and tell their registers",
    )

    add = group("how it is measured").add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--warmup", "--w", type=_positive, default=1, help="calls before")
    add("--iters", "--i", type=_positive, default=5, help="timed calls; the median counts")
    add("--sleep", type=float, default=0.05, help="seconds to rest between head dims")
    add("--check", action="store_true", help="fail where a row of ours is wrong (float64, random data)")
    add("--check-all", action="store_true", help="fail where any row is wrong")
    add("--only-flops-matmul", "--flops-mm", action="store_true", help="count matmul FLOPs alone; always so here")
    add("--no-reduce", action="store_true", help="run big sizes on a CPU too")
    add("--no-emulation", action="store_true", help="without a GPU: do not run the levels in the emulator")
    add("--arch", type=_arch, default="sm_90", help="without a GPU: whose kernels the emulator runs, e.g. sm_80, sm_89")

    add = group("what is shown and kept").add_argument
    add(
        "--show-all",
        "--show",
        action="store_true",
        help="every row; else of the forced levels only those faster than all above",
    )
    add("--show-less", "--show-l", action="store_true", help="one output value a row")
    add("--show-matrix", action="store_true", help="print outputs")
    add("--verbose", "--v", action="store_true", help="say why rows are missing, and the settings")
    add("--debug", action="store_true", help="stop at the first exception, with its traceback")
    add(
        "--gen-bench-table",
        "--gen-bench",
        action="store_true",
        help="print a Markdown table; save it with JSON and CSV",
    )
    add("--plot-flops", "--plot", action="store_true", help="save plots, and the record they are drawn from")
    add("--save-dir", "--dir", type=Path, default=Path("tmp"))
    add("--save-tag", "--tag", default="", help="part of the names of saved files")
    add(
        "--from",
        dest="recorded",
        type=Path,
        metavar="FILE",
        help="measure nothing: table and plots of a saved JSON record",
    )
    args = parser.parse_args(argv)
    try:
        if env.run_flags()["FFPA_EMULATE"] is not None:
            raise ValueError(
                "FFPA_EMULATE is set, and times in the emulator mean nothing; unset it (a CPU's run emulates)"
            )
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: PyTorch sees no GPU here")
        args.arch = gpu_of(torch.device("cuda")) if args.device == "cuda" else args.arch
        args.workloads, args.fullsize, args.reductions = _workloads(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def _positives(text: str) -> list[int]:
    return [_positive(word) for word in text.split(",")]


def _arch(text: str) -> str:
    if not re.fullmatch(r"sm_([89]|1\d)\d", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no GPU such as sm_80, sm_89 or sm_90")
    return text


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(PEERS) if text == "all" else _words(text)
    unknown = set(names) - set(PEERS)
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are all, {', '.join(PEERS)}")
    return names


def _workloads(args: argparse.Namespace) -> tuple[list[Workload], list[Workload], str | None]:
    """Returns one workload per head dim, as this machine can run it and as asked; and what a CPU reduced, and why."""
    dims = args.D or list(range(320, args.MAX_D + 1, 64))
    if not dims:
        raise ValueError(f"--MAX-D {args.MAX_D} leaves no head dim; the first is 320 (or name one with --D)")
    heads = args.H or max(_SIZES["H"], args.heads_kv or 1)
    heads_kv = args.heads_kv or heads
    if heads % heads_kv:
        raise ValueError(f"--H {heads} is no multiple of --heads-kv {heads_kv}")
    length = args.N or _SIZES["N"]
    largest = Workload(
        batch=args.B or (_VARLEN_BATCH if args.varlen else _SIZES["B"]),
        heads=heads,
        heads_kv=heads_kv,
        n_q=args.n_q or length,
        n_kv=args.n_kv or length,
        d=max(dims),
        d_v=args.D_v or max(dims),
        dtype=args.dtype,
        causal=args.causal,
        packed=args.varlen,
        backward=args.backward,
    )
    fitting = largest if args.device == "cuda" or args.no_reduce else _fit_a_cpu(largest)
    said = None
    if fitting != largest:
        said = f"Reduced, since the CPU would take very long: {largest} -> {fitting} (--no-reduce runs it as it is)"
    fitting, largest = ([replace(w, d=d, d_v=args.D_v or d) for d in dims] for w in (fitting, largest))
    return fitting, largest, said


def _fit_a_cpu(w: Workload) -> Workload:
    while nominal_flops(w) > _CPU_FLOPS:
        smaller = halved(w)
        if smaller is None:
            break
        w = smaller
    return w


def _settings(args: argparse.Namespace) -> Settings:
    ones = tuple(name for name in "qkv" if args.no_rand_qkv or getattr(args, f"no_rand_{name}"))
    asked = {"unfused": args.run_torch_unfused, "flash": args.run_flash_attn}
    peers = tuple(name for name in PEERS if name in args.peers or asked.get(name))
    return Settings(
        args.warmup, args.iters, args.seed, ones, peers, args.tag_hints, args.pypi, args.debug, args.arch, args.show_matrix,
        args.check or args.check_all, not args.no_emulation, args.force_build,
    )  # fmt: skip


def _show(args: argparse.Namespace, measured: Measured, said: set[str]) -> None:
    """Prints the lines of one workload."""
    best_ms = None
    for row in measured.result.rows:
        improved = best_ms is None or row.median_ms < best_ms
        if args.show_all or improved or row.problem or not row.level:
            values = first_values(measured.outputs[row.tag], args.show_less)
            print(row_line(row, measured.result, values, best_ms, args.check or args.check_all))
        if args.show_matrix:
            print(measured.outputs[row.tag])
        best_ms = min(best_ms or row.median_ms, row.median_ms)
    if measured.result.chip and args.device == "cpu":
        print(f"{'in the emulator':>28}: the kernels that {args.arch} would run at the size asked for")
    for use in measured.result.chip:
        print(chip_line(use))
    for who, why in measured.result.skipped:
        if args.verbose or (who, why) not in said:
            print(f"{f'({who})':>28}: not measured: {why}")
            said.add((who, why))
    ceilings = measured.result.ceilings
    gemm, copy = f"{ceilings.gemm_tflops:.4g} TFLOPS", f"{ceilings.copy_gb_per_s:.4g} GB/s"
    print(f"{'ceilings':>28}: {ceilings.gemm}: {gemm}; {ceilings.copy}: {copy}", flush=True)


def _measure(args: argparse.Namespace) -> tuple[Record, list[str]]:
    """Returns the record, and what went wrong with our rows."""
    command = "python tests/test_ffpa_attn.py " + shlex.join(args.command)
    chip = f"{without_head_dim(args.fullsize[0])} on {args.arch}"
    method = {
        "command": command,
        "chip": chip,
        "warmup": args.warmup,
        "iters": args.iters,
        "seed": args.seed,
        "started": _now(),
    }
    record = Record(machine(args.device), source(), method)
    flags = "".join(f", {name}={value}" for name, value in record.source["flags"].items())
    print(headline(f"{record.device}, torch {torch.__version__}, source {record.source['tree'] or 'unknown'}{flags}"))
    if args.device == "cpu":
        emulated = "" if args.no_emulation else "our kernels run in an emulator of the GPU, which proves them, and "
        print(f"On a CPU, sizes are small: {emulated}this is no claim of speed.")
    if args.reductions:
        print(args.reductions)
    if args.verbose:
        print(args)
    wrong, said = [], set()
    try:
        bench, progress = Bench(args.device, _settings(args)), Progress(len(args.workloads))
        for i, (w, full) in enumerate(zip(args.workloads, args.fullsize, strict=True)):
            measured = bench.run(w, full, lambda share, what, i=i: progress.show(i + share, what))
            progress.clear()
            wrong += measured.failed
            if measured.result:
                record.results.append(measured.result)
                print(headline(f"{w}, Warmup: {args.warmup}, Iters: {args.iters}"))
                _show(args, measured, said)
            if measured.interrupted:
                raise KeyboardInterrupt
            time.sleep(args.sleep)
    except KeyboardInterrupt:
        record.interrupted = True
    if args.device == "cuda":
        record.machine["clocks_after"] = clocks()
    record.method["finished"] = _now()
    return record, wrong


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _stem(args: argparse.Namespace, record: Record) -> Path:
    asked = record.method["chip"].partition(" on ")[0].split(", ")
    unusual = [part for part in asked if part not in ("B=1", "H=48", "N=8192", "fp16")]
    name = "_".join(part.replace("=", "") for part in (record.device, args.save_tag, *unusual) if part)
    return args.save_dir / "".join(c if c.isalnum() or c in "_-." else "_" for c in name)


def _keep(args: argparse.Namespace, record: Record) -> None:
    """Prints table and plots as asked; saves the record whenever something was asked for, or would be lost."""
    stem = _stem(args, record)
    saved = []
    if args.gen_bench_table or (args.recorded and not args.plot_flops):
        print(f"\n{markdown(record)}")
    if not args.recorded and (args.gen_bench_table or args.plot_flops or record.interrupted):
        saved += record.save(stem)
        saved.append(stem.with_name(stem.name + ".md"))
        saved[-1].write_text(markdown(record), encoding="utf-8")
    if args.plot_flops:
        try:
            from plots import save_plots
        except ImportError as missing:
            print(f"no plots: {missing}; pip install matplotlib, then --plot --from {stem}.json")
        else:
            saved += save_plots(record, stem)
    for path in saved:
        print(f"saved {path}")


def main(argv: list[str] | None = None) -> int:
    """Returns 0; 1 where a row of ours failed or --check found a wrong one; 130 after Ctrl-C."""
    env.let_stdout_write_anything()
    args = parse(argv)
    args.command = sys.argv[1:] if argv is None else argv
    wrong: list[str] = []
    if args.recorded:
        try:
            record = Record.load(args.recorded)
        except (OSError, ValueError) as error:
            print(f"--from: {error}", file=sys.stderr)
            return 2
    else:
        record, wrong = _measure(args)
    if args.check or args.check_all:
        checked = [row for result in record.results for row in result.rows if args.check_all or row.is_ffpa]
        checked += [use for result in record.results for use in result.chip if use.max_error is not None]
        wrong += [f"{row.tag}: {row.problem}" for row in checked if row.problem]
        if not checked and not record.interrupted:
            wrong.append("the check: there was nothing to check")
        print(f"checked {len(checked)} rows against float64 on random data: {len(wrong)} wrong")
    if record.results:
        _keep(args, record)
    for problem in wrong:
        print(f"FAILED {problem}", file=sys.stderr)
    return 130 if record.interrupted else 1 if wrong else 0
