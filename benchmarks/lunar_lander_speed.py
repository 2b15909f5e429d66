"""LunarLander in JAX beside Gymnasium's: speed, and what fewer iterations of the solver change.

    python benchmarks/lunar_lander_speed.py [--rounds 5] [--num-envs 512]

Random actions; environments of ours that end begin anew from states that were made before, where Gymnasium's is reset:
its rate is counted with the resets and by steps alone. One core each: ours takes one device, and CPU seconds are
counted. The settings take turns with Gymnasium's environment. The error is
the largest difference of a body's position after 1, 10 and 50 steps from the same flight with Gymnasium's 180 and 60
iterations. Writes results/lunar_lander_speed.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from result_files import write
from rich.console import Console
from rich.table import Table

from jaxpg import envs
from jaxpg.training import advance
from jaxpg.training.provenance import describe_machine
from jaxpg.types import Env

RESULTS = Path(__file__).parent / "results"
ITERATIONS = ((180, 60), (60, 20), (30, 20), (10, 10))
STEPS, FLIGHT = 100, 50


def lander(iterations: tuple[int, int]) -> Env:
    """Ours, with so many passes of the solver over velocities and over poses."""
    velocity, position = iterations
    return envs.make("LunarLander-v3", velocity_iterations=velocity, position_iterations=position)


def program(env: Env, num_envs: int) -> tuple[Callable[[Any, jax.Array], Any], Any, float]:
    """`STEPS` steps of all environments as one compiled program, its first argument, and the seconds to compile it."""
    starts, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), num_envs))

    def one_step(states: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        key_action, key_step = jax.random.split(key)
        actions = jax.random.randint(key_action, (num_envs,), 0, 4)
        moved, timesteps = jax.vmap(env.step)(jax.random.split(key_step, num_envs), states, actions)

        def anew(start: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.where(timesteps.last.reshape(-1, *[1] * (x.ndim - 1)), start, x)

        return jax.tree.map(anew, starts, moved), timesteps.reward

    def steps(states: Any, key: jax.Array) -> Any:
        return jax.lax.scan(one_step, states, jax.random.split(key, STEPS))[0]

    began = time.perf_counter()
    compiled = jax.jit(steps).lower(starts, jax.random.key(0)).compile(advance.compiler_options())
    return compiled, starts, time.perf_counter() - began


def cpu_rate(run: Callable[[], int]) -> float:
    """Steps per CPU second."""
    began = time.process_time()
    return run() / (time.process_time() - began)


def gymnasium_rates(env: gymnasium.Env, actions: np.ndarray) -> tuple[float, float]:
    """Steps per CPU second of Gymnasium's environment, with the resets after flights that end, and by steps alone."""
    began, resetting = time.process_time(), 0.0
    for action in actions:
        *_, terminated, truncated, _ = env.step(int(action))
        if terminated or truncated:
            ended = time.process_time()
            env.reset()
            resetting += time.process_time() - ended
    seconds = time.process_time() - began
    return len(actions) / seconds, len(actions) / (seconds - resetting)


def fly_ours(run: Callable[[Any, jax.Array], Any], starts: Any, key: jax.Array, num_envs: int) -> int:
    """`STEPS` steps of all of ours; their number."""
    jax.block_until_ready(run(starts, key))
    return STEPS * num_envs


def flights(env: Env, num_flights: int = 64) -> np.ndarray:
    """The positions of the three bodies over flights with random actions, [FLIGHT, num_flights, 3, 2]."""

    def one_step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        key_action, key_step = jax.random.split(key)
        state, _ = env.step(key_step, state, jax.random.randint(key_action, (), 0, 4))
        return state, jnp.stack([jnp.stack([pose.centre.x, pose.centre.y]) for pose in state.craft.poses])

    def flight(key: jax.Array) -> jax.Array:
        key_start, key_steps = jax.random.split(key)
        return jax.lax.scan(one_step, env.reset(key_start)[0], jax.random.split(key_steps, FLIGHT))[1]

    return np.asarray(jax.jit(jax.vmap(flight, out_axes=1))(jax.random.split(jax.random.key(1), num_flights)))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-envs", type=int, default=512)
    arguments = parser.parse_args()
    theirs = gymnasium.make("LunarLander-v3")
    theirs.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 4, 5_000)
    programs = {iterations: program(lander(iterations), arguments.num_envs) for iterations in ITERATIONS}
    rates: dict[Any, list[float]] = {name: [] for name in ("gymnasium", "steps alone", *ITERATIONS)}
    for round_ in range(arguments.rounds):
        for name, rate in zip(("gymnasium", "steps alone"), gymnasium_rates(theirs, actions), strict=True):
            rates[name].append(rate)
        for iterations, (run, starts, _) in programs.items():
            fly = partial(fly_ours, run, starts, jax.random.key(round_), arguments.num_envs)
            rates[iterations].append(cpu_rate(fly))
    exact = flights(lander(ITERATIONS[0]))
    rows = []
    for iterations in ITERATIONS:
        ours = np.array(rates[iterations])
        error = np.abs(flights(lander(iterations)) - exact).max(axis=(1, 2, 3))
        rows.append(
            {
                "velocity_iterations": iterations[0],
                "position_iterations": iterations[1],
                "times_gymnasium": float(np.median(ours / np.array(rates["gymnasium"]))),
                "times_gymnasium_steps_alone": float(np.median(ours / np.array(rates["steps alone"]))),
                "compile_seconds": programs[iterations][2],
                **{f"error_after_{steps}": float(error[steps - 1]) for steps in (1, 10, FLIGHT)},
            }
        )
    table = Table(*rows[0], title=f"LunarLander-v3, {arguments.num_envs} environments")
    for row in rows:
        table.add_row(*(f"{value:.3g}" for value in row.values()))
    Console().print(table)
    found = {"machine": describe_machine(), "num_envs": arguments.num_envs, "rounds": arguments.rounds, "rows": rows}
    write(RESULTS / "lunar_lander_speed.json", found)


if __name__ == "__main__":
    main()
