"""This module tells torch.utils.flop_counter what to count of a call: operations by PyTorch's own rules.

By these a causal call has all pairs of rows and keys, so a model counts the same as with PyTorch's attention. A window
counts the pairs it sees: all would be many times the work. A backward has the scores once more, and four products.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ..specs.spec import Visibility
from ..support.imports import when_imported
from ..support.private_torch import FakeTensor


def register() -> None:
    """Registers once the counter is imported: it brings Triton, which takes longer than all of this package."""
    when_imported(r"torch\.utils\.flop_counter", _register)


def _register(counter) -> None:
    for name, formula in _FORMULAS.items():
        operator = getattr(torch.ops.ffpa_attn, name)
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator, get_raw=True)(formula)


def _forward(q, k, v, *_, layout="BHND", out_val=None, **options) -> int:
    return _pairs_of_dense(q, k, layout, options) * 2 * (q.shape[-1] + v.shape[-1])


def _backward(grad_out, grad_lse, q, k, v, *_, layout="BHND", out_val=None, **options) -> int:
    return _pairs_of_dense(q, k, layout, options) * 2 * (3 * q.shape[-1] + 2 * v.shape[-1])


def _fp8_forward(q, k, v, *_, v_transposed=False, out_val=None, **options) -> int:
    return _forward(q, k, v.mT if v_transposed else v, **options)


def _varlen_forward(q, k, v, *offsets, out_val=None, **options) -> int:
    return _pairs_of_packed(q, *offsets, options) * 2 * (q.shape[-1] + v.shape[-1])


def _varlen_forward_out(q, k, v, out, *offsets, out_val=None, **options) -> int:
    return _varlen_forward(q, k, v, *offsets, **options)


def _varlen_backward(grad_out, grad_lse, q, k, v, out, lse, *offsets, out_val=None, **options) -> int:
    return _pairs_of_packed(q, *offsets, options) * 2 * (3 * q.shape[-1] + 2 * v.shape[-1])


_FORMULAS = {
    "forward": _forward,
    "forward_out": _forward,
    "backward": _backward,
    "fp8_forward": _fp8_forward,
    "varlen_forward": _varlen_forward,
    "varlen_forward_out": _varlen_forward_out,
    "varlen_backward": _varlen_backward,
}


def _pairs_of_dense(q, k, layout: str, options) -> int:
    n, h = (2, 1) if layout == "BHND" else (1, 2)
    return q.shape[0] * q.shape[h] * _pairs(q.shape[n], k.shape[n], options)


def _pairs_of_packed(q, cu_q, cu_k, max_q, max_k, options) -> int:
    """Counts every sequence as long as may be where offsets hold no numbers, as PyTorch does; else reads them."""
    if isinstance(cu_q, FakeTensor) or cu_q.is_meta:
        return q.shape[1] * (cu_q.shape[0] - 1) * _pairs(max_q, max_k, options)
    lengths = (
        [min(max(end - start, 0), longest) for start, end in pairwise(cu.tolist())]
        for cu, longest in ((cu_q, max_q), (cu_k, max_k))
    )
    return q.shape[1] * sum(_pairs(*both, options) for both in zip(*lengths, strict=True))


def _pairs(rows: int, keys: int, options) -> int:
    get = options.get
    left, right = get("window_left", -1), get("window_right", -1)
    if left < 0 and right < 0:
        return rows * keys
    see = Visibility.of(get("causal", False), get("align", "bottom_right"), left, right)
    shift = 0 if see.top_left else keys - rows
    seen = rows * keys if see.right < 0 else _keys_up_to(shift + see.right, rows, keys)
    return seen - (0 if see.left < 0 else _keys_up_to(shift - see.left - 1, rows, keys))


def _keys_up_to(shift: int, rows: int, keys: int) -> int:
    """Returns the number of pairs whose key is no later than row + shift."""
    some = min(max(-shift, 0), rows)  # the first row that has any key
    every = min(max(keys - 1 - shift, some), rows)  # the first row that has all keys
    return (rows - every) * keys + (every - some) * (some + every - 1) // 2 + (every - some) * (shift + 1)
