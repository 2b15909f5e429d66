"""Environments side by side on the host, as one record of functions: Gymnasium's vector API, and EnvPool.

None resets anything by itself, as the contract of `Env` wants it. Gymnasium's vector environments are made with
`AutoresetMode.DISABLED` and reset by `options["reset_mask"]`. EnvPool's reset a finished environment at its next step
(Gymnasium calls that NEXT_STEP), but begin a new episode at once if they are told to, `reset(env_id)`, and then owe no
reset. So there is no step without an action in it, and the last observation of an episode is never lost.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpg.errors import UserError
from jaxpg.types import Box, Discrete, Space
from jaxpg.user_input.user_code import describe_failure


class Results(NamedTuple):
    """What a step returns, `[n, ...]` each; observations are as the environment makes them."""

    obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class Vector(NamedTuple):
    """`n` environments.

    begin(wanted, seeds) -> obs: new episodes where `wanted` [n]; other rows of `obs` mean nothing.
    step(actions, age) -> Results: one step of all that do not rest. `age(i)` is the number of steps of the episode of
        environment i with this one, for messages.
    rest(where, resting): let environments rest, or wake them; None if they cannot rest, and are stepped for nothing.
    close(): end them, and their processes.
    """

    begin: Callable[[np.ndarray, np.ndarray], np.ndarray]
    step: Callable[[np.ndarray, Callable[[int], int]], Results]
    rest: Callable[[np.ndarray, bool], None] | None
    close: Callable[[], None]


class Source(NamedTuple):
    """Where vectors come from.

    name: of the environment, with the prefix of its package.
    make(n, seed) -> Vector. `seed` is for environments that take none for an episode.
    observation_space, action_space, time_limit, min_truncation_step: as in `Env`.
    convert(obs): observations `[n, ...]` of the environment as the float32 arrays that agents see.
    to_action(actions): actions `[n, ...]` of agents as the environment takes them.
    repeatable: whether an episode is determined by its seed and its actions.
    python_integers: whether its steps take integers of Python's in place of NumPy's, with which a step of CartPole is a
        seventh faster (benchmarks/LOG.md, "the host door, integers of Python's").
    frames(seed, actions) -> the pictures of an episode with its rewards; None if it cannot be drawn.
    """

    name: str
    make: Callable[[int, int], Vector]
    observation_space: Box
    action_space: Space
    time_limit: int
    min_truncation_step: int
    convert: Callable[[np.ndarray], np.ndarray]
    to_action: Callable[[Any], Any]
    repeatable: bool
    python_integers: bool = False
    frames: Callable[[int, np.ndarray], tuple[list[np.ndarray], list[float]]] | None = None


def close_or_warn(close: Callable[[], None], name: str) -> None:
    """End an environment; that it cannot be ended is a warning: it hides nothing else that the user has to hear of."""
    try:
        close()
    except Exception as error:
        warnings.warn(f"The environment {name} raised {describe_failure(error)} as it was closed.", stacklevel=3)


def sync_vector(make_sub_env: Callable[[], Any], n: int, seed: int) -> Vector:
    """`n` environments (`sub_env.SubEnv`) of this process, one after the other.

    As Gymnasium's `SyncVectorEnv` without resets of its own, and without its copies and its `infos`, which took more
    time than a step of CartPole itself (benchmarks/LOG.md, 2026-11-22, "an environment on the host").
    """
    from jaxpg.sub_env import kinds_of

    with ExitStack() as begun:  # where one cannot be made, those before it are closed
        envs = [begun.enter_context(closing(make_sub_env())) for _ in range(n)]
        ending = begun.pop_all()  # where one raises, the others are closed all the same
    step_one = [env.env.step for env in envs]  # not `env.step`, which looks at what each returns by itself
    shape, kinds = envs[0].observation_space.shape, kinds_of(envs[0].observation_space)
    obs: list[Any] = [None] * n
    resting, no_end = np.zeros((2, n), bool)

    def begin(wanted: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        for i in np.flatnonzero(wanted).tolist():
            obs[i] = envs[i].reset(seed=int(seeds[i]))[0]
            resting[i] = False
        return np.array(obs)

    def step(actions: np.ndarray, age: Callable[[int], int]) -> Results:
        rows: list[Any] = []
        try:
            if np.count_nonzero(resting):
                for i, action in enumerate(actions):
                    rows.append((obs[i], 0.0, False, False, {}) if resting[i] else step_one[i](action))
            else:
                for one, action in zip(step_one, actions, strict=True):
                    rows.append(one(action))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise envs[len(rows)].failure(error, age(len(rows))) from error
        obs[:], rewards, terminated, truncated, _ = zip(*rows, strict=True)
        try:
            reward = np.array(rewards, np.float64).reshape(n)
            results = Results(np.array(obs), reward, flags(terminated), flags(truncated))
            if results.obs.shape == (n, *shape) and results.obs.dtype.kind in kinds:
                return results
        except (TypeError, ValueError, OverflowError):  # one of another kind, or several that differ in shape
            pass
        checked = [env.check(*row[:4], age(i)) for i, (env, row) in enumerate(zip(envs, rows, strict=True))]
        return Results(np.array(obs), *map(np.array, zip(*checked, strict=True)))

    def flags(ends: Sequence[Any]) -> np.ndarray:
        if (number := ends.count(False)) == n:
            return no_end
        if number + ends.count(True) != n:
            raise ValueError  # neither of both
        return np.array(ends, bool).reshape(n)

    def rest(where: np.ndarray, rests: bool) -> None:
        resting[where] = rests

    return Vector(begin, step, rest, ending.close)


def async_vector(make_sub_env: Callable[[], Any], n: int, seed: int) -> Vector:
    """`n` environments in a process each: Gymnasium's `AsyncVectorEnv` without resets of its own.

    What is not `reset` or `step` goes through the options of `reset`, which Gymnasium hands to a single environment.
    """
    from gymnasium import logger, vector

    from jaxpg.sub_env import REST, WAKE

    def call(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        level, logger.min_level = logger.min_level, logger.ERROR + 1  # it prints what workers raise; so do we
        try:
            return function(*arguments, **settings)
        finally:
            logger.min_level = level

    before = set(multiprocessing.active_children())
    try:
        env = vector.AsyncVectorEnv(
            [make_sub_env] * n,
            copy=False,
            context="spawn",  # a fork of a process with jax's threads may hang
            autoreset_mode=vector.AutoresetMode.DISABLED,
        )
    except BaseException as error:  # Gymnasium leaves its workers behind
        _terminate(set(multiprocessing.active_children()) - before)
        if "observation_mode" in str(error):  # its advice is an argument that cannot be given here
            raise RuntimeError("its instances have different observation spaces: make them alike") from error
        raise

    def begin(wanted: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        return call(env.reset, seed=[int(x) for x in seeds], options={"reset_mask": wanted})[0]

    def rest(where: np.ndarray, resting: bool) -> None:
        call(env.reset, options={"reset_mask": where, **(REST if resting else WAKE)})

    def close() -> None:
        try:
            if all(process.is_alive() for process in env.processes):
                call(env.close)
        except (EOFError, ConnectionError):
            pass  # a worker was about to die
        finally:
            _terminate(env.processes)
            env.closed = True

    return Vector(begin, lambda actions, age: Results(*call(env.step, actions)[:4]), rest, close)


def _terminate(processes: Iterable[Any]) -> None:
    for process in processes:
        process.terminate()
        process.join()


def envpool_vector(make_pool: Callable[..., Any], n: int, seed: int) -> Vector:
    """`make_pool(num_envs=n, seed=seed)`, whose episodes take their randomness from the one seed."""
    pool = make_pool(num_envs=n, seed=seed)

    def begin(wanted: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        which = np.flatnonzero(wanted).astype(np.int32)
        first = pool.reset(env_id=which)[0]
        obs = np.zeros((n, *first.shape[1:]), first.dtype)
        obs[which] = first
        return obs

    return Vector(begin, lambda actions, age: Results(*pool.step(actions)[:4]), None, lambda: None)


def observation_converter(space: Any, name: str) -> tuple[Callable[[np.ndarray], np.ndarray], Box]:
    """How observations `[n, ...]` of a Box or Discrete space become float32 arrays, and the space of these.

    Integers of a Discrete space become one-hot vectors. Images, which are bytes from 0 to 255 with two axes or three,
    become `[H, W, C]` from 0 to 1. Their channels are the first axis where that is shorter than the last.

    Raises:
        UserError: images with more axes, such as stacked ones in colour; what converts raises one for an integer
            outside of its Discrete space.
    """
    if not hasattr(space, "low"):
        n, start = int(space.n), int(getattr(space, "start", 0))
        return partial(_one_hot, n=n, start=start, name=name), _box(np.zeros(n), np.ones(n))
    axes = len(space.shape)
    if space.dtype != np.uint8 or axes < 2 or (space.low != 0).any() or (space.high != 255).any():
        return partial(np.asarray, dtype=np.float32), _box(space.low, space.high)
    if axes > 3:
        raise UserError(
            f"{name}: the observations are bytes of shape {space.shape}, and an image has two axes, or three with its "
            "channels: wrap the environment where you register it. The wrapper frame_stack of jaxpg stacks images."
        )
    scale, channels_first = np.float32(1 / 255), axes == 3 and space.shape[0] < space.shape[2]

    def convert(obs: np.ndarray) -> np.ndarray:
        obs = np.asarray(obs)
        obs = obs[..., None] if axes == 2 else obs.transpose(0, 2, 3, 1) if channels_first else obs
        return obs.astype(np.float32, order="C") * scale

    shape = convert(np.zeros((1, *space.shape), np.uint8)).shape[1:]
    return convert, _box(np.zeros(shape), np.ones(shape))


def _one_hot(obs: np.ndarray, *, n: int, start: int, name: str) -> np.ndarray:
    """`[..., n]`, the integers of Discrete(n, start) as one-hot vectors."""
    number = np.asarray(obs) - start
    if number.size and not 0 <= number.min() <= number.max() < n:
        space = f"Discrete({n}, start={start})" if start else f"Discrete({n})"
        outside = number[(number < 0) | (number >= n)][0] + start
        raise UserError(
            f"The environment {name} returned the observation {outside}, which is not one of {space}. Fix the "
            "environment."
        )
    return np.eye(n, dtype=np.float32)[number]


def action_converter(space: Any) -> tuple[Callable[[Any], Any], Space]:
    """How actions of agents become those of a space (see `HostParts.to_action`), and the space that agents see.

    Actions are clipped to a Box's own bounds, from which those of float32 may differ by rounding; in a Box of integers
    they become the nearest ones. Agents see a Box of other than one axis flat. Integers of jax have 32 bits: bounds
    beyond are those, so that an exported policy acts as it was trained.

    Raises:
        UserError: actions are integers from a start on that has more bits.
    """
    if hasattr(space, "low"):
        whole = space.dtype.kind in "iu"
        low, high = (_within_jax(x.ravel()) if whole else x.ravel() for x in (space.low, space.high))

        def to_box(actions: Any) -> Any:
            clipped = actions.clip(low, high)
            actions = _cast(clipped.round() if whole else clipped, space.dtype)
            return actions if len(space.shape) == 1 else actions.reshape((*actions.shape[:-1], *space.shape))

        return to_box, _box(low, high)
    start = int(getattr(space, "start", 0))
    if abs(start) + int(space.n) > np.iinfo(np.int32).max:
        raise UserError(f"Actions are integers of 32 bits, and {space} has others: let them start at 0.")
    if start == 0:  # adding it would cost a microsecond at every step
        return partial(_cast, dtype=space.dtype), Discrete(int(space.n))
    return lambda actions: _cast(actions, space.dtype) + space.dtype.type(start), Discrete(int(space.n))


def _within_jax(bounds: np.ndarray) -> np.ndarray:
    """Integers no further from 0 than a float32 is a 32-bit integer, of the dtype that jax has for theirs."""
    limits = np.iinfo(jax.dtypes.canonicalize_dtype(bounds.dtype))
    most = int(np.nextafter(np.float32(limits.max), np.float32(0))) if limits.bits == 32 else limits.max
    return bounds.clip(limits.min, most)


def _cast(actions: Any, dtype: np.dtype) -> Any:
    return actions.astype(dtype if isinstance(actions, np.ndarray) else jax.dtypes.canonicalize_dtype(dtype))


def _box(low: Any, high: Any) -> Box:
    """Bounds as float32, infinite where they are at the limits of what a number can be."""
    most = np.finfo(np.float32).max
    low, high = (np.clip(np.asarray(x, np.float64), -most, most).astype(np.float32) for x in (low, high))
    return Box(np.where(low <= -most, -np.inf, low), np.where(high >= most, np.inf, high))
