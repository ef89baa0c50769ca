"""Measures head dims up to 256 on a GPU: forward, backward and 8-bit floats, beside PyTorch's own attention.

`FFPA_BACKEND=triton python bench/small_heads.py` prints a table of the Triton kernels, TFLOPS of the visible pairs: the rows
of Triton's fused-attention tutorial (batch 4, 48 heads, D = 64, scale 1.3), longer heads, and what quantisation costs
and loses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
import torch.nn.functional as F
from ffpa_attn import ffpa, ffpa_fp8, quantize_fp8
from flops import nominal_flops
from timing import Timer, measure_in_turn
from workload import Workload, make_inputs

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TUTORIAL = [(n, 64, causal) for causal in (True, False) for n in (1024, 2048, 4096, 8192, 16384)]
LONGER = [(8192, d, causal) for d in (64, 128, 256) for causal in (False, True)]


def forward_calls(w: Workload, scale: float | None) -> dict[str, Callable]:
    q, k, v, *_ = make_inputs(w, "cuda", seed=0)
    return {
        "ffpa": lambda: ffpa(q, k, v, causal=w.causal, scale=scale),
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=w.causal, scale=scale),
    }


def backward_calls(w: Workload, scale: float | None) -> dict[str, Callable]:
    """Makes calls as a training step has them: gradients are added to what is there."""
    q, k, v, *_ = (x.requires_grad_() for x in make_inputs(w, "cuda", seed=0)[:3])
    calls = {}
    for name, forward in (("ffpa", ffpa), ("SDPA", F.scaled_dot_product_attention)):
        out = forward(q, k, v, scale=scale, **{"causal" if forward is ffpa else "is_causal": w.causal})
        grad = torch.randn_like(out)
        calls[name] = lambda out=out, grad=grad: out.backward(grad, retain_graph=True)
    return calls


def fp8_calls(w: Workload, scale: float | None, dtype: torch.dtype) -> dict[str, Callable]:
    q, k, v = (x.to(dtype) for x in make_inputs(w, "cuda", seed=0)[:3])
    transposed = v.mT.contiguous()
    options = {"causal": w.causal, "scale": scale}
    return {
        "V transposed": lambda: ffpa_fp8(q, k, transposed, v_transposed=True, **options),
        "V as it is": lambda: ffpa_fp8(q, k, v, **options),
    }


def line(title: str, w: Workload, calls: dict[str, Callable], timer: Timer, iters: int) -> str:
    times: dict[str, list[float]] = {}
    subjects = {name: lambda call=call: timer.milliseconds(call) for name, call in calls.items()}
    for subject in subjects.values():
        subject()  # the first call compiles
    measure_in_turn(subjects, iters, times, lambda name: None, settle=True)
    cells = [f"{name} {nominal_flops(w) / median(found) * 1e-9:.0f} T" for name, found in times.items()]
    return f"| {title} | {w} | {' | '.join(cells)} |"


def quantised(tensors, dtype: torch.dtype, per: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [quantize_fp8(x, dtype, per) for x in tensors]


def quantisation(n: int, d: int, timer: Timer) -> list[str]:
    """Returns what 8 bits cost, and how far off a few rows are, as a part of their root mean square."""
    q, k, v, *_ = make_inputs(Workload(1, 32, 32, n, n, d, d, "bf16"), "cuda", seed=0)
    rows = slice(0, 256)

    def truth(q, k, v) -> torch.Tensor:
        q, k, v = (x.double() for x in (q[:, :1, rows], k[:, :1], v[:, :1]))
        return (q @ k.mT * d**-0.5).softmax(-1) @ v

    def off(out: torch.Tensor, want: torch.Tensor) -> float:
        return ((out[:, :1, rows].double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()

    exact = truth(q, k, v)
    found = [f"| error against float64 | bf16 | {off(ffpa(q, k, v), exact):.2e} |"]
    for dtype in (E4M3, E5M2):
        for per in ("tensor", "head", "block"):
            quantise = partial(quantised, (q, k, v), dtype, per)
            parts = quantise()
            scales = dict(zip(("q_scale", "k_scale", "v_scale"), (scale for _, scale in parts), strict=True))
            out = ffpa_fp8(*(x for x, _ in parts), **scales, out_dtype=torch.float32)
            blocks = [s if s.dim() < 3 else s.repeat_interleave(128, -1)[..., None] for _, s in parts]
            blocks = [s[..., None, None] if s.dim() == 2 else s for s in blocks]
            meant = [x.double() * s for (x, _), s in zip(parts, blocks, strict=True)]
            ms = median(timer.milliseconds(quantise) for _ in range(5))
            found.append(
                f"| error against float64 | {dtype} per {per} | of the inputs {off(out, exact):.2e} "
                f"| of what 8 bits hold {off(out, truth(*meant)):.2e} | quantising q, k, v {ms:.3f} ms |"
            )
    return found


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure")
    timer, iters = Timer("cuda"), 6
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    tutorial = [Workload(4, 48, 48, n, n, d, d, "fp16", causal) for n, d, causal in TUTORIAL]
    longer = [Workload(1, 32, 32, n, n, d, d, "bf16", causal) for n, d, causal in LONGER]
    for w in tutorial:
        print(line("forward", w, forward_calls(w, 1.3), timer, iters), flush=True)
        print(line("forward e5m2", w, fp8_calls(w, 1.3, E5M2), timer, iters), flush=True)
    for w in longer:
        print(line("forward", w, forward_calls(w, None), timer, iters), flush=True)
        print(line("forward e4m3", w, fp8_calls(w, None, E4M3), timer, iters), flush=True)
    for w, scale in [(w, 1.3) for w in tutorial if w.causal] + [(w, None) for w in longer]:
        w = Workload(**{**w.as_dict(), "backward": True})
        print(line("backward", w, backward_calls(w, scale), timer, iters), flush=True)
    print("\n".join(quantisation(8192, 128, timer)))


if __name__ == "__main__":
    main()
