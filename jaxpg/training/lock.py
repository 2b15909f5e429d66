"""One writer per directory: a lock that the operating system releases when its holder ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jaxpg.errors import UserError
from jaxpg.files import explain_os_error, without_following
from jaxpg.parallel import processes

LOCK = "jaxpg.lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of file systems that have no locks; there is no protection on those."""


class _Held(threading.local):
    """The directories that this thread has locked: a command locks its own, and the runs in it lock theirs."""

    def __init__(self) -> None:
        self.directories: set[Path] = set()


_held = _Held()


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the only lock on a directory, which is made if it is missing. Of several processes the main one holds it.

    Raises:
        UserError: in all processes, if another process or thread holds it, or if it cannot be written to.
    """
    with contextlib.ExitStack() as stack:
        processes.on_main_process(lambda: stack.enter_context(_hold(directory)))
        yield


@contextlib.contextmanager
def _hold(directory: Path) -> Iterator[None]:
    resolved = Path(os.path.realpath(directory))  # `resolve` raises no OSError for a link to itself
    if resolved in _held.directories:
        yield
        return
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    with explain_os_error(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = _take(directory)
    _held.directories.add(resolved)
    try:
        yield
    finally:
        _held.directories.discard(resolved)
        with contextlib.suppress(OSError):  # the directory is gone, or no longer writable
            (directory / LOCK).unlink()
            for folder in made:  # a command that is refused leaves no empty folders
                folder.rmdir()
        file.close()


def _take(directory: Path) -> IO[str]:
    """The lock file of a directory, locked, with the name of this process in it."""
    path = directory / LOCK
    while True:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(path, "a+", opener=without_following))
            _lock(file, directory)
            if _is_at(file, path):  # else the holder before has deleted it in between
                with contextlib.suppress(OSError):  # on a full disk the lock has no name
                    os.truncate(file.fileno(), 0)
                    os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                stack.pop_all()
                return file


def _lock(file: IO[str], directory: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise UserError(
            f"{directory} is in use by {holder}. Wait until that has ended, or choose another --out."
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False
