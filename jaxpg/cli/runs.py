"""Runs of the command line: from its arguments to a config, the stages that come first, and training under watch."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxpg import files
from jaxpg.cli import devices
from jaxpg.cli.progress import Reporter, interruptible
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.parallel import process_exit, processes
from jaxpg.training import provenance, run_directory
from jaxpg.training.loop import TrainingHooks

INTERRUPTED = 130
PAGE = "report.html"
SHARED = ("environment", "environment_settings", "network", "pairs")
"""What a run has in common with what it begins with."""


def config_of_run(arguments: argparse.Namespace, task: str, algorithm: str, out: Path | None) -> configs.Config:
    """The config that the arguments ask for; of a run that goes on, its own, with what the arguments say on top."""
    given = overrides(arguments)
    if not arguments.resume:
        return configs.resolve_config(task, algorithm, given)
    if out is None:
        raise UserError("--resume needs --out, the directory of the run that is to go on.")
    if not (out / run_directory.CONFIG).exists():
        return configs.resolve_config(task, algorithm, given)
    begun = configs.load_config(out)
    asked = configs.resolve_config(task, algorithm)
    if (begun.task, begun.algorithm) != (asked.task, asked.algorithm):
        raise UserError(f"The run in {out} is of {begun.algorithm} on {begun.task}, not {algorithm} on {asked.task}.")
    return configs.resolve_config(out / run_directory.CONFIG, algorithm, given)


def overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the arguments say on top of a task's config."""
    given = configs.parse_overrides(arguments.set)
    if arguments.steps is not None:
        given["total_steps"] = arguments.steps
    if arguments.seeds is not None or arguments.seed:
        seeds = 1 if arguments.seeds is None else arguments.seeds
        if seeds < 1 or arguments.seed < 0:
            raise UserError(f"--seeds must be at least 1 and --seed at least 0, not {seeds} and {arguments.seed}.")
        given["seeds"] = list(range(arguments.seed, arguments.seed + seeds))
    return given | {n: x for n in ("initial", "reward") if (x := getattr(arguments, n)) is not None}


def train_with_stages(config: configs.Config, out: Path, shared: Path, arguments: argparse.Namespace) -> bool:
    """Train as the config says, after what it begins with or is judged by; whether the end was reached."""
    ready = train_stages(config, shared, arguments)
    return ready is not None and _train_run(ready, out, arguments)


def train_stages(config: configs.Config, shared: Path, arguments: argparse.Namespace) -> configs.Config | None:
    """The config with the runs that it begins with or is judged by, where it names these as algorithms; None if one
    of them was interrupted.

    They go to directories of their own in `shared`, and are not trained again where they are finished.
    """
    if configs.ALGORITHMS.keys() & {config.reward, config.initial}:
        check_fits(config)
    for stage in ("reward", "initial"):
        name = getattr(config, stage)
        if name not in configs.ALGORITHMS:
            continue
        directory = shared / name
        said = configs.parse_overrides(arguments.set)
        shared_settings = {key: x for key, x in said.items() if key.split(".")[0] in SHARED}
        earlier = configs.resolve_config(arguments.task, name, {**shared_settings, "seeds": list(config.seeds)})
        if not _is_finished(directory, earlier):
            begun = argparse.Namespace(**{**vars(arguments), "resume": (directory / run_directory.CONFIG).exists()})
            if not train_with_stages(earlier, directory, shared, begun):
                return None
        changed: dict[str, Any] = {stage: str(directory)}
        config = dataclasses.replace(config, **changed)
    return config


def check_fits(config: configs.Config) -> None:
    """Raise the UserError that the training of a config would raise, before something else trains."""
    from jaxpg.experiments.build import build
    from jaxpg.experiments.warm_start import build_experiment

    with_what_there_is = (
        build if config.reward in configs.ALGORITHMS else build_experiment
    )  # yet to be trained, or there
    with_what_there_is(config)


def _is_finished(directory: Path, config: configs.Config) -> bool:
    """Whether a run of this config has come to its end there."""
    if not (directory / run_directory.METRICS).exists():
        return False
    steps = run_directory.load_metrics(directory)["steps"]
    return bool(steps[-1].min() >= config.total_steps)


def _train_run(config: configs.Config, out: Path, arguments: argparse.Namespace) -> bool:
    """Train as the config says; whether the end was reached."""
    console = console_of(arguments)
    process_exit.set_lost_message(lambda: _lost_message(out))
    import jax

    from jaxpg import parallel
    from jaxpg.experiments.completions import CompletionLogger
    from jaxpg.experiments.warm_start import build_experiment, initial_policies, save_vocabulary
    from jaxpg.training.loop import train

    mesh = devices.make_run_mesh(devices.from_arguments(arguments), len(config.seeds), config.batch)
    setup = build_experiment(config, shards=parallel.batch_shards(mesh))
    initial = initial_policies(config, setup)
    save_vocabulary(config, out)
    shown = CompletionLogger(config, setup, out, console)

    def on_evaluation(state: Any) -> None:
        shown(state)
        if setup.env.context and np.any(state.iteration):  # before the first one there is no curve
            _write_page(config, out)

    with training_hooks(arguments, _header(config, out, mesh), config.total_steps) as hooks:
        state = train(
            setup.learner,
            seeds=config.seeds,
            total_steps=config.total_steps,
            run_dir=out,
            mesh=mesh,
            evaluate=setup.evaluate,
            evaluate_every=max(1, config.total_steps // config.evaluations),
            config=configs.to_dict(config),
            resume=arguments.resume,
            initial=initial,
            hooks=hooks._replace(on_evaluation=on_evaluation) if processes.is_main_process() else hooks,
        )
    return int(jax.device_get(state.steps).min()) >= config.total_steps


def _write_page(config: configs.Config, out: Path) -> None:
    """The page of a run on a text, as far as it has come: learning curve, and completions with their rewards."""
    from jaxpg import report
    from jaxpg.experiments import completions

    run, written = (
        run_result(run_directory.load_metrics(out)),
        completions.format_completions(completions.load_completions(out)),
    )
    details = {"completions": written} if written else {}
    details |= {"config": files.flatten(configs.to_dict(config)), "machine": provenance.describe_machine()}
    page = report.comparison_page(
        {config.algorithm: run}, title=config.task, threshold=config.threshold, details=details
    )
    files.replace_file(out / PAGE, page)


@contextlib.contextmanager
def training_hooks(arguments: argparse.Namespace, header: str, total_steps: int) -> Iterator[TrainingHooks]:
    """Show progress under a header, unless it is to be quiet, and let Ctrl-C stop the training."""
    console = console_of(arguments)
    console.print(header)
    with interruptible(console) as should_stop, Reporter(console, total_steps) as reporter:
        hooks = TrainingHooks(should_stop=should_stop)
        yield hooks if console.quiet else hooks._replace(on_row=reporter)


def console_of(arguments: argparse.Namespace) -> Console:
    """Where progress is shown: of several processes the first alone has something to say."""
    return Console(quiet=arguments.quiet or not processes.is_main_process(), highlight=False, soft_wrap=True)


def _header(config: configs.Config, out: Path, mesh: Any) -> str:
    import jax

    seeds = f"{len(config.seeds)} seed{'s' if len(config.seeds) > 1 else ''}"
    return (
        f"[bold]{config.algorithm} on {config.task}[/bold], {seeds}, {config.total_steps:,} steps each; "
        f"{devices.describe(mesh)}, jax {jax.__version__}\n{out}"
    )


def _lost_message(out: Path) -> str:
    """What to say of a run that ends because one of its processes has."""
    from jaxpg.training.checkpoint import CHECKPOINTS, find

    found = find(out / CHECKPOINTS)
    last = f"the last checkpoint is {found.path}" if found else "there was no checkpoint yet"
    return f"another process of this run has gone; {last}. Start all of them again with --resume to go on."


def say_interrupted(out: Path, command: str) -> int:
    """Say how to go on with a command that was stopped; its exit code."""
    if processes.is_main_process():
        print(f"jaxpg: interrupted and saved. Go on with: jaxpg {command} --out {out} --resume", file=sys.stderr)
    return INTERRUPTED


def run_result(metrics: Mapping[str, np.ndarray]) -> Any:
    """What a report wants to know of a run."""
    from jaxpg.report import RunResult

    new_steps = np.diff(metrics["steps"], axis=0, prepend=0).sum(1)
    return RunResult(
        steps=metrics["steps"],
        returns=metrics["return"] if "return" in metrics else metrics["evaluation_return"],
        final=last_evaluation(metrics.get("evaluation_return"), metrics["steps"].shape[1]),
        seconds=float(metrics["seconds"][-1]),
        steps_per_second=float(np.median(new_steps / metrics["chunk_seconds"])),
    )


def last_evaluation(values: np.ndarray | None, num_seeds: int) -> np.ndarray:
    """The last evaluation, [S]; NaN if there was none."""
    done = [] if values is None else values[np.isfinite(values).all(1)]
    return done[-1] if len(done) else np.full(num_seeds, np.nan)
