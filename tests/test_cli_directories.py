"""Directories as people have them: odd names, files of their own, what is left of earlier runs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from refusals import refused

from jaxpg.cli import commands, planning
from jaxpg.cli.main import main
from jaxpg.cli.options import RunOptions, read_run_options
from jaxpg.cli.parser import make_parser
from jaxpg.errors import UserError
from jaxpg.experiments.config import resolve_config
from jaxpg.training import array_files, run_directory

TASK = """
environment = "CartPole-v1"
seeds = [7, 8, 9]
total_steps = 128
evaluations = 1
evaluation_episodes = 2
network = { kind = "mlp", hidden = [4] }

[ppo]
num_envs = 4
num_steps = 32

[a2c]
num_envs = 4
"""


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text(TASK)
    return str(tmp_path / "mine.toml")


@pytest.mark.parametrize("name", ["g[1]", "b\\s", "a*?", "[", "plain"])
def test_a_checkpoint_is_written_where_its_directory_is(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    arrays = {"weights": np.arange(6.0).reshape(2, 3), "none": np.zeros(0)}
    array_files.write(folder / "state", arrays)
    assert {path.name for path in tmp_path.iterdir()} == {name}
    assert {path.name for path in folder.iterdir()} == {"state"}
    read = array_files.read(folder / "state")
    np.testing.assert_array_equal(read["weights"], arrays["weights"])
    folder.rename(tmp_path / "elsewhere")
    np.testing.assert_array_equal(array_files.read(tmp_path / "elsewhere" / "state")["weights"], arrays["weights"])


def test_commands_of_one_second_have_directories_of_their_own(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one may not have written anything yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now")
    began: list[str] = []

    def begin(options: RunOptions, out: Path) -> NoReturn:
        began.append(str(out))
        if len(began) < 3:
            main(["train", task, "ppo"])
        raise UserError("enough")

    monkeypatch.setattr("jaxpg.cli.runs.plan_command", begin)
    assert main(["train", task, "ppo"]) == 2
    assert began == ["runs/mine-ppo-now", "runs/mine-ppo-now-2", "runs/mine-ppo-now-3"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("content", [TASK, 'database = "postgres"\n', "not TOML", "[ppo]\nalgorithm = 3\n"])
def test_a_config_of_ones_own_is_not_overwritten(
    task: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(content)
    assert "holds a config.toml but no run" in refused(capsys, "train", task, "ppo", "--out", str(tmp_path))
    if content == TASK:
        own = str(tmp_path / "config.toml")
        assert "over its task" in refused(capsys, "train", own, "ppo", "--out", str(tmp_path))
    assert (tmp_path / "config.toml").read_text() == content
    assert {path.name for path in tmp_path.iterdir()} == {"config.toml", "mine.toml"}


def test_a_link_to_itself_is_no_directory(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert "loop is not the directory of a run" in refused(capsys, "plot", str(tmp_path / "loop"))
    options = read_run_options(make_parser().parse_args(["train", task, "ppo", "--out", str(tmp_path / "loop")]))
    planning.plan_command(options, tmp_path / "loop")  # to write there is refused later


@pytest.mark.parametrize(
    ("command", "name"),
    [(command, name) for command, names in planning.RESULTS.items() for name in names],
)
def test_results_of_ones_own_are_not_overwritten(
    task: str, command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = ["ppo", "a2c"] if command == "compare" else ["ppo", "--grid", "learning_rate=0.001,0.002"]
    arguments = [command, task, *rest, "--out", str(tmp_path)]
    (tmp_path / name).write_text("mine")
    assert f"holds a {name}, which {command} would overwrite" in refused(capsys, *arguments)
    assert (tmp_path / name).read_text() == "mine"
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("elsewhere")  # where there is nothing yet
    assert f"holds a {name}, which {command} would overwrite" in refused(capsys, *arguments)
    assert {path.name for path in tmp_path.iterdir()} == {name, "mine.toml"}


def test_a_sweep_whose_plan_is_gone_is_not_begun_anew(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wave = tmp_path / planning.FIRST_WAVE
    wave.mkdir(parents=True)
    (wave / "metrics.jsonl").write_text('{"steps": [5]}\n{"steps": [9]}\n')
    arguments = ["sweep", task, "ppo", "--grid", "learning_rate=0.001,0.002", "--out", str(tmp_path)]
    assert "a sweep without its plan.json" in refused(capsys, *arguments)


def test_a_wave_of_a_sweep_is_not_drawn_as_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text('algorithm = "ppo"\n[sweep]\nlearning_rate = [0.1, 0.2]\n')
    assert "runs of a sweep side by side" in refused(capsys, "plot", str(tmp_path))


def test_what_was_killed_before_its_first_chunk_is_begun_anew_with_other_seeds(task: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.toml").write_text('algorithm = "ppo"\n')
    before = {"steps": [0, 0], "evaluation_return": [9.0, 9.0], "seconds": 1.0, "chunk_seconds": 0.0}
    (out / "metrics.jsonl").write_text(json.dumps(before) + "\n")
    assert main(["train", task, "ppo", "--seeds", "3", "--quiet", "--out", str(out)]) == 0
    assert run_directory.load_metrics(out)["steps"].shape[1] == 3


@pytest.mark.full
def test_a_run_goes_on_without_what_it_began_with(task: str, tmp_path: Path) -> None:
    first, then = tmp_path / "first", tmp_path / "then"
    short = ["--seeds", "1", "--quiet"]
    assert main(["train", task, "ppo", *short, "--out", str(first)]) == 0
    assert main(["train", task, "ppo", *short, "--from", str(first), "--out", str(then)]) == 0
    first.rename(tmp_path / "gone")
    assert main(["resume", str(then), "--steps", "256", "--quiet"]) == 0
    assert run_directory.load_metrics(then)["steps"][-1] == 256


def seeds_of(*command: str) -> list[int]:
    return list(read_run_options(make_parser().parse_args([*command])).overrides.get("seeds", ()))


def test_a_first_seed_keeps_the_number_of_seeds(task: str) -> None:
    assert seeds_of("train", task, "ppo") == []
    assert seeds_of("train", task, "ppo", "--seed", "5") == [5, 6, 7]
    assert seeds_of("train", task, "ppo", "--seed", "0") == [0, 1, 2]
    assert seeds_of("compare", task, "ppo", "a2c", "--seed", "5", "--seeds", "2") == [5, 6]
    with open(task, "a") as file:
        file.write("seeds = [1]\n")  # of a2c
    with pytest.raises(UserError, match=r"--seed needs --seeds, .* ppo 3, a2c 1\."):
        seeds_of("compare", task, "ppo", "a2c", "--seed", "5")


@pytest.mark.full
def test_a_comparison_says_before_and_after_what_differs(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(task, "a") as file:
        file.write("total_steps = 256\n")  # of a2c
    out = tmp_path / "compared"
    assert main(["compare", task, "ppo", "a2c", "--seeds", "1", "--out", str(out)]) == 0
    sentence = "The algorithms differ in total_steps: ppo 128, a2c 256."
    shown = capsys.readouterr().out
    assert shown.index(sentence) < shown.index("steps each") < shown.rindex(sentence)
    assert sentence in (out / "comparison.html").read_text()


def test_metrics_that_are_gone_are_no_run_that_ended_early(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the directory of a run"):  # as one that was moved since it was opened
        run_directory.load_metrics(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(UserError, match="ended before its first chunk"):
        run_directory.load_metrics(tmp_path)
    (tmp_path / "checkpoints" / "000000000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "000000000001" / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="the file is gone or empty"):
        run_directory.load_metrics(tmp_path)


def test_the_config_of_a_program_in_python_is_that_of_a_run(tmp_path: Path) -> None:
    """It need not say what was trained; that a machine was noted tells it from a person's own."""
    (tmp_path / "config.toml").write_text("width = 3\n")
    with pytest.raises(UserError, match=r"holds a config\.toml but no run"):
        run_directory.refuse_foreign_files(tmp_path, resumes=False)
    (tmp_path / "run.json").write_text("[]")
    run_directory.refuse_foreign_files(tmp_path, resumes=False)


def test_a_comparison_is_of_what_was_trained(task: str, tmp_path: Path) -> None:
    """One of its runs may have been resumed by itself, for longer."""
    config = resolve_config(task, "ppo")
    for name, steps in (("ppo", 128), ("a2c", 256)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f"total_steps = {steps}\n")
    trained = {name: commands._as_trained(config, tmp_path / name) for name in ("ppo", "a2c")}
    (sentence,) = commands.differences(trained, {"ppo": 128, "a2c": 256})
    assert "differ in total_steps: ppo 128, a2c 256" in sentence


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_a_full_disk_is_noticed_by_the_shortest_command(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115 closing it fails again
    monkeypatch.setattr("sys.stdout", full)
    assert main([option]) == 2
    assert capsys.readouterr().err == "jaxpg: The output cannot be written to (No space left on device).\n"
    with contextlib.suppress(OSError):
        full.close()
