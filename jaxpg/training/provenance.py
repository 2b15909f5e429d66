"""Provenance of a run: versions, processor, devices, commit."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jaxpg", "jax", "jaxlib", "flax", "optax", "gymnax", "numpy")


def describe_machine(devices: Sequence[jax.Device] | None = None) -> dict[str, Any]:
    """Versions of Python and packages, processor, devices (by default all), time, and the commit in a checkout."""
    versions = {name: metadata.version(name) for name in PACKAGES if _installed(name)}
    return {
        "python": platform.python_version(),
        **versions,
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "devices": [device.device_kind for device in devices or jax.devices()],
        "commit": commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def machines(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The machines of run.json files for a report: "machine", and "machine 2", ... where something differs.

    Of machines that differ only in when they began, or in the directory, the first stands for all.
    """
    different: dict[str, Mapping[str, Any]] = {}
    for machine in found:
        shown = {name: x for name, x in machine.items() if name != "directory"}
        different.setdefault(repr({name: x for name, x in shown.items() if name != "started"}), shown)
    return {"machine" if i == 1 else f"machine {i}": x for i, x in enumerate(different.values(), start=1)}


def _cpu() -> str:
    """Name of the processor, on x86 with family and model: several generations are called "AMD EPYC" alike."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text("utf-8", "replace").partition("\n\n")[0]
        found = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in first.splitlines())}
        if "model name" in found:
            numbers = [f"{key.split()[-1]} {found[key]}" for key in ("cpu family", "model") if key in found]
            return ", ".join([found["model name"], *numbers])
    return platform.processor()


@functools.cache
def commit() -> str | None:
    """Commit of the checkout that holds this package, marked `-dirty` if files were changed; None outside of one.

    It is that of the first call of a process: what is committed later is not what runs.
    """
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
    except OSError:  # git is not installed
        return None
    return described.stdout.strip() or None


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
