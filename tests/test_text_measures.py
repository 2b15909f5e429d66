"""Measures of completions against enumeration: all subsets for pass@k, all tied answers for the vote."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpg import parallel
from jaxpg.envs.text.metrics import completion_metrics, majority_vote, pass_at_k
from jaxpg.errors import UserError
from jaxpg.parallel import collectives
from jaxpg.types import Outcome


def at_least_one(correct, k):
    """pass@k by drawing every subset of k."""
    subsets = list(combinations(correct, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n):
    rng = np.random.default_rng(n)
    for right in range(n + 1):
        correct = rng.permutation(np.arange(n) < right)
        for k in range(1, n + 1):
            np.testing.assert_allclose(pass_at_k(jnp.asarray(correct), k), at_least_one(correct, k), rtol=1e-6)


@pytest.mark.parametrize(("n", "k"), [(256, 1), (256, 64), (1024, 256), (1024, 1024)])
def test_pass_at_k_is_stable_for_large_groups(n, k):
    """Against exact rational numbers, also where the binomial coefficients overflow any float."""
    right = np.array([0, 1, 2, 10, n // 2, n - 1, n])
    exact = [float(1 - Fraction(math.comb(n - c, k), math.comb(n, k))) for c in right.tolist()]
    correct = jnp.asarray(np.arange(n) < right[:, None])
    np.testing.assert_allclose(jax.jit(partial(pass_at_k, k=k))(correct), exact, rtol=1e-5)


def test_pass_at_k_takes_any_leading_axes():
    correct = jax.random.bernoulli(jax.random.key(0), 0.3, (2, 3, 6))
    expected = [[at_least_one(np.asarray(row), 2) for row in rows] for rows in correct]
    np.testing.assert_allclose(pass_at_k(correct, 2), expected, rtol=1e-6)
    one_by_one = jax.vmap(jax.vmap(partial(pass_at_k, k=2)))(correct)
    np.testing.assert_allclose(one_by_one, expected, rtol=1e-6)


@pytest.mark.parametrize("k", [0, 5])
def test_more_tries_than_completions_are_refused(k):
    with pytest.raises(UserError, match=f"k from 1 to 4, not {k}"):
        pass_at_k(jnp.ones(4), k)


def elect(answer, correct):
    """The vote as one would count it: the tied answers listed, and how far each is right."""
    votes = Counter(a for a in answer if a >= 0)
    if not votes:
        return 0.0
    tied = [a for a, count in votes.items() if count == max(votes.values())]
    return np.mean([np.mean([c for a, c in zip(answer, correct, strict=True) if a == winner]) for winner in tied])


@pytest.mark.parametrize(
    ("answer", "correct", "chance"),
    [
        ([7, 7, 3, 3, 3], [0, 0, 1, 1, 1], 1.0),
        ([7, 7, 7, 3, 3], [0, 0, 0, 1, 1], 0.0),
        ([7, 7, 3, 3, 5], [0, 0, 1, 1, 0], 1 / 2),
        ([7, 6, 3, 4], [0, 1, 0, 0], 1 / 4),
        ([-1, -1, -1, 3], [0, 0, 0, 1], 1.0),  # no answer does not vote
        ([-1, -1, -1, -1], [0, 0, 0, 0], 0.0),
        ([-1, -1], [1, 0], 0.0),
        ([0, 0, -1, -1], [1, 1, 0, 0], 1.0),  # zero is a fingerprint like any other
    ],
)
def test_the_majority_decides(answer, correct, chance):
    np.testing.assert_allclose(majority_vote(jnp.array(answer), jnp.array(correct, jnp.float32)), chance, rtol=1e-6)
    np.testing.assert_allclose(elect(answer, correct), chance)


def test_the_vote_is_the_expectation_over_tied_answers():
    rng = np.random.default_rng(0)
    answer = rng.integers(-1, 4, (400, 6))
    correct = np.array([0, 1, 0, 1, 0])[answer]
    correct[300:] = rng.integers(0, 2, (100, 6))  # the same answer, right here and wrong there
    expected = [elect(*rows) for rows in zip(answer.tolist(), correct, strict=True)]
    assert len(set(expected)) > 3  # there are ties between right and wrong answers
    np.testing.assert_allclose(majority_vote(jnp.asarray(answer), jnp.asarray(correct)), expected, rtol=1e-6)


def batch(groups=8, size=4, seed=0):
    """Completions [groups * size] as an environment reports them, with accuracies that are no whole number, too."""
    rng = np.random.default_rng(seed)
    answer = rng.integers(-1, 3, (groups, size)).astype(np.int32)
    accuracy = np.where(answer == 2, 1.0, np.where(answer == 1, 0.5, 0.0)).astype(np.float32)
    accuracy[0], accuracy[1] = 1.0, 0.0
    length = rng.integers(1, 20, (groups, size)).astype(np.float32)
    reward = accuracy - 0.1 * (answer == 0)
    reward[0] = reward[1] = 0.5
    fields = (x.reshape(-1) for x in (reward, accuracy, answer, length))
    reward, accuracy, answer, length = (jnp.asarray(x) for x in fields)
    return Outcome(reward, {"accuracy": accuracy}, answer), length


def slowly(outcome, length, size):
    """Every metric by loops in float64."""
    reward, accuracy, answer = (np.asarray(x) for x in (outcome.reward, outcome.parts["accuracy"], outcome.answer))
    reward, length = reward.astype(float), np.asarray(length, float)
    right = [bool(a >= 1) for a in accuracy]
    lengths = {
        name: [n for n, r in zip(length, right, strict=True) if r == which]
        for name, which in (("correct", True), ("incorrect", False))
    }
    groups = range(0, len(reward), size)
    members = {start: slice(start, start + size) for start in groups}
    metrics = {
        "reward_std": np.sqrt(np.mean([(r - reward.mean()) ** 2 for r in reward])),
        "length_max": max(length),
        "correct": len(lengths["correct"]),
        "incorrect": len(lengths["incorrect"]),
        "length_correct": np.mean(lengths["correct"]),
        "length_incorrect": np.mean(lengths["incorrect"]),
        "frac_zero_std": np.mean([len(set(reward[m])) == 1 for m in members.values()]),
        f"cons@{size}": np.mean([elect(answer[m].tolist(), right[m]) for m in members.values()]),
    }
    tries = [k for k in (1, 2, 4, 8, 16) if k <= size]
    return metrics | {f"pass@{k}": np.mean([at_least_one(right[m], k) for m in members.values()]) for k in tries}


@pytest.mark.parametrize("size", [2, 4, 6])
def test_a_batch_is_measured_as_by_slow_loops(size):
    outcome, length = batch(size=size)
    metrics, expected = (
        jax.jit(completion_metrics, static_argnums=2)(outcome, length, size),
        slowly(outcome, length, size),
    )
    assert metrics.keys() == expected.keys()
    assert 0 < expected["frac_zero_std"] < 1
    for name, value in expected.items():
        assert metrics[name].shape == ()
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_single_completions_have_no_group_metrics():
    outcome, length = batch()
    names = {"reward_std", "length_max", "correct", "incorrect", "length_correct", "length_incorrect"}
    assert completion_metrics(outcome, length, 1).keys() == names
    assert completion_metrics(outcome._replace(answer=()), length, 1).keys() == names


def test_the_order_within_a_group_and_of_groups_does_not_matter():
    outcome, length = batch()
    rng = np.random.default_rng(1)
    within = np.concatenate([4 * g + rng.permutation(4) for g in rng.permutation(8)])
    mixed = jax.tree.map(lambda x: x[within], (outcome, length))
    for name, value in completion_metrics(outcome, length, 4).items():
        np.testing.assert_allclose(completion_metrics(*mixed, 4)[name], value, rtol=1e-6, err_msg=name)
    across = jax.tree.map(lambda x: x[rng.permutation(32)], outcome)
    assert (
        completion_metrics(across, length, 4)["frac_zero_std"]
        != completion_metrics(outcome, length, 4)["frac_zero_std"]
    )


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_a_length_of_none_is_not_a_number_and_counts_as_none(accuracy):
    outcome, length = batch()
    metrics = completion_metrics(outcome._replace(parts={"accuracy": jnp.full(32, accuracy)}), length, 4)
    some, none = ("correct", "incorrect") if accuracy else ("incorrect", "correct")
    assert (metrics[some], metrics[none]) == (32, 0)
    np.testing.assert_allclose(metrics[f"length_{some}"], length.mean(), rtol=1e-6)
    assert np.isnan(metrics[f"length_{none}"])
    assert metrics["pass@4"] == accuracy


def test_lengths_of_single_devices_without_right_answers_leak_nothing():
    """Poison: a device with no right answer must not turn the mean over all into no number."""
    outcome, length = batch()
    right = jnp.zeros(32).at[20].set(1.0)
    outcome = outcome._replace(parts={"accuracy": right})
    assert on_four(outcome, length)["length_correct"] == length[20]


def on_four(outcome, length):
    mesh = parallel.make_mesh(1, 8, jax.devices()[:4])
    split, whole = PartitionSpec(collectives.DATA), PartitionSpec()
    program = parallel.spread(partial(completion_metrics, group_size=4), mesh, in_specs=split, out_specs=whole)
    return jax.jit(program)(outcome, length)


def test_four_devices_measure_what_one_does():
    outcome, length = batch()
    length = length.at[30].set(77)  # on the last device
    one, four = completion_metrics(outcome, length, 4), on_four(outcome, length)
    assert one.keys() == four.keys()
    assert one["length_max"] == 77
    for name, value in one.items():
        np.testing.assert_allclose(four[name], value, rtol=1e-6, err_msg=name)
