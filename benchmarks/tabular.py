"""Tabular control: how good the greedy policies are, what exploring costs on the cliff, and how fast a step is.

    python benchmarks/tabular.py [--learners 100] [--rounds 5]

Writes results/tabular.json and results/tabular.png. Learners have the settings of configs/. Their greedy policies are
evaluated exactly, from P and R and within the step limit, so the only noise is that of learning. The speed test needs
gymnasium (pip install gymnasium); both sides take turns within one process, and compiling is not timed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from result_files import write
from rich.console import Console
from rich.table import Table

from jaxpg import envs, values
from jaxpg.experiments.config import Config, make_env, resolve_config
from jaxpg.report.drawing import STYLE, save
from jaxpg.report.palette import color_of
from jaxpg.training.provenance import describe_machine
from jaxpg.types import Metrics

RESULTS = Path(__file__).parent / "results"
ALL, TWO = tuple(values.TABULAR_ALGORITHMS), ("sarsa", "q_learning")
TASKS = {"frozen_lake": ALL, "frozen_lake_8x8": TWO, "cliff_walking": ALL, "taxi": TWO, "gridworld": TWO}
LOWEST = {"cliff_walking": -25}
"""Of the returns that are drawn."""
MEASURE = {"frozen_lake": "success", "frozen_lake_8x8": "success"}
SPEED_LEARNERS, SPEED_STEPS, LOOP_STEPS = 1_000, 4_000, 100_000


def train(config: Config, learners: int, iterations: int) -> Callable[[], tuple[jax.Array, Metrics]]:
    """A compiled program: the tables `[N, K, S, A]` and metrics `[N, iterations]` of independent learners."""
    algorithm = values.TABULAR_ALGORITHMS[config.algorithm](**config.settings)
    learner = values.tabular_control(make_env(config), algorithm)

    def one(key: jax.Array) -> tuple[jax.Array, Metrics]:
        begin, train_key = jax.random.split(key)
        state, metrics = jax.lax.scan(learner.step, learner.init(begin), jax.random.split(train_key, iterations))
        return state.params.policy, metrics

    return partial(jax.jit(jax.vmap(one)), jax.random.split(jax.random.key(0), learners))


def greedy_returns(mdp: envs.MDP | envs.SparseMDP, tables: jax.Array, time_limit: int) -> np.ndarray:
    """The exact undiscounted return of each learner's greedy policy within the step limit, `[N]`."""

    def one(tables: jax.Array) -> jax.Array:
        q = tables.mean(0)
        return envs.expected_return(mdp, jax.nn.one_hot(q.argmax(-1), q.shape[-1]), 1.0, horizon=time_limit)

    return np.asarray(jax.jit(jax.vmap(one))(tables))


def learn(learners: int) -> Iterator[dict[str, Any]]:
    """The algorithms of each task: their greedy policies, and the returns during the last tenth of learning."""
    for task, algorithms in TASKS.items():
        for name in algorithms:
            config = resolve_config(task, name)
            settings, limit = dict(config.environment_settings), make_env(config).time_limit
            settings.pop("time_limit", None)
            mdp = envs.MDPS[config.environment](**settings)
            best = float(mdp.start @ values.finite_horizon(mdp, 1.0, limit).values[-1])
            iterations = config.total_steps // config.settings["num_steps"]
            began = time.perf_counter()
            tables, metrics = jax.block_until_ready(train(config, learners, iterations)())
            found = greedy_returns(mdp, tables, limit)
            yield {
                "task": task,
                "algorithm": name,
                "steps": config.total_steps,
                "learners": learners,
                "optimum": best,
                "greedy": {
                    "mean": float(found.mean()),
                    "worst": float(found.min()),
                    "all": [round(float(x), 4) for x in found],
                },
                "while learning": float(np.nanmean(np.asarray(metrics["return"])[:, -iterations // 10 :])),
                "seconds": time.perf_counter() - began,
            }


def cliff(learners: int, bins: int = 50) -> dict[str, dict[str, list[float]]]:
    """Example 6.6: returns while learning with epsilon 0.1 and step size 0.5, by environment steps, of two methods."""
    curves = {}
    for name in ("sarsa", "q_learning"):
        config = resolve_config("cliff_walking", name, {"anneal_steps": None})
        _, metrics = train(config, learners, bins)()
        summed = np.asarray(metrics["return"] * metrics["episodes"])
        curve = np.nansum(summed, 0) / np.asarray(metrics["episodes"]).sum(0)
        curves[name] = {"steps": np.asarray(metrics["steps"])[0].tolist(), "return": curve.tolist()}
    return curves


def gymnasium_loop(config: Config, steps: int) -> Callable[[], np.ndarray]:
    """Q-learning as in a tutorial: a NumPy table, Gymnasium's environment, a loop in Python."""
    import gymnasium

    env, algorithm = gymnasium.make("FrozenLake-v1"), values.q_learning(**config.settings)
    gamma, alpha = config.settings["gamma"], config.settings["learning_rate"]
    epsilons = np.asarray(algorithm.epsilon(jnp.arange(steps)))
    rates = alpha * np.maximum(1 - np.arange(steps) / config.settings["anneal_steps"], 0)

    def run() -> np.ndarray:
        rng, table = np.random.default_rng(0), np.zeros((16, 4))
        state, _ = env.reset(seed=0)
        for t in range(steps):
            action = int(rng.integers(4)) if rng.random() < epsilons[t] else int(table[state].argmax())
            after, reward, terminated, truncated, _ = env.step(action)
            target = reward + gamma * (0.0 if terminated else table[after].max())
            table[state, action] += rates[t] * (target - table[state, action])
            state = env.reset()[0] if terminated or truncated else after
        return table

    return run


def speed(rounds: int) -> dict[str, Any]:
    """Environment steps per second, both sides in turns; the first round is thrown away."""
    config = resolve_config("frozen_lake", "q_learning")
    programs = {
        "jaxpg, 1,000 learners": (
            train(config, SPEED_LEARNERS, SPEED_STEPS // config.settings["num_steps"]),
            SPEED_LEARNERS * SPEED_STEPS,
        ),
        "jaxpg, 1 learner": (train(config, 1, 500), 500 * config.settings["num_steps"]),
        "gymnasium loop": (gymnasium_loop(config, LOOP_STEPS), LOOP_STEPS),
    }
    rates: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds + 1):
        for name, (program, steps) in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program())
            rates[name].append(steps / (time.perf_counter() - began))
    rates = {name: x[1:] for name, x in rates.items()}
    loop = rates["gymnasium loop"]
    ratios = {name: median(a / b for a, b in zip(x, loop, strict=True)) for name, x in rates.items()}
    return {"steps_per_second": rates, "ratio_to_gymnasium_loop": ratios}


def draw(rows: list[dict[str, Any]], curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    """The greedy policies of all learners beside the optimum, and the cliff."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 7), layout="constrained")
        panels = figure.subplots(2, 3).ravel()
        for axes, task in zip(panels, TASKS, strict=False):
            of_task = {row["algorithm"]: row for row in rows if row["task"] == task}
            for i, name in enumerate(TASKS[task]):
                found = np.asarray(of_task[name]["greedy"]["all"])
                spread = np.linspace(-0.28, 0.28, len(found))
                axes.scatter(i + spread, found, s=7, color=color_of(name), alpha=0.6, linewidths=0)
                axes.hlines(found.mean(), i - 0.36, i + 0.36, color=color_of(name), linewidth=2)
            axes.axhline(of_task["sarsa"]["optimum"], color="#57606a", linewidth=1, linestyle="--")
            axes.set_xticks(range(len(of_task)), [name.replace("_", "\n") for name in of_task], fontsize=8)
            all_found = np.concatenate([row["greedy"]["all"] for row in of_task.values()])
            outside = int((all_found < LOWEST[task]).sum()) if task in LOWEST else 0
            if outside:  # a few greedy policies walk in circles
                axes.set_ylim(bottom=LOWEST[task])
            axes.set(
                title=f"{task}, {outside} below {LOWEST[task]}" if outside else task,
                ylabel=f"{MEASURE.get(task, 'return')} of the greedy policy",
            )
        axes = panels[-1]
        for name, curve in curves.items():
            axes.plot(curve["steps"], curve["return"], color=color_of(name), label=name)
        axes.set(title="cliff, while learning (ε = 0.1, α = 0.5)", xlabel="environment steps", ylim=(-150, 0))
        axes.set_ylabel("return of the policy that acts")
        axes.legend(frameon=False, loc="lower right")
        for axes in panels:
            axes.grid(visible=True, axis="y")
        figure.suptitle(
            f"Greedy policies of {rows[0]['learners']} learners, evaluated exactly; dashed: the best policy"
        )
    save(figure, path)


def main() -> None:
    """Measure, write what there is so far, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    out, rows = RESULTS / "tabular.json", []
    about = {"command": shlex.join(["python", *sys.argv]), "machine": describe_machine()}
    measured = speed(arguments.rounds)
    write(out, {**about, "speed": measured})
    curves = cliff(arguments.learners)
    table = Table("task", "algorithm", "steps", "best", "greedy, mean", "worst", "while learning")
    for row in learn(arguments.learners):
        rows.append(row)
        write(out, {**about, "speed": measured, "cliff": curves, "learning": rows})
        greedy = row["greedy"]
        numbers = (row["optimum"], greedy["mean"], greedy["worst"], row["while learning"])
        table.add_row(row["task"], row["algorithm"], f"{row['steps']:,}", *(f"{x:.3f}" for x in numbers))
        print(row["task"], row["algorithm"], f"{row['seconds']:.0f} s", flush=True)
    draw(rows, curves, RESULTS / "tabular.png")
    Console().print(table)
    for name, ratio in measured["ratio_to_gymnasium_loop"].items():
        print(f"{name}: {median(measured['steps_per_second'][name]):,.0f} steps/s, {ratio:.1f}")


if __name__ == "__main__":
    main()
