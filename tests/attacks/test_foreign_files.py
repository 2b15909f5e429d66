"""Metrics that a checkpoint cannot vouch for, files of others in the way, and disks that fill up: nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from toy_learner import run

from jaxpg.errors import UserError
from jaxpg.files import replace_file
from jaxpg.training import checkpoint, lock, run_directory


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of a run, and what its first half wrote."""
    folder = tmp_path_factory.mktemp("half")
    run(folder / "run", total_steps=8)
    return folder / "run"


@pytest.fixture
def begun(half: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(half, tmp_path / "run"))


def as_link(path: Path) -> None:
    path.rename(path.with_name("theirs"))
    path.symlink_to("theirs")


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (Path.unlink, r"metrics\.jsonl cannot be read: No such file or directory"),
    "empty": (
        lambda path: path.write_bytes(b""),
        r"it has 0 bytes, and the last checkpoint counted [\d,]+\. Restore it",
    ),
    "short": (lambda path: path.write_bytes(path.read_bytes()[:-9]), r"it has [\d,]+ bytes, and the last checkpoint"),
    "of another run": (
        lambda path: path.write_bytes(path.read_bytes().replace(b"1", b"2") * 2),
        r"its first [\d,]+ bytes are not the rows that the last checkpoint counted",
    ),
    "with notes": (
        lambda path: path.write_bytes(path.read_bytes() + b"my notes\n"),
        r"line \d+ is not a row of metrics: it is not JSON",
    ),
    "a link": (as_link, "symbolic link"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_metrics_that_the_checkpoint_cannot_vouch_for(begun: Path, how: str) -> None:
    """A sentence says what the checkpoint counted and what the file has; nothing is filled up, cut off or written."""
    spoil, words = SPOILT[how]
    spoil(begun / "metrics.jsonl")
    before = contents(begun)
    with pytest.raises(UserError, match=words):
        run(begun, resume=True)
    assert contents(begun) == before


def test_rows_after_the_last_checkpoint_are_written_again(begun: Path, half: Path) -> None:
    """Also behind a line that was cut off, or that a file system filled with NUL bytes when the power failed."""
    good = (begun / "metrics.jsonl").read_bytes()
    for tail in (b"", good.splitlines(keepends=True)[-1], good[:100], bytes(300)):
        (begun / "metrics.jsonl").write_bytes(good + tail)
        run(begun, resume=True, total_steps=8)
        assert (begun / "metrics.jsonl").read_bytes() == good


def test_a_checkpoint_of_an_earlier_version_has_only_a_length(begun: Path) -> None:
    (manifest,) = begun.glob("checkpoints/*/manifest.json")
    fields = json.loads(manifest.read_text())
    del fields["checksum"], fields["about"]["checksum"]
    manifest.write_text(json.dumps(fields))
    run(begun, resume=True, total_steps=12)
    metrics = begun / "metrics.jsonl"
    assert checkpoint.find(begun / "checkpoints").about["bytes"] == metrics.stat().st_size
    manifest = next(iter(begun.glob("checkpoints/*/manifest.json")))
    assert "checksum" in json.loads(manifest.read_text())["about"]
    run(begun, resume=True, total_steps=16)


def test_rows_are_on_the_disk_before_the_checkpoint_that_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, save = os.fsync, checkpoint.save

    def note_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_save(*arguments: object, **settings: object) -> None:
        events.append("save")
        save(*arguments, **settings)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(checkpoint, "save", note_save)
    run(tmp_path, total_steps=8)
    saves = [i for i, event in enumerate(events) if event == "save"]
    assert saves
    assert all(events[i - 1] == "metrics.jsonl" for i in saves)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", run_directory.WRITTEN)
def test_a_foreign_file_by_a_name_that_a_run_writes(tmp_path: Path, name: str, resume: bool) -> None:
    """Where there is no run, nothing that has such a name is overwritten; nor does a link there lead anywhere."""
    (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=rf"holds a {name} but no run|checkpoints, .* cannot be read \(Not a directory"):
        run(tmp_path, resume=resume)
    assert contents(tmp_path) == before
    (tmp_path / name).rename(tmp_path / "theirs")
    (tmp_path / name).symlink_to("theirs")
    with pytest.raises(UserError, match=r"is a symbolic link|cannot be read \(Not a directory"):
        run(tmp_path, resume=resume)
    assert (tmp_path / "theirs").read_text() == "mine"


def test_only_the_file_itself_is_replaced(tmp_path: Path) -> None:
    """Whatever else is in its folder, however long its name is, and whatever cannot be written into it."""
    (tmp_path / "a.json.tmp").write_text("mine")
    replace_file(tmp_path / "a.json", "{}")
    replace_file(tmp_path / ("b" * 254), "{}")
    with pytest.raises(UnicodeEncodeError):
        replace_file(tmp_path / "a.json", "\ud800")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is not a regular file"):
        replace_file(tmp_path / "pipe", "{}")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "pipe").unlink()
    assert contents(tmp_path) == {
        str(tmp_path / name): text for name, text in (("a.json.tmp", b"mine"), ("a.json", b"{}"), ("b" * 254, b"{}"))
    }


def test_a_lock_that_is_a_link(tmp_path: Path) -> None:
    """It is not written through, and stays where it is."""
    (tmp_path / "theirs").write_text("mine")
    (tmp_path / lock.LOCK).symlink_to("theirs")
    with pytest.raises(UserError, match=r"jaxpg\.lock is a symbolic link"), lock.locked(tmp_path):
        pass
    assert (tmp_path / "theirs").read_text() == "mine"
    assert (tmp_path / lock.LOCK).is_symlink()


def test_a_directory_that_is_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("run")
    with pytest.raises(UserError, match="run is a link to nothing"), lock.locked(tmp_path / "run"):
        pass


def test_a_file_where_the_events_go(begun: Path) -> None:
    """It is named, and the metrics are not left open."""
    shutil.rmtree(begun / "tensorboard")
    (begun / "tensorboard").write_text("mine")
    with pytest.raises(UserError, match=r"tensorboard is not a directory\. Remove it"):
        run(begun, resume=True)
    opened = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert str((begun / "metrics.jsonl").resolve()) not in opened
    assert (begun / "tensorboard").read_text() == "mine"


def test_a_checkpoint_by_another_name_is_none(tmp_path: Path, half: Path) -> None:
    """Someone keeps a copy of one where a run will be."""
    (saved,) = (half / "checkpoints").iterdir()
    shutil.copytree(saved, tmp_path / "checkpoints" / "keep")
    assert not run_directory.has_checkpoint(tmp_path)
    assert run_directory.has_checkpoint(half)


def test_strangers_in_the_folders_of_a_run_are_left_alone(tmp_path: Path) -> None:
    """A folder of others from the start, which no run writes to, and .DS_Store in every folder of a run."""
    (tmp_path / "notes").write_text("mine")
    run(tmp_path, total_steps=8)
    for folder in [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]:
        (folder / ".DS_Store").write_bytes(b"finder")
    (tmp_path / "checkpoints" / "mine").mkdir()
    (tmp_path / "checkpoints" / "mine" / "notes").write_text("mine")
    run(tmp_path, resume=True)
    assert (tmp_path / "checkpoints" / ".DS_Store").exists()
    assert (tmp_path / "checkpoints" / "mine" / "notes").read_text() == "mine"
    assert (tmp_path / "notes").read_text() == "mine"


FILL = """
import sys
from pathlib import Path
import numpy as np
from jaxpg.errors import UserError
from jaxpg.files import replace_file
from jaxpg.training import checkpoint

disk = Path(sys.argv[1])
few, many = ({f"w{i}": np.random.rand(60) for i in range(n)} for n in (3, 300))
checkpoint.save(disk / "checkpoints", few, steps=1, about={})
for room in range(4, 1800, 90):
    fill = disk / "fill"
    fill.write_bytes(b"x" * 1024 * int(sys.argv[2]))
    with fill.open("r+b") as file:
        file.truncate(fill.stat().st_size - 1024 * room)
    for size, state in (("few", few), ("many", many)):
        try:
            checkpoint.save(disk / "checkpoints", state, steps=2, about={})
        except UserError as error:
            print("sentence", size, room, error)
            assert checkpoint.find(disk / "checkpoints").steps == 1
            assert [path.name for path in (disk / "checkpoints").iterdir()] == ["000000000001"]
        else:
            print("saved", size, room)
            checkpoint._delete(disk / "checkpoints" / "000000000002")
            checkpoint.save(disk / "checkpoints", few, steps=1, about={})
    fill.unlink()
"""


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 2 MiB, where this user may mount one."""
    with tempfile.TemporaryDirectory() as name:
        command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", name]
        try:
            mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            mounted = False
        if not mounted:
            pytest.skip("a file system can be mounted by root on Linux only")
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--lazy", name], check=True)


@pytest.mark.full
def test_a_full_disk_is_one_sentence_however_full_it_is(small_disk: Path) -> None:
    """Of few arrays and of many, which take more room than their bytes; orbax's threads print nothing."""
    room = os.statvfs(small_disk)
    kibibytes = room.f_bavail * room.f_frsize // 1024 - 64  # without the first checkpoint
    ended = subprocess.run(
        [sys.executable, "-c", FILL, str(small_disk), str(kibibytes)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    lines = ended.stdout.splitlines()
    assert len(lines) == 2 * len(range(4, 1800, 90))
    refused = [line for line in lines if line.startswith("sentence")]
    assert 10 < len(refused) < len(lines) - 10
    assert all("No space left on device" in line and "000000000001, is intact" in line for line in refused)
