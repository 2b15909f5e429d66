"""The two forms of a completion: an answer alone, or thoughts and then an answer, each between its tags.

    ANSWER<eos>
    <think>THOUGHTS</think><answer>ANSWER</answer><eos>

Thoughts may be empty, an answer may not.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxpg.envs.text.token_arrays import pack
from jaxpg.envs.text.vocabulary import CHARACTERS, END, PAD
from jaxpg.types import Array

THINK, END_THINK, ANSWER, END_ANSWER = (CHARACTERS.id(f"<{tag}>") for tag in ("think", "/think", "answer", "/answer"))
TAGS_LENGTH = 4


class ParsedCompletion(NamedTuple):
    """What stands in a completion.

    formed: [] bool, whether it has exactly the form that was asked for.
    found: [] bool, whether there is an answer: the completion ended, and what it gave is neither empty nor padding.
    answer: [T], padded behind its end.
    length: [] int32, how many tokens the answer has.
    """

    formed: Array
    found: Array
    answer: Array
    length: Array


def format_completion(answer: Array, thoughts: Array | None, max_tokens: int) -> Array:
    """A completion `[max_tokens]` in the form without thoughts (None) or with them; both may hold padding."""
    if thoughts is None:
        return pack(answer, "<eos>", size=max_tokens)
    return pack("<think>", thoughts, "</think><answer>", answer, "</answer><eos>", size=max_tokens)


def parse_completion(completion: Array, length: Array, *, think: bool) -> ParsedCompletion:
    """Read the first `length` tokens of a completion `[T]`.

    Without `think` the answer is all that precedes the end. With it the answer is what the last pair of answer tags
    encloses, wherever that stands: an <answer> and the </answer> behind it, without another answer tag in between.
    A completion that did not end, and one with an end before its last token, gave no answer.
    """
    place = jnp.arange(len(completion))
    tokens = jnp.where(place < length, completion, PAD)
    ended = (tokens == END).sum() == 1
    ended &= ((tokens == END) & (place == length - 1)).any()
    start, stop = _last_answer(tokens) if think else (jnp.zeros((), jnp.int32), length - 1)
    size = jnp.maximum(stop - start, 0)
    answer = jnp.where(place < size, tokens.at[start + place].get(mode="fill", fill_value=PAD), PAD)
    found = ended & (size > 0) & ((answer != PAD) == (place < size)).all()
    special = ((tokens <= END_ANSWER) & (place < length)).sum()  # padding, end and tags come first in the vocabulary
    formed = _is_thought_through(tokens) & (special == TAGS_LENGTH + 1) if think else special == 1
    return ParsedCompletion(found & formed, found, answer, size)


def uses_scratchpad(completion: Array, length: Array) -> Array:
    """[] bool, whether a completion `[T]` begins with a scratchpad that is not empty."""
    return (completion[0] == THINK) & (completion[1] != END_THINK) & (length > 1)


def _last_answer(tokens: Array) -> tuple[Array, Array]:
    """Where the last answer between tags begins and ends; (0, 0) if there is none."""
    place = jnp.arange(len(tokens))
    is_tag = (tokens == ANSWER) | (tokens == END_ANSWER)
    newest = lax.cummax(jnp.where(is_tag, place, -1))
    before = jnp.concatenate([jnp.full(1, -1, newest.dtype), newest[:-1]])
    closes = (tokens == END_ANSWER) & (before >= 0) & (tokens[before] == ANSWER)
    stop = jnp.max(jnp.where(closes, place, 0))
    return jnp.where(closes.any(), before[stop] + 1, 0), stop


def _is_thought_through(tokens: Array) -> Array:
    """Whether every tag is where it should be; that there are no others is for the caller to see."""
    after = jnp.concatenate([tokens[1:], jnp.full(1, PAD, tokens.dtype)])
    turns = (tokens == END_THINK) & (after == ANSWER)
    closes = (tokens == END_ANSWER) & (after == END)
    return (tokens[0] == THINK) & turns.any() & closes.any()
