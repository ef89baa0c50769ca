"""This module launches Triton kernels: with little host time, by TMA descriptors where tensors allow it, or
interpreted.

Importing this module imports no Triton. On the CPU kernels run in Triton's interpreter (TRITON_INTERPRET=1, to be set
before Triton is imported).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..support.transient import is_transient
from . import interpreter


class Tiles(NamedTuple):
    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # the most registers of a thread, to have more programs on a core

    @property
    def options(self) -> dict[str, int]:
        """Returns them as Triton's compiler takes them."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


def running(device: torch.device) -> contextlib.AbstractContextManager:
    if device.type == "cpu":
        return interpreter.exact()
    return contextlib.nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def has_rows(x: torch.Tensor) -> bool:
    """Says whether kernels can read it: rows, heads and batch entries begin at 16 bytes, columns lie side by side."""
    steps = [stride * x.element_size() for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in steps)


def has_descriptor(x: torch.Tensor) -> bool:
    """Says whether TMA can read it: no two of its rows may be the same memory."""
    twice = any(stride <= 0 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1)
    return x.numel() > 0 and has_rows(x) and not twice


def describer(x: torch.Tensor, *block: int) -> Callable[[torch.Tensor], Any]:
    """Returns what gives the TMA descriptor of such a tensor, in blocks (whose first sizes are 1 where they are not
    named). TensorDescriptor's own checks, of 13 µs, are made here, once.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [16 if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    block = (1,) * (x.dim() - len(block)) + block
    fields = vars(TensorDescriptor(x, list(x.shape), [*strides, 1], list(block))) | {"base": None}

    def describe(tensor: torch.Tensor) -> Any:
        if not _thread.has_context:
            _make_context_current(tensor.device)
        descriptor = TensorDescriptor.__new__(TensorDescriptor)
        vars(descriptor).update(fields, base=tensor)
        return descriptor

    return describe


class _Thread(threading.local):
    has_context = False


_thread = _Thread()


def _make_context_current(device: torch.device) -> None:
    """Gives a thread a CUDA context: before a call of CUDA's runtime it has none, and TMA descriptors need one."""
    if device.type == "cuda":
        torch.cuda.mem_get_info(device)  # a capture may be under way, which other calls would end
    _thread.has_context = True


def strides(*tensors: torch.Tensor) -> list:
    from .forward_kernels import Strides

    return [Strides(*x.stride()[:3]) for x in tensors]


Memo = dict[str, Any]  # what calls of one kind (shapes, strides, types, alignments) have in common, once it is known


@lru_cache(1024)
def memo_of(*kind) -> Memo:
    """Returns the memo of calls that no plan keeps one for."""
    return {}


def kind_of(*tensors: torch.Tensor) -> tuple:
    return tuple((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors)


class Unable(RuntimeError):
    """Triton could not compile, or load, a kernel here, and no retry will."""


_unable: dict[tuple, str] = {}  # kinds of kernels, and why each cannot run in this process


class Launch(NamedTuple):
    """What all calls of a kind give a kernel alike."""

    programs: int
    numbers: Sequence
    options: Mapping
    tiles: Tiles


def launch(memo: Memo, kernel, tensors: Sequence, how: Callable[[], Launch]) -> None:
    """Launches a kernel; after a kind's first call without Triton's look at every argument, which takes 0.3 ms."""
    ready = memo.get(kernel.__name__)
    if ready is not None:
        run, rest = ready
        return run(*tensors, *rest)
    programs, numbers, options, tiles = how()
    constants = {**options, "ROWS": tiles.rows, "KEYS": tiles.keys}
    constants = {name: constants[name] for name in kernel.arg_names[len(tensors) + len(numbers) :]}
    kind = kernel.__name__, tiles, *constants.values(), *map(_type_of, tensors)
    if kind in _unable:
        raise Unable(_unable[kind])
    handled = sys.exc_info()[1]
    try:
        compiled = kernel[programs, 1, 1](*tensors, *numbers, **constants, **tiles.options)
    except BaseException as error:
        getattr(kernel, "device_caches", {}).clear()  # Triton takes a kernel whose loading failed for loaded
        interpreted = tensors[-1].device.type == "cpu"  # what fails there has a reason of its own
        if is_transient(error, handled) or interpreted:
            raise
        _unable[kind] = f"Triton failed here, at {kernel.__name__}: {error}"  # it may be LLVM, ptxas or the C compiler
        raise Unable(_unable[kind]) from error
    if compiled is not None:  # the interpreter returns None
        memo[kernel.__name__] = compiled[programs, 1, 1], (*numbers, *constants.values())


def _type_of(tensor) -> tuple:
    """Returns the type and device of a tensor, or of the one that a descriptor describes."""
    x = getattr(tensor, "base", tensor)
    return x.dtype, x.device
