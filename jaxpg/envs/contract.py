"""The contract of an environment, checked where it enters: shapes and dtypes without computing, then one short episode.

A mistake in an environment would otherwise surface as an exception deep inside of a compiled loop, or not at all. So
`check_env` looks at the fields of its record, at what `reset` and `step` return when traced, and at the numbers of one
episode of random actions. It takes about a third of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr

from jaxpg.envs.text.task import Task
from jaxpg.errors import UserError, excerpt
from jaxpg.models.distributions import MASKED
from jaxpg.parallel import host_callback
from jaxpg.parallel.machine import compiler_options
from jaxpg.types import Array, Box, Discrete, Env, Key, Outcome, Space, TimeStep, Tree, space_leaves, space_struct
from jaxpg.user_input.domains import INT32_MAX
from jaxpg.user_input.user_code import explain_failure

TRIAL_STEPS = 1_000
"""The trial ends with its first episode, or after this many steps."""


class _Trial(NamedTuple):
    """What the loop of the trial carries: steps taken, the environment, its last step, and whether that was sound."""

    t: Array
    state: Tree
    timestep: TimeStep
    sound: Array


def check_env(env: Any, name: str) -> Env:
    """Return `env` if it is an environment as `jaxpg.types.Env` describes it.

    Checked are: time limit and spaces; that `reset` and `step` can be traced, twice; structure, shape and dtype of
    what they return; and for one episode of random actions that all numbers are finite, that 0 <= discount <= 1, that a
    discount of 0 comes with `last`, that a mask allows an action, and that the episode ends by the time limit, by a
    time-out not before `min_truncation_step`.

    Args:
        env: what the user's function returned.
        name: of the environment, for the message.

    Raises:
        UserError: the first point that is not as it should be: which function, what it returned, what is expected.
    """
    for _, check in CONTRACT:
        check(env, name)
    return env


def _check_shapes(env: Env, name: str) -> None:
    """What `reset` and `step` return when traced."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    state, obs = _trace(env.reset, f"reset of {name}", _check_pair, key)
    _check_obs(env, obs, f"reset of {name}")
    _check_mask(env, name)
    action = jax.eval_shape(partial(random_action, env), key, obs)
    for _ in range(2):  # one that changes something in Python would give other shapes the second time
        after, timestep = _trace(env.step, f"step of {name}", _check_timestep, key, state, action)
        _check_same_state(state, after, name)
        _check_obs(env, timestep.obs, f"step of {name}")
        _check_scalars(timestep, name)
    if env.outcome is not None:
        _trace(env.outcome, f"outcome of {name}", partial(_check_outcome, time_limit=env.time_limit), state)
    if env.episode_metrics is not None:
        _trace(env.episode_metrics, f"episode_metrics of {name}", _check_episode_metrics, state)


def _check_fields(env: Any, name: str) -> None:
    if isinstance(env, Task):
        raise UserError(f"{name} returns a text task, which the signature of its function must say: -> Task.")
    if not isinstance(env, Env):
        raise UserError(f"{name} must return a jaxpg.types.Env, not {excerpt(env, 100)}.{of_gymnasium(env)}")
    for field in ("reset", "step", "context", "outcome", "measure", "action_mask", "episode_metrics"):
        function = getattr(env, field)
        if not callable(function) and (function is not None or field in ("reset", "step")):
            raise UserError(f"{name}: {field} must be a function, not {excerpt(function)}.")
    for field, meaning in (("time_limit", "the longest episode"), ("min_truncation_step", "the earliest time-out")):
        steps = getattr(env, field)
        if type(steps) is not int or not 1 <= steps <= INT32_MAX:
            raise UserError(f"{name}: {field} is {meaning} in steps, an int from 1 to 2^31 - 1, not {excerpt(steps)}.")
    spaces = space_leaves(env.observation_space)
    if not spaces:
        raise UserError(f"{name}: observation_space holds no space: make it a jaxpg.types.Box or Discrete.")
    for path, space in spaces:
        _check_space(space, f"{name}: observation_space{path}")
    _check_space(env.action_space, f"{name}: action_space")
    if isinstance(env.action_space, Box) and len(env.action_space.shape) != 1:
        raise UserError(
            f"{name}: actions of a Box have one axis, as in shape (3,), not the shape {env.action_space.shape}: "
            "reshape them in the environment's step."
        )


def of_gymnasium(env: Any) -> str:
    """How an environment of Gymnasium is given, for an error about something that is one."""
    if not hasattr(env, "step") or not hasattr(env, "observation_space"):
        return ""
    return " An environment of Gymnasium is given by its id: gymnasium:ID, or gymnasium:MODULE:ID for one of your own."


def _check_space(space: Any, where: str) -> None:
    if isinstance(space, Discrete):
        if type(space.n) is not int or not 1 <= space.n <= INT32_MAX:
            raise UserError(f"{where} is Discrete(n) with an int n from 1 to 2^31 - 1, not {excerpt(space.n)}.")
    elif isinstance(space, Box):
        if not all(isinstance(x, np.ndarray | jax.Array) and x.dtype.kind in "fiu" for x in space):
            raise UserError(f"{where} is a Box of two arrays of numbers, low and high, not {excerpt(space, 100)}.")
        if not space.low.size:
            raise UserError(f"{where} is a Box of shape {space.low.shape}, which has no numbers: give it one at least.")
        if space.low.shape != space.high.shape:
            raise UserError(f"{where}: low and high differ in shape, {space.low.shape} and {space.high.shape}.")
        if not np.all(np.asarray(space.low) <= np.asarray(space.high)):
            raise UserError(f"{where}: low must be at most high everywhere, and neither may be NaN.")
    else:
        raise UserError(f"{where} must be a jaxpg.types.Box or Discrete, not {excerpt(space, 100)}.")


def _trace(function: Callable[..., Any], what: str, check: Callable[[Any, str], None], *arguments: Any) -> Any:
    """Shapes and dtypes of what a user's function returns; `check` sees the result as Python objects first."""

    def checked(*arguments: Any) -> Any:
        result = function(*arguments)
        check(result, what)
        for path, x in jax.tree_util.tree_flatten_with_path(result)[0]:
            if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float):
                raise UserError(f"The {what} must return arrays, not {excerpt(x)} at {keystr(path)}.")
        return result

    with explain_failure(f"The {what}"):
        return jax.eval_shape(checked, *arguments)


def _check_pair(result: Any, what: str) -> None:
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError(f"The {what} must return a state and an obs, not {_describe(result)}.")


def _check_timestep(result: Any, what: str) -> None:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], TimeStep):
        raise UserError(f"The {what} must return a state and a jaxpg.types.TimeStep, not {_describe(result)}.")


def _check_episode_metrics(result: Any, what: str) -> None:
    if not isinstance(result, Mapping) or any(type(x) is not str or jnp.shape(result[x]) != () for x in result):
        raise UserError(f"The {what} must return a number by each name, in a dictionary, not {_describe(result)}.")


def _check_outcome(result: Any, what: str, *, time_limit: int) -> None:
    if not isinstance(result, Outcome) or jnp.shape(result.reward) != ():
        raise UserError(f"The {what} must return a jaxpg.types.Outcome with a scalar reward, not {_describe(result)}.")
    if result.step_rewards != () and [jnp.shape(x) for x in result.step_rewards] != 2 * [(time_limit,)]:
        raise UserError(
            f"The step_rewards of the {what} must be a jaxpg.types.StepRewards with time_limit = {time_limit} rewards "
            f"and as many ends, not {_describe(result.step_rewards)}."
        )


def _check_obs(env: Env, obs: Any, what: str) -> None:
    """An observation has the structure of its spaces, and its arrays are float32 in a Box, int32 in Discrete."""
    expected = space_struct(env.observation_space)
    structures: list[Any] = [jax.tree.structure(x) for x in (obs, expected)]
    if structures[0] != structures[1] or not jax.tree.all(jax.tree.map(_is_alike, obs, expected)):
        raise UserError(
            f"The {what} must return an obs that fits the observation_space, {_describe(expected)}, not "
            f"{_describe(obs)}."
        )


def _check_mask(env: Env, name: str) -> None:
    """A mask has one boolean for each of the discrete actions."""
    if env.action_mask is None:
        return
    if not isinstance(env.action_space, Discrete):
        raise UserError(f"{name}: an action_mask allows discrete actions, and the action_space is a Box.")
    for axes in ((), (5,), (5, 7)):  # the policy sees one observation, then a batch, then a rollout
        expected = jax.ShapeDtypeStruct((*axes, env.action_space.n), jnp.bool_)
        of = f" of observations with the axes {axes}" if axes else ""
        with explain_failure(f"The action_mask of {name}{of}"):
            mask = jax.eval_shape(env.action_mask, space_struct(env.observation_space, axes))
        if not _is_alike(mask, expected):
            raise UserError(f"The action_mask of {name}{of} must return {_describe(expected)}, not {_describe(mask)}.")


def _check_scalars(timestep: TimeStep, name: str) -> None:
    for field, dtype in (("reward", jnp.float32), ("discount", jnp.float32), ("last", jnp.bool_)):
        expected, value = jax.ShapeDtypeStruct((), dtype), getattr(timestep, field)
        if not _is_alike(value, expected):
            raise UserError(
                f"The step of {name} must return a {field} that is a scalar, {_describe(expected)}, not "
                f"{_describe(value)}."
            )


def _check_same_state(before: Tree, after: Tree, name: str) -> None:
    """The state after a step has the structure, shapes and dtypes of the state after a reset."""
    structures: list[Any] = [jax.tree.structure(x) for x in (before, after)]
    if structures[0] != structures[1]:
        raise UserError(
            f"The state of {name} has another structure after step than after reset: {_describe(after)} and "
            f"{_describe(before)}. A compiled loop needs the same at every step."
        )
    pairs = zip(*(jax.tree_util.tree_flatten_with_path(x)[0] for x in (before, after)), strict=True)
    for (path, x), (_, y) in pairs:
        if not _is_alike(y, x):
            raise UserError(
                f"The state of {name} changes: state{keystr(path)} is {_describe(x)} after reset and {_describe(y)} "
                "after step. A compiled loop needs the same shape and dtype at every step."
            )


def _check_numbers(env: Env, name: str) -> None:
    """Play the trial, and refuse an environment whose numbers make no sense."""
    with explain_failure(f"An episode of {name}"):
        play = jax.jit(partial(_play, env), compiler_options=compiler_options(runs_once=True))
        host_callback.clear_failures()
        trial = jax.device_get(play(jax.random.key(0)))
        host_callback.raise_failure()
    obs, reward, discount, last = trial.timestep
    when = f"at step {trial.t} of an episode of random actions" if trial.t else "at reset"
    if trial.sound and not last and trial.t == env.time_limit:
        raise UserError(f"{name}: no `last` {when}, although time_limit = {env.time_limit}: end the episode there.")
    if trial.sound and last and discount and trial.t < env.min_truncation_step:
        raise UserError(
            f"{name}: a time-out (`last` with a discount above 0) {when}, before min_truncation_step = "
            f"{env.min_truncation_step}: its true successor would be lost. Make it smaller."
        )
    if trial.sound:
        return
    for (path, space), x in zip(space_leaves(env.observation_space), jax.tree.leaves(obs), strict=True):
        if not _in_space(space, x):
            expected = "finite" if isinstance(space, Box) else f"from 0 to {space.n - 1}"
            raise UserError(f"{name}: the obs{path} {when} must be {expected}, not {excerpt(x, 100)}.")
    if not np.isfinite(reward):
        raise UserError(f"{name}: the reward {when} must be finite, not {reward}.")
    if not 0 <= discount <= 1:
        raise UserError(f"{name}: the discount {when} must be from 0 (terminated) to 1, not {discount}.")
    if discount or last:
        raise UserError(f"{name}: the action_mask allows no action {when}, and the episode is not over.")
    raise UserError(f"{name}: the discount {when} is 0, which means terminated, but `last` is false.")


CONTRACT: tuple[tuple[str, Callable[[Any, str], None]], ...] = (
    ("the record has its functions, spaces and limits", _check_fields),
    ("reset and step can be compiled, and return the shapes and dtypes of the spaces", _check_shapes),
    ("an episode of random actions has sound numbers and ends", _check_numbers),
)
"""What `check_env` checks, in order; a later check relies on those before it."""


def _play(env: Env, key: Key) -> _Trial:
    """Random actions, to the end of the first episode or to the first step that is not sound."""

    def step(trial: _Trial) -> _Trial:
        step_key, action_key = jax.random.split(jax.random.fold_in(key, trial.t))
        state, timestep = env.step(step_key, trial.state, random_action(env, action_key, trial.timestep.obs))
        timestep = jax.tree.map(jnp.asarray, timestep)
        return _Trial(trial.t + 1, state, timestep, _is_sound(env, timestep))

    def unfinished(trial: _Trial) -> Array:
        return trial.sound & ~trial.timestep.last & (trial.t < min(env.time_limit, TRIAL_STEPS))

    state, obs = env.reset(key)
    begin = TimeStep(jax.tree.map(jnp.asarray, obs), jnp.zeros(()), jnp.ones(()), jnp.zeros((), bool))
    return lax.while_loop(unfinished, step, _Trial(jnp.zeros((), jnp.int32), state, begin, _is_sound(env, begin)))


def _is_sound(env: Env, timestep: TimeStep) -> Array:
    obs, reward, discount, last = timestep
    in_range = (discount >= 0) & (discount <= 1) & ((discount > 0) | last)
    allowed = True if env.action_mask is None else env.action_mask(obs).any() | last
    spaces = [space for _, space in space_leaves(env.observation_space)]
    inside = jnp.stack(list(map(_in_space, spaces, jax.tree.leaves(obs)))).all()
    return inside & jnp.isfinite(reward) & in_range & allowed


def _in_space(space: Space, obs: Array) -> Array:
    """Whether an array is finite; bounds of a Box are not checked, since many environments state rough ones."""
    if isinstance(space, Box):
        return jnp.isfinite(obs).all()
    return (obs >= 0) & (obs < space.n)


def random_action(env: Env, key: Key, obs: Tree) -> Array:
    """An action drawn uniformly from those that are allowed.

    Where a Box has no bounds that is from [-1, 1], and from one unit beside the bound where it has but one.
    """
    space = env.action_space
    if env.action_mask is not None:
        return jax.random.categorical(key, jnp.where(env.action_mask(obs), 0.0, MASKED)).astype(jnp.int32)
    if isinstance(space, Discrete):
        return jax.random.randint(key, (), 0, space.n)
    below, above = np.isfinite(space.low), np.isfinite(space.high)
    low = np.where(below, space.low, np.where(above, space.high - 1, -1)).astype(np.float32)
    high = np.where(above, space.high, np.where(below, space.low + 1, 1)).astype(np.float32)
    return 2 * jax.random.uniform(key, space.shape, minval=low / 2, maxval=high / 2)  # their distance may be too large


def _is_alike(value: Any, expected: jax.ShapeDtypeStruct) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct) and value.shape == expected.shape and value.dtype == expected.dtype


def _describe(value: Any) -> str:
    """`float32[4, 2]`, also inside of a structure."""
    if isinstance(value, jax.ShapeDtypeStruct | jax.Array):
        return f"{value.dtype.name}{list(value.shape)}"
    if jax.tree_util.all_leaves([value]):
        return excerpt(value, 100)
    return excerpt(jax.tree.map(lambda x: _Text(_describe(x)), value), 100)


class _Text(str):
    """A string that prints without quotation marks, inside of a structure too."""

    __repr__ = str.__str__
