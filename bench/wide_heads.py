"""Measures the Hopper kernels on a GPU: forward, backward, the workspace; beside a matrix product in the same rounds.

`python bench/wide_heads.py` prints these tables, or those that are named: `backward` and `forward`, TFLOPS of the visible
pairs; `fp8`, the forward of 8-bit floats, and what it takes to make them; `grouped` heads; `long` sequences; `caps`,
speed against the workspace's cap; `memory`, the peak against length. Numbers among the names are the head dims of the
first three. Speeds are those of a burst, and those of a chip that has settled at its power limit. FFPA_BACKEND=hopper
measures head dims of 128, too, where rows see all keys; FFPA_BACKEND=mma the kernels that every GPU runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
from ffpa_attn import env, ffpa, ffpa_fp8, quantize_fp8
from flops import nominal_flops
from timing import Timer, measure_in_turn, peak_bytes
from workload import Workload, make_inputs

FORWARD_DIMS = (128, 192, 256, 320, 384, 448, 512, 576, 640, 768, 896, 1024)
BACKWARD_DIMS = (256, 320, 384, 448, 512, 640, 768, 896, 1024)
FP8_DIMS = (128, 192, 256, 320, 384, 448, 512)
LENGTHS = [(n, causal) for causal in (False, True) for n in (8192, 16384)]
GEMM = 8192


def workload(
    n: int, d: int, causal: bool = False, heads: int = 32, heads_kv: int = 32, backward: bool = False
) -> Workload:
    return Workload(1, heads, heads_kv, n, n, d, d, "bf16", causal, backward=backward)


def call_of(w: Workload) -> Callable[[], object]:
    q, k, v, *_ = make_inputs(w, "cuda", seed=0)
    if not w.backward:
        return lambda: ffpa(q, k, v, causal=w.causal)
    with env.overridden("FFPA_BACKEND", "auto"):
        out, lse = ffpa(q, k, v, causal=w.causal, return_lse=True)
    grad = torch.randn_like(out)
    return lambda: torch.ops.ffpa_attn.backward(grad, None, q, k, v, out, lse, causal=w.causal)


def gemm() -> Callable[[], object]:
    a, b = (torch.randn(GEMM, GEMM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: a @ b


_REST = 0.3  # seconds
_RAMP = 10.0  # ms until clocks are up


def burst(subject: Callable[[], float], warm_up: Callable[[], float]) -> float:
    """Returns the median of three calls, each after a rest and a few others, before the power limit lowers clocks."""
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        time.sleep(_REST)
        unsettled = _RAMP
        while unsettled > 0:
            unsettled -= warm_up()
        times.append(subject())
    return median(times)


def in_8_bits(w: Workload) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns the forward, and the function that makes its inputs."""
    tensors = make_inputs(w, "cuda", seed=0)[:3]

    def quantise():
        return [quantize_fp8(x, per="block") for x in tensors]

    (q, q_scale), (k, k_scale), (v, v_scale) = quantise()
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    return lambda: ffpa_fp8(q, k, v, **scales, causal=w.causal), quantise


def cell(w: Workload, timer: Timer, iters: int = 6, call: Callable[[], object] | None = None) -> str:
    """Returns speeds in a burst and settled, with those of a matrix product in the same rounds in parentheses."""
    calls = {"ffpa": call or call_of(w), "GEMM": gemm()}
    subjects = {name: lambda call=call: timer.milliseconds(call) for name, call in calls.items()}
    flops = {"ffpa": nominal_flops(w), "GEMM": 2 * GEMM**3}
    for subject in subjects.values():
        subject()  # the first call compiles
    bursts = {name: burst(subject, subjects["GEMM"]) for name, subject in subjects.items()}
    times: dict[str, list[float]] = {}
    measure_in_turn(subjects, iters, times, lambda name: None, settle=True)

    def speeds(of: Mapping[str, float]) -> str:
        ffpa, product = (flops[name] / of[name] * 1e-9 for name in ("ffpa", "GEMM"))
        return f"{ffpa:.0f} ({product:.0f})"

    return f"{speeds(bursts)}, {speeds({name: median(of) for name, of in times.items()})}"


def table(title: str, columns: list[str], rows: dict[str, list[str]]) -> None:
    print(f"\n| {title} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def speeds(timer: Timer, dims: Sequence[int], backward: bool) -> None:
    columns = [f"N={n}{' causal' * causal}" for n, causal in LENGTHS]
    rows = {f"D={d}": [cell(workload(n, d, causal, backward=backward), timer) for n, causal in LENGTHS] for d in dims}
    table(f"{'backward' if backward else 'forward'}, TFLOPS (GEMM)", columns, rows)


def fp8(timer: Timer, dims: Sequence[int]) -> None:
    rows: dict[str, list[str]] = {}
    product = partial(timer.milliseconds, gemm())
    for d in dims:
        cells = rows[f"D={d}"] = []
        for n, causal in LENGTHS:
            w = workload(n, d, causal)
            cells.append(cell(w, timer, call=in_8_bits(w)[0]))
        quantise = in_8_bits(workload(LENGTHS[0][0], d))[1]
        quantise()
        cells.append(f"{burst(lambda quantise=quantise: timer.milliseconds(quantise), product):.2f}")
    columns = [f"N={n}{' causal' * causal}" for n, causal in LENGTHS]
    table("e4m3 forward, TFLOPS (bf16 GEMM)", [*columns, f"q, k, v to e4m3 at N={LENGTHS[0][0]}, ms"], rows)


def grouped(timer: Timer) -> None:
    rows = {
        f"{kind} H=32/{heads_kv}": [
            cell(workload(8192, 512, c, 32, heads_kv, kind == "backward"), timer) for c in (False, True)
        ]
        for kind in ("forward", "backward")
        for heads_kv in (32, 4)
    }
    table("D=512, N=8192", ["all keys", "causal"], rows)


def long(timer: Timer) -> None:
    rows = {
        f"{kind} N={n}": [cell(workload(n, 512, c, 8, 8, kind == "backward"), timer, iters=3) for c in (False, True)]
        for kind in ("forward", "backward")
        for n in (16384, 32768, 65536, 131072)
    }
    table("D=512, H=8", ["all keys", "causal"], rows)


def caps(timer: Timer) -> None:
    sizes, rows = (64, 128, 256, 512, 1024, 2048), {}
    for name, w in (
        ("backward D=512 N=8192", workload(8192, 512, backward=True)),
        ("backward D=512 N=16384", workload(16384, 512, heads=16, heads_kv=16, backward=True)),
        ("forward D=1024 N=16384", workload(16384, 1024, heads=16, heads_kv=16)),
    ):
        rows[name] = []
        for mb in sizes:
            with env.overridden("FFPA_WORKSPACE_MB", str(mb)):
                rows[name].append(cell(w, timer, iters=3))
    table("workspace, MiB", [str(mb) for mb in sizes], rows)


def memory() -> None:
    lengths, rows = (8192, 32768, 131072), {"forward D=1024": [], "backward D=512": []}
    for n in lengths:
        for name, w, results in (
            ("forward D=1024", workload(n, 1024, heads=2, heads_kv=2), 1),
            ("backward D=512", workload(n, 512, heads=2, heads_kv=2, backward=True), 3),
        ):
            call = call_of(w)
            call()
            own = results * w.heads * n * w.d * 2
            rows[name].append(f"{(peak_bytes(call, 'cuda') - own) >> 20} MiB beside {own >> 20} of results")
            del call
            torch.cuda.empty_cache()
    table("peak, H=2", [f"N={n}" for n in lengths], rows)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure")
    dims = [int(word) for word in sys.argv[1:] if word.isdigit()]
    timer, backend = Timer("cuda"), env.run_flags()["FFPA_BACKEND"]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, B=1, H=32, bf16; FFPA_BACKEND={backend}")
    tables = {
        "backward": lambda: speeds(timer, dims or BACKWARD_DIMS, backward=True),
        "forward": lambda: speeds(timer, dims or FORWARD_DIMS, backward=False),
        "fp8": lambda: fp8(timer, dims or FP8_DIMS),
        "grouped": lambda: grouped(timer),
        "long": lambda: long(timer),
        "caps": lambda: caps(timer),
        "memory": memory,
    }
    for name in [word for word in sys.argv[1:] if not word.isdigit()] or tables:
        tables[name]()


if __name__ == "__main__":
    main()
