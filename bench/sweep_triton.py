"""Measures the tiles that the Triton kernels can have on this GPU, and writes the table that plans read.

`python bench/sweep_triton.py --write` measures forward, backward and the forward of 8-bit floats (e4m3, V transposed),
causal and not, at widths 64, 128 and 256, and replaces this GPU's part of ffpa/ffpa_attn/triton_ops/tiles.py.
Kernels are compiled first, by one process for each core.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
from ffpa_attn.backends import triton_attention
from ffpa_attn.backends.triton_attention import TritonPlan
from ffpa_attn.backends.triton_fp8 import TritonFp8Plan
from ffpa_attn.launching import native
from ffpa_attn.specs import archs
from ffpa_attn.specs.problem import FP8_BLOCK, Visibility
from ffpa_attn.triton_ops import tiles as triton_tiles
from ffpa_attn.triton_ops.launch import Tiles
from flops import nominal_flops
from timing import Timer, measure_in_turn
from workload import Workload, make_inputs

WIDTHS = (64, 128, 256)
WORKS = ("forward", "rows", "keys", "fp8")  # kernels; the backward has two, named after what a program owns
_FEW = 256  # rows and keys where a kernel is only to be compiled
_MOST_ACCUMULATORS = 224  # registers of a thread, which has 255
_REGISTERS = (168, 128)
_ALL_REGISTERS = 65536  # registers of one multiprocessor
_OTHER_REGISTERS = 24  # registers of a thread beside its accumulators
_LEAST_OWN = 64  # rows (or keys) of a program: as many as a product on a Hopper has
_WORTH_MORE = 6  # tiles, those with the fastest first calls, that are measured further


def candidates(work: str, width: int, arch: str) -> list[Tiles]:
    """Returns the tiles whose accumulators fit registers and whose stages fit shared memory, also with fewer registers
    per thread where that lets one more program share both.
    """
    found = []
    for rows, keys, warps, stages in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        tiles = Tiles(rows, keys, warps, stages)
        own, others = (keys, rows) if work == "keys" else (rows, keys)
        columns = {"rows": width + 2 * others, "keys": 2 * width + 2 * others}.get(work, width + others)
        accumulators = own * columns // (32 * warps)
        programs = archs.shared_memory_bytes(arch) // triton_attention.smem_bytes(tiles, (width, width), work)
        if accumulators > _MOST_ACCUMULATORS or own < _LEAST_OWN or not programs:
            continue
        found.append(tiles)
        for registers in _REGISTERS:
            sharing = _ALL_REGISTERS // (registers * 32 * warps)
            if accumulators + _OTHER_REGISTERS <= registers and 1 < sharing <= programs + 1:
                found.append(tiles._replace(registers=registers))
    return found


_CAP = 1 << 30


class Calls:
    """One problem's tensors, and calls on them with any tiles."""

    def __init__(self, width: int, causal: bool, work: str, n: int, heads: int):
        self.w = Workload(1, heads, heads, n, n, width, width, "bf16", causal, backward=work in ("rows", "keys"))
        self.inputs = make_inputs(self.w, "cuda", seed=0)
        self.rule = SimpleNamespace(
            scale=width**-0.5, softcap=0.0, visibility=Visibility(-1, 0 if causal else -1, False)
        )
        q = self.inputs.q
        self.out = torch.empty_like(q)
        self.lse = torch.empty(q.shape[:3], device="cuda")
        self.gradients = [torch.empty_like(q) for _ in range(3)]
        self.work, self.width = work, width
        self.memos: dict[Tiles, dict] = defaultdict(dict)
        kind, plan = ("fp8", TritonFp8Plan) if work == "fp8" else ("forward", TritonPlan)
        self.plan = plan(kind, (width, width), candidates(kind, width, gpu())[0], None, has_descriptors())
        if work == "fp8":
            self.in_8_bits = [x.to(torch.float8_e4m3fn) for x in (q, self.inputs.k, self.inputs.v)]
            self.in_8_bits[2] = self.in_8_bits[2].mT.contiguous().mT
            self.no_scale = torch.ones((), device="cuda").expand(*q.shape[:2], -(-n // FP8_BLOCK))
        elif work != "forward":
            self._forward(self.plan, {})
            first = {one: candidates(one, width, gpu())[0] for one in ("rows", "keys", "far")}
            self.plan = self.plan._replace(
                direction="backward", over_rows=first["rows"], over_keys=first["keys"], far=first["far"]
            )

    def run(self, tiles: Tiles) -> None:
        plan = self.plan._replace(**{"over_keys" if self.work == "keys" else "over_rows": tiles})
        if self.work == "forward":
            self._forward(plan, self.memos[tiles])
        elif self.work == "fp8":
            scales = [self.no_scale] * 3
            plan.forward_fp8(*self.in_8_bits, scales, self.out, None, self.rule, _CAP, self.memos[tiles])
        else:
            x = self.inputs
            saved = (x.grad, None, x.q, x.k, x.v, self.out, self.lse)
            plan.backward(saved, self.gradients, None, None, None, self.rule, _CAP, self.memos[tiles])

    def _forward(self, plan: TritonPlan, memo: dict) -> None:
        x = self.inputs
        plan.forward(x.q, x.k, x.v, self.out, self.lse, None, None, self.rule, _CAP, memo)


def gpu() -> str:
    return native.gpu_of(torch.device("cuda"))


def has_descriptors() -> bool:
    return int(gpu().removeprefix("sm_")) >= 90


def compile_one(case: tuple) -> str | None:
    """Leaves the kernel in Triton's cache; returns what stands against it, or None."""
    width, causal, work, heads, tiles = case
    try:
        Calls(width, causal, work, _FEW, heads).run(tiles)
        torch.cuda.synchronize()
    except Exception as error:  # any error: one tile less to measure
        return f"{work} {tiles}: {str(error).splitlines()[0]}"
    return None


def measured(calls: Calls, tiles: list[Tiles], iters: int) -> list[tuple[float, Tiles]]:
    """Returns (ms, tiles), the fastest first: from a few calls of each, and more, in turn, of the fastest."""
    timer = Timer("cuda")
    once = {one: lambda one=one: timer.milliseconds(lambda: calls.run(one)) for one in tiles}
    first = {one: min(call() for _ in range(3)) for one, call in once.items()}
    fastest = sorted(first, key=first.__getitem__)[:_WORTH_MORE]
    times: dict[Tiles, list[float]] = {}
    measure_in_turn({one: once[one] for one in fastest}, iters, times, lambda name: None, settle=True)
    return sorted(((median(times[one]), one) for one in fastest), key=lambda pair: pair[0])


def shown_tiles(tiles: Tiles) -> tuple:
    return tuple(tiles) if tiles.registers else tuple(tiles)[:-1]


def source(table: dict) -> str:
    """Returns the text of triton_ops/tiles.py with this table of what was measured."""
    text = Path(triton_tiles.__file__).read_text()
    begin, end = text.index("MEASURED = "), text.index("# Elsewhere")
    lines = []
    for arch, rows in table.items():
        lines += [
            f'    "{arch}": {{',
            *(f'        ("{work}", {causal}): {row},' for (work, causal), row in rows.items()),
            "    },",
        ]
    return "\n".join([f"{text[:begin]}MEASURED = {{", *lines, f"}}\n\n{text[end:]}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words = lambda text: tuple(text.split(","))  # noqa: E731
    parser.add_argument("--D", type=lambda text: tuple(map(int, words(text))), default=WIDTHS)
    parser.add_argument("--work", type=words, default=WORKS)
    parser.add_argument("--N", type=int, default=8192)
    parser.add_argument("--H", type=int, default=32)
    parser.add_argument("--iters", type=int, default=6)
    parser.add_argument("--write", action="store_true", help="into ffpa/ffpa_attn/triton_ops/tiles.py")
    args = parser.parse_args()

    kinds = list(itertools.product(args.work, args.D, (False, True)))
    cases = [(d, causal, work, args.H, tiles) for work, d, causal in kinds for tiles in candidates(work, d, gpu())]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        refused = dict(zip(cases, pool.map(compile_one, cases), strict=True))
    for reason in filter(None, refused.values()):
        print(reason, file=sys.stderr)
    table = {arch: {key: dict(row) for key, row in rows.items()} for arch, rows in triton_tiles.MEASURED.items()}
    for work, d, causal in kinds:
        calls = Calls(d, causal, work, args.N, args.H)
        found = measured(
            calls,
            [tiles for tiles in candidates(work, d, gpu()) if not refused[d, causal, work, args.H, tiles]],
            args.iters,
        )
        if not found:
            continue
        table.setdefault(gpu(), {}).setdefault((work, causal), {})[d] = shown_tiles(found[0][1])
        shown = [
            f"{shown_tiles(tiles)} {ms:.3f} ms {nominal_flops(calls.w) / ms * 1e-9:.0f} T" for ms, tiles in found[:4]
        ]
        print(f"{work} D={d}{' causal' if causal else ''}: {', '.join(shown)}", flush=True)
        if args.write:
            Path(triton_tiles.__file__).write_text(source(table))


if __name__ == "__main__":
    main()
