"""Metrics of a batch of completions, in groups of `G` neighbours that answer the same prompt.

A completion is right where its accuracy is at least 1. All numbers are over all devices; a group lives on one device.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxpg.errors import UserError
from jaxpg.parallel import collectives
from jaxpg.types import Array, Metrics, Outcome


def completion_metrics(outcome: Outcome, length: Array, group_size: int) -> Metrics:
    """Metrics of a batch of completions, `[B]`, in addition to the means of their parts; scalars.

    - "reward_std": standard deviation of the rewards over the batch;
    - "length_max": tokens of the longest completion;
    - "correct", "incorrect": numbers of right and wrong completions, and "length_correct", "length_incorrect": their
      mean lengths, NaN where there are none;
    - for groups of more than one also "frac_zero_std": the share of groups whose rewards are all equal, "pass@k" for
      k = 1, 2, 4, ... up to G (`pass_at_k`), and "cons@G" (`majority_vote`).
    """
    right = (outcome.parts["accuracy"] >= 1).astype(jnp.float32)
    length = length.astype(jnp.float32)
    total = outcome.total()
    deviation = total - collectives.mean(total)
    metrics = {"reward_std": jnp.sqrt(collectives.mean(deviation**2)), "length_max": collectives.maximum(length)}
    for name, selected in {"correct": right, "incorrect": 1 - right}.items():
        count, tokens = collectives.psum((selected.sum(), (selected * length).sum()))
        metrics |= {name: count, f"length_{name}": tokens / jnp.where(count > 0, count, jnp.nan)}
    return metrics | _group_metrics(outcome, right, group_size) if group_size > 1 else metrics


def _group_metrics(outcome: Outcome, right: Array, group_size: int) -> Metrics:
    assert not isinstance(outcome.answer, tuple)  # text tasks always have one
    reward, right, answer = (x.reshape(-1, group_size) for x in (outcome.total(), right, outcome.answer))
    metrics = {"frac_zero_std": collectives.mean((reward.max(1) == reward.min(1)).astype(jnp.float32))}
    powers = [2**i for i in range(group_size.bit_length())]
    metrics |= {f"pass@{k}": collectives.mean(pass_at_k(right, k)) for k in powers}
    return metrics | {f"cons@{group_size}": collectives.mean(majority_vote(answer, right))}


def pass_at_k(correct: Array, k: int) -> Array:
    """The probability that of k completions, drawn from n without replacement, at least one is right.

    With c of n right, 1 - C(n-c, k) / C(n, k) = 1 - prod (1 - k/i) over i = n-c+1 .. n: an unbiased estimate of the
    chance to solve a problem in k tries.

    Args:
        correct: [..., n], 1 or true where a completion is right, else 0.
        k: from 1 to n.

    Returns:
        [...] float32.

    Raises:
        UserError: k is out of range.

    Source: Chen et al. 2021 (Evaluating Large Language Models Trained on Code), equation 1 and figure 3.
    """
    n = correct.shape[-1]
    if not 1 <= k <= n:
        raise UserError(f"pass@k of {n} completions needs a k from 1 to {n}, not {k}.")
    wrong = n - correct.astype(jnp.float32).sum(-1, keepdims=True)
    i = jnp.arange(1, n + 1, dtype=jnp.float32)
    all_wrong = jnp.maximum(i - k, 0) / i  # 0 where fewer than k are wrong: then i = k is one of the factors
    return 1 - jnp.where(jnp.expand_dims(i, range(wrong.ndim - 1)) > wrong, all_wrong, 1.0).prod(-1)


def majority_vote(answer: Array, correct: Array) -> Array:
    """Whether the most frequent answer among n completions is right; among tied answers, the probability of it.

    A tie is broken by choosing one of the tied answers with equal probability; the result is the expectation over that
    choice. An answer whose completions are partly right counts as right in that proportion.

    Args:
        answer: [..., n] integers, equal for equal answers; a negative number means no answer and does not vote.
        correct: [..., n], 1 or true where a completion is right, else 0.

    Returns:
        [...] float32, 0 where there is no vote.

    Source: Wang et al. 2022 (Self-Consistency Improves Chain of Thought Reasoning), section 2.
    """
    same = answer[..., :, None] == answer[..., None, :]
    votes = jnp.where(answer >= 0, same.sum(-1), 0)
    # The tied answers have equally many votes, so the mean over their completions is the mean over the answers.
    wins = ((votes == votes.max(-1, keepdims=True)) & (answer >= 0)).astype(jnp.float32)
    return (wins * correct).sum(-1) / jnp.maximum(wins.sum(-1), 1)


def best_of_n(score: Array, correct: Array) -> Array:
    """Whether the completion with the highest score among n is right; among tied ones, the probability of it.

    Args:
        score: [..., n], by a reward model.
        correct: [..., n], 1 or true where a completion is right, else 0.

    Returns:
        [...] float32.

    Source: Lightman et al. 2023 (Let's Verify Step by Step), section 3.
    """
    best = (score == score.max(-1, keepdims=True)).astype(jnp.float32)
    return (best * correct).sum(-1) / best.sum(-1)


def weighted_vote(answer: Array, correct: Array, weight: Array) -> Array:
    """Whether the answer with the largest sum of weights among n completions is right.

    As `majority_vote`, which it is where all weights are equal and positive: ties count by their expectation, each tied
    answer being equally likely.

    Args:
        answer: as in `majority_vote`.
        correct: as in `majority_vote`.
        weight: [..., n], of each completion, from 0 on; only their proportions matter.

    Returns:
        [...] float32, 0 where there is no vote.

    Source: Li et al. 2023 (Making Language Models Better Reasoners with Step-Aware Verifier), equation 3.
    """
    same = (answer[..., :, None] == answer[..., None, :]) & (answer >= 0)[..., None, :]
    votes = jnp.where(answer >= 0, (same * weight[..., None, :]).sum(-1), 0)
    most = votes.max(-1, keepdims=True)
    wins = (votes == most) & (most > 0)
    share = jnp.where(wins, weight / jnp.where(wins, votes, 1), 0)  # 1 over the completions of each tied answer
    return (share * correct).sum(-1) / jnp.maximum(share.sum(-1), 1)
