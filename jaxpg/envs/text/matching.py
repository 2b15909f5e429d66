"""What makes a completion right, where a user's own records say what is asked.

"exact": the tokens of the answer, inside the compiled program. The answer of a completion is what its last pair of
<answer> and </answer> encloses, or all of it where there is no such pair.

"numeric": the last number of the completion equals the last number of the answer, as decimal numbers without rounding.

A function of prompt, completion and answer: what it returns is the accuracy, and 1 or more counts as right. It is also
asked about completions that were cut off, which the other two never take for right.

The last two run on the host, on a whole batch at a time, and only they leave the program. What a function raises, or a
value that is no finite number, does so as a UserError through `jaxpg.host`.
"""

from __future__ import annotations

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

from jaxpg.envs.text.generated import positive
from jaxpg.envs.text.jsonl_reader import Record, encode_fields, pad_rows
from jaxpg.envs.text.task import Verdict
from jaxpg.envs.text.token_arrays import fingerprint
from jaxpg.envs.text.vocabulary import PAD, Tokenizer
from jaxpg.errors import UserError, refuse_unknown
from jaxpg.parallel import host_callback
from jaxpg.types import Array
from jaxpg.user_code import import_user_code

Reward = Callable[[str, str, str], float]
Verify = Callable[[Array, Array, Array], Verdict]
Judge = Callable[[int, str, bool], tuple[float, int]]
"""Number of a record, completion, whether that ended -> accuracy, and fingerprint of the answer, -1 for none."""
_NUMBER = re.compile(
    r"(?:(?<![0-9)])[-+])?"  # a sign, not the operator of "5-3"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)


def verifier(
    match: str | Reward,
    lines: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    prompt_field: str,
    answer_field: str,
    max_tokens: int,
) -> Verify:
    """The `verify` of a task whose problems are numbers of records; see above for `match`.

    Raises:
        UserError: no such way to match, or an answer that can not be matched in this way.
    """
    answers = [line.fields[answer_field] for line in lines]
    if match == "exact":
        rows = encode_fields(lines, [answer_field], tokenizer, limit=max_tokens, setting="max_tokens", end=True)
        return _exact(pad_rows([row[:-1] for row in rows], max_tokens), tokenizer)
    if match == "numeric":
        for line, answer in zip(lines, answers, strict=True):
            if last_number(answer) is None:
                raise UserError(f"{line.where}: the field {answer_field!r} has no number in it: {answer!r}.")
        return _through_host(_same_number(answers), tokenizer)
    function, name = (_load(match), match) if isinstance(match, str) else (match, getattr(match, "__name__", "match"))
    prompts = [line.fields[prompt_field] for line in lines]
    return _through_host(_user_judge(function, name, [line.where for line in lines], prompts, answers), tokenizer)


def last_number(text: str) -> Decimal | None:
    """The last decimal number in a text, such as -12, 1,234.5, .5 or 3e8; None if there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def extract_answer(completion: str) -> str:
    """What the last pair of answer tags encloses, all of it where there is none; without space around it."""
    before, closing, _ = completion.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return (answer if opening and closing else completion).strip()


def _exact(answers: np.ndarray, tokenizer: Tokenizer) -> Verify:
    """`answers` is `[N, T]`."""
    opening, closing = (_tag(tag, tokenizer) for tag in ("<answer>", "</answer>"))

    def verify(problem: Array, completion: Array, length: Array) -> Verdict:
        place = jnp.arange(len(completion))
        stop = jnp.min(jnp.where(completion == tokenizer.end, place, length))  # an end behind the length is none
        ended = stop < length
        start, stop = _answer(jnp.where(place < stop, completion, PAD), stop, opening, closing)
        answer = jnp.where(place < stop - start, completion.at[start + place].get(mode="fill", fill_value=PAD), PAD)
        found = ended & (stop > start) & ((answer != PAD) == (place < stop - start)).all()
        right = found & (answer == jnp.asarray(answers)[problem]).all()
        fingerprints = jnp.where(found, positive(fingerprint(answer)), -1)
        return Verdict(right.astype(jnp.float32), found.astype(jnp.float32), fingerprints)

    return verify


def _tag(tag: str, tokenizer: Tokenizer) -> Array:
    try:
        return jnp.array(tokenizer.encode(tag), jnp.int32)
    except UserError:  # a vocabulary that can not write it: no completion has it
        return jnp.array([-1], jnp.int32)


def _answer(tokens: Array, stop: Array, opening: Array, closing: Array) -> tuple[Array, Array]:
    """Where the answer begins, and where it is over, in tokens `[T]` that are padding from `stop` on."""
    place = jnp.arange(len(tokens))
    opens, closes = _stands_at(opening, tokens), _stands_at(closing, tokens)
    begins = place + len(opening)
    extract_answer = opens & (begins <= jnp.max(jnp.where(closes, place, -1)))
    start = jnp.max(jnp.where(extract_answer, begins, 0))
    closed = jnp.min(jnp.where(closes & (place >= start), place, stop))
    return start, jnp.where(extract_answer.any(), closed, stop)


def _stands_at(pattern: Array, tokens: Array) -> Array:
    """[T] bool, the places where a pattern begins."""
    windows = jnp.arange(len(tokens))[:, None] + jnp.arange(len(pattern))[None]
    return (tokens.at[windows].get(mode="fill", fill_value=PAD) == pattern[None]).all(1)


def _through_host(judge: Judge, tokenizer: Tokenizer) -> Verify:
    def verdicts(completions: np.ndarray, problems: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, ...]:
        accuracy = np.empty(problems.shape, np.float32)
        answer = np.empty(problems.shape, np.int32)
        for at in np.ndindex(problems.shape):
            tokens = completions[at][: lengths[at]].tolist()
            accuracy[at], answer[at] = judge(int(problems[at]), tokenizer.decode(tokens), tokenizer.end in tokens)
        return accuracy, answer

    results = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)

    def verify(problem: Array, completion: Array, length: Array) -> Verdict:
        accuracy, answer = host_callback.call(verdicts, results, completion, problem, length)
        return Verdict(accuracy, (answer >= 0).astype(jnp.float32), answer)

    return verify


def _same_number(answers: Sequence[str]) -> Judge:
    def judge(problem: int, completion: str, ended: bool) -> tuple[float, int]:
        number = last_number(completion) if ended else None
        if number is None:
            return 0.0, -1
        return float(number == last_number(answers[problem])), hash(number) & 0x7FFFFFFF

    return judge


def _user_judge(
    function: Reward, name: str, where: Sequence[str], prompts: Sequence[str], answers: Sequence[str]
) -> Judge:
    def judge(problem: int, completion: str, ended: bool) -> tuple[float, int]:
        try:
            value: Any = function(prompts[problem], completion, answers[problem])
        except Exception as error:
            reason = f"raised {type(error).__name__}: {error}"
            raise UserError(_complaint(name, where[problem], reason, completion)) from error
        if not isinstance(value, numbers.Real | np.bool_) or not math.isfinite(value):
            reason = f"returned {value!r} instead of a finite number"
            raise UserError(_complaint(name, where[problem], reason, completion))
        return float(value), zlib.crc32(extract_answer(completion).encode()) >> 1 if ended else -1

    return judge


def _complaint(name: str, where: str, reason: str, completion: str) -> str:
    return f"The reward function {name} {reason}, for the record of {where} and the completion {completion!r}."


def _load(name: str) -> Reward:
    """The function "package.module:function"."""
    if ":" not in name:
        refuse_unknown("way to match", name, ["exact", "numeric", "package.module:function"])
    return import_user_code(name, "reward function")
