"""kill -9 at random moments and at file-system calls: what goes on by `jaxpg resume` alone ends alike, bit for bit.

The tests kill the toy once, and each other kind of run JAXPG_KILLS times: without it not at all, since that takes
minutes. A hundred kills over all kinds:

    PYTHONPATH=. python tests/attacks/test_kills.py --kills 100
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxpg.training import checkpoint, run_directory

HERE = Path(__file__).parent
KILLED = HERE / "killed.py"
KILLS = int(os.environ.get("JAXPG_KILLS", "0"))
takes_minutes = pytest.mark.skipif(not KILLS, reason="takes minutes: set JAXPG_KILLS to the kills of each kind")
KILLS_IN_A_ROW = 3
LIMIT = 300  # seconds that a run may take on a machine that does other things

SMALL = ["--set", "num_envs=4", "--set", "evaluation_episodes=8", "--set", "evaluations=3", "--quiet"]
GRID = ["--memory", "8", "--grid", "learning_rate=0.001,0.01", "num_steps=8,16"]
SORTING = """
environment = "sort"
environment_settings = { length = 3, letters = 6 }
total_steps = 1_500
evaluations = 2
evaluation_episodes = 8
evaluation_samples = 4
network = { kind = "transformer", width = 8, layers = 1, heads = 2, kv_heads = 1 }

[sft]
total_steps = 400
batch_size = 8

[grpo]
initial = "sft"
num_envs = 16
gamma = 1.0
num_minibatches = 2
"""


class Kind(NamedTuple):
    """A kind of run: the arguments that begin it and those that go on with it, {out} for its directory."""

    begin: list[str]
    resume: list[str] = ["resume", "{out}", "--quiet"]  # noqa: RUF012
    processes: int = 1


TOY = [str(HERE.parent / "toy_learner.py"), "{out}"]
KINDS = {
    "library": Kind(TOY, TOY),
    "control": Kind(["train", "catch", "a2c", "--seeds", "2", "--steps", "3000", "--out", "{out}", *SMALL]),
    "text": Kind(["train", "{task}", "grpo", "--seeds", "2", "--out", "{out}", "--quiet"]),
    "compare": Kind(["compare", "catch", "reinforce", "a2c", "--steps", "2000", "--out", "{out}", *SMALL]),
    "sweep": Kind(
        ["sweep", "catch", "a2c", "--seeds", "2", "--steps", "1500", "--out", "{out}", *SMALL, *GRID],
    ),
    "processes": Kind(
        ["train", "catch", "a2c", "--seeds", "2", "--steps", "3000", "--out", "{out}", "--devices", "2", *SMALL],
        processes=2,
    ),
}


@contextlib.contextmanager
def started(kind: Kind, arguments: list[str], out: Path, wishes: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """The processes of a run, each with what it wishes of killed.py; none is left at the end."""
    task = out.parent / "sorting.toml"
    task.write_text(SORTING)
    arguments = [text.format(out=out, task=task) for text in arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    if kind.processes > 1:
        environment["JAX_NUM_CPU_DEVICES"] = "1"
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        arguments += [
            "--distributed",
            "--join-seconds",
            "30",
            "--coordinator",
            address,
            "--processes",
            str(kind.processes),
            "--process",
        ]
    processes = []
    try:
        for number, wish in enumerate(wishes):
            own = [str(number)] if kind.processes > 1 else []
            command = [sys.executable, str(KILLED), json.dumps({"directory": str(out), **wish}), *arguments, *own]
            processes.append(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True)
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ends(kind: Kind, arguments: list[str], out: Path, wishes: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Exit code and errors of every process of a run."""
    with started(kind, arguments, out, wishes) as processes:
        return [
            (process.returncode, errors) for process in processes for _, errors in [process.communicate(timeout=LIMIT)]
        ]


def whole(kind: Kind, out: Path) -> dict[str, float]:
    """Run without kills; how many calls and seconds there were."""
    report = out.parent / "report.json"
    wishes: list[dict[str, Any]] = [{} for _ in range(kind.processes)]
    wishes[0]["report"] = str(report)
    ended = ends(kind, kind.begin, out, wishes)
    assert [code for code, _ in ended] == [0] * kind.processes, ended
    return json.loads(report.read_text())


def killed(kind: Kind, out: Path, kills: int, length: dict[str, float], rng: random.Random) -> int:
    """Run with kills, each followed by what goes on with it, to the end; how many of them came before the end."""
    done = 0
    arguments = kind.begin
    for _ in range(kills):
        left = max(0.0, 1 - 0.5 * done / kills)  # what goes on has less to do, and is to be killed too
        at_a_call = {"call": rng.randint(1, max(2, int(left * length["calls"])))}
        after_a_time = {"seconds": rng.uniform(0, left * length["seconds"])}  # which a faster run may not reach
        wish = at_a_call if kills == 1 else rng.choice([at_a_call, after_a_time])
        wishes: list[dict[str, Any]] = [{} for _ in range(kind.processes)]
        wishes[rng.randrange(kind.processes) if "seconds" in wish else 0] = wish
        ended = ends(kind, arguments, out, wishes)
        assert all(code in (0, 2, -9) for code, _ in ended), ended
        assert not any("Traceback" in errors for _, errors in ended), ended
        done += any(code == -9 for code, _ in ended)
        if all(code == 0 for code, _ in ended):
            return done
        arguments = kind.resume if has_begun(kind, out) else kind.begin
    ended = ends(kind, arguments, out, [{} for _ in range(kind.processes)])
    assert [code for code, _ in ended] == [0] * kind.processes, ended
    return done


def has_begun(kind: Kind, out: Path) -> bool:
    """Whether the command has been written down; killed before that, it has done nothing and is given again."""
    return kind.begin == kind.resume or (out / "plan.json").exists()


def results(out: Path) -> dict[str, Any]:
    """All that a command leaves but times: metrics, the arrays of checkpoints, completions, tables."""
    found: dict[str, Any] = {}
    for run in sorted(path.parent for path in out.rglob("config.toml")):
        name = str(run.relative_to(out))
        found |= {f"{name}: {k}": v for k, v in run_directory.load_metrics(run).items() if "seconds" not in k}
        for folder in sorted((run / checkpoint.CHECKPOINTS).iterdir()):
            arrays = ocp.StandardCheckpointer().restore(folder.absolute() / "state")
            found |= {f"{name}: {folder.name}{array}": value for array, value in arrays.items()}
    texts = [*out.rglob("samples/*.json"), *out.glob("best.toml"), *out.rglob("config.toml"), *out.glob("sweep.json")]
    texts = {str(path.relative_to(out)): path.read_text().replace(str(out), "OUT") for path in texts}
    if "sweep.json" in texts:
        texts["sweep.json"] = json.dumps(json.loads(texts["sweep.json"])["points"])
    return found | texts


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not the same, bit for bit."""

    def same(a: Any, b: Any) -> bool:
        return a == b if isinstance(a, str) else np.asarray(a).tobytes() == np.asarray(b).tobytes()

    return [name for name in one | other if name not in one or name not in other or not same(one[name], other[name])]


def attack(kind: Kind, folder: Path, kills: int, seed: int) -> Iterator[tuple[int, list[str]]]:
    """Kills of one kind, some in a row on each run: how many there were, and what differs at the end of the row."""
    (folder / "whole").mkdir()
    length, rng = whole(kind, folder / "whole" / "run"), random.Random(seed)
    expected = results(folder / "whole" / "run")
    done = row = 0
    while done < kills and row < 3 * kills:
        row += 1
        place = folder / f"row-{row}"
        place.mkdir()
        now = killed(kind, place / "run", min(KILLS_IN_A_ROW, kills - done), length, rng)
        done += now
        yield now, differences(expected, results(place / "run"))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(name, marks=[] if name == "library" else [pytest.mark.full, takes_minutes]) for name in KINDS],
)
def test_a_killed_run_ends_as_an_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    rows = list(attack(KINDS[kind], tmp_path, 1 if kind == "library" else KILLS, seed=0))
    assert sum(kills for kills, _ in rows) > 0
    assert [different for _, different in rows] == [[]] * len(rows)


def test_a_difference_is_noticed(tmp_path: Path) -> None:
    """One bit of a metric, a file more."""
    metrics = {"loss": np.array([0.5, np.nan]), "text": "a"}
    assert differences(metrics, {"loss": np.array([0.5, np.nan]), "text": "a"}) == []
    assert differences(metrics, {"loss": np.array([np.nextafter(0.5, 1), np.nan]), "text": "a"}) == ["loss"]
    assert differences(metrics, metrics | {"more": "b"}) == ["more"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="in all")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    each, wrong, total, began = -(-arguments.kills // len(arguments.kinds)), 0, 0, time.monotonic()
    for name in arguments.kinds:
        with tempfile.TemporaryDirectory() as folder:
            for kills, different in attack(KINDS[name], Path(folder), each, arguments.seed):
                total, wrong = total + kills, wrong + bool(different)
                print(f"{time.monotonic() - began:6.0f} s  {name}: {total} kills, differences: {different}", flush=True)
    print(f"{total} kills, {wrong} different results")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
