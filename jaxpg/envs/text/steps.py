"""The steps of a completion: the items of its scratchpad, and last its answer. Where they end, and which are right.

    <think>8 6 2</think><answer>2</answer><eos>
            ^ ^ ^                         ^      four steps, by the tokens that end them

An item ends with the separator behind it, the last one with </think>. Without a separator every token is an item.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxpg.envs.text.completion import END_THINK, THINK
from jaxpg.envs.text.vocabulary import PAD
from jaxpg.types import Array


class _Scratchpad(NamedTuple):
    """Where the scratchpad of a completion is, `[T]` bool each.

    inside: the tokens between <think>, which is the first token, and the first </think> or the end of the completion.
    closes: that </think>, where there is something to close.
    """

    inside: Array
    closes: Array


def scratchpad_steps(tokens: Array, length: Array, *, separator: int | None) -> Array:
    """[T] bool, where a step of the first `length` [] tokens of a completion `[T]` ends.

    The last step goes on to the last token, whatever stands there, so a completion without a scratchpad is one step.
    """
    return _item_ends(tokens, _scratchpad(tokens, length), separator) | (jnp.arange(len(tokens)) == length - 1)


def check_scratchpad(tokens: Array, length: Array, right: Array, *, separator: int | None) -> Array:
    """[T] float32, 1 where an item of the scratchpad ends that `right` `[S]` has in the same place, else 0.

    An item counts for itself: after a wrong one the next may be right again, and all items beyond those of `right` are
    wrong. `right` has padding only behind its last token.
    """
    scratchpad = _scratchpad(tokens, length)
    ends = _item_ends(tokens, scratchpad, separator)
    if separator is None:
        expected = _at(right, jnp.arange(len(tokens)) - 1)
        return (ends & (tokens == expected) & (expected != PAD)).astype(jnp.float32)
    item, offset = _items(scratchpad.inside & (tokens == separator))
    separators = right == separator
    expected = _at(right, _start_of(separators, item) + offset)
    expected_end = (expected == separator) | (expected == PAD)
    there = item < (right != PAD).any() + separators.sum()
    fits = there & jnp.where(ends, expected_end, (tokens == expected) & ~expected_end)
    wrong = jnp.cumsum((scratchpad.inside | ends) & ~fits)
    before = jnp.concatenate([jnp.zeros(1, wrong.dtype), lax.cummax(jnp.where(ends, wrong, 0))[:-1]])
    return (ends & (wrong == before)).astype(jnp.float32)


def _scratchpad(tokens: Array, length: Array) -> _Scratchpad:
    place = jnp.arange(len(tokens))
    written = (place < length) & (tokens[0] == THINK)
    closed = jnp.cumsum(written & (tokens == END_THINK))
    inside = written & (closed == 0) & (place > 0)
    return _Scratchpad(inside, written & (tokens == END_THINK) & (closed == 1) & (place > 1))


def _item_ends(tokens: Array, scratchpad: _Scratchpad, separator: int | None) -> Array:
    """[T] bool, the tokens that end an item."""
    if separator is None:
        return scratchpad.inside
    return scratchpad.inside & (tokens == separator) | scratchpad.closes


def _items(separators: Array) -> tuple[Array, Array]:
    """The number of the item that each token belongs to, and its place in the item; a separator ends its own.

    The first item begins behind <think>, at token 1.
    """
    place = jnp.arange(len(separators))
    item = jnp.cumsum(separators) - separators
    begins = jnp.concatenate([jnp.ones(1, place.dtype), lax.cummax(jnp.where(separators, place + 1, 1))[:-1]])
    return item, place - begins


def _start_of(separators: Array, item: Array) -> Array:
    """Where the items of these numbers begin; beyond the end for items that are not there."""
    return jnp.where(item == 0, 0, jnp.searchsorted(jnp.cumsum(separators), item) + 1)


def _at(tokens: Array, place: Array) -> Array:
    """The tokens in these places, padding beyond both ends."""
    found = tokens.at[place].get(mode="fill", fill_value=PAD)
    return jnp.where(place < 0, PAD, found)
