"""The list of rewards: standardised sums against slow loops, functions of one's own, languages, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_text_steps import spelled

from jaxpg import envs
from jaxpg.envs.text import CHARACTERS, PAD, TASKS, GradedCompletion, Reward, Verdict, json_lines, text_env
from jaxpg.envs.text.rewards import make_reward
from jaxpg.errors import UserError
from jaxpg.experiments.build import build, reward_network
from jaxpg.experiments.config import resolve_config
from jaxpg.experiments.stages import runs_named, with_run
from jaxpg.models.distributions import Categorical
from jaxpg.parallel import host_callback
from jaxpg.rollout.dynamic_sampling import with_dynamic_sampling
from jaxpg.rollout.episodes import episodic
from jaxpg.types import Episodes, Policy, RewardTerm, Rollout, Transition
from jaxpg.update.normalization import initial_term_moments, standardize_rewards
from jaxpg.user_input import user_code

LENGTHS = np.array([3, 1, 4, 2, 4, 1])
TERMS = {"rule": RewardTerm(2.0, None), "model": RewardTerm(0.5, "batch"), "style": RewardTerm(-1.5, "running")}
POISON = 1000.0
KEY = jax.random.key(5)


def finished(values: Mapping[str, np.ndarray]) -> Rollout:
    """Whole episodes of LENGTHS, whose terms have these values `[B]`; behind their ends are large numbers."""
    mask = (np.arange(4)[:, None] < LENGTHS).astype(np.float32)
    reward = np.where(mask > 0, 0.0, POISON).astype(np.float32)
    reward[LENGTHS - 1, np.arange(len(LENGTHS))] = 77.0  # the sum of the plain values, which is replaced
    zeros = jnp.zeros_like(mask)
    steps = Transition(zeros, zeros, zeros, jnp.asarray(reward), zeros, zeros > 0, jnp.asarray(mask))
    terms = {name: jnp.asarray(x, jnp.float32) for name, x in values.items()}
    return Rollout(steps, steps.mask, episodes=Episodes(reward_terms=terms))


def slow_sums(rollouts: list[dict[str, np.ndarray]], terms: Mapping[str, RewardTerm]) -> list[list[float]]:
    """The rewards of the episodes of each rollout in turn, one episode at a time, in float64."""
    sums = []
    for i, values in enumerate(rollouts):
        row = []
        for b in range(len(LENGTHS)):
            total = 0.0
            for name, (weight, standardize) in terms.items():
                x = float(values[name][b])
                over = {"batch": rollouts[i : i + 1], "running": rollouts[: i + 1], None: []}[standardize]
                seen = [float(y) for rollout in over for y in rollout[name]]
                if seen:
                    mean = sum(seen) / len(seen)
                    variance = sum((y - mean) ** 2 for y in seen) / len(seen)
                    x = max(-10.0, min(10.0, (x - mean) / (variance + 1e-8) ** 0.5))
                total += weight * x
            row.append(total)
        sums.append(row)
    return sums


def draw_values(rng: np.random.Generator) -> dict[str, np.ndarray]:
    scales = {"rule": (0.0, 1.0), "model": (-40.0, 8.0), "style": (3.0, 0.1)}
    return {name: rng.normal(*scale, len(LENGTHS)) for name, scale in scales.items()}


def paid(values: dict[str, np.ndarray], moments: Any, terms: Mapping[str, RewardTerm] = TERMS) -> Any:
    rollout, moments, metrics = standardize_rewards(terms, finished(values), moments)
    return np.asarray(rollout.steps.reward), moments, metrics


def test_rewards_are_standardised_over_the_batch_and_by_running_moments():
    rng = np.random.default_rng(0)
    rollouts = [draw_values(rng) for _ in range(3)]
    moments = initial_term_moments(TERMS)
    assert moments.keys() == {"style"}
    for values, expected in zip(rollouts, slow_sums(rollouts, TERMS), strict=True):
        reward, moments, metrics = paid(values, moments)
        np.testing.assert_allclose(reward[LENGTHS - 1, np.arange(len(LENGTHS))], expected, rtol=1e-4, atol=1e-4)
        before_end = np.arange(4)[:, None] < LENGTHS - 1
        assert (reward[before_end] == 0).all()
        assert (reward[np.arange(4)[:, None] >= LENGTHS] == POISON).all()
        np.testing.assert_allclose(metrics["weighted_rule"], 2 * values["rule"].mean(), rtol=1e-5)
        np.testing.assert_allclose(metrics["weighted_model"], 0, atol=1e-5)  # a batch has the mean 0
        total = sum(metrics.values())
        np.testing.assert_allclose(total, np.mean(expected), atol=1e-4)
    assert moments["style"].samples == 3 * len(LENGTHS)


def test_what_is_standardised_does_not_depend_on_scale_and_offset_of_its_values():
    values = draw_values(np.random.default_rng(1))
    other = values | {"model": 500 + 300 * values["model"], "style": 40 * values["style"] - 7}
    plain, moved = (paid(x, initial_term_moments(TERMS))[0] for x in (values, other))
    np.testing.assert_allclose(moved, plain, rtol=1e-3, atol=2e-3)
    scaled = values | {"rule": 3 * values["rule"]}
    assert np.abs(paid(scaled, initial_term_moments(TERMS))[0] - plain).max() > 0.1


@pytest.mark.parametrize("way", ["batch", "running"])
def test_values_that_are_all_equal_pay_nothing(way):
    terms = {"rule": RewardTerm(1.0, None), "model": RewardTerm(5.0, way)}
    values = {"rule": np.arange(6.0), "model": np.full(6, 0.1)}
    reward, _, _ = paid(values, initial_term_moments(terms), terms)
    np.testing.assert_allclose(reward[LENGTHS - 1, np.arange(6)], np.arange(6.0), atol=1e-3)


def test_only_a_list_with_standardised_entries_leaves_its_sum_to_the_learner():
    task = TASKS["sort"](length=3, letters=6)
    assert not text_env(task, rewards={"accuracy": 1.0, "length": {"weight": 0.5}}).reward_terms
    env = text_env(task, rewards={"accuracy": 2, "length": {"weight": 0.5, "standardize": "batch"}})
    assert env.reward_terms == {"accuracy": RewardTerm(2, None), "length": RewardTerm(0.5, "batch")}


def completion(text: str, prompt: str = "cab=", *, task: Any = None) -> GradedCompletion:
    ids = CHARACTERS.encode(text, special_tokens=True)
    tokens = jnp.full(24, PAD, jnp.int32).at[: len(ids)].set(jnp.array(ids))
    shown = jnp.array([*CHARACTERS.encode(prompt), PAD])
    verdict = Verdict(jnp.float32(0), jnp.float32(0), jnp.int32(-1))
    prompt_ = envs.text.task.Prompt(shown, shown != PAD)
    return GradedCompletion(verdict, jnp.int32(0), prompt_, tokens, jnp.int32(len(ids)), 24, CHARACTERS, 0)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("123<eos>", 1),
        ("12ab<eos>", 0.5),
        ("<think>1a</think><answer>2</answer><eos>", 2 / 3),
        ("<think></think><eos>", 1),
        ("<eos>", 1),
        ("ab ", 0),
        ("1<eos>ab", 1 / 3),  # nothing but the end token itself is left out
    ],
)
def test_the_share_of_a_completion_in_a_language(text, share):
    reward = make_reward("language", {"weight": 1.0, "alphabet": "0123456789+"}, TASKS["sort"]())
    graded = completion(text)
    np.testing.assert_allclose(reward.function(graded), share, rtol=1e-6)
    behind = graded._replace(tokens=graded.tokens.at[graded.length :].set(CHARACTERS.id("a")))
    np.testing.assert_allclose(reward.function(behind), share, rtol=1e-6)  # what comes after the end is not read


def brevity(prompt: str, text: str, *, price: float = 1.0) -> float:
    assert prompt == "cab="
    return -price * len(text)


def test_a_function_of_ones_own_sees_padding_that_a_policy_wrote():
    """A price per character is paid for it, as the verifier sees it too."""
    task = TASKS["sort"](length=4)
    seen = []
    mine = make_reward("mine", lambda prompt, text: seen.append(text) or 0.0, task)
    for text in ("a<pad>b<eos>", "<pad><pad>", "<eos>"):
        mine.function(completion(text)).block_until_ready()
    host_callback.raise_failure()
    assert seen == ["a<pad>b", "<pad><pad>", ""]


def test_what_a_function_of_ones_own_raises_is_logged(monkeypatch, caplog):
    """Once: a loop of one's own may not ask for it, and finds NaN."""
    monkeypatch.setattr(host_callback._log, "disabled", False)
    host_callback.clear_failures()
    task = TASKS["sort"](length=4)
    for _ in range(2):
        assert np.isnan(make_reward("mine", {"function": broken}, task).function(completion("c<eos>")))
    (record,) = [x for x in caplog.records if x.name == host_callback.__name__]
    assert re.search(r"function broken .*ZeroDivisionError.*NaN from here on.*raise_failure", record.getMessage())
    host_callback.clear_failures()


def broken(prompt: str, text: str) -> Any:
    return {"ab": float("nan"), "abc": "much"}.get(text) or 1 / 0


def test_a_function_of_ones_own_sees_prompt_and_completion():
    task = TASKS["sort"](length=4)  # prompts of 5 tokens
    mine = make_reward("mine", {"function": brevity, "price": 0.5, "weight": 2.0}, task)
    assert make_reward("mine", brevity, task).weight == 1.0
    batch = jax.tree.map(lambda *x: jnp.stack(x), *(text_only(completion(t)) for t in ("abc<eos>", "a<eos>")))
    values = jax.jit(jax.vmap(lambda part: mine.function(with_text(part))))(batch)
    host_callback.raise_failure()
    np.testing.assert_array_equal(values, [-1.5, -0.5])
    for text, reason in {
        "ab<eos>": "returned nan",
        "abc<eos>": "returned 'much'",
        "c<eos>": "ZeroDivisionError",
    }.items():
        host_callback.clear_failures()
        assert np.isnan(make_reward("mine", {"function": broken}, task).function(completion(text)))
        with pytest.raises(UserError, match=f"The reward function broken .*{reason}.*'cab='"):
            host_callback.raise_failure()
    host_callback.clear_failures()


def text_only(graded: GradedCompletion) -> tuple:
    return graded.prompt, graded.tokens, graded.length


def with_text(part: tuple) -> GradedCompletion:
    return completion("<eos>")._replace(prompt=part[0], tokens=part[1], length=part[2])


SHOULD = {
    "no reward 'acuracy' of sort. Did you mean 'accuracy'": {"acuracy": {"weight": 1.0}},
    "weight of the reward format must be a finite number, not nan": {"format": {"weight": float("nan")}},
    "weight of the reward format must be a finite number, not 'much'": {"format": {"weight": "much"}},
    "standardize of the reward format must be batch or running": {"format": {"standardize": "group"}},
    "no setting 'alfabet' of the reward language of sort. Did you mean 'alphabet'": {"language": {"alfabet": "ab"}},
    "the reward language needs alphabet, a non-empty string": {"language": 1.0},
    "has a function and a model": {"mine": {"function": "a:b", "model": "reward_model"}},
    "loaded for a config alone": {"mine": {"model": "reward_model"}},
    "cannot be imported": {"mine": {"function": "no_such_module:f"}},
    "takes .*: missing a required argument": {"mine": {"function": lambda a, b, c: 0.0}},
    "must be a name, not 3": {"mine": {"function": 3}},
    "is logged by its name": {"my reward": {"function": "accuracy"}},
}


@pytest.mark.parametrize("sentence", SHOULD)
def test_entries_that_cannot_be_are_refused(sentence):
    with pytest.raises(UserError, match=sentence):
        text_env(TASKS["sort"](), rewards=SHOULD[sentence])


@pytest.mark.full
def test_an_entry_may_have_another_name_than_its_function():
    env = text_env(
        TASKS["sort"](),
        rewards={
            "letters": {"function": "language", "alphabet": "abc"},
            "digits": {"function": "language", "alphabet": "012"},
            "mine": Reward(lambda graded: graded.length.astype(jnp.float32), 0.25),
        },
    )
    outcome = tiny.jit(env.outcome)(spelled(env, "a1b<eos>"))
    parts = {name: float(x) for name, x in outcome.parts.items() if name.startswith("reward_")}
    assert parts == pytest.approx({"reward_letters": 2 / 3, "reward_digits": 1 / 3, "reward_mine": 4.0})
    assert float(outcome.reward) == pytest.approx(2.0)


# In a config.

LEARNED = {"rewards.accuracy": 1.0, "rewards.liked": {"model": "reward_model", "weight": 0.5, "standardize": "running"}}


def test_a_config_names_its_rewards_and_the_runs_that_they_come_from():
    config = resolve_config("summarise_toy", "rlhf", {**LEARNED, "reward": "none"})
    assert runs_named(config) == {"rewards.liked.model": "reward_model", "initial": "sft"}
    moved = with_run(with_run(config, "rewards.liked.model", "runs/m"), "initial", "runs/p")
    assert runs_named(moved) == {"rewards.liked.model": "runs/m", "initial": "runs/p"}
    assert moved.rewards["liked"]["weight"] == 0.5
    alone = resolve_config("summarise_toy", "rlhf")
    assert runs_named(alone) == {"reward": "reward_model", "initial": "sft"}
    assert alone.reward_models == {"reward": "reward_model"}


@pytest.mark.full
def test_rewards_of_a_config_are_built_with_the_models_that_it_names():
    config = resolve_config("summarise_toy", "rlhf", {**LEARNED, "reward": "none", "network.width": 8})
    shapes = jax.eval_shape(reward_network(config, envs.make("summarise_toy")).init, KEY)
    params = jax.tree.map(lambda x: jnp.ones(x.shape), shapes)
    env = build(config, models={"rewards.liked.model": params}).held_out
    only = build(resolve_config("summarise_toy", "rlhf", {"network.width": 8}), models={"reward": params}).held_out
    assert {name: term.standardize for name, term in env.reward_terms.items()} == {"accuracy": None, "liked": "running"}
    assert not only.reward_terms
    both, score = tiny.jit(lambda state: (env.outcome(state), only.outcome(state)))(spelled(env, "ab<eos>"))
    assert score.reward != 0
    np.testing.assert_allclose(both.parts["reward_liked"], score.reward, rtol=1e-6)
    np.testing.assert_allclose(both.reward, both.parts["accuracy"] + 0.5 * score.reward, rtol=1e-6)
    assert {"true_reward", "reward_accuracy"} <= both.parts.keys()


@pytest.mark.parametrize(
    ("task", "overrides", "sentence"),
    [
        ("sort", {"rewards.accuracy": 1.0, "reward": "runs/x"}, "rewards and reward are given, and rewards is the"),
        (
            "sort",
            {"rewards.accuracy": 1.0, "environment_settings.rewards.format": 1.0},
            "rewards and environment_settings.rewards are given",
        ),
        ("sort", {"rewards.liked.model": 3}, r"rewards\.liked\.model must be a string, not 3"),
        ("sort", {"rewards.format": float("inf")}, "rewards.format must be finite"),
        ("cartpole", {"rewards.accuracy": 1.0}, "CartPole-v1 is not a text task, so it takes no list of rewards"),
        ("sort", {"rewards.acuracy": 1.0}, "no reward 'acuracy' of sort"),
        ("sort", {"rewards.overlong": 1.0}, "needs an overlong_cache from 1"),
    ],
)
def test_lists_that_cannot_be_are_refused(task: str, overrides: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build(resolve_config(task, "grpo", overrides))


def test_a_list_with_a_penalty_has_its_cache_in_the_settings_of_the_environment():
    overrides = {"rewards.overlong": 1.0, "environment_settings.overlong_cache": 2}
    assert build(resolve_config("sort", "grpo", overrides)).env.outcome
    with pytest.raises(UserError, match="has no effect without the reward overlong"):
        build(resolve_config("sort", "grpo", {**overrides, "rewards.overlong": {"function": "length"}}))


def test_a_function_that_a_run_names_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+1=", "answer": "3"}\n')
    task = json_lines(tmp_path / "data.jsonl", held_out=0.0)
    with user_code.trust(lambda name: False), pytest.raises(UserError, match=re.escape("add --trust-code")):
        text_env(task, rewards={"mine": {"function": "os:system"}})


@pytest.mark.full
def test_dynamic_sampling_keeps_the_terms_of_the_episodes_that_it_keeps() -> None:
    """Groups are replaced together with the values of their rewards; the outcomes stay those of the first round."""
    rewards = {
        "format": 0.5,
        "language": {"weight": 2.0, "alphabet": "abcdefghijklmnop", "standardize": "running"},
    }
    env = envs.make("reverse", length=3, letters=5, rewards=rewards)
    logits = jnp.zeros(CHARACTERS.size).at[CHARACTERS.end].set(3.0)
    policy = Policy(
        lambda key: (),
        lambda params, prompt: (),
        lambda params, memory, obs: (Categorical(logits), memory),
        lambda params, rollout: Categorical(jnp.broadcast_to(logits, (*rollout.steps.mask.shape, len(logits)))),
    )
    keep = with_dynamic_sampling(episodic(num_envs=32, group_size=2), max_resample_rounds=4, gamma=1.0)
    _, kept, _ = tiny.jit(lambda key: keep.collect(env, policy, (), (), key))(KEY)
    terms = kept.episodes.reward_terms
    plain = 0.5 * terms["format"] + 2.0 * terms["language"]
    np.testing.assert_allclose(kept.steps.reward.sum(0), plain, rtol=1e-6)
    first = kept.episodes.outcome.parts["reward_language"]
    assert 0 < (np.asarray(first) != np.asarray(terms["language"])).sum() < 32
