"""One table of all algorithms, one battery of what every learner promises."""

from __future__ import annotations

import importlib
from functools import partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from cases import (
    CASES,
    IN_RAINBOW,
    KEYS,
    assert_same,
    by_vmap,
    cnn,
    counter,
    decoder,
    gru,
    min_gru,
    mlp,
    names,
    pictures,
    run,
    target,
    text,
)

from jaxpg import ladder, values
from jaxpg.training import checkpoint
from jaxpg.training.advance import counted_by

DEVICES = [
    pytest.param(name, marks=[] if case.quick else [pytest.mark.full]) for name, case in CASES.items() if case.devices
]


@pytest.fixture(params=names())
def case(request):
    return run(request.param)


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def near(one, other):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), one, other)


def test_the_table_holds_every_algorithm():
    algorithms = ladder.ALGORITHMS.keys() | values.ALGORITHMS.keys() | values.TABULAR_ALGORITHMS.keys()
    assert {case.algorithm for case in CASES.values()} == algorithms
    assert {case.algorithm for case in CASES.values() if case.devices} == algorithms - IN_RAINBOW


def test_two_steps_are_finite_and_move_all_parameters(case):
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(case.states))
    for metrics in case.metrics:
        assert {k: (v.shape, v.dtype) for k, v in metrics.items()} == {
            k: ((), np.int32 if k == "steps" else np.float32) for k in metrics
        }
        assert not [k for k, v in metrics.items() if not np.isfinite(v) and not counted_by(k)]
    moved = jax.tree.map(lambda new, old: (new != old).any(), case.states[2].params, case.states[0].params)
    assert all(jax.tree.leaves(moved)), moved


def test_metrics_count_steps_and_episodes(case):
    (_, first), (steps, second) = ((int(m["steps"]), m) for m in case.metrics[:2])
    assert int(case.states[2].steps) == steps > int(case.states[1].steps) == int(first["steps"]) > 0
    assert all(m["episodes"] > 0 and 1 <= m["length"] <= 4 for m in (first, second))
    assert {"steps", "episodes", "return", "length", "learning_rate"} <= first.keys()
    assert {"policy_loss", "entropy", "approx_kl"} <= first.keys() or {"td_loss", "q_value", "epsilon"} <= first.keys()


def test_the_key_decides_everything(case):
    equal(case.step(case.states[0], KEYS[0]), (case.states[1], case.metrics[0]))
    other, _ = case.step(case.states[0], KEYS[1])
    differ = jax.tree.map(lambda x, y: (x != y).any(), other.params, case.states[1].params)
    assert any(jax.tree.leaves(differ))


@pytest.mark.parametrize("case", names(lambda case: case.seeds), indirect=True)
def test_no_random_number_is_drawn_twice(case):
    key = jax.eval_shape(lambda: jax.random.key(0))
    with jax.debug_key_reuse(True):
        state = jax.eval_shape(jax.jit(case.learner.init), key)
        jax.eval_shape(jax.jit(case.learner.step), state, key)


@pytest.mark.parametrize("name", names(lambda case: case.seeds))
def test_a_learner_reads_every_field_of_its_algorithm(name, monkeypatch):
    fields, read = set(), set()
    unread = {"n_steps", "sampling", "selector"} if name == "pqn" else set()  # it has no replay buffer

    def spied(make):
        def with_spy(*arguments, **options):
            *others, algorithm = arguments
            fields.update(algorithm._fields)
            if getattr(algorithm, "value_loss", "of another kind") is None:
                unread.add("value_coefficient")

            class Spy(type(algorithm)):
                def __getattribute__(self, field):
                    read.add(field)
                    return super().__getattribute__(field)

            return make(*others, Spy(*algorithm), **options)

        return with_spy

    for checks in ("jaxpg.algorithm_checks", "jaxpg.values.deep_q"):  # a look at its kind is no use of a field
        monkeypatch.setattr(importlib.import_module(checks), "_check_fields", lambda algorithm: None)
    for module, maker in ((cases, "policy_gradient"), (values, "deep_q"), (values, "tabular_control")):
        monkeypatch.setattr(module, maker, spied(getattr(module, maker)))
    learner = cases.make(name)
    jax.eval_shape(learner.step, jax.eval_shape(learner.init, KEYS[0]), KEYS[0])
    assert fields
    assert fields - read == unread


def test_a_second_step_is_not_traced_again(case):
    assert len(case.traces) == 1


@pytest.mark.parametrize(
    "case",
    ["reinforce", *(pytest.param(name, marks=pytest.mark.full) for name in ("trpo", "ppo, gru, pool"))],
    indirect=True,
)
def test_without_jit_the_numbers_are_the_same(case):
    """Both ways of collecting, and every update: op by op is slow."""
    near(case.learner.step(case.states[0], KEYS[0]), (case.states[1], case.metrics[0]))


@pytest.mark.parametrize("case", names(lambda case: case.seeds), indirect=True)
def test_vmap_over_seeds_is_a_loop_over_seeds(case):
    seeds = jnp.stack([jax.random.key(0), jax.random.key(7)])
    states = tiny.jit(jax.vmap(case.learner.init))(seeds)
    near(jax.tree.map(lambda x: x[0], states), case.states[0])
    vmapped = tiny.jit(jax.vmap(case.learner.step))
    both, _ = vmapped(states, jnp.stack([KEYS[0], KEYS[0]]))
    for i in range(2):
        alone, _ = case.step(jax.tree.map(lambda x, i=i: x[i], states), KEYS[0])
        near(jax.tree.map(lambda x, i=i: x[i], both), alone)


@pytest.mark.parametrize("case", DEVICES, indirect=True)
def test_four_shards_of_a_batch_are_one(case):
    """By `vmap` over the axis of the devices; test_parallel.py has the devices themselves."""
    assert_same(case, *by_vmap(case.learner, case.states[0]))


def test_a_state_survives_a_checkpoint_bit_for_bit(case, tmp_path):
    like = jax.eval_shape(case.learner.init, jax.random.key(0))
    saved = checkpoint.save(tmp_path, case.states[1], steps=1, about={})
    restored = checkpoint.restore(saved, like)
    equal(restored, case.states[1])
    equal(case.step(restored, KEYS[1]), (case.states[2], case.metrics[1]))


POLICIES = {
    "mlp": (counter, mlp),
    "gru": (counter, gru),
    "min_gru": (counter, min_gru),
    "cnn": (pictures, cnn),
    "gaussian": (target, mlp),
    "squashed": (target, partial(mlp, squash=True)),
    "gru, gaussian": (target, gru),
    "transformer": (text, decoder),
}
ALIKE = ("min_gru", "gru, gaussian", "squashed")  # parts of what others of the table have, for the full lane


@pytest.mark.device
@pytest.mark.parametrize(
    ("name", "whole"),
    [
        pytest.param(
            name,
            whole,
            id=f"{name}-{'episodic' if whole else 'continuing'}",
            marks=[pytest.mark.full] if name in ALIKE else [],
        )
        for name, (env, _) in POLICIES.items()
        for whole in (False, True)
        if whole or not env.context  # text is collected by whole completions
    ],
)
def test_evaluating_a_batch_gives_the_log_probabilities_of_acting(name, whole):
    """Also in the middle of episodes, where a continuing rollout began with a memory."""
    env, network = POLICIES[name]
    policy, _ = network(env)
    collector = (ladder.reinforce(num_envs=8) if whole else ladder.a2c(num_envs=8, num_steps=6)).collector

    def log_probs(key):
        params = jax.tree.map(lambda x: x + jax.random.normal(key, x.shape), policy.init(key))
        runner = collector.init(env, policy, params, key)
        for i in range(2):
            runner, rollout, _ = collector.collect(env, policy, params, runner, jax.random.fold_in(key, i))
        evaluated = policy.evaluate(params, rollout).log_prob(rollout.steps.action)
        return evaluated, rollout.steps.log_prob, rollout.steps.mask

    evaluated, acted, mask = tiny.jit(log_probs)(jax.random.key(3))
    assert np.ptp(acted[mask > 0]) > 1  # a uniform policy would agree with anything
    np.testing.assert_allclose(evaluated[mask > 0], acted[mask > 0], rtol=1e-5, atol=1e-5)
