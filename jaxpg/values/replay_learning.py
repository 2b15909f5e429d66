"""Learning from a replay buffer: step the environments, store, draw a batch, take a gradient step."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError
from jaxpg.parallel import collectives
from jaxpg.rollout.collector import RolloutStats
from jaxpg.rollout.segments import final_obs_slots
from jaxpg.rollout.successors import bootstrap_steps
from jaxpg.types import Array, Episodes, Key, Metrics, Params, Rollout, Transition, Tree
from jaxpg.update import apply_gradient
from jaxpg.update.objective import per_step
from jaxpg.values import replay
from jaxpg.values.deep_q import DeepQState, LearnFromExperience, Parts, RunnerState
from jaxpg.values.replay import Drawn, NStep, StoredSteps
from jaxpg.values.targets import per_action, pick
from jaxpg.vectorize import any_in_batch, where_in_batch


class ReplaySettings(NamedTuple):
    """The settings of learning from a buffer.

    buffer_size: environment steps that are kept, over all environments.
    batch_size: rows of a batch, over all devices.
    learning_starts: environment steps before the first gradient step.
    gradient_steps: after every `collect`.
    repeats: of `collect` and its gradient steps in one iteration of the learner.
    """

    buffer_size: int
    batch_size: int
    learning_starts: int
    gradient_steps: int
    repeats: int


class ReplayState(NamedTuple):
    """The buffer and the state of its sampling, leaves `[B, ...]`."""

    buffer: StoredSteps
    sampling: Tree


class _RandomNumbers(NamedTuple):
    """What `repeats` repeats draw from, leaves `[repeats, ...]`.

    collect_key: of the rollout.
    batches: `Sampling.noise` of the batches of its gradient steps, `[repeats, gradient_steps, ...]`.
    """

    collect_key: Array
    batches: Tree


class _Learned(NamedTuple):
    """What a gradient step changes."""

    params: Params
    target: Tree
    opt_state: Tree
    updates: Array


def from_replay(settings: ReplaySettings) -> LearnFromExperience:
    """DQN's loop (Mnih et al. 2015, algorithm 1): after every few steps of the environments, batches from a buffer."""
    return LearnFromExperience(partial(_init, settings), partial(_iterate, settings), partial(_experience, settings))


def _init(settings: ReplaySettings, parts: Parts, collector: Tree) -> ReplayState:
    """An empty buffer, whose slots a rollout's steps divide.

    Raises:
        UserError: the buffer is too small for a rollout, or for the steps of a target; there is no sampling.
    """
    algorithm = parts.algorithm
    if algorithm.sampling is None:
        raise UserError("from_replay draws from a buffer: the algorithm's sampling must say how, and is None.")
    policy, params = parts.policy(jnp.zeros((), jnp.int32)), jax.eval_shape(parts.network.init, jax.random.key(0))

    def rows(collector: Tree, params: Tree) -> StoredSteps:
        _, rollout, _ = algorithm.collector.collect(parts.env, policy, params, collector, jax.random.key(0))
        return replay.stored_steps(rollout)

    like = jax.eval_shape(rows, collector, params)
    columns, steps = like.reward.shape
    slots = settings.buffer_size // columns // steps * steps
    if slots < max(steps, algorithm.n_steps):
        raise UserError(
            f"buffer_size = {settings.buffer_size} is too small for {columns} environments: it must hold at least "
            f"{max(steps, algorithm.n_steps)} steps of each, {columns * max(steps, algorithm.n_steps)} in all."
        )
    return ReplayState(replay.empty(like, slots), algorithm.sampling.init(columns, slots))


def _iterate(
    settings: ReplaySettings, parts: Parts, state: DeepQState, key: Key
) -> tuple[DeepQState, RolloutStats, Metrics]:
    """`repeats` times: collect, store, and take the gradient steps."""

    def repeat(state: DeepQState, numbers: _RandomNumbers) -> tuple[DeepQState, tuple[RolloutStats, Metrics]]:
        state, stats, metrics, _ = _repeat(settings, parts, state, numbers)
        return state, (stats, metrics)

    before = state.updates
    state, (stats, metrics) = lax.scan(repeat, state, _random_numbers(settings, parts, state, key))
    updates = state.updates - before
    metrics = {name: x.sum() / jnp.maximum(updates, 1) for name, x in metrics.items()}
    return state, jax.tree.map(lambda x: x.sum(0), stats), {**metrics, "updates": updates}


def _random_numbers(settings: ReplaySettings, parts: Parts, state: DeepQState, key: Key) -> _RandomNumbers:
    """The random numbers of an iteration, in one call before its loop, on every platform.

    They replace keys that every gradient step splits and draws from, with the same batches. The gain was measured on a
    CPU, where XLA runs each such call as a loop of some hundred operations: a tenth of DQN's time on CartPole
    (benchmarks/LOG.md, "random numbers of a batch").
    """
    sampling = parts.algorithm.sampling
    assert sampling is not None
    columns = state.runner.replay.buffer.reward.shape[0]
    keys = jax.vmap(jax.random.split)(jax.random.split(key, settings.repeats))
    batch_keys = jax.vmap(partial(jax.random.split, num=settings.gradient_steps))(keys[:, 1])
    noise = partial(sampling.noise, columns, settings.batch_size)
    return _RandomNumbers(keys[:, 0], jax.vmap(jax.vmap(noise))(batch_keys))


def _repeat(
    settings: ReplaySettings, parts: Parts, state: DeepQState, numbers: _RandomNumbers
) -> tuple[DeepQState, RolloutStats, Metrics, StoredSteps]:
    """Collect, store, and take the gradient steps; also what was stored, `[B, T, ...]`."""
    state, stats, rows = _collect_and_store(parts, state, numbers.collect_key)
    state, metrics = lax.scan(partial(_gradient_step, settings, parts), state, numbers.batches)
    return state, stats, metrics, rows


def _experience(settings: ReplaySettings, parts: Parts, state: DeepQState, key: Key) -> Rollout:
    """The steps of an iteration, over all its `repeats`."""

    def repeat(state: DeepQState, numbers: _RandomNumbers) -> tuple[DeepQState, StoredSteps]:
        state, *_, rows = _repeat(settings, parts, state, numbers)
        return state, rows

    _, rows = lax.scan(repeat, state, _random_numbers(settings, parts, state, key))
    rows = jax.tree.map(lambda x: x.swapaxes(1, 2).reshape(-1, x.shape[1], *x.shape[3:]), rows)
    unread, mask = jnp.zeros_like(rows.reward), jnp.ones_like(rows.reward)
    steps = Transition(rows.obs, rows.action, unread, rows.reward, rows.discount, rows.last, mask)
    ends = bootstrap_steps(steps, final_obs_slots(parts.env, len(mask)))
    final_obs = jax.tree.map(lambda x: x[ends, jnp.arange(mask.shape[1])[None]], rows.next_obs)
    return Rollout(steps, mask, final_obs, Episodes())


def _collect_and_store(parts: Parts, state: DeepQState, key: Key) -> tuple[DeepQState, RolloutStats, StoredSteps]:
    """A rollout of the policy as it is now, written into the buffer; also the rows that were written."""
    algorithm, memory = parts.algorithm, state.runner.replay
    assert algorithm.sampling is not None
    collector, rollout, stats = parts.collect(state, key)
    rows = replay.stored_steps(rollout)
    before = _window(parts, memory.buffer, state.steps)
    steps = state.steps + stats.steps.astype(jnp.int32)
    buffer = replay.write(memory.buffer, rows, before.cursor)
    after = _window(parts, buffer, steps)
    sampling = algorithm.sampling.add(memory.sampling, after, rows.reward.shape[1], algorithm.n_steps)
    return state._replace(runner=RunnerState(collector, ReplayState(buffer, sampling)), steps=steps), stats, rows


def _window(parts: Parts, buffer: StoredSteps, steps: Array) -> replay.Window:
    return replay.window(buffer, steps // parts.algorithm.collector.num_envs)


def _gradient_step(
    settings: ReplaySettings, parts: Parts, state: DeepQState, noise: Tree
) -> tuple[DeepQState, Metrics]:
    """One batch and one gradient step, once `learning_starts` steps are there; else nothing, and zeros as metrics.

    Seeds under `vmap` wait for each other: while one of them learns, the others compute what they then discard.
    """
    algorithm, memory = parts.algorithm, state.runner.replay
    assert algorithm.sampling is not None
    window = _window(parts, memory.buffer, state.steps)
    drawn = algorithm.sampling.draw(memory.sampling, window, algorithm.n_steps, state.steps, noise)
    batch = replay.gather(memory.buffer, drawn, algorithm.n_steps, algorithm.gamma)
    ready = (state.steps >= settings.learning_starts) & (window.filled >= algorithm.n_steps)

    def learn(learned: _Learned) -> tuple[_Learned, Array, Metrics]:
        result = _learn(parts, settings.batch_size, learned, batch, drawn, state.steps)
        return where_in_batch(ready, result, wait(learned))

    def wait(learned: _Learned) -> tuple[_Learned, Array, Metrics]:
        zero = jnp.zeros((), jnp.float32)
        return learned, jnp.zeros_like(drawn.weight), {"td_loss": zero, "q_value": zero, "gradient_norm": zero}

    before = _Learned(state.params, state.target, state.opt_state, state.updates)
    learned, td_error, metrics = lax.cond(any_in_batch(ready), learn, wait, before)
    sampling = algorithm.sampling.update(memory.sampling, drawn, td_error, ready)
    runner = state.runner._replace(replay=memory._replace(sampling=sampling))
    return state._replace(**learned._asdict(), runner=runner), metrics


def _learn(
    parts: Parts, batch_size: int, learned: _Learned, batch: NStep, drawn: Drawn, steps: Array
) -> tuple[_Learned, Array, Metrics]:
    """A gradient step on a batch: what it changed, the TD errors `[R]`, and metrics."""
    algorithm, network = parts.algorithm, parts.network
    online = learned.params.policy
    target = td_target(parts, online, learned.target if algorithm.move_target else online, batch)

    def loss(params: Params) -> tuple[Array, tuple[Array, Metrics]]:
        prediction = pick(network.returns(params.policy, batch.obs), batch.action)
        errors = per_step("algorithm's loss", algorithm.loss(prediction, target), drawn.weight)
        total = (drawn.weight * errors).sum() / batch_size
        td_error = target.mean(-1) - prediction.mean(-1)
        return total, (td_error, {"td_loss": total, "q_value": prediction.mean(-1).sum() / batch_size})

    gradient, (td_error, metrics) = jax.grad(loss, has_aux=True)(learned.params)
    gradient, metrics = collectives.psum((gradient, metrics))
    rate = algorithm.learning_rate(steps)
    params, opt_state, norms = apply_gradient(parts.optimizer, rate, gradient, learned.params, learned.opt_state)
    updates = learned.updates + 1
    move_target = algorithm.move_target
    moved = move_target(learned.target, params.policy, updates) if move_target else ()
    return _Learned(params, moved, opt_state, updates), td_error, metrics | norms


def td_target(parts: Parts, params: Tree, target_params: Tree, batch: NStep) -> Array:
    """reward_sum + bootstrap_discount Z_target(s', a*), `[R, N]`: a* is the allowed action that `selector` prefers."""
    network = parts.network
    estimates = network.returns(target_params, batch.next_obs)
    q_online = network.values(params, batch.next_obs)  # compiled only where `selector` reads it
    preferred = per_action("selector", parts.algorithm.selector(q_online, estimates.mean(-1)), q_online)
    action = network.masked(preferred, batch.next_obs).argmax(-1)
    bootstrap = batch.bootstrap_discount[:, None] * pick(estimates, action)
    return batch.reward_sum[:, None] + bootstrap
