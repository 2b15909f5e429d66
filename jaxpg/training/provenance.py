"""What a run depends on besides its config: versions, processor, devices, commit."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jaxpg", "jax", "jaxlib", "flax", "optax", "gymnax", "numpy")


def describe_machine(devices: Sequence[jax.Device] | None = None) -> dict[str, Any]:
    """What a run depends on besides its config: versions, processor, devices (by default all that there are) and, from
    a checkout, the commit.
    """
    versions = {name: metadata.version(name) for name in PACKAGES if _installed(name)}
    return {
        "python": platform.python_version(),
        **versions,
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "devices": [device.device_kind for device in devices or jax.devices()],
        "commit": _commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _cpu() -> str:
    """What the processor calls itself."""
    with contextlib.suppress(OSError):
        models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        if models:
            return models[0].partition(":")[2].strip()
    return platform.processor()


def _commit() -> str | None:
    """The commit of the checkout that this package is run from, with a mark if it was changed since."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=False)
        if tracked.returncode:
            return None
        described = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # no git here
        return None
    return described.stdout.strip() or None


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
