"""Knows errors a retry may not meet. They reach the caller as they are; nothing that outlasts a call remembers them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import traceback

import torch

_OF_TOOLS = frozenset(
    getattr(errno, name)
    for name in "ENOMEM ENOSPC EDQUOT EFBIG EMFILE ENFILE EAGAIN EINTR EBUSY ETXTBSY EIO ESTALE".split()
)
# Compilers say ENOENT of what a source includes, so it is none of theirs.
_OF_THE_SYSTEM = _OF_TOOLS | {errno.ENOENT, errno.EPIPE, errno.EBADF}
_ALWAYS = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
_OF_CUDA = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")
# CUDA says these of the kernel itself, and would say them again.
_OF_A_KERNEL = (
    "device kernel image is invalid",
    "no kernel image is available",
    "PTX JIT compil",
    "unsupported toolchain",
    "too many resources requested for launch",
)
# Compilers, ninja and the shell say these of such, and of a signal that ended one: a full disk may be a bus error.
_OF_COMPILERS = (
    *(f"signal {number}" for number in (7, 9, 15, 24, 25)),
    "Killed",
    "Terminated",
    "Bus error",
    "CPU time limit exceeded",
    "File size limit exceeded",
    "interrupted by user",
)
_IN_ANY_CASE = (*(os.strerror(number).lower() for number in _OF_TOOLS), "out of memory", "memory exhausted")


def is_transient(error: BaseException, handled: BaseException | None = None) -> bool:
    """Says whether another try may end otherwise, with memory that is free again or another state of the GPU or
    machine. `handled` is what somebody was handling already, perhaps by this very retry: it is no cause.
    """
    if not isinstance(error, Exception) or isinstance(error, _ALWAYS) or _is_of_a_signal(error):
        return True
    if isinstance(error, OSError):
        return error.errno in _OF_THE_SYSTEM
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode < 0  # a signal killed the program
    text = str(error)
    if any(words in text for words in _OF_CUDA):
        return not any(words in text for words in _OF_A_KERNEL)
    if any(words in text for words in _OF_COMPILERS) or any(words in text.lower() for words in _IN_ANY_CASE):
        return True
    cause = error.__cause__ or error.__context__
    # An error raised because of this one means that a tool was looked for, and there is none.
    missing = isinstance(cause, FileNotFoundError)
    return cause is not None and cause is not handled and not missing and is_transient(cause, handled)


def _is_of_a_signal(error: BaseException) -> bool:
    """Says whether a signal handler raised it, as a time limit does: that says nothing of the work it interrupted."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))
