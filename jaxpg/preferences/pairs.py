"""Preference pairs: two completions of one prompt, and which of them a judge prefers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.envs.text import PairData, Task
from jaxpg.errors import UserError
from jaxpg.models.generation import completion_rollout
from jaxpg.types import Array, Key, Prompt, Rollout, Tree


class PreferencePair(NamedTuple):
    """prompt: leaves [P]. chosen, rejected: [T] int32, each with its end, or cut off without one."""

    prompt: Prompt
    chosen: Array
    rejected: Array


class Pairs(NamedTuple):
    """Where pairs come from.

    draw(key): a pair to learn from.
    held_out(key): one that is never learned from.
    end: the token that ends a completion.
    """

    draw: Callable[[Key], PreferencePair]
    held_out: Callable[[Key], PreferencePair]
    end: int


def judged_pairs(
    task: Task,
    held_out: Task,
    true_reward: Callable[[Tree, Array, Array], Array],
    *,
    generate: Callable[[Tree, Key], Array] | None = None,
    sharpness: float = 10.0,
    num_pairs: int | None = None,
) -> Pairs:
    """Pairs from a judge whose reward is known, and who errs: P(a preferred to b) = σ(sharpness (R(a) - R(b))).

    This is the model of Bradley and Terry 1952 that a reward model assumes.

    Args:
        task: where the prompts come from.
        held_out: the same task on its held-out prompts.
        true_reward: problem, completion [T], length [] -> [], as a task's `verify` reads a completion.
        generate: problem, key -> completion [T]; the demonstrations of the task, which must then differ from each
            other, if not given.
        sharpness: how well the judge tells rewards apart.
        num_pairs: learn from so many pairs, each judged once, drawn again and again; from ever new ones if not given.

    Raises:
        UserError: not a single pair to learn from.
    """
    if num_pairs is not None and num_pairs < 1:
        raise UserError(f"num_pairs must be at least 1, or none for ever new pairs, not {num_pairs}.")
    write = generate or task.demonstration
    end = task.vocabulary.end

    def judged(task: Task, key: Key) -> PreferencePair:
        draw_key, *write_keys, judge_key = jax.random.split(key, 4)
        problem = task.draw(draw_key)
        a, b = (write(problem, write_key) for write_key in write_keys)
        r_a, r_b = (true_reward(problem, tokens, completion_length(tokens, end)) for tokens in (a, b))
        prefers_a = jax.random.bernoulli(judge_key, jax.nn.sigmoid(sharpness * (r_a - r_b)))
        return PreferencePair(task.prompt_of(problem), jnp.where(prefers_a, a, b), jnp.where(prefers_a, b, a))

    def draw(key: Key) -> PreferencePair:
        # A pair is a function of its key, so few keys are few pairs: nothing needs to be stored.
        if num_pairs is not None:
            key = jax.random.fold_in(jax.random.key(0), jax.random.randint(key, (), 0, num_pairs))
        return judged(task, key)

    return Pairs(draw, partial(judged, held_out), end)


def corrupted_demonstrations(task: Task, *, rate: float = 0.2) -> Callable[[Tree, Key], Array]:
    """A generator for `judged_pairs`: demonstrations in which each token may slip into any other, at this `rate`.

    The end stays where it was, or comes earlier.
    """
    end, size = task.vocabulary.end, task.vocabulary.size

    def generate(problem: Tree, key: Key) -> Array:
        demonstration_key, where_key, what_key = jax.random.split(key, 3)
        tokens = task.demonstration(problem, demonstration_key)
        before_end = jnp.arange(len(tokens)) < completion_length(tokens, end) - 1
        slips = before_end & (jax.random.uniform(where_key, tokens.shape) < rate)
        return jnp.where(slips, jax.random.randint(what_key, tokens.shape, 0, size), tokens)

    return generate


def stored_pairs(pairs: PairData, held_out: PairData, *, end: int) -> Pairs:
    """Pairs that lie in arrays, leaves `[N, ...]`.

    Each is drawn for itself, any as likely as any other, so a batch may hold a pair twice.

    Raises:
        UserError: nothing to learn from, or nothing held out.
    """
    if not len(pairs.chosen) or not len(held_out.chosen):
        raise UserError(
            f"There are {len(pairs.chosen)} pairs to learn from and {len(held_out.chosen)} held out, and both are "
            "needed: give more pairs, of more prompts."
        )

    def one_of(data: PairData, key: Key) -> PreferencePair:
        i = jax.random.randint(key, (), 0, len(data.chosen))
        return PreferencePair(*jax.tree.map(lambda x: jnp.asarray(x)[i], data))

    return Pairs(partial(one_of, pairs), partial(one_of, held_out), end)


def interleave_pairs(pairs: PreferencePair, *, end: int) -> Rollout:
    """Pairs, leaves `[B, ...]`, as 2B neighbouring columns, the chosen completion before the rejected one."""
    prompt = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), pairs.prompt)
    tokens = jnp.stack([pairs.chosen, pairs.rejected], 1)
    return completion_rollout(prompt, tokens.reshape(-1, tokens.shape[-1]), end=end)


def split_pairs(x: Array) -> tuple[Array, Array]:
    """What belongs to the chosen and to the rejected ones, `[B]` each, of `[2B]` as `interleave_pairs` lays them."""
    both = x.reshape(-1, 2)
    return both[:, 0], both[:, 1]


def completion_length(tokens: Array, end: int) -> Array:
    """How many tokens of a completion `[T]` count, its end among them: [] int32."""
    ended = tokens == end
    return jnp.where(ended.any(), jnp.argmax(ended) + 1, len(tokens)).astype(jnp.int32)
