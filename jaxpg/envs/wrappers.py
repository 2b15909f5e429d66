"""Functions from one environment to another.

A wrapper with a memory keeps it next to the state of the environment it wraps, in a `Wrapped`, and gives `context` and
`outcome` the state inside; `unwrap` returns the innermost state, which is what `render` draws. A wrapped environment
keeps its name. Moments of observations and rewards are not kept here: they are shared by all environments and devices,
and belong to the learner.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.errors import UserError
from jaxpg.types import Array, Box, Env, Key, Outcome, TimeStep, Tree
from jaxpg.user_input.domains import Domain, check_whole

MOST_FRAMES = 1000
"""Of a stack: a larger number is taken for a typing mistake."""


class Wrapped(NamedTuple):
    """The state of a wrapped environment.

    inner: the state of the environment inside.
    memory: the wrapper's own state.
    """

    inner: Tree
    memory: Array


def unwrap(state: Tree) -> Tree:
    """The innermost environment's state."""
    while isinstance(state, Wrapped):
        state = state.inner
    return state


def _begins(
    env: Env,
    begin: Callable[[Tree, Tree], tuple[Tree, Tree]],
    inner: Callable[[Tree], Tree] = lambda state: state.inner,
    executed: Callable[[Tree, Any], Any] = lambda states, actions: actions,
    **changes: Any,
) -> Env:
    """`env` with these changes, whose episodes begin with `begin(state, obs)` of those inside.

    So it is at a reset, and at the restart of an environment on the host. `inner` is the way back to the state inside,
    which `context`, `outcome` and `episode_metrics` of `env` are given, and its pictures on the host; they also need
    the `executed` actions of an episode with these states and actions.
    """

    def of_inner(function: Callable[[Tree], Any] | None) -> Callable[[Tree], Any] | None:
        return function and (lambda state: function(inner(state)))

    begun = env._replace(
        reset=lambda key: begin(*env.reset(key)),
        context=of_inner(env.context),
        outcome=of_inner(env.outcome),
        episode_metrics=of_inner(env.episode_metrics),
    )
    if env.host is None:
        return begun._replace(**changes)
    of_host = env.host

    def restart(key: Key, wanted: Array, state: Tree) -> tuple[Tree, Tree]:
        return begin(*of_host.restart(key, wanted, inner(state)))

    def frames(states: Tree, actions: np.ndarray) -> tuple[list[np.ndarray], list[float]]:
        assert of_host.frames
        return of_host.frames(inner(states), executed(states, actions))

    host = of_host._replace(restart=restart, frames=frames if of_host.frames else None)
    return begun._replace(host=host, **changes)


def sticky_actions(env: Env, *, probability: float = 0.25) -> Env:
    """With this probability the environment repeats the previously executed action instead of the agent's.

    Before the first step of an episode that is action 0, "do nothing" in MinAtar, and the point of a Box nearest to 0.
    MinAtar's own default is 0.1.
    Source: Machado et al., "Revisiting the Arcade Learning Environment" (2018), section 5.2.

    Args:
        env: the environment to wrap.
        probability: of repeating the previous action, in [0, 1].

    Raises:
        UserError: the probability is not in [0, 1], or actions are masked.
    """
    if not 0 <= probability <= 1:
        raise UserError(f"sticky_actions: probability must be in [0, 1], not {probability!r}.")
    if env.action_mask is not None:
        raise UserError(
            f"sticky_actions: {env.name} forbids actions (action_mask), and a repeated action may no longer be "
            "allowed: leave this wrapper out."
        )
    dtype = jnp.float32 if isinstance(env.action_space, Box) else jnp.int32
    first = env.action_space.nearest(jnp.zeros(env.action_space.shape, dtype)).astype(dtype)

    def begin(state: Tree, obs: Tree) -> tuple[Wrapped, Tree]:
        return Wrapped(state, first), obs

    def step(key: Key, state: Wrapped, action: Array) -> tuple[Wrapped, TimeStep]:
        repeat_key, step_key = jax.random.split(key)
        repeat = jax.random.bernoulli(repeat_key, probability)
        executed = jnp.where(repeat, state.memory, action).astype(dtype)
        inner, timestep = env.step(step_key, state.inner, executed)
        return Wrapped(inner, executed), timestep

    return _begins(env, begin, executed=lambda states, actions: states.memory[1:], step=step)


def time_limit(env: Env, *, steps: int) -> Env:
    """Ends an episode after this many steps at the latest, as a time-out: `last` is set, `discount` is unchanged.

    Args:
        env: the environment to wrap.
        steps: the maximal length of an episode, at least 1.

    Raises:
        UserError: fewer than one step, or an environment on the host.
    """
    steps = check_whole("time_limit: steps", steps)
    if env.host:
        raise UserError(f"time_limit: {env.name} lives on the host and keeps its own time; set max_episode_steps.")

    def begin(state: Tree, obs: Tree) -> tuple[Wrapped, Tree]:
        return Wrapped(state, jnp.zeros((), jnp.int32)), obs

    def step(key: Key, state: Wrapped, action: Array) -> tuple[Wrapped, TimeStep]:
        inner, timestep = env.step(key, state.inner, action)
        time = state.memory + 1
        return Wrapped(inner, time), timestep._replace(last=timestep.last | (time >= steps))

    limit = min(env.time_limit, steps)
    shortened = env._replace(outcome=env.outcome and partial(_outcome_within, env.outcome, limit))
    return _begins(
        shortened,
        begin,
        step=step,
        time_limit=limit,
        min_truncation_step=min(env.min_truncation_step, steps),
    )


def _outcome_within(outcome: Callable[[Tree], Outcome], limit: int, state: Tree) -> Outcome:
    """An outcome with as many rewards of steps as an episode has steps now."""
    whole = outcome(state)
    return whole._replace(step_rewards=jax.tree.map(lambda x: x[:limit], whole.step_rewards))


def frame_stack(env: Env, *, num: int = 4) -> Env:
    """The last `num` observations, oldest first, concatenated along the last axis.

    `[H, W, C]` becomes `[H, W, num * C]` and `[D]` becomes `[num * D]`. An episode starts with copies of its first
    observation.

    Args:
        env: the environment to wrap; its observations are arrays with at least one axis.
        num: number of observations in a stack, at least 1.

    Raises:
        UserError: fewer than one observation, or observations without an axis.
    """
    space = _box_observations(env, "frame_stack")
    num = check_whole("frame_stack: num", num, Domain(1, MOST_FRAMES))
    if not space.shape:
        raise UserError(f"frame_stack: the observations of {env.name} are scalars and have no axis to stack along.")
    channels = space.shape[-1]

    def repeated(x: Array) -> Array:
        return jnp.concatenate([x] * num, axis=-1)

    def begin(state: Tree, obs: Array) -> tuple[Wrapped, Array]:
        return Wrapped(state, repeated(obs)), repeated(obs)

    def step(key: Key, state: Wrapped, action: Array) -> tuple[Wrapped, TimeStep]:
        inner, timestep = env.step(key, state.inner, action)
        frames = jnp.concatenate([state.memory[..., channels:], timestep.obs], axis=-1)
        return Wrapped(inner, frames), timestep._replace(obs=frames)

    low, high = (np.concatenate([bound] * num, axis=-1) for bound in (space.low, space.high))
    mask = env.action_mask
    newest = mask and (lambda obs: mask(obs[..., -channels:]))
    return _begins(env, begin, step=step, observation_space=Box(low, high), action_mask=newest)


def flatten(env: Env) -> Env:
    """Observations reshaped to one vector.

    Raises:
        UserError: the observations are not arrays.
    """
    space = _box_observations(env, "flatten")

    def begin(state: Tree, obs: Array) -> tuple[Tree, Array]:
        return state, obs.reshape(-1)

    def step(key: Key, state: Tree, action: Array) -> tuple[Tree, TimeStep]:
        state, timestep = env.step(key, state, action)
        return state, timestep._replace(obs=timestep.obs.reshape(-1))

    mask = env.action_mask
    unflattened = mask and (lambda obs: mask(obs.reshape(*obs.shape[:-1], *space.shape)))
    flat = Box(space.low.reshape(-1), space.high.reshape(-1))
    flattened = env._replace(step=step, observation_space=flat, action_mask=unflattened)
    return _begins(flattened, begin, inner=lambda state: state)


def _box_observations(env: Env, wrapper: str) -> Box:
    if not isinstance(env.observation_space, Box):
        raise UserError(f"{wrapper}: the observations of {env.name} are not arrays but {env.observation_space}.")
    return env.observation_space
