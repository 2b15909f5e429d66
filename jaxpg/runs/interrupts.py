"""Ctrl-C while a program trains: the chunk ends and is saved, and KeyboardInterrupt goes on from there."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def saving_first(goes_on: str) -> Iterator[Callable[[], bool]]:
    """Hold back the first Ctrl-C that comes inside, and say whether it came: training is to save and return then.

    At the end KeyboardInterrupt is raised for it, which says by what the run goes on; a second Ctrl-C is Python's own
    again. Outside the main thread, and where a program has a handler of its own, signals are left alone. Unlike the
    command line's (`cli/signals.py`) this never ends the process, which is the user's.
    """
    arrived = threading.Event()
    python_raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or not python_raises:
        yield arrived.is_set
        return

    def hold_back(number: int, frame: object) -> None:
        arrived.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, hold_back)
    try:
        yield arrived.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if arrived.is_set():
        raise KeyboardInterrupt(f"the run is saved; go on with it by {goes_on}")
