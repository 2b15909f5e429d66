"""Prompts that several completions share are read once; the gradient is that of texts with prompts of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxpg import ladder, language, update
from jaxpg.algorithm import make_objective
from jaxpg.models.generation import completion_rollout
from jaxpg.types import Params, Prompt, SharedPrompts
from jaxpg.update import packing, shared_prompts

P, T, END, VOCABULARY, GROUP = 6, 5, 0, 9, 4
LENGTHS = [5, 1, 3, 5, 2, 2, 5, 1, 4, 1, 3, 3]
PROMPT_LENGTHS = [1, 3, P]  # of the last one, which is trained on, completions read a memory that is not the first
B, N = len(LENGTHS), len(LENGTHS) // GROUP
ENV = cases.text._replace(action_space=cases.text.action_space._replace(n=VOCABULARY), time_limit=T)


def completions(padding: str) -> Any:
    """Completions of LENGTHS in groups, of which the second trains nothing, and column 3 neither."""
    rng = np.random.default_rng(0)
    written = rng.integers(1, VOCABULARY, (B, T))
    for b, length in enumerate(LENGTHS):
        written[b, length - 1 :] = END
    mask = np.arange(P) < np.asarray(PROMPT_LENGTHS)[:, None]
    mask = mask if padding == "right" else mask[:, ::-1]
    tokens = rng.integers(1, VOCABULARY, (N, P))
    prompt = Prompt(*(jnp.repeat(jnp.asarray(x), GROUP, 0) for x in (tokens, mask)))
    rollout = completion_rollout(prompt, jnp.asarray(written, jnp.int32), end=END)
    untrained = jnp.asarray([3, 4, 5, 6, 7])
    return rollout._replace(loss_mask=rollout.loss_mask.at[:, untrained].set(0))


def problem(
    padding: str = "right", network: dict | None = None, seed: int = 200, **settings: Any
) -> tuple[Any, Any, Params, Any]:
    """GRPO, its losses, parameters of two layers that attend to prompts sharply, by this seed, and a batch."""
    algorithm = ladder.grpo(num_envs=B, group_size=GROUP, learning_rate=0.1, entropy_coefficient=0.01, **settings)
    policy, _ = language.transformer(ENV, **{"width": 8, "layers": 2, "heads": 2, "kv_heads": 1} | (network or {}))

    make = partial(tiny.text_batch, algorithm, policy, None, scale=2, seed=seed)
    return algorithm, make_objective(policy, None, algorithm), *tiny.jit(make)(completions(padding))


@pytest.mark.parametrize(
    ("minibatches", "limit", "settings", "loops"),
    [
        (1, 3 * T, {}, True),
        pytest.param(2, 2 * T, {"kl": "loss_k3"}, True, marks=pytest.mark.full),
        pytest.param(1, P, {"padding": "left"}, True, marks=pytest.mark.full),  # a prompt at a time, and a row
        pytest.param(1, 3 * T, {"network": {"remat": True, "logit_chunks": 2}}, True, marks=pytest.mark.full),
        pytest.param(1, 3 * T, {"network": {"remat": True}}, False, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_an_update_is_that_of_texts_with_their_own_prompts(machine_with, minibatches, limit, settings, loops):
    algorithm, goal, params, batch = problem(**settings, epochs=2, num_minibatches=minibatches)

    def choose(limit: int, shared: bool) -> None:
        machine_with(chunk_tokens=limit, loops_over_blocks=loops)
        found = packing.packing_of(goal.text_reader, batch, minibatches)
        assert (found is not None and found.own_prompt == 0) == shared

    ways = [partial(choose, 10_000, False), partial(choose, limit, True)]
    tiny.assert_same_update(algorithm, goal, params, batch, ways)


def test_part_of_the_gradient_comes_through_the_prompts(machine_with):
    """Else the test above would not see it missing: a fifth of the gradient's norm and more."""
    machine_with(chunk_tokens=3 * T)
    _, goal, params, batch = problem()
    reader = goal.text_reader
    deaf = reader._replace(read_prompts=lambda *x: jax.lax.stop_gradient(reader.read_prompts(*x)))

    def of(goal: update.Objective) -> Any:
        step = tiny.jit(partial(update.gradient_step, goal, update.sgd(), 1.0))
        return step(params, (), batch, jax.random.key(0))[0]

    whole, without = of(goal), of(goal._replace(text_reader=deaf))

    def norm(x: Any, y: Any) -> float:
        return float(optax.tree.norm(jax.tree.map(jnp.subtract, x, y)))

    assert norm(whole, without) > 0.2 * norm(whole, params)


def test_rows_have_completions_of_one_prompt_and_no_prompts(machine_with):
    """Read back slot by slot: each completion that trains once, in one piece, at the positions after its prompt."""
    machine_with(chunk_tokens=2 * T)
    _, goal, _, batch = problem("left")
    found = packing.packing_of(goal.text_reader, batch)
    cut, rows = packing.cut_packed(found, batch), packing.pack_texts(found, batch, jnp.arange(B))
    assert (found.rows, found.chunks, rows.shape) == (2, 6, (12, T))
    np.testing.assert_array_equal(cut.prompts.tokens, batch.rollout.episodes.context.tokens[::GROUP])
    seen = []
    for i in range(int(cut.num_chunks(rows))):
        chunk = cut.chunk(rows, cut.take(rows), i, 0)
        context = jax.tree.map(np.asarray, chunk.rollout.episodes.context)
        assert isinstance(context.prompts, SharedPrompts)
        for row in range(2):
            for text in set(context.text[row]) - {packing.NOTHING}:
                (slots,) = np.nonzero(context.text[row] == text)
                np.testing.assert_array_equal(slots, slots[0] + np.arange(LENGTHS[text]))
                prompt = PROMPT_LENGTHS[text // GROUP] - 1
                assert context.prompts.number[row] == text // GROUP
                assert context.prompts.real[row].sum() == prompt
                np.testing.assert_array_equal(context.position[row][slots], prompt + np.arange(LENGTHS[text]))
                np.testing.assert_array_equal(
                    chunk.rollout.steps.action[slots, row], batch.rollout.steps.action[: LENGTHS[text], text]
                )
                seen.append(int(text))
    assert sorted(seen) == [0, 1, 2, 8, 9, 10, 11]
    assert int(cut.num_chunks(rows)) == 3  # 9 tokens of the first group are two rows, and 11 of the third are three


def test_prompts_are_shared_where_that_saves_more_than_half_a_row_per_group(machine_with):
    machine_with(chunk_tokens=2 * T)
    _, goal, _, batch = problem()
    assert packing.packing_of(goal.text_reader, batch).own_prompt == 0
    in_three = packing.packing_of(goal.text_reader, batch, num_minibatches=3)
    assert in_three.own_prompt == P  # 4 texts of 3 groups save 6 slots of 7.5
    assert packing.packing_of(goal.text_reader._replace(group_size=1), batch).own_prompt == P
    algorithm = ladder.grpo(num_envs=B, group_size=GROUP)
    policy, critic = language.transformer(ENV, width=8, layers=1, heads=2, kv_heads=1)
    assert make_objective(policy, critic, algorithm).text_reader.read_prompts is None


@pytest.mark.full
def test_seeds_by_vmap_share_their_own_prompts(machine_with):
    machine_with(chunk_tokens=2 * T)
    _, goal, params, batch = problem()
    other = batch._replace(weight=batch.weight.at[:, :4].set(0))
    mask = batch.rollout.loss_mask.at[:, :4].set(0)
    other = other._replace(rollout=batch.rollout._replace(loss_mask=mask))
    both = jax.tree.map(lambda *x: jnp.stack(x), batch, other)
    step = partial(update.gradient_step, goal, update.sgd(), 1.0, params, ())
    together = tiny.jit(jax.vmap(step, (0, None)))(both, jax.random.key(0))[0]
    for i, alone in enumerate((batch, other)):
        expected = tiny.jit(step)(alone, jax.random.key(0))[0]
        found = jax.tree.map(lambda x, i=i: x[i], together)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, expected)


def test_many_prompts_are_read_in_chunks(machine_with):
    _, goal, params, batch = problem(seed=0)
    prompts = jax.tree.map(lambda x: x[::GROUP], batch.rollout.episodes.context)
    whole = tiny.jit(partial(shared_prompts.read_all, goal.text_reader))(prompts, params)
    machine_with(chunk_tokens=P)
    assert shared_prompts.chunks_of_prompts(prompts) == N
    one_by_one = tiny.jit(lambda *x: shared_prompts.read_all(goal.text_reader, *x))(prompts, params)
    # Sums of terms as large as the largest number, 4.5, in another order: some processors differ in its last two bits.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), one_by_one, whole)


def test_prompts_of_several_chunks_are_read_again_for_the_gradient(machine_with):
    """So that the layers of one chunk at a time are in memory; of a single chunk they are kept."""
    _, goal, params, batch = problem(seed=0)
    prompts = jax.tree.map(lambda x: x[::GROUP], batch.rollout.episodes.context)
    read = partial(shared_prompts.read_all, goal.text_reader, prompts)
    weights = sum(x.size for x in jax.tree.leaves(params))

    def kept() -> int:
        """Numbers that the gradient needs, the parameters not among them."""
        backwards = jax.eval_shape(lambda params: jax.vjp(read, params)[1], params)
        return sum(x.size for x in jax.tree.leaves(backwards)) - weights

    whole = kept()
    machine_with(chunk_tokens=P)
    assert kept() < whole / 4


def test_what_chunks_add_up_for_prompts_is_float32_in_every_arithmetic():
    _, goal, params, batch = problem(network={"dtype": "bfloat16"})
    prompts = jax.tree.map(lambda x: x[::GROUP], batch.rollout.episodes.context)
    as_read = jax.eval_shape(goal.text_reader.read_prompts, params, prompts)
    memories = jax.eval_shape(partial(shared_prompts.read_all, goal.text_reader), prompts, params)
    assert {x.dtype for x in jax.tree.leaves(as_read)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(memories)} == {jnp.dtype(jnp.float32)}
    assert jax.tree.map(jnp.shape, memories) == jax.tree.map(jnp.shape, as_read)
