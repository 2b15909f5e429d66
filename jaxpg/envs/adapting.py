"""What the adapters of other libraries' environments share: `as_env` makes an Env of two of their functions.

An adapter states the four things in which libraries differ: how an episode begins, what a step is, when the task
itself is over, and which actions are legal. The rest is done here, once: observations become one float32 array, states
get one type, actions stay inside of their bounds, and the time limit is ours, so that it is never a termination.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.envs.wrappers import time_limit
from jaxpg.errors import UserError
from jaxpg.types import Array, Box, Discrete, Env, Key, Space, TimeStep, Tree
from jaxpg.user_input.domains import INT32_MAX

Reset = Callable[[Array], tuple[Tree, Tree]]
"""A raw key -> state, obs."""
Step = Callable[[Array, Tree, Array], tuple[Tree, Tree, Array, Array]]
"""A raw key, state, action -> state, the true successor's obs, reward, whether the task itself is over."""


def as_env(
    name: str,
    reset: Reset,
    step: Step,
    action_space: Space,
    limit: int,
    legal: Callable[[Tree], Array] | None = None,
    render: Callable[[Any], np.ndarray] | None = None,
    episode_metrics: Callable[[Tree], Mapping[str, Array]] | None = None,
) -> Env:
    """An Env of a library's functions, which know no jaxpg and do not reset by themselves.

    Keys reach the library as raw numbers (`jax.random.key_data`), which all of them accept and which a state may keep.
    An observation of one array keeps its shape. Several arrays, and all observations with a mask of legal actions, are
    flattened and joined in the order of `jax.tree.leaves`; the mask is at the end, as zeros and ones.

    Args:
        name: of the environment.
        reset, step: see Reset and Step.
        action_space: its actions.
        limit: steps after which an episode is cut off by a time-out, at the latest.
        legal: state -> [n] bool, the actions that are allowed there, None where all always are.
        render, episode_metrics: as those of `Env`, of the library's state.

    Raises:
        UserError: the limit is no number of steps.
    """
    if limit < 1:
        raise UserError(f"{name}: the time limit of an episode must be at least 1 step, not {limit}.")
    raw_key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    action = jax.ShapeDtypeStruct(action_space.shape, jnp.int32 if isinstance(action_space, Discrete) else jnp.float32)
    with jax.numpy_rank_promotion("allow"):  # a caller may have forbidden what these libraries do
        state, obs = jax.eval_shape(reset, raw_key)
        cast = state_cast(state, jax.eval_shape(step, raw_key, state, action)[0])

    def encode(state: Tree, obs: Tree) -> Array:
        return _join([*jax.tree.leaves(obs), legal(state)] if legal else jax.tree.leaves(obs))

    def reset_env(key: Key) -> tuple[Tree, Array]:
        with jax.numpy_rank_promotion("allow"):
            state, obs = reset(jax.random.key_data(key))
            return cast(state), encode(state, obs)

    def step_env(key: Key, state: Tree, action: Array) -> tuple[Tree, TimeStep]:
        with jax.numpy_rank_promotion("allow"):
            state, obs, reward, terminated = step(jax.random.key_data(key), state, action)
            obs = encode(state, obs)
        terminated = jnp.asarray(terminated, bool).reshape(())
        reward = jnp.asarray(reward, jnp.float32).reshape(())
        return cast(state), TimeStep(obs, reward, 1.0 - terminated.astype(jnp.float32), terminated)

    leaves = [*jax.tree.leaves(obs), *([jax.eval_shape(legal, state)] if legal else [])]
    env = Env(
        name, reset_env, step_env, _joined_space(leaves), action_space, INT32_MAX,
        min_truncation_step=INT32_MAX, action_mask=_last_entries(leaves[-1].shape[0]) if legal else None,
        render=render, episode_metrics=episode_metrics,
    )  # fmt: skip
    return time_limit(env, steps=limit)


def as_physics_env(name: str, env: Any, limit: int, render: Callable[[Any], np.ndarray] | None = None) -> Env:
    """An Env of an environment of Brax's or Playground's, whose state holds its obs, reward and whether it is done.

    Args:
        name: of the environment.
        env: the library's, without wrappers, so that `done` is a termination; its actions are from -1 to 1.
        limit: steps after which an episode is cut off by a time-out.
        render: as `Env.render`, of the library's state.
    """

    def reset(key: Array) -> tuple[Tree, Tree]:
        state = env.reset(key)
        return state, state.obs

    def step(key: Array, state: Tree, action: Array) -> tuple[Tree, Tree, Array, Array]:
        state = env.step(state, action)
        return state, state.obs, state.reward, state.done

    ones = np.ones(env.action_size, np.float32)
    return as_env(name, reset, step, Box(-ones, ones), limit, render=render)


def state_cast(after_reset: Tree, after_step: Tree) -> Callable[[Tree], Tree]:
    """A function that gives states the same dtypes after a reset as after a step, which a scan's carry requires."""
    dtypes = jax.tree.map(lambda x, y: jnp.promote_types(x.dtype, y.dtype), after_reset, after_step)
    return lambda state: jax.tree.map(jax.lax.convert_element_type, state, dtypes)


def _join(leaves: list[Array]) -> Array:
    """One leaf as float32, at least a vector; several as one vector."""
    if len(leaves) == 1:
        return jnp.atleast_1d(jnp.asarray(leaves[0], jnp.float32))
    return jnp.concatenate([jnp.asarray(x, jnp.float32).reshape(-1) for x in leaves])


def _joined_space(leaves: list[jax.ShapeDtypeStruct]) -> Box:
    """The space of `_join`: booleans are from 0 to 1, bytes from 0 to 255, all else is unbounded."""
    ends = {"bool": (0.0, 1.0), "uint8": (0.0, 255.0)}
    bounds = [ends.get(jnp.dtype(x.dtype).name, (-np.inf, np.inf)) for x in leaves]
    if len(leaves) == 1:
        low, high = (np.full(leaves[0].shape or (1,), bound, np.float32) for bound in bounds[0])
        return Box(low, high)
    sizes = [math.prod(x.shape) for x in leaves]
    low, high = (np.repeat(np.array(x, np.float32), sizes) for x in zip(*bounds, strict=True))
    return Box(low, high)


def _last_entries(number: int) -> Callable[[Array], Array]:
    return lambda obs: obs[..., -number:] > 0.5
