"""Writes the benchmark tables of README.md from the records in bench/results/: `python bench/readme.py`.

A table stands between `<!-- bench: NAME -->` and `<!-- /bench -->`, where NAME.json is the record. What is in between
is generated: measure again, or change bench/tables.py, never the table.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from record import Record
from tables import markdown

_ROOT = Path(__file__).resolve().parents[1]
README, RESULTS = _ROOT / "README.md", _ROOT / "bench" / "results"
_BLOCK = re.compile(r"(<!-- bench: (?P<name>\S+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def publishable(record: Record) -> Record:
    """The record, or ValueError with what stands against showing it as a result of this project."""
    rows = [row for result in record.results for row in result.rows]
    against = [
        f"{row.tag} ran on {row.kernel}, not on a kernel of this project"
        for row in rows
        if row.is_ffpa and not row.own_kernel
    ]
    against += [f"{row.tag} is wrong: {row.problem}" for row in rows if row.problem]
    against += ["it was interrupted"] * record.interrupted
    against += ["its source is no commit"] * (record.source["tree"] is None or "dirty" in record.source["tree"])
    against += ["it was measured on a CPU"] * (record.machine["kind"] == "cpu")
    if against:
        raise ValueError("; ".join(dict.fromkeys(against)))
    return record


def generated(text: str, results: Path) -> str:
    """The text with every marked table as its record has it."""

    def table(block: re.Match) -> str:
        path = results / f"{block['name']}.json"
        try:
            record = publishable(Record.load(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path.name}: {error}") from error
        return f"{block[1]}{markdown(record)}{block[3]}"

    return _BLOCK.sub(table, text)


if __name__ == "__main__":
    README.write_text(generated(README.read_text(), RESULTS))
