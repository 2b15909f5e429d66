"""Checkpoints: the whole state of a run on disk, either complete or absent.

A run keeps two, the `last` one and the `best` one by evaluation return. Each is a folder `checkpoints/<steps>` with the
arrays, written by orbax, and a `manifest.json` with their names, shapes and dtypes and the length and checksum of every
file. The manifest is written last, and a folder without one is no checkpoint. So a process may be killed at any
instruction: every checkpoint that is found afterwards is complete.
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
OVERHEAD_BYTES = 1 << 16  # of orbax's own files and of the manifest


class Checkpoint(NamedTuple):
    """A complete checkpoint on disk.

    path: its folder.
    steps: environment steps per seed that its state has consumed.
    score: evaluation return of its state, minus infinity if it was not evaluated or the return was not finite.
    about: JSON that was stored beside the arrays.
    """

    path: Path
    steps: int
    score: float
    about: dict[str, Any]


def save(folder: Path, state: Tree, *, steps: int, score: float | None = None, about: dict[str, Any]) -> Checkpoint:
    """Write a checkpoint, then delete all others but the best.

    Args:
        folder: of the checkpoints of this run.
        state: a tree of arrays, random keys among them; it is copied to the host first.
        steps: environment steps consumed so far; names the checkpoint.
        score: evaluation return of `state`, if it was evaluated; a return that is not finite ranks below all others.
        about: JSON to store beside the arrays.

    Raises:
        UserError: it could not be written; earlier checkpoints are intact.
    """
    path = folder / f"{steps:012d}"
    arrays = _host_arrays(state)
    rank = _rank(score)
    try:
        _delete(path)
        path.mkdir(parents=True)
        _reserve(path / "reserved", sum(x.nbytes for x in arrays.values()) + OVERHEAD_BYTES)
        _write_arrays(path / "state", arrays)
        manifest = {
            "steps": steps,
            "score": rank if np.isfinite(rank) else None,
            "about": about,
            "arrays": {name: _describe(x) for name, x in arrays.items()},
            "files": {str(f.relative_to(path)): _checksum(f) for f in sorted(path.rglob("*")) if f.is_file()},
        }
        (path / "manifest.tmp").write_text(json.dumps(manifest, indent=1))
        os.replace(path / "manifest.tmp", path / MANIFEST)
    except Exception as error:  # orbax wraps errors of the system in many types
        last = find(folder)
        intact = f"the last good one, {last.path}, is intact" if last else "there was none before"
        raise UserError(f"The checkpoint {path} could not be written ({_reason(error)}); {intact}.") from error
    _prune(folder)
    return Checkpoint(path, steps, rank, about)


def find(folder: Path, which: str = "last") -> Checkpoint | None:
    """The `last` or the `best` complete checkpoint of a run, None if there is none; the later of equally good ones."""
    complete = sorted(_complete(folder), key=lambda checkpoint: checkpoint.steps)
    if which == "best":
        complete.sort(key=lambda checkpoint: checkpoint.score)
    return complete[-1] if complete else None


def restore(checkpoint: Checkpoint, like: Tree) -> Tree:
    """The state that was saved, as arrays on the host, bit for bit.

    Args:
        checkpoint: from `find` or `save`.
        like: a tree of the structure, shapes and dtypes of the state, such as `jax.eval_shape` returns.

    Raises:
        UserError: a file of the checkpoint is damaged or missing, or an array differs from `like`; names it.
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
    restored = [
        _as_leaf(arrays[name] if name in arrays else np.zeros(_stored_shape(leaf).shape, leaf.dtype), leaf)
        for name, leaf in zip(_names(like), leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, restored)


def _reserve(path: Path, size: int) -> None:
    """Raise an OSError if the disk has less than `size` bytes left: orbax's threads would print many tracebacks."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        path.unlink()


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    arrays = {name: x for name, x in arrays.items() if x.size}  # orbax refuses arrays without elements
    with _silence_orbax(), _orbax() as checkpointer:
        checkpointer.save(path.absolute(), arrays)


def _orbax() -> Any:
    """Orbax for whole arrays on the host, in this process alone; by default it would wait for the other processes."""
    import orbax.checkpoint as ocp

    index = jax.process_index()
    this_process = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process-{index}"
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=this_process)
    return ocp.Checkpointer(handler, multiprocessing_options=this_process)


@contextlib.contextmanager
def _silence_orbax() -> Iterator[None]:
    """Keep orbax from logging the traceback of an error that it raises as well; `save` explains it in a sentence."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _names(tree: Tree) -> list[str]:
    """The names under which the leaves of a tree are stored: their paths."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _stored_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the array that is stored for a leaf: of a random key, its data."""
    return jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _host_arrays(state: Tree) -> dict[str, np.ndarray]:
    """The arrays that are stored for a state, by name."""
    leaves = [jax.random.key_data(x) if _is_key(x) else x for x in jax.tree.leaves(state)]
    return dict(zip(_names(state), jax.device_get(leaves), strict=True))


def _as_leaf(array: np.ndarray, leaf: Any) -> Any:
    """A stored array as the leaf it was."""
    return jax.random.wrap_key_data(jnp.asarray(array)) if _is_key(leaf) else array


def _describe(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _refuse_differences(checkpoint: Checkpoint, stored: dict[str, str], like: Tree) -> None:
    """Raise a UserError that names the first array whose stored shape or dtype differs from `like`."""
    expected = {
        name: _describe(_stored_shape(leaf)) for name, leaf in zip(_names(like), jax.tree.leaves(like), strict=True)
    }
    different = [name for name in sorted(stored | expected) if stored.get(name) != expected.get(name)]
    if different:
        name = different[0]
        more = f" ({len(different) - 1} more arrays differ)" if len(different) > 1 else ""
        raise UserError(
            f"The checkpoint {checkpoint.path} is of another learner: the array {name} is {stored.get(name, 'absent')} "
            f"in it, but {expected.get(name, 'absent')} here{more}."
        )


def _complete(folder: Path) -> Iterator[Checkpoint]:
    """The complete checkpoints in a folder, in no order."""
    for path in folder.glob(f"*/{MANIFEST}"):
        try:
            manifest = json.loads(path.read_text())
        except ValueError:
            raise _unusable(path.parent, MANIFEST, "damaged") from None
        yield Checkpoint(path.parent, manifest["steps"], _rank(manifest["score"]), manifest["about"])


def _rank(score: float | None) -> float:
    """The number that checkpoints are ranked by; NaN, which older versions stored, has no place in an order."""
    return score if score is not None and np.isfinite(score) else -np.inf


def _unusable(path: Path, file: str, state: str) -> UserError:
    return UserError(
        f"The checkpoint {path} cannot be used: its file {file} is {state}. Delete the folder to go on without it."
    )


def _prune(folder: Path) -> None:
    """Delete all checkpoints but the last and the best, and incomplete ones, which killed processes left."""
    keep = {checkpoint.path for which in ("last", "best") if (checkpoint := find(folder, which))}
    for path in folder.iterdir():
        if path not in keep:
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a checkpoint, the manifest first, so that the rest never counts as complete."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _checksum(file: Path) -> list[int]:
    """Length in bytes and CRC-32 of a file, read in pieces."""
    crc, size = 0, 0
    with file.open("rb") as stream:
        while piece := stream.read(1 << 22):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return [size, crc]


def _reason(error: Exception) -> str:
    """The operating system's message for an error, or the first line of its text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]
