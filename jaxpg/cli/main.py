"""The entry point: one command, its exit code, and a sentence for every error caused by user input."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from jaxpg.cli.parser import make_parser
from jaxpg.errors import UserError, unprintable

if TYPE_CHECKING:  # importing jax takes a second, which `--help` does not need
    from jaxpg.cli.devices import DeviceOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0 on success, 2 after an error that a sentence explains, 130 if interrupted."""
    try:
        return _main(make_parser().parse_args(argv))
    except UserError as error:
        _print_error(str(error))
        return 2
    except KeyboardInterrupt:
        print("jaxpg: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has ended, as in `jaxpg list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"{error.filename} cannot be read or written ({reason})" if error.filename else reason
        _print_error(f"{message}.")
        return 2


def _print_error(sentence: str) -> None:
    """One line, in which what the user gave has no line breaks and no control characters."""
    line = "".join(repr(character)[1:-1] if unprintable(character) else character for character in sentence)
    print(f"jaxpg: {line}", file=sys.stderr)


def _main(arguments: argparse.Namespace) -> int:
    """Run a command, in one process or together with others."""
    from jaxpg.cli import devices
    from jaxpg.parallel import process_exit

    options = devices.from_arguments(arguments)
    command = partial(_run, arguments, options)
    return process_exit.exit_together(command) if options.distributed else command()


def _run(arguments: argparse.Namespace, options: DeviceOptions) -> int:
    """Run a command; its modules are imported when the devices have been chosen, since gymnax computes on import."""
    from jaxpg.cli import devices

    devices.start_jax(options)
    from jaxpg.cli import commands

    return commands.COMMANDS[arguments.command](arguments)
