"""A toy for learning from preferences: summaries of strings of letters, whose quality is known."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.envs.text.generated import Problems, TaskSettings, exact_match, make_task, no_scratchpad
from jaxpg.envs.text.task import Task
from jaxpg.envs.text.token_arrays import A, pack
from jaxpg.envs.text.vocabulary import CHARACTERS, END, PAD
from jaxpg.errors import UserError
from jaxpg.types import Array, Key

IMPORTANT = 8
"""The first letters of the alphabet, a to h, are the content of a text; as many from its end, s to z, are filler."""
TOKEN_PENALTY, FOREIGN_PENALTY = 0.7, 0.3
FILLER = CHARACTERS.id("z") + 1 - IMPORTANT


class Text(NamedTuple):
    """A text: letters `[L]` int32, without padding."""

    letters: Array


def summarise_toy(
    *,
    length: int = 10,
    drop: float = 0.3,
    extra: float = 0.1,
    slip: float = 0.05,
    split: str = "train",
    max_tokens: int | None = 16,
) -> Task:
    """Summarise a text: "xacxaubs=" has the perfect summary "acb", its important letters once each, in their order.

    `verify` accepts only the perfect summary; `true_reward` measures the quality of any other. Demonstrations are
    imperfect: they omit some letters, copy unimportant ones and sometimes replace one by another. They omit more than
    they add and hardly ever repeat a letter, so among them longer is better. A reward model trained
    on them sees no evidence against ever longer summaries, and `max_tokens` leaves room for them.

    Args:
        length: letters of a text.
        drop: probability that a demonstration omits an important letter.
        extra: probability that it copies an unimportant letter of the text.
        slip: probability that a letter is replaced by a random one.
        split: train or test; the problems of test are held out.
        max_tokens: summaries are truncated after this many tokens; as many as a text has, and the end, if not given.

    Raises:
        UserError: settings out of range, or answers that do not fit in max_tokens.
    """
    if length < 3 or not all(0 <= p <= 1 for p in (drop, extra, slip)):
        raise UserError(
            f"summarise_toy needs a length of at least 3 and probabilities drop, extra and slip from 0 to 1, not "
            f"{length}, {drop}, {extra} and {slip}."
        )

    def sample(key: Key) -> Text:
        letter_key, kind_key, place_key = jax.random.split(key, 3)
        # Every text has content: one letter, in a random place, is always important.
        important = jax.random.bernoulli(kind_key, 0.5, (length,))
        important = important.at[jax.random.randint(place_key, (), 0, length)].set(True)
        return Text(_letter(jax.random.randint(letter_key, (length,), 0, IMPORTANT), important))

    def answer(text: Text) -> Array:
        return pack(jnp.where(_first_important(text), text.letters, PAD))

    problems = Problems(
        size=IMPORTANT**length,
        sample=sample,
        prompt=lambda text: pack(text.letters, "="),
        answer=answer,
        scratchpad=no_scratchpad,
        check_answer=exact_match(answer),
    )
    task = make_task("summarise_toy", problems, TaskSettings(split, max_tokens=max_tokens))

    def demonstration(text: Text, key: Key) -> Array:
        keep_key, slip_key, kind_key, letter_key = jax.random.split(key, 4)
        filler = text.letters >= FILLER
        copied = jax.random.bernoulli(keep_key, jnp.where(_first_important(text), 1 - drop, extra * filler))
        slips = jax.random.bernoulli(slip_key, slip, (length,))
        other = _letter(
            jax.random.randint(letter_key, (length,), 0, IMPORTANT), jax.random.bernoulli(kind_key, 0.5, (length,))
        )
        written = jnp.where(slips, other, text.letters)
        return pack(jnp.where(copied, written, PAD), "<eos>", size=task.max_tokens)

    return task._replace(demonstration=demonstration, true_reward=true_reward)


def true_reward(text: Text, completion: Array, length: Array) -> Array:
    """The quality of a summary, from -1 to 1: [] float32.

        share of the important letters that it mentions - (0.7 tokens + 0.3 foreign tokens) / T

    over its tokens without the end, of the first `length` of `completion` `[T]`. Foreign tokens are those that the text
    does not have. Repeating a letter costs and gains nothing, and the order does not matter.
    """
    place = jnp.arange(len(completion))
    written = (place < length) & (completion != END)
    same_letter = (text.letters[:, None] == completion[None, :]) & written[None, :]
    important = _first_important(text)
    covered = (important & same_letter.any(1)).sum() / jnp.maximum(important.sum(), 1)
    foreign = written & ~same_letter.any(0)
    penalty = (TOKEN_PENALTY * written.sum() + FOREIGN_PENALTY * foreign.sum()) / len(completion)
    return (covered - penalty).astype(jnp.float32)


def _letter(index: Array, important: Array) -> Array:
    return (index + jnp.where(important, A, FILLER)).astype(jnp.int32)


def _first_important(text: Text) -> Array:
    """[L] bool, the first occurrence of each important letter."""
    letters = text.letters
    repeated = jnp.tril(letters[:, None] == letters[None, :], -1).any(1)
    return (letters < A + IMPORTANT) & ~repeated
