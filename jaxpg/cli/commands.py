"""The commands that train: train, compare and sweep. Each takes the parsed arguments and returns an exit code."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxpg import files
from jaxpg.cli import devices, gridworld, inspection, listing, runs
from jaxpg.cli.options import RunOptions, config_of_run, read_run_options
from jaxpg.errors import UserError
from jaxpg.experiments.build import KINDS
from jaxpg.experiments.completions import SAMPLES, format_completions, load_completions
from jaxpg.experiments.config import ALGORITHMS, Config, resolve_config, to_dict
from jaxpg.experiments.grid import CompiledGroup, parse_grid, plan_grid
from jaxpg.experiments.stages import check_plan, plan_stages
from jaxpg.experiments.sweep import memory_limit, train_sweep
from jaxpg.parallel import processes
from jaxpg.training import provenance, run_directory


def run_train(arguments: argparse.Namespace) -> int:
    """Train an algorithm on a task, and draw its learning curve."""
    options = read_run_options(arguments)
    config = config_of_run(options, arguments.algorithm, options.out)
    out = options.out or _new_directory(f"{config.task}-{config.algorithm}")
    if not runs.train_plan(runs.plan_run(config, out, out, options), options):
        return runs.report_interrupted(out, f"train {options.task} {arguments.algorithm}")
    if processes.is_main_process():
        _show_run(config, out)
    return 0


def _show_run(config: Config, out: Path) -> None:
    """The result of a run, the files that it left, and the command that looks at it."""
    from jaxpg import report

    run = runs.run_result(run_directory.load_metrics(out))
    curve = out / "learning_curve.png"
    report.learning_curve(
        {config.algorithm: (run.steps, run.returns)}, curve, title=config.task, threshold=config.threshold
    )
    summaries = report.summarize({config.algorithm: run}, config.threshold)
    console = Console()
    console.print(report.comparison_table(summaries, title=f"{config.task}, {len(config.seeds)} seeds"))
    _print_line(console, f"Learning curve: {curve}")
    if (out / runs.PAGE).exists():
        _print_line(console, f"Report:         {out / runs.PAGE}")
    if KINDS[config.algorithm].has_policy:
        look = f"sample {out}" if (out / SAMPLES).exists() else f"play {out} --gif {config.task}.gif"
        _print_line(console, f"Look at it:     jaxpg {look}")


def run_compare(arguments: argparse.Namespace) -> int:
    """Train several algorithms on a task, and compare them."""
    options = read_run_options(arguments)
    out = options.out or _new_directory(f"{options.task}-compared")
    algorithms = list(dict.fromkeys(arguments.algorithms))
    resolved = {name: config_of_run(options, name, out / name) for name in algorithms}
    plans = [
        plan_stages(config, out / name, out, task=options.task, overrides=options.overrides)
        for name, config in resolved.items()
    ]
    for plan in plans:
        check_plan(plan)
    for plan in plans:
        if not runs.train_plan(plan, options):
            return runs.report_interrupted(out, f"compare {options.task} {' '.join(algorithms)}")
    if processes.is_main_process():
        _show_comparison(resolved, out)
    return 0


def _show_comparison(resolved: Mapping[str, Config], out: Path) -> None:
    """The algorithms side by side, in the terminal and as a page; `resolved` are their configs by name."""
    from jaxpg import report

    results = {name: runs.run_result(run_directory.load_metrics(out / name)) for name in resolved}
    first = next(iter(resolved.values()))
    details = _provenance() | {"configs": {name: files.flatten(to_dict(config)) for name, config in resolved.items()}}
    if stages := _last_evaluations_of_stages(resolved, out):
        details["first stages, last evaluation"] = stages
    texts = {name: format_completions(load_completions(out / name)) for name in resolved}
    if texts := {name: text for name, text in texts.items() if text}:
        details["completions"] = texts
    summaries = report.write_comparison(results, out, title=first.task, threshold=first.threshold, details=details)
    console = Console()
    console.print(report.comparison_table(summaries, title=f"{first.task}, {len(first.seeds)} seeds"))
    _print_line(console, f"Report: {out / 'comparison.html'}")


def _last_evaluations_of_stages(resolved: Mapping[str, Config], out: Path) -> dict[str, str]:
    """The last evaluation, with its interval, of every stage that the compared runs named."""
    from jaxpg import report
    from jaxpg.report.comparison import format_estimate

    named = [name for config in resolved.values() for name in (config.initial, config.reward)]
    stages = dict.fromkeys(name for name in named if name is not None and name in ALGORITHMS)
    finals = {name: runs.run_result(run_directory.load_metrics(out / name)).final for name in stages}
    return {name: format_estimate(report.bootstrap(final)) for name, final in finals.items()}


def run_sweep(arguments: argparse.Namespace) -> int:
    """Train an algorithm with all settings of a grid, several seeds each, and name the best."""
    if arguments.resume and arguments.out is None:
        raise UserError("--resume needs --out, the directory of the sweep to go on with.")
    if arguments.distributed:
        raise UserError("A sweep is one process. On several hosts give each a part of the grid, and no --distributed.")
    options, grid = read_run_options(arguments), parse_grid(arguments.grid)
    groups = plan_grid(options.task, arguments.algorithm, options.overrides, grid)
    config = groups[0].config
    out = options.out or _new_directory(f"{config.task}-sweep")
    runs.console_of(options).print(_sweep_header(groups, out))
    scores = _train_groups(groups, out, options, arguments.algorithm, grid, arguments.memory)
    if scores is None:
        command = f"sweep {options.task} {arguments.algorithm} --grid {shlex.join(arguments.grid)}"
        return runs.report_interrupted(out, command)
    from jaxpg import report

    title = f"{config.algorithm} on {config.task}, {len(config.seeds)} seeds"
    best = report.write_sweep(grid, scores, out, title=title, details=_provenance())
    resolved = resolve_config(options.task, arguments.algorithm, {**options.overrides, **best})
    files.replace_file(out / "best.toml", files.toml_dumps(to_dict(resolved)))
    console = Console()
    console.print(report.sweep_table(grid, scores, title=title))
    _print_line(console, f"Picture:  {out / 'sweep.png'}\nThe best: {out / 'best.toml'}")
    console.print("It was selected on these seeds: train it on new seeds before reporting its score.", highlight=False)
    return 0


def _train_groups(
    groups: Sequence[CompiledGroup],
    out: Path,
    options: RunOptions,
    algorithm: str,
    grid: Mapping[str, Sequence[Any]],
    gibibytes: float | None,
) -> np.ndarray | None:
    """The scores of a sweep, `[P, S]`, after the stages that its runs begin with; None if it was interrupted."""
    *stages, last = runs.plan_run(groups[0].config, out, out, options)
    if not runs.train_stages(stages, options):
        return None
    trained: dict[str, Any] = {"initial": last.config.initial, "reward": last.config.reward}
    return train_sweep(
        [group._replace(config=dataclasses.replace(group.config, **trained)) for group in groups],
        out,
        {"task": options.task, "algorithm": algorithm, "grid": grid, "settings": options.overrides},
        # Waves fit any number of devices, so the number of seeds does not limit it: 0 divides by all.
        mesh_for=lambda config: devices.make_run_mesh(options.devices, 0, config.batch_size),
        memory_of=lambda mesh: memory_limit(mesh, gibibytes),
        hooks_for=partial(runs.training_hooks, options),
        resume=options.resume,
    )


def _sweep_header(groups: Sequence[CompiledGroup], out: Path) -> str:
    config, points = groups[0].config, sum(len(group.points) for group in groups)
    return (
        f"[bold]{config.algorithm} on {config.task}[/bold], {points} points x {len(config.seeds)} seeds, "
        f"{config.total_steps:,} steps each, {len(groups)} program{'s' if len(groups) > 1 else ''}\n{out}"
    )


def _new_directory(name: str) -> Path:
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _provenance() -> dict[str, Any]:
    return {"command": shlex.join(["jaxpg", *sys.argv[1:]]), "machine": provenance.describe_machine()}


def _print_line(console: Console, text: str) -> None:
    """Without colours and line breaks, so that a path can be copied."""
    console.print(text, highlight=False, soft_wrap=True)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": run_train,
    "compare": run_compare,
    "sweep": run_sweep,
    "eval": inspection.run_eval,
    "play": inspection.run_play,
    "sample": inspection.run_sample,
    "plot": inspection.run_plot,
    "gridworld": gridworld.run_gridworld,
    "list": listing.run_list,
}
