"""Environments: gymnax's, tabular ones whose P and R are known, probes, and wrappers."""

from jaxpg.envs.battery import Finding, battery
from jaxpg.envs.contract import check_env
from jaxpg.envs.gymnax_adapter import from_gymnax
from jaxpg.envs.host import comes_in as lives_on_host
from jaxpg.envs.mdp_records import MDP, SparseMDP
from jaxpg.envs.mdps import (
    MDPS,
    cliff_walking,
    frozen_lake,
    grid_world,
    random_mdp,
    random_walk,
    sparse_grid_world,
    taxi,
)
from jaxpg.envs.registry import (
    NOTES,
    TEXT_TASKS,
    WRAPPERS,
    default_settings,
    make,
    make_task,
    make_unchecked,
    names,
    register,
    task_factory,
    wrap,
)
from jaxpg.envs.tabular import action_values, as_env, expected_return, state_values, state_visits, to_dense, to_sparse
from jaxpg.envs.wrappers import flatten, frame_stack, sticky_actions, time_limit, unwrap

__all__ = [
    "MDP",
    "MDPS",
    "NOTES",
    "TEXT_TASKS",
    "WRAPPERS",
    "Finding",
    "SparseMDP",
    "action_values",
    "as_env",
    "battery",
    "check_env",
    "cliff_walking",
    "default_settings",
    "expected_return",
    "flatten",
    "frame_stack",
    "from_gymnax",
    "frozen_lake",
    "grid_world",
    "lives_on_host",
    "make",
    "make_task",
    "make_unchecked",
    "names",
    "random_mdp",
    "random_walk",
    "register",
    "sparse_grid_world",
    "state_values",
    "state_visits",
    "sticky_actions",
    "task_factory",
    "taxi",
    "time_limit",
    "to_dense",
    "to_sparse",
    "unwrap",
    "wrap",
]
