"""One environment of several side by side, also inside of a worker process.

It is not in `envs`, whose import brings jax and every environment: ten times the CPU time of Gymnasium's own, in
each of the workers (benchmarks/LOG.md, "what a worker imports").

An environment whose episode is over rests: it answers without being stepped. `REST` and `WAKE` say so to one in another
process, as options of `reset`, which Gymnasium's vector environment passes on.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from jaxpg.errors import UserError
from jaxpg.user_input.user_code import describe_failure, explain_failure

REST, WAKE = {"jaxpg": "rest"}, {"jaxpg": "wake"}


NUMBERS = "biuf"
"""Kinds of NumPy's dtypes."""


def kinds_of(space: gymnasium.Space) -> str:
    """The kinds of dtypes that observations of a space may have: no floats in one of integers."""
    return "biu" if space.dtype is not None and space.dtype.kind in "iu" else NUMBERS


def _scalar(x: Any) -> float:
    """A number of Python's, or the only one of an array."""
    return np.asarray(x, np.float64).item()


def _flag(x: Any, what: str) -> bool:
    """True or False, also as a number, or the only one of an array."""
    if isinstance(x, str) or (number := _scalar(x)) not in (0, 1):
        raise ValueError(f"{what} must be True or False, not {x!r}")
    return bool(number)


def make_sub_env(
    make_one: Callable[..., gymnasium.Env], name: str, flatten: bool, spaces: tuple[gymnasium.Space, ...] = ()
) -> gymnasium.Env:
    """What `make_one()` makes as a `SubEnv`, its observations flattened or as they are.

    In a worker process, where it would be printed and lost, what it raises is raised by the first reset instead: of an
    environment with these `spaces`, of observations and actions.

    Raises:
        UserError: it cannot be made.
    """
    try:
        with explain_failure(f"The environment {name} cannot be made: it"):
            env = make_one()
            return SubEnv(gymnasium.wrappers.FlattenObservation(env) if flatten else env, name)
    except UserError as reason:
        if spaces and _is_worker():
            return _Unmade(reason, *spaces)
        raise


def _is_worker() -> bool:
    return multiprocessing.parent_process() is not None


class _Unmade(gymnasium.Env):
    """In place of an environment that could not be made; `reset` raises the reason."""

    def __init__(self, reason: UserError, observation_space: gymnasium.Space, action_space: gymnasium.Space) -> None:
        self.observation_space, self.action_space, self._reason = observation_space, action_space, reason

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        raise self._reason


class SubEnv(gymnasium.Wrapper):
    """An environment that can rest, and whose failures say at which step of its episode they happened.

    Args:
        env: what Gymnasium makes.
        name: of the environment, for messages.
    """

    def __init__(self, env: gymnasium.Env, name: str) -> None:
        super().__init__(env)
        self._name, self._resting, self._steps = name, False, 0
        self._obs: Any = None
        if _is_worker():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options in (REST, WAKE):
            self._resting = options == REST
            return self._obs, {}
        self._resting, self._steps = False, 0
        try:
            result: Any = self.env.reset(seed=seed)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self.failure(error, 0) from error
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._at("returned something else than the pair of an observation and an info", 0)
        self._obs = result[0]
        self.check_obs(self._obs, 0)
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._resting:
            return self._obs, 0.0, False, False, {}
        self._steps += 1
        try:
            self._obs, reward, terminated, truncated, _ = self.env.step(action)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self.failure(error, self._steps) from error
        return self._obs, *self.check(self._obs, reward, terminated, truncated, self._steps), {}

    def check(self, obs: Any, reward: Any, terminated: Any, truncated: Any, steps: int) -> tuple[float, bool, bool]:
        """What a step returned beside the observation, as numbers of Python.

        Raises:
            UserError: one is not a number, or the observation has another shape than the space's.
        """
        try:
            numbers = _scalar(reward), _flag(terminated, "terminated"), _flag(truncated, "truncated")
        except (TypeError, ValueError, OverflowError) as error:
            raise self.failure(error, steps) from error
        self.check_obs(obs, steps)
        return numbers

    def check_obs(self, obs: Any, steps: int) -> None:
        """Raise a UserError for an observation of another shape than the space's, or of no numbers, by this step."""
        array = np.asarray(obs)
        if array.shape != (shape := self.observation_space.shape):
            raise self._at(f"returned an observation of shape {array.shape} instead of {shape}", steps)
        if array.dtype.kind not in NUMBERS:
            raise self._at(f"returned an observation of dtype {array.dtype}, which is no number", steps)
        if array.dtype.kind not in kinds_of(self.observation_space):
            wanted = self.observation_space.dtype
            raise self._at(f"returned an observation of {array.dtype}, and those of its space are {wanted}", steps)

    def failure(self, error: BaseException, steps: int) -> UserError:
        """What the environment raised at this step of an episode, in a sentence; 0 is the reset."""
        if steps and "expected 5, got 4" in str(error):  # by a wrapper of Gymnasium's, most often TimeLimit
            return self._at(
                "returned four values, as environments of the old Gym do, instead of five: observation, reward, "
                "terminated, truncated and info,",
                steps,
            )
        return self._at(f"raised {describe_failure(error)}", steps)

    def _at(self, what: str, steps: int) -> UserError:
        when = f"at step {steps} of an episode" if steps else "at the reset of an episode"
        return UserError(f"The environment {self._name} {what.removesuffix('.')} {when}.")
