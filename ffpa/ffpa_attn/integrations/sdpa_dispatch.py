"""Puts ffpa in the place of PyTorch's scaled_dot_product_attention within its dispatcher, below every name of the function.

So it is reached from C++, from nn.MultiheadAttention, by what torch.utils.checkpoint computes again and in all threads. The
operator is composite: it has no kernel for a device that ours would hide, and what PyTorch makes of it stays callable.
(PyTorch asks `_fused_sdp_choice` past its dispatcher, so that kernels registered below the choice never see calls that it
calls math, such as those of grouped heads past D = 256.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..backends import sdpa as sdpa_backend
from ..support import private_torch
from . import sdpa_override

_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default
_of_torch = _OPERATOR.decompose  # what PyTorch does, whatever is registered


def override(*devices: str) -> Callable[[], None]:
    """Has the calls of dispatch keys, "CUDA" or "CPU", done by ffpa where that means the same as PyTorch; returns what
    ends this.
    """
    if private_torch.no_override:
        raise NotImplementedError(private_torch.no_override)
    library = torch.library.Library("aten", "IMPL")
    # ffpa itself means PyTorch's kernels where it calls this: from before other threads' calls come here.
    sdpa_backend.torch_sdpa = _of_torch
    for device in devices:
        for key in (f"Autograd{device}", device):  # the second one alone is there in torch.inference_mode
            library.impl("scaled_dot_product_attention", _attention, key, allow_override=True)
    _forget_kernels()

    def end() -> None:
        nonlocal library
        library = None
        sdpa_backend.torch_sdpa = sdpa_override.torch_sdpa
        _forget_kernels()

    return end


def _forget_kernels() -> None:
    """Has PyTorch's compiler look anew for the kernels of the operator: it keeps those that it found before."""
    getattr(_OPERATOR, "_dispatch_cache", {}).clear()


def _attention(*args, **kwargs) -> torch.Tensor:
    out = sdpa_override.attend(*args, **kwargs)
    return _of_torch(*args, **kwargs) if out is None else out
