"""A user's own texts: JSON-lines files, read with every line checked, split, and made into arrays of tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpg.envs.text.vocabulary import PAD, Tokenizer
from jaxpg.errors import UserError

_TAG = re.compile("(</?(?:think|answer)>)")
HeldOut = Callable[[Sequence[str]], Sequence[bool]]
"""Which of some prompts are for the test."""


class Record(NamedTuple):
    """One record of a file.

    where: the file and the number of the line, as messages name it.
    fields: what it says; those that were asked for are texts, and not blank.
    """

    where: str
    fields: Mapping[str, Any]


def read_records(path: str | Path, *, texts: Sequence[str] = (), optional: Sequence[str] = ()) -> list[Record]:
    """The objects of a JSON-lines file in UTF-8; blank lines are skipped.

    Args:
        path: the file.
        texts: fields that every object must have: strings that are not blank, or numbers, which become strings.
        optional: fields of that kind which an object may lack.

    Raises:
        UserError: there is no such file or nothing in it; or a line is no JSON, no object, or lacks a field, or a field
            is no text or blank.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"The file {path} cannot be read: {error.strerror}.") from error
    lines = [
        _read_record(raw, f"{path}, line {number}", texts, optional)
        for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
        if raw.strip()
    ]
    if not lines:
        raise UserError(f"{path} is empty. It should have one JSON object per line.")
    return lines


def _read_record(raw: bytes, where: str, texts: Sequence[str], optional: Sequence[str]) -> Record:
    try:
        fields = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8: byte {error.start + 1} is {raw[error.start]:#x}.") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not valid JSON: {error.msg}, at column {error.colno}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} cannot be read: {error}.") from error
    if not isinstance(fields, dict):
        raise UserError(f'{where} is not an object such as {{"prompt": "1+1=", "answer": "2"}}, but {_shown(fields)}.')
    for name in texts:
        if name not in fields:
            raise UserError(f"{where} has no field {name!r}. It has: {', '.join(map(repr, fields)) or 'none'}.")
    asked = {name: _text(fields[name], name, where) for name in (*texts, *optional) if name in fields}
    return Record(where, fields | asked)


def as_text(value: Any) -> str | None:
    """What a field says, if it is a string or a number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    return value if isinstance(value, str) else None


def _text(given: Any, name: str, where: str) -> str:
    value = as_text(given)
    if value is None:
        raise UserError(f"{where}: the field {name!r} must be a string, not {_shown(given)}.")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UserError(f"{where}: the field {name!r} holds half of a surrogate pair, which is no character.")
    if not value.strip():
        raise UserError(f"{where}: the field {name!r} is empty.")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def hash_split(held_out: float, prompts: Sequence[str]) -> list[bool]:
    """Which of the prompts are for the test: about the share `held_out` of all, by a hash of each.

    Raises:
        UserError: a share that is none.
    """
    if not 0 <= held_out <= 1:
        raise UserError(f"held_out is a share from 0 to 1, not {held_out!r}.")
    hashes = [hashlib.sha256(prompt.strip().encode()) for prompt in prompts]
    return [int.from_bytes(h.digest()[:6], "big") < held_out * 2**48 for h in hashes]


def split_records(
    path: str | Path, lines: Sequence[Record], prompt_field: str, *, split: str, held_out: HeldOut
) -> list[int]:
    """Which of the lines of a file belong to the split "train" or "test".

    The prompt alone decides, so that a prompt which stands in several lines is in one split only.

    Raises:
        UserError: no such split, or nothing in that split.
    """
    if split not in ("train", "test"):
        raise UserError(f"split must be train or test, not {split!r}.")
    in_test = held_out([line.fields[prompt_field] for line in lines])
    chosen = [i for i, test in enumerate(in_test) if test == (split == "test")]
    if not chosen:
        raise UserError(
            f"None of the {len(lines)} records of {path} is in the {split} split: add records of other prompts, or "
            "change held_out where the task has it."
        )
    return chosen


def without_tags(text: str) -> str:
    """The text without <think>, </think>, <answer> and </answer>."""
    return _TAG.sub("", text)


def encode_fields(
    lines: Sequence[Record],
    fields: Sequence[str],
    tokenizer: Tokenizer,
    *,
    limit: int | None,
    setting: str,
    end: bool = False,
) -> list[list[int]]:
    """A text of each line as tokens.

    Tags are encoded apart from what they enclose, so that an answer has the same tokens wherever it stands.

    Args:
        lines: where they stand.
        fields: the first of them that a line has is its text.
        tokenizer: what encodes them.
        limit: the most tokens that a text may have, None for no limit.
        setting: how the limit is called.
        end: every text is followed by the end token, which counts.

    Raises:
        UserError: a text without tokens, with parts that have none, with padding or an end in it, or with too many.
    """
    rows = []
    for line in lines:
        field = next(name for name in fields if name in line.fields)
        try:
            ids = [i for piece in _TAG.split(line.fields[field]) if piece for i in tokenizer.encode(piece)]
        except UserError as error:
            raise UserError(f"{line.where}, field {field!r}: {error}") from error
        if not ids:
            raise UserError(f"{line.where}: the field {field!r} is empty, it has no tokens.")
        if PAD in ids or tokenizer.end in ids:
            raise UserError(f"{line.where}: the field {field!r} holds padding or an end, which no text can.")
        rows.append([*ids, tokenizer.end] if end else ids)
        if limit is not None and len(rows[-1]) > limit:
            counted = f"{len(rows[-1])} tokens" + (" with its end" if end else "")
            raise UserError(f"{line.where}: the field {field!r} has {counted}, more than {setting} = {limit}.")
    return rows


def pad_rows(rows: Sequence[Sequence[int]], width: int | None = None) -> np.ndarray:
    """Rows of tokens as one array `[N, width]` int32, padded on the right; by default as wide as the longest."""
    width = max(map(len, rows)) if width is None else width
    return np.array([[*row, *[PAD] * (width - len(row))] for row in rows], np.int32)
