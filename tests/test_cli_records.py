"""The command line with a user's own files: records, a tokenizer, pairs, a reward function."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from html import escape
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from refusals import refused

from jaxpg import files
from jaxpg.cli.main import main
from jaxpg.experiments import completions
from jaxpg.experiments import config as configs
from jaxpg.experiments.warm_start import build_experiment
from jaxpg.training import run_directory
from jaxpg.training.loop import restore

tokenizers = pytest.importorskip("tokenizers", reason="it is an optional dependency")

WORDS = ["".join(word) for word in product("abc", repeat=3)]
RECORDS = [{"prompt": word + "=", "answer": word[::-1]} for word in WORDS]
PAIRS = [{"prompt": word + "=", "chosen": word[::-1], "rejected": word + "a"} for word in WORDS]
TASK = """
environment = "json_lines"
environment_settings = { path = "data.jsonl", held_out = 0.3, max_tokens = 6 }
total_steps = 400
evaluations = 2
evaluation_episodes = 8
network = { kind = "transformer", width = 8, layers = 1, heads = 2, kv_heads = 1 }
pairs = { file = "pairs.jsonl" }

[sft]
batch_size = 8

[reward_model]
batch_size = 8

[dpo]
initial = "sft"
batch_size = 8

[rlhf]
initial = "sft"
reward = "reward_model"
num_envs = 8
num_minibatches = 2
"""


def write_lines(path: Path, records: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in records))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory: data, pairs, a tokenizer of whole letters, and a task that reads them."""
    path = tmp_path_factory.mktemp("mine")
    write_lines(path / "data.jsonl", RECORDS)
    write_lines(path / "pairs.jsonl", PAIRS)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate("cab=")}, []))
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "task.toml").write_text(TASK.replace("max_tokens", 'tokenizer = "tokenizer.json", max_tokens'))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


@pytest.fixture(scope="module")
def chain(place: Path) -> Path:
    """RLHF, after the fine-tuning and the reward model that its config names."""
    assert main(["train", "task.toml", "rlhf", "--out", "chain", "--quiet"]) == 0
    return place / "chain"


def learned(run: Path) -> Any:
    """The state of a run's one seed."""
    resolved = configs.load_config(run)
    return jax.tree.map(
        lambda x: x[0], restore(build_experiment(resolved).learner, run, resolved.seeds, "last").learner
    )


def test_rlhf_trains_what_it_needs_and_is_paid_by_the_reward_model(
    chain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (configs.load_config(chain).initial, configs.load_config(chain).reward) == (
        "chain/sft",
        "chain/reward_model",
    )
    begun, taught = learned(chain), learned(chain / "sft")
    jax.tree.map(np.testing.assert_array_equal, begun.reference, taught.params.policy)
    metrics = run_directory.load_metrics(chain)
    assert not np.isin(metrics["evaluation_return"][-1], [0, 1]).any()  # which is all that an answer could earn
    assert {sample.reward for sample in completions.load_completions(chain)[int(metrics["steps"][-1, 0])]} - {0.0, 1.0}
    assert main(["sample", "chain", "--number", "2"]) == 0
    assert main(["sample", "chain", "--prompt", "cab=", "--number", "2"]) == 0
    assert [line[:4] for line in capsys.readouterr().out.splitlines()[-2:]] == ["cab=", "cab="]


def test_what_it_needs_may_be_named(chain: Path) -> None:
    needs = ["--from", "chain/sft", "--reward", "chain/reward_model"]
    assert main(["train", "task.toml", "rlhf", *needs, "--out", "again", "--quiet"]) == 0
    first, again = learned(chain), learned(Path("again"))
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)


def test_dpo_learns_from_the_pairs_of_a_file(chain: Path) -> None:
    more = ["--steps", "4000", "--set", "learning_rate=0.01"]
    assert main(["train", "task.toml", "dpo", "--from", "chain/sft", *more, "--out", "dpo", "--quiet"]) == 0
    taught, preferring = learned(chain / "sft"), learned(Path("dpo"))
    jax.tree.map(np.testing.assert_array_equal, preferring.reference, taught.params.policy)
    metrics = run_directory.load_metrics(Path("dpo"))
    assert metrics["reward_accuracy"][-1] > 0.9
    assert metrics["margin"][-1] > metrics["margin"][1]  # the first row is from before training
    held_out = [x[~np.isnan(x)] for x in (metrics[f"evaluation_pair_{n}"] for n in ("margin", "accuracy", "loss"))]
    assert held_out[0][-1] > held_out[0][0] == 0
    assert held_out[1][-1] > 0.9
    assert held_out[2][-1] < held_out[2][0]


def test_what_does_not_fit_is_refused_by_its_cause(chain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (chain.parent / "letters.toml").write_text(TASK)  # as tokens, 6 more than those of the tokenizer: the tags
    begin, out = ["--from", "chain/sft"], ["--out", "new"]
    message = refused(capsys, "train", "task.toml", "sft", "--from", "chain/reward_model", *out)
    assert "chain/reward_model is a run of reward_model and contains no policy" in message
    message = refused(capsys, "train", "letters.toml", "sft", *begin, *out)
    assert "The run in chain/sft has another vocabulary than this one: 6 tokens there, 10 here" in message
    judged = ["--reward", "chain/reward_model"]
    message = refused(capsys, "train", "letters.toml", "rlhf", *judged, *out, "--set", "initial=none")
    assert "The run in chain/reward_model has another vocabulary" in message
    message = refused(capsys, "train", "task.toml", "rlhf", *judged, *out, *begin, "--set", "network.width=16")
    assert "The reward model of chain/reward_model has another network ({" in message
    assert "'width': 8" in message
    assert "'width': 16" in message
    heads = ["--set", "network.heads=4", "--set", "network.kv_heads=2"]  # parameters of the same shapes
    message = refused(capsys, "train", "task.toml", "rlhf", *judged, *out, *heads, "--set", "initial=none")
    assert "The reward model of chain/reward_model has another network ({" in message
    message = refused(capsys, "train", "task.toml", "dpo", *begin, *out, "--set", "pairs.sharpnes=1")
    assert "no setting 'sharpnes' of preference pairs. Did you mean 'sharpness'" in message
    assert "no setting 'held_out' of preference pairs" in refused(
        capsys, "train", "task.toml", "dpo", *begin, *out, "--set", "pairs.held_out=0.5"
    )
    message = refused(capsys, "train", "task.toml", "dpo", *begin, *out, "--set", "pairs.num_pairs=many")
    assert "num_pairs must be an integer or none, not 'many'" in message
    message = refused(
        capsys, "train", "task.toml", "dpo", *begin, *out, "--set", "environment_settings.held_out=0.0001"
    )
    assert "None of the 27 records of data.jsonl is in the test split" in message
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("split=test", "environment_settings.split cannot be set"),
        ("held_out=some", "held_out must be like its default 0.1, not 'some'"),
        ("match=3", "match must be like its default 'exact', not 3"),
        ("skip_long_prompts=no", "skip_long_prompts must be like its default False, not 'no'"),
        ("step_separator=3", "step_separator must be str or none, not 3"),
        ("max_token=9", "Did you mean 'max_tokens'"),
    ],
)
@pytest.mark.parametrize("rewards", [[], ["--set", "rewards.accuracy=1"]])
def test_settings_of_a_file_are_checked_with_a_list_of_rewards_too(
    place: Path, capsys: pytest.CaptureFixture[str], setting: str, sentence: str, rewards: list[str]
) -> None:
    out = ["--out", "never", "--set", "initial=none"]
    message = refused(capsys, "train", "task.toml", "grpo", *out, *rewards, "--set", f"environment_settings.{setting}")
    assert sentence in message
    assert not Path("never").exists()


class Mine(NamedTuple):
    """A run in the directory "mine", fine-tuned on the characters of mine.jsonl.

    judge: the module of its reward function, which fails where `fails` is set.
    pages: what was its report, one after the other.
    """

    judge: ModuleType
    pages: list[str]


@pytest.fixture(scope="module")
def mine(place: Path) -> Iterator[Mine]:
    judge, pages = ModuleType("judge_of_mine"), []
    replace_file = files.replace_file

    def graded(prompt: str, completion: str, answer: str) -> float:
        if judge.fails:
            raise ValueError("no more")
        return float(completion == answer)

    def watched(path: Path, text: str) -> None:
        replace_file(path, text)
        if path.name == "report.html":
            pages.append(text)

    judge.graded, judge.fails = graded, False
    write_lines(place / "mine.jsonl", RECORDS)
    text = TASK.replace("data.jsonl", "mine.jsonl").replace("max_tokens", 'match = "judge_of_mine:graded", max_tokens')
    (place / "mine.toml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, judge.__name__, judge)
        with patch.context() as watching:
            watching.setattr(files, "replace_file", watched)
            assert main(["train", "mine.toml", "sft", "--out", "mine", "--quiet"]) == 0
        yield Mine(judge, pages)


def test_the_page_of_a_run_goes_with_it(mine: Mine) -> None:
    written = completions.completions_by_heading(Path("mine"))
    assert len(mine.pages) == len(written) - 1 == 2  # there is no page before the first iteration
    for number, page in enumerate(mine.pages, start=2):
        shown = [after for after in re.findall("<summary>([^<]*)</summary>", page) if after in written]
        assert shown == list(written)[number - 1 :: -1]  # those so far, the last first
        for sample in written[shown[0]]:
            assert f'<span class="quiet">{escape(sample.prompt)}</span><b>{escape(sample.completion)}</b>' in page
        assert "<svg" in page
        assert not re.search("<script|<link|@import|(src|href)=.http", page)
    assert Path("mine", "report.html").read_text() == mine.pages[-1]


def test_a_reward_function_that_fails_is_named(
    mine: Mine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = mine.judge.graded.__code__.co_firstlineno + 2
    sentence = (
        f"The reward function judge_of_mine:graded raised ValueError: no more (test_cli_records.py, line {line}), for "
        "the record of mine.jsonl"
    )
    monkeypatch.setattr(mine.judge, "fails", True)
    assert sentence in refused(capsys, "eval", "mine", "--episodes", "4", "--trust-code")
    assert sentence in refused(capsys, "sample", "mine", "--trust-code")
    monkeypatch.setattr(mine.judge, "fails", False)
    assert main(["sample", "mine", "--trust-code"]) == 0

    shown = completions.CompletionLogger.__call__

    def failing(self: completions.CompletionLogger, state: Any) -> None:
        monkeypatch.setattr(mine.judge, "fails", True)
        shown(self, state)

    monkeypatch.setattr(completions.CompletionLogger, "__call__", failing)
    assert sentence in refused(capsys, "train", "mine.toml", "sft", "--out", "shown", "--quiet")
    assert not list(Path("shown").glob("samples/*"))


@pytest.mark.parametrize("changed", ["own.jsonl", "own_pairs.jsonl"])
def test_a_run_does_not_go_on_with_other_data(place: Path, changed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same characters, so the same vocabulary. What a run does not read may change."""
    write_lines(place / "own.jsonl", RECORDS)
    write_lines(place / "own_pairs.jsonl", PAIRS)
    (place / "own.toml").write_text(TASK.replace("data.jsonl", "own.jsonl").replace("pairs.jsonl", "own_pairs.jsonl"))
    out = changed.removesuffix(".jsonl")
    train = ["train", "own.toml", "reward_model", "--quiet", "--out", out]
    assert main([*train, "--steps", "40"]) == 0
    before = (place / changed).read_text()
    (place / changed).write_text(before.replace("aab=", "aba=", 1))
    rows = (place / out / "metrics.jsonl").read_bytes()
    assert f"{changed} has changed since the run in {out} began" in refused(capsys, *train, "--resume", "--steps", "80")
    assert (place / out / "metrics.jsonl").read_bytes() == rows
    (place / changed).write_text(before)
    assert main([*train, "--resume", "--steps", "80"]) == 0


def test_a_run_knows_its_vocabulary(mine: Mine, capsys: pytest.CaptureFixture[str]) -> None:
    assert "There is no token for '<'" in refused(capsys, "sample", "mine", "--prompt", "<pad>", "--trust-code")
    letters = str.maketrans("abc", "xyz")
    others = [{name: text.translate(letters) for name, text in line.items()} for line in RECORDS]
    train = ["train", "mine.toml", "sft", "--quiet", "--out"]
    for records, cause in (
        (others, "token 7 is 'a' there, 'x' here"),
        ([*RECORDS, {"prompt": "d=", "answer": "d"}], "10 tokens there, 11 here"),
    ):
        write_lines(Path("mine.jsonl"), records)
        longer, begun = [*train, "mine", "--resume", "--steps", "500"], [*train, "other", "--from", "mine"]
        for command in (["sample", "mine", "--trust-code"], ["eval", "mine", "--trust-code"], longer, begun):
            message = refused(capsys, *command)
            assert "The vocabulary of mine.jsonl has changed since the run in mine began" in message
            assert cause in message
    write_lines(Path("mine.jsonl"), [*RECORDS, {"prompt": "aaa=", "answer": "a"}])  # says no more than before
    assert main(["sample", "mine", "--number", "1", "--trust-code"]) == 0
    table = Path("mine/vocabulary.json")
    before = table.read_text()
    for damaged in ("", "[]", '["a"]', '{"tokens": 3, "checksum": null}', '{"tokens": []}', "\x00"):
        table.write_text(damaged)
        assert "mine/vocabulary.json" in refused(capsys, "sample", "mine", "--trust-code")
    table.write_text(before)
