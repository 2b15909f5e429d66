"""Gymnasium's classics as jaxpg computes them, beside Gymnasium's own: same state, same action, step by step."""

from __future__ import annotations

from typing import NamedTuple

import gymnasium
import jax
import numpy as np
import pytest

from jaxpg import envs
from jaxpg.types import Box

STATES = 800


class Classic(NamedTuple):
    """An environment: the fields of its state in Gymnasium's order, between which bounds states are drawn, and half the
    width of the interval of the initial ones.
    """

    fields: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    starts: tuple[float, ...]


CLASSICS = {
    "CartPole-v1": Classic(
        ("x", "x_dot", "theta", "theta_dot"), (-2.399, -3, -0.209, -3), (2.399, 3, 0.209, 3), (0.05,) * 4
    ),
    "Acrobot-v1": Classic(
        ("joint_angle1", "joint_angle2", "velocity_1", "velocity_2"),
        (-np.pi, -np.pi, -12.5, -28.2), (np.pi, np.pi, 12.5, 28.2), (0.1,) * 4,
    ),
    "Pendulum-v1": Classic(("theta", "theta_dot"), (-4, -8), (4, 8), (np.pi, 1)),
    "MountainCar-v0": Classic(("position", "velocity"), (-1.2, -0.07), (0.499, 0.07), (0.1, 0)),
    # An episode ends beyond 0.45, which a car that moves to the left there has passed.
    "MountainCarContinuous-v0": Classic(("position", "velocity"), (-1.2, -0.07), (0.449, 0.07), (0.1, 0)),
}  # fmt: skip


def states_of(classic: Classic, rng: np.random.Generator) -> np.ndarray:
    """States all over the space, one in four at its left edge, where cars meet a wall."""
    states = rng.uniform(classic.low, classic.high, (STATES, len(classic.fields)))
    states[::4, 0] = np.float32(classic.low[0]) + 1e-3
    return states.astype(np.float32)


@pytest.mark.parametrize("name", CLASSICS)
def test_a_step_is_gymnasiums(name: str) -> None:
    """Observation, reward and termination from the same state with the same action."""
    classic, rng = CLASSICS[name], np.random.default_rng(0)
    env, theirs = envs.make(name), gymnasium.make(name).unwrapped
    state, _ = env.reset(jax.random.key(0))
    states = states_of(classic, rng)
    if isinstance(env.action_space, Box):
        actions = rng.uniform(-3, 3, (STATES, 1)).astype(np.float32)  # also beyond the bounds, which both clip
    else:
        actions = rng.integers(0, env.action_space.n, STATES).astype(np.int32)
    batch = jax.tree.map(lambda x: np.broadcast_to(x, (STATES, *np.shape(x))), state)
    batch = batch.replace(**{field: states[:, i] for i, field in enumerate(classic.fields)})
    _, ours = jax.jit(jax.vmap(env.step, in_axes=(None, 0, 0)))(jax.random.key(0), batch, actions)
    rows = []
    theirs.reset(seed=0)
    for start, action in zip(states, actions, strict=True):
        theirs.state = start.astype(np.float64)
        theirs.steps_beyond_terminated = None  # of CartPole
        rows.append(theirs.step(action)[:4])
    obs, reward, terminated, truncated = (np.array(x) for x in zip(*rows, strict=True))
    np.testing.assert_allclose(ours.obs, obs, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(ours.reward, reward, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(ours.discount, 1.0 - terminated)
    np.testing.assert_array_equal(ours.last, terminated)
    assert not truncated.any()
    assert terminated.sum() > 5 or name == "Pendulum-v1"


@pytest.mark.parametrize("name", CLASSICS)
def test_starts_and_bounds_are_gymnasiums(name: str) -> None:
    """The initial states are uniform within the same bounds, and so are observations and actions."""
    classic, env, theirs = CLASSICS[name], envs.make(name), gymnasium.make(name)
    states, _ = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 1000))
    for field, half_width in zip(classic.fields, classic.starts, strict=True):
        middle = -0.5 if field == "position" else 0.0
        drawn = np.asarray(getattr(states, field)) - middle
        assert np.abs(drawn).max() <= half_width + 1e-6
        np.testing.assert_allclose(drawn.std(), half_width / np.sqrt(3), rtol=0.08)
    starts = np.stack([np.array((theirs.reset(seed=i), theirs.unwrapped.state)[1]) for i in range(200)])
    middle = np.array([-0.5 if field == "position" else 0.0 for field in classic.fields])
    np.testing.assert_allclose((starts - middle).std(0), np.array(classic.starts) / np.sqrt(3), rtol=0.15)
    for ours, bounds in ((env.observation_space, theirs.observation_space), (env.action_space, theirs.action_space)):
        if isinstance(ours, Box):
            np.testing.assert_allclose(ours.low, bounds.low, rtol=1e-6)
            np.testing.assert_allclose(ours.high, bounds.high, rtol=1e-6)
        else:
            assert ours.n == bounds.n


LIMITS = {
    **{name: (name, {}) for name in CLASSICS},
    "FrozenLake-v1": ("frozen_lake", {}),
    "FrozenLake8x8-v1": ("frozen_lake", {"size": 8, "time_limit": 200}),
    "Taxi-v4": ("taxi", {}),
}


@pytest.mark.parametrize("name", LIMITS)
def test_time_limits_are_gymnasiums(name: str) -> None:
    """The step that reaches the limit is a time-out, with a discount of 1, and the one before is not."""
    ours, settings = LIMITS[name]
    env, limit = envs.make(ours, **settings), gymnasium.spec(name).max_episode_steps
    assert env.time_limit == limit
    state, _ = env.reset(jax.random.key(0))
    action = np.zeros(env.action_space.shape, np.float32 if isinstance(env.action_space, Box) else np.int32)
    for time, last in ((limit - 2, False), (limit - 1, True)):
        moved = state.replace(time=time) if hasattr(state, "replace") else state._replace(time=time)
        _, timestep = env.step(jax.random.key(1), moved, action)
        assert bool(timestep.last) == last
        assert timestep.discount == 1


def test_cliff_walking_has_a_limit_that_gymnasiums_has_not() -> None:
    assert gymnasium.spec("CliffWalking-v1").max_episode_steps is None
    assert envs.make("cliff_walking").time_limit == 200
    assert "200" in envs.NOTES["cliff_walking"]
