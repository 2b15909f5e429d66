"""The toy summary: its true reward against a slow reading of strings, its writer, and learning from a model of it."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import ladder
from jaxpg.envs.text import CHARACTERS
from jaxpg.envs.text.summarise import Text, summarise_toy, true_reward
from jaxpg.envs.text.text_env import text_env
from jaxpg.errors import UserError
from jaxpg.models.language_model import RewardModel, transformer
from jaxpg.policy_gradient import policy_gradient
from jaxpg.preferences import rlhf_env

T = 12
IMPORTANT = set("abcdefgh")


def tokens(text):
    return jnp.array(CHARACTERS.encode(text), jnp.int32)


def completion(summary, junk):
    """Tokens [T] of a summary with its end, or cut off, and junk behind it; and their number."""
    ids = [*CHARACTERS.encode(summary), CHARACTERS.end][:T]
    return jnp.array(ids + CHARACTERS.encode(junk * T, special_tokens=True)[: T - len(ids)], jnp.int32), jnp.int32(
        len(ids)
    )


def slow_reward(text, summary):
    important = IMPORTANT & set(text)
    covered = len(important & set(summary)) / len(important)
    foreign = sum(letter not in text for letter in summary)
    return covered - (0.7 * len(summary) + 0.3 * foreign) / T


@pytest.mark.parametrize(
    ("text", "summary", "perfect"),
    [
        ("xacxaubs", "acb", True),
        ("xacxaubs", "cab", False),
        ("xacxaubs", "", False),
        ("xacxaubs", "acbb", False),
        ("xacxaubs", "acbx", False),
        ("xacxaubs", "dht", False),
        ("xacxaubs", "ab", False),
        ("zzzzzzza", "a", True),
        ("abcdefgh", "abcdefgh", True),
        ("xacxaubs", "acbacbacbacb", False),
        ("xacxaubs", "dddddddddddd", False),
    ],
)
def test_what_a_summary_is_worth(text, summary, perfect):
    task, problem = summarise_toy(length=8, max_tokens=T), Text(tokens(text))
    for junk in ("acb", "z<eos>", "<pad>"):
        written, length = completion(summary, junk)
        np.testing.assert_allclose(true_reward(problem, written, length), slow_reward(text, summary), atol=1e-6)
        assert task.verify(problem, written, length).accuracy == perfect
    assert CHARACTERS.decode(np.asarray(task.prompt_tokens(problem)).tolist()) == text + "="
    assert -1 <= slow_reward(text, summary) <= 1


def drawn(task, n=512):
    def one(key):
        draw_key, write_key = jax.random.split(key)
        problem = task.draw(draw_key)
        return problem.letters, task.demonstration(problem, write_key)

    letters, written = tiny.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), n))
    return [
        (CHARACTERS.decode(text), CHARACTERS.decode(summary))
        for text, summary in zip(np.asarray(letters).tolist(), np.asarray(written).tolist(), strict=True)
    ]


def test_a_perfect_writer_takes_every_important_letter_once():
    for text, summary in drawn(summarise_toy(drop=0.0, extra=0.0, slip=0.0)):
        assert summary == "".join(dict.fromkeys(letter for letter in text if letter in IMPORTANT))
        assert summary


def test_an_imperfect_writer_errs_at_the_given_rates():
    samples = drawn(summarise_toy(drop=0.3, extra=0.1, slip=0.0), 2000)
    kept = Counter()
    for text, summary in samples:
        assert set(summary) <= set(text)
        assert all(n == 1 for letter, n in Counter(summary).items() if letter in IMPORTANT)
        for letter, times in Counter(text).items():
            kind = "important" if letter in IMPORTANT else "filler"
            kept[kind] += summary.count(letter)
            kept[kind + " there"] += 1 if letter in IMPORTANT else times
    assert abs(kept["important"] / kept["important there"] - 0.7) < 0.03
    assert abs(kept["filler"] / kept["filler there"] - 0.1) < 0.02
    assert any(set(summary) - set(text) for text, summary in drawn(summarise_toy(slip=0.2)))


def test_among_the_demonstrations_longer_is_better_and_beyond_them_it_is_not():
    """What a reward model can be fooled by."""
    samples = drawn(summarise_toy(max_tokens=T))
    worth = [slow_reward(text, summary) for text, summary in samples]
    assert np.corrcoef([len(summary) for _, summary in samples], worth)[0, 1] > 0.3
    endless = [slow_reward(text, (text * T)[:T]) for text, _ in samples]
    assert np.mean(endless) < np.mean(worth) - 0.1


def test_settings_out_of_range_are_refused():
    with pytest.raises(UserError, match="summarise_toy needs a length of at least 3"):
        summarise_toy(length=2)
    with pytest.raises(UserError, match=r"from 0 to 1, not 10, 1\.2"):
        summarise_toy(drop=1.2)
    with pytest.raises(UserError, match="max_tokens = 5 is too few"):
        summarise_toy(max_tokens=5)


def loves(letter):
    """A reward model: the number of times that a letter occurs, times its parameter."""

    def token_scores(params, rollout):
        return params * ((rollout.steps.action == CHARACTERS.id(letter)) * rollout.steps.mask).cumsum(0)

    return RewardModel(
        lambda key: jnp.ones(()), lambda params, rollout: token_scores(params, rollout)[-1], token_scores
    )


@pytest.mark.parametrize(("summary", "paid", "right"), [("abb", 4.0, 0), ("acb", 2.0, 1)])
def test_what_is_paid_is_what_the_reward_model_says(summary, paid, right):
    task = summarise_toy(length=8, max_tokens=T)
    env = rlhf_env(task, loves("b"), jnp.float32(2.0))
    text = "xacxaubs"
    state = env.reset(jax.random.key(0))[0]._replace(problem=Text(tokens(text)))
    for letter in [*tokens(summary).tolist(), CHARACTERS.end]:
        state, timestep = env.step(jax.random.key(1), state, jnp.int32(letter))
        assert timestep.reward == 0
    outcome = env.outcome(state)
    assert timestep.last
    assert outcome.reward == paid
    np.testing.assert_allclose(outcome.parts["true_reward"], slow_reward(text, summary), atol=1e-6)
    assert outcome.parts["accuracy"] == right
    assert outcome.parts["reward_score"] == paid
    assert outcome.parts.keys() == {"true_reward", "reward_score", "accuracy", "format", "truncated"}
    assert outcome.answer == text_env(task).outcome(state).answer


def test_an_algorithm_of_the_ladder_learns_from_a_reward_model():
    """One iteration: what it logs as the return is the score, and the true reward stands beside it."""
    task = summarise_toy(length=4, max_tokens=6)
    env = rlhf_env(task, loves("b"), jnp.float32(2.0))
    policy, critic = transformer(env, width=8, layers=1, heads=2)
    learner = policy_gradient(env, policy, critic, ladder.grpo(num_envs=8, group_size=4, kl="reward_k1"))
    state = tiny.jit(learner.init)(jax.random.key(0))
    _, metrics = tiny.jit(learner.step)(state, jax.random.key(1))
    assert metrics["return"] != 0
    np.testing.assert_allclose(metrics["return"], metrics["reward_score"], rtol=1e-5)
    assert -1 <= metrics["true_reward"] < 0.5
    assert np.isfinite(metrics["true_reward"])
