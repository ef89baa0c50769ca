"""What users hear of a build while they wait for it. No torch here."""

from __future__ import annotations

import contextlib
import sys


def say(text: str, end: str = "\n") -> None:
    """Writes to stderr, where there is one: a program may have closed it, and who read it may be gone."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, end=end, file=sys.stderr, flush=True)
