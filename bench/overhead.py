"""Measures what calls cost beside PyTorch's own: `python bench/overhead.py` prints tables, and `--quick` shows that it can.

Host time is that of a loop that does not wait for the GPU, ours and SDPA's in turn; without a GPU the kernels are
replaced by a function that does nothing. On a GPU two more tables have calls of short sequences: their time on the GPU
behind a full queue, which hides the host, and by the wall, where each call begins when the host is done with the one
before.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
import torch.nn.functional as F
from ffpa_attn import env, ffpa, ffpa_varlen, ffpa_with_kvcache
from ffpa_attn.backends import append
from ffpa_attn.backends.reference_plan import ReferencePlan
from ffpa_attn.backends.sdpa import SdpaPlan
from ffpa_attn.checks import memory_checks
from ffpa_attn.operators import again
from torch.nn.attention import SDPBackend, sdpa_kernel

_MODES = {"no grad": torch.no_grad, "inference mode": torch.inference_mode, "forward with grad": nullcontext}
_HEAD_DIMS = (64, 128, 256, 512)
_SHORT = [(1, 32, n, d, causal) for n in (256, 512, 1024) for d in (64, 128) for causal in (False, True)]
_SHORT += [(64, 16, n, d, False) for n in (64, 128) for d in _HEAD_DIMS]
_QUEUED = 20  # calls behind a full queue
_CYCLES_TO_FILL = 20_000_000  # cycles for which the GPU waits while the queue fills: some 12 ms


class HostTime(NamedTuple):
    mode: str
    d: int
    ours_us: float
    sdpa_us: float | None  # None where PyTorch has no such call


class Short(NamedTuple):
    """It holds microseconds of a call, ours and those of SDPA's fastest backend."""

    shape: str
    direction: str
    queued: tuple[float, float]
    wall: tuple[float, float]


@contextmanager
def _no_kernels() -> Iterator[None]:
    """Makes the CPU's plans do nothing and leaves tables and lengths unread, as they are on a GPU. Kinds of calls that were
    seen within are forgotten at the end: they hold these plans.
    """
    kernels = [
        (plan, name)
        for plan in (ReferencePlan, SdpaPlan)
        for name in ("forward", "backward", "fresh")
        if hasattr(plan, name)
    ]
    with ExitStack() as patches:
        patches.callback(again.forget_all)
        for plan, name in kernels:
            patches.enter_context(mock.patch.object(plan, name, lambda *args, **more: None))
        patches.enter_context(mock.patch.object(append, "append", lambda *args: None))
        patches.enter_context(mock.patch.object(memory_checks, "values_are_read", lambda *args: False))
        again.forget_all()
        yield


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _warm_up(device: str) -> None:
    """Works until the GPU's clocks are up: a host soon waits for launches that an idle GPU runs at a fifth of its speed."""
    if device == "cuda":
        x = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
        for _ in range(1000):
            x @ x


def host_us(of: Sequence[Callable[[], object]], device: str, rounds: int, calls: int) -> list[float]:
    """Returns the median over rounds of each one's time on the host. They take turns; the first round warms up."""
    times = [[] for _ in of]
    _warm_up(device)
    for _ in range(rounds + 1):
        for call, found in zip(of, times, strict=True):
            _wait(device)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            found.append((time.perf_counter() - start) / calls * 1e6)
    _wait(device)
    return [statistics.median(found[1:]) for found in times]


def _gradients(function: Callable, q, k, v, grad) -> None:
    torch.autograd.grad(function(q, k, v), (q, k, v), grad)


def measure(device: str, rounds: int, calls: int, n: int = 128, head_dims=_HEAD_DIMS) -> list[HostTime]:
    found = []
    for d in head_dims:
        plain = [torch.randn(1, 8, n, d, dtype=torch.bfloat16, device=device) for _ in range(3)]
        recorded = [x.clone().requires_grad_() for x in plain]
        grad, sdpa = torch.randn_like(plain[0]), F.scaled_dot_product_attention
        for mode, context in _MODES.items():
            x = recorded if "grad" in mode and mode != "no grad" else plain
            with context():
                times = host_us([partial(f, *x) for f in (ffpa, sdpa)], device, rounds, calls)
            found.append(HostTime(mode, d, *times))
        steps = [partial(_gradients, f, *recorded, grad) for f in (ffpa, sdpa)]
        both = host_us(steps, device, rounds, calls // 4)
        found.append(HostTime("forward and backward", d, *both))
        packed = [x[0].transpose(0, 1).contiguous() for x in plain]
        offsets = torch.tensor([0, n // 2, n], dtype=torch.int32, device=device)
        with torch.no_grad():
            (us,) = host_us([partial(ffpa_varlen, *packed, offsets, offsets, n, n)], device, rounds, calls)
            found.append(HostTime("packed, no grad", d, us, None))
            in_pages = _in_pages(d, device)
            times = host_us(list(in_pages.values()), device, rounds, calls)
        found += [HostTime(mode, d, us, None) for mode, us in zip(in_pages, times, strict=True)]
    return found


def _in_pages(d: int, device: str) -> dict[str, Callable]:
    """Returns calls that decode a row of each of 8 sequences, whose keys are in pages."""
    pools = [torch.zeros(64, 64, 8, d, dtype=torch.bfloat16, device=device) for _ in range(2)]
    in_8_bits = [x.to(torch.float8_e4m3fn) for x in pools]
    q = torch.zeros(8, 1, 8, d, dtype=torch.bfloat16, device=device)
    offsets, table = (torch.arange(n, dtype=torch.int32, device=device) for n in (9, 64))
    lengths, scales = torch.full_like(offsets[1:], 100), torch.ones(2, 1, device=device).unbind(0)
    where, packed = {"block_table": table.view(8, 8)}, (q[:, 0], *pools, offsets, None, 1, 512)
    of_varlen = partial(ffpa_varlen, causal=True, **where, seqused_k=lengths)
    of_cache = partial(ffpa_with_kvcache, causal=True, **where, cache_seqlens=lengths)
    return {
        "pages, no grad": partial(of_varlen, *packed),
        "pages, into `out`": partial(of_varlen, *packed, out=torch.empty_like(q[:, 0])),
        "8-bit pages, no grad": partial(
            of_varlen, q[:, 0], *in_8_bits, *packed[3:], k_scale=scales[0], v_scale=scales[1]
        ),
        "new rows and pages, no grad": partial(of_cache, q, *pools, q.clone(), q.clone()),
    }


def queued_us(call: Callable[[], object], rounds: int = 5) -> float:
    """Returns the median of a call's time on a GPU that never waits for the host."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        torch.cuda._sleep(_CYCLES_TO_FILL)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_QUEUED):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / _QUEUED * 1e3)
    return statistics.median(times[1:])


def _fastest_sdpa(q, k, v, causal: bool) -> Callable:
    """Returns SDPA on the backend whose forward is the fastest for these tensors."""
    found = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):

        def attention(q, k, v, backend=backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        try:
            with torch.no_grad():
                found.append((queued_us(lambda a=attention: a(q, k, v), rounds=2), len(found), attention))
        except RuntimeError:  # the backend does not run these
            continue
    return min(found)[2]


def measure_short(shapes=_SHORT) -> Iterator[Short]:
    for b, h, n, d, causal in shapes:
        q, k, v = (torch.randn(b, h, n, d, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        both = (lambda q, k, v, causal=causal: ffpa(q, k, v, causal=causal), _fastest_sdpa(q, k, v, causal))
        shape = f"B={b}, H={h}, N={n}, D={d}{', causal' * causal}"
        with torch.no_grad():
            calls = [lambda f=f, x=(q, k, v): f(*x) for f in both]
            queued, wall = [*map(queued_us, calls)], host_us(calls, "cuda", 5, 50)
        yield Short(shape, "forward", tuple(queued), tuple(wall))
        x, grad = [t.requires_grad_() for t in (q, k, v)], torch.randn_like(q)
        outs = [f(*x) for f in both]
        calls = [lambda o=o, x=x, g=grad: torch.autograd.grad(o, x, g, retain_graph=True) for o in outs]
        queued, wall = [*map(queued_us, calls)], host_us(calls, "cuda", 5, 20)
        yield Short(shape, "backward", tuple(queued), tuple(wall))


def table(found: list[HostTime]) -> str:
    lines = ["| a call, B=1, H=8, bf16 | D | ffpa, µs | SDPA, µs | ratio |", "|---|---:|---:|---:|---:|"]
    for x in found:
        peer = "- | -" if x.sdpa_us is None else f"{x.sdpa_us:.1f} | {x.ours_us / x.sdpa_us:.2f}"
        lines.append(f"| {x.mode} | {x.d} | {x.ours_us:.1f} | {peer} |")
    return "\n".join(lines)


def short_table(found: list[Short]) -> str:
    lines = [
        "| short sequences, bf16 | | queued, µs: ffpa | SDPA | SDPA / ffpa | by the wall, µs: ffpa | SDPA |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for x in found:
        ours, sdpa = x.queued
        lines.append(
            f"| {x.shape} | {x.direction} | {ours:.1f} | {sdpa:.1f} | {sdpa / ours:.2f} | {x.wall[0]:.1f} | {x.wall[1]:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    env.let_stdout_write_anything()
    quick = sys.argv[1:] == ["--quick"]
    rounds, calls, head_dims = (1, 20, (64,)) if quick else (15, 200, _HEAD_DIMS)
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), table(measure("cuda", rounds, calls, head_dims=head_dims)), sep="\n\n")
        print(short_table(list(measure_short(_SHORT[:1] if quick else _SHORT))))
    else:
        with _no_kernels():
            print("No GPU: without kernels.", table(measure("cpu", rounds, calls, n=16, head_dims=(64,))), sep="\n\n")
