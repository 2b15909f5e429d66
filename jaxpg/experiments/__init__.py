"""From a TOML file to a trained run: configs, what they build, earlier runs to begin with, sweeps."""

from jaxpg.experiments.build import Experiment, build
from jaxpg.experiments.config import Config, load_config, make_env, resolve_config
from jaxpg.experiments.grid import parse_grid, plan_grid
from jaxpg.experiments.warm_start import build_experiment

__all__ = [
    "Config",
    "Experiment",
    "build",
    "build_experiment",
    "load_config",
    "make_env",
    "parse_grid",
    "plan_grid",
    "resolve_config",
]
