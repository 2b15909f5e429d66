"""Arrays by name in a folder, by orbax: whole arrays of the host, written and read by this process alone."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

RESERVED = "reserved"
OVERHEAD_BYTES = 1 << 17
OVERHEAD_BYTES_PER_ARRAY = 1 << 12
"""What orbax's own files and the manifest take beside the arrays, at most: 2 KiB per array were measured."""


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays that have elements into a new folder.

    Raises:
        Exception: of many types, since orbax wraps errors of the system. On a full disk an OSError, before anything is
            written.
    """
    _reserve(path.with_name(RESERVED), arrays)
    with _silence_orbax(), _orbax() as checkpointer, _plain(path) as plain:
        checkpointer.save(plain, {name: x for name, x in arrays.items() if x.size})


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays in a folder that `write` has made.

    Raises:
        ValueError: orbax cannot read them; says why.
    """
    try:
        with _silence_orbax(), _orbax() as checkpointer, _plain(path) as plain:
            return checkpointer.restore(plain) or {}
    except Exception as error:  # of many types, for files that orbax has not written
        raise ValueError(error_reason(error)) from error


@contextlib.contextmanager
def _plain(path: Path) -> Iterator[Path]:
    """The same place by a path that orbax takes for what it is.

    It looks for its own files by a pattern that begins with the path, and finds none behind a bracket; its library
    takes a backslash for a slash. Such a checkpoint could not be read again, so such a path is reached by a link.
    """
    if not set(str(path.absolute())) & set("[]*?\\"):
        yield path.absolute()
        return
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder, "link")
        link.symlink_to(path.parent.absolute(), target_is_directory=True)
        yield link / path.name


def error_reason(error: Exception) -> str:
    """The operating system's message for an error, or the first line of its text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]


def _reserve(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise an OSError if the disk has less room than the arrays need.

    On a full disk the threads of orbax's library print a traceback for each array, and nothing here can keep them from
    that.
    """
    size = sum(x.nbytes for x in arrays.values()) + OVERHEAD_BYTES + OVERHEAD_BYTES_PER_ARRAY * len(arrays)
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        path.unlink()
    elif shutil.disk_usage(path.parent).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _orbax() -> Any:
    """Orbax for this process alone; by default it would wait for the other processes."""
    import orbax.checkpoint as ocp

    index = jax.process_index()
    this_process = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process-{index}"
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=this_process)
    return ocp.Checkpointer(handler, multiprocessing_options=this_process)


@contextlib.contextmanager
def _silence_orbax() -> Iterator[None]:
    """Keep orbax from logging the traceback of an error that it raises as well."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
