"""A `Problem` is all that a call depends on, as plain values alone: a wrong one prints as source code that makes it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

BITS16 = ("f16", "bf16")
FP8 = ("e4m3", "e5m2")
KINDS = ("forward", "backward", "packed", "pages", "fp8", "masks", "large", "sinks")
TWO_TILES = (129, 257)  # rows and keys: no tile is larger than 128 by 256
DEVICES = ("cuda", "emulator", "fused", "interpreter", "cpu")  # fused: the emulator, its multiply-adds as nvcc has them

EMULATED = ("emulator", "fused")


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory: which dims are outer, what lies between, how far from an even address it begins."""

    order: str = "BHN"  # outermost first; the head dim is innermost
    slack: tuple[int, int, int] = (
        0,
        0,
        0,
    )  # entries, heads and rows that nobody asked for; a row's are elements, in eights
    offset: int = 0  # elements, in eights
    shared: str = ""  # dims among "B" and "H" whose stride is 0


@dataclass(frozen=True)
class Mask:
    dtype: str = "bool"  # bool, f16, bf16, f32
    own: tuple[bool, bool, bool, bool] = (True, True, True, True)  # dims with elements of their own: B, H, rows, keys
    dims: int = 4
    pattern: str = "holes"  # holes, left, right, rows, whole, none: which elements are hidden
    hidden: float = float("-inf")  # value of hidden elements; a bool mask holds False
    attract: float = 0.0  # number that some keys are raised by
    size: float = 1.0  # size of the random values of an additive mask
    transposed: bool = False
    slack: int = 0


@dataclass(frozen=True)
class Sinks:
    """A logit for each head of Q."""

    dtype: str = "f32"  # f32, f16, bf16
    like: str = "nothing"  # nothing, scores: each is near the score of some pair of its head
    size: float = 1.0  # size of the random values that are added to that
    raised: float = 0.0  # number that some heads' are raised by
    none: bool = False  # some heads have none, which is -inf
    strided: bool = False


@dataclass(frozen=True)
class Pages:
    """Keys of packed sequences lie in pages of a pool, in any order."""

    rows: int = 16  # of a page
    layout: str = "NHD"  # as pages.empty() has it
    shared: bool = False  # sequences have their first page in common
    spare: int = 0  # entries of the table that no sequence needs
    eight_bits: bool = False  # the pools hold e4m3, and each head has a scale


@dataclass(frozen=True)
class Problem:
    """Everything that a call depends on. Tensors hold numbers made from `seed`."""

    seed: int = 0
    device: str = "cuda"  # one of DEVICES
    backend: str = "auto"
    backward: bool = False
    dtype: str = "bf16"
    batch: int = 1
    heads_kv: int = 1
    group: int = 1
    n_q: int = 64
    n_k: int = 64
    d: int = 64
    d_v: int = 64
    # packed sequences
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    spare: int = 0
    odd_offsets: str = ""  # first: begins below 0; last: ends past the tensor; falls: the last length is negative
    longest: tuple[int, int] = (0, 0)  # max_seqlen less the longest length
    pages: Pages | None = None
    # what is computed
    causal: bool = False
    align: str = "bottom_right"
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    mask: Mask | None = None
    sinks: Sinks | None = None
    return_lse: bool = True
    max_logits: bool = False  # whether the largest logits are asked for
    # how numbers look: plain, equal_keys, nan_row; and how large they are
    numbers: str = "plain"
    size_q: float = 1.0
    size_k: float = 1.0
    size_v: float = 1.0
    # gradients
    wanted: str = "qkv"  # names whose gradients are asked for: q, k, v, m(ask), s(inks)
    grad_lse: bool = False
    quiet_rows: bool = False  # dO of rows that see hidden keys alone is 0
    # how it lies in memory
    layout: str = "BHND"
    q: Layout = Layout()
    k: Layout = Layout()
    v: Layout = Layout()
    v_in_k: bool = False  # V is the first columns of K
    out: Layout | None = None  # layout of `out`, if it is given
    # how it runs
    level: int | None = None
    acc: str = "f32"
    num_stages: int | None = None
    flags: tuple[tuple[str, str], ...] = ()
    arch: str = "sm_80"  # architecture that the emulator is
    schedule: int = 0
    exact: bool = False  # whether emulated sums are those of tensor cores, bit for bit
    repeats: int = 1
    # 8-bit floats
    scales: tuple[str | None, str | None, str | None] = (None, None, None)
    out_dtype: str = "bf16"
    v_transposed: bool = False

    @property
    def heads_q(self) -> int:
        return self.heads_kv * self.group

    @property
    def packed(self) -> bool:
        return self.lengths_q is not None

    @property
    def rule(self) -> dict:
        return {
            "causal": self.causal,
            "align": self.align,
            "window": self.window,
            "softcap": self.softcap,
            "scale": self.scale,
        }

    def with_(self, **changes) -> Problem:
        return replace(self, **changes)

    def __repr__(self) -> str:
        """Gives the source code that makes the problem; what is at its default is left out."""
        return _source(self)

    def has_two_tiles(self) -> bool:
        """Says whether a sequence has two tiles of rows and of keys, whatever the kernel's tiles are."""
        lengths = zip(self.lengths_q, self.lengths_k, strict=True) if self.packed else [(self.n_q, self.n_k)]
        return any(n_q >= TWO_TILES[0] and n_k >= TWO_TILES[1] for n_q, n_k in lengths)

    def pairs(self) -> int:
        """Returns rows times keys, of all heads."""
        if self.packed:
            return self.heads_q * sum(a * b for a, b in zip(self.lengths_q, self.lengths_k, strict=True))
        return self.batch * self.heads_q * self.n_q * self.n_k


def _source(x) -> str:
    if isinstance(x, float) and x in (float("inf"), -float("inf")):
        return f'float("{x}")'
    if not isinstance(x, (Problem, Layout, Mask, Sinks)):
        return repr(x)
    default = type(x)()
    named = {f.name: getattr(x, f.name) for f in fields(x)}
    return f"{type(x).__name__}({', '.join(f'{name}={_source(v)}' for name, v in named.items() if v != getattr(default, name))})"
