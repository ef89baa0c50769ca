"""Pure values that describe a call and a kernel: no tensors, no device, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, NamedTuple


class LevelType(Enum):
    """How the split-D family keeps O on chip: L1 registers, L2 column groups with QK^T again, L3 streamed scratch."""

    L1 = 1
    L2 = 2
    L3 = 3


class MMAAccType(Enum):
    """What the tensor cores accumulate in; MIXED is QK^T in f32 and PV in f16."""

    FP32 = "f32"
    FP16 = "f16"
    MIXED = "mixed"


LEVELS = tuple(level.value for level in LevelType)
ACCS = tuple(acc.value for acc in MMAAccType)
ALIGNS = ("bottom_right", "top_left")
LAYOUTS = ("BHND", "BNHD")
STAGES = (1, 2, 3, 4)
HEAD_DIM_STEP = 8  # one 16-byte row access of a 16-bit type
ROW_ALIGNMENT = 16  # bytes


class Visibility(NamedTuple):
    """Which keys a row may see: those from `left` before to `right` after its diagonal; -1 is unbounded.

    The diagonal of row r is key r (top_left) or key r + n_k - n_q (bottom_right). Causal is right = 0.
    """

    left: int
    right: int
    top_left: bool

    @staticmethod
    def of(causal: bool, align: str, window_left: int, window_right: int) -> Visibility:
        right = 0 if causal else window_right
        return Visibility(min(window_left, 2**31 - 1), min(right, 2**31 - 1), align == "top_left")

    @property
    def bounded(self) -> bool:
        return self.left >= 0 or self.right >= 0


class Problem(NamedTuple):
    """One call: everything that a choice of kernel may depend on, and nothing else."""

    direction: str  # "forward" | "backward"
    device: str  # "cpu" | "cuda"
    arch: str | None  # "sm_90"; None on the CPU
    dtype: str  # "f16" | "bf16"
    batch: int
    heads_q: int
    heads_kv: int
    n_q: int  # packed sequences: the longest
    n_k: int
    d_qk: int
    d_v: int
    packed: bool  # varlen
    visibility: Visibility
    scale: float
    softcap: float
    mask: str | None  # None | "bool" | "additive"
    needs_lse: bool
    level: int | None
    acc: str
    num_stages: int | None

    @property
    def group(self) -> int:
        return self.heads_q // self.heads_kv

    def __str__(self) -> str:
        v = self.visibility
        words = [
            f"{self.direction} {self.dtype} B={self.batch} H={self.heads_q}/{self.heads_kv}",
            f"N={self.n_q}x{self.n_k} D={self.d_qk}/{self.d_v}",
            "packed" if self.packed else "",
            f"window=({v.left}, {v.right}) {'top_left' if v.top_left else 'bottom_right'}" if v.bounded else "",
            f"scale={self.scale:.4g}" if self.scale <= 0 else "",
            f"softcap={self.softcap}" if self.softcap else "",
            f"{self.mask} mask" if self.mask else "",
            f"level={self.level}" if self.level else "",
            f"acc={self.acc}" if self.acc != "f32" else "",
            f"on {self.arch or self.device}",
        ]
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to compile. Its name is the generated file, the C++ Config type, the registry key, the test id and the
    bench row.

    A family of kernels is a subclass. Its fields are what shapes registers and shared memory, and nothing else; they
    reach C++ as the members of the Config: `tile_q: int` is kTileQ, `dtype: str` is the type Dtype.
    """

    family: ClassVar[str]  # csrc/attention/<family>.cuh with the kernel <family> and the template <Family>Config
    arch: ClassVar[str]  # the oldest GPU it runs on, "sm_80"; with a letter, "sm_90a", the only one
    allowed_spill_bytes: ClassVar[int] = 0  # a build fails above it

    @property
    def name(self) -> str:
        words = [self.family]
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                words.append(value)
            elif isinstance(value, bool):
                words += [field.name] if value else []
            else:
                words.append(f"{field.name}{value}")
        return "_".join(words)


@dataclass(frozen=True)
class ScaledCopy(KernelSpec):
    """out = scale * in: proves the way from a spec to a launch."""

    family = "scaled_copy"
    arch = "sm_80"

    dtype: str  # "f16" | "bf16"
    unroll: int  # elements of one thread


@dataclass(frozen=True)
class ForwardMmaL1(KernelSpec):
    """Split-D forward with O in registers; one spec serves every D_qk, and each D_v up to head_dim."""

    family = "forward_mma_l1"
    arch = "sm_80"
    allowed_spill_bytes = 32  # at head_dim 640: two registers, once a tile

    dtype: str
    head_dim: int  # columns of O
    rows: int  # of a tile
    keys: int

    @staticmethod
    def of(dtype: str, d_v: int) -> ForwardMmaL1:
        """The spec for values of this width: as many rows as the registers hold of O."""
        head_dim = -(-d_v // 64) * 64
        rows, keys = (128, 64) if head_dim <= 320 else (64, 128) if head_dim <= 640 else (32, 256)
        return ForwardMmaL1(dtype, head_dim, rows, keys)


@dataclass(frozen=True)
class ForwardMmaRows(KernelSpec):
    """Forward for small head dims, each warp on rows of its own; a spec serves every D_qk and D_v up to head_dim."""

    family = "forward_mma_rows"
    arch = "sm_80"

    dtype: str
    head_dim: int  # columns of Q, K, V and O
    rows: int  # of a tile
    keys: int
    warps: int
    blocks: int  # that an SM should hold, which caps the registers
    q_in_registers: bool  # or its fragments are read again for every tile

    @staticmethod
    def of(dtype: str, d: int, q_in_registers: bool | None = None) -> ForwardMmaRows:
        """The spec for columns of this width (the wider of Q's and V's); the faster of the two if nothing is asked."""
        head_dim = next(width for width in ROWS_HEAD_DIMS if d <= width)
        without, within = _ROWS_TILES[head_dim]
        return ForwardMmaRows(dtype, head_dim, *(within if q_in_registers else without), bool(q_in_registers))


# Head dim: rows, keys, warps and blocks of an SM, with Q read from shared memory, and with Q in registers.
_ROWS_TILES = {
    64: ((128, 128, 4, 2), (128, 64, 4, 2)),
    96: ((128, 64, 4, 2), (64, 64, 4, 3)),
    128: ((128, 64, 4, 2), (64, 64, 4, 3)),
    192: ((64, 64, 4, 2), (64, 64, 4, 2)),
    256: ((64, 64, 4, 2), (128, 32, 8, 1)),
}
ROWS_HEAD_DIMS = tuple(_ROWS_TILES)
L1_HEAD_DIMS = range(64, 1024 + 1, 64)


def aot_specs(flags: Mapping[str, Any]) -> tuple[KernelSpec, ...]:
    """What a wheel holds, given the build-time flags."""
    head_dims = (512,) if flags["ENABLE_FFPA_DEBUG"] else L1_HEAD_DIMS
    rows_head_dims = (128,) if flags["ENABLE_FFPA_DEBUG"] else ROWS_HEAD_DIMS
    return (
        ScaledCopy("f16", 4),
        *(ForwardMmaL1.of(dtype, d) for dtype in ("f16", "bf16") for d in head_dims),
        *(ForwardMmaRows.of(dtype, d) for dtype in ("f16", "bf16") for d in rows_head_dims),
    )
