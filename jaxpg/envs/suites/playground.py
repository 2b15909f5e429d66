"""MuJoCo Playground's control suite: rigid bodies by MJX, continuous actions from -1 to 1.

The raw environment is used; Playground's wrappers would add time limits and resets. Its locomotion and manipulation
tasks would download their models and are left out. Physics are those of MJX in JAX (`impl = "jax"`): Playground's
default, Warp, needs an NVIDIA GPU.
"""

from __future__ import annotations

from typing import Any

from mujoco_playground import dm_control_suite

from jaxpg.envs.adapting import as_physics_env
from jaxpg.envs.suites import mujoco_pictures
from jaxpg.errors import UserError
from jaxpg.types import Env


def ids() -> list[str]:
    """The names of the control suite."""
    return list(dm_control_suite.ALL_ENVS)


def default_settings(env_id: str) -> dict[str, Any]:
    """The numbers, texts and flags of the environment's config."""
    config = dm_control_suite.get_default_config(env_id).to_dict()
    plain = {name: value for name, value in config.items() if isinstance(value, int | float | str)}
    read_by_wrappers = ("action_repeat", "vision")
    return {name: value for name, value in plain.items() if name not in read_by_wrappers} | {"impl": "jax"}


def make(env_id: str, settings: dict[str, Any]) -> Env:
    """The raw environment with our time limit.

    Raises:
        UserError: a step has no time for a step of the physics, which would stand still.
    """
    if settings["sim_dt"] > settings["ctrl_dt"]:
        raise UserError(
            f"playground:{env_id}: sim_dt is the time of a step of the physics, at most that of an action, ctrl_dt = "
            f"{settings['ctrl_dt']}, not {settings['sim_dt']}."
        )
    env = dm_control_suite.load(env_id, config_overrides=settings)
    render = mujoco_pictures.renderer(env.mj_model, lambda state: (state.data.qpos, state.data.qvel))
    return as_physics_env(env_id, env, settings["episode_length"], render)
