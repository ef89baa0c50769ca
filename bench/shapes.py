"""Measures calls of every shape that people run, and what each candidate would have taken: the choice has no regret
where the chosen one is as fast as the best.

`python bench/shapes.py --write NAME` measures the grid on this GPU, writes bench/results/shapes/NAME.json, and draws the map: a
panel for each head dim, a line for each kind of shape, a column for each number of keys; the colour is the share of the
chip. `--kind decode` measures one kind, `--draw NAME` draws what was measured before, `--quick` shows on any machine that
it can. Calls are single ones with a cold L2, all candidates in turn (timing.py), in the same run as the ceilings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import record
import torch
from ceilings import CeilingCalls
from ffpa_attn import env, explain, ffpa, ffpa_varlen
from flops import least_bytes, nominal_flops, visible_pairs
from provider import Provider, Unavailable
from providers import PEERS, sdpa
from timing import Timer, measure_in_turn
from workload import Inputs, Workload, make_inputs

RESULTS = Path(__file__).resolve().parent / "results" / "shapes"
_BACKENDS = {False: ("hopper", "mma", "triton", "sdpa"), True: ("hopper", "mma", "triton")}  # forward, backward
_SDPA_BACKENDS = {"cuDNN": PEERS["sdpa-cudnn"], "flash": PEERS["sdpa-flash"], "efficient": sdpa}
_CHOSEN, _SDPA = "chosen", "SDPA's best"


@dataclass(frozen=True)
class Cell:
    kind: str
    work: Workload
    window: int = -1  # keys before the diagonal
    masked: bool = False

    @property
    def flops(self) -> float:
        if self.window < 0:
            return nominal_flops(self.work)
        w = self.work
        seen, hidden = (visible_pairs(w.n_q, n, True) for n in (w.n_kv, max(w.n_kv - self.window - 1, 0)))
        return nominal_flops(w) * (seen - hidden) / seen

    @property
    def row(self) -> str:
        """Names the line of the map that the cell is in."""
        w = self.work
        rows = "N" if w.n_q == w.n_kv else str(w.n_q)
        notes = [name for name in ("causal", "packed", "backward") if getattr(w, name)] + ["masked"] * self.masked
        notes += [f"window {self.window}"] * (self.window >= 0)
        return " ".join([f"{self.kind} B={w.batch} H={w.heads}/{w.heads_kv} Nq={rows}", *notes])


@dataclass(frozen=True)
class Measured:
    cell: Cell
    kernel: str
    microseconds: dict[str, float]  # of the chosen kernel, of each candidate, of SDPA's backends and the best of these
    share: float  # of the ceiling that binds

    @property
    def regret(self) -> float:
        """Compares with all that could have run the cell: SDPA's backward needs what its own forward saved."""
        left_out = (_SDPA, *_SDPA_BACKENDS) if self.cell.work.backward else ()
        return self.microseconds[_CHOSEN] / min(t for name, t in self.microseconds.items() if name not in left_out)


_HEADS = {64: (32, 8), 128: (32, 8), 192: (16, 16), 256: (32, 8), 320: (16, 16), 512: (32, 4), 576: (128, 1)}
_VALUES = {192: 128, 576: 512}


def _cells() -> Iterator[Cell]:
    """Gives the grid: sizes rise by powers of two within each line of the map."""
    for d, (heads, heads_kv) in _HEADS.items():
        base = Workload(1, heads, heads_kv, 1024, 1024, d, _VALUES.get(d, d), "bf16")

        def work(n_q: int, n_kv: int, base=base, **changes) -> Workload:
            return replace(base, n_q=n_q, n_kv=n_kv, **changes)

        if d < 576:
            for n in (1024, 2048, 4096, 8192):
                yield Cell("square", work(n, n))
                yield Cell("square", work(n, n, causal=True))
                if d != 192:
                    yield Cell("square", work(n, n, causal=True, backward=True))
            yield Cell("square", work(16384, 16384))
            yield Cell("square", work(16384, 16384, causal=True))
            if d != 192:
                yield Cell("square", work(4096, 4096, backward=True))
                yield Cell("window", work(4096, 4096, causal=True, backward=True), window=1023)
            for n in (4096, 16384):
                yield Cell("few heads", work(n, n, heads=2, heads_kv=1))
                yield Cell("window", work(n, n, causal=True), window=1023)
                if d in (64, 128, 256, 512):
                    for few in (1, 2, 4):
                        yield Cell("few heads", work(n, n, heads=few, heads_kv=few))
        batches = (1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768), (64, 1024), (64, 8192)
        for batch, n_kv in batches:
            yield Cell("decode", work(1, n_kv, batch=batch))
        for n_q in (2, 4, 8, 16):
            yield Cell("short", work(n_q, 8192, batch=8, causal=True))
        for n_q in (32, 64, 65, 128, 256, 512):
            yield Cell("chunk", work(n_q, 32768, causal=True))
        if d in (256, 576):
            for batch, n_kv in ((1, 8192), (8, 8192), (64, 8192)):
                yield Cell("decode", work(1, n_kv, batch=batch, heads=16, heads_kv=1))
        if d == 256:
            yield Cell("square", work(4096, 4096, heads=16, heads_kv=1))
            yield Cell("square", work(4096, 4096, heads=16, heads_kv=1, causal=True))
        if d in (256, 512, 576):
            for n_q in (128, 512):
                yield Cell("chunk", work(n_q, 32768, heads=16 if d == 576 else 8, heads_kv=1, causal=True))
        if d in (64, 128, 256, 320, 512):
            for n in (64, 256):
                yield Cell("short sequences", work(n, n, batch=64))
            yield Cell("short sequences", work(256, 256, batch=64, causal=True))
            for n in (1024, 4096):
                yield Cell("pack", work(n, n, batch=4, causal=True, packed=True))
                yield Cell("mask", work(n, n), masked=True)


def quick_cells() -> list[Cell]:
    return [Cell(kind, Workload(1, 2, 1, n, 16, 64, 64, "bf16")) for kind, n in (("square", 16), ("decode", 1))]


def _options(c: Cell, device: str) -> dict:
    options: dict = {"causal": c.work.causal}
    if c.window >= 0:
        options["window"] = (c.window, -1)
    if c.masked:
        options["mask"] = torch.rand(1, 1, c.work.n_q, c.work.n_kv, device=device) < 0.9
    return options


def _calls(c: Cell, x: Inputs, options: dict) -> dict[str, Callable[[], object]]:
    """Returns the calls that can run the cell: the chosen one, each candidate, SDPA's backends where they mean the same."""
    function = ffpa_varlen if c.work.packed else ffpa
    ours = Provider("", "", lambda x: function(x.q, x.k, x.v, *x.offsets, **options))

    def in_backend(name: str) -> Callable[[], object]:
        with env.overridden("FFPA_BACKEND", name):
            call = ours.prepare(c.work, x)

        def run():
            with env.overridden("FFPA_BACKEND", name):
                return call()

        return run

    def of_sdpa(make) -> Callable[[], object]:
        return make(c.work, x).prepare(c.work, x)

    found = {_CHOSEN: in_backend("auto")}
    makers = {name: partial(in_backend, name) for name in _BACKENDS[c.work.backward]}
    if x.q.is_cuda and not (c.masked or c.work.packed or c.window >= 0):
        makers |= {name: partial(of_sdpa, make) for name, make in _SDPA_BACKENDS.items()}
        if c.work.heads != c.work.heads_kv:
            del makers["efficient"]  # its users repeat K and V, of which there may be tens of gigabytes
    for name, make in makers.items():
        try:
            call = make()
            call()  # compiles, and plans
        except (NotImplementedError, RuntimeError, ValueError, Unavailable):
            continue
        found[name] = call
    found[_CHOSEN]()
    return found


def measure(
    cells: Sequence[Cell], device: str, iters: int = 9, on_cell: Callable[[Measured], None] = print
) -> list[Measured]:
    timer, ceilings, found = Timer(device), CeilingCalls(device), []
    times: dict[str, list[float]] = {}
    of_ceilings = {name: (lambda call=call: timer.milliseconds(call)) for name, call in ceilings.calls.items()}
    measure_in_turn(of_ceilings, iters, times, lambda name: None, settle=False)
    limits = ceilings.from_times(times)
    for c in cells:
        x, options = make_inputs(c.work, device, seed=0), _options(c, device)
        if c.work.d == 576:  # MLA has K and V in one storage
            x = x._replace(v=x.k[..., : c.work.d_v])
        calls = _calls(c, x, options)
        times = {}
        subjects = {name: (lambda call=call: timer.milliseconds(call)) for name, call in calls.items()}
        measure_in_turn(subjects, iters, times, lambda name: None, settle=False)
        medians = {name: statistics.median(ms) * 1e3 for name, ms in times.items()}
        if of_sdpa := [medians[name] for name in _SDPA_BACKENDS if name in medians]:
            medians[_SDPA] = min(of_sdpa)
        least = max(c.flops / limits.gemm_tflops * 1e-6, least_bytes(c.work) / limits.copy_gb_per_s * 1e-3)
        kernel = "" if c.work.packed or c.work.backward else explain(x.q, x.k, x.v, **options).kernel
        found.append(Measured(c, kernel, medians, least / medians[_CHOSEN]))
        on_cell(found[-1])
    return found


def line(m: Measured) -> str:
    times = ", ".join(f"{name} {t:.1f}" for name, t in m.microseconds.items())
    return f"| {m.cell.row} | {m.cell.work.d} | {m.cell.work.n_kv} | {times} | {m.regret:.2f} | {m.share:.0%} | {m.kernel} |"


def summary(found: Sequence[Measured]) -> str:
    regrets = sorted(m.regret for m in found)
    beside = [m.microseconds[_SDPA] / m.microseconds[_CHOSEN] for m in found if _SDPA in m.microseconds]
    words = [f"{len(found)} cells: regret {statistics.median(regrets):.3f} in the median, {regrets[-1]:.2f} at most"]
    words += [f"{sum(r > 1.03 for r in regrets)} above 1.03"]
    if beside:
        words += [f"beside SDPA's best {min(beside):.2f} to {max(beside):.2f}, median {statistics.median(beside):.2f}"]
    return "; ".join(words)


def save(found: Sequence[Measured], stem: str) -> Path:
    path = RESULTS / f"{stem}.json"
    cells = [asdict(m) for m in found]
    about = {"machine": record.machine("cuda"), "source": record.source()}
    path.write_text(json.dumps({**about, "cells": cells}, indent=1) + "\n", encoding="utf-8")
    return path


def load(stem: str) -> list[Measured]:
    cells = json.loads((RESULTS / f"{stem}.json").read_text(encoding="utf-8"))["cells"]

    def cell(of: dict) -> Cell:
        return Cell(**{**of, "work": Workload(**of["work"])})

    return [Measured(**{**m, "cell": cell(m["cell"])}) for m in cells]


def draw(found: Sequence[Measured], path: Path) -> None:
    from matplotlib.figure import Figure

    dims = sorted({m.cell.work.d for m in found})
    sizes = sorted({m.cell.work.n_kv for m in found})
    rows = [list(dict.fromkeys(m.cell.row for m in found if m.cell.work.d == d)) for d in dims]
    figure = Figure(figsize=(9, sum(map(len, rows)) * 0.22 + len(dims)))
    panels = figure.subplots(len(dims), 1, squeeze=False, gridspec_kw={"height_ratios": [len(r) for r in rows]})
    for d, names, panel in zip(dims, rows, panels[:, 0], strict=True):
        shares = [[float("nan")] * len(sizes) for _ in names]
        for m in found:
            if m.cell.work.d == d:
                shares[names.index(m.cell.row)][sizes.index(m.cell.work.n_kv)] = m.share
        image = panel.imshow(shares, aspect="auto", vmin=0, vmax=1, cmap="viridis")
        panel.set_title(f"D = {d}", fontsize=9, loc="left")
        panel.set_yticks(range(len(names)), names, fontsize=6)
        panel.set_xticks(range(len(sizes)), sizes, fontsize=6)
    figure.colorbar(image, ax=panels[:, 0].tolist(), label="share of the chip (matrix product or copy, which binds)")
    figure.savefig(path, dpi=110, bbox_inches="tight")


def draw_small(found: Sequence[Measured], path: Path) -> None:
    """Draws one panel: a line for each kind of call, a column for each head dim, the median share of its cells."""

    from matplotlib.figure import Figure

    def kind(m: Measured) -> str:
        notes = [name for name in ("causal", "backward") if m.cell.kind == "square" and getattr(m.cell.work, name)]
        return ", ".join([m.cell.kind, *notes])

    dims, kinds = sorted({m.cell.work.d for m in found}), list(dict.fromkeys(map(kind, found)))
    figure = Figure(figsize=(6, 0.3 * len(kinds) + 0.6))
    panel = figure.subplots()
    shares = [[float("nan")] * len(dims) for _ in kinds]
    for line, of_kind in enumerate(kinds):
        for column, d in enumerate(dims):
            cells = [m.share for m in found if kind(m) == of_kind and m.cell.work.d == d]
            if not cells:
                continue
            share = shares[line][column] = statistics.median(cells)
            colour = "white" if share > 0.7 else "black"
            panel.text(column, line, f"{share:.0%}", ha="center", va="center", fontsize=7, color=colour)
    panel.imshow(shares, aspect="auto", vmin=0, vmax=1, cmap="Greens")
    panel.set_yticks(range(len(kinds)), kinds, fontsize=8)
    panel.set_xticks(range(len(dims)), [f"D = {d}" for d in dims], fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def _draw_both(found: Sequence[Measured], stem: str) -> None:
    draw(found, RESULTS / f"{stem}.png")
    draw_small(found, RESULTS / f"{stem}_small.png")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--write", metavar="NAME", help="write the record, and draw the map")
    parser.add_argument("--draw", metavar="NAME", help="draw the map of a record")
    parser.add_argument("--kind", help="measure the cells of one kind")
    parser.add_argument("--iters", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="measure two small cells, on any machine")
    chosen = parser.parse_args(arguments)
    if chosen.draw:
        _draw_both(load(chosen.draw), chosen.draw)
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not chosen.quick:
        parser.error("the grid needs a GPU; --quick runs anywhere")
    cells = quick_cells() if chosen.quick else [c for c in _cells() if chosen.kind in (None, c.kind)]
    print("| shape | D | keys | µs | regret | share | kernel |\n|---|---:|---:|---|---:|---:|---|")
    found = measure(cells, device, chosen.iters, lambda m: print(line(m), flush=True))
    print(f"\n{summary(found)}")
    if chosen.write:
        save(found, chosen.write)
        _draw_both(found, chosen.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
