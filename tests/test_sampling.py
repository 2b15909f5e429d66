"""Completions as data: what is written into a file, that tasks and fine-tuning read it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from jaxpg.cli.main import main
from jaxpg.envs.text import CHARACTERS, END, PAD, TASKS, demonstrations, json_lines
from jaxpg.errors import UserError
from jaxpg.experiments import sampling
from jaxpg.experiments.build import build
from jaxpg.experiments.completions import Sample, decode_completion
from jaxpg.experiments.config import load_config, resolve_config
from jaxpg.preferences import make_demonstrations, make_pairs
from jaxpg.preferences.step_labels import make_step_labels

EQUALS = CHARACTERS.id("=")


def sorting(share: float) -> Any:
    """In place of `generate`: the letters of the prompt in order in this share of the completions, else backwards."""

    def generate(policy, params, prompt, key, *, end, max_tokens, **settings):
        letters = jnp.where(prompt.mask & (prompt.tokens != EQUALS), prompt.tokens, 1000)
        right, number = jnp.sort(letters), (letters < 1000).sum()
        place = jnp.arange(max_tokens)
        wrong = right[jnp.clip(number - 1 - place, 0)]
        written = jnp.where(jax.random.uniform(key) < share, right[jnp.clip(place, 0, len(right) - 1)], wrong)
        return jnp.where(place < number, written, end).astype(jnp.int32)

    return generate


@pytest.fixture(scope="module")
def made() -> tuple:
    sizes = {"network.width": 8, "network.layers": 1, "network.heads": 2, "network.kv_heads": 1}
    config = resolve_config("sort", "sft", {**sizes, "environment_settings.min_length": 2})
    return config, build(config)


def sample(made: tuple, path: Path, monkeypatch: pytest.MonkeyPatch, share: float = 0.5, **changes: Any) -> Any:
    monkeypatch.setattr(sampling, "generate", sorting(share))
    settings = {"prompts": 5, "number": 4, "only": "right", **changes}
    return sampling.sample_to_file(path, *made, (), jax.random.key(0), **settings)


@pytest.mark.full
def test_right_completions_of_training_prompts_are_written_once_each(made, tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    counts = sample(made, path, monkeypatch, prompts=40)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (counts.prompts, counts.completions, counts.lines) == (40, 160, len(lines))
    assert 50 < counts.right < 130
    assert len({(line["prompt"], line["completion"]) for line in lines}) == len(lines) < counts.right
    task = TASKS["sort"](length=4, min_length=2)
    for line in lines:
        right = "".join(sorted(line["prompt"].removesuffix("=")))
        assert line == line | {"completion": right, "answer": right, "accuracy": 1.0, "reward": 1.0, "ended": True}
    assert not any(task.is_held_out([line["prompt"] for line in lines]))
    # Fine-tuning reads it, and so does a task of its own.
    prompts, completions = demonstrations(path, task)
    for row, tokens, line in zip(completions, prompts.tokens, lines, strict=True):
        assert CHARACTERS.decode(np.asarray(row)) == line["completion"]
        assert CHARACTERS.decode(np.asarray(tokens)) == line["prompt"]
        assert (np.asarray(row) == END).sum() == 1
    of_file = json_lines(path, "standard", held_out=0.0)
    problems = jnp.arange(len(lines))
    tokens = jax.vmap(lambda i: of_file.demonstration(i, jax.random.key(0)))(problems)
    verdicts = jax.vmap(of_file.verify)(problems, tokens, (tokens != PAD).sum(1))
    assert (verdicts.accuracy == 1).all()


@pytest.mark.full
def test_how_many_are_written_at_once_changes_nothing(made, tmp_path, monkeypatch):
    paths = [tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"]
    for path, at_once in zip(paths, (1024, 8), strict=True):  # 8: two prompts at a time, of five
        monkeypatch.setattr(sampling, "SIDE_BY_SIDE", at_once)
        counts = sample(made, path, monkeypatch, only="all")
        assert counts.lines == counts.completions == 20
    whole, parts = (path.read_text() for path in paths)
    assert whole == parts
    assert {json.loads(line)["accuracy"] for line in whole.splitlines()} == {0.0, 1.0}


@pytest.mark.full
def test_truncated_completions_are_left_out_unless_all_are_asked_for(made, tmp_path, monkeypatch):
    """What is written by default is what fine-tuning reads, completions that end at once included."""

    def some_end(policy, params, prompt, key, *, end, max_tokens, **settings):
        never, at_once = jax.random.uniform(key, (2,)) < 0.4
        length = jnp.where(never, max_tokens, jnp.where(at_once, 0, 2))
        return jnp.where(jnp.arange(max_tokens) < length, CHARACTERS.id("a"), end).astype(jnp.int32)

    def written(only):
        monkeypatch.setattr(sampling, "generate", some_end)
        path = tmp_path / f"{only}.jsonl"
        settings = {"prompts": 10, "number": 4, "only": only}
        counts = sampling.sample_to_file(path, *made, (), jax.random.key(0), **settings)
        return path, counts, [json.loads(line) for line in path.read_text().splitlines()]

    path, counts, ended = written("ended")
    whole, _, every = written("all")
    assert ended == [line for line in every if line["ended"]]
    assert 0 < counts.lines == counts.ended == len(ended) < len(every) == counts.completions == 40
    assert f"{40 - counts.ended} truncated ones left out" in counts.sentence("ended")
    task = TASKS["sort"](length=4, min_length=2)
    _, completions = demonstrations(path, task)
    assert len(completions) == len(ended)
    assert {CHARACTERS.decode(np.asarray(row)) for row in completions} == {"", "aa"}
    with pytest.raises(UserError, match="--only ended"):
        demonstrations(whole, task)


@pytest.mark.full
def test_padding_that_was_written_is_shown(made, tmp_path, monkeypatch):
    """In the file and on the terminal, as the verifier has read it: such a completion is not what it seems."""
    letter = CHARACTERS.id("a")

    def generate(policy, params, prompt, key, *, end, max_tokens, **settings):
        return jnp.full(max_tokens, end).at[:3].set(jnp.array([letter, PAD, letter])).astype(jnp.int32)

    monkeypatch.setattr(sampling, "generate", generate)
    path = tmp_path / "data.jsonl"
    sampling.sample_to_file(path, *made, (), jax.random.key(0), prompts=1, number=1, only="all")
    assert json.loads(path.read_text().splitlines()[0])["completion"] == "a<pad>a"
    assert decode_completion(CHARACTERS, np.array([letter, PAD, letter, END, PAD])) == "a<pad>a"
    assert decode_completion(CHARACTERS, np.array([letter, PAD])) == "a<pad> ..."


@pytest.mark.parametrize(("accuracy", "mark"), [(1.0, "✓"), (0.5, "✗"), (0.0, "✗")])
def test_half_right_is_not_right(accuracy, mark):
    assert f" {mark} " in Sample("ab=", "ba", 0.5, accuracy).line().plain


@pytest.mark.full
def test_nothing_right_is_an_error_and_leaves_no_file(made, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"None of the 20 completions .* for 5 prompts is right, so there is nothing"):
        sample(made, tmp_path / "data.jsonl", monkeypatch, share=0.0)
    assert not list(tmp_path.iterdir())


def test_arguments_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "data.jsonl")]
    assert "--only is for completions that are written to a file" in refused(capsys, "sample", "x", "--only", "right")
    assert "--prompts is for completions" in refused(capsys, "sample", "x", "--prompts", "3")
    assert "leave out --prompt." in refused(capsys, "sample", "x", *out, "--prompt", "ab=")
    assert "ends in .jsonl" in refused(capsys, "sample", "x", "--out", str(tmp_path / "data.txt"))
    (tmp_path / "data.jsonl").write_text("")
    assert "exists already" in refused(capsys, "sample", "x", *out)


# Where fine-tuning has its demonstrations from.


@pytest.mark.full
def test_a_few_demonstrations_are_used_again_and_again():
    task = TASKS["sort"](length=4, min_length=4)
    few = make_demonstrations(task, num_demonstrations=3)
    rows = jax.vmap(few.draw)(jax.random.split(jax.random.key(0), 50))
    prompts = {CHARACTERS.decode(np.asarray(few.prompt_tokens(row))) for row in rows}
    assert len(prompts) == 3
    for row in range(3):
        prompt = CHARACTERS.decode(np.asarray(few.prompt_tokens(row)))
        written = few.demonstration(row, jax.random.key(row))
        assert CHARACTERS.decode(np.asarray(written)) == "".join(sorted(prompt.removesuffix("=")))
    assert make_demonstrations(task) is task


@pytest.mark.parametrize(
    ("line", "settings", "sentence"),
    [
        ("", {}, "is empty"),
        ('{"prompt": "badc="}', {}, "has no field 'completion'"),
        ('{"prompt": "badc=", "completion": "abcdefgh"}', {}, "more than max_tokens = 5. Raise max_tokens where"),
        ('{"prompt": "badc=", "completion": "abcd", "ended": false}', {}, "line 1: the completion was truncated"),
        ('{"prompt": "badcbadc=", "completion": "abcd"}', {}, "more than prompt_length = 5"),
        ('{"prompt": "ba!c=", "completion": "abcd"}', {}, "There is no token for '!'"),
        ('{"prompt": "badc=", "completion": "abcd"}', {"num_demonstrations": 3}, "or num_demonstrations of them"),
    ],
)
def test_files_that_cannot_be_learned_from_are_refused(tmp_path, line, settings, sentence):
    path = tmp_path / "data.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(UserError, match=sentence):
        make_demonstrations(TASKS["sort"](length=4, min_length=4), file=str(path), **settings)


@pytest.mark.parametrize(
    ("make", "settings", "sentence"),
    [
        (
            make_demonstrations,
            {"number": 4, "temperature": 0.5},
            r"demonstrations\.number and demonstrations\.temp\w+ are",
        ),
        (
            make_demonstrations,
            {"prompts": 3, "file": "x.jsonl"},
            r"demonstrations\.prompts is used only with sampled_from",
        ),
        (
            make_demonstrations,
            {"skip_long_prompts": True},
            "skip_long_prompts is used only with a file, and none is given",
        ),
        (
            make_pairs,
            {"file": "x.jsonl", "judge": "length", "num_pairs": 5},
            r"pairs\.judge and pairs\.num_pairs are for a",
        ),
        (
            make_pairs,
            {"file": "x.jsonl", "sharpness": 3.0},
            r"pairs\.sharpness is for a judge, and the file x\.jsonl has",
        ),
        (
            make_pairs,
            {"skip_long_prompts": True, "slip_rate": 0.1},
            r"pairs\.skip_long_prompts is used only with a file of pairs",
        ),
        (
            make_step_labels,
            {"skip_long_prompts": True},
            r"step_labels\.skip_long_prompts is used only with a file of completions",
        ),
    ],
)
def test_settings_that_nothing_would_read_are_refused(make, settings, sentence):
    task = TASKS["sort"](length=4, min_length=4)
    others = {make_demonstrations: (), make_pairs: (task,), make_step_labels: (task, None)}[make]
    with pytest.raises(UserError, match=sentence):
        make(task, *others, **settings)


@pytest.mark.full
def test_prompts_of_the_test_split_are_not_learned_from(tmp_path):
    task, test = (TASKS["sort"](length=4, min_length=4, split=split) for split in ("train", "test"))
    prompt = CHARACTERS.decode(np.asarray(test.prompt_tokens(test.draw(jax.random.key(0)))))
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "completion": "abcd"}) + "\n")
    with pytest.raises(UserError, match=r"None of the 1 records of .* is in the train split"):
        make_demonstrations(task, file=str(path))


@pytest.mark.full
def test_a_judge_may_go_by_a_reward_function_that_the_rules_do_not_see() -> None:
    task = TASKS["modular_chain"](terms=3, think=True, scratchpad_share=0.5)
    pairs = make_pairs(task, task, judge="length", sharpness=1e4)
    drawn = jax.jit(jax.vmap(pairs.draw))(jax.random.split(jax.random.key(0), 64))
    chosen, rejected = ((x != PAD).sum(1) for x in (drawn.chosen, drawn.rejected))
    assert (chosen <= rejected).all()
    assert 10 < (chosen < rejected).sum() < 54
    with pytest.raises(UserError, match=r"no reward 'lenght' of modular_chain. Did you mean 'length'"):
        make_pairs(task, task, judge="lenght")


# As a stage, on the command line.

TWO_STAGES = """
environment = "sort"
environment_settings = { length = 3, letters = 6 }
evaluations = 1
evaluation_episodes = 8
network = { kind = "transformer", width = 16, layers = 1, heads = 2, kv_heads = 1 }

[sft]
total_steps = 12_000
batch_size = 32
learning_rate = 5e-3

[stages.first]
algorithm = "sft"

[stages.second]
algorithm = "sft"
total_steps = 300
demonstrations = { sampled_from = "first", prompts = 32, number = 4 }
"""


@pytest.mark.full
def test_a_stage_learns_from_right_completions_of_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped between the stages, it goes on with the same demonstrations."""
    task, out = tmp_path / "sorting.toml", tmp_path / "run"
    task.write_text(TWO_STAGES)
    assert main(["train", str(task), "second", "--out", str(out)]) == 0
    data = out / sampling.SAMPLED_FILES["demonstrations"]
    written, lines = data.read_bytes(), data.read_text().splitlines()
    assert all(json.loads(line)["accuracy"] == 1 for line in lines)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{len(lines)} right completions" in shown
    assert "new demonstrations" in shown
    assert f"{len(lines)} right completions of first" in (out / "report.html").read_text()
    config = load_config(out)
    assert config.demonstrations["sampled_from"] == str(out / "first")
    data.unlink()
    sampling.sample_data(config, out)
    assert data.read_bytes() == written


def test_demonstrations_are_written_into_the_directory_of_their_run_alone(tmp_path: Path) -> None:
    elsewhere = {"demonstrations.sampled_from": "run", "demonstrations.file": str(tmp_path / "elsewhere.jsonl")}
    config = resolve_config("sort", "sft", elsewhere)
    with pytest.raises(UserError, match=r"sampled into the directory of their own run, .* alone: leave"):
        sampling.sample_data(config, tmp_path / "run")
