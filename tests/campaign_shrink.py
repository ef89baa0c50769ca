"""Makes a wrong problem smaller while it stays wrong, and prints it as a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from campaign_problems import Layout, Mask, Pages, Problem, Sinks

_KEPT = ("seed", "device", "backend", "backward", "dtype", "arch")
_SIZES = ("batch", "heads_kv", "group", "n_q", "n_k")


def _simpler(p: Problem) -> Iterator[Problem]:
    """Yields problems with one thing less, what matters most first."""
    if p.sinks:
        yield p.with_(sinks=None, wanted=p.wanted.replace("s", "") or Problem.wanted)
    if p.max_logits:
        yield p.with_(max_logits=False)
    for name in _SIZES:
        value = getattr(p, name)
        for less in sorted({1, value // 2, value - 1}):
            if 0 < less < value and not (p.packed and name in ("n_q", "n_k")):
                yield p.with_(**{name: less})
    if p.packed:
        for i in range(len(p.lengths_q)):
            yield p.with_(**{n: getattr(p, n)[:i] + getattr(p, n)[i + 1 :] for n in ("lengths_q", "lengths_k")})
        for name in ("lengths_q", "lengths_k"):
            lengths = getattr(p, name)
            for i, length in enumerate(lengths):
                if length > 1:
                    yield p.with_(**{name: (*lengths[:i], length // 2, *lengths[i + 1 :])})
    for name in ("d", "d_v"):
        value = getattr(p, name)
        for less in (value // 16 * 8, value - 8):
            if 0 < less < value:
                yield p.with_(**{name: less})
    plain = Problem()
    for field in fields(Problem):
        value, default = getattr(p, field.name), getattr(plain, field.name)
        if field.name in (*_KEPT, *_SIZES, "d", "d_v", "lengths_q", "lengths_k") or value == default:
            continue
        if field.name == "mask":
            yield p.with_(mask=None, wanted=p.wanted.replace("m", ""))
            simple = Mask(dtype=value.dtype, hidden=value.hidden, pattern=value.pattern)
            if simple != value:
                yield p.with_(mask=simple)
        elif field.name == "pages":
            yield p.with_(pages=None)
            simple = Pages(value.rows, "latent" if p.v_in_k else "NHD")
            yield p.with_(pages=simple)
            yield p.with_(pages=replace(simple, eight_bits=value.eight_bits))
        elif field.name == "sinks":
            for part in fields(Sinks):
                if getattr(value, part.name) != part.default:
                    yield p.with_(sinks=replace(value, **{part.name: part.default}))
        elif isinstance(value, Layout):
            yield p.with_(**{field.name: default})
            yield p.with_(**{field.name: Layout(slack=value.slack)})
        elif field.name == "flags":
            for i in range(len(value)):
                yield p.with_(flags=value[:i] + value[i + 1 :])
        else:
            yield p.with_(**{field.name: default})


def shrink(
    p: Problem, why: str, outcome: Callable[[Problem], tuple[str, str]], seconds: float
) -> tuple[Problem, str, str]:
    """Returns (the smallest found by then, "wrong", why it is). A problem that ends the process, "fatal", is taken at
    once; one that fails in another way than the first is no smaller form of it.
    """
    way = _way(why)
    end = time.monotonic() + seconds
    found = True
    while found:
        found = False
        for candidate in _simpler(p):
            if time.monotonic() > end:
                return p, "wrong", why
            ended, said = outcome(candidate)
            if ended == "fatal":
                return candidate, ended, said
            if ended == "wrong" and _way(said) == way:
                p, why, found = candidate, said, True
                break
    return p, "wrong", why


def _way(why: str) -> str:
    """Returns the error's type."""
    return why.partition(":")[0]


def as_test(p: Problem, why: str) -> str:
    """Returns the source of a test, to be run beside campaign.py."""
    said = " ".join(why.split())[:300]
    return f"""
def test_found_{p.device}_{p.seed}():
    # {said}
    from campaign_check import check
    from campaign_problems import Layout, Mask, Pages, Problem, Sinks

    check({p!r})
"""
