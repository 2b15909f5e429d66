"""The manifest of a checkpoint: what its files have to be, with a checksum of each, and of the manifest itself."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpg.files import sync
from jaxpg.training import run_files

MANIFEST, UNFINISHED = "manifest.json", "manifest.tmp"
STATE = "state"  # the folder of the arrays


class Manifest(NamedTuple):
    """The fields of manifest.json.

    steps: environment steps per seed.
    score: evaluation return, None if it was not evaluated.
    about: JSON of the caller of `checkpoint.save`.
    arrays: name -> dtype and shape, as in "float32[3, 4]".
    files: path in the checkpoint -> length in bytes and CRC-32.
    """

    steps: int
    score: float | None
    about: dict[str, Any]
    arrays: dict[str, str]
    files: dict[str, list[int]]


FIELDS = run_files.record(
    steps=run_files.count,
    score=run_files.optional(run_files.number),  # an earlier version wrote NaN
    about=run_files.table,
    arrays=run_files.table_of(run_files.text),
    files=run_files.table_of(run_files.list_of(run_files.count, 2)),
)


def write(
    path: Path, arrays: Mapping[str, np.ndarray], *, steps: int, score: float | None, about: Mapping[str, Any]
) -> None:
    """Declare the checkpoint in a folder complete, once all its files are on the disk.

    Args:
        path: the folder, with the written arrays.
        arrays: the arrays by name.
        steps, score, about: as in `Manifest`.
    """
    written = sorted((path / STATE).rglob("*"))
    manifest = Manifest(
        steps=steps,
        score=score,
        about=dict(about),
        arrays={name: describe(x) for name, x in arrays.items()},
        files={str(file.relative_to(path)): _checksum(file) for file in written if file.is_file()},
    )
    fields = json.loads(json.dumps(manifest._asdict()))
    unfinished = path / UNFINISHED
    unfinished.write_text(json.dumps(fields | {"checksum": _checksum_of_fields(fields)}, indent=1))
    for each in (*written, path / STATE, unfinished):
        sync(each)
    os.replace(unfinished, path / MANIFEST)
    sync(path)
    sync(path.parent)


def read(path: Path) -> Manifest:
    """The manifest of the checkpoint in a folder, which is named after its steps.

    Raises:
        ValueError: it is damaged; says how.
    """
    return run_files.parse_file(path / MANIFEST, partial(_parse, int(path.name)))


def _parse(steps: int, content: bytes) -> Manifest:
    """A manifest from its JSON. An earlier version wrote no checksum."""
    stored = run_files.parse_json(content, run_files.table)
    if "checksum" in stored and stored.pop("checksum") != _checksum_of_fields(stored):
        raise ValueError("its content does not have the checksum that it states")
    if unknown := stored.keys() - set(Manifest._fields):
        raise ValueError(f"it has an unknown field {min(unknown)!r}")
    manifest = Manifest(**FIELDS("its content", stored))
    if manifest.steps != steps:
        raise ValueError(f"it belongs to another checkpoint, of {manifest.steps} steps")
    return manifest


def damage(path: Path, manifest: Manifest) -> str | None:
    """What is wrong with the files of a checkpoint; None if they are those that were written."""
    for name, expected in manifest.files.items():
        file = path / name
        try:
            if not file.exists():
                return f"its file {name} is missing"
            if _checksum(file) != expected:
                return f"its file {name} is damaged"
        except OSError as error:
            return f"its file {name} cannot be read ({error.strerror})"
    return None


def describe(x: Any) -> str:
    """Dtype and shape of an array, as in "float32[3, 4]"."""
    return f"{x.dtype}{list(x.shape)}"


def is_empty(description: str) -> bool:
    """Whether an array so described has no elements."""
    return "0" in re.findall(r"\d+", description.partition("[")[2])


def _checksum(file: Path) -> list[int]:
    """Length in bytes and CRC-32 of a file, read in pieces."""
    crc, size = 0, 0
    with file.open("rb") as stream:
        while piece := stream.read(1 << 22):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return [size, crc]


def _checksum_of_fields(fields: Mapping[str, Any]) -> int:
    """CRC-32 of the fields of a manifest, as JSON."""
    return zlib.crc32(json.dumps(fields).encode())
