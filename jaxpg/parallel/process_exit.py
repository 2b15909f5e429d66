"""Shutdown of the processes of a run: when one of them ends, all end, each with a one-sentence message.

Used with `--distributed` alone. What jax does without it when one process ends:

- It raised an error: the others hang in a sum over devices. So every process that ends prints the reason and calls
  `jax.distributed.shutdown`, where all wait for each other; it exits alone after SHUTDOWN_SECONDS (`_exit`).
- It was killed, and another one is in a sum over devices: the other gets an exception of the library that transports
  the sum, with a long traceback. `exit_together` knows these by their text (`LOST`).
- It was killed, and another one is anywhere else: a thread of jax's coordination service logs a fatal error and aborts
  the other process, with a native stack trace. jax has no option for this and its log is the only place that has the
  reason, so `filter_native_output` reads the log on its way to the terminal and ends the process itself.
"""

from __future__ import annotations

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

from jaxpg.errors import UserError, describe_os_error
from jaxpg.user_input.printable import printable

HEARTBEAT_SECONDS = 10
"""Seconds without a heartbeat until jax considers a process dead; closed connections usually reveal it earlier."""
SHUTDOWN_SECONDS = 5.0
"""How long a process that ends waits for the others to end too."""
ABORT_DELAY_SECONDS = 1.0
"""How long an abort waits for `_forward_lines` to read its reason."""
LOST = re.compile(r"gloo|nccl|coordination service|CoordinationService|heartbeat|Socket closed", re.IGNORECASE)
"""Text of jax's exceptions when another process does not answer."""
LOG_PREFIX = re.compile(r"[IWEF]\d{4} ")
"""How a message of jax's native log begins: severity, month and day."""
SERVICE_LOG = re.compile("coordination_service|preemption_sync_manager")
"""Source files whose log messages are about other processes."""
FATAL_LOG = "distributed service detected fatal errors"
"""In the message that is logged just before jax aborts this process because another one is gone."""
_lost_message: Callable[[], str] = str
_lost_exit = threading.Lock()


def exit_together(command: Callable[[], int]) -> int:
    """The exit code of a command that all processes of a run execute; if it fails in one, it ends in all."""
    try:
        code = command()
        jax.distributed.shutdown()  # waits for all processes
        return code
    except UserError as error:
        return _exit(2, str(error))
    except KeyboardInterrupt:
        return _exit(130, "interrupted")
    except BrokenPipeError:  # the output was closed by its reader, which the command line answers
        _wait_for_others(1)
        raise
    except OSError as error:
        return _exit(2, describe_os_error(error))
    except Exception as error:
        if LOST.search(str(error)):
            _exit_lost()
        traceback.print_exc()
        os._exit(1)


def set_lost_message(message: Callable[[], str]) -> None:
    """Set the sentence that this process prints if it ends because another one is gone."""
    global _lost_message
    _lost_message = message


def filter_native_output() -> None:
    """Replace what native code prints when another process is gone by one sentence; pass on all else.

    Native code writes to the file descriptors 1 and 2, not to `sys.stdout` and `sys.stderr`. So the descriptors become
    the writing end of a pipe, which a thread reads and filters, and Python's own streams move to copies of the old
    descriptors. The handler of SIGABRT is a native one, since Python runs its own between two instructions of the main
    thread, and an abort does not let it get there.
    """
    sys.stdout.flush()
    sys.stdout, sys.stderr = (
        os.fdopen(os.dup(descriptor), "w", 1, stream.encoding, stream.errors)
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr))
    )
    reader, writer = os.pipe()
    for descriptor in (1, 2):
        os.dup2(writer, descriptor)
    threading.Thread(target=_forward_lines, args=(os.fdopen(reader, errors="replace"),), daemon=True).start()
    ctypes.CDLL(None).signal(signal.SIGABRT, _delay_abort)


def _forward_lines(lines: Iterable[str]) -> None:
    """Copy lines to `sys.stderr`, without log messages about other processes; end this process at the fatal one."""
    about_others = False  # whether the log message that a line belongs to is about other processes
    for line in lines:
        if FATAL_LOG in line:
            _exit_lost()
        if LOG_PREFIX.match(line):
            about_others = bool(SERVICE_LOG.search(line))
        if not about_others and not line.startswith("[Gloo] Rank"):
            sys.stderr.write(line)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _delay_abort(_: int) -> None:
    """Handle SIGABRT: wait until `_forward_lines` has read why. An abort for another reason then proceeds."""
    time.sleep(ABORT_DELAY_SECONDS)


def _exit_lost() -> None:
    """End this process because another one is gone, with the sentence of `set_lost_message`."""
    try:
        message = _lost_message()
    except Exception:  # the directory of the run may be gone too
        message = "another process of this run has exited."
    _lost_exit.acquire()  # never released: two threads may notice, and one sentence is enough
    if (console := Console()).is_terminal:
        console.show_cursor()  # which the progress bar has hidden
        console.print()
    _print_error(message)
    os._exit(2)


def _exit(code: int, message: str) -> int:
    """Print why this process ends, and wait for the others to end too."""
    _print_error(message)
    _wait_for_others(code)
    return code


def _wait_for_others(code: int) -> None:
    """Wait for the other processes to end too; exit with this code after SHUTDOWN_SECONDS."""
    timer = threading.Timer(SHUTDOWN_SECONDS, os._exit, [code])
    timer.start()
    jax.distributed.shutdown()
    timer.cancel()


def _print_error(message: str) -> None:
    print(f"jaxpg: {printable(message)}", file=sys.stderr, flush=True)
