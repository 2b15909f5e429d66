"""Damaged run directories: every command that reads a damaged file ends with one sentence and changes nothing.

A table of files x kinds of damage x commands. Where a command does not need the file, it is not in the table.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import toy_learner
from refusals import refused

from jaxpg.cli.main import main

TINY = ["--steps", "64", "--set", "num_envs=4", "--set", "evaluations=1", "--set", "evaluation_episodes=4"]
RECORDS = "".join(
    json.dumps({"prompt": f"{word}=", "answer": word[::-1]}) + "\n" for word in ("abc", "bca", "cab", "aab")
)
TASK = """
environment = "json_lines"
environment_settings = { path = "data.jsonl", held_out = 0.5, max_tokens = 4 }
total_steps = 16
evaluations = 1
evaluation_episodes = 4
network = { kind = "transformer", width = 8, layers = 1, heads = 2, kv_heads = 1 }

[sft]
batch_size = 4
"""
GRID = ["--grid", "learning_rate=0.1,0.2"]
PLAN = {
    "task": "catch",
    "algorithm": "a2c",
    "grid": {"learning_rate": [0.1, 0.2]},
    "settings": {"total_steps": 64, "num_envs": 4, "evaluations": 1, "evaluation_episodes": 4},
    "waves": [2],
}
COMMANDS = {
    "eval": ["eval", "a2c", "--episodes", "4"],
    "play": ["play", "a2c", "--gif", "x.gif"],
    "plot": ["plot", "a2c", "--out", "x.png"],
    "resume": ["train", "catch", "a2c", "--out", "a2c", "--resume", "--quiet"],
    "compare": ["compare", "catch", "a2c", "--out", ".", "--resume", "--quiet"],
    "from": ["train", "catch", "a2c", "--from", "./a2c", "--out", "new", "--quiet", *TINY],
    "sample": ["sample", "sft"],
    "eval text": ["eval", "sft", "--episodes", "4"],
    "resume text": ["train", "task.toml", "sft", "--out", "sft", "--resume", "--steps", "32", "--quiet"],
    "from text": ["train", "task.toml", "sft", "--from", "./sft", "--out", "new", "--quiet"],
    "sweep": ["sweep", "catch", "a2c", *GRID, "--out", "sweep", "--resume", "--quiet", *TINY],
}
READERS = {
    "a2c/config.toml": ("eval", "play", "plot", "resume", "compare", "from"),
    "a2c/checkpoints/*/manifest.json": ("eval", "play", "resume", "compare", "from"),
    "a2c/checkpoints/*/state/_METADATA": ("eval", "play", "resume", "compare", "from"),
    "a2c/metrics.jsonl": ("play", "plot", "resume", "compare"),
    "a2c/run.json": ("resume", "compare"),
    "sft/config.toml": ("sample", "eval text", "resume text", "from text"),
    "sft/vocabulary.json": ("sample", "eval text", "resume text", "from text"),
    "sft/samples/*.json": ("resume text",),
    "sweep/plan.json": ("sweep",),
}
INTEGER = re.compile(rb"(?<=[\[ ])\d+(?=[,\]\n])")
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda good: b"",
    "binary": lambda good: bytes(range(256)) * 4 + b"\n",
    "NUL bytes": lambda good: bytes(len(good)) + b"\n",
    "text": lambda good: b"It was here yesterday.\n",
    "truncated": lambda good: good[: len(good) // 2] + b"\n",
    "not UTF-8": lambda good: b"\xff\xfe" + good,
    "null": lambda good: b"null\n",
    "a number": lambda good: b"3\n",
    "of another type": lambda good: b'{"a": 1}\n' if good[:1] == b"[" else b"[1, [2]]\n",
    "nested deeply": lambda good: b"[" * 100_000 + b"]" * 100_000 + b"\n",
    "a huge number": lambda good: INTEGER.sub(b"9" * 400, good, count=3),
    "a number without end": lambda good: INTEGER.sub(b"9" * 5000, good, count=3),
    "numbers as text": lambda good: INTEGER.sub(b'"many"', good),
    "lists for numbers": lambda good: INTEGER.sub(b"[]", good),
}
HARMLESS = {  # there is no integer in it, or none that is read
    *product(["sft/vocabulary.json", "sft/samples/*.json"], ["a huge number", "a number without end"]),
    *product(["sft/vocabulary.json", "sft/samples/*.json", "a2c/run.json"], ["numbers as text", "lists for numbers"]),
    ("a2c/run.json", "a huge number"),
}
QUICK = {
    ("a2c/config.toml", "of another type", "plot"),
    ("a2c/config.toml", "a directory", "eval"),
    ("a2c/checkpoints/*/manifest.json", "truncated", "eval"),
    ("a2c/checkpoints/*/manifest.json", "numbers as text", "resume"),
    ("a2c/checkpoints/*/state/_METADATA", "binary", "resume"),
    ("a2c/metrics.jsonl", "NUL bytes", "plot"),
    ("a2c/metrics.jsonl", "empty", "resume"),
    ("a2c/run.json", "of another type", "resume"),
    ("sweep/plan.json", "lists for numbers", "sweep"),
}
STILL_TOML = {
    ("a2c/config.toml", damage, "plot") for damage in ("empty", "truncated", "numbers as text", "lists for numbers")
}  # and plot reads nothing of it
CASES = [
    pytest.param(file, damage, command, marks=[] if (file, damage, command) in QUICK else pytest.mark.full)
    for file, commands in READERS.items()
    for damage, command in product([*DAMAGES, "a directory", "unreadable"], commands)
    if (file, damage) not in HARMLESS and (file, damage, command) not in STILL_TOML
]


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of control, a2c, and a sweep that was just begun; not to be changed."""
    place = tmp_path_factory.mktemp("control")
    assert main(["train", "catch", "a2c", "--quiet", "--out", str(place / "a2c"), *TINY]) == 0
    (place / "sweep").mkdir()
    (place / "sweep" / "plan.json").write_text(json.dumps(PLAN, indent=1) + "\n")
    return place


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on a text task, sft; not to be changed."""
    place = tmp_path_factory.mktemp("text")
    (place / "task.toml").write_text(TASK)
    (place / "data.jsonl").write_text(RECORDS)
    with contextlib.chdir(place):
        assert main(["train", "task.toml", "sft", "--out", "sft", "--quiet"]) == 0
    return place


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A copy of the folder in which the file of the case is, as the working directory; other users may read it."""
    kind = "text" if request.node.callspec.params["file"].startswith("sft") else "control"
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        shutil.copytree(request.getfixturevalue(kind), name, dirs_exist_ok=True)
        for folder in (Path(name), *(path for path in Path(name).rglob("*") if path.is_dir())):
            folder.chmod(0o755)
        yield Path(name)


def contents(folder: Path) -> dict[str, bytes | None]:
    """All files below a folder, byte for byte; None for folders."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@contextlib.contextmanager
def damaged(path: Path, damage: str) -> Iterator[None]:
    """Damage a file; without its permissions, root becomes another user."""
    good, me = path.read_bytes(), os.geteuid()
    if damage == "a directory":
        path.unlink()
        path.mkdir()
    elif damage == "unreadable":
        path.chmod(0)
        os.seteuid(65534 if me == 0 else me)
    else:
        assert DAMAGES[damage](good) != good
        path.write_bytes(DAMAGES[damage](good))
    try:
        yield
    finally:
        os.seteuid(me)
        path.chmod(0o755)


@pytest.mark.parametrize(("file", "damage", "command"), CASES)
def test_one_sentence_names_the_file_and_nothing_changes(
    place: Path, file: str, damage: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = min(place.glob(file))
    before: dict[str, bytes | None] = {}
    with damaged(path, damage):
        if damage != "unreadable":
            before = contents(place)
        message = refused(capsys, *COMMANDS[command])
        if damage != "unreadable":
            assert contents(place) == before
    if damage == "unreadable" and "cannot be written to" in message:
        return  # the other user may not write there either, which is found first
    if damage == "unreadable" and "configs cannot be read" in message:
        pytest.skip("the other user cannot read this checkout")
    assert path.name in message or "has another config" in message  # one that was cut off is a config as well
    assert file.split("/")[0] in message  # the run


def test_a_run_of_a_learner_from_python_is_no_run_of_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy_learner.run(tmp_path / "toy", total_steps=8)
    out = ["--out", str(tmp_path / "new")]
    for command in (
        ["eval"],
        ["play", "--gif", "x.gif"],
        ["sample"],
        ["train", "catch", "a2c", *out, "--from"],
    ):
        message = refused(capsys, *command, str(tmp_path / "toy"))
        assert "toy/config.toml names no algorithm" in message
    assert not (tmp_path / "new").exists()
