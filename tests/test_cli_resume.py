"""What a command was asked for is written down, and `jaxpg resume` needs nothing else; one process per directory."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from jaxpg.cli import record, runs
from jaxpg.cli import signals as stopping
from jaxpg.cli.main import main
from jaxpg.cli.options import read_run_options
from jaxpg.cli.parser import make_parser
from jaxpg.cli.planning import groups_of, plan_command, stages_of
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments import grid
from jaxpg.training import checkpoint, lock, run_directory
from jaxpg.training.metrics_writer import METRICS

TASK = """
environment = "sort"
environment_settings = { length = 3, letters = 6 }
network = { kind = "transformer", width = 8, layers = 1, heads = 2, kv_heads = 1 }
total_steps = 1_500

[sft]
batch_size = 8

[grpo]
initial = "sft"
num_envs = 16
"""
CHANGES = ["--set", "network.width=16", "--set", "learning_rate=0.5", "--seeds", "2"]


def planned(*command: str | Path) -> record.CommandRecord:
    options = read_run_options(make_parser().parse_args([str(word) for word in command]))
    assert options.out is not None
    return plan_command(options, options.out)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The directory of a run with a first stage, written down, and with a first row of metrics in that stage."""
    (tmp_path / "mine.toml").write_text(TASK)
    out = tmp_path / "my runs"
    (out / "sft").mkdir(parents=True)
    record.write(planned("train", tmp_path / "mine.toml", "grpo", *CHANGES, "--devices", "2", "--out", out), out)
    (out / "sft" / "metrics.jsonl").write_text("{}\n")
    return out


@pytest.mark.parametrize(
    "command",
    [
        ["train", "cartpole", "ppo", "--set", "value_clip=none", "--seed", "7"],
        ["train", "summarise_toy", "rlhf", "--steps", "5000"],
        ["train", "cartpole", "ppo", "--tensorboard", "--wandb"],
        ["compare", "sort", "grpo", "dapo", "--seeds", "3", "--mesh", "seed=3"],
        ["sweep", "sort", "grpo", "--grid", "learning_rate=1e-4:1e-2:log:3", "num_envs=64,128", "--memory", "2.5"],
        ["sweep", "cartpole", "ppo", "--grid", "network.hidden=[8],[8, 8]", "gamma=0.9,1"],
    ],
    ids=" ".join,
)
def test_a_record_is_all_that_was_asked_for(command: list[str], tmp_path: Path) -> None:
    """Read again it is the same, and so are the configs, which are those of the task."""
    out = tmp_path / "run"
    made = planned(*command, "--out", out)
    out.mkdir()
    record.write(made, out)
    assert record.read(out) == made == planned("resume", out)
    overrides = read_run_options(make_parser().parse_args(command)).overrides
    for stage in stages_of(made, out):
        if stage.name in made.algorithms:
            expected = configs.resolve_config(command[1], stage.name, overrides)
            roles = {"initial": stage.config.initial, "reward": stage.config.reward}
            assert configs.to_dict(stage.config) == configs.to_dict(expected) | roles
    if made.sweep:
        for place, point in enumerate(grid_points(made.sweep.grid)):
            expected = configs.resolve_config(command[1], command[2], {**overrides, **point})
            found = grid.config_at(groups_of(made, out), point)
            assert (found.settings, found.network) == (expected.settings, expected.network), place


def grid_points(values: dict[str, list[Any]]) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = [{}]
    for name, choices in values.items():
        points = [{**point, name: value} for point in points for value in choices]
    return points


def test_a_task_that_changed_does_not_change_what_goes_on(begun: Path) -> None:
    """Neither what was begun nor a stage that was not, and the file may be gone."""
    before = stages_of(record.read(begun), begun)
    assert [(s.name, s.config.network["width"], s.config.seeds) for s in before] == [
        ("sft", 16, (0, 1)),
        ("grpo", 16, (0, 1)),
    ]
    assert before[1].config.settings["learning_rate"] == 0.5
    (task := begun.parent / "mine.toml").write_text(TASK.replace("length = 3", "length = 4").replace("16", "32"))
    for command in (["resume", begun], ["train", task, "grpo", "--resume", "--out", begun]):
        after = planned(*command)
        assert stages_of(after, begun) == before
        assert after.devices == "2"
    task.unlink()
    assert stages_of(planned("train", task, "grpo", *CHANGES, "--resume", "--out", begun), begun) == before


def test_more_steps_may_be_asked_for(begun: Path) -> None:
    stages = stages_of(planned("resume", begun, "--steps", "2000"), begun)
    assert [stage.config.total_steps for stage in stages] == [1500, 2000]


def test_fewer_steps_than_were_trained_are_refused(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else the run would count as finished, and never go on."""
    checkpoint.save(begun / checkpoint.CHECKPOINTS, {"x": np.zeros(2)}, steps=800, about={})
    before = (begun / record.RECORD).read_bytes()
    assert main(["resume", str(begun), "--steps", "700"]) == 2
    assert "has trained 800 steps each, more than --steps 700" in capsys.readouterr().err
    assert (begun / record.RECORD).read_bytes() == before
    assert stages_of(planned("resume", begun, "--steps", "900"), begun)[-1].config.total_steps == 900


CONTRADICTIONS = [
    (["train", "{task}", "grpo"], "holds a run already. Add --resume"),
    (["train", "{task}", "rloo", "--resume"], "is of grpo on mine, not rloo on mine"),
    (["train", "sort", "grpo", "--resume"], "is of grpo on mine, not grpo on sort"),
    (["train", "{task}", "grpo", "--resume", "--set", "gamma=0.5"], "grpo.gamma is 1.0 there, 0.5 here"),
    (["train", "{task}", "grpo", "--resume", "--seeds", "3"], "seeds is [0, 1] there, [0, 1, 2] here"),
    (["train", "{task}", "grpo", "--resume", "--set", "initial=none"], "there, 'none' here"),
    (["compare", "{task}", "grpo", "--resume"], "goes on with: jaxpg resume"),
    (["sweep", "{task}", "grpo", "--grid", "gamma=0.9", "--resume"], "goes on with: jaxpg resume"),
]


@pytest.mark.parametrize(("command", "words"), CONTRADICTIONS, ids=[" ".join(c) for c, _ in CONTRADICTIONS])
def test_a_contradiction_is_refused(
    command: list[str], words: str, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()}
    assert main([*(text.format(task=begun.parent / "mine.toml") for text in command), "--out", str(begun)]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
    assert {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()} == before


def test_a_command_that_trained_nothing_is_replaced(begun: Path) -> None:
    """What fails before its first chunk may be mended and given again."""
    (begun / "sft" / "metrics.jsonl").unlink()
    assert planned("train", "sort", "ppo", "--out", begun).algorithms == ["ppo"]


def test_a_stage_that_is_compared_must_be_the_stage(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert [s.name for s in stages_of(planned("compare", "sort", "grpo", "sft", "--out", out), out)] == ["sft", "grpo"]
    with pytest.raises(UserError, match="sft is compared here and also trained before another"):
        planned("compare", "sort", "grpo", "sft", "--steps", "900", "--out", out)


def test_what_runs_begin_with_is_not_swept(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot have initial"):
        planned("sweep", "sort", "grpo", "--grid", "initial=a,b", "--out", tmp_path / "run")
    with pytest.raises(UserError, match="sweep needs --grid"):
        planned("sweep", "sort", "grpo", "--out", tmp_path / "run")


def test_nothing_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert main(["resume", str(folder)]) == 2
        assert "holds nothing to resume" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def damaged(text: str) -> dict[str, str]:
    fields = json.loads(text)
    first = fields["record"]["runs"][0]
    config = first["config"]
    nothing = {"grid": {}, "memory": None, "groups": [], "waves": []}
    others = {
        "outside": {"runs": [{**first, "directory": "../sft"}]},
        "no command": {"command": "nosuch"},
        "no config": {"runs": [{"directory": "."}]},
        "a list as config": {"runs": [{"directory": ".", "config": []}]},
        "no algorithm": {"runs": [{"directory": ".", "config": {k: config[k] for k in config if k != "algorithm"}}]},
        "no runs": {"runs": []},
        "a sweep of nothing": {"command": "sweep", "sweep": nothing},
        "a sweep that trains": {"sweep": nothing},
    }
    return {
        "empty": "",
        "cut": text[: len(text) // 2],
        "garbage": "\x00\x01",
        "a list": "[]",
        "a digit": text.replace('"width": 16', '"width": 17'),
        "a field less": json.dumps({"checksum": 0, "record": {**fields["record"], "runs": None}}),
        "no record": json.dumps({"checksum": 0}),
        "a number": json.dumps({"checksum": 0, "record": 3}),
        "nested": "[" * 100_000,
        **{name: record.to_json(record.CommandRecord(**fields["record"] | other)) for name, other in others.items()},
    }


@pytest.mark.parametrize(
    "damage",
    [
        *("empty", "cut", "garbage", "a list", "a digit", "a field less", "outside", "no command", "no config"),
        *("a list as config", "no algorithm", "no runs", "a sweep of nothing", "a sweep that trains"),
    ],
)
def test_a_damaged_record_is_refused(begun: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = begun / record.RECORD
    path.write_text(damaged(path.read_text())[damage])
    for command in (["resume", begun], ["train", begun.parent / "mine.toml", "grpo", "--out", begun]):
        assert main([str(word) for word in command]) == 2
        message = capsys.readouterr().err
        assert re.fullmatch(r"jaxpg: .*plan.json is damaged, .*\n", message)
        assert "resumed one by one" in message
    (begun / "config.toml").touch()  # that of a single run is the run's own
    assert main(["resume", str(begun)]) == 2
    assert f"Delete it to go on with the run in {begun} alone." in capsys.readouterr().err


def test_a_hint_is_a_command(begun: Path) -> None:
    """Whatever the directory is called, and of several processes with the number of this one."""
    several = ["--distributed", "--coordinator", "here:1", "--processes", "2", "--process", "1"]
    for name, more in (("a b'c", []), ("-x", []), ("$HOME", several)):
        options = read_run_options(make_parser().parse_args(["resume", "x", *more]))
        command = runs.resume_command(runs.Session(record.read(begun), Path(name), options))
        parsed = make_parser().parse_args(shlex.split(command)[1:])
        assert (parsed.out, parsed.resume, parsed.process) == (Path(name), True, 1 if more else None)
        assert parsed.distributed == bool(more)


def test_a_hint_trusts_the_code_that_a_run_names(begun: Path) -> None:
    """Otherwise the command that it shows would be refused."""
    begun_record = record.read(begun)
    assert begun_record is not None
    runs_of = [run | {"config": run["config"] | {"environment": "mine:corridor"}} for run in begun_record.runs]
    own = dataclasses.replace(begun_record, runs=runs_of)
    for of_its_author, expected in ((begun_record, []), (own, ["--trust-code"])):
        words = runs.command_on(Path("-a b"), dataclasses.asdict(of_its_author), "play", "--gif", "x.gif")
        assert words == ["jaxpg", "play", "./-a b", "--gif", "x.gif", *expected]


def test_a_directory_that_is_gone_does_not_hide_what_went_wrong(begun: Path) -> None:
    options = read_run_options(make_parser().parse_args(["resume", str(begun)]))
    (begun / "sft" / "metrics.jsonl").unlink()  # nothing was trained, so the record would be put back

    def train() -> None:
        with runs.open_session(options, begun):
            shutil.rmtree(begun)
            raise UserError("what went wrong")

    with pytest.raises(UserError, match="what went wrong"):
        train()


HOLD = """
import sys, time
from pathlib import Path
from jaxpg.training.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_directory_has_one_process_until_it_is_killed(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(begun)], stdout=subprocess.PIPE, env=environment)
    try:
        assert holder.stdout.readline() == b"locked\n"
        assert main(["resume", str(begun)]) == 2
        assert f"is in use by process {holder.pid} on " in capsys.readouterr().err
        with pytest.raises(UserError, match="is in use by process"), lock.locked(begun):
            pass
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    with lock.locked(begun):
        assert f"process {os.getpid()} on " in (begun / lock.LOCK).read_text()
    assert not (begun / lock.LOCK).exists()


def test_a_lock_is_for_one_thread_and_leaves_nothing(tmp_path: Path) -> None:
    refused: list[UserError] = []

    def second() -> None:
        try:
            with lock.locked(tmp_path / "a" / "b"):
                pass
        except UserError as error:
            refused.append(error)

    with lock.locked(tmp_path / "a" / "b"), lock.locked(tmp_path / "a" / ".." / "a" / "b"):  # a run within its command
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert len(refused) == 1
    assert not list(tmp_path.iterdir())
    second()
    assert len(refused) == 1


class Ended(BaseException):
    pass


def exit_codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which the process would have ended; `Ended` is raised in place of each."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", leave)
    return codes


@pytest.mark.parametrize(
    ("signals", "has_trained", "code"),
    [
        ([signal.SIGINT], False, None),
        ([signal.SIGINT, signal.SIGINT], True, 130),
        ([signal.SIGTERM], True, None),
        ([signal.SIGTERM], False, 143),
        ([signal.SIGINT, signal.SIGTERM], True, 143),
    ],
)
def test_signals(
    signals: list[int],
    has_trained: bool,
    code: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first one is a request, and a second one, or SIGTERM while a program compiles, the end."""
    codes = exit_codes(monkeypatch)
    interruption = stopping.Interruption(Console(quiet=True), "jaxpg resume there")
    interruption.has_trained = has_trained
    try:
        for number in signals:
            interruption.on_signal(number)
    except Ended:
        assert "Resume with: jaxpg resume there\n" in capsys.readouterr().err
    assert codes == ([] if code is None else [code])
    assert interruption.requested()
    interruption.close()


def test_another_thread_leaves_signals_alone() -> None:
    """Python lets the main thread alone set handlers; a run that another one trains ends like any program."""
    inside: list[Any] = []

    def train() -> None:
        with stopping.interruptible(Console(quiet=True), "jaxpg resume there"):
            inside.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert inside == [before]


def test_signals_work_where_nobody_reads_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    codes = exit_codes(monkeypatch)
    interruption = stopping.Interruption(Console(quiet=True), "jaxpg resume there")
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        interruption.on_signal(signal.SIGINT)
        assert interruption.requested()
        print("what follows goes nowhere", file=sys.stderr, flush=True)
        with pytest.raises(Ended):
            interruption.on_signal(signal.SIGTERM)
    assert codes == [143]


def test_whatever_is_printed_while_training_may_find_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning, say: rich would end the process, and nothing would be saved."""
    options = read_run_options(make_parser().parse_args(["resume", "there"]))
    interruption = stopping.Interruption(Console(quiet=True), "jaxpg resume there")
    console = runs.console_of(options, interruption)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(BrokenPipeError):  # nothing is trained
            runs.console_of(options).print("a table")
        console.print("a warning")
        console.print("what follows goes nowhere")
    assert interruption.signal == signal.SIGINT


def test_a_chunk_that_takes_too_long_after_sigterm_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(stopping, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    interruption = stopping.Interruption(Console(quiet=True), "jaxpg resume there")
    interruption.has_trained = True
    interruption.on_signal(signal.SIGTERM)
    assert ended.wait(10)
    assert "Resume with: jaxpg resume there" in capsys.readouterr().err


def test_metrics_or_a_checkpoint_are_a_beginning(tmp_path: Path) -> None:
    (tmp_path / run_directory.CONFIG).write_text("")
    (tmp_path / "metrics.jsonl").write_text("")
    assert not run_directory.has_begun(tmp_path)
    (tmp_path / "checkpoints" / "000000000008").mkdir(parents=True)
    assert not run_directory.has_begun(tmp_path)
    (tmp_path / "checkpoints" / "000000000008" / "manifest.json").write_text("")
    assert run_directory.has_begun(tmp_path)


@pytest.mark.parametrize("trained", [False, True])
def test_a_command_that_fails_keeps_its_record_if_it_has_trained(trained: bool, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = read_run_options(make_parser().parse_args(["train", "frozen_lake", "q_learning", "--out", str(out)]))

    def run() -> None:
        with runs.open_session(options, out):
            if trained:
                (out / METRICS).write_text("{}\n")
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        run()
    assert (out / record.RECORD).exists() == trained


@pytest.mark.parametrize(
    ("number", "word", "code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143)]
)
def test_a_run_that_was_stopped_says_by_what(
    number: int, word: str, code: int, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = read_run_options(make_parser().parse_args(["resume", str(begun)]))
    interruption = stopping.Interruption(Console(), "jaxpg resume there")
    interruption.signal = number
    session = runs.Session(record.read(begun), begun, options)
    assert runs.report_interrupted(session, interruption) == code
    assert f"jaxpg: {word} and saved. Resume with: jaxpg resume {shlex.quote(str(begun))}" in capsys.readouterr().err


def test_a_sweep_goes_on_with_its_own_grid(tmp_path: Path) -> None:
    out = tmp_path / "swept"
    command = ["sweep", "cartpole", "ppo", "--out", out, "--grid"]
    out.mkdir()
    record.write(planned(*command, "gamma=0.9,1"), out)
    assert planned(*command, "gamma=0.9,1", "--resume") == record.read(out)
    with pytest.raises(UserError, match=r"has another grid: .*\[0\.9, 1\]. there, .*\[0\.9, 0\.8\]. here"):
        planned(*command, "gamma=0.9,0.8", "--resume")
    with pytest.raises(UserError, match="A sweep cannot be extended"):
        planned(*command, "gamma=0.9,1", "--resume", "--steps", "123456789")
