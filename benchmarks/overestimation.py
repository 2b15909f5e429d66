"""What double Q-learning is for: how far value estimates are above the truth, in a table and with networks.

    python benchmarks/overestimation.py [--seeds 10]

Writes results/overestimation.json and results/overestimation.png. The task is a random process of 20 states and 10
actions whose rewards are noise around small differences, so that the largest of ten estimates is too large. All exact
values are known from P and R. Two numbers are measured as learning goes on, both means over states:

    over-estimation = max_a Q(s, a) - V_greedy(s),    loss = V*(s) - V_greedy(s)

where V_greedy is the exact value of the policy that is greedy in Q (van Hasselt et al. 2016, section "Overoptimism").
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from result_files import write
from rich.console import Console
from rich.table import Table

from jaxpg import envs, parallel, report, values
from jaxpg.report.drawing import STYLE, save
from jaxpg.report.palette import color_of
from jaxpg.training.provenance import describe_machine
from jaxpg.types import Array, Env, Learner, Tree

RESULTS = Path(__file__).parent / "results"
STATES, ACTIONS, GAMMA, TIME_LIMIT = 21, 10, 0.95, 200  # one of the states is terminal
STEPS, POINTS = 128_000, 40

TABULAR: dict[str, Any] = {
    "learning_rate": 0.1, "gamma": GAMMA, "num_steps": STEPS // POINTS,
    "epsilon_start": 1.0, "epsilon_end": 0.1, "epsilon_steps": STEPS // 4,
}  # fmt: skip
DEEP: dict[str, Any] = {
    "learning_rate": 5e-4, "gamma": GAMMA, "num_envs": 8, "repeats": STEPS // POINTS // 8, "batch_size": 32,
    "buffer_size": 4_000, "learning_starts": 1_000, "target_period": 500,
    "epsilon_start": 1.0, "epsilon_end": 0.1, "epsilon_steps": STEPS // 4,
}  # fmt: skip


def learners(env: Env) -> dict[str, tuple[Learner, Callable[[Tree], Array]]]:
    """By name, a learner and the estimates `[S, A]` of its parameters."""
    everywhere = jnp.eye(STATES)
    torso = values.mlp(env, hidden=(64, 64))
    found = {}
    for name in ("q_learning", "double_q_learning"):
        algorithm = values.TABULAR_ALGORITHMS[name](**TABULAR)
        found[name] = values.tabular_control(env, algorithm), lambda state: state.params.policy.mean(0)
    for name in ("dqn", "double_dqn"):
        algorithm = values.ALGORITHMS[name](**DEEP)
        network = values.q_network(env, torso, algorithm.head)
        estimates = partial(lambda network, state: network.values(state.params.policy, everywhere), network)
        found[name] = values.deep_q(env, torso, algorithm), estimates
    return found


def measure(mdp: envs.MDP, learner: Learner, estimates: Callable[[Tree], Array], seeds: int) -> dict[str, np.ndarray]:
    """`[seeds, points]` of each measure; the states count alike, the terminal one not at all."""
    live = ~mdp.terminal
    best = values.value_iteration(mdp, GAMMA).values

    def mean(x: Array) -> Array:
        return jnp.where(live, x, 0.0).sum() / live.sum()

    def iterate(state: Tree, key: Array) -> tuple[Tree, dict[str, Array]]:
        state, metrics = learner.step(state, key)
        q = estimates(state)
        true = envs.state_values(mdp, jax.nn.one_hot(q.argmax(-1), ACTIONS), GAMMA)
        found = {"overestimation": mean(q.max(-1) - true), "loss": mean(best - true)}
        return state, found | {"steps": metrics["steps"]}

    def one(key: Array) -> dict[str, Array]:
        begin, train_key = jax.random.split(key)
        return jax.lax.scan(iterate, learner.init(begin), jax.random.split(train_key, POINTS))[1]

    run = jax.jit(parallel.map_seeds(one))
    return {name: np.asarray(x) for name, x in run(jax.random.split(jax.random.key(0), seeds)).items()}


def draw(found: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """Over-estimation of tables and of networks, and what the greedy policies lose, by environment steps."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 7), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True)
        pairs = (("q_learning", "double_q_learning"), ("dqn", "double_dqn"))
        labels = {"overestimation": "max Q − V of the greedy policy", "loss": "V* − V of the greedy policy"}
        for (measure, label), row in zip(labels.items(), panels, strict=True):
            for pair, axes in zip(pairs, row, strict=True):
                for name in pair:
                    steps = found[name]["steps"][0] / 1_000
                    middle, low, high = report.bootstrap(found[name][measure].T)
                    axes.plot(steps, middle, color=color_of(name), label=name)
                    axes.fill_between(steps, low, high, color=color_of(name), alpha=0.2, linewidth=0)
                axes.axhline(0.0, color="#57606a", linewidth=1, linestyle="--")
                axes.set(ylabel=label)
                axes.grid(visible=True, axis="y")
        for axes, title in zip(panels[0], ("tables", "networks"), strict=True):
            axes.set_title(title)
            axes.legend(frameon=False)
        for axes in panels[1]:
            axes.set_xlabel("environment steps (thousands)")
        seeds = len(found["dqn"]["steps"])
        figure.suptitle(f"Noisy rewards, {ACTIONS} actions: over-estimation, and its price ({seeds} seeds)")
    save(figure, path)


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    mdp = envs.random_mdp(jax.random.key(0), STATES, ACTIONS)
    env = envs.as_env(mdp, TIME_LIMIT, "noisy_rewards")
    found, rows = {}, {}
    table = Table("algorithm", "over-estimation", "loss of the greedy policy", title="Mean over the last quarter")
    for name, (learner, estimates) in learners(env).items():
        found[name] = measure(mdp, learner, estimates, arguments.seeds)
        print(name, "measured", flush=True)
        late = {key: found[name][key][:, -POINTS // 4 :].mean(1) for key in ("overestimation", "loss")}
        rows[name] = {key: dict(zip(("iqm", "low", "high"), map(float, report.bootstrap(x)), strict=True))
                      | {"seeds": [round(float(y), 4) for y in x]} for key, x in late.items()}  # fmt: skip
        cells = ("{iqm:.3f} [{low:.3f}, {high:.3f}]".format(**rows[name][key]) for key in late)
        table.add_row(name, *cells)
    draw(found, RESULTS / "overestimation.png")
    Console().print(table)
    best = values.value_iteration(mdp, GAMMA).values
    written = {
        "command": shlex.join(["python", *sys.argv]),
        "optimum": float(best[~mdp.terminal].mean()),
        "last quarter": rows,
        "settings": {"tables": TABULAR, "networks": DEEP},
        "machine": describe_machine(),
    }
    write(RESULTS / "overestimation.json", written)


if __name__ == "__main__":
    main()
