"""Pictures of a record: TFLOPS over head dim below the ceiling, and speedups over SDPA, one picture per accumulator."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from record import ACC_LEGEND, Record

_INK, _GRID, _PEER = "#222222", "#dddddd", "#8a8f98"
_OURS = ("#d1495b", "#1f77b4", "#2a9d5c", "#e08e1b", "#7b52ab", "#008b99", "#b5651d", "#c2549d", "#5a7d1f", "#384e9c")
_PEER_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 3)))


def _figure(title: str, subtitle: str):
    figure = Figure(figsize=(11, 6.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=15, fontweight="bold", color=_INK, loc="left", pad=26)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=10, color="#555555")
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=11)
    axes.set_xlabel("head dim D", fontsize=12)
    return figure, axes


def _subtitle(record: Record) -> str:
    iters = record.method["iters"]
    return f"{record.describe()}; medians of {iters} calls" + (
        "; a CPU: no claim of speed" if record.machine["kind"] == "cpu" else ""
    )


def tflops_figure(record: Record) -> Figure:
    figure, axes = _figure(f"Attention on {record.device}", _subtitle(record))
    dims = [result.workload.d for result in record.results]
    places = range(len(dims))
    ours, peers = iter(_OURS * 4), iter(_PEER_DASHES * 4)
    for series in record.series:
        best = [result.best(series) for result in record.results]
        points = [(place, row.tflops) for place, row in zip(places, best, strict=True) if row]
        fallback = any(row and row.is_ffpa and not row.own_kernel for row in best)
        label = series + (f" (ran on {next(row.kernel for row in best if row)})" if fallback else "")
        is_ours = series.startswith("FFPA")
        style = (
            {"color": next(ours), "linewidth": 2.2}
            if is_ours
            else {"color": _PEER, "linestyle": next(peers), "linewidth": 1.8}
        )
        axes.plot(*zip(*points, strict=True), marker="o" if is_ours else "s", markersize=5, label=label, **style)
    ceiling = [result.ceilings.gemm_tflops for result in record.results]
    gemm = record.results[0].ceilings.gemm
    axes.plot(places, ceiling, color=_INK, linestyle=":", linewidth=1.5, marker="_", label=f"ceiling: {gemm}")
    axes.set_xticks(places, [str(d) for d in dims])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(8))
    axes.set_ylabel("TFLOPS (nominal, visible pairs)", fontsize=12)
    axes.legend(fontsize=10, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    if any("L" in series.removeprefix("FFPA") for series in record.series if series.startswith("FFPA")):
        figure.supxlabel(ACC_LEGEND, fontsize=9, color="#555555", x=0.02, ha="left")
    return figure


def speedup_figure(record: Record, series: str) -> Figure | None:
    """None where SDPA did not run beside it."""
    bars = []
    for result in record.results:
        row = result.best(series)
        if row and result.sdpa:
            bars.append((str(result.workload.d), result.speedup(row)))
    if not bars:
        return None
    baseline = next(result.sdpa.series for result in record.results if result.sdpa)
    figure, axes = _figure(f"{series} against {baseline} on {record.device}", _subtitle(record))
    names, speedups = zip(*bars, strict=True)
    colors = [_OURS[2] if speedup >= 1 else _OURS[0] for speedup in speedups]
    drawn = axes.bar(names, speedups, width=0.66, color=colors)
    axes.bar_label(
        drawn, [f"{speedup:.2f}x" for speedup in speedups], padding=3, fontsize=11, fontweight="bold", color=_INK
    )
    axes.axhline(1, color=_INK, linewidth=1.2, linestyle="--")
    axes.set_xlim(-0.75, max(len(bars), 4) - 0.25)
    axes.set_ylim(0, max(*speedups, 1) * 1.12)
    axes.set_ylabel(f"times {baseline}", fontsize=12)
    return figure


def save_plots(record: Record, stem: Path) -> list[Path]:
    figures = {"TFLOPS": tflops_figure(record)}
    for series in record.series:
        if series.startswith("FFPA"):
            figures[f"{_file_name(series)}_Speedup"] = speedup_figure(record, series)
    paths = []
    stem.parent.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        if figure is not None:
            paths.append(stem.with_name(f"{stem.name}_{name}.png"))
            figure.savefig(paths[-1])
    return paths


def _file_name(series: str) -> str:
    """ "FFPA L1*" -> "ffpa+acc+f32+L1": the names of the rows."""
    for mark, acc in (("*^", "mixed"), ("*", "f32"), ("^", "f16")):
        if series.endswith(mark):
            return f"ffpa+acc+{acc}+{series.removeprefix('FFPA ').removesuffix(mark)}"
    return "ffpa+auto"
