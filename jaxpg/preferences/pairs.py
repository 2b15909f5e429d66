"""Preference pairs: two completions of one prompt, and which of them a judge prefers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.envs.text import PairData, Task
from jaxpg.errors import UserError, check_record
from jaxpg.models.generation import completion_rollout
from jaxpg.types import Array, Key, Prompt, Rollout, Tree
from jaxpg.user_input.domains import check_scalars, check_whole


class PreferencePair(NamedTuple):
    """One pair.

    prompt: leaves [P].
    chosen, rejected: [T] int32, each with its end token, or truncated without one.
    """

    prompt: Prompt
    chosen: Array
    rejected: Array


class Pairs(NamedTuple):
    """A source of pairs.

    draw(key): a pair to learn from.
    held_out(key): a pair for evaluation, never learned from.
    end: the token that ends a completion.
    all_held_out: the held-out pairs, leaves `[N, ...]`, where there are finitely many.
    """

    draw: Callable[[Key], PreferencePair]
    held_out: Callable[[Key], PreferencePair]
    end: int
    all_held_out: PreferencePair | None = None

    def some_held_out(self, key: Key, number: int) -> PreferencePair:
        """`number` held-out pairs, leaves `[n, ...]`: of stored ones each at most once, all where they are no more."""
        if self.all_held_out is None:
            return jax.vmap(self.held_out)(jax.random.split(key, number))
        size = len(self.all_held_out.chosen)
        if size <= number:
            return self.all_held_out
        which = jax.random.choice(key, size, (number,), replace=False)
        return jax.tree.map(lambda x: x[which], self.all_held_out)


def judged_pairs(
    task: Task,
    held_out: Task,
    true_reward: Callable[[Tree, Array, Array], Array],
    *,
    generate: Callable[[Tree, Key], Array] | None = None,
    sharpness: float = 10.0,
    num_pairs: int | None = None,
) -> Pairs:
    """Pairs from a fallible judge whose reward R is known: P(a preferred to b) = σ(sharpness (R(a) - R(b))).

    This is the model of Bradley and Terry 1952 that a reward model assumes. Two completions of a prompt may be equal:
    such a pair teaches nothing and counts half in an accuracy.

    Args:
        task: the source of prompts.
        held_out: the same task on its held-out prompts.
        true_reward: problem, completion [T], length [] -> [], as a task's `verify` reads a completion.
        generate: problem, key -> completion [T]. By default the demonstrations of the task, which must then differ
            from each other.
        sharpness: how well the judge distinguishes rewards.
        num_pairs: number of pairs to learn from, each judged once and reused; every pair is new if not given.

    Raises:
        UserError: a task that is none, or a number that cannot be.
    """
    for given in (task, held_out):
        check_record("judged_pairs", given, Task, 'envs.make_task("sort")')
    check_scalars({"sharpness": sharpness})
    if num_pairs is not None:
        num_pairs = check_whole("num_pairs", num_pairs)
    write = generate or task.demonstration
    end = task.vocabulary.end

    def judged(task: Task, key: Key) -> PreferencePair:
        draw_key, *write_keys, judge_key = jax.random.split(key, 4)
        problem = task.draw(draw_key)
        a, b = (write(problem, write_key) for write_key in write_keys)
        r_a, r_b = (true_reward(problem, tokens, completion_length(tokens, end)) for tokens in (a, b))
        prefers_a = jax.random.bernoulli(judge_key, jax.nn.sigmoid(sharpness * (r_a - r_b)))
        return PreferencePair(task.prompt(problem), jnp.where(prefers_a, a, b), jnp.where(prefers_a, b, a))

    def draw(key: Key) -> PreferencePair:
        # A pair is a function of its key: num_pairs different keys give num_pairs pairs, and none needs storing.
        if num_pairs is not None:
            key = jax.random.fold_in(jax.random.key(0), jax.random.randint(key, (), 0, num_pairs))
        return judged(task, key)

    return Pairs(draw, partial(judged, held_out), end)


def corrupted_demonstrations(task: Task, *, rate: float = 0.2) -> Callable[[Tree, Key], Array]:
    """A generator for `judged_pairs`: demonstrations in which each token is replaced with probability `rate`.

    The replacement is uniform over the vocabulary. The end token is never replaced, but may also appear earlier.
    """
    end, size = task.vocabulary.end, task.vocabulary.size

    def generate(problem: Tree, key: Key) -> Array:
        demonstration_key, slip_key, token_key = jax.random.split(key, 3)
        tokens = task.demonstration(problem, demonstration_key)
        before_end = jnp.arange(len(tokens)) < completion_length(tokens, end) - 1
        slips = before_end & (jax.random.uniform(slip_key, tokens.shape) < rate)
        return jnp.where(slips, jax.random.randint(token_key, tokens.shape, 0, size), tokens)

    return generate


def stored_pairs(pairs: PairData, held_out: PairData, *, end: int) -> Pairs:
    """Pairs stored in arrays, leaves `[N, ...]`, drawn uniformly with replacement: a batch may hold a pair twice.

    Raises:
        UserError: no pairs to learn from, or none held out.
    """
    if not len(pairs.chosen) or not len(held_out.chosen):
        raise UserError(
            f"There are {len(pairs.chosen)} pairs to learn from and {len(held_out.chosen)} held out, and both are "
            "needed: give more pairs, of more prompts."
        )

    def draw(data: PairData, key: Key) -> PreferencePair:
        i = jax.random.randint(key, (), 0, len(data.chosen))
        return PreferencePair(*jax.tree.map(lambda x: jnp.asarray(x)[i], data))

    all_held_out = PreferencePair(*jax.tree.map(jnp.asarray, held_out))
    return Pairs(partial(draw, pairs), partial(draw, held_out), end, all_held_out)


def interleave_pairs(pairs: PreferencePair, *, end: int) -> Rollout:
    """Pairs, leaves `[B, ...]`, as a rollout of 2B columns: each chosen completion, then its rejected one."""
    prompt = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), pairs.prompt)
    tokens = jnp.stack([pairs.chosen, pairs.rejected], 1)
    return completion_rollout(prompt, tokens.reshape(-1, tokens.shape[-1]), end=end)


def split_pairs(x: Array) -> tuple[Array, Array]:
    """`[2B]`, in the order of `interleave_pairs`, as the values of the chosen and of the rejected ones, `[B]` each."""
    pairs = x.reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def completion_length(tokens: Array, end: int) -> Array:
    """The number of tokens of a completion `[T]` up to and including its end token: [] int32."""
    ended = tokens == end
    return jnp.where(ended.any(), jnp.argmax(ended) + 1, len(tokens)).astype(jnp.int32)
