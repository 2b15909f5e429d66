"""Environments: gymnax's, tabular ones whose P and R are known, probes, and wrappers."""

from jaxpg.envs.adapter import default_settings, from_gymnax, make, names, register

__all__ = ["default_settings", "from_gymnax", "make", "names", "register"]
