"""The versions of packages, for programs that run in different Pythons; needs nothing."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata


def versions(names: Iterable[str]) -> dict[str, str]:
    """Of Python, and of these packages where they are installed."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
