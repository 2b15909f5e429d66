"""The record TabularControl, and the learner that runs every algorithm of `control`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpg.errors import UserError, check_functions, check_numbers, check_record, excerpt
from jaxpg.models.distributions import Categorical
from jaxpg.parallel import collectives
from jaxpg.rollout import make_actor
from jaxpg.rollout.collector import RolloutStats, StepKeys, env_keys, episode_numbers, step_keys, total_stats
from jaxpg.rollout.metrics import episode_metrics, logged
from jaxpg.types import Actor, Array, Box, Discrete, Env, Key, Learner, Metrics, Params, Policy, Scalar, TimeStep, Tree
from jaxpg.user_input.domains import check_scalars, check_whole
from jaxpg.values.q_networks import QNetwork, epsilon_greedy, epsilon_greedy_policy
from jaxpg.vectorize import copy_tree, tree_where


class TabularControl(NamedTuple):
    """An algorithm that learns action values in a table while it acts epsilon-greedily. A step of an environment is

        r, s' ~ environment(s, a),    a' ~ epsilon-greedy policy of Q in s'
        target = r_1 + gamma r_2 + ... + gamma^{n-1} r_n + gamma^n bootstrap(Q(s'), a')
        Q(s, a) <- Q(s, a) + learning_rate (target - Q(s, a)),    for s and a of n steps before

    and, where an episode ends, the same for the steps that still wait, with as many rewards as there are. The next
    action is chosen before the table changes, as in SARSA, by all algorithms.

    gamma: discount.
    num_envs: environments that share the table, on all devices.
    num_steps: steps of each environment in an iteration.
    epsilon: environment steps so far -> share of random actions.
    initial_value: of all entries.
    num_tables: 1; or 2, one of which changes at a step, drawn at random.
    n_steps: rewards in a target (static).
    bootstrap: (q_selector, q_value, a', epsilon) -> the value of the successor; `[A]` of the table that changes,
        `[A]` of the other one (the same if there is one only), the next action, the share of random actions.
    learning_rate: environment steps so far -> step size.
    """

    gamma: Scalar
    num_envs: int
    num_steps: int
    epsilon: Callable[[Array], Array]
    initial_value: Scalar
    num_tables: int
    n_steps: int
    bootstrap: Callable[[Array, Array, Array, Array], Array]
    learning_rate: Callable[[Array], Array]


class Pending(NamedTuple):
    """The last n steps of each environment, oldest first, `[B, n]`: those of the episode wait for their target.

    state, action: before the step.
    reward_sum: r_1 + g_1 r_2 + g_1 g_2 r_3 + ... since then, with g_t = gamma times the discount of step t.
    factor: g_1 g_2 ..., what comes next counts for so much.
    """

    state: Array
    action: Array
    reward_sum: Array
    factor: Array


class RunnerState(NamedTuple):
    """What belongs to single environments, leaves `[B, ...]`, split over devices.

    env_state: of the environment.
    state: int32, the state's row of the table.
    action: int32, the action to be taken in it.
    episode_return, episode_length: of the episode in progress.
    pending: its steps whose targets are not complete.
    """

    env_state: Tree
    state: Array
    action: Array
    episode_return: Array
    episode_length: Array
    pending: Pending


class ControlState(NamedTuple):
    """Everything that a run carries from iteration to iteration.

    params: the tables `[K, S, A]`, as the policy's.
    steps: environment steps so far, int32.
    """

    params: Params
    runner: RunnerState
    steps: Array


class _Inputs(NamedTuple):
    """The inputs of a step, leaves `[T, ...]`.

    noise: random numbers of the actions, `[T, B]`.
    keys: of the environments, `[T, B]`.
    table: which of the tables changes, `[T, B]`.
    epsilon, learning_rate: `[T]`.
    """

    noise: Array
    keys: StepKeys
    table: Array
    epsilon: Array
    learning_rate: Array


class _Changes(NamedTuple):
    """Sums over the entries that a step changes: how many, halved squares of their errors, their values before."""

    number: Array
    td_loss: Array
    q_value: Array


class _Successor(NamedTuple):
    """Where the targets of a step bootstrap, `[B]` each."""

    state: Array
    action: Array


def tabular_control(env: Env, algorithm: TabularControl) -> Learner:
    """The learner of `algorithm` on `env`: an iteration is `num_steps` steps of acting and learning.

    Args:
        env: the environment; its observations are one-hot, its actions discrete.
        algorithm: the algorithm (control.py).

    Raises:
        UserError: the environment has other observations or actions, one of the two is no record, or a field of the
            algorithm is of another kind or out of range.
    """
    check_record("tabular_control", env, Env, 'envs.make("frozen_lake")')
    check_record("tabular_control", algorithm, TabularControl, "values.q_learning()")
    _check_fields(algorithm)
    env = numbered(env)
    network = q_table(env, algorithm)

    def actor(state: ControlState) -> Actor:
        return make_actor(policy_at(state.steps), state.params.policy)

    def policy_at(steps: Array) -> Policy:
        return epsilon_greedy_policy(network, algorithm.epsilon(steps))

    def with_policy(state: ControlState, params: Tree) -> ControlState:
        return state._replace(params=Params(copy_tree(params), ()))

    init = partial(_init, env, algorithm, network)
    return Learner(init, partial(_step, env, algorithm), actor, with_policy)


def _check_fields(algorithm: TabularControl) -> None:
    """Refuse fields of another kind, and numbers that cannot be."""
    check_functions(algorithm, ("epsilon", "bootstrap", "learning_rate"))
    check_numbers(algorithm, ("gamma", "initial_value"))
    check_scalars({"gamma": algorithm.gamma, "initial_value": algorithm.initial_value})
    for name in ("num_envs", "num_steps", "n_steps"):
        check_whole(name, getattr(algorithm, name))
    if algorithm.num_tables not in (1, 2):
        raise UserError(f"num_tables must be 1 or 2, not {excerpt(algorithm.num_tables)}.")


def mean_table(state: ControlState) -> Array:
    """The action values that a learner has found, `[..., S, A]`: the mean of its tables, for each of several seeds."""
    return state.params.policy.mean(-3)


def numbered(env: Env) -> Env:
    """The environment with the number of its state, [] int32, in place of a one-hot observation `[S]`.

    Raises:
        UserError: the observations are not one-hot, or the actions are not discrete.
    """
    space = env.observation_space
    if not isinstance(env.action_space, Discrete) or not isinstance(space, Box) or not _is_one_hot(env, space):
        raise UserError(
            f"A table of action values needs discrete actions and states that are one-hot vectors, such as those of "
            f"frozen_lake, cliff_walking, taxi or grid_world; those of {env.name} are not. Use dqn or ppo."
        )

    def number(obs: Array) -> Array:
        return obs.argmax(-1).astype(jnp.int32)

    def reset(key: Key) -> tuple[Tree, Array]:
        state, obs = env.reset(key)
        return state, number(obs)

    def step(key: Key, state: Tree, action: Array) -> tuple[Tree, TimeStep]:
        state, timestep = env.step(key, state, action)
        return state, timestep._replace(obs=number(timestep.obs))

    return env._replace(reset=reset, step=step, observation_space=Discrete(space.shape[0]))


def _is_one_hot(env: Env, space: Box) -> bool:
    """Whether observations can be one-hot vectors, and two of them are: the first, and that after action 0."""
    if len(space.shape) != 1 or (space.low != 0).any() or (space.high != 1).any():
        return False
    with jax.ensure_compile_time_eval():  # a sweep builds a learner while it traces
        reset_key, step_key = jax.random.split(jax.random.key(0))
        state, first = env.reset(reset_key)
        _, timestep = env.step(step_key, state, jnp.int32(0))
        return all(sorted(np.asarray(obs))[-2:] == [0, 1][-obs.size :] for obs in (first, timestep.obs))


def q_table(env: Env, algorithm: TabularControl) -> QNetwork:
    """Tables `[K, S, A]` as a network of action values on one-hot observations: Q is the mean of the tables.

    Args:
        env: of `numbered`.
        algorithm: which says how many tables there are, and how they begin.
    """
    states, actions = env.observation_space, env.action_space
    assert isinstance(states, Discrete)
    assert isinstance(actions, Discrete)
    shape = algorithm.num_tables, states.n, actions.n

    def init(key: Key) -> Array:
        return jnp.full(shape, algorithm.initial_value, jnp.float32)

    def returns(tables: Array, obs: Array) -> Array:
        return jnp.moveaxis(jnp.asarray(tables)[:, obs.argmax(-1)], 0, -1)  # those of a checkpoint are NumPy's

    return QNetwork(init, returns)


def _init(env: Env, algorithm: TabularControl, network: QNetwork, key: Key) -> ControlState:
    """New tables, and environments at the start of an episode."""
    num_envs, steps = algorithm.num_envs, jnp.zeros((), jnp.int32)
    reset_key, action_key = jax.random.split(key)
    tables = network.init(key)
    env_state, state = jax.vmap(env.reset)(env_keys(reset_key, num_envs))
    noise = jax.vmap(jax.random.uniform)(env_keys(action_key, num_envs))
    shape = num_envs, algorithm.n_steps
    runner = RunnerState(
        env_state=env_state,
        state=state,
        action=_policy(tables, state, algorithm.epsilon(steps)).at(noise),
        episode_return=jnp.zeros(num_envs),
        episode_length=jnp.zeros(num_envs, jnp.int32),
        # Each its own array, or they could not be donated to a compiled step.
        pending=Pending(*(jnp.zeros(shape, x) for x in (jnp.int32, jnp.int32, jnp.float32, jnp.float32))),
    )
    return ControlState(Params(tables, ()), runner, steps)


def _step(env: Env, algorithm: TabularControl, state: ControlState, key: Key) -> tuple[ControlState, Metrics]:
    """One iteration, and what it measured."""
    inputs = _inputs(algorithm, state, key)
    begin = (state.params.policy, state.runner)
    (tables, runner), (stats, changes) = lax.scan(partial(_online_step, env, algorithm), begin, inputs)
    stats = total_stats(jax.tree.map(lambda x: x.sum(0), stats))
    changes = jax.tree.map(jnp.sum, changes)
    steps = state.steps + stats.steps.astype(jnp.int32)
    metrics = {
        "td_loss": changes.td_loss / jnp.maximum(changes.number, 1),
        "q_value": changes.q_value / jnp.maximum(changes.number, 1),
        "updates": changes.number,
        **episode_metrics(stats),
        "learning_rate": algorithm.learning_rate(steps),
        "epsilon": algorithm.epsilon(steps),
    }
    return ControlState(Params(tables, ()), runner, steps), logged(metrics, steps)


def _inputs(algorithm: TabularControl, state: ControlState, key: Key) -> _Inputs:
    """All random numbers and schedules of an iteration, for the environments of this device."""
    num_steps, num_columns = algorithm.num_steps, len(state.runner.action)
    key, table_key = jax.random.split(key)
    keys = step_keys(key, num_columns, num_steps, with_reset=True)
    table = jnp.zeros((num_steps, num_columns), jnp.int32)
    if algorithm.num_tables > 1:
        coin = partial(jax.random.randint, shape=(), minval=0, maxval=algorithm.num_tables)
        table = jax.vmap(jax.vmap(coin))(env_keys(table_key, num_columns, shape=(num_steps,))).swapaxes(0, 1)
    steps = state.steps + algorithm.num_envs * jnp.arange(num_steps)
    return _Inputs(
        noise=jax.vmap(jax.vmap(jax.random.uniform))(keys.action),
        keys=keys,
        table=table,
        epsilon=jnp.broadcast_to(algorithm.epsilon(steps), num_steps),
        learning_rate=jnp.broadcast_to(algorithm.learning_rate(steps), num_steps),
    )


def _online_step(
    env: Env, algorithm: TabularControl, carry: tuple[Array, RunnerState], x: _Inputs
) -> tuple[tuple[Array, RunnerState], tuple[RolloutStats, _Changes]]:
    """One step of every environment, and what the tables learn from it."""
    tables, runner = carry
    env_state, timestep = jax.vmap(env.step)(x.keys.env, runner.env_state, runner.action)
    action = _policy(tables, timestep.obs, x.epsilon).at(x.noise)
    length, total = runner.episode_length + 1, runner.episode_return + timestep.reward
    pending = _push(runner, timestep.reward, algorithm.gamma * timestep.discount)
    successor = _Successor(timestep.obs, action)
    tables, changes = _learn(algorithm, tables, pending, _due(length, timestep.last, algorithm.n_steps), successor, x)

    start_state, start = jax.vmap(env.reset)(x.keys.reset)
    started = RunnerState(
        env_state=start_state,
        state=start,
        action=_policy(tables, start, x.epsilon).at(x.noise),  # one of the two actions is taken
        episode_return=jnp.zeros_like(total),
        episode_length=jnp.zeros_like(length),
        pending=pending,
    )
    moved = RunnerState(env_state, timestep.obs, action, total, length, pending)
    runner = jax.vmap(tree_where)(timestep.last, started, moved)
    ended = timestep.last.astype(jnp.float32)
    numbers = episode_numbers(env, env_state, timestep.last)
    stats = RolloutStats(jnp.ones_like(total), ended, ended * total, ended * length, numbers)
    return (tables, runner), (stats, changes)


def _policy(tables: Array, state: Array, epsilon: Array) -> Categorical:
    """The epsilon-greedy policy in states `[B]`."""
    return epsilon_greedy(tables[:, state].mean(0), epsilon)


def _push(runner: RunnerState, reward: Array, discount: Array) -> Pending:
    """The steps of each environment with the newest one, the sums of rewards with its reward.

    discount: [B], gamma times that of the step.
    """
    newest = (runner.state, runner.action, 0.0, 1.0)
    shifted = Pending(*(jnp.roll(x, -1, 1).at[:, -1].set(new) for x, new in zip(runner.pending, newest, strict=True)))
    return shifted._replace(
        reward_sum=shifted.reward_sum + shifted.factor * reward[:, None], factor=shifted.factor * discount[:, None]
    )


def _due(length: Array, last: Array, n_steps: int) -> Array:
    """[B, n], whether the target of a pending step is complete: n steps have passed, or the episode has ended."""
    age = jnp.arange(n_steps, 0, -1)[None, :]
    return (age <= length[:, None]) & ((age == n_steps) | last[:, None])


def _learn(
    algorithm: TabularControl, tables: Array, pending: Pending, due: Array, successor: _Successor, x: _Inputs
) -> tuple[Array, _Changes]:
    """The tables after the changes for all steps that are due, one after the other, oldest first."""

    def value(q_selector: Array, q_value: Array, action: Array) -> Array:
        return algorithm.bootstrap(q_selector, q_value, action, x.epsilon)

    def change(tables: Array, slot: tuple[Pending, Array]) -> tuple[Array, _Changes]:
        step, due = slot
        other = (x.table + 1) % algorithm.num_tables
        q_selector, q_value = (tables[k, successor.state] for k in (x.table, other))
        bootstrap = step.factor * jax.vmap(value)(q_selector, q_value, successor.action)
        before = tables[x.table, step.state, step.action]
        error = step.reward_sum + bootstrap - before
        cells = jnp.stack([x.table, step.state, step.action], axis=-1)
        cells, error, before, due = collectives.gather((cells, error, before, due))
        return _move(tables, cells, error, before, due, x.learning_rate)

    return lax.scan(change, tables, jax.tree.map(lambda x: x.swapaxes(0, 1), (pending, due)))


def _move(
    tables: Array, cells: Array, error: Array, before: Array, due: Array, learning_rate: Array
) -> tuple[Array, _Changes]:
    """Q <- Q + learning_rate error in the cells `[B, 3]` that are due; where several are the same, by their mean."""
    same = (cells[:, None] == cells[None, :]).all(-1) & due[None, :]
    weight = due / jnp.maximum(same.sum(1), 1)
    tables = tables.at[tuple(cells.T)].add((learning_rate * weight * error).astype(tables.dtype))
    return tables, _Changes(due.sum(dtype=jnp.float32), (due * error**2).sum() / 2, (due * before).sum())
