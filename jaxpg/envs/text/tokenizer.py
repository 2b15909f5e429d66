"""Tokenizers for a user's own text: its characters, or the tokens of a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jaxpg.envs.text.jsonl_reader import as_text, read_records, without_tags
from jaxpg.envs.text.vocabulary import CHARACTERS, END, PAD, Tokenizer, Vocabulary
from jaxpg.errors import UserError

TAGS = CHARACTERS.symbols[:6]
"""Padding, the end token and the tags."""
SHIFT = 2
"""Ids of a tokenizer.json are shifted by this, to make room for padding and the end token."""


class FileTokenizer(NamedTuple):
    """The tokens of a tokenizer.json, each id plus SHIFT: 0 is padding and 1 the end token, as in every vocabulary.

    tokenizer: tokenizers.Tokenizer
    unknown: the id of the file's unknown token, None where the file drops text that has no token.
    size: the number of ids, padding and end token included.
    """

    tokenizer: Any
    unknown: int | None
    size: int
    end: int = END

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end token.

        Raises:
            UserError: a part of the text has no token.
        """
        try:
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises plain Exceptions
            raise UserError(f"The tokenizer cannot encode {text!r}: {error}.") from error
        if self.unknown is not None:
            missing = [text[slice(*span)] for i, span in _ids_and_spans(encoding) if i == self.unknown]
        else:
            covered = {place for _, span in _ids_and_spans(encoding) for place in range(*span)}
            missing = [c for place, c in enumerate(text) if place not in covered and not c.isspace()]
        if missing:
            raise UserError(f"The tokenizer has no token for {missing[0]!r} in {text!r}.")
        return [i + SHIFT for i in encoding.ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids before the first end token, without padding."""
        real: list[int] = []
        for i in ids:
            if i == END:
                break
            if i != PAD:
                real.append(int(i) - SHIFT)
        return self.tokenizer.decode(real, skip_special_tokens=False)


def _ids_and_spans(encoding: Any) -> Iterable[tuple[int, tuple[int, int]]]:
    """Each id of an encoding, with the (start, stop) of its text."""
    return zip(encoding.ids, encoding.offsets, strict=True)


def tokenizer_file(path: str | Path) -> Tokenizer:
    """The tokenizer of a local tokenizer.json, as Hugging Face's library `tokenizers` writes it.

    Raises:
        UserError: the file cannot be read or is not a tokenizer, or the library is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise UserError('A tokenizer.json needs the library tokenizers: pip install "jaxpg[text]".') from error
    try:
        text = Path(path).read_text(encoding="utf-8")
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except OSError as error:
        raise UserError(f"The tokenizer {path} cannot be read: {error.strerror}.") from error
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"{path} is not the file of a tokenizer: {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model = json.loads(text)["model"]
    unknown_token = model.get("unk_token")
    unknown = model.get("unk_id") if unknown_token is None else tokenizer.token_to_id(unknown_token)
    return FileTokenizer(tokenizer, unknown, size=max(tokenizer.get_vocab().values(), default=-1) + 1 + SHIFT)


def character_vocabulary(path: str | Path) -> Vocabulary:
    """The vocabulary of all characters in the texts of a JSON-lines file, with padding, the end token and the tags.

    Raises:
        UserError: a line that cannot be read, see `read_records`.
    """
    texts = [as_text(value) or "" for record in read_records(path) for value in record.fields.values()]
    return Vocabulary((*TAGS, *sorted(set("".join(map(without_tags, texts))))))


def load_tokenizer(tokenizer: Tokenizer | str, path: str | Path) -> Tokenizer:
    """A tokenizer by name: "characters" for those of the JSON-lines file `path`, "standard" for CHARACTERS, or the path
    of a tokenizer.json. A Tokenizer is returned unchanged.

    Raises:
        UserError: it is not the path of a tokenizer.
    """
    if not isinstance(tokenizer, str):
        return tokenizer
    if tokenizer == "characters":
        return character_vocabulary(path)
    return CHARACTERS if tokenizer == "standard" else tokenizer_file(tokenizer)
