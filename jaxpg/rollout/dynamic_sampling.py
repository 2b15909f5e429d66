"""Groups of episodes from one start state: which of them carry signal, and sampling until all of a batch do.

A group is `group_size` neighbouring columns of an episodic rollout. Where all its members have the same discounted
return, none of them is better than the others, and the advantages within the group are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.objectives import returns
from jaxpg.parallel import collectives
from jaxpg.rollout.collector import Collector, RolloutStats
from jaxpg.types import Array, Env, Key, Policy, Rollout, Tree


def with_dynamic_sampling(collector: Collector, *, max_resample_rounds: int, gamma: Array | float) -> Collector:
    """Dynamic sampling (DAPO, Yu et al. 2025, section 3.2, equation 11): a batch in which every group carries signal.

    Groups whose members all have the same return are replaced by freshly sampled ones with signal, until none is left
    or `max_resample_rounds` rounds of sampling are spent, the first included. Groups still without signal then
    do not train. All rounds count as environment steps. `collector` must be episodic; `gamma` is the discount of the
    credit.
    """
    return collector._replace(
        collect=partial(
            _collect_resampled,
            collector.collect,
            group_size=collector.group_size,
            max_resample_rounds=max_resample_rounds,
            gamma=gamma,
        )
    )


def has_signal(rollout: Rollout, group_size: int, gamma: Array | float) -> Array:
    """[groups], whether the members of a group differ in their discounted return, which is what they are credited."""
    steps = rollout.steps
    nothing = jnp.zeros_like(steps.reward)
    g = returns.discounted_returns(steps.reward, steps.discount, steps.last, nothing, gamma)[0].reshape(-1, group_size)
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
    def sample(round_: Array | int) -> tuple[Rollout, RolloutStats]:
        return collect(env, policy, params, runner, jax.random.fold_in(key, round_))[1:]

    def unfinished(carry: tuple) -> Array:
        round_, rollout, _ = carry
        missing = (~has_signal(rollout, group_size, gamma)).sum()
        # Every device stays until the last one is full: the tally inside the loop is a sum over devices.
        return (round_ < max_resample_rounds) & (collectives.psum(missing) > 0)

    def refill(carry: tuple) -> tuple:
        round_, rollout, stats = carry
        fresh, more = sample(round_)
        return round_ + 1, _replace_groups(rollout, fresh, group_size, gamma), jax.tree.map(jnp.add, stats, more)

    first, stats = sample(0)
    _, rollout, stats = lax.while_loop(unfinished, refill, (jnp.ones((), jnp.int32), first, stats))
    episodes = rollout.episodes._replace(outcome=first.episodes.outcome, length=first.episodes.length)
    rollout = rollout._replace(episodes=episodes)
    informative = jnp.repeat(has_signal(rollout, group_size, gamma), group_size)
    return runner, rollout._replace(loss_mask=rollout.loss_mask * informative[None]), stats


def _replace_groups(rollout: Rollout, fresh: Rollout, group_size: int, gamma: Array | float) -> Rollout:
    """Put the k-th fresh group with signal in the place of the k-th group without."""
    filled, offered = (has_signal(part, group_size, gamma) for part in (rollout, fresh))
    groups = filled.shape[0]
    offers = jnp.nonzero(offered, size=groups, fill_value=0)[0]
    place = jnp.cumsum(~filled) - 1  # the how-manieth empty place a group is
    replace = ~filled & (place < offered.sum())
    source = jnp.where(replace, offers[place], jnp.arange(groups))
    columns = (source[:, None] * group_size + jnp.arange(group_size)[None]).reshape(-1)
    replaced = jnp.repeat(replace, group_size)

    def merge(axis: int, old: Array, new: Array) -> Array:
        shape = [1] * old.ndim
        shape[axis] = -1
        return jnp.where(replaced.reshape(shape), jnp.take(new, columns, axis), old)

    return rollout.map_columns(merge, fresh)
