"""The versions of packages, for programs that run in different Pythons; needs nothing.

`PYTHON versions.py PACKAGE ...` prints those of that Python as JSON.
"""

from __future__ import annotations

import json
import platform
import sys
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


if __name__ == "__main__":
    print(json.dumps(versions(sys.argv[1:])))
