"""Environments of a user's own that break the contract, each in one way; `good` breaks nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.types import Array, Box, Discrete, Env, Key, Outcome, StepRewards, TimeStep

Change = Callable[[TimeStep, Array], TimeStep]


class State(NamedTuple):
    """The time [] int32 of an episode, and a number [] float32."""

    time: Array
    x: Array


def line(
    *,
    at_reset: Callable[[State, Array], Any] = lambda state, obs: (state, obs),
    at_step: Callable[[State, TimeStep], Any] = lambda state, timestep: (state, timestep),
    time_limit: Any = 50,
    **fields: Any,
) -> Env:
    """A walk on a line; `at_reset` and `at_step` change what is returned, `fields` the record."""

    def obs(state: State) -> Array:
        return jnp.stack([state.x, state.time.astype(jnp.float32)])

    def reset(key: Key) -> Any:
        state = State(jnp.zeros((), jnp.int32), jax.random.uniform(key))
        return at_reset(state, obs(state))

    def step(key: Key, state: State, action: Array) -> Any:
        state = State(state.time + 1, state.x + 0.1 * (action - 0.5))
        end = state.time >= 50
        return at_step(state, TimeStep(obs(state), state.x, jnp.ones(()), end))

    space = Box(np.full(2, -np.inf, np.float32), np.full(2, np.inf, np.float32))
    return Env("line", reset, step, space, Discrete(2), time_limit)._replace(**fields)


def good() -> Env:
    return line()


def returned(**changes: Callable[[State], Any]) -> Callable[[], Env]:
    """A factory whose `step` returns other fields of the TimeStep, as functions of the state."""

    def change(state: State, timestep: TimeStep) -> tuple[State, TimeStep]:
        return state, timestep._replace(**{name: value(state) for name, value in changes.items()})

    return lambda: line(at_step=change)


def at(step: int, value: float, otherwise: float) -> Callable[[State], Array]:
    """`value` at one step of each episode."""
    return lambda state: jnp.where(state.time == step, value, otherwise)


def fields(**changes: Any) -> Callable[[], Env]:
    return lambda: line(**changes)


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*arguments: Any) -> Any:
        raise error

    return function


def exits() -> Env:
    sys.exit(3)


def branching() -> Env:
    """A loop of Python over an array."""

    def change(state: State, timestep: TimeStep) -> tuple[State, TimeStep]:
        while state.x < 0:
            state = state._replace(x=state.x + 1)
        return state, timestep

    return line(at_step=change)


def growing() -> Env:
    """A list of Python that grows whenever `step` is traced."""
    seen: list[Array] = []

    def change(state: State, timestep: TimeStep) -> tuple[State, TimeStep]:
        seen.append(jnp.zeros(()))
        return state, timestep._replace(obs=jnp.zeros(1 + len(seen)))

    return line(at_step=change)


def leaking() -> Env:
    """What `reset` drew is kept in Python, and read by `step`."""
    kept: list[Array] = []

    def keep(state: State, obs: Array) -> tuple[State, Array]:
        kept.append(state.x)
        return state, obs

    def use(state: State, timestep: TimeStep) -> tuple[State, TimeStep]:
        return state, timestep._replace(reward=kept[0] + state.x)

    return line(at_reset=keep, at_step=use)


wide = Box(np.zeros(3, np.float32), np.ones(3, np.float32))
BAD: dict[str, tuple[Callable[..., Any], str]] = {
    # the factory
    "factory raises": (
        raising(ValueError("no such map")),
        r"cannot be made: .* ValueError: no such map \(bad_env.*py, ",
    ),
    "factory exits": (exits, r"cannot be made: .* SystemExit: 3"),
    "factory returns nothing": (lambda: None, r"must return a jaxpg\.types\.Env, not None"),
    "factory returns a tuple": (lambda: tuple(line()), r"must return a jaxpg\.types\.Env, not \('line', "),
    "factory returns a function": (lambda: line, r"must return a jaxpg\.types\.Env"),
    # the record
    "no reset": (fields(reset=None), "reset must be a function, not None"),
    "step is no function": (fields(step=3), "step must be a function, not 3"),
    "outcome is no function": (fields(outcome=1.0), r"outcome must be a function, not 1\.0"),
    "no time limit": (fields(time_limit=None), "time_limit is the longest episode in steps, an int .*, not None"),
    "time limit 0": (fields(time_limit=0), "time_limit .* not 0"),
    "time limit -5": (fields(time_limit=-5), "time_limit .* not -5"),
    "time limit 1.5": (fields(time_limit=1.5), r"time_limit .* not 1\.5"),
    "time limit true": (fields(time_limit=True), "time_limit .* not True"),
    "time limit 10^12": (fields(time_limit=10**12), "time_limit .* not 1000000000000"),
    "time limit an array": (fields(time_limit=jnp.int32(5)), "time_limit .* not Array"),
    "min_truncation_step 0": (fields(min_truncation_step=0), "min_truncation_step .* not 0"),
    "space a number": (fields(action_space=2), r"action_space must be a jaxpg\.types\.Box or Discrete, not 2"),
    "space of no action": (fields(action_space=Discrete(0)), r"action_space is Discrete\(n\) .* not 0"),
    "space of half an action": (fields(action_space=Discrete(1.5)), r"action_space is Discrete\(n\) .* not 1\.5"),
    "bounds are lists": (fields(observation_space=Box([0], [1])), "observation_space is a Box of two arrays"),
    "bounds of two shapes": (
        fields(observation_space=Box(np.zeros(2), np.ones(3))),
        r"observation_space: low and high differ in shape",
    ),
    "bounds crossed": (fields(action_space=Box(np.ones(2), np.zeros(2))), "action_space: low must be at most high"),
    "bounds crossed in one place": (
        fields(observation_space=Box(np.array([0.0, 1.0]), np.array([1.0, 0.0]))),
        "observation_space: low must be at most high",
    ),
    "bounds NaN": (fields(action_space=Box(np.full(2, np.nan), np.ones(2))), "action_space: low must be .* NaN"),
    "mask of one observation": (
        fields(action_mask=lambda obs: obs[:2] > -1),
        r"action_mask of .* with the axes \(5,\) must return bool\[5, 2\], not bool\[2, 2\]",
    ),
    # reset
    "reset raises": (lambda: line(at_reset=raising(KeyError("x"))), r"The reset of .* raised KeyError: 'x' \(bad_en"),
    "reset exits": (lambda: line(at_reset=raising(SystemExit(1))), "The reset of .* raised SystemExit"),
    "reset takes nothing": (fields(reset=lambda: None), "The reset of .* raised TypeError"),
    "reset returns obs only": (lambda: line(at_reset=lambda s, o: o), "reset of .* must return a state and an obs"),
    "reset returns text": (lambda: line(at_reset=lambda s, o: ("a", o)), "reset of .* must return arrays, not 'a'"),
    "obs of another shape": (fields(observation_space=wide), r"reset of .* fits .* float32\[3\], not float32\[2\]"),
    "obs of integers": (
        lambda: line(at_reset=lambda s, o: (s, o.astype(int))),
        r"reset of .* float32\[2\], not int32\[2\]",
    ),
    "obs is a pair": (lambda: line(at_reset=lambda s, o: (s, (o, o))), r"reset of .* not \(float32\[2\], float32"),
    # step
    "step raises": (lambda: line(at_step=raising(ZeroDivisionError())), "The step of .* raised ZeroDivisionError"),
    "step loops in Python": (branching, r"The step of .* raised Tracer\w*Error: .* \(bad_environments.py, line"),
    "step returns a plain tuple": (
        lambda: line(at_step=lambda s, t: (s, tuple(t))),
        r"step of .* a jaxpg\.types\.TimeStep, not \(State",
    ),
    "step returns gym's five": (lambda: line(at_step=lambda s, t: (s, *t)), r"step of .* a jaxpg\.types\.TimeStep"),
    "step keeps what reset drew": (leaking, "raised UnexpectedTracerError"),
    "step grows when traced": (growing, r"step of .* float32\[2\], not float32\[3\]"),
    "state grows": (
        lambda: line(at_step=lambda s, t: (s._replace(x=jnp.stack([s.x, s.x])), t)),
        r"state\.x is float32\[\] after reset and float32\[2\] after step",
    ),
    "state changes dtype": (
        lambda: line(at_step=lambda s, t: (s._replace(time=s.time * 1.0), t)),
        r"state\.time is int32\[\] after reset and float32\[\] after step",
    ),
    "state changes structure": (
        lambda: line(at_step=lambda s, t: ((s, s), t)),
        "state of .* has another structure after step",
    ),
    "obs changes shape": (returned(obs=lambda s: jnp.zeros(5)), r"step of .* obs .* float32\[2\], not float32\[5\]"),
    "reward of shape 1": (returned(reward=lambda s: jnp.ones(1)), r"reward .* scalar, float32\[\], not float32\[1\]"),
    "reward an integer": (returned(reward=lambda s: jnp.int32(1)), r"reward .* float32\[\], not int32\[\]"),
    "reward nothing": (returned(reward=lambda s: None), r"reward .* float32\[\], not None"),
    "discount bool": (returned(discount=lambda s: s.x > 0), r"discount .* float32\[\], not bool\[\]"),
    "last a float": (returned(last=lambda s: jnp.zeros(())), r"last .* bool\[\], not float32\[\]"),
    "last of shape 2": (returned(last=lambda s: jnp.zeros(2, bool)), r"last .* bool\[\], not bool\[2\]"),
    "outcome a number": (fields(outcome=lambda s: s.x), r"outcome of .* must return a jaxpg\.types\.Outcome"),
    "outcome of shape 2": (fields(outcome=lambda s: Outcome(jnp.ones(2), {})), "Outcome with a scalar reward"),
    "rewards of too few steps": (
        fields(outcome=lambda s: Outcome(jnp.ones(()), {}, (), StepRewards(jnp.ones(2), jnp.ones(2)))),
        "must be a jaxpg.types.StepRewards with time_limit = ",
    ),
    # numbers
    "reward NaN": (returned(reward=at(3, jnp.nan, 0.0)), "the reward at step 3 .* must be finite, not nan"),
    "reward infinite": (returned(reward=at(3, -jnp.inf, 0.0)), "the reward at step 3 .* not -inf"),
    "obs NaN at reset": (lambda: line(at_reset=lambda s, o: (s, o * jnp.nan)), r"the obs at reset .* not array\(\[nan"),
    "obs NaN at step 37": (returned(obs=lambda s: jnp.full(2, at(37, jnp.nan, 0.0)(s))), "the obs at step 37 of"),
    "discount 2": (returned(discount=lambda s: jnp.full((), 2.0)), r"discount at step 1 .* 0 .* to 1, not 2\.0"),
    "discount -1": (returned(discount=at(7, -1.0, 1.0)), r"discount at step 7 .* not -1\.0"),
    "discount NaN": (returned(discount=at(7, jnp.nan, 1.0)), "discount at step 7 .* not nan"),
    "terminated without last": (returned(discount=at(7, 0.0, 1.0)), "step 7 .* is 0, .* but `last` is false"),
    "time-out a step too early": (
        lambda: line(at_step=lambda s, t: (s, t._replace(last=s.time >= 49)), min_truncation_step=50),
        r"a time-out .* at step 49 .* before min_truncation_step = 50",
    ),
    "never ends": (returned(last=lambda s: jnp.zeros((), bool)), "no `last` at step 50 .* time_limit = 50"),
}
"""Factory, and what the sentence has to say."""
