"""This module keeps compiled code: in a directory that only its owner can write, with locks between processes, in files
that show whether they are whole. No torch here.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from .. import env
from ..support.progress import say
from .toolchain import BuildError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
PRIVATE = 0o077  # the umask of all that is kept here
_SEAL = hashlib.sha256().digest_size * 2  # characters at the end of a file: the digest of what goes before


def cache_directory() -> Path:
    try:
        return Path(env.run_flags()["FFPA_CACHE_DIR"] or "~/.cache/ffpa_attn").expanduser().absolute()
    except RuntimeError as error:  # neither HOME nor the list of users says where the user is at home
        raise BuildError(f"there is no place for the cache of compiled kernels: {error} Set FFPA_CACHE_DIR") from None


def _unusable(directory: Path, why: str) -> BuildError:
    return BuildError(f"the cache of compiled kernels, {directory}, {why}; or set FFPA_CACHE_DIR to one of your own")


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (None, errno.ENOENT):  # a time limit of the program ended it, or somebody removed the cache
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_out = "free some space there" if full else "make it writable"
        raise _unusable(directory, f"cannot be written ({error}): {way_out}") from error


def open_cache() -> Path:
    """Returns the cache's directory, made if need be; no link in its path could be set to another one meanwhile."""
    directory = cache_directory()
    try:
        with writing(directory):
            make_private(directory)
            return check_owner(directory)
    except FileNotFoundError as error:
        raise _unusable(directory, f"cannot be made ({error}): make one that can") from error


def make_private(directory: Path) -> None:
    """Makes the directory and the parents that are missing, each its owner's alone whatever the umask."""
    for place in (*reversed(directory.parents), directory):
        place.mkdir(mode=0o777 & ~PRIVATE, exist_ok=True)


def check_owner(directory: Path) -> Path:
    """Returns the directory this is or leads to. Its libraries are code that we run: nobody else may write there."""
    place = directory.resolve(strict=True)
    status = place.lstat()
    if status.st_uid != os.geteuid():
        raise _unusable(
            directory, f"belongs to user {status.st_uid}, and this is user {os.geteuid()}: change its owner"
        )
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise _unusable(directory, f"is writable by other users (mode {stat.S_IMODE(status.st_mode):o}): chmod 700 it")
    return place


# ---- files ----


class Library(NamedTuple):
    name: str  # path to load it by
    content: bytes  # content of the file without its seal


_opened = itertools.count(1)


# This program appends its digest to a file and moves that to its final name, as `keep` does with bytes.
SEALS = (
    "import hashlib, os, sys; part, path = sys.argv[1:]; file = open(part, 'rb+'); "
    "file.write(hashlib.sha256(file.read()).hexdigest().encode()); file.close(); os.replace(part, path)"
)


def keep(content: bytes, path: Path, fresh: Path) -> None:
    """Writes content and seal to `fresh`, a name nobody else uses, and renames it: `path` is whole or nothing."""
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content + hashlib.sha256(content).hexdigest().encode())
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)


@contextmanager
def opened(path: Path) -> Iterator[Library | None]:
    """Gives what the cache keeps at this path; None where that is not whole, or not this user's alone.

    The name to load it by is that of the open file, so what was checked is what is loaded, whatever becomes of the
    path. Each has another name, because the dynamic loader takes two files of one name for one.
    """
    with ExitStack() as closing:
        try:
            folder = _open_private(path.parent, os.O_DIRECTORY, closing)
            file = _open_private(path.name, os.O_NONBLOCK, closing, folder)
            with open(file, "rb", closefd=False) as whole:
                content = whole.read()
        except OSError:
            content = b""
        sealed, seal = content[:-_SEAL], content[-_SEAL:]
        if seal != hashlib.sha256(sealed).hexdigest().encode():
            yield None
            return
        yield Library(f"/proc/self/fd{'/' * next(_opened)}{file}", sealed)


def _open_private(name: Path | str, flags: int, closing: ExitStack, folder: int | None = None) -> int:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=folder)
    closing.callback(os.close, file)
    status = os.fstat(file)
    if status.st_uid != os.geteuid() or status.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(errno.EACCES, "belongs to others, or they can write it", str(name))
    return file


# ---- locks ----


@contextmanager
def locked(path: Path, what: str) -> Iterator[int]:
    """Holds the lock at `path` and gives its descriptor. A child that inherits that holds it too: the last frees it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"ffpa_attn: waiting for another process that compiles {what}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a fork of this process, which lives on, has it open too
        os.close(file)
