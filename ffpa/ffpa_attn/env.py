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
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

BACKENDS = ("auto", "mma", "hopper", "triton", "sdpa", "reference")

_TOGGLE = {"0": False, "1": True}
_BACKENDS = {name: name for name in BACKENDS}
_EMULATED = {"0": None, "1": "sm_80", "sm_80": "sm_80", "sm_90a": "sm_90a"}
_STAGES = {"1": 1, "2": 2, "3": 3, "4": 4}
_SMEM_KB = {"163": 163, "99": 99}


class Flag(NamedTuple):
    """An environment variable, and what its texts mean."""

    scope: str  # "build": setup.py and the JIT read it; "run": every call reads it
    name: str
    doc: str  # one line for the table
    values: str | Mapping[str, Any] = _TOGGLE  # a kind of values, or what each text means
    default: Any = None  # None means automatic

    @property
    def type(self) -> str:
        """Says how a value is written."""
        return self.values if isinstance(self.values, str) else " | ".join(self.values)

    def value(self, raw: str | None) -> Any:
        if not raw:
            return self.default
        if isinstance(self.values, Mapping):
            if raw in self.values:
                return self.values[raw]
            allowed = "0 or 1" if self.values is _TOGGLE else self.type
        elif not self.values.startswith("integer"):
            return raw
        elif raw == "auto" and "auto" in self.values:
            return None
        else:
            with contextlib.suppress(ValueError):
                if int(raw) >= 1:
                    return int(raw)
            allowed = "an integer >= 1"
        raise ValueError(f"{self.name}={raw!r} is not allowed; set it to {allowed}, or unset it")


_build, _run = partial(Flag, "build"), partial(Flag, "run")

FLAGS: tuple[Flag, ...] = (
    # These say what the wheel holds.
    _build(
        "ENABLE_FFPA_DEBUG",
        "Compile a small set of instances: D = 64, 192 and 512 in f32 sums, and level 3.",
        default=False,
    ),
    _build("ENABLE_FFPA_AMPERE", "Compile for sm_80, with PTX that any newer GPU runs.", default=True),
    _build(
        "ENABLE_FFPA_ADA",
        "The first release's; no effect: parts of the 8.9 kind run what is compiled for 8.0.",
        default=True,
    ),
    _build(
        "ENABLE_FFPA_HOPPER",
        "Compile for 9.0 as well, with Hopper's own instructions where a kernel uses them.",
        default=True,
    ),
    _build("ENABLE_FFPA_ALL_STAGES", "The first release's; no effect: every kernel takes 1 to 4 stages.", default=True),
    _build(
        "ENABLE_FFPA_ALL_HEADDIM",
        "The first release's; no effect: every kernel serves all head dims up to its own.",
        default=False,
    ),
    _build("FFPA_CUDA_ARCHS", "Archs to compile for, e.g. `8.0+PTX;9.0a`; wins over TORCH_CUDA_ARCH_LIST.", "list"),
    _build("TORCH_CUDA_ARCH_LIST", "PyTorch's own list of archs; honoured when FFPA_CUDA_ARCHS is unset.", "list"),
    _build("MAX_JOBS", "Parallel compile jobs; unset or auto: one for each core.", "integer | auto"),
    _build("CUDA_HOME", "CUDA toolkit to build with; unset: nvcc on PATH, then the one from PyPI.", "path"),
    _build("NVCC_CCBIN", "nvcc's own flag: the host compiler it calls; unset: g++ on PATH.", "path"),
    _build("NVCC_PREPEND_FLAGS", "nvcc's own flag: options it puts before ours.", "text"),
    _build("NVCC_APPEND_FLAGS", "nvcc's own flag: options it puts after ours.", "text"),
    # These say which path a call takes.
    _run("FFPA_BACKEND", "Force one backend; on a CUDA tensor it never falls back.", _BACKENDS, "auto"),
    _run("FFPA_STRICT", "Raise where a call would fall back with a warning.", default=False),
    _run(
        "FFPA_CHECK",
        "Check values too (cu_seqlens of CUDA tensors), and whether ranks call alike at every call; synchronises with the GPU.",
        default=False,
    ),
    _run("FFPA_EMULATE", "Run the CUDA kernels on CPU tensors in the emulator; 1 = sm_80.", _EMULATED),
    _run("TRITON_INTERPRET", "Triton's own flag: its kernels run on CPU tensors, in its interpreter.", default=False),
    _run(
        "FFPA_TRITON_CORES",
        "Asks for the Triton forward, as a persistent kernel on at most so many programs, its accumulator in global memory; not for 8-bit floats.",
        "integer",
    ),
    _run(
        "FFPA_LOG",
        "Log to stderr which kernel each new kind of call runs on, and why; and why Triton itself launches a kernel.",
        default=False,
    ),
    _run(
        "FFPA_CACHE_DIR",
        "Where kernels compiled on demand and for the emulator are kept; unset: ~/.cache/ffpa_attn.",
        "path",
    ),
    _run("FFPA_WORKSPACE_MB", "Upper bound of the workspace of one call in MiB; smaller is slower.", "integer", 1024),
    _run("FFPA_RING_COPIES", "GPUs of one host copy in ring attention; 0: messages, as between hosts.", default=True),
    _run(
        "FFPA_SMEM_KB",
        "An experiment: a GPU with more shared memory runs what one with so many KB would, 163 as an A100, 99 as consumer cards.",
        _SMEM_KB,
    ),
    # These are experiments with the split-D mma.sync kernels.
    _run("ENABLE_FFPA_PREFETCH_QKV", "Load the next tile of Q, K or V before the current one is used."),
    _run("ENABLE_FFPA_FORCE_QK_F16", "Accumulate QK^T in f16 whatever `acc` says."),
    _run("ENABLE_FFPA_FORCE_PV_F16", "Accumulate PV in f16 whatever `acc` says."),
    _run("ENABLE_FFPA_QKV_SMEM_SHARE", "Let V reuse the shared memory of Q and K; 0 gives K and V a ring each."),
    _run("FFPA_PV_STAGES", "Stages of V in a ring of its own; unset: as many as `num_stages` says.", _STAGES),
    _run("ENABLE_FFPA_SMEM_SWIZZLE_Q", "Swizzle Q in shared memory; 0 pads rows by 8 elements instead."),
    _run("ENABLE_FFPA_SMEM_SWIZZLE_K", "Swizzle K in shared memory; 0 pads rows by 8 elements instead."),
    _run("ENABLE_FFPA_SMEM_SWIZZLE_V", "Swizzle V in shared memory; 0 pads rows by 8 elements instead."),
    _run("ENABLE_FFPA_PERSIST_Q_G2S", "Keep Q in shared memory for the whole row tile."),
    _run("ENABLE_FFPA_PERSIST_KV_G2S", "Keep whole K and V tiles in shared memory (FlashAttention-2 tiling, small D)."),
    _run("ENABLE_FFPA_PERSIST_Q_S2R", "Keep the fragments of Q in registers."),
    _run("ENABLE_FFPA_PERSIST_V_S2R", "Read each fragment of V once for all rows of a warp (small D)."),
    _run("ENABLE_FFPA_REGISTERS_PIPE_KV", "Ping-pong registers between ldmatrix and mma for K and V."),
    _run("ENABLE_FFPA_LAUNCH_GRID_DNHB", "Launch a grid (N/Br, H, B) instead of one of a single dim."),
)

RUN_FLAGS = tuple(flag for flag in FLAGS if flag.scope == "run")
EXPERIMENTS = tuple(flag.name for flag in RUN_FLAGS if flag.name.startswith("ENABLE_") or flag.name == "FFPA_PV_STAGES")


def _check_exclusions(values: Mapping[str, Any]) -> None:
    """Raises for toggles that contradict each other. Unset toggles adapt, so only forced values can clash."""
    on = {name.removeprefix("ENABLE_FFPA_") for name, value in values.items() if value is True}

    def clash(a: str, b: str, why: str) -> None:
        raise ValueError(f"ENABLE_FFPA_{a} and ENABLE_FFPA_{b} exclude each other as set: {why}")

    if "PERSIST_KV_G2S" in on and values["ENABLE_FFPA_PERSIST_Q_G2S"] is False:
        clash("PERSIST_KV_G2S", "PERSIST_Q_G2S", "keeping K and V in shared memory needs Q there too; unset the second")
    if {"PERSIST_Q_S2R", "PERSIST_Q_G2S"} <= on and "PERSIST_KV_G2S" not in on:
        why = "Q stays in registers or in shared memory; set PERSIST_KV_G2S=1 for both"
        clash("PERSIST_Q_S2R", "PERSIST_Q_G2S", why)
    if "QKV_SMEM_SHARE" in on and values["FFPA_PV_STAGES"] is not None:
        raise ValueError(
            "FFPA_PV_STAGES asks for a ring of V alone, and ENABLE_FFPA_QKV_SMEM_SHARE=1 for none; unset one"
        )
    if "QKV_SMEM_SHARE" in on and "PERSIST_Q_S2R" not in on:
        for held in ("PERSIST_Q_G2S", "PERSIST_KV_G2S"):
            if held in on:
                why = "V would overwrite what stays in shared memory; set PERSIST_Q_S2R=1 or unset one"
                clash("QKV_SMEM_SHARE", held, why)


class Flags(dict):
    """One reading of the environment: name -> typed value. Compares by identity, so it can be part of a cache key."""

    __hash__, __eq__, __ne__ = object.__hash__, object.__eq__, object.__ne__

    def __init__(self, flags: tuple[Flag, ...]):
        super().__init__((flag.name, flag.value(os.environ.get(flag.name))) for flag in flags)
        _check_exclusions(self)


# A call must not pay for 20 look-ups with key encoding (14 µs). Where the interpreter has the usual dictionary of
# encoded names behind os.environ, that is read (under 1 µs), and parsed only when something changed.
_encoded_names = tuple(os.fsencode(flag.name) for flag in RUN_FLAGS)


def run_flags() -> Flags:
    """Returns the run-time flags as the environment has them now."""
    try:
        raws = tuple(map(os.environ._data.get, _encoded_names))  # type: ignore[attr-defined]
    except AttributeError:
        raws = tuple(os.environ.get(flag.name) for flag in RUN_FLAGS)
    return _parsed(raws)


@cache
def _parsed(raws: tuple) -> Flags:
    return Flags(RUN_FLAGS)


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
    return Flags(FLAGS)


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
