"""Environments of a user's in NumPy, registered in Gymnasium when this module is imported; some have a fault."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np


class Walk(gymnasium.Env):
    """A random walk on a line, pushed by the action; it terminates beyond 3, and Gymnasium truncates it.

    From step `at` of an episode on it has a `fault`: raise, nan, reward, text (for a reward), shape, exit or die.
    """

    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2, start=1)

    def __init__(self, fault: str = "none", at: int = 3, render_mode: str | None = None) -> None:
        self._fault, self._at = fault, at

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
        if self._fault == "exit":
            raise SystemExit(3)
        if self._fault == "die":
            os._exit(1)
        reward: Any = {"reward": np.nan, "text": "a lot"}.get(self._fault, self._x)
        return self._obs(), reward, abs(self._x) > 3, False, {}

    def _obs(self) -> np.ndarray:
        broken = self._t >= self._at
        if broken and self._fault == "shape":
            return np.zeros(3)
        return np.array([np.nan if broken and self._fault == "nan" else self._x, self._t])


class Dictionary(Walk):
    """The same, with a dictionary for an observation."""

    observation_space = gymnasium.spaces.Dict(
        {"x": gymnasium.spaces.Box(-10.0, 10.0), "t": gymnasium.spaces.Discrete(7)}
    )

    def _obs(self) -> Any:
        return {"x": np.array([self._x], np.float32), "t": self._t}


for name, cls, limit in (("Walk", Walk, 6), ("Endless", Walk, None), ("Dictionary", Dictionary, 6)):
    gymnasium.register(f"Tiny{name}-v0", cls, max_episode_steps=limit)
