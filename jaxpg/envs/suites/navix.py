"""Navix's grid worlds (MiniGrid).

`step` of Navix resets by itself after the end of an episode, `_step` does not; its truncation is at `max_steps`, which
is our time limit here. Observations are those of the environment, fully observed symbols by default.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import navix
import numpy as np

from jaxpg.envs.adapting import as_env
from jaxpg.errors import refuse_unknown
from jaxpg.types import Array, Discrete, Env, Tree


def ids() -> list[str]:
    """The names in Navix's registry."""
    return list(navix.registry())


def default_settings(env_id: str) -> dict[str, Any]:
    """The time limit, and the name of a function of `navix.observations`."""
    return {"max_steps": 100, "observation": "symbolic"}


def make(env_id: str, settings: dict[str, Any]) -> Env:
    """The environment, without its own time limit and resets.

    Raises:
        UserError: Navix has no such observation.
    """
    observations = {
        name: x for name, x in vars(navix.observations).items() if getattr(x, "__module__", "") == "navix.observations"
    }
    if settings["observation"] not in observations:
        refuse_unknown("observation", settings["observation"], observations, f" of navix:{env_id}")
    observe = observations[settings["observation"]]
    env = navix.make(env_id, max_steps=settings["max_steps"], observation_fn=observe)

    def reset(key: Array) -> tuple[Tree, Tree]:
        timestep = env.reset(key)
        return timestep, timestep.observation

    def step(key: Array, state: Tree, action: Array) -> tuple[Tree, Tree, Array, Array]:
        timestep = env._step(state, action)
        terminated = jnp.asarray(env.termination_fn(state.state, action, timestep.state), bool)
        return timestep, timestep.observation, timestep.reward, terminated

    def render(timestep: Any) -> np.ndarray:
        return np.asarray(jax.jit(navix.observations.rgb)(timestep.state))

    return as_env(env_id, reset, step, Discrete(len(env.action_set)), settings["max_steps"], render=render)
