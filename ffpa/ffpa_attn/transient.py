"""Errors that a retry may not meet. They reach the caller as they are, and nothing that outlasts the call remembers them."""

from __future__ import annotations

import errno
import subprocess

import torch

_OF_THE_SYSTEM = frozenset(
    getattr(errno, name)
    for name in "ENOENT ENOMEM ENOSPC EDQUOT EMFILE ENFILE EAGAIN EINTR EBUSY ETXTBSY EIO ESTALE".split()
)
_OF_CUDA = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")
# What CUDA says of the kernel itself, and would say again.
_OF_A_KERNEL = (
    "device kernel image is invalid",
    "no kernel image is available",
    "PTX JIT compil",
    "unsupported toolchain",
    "too many resources requested for launch",
)
_OF_COMPILERS = ("No space left on device", "annot allocate memory", "Too many open files", "signal 9", "signal 15")


def is_transient(error: BaseException, handled: BaseException | None = None) -> bool:
    """Whether memory that is free again, another state of the GPU or of the machine, may change what came of it. `handled` is what
    somebody was handling already, perhaps by this very retry: it is no cause.
    """
    if not isinstance(error, Exception) or isinstance(
        error, (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
    ):
        return True
    if isinstance(error, OSError):
        return error.errno in _OF_THE_SYSTEM
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode < 0  # it was killed
    text = str(error)
    if any(words in text for words in _OF_CUDA):
        return not any(words in text for words in _OF_A_KERNEL)
    if any(words in text for words in _OF_COMPILERS):
        return True
    cause = error.__cause__ or error.__context__
    missing = isinstance(
        cause, FileNotFoundError
    )  # who raises another error for it has looked for a tool, and there is none
    return cause is not None and cause is not handled and not missing and is_transient(cause, handled)
