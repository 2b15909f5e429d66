"""Updates that skip padding: the same gradients, every step that trains once, and no work on the rest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.extend.core import jaxprs_in_params

from jaxpg import ladder, networks, update
from jaxpg.models.distributions import Categorical
from jaxpg.objectives import advantages
from jaxpg.policy_gradient import policy_gradient
from jaxpg.types import Params, Rollout, Transition
from jaxpg.update import minibatches, padding

LONG_COUNTER = tiny.counter(shortest=1, longest=9, time_limit=12)
T, B = 10, 6


def batch_of(lengths: list[int]) -> update.Batch:
    """Episodes of these lengths, their steps numbered in `obs` by row and column; of padding that number is NaN."""
    mask = jnp.arange(T)[:, None] < jnp.asarray(lengths)[None]
    number = jnp.where(mask, jnp.arange(float(T * B)).reshape(T, B), jnp.nan)
    ones = jnp.ones((T, B))
    steps = Transition(number, ones, ones, ones, ones, ~mask, mask.astype(jnp.float32))
    weight = jnp.asarray(np.random.default_rng(0).random((T, B)), jnp.float32) * mask
    return update.Batch(Rollout(steps, steps.mask), number, number, ones, weight, (), ())


def objective(loss: Any, **fields: Any) -> update.Objective:
    return update.Objective(loss, None, None, advantages.unchanged, needs_trajectories=False, padded=True, **fields)


def visits(params: Params, batch: update.Batch) -> Any:
    """A loss whose gradient is the weight of each visited step, in the place of the step."""
    places = jnp.nan_to_num(batch.rollout.steps.obs, nan=0.0).astype(int)
    return (batch.weight * params.policy[places]).sum(), {"rows": jnp.float32(batch.weight.size)}


@pytest.mark.parametrize("num_minibatches", [1, 2, 5])
@pytest.mark.parametrize("lengths", [[3, 10, 1, 1, 2, 7], [10] * 6, [1, 0, 0, 0, 0, 0], [0] * 6])
def test_an_epoch_visits_each_step_that_trains_once_and_hardly_more(machine_with, lengths, num_minibatches):
    machine_with(chunk_padded=4)
    batch, epochs = batch_of(lengths), 3
    epochs_of = partial(update.minibatch_epochs, epochs=epochs, num_minibatches=num_minibatches)
    updated = tiny.jit(partial(epochs_of, objective(visits), update.sgd(), 1.0))
    params, _, metrics = updated(Params(jnp.zeros(T * B), ()), (), batch, jax.random.key(0))
    np.testing.assert_allclose(params.policy, -epochs * num_minibatches * batch.weight.reshape(-1), rtol=1e-5)
    size = T * B // num_minibatches
    chunk = size // update_chunks(size)
    share = -(-sum(lengths) // num_minibatches)  # of the largest minibatch
    assert metrics["rows"] <= -(-share // chunk) * chunk + 1e-3


def update_chunks(size: int) -> int:
    return next(n for n in range(-(-size // 4), size + 1) if size % n == 0)


@pytest.mark.parametrize(("name", "normalize_advantages"), [("reinforce", True), ("actor_critic_mc", False)])
def test_a_gradient_step_is_the_one_over_all_rows(machine_with, name, normalize_advantages):
    algorithm = getattr(ladder, name)(num_envs=8, learning_rate=0.1, normalize_advantages=normalize_advantages)
    _compare(machine_with, algorithm)


def test_a_gradient_step_visits_hardly_more_than_what_trains(machine_with):
    machine_with(chunk_padded=4)
    batch, start = batch_of([3, 10, 1, 1, 2, 7]), Params(jnp.zeros(T * B), ())
    step = tiny.jit(partial(update.gradient_step, objective(visits), update.sgd(), 1.0))
    params, _, metrics = step(start, (), batch, jax.random.key(0))
    np.testing.assert_allclose(params.policy, -batch.weight.reshape(-1), rtol=1e-6)
    assert metrics["rows"] == 24


@pytest.mark.parametrize(("name", "normalize_advantages"), [("grpo", False), ("dr_grpo", True), ("dapo", False)])
def test_one_minibatch_is_the_one_over_all_rows(machine_with, name, normalize_advantages):
    extra = {"max_length": 12} if name == "dr_grpo" else {}
    settings = {"group_size": 4, "epochs": 2, "num_minibatches": 1, "normalize_advantages": normalize_advantages}
    _compare(machine_with, getattr(ladder, name)(num_envs=8, learning_rate=0.1, **settings, **extra))


def _compare(machine_with: Any, algorithm: Any) -> None:
    """The parameters after an update are the same whether padding is skipped or not."""
    policy, critic = networks.mlp(LONG_COUNTER, hidden=(4,))
    goal, params, batch = tiny.first_update(LONG_COUNTER, policy, critic, algorithm, jax.random.key(0))
    assert 0.2 < batch.rollout.loss_mask.mean() < 0.8

    def choose(limit: int, skips: bool) -> None:
        machine_with(chunk_padded=limit)
        assert padding.skips_padding(goal, batch.weight.size) == skips

    tiny.assert_same_update(algorithm, goal, params, batch, [partial(choose, 10_000, False), partial(choose, 5, True)])


@pytest.mark.parametrize("kl", ["reward_k1", "loss_k3"])
def test_a_reference_is_not_asked_about_padding(machine_with, kl):
    """Its log-probabilities of real steps are those of the whole rollout, and few rows are evaluated."""
    policy, critic = networks.mlp(LONG_COUNTER, hidden=(4,))
    rows = []

    def evaluate(params: Any, rollout: Rollout) -> Any:
        rows.append(rollout.steps.reward.size)
        return policy.evaluate(params, rollout)

    algorithm = ladder.grpo(num_envs=8, group_size=4, num_minibatches=1, kl=kl, kl_coefficient=0.5)
    key, found = jax.random.key(0), []
    for limit in (10_000, 8):
        machine_with(chunk_padded=limit)
        rows.clear()
        _, _, batch = tiny.first_update(LONG_COUNTER, policy._replace(evaluate=evaluate), critic, algorithm, key)
        assert min(rows) == (96 if limit > 96 else 8)
        found.append(batch)
    plain, skipped = found
    mask = plain.rollout.steps.mask
    assert 0.2 < mask.mean() < 0.8
    assert (plain.reference_log_prob != 0).all()
    np.testing.assert_allclose(skipped.reference_log_prob, plain.reference_log_prob * mask, rtol=1e-5)
    np.testing.assert_allclose(skipped.advantage, plain.advantage, rtol=1e-5, atol=1e-6)
    by_vmap = jax.vmap(lambda key: tiny.first_update(LONG_COUNTER, policy, critic, algorithm, key)[2])(jnp.stack([key]))
    np.testing.assert_allclose(by_vmap.reference_log_prob[0], skipped.reference_log_prob, rtol=1e-5)


def test_the_size_of_chunks_changes_no_update(machine_with):
    """Each minibatch has the same steps, and padding is skipped as well: few rows are worked through."""
    machine_with(chunk_padded=20)
    policy, critic = networks.mlp(LONG_COUNTER, hidden=(4,))
    settings = {"epochs": 2, "num_minibatches": 2, "learning_rate": 0.1}
    goal, params, batch = tiny.first_update(
        LONG_COUNTER, policy, critic, ladder.grpo(num_envs=8, group_size=4, **settings), jax.random.key(0)
    )

    def updated(chunk_rows: int | None) -> Any:
        algorithm = ladder.grpo(num_envs=8, group_size=4, chunk_rows=chunk_rows, **settings)
        optimizer = algorithm.optimizer()
        step = partial(algorithm.update, goal, optimizer, 0.1)
        return tiny.jit(step)(params, optimizer.init(params), batch, jax.random.key(1))[0]

    whole = updated(None)
    for chunk_rows in (3, 8, 1000):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), updated(chunk_rows), whole)
    assert any(float(jnp.abs(x - y).max()) > 1e-2 for x, y in zip(*map(jax.tree.leaves, (whole, params)), strict=True))
    epochs_of = partial(update.minibatch_epochs, epochs=1, num_minibatches=1, chunk_rows=4)
    visited = tiny.jit(partial(epochs_of, objective(visits), update.sgd(), 1.0))
    lengths = [3, 10, 1, 1, 2, 7]
    assert visited(Params(jnp.zeros(T * B), ()), (), batch_of(lengths), jax.random.key(0))[2]["rows"] == sum(lengths)


def test_every_minibatch_has_its_own_random_share(machine_with):
    machine_with(chunk_padded=4)
    batch = padding.as_single_steps(batch_of([3, 10, 1, 1, 2, 7]))
    shares = np.asarray(padding.shuffled_shares(jax.random.key(0), batch, epochs=2, num_minibatches=5))
    trains = np.flatnonzero(batch.rollout.loss_mask[0])
    sizes = (shares != padding.NOTHING).sum(1)
    assert sizes.max() - sizes.min() <= 1
    epochs = [np.concatenate([row[:size] for row, size in zip(*x, strict=True)]) for x in zip(
        np.split(shares, 2), np.split(sizes, 2), strict=True
    )]  # fmt: skip
    for order in epochs:
        np.testing.assert_array_equal(np.sort(order), trains)
    assert (epochs[0] != epochs[1]).any()
    assert (epochs[0] != trains).any()


@pytest.mark.parametrize("slots", [1, 7, 20, 59])
def test_slots_are_numbered_and_shuffled_in_pieces(machine_with, slots):
    """As all at once, also where pieces go beyond the last slot, steps within an episode do not train, or none does."""

    def shares(batch: update.Batch) -> Any:
        steps = padding.as_single_steps(batch)
        return padding.training_steps_first(steps), padding.shuffled_shares(jax.random.key(3), steps, 2, 3)

    whole = batch_of([3, 10, 1, 1, 2, 7])
    holes = whole.rollout._replace(loss_mask=whole.rollout.loss_mask.at[1:5, 1].set(0))
    for batch in (whole, whole._replace(rollout=holes), batch_of([0] * 6), batch_of([10] * 6)):
        machine_with(slots_at_once=T * B)
        expected = shares(batch)
        machine_with(slots_at_once=slots)
        jax.tree.map(np.testing.assert_array_equal, tiny.jit(lambda batch: shares(batch))(batch), expected)
        (order, count), _ = expected
        trains = np.flatnonzero(batch.rollout.loss_mask)
        np.testing.assert_array_equal(order, np.r_[trains, [padding.NOTHING] * (T * B - len(trains))])
        assert count == len(trains)


def test_pieces_without_steps_that_train_are_left_out(machine_with):
    """Three steps are in the first of ten pieces of six slots: it is worked through, and no other."""
    machine_with(slots_at_once=6)
    pieces, visited = padding._pieces(T * B), jnp.zeros(T * B, jnp.int32)
    assert pieces == (10, 6)
    for end, expected in ((0, 0), (3, 6), (6, 6), (7, 12), (60, 60)):
        found = padding._work_through(pieces, jnp.int32(end), lambda slots, x: x.at[slots].add(1), visited)
        np.testing.assert_array_equal(found, np.arange(T * B) < expected)


def test_what_needs_whole_columns_keeps_its_padding(machine_with):
    machine_with(chunk_padded=1)
    goal = objective(visits)
    assert padding.skips_padding(goal, 100)
    assert not padding.skips_padding(goal._replace(needs_trajectories=True), 100)
    assert not padding.skips_padding(goal._replace(padded=False), 100)
    assert not padding.skips_padding(goal, 4, num_minibatches=4)


def test_seeds_by_vmap_may_differ_in_what_they_skip(machine_with):
    """Under vmap the loops run as often as the longest needs it, and what is too much for the others weighs nothing."""
    machine_with(chunk_padded=4, slots_at_once=7)
    start = Params(jnp.zeros(T * B), ())
    batches = [batch_of(lengths) for lengths in ([1] * 6, [10] * 6)]

    def after(batch: update.Batch, key: jax.Array) -> jax.Array:
        return update.gradient_step(objective(visits), update.sgd(), 1.0, start, (), batch, key)[0].policy

    keys = jax.random.split(jax.random.key(0))
    together = jax.vmap(after)(jax.tree.map(lambda *x: jnp.stack(x), *batches), keys)
    for i, batch in enumerate(batches):
        np.testing.assert_allclose(together[i], -batch.weight.reshape(-1), rtol=1e-6)

    def shares(batch: update.Batch, key: jax.Array) -> jax.Array:
        return padding.shuffled_shares(key, padding.as_single_steps(batch), 2, 3)

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    for i, of_seed in enumerate(jax.vmap(shares)(stacked, keys)):
        np.testing.assert_array_equal(of_seed, shares(batches[i], keys[i]))
    for program in (jax.make_jaxpr(jax.vmap(work))(stacked, keys) for work in (after, shares)):
        conditions = [loop.params["cond_jaxpr"].out_avals[0] for loop in whiles(program.jaxpr)]
        assert len(conditions) >= 2
        assert all(condition.shape == () for condition in conditions)  # else all that is carried is selected


def whiles(jaxpr: Any) -> Iterator[Any]:
    """The while loops of a program and of those in it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from whiles(inner)


@pytest.mark.parametrize("settings", [{"kl": "reward_k1"}, {"kl": "loss_k3", "kl_coefficient": 0.1}])
def test_a_penalty_is_finite_where_the_action_of_padding_is_impossible(settings):
    """Padding holds action 0 and observations of zeros, where this policy gives action 0 the probability 0."""
    policy, _ = networks.mlp(LONG_COUNTER, hidden=(4,))

    def forbid(logits: jax.Array, obs: jax.Array) -> Categorical:
        nothing = (obs == 0).all(-1)
        return Categorical(logits.at[..., 0].set(jnp.where(nothing, -jnp.inf, logits[..., 0])))

    def act(params: Any, memory: Any, obs: jax.Array) -> Any:
        distribution, memory = policy.act(params, memory, obs)
        return forbid(distribution.logits, obs), memory

    def evaluate(params: Any, rollout: Rollout) -> Categorical:
        return forbid(policy.evaluate(params, rollout).logits, rollout.steps.obs)

    algorithm = ladder.rlhf(num_envs=8, reference_kl_target=1.0, **settings)
    critic = networks.mlp(LONG_COUNTER, hidden=(4,))[1]
    learner = policy_gradient(LONG_COUNTER, policy._replace(act=act, evaluate=evaluate), critic, algorithm)
    state, metrics = jax.jit(learner.step)(learner.init(jax.random.key(0)), jax.random.key(1))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.params, metrics)))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_four_devices_that_skip_padding_are_one_that_does_not(machine_with, monkeypatch, name):
    run, skipped = cases.run(name), list[bool]()

    def spy(*arguments: Any) -> bool:
        skipped.append(padding.skips_padding(*arguments))
        return skipped[-1]

    machine_with(chunk_padded=4)
    monkeypatch.setattr(minibatches, "skips_padding", spy)
    learner = cases.make(name)  # a new one: jax keeps what it has traced of the other
    cases.assert_same(run, *cases.by_vmap(learner, run.states[0]))
    assert skipped
    assert all(skipped)
