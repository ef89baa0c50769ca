"""This module is what the operators do under torch.vmap: the mapped dim joins the batch, so that a map is one call.

Packed sequences, keys in pages and 8-bit floats have no rule here: PyTorch calls their operators once for each entry.
"""

from __future__ import annotations

from functools import partial

import torch

from ..checks.memory_checks import made_readable
from .forms import MAX_LOGITS

_ops = torch.ops.ffpa_attn


def register(lib: torch.library.Library) -> None:
    rules = {"backward": _backward, "sink_gradient_delta": _sink_gradient_delta, "append_to_cache": _append}
    for more in ("", MAX_LOGITS):
        rules |= {f"forward{more}": partial(_forward, getattr(_ops, f"forward{more}"))}
        rules |= {f"{kind}forward_out{more}": _to_out for kind in ("", "varlen_", "paged_")}
    for name, rule in rules.items():
        torch.library.register_vmap(f"ffpa_attn::{name}", rule, lib=lib)


def _forward(op, info, in_dims, q, k, v, mask=None, sinks=None, **options):
    x, batch = info.batch_size, _shape_of_one(q, in_dims[0])[0]
    has_lse = options.get("return_lse", True)
    if sinks is not None and in_dims[4] is not None:
        if x:
            return _forward_of_each(op, x, in_dims, (q, k, v, mask, sinks), has_lse, options)
        sinks = sinks.new_empty(_shape_of_one(sinks, in_dims[4]))  # there is no entry, and no row
    rows = [made_readable(_folded(t, d, x)) for t, d in zip((q, k, v), in_dims, strict=False)]
    if mask is not None:
        mask = _folded_mask(mask, in_dims[3], x, batch)
    out, lse, *largest = op(*rows, mask, sinks, **options)
    unfolded = partial(_unfolded, size=x, batch=batch)
    dims = 0, 0 if has_lse else None, *(0 for _ in largest)
    return (unfolded(out), unfolded(lse) if has_lse else lse, *map(unfolded, largest)), dims


def _forward_of_each(op, size: int, in_dims, tensors, has_lse: bool, options):
    """Calls the operator once for each entry: a call has one sink for each head, and these have sinks of their own."""
    entries = [(t,) * size if d is None else t.unbind(d) for t, d in zip(tensors, in_dims, strict=True)]
    results = [op(*map(made_readable, each[:3]), *each[3:], **options) for each in zip(*entries, strict=True)]
    out, lse, *largest = map(torch.stack, zip(*results, strict=True))
    return (out, lse if has_lse else lse[0], *largest), (0, 0 if has_lse else None, *(0 for _ in largest))


def _backward(
    info, in_dims, grad_out, grad_lse, q, k, v, out, lse, mask=None, delta=None, *, mask_grad=False, **options
):
    x, batch = info.batch_size, _shape_of_one(q, in_dims[2])[0]
    rows = [made_readable(_folded(t, d, x)) for t, d in zip((q, k, v, out), in_dims[2:6], strict=True)]
    grad_out, lse = _folded(grad_out, in_dims[0], x), _folded(lse, in_dims[6], x)
    grad_lse = None if grad_lse is None else _folded(grad_lse, in_dims[1], x)
    delta = None if delta is None else _folded(delta, in_dims[8], x)
    # Each entry has a gradient of its own, even of a mask that all share.
    folded = None if mask is None else _folded_mask(mask, in_dims[7], x, batch, whole=mask_grad)
    *grads, dmask = _ops.backward(grad_out, grad_lse, *rows, lse, folded, delta, mask_grad=mask_grad, **options)
    if mask_grad:
        dmask = _of_one_mask(_unfolded(dmask, x, batch), _shape_of_one(mask, in_dims[7]))
    return (*(_unfolded(grad, x, batch) for grad in grads), dmask), (0, 0, 0, 0 if mask_grad else None)


def _sink_gradient_delta(info, in_dims, *tensors, **options):
    """Calls the operator once for each entry, whose sums are its own; where there is none, for the shapes alone."""
    given = list(zip(tensors, in_dims, strict=True))
    entries = [
        [t if d is None else made_readable(t.select(d, i)) for t, d in given] for i in range(info.batch_size)
    ] or [[t if d is None else t.new_zeros(_shape_of_one(t, d)) for t, d in given]]
    results = zip(*(_ops.sink_gradient_delta(*entry, **options) for entry in entries), strict=True)
    return tuple(torch.stack(x)[: info.batch_size] for x in results), (0, 0)


def _to_out(info, in_dims, q, k, v, out, *rest, **options):
    raise NotImplementedError("`out` is given under torch.vmap, which makes its results itself: leave `out` away")


def _append(info, in_dims, *tensors):
    raise NotImplementedError(
        "new rows are to be written into a cache under torch.vmap, whose entries may share it: call ffpa_with_kvcache once, "
        "with a batch of sequences"
    )


def _shape_of_one(t, dim: int | None) -> list[int]:
    shape = list(t.shape)
    if dim is not None:
        del shape[dim]
    return shape


def _mapped_first(t, dim: int | None, size: int) -> torch.Tensor:
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _folded(t, dim: int | None, size: int) -> torch.Tensor:
    """Turns [B, …] of each entry into [size * B, …]; what all entries share is copied only where B is more than 1."""
    return _mapped_first(t, dim, size).flatten(0, 1)


def _unfolded(t, size: int, batch: int) -> torch.Tensor:
    return t.reshape(size, batch, *t.shape[1:])


def _folded_mask(mask, dim: int | None, size: int, batch: int, whole: bool = False) -> torch.Tensor:
    """Folds a mask; one that all entries and batches share stays as it is, unless each is to have its own (`whole`)."""
    shape = _shape_of_one(mask, dim)
    shared = dim is None and (len(shape) < 4 or shape[0] == 1)
    if shared and not whole:
        return mask
    shape = [1] * (4 - len(shape)) + shape
    mask = _mapped_first(mask, dim, size).reshape(size, *shape)
    return mask.expand(size, batch, *shape[1:]).flatten(0, 1)


def _of_one_mask(dmask, shape: list[int]) -> torch.Tensor:
    """Turns [size, batch, …] into the gradient of a mask of this shape: a sum, where the batch shares the mask."""
    if len(shape) < 4 or shape[0] == 1:
        dmask = dmask.sum(1, keepdim=True, dtype=torch.float32).to(dmask.dtype)
    return dmask.reshape(dmask.shape[0], *shape)
