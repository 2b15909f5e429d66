"""Labelled steps, process reward models as rewards and as judges, and what of a user's own labels is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from refusals import refused
from test_text_steps import babbler, slow_steps, spelled

from jaxpg.cli.main import main
from jaxpg.envs.text import CHARACTERS, PAD, TASKS, best_of_n, json_lines, labelled_steps, majority_vote, text_env
from jaxpg.envs.text import weighted_vote as weighted_vote_of
from jaxpg.envs.text.labelled_steps import StepData
from jaxpg.errors import UserError
from jaxpg.experiments.build import build, reward_network
from jaxpg.experiments.config import resolve_config, to_dict
from jaxpg.experiments.stages import check_plan, plan_stages, runs_named
from jaxpg.experiments.warm_start import build_experiment
from jaxpg.models.generation import completion_rollout
from jaxpg.models.language_model import RewardModel, transformer_reward_model
from jaxpg.preferences import (
    LabelledCompletion,
    StepLabels,
    checked_steps,
    held_out_step_accuracy,
    judged_by_model,
    make_step_labels,
    selecting_env,
    step_labels,
)
from jaxpg.preferences.selection import by_outcome, by_process
from jaxpg.preferences.step_labels import label_rollout, stored_steps
from jaxpg.rollout import make_actor
from jaxpg.rollout.episodes import episodic
from jaxpg.rollout.evaluation import evaluate
from jaxpg.training import run_directory
from jaxpg.training.loop import train
from jaxpg.types import Outcome, Prompt

KEY = jax.random.key(0)
PARITY = {"length": 6, "think": True, "max_tokens": 9}
weighted_vote = jax.jit(weighted_vote_of)


def parity(split="train"):
    return TASKS["parity"](split=split, **PARITY)


def drawn(draw, number, *arguments):
    return jax.tree.map(np.asarray, tiny.jit(jax.vmap(partial(draw, *arguments)))(jax.random.split(KEY, number)))


@pytest.mark.full
def test_a_policy_writes_and_the_task_labels():
    """Every step of every completion as a slow reading has it; the last step is right where the answer is."""
    source = checked_steps(parity(), parity("test"), babbler())
    writer = babbler().init(KEY)
    for draw, split in ((source.draw, "train"), (source.held_out, "test")):
        some = drawn(draw, 64, writer)
        prompts = [CHARACTERS.decode(row) for row in some.prompt.tokens]
        assert set(parity().is_held_out(prompts)) == {split == "test"}
        for prompt, tokens, label in zip(prompts, some.tokens, some.label, strict=True):
            length = tokens.tolist().index(1) + 1 if 1 in tokens else len(tokens)
            right = "".join(str(prompt[: i + 1].count("1") % 2) for i in range(len(prompt) - 1))
            found = slow_steps(tokens[:length].tolist(), right, None)
            found[length - 1] = False  # this policy never answers
            assert {t: bool(label[t]) for t in np.flatnonzero(label >= 0)} == found


@pytest.mark.full
def test_labels_are_wrong_at_their_rate_and_the_same_when_they_come_again():
    writer = babbler().init(KEY)
    clean, noisy, few = (
        drawn(checked_steps(parity(), parity("test"), babbler(), **settings).draw, 512, writer)
        for settings in ({}, {"label_noise": 0.1}, {"label_noise": 0.5, "num_completions": 7})
    )
    np.testing.assert_array_equal(clean.tokens, noisy.tokens)
    steps = clean.label >= 0
    np.testing.assert_array_equal(steps, noisy.label >= 0)
    assert abs((clean.label != noisy.label)[steps].mean() - 0.1) < 0.03
    rows = zip(few.prompt.tokens, few.tokens, few.label, strict=True)
    assert len({tuple(x.tobytes() for x in row) for row in rows}) == 7
    held_out = [
        drawn(checked_steps(parity(), parity("test"), babbler(), label_noise=noise).held_out, 128, writer).label
        for noise in (0.0, 0.5)
    ]
    np.testing.assert_array_equal(*held_out)  # whatever is learned from, an evaluation is by what is right


@pytest.mark.full
def test_a_rollout_of_labels_keeps_what_is_behind_the_end_out():
    source = checked_steps(parity(), parity("test"), babbler())
    some = tiny.jit(jax.vmap(partial(source.draw, babbler().init(KEY))))(jax.random.split(KEY, 8))
    poisoned = some._replace(label=jnp.where(some.tokens == 1, 1000.0, some.label))  # the end, and all behind it
    part = label_rollout(poisoned, end=1)
    real = np.cumsum(np.asarray(some.tokens) == 1, 1) - (np.asarray(some.tokens) == 1) == 0
    np.testing.assert_array_equal(part.loss_mask.T, real & (np.asarray(poisoned.label) >= 0))
    assert (np.asarray(part.steps.reward.T)[~real] == 0).all()


def test_the_last_step_is_right_if_the_answer_is():
    """Whatever the scratchpad says; the other steps keep their own labels."""
    task = TASKS["parity"](length=6, think=True)
    problem = task.draw(KEY)
    tokens = task.demonstration(problem, KEY)
    last = int((tokens != PAD).sum()) - 1
    zero, one = map(CHARACTERS.id, "01")
    wrong = tokens.at[last - 2].set(zero + one - tokens[last - 2])
    judge = tiny.jit(partial(step_labels._judge, task, problem))
    (ends, right), (same_ends, spoiled) = (jax.tree.map(np.asarray, judge(x)) for x in (tokens, wrong))
    np.testing.assert_array_equal(ends, same_ends)
    assert ends[last]
    assert (right[last], spoiled[last]) == (1, 0)
    np.testing.assert_array_equal(right[ends], 1)
    np.testing.assert_array_equal(spoiled[ends][:-1], 1)


def test_labels_that_a_task_gives_are_made_as_they_are_set(monkeypatch):
    monkeypatch.setattr(step_labels, "checked_steps", lambda *given, **settings: (given, settings))
    given, settings = (parity(), parity("test"), babbler()), {"num_completions": 7, "label_noise": 0.25}
    assert make_step_labels(*given, **settings) == (given, settings)


def test_stored_steps_are_drawn_whole_and_each_from_its_split():
    def numbered(*numbers):
        number = jnp.array(numbers)[:, None]
        return StepData(Prompt(number, number > 0), number + 100, number + 200.0)

    source = stored_steps(numbered(1, 2, 3), numbered(7, 8), end=1)
    for draw, numbers in ((source.draw, {1, 2, 3}), (source.held_out, {7, 8})):
        some = drawn(draw, 100, ())
        assert set(some.prompt.tokens[:, 0].tolist()) == numbers
        np.testing.assert_array_equal(some.prompt.tokens + 100, some.tokens)
        np.testing.assert_array_equal(some.prompt.tokens + 200, some.label)


def counting_model():
    """Scores that are read off the tokens: +4 at a 0, -4 at anything else."""

    def token_scores(params, rollout):
        return params * jnp.where(rollout.steps.action == CHARACTERS.id("0"), 4.0, -4.0)

    return RewardModel(
        lambda key: jnp.ones(()), lambda params, rollout: token_scores(params, rollout)[-1], token_scores
    )


def test_agreement_is_told_apart_for_right_and_for_wrong_steps():
    """The model takes every 0 for right: both of the right steps are such, and two of three wrong ones."""
    zero, one, end = CHARACTERS.id("0"), CHARACTERS.id("1"), CHARACTERS.end
    tokens, prompt = jnp.array([zero, zero, one, zero, zero, end]), Prompt(jnp.array([one]), jnp.array([True]))

    def measured(*labels):
        completion = LabelledCompletion(prompt, tokens, jnp.array([*labels, -1.0]))
        source = StepLabels(lambda writer, key: 1 / 0, lambda writer, key: completion, end)
        return held_out_step_accuracy(source, counting_model(), jnp.ones(()), (), KEY, num_completions=3)

    np.testing.assert_allclose(measured(1.0, 1.0, 0.0, 0.0, 0.0), [3 / 5, 1, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(measured(0.0, 0.0, 0.0, 0.0, 0.0), [1 / 5, np.nan, 1 / 5], rtol=1e-6)


def test_a_completion_weighs_what_its_score_says_that_it_is_right():
    tokens = jnp.array([[CHARACTERS.id("0")], [CHARACTERS.id("1")]])
    rollout = completion_rollout(Prompt(tokens, tokens > 0), tokens, end=CHARACTERS.end)
    found = by_outcome(parity(), counting_model(), jnp.ones(()), rollout)
    np.testing.assert_allclose(jnp.exp(found), [1 / (1 + np.exp(-4)), 1 / (1 + np.exp(4))], rtol=1e-5)


@pytest.mark.full
def test_the_score_of_a_token_has_seen_it_and_nothing_behind_it():
    """That of the last token is the score of the completion; another token changes the scores from it on."""
    task = TASKS["parity"](length=7, think=True)
    model = transformer_reward_model(text_env(task), width=8, layers=1, heads=2, kv_heads=1)
    some = tiny.jit(jax.vmap(lambda key: (task.prompt(task.draw(key)), task.demonstration(task.draw(key), key))))(
        jax.random.split(KEY, 8)
    )
    params = jax.tree.map(lambda x: 3.0 * x, tiny.jit(model.init)(KEY))

    def both(tokens):
        part = completion_rollout(some[0], tokens, end=1)
        return model.score(params, part), model.token_scores(params, part), part.steps.mask.sum(0).astype(int)

    score, scores, length = jax.tree.map(np.asarray, tiny.jit(both)(some[1]))
    assert len(set(length.tolist())) > 1
    np.testing.assert_allclose(scores[length - 1, np.arange(8)], score, rtol=1e-5, atol=1e-6)
    _, changed, _ = tiny.jit(both)(some[1].at[:, 3].set(CHARACTERS.id("z")))
    np.testing.assert_allclose(changed[:3], scores[:3], rtol=1e-5, atol=1e-6)
    assert (np.abs(changed[3] - scores[3]) > 1e-3).all()


@pytest.mark.full
def test_a_model_takes_the_place_of_the_check_and_chooses_among_completions():
    """Rewards of lines are σ(s) where they end; a completion weighs the product of σ(s) over all of its steps."""
    task, policy, model = parity(), babbler(), counting_model()
    judged = judged_by_model(task, model, jnp.ones(()))
    env = selecting_env(text_env(judged, process_weight=0.5), task, model, jnp.ones(()), by_process)
    actor = make_actor(policy, policy.init(KEY))
    _, part, _ = tiny.jit(partial(episodic(num_envs=32).collect, env, policy, policy.init(KEY), ()))(KEY)
    outcome, high, low = part.episodes.outcome, 1 / (1 + np.exp(-4)), 1 / (1 + np.exp(4))
    for b, n in enumerate(np.asarray(part.steps.mask.sum(0), int)):
        tokens = np.asarray(part.steps.action[:n, b]).tolist()
        ends = sorted(slow_steps(tokens, "", None))
        sigma = [high if tokens[t] == CHARACTERS.id("0") else low for t in ends]
        np.testing.assert_allclose(part.steps.reward[ends[:-1], b], 0.5 * np.array(sigma[:-1]), rtol=1e-5)
        np.testing.assert_allclose(outcome.parts["model_score"][b], np.log(sigma).sum(), rtol=1e-5)
    result = tiny.jit(partial(evaluate, env, actor, episodes=32, greedy=False, group_size=4))(KEY)
    assert {"best@4", "weighted@4", "cons@4"} <= result.metrics.keys()


def slow_weighted_vote(answer, correct, weight):
    votes = {}
    for a, w in zip(answer, weight, strict=True):
        if a >= 0:
            votes[a] = votes.get(a, 0.0) + w
    if not votes or max(votes.values()) == 0:
        return 0.0
    tied = [a for a, v in votes.items() if v == max(votes.values())]
    shares = []
    for a in tied:
        own = [i for i, other in enumerate(answer) if other == a]
        shares.append(sum(weight[i] * correct[i] for i in own) / sum(weight[i] for i in own))
    return sum(shares) / len(tied)


def test_votes_weighted_by_scores_against_a_slow_count():
    """Weights are quarters, so that ties are exact; some answers are none, some weights nothing."""
    rng = np.random.default_rng(0)
    answer, weight = rng.integers(-1, 3, (300, 6)), rng.integers(0, 4, (300, 6)) / 4
    correct = (answer == 1) * 1.0
    expected = [slow_weighted_vote(*row) for row in zip(answer, correct, weight, strict=True)]
    assert len(set(expected)) > 3  # ties of two and of three
    np.testing.assert_allclose(weighted_vote(answer, correct, weight), expected, rtol=1e-6)
    equal = weighted_vote(answer, correct, np.full(answer.shape, 0.5))
    np.testing.assert_allclose(equal, majority_vote(jnp.asarray(answer), jnp.asarray(correct)), rtol=1e-6)


def test_what_a_model_selects_is_measured_by_its_weights():
    """Of groups of four whose answers differ: the best one, and the vote weighted by e to the score. Half is wrong."""
    rng = np.random.default_rng(0)
    answer, right, score = rng.integers(0, 3, 80), rng.integers(0, 2, 80), rng.normal(size=80) - 50
    parts = {"accuracy": jnp.float32(np.where(right, 1.0, 0.5)), "model_score": jnp.float32(score)}
    outcome = Outcome(jnp.zeros(80), parts, answer=jnp.asarray(answer))
    env = selecting_env(text_env(parity()), parity(), counting_model(), jnp.ones(()), by_process)
    found = env.measure(outcome, jnp.ones(80, jnp.int32), 4)
    groups = [x.reshape(-1, 4) for x in (answer, right, np.exp(score + 50))]
    votes = [slow_weighted_vote(*group) for group in zip(*groups, strict=True)]
    np.testing.assert_allclose(found["weighted@4"], np.mean(votes), rtol=1e-5)
    best = [correct[np.argmax(weight)] for _, correct, weight in zip(*groups, strict=True)]
    np.testing.assert_allclose(found["best@4"], np.mean(best), rtol=1e-6)
    assert len({round(float(found[name]), 3) for name in ("weighted@4", "best@4", "cons@4")}) == 3


def test_the_best_of_n_is_the_one_with_the_highest_score():
    score = jnp.array([[1.0, 3.0, 2.0], [5.0, 5.0, 1.0], [0.0, 0.0, 0.0]])
    correct = jnp.array([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    np.testing.assert_allclose(best_of_n(score, correct), [1, 1 / 2, 1 / 3], rtol=1e-6)


RECORDS = [
    {"prompt": f"{bits}=", "completions": ["<think>0", "1", "</think><answer>1</answer>"], "labels": [1, 0.25, False]}
    for bits in ("01", "11", "10", "00", "001", "011", "101", "111", "0001", "0011", "0111", "1111", "1010", "010101")
]


def written(tmp_path, *records):
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


@pytest.mark.full
def test_labels_of_a_file_stand_where_its_steps_end(tmp_path):
    path = written(tmp_path, *RECORDS)
    task = TASKS["parity"](length=6, think=True)
    parts = {split: labelled_steps(path, task, split=split) for split in ("train", "test")}
    assert len(parts["train"].tokens) + len(parts["test"].tokens) == len(RECORDS)
    for split, part in parts.items():
        prompts = [CHARACTERS.decode(np.asarray(row)) for row in part.prompt.tokens]
        assert set(task.is_held_out(prompts)) == {split == "test"}
        assert CHARACTERS.decode(np.asarray(part.tokens[0])) == "<think>01</think><answer>1</answer>"
        expected = np.full(task.max_tokens, -1.0)
        expected[[1, 2, 7]] = 1, 0.25, 0
        np.testing.assert_array_equal(part.label, np.broadcast_to(expected, part.label.shape))
    source = make_step_labels(task, task, babbler(), file=str(path))
    measure = partial(held_out_step_accuracy, source, counting_model(), num_completions=4)
    accuracy = tiny.jit(measure)(jnp.ones(()), (), KEY)
    assert (accuracy.accuracy, accuracy.right, accuracy.wrong) == (1, 1, 1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"labels": [1, 1]}, "steps.jsonl, line 2: 3 steps in 'completions' and 2 labels: give one label for each"),
        ({"labels": [1, 2, 0]}, "a label is true, false or a number from 0 to 1, not 2"),
        ({"labels": [1, 10**400, 0]}, "a label is true, false or a number from 0 to 1, not 1000000"),
        ({"labels": "110"}, "line 2: the field 'labels' must be a list"),
        ({"labels": None}, "the field 'labels' must be a list"),
        ({"completions": ["<think>0", 1, "x"]}, "a step in 'completions' must be a non-empty string, not 1"),
        ({"completions": ["<think>0", "", "x"]}, "a step in 'completions' must be a non-empty string, not ''"),
        ({"completions": ["<think>0", "1", None]}, "a step in 'completions' must be a non-empty string, not None"),
        (
            {"completions": ["<think>", "01", "</think><answer>1</answer>"]},
            "line 2: the steps in 'completions' do not end where those of parity do.*this completion into 3: .'<thi",
        ),
        ({"completions": ["<think>01", "0"] * 9, "labels": [1] * 18}, "more than max_tokens = "),
        ({"prompt": "0101é="}, "There is no token for 'é'"),
    ],
)
def test_labels_that_do_not_fit_the_steps_are_refused(change, sentence, tmp_path):
    path = written(tmp_path, RECORDS[0], RECORDS[1] | change, *RECORDS[2:])
    with pytest.raises(UserError, match=sentence):
        labelled_steps(path, TASKS["parity"](length=6, think=True))


def test_labelled_completions_have_at_most_the_tokens_of_the_task(tmp_path):
    """Eight, its end included: that many are read, and with one less allowed none."""
    path, settings = written(tmp_path, *RECORDS), {"length": 6, "think": True}
    assert labelled_steps(path, TASKS["parity"](**settings, max_tokens=8)).tokens.shape[1] == 8
    with pytest.raises(UserError, match="line 1: the completion has 8 tokens with its end, more than max_tokens = 7"):
        labelled_steps(path, TASKS["parity"](**settings, max_tokens=7))


def test_steps_of_ones_own_texts_end_with_their_separator(tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i), "completion": f"{i}\ntwice\n{2 * i}"} for i in range(60)]
    data.write_text("\n".join(map(json.dumps, rows)))
    task = json_lines(data, step_separator=r"\n")
    tokens = [*task.vocabulary.encode("1\ntwice\n2"), task.vocabulary.end]
    padded = jnp.array(tokens + [tokens[1]] * 4)  # separators behind the end
    np.testing.assert_array_equal(np.flatnonzero(task.step_ends(padded, jnp.int32(len(tokens)))), [1, 7, 9])
    assert json_lines(data).step_ends is None
    steps = [{"prompt": row["prompt"], "completions": ["1\n", "2\n", ""], "labels": [1, 0, 1]} for row in rows]
    labels = labelled_steps(written(tmp_path, *steps), task)
    np.testing.assert_array_equal(labels.label[0, :5], [-1, 1, -1, 0, 1])  # the last step is the end alone
    assert labels.tokens[0, 4] == task.vocabulary.end
    with pytest.raises(UserError, match="No token of the vocabulary contains step_separator = ';'"):
        json_lines(data, step_separator=";")
    with pytest.raises(UserError, match="data cannot check the steps of a completion itself"):
        checked_steps(task, task, babbler())
    with pytest.raises(UserError, match=r"step_labels\.label_noise is for completions .* the file steps\.jsonl has"):
        make_step_labels(task, task, babbler(), file="steps.jsonl", label_noise=0.1)


SMALL = """
environment = "parity"
environment_settings = { length = 8, min_length = 8, think = true, process_weight = 0.5 }
total_steps = 1_000
evaluations = 1
evaluation_episodes = 8
evaluation_samples = 4
network = { kind = "transformer", width = 8, layers = 1, heads = 2, kv_heads = 1 }
[sft]
total_steps = 200
batch_size = 8
[process_reward_model]
initial = "sft"
total_steps = 200
batch_size = 8
[process_grpo]
initial = "sft"
process_reward = "process_reward_model"
num_envs = 16
num_minibatches = 2
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "steps.toml"
    path.write_text(SMALL)
    return path


def test_what_judges_steps_is_trained_first_and_wrong_judges_are_refused(task):
    def plan(**overrides):
        config, out = resolve_config(task, "process_grpo", overrides), Path("out")
        return plan_stages(config, out, out, task=task, overrides=overrides, finished=lambda stage: False)

    planned = plan(**{"step_labels.label_noise": 0.1})
    assert [stage.name for stage in planned] == ["sft", "process_reward_model", "process_grpo"]
    assert planned[1].config.step_labels == {"label_noise": 0.1}
    assert planned[2].config.process_reward == "out/process_reward_model"
    check_plan(planned, finished=lambda stage: False)
    for overrides, sentence in (
        ({"environment_settings.think": False}, "set think = true"),
        ({"step_labels.label_nose": 0.1}, "Did you mean 'label_noise'"),
        ({"step_labels.label_noise": 1.5}, "label_noise must be at most 1"),
    ):
        with pytest.raises(UserError, match=sentence):
            check_plan(plan(**overrides), finished=lambda stage: False)
    alone = resolve_config(task, "process_reward_model", {"initial": "none"})
    with pytest.raises(UserError, match="begins with, and there is none: set initial"):
        build(alone)
    for overrides, sentence in (
        ({"network": {"kind": "mlp"}}, "process_reward_model trains a transformer, not the network mlp: set network.k"),
        ({"optimizer.kind": "optax:scale_by_lion"}, "process_reward_model takes no optimizer"),
    ):
        with pytest.raises(UserError, match=sentence):
            build(resolve_config(task, "process_reward_model", {"initial": "none", **overrides}))


@pytest.mark.full
def test_one_model_may_judge_completions_and_another_one_their_steps(task):
    learned = {"rewards.accuracy": 1.0, "rewards.liked": {"model": "reward_model", "weight": 2.0}}
    config = resolve_config(task, "process_grpo", learned)
    assert list(runs_named(config)) == ["rewards.liked.model", "process_reward", "initial"]
    shapes = jax.eval_shape(reward_network(config, text_env(parity())).init, KEY)
    ones, zeros = (jax.tree.map(lambda x, value=value: jnp.full(x.shape, value), shapes) for value in (1.0, 0.0))
    env = build(config, models={"rewards.liked.model": ones, "process_reward": zeros}).env
    outcome = tiny.jit(env.outcome)(spelled(env, "<think>01</think><eos>"))
    score = outcome.parts["reward_liked"]
    assert abs(score) > 1
    np.testing.assert_allclose(outcome.reward, outcome.parts["accuracy"] + 2 * score, rtol=1e-6)
    np.testing.assert_allclose(outcome.step_rewards.reward[:4], [0, 0.25, 0.25, 0])  # 0.5 of one half, that of zeros


@pytest.mark.full
def test_from_labels_to_the_best_of_n(task, tmp_path, capsys):
    """A process reward model chooses among a policy's completions, and rewards the steps of another one's."""
    policy, model = (str(tmp_path / name) for name in ("policy", "model"))
    config = resolve_config(task, "sft")
    train(build(config).learner, seeds=[0], total_steps=200, run_dir=tmp_path / "policy", config=to_dict(config))
    begin, labels = ["train", str(task), "process_reward_model", "--from", policy], written(tmp_path, *RECORDS)
    assert main([*begin, "--set", f"step_labels.file={labels}", "--out", model, "--quiet"]) == 0
    metrics = run_directory.load_metrics(tmp_path / "model")
    assert {"loss", "accuracy", "evaluation_accuracy_wrong"} <= metrics.keys()
    capsys.readouterr()
    assert main(["eval", policy, "--episodes", "8", "--samples", "2", "--reward", model]) == 0
    shown = capsys.readouterr().out
    assert {"best@2", "weighted@2"} <= {line.split(" ")[0] for line in shown.splitlines()}
    assert "4 prompts x 2 samples" in " ".join(shown.split())
    assert "add --samples 8" in refused(capsys, "eval", policy, "--reward", model, "--greedy")
    assert "holds no reward model" in refused(capsys, "eval", policy, "--episodes", "8", "--reward", policy)
    env = build_experiment(resolve_config(task, "process_grpo", {"process_reward": model})).env
    outcome = tiny.jit(env.outcome)(spelled(env, "<think>01</think><eos>"))
    assert 0 < outcome.parts["reward_process"] < 1  # a probability, not a verdict
    assert outcome.parts["reward_process"] != 0.5  # as before any training
    begin = ["train", str(task), "process_grpo", "--from", policy, "--out", str(tmp_path / "other")]
    wrong = refused(capsys, *begin, "--set", "process_reward=none", "--reward", model)
    assert "for the setting process_reward, not for reward" in wrong
    assert not (tmp_path / "other").exists()
