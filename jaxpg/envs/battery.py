"""The battery of `jaxpg check`: what `check_env` refuses, and what many episodes of random actions show beyond that.

`check_env` takes a third of a second and runs whenever an environment of a user is made. The battery compiles three
more programs and plays up to 64,000 steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpg.envs.contract import CONTRACT, TRIAL_STEPS, random_action
from jaxpg.errors import UserError
from jaxpg.parallel import host_callback
from jaxpg.types import Array, Box, Env, Key, TimeStep, Tree, space_leaves
from jaxpg.user_input.domains import LARGEST_REWARD
from jaxpg.user_input.user_code import explain_failure

COLUMNS = 64
"""Episodes side by side."""
WALK_STEPS = 50
"""Steps of a walk, by which speed is measured; it goes on after the end of an episode."""
AGREEING_STEPS = 8
"""Steps over which one environment alone and one among others must agree; the rounding of chaotic ones drifts later."""
_ROUNDING = 1e-3
_MOST = 0.9
"""Of many resets, some lie outside of the box that holds others, where their numbers are many and normal."""


class Finding(NamedTuple):
    """One line of the battery.

    passed: whether what was looked at is as it should be; None where it may be a mistake, and may be right.
    sentence: what was looked at, and what was seen.
    """

    passed: bool | None
    sentence: str


class _Episode(NamedTuple):
    """An episode of random actions as far as it has come; of many, leaves `[COLUMNS, ...]`.

    state_before, obs_before: the state and the observation before the last step.
    low, high: the least and the greatest of all observations so far.
    always_allowed: whether an action was allowed wherever one was taken.
    finite: whether all observations and rewards were.
    largest_reward: in magnitude.
    """

    t: Array
    state: Tree
    timestep: TimeStep
    state_before: Tree
    obs_before: Tree
    low: Tree
    high: Tree
    always_allowed: Array
    finite: Array
    largest_reward: Array


def battery(env: Any, name: str) -> Iterator[Finding]:
    """Findings about an environment, one after the other; those of the contract end it where one has not passed.

    Args:
        env: what the user's function returned.
        name: of the environment, for the sentences.
    """
    for title, check in CONTRACT:
        try:
            check(env, name)
        except UserError as error:
            yield Finding(False, str(error))
            return
        yield Finding(True, title)
    try:
        yield from _experience(env, name)
    except UserError as error:  # the environment raised on the host, where nothing surfaces by itself
        yield Finding(False, str(error))


def _experience(env: Env, name: str) -> Iterator[Finding]:
    """What many episodes and a walk show.

    Raises:
        UserError: a function of the environment raised.
    """
    with explain_failure(f"An episode of {name}"):
        keys = jax.random.split(jax.random.key(0), COLUMNS)
        first, end = jax.device_get(jax.jit(jax.vmap(partial(_play, env)))(keys))
        host_callback.raise_failure()
    yield _finite(end)
    yield _bounds(env, end)
    yield _ends(env, end)
    yield _successors(first, end)
    yield _discounts(env, end)
    yield _truncations(env, end)
    if env.action_mask is not None:
        yield _masks(end)
    with explain_failure(f"A walk of {name}"):
        if env.host is not None:
            yield _forgets(env, keys[0])
        yield from _walks(env, keys)


def _play(env: Env, key: Key) -> tuple[tuple[Tree, Tree], _Episode]:
    """One episode of random actions, cut off after TRIAL_STEPS: state and observation that it begins with, its end."""

    def step(episode: _Episode) -> _Episode:
        obs = episode.timestep.obs
        step_key, action_key = jax.random.split(jax.random.fold_in(key, episode.t))
        state, timestep = env.step(step_key, episode.state, random_action(env, action_key, obs))
        allowed = True if env.action_mask is None else env.action_mask(obs).any()
        return _Episode(
            t=episode.t + 1,
            state=state,
            timestep=jax.tree.map(jnp.asarray, timestep),
            state_before=episode.state,
            obs_before=obs,
            low=jax.tree.map(jnp.minimum, episode.low, timestep.obs),
            high=jax.tree.map(jnp.maximum, episode.high, timestep.obs),
            always_allowed=episode.always_allowed & allowed,
            finite=episode.finite & _all_finite((timestep.obs, timestep.reward)),
            largest_reward=jnp.maximum(episode.largest_reward, jnp.abs(timestep.reward)),
        )

    def unfinished(episode: _Episode) -> Array:
        return ~episode.timestep.last & (episode.t < min(env.time_limit, TRIAL_STEPS))

    state, obs = env.reset(key)
    begin = TimeStep(obs, jnp.zeros(()), jnp.ones(()), jnp.zeros((), bool))
    start = _Episode(
        jnp.zeros((), jnp.int32), state, begin, state, obs, obs, obs,
        always_allowed=jnp.ones((), bool), finite=jnp.ones((), bool), largest_reward=jnp.zeros(()),
    )  # fmt: skip
    return (state, obs), lax.while_loop(unfinished, step, start)


def _all_finite(tree: Tree) -> Array:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def _finite(end: _Episode) -> Finding:
    wrong = int((~end.finite).sum())
    if wrong:
        return Finding(False, f"observations and rewards must be finite, and are not in {wrong} of {COLUMNS} episodes")
    if (largest := float(end.largest_reward.max())) > LARGEST_REWARD:
        return Finding(
            False,
            f"a reward has the magnitude {largest:g}, and sums of its square are not finite in float32: divide rewards "
            f"until none is beyond {LARGEST_REWARD:g}",
        )
    return Finding(True, f"observations and rewards are finite in {COLUMNS} episodes of random actions")


def _bounds(env: Env, end: _Episode) -> Finding:
    extremes = zip(*(map(np.asarray, jax.tree.leaves(x)) for x in (end.low, end.high)), strict=True)
    for (path, space), (lowest, highest) in zip(space_leaves(env.observation_space), extremes, strict=True):
        low, high = (np.asarray(x, np.float64) for x in (space if isinstance(space, Box) else (0, space.n - 1)))
        lowest, highest = lowest.min(0), highest.max(0)
        margin = _ROUNDING * np.maximum(1, np.abs(highest - lowest))
        outside = (lowest < low - margin) | (highest > high + margin)
        if outside.any():
            place = tuple(np.argwhere(outside)[0].tolist())
            seen, stated = ([float(np.broadcast_to(x, outside.shape)[place]) for x in pair] for pair in
                            ((lowest, highest), (low, high)))  # fmt: skip
            return Finding(
                False,
                f"obs{path}{list(place)} went from {seen[0]:g} to {seen[1]:g}, and the observation_space says "
                f"{stated[0]:g} to {stated[1]:g}: widen it, or make it infinite",
            )
    return Finding(True, "observations stay within the bounds of the observation_space")


def _ends(env: Env, end: _Episode) -> Finding:
    longest, ended = int(end.t.max()), end.timestep.last
    if not ended.all() and env.time_limit <= TRIAL_STEPS:
        return Finding(False, f"{(~ended).sum()} of {COLUMNS} episodes had no `last` at time_limit = {env.time_limit}")
    if not ended.all():
        return Finding(True, f"no episode passes time_limit = {env.time_limit:,} in the {TRIAL_STEPS:,} steps played")
    reached = "it was reached" if longest == env.time_limit else f"the longest took {longest:,} steps"
    return Finding(True, f"every episode ends by time_limit = {env.time_limit:,}; {reached}")


def _masks(end: _Episode) -> Finding:
    empty = int((~end.always_allowed).sum())
    if empty:
        return Finding(False, f"the action_mask allowed no action somewhere in {empty} of {COLUMNS} episodes")
    return Finding(True, "the action_mask allows an action wherever one is taken")


def _successors(first: tuple[Tree, Tree], end: _Episode) -> Finding:
    """Whether an episode jumps back to where episodes begin with its last step, as where an environment resets itself.

    It does where state and observation lie inside of the box that holds those of all resets, and did not one step
    before. Since episodes end by the time limit, a state counts its steps in one way or another, and comes back into
    the box by a reset alone. An observation may be the same at the beginning and at the end of a task that shows little
    of its state, so it is no mistake for certain where it is the observation alone. Time-outs and terminations are
    looked at one by one: many environments reset themselves at one of the two.
    """
    last, before = (end.state, end.timestep.obs), (end.state_before, end.obs_before)
    jumps = _looks_like(first, last) & ~_looks_like(first, before)
    ended = end.timestep.last & (end.t > 1)
    terminated = end.timestep.discount == 0
    kinds = {"termination": ended & terminated, "time-out": ended & ~terminated}
    for kind, of_kind in kinds.items():
        if of_kind.any() and jumps[of_kind].mean() >= _MOST:
            return Finding(
                False,
                f"at a {kind} the last obs looks like that of a reset, and so does the state: step must return the "
                "true successor, also at a time-out, and not reset",
            )
    if ended.any() and (_looks_like(first[1], last[1]) & ~_looks_like(first[1], before[1]))[ended].all():
        return Finding(
            None,
            "the last obs of every episode looks like that of a reset: right only if the task itself shows that there; "
            "step must return the true successor",
        )
    seen = " and ".join(f"{of_kind.sum()} {kind}s" for kind, of_kind in kinds.items())
    return Finding(True, f"the last obs shows no sign of a reset at {seen}")


def _looks_like(first: Tree, tree: Tree) -> np.ndarray:
    """[COLUMNS], where the numbers of `tree` lie in the box, half as wide again, that holds all those of `first`."""
    inside = np.ones(COLUMNS, bool)
    for begin, x in zip(jax.tree.leaves(first), jax.tree.leaves(tree), strict=True):
        if not jnp.issubdtype(begin.dtype, jax.dtypes.prng_key):
            begin, x = begin.astype(np.float64), x.astype(np.float64)
            quarter = (begin.max(0) - begin.min(0)) / 4
            within = (x >= begin.min(0) - quarter) & (x <= begin.max(0) + quarter)
            inside &= within.reshape(COLUMNS, -1).all(1)
    return inside


def _discounts(env: Env, end: _Episode) -> Finding:
    """Whether time-outs are taken for terminations: 0 wherever the limit is reached, while others end before it.

    A task may be over at its limit, as one of a fixed length is, and nothing is wrong there.
    """
    at_limit, terminated = end.t == env.time_limit, end.timestep.last & (end.timestep.discount == 0)
    at_limit &= end.timestep.last
    if at_limit.any() and terminated[at_limit].all() and not at_limit.all():
        return Finding(
            None,
            f"the discount is 0 in all {at_limit.sum()} episodes that reached time_limit = {env.time_limit}: right "
            "only if the task itself is over then; a time-out is no termination, and its discount is 1",
        )
    if at_limit.all() and terminated.all():
        return Finding(
            True,
            f"all episodes terminate at time_limit = {env.time_limit:,}: right only if the task itself is over then; a "
            "time-out has discount 1",
        )
    timed_out = int((end.timestep.last & ~terminated).sum())
    return Finding(True, f"discount 0 comes with terminations: {terminated.sum()} of them, and {timed_out} time-outs")


def _truncations(env: Env, end: _Episode) -> Finding:
    early = end.timestep.last & (end.timestep.discount > 0) & (end.t < env.min_truncation_step)
    if early.any():
        return Finding(
            False,
            f"a time-out came after {end.t[early].min()} steps, before min_truncation_step = "
            f"{env.min_truncation_step}: its true successor would be lost; make it smaller",
        )
    return Finding(True, f"no time-out comes before min_truncation_step = {env.min_truncation_step:,}")


def _forgets(env: Env, key: Key) -> Finding:
    """Whether one instance on the host, begun twice with one seed, does the same: an episode leaves nothing behind."""
    assert env.host is not None
    restart = env.host.restart

    def again(key: Key, state: Tree) -> tuple[Tree, tuple[Tree, TimeStep]]:
        state, obs = restart(key, jnp.ones((), bool), state)
        state, timesteps = _walk(env, key, state, obs)
        return state, (obs, timesteps)

    def twice(key: Key) -> tuple[Tree, Tree]:
        state, first = again(key, env.reset(key)[0])
        return first, again(key, state)[1]

    first, second = jax.device_get(jax.jit(twice)(key))
    host_callback.raise_failure()
    if all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)):
        return Finding(True, "an episode repeats itself in an environment that has played another before")
    return Finding(
        False,
        "the same seed and actions gave another episode in an environment that had played one before: reset must "
        "forget what was, and draw from its seed alone",
    )


def _walk(env: Env, key: Key, state: Tree, obs: Tree) -> tuple[Tree, TimeStep]:
    """WALK_STEPS steps of random actions, leaves `[WALK_STEPS, ...]`, and the state after them."""

    def step(carry: tuple[Tree, Tree], t: Array) -> tuple[tuple[Tree, Tree], TimeStep]:
        step_key, action_key = jax.random.split(jax.random.fold_in(key, t))
        state, timestep = env.step(step_key, carry[0], random_action(env, action_key, carry[1]))
        return (state, timestep.obs), timestep

    (state, _), timesteps = lax.scan(step, (state, obs), jnp.arange(WALK_STEPS))
    return state, timesteps


def _walks(env: Env, keys: Array) -> Iterator[Finding]:
    """Determinism in the key, vmap, and speed: one environment alone and COLUMNS of them, over WALK_STEPS steps."""

    def walk(key: Key) -> TimeStep:
        return _walk(env, key, *env.reset(key))[1]

    alone, together = jax.jit(walk), jax.jit(jax.vmap(walk))
    one = jax.device_get(alone(keys[0]))
    again = [jax.device_get(program(keys[0])) for program in (alone, jax.jit(lambda key: walk(key)))]
    host_callback.raise_failure()
    if not all(_same(one, other, 0.0, WALK_STEPS) for other in again):
        yield Finding(False, "the same key must give the same steps: draw random numbers from the key alone")
        return
    yield Finding(True, "the same key gives the same steps")
    if ((one.discount > 0) & (one.discount < 1)).any():
        yield Finding(
            None,
            f"a discount is {one.discount[one.discount > 0].min():g}: right only if it is "
            "to multiply gamma, which the algorithm has; it is 1 where the episode goes on",
        )
    among = jax.tree.map(lambda x: np.asarray(x)[0], together(keys))
    host_callback.raise_failure()
    yield (
        Finding(True, f"one environment alone and among {COLUMNS} (vmap) take the same steps")
        if _same(one, among, _ROUNDING, AGREEING_STEPS)
        else Finding(False, "one environment takes other steps among others (vmap) than alone")
    )
    rates = WALK_STEPS / _seconds(alone, keys[0]), WALK_STEPS * COLUMNS / _seconds(together, keys)
    host_callback.raise_failure()
    yield Finding(True, f"{rates[0]:,.0f} steps per second alone, {rates[1]:,.0f} with {COLUMNS} side by side")


def _same(a: TimeStep, b: TimeStep, rounding: float, steps: int) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        np.allclose(x[:steps].astype(float), y[:steps].astype(float), rtol=rounding, atol=rounding, equal_nan=True)
        for x, y in pairs
    )


def _seconds(program: Callable[[Array], Any], keys: Array) -> float:
    """The median of three runs of a compiled program."""

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(keys))
        return time.perf_counter() - start

    return float(np.median([run() for _ in range(3)]))
