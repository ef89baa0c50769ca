"""Writes the measured parts of README.md and docs/speed.md, and the pictures they show, from the records in bench/results/.

Run it as `python bench/readme.py`. `<!-- bench: NAME -->` … `<!-- /bench -->` holds the table of NAME.json,
`<!-- plots: NAME -->` its pictures, and `<!-- cases: NAME NAME … -->` one line for each of several records, named
after the part of NAME behind the GPU; `<!-- front: … -->` and `<!-- bars: … -->` hold the table and the picture of several
directions. What is in between is generated: measure again, or change bench/tables.py and bench/plots.py, never a page
or a picture.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from chip import flash_attention_2
from record import Record
from tables import cases_table, front_table, markdown

_ROOT = Path(__file__).resolve().parents[1]
PAGES = (_ROOT / "README.md", _ROOT / "docs" / "speed.md")
RESULTS = _ROOT / "bench" / "results"
_BLOCK = re.compile(
    r"(<!-- (?P<kind>bench|plots|cases|front|bars): (?P<names>[^>]+?) -->\n).*?(<!-- /(?P=kind) -->)", re.DOTALL
)
_BARS = "TFLOPS at three head dims, both directions, beside PyTorch's efficient attention and the fastest other"
_PICTURES = {
    "TFLOPS": "TFLOPS over head dim, beside the ceiling and PyTorch's efficient attention",
    "ffpa+acc+f32_Speedup": "Times as fast as PyTorch's efficient attention, f32 sums",
    "on_chip": "Shared memory and registers over head dim, beside a tiling that keeps whole rows on chip",
}


def publishable(record: Record) -> Record:
    """Returns the record, or raises ValueError with what stands against showing it as a result of this project."""
    rows = [row for result in record.results for row in result.rows]
    against = [
        f"{row.tag} ran on {row.kernel}, not on a kernel of this project"
        for row in rows
        if row.is_ffpa and not (row.own_kernel or row.settings.get("otherwise"))  # SDPA may be chosen beside our kernel
    ]
    against += [f"{row.tag} is wrong: {row.problem}" for row in rows if row.is_ffpa and row.problem]
    if not any(row.is_ffpa for row in rows):
        against.append("no row is of this project")
    against += ["it was interrupted"] * record.interrupted
    against += ["its source is no commit"] * (record.source["tree"] is None or "dirty" in record.source["tree"])
    against += ["it was measured on a CPU"] * (record.machine["kind"] == "cpu")
    if against:
        raise ValueError("; ".join(dict.fromkeys(against)))
    return record


def _load(path: Path) -> Record:
    try:
        return publishable(Record.load(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name}: {error}") from error


def generated(text: str, results: Path, up: str = "") -> str:
    """Returns the text with every marked part as its records have it; `up` leads from its folder to the root."""

    def part(block: re.Match) -> str:
        names = block["names"].split()
        records = [_load(results / f"{name}.json") for name in names]
        named = dict(zip((name.partition("_")[2] for name in names), records, strict=True))
        if block["kind"] == "cases":
            shown = cases_table(named)
        elif block["kind"] == "front":
            shown = front_table(named)
        elif block["kind"] == "bars":
            shown = f"![{_BARS}]({up}bench/{results.name}/{names[0]}_bars.png)\n"
        elif block["kind"] == "bench":
            shown = "".join(map(markdown, records))
        else:
            paths = {f"{results.name}/{name}_{what}.png": words for name in names for what, words in _PICTURES.items()}
            shown = "".join(f"![{words}]({up}bench/{path})\n" for path, words in paths.items())
        return f"{block[1]}{shown}{block[4]}"

    return _BLOCK.sub(part, text)


def up_from(page: Path) -> str:
    return "../" * (len(page.relative_to(_ROOT).parts) - 1)


def mark_of(records: tuple[Path, ...]) -> str:
    """Returns the mark of the pictures of records, which changes when a record, or what draws them, changes."""
    parts = [record.read_bytes() for record in records]
    parts += [(_ROOT / "bench" / name).read_bytes() for name in ("plots.py", "record.py")]
    parts.append(repr([flash_attention_2(d) for d in range(64, 1025, 64)]).encode())
    return f"drawn from {hashlib.sha256(b''.join(parts)).hexdigest()}"


def pictured(text: str, results: Path) -> dict[tuple[Path, ...], list[Path]]:
    """Maps records to the pictures of them that the text shows: several share one with bars."""
    found = {}
    for block in _BLOCK.finditer(text):
        records = tuple(results / f"{name}.json" for name in block["names"].split())
        if block["kind"] == "plots":
            found |= {
                (record,): [record.with_name(f"{record.stem}_{what}.png") for what in _PICTURES] for record in records
            }
        elif block["kind"] == "bars":
            found[records] = [records[0].with_name(f"{records[0].stem}_bars.png")]
    return dict(sorted(found.items()))


def draw(text: str, results: Path) -> None:
    from plots import save_bars, save_plots

    for paths, pictures in pictured(text, results).items():
        records = {path.stem.partition("_")[2]: _load(path) for path in paths}
        if pictures[0].stem.endswith("_bars"):
            save_bars(records, pictures[0], mark_of(paths))
            continue
        ((path, record),) = zip(paths, records.values(), strict=True)
        for drawn in save_plots(record, path.with_suffix(""), mark_of(paths)):
            if drawn not in pictures:
                drawn.unlink()


if __name__ == "__main__":
    for page in PAGES:
        text = generated(page.read_text(encoding="utf-8"), RESULTS, up_from(page))
        page.write_text(text, encoding="utf-8")
        draw(text, RESULTS)
