"""Craftax and Craftax-Classic.

Craftax's `done` is also set at `max_timesteps`. That is our time limit here, and Craftax's own is put out of reach, so
that its `done` is a termination: the player is dead or has won.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from craftax.craftax_env import make_craftax_env_from_name

from jaxpg.envs.adapting import as_env
from jaxpg.types import Array, Discrete, Env, Tree
from jaxpg.user_input.domains import INT32_MAX


def ids() -> list[str]:
    """The environments without resets of their own."""
    return [f"Craftax-{kind}-v1" for kind in ("Symbolic", "Pixels", "Classic-Symbolic", "Classic-Pixels")]


def default_settings(env_id: str) -> dict[str, Any]:
    """The numbers and flags of EnvParams."""
    params = dataclasses.asdict(make_craftax_env_from_name(env_id, auto_reset=False).default_params)
    return {name: value for name, value in params.items() if isinstance(value, int | float)}


def make(env_id: str, settings: dict[str, Any]) -> Env:
    """The environment with our time limit."""
    env = make_craftax_env_from_name(env_id, auto_reset=False)
    params = dataclasses.replace(env.default_params, **(settings | {"max_timesteps": INT32_MAX}))

    def reset(key: Array) -> tuple[Tree, Tree]:
        obs, state = env.reset_env(key, params)
        return state, obs

    def step(key: Array, state: Tree, action: Array) -> tuple[Tree, Tree, Array, Array]:
        obs, state, reward, done, _ = env.step_env(key, state, action, params)
        return state, obs, reward, done

    def episode_metrics(state: Tree) -> dict[str, Array]:
        return {"achievements": state.achievements.sum()}

    def render(state: Tree) -> np.ndarray:
        return np.asarray(_renderer("Classic" in env_id)(state)).astype(np.uint8)

    return as_env(
        env_id, reset, step, Discrete(int(env.num_actions)), settings["max_timesteps"],
        render=render, episode_metrics=episode_metrics,
    )  # fmt: skip


@cache
def _renderer(classic: bool) -> Callable[[Tree], Array]:
    """state -> `[H, W, 3]` from 0 to 255, what a player sees; its textures are loaded when something is drawn."""
    if classic:
        from craftax.craftax_classic.constants import BLOCK_PIXEL_SIZE_IMG
        from craftax.craftax_classic.renderer import make_craftax_pixel_renderer
    else:
        from craftax.craftax.constants import BLOCK_PIXEL_SIZE_IMG
        from craftax.craftax.renderer import make_craftax_pixel_renderer
    return jax.jit(make_craftax_pixel_renderer(BLOCK_PIXEL_SIZE_IMG))
