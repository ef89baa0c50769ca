"""Compares the core of the Hopper kernels with cuBLAS: the backward's launches, and matrix products of the same shapes.

`python bench/backward_products.py` prints TFLOPS of each, in bursts and settled at the power limit, all in turn in the same rounds.
cuBLAS multiplies what the backward does: as many heads at a time, with P and dS of the same inputs. (The launch that
has S and dP is more than two products: it also makes P and dS of them.) `python bench/backward_products.py 512 1024` measures only
these head dims.
"""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
from ffpa_attn import ffpa
from torch.profiler import DeviceType, ProfilerActivity, profile
from workload import Workload, make_inputs

N = 8192
HEADS = 4  # heads in one chunk of the backward
DIMS = (256, 384, 512, 768, 1024)

_REST = 0.5  # seconds
_RAMP = 0.02  # seconds until clocks are up, well before the power limit lowers them
_SETTLED_AFTER = 2.0
_ROUNDS = 7

# Our launches: a part of their kernels' names, and the number of products that each computes.
LAUNCHES = {"dQ": ("products.*of_q", 1), "dK, dV": ("products(?!.*of_q)", 2), "S, dP": ("scores", 2)}


def subjects(d: int) -> dict[str, Callable[[], object]]:
    """Returns the backward, and what cuBLAS has instead of its launches."""
    w = Workload(1, HEADS, HEADS, N, N, d, d, "bf16", False, backward=True)
    inputs = make_inputs(w, "cuda", seed=0)[:3]
    out, lse = ffpa(*inputs, return_lse=True)
    grad = torch.randn_like(out)
    q, k, v, o, do = (x[0] for x in (*inputs, out, grad))
    p, ds = (torch.empty(HEADS, N, N, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for h in range(HEADS):
        p_of_head = ((q[h] @ k[h].T).float() * d**-0.5 - lse[0, h, :, None]).exp_()
        delta = (do[h].float() * o[h].float()).sum(-1, keepdim=True)
        p[h] = p_of_head
        ds[h] = p_of_head * ((do[h] @ v[h].T).float() - delta)
    gradient, scores = torch.empty_like(q), torch.empty_like(p)

    def bmm(*products: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Callable[[], object]:
        return lambda: [torch.bmm(a, b, out=c) for a, b, c in products]

    return {
        "backward": lambda: torch.ops.ffpa_attn.backward(grad, None, *inputs, out, lse),
        "dQ": bmm((ds, k, gradient)),
        "dK, dV": bmm((ds.mT, q, gradient), (p.mT, do, gradient)),
        "S, dP": bmm((q, k.mT, scores), (do, v.mT, scores)),
    }


def run_for(seconds: float, call: Callable[[], object]) -> int:
    """Calls for at least so long, and returns the number of calls."""
    calls, end = 0, time.monotonic() + seconds
    while calls == 0 or time.monotonic() < end:
        call()
        torch.cuda.synchronize()
        calls += 1
    return calls


def kernel_times(call: Callable[[], object]) -> dict[str, float]:
    """Returns the microseconds of a call once clocks are up, by kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        calls = run_for(_RAMP, call)
    times = defaultdict(list)
    for event in profiled.events():
        if event.device_type == DeviceType.CUDA:
            times[event.name].append(event.device_time)
    return {
        name: median(sum(of[i * len(of) // calls : (i + 1) * len(of) // calls]) for i in range(calls // 2, calls))
        for name, of in times.items()
    }


def cell(d: int) -> str:
    calls = subjects(d)
    flops = 2 * HEADS * N * N * d  # FLOPs of one product

    def speeds(before: Callable[[Callable[[], object]], object]) -> list[str]:
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in LAUNCHES}
        for _ in range(_ROUNDS):
            times = {}
            for name, call in calls.items():
                before(call)
                times[name] = kernel_times(call)
            for name, (pattern, products) in LAUNCHES.items():
                ours = sum(
                    t for kernel, t in times["backward"].items() if re.search(f"backward_wgmma_{pattern}", kernel)
                )
                rounds[name].append(
                    (products * flops / ours * 1e-6, products * flops / sum(times[name].values()) * 1e-6)
                )
        pairs = {name: [median(x) for x in zip(*of, strict=True)] for name, of in rounds.items()}
        return [f"{ours:.0f} / {cublas:.0f} = {ours / cublas:.2f}" for ours, cublas in pairs.values()]

    for call in calls.values():
        call()  # the first call compiles
    torch.cuda.synchronize()
    bursts = speeds(lambda call: time.sleep(_REST))
    for call in calls.values():
        run_for(_SETTLED_AFTER / len(calls), call)
    settled = speeds(lambda call: run_for(_SETTLED_AFTER / 10, call))
    return " | ".join(f"{burst}; {later}" for burst, later in zip(bursts, settled, strict=True))


def main() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("the core's kernels are for sm_90a, and there is no such GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: H={HEADS}, N={N}, bf16; ours / cuBLAS\n")
    print(f"| in a burst; settled | {' | '.join(LAUNCHES)} |\n|---|---|---|---|")
    for d in map(int, sys.argv[1:]) if len(sys.argv) > 1 else DIMS:
        print(f"| D={d} | {cell(d)} |", flush=True)


if __name__ == "__main__":
    main()
