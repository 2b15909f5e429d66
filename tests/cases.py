"""The one table of learners that contracts and devices are tested on, and the ways of running one on four devices.

Plain gradient descent throughout, since Adam would hide a gradient that is wrong by a factor; the rows that say `adam`
learn as users do. Episodes are of unequal length, so each device holds another number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import lax

from jaxpg import envs, ladder, language, networks, parallel, update, values
from jaxpg.parallel import collectives
from jaxpg.policy_gradient import policy_gradient
from jaxpg.types import Env, Learner

DEVICES, UPDATES = 4, 3
KEYS = jax.random.split(jax.random.key(1), UPDATES)

EPISODES = {"num_envs": 8}
SEGMENT = {"num_envs": 8, "num_steps": 6}
WHOLE_BATCH = {"epochs": 2, "num_minibatches": 1}  # which steps meet in a minibatch depends on the devices
MINIBATCHES = {"epochs": 2, "num_minibatches": 2}
GROUPS = EPISODES | WHOLE_BATCH | {"group_size": 2, "max_grad_norm": 0.5, "learning_rate": 0.2}
REPLAY = {"num_envs": 8, "buffer_size": 72, "batch_size": 16, "learning_starts": 24, "repeats": 5, "target_period": 3}
TRUST = {"value_epochs": 2, "value_minibatches": 1, "conjugate_steps": 4}
SCALED = {"normalize_observations": True, "scale_rewards": True}

mlp = partial(networks.mlp, hidden=(4,))
gru = partial(networks.recurrent, hidden=(4,), width=4)
min_gru = partial(gru, cell="min_gru")
cnn = partial(networks.cnn, channels=(2,), hidden=(4,))
counter, target = tiny.counter(), tiny.target()
pictures = tiny.pictures(counter)
states = envs.as_env(envs.random_mdp(jax.random.key(0), 6, 3), 4, "states")
text = envs.make("reverse", length=3, letters=5, rewards={"accuracy": 1.0, "length": 1.0})
standardized = envs.make(
    "reverse",
    length=3,
    letters=5,
    rewards={
        "accuracy": 1.0,
        "length": {"weight": 0.5, "standardize": "batch"},
        "language": {"weight": 0.5, "standardize": "running", "alphabet": "abcdefgh"},
    },
)


def steps_of_any_text(tokens, length):
    """A step ends with an even token, so that untrained policies write some."""
    place = jnp.arange(len(tokens))
    return ((tokens % 2 == 0) & (place < length)) | (place == length - 1)


stepped = envs.text.text_env(
    envs.text.TASKS["reverse"](length=3, letters=5)._replace(
        step_ends=steps_of_any_text,
        check_steps=lambda problem, tokens, length: (tokens % 3 == 0).astype(jnp.float32),
    ),
    process_weight=0.5,
)
decoder = partial(language.transformer, width=8, layers=1, heads=2, kv_heads=1)


def on_the_ladder(case: Case, changes: Mapping[str, Any]) -> Learner:
    """The learner of a row of the ladder."""
    settings = {"learning_rate": 0.01, "entropy_coefficient": 0.01, **case.settings, **changes}
    algorithm = ladder.ALGORITHMS[case.algorithm](**settings)
    if not case.adam:
        algorithm = algorithm._replace(optimizer=partial(update.sgd, max_grad_norm=settings.get("max_grad_norm")))
    return policy_gradient(case.env, *case.network(case.env), algorithm, **case.scales)


def of_values(case: Case, changes: Mapping[str, Any]) -> Learner:
    """The learner of a row of action values."""
    algorithm = values.ALGORITHMS[case.algorithm](**{"learning_rate": 0.01, **case.settings, **changes})
    if not case.adam:
        algorithm = algorithm._replace(optimizer=partial(update.sgd, max_grad_norm=10.0))
    return values.deep_q(case.env, case.network(case.env), algorithm)


def of_tables(case: Case, changes: Mapping[str, Any]) -> Learner:
    """The learner of a row of tabular control."""
    algorithm = values.TABULAR_ALGORITHMS[case.algorithm](**{"learning_rate": 0.1, **case.settings, **changes})
    return values.tabular_control(case.env, algorithm)


class Case(NamedTuple):
    """A row of the table.

    algorithm, settings: of the ladder, or of values. Those with a table have no `network`.
    env, network: what it learns on, and env -> policy, critic (or the torso of action values).
    build: the row and changes of its settings -> its learner.
    scales: options of the learner beside the algorithm.
    adam: as users train, and not by plain gradient descent.
    devices: four devices are to end where one does. Not so where a device deals its steps into minibatches, draws start
        states or refills groups for itself.
    seeds: the row stands for a kind of program of its own, where `vmap` over seeds could go wrong in its own way.
    quick: in the quick lane; rows that only put together what others have are in the full one.
    """

    algorithm: str
    settings: Mapping[str, Any]
    env: Env = counter
    network: Callable = mlp
    scales: Mapping[str, bool] = {}
    adam: bool = False
    devices: bool = True
    seeds: bool = False
    quick: bool = True
    build: Callable[[Case, Mapping[str, Any]], Learner] = on_the_ladder


values_case = partial(Case, network=partial(values.mlp, hidden=(4,), activation="tanh"), build=of_values)
table_case = partial(Case, env=states, build=of_tables)

IN_RAINBOW = {"double_dqn", "dueling_dqn", "n_step_dqn", "prioritized_dqn", "qr_dqn"}
"""Each changes one thing of DQN. Rainbow changes all of them, so devices and seeds are tested on it alone."""
CASES = {
    "reinforce": Case("reinforce", EPISODES, seeds=True),
    "reinforce_to_go": Case("reinforce_to_go", EPISODES),
    "reinforce_baseline": Case("reinforce_baseline", EPISODES),
    "running baseline": Case("reinforce_baseline", EPISODES | {"baseline_kind": "running"}, quick=False),
    "actor_critic_mc": Case("actor_critic_mc", EPISODES | {"normalize_advantages": True}),
    "actor_critic_mc, gaussian": Case(
        "actor_critic_mc", EPISODES, env=target, scales=SCALED, adam=True, devices=False, quick=False
    ),
    "actor_critic_td": Case("actor_critic_td", SEGMENT),
    "a2c": Case("a2c", SEGMENT | {"learning_rate": 0.2}, scales=SCALED, seeds=True),
    "trpo": Case("trpo", SEGMENT | TRUST, seeds=True),
    "trpo, shared": Case(
        "trpo", SEGMENT | TRUST, network=partial(mlp, shared=True), adam=True, devices=False, quick=False
    ),
    "trpo, squashed": Case(
        "trpo", SEGMENT | TRUST, env=target, network=partial(mlp, squash=True), adam=True, devices=False, quick=False
    ),
    "ppo": Case(
        "ppo", SEGMENT | WHOLE_BATCH | {"learning_rate": 0.2, "entropy_coefficient": 0.1, "value_coefficient": 0.02}
    ),
    "ppo, adam": Case(
        "ppo",
        SEGMENT | MINIBATCHES | {"anneal_steps": 1000, "target_kl": 0.1},
        adam=True,
        devices=False,
        seeds=True,
    ),
    "ppo, gaussian, pool": Case(
        "ppo",
        SEGMENT | MINIBATCHES | {"reset_pool": 2},
        env=target,
        scales=SCALED,
        adam=True,
        devices=False,
        quick=False,
    ),
    "ppo, cnn": Case("ppo", SEGMENT | WHOLE_BATCH, env=pictures, network=cnn, quick=False),
    "ppo, gru, pool": Case(
        "ppo", SEGMENT | WHOLE_BATCH | {"reset_pool": 2, "target_kl": 0.01}, network=gru, seeds=True
    ),
    "grpo": Case("grpo", GROUPS),
    "grpo, min_gru": Case(
        "grpo", GROUPS | MINIBATCHES, network=min_gru, adam=True, devices=False, seeds=True, quick=False
    ),
    "grpo, text": Case("grpo", GROUPS, env=text, network=decoder, seeds=True),
    "process_grpo": Case("process_grpo", GROUPS, quick=False),
    "process_grpo, text": Case("process_grpo", GROUPS, env=stepped, network=decoder, quick=False),
    "grpo, text, standardised": Case("grpo", GROUPS, env=standardized, network=decoder, quick=False),
    "rloo": Case("rloo", GROUPS | {"kl": "reward_k1"}),
    "dr_grpo": Case("dr_grpo", GROUPS | {"max_length": 4}, quick=False),
    "gspo": Case("gspo", GROUPS, env=target, quick=False),
    "gspo, text": Case("gspo", GROUPS | {"clip": 0.1, "clip_high": 0.1}, env=text, network=decoder, quick=False),
    "dapo": Case("dapo", GROUPS, env=target),  # with real actions no two returns are equal: nothing is refilled
    "dapo, refilled": Case("dapo", GROUPS | MINIBATCHES, adam=True, devices=False, seeds=True, quick=False),
    "dapo, text": Case("dapo", GROUPS | {"overlong_filtering": True}, env=text, network=decoder, quick=False),
    "cispo": Case("cispo", GROUPS, env=target, quick=False),
    "rlhf": Case("rlhf", EPISODES | WHOLE_BATCH | {"reference_kl_target": 0.01}, seeds=True, quick=False),
    "rlhf, text": Case("rlhf", EPISODES | WHOLE_BATCH, env=text, network=decoder, quick=False),
    "sarsa": table_case("sarsa", SEGMENT, seeds=True),
    "expected_sarsa": table_case("expected_sarsa", SEGMENT, quick=False),
    "q_learning": table_case("q_learning", SEGMENT | {"anneal_steps": 1000}, quick=False),
    "double_q_learning": table_case("double_q_learning", SEGMENT, quick=False),
    "n_step_sarsa": table_case("n_step_sarsa", SEGMENT | {"n_steps": 3}, quick=False),
    "dqn": values_case("dqn", REPLAY, seeds=True),
    "dqn, adam, cnn": values_case(
        "dqn",
        REPLAY | {"train_frequency": 2, "gradient_steps": 2, "target_period": 1, "target_rate": 0.1, "batch_size": 12},
        env=pictures,
        network=partial(values.cnn, channels=(4,), hidden=(4,), activation="tanh", layer_norm=True),  # two: a sign each
        adam=True,
        devices=False,
        quick=False,
    ),
    "double_dqn": values_case("double_dqn", REPLAY, devices=False, quick=False),
    "dueling_dqn": values_case("dueling_dqn", REPLAY, devices=False, quick=False),
    "n_step_dqn": values_case("n_step_dqn", REPLAY, devices=False, quick=False),
    "prioritized_dqn": values_case("prioritized_dqn", REPLAY, devices=False, quick=False),
    "qr_dqn": values_case("qr_dqn", REPLAY | {"quantiles": 5}, devices=False, quick=False),
    "rainbow": values_case("rainbow", REPLAY | {"quantiles": 5}, seeds=True),
    "pqn": values_case("pqn", SEGMENT | WHOLE_BATCH, seeds=True),
}


def names(chosen: Callable[[Case], bool] = lambda case: True) -> list:
    """The parameters of a test: all rows, those that are not `chosen` or not quick for the full lane alone."""
    return [
        name if case.quick and chosen(case) else pytest.param(name, marks=pytest.mark.full)
        for name, case in CASES.items()
    ]


def make(name: str, **changes: Any) -> Learner:
    """The learner of a row, with some settings changed."""
    return CASES[name].build(CASES[name], changes)


class Run(NamedTuple):
    """A learner, its compiled step, the states before and after each of KEYS, and how often the step was traced."""

    learner: Learner
    step: Callable
    states: tuple
    metrics: tuple
    traces: list


@cache
def run(name: str) -> Run:
    """The updates of a row on one device, made once for all tests of a process."""
    learner = make(name)
    traces = []

    def step(state, key):
        traces.append(name)
        return learner.step(state, key)

    step = tiny.jit(step)
    states, metrics = [initial(learner)], []
    for key in KEYS:
        state, metric = step(states[-1], key)
        states.append(state)
        metrics.append(metric)
    return Run(learner, step, tuple(states), tuple(metrics), traces)


def initial(learner):
    return tiny.jit(learner.init)(jax.random.key(0))


def updates(learner):
    """All updates in a row as one program; the metrics of the last."""

    def run(state, keys):
        state, metrics = lax.scan(learner.step, state, keys)
        return state, jax.tree.map(lambda x: x[-1], metrics)

    return run


def on_one(learner, state):
    return tiny.jit(updates(learner))(state, KEYS)


def over(mesh, learner, states):
    """The states placed on a mesh, where the updates take them, and the metrics; all `[S, ...]`."""
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
    """Four devices in one program on one: the sums over devices are there, and nothing is spread."""
    return mapped(lambda *args, **kwargs: tiny.jit(jax.vmap(*args, **kwargs)), learner, state)


def distance(one, other):
    """The largest difference, relative to the size of an array where that is above one."""

    def apart(x, y):
        return np.abs(x - y).max(initial=0.0) / np.abs(y).max(initial=1.0)

    return np.max(jax.tree.leaves(jax.tree.map(apart, one, other)))  # NaN where there is one, as `max` need not be


def moved(state, after):
    return distance(after.params.policy, state.params.policy)


def assert_same(run: Run, after: Any, metrics: Any) -> None:
    """That some devices together have ended where one alone did, runner and metrics included."""
    expected, expected_metrics = run.states[-1], run.metrics[-1]
    assert moved(run.states[0], expected) > 1e-3
    assert distance(after.params.policy, expected.params.policy) < 1e-3 * moved(run.states[0], expected)
    assert distance(after._replace(runner=()), expected._replace(runner=())) < 1e-5
    near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(near, metrics, expected_metrics)
    jax.tree.map(near, after.runner, expected.runner)
