"""Training on the command line: the stages of a run, one after the other, each with progress and a report."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.text import Text

from jaxpg import envs, files
from jaxpg.cli import devices, record
from jaxpg.cli.options import RunOptions
from jaxpg.cli.planning import plan_command, stages_of
from jaxpg.cli.record import RECORD, CommandRecord, to_json
from jaxpg.cli.signals import Interruption
from jaxpg.errors import UserError
from jaxpg.experiments.config import Config, to_dict
from jaxpg.experiments.stages import Stage, is_finished, runs_named
from jaxpg.parallel import process_exit, processes
from jaxpg.runs import training
from jaxpg.runs.terminal import make_console
from jaxpg.training import checkpoint, run_directory
from jaxpg.training.health import Diverged
from jaxpg.training.lock import locked
from jaxpg.training.loop import TrainingHooks
from jaxpg.training.metrics_writer import METRICS, Row
from jaxpg.user_input import user_code
from jaxpg.user_input.printable import printable


class Session(NamedTuple):
    """A command that trains: what it was asked for, its directory, and its arguments."""

    record: CommandRecord
    out: Path
    options: RunOptions


@contextlib.contextmanager
def open_session(options: RunOptions, out: Path) -> Iterator[Session]:
    """A command with its directory locked and its record written; if it fails before it trains, nothing has changed.

    Raises:
        UserError: as `plan_command`; the directory is in use, or the processes of this run got different arguments.
    """
    with contextlib.ExitStack() as stack:
        if (options.resume and out.exists()) or options.out is None:  # at once, where others look for a free name
            stack.enter_context(locked(out))
        planned = plan_command(options, out)
        arguments = to_json(dataclasses.replace(planned, command_line=""))  # which has the number of the process
        processes.refuse_different_arguments(f"{out}\n{arguments}")
        stack.enter_context(locked(out))
        before = (out / RECORD).read_text(encoding="utf-8") if (out / RECORD).exists() else None
        rows = _bytes_of_rows(out)
        session = Session(planned, out, options)
        save_record(session)
        try:
            yield session
        except Exception:
            with contextlib.suppress(OSError):  # the directory may be gone; the first error is reported
                if processes.is_main_process() and _bytes_of_rows(out) == rows:
                    _put_back(out, before)
            raise


def _bytes_of_rows(out: Path) -> int:
    """The size of all metrics in a directory, which grows when something is trained there."""
    return sum(path.stat().st_size for path in out.rglob(METRICS) if path.is_file())


def _put_back(out: Path, before: str | None) -> None:
    """Restore the record of a directory, which had none if `before` is None."""
    if before is None:
        (out / RECORD).unlink()
    else:
        files.replace_file(out / RECORD, before)


def save_record(session: Session) -> None:
    """Write down what the command was asked for."""
    processes.on_main_process(partial(record.write, session.record, session.out))


def train_stages(session: Session, interruption: Interruption, diverged: dict[str, str] | None = None) -> bool:
    """Train the runs that are not finished, and resume those that were interrupted; return whether none was stopped.

    Raises:
        Diverged: a run diverged. Where `diverged` is given, it gets the sentences instead, by name: of that run, and of
            those that would begin with it, which are not trained.
    """
    failed: dict[Path, str] = {}  # the names of runs by their directories
    for stage in stages_of(session.record, session.out):
        (stop,) = processes.any_process([interruption.requested()])
        if stop:
            return False
        if is_finished(stage):
            processes.on_main_process(partial(run_directory.close_finished, stage.directory, to_dict(stage.config)))
            continue
        needed = [failed[run] for run in map(Path, runs_named(stage.config).values()) if run in failed]
        sentence = f"It begins with {needed[0]}, which has failed." if needed else ""
        try:
            if not sentence and not _train_stage(stage, session, interruption):
                return False
        except Diverged as error:
            if diverged is None:
                raise
            sentence = str(error)
        if sentence and diverged is not None:
            failed[stage.directory] = stage.name
            diverged[stage.name] = sentence
            if processes.is_main_process():
                print(f"jaxpg: {printable(f'{stage.name}: {sentence}')}", file=sys.stderr)
    return True


def _train_stage(stage: Stage, session: Session, interruption: Interruption) -> bool:
    """Train one run; return whether it reached its end, or was ended by a callback."""
    config, out, options = stage.config, stage.directory, session.options
    process_exit.set_lost_message(partial(_lost_message, out, resume_command(session)))
    mesh = mesh_for(options.devices, config, len(config.seeds))
    console = console_of(options, interruption)
    train = training.prepare(config, out, mesh, console, loggers=session.record.loggers)
    header = training.header(stage, mesh, out)
    on_host = envs.lives_on_host(config.environment)  # for one device
    if not on_host and (unused := devices.describe_unused(options.devices, mesh, config.batch_size)):
        header.append(f"\n{unused}", style="dim")
    with training_hooks(options, interruption, header, config.total_steps) as hooks:
        return train(hooks)


def mesh_for(options: devices.DeviceOptions, config: Config, num_seeds: int) -> Mesh:
    """The devices of a config; an environment on the host has one.

    Raises:
        UserError: as `devices.make_run_mesh`; several devices were asked for, and the environment is on the host.
    """
    on_host = envs.lives_on_host(config.environment)
    if on_host and (options.devices, options.mesh, options.distributed) == (None, None, False):
        num_seeds = 1  # the default would split the seeds
    mesh = devices.make_run_mesh(options, num_seeds, config.batch_size)
    if on_host and mesh.size > 1:
        raise UserError(
            f"{config.environment} is stepped by the host for one device, not for {mesh.size}: leave --devices, --mesh "
            "and --distributed out, or train each seed by a command of its own."
        )
    return mesh


@contextlib.contextmanager
def training_hooks(
    options: RunOptions, interruption: Interruption, header: str | Text, total_steps: int, to_follow: float = 0.0
) -> Iterator[TrainingHooks]:
    """Show progress under a header, unless `quiet`, and let signals stop the training. `to_follow`: see Reporter."""
    with training.progress(console_of(options, interruption), header, total_steps, to_follow) as show:

        def on_row(row: Row) -> None:
            interruption.has_trained |= bool(np.any(row["steps"]))
            try:
                show(row)
            except BrokenPipeError:
                interruption.on_lost_output()
            except OSError as error:
                interruption.on_failed_output(error)

        try:
            yield TrainingHooks(on_row=on_row, should_stop=interruption.requested)
        finally:
            interruption.has_trained = False


def console_of(options: RunOptions, interruption: Interruption | None = None) -> Console:
    """Where progress is shown; of several processes only the main one shows any.

    If its reader closes the output, training is interrupted, where `interruption` is given.
    """
    lost: dict[str, Any] = {"on_lost": interruption.on_lost_output} if interruption else {}
    return make_console(quiet=options.quiet or not processes.is_main_process(), soft_wrap=True, **lost)


def command_on(out: Path, tables: Mapping[str, Any], command: str, *options: str) -> list[str]:
    """The words of a command on a directory, which also trusts the code that its record or config, `tables`, names."""
    trust = ["--trust-code"] if user_code.code_names(tables) else []
    return ["jaxpg", command, f"./{out}" if str(out).startswith("-") else str(out), *options, *trust]


def resume_command(session: Session) -> str:
    """What goes on with a command with the same result, as it is typed; of several processes, in this one."""
    several = session.options.devices
    words = command_on(session.out, dataclasses.asdict(session.record), "resume")
    if several.distributed:
        words.append("--distributed")
    if several.coordinator is not None:
        words += ["--coordinator", several.coordinator]
        words += ["--processes", str(several.processes), "--process", str(several.process)]
    if several.join_seconds is not None:
        words += ["--join-seconds", str(several.join_seconds)]
    return shlex.join(words)


def report_interrupted(session: Session, interruption: Interruption) -> int:
    """Print how to go on with a command that was stopped; its exit code, 128 and the number of the signal."""
    (terminated,) = processes.any_process([interruption.signal == signal.SIGTERM])
    if processes.is_main_process():
        word = "terminated" if terminated else "interrupted"
        print(f"jaxpg: {word} and saved. Resume with: {resume_command(session)}", file=sys.stderr)
    return 128 + (signal.SIGTERM if terminated else signal.SIGINT)


def _lost_message(out: Path, resume_command: str) -> str:
    """The message of a run that ends because another of its processes has ended."""
    found = checkpoint.find(out / checkpoint.CHECKPOINTS)
    last = f"the last checkpoint is {found.path}" if found else "there was no checkpoint yet"
    return (
        f"another process of this run has exited; {last}. Restart all processes to resume, this one with: "
        f"{resume_command}"
    )
