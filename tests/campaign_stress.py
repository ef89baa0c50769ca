"""Repeats calls: the same bits, in memory that held NaN, on streams, in threads and graphs, and where memory runs out.

`python tests/campaign_stress.py` runs it all on a GPU (three to five minutes); `--device cpu` what a CPU can.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_HERE = Path(__file__).resolve().parent
for _place in (_HERE.parent / "ffpa", _HERE / "backends", _HERE):
    if str(_place) not in sys.path:
        sys.path.insert(0, str(_place))

import campaign_check  # noqa: E402
import campaign_tensors as tensors  # noqa: E402
import torch  # noqa: E402
from campaign_check import Refused, same_bits  # noqa: E402
from campaign_draw import generate  # noqa: E402
from campaign_problems import FP8, Problem  # noqa: E402
from ffpa_attn import env  # noqa: E402

_MOST_PAIRS = 3e6  # most pairs in a repeated call: small calls show races as well, and more often


# ---- calls to repeat ----


class Kind:
    """Holds a problem's call, ready to run again. The environment is to be that of `campaign_check.running`."""

    def __init__(self, p: Problem):
        self.p = p.with_(repeats=1, out=None)
        with torch.no_grad():
            self.x = tensors.make(self.p, "cuda" if p.device == "cuda" else "cpu")
        self.grads = None

    def __call__(self) -> list[torch.Tensor]:
        """Returns results, gradients too."""
        if self.p.backward:
            results, self.grads = campaign_check.both(self.p, self.x, None, self.grads)
        else:
            results = campaign_check.forward(self.p, self.x)
        return list(results.values())


def kinds(
    count: int, device: str, first_seed: int, wanted: Callable[[Problem], bool] = lambda p: True
) -> Iterator[Kind]:
    """Yields calls that run; half of them have gradients."""
    found, seen = 0, set()
    for seed in itertools.count(first_seed):
        p = generate(seed, device, "backward" if found % 2 else "forward")
        if (
            p.dtype in FP8
            or not 0 < p.pairs() <= (_MOST_PAIRS if device == "cuda" else 2e4)
            or p.numbers == "nan_row"
            or not wanted(p)
        ):
            continue
        kind = Kind(p)
        try:
            with campaign_check.running(kind.p):
                kind()
        except (Refused, NotImplementedError, ValueError):
            continue
        if (what := _same_kind(p)) in seen:
            continue
        seen.add(what)
        yield kind
        found += 1
        if found == count:
            return


def _same_kind(p: Problem) -> tuple:
    of_scores = p.causal, p.mask and p.mask.dtype, p.sinks is None, p.max_logits
    return (p.backend, p.backward, p.dtype, p.d, p.d_v, p.packed, p.level, p.group, *of_scores)


# ---- what is tried ----


@contextlib.contextmanager
def garbage_in_new_memory():
    """Fills new memory with NaN, where it is to hold floats."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def repeat(kind: Kind, times: int) -> int:
    """Returns how many calls differ from the first. They are compared on the device, and asked about once."""
    with campaign_check.running(kind.p):
        first = [campaign_check.as_integers(x).clone() for x in kind()]
        differ = torch.zeros((), dtype=torch.int64, device=first[0].device)
        for i in range(times):
            with garbage_in_new_memory() if i % 4 == 0 else contextlib.nullcontext():
                got = kind()
            for x, y in zip(got, first, strict=True):
                differ += (campaign_check.as_integers(x) != y).any()
    return int(differ)


def streams(chosen: list[Kind], rounds: int) -> int:
    """Uses four streams at once, and returns how many results differ from those of one."""
    want = [_alone(kind) for kind in chosen]
    side = [torch.cuda.Stream() for _ in range(4)]
    wrong = 0
    for turn in range(rounds):
        got = []
        for i, kind in enumerate(chosen):
            stream = side[(i + turn) % len(side)]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), campaign_check.running(kind.p):
                got.append(kind())
        torch.cuda.synchronize()
        wrong += sum(not same_bits(x, y) for x, y in zip(got, want, strict=True))
    return wrong


def threads(chosen: list[Kind], rounds: int) -> int:
    """Runs eight threads, each with a stream of its own; all share one environment, which is the process's."""
    with env.overridden("FFPA_BACKEND", "auto"):
        chosen = [kind for kind in chosen if kind.p.backend == "auto" and not kind.p.flags]
        want = [kind() for kind in chosen]
        torch.cuda.synchronize()
        wrong: list = []

        def work(number: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(rounds):
                    i = (number + turn) % len(chosen)
                    try:
                        got = chosen[i]()
                        torch.cuda.current_stream().synchronize()
                        if not same_bits(got, want[i]):
                            wrong.append(chosen[i].p)
                    except Exception as error:
                        wrong.append((error, chosen[i].p))

        workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for x in wrong[:3]:
        print("in threads:", x)
    return len(wrong)


def graphs(chosen: list[Kind], others: list[Kind], replays: int) -> int:
    """Replays a captured call beside eager ones."""
    wrong = 0
    for kind in chosen:
        with campaign_check.running(kind.p):
            want = _on_a_side_stream(kind)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = kind()
        for turn in range(replays):
            for x in got:
                x.fill_(float("nan"))
            other = others[turn % len(others)]
            with campaign_check.running(other.p):
                other()
                graph.replay()
                other()
            wrong += not same_bits(got, want)
        del graph, got
    return wrong


def first_call_in_a_capture(chosen: list[Kind]) -> int:
    """Captures a kind of call that this process never ran: its checks and choice are made in the capture."""
    wrong = 0
    for kind in chosen:
        with campaign_check.running(kind.p):
            want = _on_a_side_stream(kind)
            campaign_check.forget()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = kind()
            for x in got:
                x.fill_(float("nan"))
            graph.replay()
            wrong += not same_bits(got, want)
    return wrong


def cold_captures() -> list[str]:
    """Captures the first calls of a process: kernels are found, and loaded, while a stream is captured."""
    wrong = []
    torch.ones(8, device="cuda").sum().item()
    for backend, d, backward in itertools.product(("auto", "mma", "triton"), (64, 256, 512, 1024), (False, True)):
        if backend == "triton" and d > 256:
            continue
        p = Problem(
            seed=d, backend=backend, backward=backward, heads_kv=2, group=2, n_q=300, n_k=300, d=d, d_v=d, causal=True
        )
        kind = Kind(p)
        if backward:
            out = torch.empty(1, 4, 300, d, dtype=torch.bfloat16, device="cuda")
            kind.grads = campaign_check.random_gradients(p, out, None, None)
        torch.cuda.synchronize()
        try:
            with campaign_check.running(p):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    got = kind()
                for x in got:
                    x.fill_(float("nan"))
                graph.replay()
                if not same_bits(got, kind()):
                    wrong.append(f"a first call in a capture gives other bits: {p!r}")
        except Exception as error:
            wrong.append(f"a first call in a capture: {type(error).__name__} {str(error)[:200]}: {p!r}")
    return wrong


def _on_a_side_stream(kind: Kind) -> list[torch.Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        want = kind()
    torch.cuda.current_stream().wait_stream(side)
    return [x.clone() for x in want]


def _alone(kind: Kind) -> list[torch.Tensor]:
    with campaign_check.running(kind.p):
        return [x.clone() for x in kind()]


# ---- memory that runs out ----


@contextlib.contextmanager
def failing_allocation(k: int):
    """Fails the k-th allocation inside the package, whose torch.empty, new_empty, empty_like and zeros are replaced.

    The dispatcher is not asked, as a call that runs its body at once does not pass through it.
    """
    import ffpa_attn

    count = 0

    def failing(allocate):
        def allocated(*args, **options):
            nonlocal count
            if sys._getframe(1).f_globals.get("__name__", "").startswith(ffpa_attn.__name__ + "."):
                count += 1
                if count == k:
                    raise torch.OutOfMemoryError(
                        f"CUDA out of memory. Allocation {k} was made to fail.\nMore was said."
                    )
            return allocate(*args, **options)

        return allocated

    places = [(torch, name) for name in ("empty", "empty_like", "zeros")] + [(torch.Tensor, "new_empty")]
    before = [getattr(where, name) for where, name in places]
    try:
        for (where, name), allocate in zip(places, before, strict=True):
            setattr(where, name, failing(allocate))
        yield
    finally:
        for (where, name), allocate in zip(places, before, strict=True):
            setattr(where, name, allocate)


def _bytes_in_use(kind: Kind) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if kind.x.q.is_cuda else 0


def _bytes_kept(kind: Kind, before: int) -> int:
    """Autograd's own thread gives up what a failed backward held a little after the error has arrived here."""
    for _ in range(20):
        kept = _bytes_in_use(kind) - before
        if kept <= 0:
            break
        time.sleep(0.05)
    return kept


def run_out(kind: Kind) -> tuple[int, list[str]]:
    """Fails each allocation of the call in turn, and returns (how many failed, what was wrong)."""
    wrong = []
    with campaign_check.running(kind.p):
        want = [x.clone() for x in kind()]
        for k in itertools.count(1):
            before, said = _bytes_in_use(kind), None
            try:
                with failing_allocation(k):
                    got = kind()
                    del got
            except torch.OutOfMemoryError as error:
                said = str(error)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            if said is None:
                return k - 1, wrong
            if "FFPA_WORKSPACE_MB=" not in said or "the least that works" not in said:
                wrong.append(f"allocation {k}: {said[:200]}")
            if (kept := _bytes_kept(kind, before)) > 0:
                wrong.append(f"allocation {k}: {kept} bytes kept")
            if not same_bits(kind(), want):
                wrong.append(f"allocation {k}: the next call is wrong")
    raise AssertionError


def run_out_of_a_gpu(kind: Kind) -> list[str]:
    """PyTorch's allocator is left with room for less and less of a call, until it has enough."""
    wrong, total = [], torch.cuda.get_device_properties(0).total_memory
    with campaign_check.running(kind.p):
        want = [x.clone() for x in kind()]
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        for room in (0, 2, 8, 24, 64, 256, 1024, 4096):
            said = None
            torch.cuda.empty_cache()
            try:
                torch.cuda.set_per_process_memory_fraction(
                    min(1.0, (torch.cuda.memory_reserved() + (room << 20)) / total)
                )
                got = kind()
                torch.cuda.synchronize()
                del got
            except torch.OutOfMemoryError as error:
                said = str(error)
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
            if said is None:
                break
            if "FFPA_WORKSPACE_MB=" not in said:
                wrong.append(f"{room} MiB of room: {said[:200]}")
            if (kept := _bytes_kept(kind, before)) > 0:
                wrong.append(f"{room} MiB of room: {kept} bytes kept")
            if not same_bits(kind(), want):
                wrong.append(f"{room} MiB of room: the next call is wrong")
    return wrong


LARGE = [
    Problem(backward=backward, heads_kv=8, n_q=8192, n_k=8192, d=d, d_v=d)
    for d, backward in ((1024, False), (512, True), (1024, True))
]


# ---- all of it ----


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "emulator", "interpreter", "cpu"), default="cuda")
    parser.add_argument("--kinds", type=int, default=200, help="of calls that are repeated")
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--failures", type=int, default=300, help="allocations that fail, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("repeats", "streams", "memory"), default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    campaign_check.clean_environment()
    if args.device == "interpreter":
        import os

        os.environ["TRITON_INTERPRET"] = "1"
    start, found, wrong = time.monotonic(), {}, []

    def part(name: str) -> bool:
        if args.only not in (None, name):
            return False
        print(f"{time.monotonic() - start:.0f} s: {name}", flush=True)
        return True

    if part("streams") and args.device == "cuda":
        wrong += cold_captures()  # before any other call
    if part("repeats"):
        calls = 0
        for kind in kinds(args.kinds, args.device, args.seed):
            differ = repeat(kind, args.repeats)
            calls += args.repeats
            if differ:
                wrong.append(f"{differ} of {args.repeats} calls have other bits: {kind.p!r}")
        found["repeats"] = f"{args.kinds} kinds, {calls} calls"
    if part("streams") and args.device == "cuda":
        chosen = list(kinds(16, "cuda", args.seed + 10_000, lambda p: not p.packed or p.backend != "reference"))
        plain = list(kinds(16, "cuda", args.seed + 20_000, lambda p: p.backend == "auto" and not p.flags))
        capturable = [kind for kind in chosen if kind.p.backend != "reference"]
        for name, count in (
            ("streams", streams(chosen, 20)),
            ("threads", threads(plain, 60)),
            ("graphs", graphs(capturable[:8], chosen, 12)),
            ("first calls in a capture", first_call_in_a_capture(capturable)),
        ):
            found[name] = count
            if count:
                wrong.append(f"{name}: {count} wrong")
    if part("memory"):
        failures = 0
        for kind in kinds(10_000, args.device, args.seed + 30_000):
            failed, errors = run_out(kind)
            failures += failed
            wrong += [f"{error}: {kind.p!r}" for error in errors[:3]]
            if args.device == "cuda":
                wrong += [f"{error}: {kind.p!r}" for error in run_out_of_a_gpu(kind)[:3]]
            if failures >= args.failures:
                break
        found["failed allocations"] = failures
        for p in LARGE if args.device == "cuda" else ():
            wrong += [f"{error}: {p!r}" for error in run_out_of_a_gpu(Kind(p))[:3]]
    found["seconds"] = round(time.monotonic() - start, 1)
    found["wrong"] = wrong
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    for x in wrong:
        print("WRONG", x)
    print({name: x for name, x in found.items() if name != "wrong"}, len(wrong), "wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
