"""Completions cut into steps, each with a label, from a user's own JSON-lines file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.envs.text.jsonl_reader import (
    Record,
    encode_fields,
    encode_prompts,
    pad_rows,
    parse_records,
    read_content,
    split_records,
)
from jaxpg.envs.text.task import Task
from jaxpg.envs.text.vocabulary import PAD
from jaxpg.errors import UserError, excerpt
from jaxpg.types import Array, Prompt

PROMPT, STEPS, LABELS = "prompt", "completions", "labels"
"""The fields of a record; the steps are `completions`, as in TRL's stepwise supervision."""
NO_STEP = -1.0
"""The label of a token that ends no step."""


class StepData(NamedTuple):
    """N completions with labelled steps.

    prompt: Prompt, [N, P] each.
    tokens: [N, T] int32, with their end token, padded after it.
    label: [N, T] float32, from 0 (wrong) to 1 (right) at the token that ends a step, NO_STEP elsewhere.
    """

    prompt: Prompt
    tokens: Array
    label: Array


def labelled_steps(path: str | Path, task: Task, *, split: str = "train", skip_long_prompts: bool = False) -> StepData:
    """The completions of one split of a file: one JSON object per line.

        {"prompt": "3+5*2=", "completions": ["<think>8", "6", "</think><answer>6</answer>"], "labels": [1, 1, 1]}

    The steps in a row are the completion, without its end token. The last one is empty where a completion ends with a
    separator of steps. A label is true, false, or a number from 0 to 1, such as the share of continuations that were
    right.

    Args:
        path: the file.
        task: whose vocabulary, lengths, test split and steps the completions have.
        split: "train" or "test".
        skip_long_prompts: leave out the records whose prompts are longer than those of the task, and log how many; else
            such a prompt is an error.

    Raises:
        UserError: as `json_lines`; labels that do not fit the steps, or steps that end elsewhere than the task's.
    """
    every = parse_records(read_content(path), str(path), (PROMPT,))
    records, prompts = encode_prompts(
        every, PROMPT, task.vocabulary, prompt_length=task.prompt_length, skip_long=skip_long_prompts
    )
    rows = [_encode_steps(record, task) for record in records]
    tokens = pad_rows([row.tokens for row in rows], task.max_tokens)
    label = np.full(tokens.shape, NO_STEP, np.float32)
    for i, row in enumerate(rows):
        label[i, row.ends] = row.labels
    _check_ends(records, task, tokens, label)
    in_split = np.array(split_records(path, records, PROMPT, split=split, held_out=task.is_held_out))
    prompt, completion, labels = (jnp.asarray(x[in_split]) for x in (prompts, tokens, label))
    return StepData(Prompt(prompt, prompt != PAD), completion, labels)


class _Row(NamedTuple):
    """A completion: its tokens, the places of those that end a step, and the labels of the steps."""

    tokens: list[int]
    ends: list[int]
    labels: list[float]


def _encode_steps(record: Record, task: Task) -> _Row:
    steps, labels = (_list_field(record, name) for name in (STEPS, LABELS))
    if len(steps) != len(labels):
        raise UserError(
            f"{record.location}: {len(steps)} steps in {STEPS!r} and {len(labels)} labels: give one label for each."
        )
    for i, step in enumerate(steps):
        # The last one may be the end alone, behind a separator.
        if not isinstance(step, str) or not (step or i == len(steps) - 1):
            raise UserError(f"{record.location}: a step in {STEPS!r} must be a non-empty string, not {excerpt(step)}.")
    texts = [Record(record.location, {STEPS: step}) for step in steps]
    pieces = encode_fields(texts[:-1], [STEPS], task.vocabulary)
    pieces += encode_fields(texts[-1:], [STEPS], task.vocabulary, end=True)
    ends = (np.cumsum([len(piece) for piece in pieces]) - 1).tolist()
    if ends[-1] >= task.max_tokens:
        raise UserError(
            f"{record.location}: the completion has {ends[-1] + 1} tokens with its end, more than max_tokens = "
            f"{task.max_tokens}."
        )
    tokens = [token for piece in pieces for token in piece]
    return _Row(tokens, ends, [_label(record, label) for label in labels])


def _list_field(record: Record, name: str) -> Sequence[Any]:
    value = record.fields.get(name)
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{record.location}: the field {name!r} must be a list that is not empty, not {excerpt(value)}."
        )
    return value


def _label(record: Record, label: Any) -> float:
    if not isinstance(label, int | float) or not 0 <= label <= 1:
        raise UserError(f"{record.location}: a label is true, false or a number from 0 to 1, not {excerpt(label)}.")
    return float(label)


def _check_ends(records: Sequence[Record], task: Task, tokens: np.ndarray, label: np.ndarray) -> None:
    """Refuse steps that end where the task, which asks for scores in training, does not end them."""
    assert task.step_ends
    labelled = label >= 0
    lengths = tokens.shape[1] - np.argmax(labelled[:, ::-1], 1)
    wanted = np.asarray(jax.jit(jax.vmap(task.step_ends))(jnp.asarray(tokens), jnp.asarray(lengths)))
    for i in np.flatnonzero((wanted != labelled).any(1))[:1]:
        row, stops = tokens[i, : lengths[i] - 1].tolist(), np.flatnonzero(wanted[i]) + 1
        starts = [0, *stops[:-1]]
        pieces = [task.vocabulary.decode(row[a:b]) for a, b in zip(starts, stops, strict=True)]
        raise UserError(
            f"{records[i].location}: the steps in {STEPS!r} do not end where those of {task.name} do, which cuts this "
            f"completion into {len(pieces)}: {excerpt(pieces)}. Cut it so, and give a label for each."
        )
