"""From losses to parameters: minibatches, chunks of them, gradient steps, and steps in a trust region."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import Mesh

from jaxpg import envs, ladder, networks, update
from jaxpg.algorithm import make_objective
from jaxpg.models.distributions import Categorical, DiagonalGaussian
from jaxpg.objectives import advantages
from jaxpg.parallel import collectives
from jaxpg.parallel.machine import side_by_side
from jaxpg.policy_gradient import policy_gradient
from jaxpg.types import Array, Box, Env, Episodes, Key, Params, Rollout, TimeStep, Transition, Tree
from jaxpg.update import batching, minibatches
from jaxpg.update.gradients import summed_gradient
from jaxpg.update.trust_region import natural_step

COUNTER = tiny.counter()
KEY = jax.random.key(0)
T, B = 4, 6


def blank_batch(weight=None):
    """Steps numbered in `obs`, columns in `memory`; both also in `target`."""
    number = jnp.arange(float(T * B)).reshape(T, B)
    ones = jnp.ones((T, B))
    steps = Transition(number, ones, ones, ones, ones, ones == 0, ones)
    weight = ones / (T * B) if weight is None else weight
    return update.Batch(
        rollout=Rollout(steps, ones),
        advantage=number,
        target=number,
        old_value=ones,
        weight=weight,
        minibatch_weight=(),
        reference_log_prob=(),
    )


def objective(policy_loss, value_loss=None, needs_trajectories=False):
    return update.Objective(policy_loss, value_loss, None, advantages.unchanged, needs_trajectories)


def visits(params, batch):
    """A loss whose gradient is each visited step's weight, in the step's own place."""
    return (batch.weight * params.policy[batch.rollout.steps.obs.astype(int)]).sum(), {
        "rows": jnp.float32(batch.weight.size)
    }


@pytest.mark.parametrize("num_minibatches", [1, 3, 8])
@pytest.mark.parametrize("chunk_rows", [None, 2])
def test_each_epoch_visits_every_step_once_at_a_weight_that_keeps_the_scale(num_minibatches, chunk_rows):
    weight = jnp.asarray(np.random.default_rng(0).random((T, B)), jnp.float32)
    params, _, metrics = update.minibatch_epochs(
        objective(visits), update.sgd(), 1.0, Params(jnp.zeros(T * B), ()), (), blank_batch(weight), jax.random.key(0),
        epochs=3, num_minibatches=num_minibatches, chunk_rows=chunk_rows,
    )  # fmt: skip
    np.testing.assert_allclose(params.policy, -3 * num_minibatches * weight.reshape(-1), rtol=1e-5)
    assert metrics["updates"] == 3 * num_minibatches
    assert metrics["rows"] == T * B / num_minibatches


def test_epochs_come_in_different_orders():
    """Each update halves what is there and adds the steps it sees, so the end tells of the order."""

    def loss(params, batch):
        seen = jnp.zeros(T * B).at[batch.rollout.steps.obs.astype(int).reshape(-1)].set(1.0)
        return (0.5 * params.policy * params.policy / 2 - params.policy * seen).sum(), {}

    def after(epochs, key):
        start = Params(jnp.zeros(T * B), ())
        params, *_ = update.minibatch_epochs(
            objective(loss), update.sgd(), 1.0, start, (), blank_batch(), key, epochs=epochs, num_minibatches=4
        )
        return params.policy

    one, other = after(1, jax.random.key(0)), after(1, jax.random.key(1))
    assert (one != other).any()
    twice = after(2, jax.random.key(0))
    repeated = one * (1 + 0.5**4)  # what the same order once more would leave
    assert (np.abs(twice - repeated) > 0.1).any()


def test_columns_stay_whole_where_the_policy_reads_columns():
    batch = blank_batch()
    columns = jnp.arange(float(B))
    batch = batch._replace(rollout=batch.rollout._replace(episodes=Episodes(memory=columns)))

    def loss(params, batch):
        number = batch.rollout.steps.obs
        assert number.shape == (T, 2)
        expected = batch.rollout.episodes.memory[None] + B * jnp.arange(float(T))[:, None]
        total, _ = visits(params, batch)
        return total, {"torn": (number != expected).sum().astype(jnp.float32)}

    params, _, metrics = update.minibatch_epochs(
        objective(loss, needs_trajectories=True), update.sgd(), 1.0, Params(jnp.zeros(T * B), ()), (), batch,
        jax.random.key(0), epochs=2, num_minibatches=3,
    )  # fmt: skip
    assert metrics["torn"] == 0
    np.testing.assert_allclose(params.policy, -2 * 3 / (T * B), rtol=1e-6)


def test_advantages_are_normalised_per_minibatch():
    def loss(params, batch):
        mean = (batch.weight * batch.advantage).sum() / batch.weight.sum()
        square = (batch.weight * batch.advantage**2).sum() / batch.weight.sum()
        return params.policy.sum(), {"off": jnp.abs(mean) + jnp.abs(square - 1)}

    goal = objective(loss)._replace(normalize=partial(advantages.standardize, ddof=0))
    _, _, metrics = update.minibatch_epochs(
        goal, update.sgd(), 1.0, Params(jnp.zeros(1), ()), (), blank_batch(), jax.random.key(0),
        epochs=1, num_minibatches=4,
    )  # fmt: skip
    assert metrics["off"] < 1e-5


def ppo_batch(network, **settings):
    algorithm = ladder.ppo(num_envs=8, num_steps=6, learning_rate=0.1, max_grad_norm=None, **settings)
    policy, critic = network(COUNTER)
    return tiny.first_update(COUNTER, policy, critic, algorithm, jax.random.key(0))


@pytest.mark.parametrize(
    ("network", "rows", "wide"),
    [
        (partial(networks.mlp, hidden=(4,)), (5, 12), 64),
        (partial(networks.mlp, hidden=(4,)), (5,), 2),
        (partial(networks.recurrent, hidden=(4,), width=4), (1, 3), 64),
        (partial(networks.recurrent, hidden=(4,), width=4), (1,), 2),
    ],
    ids=["steps", "steps, gathered late", "columns", "columns, gathered late"],
)
def test_chunks_change_neither_parameters_nor_metrics(network, rows, wide, monkeypatch):
    monkeypatch.setattr(batching, "WIDE", wide)  # the observations here have two numbers
    goal, params, batch = ppo_batch(network, entropy_coefficient=0.1)

    def run(chunk_rows):
        settings = {"epochs": 2, "num_minibatches": 2, "chunk_rows": chunk_rows}
        return tiny.jit(partial(update.minibatch_epochs, goal, update.sgd(), 0.1, **settings))(
            params, (), batch, jax.random.key(0)
        )

    whole = run(1000)
    for chunk_rows in rows:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), run(chunk_rows), whole)


def test_a_loss_in_chunks_is_traced_once():
    traced = []

    def loss(params, rows):
        traced.append(rows.shape)
        return params @ rows, {}

    def gradient(params, rows):
        return summed_gradient(loss, params, rows, 4, lambda batch, i, n: batch[i])

    np.testing.assert_array_equal(jax.jit(gradient)(jnp.zeros(3), jnp.arange(12.0).reshape(4, 3))[0], [18, 22, 26])
    assert len(traced) == 1


@pytest.mark.parametrize(("chunk_rows", "columns"), [(None, 6), (24, 6), (12, 3), (11, 2), (1, 1)])
def test_one_gradient_of_a_batch_is_in_chunks_of_whole_columns(chunk_rows, columns, machine_with):
    seen, start = [], Params(jnp.zeros(T * B), ())

    def loss(params, batch):
        seen.append(batch.weight.shape)
        return visits(params, batch)

    machine_with(chunk_rows=chunk_rows)
    after, _, _ = update.gradient_step(objective(loss), update.sgd(), 1.0, start, (), blank_batch(), KEY)
    assert seen[-1] == (T, columns)
    np.testing.assert_allclose(after.policy, -np.ones(T * B) / (T * B), rtol=1e-6)


@pytest.mark.parametrize("x64", [False, True])
def test_a_minibatch_is_its_columns_of_every_array_bit_for_bit(x64):
    columns, rng = np.array([4, 0, 3]), np.random.default_rng(0)
    with jax.enable_x64(x64):
        number = jnp.asarray(rng.normal(size=(T, B))).at[1, 0].set(jnp.nan).at[2, 3].set(-0.0)
        action, last = jnp.asarray(rng.integers(0, 9, (T, B)), jnp.int32), jnp.asarray(rng.random((T, B)) < 0.5)
        steps = Transition(jnp.zeros((T, B, 3)) + number[..., None], action, number + 1, number + 2, last, last, number)
        batch = update.Batch(
            rollout=Rollout(steps, number + 3, number[:1] + 8, Episodes(memory=jnp.arange(B))),
            advantage=number + 4,
            target=number + 5,
            old_value=number + 6,
            weight=number + 7,
            minibatch_weight=(),
            reference_log_prob=number.astype(jnp.bfloat16),
        )
        got = batching.stacked_gather(batch)(jnp.asarray(columns))
    for ours, whole in zip(jax.tree.leaves(got), jax.tree.leaves(batch), strict=True):
        expected = np.asarray(whole)[columns] if whole.ndim == 1 else np.asarray(whole)[:, columns]
        assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
        assert np.asarray(ours).tobytes() == expected.tobytes()


@pytest.mark.parametrize(("rows", "others", "size"), [(9, [(2, 3), (4, 1, 2)], 5), (8, [], 3 + 6 + 1 + 8 + 1)])
def test_packed_parameters_come_back_as_they_were(rows, others, size, machine_with):
    machine_with(params_as_one=8)
    params = Params(
        {"bias": jnp.arange(3.0), "kernel": jnp.ones((2, 3)), "scale": jnp.array(0.1, jnp.bfloat16)},
        [jnp.full((4, 1, 2), 7.0), jnp.full(1, 1e-30)],
    )
    pack, unpack = batching.pack_parameters(params, rows)
    matrices, vector = pack(params)
    assert [x.shape for x in jax.tree.leaves(matrices)] == others
    assert vector.shape == (size,)
    back = unpack((matrices, vector))
    jax.tree.map(np.testing.assert_array_equal, back, params)
    assert jax.tree.map(lambda x: x.dtype, back) == jax.tree.map(lambda x: x.dtype, params)


def test_the_matrices_of_a_large_network_are_carried_as_they_are(machine_with):
    machine_with(params_as_one=8)
    params = {"kernel": jnp.zeros((2**10, 2**10)), "bias": jnp.zeros(3)}
    matrices, vector = batching.pack_parameters(params, 8)[0](params)
    assert ([x.shape for x in jax.tree.leaves(matrices)], vector.shape) == ([(2**10, 2**10)], (3,))


def test_the_matrices_that_devices_share_are_carried_as_they_are(machine_with):
    """One vector of all would have to be gathered and cut again at every step."""
    machine_with(params_as_one=8)
    params = {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}
    token = collectives.auto_mesh.set(Mesh(np.array(jax.devices()[:1]), (collectives.SHARD,)))
    try:
        matrices, vector = batching.pack_parameters(params, 8)[0](params)
    finally:
        collectives.auto_mesh.reset(token)
    assert ([x.shape for x in jax.tree.leaves(matrices)], vector.shape) == ([(2, 3)], (3,))


@pytest.mark.parametrize(("runs", "arrays"), [(1, 1), (3, 3)])
def test_parameters_of_many_rows_are_carried_as_they_are(runs, arrays, machine_with):
    """Those of all runs side by side count, as many as a kernel works through."""
    machine_with(params_as_one=24, vectors_as_one=False)
    params = {"kernel": jnp.zeros((2, 3)), "bias": jnp.arange(3.0), "scale": jnp.ones(3)}
    with side_by_side(runs):
        pack, unpack = batching.pack_parameters(params, 12)
    assert len(jax.tree.leaves(pack(params))) == arrays
    jax.tree.map(np.testing.assert_array_equal, unpack(pack(params)), params)


def test_the_rows_of_a_minibatch_decide_how_parameters_are_carried(monkeypatch):
    rows, pack = [], batching.pack_parameters
    monkeypatch.setattr(minibatches, "pack_parameters", lambda params, n: rows.append(n) or pack(params, n))
    start = Params(jnp.zeros(T * B), ())
    update.minibatch_epochs(
        objective(visits), update.sgd(), 1.0, start, (), blank_batch(), jax.random.key(0), epochs=2, num_minibatches=3
    )
    assert rows == [T * B // 3]


@pytest.mark.parametrize(("runs", "num_minibatches", "shape"), [(2, 3, (4, 2)), (1, 3, (1, 8)), (2, 4, (1, 6))])
def test_steps_of_several_runs_side_by_side_are_in_rows(runs, num_minibatches, shape, machine_with):
    """Where the number of rows divides them; it changes nothing but the shape that the loss sees."""
    seen, start = [], Params(jnp.zeros(T * B), ())

    def loss(params, batch):
        seen.append(batch.weight.shape)
        return visits(params, batch)

    def learned():
        batch, settings = blank_batch(), {"epochs": 2, "num_minibatches": num_minibatches}
        return update.minibatch_epochs(
            objective(loss), update.sgd(), 1.0, start, (), batch, jax.random.key(0), **settings
        )

    expected = learned()
    machine_with(rows_of_steps=4, chunk_rows=None)
    with side_by_side(runs):
        found = learned()
    assert seen[-1] == shape
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, expected)


def slide(params, batch):
    """Gradient -1 for the one parameter; the KL that it reports is how far the parameter has come."""
    distance = params.policy[0]
    return -distance, {"approx_kl": distance}


@pytest.mark.parametrize(("target_kl", "taken"), [(0.9, 2), (1.4, 3), (100.0, 8), (None, 8)])
def test_passes_stop_for_good_once_the_kl_is_too_large(target_kl, taken):
    """The KL before the k-th update is k, and 1.5 times the target is the limit."""
    optimizer = optax.scale_by_schedule(jnp.ones_like)  # counts its updates, and must stand still as well
    start = Params(jnp.zeros(1), ())
    params, opt_state, metrics = update.minibatch_epochs(
        objective(slide), optimizer, 1.0, start, optimizer.init(start), blank_batch(), jax.random.key(0),
        epochs=2, num_minibatches=4, target_kl=target_kl,
    )  # fmt: skip
    assert params.policy[0] == taken
    assert metrics["updates"] == taken
    assert opt_state.count == taken


def test_a_minibatch_that_is_near_does_not_start_the_passes_again():
    """Only the minibatch with the first step in it reports a large KL."""

    def loss(params, batch):
        return -params.policy[0], {"approx_kl": 10.0 * (batch.rollout.steps.obs == 0).any()}

    params, _, metrics = update.minibatch_epochs(
        objective(loss), update.sgd(), 1.0, Params(jnp.zeros(1), ()), (), blank_batch(), jax.random.key(1),
        epochs=3, num_minibatches=4, target_kl=1.0,
    )  # fmt: skip
    assert params.policy[0] == metrics["updates"]
    assert 0 < metrics["updates"] < 4


def test_early_stopping_keeps_a_real_policy_near():
    settings = {"epochs": 20, "num_minibatches": 2}
    goal, params, batch = ppo_batch(partial(networks.mlp, hidden=(4,)), clip=10.0)
    old = goal.distribution(params, batch)
    kls = []
    for target_kl in (None, 0.01):
        run = tiny.jit(partial(update.minibatch_epochs, goal, update.sgd(), 0.5, target_kl=target_kl, **settings))
        after, _, metrics = run(params, (), batch, jax.random.key(0))
        kls.append((float(old.kl(goal.distribution(after, batch)).mean()), float(metrics["updates"])))
    (far, all_updates), (near, updates) = kls
    assert all_updates == 40
    assert 1 < updates < 40
    assert near < 0.1 < far


def test_a_gradient_step_is_the_learning_rate_times_the_clipped_gradient():
    def loss(params, batch):
        return 3 * params.policy[0] + 4 * params.critic[0], {}

    start = Params(jnp.zeros(1), jnp.zeros(1))
    for max_norm, length in ((None, 5.0), (100.0, 5.0), (0.5, 0.5)):
        params, _, metrics = update.gradient_step(
            objective(loss), update.sgd(max_grad_norm=max_norm), 0.1, start, (), blank_batch(), jax.random.key(0)
        )
        np.testing.assert_allclose([params.policy[0], params.critic[0]], [-0.06 * length, -0.08 * length], rtol=1e-5)
        norms = {"gradient_norm": 5.0, "policy_gradient_norm": 3.0, "value_gradient_norm": 4.0}  # before it is clipped
        assert {name: float(x) for name, x in metrics.items()} == pytest.approx(norms)


def short_episodes() -> Env:
    """Three steps of ten, with a reward for actions near 2."""

    def step(key, state, action):
        over = state == 2
        return state + 1, TimeStep(jnp.ones(1), -((action - 2) ** 2).sum(), jnp.where(over, 0.0, 1.0), over)

    space = Box(np.zeros(1, np.float32), np.ones(1, np.float32))
    return Env("short", lambda key: (jnp.int32(0), jnp.ones(1)), step, space, Box(-9 * space.high, 9 * space.high), 10)


@pytest.mark.parametrize("network", [networks.mlp, networks.recurrent])
@pytest.mark.parametrize("algorithm", [ladder.grpo, ladder.gspo, partial(ladder.rlhf, kl="loss_k3")])
def test_rows_behind_the_end_of_an_episode_make_no_infinite_ratio(algorithm, network):
    """There the record has the action 0, which a sharp policy would never draw: 0 times infinity would be NaN."""
    env = short_episodes()
    policy, critic = network(env, hidden=(4,))
    recipe = algorithm(num_envs=8, num_minibatches=2, epochs=2)
    learner = policy_gradient(env, policy, critic if recipe.value_loss else None, recipe)
    state = learner.init(jax.random.key(0))

    def sharp(path, x):
        name = jax.tree_util.keystr(path)
        return jnp.full_like(x, -5.0) if "log_std" in name else x + 0.5 if "head" in name and "bias" in name else x

    params = state.params._replace(policy=jax.tree_util.tree_map_with_path(sharp, state.params.policy))
    after, metrics = tiny.jit(learner.step)(state._replace(params=params), jax.random.key(1))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(after.params))
    assert np.isfinite([metrics[name] for name in ("policy_loss", "approx_kl", "reference_kl", "entropy")]).all()


def test_a_batch_in_which_nothing_trains_changes_nothing():
    """One action: no group can ever carry a signal."""
    env = envs.make("probe-value")
    policy, _ = networks.mlp(env, hidden=(4,))
    learner = policy_gradient(env, policy, None, ladder.dapo(num_envs=4, group_size=2, max_resample_rounds=2))
    state = learner.init(jax.random.key(0))
    after, metrics = tiny.jit(learner.step)(state, jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    assert all(np.isfinite(x) for x in metrics.values())
    assert (metrics["steps"], metrics["updates"]) == (8, 0)


def spd(n, seed=0):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(n, n))
    return root @ root.T + n * np.eye(n), rng.normal(size=n)


@pytest.mark.parametrize("n", [1, 5, 20])
@pytest.mark.parametrize("extra", [0, 30])
def test_conjugate_gradients_solve_in_as_many_steps_as_there_are_unknowns(n, extra):
    a, b = spd(n)
    matrix = jnp.asarray(a, jnp.float32)
    x = update.conjugate_gradient(lambda v: matrix @ v, jnp.asarray(b, jnp.float32), n + extra)
    np.testing.assert_allclose(x, np.linalg.solve(a, b), rtol=1e-3, atol=1e-5)


def test_k_conjugate_steps_are_the_best_point_of_the_kth_krylov_space():
    a, b = spd(12)
    matrix = jnp.asarray(a, jnp.float32)
    for k in (1, 3, 6):
        space = np.stack([np.linalg.matrix_power(a, i) @ b for i in range(k)], 1)
        space, _ = np.linalg.qr(space)
        best = space @ np.linalg.solve(space.T @ a @ space, space.T @ b)
        x = update.conjugate_gradient(lambda v: matrix @ v, jnp.asarray(b, jnp.float32), k)
        np.testing.assert_allclose(x, best, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("size", [3e-20, 1e-21, 2e19])
def test_conjugate_gradients_do_not_depend_on_the_size_of_numbers(size):
    x = update.conjugate_gradient(lambda v: 2 * v, jnp.full(3, size), 5)
    np.testing.assert_allclose(x, np.full(3, size / 2), rtol=1e-6)
    np.testing.assert_array_equal(update.conjugate_gradient(lambda v: 2 * v, jnp.zeros(3), 5), 0)


def test_conjugate_gradients_are_as_exact_as_their_type():
    a, b = spd(12)
    with jax.enable_x64(True):
        matrix, vector = jnp.asarray(a), jnp.asarray(b)
        x = update.conjugate_gradient(lambda v: matrix @ v, vector, 24)
        assert x.dtype == jnp.float64
    residual = np.linalg.norm(b - a @ np.asarray(x)) / np.linalg.norm(b)
    assert residual < 1e-12


def test_conjugate_gradients_of_nothing_are_nothing():
    x = update.conjugate_gradient(lambda v: v, jnp.zeros(3), 5)
    np.testing.assert_array_equal(x, np.zeros(3))


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e-25, 1e25, 0.0])
def test_a_natural_step_has_its_kl_whatever_the_size_of_the_gradient(scale):
    rng = np.random.default_rng(0)
    root = rng.normal(size=(6, 6))
    fisher = jnp.asarray(root @ root.T + np.eye(6), jnp.float32)
    gradient = scale * jnp.asarray(rng.normal(size=6), jnp.float32)
    step = natural_step(lambda v: fisher @ v, gradient, max_kl=0.01, conjugate_steps=10)
    np.testing.assert_allclose(0.5 * step @ fisher @ step, 0.01 if scale else 0.0, rtol=1e-3)


def trpo(max_kl, seed=0, shared=False, of_update=None, optimizer=None, **settings):
    """One step in a trust region: KL(old || new), how the loss changed, all parameters before and after, metrics."""
    algorithm = ladder.trpo(num_envs=8, num_steps=6, max_kl=max_kl, value_minibatches=1, learning_rate=0.1, **settings)
    policy, critic = networks.mlp(COUNTER, hidden=(4,), shared=shared)
    goal, params, batch = tiny.first_update(COUNTER, policy, critic, algorithm, jax.random.key(seed))
    optimizer = optimizer or update.sgd()
    after, _, metrics = tiny.jit(partial(algorithm.update, goal, optimizer, 0.1, **(of_update or {})))(
        params, optimizer.init(params), batch, jax.random.key(0)
    )
    as_minibatch = goal.as_minibatch(batch)
    kl = goal.distribution(params, batch).kl(goal.distribution(after, batch)).mean()
    change = goal.policy_loss(after, as_minibatch)[0] - goal.policy_loss(params, as_minibatch)[0]
    return float(kl), float(change), params, after, metrics


@pytest.mark.parametrize("max_kl", [1e-3, 0.1, 3.0])
def test_a_step_in_a_trust_region_improves_and_stays_inside(max_kl):
    """A region of three nats is far beyond the quadratic model: there the line search has to shorten the step."""
    kl, change, _, _, metrics = trpo(max_kl, value_epochs=1)
    assert metrics["accepted"] == 1
    assert metrics["policy_gradient_norm"] > 1e-4  # of the policy's step, not of the critic's epochs
    assert change < 0
    assert 0.01 * max_kl < kl <= max_kl * 1.001
    np.testing.assert_allclose(metrics["kl"], kl, rtol=1e-3, atol=1e-7)


def table_batch(states=3, actions=4):
    """Logits `[S, A]` and, in float64, a ragged batch that their policy has acted in."""
    rng = np.random.default_rng(2)
    logits, state, action = (
        rng.normal(size=(states, actions)),
        rng.integers(states, size=(T, B)),
        rng.integers(actions, size=(T, B)),
    )
    log_prob = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))[state, action]
    mask = np.arange(T)[:, None] < np.array([4, 1, 3, 0, 2, 4])
    weight = mask / mask.sum()
    zeros = np.zeros((T, B))
    steps = Transition(np.eye(states)[state], action, log_prob, zeros, zeros, zeros == 1, mask.astype(float))
    part = Rollout(steps, steps.mask)
    batch = update.Batch(part, mask * rng.normal(size=(T, B)), zeros, zeros, weight, (), ())
    return logits, state, action, jax.tree.map(jnp.asarray, batch)


@pytest.mark.parametrize("chunk_rows", [None, 5])
def test_steps_in_float64_are_those_of_a_loop(chunk_rows):
    """Ordinary ones, whole or by chunks, and one in a trust region, by explicit sums over the steps."""
    with jax.enable_x64(True):
        logits, state, action, batch = table_batch()
        p, actions = np.exp(logits) / np.exp(logits).sum(1, keepdims=True), logits.shape[1]
        gradient, fisher = np.zeros_like(logits), 0.1 * np.eye(logits.size)
        for t, b in np.ndindex(T, B):
            s, weight = state[t, b], float(batch.weight[t, b])
            score = np.eye(actions)[action[t, b]] - p[s]
            gradient[s] -= weight * float(batch.advantage[t, b]) * score
            block = slice(s * actions, (s + 1) * actions)
            fisher[block, block] += weight * (np.diag(p[s]) - np.outer(p[s], p[s]))
        natural = np.linalg.solve(fisher, gradient.ravel())
        natural *= np.sqrt(2 * 1e-3 / (natural @ fisher @ natural))

        algorithm = ladder.trpo(num_envs=B, max_kl=1e-3, damping=0.1, conjugate_steps=40, normalize_advantages=False)
        goal = make_objective(tiny.softmax_policy(jnp.asarray(logits)), None, algorithm)
        start, key = Params(jnp.asarray(logits), ()), jax.random.key(0)
        once = partial(update.minibatch_epochs, epochs=1, num_minibatches=1, chunk_rows=chunk_rows)
        ordinary, *_ = once(goal, update.sgd(), 0.5, start, (), batch, key)
        whole, *_ = update.gradient_step(goal, update.sgd(), 0.5, start, (), batch, key)
        trusted, _, metrics = algorithm.update(goal, update.sgd(), 0.5, start, (), batch, key)
    for params in (ordinary, whole):
        np.testing.assert_allclose(params.policy, logits - 0.5 * gradient, rtol=0, atol=1e-12)
    assert float(metrics["accepted"]) == 1
    np.testing.assert_allclose(trusted.policy, logits - natural.reshape(logits.shape), rtol=0, atol=1e-12)
    assert np.abs(natural).max() > 0.01


def line_search(loss, distribution, start, backtracks, max_kl=0.1):
    """Where a trust region takes the one parameter of a distribution; whether it was taken anywhere."""
    goal = objective(lambda params, batch: (loss(params.policy[0]), {}))
    goal = goal._replace(distribution=lambda params, batch: distribution(params.policy[0]))
    params, _, metrics = update.trust_region_step(
        goal, update.sgd(), 0.1, Params(jnp.array([start]), ()), (), blank_batch(), jax.random.key(0),
        max_kl=max_kl, conjugate_steps=1, damping=0.0, backtracks=backtracks, value_epochs=1, value_minibatches=1,
    )  # fmt: skip
    return float(params.policy[0]), float(metrics["accepted"]), float(metrics["kl"])


@pytest.mark.parametrize(("backtracks", "halvings"), [(10, 5), (6, 5), (5, None)])
def test_the_step_is_halved_until_the_loss_falls(backtracks, halvings):
    """The mean of a normal variable: KL = x²/2 and F = 1, so the step is sqrt(2 max_kl); the loss falls below 0.02."""

    def normal(x):
        return DiagonalGaussian(jnp.full((T, B, 1), x), jnp.zeros(1))

    x, accepted, _ = line_search(lambda x: -x + 50 * x**2, normal, 0.0, backtracks)
    assert accepted == (halvings is not None)
    np.testing.assert_allclose(x, np.sqrt(0.2) / 2**halvings if accepted else 0.0, rtol=1e-5)


def test_the_step_is_halved_until_the_kl_is_kept():
    """A rare action of two: the quadratic model allows a step that makes it likely, the true KL does not."""
    start = -4.6

    def rare(x):
        return Categorical(jnp.stack([x, 0.0])[None, None] * jnp.ones((T, B, 1)))

    x, accepted, kl = line_search(lambda x: -x, rare, start, 10)
    p, q = 1 / (1 + np.exp(-start)), 1 / (1 + np.exp(-x))
    true_kl = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    assert accepted == 1
    np.testing.assert_allclose(kl, true_kl, rtol=1e-3)
    assert true_kl < 0.1
    np.testing.assert_allclose(x - start, np.sqrt(0.2 / (p * (1 - p))) / 2, rtol=1e-3)  # halved once


def test_a_step_that_cannot_be_taken_is_not_taken():
    """No step length is tried, or none is short enough."""
    kl, _, params, after, metrics = trpo(0.01, of_update={"backtracks": 0}, value_epochs=1)
    assert metrics["accepted"] == kl == 0
    jax.tree.map(np.testing.assert_array_equal, after.policy, params.policy)
    assert any(jax.tree.leaves(jax.tree.map(lambda x, y: (x != y).any(), after.critic, params.critic)))


def test_more_passes_of_the_critic_leave_the_policy_alone():
    """Also where they share a torso."""
    *_, once, _ = trpo(0.01, shared=True, value_epochs=1)
    *_, often, _ = trpo(0.01, shared=True, value_epochs=6)
    jax.tree.map(np.testing.assert_array_equal, once.policy, often.policy)
    assert any(jax.tree.leaves(jax.tree.map(lambda x, y: (x != y).any(), once.critic, often.critic)))


def test_weight_decay_of_the_critic_leaves_the_policy_where_the_search_ended():
    *_, plain, _ = trpo(0.01, value_epochs=1)
    *_, decayed, _ = trpo(0.01, value_epochs=1, optimizer=optax.add_decayed_weights(0.5))
    jax.tree.map(np.testing.assert_array_equal, decayed.policy, plain.policy)
    assert any(jax.tree.leaves(jax.tree.map(lambda x, y: (x != y).any(), decayed.critic, plain.critic)))


def test_metrics_of_an_update_are_means_over_the_steps_that_train():
    """Entropy, KL and the clipped fractions of a policy that has moved, against a slow loop over the batch."""
    goal, params, batch = ppo_batch(partial(networks.mlp, hidden=(4,)), clip=0.1, clip_high=0.2)
    flat, unravel = jax.flatten_util.ravel_pytree(params.policy)
    moved = params._replace(policy=unravel(flat + 0.3 * jax.random.normal(jax.random.key(1), flat.shape)))
    old_log_prob = batch.rollout.steps.log_prob
    _, metrics = goal.policy_loss(moved, goal.as_minibatch(batch))
    distribution = goal.distribution(moved, batch)
    log_prob = distribution.log_prob(batch.rollout.steps.action)
    advantage = goal.as_minibatch(batch).advantage
    ratio = np.exp(log_prob - old_log_prob)
    low, high = (ratio < 0.9) & (advantage < 0), (ratio > 1.2) & (advantage > 0)
    np.testing.assert_allclose(metrics["entropy"], distribution.entropy().mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["approx_kl"], (ratio - 1 - np.log(ratio)).mean(), rtol=1e-3)
    np.testing.assert_allclose(metrics["clipped_low"], low.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["clipped_high"], high.mean(), rtol=1e-5)
    assert 0 < low.mean() < 1
    assert 0 < high.mean() < 1


@pytest.mark.parametrize("num_minibatches", [1, 100])
def test_minibatches_of_padding_do_not_make_the_policy_look_certain(num_minibatches: int) -> None:
    """Of an episode of some 20 steps in 500 rows most minibatches are empty; the first policy is nearly uniform."""
    env = envs.make("CartPole-v1")
    algorithm = ladder.ppo(num_envs=1, num_steps=None, num_minibatches=num_minibatches, epochs=1, learning_rate=1e-6)
    learner = policy_gradient(env, *networks.mlp(env, hidden=(8,)), algorithm)
    state, key = learner.init(KEY), jax.random.key(1)
    metrics = jax.jit(learner.step)(state, key)[1]
    assert metrics["length"] < 100
    assert metrics["entropy"] == pytest.approx(math.log(2), abs=1e-3)
    assert 1 <= metrics["updates"] <= min(num_minibatches, metrics["length"])


@pytest.mark.parametrize(("rounds", "trains"), [(None, True), (2, False)])
def test_where_no_group_has_signal_the_entropy_is_measured_or_no_update_is_counted(
    rounds: int | None, trains: bool
) -> None:
    """Rewards are all equal: the steps keep their entropy. Where resampling drops all, there is none to measure."""
    cart_pole = envs.make("CartPole-v1")

    def step(key: Key, state: Tree, action: Array) -> tuple[Tree, TimeStep]:
        state, timestep = cart_pole.step(key, state, action)
        return state, timestep._replace(reward=jnp.zeros(()))

    env = cart_pole._replace(step=step)
    algorithm = ladder.dapo(num_envs=4, group_size=2, num_minibatches=2, max_resample_rounds=rounds)
    learner = policy_gradient(env, networks.mlp(env, hidden=(8,))[0], None, algorithm)
    metrics = jax.jit(learner.step)(learner.init(KEY), jax.random.key(1))[1]
    np.testing.assert_allclose(metrics["entropy"], math.log(2) if trains else 0.0, atol=1e-3)
    assert (metrics["updates"] > 0) == trains
