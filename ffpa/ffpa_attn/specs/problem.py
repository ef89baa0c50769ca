"""A problem is what a call asks of a kernel, as pure values: no tensors, no device, no torch."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import NamedTuple


class LevelType(Enum):
    """A level says how O stays on chip: L1 registers, L2 column groups (QK^T repeated), L3 streamed scratch."""

    L1 = 1
    L2 = 2
    L3 = 3


class MMAAccType(Enum):
    """This is the type that tensor cores accumulate in; MIXED is f32 for QK^T and f16 for PV."""

    FP32 = "f32"
    FP16 = "f16"
    MIXED = "mixed"


LEVELS = tuple(level.value for level in LevelType)
ACCS = tuple(acc.value for acc in MMAAccType)
ALIGNS = ("bottom_right", "top_left")
LAYOUTS = ("BHND", "BNHD")
STAGES = (1, 2, 3, 4)
E4M3 = "e4m3"  # a cache of 8-bit floats that kernels read
FP8_DTYPES = ("e4m3", "e5m2")
MOST_POSITIONS = 2**31 - 1024  # limit of row + key, with a tile beyond both, in kernels that count them in 32 bits
HEAD_DIM_STEP = 8  # one access of 16 bytes to a row of a 16-bit type
ROW_ALIGNMENT = 16  # bytes
LEAST_SCALE = 2.0**-100  # the smallest scale that counts as positive: a float holds it
FP8_BLOCK = 128  # rows that share a scale, where scales are given by block


class Visibility(NamedTuple):
    """These are the keys that a row may see: from `left` before its diagonal to `right` after it; -1 is unbounded.

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

    @property
    def is_window(self) -> bool:
        return self.left >= 0 and self.right >= 0


class Problem(NamedTuple):
    """A problem is one call: it has everything that a choice of kernel may depend on, and nothing else."""

    direction: str  # "forward" | "backward"
    device: str  # "cpu" | "cuda"
    arch: str | None  # "sm_90"; None on the CPU
    dtype: str  # "f16" | "bf16"; for ffpa_fp8 "e4m3" | "e5m2"
    batch: int
    heads_q: int
    heads_kv: int
    n_q: int  # rows of a sequence; of packed sequences, those of the longest
    n_k: int
    d_qk: int
    d_v: int
    packed: tuple[int, int] | None  # packed sequences: (rows, keys) of all of them together
    visibility: Visibility
    scale: float
    softcap: float
    mask: str | None  # None | "bool" | "16-bit additive" | "additive"
    needs_lse: bool
    level: int | None
    acc: str
    num_stages: int | None
    values_in_keys: bool = False  # V is the first columns of K, in one storage
    at_hand: str | None = None  # the GPU that runs it, where it is to be run as on another, whose arch this problem has
    copied: bool = False  # a result of PyTorch's own making would be copied to where this call's is to lie
    sinks: bool = False  # each head of q has a sink
    largest: bool = False  # the largest scores of each head are wanted
    pages: tuple[int, int] | None = None  # keys lie in pages: (rows of a page, pages of a sequence)
    supposed: bool = False  # explain asks about an installed wheel, as this installation has no kernels
    cache: str | None = None  # what K and V in pages are stored as, if not in the dtype of Q: 8-bit floats

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
            "sinks" if self.sinks else "",
            "largest logits" if self.largest else "",
            f"pages={self.pages[0]}" if self.pages else "",
            f"{self.cache} cache" if self.cache else "",
            "V in K" if self.values_in_keys else "",
            f"level={self.level}" if self.level else "",
            f"acc={self.acc}" if self.acc != "f32" else "",
            f"on {self.arch or self.device}",
        ]
        return " ".join(word for word in words if word)


def visible_keys(p: Problem) -> float:
    """Returns how many keys a row sees, averaged over nine rows from first to last."""
    return _visible_keys(p.visibility, p.n_q, p.n_k) if p.visibility.bounded else p.n_k


@lru_cache(maxsize=64)  # a plan asks for each number of parts
def _visible_keys(see: Visibility, n_q: int, n_k: int) -> float:
    shift = 0 if see.top_left else n_k - n_q

    def seen_by(row: int) -> int:
        first = 0 if see.left < 0 else max(row + shift - see.left, 0)
        end = n_k if see.right < 0 else min(row + shift + see.right + 1, n_k)
        return max(end - first, 0)

    return sum(seen_by((2 * i + 1) * n_q // 18) for i in range(9)) / 9
