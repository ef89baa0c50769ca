"""Checks random problems over every argument against float64: `python tests/campaign.py --seconds 300`, many processes.

A problem that comes out wrong is made smaller and printed as a test; `--only SEED` runs one again. Exits with 1 where
any was wrong, where a process died or hung, and where too many calls were refused. `docs/design/campaign.md` says what
it covers.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

_HERE = Path(__file__).resolve().parent
for _place in (_HERE.parent / "ffpa", _HERE / "backends", _HERE):
    sys.path.insert(0, str(_place))

from campaign_draw import generate  # noqa: E402
from campaign_families import SEEDS as _RUN  # noqa: E402  (so many in a row belong to one process: they share kernels)
from campaign_problems import DEVICES, KINDS  # noqa: E402

_SEEDS_OF_ONE = 10_000_000  # problems that belong to one --seed
_MOST_REFUSED = 0.3
_SHRINK_SECONDS = 20.0
_START_SECONDS = 300.0  # time that imports may take, beyond the patience with a problem
_MOST_BYTES_KEPT = 3 << 30  # bytes of a GPU that a process may keep between problems


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--problems", type=int, default=None, help="how many at most")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="another one gives other problems")
    parser.add_argument("--kind", choices=KINDS, default=None, help="of these alone")
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--only", type=int, default=None, metavar="SEED", help="the problem of this seed alone")
    parser.add_argument("--shrink", type=int, default=1, help="how many wrong problems a process makes smaller")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a problem counts as hung")
    parser.add_argument("--json", type=Path, default=None, help="where to write the summary")
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- one process ----


def _set_up(device: str) -> None:
    """Prepares the process for a device, before anything imports Triton."""
    if device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    from campaign_check import clean_environment

    clean_environment()


def _is_fatal(error: BaseException) -> bool:
    words = ("CUDA error", "device-side assert", "Triton Error [CUDA]", "illegal memory access", "misaligned address")
    return "AcceleratorError" in type(error).__name__ or any(said in str(error) for said in words)


def _leave_memory_to_others() -> None:
    import torch

    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _MOST_BYTES_KEPT:
        torch.cuda.empty_cache()


def outcome(p) -> tuple[str, str]:
    """Returns ("right" | "refused" | "wrong" | "fatal", why)."""
    import torch
    from campaign_check import Refused, Wrong, check

    try:
        check(p)
    except Refused as error:
        return "refused", str(error)
    except torch.OutOfMemoryError as error:  # other processes have the memory
        return "refused", f"out of memory: {str(error)[:60]}"
    except Exception as error:
        where = "" if isinstance(error, Wrong) else "\n" + "".join(traceback.format_tb(error.__traceback__)[-2:])
        return "fatal" if _is_fatal(error) else "wrong", f"{type(error).__name__}: {error}{where}"
    return "right", ""


def _work(args: argparse.Namespace) -> int:
    """Checks problem after problem; says of each that it begins, and how it ended, in lines of JSON."""
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints goes to stderr
    _set_up(args.device)

    def tell(**what) -> None:
        told.write(json.dumps(what) + "\n")

    index, shrunk = args.first, 0
    while index < _SEEDS_OF_ONE:
        seed = args.seed * _SEEDS_OF_ONE + index
        tell(begins=seed, index=index)
        p = generate(seed, args.device, args.kind)
        start = time.monotonic()
        ended, why = outcome(p)
        seconds = time.monotonic() - start
        _leave_memory_to_others()
        source = repr(p)
        if ended == "wrong" and shrunk < args.shrink:
            shrunk += 1
            from campaign_shrink import as_test, shrink

            tell(shrinks=seed, why=why[:2000], source=source)
            smaller, ended, why = shrink(p, why, outcome, _SHRINK_SECONDS)
            source = as_test(smaller, why)
        tell(
            seed=seed,
            ended=ended,
            why=why[:2000],
            source=source if ended in ("wrong", "fatal") else "",
            kind=_kind(p),
            two_tiles=p.has_two_tiles(),
            seconds=seconds,
        )
        if ended == "fatal":
            return 3
        index = _next(index, args.processes)
    return 0


def _next(index: int, processes: int) -> int:
    """Returns the next index of a process's problems: the rest of a run, then that run whose turn it is."""
    index += 1
    return index if index % _RUN else index + (processes - 1) * _RUN


def _kind(p) -> str:
    form = "pages" if p.pages else "packed" if p.packed else "dense"
    mask = (
        "-"
        if p.mask is None
        else "bool"
        if p.mask.dtype == "bool"
        else "finite"
        if p.mask.hidden > -float("inf")
        else "additive"
    )
    of_heads = " sinks" * (p.sinks is not None) + " max-logits" * p.max_logits
    pairs = p.pairs()
    size = next((name for name, most in (("0", 0), ("<1e4", 1e4), ("<1e6", 1e6)) if pairs <= most), "<1e8")
    what = "fp8" if p.dtype.startswith("e") else "backward" if p.backward else "forward"
    return f"{what} {p.backend} {form} mask:{mask}{of_heads} pairs:{size}"


# ---- all of them ----


class Campaign:
    """Runs processes, which are started again where they die or hang."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.start = time.monotonic()
        self.counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        self.found: list[dict] = []
        self.two_tiles = 0
        self.refusals: collections.Counter = collections.Counter()
        self.slowest: list[tuple[float, int]] = []
        # This counts the problems that each worker made smaller, however often its process is started.
        self.shrunk: collections.Counter = collections.Counter()
        self.lock = threading.Lock()

    @property
    def problems(self) -> int:
        return sum(sum(by.values()) for by in self.counts.values())

    def total(self, ended: str) -> int:
        return sum(by[ended] for by in self.counts.values())

    def over(self) -> bool:
        enough = self.args.problems is not None and self.problems >= self.args.problems
        return enough or time.monotonic() - self.start > self.args.seconds

    def run(self) -> None:
        threads = [threading.Thread(target=self._keep_one, args=(i,)) for i in range(self.args.processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _keep_one(self, worker: int) -> None:
        first = worker * _RUN
        while not self.over():
            first = self._one_process(worker, first)

    def _one_process(self, worker: int, first: int) -> int:
        """Runs one process, and returns where the next is to go on."""
        own = {"--worker": worker, "--first": first, "--shrink": self.args.shrink - self.shrunk[worker]}
        own = [x for name, value in own.items() for x in (name, str(value))]
        command = [sys.executable, str(_HERE / "campaign.py"), *sys.argv[1:], *own]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        at = {"seed": None, "index": None, "since": time.monotonic() + _START_SECONDS, "shrinks": False}
        killed = []

        def watch() -> None:
            while process.poll() is None:
                time.sleep(0.2)
                limit = self.args.timeout + (2 * _SHRINK_SECONDS if at["shrinks"] else 0)
                hung = time.monotonic() - at["since"] > limit
                if self.over() or hung:
                    killed.append("hung" if hung else "over")
                    process.kill()
                    return

        watcher = threading.Thread(target=watch)
        watcher.start()
        for line in process.stdout:
            try:
                told = json.loads(line)
            except ValueError:
                continue
            if "begins" in told:
                at |= {"seed": told["begins"], "index": told["index"], "since": time.monotonic(), "shrinks": False}
            elif "shrinks" in told:
                at["shrinks"] = True
                self.shrunk[worker] += 1
                print(f"\nseed {told['shrinks']} is made smaller: {told['why']}\n{told['source']}", flush=True)
            else:
                self._note(told)
                at["seed"] = None
        process.wait()
        watcher.join()
        if at["seed"] is not None and killed != ["over"]:
            p = generate(at["seed"], self.args.device, self.args.kind)
            why = "it hung" if killed else f"its process died with {process.returncode}"
            rest = {"why": why, "source": repr(p), "kind": _kind(p), "two_tiles": p.has_two_tiles(), "seconds": 0.0}
            self._note({"seed": at["seed"], "ended": "fatal", **rest})
        return first if at["index"] is None else _next(at["index"], self.args.processes)

    def _note(self, told: dict) -> None:
        with self.lock:
            self.counts[told["kind"]][told["ended"]] += 1
            self.two_tiles += told["two_tiles"]
            self.slowest = sorted([*self.slowest, (told["seconds"], told["seed"])], reverse=True)[:10]
            if told["ended"] == "refused":
                self.refusals[told["why"][:160].split("; ")[0]] += 1
            elif told["ended"] != "right":
                self.found.append(told)
                print(
                    f"\n{told['ended'].upper()} seed {told['seed']} ({told['kind']}): {told['why']}\n{told['source']}",
                    flush=True,
                )

    def summary(self) -> dict:
        seconds = time.monotonic() - self.start
        return {
            "problems": self.problems,
            "right": self.total("right"),
            "two_tiles": self.two_tiles,
            "refused": self.total("refused"),
            "wrong": len(self.found),
            "seconds": round(seconds, 1),
            "per_second": round(self.problems / seconds, 2),
            "kinds": {kind: dict(by) for kind, by in sorted(self.counts.items())},
            "refusals": dict(self.refusals.most_common(40)),
            "slowest": self.slowest,
            "found": self.found,
        }


def _print(summary: dict) -> None:
    by_part: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for kind, by in summary["kinds"].items():
        direction, backend, *rest = kind.split()
        for name in (f"{direction} {backend}", *rest):
            by_part[name].update(by)
    for name, by in sorted(by_part.items()):
        print(f"{name:28} {sum(by.values()):8} problems " + " ".join(f"{n} {ended}" for ended, n in sorted(by.items())))
    keys = ("problems", "right", "two_tiles", "refused", "wrong", "seconds", "per_second")
    print(", ".join(f"{name} {summary[name]}" for name in keys))


def main() -> int:
    args = arguments()
    if args.only is not None:
        _set_up(args.device)
        p = generate(args.only, args.device, args.kind)
        print(p)
        ended, why = outcome(p)
        print(ended, why)
        return int(ended in ("wrong", "fatal"))
    if args.worker is not None:
        return _work(args)
    campaign = Campaign(args)
    with contextlib.suppress(KeyboardInterrupt):
        campaign.run()
    summary = campaign.summary()
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1))
    _print(summary)
    too_many = summary["refused"] > _MOST_REFUSED * max(summary["problems"], 1)
    if too_many:
        print(f"more than {_MOST_REFUSED:.0%} of all calls were refused")
    return int(bool(campaign.found) or too_many or not summary["right"])


if __name__ == "__main__":
    sys.exit(main())
