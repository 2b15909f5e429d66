"""Groups of episodes from one start state: which of them carry signal, and resampling until all of a batch do.

A group is `group_size` neighbouring columns of an episodic rollout. If all its members have the same discounted return,
no member is better than another, and all advantages within the group are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError
from jaxpg.objectives import returns
from jaxpg.parallel import collectives
from jaxpg.rollout.collector import Collector, RolloutStats
from jaxpg.types import Array, Env, Key, Policy, Rollout, Tree
from jaxpg.user_input.domains import check_whole


class _ResamplingState(NamedTuple):
    """What the loop carries: rounds of sampling so far, the batch, and the statistics of all rounds."""

    rounds: Array
    rollout: Rollout
    stats: RolloutStats


def with_dynamic_sampling(collector: Collector, *, max_resample_rounds: int, gamma: Array | float) -> Collector:
    """Dynamic sampling (DAPO, Yu et al. 2025, section 3.2, equation 11): a batch in which every group carries signal.

    Groups whose members all have the same return are replaced by newly sampled groups with signal, until every group
    has signal or `max_resample_rounds` rounds of sampling are used up, the first included. Groups that still have none
    are then masked in the loss. All rounds count as environment steps, and the outcomes of the rollout are those of the
    first round. `gamma` is the discount of the returns.

    Raises:
        UserError: the collector returns segments, or episodes that are not in groups; no rounds.
    """
    if not collector.whole_episodes or collector.group_size < 2:
        raise UserError(
            "with_dynamic_sampling compares the episodes of a group, so it takes rollout.episodic(num_envs=..., "
            f"group_size=...) with groups of two episodes at least, not of {collector.group_size}"
            f"{'' if collector.whole_episodes else ', and no segments'}."
        )
    max_resample_rounds = check_whole("max_resample_rounds", max_resample_rounds)
    return collector._replace(
        collect=partial(
            _collect_resampled,
            collector.collect,
            group_size=collector.group_size,
            max_resample_rounds=max_resample_rounds,
            gamma=gamma,
        ),
        gamma=gamma,
    )


def has_signal(rollout: Rollout, group_size: int, gamma: Array | float) -> Array:
    """[groups] bool, whether the discounted returns of the members of a group differ."""
    steps = rollout.steps
    zeros = jnp.zeros_like(steps.reward)
    g = returns.discounted_returns(steps.reward, steps.discount, steps.last, zeros, gamma)[0].reshape(-1, group_size)
    return g.max(1) != g.min(1)


def _collect_resampled(
    collect: Callable[..., tuple[Tree, Rollout, RolloutStats]],
    env: Env,
    policy: Policy,
    params: Tree,
    runner: Tree,
    key: Key,
    *,
    group_size: int,
    max_resample_rounds: int,
    gamma: Array | float,
) -> tuple[Tree, Rollout, RolloutStats]:
    def sample(number: Array | int) -> tuple[Rollout, RolloutStats]:
        return collect(env, policy, params, runner, jax.random.fold_in(key, number))[1:]

    def unfinished(state: _ResamplingState) -> Array:
        missing = (~has_signal(state.rollout, group_size, gamma)).sum()
        # Devices stop together, when all are full: sampling sums its statistics over devices.
        return (state.rounds < max_resample_rounds) & (collectives.psum(missing) > 0)

    def resample(state: _ResamplingState) -> _ResamplingState:
        fresh, stats = sample(state.rounds)
        rollout = _replace_groups(state.rollout, fresh, group_size, gamma)
        return _ResamplingState(state.rounds + 1, rollout, jax.tree.map(jnp.add, state.stats, stats))

    first, stats = sample(0)
    end = lax.while_loop(unfinished, resample, _ResamplingState(jnp.ones((), jnp.int32), first, stats))
    episodes = end.rollout.episodes._replace(outcome=first.episodes.outcome, length=first.episodes.length)
    rollout = end.rollout._replace(episodes=episodes)
    informative = jnp.repeat(has_signal(rollout, group_size, gamma), group_size)
    return runner, rollout._replace(loss_mask=rollout.loss_mask * informative[None]), end.stats


def _replace_groups(rollout: Rollout, fresh: Rollout, group_size: int, gamma: Array | float) -> Rollout:
    """Put the k-th group of `fresh` with signal in the place of the k-th group of `rollout` without."""
    informative, fresh_informative = (has_signal(part, group_size, gamma) for part in (rollout, fresh))
    groups = informative.shape[0]
    candidates = jnp.nonzero(fresh_informative, size=groups, fill_value=0)[0]
    rank = jnp.cumsum(~informative) - 1  # of a group among those without signal
    replaced = ~informative & (rank < fresh_informative.sum())
    source = jnp.where(replaced, candidates[rank], jnp.arange(groups))
    source_column = (source[:, None] * group_size + jnp.arange(group_size)[None]).reshape(-1)
    replaced_column = jnp.repeat(replaced, group_size)

    def merge(axis: int, old: Array, new: Array) -> Array:
        shape = [1] * old.ndim
        shape[axis] = -1
        return jnp.where(replaced_column.reshape(shape), jnp.take(new, source_column, axis), old)

    return rollout.map_columns(merge, fresh)
