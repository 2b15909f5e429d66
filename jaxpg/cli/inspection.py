"""The commands that look at trained runs: eval, play, sample and plot."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import box
from rich.table import Table

from jaxpg.cli.runs import last_evaluation, training_returns
from jaxpg.cli.terminal import make_console
from jaxpg.errors import UserError
from jaxpg.experiments import completions
from jaxpg.experiments.build import Experiment, writes_text
from jaxpg.experiments.config import Config, check_seeds, load_config
from jaxpg.experiments.warm_start import build_experiment, check_vocabulary
from jaxpg.parallel import host_callback
from jaxpg.printable import printable
from jaxpg.rollout.evaluation import Evaluation, evaluate, record_episode
from jaxpg.training import run_directory
from jaxpg.training.advance import RunState
from jaxpg.training.loop import restore


def run_eval(arguments: argparse.Namespace) -> int:
    """Measure a trained policy over many episodes."""
    episodes = arguments.episodes
    if episodes < 1:
        raise UserError(f"--episodes must be at least 1, not {episodes}.")
    config, experiment, state = _load_run(arguments)
    if rest := episodes % config.evaluation_samples:
        raise UserError(
            f"--episodes {episodes} cannot be divided into groups with one start state, of evaluation_samples = "
            f"{config.evaluation_samples} in this run's config: give a multiple of that, such as --episodes "
            f"{episodes - rest + config.evaluation_samples}."
        )

    def evaluate_seed(state: Any, key: Any) -> Evaluation:
        return evaluate(
            experiment.held_out,
            experiment.learner.actor(state),
            key,
            episodes=episodes,
            greedy=arguments.greedy,
            group_size=config.evaluation_samples,
        )

    keys = jax.random.split(jax.random.key(arguments.seed), len(config.seeds))
    result = jax.device_get(jax.jit(jax.vmap(evaluate_seed))(state.learner, keys))
    host_callback.raise_failure()
    sampling = "greedy" if arguments.greedy else "sampled"
    _print_evaluation(config, result, f"{episodes} {sampling} episodes per seed")
    return 0


def _print_evaluation(config: Config, result: Evaluation, episodes: str) -> None:
    """A line for each seed, the statistics over seeds, and what else was measured."""
    from jaxpg import report

    returns, lengths = np.mean(result.returns, 1), np.mean(result.lengths, 1)
    table = Table("seed", "return", "length", box=box.SIMPLE_HEAD)
    table.title = f"{config.algorithm} on {config.task}, {episodes}"
    for seed, value, length in zip(config.seeds, returns, lengths, strict=True):
        table.add_row(str(seed), f"{value:.4g}", f"{length:.4g}")
    console = make_console()
    console.print(table)
    for word, statistic in (("mean", report.mean), ("interquartile mean", report.interquartile_mean)):
        value, low, high = report.bootstrap(returns, statistic=statistic)
        interval = f", 95% interval [{low:.4g}, {high:.4g}]" if math.isfinite(low) else ""
        console.print(f"{word} {value:.4g}{interval}")
    for name, values in sorted(result.metrics.items()):
        value = np.nanmean(values) if np.isfinite(values).any() else math.nan
        console.print(f"{printable(name)} {value:.4g}")


def run_play(arguments: argparse.Namespace) -> int:
    """Draw one episode of the seed that was best when the checkpoint was written."""
    if arguments.gif.suffix != ".gif":
        raise UserError(f"--gif takes a file that ends in .gif, not {arguments.gif}.")
    config, experiment, state = _load_run(arguments)
    if experiment.env.context:
        raise UserError(f"{config.task} is a text task. Look at its completions with: jaxpg sample {arguments.run}")
    from jaxpg import report

    best = _best_seed(run_directory.load_metrics(arguments.run), state)
    actor = experiment.learner.actor(jax.tree.map(lambda x: x[best], state.learner))
    record = jax.jit(lambda key: record_episode(experiment.env, actor, key, greedy=arguments.greedy))
    episode = jax.device_get(record(jax.random.key(arguments.seed)))
    report.render_gif(experiment.env, episode, arguments.gif)
    length = int(episode.length)
    episode_return = float(episode.rewards[:length].sum())
    print(f"{printable(arguments.gif)}: seed {config.seeds[best]}, {length} steps, return {episode_return:.4g}")
    return 0


def _best_seed(metrics: Mapping[str, np.ndarray], state: RunState) -> int:
    """The index of the seed with the best evaluation, of the last one that the state includes."""
    included = (metrics["steps"] <= np.asarray(state.steps)).all(1)
    evaluations = metrics["evaluation_return"][included] if "evaluation_return" in metrics else None
    scores = last_evaluation(evaluations, len(np.asarray(state.steps)))
    return int(np.argmax(np.nan_to_num(scores, nan=-np.inf)))


def run_sample(arguments: argparse.Namespace) -> int:
    """Completions of a trained language model, of a given prompt or of held-out ones."""
    if arguments.number < 1 or arguments.temperature <= 0 or arguments.top_k < 0 or not 0 < arguments.top_p <= 1:
        raise UserError(
            "--number is at least 1, --temperature above 0, --top-k at least 0 and --top-p above 0 and at most 1; not "
            f"{arguments.number}, {arguments.temperature}, {arguments.top_k} and {arguments.top_p}."
        )
    config, experiment, state = _load_run(arguments)
    if not writes_text(config, experiment.env):
        raise UserError(f"{arguments.run} is a run of {config.algorithm} on {config.task}, which writes no text.")
    params = jax.tree.map(lambda x: x[0], state.learner.params.policy)
    key = jax.random.key(arguments.seed)
    settings = {name: getattr(arguments, name) for name in ("number", "temperature", "top_k", "top_p", "greedy")}
    if arguments.prompt is None:
        for sample in completions.completion_sampler(config, experiment, **settings)(params, key):
            make_console().print(sample.line())
    else:
        for text in completions.complete_prompt(config, experiment, params, arguments.prompt, key, **settings):
            print(printable(text, keep="\n\t"))
    return 0


def run_plot(arguments: argparse.Namespace) -> int:
    """Draw the learning curves of runs into one figure."""
    from jaxpg import report

    resolved = {run: load_config(run) for run in arguments.runs}
    tasks = {config.task for config in resolved.values()}
    curves: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for run, config in resolved.items():
        label = config.algorithm if len(tasks) == 1 else f"{config.algorithm}, {config.task}"
        metrics = run_directory.load_metrics(run)
        curves[_unused_label(label, run, curves)] = metrics["steps"], training_returns(metrics)
    thresholds = {config.threshold for config in resolved.values()}
    threshold = thresholds.pop() if len(thresholds) == 1 else None
    report.learning_curve(curves, arguments.out, title=", ".join(sorted(tasks)), threshold=threshold)
    print(printable(arguments.out))
    return 0


def _unused_label(label: str, run: Path, curves: Mapping[str, Any]) -> str:
    return label if label not in curves else f"{label}, {run.name}"


def _load_run(arguments: argparse.Namespace) -> tuple[Config, Experiment, RunState]:
    """Config, experiment and restored state of a run."""
    check_seeds([arguments.seed])
    config = load_config(arguments.run)
    check_vocabulary(config, arguments.run)
    experiment = build_experiment(config)
    host_callback.clear_failures()
    return config, experiment, restore(experiment.learner, arguments.run, config.seeds, arguments.checkpoint)
