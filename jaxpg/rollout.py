"""Experience: one scan over time of environments side by side.

Two shapes of it. A *continuing* rollout carries its environments from one call to the next and resets each the moment
its episode ends, so every step is real. An *episodic* rollout plays whole episodes from their start; those that end
early are padded and masked. Columns draw from keys of their own, numbered over all devices, so that how the columns are
laid over devices changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jaxpg import parallel
from jaxpg.errors import UserError
from jaxpg.types import Array, Env, Key, Metrics, Outcome, Policy, Rollout, Transition, Tree


class Runner(NamedTuple):
    """Where each environment stands, leaves `[B, ...]`.

    The last two are the return and the length of the episode under way. They follow from what a rollout recorded, so
    they are `()` while it is under way and where episodes are whole.
    """

    env_state: Tree
    obs: Tree
    memory: Tree
    episode_return: Tree = ()
    episode_length: Tree = ()


class Tally(NamedTuple):
    """What a rollout went through, summed over all devices: environment steps, and episodes that ended."""

    steps: Array
    episodes: Array
    return_sum: Array
    length_sum: Array


class Collector(NamedTuple):
    """How experience is gathered.

    init(env, policy, params, key) -> runner: for all columns of all devices.
    collect(env, policy, params, runner, key) -> runner, Rollout, Tally: for the columns of this device.
    num_envs: columns on all devices together.
    group_size: neighbouring columns that share their start state.
    """

    init: Callable[[Env, Policy, Tree, Key], Tree]
    collect: Callable[[Env, Policy, Tree, Tree, Key], tuple[Tree, Rollout, Tally]]
    num_envs: int
    group_size: int = 1


def continuing(*, num_envs: int, num_steps: int, start_pool: int = 0) -> Collector:
    """Segments of `num_steps` steps of `num_envs` environments that are reset as their episodes end.

    Every reset is fresh by default. With `start_pool` = n, each column draws n start states per segment, before the
    scan, and uses them in turn (from the first again when more than n episodes end in it): cheaper where a reset
    costs much, exact in distribution as long as no column ends more than n episodes.
    """
    return Collector(
        init=partial(_begin_all, num_envs=num_envs),
        collect=partial(_collect_segment, num_steps=num_steps, start_pool=start_pool),
        num_envs=num_envs,
    )


def episodic(*, num_envs: int, group_size: int = 1) -> Collector:
    """`num_envs` whole episodes, in contiguous groups of `group_size` that share their start state.

    The rollout is `env.time_limit` long, and what lies behind the end of an episode is masked; collecting ends with the
    last episode. It raises a UserError where the episodes of a device do not divide into groups.
    """
    return Collector(
        init=_begin_none,
        collect=partial(_collect_episodes, num_envs=num_envs, group_size=group_size),
        num_envs=num_envs,
        group_size=group_size,
    )


def without_cut_off(collector: Collector) -> Collector:
    """Episodes that the time limit cut off are real, but do not train (DAPO, section 3.4, overlong filtering)."""
    return collector._replace(collect=partial(_collect_without_cut_off, collector.collect))


def column_keys(key: Key, num_columns: int, group_size: int = 1, *, each: tuple[int, ...] = ()) -> Array:
    """Keys `[B, *each]` for every column of this device, the same for all columns of a group.

    All in one call, by their number: random-number code is a large part of what there is to compile.
    """
    columns = parallel.shard_index() * num_columns + jnp.arange(num_columns)
    per_column = math.prod(each)
    numbers = (columns // group_size * per_column)[:, None] + jnp.arange(per_column)[None]
    return jax.vmap(partial(jax.random.fold_in, key))(numbers.ravel()).reshape(num_columns, *each)


def _begin(env: Env, policy: Policy, params: Tree, key: Key) -> Runner:
    env_state, obs = env.reset(key)
    memory = policy.start(params, env.first_sight(env_state, obs))
    return Runner(env_state, obs, memory)


def _begin_all(env: Env, policy: Policy, params: Tree, key: Key, *, num_envs: int) -> Runner:
    if env.context or env.outcome:
        raise UserError(f"{env.name} is judged by whole episodes. Collect whole episodes: num_steps = none.")
    runner = jax.vmap(partial(_begin, env, policy, params))(column_keys(key, num_envs))
    return runner._replace(episode_return=jnp.zeros(num_envs), episode_length=jnp.zeros(num_envs, jnp.int32))


def _begin_none(env: Env, policy: Policy, params: Tree, key: Key) -> tuple[()]:
    """Episodic rollouts start afresh every time."""
    return ()


def action_noise(policy: Policy, params: Tree, runner: Runner, keys: Array) -> Tree:
    """The random numbers of all actions, from their keys `[T, B]`: one call outside the scan instead of T within it."""
    one = jax.tree.map(lambda x: x[0], (runner.memory, runner.obs))
    distribution, _ = jax.eval_shape(partial(policy.act, params), *one)
    return jax.vmap(jax.vmap(distribution.noise))(keys)


def _advance(
    env: Env, policy: Policy, params: Tree, runner: Runner, noise: Tree, step_key: Key
) -> tuple[Runner, Transition]:
    """One step of one environment, without a reset."""
    distribution, memory = policy.act(params, runner.memory, runner.obs)
    action = distribution.at(noise)
    env_state, timestep = env.step(step_key, runner.env_state, action)
    transition = Transition(
        obs=runner.obs,
        action=action,
        log_prob=distribution.log_prob(action),
        reward=timestep.reward,
        discount=timestep.discount,
        last=timestep.last,
        mask=jnp.ones_like(timestep.reward),
    )
    return Runner(env_state, timestep.obs, memory), transition


def select(condition: Array, on_true: Tree, on_false: Tree) -> Tree:
    """`jnp.where` of every leaf."""
    return jax.tree.map(partial(jnp.where, condition), on_true, on_false)


@custom_vmap
def anyone(waiting: Array) -> Array:
    """Whether any is true; under `vmap` whether any is true in any of the runs side by side.

    As the condition of a while loop it stays one number then. A condition per run would make the loop select, in every
    iteration, between the old and the new of all that it carries.
    """
    return waiting.any()


@anyone.def_vmap
def _(axis_size: int, in_batched: list[bool], waiting: Array) -> tuple[Array, bool]:
    return anyone(waiting), False


def _total(tally: Tally) -> Tally:
    return parallel.psum(jax.tree.map(jnp.sum, tally))


def _collect_segment(
    env: Env, policy: Policy, params: Tree, runner: Runner, key: Key, *, num_steps: int, start_pool: int
) -> tuple[Runner, Rollout, Tally]:
    num_columns = runner.episode_length.shape[0]
    before = jax.tree.map(parallel.columns, runner)
    slots = 1 + -(-(num_steps - 1) // env.earliest_cut)
    begin = partial(_begin, env, policy, params)

    def start(key: Key, pool: Tree, episodes: Array) -> Runner:
        return jax.tree.map(lambda x: x[episodes % start_pool], pool) if start_pool else begin(key)

    def step(carry: tuple[Runner, Array, Tree, Array], inputs: tuple[Array, Tree, Array]) -> tuple[tuple, Transition]:
        runner, episodes, endings, used = carry
        t, noise, keys = inputs
        moved, transition = jax.vmap(partial(_advance, env, policy, params))(runner, noise, keys[:, 0])
        last, broken = transition.last, _timed_out(transition) | (t == num_steps - 1)

        def restarted(moved: Runner) -> Runner:
            return jax.vmap(select)(last, jax.vmap(start)(keys[:, -1], pool, episodes), moved)

        endings = _where_any(broken, partial(_keep_endings, seen=moved.obs, broken=broken, used=used), endings)
        return (_where_any(last, restarted, moved), episodes + last, endings, used + broken), transition

    pool: Tree = ()
    if start_pool:
        key, pool_key = jax.random.split(key)
        pool = jax.vmap(jax.vmap(begin))(column_keys(pool_key, num_columns, each=(start_pool,)))
    keys = column_keys(key, num_columns, each=(num_steps, 2 if start_pool else 3)).swapaxes(0, 1)
    endings = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), before.obs)
    none = jnp.zeros(num_columns, jnp.int32)
    carry = (before._replace(episode_return=(), episode_length=()), none, endings, none)
    noise = action_noise(policy, params, before, keys[..., 0])
    (after, _, endings, _), steps = lax.scan(step, carry, (jnp.arange(num_steps), noise, keys[..., 1:]))
    steps = steps._replace(mask=jnp.ones_like(steps.reward))  # as they are; but nothing is stored at every step for it
    episode_return, episode_length, tally = _reckoned(before, steps)
    after = after._replace(episode_return=episode_return, episode_length=episode_length)
    return after, Rollout(steps, before.memory, trains=steps.mask, endings=endings), _total(tally)


def _reckoned(before: Runner, steps: Transition) -> tuple[Array, Array, Tally]:
    """Return and length of the episodes under way behind a segment, and the tally of those that ended within it.

    What was under way before the segment and what came within it belongs to the ended ones, but for what came behind
    the last end.
    """
    t = jnp.arange(steps.last.shape[0])[:, None]
    last_end = jnp.where(steps.last, t, -1).max(0)
    ended, under_way = last_end >= 0, t > last_end[None]
    returns, lengths = before.episode_return + steps.reward.sum(0), before.episode_length + len(steps.last)
    new_return, new_length = (steps.reward * under_way).sum(0), under_way.sum(0, dtype=jnp.int32)
    tally = Tally(
        steps=steps.mask.sum(0),
        episodes=steps.last.sum(0, dtype=jnp.float32),
        return_sum=ended * (returns - new_return),
        length_sum=(ended * (lengths - new_length)).astype(jnp.float32),
    )
    return jnp.where(ended, new_return, returns), jnp.where(ended, new_length, lengths), tally


def _timed_out(steps: Transition) -> Array:
    return steps.last & (steps.discount > 0)


def breaks(steps: Transition) -> Array:
    """[T, B], where a column breaks off: at a time-out, and at the end of the segment.

    Everywhere else the successor of an observation is the one below it, or the episode has terminated.
    """
    return _timed_out(steps).at[-1].set(True)


def break_steps(steps: Transition, number: int) -> Array:
    """[number, B], the step at which each column breaks off for the k-th time; 0 where it does not."""
    broken = breaks(steps)
    nth = jnp.where(broken, jnp.cumsum(broken, 0) - 1, number)
    t, columns = jnp.indices(broken.shape)
    return jnp.zeros((number, broken.shape[1]), jnp.int32).at[nth, columns].set(t, mode="drop")


def _where_any(condition: Array, change: Callable[[Tree], Tree], unchanged: Tree) -> Tree:
    """`change(unchanged)`, which may be left out where no `condition` is true, since it then changes nothing.

    On a CPU it is; deciding costs an accelerator more than doing it.
    """
    if jax.default_backend() != "cpu":
        return change(unchanged)
    return lax.cond(anyone(condition), change, lambda unchanged: unchanged, unchanged)


def _keep_endings(endings: Tree, *, seen: Tree, broken: Array, used: Array) -> Tree:
    """Put what was `seen`, `[B, ...]`, into the next free slot of the columns that are `broken`."""
    slot = jnp.where(broken, used, jax.tree.leaves(endings)[0].shape[0])
    columns = jnp.arange(broken.shape[0])
    return jax.tree.map(lambda kept, x: kept.at[slot, columns].set(x, mode="drop"), endings, seen)


def _collect_episodes(
    env: Env, policy: Policy, params: Tree, runner: tuple[()], key: Key, *, num_envs: int, group_size: int
) -> tuple[tuple[()], Rollout, Tally]:
    num_columns = num_envs // parallel.num_shards()
    if num_columns % group_size:
        raise UserError(
            f"{num_columns} episodes per device do not divide into groups of {group_size}: make the number of "
            "environments a multiple of the group size on every device."
        )
    start_key, step_key = jax.random.split(key)
    start = jax.vmap(partial(_begin, env, policy, params))(column_keys(start_key, num_columns, group_size))
    start = jax.tree.map(parallel.columns, start)
    keys = column_keys(step_key, num_columns, each=(env.time_limit, 2)).swapaxes(0, 1)

    noise = action_noise(policy, params, start, keys[..., 0])

    def column(runner: Runner, over: Array, noise: Tree, key: Key) -> tuple[Runner, Array, Transition]:
        moved, transition = _advance(env, policy, params, runner, noise, key)
        halted = select(over, runner._replace(memory=()), moved._replace(memory=()))
        # What is remembered behind the end is never read, and selecting it would copy it: a KV cache, at every token.
        return (
            halted._replace(memory=moved.memory),
            over | transition.last,
            select(over, _padding(transition), transition),
        )

    def unfinished(carry: tuple[Array, Runner, Array, Transition]) -> Array:
        t, _, over, _ = carry
        return (t < env.time_limit) & anyone(~over)

    def step(carry: tuple[Array, Runner, Array, Transition]) -> tuple[Array, Runner, Array, Transition]:
        t, runner, over, steps = carry
        now = jax.tree.map(lambda x: x[t], (noise, keys[..., 1]))
        runner, over, transition = jax.vmap(column)(runner, over, *now)
        return t + 1, runner, over, jax.tree.map(lambda all_, one: all_.at[t].set(one), steps, transition)

    over = jnp.zeros(num_columns, bool)
    one = jax.eval_shape(jax.vmap(column), start, over, *jax.tree.map(lambda x: x[0], (noise, keys[..., 1])))[-1]
    blank = _padding(jax.tree.map(lambda x: jnp.zeros((env.time_limit, *x.shape), x.dtype), one))
    t = jnp.zeros((), jnp.int32)
    _, after, over, steps = lax.while_loop(unfinished, step, (t, start, over, blank))
    rollout = Rollout(
        steps,
        memory=() if policy.rereads else start.memory,
        trains=steps.mask,
        context=jax.vmap(env.context)(start.env_state) if env.context else (),
        endings=jax.tree.map(lambda x: x[None], after.obs),
    )
    length = steps.mask.sum(0)
    if env.outcome:
        outcome = jax.vmap(env.outcome)(after.env_state)
        at_end = steps.reward.at[length.astype(jnp.int32) - 1, jnp.arange(num_columns)].add(outcome.reward)
        rollout = rollout._replace(steps=steps._replace(reward=at_end), outcome=outcome, length=length)
    ended = over.astype(jnp.float32)
    tally = Tally(length, ended, ended * (rollout.steps.reward * steps.mask).sum(0), ended * length)
    return (), rollout, _total(tally)


def _padding(steps: Transition) -> Transition:
    """What stands in place of steps behind the end of an episode."""
    return steps._replace(
        reward=jnp.zeros_like(steps.reward),
        discount=jnp.zeros_like(steps.discount),
        last=jnp.ones_like(steps.last),
        mask=jnp.zeros_like(steps.mask),
    )


def _collect_without_cut_off(
    collect: Callable[..., tuple[Tree, Rollout, Tally]], *arguments: Any
) -> tuple[Tree, Rollout, Tally]:
    runner, rollout, tally = collect(*arguments)
    return runner, rollout._replace(trains=rollout.trains * ~cut_off(rollout.steps)[None]), tally


def cut_off(steps: Transition) -> Array:
    """[B], whether the time limit ended the episode of a column, rather than a termination."""
    return (_timed_out(steps) & (steps.mask > 0)).any(0)


def mean_parts(outcome: Outcome | tuple[()]) -> Metrics:
    """The means over episodes, on all devices, of the parts of their outcome; nothing where there is none."""
    parts = outcome.parts if isinstance(outcome, Outcome) else {}
    return {name: parallel.mean(part.astype(jnp.float32)) for name, part in parts.items()}
