"""A parser of arithmetic expressions that is a scan over tokens.

    sum     = product, { ("+" | "-"), product }
    product = factor, { ("*" | "/"), factor }
    factor  = number | "(", sum, ")"

As both levels are evaluated from left to right, what precedes a factor inside its parentheses is four numbers: the
value of the finished products, the sign of the open one, its value, and whether it goes on by division. A parenthesis
puts them on a stack.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.envs.text.token_arrays import ZERO
from jaxpg.envs.text.vocabulary import CHARACTERS, END
from jaxpg.types import Array, Tree

PLUS, MINUS, TIMES, OVER, OPENS, CLOSES = (CHARACTERS.id(symbol) for symbol in "+-*/()")
DEPTH = 8
"""Parentheses may be nested so deep."""
HUGE = 10_000_000
"""Numbers are not read further than this, so that none wraps around to one of the given."""


class Frame(NamedTuple):
    """What was read inside one pair of parentheses: total + sign * product [* or /] what comes."""

    total: Array
    sign: Array
    product: Array
    divides: Array


class ParserState(NamedTuple):
    """Where the parser stands.

    legal: [] bool, whether all is well so far.
    operand: [] bool, whether an operand has to come next.
    number: [] int32, the number under way, -1 if none is.
    unused: [N] bool, which of the given numbers are still to be used.
    frame: Frame of the innermost parentheses.
    stack: Frame of those around it, leaves [DEPTH].
    depth: [] int32, how many there are.
    """

    legal: Array
    operand: Array
    number: Array
    unused: Array
    frame: Frame
    stack: Frame
    depth: Array


def evaluate_expression(tokens: Array, length: Array, given: Array) -> tuple[Array, Array]:
    """Parse the first `length` of tokens `[T]` and evaluate them in whole numbers.

    An expression is legal if it has the grammar above, with no other characters, uses each of the `given` numbers [N]
    exactly once, written without leading zeros, divides only where nothing remains, and nests parentheses at most
    `DEPTH` deep. The value of a legal expression must fit int32; that of another means nothing.

    Returns:
        [] bool, whether it is legal, and [] int32, its value.
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
        return _where(inside, _step(parser, token, given, empty), parser), None

    parser, _ = lax.scan(step, parser, (tokens, place <= length))
    return parser.legal & ~parser.unused.any() & (parser.depth == 0), parser.frame.total


def _step(parser: ParserState, token: Array, given: Array, empty: Frame) -> ParserState:
    """Read one token; END asks for the value of the whole."""
    digit = token - ZERO
    is_digit = (digit >= 0) & (digit <= 9)
    parser = _where(is_digit, parser, _number_ended(parser, given))
    opens, closes, ends = token == OPENS, token == CLOSES, token == END
    adds, multiplies = (token == PLUS) | (token == MINUS), (token == TIMES) | (token == OVER)
    allowed = jnp.select(
        [is_digit, opens, closes, adds | multiplies | ends],
        [
            parser.operand | (parser.number > 0),  # a digit behind 0 would make that a leading zero
            parser.operand & (parser.depth < DEPTH),
            ~parser.operand & (parser.depth > 0),
            ~parser.operand,
        ],
        default=False,
    )
    frame, stack = parser.frame, parser.stack
    value = frame.total + frame.sign * frame.product
    frame = _where(adds, empty._replace(total=value, sign=jnp.where(token == PLUS, 1, -1)), frame)
    frame = _where(multiplies, frame._replace(divides=token == OVER), frame)
    frame = _where(ends, frame._replace(total=value), frame)
    top = jnp.arange(DEPTH) == parser.depth
    stack = jax.tree.map(lambda all_, one: jnp.where(opens & top, one, all_), stack, frame)
    frame = _where(opens, empty, frame)
    around = jax.tree.map(lambda all_: all_[parser.depth - 1], stack)
    reentered, exact = _joined_by(around, value)
    return ParserState(
        legal=parser.legal & allowed & (~closes | exact),
        operand=opens | adds | multiplies,
        number=jnp.where(is_digit, jnp.clip(parser.number, 0, HUGE) * 10 + digit, -1),
        unused=parser.unused,
        frame=_where(closes, reentered, frame),
        stack=stack,
        depth=parser.depth + opens - closes,
    )


def _number_ended(parser: ParserState, given: Array) -> ParserState:
    """The number under way, if there is one, is taken from the given ones and joins the open product."""
    fits = parser.unused & (given == parser.number)
    taken = jnp.arange(len(given)) == jnp.argmax(fits)
    frame, exact = _joined_by(parser.frame, parser.number)
    after = parser._replace(
        legal=parser.legal & fits.any() & exact,
        number=jnp.full_like(parser.number, -1),
        unused=parser.unused & ~taken,
        frame=frame,
    )
    return _where(parser.number >= 0, after, parser)


def _joined_by(frame: Frame, factor: Array) -> tuple[Frame, Array]:
    """The frame after one more factor, and whether it is whole."""
    divisor = jnp.where(factor == 0, 1, factor)
    exact = ~frame.divides | ((factor != 0) & (frame.product % divisor == 0))
    product = jnp.where(frame.divides, frame.product // divisor, frame.product * factor)
    return frame._replace(product=product), exact


def _where(condition: Array, on_true: Tree, on_false: Tree) -> Any:
    return jax.tree.map(partial(jnp.where, condition), on_true, on_false)
