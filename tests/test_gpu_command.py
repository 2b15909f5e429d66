"""The command that measures a GPU (benchmarks/gpu.sh, benchmarks/device.py), with programs that are fakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jax.profiler import ProfileData

from jaxpg.parallel import machine

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
import device  # noqa: E402
import workloads  # noqa: E402
from turns import Peers, Row, Worker, WorkerEnded  # noqa: E402

PEERS = Peers(python=sys.executable, purejaxrl=Path("/"))
SECONDS = {"rejax": 0.5, "jaxpg": 0.125}
"""Of a call; PureJaxRL's program cannot be made."""


class Process:
    def wait(self) -> None: ...
    def kill(self) -> None: ...


class Fake:
    """A worker of 1,000 steps a call; on 8 environments jaxpg ends at its first turn."""

    process, work, bytes = Process(), 1000, 7
    made, versions = {"wall": 3.0}, {"jax": "0"}

    def __init__(self, peers: Peers, row: device.Row, environment: str, num_envs: int, steps: int) -> None:
        if row.workload == "purejaxrl":
            raise WorkerEnded("no such package")
        self.name, self.ends = row.workload, row.workload == "jaxpg" and num_envs == 8
        self.asked: list[str] = []

    def ask(self, what: str) -> dict[str, float]:
        self.asked.append(what)
        if self.ends and what != "run":
            raise WorkerEnded("out of memory")
        calls = int(what.removeprefix("run") or 1) if what != "memory" else 0
        return {"wall": SECONDS[self.name] * calls} if calls else {"peak": 9}


def test_programs_take_turns_of_a_second_and_one_that_ends_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "Worker", Fake)
    groups = [[device.ppo_case(4, 1, 1), device.ppo_case(8, 1, 1)]]
    plan, seen = device.FULL._replace(rounds=2, turn_s=1.0), []
    clock = device.Clock(time.monotonic() + 60)
    device.time_groups(
        groups, PEERS, plan, clock, lambda found: seen.append((len(found["cases"]), len(found["left_out"])))
    )
    found = device.time_groups(groups, PEERS, plan, clock, lambda found: None)
    assert seen == [(0, 6), (1, 3), (2, 0)]  # written after each case, with what is not yet timed
    rejax, purejaxrl, jaxpg = found["cases"][0]
    assert (rejax["calls_of_a_turn"], rejax["call_wall_s"], rejax["per_second"]) == (2, [0.5, 0.5], 2000)
    assert (jaxpg["calls_of_a_turn"], jaxpg["per_second"], jaxpg["made_wall_s"]) == (8, 8000, 3.0)
    assert purejaxrl["failed"] == "could not be made: no such package"
    rejax, _, jaxpg = found["cases"][1]
    assert rejax["per_second"] == 2000
    assert jaxpg["failed"] == "ended at `run 8`: out of memory"


def test_a_choice_is_set_beside_the_program_as_it_is() -> None:
    """Of jaxpg without other libraries; jaxpg beside those, which are beside nothing."""
    plain, chosen = (work.row for work in device.chosen("jaxpg", "CartPole-v1", 4, 512, ["few_slots=0"]))
    assert (plain.choice, chosen.choice) == (None, "few_slots=0")
    assert chosen.label == "jaxpg, 1 agent, 1 device, few_slots=0"
    case: list[dict[str, Any]] = [
        {"workload": "jaxpg", "per_second": 8.0},
        {"workload": "jaxpg", "per_second": 4.0, "choice": "few_slots=0"},
    ]
    assert [device.compared(record, case) for record in case] == [[], [8.0]]
    case += [{"workload": "rejax", "per_second": 2.0}, {"workload": "purejaxrl", "failed": "no such package"}]
    assert [device.compared(record, case) for record in case] == [[2.0], [8.0], [], []]


def test_a_worker_is_told_of_a_choice_and_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(Worker, "start", lambda self, command, around: commands.append(command))
    Worker(Peers(), Row("jaxpg", choice="sums_at_once=true"), "CartPole-v1", 4, 512)
    Worker(Peers(), Row("jaxpg"), "CartPole-v1", 4, 512)
    assert commands[0][-2:] == ["512", "sums_at_once=true"]
    assert commands[1][-1] == "512"  # older checkouts know no choice
    monkeypatch.setattr(machine, "MACHINES", dict(machine.MACHINES))
    workloads.choose("sums_at_once=true")
    assert machine.MACHINES["cpu"] == machine.CPU._replace(sums_at_once=True)
    assert machine.MACHINES["tpu"].sums_at_once


def test_a_group_for_which_no_time_is_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "Worker", Fake)
    groups, clock = [[device.ppo_case(4, 1, 1)]], device.Clock(time.monotonic() + 5)
    found = device.time_groups(groups, Peers(), device.FULL, clock, lambda found: None)
    assert found == {"cases": [], "left_out": ["jaxpg, 1 agent, 1 device, CartPole-v1, 4"]}


PROFILE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "gemm" } }
  event_metadata { key: 2 value { id: 2 name: "fusion" } }
  event_metadata { key: 3 value { id: 3 name: "jit_step" } }
  lines {
    name: "Stream #7(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 2000000 }
    events { metadata_id: 2 offset_ps: 3000000 duration_ps: 1000000 }
    events { metadata_id: 1 offset_ps: 6000000 duration_ps: 2000000 }
  }
  lines { name: "XLA Modules" events { metadata_id: 3 offset_ps: 0 duration_ps: 9000000 } }
}
planes { name: "/host:CPU" lines { name: "python" events { metadata_id: 1 offset_ps: 0 duration_ps: 90000000 } } }
"""


def test_kernels_are_those_of_the_streams_and_sum_up_by_name() -> None:
    found = device.kernels(ProfileData.from_text_proto(PROFILE), limit=1)
    assert found["top"] == [{"kernel": "gemm", "times": 2, "ms": 0.004, "share": 0.8}]
    assert (found["kernels"], found["wall_ms"], found["busy"]) == (3, 0.008, 0.625)


def test_results_are_begun_anew_and_then_added_to(tmp_path: Path) -> None:
    machine = {"devices": ["NVIDIA H100 80GB HBM3"]}
    for part in ("check", "speed", "language"):
        device.Results(tmp_path, machine, part).put(part, {"cases": part})
    (path,) = tmp_path.iterdir()
    assert path.name == "nvidia_h100_80gb_hbm3.json"
    assert list(json.loads(path.read_text())["parts"]) == ["check", "speed", "language"]
    later = machine | {"commit": "another", "started": "later"}
    device.Results(tmp_path, machine | {"started": "later"}, "speed").put("speed", {})
    device.Results(tmp_path, later, "choices").put("choices", {"x": 1})
    found = json.loads(path.read_text())
    assert (found["machine"], found["parts"]["speed"]) == (machine, {})
    assert found["parts"]["choices"] == {"x": 1, "machine": later}
    device.Results(tmp_path, machine, "check").write()
    assert json.loads(path.read_text()) == {"parts": {}, "machine": machine}


def gpu(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(BENCHMARKS / "gpu.sh"), *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--wheels", "/no/such"], "gpu.sh: there is no /no/such (--wheels).\n"),
        (["--wheels", "/"], "gpu.sh: there is no wheel in /.\n"),
        (["--out"], "gpu.sh: --out takes a path.\n"),
        (["--fast"], "gpu.sh: --fast is none of --wheels, --peer-python, --purejaxrl, --out and --cpu.\n"),
    ],
)
def test_a_wrong_option_is_a_sentence(arguments: list[str], sentence: str) -> None:
    done = gpu(*arguments)
    assert (done.returncode, done.stderr, done.stdout) == (2, sentence, "")


def parts(folder: Path, seconds: int) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """The command after so many seconds, and what it has a Python do that fails at `speed` and does nothing else."""
    fake, log = folder / "python", folder / "log"
    fake.write_text(f'#!/bin/sh\necho "$@" >>{log}\n[ "$2" != speed ]\n')
    fake.chmod(0o755)
    done = gpu("--cpu", "--out", str(folder), PYTHON=str(fake), SECONDS=str(seconds))
    return done, [line.split()[1:] for line in log.read_text().splitlines() if "device.py" in line]


def test_a_part_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    done, ran = parts(tmp_path, 0)
    assert [words[0] for words in ran] == ["check", "tests", "speed", "language", "profile", "table"]
    assert all(words[-3:] == ["--cpu", "--out", str(tmp_path)] for words in ran)
    assert done.returncode == 1
    assert "gpu.sh: speed has failed or was cut off (status 1)" in done.stdout


def test_all_parts_end_within_eight_minutes(tmp_path: Path) -> None:
    _, ran = parts(tmp_path, 440)
    assert [float(words[2]) <= 30 for words in ran[1:-1]] == [True] * 4
    (tmp_path / "log").unlink()
    done, ran = parts(tmp_path, 470)
    assert [words[0] for words in ran] == ["check", "table"]
    assert (done.returncode, done.stdout.count("no time left")) == (1, 4)


def test_without_an_accelerator_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        device.check(rehearsal=False)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "gpu.sh: jax finds no accelerator; --cpu rehearses on this CPU.\n"
    device.check(rehearsal=True)
