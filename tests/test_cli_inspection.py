"""What is printed and drawn of runs: progress, labels that tell runs apart, intervals that say over what they are."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_learner
from refusals import refused
from rich.console import Console

from jaxpg import files, report
from jaxpg.cli import record
from jaxpg.cli.inspection import (
    Starts,
    _print_evaluation,
    checkpoint_line,
    compared_runs,
    distinguishing_parts,
    mean_lines,
    run_labels,
)
from jaxpg.cli.main import main
from jaxpg.cli.parser import command_words, make_parser
from jaxpg.cli.record import CommandRecord
from jaxpg.experiments import config as configs
from jaxpg.experiments.config import resolve_config
from jaxpg.experiments.config_file import parse_overrides
from jaxpg.experiments.sources import setting_sources
from jaxpg.rollout.evaluation import Evaluation
from jaxpg.runs.progress import Reporter
from jaxpg.training import checkpoint


def write_run(directory: Path, config: dict, **metrics: list) -> Path:
    """The directory of a run with two rows of metrics."""
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(files.toml_dumps(config))
    times = {"seconds": [1.0, 2.0], "chunk_seconds": [1.0, 1.0]}
    columns = {"steps": [[10, 10], [20, 20]], "return": [[1.0, 2.0], [3.0, 4.0]], **metrics, **times}
    lines = [json.dumps({name: column[i] for name, column in columns.items()}) + "\n" for i in range(2)]
    (directory / "metrics.jsonl").write_text("".join(lines))
    return directory


@pytest.mark.parametrize(
    ("paths", "parts"),
    [
        (["/r/A/ppo", "/r/B/ppo", "/r/C/ppo"], ["A", "B", "C"]),
        (["/r/ppo-1", "/r/ppo-2"], ["ppo-1", "ppo-2"]),
        (["/r/A/1/ppo", "/r/B/2/ppo"], ["A/1", "B/2"]),
        (["/r/ppo", "/r/x/ppo"], ["ppo", "x/ppo"]),
        (["/r/ppo", "/r/ppo/ppo"], ["ppo", "ppo/ppo"]),
        (["/r/ppo", "/s/a/b"], ["r/ppo", "s/a/b"]),
    ],
)
def test_paths_are_told_apart_by_their_distinguishing_parts(paths: list[str], parts: list[str]) -> None:
    assert distinguishing_parts([Path(path) for path in paths]) == parts


def test_only_runs_of_one_name_show_their_path() -> None:
    names = {Path("/r/A/ppo"): "ppo", Path("/r/B/ppo"): "ppo", Path("/r/B/a2c"): "a2c"}
    assert list(run_labels(names).values()) == ["ppo, A", "ppo, B", "a2c"]


def test_plot_shows_every_run(tmp_path: Path) -> None:
    config = {"task": "catch", "algorithm": "ppo", "threshold": 3.0}
    runs = [str(write_run(tmp_path / name / "ppo", config)) for name in "ABC"]
    assert main(["plot", *runs, runs[0] + "/../ppo", "--out", str(tmp_path / "curves.svg")]) == 0
    picture = (tmp_path / "curves.svg").read_text()
    assert [label for label in re.findall(r">([^<>]*)</text>", picture) if "ppo" in label] == [
        f"ppo, {name}" for name in "ABC"
    ]
    assert ">threshold 3<" in picture


def test_a_run_from_python_is_plotted_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy_learner.run(tmp_path / "mine", total_steps=8, evaluate=toy_learner.peak_at_ten)
    run = str(tmp_path / "mine")
    assert main(["plot", run, "--out", str(tmp_path / "curves.svg")]) == 0
    assert ">mine</text>" in (tmp_path / "curves.svg").read_text()
    for command in (["eval", run], ["play", run, "--gif", "x.gif"], ["sample", run]):
        assert f"{run}/config.toml names no algorithm" in refused(capsys, *command)


def test_a_run_without_returns_has_no_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "mine", {"seeds": [0]})
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("return", "loss"))
    assert "its metrics have neither return nor evaluation_return" in refused(capsys, "plot", str(run))


def test_what_an_evaluation_could_not_measure_has_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    config = resolve_config("sort", "grpo", {"seeds": [0]})
    result = Evaluation(np.ones((1, 4)), np.ones((1, 4)), {"length_correct": np.full(1, np.nan)})
    _print_evaluation(config, result, Starts(4, 1, "prompts"), "sampled")
    assert capsys.readouterr().out.endswith("length_correct –\n")


def test_an_empty_config_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not that of a program in Python, which notes its seeds and steps."""
    (write_run(tmp_path / "mine", {}) / "config.toml").write_text("")
    for command in ("eval", "plot"):
        assert "config.toml cannot be read: it is empty. Restore" in refused(capsys, command, str(tmp_path / "mine"))


@pytest.mark.parametrize(
    ("starts", "sampling", "text"),
    [
        (Starts(100, 1, "episodes"), "greedy", "100 greedy episodes"),
        (Starts(25, 4, "start states"), "sampled", "25 start states x 4 sampled episodes"),
        (Starts(25, 4, "prompts"), "sampled", "25 prompts x 4 samples"),
        (Starts(100, 1, "prompts"), "sampled", "100 prompts x 1 sample"),
        (Starts(100, 1, "prompts"), "greedy", "100 prompts x 1 greedy completion"),
        (Starts(1, 1, "prompts"), "greedy", "1 prompt x 1 greedy completion"),
        (Starts(1, 1, "episodes"), "greedy", "1 greedy episode"),
    ],
)
def test_an_evaluation_says_what_its_episodes_are(starts: Starts, sampling: str, text: str) -> None:
    assert starts.describe(sampling) == text


def test_an_evaluation_says_which_checkpoint_it_is_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = {"best": 3000, "last": 5000}

    def find(folder: Path, which: str = "last") -> checkpoint.Checkpoint:
        return checkpoint.Checkpoint(folder / which, steps[which], 0.0, {})

    monkeypatch.setattr(checkpoint, "find", find)
    assert checkpoint_line(tmp_path, "last") == "checkpoint: the last, at 5,000 steps"
    assert checkpoint_line(tmp_path, "best").startswith("checkpoint: the best, at 3,000 of 5,000 steps, chosen by")
    steps["best"] = 5000
    assert checkpoint_line(tmp_path, "best") == checkpoint_line(tmp_path, "last")


def interval(line: str) -> tuple[float, float]:
    low, high = re.search(r"95% interval \[(\S+), (\S+)\]", line).groups()
    return float(low), float(high)


def test_of_five_seeds_the_interval_is_over_seeds() -> None:
    returns = np.random.default_rng(0).normal(size=(5, 1)) + np.zeros((5, 8))
    mean, iqm = mean_lines(returns, Starts(2, 4, "prompts"))
    assert mean.startswith(f"mean {returns.mean():.4g}, 95% interval [")
    assert mean.endswith("] over 5 seeds")
    assert iqm.startswith("interquartile mean ")
    expected = report.bootstrap(returns[:, 0], statistic=report.mean)
    np.testing.assert_allclose(interval(mean), [expected.low, expected.high], rtol=1e-3)


@pytest.mark.parametrize(("seeds", "episodes"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_why_so_few_episodes_have_no_interval(seeds: int, episodes: int) -> None:
    returns = np.full((seeds, episodes), 2.5)
    (line,) = mean_lines(returns, Starts(episodes, 1, "episodes"))
    assert line == "mean 2.5; an interval needs 5 episodes, or as many seeds"


@pytest.mark.parametrize("seeds", [1, 2])
def test_of_few_seeds_the_interval_is_over_prompts(seeds: int) -> None:
    """With all samples of a prompt: four equal ones say no more than one of them."""
    by_prompt = np.random.default_rng(1).normal(size=(seeds, 25)) + 100 * np.arange(seeds)[:, None]
    returns = np.repeat(by_prompt, 4, axis=1)
    (line,) = mean_lines(returns, Starts(25, 4, "prompts"))
    whose = "this" if seeds == 1 else "each"
    assert line.endswith(f"] over the 25 prompts of {whose} seed; an interval over seeds needs 5 seeds")
    low, high = interval(line)
    error = np.sqrt(by_prompt.var(1).sum() / 25) / seeds  # of the mean, the seeds as they are
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.1)


def progress_lines(seeds: int, chunks: int) -> list[str]:
    """The lines of a run of 100 steps per chunk and seed, a second each; the last seed of several stands still."""
    console, zeros = Console(file=io.StringIO()), np.zeros(seeds, int)
    with Reporter(console, 100 * chunks) as show:
        show({"steps": zeros, "iterations": zeros, "evaluation_return": zeros + 2.0, "seconds": 1, "chunk_seconds": 0})
        for i in range(1, chunks + 1):
            steps = np.full(seeds, 100 * i)
            steps[1:][-1:] = 100
            show({"steps": steps, "iterations": zeros + 1, "return": zeros + 3.0, "seconds": i + 1, "chunk_seconds": 1})
    return [line for line in console.file.getvalue().splitlines() if line]


@pytest.mark.parametrize("chunks", [50, 200])
def test_progress_outside_of_a_terminal_is_a_line_for_each_tenth(chunks: int) -> None:
    lines = progress_lines(1, chunks)
    assert lines[0] == f"0 / {100 * chunks:,} steps, compiling, evaluation 2"
    assert lines[1] == f"100 / {100 * chunks:,} steps, compiled in 1.0 s, evaluation 2 at step 0, return 3"
    assert [line.split()[0] for line in lines[2:]] == [f"{10 * chunks * i:,}" for i in range(1, 11)]
    shown = "100 steps/s, 0:00 left, evaluation 2 at step 0, return 3"
    assert lines[-1] == f"{100 * chunks:,} / {100 * chunks:,} steps, {shown}"


def test_progress_says_how_many_steps_were_taken_beyond_the_total() -> None:
    console = Console(file=io.StringIO())
    with Reporter(console, 2_000) as show:
        show({"steps": np.array([8_192]), "iterations": np.ones(1), "seconds": 1.0, "chunk_seconds": 1.0})
    assert console.file.getvalue().startswith("8,192 / 2,000 steps")


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one rich shows its bar at the end alone."""
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), force_terminal=True)
    with Reporter(console, 100) as show:
        show({"steps": np.array([50]), "iterations": np.ones(1), "seconds": 1.0, "chunk_seconds": 1.0})
        assert "50 / 100 steps" in console.file.getvalue()


def test_progress_of_a_sweep_says_how_long_all_of_it_takes() -> None:
    """After 300 of 1,000 steps at a second per hundred: 7 s of this wave, and 2.5 waves of 10 s."""
    console = Console(file=io.StringIO())
    with Reporter(console, 1_000, to_follow=2.5) as show:
        for i in range(1, 4):
            show({"steps": np.array([100 * i]), "iterations": np.ones(1), "seconds": i, "chunk_seconds": 1})
    assert "0:07 left of this wave, about 0:32 of all" in console.file.getvalue()
    console = Console(file=io.StringIO())
    with Reporter(console, 100_000) as show:
        for i in (1, 100, 200):  # a tenth is done every 100 s, then every 10,000
            show({"steps": np.array([100 * i]), "iterations": np.ones(1), "seconds": 100 * i, "chunk_seconds": 1})
    assert "22:13:20 left" in console.file.getvalue()


def test_plot_of_a_comparison_shows_its_runs_and_none_of_its_stages(tmp_path: Path) -> None:
    compared = CommandRecord(
        command="compare",
        command_line="jaxpg compare catch ppo a2c",
        task="catch",
        algorithms=["ppo", "mine:spo", "dqn"],
        devices=None,
        mesh=None,
        runs=[{"directory": "ppo", "config": {"task": "catch", "algorithm": "ppo", "total_steps": 1}}],
    )
    for name in ("ppo", "mine-spo", "sft"):
        write_run(tmp_path / "both" / name, {"task": "catch", "algorithm": name})
    record.write(compared, tmp_path / "both")
    assert [run.name for run in compared_runs(tmp_path / "both")] == ["ppo", "mine-spo"]
    assert compared_runs(tmp_path / "both" / "ppo") == [tmp_path / "both" / "ppo"]
    assert main(["plot", str(tmp_path / "both"), "--out", str(tmp_path / "curves.svg")]) == 0
    assert ">ppo</text>" in (tmp_path / "curves.svg").read_text()


@pytest.mark.skipif(shutil.which("bash") is None, reason="it is a script for bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tr"], {"train"}),
        (["train", "cartp"], {"cartpole"}),
        (["compare", "cartpole", "ppo", "gsp"], {"gspo"}),
        (["export", "run", "--seed"], {"--seed-index"}),
        (["export", "cartp"], set()),  # a directory, which the shell completes itself
        (["train", "cartpole", "ppo", "--wan"], {"--wandb"}),
    ],
)
def test_a_shell_completes(words: list[str], expected: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    script += f'\nCOMP_WORDS=(jaxpg {" ".join(words)}); COMP_CWORD={len(words)}; _jaxpg; echo "${{COMPREPLY[@]}}"\n'
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert set(shown.stdout.split()) == expected


@pytest.mark.full
def test_show_estimates_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--steps", "20000", "--seeds", "2", "--set", "num_envs=4", "--set", "num_steps=25"]
    assert main(["show", "cartpole", "ppo", "--time", *words]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"time: about \d+:\d\d for 200 iterations of 2 seeds on 2 devices, at [\d.]+ ms each", line)


def test_progress_says_whose_steps_it_counts_and_waits_for_no_diverged_seed() -> None:
    lines = progress_lines(3, 50)
    assert len(lines) == 12
    assert re.match(r"5,000 / 5,000 steps each, 200 steps/s in all, 0:00 left", lines[-1])


def test_show_says_where_every_setting_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And how large what it describes is; nothing is compiled or written."""
    words = ["--set", "gamma=0.5", "--set", "network.hidden=[32]", "--seeds", "2", "--steps", "1000"]
    assert main(["show", "cartpole", "ppo", *words]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if len(line.split()) > 2}
    assert rows["gamma"] == ["gamma", "0.5", "command", "line"]
    assert rows["network.hidden"] == ["network.hidden", "[32]", "command", "line"]
    assert rows["network.activation"] == ["network.activation", "tanh", "cartpole.toml"]
    assert rows["anneal_steps"] == ["anneal_steps", "1000", "cartpole.toml", "[ppo]"]
    assert rows["total_steps"] == ["total_steps", "1000", "command", "line"]
    assert rows["scale_rewards"][:2] == ["scale_rewards", "false"]
    assert rows["value_clip"][:2] == ["value_clip", "none"]
    assert rows["gae_lambda"] == ["gae_lambda", "0.95", "default"]
    assert rows.keys() >= configs.algorithm_options("ppo").keys() | {"evaluations", "scale_rewards"}
    assert rows["params.policy.torso.params.Dense_0.kernel"][1:] == ["4", "x", "32", "128"]
    assert int(rows["in"][2].replace(",", "")) == 2 * (4 * 32 + 32) + (32 * 2 + 2) + (32 + 1)
    assert "observations: 4 real numbers; actions: one of 2" in out
    assert "batch: 128 steps x 8 environments = 1,024, in each iteration of a seed" in out
    assert re.search(r"[\d.]+ KiB for the state of a seed; .* [\d.]+ KiB for 2 seeds, on each of 2 devices with", out)


@pytest.mark.full
def test_show_knows_sections_that_inherit_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "cartpole", "double_dqn"]) == 0
    assert re.search(r"target_period +50 +cartpole.toml \[dqn\]", capsys.readouterr().out)
    assert main(["show", "frozen_lake", "q_learning"]) == 0
    assert re.search(r"in all +64", capsys.readouterr().out)


def test_the_source_of_a_setting_is_where_it_was_stated_last(tmp_path: Path) -> None:
    """A table with another kind has taken the place of the one before it."""
    task = tmp_path / "task.toml"
    task.write_text(
        'environment = "CartPole-v1"\nnetwork = { kind = "mlp", layer_norm = true }\n'
        '[a2c]\ngamma = 0.5\nnum_envs = 2\n[ppo]\nlike = "a2c"\nnum_envs = 4\n'
    )
    overrides = {"network": {"kind": "mlp", "hidden": [8]}, "clip": 0.3}
    found = setting_sources(task, "ppo", configs.resolve_config(task, "ppo", overrides), overrides)
    assert found["gamma"] == (0.5, "task.toml [a2c]")
    assert found["num_envs"] == (4, "task.toml [ppo]")
    assert found["environment"] == ("CartPole-v1", "task.toml")
    assert found["network.hidden"] == ((8,), "command line")
    assert found["network.layer_norm"] == (False, "default")
    assert found["clip"] == (0.3, "command line")


def test_a_wrapper_without_arguments_is_a_setting(tmp_path: Path) -> None:
    task = tmp_path / "task.toml"
    task.write_text('environment = "CartPole-v1"\nwrappers = { flatten = {} }\nenvironment_settings = {}\n')
    found = setting_sources(task, "ppo", configs.resolve_config(task, "ppo"), {})
    assert found["wrappers.flatten"] == ({}, "task.toml")
    assert "environment_settings" not in found
    without = setting_sources("cartpole", "ppo", configs.resolve_config("cartpole", "ppo"), {})
    assert found.keys() - without.keys() == {"wrappers.flatten"}


def test_settings_without_an_effect_are_shown_as_such() -> None:
    """A schedule replaces the learning rate, an optimizer what Adam takes; clipping is in front of either."""

    def sources(**overrides: Any) -> dict[str, str]:
        config = configs.resolve_config("cartpole", "ppo", overrides)
        return {name: source for name, (_, source) in setting_sources("cartpole", "ppo", config, overrides).items()}

    plain = sources(learning_rate=0.1, anneal_steps=None)
    assert not any("no effect" in source for source in plain.values())
    scheduled = sources(anneal_steps=None, **{"schedule.kind": "mine:rate"})
    told = "no effect: schedule.kind replaces it"
    assert scheduled == plain | dict.fromkeys(("learning_rate", "anneal_steps"), told) | {
        "schedule.kind": "command line"
    }
    optimized = sources(learning_rate=0.1, anneal_steps=None, **{"optimizer.kind": "optax:scale_by_lion"})
    assert {name for name in plain if optimized[name] != plain[name]} == {"adam_eps"}
    assert optimized["adam_eps"] == "no effect: optimizer.kind replaces it"
    config = configs.resolve_config("cartpole", "grpo")
    assert config.settings["kl"] is None
    assert setting_sources("cartpole", "grpo", config, {})["kl_coefficient"] == (0.04, "no effect: kl is none")


@pytest.mark.full
def test_a_stage_is_shown_before_what_it_needs_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = parse_overrides(["stages.r1.num_envs=512"])
    found = setting_sources("modular_chain", "r1", configs.resolve_config("modular_chain", "r1", overrides), overrides)
    assert found["initial"] == ("tuned", "modular_chain.toml [stages.r1]")
    assert found["epochs"] == (1, "modular_chain.toml [grpo]")
    assert found["num_envs"] == (512, "command line")
    assert main(["show", "modular_chain", "r1"]) == 0  # its reward model and the policy that it begins with are stages
    assert "for the state of a seed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "cartpol", "ppo"], "Did you mean 'cartpole'"),
        (["show", "cartpole", "pp"], "Did you mean 'ppo'"),
        (["show", "cartpole"], "the following arguments are required: ALGO"),
        (["show", "cartpole", "ppo", "--set", "lr=1"], "It is called 'learning_rate' here."),
        (["show", "cartpole", "ppo", "--set", "n_steps=1"], "It is called 'num_steps' here."),
        (["show", "cartpole", "ppo", "--set", "optimizer.kind=adam"], "optimizer.kind must be the name of a function"),
        (["show", "cartpole", "no_such_module:f"], "cannot be imported: ModuleNotFoundError"),
        (["play", "nowhere", "--gif", "x.gif", "--seed-index", "-1"], "--seed-index must be at least 0"),
        (["--versoin"], "--version"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, *arguments)


TWO_STAGES = """
environment = "CartPole-v1"
[stages.first]
algorithm = "ppo"
initial = "second"
[stages.second]
algorithm = "ppo"
initial = "first"
"""


@pytest.mark.parametrize(
    ("task", "words", "sentence"),
    [
        ("cartpole", ["ppo", "--from", "runs/nowhere"], "runs/nowhere is not the directory of a run"),
        ('environment = "CartPole-v1"\ninitial = "nothing"\n', ["ppo"], "nothing is not the directory of a run"),
        (TWO_STAGES, ["first"], "second needs first needs second: there is no first stage"),
        ("cartpole", ["dqn", "--set", "buffer_size=2000000000"], "This run needs at least"),
    ],
)
def test_show_refuses_what_train_refuses(
    task: str,
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the same sentence, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    if "=" in task:
        Path("task.toml").write_text(task)
        task = "task.toml"
    shown = refused(capsys, "show", task, *words)
    assert sentence in shown
    assert [path.name for path in tmp_path.iterdir()] == ["task.toml"] * (task == "task.toml")
    assert refused(capsys, "train", task, *words) == shown


def test_a_bare_command_helps_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of which can be parsed; and it says its version."""
    assert main([]) == 0
    examples = re.findall(r"^  jaxpg (.*?)  ", capsys.readouterr().out, re.MULTILINE)
    assert [make_parser().parse_args(line.split()).command for line in examples] == ["train", "play", "show"]
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert re.fullmatch(r"jaxpg \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_help_says_every_default() -> None:
    commands = next(action for action in make_parser()._actions if action.dest == "command").choices
    for name, command in commands.items():
        for action in command._actions:
            if action.option_strings and action.nargs != 0 and not action.required and action.help != SUPPRESS:
                assert "default" in action.help, f"{name} {action.option_strings}"


def test_help_of_a_sweep_has_no_options_that_a_sweep_refuses() -> None:
    """They are read all the same, so that a sentence refuses them (tests/test_loggers.py, attacks/)."""
    commands = next(action for action in make_parser()._actions if action.dest == "command").choices
    hosts = ("--distributed", "--coordinator", "--processes", "--process", "--join-seconds")
    hidden = {"--wandb", "--tensorboard", *hosts}
    words = command_words(commands)
    assert not hidden & set(words["sweep"])
    assert hidden <= set(words["train"])
    commands["sweep"].parse_args(["cartpole", "ppo", "--wandb", "--processes", "2"])
