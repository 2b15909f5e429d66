"""The steps of a completion against a slow reading of its text, their rewards, and what is refused."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import envs
from jaxpg.envs.text import CHARACTERS, PAD, TASKS
from jaxpg.envs.text.steps import check_scratchpad, scratchpad_steps
from jaxpg.envs.text.text_env import TextState
from jaxpg.errors import UserError
from jaxpg.models.distributions import Categorical
from jaxpg.rollout import make_actor
from jaxpg.rollout.episodes import episodic
from jaxpg.rollout.evaluation import evaluate
from jaxpg.types import Policy
from jaxpg.update.normalization import standardize_rewards

T = 24
PIECES = ["<think>", "</think>", "<answer>", "</answer>", "<eos>", " ", " ", "a", "b", "a", "b", "a b", "ab "]


def tokens_of(text):
    ids = CHARACTERS.encode(text, special_tokens=True)[:T]
    return jnp.array(ids + [7] * (T - len(ids)), jnp.int32), jnp.int32(len(ids))  # junk behind the end


def slow_steps(tokens, right, separator):
    """The tokens that end a step, each with whether the step is an item that `right` has in the same place."""
    symbols = [CHARACTERS.symbols[i] for i in tokens]
    expected = [] if not right else list(right) if separator is None else right.split(separator)
    found, item, number = {}, [], 0

    def end(t):
        nonlocal item, number
        found[t] = number < len(expected) and "".join(item) == expected[number]
        item, number = [], number + 1

    if symbols[0] == "<think>":
        for t, symbol in enumerate(symbols[1:], start=1):
            if symbol == "</think>":
                if separator is not None and t > 1:
                    end(t)
                break
            if separator is None:
                item = [symbol]
                end(t)
            elif symbol == separator:
                end(t)
            else:
                item.append(symbol)
    found.setdefault(len(symbols) - 1, False)
    return found


@pytest.mark.parametrize("separator", [None, " "])
def test_steps_are_those_of_a_slow_reading(separator):
    """Over random completions, most of them malformed; the junk behind their end is in no step."""
    rng = np.random.default_rng(0)
    token = None if separator is None else CHARACTERS.id(separator)
    ends_of = tiny.jit(jax.vmap(partial(scratchpad_steps, separator=token)))
    check = tiny.jit(jax.vmap(partial(check_scratchpad, separator=token)))
    texts, rights = [], []
    for _ in range(400):
        right = str(rng.choice(["ab", "", "a b ab", "b", "ab a"]))
        begin = rng.choice(["<think>", "", f"<think>{right} ", f"<think>{right}</think>"], p=[0.4, 0.1, 0.3, 0.2])
        texts.append(begin + "".join(rng.choice(PIECES, size=rng.integers(1, 8))))
        rights.append(right)
    tokens, length = (jnp.stack(x) for x in zip(*map(tokens_of, texts), strict=True))
    right_tokens = jnp.stack([jnp.pad(tokens_of(x)[0][: len(x)], (0, 8 - len(x))) for x in rights])
    ends, checked = ends_of(tokens, length), check(tokens, length, right_tokens)
    judged = 0
    for i, right in enumerate(rights):
        n = int(length[i])
        expected = slow_steps(np.asarray(tokens[i])[:n].tolist(), right, separator)
        assert set(np.flatnonzero(ends[i])) == expected.keys(), texts[i]
        for t in expected.keys() - {n - 1}:  # the last step is the answer, which verify judges
            assert bool(checked[i, t]) == expected[t], (texts[i], right, t)
            judged += expected[t]
    assert judged > 100


STEPPED = {
    "modular_chain": {"terms": 5, "modulus": 120},
    "parity": {"length": 8},
    "permutations": {"length": 4},
}


@pytest.mark.full
@pytest.mark.parametrize("name", STEPPED)
def test_every_step_of_a_demonstration_is_right_and_a_changed_one_is_not(name):
    task = TASKS[name](think=True, **STEPPED[name])

    def one(key):
        problem = task.draw(key)
        tokens = task.demonstration(problem, key)
        length = (tokens != PAD).sum()
        ends = task.step_ends(tokens, length)
        place = jax.random.randint(key, (), 1, jnp.argmax(tokens == CHARACTERS.id("</think>")))
        spoiled = tokens.at[place].set(CHARACTERS.id("z"))
        return (
            ends,
            length,
            task.check_steps(problem, tokens, length),
            task.check_steps(problem, spoiled, length),
            place,
        )

    ends, length, right, spoiled, place = tiny.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 64))
    before_answer = ends & (jnp.arange(ends.shape[1])[None] != length[:, None] - 1)
    assert before_answer.sum(1).min() >= 1
    assert len(set(np.asarray(before_answer.sum(1)).tolist())) > 1  # ragged
    np.testing.assert_array_equal(right == 1, before_answer)
    for i in range(64):  # the item that was spoiled, and with a spoiled separator the one behind it
        changed = np.flatnonzero(np.asarray(right[i] != spoiled[i]))
        assert changed.size >= 1
        assert changed.min() >= int(place[i])


def spelled(env, text):
    """The state of the first problem of an environment after this completion."""
    ids = CHARACTERS.encode(text, special_tokens=True)
    state, _ = tiny.jit(env.reset)(jax.random.key(0))
    return TextState(
        state.problem, jnp.zeros(env.time_limit, jnp.int32).at[: len(ids)].set(jnp.array(ids)), jnp.int32(len(ids))
    )


@pytest.mark.full
def test_rewards_stand_where_steps_end_and_the_answer_keeps_its_own():
    settings = {"terms": 3, "min_terms": 3, "think": True, "rewards": {"accuracy": 2.0}}
    env = envs.make("modular_chain", process_weight=0.5, **settings)
    state, _ = tiny.jit(env.reset)(jax.random.key(0))
    judge = tiny.jit(env.outcome)
    task = TASKS["modular_chain"](terms=3, min_terms=3, think=True)
    text = CHARACTERS.decode(np.asarray(tiny.jit(task.demonstration)(state.problem, jax.random.key(0))))
    first, second, answer = text[7], text[8], text[-len("</answer>") - 1]
    wrong = "1" if first == "0" else "0"
    outcome = judge(spelled(env, f"<think>{wrong}{second}</think><answer>{answer}</answer><eos>"))
    np.testing.assert_array_equal(np.flatnonzero(outcome.step_rewards.end), [1, 2, 7])
    np.testing.assert_array_equal(np.flatnonzero(outcome.step_rewards.reward), [2])
    assert (outcome.step_rewards.reward[2], outcome.reward, outcome.total()) == (0.5, 2.0, 2.5)
    assert (outcome.parts["reward_process"], outcome.parts["reasoning_steps"]) == (0.5, 2)
    empty = judge(spelled(env, f"<think></think><answer>{answer}</answer><eos>"))
    np.testing.assert_array_equal(np.flatnonzero(empty.step_rewards.end), [5])
    assert (empty.parts["reward_process"], empty.parts["reasoning_steps"], empty.total()) == (0, 0, 2)
    assert jax.eval_shape(envs.make("modular_chain", **settings).outcome, state).step_rewards == ()


def babbler():
    """A policy that writes tags, bits and ends, whatever came before."""
    likely = [CHARACTERS.id(symbol) for symbol in ("</think>", "<eos>", "0", "1", "<think>")]
    written = jnp.full(CHARACTERS.size, -30.0).at[jnp.array(likely)].set(jnp.array([-1.0, -1.0, 0.0, 0.0, -1.0]))
    first = jnp.zeros(CHARACTERS.size).at[CHARACTERS.id("<think>")].set(6.0)
    is_first = jnp.arange(CHARACTERS.size) == CHARACTERS.id("=")
    table = jnp.where(is_first[:, None], first[None], written[None])
    return Policy(
        init=lambda key: table,
        start=lambda params, prompt: (),
        act=lambda params, memory, obs: (Categorical(params[obs]), memory),
        evaluate=lambda params, rollout: Categorical(params[rollout.steps.obs]),
        evaluates_from_context=True,
    )


@pytest.mark.full
def test_rollouts_and_evaluation_have_the_rewards_of_steps():
    rewards = {"accuracy": 1.0, "length": {"weight": 0.5, "standardize": "batch"}}
    settings = {"length": 6, "think": True, "max_tokens": 9}
    env, policy = envs.make("parity", rewards=rewards, process_weight=0.5, **settings), babbler()
    table = policy.init(None)
    collect = tiny.jit(partial(episodic(num_envs=64).collect, env, policy, table, ()))
    _, part, stats = collect(jax.random.key(0))
    steps, outcome = part.steps, part.episodes.outcome
    lengths = np.asarray(steps.mask.sum(0), int)
    assert len(set(lengths.tolist())) > 3
    judged = 0
    for b, n in enumerate(lengths):
        prompt = CHARACTERS.decode(np.asarray(part.episodes.context.tokens[b]))[:-1]
        right = "".join(str(prompt[: i + 1].count("1") % 2) for i in range(len(prompt)))
        found = slow_steps(np.asarray(steps.action[:n, b]).tolist(), right, None)
        np.testing.assert_array_equal(np.flatnonzero(steps.step_end[:, b]), sorted(found))
        expected = [0.5 * found.get(t, False) for t in range(n - 1)]
        np.testing.assert_array_equal(steps.reward[: n - 1, b], expected)
        assert steps.reward[n - 1, b] == outcome.reward[b]
        judged += sum(expected) > 0
    assert judged > 10
    np.testing.assert_allclose(stats.return_sum, outcome.total().sum(), rtol=1e-6)

    learned, _, _ = standardize_rewards(env.reward_terms, part, {})  # of the answer, where steps keep their own
    answers, length = (lengths - 1, np.arange(64)), np.asarray(outcome.parts["reward_length"])
    standardized = outcome.parts["accuracy"] + 0.5 * (length - length.mean()) / length.std()
    np.testing.assert_allclose(learned.steps.reward[answers], standardized, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(*(x.at[answers].set(0) for x in (learned.steps.reward, steps.reward)))

    actor = make_actor(policy, table)
    one = jax.vmap(lambda key: evaluate(env, actor, key, episodes=1, greedy=False))
    result = tiny.jit(one)(jax.random.split(jax.random.key(0), 64))
    by_steps = 0.5 * result.metrics["reward_process"] * result.metrics["reasoning_steps"]
    by_answer = result.metrics["accuracy"] + 0.5 * result.metrics["reward_length"]
    np.testing.assert_allclose(result.returns[:, 0], by_answer + by_steps, atol=1e-6)
    assert by_steps.max() > 0


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("parity", {"process_weight": 1.0}, "completions have no steps.* set think = true"),
        ("reverse", {"process_weight": 1.0, "think": True}, "completions have no steps"),
        ("countdown", {"process_weight": 1.0, "think": True}, "countdown cannot check the steps.*process_reward"),
        ("parity", {"process_weight": float("nan"), "think": True}, r"weight of a step \(process_weight\) must be a"),
        (
            "parity",
            {"process_weight": 1.0, "think": True, "rewards": {"process": {"function": "format"}}},
            "process is the name under which the rewards of steps are logged",
        ),
    ],
)
def test_steps_that_nothing_can_judge_are_refused(name, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        envs.make(name, **settings)
