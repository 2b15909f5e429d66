"""Random inputs at every boundary: exit code 0 or 2, one sentence, no traceback, nothing half-written, within seconds.

Nothing is trained: what passes all checks counts as accepted (boundary.attempt). The quick lane tries a few fixed
inputs of each kind and the full lane more. To try 10,000 fresh ones over all kinds:

    JAXPG_FUZZ=10000 pytest -m full tests/attacks/test_fuzz.py
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from boundary import attempt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpg import envs
from jaxpg.cli import parser
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments import parts
from jaxpg.experiments.config_file import TASKS, tasks
from jaxpg.experiments.signatures import options
from jaxpg.training import checkpoint

SETTINGS = sorted(
    {name for algorithm in configs.ALGORITHMS for name in configs.algorithm_options(algorithm)}
    | configs.task_options().keys()
    | {f"network.{name}" for network in parts.NETWORKS.values() for name in (*options(network), "kind")}
    | {"like", "task", "environment_settings.gravity", "wrappers.time_limit.steps", "pairs.slip_rate"}
)
ALGORITHMS, TASK_FILES = list(configs.ALGORITHMS), sorted(TASKS.glob("*.toml"))
PIECES = [bytes([x]) for x in b"[]{}=.,#\n\r\0\xff\"'0-"]
PIECES += [b"[[", b'"""', b"\x1b[31m", b"\\u0000", b"nan", b"inf", b"-1", b"1e999", b"9" * 40, b"0x", b"true", b"none"]
PIECES += [b"2020-01-01", b"\xef\xbb\xbf", b"\xe2\x80\xa8"]


def mutated(original: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with a few slices deleted, doubled, moved or overwritten."""
    place = st.integers(0, max(len(original) - 1, 0))
    change = st.tuples(place, st.integers(0, 30), st.sampled_from(PIECES) | st.binary(max_size=4), st.integers(0, 3))

    def apply(changes: list[tuple[int, int, bytes, int]]) -> bytes:
        text = original
        for start, length, piece, kind in changes:
            part = text[start : start + length]
            middle = (piece, piece + part, part + part, b"")[kind]
            text = text[:start] + middle + text[start + length :]
        return text

    return st.lists(change, min_size=1, max_size=5).map(apply)


words = st.sampled_from([*SETTINGS, *ALGORITHMS, *envs.names(), "mlp", "cnn", "total_steps", "time_limit", "none"])
numbers = st.one_of(
    st.integers(-3, 3000),
    st.integers(),
    st.floats(),
    st.sampled_from([2**31 - 1, 2**31, 10**12, 10**40, 1e-45, 3.5e38]),
)
scalars = st.one_of(
    numbers.map(repr),
    st.sampled_from(["true", "false", "2020-01-01", "12:00:00", "''", "{}", "[]", "0x1F", "1_000"]),
    (words | st.text(max_size=8)).map(json.dumps),
    st.text(max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda x: f"[{', '.join(x)}]")
        | st.lists(st.tuples(words, inner), max_size=2).map(lambda x: f"{{{', '.join(f'{k} = {v}' for k, v in x)}}}")
    ),
    max_leaves=4,
)
keys = st.one_of(words, words, st.text(max_size=6), st.lists(st.text(max_size=3), max_size=4).map(".".join))
lines = st.tuples(keys, values).map(" = ".join)
headers = st.one_of(st.sampled_from(ALGORITHMS).map("[{}]".format), keys.map("[{}]".format), keys.map("[[{}]]".format))
grammatical = st.tuples(
    st.sampled_from(["", "environment = 'CartPole-v1'", "environment = 'sort'\nnetwork.kind = 'transformer'"]),
    st.lists(lines | headers, max_size=6),
).map(lambda x: "\n".join([x[0], *x[1]]).encode("utf-8", "surrogatepass"))

assignments = st.one_of(
    st.tuples(words, values).map("=".join), st.tuples(keys, values).map("=".join), st.text(max_size=12)
)
ranges = st.lists(numbers.map(str) | st.sampled_from(["log", "linear", ""]), min_size=4, max_size=4).map(":".join)
grids = st.one_of(st.tuples(words, values).map("=".join), st.tuples(words, ranges).map("=".join), assignments)
flags = [flag for flag in re.findall(r'"(--[a-z-]+)"', Path(parser.__file__).read_text()) if flag != "--distributed"]
flags += ["--help", "-h", "--", "-", "--set="]
anything = st.one_of(
    st.sampled_from(
        [*tasks()[:3], *ALGORITHMS[:3], *parser.LISTS, *flags, "data=2", "seed=2,data=2", "all", "x.gif", "best", "0"]
    ),
    numbers.map(str),
    assignments,
    st.text(max_size=10),
    st.tuples(st.sampled_from(flags), scalars).map("=".join),
)
commands = st.sampled_from(["train", "compare", "sweep", "eval", "sample", "play", "plot", "list", "trian", ""])
command_lines = st.tuples(commands, st.lists(anything, max_size=7)).map(lambda x: [x[0], *x[1]])
trainings = st.lists(anything, max_size=5).map(lambda x: ["train", "cartpole", "ppo", *x])

VALID_LINE = b'{"prompt": "1+1=", "answer": "2", "completion": "<think>1+1</think><answer>2</answer>"}\n'
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
records = st.fixed_dictionaries({}, optional=dict.fromkeys(("prompt", "answer", "completion", "x"), json_values))
json_files = st.one_of(
    mutated(VALID_LINE * 12),
    st.lists((records | json_values).map(lambda x: json.dumps(x).encode()), max_size=6).map(b"\n".join),
    st.lists(records, min_size=1, max_size=3).map(lambda x: VALID_LINE * 12 + json.dumps(x[0]).encode()),
    st.binary(max_size=60),
)
JSON_TASK = b"""
environment = "json_lines"
environment_settings = { path = "data.jsonl", held_out = 0.4 }
network = { kind = "transformer", width = 8, layers = 1, heads = 2, kv_heads = 1 }
"""


def try_file(folder: Path, content: bytes) -> None:
    attempt(["train", "task.toml", "ppo", "--out", "run"], folder, {"task.toml": content})


def try_json_lines(folder: Path, content: bytes) -> None:
    attempt(["train", "task.toml", "sft", "--out", "run"], folder, {"task.toml": JSON_TASK, "data.jsonl": content})


def try_assignment(folder: Path, assignment: str) -> None:
    attempt(["train", "cartpole", "ppo", "--out", "run", f"--set={assignment}"], folder)


def try_grid(folder: Path, assignment: str) -> None:
    attempt(["sweep", "cartpole", "ppo", "--out", "run", f"--grid={assignment}"], folder)


def try_command(folder: Path, arguments: list[str]) -> None:
    attempt(arguments, folder)


STATE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "steps": np.int32(64)}


def _manifest() -> tuple[str, bytes]:
    """The name and the content of a checkpoint's manifest."""
    with tempfile.TemporaryDirectory() as folder:
        saved = checkpoint.save(Path(folder), STATE, steps=64, score=1.5, about={"bytes": 9, "seconds": 1.0})
        path = saved.path / "manifest.json"
        return path.name, path.read_bytes()


def try_manifest(folder: Path, content: bytes) -> None:
    """Either it is refused in a sentence, or what is read from it is of the right types."""
    path = folder / f"{64:012d}"
    path.mkdir()
    (path / "manifest.json").write_bytes(content)
    sentence = None
    try:
        found = checkpoint.find(folder)
    except UserError as error:
        sentence = str(error)
    if sentence is None:
        assert found is None or (type(found.steps), type(found.score), type(found.about)) == (int, float, dict)
    else:
        assert len(sentence.splitlines()) == 1


class Target(NamedTuple):
    """A boundary: its inputs, and what is done with one of them in an empty folder."""

    inputs: Callable[[], st.SearchStrategy[Any]]
    attempt: Callable[[Path, Any], None]


TARGETS = {
    "task files": Target(lambda: grammatical, try_file),
    "mutated task files": Target(
        lambda: st.sampled_from(TASK_FILES).flatmap(lambda path: mutated(path.read_bytes())), try_file
    ),
    "settings": Target(lambda: assignments, try_assignment),
    "grids": Target(lambda: grids, try_grid),
    "command lines": Target(lambda: command_lines, try_command),
    "training": Target(lambda: trainings, try_command),
    "JSON lines": Target(lambda: json_files, try_json_lines),
    "manifests": Target(
        lambda: mutated(_manifest()[1]) | json_values.map(lambda x: json.dumps(x).encode()), try_manifest
    ),
}
FRESH = int(os.environ.get("JAXPG_FUZZ", 0))
"""How many random inputs to try in the full lane, over all targets; 0 for the fixed ones."""


@pytest.mark.parametrize("number", [12, pytest.param(FRESH // len(TARGETS) or 150, marks=pytest.mark.full, id="many")])
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_ends_in_a_traceback(target: str, number: int) -> None:
    inputs, attempt_one = TARGETS[target]
    count = 0

    @settings(
        max_examples=number,
        derandomize=not FRESH,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs())
    def property_holds(given_input: Any) -> None:
        nonlocal count
        count += 1
        with tempfile.TemporaryDirectory() as folder:
            attempt_one(Path(folder), given_input)

    property_holds()
    print(f"{target}: {count} inputs")
