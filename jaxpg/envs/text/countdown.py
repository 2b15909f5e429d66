"""Countdown: reach a target with given numbers and + - * /, as in the television game.

The solution that a problem was made from is a plan of steps, each of which replaces two numbers by one. The verifier
knows nothing of it: it parses and evaluates what it is given.
"""

from __future__ import annotations

from math import comb
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.envs.text.expression import evaluate_expression
from jaxpg.envs.text.generated import Problems, ascending, make_task, positive
from jaxpg.envs.text.task import Task
from jaxpg.envs.text.token_arrays import fingerprint, join_rows, numeral, pack, tokens_of
from jaxpg.envs.text.vocabulary import CHARACTERS, PAD
from jaxpg.errors import UserError
from jaxpg.types import Array, Key

OPERATORS = tuple(CHARACTERS.id(symbol) for symbol in "+-*/")
PLUS, MINUS, TIMES, OVER = range(4)
"""Places in OPERATORS."""


class Countdown(NamedTuple):
    """A problem and the steps of one solution.

    numbers: [N] int32
    target: [] int32
    pairs: [N - 1, 2] int32, the places of the two numbers that a step takes, left and right; the result takes the
        place of the left one.
    operators: [N - 1] int32, places in OPERATORS.
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

    Problems are made from random expressions, so a solution exists; no step of it leaves the whole numbers from 1 to
    `largest_target`. The scratchpad has its steps: "3*5=15,15+2=17". Completions may be any expression with + - * / and
    parentheses, see `evaluate_expression`, in whole numbers: negative ones are allowed on the way, a division must be
    exact. The fingerprint of an answer is its value, -1 where it is not an expression of the given numbers. The same
    numbers in another order are held out together.

    Args:
        numbers: how many are given, from 2 to 6; usually 3 or 4.
        largest: given numbers are from 1 to this.
        largest_target: the target and all steps of the solution are from 1 to this.
        split: train or test, the problems that are held out.
        think: completions think before they answer.
        scratchpad_share: share of the demonstrations that fill in their scratchpad; the others leave it empty.
        max_tokens: completions are cut off after so many; as many as needed if not given.

    Raises:
        UserError: settings out of range, too few problems, or demonstrations that do not fit.
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
        all_ = jnp.ones(numbers, bool)
        return pack(join_rows(given, all_, " "), ":", numeral(problem.target, target_width), "=")

    problems = Problems(
        size=comb(largest + numbers - 1, numbers),
        sample=sample,
        prompt=prompt,
        answer=lambda problem: _expression(problem, width),
        scratchpad=lambda problem: _steps(problem, target_width),
        judge=_judge,
        canonical=lambda problem: problem._replace(numbers=jnp.sort(problem.numbers)),
        canonical_prompt=ascending,
    )
    return make_task(
        "countdown", problems, split=split, think=think, scratchpad_share=scratchpad_share, max_tokens=max_tokens
    )


def _judge(problem: Countdown, answer: Array, length: Array) -> tuple[Array, Array]:
    legal, value = evaluate_expression(answer, length, problem.numbers)
    return legal & (value == problem.target), jnp.where(legal, positive(fingerprint(value[None])), -1)


def _solvable(key: Key, given: Array, limit: int) -> Countdown:
    """A target that given numbers reach, by joining two random ones until one is left."""
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
        # Of two numbers that allow nothing in this order, the second is the greater: subtract in the other.
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
    """The solution with no more parentheses than it needs."""
    count = len(problem.numbers)
    size = count * width + (count - 1) + 2 * (count - 2)
    texts = jax.vmap(lambda n: pack(numeral(n, width), size=size))(problem.numbers)
    binds = jnp.full(count, 2, jnp.int32)  # how tightly: 0 a sum, 1 a product, 2 a number

    def step(carry: tuple[Array, Array], x: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        texts, binds = carry
        (left, right), operator = x
        bond = (operator >= TIMES).astype(jnp.int32)
        # a-(b+c) and a/(b*c) need theirs. a+(b-c) and a*(b/c) do not: b/c being whole, so is a*b/c.
        on_right = (binds[right] < bond) | ((binds[right] == bond) & ((operator == MINUS) | (operator == OVER)))
        pieces = (*_in_parentheses(texts[left], binds[left] < bond), _sign(operator))
        text = pack(*pieces, *_in_parentheses(texts[right], on_right), size=size)
        return (texts.at[left].set(text), binds.at[left].set(bond)), None

    (texts, _), _ = lax.scan(step, (texts, binds), (problem.pairs, problem.operators))
    return texts[problem.pairs[-1, 0]]


def _in_parentheses(text: Array, needed: Array) -> tuple[Array, Array, Array]:
    return jnp.where(needed, tokens_of("("), PAD), text, jnp.where(needed, tokens_of(")"), PAD)


def _sign(operator: Array) -> Array:
    return jnp.array(OPERATORS, jnp.int32)[operator][None]


def _steps(problem: Countdown, width: int) -> Array:
    """The solution one operation at a time."""

    def step(values: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        (left, right), operator = x
        a, b = values[left], values[right]
        result = _apply(operator, a, b)
        row = [numeral(a, width), _sign(operator), numeral(b, width), tokens_of("="), numeral(result, width)]
        return values.at[left].set(result), jnp.concatenate(row)

    _, rows = lax.scan(step, problem.numbers, (problem.pairs, problem.operators))
    return pack(join_rows(rows, jnp.ones(len(rows), bool), ","))
