"""The command line, from a refusal in a sentence to a trained policy that plays."""

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
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from refusals import refused

from jaxpg import envs, files, ladder, parallel, report
from jaxpg.cli import commands, devices, inspection, listing, record, runs
from jaxpg.cli.main import main
from jaxpg.cli.options import read_run_options
from jaxpg.cli.parser import make_parser
from jaxpg.cli.signals import held_back
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments.build import build, networks
from jaxpg.experiments.stages import Stage
from jaxpg.report.episodes.gif import trimmed
from jaxpg.rollout.evaluation import evaluate, record_episode
from jaxpg.training import checkpoint, loop, run_directory
from jaxpg.training.health import Diverged
from jaxpg.types import Actor
from jaxpg.user_input.printable import counted

SHORT = ["--steps", "3000", "--set", "num_envs=4", "--set", "evaluation_episodes=8", "--set", "evaluations=2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of two seeds."""
    out = tmp_path_factory.mktemp("runs") / "catch"
    assert (
        main(["train", "catch", "a2c", "--seeds", "2", "--out", str(out), *SHORT, "--set", "learning_rate=0.01"]) == 0
    )
    return out


def test_train_leaves_everything_in_its_directory(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert names == {
        "plan.json",
        "config.toml",
        "run.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "learning_curve.png",
        "report.html",
    }
    resolved = configs.load_config(trained)
    assert (resolved.task, resolved.algorithm, resolved.seeds, resolved.total_steps) == ("catch", "a2c", (0, 1), 3000)
    assert (resolved.settings["learning_rate"], resolved.settings["num_envs"]) == (0.01, 4)
    metrics = run_directory.load_metrics(trained)
    assert metrics["steps"][-1].tolist() == [3008, 3008]  # the first multiple of 4 x 16 that reaches 3000
    assert np.isfinite(metrics["evaluation_return"]).all(1).sum() == 3
    assert metrics["steps"][0].tolist() == [0, 0]
    with Image.open(trained / "learning_curve.png") as picture:
        assert picture.width > 300


@pytest.mark.parametrize(
    ("options", "seeds", "num_envs", "shared_by"),
    [
        ({}, 1, 32, 4),
        ({}, 2, 16, 2),
        ({}, 4, 32, 0),
        ({}, 1, 34, 0),
        ({}, 1, 28, 0),
        ({"devices": "1"}, 1, 32, 0),
        ({"mesh": "data=2"}, 1, 32, 0),
    ],
)
def test_devices_that_the_default_leaves_unused_are_named_where_they_would_help(
    options: dict[str, str], seeds: int, num_envs: int, shared_by: int
) -> None:
    asked = devices.DeviceOptions(**options)
    told = devices.describe_unused(asked, devices.make_run_mesh(asked, seeds, num_envs), num_envs)
    assert (f"with --devices all, {shared_by} share" in told) if shared_by else told == ""
    if shared_by:
        mesh = devices.make_run_mesh(devices.DeviceOptions(devices="all"), seeds, num_envs)
        assert mesh.shape[parallel.DATA] == shared_by


def test_a_run_begins_with_the_devices_that_it_leaves_unused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "catch", "a2c", "--seeds", "2", "--steps", "512", "--set", "num_envs=16", "--out"]
    assert main([*command, str(tmp_path / "run")]) == 0
    assert "\n2 of 4 devices; with --devices all, 2 share the environments of a seed" in capsys.readouterr().out


def test_progress_is_a_line_for_each_tenth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And one for the policy before training, and one when it is compiled; the last iteration of 64 is finished."""
    assert main(["train", "catch", "a2c", "--seeds", "2", "--seed", "5", "--out", str(tmp_path / "run"), *SHORT]) == 0
    out = capsys.readouterr().out
    per_core = " (one XLA device per core)" if len(os.sched_getaffinity(0)) == jax.device_count() else ""
    assert f"a2c on catch, 2 seeds, 3,000 steps each; 2 x cpu{per_core}, jax" in out
    lines = re.findall(r"^[\d,]+ / 3,000 steps each, .*$", out, re.MULTILINE)
    assert len(run_directory.load_metrics(tmp_path / "run")["steps"]) > 40
    assert len(lines) == 12
    assert re.match(r"0 / 3,000 steps each, compiling, evaluation -?[\d.]+$", lines[0])
    assert re.match(r"64 / 3,000 steps each, compiled in [\d.]+ s, evaluation .*, return -?[\d.]+$", lines[1])
    assert re.search(
        r"3,008 / 3,000 steps each, [\d,]+ steps/s in all, 0:00 left, evaluation .*, return .*$", lines[-1]
    )
    assert re.search(r"^before training \(IQM\): -?[\d.]+", out, re.MULTILINE)
    assert "IQM [95%]" in out
    assert configs.load_config(tmp_path / "run").seeds == (5, 6)


def test_quiet_shows_only_the_result(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "catch", "a2c", "--out", str(trained), "--resume", "--quiet"]
    assert main(arguments) == 0  # the run is complete: nothing is trained, the result is shown again
    out = capsys.readouterr().out
    assert "IQM" in out
    assert "steps each" not in out


def test_eval_play_and_plot(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained), "--episodes", "20", "--greedy"]) == 0
    out = capsys.readouterr().out
    assert "20 greedy" in " ".join(out.split())
    per_seed = [float(x) for x in re.findall(r"^ +[01] +(-?[\d.]+) +9 *$", out, re.MULTILINE)]
    assert len(per_seed) == 2
    assert float(re.search(r"^mean (-?[\d.]+)", out, re.MULTILINE)[1]) == pytest.approx(np.mean(per_seed), abs=1e-3)

    assert main(["play", str(trained), "--gif", str(tmp_path / "play.gif"), "--checkpoint", "last"]) == 0
    assert "9 steps, return" in capsys.readouterr().out
    with Image.open(tmp_path / "play.gif") as picture:
        assert picture.n_frames == 10

    assert main(["plot", str(trained), str(trained), "--out", str(tmp_path / "curves.svg")]) == 0
    assert "a2c" in (tmp_path / "curves.svg").read_text()


def test_eval_and_play_are_greedy_where_the_evaluations_of_the_run_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A grid world's are; a policy that explores always draws another picture."""
    run, gif = tmp_path / "run", tmp_path / "x.gif"
    settings = ["--set", "epsilon_end=1.0", "--set", "epsilon_start=1.0", "--steps", "4000", "--seeds", "1"]
    assert main(["train", "gridworld", "q_learning", *settings, "--out", str(run), "--quiet"]) == 0

    def told(*command: str) -> str:
        capsys.readouterr()
        assert main([command[0], str(run), *command[1:]]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "8 greedy episodes" in told("eval", "--episodes", "8")
    assert "8 sampled episodes" in told("eval", "--episodes", "8", "--no-greedy")

    def drawn(*option: str) -> bytes:
        told("play", "--gif", str(gif), *option)
        return gif.read_bytes()

    assert drawn() == drawn("--greedy") != drawn("--no-greedy")


@pytest.mark.parametrize("greedy", [True, False])
def test_eval_plays_the_mode_only_with_greedy(trained: Path, capsys: pytest.CaptureFixture[str], greedy: bool) -> None:
    """The printed return of each seed is that of an actor made by hand."""
    assert main(["eval", str(trained), "--episodes", "20", *["--greedy"][:greedy]]) == 0
    out = capsys.readouterr().out
    assert re.search("^checkpoint: the (best|last), at ", out, re.MULTILINE)
    printed = [float(x) for x in re.findall(r"^ +[01] +(-?[\d.]+) +9 *$", out, re.MULTILINE)]
    resolved = configs.load_config(trained)
    env, (policy, _) = configs.make_env(resolved), networks(resolved, configs.make_env(resolved))
    params = loop.restore(build(resolved).learner, trained, [0, 1], "best").learner.params.policy

    def mean_return(params, key, mode):
        def act(memory, obs, key, _):
            distribution, memory = policy.act(params, memory, obs)
            return jnp.argmax(distribution.logits) if mode else distribution.sample(key), memory

        return evaluate(env, Actor(lambda obs: (), act), key, episodes=20, greedy=False).returns.mean()

    keys = jax.random.split(jax.random.key(0), 2)
    right, wrong = (jax.jit(jax.vmap(partial(mean_return, mode=mode)))(params, keys) for mode in (greedy, not greedy))
    np.testing.assert_allclose(printed, right, atol=1e-3)
    assert np.abs(right - wrong).max() > 0.05  # or the test could not tell


@pytest.mark.parametrize("best", [0, 1])
def test_play_draws_the_seed_that_did_best(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, best: int
) -> None:
    """In the last evaluation; its greedy actions are drawn, and the other seed would have acted otherwise."""
    scores, episodes = np.array([[0.5, 0.5], [0.1, 0.1], [np.nan, np.nan]]), []
    scores[:2, best] = 0.2
    metrics = {"evaluation_return": scores, "steps": np.zeros((3, 2))}
    monkeypatch.setattr(run_directory, "load_metrics", lambda run: metrics)
    monkeypatch.setattr(report, "render_gif", lambda env, episode, path: episodes.append(episode))
    assert main(["play", str(trained), "--gif", str(tmp_path / "x.gif"), "--checkpoint", "last", "--greedy"]) == 0
    assert f"seed {best}, 9 steps" in capsys.readouterr().out
    setup = build(configs.load_config(trained))
    state = loop.restore(setup.learner, trained, [0, 1], "last").learner

    def actions(seed: int, greedy: bool) -> list[int]:
        actor = setup.learner.actor(jax.tree.map(lambda x: x[seed], state))
        return record_episode(setup.env, actor, jax.random.key(0), greedy=greedy).actions.tolist()

    assert episodes[0].actions.tolist() == actions(best, True)
    assert actions(best, True) not in (actions(1 - best, True), actions(best, False))


def test_a_long_episode_is_recorded_with_more_and_more_memory(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its nine steps the first try has memory for one; a step more than it has is enough."""
    episodes: list[Any] = []
    monkeypatch.setattr(report, "render_gif", lambda env, episode, path: episodes.append(episode))
    for few in (1, 9, 1024):
        monkeypatch.setattr(inspection, "FEW_STEPS", few)
        assert main(["play", str(trained), "--gif", str(tmp_path / "x.gif")]) == 0
    for episode in episodes:
        assert episode.length == 9
        jax.tree.map(np.testing.assert_array_equal, trimmed(episode), trimmed(episodes[-1]))


def test_the_words_at_the_end_of_a_run(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that looks at it can be pasted, and its page numbers seeds as the run does."""
    out = tmp_path / "a b"
    shutil.copytree(trained, out)
    begun, options = record.read(out), read_run_options(make_parser().parse_args(["resume", str(out)]))
    assert begun is not None
    config = dataclasses.replace(configs.load_config(out), seeds=(100, 101))
    commands._show_run(config, runs.Session(begun, out, options))
    told = capsys.readouterr().out
    assert "catch, 2 seeds" in told
    (look,) = re.findall("Look at it: +(.*)", told)
    assert shlex.split(look) == ["jaxpg", "play", str(out), "--gif", "catch.gif"]
    assert re.findall(r"<tr><td>(\d+)</td>", (out / "report.html").read_text()) == ["100", "101"]


def test_a_page_names_the_machines_that_trained_and_not_the_one_that_draws_it(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = record.read(trained)
    assert begun is not None
    session = runs.Session(begun, trained, read_run_options(make_parser().parse_args(["resume", str(trained)])))
    monkeypatch.setattr(run_directory, "load_machines", lambda run_dir: [{"cpu": f"that of {run_dir.name}"}])
    found = commands._provenance(session, [tmp_path / "a", tmp_path / "b"])
    assert found["machine"] == {"cpu": "that of a"}
    assert found["machine 2"] == {"cpu": "that of b"}
    assert found["command"] == begun.command_line


def test_one_is_no_plural() -> None:
    assert [counted(n, "seed") for n in (0, 1, 2)] == ["0 seeds", "1 seed", "2 seeds"]


def test_commands_run_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever JAX_ENABLE_X64 says: what is trained in one of them is read in the other."""
    monkeypatch.setitem(commands.COMMANDS, "list", lambda arguments: int(jax.config.jax_enable_x64))
    with jax.enable_x64(True):
        assert main(["list"]) == 0


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "catch", "reinforce", "a2c", "--seeds", "2", "--seed", "7"]
    arguments += ["--out", str(tmp_path), *SHORT]
    began = time.monotonic()
    assert main(arguments) == 0
    elapsed = time.monotonic() - began
    out = capsys.readouterr().out
    assert "reinforce" in out
    assert "a2c" in out
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert set(written["algorithms"]) == {"reinforce", "a2c"}
    for name, line in written["algorithms"].items():
        metrics = run_directory.load_metrics(tmp_path / name)
        assert line["final"] == pytest.approx(metrics["evaluation_return"][-1].tolist())
        assert line["seconds"] == pytest.approx(metrics["seconds"][-1])
        rates = np.diff(metrics["steps"].sum(1)) / metrics["chunk_seconds"][1:]  # of both seeds
        assert line["steps_per_second"] == pytest.approx(np.median(rates[1:]))  # the first chunk was compiled in
        assert line["initial"] == pytest.approx(np.mean(metrics["evaluation_return"][0]))
        assert 0 < metrics["chunk_seconds"].sum() <= metrics["seconds"][-1]
    assert sum(line["seconds"] for line in written["algorithms"].values()) <= elapsed
    page = (tmp_path / "comparison.html").read_text()
    assert "catch" in page
    assert re.findall(r"<tr><td>(\d+)</td>", page) == ["7", "8"]
    assert main([*arguments, "--resume"]) == 0  # complete runs are taken as they are


def test_a_comparison_goes_on_without_an_algorithm_that_diverges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named, the others are trained and shown, and the exit code says that one is missing."""
    task = tmp_path / "wild.toml"
    task.write_text('environment = "Catch-bsuite"\n[a2c]\nlearning_rate = 1e30\nmax_grad_norm = 1e30\n')
    short = ["--steps", "256", "--set", "num_envs=4", "--set", "evaluation_episodes=1", "--set", "evaluations=1"]
    assert main(["compare", str(task), "a2c", "reinforce", "--seeds", "1", "--out", str(tmp_path / "c"), *short]) == 2
    told = capsys.readouterr()
    assert "jaxpg: a2c: Training diverged" in told.err
    assert "a2c is left out. Training diverged" in told.out
    written = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert set(written["algorithms"]) == {"reinforce"}


def compared_while_diverging(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[object]]:
    """Lets the run of this name diverge; what commands then train, and what they show: what is left, and the rest."""
    trained: list[str] = []
    shown: list[object] = []

    def diverge(stage: Stage, *_: object) -> bool:
        trained.append(stage.name)
        if stage.name == name:
            raise Diverged("Training diverged.", quantity="loss", index=0, iteration=1)
        return True

    monkeypatch.setattr(runs, "_train_stage", diverge)
    monkeypatch.setattr(commands, "_as_trained", lambda config, _: config)
    monkeypatch.setattr(commands, "_show_comparison", lambda left, _, diverged: shown.append((list(left), diverged)))
    return trained, shown


def test_what_diverges_first_does_not_keep_the_others_from_being_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shown = compared_while_diverging("a2c", monkeypatch)
    assert main(["compare", "catch", "a2c", "ppo", "--seeds", "1", "--out", str(tmp_path / "c")]) == 2
    assert shown == [(["ppo"], {"a2c": "Training diverged."})]


def test_what_begins_with_a_run_that_diverged_is_left_out_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two that begin with what is not compared itself, and of one that begins with a compared one."""
    task = tmp_path / "chain.toml"
    task.write_text(
        'environment = "Catch-bsuite"\n[stages.warm]\nalgorithm = "a2c"\ninitial = "none"\n[a2c]\ninitial = "warm"\n'
        '[trpo]\ninitial = "a2c"\n'
    )
    trained, shown = compared_while_diverging("warm", monkeypatch)
    words = ["compare", str(task), "trpo", "a2c", "ppo", "--seeds", "1", "--out", str(tmp_path / "c")]
    assert main(words) == 2
    assert trained == ["warm", "ppo"]
    failed = {"warm": "Training diverged.", "a2c": "It begins with warm, which has failed."}
    assert shown == [(["ppo"], failed | {"trpo": "It begins with a2c, which has failed."})]
    assert "jaxpg: trpo: It begins with a2c, which has failed." in capsys.readouterr().err


def test_a_comparison_is_of_one_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "two.toml"
    task.write_text('environment = "CartPole-v1"\n[a2c]\nenvironment = "Acrobot-v1"\n')
    told = refused(capsys, "compare", str(task), "ppo", "a2c", "--out", str(tmp_path / "c"))
    assert "compare is of one environment, and the algorithms have several here: ppo CartPole-v1, a2c Acrobot" in told
    assert not (tmp_path / "c").exists()


def test_algorithms_are_listed_without_docstrings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As python -OO has none."""
    monkeypatch.setattr(ladder.ppo, "__doc__", None)
    assert main(["list", "algorithms"]) == 0
    assert re.search(r"^ *ppo ", capsys.readouterr().out, re.MULTILINE)


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*what: str) -> str:
        assert main(["list", *what]) == 0
        return " ".join(capsys.readouterr().out.split())

    out = listed()
    assert all(name in out for name in ("cartpole", "CartPole-v1", "reinforce_to_go", "dapo"))
    more = "jaxpg list options ALGO, environments, wrappers, pairs, step_labels or demonstrations."
    assert out.endswith(f"There is more: {more}")
    out = listed("environments")
    assert all(name in out for name in envs.names())
    assert "Catch-bsuite rows = 10, columns = 5, max_steps_in_episode = 1000" in out
    assert "json_lines path, tokenizer = characters," in out  # path has no default
    out = listed("wrappers")
    assert all(name in out for name in envs.WRAPPERS)
    assert "probability 0.25 of repeating the previous action, in [0, 1]." in out
    assert "step_labels.label_noise 0.0 probability that a label" in listed("step_labels")
    assert "pairs.sharpness 10.0 how well the judge distinguishes rewards." in listed("pairs")
    assert "demonstrations.number 16 completions of each prompt." in listed("demonstrations")
    out = listed("options", "dapo")
    assert "clip_high 0.28" in out
    assert "sampling rounds" in out
    assert "network.{cnn}.channels [16]" in out
    assert "layer_norm false" in out


@pytest.mark.parametrize("columns", ["60", "80"])
def test_a_narrow_terminal_shows_whole_names_of_settings(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    assert main(["list", "options", "ppo"]) == 0
    in_a_file = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", columns)
    for command in (["list", "options", "ppo"], ["show", "cartpole", "ppo"]):
        assert main(command) == 0
        out = capsys.readouterr().out
        assert "…" not in out
        assert max(map(len, out.splitlines()[:40])) <= int(columns)
    assert "network.{recurrent}.initial_log_std " in in_a_file
    meaning = configs.algorithm_options("ppo")["num_envs"].meaning
    assert any("num_envs" in line and meaning in line for line in in_a_file.splitlines())  # in one line


@pytest.mark.parametrize("columns", ["60", "80"])
@pytest.mark.parametrize("what", ["tasks", "algorithms", "environments", "wrappers"])
def test_a_narrow_terminal_shows_whole_names(
    what: str, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["list", what]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(len(line) for line in out.splitlines()) <= int(columns)


def test_a_reason_that_environments_share_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise UserError(f"The environment {name} cannot be made: MuJoCo is not installed.")

    monkeypatch.setattr(listing.host, "ids", lambda prefix: ["Ant-v4", "Ant-v5"])
    monkeypatch.setattr(envs, "default_settings", missing)
    assert main(["list", "environments", "gymnasium"]) == 0
    out = capsys.readouterr().out
    assert out.count("MuJoCo is not installed") == 1
    assert "\n(1) cannot be made: MuJoCo is not installed." in out
    assert len(re.findall(r"gymnasium:Ant-v[45] +\(1\) see below", out)) == 2


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["trian", "cartpole", "ppo"], "train"),
        (["list", "optionss"], "options"),
        (["eval", "runs/x", "--checkpoint", "bset"], "best"),
        (["train", "cartpole", "ppo", "--sets", "gamma=0.9"], "--set"),
        (["train", "cartpole", "ppo", "--setps=9"], "--steps"),
    ],
)
def test_words_of_the_command_line_itself(arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.endswith(f"Did you mean {meant!r}?\n")


REFUSED = [
    (["train", "cartpol", "ppo"], "no task 'cartpol'. Did you mean 'cartpole'"),
    (["train", "cartpole", "poo"], "no algorithm 'poo'. Did you mean 'ppo'"),
    (["compare", "cartpole", "ppo", "a3c"], "no algorithm 'a3c'. Did you mean 'a2c'"),
    (["train", "cartpole", "ppo", "--set", "gama=0.9"], "no setting 'gama' of ppo on cartpole. Did you mean 'gamma'"),
    (["train", "CartPole-v2", "ppo"], "no task 'CartPole-v2'. Did you mean 'CartPole-v1'?"),
    (["train", "cartpole", "ppo", "--set", "network.hidden=64"], "network.hidden must be a list of integers, not 64"),
    (["train", "cartpole", "ppo", "--set", "network.hidden=[0]"], "network.hidden must be at least 1, not 0"),
    (["resume", "nowhere", "--seeds", "2"], "only --steps may change: leave out --seeds. For other"),
    (["resume", "nowhere", "--set", "gamma=0.9"], "takes its settings from the directory, and of them only --steps"),
    (["train", "cartpole", "ppo", "--set", "gamma"], "--set takes key=value"),
    (["train", "cartpole", "ppo", "--set", "gamma=high"], "gamma must be a number, not 'high'"),
    (["train", "cartpole", "ppo", "--set", "num_envs=-1"], "num_envs must be at least 1, not -1"),
    (["train", "cartpole", "ppo", "--set", "num_minibatches=7"], "num_minibatches = 7 does not divide"),
    (["train", "cartpole", "ppo", "--steps", "-5"], "--steps must be at least 1, not -5"),
    (["train", "cartpole", "ppo", "--steps", "3000000000"], "--steps must be at most 2^31 - 1, not 3000000000"),
    (["train", "cartpole", "ppo", "--seeds", "0"], "--seeds must be at least 1"),
    (["train", "cartpole", "ppo", "--devices", "99x"], "--devices takes a number from 1 on, or all, not '99x'"),
    (["train", "cartpole", "ppo", "--mesh", "time=2"], "--mesh takes data=N"),
    (["train", "cartpole", "ppo", "--mesh", "data=2,data=2"], "--mesh takes data=N"),
    (["train", "cartpole", "ppo", "--mesh", "data"], "--mesh takes data=N"),
    (["train", "cartpole", "ppo", "--mesh", "shard=2,seed=2"], "--mesh takes data=N"),
    (["train", "cartpole", "ppo", "--mesh", "data=2,shard=2"], "--mesh takes data=N"),
    (["train", "sort", "grpo", "--mesh", "shard=3"], "3 devices cannot share"),
    (["train", "cartpole", "ppo", "--mesh", "seed=2", "--seeds", "3"], "2 devices cannot share 3 seeds"),
    (["train", "cartpole", "ppo", "--mesh", "seed=2", "--seeds", "3"], "or use a multiple of 2 seeds"),
    (["train", "cartpole", "ppo", "--mesh", "data=2", "--devices", "3"], "has 2 devices, and --devices says 3"),
    (["train", "cartpole", "ppo", "--devices", "3", "--seeds", "2"], "3 devices can"),
    (["train", "cartpole", "ppo", "--seed", "5000000000"], "--seed must be at most 2^31 - 1"),
    (["train", "cartpole", "ppo", "--set", "seeds=[]"], "seeds are different numbers"),
    (["train", "cartpole", "ppo", "--set", "seeds=[0, 0]"], "seeds are different numbers"),
    (["train", "cartpole", "ppo", "--set", "seeds=[0, -1]"], "seeds must be at least 0, not -1"),
    (["train", "cartpole", "ppo", "--set", "wrappers.flatten=0.1"], "wrappers.flatten must be a table, not 0.1"),
    (
        ["train", "cartpole", "ppo", "--set", "network.kind=mlpp"],
        "no kind of network 'mlpp' for ppo. Did you mean 'mlp'",
    ),
    (["train", "cartpole", "ppo", "--set", "network.kind=[1]"], "no kind of network '[1]'"),
    (["train", "cartpole", "ppo", "--set", "network.activation=tahn"], "no activation 'tahn'. Did you mean 'tanh'"),
    (["train", "cartpole", "reinforce_baseline", "--set", "baseline_kind=runing"], "Did you mean 'running'"),
    (["train", "cartpole", "grpo", "--set", "kl=loss_k4"], "no KL placement 'loss_k4'. Did you mean 'loss_k3'"),
    (["train", "cartpole", "ppo", "--set", "evaluation_samples=3"], "evaluation_samples = 3 does not divide eval"),
    (["train", "sort", "dpo", "--set", "pairs.slip=1"], "no setting 'slip' of preference pairs. Did you mean 'slip_r"),
    (
        ["train", "sort", "grpo", "--set", "kl=loss_k4"],
        "Did you mean 'loss_k3'",
    ),  # before fine-tuning
    (["compare", "cartpole", "ppo"], "is of ppo alone: name another one beside it, or train it with: jaxpg train cart"),
    (["compare", "cartpole", "ppo", "ppo"], "is of ppo alone"),
    (["compare", "cartpole", "ppo", "--resume", "--out", "new"], "is of ppo alone"),
    (["compare", "summarise_toy", "rlhf", "ppo", "--set", "num_minibatches=7"], "num_minibatches = 7 does not divide"),
    (
        ["train", "sort", "grpo", "--set", "initial=none", "--set", "normalize_observations=true"],
        "normalize_observations needs observations that are real numbers; those of sort are the integers from 0 to ",
    ),
    (["train", "cartpole", "ppo", "--set", "network=3", "--set", "gama=1"], "no setting 'gama'"),
    (["train", "cartpole", "ppo", "--steps", "9", "--set", "total_steps=7"], "total_steps is given twice"),
    (["train", "cartpole", "ppo", "--seeds", "2", "--set", "seeds=[1]"], "seeds is given twice"),
    (["train", "cartpole", "ppo", "--resume"], "--resume needs --out"),
    (["compare", "cartpole", "ppo", "grpo", "--set", "num_envs=12"], "group_size = 8"),
    (["eval", "nowhere"], "nowhere is not the directory of a run"),
    (["eval", "nowhere", "--episodes", "0"], "--episodes must be at least 1"),
    (["eval", "nowhere", "--seed", "99999999999999999999"], "--seed must be at most 2^31 - 1"),
    (["play", "nowhere", "--gif", "x.gif", "--seed", "-1"], "--seed must be at least 0, not -1"),
    (["play", "nowhere", "--gif", "x.png"], "--gif takes a file that ends in .gif"),
    (["plot", "nowhere"], "nowhere is not the directory of a run"),
    (["list", "options"], "such as: jaxpg list options ppo"),
    (["list", "options", "pppo"], "Did you mean 'ppo'"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_mistakes_are_refused_before_anything_compiles(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One sentence without a traceback, exit code 2, nothing on the disk."""

    def compiled(*_: object) -> None:
        raise AssertionError("something was about to be compiled")

    monkeypatch.setattr(loop, "_init_or_restore", compiled)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("jaxpg: ")
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_resuming_something_else_is_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(trained)]
    assert main(["train", "catch", "a2c", *out]) == 2
    assert "holds a run already. Add --resume" in capsys.readouterr().err
    assert main(["train", "catch", "ppo", *out, "--resume"]) == 2
    assert "is of a2c on catch, not ppo on catch" in capsys.readouterr().err
    assert main(["train", "cartpole", "a2c", *out, "--resume"]) == 2
    assert "is of a2c on catch, not a2c on cartpole" in capsys.readouterr().err
    assert main(["train", "catch", "a2c", *out, "--resume", "--set", "gamma=0.5"]) == 2
    assert "a2c.gamma is 0.99 there, 0.5 here" in capsys.readouterr().err
    assert main(["train", "catch", "a2c", *out, "--resume", "--seeds", "3"]) == 2
    assert (
        "seeds is [0, 1] there, [0, 1, 2] here. A run goes on with its own settings: leave out those"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(("steps", "refused"), [("60000", True), ("20000", False)])
def test_an_annealed_run_does_not_go_on_at_a_learning_rate_of_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: str, refused: bool
) -> None:
    begun = configs.resolve_config("cartpole", "ppo", {"total_steps": 20_000})
    (tmp_path / run_directory.CONFIG).write_text(files.toml_dumps(configs.to_dict(begun)))
    given = ["--steps", steps, "--devices", "99"]
    for words in (["train", "cartpole", "ppo", "--resume", "--out", str(tmp_path)], ["resume", str(tmp_path)]):
        assert main([*words, *given]) == 2  # in the other case because of the devices
        message = capsys.readouterr().err
        assert (f"The run in {tmp_path} anneals its learning rate to zero over 20,000 steps" in message) == refused
        assert (f"--from {tmp_path}" in message) == refused


def test_half_and_then_the_rest_is_the_whole(trained: Path, tmp_path: Path) -> None:
    """Bit for bit, with a real learner."""
    out = ["--out", str(tmp_path), "--quiet"]
    half = ["--steps", "1500", *SHORT[2:], "--set", "learning_rate=0.01"]
    assert main(["train", "catch", "a2c", "--seeds", "2", *half, *out]) == 0
    assert main(["train", "catch", "a2c", "--resume", "--steps", "3000", *out]) == 0
    learner = build(configs.load_config(trained)).learner
    whole, halves = (loop.restore(learner, run, [0, 1], "last") for run in (trained, tmp_path))
    assert whole.steps.tolist() == [3008, 3008]
    jax.tree.map(np.testing.assert_array_equal, halves, whole)


@pytest.mark.parametrize("which", ["best", "last"])
def test_damaged_checkpoint(trained: Path, which: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Cut off, it is used by nothing, and nothing happens to the run."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    folder = checkpoint.find(run / "checkpoints", which).path
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    commands = [["eval", str(run), "--checkpoint", which]]
    if which == "last":
        commands += [["train", "catch", "a2c", "--out", str(run), "--resume", "--steps", "9000"]]
    for command in commands:
        assert main(command) == 2
        message = capsys.readouterr().err
        assert re.fullmatch(r"jaxpg: The checkpoint .* cannot be used: its file .* is damaged\. .*\n", message)
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {path.name for path in before if before[path] != after[path]} <= {"plan.json"}  # of 9000 steps
    assert before.keys() == after.keys()


LAYOUTS = [["--devices", "4"], ["--mesh", "data=4"], ["--mesh", "shard=4"]]


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What one device makes of two seeds."""
    return laid_out(tmp_path_factory.mktemp("one") / "run", ["--devices", "1"])


def laid_out(out: Path, layout: list[str], *more: str) -> dict[str, np.ndarray]:
    assert main(["train", "catch", "a2c", "--seeds", "2", "--out", str(out), "--quiet", *SHORT, *layout, *more]) == 0
    return run_directory.load_metrics(out)


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_devices_share_the_seeds_and_the_environments(
    tmp_path: Path, on_one_device: dict[str, np.ndarray], layout: list[str]
) -> None:
    """Two seeds on four devices: each seed's environments on two, or on all. One device learns the same."""
    shared = laid_out(tmp_path / "run", layout)
    np.testing.assert_array_equal(shared["steps"], on_one_device["steps"])
    np.testing.assert_allclose(shared["value_loss"][:3], on_one_device["value_loss"][:3], rtol=1e-3)


@pytest.mark.full
def test_a_seed_on_a_device_of_its_own_is_the_same_to_the_last_bit(
    tmp_path: Path, on_one_device: dict[str, np.ndarray]
) -> None:
    shared = laid_out(tmp_path / "run", ["--mesh", "seed=2"])
    for name in on_one_device.keys() - {"seconds", "chunk_seconds"}:
        np.testing.assert_array_equal(shared[name], on_one_device[name])


def test_a_run_goes_on_with_other_devices(tmp_path: Path) -> None:
    """Half of the way on four devices, then on four or on two that share parameters: checkpoints know no devices."""
    half = laid_out(tmp_path / "4", ["--mesh", "data=4"], "--steps", "1500")
    shutil.copytree(tmp_path / "4", tmp_path / "1")
    meshes = {"4": "data=4", "1": "shard=2"}
    same, moved = (laid_out(tmp_path / n, ["--mesh", m], "--resume", "--steps", "3000") for n, m in meshes.items())
    assert len(same["steps"]) > len(half["steps"]) + 3
    np.testing.assert_array_equal(moved["steps"], same["steps"])
    next_rows = slice(len(half["steps"]), len(half["steps"]) + 3)
    np.testing.assert_allclose(moved["value_loss"][next_rows], same["value_loss"][next_rows], rtol=1e-3)


def test_interrupt_once_saves_and_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C while it trains; then the command that was printed goes on from there."""
    out = tmp_path / "run"
    metrics = out / "metrics.jsonl"
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # what started the tests may have ignored it

    def press() -> None:
        while not metrics.exists() or metrics.stat().st_size == 0:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press, daemon=True)  # it waits for ever where nothing is trained
    presser.start()
    steps = ["--steps", "200000", *SHORT[2:]]
    assert main(["train", "catch", "a2c", "--seeds", "2", "--out", str(out), *steps]) == 130
    presser.join()
    message = capsys.readouterr().err
    assert "finishing this chunk, then saving" in message
    command = re.search(r"Resume with: jaxpg (.*)$", message, re.MULTILINE)[1].split()
    reached = run_directory.load_metrics(out)["steps"][-1, 0]
    assert reached < 200_000
    assert signal.signal(signal.SIGINT, handler) is signal.default_int_handler
    assert main([*command, "--steps", str(int(reached) + 2000), "--quiet"]) == 0
    assert run_directory.load_metrics(out)["steps"][-1, 0] >= reached + 2000


def test_interrupt_twice_stops_at_once(trained: Path, tmp_path: Path) -> None:
    """In the middle of a chunk that would take very long; the checkpoint before it is intact."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    command = ["train", "catch", "a2c", "--out", str(run), "--resume", "--steps", str(loop.MOST_STEPS)]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxpg", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while len(json.loads((run / "run.json").read_text())) == 1:  # until it trains
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    next(line for line in process.stderr if "finishing this chunk" in line)
    process.send_signal(signal.SIGINT)
    try:
        message = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130
    assert "stopped at once" in message
    learner = build(configs.load_config(run)).learner
    assert loop.restore(learner, run, [0, 1], "last").steps.tolist() == [3008, 3008]


def test_an_interrupt_ends_an_endless_program_that_has_nothing_to_save() -> None:
    code = (
        "import jax; from jaxpg.cli import signals\n"
        "loop = lambda x: jax.lax.while_loop(lambda y: y > 0, lambda y: jax.numpy.sin(y) + 1, x)\n"
        "endless = jax.jit(loop).lower(1.0).compile()\n"
        "with signals.ends_at_once():\n"
        "    print('begins', flush=True)\n"
        "    jax.block_until_ready(endless(1.0))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "begins\n"
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            message = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert (process.returncode, message) == (130, "\njaxpg: interrupted\n")


@pytest.mark.parametrize("stderr", [subprocess.PIPE, subprocess.STDOUT], ids=["apart", "together"])
def test_a_run_whose_output_nobody_reads_any_more_is_saved(stderr: int, tmp_path: Path) -> None:
    """As in `jaxpg train ... | head -1`, also where both streams end there: `2>&1 | head -1`."""
    command = ["train", "catch", "reinforce", "--out", str(tmp_path / "run"), "--set", "num_envs=4"]
    command = [sys.executable, "-m", "jaxpg", *command, "--steps", "500000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            assert process.stdout.readline().startswith("reinforce on catch")
            process.stdout.close()
            message = process.stderr.read() if process.stderr else None
            process.wait(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    if message is not None:
        assert "the output was closed by its reader" in message
        assert "interrupted and saved. Resume with: jaxpg resume" in message
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_an_interrupt_while_modules_are_imported_waits_for_their_end() -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # what started the tests may have ignored it
    done = []

    def interrupted_import() -> None:
        with held_back():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("imported")

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted_import()
        assert done == ["imported"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with held_back():  # nothing has come
            pass
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `nohup` leaves it: still ignored
        with held_back():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, handler)


def test_an_interrupt_while_jax_is_imported_ends_with_a_sentence(tmp_path: Path) -> None:
    """It comes from within jax's first module, which would lose it or crash."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(
        "import os, signal, pathlib\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "pathlib.Path(__file__).with_name('whole').touch()\n"
        "raise ImportError('this is no jax')\n"
    )
    code = "import signal, jaxpg.cli.main as m; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "raise SystemExit(m.main(['list', 'tasks']))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (tmp_path / "jax" / "whole").exists()
    assert (ended.returncode, ended.stderr) == (130, "jaxpg: interrupted\n")


@pytest.mark.parametrize("platform", ["nope", "tpu"])
def test_a_platform_that_is_not_there_is_a_sentence(platform: str) -> None:
    environment = os.environ | {"JAX_PLATFORMS": platform, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "jaxpg", "list", "tasks"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"jaxpg: jax has no device with JAX_PLATFORMS={platform}: ")
    assert "Set JAX_PLATFORMS=cpu" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_backend_that_matplotlib_does_not_know_is_no_matter(trained: Path, tmp_path: Path) -> None:
    """Pictures are files."""
    environment = os.environ | {"MPLBACKEND": "nope", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "jaxpg", "plot", str(trained), "--out", str(tmp_path / "curve.png")]
    subprocess.run(command, env=environment, check=True)
    assert (tmp_path / "curve.png").exists()


def test_devices_are_made_before_anything_computes() -> None:
    """As many as --devices names, in a process that has not used jax before."""
    code = (
        "import jax, jaxpg.__main__ as m; assert m.main(['train', 'catch', 'none', '--devices', '3']) == 2; "
        "print(jax.device_count() >= 3)"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=environment) == "True\n"


def test_help_is_instant() -> None:
    """It imports nothing heavy."""
    code = (
        "import sys, jaxpg.cli.main as m; m.make_parser().format_help(); "
        "print({'jax', 'rich', 'numpy'} & set(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=environment) == "set()\n"


def test_every_core_is_a_device_unless_another_number_is_asked_for(tmp_path: Path) -> None:
    """As a user starts it, without the four devices that these tests begin with; XLA_FLAGS are a user's number too."""
    environment = {name: x for name, x in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    cores = len(os.sched_getaffinity(0))
    forced = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={cores + 2}"}
    asked: list[tuple[list[str], dict[str, str], int]] = [
        ([], {}, cores),
        (["--devices", str(cores + 1)], {}, cores + 1),
        ([], forced, cores + 2),
    ]
    for layout, flags, expected in asked:
        arguments = ["train", "catch", "a2c", "--seeds", str(expected), *SHORT, *layout, "--out", str(tmp_path / "run")]
        message = subprocess.run(
            [sys.executable, "-m", "jaxpg", *arguments],
            env=environment | flags,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        per_core = " (one XLA device per core)" if expected == cores else ""
        assert f"{expected} x cpu{per_core}, jax" in message
        shutil.rmtree(tmp_path / "run")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_run_whose_output_cannot_be_written_is_saved(tmp_path: Path) -> None:
    """As where the log is on a full disk."""
    run = tmp_path / "run"
    command = ["train", "catch", "reinforce", "--out", str(run), "--set", "num_envs=4", "--steps", "500000"]
    code = (
        "import sys\n"
        "from jaxpg.cli.main import main\n"
        "from jaxpg.runs.progress import Reporter\n"
        "def fails(self, row): raise OSError(28, 'No space left on device')\n"
        "Reporter.__call__ = fails\n"
        f"sys.exit(main({command!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130, done.stderr
    assert "the output cannot be written to (No space left on device)" in done.stderr
    assert "interrupted and saved. Resume with: jaxpg resume" in done.stderr
    assert len(list((run / "checkpoints").iterdir())) == 1
