"""Writing files completely or not at all, and writing settings as TOML."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxpg.errors import UserError

ANOTHER = "another directory with --out, in Python with out="
"""What both a command and `jaxpg.fit` may write to, in words."""


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a process that is killed leaves the old file or the new one.

    What is no regular file is neither written to nor replaced, nor is a symbolic link: it was made by someone else.

    Raises:
        OSError: it could not be written. The error names the file, which the system's own does not if the disk is full.
    """
    _refuse_link(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # of a directory the system says so
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file", str(path))
    encoded = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{secrets.token_hex(4)}.tmp")  # a name of its own
    try:
        with open(temporary, "xb") as file:
            file.write(encoded)
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def without_following(path: str, flags: int) -> int:
    """The `opener` of `open` for a file that may not be a symbolic link; an OSError if it is one."""
    _refuse_link(Path(path))
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _refuse_link(path: Path) -> None:
    """Raise an OSError if this is a symbolic link: it was made by someone else."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path.name} is a symbolic link, which is not written through", str(path))


def sync(path: Path) -> None:
    """Wait until a file, or the list of the entries of a folder, is on the disk: power may fail afterwards."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explain_os_error(run_dir: Path) -> Iterator[None]:
    """Turn an OSError while writing to `run_dir` into a UserError that says why and what to do."""
    try:
        yield
    except OSError as error:
        folders = [run_dir, *run_dir.parents]
        if isinstance(error, FileExistsError) and error.filename:  # a folder was to be made there
            folders.insert(0, Path(error.filename))
        if in_the_way := [x for x in folders if os.path.lexists(x) and not x.is_dir()]:
            what = "not a directory" if in_the_way[0].exists() else "a link to nothing"
            raise UserError(
                f"The directory {run_dir} cannot be written to: {in_the_way[0]} is {what}. Remove it, or choose "
                f"{ANOTHER}."
            ) from error
        reason = error.strerror or str(error)
        raise UserError(
            f"The directory {run_dir} cannot be written to ({reason}). Checkpoints that are in it stay as they are; "
            f"make room, or choose {ANOTHER}."
        ) from error


def toml_dumps(tree: Mapping[str, Any], prefix: str = "") -> str:
    """Nested tables of numbers, strings, booleans and lists as TOML; None is written as "none"."""
    plain = "".join(
        f"{_toml_key(key)} = {_toml_value(value)}\n" for key, value in tree.items() if not isinstance(value, Mapping)
    )
    tables = (
        f"\n[{prefix}{_toml_key(key)}]\n{toml_dumps(value, f'{prefix}{_toml_key(key)}.')}"
        for key, value in tree.items()
        if isinstance(value, Mapping)
    )
    return plain + "".join(tables)


def setting_text(value: Any) -> str:
    """A value of a setting as `--set` takes it: in TOML, but texts and none without quotation marks."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else _toml_value(value)


def _toml_key(key: str) -> str:
    """A key, quoted where it is no bare one."""
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _toml_string(key)


def _toml_value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_toml_key(str(key))} = {_toml_value(x)}" for key, x in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    return repr(value)


def _toml_string(text: str) -> str:
    """A string in quotes: as in JSON, but TOML has no surrogate pairs and wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as a single one, with dotted names; an empty one within another, as of a wrapper, is a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        is_table = isinstance(value, Mapping) and (value or not prefix)
        flat |= flatten(value, f"{prefix}{key}.") if is_table else {f"{prefix}{key}": value}
    return flat
