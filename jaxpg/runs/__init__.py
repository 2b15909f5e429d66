"""Trained runs from Python: train one, open one, act with its policy, and export it; the commands use the same."""

from jaxpg.runs.callbacks import Callback
from jaxpg.runs.fitting import fit
from jaxpg.runs.policy import TrainedPolicy
from jaxpg.runs.results import MetricsTable
from jaxpg.runs.trained import Run, load

__all__ = ["Callback", "MetricsTable", "Run", "TrainedPolicy", "fit", "load"]
