"""This module launches Triton kernels: with little host time, by TMA descriptors where tensors allow it, or
interpreted.

Importing this module imports no Triton. On the CPU kernels run in Triton's interpreter (TRITON_INTERPRET=1, to be set
before Triton is imported).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from .. import env
from ..checks import memory_checks
from ..launching import compiled, native
from ..support import progress
from ..support.transient import is_transient
from . import interpreter, parameters


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


def has_descriptor(x: torch.Tensor) -> bool:
    """Says whether TMA can read it: no two of its rows may be the same memory."""
    twice = any(stride <= 0 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1)
    return x.numel() > 0 and not memory_checks.rows_problem(x) and not twice


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


Step = tuple[Any, Sequence, Callable[[], Launch]]  # a kernel, its tensors, and what a kind's first call finds out


class _Known(NamedTuple):
    """A kernel that was launched, and what all calls of its kind give it alike."""

    run: Callable  # Triton's launch; what it holds of Triton's keeps the kernel loaded
    rest: Sequence  # what Triton takes after the tensors
    kernel: compiled.Kernel | str  # as the driver launches it, or why Triton has to


def launch(memo: Memo, kernel, tensors: Sequence, how: Callable[[], Launch]) -> None:
    """Launches a kernel; after a kind's first call without Triton's look at every argument, which takes 0.3 ms."""
    known = memo.get(kernel.__name__)
    if known is not None:
        return known.run(*tensors, *known.rest)
    programs, numbers, options, tiles = how()
    constants = {**options, "ROWS": tiles.rows, "KEYS": tiles.keys}
    constants = {name: constants[name] for name in kernel.arg_names[len(tensors) + len(numbers) :]}
    kind = kernel.__name__, tiles, *constants.values(), *map(_type_of, tensors)
    if kind in _unable:
        raise Unable(_unable[kind])
    handled = sys.exc_info()[1]
    try:
        made = kernel[programs, 1, 1](*tensors, *numbers, **constants, **tiles.options)
    except BaseException as error:
        getattr(kernel, "device_caches", {}).clear()  # Triton takes a kernel whose loading failed for loaded
        interpreted = tensors[-1].device.type == "cpu"  # what fails there has a reason of its own
        if is_transient(error, handled) or interpreted:
            raise
        _unable[kind] = f"Triton failed here, at {kernel.__name__}: {error}"  # it may be LLVM, ptxas or the C compiler
        raise Unable(_unable[kind]) from error
    if made is not None:  # the interpreter returns None
        rest = (*numbers, *constants.values())
        read = parameters.read(made, kernel.arg_names, programs, (*tensors, *rest))
        memo[kernel.__name__] = _Known(made[programs, 1, 1], rest, read)


# ---- without Triton ----


class _AtOnce(NamedTuple):
    """All kernels of a kind of call."""

    launch: Callable[..., None] | None  # it takes the addresses of a call's tensors
    why_not: str | None
    kernels: Sequence[_Known]  # they stay loaded, whatever other threads put into the memo


def run(
    memo: Memo,
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    steps: Callable[[], Iterable[Step]],
    parts: Mapping[str, tuple[str, int]] | None = None,
) -> None:
    """Launches all kernels of a call, in order: by one call of C where an earlier call of the kind prepared that, else
    by launch, with what `steps` gives. `names` are those that kernels give to a call's tensors; `parts` are more names,
    for what begins so many bytes after a tensor does.
    """
    at_once = memo.get("at once")
    if at_once is not None and at_once.launch is not None and not _is_heard():
        return at_once.launch(*[x.data_ptr() for x in tensors])
    device, kernels = tensors[0].device, []
    with running(device):
        for kernel, given, how in steps():
            launch(memo, kernel, given, how)
            kernels.append(kernel.__name__)
    known = [memo.get(name) for name in kernels]
    if None in known or not known or "at once" in memo:  # they are interpreted, or it was tried
        return
    places = {name: (i, 0) for i, name in enumerate(names)}
    places |= {part: (places[name][0], at) for part, (name, at) in (parts or {}).items()}
    at_once, why_not = None, next((x.kernel for x in known if isinstance(x.kernel, str)), None)
    if native.record() is None:
        why_not = native.PYTHON_ONLY
    try:
        if not why_not:
            with running(device):
                at_once = compiled.launcher([x.kernel for x in known], places, device.index)
    except RuntimeError as error:
        why_not = str(error)
    memo["at once"] = _AtOnce(at_once, why_not, known)
    if why_not and env.run_flags()["FFPA_LOG"]:
        progress.say(f"ffpa_attn: Triton itself launches {', '.join(kernels)}, slowly: {why_not}")


def launch_alone(memo: Memo, kernel, tensors: Sequence[torch.Tensor], how: Callable[[], Launch]) -> None:
    """Launches the one kernel that calls of a kind have."""
    run(memo, tensors, kernel.arg_names[: len(tensors)], lambda: [(kernel, tensors, how)])


@cache
def _runtime():
    from triton import knobs

    return knobs.runtime


def _is_heard() -> bool:
    """Says whether somebody, such as a profiler, listens to Triton's launches."""
    runtime = _runtime()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _type_of(tensor) -> tuple:
    """Returns the type and device of a tensor, or of the one that a descriptor describes."""
    x = getattr(tensor, "base", tensor)
    return x.dtype, x.device
