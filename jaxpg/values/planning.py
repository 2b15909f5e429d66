"""Planning: values and optimal policies of an MDP whose P and R are known, by sweeps over its states.

Every function takes an MDP or a SparseMDP, can be jitted, and mapped over discounts and over MDPs of one shape (slips,
places of the reward). A sweep replaces the value of every state by a backup,

    evaluation:   v(s) <- sum_a pi(a|s) q(s, a)
    improvement:  v(s) <- max_a q(s, a),    q(s, a) = r(s, a) + gamma sum_s' p(s'|s, a) v(s').

Both are contractions with the factor gamma: a sweep that changes no value by more than `change` leaves an error of at
most gamma / (1 - gamma) change. Sweeps end when this bound is below the tolerance, or the change is below the rounding
of the values. With gamma 1 there is no such bound, and they end when the change itself is below the tolerance.

The rounding of the values, 8 eps of the largest, is multiplied like any change: in float32 values near a gamma of 0.999
are right to a thousandth, near 0.9999 to a hundredth. With `jax_enable_x64`, which `jaxpg plan` sets,
that is 2e-12 and 2e-11.

Sources: Sutton & Barto 2018, chapter 4; Puterman 1994, "Markov Decision Processes", chapter 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.envs.mdp_records import AnyMDP, check_arguments, check_discount, check_policy
from jaxpg.envs.reachability import lasting_actions, steps_to_terminal
from jaxpg.envs.tabular import action_values, expected_next_values, expected_rewards
from jaxpg.errors import UserError, checked_by, excerpt
from jaxpg.types import Array, Scalar

Backup = Callable[[Array, Array | slice], Array]
"""(values [S], states) -> the new values of these states: of one state [], or of all of them [S] for `slice(None)`."""
Order = Callable[[Backup, Array], Array]
"""The order in which a sweep backs up the states: (backup, values [S]) -> values [S]."""
MAX_SWEEPS = 100_000
"""Sweeps that no setting limits end after this many."""


class Plan(NamedTuple):
    """What a method found.

    values: [S], 0 in terminal states.
    policy: [S, A] one-hot, the greedy policy of the values (`greedy_policy`).
    sweeps: [] int32, sweeps over all states, those of evaluation included.
    improvements: [] int32, how often the policy was improved; for value iteration as often as it swept.
    change: [] the largest change of a value in the last sweep; of policy iteration, in the last evaluation.
    unfinished: [] int32, how often sweeps ended at their limit, before the values were within the tolerance: those of
        an evaluation, or those of value iteration.
    """

    values: Array
    policy: Array
    sweeps: Array
    improvements: Array
    change: Array
    unfinished: Array


def synchronous(backup: Backup, values: Array) -> Array:
    """All states at once, from the values before the sweep (Jacobi)."""
    return backup(values, slice(None))


def gauss_seidel(backup: Backup, values: Array) -> Array:
    """One state after the other, each from the newest values: fewer sweeps, but no two states at once."""
    return lax.fori_loop(0, len(values), lambda s, v: v.at[s].set(backup(v, s)), values)


def _check_method(method: str, given: Mapping[str, Any]) -> None:
    """Refuse arguments of a planning method, by name, whose numbers it would take without a word.

    Sweeps with a discount beyond 1 diverge, and rows that sum to less or more than 1 are another discount.
    """
    check_discount(given["gamma"])
    check_arguments(method, given)
    if not callable(order := given.get("order", synchronous)):
        raise UserError(f"The order is a function, values.synchronous or values.gauss_seidel, not {excerpt(order)}.")


@checked_by(_check_method)
@partial(jax.jit, static_argnames=("max_sweeps", "order"))
def policy_evaluation(
    mdp: AnyMDP,
    policy: Array,
    gamma: Scalar,
    *,
    tolerance: Scalar = 1e-6,
    max_sweeps: int = MAX_SWEEPS,
    order: Order = synchronous,
) -> Array:
    """The state values of a policy by sweeps from zero; `envs.state_values` finds them by a linear solve.

    Args:
        mdp: the process.
        policy: [S, A], pi(a | s).
        gamma: discount factor; with 1 the policy must reach a terminal state from everywhere.
        tolerance: of the values, where their rounding allows it (see above).
        max_sweeps: sweeps end after this many.
        order: `synchronous` or `gauss_seidel`.

    Returns:
        [S], 0 in terminal states.
    """
    check_policy(mdp, policy)
    rewards = expected_rewards(mdp)
    backup = evaluation_backup(mdp, rewards, policy, gamma)
    zeros = jnp.zeros(len(mdp.terminal), jnp.result_type(policy, rewards))
    return sweep_until_converged(order, gamma, tolerance, backup, zeros, max_sweeps).values


@checked_by(_check_method)
@partial(jax.jit, static_argnames=("max_sweeps", "order"))
def value_iteration(
    mdp: AnyMDP,
    gamma: Scalar,
    *,
    tolerance: Scalar = 1e-6,
    max_sweeps: int = MAX_SWEEPS,
    order: Order = synchronous,
) -> Plan:
    """Optimal values: v <- max_a q(., a), from zero. Source: Sutton & Barto 2018, section 4.4.

    With gamma 1, where there are gains and losses and a state in which one can rest for nothing, it begins with values
    that are too low (`below_optimum`), whose own sweeps `max_sweeps` does not limit.

    Args:
        mdp: the process.
        gamma: discount factor; with 1 a terminal state must be within reach from everywhere, and no policy may collect
            rewards for ever without a loss (`envs.reachability.check_mdp`).
        tolerance: of the values, where their rounding allows it (see above).
        max_sweeps: sweeps end after this many.
        order: `synchronous` or `gauss_seidel`.
    """
    rewards = expected_rewards(mdp)
    backup = optimality_backup(mdp, rewards, gamma)
    sweep = partial(sweep_until_converged, order, gamma, tolerance)
    start = below_optimum(mdp, rewards, gamma, sweep)
    swept = sweep(backup, start.values, max_sweeps)
    policy = greedy_policy(mdp, swept.values, gamma, tolerance=tolerance)
    sweeps, unfinished = start.sweeps + swept.sweeps, jnp.int32(start.unfinished) + swept.unfinished
    return Plan(swept.values, policy, sweeps, swept.sweeps, swept.change, unfinished)


@checked_by(_check_method)
@partial(jax.jit, static_argnames=("max_sweeps", "max_improvements", "order"))
def policy_iteration(
    mdp: AnyMDP,
    gamma: Scalar,
    *,
    tolerance: Scalar = 1e-6,
    max_sweeps: int = MAX_SWEEPS,
    max_improvements: int = 1_000,
    order: Order = synchronous,
) -> Plan:
    """Optimal values: evaluate the policy, make it greedy, and again until its values no longer rise.

    It begins with the uniform policy. An evaluation begins with the values of the policy before, which are lower
    everywhere, so they rise to the optimal ones; with gamma 1 they are first raised to `resting_values`. With
    `max_sweeps` 1 this is value iteration, in between it is modified policy iteration. Where value iteration begins
    with values that are too low, the first evaluation here goes on until it has converged, whatever `max_sweeps` is.
    Source: Sutton & Barto 2018, section 4.3; Puterman 1994, sections 6.4 and 6.5.

    Args:
        mdp: the process.
        gamma: discount factor; with 1 a terminal state must be within reach from everywhere, and no policy may collect
            rewards for ever without a loss (`envs.reachability.check_mdp`).
        tolerance: of the values, where their rounding allows it (see above).
        max_sweeps: sweeps per evaluation.
        max_improvements: improvements end after this many.
        order: `synchronous` or `gauss_seidel`.
    """
    rewards = expected_rewards(mdp)
    least = resting_values(mdp, rewards, gamma)
    sweep = partial(sweep_until_converged, order, gamma, tolerance)
    evaluate = partial(_evaluate_raised, mdp, rewards, gamma, sweep, least)

    def improve(plan: Plan) -> Plan:
        greedy = greedy_policy(mdp, plan.values, gamma, tolerance=tolerance)
        policy = unless_as_good(action_values(mdp, plan.values, gamma), plan.policy, greedy)
        swept = evaluate(plan.values, policy, max_sweeps)
        change = jnp.abs(swept.values - plan.values).max()
        sweeps, unfinished = plan.sweeps + swept.sweeps, plan.unfinished + swept.unfinished
        return Plan(swept.values, policy, sweeps, plan.improvements + 1, change, unfinished)

    def goes_on(plan: Plan) -> Array:
        return (plan.change > smallest_change(plan.values, gamma, tolerance)) & (plan.improvements < max_improvements)

    uniform = uniform_policy(rewards)
    first_sweeps = jnp.where(_rests_among_losses(mdp, rewards, least), max(max_sweeps, MAX_SWEEPS), max_sweeps)
    first = evaluate(jnp.zeros(len(rewards), rewards.dtype), uniform, first_sweeps)
    infinite, none = jnp.asarray(jnp.inf, rewards.dtype), jnp.int32(0)
    plan = Plan(first.values, uniform, first.sweeps, none, infinite, none + first.unfinished)
    plan = lax.while_loop(goes_on, improve, plan)
    return plan._replace(policy=greedy_policy(mdp, plan.values, gamma, tolerance=tolerance))


class FiniteHorizonPlan(NamedTuple):
    """Optimal values and policies by the number of steps that are left, from none to the horizon.

    values: [H + 1, S], the optimal return of the next h steps.
    policy: [H + 1, S, A] one-hot, the first of these steps; row 0 has no step, and is zero.
    """

    values: Array
    policy: Array


@checked_by(check_arguments)
@partial(jax.jit, static_argnames="horizon")
def finite_horizon(mdp: AnyMDP, gamma: Scalar, horizon: int) -> FiniteHorizonPlan:
    """Backward induction: v_0 = 0, v_h(s) = max_a r(s, a) + gamma sum_s' p(s'|s, a) v_{h-1}(s').

    The best that can be done within a time limit; the best action depends on the steps that are left.
    Source: Puterman 1994, section 4.5.

    Args:
        mdp: the process.
        gamma: discount factor, 1 included.
        horizon: the number of steps, at least 0.
    """
    if horizon < 0:
        raise UserError(f"The horizon is a number of steps, at least 0, not {horizon}.")
    rewards = expected_rewards(mdp)

    def back_up(values: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        q = _live(mdp, rewards + gamma * expected_next_values(mdp, values))
        return q.max(-1), (q.max(-1), jax.nn.one_hot(q.argmax(-1), q.shape[-1], dtype=q.dtype))

    zeros = jnp.zeros(len(rewards), rewards.dtype)
    _, (values, policy) = lax.scan(back_up, zeros, length=horizon)
    first = jnp.zeros((1, *rewards.shape), rewards.dtype)
    return FiniteHorizonPlan(jnp.concatenate([zeros[None], values]), jnp.concatenate([first, policy]))


@jax.jit
def greedy_policy(mdp: AnyMDP, values: Array, gamma: Scalar, *, tolerance: Scalar = 0.0) -> Array:
    """The policy that takes the best action by q, `[S, A]` one-hot; of several, up to rounding, the first.

    With gamma 1 actions can be as good as the best and lead in circles for ever. Then, of the actions within the
    tolerance of the best, it takes one that leads to a terminal state by the fewest further such actions.

    Args:
        mdp: the process.
        values: [S].
        gamma: discount factor.
        tolerance: of action values, with gamma 1; rounding is always tolerated.
    """
    q = action_values(mdp, values, gamma)
    rounding = _rounding(q)

    def first(q: Array) -> Array:
        return (q >= q.max(-1, keepdims=True) - rounding).argmax(-1)

    def shortest(q: Array) -> Array:
        best = q >= q.max(-1, keepdims=True) - jnp.maximum(tolerance, rounding)
        steps = steps_to_terminal(mdp, best)
        return jnp.where(jnp.isfinite(steps).any(-1), steps.argmin(-1), best.argmax(-1))

    chosen = lax.cond(gamma == 1, shortest, first, q)
    return jax.nn.one_hot(chosen, q.shape[-1], dtype=q.dtype)


def _rounding(q: Array) -> Array:
    """[S, 1], the errors of action values `[S, A]`."""
    return 8 * jnp.finfo(q.dtype).eps * jnp.abs(q).max(-1, keepdims=True)


def unless_as_good(q: Array, policy: Array, greedy: Array) -> Array:
    """The greedy policy; in states where another is as good, up to rounding, that other one.

    Else the policy would change for ever between actions that differ by rounding, and its values with it.
    """
    as_good = (policy * q).sum(-1, keepdims=True) >= q.max(-1, keepdims=True) - _rounding(q)
    return jnp.where(as_good, policy, greedy)


def resting_values(mdp: AnyMDP, rewards: Array, gamma: Scalar) -> Array:
    """[S], what states are worth at least: with gamma 1, 0 where a policy can go on for ever without a loss, else -inf.

    Policy iteration would not find that by itself. A circle that costs nothing keeps the values that its states have,
    so where all ends are losses it looks no better than the best of them. Source: Puterman 1994, chapter 7.

    Args:
        mdp: the process.
        rewards: [S, A], the expected ones.
        gamma: discount factor.
    """
    without_loss = rewards >= 0
    rests = lax.cond(gamma == 1, lambda: lasting_actions(mdp, without_loss), lambda: jnp.zeros_like(without_loss))
    return jnp.where(rests.any(-1), 0.0, -jnp.inf).astype(rewards.dtype)


class Swept(NamedTuple):
    """Where sweeps came to.

    values: [S].
    sweeps: [] int32, how many.
    change: [] the largest change of a value in the last.
    unfinished: [] bool, whether that is too large for the values to be within the tolerance.
    """

    values: Array
    sweeps: Array
    change: Array
    unfinished: Array


Sweep = Callable[[Backup, Array, Array | int], Swept]
"""`sweep_until_converged` from given values, with at most this many sweeps."""


def below_optimum(mdp: AnyMDP, rewards: Array, gamma: Scalar, sweep: Sweep) -> Swept:
    """Where value iteration begins: zeros, or values that are nowhere above the optimal ones.

    These are the values of the uniform policy, raised to `resting_values`, from which values only rise. They are swept
    to their end: after a few sweeps a loss may not have come to the states before it.
    """
    least = resting_values(mdp, rewards, gamma)
    zeros = jnp.zeros(len(rewards), rewards.dtype)
    return lax.cond(
        _rests_among_losses(mdp, rewards, least),
        lambda: _evaluate_raised(mdp, rewards, gamma, sweep, least, zeros, uniform_policy(rewards), MAX_SWEEPS),
        lambda: Swept(zeros, jnp.int32(0), jnp.asarray(jnp.inf, zeros.dtype), jnp.bool_(False)),
    )


def _rests_among_losses(mdp: AnyMDP, rewards: Array, least: Array) -> Array:
    """[] bool, whether there are gains, losses, and a state in which one can rest for nothing, by its `resting_values`.

    Such a state keeps any value that it has come to. From zero that can be too high: a gain on the way out of it is
    seen a sweep before the loss behind that gain.
    """
    rests = (jnp.isfinite(least) & ~mdp.terminal).any()
    live = ~mdp.terminal[:, None]
    return rests & ((rewards > 0) & live).any() & ((rewards < 0) & live).any()


def _evaluate_raised(
    mdp: AnyMDP,
    rewards: Array,
    gamma: Scalar,
    sweep: Sweep,
    least: Array,
    values: Array,
    policy: Array,
    max_sweeps: Array | int,
) -> Swept:
    """The values of a policy, by sweeps from `values`, raised to the `resting_values` `least`."""
    swept = sweep(evaluation_backup(mdp, rewards, policy, gamma), values, max_sweeps)
    return swept._replace(values=jnp.maximum(swept.values, least))


def uniform_policy(rewards: Array) -> Array:
    """The uniform policy, `[S, A]`."""
    return jnp.full(rewards.shape, 1 / rewards.shape[1], rewards.dtype)


def sweep_until_converged(
    order: Order, gamma: Scalar, tolerance: Scalar, backup: Backup, values: Array, max_sweeps: Array | int
) -> Swept:
    """Sweep until the values are within the tolerance of the backup's fixed point."""

    def goes_on(swept: Swept) -> Array:
        return swept.unfinished & (swept.sweeps < max_sweeps)

    def sweep(swept: Swept) -> Swept:
        after = order(backup, swept.values)
        change = jnp.abs(after - swept.values).max()
        return Swept(after, swept.sweeps + 1, change, change > smallest_change(after, gamma, tolerance))

    start = Swept(values, jnp.int32(0), jnp.asarray(jnp.inf, values.dtype), jnp.bool_(True))
    return lax.while_loop(goes_on, sweep, start)


def smallest_change(values: Array, gamma: Scalar, tolerance: Scalar) -> Array:
    """A sweep that changes less is the last: tolerance (1 - gamma) / gamma, or the rounding of the values.

    With a bound of 4 eps instead of 8 the sweeps over a grid of a million cells never ended: their changes stay at 5.
    """
    gamma = jnp.asarray(gamma, values.dtype)
    inside = jnp.where((gamma > 0) & (gamma < 1), gamma, 0.5)
    bound = jnp.where(gamma < 1, tolerance * (1 - inside) / inside, tolerance)
    return jnp.maximum(bound, 8 * jnp.finfo(values.dtype).eps * jnp.abs(values).max())


def optimality_backup(mdp: AnyMDP, rewards: Array, gamma: Scalar) -> Backup:
    """max_a q(s, a); `rewards` are the expected ones, [S, A]."""
    return lambda values, s: _live(mdp, rewards[s] + gamma * expected_next_values(mdp, values, s), s).max(-1)


def evaluation_backup(mdp: AnyMDP, rewards: Array, policy: Array, gamma: Scalar) -> Backup:
    """sum_a pi(a|s) q(s, a); `rewards` are the expected ones, [S, A]."""

    def backup(values: Array, s: Array | slice) -> Array:
        q = _live(mdp, rewards[s] + gamma * expected_next_values(mdp, values, s), s)
        return (policy[s] * q).sum(-1)

    return backup


def _live(mdp: AnyMDP, q: Array, s: Array | slice = slice(None)) -> Array:
    """Action values of the states `s`, 0 in terminal ones."""
    return jnp.where(mdp.terminal[s][..., None], 0.0, q)
