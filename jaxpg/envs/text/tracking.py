"""Problems of tracking a state through a long input, for which a model of fixed depth needs a scratchpad.

Parity is the word problem of the group of two elements. That of the permutations of five objects is complete for NC¹
(Barrington 1989), a class believed to be beyond constant-depth transformers; with a scratchpad they solve it
(Merrill & Sabharwal 2023, 2024).
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.envs.text.generated import Problems, TaskSettings, exact_match, make_task
from jaxpg.envs.text.problems import Word, length_range, sample_word
from jaxpg.envs.text.task import Task
from jaxpg.envs.text.token_arrays import ZERO, A, join_rows, pack
from jaxpg.envs.text.vocabulary import PAD
from jaxpg.errors import UserError
from jaxpg.types import Array, Key


class Swaps(NamedTuple):
    """A series of swaps of two positions.

    places: [K, 2] int32, the two positions of each, counted from 0, the lower first.
    length: [] int32, the number of swaps.
    """

    places: Array
    length: Array


def parity(
    *,
    length: int = 12,
    min_length: int | None = None,
    split: str = "train",
    think: bool = False,
    scratchpad_share: float = 1.0,
    max_tokens: int | None = None,
) -> Task:
    """The parity of a string of bits: "01011=" has the answer "1". The scratchpad is the parity after each: "01101".

    Args:
        length: of the longest string, at most 1000.
        min_length: of the shortest string; half of the longest if not given.
        split: train or test; the problems of test are held out.
        think: completions have a scratchpad before the answer.
        scratchpad_share: share of the demonstrations that fill in their scratchpad; the others leave it empty.
        max_tokens: completions are truncated after this many tokens; as many as needed if not given.

    Raises:
        UserError: settings out of range, too few problems, or answers that do not fit in max_tokens.
    """
    shortest = length_range("parity", length, min_length)

    def running_parity(word: Word) -> Array:
        return ZERO + jnp.cumsum(word.tokens == ZERO + 1, dtype=jnp.int32) % 2

    def answer(word: Word) -> Array:
        return running_parity(word)[-1:]

    problems = Problems(
        size=sum(2**k for k in range(shortest, length + 1)),
        sample=lambda key: sample_word(key, shortest, length, ZERO, 2),
        prompt=lambda word: pack(word.tokens, "="),
        answer=answer,
        scratchpad=lambda word: jnp.where(word.tokens == PAD, PAD, running_parity(word)),
        check_answer=exact_match(answer),
    )
    return make_task("parity", problems, TaskSettings(split, think, scratchpad_share, max_tokens))


def permutations(
    *,
    length: int = 6,
    min_length: int | None = None,
    objects: int = 5,
    split: str = "train",
    think: bool = False,
    scratchpad_share: float = 1.0,
    max_tokens: int | None = None,
) -> Task:
    """The row "abcde" after a series of swaps: "12 35 13=" has the answer "eabdc".

    "35" swaps the objects in the third and the fifth position. The scratchpad holds the row after each swap.

    Args:
        length: of the longest series of swaps, at most 1000.
        min_length: of the shortest; half of the longest if not given.
        objects: number of objects, from 3 to 9; 5 is the fewest for which the problem is complete for NC¹.
        split: train or test; the problems of test are held out.
        think: completions have a scratchpad before the answer.
        scratchpad_share: share of the demonstrations that fill in their scratchpad; the others leave it empty.
        max_tokens: completions are truncated after this many tokens; as many as needed if not given.

    Raises:
        UserError: settings out of range, too few problems, or answers that do not fit in max_tokens.
    """
    shortest = length_range("permutations", length, min_length)
    if not 3 <= objects <= 9:
        raise UserError(f"permutations: objects must be from 3 to 9, not {objects!r}.")
    pairs = jnp.array(list(combinations(range(objects), 2)), jnp.int32)

    def sample(key: Key) -> Swaps:
        length_key, swap_key = jax.random.split(key)
        swaps = jax.random.randint(swap_key, (length,), 0, len(pairs))
        return Swaps(pairs[swaps], jax.random.randint(length_key, (), shortest, length + 1))

    def present(problem: Swaps) -> Array:
        return jnp.arange(length) < problem.length

    def answer(problem: Swaps) -> Array:
        return A + _arrangements(problem, objects)[problem.length - 1]

    problems = Problems(
        size=sum(len(pairs) ** k for k in range(shortest, length + 1)),
        sample=sample,
        prompt=lambda problem: pack(join_rows(ZERO + 1 + problem.places, present(problem), " "), "="),
        answer=answer,
        scratchpad=lambda problem: pack(join_rows(A + _arrangements(problem, objects), present(problem), " ")),
        check_answer=exact_match(answer),
        separator=" ",
    )
    return make_task("permutations", problems, TaskSettings(split, think, scratchpad_share, max_tokens))


def _arrangements(problem: Swaps, objects: int) -> Array:
    """The object in each position after each swap, [K, objects]."""

    def step(row: Array, places: Array) -> tuple[Array, Array]:
        row = row.at[places].set(row[places[::-1]])
        return row, row

    _, rows = lax.scan(step, jnp.arange(objects, dtype=jnp.int32), problem.places)
    return rows
