"""Environments that live outside of the compiled program: Gymnasium's and EnvPool's, stepped by calls to the host."""

from jaxpg.envs.host.host_env import close_what_begins
from jaxpg.envs.host.packages import comes_in, default_settings, ids, is_of_this_script, make

__all__ = ["close_what_begins", "comes_in", "default_settings", "ids", "is_of_this_script", "make"]
