"""The Markdown table of a record: one column per head dim, TFLOPS of every series, speedups over SDPA."""

from __future__ import annotations

from record import ACC_LEGEND, Record, Row


def _three_digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def _tflops(row: Row | None) -> str:
    if row is None:
        return "-"
    fallback = "†" if row.is_ffpa and not row.own_kernel else ""
    return f"{_three_digits(row.tflops)}T{fallback}" + ("(wrong)" if row.problem else "")


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


def notes(record: Record) -> list[str]:
    """What must be said below the table."""
    rows = [row for result in record.results for row in result.rows]
    ceiling = record.results[0].ceilings.gemm
    lines = [
        f"{record.device}, {record.describe()}; medians of {record.method['iters']} calls; nominal TFLOPS of the visible pairs; "
        f"ceiling: {ceiling} in the same run; source {record.source['tree'] or 'unknown'}."
    ]
    if any(row.level for row in rows):
        lines.append(ACC_LEGEND.replace("*", r"\*") + ".")
    fallbacks = sorted({row.kernel for row in rows if row.is_ffpa and not row.own_kernel})
    if fallbacks:
        lines.append(f"† ran on {' or '.join(fallbacks)}, not on a kernel of this project.")
    if record.machine["kind"] == "cpu":
        lines.append("A CPU: this shows that the bench works and is no claim of speed.")
    if record.interrupted:
        lines.append("The run was interrupted.")
    return lines


def markdown(record: Record) -> str:
    return bench_table(record) + "\n\n" + "\n".join(f"{line}  " for line in notes(record)) + "\n"
