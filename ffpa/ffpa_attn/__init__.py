"""This package computes exact attention for large head dims, forward and backward."""

import importlib

from .support import namesake  # noqa: F401  (first, as the rest may be from another ffpa_attn that is mixed in)

# isort: split
from .attention import (
    FP16,
    FP32,
    L1,
    L2,
    L3,
    MIXED,
    explain,
    faster_prefill_attn_func,
    ffpa,
    ffpa_acc_f16_L1,
    ffpa_acc_f32_L1,
    ffpa_mma_acc_f16_L1,
    ffpa_mma_acc_f32_L1,
    ffpa_varlen,
    merge,
)
from .fp8 import ffpa_fp8, quantize_fp8
from .integrations.flash_api import (
    Backend,
    CUDABackend,
    CuTeDSLBackend,
    SDPABackend,
    TritonBackend,
    ffpa_attn_func,
    ffpa_attn_varlen_func,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    is_nhd_zero_copy_input,
)
from .integrations.sdpa_override import disable_sdpa, enable_sdpa, sdpa
from .kv_cache import ffpa_with_kvcache
from .specs.problem import LevelType, MMAAccType
from .support import private_torch, progress
from .support.version import __version__

for _said in private_torch.warnings():
    progress.warn(f"ffpa_attn: {_said}", stacklevel=2)

__all__ = [
    "FP16",
    "FP32",
    "L1",
    "L2",
    "L3",
    "MIXED",
    "Backend",
    "CUDABackend",
    "CuTeDSLBackend",
    "LevelType",
    "MMAAccType",
    "SDPABackend",
    "TritonBackend",
    "__version__",
    "disable_sdpa",
    "enable_sdpa",
    "explain",
    "faster_prefill_attn_func",
    "ffpa",
    "ffpa_acc_f16_L1",
    "ffpa_acc_f32_L1",
    "ffpa_attn_func",
    "ffpa_attn_varlen_func",
    "ffpa_fp8",
    "ffpa_mma_acc_f16_L1",
    "ffpa_mma_acc_f32_L1",
    "ffpa_varlen",
    "ffpa_with_kvcache",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "is_nhd_zero_copy_input",
    "merge",
    "quantize_fp8",
    "sdpa",
]


def __getattr__(name: str):
    if name == "distributed":  # it imports much that a call of ffpa does not need
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
