"""Runs other programs, which a terminal's Ctrl-C does not reach and which outlive no exception here. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_PATIENCE = 3.0  # seconds that a program may take to end once it was asked to


def run(command: list[str], heard: Callable[[str], None], environment: dict[str, str], **options) -> int:
    """Runs the command in a session of its own and hands each line of its output to `heard`; returns its status.

    The program of the user decides what Ctrl-C means to it: where it goes on, so does the command; where it raises,
    here too, the command ends, with all that it started.
    """
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    text = {"text": True, "errors": "replace"}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes, **text, **options) as process:
        try:
            for line in process.stdout:
                heard(line)
            status = process.wait()
        except BaseException:
            process.terminate()  # ninja hands it on to its compilers, and removes what they had half written
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_PATIENCE)
            finally:
                process.kill()  # it goes first, so that it starts nothing else
                end(process.pid)
            raise
        if status:  # somebody may have killed it, or one of its compilers, whose children still write
            end(process.pid)
        return status


def end(session: int) -> None:
    """Kills what runs in the session and waits for its end, a few seconds at most if the system holds on to it."""
    latest = time.monotonic() + _PATIENCE
    while (members := list(_members(session))) and time.monotonic() < latest:
        for member in members:
            with contextlib.suppress(OSError):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.002)


def _members(session: int) -> Iterator[int]:
    """Gives the processes of a session that still run; ninja puts each compiler into a group of its own."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its_session, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(its_session) == session and state not in "ZX":  # a dead one is there until its parent asks for it
                yield int(stat.parent.name)
