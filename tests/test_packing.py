"""Updates of texts side by side: the same gradients and metrics as of one text per row, and no work on padding."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import envs, ladder, language, update
from jaxpg.algorithm import make_objective
from jaxpg.models.generation import completion_rollout
from jaxpg.policy_gradient import policy_gradient
from jaxpg.types import Critic, Episodes, Params, Policy, Prompt, Rollout
from jaxpg.update import packing
from jaxpg.update.forward import forward_pass
from jaxpg.update.objective import TextReader

P, T, B, END, VOCABULARY = 3, 8, 12, 0, 9
S = P + T
LENGTHS = [8, 1, 3, 8, 2, 2, 5, 1, 4, 1, 3, 8]
NOT_TRAINED = (3, 5)  # columns


def test_texts_get_places_of_their_own():
    many = [[8, 1, 3, 8, 2, 2, 5, 1, 7], [8] * 9, [1] * 9, [0, 0, 4, 0, 8, 0, 5, 3, 3], [0] * 9, [7] + [0] * 8, [4] * 9]
    rows, offsets = jax.vmap(partial(packing.assign_rows, width=8))(jnp.asarray(many))
    for lengths, row, offset in zip(many, rows, offsets, strict=True):
        used = np.zeros((9, 8), int)
        for r, o, n in zip(row, offset, lengths, strict=True):
            if n:
                used[int(r), int(o) : int(o) + n] += 1
                assert int(o) + n <= 8
        assert used.max() <= 1
        assert used.sum() == sum(lengths)
        filled = used.any(1)
        assert (np.diff(filled.astype(int)) <= 0).all()  # empty rows are the last
        assert used.sum() >= 4 * (filled.sum() - 1)  # at most one row is less than half full


def completions(padding: str = "right", group_size: int = 1) -> Any:
    """The rollout of completions of LENGTHS, whose prompts have one to three tokens and are those of groups."""
    rng = np.random.default_rng(0)
    written = rng.integers(1, VOCABULARY, (B, T))
    for b, length in enumerate(LENGTHS):
        written[b, length - 1 :] = END
    written[3] = 1  # cut off by the time limit
    mask = np.arange(P) < rng.integers(1, P + 1, B)[:, None]
    mask = mask if padding == "right" else mask[:, ::-1]
    group = np.arange(B) // group_size
    prompt = Prompt(jnp.asarray(rng.integers(1, VOCABULARY, (B, P)), jnp.int32)[group], jnp.asarray(mask)[group])
    rollout = completion_rollout(prompt, jnp.asarray(written, jnp.int32), end=END)
    return rollout._replace(loss_mask=rollout.loss_mask.at[:, jnp.asarray(NOT_TRAINED)].set(0))


def networks(*, shared: bool = False) -> tuple[Policy, Critic]:
    """A small transformer and its critic."""
    env = cases.text._replace(action_space=cases.text.action_space._replace(n=VOCABULARY), time_limit=T)
    return language.transformer(env, width=8, layers=1, heads=2, kv_heads=1, shared=shared)


def first_batch(name: str, padding: str = "right", **settings: Any) -> tuple[Any, Any, Params, update.Batch]:
    """An algorithm, its losses, parameters and a batch of completions with advantages of all sizes."""
    algorithm = getattr(ladder, name)(num_envs=B, learning_rate=0.1, entropy_coefficient=0.01, **settings)
    policy, critic = networks(shared=settings.get("value_coefficient") == 0.25)
    critic_or_none = critic if algorithm.value_loss else None

    make = partial(tiny.text_batch, algorithm, policy, critic_or_none)
    rollout = completions(padding, algorithm.collector.group_size)
    return algorithm, make_objective(policy, critic_or_none, algorithm), *tiny.jit(make)(rollout)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {"group_size": 4, "kl": "loss_k3"}),
        pytest.param("dapo", {"group_size": 4}, marks=pytest.mark.full),
        pytest.param("ppo", {"num_steps": None, "normalize_advantages": True}, marks=pytest.mark.full),
        pytest.param("ppo", {"num_steps": None, "value_coefficient": 0.25}, marks=pytest.mark.full),
        pytest.param("reinforce_baseline", {}, marks=pytest.mark.full),
        pytest.param("grpo", {"group_size": 4, "padding": "left"}, marks=pytest.mark.full),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values())) or "plain",
)
def test_an_update_is_that_of_one_text_per_row(machine_with, name, settings):
    several = {} if name == "reinforce_baseline" else {"epochs": 2, "num_minibatches": 2 if name == "dapo" else 1}
    algorithm, goal, params, batch = first_batch(name, **settings, **several)

    def choose(limit: int, side_by_side: bool) -> None:
        machine_with(chunk_tokens=limit)
        assert bool(packing.packing_of(goal.text_reader, batch)) == side_by_side

    ways = [partial(choose, 10_000, False), partial(choose, 2 * S, True)]
    tiny.assert_same_update(algorithm, goal, params, batch, ways)


def test_there_are_rows_for_all_texts_where_each_of_them_fills_one(machine_with):
    """11 full texts, in chunks of at most three rows and a half: no number of chunks suits them without a row more."""
    texts = 11
    machine_with(chunk_tokens=3 * S + S // 2)
    weight, prompt = jnp.ones((T, texts)), Prompt(jnp.ones((texts, P), jnp.int32), jnp.ones((texts, P), bool))
    rollout = Rollout((), weight, episodes=Episodes(context=prompt))
    batch = update.Batch(rollout, weight, weight, weight, weight, (), ())
    whole = packing.packing_of(TextReader(texts, None), batch)
    assert whole == packing.Packing(own_prompt=P, num_slots=S, group_size=texts, rows=3, chunks=4)
    rows = np.asarray(tiny.jit(partial(packing.pack_texts, whole))(batch, jnp.arange(texts)))
    slots = rows[rows != packing.NOTHING]
    completed = sorted(divmod(slot, S) for slot in slots.tolist() if slot % S >= P)
    assert completed == [(b, slot) for b in range(texts) for slot in range(P, S)]


def test_hardly_a_row_is_without_a_text() -> None:
    """64 texts where 10 rows suit a chunk: eight of eight, since seven chunks of ten have six rows to spare."""
    assert packing.cut_rows(64, 10) == (8, 8)
    assert packing.cut_rows(67, 21) == (17, 4)  # none of up to seven chunks has fewer than one row to spare
    for texts in range(2, 100):
        for at_most in range(1, texts):
            rows, chunks = packing.cut_rows(texts, at_most)
            fewest = -(-texts // at_most)
            assert rows <= at_most
            assert chunks < 2 * fewest
            assert texts <= rows * chunks <= -(-texts // fewest) * fewest


def test_rows_hold_whole_texts_in_order(machine_with):
    """Read back slot by slot: each text that trains stands once, in one piece, at positions from 0 on."""
    machine_with(chunk_tokens=2 * S)
    rollout = completions("left")
    weight = rollout.loss_mask
    batch = update.Batch(rollout, weight, weight, weight, weight, (), ())
    whole = packing.Packing(own_prompt=P, num_slots=S, group_size=B, rows=2, chunks=6)
    cut, rows = packing.cut_packed(whole, batch), packing.pack_texts(whole, batch, jnp.arange(B))
    assert cut.num_chunks(rows) == -(-int((rows != packing.NOTHING).any(1).sum()) // 2)
    found = {}
    for i in range(len(rows) // 2):
        chunk = cut.chunk(rows, cut.take(rows), i, 0)
        texts = jax.tree.map(np.asarray, chunk.rollout.episodes.context)
        for row in range(2):
            for text in set(texts.text[row]) - {packing.NOTHING}:
                (slots,) = np.nonzero(texts.text[row] == text)
                np.testing.assert_array_equal(slots, slots[0] + np.arange(len(slots)))
                np.testing.assert_array_equal(texts.position[row][slots], np.arange(len(slots)))
                assert text not in found
                found[int(text)] = (
                    texts.tokens[row][slots],
                    chunk.weight[slots, row],
                    chunk.rollout.steps.action[slots, row],
                )
    assert sorted(found) == [b for b in range(B) if b not in NOT_TRAINED]
    prompt, steps = rollout.episodes.context, rollout.steps
    for b, (written, weights, actions) in found.items():
        before = np.asarray(prompt.tokens[b])[np.asarray(prompt.mask[b])][:-1]
        np.testing.assert_array_equal(written, [*before, *steps.obs[: LENGTHS[b], b]])
        np.testing.assert_array_equal(weights, [*np.zeros(len(before)), *np.ones(LENGTHS[b])])
        np.testing.assert_array_equal(actions[len(before) :], steps.action[: LENGTHS[b], b])


def test_an_update_visits_hardly_more_than_what_trains(machine_with):
    machine_with(chunk_tokens=2 * S)
    _, goal, params, batch = first_batch("grpo", group_size=4)

    def rows_visited(params: Params, batch: update.Batch) -> Any:
        return goal.loss(params, batch)[0], {"rows": jnp.float32(batch.weight.shape[1])}

    counting = goal._replace(policy_loss=rows_visited, value_loss=None)
    step = tiny.jit(partial(update.gradient_step, counting, update.sgd(), 1.0))
    *_, metrics = step(params, (), batch, jax.random.key(0))
    prompts = batch.rollout.episodes.context.mask.sum(1) - 1
    needed = sum(LENGTHS[b] + int(prompts[b]) for b in range(B) if b not in NOT_TRAINED)
    assert needed / S <= metrics["rows"] <= needed / S + 3
    assert metrics["rows"] < 0.6 * B


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("rlhf", {}),
        pytest.param("rlhf", {"value_coefficient": 0.25, "padding": "left"}, marks=pytest.mark.full),
        ("grpo", {"group_size": 4, "kl": "loss_k3"}),
        pytest.param("grpo", {"group_size": 4, "kl": "loss_k3", "padding": "left"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_what_is_computed_before_an_update_is_that_of_one_text_per_row(machine_with, name, settings):
    *_, expected = first_batch(name, **settings)
    machine_with(chunk_tokens=2 * S)
    *_, found = first_batch(name, **settings)
    mask = np.asarray(expected.rollout.steps.mask)
    read = ["advantage", "target", "reference_log_prob"] + ["old_value"] * (name == "rlhf")
    for field in read:
        one, other = (np.asarray(getattr(batch, field)) for batch in (expected, found))
        assert np.abs(one * mask).max() > 0.1, field
        np.testing.assert_allclose(other * mask, one * mask, rtol=1e-4, atol=1e-5, err_msg=field)
    assert (np.asarray(found.reference_log_prob)[mask == 0] == 0).all()  # side by side, there is no padding
    policy, rollout = networks()[0], found.rollout
    reference = tiny.jit(
        lambda: policy.evaluate(policy.init(jax.random.key(2)), rollout).log_prob(rollout.steps.action)
    )
    np.testing.assert_allclose(found.reference_log_prob, reference() * mask, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_successors_are_of_the_same_text(machine_with, shared):
    """No text has the value of its neighbour in the row after its last step."""
    policy, critic = networks(shared=shared)
    params = Params(policy.init(jax.random.key(0)), critic.init(jax.random.key(1)))
    rollout = completions()
    v_tm1, v_t = tiny.jit(critic.values)(params, rollout)
    machine_with(chunk_tokens=2 * S)
    reader = TextReader(group_size=1, read_prompts=None)
    traced = []

    def values_of(params, chunk):
        traced.append(chunk)
        return critic.values(params, chunk)

    found, successors = tiny.jit(partial(forward_pass, values_of, reader))(params, rollout)
    assert len(traced) == 1  # for its shape and in the loop
    mask = np.asarray(rollout.steps.mask)
    last = mask - np.concatenate([mask[1:], np.zeros((1, B))])
    assert (last.sum(0) == 1).all()
    np.testing.assert_allclose(found, v_tm1 * mask, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(successors, v_t * (mask - last), rtol=1e-4, atol=1e-5)
    assert (np.abs(found) > 1e-3).sum() > 0.9 * mask.sum()


@pytest.mark.full
def test_seeds_by_vmap_may_differ_in_their_rows(machine_with):
    machine_with(chunk_tokens=2 * S)
    _, goal, params, batch = first_batch("grpo", group_size=4)
    short = batch._replace(
        rollout=batch.rollout._replace(loss_mask=batch.rollout.loss_mask.at[2:].set(0)),
        weight=batch.weight.at[2:].set(0),
    )
    both = jax.tree.map(lambda *x: jnp.stack(x), batch, short)
    step = partial(update.gradient_step, goal, update.sgd(), 1.0, params, ())
    together = tiny.jit(jax.vmap(step, (0, None)))(both, jax.random.key(0))[0]
    for i, alone in enumerate((batch, short)):
        expected = tiny.jit(step)(alone, jax.random.key(0))[0]
        found = jax.tree.map(itemgetter(i), together)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, expected)


def test_what_reads_whole_episodes_is_not_packed(machine_with):
    machine_with(chunk_tokens=2 * S)
    _, goal, _, batch = first_batch("grpo", group_size=4)
    assert packing.packing_of(goal.text_reader, batch)
    assert not packing.packing_of(goal.text_reader, batch, num_minibatches=6)  # two texts fit one chunk
    _, goal, _, batch = first_batch("gspo", group_size=4)
    assert not packing.packing_of(goal.text_reader, batch)
    algorithm, *_ = first_batch("grpo", group_size=4)
    policy, _ = language.transformer(cases.text, width=8, layers=1, heads=2, kv_heads=1)
    assert not make_objective(policy._replace(evaluates_packed=False), None, algorithm).text_reader


@pytest.mark.full
def test_slots_that_count_nowhere_make_no_infinite_ratio() -> None:
    """Of a sharp policy the ratio of a token in a prompt is infinite, and 0 times infinity would be NaN."""
    env = envs.make("sort")
    policy, critic = language.transformer(env, width=32, layers=1, heads=2, kv_heads=1, temperature=1 / 300)
    settings = {"num_envs": 256, "kl": "loss_k3", "num_minibatches": 2, "epochs": 1}
    results = []
    for chunk_rows in (None, 64):  # packed, and not
        learner = policy_gradient(env, policy, critic, ladder.rlhf(**settings, chunk_rows=chunk_rows))
        state, metrics = tiny.jit(learner.step)(learner.init(jax.random.key(0)), jax.random.key(1))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
        results.append(metrics["reference_kl"])
    np.testing.assert_allclose(*results, rtol=1e-4)
