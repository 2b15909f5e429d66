"""The two forms of a completion: an answer alone, or a scratchpad and then an answer, each between its tags.

    ANSWER<eos>
    <think>SCRATCHPAD</think><answer>ANSWER</answer><eos>

The scratchpad may be empty, the answer may not.
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
    """The answer in a completion.

    well_formed: [] bool, whether the completion has exactly the required form.
    found: [] bool, whether there is an answer: the completion ended, and the answer is not empty and has no padding.
    answer: [T], padded after its last token.
    length: [] int32, the number of tokens of the answer.
    """

    well_formed: Array
    found: Array
    answer: Array
    length: Array


def format_completion(answer: Array, scratchpad: Array | None, max_tokens: int) -> Array:
    """A completion `[max_tokens]` in the form with a scratchpad, or without one (None); padding is removed."""
    if scratchpad is None:
        return pack(answer, "<eos>", size=max_tokens)
    return pack("<think>", scratchpad, "</think><answer>", answer, "</answer><eos>", size=max_tokens)


def parse_completion(completion: Array, length: Array, *, think: bool) -> ParsedCompletion:
    """Read the first `length` tokens of a completion `[T]`.

    Without `think` the answer is everything before the end token. With it the answer is the text inside the last pair
    of answer tags, in any position: an <answer> and the </answer> after it, without another answer tag in between.
    A completion without an end token, or with one before its last token, has no answer.
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
    well_formed = _tags_in_place(tokens) & (special == TAGS_LENGTH + 1) if think else special == 1
    return ParsedCompletion(found & well_formed, found, answer, size)


def uses_scratchpad(completion: Array, length: Array) -> Array:
    """[] bool, whether a completion `[T]` begins with a scratchpad that is not empty."""
    return (completion[0] == THINK) & (completion[1] != END_THINK) & (length > 1)


def _last_answer(tokens: Array) -> tuple[Array, Array]:
    """Start and stop of the last answer between tags; (0, 0) if there is none."""
    place = jnp.arange(len(tokens))
    is_tag = (tokens == ANSWER) | (tokens == END_ANSWER)
    last_tag = lax.cummax(jnp.where(is_tag, place, -1))
    previous_tag = jnp.concatenate([jnp.full(1, -1, last_tag.dtype), last_tag[:-1]])
    closes = (tokens == END_ANSWER) & (previous_tag >= 0) & (tokens[previous_tag] == ANSWER)
    stop = jnp.max(jnp.where(closes, place, 0))
    return jnp.where(closes.any(), previous_tag[stop] + 1, 0), stop


def _tags_in_place(tokens: Array) -> Array:
    """Whether the four tags are where they must be; the caller checks that there are no others."""
    following = jnp.concatenate([tokens[1:], jnp.full(1, PAD, tokens.dtype)])
    answer_follows = (tokens == END_THINK) & (following == ANSWER)
    end_follows = (tokens == END_ANSWER) & (following == END)
    return (tokens[0] == THINK) & answer_follows.any() & end_follows.any()
