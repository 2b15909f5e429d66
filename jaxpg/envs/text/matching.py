"""Verifiers for a user's own records: when is a completion right?

"exact": the answer has the same tokens, compared inside the compiled program. The answer of a completion is the text
inside its last pair of <answer> and </answer>, or all of it where there is no such pair.

"numeric": the last number of the completion equals the last number of the answer, as decimal numbers without rounding.

A function of prompt, completion and answer: its result is the accuracy, and 1 or more counts as right. It is called for
truncated completions too, which are never right for the other two.

The last two run on the host, on a whole batch at a time (`parallel.host_callback`). Exceptions of the function, and
results that are not finite numbers, become UserErrors there.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
import zlib
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.envs.text.jsonl_reader import Record, encode_fields, pad_rows
from jaxpg.envs.text.task import Verdict
from jaxpg.envs.text.token_arrays import fingerprint, non_negative
from jaxpg.envs.text.vocabulary import PAD, Tokenizer
from jaxpg.errors import UserError, refuse_unknown
from jaxpg.parallel import host_callback
from jaxpg.types import Array
from jaxpg.user_code import describe_failure, import_user_code

RewardFunction = Callable[[str, str, str], float]
"""A user's function: prompt, completion, answer -> accuracy."""
Verify = Callable[[Array, Array, Array], Verdict]
HostGrader = Callable[[int, str, bool], tuple[float, int]]
"""Index of a record, completion, whether it ended -> accuracy, and fingerprint of its answer, -1 for none."""
_NUMBER = re.compile(
    r"(?:(?<![0-9)])[-+])?"  # a sign, not the operator of "5-3"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)


def verifier(
    match: str | RewardFunction,
    records: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    prompt_field: str,
    answer_field: str,
    max_tokens: int,
) -> Verify:
    """The `verify` of a task whose problems are indices of records; `match` is described at the top of this file.

    Raises:
        UserError: an unknown `match`, an answer that cannot be matched in this way, or a function of other arguments.
    """
    answers = [record.fields[answer_field] for record in records]
    if match == "exact":
        rows = encode_fields(records, [answer_field], tokenizer, limit=max_tokens, setting="max_tokens", end=True)
        return _verify_exactly(pad_rows([row[:-1] for row in rows], max_tokens), tokenizer)
    if match == "numeric":
        for record, answer in zip(records, answers, strict=True):
            if last_number(answer) is None:
                raise UserError(f"{record.location}: the field {answer_field!r} has no number in it: {answer!r}.")
        return _verify_on_host(_numeric_grader(answers), tokenizer)
    if isinstance(match, str):
        function, name = _import_reward(match), match
    else:
        function, name = match, getattr(match, "__name__", "match")
    _check_arguments(function, name)
    return _verify_on_host(_user_grader(function, name, records, prompt_field, answer_field), tokenizer)


def last_number(text: str) -> Decimal | None:
    """The last decimal number in a text, such as -12, 1,234.5, .5 or 3e8; None if there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def extract_answer(completion: str) -> str:
    """The text inside the last pair of answer tags, or all of it without such a pair; surrounding space is removed."""
    before, closing, _ = completion.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return (answer if opening and closing else completion).strip()


def _verify_exactly(answers: np.ndarray, tokenizer: Tokenizer) -> Verify:
    """Compare tokens with `answers` `[N, T]`, inside the compiled program."""
    opening, closing = (_encode_tag(tag, tokenizer) for tag in ("<answer>", "</answer>"))

    def verify(problem: Array, completion: Array, length: Array) -> Verdict:
        place = jnp.arange(len(completion))
        stop = jnp.min(jnp.where(completion == tokenizer.end, place, length))  # end tokens after `length` do not count
        ended = stop < length
        start, stop = _answer_span(jnp.where(place < stop, completion, PAD), stop, opening, closing)
        answer = jnp.where(place < stop - start, completion.at[start + place].get(mode="fill", fill_value=PAD), PAD)
        found = ended & (stop > start) & ((answer != PAD) == (place < stop - start)).all()
        right = found & (answer == jnp.asarray(answers)[problem]).all()
        fingerprints = jnp.where(found, non_negative(fingerprint(answer)), -1)
        return Verdict(right.astype(jnp.float32), found.astype(jnp.float32), fingerprints)

    return verify


def _encode_tag(tag: str, tokenizer: Tokenizer) -> Array:
    try:
        return jnp.array(tokenizer.encode(tag), jnp.int32)
    except UserError:  # the vocabulary cannot write the tag: an id that no completion has
        return jnp.array([-1], jnp.int32)


def _answer_span(tokens: Array, stop: Array, opening: Array, closing: Array) -> tuple[Array, Array]:
    """Start and stop of the answer in tokens `[T]` that are padding from `stop` on."""
    place = jnp.arange(len(tokens))
    opens, closes = _occurrences(opening, tokens), _occurrences(closing, tokens)
    starts = place + len(opening)
    is_closed = opens & (starts <= jnp.max(jnp.where(closes, place, -1)))
    start = jnp.max(jnp.where(is_closed, starts, 0))
    closed_at = jnp.min(jnp.where(closes & (place >= start), place, stop))
    return start, jnp.where(is_closed.any(), closed_at, stop)


def _occurrences(pattern: Array, tokens: Array) -> Array:
    """[T] bool, the positions where a pattern begins."""
    windows = jnp.arange(len(tokens))[:, None] + jnp.arange(len(pattern))[None]
    return (tokens.at[windows].get(mode="fill", fill_value=PAD) == pattern[None]).all(1)


def _verify_on_host(grade: HostGrader, tokenizer: Tokenizer) -> Verify:
    """Decode completions and grade them in Python, a whole batch per call of the host."""

    def grade_batch(completions: np.ndarray, problems: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, ...]:
        accuracy = np.empty(problems.shape, np.float32)
        answer = np.empty(problems.shape, np.int32)
        for i in np.ndindex(problems.shape):
            tokens = completions[i][: lengths[i]].tolist()
            accuracy[i], answer[i] = grade(int(problems[i]), tokenizer.decode(tokens), tokenizer.end in tokens)
        return accuracy, answer

    results = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)

    def verify(problem: Array, completion: Array, length: Array) -> Verdict:
        accuracy, answer = host_callback.call(grade_batch, results, completion, problem, length)
        return Verdict(accuracy, (answer >= 0).astype(jnp.float32), answer)

    return verify


def _numeric_grader(answers: Sequence[str]) -> HostGrader:
    def grade(problem: int, completion: str, ended: bool) -> tuple[float, int]:
        number = last_number(completion) if ended else None
        if number is None:
            return 0.0, -1
        return float(number == last_number(answers[problem])), hash(number) & 0x7FFFFFFF

    return grade


def _user_grader(
    function: RewardFunction, name: str, records: Sequence[Record], prompt_field: str, answer_field: str
) -> HostGrader:
    def failure(reason: str, record: Record, completion: str) -> UserError:
        return UserError(
            f"The reward function {name} {reason}, for the record of {record.location} and the completion "
            f"{completion!r}."
        )

    def grade(problem: int, completion: str, ended: bool) -> tuple[float, int]:
        record = records[problem]
        try:
            value: Any = function(record.fields[prompt_field], completion, record.fields[answer_field])
        except (Exception, SystemExit) as error:
            raise failure(f"raised {describe_failure(error)}", record, completion) from error
        if not isinstance(value, numbers.Real | np.bool_) or not math.isfinite(value):
            raise failure(f"returned {value!r} instead of a finite number", record, completion)
        return float(value), zlib.crc32(extract_answer(completion).encode()) >> 1 if ended else -1

    return grade


def _check_arguments(function: RewardFunction, name: str) -> None:
    """Raise a UserError if a reward function cannot be called with a prompt, a completion and an answer."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions that are written in C have none
        return
    try:
        signature.bind("", "", "")
    except TypeError as error:
        raise UserError(
            f"The reward function {name} is called with a prompt, a completion and an answer, and takes {signature}: "
            f"{error}."
        ) from error


def _import_reward(name: str) -> RewardFunction:
    """The function "package.module:function"."""
    if ":" not in name:
        refuse_unknown("way to match", name, ["exact", "numeric", "package.module:function"])
    return import_user_code(name, "reward function")
