"""The line from REINFORCE to PPO on LunarLander-v3, in both action spaces, and what is only claimed about it.

    python benchmarks/lunar_lander.py [--spaces discrete continuous] [--only PATTERN] [--report]

Ten seeds each, settings from configs/lunar_lander*.toml, trained with 60 and 20 passes of the physics' solver instead
of Gymnasium's 180 and 60 (benchmarks/lunar_lander_speed.py measures what that changes) and scored with all of them: 100
episodes per seed, sampled and greedy. `claims` are runs with one change each. What is finished is not trained again,
and what was interrupted goes on. `--report` makes tables and figures from what there is.

Writes results/lunar_lander.json, and for docs/lunar_lander.md the tables, learning curves, diagnostics and a GIF of the
final policy of each algorithm.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")  # each run has one core; several runs go side by side

import argparse
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from learning import Cell, fingerprint, learner_of, measure, read, resolve, run_folder, write
from mistakes import normalized_targets
from rich.console import Console

from jaxpg import report
from jaxpg.experiments.build import build
from jaxpg.report.comparison import to_jsonable
from jaxpg.rollout.evaluation import evaluate
from jaxpg.training.loop import restore

RESULTS = Path(__file__).parent / "results" / "lunar_lander.json"
SPACES = {"discrete": "lunar_lander", "continuous": "lunar_lander_continuous"}
FEWER_PASSES = {"environment_settings": {"velocity_iterations": 60, "position_iterations": 20}}
EPISODES, SEEDS = 100, 10
LINE = {
    "ppo": (240.0, 220.0),
    "a2c": (150.0, None),
    "trpo": (200.0, 200.0),
    "actor_critic_td": (150.0, None),
    "actor_critic_mc": (100.0, None),
    "reinforce_baseline": (None, None),
    "reinforce": (None, None),
    "grpo": (None, None),
}
"""The algorithms, with the mean return that is expected in each space; None where it is only reported."""


def line() -> list[Cell]:
    """Every algorithm in both action spaces."""
    return [
        Cell(task, algorithm, SEEDS, targets[i], overrides=FEWER_PASSES)
        for i, task in enumerate(SPACES.values())
        for algorithm, targets in LINE.items()
    ]


def claims() -> list[Cell]:
    """One change each, of what the line has in the discrete space."""

    def changed(algorithm: str, variant: str, change: Any = None, **overrides: Any) -> Cell:
        return Cell("lunar_lander", algorithm, SEEDS, None, None, "", variant, {**FEWER_PASSES, **overrides}, change)

    network = {"kind": "mlp", "hidden": [64, 64], "activation": "tanh"}
    return [
        changed("actor_critic_mc", "returns normalised", normalized_targets),
        changed("actor_critic_td", "targets normalised", normalized_targets),
        *(changed(name, "shared torso", network={**network, "shared": True}) for name in ("a2c", "ppo")),
        *(changed(name, "layer normalisation", network={**network, "layer_norm": True}) for name in ("a2c", "ppo")),
    ]


def score(cell: Cell) -> dict[str, Any]:
    """Return and length of EPISODES episodes per seed with all passes of the solver, sampled and greedy."""
    config = resolve(cell)
    exact = resolve(cell._replace(overrides={k: v for k, v in cell.overrides.items() if k not in FEWER_PASSES}))
    learner, _ = learner_of(cell, config)
    env = build(exact).held_out
    state = restore(learner, run_folder(cell), config.seeds, "last").learner
    keys = jax.random.split(jax.random.key(12345), cell.seeds)
    found = {}
    for name, greedy in (("sampled", False), ("greedy", True)):
        play = partial(evaluate, env, episodes=EPISODES, greedy=greedy)
        result = jax.jit(jax.vmap(lambda s, k, play=play: play(learner.actor(s), k)))(state, keys)
        returns = jnp.mean(result.returns, 1)
        found[name] = {
            "returns": returns,
            "lengths": jnp.mean(result.lengths, 1),
            "landed": jnp.mean(result.returns >= 200, 1),
            "mean": report.bootstrap(returns, statistic=report.mean),
            "iqm": report.bootstrap(returns),
        }
    return found


def train(cells: Iterable[Cell], console: Console) -> None:
    """Train and score the cells that have no result."""
    for cell in cells:
        if read(RESULTS).get(cell.name, {}).get("fingerprint") == fingerprint(cell, resolve(cell)):
            continue
        trained = measure(cell, console, fresh=False)
        found = to_jsonable({**trained, "command": "python benchmarks/lunar_lander.py", **score(cell)})
        write(RESULTS, {**read(RESULTS), cell.name: found})  # read again: other cells may have been finished
        for name in ("sampled", "greedy"):
            console.print(f"{cell.name}, {name}: {found[name]['mean']}, {sorted(map(round, found[name]['returns']))}")


def main() -> None:
    """Train what is missing and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spaces", nargs="+", choices=SPACES, default=list(SPACES))
    parser.add_argument("--only", default="", help="only the runs whose name matches this regular expression")
    parser.add_argument("--report", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    tasks = [SPACES[space] for space in arguments.spaces]
    cells = [cell for cell in [*line(), *claims()] if cell.task in tasks and re.search(arguments.only, cell.name)]
    if not arguments.report:
        train(cells, console)


if __name__ == "__main__":
    main()
