"""The cores of a CPU as devices."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax

FORCED = "--xla_force_host_platform_device_count"
"""The flag by which XLA is told how many devices a CPU is."""


def one_device_per_core(at_least: int = 1) -> None:
    """Make every core of a CPU an XLA device, before jax computes anything.

    With a single device, XLA's threads share small matrices and waste about a third of two cores; with one device per
    core and the seeds split over them they do not. A number that the user has set is kept, be it jax's or that of
    XLA_FLAGS, which jax's would override; and so are the devices if jax was used before in this process.

    Args:
        at_least: make this many devices, where there are fewer cores.
    """
    config: Any = jax.config
    if config.jax_num_cpu_devices < 0 and FORCED not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # raised if jax was used before in this process
            jax.config.update("jax_num_cpu_devices", max(at_least, num_cores()))


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
