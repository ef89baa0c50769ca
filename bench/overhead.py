"""Measures what a call of ffpa costs on the host beside the kernel: `python bench/overhead.py` prints a table.

The kernels are replaced by a function that does nothing. What is left is reading arguments, checks, the choice,
dispatch and autograd; the allocation of out and lse, which any attention pays, is measured alone and subtracted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
from ffpa_attn import env, ffpa
from ffpa_attn.operators import ops

_SHAPE = (1, 2, 16, 64)
_TARGETS = {"no grad": 20.0, "inference mode": 20.0, "with grad": 40.0}  # µs


class Overhead(NamedTuple):
    mode: str
    call_us: float  # the least of the rounds: whatever else runs here only adds
    allocation_us: float
    target_us: float

    @property
    def host_us(self) -> float:
        return self.call_us - self.allocation_us


@contextmanager
def _no_kernels() -> Iterator[None]:
    run, ops._run = ops._run, lambda *args: None
    try:
        yield
    finally:
        ops._run = run


def _microseconds(call: Callable[[], object], rounds: int, calls: int) -> float:
    times = []
    for _ in range(rounds + 1):  # the first round warms up
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return min(times[1:])


def measure(device: str, rounds: int = 15, calls: int = 500) -> list[Overhead]:
    found = []
    for mode, target in _TARGETS.items():
        with_grad = mode == "with grad"
        q, k, v = (torch.randn(_SHAPE, dtype=torch.bfloat16, device=device, requires_grad=with_grad) for _ in range(3))
        lse_shape = _SHAPE[:-1] if with_grad else (0,)
        data = q.detach()

        def allocate(data=data, lse_shape=lse_shape):
            return data.new_empty(_SHAPE), data.new_empty(lse_shape, dtype=torch.float32)

        context = {"no grad": torch.no_grad, "inference mode": torch.inference_mode}.get(mode, nullcontext)
        with _no_kernels(), context():
            call_us = _microseconds(lambda q=q, k=k, v=v: ffpa(q, k, v), rounds, calls)
            found.append(Overhead(mode, call_us, _microseconds(allocate, rounds, calls), target))
    return found


def table(found: list[Overhead]) -> str:
    lines = [
        "| ffpa(q, k, v) | call, µs | out and lse, µs | host overhead, µs | target, µs |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {x.mode} | {x.call_us:.1f} | {x.allocation_us:.1f} | {x.host_us:.1f} | {x.target_us:.0f} |" for x in found
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    env.let_stdout_write_anything()
    print(table(measure("cuda" if torch.cuda.is_available() else "cpu")))
