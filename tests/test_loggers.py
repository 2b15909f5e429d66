"""Weights & Biases and TensorBoard: what a run logs there, without the one and with files of the other."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from refusals import refused
from tensorboardX.proto.event_pb2 import Event

import jaxpg
from jaxpg.cli.main import main
from jaxpg.errors import UserError
from jaxpg.experiments.completions import Sample
from jaxpg.experiments.config import resolve_config
from jaxpg.runs.loggers import LOGGERS, Logger, Loggers, check_loggers
from jaxpg.training.health import UNKEPT
from jaxpg.training.metrics_writer import tag_of

CONFIG = resolve_config("cartpole", "ppo", {"seeds": [3, 5]})
ROW: dict[str, Any] = {
    "steps": np.array([10, 12]),
    "return": np.array([1.0, 3.0]),
    "entropy": np.array([0.5, np.nan]),
    "seconds": 2.0,
}
SAMPLES = [Sample("1+1=", "2\x1b\n# no heading", 1.0, 1.0)]


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("evaluation_return", "evaluation/return"),
        ("return", "episodes/return"),
        ("length_correct", "episodes/length_correct"),
        ("accuracy", "completions/accuracy"),
        ("pass@4", "completions/pass@4"),
        ("reward_length", "completions/reward_length"),
        ("advantage_std", "advantages/advantage_std"),
        ("policy_gradient_norm", "gradients/policy_gradient_norm"),
        ("clipped_high", "policy/clipped_high"),
        ("explained_variance", "critic/explained_variance"),
        ("my_own", "training/my_own"),
    ],
)
def test_tags_are_in_groups(name: str, tag: str) -> None:
    assert tag_of(name) == tag


class Wandb:
    """In place of the package: what it was told."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.logged: list[tuple[dict, int]] = []
        self.finished = False
        self.fails = False

    def init(self, **settings: Any) -> Any:
        if self.fails:
            raise ValueError("api_key not configured")
        self.settings = settings
        return SimpleNamespace(log=lambda x, step: self.logged.append((x, step)), finish=self.finish)

    def finish(self) -> None:
        if self.fails:
            raise ValueError("upload failed")
        self.finished = True

    @staticmethod
    def Table(columns: list, data: list) -> tuple:
        return columns, data


def test_wandb_has_means_seeds_settings_and_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = Loggers(["wandb"], CONFIG, tmp_path)
    assert not fake.settings  # it is opened with the first row
    log.on_row(ROW)
    log.on_completions(10, SAMPLES)
    log.close()
    assert fake.settings["dir"] == str(tmp_path)
    assert fake.settings["config"]["ppo.clip"] == CONFIG.settings["clip"]
    (row, step), (texts, _) = fake.logged
    assert step == 10
    assert row == {
        "episodes/return": 2.0,
        "seed 3/episodes/return": 1.0,
        "seed 5/episodes/return": 3.0,
        "policy/entropy": 0.5,
        "seed 3/policy/entropy": 0.5,
    }
    assert texts == {"completions": (["prompt", "completion", "reward", "accuracy"], [list(SAMPLES[0])])}
    assert fake.finished
    log = Loggers(["wandb"], CONFIG, tmp_path / f"{UNKEPT}x")  # whose files nobody would see
    log.on_row(ROW)
    assert (fake.settings["dir"], fake.settings["group"]) == (None, None)
    fake.fails = True
    with pytest.raises(UserError, match="upload failed"):
        log.close()
    with pytest.raises(UserError, match=r"api_key not configured.*WANDB_MODE=offline"):
        Loggers(["wandb"], CONFIG, tmp_path).on_row(ROW)


def test_a_missing_package_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install wandb" in refused(capsys, "train", "cartpole", "ppo", "--wandb", "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="pip install wandb"):
        jaxpg.fit("cartpole", "ppo", loggers=["wandb"])


def events(folder: Path) -> list[Event]:
    found = []
    for path in folder.iterdir():
        data = path.read_bytes() if path.is_file() else b""
        while data:
            length = int.from_bytes(data[:8], "little")
            event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
            found += [event] if event.summary.value else []
    return found


def test_tensorboard_has_seeds_settings_and_completions(tmp_path: Path) -> None:
    log = Loggers(["tensorboard"], CONFIG, tmp_path)
    log.on_row(ROW)
    log.on_completions(10, SAMPLES)
    log.close()
    folder = tmp_path / "tensorboard"
    assert sorted(path.name for path in folder.iterdir()) == ["seed-3", "seed-5", "settings"]
    (one,), (other,) = events(folder / "seed-3"), events(folder / "seed-5")
    assert one.step == 10
    assert {v.tag: v.simple_value for v in one.summary.value} == {"episodes/return": 1.0, "policy/entropy": 0.5}
    assert other.step == 12
    assert {v.tag: v.simple_value for v in other.summary.value} == {"episodes/return": 3.0}
    settings = events(folder / "settings")
    assert any(b"ppo.clip" in e.SerializeToString() for e in settings)
    (text,) = [v.tensor.string_val[0].decode() for e in settings for v in e.summary.value if "completions" in v.tag]
    assert text == "      1.00 ✓ 1+1=2\\x1b\n    # no heading"


@pytest.mark.parametrize("opens", [False, True])
def test_every_logger_that_was_opened_is_closed(opens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the next one cannot be opened, or another cannot be closed."""
    closed: list[str] = []

    def fragile(name: str) -> Logger:
        def close() -> None:
            closed.append(name)
            raise UserError(f"{name} cannot be closed")

        return Logger(lambda row: None, lambda steps, samples: None, close)

    def last(config: Any, out: Path) -> Logger:
        if not opens:
            raise UserError("no network")
        return fragile("last")

    loggers = {"first": lambda config, out: fragile("first"), "last": last}
    monkeypatch.setattr("jaxpg.runs.loggers.LOGGERS", loggers)
    log = Loggers(list(loggers), CONFIG, tmp_path)
    with contextlib.nullcontext() if opens else pytest.raises(UserError, match="no network"):
        log.on_row(ROW)
    with pytest.raises(UserError, match="cannot be closed"):
        log.close()
    assert sorted(closed) == (["first", "last"] if opens else ["first"])


@pytest.mark.parametrize("loggers", ["wandb", None, 3, ["tensorbord"]])
def test_loggers_are_a_list_of_names(loggers: Any) -> None:
    with pytest.raises(UserError, match=r"list of names|no logger 'tensorbord'. Did you mean 'tensorboard'"):
        check_loggers(loggers)


def test_events_that_would_be_deleted_are_refused() -> None:
    with pytest.raises(UserError, match="give out=DIRECTORY"):
        jaxpg.fit("cartpole", "ppo", loggers=["tensorboard"], progress=False)


def test_a_sweep_takes_none(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, "sweep", "cartpole", "ppo", "--grid", "gamma=0.9,0.99", "--tensorboard")
    assert "sweep takes no --tensorboard" in sentence
    assert set(LOGGERS) == {"wandb", "tensorboard"}


def test_a_run_that_goes_on_is_logged_where_it_was(tmp_path: Path) -> None:
    """`jaxpg resume` needs no option for it."""
    train = ["train", "frozen_lake", "q_learning", "--seeds", "2", "--steps", "200", "--set", "anneal_steps=none"]
    assert main([*train, "--out", str(tmp_path), "--quiet", "--tensorboard"]) == 0
    assert main(["resume", str(tmp_path), "--steps", "600", "--quiet"]) == 0
    steps = {e.step for path in (tmp_path / "tensorboard").glob("seed-0*") for e in events(path) if e.summary.value}
    assert {200, 600} <= steps
