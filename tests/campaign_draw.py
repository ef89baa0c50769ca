"""Draws random problems: one seed gives one problem, the same on every machine.

`generate` draws every argument of a call; what a backend is known to refuse is seldom asked of it. What Triton compiles
a kernel for is drawn once for many seeds (`campaign_families.py`).
"""

from __future__ import annotations

import random
from dataclasses import replace

import campaign_families as families
import campaign_parts as parts
from campaign_problems import BITS16, EMULATED, FP8, TWO_TILES, Problem


def generate(seed: int, device: str = "cuda", kind: str | None = None) -> Problem:
    r = random.Random(f"{device} {kind} {seed}")
    if kind is None and r.random() < (0.05 if device == "cuda" else 0.02):
        kind = "fp8"
    p = _draw(r, seed, device, kind)
    if not families.compiles(p):
        return p
    family = random.Random(f"family {kind} {families.family(seed, kind)}")
    first = _draw(family, seed, device, kind, "triton")
    return families.relative(r, first, kind, seed).with_(backend=p.backend)


def _draw(r: random.Random, seed: int, device: str, kind: str | None, backend: str | None = None) -> Problem:
    return _fp8(r, seed, device, backend) if kind == "fp8" else _bits16(r, seed, device, kind, backend)


def _backend(r: random.Random, device: str) -> str:
    if device == "cuda":
        return r.choice(("auto",) * 6 + ("hopper",) * 6 + ("mma",) * 6 + ("triton",) * 5 + ("sdpa", "reference"))
    if device in EMULATED:
        return r.choice(("mma", "hopper"))
    return "triton" if device == "interpreter" else "reference"


def _bits16(r: random.Random, seed: int, device: str, kind: str | None, backend: str | None) -> Problem:
    most = parts.most_rows(device)
    backend = backend or _backend(r, device)
    large = kind == "large" or r.random() < 0.06
    backward = kind == "backward" or (kind not in ("forward", "pages") and r.random() < 0.4)
    packed = kind in ("packed", "pages") or (kind != "masks" and r.random() < 0.2)
    if backend == "sdpa" and (packed or backward or kind == "masks" or large):
        backend = "auto"
    d, d_v = parts.head_dims(r, backend)
    heads_kv, group = parts.heads(r)
    p = Problem(
        seed=seed,
        device=device,
        backend=backend,
        backward=backward,
        dtype=r.choice(BITS16),
        batch=r.choice((0, 1, 1, 1, 2, 2, 3, 4)) if not packed else 1,
        heads_kv=heads_kv,
        group=group,
        n_q=parts.rows(r, most),
        n_k=parts.rows(r, most),
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
        p = p.with_(**parts.packed(r, device, most), layout="BHND")
    p = parts.within(p)
    p = p.with_(**parts.rule(r, p.n_q, p.n_k, p.dtype))
    if not packed and r.random() < (1.0 if kind == "masks" else 0.35):
        p = p.with_(mask=parts.mask(r, large))
    p = p.with_(**parts.numbers(r, p, large))
    if backend == "sdpa":
        p = _as_sdpa_knows(p)
    if not parts.has_plain_scores(p) and p.scale not in parts.SCALES_OF_ANY_NUMBERS:
        p = p.with_(scale=None)
    p = p.with_(**{n: parts.layout(r, p.batch, h) for n, h in (("q", p.heads_q), ("k", p.heads_kv), ("v", p.heads_kv))})
    if not backward and r.random() < 0.3:
        p = p.with_(out=replace(parts.layout(r, p.batch, p.heads_q), shared=""))
    if backward:
        p = p.with_(wanted=parts.wanted(r, p.mask))
    p = p.with_(**parts.how(r, p))
    if device == "fused":
        p = p.with_(acc="f32", flags=(), level=None if p.level == 2 else p.level)
    p = p.with_(exact=device in EMULATED and p.pairs() < 2e4 and r.random() < 0.2)
    p = p.with_(v_in_k=p.d_v <= p.d and not backward and p.acc == "f32" and r.random() < 0.15)
    p = p.with_(**parts.of_heads(r, p, kind))
    return p.with_(pages=parts.pages(r, p, kind))


def _as_sdpa_knows(p: Problem) -> Problem:
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


def _as_few_kernels_know(p: Problem) -> Problem:
    """Limits head dims to kernels that ENABLE_FFPA_DEBUG=1 leaves: 64, 192 and 512 columns, on wgmma 64 alone."""
    ranges = ((8, 64), (136, 192), (456, 512))[: 1 if p.backend == "hopper" else 3]
    least, most = next((ends for ends in ranges if p.d <= ends[1]), ranges[-1])
    return p.with_(d=min(max(p.d, least), most), d_v=min(max(p.d_v, least), most))


def _for_slow_devices(r: random.Random, p: Problem) -> Problem:
    """Makes problems small, but one in three has two tiles each way, or more. Few are wide."""
    wide = 640 if r.random() < 0.1 else 64 if r.random() < 0.7 else 256
    p = p.with_(d=min(p.d, wide), d_v=min(p.d_v, wide))
    p = p.with_(
        batch=min(p.batch, 2), heads_kv=min(p.heads_kv, 2), group=min(p.group, 2) if r.random() < 0.8 else p.group
    )
    if r.random() < 0.35:
        p = p.with_(batch=1, heads_kv=1, group=r.choice((1, 1, 2)))
        n_q, n_k = TWO_TILES
        p = p.with_(d=min(p.d, 128), d_v=min(p.d_v, 128))
        return p.with_(n_q=max(p.n_q, n_q + r.randint(0, 40)), n_k=max(p.n_k, n_k + r.randint(0, 40)))
    return p.with_(n_q=min(p.n_q, r.randint(1, 70)), n_k=min(p.n_k, r.randint(1, 140)))


def _fp8(r: random.Random, seed: int, device: str, backend: str | None) -> Problem:
    usual = {
        "cuda": r.choice(("auto", "hopper", "triton")),
        "emulator": "hopper",
        "fused": "hopper",
        "interpreter": "triton",
        "cpu": "reference",
    }
    backend = backend or usual[device]
    most = 256 if backend == "triton" else 512
    heads_kv, group = parts.heads(r)
    d = min(most, r.choice((64, 128, 72, 96, 256, 512, 8 * r.randint(1, 64))))
    p = Problem(
        seed=seed,
        device=device,
        backend=backend,
        dtype=r.choice(FP8),
        batch=r.choice((1, 2)),
        heads_kv=heads_kv,
        group=group,
        n_q=parts.rows(r, 2000),
        n_k=parts.rows(r, 2000),
        d=d,
        d_v=d if r.random() < 0.7 else min(most, 8 * r.randint(1, 64)),
        arch="sm_90a",
        scales=tuple(r.choice((None, "tensor", "head", "block")) for _ in range(3)),
        out_dtype=r.choice(("bf16", "f16", "f32", *FP8)),
        v_transposed=r.random() < 0.3,
        schedule=r.choice((0, 1, 2)),
    )
    p = parts.within(p)
    rule = parts.rule(r, p.n_q, p.n_k, "f16")
    if rule.get("softcap", 1) != 1:
        rule["softcap"] = r.choice((2.0, 30.0))
    p = p.with_(**rule)
    return p.with_(**parts.of_heads(r, p, None))
