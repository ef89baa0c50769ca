"""Exact attention for large head dims, forward and backward."""

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
from .spec import LevelType, MMAAccType
from .version import __version__

__all__ = [
    "FP16",
    "FP32",
    "L1",
    "L2",
    "L3",
    "MIXED",
    "LevelType",
    "MMAAccType",
    "__version__",
    "explain",
    "faster_prefill_attn_func",
    "ffpa",
    "ffpa_acc_f16_L1",
    "ffpa_acc_f32_L1",
    "ffpa_fp8",
    "ffpa_mma_acc_f16_L1",
    "ffpa_mma_acc_f32_L1",
    "ffpa_varlen",
    "merge",
    "quantize_fp8",
]
