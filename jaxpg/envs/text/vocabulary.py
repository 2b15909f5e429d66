"""Tokens and their text: the contract of a tokenizer, and the characters of the generated tasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from jaxpg.errors import UserError

PAD, END = 0, 1


class Tokenizer(Protocol):
    """Converts text to tokens and back: a `Vocabulary`, or a tokenizer read from a file."""

    @property
    def size(self) -> int:
        """The number of tokens: the ids are `0 .. size - 1`."""

    @property
    def end(self) -> int:
        """The id of the token that ends a completion."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end token."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids before the first end token, without padding."""


class Vocabulary(NamedTuple):
    """A list of symbols: the id of a token is its index.

    symbols: all different, none empty; the first is padding, the second the end token.
    """

    symbols: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.symbols)

    @property
    def end(self) -> int:
        return END

    def encode(self, text: str) -> list[int]:
        """The ids of a text, the longest symbol that fits first.

        Raises:
            UserError: no symbol matches the next character.
        """
        by_length = sorted(range(self.size), key=lambda i: -len(self.symbols[i]))
        ids: list[int] = []
        position = 0
        while position < len(text):
            longest = next((i for i in by_length if text.startswith(self.symbols[i], position)), None)
            if longest is None:
                raise UserError(
                    f"There is no token for {text[position]!r}, character {position + 1} of {text!r}. "
                    f"The vocabulary has: {' '.join(self.symbols)}."
                )
            ids.append(longest)
            position += len(self.symbols[longest])
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids before the first end token, without padding."""
        text = []
        for i in ids:
            if i == END:
                break
            if i != PAD:
                text.append(self.symbols[int(i)])
        return "".join(text)

    def id(self, symbol: str) -> int:
        """The id of one symbol."""
        return self.symbols.index(symbol)


CHARACTERS = Vocabulary(
    (
        *("<pad>", "<eos>", "<think>", "</think>", "<answer>", "</answer>"),
        *"0123456789",
        *"abcdefghijklmnopqrstuvwxyz",
        *"+-*/()=, :%?",
    )
)
"""The vocabulary of every generated task: characters, and a token for each tag."""
