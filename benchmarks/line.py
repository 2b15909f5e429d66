"""The line from Q-learning to GSPO, rung by rung: the figures and the outcomes of the exercises in docs/line/.

    python benchmarks/line.py [--only ppo grpo] [--seeds 10]

Every rung is trained beside its parent and beside itself with the one change that its exercise makes. A run is that of
the command which the page shows, `jaxpg train TASK RUNG --seeds 10 --steps N --set ...`; its score is the mean return
of the episodes of its last evaluation. Writes docs/line/RUNG.svg, the parent in grey, the child in blue and the broken
one dashed, and docs/line/results.json, with the command, the commit and the machine beside each rung.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from result_files import read, write

import jaxpg  # before anything of jax: `fit` makes a device of every core

PAGES = Path(__file__).parent.parent / "docs" / "line"
RESULTS = PAGES / "results.json"
INK = "#808790"
"""Of axes and letters: readable on a white page and on a dark one, for the figures have no background."""
PARENT, CHILD, BROKEN = "#909090", "#1f8fe0", "#e0701f"

Settings = Mapping[str, Any]


class Rung(NamedTuple):
    """What a page trains.

    task: a task of configs/, or an environment.
    steps: environment steps of each seed.
    breaks: the settings that the exercise changes.
    parent: the algorithm on the same figure, None for a rung without one that learns on this task.
    settings: those that parent and child share, beside the task's; a setting that the parent lacks is the child's.
    own: settings of the child that the parent has with another meaning, such as a clip range of another ratio.
    exercise: (task, steps) of the exercise, where they are not those of the figure.
    """

    task: str
    steps: int
    breaks: Settings
    parent: str | None
    settings: Mapping[str, Any] = {}
    exercise: tuple[str, int] | None = None
    own: Mapping[str, Any] = {}


RAW = {"normalize_advantages": False}
"""Without standardisation, which would subtract a baseline from every rung and hide what the first ones differ in."""
GROUPS = {"num_envs": 32, "learning_rate": 1e-3, "anneal_steps": "total_steps"}
"""As GRPO's section of configs/cartpole.toml, for rungs that have none there."""
LINE: dict[str, Rung] = {
    "q_learning": Rung(
        "cliff_walking", 100_000, {"epsilon_start": 0.0, "epsilon_end": 0.0}, "sarsa", exercise=("frozen_lake", 300_000)
    ),
    "dqn": Rung("cartpole", 50_000, {"target_period": 1}, None),
    "reinforce": Rung("cartpole", 100_000, {"num_envs": 1, "normalize_advantages": True}, None, RAW),
    "reinforce_to_go": Rung("cartpole", 100_000, {"gamma": 0.5}, "reinforce", RAW),
    "reinforce_baseline": Rung(
        "cartpole", 100_000, {"baseline_kind": "running", "baseline_rate": 0.0}, "reinforce_to_go", RAW
    ),
    "actor_critic_mc": Rung(  # as many environments for both, with which alone the parent's score changes by 50
        "cartpole", 100_000, {"value_coefficient": 0.0}, "reinforce_baseline", {**RAW, "num_envs": 8}
    ),
    "actor_critic_td": Rung("cartpole", 100_000, {"num_steps": 1}, "actor_critic_mc"),
    "a2c": Rung("cartpole", 100_000, {"gae_lambda": 0.0}, "actor_critic_td"),
    "trpo": Rung("cartpole", 100_000, {"max_kl": 1.0}, "a2c"),
    "ppo": Rung("cartpole", 100_000, {"epochs": 20, "clip": 1e6}, "a2c"),
    "grpo": Rung("cartpole", 100_000, {"kl": "loss_k3", "kl_coefficient": 1.0}, "ppo"),
    "rloo": Rung("cartpole", 100_000, {"group_size": 2}, "grpo"),
    "dr_grpo": Rung("cartpole", 100_000, {"max_length": 1}, "grpo"),
    "dapo": Rung("cartpole", 100_000, {"overlong_filtering": True}, "grpo"),
    "cispo": Rung(
        "CartPole-v1",
        100_000,
        {"epochs": 40},
        "dapo",
        {**GROUPS, "max_resample_rounds": 2},
    ),
    "gspo": Rung(
        "CartPole-v1",
        100_000,
        {"clip": 3e-4, "clip_high": 4e-4},
        "grpo",
        {**GROUPS, "kl": "none"},
        own={"clip": 0.03, "clip_high": 0.03},
    ),
}


class Trained(NamedTuple):
    """What came out of a run of S seeds: rows of steps and returns `[N, S]`, and the last evaluation `[S]`."""

    steps: Any
    returns: Any
    final: Any


def command(task: str, algorithm: str, steps: int, seeds: int, settings: Settings) -> str:
    """The command that trains the same run."""
    changes = [word for name, x in settings.items() for word in ("--set", f"{name}={json.dumps(x).strip(chr(34))}")]
    return shlex.join(["jaxpg", "train", task, algorithm, "--seeds", str(seeds), "--steps", str(steps), *changes])


@cache
def _fit(task: str, algorithm: str, steps: int, seeds: int, settings: tuple[tuple[str, Any], ...]) -> Trained:
    run = jaxpg.fit(task, algorithm, seeds=seeds, total_steps=steps, progress=False, **dict(settings))
    metrics = run.metrics
    return Trained(metrics["steps"], metrics["return"], metrics["evaluation_return"][-1])


def train(task: str, algorithm: str, steps: int, seeds: int, settings: Settings) -> dict[str, Any]:
    """A run, its command and its score: the interquartile mean over seeds with a 95 % bootstrap interval."""
    from jaxpg.report import bootstrap

    began = time.monotonic()
    trained = _fit(task, algorithm, steps, seeds, tuple(settings.items()))
    score = bootstrap(trained.final)
    print(f"{algorithm} {dict(settings)}: {score} in {time.monotonic() - began:.1f} s", flush=True)
    return {
        "command": command(task, algorithm, steps, seeds, settings),
        "score": [float(score.value), float(score.low), float(score.high)],
        "run": trained,
    }


def draw(name: str, curves: Mapping[str, tuple[Trained, str, str]]) -> None:
    """The curves by label, each with its colour and line style, into docs/line/NAME.svg."""
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    from jaxpg.report import binned, bootstrap
    from jaxpg.report.drawing import STYLE

    colors = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    with matplotlib.rc_context({**STYLE, **dict.fromkeys(colors, INK), "grid.alpha": 0.3}):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        axes = figure.add_subplot()
        for label, (run, color, line) in curves.items():
            edges = np.linspace(0, float(np.nanmax(run.steps)), 51)
            estimate = bootstrap(binned(run.steps, run.returns, edges))
            at = (edges[:-1] + edges[1:]) / 2
            axes.fill_between(at, estimate.low, estimate.high, color=color, alpha=0.2, linewidth=0)
            axes.plot(at, estimate.value, color=color, linestyle=line, linewidth=1.8, label=label)
        axes.set_xlabel("environment steps")
        axes.set_ylabel("episode return")
        axes.xaxis.set_major_formatter(EngFormatter(sep="\N{THIN SPACE}"))
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.grid(axis="y")
        figure.legend(loc="outside upper left", ncols=3, frameon=False)
        figure.savefig(PAGES / f"{name}.svg", transparent=True, metadata={"Date": None})


def shared(settings: Settings, algorithm: str) -> dict[str, Any]:
    """Those of the settings that an algorithm has."""
    import inspect

    from jaxpg import ladder, values

    known = inspect.signature({**ladder.ALGORITHMS, **values.TABULAR_ALGORITHMS, **values.ALGORITHMS}[algorithm])
    return {name: x for name, x in settings.items() if name in known.parameters}


def measure(name: str, rung: Rung, seeds: int) -> dict[str, Any]:
    """Train the runs of a page and draw them; what is written down of them."""
    from jaxpg.training import provenance

    settings = {**rung.settings, **rung.own}
    task, steps = rung.exercise or (rung.task, rung.steps)
    runs = {"child": train(rung.task, name, rung.steps, seeds, settings)}
    if rung.parent:
        runs["parent"] = train(rung.task, rung.parent, rung.steps, seeds, shared(rung.settings, rung.parent))
    if rung.exercise:
        runs["whole"] = train(task, name, steps, seeds, settings)
    runs["broken"] = train(task, name, steps, seeds, {**settings, **rung.breaks})
    changed = ", ".join(f"{key} = {x:g}" if isinstance(x, float) else f"{key} = {x}" for key, x in rung.breaks.items())
    curves = {rung.parent: (runs["parent"]["run"], PARENT, "-")} if rung.parent else {}
    curves |= {name: (runs["child"]["run"], CHILD, "-")}
    if not rung.exercise:
        curves |= {changed: (runs["broken"]["run"], BROKEN, "--")}
    draw(name, curves)
    written = {kind: {key: x for key, x in run.items() if key != "run"} for kind, run in runs.items()}
    made = shlex.join(["python", "benchmarks/line.py", *sys.argv[1:]])
    return {**written, "made by": made, "machine": provenance.describe_machine()}


def main() -> None:
    """Train the rungs that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LINE, default=list(LINE), metavar="RUNG")
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    for name in arguments.only:
        measured = measure(name, LINE[name], arguments.seeds)
        results = {**read(RESULTS), name: measured}
        write(RESULTS, {key: results[key] for key in LINE if key in results})


if __name__ == "__main__":
    main()
