"""Vocabularies for a user's own text: the characters that it has, or the tokens of a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jaxpg.envs.text.jsonl_reader import as_text, read_records, without_tags
from jaxpg.envs.text.vocabulary import CHARACTERS, END, PAD, Tokenizer, Vocabulary
from jaxpg.errors import UserError

TAGS = CHARACTERS.symbols[:6]
"""Padding, the end, and the tags."""
SHIFT = 2
"""Ids of a file's tokens are moved up to make room for padding and the end, whatever the file calls its own."""


class FileTokenizer(NamedTuple):
    """The tokens of a tokenizer.json, each id moved up by two: 0 is padding and 1 the end here as everywhere.

    tokenizer: tokenizers.Tokenizer
    unknown: the id in the file that stands for what has no token, None where such text is dropped.
    size: how many ids there are, padding and end included.
    """

    tokenizer: Any
    unknown: int | None
    size: int
    end: int = END

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end.

        Raises:
            UserError: A part of the text has no token.
        """
        try:
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"The tokenizer cannot encode {text!r}: {error}.") from error
        if self.unknown is not None:
            lost = [text[slice(*where)] for i, where in _located(encoding) if i == self.unknown]
        else:
            covered = {place for _, where in _located(encoding) for place in range(*where)}
            lost = [c for place, c in enumerate(text) if place not in covered and not c.isspace()]
        if lost:
            raise UserError(f"The tokenizer has no token for {lost[0]!r} in {text!r}.")
        return [i + SHIFT for i in encoding.ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids before the first end, without padding."""
        real: list[int] = []
        for i in ids:
            if i == END:
                break
            if i != PAD:
                real.append(int(i) - SHIFT)
        return self.tokenizer.decode(real, skip_special_tokens=False)


def _located(encoding: Any) -> Iterable[tuple[int, tuple[int, int]]]:
    return zip(encoding.ids, encoding.offsets, strict=True)


def tokenizer_file(path: str | Path) -> Tokenizer:
    """The tokenizer of a local tokenizer.json, as Hugging Face's library `tokenizers` writes it.

    Raises:
        UserError: no such file, not the file of a tokenizer, or the library is not installed.
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
    except Exception as error:  # the library raises nothing more special
        raise UserError(f"{path} is not the file of a tokenizer: {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model = json.loads(text)["model"]
    named = model.get("unk_token")
    unknown = model.get("unk_id") if named is None else tokenizer.token_to_id(named)
    return FileTokenizer(tokenizer, unknown, size=max(tokenizer.get_vocab().values(), default=-1) + 1 + SHIFT)


def character_vocabulary(path: str | Path) -> Vocabulary:
    """The vocabulary of all characters in the texts of a JSON-lines file, beside padding, the end and the tags.

    Raises:
        UserError: a line that cannot be read, see `lines.read_records`.
    """
    texts = [as_text(value) or "" for line in read_records(path) for value in line.fields.values()]
    return Vocabulary((*TAGS, *sorted(set("".join(map(without_tags, texts))))))


def load_tokenizer(tokenizer: Tokenizer | str, path: str | Path) -> Tokenizer:
    """A tokenizer by what a person may type: "characters" for those of the file `path`, "standard" for CHARACTERS, or
    the path of a tokenizer.json. What is no name is the tokenizer itself.

    Raises:
        UserError: it is the path of no tokenizer.
    """
    if not isinstance(tokenizer, str):
        return tokenizer
    if tokenizer == "characters":
        return character_vocabulary(path)
    return CHARACTERS if tokenizer == "standard" else tokenizer_file(tokenizer)
