"""How the processes of one run end together: in a sentence, whichever of them ends first."""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable

import jax
from rich.console import Console

from jaxpg.errors import UserError

HEARTBEAT = 10
"""Seconds without a sign of life after which a process counts as gone; its closed connections mostly say so before."""
PATIENCE = 5.0
"""Seconds that a process which has to end gives the others to find out for themselves."""
GONE = re.compile(r"gloo|nccl|coordination service|CoordinationService|heartbeat|Socket closed", re.IGNORECASE)
"""What jax says in an exception when another process does not answer."""
_lost_message: Callable[[], str] = str
_ending = threading.Lock()


def exit_together(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """The exit code of a command, which with `--distributed` ends in all processes if it ends in one.

    A process that left without a word would leave the others waiting for what it has to add.
    """
    if not getattr(arguments, "distributed", False):
        return command(arguments)
    try:
        code = command(arguments)
        jax.distributed.shutdown()  # where all wait for each other
        return code
    except UserError as error:
        return _exit(2, str(error))
    except KeyboardInterrupt:
        return _exit(130, "interrupted")
    except Exception as error:
        if GONE.search(str(error)):
            _exit_lost()
        traceback.print_exc()
        os._exit(1)


def set_lost_message(words: Callable[[], str]) -> None:
    """What to say from now on if this process has to end because another one is gone."""
    global _lost_message
    _lost_message = words


def filter_native_output() -> None:
    """Pass on what native code prints, but for what it says where a process of several is gone: that takes a sentence.

    jax's own service notices most reliably that a process is gone, and then aborts this one with a trace of its stack.
    No option of jax keeps it from that, so its words are waited for in the pipe that they are written to.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stdout, sys.stderr = (
        os.fdopen(os.dup(number), "w", 1, stream.encoding, stream.errors)
        for number, stream in ((1, sys.stdout), (2, sys.stderr))
    )
    for number in (1, 2):
        os.dup2(writer, number)
    threading.Thread(target=_forward_lines, args=(os.fdopen(reader, errors="replace"),), daemon=True).start()
    ctypes.CDLL(None).signal(signal.SIGABRT, _abort_later)


def _forward_lines(lines: Iterable[str]) -> None:
    about_others = False  # whether the message that a line belongs to is
    for line in lines:
        if "distributed service detected fatal errors" in line:
            _exit_lost()
        if re.match(r"[IWEF]\d{4} ", line):
            about_others = bool(re.search("coordination_service|preemption_sync_manager", line))
        if not about_others and not line.startswith("[Gloo] Rank"):
            sys.stderr.write(line)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _abort_later(_: int) -> None:
    """On SIGABRT, leave `_forward_lines` the time to read why."""
    time.sleep(1.0)


def _exit_lost() -> None:
    """End this process because another one is gone."""
    _ending.acquire()  # for good: two threads may notice, and one sentence is enough
    if (console := Console()).is_terminal:
        console.show_cursor()  # which the progress bar has hidden
        console.print()
    _say(_lost_message())
    os._exit(2)


def _exit(code: int, words: str) -> int:
    """End this process, which has to, when the others have done so too or had the time to."""
    _say(words)
    late = threading.Timer(PATIENCE, os._exit, [code])
    late.start()
    jax.distributed.shutdown()
    late.cancel()
    return code


def _say(text: str) -> None:
    print(f"jaxpg: {text}", file=sys.stderr, flush=True)
