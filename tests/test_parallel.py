"""Four devices that share a batch are one learner: the same parameters as one device, to rounding.

With plain gradient descent, since Adam would hide a gradient that is wrong by a factor. Episodes are of unequal length,
so each device holds another number of steps.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import lax

from jaxpg import envs, ladder, language, networks, parallel, update
from jaxpg.errors import UserError
from jaxpg.parallel import collectives
from jaxpg.policy_gradient import policy_gradient
from jaxpg.update import optimizers

DEVICES, UPDATES = 4, 3
EPISODES = {"num_envs": 8}
SEGMENT = {"num_envs": 8, "num_steps": 6}
WHOLE_BATCH = {"epochs": 2, "num_minibatches": 1}  # which steps meet in a minibatch depends on the devices
GROUPS = EPISODES | WHOLE_BATCH | {"group_size": 2, "max_grad_norm": 0.5, "learning_rate": 0.2}
TRUST = {"value_epochs": 2, "value_minibatches": 1, "conjugate_steps": 4}
SCALED = {"normalize_observations": True, "scale_rewards": True}

mlp = partial(networks.mlp, hidden=(4,))
gru = partial(networks.recurrent, hidden=(4,), width=4)
cnn = partial(networks.cnn, channels=(2,), hidden=(4,))
counter, target = tiny.counter(), tiny.target()
text = envs.make("reverse", length=3, letters=5, rewards={"accuracy": 1.0, "length": 1.0})
decoder = partial(language.transformer, width=8, layers=1, heads=2, kv_heads=1)

# name: (algorithm, its settings, environment, networks, settings of the learner)
TABLE = {
    "reinforce": ("reinforce", EPISODES, counter, mlp, {}),
    "reinforce_to_go": ("reinforce_to_go", EPISODES, counter, mlp, {}),
    "reinforce_baseline": ("reinforce_baseline", EPISODES, counter, mlp, {}),
    "running baseline": ("reinforce_baseline", EPISODES | {"baseline_kind": "running"}, counter, mlp, {}),
    "actor_critic_mc": ("actor_critic_mc", EPISODES | {"normalize_advantages": True}, counter, mlp, {}),
    "actor_critic_td": ("actor_critic_td", SEGMENT, counter, mlp, {}),
    "a2c, scaled": ("a2c", SEGMENT | {"learning_rate": 0.2}, counter, mlp, SCALED),
    "trpo": ("trpo", SEGMENT | TRUST, counter, mlp, {}),
    "ppo": ("ppo", SEGMENT | WHOLE_BATCH, counter, mlp, {}),
    "ppo, cnn": ("ppo", SEGMENT | WHOLE_BATCH, tiny.pictures(counter), cnn, {}),
    "ppo, gru, pool": ("ppo", SEGMENT | WHOLE_BATCH | {"reset_pool": 2, "target_kl": 0.01}, counter, gru, {}),
    "grpo": ("grpo", GROUPS, counter, mlp, {}),
    "rloo": ("rloo", GROUPS, counter, mlp, {}),
    "dr_grpo": ("dr_grpo", GROUPS | {"max_length": 4}, counter, mlp, {}),
    # With real actions no two returns are equal. Groups without signal are refilled by each device for itself.
    "dapo": ("dapo", GROUPS, target, mlp, {}),
    "cispo": ("cispo", GROUPS, target, mlp, {}),
    "rlhf": ("rlhf", EPISODES | WHOLE_BATCH, counter, mlp, {}),
    "rlhf, text": ("rlhf", EPISODES | WHOLE_BATCH, text, decoder, {}),
    "grpo, text": ("grpo", GROUPS, text, decoder, {}),
    "dapo, text": ("dapo", GROUPS | {"overlong_filtering": True}, text, decoder, {}),
}
KEYS = jax.random.split(jax.random.key(1), UPDATES)


def make(name, **changes):
    algorithm, settings, env, network, options = TABLE[name]
    settings = {"learning_rate": 0.01} | settings | changes
    record = ladder.ALGORITHMS[algorithm](**settings)
    record = record._replace(optimizer=partial(update.sgd, max_grad_norm=settings.get("max_grad_norm")))
    return policy_gradient(env, *network(env), record, **options)


def initial(learner):
    return tiny.jit(learner.init)(jax.random.key(0))


def updates(learner):
    """Some updates in a row; the metrics of the last."""

    def run(state, keys):
        state, metrics = lax.scan(learner.step, state, keys)
        return state, jax.tree.map(lambda x: x[-1], metrics)

    return run


def on_one(learner, state):
    return tiny.jit(updates(learner))(state, KEYS)


def over(mesh, learner, states):
    """Where the states lie on a mesh, where the updates take them, and the metrics; all `[S, ...]`."""
    specs = parallel.state_specs(states, mesh)
    program = parallel.spread(
        parallel.map_seeds(updates(learner)),
        mesh,
        in_specs=(specs, parallel.PER_SEED),
        out_specs=(specs, parallel.PER_SEED),
    )
    placed = parallel.place(states, specs, mesh)
    keys = jnp.broadcast_to(KEYS, (mesh.shape[parallel.SEED], *KEYS.shape))
    return placed, *tiny.jit(program)(placed, keys)


def by_shard_map(learner, state):
    mesh = parallel.make_mesh(1, 8, jax.devices()[:DEVICES])
    return jax.tree.map(lambda x: x[0], over(mesh, learner, jax.tree.map(lambda x: x[None], state))[1:])


def split(state):
    """The state with `[devices, B / devices, ...]` leaves of the environments, and which axis is the devices'."""
    runner = jax.tree.map(lambda x: x.reshape(DEVICES, x.shape[0] // DEVICES, *x.shape[1:]), state.runner)
    axes = jax.tree.map(lambda _: None, state)._replace(runner=0)
    return state._replace(runner=runner), axes


def joined(states, metrics):
    """From one copy per device to one, after a look whether all are the same."""
    runner = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]) if x.size else x[0], states.runner)
    copies = (states._replace(runner=()), metrics)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape)), copies)
    state, metrics = jax.tree.map(lambda x: x[0], copies)
    return state._replace(runner=runner), metrics


def mapped(transform, learner, state):
    """By `pmap` or `vmap` over the data axis. They count devices by what is mapped, and a runner may be empty."""
    state, axes = split(state)
    run = updates(learner)
    program = transform(lambda state, keys, _: run(state, keys), axis_name=collectives.DATA, in_axes=(axes, None, 0))
    return joined(*program(state, KEYS, jnp.arange(DEVICES)))


def by_pmap(learner, state):
    return mapped(partial(jax.pmap, devices=jax.devices()[:DEVICES]), learner, state)


def by_vmap(learner, state):
    return mapped(lambda *args, **kwargs: tiny.jit(jax.vmap(*args, **kwargs)), learner, state)


def distance(one, other):
    """The largest difference, relative to the size of an array where that is above one."""

    def apart(x, y):
        return np.abs(x - y).max(initial=0.0) / np.abs(y).max(initial=1.0)

    apart = jax.tree.map(apart, one, other)
    return max(jax.tree.leaves(apart))


def moved(state, after):
    return distance(after.params.policy, state.params.policy)


@pytest.fixture(scope="module", params=TABLE)
def run(request):
    """A learner, its state, and where one device takes it."""
    learner = make(request.param)
    state = initial(learner)
    return request.param, learner, state, *on_one(learner, state)


@pytest.mark.parametrize("way", [by_shard_map, by_pmap])
def test_four_devices_are_one(run, way):
    name, learner, state, expected, expected_metrics = run
    if way is by_pmap and name != TABLE[name][0] in TABLE:
        pytest.skip("every rung is mapped once, and its variants by shard_map alone")
    assert moved(state, expected) > 1e-3
    after, metrics = way(learner, state)
    assert distance(after._replace(runner=()), expected._replace(runner=())) < 1e-5
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), metrics, expected_metrics)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), after.runner, expected.runner)


@pytest.mark.parametrize("name", ["reinforce_baseline", "a2c, scaled", "trpo", "ppo", "grpo", "dr_grpo"])
def test_it_is_the_sum_over_devices_that_makes_them_one(name, monkeypatch):
    """The test above has power: without the sum, each device goes its own way."""
    learner = make(name)
    state = initial(learner)
    expected, _ = on_one(learner, state)
    monkeypatch.setattr(collectives, "psum", lambda tree: tree)
    after, _ = by_shard_map(learner, state)
    assert distance(after.params, expected.params) > 1e-4


@pytest.mark.parametrize("name", ["ppo", "ppo, gru, pool", "dapo"])
def test_four_devices_are_four_shards_on_one(name):
    """Also where steps are dealt into minibatches by each device for itself, and groups refilled."""
    changes = {"num_minibatches": 2}
    if name == "dapo":
        changes |= {"max_resample_rounds": 3}
    learner = make(name, **changes)
    state = initial(learner)
    shards, metrics = by_vmap(learner, state)
    after, same_metrics = by_shard_map(learner, state)
    assert moved(state, after) > 1e-3
    assert distance(after, shards) < 1e-5
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), metrics, same_metrics)


def test_devices_wait_for_each_other_while_groups_are_refilled():
    """The counter has groups without signal, on some devices and not on others."""
    env = tiny.counter(actions=2)
    algorithm = ladder.dapo(**GROUPS, max_resample_rounds=6)._replace(optimizer=update.sgd)
    learner = policy_gradient(env, *mlp(env), algorithm)
    state = initial(learner)
    after, metrics = by_shard_map(learner, state)
    shards, same_metrics = by_vmap(learner, state)
    assert metrics["steps"] > UPDATES * 8 * 4  # more than one round, counted on all devices
    assert metrics["steps"] == same_metrics["steps"]
    assert distance(after, shards) < 1e-5


def test_devices_see_different_environments():
    learner = make("ppo")
    after, _ = by_shard_map(learner, initial(learner))
    lengths, times = (np.asarray(x) for x in after.runner.collector.env_state)
    assert len(set(zip(lengths.tolist(), times.tolist(), strict=True))) > 2


@pytest.mark.parametrize(
    ("seeds", "envs", "devices", "shape"), [(1, 8, 4, (1, 4)), (4, 8, 4, (4, 1)), (2, 8, 4, (2, 2)), (3, 8, 4, (1, 4))]
)
def test_seeds_are_spread_before_environments(seeds, envs, devices, shape):
    mesh = parallel.make_mesh(seeds, envs, jax.devices()[:devices])
    assert mesh.devices.shape == shape
    assert mesh.axis_names == (parallel.SEED, collectives.DATA)


def test_environments_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="4 devices cannot share 1 seeds of 6 environments"):
        parallel.make_mesh(1, 6, jax.devices()[:4])


def test_seeds_over_devices_are_a_loop_over_seeds():
    """Two seeds of two devices each: nothing is summed across seeds."""
    learner = make("ppo")
    keys = jnp.stack([jax.random.key(0), jax.random.key(5)])
    states = jax.vmap(learner.init)(keys)
    mesh = parallel.make_mesh(2, 8, jax.devices()[:4])
    _, after, _ = over(mesh, learner, states)
    single = tiny.jit(updates(learner))
    for i in range(2):
        expected, _ = single(jax.tree.map(lambda x, i=i: x[i], states), KEYS)
        assert distance(jax.tree.map(lambda x, i=i: x[i], after.params), expected.params) < 1e-5


def test_without_devices_the_functions_are_trivial():
    assert collectives.psum(3.0) == 3.0
    assert collectives.num_shards() == 1
    assert collectives.shard_index() == 0


@pytest.mark.parametrize("name", ["grpo, text"])
def test_devices_that_share_the_parameters_are_one_as_well(name):
    """Each holds a part of them, before and after, and what is learned is what one device learns."""
    learner = make(name)
    keys = jax.random.split(jax.random.key(0), 1)
    mesh = parallel.make_mesh(1, 8, jax.devices()[:DEVICES], DEVICES, sharded=True)
    assert parallel.batch_shards(mesh) == 1
    states = jax.vmap(learner.init)(keys)
    placed, after, metrics = over(mesh, learner, states)
    expected, expected_metrics = on_one(learner, jax.tree.map(lambda x: x[0], states))
    assert moved(jax.tree.map(lambda x: x[0], states), expected) > 1e-3
    assert distance(jax.tree.map(lambda x: x[0], after.params), expected.params) < 1e-5
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[0], y, rtol=1e-4, atol=1e-5), metrics, expected_metrics)
    for state in (placed, after):
        arrays = jax.tree.leaves(state.params)
        here = sum(x.addressable_shards[0].data.size for x in arrays)
        assert here < 0.5 * sum(x.size for x in arrays)


def test_a_large_model_keeps_the_arrays_that_devices_share(monkeypatch):
    """Flattened they would all be gathered; what Adam makes of them is the same."""
    params = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2)}
    optimizer = update.adam(max_grad_norm=1.0)
    small = optimizer.update(params, optimizer.init(params))
    monkeypatch.setattr(optimizers, "FLAT_BELOW", 8)
    large = optimizer.update(params, optimizer.init(params))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), small[0], large[0])
    assert {x.shape for x in jax.tree.leaves(small[1])} == {(), (8,)}
    assert {x.shape for x in jax.tree.leaves(large[1])} == {(), (2, 3), (2,)}
