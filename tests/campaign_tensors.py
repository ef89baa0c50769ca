"""Makes a problem's tensors: numbers that are the same on every machine, laid out as it asks, with NaN around them."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import NamedTuple

import pages
import torch
from campaign_problems import Layout, Mask, Problem, Sinks

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "bool": torch.bool}
DTYPES |= {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_EVEN_FIELDS = 0x0000FFFF0000FFFF  # every second of four fields of 16 bits
_MARGIN = 64  # elements before and after each tensor


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


_STEP, _FIRST, _SECOND = (_signed(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def bits(shape, seed: int, device) -> torch.Tensor:
    """Returns int64, as good as random: a hash of where an element is, which every device computes alike."""
    x = torch.arange(math.prod(shape), device=device).add_(_signed(seed * 0x632BE59BD9B4E019 % (1 << 64)))
    x.mul_(_STEP)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << 64 - shift) - 1))  # zeros come in, whatever the sign
        if factor is not None:
            x.mul_(factor)
    return x.view(shape)


def normal(shape, seed: int, device) -> torch.Tensor:
    """Returns float32: sums of four 16-bit numbers, which are nearly normal, and exact."""
    x = bits(shape, seed, device)
    pairs = (x & _EVEN_FIELDS).add_((x >> 16).bitwise_and_(_EVEN_FIELDS))  # two sums side by side: each pass costs
    total = (pairs >> 32).add_(pairs).bitwise_and_(0x7FFFFFFF)
    return total.sub_(2 * 0xFFFF).float().div_(37837.0)


def uniform(shape, seed: int, device) -> torch.Tensor:
    return (bits(shape, seed, device) & 0xFFFFFF).float().div_(1 << 24)


class Placed(NamedTuple):
    view: torch.Tensor
    block: torch.Tensor  # all of the memory around the view


def place(numbers: torch.Tensor, layout: Layout, dims: str = "BHN") -> Placed:
    """Places numbers in a view [B, H, N, D] (or as `dims` name them) of memory that is NaN in all other places."""
    size = dict(zip(dims, numbers.shape[:-1], strict=True))
    slack = dict(zip("BHN", layout.slack, strict=True))
    step, strides = numbers.shape[-1] + slack["N"], {}
    extra = {"B": slack["B"], "H": slack["H"], "N": 0}
    for dim in reversed([dim for dim in layout.order if dim in dims]):
        shared = dim in layout.shared and size[dim] > 1
        strides[dim] = 0 if shared else step
        step *= 1 if shared else size[dim] + extra[dim]
    block = torch.full(
        (_MARGIN + layout.offset + step + _MARGIN,), torch.nan, dtype=numbers.dtype, device=numbers.device
    )
    view = block.as_strided(numbers.shape, [*(strides[dim] for dim in dims), 1], _MARGIN + layout.offset)
    target = view
    for dim in dims:  # what is shared is written once
        if dim in layout.shared and size[dim] > 1:
            target, numbers = (x.narrow(dims.index(dim), 0, 1) for x in (target, numbers))
    target.copy_(numbers)
    return Placed(view, block)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds to the nearest finite number."""
    most = torch.finfo(dtype).max
    return x.clamp_(-most, most).to(dtype)


def make_mask(mask: Mask, p: Problem, device) -> torch.Tensor:
    full = (p.batch, p.heads_q, p.n_q, p.n_k)
    shape = [n if own else 1 for n, own in zip(full, mask.own, strict=True)]
    batch, _, rows, keys = shape
    at = torch.arange(keys, device=device).view(1, 1, 1, keys)
    entry = torch.arange(batch, device=device).view(batch, 1, 1, 1)
    hidden = torch.zeros(shape, dtype=torch.bool, device=device)
    if mask.pattern == "holes":
        hidden = uniform(shape, p.seed + 11, device) < 0.3
    elif mask.pattern == "left":
        hidden = hidden | (at < (entry + 1) * keys // (batch + 1))
    elif mask.pattern == "right":
        hidden = hidden | (at >= keys - (entry + 1) * keys // (batch + 2))
    elif mask.pattern == "rows":
        hidden = hidden | (uniform((1, 1, rows, 1), p.seed + 12, device) < 0.3)
    elif mask.pattern == "whole":
        hidden = ~hidden
    if mask.dtype == "bool":
        values = ~hidden
    else:
        values = normal(shape, p.seed + 13, device).mul_(mask.size)
        if mask.attract:
            values += mask.attract * (uniform(shape, p.seed + 14, device) < 0.1)
        values = cast(values, DTYPES[mask.dtype]).masked_fill(hidden, mask.hidden)
    if mask.slack:
        wide = torch.full((*shape[:3], keys + mask.slack), mask.dtype == "bool", dtype=values.dtype, device=device)
        if mask.dtype != "bool":
            wide.fill_(torch.nan)
        wide[..., :keys] = values
        values = wide[..., :keys]
    if mask.transposed:
        values = values.mT.contiguous().mT
    return values[(0,) * (4 - mask.dims)] if all(n == 1 for n in shape[: 4 - mask.dims]) else values


def make_sinks(sinks: Sinks, p: Problem, q: torch.Tensor, k: torch.Tensor) -> Placed:
    """q and k are [B, H, N, D]."""
    shape = (p.heads_q,)
    values = normal(shape, p.seed + 15, q.device).mul_(sinks.size)
    if sinks.like == "scores" and q.shape[0] and q.shape[2] and k.shape[2]:
        scale = p.d**-0.5 if p.scale is None else p.scale
        of_k = k[0, :, k.shape[2] // 3].double().repeat_interleave(p.group, 0)
        score = (q[0, :, q.shape[2] // 3].double() * of_k).sum(-1).nan_to_num(0.0) * scale
        values += p.softcap * torch.tanh(score / p.softcap) if p.softcap else score
    if sinks.raised:
        values += sinks.raised * (uniform(shape, p.seed + 16, q.device) < 0.4)
    values = cast(values, DTYPES[sinks.dtype])
    if sinks.none:
        values = values.masked_fill(uniform(shape, p.seed + 17, q.device) < 0.3, -torch.inf)
    block = torch.full((p.heads_q + 2, 1 + sinks.strided), torch.nan, dtype=values.dtype, device=q.device)
    view = block[1:-1, 0]
    view.copy_(values)
    return Placed(view, block)


class Inputs(NamedTuple):
    q: torch.Tensor  # tensors in the layout that the call takes
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    sinks: torch.Tensor | None
    offsets: tuple  # offsets of packed sequences
    spans: list[tuple[slice, slice]]  # rows and keys of each sequence, as they count
    blocks: list[torch.Tensor]  # memory that no call may write to
    pool: pages.Pool | None = None  # the same keys in pages
    scales: tuple = ()  # of keys and values, where these have 8 bits


def make(p: Problem, device) -> Inputs:
    dtype = DTYPES[p.dtype]
    rows, keys = (p.n_q, p.n_k) if not p.packed else (sum(p.lengths_q) + p.spare, sum(p.lengths_k) + p.spare)
    of_q = normal((p.batch, p.heads_q, rows, p.d), p.seed * 7 + 1, device).mul_(p.size_q)
    of_k = normal((p.batch, p.heads_kv, keys, p.d), p.seed * 7 + 2, device).mul_(p.size_k)
    of_v = normal((p.batch, p.heads_kv, keys, p.d_v), p.seed * 7 + 3, device).mul_(p.size_v)
    if p.numbers == "equal_keys":
        of_k = of_k[:, :, :1].expand(of_k.shape).clone()
    scales = ()
    if p.pages and p.pages.eight_bits:
        scales = tuple(_scales(p, size, device) for size in ((p.size_k,) * 2 if p.v_in_k else (p.size_k, p.size_v)))
        of_k, of_v = (
            _of_8_bits(x, scale[:, None, None]).float() * scale[:, None, None]
            for x, scale in zip((of_k, of_v), scales, strict=True)
        )
    q, k, v = (cast(x, dtype) for x in (of_q, of_k, of_v))
    if p.packed and p.spare:
        for x in (q, k, v):
            x[:, :, -p.spare :] = torch.nan
    if p.numbers == "nan_row" and rows:
        q[:, -1, rows // 2] = torch.nan
    placed = []
    for x, layout in ((q, p.q), (k, p.k), (v, p.v)):
        if p.packed:
            view, block = place(x[0], layout, "HN")
            view = view.transpose(0, 1)
        else:
            view, block = place(x, layout)
            view = view.transpose(1, 2) if p.layout == "BNHD" else view
        placed.append((view, block))
    if p.v_in_k:
        placed[2] = placed[1][0][..., : p.d_v], placed[1][1]
    mask = make_mask(p.mask, p, device) if p.mask else None
    offsets, spans = _offsets(p, rows, keys, device) if p.packed else ((), [])
    blocks = [block for _, block in placed] + [mask] * (mask is not None)
    sinks = None
    if p.sinks:
        sinks, block = make_sinks(p.sinks, p, *(heads_first(p, view) for view, _ in placed[:2]))
        blocks.append(block)
    pool = in_pages(p, placed[1][0], placed[2][0], spans) if p.pages else None
    if scales:
        of_k, of_v = (_of_8_bits(x, scale[:, None]) for x, scale in zip(pool[:2], scales, strict=True))
        pool = pool._replace(k=of_k, v=of_k[..., : p.d_v] if p.v_in_k else of_v)
    if pool:
        blocks += [pool.k, pool.v]
    return Inputs(*(view for view, _ in placed), mask, sinks, offsets, spans, blocks, pool, scales)


def _scales(p: Problem, size: float, device) -> torch.Tensor:
    """Returns a power of two for each head: so numbers of 8 bits times it are numbers of 16 bits, too."""
    exponent = max(round(math.log2(size)) if 0 < size < math.inf else 0, -10)
    if p.dtype == "f16":
        exponent = min(exponent, 6)  # 448 times that is a float16
    alike = p.k.shared or p.v.shared  # heads in one place have one scale
    return torch.tensor([2.0 ** (exponent - (0 if alike else head % 3)) for head in range(p.heads_kv)], device=device)


def _of_8_bits(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def in_pages(p: Problem, k: torch.Tensor, v: torch.Tensor, spans) -> pages.Pool:
    """Puts packed keys into pages, in any order; sequences that share their first page get the keys of the first one there,
    in k and v too.
    """
    rows, lengths = p.pages.rows, [keys.stop - keys.start for _, keys in spans]
    counts = [-(-n // rows) for n in lengths]
    may_share = p.pages.shared and not (p.odd_offsets or p.k.shared or p.v.shared)
    r = random.Random(p.seed)
    order = r.sample(range(sum(counts) + 3), sum(counts) + 3)
    with torch.device(k.device):
        of_k, of_v = pages.empty(len(order), rows, p.heads_kv, p.d, p.d_v, p.pages.layout, k.dtype)
    entries = max([*counts, 1]) + p.pages.spare
    table = [[r.choice(pages.ANYTHING) for _ in range(entries)] for _ in spans]
    for i, (_, keys) in enumerate(spans):
        shares = may_share and i > 0 and min(lengths[0], lengths[i]) >= rows
        for j in range(counts[i]):
            at = slice(keys.start + j * rows, min(keys.start + (j + 1) * rows, keys.stop))
            if shares and j == 0:
                first = slice(spans[0][1].start, spans[0][1].start + rows)
                k[at], v[at] = k[first].clone(), v[first].clone()
                table[i][0] = table[0][0]
                continue
            table[i][j] = order.pop()
            for pool, x in ((of_k, k), (of_v, v)):
                pool[table[i][j], : at.stop - at.start] = x[at]
    as_tensor = {"dtype": torch.int32, "device": k.device}
    table = torch.tensor(table, **as_tensor).view(len(spans), entries)
    return pages.Pool(of_k, of_v, table, torch.tensor(lengths, **as_tensor))


def heads_first(p: Problem, x: torch.Tensor) -> torch.Tensor:
    """Returns [B, H, N, D]."""
    if p.packed:
        return x.transpose(0, 1)[None]
    return x.transpose(1, 2) if p.layout == "BNHD" else x


def _offsets(p: Problem, rows: int, keys: int, device):
    sides, starts = [], []
    for lengths, total, shorter in ((p.lengths_q, rows, p.longest[0]), (p.lengths_k, keys, p.longest[1])):
        at = [0]
        for length in lengths:
            at.append(at[-1] + length)
        longest = max(0, max(lengths, default=0) + shorter)
        odd = p.odd_offsets if lengths else ""
        if odd == "first":
            at[0] = -5
        elif odd == "last":
            at[-1] = total + 50
        elif odd == "falls":
            at[-1] = at[-2] - 3
        clamped = [min(max(x, 0), total) for x in at]
        starts.append([(a, max(0, min(b - a, longest))) for a, b in pairwise(clamped)])
        sides.append((torch.tensor(at, dtype=torch.int32, device=device), longest))
    (cu_q, longest_q), (cu_k, longest_k) = sides
    spans = [(slice(a, a + n), slice(b, b + m)) for (a, n), (b, m) in zip(*starts, strict=True)]
    return (cu_q, cu_k, longest_q, longest_k), spans
