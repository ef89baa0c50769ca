"""This module has every environment variable that the project reads in one typed table; nothing else reads os.environ.

`python env.py` prints the table. A flag that is unset is None ("automatic") unless it has a default; a value that the
table does not allow raises, naming the flag, the value and what is allowed. Run-time flags are read again whenever the
environment changed, so `os.environ["FFPA_STRICT"] = "1"` takes effect at the next call. This file imports nothing but
the standard library: setup.py loads it before torch is known to be there.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

BACKENDS = ("auto", "mma", "hopper", "triton", "sdpa", "reference")
EMULATED_ARCHS = ("sm_80", "sm_90a")


def _toggle(raw: str) -> bool:
    if raw in ("0", "1"):
        return raw == "1"
    raise ValueError("0 or 1")


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(raw: str) -> int:
        try:
            value = int(raw)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise ValueError(f"an integer >= {minimum}")
        return value

    return parse


def _jobs(raw: str) -> int | None:
    return None if raw == "auto" else _at_least(1)(raw)  # other packages' builds take `auto` for unset


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(raw: str) -> str:
        if raw in allowed:
            return raw
        raise ValueError(" | ".join(allowed))

    return parse


def _emulated_arch(raw: str) -> str | None:
    archs = {"0": None, "1": EMULATED_ARCHS[0], **{arch: arch for arch in EMULATED_ARCHS}}
    if raw in archs:
        return archs[raw]
    raise ValueError(" | ".join(archs))


@dataclass(frozen=True)
class Flag:
    name: str
    type: str  # how a value is written: "0 | 1", "integer", …
    default: Any  # None means automatic
    scope: str  # "build": setup.py and the JIT read it; "run": every call reads it
    doc: str  # one line for the table
    parse: Callable[[str], Any] = str

    def value(self, raw: str | None) -> Any:
        if raw is None or raw == "":
            return self.default
        try:
            return self.parse(raw)
        except ValueError as allowed:
            raise ValueError(f"{self.name}={raw!r} is not allowed; set it to {allowed}, or unset it") from None


def _tri(name: str, doc: str, scope: str = "run") -> Flag:
    return Flag(name, "0 | 1", None, scope, doc, _toggle)


def _bool(name: str, default: bool, scope: str, doc: str) -> Flag:
    return Flag(name, "0 | 1", default, scope, doc, _toggle)


FLAGS: tuple[Flag, ...] = (
    # These say what the wheel holds.
    _bool(
        "ENABLE_FFPA_DEBUG",
        False,
        "build",
        "Compile a small set of instances: D = 64, 192 and 512 in f32 sums, and level 3.",
    ),
    _bool("ENABLE_FFPA_AMPERE", True, "build", "Compile for sm_80, with PTX that any newer GPU runs."),
    _bool(
        "ENABLE_FFPA_ADA",
        True,
        "build",
        "The first release's; no effect: parts of the 8.9 kind run what is compiled for 8.0.",
    ),
    _bool(
        "ENABLE_FFPA_HOPPER",
        True,
        "build",
        "Compile for 9.0 as well, with Hopper's own instructions where a kernel uses them.",
    ),
    _bool("ENABLE_FFPA_ALL_STAGES", True, "build", "The first release's; no effect: every kernel takes 1 to 4 stages."),
    _bool(
        "ENABLE_FFPA_ALL_HEADDIM",
        False,
        "build",
        "The first release's; no effect: every kernel serves all head dims up to its own.",
    ),
    Flag(
        "FFPA_CUDA_ARCHS",
        "list",
        None,
        "build",
        "Archs to compile for, e.g. `8.0+PTX;9.0a`; wins over TORCH_CUDA_ARCH_LIST.",
    ),
    Flag(
        "TORCH_CUDA_ARCH_LIST",
        "list",
        None,
        "build",
        "PyTorch's own list of archs; honoured when FFPA_CUDA_ARCHS is unset.",
    ),
    Flag(
        "MAX_JOBS", "integer | auto", None, "build", "Parallel compile jobs; unset or auto: one for each core.", _jobs
    ),
    Flag(
        "CUDA_HOME", "path", None, "build", "CUDA toolkit to build with; unset: nvcc on PATH, then the one from PyPI."
    ),
    Flag("NVCC_CCBIN", "path", None, "build", "nvcc's own flag: the host compiler it calls; unset: g++ on PATH."),
    Flag("NVCC_PREPEND_FLAGS", "text", None, "build", "nvcc's own flag: options it puts before ours."),
    Flag("NVCC_APPEND_FLAGS", "text", None, "build", "nvcc's own flag: options it puts after ours."),
    # These say which path a call takes.
    Flag(
        "FFPA_BACKEND",
        " | ".join(BACKENDS),
        "auto",
        "run",
        "Force one backend; on a CUDA tensor it never falls back.",
        _one_of(*BACKENDS),
    ),
    _bool("FFPA_STRICT", False, "run", "Raise where a call would fall back with a warning."),
    _bool(
        "FFPA_CHECK",
        False,
        "run",
        "Check values too (cu_seqlens of CUDA tensors), and whether ranks call alike at every call; synchronises with the GPU.",
    ),
    Flag(
        "FFPA_EMULATE",
        "0 | 1 | sm_80 | sm_90a",
        None,
        "run",
        "Run the CUDA kernels on CPU tensors in the emulator; 1 = sm_80.",
        _emulated_arch,
    ),
    _bool("TRITON_INTERPRET", False, "run", "Triton's own flag: its kernels run on CPU tensors, in its interpreter."),
    Flag(
        "FFPA_TRITON_CORES",
        "integer",
        None,
        "run",
        "Asks for the Triton forward, as a persistent kernel on at most so many programs, its accumulator in global memory; not for 8-bit floats.",
        _at_least(1),
    ),
    _bool("FFPA_LOG", False, "run", "Log to stderr which kernel each new kind of call runs on, and why."),
    Flag(
        "FFPA_CACHE_DIR",
        "path",
        None,
        "run",
        "Where kernels compiled on demand and for the emulator are kept; unset: ~/.cache/ffpa_attn.",
    ),
    Flag(
        "FFPA_WORKSPACE_MB",
        "integer",
        1024,
        "run",
        "Upper bound of the workspace of one call in MiB; smaller is slower.",
        _at_least(1),
    ),
    _bool("FFPA_RING_COPIES", True, "run", "GPUs of one host copy in ring attention; 0: messages, as between hosts."),
    # These are experiments with the split-D mma.sync kernels.
    _tri("ENABLE_FFPA_PREFETCH_QKV", "Load the next tile of Q, K or V before the current one is used."),
    _tri("ENABLE_FFPA_FORCE_QK_F16", "Accumulate QK^T in f16 whatever `acc` says."),
    _tri("ENABLE_FFPA_FORCE_PV_F16", "Accumulate PV in f16 whatever `acc` says."),
    _tri("ENABLE_FFPA_QKV_SMEM_SHARE", "Let V reuse the shared memory of Q and K; 0 gives K and V a ring each."),
    Flag(
        "FFPA_PV_STAGES",
        "1 | 2 | 3 | 4",
        None,
        "run",
        "Stages of V in a ring of its own; unset: as many as `num_stages` says.",
        lambda raw: int(_one_of("1", "2", "3", "4")(raw)),
    ),
    _tri("ENABLE_FFPA_SMEM_SWIZZLE_Q", "Swizzle Q in shared memory; 0 pads rows by 8 elements instead."),
    _tri("ENABLE_FFPA_SMEM_SWIZZLE_K", "Swizzle K in shared memory; 0 pads rows by 8 elements instead."),
    _tri("ENABLE_FFPA_SMEM_SWIZZLE_V", "Swizzle V in shared memory; 0 pads rows by 8 elements instead."),
    _tri("ENABLE_FFPA_PERSIST_Q_G2S", "Keep Q in shared memory for the whole row tile."),
    _tri("ENABLE_FFPA_PERSIST_KV_G2S", "Keep whole K and V tiles in shared memory (FlashAttention-2 tiling, small D)."),
    _tri("ENABLE_FFPA_PERSIST_Q_S2R", "Keep the fragments of Q in registers."),
    _tri("ENABLE_FFPA_PERSIST_V_S2R", "Read each fragment of V once for all rows of a warp (small D)."),
    _tri("ENABLE_FFPA_REGISTERS_PIPE_KV", "Ping-pong registers between ldmatrix and mma for K and V."),
    _tri("ENABLE_FFPA_LAUNCH_GRID_DNHB", "Launch a grid (N/Br, H, B) instead of one of a single dim."),
)

RUN_FLAGS = tuple(flag for flag in FLAGS if flag.scope == "run")
EXPERIMENTS = tuple(flag.name for flag in RUN_FLAGS if flag.name.startswith("ENABLE_") or flag.name == "FFPA_PV_STAGES")


def _check_exclusions(values: Mapping[str, Any]) -> None:
    """Raises for toggles that contradict each other. Unset toggles adapt, so only forced values can clash."""

    def on(name: str) -> bool:
        return values["ENABLE_FFPA_" + name] is True

    def off(name: str) -> bool:
        return values["ENABLE_FFPA_" + name] is False

    def clash(a: str, b: str, why: str) -> None:
        raise ValueError(f"ENABLE_FFPA_{a} and ENABLE_FFPA_{b} exclude each other as set: {why}")

    if on("PERSIST_KV_G2S") and off("PERSIST_Q_G2S"):
        clash("PERSIST_KV_G2S", "PERSIST_Q_G2S", "keeping K and V in shared memory needs Q there too; unset the second")
    if on("PERSIST_Q_S2R") and on("PERSIST_Q_G2S") and not on("PERSIST_KV_G2S"):
        clash(
            "PERSIST_Q_S2R", "PERSIST_Q_G2S", "Q stays in registers or in shared memory; set PERSIST_KV_G2S=1 for both"
        )
    if on("QKV_SMEM_SHARE") and values["FFPA_PV_STAGES"] is not None:
        raise ValueError(
            "FFPA_PV_STAGES asks for a ring of V alone, and ENABLE_FFPA_QKV_SMEM_SHARE=1 for none; unset one"
        )
    if on("QKV_SMEM_SHARE") and not on("PERSIST_Q_S2R"):
        for held in ("PERSIST_Q_G2S", "PERSIST_KV_G2S"):
            if on(held):
                clash(
                    "QKV_SMEM_SHARE",
                    held,
                    "V would overwrite what stays in shared memory; set PERSIST_Q_S2R=1 or unset one",
                )


class Flags(Mapping):
    """One reading of the environment: name -> typed value. Compares by identity, so it can be part of a cache key."""

    __slots__ = ("_values",)

    def __init__(self, flags: tuple[Flag, ...], raws: tuple[str | None, ...]):
        values = {flag.name: flag.value(raw) for flag, raw in zip(flags, raws, strict=True)}
        if "ENABLE_FFPA_PERSIST_Q_G2S" in values:
            _check_exclusions(values)
        self._values = MappingProxyType(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self):
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _read(flags: tuple[Flag, ...]) -> tuple[str | None, ...]:
    return tuple(os.environ.get(flag.name) for flag in flags)


# A call must not pay for 20 look-ups with key encoding (14 µs). Where the interpreter has the usual dictionary of
# encoded names behind os.environ, that is read (under 1 µs), and parsed only when something changed.
_encoded_names = tuple(os.fsencode(flag.name) for flag in RUN_FLAGS)
_parsed: dict[tuple, Flags] = {}


def run_flags() -> Flags:
    """Returns the run-time flags as the environment has them now."""
    try:
        raws = tuple(map(os.environ._data.get, _encoded_names))  # type: ignore[attr-defined]
    except AttributeError:
        raws = _read(RUN_FLAGS)
    flags = _parsed.get(raws)
    if flags is None:
        flags = _parsed[raws] = Flags(RUN_FLAGS, _read(RUN_FLAGS))
    return flags


@contextlib.contextmanager
def overridden(name: str, value: str) -> Iterator[None]:
    """Sets the flag in the environment for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def all_flags() -> Flags:
    """Returns every flag, build-time ones included."""
    return Flags(FLAGS, _read(FLAGS))


def child_environment(**changes: str) -> dict[str, str]:
    """Returns a copy of the environment for a child process."""
    return {**os.environ, **changes}


def _shown(value: Any) -> str:
    return "automatic" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def markdown_table() -> str:
    """Returns the table of docs/flags.md."""
    rows = ["| flag | values | default | read at | what it does |", "|---|---|---|---|---|"]
    for flag in FLAGS:
        values = flag.type.replace("|", "\\|")
        rows.append(f"| `{flag.name}` | {values} | {_shown(flag.default)} | {flag.scope} time | {flag.doc} |")
    return "\n".join(rows)


def let_stdout_write_anything() -> None:
    """Turns letters that stdout's encoding lacks into escapes, as stderr does; programs that report call this."""
    codecs.register_error("ffpa_attn.escapes", _escapes)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="ffpa_attn.escapes")


def _escapes(error: UnicodeError) -> tuple[bytes, int]:
    """Writes bytes of a path that are no letters, each of which was read as half a character, as they were."""
    wrong = error.object[error.start : error.end]
    return b"".join(
        bytes([ord(x) - 0xDC00]) if 0xDC80 <= ord(x) <= 0xDCFF else x.encode("ascii", "backslashreplace") for x in wrong
    ), error.end


def main() -> None:
    let_stdout_write_anything()
    print("Set a flag in the environment, e.g. `FFPA_STRICT=1 python train.py`; unset = default.\n")
    for flag in FLAGS:
        raw = os.environ.get(flag.name)
        try:
            now = "unset" if raw is None else f"set to {_shown(flag.value(raw))}"
        except ValueError as error:
            now = f"INVALID: {error}"
        print(f"{flag.name}  ({flag.type}; default {_shown(flag.default)}; {flag.scope} time; {now})\n    {flag.doc}")
    try:
        all_flags()
    except ValueError as error:
        raise SystemExit(f"\n{error}") from None


if __name__ == "__main__":
    main()
