"""Planning and prediction: how fast a sweep is beside NumPy, and the textbook's picture of TD's errors.

    python benchmarks/planning.py [speed] [walk] [--rounds 7]

Writes results/planning.json and, of the walk, results/prediction.png. Both sides of a ratio do the same sweeps; they
take turns within one process, and compiling is not timed. NumPy has the vectorised sweep that an expert writes, and the
loop over states and actions that a textbook has.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from result_files import read, write
from rich.console import Console
from rich.table import Table

from jaxpg import envs, values
from jaxpg.report.drawing import STYLE, save
from jaxpg.report.palette import COLORS
from jaxpg.training.provenance import describe_machine

RESULTS = Path(__file__).parent / "results"
BATCH = 50
"""Runs whose episodes are held in memory at once."""
LIMITS = (0.16, 0.55)  # of the errors that are drawn
STEP_SIZES = np.linspace(0.0, 1.0, 21)[1:]


def numpy_sweeps(mdp: envs.MDP, gamma: float, sweeps: int) -> Callable[[], np.ndarray]:
    """Value iteration as an expert writes it in NumPy: expected rewards once, then one product per sweep."""
    P, r = np.asarray(mdp.P) * ~np.asarray(mdp.terminal), np.asarray((mdp.P * mdp.R).sum(-1))

    def run() -> np.ndarray:
        v = np.zeros(len(r), r.dtype)
        for _ in range(sweeps):
            v = (r + gamma * (P @ v)).max(-1)
        return v

    return run


def python_sweeps(mdp: envs.MDP, gamma: float, sweeps: int) -> Callable[[], np.ndarray]:
    """Value iteration as in a textbook: a loop over states and actions, a sum over successors."""
    P, R = np.asarray(mdp.P) * ~np.asarray(mdp.terminal), np.asarray(mdp.R)

    def run() -> np.ndarray:
        v = np.zeros(len(P), P.dtype)
        for _ in range(sweeps):
            new = [max((P[s, a] * (R[s, a] + gamma * v)).sum() for a in range(P.shape[1])) for s in range(len(P))]
            v = np.array(new, P.dtype)
        return v

    return run


def timed(program: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result of a call, its wall seconds, and the CPU seconds of the process with all of its threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(program())
    return result, {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def in_turns(programs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """What every program takes in every round; the first round is thrown away."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for _ in range(rounds + 1):
        for name, program in programs.items():
            taken[name].append(timed(program)[1])
    return {name: {kind: [x[kind] for x in times[1:]] for kind in ("wall", "cpu")} for name, times in taken.items()}


def dense(rounds: int) -> dict[str, Any]:
    """1,000 states, 4 actions, every state within reach of every other: the same number of sweeps for all."""
    mdp = envs.random_mdp(jax.random.key(0), 1_000, 4)
    plan = jax.block_until_ready(values.value_iteration(mdp, 0.99))
    sweeps = int(plan.sweeps)
    seconds = in_turns(
        {
            "jaxpg": lambda: values.value_iteration(mdp, 0.99).values,
            "numpy": numpy_sweeps(mdp, 0.99, sweeps),
            "python loop": python_sweeps(mdp, 0.99, sweeps // 10),
        },
        rounds,
    )
    seconds["python loop"] = {kind: [10 * x for x in times] for kind, times in seconds["python loop"].items()}
    ratios = {
        name: {k: median(o / j for o, j in zip(taken[k], seconds["jaxpg"][k], strict=True)) for k in ("wall", "cpu")}
        for name, taken in seconds.items()
    }
    return {
        "states": 1_000,
        "actions": 4,
        "gamma": 0.99,
        "sweeps": sweeps,
        "seconds": seconds,
        "ratio_to_jaxpg": ratios,
    }


def sparse(rounds: int) -> list[dict[str, Any]]:
    """A grid of a million cells; how many sweeps and seconds each method takes."""
    mdp = envs.sparse_grid_world(1_000, 1_000)
    rows = []
    for gamma in (0.9, 0.99):
        for name, method in (
            ("value iteration", values.value_iteration),
            ("modified policy iteration, 20 sweeps", partial(values.policy_iteration, max_sweeps=20)),
        ):
            jax.block_until_ready(method(mdp, 0.0))  # compiles; without a future one sweep is enough
            runs = [timed(partial(method, mdp, gamma)) for _ in range(rounds)]
            seconds = {kind: [x[kind] for _, x in runs] for kind in ("wall", "cpu")}
            row = {"method": name, "gamma": gamma, "sweeps": int(runs[0][0].sweeps), "seconds": seconds}
            rows.append(row | {"states": 1_000_000})
            taken = {kind: median(x) for kind, x in seconds.items()}
            print(name, gamma, row["sweeps"], "{wall:.2f} s, {cpu:.2f} CPU s".format(**taken), flush=True)
    return rows


def walk_errors(runs: int = 1_000) -> dict[str, dict[str, list[float]]]:
    """Root mean squared error on the 19-state walk over its first 10 episodes, by step size (figures 7.2 and 12.3)."""
    mdp = envs.random_walk(19)
    policy = jnp.ones((21, 1))
    exact, start = envs.state_values(mdp, policy, 1.0), jnp.zeros(21)
    live = ~mdp.terminal

    play = partial(values.sample_episodes, mdp, policy, num_episodes=10, time_limit=1_000)
    episodes = jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(0), runs))

    @partial(jax.jit, static_argnums=0)
    def error(method: Callable[..., jax.Array], alpha: jax.Array) -> jax.Array:
        def run(played: Any) -> jax.Array:
            learned = method(played, start, 1.0, step_size=alpha)
            squares = jnp.where(live[None, :], (learned - exact[None, :]) ** 2, 0.0).sum(-1) / live.sum()
            return jnp.sqrt(squares).mean()

        return jax.vmap(run)(episodes).mean()

    methods = {f"n = {n}": partial(values.n_step_td, n=n) for n in (1, 2, 4, 8, 16, 64)}
    methods |= {f"λ = {x}": partial(values.td_lambda, lambda_=x) for x in (0.0, 0.4, 0.8, 0.9, 0.95, 1.0)}
    return {
        name: {"step_size": STEP_SIZES.tolist(), "rmse": [float(error(method, a)) for a in STEP_SIZES]}
        for name, method in methods.items()
    }


def walk_curves(runs: int = 1_000) -> dict[str, values.PredictionError]:
    """Bias, standard deviation and error of Monte Carlo and TD by the number of episodes, on the 19-state walk."""
    mdp = envs.random_walk(19)
    policy = jnp.ones((21, 1))
    exact, start = envs.state_values(mdp, policy, 1.0), jnp.zeros(21)

    def run(key: jax.Array) -> tuple[jax.Array, ...]:
        played = values.sample_episodes(mdp, policy, key, num_episodes=100, time_limit=1_000)
        td = partial(values.td_lambda, played, start, 1.0)
        return (
            values.monte_carlo(played, start, 1.0),
            values.monte_carlo(played, start, 1.0, first_visit=False),
            td(step_size=0.1),
            td(step_size=0.1, lambda_=0.8),
        )

    learned = jax.jit(partial(jax.lax.map, run, batch_size=BATCH))(jax.random.split(jax.random.key(0), runs))
    names = ("MC, first visit", "MC, every visit", "TD(0), α = 0.1", "TD(0.8), α = 0.1")
    return {n: values.prediction_error(x, exact, ~mdp.terminal) for n, x in zip(names, learned, strict=True)}


def draw(errors: dict[str, dict[str, list[float]]], curves: dict[str, values.PredictionError], path: Path) -> None:
    """Errors by step size of n-step TD and TD(λ), and what they consist of by episode."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 7), layout="constrained")
        (by_n, by_lambda), (bias, sd) = figure.subplots(2, 2)
        for axes, prefix, title in ((by_n, "n", "n-step TD"), (by_lambda, "λ", "TD(λ)")):
            shown = ((n, c) for n, c in errors.items() if n.startswith(prefix) and min(c["rmse"]) < LIMITS[1])
            for i, (name, curve) in enumerate(shown):
                axes.plot(curve["step_size"], curve["rmse"], color=COLORS[i % len(COLORS)], label=name)
            axes.set(title=title, xlabel="step size α", ylabel="RMS error, first 10 episodes", ylim=LIMITS)
            axes.legend(frameon=False, ncols=3, fontsize=8, loc="lower center", columnspacing=1.2, handlelength=1.5)
        for axes, part, title in ((bias, "bias", "bias"), (sd, "sd", "standard deviation")):
            for i, (name, error) in enumerate(curves.items()):
                curve = np.asarray(getattr(error, part))
                axes.plot(np.arange(1, len(curve) + 1), curve, color=COLORS[i % len(COLORS)], label=name)
            axes.set(title=title, xlabel="episode", ylabel="root mean square over states", ylim=(0, None))
            axes.legend(frameon=False, fontsize=9)
        for axes in figure.axes:
            axes.grid(visible=True)
        figure.suptitle("Prediction on the random walk of 19 states, 1,000 runs")
    save(figure, path)


def speed(rounds: int) -> dict[str, Any]:
    """Sweeps of small and large worlds, timed; printed as a table."""
    small, large = dense(rounds), sparse(max(1, rounds // 2))
    table = Table("value iteration", "sweeps", "wall s", "CPU s", "× wall", "× CPU")
    for name, seconds in small["seconds"].items():
        taken = [f"{median(seconds[kind]):.3f}" for kind in ("wall", "cpu")]
        ratios = [f"{small['ratio_to_jaxpg'][name][kind]:.1f}" for kind in ("wall", "cpu")]
        table.add_row(f"1,000 states, {name}", str(small["sweeps"]), *taken, *ratios)
    for row in large:
        taken = [f"{median(row['seconds'][kind]):.2f}" for kind in ("wall", "cpu")]
        table.add_row(f"1,000,000 states, {row['method']}, gamma {row['gamma']}", str(row["sweeps"]), *taken, "", "")
    Console().print(table)
    return {"dense": small, "sparse": large}


def walk(rounds: int) -> dict[str, Any]:
    """The errors of prediction on the random walk, drawn."""
    errors, curves = walk_errors(), walk_curves()
    draw(errors, curves, RESULTS / "prediction.png")
    final = {name: {part: float(x[-1]) for part, x in error._asdict().items()} for name, error in curves.items()}
    return {"walk": errors, "after 100 episodes": final}


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {"speed": speed, "walk": walk}


def main() -> None:
    """Measure, write, draw; parts that are not asked for stay as they were."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=PARTS, help=f"{' and '.join(PARTS)}, the default")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    path = RESULTS / "planning.json"
    for name in arguments.parts or PARTS:
        about = {"command": shlex.join(["python", *sys.argv]), "machine": describe_machine()}
        found = PARTS[name](arguments.rounds)
        write(path, {**read(path), name: {**about, **found}})


if __name__ == "__main__":
    main()
