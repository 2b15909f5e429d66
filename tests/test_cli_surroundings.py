"""The command line where files are not what they should be, and where an environment comes from a user's own module."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from jaxpg import files, report
from jaxpg.cli.main import main
from jaxpg.experiments import config as configs
from jaxpg.experiments.build import build
from jaxpg.parallel import compilation_cache
from jaxpg.training import checkpoint, run_directory
from jaxpg.training.loop import restore

TINY = ["--steps", "256", "--set", "num_envs=4", "--set", "evaluations=2", "--set", "evaluation_episodes=4"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two seeds, not to be changed."""
    out = tmp_path_factory.mktemp("runs") / "a2c"
    assert main(["train", "catch", "a2c", "--seeds", "2", "--quiet", "--out", str(out), *TINY]) == 0
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """The same run, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "a2c"))


def test_a_checkpoint_of_another_run_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same shapes: only the config tells it apart."""
    other, out = tmp_path / "ppo", str(tmp_path / "out")
    settings = {"num_envs": 4, "evaluations": 2, "evaluation_episodes": 4, "seeds": [0, 1], "total_steps": 256}
    shutil.copytree(run / "checkpoints", other / "checkpoints")
    shutil.copy(run / "metrics.jsonl", other)
    (other / "config.toml").write_text(
        files.toml_dumps(configs.to_dict(configs.resolve_config("catch", "ppo", settings)))
    )
    for command in (
        ["eval", str(other)],
        ["play", str(other), "--gif", str(tmp_path / "x.gif")],
        ["train", "catch", "ppo", "--out", str(other), "--resume"],
        ["train", "catch", "a2c", "--from", str(other), "--out", out, *TINY],
    ):
        assert "has another config: algorithm is 'a2c' there, 'ppo' here" in refused(capsys, *command)
    assert not (tmp_path / "x.gif").exists()
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_learner_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config is right, its arrays are not."""
    folder = run / "checkpoints"
    about = checkpoint.find(folder).about
    shutil.rmtree(folder)
    checkpoint.save(folder, {"w": np.zeros(3)}, steps=256, about=about)
    for command in (["eval", str(run)], ["train", "catch", "a2c", "--out", str(run), "--resume", "--steps", "999"]):
        assert "is of another learner: the array " in refused(capsys, *command)


def test_files_that_cannot_be_used(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nothing")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "latin.toml").write_bytes(b'environment = "\xe9"')
    below, absent = str(tmp_path / "file" / "run"), str(tmp_path / "absent" / "x")
    for command, words in (
        (
            ["train", "catch", "a2c", "--out", below, *TINY],
            f"{below} cannot be written to: {below[:-4]} is not a directory",
        ),
        (["train", "catch", "a2c", "--out", str(tmp_path / "link"), *TINY], "link is a link to nothing. Remove it"),
        (["train", str(tmp_path / "folder.toml"), "ppo"], "folder.toml cannot be read or written (Is a directory)"),
        (["train", str(tmp_path / "latin.toml"), "ppo"], "latin.toml is not valid TOML"),
        (["plot", str(run), "--out", "x.foo"], "must end in .png, .svg, .pdf, not x.foo"),
        (["plot", str(run), "--out", f"{absent}.png"], "x.png cannot be read or written (No such file or directory)"),
        (["play", str(run), "--gif", f"{absent}.gif"], "x.gif cannot be read or written (No such file or directory)"),
    ):
        assert words in refused(capsys, *command)


SMALL_FILES = """
import json, resource, sys
from jaxpg.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
for arguments in json.loads(sys.argv[1]):
    print("exit code", main(arguments), file=sys.stderr)
"""


def test_full_disk(run: Path, tmp_path: Path) -> None:
    """Whatever is to be written: a sentence with the file and the reason, and what was there before stays whole."""
    compared = Path(shutil.copytree(run, tmp_path / "compared" / "a2c")).parent
    curve, report = (compared / name for name in ("learning_curve.png", "comparison.html"))
    commands = {
        "checkpoint": ["train", "catch", "a2c", "--out", str(tmp_path / "new"), *TINY],
        "a2c/learning_curve.png": ["train", "catch", "a2c", "--out", str(run), "--resume"],
        "compared/learning_curve.png": ["compare", "catch", "a2c", "--out", str(compared), "--resume"],
        "curves.svg": ["plot", str(run), "--out", str(tmp_path / "curves.svg")],
        "play.gif": ["play", str(run), "--gif", str(tmp_path / "play.gif")],
    }
    before = (run / "learning_curve.png").read_bytes()
    ended = subprocess.run(
        [sys.executable, "-c", SMALL_FILES, json.dumps(list(commands.values()))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_ENABLE_COMPILATION_CACHE": "false"},
        capture_output=True,
        text=True,
    )
    message = [line for line in ended.stderr.splitlines() if line]
    assert ended.stderr.count("Traceback") == 0
    assert message[1::2] == ["exit code 2"] * len(commands), ended.stderr
    for what, sentence in zip(commands, message[::2], strict=True):
        assert what in sentence
        assert "(File too large)" in sentence
    assert (run / "learning_curve.png").read_bytes() == before
    assert not [path for path in (curve, report, *tmp_path.glob("**/*.tmp"), *tmp_path.glob("*.*")) if path.exists()]


def test_play_takes_the_seed_that_was_best_at_its_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seed 1 at the best checkpoint, seed 0 at the last."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    _, early, late = (row for row in rows if "evaluation_return" in row)
    early["evaluation_return"], late["evaluation_return"] = [0.0, 1.0], [1.0, 0.0]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = checkpoint.find(run / "checkpoints").about
    state = restore(build(configs.load_config(run)).learner, run, [0, 1], "last")._replace(
        steps=np.array(early["steps"], "i4")
    )
    checkpoint.save(run / "checkpoints", state, steps=min(early["steps"]), score=9.0, about=about)
    for which, seed in (("best", 1), ("last", 0)):
        assert main(["play", str(run), "--gif", str(tmp_path / "x.gif"), "--checkpoint", which]) == 0
        assert f"x.gif: seed {seed}," in capsys.readouterr().out


def test_episodes_of_an_evaluation_in_groups(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "config.toml"
    path.write_text(path.read_text().replace("evaluation_samples = 1", "evaluation_samples = 4"))
    for manifest in run.glob("checkpoints/*/manifest.json"):
        fields = json.loads(manifest.read_text())
        fields["about"]["config"]["evaluation_samples"] = 4
        del fields["checksum"]  # of what it was before
        manifest.write_text(json.dumps(fields))
    message = refused(capsys, "eval", str(run), "--episodes", "10")
    assert "--episodes 10 cannot be divided into groups with one start state, of evaluation_samples = 4" in message
    assert "such as --episodes 12" in message
    assert main(["eval", str(run), "--episodes", "8", "--greedy"]) == 0  # here a greedy episode is not like another
    assert "2 start states x 4 greedy episodes" in " ".join(capsys.readouterr().out.split())


MINE = """
from jaxpg import envs

number = 3

def catch(rows=10):
    return envs.make("Catch-bsuite", rows=rows)

def three():
    return number

def broken():
    return 1 / 0
"""


def test_an_environment_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A function named in the config; `rows` decides how long an episode is."""
    (tmp_path / "my_environments.py").write_text(MINE)
    (tmp_path / "mine.toml").write_text(
        'environment = "my_environments:catch"\nenvironment_settings = { rows = 6 }\nwrappers = { flatten = {} }\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "run"
    task = ["train", str(tmp_path / "mine.toml"), "a2c", "--out", str(out)]
    assert main([*task, "--quiet", *TINY]) == 0
    lengths = run_directory.load_metrics(out)["length"]
    assert (lengths[np.isfinite(lengths)] == 5).all()
    assert configs.load_config(out, trust_code=True).environment == "my_environments:catch"

    for name, words in {
        "my_environmets:catch": "cannot be imported: ModuleNotFoundError: No module named 'my_environmets'",
        "my_environments:cathc": "my_environments:cathc cannot be imported: my_environments has no 'cathc'",
        "my_environments:number": "my_environments:number must be a function, not 3",
        "my_environments:three": "my_environments:three must return a jaxpg.types.Env, not 3",
        "my_environments:broken": "my_environments:broken cannot be made: its function raised ZeroDivisionError",
    }.items():
        (tmp_path / "other.toml").write_text(f'environment = "{name}"\n')
        assert words in refused(capsys, "train", str(tmp_path / "other.toml"), "a2c")
    message = refused(capsys, *task[:-1], str(tmp_path / "x"), "--set", "environment_settings.row=1")
    assert "my_environments:catch has no setting 'row'. Did you mean 'rows'" in message


def test_compiled_programs_are_kept_where_it_is_said_or_in_the_home_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(number: int) -> None:
        raise KeyError(number)

    for name in ("JAXPG_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert compilation_cache.cache_directory() == "/home/me/.cache/jaxpg"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert compilation_cache.cache_directory() is None
    monkeypatch.setenv("JAXPG_CACHE", "/here")
    assert compilation_cache.cache_directory() == "/here"


@pytest.mark.parametrize("columns", ["0", "20"])
def test_a_narrow_terminal_loses_no_number(
    columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["plan", "frozen_lake", "--gamma", "0.99"]) == 0
    assert capsys.readouterr().out.count("0.542026") == 4  # the value of the start by each method


def test_a_narrow_terminal_loses_no_column_of_a_result(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its intervals, speed and wall time take more than 60 columns."""
    steps, final = np.arange(1.0, 4.0), np.linspace(203.0, 497.0, 6)
    result = report.RunResult(steps, np.full((3, 6), 450.0), final, seconds=100_000.0, steps_per_second=123_456.0)
    summaries = report.summarize({"a2c": result}, threshold=400.0)
    monkeypatch.setattr(report, "summarize", lambda *_: summaries)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["resume", str(run), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert out.split().count("wall") == 1
    (row,) = (line for line in out.splitlines() if line.split()[:1] == ["a2c"])
    assert row.split()[1:] == ["350.0", "350.0", "1.02", "123", "k", "27:46:40"]


def test_the_public_face_is_imported_on_first_use() -> None:
    """The command line answers before jax is imported."""
    code = """
import sys, jaxpg
assert "jax" not in sys.modules
assert set(jaxpg.__all__) <= set(dir(jaxpg))
from jaxpg import *
assert [ladder.ppo, networks.mlp, language.transformer, preferences.dpo, policy_gradient.policy_gradient, envs.make]
from jaxpg import nothing
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].startswith("ImportError: cannot import name 'nothing' from 'jaxpg'")
