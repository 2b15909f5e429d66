"""JAXtari's Atari games: objects on the screen as one vector of numbers.

`done` of JAXtari is the end of the game, a termination. A step is one frame: JAXtari skips frames in wrappers that are
not used here. So the 108,000 steps of `max_steps`, a time-out, are ALE's half hour. In two games `done` is also a limit
of time, which the observations do not show: Surround ends after 1,000 steps, Skiing after 18,000. That is a termination
here too; a `max_steps` of one step less makes it a time-out. JAXtari's games need sprites, which each user installs
after a question about Atari's ROMs.
"""

from __future__ import annotations

from typing import Any

import jaxtari

from jaxpg.envs.adapting import as_env
from jaxpg.errors import UserError
from jaxpg.types import Array, Discrete, Env, Tree


def ids() -> list[str]:
    """The games that `jaxtari.make` knows."""
    return list(jaxtari.list_available_games())


def default_settings(env_id: str) -> dict[str, Any]:
    """The game's mode and difficulty, and the time limit."""
    return {"mode": 0, "difficulty": 0, "max_steps": 108_000}


def make(env_id: str, settings: dict[str, Any]) -> Env:
    """The game, without a wrapper.

    Raises:
        UserError: the sprites are not installed.
    """
    if not jaxtari.ownership_or_alt_markers_present():
        raise UserError(
            "JAXtari's sprites are not installed. Answer its question about Atari's ROMs, and it downloads them: "
            "python -m jaxtari.install_sprites."
        )
    env = jaxtari.make(env_id, mode=settings["mode"], difficulty=settings["difficulty"])

    def reset(key: Array) -> tuple[Tree, Tree]:
        obs, state = env.reset(key)
        return state, obs

    def step(key: Array, state: Tree, action: Array) -> tuple[Tree, Tree, Array, Array]:
        obs, state, reward, done, _ = env.step(state, action)
        return state, obs, reward, done

    return as_env(env_id, reset, step, Discrete(int(env.action_space().n)), settings["max_steps"])
