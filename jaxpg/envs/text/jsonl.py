"""A task, or preference pairs, from a user's own JSON-lines file."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.envs.text import matching
from jaxpg.envs.text.jsonl_reader import (
    HeldOut,
    Record,
    encode_fields,
    encode_prompts,
    held_out_share,
    pad_rows,
    parse_records,
    read_content,
    split_records,
    too_long,
    truncated,
)
from jaxpg.envs.text.task import Task
from jaxpg.envs.text.tokenizer import load_tokenizer
from jaxpg.envs.text.vocabulary import PAD, Tokenizer
from jaxpg.errors import UserError
from jaxpg.types import Array, Key, Prompt


class PairData(NamedTuple):
    """N prompts, each with two completions of which one is preferred.

    prompt: Prompt, [N, P] each.
    chosen, rejected: [N, T] int32, with their end token, padded after it.
    """

    prompt: Prompt
    chosen: Array
    rejected: Array


def json_lines(
    path: str | Path,
    tokenizer: Tokenizer | str = "characters",
    *,
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    completion_field: str = "completion",
    match: str | matching.MatchFunction = "exact",
    step_separator: str | None = None,
    prompt_length: int | None = None,
    skip_long_prompts: bool = False,
    max_tokens: int | None = None,
    split: str = "train",
    held_out: float = 0.1,
) -> Task:
    r"""The task of answering the prompts of a file: one JSON object per line, with a prompt and an answer.

    A problem is the index of a record, [] int32. Its demonstration is the record's completion where it has one, else
    the answer itself; it is not checked to be right. The records of both splits are checked, and the widths of prompts
    and completions are those of both. Records are drawn uniformly with replacement: a batch may hold one twice, and
    there are no epochs.

    Args:
        path: the file.
        tokenizer: "characters" for the characters of this file, "standard" for those of the generated tasks, the path
            of a tokenizer.json, or a Tokenizer.
        prompt_field: field of the prompt.
        answer_field: field of the answer, a string or a number.
        completion_field: field of a demonstration, which a record may lack.
        match: how completions are verified (see matching.py): "exact", "numeric", or a function of prompt, completion
            and answer that returns a number, or its name "package.module:function".
        step_separator: a step of a completion ends with this text, in which \n is a line break; its last one with the
            completion. None where completions are not cut into steps.
        prompt_length: maximal number of tokens of a prompt; that of the longest if not given.
        skip_long_prompts: leave out the records whose prompts are longer than prompt_length, and log how many; else
            such a prompt is an error.
        max_tokens: completions are truncated after this many tokens; the length of the longest demonstration if not
            given. Demonstrations may be longer where nothing learns from them.
        split: "train" or "test".
        held_out: the share of all prompts that belongs to the test split; with 0 both splits are all records, and
            evaluations are of prompts that are trained on.

    Raises:
        UserError: a file, a line or a setting that cannot be used, with the line and the reason.
    """
    _check_limits(prompt_length, skip_long_prompts, max_tokens)
    tokenizer = load_tokenizer(tokenizer, path)
    fields = _Fields(prompt_field, answer_field, completion_field)
    read: Callable[..., _Rows] = _read_rows if isinstance(tokenizer, Hashable) else _read_rows.__wrapped__
    built_in = match if isinstance(match, str) and match in ("exact", "numeric") else ""
    rows = read(
        read_content(path), str(path), tokenizer, fields, built_in, prompt_length, skip_long_prompts, max_tokens
    )
    is_held_out = held_out_share(held_out)
    in_split = jnp.asarray(split_records(path, rows.records, prompt_field, split=split, held_out=is_held_out))

    def demonstration(problem: Array, key: Key) -> Array:
        if rows.unusable is not None:
            raise UserError(rows.unusable)
        return rows.demonstrations[problem]

    return Task(
        name=Path(path).stem,
        vocabulary=tokenizer,
        prompt_length=rows.prompts.shape[1],
        max_tokens=rows.demonstrations.shape[1],
        draw=lambda key: in_split[jax.random.randint(key, (), 0, len(in_split))],
        prompt_tokens=lambda problem: rows.prompts[problem],
        demonstration=demonstration,
        verify=matching.verifier(
            match, rows.expected, rows.records, tokenizer, prompt_field=prompt_field, answer_field=answer_field
        ),
        is_held_out=is_held_out,
        step_ends=None if step_separator is None else _separated_steps(step_separator, tokenizer),
        num_problems=len(in_split),
        record=lambda problem: dict(rows.records[int(problem)].fields),
        answers=lambda problems: [rows.records[i].fields[answer_field] for i in np.asarray(problems).tolist()],
    )


def _separated_steps(separator: str, tokenizer: Tokenizer) -> Callable[[Array, Array], Array]:
    """The `Task.step_ends` of completions whose steps end with a separator."""
    text = separator.replace("\\n", "\n")
    ends_step = np.array([text in tokenizer.decode([i]) for i in range(tokenizer.size)])
    if not text or not ends_step.any():
        raise UserError(f"No token of the vocabulary contains step_separator = {separator!r}: choose another one.")

    def step_ends(tokens: Array, length: Array) -> Array:
        place = jnp.arange(len(tokens))
        return (jnp.asarray(ends_step)[tokens] & (place < length)) | (place == length - 1)

    return step_ends


class _Fields(NamedTuple):
    """Names of the fields of a record."""

    prompt: str
    answer: str
    completion: str


class _Rows(NamedTuple):
    """The N records of a file, both splits.

    prompts: [N, P] int32
    demonstrations: [N, T] int32
    unusable: a sentence on a demonstration that is truncated or has more than T tokens, None if there is none.
    expected: see `matching.expected_answers`.
    """

    records: tuple[Record, ...]
    prompts: Array
    demonstrations: Array
    unusable: str | None
    expected: matching.Expected


@lru_cache(maxsize=4)  # a run makes several environments and tasks of one file
def _read_rows(
    content: bytes,
    path: str,
    tokenizer: Tokenizer,
    fields: _Fields,
    match: str,
    prompt_length: int | None,
    skip_long_prompts: bool,
    max_tokens: int | None,
) -> _Rows:
    """What `json_lines` makes of the content of a file, whatever the split; computed once in a process."""
    required, completion = (fields.prompt, fields.answer), (fields.completion,)
    every = parse_records(content, path, required, completion, completion)
    records, prompts = encode_prompts(
        every, fields.prompt, tokenizer, prompt_length=prompt_length, skip_long=skip_long_prompts
    )
    shown = [fields.completion, fields.answer]
    rows = encode_fields(records, shown, tokenizer, end=True)
    unusable = truncated(records, fields.completion)
    if unusable is None and (long := too_long(records, shown, rows, limit=max_tokens, setting="max_tokens")):
        unusable = f"{long} Raise max_tokens to learn from demonstrations."
    demonstrations = pad_rows([row[:max_tokens] for row in rows], max_tokens)
    expected = matching.expected_answers(match, records, fields.answer, tokenizer, demonstrations.shape[1])
    return _Rows(tuple(records), jnp.asarray(prompts), jnp.asarray(demonstrations), unusable, expected)


def preference_pairs(
    path: str | Path,
    tokenizer: Tokenizer | str = "characters",
    *,
    prompt_field: str = "prompt",
    chosen_field: str = "chosen",
    rejected_field: str = "rejected",
    prompt_length: int | None = None,
    skip_long_prompts: bool = False,
    max_tokens: int | None = None,
    split: str = "train",
    held_out: float | HeldOut = 0.1,
) -> PairData:
    """The pairs of one split of a file: one JSON object per line, with a prompt and two completions.

    Args:
        path: the file.
        tokenizer: as in `json_lines`.
        prompt_field: field of the prompt.
        chosen_field: field of the preferred completion.
        rejected_field: field of the other completion.
        prompt_length: as in `json_lines`.
        skip_long_prompts: as in `json_lines`.
        max_tokens: maximal number of tokens of a completion; that of the longest if not given.
        split: "train" or "test".
        held_out: the share of all prompts that belongs to the test split, or a function such as `Task.is_held_out`.

    Raises:
        UserError: as `json_lines`.
    """
    _check_limits(prompt_length, skip_long_prompts, max_tokens)
    return PairData(
        *_read_completions(
            path,
            load_tokenizer(tokenizer, path),
            (prompt_field, chosen_field, rejected_field),
            (prompt_length, skip_long_prompts, max_tokens),
            split,
            held_out,
        )
    )


def demonstrations(path: str | Path, task: Task, *, skip_long_prompts: bool = False) -> tuple[Prompt, Array]:
    """The demonstrations of a file for a task: one JSON object per line, with a prompt and a completion.

    Prompts of the task's test split are left out.

    Args:
        path: the file, such as `jaxpg sample RUN --out` writes.
        task: whose vocabulary, prompt_length and max_tokens they must fit.
        skip_long_prompts: as in `json_lines`.

    Returns:
        Prompt, [N, P] each, and completions [N, T] int32, with their end token, padded after it.

    Raises:
        UserError: as `json_lines`.
    """
    limits = task.prompt_length, skip_long_prompts, task.max_tokens
    prompt, completion = _read_completions(
        path, task.vocabulary, ("prompt", "completion"), limits, "train", task.is_held_out
    )
    return prompt, completion


def _read_completions(
    path: str | Path,
    tokenizer: Tokenizer,
    fields: tuple[str, ...],
    limits: tuple[int | None, bool, int | None],
    split: str,
    held_out: float | HeldOut,
) -> list[Any]:
    """The prompts of one split of a file and their completions, from the fields of the prompt and of each of these.

    `limits` are prompt_length, skip_long_prompts and max_tokens.
    """
    prompt_field, *completion_fields = fields
    prompt_length, skip_long_prompts, max_tokens = limits
    every = parse_records(read_content(path), str(path), fields, (), tuple(completion_fields))
    records, prompts = encode_prompts(
        every, prompt_field, tokenizer, prompt_length=prompt_length, skip_long=skip_long_prompts
    )
    if len(completion_fields) == 1 and (sentence := truncated(records, *completion_fields)):
        raise UserError(sentence)
    completions = []
    for field in completion_fields:
        rows = encode_fields(records, [field], tokenizer, end=True)
        if sentence := too_long(records, [field], rows, limit=max_tokens, setting="max_tokens"):
            raise UserError(f"{sentence} Raise max_tokens where the task has it, or remove such lines.")
        completions.append(rows)
    _refuse_equal_pairs(records, completions)
    padded = pad_rows(list(chain(*completions)), max_tokens).reshape(len(completions), len(records), -1)
    is_held_out = held_out if callable(held_out) else held_out_share(held_out)
    in_split = np.array(split_records(path, records, prompt_field, split=split, held_out=is_held_out))
    tokens, *rest = (jnp.asarray(x[in_split]) for x in (prompts, *padded))
    return [Prompt(tokens, tokens != PAD), *rest]


def _refuse_equal_pairs(records: Sequence[Record], completions: Sequence[Sequence[Sequence[int]]]) -> None:
    """Raise a UserError for a record whose completions are all the same: none of several is preferred."""
    equal = [record for record, *rows in zip(records, *completions, strict=True) if rows[0] in rows[1:]]
    if equal:
        others = f", and so have {len(equal) - 1} other records" if len(equal) > 1 else ""
        raise UserError(
            f"{equal[0].location} has the same completion as chosen and as rejected{others}: nothing can be learned "
            "from such a pair, remove it."
        )


def _check_limits(prompt_length: int | None, skip_long_prompts: bool, max_tokens: int | None) -> None:
    for name, limit in {"prompt_length": prompt_length, "max_tokens": max_tokens}.items():
        if limit is not None and (type(limit) is not int or limit < 1):
            raise UserError(f"{name} must be a number of tokens, at least 1, not {limit!r}.")
    if skip_long_prompts and prompt_length is None:
        raise UserError("skip_long_prompts = true has no effect without a prompt_length.")
