"""Tasks whose problems are drawn at random: what one has to say of itself, and what they all share.

That is the two forms of a completion, the verdict, and the split: about one problem in ten is held out, by a hash of
its prompt, so whether a problem is held out depends on nothing but the problem.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.envs.text import completion
from jaxpg.envs.text.jsonl_reader import pad_rows
from jaxpg.envs.text.task import Task, Verdict
from jaxpg.envs.text.token_arrays import fingerprint
from jaxpg.envs.text.vocabulary import CHARACTERS, PAD
from jaxpg.errors import UserError
from jaxpg.types import Array, Key, Tree

HELD_OUT = 10
"""One problem in so many."""
FEWEST = 100
"""Of fewer problems than this, chance might hold out none."""
SLACK = 16
"""Tokens for thoughts beyond those that the longest demonstration writes."""


class Problems(NamedTuple):
    """Problems, one at a time; texts are in CHARACTERS and may hold padding only at their ends.

    size: how many there are, or a number that is not greater.
    sample(key): one of them, held out or not.
    prompt(problem): [P]
    answer(problem): a right answer.
    scratchpad(problem): what a demonstration thinks.
    judge(problem, answer, length): whether an answer [T] of so many tokens is right, and its fingerprint, [] int32.
    canonical(problem): the one problem that stands for all that are to be held out together.
    canonical_prompt(text): the prompt of that one, from a prompt as text, on the host.
    """

    size: int
    sample: Callable[[Key], Tree]
    prompt: Callable[[Tree], Array]
    answer: Callable[[Tree], Array]
    scratchpad: Callable[[Tree], Array]
    judge: Callable[[Tree, Array, Array], tuple[Array, Array]]
    canonical: Callable[[Tree], Tree] = lambda problem: problem
    canonical_prompt: Callable[[str], str] = lambda text: text


def no_scratchpad(problem: Tree) -> Array:
    """The scratchpad of a task that needs none."""
    return jnp.zeros(0, jnp.int32)


def exact_match(answer: Callable[[Tree], Array]) -> Callable[[Tree, Array, Array], tuple[Array, Array]]:
    """A judge for problems with one answer: token by token the same. The fingerprint is of the text."""

    def judge(problem: Tree, given: Array, length: Array) -> tuple[Array, Array]:
        right = answer(problem)
        right = jnp.pad(right, (0, len(given) - len(right)), constant_values=PAD)
        return (given == right).all(), positive(fingerprint(given))

    return judge


def positive(hashed: Array) -> Array:
    """A hash as an int32 that is not negative."""
    return (hashed >> 1).astype(jnp.int32)


def make_task(
    name: str, problems: Problems, *, split: str, think: bool, scratchpad_share: float = 1.0, max_tokens: int | None
) -> Task:
    """The task of solving such problems.

    Args:
        name: what it is called.
        problems: what it consists of.
        split: "train" or "test".
        think: whether a completion thinks before it answers.
        scratchpad_share: share of the demonstrations that fill in their scratchpad.
        max_tokens: where completions are cut off; None for as many as the longest demonstration has, and with `think`
            some more.

    Raises:
        UserError: no such split, too few problems to hold some out, demonstrations that do not fit.
    """
    if split not in ("train", "test"):
        raise UserError(f"{name}: split must be train or test, not {split!r}.")
    if problems.size < FEWEST:
        raise UserError(
            f"{name}: with these settings there are only {problems.size} problems, too few to hold some out. "
            f"Choose settings with at least {FEWEST}."
        )
    if not 0 <= scratchpad_share <= 1 or (scratchpad_share < 1 and not think):
        raise UserError(
            f"{name}: scratchpad_share is a share from 0 to 1, of use only with think = true, not {scratchpad_share!r}."
        )
    any_problem = jax.eval_shape(problems.sample, jax.random.key(0))
    (prompt_length,), (answer_length,), (thoughts_length,) = (
        jax.eval_shape(f, any_problem).shape for f in (problems.prompt, problems.answer, problems.scratchpad)
    )
    longest = answer_length + 1 + (completion.TAGS_LENGTH + thoughts_length if think else 0)
    if max_tokens is None:
        max_tokens = longest + (SLACK if think else 0)
    if max_tokens < longest:
        raise UserError(f"{name}: demonstrations have up to {longest} tokens, so max_tokens = {max_tokens} is too few.")

    def demonstration(problem: Tree, key: Key) -> Array:
        if not think:
            return completion.format_completion(problems.answer(problem), None, max_tokens)
        thoughts = problems.scratchpad(problem)
        thoughts = jnp.where(jax.random.uniform(key) < scratchpad_share, thoughts, PAD)
        return completion.format_completion(problems.answer(problem), thoughts, max_tokens)

    def verify(problem: Tree, tokens: Array, length: Array) -> Verdict:
        reading = completion.parse_completion(tokens, length, think=think)
        right, answer = problems.judge(problem, reading.answer, reading.length)
        return Verdict(
            accuracy=(reading.found & right).astype(jnp.float32),
            format=reading.formed.astype(jnp.float32),
            answer=jnp.where(reading.found, answer, -1),
            scratchpad_used=completion.uses_scratchpad(tokens, length).astype(jnp.float32) if think else (),
        )

    def draw(key: Key) -> Tree:
        return sample_split(problems, key, held_out=split == "test")

    def held_out(prompts: Sequence[str]) -> list[bool]:
        tokens = jnp.asarray(pad_rows([CHARACTERS.encode(problems.canonical_prompt(text)) for text in prompts]))
        return (jax.vmap(fingerprint)(tokens) % HELD_OUT == 0).tolist()

    return Task(name, CHARACTERS, prompt_length, max_tokens, draw, problems.prompt, demonstration, verify, held_out)


def ascending(prompt: str) -> str:
    """The prompt with the numbers before its first ":" or "=" in ascending order: "9 4 6:18=" becomes "4 6 9:18="."""
    given = re.split("[:=]", prompt)[0]
    numbers = iter(sorted(re.findall("[0-9]+", given), key=int))
    return re.sub("[0-9]+", lambda _: next(numbers), given) + prompt[len(given) :]


def is_held_out(problems: Problems, problem: Tree) -> Array:
    """[] bool, whether a problem belongs to the test split."""
    return fingerprint(problems.prompt(problems.canonical(problem))) % HELD_OUT == 0


def sample_split(problems: Problems, key: Key, *, held_out: bool) -> Tree:
    """A problem of one split: problems are sampled until there is one."""

    def unsuitable(carry: tuple[Array, Tree]) -> Array:
        tries, problem = carry
        return (tries == 0) | (is_held_out(problems, problem) != held_out)

    def again(carry: tuple[Array, Tree]) -> tuple[Array, Tree]:
        tries, _ = carry
        return tries + 1, problems.sample(jax.random.fold_in(key, tries))

    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(problems.sample, key))
    return lax.while_loop(unsuitable, again, (jnp.zeros((), jnp.int32), blank))[1]
