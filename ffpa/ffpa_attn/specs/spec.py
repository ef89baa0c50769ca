"""A spec is one kernel, as pure values: no tensors, no device, no torch. Here is all that can be compiled."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, NamedTuple

from . import tiles
from .problem import FP8_DTYPES


@dataclass(frozen=True)
class KernelSpec:
    """A spec is one kernel to compile. Its name is the generated file, the C++ Config type, the registry key, the test
    id and the bench row.

    A family of kernels is a subclass. Its fields are what shapes registers and shared memory, and nothing else; they
    reach C++ as the members of the Config: `tile_q: int` is kTileQ, `dtype: str` is the type Dtype.
    """

    family: ClassVar[str]  # <direction>_<name>: the kernel; the class, <Direction><Name>, adds Config for its template
    arch: ClassVar[str] = "sm_80"  # the oldest GPU it runs on; with a letter, as in "sm_90a", the only one
    allowed_spill_bytes: ClassVar[int] = 0  # bytes of spills above which a build fails

    def __init_subclass__(cls) -> None:
        if KernelSpec in cls.__bases__ and "family" not in vars(cls):
            cls.family = re.sub(r"(?<=\w)(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def header(self) -> str:
        """Returns the file that has the kernel and its template."""
        direction, _, name = self.family.partition("_")
        return f"attention/{direction}/{name}.cuh"

    @property
    def name(self) -> str:
        return _name(self)


@cache  # a choice asks for it, of a spec that it has made anew
def _name(spec: KernelSpec) -> str:
    words = [spec.family]
    for field in fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, str):
            words.append(value)
        elif isinstance(value, bool):
            words += [field.name] if value else []
        else:
            words.append(f"{field.name}{value}")
    return "_".join(words)


@dataclass(frozen=True)
class ForwardMmaSplit(KernelSpec):
    """A spec of the split-D forward serves every D_qk, at level 1 each D_v up to `columns`, at the others every D_v."""

    allowed_spill_bytes = 384  # spills on the path of masks; there are hardly any elsewhere

    dtype: str
    acc_qk: str  # "f32" | "f16"
    acc_pv: str
    columns: int  # columns of O in registers
    rows: int  # rows of one tile
    keys: int
    key_columns: int  # columns of Q and K in one step
    value_rows: int  # rows of V in one step
    streamed: bool = False  # O lies in scratch, as at level 3
    own_rings: bool = False  # K and V have a ring each, instead of one for both
    pad_q: bool = False  # rows of Q in shared memory are padded, not swizzled
    pad_k: bool = False
    pad_v: bool = False
    serial: bool = False  # fragments are loaded when they are needed, not ahead
    paged: bool = False  # keys lie in pages
    e4m3: bool = False  # they are 8-bit floats there


@dataclass(frozen=True)
class ForwardMmaKeys(KernelSpec):
    """In this forward of few rows on 8-bit keys in pages, each warp has its own keys; a spec serves every D_qk, and each
    D_v up to `columns`.
    """

    allowed_spill_bytes = 144  # on GPUs before sm_89, where conversions take registers
    e4m3, own_rings, streamed = True, False, False  # as levels.py asks of each spec

    dtype: str
    columns: int  # columns of O in registers, and of Q and K in one step
    rows: int  # rows of one tile
    keys: int


@dataclass(frozen=True)
class ForwardMmaRows(KernelSpec):
    """In this forward for small head dims, each warp has its own rows; a spec serves D_qk and D_v up to `head_dim`."""

    allowed_spill_bytes = 96  # once a tile: six registers on sm_80 at D = 128, eleven on sm_120 at D = 64
    streamed: ClassVar[bool] = False

    dtype: str
    acc_qk: str
    acc_pv: str
    head_dim: int  # columns of Q, K, V and O
    rows: int  # rows of one tile; tiles of 128 rows know a positive scale only, no other rule for scores
    keys: int
    q_in_registers: bool = False  # if not, fragments of Q are read again for every tile
    serial: bool = False
    paged: bool = False

    @property
    def plain(self) -> bool:
        return self.rows == 128


@dataclass(frozen=True)
class ForwardMerge(KernelSpec):
    """This kernel merges results over parts of the keys into one."""

    dtype: str


@dataclass(frozen=True)
class ForwardClearRows(KernelSpec):
    """This kernel clears the rows of a packed result that belong to no sequence."""


@dataclass(frozen=True)
class ForwardAppendRows(KernelSpec):
    """This kernel appends rows of 16-bit elements, copied as bits, to sequences whose keys lie in pages."""


@dataclass(frozen=True)
class BackwardRows(KernelSpec):
    """This kernel finds what the gradients of each query row need: LSE, dO·O, whether the row counts."""

    dtype: str


@dataclass(frozen=True)
class BackwardSinkGradient(KernelSpec):
    """This kernel sums the gradient of each head's sink over blocks of rows."""

    dtype: str


@dataclass(frozen=True)
class BackwardWgmmaScores(KernelSpec):
    """This kernel writes P and dS to the workspace; one spec serves every head dim."""

    arch = "sm_90a"
    # Most of these spills wait while rules are applied, once a tile; the others are of the warp that finds tiles.
    allowed_spill_bytes = 576

    dtype: str


@dataclass(frozen=True)
class BackwardWgmmaProducts(KernelSpec):
    """This kernel computes dQ, or dK and dV, from P and dS; one spec serves every head dim."""

    arch = "sm_90a"

    dtype: str
    columns: int  # columns of one tile
    of_q: bool


@dataclass(frozen=True)
class BackwardMmaScores(KernelSpec):
    """This is the counterpart of BackwardWgmmaScores for every GPU."""

    allowed_spill_bytes = 192  # spills are between products, not among them: few on sm_90, at most 172 elsewhere

    dtype: str


@dataclass(frozen=True)
class BackwardMmaProducts(KernelSpec):
    """This is the counterpart of BackwardWgmmaProducts for every GPU."""

    dtype: str
    columns: int
    of_q: bool


@dataclass(frozen=True)
class ForwardMmaShort(KernelSpec):
    """This forward has all keys in one tile, and so a softmax of one step; any head dim."""

    tile = 64  # rows of a row tile, and keys

    dtype: str
    columns: int  # columns of a step


@dataclass(frozen=True)
class BackwardMmaShort(KernelSpec):
    """This backward has all keys of a key/value head in one tile, and P and dS in shared memory; any head dim."""

    allowed_spill_bytes = 64  # numbers that wait between sums, in tiles of 128: 16 warps share a multiprocessor

    dtype: str
    tile: int  # rows of a row tile, and keys
    columns: int  # columns of a step for a gradient


@dataclass(frozen=True)
class ForwardWgmmaFused(KernelSpec):
    """This forward has O in registers; a spec serves every D_qk up to `columns`, every D_v up to `value_columns`."""

    arch = "sm_90a"
    blocks = 1  # blocks that share a row tile
    rows = 128  # of a row tile
    allowed_spill_bytes = 400  # spills are mostly the producer's, and of what is needed once a tile

    dtype: str
    columns: int
    value_columns: int
    paged: bool = False


@dataclass(frozen=True)
class ForwardWgmmaPair(KernelSpec):
    """This is the counterpart of ForwardWgmmaFused for an O of up to 512 columns, which takes two blocks' registers."""

    arch = "sm_90a"
    blocks = 2
    rows = 128
    most_value_columns = 512

    dtype: str
    columns: int
    paged: bool = False

    @property
    def value_columns(self) -> int:
        return min(self.columns, self.most_value_columns)


@dataclass(frozen=True)
class ForwardWgmmaLatent(KernelSpec):
    """In this forward V is the first columns of K, in one storage; a spec serves every D_qk up to `columns`."""

    arch = "sm_90a"
    blocks = 1
    rows = 64
    value_columns = 512

    dtype: str
    columns: int
    paged: bool = False

    @property
    def allowed_spill_bytes(self) -> int:
        return 16 if self.paged else 0  # spills of warps that bring pages


@dataclass(frozen=True)
class ForwardWgmmaTwoPhase(KernelSpec):
    """In this forward for wide head dims, P goes to scratch; P V makes `columns` of O at a time, or 64 less."""

    arch = "sm_90a"

    dtype: str
    columns: int
    paged: bool = False

    @property
    def allowed_spill_bytes(self) -> int:
        return 144 if self.paged else 40  # spills are between products, not among them, or of warps that bring pages


@dataclass(frozen=True)
class ForwardMmaTwoPhase(KernelSpec):
    """This is the counterpart of ForwardWgmmaTwoPhase for every GPU."""

    dtype: str
    columns: int


@dataclass(frozen=True)
class ForwardArrangeValues(KernelSpec):
    """This kernel transposes V and puts its keys in the order that ForwardWgmmaFp8 wants."""

    arch = "sm_90a"  # the arch of ForwardWgmmaFp8, which needs it


@dataclass(frozen=True)
class ForwardWgmmaFp8(KernelSpec):
    """This forward of 8-bit floats has O in two warpgroups; a spec serves every D_qk and D_v up to `columns`."""

    arch = "sm_90a"
    allowed_spill_bytes = 96  # spills of what is needed once a row tile

    dtype: str  # "e4m3" | "e5m2"
    columns: int


FUSED_COLUMNS = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256), (320, 320))  # (Q and K, V and O)
PAIR_COLUMNS = (384, 448, 512, 576)  # of Q and K; 576 is for 512 of V and O
PAGED_PAIR_COLUMNS = (384, 512, 576)  # half of them are whole boxes
LATENT_COLUMNS = (512, 576)
FP8_COLUMNS = (192, 256, 320, 384, 448, 512)
SHORT_COLUMNS = (64, 128)  # columns of a step: for narrow heads, and for others
SHORT_TILES = (64, 128)  # rows and keys, in the backward
TWO_PHASE_COLUMNS = (256, 320, 384)
TWO_PHASE_MMA_COLUMNS = 256


def short_columns(tile: int) -> tuple[int, ...]:
    """Returns the columns of a step for a gradient: each warp of those that have the same rows gets 64 at least."""
    return tuple(columns for columns in SHORT_COLUMNS if columns >= tile)


class ProductTile(NamedTuple):
    """This is a tile of dQ, dK or dV; its speed is relative to a tile of 128 x 256 in a block by itself."""

    columns: int
    rows: int
    blocks: int  # blocks of a cluster, which share the tile
    speed: float


PRODUCT_TILES = tuple(
    ProductTile(*tile) for tile in ((160, 256, 1, 1.0), (192, 256, 1, 1.03), (224, 256, 2, 0.9), (256, 256, 2, 1.0))
)
# These speeds follow from the bytes of shared memory that a product takes.
MMA_PRODUCT_TILES = tuple(ProductTile(*tile) for tile in ((128, 128, 1, 0.75), (192, 128, 1, 0.93), (256, 128, 1, 1.0)))


class Shape(NamedTuple):
    """A shape is a tile with its speed, in TFLOPS at N = 8192 on an H200."""

    columns: int  # columns of O in registers
    rows: int
    keys: int
    key_columns: int
    value_rows: int
    speed: int


MOST_COLUMNS = 1024  # columns of O in registers
COLUMNS = range(256, MOST_COLUMNS + 1, 64)
PAGED_COLUMNS = (256, 384, 512, 768, 1024)  # the same, where keys lie in pages

# These are the (acc_qk, acc_pv) of each type; tensor cores accumulate products of bf16 in f32 only.
ACCUMULATORS = {"bf16": (("f32", "f32"),), "f16": (("f32", "f32"), ("f16", "f16"), ("f32", "f16"))}


def register_shapes(columns: int, acc: tuple[str, str], paged: bool = False) -> list[Shape]:
    """Returns tiles for so many columns of O in registers: for 227, 163 and 99 KB of shared memory, for few rows. Keys in
    pages have the first and the last of them.
    """
    shapes = [Shape(columns, *tile) for tile in tiles.REGISTERS[acc[1]][columns]]
    return [shapes[0], shapes[-1]] if paged else shapes


# Tiles for 8-bit keys and values in pages: of 16 rows, of which an SM holds several blocks, and of 32, as a server decodes
# few. They have no speed as others have it: levels._pace_of_8_bits estimates them by what decoding takes. The first are
# those of ForwardMmaKeys.
E4M3_SHAPES = (
    Shape(128, 16, 128, 128, 32, 0),
    Shape(128, 32, 256, 128, 256, 0),
    Shape(256, 16, 256, 128, 128, 0),
    Shape(256, 32, 256, 128, 128, 0),
    Shape(512, 16, 256, 64, 32, 0),
    Shape(512, 32, 256, 128, 64, 0),
    Shape(1024, 32, 256, 128, 32, 0),
)


def streamed_shapes(head_dim: int, acc: tuple[str, str]) -> list[Shape]:
    """Returns the tiles of level 3 for such a head dim: for many rows, and for 99 KB of shared memory."""
    table = tiles.STREAMED[acc[1]]
    nearest = next((d for d in table if d >= head_dim), max(table))
    return [Shape(*tile) for tile in table[nearest]]


# By head dim: (rows, keys, TFLOPS where an SM holds two blocks) of a tile for many rows, and of one for all rules.
_ROWS_TILES = {
    64: ((128, 128, 351), (64, 64, 285)),
    96: ((128, 64, 354), (64, 64, 285)),
    128: ((128, 64, 381), (64, 64, 308)),
    192: ((64, 64, 339),),
    256: ((64, 64, 321),),
}
ROWS_HEAD_DIMS = tuple(_ROWS_TILES)


def rows_shapes(head_dim: int, paged: bool = False) -> list[Shape]:
    """Returns tiles of whole rows: for many rows, and for all rules, where these are two. Keys in pages have the last."""
    shapes = [Shape(head_dim, rows, keys, head_dim, keys, speed) for rows, keys, speed in _ROWS_TILES[head_dim]]
    return shapes[-1:] if paged else shapes


def rows_spec(
    dtype: str, acc: tuple[str, str], shape: Shape, q_in_registers: bool | None = None, paged: bool = False
) -> ForwardMmaRows:
    """Returns the spec with the faster of the two ways to hold Q, unless `q_in_registers` picks one."""
    fastest = shape.columns == 192
    in_registers = fastest if q_in_registers is None else q_in_registers
    return ForwardMmaRows(dtype, *acc, shape.columns, shape.rows, shape.keys, in_registers, paged=paged)


def forward_spec(
    dtype: str, acc: tuple[str, str], shape: Shape, streamed: bool = False, paged: bool = False, e4m3: bool = False
) -> ForwardMmaSplit | ForwardMmaKeys:
    if e4m3 and shape == E4M3_SHAPES[0]:
        return ForwardMmaKeys(dtype, *shape[:3])
    return ForwardMmaSplit(dtype, *acc, *shape[:5], streamed=streamed, paged=paged, e4m3=e4m3)


def _paged_mma_specs(dtype: str, columns: Iterable[int], head_dims: Iterable[int]) -> Iterator[KernelSpec]:
    acc = ACCUMULATORS[dtype][0]  # f32
    for d in head_dims:
        yield from (rows_spec(dtype, acc, shape, paged=True) for shape in rows_shapes(d, paged=True))
    for c in columns:
        yield from (forward_spec(dtype, acc, shape, paged=True) for shape in register_shapes(c, acc, paged=True))
    for d in tiles.STREAMED[acc[1]]:
        yield from (forward_spec(dtype, acc, shape, streamed=True, paged=True) for shape in streamed_shapes(d, acc))
    for shape in E4M3_SHAPES:
        if shape.columns in columns or shape.columns < COLUMNS[0]:
            yield forward_spec(dtype, acc, shape, paged=True, e4m3=True)


def aot_specs(flags: Mapping[str, Any]) -> tuple[KernelSpec, ...]:
    """Returns the kernels that a wheel holds, given the build-time flags."""
    few = flags["ENABLE_FFPA_DEBUG"]
    columns, head_dims = ((512,), (64, 192)) if few else (COLUMNS, ROWS_HEAD_DIMS)
    first, last = (slice(1), slice(-1, None)) if few else (slice(None), slice(None))  # what a debug build has of sizes
    kernels: list[KernelSpec] = []
    for dtype, accumulators in ACCUMULATORS.items():
        kernels += [ForwardMerge(dtype), BackwardRows(dtype), BackwardWgmmaScores(dtype), BackwardMmaScores(dtype)]
        kernels += [BackwardSinkGradient(dtype)]
        for family, shapes in (BackwardWgmmaProducts, PRODUCT_TILES), (BackwardMmaProducts, MMA_PRODUCT_TILES):
            kernels += [family(dtype, shape.columns, of_q) for shape in shapes[last] for of_q in (True, False)]
        kernels += [ForwardMmaShort(dtype, columns) for columns in SHORT_COLUMNS]
        kernels += [
            BackwardMmaShort(dtype, tile, width) for tile in SHORT_TILES[first] for width in short_columns(tile)
        ]
        kernels += [ForwardWgmmaFused(dtype, *widths) for widths in FUSED_COLUMNS[first]]
        kernels += [ForwardWgmmaPair(dtype, width) for width in PAIR_COLUMNS[first]]
        kernels += [ForwardWgmmaLatent(dtype, width) for width in LATENT_COLUMNS[last]]
        kernels += [ForwardWgmmaTwoPhase(dtype, width) for width in TWO_PHASE_COLUMNS[last]]
        kernels += [ForwardWgmmaFused(dtype, *widths, paged=True) for widths in FUSED_COLUMNS[first]]
        kernels += [ForwardWgmmaPair(dtype, width, paged=True) for width in PAGED_PAIR_COLUMNS[first]]
        kernels += [ForwardWgmmaLatent(dtype, width, paged=True) for width in LATENT_COLUMNS[last]]
        kernels += [ForwardWgmmaTwoPhase(dtype, width, paged=True) for width in TWO_PHASE_COLUMNS[last]]
        kernels += [ForwardMmaTwoPhase(dtype, TWO_PHASE_MMA_COLUMNS)]
        for acc in accumulators[first]:
            kernels += [rows_spec(dtype, acc, shape) for d in head_dims for shape in rows_shapes(d)]
            kernels += [forward_spec(dtype, acc, shape) for c in columns for shape in register_shapes(c, acc)]
            kernels += [
                forward_spec(dtype, acc, shape, streamed=True)
                for d in tiles.STREAMED[acc[1]]
                for shape in streamed_shapes(d, acc)
            ]
        kernels += _paged_mma_specs(dtype, [c for c in columns if c in PAGED_COLUMNS], head_dims)
    kernels += [ForwardArrangeValues(), ForwardAppendRows(), ForwardClearRows()]
    kernels += [ForwardWgmmaFp8(dtype, width) for dtype in FP8_DTYPES for width in FP8_COLUMNS[last]]
    return tuple(dict.fromkeys(kernels))
