"""The commands that look at trained runs: eval, play, sample, export and plot."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich import box
from rich.table import Table

from jaxpg.cli import record, signals
from jaxpg.cli.runs import command_on
from jaxpg.envs.mdps import grid_of
from jaxpg.errors import UserError
from jaxpg.experiments import completions, sampling
from jaxpg.experiments.build import Experiment, kind_of, reward_network, text_task, writes_text
from jaxpg.experiments.config import Config, check_seeds, load_config, to_dict
from jaxpg.experiments.config_file import file_name
from jaxpg.experiments.data_files import changed_models
from jaxpg.experiments.warm_start import load_reward_model
from jaxpg.models.generation import check_sampling
from jaxpg.parallel import host_callback
from jaxpg.preferences import selecting_env
from jaxpg.rollout.evaluation import Evaluation, RecordedEpisode, evaluate, record_episode
from jaxpg.runs.export import LOADER, export_metrics, export_policy
from jaxpg.runs.results import MetricsTable, common_units, curve_units, training_returns
from jaxpg.runs.terminal import make_console
from jaxpg.runs.trained import Run, open_run
from jaxpg.training import checkpoint, run_directory
from jaxpg.types import Actor, Env
from jaxpg.user_input.printable import counted, printable

PROMPTS = 256
"""Prompts that `jaxpg sample --out` completes if their number is not given."""

FEW_STEPS = 1024
"""Steps of an episode up to which `jaxpg play` records it at the first try."""


def run_eval(arguments: argparse.Namespace) -> int:
    """Measure a trained policy over many episodes."""
    episodes = arguments.episodes
    run = _load_run(arguments)
    config, experiment = run.config, run.experiment
    greedy = _is_greedy(arguments, config)
    if greedy and arguments.samples and experiment.env.context:
        raise UserError("Greedy completions of one prompt are all equal: leave out --samples, or add --no-greedy.")
    samples = arguments.samples or config.evaluation_samples
    group_size = 1 if greedy and experiment.env.context else samples
    if rest := episodes % group_size:
        groups = f"--samples {samples}" if arguments.samples else f"evaluation_samples = {samples} in this run's config"
        raise UserError(
            f"--episodes {episodes} cannot be divided into groups with one start state, of {groups}: give a multiple "
            f"of that, such as --episodes {episodes - rest + group_size}."
        )
    if arguments.reward is not None and group_size == 1:
        raise UserError("--reward chooses among several completions of a prompt: add --samples 8 --no-greedy.")

    env = experiment.held_out if arguments.reward is None else _selecting(arguments.reward, config, experiment)

    def evaluate_seed(state: Any, key: Any) -> Evaluation:
        return evaluate(
            env,
            experiment.learner.actor(state),
            key,
            episodes=episodes,
            greedy=greedy,
            group_size=group_size,
        )

    keys = jax.random.split(jax.random.key(arguments.seed), len(config.seeds))
    with signals.ends_at_once():
        result = jax.device_get(jax.jit(jax.vmap(evaluate_seed))(run.state.learner, keys))
    host_callback.raise_failure()
    sampling = "greedy" if greedy else "sampled"
    word = "prompts" if experiment.env.context else "start states" if group_size > 1 else "episodes"
    different = text_task(config, "test").num_problems if writes_text(config, experiment.env) else None
    make_console().print(checkpoint_line(run.directory, arguments.checkpoint), soft_wrap=True)
    _print_evaluation(config, result, Starts(episodes // group_size, group_size, word, different), sampling)
    for name in changed_models(config, run.directory):
        message = f"{printable(name)} has changed since the run was trained: its scores are another model's."
        make_console().print(message)
    return 0


def _is_greedy(arguments: argparse.Namespace, config: Config) -> bool:
    """Whether actions are the most likely ones: as the option says, else as in the run's own evaluations."""
    return config.evaluation_greedy if arguments.greedy is None else arguments.greedy


def _selecting(run_dir: str, config: Config, experiment: Experiment) -> Env:
    """The held-out environment of a run, in which the reward model of another run also chooses among completions."""
    if not writes_text(config, experiment.env):
        raise UserError(f"--reward takes a reward model, which judges texts, and {config.algorithm} writes none.")
    judge, params = load_reward_model(run_dir, config)
    model = reward_network(config, experiment.held_out)
    return selecting_env(experiment.held_out, text_task(config, "test"), model, params, judge.log_weight)


class Starts(NamedTuple):
    """How many states the episodes of a seed start from, how many start from each of them, and what the states are.

    word: "prompts", "start states", or "episodes" if each episode has a start state of its own.
    different: how many different prompts there are, drawn with replacement; None where they are endless.
    """

    number: int
    group_size: int
    word: str
    different: int | None = None

    def describe(self, sampling: str) -> str:
        """All episodes of a seed: "100 sampled episodes", "25 prompts x 4 samples"."""
        if self.word == "prompts" and sampling == "greedy":
            return f"{counted(self.number, 'prompt')} x 1 greedy completion"
        if self.word == "prompts":
            return f"{counted(self.number, 'prompt')} x {counted(self.group_size, 'sample')}"
        if self.word == "start states":
            return f"{counted(self.number, 'start state')} x {counted(self.group_size, f'{sampling} episode')}"
        return counted(self.number, f"{sampling} episode")


def checkpoint_line(run_dir: Path, which: str) -> str:
    """Which checkpoint of a run was loaded: the score of the best is not that of the end of the run."""
    loaded, last = (checkpoint.find(run_dir / checkpoint.CHECKPOINTS, name) for name in (which, "last"))
    assert loaded is not None
    assert last is not None
    if loaded.steps >= last.steps:
        return f"checkpoint: the last, at {last.steps:,} steps"
    words = f"at {loaded.steps:,} of {last.steps:,} steps, chosen by its score"
    return f"checkpoint: the best, {words}; --checkpoint last is the end of the run"


def _print_evaluation(config: Config, result: Evaluation, starts: Starts, sampling: str) -> None:
    """A line for each seed, their mean with an interval, and what else was measured."""
    returns, lengths = np.mean(result.returns, 1), np.mean(result.lengths, 1)
    table = Table("seed", "return", "length", box=box.SIMPLE_HEAD)
    table.title = f"{config.algorithm} on {config.task}, {starts.describe(sampling)} per seed"
    for seed, value, length in zip(config.seeds, returns, lengths, strict=True):
        table.add_row(str(seed), f"{value:.4g}", f"{length:.4g}")
    console = make_console()
    console.print(table)
    for line in mean_lines(np.asarray(result.returns), starts):
        console.print(line)
    for name, values in sorted(result.metrics.items()):
        value = f"{np.nanmean(values):.4g}" if np.isfinite(values).any() else "–"  # as in tables
        console.print(f"{printable(name)} {value}")


def mean_lines(returns: np.ndarray, starts: Starts) -> list[str]:
    """The mean over seeds with a 95% interval, as text.

    `returns` is `[S, E]`, for E episodes of each seed, those from one start state side by side. From MIN_SCORES seeds
    on the interval is over seeds, and the interquartile mean has one too. For fewer seeds it is over start states:
    those of each seed are resampled, each with all of its episodes. Of fewer than MIN_SCORES in all there is none.
    """
    from jaxpg import report
    from jaxpg.report.statistics import MIN_SCORES

    seeds = len(returns)
    if seeds >= MIN_SCORES:
        return [
            _with_interval(word, report.bootstrap(returns.mean(1), statistic=statistic), f"{seeds} seeds")
            for word, statistic in (("mean", report.mean), ("interquartile mean", report.interquartile_mean))
        ]
    per_start = returns.reshape(seeds, starts.number, starts.group_size).mean(2)
    if starts.number < 2 or seeds * starts.number < MIN_SCORES:
        return [f"mean {returns.mean():.4g}; an interval needs {MIN_SCORES} {starts.word}, or as many seeds"]
    over = f"the {starts.number} {starts.word} of {'each' if seeds > 1 else 'this'} seed"
    if starts.different is not None and starts.different < starts.number:
        over += f", drawn from {starts.different}: of the mean over these, not over new ones"
    few = f"an interval over seeds needs {MIN_SCORES} seeds"
    return [_with_interval("mean", report.bootstrap(*per_start, statistic=report.mean), f"{over}; {few}")]


def _with_interval(word: str, estimate: Any, over: str) -> str:
    value, low, high = estimate
    return f"{word} {value:.4g}" + (f", 95% interval [{low:.4g}, {high:.4g}] over {over}" if math.isfinite(low) else "")


def run_play(arguments: argparse.Namespace) -> int:
    """Draw one episode of the seed that was best when the checkpoint was written; of a table on a grid, its values."""
    if arguments.gif.suffix != ".gif":
        raise UserError(f"--gif takes a file that ends in .gif, not {arguments.gif}.")
    run = _load_run(arguments)
    config, experiment = run.config, run.experiment
    if experiment.env.context:
        command = shlex.join(command_on(arguments.run, to_dict(config), "sample"))
        raise UserError(f"{config.task} is a text task. Look at its completions with: {command}")
    from jaxpg import report

    index = run.seed_index(arguments.seed_index)
    of_seed = run.learner_of(index)
    actor = experiment.learner.actor(of_seed)
    greedy = _is_greedy(arguments, config)
    with signals.ends_at_once():
        episode = _recorded(experiment.env, actor, jax.random.key(arguments.seed), greedy=greedy)
    report.render_gif(experiment.env, episode, arguments.gif)
    length = int(episode.length)
    episode_return, steps = float(episode.rewards[:length].sum()), counted(length, "step")
    print(f"{printable(arguments.gif)}: seed {config.seeds[index]}, {steps}, return {episode_return:.4g}")
    _draw_values(config, of_seed, arguments.gif.with_name(f"{arguments.gif.stem}_values.png"))
    return 0


def _recorded(env: Env, actor: Actor, key: Any, *, greedy: bool) -> RecordedEpisode:
    """An episode on the host, recorded by a program with memory for few steps, and for more if it has more."""
    steps = min(env.time_limit, FEW_STEPS)
    while True:
        record = jax.jit(partial(record_episode, env, actor, greedy=greedy, max_steps=steps))
        episode = jax.device_get(record(key))
        host_callback.raise_failure()
        if episode.length < steps or steps == env.time_limit:
            return episode
        steps = min(env.time_limit, 8 * steps)


def _draw_values(config: Config, state: Any, path: Path) -> None:
    """Draw the largest action value of each state and the actions that have it, where a table was learned on a grid."""
    action_values = kind_of(config).action_values
    grid = grid_of(config.environment, config.environment_settings)
    if action_values is None or grid is None:
        return
    from jaxpg.report.value_map import ValueMap, value_figure

    q = np.asarray(action_values(state))
    best = q.max(-1)
    title = f"{config.algorithm} on {config.task}"
    value_figure({"largest action value": ValueMap(best, q == best[:, None])}, grid, path, title=title)
    print(f"{printable(path)}: the table")


def run_sample(arguments: argparse.Namespace) -> int:
    """Completions of a trained language model, of a given prompt, of held-out ones, or of training prompts as data."""
    _check_sample_arguments(arguments)
    run = _load_run(arguments)
    run.refuse_without_text()
    settings = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p", "greedy")}
    check_sampling(**settings)
    settings["number"] = arguments.number
    index = run.seed_index(arguments.seed_index)
    params, key = run.learner_of(index).params.policy, jax.random.key(arguments.seed)
    if arguments.out is not None:
        only, prompts = arguments.only or "ended", arguments.prompts or PROMPTS
        counts = sampling.sample_to_file(
            arguments.out, run.config, run.experiment, params, key, prompts=prompts, only=only, **settings
        )
        print(f"{printable(arguments.out)}: {counts.sentence(only)}")
    elif arguments.prompt is None:
        for sample in completions.completion_sampler(run.config, run.experiment, **settings)(params, key):
            make_console().print(sample.line())
    else:
        for text in run.complete(arguments.prompt, seed=arguments.seed, seed_index=index, **settings):
            print(printable(text, keep="\n\t"))
    return 0


def _check_sample_arguments(arguments: argparse.Namespace) -> None:
    """Refuse arguments of `sample` that do not go together, and a file that would be overwritten."""
    if arguments.out is None:
        for name in ("prompts", "only"):
            if getattr(arguments, name) is not None:
                raise UserError(f"--{name} is for completions that are written to a file: add --out FILE.")
        return
    if arguments.prompt is not None:
        raise UserError("--out writes completions of the prompts that the run was trained on: leave out --prompt.")
    if arguments.out.suffix != ".jsonl":
        raise UserError(f"--out takes a file that ends in .jsonl, not {arguments.out}.")
    if arguments.out.exists():
        raise UserError(f"{arguments.out} exists already: choose another --out.")


def run_export(arguments: argparse.Namespace) -> int:
    """Write the metrics of a run, and the policy of a seed where it has one that acts on observations."""
    config, out = load_config(arguments.run), arguments.out or arguments.run / "export"
    metrics = MetricsTable(run_directory.load_metrics(arguments.run), config.seeds)
    if arguments.seed_index is None and not run_directory.has_checkpoint(arguments.run):
        print(printable(export_metrics(metrics, out)))
        print("No policy exported: the run has no checkpoint.")
        return 0
    run = open_run(config, arguments.run, arguments.checkpoint)
    if arguments.seed_index is not None:
        run.refuse_without_actions()
        run.learner_of(arguments.seed_index)
    print(printable(export_metrics(metrics, out)))
    if not kind_of(config).has_policy or run.experiment.env.context:
        print(f"No policy exported: {config.algorithm} on {config.task} has none that acts on observations.")
        return 0
    index = run.seed_index(arguments.seed_index)
    path = export_policy(run, out, index)
    print(f"{printable(path)}: seed {config.seeds[index]}; {LOADER} beside it loads it without jaxpg")
    return 0


def run_plot(arguments: argparse.Namespace) -> int:
    """Draw the learning curves of runs into one figure."""
    from jaxpg import report

    found = [run for directory in arguments.runs for run in compared_runs(directory)]
    runs = {Path(os.path.realpath(run)): _plotted(run) for run in found}  # `resolve` raises where links make a loop
    tasks = {run.task for run in runs.values()}
    names = {path: run.name if len(tasks) == 1 else f"{run.name}, {run.task}" for path, run in runs.items()}
    labels = run_labels(names)
    curves = {labels[path]: (run.steps, run.returns) for path, run in runs.items()}
    thresholds, units = {run.threshold for run in runs.values()}, common_units(run.units for run in runs.values())
    threshold = thresholds.pop() if len(thresholds) == 1 else None
    title = ", ".join(sorted(tasks))
    report.learning_curve(curves, arguments.out, title=title, threshold=threshold, units=units)
    print(printable(arguments.out))
    return 0


def compared_runs(directory: Path) -> list[Path]:
    """The runs that `jaxpg compare` has begun in a directory, in its order; of another command the directory itself."""
    begun = record.read(directory)
    if begun is None or begun.command != "compare":
        return [directory]
    folders = [directory / file_name(algorithm) for algorithm in begun.algorithms]
    return [folder for folder in folders if (folder / run_directory.CONFIG).exists()] or [directory]


class PlottedRun(NamedTuple):
    """What a figure shows of a run: its algorithm and task, steps and returns `[N, S]`, the task's threshold, units."""

    name: str
    task: str
    steps: np.ndarray
    returns: np.ndarray
    threshold: float | None
    units: Any


def _plotted(run: Path) -> PlottedRun:
    """A run as its metrics and its config.toml show it; one from Python need not name an algorithm or a task in there.

    Raises:
        UserError: it is no run, or has no returns.
    """
    run_directory.check_is_run(run)
    config = run_directory.load_config(run)
    if "sweep" in config:
        raise UserError(f"{run} holds runs of a sweep side by side, which are no seeds. Its figure is its sweep.png.")
    metrics = run_directory.load_metrics(run)
    if not {"return", "evaluation_return"} & metrics.keys():
        raise UserError(f"{run} has no curve: its metrics have neither return nor evaluation_return.")
    threshold = config.get("threshold")
    return PlottedRun(
        name=str(config.get("algorithm", run.resolve().name)),
        task=str(config.get("task", "trained from Python")),
        steps=metrics["steps"],
        returns=training_returns(metrics),
        threshold=threshold if isinstance(threshold, int | float) else None,
        units=curve_units(config),
    )


def run_labels(names: Mapping[Path, str]) -> dict[Path, str]:
    """A label for each run: its name, with what tells its path apart if another run has the same name."""
    paths = {name: [path for path in names if names[path] == name] for name in names.values()}
    parts = {path: part for same in paths.values() for path, part in zip(same, distinguishing_parts(same), strict=True)}
    return {path: name if len(paths[name]) == 1 else f"{name}, {parts[path]}" for path, name in names.items()}


def distinguishing_parts(paths: Sequence[Path]) -> list[str]:
    """Different absolute paths, each without the first and the last folders that all of them have in common."""
    split = [path.parts for path in paths]
    shortest = min(map(len, split))
    front = min(_common(split), shortest - 1)
    behind = min(_common([parts[::-1] for parts in split]), shortest - 1 - front)
    return ["/".join(parts[front : len(parts) - behind]) for parts in split]


def _common(sequences: Sequence[Sequence[str]]) -> int:
    """The number of first entries that all sequences have in common."""
    return len(list(itertools.takewhile(lambda entries: len(set(entries)) == 1, zip(*sequences, strict=False))))


def _load_run(arguments: argparse.Namespace) -> Run:
    """The run that a command looks at."""
    check_seeds([arguments.seed])
    return open_run(load_config(arguments.run), arguments.run, arguments.checkpoint)
