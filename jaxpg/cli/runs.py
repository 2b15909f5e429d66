"""Training on the command line: the stages of a run, one after the other, each with progress, Ctrl-C and a report."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from jaxpg import files, parallel
from jaxpg.cli import devices
from jaxpg.cli.options import RunOptions
from jaxpg.cli.progress import Reporter, interruptible
from jaxpg.experiments import completions
from jaxpg.experiments.build import Experiment
from jaxpg.experiments.config import Config, to_dict
from jaxpg.experiments.stages import Stage, check_plan, is_finished, plan_stages
from jaxpg.experiments.warm_start import build_experiment, initial_policies, save_vocabulary
from jaxpg.parallel import process_exit, processes
from jaxpg.training import checkpoint, provenance, run_directory
from jaxpg.training.loop import TrainingHooks, train

INTERRUPTED = 130
PAGE = "report.html"


def plan_run(config: Config, directory: Path, shared_dir: Path, options: RunOptions) -> list[Stage]:
    """The stages of a config, checked if anything is to be trained before the config itself."""
    plan = plan_stages(config, directory, shared_dir, task=options.task, overrides=options.overrides)
    if len(plan) > 1:
        check_plan(plan)
    return plan


def train_plan(plan: Sequence[Stage], options: RunOptions) -> bool:
    """Train the stages that are not finished, then the final run; return whether that reached its end."""
    *before, last = plan
    return train_stages(before, options) and train_stage(last, options, resume=options.resume)


def train_stages(stages: Sequence[Stage], options: RunOptions) -> bool:
    """Train the stages that are not finished, and resume those that were interrupted; return whether all finished."""
    for stage in stages:
        if is_finished(stage):
            continue
        begun = (stage.directory / run_directory.CONFIG).exists()
        if not train_stage(stage, options, resume=begun):
            return False
    return True


def train_stage(stage: Stage, options: RunOptions, *, resume: bool) -> bool:
    """Train one run; return whether it reached its end."""
    config, out = stage.config, stage.directory
    process_exit.set_lost_message(partial(_lost_message, out))
    mesh = devices.make_run_mesh(options.devices, len(config.seeds), config.batch_size)
    experiment = build_experiment(config, shards=parallel.batch_shards(mesh))
    initial = initial_policies(config, experiment)
    on_evaluation = _evaluation_hook(config, experiment, out, console_of(options))
    with training_hooks(options, _header(config, out, mesh), config.total_steps) as hooks:
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
            resume=resume,
            initial=initial,
            hooks=hooks._replace(on_checked=partial(save_vocabulary, config, out), on_evaluation=on_evaluation),
        )
    return int(jax.device_get(state.steps).min()) >= config.total_steps


def _evaluation_hook(config: Config, experiment: Experiment, out: Path, console: Console) -> Callable[[Any], None]:
    """What happens after every evaluation of a text task, in the main process: completions and the report."""
    log_completions = completions.CompletionLogger(config, experiment, out, console)

    def on_evaluation(state: Any) -> None:
        log_completions(state)
        if experiment.env.context and np.any(state.iteration):  # there is no curve before the first iteration
            _write_page(config, out)

    return on_evaluation if processes.is_main_process() else lambda state: None


def _write_page(config: Config, out: Path) -> None:
    """The report of a run on a text task so far: learning curve, and completions with their rewards."""
    from jaxpg import report

    written = completions.format_completions(completions.load_completions(out))
    details: dict[str, Any] = {"completions": written} if written else {}
    details |= {"config": files.flatten(to_dict(config)), "machine": provenance.describe_machine()}
    run = run_result(run_directory.load_metrics(out))
    page = report.comparison_page(
        {config.algorithm: run}, title=config.task, threshold=config.threshold, details=details
    )
    files.replace_file(out / PAGE, page)


@contextlib.contextmanager
def training_hooks(options: RunOptions, header: str, total_steps: int) -> Iterator[TrainingHooks]:
    """Show progress under a header, unless `quiet`, and let Ctrl-C stop the training."""
    console = console_of(options)
    console.print(header)
    with interruptible(console) as should_stop, Reporter(console, total_steps) as reporter:
        hooks = TrainingHooks(should_stop=should_stop)
        yield hooks if console.quiet else hooks._replace(on_row=reporter)


def console_of(options: RunOptions) -> Console:
    """Where progress is shown; of several processes only the main one shows any."""
    return Console(quiet=options.quiet or not processes.is_main_process(), highlight=False, soft_wrap=True)


def report_interrupted(out: Path, command: str) -> int:
    """Print how to go on with a command that was stopped; its exit code."""
    if processes.is_main_process():
        print(f"jaxpg: interrupted and saved. Go on with: jaxpg {command} --out {out} --resume", file=sys.stderr)
    return INTERRUPTED


def _header(config: Config, out: Path, mesh: Mesh) -> str:
    seeds = f"{len(config.seeds)} seed{'s' if len(config.seeds) > 1 else ''}"
    return (
        f"[bold]{config.algorithm} on {config.task}[/bold], {seeds}, {config.total_steps:,} steps each; "
        f"{devices.describe(mesh)}, jax {jax.__version__}\n{out}"
    )


def _lost_message(out: Path) -> str:
    """The message of a run that ends because another of its processes has ended."""
    found = checkpoint.find(out / checkpoint.CHECKPOINTS)
    last = f"the last checkpoint is {found.path}" if found else "there was no checkpoint yet"
    return f"another process of this run has gone; {last}. Start all of them again with --resume to go on."


def run_result(metrics: Mapping[str, np.ndarray]) -> Any:
    """The metrics of a run as a `report.RunResult`."""
    from jaxpg.report import RunResult

    new_steps = np.diff(metrics["steps"], axis=0, prepend=0).sum(1)
    return RunResult(
        steps=metrics["steps"],
        returns=training_returns(metrics),
        final=last_evaluation(metrics.get("evaluation_return"), metrics["steps"].shape[1]),
        seconds=float(metrics["seconds"][-1]),
        steps_per_second=float(np.median(new_steps / metrics["chunk_seconds"])),
    )


def training_returns(metrics: Mapping[str, np.ndarray]) -> np.ndarray:
    """The learning curve of a run, `[N, S]`: evaluations where training has no return, as in fine-tuning."""
    return metrics["return"] if "return" in metrics else metrics["evaluation_return"]


def last_evaluation(values: np.ndarray | None, num_seeds: int) -> np.ndarray:
    """The last evaluation, `[S]`; NaN if there was none."""
    done = [] if values is None else values[np.isfinite(values).all(1)]
    return done[-1] if len(done) else np.full(num_seeds, np.nan)
