"""The one timer: single calls between device events with a cold L2 cache, all subjects in turn, round by round."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

import torch


class Timer:
    def __init__(self, device: str):
        self.on_gpu = device == "cuda"
        if self.on_gpu:
            # Writing twice the L2 cache evicts what the last call left there. It also keeps the GPU busy while the
            # host launches the next call, so that a call's time holds no launch gap.
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self.evictor = torch.empty(max(2 * cache, 64 << 20), dtype=torch.int8, device=device)

    def milliseconds(self, call: Callable[[], object]) -> float:
        if not self.on_gpu:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.evictor.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def measure_in_turn(
    subjects: Mapping[str, Callable[[], float]],
    iters: int,
    times: dict[str, list[float]],
    on_step: Callable[[str], None],
) -> None:
    """Appends `iters` times in ms per subject to `times`: every round runs each subject once.

    Each round has another order, so that drifting clocks hit all of them alike, and none always follows the same one: a
    subject that draws little power leaves the next one a faster clock. Times are appended as they come: after an
    interrupt, what was measured is there.
    """
    names = list(subjects)
    shuffle = random.Random(0).shuffle
    for _ in range(iters):
        for name in names:
            on_step(name)
            ms = subjects[name]()
            times.setdefault(name, []).append(ms)
        shuffle(names)


def peak_bytes(call: Callable[[], object], device: str) -> int | None:
    """Device memory that a call takes beyond what was there before, its result included; None on the CPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
