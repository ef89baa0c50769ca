"""The lines that a run shows while it goes: one per row, and a progress bar on a terminal."""

from __future__ import annotations

import sys
import time

import torch
from chip import ChipUse
from record import Result, Row

WIDTH = 120


def headline(text: str) -> str:
    return f"{f' {text} ' if text else '':-^{WIDTH}}"


def ends(out: torch.Tensor) -> torch.Tensor:
    """Returns the first two values and the last one."""
    flat = out.detach().flatten()
    return torch.cat([flat[:2], flat[-1:]])


def first_values(out: torch.Tensor, only_one: bool) -> list[str]:
    return [f"{value:<.8f}" for value in ends(out)[: 1 if only_one else None].float().tolist()]


def chip_line(use: ChipUse) -> str:
    parts = [
        f"{use.shared_bytes >> 10} of {use.most_shared_bytes >> 10} KB shared memory",
        f"{use.accumulators} registers for O and S",
    ]
    if use.registers is not None:
        parts.append(f"{use.registers} in all, {use.spill_bytes} B spilled")
    if use.max_error is not None:
        parts.append(f"bank conflicts {use.bank_conflicts:.2f}")
        parts.append(f"{use.bytes_per_flop:.4f} B/FLOP")
        parts.append(f"max error {use.max_error:.2e}")
    parts.append(use.kernel)
    if use.problem:
        parts.append(f"WRONG: {use.problem}")
    return f"{use.tag:>28}: " + ", ".join(parts)


def row_line(row: Row, result: Result, values: list[str], best_ms: float | None, show_error: bool) -> str:
    """Makes a row's line. `best_ms` is the best of the rows before; the gain is what this row adds to that."""
    gain = max(best_ms / row.median_ms - 1, 0) * 100 if best_ms else 0.0
    speedup = result.speedup(row)
    parts = [
        f"{row.tag:>28}: {values}, time:{row.median_ms:.5g}ms, TFLOPS:{row.tflops:<6.4g} (+{gain:<5.2f}%)"
        f"(~{'-' if speedup is None else f'{speedup:.2f}'}x) {row.ceiling_percent:.1f}% of {row.ceiling}, {row.kernel}"
    ]
    if len(row.times_ms) > 1:
        parts.append(f"{row.min_ms:.5g} to {row.max_ms:.5g}ms")
    if row.halved_tflops is not None:
        parts.append(f"TFLOPS of the halved square: {row.halved_tflops:.4g}")
    if show_error:
        parts.append(f"max error {row.max_error:.2e}")
    if row.problem:
        parts.append(f"WRONG: {row.problem}")
    return ", ".join(parts)


class Progress:
    """A bar that redraws itself on a terminal; elsewhere a plain line every half minute."""

    def __init__(self, total: int):
        self.total, self.said_at = total, time.monotonic()
        self.on_terminal = sys.stderr.isatty()

    def show(self, done: float, what: str) -> None:
        share = done / self.total
        if self.on_terminal:
            print(f"\r\033[K[{'#' * round(30 * share):.<30}] {share:4.0%} {what}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.said_at > 30:
            self.said_at = time.monotonic()
            print(f"{share:.0%} done, {what}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.on_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
