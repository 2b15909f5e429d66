"""The reward model: a score for completions, learned from which of two a judge preferred."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpg.errors import UserError
from jaxpg.models.language_model import RewardModel
from jaxpg.preferences.losses import bradley_terry, preferred
from jaxpg.preferences.pairs import Pairs, interleave_pairs, split_pairs
from jaxpg.preferences.supervised import SupervisedBatch, supervised
from jaxpg.types import Actor, Array, Key, Learner, Metrics, Params, Rollout, Tree


def reward_model(
    pairs: Pairs,
    scorer: RewardModel,
    *,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    anneal_steps: int | None = None,
    max_grad_norm: float | None = 1.0,
    micro_batches: int = 1,
    margin: float = 0.0,
    centring: float = 0.01,
) -> Learner:
    """A reward model from preference pairs (Ouyang et al. 2022, section 3.5, step 2; Llama 2, section 3.2.2).

        loss = mean over pairs of -log σ(r_chosen - r_rejected - margin) + centring (r_chosen + r_rejected)²

    Its parameters are those of the scorer, in the place of the critic's: there is no policy in it. It can adopt a
    policy's network, on which it then puts its own head.

    Args:
        pairs: what it learns from.
        scorer: what learns.
        batch_size: pairs per step, over all devices.
        learning_rate: step size of Adam.
        anneal_steps: completion tokens over which the step size falls linearly to zero; constant if not given.
        max_grad_norm: the gradient is scaled down to this global norm.
        micro_batches: sum the gradient over so many parts of the batch, one at a time; the result is the same.
        margin: by how much the chosen completion's score is to exceed that of the rejected one.
        centring: weight of the term that keeps the scores of a pair around zero.

    Raises:
        UserError: a batch that cannot be cut into equal parts; where an actor is asked for.
    """

    def draw(keys: Array) -> Rollout:
        return interleave_pairs(jax.vmap(pairs.draw)(keys), end=pairs.end)

    def loss(params: Params, _: Tree, examples: SupervisedBatch) -> tuple[Array, Metrics]:
        chosen, rejected = split_pairs(scorer.score(params.critic, examples.rollout))
        total = bradley_terry(chosen, rejected, margin=margin, centring=centring).sum() / batch_size
        metrics = {
            "loss": total,
            "accuracy": preferred(chosen, rejected).sum() / batch_size,
            "reward_chosen": chosen.sum() / batch_size,
            "reward_rejected": rejected.sum() / batch_size,
        }
        return total, metrics

    return supervised(
        lambda key: Params((), scorer.init(key)),
        draw,
        loss,
        _refuse_to_play,
        adopted=lambda own, policy: Params((), _under_own_head(own.critic, policy)),
        batch_size=batch_size,
        learning_rate=learning_rate,
        anneal_steps=anneal_steps,
        max_grad_norm=max_grad_norm,
        micro_batches=micro_batches,
    )


def held_out_accuracy(pairs: Pairs, scorer: RewardModel, params: Tree, key: Key, *, num_pairs: int = 256) -> Array:
    """The share of held-out pairs of which the judge's choice has the higher score, [] float32; ties count half.

    `params` are the scorer's: `state.params.critic` of a reward model. A judge who errs keeps it below 1.
    """
    rollout = interleave_pairs(jax.vmap(pairs.held_out)(jax.random.split(key, num_pairs)), end=pairs.end)
    return preferred(*split_pairs(scorer.score(params, rollout))).mean()


def _under_own_head(own: Tree, policy: Tree) -> Tree:
    """A policy's network with the scorer's head in the place of the one that makes logits."""
    adopted = {"params": {**policy["params"], "head": own["params"]["head"]}}
    if jax.tree.map(jnp.shape, adopted) != jax.tree.map(jnp.shape, own):
        raise UserError(
            "The policy has another network than the reward model. Give the reward model the width, layers, heads, "
            "kv_heads and expansion of the policy that it begins with."
        )
    return adopted


def _refuse_to_play(params: Params) -> Actor:
    raise UserError(
        "A reward model scores completions and writes none, so it cannot be played or evaluated by episodes. Evaluate "
        "a policy, or measure the reward model by its accuracy on held-out pairs."
    )
