"""From a TOML file to a trained run: configs, what they build, the stages that come first, sweeps."""

from jaxpg.experiments.build import Experiment, build
from jaxpg.experiments.config import Config, load_config, make_env, resolve_config
from jaxpg.experiments.grid import parse_grid, plan_grid
from jaxpg.experiments.stages import Stage, plan_stages
from jaxpg.experiments.sweep import train_sweep
from jaxpg.experiments.warm_start import build_experiment

__all__ = [
    "Config",
    "Experiment",
    "Stage",
    "build",
    "build_experiment",
    "load_config",
    "make_env",
    "parse_grid",
    "plan_grid",
    "plan_stages",
    "resolve_config",
    "train_sweep",
]
