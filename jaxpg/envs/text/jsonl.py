"""A task, or pairs of which one is preferred, from a user's own JSON-lines file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.envs.text.jsonl_reader import HeldOut, encode_fields, hash_split, pad_rows, read_records, split_records
from jaxpg.envs.text.matching import Reward, verifier
from jaxpg.envs.text.task import Task
from jaxpg.envs.text.tokenizer import load_tokenizer
from jaxpg.envs.text.vocabulary import PAD, Tokenizer
from jaxpg.errors import UserError
from jaxpg.types import Array, Key, Prompt


class PairData(NamedTuple):
    """N prompts, each with two completions of which one is preferred.

    prompt: Prompt, [N, P] each.
    chosen, rejected: [N, T] int32, with their end, padded behind it.
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
    match: str | Reward = "exact",
    prompt_length: int | None = None,
    max_tokens: int | None = None,
    split: str = "train",
    held_out: float = 0.1,
) -> Task:
    """The task of answering the prompts of a file: one JSON object per line, with a prompt and an answer.

    A problem is the number of a record, [] int32, counted from 0. Its demonstration is the record's completion where it
    has one, else the answer itself; whether that is right is not asked. All records are checked, and decide how wide
    prompts and completions are, whichever split is drawn from. Each record is drawn for itself, any of the split as
    likely as any other: a batch may hold one twice, and there are no passes over the file.

    Args:
        path: the file.
        tokenizer: what encodes it: "characters" for those of this file, "standard" for those of the generated tasks,
            the path of a tokenizer.json, or anything that is a Tokenizer.
        prompt_field: where the prompt stands.
        answer_field: where the answer stands, a string or a number.
        completion_field: where a demonstration stands, in records that have one.
        match: what makes a completion right (see matching.py): "exact", "numeric", or a function of prompt, completion
            and answer to a number, given as such or as "package.module:function".
        prompt_length: a longer prompt is refused; as many tokens as the longest has if not given.
        max_tokens: completions are cut off after so many, and a longer demonstration is refused; as many as the longest
            has if not given.
        split: "train" or "test".
        held_out: the share of all prompts that is for the test.

    Raises:
        UserError: a file, a line or a setting that cannot be used; the line and the reason are named.
    """
    _check_limits(prompt_length=prompt_length, max_tokens=max_tokens)
    tokenizer = load_tokenizer(tokenizer, path)
    lines = read_records(path, texts=[prompt_field, answer_field], optional=[completion_field])
    prompts = pad_rows(
        encode_fields(lines, [prompt_field], tokenizer, limit=prompt_length, setting="prompt_length"), prompt_length
    )
    demonstrations = pad_rows(
        encode_fields(
            lines, [completion_field, answer_field], tokenizer, limit=max_tokens, setting="max_tokens", end=True
        ),
        max_tokens,
    )
    is_held_out = partial(hash_split, held_out)
    chosen = split_records(path, lines, prompt_field, split=split, held_out=is_held_out)

    def draw(key: Key) -> Array:
        return jnp.asarray(chosen)[jax.random.randint(key, (), 0, len(chosen))]

    return Task(
        name=Path(path).stem,
        vocabulary=tokenizer,
        prompt_length=prompts.shape[1],
        max_tokens=demonstrations.shape[1],
        draw=draw,
        prompt=lambda problem: jnp.asarray(prompts)[problem],
        demonstration=lambda problem, key: jnp.asarray(demonstrations)[problem],
        verify=verifier(
            match,
            lines,
            tokenizer,
            prompt_field=prompt_field,
            answer_field=answer_field,
            max_tokens=demonstrations.shape[1],
        ),
        held_out=is_held_out,
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
        prompt_field: where the prompt stands.
        chosen_field: where the preferred completion stands.
        rejected_field: where the other one stands.
        prompt_length: as in `json_lines`.
        max_tokens: a longer completion is refused; as many as the longest has if not given.
        split: "train" or "test".
        held_out: the share of all prompts that is for the test, or what tells which they are: `Task.held_out`.

    Raises:
        UserError: as `json_lines`.
    """
    _check_limits(prompt_length=prompt_length, max_tokens=max_tokens)
    tokenizer = load_tokenizer(tokenizer, path)
    lines = read_records(path, texts=[prompt_field, chosen_field, rejected_field])
    prompts = pad_rows(
        encode_fields(lines, [prompt_field], tokenizer, limit=prompt_length, setting="prompt_length"), prompt_length
    )
    chosen, rejected = (
        encode_fields(lines, [field], tokenizer, limit=max_tokens, setting="max_tokens", end=True)
        for field in (chosen_field, rejected_field)
    )
    completions = pad_rows([*chosen, *rejected], max_tokens).reshape(2, len(lines), -1)
    is_held_out = held_out if callable(held_out) else partial(hash_split, held_out)
    here = split_records(path, lines, prompt_field, split=split, held_out=is_held_out)
    tokens, first, second = (jnp.asarray(x[here]) for x in (prompts, *completions))
    return PairData(Prompt(tokens, tokens != PAD), first, second)


def _check_limits(**limits: int | None) -> None:
    for name, limit in limits.items():
        if limit is not None and (type(limit) is not int or limit < 1):
            raise UserError(f"{name} must be a number of tokens, at least 1, not {limit!r}.")
