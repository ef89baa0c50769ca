"""This module holds the two forms of a call, dense tensors and packed sequences, and describes a call's problem."""

from __future__ import annotations

import torch

from ..checks import arguments, memory_checks
from ..launching import native
from ..specs.spec import ROW_ALIGNMENT, Problem, Visibility


def seen(x) -> tuple | None:
    """Returns all that a check or a choice may depend on, in one hashable value."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ROW_ALIGNMENT)


class Dense:
    """Dense tensors, [B, H, N, D] or [B, N, H, D], with a mask or none."""

    offsets = None

    def __init__(self, layout: str, mask: torch.Tensor | None):
        self.layout, self.mask = layout, mask

    def key(self) -> tuple:
        return (self.layout, seen(self.mask))

    def check(self, q, k, v) -> None:
        arguments.dense(q, k, v, self.mask, self.layout)

    def check_values(self, q, k, flags) -> None:
        pass

    def sizes(self, q, k) -> tuple[int, int, int, int, int]:
        """Returns (batch, heads_q, heads_kv, n_q, n_k)."""
        n, h = (2, 1) if self.layout == "BHND" else (1, 2)
        return q.shape[0], q.shape[h], k.shape[h], q.shape[n], k.shape[n]

    def packed(self, q, k) -> None:
        return None

    def lse_shape(self, q) -> tuple:
        n, h = (2, 1) if self.layout == "BHND" else (1, 2)
        return (q.shape[0], q.shape[h], q.shape[n])

    def heads_first(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [B, H, N, D] as a view."""
        return x if self.layout == "BHND" else x.transpose(1, 2)


class Packed:
    """Packed sequences, [T, H, D], with their offsets [B + 1]."""

    mask = None
    layout = "BHND"  # packed sequences have no layout to choose

    def __init__(self, cu_seqlens_q, cu_seqlens_k, max_seqlen_q: int, max_seqlen_k: int):
        self.offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k

    def key(self) -> tuple:
        cu_q, cu_k, max_q, max_k = self.offsets
        return (seen(cu_q), seen(cu_k), max_q, max_k)

    def check(self, q, k, v) -> None:
        cu_q, cu_k, max_q, max_k = self.offsets
        arguments.packed(q, k, v, cu_q, cu_k)
        arguments.max_seqlen("max_seqlen_q", max_q)
        arguments.max_seqlen("max_seqlen_k", max_k)

    def check_values(self, q, k, flags) -> None:
        """Checks offsets at every call where that costs no wait for a GPU; on a GPU only under FFPA_CHECK=1."""
        cu_q, cu_k, max_q, max_k = self.offsets
        if cu_q.device.type == "cpu" or flags["FFPA_CHECK"]:
            memory_checks.offsets_values(cu_q, "cu_seqlens_q", q.shape[0], max_q, "max_seqlen_q")
            memory_checks.offsets_values(cu_k, "cu_seqlens_k", k.shape[0], max_k, "max_seqlen_k")

    def sizes(self, q, k) -> tuple[int, int, int, int, int]:
        cu_q, _, max_q, max_k = self.offsets
        return cu_q.shape[0] - 1, q.shape[1], k.shape[1], min(max_q, q.shape[0]), min(max_k, k.shape[0])

    def packed(self, q, k) -> tuple[int, int]:
        """Returns the rows and the keys of all sequences together."""
        return q.shape[0], k.shape[0]

    def lse_shape(self, q) -> tuple:
        return (q.shape[1], q.shape[0])

    def heads_first(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [H, T, D] as a view."""
        return x.transpose(0, 1)


def _scale(q, options) -> float:
    scale = options.get("scale")
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


_DTYPES = arguments.DTYPES | arguments.FP8


def describe(form, direction, q, k, v, options, device: str | None = None, arch: str | None = None) -> Problem:
    """Returns the problem of a call with checked arguments; device and arch are those asked for, or the tensors'."""
    get = options.get
    see = Visibility.of(
        get("causal", False), get("align", "bottom_right"), get("window_left", -1), get("window_right", -1)
    )
    return Problem(
        direction, device or q.device.type, arch or (native.gpu_of(q.device) if q.is_cuda else None), _DTYPES[q.dtype], *form.sizes(q, k),
        q.shape[-1], v.shape[-1], form.packed(q, k), see, _scale(q, options), float(get("softcap", 0.0)), arguments.mask_kind(form.mask),
        get("return_lse", True), get("level"), get("acc", "f32"), get("num_stages"),
    )  # fmt: skip
