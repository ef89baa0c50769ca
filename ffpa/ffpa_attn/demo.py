"""`python -m ffpa_attn.demo` shows in some seconds what this installation does.

On a GPU it runs D = 512 forward and backward beside PyTorch's own attention and prints times, memory and errors. Without one it runs
a tile of the same kernels in the emulator, and prints what three GPUs would run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from . import env
from .attention import explain, ffpa
from .building.toolchain import BuildError

_HEADS, _N, _D = 32, 4096, 512
_CALLS = 7


def _float64(q, k, v, grad) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, dq) of one head, causal, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    q.requires_grad_()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.detach(), torch.autograd.grad(out, q, grad.double())[0]


def _milliseconds(call: Callable[[], object]) -> float:
    """Returns the median of device events; the first call is not counted."""
    times = []
    for _ in range(_CALLS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def _on_a_gpu() -> None:
    q, k, v, grad = (torch.randn(1, _HEADS, _N, _D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    want_out, want_dq = _float64(q[0, 0].detach(), k[0, 0].detach(), v[0, 0].detach(), grad[0, 0])
    print(f"{torch.cuda.get_device_name()}: B=1, H={_HEADS}, N={_N}, D={_D}, bf16, causal")
    print(f"{'':8}{'forward':>12}{'backward':>12}{'peak memory':>14}{'error of out':>16}{'of dq':>12}")
    for name, attention in (
        ("ffpa", lambda: ffpa(q, k, v, causal=True)),
        ("SDPA", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    ):
        out = attention()
        with torch.no_grad():
            forward = _milliseconds(attention)
        backward = _milliseconds(lambda out=out: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
        dq = torch.autograd.grad(out, q, grad)[0]
        errors = [(x[0, 0].double() - want).abs().max().item() for x, want in ((out, want_out), (dq, want_dq))]
        del out, dq
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(attention(), (q, k, v), grad)
        peak = (torch.cuda.max_memory_allocated() - before) / (1 << 20)
        print(f"{name:8}{forward:9.2f} ms{backward:9.2f} ms{peak:10.0f} MiB{errors[0]:16.5f}{errors[1]:12.5f}")
    print("Errors are the largest of one head's, beside float64.")
    print(f"The forward ran on {explain(q, k, v, causal=True).kernel}.")


def _in_the_emulator() -> None:
    from .testing import emulate

    q, k, v = (torch.randn(1, 1, 64, _D, dtype=torch.bfloat16) for _ in range(3))
    want, _ = _float64(q[0, 0], k[0, 0], v[0, 0], torch.ones(64, _D))
    print(f"There is no GPU: a tile of 64 rows and keys, D = {_D}, runs in the emulator of one.")
    start = time.monotonic()
    try:
        with env.overridden("ENABLE_FFPA_DEBUG", "1"), emulate("sm_80"):  # few kernels, which compile in seconds
            out = ffpa(q, k, v, causal=True, level=1)
    except (BuildError, NotImplementedError) as error:
        print(f"The emulator cannot be built here: {error}")
    else:
        error = (out[0, 0].double() - want).abs().max().item()
        print(f"Level 1 took {time.monotonic() - start:.1f} s; its largest error beside float64 is {error:.5f}.")
    x = torch.empty(1, _HEADS, _N, _D, dtype=torch.bfloat16, device="meta")
    for arch in ("sm_80", "sm_89", "sm_90"):
        print(f"On {arch}, B=1, H={_HEADS}, N={_N}, causal: {explain(x, x, x, causal=True, arch=arch).kernel}")


def main() -> None:
    env.let_stdout_write_anything()
    if torch.cuda.is_available():
        _on_a_gpu()
    else:
        _in_the_emulator()


if __name__ == "__main__":
    main()
