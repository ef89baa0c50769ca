"""Measures one workload: every provider is checked, warmed up, then timed in turn with the ceilings."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from ceilings import CeilingCalls
from chip import chip_uses
from console import ends
from emulation import Emulation
from ffpa_attn.building.toolchain import BuildError
from provider import SDPA_TAG, Provider, Unavailable
from providers import PEERS, our_providers, sdpa
from pypi import BACKENDS, PypiPeer
from record import Result, Row, clocks
from timing import Timer, measure_in_turn, peak_bytes
from truth import Truth, Verdict
from workload import Inputs, Workload, make_inputs


@dataclass(frozen=True)
class Settings:
    warmup: int = 1
    iters: int = 5
    seed: int = 0
    ones: tuple[str, ...] = ()  # those of "q", "k", "v" that are all ones where timed
    peers: tuple[str, ...] = ()  # names in providers.PEERS
    tags: tuple[str, ...] = ()  # parts of tags: only rows with one of them; empty = all
    pypi: Path | None = None  # a folder that holds the ffpa-attn of PyPI
    debug: bool = False  # let a provider's exception end the run
    arch: str = "sm_90"  # the GPU's architecture, or the one whose kernels the emulator runs
    whole_outputs: bool = False  # keep whole outputs, not only what a line shows
    check: bool = False  # make it a failure when something cannot be proven
    emulation: bool = True  # run the levels in the emulator if there is no GPU
    build: bool = False  # compile the kernels of the levels afresh


@dataclass
class _Ready:
    """A provider that ran."""

    provider: Provider
    once: Callable[[], float]  # makes one timed call and returns its ms
    verdict: Verdict
    peak: int | None
    output: torch.Tensor  # the part that is shown, on the CPU


@dataclass(frozen=True)
class Measured:
    result: Result | None  # None: the run ended before anything was timed
    outputs: dict[str, torch.Tensor]  # out or dq of the timed inputs, or its ends, by tag
    failed: list[str]  # rows of ours that raised, and whatever ended the measurement
    interrupted: bool


class Bench:
    def __init__(self, device: str, settings: Settings):
        self.device, self.settings = device, settings
        self.timer = Timer(device)
        self.ceilings = CeilingCalls(device)
        self.pypi = [PypiPeer(settings.pypi, device, backend) for backend in BACKENDS if settings.pypi]

    def run(self, w: Workload, full: Workload, on_progress: Callable[[float, str], None]) -> Measured:
        """Measures `w`, which this machine can run, for `full` as asked; calls on_progress(share done, next)."""
        times: dict[str, list[float]] = {}
        ready: list[_Ready] = []
        skipped: list[tuple[str, str]] = []
        failed: list[str] = []
        interrupted, chip = False, []
        try:
            self._prepare(w, ready, skipped, failed, lambda tag: on_progress(0.0, f"{w}: preparing {tag}"))
            self._measure(w, ready, times, skipped, failed, lambda share, tag: on_progress(share, f"{w}: timing {tag}"))
            self._look_at_the_chip(
                w, full, chip, skipped, failed, lambda tag: on_progress(1.0, f"{w}: emulating {tag}")
            )
        except KeyboardInterrupt:
            interrupted = True
        except Exception as error:  # no memory for the inputs, say; what is measured of this run must not be lost
            if self.settings.debug:
                raise
            failed.append(f"{w}: {_first_line(error)}")
        measured = [one for one in ready if one.provider.tag in times]
        outputs = {one.provider.tag: one.output for one in measured}
        if not ((measured or chip) and set(self.ceilings.calls) <= set(times)):
            return Measured(None, {}, failed, interrupted)
        ceilings = self.ceilings.from_times(times)
        rows = [Row.of(one.provider, w, times[one.provider.tag], ceilings, one.peak, one.verdict) for one in measured]
        now = clocks() if self.device == "cuda" else None
        return Measured(Result(w, ceilings, rows, skipped, chip, now), outputs, failed, interrupted)

    def _providers(self, w: Workload, x: Inputs, skipped: list[tuple[str, str]], failed: list[str]) -> list[Provider]:
        chosen, ours = [], []
        for name, make in (("sdpa", sdpa), *((name, PEERS[name]) for name in self.settings.peers)):
            try:
                chosen.append(make(w, x))
            except Unavailable as reason:
                skipped.append((name, str(reason)))
        try:
            ours += our_providers(w, x, skipped)
        except (NotImplementedError, ValueError) as refused:
            failed.append(f"ffpa on {w}: {_first_line(refused)}")
        before = 1 if chosen and chosen[0].tag == SDPA_TAG else 0
        chosen[before:before] = ours
        return [p for p in chosen if p.tag == SDPA_TAG or self._is_asked_for(p.tag)]

    def _is_asked_for(self, tag: str) -> bool:
        return not self.settings.tags or any(part in tag for part in self.settings.tags)

    def _prepare(self, w, ready, skipped, failed, on_step) -> None:
        x = make_inputs(w, self.device, self.settings.seed, self.settings.ones)
        truth = Truth(w, self.device, self.settings.seed)
        for provider in self._providers(w, x, skipped, failed):
            on_step(provider.tag)
            if provider.fallback and self.settings.check:
                failed.append(f"{provider.tag} on {w} {provider.fallback}")
            try:
                ready.append(self._ready(provider, w, x, truth))
            except Exception as error:
                self._note(provider.tag, error, skipped)
                if provider.is_ffpa:
                    failed.append(f"{provider.tag} on {w}: {_first_line(error)}")
                self._free()
        del truth
        self._free()
        for peer in self.pypi:
            if self._is_asked_for(peer.tag):
                on_step(peer.tag)
                try:
                    ready.append(self._ready_elsewhere(peer, w))
                except Exception as error:
                    self._note(peer.tag, error, skipped)

    def _note(self, tag: str, error: Exception, skipped: list[tuple[str, str]]) -> None:
        if self.settings.debug:
            raise error
        skipped.append((tag.strip("()"), _first_line(error)))

    def _ready(self, provider: Provider, w: Workload, x: Inputs, truth: Truth) -> _Ready:
        verdict = truth.verdict(lambda inputs: provider.prepare(w, inputs)(), provider.sums)
        call = provider.prepare(w, x)
        output = call()[0]
        output = (output if self.settings.whole_outputs else ends(output)).cpu()
        for _ in range(self.settings.warmup - 1):
            call()
        return _Ready(provider, lambda: self.timer.milliseconds(call), verdict, peak_bytes(call, self.device), output)

    def _ready_elsewhere(self, peer: PypiPeer, w: Workload) -> _Ready:
        told = peer.prepare(w, self.settings.seed, self.settings.ones, self.settings.warmup)
        provider = Provider(peer.tag, told["kernel"], None)
        output = torch.tensor(told["output"])
        return _Ready(provider, peer.milliseconds, Verdict(*told["verdict"]), told["peak_bytes"], output)

    def _measure(self, w, ready: list[_Ready], times: dict[str, list[float]], skipped, failed, on_share) -> None:
        subjects = {}
        for name, call in self.ceilings.calls.items():
            subjects[name] = lambda call=call: self.timer.milliseconds(call)
        subjects |= {one.provider.tag: one.once for one in ready}
        total = len(subjects) * self.settings.iters

        def on_step(name: str) -> None:
            on_share(sum(map(len, times.values())) / total, name)

        def on_failure(name: str, error: Exception) -> None:
            self._note(name, error, skipped)
            if name not in peers:
                failed.append(f"{name} on {w}: {_first_line(error)}")

        peers = {one.provider.tag for one in ready if not one.provider.is_ffpa}
        measure_in_turn(subjects, self.settings.iters, times, on_step, self.timer.on_gpu, on_failure)

    def _look_at_the_chip(self, w, full, chip, skipped, failed, on_step) -> None:
        """Appends what the levels take of the chip; without a GPU they run in the emulator."""
        if self.device == "cpu" and not self.settings.emulation:
            return
        emulation = None
        for tag, use, plan in chip_uses(full, self.settings.arch, self.settings.tags, self.settings.build):
            if use is None:
                skipped.append((tag.strip("()"), plan))
                continue
            if self.device == "cpu":
                on_step(tag)
                try:
                    emulation = emulation or Emulation(w, self.settings.arch, self.settings.seed)
                    use = emulation.run(use, plan)
                except BuildError as error:
                    if self.settings.check:
                        failed.append(f"the emulator: {_first_line(error)}")
                    self._note("emulator", error, skipped)
                    return
                except RuntimeError as error:  # a race, say
                    if self.settings.debug:
                        raise
                    failed.append(f"{tag} in the emulator on {w}: {_first_line(error)}")
                    continue
            chip.append(use)

    def _free(self) -> None:
        """Frees what a failed provider or a finished phase left: the next one must not run out of memory for it."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
