"""Tells users of a build while they wait for it, and of a call that is not what they may expect. No torch here."""

from __future__ import annotations

import contextlib
import sys
import warnings


def say(text: str, end: str = "\n") -> None:
    """Writes to stderr, where there is one: a program may have closed it, and whoever read it may be gone."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, end=end, file=sys.stderr, flush=True)


def warn(text: str, stacklevel: int) -> None:
    """Warns, even where stderr is closed and Python's own writing fails; a filter may still make an exception of it."""
    with contextlib.suppress(OSError, ValueError):
        warnings.warn(text, stacklevel=stacklevel + 1)
