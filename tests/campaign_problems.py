"""Random problems: one seed gives one problem, the same on every machine.

A `Problem` is plain values alone, so that a wrong one prints as a test. `generate` draws every argument of a call; what a
backend is known to refuse is seldom asked of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

BITS16 = ("f16", "bf16")
FP8 = ("e4m3", "e5m2")
KINDS = ("forward", "backward", "packed", "fp8", "masks", "large")
_TWO_TILES = (129, 257)  # rows and keys: no tile is larger than 128 by 256
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
    shared: str = ""  # of "B" and "H": of stride 0


@dataclass(frozen=True)
class Mask:
    dtype: str = "bool"  # bool, f16, bf16, f32
    own: tuple[bool, bool, bool, bool] = (True, True, True, True)  # dims with elements of their own: B, H, rows, keys
    dims: int = 4
    pattern: str = "holes"  # holes, left, right, rows, whole, none: which elements are hidden
    hidden: float = float("-inf")  # what they hold; a bool mask holds False
    attract: float = 0.0  # what some keys are raised by
    size: float = 1.0  # of the random values of an additive mask
    transposed: bool = False
    slack: int = 0


@dataclass(frozen=True)
class Problem:
    """Everything that a call depends on. Tensors hold numbers made from `seed`."""

    seed: int = 0
    device: str = "cuda"  # of DEVICES
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
    # what is computed
    causal: bool = False
    align: str = "bottom_right"
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    mask: Mask | None = None
    return_lse: bool = True
    # how numbers look: plain, equal_keys, nan_row; and how large they are
    numbers: str = "plain"
    size_q: float = 1.0
    size_k: float = 1.0
    size_v: float = 1.0
    # gradients
    wanted: str = "qkv"  # of q, k, v, m(ask)
    grad_lse: bool = False
    quiet_rows: bool = False  # dO of rows that see hidden keys alone is 0
    # how it lies in memory
    layout: str = "BHND"
    q: Layout = Layout()
    k: Layout = Layout()
    v: Layout = Layout()
    out: Layout | None = None  # where `out=` is given
    # how it runs
    level: int | None = None
    acc: str = "f32"
    num_stages: int | None = None
    flags: tuple[tuple[str, str], ...] = ()
    arch: str = "sm_80"  # that the emulator is
    schedule: int = 0
    exact: bool = False  # its sums are those of tensor cores, bit for bit
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
        """As source code that makes it; what is at its default is left out."""
        return _source(self)

    def has_two_tiles(self) -> bool:
        """Of rows and of keys, whatever the kernel's are."""
        lengths = zip(self.lengths_q, self.lengths_k, strict=True) if self.packed else [(self.n_q, self.n_k)]
        return any(n_q >= _TWO_TILES[0] and n_k >= _TWO_TILES[1] for n_q, n_k in lengths)

    def pairs(self) -> int:
        """Rows times keys, of all heads."""
        if self.packed:
            return self.heads_q * sum(a * b for a, b in zip(self.lengths_q, self.lengths_k, strict=True))
        return self.batch * self.heads_q * self.n_q * self.n_k


def _source(x) -> str:
    if isinstance(x, float) and x in (float("inf"), -float("inf")):
        return f'float("{x}")'
    if not isinstance(x, (Problem, Layout, Mask)):
        return repr(x)
    default = type(x)()
    named = {f.name: getattr(x, f.name) for f in fields(x)}
    return f"{type(x).__name__}({', '.join(f'{name}={_source(v)}' for name, v in named.items() if v != getattr(default, name))})"


# ---- sizes ----

_EDGES = (16, 32, 64, 128, 256, 512, 1024)
_LIMITS = {  # rows or keys, pairs of all heads, pairs times columns, elements of a tensor
    "cuda": (9000, 2e7, 3e9, 2e7),
    "emulator": (700, 1.2e5, 2e7, 3e5),
    "fused": (700, 1.2e5, 2e7, 3e5),
    "interpreter": (400, 2e5, 2e7, 3e5),
    "cpu": (600, 3e5, 3e7, 5e5),
}


def _rows(r: random.Random, most: int) -> int:
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


def _head_dims(r: random.Random, device: str, backend: str) -> tuple[int, int]:
    most = 256 if backend == "triton" else 2048
    if device == "cuda" and (backend == "triton" or (backend == "auto" and r.random() < 0.5)) and r.random() < 0.85:
        return r.choice(_TRITON_PAIRS)  # others are compiled for one problem, which takes seconds
    common = (64, 80, 96, 128, 192, 256, 320, 512, 576, 40, 72, 104, 136, 200, 8, 24)
    wide = (512, 640, 768, 1024, 1152, 1536, 2048, 576, 520, 648)
    pool = common if r.random() < 0.7 and not (device == "cuda" and backend == "auto") else wide
    d = _columns(r, most, pool)
    kind = r.random()
    if kind < 0.6:
        return d, d
    if kind < 0.7 and most > 576:
        return r.choice(((576, 512), (192, 128), (512, 576), (64, 512)))
    return d, _columns(r, most, pool)


_TRITON_PAIRS = ((64, 64), (40, 16), (104, 16), (128, 128), (192, 128), (256, 256), (72, 200), (8, 24))


def _heads(r: random.Random) -> tuple[int, int]:
    """(heads of K and V, of Q for each)"""
    group = r.choice((1, 1, 1, 1, 2, 2, 3, 4, 5, 8, 16))
    return r.choice((1, 1, 2, 2, 3, 4, 8)), group


# ---- the parts of a problem ----


def _layout(r: random.Random, batch: int, heads: int, even: bool) -> Layout:
    if r.random() < 0.3:
        return Layout()
    order = r.choice(("BHN", "BHN", "BNH", "BNH", "HBN", "NBH", "HNB"))
    rows = r.choice((0, 0, 16, 64)) if even else 8 * r.choice((0, 0, 1, 2, 3, 5, 26))
    slack = (r.choice((0, 0, 1)), r.choice((0, 0, 1, 2)), rows)
    offset = r.choice((0, 0, 64)) if even else 8 * r.choice((0, 0, 1, 2, 3, 8))
    shared = "".join(dim for dim, size in (("B", batch), ("H", heads)) if size > 1 and r.random() < 0.08)
    return Layout(order, slack, offset, shared)


_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "f32": 3.4028234663852886e38}
_HIDING = (-1e4, -1e9, -1.5e9, -1e10, -3e10, -1e30)


def _mask(r: random.Random, sizes, large: bool) -> Mask:
    dtype = r.choice(("bool", "bool", "f16", "bf16", "f32", "f32"))
    own = r.choice(
        ((True,) * 4, (True, False, True, True), (False, True, True, True), (False, False, True, True), (True, False, False, True),
         (False, False, False, True), (True, True, True, False), (False, True, False, False), (False,) * 4)
    )  # fmt: skip
    first_own = next((i for i, yes in enumerate(own) if yes), 3)
    pattern = r.choice(("holes", "holes", "left", "left", "right", "rows", "whole", "none"))
    hidden, attract = float("-inf"), 0.0
    if dtype != "bool" and r.random() < 0.6:
        least = -_LARGEST[dtype]
        hidden = max(least, r.choice((least, least, -_LARGEST["bf16"], *_HIDING)))
    if dtype != "bool" and r.random() < (0.3 if large else 0.07):
        attract = min(_LARGEST[dtype], r.choice((1e4, 1e30, 30.0)))
    return Mask(
        dtype,
        own,
        r.randint(min(4 - first_own, 4), 4) if r.random() < 0.3 else 4,
        pattern,
        hidden,
        attract,
        r.choice((1.0, 1.0, 0.0, 5.0)),
        r.random() < 0.1,
        r.choice((0, 0, 1, 3, 8)),
    )


def _rule(r: random.Random, n_q: int, n_k: int, dtype: str) -> dict:
    rule = {}
    if r.random() < 0.4:
        rule["causal"] = True
    if r.random() < 0.25:
        rule["window"] = tuple(r.choice((-1, 0, 1, 9, 64, 127, 300, r.randint(0, max(n_q, n_k, 1)))) for _ in range(2))
    if r.random() < 0.4:
        rule["align"] = "top_left"
    if r.random() < 0.2:
        rule["softcap"] = r.choice((1e-3, 5.0, 5.0, 30.0, 30.0, 1e6))
    if r.random() < 0.4:
        rule["scale"] = r.choice((1.0, 0.05, 0.05, -0.3, -0.1, 0.0, 1e-6, 1e4 if dtype == "bf16" else 0.5))
    return rule


def _sizes_of_numbers(r: random.Random, p: Problem, large: bool) -> dict:
    """How large q, k and v are. `large`: products of 1e5 to 8e8, finite in 16 bits."""
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
    elif kind < 0.19 and not p.backward and (p.mask is None or p.mask.dtype == "bool"):  # NaN less infinity is what?
        found = {"numbers": "nan_row"}
    return found


_EXPERIMENTS = (
    ("ENABLE_FFPA_LAUNCH_GRID_DNHB", "1"),
    ("ENABLE_FFPA_PREFETCH_QKV", "0"),
    ("ENABLE_FFPA_PERSIST_Q_G2S", "1"),
    ("ENABLE_FFPA_PERSIST_Q_G2S", "0"),
)


def _backend(r: random.Random, device: str, kind: str | None) -> str:
    if device == "cuda":
        return r.choice(("auto",) * 6 + ("hopper",) * 6 + ("mma",) * 6 + ("triton",) * 5 + ("sdpa", "reference"))
    if device in EMULATED:
        return r.choice(("mma", "hopper"))
    return "triton" if device == "interpreter" else "reference"


def _as_sdpa_knows(r: random.Random, p: Problem) -> Problem:
    """PyTorch's own attention is asked for little."""
    causal = p.causal and p.n_k > 0
    align = "bottom_right" if not causal or p.n_q == p.n_k else "top_left"
    scale = p.scale if p.scale is None or p.scale > 0 else None
    return p.with_(
        return_lse=False,
        mask=None,
        softcap=0.0,
        group=1,
        d_v=p.d,
        window=(-1, -1),
        causal=causal,
        align=align,
        scale=scale,
        n_k=max(p.n_k, 1),
    )


def _how(r: random.Random, p: Problem) -> dict:
    """Levels, stages, accumulators, flags: what the mma family alone knows."""
    how, flags = {}, []
    if p.backend == "mma" and not p.backward and p.device in ("cuda", *EMULATED):
        if r.random() < 0.5:
            how["level"] = r.choice((1, 2, 3) if p.d_v <= 1024 else (2, 3))
        if r.random() < 0.3 and p.device == "cuda":
            how["num_stages"] = r.choice((1, 2, 3, 4))
        if (
            r.random() < 0.15
            and p.pairs() * p.d < 2e7
            and p.numbers == "plain"
            and p.size_q == p.size_k == p.size_v == 1.0
        ):
            how["acc"] = r.choice(("f16", "mixed")) if p.dtype == "f16" else "f32"
        if r.random() < 0.1 and p.device == "cuda" and not how.get("num_stages"):
            flags.append(r.choice(_EXPERIMENTS))
    if p.backend == "triton" and not p.backward and not p.packed and p.mask is None and r.random() < 0.1:
        flags.append(("FFPA_TRITON_CORES", str(r.choice((1, 3, 40)))))
    if r.random() < 0.2:
        flags.append(("FFPA_WORKSPACE_MB", str(r.choice((8, 32, 64, 256) if p.backward else (2, 8, 32, 256)))))
    return {**how, "flags": tuple(flags)}


def _packed(r: random.Random, device: str, most: int) -> dict:
    count = r.choice((0, 1, 2, 3, 5, 8))
    lengths = []
    for _ in range(2):
        lengths.append(tuple(0 if r.random() < 0.15 else min(_rows(r, most), most // 2) for _ in range(count)))
    if r.random() < 0.4:
        lengths[1] = lengths[0]
    found = {"lengths_q": lengths[0], "lengths_k": lengths[1], "spare": r.choice((0, 0, 1, 9))}
    if device == "cuda" and count > 1:
        found["odd_offsets"] = r.choice(("",) * 7 + ("first", "last", "falls"))
        if found["odd_offsets"] == "last":  # it would take in the spare rows
            found["spare"] = 0
    least = -5 if device == "cuda" else 0
    found["longest"] = tuple(r.choice((0, 0, 0, least, 3, 1000)) for _ in range(2))
    return found


def _within(p: Problem) -> Problem:
    """As much smaller as the device asks for."""
    most, pairs, work, elements = _LIMITS[p.device]
    while True:
        columns = p.d + p.d_v
        keys = sum(p.lengths_k) if p.packed else p.batch * p.n_k
        rows = sum(p.lengths_q) if p.packed else p.batch * p.n_q
        too_long = max(p.lengths_q + p.lengths_k if p.packed else (p.n_q, p.n_k), default=0) > most
        if not too_long and p.pairs() <= pairs and p.pairs() * columns <= work:
            if max(rows * p.heads_q, keys * p.heads_kv) * max(p.d, p.d_v) <= elements:
                return p
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


def generate(seed: int, device: str = "cuda", kind: str | None = None) -> Problem:
    r = random.Random(f"{device} {kind} {seed}")
    if kind is None and r.random() < (0.05 if device == "cuda" else 0.02):
        kind = "fp8"
    if kind == "fp8":
        return _fp8(r, seed, device)
    most = _LIMITS[device][0]
    backend = _backend(r, device, kind)
    large = kind == "large" or r.random() < 0.06
    backward = kind == "backward" or (kind != "forward" and r.random() < 0.4)
    packed = kind == "packed" or (kind != "masks" and r.random() < 0.2)
    if backend == "sdpa" and (packed or backward or kind == "masks" or large):
        backend = "auto"
    d, d_v = _head_dims(r, device, backend)
    heads_kv, group = _heads(r)
    p = Problem(
        seed=seed,
        device=device,
        backend=backend,
        backward=backward,
        dtype=r.choice(BITS16),
        batch=r.choice((0, 1, 1, 1, 2, 2, 3, 4)) if not packed else 1,
        heads_kv=heads_kv,
        group=group,
        n_q=_rows(r, most),
        n_k=_rows(r, most),
        d=d,
        d_v=d_v,
        layout=r.choice(("BHND", "BHND", "BNHD")),
        return_lse=r.random() < 0.6,
        grad_lse=backward and r.random() < 0.5,
        quiet_rows=r.random() < 0.5,
        repeats=2 if r.random() < 0.1 else 1,
        arch="sm_90a" if backend == "hopper" else r.choice(("sm_80", "sm_80", "sm_90a")),
        schedule=r.choice((0, 1, 2, 3, 7)),
    )
    if r.random() < 0.15 and not packed:  # decoding
        p = p.with_(n_q=r.choice((1, 1, 2, 4)))
    if device in (*EMULATED, "interpreter"):
        p = _for_slow_devices(r, p)
    if device == "fused":
        p = _as_few_kernels_know(p)
    if packed:
        p = p.with_(**_packed(r, device, most), layout="BHND")
    p = _within(p)
    p = p.with_(**_rule(r, p.n_q, p.n_k, p.dtype))
    if not packed and r.random() < (1.0 if kind == "masks" else 0.35):
        p = p.with_(mask=_mask(r, None, large))
    p = p.with_(**_sizes_of_numbers(r, p, large))
    if backend == "sdpa":
        p = _as_sdpa_knows(r, p)
    if p.numbers != "plain" or p.size_q != 1.0 or p.size_k != 1.0:
        if p.scale not in (None, -0.1, 0.05, 1.0, -0.3):
            p = p.with_(scale=None)
    even = backend in ("triton", "auto") and device == "cuda" and r.random() < 0.7
    p = p.with_(
        **{n: _layout(r, p.batch, h, even) for n, h in (("q", p.heads_q), ("k", p.heads_kv), ("v", p.heads_kv))}
    )
    if not backward and r.random() < 0.3:
        layout = _layout(r, p.batch, p.heads_q, even)
        p = p.with_(out=replace(layout, shared=""))
    if backward:
        wanted = r.choice(("qkv", "qkv", "qkv", "q", "kv", "v", "k"))
        if p.mask and p.mask.dtype != "bool" and r.random() < 0.4:
            wanted += "m"
        p = p.with_(wanted=wanted)
    p = p.with_(**_how(r, p))
    if device == "fused":
        p = p.with_(acc="f32", flags=(), level=None if p.level == 2 else p.level)
    return p.with_(exact=device in EMULATED and p.pairs() < 2e4 and r.random() < 0.2)


def _as_few_kernels_know(p: Problem) -> Problem:
    """Head dims of the kernels that ENABLE_FFPA_DEBUG=1 leaves: those of 64, 192 and 512 columns, on wgmma of 64 alone."""
    ranges = ((8, 64), (136, 192), (456, 512))[: 1 if p.backend == "hopper" else 3]
    least, most = next((ends for ends in ranges if p.d <= ends[1]), ranges[-1])
    return p.with_(d=min(max(p.d, least), most), d_v=min(max(p.d_v, least), most))


def _for_slow_devices(r: random.Random, p: Problem) -> Problem:
    """One in three has two tiles each way, or more; others are small. Few are wide."""
    wide = 640 if r.random() < 0.1 else 64 if r.random() < 0.7 else 256
    p = p.with_(d=min(p.d, wide), d_v=min(p.d_v, wide))
    p = p.with_(
        batch=min(p.batch, 2), heads_kv=min(p.heads_kv, 2), group=min(p.group, 2) if r.random() < 0.8 else p.group
    )
    if r.random() < 0.35:
        p = p.with_(batch=1, heads_kv=1, group=r.choice((1, 1, 2)))
        n_q, n_k = _TWO_TILES
        p = p.with_(d=min(p.d, 128), d_v=min(p.d_v, 128))
        return p.with_(n_q=max(p.n_q, n_q + r.randint(0, 40)), n_k=max(p.n_k, n_k + r.randint(0, 40)))
    return p.with_(n_q=min(p.n_q, r.randint(1, 70)), n_k=min(p.n_k, r.randint(1, 140)))


def _fp8(r: random.Random, seed: int, device: str) -> Problem:
    backend = {
        "cuda": r.choice(("auto", "hopper", "triton")),
        "emulator": "hopper",
        "fused": "hopper",
        "interpreter": "triton",
        "cpu": "reference",
    }[device]
    most = 256 if backend == "triton" else 512
    heads_kv, group = _heads(r)
    d = min(most, r.choice((64, 128, 72, 96, 256, 512, 8 * r.randint(1, 64))))
    p = Problem(
        seed=seed,
        device=device,
        backend=backend,
        dtype=r.choice(FP8),
        batch=r.choice((1, 2)),
        heads_kv=heads_kv,
        group=group,
        n_q=_rows(r, 2000),
        n_k=_rows(r, 2000),
        d=d,
        d_v=d if r.random() < 0.7 else min(most, 8 * r.randint(1, 64)),
        arch="sm_90a",
        scales=tuple(r.choice((None, "tensor", "head", "block")) for _ in range(3)),
        out_dtype=r.choice(("bf16", "f16", "f32", *FP8)),
        v_transposed=r.random() < 0.3,
        schedule=r.choice((0, 1, 2)),
    )
    p = _within(p)
    rule = _rule(r, p.n_q, p.n_k, "f16")
    if rule.get("softcap", 1) != 1:
        rule["softcap"] = r.choice((2.0, 30.0))
    return p.with_(**rule)
