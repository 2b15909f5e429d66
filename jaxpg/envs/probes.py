"""Five environments, each of which needs one more thing than the one before; the first failure shows what is broken.

| name | actions | episode | observation | reward | what it needs |
|---|---|---|---|---|---|
| `probe-value` | 1 | 1 step | 0 | 1 | a value: V = 1 |
| `probe-observation` | 1 | 1 step | ±1 at random | the observation | a value of the observation: V(x) = x |
| `probe-discount` | 1 | 2 steps | the time | 1 at the end | discounting: V(0) = gamma, V(1) = 1 |
| `probe-action` | 2 | 1 step | 0 | 1 for action 1, else -1 | advantages and a policy: always 1 |
| `probe-policy` | 2 | 1 step | ±1 at random | 1 for action 1 at +1 and 0 at -1, else -1 | a policy of the observation |

Source: Andy Jones, "Debugging Reinforcement Learning Systems" (2021), section "Use probe environments".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.types import Array, Box, Discrete, Env, Key, TimeStep


class ProbeState(NamedTuple):
    """State of a probe.

    sign: [] float, drawn from {-1, 1} once per episode.
    time: [] int.
    """

    sign: Array
    time: Array


def value() -> Env:
    """The reward is always 1."""
    return _probe("probe-value", 1, lambda sign, time: 0.0, lambda sign, time, action: 1.0)


def observation() -> Env:
    """The reward is the observation."""
    return _probe("probe-observation", 1, lambda sign, time: sign, lambda sign, time, action: sign)


def discount() -> Env:
    """The reward comes one step late."""
    return _probe("probe-discount", 1, lambda sign, time: time, lambda sign, time, action: time == 1, steps=2)


def action() -> Env:
    """The reward is decided by the action."""
    return _probe("probe-action", 2, lambda sign, time: 0.0, lambda sign, time, action: 2 * action - 1)


def policy() -> Env:
    """The reward is decided by whether the action fits the observation."""
    return _probe("probe-policy", 2, lambda sign, time: sign, lambda sign, time, action: (2 * action - 1) * sign)


def _probe(
    name: str,
    actions: int,
    observe: Callable[[Array, Array], Array | float],
    reward: Callable[[Array, Array, Array], Array | float],
    steps: int = 1,
) -> Env:
    """An environment that terminates after `steps` steps; `time` is the one before the step."""

    def obs(state: ProbeState) -> Array:
        return jnp.asarray(observe(*state), jnp.float32).reshape(1)

    def reset(key: Key) -> tuple[ProbeState, Array]:
        state = ProbeState(jax.random.rademacher(key, (), jnp.float32), jnp.zeros((), jnp.int32))
        return state, obs(state)

    def step(key: Key, state: ProbeState, action: Array) -> tuple[ProbeState, TimeStep]:
        del key
        after = state._replace(time=state.time + 1)
        terminated = after.time >= steps
        gain = jnp.asarray(reward(state.sign, state.time, action), jnp.float32)
        return after, TimeStep(obs(after), gain, 1.0 - terminated.astype(jnp.float32), terminated)

    space = Box(np.full(1, -1.0, np.float32), np.full(1, float(steps), np.float32))
    return Env(name, reset, step, space, Discrete(actions), steps)
