"""A learner small enough to follow by hand: noisy descent on a quadratic.

Run as a program it trains itself, to be killed and started again: `python toy_learner.py RUN_DIR`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.training.advance import RunState
from jaxpg.training.loop import train
from jaxpg.types import Actor, Learner, Metrics

TOTAL = 60
Change = Callable[[Any, dict[str, jax.Array]], tuple[Any, dict[str, jax.Array]]]


class ToyState(NamedTuple):
    params: dict[str, jax.Array]
    count: jax.Array
    steps: jax.Array
    runner: jax.Array


def toy(
    *, lucky_length: bool = False, size: int = 3, change: Change = lambda state, metrics: (state, metrics)
) -> Learner:
    """A Learner whose iterations take 2 steps, or 1 to 5 by chance; `change` may spoil what an iteration returns."""

    def init(key: jax.Array) -> ToyState:
        params = {"w": jax.random.normal(key, (size,)), "b": jnp.ones(())}
        return ToyState(params, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.full((4,), jnp.inf))

    def step(state: ToyState, key: jax.Array) -> tuple[ToyState, dict[str, jax.Array]]:
        noise_key, length_key, ended_key = jax.random.split(key, 3)
        gradient = state.params["w"] + 0.1 * jax.random.normal(noise_key, (size,))
        params = {**state.params, "w": state.params["w"] - 0.1 * gradient, "b": state.params["b"] * 0.999}
        steps = state.steps + (jax.random.randint(length_key, (), 1, 6) if lucky_length else 2)
        episodes = jax.random.randint(ended_key, (), 0, 3).astype(jnp.float32)
        score = jnp.where(episodes > 0, -(params["w"] ** 2).sum(), jnp.nan)
        metrics = {
            "loss": (params["w"] ** 2).sum(),
            "return": score,
            "length": jnp.where(episodes > 0, 7.0, jnp.nan),
            "episodes": episodes,
            "steps": steps.astype(jnp.float32),
        }
        return change(ToyState(params, state.count + 1, steps, state.runner), metrics)

    def actor(state: ToyState) -> Actor:
        return Actor(start=lambda obs: state, act=lambda memory, obs, key, greedy: (memory.count, memory))

    return Learner(init, step, actor, with_policy=lambda state, policy: state)


def peak_at_ten(state: Any, key: jax.Array) -> Metrics:
    """Best after ten iterations, for a learner that has got there."""
    return {"return": -jnp.abs(state.count - 10.0), "length": jnp.asarray(7.0)}


def run(run_dir: Path, *, learner: Learner | None = None, **changes: Any) -> RunState:
    """Train three seeds of a toy; by default a row every 4 steps and a checkpoint after each."""
    settings: dict[str, Any] = {
        "seeds": [0, 1, 2],
        "total_steps": TOTAL,
        "log_every": 4,
        "checkpoint_seconds": 0.0,
        **changes,
    }
    return train(learner or toy(lucky_length=True), run_dir=run_dir, **settings)


if __name__ == "__main__":
    run(Path(sys.argv[1]), resume=True, evaluate=peak_at_ten)
