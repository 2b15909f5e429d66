"""Files: written whole or not at all, and settings as TOML."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxpg.errors import UserError


def toml_dumps(tree: Mapping[str, Any], prefix: str = "") -> str:
    """TOML of nested tables of numbers, strings, booleans and lists; None is written as "none"."""
    plain = "".join(f"{key} = {_toml_value(value)}\n" for key, value in tree.items() if not isinstance(value, Mapping))
    tables = (
        f"\n[{prefix}{key}]\n{toml_dumps(value, f'{prefix}{key}.')}"
        for key, value in tree.items()
        if isinstance(value, Mapping)
    )
    return plain + "".join(tables)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted names."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


@contextlib.contextmanager
def explain_os_error(run_dir: Path) -> Iterator[None]:
    """Say in a sentence what the system refused."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"The directory {run_dir} cannot be written to ({reason}). Checkpoints that are in it stay as they are; "
            "make room, or choose another directory with --out."
        ) from error


def _toml_value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool | str):  # JSON and TOML write these alike
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return repr(value)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file all at once, so that a killed process leaves the old one or the new one.

    Raises:
        OSError: it could not be written; it names the file, as the system itself does not where a disk is full.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
