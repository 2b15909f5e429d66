"""Text tasks as environments: a completion walked through in Python, and whole batches as they are collected."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import envs, rollout
from jaxpg.envs.text import CHARACTERS, END, PAD, REWARDS, TASKS, Task, TextState, Verdict, Vocabulary, text_env
from jaxpg.errors import UserError
from jaxpg.models.distributions import Categorical
from jaxpg.rollout.episodes import episodic
from jaxpg.rollout.evaluation import evaluate
from jaxpg.types import Actor, Discrete, Policy, Prompt

WORDS = Vocabulary(("<pad>", "<eos>", "a", "b", "c", "?"))
P, T = 4, 5
POISON = 1000


def copying() -> Task:
    """Say "a" or "b" as often as asked, which is one to three times; "c" has not even the form."""

    def prompt(problem):
        letter, times = problem
        place = jnp.arange(P)
        return jnp.where(place < times, letter, jnp.where(place == times, WORDS.id("?"), PAD)).astype(jnp.int32)

    def verify(problem, completion, length):
        letter, times = problem
        place = jnp.arange(T)
        written = jnp.where(place < length, completion, POISON)
        wanted = jnp.where(place < times, letter, jnp.where(place == times, END, POISON))
        formed = ~(written == WORDS.id("c")).any()
        fingerprint = jnp.where(place < length, completion * 10**place, 0).sum()
        return Verdict(
            (written == wanted).all().astype(jnp.float32),
            formed.astype(jnp.float32),
            jnp.where(formed, fingerprint, -1).astype(jnp.int32),
        )

    def draw(key):
        letter_key, times_key = jax.random.split(key)
        return jax.random.randint(letter_key, (), 2, 4), jax.random.randint(times_key, (), 1, 4)

    def demonstration(problem, key):
        return jnp.where(prompt(problem) == WORDS.id("?"), END, prompt(problem))

    return Task("copying", WORDS, P, T, draw, prompt, demonstration, verify, lambda prompts: [False] * len(prompts))


def walk(env, problem, text, ids):
    """One completion by hand: what the environment answered to each token, and its outcome at the end."""
    state, _ = env.reset(jax.random.key(0))
    state = state._replace(problem=problem)
    steps = []
    for action in ids:
        state, timestep = env.step(jax.random.key(1), state, jnp.int32(action))
        steps.append(timestep)
        if timestep.last:
            break
    assert WORDS.decode(np.asarray(state.tokens[: state.length])) == text
    return steps, env.outcome(state)


A, B, C = (WORDS.id(symbol) for symbol in "abc")
EVERYTHING = {"accuracy": 2.0, "format": 0.5, "length": 0.25, "overlong": 3.0}
# problem, what is written -> length, accuracy, format, whether it was cut off, overlong (with a cache of two tokens)
WALKS = {
    "right": ((A, 2), [A, A, END], 3, 1, 1, 0, 0),
    "wrong": ((A, 2), [A, END], 2, 0, 1, 0, 0),
    "wrong letter": ((B, 1), [A, END, B], 2, 0, 1, 0, 0),
    "no form": ((B, 1), [C, END], 2, 0, 0, 0, 0),
    "nothing": ((A, 1), [END, A], 1, 0, 1, 0, 0),
    "ends late": ((A, 3), [A, A, A, END], 4, 1, 1, 0, -0.5),
    "ends with the last token": ((A, 3), [A, A, A, A, END], 5, 0, 1, 0, -1),
    "cut off": ((A, 3), [A, A, A, A, A, END], 5, 0, 1, 1, -1),
}


@pytest.mark.parametrize("name", WALKS)
def test_a_completion_step_by_step(name):
    problem, ids, length, accuracy, form, truncated, overlong = WALKS[name]
    env = text_env(copying(), rewards=EVERYTHING, overlong_cache=2)
    written = ids[:length]
    steps, outcome = walk(env, problem, WORDS.decode(written), ids)
    assert len(steps) == length
    np.testing.assert_array_equal([s.obs for s in steps], written)
    np.testing.assert_array_equal([s.reward for s in steps], 0.0)
    np.testing.assert_array_equal([s.last for s in steps], [False] * (length - 1) + [True])
    np.testing.assert_array_equal([s.discount for s in steps], [1.0] * (length - 1) + [float(truncated)])
    parts = {
        "reward_accuracy": accuracy,
        "reward_format": form,
        "reward_length": -length / T,
        "reward_overlong": overlong,
        "weighted_accuracy": 2 * accuracy,
        "weighted_format": 0.5 * form,
        "weighted_length": -0.25 * length / T,
        "weighted_overlong": 3 * overlong,
        "accuracy": accuracy,
        "format": form,
        "truncated": truncated,
    }
    assert outcome.parts.keys() == parts.keys()
    for part, value in parts.items():
        assert outcome.parts[part].dtype == jnp.float32
        np.testing.assert_allclose(outcome.parts[part], value, rtol=1e-6, err_msg=part)
    np.testing.assert_allclose(
        outcome.reward, 2 * accuracy + 0.5 * form - 0.25 * length / T + 3 * overlong, rtol=1e-6, atol=1e-6
    )
    answer = sum(token * 10**place for place, token in enumerate(written)) if form else -1
    assert (outcome.answer, outcome.answer.dtype) == (answer, jnp.int32)


def test_what_is_shown_is_the_prompt():
    env = text_env(copying())
    for seed in range(20):
        state, obs = env.reset(jax.random.key(seed))
        letter, times = (int(x) for x in state.problem)
        shown = env.context(state)
        assert isinstance(shown, Prompt)
        np.testing.assert_array_equal(shown.tokens, ([letter] * times + [WORDS.id("?")] + [PAD] * P)[:P])
        np.testing.assert_array_equal(shown.mask, np.arange(P) <= times)
        assert (obs, obs.dtype, obs.shape) == (WORDS.id("?"), jnp.int32, ())
        np.testing.assert_array_equal(state.tokens, [PAD] * T)
        after, _ = env.step(jax.random.key(0), state, jnp.int32(A))
        np.testing.assert_array_equal(env.context(after).tokens, shown.tokens)  # it does not change on the way


def test_only_the_rewards_asked_for_are_paid_and_listed():
    env = text_env(copying())
    _, outcome = walk(env, (A, 1), "c", [C, END])
    assert outcome.parts.keys() == {"reward_accuracy", "accuracy", "format", "truncated"}
    assert outcome.reward == 0
    _, outcome = walk(text_env(copying(), rewards={"format": -1, "length": 1.0}), (A, 1), "a", [A, END])
    several = {f"{kind}_{name}" for kind in ("reward", "weighted") for name in ("format", "length")}
    assert outcome.parts.keys() == several | {"accuracy", "format", "truncated"}
    np.testing.assert_allclose(outcome.reward, -1 - 2 / T, rtol=1e-6)
    assert outcome.parts["accuracy"] == 1


def test_weights_may_differ_between_runs_side_by_side():
    def reward(weight):
        env = text_env(copying(), rewards={"accuracy": weight})
        return walk_array(env, (A, 1), [A, END])

    np.testing.assert_array_equal(jax.vmap(reward)(jnp.array([1.0, 0.5, 0.0])), [1.0, 0.5, 0.0])


def walk_array(env, problem, ids):
    state, _ = env.reset(jax.random.key(0))
    state = state._replace(problem=problem)
    for action in ids:
        state, _ = env.step(jax.random.key(1), state, jnp.int32(action))
    return env.outcome(state).reward


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rewards": {"acuracy": 1.0}}, "no reward 'acuracy' of copying. Did you mean 'accuracy'"),
        (
            {"rewards": {"style": 1.0}},
            "no reward 'style' of copying. There are: accuracy, format, language, length",
        ),
        ({"rewards": {}}, "copying needs a reward. There are: accuracy"),
        ({"rewards": {"accuracy": "high"}}, "weight of the reward accuracy must be a finite number, not 'high'"),
        ({"rewards": {"accuracy": True}}, "must be a finite number, not True"),
        ({"rewards": {"format": float("nan")}}, "reward format must be a finite number, not nan"),
        ({"rewards": {"overlong": 1.0}}, "from 1 to max_tokens = 5, not 0"),
        ({"rewards": {"overlong": 1.0}, "overlong_cache": 6}, "from 1 to max_tokens = 5, not 6"),
        ({"overlong_cache": 2}, "overlong_cache = 2 has no effect without the reward overlong"),
    ],
)
def test_rewards_that_cannot_be_are_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        text_env(copying(), **settings)


def guessing() -> Policy:
    """Any token, but most likely the first of the prompt or the end; remembers that first token."""

    def act(params, letter, obs):
        return Categorical(jax.nn.one_hot(letter, 6) * 3 + jax.nn.one_hot(END, 6) * 2), letter

    def evaluate(params, rollout):
        raise AssertionError("collecting evaluates nothing")

    return Policy(lambda key: (), lambda params, prompt: prompt.tokens[0], act, evaluate)


@pytest.fixture(scope="module")
def collected():
    env = text_env(copying(), rewards={"accuracy": 1.0, "length": 0.1, "format": 1.0})
    collector = episodic(num_envs=64, group_size=4)
    collect = partial(collector.collect, env, guessing(), (), ())
    return env, *tiny.jit(collect)(jax.random.key(3))[1:]


def test_a_batch_is_verified_completion_by_completion(collected):
    """Every column against the task's own verifier, called on the tokens that were sampled."""
    _, rollout, stats = collected
    steps = rollout.steps
    lengths = np.asarray(steps.mask.sum(0)).astype(int)
    assert len(set(lengths.tolist())) == T  # short, long and cut off
    cut = 0
    for column, length in enumerate(lengths):
        tokens = np.asarray(steps.action[:length, column])
        prompt = [int(i) for i in rollout.episodes.context.tokens[column] if i != PAD]
        problem = prompt[0], len(prompt) - 1
        padded = np.concatenate([tokens, np.full(T - length, POISON)])
        verdict = copying().verify(problem, jnp.asarray(padded), length)
        reward = verdict.accuracy - 0.1 * length / T + verdict.format
        np.testing.assert_allclose(rollout.episodes.outcome.reward[column], reward, rtol=1e-6)
        np.testing.assert_allclose(steps.reward[:, column].sum(), reward, rtol=1e-6)
        assert rollout.episodes.outcome.answer[column] == verdict.answer
        ended = tokens[-1] == END
        assert not (tokens[:-1] == END).any()
        assert ended or length == T
        assert steps.discount[length - 1, column] == float(not ended)
        assert rollout.episodes.outcome.parts["truncated"][column] == float(not ended)
        np.testing.assert_array_equal(steps.obs[:length, column], [prompt[-1], *tokens[:-1]])
        cut += not ended
    assert 0 < cut < 64
    assert stats.steps == lengths.sum()
    groups = np.asarray(rollout.episodes.context.tokens).reshape(16, 4, P)
    np.testing.assert_array_equal(groups, np.broadcast_to(groups[:, :1], groups.shape))
    assert len({row.tobytes() for row in groups[:, 0]}) > 3


def test_the_batch_is_measured(collected):
    env, rollout, _ = collected
    metrics = env.measure(rollout.episodes.outcome, rollout.episodes.length, 4)
    assert metrics["length_max"] == T
    assert 0 < metrics["correct"] < 64
    assert metrics["correct"] == rollout.episodes.outcome.parts["accuracy"].sum()
    np.testing.assert_allclose(metrics["pass@1"], metrics["correct"] / 64, rtol=1e-6)
    assert {
        "pass@2",
        "pass@4",
        "cons@4",
        "frac_zero_std",
        "reward_std",
        "length_correct",
        "length_incorrect",
    } < metrics.keys()


def test_an_evaluation_sees_the_same_outcomes():
    """A policy that repeats the letter of the prompt and never ends is cut off, and wrong, every time."""
    env = text_env(copying())
    actor = Actor(start=lambda prompt: prompt.tokens[0], act=lambda memory, obs, key, greedy: (memory, memory))
    result = tiny.jit(partial(evaluate, env, actor, episodes=8, greedy=False))(jax.random.key(0))
    np.testing.assert_array_equal(result.lengths, T)
    np.testing.assert_array_equal(result.returns, 0)
    assert (result.metrics["truncated"], result.metrics["accuracy"], result.metrics["incorrect"]) == (1, 0, 8)


# By name.


def demonstrated(env, task, key):
    """The outcome of writing the demonstration of a problem, and the problem."""
    reset_key, key = jax.random.split(key)
    state, _ = env.reset(reset_key)
    tokens = task.demonstration(state.problem, key)

    def step(state, token):
        moved, timestep = env.step(key, state, token)
        over = state.tokens[state.length - 1] == END
        return jax.tree.map(lambda new, old: jnp.where(over & (state.length > 0), old, new), moved, state), timestep

    state, _ = jax.lax.scan(step, state, tokens)
    return env.outcome(state), env.context(state)


@pytest.mark.parametrize("name", [name for name in TASKS if name != "summarise_toy"])  # its writer errs
def test_every_task_is_made_by_name_and_pays_for_its_demonstrations(name):
    rewards = {"accuracy": 1.0, "format": 0.1}
    env = envs.make(name, rewards=rewards)
    task = TASKS[name]()
    assert (env.name, env.time_limit) == (name, task.max_tokens)
    assert env.observation_space == env.action_space == Discrete(CHARACTERS.size)
    keys = jax.random.split(jax.random.key(0), 4)
    outcome, prompt = tiny.jit(jax.vmap(partial(demonstrated, env, task)))(keys)
    np.testing.assert_allclose(outcome.reward, 1.1, rtol=1e-6)
    assert (outcome.answer >= 0).all()
    assert prompt.tokens.shape == (4, task.prompt_length)


def test_settings_of_the_task_and_of_its_rewards_go_together():
    settings = envs.default_settings("addition")
    assert settings["rewards"] == {"accuracy": 1.0}
    assert {"digits", "split", "think", "max_tokens", "overlong_cache"} < settings.keys()
    assert envs.make("addition", digits=2, max_tokens=9).time_limit == 9
    env = envs.make("addition", digits=2, max_tokens=8, rewards={"overlong": 1}, overlong_cache=4)
    state, _ = env.reset(jax.random.key(0))
    for _ in range(6):
        state, _ = env.step(jax.random.key(0), state, jnp.int32(CHARACTERS.id("1")))
    assert env.outcome(state).reward == -0.5
    assert set(REWARDS) == {"accuracy", "format", "length", "overlong", "language"}


def test_states_have_one_type_so_that_loops_compile_once():
    for name in TASKS:
        env = envs.make(name)
        key = jax.random.key(0)
        state, obs = jax.eval_shape(env.reset, key)
        after, timestep = jax.eval_shape(env.step, key, state, obs)
        assert after == state
        assert timestep.obs == obs


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("addition", {"digit": 2}, "no setting 'digit'. Did you mean 'digits'"),
        ("addition", {"reward": {}}, "Did you mean 'rewards'"),
        ("addition", {"rewards": ["accuracy"]}, "rewards must be like its default {'accuracy': 1.0}"),
        ("addition", {"rewards": {"speed": 1}}, "no reward 'speed' of addition"),
        ("additon", {}, "Did you mean 'addition'"),
        ("json_lines", {}, "json_lines needs a value for path"),
        ("json_lines", {"path": "no/such.jsonl"}, "no/such.jsonl cannot be read: No such file"),
    ],
)
def test_bad_names_and_settings_are_refused(name, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        envs.make(name, **settings)


def test_what_is_measured_under_dynamic_sampling_is_what_was_drawn_first():
    """Refilling chooses groups with signal: measured on these, the policy would look as if none were without."""
    env = text_env(copying())
    plain = episodic(num_envs=32, group_size=2)
    first = plain._replace(collect=lambda *a: plain.collect(*a[:-1], jax.random.fold_in(a[-1], 0)))
    chosen = rollout.with_dynamic_sampling(plain, max_resample_rounds=3, gamma=1.0)
    (_, drawn, _), (_, batch, _) = (
        tiny.jit(partial(c.collect, env, guessing(), (), ()))(jax.random.key(3)) for c in (first, chosen)
    )
    assert not np.array_equal(drawn.steps.action, batch.steps.action)
    for name in ("outcome", "length"):
        expected = getattr(drawn.episodes, name)
        jax.tree.map(np.testing.assert_array_equal, getattr(batch.episodes, name), expected)


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("<think>01</think><answer>1</answer><eos>", 1),
        ("<think></think><answer>1</answer><eos>", 0),
        ("1<eos>", 0),
        ("<think>", 0),
    ],
)
def test_a_scratchpad_counts_if_something_is_in_it(text, used):
    env = envs.make("parity", length=8, think=True)
    tokens = jnp.asarray(CHARACTERS.encode(text, special_tokens=True), jnp.int32)
    state, _ = env.reset(jax.random.key(0))
    padded = jnp.full(env.time_limit, PAD, jnp.int32).at[: len(tokens)].set(tokens)
    outcome = env.outcome(TextState(state.problem, padded, jnp.int32(len(tokens))))
    assert outcome.parts["scratchpad_used"] == used
    bare = envs.make("parity", length=8)
    outcome = jax.eval_shape(lambda key: bare.outcome(bare.reset(key)[0]), jax.random.key(0))
    assert "scratchpad_used" not in outcome.parts
