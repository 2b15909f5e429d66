"""Metrics of a rollout: the episodes that ended, and the parts of their outcomes."""

from __future__ import annotations

import jax.numpy as jnp

from jaxpg.parallel import collectives
from jaxpg.rollout.collector import RolloutStats
from jaxpg.types import Array, Metrics, Outcome

OF_ENV = "env_"
"""How the names of `Env.episode_metrics` begin among the metrics of a run."""


def logged(metrics: Metrics, steps: Array) -> Metrics:
    """The metrics in float32, and `steps`, which stays an integer: float32 counts no further than 2^24."""
    return {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()} | {"steps": steps}


def outcome_metrics(outcome: Outcome | tuple[()]) -> Metrics:
    """The means of the parts of an outcome, `[B]` each, over the episodes of all devices; empty without an outcome."""
    parts = outcome.parts if isinstance(outcome, Outcome) else {}
    return {name: collectives.mean(part.astype(jnp.float32)) for name, part in parts.items()}


def episode_metrics(stats: RolloutStats) -> Metrics:
    """The number of episodes that ended, and their mean return, length and other numbers; NaN if none ended."""
    mean_over_episodes = 1 / jnp.where(stats.episodes > 0, stats.episodes, jnp.nan)
    return {
        "episodes": stats.episodes,
        "return": stats.return_sum * mean_over_episodes,
        "length": stats.length_sum * mean_over_episodes,
        **{OF_ENV + name: total * mean_over_episodes for name, total in stats.of_env.items()},
    }
