"""The record DeepQ, and the learner that runs every algorithm of `dqn`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jaxpg.errors import UserError, check_functions, check_numbers, check_record, excerpt
from jaxpg.models.networks import zero_obs
from jaxpg.rollout import make_actor
from jaxpg.rollout.collector import Collector, RolloutStats
from jaxpg.rollout.metrics import episode_metrics, logged
from jaxpg.types import (
    Actor,
    Array,
    Env,
    Experience,
    Key,
    Learner,
    Metrics,
    Params,
    Policy,
    Rollout,
    Scalar,
    Tree,
)
from jaxpg.update.optimizers import checked_optimizer
from jaxpg.user_input.domains import check_scalars
from jaxpg.values.q_networks import QNetwork, epsilon_greedy_policy, q_network
from jaxpg.values.replay import Sampling
from jaxpg.vectorize import copy_tree


class DeepQ(NamedTuple):
    """An algorithm that learns action values with a network, and acts epsilon-greedily. One iteration is

        rollout ~ collect(epsilon-greedy policy of Q)
        target = n-step rewards + gamma^n Q_target(s', argmax_a selector(Q, Q_target)(s', a))
        params <- params - learning_rate optimizer(gradient of loss(Q(s, a), target))

    as often as `learn` says, on steps of a replay buffer or on those of the rollout itself.

    gamma: discount.
    n_steps: rewards in a target before it bootstraps (static), for steps of a replay buffer.
    epsilon: environment steps so far -> share of random actions.
    collector: how experience is gathered, a continuing rollout.
    head: number of actions -> the last layers of the network (q_networks.py).
    selector: whose values choose the successor's action, two arrays `[R, A]` -> `[R, A]` (targets.py).
    loss: estimates and targets -> the loss of each row (targets.py).
    sampling: how rows are drawn from the replay buffer (replay.py), None without a buffer.
    move_target: target network, parameters, updates so far -> target network (targets.py); None for targets by the
        network itself.
    learn: what an iteration does with experience (replay_learning.py, rollout_learning.py).
    optimizer: () -> optax transformation whose updates point uphill and contain no learning rate.
    learning_rate: environment steps so far -> step size.
    """

    gamma: Scalar
    n_steps: int
    epsilon: Callable[[Array], Array]
    collector: Collector
    head: Callable[..., nn.Module]
    selector: Callable[[Array, Array], Array]
    loss: Callable[[Array, Array], Array]
    sampling: Sampling | None
    move_target: Callable[[Tree, Tree, Array], Tree] | None
    learn: LearnFromExperience
    optimizer: Callable[[], optax.GradientTransformation]
    learning_rate: Callable[[Array], Array]


class Parts(NamedTuple):
    """The parts of a learner that do not change during training."""

    env: Env
    network: QNetwork
    algorithm: DeepQ
    optimizer: optax.GradientTransformation

    def policy(self, steps: Array) -> Policy:
        """The policy that acts after `steps` environment steps."""
        return epsilon_greedy_policy(self.network, self.algorithm.epsilon(steps))

    def collect(self, state: DeepQState, key: Key) -> tuple[Tree, Rollout, RolloutStats]:
        """A rollout of the policy as it is now."""
        collect, policy = self.algorithm.collector.collect, self.policy(state.steps)
        return collect(self.env, policy, state.params.policy, state.runner.collector, key)


class RunnerState(NamedTuple):
    """What belongs to single environments, leaves `[B, ...]`, split over devices.

    collector: the environments and their observations.
    replay: of `learn`: the replay buffer, `()` without one.
    """

    collector: Tree
    replay: Tree


class DeepQState(NamedTuple):
    """Everything that a run carries from iteration to iteration.

    params: those of the network, as the policy's.
    target: those of the target network, `()` without one.
    updates: gradient steps so far, int32.
    steps: environment steps so far, int32.
    """

    params: Params
    target: Tree
    opt_state: Tree
    runner: RunnerState
    updates: Array
    steps: Array


class LearnFromExperience(NamedTuple):
    """What an iteration does.

    init(parts, collector) -> the replay buffer, `()` without one; `collector` are the environments of all devices.
    step(parts, state, key) -> state, RolloutStats, metrics: one iteration.
    experience(parts, state, key) -> Rollout: all steps that `step` takes with the same arguments.
    """

    init: Callable[[Parts, Tree], Tree]
    step: Callable[[Parts, DeepQState, Key], tuple[DeepQState, RolloutStats, Metrics]]
    experience: Callable[[Parts, DeepQState, Key], Rollout]


def deep_q(env: Env, torso: nn.Module, algorithm: DeepQ) -> Learner:
    """The learner of `algorithm` on `env`.

    Args:
        env: the environment, whose actions are discrete.
        torso: observations to features (`q_networks.mlp`, `q_networks.cnn`).
        algorithm: the algorithm (dqn.py).

    Raises:
        UserError: the actions of the environment are not discrete, an argument or a field of the algorithm is of
            another kind or out of range, or the updates of the optimizer have the sign in them. `init` raises one if
            the head does not give estimates of every action.
    """
    check_record("deep_q", env, Env, 'envs.make("CartPole-v1")')
    check_record("deep_q", algorithm, DeepQ, "values.dqn()")
    if not isinstance(torso, nn.Module):
        raise UserError(f"deep_q takes a torso, a module of flax: values.mlp(env), not {excerpt(torso)}.")
    _check_fields(algorithm)
    network = q_network(env, torso, algorithm.head)
    parts = Parts(env, network, algorithm, checked_optimizer(algorithm.optimizer))

    def actor(state: DeepQState) -> Actor:
        return make_actor(parts.policy(state.steps), state.params.policy)

    def with_policy(state: DeepQState, params: Tree) -> DeepQState:
        target = copy_tree(params) if algorithm.move_target else ()
        return state._replace(params=Params(copy_tree(params), ()), target=target)

    def collect(state: DeepQState, key: Key) -> tuple[Rollout, Array]:
        return algorithm.learn.experience(parts, state, key), state.runner.collector.episode_length

    experience = None if env.host else Experience(env, collect)  # the host checks its numbers
    return Learner(partial(_init, parts), partial(_step, parts), actor, with_policy, experience)


def _check_fields(algorithm: DeepQ) -> None:
    """Refuse fields of another kind, and a collector and a number of steps that the targets cannot be made with."""
    check_record("deep_q", algorithm.collector, Collector, "rollout.continuing(...)")
    check_record("deep_q", algorithm.learn, LearnFromExperience, "that of values.dqn()")
    if algorithm.sampling is not None:
        check_record("deep_q", algorithm.sampling, Sampling, "that of values.dqn()")
    check_functions(algorithm, ("epsilon", "head", "selector", "loss", "optimizer", "learning_rate"))
    if algorithm.move_target is not None:
        check_functions(algorithm, ("move_target",))
    check_numbers(algorithm, ("gamma",))
    check_scalars({"gamma": algorithm.gamma})
    if type(algorithm.n_steps) is not int or algorithm.n_steps < 1:
        raise UserError(f"n_steps must be an integer, at least 1, not {excerpt(algorithm.n_steps)}.")
    if algorithm.collector.whole_episodes:
        raise UserError(
            "A DeepQ learns from steps, and its collector returns whole episodes, padding included: collect with "
            "rollout.continuing."
        )


def _init(parts: Parts, key: Key) -> DeepQState:
    """A new network, optimizer state and environments; an empty buffer."""
    algorithm = parts.algorithm
    network_key, collector_key = jax.random.split(key)
    params = Params(parts.network.init(network_key), ())
    _check_estimates(parts, params.policy)
    steps = jnp.zeros((), jnp.int32)
    collector = algorithm.collector.init(parts.env, parts.policy(steps), params.policy, collector_key)
    return DeepQState(
        params=params,
        target=copy_tree(params.policy) if algorithm.move_target else (),
        opt_state=parts.optimizer.init(params),
        runner=RunnerState(collector, algorithm.learn.init(parts, collector)),
        updates=jnp.zeros((), jnp.int32),
        steps=steps,
    )


def _check_estimates(parts: Parts, params: Tree) -> None:
    """Refuse a head that gives something else than estimates of every action: what is too many would be acted by."""
    found = jax.eval_shape(parts.network.returns, params, zero_obs(parts.env))
    actions = parts.env.action_space.n  # type: ignore[union-attr]  # `q_network` has refused others
    if getattr(found, "ndim", None) != 2 or found.shape[0] != actions or not jnp.issubdtype(found.dtype, jnp.floating):
        given = f"an array {list(found.shape)} of {found.dtype}" if hasattr(found, "dtype") else excerpt(found)
        raise UserError(
            f"The head of a DeepQ gives [actions, estimates] real numbers, [{actions}, 1] here or more estimates, not "
            f"{given}."
        )


def _step(parts: Parts, state: DeepQState, key: Key) -> tuple[DeepQState, Metrics]:
    """One iteration, and what it measured."""
    state, stats, metrics = parts.algorithm.learn.step(parts, state, key)
    metrics = {
        **metrics,
        **episode_metrics(stats),
        "learning_rate": parts.algorithm.learning_rate(state.steps),
        "epsilon": parts.algorithm.epsilon(state.steps),
    }
    return state, logged(metrics, state.steps)


def epsilon_decay(steps: Array, *, start: Scalar, end: Scalar, over: int) -> Array:
    """From `start` to `end` linearly over the first `over` environment steps, then `end` (Mnih et al. 2015)."""
    return end + (start - end) * jnp.maximum(1 - steps / over, 0.0)
