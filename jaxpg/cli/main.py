"""The entry point: one command, its exit code, and a sentence for every error caused by user input."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from jaxpg.cli import signals
from jaxpg.cli.parser import make_parser
from jaxpg.errors import UserError, describe_os_error
from jaxpg.user_input.printable import printable

if TYPE_CHECKING:  # importing jax takes a second, which `--help` does not need
    from jaxpg.cli.devices import DeviceOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 on success, 1 if the output was closed by its reader, 2 after an error that a sentence explains, 130 if
        interrupted by Ctrl-C, 143 by SIGTERM.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what its encoding lacks is shown as an escape
            stream.reconfigure(errors="backslashreplace")
    try:
        parser = make_parser()
        arguments = parser.parse_args(argv)
        if arguments.command is None:
            parser.print_help()
            return 0
        return _main(arguments)
    except UserError as error:
        print(f"jaxpg: {printable(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxpg: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has ended, as in `jaxpg list | head`
        signals.silence_output()
        return 1
    except OSError as error:
        print(f"jaxpg: {printable(describe_os_error(error))}", file=sys.stderr)
        return 2


def _main(arguments: argparse.Namespace) -> int:
    """Run a command, in one process or together with others."""
    logging.getLogger("jaxpg.parallel.host_callback").disabled = True  # what it logs is raised here
    with signals.held_back():
        from jaxpg.cli import devices
        from jaxpg.parallel import process_exit

    options = devices.from_arguments(arguments)
    command = partial(_run, arguments, options)
    return process_exit.exit_together(command) if options.distributed else command()


def _run(arguments: argparse.Namespace, options: DeviceOptions) -> int:
    """Run a command; its modules are imported when the devices have been chosen, after which anything may compute."""
    from jaxpg.cli import devices

    os.environ["MPLBACKEND"] = "agg"  # pictures are files; matplotlib cannot be imported with one that it does not know
    devices.start_jax(options)
    if options.distributed:
        devices.check_same_command(arguments)
    with signals.held_back():
        import jax

        from jaxpg.cli import commands, trust
        from jaxpg.user_input import user_code

    with user_code.trust(trust.trusted_by(arguments)), jax.enable_x64(False):
        return commands.COMMANDS[arguments.command](arguments)
