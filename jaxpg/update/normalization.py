"""Running moments of observations and rewards, over all environments and all devices, and normalisation by them.

They belong to the learner, since an environment sees only itself. Moments are updated once per rollout, after it. The
policy acts and learns on the same observations within an iteration, so the probability ratio of the first update is
exactly one. Rewards are scaled by moments that the rollout is already part of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpg.objectives.moments import sample_moments
from jaxpg.parallel import collectives
from jaxpg.parallel.machine import machine
from jaxpg.types import Array, Env, Metrics, Policy, RewardTerm, Rollout, Tree

EPS = 1e-8  # added to variances


class Moments(NamedTuple):
    """Number of samples so far `[]`, their mean and their (biased) variance, each in the structure of a sample."""

    samples: Array
    mean: Tree
    variance: Tree


class NormalizationState(NamedTuple):
    """Running moments of observations and of discounted sums of rewards, `()` for what is not normalised.

    reward_terms: by name, those of the terms of an episode's reward that are standardised by them.
    """

    obs: Moments | tuple[()]
    reward_sums: Moments | tuple[()]
    reward_terms: Mapping[str, Moments]


def initial_moments(like: Tree = 0.0) -> Moments:
    """Moments before any sample, mean 0 and variance 1: by them numbers stay as they are, but are clipped.

    Args:
        like: what has the structure and the shapes of a sample.
    """
    mean = jax.tree.map(lambda x: jnp.zeros(np.shape(x), jnp.float32), like)
    return Moments(jnp.zeros((), jnp.float32), mean, jax.tree.map(jnp.ones_like, mean))


def update_moments(moments: Moments, x: Tree, mask: Array, *, exact_for_equal: bool = False) -> Moments:
    """Moments of all samples so far and those of `x` `[T, B, ...]` where `mask` `[T, B]` is 1, over all devices.

    Two sets of n and m samples combine to mean + d m/(n+m) and, for the sums of squares, M_n + M_m + d^2 nm/(n+m),
    with d the difference of their means (Chan, Golub and LeVeque 1979, equation 2.1). Both are written as a change of
    what they were, since a rounding at every update of what is all but the same number adds up: of 5 samples at a time
    the variance would be 2% too small after 10^8 of them. `exact_for_equal` is that of `sample_moments`.
    """
    new = sample_moments(x, mask, exact_for_equal=exact_for_equal)
    count = moments.samples + new.samples
    fraction = new.samples / jnp.maximum(count, 1)

    def combined(mean: Array, variance: Array, new_mean: Array, new_squares: Array) -> tuple[Array, Array]:
        delta = new_mean - mean
        before = jnp.where(moments.samples > 0, variance, 0.0)
        change = new_squares / jnp.maximum(new.samples, 1) - before + delta**2 * (1 - fraction)
        return mean + delta * fraction, jnp.where(count > 0, before + change * fraction, variance)

    pairs = jax.tree.map(combined, moments.mean, moments.variance, new.mean, new.squares)
    mean, variance = jax.tree.transpose(jax.tree.structure(moments.mean), jax.tree.structure((0, 0)), pairs)
    return Moments(count, mean, variance)


def normalize_obs(moments: Moments, obs: Tree, *, limit: float = 10.0) -> Tree:
    """(x - mean) / std, clipped to +-`limit` (Huang et al. 2022, details 6 and 7 of the continuous-control part)."""

    def normalized(x: Array, mean: Array, variance: Array) -> Array:
        lead = (1,) * (x.ndim - mean.ndim)
        mean, variance = (m.reshape(*lead, *m.shape) for m in (mean, variance))
        return jnp.clip((x - mean) * lax.rsqrt(variance + EPS), -limit, limit)

    return jax.tree.map(normalized, obs, moments.mean, moments.variance)


def scale_rewards(moments: Moments, reward: Array) -> Array:
    """reward / std, clipped to +-10; not centred, which would change the task (Huang et al. 2022, details 8 and 9)."""
    return jnp.clip(reward * lax.rsqrt(moments.variance + EPS), -10.0, 10.0)


def discounted_reward_sums(start: Array, reward: Array, last: Array, gamma: Array | float) -> tuple[Array, Array]:
    """Discounted sums of past rewards, R_t = gamma R_{t-1} + r_t, from 0 again after the end of an episode.

    `start` `[B]` is R before the first step, `reward` and `last` are `[T, B]`. Returns the `start` of the next segment
    and all R_t `[T, B]`. Their standard deviation is the scale of the rewards (Huang et al. 2022, detail 8).
    """

    def step(before: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        reward_t, last_t = inputs
        total = gamma * before + reward_t
        return jnp.where(last_t, 0.0, total), total

    return lax.scan(step, start, (reward, last), unroll=machine().recursion_unroll)


def with_normalized_obs(env: Env, policy: Policy, normalization: NormalizationState) -> Policy:
    """The policy, acting on normalised observations; unchanged if observations are not normalised.

    A context, with which an episode of `env` may begin, is no observation and stays as it is.
    """
    moments = normalization.obs
    if not isinstance(moments, Moments):
        return policy

    def act(params: Tree, memory: Tree, obs: Tree) -> Any:
        return policy.act(params, memory, normalize_obs(moments, obs))

    def start(params: Tree, first: Tree) -> Tree:
        return policy.start(params, first if env.context else normalize_obs(moments, first))

    return policy._replace(start=start, act=act)


def normalize_rollout(
    rollout: Rollout, reward_sum: Tree, normalization: NormalizationState, gamma: Array | float
) -> tuple[Rollout, Tree, NormalizationState]:
    """The rollout with normalised observations and scaled rewards; the new sums of rewards `[B]`, and the new moments.

    Observations are normalised by the moments from before the rollout, as the policy that acted saw them.
    """
    steps, obs_moments, sum_moments = rollout.steps, normalization.obs, normalization.reward_sums
    if isinstance(obs_moments, Moments):
        obs, final_obs = (normalize_obs(obs_moments, x) for x in (steps.obs, rollout.final_obs))
        obs_moments = update_moments(obs_moments, steps.obs, steps.mask, exact_for_equal=True)
        steps, rollout = steps._replace(obs=obs), rollout._replace(final_obs=final_obs)
    if isinstance(sum_moments, Moments):
        reward_sum, sums = discounted_reward_sums(reward_sum, steps.reward, steps.last, gamma)
        sum_moments = update_moments(sum_moments, sums, steps.mask)
        steps = steps._replace(reward=scale_rewards(sum_moments, steps.reward))
    moments = normalization._replace(obs=obs_moments, reward_sums=sum_moments)
    return rollout._replace(steps=steps), reward_sum, moments


def initial_term_moments(terms: Mapping[str, RewardTerm] | None) -> dict[str, Moments]:
    """Moments before any episode, of the terms that are standardised by running moments."""
    return {name: initial_moments() for name, term in (terms or {}).items() if term.standardize == "running"}


def standardize_rewards(
    terms: Mapping[str, RewardTerm] | None, rollout: Rollout, running: Mapping[str, Moments]
) -> tuple[Rollout, dict[str, Moments], Metrics]:
    """The rollout with the reward of each episode recomputed from its terms, the new moments, and the weighted terms.

        reward_b = sum_k weight_k z_kb,    z_kb = (x_kb - mean_k) / sqrt(variance_k + 1e-8), clipped to +-10,

    or z_kb = x_kb for a term that is not standardised. It stands at the last action; the rewards of other actions, such
    as those of the steps of a chain of thought, stay as they are. Mean and (biased) variance of a "batch" term are over
    the episodes of the rollout, of all groups on all devices; those of a "running" term over all episodes so far, these
    included. So mean and scale are the same for all groups. A group method then takes the group's own mean off the sum
    and may divide by its spread: for it the means do not matter, and the scales decide how much each term counts.

    Dynamic sampling looks for groups with signal before this, by the sum of the plain weighted values; an episode that
    it has replaced counts in neither mean nor variance.

    Args:
        terms: `Env.reward_terms`, some of which are standardised; without any, nothing changes.
        rollout: of whole episodes.
        running: the moments of the "running" terms.

    Returns:
        The rollout; the moments; as metrics the means of the terms, standardised and weighted, "weighted_NAME".
    """
    if not terms:
        return rollout, {}, {}
    values, moments, weighted = rollout.episodes.reward_terms, dict(running), {}
    for name, term in terms.items():
        x = values[name]
        if term.standardize:
            before = moments.get(name, initial_moments())
            seen = update_moments(before, x[None], jnp.ones_like(x)[None], exact_for_equal=True)
            x = normalize_obs(seen, x)
            if name in moments:
                moments[name] = seen
        weighted[name] = term.weight * x
    steps = rollout.steps
    last_step = steps.mask.sum(0).astype(jnp.int32) - 1
    total = sum(weighted.values(), jnp.zeros(steps.reward.shape[1], jnp.float32))
    reward = steps.reward.at[last_step, jnp.arange(len(last_step))].set(total)
    metrics = {f"weighted_{name}": collectives.mean(x) for name, x in weighted.items()}
    return rollout._replace(steps=steps._replace(reward=reward)), moments, metrics
