"""This module cuts the backward into chunks that fit the workspace, and says how long they take, from sizes alone.

Times are in steps: 64 of the common dimension of a product of 128 x 256 on one multiprocessor. What matters is that
tiles fill whole rounds of multiprocessors, and that under a causal mask the longest tile does not outlast all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf
from typing import NamedTuple

from ..specs import archs
from ..specs.problem import Problem, visible_keys
from ..specs.spec import ProductTile

# These are the sizes of csrc/attention/params/backward_params.h, and FirstKeys::kStep.
ROW_TILE, SCORE_ROWS, KEY_TILE, LIVE_ROWS, BAND_STEP = 256, 128, 256, 64, 64
_BYTES_OF_PAIR = 4  # bytes of a pair in P and dS
_ENOUGH_BYTES = 1 << 30  # bytes of several heads beyond which more gain nothing

_STEPS_OF_ENDS = 4  # steps to begin and end a tile of a product
_STEPS_OF_SUMS = 7  # steps to write a tile's sums for a later chunk, or to read them: 128 KB at 18 bytes a cycle
_STEPS_OF_FINISH = 8  # steps to finish a tile of P and dS
_STEPS_OF_LAUNCH = 12

Tiles = Sequence[ProductTile]  # tiles to choose from


class Chunk(NamedTuple):
    """Key/value heads of all batch entries, [first_entry, + entries), with some row tiles of each, and some keys."""

    first_entry: int
    entries: int
    first_tile: int
    end_tile: int
    first_key: int
    end_key: int
    turn: int  # number of the place, of two, where sums of dK and dV of packed sequences go on
    of_q: bool  # whether it gives dQ, or a part of its sums
    of_k: bool  # whether it gives dK and dV, or a part of their sums
    tiles_before: int = 0  # row tiles whose sums of dQ lie before its own
    keys_before: int = 0  # keys whose sums of dK and dV lie before its own

    @property
    def place(self) -> tuple[int, ...]:
        """Returns the numbers from `first_entry` on, as csrc/attention/params/backward_params.h has them."""
        return self[:8]

    @property
    def row_tiles(self) -> int:
        return self.end_tile - self.first_tile

    @property
    def keys(self) -> int:
        return self.end_key - self.first_key

    @property
    def rows(self) -> int:
        return self.entries * self.row_tiles * ROW_TILE

    @property
    def pairs(self) -> int:
        """Returns the pairs; not those of packed sequences, whose rows have at most the keys of one."""
        return self.rows * self.keys


class Packed(NamedTuple):
    """Sequences one after the other, with the rows and keys of all of them."""

    sequences: int
    rows: int
    keys: int

    def tiles(self, count: int, size: int) -> int:
        return count // size + self.sequences  # the number in csrc/attention/rows/packed_tiles.cuh


class Work:
    """What is cut: entries are key/value heads of batch entries, each with the rows of `group` query heads."""

    def __init__(self, p: Problem):
        self.packed = Packed(p.batch, *p.packed) if p.packed else None
        self.entries = p.heads_kv * (1 if p.packed else p.batch)
        self.group, self.d_qk, self.d_v = p.group, p.d_qk, p.d_v
        self.n_q, self.n_k = p.n_q, p.n_k  # the longest has so many, where sequences are packed
        self.multiprocessors = archs.multiprocessors(p.arch or "sm_90")
        see, diagonal = p.visibility, 0 if p.visibility.top_left else p.n_k - p.n_q
        self.is_bounded = see.bounded
        self.nearest = None if see.left < 0 else diagonal - see.left  # row r sees the keys from r + nearest on
        self.farthest = None if see.right < 0 else diagonal + see.right  # row r sees the keys up to r + farthest
        self.seen = visible_keys(p) / p.n_k if p.n_k else 1.0  # average part of the keys that a row sees
        if self.packed and p.batch * p.n_k:
            self.seen *= min(self.packed.keys / (p.batch * p.n_k), 1.0)  # this takes lengths to be the same
        keys_of_longest = -(-p.n_k // KEY_TILE) * KEY_TILE
        # Keys of a row in the workspace, where a chunk has as many: all, or those of the band of a score tile's rows.
        self.columns = keys_of_longest
        if see.left >= 0 and see.right >= 0:
            lead = BAND_STEP - 1 if p.packed and not see.top_left else self.nearest % BAND_STEP
            of_band = lead + see.left + see.right + SCORE_ROWS  # keys from a step's beginning to the last one seen
            self.columns = min(-(-of_band // KEY_TILE) * KEY_TILE, keys_of_longest)
        self.keys_of_longest = keys_of_longest
        self.keys = self.packed.tiles(self.packed.keys, KEY_TILE) * KEY_TILE if self.packed else keys_of_longest
        self.tiles_of_keys = self.keys // KEY_TILE
        self.tiles_of_head = self.packed.tiles(self.packed.rows, ROW_TILE) if self.packed else -(-p.n_q // ROW_TILE)
        self.tiles = self.group * self.tiles_of_head

    def columns_of(self, keys: int) -> int:
        return min(keys, self.columns)

    def run(self, count: int, seen: float, heads: int = 1) -> tuple[float, float]:
        """Returns over how many of `count` keys, or rows of so many heads, of which a part is seen, a tile of a product
        runs, on average and at most: 0 for packed sequences, whose tiles blocks take as they become free.
        """
        most = heads * self.columns
        if self.columns < self.keys_of_longest and most < count:
            return most, most
        return count * seen, 0 if self.packed else count

    def keys_summed(self, keys: int) -> int:
        """Returns how many keys there is room for where sums of dK and dV of so many go from chunk to chunk: of packed
        sequences one ends in a chunk, and one goes on.
        """
        return min(keys, 2 * self.keys_of_longest)


def sums_of_key(work: Work, width: int) -> int:
    """Returns the floats of dK and dV of one key, in tiles of this width."""
    return (-(-work.d_qk // width) - (-work.d_v // width)) * width


def sums_of_row(work: Work, width: int) -> int:
    """Returns the floats of dQ of one row."""
    return -(-work.d_qk // width) * width


# ---- how long ----


def _steps_of_product(
    count: int, tile: ProductTile, mean: float, longest: float, multiprocessors: int, ends: float = _STEPS_OF_ENDS
) -> float:
    """Returns the steps of `count` tiles over `mean` rows or keys on average, `longest` at most, on all of the GPU."""
    clusters = multiprocessors // tile.blocks
    if mean == longest:
        rounds = -(-count // clusters) * mean
    else:  # the longest come first
        rounds = max(longest, count * mean / clusters + mean / 2)
    area = tile.rows * tile.columns / tile.blocks / (128 * 256) / tile.speed
    return (rounds / 64 + ends * -(-count // clusters)) * area


def fastest_tile(work: Work, tiles: Tiles, entries: int, row_tiles: int, of_q: bool) -> tuple[float, ProductTile]:
    """Returns (steps, tile) of the fastest tile for a chunk's dQ, or for its dK and dV."""

    def steps(tile: ProductTile) -> float:
        if of_q:
            count = entries * row_tiles * (ROW_TILE // tile.rows) * -(-work.d_qk // tile.columns)
            return _steps_of_product(count, tile, *work.run(work.n_k, work.seen), work.multiprocessors)
        count = entries * -(-work.keys // tile.rows) * (sums_of_key(work, tile.columns) // tile.columns)
        rows = min(row_tiles, work.group * -(-work.n_q // ROW_TILE)) * ROW_TILE
        return _steps_of_product(count, tile, *work.run(rows, work.seen, work.group), work.multiprocessors)

    return min((steps(tile), tile) for tile in tiles)


def _steps_of_pairs(work: Work) -> int:
    """Returns the steps of P and dS of a tile of 128 x 256, on one multiprocessor."""
    return -(-work.d_qk // 64) - (-work.d_v // 64) + _STEPS_OF_FINISH


def _steps_of_chunk(work: Work, tiles: Tiles, entries: int) -> float:
    """Returns the steps of a chunk of whole entries."""
    pairs = entries * work.tiles * 2 * work.run(work.keys_of_longest, work.seen)[0] / KEY_TILE  # counted in tiles
    products = sum(fastest_tile(work, tiles, entries, work.tiles, of_q)[0] for of_q in (True, False))
    return -(-pairs // work.multiprocessors) * _steps_of_pairs(work) + products + _STEPS_OF_LAUNCH


# ---- what rows see ----


def seen_by_rows(work: Work, first: int, end: int) -> tuple[int, int]:
    """Returns the key tiles that some rows see in these row tiles of an entry, a part of a head or whole ones."""
    first_row = first % work.tiles_of_head * ROW_TILE
    last_row = min(first_row + (end - first) * ROW_TILE, work.n_q) - 1
    low = 0 if work.nearest is None else max(first_row + work.nearest, 0)
    high = work.n_k if work.farthest is None else min(last_row + work.farthest + 1, work.n_k)
    return (low // KEY_TILE, -(-high // KEY_TILE)) if low < high else (0, 0)


def seeing_keys(work: Work, first: int, end: int) -> tuple[int, int]:
    """Returns the row tiles of each head in which some rows see a key of these key tiles."""
    last_key = min(end * KEY_TILE, work.n_k) - 1
    low = 0 if work.farthest is None else max(first * KEY_TILE - work.farthest, 0)
    high = work.n_q if work.nearest is None else min(last_key - work.nearest + 1, work.n_q)
    return (low // ROW_TILE, -(-high // ROW_TILE)) if low < high else (0, 0)


# ---- what fits ----


class Cut(NamedTuple):
    chunks: list[Chunk]
    entries: int  # entries that have these chunks one after the other; 1 where they hold all entries
    of_q: ProductTile
    of_k: ProductTile
    row_tiles_kept: int = 0  # row tiles whose sums of dQ wait for later chunks at a time
    keys_kept: int = 0  # keys whose sums of dK and dV do


def _parts(first: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Gives [first, end) in parts of at most `most`, all about as large."""
    if first < end:
        parts = -(-(end - first) // max(most, 1))
        size = -(-(end - first) // parts)
        yield from ((at, min(at + size, end)) for at in range(first, end, size))


def _sizes(count: int) -> Iterator[int]:
    """Gives the sizes of such parts, the largest first."""
    size = count + 1
    while size > 1:
        size = -(-count // -(-count // (size - 1)))
        yield size


def _row_parts(work: Work, most: int, first_seen: int, end_seen: int) -> Iterator[tuple[int, int]]:
    """Gives an entry's row tiles, `most` at a time at most: some whole heads, or parts of the seen tiles of one."""
    of_head = work.tiles_of_head
    if most >= of_head:
        heads = _parts(0, work.group, most // of_head) if first_seen < end_seen else ()
        yield from ((first * of_head, end * of_head) for first, end in heads)
        return
    for head in range(work.group):
        for first, end in _parts(first_seen, end_seen, most):
            yield head * of_head + first, head * of_head + end


def _whole_entries(work: Work, tiles: Tiles, most: int, enough: int) -> int:
    """Returns how many whole entries a chunk has, at most `most`."""
    counts = sorted({-(-work.entries // parts) for parts in range(-(-work.entries // most), work.entries + 1)})
    few = [count for count in counts if count <= max(enough, counts[0])]
    return min(few, key=lambda count: -(-work.entries // count) * _steps_of_chunk(work, tiles, count))


def _bytes(work: Work, row_tiles: int, keys: int) -> int:
    """Returns the bytes of P and dS."""
    return row_tiles * ROW_TILE * work.columns_of(keys) * _BYTES_OF_PAIR


def cut(work: Work, tiles: Tiles, cap: int) -> Cut:
    """Cuts into whole entries if one fits, as many as are fastest; else into parts of one, the same for every other."""
    of_entry = _bytes(work, work.tiles, work.keys)
    if of_entry > cap:
        return _parts_of_packed(work, tiles, cap) if work.packed else _parts_of_entry(work, tiles, cap)
    most = min(cap // of_entry, work.entries)
    parts = _parts(0, work.entries, _whole_entries(work, tiles, most, _ENOUGH_BYTES // of_entry))
    chunks = [Chunk(first, end - first, 0, work.tiles, 0, work.keys, 0, True, True) for first, end in parts]
    return Cut(chunks, 1, *_tiles_of(work, tiles, chunks[0]))


def _tiles_of(work: Work, tiles: Tiles, chunk: Chunk) -> tuple[ProductTile, ProductTile]:
    return tuple(fastest_tile(work, tiles, chunk.entries, chunk.row_tiles, of_q)[1] for of_q in (True, False))


# ---- parts of an entry ----


class Pass(NamedTuple):
    """All visible pairs of an entry, one box of some row tiles and key tiles after the other: by rows, or by keys.

    By rows, sums of dQ go through boxes that follow each other and need room for the rows of one, while sums of dK and
    dV go on in the next rows and need room for all keys. By keys it is the other way round.
    """

    row_tiles: int
    key_tiles: int
    by_rows: bool
    of_q: bool
    of_k: bool

    def chunks(self, work: Work) -> Iterator[Chunk]:
        """Gives the chunks, but for those that nobody sees."""
        for rows, (first, end) in self._boxes(work):
            keys = first * KEY_TILE, end * KEY_TILE
            before = (0, keys[0]) if self.by_rows else (rows[0], 0)
            yield Chunk(0, 1, *rows, *keys, 0, self.of_q, self.of_k, *before)

    def _boxes(self, work: Work) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if self.by_rows:
            for rows in _row_parts(work, self.row_tiles, 0, work.tiles_of_head):
                for keys in _parts(*seen_by_rows(work, *rows), self.key_tiles):
                    yield rows, keys
        else:
            for keys in _parts(0, work.tiles_of_keys, self.key_tiles):
                for rows in _row_parts(work, self.row_tiles, *seeing_keys(work, *keys)):
                    yield rows, keys

    def row_tiles_kept(self, work: Work) -> int:
        if not self.of_q or self.key_tiles == work.tiles_of_keys:
            return 0
        return self.row_tiles if self.by_rows else work.tiles

    def keys_kept(self, work: Work) -> int:
        if not self.of_k or self.row_tiles == work.tiles:
            return 0
        return work.keys if self.by_rows else self.key_tiles * KEY_TILE

    def bytes_of_sums(self, work: Work, width: int) -> int:
        """Returns the bytes of sums in tiles of this width."""
        of_q = self.row_tiles_kept(work) * ROW_TILE * sums_of_row(work, width)
        return 4 * (of_q + self.keys_kept(work) * sums_of_key(work, width))

    def steps(self, work: Work, tile: ProductTile) -> float:
        """Returns the steps of a pass; a box that a mask cuts lacks about one half of its pairs."""
        boxes = self._count(work)
        hidden = 0.0
        if work.is_bounded:
            visible = work.seen * work.tiles * work.tiles_of_keys / (self.row_tiles * self.key_tiles)
            hidden = max(boxes - visible, 0.0)
        cut = min(2 * hidden, boxes)
        steps = (boxes - cut) * self._steps_of_box(work, tile, boxes, 1.0)
        return steps + (cut * self._steps_of_box(work, tile, boxes, 1 - hidden / cut) if cut else 0)

    def _steps_of_box(self, work: Work, tile: ProductTile, boxes: float, seen: float) -> float:
        """Returns the steps of one of so many boxes, which has the part `seen` of its pairs."""
        tiles_of_p = self.row_tiles * 2 * work.run(self.key_tiles * KEY_TILE, seen)[0] / KEY_TILE
        steps = -(-tiles_of_p // work.multiprocessors) * _steps_of_pairs(work) + _STEPS_OF_LAUNCH

        def of_product(tiles: int, width: int, run: tuple[float, int], times: float) -> float:
            count = tiles * (ROW_TILE // tile.rows) * (width // tile.columns)
            ends = _STEPS_OF_ENDS + 2 * _STEPS_OF_SUMS * max(1 - 1 / times, 0.0)
            return _steps_of_product(count, tile, *run, work.multiprocessors, ends)

        if self.of_q:
            times = boxes * self.row_tiles / work.tiles  # how often a row is in a box
            run = work.run(self.key_tiles * KEY_TILE, seen)
            steps += of_product(self.row_tiles, sums_of_row(work, tile.columns), run, times)
        if self.of_k:
            times = boxes * self.key_tiles / work.tiles_of_keys
            run = work.run(self.row_tiles * ROW_TILE, seen, max(self.row_tiles // work.tiles_of_head, 1))
            steps += of_product(self.key_tiles, sums_of_key(work, tile.columns), run, times)
        return steps

    def _count(self, work: Work) -> float:
        """Returns the number of boxes; where they are very many, some stand for all."""
        if self.by_rows:
            count, size, of_other, seen = work.tiles_of_head, self.row_tiles, self.key_tiles, seen_by_rows
        else:
            count, size, of_other, seen = work.tiles_of_keys, self.key_tiles, self.row_tiles, seeing_keys
        parts = list(_parts(0, count, size))
        asked = parts[:: -(-len(parts) // 32)] if work.is_bounded else parts[:1]
        boxes = sum(-(-(end - first) // of_other) for first, end in (seen(work, *part) for part in asked))
        heads = -(-work.group // max(self.row_tiles // work.tiles_of_head, 1))
        return max(boxes * len(parts) / len(asked), 1) * heads


def _passes(
    work: Work, tile: ProductTile, by_rows: bool, of_q: bool, of_k: bool, cap: int, for_pairs: int | None = None
) -> Iterator[Pass]:
    """Gives the passes whose bytes of pairs, `for_pairs` at most, and of sums fit: with as many keys as do, or somewhat
    fewer.
    """

    def has_room(one: Pass) -> bool:
        pairs, sums = _bytes(work, one.row_tiles, one.key_tiles * KEY_TILE), one.bytes_of_sums(work, tile.columns)
        if for_pairs is None:
            return pairs + sums <= cap
        return pairs <= for_pairs and sums <= cap - for_pairs

    of_head = work.tiles_of_head
    for row_tiles in (*(of_head * heads for heads in _sizes(work.group) if heads > 1), *_sizes(of_head)):
        of_all = Pass(row_tiles, work.tiles_of_keys, by_rows, of_q, of_k)
        most = _most_keys(of_all, has_room)
        if most:
            fewest = -(-work.tiles_of_keys // most)
            parts = (-(-work.tiles_of_keys // parts) for parts in range(fewest, fewest + 3))
            yield from filter(has_room, (of_all._replace(key_tiles=key_tiles) for key_tiles in parts))


def _most_keys(of_all: Pass, has_room) -> int:
    """Returns the most key tiles. All need no sums of dQ, which fewer may have no room for; else more need more."""
    most, too_many = 0, of_all.key_tiles
    if has_room(of_all):
        return too_many
    while too_many - most > 1:
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if has_room(of_all._replace(key_tiles=middle)) else (most, middle)
    return most


def _fastest_passes(work: Work, tile: ProductTile, cap: int) -> list[Pass]:
    """Returns one pass; or, where room for sums of all rows or of all keys is not there or leaves too little, one for
    dQ, and one for dK and dV that computes P and dS again. Returns none where neither fits.
    """

    def fastest(*passes: Iterator[Pass]) -> tuple[float, list[Pass]]:
        return min(((of_pass.steps(work, tile), [of_pass]) for of_pass in chain(*passes)), default=(inf, []))

    ways = [fastest(*(_passes(work, tile, by_rows, True, True, cap) for by_rows in (True, False)))]
    if ways[0][0] > _least_steps(work, tile, 2):
        for for_pairs in (_bytes(work, 1, KEY_TILE), *(cap * i // 8 for i in range(1, 8))):
            of_q, of_k = (fastest(_passes(work, tile, of_q, of_q, not of_q, cap, for_pairs)) for of_q in (True, False))
            ways.append((of_q[0] + of_k[0], of_q[1] + of_k[1]))
    return min(ways, key=lambda way: way[0])[1]


def _least_steps(work: Work, tile: ProductTile, times: int) -> float:
    """Returns the steps of all gradients if P and dS are computed so many times, and nothing else costs anything."""
    tiles = 2 * work.tiles * work.tiles_of_keys * work.seen
    widths = sums_of_row(work, tile.columns) + sums_of_key(work, tile.columns)
    return tiles * (times * _steps_of_pairs(work) + KEY_TILE // 64 * widths / 256 / tile.speed) / work.multiprocessors


def _parts_of_entry(work: Work, tiles: Tiles, cap: int) -> Cut:
    """Cuts an entry, in the tiles that are fastest where there are many, if their sums fit."""
    passes = []
    for tile in sorted(tiles, key=lambda tile: _least_steps(work, tile, 1)):
        if passes := _fastest_passes(work, tile, cap):
            break
    passes = passes or [Pass(1, 1, of_q, of_q, not of_q) for of_q in (True, False)]  # this is more than fits
    chunks = [chunk for of_pass in passes for chunk in of_pass.chunks(work)]
    row_tiles = max(of_pass.row_tiles_kept(work) for of_pass in passes)
    return Cut(chunks, work.entries, tile, tile, row_tiles, max(of_pass.keys_kept(work) for of_pass in passes))


# ---- packed sequences ----


def _packed_row_parts(work: Work, most: int) -> Iterator[tuple[int, int]]:
    """Gives an entry's row tiles, `most` at a time at most: of some sequences, whole ones if they are about as long."""
    of_sequence = work.tiles // work.packed.sequences
    step = max(most, 1) // of_sequence * of_sequence or max(most, 1)
    yield from ((first, min(first + step, work.tiles)) for first in range(0, work.tiles, step))


def _parts_of_packed(work: Work, tiles: Tiles, cap: int) -> Cut:
    """Cuts into row tiles with all keys; if sums of dK and dV leave too little, dQ goes by row tiles, or by keys of
    one, and then dK and dV go by keys. Nobody knows which rows see which keys.
    """
    chunks = list(_packed_chunks(work, tiles, cap))
    keys = max((work.keys_summed(c.keys) for c in chunks if c.of_k and c.row_tiles < work.tiles), default=0)
    rows = max((c.row_tiles for c in chunks if c.of_q and c.keys < work.keys), default=0)
    return Cut(chunks, work.entries, *_tiles_of(work, tiles, chunks[0]), rows, keys)


def _packed_chunks(work: Work, tiles: Tiles, cap: int) -> Iterator[Chunk]:
    def chunk(row_tiles: tuple[int, int], keys: tuple[int, int], turn: int, of_q: bool, of_k: bool) -> Chunk:
        return Chunk(0, 1, *row_tiles, *(tile * KEY_TILE for tile in keys), turn, of_q, of_k)

    def partial(key_tiles: int) -> int:
        return 4 * work.keys_summed(key_tiles * KEY_TILE) * max(sums_of_key(work, width) for width, *_ in tiles)

    all_keys = 0, work.keys // KEY_TILE
    of_tile = _bytes(work, 1, work.keys)
    if partial(all_keys[1]) + of_tile * 4 <= cap:
        for i, rows in enumerate(_packed_row_parts(work, (cap - partial(all_keys[1])) // of_tile)):
            yield chunk(rows, all_keys, i % 2, True, True)
        return
    of_key_tile = _bytes(work, 1, KEY_TILE) + partial(1)  # bytes beside one row tile
    most_key_tiles = cap // 4 // of_key_tile
    if of_tile < cap:  # room is needed beside a row tile
        most_key_tiles = min(most_key_tiles, (cap - of_tile) // partial(1))
    key_parts = list(_parts(0, all_keys[1], most_key_tiles))
    left = cap - partial(key_parts[0][1])  # the sums are there all the time
    if of_tile <= left:
        for rows in _packed_row_parts(work, left // of_tile):
            yield chunk(rows, all_keys, 0, True, False)
    else:
        left = min(left, cap - 4 * ROW_TILE * max(sums_of_row(work, width) for width, *_ in tiles))
        for row_tile in range(work.tiles):
            for keys in _parts(0, all_keys[1], left // _bytes(work, 1, KEY_TILE)):
                yield chunk((row_tile, row_tile + 1), keys, 0, True, False)
    for keys in key_parts:
        for i, rows in enumerate(_packed_row_parts(work, left // _bytes(work, 1, (keys[1] - keys[0]) * KEY_TILE))):
            yield chunk(rows, keys, i % 2, False, True)
