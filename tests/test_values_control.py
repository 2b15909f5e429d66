"""Tabular control: the edges, every method against the textbook's loop, reductions, and what it converges to."""

from __future__ import annotations

import inspect
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_ladder import changed_fields

from jaxpg import envs, files, values
from jaxpg.cli.main import main
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments.build import build
from jaxpg.ladder_settings import PARENTS
from jaxpg.values.q_networks import epsilon_greedy
from jaxpg.values.tabular_control import _inputs, numbered

# child: (parent, fields that differ when both have the child's settings, new or changed defaults)
EDGES = {
    "expected_sarsa": ("sarsa", {"bootstrap"}, {}),
    "q_learning": ("sarsa", {"bootstrap"}, {}),
    "double_q_learning": ("q_learning", {"num_tables"}, {}),
    "n_step_sarsa": ("sarsa", {"n_steps"}, {"n_steps": 4}),
}
ALGORITHMS = values.TABULAR_ALGORITHMS
SETTINGS = [(name, setting) for name, f in ALGORITHMS.items() for setting in inspect.signature(f).parameters]
WORLD = envs.random_mdp(jax.random.key(0), 5, 3)
ENV = envs.as_env(WORLD, 4, "world")  # of 1000 steps some 130 terminate and some 170 time out
BUSY = {"epsilon_start": 0.6, "epsilon_end": 0.2, "epsilon_steps": 100, "learning_rate": 0.5, "gamma": 0.9}


def defaults(name):
    return {p.name: p.default for p in inspect.signature(ALGORITHMS[name]).parameters.values()}


def train(algorithm, iterations=1, env=ENV, seed=0):
    """The states before and after some iterations."""
    learner = values.tabular_control(env, algorithm)
    step, states = tiny.jit(learner.step), [tiny.jit(learner.init)(jax.random.key(seed))]
    for i in range(iterations):
        states.append(step(states[-1], jax.random.key(100 + i))[0])
    return states


def test_every_algorithm_and_its_parent_are_pinned():
    assert {name: PARENTS.get(name) for name in ALGORITHMS} == {
        "sarsa": None,
        **{child: parent for child, (parent, _, _) in EDGES.items()},
    }


@pytest.mark.parametrize("child", EDGES)
def test_an_edge_changes_the_pinned_fields_and_defaults(child):
    parent, fields, changes = EDGES[child]
    new, old = defaults(child), defaults(parent)
    changed = changed_fields(ALGORITHMS[child](), ALGORITHMS[parent](**{n: x for n, x in new.items() if n in old}))
    assert changed == fields
    assert {name: x for name, x in new.items() if name not in old or old[name] != x} == changes
    assert old.keys() <= new.keys()


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_every_setting_is_read_and_explained(name, setting):
    default = defaults(name)[setting]
    other = 1000 if default is None else (default / 2 or 1.0 if isinstance(default, float) else default * 2 or 1)
    assert changed_fields(ALGORITHMS[name](**{setting: other}), ALGORITHMS[name]())
    assert any(f"\n    {setting}: " in inspect.getdoc(ALGORITHMS[x]) for x in {name, "sarsa"})


def textbook(algorithm, state, keys, target, env=ENV):
    """The loop of Sutton & Barto, section 7.2 (that of 6.4 with n = 1), in NumPy, fed with the same random numbers.

    `target(Q, k, s, a, epsilon)` is the value of the successor for table k. It returns the table, and counts of what
    happened: time-outs, terminations, and returns to a state within an episode.
    """
    env, n, gamma = numbered(env), algorithm.n_steps, algorithm.gamma
    env_step, env_reset = jax.jit(env.step), jax.jit(env.reset)
    Q = np.asarray(state.params.policy, np.float64).copy()
    env_state = jax.tree.map(lambda x: x[0], state.runner.env_state)
    S, A, R, D = [int(state.runner.state[0])], [int(state.runner.action[0])], [], []
    counts, steps = {"timed out": 0, "terminated": 0, "again": 0}, 0

    def act(s, epsilon, noise):
        return int(epsilon_greedy(jnp.asarray(Q[:, s].mean(0), jnp.float32), epsilon).at(noise))

    for key in keys:
        x = _inputs(algorithm, state._replace(steps=jnp.int32(steps)), key)
        for t in range(algorithm.num_steps):
            epsilon, alpha = float(algorithm.epsilon(steps)), float(algorithm.learning_rate(steps))
            env_state, moved = env_step(x.keys.env[t, 0], env_state, jnp.int32(A[-1]))
            s, d, last, k = int(moved.obs), float(moved.discount), bool(moved.last), int(x.table[t, 0])
            a = act(s, epsilon, x.noise[t, 0])
            counts["again"] += s in S
            S, A, R, D = [*S, s], [*A, a], [*R, float(moved.reward)], [*D, gamma * d]
            end = len(R)
            for tau in range(max(end - n, 0), end if last else end - n + 1):
                G = sum(np.prod(D[tau:i]) * R[i] for i in range(tau, end))
                G += np.prod(D[tau:end]) * target(Q, k, s, a, epsilon)
                Q[k, S[tau], A[tau]] += alpha * (G - Q[k, S[tau], A[tau]])
            if last:
                counts["timed out" if d else "terminated"] += 1
                env_state, start = env_reset(x.keys.reset[t, 0])
                S, A, R, D = [int(start)], [act(int(start), epsilon, x.noise[t, 0])], [], []
            steps += 1
    return Q, counts


def expectation(Q, k, s, a, epsilon):
    probabilities = np.full(3, epsilon / 3)
    probabilities[Q[k, s].argmax()] += 1 - epsilon
    return probabilities @ Q[k, s]


TARGETS = {
    "sarsa": lambda Q, k, s, a, epsilon: Q[0, s, a],
    "expected_sarsa": expectation,
    "q_learning": lambda Q, k, s, a, epsilon: Q[0, s].max(),
    "double_q_learning": lambda Q, k, s, a, epsilon: Q[1 - k, s, Q[k, s].argmax()],
    "n_step_sarsa": lambda Q, k, s, a, epsilon: Q[0, s, a],
}


def test_the_actor_takes_the_best_action_of_the_mean_of_the_tables():
    """Of a state from a checkpoint, which holds NumPy arrays, under jit."""
    learner = values.tabular_control(ENV, values.double_q_learning())
    state = jax.device_get(learner.init(jax.random.key(0)))
    tables = np.stack([np.zeros((5, 3)), np.zeros((5, 3))])
    tables[0, 2], tables[1, 2] = [3, 0, 2], [-4, 0, 1]
    actor = learner.actor(learner.with_policy(state, tables.astype(np.float32)))
    act = tiny.jit(lambda obs: actor.act((), obs, jax.random.key(0), True)[0])
    assert [int(act(obs)) for obs in np.eye(5, dtype=np.float32)] == [0, 0, 2, 0, 0]


def fading(env):
    """What follows a step into the second or the fourth state counts for half."""

    def step(key, state, action):
        state, timestep = env.step(key, state, action)
        fades = timestep.obs[1] + timestep.obs[3]
        return state, timestep._replace(discount=timestep.discount * (1 - 0.5 * fades))

    return env._replace(step=step)


def check_textbook(name, env):
    algorithm = ALGORITHMS[name](**BUSY, num_steps=60, anneal_steps=200, initial_value=0.3)
    if name == "n_step_sarsa":
        algorithm = algorithm._replace(n_steps=3)
    before, *_, after = train(algorithm, iterations=2, env=env)
    expected, counts = textbook(algorithm, before, [jax.random.key(100), jax.random.key(101)], TARGETS[name], env)
    assert min(counts.values()) >= 10, counts
    np.testing.assert_allclose(after.params.policy, expected, rtol=2e-5, atol=2e-5)
    assert after.steps == 120


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_method_is_the_loop_of_the_textbook(name):
    check_textbook(name, ENV)


def test_discounts_between_0_and_1_multiply_gamma():
    check_textbook("n_step_sarsa", fading(ENV))


def test_environments_side_by_side_move_the_table_by_their_mean():
    """Five of them, of which two or more are in the same state with the same action."""
    algorithm = values.q_learning(**BUSY, num_envs=5, num_steps=1)
    env, states = numbered(ENV), train(algorithm, iterations=8)
    met = 0
    for i, (before, after) in enumerate(pairwise(states)):
        Q, runner = np.asarray(before.params.policy[0], np.float64), before.runner
        x = _inputs(algorithm, before, jax.random.key(100 + i))
        _, moved = jax.vmap(env.step)(x.keys.env[0], runner.env_state, runner.action)
        best = Q[np.asarray(moved.obs)].max(-1)
        errors = {}
        for b in range(5):
            cell = int(runner.state[b]), int(runner.action[b])
            error = float(moved.reward[b]) + 0.9 * float(moved.discount[b]) * best[b] - Q[cell]
            errors.setdefault(cell, []).append(error)
        for cell, found in errors.items():
            met += len(found) > 1
            Q[cell] += 0.5 * np.mean(found)
        np.testing.assert_allclose(after.params.policy[0], Q, rtol=1e-5, atol=1e-5)
    assert met >= 3


def test_metrics_of_a_step_are_means_over_the_entries_that_change():
    """And a return is the sum of the rewards of one episode, of the first of an environment as of the next ones."""
    algorithm = values.q_learning(**BUSY, num_envs=5, num_steps=1, initial_value=0.3)
    learner, env = values.tabular_control(ENV, algorithm), numbered(ENV)
    step, inputs, move = map(tiny.jit, (learner.step, partial(_inputs, algorithm), jax.vmap(env.step)))
    state, total, ended = tiny.jit(learner.init)(jax.random.key(0)), np.zeros(5), 0
    for i in range(12):
        before, key = state, jax.random.key(100 + i)
        state, metrics = step(before, key)
        Q, runner = np.asarray(before.params.policy[0], np.float64), before.runner
        _, moved = move(inputs(before, key).keys.env[0], runner.env_state, runner.action)
        reward, last, held = np.asarray(moved.reward), np.asarray(moved.last), Q[runner.state, runner.action]
        error = reward + 0.9 * np.asarray(moved.discount) * Q[moved.obs].max(-1) - held
        np.testing.assert_allclose(metrics["td_loss"], (error**2).mean() / 2, rtol=1e-4)
        np.testing.assert_allclose(metrics["q_value"], held.mean(), rtol=1e-4, atol=1e-6)
        assert metrics["updates"] == 5
        total, ended = total + reward, ended + last.sum()
        if last.any():
            np.testing.assert_allclose(metrics["return"], total[last].mean(), rtol=1e-4, atol=1e-6)
        total[last] = 0
    assert ended > 10


def same(one, other):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), one, other)))


def test_with_the_change_switched_off_a_child_is_its_parent():
    settings = BUSY | {"num_steps": 60}
    greedy = settings | {"epsilon_start": 0.0, "epsilon_end": 0.0}
    sarsa, q_learning = train(values.sarsa(**settings))[-1], train(values.q_learning(**greedy))[-1]
    assert same(train(values.n_step_sarsa(**settings, n_steps=1))[-1], sarsa)
    assert same(train(values.expected_sarsa(**greedy))[-1], q_learning)
    assert same(train(values.sarsa(**greedy))[-1], q_learning)
    assert same(train(values.double_q_learning(**greedy)._replace(num_tables=1))[-1], q_learning)


def test_one_of_two_tables_changes_at_a_step_and_both_in_the_long_run():
    tables = [x.params.policy for x in train(values.double_q_learning(**BUSY, num_steps=1), iterations=40)]
    changed = np.array([[(new[k] != old[k]).sum() for k in range(2)] for old, new in pairwise(tables)])
    assert (changed.sum(1) == 1).all()
    assert changed.sum(0).min() >= 10


def test_the_length_of_an_iteration_changes_no_schedule():
    """Steps of 4 environments: what is metered after 60 of them is the schedule at 60, whatever an iteration is."""
    settings = BUSY | {"num_envs": 4, "anneal_steps": 100, "epsilon_steps": 80}
    for num_steps in (5, 15):
        algorithm = values.sarsa(**settings, num_steps=num_steps)
        state = train(algorithm, iterations=0)[0]._replace(steps=jnp.int32(40))
        x = _inputs(algorithm, state, jax.random.key(0))
        steps = 40 + 4 * np.arange(num_steps)
        np.testing.assert_allclose(x.learning_rate, 0.5 * np.maximum(1 - steps / 100, 0), rtol=1e-5)
        np.testing.assert_allclose(x.epsilon, 0.2 + 0.4 * np.maximum(1 - steps / 80, 0), rtol=1e-5)


def learned(algorithm, env, iterations):
    learner = values.tabular_control(env, algorithm)

    @tiny.jit
    def run(key):
        begin, *keys = learner.init(key), jax.random.split(key, iterations)
        return jax.lax.scan(learner.step, begin, keys[0])[0].params.policy.mean(0)

    return run(jax.random.key(0))


EXPLORING = {"num_envs": 4, "num_steps": 500, "epsilon_end": 1.0, "gamma": 0.8, "learning_rate": 0.3}


@pytest.mark.parametrize("name", ["q_learning", pytest.param("double_q_learning", marks=pytest.mark.full)])
def test_the_values_of_the_best_policy_are_found(name):
    plan = values.value_iteration(WORLD, 0.8)
    q = learned(ALGORITHMS[name](**EXPLORING, anneal_steps=80_000), ENV, 40)
    exact = envs.action_values(WORLD, plan.values, 0.8)
    np.testing.assert_allclose(q[:-1], exact[:-1], atol=0.1)  # the last state is terminal
    np.testing.assert_array_equal(q[:-1].argmax(-1), exact[:-1].argmax(-1))


@pytest.mark.full
@pytest.mark.parametrize("name", ["sarsa", "expected_sarsa", "n_step_sarsa"])
def test_the_values_of_the_policy_that_acts_are_found(name):
    """Time-outs after 4 steps leave no trace in them."""
    uniform = jnp.full((5, 3), 1 / 3)
    exact = envs.action_values(WORLD, envs.state_values(WORLD, uniform, 0.8), 0.8)
    q = learned(ALGORITHMS[name](**EXPLORING, anneal_steps=80_000), ENV, 40)
    np.testing.assert_allclose(q[:-1], exact[:-1], atol=0.15)


@pytest.mark.full
def test_a_large_initial_value_makes_a_greedy_policy_try_everything():
    greedy = {"epsilon_start": 0.0, "epsilon_end": 0.0, "num_steps": 400, "learning_rate": 0.5}
    for initial, tries_all in ((50.0, True), (-50.0, False)):
        q = train(values.q_learning(**greedy, initial_value=initial))[-1].params.policy[0, :-1]
        assert bool((q != initial).all()) is tries_all


@pytest.mark.full
def test_settings_may_be_traced():
    def final(gamma, epsilon, rate, initial):
        algorithm = values.expected_sarsa(
            gamma=gamma, epsilon_start=epsilon, learning_rate=rate, initial_value=initial, num_steps=20
        )
        learner = values.tabular_control(ENV, algorithm)
        return learner.step(learner.init(jax.random.key(0)), jax.random.key(1))[0].params.policy

    points = [jnp.array(x) for x in ([0.9, 0.5], [0.1, 1.0], [0.1, 0.3], [0.0, 1.0])]
    both = tiny.jit(jax.vmap(final))(*points)
    for i in range(2):
        np.testing.assert_allclose(both[i], tiny.jit(final)(*(x[i] for x in points)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "env",
    [
        partial(envs.make, "CartPole-v1"),
        partial(envs.make, "Pendulum-v1"),
        partial(envs.make, "Catch-bsuite"),
        tiny.counter,
        lambda: envs.wrap(envs.make("frozen_lake"), "frame_stack", num=2),
        lambda: envs.wrap(envs.make("Catch-bsuite"), "flatten"),
    ],
)
def test_an_environment_without_a_table_is_refused(env):
    with pytest.raises(UserError, match=r"one-hot vectors, such as those of frozen_lake, .* Use dqn or ppo"):
        values.tabular_control(env(), values.q_learning())


@pytest.mark.parametrize("wrapper", [{"sticky_actions": {}}, {"time_limit": {"steps": 3}}])
def test_a_wrapper_that_leaves_observations_alone_is_accepted(wrapper):
    config = configs.resolve_config("frozen_lake", "q_learning", {"wrappers": wrapper})
    learner = build(config).learner
    state = jax.eval_shape(learner.init, jax.random.key(0))
    assert state.params.policy.shape == (1, 16, 4)


@pytest.mark.parametrize("task", ["frozen_lake", "frozen_lake_8x8", "cliff_walking", "taxi", "gridworld"])
def test_every_algorithm_resolves_and_survives_its_file(task, tmp_path):
    for algorithm in ALGORITHMS:
        resolved = configs.resolve_config(task, algorithm)
        (tmp_path / "config.toml").write_text(files.toml_dumps(configs.to_dict(resolved)))
        assert configs.load_config(tmp_path) == resolved
        assert resolved.evaluation_greedy


def test_the_commands_train_and_draw_the_table(tmp_path, capsys):
    """`play` writes the table's values beside the animation where the states are on a grid."""
    run, gif = str(tmp_path / "run"), tmp_path / "a.gif"
    settings = ["--set", "evaluations=1", "--set", "evaluation_episodes=2"]
    assert main(["train", "cliff_walking", "sarsa", "--out", run, "--steps", "600", "--quiet", *settings]) == 0
    assert main(["play", run, "--gif", str(gif), "--greedy"]) == 0
    assert "a_values.png: the table" in capsys.readouterr().out
    assert (tmp_path / "a_values.png").read_bytes()[:4] == b"\x89PNG"
    assert gif.read_bytes()[:4] == b"GIF8"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_table_has_no_network(algorithm):
    assert configs.resolve_config("frozen_lake", algorithm).network == {}
    for given in ({"network.hidden": [3]}, {"network": {"kind": "mlp"}}):
        with pytest.raises(UserError, match=f"{algorithm} learns a table and has no network"):
            configs.resolve_config("frozen_lake", algorithm, given)


@pytest.mark.parametrize(
    ("settings", "shards", "sentence"),
    [
        ({"num_envs": 3}, 2, "num_envs = 3 cannot be split evenly over 2 devices"),
        ({"scale_rewards": True}, 1, "q_learning has no scale_rewards: set scale_rewards = false"),
        ({"environment": "CartPole-v1"}, 1, "one-hot vectors"),
    ],
)
def test_what_cannot_be_is_refused(settings, shards, sentence):
    with pytest.raises(UserError, match=sentence):
        build(configs.resolve_config("frozen_lake", "q_learning", settings), shards)
