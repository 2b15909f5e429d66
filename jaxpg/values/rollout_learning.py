"""Learning from the rollout itself (PQN): lambda-returns from the current network, then epochs of minibatches."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.objectives import advantages, loss_weights, returns
from jaxpg.rollout.collector import RolloutStats
from jaxpg.rollout.successors import rollout_values
from jaxpg.types import Array, Episodes, Key, Metrics, Params, Rollout, Scalar, Tree
from jaxpg.update import Batch, Objective, minibatch_epochs
from jaxpg.update.objective import per_step
from jaxpg.values.deep_q import DeepQState, LearnFromExperience, Parts
from jaxpg.values.targets import pick


class RolloutSettings(NamedTuple):
    """The settings of learning from a rollout.

    lambda_: of the lambda-returns.
    epochs, num_minibatches, chunk_rows: of `update.minibatch_epochs`.
    """

    lambda_: Scalar
    epochs: int
    num_minibatches: int
    chunk_rows: int | None


def from_rollout(settings: RolloutSettings) -> LearnFromExperience:
    """PQN's loop (Gallici et al. 2024, algorithm 1): a rollout, its lambda-returns, and epochs of minibatches of it."""
    return LearnFromExperience(_no_buffer, partial(_iterate, settings), _experience)


def _no_buffer(parts: Parts, collector: Tree) -> tuple[()]:
    return ()


def _iterate(
    settings: RolloutSettings, parts: Parts, state: DeepQState, key: Key
) -> tuple[DeepQState, RolloutStats, Metrics]:
    """Collect, compute targets once, and take the gradient steps."""
    algorithm = parts.algorithm
    collect_key, update_key = jax.random.split(key)
    collector, rollout, stats = parts.collect(state, collect_key)
    target = lambda_targets(parts, state.params.policy, rollout, settings.lambda_)
    params, opt_state, metrics = minibatch_epochs(
        _objective(parts),
        parts.optimizer,
        algorithm.learning_rate(state.steps),
        state.params,
        state.opt_state,
        _batch(rollout, target),
        update_key,
        epochs=settings.epochs,
        num_minibatches=settings.num_minibatches,
        chunk_rows=settings.chunk_rows,
        lifted=False,  # the network has layer normalisation
    )
    state = state._replace(
        params=params,
        opt_state=opt_state,
        runner=state.runner._replace(collector=collector),
        updates=state.updates + metrics["updates"].astype(jnp.int32),
        steps=state.steps + stats.steps.astype(jnp.int32),
    )
    return state, stats, metrics


def _experience(parts: Parts, state: DeepQState, key: Key) -> Rollout:
    """The rollout of an iteration."""
    return parts.collect(state, jax.random.split(key)[0])[1]


def lambda_targets(parts: Parts, params: Tree, rollout: Rollout, lambda_: Scalar) -> Array:
    """G_t = r_t + gamma discount_t ((1 - lambda) max_a Q(s_{t+1}, a) + lambda G_{t+1}), `[T, B]`.

    Traces are not cut where the action explored (Peng's Q(lambda)). Source: Gallici et al. 2024, section 4.
    """
    steps = rollout.steps

    def value(obs: Tree) -> Array:
        return parts.network.values(params, obs).max(-1)

    _, v_t = rollout_values(rollout, value)
    return returns.lambda_returns(steps.reward, steps.discount, steps.last, v_t, parts.algorithm.gamma, lambda_)


def _batch(rollout: Rollout, target: Array) -> Batch:
    """The part of a rollout that the loss reads: observations, actions and targets, all steps of the same weight."""
    unread: Any = ()
    steps = rollout.steps._replace(log_prob=unread, reward=unread, discount=unread, last=unread, mask=unread)
    return Batch(
        rollout=rollout._replace(steps=steps, final_obs=(), episodes=Episodes()),
        advantage=(),
        target=target,
        old_value=(),
        weight=loss_weights.per_step(rollout.loss_mask),
        minibatch_weight=(),
        reference_log_prob=(),
    )


def _objective(parts: Parts) -> Objective:
    """The loss of Q(s, a) to its target, in the form of the ladder's updates."""

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)  # [1, R, ...]: see `summed_gradient`
        steps = batch.rollout.steps
        prediction = pick(parts.network.returns(params.policy, steps.obs), steps.action)
        errors = per_step("algorithm's loss", parts.algorithm.loss(prediction, batch.target[:, None]), batch.weight)
        total = (batch.weight * errors).sum()
        q_value = (batch.minibatch_weight * prediction.mean(-1)).sum()
        return total, lax.stop_gradient({"td_loss": total, "q_value": q_value})

    return Objective(
        policy_loss=loss,
        value_loss=None,
        distribution=lambda params, batch: None,
        normalize=advantages.unchanged,
        needs_trajectories=False,
    )
