"""Direct preference optimization: a policy learns from preference pairs without a reward model."""

from __future__ import annotations

import jax

from jaxpg.errors import refuse_unknown
from jaxpg.policy_gradient import make_actor
from jaxpg.preferences.losses import PAIR_LOSSES, log_ratio_margin, preferred, sequence_log_prob
from jaxpg.preferences.pairs import Pairs, interleave_pairs, split_pairs
from jaxpg.preferences.supervised import SupervisedBatch, supervised
from jaxpg.types import Array, Learner, Metrics, Params, Policy, Rollout, Tree


def dpo(
    pairs: Pairs,
    policy: Policy,
    *,
    batch_size: int = 64,
    learning_rate: float = 3e-4,
    anneal_steps: int | None = None,
    max_grad_norm: float | None = 1.0,
    micro_batches: int = 1,
    beta: float = 0.1,
    loss: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Learner:
    """Direct preference optimization (Rafailov et al. 2023), IPO (Azar et al. 2023) or the hinge of SLiC.

        loss = mean over pairs of f(β h),    h = log π(y_c)/ref(y_c) - log π(y_r)/ref(y_r)

    The reference is the policy that it begins with, frozen. β log π/ref is the reward that the policy has come to
    stand for; metrics name its mean on the chosen and on the rejected completions, their difference (`margin`), and
    the share of pairs in which it agrees with the judge (`accuracy`). For IPO log-probabilities are means over tokens,
    in the metrics too, else sums.

    Args:
        pairs: what it learns from.
        policy: what learns.
        batch_size: pairs per step, over all devices.
        learning_rate: step size of Adam.
        anneal_steps: completion tokens over which the step size falls linearly to zero; constant if not given.
        max_grad_norm: the gradient is scaled down to this global norm.
        micro_batches: sum the gradient over so many parts of the batch, one at a time; the result is the same.
        beta: the smaller, the further the policy may move from the reference.
        loss: sigmoid, ipo or hinge.
        label_smoothing: probability with which a label is taken to be the wrong way round.

    Raises:
        UserError: an unknown loss, or a batch that cannot be cut into equal parts.
    """
    if loss not in PAIR_LOSSES:
        refuse_unknown("loss", loss, PAIR_LOSSES, " on preference pairs")
    pair_loss, per_token = PAIR_LOSSES[loss]

    def draw(keys: Array) -> Rollout:
        return interleave_pairs(jax.vmap(pairs.draw)(keys), end=pairs.end)

    def log_probs(params: Tree, rollout: Rollout) -> tuple[Array, Array]:
        log_prob = policy.evaluate(params, rollout).log_prob(rollout.steps.action)
        return split_pairs(sequence_log_prob(log_prob, rollout.loss_mask, per_token=per_token))

    def summed(params: Params, reference: Tree, examples: SupervisedBatch) -> tuple[Array, Metrics]:
        chosen, rejected = log_probs(params.policy, examples.rollout)
        ref_chosen, ref_rejected = log_probs(reference, examples.rollout)
        losses = pair_loss(chosen, rejected, ref_chosen, ref_rejected, beta=beta, label_smoothing=label_smoothing)
        metrics = {
            "loss": losses,
            "accuracy": preferred(chosen - ref_chosen, rejected - ref_rejected),
            "margin": beta * log_ratio_margin(chosen, rejected, ref_chosen, ref_rejected),
            "reward_chosen": beta * (chosen - ref_chosen),
            "reward_rejected": beta * (rejected - ref_rejected),
            "log_prob_chosen": chosen,
            "log_prob_rejected": rejected,
        }
        return losses.sum() / batch_size, {name: x.sum() / batch_size for name, x in metrics.items()}

    return supervised(
        lambda key: Params(policy.init(key), ()),
        draw,
        summed,
        lambda params: make_actor(policy, params.policy),
        with_reference=True,
        batch_size=batch_size,
        learning_rate=learning_rate,
        anneal_steps=anneal_steps,
        max_grad_norm=max_grad_norm,
        micro_batches=micro_batches,
    )
