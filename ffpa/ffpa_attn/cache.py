"""Where compiled code is kept: a directory that only its owner can write, and locks between processes. No torch here."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import env
from .toolchain import BuildError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_directory() -> Path:
    return Path(env.run_flags()["FFPA_CACHE_DIR"] or "~/.cache/ffpa_attn").expanduser().absolute()


def _unusable(directory: Path, why: str) -> BuildError:
    return BuildError(f"the cache of compiled kernels, {directory}, {why}; or set FFPA_CACHE_DIR to one of your own")


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_out = "free some space there" if full else "make it writable"
        raise _unusable(directory, f"cannot be written ({error}): {way_out}") from error


def open_cache() -> Path:
    """The cache's directory, made if need be. Libraries in it are code that we run: nobody else may write there."""
    directory = cache_directory()
    with writing(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        check_owner(directory)
    return directory


def check_owner(directory: Path) -> None:
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise _unusable(
            directory, f"belongs to user {status.st_uid}, and this is user {os.geteuid()}: change its owner"
        )
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise _unusable(directory, f"is writable by other users (mode {stat.S_IMODE(status.st_mode):o}): chmod 700 it")


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Holds the lock at `path`; the kernel drops it when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"ffpa_attn: waiting for another process that compiles {what}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
