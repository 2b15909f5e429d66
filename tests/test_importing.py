"""jaxpg as a library: integers, old keys, rows in the place of arrays, optimizers of one's own, donated states."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpg
from jaxpg import envs, ladder, networks, values
from jaxpg.algorithm import PolicyGradient
from jaxpg.envs import mdps
from jaxpg.envs.tabular import MDP
from jaxpg.errors import UserError
from jaxpg.experiments.build import build
from jaxpg.experiments.config import resolve_config
from jaxpg.ladder_settings import A2CSettings, child_of
from jaxpg.models.distributions import Categorical
from jaxpg.objectives import returns
from jaxpg.policy_gradient import policy_gradient
from jaxpg.types import Array, Box, Discrete, Env, Key, Learner, TimeStep


def learner(algorithm: Any) -> Learner:
    env = envs.make("CartPole-v1")
    return policy_gradient(env, *networks.mlp(env, hidden=(8,)), algorithm)


def on_its_own_state() -> Learner:
    """PPO on an environment whose observation is its state, the same array."""
    box = Box(np.zeros(2, np.float32), np.ones(2, np.float32))

    def reset(key: Key) -> tuple[Array, Array]:
        state = jax.random.uniform(key, (2,))
        return state, state

    def step(key: Key, state: Array, action: Array) -> tuple[Array, TimeStep]:
        after = jax.random.uniform(key, (2,))
        return after, TimeStep(after, after.sum(), jnp.float32(1.0), after[0] < 0.2)

    env = Env("its state", reset, step, box, Discrete(2), time_limit=100)
    return policy_gradient(env, *networks.mlp(env, hidden=(8,)), ladder.ppo(num_envs=4, num_steps=8))


LEARNERS = {
    "ppo": lambda: learner(ladder.ppo(num_envs=4, num_steps=8)),
    "grpo": lambda: learner(ladder.grpo(num_envs=8, num_minibatches=1)),
    "q_learning": lambda: values.tabular_control(envs.make("frozen_lake"), values.q_learning(num_steps=8)),
    "sft": lambda: build(resolve_config("sort", "sft", {"batch_size": 8})).learner,
    "dqn": lambda: build(resolve_config("cartpole", "dqn", {"buffer_size": 64, "learning_starts": 20})).learner,
}


@pytest.mark.parametrize("name", LEARNERS)
def test_a_key_of_the_old_form_is_one_of_the_new(name: str) -> None:
    """`jax.random.PRNGKey`, which PureJaxRL and rejax use, gives the same numbers."""
    made = LEARNERS[name]()
    after = [made.step(made.init(key), key)[0] for key in (jax.random.PRNGKey(3), jax.random.key(3))]
    jax.tree.map(np.testing.assert_array_equal, *(x.params for x in after))


@pytest.mark.parametrize("name", [*LEARNERS, "its own state"])
def test_a_state_may_be_donated(name: str) -> None:
    made = (LEARNERS | {"its own state": on_its_own_state})[name]()
    state = made.init(jax.random.key(0))
    step = jax.jit(made.step, donate_argnums=0)
    for i in range(2):
        state, metrics = step(state, jax.random.key(i))
    assert np.isfinite(metrics["steps"])


@pytest.mark.parametrize("name", LEARNERS)
def test_parameters_that_are_given_belong_to_who_gave_them(name: str) -> None:
    """Those of `with_policy`, although the state that has them is donated."""
    made = LEARNERS[name]()
    state = made.init(jax.random.key(0))
    given = jax.tree.map(lambda x: x + 1, state.params.policy)
    jax.jit(made.step, donate_argnums=0)(made.with_policy(state, given), jax.random.key(1))
    assert not any(x.is_deleted() for x in jax.tree.leaves(given))


@pytest.mark.parametrize("network", [networks.mlp, networks.recurrent])
def test_a_program_may_have_64_bits(network: Any) -> None:
    """Without a warning that jax will refuse something: it is an error here."""
    with jax.enable_x64(True):
        env = envs.make("CartPole-v1")
        made = policy_gradient(env, *network(env, hidden=(4,)), ladder.ppo(num_envs=4, num_steps=8))
        assert jax.eval_shape(made.step, made.init(jax.random.key(0)), jax.random.key(0))[1]["policy_loss"].shape == ()


@pytest.mark.parametrize("algorithm", [values.sarsa, values.double_q_learning, values.n_step_sarsa])
def test_a_table_may_be_learned_where_there_are_64_bits(algorithm: Any) -> None:
    with jax.enable_x64(True):
        made = values.tabular_control(envs.make("frozen_lake"), algorithm())
        jax.eval_shape(made.step, made.init(jax.random.key(0)), jax.random.key(0))


def test_weight_decay_does_not_move_a_policy_out_of_its_trust_region() -> None:
    """The critic's epochs run the optimizer over all parameters; only those of the critic may follow it."""
    algorithm = ladder.trpo(num_envs=8, num_steps=16, learning_rate=3e-2)
    decaying = partial(optax.chain, optax.scale_by_adam(eps=1e-5), optax.add_decayed_weights(1.0))
    ends = []
    for optimizer in (algorithm.optimizer, decaying):
        made = learner(algorithm._replace(optimizer=optimizer))
        state = made.init(jax.random.key(0))
        ends.append(jax.jit(made.step)(state, jax.random.key(1))[0].params)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), ends[0].policy, ends[1].policy)
    first, second = (jax.tree.leaves(end.critic)[0] for end in ends)
    assert np.abs(first - second).max() > 1e-3


KERNELS = {
    "gae": lambda r, v: returns.gae(r, r, r > 9, r, v, 0.9, 0.9),
    "lambda_returns": lambda r, v: returns.lambda_returns(r, r, r > 9, v, 0.9, 0.9),
    "discounted_returns": lambda r, v: returns.discounted_returns(r, r, r > 9, v, 0.9),
    "n_step_targets": lambda r, v: returns.n_step_targets(r, r, r > 9, v, 0.9, 2),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", [(2,), (1, 2), (5, 1), (5, 2, 1)])
def test_a_row_of_values_is_not_broadcast_over_time(name: str, shape: tuple[int, ...]) -> None:
    """As the last value `[B]` of other libraries would be."""
    rewards = jnp.ones((5, 2))
    assert KERNELS[name](rewards, rewards).shape == (5, 2)
    with pytest.raises(UserError, match=r"must be \[T, B\] as the reward is, \(5, 2\), and has the shape"):
        KERNELS[name](rewards, jnp.ones(shape))
    with pytest.raises(UserError, match="with at least one step"):
        KERNELS[name](jnp.ones((0, 2)), jnp.ones((0, 2)))


def test_actions_of_any_integers_have_their_probability() -> None:
    for logits in (jnp.arange(3.0), jnp.zeros(300)):
        exact = jax.nn.log_softmax(logits)
        for action in (jnp.uint8(2), jnp.int32(2), np.int64(2), 2):
            np.testing.assert_allclose(Categorical(logits).log_prob(action), exact[2], rtol=1e-6)


def test_integers_to_begin_with_become_floats() -> None:
    mdp = mdps.random_mdp(jax.random.key(3), 5, 2)
    episodes = values.sample_episodes(mdp, jnp.full((5, 2), 0.5), jax.random.key(1), num_episodes=9, time_limit=9)
    for learn in (
        values.monte_carlo,
        partial(values.n_step_td, step_size=0.1, n=2),
        partial(values.td_lambda, step_size=0.1, lambda_=0.5),
    ):
        integers, floats = (learn(episodes, jnp.zeros(5, dtype), 0.9) for dtype in (int, float))
        np.testing.assert_array_equal(integers, floats)
        assert np.abs(floats).max() > 0.01
    chosen = jnp.arange(5) % 2
    of_integers, of_floats = (values.policy_evaluation(mdp, jnp.eye(2, dtype=t)[chosen], 0.9) for t in (int, float))
    np.testing.assert_array_equal(of_integers, of_floats)


def test_a_process_of_numpy_arrays_is_an_environment() -> None:
    mdp = mdps.random_mdp(jax.random.key(3), 5, 2)
    ours, theirs = (envs.as_env(x, 9, "x") for x in (mdp, MDP(*map(np.asarray, mdp))))
    for env in (ours, theirs):
        state, _ = jax.jit(env.reset)(jax.random.key(0))
        assert jax.jit(env.step)(jax.random.key(0), state, jnp.int32(1))[1].obs.shape == (5,)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ladder.ppo(gamma=1.5), "gamma must be at most 1, not 1.5"),
        (lambda: ladder.reinforce(gamma=-1.0), "gamma must be at least 0, not -1.0"),
        (lambda: ladder.a2c(gae_lambda=np.float32(1.5)), "gae_lambda must be at most 1"),
        (lambda: values.dqn(gamma=float("nan")), "gamma must be finite"),
        (lambda: ladder.ppo(gamma=np.inf), "gamma must be finite"),
        (lambda: values.sarsa(epsilon_start=2.0), "epsilon_start must be at most 1"),
        (lambda: ladder.ppo(entropy_coefficient=-np.inf), "entropy_coefficient must be finite"),
        (lambda: ladder.ppo(anneal_steps=0), "anneal_steps must be at least 1, not 0"),
        (lambda: values.q_learning(epsilon_steps=0), "epsilon_steps must be at least 1, not 0"),
        (lambda: ladder.ppo(gamma=jnp.array([0.9, 0.8])), r"gamma must be one number, .* shape \(2,\): jax.vmap"),
        (lambda: ladder.grpo(learning_rate=np.ones(3)), "learning_rate must be one number"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_the_function_itself(make: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()


def test_settings_of_ones_own_may_be_anything() -> None:
    """Those that it inherits are checked by its parent."""

    @child_of(ladder.ppo)
    def weighted(*, weights: Any = (), factor: float = 1.0, **inherited: Unpack[A2CSettings]) -> PolicyGradient:
        return ladder.ppo(**inherited)

    assert weighted(weights=jnp.ones(3), factor=-np.inf).gamma == 0.99
    with pytest.raises(UserError, match="gamma must be at most 1"):
        weighted(gamma=1.5)


def test_a_length_of_a_schedule_may_be_mapped_over() -> None:
    rates = jax.vmap(lambda over: ladder.ppo(anneal_steps=over).learning_rate(jnp.int32(50)))(jnp.array([50, 100]))
    np.testing.assert_allclose(rates, [0, 1.25e-4], rtol=1e-5)


def test_numbers_of_numpy_are_numbers() -> None:
    settings = {"learning_rate": np.float32(1e-3), "num_envs": np.int64(4), "gamma": jnp.float32(0.5)}
    resolved = resolve_config("cartpole", "ppo", settings).settings
    assert (resolved["learning_rate"], resolved["num_envs"], resolved["gamma"]) == (float(np.float32(1e-3)), 4, 0.5)
    with pytest.raises(UserError, match="num_envs must be an integer"):
        resolve_config("cartpole", "ppo", {"num_envs": np.float32(4.5)})


def test_fit_says_how_to_go_on_with_what_is_there(tmp_path: Path) -> None:
    settings = {"total_steps": 64, "num_envs": 4, "num_steps": 8, "evaluations": 1, "progress": False}
    jaxpg.fit("CartPole-v1", "ppo", seeds=np.arange(2), out=tmp_path / "run", **settings)
    with pytest.raises(UserError, match=r"holds a run already. Go on with it by the command jaxpg resume .*run, or"):
        jaxpg.fit("CartPole-v1", "ppo", seeds=2, out=tmp_path / "run", **settings)


def test_importing_starts_nothing() -> None:
    """Devices are chosen after imports, as by `jax.distributed.initialize`; gymnax computes when it is imported.

    It keeps arrays then, which are numbers also where it is imported while something is traced.
    """
    code = """
import sys, jax
from jaxpg import envs, fit, language, ladder, networks, policy_gradient, preferences, values
assert "gymnax" not in sys.modules
envs.make("LunarLander-v3"), envs.make("frozen_lake"), envs.make_task("sort")
assert "gymnax" not in sys.modules
jax.jit(lambda key: envs.make("CartPole-v1").reset(key))(jax.random.key(0))
env = envs.make("FrozenLake-misc")
jax.jit(env.step)(jax.random.key(0), env.reset(jax.random.key(1))[0], 1)
"""
    chosen = """
import jax
from jaxpg import envs, values
jax.config.update("jax_num_cpu_devices", 3)
print(jax.device_count())
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=environment) == ""
    environment["XLA_FLAGS"] = ""
    assert subprocess.check_output([sys.executable, "-c", chosen], text=True, env=environment) == "3\n"


def test_a_second_fit_reads_what_the_first_has_compiled(tmp_path: Path) -> None:
    """In another process, also where jax has compiled something before jaxpg is imported; one's own choice stays."""
    code = """
import jax, sys
jax.jit(lambda x: x + 1)(1.0)
if len(sys.argv) > 1:
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
import jaxpg
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name.rsplit("/", 1)[-1]))
jaxpg.fit("catch", "a2c", seeds=1, total_steps=64, num_envs=4, evaluations=1, evaluation_episodes=4, progress=False)
print(hits.count("cache_hits"), hits.count("cache_misses"))
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["JAXPG_CACHE"] = str(tmp_path / "cache")

    def counts(*arguments: str) -> tuple[int, int]:
        out = subprocess.check_output([sys.executable, "-c", code, *arguments], text=True, env=environment)
        hits, misses = map(int, out.split())
        return hits, misses

    (_, first), (hits, misses) = counts(), counts()
    assert first > 2 >= misses
    assert hits > 2
    assert counts(str(tmp_path / "mine"))[0] == 0
    assert (tmp_path / "mine").exists()


@pytest.mark.parametrize("partitionable", [True, False])
def test_the_experience_that_is_diagnosed_is_what_the_step_learns_from(partitionable: bool) -> None:
    """Whichever way keys are split: with another key the episodes would have other lengths."""
    with jax.threefry_partitionable(partitionable):
        made = learner(ladder.ppo(num_envs=8, num_steps=64, num_minibatches=1))
        state, key = made.init(jax.random.key(0)), jax.random.key(1)
        assert made.experience is not None
        rollout, _ = jax.jit(made.experience.collect)(state, key)
        _, metrics = jax.jit(made.step)(state, key)
    ends = [np.flatnonzero(column) for column in np.asarray(rollout.steps.last).T]
    assert metrics["episodes"] == sum(map(len, ends)) > 8
    np.testing.assert_allclose(metrics["length"] * metrics["episodes"], sum(end[-1] + 1 for end in ends), rtol=1e-6)
