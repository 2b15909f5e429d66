"""Runs that are moved, copied or named from elsewhere, and models that have changed since a run was trained by them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxpg
from jaxpg.cli import record
from jaxpg.cli.main import main
from jaxpg.experiments.config import load_config
from jaxpg.runs import fitting
from jaxpg.training import run_directory
from jaxpg.training.relocation import relocated

TASK = """
environment = "sort"
environment_settings = { length = 3, letters = 6 }
network = { kind = "transformer", width = 8, layers = 1, heads = 2, kv_heads = 1 }
total_steps = 400
evaluations = 2
evaluation_episodes = 8

[sft]
batch_size = 8

[reward_model]
initial = "sft"
batch_size = 8
pairs = { slip_rate = 0.5 }

[rlhf]
initial = "sft"
reward = "reward_model"
num_envs = 8
num_minibatches = 2
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a run that has two stages."""
    place = tmp_path_factory.mktemp("moved")
    (place / "task.toml").write_text(TASK)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["train", "task.toml", "rlhf", "--out", "here", "--quiet"]) == 0
        yield place


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that directory, which is the working one."""
    shutil.copytree(trained, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_paths_within_the_directory_follow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables = {
        "initial": "a/run/sft",
        "reward": "a/other",
        "environment": "a/run/x",
        "rewards": {"liked": {"model": "a/run/deep/model", "weight": 2.0}},
        "pairs": {"file": "a/run/pairs.npz", "sampled_from": "sft"},
    }
    new = Path("b/c")
    assert relocated(tables, ["a/run"], tmp_path / "a" / "run") == tables  # the same by another name
    assert relocated(tables, ["a/run"], new) == tables | {
        "initial": "b/c/sft",
        "rewards": {"liked": {"model": "b/c/deep/model", "weight": 2.0}},
        "pairs": {"file": "b/c/pairs.npz", "sampled_from": "sft"},
    }
    assert (
        relocated(tables, [], new) == relocated(tables, ["."], new) == relocated(tables, ["elsewhere"], new) == tables
    )
    (tmp_path / "b" / "other").mkdir(parents=True)  # beside the new directory, and no longer beside the old one
    assert relocated(tables, ["a/run"], new)["reward"] == "b/other"
    (tmp_path / "a" / "other").mkdir(parents=True)
    assert relocated(tables, ["a/run"], new)["reward"] == "a/other"


def test_a_moved_run_goes_on_with_its_own_stages(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.rename("here", "there")
    assert load_config(Path("there")).reward == "there/reward_model"
    assert main(["eval", "there", "--episodes", "4"]) == 0
    assert main(["resume", "there", "--steps", "800", "--quiet"]) == 0
    assert load_config(Path("there")).total_steps == 800
    (place / "sub").mkdir()
    os.chdir("sub")
    assert main(["resume", "../there", "--steps", "1200", "--quiet"]) == 0
    os.chdir(place)
    assert main(["eval", "there", "--episodes", "4"]) == 0
    assert main(["resume", "there", "--quiet"]) == 0  # which changes nothing
    plan = record.read(Path("there"))
    assert plan is not None
    assert len(plan.command_line.splitlines()) == 3  # with those that have changed what is trained
    machines = run_directory.load_machines(Path("there"))
    assert [machine["directory"] for machine in machines] == ["here", "there", "../there"]


def test_a_copy_does_not_use_the_stages_of_what_it_is_a_copy_of(place: Path) -> None:
    """Of which one has been trained on since; the copy has not begun its last stage."""
    shutil.copytree("here", "copy")
    for path in Path("copy").iterdir():
        if path.name not in ("plan.json", "sft", "reward_model"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert main(["resume", "here/reward_model", "--steps", "800", "--quiet"]) == 0
    assert main(["resume", "copy", "--quiet"]) == 0
    config = load_config(Path("copy"))
    assert (config.initial, config.reward) == ("copy/sft", "copy/reward_model")
    returns = [[row.get("return") for row in run_directory.load_rows(Path(run))] for run in ("here", "copy")]
    assert returns[0] == returns[1]


def test_a_reward_model_that_was_trained_on_is_noticed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run does not go on with it, and an evaluation says so."""
    assert main(["resume", "here/reward_model", "--steps", "800", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["resume", "here", "--steps", "800", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "The model of reward has changed since the run in here began" in error
    assert main(["eval", "here", "--episodes", "4"]) == 0
    assert "The model of reward has changed since the run was trained" in capsys.readouterr().out


def test_ctrl_c_in_a_stage_of_fit_names_what_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of the whole has not begun, so no command finds it; the same call goes on."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    train = fitting._train

    def interrupted(stage: Any, *arguments: Any) -> Any:
        if stage.name == "reward_model":
            signal.raise_signal(signal.SIGINT)
        return train(stage, *arguments)

    monkeypatch.setattr(fitting, "_train", interrupted)
    call = {"out": "fitted", "seeds": 1, "progress": False}
    try:
        with pytest.raises(KeyboardInterrupt, match="saved; go on with it by the same call of fit"):
            jaxpg.fit("task.toml", "rlhf", **call)  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, old)
    monkeypatch.setattr(fitting, "_train", train)
    jaxpg.fit("task.toml", "rlhf", **call)  # type: ignore[arg-type]
    assert main(["eval", "fitted", "--episodes", "4"]) == 0


def test_an_interval_over_few_prompts_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a file are drawn with replacement: more draws know the mean of these prompts, not of others."""
    records = [{"prompt": f"{i}=", "answer": str(i)} for i in range(40)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(x) + "\n" for x in records))
    task = TASK.replace('"sort"', '"json_lines"').replace(
        "length = 3, letters = 6", f'path = "{data}", held_out = 0.2, max_tokens = 4'
    )
    (tmp_path / "task.toml").write_text(task)
    run = tmp_path / "run"
    assert main(["train", str(tmp_path / "task.toml"), "sft", "--out", str(run), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["eval", str(run), "--episodes", "64"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"the 64 prompts of this seed, drawn from \d+: of the mean over these, not over new ones", out), (
        out
    )
