"""Measures attention to keys in pages on a GPU, beside our own call of the same lengths without pages, in turn.

`python bench/paged.py` prints a row for each kind of call and head dim: `prefill`, 8 causal sequences of 8192 rows; `chunks`,
the last 512 rows of 32768 keys, 8 times; `decoding`, one row on ragged lengths up to 4096, 32768 and 131072, of 1, 8, 64
and 256 sequences as far as the GPU's memory holds them, and what it costs to append that row's keys. Times are medians of calls with a cold L2; a ratio above 1 says that pages are
faster. Pages lie in random order. Numbers are such that e4m3 holds them; `8 bits` attends to pages of 64 rows that do, and its
ratio is to those of 16 bits. `--kind` and `--d` take some of it, `--write` keeps the numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
from ffpa_attn import env, ffpa, ffpa_varlen, ffpa_with_kvcache
from flops import nominal_flops
from overhead import queued_us
from timing import Timer, measure_in_turn
from workload import Workload

KINDS = ("prefill", "chunks", "decoding")
HEADS = {128: (32, 8, 128), 256: (32, 8, 256), 512: (32, 4, 512), 576: (128, 1, 512)}  # D: heads of q, of keys, and D_v
LONGEST, BATCHES = (4096, 32768, 131072), (1, 8, 64, 256)  # of sequences that decode
PAGES = (64, 16)  # rows of a page
COPIES = 5  # of keys and values that a GPU's memory is to hold: without pages, in pages of each size, in 8 bits, and to spare
READ_BYTES = 4 << 30
E4M3, EIGHT_BITS = torch.float8_e4m3fn, "8 bits"


class Case(NamedTuple):
    kind: str
    d: int
    lengths: tuple[int, ...]  # keys of each sequence
    rows: int  # of each sequence, the last ones

    def __str__(self) -> str:
        heads, heads_kv, d_v = HEADS[self.d]
        dims = f"{self.d}" if d_v == self.d else f"{self.d}/{d_v}"
        return f"{self.kind}, B={len(self.lengths)}, {self.rows} on {max(self.lengths)}, H={heads}/{heads_kv}, D={dims}"

    @property
    def has_8_bits(self) -> bool:
        return not values_in_keys(self.d)

    @property
    def flops(self) -> float:
        heads, heads_kv, d_v = HEADS[self.d]
        return sum(
            nominal_flops(Workload(1, heads, heads_kv, self.rows, n, self.d, d_v, "bf16", True)) for n in self.lengths
        )

    @property
    def bytes_of_keys(self) -> int:
        _, heads_kv, d_v = HEADS[self.d]
        return 2 * heads_kv * sum(self.lengths) * (self.d if values_in_keys(self.d) else self.d + d_v)


def values_in_keys(d: int) -> bool:
    return HEADS[d][2] != d


def ragged(batch: int, longest: int) -> tuple[int, ...]:
    """Returns lengths from 1 to the longest, of which there is one."""
    lengths = torch.randint(1, longest + 1, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()
    return (longest, *lengths[1:])


def cases(kinds, dims, quick: bool) -> Iterator[Case]:
    for d in dims:
        for kind in kinds:
            if kind == "prefill":
                yield Case(kind, d, (1024 if quick else 8192,) * (2 if quick else 8), 1024 if quick else 8192)
            elif kind == "chunks":
                yield Case(kind, d, (4096 if quick else 32768,) * (2 if quick else 8), 512)
            else:
                for longest in (1024,) if quick else LONGEST:
                    yield from (Case(kind, d, ragged(batch, longest), 1) for batch in ((8,) if quick else BATCHES))


class Tensors(NamedTuple):
    q: torch.Tensor  # [B, rows, Hq, D]
    k: torch.Tensor  # [keys of all sequences, Hkv, D]
    v: torch.Tensor
    offsets: torch.Tensor


def make_tensors(case: Case, device: str) -> Tensors:
    heads, heads_kv, d_v = HEADS[case.d]
    torch.manual_seed(0)
    q = torch.randn(len(case.lengths), case.rows, heads, case.d, dtype=torch.bfloat16, device=device)
    k = torch.randn(sum(case.lengths), heads_kv, case.d, dtype=torch.bfloat16, device=device).to(E4M3).bfloat16()
    v = k[..., :d_v] if values_in_keys(case.d) else torch.randn_like(k).to(E4M3).bfloat16()
    offsets = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0)], dtype=torch.int32, device=device)
    return Tensors(q, k, v, offsets)


def unpaged(case: Case, x: Tensors) -> Callable[[], torch.Tensor]:
    """Returns the call without pages: of dense tensors where sequences are as long, else of packed ones."""
    batch, longest = len(case.lengths), max(case.lengths)
    if min(case.lengths) == longest:
        k, v = (t.unflatten(0, (batch, longest)) for t in (x.k, x.v))
        return lambda: ffpa(x.q, k, v, causal=True, layout="BNHD")
    of_q = torch.arange(batch + 1, dtype=torch.int32, device=x.q.device) * case.rows
    q = x.q.flatten(0, 1)
    return lambda: ffpa_varlen(q, x.k, x.v, of_q, x.offsets, case.rows, longest, causal=True).view(*x.q.shape[:-1], -1)


class Paged(NamedTuple):
    k: torch.Tensor  # [pages, rows, Hkv, D]
    v: torch.Tensor
    table: torch.Tensor
    used: torch.Tensor

    def call(self, case: Case, q, k=None, v=None) -> torch.Tensor:
        lengths = {"cache_seqlens": self.used, "max_seqlen_k": max(case.lengths)}
        return ffpa_with_kvcache(q, self.k, self.v, k, v, block_table=self.table, causal=True, **lengths)


def in_pages(case: Case, x: Tensors, rows: int) -> Paged:
    """Copies keys and values to pools."""
    counts = [-(-n // rows) for n in case.lengths]
    order = torch.randperm(sum(counts), device=x.k.device).int()
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32, device=x.k.device)
    k_pages = torch.empty(sum(counts) * rows, *x.k.shape[1:], dtype=x.k.dtype, device=x.k.device)
    v_pages = k_pages[..., : x.v.shape[-1]] if values_in_keys(case.d) else torch.empty_like(k_pages)
    taken = begin = 0
    for i, (count, n) in enumerate(zip(counts, case.lengths, strict=True)):
        pages = table[i, :count] = order[taken : taken + count]
        places = (pages.long()[:, None] * rows + torch.arange(rows, device=x.k.device)).flatten()[:n]
        k_pages[places] = x.k[begin : begin + n]
        if not values_in_keys(case.d):
            v_pages[places] = x.v[begin : begin + n]
        taken, begin = taken + count, begin + n
    used = torch.tensor(case.lengths, dtype=torch.int32, device=x.k.device)
    return Paged(*(t.unflatten(0, (-1, rows)) for t in (k_pages, v_pages)), table, used)


def calls_of(case: Case, x: Tensors) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[int, Paged]]:
    """Returns the calls to compare, by name, and the pools; all give the same but for the order of sums."""
    pools = {rows: in_pages(case, x, rows) for rows in PAGES}
    calls = {"unpaged": unpaged(case, x)} | {f"{n}": partial(p.call, case, x.q) for n, p in pools.items()}
    if case.has_8_bits:
        pool = pools[PAGES[0]]
        calls[EIGHT_BITS] = partial(pool._replace(k=pool.k.to(E4M3), v=pool.v.to(E4M3)).call, case, x.q)
    return calls, pools


def appending_us(case: Case, x: Tensors, pool: Paged) -> tuple[float, float]:
    """Returns µs of the GPU that appending takes in a row of such calls, and those that it adds to a call of attention."""
    new = [
        t[x.offsets[1:].long() - 1][:, None].contiguous() for t in (x.k, x.v)
    ]  # the last key of each sequence, again
    if values_in_keys(case.d):
        new[1] = new[0][..., : x.v.shape[-1]]
    before = pool._replace(used=pool.used - 1)
    alone = partial(torch.ops.ffpa_attn.append_to_cache, *new, pool.k, pool.v, before.used, pool.table, None)
    times = [queued_us(call) for call in (alone, partial(before.call, case, x.q, *new), partial(pool.call, case, x.q))]
    return times[0], times[1] - times[2]


def measure(case: Case, timer: Timer, iters: int, read_gb_per_s: float) -> dict:
    x = make_tensors(case, "cuda")
    calls, pools = calls_of(case, x)
    outs = {name: call() for name, call in calls.items()}
    for name, out in outs.items():
        pairs = zip(out, outs["unpaged"], strict=True)  # by sequence: all together in float32 may be too much
        error = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
        assert error < 0.05, f"{case}: {name} is off by {error}"
    del outs
    times: dict[str, list[float]] = {}
    subjects = {name: partial(timer.milliseconds, call) for name, call in calls.items()}
    measure_in_turn(subjects, iters, times, lambda name: None, settle=case.kind != "decoding")
    ms = {name: median(of) for name, of in times.items()}
    found = {"case": str(case), **case._asdict(), "ms": ms, "ratios": {n: ms["unpaged"] / ms[n] for n in ms}}
    if case.has_8_bits:
        found["ratios"][EIGHT_BITS] = ms[f"{PAGES[0]}"] / ms[EIGHT_BITS]
    if case.kind != "decoding":
        return found | {"tflops": {name: case.flops / t * 1e-9 for name, t in ms.items()}}
    speeds = {name: case.bytes_of_keys / (2 if name == EIGHT_BITS else 1) / t * 1e-6 for name, t in ms.items()}
    found |= {"gb_per_s": speeds, "of_read": {name: speed / read_gb_per_s for name, speed in speeds.items()}}
    alone, added = appending_us(case, x, pools[PAGES[0]])
    return found | {"append_us": alone, "append_adds_us": added}


HEADER = f"| | unpaged | {' | '.join(f'pages of {n} | ratio' for n in PAGES)} | 8 bits | ratio | appending, µs: alone | in a call |"


def row(found: dict) -> str:
    """Returns a row of the table, of times and speeds."""

    def cell(name: str) -> str:
        if "tflops" in found:
            return f"{found['ms'][name]:.2f} ms, {found['tflops'][name]:.0f} T"
        speed = f"{found['gb_per_s'][name]:.0f} GB/s ({found['of_read'][name]:.2f} of a read)"
        return f"{found['ms'][name] * 1e3:.0f} µs, {speed}"

    paged = " | ".join(f"{cell(f'{n}')} | {found['ratios'][f'{n}']:.2f}" for n in PAGES)
    of_8_bits = (cell(EIGHT_BITS), f"{found['ratios'][EIGHT_BITS]:.2f}") if EIGHT_BITS in found["ms"] else ("", "")
    appended = (f"{found[name]:.1f}" if name in found else "" for name in ("append_us", "append_adds_us"))
    return f"| {found['case']} | {cell('unpaged')} | {paged} | {' | '.join((*of_8_bits, *appended))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes and few calls: shows that it works")
    parser.add_argument("--kind", choices=KINDS, action="append", help="all if not given")
    parser.add_argument("--d", type=int, choices=HEADS, action="append", help="all if not given; 576 is MLA")
    parser.add_argument("--iters", type=int, help="calls of each, 15, or 3 if quick")
    parser.add_argument("--write", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    env.let_stdout_write_anything()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure")
    timer, source = Timer("cuda"), torch.ones(READ_BYTES // 4, device="cuda")
    times = [timer.milliseconds(source.sum) for _ in range(9)]
    read, source = READ_BYTES / median(times) * 1e-6, None
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16; a read alone reaches {read:.0f} GB/s\n")
    print(HEADER, f"|{'---|' * HEADER.count(' |')}", sep="\n")
    rows = []
    memory = torch.cuda.get_device_properties(0).total_memory
    for case in cases(args.kind or KINDS, args.d or HEADS, args.quick):
        if COPIES * case.bytes_of_keys > memory:
            continue
        rows.append(measure(case, timer, args.iters or (3 if args.quick else 15), read))
        print(row(rows[-1]), flush=True)
        torch.cuda.empty_cache()
        if args.write:
            about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "read_gb_per_s": read}
            args.write.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
