"""Verifiers for a user's own records: when is a completion right?

"exact": the answer is the same text, but for space around it. The answer of a completion is the text inside its last
pair of <answer> and </answer>, or all of it where there is no such pair. Where a token is a character, tokens are
compared, inside the compiled program; a tokenizer.json can spell one text by several rows of tokens. The text of the
answer is what its tokens decode to: a tokenizer that writes all letters small reads "Paris" as "paris".

"numeric": the number that the completion ends on equals the number that the answer ends on, exactly. numeric.py has the
table of notations that are read; whatever cannot be read for certain is no number. A record whose answer has none is
refused when the file is read.

A function of prompt, completion and answer: its result is the accuracy, and 1 or more counts as right. It is called for
truncated completions too, which are never right for the other two.

Padding is no part of an answer: where a policy wrote some inside of a completion, texts have "<pad>" there.

Whatever does not compare tokens runs on the host, on a whole batch at a time (`parallel.host_callback`). Exceptions of
the function, and results that float32 cannot hold, become UserErrors there.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.envs.text.jsonl_reader import Record, encode_fields, pad_rows, too_long
from jaxpg.envs.text.numeric import last_number
from jaxpg.envs.text.task import Verdict
from jaxpg.envs.text.token_arrays import fingerprint, non_negative
from jaxpg.envs.text.tokenizer import TAGS
from jaxpg.envs.text.vocabulary import PAD, Tokenizer, Vocabulary, completion_text
from jaxpg.errors import UserError, excerpt, refuse_unknown
from jaxpg.parallel import host_callback
from jaxpg.types import Array
from jaxpg.user_input.domains import LARGEST_REWARD, as_reward
from jaxpg.user_input.user_code import describe_failure, import_user_code

MatchFunction = Callable[[str, str, str], float]
"""A function of the user: prompt, completion, answer -> accuracy, for `match`."""
Verify = Callable[[Array, Array, Array], Verdict]
HostGrader = Callable[[int, str, bool], tuple[float, int]]
"""Index of a record, completion, whether it ended -> accuracy, and fingerprint of its answer, -1 for none."""
Expected = Array | tuple[Fraction, ...] | tuple[str, ...] | None
"""What N answers are compared with: tokens `[N, T]` int32, numbers, texts, or nothing for a user's function."""


def expected_answers(
    match: str | MatchFunction, records: Sequence[Record], field: str, tokenizer: Tokenizer, max_tokens: int
) -> Expected:
    """What `verifier` compares completions with, from the field of the answer.

    Raises:
        UserError: an answer that cannot be matched in this way, with its line.
    """
    if match == "exact":
        stripped = [record._replace(fields={field: _answer_of(record, field)}) for record in records]
        rows = encode_fields(stripped, [field], tokenizer, end=True)
        if sentence := too_long(stripped, [field], rows, limit=max_tokens, setting="max_tokens"):
            raise UserError(f"{sentence} No completion could be right: raise max_tokens.")
        if not _has_tokens_of_characters(tokenizer):  # as a completion spells it: a tokenizer may change letters
            return tuple(tokenizer.decode(row).strip() for row in rows)
        return jnp.asarray(pad_rows([row[:-1] for row in rows], max_tokens))
    if match == "numeric":
        return tuple(_number_of(record, field) for record in records)
    return None


def _answer_of(record: Record, field: str) -> str:
    """The answer of a record, read as that of a completion is: its tags are markup there, too."""
    answer = extract_answer(record.fields[field])
    if not answer:
        raise UserError(f"{record.location}: the field {field!r} has no text between its answer tags.")
    return answer


def _has_tokens_of_characters(tokenizer: Tokenizer) -> bool:
    """Whether every token but padding, the end and the tags is one character, so that a text has one row of tokens."""
    if not isinstance(tokenizer, Vocabulary):
        return False
    return all(len(symbol) == 1 for symbol in tokenizer.symbols[2:] if symbol not in TAGS)


def _number_of(record: Record, field: str) -> Fraction:
    number = last_number(record.fields[field])
    if number is None:
        raise UserError(
            f'{record.location}: the field {field!r} ends on no number that match = "numeric" reads for certain: '
            f"{record.fields[field]!r}. Write it as an integer, a decimal or a fraction, or use another match."
        )
    return number


def verifier(
    match: str | MatchFunction,
    expected: Expected,
    records: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    prompt_field: str,
    answer_field: str,
) -> Verify:
    """The `verify` of a task whose problems are indices of records; `match` is described at the top of this file.

    Raises:
        UserError: an unknown `match`, or a function of other arguments.
    """
    if isinstance(expected, tuple):
        read = last_number if match == "numeric" else extract_answer
        return _verify_on_host(_equality_grader(expected, read), tokenizer)
    if expected is not None:
        return _verify_exactly(expected, tokenizer)
    if isinstance(match, str):
        function, name = _import_reward(match), match
    else:
        function, name = match, getattr(match, "__name__", "match")
    _check_arguments(function, name)
    return _verify_on_host(_user_grader(function, name, records, prompt_field, answer_field), tokenizer)


def extract_answer(completion: str) -> str:
    """The text inside the last pair of answer tags, or all of it without such a pair; surrounding space is removed.

    A pair is closed by the first closing tag behind it, as where tokens are compared.
    """
    before, closing, _ = completion.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return (answer.partition("</answer>")[0] if opening and closing else completion).strip()


def _verify_exactly(answers: Array, tokenizer: Tokenizer) -> Verify:
    """Compare tokens with `answers` `[N, T]`, inside the compiled program."""
    opening, closing = (_encode_tag(tag, tokenizer) for tag in ("<answer>", "</answer>"))
    is_space = jnp.array([tokenizer.decode([i]).isspace() for i in range(tokenizer.size)])

    def verify(problem: Array, completion: Array, length: Array) -> Verdict:
        place = jnp.arange(len(completion))
        stop = jnp.min(jnp.where(completion == tokenizer.end, place, length))  # end tokens after `length` do not count
        ended = stop < length
        tokens = jnp.where(place < stop, completion, PAD)
        start, stop = _without_space(is_space[tokens], *_answer_span(tokens, stop, opening, closing))
        answer = jnp.where(place < stop - start, completion.at[start + place].get(mode="fill", fill_value=PAD), PAD)
        found = ended & (stop > start) & ((answer != PAD) == (place < stop - start)).all()
        right = found & (answer == answers[problem]).all()
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


def _without_space(space: Array, start: Array, stop: Array) -> tuple[Array, Array]:
    """Start and stop of a span without the space at its ends; `space` `[T]` says which tokens are space."""
    place = jnp.arange(len(space))
    text = (place >= start) & (place < stop) & ~space
    return jnp.min(jnp.where(text, place, stop)), jnp.max(jnp.where(text, place + 1, 0))


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
            text, ended = completion_text(tokenizer, tokens), tokenizer.end in tokens
            accuracy[i], answer[i] = grade(int(problems[i]), text, ended)
        return accuracy, answer

    results = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)

    def verify(problem: Array, completion: Array, length: Array) -> Verdict:
        accuracy, answer = host_callback.call(grade_batch, results, completion, problem, length)
        return Verdict(accuracy, (answer >= 0).astype(jnp.float32), answer)

    return verify


def _equality_grader(answers: Sequence[Fraction | str], read: Callable[[str], Fraction | str | None]) -> HostGrader:
    """Compares with `answers` what `read` finds in a completion: None or an empty text is no answer."""

    def grade(problem: int, completion: str, ended: bool) -> tuple[float, int]:
        answer = read(completion) if ended else None
        if answer is None or answer == "":
            return 0.0, -1
        return float(answer == answers[problem]), _text_fingerprint(str(answer))

    return grade


def _user_grader(
    function: MatchFunction, name: str, records: Sequence[Record], prompt_field: str, answer_field: str
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
        if (accuracy := as_reward(value)) is None:
            wanted = f"a finite number of at most {LARGEST_REWARD:g} in size"
            raise failure(f"returned {excerpt(value)} instead of {wanted}", record, completion)
        return accuracy, _text_fingerprint(extract_answer(completion)) if ended else -1

    return grade


def _check_arguments(function: MatchFunction, name: str) -> None:
    """Raise a UserError if a reward function cannot be called with a prompt, a completion and an answer."""
    if not callable(function):
        raise UserError(f"match must be exact, numeric, a function or its name, not {excerpt(function)}.")
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


def _text_fingerprint(text: str) -> int:
    """A hash of a text that is not negative. (Python's own is the same for the numbers -1 and -2.)"""
    return zlib.crc32(text.encode()) >> 1


def _import_reward(name: str) -> MatchFunction:
    """The function "package.module:function"."""
    if ":" not in name:
        refuse_unknown("way to match", name, ["exact", "numeric", "package.module:function"])
    return import_user_code(name, "reward function")
