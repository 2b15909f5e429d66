"""Jumanji's environments for one agent.

Jumanji marks its time limits as terminations. Here the limit is ours (`time_limit`, or `max_steps` where Jumanji has
none), and Jumanji's is one step later, so that its LAST is a termination. An action of several parts (row, column) is
one number, counted as NumPy counts the entries of an array of that shape. Illegal actions are masked.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jumanji
import numpy as np
from jumanji import registration, specs
from jumanji.viewer import MatplotlibViewer

from jaxpg.envs.adapting import as_env
from jaxpg.errors import UserError
from jaxpg.types import Array, Discrete, Env, Tree
from jaxpg.user_input.domains import INT32_MAX
from jaxpg.user_input.user_code import argument_defaults

MOST_ACTIONS = 10_000


def ids() -> list[str]:
    """The names in Jumanji's registry."""
    return list(jumanji.registered_environments())


def default_settings(env_id: str) -> dict[str, Any]:
    """The numbers and flags among the constructor's arguments, and a time limit."""
    spec = registration._REGISTRY[env_id]
    arguments = argument_defaults(registration.load(spec.entry_point)) | spec.kwargs
    settings = {name: value for name, value in arguments.items() if isinstance(value, int | float)}
    if "time_limit" in arguments:
        return settings | {"time_limit": settings.get("time_limit", 100)}
    return settings | {"max_steps": 1000}


def make(env_id: str, settings: dict[str, Any]) -> Env:
    """The environment with our time limit.

    Raises:
        UserError: several agents act in it, or one has more than MOST_ACTIONS.
    """
    arguments = {name: value for name, value in settings.items() if name != "max_steps"}
    limit: int = settings["time_limit"] if "time_limit" in settings else settings["max_steps"]
    if "time_limit" in arguments:
        arguments["time_limit"] = min(limit + 1, INT32_MAX)
    env = jumanji.make(env_id, **arguments)
    parts = _parts(env_id, env)

    def reset(key: Array) -> tuple[Tree, Tree]:
        state, timestep = env.reset(key)
        return (state, timestep.observation), _without_mask(timestep.observation)

    def step(key: Array, state: Tree, action: Array) -> tuple[Tree, Tree, Array, Array]:
        several = jnp.stack(jnp.unravel_index(action, parts)) if len(parts) > 1 else action
        inner, timestep = env.step(state[0], several)
        obs = timestep.observation
        return (inner, obs), _without_mask(obs), timestep.reward, timestep.last()

    masked = "action_mask" in getattr(env.observation_spec, "_specs", {})
    legal = (lambda state: state[1].action_mask.reshape(-1)) if masked else None
    return as_env(env_id, reset, step, Discrete(math.prod(parts)), limit, legal, _renderer(env))


def _renderer(env: Any) -> Callable[[Any], np.ndarray] | None:
    """The pictures of Jumanji's viewer, which would open a window; None where the environment has no such viewer."""
    viewer = vars(env).get("_viewer")
    if not isinstance(viewer, MatplotlibViewer):
        return None

    def render(state: Any) -> np.ndarray:
        from matplotlib import pyplot

        pyplot.switch_backend("agg")
        viewer._display = viewer._display_rgb_array
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Agg shows no windows
            return np.array(viewer.render(jax.tree.map(jnp.asarray, state[0])))[..., :3]

    return render


def _parts(env_id: str, env: Any) -> tuple[int, ...]:
    """How many values each part of an action has: (n,) for a plain number."""
    spec = env.action_spec
    if isinstance(spec, specs.DiscreteArray):
        return (int(spec.num_values),)
    mask = getattr(env.observation_spec, "_specs", {}).get("action_mask")
    if isinstance(spec, specs.MultiDiscreteArray) and env.reward_spec.shape == ():
        parts = tuple(int(n) for n in np.asarray(spec.num_values).reshape(-1))
        if math.prod(parts) <= MOST_ACTIONS and (mask is None or mask.shape == parts):
            return parts
    raise UserError(
        f"In jumanji:{env_id} several agents act at once, or one has more than {MOST_ACTIONS:,} actions. jaxpg trains "
        "one agent, with at most as many."
    )


def _without_mask(obs: Tree) -> Tree:
    """The observation's parts but for the mask, which is read off the state."""
    fields = obs._asdict() if hasattr(obs, "_asdict") else dict(vars(obs))
    return {name: value for name, value in fields.items() if name != "action_mask"}
