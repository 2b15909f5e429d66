"""Environments of a user's in NumPy, registered in Gymnasium when this module is imported; some have a fault."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np


class Panic(BaseException):
    """As an environment in Rust raises it."""


class Walk(gymnasium.Env):
    """A random walk on a line, pushed by the action; it terminates beyond 3, and Gymnasium truncates it.

    From step `at` of an episode on it has a `fault`: raise, panic (raise what is no Exception), nan, huge, reward, text
    or an integer beyond all floats (for a reward), neither (an end that is neither true nor false), shape, objects (for
    an observation), interrupt, exit, die, close the pipe and die later, or hang and say so in the file HANGS. Or it
    cannot be made: unmade, or only not in a worker process.
    """

    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2, start=1)

    def __init__(self, fault: str = "none", at: int = 3, render_mode: str | None = None) -> None:
        self._fault, self._at = fault, at
        if fault == "unmade":
            raise SystemExit(0)
        if fault == "unmade in a worker" and multiprocessing.parent_process() is not None:
            raise RuntimeError("no licence left")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._x, self._t = float(self.np_random.uniform(-1, 1)), 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in (1, 2)
        self._x += self.np_random.normal() + action - 1.5
        self._t += 1
        if self._t < self._at:
            return self._obs(), self._x, abs(self._x) > 3, False, {}
        if self._fault == "raise":
            raise RuntimeError("the motor is broken")
        if self._fault == "panic":
            raise Panic("out of bounds")
        if self._fault == "hang":
            Path(os.environ["HANGS"]).touch()
            time.sleep(1000)
        if self._fault == "interrupt":
            raise KeyboardInterrupt
        if self._fault == "exit":
            raise SystemExit(3)
        if self._fault == "die":
            os._exit(1)
        if self._fault == "pipe":
            os.closerange(3, 256)
            time.sleep(2)
            os._exit(1)
        reward: Any = {"reward": np.nan, "text": "a lot", "integer": 10**400}.get(self._fault, self._x)
        terminated: Any = None if self._fault == "neither" else abs(self._x) > 3
        if self._fault == "old gym":
            return self._obs(), reward, terminated, {}
        return self._obs(), reward, terminated, False, {}

    def _obs(self) -> np.ndarray:
        broken = self._t >= self._at
        if broken and self._fault == "shape":
            return np.zeros(3)
        if broken and self._fault == "objects":
            return np.array([self, self])
        wrong = {"nan": np.nan, "huge": 1e30}.get(self._fault, self._x)
        return np.array([wrong if broken else self._x, self._t])


class Dictionary(Walk):
    """The same, with a dictionary for an observation."""

    observation_space = gymnasium.spaces.Dict(
        {"x": gymnasium.spaces.Box(-10.0, 10.0), "t": gymnasium.spaces.Discrete(7)}
    )

    def _obs(self) -> Any:
        return {"x": np.array([self._x], np.float32), "t": self._t}


class Scalar(Walk):
    """The same, seen as one number without an axis."""

    observation_space = gymnasium.spaces.Box(-10.0, 10.0, ())

    def _obs(self) -> Any:
        return np.float32(self._x)


class Mission(Walk):
    """The same, with a text of a kind of its own, as MiniGrid has."""

    observation_space = gymnasium.spaces.Dict({"x": gymnasium.spaces.Box(-10.0, 10.0), "goal": gymnasium.Space()})


class Quiet(gymnasium.Env):
    """Rewards the action that equals the sign of the observation, of Discrete(3, start=-1) or of a Box of integers.

    `picture` is what it renders: nothing, float, raise, or bytes.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - Gymnasium's own form
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, whole: bool = False, picture: str = "bytes", render_mode: str | None = None) -> None:
        of_integers = gymnasium.spaces.Box(-1, 1, (1,), np.int64)
        self.action_space = of_integers if whole else gymnasium.spaces.Discrete(3, start=-1)
        self._whole, self._picture, self.render_mode = whole, picture, render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, bool, dict[str, Any]]:
        index = action[0] if self._whole else action
        assert self.action_space.contains(action), action
        reward = float((-1, 0, 1)[index + 1] == self._sign)  # an index must be an integer
        return self._draw(), np.array([reward]), np.array([False]) if self._sign > 0 else False, False, {}

    def _draw(self) -> np.ndarray:
        self._sign = int(self.np_random.integers(-1, 2))
        return np.array([self._sign], np.float32)

    def render(self) -> Any:
        if self._picture == "raise":
            raise ImportError("no module to draw with")
        made = {"float": np.ones((32, 32, 3), np.float32), "bytes": np.full((32, 32, 3), 99, np.uint8)}
        return made.get(self._picture)


class Pictures(gymnasium.Env):
    """Observations of bytes of any shape, or an integer that is not in the space."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (), high: int = 255, render_mode: str | None = None) -> None:
        box = gymnasium.spaces.Box(0, high, tuple(shape), np.uint8)
        self.observation_space = box if shape else gymnasium.spaces.Discrete(4)
        self._obs = np.arange(np.prod(shape)).reshape(shape).astype(np.uint8) if shape else -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._obs, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._obs, 0.0, False, False, {}


class Bare(Walk):
    """Its reset returns the observation alone."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)[0]


gymnasium.register("TinyVector-v0", vector_entry_point=Walk, max_episode_steps=5)


class Sticky(Walk):
    """Where an episode begins depends on how many there were before."""

    _episodes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._episodes += 1
        self._x += self._episodes
        return self._obs(), {}


class Shares(Pictures):
    """Of the space of bytes, it returns shares of 1, or only from its first step on."""

    def __init__(self, late: bool = False, render_mode: str | None = None) -> None:
        super().__init__((3,))
        self._late = late

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._obs if self._late else np.full(3, 0.5), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.full(3, 0.5), 0.0, False, False, {}


class Unlike(Walk):
    """In every process its observations have other bounds."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(-10.0 - os.getpid(), 10.0, (2,), np.float64)


class Canvas(gymnasium.Env):
    """It sees the number of steps, and draws it into the same array again and again."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - Gymnasium's own form
    observation_space = gymnasium.spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self._picture = render_mode, np.zeros((8, 8, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._picture[:] = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._picture += 1
        return self._picture[0, 0, :1].astype(np.float32), 1.0, False, False, {}

    def render(self) -> Any:
        return self._picture


class Stairs(gymnasium.Env):
    """A climber, who sees how high it is, as its picture shows; every step costs the same."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - Gymnasium's own form
    observation_space = gymnasium.spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self._height = render_mode, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._height = 0
        return np.array([0], np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._height += int(action)
        return np.array([self._height], np.float32), -1.0, False, False, {}

    def render(self) -> Any:
        return np.full((8, 8, 3), self._height, np.uint8)


CLASSES = {
    "Walk": (Walk, 6),
    "Endless": (Walk, None),
    "Dictionary": (Dictionary, 6),
    "Scalar": (Scalar, 6),
    "Mission": (Mission, 6),
    "Quiet": (Quiet, 10),
    "Pictures": (Pictures, 5),
    "Bare": (Bare, 5),
    "Sticky": (Sticky, 6),
    "Stairs": (Stairs, 20),
    "Shares": (Shares, 5),
    "Unlike": (Unlike, 5),
    "Canvas": (Canvas, 7),
}
for name, (cls, limit) in CLASSES.items():
    gymnasium.register(f"Tiny{name}-v0", cls, max_episode_steps=limit)
