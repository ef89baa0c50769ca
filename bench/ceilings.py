"""The ceilings of this device, measured beside the kernels: a large matrix product and a large copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from flops import least_bytes, nominal_flops
from workload import Workload


@dataclass(frozen=True)
class Ceilings:
    gemm: str  # description of the product
    gemm_tflops: float
    copy: str
    copy_gb_per_s: float

    def of(self, w: Workload) -> tuple[str, float]:
        """Returns which of "GEMM" and "copy" bounds a workload, and the ms that it would take there."""
        times = {
            "GEMM": nominal_flops(w) / self.gemm_tflops * 1e-9,
            "copy": least_bytes(w) / self.copy_gb_per_s * 1e-6,
        }
        bound = max(times, key=times.get)
        return bound, times[bound]


class CeilingCalls:
    """The tensors behind the ceilings, made once per run; on a CPU they are small, and f32 for a fast product."""

    def __init__(self, device: str):
        self.side, self.bytes, dtype = (
            (8192, 512 << 20, torch.bfloat16) if device == "cuda" else (256, 8 << 20, torch.float32)
        )
        a, b = (torch.randn(self.side, self.side, dtype=dtype, device=device) for _ in range(2))
        product = torch.empty_like(a)
        source = torch.ones(self.bytes, dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        self.gemm = f"torch.mm {str(dtype)[6:]} {self.side}^3"
        self.copy = f"copy of {self.bytes >> 20} MiB, read and written"
        self.calls: dict[str, Callable[[], object]] = {
            "GEMM": lambda: torch.mm(a, b, out=product),
            "copy": lambda: target.copy_(source),
        }

    def from_times(self, times: Mapping[str, list[float]]) -> Ceilings:
        """Makes the ceilings from times in ms, by the names of `calls`."""
        tflops = 2 * self.side**3 / median(times["GEMM"]) * 1e-9
        return Ceilings(self.gemm, tflops, self.copy, 2 * self.bytes / median(times["copy"]) * 1e-6)
