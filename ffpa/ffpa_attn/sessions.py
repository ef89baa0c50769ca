"""Programs that run others, which a terminal's Ctrl-C does not reach and which do not outlive an exception here. No torch here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator

_PATIENCE = 3.0  # seconds that a program which was asked to end may take for it


def run(command: list[str], heard: Callable[[str], None], environment: dict[str, str], **options) -> int:
    """Runs the command in a session of its own and hands each line of its output to `heard`; returns its status.

    The program of the user decides what Ctrl-C means to it: where it goes on, so does the command; where it raises, here
    too, the command ends, with all that it started.
    """
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    text = {"text": True, "errors": "replace"}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes, **text, **options) as process:
        try:
            for line in process.stdout:
                heard(line)
            return process.wait()
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen) -> None:
    process.terminate()  # ninja hands it on to its compilers, and removes what they had half written
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
    finally:
        process.kill()  # first, for it to start nothing else
        for member in _members(process.pid):
            with contextlib.suppress(OSError):
                os.kill(member, signal.SIGKILL)


def _members(session: int) -> Iterator[int]:
    """The processes of a session; ninja gives each compiler a group of its own."""
    for entry in os.listdir("/proc"):
        with contextlib.suppress(ValueError, OSError):
            if os.getsid(int(entry)) == session:
                yield int(entry)
