"""The learner of action values: when it learns, what its target network is, and what its configs refuse."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import networks, update, values
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments import parts
from jaxpg.experiments.build import build
from jaxpg.models.layers import LayerNorm, RMSNorm
from jaxpg.types import Params
from jaxpg.values import replay_learning, targets
from jaxpg.values.deep_q import Parts
from jaxpg.values.q_networks import QNetwork, q_network
from jaxpg.values.replay import Drawn, NStep
from jaxpg.vectorize import where_in_batch

mlp = partial(values.mlp, hidden=(4,), activation="tanh")


def equal(one, other) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), one, other)))


def test_learning_starts_when_it_should_and_the_target_network_follows():
    """Four environments, five steps per iteration; it learns from step 28 on, with a new target after 6 updates."""
    env = tiny.counter()
    algorithm = values.dqn(
        num_envs=4, repeats=5, learning_starts=28, gradient_steps=2, batch_size=8, buffer_size=40, target_period=6
    )
    learner = values.deep_q(env, mlp(env), algorithm)
    step, state = tiny.jit(learner.step), tiny.jit(learner.init)(jax.random.key(0))
    states, metrics = [state], []
    for i in range(3):
        state, measured = step(states[-1], jax.random.key(i))
        states.append(state)
        metrics.append(measured)
    assert [int(x.steps) for x in states] == [0, 20, 40, 60]
    assert [int(x.updates) for x in states] == [0, 0, 8, 18]
    assert [float(x["updates"]) for x in metrics] == [0, 8, 10]
    assert equal(states[1].params, states[0].params)
    assert equal(states[1].target, states[0].params.policy)
    assert not equal(states[2].target, states[0].params.policy)  # after update 6
    assert not equal(states[2].target, states[2].params.policy)  # after update 8
    assert equal(states[3].target, states[3].params.policy)  # after update 18
    given = jax.tree.map(lambda x: x + 1, state.params.policy)
    changed = learner.with_policy(state, given)
    assert equal(changed.params, Params(given, ()))
    assert equal(changed.target, given)


def test_every_gradient_step_of_an_iteration_draws_a_batch_of_its_own():
    """And not from the numbers of a rollout: 3 repeats of 2 gradient steps and a rollout each."""
    env = tiny.counter()
    algorithm = values.dqn(num_envs=4, repeats=3, gradient_steps=2, batch_size=8, buffer_size=40)
    learner = values.deep_q(env, mlp(env), algorithm)
    state = learner.init(jax.random.key(0))
    found = Parts(env, q_network(env, mlp(env), algorithm.head), algorithm, algorithm.optimizer())
    settings = replay_learning.ReplaySettings(40, 8, 0, 2, 3)
    numbers = replay_learning._random_numbers(settings, found, state, jax.random.key(1))
    drawn = [str(x.tolist()) for x in numbers.batches.number.reshape(6, 8)]
    assert len(set(drawn)) == 6
    for key in numbers.collect_key:
        keys = jax.vmap(jax.random.split)(jnp.stack([key, *jax.random.split(key)])).ravel()
        assert not set(drawn) & {str(jax.random.bits(k, (8,)).tolist()) for k in keys}
    assert len({str(jax.random.key_data(k).tolist()) for k in numbers.collect_key}) == 3


def test_what_is_reported_of_gradient_steps_are_means_over_them():
    """With parameters that stand nearly still, eight batches an iteration report what one does, up to noise."""
    env = tiny.counter()

    def measured(repeats: int) -> dict:
        algorithm = values.dqn(num_envs=256, repeats=repeats, learning_rate=1e-9, batch_size=512, learning_starts=1)
        learner = values.deep_q(env, mlp(env), algorithm)
        state, _ = learner.step(learner.init(jax.random.key(0)), jax.random.key(1))
        return learner.step(state, jax.random.key(2))[1]

    one, eight = (tiny.jit(partial(measured, repeats))() for repeats in (1, 8))
    assert (one["updates"], eight["updates"]) == (1, 8)
    for name in ("td_loss", "q_value", "gradient_norm"):
        np.testing.assert_allclose(eight[name], one[name], rtol=0.2, err_msg=name)


def test_a_batch_is_drawn_from_the_steps_that_are_stored_and_no_others():
    """Three steps of each of four environments an iteration, in rings of nine; every reward of theirs is above 0."""
    env = tiny.counter()
    algorithm = values.dqn(num_envs=4, repeats=3, learning_starts=10**6, batch_size=8, buffer_size=36)
    learner = values.deep_q(env, mlp(env), algorithm)
    found = Parts(env, q_network(env, mlp(env), algorithm.head), algorithm, algorithm.optimizer())
    step, state = tiny.jit(learner.step), tiny.jit(learner.init)(jax.random.key(0))
    for steps in (3, 6, 9, 12):
        state, _ = step(state, jax.random.key(steps))
        buffer = state.runner.replay.buffer
        window = replay_learning._window(found, buffer, state.steps)
        np.testing.assert_array_equal(buffer.reward > 0, np.broadcast_to(np.arange(9) < steps, (4, 9)))
        assert (int(window.cursor), int(window.filled)) == (steps % 9, min(steps, 9))


def test_every_new_step_can_be_drawn():
    """Three steps of each of four environments an iteration, all with the priority of steps not yet drawn."""
    env = tiny.counter()
    algorithm = values.prioritized_dqn(
        num_envs=4, train_frequency=3, repeats=1, learning_starts=10**6, batch_size=8, buffer_size=36
    )
    learner = values.deep_q(env, mlp(env), algorithm)
    step, state = tiny.jit(learner.step), tiny.jit(learner.init)(jax.random.key(0))
    for steps in (3, 6):
        state, _ = step(state, jax.random.key(steps))
        (priorities,) = state.runner.replay.sampling.levels
        there = np.arange(9) < steps
        np.testing.assert_array_equal(priorities.reshape(4, -1)[:, :9], np.broadcast_to(there, (4, 9)))


def test_the_steps_of_an_iteration_are_in_the_order_of_time():
    """Of four rounds of three steps each: every successor that is known is one second on, also where time is out."""
    env = tiny.counter()
    algorithm = values.dqn(num_envs=4, train_frequency=3, repeats=4, learning_starts=10**6, buffer_size=96)
    learner = values.deep_q(env, mlp(env), algorithm)
    rollout, _ = tiny.jit(learner.experience.collect)(tiny.jit(learner.init)(jax.random.key(0)), jax.random.key(1))
    steps = jax.tree.map(np.asarray, rollout.steps)
    assert steps.obs.shape == (12, 4, 2)
    assert set(steps.discount[steps.last].tolist()) == {0.0, 1.0}
    known = steps.discount > 0
    np.testing.assert_array_equal(tiny.next_obs(rollout)[known], (steps.obs + np.array([0.0, 1.0]))[known])
    np.testing.assert_allclose(steps.reward, steps.obs @ [10.0, 1.0] + 0.1 * steps.action, rtol=1e-5)


def test_learning_waits_for_as_many_steps_as_a_target_has():
    """Of four rounds of a step and a batch, those of the third and the fourth step."""
    env = tiny.counter()
    algorithm = values.n_step_dqn(
        num_envs=4, n_steps=3, repeats=4, learning_starts=1, batch_size=8, buffer_size=40, target_period=1
    )
    learner = values.deep_q(env, mlp(env), algorithm)
    state, metrics = tiny.jit(learner.step)(tiny.jit(learner.init)(jax.random.key(0)), jax.random.key(1))
    assert state.updates == metrics["updates"] == 2


def test_exploration_falls_with_the_steps_of_the_environments():
    """Before anything is learned: hardly anything else at first, and the best actions alone after epsilon_steps."""
    env = tiny.counter()
    algorithm = values.dqn(num_envs=32, epsilon_end=0.0, epsilon_steps=960, learning_starts=10**6, repeats=8)
    learner, network = values.deep_q(env, mlp(env), algorithm), q_network(env, mlp(env), algorithm.head)
    begun = tiny.jit(learner.init)(jax.random.key(0))
    collect = tiny.jit(lambda steps: learner.experience.collect(begun._replace(steps=steps), jax.random.key(1))[0])
    for after, low, high in ((0, 0.25, 0.55), (960, 1.0, 1.0)):
        steps = collect(jnp.int32(after)).steps
        best = network.values(begun.params.policy, steps.obs).argmax(-1)
        assert low <= (steps.action == best).mean() <= high


@pytest.mark.parametrize("name", ["dqn", "qr_dqn", "rainbow"])
def test_a_gradient_step_is_that_of_a_slow_loop(name):
    """Of weighted rows; the step size falls with the steps of the environments, of which a quarter are over."""
    rng, rows, settings = np.random.default_rng(0), 8, {} if name == "dqn" else {"quantiles": 4}
    online, target = rng.normal(size=(2, 6, 3, settings.get("quantiles", 1)))
    state, successor, action = rng.integers(6, size=rows), rng.integers(6, size=rows), rng.integers(3, size=rows)
    reward, factor, weight = rng.normal(size=rows), rng.choice([0.0, 0.9, 0.81], size=rows), rng.random(rows) + 0.1
    table = QNetwork(init=lambda key: None, returns=lambda params, obs: params[obs])
    algorithm = values.ALGORITHMS[name](learning_rate=0.5, anneal_steps=1000, **settings)
    learned = replay_learning._Learned(
        Params(jnp.asarray(online, jnp.float32), ()), jnp.asarray(target, jnp.float32), (), jnp.int32(0)
    )
    learned = learned._replace(opt_state=update.sgd().init(learned.params))
    batch = NStep(*map(jnp.asarray, (state, action, np.float32(reward), np.float32(factor), successor)))
    drawn = Drawn(jnp.zeros(rows, int), jnp.zeros(rows, int), jnp.asarray(weight, jnp.float32))
    found = Parts(SimpleNamespace(), table, algorithm, update.sgd())
    learn = tiny.jit(partial(replay_learning._learn, found, rows))
    after, td_error, metrics = learn(learned, batch, drawn, jnp.int32(250))

    gradient, errors = np.zeros_like(online), []
    for s, a, r, d, after_s, w in zip(state, action, reward, factor, successor, weight, strict=True):
        rated_by = online if name == "rainbow" else target
        samples = r + d * target[after_s, rated_by[after_s].mean(-1).argmax()]
        errors.append(samples.mean() - online[s, a].mean())
        for i, theta in enumerate(online[s, a]):
            u = samples - theta
            share = 1.0 if name == "dqn" else np.abs((i + 0.5) / 4 - (u < 0))
            gradient[s, a, i] -= w / rows * (share * np.clip(u, -1, 1)).mean()
    np.testing.assert_allclose(after.params.policy, online - 0.5 * 0.75 * gradient, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(td_error, errors, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["q_value"], online[state, action].mean(), rtol=1e-4)
    np.testing.assert_array_equal(after.target, learned.target)  # not due yet
    if name != "dqn":
        assert (online.max(-1).argmax(-1) != online.mean(-1).argmax(-1)).any()
        assert (target[..., 0].argmax(-1) != target.mean(-1).argmax(-1))[successor].any()


def test_an_update_of_pqn_goes_towards_its_lambda_returns():
    """The loss of the only minibatch, of a rollout with terminations and time-outs, beside a slow loop."""
    env, key = tiny.counter(), jax.random.key(1)
    algorithm = values.pqn(num_envs=8, num_steps=6, epochs=1, num_minibatches=1, gae_lambda=0.7, gamma=0.9)
    learner, network = values.deep_q(env, mlp(env), algorithm), q_network(env, mlp(env), algorithm.head)
    state = tiny.jit(learner.init)(jax.random.key(0))
    rollout, _ = tiny.jit(learner.experience.collect)(state, key)
    steps, following = jax.tree.map(np.asarray, rollout.steps), np.zeros(8)
    assert set(steps.discount[steps.last].tolist()) == {0.0, 1.0}
    q = np.asarray(network.values(state.params.policy, rollout.steps.obs), np.float64)
    successors = jnp.asarray(np.nan_to_num(tiny.next_obs(rollout)), jnp.float32)
    best, errors = np.asarray(network.values(state.params.policy, successors), np.float64).max(-1), []
    for t in reversed(range(6)):
        mixed = np.where(steps.last[t] | (t == 5), best[t], 0.3 * best[t] + 0.7 * following)
        following = steps.reward[t] + 0.9 * steps.discount[t] * mixed
        errors.append(following - q[t, np.arange(8), steps.action[t]])
    _, metrics = tiny.jit(learner.step)(state, key)
    np.testing.assert_allclose(metrics["td_loss"], (np.array(errors) ** 2).mean() / 2, rtol=1e-4)
    assert metrics["updates"] == 1


def test_of_a_batch_each_member_chooses_for_itself():
    """Where one of them has begun to learn, what the others had stays as it was."""
    new, old = {"w": jnp.ones((3, 2)), "n": jnp.ones(())}, {"w": jnp.zeros((3, 2)), "n": jnp.zeros(())}
    axes = (0, {"w": 0, "n": None}, {"w": 0, "n": None})
    chosen = jax.vmap(where_in_batch, axes)(jnp.array([True, False, True]), new, old)
    assert chosen["w"].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert chosen["n"].tolist() == [1, 0, 1]
    alone = jax.make_jaxpr(where_in_batch)(jnp.array(True), new, old)
    assert " select_n" not in str(alone)


@pytest.mark.parametrize("loss", [targets.huber_loss, targets.squared_loss])
def test_values_learned_from_a_buffer_are_those_of_the_environment(loss):
    """Episodes of 2 steps, rewards 20 and 21 (and 0.1 per number of the action), discount 0.5: 20.2 + 0.5 * 21.2."""
    env = tiny.counter(shortest=2, longest=2)
    algorithm = values.dqn(
        num_envs=4, repeats=1500, learning_rate=1e-2, anneal_steps=6000, gamma=0.5, epsilon_end=1.0, target_period=20
    )._replace(loss=loss)
    learner = values.deep_q(env, values.mlp(env, hidden=(32,)), algorithm)

    @tiny.jit
    def train(key):
        state, _ = learner.step(learner.init(key), key)
        actor = learner.actor(state)
        network = values.q_network(env, values.mlp(env, hidden=(32,)), algorithm.head)
        obs = jnp.array([[2.0, 0.0], [2.0, 1.0]])
        return network.values(state.params.policy, obs), actor.act((), obs[0], key, True)[0]

    q, action = train(jax.random.key(0))
    np.testing.assert_allclose(q[1], [21.0, 21.1, 21.2], atol=0.1)
    np.testing.assert_allclose(q[0], np.array([20.0, 20.1, 20.2]) + 0.5 * 21.2, atol=0.2)
    assert action == 2


@pytest.mark.parametrize(
    ("ours", "theirs"), [(LayerNorm(), nn.LayerNorm()), (RMSNorm(jnp.float32), nn.RMSNorm())], ids=["layer", "rms"]
)
def test_normalisation_is_flax_s(ours, theirs):
    x = 3 + 2 * jax.random.normal(jax.random.key(0), (5, 16))
    params = tiny.jit(theirs.init)(jax.random.key(1), x)
    params = jax.tree.map(lambda p: p + 0.1 * jnp.arange(16.0), params)
    assert jax.tree.map(jnp.shape, tiny.jit(ours.init)(jax.random.key(1), x)) == jax.tree.map(jnp.shape, params)

    def both(module):
        return tiny.jit(jax.value_and_grad(lambda p, x: (module.apply(p, x) ** 3).sum(), argnums=(0, 1)))(params, x)

    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3), both(ours), both(theirs))


def test_the_root_mean_square_is_float32_in_every_arithmetic():
    """A mean of 4,096 squares in bfloat16 would be wrong by percents; the result has one rounding."""
    x = jnp.full((1, 4096), 3.0, jnp.bfloat16).at[0, 0].set(100)
    found = RMSNorm(jnp.bfloat16).apply({"params": {"scale": jnp.full(4096, 1.5)}}, x)
    assert found.dtype == jnp.bfloat16
    expected = 1.5 * np.asarray(x, np.float64) / np.sqrt((np.asarray(x, np.float64) ** 2).mean() + 1e-6)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(LayerNorm(), nn.LayerNorm()), (RMSNorm(jnp.float32), nn.RMSNorm())], ids=["layer", "rms"]
)
def test_what_is_added_to_a_variance_is_flax_s(ours, theirs):
    """Of numbers whose squares are no larger than that, half of the result depends on it."""
    x = 1e-3 * jax.random.normal(jax.random.key(0), (5, 16))
    params = theirs.init(jax.random.key(1), x)
    np.testing.assert_allclose(ours.apply(params, x), theirs.apply(params, x), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("network", [networks.mlp, networks.recurrent, networks.cnn])
def test_layer_normalisation_is_a_setting_of_every_network(network):
    env = tiny.pictures(tiny.counter())
    plain, normal = (jax.eval_shape(network(env, layer_norm=x)[0].init, jax.random.key(0)) for x in (False, True))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(normal)]
    assert len(paths) > len(jax.tree.leaves(plain))
    assert any("LayerNorm" in path for path in paths)


@pytest.mark.parametrize("task", ["cartpole", "breakout", "asterix", "frozen_lake"])
@pytest.mark.parametrize("algorithm", values.ALGORITHMS)
def test_every_algorithm_resolves(task, algorithm):
    config = configs.resolve_config(task, algorithm)
    assert config.network["kind"] in parts.NETWORKS_OF[algorithm]
    assert config.network.keys() - {"kind"} == configs.options(parts.Q_NETWORKS[config.network["kind"]]).keys()


@pytest.mark.parametrize(
    ("task", "settings", "shards", "sentence"),
    [
        ("cartpole", {"buffer_size": 5}, 1, "buffer_size = 5 is too small for 10 environments: .* 10 in all"),
        ("cartpole", {"batch_size": 3}, 2, "batch_size = 3 cannot be split evenly over 2 devices"),
        ("cartpole", {"num_envs": 9}, 2, "num_envs = 9 cannot be split evenly over 2 devices"),
        ("cartpole", {"scale_rewards": True}, 1, "dqn has no scale_rewards: set scale_rewards = false"),
        ("cartpole", {"network.shared": True}, 1, "no setting 'shared' of the network mlp"),
        ("sort", {}, 1, "no kind of network 'transformer' for dqn"),
        ("sort", {"network": {"kind": "mlp"}}, 1, "whole episodes"),
        ("cartpole", {"environment": "Pendulum-v1"}, 1, "Action values need discrete actions"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(task, settings, shards, sentence):
    with pytest.raises(UserError, match=sentence):
        build(configs.resolve_config(task, "dqn", settings), shards)


def test_a_buffer_that_holds_no_whole_target_is_refused():
    config = configs.resolve_config("cartpole", "n_step_dqn", {"buffer_size": 29, "n_steps": 3})
    with pytest.raises(UserError, match=r"29 is too small for 10 environments: .* 3 steps of each, 30 in all"):
        build(config)
