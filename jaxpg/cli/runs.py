"""Training on the command line: the stages of a run, one after the other, each with progress and a report."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.text import Text

from jaxpg import envs, files, parallel, user_code
from jaxpg.cli import devices, record
from jaxpg.cli.options import RunOptions
from jaxpg.cli.planning import plan_command, stages_of
from jaxpg.cli.progress import Interruption, Reporter
from jaxpg.cli.record import RECORD, CommandRecord, to_json
from jaxpg.cli.terminal import heading, make_console
from jaxpg.errors import UserError
from jaxpg.experiments import completions
from jaxpg.experiments.build import Experiment
from jaxpg.experiments.config import Config, to_dict
from jaxpg.experiments.sampling import sample_demonstrations
from jaxpg.experiments.stages import Stage, is_finished
from jaxpg.experiments.warm_start import build_experiment, initial_policies, save_vocabulary
from jaxpg.parallel import process_exit, processes
from jaxpg.training import checkpoint, provenance, run_directory
from jaxpg.training.lock import locked
from jaxpg.training.loop import TrainingHooks, train
from jaxpg.training.metrics_writer import METRICS, Row

PAGE = "report.html"


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
        if options.resume and out.exists():
            stack.enter_context(locked(out))
        planned = plan_command(options, out)
        arguments = to_json(dataclasses.replace(planned, command_line=""))  # which has the number of the process
        if not processes.same_on_all(f"{out}\n{arguments}"):
            raise UserError("The processes of this run got different arguments. Give all of them the same ones.")
        stack.enter_context(locked(out))
        before = (out / RECORD).read_text(encoding="utf-8") if (out / RECORD).exists() else None
        rows = _bytes_of_rows(out)
        session = Session(planned, out, options)
        save_record(session)
        try:
            yield session
        except Exception:
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


def train_stages(session: Session, interruption: Interruption) -> bool:
    """Train the runs that are not finished, and resume those that were interrupted; return whether all finished."""
    for stage in stages_of(session.record, session.out):
        (stop,) = processes.any_process([interruption.requested()])
        if stop:
            return False
        if is_finished(stage):
            processes.on_main_process(partial(run_directory.close_finished, stage.directory, to_dict(stage.config)))
        elif not _train_stage(stage, session, interruption):
            return False
    return True


def _train_stage(stage: Stage, session: Session, interruption: Interruption) -> bool:
    """Train one run; return whether it reached its end."""
    config, out, options = stage.config, stage.directory, session.options
    process_exit.set_lost_message(partial(_lost_message, out, resume_command(session)))
    mesh = mesh_for(options.devices, config, len(config.seeds))
    processes.on_main_process(partial(sample_demonstrations, config, out))
    experiment = build_experiment(config, shards=parallel.batch_shards(mesh))
    initial = initial_policies(config, experiment)
    on_evaluation = _evaluation_hook(config, experiment, out, console_of(options))
    with training_hooks(options, interruption, _header(stage, mesh), config.total_steps) as hooks:
        state = train(
            experiment.learner,
            seeds=config.seeds,
            total_steps=config.total_steps,
            run_dir=out,
            mesh=mesh,
            evaluate=experiment.evaluate,
            record=experiment.record,
            evaluate_every=max(1, config.total_steps // config.evaluations),
            config=to_dict(config),
            resume=run_directory.has_begun(out),
            initial=initial,
            hooks=hooks._replace(on_checked=partial(save_vocabulary, config, out), on_evaluation=on_evaluation),
        )
    return int(jax.device_get(state.steps).min()) >= config.total_steps


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


def _evaluation_hook(config: Config, experiment: Experiment, out: Path, console: Console) -> Callable[[Any], None]:
    """What happens after every evaluation of a text task, in the main process: completions and the report."""
    log_completions = completions.CompletionLogger(config, experiment, out, console)

    def on_evaluation(state: Any) -> None:
        log_completions(state)
        if experiment.env.context and np.any(state.iteration):  # there is no curve before the first iteration
            write_page(config, out)

    return on_evaluation if processes.is_main_process() else lambda state: None


def write_page(config: Config, out: Path, stages: Mapping[str, Any] = MappingProxyType({})) -> None:
    """The report of a run on a text task so far: learning curve, completions with their rewards, and its stages."""
    from jaxpg import report

    written = completions.format_completions(completions.load_completions(out))
    details: dict[str, Any] = {"stages": stages} if stages else {}
    details |= {"completions": written} if written else {}
    details |= {"config": files.flatten(to_dict(config)), "machine": provenance.describe_machine()}
    run = run_result(run_directory.load_metrics(out))
    page = report.comparison_page(
        {config.algorithm: run}, title=config.task, threshold=config.threshold, details=details
    )
    files.replace_file(out / PAGE, page)


@contextlib.contextmanager
def training_hooks(
    options: RunOptions, interruption: Interruption, header: str | Text, total_steps: int
) -> Iterator[TrainingHooks]:
    """Show progress under a header, unless `quiet`, and let signals stop the training."""
    console = console_of(options)
    console.print(header)
    with Reporter(console, total_steps) as reporter:

        def on_row(row: Row) -> None:
            interruption.has_trained |= bool(np.any(row["steps"]))
            if not console.quiet:
                reporter(row)

        try:
            yield TrainingHooks(on_row=on_row, should_stop=interruption.requested)
        finally:
            interruption.has_trained = False


def console_of(options: RunOptions) -> Console:
    """Where progress is shown; of several processes only the main one shows any."""
    return make_console(quiet=options.quiet or not processes.is_main_process(), soft_wrap=True)


def resume_command(session: Session) -> str:
    """What goes on with a command with the same result, as it is typed; of several processes, in this one."""
    path, several = str(session.out), session.options.devices
    words = ["jaxpg", "resume", f"./{path}" if path.startswith("-") else path]
    if user_code.code_names(dataclasses.asdict(session.record)):
        words.append("--trust-code")
    if several.distributed:
        words.append("--distributed")
    if several.coordinator is not None:
        words += ["--coordinator", several.coordinator]
        words += ["--processes", str(several.processes), "--process", str(several.process)]
    return shlex.join(words)


def report_interrupted(session: Session, interruption: Interruption) -> int:
    """Print how to go on with a command that was stopped; its exit code, 128 and the number of the signal."""
    (terminated,) = processes.any_process([interruption.signal == signal.SIGTERM])
    if processes.is_main_process():
        word = "terminated" if terminated else "interrupted"
        print(f"jaxpg: {word} and saved. Go on with: {resume_command(session)}", file=sys.stderr)
    return 128 + (signal.SIGTERM if terminated else signal.SIGINT)


def _header(stage: Stage, mesh: Mesh) -> Text:
    name, config, out = stage
    what = config.algorithm if name == config.algorithm else f"{name}: {config.algorithm}"
    seeds = f"{len(config.seeds)} seed{'s' if len(config.seeds) > 1 else ''}"
    details = f"{seeds}, {config.total_steps:,} steps each; {devices.describe(mesh)}, jax {jax.__version__}"
    return heading(f"{what} on {config.task}", details, out)


def _lost_message(out: Path, resume_command: str) -> str:
    """The message of a run that ends because another of its processes has ended."""
    found = checkpoint.find(out / checkpoint.CHECKPOINTS)
    last = f"the last checkpoint is {found.path}" if found else "there was no checkpoint yet"
    return (
        f"another process of this run has gone; {last}. Start all of them again to go on, this one with: "
        f"{resume_command}"
    )


def run_result(metrics: Mapping[str, np.ndarray]) -> Any:
    """The metrics of a run as a `report.RunResult`."""
    from jaxpg.report import RunResult

    chunks = metrics["chunk_seconds"] > 0  # all rows but the one before training
    new_steps = np.diff(metrics["steps"], axis=0, prepend=0).sum(1)[chunks]
    evaluations = metrics.get("evaluation_return")
    return RunResult(
        steps=metrics["steps"],
        returns=training_returns(metrics),
        final=last_evaluation(evaluations, metrics["steps"].shape[1]),
        seconds=float(metrics["seconds"][-1]),
        steps_per_second=float(np.median(new_steps / metrics["chunk_seconds"][chunks])),
        initial=None if evaluations is None or metrics["steps"][0].any() else evaluations[0],
        metrics=metrics,
    )


def training_returns(metrics: Mapping[str, np.ndarray]) -> np.ndarray:
    """The learning curve of a run, `[N, S]`: evaluations where training has no return, as in fine-tuning."""
    return metrics["return"] if "return" in metrics else metrics["evaluation_return"]


def last_evaluation(values: np.ndarray | None, num_seeds: int) -> np.ndarray:
    """The last evaluation, `[S]`; NaN if there was none."""
    done = [] if values is None else values[np.isfinite(values).all(1)]
    return done[-1] if len(done) else np.full(num_seeds, np.nan)
