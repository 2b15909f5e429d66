"""Tokenizers for a user's own text: its characters, or the tokens of a tokenizer.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxpg.envs.text.jsonl_reader import as_text, counted_from, parse_records, read_content, without_tags
from jaxpg.envs.text.vocabulary import CHARACTERS, END, PAD, Tokenizer, Vocabulary
from jaxpg.errors import UserError, excerpt
from jaxpg.user_input.domains import COUNT, check_number

SPECIAL = CHARACTERS.symbols[:2]
"""Padding and the end token."""
TAGS = CHARACTERS.symbols[2:6]
"""The tags around a scratchpad and an answer."""
SHIFT = 2
"""Ids of a tokenizer.json are shifted by this, to make room for padding and the end token."""


class FileTokenizer(NamedTuple):
    """The tokens of a tokenizer.json, each id plus SHIFT: 0 is padding and 1 the end token, as in every vocabulary.

    tokenizer: tokenizers.Tokenizer
    unknown: the id of the file's unknown token, None where the file drops text that has no token.
    size: the number of ids, padding and end token included.
    checksum: SHA-256 of what the file defines, see `tokenizer_file`.
    """

    tokenizer: Any
    unknown: int | None
    size: int
    checksum: str
    end: int = END

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end token.

        The file's special tokens are not read from a text: "<|endoftext|>" is encoded as its characters, unless the
        file's model has it among its pieces, as Unigram has. To jaxpg it is a token as any other: the end is its own.
        The four tags are markup of jaxpg: a tag by itself is its token, where the file has one.

        Raises:
            UserError: a part of the text has no token.
        """
        if text in TAGS and (tag := self.tokenizer.token_to_id(text)) is not None:
            return [tag + SHIFT]
        try:
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises plain Exceptions
            raise UserError(f"The tokenizer cannot encode {text!r}: {error}.") from error
        ids = encoding.ids
        if (missing := self._text_without_token(text, ids, encoding)) is not None:
            raise UserError(f"The tokenizer has no token for {missing!r} in {text!r}.")
        return [i + SHIFT for i in ids]

    def _text_without_token(self, text: str, ids: list[int], encoding: Any) -> str | None:
        """The first part of a text that became the unknown token or was dropped; None if all of it has tokens."""
        if self.unknown is not None:
            return text[slice(*encoding.offsets[ids.index(self.unknown)])] if self.unknown in ids else None
        covered = 0
        for start, stop in [*sorted(encoding.offsets), (len(text), len(text))]:
            if start > covered and (dropped := text[covered:start].strip()):
                return dropped[0]
            covered = max(covered, stop)
        return None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids before the first end token, without padding."""
        real: list[int] = []
        for i in ids:
            if i == END:
                break
            if i != PAD:
                real.append(int(i) - SHIFT)
        return self.tokenizer.decode(real, skip_special_tokens=False)


def tokenizer_file(path: str | Path) -> Tokenizer:
    """The tokenizer of a local tokenizer.json, as Hugging Face's library `tokenizers` writes it.

    Raises:
        UserError: the file cannot be read or is not a tokenizer, an id is too large, or the library is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise UserError('A tokenizer.json needs the library tokenizers: pip install "jaxpg[text]".') from error
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"The tokenizer {path} cannot be read: {error.strerror}.{counted_from(path)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not the file of a tokenizer: {error}.") from error
    return _parse_tokenizer(tokenizers.Tokenizer, text, path)


@lru_cache(maxsize=2)  # every environment of a run needs it
def _parse_tokenizer(library_class: Any, text: str, path: str | Path) -> FileTokenizer:
    """The tokenizer of the text of a tokenizer.json; `library_class` is tokenizers.Tokenizer."""
    try:
        tokenizer = library_class.from_str(text)
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"{path} is not the file of a tokenizer: {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    definition = {name: value for name, value in json.loads(text).items() if name not in ("truncation", "padding")}
    model = definition["model"]
    unknown_token = model.get("unk_token")
    unknown = model.get("unk_id") if unknown_token is None else tokenizer.token_to_id(unknown_token)
    size = max(tokenizer.get_vocab().values(), default=-1) + 1 + SHIFT
    check_number(f"The size of {path}, its largest id plus {1 + SHIFT},", size, COUNT)
    checksum = hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()
    return FileTokenizer(tokenizer, unknown, size, checksum)


def character_vocabulary(path: str | Path) -> Vocabulary:
    """The vocabulary of all characters in the texts of a JSON-lines file, with padding, the end token and the tags.

    Raises:
        UserError: a file or a line that cannot be read, see `read_content` and `parse_records`.
    """
    return Vocabulary((*SPECIAL, *TAGS, *_characters(read_content(path), str(path))))


@lru_cache(maxsize=4)
def _characters(content: bytes, path: str) -> list[str]:
    texts = [as_text(value) or "" for record in parse_records(content, path) for value in record.fields.values()]
    return sorted(set("".join(map(without_tags, texts))))


def load_tokenizer(tokenizer: Tokenizer | str, path: str | Path) -> Tokenizer:
    """A tokenizer by name: "characters" for those of the JSON-lines file `path`, "standard" for CHARACTERS, or the path
    of a tokenizer.json. A Tokenizer is returned unchanged.

    Raises:
        UserError: it is neither a Tokenizer nor the path of one.
    """
    if not isinstance(tokenizer, str):
        if not isinstance(tokenizer, Tokenizer):
            raise UserError(
                f"tokenizer must be a name, the path of a tokenizer.json, or have size, end, encode and decode, not "
                f"{excerpt(tokenizer)}."
            )
        return tokenizer
    if tokenizer == "characters":
        return character_vocabulary(path)
    return CHARACTERS if tokenizer == "standard" else tokenizer_file(tokenizer)


class TokenTable(NamedTuple):
    """What the tokens of a vocabulary are. Two vocabularies are the same where their tables are equal.

    tokens: the symbol of each id, or the piece of a tokenizer.json as that file spells it ("Ġis"), not its decoded
        text, which several tokens can share; None for an id that the file does not use.
    checksum: SHA-256 of what a tokenizer.json defines (its merges, its rules for splitting a text and so on, without
        truncation and padding, which jaxpg does not use); None for characters, which the tokens define alone.
    """

    tokens: list[str | None]
    checksum: str | None


def token_table(tokenizer: Tokenizer) -> TokenTable:
    """The table of a tokenizer; of one that is neither a `Vocabulary` nor from a file, the decoded text of each id."""
    if isinstance(tokenizer, FileTokenizer):
        pieces = [tokenizer.tokenizer.id_to_token(i) for i in range(tokenizer.size - SHIFT)]
        return TokenTable([*SPECIAL, *pieces], tokenizer.checksum)
    if isinstance(tokenizer, Vocabulary):
        return TokenTable([*tokenizer.symbols], None)
    return TokenTable([tokenizer.decode([i]) for i in range(tokenizer.size)], None)
