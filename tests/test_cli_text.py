"""The command line with language models: what a run needs is trained first, completions are shown, mistakes refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from refusals import refused

from jaxpg import load
from jaxpg.cli.main import main
from jaxpg.errors import UserError
from jaxpg.experiments import completions
from jaxpg.experiments import config as configs
from jaxpg.experiments.build import build
from jaxpg.training import run_directory
from jaxpg.training.loop import restore

SMALL = """
environment = "sort"
environment_settings = { length = 3, letters = 6, rewards = { accuracy = 1.0, length = 0.5 } }
total_steps = 1_500
evaluations = 2
evaluation_episodes = 8
evaluation_samples = 4
network = { kind = "transformer", width = 8, layers = 1, heads = 2, kv_heads = 1 }

[sft]
total_steps = 200
batch_size = 8

[grpo]
initial = "sft"
num_envs = 16
gamma = 1.0
num_minibatches = 2

[rloo]
like = "grpo"
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("task") / "sorting.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def trained(task: Path) -> Path:
    """Two seeds of GRPO, after the fine-tuning that it begins with."""
    out = task.parent / "run"
    assert main(["train", str(task), "grpo", "--seeds", "2", "--out", str(out)]) == 0
    return out


def test_what_a_run_begins_with_is_trained_first(trained: Path) -> None:
    assert configs.load_config(trained).initial == str(trained / "sft")
    tuned, begun = configs.load_config(trained / "sft"), configs.load_config(trained)
    assert (tuned.algorithm, tuned.total_steps, tuned.seeds) == ("sft", 200, (0, 1))
    metrics = run_directory.load_metrics(trained)
    assert {"accuracy", "pass@8", "cons@8", "frac_zero_std", "reward_std", "truncated"} <= metrics.keys()
    assert {"evaluation_accuracy", "evaluation_greedy_accuracy", "evaluation_pass@4"} <= metrics.keys()
    # The reference of GRPO's penalty is the policy that it began with, seed by seed.
    learned, taught = (
        restore(build(c).learner, d, [0, 1], "last") for c, d in ((begun, trained), (tuned, trained / "sft"))
    )
    jax.tree.map(np.testing.assert_array_equal, learned.learner.reference, taught.learner.params.policy)
    moved = jax.tree.map(lambda x, y: (x != y).any(), learned.learner.params.policy, taught.learner.params.policy)
    assert any(jax.tree.leaves(moved))


def test_stopping_and_going_on_is_exact(trained: Path, task: Path, tmp_path: Path) -> None:
    out = tmp_path / "parts"
    arguments = ["train", str(task), "grpo", "--seeds", "2", "--from", str(trained / "sft"), "--out", str(out)]
    assert main([*arguments, "--steps", "700"]) == 0
    assert main([*arguments, "--steps", "1500", "--resume"]) == 0
    whole, parts = (restore(build(configs.load_config(d)).learner, d, [0, 1], "last") for d in (trained, out))
    assert int(whole.steps.min()) > 1400
    same = jax.tree.map(lambda x, y: bool((x == y).all()), whole, parts)
    assert all(jax.tree.leaves(same)), same
    np.testing.assert_array_equal(
        run_directory.load_metrics(out)["return"], run_directory.load_metrics(trained)["return"]
    )


def test_completions_are_written_after_every_evaluation(trained: Path) -> None:
    samples = completions.load_completions(trained)
    metrics = run_directory.load_metrics(trained)
    evaluated = np.isfinite(metrics["evaluation_return"]).all(1)
    assert sorted(samples) == [*metrics["steps"][evaluated][:, 0].astype(int)]
    assert min(samples) == 0
    for sample in samples[max(samples)]:
        letters, answer = sample.prompt.rstrip("="), sample.completion.removesuffix(" ...")
        right = answer == "".join(sorted(letters)) and not sample.completion.endswith(" ...")
        assert sample.accuracy == float(right)


def test_eval_says_how_many_prompts_there_are(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained), "--episodes", "12"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "3 prompts x 4 samples per seed" in out
    assert "] over the 3 prompts of each seed; an interval over seeds needs 5 seeds" in out
    assert "pass@4" in out
    assert main(["eval", str(trained), "--episodes", "3", "--greedy"]) == 0  # one completion of each
    out = " ".join(capsys.readouterr().out.split())
    assert "3 prompts x 1 greedy completion per seed" in out
    assert "pass@4" not in out


def test_sample(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(trained), "--number", "3"]) == 0
    assert len(re.findall(r"^ +-?[01]\.\d\d [✓✗] [a-f]{1,3}=.*$", capsys.readouterr().out, re.MULTILINE)) == 3
    command = ["sample", str(trained), "--prompt", "cab=", "--number", "4"]
    assert main([*command, "--greedy"]) == 0
    greedy = capsys.readouterr().out.splitlines()
    assert len(greedy) == 4
    assert len(set(greedy)) == 1
    assert greedy[0].startswith("cab=")
    assert main([*command, "--top-k", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == greedy
    for setting in (["--temperature", "0.5"], ["--top-k", "3"], ["--top-p", "0.9"]):
        assert "greedy always takes the most likely token" in refused(capsys, *command, "--greedy", *setting)


@pytest.mark.parametrize("best", [0, 1])
def test_sample_takes_the_best_seed_unless_told_another(
    trained: Path, best: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jaxpg.runs.trained.best_seed", lambda *_: best)
    run, prompt = load(trained), "cab="
    traced, write = [], completions.generate

    def generate(*arguments: Any, **settings: Any) -> Any:
        traced.append(settings)
        return write(*arguments, **settings)

    monkeypatch.setattr(completions, "generate", generate)
    by_seed = [run.complete(prompt, number=8, seed_index=index) for index in range(2)]
    assert by_seed[0] != by_seed[1]
    assert run.complete(prompt, number=8) == by_seed[best]
    run.complete("ba=", number=8)
    assert len(traced) == 1  # one program for both seeds and all prompts
    run.complete(prompt, number=8, temperature=0.5)
    run.complete("ba=", number=8, temperature=0.5)
    assert len(traced) == 2
    for index, options in ((best, []), (0, ["--seed-index", "0"]), (1, ["--seed-index", "1"])):
        assert main(["sample", str(trained), "--prompt", prompt, *options]) == 0
        assert capsys.readouterr().out.splitlines() == by_seed[index]
    assert "seed indices 0 to 1, not 2" in refused(capsys, "sample", str(trained), "--seed-index", "2")
    for setting in ({"temperature": 0.0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -3}, {"number": 0}):
        with pytest.raises(UserError, match=f"{next(iter(setting))} must be at|{next(iter(setting))} must be above"):
            run.complete(prompt, **setting)
    with pytest.raises(UserError, match="prompt must be a text, not 5"):
        run.complete(5)  # type: ignore[arg-type]
    wrong: dict[str, Any] = {
        "number must be a whole number, not 1.5": {"number": 1.5},
        "seed must be a whole number, not 'x'": {"seed": "x"},
        "seed_index must be a whole number, not 0.5": {"seed_index": 0.5},
        "temperature must be a number, not 'x'": {"temperature": "x"},
        "greedy must be true or false, not 'no'": {"greedy": "no"},
        "no setting 'temprature' of complete. Did you mean 'temperature'": {"temprature": 1.0},
    }
    for sentence, settings in wrong.items():
        with pytest.raises(UserError, match=sentence):
            run.complete(prompt, **settings)


def test_compare_shares_what_its_runs_begin_with(task: Path, tmp_path: Path) -> None:
    arguments = [
        "compare",
        str(task),
        "grpo",
        "rloo",
        "--seeds",
        "1",
        "--steps",
        "400",
        "--out",
        str(tmp_path),
        "--quiet",
    ]
    assert main(arguments) == 0
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"sft", "grpo", "rloo"}
    page = (tmp_path / "comparison.html").read_text()
    assert "completions" in page
    assert (
        completions.load_completions(tmp_path / "rloo")[max(completions.load_completions(tmp_path / "rloo"))][0].prompt
        in page
    )
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert set(written["algorithms"]) == {"grpo", "rloo"}
    before = run_directory.load_metrics(tmp_path / "sft")["evaluation_return"][-1, 0]
    assert float(written["details"]["first stages, last evaluation"]["sft"]) == pytest.approx(before, abs=1e-3)


def test_mistakes_are_refused_with_a_sentence(
    trained: Path, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(trained), ["--out", str(tmp_path / "new")]
    assert "There is no token" in refused(capsys, "sample", run, "--prompt", "cab=Ω")
    assert "prompts of 1 to 4" in refused(capsys, "sample", run, "--prompt", "cabcabcab=")
    assert "--temperature must be above 0: --greedy" in refused(capsys, "sample", run, "--temperature", "0")
    assert "--temperature must be at least" in refused(capsys, "sample", run, "--temperature", "1e-9")
    greedy = refused(capsys, "eval", run, "--greedy", "--samples", "2")
    assert "completions of one prompt are all equal" in greedy
    spaced = str(shutil.copytree(trained, tmp_path / "a run"))
    assert f"jaxpg sample '{spaced}'" in refused(capsys, "play", spaced, "--gif", "x.gif")
    begin = ["train", str(task), "grpo", *out, "--from", run, "--seeds", "3"]
    assert "has the seeds [0, 1], this run also [2]" in refused(capsys, *begin)
    begin = ["train", str(task), "grpo", *out, "--from", run, "--seeds", "2", "--set", "network.width=16"]
    assert "another network" in refused(capsys, *begin)
    heads = ["--seeds", "2", "--set", "network.heads=4", "--set", "network.kv_heads=2"]  # parameters of the same shapes
    assert "another network" in refused(capsys, *begin[:-4], *heads)
    assert "no config.toml" in refused(capsys, "train", str(task), "grpo", *out, "--from", str(tmp_path))
    assert "holds no reward model" in refused(capsys, "train", str(task), "rlhf", *out, "--reward", run)
    assert "no texts to learn from" in refused(capsys, "train", "cartpole", "sft", *out)
    assert "completes prompts" in refused(
        capsys, "train", "cartpole", "grpo", *out, "--set", "network.kind=transformer"
    )
    assert not (tmp_path / "new").exists()


def test_a_section_that_is_like_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "task.toml"
    path.write_text(SMALL.replace('like = "grpo"', 'like = "grp"'))
    assert "for `like` in section rloo" in refused(capsys, "train", str(path), "rloo")


def test_a_stage_of_control_learns_from_its_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = tmp_path / "chain.toml"
    chain.write_text(
        'environment = "Catch-bsuite"\ntotal_steps = 256\nevaluations = 2\nevaluation_episodes = 4\n'
        '[stages.first]\nalgorithm = "a2c"\nnum_envs = 4\n[ppo]\ninitial = "first"\nnum_envs = 4\nnum_steps = 16\n'
    )
    assert main(["train", str(chain), "ppo", "--out", str(tmp_path / "run")]) == 0
    table = capsys.readouterr().out
    assert table.count("its episodes") == 2
    assert "accuracy" not in table
