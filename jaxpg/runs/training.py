"""Training one run from its config: what `jaxpg train` and `jaxpg.fit` share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.text import Text

from jaxpg import envs, files, parallel
from jaxpg.envs.host import close_what_begins
from jaxpg.experiments import completions
from jaxpg.experiments.build import Experiment
from jaxpg.experiments.config import Config, to_dict
from jaxpg.experiments.data_files import save_checksums
from jaxpg.experiments.sampling import sample_data
from jaxpg.experiments.stages import Stage
from jaxpg.experiments.warm_start import build_experiment, initial_policies, save_vocabulary
from jaxpg.parallel import processes
from jaxpg.runs.callbacks import Callback, Watched, named_callbacks
from jaxpg.runs.loggers import Loggers, check_loggers
from jaxpg.runs.progress import Reporter, StallWarnings
from jaxpg.runs.results import curve_units, run_result
from jaxpg.runs.terminal import heading
from jaxpg.runs.trained import Run
from jaxpg.training import checkpoint, provenance, run_directory
from jaxpg.training.advance import RunState
from jaxpg.training.loop import TrainingHooks, train
from jaxpg.training.metrics_writer import Row
from jaxpg.user_input.printable import counted

PAGE = "report.html"


def prepare(
    config: Config,
    out: Path,
    mesh: Mesh,
    console: Console,
    *,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[str] = (),
) -> Callable[[TrainingHooks], bool]:
    """Build what a config describes, before training is compiled or writes anything; the function that then trains it.

    That function returns whether the run is finished: it reached its `total_steps`, or a callback ended it before. Only
    demonstrations and pairs that another run has to give are sampled and written first.

    Args:
        config: what to train.
        out: the directory of the run; a run that has begun there is resumed.
        mesh: the devices.
        console: where completions are shown.
        callbacks: those of a Python program, in addition to those that the config names.
        loggers: names of `loggers.LOGGERS`, where the run is also logged.

    Raises:
        UserError: as `build_experiment` and `initial_policies`; a callback of the config cannot be made.
    """
    check_loggers(loggers)
    processes.on_main_process(partial(sample_data, config, out))
    experiment = build_experiment(config, shards=parallel.batch_shards(mesh))
    initial = None if run_directory.has_checkpoint(out) else initial_policies(config, experiment)
    watched = Watched([*named_callbacks(config), *callbacks])
    log = Loggers(loggers if processes.is_main_process() else (), config, out)
    on_evaluation = _evaluation_hook(config, experiment, out, console, watched, log)
    earlier = run_directory.load_rows(out) if run_directory.has_begun(out) else []
    warn = StallWarnings(console, config.total_steps, config.threshold, earlier)

    def train_with(hooks: TrainingHooks) -> bool:
        def on_row(row: Row) -> None:
            hooks.on_row(row)
            warn(row)
            log.on_row(row)
            watched.on_row(row)

        with contextlib.closing(log), close_what_begins():
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
                hooks=TrainingHooks(
                    on_checked=partial(_note_sources, config, out),
                    on_row=on_row,
                    on_evaluation=on_evaluation,
                    should_end=watched.should_stop,
                    should_stop=hooks.should_stop,
                ),
            )
        (ended,) = processes.any_process([watched.has_stopped])
        return ended or int(jax.device_get(state.steps).min()) >= config.total_steps

    return train_with


def _note_sources(config: Config, out: Path) -> None:
    """What the texts of a run are made of, written down where it begins, and compared where it goes on."""
    save_vocabulary(config, out)
    save_checksums(config, out)


def devices_of(config: Config) -> list[jax.Device]:
    """As many devices as divide the seeds; one where the environment is on the host."""
    number = 1 if envs.lives_on_host(config.environment) else math.gcd(len(config.seeds), jax.device_count())
    return jax.devices()[:number]


def header(stage: Stage, mesh: Mesh, shown: Path | None) -> Text:
    """What the training of a run begins with; `shown` is its directory."""
    name, config, _ = stage
    what = config.algorithm if name == config.algorithm else f"{name}: {config.algorithm}"
    seeds = counted(len(config.seeds), "seed")
    machine = f"{parallel.describe_mesh(mesh)}, jax {jax.__version__}"
    details = f"{seeds}, {config.total_steps:,} steps each; {machine}"
    return heading(f"{what} on {config.task}", details, shown)


@contextlib.contextmanager
def progress(
    console: Console, header: str | Text, total_steps: int, to_follow: float = 0.0
) -> Iterator[Callable[[Row], None]]:
    """Show a header, and the rows that the function is given; nothing on a quiet console. `to_follow`: see Reporter."""
    console.print(header)
    with Reporter(console, total_steps, to_follow) as reporter:
        yield (lambda row: None) if console.quiet else reporter


def _evaluation_hook(
    config: Config,
    experiment: Experiment,
    out: Path,
    console: Console,
    watched: Watched,
    log: Loggers,
) -> Callable[[RunState], None]:
    """What happens after every evaluation, in the main process: completions and report of a text task; callbacks."""
    log_completions = completions.CompletionLogger(config, experiment, out, console)

    def run_so_far(state: RunState) -> Run:
        run = Run(config, experiment, jax.device_get(state), out)
        run.metrics  # noqa: B018 - read now: later there are more rows, or none any more
        return run

    def on_evaluation(state: RunState) -> None:
        if samples := log_completions(state):
            log.on_completions(int(np.asarray(state.steps)[0]), samples)
        if experiment.env.context and np.any(state.iteration):  # there is no curve before the first iteration
            write_page(config, out)
        watched.on_evaluation(partial(run_so_far, state))

    return on_evaluation if processes.is_main_process() else lambda state: None


def end_by_callback(config: Config, out: Path) -> str | None:
    """Where and by what a run was ended before its `total_steps`; None where it was not."""
    last = checkpoint.find(out / checkpoint.CHECKPOINTS)
    if last is None or last.about.get("ended") is not True or last.steps >= config.total_steps:
        return None
    by = f"the callback {next(iter(config.callbacks))}" if len(config.callbacks) == 1 else "a callback"
    return f"ended by {by} at {last.steps:,} of {config.total_steps:,} steps"


def write_page(config: Config, out: Path, stages: Mapping[str, Any] = MappingProxyType({})) -> None:
    """The report of a run so far: what happened, learning curve, diagnostics, completions, and its stages."""
    from jaxpg import report

    details: dict[str, Any] = {"stages": stages} if stages else {}
    details |= {"config": files.flatten(to_dict(config)), **provenance.machines(run_directory.load_machines(out))}
    result = run_result(run_directory.load_metrics(out), config.threshold, config.seeds)
    if end := end_by_callback(config, out):
        result = result._replace(warnings=[*result.warnings, f"{end}."])
    page = report.comparison_page(
        {config.algorithm: result},
        title=config.task,
        threshold=config.threshold,
        details=details,
        completions={config.algorithm: completions.completions_by_heading(out)},
        units=curve_units(to_dict(config)),
    )
    files.replace_file(out / PAGE, page)
