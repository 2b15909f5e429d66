"""The reward model: a score for completions, learned from preference pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpg.errors import UserError, check_record
from jaxpg.models.language_model import RewardModel
from jaxpg.preferences.losses import bradley_terry, preferred
from jaxpg.preferences.pairs import Pairs, interleave_pairs, split_pairs
from jaxpg.preferences.supervised import SupervisedBatch, SupervisedSettings, supervised
from jaxpg.types import Actor, Array, Key, Learner, Metrics, Params, Rollout, Scalar, Tree
from jaxpg.user_input.domains import check_scalars


def reward_model(
    pairs: Pairs,
    model: RewardModel,
    *,
    batch_size: int = 64,
    learning_rate: Scalar = 1e-3,
    anneal_steps: int | None = None,
    max_grad_norm: float | None = 1.0,
    micro_batches: int = 1,
    margin: float = 0.0,
    centring: float = 0.01,
) -> Learner:
    """A reward model from preference pairs (Ouyang et al. 2022, section 3.5; Llama 2, section 3.2.2).

        loss = mean over pairs of -log σ(r_chosen - r_rejected - margin) + centring (r_chosen + r_rejected)²

    Its parameters are `Params.critic`; `Params.policy` is empty. It can start from a policy (`Learner.with_policy`),
    whose head it replaces by its own, or from the parameters of another reward model, which it trains on.

    Args:
        pairs: the source of preference pairs.
        model: the reward model to train.
        batch_size: pairs per step, over all devices.
        learning_rate: step size of Adam.
        anneal_steps: completion tokens over which the step size falls linearly to zero; constant if not given.
        max_grad_norm: the gradient is scaled down to this global norm.
        micro_batches: compute the gradient in this many parts of the batch, one at a time; the result is the same.
        margin: required difference between the scores of the chosen and the rejected completion.
        centring: weight of the term that keeps the scores of a pair around zero.

    Raises:
        UserError: pairs or a model that are none, a number outside of its domain (domains.py), or a batch that cannot
            be cut into equal parts; `Learner.actor` was called, as it has no policy.
    """
    check_record("reward_model", pairs, Pairs, "preferences.judged_pairs(...)")
    check_record("reward_model", model, RewardModel, "language.transformer_reward_model(env)")
    check_scalars({"margin": margin, "centring": centring})

    def draw(_: Tree, keys: Array) -> Rollout:
        return interleave_pairs(jax.vmap(pairs.draw)(keys), end=pairs.end)

    def loss(params: Params, _: Tree, batch: SupervisedBatch) -> tuple[Array, Metrics]:
        chosen, rejected = split_pairs(model.score(params.critic, batch.rollout))
        total = bradley_terry(chosen, rejected, margin=margin, centring=centring).sum() / batch_size
        metrics = {
            "loss": total,
            "accuracy": preferred(chosen, rejected).sum() / batch_size,
            "reward_chosen": chosen.sum() / batch_size,
            "reward_rejected": rejected.sum() / batch_size,
        }
        return total, metrics

    return supervised(
        lambda key: Params((), model.init(key)),
        draw,
        loss,
        refuse_actor,
        SupervisedSettings(batch_size, learning_rate, anneal_steps, max_grad_norm, micro_batches),
        from_policy=lambda params, begun: Params((), begin_with(begun, params.critic)),
    )


def held_out_accuracy(pairs: Pairs, model: RewardModel, params: Tree, key: Key, *, num_pairs: int = 256) -> Array:
    """The share of held-out pairs in which the chosen completion has the higher score, [] float32; ties count half.

    They are `num_pairs` new ones, or of stored ones as many different ones, all where they are no more. `params` are
    the model's: `state.params.critic` of a `reward_model`. The judge's errors keep it below 1.
    """
    rollout = interleave_pairs(pairs.some_held_out(key, num_pairs), end=pairs.end)
    return preferred(*split_pairs(model.score(params, rollout))).mean()


def begin_with(begun: Tree, reward_model: Tree) -> Tree:
    """The parameters that a reward model begins with: another one's as they are, or a policy's with its own head."""
    same = jax.tree.map(jnp.shape, begun) == jax.tree.map(jnp.shape, reward_model)
    return begun if same else replace_head(begun, reward_model)


def replace_head(policy: Tree, reward_model: Tree) -> Tree:
    """The parameters of a policy's network with the reward model's head in place of the one that computes logits."""
    replaced = {"params": {**policy["params"], "head": reward_model["params"]["head"]}}
    if jax.tree.map(jnp.shape, replaced) != jax.tree.map(jnp.shape, reward_model):
        raise UserError(
            "The policy has another network than the reward model. Give the reward model the same width, layers, "
            "heads, kv_heads and expansion as the policy that it starts from."
        )
    return replaced


def refuse_actor(params: Params) -> Actor:
    """The `Learner.actor` of a reward model: there is none."""
    raise UserError(
        "A reward model scores completions but does not generate them, so it has no episodes to play or evaluate. "
        "Evaluate a policy. How often it agrees with held-out pairs is its return in the metrics of the run; in Python "
        "preferences.held_out_accuracy measures it."
    )
