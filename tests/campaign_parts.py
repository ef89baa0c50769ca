"""Draws the parts of a random problem one by one: sizes, layouts, masks, rules, numbers; a device has time for them."""

from __future__ import annotations

import random
from dataclasses import replace

from campaign_problems import EMULATED, Layout, Mask, Pages, Problem, Sinks

# ---- sizes ----

_EDGES = (16, 32, 64, 128, 256, 512, 1024)
_LIMITS = {  # most rows or keys, pairs of all heads, pairs times columns, elements of a tensor
    "cuda": (9000, 2e7, 3e9, 2e7),
    "emulator": (700, 1.2e5, 2e7, 3e5),
    "fused": (700, 1.2e5, 2e7, 3e5),
    "interpreter": (400, 2e5, 2e7, 3e5),
    "cpu": (600, 3e5, 3e7, 5e5),
}


def most_rows(device: str) -> int:
    return _LIMITS[device][0]


def rows(r: random.Random, most: int) -> int:
    kind = r.random()
    if kind < 0.05:
        return r.choice((0, 1))
    if kind < 0.35:
        return min(most, max(0, r.choice(_EDGES) * r.choice((1, 1, 1, 2, 3)) + r.choice((-1, 0, 1))))
    return min(most, int(2 ** r.uniform(0, 13.2)))


def _columns(r: random.Random, most: int, pool) -> int:
    kind = r.random()
    if kind < 0.6:
        return min(most, r.choice(pool))
    if kind < 0.85:
        return min(most, 8 * r.randint(1, 32))
    return min(most, 8 * r.randint(1, 256))


def head_dims(r: random.Random, backend: str) -> tuple[int, int]:
    most = 256 if backend == "triton" else 2048
    common = (64, 80, 96, 128, 192, 256, 320, 512, 576, 40, 72, 104, 136, 200, 8, 24)
    wide = (512, 640, 768, 1024, 1152, 1536, 2048, 576, 520, 648)
    pool = common if r.random() < 0.7 else wide
    d = _columns(r, most, pool)
    kind = r.random()
    if kind < 0.6:
        return d, d
    if kind < 0.7 and most > 576:
        return r.choice(((576, 512), (192, 128), (512, 576), (64, 512)))
    return d, _columns(r, most, pool)


def heads(r: random.Random) -> tuple[int, int]:
    """Draws (heads of K and V, heads of Q for each)."""
    group = r.choice((1, 1, 1, 1, 2, 2, 3, 4, 5, 8, 16))
    return r.choice((1, 1, 2, 2, 3, 4, 8)), group


def fits(p: Problem) -> bool:
    """Says whether the device has the time and the memory for a problem, and for its truth."""
    most, pairs, work, elements = _LIMITS[p.device]
    lengths = p.lengths_q + p.lengths_k if p.packed else (p.n_q, p.n_k)
    of_keys = sum(p.lengths_k) if p.packed else p.batch * p.n_k
    of_rows = sum(p.lengths_q) if p.packed else p.batch * p.n_q
    largest = max(of_rows * p.heads_q, of_keys * p.heads_kv) * max(p.d, p.d_v)
    work_fits = p.pairs() <= pairs and p.pairs() * (p.d + p.d_v) <= work
    return max(lengths, default=0) <= most and work_fits and largest <= elements


def within(p: Problem) -> Problem:
    """Makes a problem as much smaller as the device asks for."""
    while not fits(p):
        if p.batch > 1:
            p = p.with_(batch=p.batch - 1)
        elif p.heads_kv > 1:
            p = p.with_(heads_kv=p.heads_kv // 2)
        elif p.group > 4:
            p = p.with_(group=p.group // 2)
        elif p.packed:
            p = p.with_(**{n: tuple(x * 2 // 3 for x in getattr(p, n)) for n in ("lengths_q", "lengths_k")})
        elif p.n_q >= p.n_k:
            p = p.with_(n_q=p.n_q * 2 // 3)
        else:
            p = p.with_(n_k=p.n_k * 2 // 3)
    return p


def lengths(r: random.Random, most: int) -> dict:
    """Draws the lengths of packed sequences, rows and keys."""
    count = r.choice((0, 1, 2, 3, 5, 8))
    drawn = []
    for _ in range(2):
        drawn.append(tuple(0 if r.random() < 0.15 else min(rows(r, most), most // 2) for _ in range(count)))
    if r.random() < 0.4:
        drawn[1] = drawn[0]
    return {"lengths_q": drawn[0], "lengths_k": drawn[1]}


def packed(r: random.Random, device: str, most: int) -> dict:
    found = {**lengths(r, most), "spare": r.choice((0, 0, 1, 9))}
    if device == "cuda" and len(found["lengths_q"]) > 1:
        found["odd_offsets"] = r.choice(("",) * 7 + ("first", "last", "falls"))
        if found["odd_offsets"] == "last":  # the last sequence would take in the spare rows
            found["spare"] = 0
    least = -5 if device == "cuda" else 0
    found["longest"] = tuple(r.choice((0, 0, 0, least, 3, 1000)) for _ in range(2))
    return found


# ---- how tensors lie in memory ----


def layout(r: random.Random, batch: int, heads: int) -> Layout:
    if r.random() < 0.3:
        return Layout()
    order = r.choice(("BHN", "BHN", "BNH", "BNH", "HBN", "NBH", "HNB"))
    row = 8 * r.choice((0, 0, 1, 2, 3, 5, 26))
    slack = (r.choice((0, 0, 1)), r.choice((0, 0, 1, 2)), row)
    offset = 8 * r.choice((0, 0, 1, 2, 3, 8))
    shared = "".join(dim for dim, size in (("B", batch), ("H", heads)) if size > 1 and r.random() < 0.08)
    return Layout(order, slack, offset, shared)


# ---- what is computed ----

_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "f32": 3.4028234663852886e38}
_HIDING = (-1e4, -1e9, -1.5e9, -1e10, -3e10, -1e30)


def mask(r: random.Random, large: bool) -> Mask:
    dtype = r.choice(("bool", "bool", "f16", "bf16", "f32", "f32"))
    own = r.choice(
        ((True,) * 4, (True, False, True, True), (False, True, True, True), (False, False, True, True), (True, False, False, True),
         (False, False, False, True), (True, True, True, False), (False, True, False, False), (False,) * 4)
    )  # fmt: skip
    first_own = next((i for i, yes in enumerate(own) if yes), 3)
    values = mask_values(r, dtype, large)
    return Mask(
        dtype,
        own,
        r.randint(min(4 - first_own, 4), 4) if r.random() < 0.3 else 4,
        **values,
        size=r.choice((1.0, 1.0, 0.0, 5.0)),
        transposed=r.random() < 0.1,
        slack=r.choice((0, 0, 1, 3, 8)),
    )


def mask_values(r: random.Random, dtype: str, large: bool) -> dict:
    """Draws what is hidden, by which number, and what other keys are raised by."""
    pattern = r.choice(("holes", "holes", "left", "left", "right", "rows", "whole", "none"))
    hidden, attract = float("-inf"), 0.0
    if dtype != "bool" and r.random() < 0.6:
        least = -_LARGEST[dtype]
        hidden = max(least, r.choice((least, least, -_LARGEST["bf16"], *_HIDING)))
    if dtype != "bool" and r.random() < (0.3 if large else 0.07):
        attract = min(_LARGEST[dtype], r.choice((1e4, 1e30, 30.0)))
    return {"pattern": pattern, "hidden": hidden, "attract": attract}


def rule(r: random.Random, n_q: int, n_k: int, dtype: str) -> dict:
    found = {}
    if r.random() < 0.4:
        found["causal"] = True
    if r.random() < 0.25:
        found["window"] = tuple(r.choice((-1, 0, 1, 9, 64, 127, 300, r.randint(0, max(n_q, n_k, 1)))) for _ in range(2))
    if r.random() < 0.4:
        found["align"] = "top_left"
    if r.random() < 0.2:
        found["softcap"] = softcap(r)
    if r.random() < 0.4:
        found["scale"] = scale(r, dtype)
    return found


def softcap(r: random.Random) -> float:
    return r.choice((1e-3, 5.0, 5.0, 30.0, 30.0, 1e6))


def scale(r: random.Random, dtype: str) -> float:
    return r.choice((1.0, 0.05, 0.05, -0.3, -0.1, 0.0, 1e-6, 1e4 if dtype == "bf16" else 0.5))


def numbers(r: random.Random, p: Problem, large: bool) -> dict:
    """Draws what q, k and v hold, and how large that is; if `large`, products are 1e5 to 8e8, finite in 16 bits."""
    found = {}
    kind = r.random()
    if large:
        product = 10 ** r.uniform(3.5, 8.9)
        side = min((product / p.d**0.5) ** 0.5, 6e3 if p.dtype == "f16" else 1e9)
        found = {"size_q": side, "size_k": side}
        if r.random() < 0.5:
            found["numbers"] = "equal_keys"
    elif kind < 0.08:
        found = {"size_q": 100.0} if r.random() < 0.5 else {"size_q": 10.0, "size_k": 10.0}
    elif kind < 0.12:
        found = {"size_q": 1e-4, "size_k": 1e-4} if r.random() < 0.5 else {"size_v": 1e-6}
    elif kind < 0.14:
        found = {"size_v": 100.0}
    elif kind < 0.17:
        found = {"numbers": "equal_keys"}
    # What NaN minus infinity should give is left open.
    elif kind < 0.19 and not p.backward and (p.mask is None or p.mask.dtype == "bool"):
        found = {"numbers": "nan_row"}
    return found


def has_plain_scores(p: Problem) -> bool:
    return p.numbers == "plain" and p.size_q == 1.0 and p.size_k == 1.0


SCALES_OF_ANY_NUMBERS = (None, -0.1, 0.05, 1.0, -0.3)


def wanted(r: random.Random, of_mask: Mask | None) -> str:
    """Draws whose gradients are asked for."""
    names = r.choice(("qkv", "qkv", "qkv", "q", "kv", "v", "k"))
    return names + "m" * bool(of_mask and of_mask.dtype != "bool" and r.random() < 0.4)


def of_heads(r: random.Random, p: Problem, kind: str | None) -> dict:
    """Draws what a problem has for each head: sinks, and whether the largest logits are asked for."""
    if p.backend == "sdpa":
        return {}
    found = {"max_logits": r.random() < (0.5 if kind == "sinks" else 0.2)}
    if r.random() < (1.0 if kind == "sinks" else 0.25):
        sinks = Sinks(r.choice(("f32", "f32", "f16", "bf16")), none=r.random() < 0.3, strided=r.random() < 0.1)
        found["sinks"] = replace(sinks, **sink_values(r))
        if p.backward:
            found["wanted"] = with_sinks_wanted(r, p.wanted)
    return found


def pages(r: random.Random, p: Problem, kind: str | None) -> Pages | None:
    """Draws whether keys lie in pages, and how: where a backend knows them."""
    known = p.packed and not p.backward and p.acc == "f32" and p.backend not in ("triton", "sdpa")
    forced = any(name.startswith("ENABLE_") for name, _ in p.flags)
    if not known or forced or not p.lengths_k or (kind != "pages" and r.random() < 0.6):
        return None
    rows = r.choice((16, 16, 32, 48, 64, 64, 128, 256, 16 * r.randint(1, 20)))
    layout = "latent" if p.v_in_k else r.choice(("NHD", "NHD", "HND", "interleaved", "beside"))
    shared, spare = r.random() < 0.3, r.choice((0, 0, 1, 7))
    fits_kernels = p.d % 16 == p.d_v % 16 == 0 and p.d_v <= 1024
    may_have_8_bits = p.level in (None, 1) and (p.backend != "mma" or fits_kernels) and p.backend != "hopper"
    return Pages(rows, layout, shared, spare, may_have_8_bits and r.random() < 0.4)


def sink_values(r: random.Random) -> dict:
    """Draws how large sinks are: a few rule their rows, or have nothing of them."""
    found = {"like": r.choice(("nothing", "nothing", "scores")), "size": r.choice((1.0, 1.0, 1.0, 0.0, 5.0))}
    if r.random() < 0.4:
        found["raised"] = r.choice((8.0, 30.0, 30.0, 1e4, 1e30, -30.0, -85.0, -1e4, -1e30))
    return found


def with_sinks_wanted(r: random.Random, names: str) -> str:
    kind = r.random()
    return names if kind < 0.15 else "s" if kind < 0.25 else names + "s"


# ---- how it runs ----

_EXPERIMENTS = (
    ("ENABLE_FFPA_LAUNCH_GRID_DNHB", "1"),
    ("ENABLE_FFPA_PREFETCH_QKV", "0"),
    ("ENABLE_FFPA_PERSIST_Q_G2S", "1"),
    ("ENABLE_FFPA_PERSIST_Q_G2S", "0"),
)


def how(r: random.Random, p: Problem) -> dict:
    """Draws levels, stages, accumulators and flags: what the mma family alone knows."""
    found, flags = {}, []
    if p.backend == "mma" and not p.backward and p.device in ("cuda", *EMULATED):
        if r.random() < 0.5:
            found["level"] = r.choice((1, 2, 3) if p.d_v <= 1024 else (2, 3))
        if r.random() < 0.3 and p.device == "cuda":
            found["num_stages"] = r.choice((1, 2, 3, 4))
        if r.random() < 0.15 and p.pairs() * p.d < 2e7 and has_plain_scores(p) and p.size_v == 1.0:
            found["acc"] = r.choice(("f16", "mixed")) if p.dtype == "f16" else "f32"
        if r.random() < 0.1 and p.device == "cuda" and not found.get("num_stages"):
            flags.append(r.choice(_EXPERIMENTS))
    if p.backend == "triton" and not p.backward and not p.packed and p.mask is None and r.random() < 0.1:
        flags.append(("FFPA_TRITON_CORES", str(r.choice((1, 3, 40)))))
    if r.random() < 0.2:
        flags.append(("FFPA_WORKSPACE_MB", str(r.choice((8, 32, 64, 256) if p.backward else (2, 8, 32, 256)))))
    return {**found, "flags": tuple(flags)}
