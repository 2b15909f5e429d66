"""The signals that stop training, and other programs that take long."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:  # before anything slow is imported Ctrl-C is to be held back
    from rich.console import Console

STOPPING = (signal.SIGINT, signal.SIGTERM)
GRACE_SECONDS = 15.0
"""How long a chunk may take after SIGTERM; a machine that is taken away usually leaves 30 seconds."""

SECONDS_TO_CLOSE = 1.0
"""How long environments on the host have to end a step after Ctrl-C where there is nothing to save."""


class Interruption:
    """The signals that ask this process to stop, Ctrl-C (SIGINT) and SIGTERM, and what they do.

    The first one lets the current chunk end and be saved (`requested`). A second one ends the process at once. A
    SIGTERM comes from a machine that will be gone in seconds: it ends the process at once where there is nothing to
    save, and after GRACE_SECONDS in any case.

    Args:
        console: where progress is shown.
        resume_command: what goes on from there.
    """

    def __init__(self, console: Console, resume_command: str) -> None:
        self._console, self._resume_command = console, resume_command
        self._deadline = threading.Timer(GRACE_SECONDS, self._end, ["terminated before this chunk ended"])
        self._deadline.daemon = True
        self.signal: int | None = None
        self.has_trained = False  # whether a chunk has ended since a checkpoint was restored

    def requested(self) -> bool:
        """Whether a signal has asked this process to stop."""
        return self.signal is not None

    def close(self) -> None:
        """Training has ended: nothing is to be stopped any more."""
        self._deadline.cancel()

    def on_signal(self, number: int) -> None:
        """Do what a signal asks for."""
        if self.signal is not None:
            self.signal = number
            self._end("stopped at once")
        self.signal = number
        if number == signal.SIGTERM:
            if not self.has_trained:
                self._end("terminated before a chunk ended")
            self._deadline.start()
        again = "press Ctrl-C again to stop at once" if number == signal.SIGINT else "a second SIGTERM stops at once"
        _say(f"finishing this chunk, then saving; {again}")

    def on_lost_output(self) -> None:
        """Stop as after Ctrl-C where the reader of the output has closed it, as in `jaxpg train ... | head`."""
        self._stop_unseen("the output was closed by its reader")

    def on_failed_output(self, error: OSError) -> None:
        """The same where the output cannot be written to, as to a log on a full disk or a terminal that is gone."""
        self._stop_unseen(f"the output cannot be written to ({error.strerror or error})")

    def _stop_unseen(self, why: str) -> None:
        silence_output()
        self.signal = self.signal or signal.SIGINT
        _say(f"{why}; this chunk is saved, and training ends")

    def _end(self, why: str) -> None:
        """End this process without waiting for the computation."""
        assert self.signal is not None
        if self._console.is_terminal:
            with contextlib.suppress(OSError):
                self._console.show_cursor()
        _say(f"{why}; checkpoints are unchanged. Resume with: {self._resume_command}")
        _leave(self.signal)


def _leave(number: int) -> NoReturn:
    """End this process at once, for this signal, and those of its environments, which wait for a step of their own."""
    import multiprocessing

    for process in multiprocessing.active_children():
        process.kill()
    os._exit(128 + number)


def silence_output() -> None:
    """Discard what is printed from now on: standard output is a pipe without a reader."""
    _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end for a Ctrl-C that comes inside, where jax is imported.

    Its modules are not made for one: the exception is lost in some, and the process crashes in others. Outside the main
    thread signals are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived = threading.Event()
    old_handler = signal.signal(signal.SIGINT, lambda *_: arrived.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if old_handler is None else old_handler)
        if arrived.is_set() and old_handler is not signal.SIG_IGN:
            raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible(console: Console, resume_command: str) -> Iterator[Interruption]:
    """Ctrl-C and SIGTERM stop what is trained inside, see `Interruption`."""
    interruption = Interruption(console, resume_command)
    with _received(STOPPING, interruption.on_signal):
        try:
            yield interruption
        finally:
            interruption.close()


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """Ctrl-C ends what runs inside, a compiled program that has nothing to save.

    One with environments on the host ends by itself, since their calls do nothing from then on, and KeyboardInterrupt
    is raised after it, so that they can be closed. The process ends after SECONDS_TO_CLOSE in any case.
    """
    from jaxpg.parallel import host_callback  # imports jax

    def leave() -> None:
        _say("interrupted")
        _leave(signal.SIGINT)

    timer = threading.Timer(SECONDS_TO_CLOSE, leave)
    timer.daemon = True
    arrived = threading.Event()

    def end(_: int) -> None:
        if not arrived.is_set():
            arrived.set()
            host_callback.fail(KeyboardInterrupt())
            timer.start()

    with _received([signal.SIGINT], end):
        try:
            yield
        finally:
            timer.cancel()
    if arrived.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def _received(numbers: Sequence[int], on_signal: Callable[[int], None]) -> Iterator[None]:
    """`on_signal(number)` for each of these signals that comes inside.

    A thread waits for them, because the main thread does not run Python while XLA computes. Outside the main thread
    signals are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def watch() -> None:
        while number := os.read(receiver, 1):
            if number[0] in old_handlers:
                on_signal(number[0])

    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    old_handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    old_sender = signal.set_wakeup_fd(sender)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_sender)
        for number, handler in old_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not one of Python's
        os.close(sender)
        watcher.join()
        os.close(receiver)


def _say(text: str) -> None:
    """Print to standard error; if that is closed too, discard this and all later output."""
    try:
        print(f"\njaxpg: {text}", file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)
