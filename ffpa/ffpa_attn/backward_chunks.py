"""How the backward is cut into chunks that fit the workspace, and how long they take: sizes alone, no tensors.

Times are in steps: 64 of the common dimension of a product of 128 x 256 on one multiprocessor. What matters is that tiles
fill whole rounds of the multiprocessors, and that under a causal mask the longest tile does not outlast all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .spec import ProductTile

ROW_TILE, KEY_TILE, LIVE_ROWS = 256, 256, 64  # as csrc/attention/backward_params.h
_BYTES_OF_PAIR = 4  # P and dS
_ENOUGH_BYTES = 1 << 30  # of several heads: more gain nothing

_STEPS_OF_ENDS = 4  # begin and end of a tile of a product
_STEPS_OF_FINISH = 8  # of a tile of P and dS
_STEPS_OF_LAUNCH = 12

Tiles = Sequence[ProductTile]  # to choose from


class Chunk(NamedTuple):
    """Of the key/value heads of all batch entries [first_entry, + entries); of the row tiles of each, and of the keys."""

    first_entry: int
    entries: int
    first_tile: int
    end_tile: int
    first_key: int
    end_key: int
    turn: int  # which of the two places for sums of dK and dV of packed sequences it goes on from
    of_q: bool  # gives dQ
    of_k: bool  # gives dK and dV, or a part of their sums

    @property
    def place(self) -> tuple[int, ...]:
        return self[:7]

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
        """Not of packed sequences, whose rows have at most the keys of one."""
        return self.rows * self.keys


class Packed(NamedTuple):
    """Sequences one after the other; rows and keys of all of them."""

    sequences: int
    rows: int
    keys: int

    def tiles(self, count: int, size: int) -> int:
        return count // size + self.sequences  # as csrc/attention/packed_tiles.cuh


class Work(NamedTuple):
    """What is cut: entries are key/value heads of batch entries, each with the rows of `group` query heads."""

    entries: int
    group: int
    n_q: int
    n_k: int
    d_qk: int
    d_v: int
    seen: float = 1.0  # part of the keys that a row sees, on average
    multiprocessors: int = 132
    packed: Packed | None = None  # entries are then key/value heads; n_q and n_k of the longest sequence

    @property
    def tiles_of_head(self) -> int:
        return self.packed.tiles(self.packed.rows, ROW_TILE) if self.packed else -(-self.n_q // ROW_TILE)

    @property
    def tiles(self) -> int:
        return self.group * self.tiles_of_head

    @property
    def keys(self) -> int:
        return self.packed.tiles(self.packed.keys, KEY_TILE) * KEY_TILE if self.packed else self.columns

    @property
    def columns(self) -> int:
        """Keys of a row in the workspace, where a chunk has all."""
        return -(-self.n_k // KEY_TILE) * KEY_TILE

    def columns_of(self, keys: int) -> int:
        return min(keys, self.columns)

    def keys_summed(self, keys: int) -> int:
        """For how many there is room where sums of dK and dV of so many go from chunk to chunk: of packed sequences one ends in a
        chunk, and one goes on.
        """
        return min(keys, 2 * self.columns)


def sums_of_key(work: Work, width: int) -> int:
    """Floats of dK and dV of one key, in tiles of this width."""
    return (-(-work.d_qk // width) - (-work.d_v // width)) * width


def sums_of_row(work: Work, width: int) -> int:
    """Floats of dQ of one row."""
    return -(-work.d_qk // width) * width


# ---- how long ----


def _steps_of_product(count: int, tile: ProductTile, mean: float, longest: float, multiprocessors: int) -> float:
    """So many tiles over so many rows or keys on average and at most, shared by the multiprocessors."""
    clusters = multiprocessors // tile.blocks
    if mean == longest:
        rounds = -(-count // clusters) * mean
    else:  # the longest come first
        rounds = max(longest, count * mean / clusters + mean / 2)
    area = tile.rows * tile.columns / tile.blocks / (128 * 256) / tile.speed
    return (rounds / 64 + _STEPS_OF_ENDS * -(-count // clusters)) * area


def fastest_tile(work: Work, tiles: Tiles, entries: int, row_tiles: int, of_q: bool) -> tuple[float, ProductTile]:
    """(steps, tile) of a chunk's dQ, or of its dK and dV."""

    def steps(tile: ProductTile) -> float:
        if of_q:
            count = entries * row_tiles * (ROW_TILE // tile.rows) * -(-work.d_qk // tile.columns)
            return _steps_of_product(count, tile, work.n_k * work.seen, work.n_k, work.multiprocessors)
        count = entries * -(-work.keys // tile.rows) * (sums_of_key(work, tile.columns) // tile.columns)
        longest = min(row_tiles, work.group * -(-work.n_q // ROW_TILE)) * ROW_TILE
        return _steps_of_product(count, tile, longest * work.seen, longest, work.multiprocessors)

    return min((steps(tile), tile) for tile in tiles)


def _steps_of_chunk(work: Work, tiles: Tiles, entries: int) -> float:
    """Of whole entries."""
    pairs = entries * work.tiles * 2 * (work.columns // KEY_TILE) * work.seen  # in tiles
    of_tile = -(-work.d_qk // 64) - (-work.d_v // 64) + _STEPS_OF_FINISH
    products = sum(fastest_tile(work, tiles, entries, work.tiles, of_q)[0] for of_q in (True, False))
    return -(-pairs // work.multiprocessors) * of_tile + products + _STEPS_OF_LAUNCH


# ---- what fits ----


def _parts(count: int, most: int) -> Iterator[tuple[int, int]]:
    """[0, count) in parts of at most `most`, all about as large."""
    parts = -(-count // max(most, 1))
    size = -(-count // parts)
    for first in range(0, count, size):
        yield first, min(first + size, count)


def _row_parts(work: Work, most: int) -> Iterator[tuple[int, int]]:
    """The row tiles of an entry, at most so many at a time: some whole heads, or a part of one; or some packed sequences, whole
    ones if they are about as long.
    """
    of_head, most = work.tiles_of_head, max(most, 1)
    if work.packed:
        of_sequence = work.tiles // work.packed.sequences
        step = most // of_sequence * of_sequence or most
        yield from ((first, min(first + step, work.tiles)) for first in range(0, work.tiles, step))
        return
    if most >= of_head:
        for first, end in _parts(work.group, most // of_head):
            yield first * of_head, end * of_head
        return
    for head in range(work.group):
        for first, end in _parts(of_head, most):
            yield head * of_head + first, head * of_head + end


def _whole_entries(work: Work, tiles: Tiles, most: int, enough: int) -> int:
    """At a time, at most so many."""
    counts = sorted({-(-work.entries // parts) for parts in range(-(-work.entries // most), work.entries + 1)})
    few = [count for count in counts if count <= max(enough, counts[0])]
    return min(few, key=lambda count: -(-work.entries // count) * _steps_of_chunk(work, tiles, count))


def _bytes(work: Work, row_tiles: int, keys: int) -> int:
    """Of P and dS."""
    return row_tiles * ROW_TILE * work.columns_of(keys) * _BYTES_OF_PAIR


def cut(work: Work, tiles: Tiles, cap: int) -> tuple[list[Chunk], int]:
    """Whole entries if one fits, as many as are fastest; else row tiles of one; and if the sums of dK and dV leave too little,
    dQ by row tiles, or by keys of one, and then dK and dV by keys.

    And how often: chunks of less than an entry are those of the first one, and the same for every other.
    """
    of_entry = _bytes(work, work.tiles, work.keys)
    if of_entry <= cap:
        most = min(cap // of_entry, work.entries)
        parts = _parts(work.entries, _whole_entries(work, tiles, most, _ENOUGH_BYTES // of_entry))
        return [Chunk(first, end - first, 0, work.tiles, 0, work.keys, 0, True, True) for first, end in parts], 1
    return list(_parts_of_entry(work, tiles, cap)), work.entries


def _parts_of_entry(work: Work, tiles: Tiles, cap: int) -> Iterator[Chunk]:
    def chunk(row_tiles: tuple[int, int], keys: tuple[int, int], turn: int, of_q: bool, of_k: bool) -> Chunk:
        return Chunk(0, 1, *row_tiles, *(tile * KEY_TILE for tile in keys), turn, of_q, of_k)

    def partial(key_tiles: int) -> int:
        return 4 * work.keys_summed(key_tiles * KEY_TILE) * max(sums_of_key(work, width) for width, *_ in tiles)

    all_keys = 0, work.keys // KEY_TILE
    of_tile = _bytes(work, 1, work.keys)
    if partial(all_keys[1]) + of_tile * 4 <= cap:
        for i, rows in enumerate(_row_parts(work, (cap - partial(all_keys[1])) // of_tile)):
            yield chunk(rows, all_keys, i % 2, True, True)
        return
    of_key_tile = _bytes(work, 1, KEY_TILE) + partial(1)  # with one row tile
    most_key_tiles = cap // 4 // of_key_tile
    if of_tile < cap:  # then beside a row tile
        most_key_tiles = min(most_key_tiles, (cap - of_tile) // partial(1))
    key_parts = list(_parts(all_keys[1], most_key_tiles))
    left = cap - partial(key_parts[0][1])  # the sums are there all the time
    if of_tile <= left:
        for rows in _row_parts(work, left // of_tile):
            yield chunk(rows, all_keys, 0, True, False)
    else:
        left = min(left, cap - 4 * ROW_TILE * max(sums_of_row(work, width) for width, *_ in tiles))
        for row_tile in range(work.tiles):
            for keys in _parts(all_keys[1], left // _bytes(work, 1, KEY_TILE)):
                yield chunk((row_tile, row_tile + 1), keys, 0, True, False)
    for keys in key_parts:
        for i, rows in enumerate(_row_parts(work, left // _bytes(work, 1, (keys[1] - keys[0]) * KEY_TILE))):
            yield chunk(rows, keys, i % 2, False, True)
