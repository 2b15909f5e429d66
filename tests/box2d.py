"""Gymnasium's LunarLander-v3, and policies that fly it and ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.types import Array, Env, Key

with warnings.catch_warnings():  # an error at the import of its extension module would be a segmentation fault
    warnings.simplefilter("ignore", DeprecationWarning)
    import Box2D  # noqa: F401

Pilot = Callable[[Any, Any, Any], Any]
"""(numpy or jax.numpy, observation [8], two uniform numbers in [0, 1)) -> action."""


class Episodes(NamedTuple):
    """What whole episodes came to, [N] each.

    returns: sums of rewards.
    lengths: steps.
    landed: whether the craft came to rest.
    contacts: share of the steps in which the first leg touched the ground.
    """

    returns: np.ndarray
    lengths: np.ndarray
    landed: np.ndarray
    contacts: np.ndarray


def random_pilot(xp: Any, obs: Any, noise: Any) -> Any:
    return xp.floor(4 * noise[0]).astype(xp.int32)


def thrust_pilot(xp: Any, obs: Any, noise: Any) -> Any:
    """The main engine in half of the steps."""
    return xp.where(noise[0] < 0.5, 2, 0)


def landing_pilot(xp: Any, obs: Any, noise: Any) -> Any:
    """Leans towards the pad and brakes; in a twentieth of the steps it does anything."""
    x, y, vx, vy, angle, spin, left, right = obs
    lean = xp.clip(0.5 * x + vx, -0.4, 0.4)
    turn, climb = 0.5 * (lean - angle) - spin, 0.5 * (0.55 * abs(x) - y) - 0.5 * vy
    stands = (left + right) > 0
    turn, climb = xp.where(stands, 0.0, turn), xp.where(stands, -0.5 * vy, climb)
    brake = (climb > abs(turn)) & (climb > 0.05)
    action = xp.where(brake, 2, xp.where(turn < -0.05, 3, xp.where(turn > 0.05, 1, 0)))
    return xp.where(noise[0] < 0.05, xp.floor(4 * noise[1]), action).astype(xp.int32)


def continuous(pilot: Pilot) -> Pilot:
    """The same pilot with engines of varying strength."""

    def flown(xp: Any, obs: Any, noise: Any) -> Any:
        action, strength = pilot(xp, obs, noise), noise[1]
        main = xp.where(action == 2, strength, -1.0)
        side = xp.where(action == 1, -1.0, xp.where(action == 3, 1.0, 0.0)) * (0.5 + 0.5 * strength)
        return xp.stack([main, side]).astype(xp.float32)

    return flown


def fly_gymnasium(env: gymnasium.Env, pilot: Pilot, episodes: int, seed: int = 0) -> Episodes:
    """So many episodes of Gymnasium's environment."""
    rng = np.random.default_rng(seed)
    rows = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        total, steps, contacts, done, landed = 0.0, 0, 0.0, False, False
        while not done:
            action = pilot(np, obs, rng.random(2))
            obs, reward, landed, truncated, _ = env.step(action if np.ndim(action) else int(action))
            total, steps, contacts = total + float(reward), steps + 1, contacts + float(obs[6])
            done = landed or truncated
        rows.append((total, steps, bool(landed) and not env.unwrapped.lander.awake, contacts / steps))
    return Episodes(*(np.array(column) for column in zip(*rows, strict=True)))


OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""Tests are compiled as fast as can be; what runs for a million passes is compiled to run fast."""


def fly(env: Env, pilots: Sequence[Pilot], episodes: int, seed: int = 0) -> list[Episodes]:
    """So many episodes of each pilot in ours, all side by side; a column that is over stands still."""

    def one_step(carry: Any, _: Any) -> Any:
        key, pilot, state, obs, total, steps, contacts, over, _ = carry
        key, key_noise, key_step = jax.random.split(key, 3)
        noise = jax.random.uniform(key_noise, (2,))
        action = jax.lax.switch(pilot, [lambda p=p: p(jnp, obs, noise) for p in pilots])
        moved, step = env.step(key_step, state, action)
        landed = (step.discount == 0) & (step.reward == 100)
        totals = (total + step.reward, steps + 1, contacts + step.obs[6])
        new = (key, pilot, moved, step.obs, *totals, step.last, landed)
        return jax.tree.map(lambda old, x: jnp.where(over, old, x), carry, new), None

    def one_episode(key: Key, pilot: Array) -> tuple[Array, ...]:
        key_start, key = jax.random.split(key)
        zero, no = jnp.zeros(()), jnp.asarray(False)
        start = (key, pilot, *env.reset(key_start), zero, jnp.zeros((), jnp.int32), zero, no, no)
        (*_, total, steps, contacts, _, landed), _ = jax.lax.scan(one_step, start, length=env.time_limit)
        return total, steps, landed, contacts / steps

    keys = jax.random.split(jax.random.key(seed), len(pilots) * episodes)
    which = jnp.repeat(jnp.arange(len(pilots)), episodes)
    columns = jax.jit(jax.vmap(one_episode), compiler_options=OPTIMIZED)(keys, which)
    flown = Episodes(*map(np.asarray, columns))
    return [Episodes(*(x[i * episodes : (i + 1) * episodes] for x in flown)) for i in range(len(pilots))]
