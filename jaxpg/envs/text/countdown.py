"""Countdown: reach a target with given numbers and + - * /, as in the television game.

A problem is made from a solution: a series of steps, each of which replaces two numbers by one. The verifier does not
use it: it parses and evaluates the expression that a completion has.
"""

from __future__ import annotations

from math import comb
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.envs.text.expression import evaluate_expression
from jaxpg.envs.text.generated import Problems, TaskSettings, ascending, make_task
from jaxpg.envs.text.task import Task
from jaxpg.envs.text.token_arrays import fingerprint, join_rows, non_negative, numeral, pack, tokens_of
from jaxpg.envs.text.vocabulary import CHARACTERS, PAD
from jaxpg.errors import UserError
from jaxpg.types import Array, Key

OPERATORS = tuple(CHARACTERS.id(symbol) for symbol in "+-*/")
PLUS, MINUS, TIMES, OVER = range(4)
"""Indices into OPERATORS."""


class Countdown(NamedTuple):
    """A problem and the steps of one solution.

    numbers: [N] int32
    target: [] int32
    pairs: [N - 1, 2] int32, the indices of the left and the right operand of each step; the result replaces the left
        one.
    operators: [N - 1] int32, indices into OPERATORS.
    """

    numbers: Array
    target: Array
    pairs: Array
    operators: Array


def countdown(
    *,
    numbers: int = 3,
    largest: int = 20,
    largest_target: int = 99,
    split: str = "train",
    think: bool = False,
    scratchpad_share: float = 1.0,
    max_tokens: int | None = None,
) -> Task:
    """An expression with a given value that uses each given number exactly once: "3 5 2:17=" is solved by "3*5+2".

    Problems are made from random expressions, so a solution exists, and all its intermediate results are from 1 to
    `largest_target`. The scratchpad has its steps: "3*5=15,15+2=17". An answer may be any expression in integers with
    + - * / and parentheses (`evaluate_expression`): intermediate results may be negative, divisions must be exact. The
    fingerprint of an answer is that of its value, -1 where it is not an expression of the given numbers. The same
    numbers in another order belong to the same split.

    Args:
        numbers: how many numbers are given, from 2 to 6; usually 3 or 4.
        largest: given numbers are from 1 to this.
        largest_target: the target and all steps of the solution are from 1 to this.
        split: train or test; the problems of test are held out.
        think: completions have a scratchpad before the answer.
        scratchpad_share: share of the demonstrations that fill in their scratchpad; the others leave it empty.
        max_tokens: completions are truncated after this many tokens; as many as needed if not given.

    Raises:
        UserError: settings out of range, too few problems, or answers that do not fit in max_tokens.
    """
    if not 2 <= numbers <= 6 or not 2 <= largest <= largest_target <= 9999:
        raise UserError(
            "countdown: numbers must be from 2 to 6, and 2 <= largest <= largest_target <= 9999, "
            f"not {numbers!r}, {largest!r} and {largest_target!r}."
        )
    if largest**numbers >= 2**31:
        raise UserError(f"countdown: the product of {numbers} numbers up to {largest} may exceed 2^31: lower one.")
    width, target_width = len(str(largest)), len(str(largest_target))

    def sample(key: Key) -> Countdown:
        number_key, step_key = jax.random.split(key)
        given = jax.random.randint(number_key, (numbers,), 1, largest + 1)
        return _solvable(step_key, given, largest_target)

    def prompt(problem: Countdown) -> Array:
        given = jax.vmap(lambda n: numeral(n, width))(problem.numbers)
        return pack(join_rows(given, jnp.ones(numbers, bool), " "), ":", numeral(problem.target, target_width), "=")

    problems = Problems(
        size=comb(largest + numbers - 1, numbers),
        sample=sample,
        prompt=prompt,
        answer=lambda problem: _expression(problem, width),
        scratchpad=lambda problem: _steps(problem, target_width),
        check_answer=_check_answer,
        separator=",",
        one_scratchpad=False,
        canonical=lambda problem: problem._replace(numbers=jnp.sort(problem.numbers)),
        canonical_prompt=ascending,
    )
    return make_task("countdown", problems, TaskSettings(split, think, scratchpad_share, max_tokens))


def _check_answer(problem: Countdown, answer: Array, length: Array) -> tuple[Array, Array]:
    legal, value = evaluate_expression(answer, length, problem.numbers)
    return legal & (value == problem.target), jnp.where(legal, non_negative(fingerprint(value[None])), -1)


def _solvable(key: Key, given: Array, limit: int) -> Countdown:
    """A problem with the given numbers: two random ones are combined until one is left, the target."""
    steps = len(given) - 1
    pair_key, operator_key = jax.random.split(key)
    scores = jax.random.uniform(pair_key, (steps, len(given)))
    noise = jax.random.gumbel(operator_key, (steps, len(OPERATORS)))

    def step(carry: tuple[Array, Array], x: tuple[Array, Array]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        values, left = carry
        scores, noise = x
        _, pair = lax.top_k(jnp.where(left, scores, -1.0), 2)
        a, b = values[pair[0]], values[pair[1]]
        allowed = jnp.stack([a + b <= limit, a > b, a * b <= limit, a % b == 0])
        # If no operator is allowed in this order, the second number is the greater: subtract in the other order.
        pair = jnp.where(allowed.any(), pair, pair[::-1])
        allowed = jnp.where(allowed.any(), allowed, jnp.arange(len(OPERATORS)) == MINUS)
        operator = jnp.argmax(jnp.where(allowed, noise, -jnp.inf))
        result = _apply(operator, values[pair[0]], values[pair[1]])
        values, left = values.at[pair[0]].set(result), left.at[pair[1]].set(False)
        return (values, left), (pair.astype(jnp.int32), operator.astype(jnp.int32))

    (values, left), (pairs, operators) = lax.scan(step, (given, jnp.ones(len(given), bool)), (scores, noise))
    return Countdown(given, values[jnp.argmax(left)], pairs, operators)


def _apply(operator: Array, a: Array, b: Array) -> Array:
    return jnp.stack([a + b, a - b, a * b, a // b])[operator]


def _expression(problem: Countdown, width: int) -> Array:
    """The solution as an expression with only the parentheses that it needs."""
    count = len(problem.numbers)
    size = count * width + (count - 1) + 2 * (count - 2)
    texts = jax.vmap(lambda n: pack(numeral(n, width), size=size))(problem.numbers)
    precedences = jnp.full(count, 2, jnp.int32)  # 0 a sum, 1 a product, 2 a number

    def step(carry: tuple[Array, Array], x: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        texts, precedences = carry
        (left, right), operator = x
        precedence = (operator >= TIMES).astype(jnp.int32)
        # a-(b+c) and a/(b*c) need parentheses. a+(b-c) and a*(b/c) do not: as b/c is an integer, so is a*b/c.
        ordered = (operator == MINUS) | (operator == OVER)
        on_right = (precedences[right] < precedence) | ((precedences[right] == precedence) & ordered)
        pieces = (*_in_parentheses(texts[left], precedences[left] < precedence), _symbol(operator))
        text = pack(*pieces, *_in_parentheses(texts[right], on_right), size=size)
        return (texts.at[left].set(text), precedences.at[left].set(precedence)), None

    (texts, _), _ = lax.scan(step, (texts, precedences), (problem.pairs, problem.operators))
    return texts[problem.pairs[-1, 0]]


def _in_parentheses(text: Array, needed: Array) -> tuple[Array, Array, Array]:
    return jnp.where(needed, tokens_of("("), PAD), text, jnp.where(needed, tokens_of(")"), PAD)


def _symbol(operator: Array) -> Array:
    return jnp.array(OPERATORS, jnp.int32)[operator][None]


def _steps(problem: Countdown, width: int) -> Array:
    """The solution one step at a time: "3*5=15,15+2=17"."""

    def step(values: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        (left, right), operator = x
        a, b = values[left], values[right]
        result = _apply(operator, a, b)
        row = [numeral(a, width), _symbol(operator), numeral(b, width), tokens_of("="), numeral(result, width)]
        return values.at[left].set(result), jnp.concatenate(row)

    _, rows = lax.scan(step, problem.numbers, (problem.pairs, problem.operators))
    return pack(join_rows(rows, jnp.ones(len(rows), bool), ","))
