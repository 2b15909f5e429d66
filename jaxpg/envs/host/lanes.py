"""One environment of several side by side, also inside of a worker process; this file imports no jax.

An environment whose episode is over rests: it answers without being stepped. `REST` and `WAKE` say so to one in another
process, as options of `reset`, which Gymnasium's vector environment passes on.
"""

from __future__ import annotations

import multiprocessing
import signal
from typing import Any

import gymnasium
import numpy as np

from jaxpg.errors import UserError
from jaxpg.user_code import describe_failure

REST, WAKE = {"jaxpg": "rest"}, {"jaxpg": "wake"}


class Lane(gymnasium.Wrapper):
    """An environment that can rest, and whose failures say at which step of its episode they happened.

    Args:
        env: what Gymnasium makes.
        name: of the environment, for messages.
    """

    def __init__(self, env: gymnasium.Env, name: str) -> None:
        super().__init__(env)
        self._name, self._resting, self._steps = name, False, 0
        self._obs: Any = None
        self._shape, self._step_env = env.observation_space.shape, env.step  # looked up once: this runs at every step
        if multiprocessing.parent_process() is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options in (REST, WAKE):
            self.rest(options == REST)
            return self._obs, {}
        self._resting, self._steps = False, 0
        try:
            self._obs = self.env.reset(seed=seed)[0]
            self._check_shape()
        except (Exception, SystemExit) as error:
            raise self._failure(error) from error
        return self._obs, {}

    def rest(self, resting: bool) -> None:
        """Answer without being stepped from now on, or be stepped again."""
        self._resting = resting

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._resting:
            return self._obs, 0.0, False, False, {}
        self._steps += 1
        try:
            self._obs, reward, terminated, truncated, _ = self._step_env(action)
            if getattr(self._obs, "shape", None) != self._shape:
                self._check_shape()
            return self._obs, float(reward), bool(terminated), bool(truncated), {}
        except (Exception, SystemExit) as error:
            raise self._failure(error) from error

    def _check_shape(self) -> None:
        """Raise `_WrongShape` for an observation of another shape than the space's, which may be a plain number."""
        if np.shape(self._obs) != self._shape:
            raise _WrongShape(f"returned an observation of shape {np.shape(self._obs)} instead of {self._shape}")

    def _failure(self, error: BaseException) -> UserError:
        when = f"at step {self._steps} of an episode" if self._steps else "at the reset of an episode"
        what = str(error) if isinstance(error, _WrongShape) else f"raised {describe_failure(error)}"
        return UserError(f"The environment {self._name} {what.removesuffix('.')} {when}.")


class _WrongShape(Exception):
    """An observation that does not fit the space."""
