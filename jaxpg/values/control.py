"""Control without a model: SARSA and its children, each its parent with one thing changed.

All are records of `tabular_control.TabularControl`. They learn action values in a table while they act, from single
steps or from n of them. Source: Sutton & Barto 2018, chapters 6 and 7.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypedDict, Unpack

from jaxpg.ladder_settings import child_of, root
from jaxpg.types import Array, Scalar
from jaxpg.update.optimizers import annealed
from jaxpg.values.deep_q import epsilon_decay
from jaxpg.values.tabular_control import TabularControl


class SarsaSettings(TypedDict, total=False):
    """What every descendant of `sarsa` inherits."""

    num_envs: int
    num_steps: int
    learning_rate: Scalar
    anneal_steps: int | None
    gamma: Scalar
    epsilon_start: Scalar
    epsilon_end: Scalar
    epsilon_steps: int
    initial_value: Scalar


def of_next_action(q_selector: Array, q_value: Array, action: Array, epsilon: Array) -> Array:
    """Q(s', a') of the action that the policy takes next. Arguments as in `TabularControl.bootstrap`."""
    return q_value[action]


def of_policy(q_selector: Array, q_value: Array, action: Array, epsilon: Array) -> Array:
    """sum_a pi(a|s') Q(s', a) of the epsilon-greedy policy: (1 - epsilon) Q(s', a*) + epsilon mean_a Q(s', a)."""
    return (1 - epsilon) * q_value[q_selector.argmax()] + epsilon * q_value.mean()


def of_best_action(q_selector: Array, q_value: Array, action: Array, epsilon: Array) -> Array:
    """max_a Q(s', a): the value of the greedy policy, whatever the policy does next."""
    return q_value[q_selector.argmax()]


@root
def sarsa(
    *,
    num_envs: int = 1,
    num_steps: int = 200,
    learning_rate: Scalar = 0.1,
    anneal_steps: int | None = None,
    gamma: Scalar = 0.99,
    epsilon_start: Scalar = 1.0,
    epsilon_end: Scalar = 0.05,
    epsilon_steps: int = 50_000,
    initial_value: Scalar = 0.0,
) -> TabularControl:
    """SARSA (Rummery and Niranjan 1994): the values of the policy that acts, in a table.

        Q(s, a) <- Q(s, a) + alpha (r + gamma Q(s', a') - Q(s, a)),    a' ~ epsilon-greedy in s'

    A time-out bootstraps from its true successor, with the action that the policy would take there; a termination does
    not. A step size that falls to zero lets the noise of single rewards average out. It falls with the environment
    steps, as in the other ladders, and not with the visits to a pair, which would need a second table.

    Args:
        num_envs: environments side by side, over all devices; the table takes the mean of those in the same state.
        num_steps: steps of each environment in one iteration, over which metrics are averaged; it changes nothing else.
        learning_rate: the step size alpha.
        anneal_steps: environment steps over which the step size falls linearly to zero; none for a constant one.
        gamma: discount.
        epsilon_start: share of random actions at the start.
        epsilon_end: share of random actions after `epsilon_steps`.
        epsilon_steps: environment steps over which the share of random actions falls linearly.
        initial_value: of all actions; one that is larger than any return makes the policy try all of them.
    """
    return TabularControl(
        gamma=gamma,
        num_envs=num_envs,
        num_steps=num_steps,
        epsilon=partial(epsilon_decay, start=epsilon_start, end=epsilon_end, over=epsilon_steps),
        initial_value=initial_value,
        num_tables=1,
        n_steps=1,
        bootstrap=of_next_action,
        learning_rate=annealed(learning_rate, anneal_steps),
    )


@child_of(sarsa)
def expected_sarsa(**inherited: Unpack[SarsaSettings]) -> TabularControl:
    """Expected SARSA (van Seijen et al. 2009): the mean over the next action in place of the one that is taken.

        target = r + gamma sum_a pi(a|s') Q(s', a)

    Its targets have the mean of those of SARSA and less variance.
    """
    return sarsa(**inherited)._replace(bootstrap=of_policy)


@child_of(sarsa)
def q_learning(**inherited: Unpack[SarsaSettings]) -> TabularControl:
    """Q-learning (Watkins 1989): the values of the greedy policy, learned while another one explores.

        target = r + gamma max_a Q(s', a)

    It learns about the greedy policy from the actions of another, so it is off-policy.
    """
    return sarsa(**inherited)._replace(bootstrap=of_best_action)


@child_of(q_learning)
def double_q_learning(**inherited: Unpack[SarsaSettings]) -> TabularControl:
    """Double Q-learning (van Hasselt 2010): two tables; one chooses the successor's action, the other rates it.

        target of Q_1 = r + gamma Q_2(s', argmax_a Q_1(s', a)),    and the other way round

    A coin decides at every step which of the two changes. The policy is epsilon-greedy in their mean. The largest of
    several noisy estimates is too large on average; the estimate of another table is not.
    """
    return q_learning(**inherited)._replace(num_tables=2)


@child_of(sarsa)
def n_step_sarsa(*, n_steps: int = 4, **inherited: Unpack[SarsaSettings]) -> TabularControl:
    """n-step SARSA (Sutton & Barto 2018, section 7.2): targets of n rewards, which end with their episode.

        target = r_t + gamma r_{t+1} + ... + gamma^{n-1} r_{t+n-1} + gamma^n Q(s_{t+n}, a_{t+n})

    Args:
        n_steps: rewards in a target.
    """
    return sarsa(**inherited)._replace(n_steps=n_steps)


TABULAR_ALGORITHMS: dict[str, Callable[..., TabularControl]] = {
    algorithm.__name__: algorithm for algorithm in (sarsa, expected_sarsa, q_learning, double_q_learning, n_step_sarsa)
}
