"""Forwards whose blocks take row tiles from a list (fused.py, two_phase.py, forward_short.py) share this; and those that
cut keys into parts, which become work items of their own whose results are merged (AttentionParams::splits; levels.py
does so, too), share how they are cut. All is known from shapes, options and the kind of GPU: no result depends on
anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from .. import env
from ..launching import attention_call
from ..launching.attention_call import Call, Memo, forward_launch
from ..launching.launch import multiprocessors
from ..specs import archs
from ..specs.problem import MOST_POSITIONS, Problem, Visibility, visible_keys
from ..specs.spec import ForwardMerge, KernelSpec

ROWS = 128  # rows of a tile in the wgmma and two-phase kernels of csrc/attention/forward, but that of latent vectors
HEAD_BYTES = 512  # bytes at the head of the scratch, which blocks share
_FEWER = 0.95  # part of the row tiles that is left, where heads share them
MOST_TILES = 2**31 - 2**16  # a count of 32 bits, in which each block takes one more than there are
PART_COLUMNS = 64  # columns of O that a part's rows are rounded up to, as AttentionParams::part_columns does
MOST_PARTS = 64
_LEAST_READERS = 0.85  # part of the blocks that is taken to read as fast as all do
_SPREAD = 0.8  # standard deviations of a number of items, to either side of its mean, that are looked at
_POINT = 0.01  # waves to either side of a number of items that is known
_LITTLE = 1.03  # a call that takes at most so many times as long is hardly slower
_MERGE = 2.5  # microseconds of the launch that merges parts
_BANDWIDTH_OF_PARTS = {False: 4.0e6, True: 2.0e6}  # bytes written and read in a microsecond; True: lengths are ragged


class Scratch(NamedTuple):
    """The number of blocks that run, the keys for which each has room for P, and the bytes that takes."""

    blocks: int
    chunk_keys: int
    scratch_bytes: int


class Parts(NamedTuple):
    """The parts of a row tile's keys: how many there may be, and the keys of each. One part has all keys."""

    count: int = 1
    keys: int = 0

    @property
    def settings(self) -> dict[str, int]:
        return {"splits": self.count, "part_keys": self.keys}


def cut_keys(n_q: int, n_k: int, see: Visibility, rows: int, tile_keys: int, count: int) -> Parts:
    """Cuts what a tile of so many adjacent rows of a head sees at most into `count` parts of whole tiles, or fewer."""
    visible = n_k
    if see.is_window:
        visible = min(visible, see.left + see.right + rows)
    if see.top_left and see.right >= 0:
        visible = min(visible, n_q + see.right)
    if not see.top_left and see.left >= 0:
        visible = min(visible, n_q + see.left)
    tiles = max(min((visible + 2 * tile_keys - 2) // tile_keys, -(-n_k // tile_keys)), 1)  # they begin anywhere
    tiles_of_part = -(-tiles // count)
    parts = -(-tiles // tiles_of_part)
    return Parts(parts, tiles_of_part * tile_keys) if parts > 1 else Parts()


def floats_of_row(parts: Parts, d_v: int) -> int:
    """Returns the floats that all parts of one row take: O, a reference and a sum."""
    return parts.count * (-(-d_v // PART_COLUMNS) * PART_COLUMNS + 2)


def most_parts(p: Problem, tile_keys: int, workspace_cap: int) -> int:
    """Returns the most parts of keys that have a tile each, and results that half of the workspace holds."""
    bytes_of_one = p.batch * p.heads_q * p.n_q * floats_of_row(Parts(), p.d_v) * 4
    return max(min(MOST_PARTS, p.n_k // tile_keys, workspace_cap // 2 // max(bytes_of_one, 1)), 1)


class Pace(NamedTuple):
    """What an estimate has to know of a kernel whose blocks take items at one pace: that of the tensor cores, or of their
    share of the memory.
    """

    rows: int  # of a row tile
    tile_keys: int  # keys of a part are a multiple of it
    blocks: int  # blocks, or clusters, that work at a time
    of_key: float  # microseconds for the products of a row tile with a key
    ends: float  # microseconds for the begin and end of an item
    columns: int  # columns of K and V that a key has in memory
    bandwidth: float  # bytes of K and V a microsecond


def microseconds(p: Problem, pace: Pace, tile_heads: int, of_keys: Parts) -> float:
    """Estimates a call on an otherwise idle GPU."""
    blocks, parts = pace.blocks, of_keys.count
    items = max(count(p, pace.rows, tile_heads), 1) * parts
    keys = visible_keys(p) + (pace.tile_keys / 2 if p.visibility.bounded else 0)
    if p.visibility.is_window:  # rows of a tile see more than one of them does
        keys = min(keys + pace.rows // tile_heads - 1, p.n_k)
    longest = min(keys, of_keys.keys) if parts > 1 else keys
    readers = min(max(items, _LEAST_READERS * blocks), blocks)
    bytes_of_key = p.batch * p.heads_kv * pace.columns * 2 * parts / items
    of_item = longest * max(pace.of_key, bytes_of_key / (pace.bandwidth / readers)) + pace.ends
    waves = -(-items // blocks) if items < 4 * blocks else items / blocks + 0.5
    of_items = waves * of_item
    decodes = _decodes_pages(p, pace.rows // tile_heads)
    if decodes:
        of_items = _of_decoding(p.batch, items // parts, parts, longest, bytes_of_key, pace)
    rows = p.batch * p.heads_q * p.n_q
    ragged = decodes and p.batch > 1
    merge = _MERGE + parts * rows * p.d_v * 8 / _BANDWIDTH_OF_PARTS[ragged] if parts > 1 else 0
    return of_items + merge


def _decodes_pages(p: Problem, rows: int) -> bool:
    """Says whether a server decodes: its bound then says no more of lengths than that none is longer. A narrow window hides
    that: most sequences are longer than it, and their rows see the same number of keys.
    """
    return p.pages is not None and p.n_q <= rows and 2 * visible_keys(p) > p.n_k


def _of_decoding(batch: int, tiles: int, parts: int, part_keys: float, bytes_of_key: float, pace: Pace) -> float:
    """Estimates the items of sequences that have any number of keys up to the longest, all numbers equally likely.

    The number of items that have keys is then random, and half of all on average. The estimate is the mean over numbers from
    _SPREAD standard deviations below that to as many above it. Where keys are not cut, all items have keys; and one sequence
    alone is taken to be the longest. Whole waves of blocks have items of mean length. The last wave has longer ones,
    and its blocks, if they are few, read faster.
    """
    all_items, is_random = tiles * parts, batch > 1 and parts > 1
    items = (all_items + tiles) / 2 if is_random else all_items  # that have keys
    of_mean = all_items / 2 / items if batch > 1 else 1  # an item of mean length, as a part of the longest
    # Microseconds of the longest item's products, and those of reading it where all blocks read.
    alone = part_keys * pace.of_key
    together = max(part_keys * bytes_of_key * pace.blocks / pace.bandwidth, alone)
    enough = alone / together  # part of the blocks that reads as fast as all do

    def up_to(waves: float) -> float:  # the sum of the times of all numbers of waves from none on
        whole, rest = divmod(waves, 1)
        of_last = [alone * x if x <= enough else (alone * enough + together * x * x) / 2 for x in (1, rest)]
        return together * of_mean * whole * ((whole - 1) / 2 + rest) + of_last[0] * whole + of_last[1]

    mean = items / pace.blocks
    to_either_side = all_items / math.sqrt(12 * batch) * _SPREAD / pace.blocks if is_random else min(_POINT, mean)
    least, most = mean - to_either_side, mean + to_either_side
    of_waves = (up_to(most) - up_to(least)) / (most - least)
    return max(of_waves, together * min(mean, 1), alone) + pace.ends * max(mean, 1)


def fastest_parts(
    p: Problem, rows: int, tile_keys: int, tile_heads: int, workspace_cap: int, estimate: Callable[..., float], *how
) -> tuple[float, Parts]:
    """Returns the parts that take the shortest, and how long: `estimate` is asked of p, `how` and parts. Where the bound of one
    sequence may be far above its length, as in a CUDA graph, they are the most that take little longer: each of them is
    shorter.
    """
    return _fastest_parts(
        of_whole_tiles(p, rows, tile_heads), rows, tile_keys, tile_heads, workspace_cap, estimate, *how
    )


def of_whole_tiles(p: Problem, rows: int, tile_heads: int) -> Problem:
    """Returns a problem with as many row tiles, the same for all numbers of packed rows that make so many."""
    rows //= tile_heads
    return p._replace(packed=(p.packed[0] // rows * rows, 0)) if p.packed else p


@lru_cache(maxsize=1024)  # a server has another number of packed rows in each step
def _fastest_parts(p: Problem, rows: int, tile_keys: int, tile_heads: int, workspace_cap: int, estimate, *how):
    most = MOST_TILES // max(count(p, rows, tile_heads), 1)
    most = max(min(most_parts(p, tile_keys, workspace_cap), most), 1)
    of_tile = p.n_q, p.n_k, p.visibility, rows // tile_heads, tile_keys
    cuts = dict.fromkeys(cut_keys(*of_tile, number) for number in range(1, most + 1))
    times = {cut: estimate(p, *how, cut) for cut in cuts}
    best = min(times, key=times.get)
    if p.batch == 1 and _decodes_pages(p, rows // tile_heads):
        best = max(cut for cut in cuts if times[cut] <= _LITTLE * times[best])
    return times[best], best


class RowTilePlan(NamedTuple):
    spec: KernelSpec
    tile_heads: int = 1  # query heads of a group whose rows share tiles
    parts: Parts = Parts()
    microseconds: float = 0.0  # an estimate, where one was made
    rows = ROWS  # of a tile

    @property
    def kernel(self) -> str:
        return self.spec.name

    @property
    def alike(self) -> RowTilePlan:
        """Returns what is the same for calls that are launched alike: all but the estimate."""
        return self._replace(microseconds=0.0)

    @property
    def specs(self) -> tuple:
        return (self.spec, ForwardMerge(self.spec.dtype)) if self.parts.count > 1 else (self.spec,)

    def scratch(self, tiles: int, n_k: int, d_v: int, see: Visibility, multiprocessors: int, cap: int) -> Scratch:
        """Returns the scratch that so many row tiles share."""
        raise NotImplementedError

    def forward(
        self,
        q,
        k,
        v,
        out,
        lse,
        mask,
        offsets,
        rule,
        workspace_cap: int,
        memo: Memo,
        sinks=None,
        largest=None,
        pages=None,
    ) -> None:
        """Does what levels.LevelPlan.forward does, with a kernel that knows row tiles, and a merge where keys are cut."""
        call = memo.get("call")
        if call is None:
            blocks = multiprocessors(q.device)
            call = memo["call"] = self._call(q, k, v, out, mask, offsets, rule, pages, blocks, workspace_cap)
        if call.launch is None:  # there are no rows, or no keys
            out.zero_()
            if lse.numel():
                attention_call.fill_without_keys(lse, sinks, offsets)
        call(q, k, v, out, lse, mask, offsets, sinks, largest, pages)

    def _call(
        self, q, k, v, out, mask, offsets, rule, pages, multiprocessors: int, workspace_cap: int, clears=True
    ) -> Call:
        n_q, n_k = attention_call.lengths(q, k, offsets, pages)
        batch = attention_call.entries(q, offsets)
        if not (batch and n_q and n_k):
            return Call()
        heads, d_v = q.shape[-3], v.shape[-1]
        rows = batch * heads * n_q
        partial = rows * floats_of_row(self.parts, d_v) if self.parts.count > 1 else None
        left = workspace_cap - 4 * (partial or 0)

        def scratch_of(packed_rows: int | None) -> Scratch:
            tiles = _count(batch, heads, n_q, packed_rows, self.rows, self.tile_heads) * self.parts.count
            return self.scratch(tiles, n_k, d_v, rule.visibility, multiprocessors, left)

        blocks, chunk_keys, nbytes = scratch_of(q.shape[-2] if offsets else None)
        settings = {"chunk_keys": chunk_keys, "resident_blocks": blocks, "tile_heads": self.tile_heads}
        settings |= {"tile_rows": self.rows // self.tile_heads} | self.parts.settings
        launch = forward_launch(self.specs, q, k, v, out, mask, offsets, rule, pages, clears, **settings)
        # Where offsets fall, the merge reads sums of rows that no tile has; what it makes of them is cleared, or zeros.
        zeros = 2 * rows * self.parts.count if offsets and partial and not clears else 0
        return Call(launch, nbytes // 4 or None, partial, zeros, scratch_of)


def _count(batch: int, heads: int, n_q: int, packed_rows: int | None, rows: int = ROWS, tile_heads: int = 1) -> int:
    """Counts row tiles, of packed sequences as in csrc/attention/rows/packed_tiles.cuh: nobody here knows their lengths."""
    rows //= tile_heads
    return heads // tile_heads * (-(-n_q // rows) * batch if packed_rows is None else packed_rows // rows + batch)


def count(p: Problem, rows: int = ROWS, tile_heads: int = 1) -> int:
    return _count(p.batch, p.heads_q, p.n_q, p.packed and p.packed[0], rows, tile_heads)


def shared_heads(p: Problem, rows: int = ROWS) -> int:
    """Returns how many query heads share row tiles: as many as leave the fewest tiles, where these are fewer."""
    fewest, heads = min((count(p, rows, n), -n) for n in range(1, min(p.group, rows) + 1) if p.group % n == 0)
    return -heads if fewest <= _FEWER * count(p, rows) else 1


def why_not(p: Problem, name: str, flags: Mapping[str, Any], rows: int = ROWS) -> str | None:
    """Says why none of these forwards can run the problem, or None."""
    if p.acc != "f32":
        return f"the {name} forward accumulates in f32, not {p.acc}"
    if p.num_stages:
        return f"the {name} forward has a ring of its own, and `num_stages` no meaning"
    forced = next((flag for flag in env.EXPERIMENTS if flags[flag] is not None), None)
    if forced:
        return f"the {name} forward knows no {forced}"
    if p.n_q + p.n_k > MOST_POSITIONS:
        return f"the {name} forward counts positions in 32 bits, and {p.n_q} rows with {p.n_k} keys are too many"
    positions = p.packed[:1] if p.packed and p.pages else p.packed  # keys in pages are counted by sequence
    if positions and max(positions) > MOST_POSITIONS:
        return f"the {name} forward counts positions in 32 bits, and {max(positions)} of all sequences are too many"
    if (tiles := count(p, rows)) > MOST_TILES:
        return f"the {name} forward counts row tiles in 32 bits, and {tiles} are too many"
    return None


def least_blocks(p: Problem) -> int:
    """Returns how many blocks keep a GPU busy."""
    return archs.multiprocessors(p.arch) * 3 // 4


def why_slower(p: Problem, blocks_of_tile: int = 1) -> str | None:
    """Says why the mma forward is faster, or None: it has smaller tiles and cuts keys everywhere."""
    tiles = count(p)
    if (busy := tiles * blocks_of_tile) < least_blocks(p):
        return f"{tiles} row tiles keep {busy} of {archs.multiprocessors(p.arch)} multiprocessors busy, and the mma forward splits keys"
    if p.n_q <= ROWS // 2:
        return f"{p.n_q} rows leave half of a tile of {ROWS} empty"
    return None
