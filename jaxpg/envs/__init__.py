"""Environments: gymnax's, tabular ones whose P and R are known, probes, and wrappers."""

from jaxpg.envs.contract import check_env
from jaxpg.envs.gymnax_adapter import from_gymnax
from jaxpg.envs.registry import WRAPPERS, default_settings, make, names, register, wrap
from jaxpg.envs.tabular import (
    MDP,
    action_values,
    as_env,
    expected_return,
    frozen_lake,
    grid_world,
    random_mdp,
    state_values,
    state_visits,
)
from jaxpg.envs.wrappers import clip_actions, flatten, frame_stack, sticky_actions, time_limit, unwrap

__all__ = [
    "MDP",
    "WRAPPERS",
    "action_values",
    "as_env",
    "check_env",
    "clip_actions",
    "default_settings",
    "expected_return",
    "flatten",
    "frame_stack",
    "from_gymnax",
    "frozen_lake",
    "grid_world",
    "make",
    "names",
    "random_mdp",
    "register",
    "state_values",
    "state_visits",
    "sticky_actions",
    "time_limit",
    "unwrap",
    "wrap",
]
