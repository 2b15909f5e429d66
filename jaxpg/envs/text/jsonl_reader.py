"""A user's own JSON-lines files: reading and checking every line, splitting, and encoding as arrays of tokens."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import numbers
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpg.envs.text.vocabulary import PAD, Tokenizer
from jaxpg.errors import UserError, excerpt

_log = logging.getLogger(__name__)
_TAG = re.compile("(</?(?:think|answer)>)")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
HeldOut = Callable[[Sequence[str]], Sequence[bool]]
"""prompts -> whether each belongs to the test split."""


class Record(NamedTuple):
    """One record of a file.

    location: the file and the number of the line, for error messages.
    fields: its fields; the required and optional ones of `parse_records` are non-blank strings.
    """

    location: str
    fields: Mapping[str, Any]


def read_content(path: str | Path) -> bytes:
    """The bytes of a file.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"The file {path} cannot be read: {error.strerror}.{counted_from(path)}") from error


def counted_from(path: str | Path) -> str:
    """A sentence on where a path was looked for, if that depends on where the command runs; with a space in front."""
    if Path(path).is_absolute():
        return ""
    return f" The path counts from {Path.cwd()}: run the command where the file is found, or put it there."


@lru_cache(maxsize=4)  # a run makes several tasks of one file
def parse_records(
    content: bytes,
    path: str,
    required: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    may_be_empty: tuple[str, ...] = (),
) -> tuple[Record, ...]:
    """The objects of a JSON-lines file in UTF-8; blank lines are skipped.

    Args:
        content: of the file.
        path: of the file, for error messages.
        required: fields that every object must have: non-blank strings, or finite numbers, which become strings.
        optional: fields of the same kind that an object may lack.
        may_be_empty: those of them that may be blank, such as a completion that ends at once.

    Raises:
        UserError: the file is empty; a line is not a JSON object, has a field twice or lacks one; a field is blank or
            neither a string nor a number, or any text has half of a character.
    """
    read = partial(_parse_record, required=required, optional=optional, may_be_empty=may_be_empty)
    records = tuple(read(raw, f"{path}, line {number}") for number, raw in _lines(content))
    if not records:
        raise UserError(f"{path} is empty. It should have one JSON object per line.")
    return records


def count_records(content: bytes) -> int:
    """How many records `parse_records` makes of the content of a file; they are not checked."""
    return len(_lines(content))


def _lines(content: bytes) -> list[tuple[int, bytes]]:
    """The lines that are not blank, each with its number from 1."""
    lines = enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
    return [(number, raw) for number, raw in lines if raw.strip()]


def _parse_record(
    raw: bytes, location: str, *, required: Sequence[str], optional: Sequence[str], may_be_empty: Sequence[str]
) -> Record:
    try:
        fields = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_float=_WrittenFloat)
    except UnicodeDecodeError as error:
        raise UserError(f"{location} is not UTF-8: byte {error.start + 1} is {raw[error.start]:#x}.") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{location} is not valid JSON: {error.msg}, at column {error.colno}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location} cannot be read: {error}.") from error
    if not isinstance(fields, dict):
        example = json.dumps(dict.fromkeys(required or ("prompt", "answer"), "..."))
        raise UserError(f"{location} is not an object such as {example}, but {_json_excerpt(fields)}.")
    for name in required:
        if name not in fields:
            raise UserError(f"{location} has no field {name!r}. It has: {', '.join(map(repr, fields)) or 'none'}.")
    for name, value in fields.items():
        if isinstance(value, str) and _HALF_CHARACTER.search(value):
            raise UserError(
                f"{location}: the field {excerpt(name)} holds half of a surrogate pair, which is not a character."
            )
    present = [name for name in (*required, *optional) if name in fields]
    texts = {name: _checked_text(fields[name], name, location, name in may_be_empty) for name in present}
    return Record(location, fields | texts)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; Python's own reader would take the last of several fields of one name.

    Raises:
        ValueError: two fields have the same name.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the field {excerpt(twice)} is there twice, remove or rename one")
    return fields


class _WrittenFloat(float):
    """A number of JSON as it is written there: 1.50, or more digits than a float has."""

    def __init__(self, text: str) -> None:
        self.text = text


def as_text(value: Any) -> str | None:
    """The text of a field that is a string or a number, else None."""
    if isinstance(value, str):
        return value
    if isinstance(value, _WrittenFloat):
        return value.text
    return json.dumps(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _checked_text(value: Any, name: str, location: str, may_be_empty: bool) -> str:
    text = as_text(value)
    if text is None or (isinstance(value, float) and not math.isfinite(value)):
        raise UserError(f"{location}: the field {name!r} must be a string or a number, not {_json_excerpt(value)}.")
    if not text.strip() and not may_be_empty:
        raise UserError(f"{location}: the field {name!r} is empty.")
    return text


def _json_excerpt(value: Any) -> str:
    """A value as JSON of at most 40 characters."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def held_out_share(held_out: float) -> HeldOut:
    """Whether each prompt belongs to the test split: about the share `held_out` of all, by a hash of the prompt.

    Raises:
        UserError: `held_out` is not from 0 to 1.
    """
    if isinstance(held_out, bool) or not isinstance(held_out, numbers.Real) or not 0 <= held_out <= 1:
        raise UserError(f"held_out must be a share from 0 to 1, not {held_out!r}.")
    return partial(_hash_split, held_out) if held_out else nothing_held_out


def nothing_held_out(prompts: Sequence[str]) -> list[bool]:
    """No prompt is held out: `split_records` then makes both splits of all records."""
    return [False] * len(prompts)


def _hash_split(held_out: float, prompts: Sequence[str]) -> list[bool]:
    hashes = [hashlib.sha256(prompt.strip().encode()) for prompt in prompts]
    return [int.from_bytes(h.digest()[:6], "big") < held_out * 2**48 for h in hashes]


def split_records(
    path: str | Path, records: Sequence[Record], prompt_field: str, *, split: str, held_out: HeldOut
) -> list[int]:
    """The indices of the records that belong to the split "train" or "test".

    The prompt alone decides, so records with the same prompt are in the same split. Where `held_out` is
    `nothing_held_out`, both splits are all records.

    Raises:
        UserError: no such split, or the split is empty.
    """
    if split not in ("train", "test"):
        raise UserError(f"split must be train or test, not {split!r}.")
    if held_out is nothing_held_out:
        if split == "test":
            _warn_once(f"held_out is 0: evaluations are of the prompts of {path} that are trained on.")
        return list(range(len(records)))
    in_test = held_out([record.fields[prompt_field] for record in records])
    in_split = [i for i, test in enumerate(in_test) if test == (split == "test")]
    if not in_split:
        raise UserError(
            f"None of the {len(records)} records of {path} is in the {split} split: add records of other prompts, or "
            "change held_out where the task has it; with 0, evaluations are of the prompts that are trained on."
        )
    return in_split


@lru_cache
def _warn_once(sentence: str) -> None:
    """A command reads a file several times."""
    _log.warning("%s", sentence)


def without_tags(text: str) -> str:
    """The text without <think>, </think>, <answer> and </answer>."""
    return _TAG.sub("", text)


def encode_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text. Tags are encoded by themselves, so that what is between them has the same tokens everywhere.

    Raises:
        UserError: a part of the text has no token.
    """
    return [i for piece in _TAG.split(text) if piece for i in tokenizer.encode(piece)]


def encode_fields(
    records: Sequence[Record], fields: Sequence[str], tokenizer: Tokenizer, *, end: bool = False
) -> list[list[int]]:
    """One text of each record as tokens (`encode_text`).

    Args:
        records: the records.
        fields: the first of these fields that a record has is its text.
        tokenizer: the tokenizer.
        end: append the end token.

    Raises:
        UserError: a text that has no tokens (unless it is empty, and an end is appended), has parts that the vocabulary
            lacks, or contains padding or an end token.
    """
    rows = []
    for record in records:
        field = next(name for name in fields if name in record.fields)
        try:
            ids = encode_text(record.fields[field], tokenizer)
        except UserError as error:
            raise UserError(f"{record.location}, field {field!r}: {error}") from error
        if not ids and not (end and record.fields[field] == ""):
            raise UserError(f"{record.location}: the field {field!r} is empty, it has no tokens.")
        if PAD in ids or tokenizer.end in ids:  # only a tokenizer of the user's own can do that
            raise UserError(
                f"{record.location}: the tokenizer makes padding or an end token of the text of the field {field!r}."
            )
        rows.append([*ids, tokenizer.end] if end else ids)
    return rows


def too_long(
    records: Sequence[Record], fields: Sequence[str], rows: Sequence[Sequence[int]], *, limit: int | None, setting: str
) -> str | None:
    """A sentence on the first row with more tokens than the setting `limit`; None if there is none.

    `rows` are those of `encode_fields`, with an end token where the setting is max_tokens.
    """
    long = [i for i, row in enumerate(rows) if limit is not None and len(row) > limit]
    if not long:
        return None
    record, length = records[long[0]], len(rows[long[0]])
    field = next(name for name in fields if name in record.fields)
    counted = f"{length} tokens" + (" with its end" if setting == "max_tokens" else "")
    others = f", and so have {len(long) - 1} other records" if len(long) > 1 else ""
    return f"{record.location}: the field {field!r} has {counted}, more than {setting} = {limit}{others}."


def truncated(records: Sequence[Record], field: str) -> str | None:
    """A sentence on the first record whose completion was truncated, as `jaxpg sample` notes; None if there is none."""
    for record in records:
        if field in record.fields and record.fields.get("ended") is False:
            return (
                f'{record.location}: the completion was truncated ("ended": false), and an end would be learned where '
                "it has none. Take such lines away: jaxpg sample --only ended writes none."
            )
    return None


def encode_prompts(
    records: Sequence[Record], field: str, tokenizer: Tokenizer, *, prompt_length: int | None, skip_long: bool
) -> tuple[list[Record], np.ndarray]:
    """The records whose prompts fit into `prompt_length`, and these prompts, `[N, P]` int32.

    Raises:
        UserError: as `encode_fields`; a prompt that is too long, unless `skip_long`; then if none is short enough.
    """
    rows = encode_fields(records, [field], tokenizer)
    sentence = too_long(records, [field], rows, limit=prompt_length, setting="prompt_length")
    if sentence is None:
        return list(records), pad_rows(rows, prompt_length)
    fits = [prompt_length is None or len(row) <= prompt_length for row in rows]
    if not skip_long:
        raise UserError(f"{sentence} Raise prompt_length, or leave such records out with skip_long_prompts = true.")
    if not any(fits):
        raise UserError(f"{sentence} No record is left without them: raise prompt_length.")
    left_out = len(fits) - sum(fits)
    _warn_once(f"Left out {left_out} of {len(fits)} records, whose prompts are too long. {sentence}")
    kept = [(record, row) for record, row, fit in zip(records, rows, fits, strict=True) if fit]
    return [record for record, _ in kept], pad_rows([row for _, row in kept], prompt_length)


def pad_rows(rows: Sequence[Sequence[int]], width: int | None = None) -> np.ndarray:
    """Rows of tokens as one array `[N, width]` int32, padded on the right; by default as wide as the longest row."""
    lengths = np.array([len(row) for row in rows])
    width = int(lengths.max()) if width is None else width
    padded = np.full((len(rows), width), PAD, np.int32)
    padded[np.arange(width) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows), np.int32)
    return padded
