"""The one timer: single calls between device events with a cold L2 cache, all subjects in turn, round by round."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

import torch

_LONGEST_WAIT = 2e-3
_CYCLES_PER_SECOND = 2e9  # at least the clock of any GPU


class Timer:
    def __init__(self, device: str):
        self.on_gpu = device == "cuda"
        if self.on_gpu:
            # Writing twice the L2 cache evicts what the last call left there.
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self.evictor = torch.empty(max(2 * cache, 64 << 20), dtype=torch.int8, device=device)
            self.host_seconds = WeakKeyDictionary()  # host time of each call's last launch

    def milliseconds(self, call: Callable[[], object]) -> float:
        if not self.on_gpu:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.evictor.zero_()
        # The GPU waits while the host launches the call, twice as long as that took last time: no launch gap is timed.
        wait = min(2 * self.host_seconds.get(call, _LONGEST_WAIT), _LONGEST_WAIT)
        torch.cuda._sleep(int(wait * _CYCLES_PER_SECOND))
        start.record()
        began = time.perf_counter()
        call()
        self.host_seconds[call] = time.perf_counter() - began
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


_CALLS_OF_A_TURN = 3
_SETTLED_AFTER = 50.0  # ms


def measure_in_turn(
    subjects: Mapping[str, Callable[[], float]],
    iters: int,
    times: dict[str, list[float]],
    on_step: Callable[[str], None],
    settle: bool,
    on_failure: Callable[[str, Exception], None] | None = None,
) -> None:
    """Appends `iters` times in ms per subject to `times`: every round gives each subject a turn of a few calls.

    Each round after the first has another order, so that drifting clocks hit all of them alike. What ran before decides the
    clock that a subject finds (after a large matrix product it is 10% slower): with `settle`, a turn begins with calls that
    do not count. Times are appended as they come: after an interrupt, what was measured is there. A subject that raises has
    no times and no further turn, where on_failure takes the error.
    """

    def turn(name: str, calls: int) -> None:
        unsettled = _SETTLED_AFTER if settle else 0.0
        while unsettled > 0:
            unsettled -= subjects[name]()
        for _ in range(calls):
            ms = subjects[name]()
            times.setdefault(name, []).append(ms)

    names = list(subjects)
    for done in range(0, iters, _CALLS_OF_A_TURN):
        for name in tuple(names):
            on_step(name)
            try:
                turn(name, min(_CALLS_OF_A_TURN, iters - done))
            except Exception as error:
                if on_failure is None:
                    raise
                names.remove(name)
                times.pop(name, None)
                on_failure(name, error)
        random.shuffle(names)


def peak_bytes(call: Callable[[], object], device: str) -> int | None:
    """Returns the device memory that a call takes beyond what was there, its result included; None on the CPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
