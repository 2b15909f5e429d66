"""Fine-tuning, reward models and DPO: their steps against slow loops, on devices, from pairs; and that they learn."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_parallel import by_shard_map, distance, on_one

from jaxpg import envs
from jaxpg.envs.text import PAD, PairData, Task, Verdict
from jaxpg.envs.text.problems import reverse
from jaxpg.envs.text.text_env import text_env
from jaxpg.errors import UserError
from jaxpg.experiments import signatures
from jaxpg.models.distributions import Categorical
from jaxpg.models.generation import completion_rollout, evaluate_completions
from jaxpg.models.language_model import RewardModel, transformer, transformer_reward_model
from jaxpg.models.networks import recurrent
from jaxpg.parallel import collectives
from jaxpg.preferences import (
    DPOSettings,
    LabelledCompletion,
    Pairs,
    PreferencePair,
    StepLabels,
    corrupted_demonstrations,
    dpo,
    held_out_accuracy,
    held_out_preferences,
    judged_pairs,
    make_pairs,
    process_reward_model,
    reward_model,
    sft,
    stored_pairs,
)
from jaxpg.rollout.collector import env_keys
from jaxpg.training import checkpoint
from jaxpg.types import Policy, Prompt
from jaxpg.update import optimizers

V, P, T = 7, 3, 5
KEY = jax.random.key(3)
BATCH = 8


class Letters(NamedTuple):
    size: int
    end: int


def words(end=1, unique=False):
    """Completions of 1 to T tokens behind prompts of 1 to P; what lies behind the end is junk, not padding.

    With `unique`, a prompt is a number that is hardly ever drawn twice.
    """

    def draw(key):
        if unique:
            return jax.random.randint(key, (P,), 2, 2**30)
        length_key, key = jax.random.split(key)
        tokens = jax.random.randint(key, (P,), 2, V)
        return jnp.where(jnp.arange(P) < jax.random.randint(length_key, (), 1, P + 1), tokens, PAD)

    def demonstration(problem, key):
        length_key, key = jax.random.split(key)
        tokens = jax.random.randint(key, (T,), 2, V)
        # One in T + 1 has no end at all.
        return jnp.where(jnp.arange(T) == jax.random.randint(length_key, (), 0, T + 1), end, tokens)

    def verify(problem, completion, length):
        return Verdict(jnp.ones(()), jnp.ones(()), jnp.zeros((), jnp.int32))

    return Task("words", Letters(V, end), P, T, draw, lambda problem: problem, demonstration, verify, lambda texts: [])


def table():
    """A policy that goes by the last token alone."""
    return Policy(
        init=lambda key: jax.random.normal(key, (V, V)),
        start=lambda params, first: (),
        act=lambda params, memory, obs: (Categorical(params[obs]), memory),
        evaluate=lambda params, rollout: Categorical(params[rollout.steps.obs]),
    )


def counting():
    """A reward model: the tanh of the sum of a worth per token, of all tokens or of those so far."""

    def token_scores(params, rollout):
        steps = rollout.steps
        return jnp.tanh(jnp.cumsum(params[steps.action] * steps.mask, 0))

    def score(params, rollout):
        steps = rollout.steps
        return jnp.tanh((params[steps.action] * steps.mask).sum(0))

    return RewardModel(lambda key: jax.random.normal(key, (V,)), score, token_scores)


def length(problem, completion, length):
    """A true reward."""
    return length / T


def word_pairs(end=1, unique=False):
    """The pairs of `words`, longer ones preferred."""
    task = words(end, unique)
    return judged_pairs(task, task, length, sharpness=2.0)


def word_steps(end=1, unique=False):
    """The completions of `words`, in which half of the tokens up to the end, and the last, end steps of any worth."""
    task = words(end, unique)

    def draw(_, key):
        problem_key, write_key, end_key, label_key = jax.random.split(key, 4)
        problem = task.draw(problem_key)
        tokens = task.demonstration(problem, write_key)
        last = jnp.where((tokens == end).any(), jnp.argmax(tokens == end), T - 1)
        ends = jax.random.bernoulli(end_key, 0.5, (T,)) | (jnp.arange(T) == last)
        return LabelledCompletion(
            task.prompt(problem), tokens, jnp.where(ends, jax.random.uniform(label_key, (T,)), -1)
        )

    return StepLabels(draw, draw, end)


LEARNERS = {
    "sft": lambda unique=False, **settings: sft(words(unique=unique), table(), **settings),
    "reward_model": lambda unique=False, **settings: reward_model(
        word_pairs(unique=unique), counting(), margin=0.2, centring=0.1, **settings
    ),
    "process_reward_model": lambda unique=False, **settings: process_reward_model(
        word_steps(unique=unique), counting(), **settings
    ),
    "dpo": lambda unique=False, **settings: dpo(word_pairs(unique=unique), table(), beta=0.5, **settings),
    "ipo": lambda unique=False, **settings: dpo(
        word_pairs(unique=unique), table(), loss="ipo", beta=0.5, label_smoothing=0.1, **settings
    ),
}


def make(name, **settings):
    return LEARNERS[name](**{"batch_size": BATCH, "learning_rate": 0.1} | settings)


@pytest.fixture
def plain_descent(monkeypatch):
    """Adam would hide a gradient that is wrong by a factor."""
    monkeypatch.setattr(optimizers, "adam", optimizers.sgd)


@pytest.fixture
def seen(monkeypatch):
    """The prompts and completions of every batch that is drawn; those of a compiled program once it has run."""
    batches = []

    def note(prompt, tokens):
        batches.append(jax.tree.map(np.asarray, (prompt, tokens)))

    def spy(prompt, tokens, *, end):
        jax.debug.callback(note, prompt, tokens, ordered=True)
        return completion_rollout(prompt, tokens, end=end)

    for module in ("sft", "pairs", "step_labels"):
        monkeypatch.setattr(importlib.import_module(f"jaxpg.preferences.{module}"), "completion_rollout", spy)
    return batches


def initial(learner):
    return tiny.jit(learner.init)(jax.random.key(0))


def step(learner, state, i=0):
    """The i-th step of a run."""
    result = tiny.jit(learner.step)(state, jax.random.fold_in(KEY, i))
    jax.effects_barrier()
    return result


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def near(one, other, tolerance=1e-5):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), one, other)


# Slow loops in float64: log-probabilities of the tokens up to and with the first end, and their gradient.


def real_tokens(prompt, tokens, b, end):
    """Pairs of the token acted on and the token written, of one completion."""
    before = prompt.tokens[b][prompt.mask[b]][-1]
    for token in tokens[b]:
        yield int(before), int(token)
        if token == end:
            return
        before = token


def slow_log_prob(params, prompt, tokens, b, end):
    """Of the whole completion, its gradient, and its number of tokens."""
    params = np.asarray(params, np.float64)
    total, gradient, count = 0.0, np.zeros_like(params), 0
    for before, token in real_tokens(prompt, tokens, b, end):
        p = np.exp(params[before]) / np.exp(params[before]).sum()
        total += math.log(p[token])
        gradient[before] += np.eye(V)[token] - p
        count += 1
    return total, gradient, count


@pytest.mark.parametrize("end", [1, PAD], ids=["an end", "an end that doubles as padding"])
def test_a_step_of_fine_tuning(end, seen, plain_descent):
    learner = sft(words(end), table(), batch_size=BATCH, learning_rate=0.5, max_grad_norm=None)
    state = initial(learner)
    after, metrics = step(learner, state)
    [(prompt, tokens)] = seen
    np.testing.assert_array_equal(prompt.mask, prompt.tokens != PAD)
    assert not prompt.mask.all()
    rows = [slow_log_prob(state.params.policy, prompt, tokens, b, end) for b in range(BATCH)]
    count = sum(n for *_, n in rows)
    assert len({n for *_, n in rows}) > 2  # ragged
    gradient = -sum(g for _, g, _ in rows) / count
    assert abs(gradient[:, end]).max() > 1e-3  # the end is learned
    np.testing.assert_allclose(metrics["loss"], -sum(total for total, *_ in rows) / count, rtol=1e-5)
    np.testing.assert_allclose(after.params.policy, state.params.policy - 0.5 * gradient, rtol=1e-4, atol=1e-6)
    p = np.asarray(jax.nn.softmax(state.params.policy), np.float64)
    entropies = [-(p[s] * np.log(p[s])).sum() for b in range(BATCH) for s, _ in real_tokens(prompt, tokens, b, end)]
    np.testing.assert_allclose(metrics["entropy"], np.mean(entropies), rtol=1e-4)
    np.testing.assert_allclose(metrics["gradient_norm"], np.sqrt((gradient**2).sum()), rtol=1e-4)
    assert metrics["steps"] == after.steps == count
    assert metrics["steps"].dtype == np.int32


def doubled(as_noise):
    """Logits twice as large in the losses: by noise that is always 2, or by themselves."""
    policy = table()

    def evaluate(params, rollout, noise=1.0 if as_noise else 2.0):
        logits = policy.evaluate(params, rollout).logits
        return Categorical(logits * jnp.broadcast_to(jnp.asarray(noise), logits.shape[:2])[..., None])

    return policy._replace(evaluate=evaluate, noise=(lambda key, shape: jnp.full(shape, 2.0)) if as_noise else None)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_fine_tuning_reads_the_noise_of_the_policy(micro_batches, plain_descent):
    def after(policy, key):
        settings = {"batch_size": 4, "learning_rate": 0.5, "max_grad_norm": None, "micro_batches": micro_batches}
        learner = sft(words(1), policy, **settings)
        return tiny.jit(learner.step)(initial(learner), key)[0].params.policy

    keys = [jax.random.split(jax.random.key(0))[0], jax.random.key(0)]  # without noise the examples have the whole key
    built_in, noisy, without = after(doubled(False), keys[0]), after(doubled(True), keys[1]), after(table(), keys[0])
    np.testing.assert_allclose(noisy, built_in, rtol=1e-5, atol=1e-6)
    assert abs(noisy - without).max() > 1e-3


def test_dpo_reads_the_noise_of_the_policy_and_its_reference_has_none(plain_descent):
    for policy, moved in ((doubled(True), True), (doubled(False), False)):
        learner = dpo(word_pairs(), policy, batch_size=4, learning_rate=0.5)
        _, metrics = step(learner, initial(learner))
        assert (abs(metrics["reward_chosen"]) > 1e-2) == moved  # beta log(policy / reference), of a policy at its start


SLOW_SLOPES = {
    "sigmoid": lambda h, beta: -beta / (1 + math.exp(beta * h)),
    "ipo": lambda h, beta: 2 * (h - 1 / (2 * beta)),
    "hinge": lambda h, beta: -beta if beta * h < 1 else 0.0,
}


@pytest.mark.parametrize(("loss", "smoothing"), [*((loss, 0.0) for loss in SLOW_SLOPES), ("sigmoid", 0.2)])
def test_a_step_of_dpo(loss, smoothing, seen, plain_descent):
    """The second one, when policy and reference differ: slope(h) (∇ log π(y_c) - ∇ log π(y_r)), averaged over pairs."""
    beta = 0.7
    settings = {"learning_rate": 0.5, "max_grad_norm": None, "label_smoothing": smoothing}
    learner = dpo(word_pairs(), table(), batch_size=4, beta=beta, loss=loss, **settings)
    state = initial(learner)
    reference = np.asarray(state.params.policy)
    state, _ = step(learner, state)
    after, metrics = step(learner, state, 1)
    equal(after.reference, reference)
    prompt, tokens = seen[-1]
    slope_of, written, margins, gradient, count = SLOW_SLOPES[loss], [], [], np.zeros((V, V)), 0
    for i in range(4):
        side = []
        for b in (2 * i, 2 * i + 1):
            total, slope, n = slow_log_prob(state.params.policy, prompt, tokens, b, 1)
            by = n if loss == "ipo" else 1
            before, _, _ = slow_log_prob(reference, prompt, tokens, b, 1)
            side.append(((total - before) / by, slope / by, total / by))
            count += n
        h = side[0][0] - side[1][0]
        margins.append(beta * h)
        written.append([log_prob for *_, log_prob in side])
        of_h = (1 - smoothing) * slope_of(h, beta) - smoothing * slope_of(-h, beta)
        gradient += of_h * (side[0][1] - side[1][1]) / 4
    assert abs(gradient).max() > 1e-2
    np.testing.assert_allclose(after.params.policy, state.params.policy - 0.5 * gradient, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["margin"], np.mean(margins), rtol=1e-3, atol=1e-5)
    assert metrics["reward_accuracy"] == np.mean(np.array(margins) > 0)
    np.testing.assert_allclose(metrics["reward_chosen"] - metrics["reward_rejected"], metrics["margin"], atol=1e-5)
    log_probs = [metrics["log_prob_chosen"], metrics["log_prob_rejected"]]
    np.testing.assert_allclose(log_probs, np.mean(written, 0), rtol=1e-4)
    assert metrics["steps"] - state.steps == count


def test_a_step_of_the_reward_model(seen, plain_descent):
    margin, centring = 0.3, 0.2
    settings = {"batch_size": 4, "learning_rate": 0.5, "max_grad_norm": None}
    learner = reward_model(word_pairs(), counting(), margin=margin, centring=centring, **settings)
    state = initial(learner)
    after, metrics = step(learner, state)
    prompt, tokens = seen[-1]
    worth = np.asarray(state.params.critic, np.float64)
    loss, gradient, right, scores = 0.0, np.zeros(V), 0, []
    for i in range(4):
        sides = []
        for b in (2 * i, 2 * i + 1):
            counts = sum(np.eye(V)[token] for _, token in real_tokens(prompt, tokens, b, 1))
            r = math.tanh(worth @ counts)
            sides.append((r, (1 - r**2) * counts))
        (c, dc), (r, dr) = sides
        scores.append((c, r))
        p = 1 / (1 + math.exp(-(c - r - margin)))
        loss += (-math.log(p) + centring * (c + r) ** 2) / 4
        gradient += (-(1 - p) * (dc - dr) + 2 * centring * (c + r) * (dc + dr)) / 4
        right += (0.5 if abs(c - r) < 1e-6 else c > r) / 4
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    np.testing.assert_allclose(after.params.critic, worth - 0.5 * gradient, rtol=1e-4, atol=1e-5)
    assert metrics["accuracy"] == right
    found = [metrics["reward_chosen"], metrics["reward_rejected"]]
    np.testing.assert_allclose(found, np.mean(scores, 0), rtol=1e-4, atol=1e-6)
    assert after.params.policy == ()


def test_a_step_of_the_process_reward_model(plain_descent):
    """Cross-entropy over the ends of steps alone, ragged; what lies behind the end of a completion is in none."""
    source = word_steps()

    def poisoned(writer, key):
        one = source.draw(writer, key)
        behind = jnp.arange(T) > jnp.where((one.tokens == 1).any(), jnp.argmax(one.tokens == 1), T)
        return one._replace(label=jnp.where(behind, 1000.0, one.label))

    settings = {"batch_size": BATCH, "learning_rate": 0.5, "max_grad_norm": None}
    learner = process_reward_model(source._replace(draw=poisoned), counting(), **settings)
    state = initial(learner)
    after, metrics = step(learner, state)
    keys = env_keys(jax.random.fold_in(KEY, 0), BATCH)
    drawn_steps = jax.tree.map(np.asarray, jax.vmap(partial(source.draw, ()))(keys))
    worth = np.asarray(state.params.critic, np.float64)
    losses, gradients, agree, counts = [], [], [], []
    for b in range(BATCH):
        tally = np.zeros(V)
        for t, (_, token) in enumerate(real_tokens(drawn_steps.prompt, drawn_steps.tokens, b, 1)):
            tally = tally + np.eye(V)[token]
            y = float(drawn_steps.label[b, t])
            if y >= 0:
                s = math.tanh(worth @ tally)
                p = 1 / (1 + math.exp(-s))
                losses.append(-y * math.log(p) - (1 - y) * math.log(1 - p))
                gradients.append((p - y) * (1 - s**2) * tally)
                agree.append((s > 0) == (y > 0.5))
        counts.append(t + 1)
    assert len(losses) not in (BATCH, sum(counts))  # neither a step per completion nor one per token
    np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(agree), rtol=1e-6)
    np.testing.assert_allclose(after.params.critic, worth - 0.5 * np.mean(gradients, 0), rtol=1e-4, atol=1e-6)
    assert metrics["steps"] == sum(counts)


def test_a_gradient_is_scaled_down_to_its_limit(plain_descent):
    """The norm that is reported is that of before."""
    learner = make("sft", max_grad_norm=0.01)
    state = initial(learner)
    after, metrics = step(learner, state)
    assert metrics["gradient_norm"] > 0.05
    moved = np.asarray(after.params.policy, np.float64) - np.asarray(state.params.policy, np.float64)
    np.testing.assert_allclose(np.sqrt((moved**2).sum()), 0.1 * 0.01, rtol=1e-2)


@pytest.mark.parametrize("name", LEARNERS)
def test_four_devices_are_one(name, plain_descent):
    learner = make(name, max_grad_norm=0.3)
    state = initial(learner)
    after, metrics = on_one(learner, state)
    assert distance(after.params, state.params) > 1e-3
    states, same_metrics = by_shard_map(learner, state)
    assert distance(states, after) < 1e-5
    near(same_metrics, metrics, 1e-4)


@pytest.mark.parametrize("name", ["sft", "reward_model"])
def test_it_is_the_sum_over_devices_that_makes_them_one(name, plain_descent, monkeypatch):
    learner = make(name)
    state = initial(learner)
    after, _ = on_one(learner, state)
    monkeypatch.setattr(collectives, "psum", lambda tree: tree)
    states, _ = by_shard_map(learner, state)
    assert distance(states.params, after.params) > 1e-4


@pytest.mark.parametrize("name", LEARNERS)
def test_micro_batches_change_nothing(name, plain_descent):
    """Rows are of unequal length, so parts hold unequally many tokens."""
    whole, parts = make(name, max_grad_norm=0.3), make(name, max_grad_norm=0.3, micro_batches=4)
    state = initial(whole)
    expected, metrics = step(whole, state)
    after, same_metrics = step(parts, state)
    assert distance(after.params, state.params) > 1e-3
    near((after, same_metrics), (expected, metrics))


@pytest.mark.parametrize("name", LEARNERS)
def test_every_sample_of_successive_batches_is_drawn_by_a_key_of_its_own(name, seen):
    """Prompts are numbers of 30 bits here, so no two keys give the same; records of a file may well come twice."""
    learner = make(name, unique=True)
    state = initial(learner)
    program = tiny.jit(learner.step)
    for i in range(3):
        program(state, jax.random.fold_in(KEY, i))
    jax.effects_barrier()
    one_prompt_each = name in ("sft", "process_reward_model")
    rows = [row.tobytes() for prompt, _ in seen for row in prompt.tokens[:: 1 if one_prompt_each else 2]]
    assert len(set(rows)) == len(rows) == 3 * BATCH


@pytest.mark.parametrize("name", LEARNERS)
def test_vmap_over_seeds_and_learning_rates_is_a_loop(name, tmp_path):
    def one(key, rate):
        learner = make(name, learning_rate=rate, anneal_steps=100)
        state, _ = learner.step(learner.init(key), KEY)
        return learner.step(state, jax.random.fold_in(KEY, 1))

    keys, rates = jax.random.split(KEY, 2), jnp.array([0.1, 0.01])
    states, metrics = tiny.jit(jax.vmap(one))(keys, rates)
    assert {name: x.dtype for name, x in metrics.items()} == {
        name: np.int32 if name == "steps" else np.float32 for name in metrics
    }
    program = tiny.jit(one)
    for i in range(2):
        near(jax.tree.map(lambda x, i=i: x[i], (states, metrics)), program(keys[i], rates[i]))
    assert metrics["learning_rate"][0] < 0.1  # it falls

    learner = make(name)
    state, _ = step(learner, initial(learner))
    saved = checkpoint.save(tmp_path, state, steps=1, about={})
    equal(checkpoint.restore(saved, jax.eval_shape(learner.init, KEY)), state)


def test_learning_starts_from_the_policy_of_with_policy():
    given = jnp.full((V, V), 2.0)
    for name in ("sft", "dpo"):
        learner = make(name)
        state = learner.with_policy(initial(learner), given)
        equal(state.params.policy, given)
        after, _ = step(learner, state)
        assert distance(after.params, state.params) > 1e-3
        actor = learner.actor(state._replace(params=state.params._replace(policy=jnp.eye(V) * 9)))
        assert actor.act(actor.start(0), jnp.int32(3), KEY, True)[0] == 3
    equal(after.reference, given)
    # A state may be donated, and no buffer can be given away twice.
    assert state.reference.unsafe_buffer_pointer() != state.params.policy.unsafe_buffer_pointer()


def test_a_reward_model_puts_its_own_head_on_a_policy():
    env = tiny.counter()._replace(context=lambda state: ())
    policy, _ = transformer(env, width=8, layers=1, heads=2)
    learner = reward_model(word_pairs(), transformer_reward_model(env, width=8, layers=1, heads=2))
    state, params = initial(learner), policy.init(KEY)
    replaced = learner.with_policy(state, params).params.critic["params"]
    equal(replaced["embedding"], params["params"]["embedding"])
    equal(replaced["head"], state.params.critic["params"]["head"])
    other, _ = transformer(env, width=8, layers=2, heads=2)
    with pytest.raises(UserError, match="another network than the reward model"):
        learner.with_policy(state, other.init(KEY))


def test_a_reward_model_does_not_play():
    learner = make("reward_model")
    with pytest.raises(UserError, match="scores completions but does not generate them"):
        learner.actor(initial(learner))


@pytest.mark.parametrize("learner", [sft, reward_model, process_reward_model, dpo])
def test_every_setting_has_a_meaning(learner):
    settings = signatures.options(learner)
    assert {"batch_size", "learning_rate", "anneal_steps", "max_grad_norm", "micro_batches"} <= settings.keys()
    assert all(option.meaning for option in settings.values())


def test_batches_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="batch_size = 8 cannot be cut into 3 equal micro_batches"):
        make("sft", micro_batches=3)
    with pytest.raises(UserError, match=r"batch_size must be a whole number, not 8\.0"):
        make("sft", batch_size=8.0)
    with pytest.raises(UserError, match="micro_batches must be at least 1, not 0"):
        make("sft", micro_batches=0)
    with pytest.raises(UserError, match="must be at least 1"):
        make("dpo", batch_size=0)
    learner = make("sft", batch_size=4, micro_batches=2)
    state = initial(learner)
    with pytest.raises(UserError, match="on each of 4 devices: make it a multiple of 8"):
        by_shard_map(learner, state)
    with pytest.raises(UserError, match=r"There is no loss 'sigmiod' on preference pairs. Did you mean 'sigmoid'"):
        dpo(word_pairs(), table(), loss="sigmiod")


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("dpo", {"label_smoothing": 0.6}, r"label_smoothing must be below 0\.5"),
        ("sft", {"learning_rate": -1.0}, "learning_rate must be at least 0"),
    ],
)
def test_numbers_outside_of_their_domain_are_refused(name, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        make(name, **changes)
    with pytest.raises(UserError, match="beta must be above 0"):
        dpo(word_pairs(), table(), beta=0.0)
    with pytest.raises(UserError, match="centring must be at least 0"):
        reward_model(word_pairs(), counting(), centring=-1.0)


# Where pairs come from.


def drawn(draw, n=256):
    return tiny.jit(jax.vmap(draw))(jax.random.split(KEY, n))


def lengths(tokens):
    return np.array([[*row, 1].index(1) + 1 if 1 in row else T for row in np.asarray(tokens).tolist()])


def test_a_sharp_judge_is_always_right_and_a_dull_one_tosses_coins():
    task = words()
    for sharpness, low, high in ((1e6, 1.0, 1.0), (5.0, 0.75, 0.95), (0.0, 0.4, 0.6)):
        pairs = drawn(judged_pairs(task, task, length, sharpness=sharpness).draw, 512)
        chosen, rejected = lengths(pairs.chosen), lengths(pairs.rejected)
        differ = chosen != rejected
        assert low <= (chosen > rejected)[differ].mean() <= high
    expected = [1 / (1 + math.exp(-5.0 * abs(c - r) / T)) for c, r in zip(chosen, rejected, strict=True)]
    pairs = drawn(judged_pairs(task, task, length, sharpness=5.0).draw, 512)
    right = lengths(pairs.chosen) > lengths(pairs.rejected)
    assert abs(right[differ].mean() - np.array(expected)[differ].mean()) < 0.06


def test_few_pairs_come_again_and_again_with_the_same_label():
    task = words()
    pairs = drawn(judged_pairs(task, task, length, num_pairs=5, sharpness=0.1).draw)
    rows = {
        (c.tobytes(), r.tobytes()) for c, r in zip(np.asarray(pairs.chosen), np.asarray(pairs.rejected), strict=True)
    }
    assert len(rows) == 5
    with pytest.raises(UserError, match="num_pairs must be at least 1"):
        judged_pairs(task, task, length, num_pairs=0)


def test_held_out_pairs_are_of_the_held_out_task():
    marked = words()._replace(prompt_tokens=lambda problem: jnp.full(P, V - 1))
    pairs = judged_pairs(words(), marked, length)
    assert (drawn(pairs.held_out).prompt.tokens == V - 1).all()
    assert (drawn(pairs.draw).prompt.tokens != V - 1).any()


def test_slips_happen_before_the_end_at_their_rate():
    task = words()._replace(demonstration=lambda problem, key: jnp.array([2, 2, 2, 1, 0]))
    write = corrupted_demonstrations(task, rate=0.5)
    tokens = np.asarray(jax.vmap(lambda key: write((), key))(jax.random.split(KEY, 2000)))
    assert (tokens[:, 3] == 1).all()
    assert (tokens[:, 4] == 0).all()
    assert abs((tokens[:, :3] != 2).mean() - 0.5 * (1 - 1 / V)) < 0.03


def test_a_slip_writes_any_token():
    task = words()._replace(demonstration=lambda problem, key: jnp.array([2, 2, 2, 1, 0]))
    write = corrupted_demonstrations(task, rate=1.0)
    tokens = np.asarray(tiny.jit(jax.vmap(lambda key: write((), key)))(jax.random.split(KEY, 3000)))[:, :3]
    np.testing.assert_allclose(np.bincount(tokens.ravel(), minlength=V) / tokens.size, 1 / V, atol=0.02)


def test_recorded_pairs_are_drawn_whole_and_each_from_its_split():
    def numbered(numbers):
        number = jnp.array(numbers)[:, None]
        prompt = Prompt(jnp.broadcast_to(number, (len(numbers), P)), jnp.ones((len(numbers), P), bool))
        return PairData(prompt, number + 100, number + 200)

    pairs = stored_pairs(numbered([1, 2, 3]), numbered([7, 8]), end=1)
    for draw, numbers in ((pairs.draw, {1, 2, 3}), (pairs.held_out, {7, 8})):
        some = drawn(draw, 100)
        assert set(np.asarray(some.prompt.tokens[:, 0]).tolist()) == numbers
        np.testing.assert_array_equal(some.prompt.tokens[:, 0] + 100, some.chosen[:, 0])
        np.testing.assert_array_equal(some.prompt.tokens[:, 0] + 200, some.rejected[:, 0])
    with pytest.raises(UserError, match="3 pairs to learn from and 0 held out"):
        stored_pairs(numbered([1, 2, 3]), jax.tree.map(lambda x: x[:0], numbered([1])), end=1)


def test_pairs_of_a_task_are_those_of_a_file_or_of_a_judge(tmp_path):
    train, test = (reverse(length=3, letters=6, min_length=3, split=split) for split in ("train", "test"))
    for judge in (None, "accuracy", "length"):
        with pytest.raises(UserError, match=r"All demonstrations of reverse are equally good.*slip_rate above 0"):
            make_pairs(train, test, judge=judge)
    with pytest.raises(UserError, match=r"pairs.judge = overlong would find all completions equal"):
        make_pairs(train, test, judge="overlong", slip_rate=0.3)
    with pytest.raises(UserError, match="slip_rate must be at most 1"):
        make_pairs(train, test, slip_rate=1.5)
    judged = make_pairs(train, test, slip_rate=0.3, sharpness=1e6)

    some = drawn(judged.draw, 100)
    backwards = np.asarray(some.prompt.tokens)[:, 2::-1]
    accuracy = [(np.asarray(tokens)[:, :3] == backwards).all(1) for tokens in (some.chosen, some.rejected)]
    assert (accuracy[0] >= accuracy[1]).all()
    assert (accuracy[0] > accuracy[1]).mean() > 0.1

    file = tmp_path / "pairs.jsonl"
    words = ["".join(word) for word in itertools.product("abc", repeat=3) if word[0] != word[2]]
    lines = [json.dumps({"prompt": word + "=", "chosen": word[::-1], "rejected": word}) for word in words]
    file.write_text("\n".join(lines))
    pairs = make_pairs(train, test, file=str(file))
    some, others = drawn(pairs.draw), drawn(pairs.held_out)
    for pair, held_out in ((some, False), (others, True)):  # as the task has it
        prompts = [train.vocabulary.decode(row) for row in np.asarray(pair.prompt.tokens)]
        assert set(train.is_held_out(prompts)) == {held_out}
    np.testing.assert_array_equal(some.chosen[:, :3], some.rejected[:, 2::-1])
    np.testing.assert_array_equal(some.chosen[:, 3], train.vocabulary.end)


def test_the_judge_of_a_task_is_as_sharp_and_has_as_many_pairs_as_is_set():
    train, test = (reverse(length=3, letters=6, min_length=3, split=split) for split in ("train", "test"))
    few = drawn(make_pairs(train, test, slip_rate=0.3, num_pairs=5).draw)
    rows = zip(*(np.asarray(x) for x in (few.prompt.tokens, few.chosen, few.rejected)), strict=True)
    assert len({tuple(x.tobytes() for x in row) for row in rows}) == 5
    blind = drawn(make_pairs(train, test, slip_rate=0.3, sharpness=0.0).draw, 512)
    backwards = np.asarray(blind.prompt.tokens)[:, 2::-1]
    chosen, rejected = ((np.asarray(x)[:, :3] == backwards).all(1) for x in (blind.chosen, blind.rejected))
    assert 0.35 < chosen[chosen != rejected].mean() < 0.65


def test_held_out_accuracy_by_hand():
    def pair(key):
        """The chosen one is better in 3 of 4 cases and of the same worth in the others."""
        better = jax.random.bernoulli(key, 0.75)
        chosen = jnp.where(better, 3, 2)[None]
        return PreferencePair(Prompt(jnp.ones(1, int), jnp.ones(1, bool)), chosen, jnp.array([2]))

    worth = jnp.arange(float(V))
    pairs = Pairs(draw=lambda key: 1 / 0, held_out=pair, end=1)
    keys = jax.random.split(KEY, 64)
    better = np.mean([bool(jax.random.bernoulli(k, 0.75)) for k in keys])
    accuracy = held_out_accuracy(pairs, counting(), worth / 10, KEY, num_pairs=64)
    np.testing.assert_allclose(accuracy, better + 0.5 * (1 - better), rtol=1e-6)


def test_held_out_accuracy_of_stored_pairs_counts_each_once():
    """All of them where they are no more than are asked for, else as many different ones."""
    better = np.array([1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1])
    chosen = np.where(better, 3, 2)[:, None].astype(np.int32)
    prompt = Prompt(np.ones((11, 1), np.int32), np.ones((11, 1), bool))
    data = PairData(prompt, chosen, np.full((11, 1), 2, np.int32))
    pairs, worth = stored_pairs(data, data, end=1), jnp.arange(float(V)) / 10
    for key in jax.random.split(KEY, 3):
        accuracy = held_out_accuracy(pairs, counting(), worth, key, num_pairs=64)
        np.testing.assert_allclose(accuracy, better.mean() + 0.5 * (1 - better).mean(), rtol=1e-6)
    numbered = data._replace(chosen=np.arange(11, dtype=np.int32)[:, None])
    some = stored_pairs(numbered, numbered, end=1).some_held_out(KEY, 10)
    assert len(np.unique(some.chosen)) == 10


@pytest.mark.parametrize("loss", SLOW_SLOPES)
def test_held_out_preferences_by_a_slow_loop(loss):
    """Of a policy that has moved from its reference, on all stored pairs that are held out."""
    prompt = Prompt(np.full((4, 1), 3, np.int32), np.ones((4, 1), bool))
    chosen = np.array([[2, 3, 1], [3, 2, 1], [2, 2, 1], [3, 1, 1]], np.int32)
    rejected = np.array([[3, 2, 1], [2, 1, 1], [3, 3, 1], [2, 2, 1]], np.int32)
    data, beta = PairData(prompt, chosen, rejected), 0.3
    learned = data._replace(chosen=rejected, rejected=chosen)
    after, before = (table().init(jax.random.key(i)) for i in range(2))
    found = held_out_preferences(
        stored_pairs(learned, data, end=1),
        table(),
        after,
        before,
        KEY,
        num_pairs=8,
        settings=DPOSettings(loss, beta, 0.0),
    )

    def gain(tokens, b):
        (now, _, n), (then, *_) = (slow_log_prob(params, prompt, tokens, b, 1) for params in (after, before))
        return (now - then) / (n if loss == "ipo" else 1)

    margins = np.array([beta * (gain(chosen, b) - gain(rejected, b)) for b in range(4)])
    losses = {
        "sigmoid": np.log1p(np.exp(-margins)),
        "ipo": (margins / beta - 1 / (2 * beta)) ** 2,
        "hinge": np.maximum(0, 1 - margins),
    }
    np.testing.assert_allclose(found["pair_margin"], margins.mean(), rtol=1e-4)
    np.testing.assert_allclose(found["pair_loss"], losses[loss].mean(), rtol=1e-4)
    assert found["pair_accuracy"] == np.mean(margins > 0)


# That they learn. Small transformers, seconds.

SMALL = {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1}


def learned(learner, steps, state=None):
    """The state and the metrics after so many steps, in one program."""

    def run(state):
        state, metrics = jax.lax.scan(learner.step, state, jax.random.split(KEY, steps))
        return state, jax.tree.map(lambda x: x[-10:].mean(0), metrics)

    return jax.jit(run)(initial(learner) if state is None else state)


def test_fine_tuning_learns_to_copy_backwards():
    task = reverse(length=3, letters=6, min_length=3)
    policy, _ = transformer(text_env(task), **SMALL)
    learner = sft(task, policy, batch_size=64, learning_rate=1e-2)
    _, before = step(learner, initial(learner))
    _, metrics = learned(learner, 250)
    assert before["loss"] > 3
    assert metrics["loss"] < 0.1  # chance among six letters, with a sure end, would be 1.3


@pytest.mark.parametrize("algorithm", [sft, dpo])
def test_a_memory_begins_anew_with_each_text_of_the_data(algorithm):
    """Nobody has collected these, and a rollout of them has no memory to go on from."""
    task = reverse(length=3, letters=6, min_length=3)
    policy, _ = recurrent(text_env(task), hidden=(8,), width=8)
    pairs = judged_pairs(task, task, lambda _, text, length: length, generate=corrupted_demonstrations(task))
    learner = algorithm(pairs if algorithm is dpo else task, policy, batch_size=4)
    state = initial(learner)
    prompts = jax.vmap(lambda key: task.prompt(task.draw(key)))(jax.random.split(KEY, 2))
    rollout = completion_rollout(prompts, jnp.full((2, 3), 17), end=task.vocabulary.end)
    remembered = rollout._replace(episodes=rollout.episodes._replace(memory=jnp.zeros((2, 8))))
    params, action = state.params.policy, rollout.steps.action
    of_data, collected = evaluate_completions(policy, params, rollout), policy.evaluate(params, remembered)
    np.testing.assert_array_equal(of_data.log_prob(action), collected.log_prob(action))
    _, metrics = step(learner, state)
    assert np.isfinite(metrics["loss"])


def worth(problem, completion, length):
    """A true reward that is rarely the same twice: later letters of the alphabet are better, long words dilute them."""
    written = jnp.arange(T) < length
    return (written * (completion - V / 2)).sum() / jnp.sqrt(length)


def test_a_reward_model_tells_held_out_pairs_apart():
    task = words()
    pairs = judged_pairs(task, task, worth, sharpness=20.0)
    judge = transformer_reward_model(text_env(task), **SMALL)
    state, metrics = learned(reward_model(pairs, judge, batch_size=64, learning_rate=5e-3), 100)
    accuracy = jax.jit(partial(held_out_accuracy, pairs, judge, num_pairs=512))(state.params.critic, KEY)
    assert accuracy > 0.85
    assert metrics["reward_chosen"] > metrics["reward_rejected"]


def test_dpo_moves_towards_the_chosen_ones():
    task = words()
    policy, _ = transformer(text_env(task), **SMALL)
    pairs = judged_pairs(task, task, worth, sharpness=20.0)
    _, metrics = learned(dpo(pairs, policy, batch_size=32, learning_rate=3e-3), 100)
    assert metrics["margin"] > 0.3
    assert metrics["reward_accuracy"] > 0.7
    assert metrics["loss"] < 0.6 < math.log(2)


def test_each_learner_takes_records_of_its_kind():
    """An environment in the place of a task, a task in the place of pairs, and a pair of networks for one of them."""
    env = text_env(envs.make_task("sort"))
    task, (policy, _) = envs.make_task("sort"), transformer(env, width=4, layers=1, heads=1, kv_heads=1)
    pairs, model = (
        make_pairs(task, task, slip_rate=0.5),
        transformer_reward_model(env, width=4, layers=1, heads=1, kv_heads=1),
    )
    for wrong, sentence in (
        (lambda: sft(env, policy), "sft takes a record Task: envs.make_task"),
        (lambda: sft(task, (policy, None)), "sft takes a record Policy: the first of language.transformer"),
        (lambda: dpo(task, policy), "dpo takes a record Pairs"),
        (lambda: dpo(pairs, None), "dpo takes a record Policy"),
        (lambda: reward_model(pairs, policy), "reward_model takes a record RewardModel"),
        (lambda: reward_model(task, model), "reward_model takes a record Pairs"),
        (lambda: process_reward_model(pairs, model), "process_reward_model takes a record StepLabels"),
        (lambda: judged_pairs(env, env, None), "judged_pairs takes a record Task"),
    ):
        with pytest.raises(UserError, match=sentence):
            wrong()
