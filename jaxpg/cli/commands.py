"""What the commands do. Each takes the parsed arguments and returns an exit code."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from jaxpg import files
from jaxpg.cli import devices, listing, runs
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments.grid import parse_grid, plan_grid
from jaxpg.parallel import host_callback, processes
from jaxpg.training import provenance, run_directory


def run_train(arguments: argparse.Namespace) -> int:
    """Train an algorithm on a task, and draw its learning curve."""
    config = runs.config_of_run(arguments, arguments.task, arguments.algorithm, arguments.out)
    out = arguments.out or Path("runs") / f"{config.task}-{config.algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not runs.train_with_stages(config, out, out, arguments):
        return runs.say_interrupted(out, f"train {arguments.task} {arguments.algorithm}")
    if not processes.is_main_process():
        return 0
    from jaxpg import report

    run = runs.run_result(run_directory.load_metrics(out))
    curve = out / "learning_curve.png"
    report.learning_curve(
        {config.algorithm: (run.steps, run.returns)}, curve, title=config.task, threshold=config.threshold
    )
    summaries = report.summarize({config.algorithm: run}, config.threshold)
    console = Console()
    console.print(report.comparison_table(summaries, title=f"{config.task}, {len(config.seeds)} seeds"))
    console.print(f"Learning curve: {curve}", highlight=False, soft_wrap=True)
    if (out / runs.PAGE).exists():
        console.print(f"Report:         {out / runs.PAGE}", highlight=False, soft_wrap=True)
    if config.algorithm != "reward_model":
        more = f"jaxpg sample {out}" if (out / "samples").exists() else f"jaxpg play {out} --gif {config.task}.gif"
        console.print(f"Look at it:     {more}", highlight=False, soft_wrap=True)
    return 0


def run_compare(arguments: argparse.Namespace) -> int:
    """Train several algorithms on a task, and set them side by side."""
    out = arguments.out or Path("runs") / f"{arguments.task}-compared-{time.strftime('%Y%m%d-%H%M%S')}"
    algorithms = list(dict.fromkeys(arguments.algorithms))
    resolved = {name: runs.config_of_run(arguments, arguments.task, name, out / name) for name in algorithms}
    for config in resolved.values():
        runs.check_fits(config)
    for name, config in resolved.items():
        if not runs.train_with_stages(config, out / name, out, arguments):
            return runs.say_interrupted(out, f"compare {arguments.task} {' '.join(algorithms)}")
    if not processes.is_main_process():
        return 0
    from jaxpg import report
    from jaxpg.experiments import completions

    results = {name: runs.run_result(run_directory.load_metrics(out / name)) for name in algorithms}
    first = resolved[algorithms[0]]
    details = {
        "command": shlex.join(["jaxpg", *sys.argv[1:]]),
        "machine": provenance.describe_machine(),
        "configs": {name: files.flatten(configs.to_dict(config)) for name, config in resolved.items()},
    }
    if before := _first_stages(out, resolved):
        details["first stages, last evaluation"] = before
    written = {name: completions.format_completions(completions.load_completions(out / name)) for name in algorithms}
    details |= {"completions": kept} if (kept := {name: text for name, text in written.items() if text}) else {}
    summaries = report.write_comparison(results, out, title=first.task, threshold=first.threshold, details=details)
    console = Console()
    console.print(report.comparison_table(summaries, title=f"{first.task}, {len(first.seeds)} seeds"))
    console.print(f"Report: {out / 'comparison.html'}", highlight=False, soft_wrap=True)
    return 0


def _first_stages(out: Path, resolved: Mapping[str, configs.Config]) -> dict[str, str]:
    """How far those runs had come that the compared ones began with or were judged by."""
    from jaxpg import report
    from jaxpg.report.comparison import interval

    named = [stage for config in resolved.values() for stage in (config.initial, config.reward)]
    stages = dict.fromkeys(stage for stage in named if stage in configs.ALGORITHMS and stage)
    finals = {stage: runs.run_result(run_directory.load_metrics(out / stage)).final for stage in stages}
    return {stage: interval(report.bootstrap(final)) for stage, final in finals.items()}


def run_sweep(arguments: argparse.Namespace) -> int:
    """Train an algorithm with all settings of a grid, several seeds each, and say which did best."""
    if arguments.resume and arguments.out is None:
        raise UserError("--resume needs --out, the directory of the sweep that is to go on.")
    if arguments.distributed:
        raise UserError("A sweep is one process. On several hosts give each a part of the grid, and no --distributed.")
    chosen, overrides = parse_grid(arguments.grid), runs.overrides(arguments)
    programs = plan_grid(arguments.task, arguments.algorithm, overrides, chosen)
    config, console = programs[0].config, runs.console_of(arguments)
    out = arguments.out or Path("runs") / f"{config.task}-sweep-{time.strftime('%Y%m%d-%H%M%S')}"
    points, seeds = math.prod(map(len, chosen.values())), len(config.seeds)
    console.print(
        f"[bold]{config.algorithm} on {config.task}[/bold], {points} points x {seeds} seeds, "
        f"{config.total_steps:,} steps each, {len(programs)} program{'s' if len(programs) > 1 else ''}\n{out}"
    )
    again = f"sweep {arguments.task} {arguments.algorithm} --grid {shlex.join(arguments.grid)}"
    if (ready := runs.train_stages(config, out, arguments)) is None:
        return runs.say_interrupted(out, again)
    from jaxpg import report
    from jaxpg.experiments.sweep import memory_limit
    from jaxpg.experiments.sweep import train_sweep as run_sweep

    begin: dict[str, Any] = {"initial": ready.initial, "reward": ready.reward}
    scores = run_sweep(
        [p._replace(config=dataclasses.replace(p.config, **begin)) for p in programs],
        out,
        {"task": arguments.task, "algorithm": arguments.algorithm, "grid": chosen, "settings": overrides},
        # Waves fit any number of devices.
        mesh_for=lambda config: devices.make_run_mesh(devices.from_arguments(arguments), 0, config.batch),
        memory_of=lambda mesh: memory_limit(mesh, arguments.memory),
        watched=partial(runs.training_hooks, arguments),
        resume=arguments.resume,
    )
    if scores is None:
        return runs.say_interrupted(out, again)
    title = f"{config.algorithm} on {config.task}, {seeds} seeds"
    details = {"command": shlex.join(["jaxpg", *sys.argv[1:]]), "machine": provenance.describe_machine()}
    best = report.write_sweep(chosen, scores, out, title=title, details=details)
    resolved = configs.resolve_config(arguments.task, arguments.algorithm, {**overrides, **best})
    files.replace_file(out / "best.toml", files.toml_dumps(configs.to_dict(resolved)))
    shown = Console()
    shown.print(report.sweep_table(chosen, scores, title=title))
    shown.print(f"Picture:  {out / 'sweep.png'}\nThe best: {out / 'best.toml'}", highlight=False, soft_wrap=True)
    shown.print("It was chosen on these seeds: train it on others before you quote it.", highlight=False)
    return 0


def run_eval(arguments: argparse.Namespace) -> int:
    """Measure a trained policy over many episodes."""
    if arguments.episodes < 1:
        raise UserError(f"--episodes must be at least 1, not {arguments.episodes}.")
    config, setup, state = _load_run(arguments)
    if rest := arguments.episodes % config.evaluation_samples:
        raise UserError(
            f"--episodes {arguments.episodes} cannot be cut into groups that begin alike, of evaluation_samples = "
            f"{config.evaluation_samples} in this run's config: give a multiple of that, such as --episodes "
            f"{arguments.episodes - rest + config.evaluation_samples}."
        )
    import jax

    from jaxpg import report
    from jaxpg.rollout.evaluation import evaluate as whole_episodes

    def one_seed(state: Any, key: Any) -> Any:
        actor = setup.learner.actor(state)
        return whole_episodes(
            setup.held_out,
            actor,
            key,
            episodes=arguments.episodes,
            greedy=arguments.greedy,
            group_size=config.evaluation_samples,
        )

    keys = jax.random.split(jax.random.key(arguments.seed), len(config.seeds))
    result = jax.device_get(jax.jit(jax.vmap(one_seed))(state.learner, keys))
    host_callback.raise_failure()
    returns, lengths = result.returns.mean(1), result.lengths.mean(1)
    how = "greedy" if arguments.greedy else "sampled"
    table = Table("seed", "return", "length", box=box.SIMPLE_HEAD)
    table.title = f"{config.algorithm} on {config.task}, {arguments.episodes} {how} episodes per seed"
    for seed, value, length in zip(config.seeds, returns, lengths, strict=True):
        table.add_row(str(seed), f"{value:.4g}", f"{length:.4g}")
    console = Console()
    console.print(table)
    for word, statistic in (("mean", report.mean), ("interquartile mean", report.interquartile_mean)):
        value, low, high = report.bootstrap(returns, statistic=statistic)
        interval = f", 95% interval [{low:.4g}, {high:.4g}]" if math.isfinite(low) else ""
        console.print(f"{word} {value:.4g}{interval}", highlight=False, markup=False)
    for name, values in sorted(result.metrics.items()):
        console.print(f"{name} {np.nanmean(values) if np.isfinite(values).any() else math.nan:.4g}", highlight=False)
    return 0


def run_play(arguments: argparse.Namespace) -> int:
    """Draw one episode of the seed that was best when the checkpoint was written."""
    if arguments.gif.suffix != ".gif":
        raise UserError(f"--gif takes a file that ends in .gif, not {arguments.gif}.")
    config, setup, state = _load_run(arguments)
    if setup.env.context:
        raise UserError(f"{config.task} is a text. Look at what is written there with: jaxpg sample {arguments.run}")
    import jax

    from jaxpg import report
    from jaxpg.rollout.evaluation import record_episode as one_episode

    metrics = run_directory.load_metrics(arguments.run)
    before = (metrics["steps"] <= np.asarray(state.steps)).all(1)
    scores = runs.last_evaluation(
        {name: x[before] for name, x in metrics.items()}.get("evaluation_return"), len(config.seeds)
    )
    best = int(np.argmax(np.nan_to_num(scores, nan=-np.inf)))
    one = jax.tree.map(lambda x: x[best], state.learner)
    actor = setup.learner.actor(one)
    playing = jax.jit(lambda key: one_episode(setup.env, actor, key, greedy=arguments.greedy))
    episode = jax.device_get(playing(jax.random.key(arguments.seed)))
    report.render_gif(setup.env, episode, arguments.gif)
    gained = float(episode.rewards[: int(episode.length)].sum())
    print(f"{arguments.gif}: seed {config.seeds[best]}, {int(episode.length)} steps, return {gained:.4g}")
    return 0


def run_sample(arguments: argparse.Namespace) -> int:
    """Completions of a trained language model, of a prompt that is given or of held-out ones."""
    if arguments.number < 1 or arguments.temperature <= 0 or arguments.top_k < 0 or not 0 < arguments.top_p <= 1:
        raise UserError(
            "--number is at least 1, --temperature above 0, --top-k at least 0 and --top-p above 0 and at most 1; not "
            f"{arguments.number}, {arguments.temperature}, {arguments.top_k} and {arguments.top_p}."
        )
    config, setup, state = _load_run(arguments)
    import jax

    from jaxpg.experiments import completions

    if setup.env.context is None or config.algorithm == "reward_model":
        raise UserError(f"{arguments.run} is a run of {config.algorithm} on {config.task}, which writes no text.")
    params = jax.tree.map(lambda x: x[0], state.learner.params.policy)
    key = jax.random.key(arguments.seed)
    how = {name: getattr(arguments, name) for name in ("number", "temperature", "top_k", "top_p", "greedy")}
    if arguments.prompt is None:
        for line in completions.completion_sampler(config, setup, **how)(params, key):
            Console().print(line.line())
    else:
        for text in completions.complete_prompt(config, setup, params, arguments.prompt, key, **how):
            print(text)
    return 0


def run_plot(arguments: argparse.Namespace) -> int:
    """Draw the learning curves of runs into one figure."""
    from jaxpg import report

    resolved = {run: configs.load_config(run) for run in arguments.runs}
    tasks = {config.task for config in resolved.values()}
    curves: dict[str, Any] = {}
    for run, config in resolved.items():
        label = config.algorithm if len(tasks) == 1 else f"{config.algorithm}, {config.task}"
        metrics = run_directory.load_metrics(run)
        curves[label if label not in curves else f"{label}, {run.name}"] = metrics["steps"], metrics["return"]
    thresholds = {config.threshold for config in resolved.values()}
    threshold = thresholds.pop() if len(thresholds) == 1 else None
    report.learning_curve(curves, arguments.out, title=", ".join(sorted(tasks)), threshold=threshold)
    print(arguments.out)
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": run_train,
    "compare": run_compare,
    "sweep": run_sweep,
    "eval": run_eval,
    "play": run_play,
    "sample": run_sample,
    "plot": run_plot,
    "list": listing.run_list,
}


def _load_run(arguments: argparse.Namespace) -> tuple[configs.Config, Any, Any]:
    """Config, setup and state of a run."""
    configs.check_seeds([arguments.seed])
    config = configs.load_config(arguments.run)
    from jaxpg.experiments.warm_start import build_experiment, check_vocabulary
    from jaxpg.training.loop import restore

    check_vocabulary(config, arguments.run)
    setup = build_experiment(config)
    host_callback.clear_failures()
    return config, setup, restore(setup.learner, arguments.run, config.seeds, arguments.checkpoint)
