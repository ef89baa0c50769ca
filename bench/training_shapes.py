"""Measures forward and backward of the shapes that train: windows, packed sequences, short rows, softcaps, masks, D_v < D.

`python bench/training_shapes.py` prints a row for each case: T of the pairs that are seen (a backward counts as 2.5 forwards),
and, where a mask or a softcap is what is measured, the time of the same call without it as a part of the call's. Times are
medians of single calls with a cold L2. `--kind` and `--d` take some of the cases, `--kernels` adds the time of each kernel of a
backward, `--write` keeps the numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
from ffpa_attn import ffpa, ffpa_varlen
from flops import BACKWARD_FACTOR, visible_pairs
from timing import Timer, measure_in_turn

KINDS = ("window", "packed", "short", "softcap", "masks", "values")
MASKS = ("padding", "blocks", "random", "additive")
_PADDED = 0.75  # part of the keys that are no padding, on average
_BLOCK = 512  # rows and keys of a block of a block-structured mask
_HIDDEN = 0.3  # part of the pairs that a random mask hides


@dataclass(frozen=True)
class Case:
    kind: str
    name: str
    d: int
    lengths: tuple[int, ...]
    heads: int = 32
    heads_kv: int = 8
    d_v: int | None = None
    packed: bool = False
    causal: bool = True
    window: int | None = None
    softcap: float = 0.0
    mask: str = ""

    def __str__(self) -> str:
        dims = f"{self.d}" if self.d_v is None else f"{self.d}/{self.d_v}"
        return f"{self.name}, H={self.heads}/{self.heads_kv}, D={dims}"

    @property
    def pairs(self) -> int:
        """Counts the pairs that are seen; a mask's are all that there are."""
        hidden = (
            0 if self.window is None else sum(visible_pairs(n, max(n - self.window - 1, 0), True) for n in self.lengths)
        )
        return sum(visible_pairs(n, n, self.causal or self.window is not None) for n in self.lengths) - hidden

    @property
    def flops(self) -> float:
        return 2.0 * (self.d + (self.d_v or self.d)) * self.pairs * self.heads

    @property
    def plain(self) -> Case | None:
        """Returns the call that a call with a softcap or a mask is compared with."""
        return replace(self, softcap=0.0, mask="") if self.softcap or self.mask else None


def ragged(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Returns lengths whose logarithms are spread evenly, in random order."""
    lengths = [round(shortest * (longest / shortest) ** (i / (count - 1))) for i in range(count)]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    return tuple(lengths[i] for i in order.tolist())


def cases(quick: bool) -> Iterator[Case]:
    def n(size: int) -> int:
        return max(size // 128, 16) if quick else size

    for d in (64, 128, 256, 512, 640, 1024):
        yield Case("window", f"window {n(1024)}, N={n(32768)}", d, (n(32768),), 8, 8, window=n(1024))
    for d in (128, 256, 512, 640):
        lengths = ragged(4 if quick else 64, 16, n(3930))
        yield Case("packed", f"{len(lengths)} ragged of 16 to {max(lengths)}", d, lengths, packed=True)
    for d in (128, 256, 512):
        equal, shorter = (2, 1) if quick else (48, 63)
        yield Case("packed", f"{equal} x {n(1024)}", d, (n(1024),) * equal, packed=True)
        yield Case("packed", f"{n(16384)} + {shorter} x 64", d, (n(16384), *(64,) * shorter), packed=True)
    for size, batches, dims in (2048, (1, 4), (64, 128, 256, 512)), (512, (1, 4), (64, 128)):
        for d in dims:
            for batch in batches:
                yield Case("short", f"causal, B={batch}, N={n(size)}", d, (n(size),) * batch, heads_kv=4)
    for d in (128, 256, 512):
        yield Case("softcap", f"softcap 30, N={n(4096)}", d, (n(4096),), 16, 16, causal=False, softcap=30.0)
    for d in (128, 256, 512):
        for mask in MASKS:
            yield Case("masks", f"{mask} mask, B=2, N={n(4096)}", d, (n(4096),) * 2, 16, 16, causal=False, mask=mask)
    yield Case("values", f"causal, N={n(4096)}", 192, (n(4096),), 16, 16, d_v=128)


def make_mask(case: Case, device: str) -> torch.Tensor | None:
    batch, size = len(case.lengths), max(case.lengths)
    if case.mask == "padding":  # each batch entry has its own length
        ends = torch.linspace(2 * _PADDED - 1, 1, batch, device=device).mul(size).int()
        return (torch.arange(size, device=device) < ends[:, None])[:, None, None]
    if case.mask == "blocks":  # each block of rows sees itself and every third block
        block = torch.arange(size, device=device) // min(_BLOCK, size // 2)
        return ((block[:, None] == block) | ((block[:, None] + block) % 3 == 0))[None, None]
    if case.mask == "random":
        return torch.rand(1, 1, size, size, device=device) >= _HIDDEN
    if case.mask == "additive":
        return torch.randn(1, 1, size, size, device=device, dtype=torch.bfloat16)
    return None


def calls_of(case: Case, device: str) -> tuple[Callable[[], torch.Tensor], Callable[[], object]]:
    """Returns the forward and the backward."""
    torch.manual_seed(0)
    batch, size = len(case.lengths), max(case.lengths)

    def random(heads: int, columns: int) -> torch.Tensor:
        shape = (sum(case.lengths), heads, columns) if case.packed else (batch, heads, size, columns)
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    d_v = case.d_v or case.d
    q, k, v = random(case.heads, case.d), random(case.heads_kv, case.d), random(case.heads_kv, d_v)
    options = {"causal": case.causal and case.window is None, "softcap": case.softcap}
    if case.window is not None:
        options["window"] = (case.window, 0)
    if case.packed:
        offsets = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0)], dtype=torch.int32, device=device)
        forward = partial(ffpa_varlen, q, k, v, offsets, offsets, size, size, **options)
    else:
        forward = partial(ffpa, q, k, v, mask=make_mask(case, device), **options)
    for x in (q, k, v):
        x.requires_grad_()
    out, grad = forward(), random(case.heads, d_v)
    return partial(_without_gradients, forward), partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True)


def _without_gradients(forward: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return forward()


def kernels_of(call: Callable[[], object]) -> dict[str, float]:
    """Returns µs of each kernel of a call, the longest first."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = {event.key: event.device_time_total for event in profile.key_averages() if event.device_time_total}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def measure(case: Case, timer: Timer, iters: int, kernels: bool) -> dict:
    device = "cuda" if timer.on_gpu else "cpu"
    calls = dict(zip(("forward", "backward"), calls_of(case, device), strict=True))
    if case.plain:
        calls |= dict(zip(("plain forward", "plain backward"), calls_of(case.plain, device), strict=True))
    subjects = {name: partial(timer.milliseconds, call) for name, call in calls.items()}
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {}
    measure_in_turn(subjects, iters, times, lambda name: None, settle=False)
    ms = {name: median(of) for name, of in times.items()}
    tflops = {name: case.flops * (BACKWARD_FACTOR if "backward" in name else 1) / t * 1e-9 for name, t in ms.items()}
    found = {"case": str(case), **asdict(case), "ms": ms, "tflops": tflops}
    if case.plain:
        found["of_plain"] = {name: ms[f"plain {name}"] / ms[name] for name in ("forward", "backward")}
    if kernels and timer.on_gpu:
        found["kernels"] = kernels_of(calls["backward"])
    return found


def row(found: dict) -> str:
    def cell(name: str) -> str:
        text = f"{found['ms'][name]:.3f} ms, {found['tflops'][name]:.0f} T"
        return f"{text}, {found['of_plain'][name]:.2f} of plain" if "of_plain" in found else text

    return f"| {found['case']} | {cell('forward')} | {cell('backward')} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, nargs="*", default=KINDS)
    parser.add_argument("--d", type=int, nargs="*", help="head dims")
    parser.add_argument("--iters", type=int, default=5)
    parser.add_argument("--kernels", action="store_true", help="print the time of each kernel of a backward")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to show on any machine that it runs")
    parser.add_argument("--write", type=Path, help="keep the numbers in this file")
    args = parser.parse_args()
    timer = Timer("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if timer.on_gpu else "CPU"
    print(f"{name}, torch {torch.__version__}\n\n| | forward | backward |\n|---|---|---|")
    found = []
    for case in cases(args.quick):
        if case.kind not in args.kind or (args.d and case.d not in args.d):
            continue
        found.append(measure(case, timer, args.iters, args.kernels))
        print(row(found[-1]), flush=True)
        for kernel, us in list(found[-1].get("kernels", {}).items())[:8]:
            print(f"    {us:9.1f} us  {kernel[:100]}", flush=True)
        if args.write:
            args.write.write_text(json.dumps({"device": name, "cases": found}, indent=1))


if __name__ == "__main__":
    main()
