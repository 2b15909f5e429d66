"""Checkpoints: the whole state of a run on disk, either complete or absent.

A run keeps two, the `last` one and the `best` one by evaluation return. Each is a folder `checkpoints/<steps>` with the
arrays and a `manifest.json` with their names, shapes and dtypes, the length and checksum of every file, and a checksum
of itself. The manifest is written last, when all else is on the disk, and a folder without one is no checkpoint. So a
process may be killed at any instruction: every checkpoint that is found afterwards is complete.

What else someone puts into `checkpoints`, or into a checkpoint, is neither read nor deleted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.errors import UserError
from jaxpg.training import array_files, manifests
from jaxpg.training.array_files import error_reason
from jaxpg.training.manifests import Manifest
from jaxpg.types import Tree

CHECKPOINTS = "checkpoints"
NAME = re.compile(r"\d{12}")


class Checkpoint(NamedTuple):
    """A complete checkpoint on disk.

    path: its folder.
    steps: environment steps that each seed of its state has consumed; no more than `total_steps`, beyond which the last
        iteration may have gone.
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
        steps: environment steps that every seed has taken, all but those beyond a total; names the checkpoint.
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
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not written through")
        path.mkdir(parents=True, exist_ok=True)
        array_files.write(path / manifests.STATE, arrays)
        manifests.write(path, arrays, steps=steps, score=rank if np.isfinite(rank) else None, about=about)
    except Exception as error:  # orbax wraps errors of the system in many types
        with contextlib.suppress(OSError):
            _delete(path)
        last = find(folder)
        intact = f"the last good one, {last.path}, is intact" if last else "there was none before"
        raise UserError(f"The checkpoint {path} could not be written ({error_reason(error)}); {intact}.") from error
    prune(folder)
    return Checkpoint(path, steps, rank, about)


def find(folder: Path, which: str = "last") -> Checkpoint | None:
    """The `last` or the `best` complete checkpoint of a run, None if there is none; the later of equally good ones.

    Raises:
        UserError: the folder or a manifest cannot be read; names it.
    """
    complete = []
    for path in _complete(folder):
        try:
            manifest = _read_manifest(path)
        except UserError:
            if _has_manifest(path):
                raise
            continue  # deleted since, by the run that still trains
        complete.append(Checkpoint(path, manifest.steps, _rank(manifest.score), manifest.about))
    if which == "best":
        complete.sort(key=lambda checkpoint: checkpoint.score)
    return complete[-1] if complete else None


def exists(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is still there: a run that trains deletes it when a later one takes its place."""
    return _has_manifest(checkpoint.path)


def restore(checkpoint: Checkpoint, like: Tree) -> Tree:
    """The state that was saved, as arrays on the host, bit for bit.

    Args:
        checkpoint: from `find` or `save`.
        like: a tree of the structure, shapes and dtypes of the state, such as `jax.eval_shape` returns.

    Raises:
        UserError: a file of the checkpoint is damaged or missing, or an array differs from `like`; names it.
    """
    manifest = check(checkpoint)
    _refuse_differences(checkpoint, manifest.arrays, like)
    arrays = _stored_arrays(checkpoint.path, manifest)
    leaves, structure = jax.tree.flatten(like)
    restored = [
        _as_leaf(arrays[name] if name in arrays else np.zeros(_stored_shape(leaf).shape, leaf.dtype), leaf)
        for name, leaf in zip(_names(like), leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, restored)


def check(checkpoint: Checkpoint) -> Manifest:
    """The manifest of a checkpoint, all files of which are as it says.

    Raises:
        UserError: a file is damaged or missing; names it.
    """
    manifest = _read_manifest(checkpoint.path)
    if damage := manifests.damage(checkpoint.path, manifest):
        raise unusable(checkpoint.path, damage)
    return manifest


def _stored_arrays(path: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint that have elements.

    Raises:
        UserError: they cannot be read, or are not those of the manifest.
    """
    try:
        arrays = array_files.read(path / manifests.STATE)
    except ValueError as error:
        raise unusable(path, f"its arrays cannot be read ({error})") from error
    expected = {name: kind for name, kind in manifest.arrays.items() if not manifests.is_empty(kind)}
    if {name: manifests.describe(x) for name, x in arrays.items()} != expected:
        raise unusable(path, "its arrays are not those of its manifest")
    return arrays


def unusable(path: Path, damage: str) -> UserError:
    """The error for a damaged checkpoint; says which other one is intact.

    Args:
        path: the folder of the checkpoint.
        damage: what is wrong with it, as "its file manifest.json is damaged".
    """
    others = [other for other in _complete(path.parent) if other != path and _is_intact(other)]
    if others:
        advice = f"Delete the folder to go on from {others[-1]}, which is intact."
    else:
        advice = "There is no other one: restore its files from a backup, or train a new run with another --out."
    return UserError(f"The checkpoint {path} cannot be used: {damage}. {advice}")


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


def _refuse_differences(checkpoint: Checkpoint, stored: dict[str, str], like: Tree) -> None:
    """Raise a UserError that names the first array whose stored shape or dtype differs from `like`."""
    expected = {
        name: manifests.describe(_stored_shape(leaf))
        for name, leaf in zip(_names(like), jax.tree.leaves(like), strict=True)
    }
    different = [name for name in sorted(stored | expected) if stored.get(name) != expected.get(name)]
    if different:
        name = different[0]
        more = f" ({len(different) - 1} more arrays differ)" if len(different) > 1 else ""
        raise UserError(
            f"The checkpoint {checkpoint.path} is of another learner: the array {name} is {stored.get(name, 'absent')} "
            f"in it, but {expected.get(name, 'absent')} here{more}."
        )


def _complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, by their steps.

    Raises:
        UserError: a folder cannot be read.
    """
    return [path for path in _folders(folder) if _has_manifest(path)]


def _folders(folder: Path) -> list[Path]:
    """The folders of checkpoints, complete or not, by their steps; what has another name is not jaxpg's."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"{folder}, the folder of a run's checkpoints, cannot be read ({error.strerror}). Restore it from a "
            "backup, or train a new run with another --out."
        ) from error
    return [folder / name for name in sorted(names) if NAME.fullmatch(name)]


def _has_manifest(path: Path) -> bool:
    try:
        os.lstat(path / manifests.MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UserError(f"The checkpoint {path} cannot be read ({error.strerror}). Make it readable.") from error
    return True


def _read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in a folder.

    Raises:
        UserError: it is damaged.
    """
    try:
        return manifests.read(path)
    except ValueError as error:
        raise unusable(path, f"its file {manifests.MANIFEST} is damaged ({error})") from None


def _is_intact(path: Path) -> bool:
    try:
        return manifests.damage(path, manifests.read(path)) is None
    except ValueError:
        return False


def _rank(score: float | None) -> float:
    """The number that checkpoints are ranked by; NaN, which older versions stored, has no place in an order."""
    return score if score is not None and np.isfinite(score) else -np.inf


def prune(folder: Path) -> None:
    """Delete all checkpoints but the last and the best, and incomplete ones, which killed processes left."""
    keep = {checkpoint.path for which in ("last", "best") if (checkpoint := find(folder, which))}
    for path in _folders(folder):
        if path not in keep:
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a checkpoint, the manifest first, so that the rest never counts as complete.

    Only what `save` writes is deleted, and the folder if nothing else is in it.
    """
    if path.is_symlink() or not path.is_dir():
        return
    (path / manifests.MANIFEST).unlink(missing_ok=True)
    _delete_rest(path)


def _delete_rest(path: Path) -> None:
    for name in (manifests.UNFINISHED, array_files.RESERVED):
        (path / name).unlink(missing_ok=True)
    for written in path.glob(f"{manifests.STATE}*"):  # while orbax writes, the folder has another ending
        shutil.rmtree(written, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.rmdir()
