"""Pictures of a record: TFLOPS over head dim below the ceiling, and speedups over SDPA, one picture per accumulator."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

from chip import MOST_REGISTERS, flash_attention_2
from ffpa_attn.specs.problem import ACCS
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from record import Record

_INK, _GRID, _PEER = "#222222", "#dddddd", "#8a8f98"
_LEVEL_COLORS = {1: "#1f77b4", 2: "#2a9d5c", 3: "#e08e1b", None: "#c8102e"}  # None: automatic
_ACC_LINES = {"f32": ("-", "o"), "f16": ("--", "^"), "mixed": ("-.", "D")}
_PEER_LINES = (("-", "s"), ("--", "v"), ("-.", "P"), (":", "X"), ("-", "<"), ("--", ">"), ("-.", "*"))


def _figure(title: str, subtitle: str, columns: int = 1):
    """Returns the figure, and its axes or the list of them."""
    figure = Figure(figsize=(11, 6.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False)[0]
    panels[0].set_title(title, fontsize=15, fontweight="bold", color=_INK, loc="left", pad=26)
    below = panels[0].text(0, 1.02, subtitle, transform=panels[0].transAxes, fontsize=10, color="#555555")
    below.set_in_layout(False)  # it may run on above the next panel
    for axes in panels:
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.tick_params(labelsize=11)
        axes.set_xlabel("head dim D", fontsize=12)
    return figure, panels if columns > 1 else panels[0]


def _legend(axes, lines, labels) -> None:
    axes.legend(
        lines, labels, fontsize=9.5, handlelength=3.4, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )


def _subtitle(record: Record) -> str:
    iters = record.method["iters"]
    return f"{record.describe()}; medians of {iters} calls" + (
        "; a CPU: no claim of speed" if record.machine["kind"] == "cpu" else ""
    )


def _fallback_note(record: Record, series: str) -> str:
    rows = [result.best(series) for result in record.results]
    kernels = sorted({row.kernel for row in rows if row and row.is_ffpa and not row.own_kernel})
    return f" (ran on {', '.join(kernels)})" if kernels else ""


def tflops_figure(record: Record) -> Figure:
    figure, axes = _figure(f"Attention on {record.device}", _subtitle(record))
    places = range(len(record.results))
    peer_lines = cycle(_PEER_LINES)
    for series in record.series:
        best = [(place, row) for place, result in enumerate(record.results) if (row := result.best(series))]
        row = best[0][1]
        in_f32 = (row.acc or "f32") == "f32"
        color, width = (_LEVEL_COLORS[row.level], 2.4 if in_f32 else 1.1) if row.is_ffpa else (_PEER, 1.6)
        line, marker = _ACC_LINES[row.acc or "f32"] if row.is_ffpa else next(peer_lines)
        label = (f"FFPA L{row.level}, {row.acc} sums" if row.level else series) + _fallback_note(record, series)
        style = {"color": color, "linewidth": width, "linestyle": line, "marker": marker, "markersize": 3 + 1.5 * width}
        axes.plot([place for place, _ in best], [row.tflops for _, row in best], label=label, **style)
    ceiling = [result.ceilings.gemm_tflops for result in record.results]
    gemm = record.results[0].ceilings.gemm
    axes.plot(places, ceiling, color=_INK, linestyle=":", linewidth=1.5, label=f"ceiling: {gemm}")
    axes.set_xticks(places, [str(result.workload.d) for result in record.results])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(8))
    axes.set_ylabel("TFLOPS (nominal, visible pairs)", fontsize=12)
    lines, labels = axes.get_legend_handles_labels()
    by_height = sorted(range(len(lines)), key=lambda i: -max(lines[i].get_ydata()))
    _legend(axes, [lines[i] for i in by_height], [labels[i] for i in by_height])
    if any(row.level for result in record.results for row in result.rows):
        note = "mixed sums: QK^T in f32, PV in f16; each point the best of its stages"
        figure.supxlabel(note, fontsize=9, color="#555555", x=0.02, ha="left")
    return figure


def speedup_figure(record: Record, acc: str) -> Figure | None:
    """Draws a group of bars per head dim, one bar per level with these sums; None if that or SDPA was not measured."""
    results = [result for result in record.results if result.sdpa]
    # What runs when nothing is forced accumulates in f32.
    rows = {row.series: row for result in results for row in result.rows if row.is_ffpa and (row.acc or "f32") == acc}
    shown = [series for series in record.series if series in rows]
    if not shown:
        return None
    baseline = results[0].sdpa.series
    figure, axes = _figure(f"Speedup over {baseline}, {acc} accumulators, {record.device}", _subtitle(record))
    width = 0.8 / len(shown)
    highest = 1.0
    for i, series in enumerate(shown):
        best = [(place, result.speedup(row)) for place, result in enumerate(results) if (row := result.best(series))]
        places, speedups = zip(*best, strict=True)
        highest = max(highest, *speedups)
        left = [place - 0.4 + width * (i + 0.5) for place in places]
        label = series.rstrip("*^") + _fallback_note(record, series)
        bars = axes.bar(left, speedups, width=0.92 * width, color=_LEVEL_COLORS[rows[series].level], label=label)
        texts = [f"{speedup:.2f}x" for speedup in speedups]
        style = {"fontsize": 11, "fontweight": "bold"} if len(shown) == 1 else {"fontsize": 9, "rotation": 90}
        axes.bar_label(bars, texts, padding=3, color=_INK, **style)
    axes.axhline(1, color=_INK, linewidth=1.2, linestyle="--", label=baseline)
    axes.set_xticks(range(len(results)), [str(result.workload.d) for result in results])
    axes.set_xlim(-0.6, max(len(results), 4) - 0.4)
    axes.set_ylim(0, highest * 1.15)
    axes.set_ylabel(f"times {baseline}", fontsize=12)
    _legend(axes, *axes.get_legend_handles_labels())
    return figure


def chip_figure(record: Record) -> Figure | None:
    """Draws shared memory and registers over head dim, beside a tiling that keeps whole rows on chip; f32 sums."""
    uses = [(result.workload.d, use) for result in record.results for use in result.chip if use.acc == "f32"]
    if not uses:
        return None
    title = "What a block of threads takes of the chip"
    figure, panels = _figure(
        title, f"kernels chosen for {record.method['chip']}; their rings take what shared memory there is", columns=2
    )
    whole_rows = [64, 128, 192, 256, *sorted({d for d, _ in uses if d > 256})]
    quantities = (
        ("shared memory of a block, KB", uses[0][1].most_shared_bytes >> 10, lambda use: use.shared_bytes / 1024),
        ("registers of a thread for O and S", MOST_REGISTERS, lambda use: use.accumulators),
    )
    for i, (axes, (what, most, of)) in enumerate(zip(panels, quantities, strict=True)):
        needed = [flash_attention_2(d)[i] / (1024, 1)[i] for d in whole_rows]
        label = "FlashAttention-2 tiling, 64 x 64"
        axes.plot(whole_rows, needed, color=_PEER, marker="s", linewidth=1.8, label=label)
        for level, width in ((1, 5.0), (2, 2.6), (3, 1.8)):  # levels 1 and 2 are one kernel up to 640: both must show
            line = [(d, of(use)) for d, use in uses if use.level == level]
            style = {"color": _LEVEL_COLORS[level], "marker": "o", "markersize": 3 + width, "linewidth": width}
            axes.plot(*zip(*line, strict=True), label=f"FFPA L{level}", **style)
        axes.axhline(most, color=_INK, linestyle=":", linewidth=1.5, label=f"limit: {most}")
        axes.set_ylim(0, 1.35 * max(needed))
        axes.set_xticks(range(128, max(whole_rows) + 1, 128))
        axes.set_ylabel(what, fontsize=12)
        axes.legend(fontsize=9.5, frameon=False, loc="upper left")
    return figure


BAR_DIMS = (256, 512, 1024)


def bars_figure(records: Mapping[str, Record]) -> Figure:
    """Draws ours, SDPA and the fastest other side by side, for some head dims in each direction."""
    first = next(iter(records.values()))
    figure, axes = _figure(f"Attention on {first.device}", _subtitle(first))
    results = [
        (name, r) for d in BAR_DIMS for name, record in records.items() for r in record.results if r.workload.d == d
    ]
    shown = (
        ("FFPA", _LEVEL_COLORS[None], lambda r: r.best("FFPA auto")),
        ("PyTorch's efficient attention", _PEER, lambda r: r.sdpa),
        ("the fastest other", "#c9ccd1", lambda r: r.rival),
    )
    for i, (label, color, row_of) in enumerate(shown):
        rows = [(place, row) for place, (_, result) in enumerate(results) if (row := row_of(result))]
        if rows:
            places = [place + 0.28 * (i - 1) for place, _ in rows]
            bars = axes.bar(places, [row.tflops for _, row in rows], width=0.26, color=color, label=label)
            axes.bar_label(bars, [f"{row.tflops:.0f}" for _, row in rows], padding=3, color=_INK, fontsize=9.5)
    for place, (_, result) in enumerate(results):
        label = "matrix product" if place == 0 else None
        axes.hlines(result.ceilings.gemm_tflops, place - 0.42, place + 0.42, _INK, ":", label=label)
    axes.set_xticks(range(len(results)), [f"{r.workload.d}\n{name.replace('_', ', ')}" for name, r in results])
    axes.set_ylabel("TFLOPS (nominal, visible pairs)", fontsize=12)
    _legend(axes, *axes.get_legend_handles_labels())
    return figure


def save_bars(records: Mapping[str, Record], path: Path, mark: str = "") -> None:
    bars_figure(records).savefig(path, metadata={"Comment": mark})


def save_plots(record: Record, stem: Path, mark: str = "") -> list[Path]:
    """Saves the pictures; `mark` goes into each file, where nobody sees it."""
    figures = {"TFLOPS": tflops_figure(record)}
    figures |= {f"ffpa+acc+{acc}_Speedup": speedup_figure(record, acc) for acc in ACCS}
    figures["on_chip"] = chip_figure(record)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        if figure is not None:
            paths.append(stem.with_name(f"{stem.name}_{name}.png"))
            figure.savefig(paths[-1], metadata={"Comment": mark})
    return paths
