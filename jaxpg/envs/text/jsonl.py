"""A task, or preference pairs, from a user's own JSON-lines file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.envs.text.jsonl_reader import (
    HeldOut,
    Record,
    encode_fields,
    hash_split,
    pad_rows,
    read_records,
    split_records,
)
from jaxpg.envs.text.matching import RewardFunction, verifier
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
    match: str | RewardFunction = "exact",
    prompt_length: int | None = None,
    max_tokens: int | None = None,
    split: str = "train",
    held_out: float = 0.1,
) -> Task:
    """The task of answering the prompts of a file: one JSON object per line, with a prompt and an answer.

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
        prompt_length: maximal number of tokens of a prompt; that of the longest if not given.
        max_tokens: completions are truncated after this many tokens, and no demonstration may be longer; the length of
            the longest if not given.
        split: "train" or "test".
        held_out: the share of all prompts that belongs to the test split.

    Raises:
        UserError: a file, a line or a setting that cannot be used, with the line and the reason.
    """
    _check_limits(prompt_length=prompt_length, max_tokens=max_tokens)
    tokenizer = load_tokenizer(tokenizer, path)
    records = read_records(path, required=[prompt_field, answer_field], optional=[completion_field])
    prompts = _encode_prompts(records, prompt_field, tokenizer, prompt_length)
    demonstrations = pad_rows(
        encode_fields(
            records, [completion_field, answer_field], tokenizer, limit=max_tokens, setting="max_tokens", end=True
        ),
        max_tokens,
    )
    is_held_out = partial(hash_split, held_out)
    in_split = split_records(path, records, prompt_field, split=split, held_out=is_held_out)

    def draw(key: Key) -> Array:
        return jnp.asarray(in_split)[jax.random.randint(key, (), 0, len(in_split))]

    return Task(
        name=Path(path).stem,
        vocabulary=tokenizer,
        prompt_length=prompts.shape[1],
        max_tokens=demonstrations.shape[1],
        draw=draw,
        prompt_tokens=lambda problem: jnp.asarray(prompts)[problem],
        demonstration=lambda problem, key: jnp.asarray(demonstrations)[problem],
        verify=verifier(
            match,
            records,
            tokenizer,
            prompt_field=prompt_field,
            answer_field=answer_field,
            max_tokens=demonstrations.shape[1],
        ),
        is_held_out=is_held_out,
    )


def preference_pairs(
    path: str | Path,
    tokenizer: Tokenizer | str = "characters",
    *,
    prompt_field: str = "prompt",
    chosen_field: str = "chosen",
    rejected_field: str = "rejected",
    prompt_length: int | None = None,
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
        max_tokens: maximal number of tokens of a completion; that of the longest if not given.
        split: "train" or "test".
        held_out: the share of all prompts that belongs to the test split, or a function such as `Task.is_held_out`.

    Raises:
        UserError: as `json_lines`.
    """
    _check_limits(prompt_length=prompt_length, max_tokens=max_tokens)
    tokenizer = load_tokenizer(tokenizer, path)
    records = read_records(path, required=[prompt_field, chosen_field, rejected_field])
    prompts = _encode_prompts(records, prompt_field, tokenizer, prompt_length)
    chosen, rejected = (
        encode_fields(records, [field], tokenizer, limit=max_tokens, setting="max_tokens", end=True)
        for field in (chosen_field, rejected_field)
    )
    completions = pad_rows([*chosen, *rejected], max_tokens).reshape(2, len(records), -1)
    is_held_out = held_out if callable(held_out) else partial(hash_split, held_out)
    in_split = split_records(path, records, prompt_field, split=split, held_out=is_held_out)
    tokens, first, second = (jnp.asarray(x[in_split]) for x in (prompts, *completions))
    return PairData(Prompt(tokens, tokens != PAD), first, second)


def _encode_prompts(
    records: Sequence[Record], field: str, tokenizer: Tokenizer, prompt_length: int | None
) -> np.ndarray:
    """[N, P] int32."""
    rows = encode_fields(records, [field], tokenizer, limit=prompt_length, setting="prompt_length")
    return pad_rows(rows, prompt_length)


def _check_limits(**limits: int | None) -> None:
    for name, limit in limits.items():
        if limit is not None and (type(limit) is not int or limit < 1):
            raise UserError(f"{name} must be a number of tokens, at least 1, not {limit!r}.")
