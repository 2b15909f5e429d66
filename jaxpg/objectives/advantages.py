"""Advantages: the Ψ_t of the policy gradient E[Σ Ψ_t ∇log π(a_t|s_t)], and what a critic regresses on.

All estimators share one signature, `credit(steps, v_tm1, v_t, baseline, *, gamma, ...) -> Credit`. `v_tm1` and `v_t`
are V(obs) and V of the successors, `[T, B]`, zeros without a critic; with one, returns bootstrap from it at time-outs
and at the end of the segment. `baseline` is a scalar that the learner carries from batch to batch.

Below, G_t is `returns.discounted_returns`. A column may hold several episodes in a row, or one episode followed by
padding; padding gets 0 and influences nothing. Only `group_relative`, `process_relative` and `leave_one_out` need one
episode per column: a group is `group_size` neighbouring columns that began in the same state, all on one device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError, refuse_unknown
from jaxpg.objectives import returns
from jaxpg.objectives.moments import sample_moments
from jaxpg.types import Array, Scalar, Transition

BASELINE_KINDS = ("batch", "running")


class Credit(NamedTuple):
    """Advantages and targets.

    advantage: Ψ, `[T, B]`, 0 on padding.
    target: what a critic regresses on, `[T, B]`, 0 on padding.
    baseline: the scalar for the next batch; only `mean_baseline` with "running" changes it.
    """

    advantage: Array
    target: Array
    baseline: Array


def total_return(steps: Transition, v_tm1: Array, v_t: Array, baseline: Array, *, gamma: Scalar) -> Credit:
    """Ψ_t = G_0, the discounted return of the whole episode for each of its steps.

    For an episode that began before the segment, the return from the start of the segment.
    Source: Williams 1992 (REINFORCE).
    """
    g = _returns(steps, v_t, gamma)
    return _credit(steps, _of_first_step(g, steps.last), g, baseline)


def reward_to_go(steps: Transition, v_tm1: Array, v_t: Array, baseline: Array, *, gamma: Scalar) -> Credit:
    """Ψ_t = G_t: an action is not credited with rewards from before it.

    Source: Sutton & Barto 2018, section 13.3, without the factor γ^t.
    """
    g = _returns(steps, v_t, gamma)
    return _credit(steps, g, g, baseline)


def mean_baseline(
    steps: Transition,
    v_tm1: Array,
    v_t: Array,
    baseline: Array,
    *,
    gamma: Scalar,
    baseline_kind: str = "batch",
    rate: Scalar = 0.1,
) -> Credit:
    """Ψ_t = G_t - b, b an average of G over real steps on all devices; `baseline_kind` is one of BASELINE_KINDS.

    "batch": b is the mean over this batch, which includes G_t itself: a bias of the order of 1/episodes.
    "running": b is `baseline`, from earlier batches only, hence without bias; the next one is
    baseline + rate (mean - baseline). A baseline of exactly 0 is that of the first batch, and the next one is its mean.
    Source: Williams 1992 (REINFORCE), section 4, on reinforcement baselines.

    Raises:
        UserError: `baseline_kind` is neither.
    """
    check_baseline_kind(baseline_kind)
    g = _returns(steps, v_t, gamma)
    mean = sample_moments(g, steps.mask).mean
    if baseline_kind == "batch":
        return _credit(steps, g - mean, g, baseline)
    updated = jnp.where(baseline == 0, mean, baseline + rate * (mean - baseline))
    return _credit(steps, g - baseline, g, updated)


def check_baseline_kind(baseline_kind: str) -> None:
    """Raise a UserError unless `baseline_kind` is one of BASELINE_KINDS."""
    if baseline_kind not in BASELINE_KINDS:
        refuse_unknown("baseline_kind", baseline_kind, BASELINE_KINDS)


def critic_baseline(steps: Transition, v_tm1: Array, v_t: Array, baseline: Array, *, gamma: Scalar) -> Credit:
    """Ψ_t = G_t - V(s_t); the critic regresses on G_t. Source: Sutton & Barto 2018, section 13.4,
    "REINFORCE with Baseline".
    """
    g = _returns(steps, v_t, gamma)
    return _credit(steps, g - v_tm1, g, baseline)


def n_step(steps: Transition, v_tm1: Array, v_t: Array, baseline: Array, *, gamma: Scalar, n: int) -> Credit:
    """Ψ_t = G_{t:t+n} - V(s_t), with the n-step target G_{t:t+n} of `returns.n_step_targets`.

    Source: Mnih et al. 2016 (A3C), section 4.

    Raises:
        UserError: `n` is not at least 1.
    """
    target = returns.n_step_targets(steps.reward, steps.discount, steps.last, v_t, gamma, n)
    return _credit(steps, target - v_tm1, target, baseline)


def generalized_advantage(
    steps: Transition, v_tm1: Array, v_t: Array, baseline: Array, *, gamma: Scalar, lambda_: Scalar
) -> Credit:
    """Ψ_t = A_t of `returns.gae`; the critic regresses on the λ-return A_t + V(s_t).

    Source: Schulman et al. 2016 (GAE), equation 16.
    """
    advantage = returns.gae(steps.reward, steps.discount, steps.last, v_tm1, v_t, gamma, lambda_)
    return _credit(steps, advantage, advantage + v_tm1, baseline)


def group_relative(
    steps: Transition,
    v_tm1: Array,
    v_t: Array,
    baseline: Array,
    *,
    gamma: Scalar,
    group_size: int,
    divide_by_std: bool = True,
    ddof: int = 1,
    eps: Scalar = 1e-4,
) -> Credit:
    """Ψ_t = (r_i - mean r)/(std r + eps) over the group of episode i, r being the discounted returns of its episodes.

    The same at every step of an episode, and exactly 0 where all returns of a group are equal. The variance divides by
    group_size - ddof. Without `divide_by_std`, Ψ_t = r_i - mean r (Dr. GRPO, Liu et al. 2025).
    Source: Shao et al. 2024 (GRPO), section 4.1.2.

    Raises:
        UserError: `group_size` is less than 2, or the number of columns is not a multiple of it.
    """
    g = _returns(steps, v_t, gamma)
    centred = _centred_by_group(g[0], group_size)
    if divide_by_std:
        variance = (centred**2).sum(1, keepdims=True) / (group_size - ddof)
        centred = centred / (jnp.sqrt(variance) + eps)
    return _credit(steps, jnp.broadcast_to(centred.reshape(1, -1), g.shape), g, baseline)


def process_relative(
    steps: Transition,
    v_tm1: Array,
    v_t: Array,
    baseline: Array,
    *,
    gamma: Scalar,
    group_size: int,
    ddof: int = 1,
    eps: Scalar = 1e-4,
) -> Credit:
    """Ψ_t = Σ_{k >= t} γ^{k-t} z_k, with z = (r - mean r)/(std r + eps) over the reasoning steps of the whole group.

    A reasoning step is many actions, such as the tokens of a line. It ends where `steps.step_end` says so, and with its
    episode; r is the sum of the rewards of its actions, and z stands at the last of them and is 0 elsewhere. So an
    action is credited with the steps that it belongs to or precedes. Longer episodes have more steps, each of which
    counts the same in the moments. Where all steps of a group have the same r, Ψ is exactly 0. The variance divides by
    the number of steps - ddof. With one step per episode and γ = 1 it is `group_relative`.
    Source: Shao et al. 2024 (GRPO), section 4.1.3, where γ = 1.

    Raises:
        UserError: as `group_relative`.
    """
    _check_groups(steps.reward.shape[1], group_size)
    ends = _ends_of_reasoning(steps)
    reward = _sum_since(jnp.where(steps.mask, steps.reward, 0), ends)
    z = _standardize_by_group(reward, ends, group_size, ddof, eps)
    advantage = returns.discounted_returns(z, steps.discount, steps.last, jnp.zeros_like(z), gamma)
    return _credit(steps, advantage, _returns(steps, v_t, gamma), baseline)


def leave_one_out(
    steps: Transition, v_tm1: Array, v_t: Array, baseline: Array, *, gamma: Scalar, group_size: int
) -> Credit:
    """Ψ_t = r_i - mean of r over the *other* members of the group of episode i, r being discounted returns: unbiased.

    The same at every step of an episode, and exactly 0 where all returns of a group are equal.
    Sources: Kool et al. 2019 (Buy 4 REINFORCE Samples, Get a Baseline for Free); Ahmadian et al. 2024 (RLOO).

    Raises:
        UserError: `group_size` is less than 2, or the number of columns is not a multiple of it.
    """
    g = _returns(steps, v_t, gamma)
    centred = _centred_by_group(g[0], group_size) * (group_size / (group_size - 1))
    return _credit(steps, jnp.broadcast_to(centred.reshape(1, -1), g.shape), g, baseline)


def standardize(advantage: Array, loss_mask: Array, *, ddof: int = 1, eps: Scalar = 1e-8) -> Array:
    """(A - mean)/(std + eps), moments over the steps of `loss_mask` on all devices; 0 on the steps outside it.

    The variance divides by steps - ddof. Where A is the same at all steps the result should be 0. It may be about 1 or
    -1 instead, at all steps: the rounding error of the mean, divided by itself.
    Source: Huang et al. 2022 (The 37 Implementation Details of PPO), detail 7.
    """
    count, mean, squares = sample_moments(advantage, loss_mask)
    std = jnp.sqrt(squares / jnp.maximum(count - ddof, 1))
    return jnp.where(loss_mask, (advantage - mean) / (std + eps), 0)


def unchanged(advantage: Array, loss_mask: Array) -> Array:
    """The advantage itself; in place of `standardize` where advantages are not normalised."""
    return advantage


def _returns(steps: Transition, v_t: Array, gamma: Scalar) -> Array:
    return returns.discounted_returns(steps.reward, steps.discount, steps.last, v_t, gamma)


def _credit(steps: Transition, advantage: Array, target: Array, baseline: Array) -> Credit:
    return Credit(jnp.where(steps.mask, advantage, 0), jnp.where(steps.mask, target, 0), baseline)


def _of_first_step(x: Array, last: Array) -> Array:
    """At every step of an episode, `x` at the episode's first step in the segment."""
    t = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    begins = jnp.concatenate([jnp.ones_like(last[:1]), last[:-1]])
    return jnp.take_along_axis(x, lax.cummax(jnp.where(begins, t, 0)), 0)


def _check_groups(columns: int, group_size: int) -> None:
    if group_size < 2 or columns % group_size:
        raise UserError(
            f"{columns} episodes per device do not divide into groups of {group_size}: choose a group_size of at "
            "least 2 and a number of environments per device that is a multiple of it."
        )


def _ends_of_reasoning(steps: Transition) -> Array:
    """`[T, B]` bool: where a step of the reasoning ends; the last one ends with the episode."""
    last = steps.last > 0
    marked = last if isinstance(steps.step_end, tuple) else last | (steps.step_end > 0)
    return marked & (steps.mask > 0)


def _sum_since(x: Array, ends: Array) -> Array:
    """At every t, the sum of x after the end before t, up to and including t: a return in reversed time."""
    begins = jnp.concatenate([jnp.ones_like(ends[:1]), ends[:-1]])
    zeros = jnp.zeros_like(x)
    return returns.discounted_returns(x[::-1], zeros + 1, begins[::-1], zeros, 1.0)[::-1]


def _standardize_by_group(x: Array, where: Array, group_size: int, ddof: int, eps: Scalar) -> Array:
    """(x - mean)/(std + eps), moments over the entries `where` `[T, B]` of the columns of a group; 0 at all others."""
    x, where = (a.reshape(a.shape[0], -1, group_size) for a in (x, where))
    largest = jnp.where(where, x, -jnp.inf).max((0, 2), keepdims=True)
    x = jnp.where(where, x - largest, 0)  # equal rewards become exact zeros, which x - mean need not be
    count = where.sum((0, 2), keepdims=True)
    centred = jnp.where(where, x - x.sum((0, 2), keepdims=True) / jnp.maximum(count, 1), 0)
    variance = (centred**2).sum((0, 2), keepdims=True) / jnp.maximum(count - ddof, 1)
    return (centred / (jnp.sqrt(variance) + eps)).reshape(x.shape[0], -1)


def _centred_by_group(r: Array, group_size: int) -> Array:
    """`[groups, group_size]`: r minus its mean over the group."""
    _check_groups(r.shape[0], group_size)
    r = r.reshape(-1, group_size)
    r = r - r[:, :1]  # equal returns become exact zeros, which r - mean need not be in floating point
    return r - r.mean(1, keepdims=True)
