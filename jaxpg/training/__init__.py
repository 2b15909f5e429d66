"""Training any Learner: the loop, its checkpoints, and the directory of a run."""

from jaxpg.training.advance import RunState, advance_seeds, seed_keys
from jaxpg.training.checkpoint import Checkpoint
from jaxpg.training.loop import TrainingHooks, restore, train
from jaxpg.training.run_directory import load_metrics

__all__ = [
    "Checkpoint",
    "RunState",
    "TrainingHooks",
    "advance_seeds",
    "load_metrics",
    "restore",
    "seed_keys",
    "train",
]
