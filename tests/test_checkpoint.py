"""Checkpoints: bit for bit what was saved, complete or absent, and a clear error where they cannot be used."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpg.errors import UserError
from jaxpg.training import array_files, checkpoint, manifests


class State(NamedTuple):
    params: Any
    counts: Any
    key: Any


def make_state(seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    return State(
        params={
            "w": jnp.asarray(rng.normal(size=(3, 50, 20)), jnp.float32),
            "a/b": [jnp.asarray(rng.normal(size=7), jnp.bfloat16), jnp.asarray([np.nan, np.inf, -0.0], jnp.float32)],
            "empty": jnp.zeros((0, 4)),
        },
        counts=(np.int32(seed), jnp.asarray([True, False]), jnp.arange(3, dtype=jnp.uint8), ()),
        key=jax.random.split(jax.random.key(seed), 2),
    )


def assert_bits(a: State, b: State) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def shapes(state: State) -> State:
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, state))


def save(folder: Path, steps: int, score: float | None = None) -> State:
    state = make_state(steps)
    checkpoint.save(folder, state, steps=steps, score=score, about={"steps": steps})
    return state


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = save(tmp_path, 3)
    found = checkpoint.find(tmp_path)
    assert (found.steps, found.score, found.about) == (3, -np.inf, {"steps": 3})
    assert_bits(checkpoint.restore(found, shapes(state)), state)
    assert state.params["a/b"][0].dtype == ml_dtypes.bfloat16


def test_only_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    scores = {1: 5.0, 2: 9.0, 3: None, 4: 2.0, 5: 9.0, 6: 8.0, 7: None}
    kept = {1: {1}, 2: {2}, 3: {2, 3}, 4: {2, 4}, 5: {5}, 6: {5, 6}, 7: {5, 7}}
    for steps, score in scores.items():
        save(tmp_path, steps, score)
        assert {int(path.name) for path in tmp_path.iterdir()} == kept[steps]
    assert checkpoint.find(tmp_path, "best").steps == 5
    assert checkpoint.find(tmp_path, "last").steps == 7


@pytest.mark.parametrize("score", [np.nan, np.inf, -np.inf])
def test_an_evaluation_that_is_not_finite_is_never_the_best(tmp_path: Path, score: float) -> None:
    save(tmp_path, 1, 5.0)
    save(tmp_path, 2, score)
    assert checkpoint.find(tmp_path, "best").steps == 1
    assert "NaN" not in (checkpoint.find(tmp_path).path / manifests.MANIFEST).read_text()
    save(tmp_path, 3, 6.0)
    assert checkpoint.find(tmp_path, "best").steps == 3


def test_a_stored_score_that_is_not_a_number_ranks_last(tmp_path: Path) -> None:
    """As an earlier version stored it, without a checksum of the manifest."""
    for steps, score in ((1, 6.0), (2, 5.0)):
        save(tmp_path, steps, score)
    manifest = checkpoint.find(tmp_path).path / manifests.MANIFEST
    fields = json.loads(manifest.read_text())
    del fields["checksum"]
    manifest.write_text(json.dumps(fields | {"score": float("nan")}))
    assert checkpoint.find(tmp_path, "best").steps == 1
    assert_bits(checkpoint.restore(checkpoint.find(tmp_path), shapes(make_state())), make_state(2))


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.find(tmp_path) is None
    assert checkpoint.find(tmp_path / "absent", "best") is None


class Killed(BaseException):
    """Stands for kill -9: nothing is caught, nothing is cleaned up."""


MOMENTS = {
    "before the arrays": ("array_files.write", False),
    "after the arrays": ("array_files.write", True),
    "while file checksums are taken": ("manifests._checksum", True),
    "before old ones are deleted": ("prune", False),
    "after old ones were deleted": ("prune", True),
    "while one is deleted": ("shutil.rmtree", False),
    "before the manifest counts": ("os.replace", False),
    "after the manifest counts": ("os.replace", True),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The one before or the new one, never a part; the next save deletes the rest."""
    save(tmp_path, 1)
    name, afterwards = MOMENTS[moment]
    modules = {"shutil": shutil, "os": os, "array_files": array_files, "manifests": manifests}
    module, _, function = name.rpartition(".")
    target = modules.get(module, checkpoint), function
    original = getattr(*target)

    def die(*args: Any, **kwargs: Any) -> None:
        # Orbax renames folders too; only the renaming of the manifest is meant.
        is_meant = name != "os.replace" or str(args[1]).endswith(manifests.MANIFEST)
        if afterwards or not is_meant:
            original(*args, **kwargs)
        if is_meant:
            raise Killed

    (tmp_path / "000000000002" / "state").mkdir(
        parents=True
    )  # left by an earlier kill, so that there is something to delete
    with monkeypatch.context() as patch:
        patch.setattr(*target, die)
        with pytest.raises(Killed):
            save(tmp_path, 2)
    found = checkpoint.find(tmp_path)
    complete = ("before old ones are deleted", "after old ones were deleted", "after the manifest counts")
    assert found.steps == (2 if moment in complete else 1)
    assert_bits(checkpoint.restore(found, shapes(make_state())), make_state(found.steps))
    save(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["000000000003"]


def test_a_half_deleted_checkpoint_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    rmtree = shutil.rmtree

    def die_halfway(path: Path, **_: Any) -> None:
        rmtree(path / "d")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die_halfway)
        with pytest.raises(Killed):
            save(tmp_path, 1)
    assert checkpoint.find(tmp_path) is None


def test_a_checkpoint_that_is_deleted_while_it_is_looked_for_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the process that trains: between the listing of the folder and the reading of the manifest."""
    save(tmp_path, 1)
    save(tmp_path / "later", 2)
    read = manifests.read

    def delete_first(path: Path) -> manifests.Manifest:
        if path.name == "000000000001":
            shutil.rmtree(path)
        return read(path)

    (tmp_path / "later" / "000000000002").rename(tmp_path / "000000000002")
    monkeypatch.setattr(manifests, "read", delete_first)
    found = checkpoint.find(tmp_path)
    assert found is not None
    assert found.steps == 2


def test_every_damaged_file_is_noticed(tmp_path: Path) -> None:
    """Cut in half, one bit flipped, or missing: the error names the file, whichever it is."""
    state = save(tmp_path, 1)
    found = checkpoint.find(tmp_path)
    files = [path for path in found.path.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) > 5
    for path in files:
        good = path.read_bytes()
        middle = len(good) // 2
        for bad in (good[:middle], good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :], None):
            path.write_bytes(bad) if bad is not None else path.unlink()
            if path.name == manifests.MANIFEST and bad is None:
                assert checkpoint.find(tmp_path) is None
            else:
                with pytest.raises(UserError, match=r"cannot be used: its file .* is (damaged|missing)"):
                    checkpoint.restore(checkpoint.find(tmp_path), shapes(state))
            path.write_bytes(good)
    assert_bits(checkpoint.restore(checkpoint.find(tmp_path), shapes(state)), state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s._replace(params=s.params | {"w": jnp.zeros((3, 50, 21))}), r"'w'.* is float32\[3, 50, 20\] in it"),
        (lambda s: s._replace(params=s.params | {"w": s.params["w"].astype(jnp.bfloat16)}), r"but bfloat16\["),
        (
            lambda s: s._replace(params=s.params | {"extra": jnp.zeros(2)}),
            r"'extra'.* is absent in it, but float32\[2\]",
        ),
        (lambda s: s._replace(counts=()), r"counts\[0\] is int32\[\] in it, but absent here \(2 more arrays differ\)"),
    ],
)
def test_another_structure_is_refused_with_the_name_of_an_array(tmp_path: Path, change: Any, words: str) -> None:
    state = save(tmp_path, 1)
    with pytest.raises(UserError, match=words):
        checkpoint.restore(checkpoint.find(tmp_path), shapes(change(state)))


def test_a_failed_save_raises_and_keeps_earlier_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(array_files, "write", no_room)
        with pytest.raises(UserError, match=r"No space left on device.*there was none before"):
            save(tmp_path, 1)
        patch.undo()
        state = save(tmp_path, 2)
        patch.setattr(array_files, "write", no_room)
        with pytest.raises(UserError, match=r"No space left on device.*000000000002, is intact"):
            save(tmp_path, 3)
    assert_bits(checkpoint.restore(checkpoint.find(tmp_path), shapes(state)), state)


def test_what_jaxpg_has_not_written_is_neither_read_nor_deleted(tmp_path: Path) -> None:
    """A stray file, a copy of a checkpoint, notes in a checkpoint that is deleted, a link by a checkpoint's name."""
    save(tmp_path, 1)
    elsewhere = tmp_path.parent / "elsewhere"
    shutil.copytree(tmp_path / "000000000001", elsewhere)
    shutil.copytree(tmp_path / "000000000001", tmp_path / "000000000001 copy")
    (tmp_path / ".DS_Store").write_bytes(b"finder")
    (tmp_path / "000000000001" / "notes.txt").write_text("mine")
    (tmp_path / "000000000000").symlink_to(elsewhere)
    (tmp_path / "202611220608").write_text("a file")
    theirs = contents(tmp_path / "000000000001 copy"), contents(elsewhere)
    with pytest.raises(UserError, match=r"000000000000 cannot be used: .*it belongs to another checkpoint"):
        checkpoint.find(tmp_path)
    (tmp_path / "000000000000").unlink()
    (tmp_path / "000000000003").symlink_to(tmp_path.parent)
    save(tmp_path, 2)
    assert checkpoint.find(tmp_path).steps == 2
    assert (tmp_path / ".DS_Store").read_bytes() == b"finder"
    assert [path.name for path in (tmp_path / "000000000001").iterdir()] == ["notes.txt"]
    assert (contents(tmp_path / "000000000001 copy"), contents(elsewhere)) == theirs
    assert (tmp_path / "202611220608").read_text() == "a file"
    with pytest.raises(UserError, match=r"000000000003 could not be written \(it is a symbolic link"):
        save(tmp_path, 3)
    assert (tmp_path / "000000000003").is_symlink()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["manifest.json", "state/_METADATA"])
def test_a_damaged_checkpoint_is_refused_with_the_name_of_the_intact_one(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1, 5.0)
    state = save(tmp_path, 2, 3.0)
    (tmp_path / "000000000002" / name).write_text("{}")
    with pytest.raises(
        UserError, match=rf"000000000002 cannot be used: .*{name}.*go on from .*000000000001, which is i"
    ):
        checkpoint.restore(checkpoint.find(tmp_path), shapes(state))
    (tmp_path / "000000000001" / name).write_text("{}")
    with pytest.raises(UserError, match="There is no other one"):
        checkpoint.restore(checkpoint.find(tmp_path), shapes(state))


@pytest.mark.parametrize(
    "change", [{"steps": 3}, {"score": 9.0}, {"about": {}}, {"arrays": {}}, {"checksum": 1}, {"x": 1}]
)
def test_a_manifest_is_checked_by_its_own_checksum(tmp_path: Path, change: dict[str, Any]) -> None:
    save(tmp_path, 2)
    manifest = tmp_path / "000000000002" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(UserError, match=r"manifest.json is damaged \(its content does not have the checksum"):
        checkpoint.find(tmp_path)


def test_arrays_that_a_manifest_does_not_list_are_noticed(tmp_path: Path) -> None:
    """Checksums and manifest agree, and yet the arrays are others: nothing is filled up with zeros."""
    state = save(tmp_path, 2)
    folder = tmp_path / "000000000002"
    shutil.rmtree(folder / "state")
    array_files.write(folder / "state", {"x": np.zeros(3)})
    arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in checkpoint._host_arrays(state).items()}
    manifests.write(folder, arrays, steps=2, score=None, about={})
    with pytest.raises(UserError, match="its arrays are not those of its manifest"):
        checkpoint.restore(checkpoint.find(tmp_path), shapes(state))


def test_a_checkpoint_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Power may fail at any time: every file is synced before the manifest has its name, and the folder after it."""
    synced: list[str] = []
    replace = os.replace

    def note_replace(source: Any, target: Any) -> None:
        if str(target).endswith(manifests.MANIFEST):
            synced.append("counts")
        replace(source, target)

    monkeypatch.setattr(manifests, "sync", lambda path: synced.append(str(path.relative_to(tmp_path))))
    monkeypatch.setattr(os, "replace", note_replace)
    save(tmp_path, 1)
    before, after = set(synced[: synced.index("counts")]), synced[synced.index("counts") + 1 :]
    folder = tmp_path / "000000000001"
    expected = {str(path.relative_to(tmp_path)) for path in (folder / "state", *(folder / "state").rglob("*"))}
    assert before == expected | {"000000000001/manifest.tmp"}
    assert after == ["000000000001", "."]
