"""This module tells torch.utils.flop_counter what to count of a call: operations by PyTorch's own rules.

By these a causal call has all pairs of rows and keys, so a model counts the same as with PyTorch's attention. A window
counts the pairs it sees: all would be many times the work. A backward has the scores once more, and four products. Sinks
and the largest scores count nothing, nor does the gradient of sinks.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ..backends.reference_rows import key_lengths
from ..support.imports import when_imported
from ..support.private_torch import FakeTensor
from .forms import MAX_LOGITS, Dense, operators, visibility


def register() -> None:
    """Registers once the counter is imported: it brings Triton, which takes longer than all of this package."""
    when_imported(r"torch\.utils\.flop_counter", _register)


def _register(counter) -> None:
    for name, formula in _FORMULAS.items():
        operator = getattr(torch.ops.ffpa_attn, name)
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator, get_raw=True)(formula)


def _forward(form, q, k, v, out, options) -> int:
    return _pairs_of(form, q, k, options) * 2 * (q.shape[-1] + v.shape[-1])


def _backward(form, tensors, fp32_grads, mask_grad, options) -> int:
    _, _, q, k, v, *_ = tensors
    return _pairs_of(form, q, k, options) * 2 * (3 * q.shape[-1] + 2 * v.shape[-1])


def _forward_fp8(q, k, v, *_, v_transposed=False, **options) -> int:
    return _forward(Dense(), q, k, v.mT if v_transposed else v, None, options)


_OF_FP8 = {"fp8_forward": _forward_fp8, f"fp8_forward{MAX_LOGITS}": _forward_fp8}
_FORMULAS = {**operators(_forward, _backward), **_OF_FP8}


def _pairs_of(form, q, k, options) -> int:
    """Counts every sequence as long as may be where offsets hold no numbers, as PyTorch does; else reads them."""
    if form.pages is not None:
        return _pairs_of_pages(form, q, k, options)
    if form.offsets is None:
        batch, heads, _, rows, keys = form.sizes(q, k)
        return batch * heads * _pairs(rows, keys, options)
    cu_q, cu_k, max_q, max_k = form.offsets
    if isinstance(cu_q, FakeTensor) or cu_q.is_meta:
        return q.shape[1] * (cu_q.shape[0] - 1) * _pairs(max_q, max_k, options)
    lengths = (
        [min(max(end - start, 0), longest) for start, end in pairwise(cu.tolist())]
        for cu, longest in ((cu_q, max_q), (cu_k, max_k))
    )
    return q.shape[1] * sum(_pairs(*both, options) for both in zip(*lengths, strict=True))


def _pairs_of_pages(form, q, k, options) -> int:
    batch, heads, _, rows, longest = form.sizes(q, k)
    if isinstance(form.pages.used, FakeTensor) or form.pages.used.is_meta:
        return batch * heads * _pairs(rows, longest, options)
    of_rows = [rows] * batch
    if form.offsets is not None:
        of_rows = form.offsets[0].diff().clamp(0, rows).tolist()
    lengths = key_lengths(form.pages).tolist()
    return heads * sum(_pairs(*both, options) for both in zip(of_rows, lengths, strict=True))


def _pairs(rows: int, keys: int, options) -> int:
    if options.get("window_left", -1) < 0 and options.get("window_right", -1) < 0:
        return rows * keys
    see = visibility(options)
    shift = 0 if see.top_left else keys - rows
    seen = rows * keys if see.right < 0 else _keys_up_to(shift + see.right, rows, keys)
    return seen - (0 if see.left < 0 else _keys_up_to(shift - see.left - 1, rows, keys))


def _keys_up_to(shift: int, rows: int, keys: int) -> int:
    """Returns the number of pairs whose key is no later than row + shift."""
    some = min(max(-shift, 0), rows)  # the first row that has any key
    every = min(max(keys - 1 - shift, some), rows)  # the first row that has all keys
    return (rows - every) * keys + (every - some) * (some + every - 1) // 2 + (every - some) * (shift + 1)
