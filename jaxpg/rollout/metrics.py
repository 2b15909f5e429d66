"""Metrics of a rollout: episodes that ended, and the parts of their outcomes."""

from __future__ import annotations

import jax.numpy as jnp

from jaxpg.parallel import collectives
from jaxpg.rollout.collector import (
    RolloutStats,
)
from jaxpg.types import Metrics, Outcome


def outcome_metrics(outcome: Outcome | tuple[()]) -> Metrics:
    """The means over episodes, on all devices, of the parts of their outcome; nothing where there is none."""
    parts = outcome.parts if isinstance(outcome, Outcome) else {}
    return {name: collectives.mean(part.astype(jnp.float32)) for name, part in parts.items()}


def episode_metrics(stats: RolloutStats) -> Metrics:
    """The number of episodes that ended, and their mean return and length, NaN where none did."""
    mean_over_episodes = 1 / jnp.where(stats.episodes > 0, stats.episodes, jnp.nan)
    return {
        "episodes": stats.episodes,
        "return": stats.return_sum * mean_over_episodes,
        "length": stats.length_sum * mean_over_episodes,
    }
