"""Problems with one right answer: reverse, sort, addition, modular chains.

Texts have no spaces, and a prompt ends in "=". Where problems differ in length, all lengths are equally likely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.envs.text.generated import Problems, TaskSettings, ascending, exact_match, make_task, no_scratchpad
from jaxpg.envs.text.task import Task
from jaxpg.envs.text.token_arrays import ZERO, A, join_rows, numeral, pack
from jaxpg.envs.text.vocabulary import CHARACTERS, PAD
from jaxpg.errors import UserError
from jaxpg.types import Array, Key

PLUS, MINUS, TIMES = (CHARACTERS.id(symbol) for symbol in "+-*")
MAX_LENGTH = 1000


class Word(NamedTuple):
    """A string: tokens `[L]`, padded after its end."""

    tokens: Array


class Sum(NamedTuple):
    """A sum: its two terms `[2]` int32."""

    terms: Array


class Chain(NamedTuple):
    """An expression without precedence.

    operands: [K] int32
    operators: [K] int32, the token before each operand, padding before the first.
    length: [] int32, the number of operands.
    """

    operands: Array
    operators: Array
    length: Array


def reverse(
    *,
    length: int = 5,
    min_length: int | None = None,
    letters: int = 10,
    split: str = "train",
    think: bool = False,
    max_tokens: int | None = None,
) -> Task:
    """A string of letters backwards: "abcd=" has the answer "dcba".

    Args:
        length: of the longest string.
        min_length: of the shortest string; half of the longest if not given.
        letters: size of the alphabet, whose letters are a, b, c and so on.
        split: train or test; the problems of test are held out.
        think: completions have a scratchpad before the answer.
        max_tokens: completions are truncated after this many tokens; as many as needed if not given.

    Raises:
        UserError: settings out of range, too few problems, or answers that do not fit in max_tokens.
    """
    problems = _words("reverse", min_length, length, letters, answer=lambda word: pack(word.tokens[::-1]))
    return make_task("reverse", problems, TaskSettings(split, think, max_tokens=max_tokens))


def sort(
    *,
    length: int = 5,
    min_length: int | None = None,
    letters: int = 10,
    split: str = "train",
    think: bool = False,
    max_tokens: int | None = None,
) -> Task:
    """The letters of a string in the order of the alphabet: "cabb=" has the answer "abbc".

    Args:
        length: of the longest string.
        min_length: of the shortest string; half of the longest if not given.
        letters: size of the alphabet, whose letters are a, b, c and so on.
        split: train or test; the problems of test are held out.
        think: completions have a scratchpad before the answer.
        max_tokens: completions are truncated after this many tokens; as many as needed if not given.

    Raises:
        UserError: settings out of range, too few problems, or answers that do not fit in max_tokens.
    """
    problems = _words("sort", min_length, length, letters, answer=lambda word: pack(jnp.sort(word.tokens)))
    return make_task("sort", problems, TaskSettings(split, think, max_tokens=max_tokens))


def addition(
    *,
    digits: int = 3,
    reversed_answer: bool = False,
    split: str = "train",
    think: bool = False,
    scratchpad_share: float = 1.0,
    max_tokens: int | None = None,
) -> Task:
    """The sum of two numbers: "57+466=" has the answer "523". The scratchpad is the sum, least significant digit first.

    Every number of digits is equally likely. The same terms in the other order belong to the same split.

    Args:
        digits: of the longest term, 1 to 9.
        reversed_answer: the answer is written with its least significant digit first: "325".
        split: train or test; the problems of test are held out.
        think: completions have a scratchpad before the answer.
        scratchpad_share: share of the demonstrations that fill in their scratchpad; the others leave it empty.
        max_tokens: completions are truncated after this many tokens; as many as needed if not given.

    Raises:
        UserError: settings out of range, too few problems, or answers that do not fit in max_tokens.
    """
    if not 1 <= digits <= 9:
        raise UserError(f"addition: digits must be from 1 to 9, not {digits!r}.")

    def sample(key: Key) -> Sum:
        size_key, number_key = jax.random.split(key)
        upper = 10 ** jax.random.randint(size_key, (2,), 1, digits + 1)
        lower = jnp.where(upper == 10, 0, upper // 10)
        return Sum(jax.random.randint(number_key, (2,), lower, upper))

    def reversed_sum(problem: Sum) -> Array:
        return pack(numeral(problem.terms.sum(), digits + 1)[::-1])

    def plain_sum(problem: Sum) -> Array:
        return pack(numeral(problem.terms.sum(), digits + 1))

    answer = reversed_sum if reversed_answer else plain_sum
    problems = Problems(
        size=10**digits * (10**digits + 1) // 2,
        sample=sample,
        prompt=lambda problem: pack(numeral(problem.terms[0], digits), "+", numeral(problem.terms[1], digits), "="),
        answer=answer,
        scratchpad=reversed_sum,
        check_answer=exact_match(answer),
        canonical=lambda problem: Sum(jnp.sort(problem.terms)),
        canonical_prompt=ascending,
    )
    return make_task("addition", problems, TaskSettings(split, think, scratchpad_share, max_tokens))


def modular_chain(
    *,
    terms: int = 4,
    min_terms: int | None = None,
    modulus: int = 10,
    split: str = "train",
    think: bool = False,
    scratchpad_share: float = 1.0,
    max_tokens: int | None = None,
) -> Task:
    """A chain of operations from left to right, without precedence: "3+5*2-4=" has, modulo 10, the answer "2".

    That is ((3 + 5) * 2 - 4) mod m, from 0 to m - 1. The scratchpad holds the value after each operation, modulo m:
    "862", or with commas where the modulus is above 10.

    Args:
        terms: of the longest chain, at least 2.
        min_terms: of the shortest chain; half of the longest, but at least 2, if not given.
        modulus: from 2 to 10000; terms are from 0 to modulus - 1.
        split: train or test; the problems of test are held out.
        think: completions have a scratchpad before the answer.
        scratchpad_share: share of the demonstrations that fill in their scratchpad; the others leave it empty.
        max_tokens: completions are truncated after this many tokens; as many as needed if not given.

    Raises:
        UserError: settings out of range, too few problems, or answers that do not fit in max_tokens.
    """
    shortest = length_range("modular_chain", terms, min_terms, minimum=2, setting="terms")
    if not 2 <= modulus <= 10_000:
        raise UserError(f"modular_chain: modulus must be from 2 to 10000, not {modulus!r}.")
    width = len(str(modulus - 1))

    def sample(key: Key) -> Chain:
        length_key, operand_key, operator_key = jax.random.split(key, 3)
        length = jax.random.randint(length_key, (), shortest, terms + 1)
        operators = jax.random.choice(operator_key, jnp.array([PLUS, MINUS, TIMES], jnp.int32), (terms,))
        return Chain(jax.random.randint(operand_key, (terms,), 0, modulus), operators.at[0].set(PAD), length)

    def rows(numbers: Array) -> Array:
        return jax.vmap(lambda number: numeral(number, width))(numbers)

    def prompt(problem: Chain) -> Array:
        line = jnp.concatenate([problem.operators[:, None], rows(problem.operands)], axis=1)
        return pack(jnp.where((jnp.arange(terms) < problem.length)[:, None], line, PAD).reshape(-1), "=")

    def answer(problem: Chain) -> Array:
        return pack(numeral(_running_values(problem, modulus)[problem.length - 1], width))

    def scratchpad(problem: Chain) -> Array:
        values, present = _running_values(problem, modulus)[1:], jnp.arange(1, terms) < problem.length
        if width == 1:
            return jnp.where(present, ZERO + values, PAD)
        return pack(join_rows(rows(values), present, ","))

    problems = Problems(
        size=sum(modulus**k * 3 ** (k - 1) for k in range(shortest, terms + 1)),
        sample=sample,
        prompt=prompt,
        answer=answer,
        scratchpad=scratchpad,
        check_answer=exact_match(answer),
        separator=None if width == 1 else ",",
    )
    return make_task("modular_chain", problems, TaskSettings(split, think, scratchpad_share, max_tokens))


def length_range(name: str, longest: int, shortest: int | None, *, minimum: int = 1, setting: str = "length") -> int:
    """The shortest length: the one given, or half of the longest, at least `minimum`.

    Raises:
        UserError: not minimum <= shortest <= longest <= MAX_LENGTH.
    """
    shortest = max(minimum, (longest + 1) // 2) if shortest is None else shortest
    if not minimum <= shortest <= longest <= MAX_LENGTH:
        raise UserError(
            f"{name}: {setting} and min_{setting} must be from {minimum} to {MAX_LENGTH}, and min_{setting} at most "
            f"{setting}, not {longest!r} and {shortest!r}."
        )
    return shortest


def sample_word(key: Key, shortest: int, longest: int, first: int, symbols: int) -> Word:
    """Independent uniform tokens `first .. first + symbols - 1`; the length is uniform, too."""
    length_key, token_key = jax.random.split(key)
    length = jax.random.randint(length_key, (), shortest, longest + 1)
    tokens = jax.random.randint(token_key, (longest,), first, first + symbols)
    return Word(jnp.where(jnp.arange(longest) < length, tokens, PAD))


def _words(name: str, shortest: int | None, longest: int, letters: int, answer: Callable[[Word], Array]) -> Problems:
    """Problems whose prompt is a string of letters."""
    min_length = length_range(name, longest, shortest)
    if not 1 <= letters <= 26:
        raise UserError(f"{name}: letters must be from 1 to 26, not {letters!r}.")
    return Problems(
        size=sum(letters**k for k in range(min_length, longest + 1)),
        sample=lambda key: sample_word(key, min_length, longest, A, letters),
        prompt=lambda word: pack(word.tokens, "="),
        answer=answer,
        scratchpad=no_scratchpad,
        check_answer=exact_match(answer),
    )


def _running_values(problem: Chain, modulus: int) -> Array:
    """The value of a chain after each of its operands, [K]."""

    def step(value: Array, term: tuple[Array, Array]) -> tuple[Array, Array]:
        operand, operator = term
        results = [value + operand, value - operand, value * operand]
        value = jnp.select([operator == PLUS, operator == MINUS, operator == TIMES], results, operand) % modulus
        return value, value

    _, values = lax.scan(step, jnp.zeros_like(problem.length), (problem.operands, problem.operators))
    return values
