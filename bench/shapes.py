"""Measures calls of every shape that people run, and what each candidate would have taken: the choice has no regret
where the chosen one is as fast as the best.

`python bench/shapes.py --write NAME` measures the grid on this GPU, writes bench/results/NAME.json, and draws the map: a
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import record
import torch
import torch.nn.functional as F
from ceilings import CeilingCalls
from ffpa_attn import env, explain, ffpa, ffpa_varlen
from timing import Timer, measure_in_turn
from torch.nn.attention import SDPBackend, sdpa_kernel

RESULTS = Path(__file__).resolve().parent / "results"
_BACKENDS = {"forward": ("hopper", "mma", "triton", "sdpa"), "backward": ("hopper", "mma", "triton")}
_OF_SDPA = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
_CHOSEN, _SDPA = "chosen", "SDPA's best"


@dataclass(frozen=True)
class Cell:
    kind: str
    d: int
    d_v: int
    batch: int
    heads_q: int
    heads_kv: int
    n_q: int
    n_k: int
    causal: bool = False
    window: int = -1  # keys before the diagonal
    masked: bool = False
    packed: bool = False
    direction: str = "forward"

    @property
    def pairs(self) -> float:
        """Returns how many pairs of a row and a key a head has that see each other."""
        shift = self.n_k - self.n_q

        def seen_by(row: int) -> int:
            first = 0 if self.window < 0 else max(row + shift - self.window, 0)
            end = min(row + shift + 1, self.n_k) if self.causal or self.window >= 0 else self.n_k
            return max(end - first, 0)

        return sum(map(seen_by, range(self.n_q)))

    @property
    def flops(self) -> float:
        products = 2 * (self.d + self.d_v) if self.direction == "forward" else 2 * (3 * self.d + 2 * self.d_v)
        return products * self.pairs * self.batch * self.heads_q

    @property
    def bytes(self) -> float:
        """Returns the bytes that have to be read or written: K and V once, Q and O."""
        rows, keys = self.batch * self.heads_q * self.n_q, self.batch * self.heads_kv * min(self.n_k, self.pairs)
        return 2 * (rows + keys) * (self.d + self.d_v) * (1 if self.direction == "forward" else 2)

    @property
    def row(self) -> str:
        """Names the line of the map that the cell is in."""
        rows = "N" if self.n_q == self.n_k else str(self.n_q)
        notes = [name for name in ("causal", "masked", "packed") if getattr(self, name)]
        notes += [f"window {self.window}"] * (self.window >= 0) + [self.direction] * (self.direction != "forward")
        return " ".join([f"{self.kind} B={self.batch} H={self.heads_q}/{self.heads_kv} Nq={rows}", *notes])


@dataclass(frozen=True)
class Measured:
    cell: Cell
    kernel: str
    microseconds: dict[str, float]  # of the chosen kernel, of each candidate, of SDPA's best backend
    share: float  # of the ceiling that binds

    @property
    def regret(self) -> float:
        ours = [t for name, t in self.microseconds.items() if name not in (_CHOSEN, _SDPA)]
        return self.microseconds[_CHOSEN] / min(ours, default=self.microseconds[_CHOSEN])


_HEADS = {64: (32, 8), 128: (32, 8), 192: (16, 16), 256: (32, 8), 320: (16, 16), 512: (32, 4), 576: (128, 1)}
_VALUES = {192: 128, 576: 512}


def _cells() -> Iterator[Cell]:
    """Gives the grid: sizes rise by powers of two within each line of the map."""
    for d, (heads, heads_kv) in _HEADS.items():
        base = Cell("square", d, _VALUES.get(d, d), 1, heads, heads_kv, 1024, 1024)
        if d < 576:
            for n in (1024, 2048, 4096, 8192):
                yield replace(base, n_q=n, n_k=n)
                yield replace(base, n_q=n, n_k=n, causal=True)
                if d != 192:
                    yield replace(base, n_q=n, n_k=n, causal=True, direction="backward")
            for n in (4096, 16384):
                yield replace(base, kind="few heads", heads_q=2, heads_kv=1, n_q=n, n_k=n)
                yield replace(base, kind="window", n_q=n, n_k=n, causal=True, window=1023)
        for batch, n_k in ((1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768), (64, 1024)):
            yield replace(base, kind="decode", batch=batch, n_q=1, n_k=n_k)
        for n_q in (2, 4, 8, 16):
            yield replace(base, kind="short", batch=8, n_q=n_q, n_k=8192, causal=True)
        for n_q in (32, 64, 65, 128, 256, 512):
            yield replace(base, kind="chunk", n_q=n_q, n_k=32768, causal=True)
        if d in (128, 512):
            for n in (64, 256):
                yield replace(base, kind="short sequences", batch=64, n_q=n, n_k=n)
            for n in (1024, 4096):
                yield replace(base, kind="pack", batch=4, n_q=n, n_k=n, causal=True, packed=True)
                yield replace(base, kind="mask", n_q=n, n_k=n, masked=True)


def quick_cells() -> list[Cell]:
    return [Cell("square", 64, 64, 1, 2, 1, 16, 16), Cell("decode", 64, 64, 1, 2, 1, 1, 32)]


def _calls(c: Cell, device: str) -> tuple[Callable[[], object], Callable[[], object] | None, tuple]:
    """Returns our call, SDPA's where it means the same, and the tensors that explain() is asked about."""
    generator = torch.Generator(device).manual_seed(0)

    def random(heads, n, d):
        shape = (c.batch * n, heads, d) if c.packed else (c.batch, heads, n, d)
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    q, k = random(c.heads_q, c.n_q, c.d), random(c.heads_kv, c.n_k, c.d)
    v = k[..., : c.d_v] if c.d == 576 else random(c.heads_kv, c.n_k, c.d_v)
    options = {"causal": c.causal}
    if c.window >= 0:
        options["window"] = (c.window, -1)
    if c.masked:
        options["mask"] = torch.rand(1, 1, c.n_q, c.n_k, device=device, generator=generator) < 0.9
    if c.packed:
        offsets = torch.arange(0, c.batch + 1, dtype=torch.int32, device=device) * c.n_q
        return lambda: ffpa_varlen(q, k, v, offsets, offsets, c.n_q, c.n_k, **options), None, ()
    if c.direction == "backward":
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = {}

        def backward(forward, name):
            if name not in out:
                out[name] = forward(*leaves)
                out["grad"] = torch.randn_like(out[name])
            torch.autograd.grad(out[name], leaves, out["grad"], retain_graph=True)

        def ours():
            backward(lambda *x: ffpa(*x, **options), env.run_flags()["FFPA_BACKEND"])

        return ours, lambda: backward(lambda *x: _sdpa(*x, c), _SDPA), ()
    means_the_same = not c.masked and c.window < 0 and (not c.causal or c.n_q == c.n_k)
    describe = lambda: explain(q, k, v, **options).kernel  # noqa: E731
    return lambda: ffpa(q, k, v, **options), (lambda: _sdpa(q, k, v, c)) if means_the_same else None, (describe,)


def _sdpa(q, k, v, c: Cell):
    return F.scaled_dot_product_attention(q, k, v, is_causal=c.causal, enable_gqa=c.heads_q != c.heads_kv)


def _in_backend(call: Callable[[], object], name: str) -> Callable[[], object]:
    def run():
        with env.overridden("FFPA_BACKEND", "auto" if name == _CHOSEN else name):
            return call()

    return run


def _in_sdpa(call: Callable[[], object], backend: SDPBackend) -> Callable[[], object]:
    def run():
        with sdpa_kernel(backend):
            return call()

    return run


def measure(
    cells: Sequence[Cell], device: str, iters: int = 9, on_cell: Callable[[Measured], None] = print
) -> list[Measured]:
    timer, ceilings, found = Timer(device), CeilingCalls(device), []
    times: dict[str, list[float]] = {}
    of_ceilings = {name: (lambda call=call: timer.milliseconds(call)) for name, call in ceilings.calls.items()}
    measure_in_turn(of_ceilings, iters, times, lambda name: None, settle=False)
    limits = ceilings.from_times(times)
    for c in cells:
        ours, theirs, describe = _calls(c, device)
        calls = {name: _in_backend(ours, name) for name in (_CHOSEN, *_BACKENDS[c.direction])}
        if theirs is not None and device == "cuda":
            calls |= {f"SDPA {backend.name}": _in_sdpa(theirs, backend) for backend in _OF_SDPA}
        for name in list(calls):  # compiles, plans, and leaves out what cannot run the cell
            try:
                calls[name]()
            except (NotImplementedError, RuntimeError, ValueError):
                if name == _CHOSEN:
                    raise
                del calls[name]
        times = {}
        subjects = {name: (lambda call=call: timer.milliseconds(call)) for name, call in calls.items()}
        measure_in_turn(subjects, iters, times, lambda name: None, settle=False)
        medians = {name: statistics.median(ms) * 1e3 for name, ms in times.items()}
        of_sdpa = [medians.pop(name) for name in list(medians) if name.startswith("SDPA ")]
        if of_sdpa:
            medians[_SDPA] = min(of_sdpa)
        least = max(c.flops / limits.gemm_tflops * 1e-6, c.bytes / limits.copy_gb_per_s * 1e-3)
        kernel = describe[0]() if describe else ""
        found.append(Measured(c, kernel, medians, least / medians[_CHOSEN]))
        on_cell(found[-1])
    return found


def line(m: Measured) -> str:
    times = ", ".join(f"{name} {t:.1f}" for name, t in m.microseconds.items())
    return f"| {m.cell.row} | {m.cell.d} | {m.cell.n_k} | {times} | {m.regret:.2f} | {m.share:.0%} | {m.kernel} |"


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
    return [Measured(**{**m, "cell": Cell(**m["cell"])}) for m in cells]


def draw(found: Sequence[Measured], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dims = sorted({m.cell.d for m in found})
    sizes = sorted({m.cell.n_k for m in found})
    rows = [list(dict.fromkeys(m.cell.row for m in found if m.cell.d == d)) for d in dims]
    figure, panels = plt.subplots(
        len(dims), 1, figsize=(9, sum(map(len, rows)) * 0.22 + len(dims)), squeeze=False,
        gridspec_kw={"height_ratios": [len(r) for r in rows]},
    )  # fmt: skip
    for d, names, panel in zip(dims, rows, panels[:, 0], strict=True):
        shares = [[float("nan")] * len(sizes) for _ in names]
        for m in found:
            if m.cell.d == d:
                shares[names.index(m.cell.row)][sizes.index(m.cell.n_k)] = m.share
        image = panel.imshow(shares, aspect="auto", vmin=0, vmax=1, cmap="viridis")
        panel.set_title(f"D = {d}", fontsize=9, loc="left")
        panel.set_yticks(range(len(names)), names, fontsize=6)
        panel.set_xticks(range(len(sizes)), sizes, fontsize=6)
    figure.colorbar(image, ax=panels[:, 0].tolist(), label="share of the chip (matrix product or copy, which binds)")
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--write", metavar="NAME", help="write the record, and draw the map")
    parser.add_argument("--draw", metavar="NAME", help="draw the map of a record")
    parser.add_argument("--kind", help="measure the cells of one kind")
    parser.add_argument("--iters", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="measure two small cells, on any machine")
    chosen = parser.parse_args(arguments)
    if chosen.draw:
        draw(load(chosen.draw), RESULTS / f"{chosen.draw}.png")
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
        draw(found, RESULTS / f"{chosen.write}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
