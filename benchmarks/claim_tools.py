"""What the claims of claims.py and claims_r1.py share: runs of `jaxpg train`, curves, and rows of tables."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxpg import report
from jaxpg.cli.main import main as jaxpg
from jaxpg.experiments import config as configs
from jaxpg.experiments.build import networks
from jaxpg.experiments.completions import Sample
from jaxpg.experiments.warm_start import build_experiment, initial_policies
from jaxpg.report.drawing import STYLE
from jaxpg.report.palette import COLORS
from jaxpg.rollout.episodes import episodic
from jaxpg.training import run_directory
from jaxpg.training.advance import MEAN_OVER
from jaxpg.training.loop import restore

HERE = Path(__file__).resolve().parent
RUNS, RESULTS = HERE.parent / "runs" / "claims", HERE / "results"

Metrics = Mapping[str, np.ndarray]


class Trained(NamedTuple):
    """A run, its command, and what it measured: name -> [N, S]."""

    directory: Path
    command: str
    metrics: Metrics


class Finding(NamedTuple):
    """What a claim comes to: its figure, and lines of Markdown."""

    figure: Figure
    lines: list[str]
    runs: list[Trained]


def trained(name: str, seeds: int, *arguments: str) -> Trained:
    """A run of `jaxpg train`, from where an earlier one stands."""
    out = RUNS / f"{name}-{seeds}"
    command = ["train", *arguments, "--seeds", str(seeds), "--out", str(out), "--resume", "--quiet"]
    if jaxpg(command):
        raise SystemExit(f"jaxpg {shlex.join(command)} failed")
    public = shlex.join([*arguments, "--seeds", str(seeds), "--out", str(out)]).replace(f"{HERE.parent}/", "")
    return Trained(out, f"jaxpg train {public}", run_directory.load_metrics(out))


def together(runs: list[Trained]) -> Metrics:
    """The evaluations of runs of one seed each as those of a run of all: name -> [E, S], with their steps."""
    rows = [np.isfinite(run.metrics["evaluation_return"]).all(1) for run in runs]
    names = [name for name in runs[0].metrics if name == "steps" or name.startswith("evaluation_")]
    return {n: np.concatenate([run.metrics[n][at] for run, at in zip(runs, rows, strict=True)], 1) for n in names}


def curve(axes: Axes, x: np.ndarray, y: np.ndarray, index: int, label: str, **look: Any) -> None:
    """The interquartile mean over the seeds of y [N, S] that have a number, with its interval, over x [N]."""
    known = np.isfinite(y).any(1)
    value, low, high = np.transpose([report.bootstrap(scores[np.isfinite(scores)]) for scores in y[known]])
    axes.plot(x[known], value, color=COLORS[index % len(COLORS)], label=label, **look)
    axes.fill_between(x[known], low, high, color=COLORS[index % len(COLORS)], alpha=0.15, linewidth=0)


def written_lines(samples: list[Sample]) -> str:
    """Completions, one after the other, for a page of Markdown."""
    return "\n".join(sample.line().plain for sample in samples)


def panels(number: int, *titles: str) -> tuple[Figure, list[Axes]]:
    """A row of empty panels."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * number, 3.4), layout="constrained")
        axes = list(np.atleast_1d(figure.subplots(1, number)))
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title, loc="left", fontsize=10, fontweight="bold")
        panel.grid(axis="y")
    return figure, axes


def tokens(run: Trained) -> np.ndarray:
    """Tokens that a seed has written, [N], in thousands."""
    return run.metrics["steps"].mean(1) / 1e3


def at_the_end(metrics: Metrics, name: str) -> np.ndarray:
    """A metric of every seed, [S]: the last evaluation, or the mean over the last quarter of training."""
    values = metrics[name]
    if name.startswith("evaluation_"):
        return values[np.isfinite(values).all(1)][-1]
    late = metrics["steps"].mean(1) >= 0.75 * metrics["steps"].mean(1).max()
    weight = metrics[MEAN_OVER[name]] if name in MEAN_OVER else np.ones_like(values)
    weight = np.where(np.isfinite(values), weight, 0.0)[late]
    return (weight * np.nan_to_num(values[late])).sum(0) / weight.sum(0)


def estimate(values: np.ndarray) -> str:
    """Interquartile mean over seeds, with its interval."""
    value, low, high = report.bootstrap(values)
    return f"{value:.3f} [{low:.3f}, {high:.3f}]" if np.isfinite(low) else f"{value:.3f}"


def row(label: str, metrics: Metrics, *names: str) -> str:
    """A line of a Markdown table."""
    return f"| {label} | " + " | ".join(estimate(at_the_end(metrics, name)) for name in names) + " |"


def chosen(**settings: Any) -> list[str]:
    """Settings as the command line takes them."""
    return [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]


def divergence(run: Trained, columns: int = 512) -> np.ndarray:
    """KL of a run's policies to those they began with, in nats per completion, estimated by k1 on samples: [S]."""
    settings = configs.load_config(run.directory)
    setup = build_experiment(settings)
    policy, _ = networks(settings, setup.held_out)
    learned = restore(setup.learner, run.directory, settings.seeds, "last").learner.params.policy

    def one(params: Any, began: Any, key: jax.Array) -> jax.Array:
        part = episodic(num_envs=columns).collect(setup.held_out, policy, params, (), key)[1]
        reference = policy.evaluate(began, part).log_prob(part.steps.action)
        return ((part.steps.log_prob - reference) * part.steps.mask).sum(0).mean()

    keys = jax.random.split(jax.random.key(0), len(settings.seeds))
    return np.asarray(jax.lax.map(lambda x: one(*x), (learned, initial_policies(settings, setup), keys)))


def origin(runs: list[Trained]) -> str:
    """What machines, versions and commits the runs come from."""
    machines = [m for run in runs for m in json.loads((run.directory / run_directory.MACHINE).read_text())]
    kinds = {f"{m['cpu']}, {m['cores']} cores, jax {m['jax']}, commit {str(m['commit'])[:12]}" for m in machines}
    return f"({'; '.join(sorted(kinds))})"
