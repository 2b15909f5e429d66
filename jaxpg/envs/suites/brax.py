"""Brax's environments: rigid bodies, continuous actions from -1 to 1.

The raw environment is used, whose `done` is a termination. `brax.envs.create` would add an EpisodeWrapper, whose `done`
is also set at the time limit, and an AutoResetWrapper. `episode_length` is a setting here, and ends an episode as a
time-out; Brax's own default is 1,000.
"""

from __future__ import annotations

from typing import Any

from brax import envs

from jaxpg.envs.adapting import as_physics_env
from jaxpg.envs.suites import mujoco_pictures
from jaxpg.types import Env
from jaxpg.user_input.user_code import argument_defaults


def ids() -> list[str]:
    """The names in Brax's registry."""
    return list(envs._envs)


def default_settings(env_id: str) -> dict[str, Any]:
    """The arguments of the environment's class, and `episode_length`."""
    arguments = argument_defaults(envs._envs[env_id])
    return {**arguments, "episode_length": 1000}


def make(env_id: str, settings: dict[str, Any]) -> Env:
    """The raw environment with our time limit."""
    arguments = {key: value for key, value in settings.items() if key != "episode_length"}
    env = envs.get_environment(env_id, **arguments)
    render = mujoco_pictures.renderer(env.sys.mj_model, lambda state: (state.pipeline_state.q, state.pipeline_state.qd))
    return as_physics_env(env_id, env, settings["episode_length"], render)
