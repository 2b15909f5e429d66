"""Direct preference optimization: a policy learns from preference pairs without a reward model."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax

from jaxpg.errors import check_record, refuse_unknown
from jaxpg.models.generation import evaluate_completions
from jaxpg.preferences.losses import PAIR_LOSSES, log_ratio_margin, preferred, sequence_log_prob
from jaxpg.preferences.pairs import Pairs, interleave_pairs, split_pairs
from jaxpg.preferences.supervised import SupervisedBatch, SupervisedSettings, supervised
from jaxpg.rollout import make_actor
from jaxpg.types import Array, Key, Learner, Metrics, Params, Policy, Rollout, Scalar, Tree
from jaxpg.user_input.domains import check_scalars
from jaxpg.vectorize import copy_tree


class DPOSettings(NamedTuple):
    """The settings of the loss on pairs, see `dpo`."""

    loss: str
    beta: Scalar
    label_smoothing: Scalar


def dpo(
    pairs: Pairs,
    policy: Policy,
    *,
    batch_size: int = 64,
    learning_rate: Scalar = 3e-4,
    anneal_steps: int | None = None,
    max_grad_norm: float | None = 1.0,
    micro_batches: int = 1,
    beta: Scalar = 0.1,
    loss: str = "sigmoid",
    label_smoothing: Scalar = 0.0,
) -> Learner:
    """Direct preference optimization (Rafailov et al. 2023), IPO (Azar et al. 2023) or the hinge of SLiC.

        loss = mean over pairs of f(h; β),    h = log π(y_c)/ref(y_c) - log π(y_r)/ref(y_r)

    The reference is a frozen copy of the initial policy. β log π/ref is the policy's implicit reward; the metrics are
    its mean on the chosen and on the rejected completions (`reward_chosen`, `reward_rejected`), their difference
    (`margin`), and the share of pairs in which it agrees with the judge (`reward_accuracy`). For IPO all
    log-probabilities are means over tokens, in the metrics too; for the other losses they are sums.

    Args:
        pairs: the source of preference pairs.
        policy: the policy to train.
        batch_size: pairs per step, over all devices.
        learning_rate: step size of Adam.
        anneal_steps: completion tokens over which the step size falls linearly to zero; constant if not given.
        max_grad_norm: the gradient is scaled down to this global norm.
        micro_batches: compute the gradient in this many parts of the batch, one at a time; the result is the same.
        beta: the smaller, the further the policy may move from the reference.
        loss: sigmoid, ipo or hinge.
        label_smoothing: the assumed probability that a label is wrong.

    Raises:
        UserError: pairs or a policy that are none, an unknown loss, a number outside of its domain (domains.py), or a
            batch that cannot be cut into equal parts.
    """
    check_record("dpo", pairs, Pairs, "preferences.judged_pairs(...)")
    check_record("dpo", policy, Policy, "the first of language.transformer(env)")
    if loss not in PAIR_LOSSES:
        refuse_unknown("loss", loss, PAIR_LOSSES, " on preference pairs")
    check_scalars({"beta": beta, "label_smoothing": label_smoothing})
    of_pairs = partial(_of_pairs, policy, DPOSettings(loss, beta, label_smoothing))

    def draw(_: Tree, keys: Array) -> Rollout:
        return interleave_pairs(jax.vmap(pairs.draw)(keys), end=pairs.end)

    def summed_loss(params: Params, reference: Tree, batch: SupervisedBatch) -> tuple[Array, Metrics]:
        metrics = of_pairs(params.policy, reference, batch.rollout, batch.noise)
        return metrics["loss"].sum() / batch_size, {name: x.sum() / batch_size for name, x in metrics.items()}

    return supervised(
        lambda key: Params(policy.init(key), ()),
        draw,
        summed_loss,
        lambda params: make_actor(policy, params.policy),
        SupervisedSettings(batch_size, learning_rate, anneal_steps, max_grad_norm, micro_batches),
        init_reference=lambda params, _: copy_tree(params.policy),
        noise=policy.noise,
    )


def _of_pairs(
    policy: Policy, settings: DPOSettings, params: Tree, reference: Tree, rollout: Rollout, noise: Tree = ()
) -> Metrics:
    """Loss and metrics of each pair of a rollout of `interleave_pairs`, `[B]`; the noise is for `params` alone."""
    pair_loss, per_token = PAIR_LOSSES[settings.loss]

    def log_probs(params: Tree, noise: Tree = ()) -> tuple[Array, Array]:
        log_prob = evaluate_completions(policy, params, rollout, noise).log_prob(rollout.steps.action)
        return split_pairs(sequence_log_prob(log_prob, rollout.loss_mask, per_token=per_token))

    (chosen, rejected), (ref_chosen, ref_rejected) = log_probs(params, noise), log_probs(reference)
    h = log_ratio_margin(chosen, rejected, ref_chosen, ref_rejected)
    return {
        "loss": pair_loss(h, beta=settings.beta, label_smoothing=settings.label_smoothing),
        "reward_accuracy": preferred(chosen - ref_chosen, rejected - ref_rejected),
        "margin": settings.beta * h,
        "reward_chosen": settings.beta * (chosen - ref_chosen),
        "reward_rejected": settings.beta * (rejected - ref_rejected),
        "log_prob_chosen": chosen,
        "log_prob_rejected": rejected,
    }


def held_out_preferences(
    pairs: Pairs, policy: Policy, params: Tree, reference: Tree, key: Key, *, num_pairs: int, settings: DPOSettings
) -> Metrics:
    """Means over `Pairs.some_held_out` of what `dpo` measures: `pair_loss`, `pair_accuracy` and `pair_margin`."""
    rollout = interleave_pairs(pairs.some_held_out(key, num_pairs), end=pairs.end)
    metrics = _of_pairs(policy, settings, params, reference, rollout)
    names = {"pair_loss": "loss", "pair_accuracy": "reward_accuracy", "pair_margin": "margin"}
    return {name: metrics[of_batch].mean() for name, of_batch in names.items()}
