"""Tasks whose problems are drawn at random: what a task defines (`Problems`), and what all of them share (`make_task`).

Shared are the two forms of a completion, the verdict and the split. About one problem in ten is held out, by a hash of
its prompt, so that the split depends on the problem alone and not on the settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpg.envs.text import completion
from jaxpg.envs.text.jsonl_reader import pad_rows
from jaxpg.envs.text.steps import check_scratchpad, scratchpad_steps
from jaxpg.envs.text.task import Task, Verdict
from jaxpg.envs.text.token_arrays import fingerprint, non_negative, pack
from jaxpg.envs.text.vocabulary import CHARACTERS, PAD
from jaxpg.errors import UserError
from jaxpg.types import Array, Key, Tree

HELD_OUT_EVERY = 10
"""One problem in this many is held out."""
MIN_PROBLEMS = 100
"""With fewer problems than this, the hash might hold out none."""
SPARE_TOKENS = 16
"""Room for a scratchpad beyond the longest demonstration."""


class Problems(NamedTuple):
    """The problems of a task, one at a time; texts are in CHARACTERS and have padding only at their ends.

    size: the number of problems, or a lower bound of it.
    sample(key): a problem, of either split.
    prompt(problem): [P]
    answer(problem): a right answer.
    scratchpad(problem): the scratchpad of a demonstration.
    check_answer(problem, answer, length): whether an answer [T] of `length` tokens is right, [] bool, and its
        fingerprint, [] int32.
    separator: the character between two steps of a scratchpad; None where every token is a step.
    one_scratchpad: whether all right scratchpads are equal to `scratchpad`, so that steps can be checked against it.
    canonical(problem): the representative of the problems that must be in the same split as this one.
    canonical_prompt(text): the prompt of that representative, from a prompt as text, on the host.
    """

    size: int
    sample: Callable[[Key], Tree]
    prompt: Callable[[Tree], Array]
    answer: Callable[[Tree], Array]
    scratchpad: Callable[[Tree], Array]
    check_answer: Callable[[Tree, Array, Array], tuple[Array, Array]]
    separator: str | None = None
    one_scratchpad: bool = True
    canonical: Callable[[Tree], Tree] = lambda problem: problem
    canonical_prompt: Callable[[str], str] = lambda text: text


class TaskSettings(NamedTuple):
    """The settings that all generated tasks share.

    split: "train" or "test".
    think: whether a completion has a scratchpad before its answer.
    scratchpad_share: share of the demonstrations that fill in their scratchpad; the others leave it empty.
    max_tokens: completions are truncated after this many tokens; None for the length of the longest demonstration, and
        SPARE_TOKENS more with `think`.
    """

    split: str
    think: bool = False
    scratchpad_share: float = 1.0
    max_tokens: int | None = None


def make_task(name: str, problems: Problems, settings: TaskSettings) -> Task:
    """The task of solving these problems.

    Raises:
        UserError: no such split, too few problems to hold some out, answers longer than max_tokens.
    """
    _check_settings(name, problems, settings)
    prompt_length, longest, max_tokens = _lengths(name, problems, settings)
    think = settings.think
    from_test_split = settings.split == "test"

    def demonstration(problem: Tree, key: Key) -> Array:
        if max_tokens < longest:
            raise UserError(
                f"{name}: demonstrations have up to {longest} tokens, so max_tokens = {max_tokens} is too few to learn "
                "from them."
            )
        if not think:
            return completion.format_completion(problems.answer(problem), None, max_tokens)
        thoughts = problems.scratchpad(problem)
        thoughts = jnp.where(jax.random.uniform(key) < settings.scratchpad_share, thoughts, PAD)
        return completion.format_completion(problems.answer(problem), thoughts, max_tokens)

    def verify(problem: Tree, tokens: Array, length: Array) -> Verdict:
        parsed = completion.parse_completion(tokens, length, think=think)
        right, answer = problems.check_answer(problem, parsed.answer, parsed.length)
        return Verdict(
            accuracy=(parsed.found & right).astype(jnp.float32),
            format=parsed.well_formed.astype(jnp.float32),
            answer=jnp.where(parsed.found, answer, -1),
            scratchpad_used=completion.uses_scratchpad(tokens, length).astype(jnp.float32) if think else (),
        )

    def draw(key: Key) -> Tree:
        return sample_split(problems, key, held_out=from_test_split)

    def prompts_held_out(prompts: Sequence[str]) -> list[bool]:
        tokens = jnp.asarray(pad_rows([CHARACTERS.encode(problems.canonical_prompt(text)) for text in prompts]))
        return _hash_holds_out(jax.vmap(fingerprint)(tokens)).tolist()

    has_steps = think and _scratchpad_length(problems) > 0
    separator = None if problems.separator is None else CHARACTERS.id(problems.separator)

    def check_steps(problem: Tree, tokens: Array, length: Array) -> Array:
        return check_scratchpad(tokens, length, pack(problems.scratchpad(problem)), separator=separator)

    def right_answers(batch: Tree) -> list[str]:
        return [CHARACTERS.decode(row) for row in np.asarray(jax.vmap(problems.answer)(batch)).tolist()]

    return Task(
        name=name,
        vocabulary=CHARACTERS,
        prompt_length=prompt_length,
        max_tokens=max_tokens,
        draw=draw,
        prompt_tokens=problems.prompt,
        demonstration=demonstration,
        verify=verify,
        is_held_out=prompts_held_out,
        step_ends=partial(scratchpad_steps, separator=separator) if has_steps else None,
        check_steps=check_steps if has_steps and problems.one_scratchpad else None,
        answers=right_answers,
    )


def _check_settings(name: str, problems: Problems, settings: TaskSettings) -> None:
    split, think, scratchpad_share, _ = settings
    if split not in ("train", "test"):
        raise UserError(f"{name}: split must be train or test, not {split!r}.")
    if problems.size < MIN_PROBLEMS:
        raise UserError(
            f"{name}: with these settings there are only {problems.size} problems, too few to hold some out. "
            f"Choose settings with at least {MIN_PROBLEMS}."
        )
    if not 0 <= scratchpad_share <= 1:
        raise UserError(f"{name}: scratchpad_share must be from 0 to 1, not {scratchpad_share!r}.")
    if scratchpad_share < 1 and not think:
        raise UserError(f"{name}: scratchpad_share = {scratchpad_share!r} has no effect without think = true.")


def _lengths(name: str, problems: Problems, settings: TaskSettings) -> tuple[int, int, int]:
    """Tokens of a prompt, of the longest demonstration, and of a completion, which must have room for an answer."""
    any_problem = jax.eval_shape(problems.sample, jax.random.key(0))
    (prompt_length,), (answer_length,) = (
        jax.eval_shape(f, any_problem).shape for f in (problems.prompt, problems.answer)
    )
    scratchpad_length = _scratchpad_length(problems)
    shortest = answer_length + 1 + (completion.TAGS_LENGTH if settings.think else 0)
    longest = shortest + (scratchpad_length if settings.think else 0)
    max_tokens = settings.max_tokens
    if max_tokens is None:
        max_tokens = longest + (SPARE_TOKENS if settings.think else 0)
    if max_tokens < shortest:
        raise UserError(
            f"{name}: an answer alone has up to {shortest} tokens, with its end and its tags, so max_tokens = "
            f"{max_tokens} is too few."
        )
    return prompt_length, longest, max_tokens


def _scratchpad_length(problems: Problems) -> int:
    """Tokens of the longest scratchpad of a demonstration."""
    any_problem = jax.eval_shape(problems.sample, jax.random.key(0))
    return int(jax.eval_shape(problems.scratchpad, any_problem).shape[0])


def no_scratchpad(problem: Tree) -> Array:
    """The scratchpad of a task that needs none."""
    return jnp.zeros(0, jnp.int32)


def exact_match(answer: Callable[[Tree], Array]) -> Callable[[Tree, Array, Array], tuple[Array, Array]]:
    """The `check_answer` of problems with one answer: equal token by token. The fingerprint is that of the tokens."""

    def check_answer(problem: Tree, given: Array, length: Array) -> tuple[Array, Array]:
        right = answer(problem)
        right = jnp.pad(right, (0, len(given) - len(right)), constant_values=PAD)
        return (given == right).all(), non_negative(fingerprint(given))

    return check_answer


def ascending(prompt: str) -> str:
    """The prompt with the numbers before its first ":" or "=" in ascending order: "9 4 6:18=" becomes "4 6 9:18="."""
    given = re.split("[:=]", prompt)[0]
    numbers = iter(sorted(re.findall("[0-9]+", given), key=int))
    return re.sub("[0-9]+", lambda _: next(numbers), given) + prompt[len(given) :]


def is_held_out(problems: Problems, problem: Tree) -> Array:
    """[] bool, whether a problem belongs to the test split."""
    return _hash_holds_out(fingerprint(problems.prompt(problems.canonical(problem))))


def _hash_holds_out(hashed: Array) -> Array:
    return hashed % HELD_OUT_EVERY == 0


def sample_split(problems: Problems, key: Key, *, held_out: bool) -> Tree:
    """A problem of one split, by rejection: problems are sampled until one belongs to it."""

    def rejected(carry: tuple[Array, Tree]) -> Array:
        tries, problem = carry
        return (tries == 0) | (is_held_out(problems, problem) != held_out)

    def try_again(carry: tuple[Array, Tree]) -> tuple[Array, Tree]:
        tries, _ = carry
        return tries + 1, problems.sample(jax.random.fold_in(key, tries))

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(problems.sample, key))
    return lax.while_loop(rejected, try_again, (jnp.zeros((), jnp.int32), zeros))[1]
