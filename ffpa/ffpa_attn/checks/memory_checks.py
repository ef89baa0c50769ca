"""Checks what only real memory tells: how rows lie, what overlaps, what offsets hold; messages as in `arguments.py`."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch

from ..specs.problem import ROW_ALIGNMENT
from ..support.private_torch import FakeTensor, FunctionalTensor, find

is_wrapped = find("torch._C._functorch.is_functorch_wrapped_tensor") or (lambda x: False)


def has_memory(x) -> bool:
    """Says whether there is an address to ask for."""
    return not (x.is_meta or isinstance(x, (FakeTensor, FunctionalTensor)) or is_wrapped(x))


def values_are_read(x, flags) -> bool:
    """Says whether calls on the device of x check what tables and lengths hold: on a CPU, where that waits for no GPU, and
    under FFPA_CHECK=1.
    """
    return x.device.type == "cpu" or flags["FFPA_CHECK"]


def rows_problem(x, alignment: int = ROW_ALIGNMENT) -> str | None:
    """Says why kernels cannot read rows of x as they lie, or None; without memory it says as much as strides tell."""
    if x.numel() == 0:
        return None
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return f"has stride {x.stride(-1)} in its last dim; it must be 1"
    step = max(alignment // x.element_size(), 1)
    if any(size > 1 and stride % step for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)):
        return f"has strides {x.stride()}; all but the last must be multiples of {step} (rows aligned to {alignment} bytes)"
    if has_memory(x) and x.data_ptr() % alignment:
        return f"starts at an address that is not a multiple of {alignment} bytes"
    return None


def readable(x) -> bool:
    """Says whether kernels read the rows of x as they lie; for a traced tensor, as far as strides tell. It has no
    address yet; should that be odd, the call will say so.
    """
    if not torch.compiler.is_compiling():
        return rows_problem(x) is None
    step = ROW_ALIGNMENT // x.element_size()
    return x.stride(-1) == 1 and not any(stride % step for stride in x.stride()[:-1])


def made_readable(x) -> torch.Tensor:
    """Returns x, or a copy where its rows could not be read as they lie."""
    return x if readable(x) else x.clone(memory_format=torch.contiguous_format)


def rows(alignment: int = ROW_ALIGNMENT, **named) -> None:
    """Checks how rows lie; those of 8-bit floats may lie anywhere."""
    for name, x in named.items():
        if problem := rows_problem(x, alignment if x.element_size() > 1 else 1):
            # Rows that only start at a wrong address would come back from contiguous() as they are; a clone is aligned.
            way_out = "clone" if problem.startswith("starts") else "contiguous"
            raise ValueError(f"`{name}` {problem}; make a copy with {name}.{way_out}()")


def _memory(x) -> tuple[int, int, bool]:
    """Returns the addresses that x may touch, [first, past the last), and whether it touches all of them."""
    span = _span(x.shape, x.stride())
    return x.data_ptr(), x.data_ptr() + span * x.element_size(), span == x.numel()


def extent(x) -> int:
    """Returns the bytes from the first address that x may touch to the last one."""
    return _span(x.shape, x.stride()) * x.element_size() if x.numel() else 0


@lru_cache(4096)
def _span(shape, strides) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def surely_overlap(a, b) -> bool:
    """Says whether memory is shared for sure: not by views that interleave, such as slots of a packed qkv tensor."""
    (a_lo, a_hi, a_full), (b_lo, b_hi, b_full) = _memory(a), _memory(b)
    return a_lo == b_lo or (a_full and b_full and a_lo < b_hi and b_lo < a_hi)


def in_range(a, b) -> bool:
    """Says whether one of the addresses between the first and the last of a is between those of b."""
    (a_lo, a_hi, _), (b_lo, b_hi, _) = _memory(a), _memory(b)
    return a_lo < b_hi and b_lo < a_hi


def _steps(shape, strides) -> list[tuple[int, int]]:
    """Returns (stride, size) of all dims of more than one, the longest stride first."""
    return sorted(((step, n) for step, n in zip(strides, shape, strict=True) if n > 1), reverse=True)


def _reach(steps) -> int:
    return sum(step * (n - 1) for step, n in steps)


def has_own_places(x) -> bool:
    """Says whether it is certain that no two elements of x share memory: each stride passes all that shorter ones reach."""
    steps = _steps(x.shape, x.stride())
    return all(step > _reach(steps[i + 1 :]) for i, (step, _) in enumerate(steps))


def may_meet(a, b) -> bool:
    """Says whether two tensors of one type, whose elements have their own places, may share memory. Where their strides are
    the same the answer is exact.
    """
    return _may_meet((b.data_ptr() - a.data_ptr()) // a.element_size(), a.shape, a.stride(), b.shape, b.stride())


@lru_cache(4096)
def _may_meet(ahead: int, *shapes_and_strides) -> bool:
    shape_a, strides_a, shape_b, strides_b = shapes_and_strides
    return _meet(ahead, _steps(shape_a, strides_a), _steps(shape_b, strides_b))


def _meet(ahead: int, a, b) -> bool:
    """Says whether elements at `a` and at `b`, which begins so far ahead, may meet, one common stride after the other."""
    if ahead > _reach(a) or -ahead > _reach(b):
        return False
    if not a or not b or a[0][0] != b[0][0]:
        return True
    (step, of_a), (_, of_b) = a[0], b[0]
    least, most = -((_reach(a[1:]) - ahead) // step), (ahead + _reach(b[1:])) // step
    differences = range(max(least, 1 - of_b), min(most, of_a - 1) + 1)
    return any(_meet(ahead - step * n, a[1:], b[1:]) for n in differences)


def writable(out, **inputs) -> None:
    if out.numel() == 0:
        return
    if is_expanded(out):
        raise ValueError(
            f"`out` is expanded (strides {out.stride()}): several of its elements share memory; pass out.clone()"
        )
    for name, x in inputs.items():
        if x is not None and x.numel() and x.device == out.device and surely_overlap(out, x):
            raise ValueError(f"`out` overlaps the memory of `{name}`; pass a buffer of its own")


def is_expanded(x) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def offsets_values(cu, name: str, total: int, longest: int, max_name: str) -> None:
    """Reads the offsets and checks them, which waits for the GPU if they are there."""
    values = cu.tolist()
    if values[0] < 0 or values[-1] > total:
        raise ValueError(f"`{name}` spans {values[0]}..{values[-1]}; the tensor has rows 0..{total}")
    lengths = [b - a for a, b in pairwise(values)]
    for i, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"`{name}` falls from {values[i]} to {values[i + 1]} at entry {i + 1}; offsets must not decrease"
            )
        if length > longest:
            raise ValueError(
                f"`{max_name}` is {longest} but sequence {i} has {length} rows; pass at least the longest length"
            )
