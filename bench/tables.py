"""The Markdown table of a record: one column per head dim, TFLOPS of every series, speedups over SDPA."""

from __future__ import annotations

from collections.abc import Mapping

from chip import ChipUse
from record import ACC_LEGEND, Record, Row
from workload import Workload


def _three_digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def _tflops(row: Row | None) -> str:
    if row is None:
        return "-"
    fallback = "†" if row.is_ffpa and not row.own_kernel else ""
    return f"{_three_digits(row.tflops)}T{fallback}" + ("(wrong)" if row.problem else "")


def _fallback_notes(rows: list[Row]) -> list[str]:
    kernels = sorted({row.kernel for row in rows if row.is_ffpa and not row.own_kernel})
    return [f"† ran on {' or '.join(kernels)}, not on a kernel of this project"] if kernels else []


def bench_table(record: Record) -> str:
    results = record.results
    lines = ["|".join(["", "Algorithm", *(str(result.workload.d) for result in results), ""])]
    lines.append("|" + ":---:|" * (len(results) + 1))
    for series in record.series:
        best = [result.best(series) for result in results]
        lines.append("|".join(["", series, *map(_tflops, best), ""]))
        if series.startswith("FFPA"):
            speedups = [row and result.speedup(row) for result, row in zip(results, best, strict=True)]
            lines.append("|".join(["", "Speedup", *("-" if x is None else f"{x:.2f}x" for x in speedups), ""]))
    lines.append(
        "|".join(["", "Ceiling", *(f"{_three_digits(result.ceilings.gemm_tflops)}T" for result in results), ""])
    )
    return "\n".join(lines)


def front_table(records: Mapping[str, Record]) -> str:
    """Makes one line for each head dim and each record, which is named after its direction."""
    lines = [
        "| D | | FFPA | SDPA | the fastest other | matrix product | memory: FFPA, SDPA |",
        "|---|---|---|---|---|---|---|",
    ]
    results = [(name, result) for name, record in records.items() for result in record.results]
    for name, result in sorted(results, key=lambda pair: pair[1].workload.d):
        ours, sdpa, rival = result.best("FFPA auto"), result.sdpa, result.rival
        other = f"{_tflops(rival)} ({rival.kernel})" if rival else "none runs"
        memory = ", ".join(_extra_mib(row, result.workload) for row in (ours, sdpa))
        gemm = f"{_three_digits(result.ceilings.gemm_tflops)}T"
        lines.append(
            f"| {result.workload.d} | {name.replace('_', ', ')} | **{_tflops(ours)}** | {_tflops(sdpa)} | {other} | {gemm} | {memory} |"
        )
    first = next(iter(records.values()))
    origins = sorted({record.origin for record in records.values()})
    what = f"{first.device}, {_workload(first)}; medians of {first.method['iters']} calls"
    said = "nominal TFLOPS of the visible pairs; memory at the peak beside the results"
    if any(result.rival and result.rival.problem for _, result in results):
        said += "; wrong: more than twice the error of PyTorch's own steps in this type"
    said += "".join(f"; {note}" for note in _fallback_notes([result.best("FFPA auto") for _, result in results]))
    return "\n".join(lines) + f"\n\n{what}; {said}; {', '.join(origins)}.\n"


def _workload(record: Record) -> str:
    """Describes the workload without its direction."""
    return ", ".join(part for part in record.describe().split(", ") if part not in ("causal", "backward"))


def _extra_mib(row: Row | None, w: Workload) -> str:
    if row is None or row.peak_bytes is None:
        return "-"
    keys = w.batch * w.heads_kv * w.n_kv * (w.d + w.d_v)
    results = w.batch * w.heads * w.n_q * w.d + keys if w.backward else w.batch * w.heads * w.n_q * w.d_v
    return f"{max(row.peak_bytes - 2 * results, 0) / (1 << 20):.0f} MiB"


def cases_table(records: Mapping[str, Record]) -> str:
    """Makes one line for each workload, by its name: what runs if nothing is forced, and how long others take."""
    lines = ["| | workload | ms | TFLOPS | of the ceiling | others, ms | kernel |", "|---|---|---|---|---|---|---|"]
    for name, record in records.items():
        for result in record.results:
            ours = result.best("FFPA auto")
            others = ", ".join(f"{row.kernel} {row.median_ms:.3g}" for row in result.rows if not row.is_ffpa)
            lines.append(
                f"| {name} | {result.workload} | {ours.median_ms:.3g} | {_three_digits(ours.tflops)} "
                f"| {ours.ceiling_percent:.0f}% of {ours.ceiling} | {others} | `{ours.kernel}` |"
            )
    records = list(records.values())
    origins = sorted({record.origin for record in records})
    sources = f"{records[0].device}; medians of {records[0].method['iters']} calls; {', '.join(origins)}."
    return "\n".join(lines) + f"\n\n{sources}\n"


def chip_table(record: Record) -> str:
    """Makes the table of what each level takes of the chip, one column per head dim."""
    by_series: dict[str, list[ChipUse | None]] = {}
    for i, result in enumerate(record.results):
        for use in result.chip:
            by_series.setdefault(use.series, [None] * len(record.results))[i] = use
    shown = {
        "shared memory, KB": lambda use: f"{use.shared_bytes / 1024:.0f}",
        "registers for O and S": lambda use: str(use.accumulators),
        "registers (B spilled)": lambda use: f"{use.registers} ({use.spill_bytes})",
        "bank conflicts": lambda use: f"{use.bank_conflicts:.2f}",
        "B/FLOP": lambda use: f"{use.bytes_per_flop:.4f}",
        "max error": lambda use: f"{use.max_error:.1e}" + "(wrong)" * bool(use.problem),
    }
    lines = ["|".join(["", "On chip", *(str(result.workload.d) for result in record.results), ""])]
    lines.append("|" + ":---:|" * (len(record.results) + 1))
    for series, uses in by_series.items():
        known = [use for use in uses if use]
        for what, show in shown.items():
            if "(B spilled)" in what and any(use.registers is None for use in known):
                continue
            if what in ("bank conflicts", "B/FLOP", "max error") and any(use.max_error is None for use in known):
                continue
            lines.append("|".join(["", f"{series} {what}", *("-" if use is None else show(use) for use in uses), ""]))
    return "\n".join(lines)


def notes(record: Record) -> list[str]:
    """Returns what must be said below the table."""
    rows = [row for result in record.results for row in result.rows]
    ceiling = record.results[0].ceilings.gemm
    lines = [
        f"{record.device}, {record.describe()}; medians of {record.method['iters']} calls; nominal TFLOPS of the visible pairs; "
        f"ceiling: {ceiling} in the same run; {record.origin}."
    ]
    if any(row.level for row in rows) or any(result.chip for result in record.results):
        lines.append(ACC_LEGEND.replace("*", r"\*") + ".")
    lines += [f"{note}." for note in _fallback_notes(rows)]
    if record.machine["kind"] == "cpu":
        lines.append(
            "A CPU: our kernels ran in an emulator of the GPU, which proves them; nothing here is a claim of speed."
        )
    if record.interrupted:
        lines.append("The run was interrupted.")
    return lines


def markdown(record: Record) -> str:
    tables = [bench_table(record)]
    if record.machine["kind"] == "cpu" and any(result.chip for result in record.results):
        tables.append(chip_table(record))
    return "\n\n".join(tables) + "\n\n" + "\n".join(f"{line}  " for line in notes(record)) + "\n"
