"""DQN and its children, each its parent with one thing changed; all are records of `deep_q.DeepQ`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypedDict, Unpack

from jaxpg import rollout
from jaxpg.ladder_settings import child_of, root
from jaxpg.types import Array, Scalar
from jaxpg.update.optimizers import adam, annealed
from jaxpg.values import targets
from jaxpg.values.deep_q import DeepQ, epsilon_decay
from jaxpg.values.prioritized import prioritized
from jaxpg.values.q_networks import DuelingHead, LinearHead
from jaxpg.values.replay import uniform
from jaxpg.values.replay_learning import ReplaySettings, from_replay
from jaxpg.values.rollout_learning import RolloutSettings, from_rollout

DQN_FLAT_BELOW = 2**14
"""Parameters from which on Adam updates array by array. Gradient steps on a few rows are many, and copying 130,000
parameters into a vector takes as long as such a step (benchmarks/LOG.md, "DQN with a convolution")."""


class RootSettings(TypedDict, total=False):
    """What every descendant of `dqn` inherits."""

    num_envs: int
    learning_rate: Scalar
    anneal_steps: int | None
    max_grad_norm: Scalar | None
    adam_eps: Scalar
    gamma: Scalar
    epsilon_start: Scalar
    epsilon_end: Scalar
    epsilon_steps: int


class LossFreeDQNSettings(RootSettings, total=False):
    """The settings of `dqn` except that of its loss."""

    train_frequency: int
    gradient_steps: int
    repeats: int
    buffer_size: int
    batch_size: int
    learning_starts: int
    target_period: int
    target_rate: Scalar


class DQNSettings(LossFreeDQNSettings, total=False):
    """All of `dqn`."""

    huber_threshold: Scalar | None


@root
def dqn(
    *,
    num_envs: int = 8,
    learning_rate: Scalar = 2.5e-4,
    anneal_steps: int | None = None,
    max_grad_norm: Scalar | None = 10.0,
    adam_eps: Scalar = 1e-8,
    gamma: Scalar = 0.99,
    epsilon_start: Scalar = 1.0,
    epsilon_end: Scalar = 0.05,
    epsilon_steps: int = 50_000,
    train_frequency: int = 1,
    gradient_steps: int = 1,
    repeats: int = 64,
    buffer_size: int = 50_000,
    batch_size: int = 64,
    learning_starts: int = 1_000,
    target_period: int = 200,
    target_rate: Scalar = 1.0,
    huber_threshold: Scalar | None = 1.0,
) -> DeepQ:
    """Deep Q-network (Mnih et al. 2015): Q-learning from a replay buffer, towards a target network.

        target = r + gamma max_a Q_target(s', a),    loss = huber(target - Q(s, a))

    A time-out bootstraps from its true successor, a termination does not.

    Args:
        num_envs: parallel environments, over all devices.
        learning_rate: step size of Adam.
        anneal_steps: environment steps over which the learning rate falls linearly to zero; none for a constant one.
        max_grad_norm: the gradient is scaled down to this global norm; none for no limit.
        adam_eps: added by Adam to the root of the second moment, so that small gradients make small steps.
        gamma: discount.
        epsilon_start: share of random actions at the start.
        epsilon_end: share of random actions after `epsilon_steps`.
        epsilon_steps: environment steps over which the share of random actions falls linearly.
        train_frequency: steps of each environment between gradient steps.
        gradient_steps: gradient steps, each on a batch of its own, after these.
        repeats: rounds of the two in one iteration, over which metrics are averaged; it changes nothing else.
        buffer_size: environment steps that the replay buffer holds, over all environments.
        batch_size: steps per batch, over all devices.
        learning_starts: environment steps before the first gradient step.
        target_period: gradient steps between two updates of the target network.
        target_rate: share of the way the target network moves then; with period 1, the rate of Polyak averaging.
        huber_threshold: errors count linearly from here on; none for squared errors. Where most errors are larger, Q
            learns medians of the targets in place of means: on CartPole, with returns of a hundred, 1 diverges.
    """
    return DeepQ(
        gamma=gamma,
        n_steps=1,
        epsilon=partial(epsilon_decay, start=epsilon_start, end=epsilon_end, over=epsilon_steps),
        collector=rollout.continuing(num_envs=num_envs, num_steps=train_frequency),
        head=LinearHead,
        selector=targets.by_target_network,
        loss=_error_loss(huber_threshold),
        sampling=uniform(),
        move_target=partial(targets.move_target, period=target_period, rate=target_rate),
        learn=from_replay(ReplaySettings(buffer_size, batch_size, learning_starts, gradient_steps, repeats)),
        optimizer=partial(adam, max_grad_norm=max_grad_norm, eps=adam_eps, flat_below=DQN_FLAT_BELOW),
        learning_rate=annealed(learning_rate, anneal_steps),
    )


def _error_loss(threshold: Scalar | None) -> Callable[[Array, Array], Array]:
    return targets.squared_loss if threshold is None else partial(targets.huber_loss, threshold=threshold)


@child_of(dqn)
def double_dqn(**inherited: Unpack[DQNSettings]) -> DeepQ:
    """Double DQN (van Hasselt et al. 2016): the learning network chooses the successor's action, the target rates it.

        target = r + gamma Q_target(s', argmax_a Q(s', a))

    The largest of several noisy estimates is too large on average; the estimate of another network is not.
    """
    return dqn(**inherited)._replace(selector=targets.by_online_network)


@child_of(dqn)
def dueling_dqn(**inherited: Unpack[DQNSettings]) -> DeepQ:
    """Dueling DQN (Wang et al. 2016): the network adds a state value and advantages of mean 0.

        Q(s, a) = V(s) + A(s, a) - mean_a' A(s, a')    (equation 9)

    Without the mean, V and A would be determined only up to a constant.
    """
    return dqn(**inherited)._replace(head=DuelingHead)


@child_of(dqn)
def n_step_dqn(*, n_steps: int = 3, **inherited: Unpack[DQNSettings]) -> DeepQ:
    """DQN with n-step targets (Hessel et al. 2018), which end with their episode.

        target = r_t + gamma r_{t+1} + ... + gamma^n max_a Q_target(s_{t+n}, a)

    The rewards are those of the policy of that time; as usual, they are not corrected for that.

    Args:
        n_steps: rewards in a target.
    """
    return dqn(**inherited)._replace(n_steps=n_steps)


@child_of(dqn)
def prioritized_dqn(
    *,
    priority_alpha: Scalar = 0.6,
    priority_beta: Scalar = 0.4,
    beta_steps: int = 500_000,
    **inherited: Unpack[DQNSettings],
) -> DeepQ:
    """Prioritised replay (Schaul et al. 2016): steps with a large error are drawn more often, and count less.

        P(i) ~ |TD error_i|^alpha,    weight_i ~ (1 / P(i))^beta

    Args:
        priority_alpha: from 0, all steps equally likely, to 1, in proportion to the error.
        priority_beta: at the start; 1 removes the bias of drawing some steps more often.
        beta_steps: environment steps over which beta rises linearly to 1.
    """
    return dqn(**inherited)._replace(sampling=prioritized(alpha=priority_alpha, beta=priority_beta, over=beta_steps))


@child_of(dqn)
def qr_dqn(*, quantiles: int = 50, huber_threshold: Scalar = 1.0, **inherited: Unpack[LossFreeDQNSettings]) -> DeepQ:
    """Quantile regression DQN (Dabney et al. 2018): the distribution of the return, as quantiles.

        loss = sum_i mean_j |tau_i - 1(u_ij < 0)| huber(u_ij) / huber_threshold,
        u_ij = r + gamma theta_j(s', a*) - theta_i(s, a)

    Q is the mean of the quantiles. Unlike C51 it needs no bounds on returns. The source has 200 quantiles.

    Args:
        quantiles: numbers per action.
    """
    return dqn(**inherited)._replace(
        head=partial(LinearHead, quantiles=quantiles),
        loss=partial(targets.quantile_huber_loss, threshold=huber_threshold),
    )


@child_of(dqn)
def rainbow(
    *,
    n_steps: int = 3,
    priority_alpha: Scalar = 0.5,
    priority_beta: Scalar = 0.4,
    beta_steps: int = 500_000,
    quantiles: int = 50,
    huber_threshold: Scalar = 1.0,
    **inherited: Unpack[LossFreeDQNSettings],
) -> DeepQ:
    """Rainbow (Hessel et al. 2018) with quantiles for C51 and without noisy nets: all changes above at once.

    Args:
        n_steps: rewards in a target.
        priority_alpha: from 0, all steps equally likely, to 1, in proportion to the error.
        priority_beta: at the start; 1 removes the bias of drawing some steps more often.
        beta_steps: environment steps over which beta rises linearly to 1.
        quantiles: numbers per action.
    """
    return dqn(**inherited)._replace(
        selector=targets.by_online_network,
        head=partial(DuelingHead, quantiles=quantiles),
        n_steps=n_steps,
        sampling=prioritized(alpha=priority_alpha, beta=priority_beta, over=beta_steps),
        loss=partial(targets.quantile_huber_loss, threshold=huber_threshold),
    )


@child_of(dqn, num_envs=128, learning_rate=5e-4)
def pqn(
    *,
    num_steps: int = 32,
    gae_lambda: Scalar = 0.65,
    epochs: int = 2,
    num_minibatches: int = 32,
    chunk_rows: int | None = None,
    reset_pool: int = 0,
    **inherited: Unpack[RootSettings],
) -> DeepQ:
    """Parallelised Q-network (Gallici et al. 2024): many environments in place of a buffer and a target network.

        G_t = r_t + gamma ((1 - lambda) max_a Q(s_{t+1}, a) + lambda G_{t+1}),    loss = (G_t - Q(s_t, a_t))^2 / 2

    in epochs of minibatches of the rollout. The network needs layer normalisation: network.layer_norm = true. The
    source has RAdam in place of Adam.

    Args:
        num_steps: steps of each environment between two updates.
        gae_lambda: from 0, one-step targets that rely on Q, to 1, all rewards of the segment.
        epochs: passes over the batch.
        num_minibatches: gradient steps per pass.
        chunk_rows: sum the gradient of a minibatch over chunks of at most this many rows, with the same result; none
            for a size that suits the machine.
        reset_pool: draw this many start states per environment and segment in advance, instead of one at every step.
    """
    parent = dqn(**inherited)
    return parent._replace(
        collector=rollout.continuing(num_envs=parent.collector.num_envs, num_steps=num_steps, reset_pool=reset_pool),
        loss=targets.squared_loss,
        sampling=None,
        move_target=None,
        learn=from_rollout(RolloutSettings(gae_lambda, epochs, num_minibatches, chunk_rows)),
    )


ALGORITHMS: dict[str, Callable[..., DeepQ]] = {
    algorithm.__name__: algorithm
    for algorithm in (dqn, double_dqn, dueling_dqn, n_step_dqn, prioritized_dqn, qr_dqn, rainbow, pqn)
}
