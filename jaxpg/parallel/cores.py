"""The cores of a CPU as devices."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax


def one_device_per_core(at_least: int = 1) -> None:
    """Make every core of a CPU an XLA device, before jax computes anything.

    With a single device, XLA's threads share small matrices and waste about a third of two cores; with one device per
    core and the seeds split over them they do not. A number that the user has set is kept, and so are the devices if
    jax was used before in this process.

    Args:
        at_least: make so many devices, where there are fewer cores.
    """
    config: Any = jax.config
    if config.jax_num_cpu_devices < 0:
        with contextlib.suppress(RuntimeError):  # raised if jax was used before in this process
            jax.config.update("jax_num_cpu_devices", max(at_least, num_cores()))


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
