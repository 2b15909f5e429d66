"""Experience: collecting rollouts, resampling groups without signal, and evaluating whole episodes."""

from jaxpg.rollout.collector import Collector, CollectorState, RolloutStats, env_keys, make_actor
from jaxpg.rollout.dynamic_sampling import has_signal, with_dynamic_sampling
from jaxpg.rollout.episodes import episodic, truncated, with_overlong_filtering
from jaxpg.rollout.evaluation import Evaluation, RecordedEpisode, evaluate, evaluation_metrics, record_episode
from jaxpg.rollout.metrics import episode_metrics, outcome_metrics
from jaxpg.rollout.segments import continuing
from jaxpg.rollout.successors import bootstrap_steps, bootstraps_at, rollout_values, successor_obs, successor_values

__all__ = [
    "Collector",
    "CollectorState",
    "Evaluation",
    "RecordedEpisode",
    "RolloutStats",
    "bootstrap_steps",
    "bootstraps_at",
    "continuing",
    "env_keys",
    "episode_metrics",
    "episodic",
    "evaluate",
    "evaluation_metrics",
    "has_signal",
    "make_actor",
    "outcome_metrics",
    "record_episode",
    "rollout_values",
    "successor_obs",
    "successor_values",
    "truncated",
    "with_dynamic_sampling",
    "with_overlong_filtering",
]
