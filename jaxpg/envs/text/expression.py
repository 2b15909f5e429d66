"""A parser of arithmetic expressions that is a scan over tokens.

    sum     = product, { ("+" | "-"), product }
    product = factor, { ("*" | "/"), factor }
    factor  = number | "(", sum, ")"

As both levels are evaluated from left to right, everything before a factor inside its parentheses is four numbers: the
sum of the finished products, the sign of the open one, its value, and whether a division follows. An opening
parenthesis pushes them onto a stack.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.envs.text.token_arrays import ZERO
from jaxpg.envs.text.vocabulary import CHARACTERS, END
from jaxpg.types import Array
from jaxpg.vectorize import tree_where

PLUS, MINUS, TIMES, OVER, OPENS, CLOSES = (CHARACTERS.id(symbol) for symbol in "+-*/()")
DEPTH = 8
"""Limit of nested parentheses."""
HUGE = 10_000_000
"""Numbers saturate above this, so that none overflows to one of the given numbers."""


class Frame(NamedTuple):
    """The partial value inside one pair of parentheses: total + sign * product [* or /] next factor."""

    total: Array
    sign: Array
    product: Array
    divides: Array


class ParserState(NamedTuple):
    """The state of the parser between two tokens.

    legal: [] bool, whether there was no error so far.
    operand: [] bool, whether an operand must come next.
    number: [] int32, the number being read, -1 if none is.
    unused: [N] bool, which of the given numbers have not been used.
    frame: Frame of the innermost parentheses.
    stack: Frame of the parentheses around it, leaves [DEPTH].
    depth: [] int32, the number of open parentheses.
    """

    legal: Array
    operand: Array
    number: Array
    unused: Array
    frame: Frame
    stack: Frame
    depth: Array


def evaluate_expression(tokens: Array, length: Array, given: Array) -> tuple[Array, Array]:
    """Parse the first `length` of tokens `[T]` and evaluate them in integers.

    An expression is legal if it follows the grammar above, with no other characters, uses each of the `given` numbers
    [N] exactly once, written without leading zeros, divides only without remainder, and nests parentheses at most
    `DEPTH` deep. The value of a legal expression must fit int32.

    Returns:
        [] bool, whether it is legal, and [] int32, its value, undefined if it is not.
    """
    zero = jnp.zeros((), jnp.int32)
    empty = Frame(total=zero, sign=zero + 1, product=zero + 1, divides=jnp.zeros((), bool))
    parser = ParserState(
        legal=jnp.ones((), bool),
        operand=jnp.ones((), bool),
        number=zero - 1,
        unused=jnp.ones(len(given), bool),
        frame=empty,
        stack=jax.tree.map(lambda x: jnp.full(DEPTH, x), empty),
        depth=zero,
    )
    place = jnp.arange(len(tokens) + 1)
    tokens = jnp.where(place < length, jnp.append(tokens, END), END)

    def step(parser: ParserState, x: tuple[Array, Array]) -> tuple[ParserState, None]:
        token, inside = x
        return tree_where(inside, _step(parser, token, given, empty), parser), None

    parser, _ = lax.scan(step, parser, (tokens, place <= length))
    return parser.legal & ~parser.unused.any() & (parser.depth == 0), parser.frame.total


def _step(parser: ParserState, token: Array, given: Array, empty: Frame) -> ParserState:
    """Read one token; END completes the whole expression."""
    digit = token - ZERO
    is_digit = (digit >= 0) & (digit <= 9)
    parser = tree_where(is_digit, parser, _finish_number(parser, given))
    opens, closes, ends = token == OPENS, token == CLOSES, token == END
    adds, multiplies = (token == PLUS) | (token == MINUS), (token == TIMES) | (token == OVER)
    allowed = jnp.select(
        [is_digit, opens, closes, adds | multiplies | ends],
        [
            parser.operand | (parser.number > 0),  # a digit after 0 would make that a leading zero
            parser.operand & (parser.depth < DEPTH),
            ~parser.operand & (parser.depth > 0),
            ~parser.operand,
        ],
        default=False,
    )
    frame, stack = parser.frame, parser.stack
    value = frame.total + frame.sign * frame.product
    frame = tree_where(adds, empty._replace(total=value, sign=jnp.where(token == PLUS, 1, -1)), frame)
    frame = tree_where(multiplies, frame._replace(divides=token == OVER), frame)
    frame = tree_where(ends, frame._replace(total=value), frame)
    top = jnp.arange(DEPTH) == parser.depth
    stack = jax.tree.map(lambda frames, pushed: jnp.where(opens & top, pushed, frames), stack, frame)
    frame = tree_where(opens, empty, frame)
    enclosing = jax.tree.map(lambda frames: frames[parser.depth - 1], stack)
    reentered, exact = _append_factor(enclosing, value)
    return ParserState(
        legal=parser.legal & allowed & (~closes | exact),
        operand=opens | adds | multiplies,
        number=jnp.where(is_digit, jnp.clip(parser.number, 0, HUGE) * 10 + digit, -1),
        unused=parser.unused,
        frame=tree_where(closes, reentered, frame),
        stack=stack,
        depth=parser.depth + opens - closes,
    )


def _finish_number(parser: ParserState, given: Array) -> ParserState:
    """Mark the number that was being read, if any, as used and append it to the open product."""
    fits = parser.unused & (given == parser.number)
    used = jnp.arange(len(given)) == jnp.argmax(fits)
    frame, exact = _append_factor(parser.frame, parser.number)
    finished = parser._replace(
        legal=parser.legal & fits.any() & exact,
        number=jnp.full_like(parser.number, -1),
        unused=parser.unused & ~used,
        frame=frame,
    )
    return tree_where(parser.number >= 0, finished, parser)


def _append_factor(frame: Frame, factor: Array) -> tuple[Frame, Array]:
    """The frame after one more factor, and whether the division, if it is one, leaves no remainder."""
    divisor = jnp.where(factor == 0, 1, factor)
    exact = ~frame.divides | ((factor != 0) & (frame.product % divisor == 0))
    product = jnp.where(frame.divides, frame.product // divisor, frame.product * factor)
    return frame._replace(product=product), exact
