"""Checkpoints: the whole state of a run on disk, complete or not there at all.

A run keeps two, the `last` one and the `best` one by evaluation return. Each is a folder `checkpoints/<steps>` with the
arrays, written by orbax, and a `manifest.json` that is written last and makes the folder count: it says what is stored
and how long each file is, with its checksum. A process may be killed between any two instructions; what is found
afterwards is a checkpoint that was completely written, never a part of one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.errors import UserError
from jaxpg.types import Tree

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
OVERHEAD = 1 << 16  # bytes of orbax's own and of the manifest


class Checkpoint(NamedTuple):
    """A complete checkpoint on disk.

    path: its folder.
    steps: environment steps consumed when it was taken.
    score: the evaluation return then, minus infinity where there was no evaluation.
    about: whatever `save` was told to keep beside the arrays.
    """

    path: Path
    steps: int
    score: float
    about: dict[str, Any]


def save(folder: Path, state: Tree, *, steps: int, score: float | None = None, about: dict[str, Any]) -> Checkpoint:
    """Write a checkpoint, then delete all others but the best.

    Args:
        folder: where the checkpoints of this run are.
        state: a tree of arrays, also of random keys; it is copied to the host first.
        steps: environment steps consumed so far; names the checkpoint.
        score: the evaluation return of `state`, if it was evaluated.
        about: JSON to keep with it.

    Raises:
        UserError: it could not be written; those written before are as they were.
    """
    path = folder / f"{steps:012d}"
    arrays = _arrays(state)
    try:
        _forget(path)
        path.mkdir(parents=True)
        _reserve(path / "reserved", sum(x.nbytes for x in arrays.values()) + OVERHEAD)
        _write_arrays(path / "state", arrays)
        manifest = {
            "steps": steps,
            "score": score,
            "about": about,
            "arrays": {name: _describe(x) for name, x in arrays.items()},
            "files": {str(f.relative_to(path)): _checksum(f) for f in sorted(path.rglob("*")) if f.is_file()},
        }
        (path / "manifest.tmp").write_text(json.dumps(manifest, indent=1))
        os.replace(path / "manifest.tmp", path / MANIFEST)
    except Exception as error:  # orbax wraps what the system says in errors of many types
        kept = find(folder)
        kept_words = f"the last good one, {kept.path}, is intact" if kept else "there was none before"
        raise UserError(f"The checkpoint {path} could not be written ({_reason(error)}); {kept_words}.") from error
    _prune(folder)
    return Checkpoint(path, steps, -np.inf if score is None else score, about)


def find(folder: Path, which: str = "last") -> Checkpoint | None:
    """The `last` or the `best` complete checkpoint of a run, None if there is none. Among equals the later is best."""
    complete = sorted(_complete(folder), key=lambda checkpoint: checkpoint.steps)
    if which == "best":
        complete.sort(key=lambda checkpoint: checkpoint.score)
    return complete[-1] if complete else None


def restore(checkpoint: Checkpoint, like: Tree) -> Tree:
    """The state that was saved, as arrays on the host, bit for bit.

    Args:
        checkpoint: what `find` or `save` returned.
        like: a tree of the same structure, shapes and dtypes (`jax.eval_shape` makes one).

    Raises:
        UserError: the checkpoint is damaged, or of another structure than `like`; says which part.
    """
    manifest = json.loads((checkpoint.path / MANIFEST).read_text())
    for name, expected in manifest["files"].items():
        file = checkpoint.path / name
        if not file.exists() or _checksum(file) != expected:
            raise _unusable(checkpoint.path, name, "damaged" if file.exists() else "missing")
    _refuse_differences(checkpoint, manifest["arrays"], like)
    with _orbax() as checkpointer:
        arrays = checkpointer.restore(checkpoint.path.absolute() / "state") or {}
    leaves, structure = jax.tree.flatten(like)
    names = _names(like)
    restored = [
        _as_leaf(arrays[name] if name in arrays else np.zeros(_data(leaf).shape, leaf.dtype), leaf)
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, restored)


def _reserve(path: Path, size: int) -> None:
    """Raise an OSError if there is no room for so many bytes: of a full disk orbax's threads print many tracebacks."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        path.unlink()


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    arrays = {name: x for name, x in arrays.items() if x.size}  # orbax refuses arrays without elements
    with _quiet(), _orbax() as checkpointer:
        checkpointer.save(path.absolute(), arrays)


def _orbax() -> Any:
    """Orbax for whole arrays on the host, in this process alone: of several, it would wait for the others."""
    import orbax.checkpoint as ocp

    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process-{me}"
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep orbax from printing the traceback of an error that is raised, and told in a sentence, anyway."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _names(tree: Tree) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what is stored for a leaf."""
    return jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _arrays(state: Tree) -> dict[str, np.ndarray]:
    leaves = [jax.random.key_data(x) if _is_key(x) else x for x in jax.tree.leaves(state)]
    return dict(zip(_names(state), jax.device_get(leaves), strict=True))


def _as_leaf(array: np.ndarray, leaf: Any) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(array)) if _is_key(leaf) else array


def _describe(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _refuse_differences(checkpoint: Checkpoint, stored: dict[str, str], like: Tree) -> None:
    """Raise a UserError naming the first leaf that is stored differently than it is wanted."""
    wanted = {name: _describe(_data(leaf)) for name, leaf in zip(_names(like), jax.tree.leaves(like), strict=True)}
    different = [name for name in sorted(stored | wanted) if stored.get(name) != wanted.get(name)]
    if different:
        name = different[0]
        more = f" ({len(different) - 1} more arrays differ)" if len(different) > 1 else ""
        raise UserError(
            f"The checkpoint {checkpoint.path} is of another learner: the array {name} is {stored.get(name, 'absent')} "
            f"in it, but {wanted.get(name, 'absent')} here{more}."
        )


def _complete(folder: Path) -> Iterator[Checkpoint]:
    for path in folder.glob(f"*/{MANIFEST}"):
        try:
            manifest = json.loads(path.read_text())
        except ValueError:
            raise _unusable(path.parent, MANIFEST, "damaged") from None
        score = -np.inf if manifest["score"] is None else manifest["score"]
        yield Checkpoint(path.parent, manifest["steps"], score, manifest["about"])


def _unusable(path: Path, file: str, state: str) -> UserError:
    return UserError(
        f"The checkpoint {path} cannot be used: its file {file} is {state}. Delete the folder to go on without it."
    )


def _prune(folder: Path) -> None:
    """Delete all but the last and the best, and what a killed process left half-written."""
    keep = {checkpoint.path for which in ("last", "best") if (checkpoint := find(folder, which))}
    for path in folder.iterdir():
        if path not in keep:
            _forget(path)


def _forget(path: Path) -> None:
    """Delete a checkpoint, the manifest first, so that the rest never passes for a whole one."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _checksum(file: Path) -> list[int]:
    """Length and CRC-32, read in pieces."""
    crc, size = 0, 0
    with file.open("rb") as stream:
        while piece := stream.read(1 << 22):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return [size, crc]


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]
