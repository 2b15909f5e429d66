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

from jaxpg import config as configs
from jaxpg import devices, hosts, record
from jaxpg.errors import UserError
from jaxpg.progress import Reporter, Watch, interruptible

INTERRUPTED = 130
PAGE = "report.html"
SHARED = ("environment", "environment_settings", "network", "pairs")
"""What a run has in common with what it begins with."""


def resolve(arguments: argparse.Namespace, task: str, algorithm: str, out: Path | None) -> configs.Config:
    """The config that the arguments ask for; of a run that goes on, its own, with what the arguments say on top."""
    overrides = overrides_of(arguments)
    if not arguments.resume:
        return configs.resolve(task, algorithm, overrides)
    if out is None:
        raise UserError("--resume needs --out, the directory of the run that is to go on.")
    if not (out / record.CONFIG).exists():
        return configs.resolve(task, algorithm, overrides)
    begun = configs.load(out)
    asked = configs.resolve(task, algorithm)
    if (begun.task, begun.algorithm) != (asked.task, asked.algorithm):
        raise UserError(f"The run in {out} is of {begun.algorithm} on {begun.task}, not {algorithm} on {asked.task}.")
    return configs.resolve(out / record.CONFIG, algorithm, overrides)


def overrides_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the arguments say on top of a task's config."""
    overrides = configs.parse_overrides(arguments.set)
    if arguments.steps is not None:
        overrides["total_steps"] = arguments.steps
    if arguments.seeds is not None or arguments.seed:
        seeds = 1 if arguments.seeds is None else arguments.seeds
        if seeds < 1 or arguments.seed < 0:
            raise UserError(f"--seeds must be at least 1 and --seed at least 0, not {seeds} and {arguments.seed}.")
        overrides["seeds"] = list(range(arguments.seed, arguments.seed + seeds))
    return overrides | {n: x for n in ("initial", "reward") if (x := getattr(arguments, n)) is not None}


def train_with_what_it_needs(config: configs.Config, out: Path, shared: Path, arguments: argparse.Namespace) -> bool:
    """Train as the config says, after what it begins with or is judged by; whether the end was reached."""
    ready = with_what_it_needs(config, shared, arguments)
    return ready is not None and _train(ready, out, arguments)


def with_what_it_needs(config: configs.Config, shared: Path, arguments: argparse.Namespace) -> configs.Config | None:
    """The config with the runs that it begins with or is judged by, where it names these as algorithms; None if one
    of them was interrupted.

    They go to directories of their own in `shared`, and are not trained again where they are finished.
    """
    if configs.ALGORITHMS.keys() & {config.reward, config.initial}:
        refuse_what_does_not_fit(config)
    for stage in ("reward", "initial"):
        name = getattr(config, stage)
        if name not in configs.ALGORITHMS:
            continue
        directory = shared / name
        said = configs.parse_overrides(arguments.set)
        shared_settings = {key: x for key, x in said.items() if key.split(".")[0] in SHARED}
        earlier = configs.resolve(arguments.task, name, {**shared_settings, "seeds": list(config.seeds)})
        if not _is_finished(directory, earlier):
            begun = argparse.Namespace(**{**vars(arguments), "resume": (directory / record.CONFIG).exists()})
            if not train_with_what_it_needs(earlier, directory, shared, begun):
                return None
        changed: dict[str, Any] = {stage: str(directory)}
        config = dataclasses.replace(config, **changed)
    return config


def refuse_what_does_not_fit(config: configs.Config) -> None:
    """Raise the UserError that the training of a config would raise, before something else trains."""
    from jaxpg.build import build
    from jaxpg.stages import build_stage

    with_what_there_is = build if config.reward in configs.ALGORITHMS else build_stage  # yet to be trained, or there
    with_what_there_is(config)


def _is_finished(directory: Path, config: configs.Config) -> bool:
    """Whether a run of this config has come to its end there."""
    if not (directory / record.METRICS).exists():
        return False
    steps = record.load_metrics(directory)["steps"]
    return bool(steps[-1].min() >= config.total_steps)


def _train(config: configs.Config, out: Path, arguments: argparse.Namespace) -> bool:
    """Train as the config says; whether the end was reached."""
    console = console_of(arguments)
    hosts.if_lost(lambda: _how_to_go_on(out))
    import jax

    from jaxpg import parallel
    from jaxpg.samples import Shown
    from jaxpg.stages import build_stage, keep_vocabulary, policy_of
    from jaxpg.train import train

    mesh = devices.lay_out(arguments, len(config.seeds), config.batch)
    setup = build_stage(config, shards=parallel.batch_shards(mesh))
    initial = policy_of(config, setup)
    keep_vocabulary(config, out)
    shown = Shown(config, setup, out, console)

    def on_evaluation(state: Any) -> None:
        shown(state)
        if setup.env.context and np.any(state.iteration):  # before the first one there is no curve
            _write_page(config, out)

    with watched(arguments, _header(config, out, mesh), config.total_steps) as watch:
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
            on_evaluation=on_evaluation if hosts.is_first() else lambda state: None,
            on_row=watch.on_row,
            should_stop=watch.should_stop,
        )
    return int(jax.device_get(state.steps).min()) >= config.total_steps


def _write_page(config: configs.Config, out: Path) -> None:
    """The page of a run on a text, as far as it has come: learning curve, and completions with their rewards."""
    from jaxpg import report, samples

    run, written = measured(record.load_metrics(out)), samples.as_text(samples.load(out))
    details = {"completions": written} if written else {}
    details |= {"config": record.flatten(configs.to_dict(config)), "machine": record.machine()}
    page = report.page({config.algorithm: run}, title=config.task, threshold=config.threshold, details=details)
    record.replace_file(out / PAGE, page)


@contextlib.contextmanager
def watched(arguments: argparse.Namespace, header: str, total_steps: int) -> Iterator[Watch]:
    """Show progress under a header, unless it is to be quiet, and let Ctrl-C stop the training."""
    console = console_of(arguments)
    console.print(header)
    with interruptible(console) as should_stop, Reporter(console, total_steps) as reporter:
        yield Watch(reporter if not console.quiet else lambda row: None, should_stop)


def console_of(arguments: argparse.Namespace) -> Console:
    """Where progress is shown: of several processes the first alone has something to say."""
    return Console(quiet=arguments.quiet or not hosts.is_first(), highlight=False, soft_wrap=True)


def _header(config: configs.Config, out: Path, mesh: Any) -> str:
    import jax

    seeds = f"{len(config.seeds)} seed{'s' if len(config.seeds) > 1 else ''}"
    return (
        f"[bold]{config.algorithm} on {config.task}[/bold], {seeds}, {config.total_steps:,} steps each; "
        f"{devices.describe(mesh)}, jax {jax.__version__}\n{out}"
    )


def _how_to_go_on(out: Path) -> str:
    """What to say of a run that ends because one of its processes has."""
    from jaxpg.checkpoint import find
    from jaxpg.train import CHECKPOINTS

    found = find(out / CHECKPOINTS)
    last = f"the last checkpoint is {found.path}" if found else "there was no checkpoint yet"
    return f"another process of this run has gone; {last}. Start all of them again with --resume to go on."


def interrupted(out: Path, command: str) -> int:
    """Say how to go on with a command that was stopped; its exit code."""
    if hosts.is_first():
        print(f"jaxpg: interrupted and saved. Go on with: jaxpg {command} --out {out} --resume", file=sys.stderr)
    return INTERRUPTED


def measured(metrics: Mapping[str, np.ndarray]) -> Any:
    """What a report wants to know of a run."""
    from jaxpg.report import Run

    new_steps = np.diff(metrics["steps"], axis=0, prepend=0).sum(1)
    return Run(
        steps=metrics["steps"],
        returns=metrics["return"] if "return" in metrics else metrics["evaluation_return"],
        final=last_known(metrics.get("evaluation_return"), metrics["steps"].shape[1]),
        seconds=float(metrics["seconds"][-1]),
        steps_per_second=float(np.median(new_steps / metrics["chunk_seconds"])),
    )


def last_known(values: np.ndarray | None, num_seeds: int) -> np.ndarray:
    """The last evaluation, [S]; NaN if there was none."""
    done = [] if values is None else values[np.isfinite(values).all(1)]
    return done[-1] if len(done) else np.full(num_seeds, np.nan)
