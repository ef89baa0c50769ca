"""This module checks what tensors hold that say where keys in pages lie: lengths, tables, scales. Reading them waits for a GPU.
Names are those of the operators, as in `page_checks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def _falls(name: str, cu) -> list[int]:
    lengths = cu.diff().tolist()
    for i, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"`{name}` falls by {-length} at entry {i + 1}; offsets must not decrease")
    return lengths


def length(name: str, n: int, new: int, room: int, sequence: int) -> None:
    if n < 0:
        raise ValueError(f"`{name}` is {n} for sequence {sequence}; a length is 0 or more")
    if n + new > room:
        rows = f"{n} keys and {new} new rows" if new > 0 else f"{n} keys"
        raise ValueError(
            f"`{name}`: sequence {sequence} has {rows}, and there is room for {room}; give it more pages, or rows of the cache"
        )


def lengths(pages, pool, max_seqlen_k: int, name: str = "seqused_k") -> list[int]:
    """Returns the keys of each sequence, checked."""
    used, room = pages.used.tolist(), pages.entries * pool.shape[1]
    first = [0] * len(used) if pages.first is None else pages.first.tolist()
    added = [0] * len(used) if pages.added is None else _falls("cu_seqlens_k_new", pages.added)
    result = []
    for i, (n, begin, more) in enumerate(zip(used, first, added, strict=True)):
        end = n + more + pages.more
        length(name, n, end - n, room, i)
        if not 0 <= begin <= end:
            raise ValueError(f"`leftpad_k` is {begin} for sequence {i}, which has {end} rows; allowed: 0 to {end}")
        if end - begin > max_seqlen_k:
            raise ValueError(
                f"`max_seqlen_k` is {max_seqlen_k} but sequence {i} has {end - begin} keys; pass at least the longest length"
            )
        result.append(end - begin)
    return result


def table(pages, pool, needed: Sequence[tuple[int, int]]) -> list[int]:
    """Checks the entries that hold keys which are needed, of each sequence [first, past the last); returns them."""
    if pages.table is None or not needed:
        return [i for i, (first, end) in enumerate(needed) if first < end]
    entry, rows = torch.arange(pages.entries)[None], max(pool.shape[1], 1)
    ends = torch.tensor(
        [(max(least, 0) // rows, -(-end // rows) if end > max(least, 0) else 0) for least, end in needed]
    )
    in_use = (entry >= ends[:, :1]) & (entry < ends[:, 1:])
    numbers = pages.table.cpu()
    wrong = (in_use & ((numbers < 0) | (numbers >= pool.shape[0]))).nonzero()
    if len(wrong):
        i, j = wrong[0].tolist()
        entry = f" in entry {j}" if pages.entries > 1 else ""
        allowed = f"allowed: 0 to {len(pool) - 1}, as `k_pages` has {len(pool)}" if len(pool) else "`k_pages` has none"
        raise ValueError(f"`block_table` holds {numbers[i, j]} for sequence {i}{entry}, where it has keys; {allowed}")
    return numbers[in_use].tolist()


def scale_values(k_scale, v_scale) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and not bool(((scale > 0) & (scale < torch.inf)).all()):
            raise ValueError(f"`{name}` holds {scale.tolist()}; scales are finite and greater than 0")


def distinct(cache_batch_idx) -> None:
    """Checks entries of a cache that new rows are written to."""
    whose: dict[int, int] = {}
    for i, n in enumerate(cache_batch_idx.tolist()):
        if whose.setdefault(n, i) != i:
            raise ValueError(
                f"`cache_batch_idx` holds {n} for sequences {whose[n]} and {i}, whose new rows would be written to one place; "
                "give each its own entry of the cache, or write with one call and read with another"
            )
