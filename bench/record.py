"""The record of a run: where, what source, what was measured. JSON holds all of it; CSV one line per row."""

from __future__ import annotations

import csv
import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median

import torch
from ceilings import Ceilings
from chip import MARKS, ChipUse
from ffpa_attn import __version__, env
from ffpa_attn.building import build
from ffpa_attn.launching import native
from flops import halved_flops, nominal_flops
from provider import SDPA_TAG, Provider
from truth import Verdict
from workload import Workload, without_head_dim

FORMAT = 2
_ROOT = Path(__file__).resolve().parent.parent
_CLOCKS = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "persistence_mode",
)
# Older records call kernels by the first of these names, and what shows a record by the second.
_RENAMED = {
    "forward_fused_": "forward_wgmma_fused_",
    "forward_pair_": "forward_wgmma_pair_",
    "forward_two_phase_mma_": "forward_mma_two_phase_",
    "forward_two_phase_": "forward_wgmma_two_phase_",
    "forward_mma_bf16_": "forward_mma_split_bf16_",
    "forward_mma_f16_": "forward_mma_split_f16_",
}
ACC_LEGEND = "* accumulates in f32, ^ in f16, *^ QK^T in f32 and PV in f16; the best of its stages"


@dataclass(frozen=True)
class Row:
    """One provider on one workload."""

    tag: str
    kernel: str
    is_ffpa: bool
    own_kernel: bool  # False: ffpa fell back, so this is no number of ours
    acc: str | None
    level: int | None
    num_stages: int | None
    times_ms: list[float]
    median_ms: float
    min_ms: float
    max_ms: float
    tflops: float  # nominal TFLOPS at the median
    halved_tflops: float | None  # causal only: as if half of the square were visible
    ceiling: str  # what bounds the workload: "GEMM" or "copy"
    ceiling_percent: float
    peak_bytes: int | None
    max_error: float
    problem: str | None  # why the result is wrong
    settings: dict = field(default_factory=dict)  # plan of one of our kernels: level, stages and the rest

    @staticmethod
    def of(
        provider: Provider, w: Workload, times_ms: list[float], ceilings: Ceilings, peak: int | None, verdict: Verdict
    ) -> Row:
        ms = median(times_ms)
        bound, least_ms = ceilings.of(w)
        named = {
            name: getattr(provider, name)
            for name in ("tag", "kernel", "is_ffpa", "own_kernel", "acc", "level", "num_stages")
        }
        return Row(
            **named,
            times_ms=times_ms,
            median_ms=ms,
            min_ms=min(times_ms),
            max_ms=max(times_ms),
            tflops=nominal_flops(w) / ms * 1e-9,
            halved_tflops=halved_flops(w) / ms * 1e-9 if w.causal else None,
            ceiling=bound,
            ceiling_percent=100 * least_ms / ms,
            peak_bytes=peak,
            max_error=verdict.max_error,
            problem=verdict.problem,
            settings=provider.settings,
        )

    @property
    def series(self) -> str:
        """Names the row of the table, and the line of the plot, that this row belongs to."""
        if self.level:
            return f"FFPA L{self.level}{MARKS[self.acc]}"
        if self.is_ffpa:
            return "FFPA auto"
        return {"(sdpa)": "SDPA EA" if self.kernel.startswith("efficient") else "SDPA"}.get(
            self.tag, self.tag.strip("()")
        )


@dataclass(frozen=True)
class Result:
    """All providers on one workload."""

    workload: Workload
    ceilings: Ceilings
    rows: list[Row]
    skipped: list[tuple[str, str]]  # (who, why)
    chip: list[ChipUse]
    clocks: dict[str, str] | None = None  # the GPU's clocks, right after the last call

    @property
    def sdpa(self) -> Row | None:
        return next((row for row in self.rows if row.tag == SDPA_TAG), None)

    @property
    def rival(self) -> Row | None:
        """Returns the fastest of those that are neither ours nor the baseline, be its result right or not."""
        others = (row for row in self.rows if not row.is_ffpa and row.tag != SDPA_TAG)
        return min(others, key=lambda row: row.median_ms, default=None)

    def speedup(self, row: Row) -> float | None:
        return self.sdpa and self.sdpa.median_ms / row.median_ms

    def best(self, series: str) -> Row | None:
        return min((row for row in self.rows if row.series == series), key=lambda row: row.median_ms, default=None)


@dataclass
class Record:
    machine: dict
    source: dict
    method: dict
    results: list[Result] = field(default_factory=list)
    interrupted: bool = False

    @property
    def series(self) -> list[str]:
        """Orders the series: SDPA first, then ours by level and accumulators, automatic, the others."""
        rows = {row.series: row for result in self.results for row in result.rows}

        def place(name: str) -> tuple:
            row = rows[name]
            return (row.tag != SDPA_TAG, not row.is_ffpa, row.level or 9, list(MARKS).index(row.acc or "f32"), name)

        return sorted(rows, key=place)

    @property
    def device(self) -> str:
        return self.machine["device"]

    @property
    def origin(self) -> str:
        """Names the sources: the commit, or in records of before its name was kept, its tree."""
        commit, tree = self.source.get("commit"), self.source["tree"] or "unknown"
        return f"commit {commit}" if commit and "dirty" not in tree else f"source {tree}"

    def describe(self) -> str:
        return without_head_dim(self.results[0].workload)

    def save(self, stem: Path) -> list[Path]:
        paths = [stem.with_name(stem.name + ending) for ending in (".json", ".csv")]
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(_lines({"format": FORMAT, **asdict(self)}, 4) + "\n", encoding="utf-8")
        with paths[1].open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            names = [f.name for f in fields(Workload)], [f.name for f in fields(Row)]
            writer.writerow(["device", "tree", *names[0], *names[1], "gemm_tflops", "copy_gb_per_s"])
            for result in self.results:
                for row in result.rows:
                    where = [self.device, self.source["tree"], *(getattr(result.workload, name) for name in names[0])]
                    what = asdict(row) | {"times_ms": " ".join(f"{ms:.6g}" for ms in row.times_ms)}
                    limits = [result.ceilings.gemm_tflops, result.ceilings.copy_gb_per_s]
                    writer.writerow([*where, *(what[name] for name in names[1]), *limits])
        return paths

    @staticmethod
    def load(path: Path) -> Record:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is no record of format {FORMAT}; measure again")
        data["results"] = [
            Result(
                Workload(**result["workload"]),
                Ceilings(**result["ceilings"]),
                [Row(**{**row, "kernel": _name_now(row["kernel"])}) for row in result["rows"]],
                [tuple(pair) for pair in result["skipped"]],
                [ChipUse(**use) for use in result["chip"]],
                result.get("clocks"),
            )
            for result in data["results"]
        ]
        return Record(**data)


def _name_now(kernel: str) -> str:
    old = next((old for old in _RENAMED if kernel.startswith(old)), "")
    return _RENAMED.get(old, "") + kernel.removeprefix(old)


def _lines(value, depth: int, indent: str = "\n") -> str:
    """Writes JSON with a line for each member down to `depth`: a row of a record is one line."""
    if not depth or not value or not isinstance(value, (dict, list)):
        return json.dumps(value)
    inner = indent + " "
    if isinstance(value, dict):
        members = [f"{json.dumps(name)}: {_lines(member, depth - 1, inner)}" for name, member in value.items()]
        return f"{{{inner}{f',{inner}'.join(members)}{indent}}}"
    return f"[{inner}{f',{inner}'.join(_lines(member, depth - 1, inner) for member in value)}{indent}]"


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.processor() or "unknown",
    )


def clocks() -> dict[str, str] | None:
    """Returns clocks, power and temperature of the GPU as nvidia-smi tells them now."""
    uuid = torch.cuda.get_device_properties(0).uuid
    told = _output("nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader")
    return told and dict(zip(_CLOCKS, told.split(", "), strict=True))


def machine(device: str) -> dict:
    facts = {"torch": torch.__version__, "python": platform.python_version(), "cuda": torch.version.cuda}
    if device != "cuda":
        return {"device": f"CPU {_processor()}", "kind": "cpu", "threads": torch.get_num_threads(), **facts}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "kind": "cuda",
        "arch": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": _output(
            "nvidia-smi", f"--id=GPU-{properties.uuid}", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "clocks_before": clocks(),
        **facts,
    }


def source() -> dict:
    """Returns the commit and its tree, whether files differ from it, and the flags that were set."""
    commit = _output("git", "-C", str(_ROOT), "rev-parse", "--short=9", "HEAD")
    tree = _output("git", "-C", str(_ROOT), "rev-parse", "HEAD^{tree}")
    changed = _output("git", "-C", str(_ROOT), "status", "--porcelain")
    built = native.record()
    stale = built is not None and built["sources"] != build.sources_hash()  # kernels of other sources were measured
    flags = {
        flag.name: env.run_flags()[flag.name] for flag in env.RUN_FLAGS if env.run_flags()[flag.name] != flag.default
    }
    return {
        "commit": commit,
        "tree": tree and tree + ("-dirty" if changed or stale else ""),
        "ffpa_attn": __version__,
        "flags": flags,
    }
