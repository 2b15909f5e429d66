"""Small things that several tests build on: a policy and a critic that are tables, and an environment to count by."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.algorithm import PolicyGradient, make_batch
from jaxpg.models.distributions import Categorical
from jaxpg.policy_gradient import policy_gradient
from jaxpg.rollout.successors import successor_values
from jaxpg.types import Array, Box, Critic, Discrete, Env, Params, Policy, Rollout, TimeStep, Transition
from jaxpg.update.objective import Batch, Objective
from jaxpg.update.optimizers import sgd

LONG = pytest.mark.skipif("JAXPG_LONG" not in os.environ, reason="takes half a minute or more: set JAXPG_LONG")
"""For tests of the full lane whose siblings are there as well."""

ON_DEVICE = "JAXPG_ON_DEVICE" in os.environ
jit = partial(jax.jit, compiler_options=None if ON_DEVICE else {"xla_backend_optimization_level": 0})
"""jax.jit for programs that take longer to compile than to run: the same numbers, a third of the compile time."""


def softmax_policy(logits: Array) -> Policy:
    """A row of logits `[S, A]` per state, for one-hot observations. The parameters are the table and start as given."""
    return Policy(
        init=lambda key: logits,
        start=lambda params, obs: (),
        act=lambda params, memory, obs: (Categorical(obs @ params), memory),
        evaluate=lambda params, rollout: Categorical(rollout.steps.obs @ params),
    )


def value_table(values: Array) -> Critic:
    """A value per state `[S]`, for one-hot observations."""

    def both(params: Params, rollout: Rollout) -> tuple[Array, Array]:
        v_tm1 = rollout.steps.obs @ params.critic
        return v_tm1, successor_values(rollout, v_tm1, lambda final_obs: final_obs @ params.critic)

    return Critic(init=lambda key: values, values=both)


class Count(NamedTuple):
    """State of `counter`: its episode's `length` [] int and `time` [] int."""

    length: Array
    time: Array


def counter(*, shortest: int = 2, longest: int = 5, time_limit: int = 4, actions: int = 3) -> Env:
    """Episodes of a random length, terminating after it or timing out at `time_limit`, whichever comes first.

    Observations are (length, time); the reward is 10 length + time + action/10, so that each number can be traced back.
    """

    def obs(state: Count) -> Array:
        return jnp.stack([state.length, state.time]).astype(jnp.float32)

    def reset(key: Array) -> tuple[Count, Array]:
        state = Count(jax.random.randint(key, (), shortest, longest + 1), jnp.zeros((), jnp.int32))
        return state, obs(state)

    def step(key: Array, state: Count, action: Array) -> tuple[Count, TimeStep]:
        after = state._replace(time=state.time + 1)
        terminated = after.time == state.length  # asked to go on behind its end, it would not know
        reward = 10.0 * state.length + state.time + 0.1 * action
        last = terminated | (after.time == time_limit)
        return after, TimeStep(obs(after), reward.astype(jnp.float32), 1.0 - terminated.astype(jnp.float32), last)

    space = Box(np.zeros(2, np.float32), np.full(2, max(longest, time_limit), np.float32))
    return Env("counter", reset, step, space, Discrete(actions), time_limit, min_truncation_step=time_limit)


def pictures(env: Env) -> Env:
    """`env` with each observation `[2]` as a picture `[4, 4, 4]`, waves that tell one from another."""

    def drawn(obs: Array) -> Array:
        rows, columns, channels = jnp.indices((4, 4, 4))
        return 0.3 * jnp.sin((rows + 1.0) * obs[0] + (columns + 1.0) * obs[1] + channels)

    def reset(key: Array) -> tuple[Any, Array]:
        state, obs = env.reset(key)
        return state, drawn(obs)

    def step(key: Array, state: Any, action: Array) -> tuple[Any, TimeStep]:
        state, timestep = env.step(key, state, action)
        return state, timestep._replace(obs=drawn(timestep.obs))

    space = Box(-np.ones((4, 4, 4), np.float32), np.ones((4, 4, 4), np.float32))
    return env._replace(name="pictures", reset=reset, step=step, observation_space=space)


def target(*, time_limit: int = 4) -> Env:
    """Two real actions in [-1, 1] and a point, drawn per episode and shown, to match: the reward is -distance²."""

    def reset(key: Array) -> tuple[tuple[Array, Array], Array]:
        point = jax.random.uniform(key, (2,), minval=-1.0)
        return (point, jnp.zeros((), jnp.int32)), point

    def step(key: Array, state: tuple[Array, Array], action: Array) -> tuple[tuple[Array, Array], TimeStep]:
        point, time = state[0], state[1] + 1
        return (point, time), TimeStep(point, -((action - point) ** 2).sum(), jnp.ones(()), time >= time_limit)

    space = Box(-np.ones(2, np.float32), np.ones(2, np.float32))
    return Env("target", reset, step, space, space, time_limit)


def first_update(
    env: Env, policy: Policy, critic: Critic | None, algorithm: PolicyGradient, key: Array
) -> tuple[Objective, Params, Batch]:
    """What the first iteration of a learner hands to `update`: its losses, the parameters and the batch."""
    seen: list[tuple[Objective, Params, Batch]] = []

    def spy_update(objective, optimizer, learning_rate, params, opt_state, batch, key):
        seen.append((objective, params, batch))
        return params, opt_state, {}

    learner = policy_gradient(env, policy, critic, algorithm._replace(update=spy_update))
    learner.step(learner.init(key), key)
    return seen[0]


def text_batch(
    algorithm: PolicyGradient,
    policy: Policy,
    critic: Critic | None,
    rollout: Rollout,
    scale: float = 1.0,
    seed: int = 0,
) -> tuple[Params, Batch]:
    """Parameters, those of the policy times `scale`, and what an update gets to see of these completions.

    Their log-probabilities are those of a policy that was another one, their rewards all differ.
    """
    params = jax.tree.map(lambda x: scale * x, policy.init(jax.random.key(seed)))
    params = Params(params, critic.init(jax.random.key(1)) if critic else ())
    steps = rollout.steps
    length, num_texts = steps.mask.shape
    log_prob = policy.evaluate(params.policy, rollout).log_prob(steps.action)
    log_prob -= 0.1 * jnp.sin(jnp.arange(length))[:, None]
    reward = jnp.cos(jnp.arange(num_texts))[None] * steps.mask
    rollout = rollout._replace(steps=steps._replace(log_prob=log_prob, reward=reward))
    reference = policy.init(jax.random.key(2)) if algorithm.reference_kl else ()
    return params, make_batch(policy, critic, algorithm, params, reference, jnp.zeros(()), rollout)[0]


def assert_same_update(
    algorithm: PolicyGradient, goal: Objective, params: Params, batch: Batch, ways: Sequence[Callable[[], Any]]
) -> None:
    """An update after each of `ways` has been called, which sets how it is computed, has the same results."""
    found = []
    for choose in ways:
        choose()
        found.append(jit(partial(algorithm.update, goal, sgd(), 0.1))(params, (), batch, jax.random.key(1)))
    for other in found[1:]:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found[0], other)
    moved = jax.tree.map(lambda x, y: jnp.abs(x - y).max(), params.policy, found[0][0].policy)
    assert max(jax.tree.leaves(moved)) > 1e-4


def resting(obs: Array) -> Rollout:
    """A rollout of one step at each of the observations `[B, ...]`, after which nothing has changed."""
    zeros, ones = jnp.zeros((1, len(obs))), jnp.ones((1, len(obs)))
    steps = Transition(
        obs=obs[None],
        action=zeros.astype(int),
        log_prob=zeros,
        reward=zeros,
        discount=ones,
        last=zeros.astype(bool),
        mask=ones,
    )
    return Rollout(steps, ones, final_obs=obs[None])


def next_obs(part: Rollout) -> np.ndarray:
    """The true successors `[T, B, ...]` that a rollout knows of, by a slow loop; NaN behind a termination."""
    obs, final_obs = np.asarray(part.steps.obs, np.float64), np.asarray(part.final_obs)
    last, discount = np.asarray(part.steps.last), np.asarray(part.steps.discount)
    found = np.full_like(obs, np.nan)
    for b in range(obs.shape[1]):
        kept = iter(final_obs[:, b])
        for t in range(len(obs)):
            if last[t, b] and discount[t, b] == 0:
                continue
            found[t, b] = next(kept) if last[t, b] or t == len(obs) - 1 else obs[t + 1, b]
    return found
