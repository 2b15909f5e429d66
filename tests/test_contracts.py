"""One table of all algorithms, one battery of what every learner promises."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import envs, ladder, language, networks
from jaxpg.policy_gradient import policy_gradient
from jaxpg.training import advance, checkpoint
from jaxpg.types import Env, Learner

EPISODES = {"num_envs": 4}
SEGMENT = {"num_envs": 4, "num_steps": 6}
MINIBATCHES = {"epochs": 2, "num_minibatches": 2}
GROUPS = EPISODES | MINIBATCHES | {"group_size": 2}
TRUST = {"value_epochs": 1, "value_minibatches": 2, "conjugate_steps": 3, "backtracks": 3}
SCALED = {"normalize_observations": True, "scale_rewards": True}

mlp = partial(networks.mlp, hidden=(4,))
gru = partial(networks.recurrent, hidden=(4,), width=4)
min_gru = partial(gru, cell="min_gru")
cnn = partial(networks.cnn, channels=(2,), hidden=(4,))
counter, target = tiny.counter(), tiny.target()
pictures = tiny.pictures(counter)
text = envs.make("reverse", length=3, letters=5, rewards={"accuracy": 1.0, "length": 1.0})
decoder = partial(language.transformer, width=8, layers=2, heads=2, kv_heads=1)
TEXT = GROUPS | {"clip_high": 0.3}

# name: (algorithm, its settings, environment, networks, settings of the learner)
TABLE = {
    "reinforce": ("reinforce", EPISODES, counter, mlp, {}),
    "reinforce_to_go": ("reinforce_to_go", EPISODES, counter, mlp, {}),
    "reinforce_baseline": ("reinforce_baseline", EPISODES | {"baseline_kind": "running"}, counter, mlp, {}),
    "actor_critic_mc": ("actor_critic_mc", EPISODES, counter, mlp, {}),
    "actor_critic_td": ("actor_critic_td", {"num_steps": 6}, counter, mlp, {}),
    "a2c": ("a2c", SEGMENT, counter, mlp, {}),
    "trpo": ("trpo", SEGMENT | TRUST, counter, mlp, {}),
    "ppo": ("ppo", SEGMENT | MINIBATCHES | {"anneal_steps": 1000, "target_kl": 0.1}, counter, mlp, {}),
    "grpo": ("grpo", GROUPS, counter, mlp, {}),
    "rloo": ("rloo", GROUPS | {"kl": "reward_k1"}, counter, mlp, {}),
    "dr_grpo": ("dr_grpo", GROUPS | {"max_length": 4}, counter, mlp, {}),
    "dapo": ("dapo", GROUPS, counter, mlp, {}),
    "cispo": ("cispo", GROUPS, counter, mlp, {}),
    "rlhf": ("rlhf", EPISODES | MINIBATCHES, counter, mlp, {}),
    "rlhf, text": ("rlhf", EPISODES | MINIBATCHES, text, decoder, {}),
    "grpo, text": ("grpo", TEXT, text, decoder, {}),
    "dapo, text": ("dapo", TEXT | {"overlong_filtering": True}, text, decoder, {}),
    "a2c, gru": ("a2c", SEGMENT, counter, gru, {}),
    "ppo, gru": ("ppo", SEGMENT | MINIBATCHES, counter, gru, {}),
    "ppo, cnn": ("ppo", SEGMENT | MINIBATCHES, pictures, cnn, {}),
    "grpo, min_gru": ("grpo", GROUPS, counter, min_gru, {}),
    "trpo, shared": ("trpo", SEGMENT | TRUST, counter, partial(mlp, shared=True), {}),
    "ppo, gaussian, scaled": ("ppo", SEGMENT | MINIBATCHES | {"reset_pool": 2}, target, mlp, SCALED),
    "trpo, squashed": ("trpo", SEGMENT | TRUST, target, partial(mlp, squash=True), {}),
    "actor_critic_mc, gaussian, scaled": ("actor_critic_mc", EPISODES, target, mlp, SCALED),
}


class Case(NamedTuple):
    """A learner, its compiled step, the states before and after two steps with `keys`, and how often it was traced."""

    learner: Learner
    step: object
    keys: jax.Array
    states: tuple
    metrics: tuple
    traces: list


def make(name) -> tuple[Env, Learner]:
    algorithm, settings, env, network, options = TABLE[name]
    record = ladder.ALGORITHMS[algorithm](learning_rate=0.01, entropy_coefficient=0.01, **settings)
    return env, policy_gradient(env, *network(env), record, **options)


@pytest.fixture(scope="module", params=TABLE)
def case(request):
    _, learner = make(request.param)
    traces = []

    def step(state, key):
        traces.append(1)
        return learner.step(state, key)

    step, keys = tiny.jit(step), jax.random.split(jax.random.key(1), 2)
    states, metrics = [tiny.jit(learner.init)(jax.random.key(0))], []
    for key in keys:
        state, metric = step(states[-1], key)
        states.append(state)
        metrics.append(metric)
    return Case(learner, step, keys, tuple(states), tuple(metrics), traces)


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def near(one, other):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), one, other)


def test_the_table_holds_every_algorithm():
    assert {algorithm for algorithm, *_ in TABLE.values()} == set(ladder.ALGORITHMS)


def test_two_steps_are_finite_and_move_all_parameters(case):
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(case.states))
    for metrics in case.metrics:
        assert {k: (v.shape, v.dtype) for k, v in metrics.items()} == {
            k: ((), np.int32 if k == "steps" else np.float32) for k in metrics
        }
        assert not [k for k, v in metrics.items() if not np.isfinite(v) and k not in advance.MEAN_OVER]
    moved = jax.tree.map(lambda new, old: (new != old).any(), case.states[2].params, case.states[0].params)
    assert all(jax.tree.leaves(moved)), moved


def test_metrics_count_steps_and_episodes(case):
    (_, first), (steps, second) = ((int(m["steps"]), m) for m in case.metrics)
    assert int(case.states[2].steps) == steps > int(case.states[1].steps) == int(first["steps"]) > 0
    assert all(m["episodes"] > 0 and 1 <= m["length"] <= 4 for m in (first, second))
    required = {"steps", "episodes", "return", "length", "policy_loss", "entropy", "approx_kl", "learning_rate"}
    assert required <= first.keys()


def test_the_key_decides_everything(case):
    equal(case.step(case.states[0], case.keys[0]), (case.states[1], case.metrics[0]))
    other, _ = case.step(case.states[0], case.keys[1])
    differ = jax.tree.map(lambda x, y: (x != y).any(), other.params, case.states[1].params)
    assert any(jax.tree.leaves(differ))


def test_a_second_step_is_not_traced_again(case):
    assert len(case.traces) == 1


@pytest.mark.parametrize("case", ["reinforce", "trpo", "ppo, gru"], indirect=True)
def test_without_jit_the_numbers_are_the_same(case):
    """Both ways of collecting and all of improving: op by op is slow."""
    near(case.learner.step(case.states[0], case.keys[0]), (case.states[1], case.metrics[0]))


def test_vmap_over_seeds_is_a_loop_over_seeds(case):
    seeds = jnp.stack([jax.random.key(0), jax.random.key(7)])
    states = tiny.jit(jax.vmap(case.learner.init))(seeds)
    near(jax.tree.map(lambda x: x[0], states), case.states[0])
    vmapped = tiny.jit(jax.vmap(case.learner.step))
    both, _ = vmapped(states, jnp.stack([case.keys[0], case.keys[0]]))
    for i in range(2):
        alone, _ = case.step(jax.tree.map(lambda x, i=i: x[i], states), case.keys[0])
        near(jax.tree.map(lambda x, i=i: x[i], both), alone)


def test_a_state_survives_a_checkpoint_bit_for_bit(case, tmp_path):
    like = jax.eval_shape(case.learner.init, jax.random.key(0))
    saved = checkpoint.save(tmp_path, case.states[1], steps=1, about={})
    restored = checkpoint.restore(saved, like)
    equal(restored, case.states[1])
    equal(case.step(restored, case.keys[1]), (case.states[2], case.metrics[1]))


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


@pytest.mark.parametrize("whole", [False, True], ids=["continuing", "episodic"])
@pytest.mark.parametrize("name", POLICIES)
def test_evaluating_a_batch_gives_the_log_probabilities_of_acting(name, whole):
    """Also in the middle of episodes, where a continuing rollout began with a memory."""
    env, network = POLICIES[name]
    if env.context and not whole:
        pytest.skip("text is collected by whole completions")
    policy, _ = network(env)
    collector = (ladder.reinforce(num_envs=8) if whole else ladder.a2c(num_envs=8, num_steps=6)).collect

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
