"""Four devices that share a batch are one learner: the same parameters as one device, to rounding.

test_contracts.py has every rung by `vmap` over the axis of the devices. Here it is devices: a sample of the rungs in
the quick lane, all of them and `pmap` in the full one.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from cases import (
    CASES,
    DEVICES,
    GROUPS,
    KEYS,
    UPDATES,
    assert_same,
    by_pmap,
    by_shard_map,
    by_vmap,
    distance,
    initial,
    make,
    mlp,
    moved,
    on_one,
    over,
    run,
    updates,
)

from jaxpg import ladder, language, parallel, update
from jaxpg.errors import UserError
from jaxpg.parallel import collectives
from jaxpg.policy_gradient import policy_gradient
from jaxpg.update import optimizers

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from aot_counts import from_hlo

SAMPLE = ("a2c", "grpo, text")


def in_full(names, quick=()):
    """Parameters of a test, those of the quick lane as they are."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.mark.parametrize("name", in_full([name for name, case in CASES.items() if case.devices], quick=SAMPLE))
def test_four_devices_are_one(name):
    one = run(name)
    assert_same(one, *by_shard_map(one.learner, one.states[0]))


def test_episodes_that_do_not_divide_over_the_devices_are_refused():
    """And not left out."""
    learner = policy_gradient(
        tiny.counter(), tiny.softmax_policy(jnp.zeros((2, 3))), None, ladder.reinforce(num_envs=6)
    )
    with pytest.raises(UserError, match="6 episodes do not divide over 4 devices"):
        by_shard_map(learner, initial(learner))


@pytest.mark.full
@pytest.mark.parametrize("name", ["reinforce", "ppo", "grpo"])
def test_four_devices_are_one_by_pmap(name):
    one = run(name)
    assert_same(one, *by_pmap(one.learner, one.states[0]))


@pytest.mark.parametrize(
    "name", in_full(["reinforce_baseline", "a2c", "trpo", "ppo", "grpo", "dr_grpo"], quick=["ppo"])
)
def test_it_is_the_sum_over_devices_that_makes_them_one(name, monkeypatch):
    """The test above has power: without the sum, each device goes its own way."""
    one = run(name)
    monkeypatch.setattr(collectives, "psum", lambda tree: tree)
    after, _ = by_shard_map(make(name), one.states[0])  # a new learner: jax keeps what it has traced of the other one
    assert distance(after.params, one.states[-1].params) > 1e-4


@pytest.mark.parametrize("name", in_full(["ppo", "ppo, gru, pool", "dapo"], quick=["ppo"]))
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


def test_devices_draw_numbers_of_their_own():
    """Else all of them would shuffle alike and their networks would have the same noise."""
    key = jax.random.key(3)
    axis = {"axis_name": collectives.DATA, "axis_size": 4}
    of_devices = jax.vmap(lambda: jax.random.key_data(collectives.device_key(key)), out_axes=0, **axis)()
    expected = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(4)]
    np.testing.assert_array_equal(of_devices, expected)
    assert len({tuple(x.tolist()) for x in np.asarray(of_devices)}) == 4


def test_arrays_of_every_size_and_type_are_summed_over_devices():
    """Small ones go together, by type, and large ones each by itself."""
    most = collectives.TOGETHER_BELOW
    sizes = {"large": (most,), "largest": (2, most), "small": (most - 1,), "smaller": (2, 3), "number": ()}
    rng, dtypes = np.random.default_rng(0), {"floats": np.float32, "integers": np.int32}
    tree = {
        kind: {name: rng.integers(-9, 9, (4, *shape)).astype(dtype) for name, shape in sizes.items()}
        for kind, dtype in dtypes.items()
    }
    summed = tiny.jit(jax.vmap(collectives.psum, axis_name=collectives.DATA))(tree)

    def check(x, found):
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(found, np.broadcast_to(x.sum(0), x.shape))

    jax.tree.map(check, tree, summed)


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


@pytest.mark.full
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


def text_learner(num_envs=8, **settings):
    """GRPO of a language model, by plain gradient descent."""
    model = language.transformer(cases.text, width=16, heads=2, kv_heads=1, **{"layers": 1} | settings)
    algorithm = ladder.grpo(**GROUPS | {"num_envs": num_envs})._replace(
        optimizer=partial(update.sgd, max_grad_norm=0.5)
    )
    return policy_gradient(cases.text, *model, algorithm)


@pytest.fixture
def four_texts_at_a_time(machine_with):
    """Gradients are taken in chunks of four rows of texts side by side."""
    machine_with(chunk_tokens=4 * cases.text.time_limit)


@pytest.mark.usefixtures("four_texts_at_a_time")
@pytest.mark.parametrize("settings", [{"logit_chunks": 2}, {"remat": True, "tied": True, "layers": 2}], ids=str)
def test_devices_that_share_the_parameters_are_one_as_well(settings):
    """Each holds a part of them, before and after, and what is learned is what one device learns."""
    learner = text_learner(**settings)
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


@pytest.mark.usefixtures("four_texts_at_a_time")
def test_devices_that_share_a_batch_put_their_own_texts_side_by_side():
    """Each works through as many chunks as its own texts need, and together they are one."""
    learner = text_learner(num_envs=16)
    state = tiny.jit(learner.init)(jax.random.key(0))
    mesh = parallel.make_mesh(1, 16, jax.devices()[:2])
    _, after, metrics = over(mesh, learner, jax.tree.map(lambda x: x[None], state))
    expected, expected_metrics = on_one(learner, state)
    assert moved(state, expected) > 1e-3
    assert distance(jax.tree.map(lambda x: x[0], after.params), expected.params) < 1e-5
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[0], y, rtol=1e-4, atol=1e-5), metrics, expected_metrics)


def test_weights_travel_once_per_rollout_and_not_at_every_token(machine_with):
    """Devices that share them gather them before the loop over tokens; a chunk exchanges its gradient and no texts.

    On a machine that stores a step as one vector, too.
    """
    machine_with(chunk_tokens=4 * cases.text.time_limit, packs_outputs=True)
    learner = text_learner(dtype="bfloat16")
    mesh = parallel.make_mesh(1, 8, jax.devices()[:DEVICES], DEVICES, sharded=True)
    states, keys = jax.eval_shape(jax.vmap(learner.init), KEYS[:1]), KEYS[:1]
    specs = parallel.state_specs(states, mesh)
    size = 4 * sum(x.size for x in jax.tree.leaves(states.params))  # a CPU gathers bfloat16 as float32

    def program(function, out_specs):
        mapped = parallel.map_seeds(function)
        spread = parallel.spread(mapped, mesh, in_specs=(specs, parallel.PER_SEED), out_specs=out_specs)
        placed = parallel.abstract_arrays(states, specs, mesh)
        return from_hlo(jax.jit(spread).lower(placed, keys).compile().as_text())

    writing = program(lambda state, key: learner.experience.collect(state, key)[0].steps, parallel.PER_SEED)
    assert 0.9 * size < writing.round()["exchanged_bytes"] < 1.1 * size
    assert max(loop.each["exchanged_bytes"] for loop in writing.walk()) < 0.001 * size
    whole = program(learner.step, (specs, parallel.PER_SEED))
    in_loops = [loop.each["exchanged_bytes"] for loop in whole.walk()]
    assert min(x for x in in_loops if x > 0.5 * size) < 1.1 * size


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
