"""Draws families of problems that share the kernels that Triton compiles for them.

Triton compiles a kernel for each dtype, pair of head dims and kind of mask, and again for numbers that are 1, and for
those that 16 divides: two to ten seconds each. A GPU checks a hundred problems in that time, so what decides it is
drawn once for a family, which is many seeds in a row: the first problem, of which all others of the family are
relatives.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import zip_longest

import campaign_parts as parts
from campaign_problems import FP8, Problem

SEEDS = 250  # problems of one family; a process takes so many at a time
_SEEDS_OF_FP8 = 4 * SEEDS  # 8-bit problems are few among others
_MOST_COLUMNS = 256  # most columns that Triton's kernels take
_WHOLE_TILES = 128  # a multiple of all tiles
_UNIT = 16  # a divisor that the compiler asks numbers for
_NOTHING = 0.05  # share of problems without rows, or without keys


def compiles(p: Problem) -> bool:
    """Says whether Triton may compile kernels for a problem."""
    return p.device == "cuda" and p.backend in ("triton", "auto") and max(p.d, p.d_v) <= _MOST_COLUMNS


def family(seed: int, kind: str | None) -> int:
    return seed // (_SEEDS_OF_FP8 if kind == "fp8" else SEEDS)


def relative(r: random.Random, first: Problem, kind: str | None, seed: int) -> Problem:
    """Draws, by r, another problem of the family: one in which the compiler sees nothing new."""
    first = parts.within(first.with_(batch=max(first.batch, 1)))
    p = first.with_(seed=seed, repeats=2 if r.random() < 0.1 else 1, **_rule(r, first))
    if p.sinks:
        p = p.with_(sinks=replace(p.sinks, **parts.sink_values(r), none=r.random() < 0.3))
    if first.dtype in FP8:
        return _sizes(r, p, 2000)
    p = _sizes(r, p, parts.most_rows(first.device))
    large = kind == "large" or r.random() < 0.06
    if p.mask:
        values = parts.mask_values(r, p.mask.dtype, large)
        p = p.with_(mask=replace(p.mask, **values, size=r.choice((1.0, 1.0, 0.0, 5.0))))
    plain = {"numbers": "plain", "size_q": 1.0, "size_k": 1.0, "size_v": 1.0}
    p = p.with_(**plain | parts.numbers(r, p, large))
    if not parts.has_plain_scores(p) and p.scale not in parts.SCALES_OF_ANY_NUMBERS:
        p = p.with_(scale=None if _is_positive(p) else -0.1)
    if p.backward:
        p = p.with_(wanted=parts.wanted(r, p.mask), quiet_rows=r.random() < 0.5)
        if p.sinks:
            p = p.with_(wanted=parts.with_sinks_wanted(r, p.wanted))
    return p


# ---- numbers of the same kind ----


def _is_positive(p: Problem) -> bool:
    return p.scale is None or p.scale > 0


def _rule(r: random.Random, first: Problem) -> dict:
    """Draws a rule: positive scales for positive ones, sides of a window where the first problem has any."""
    fp8 = first.dtype in FP8
    drawn = [parts.scale(r, "f16" if fp8 else first.dtype) for _ in range(8)]
    scales = [x for x in drawn if (x > 0) == _is_positive(first)] or [first.scale]
    if _is_positive(first) and r.random() < 0.6:
        scales = [None]
    softcap = 0.0
    if first.softcap:
        softcap = r.choice((2.0, 30.0)) if fp8 else parts.softcap(r)
    return {"scale": scales[0], "softcap": softcap, "window": tuple(_side(r, x) for x in first.window)}


def _side(r: random.Random, side: int) -> int:
    if side in (-1, 1):
        return side
    return r.choice((9, 127, 300) if side % _UNIT else (0, 0, 64)) if r.random() < 0.7 else _length(r, side, 9000)


def _length(r: random.Random, length: int, most: int) -> int:
    """Draws a length of which the compiler knows as much: if it is 1, what 16 leaves of it, if tiles divide it."""
    if length == 1:
        return 1
    step = _WHOLE_TILES if length % _UNIT == 0 else _UNIT
    left = length % step
    drawn = parts.rows(r, most) // step * step + left
    return drawn if drawn > 1 else left + step


def _sizes(r: random.Random, first: Problem, most: int) -> Problem:
    """Draws lengths that fit the device; there are more rows than keys where the first problem has more."""
    p = first
    for _ in range(40):
        drawn = _packed(r, first, most) if first.packed else _dense(r, first, most)
        if not parts.fits(drawn):
            most = most * 2 // 3
        elif first.packed or (drawn.n_q > drawn.n_k) == (first.n_q > first.n_k):
            p = drawn
            break
    return _without(r, p) if r.random() < _NOTHING else p


def _dense(r: random.Random, first: Problem, most: int) -> Problem:
    return first.with_(n_q=_length(r, first.n_q, most), n_k=_length(r, first.n_k, most))


def _packed(r: random.Random, first: Problem, most: int) -> Problem:
    """Draws packed lengths: the longest sequence and the sum of all are of the same kinds as the first problem's."""
    drawn = parts.lengths(r, most)
    sides = [_lengths(r, drawn[name], getattr(first, name), most) for name in ("lengths_q", "lengths_k")]
    if first.lengths_q == first.lengths_k and r.random() < 0.8:
        sides[1] = sides[0]
    lengths_q, lengths_k = zip(*zip_longest(*sides, fillvalue=0), strict=True)
    odd = first.odd_offsets if len(lengths_q) > 1 else ""
    return first.with_(lengths_q=lengths_q, lengths_k=lengths_k, odd_offsets=odd)


def _lengths(r: random.Random, drawn: tuple[int, ...], first: tuple[int, ...], most: int) -> list[int]:
    longest = _length(r, max(first, default=0), most // 2)
    lengths = [min(x, longest) for x in drawn]
    lengths.insert(r.randint(0, len(lengths)), longest)
    while missing := (sum(first) - sum(lengths)) % _UNIT:
        lengths.append(min(missing, longest))
    return lengths


def _without(r: random.Random, p: Problem) -> Problem:
    """Leaves nothing to compute, or no keys, where tiles divide them: a tile of them is whole then too."""
    if p.packed:
        return p.with_(lengths_q=(), lengths_k=(), odd_offsets="")
    return p.with_(**{r.choice(("n_q", "n_k" if p.n_k % _WHOLE_TILES == 0 else "n_q")): 0})
