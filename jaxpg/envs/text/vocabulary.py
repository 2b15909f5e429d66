"""Tokens and their text: the contract of a tokenizer, and the characters of the generated tasks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

from jaxpg.errors import UserError

PAD, END = 0, 1


@runtime_checkable
class Tokenizer(Protocol):
    """Converts text to tokens and back: a `Vocabulary`, or a tokenizer read from a file."""

    @property
    def size(self) -> int:
        """The number of tokens: the ids are `0 .. size - 1`."""

    @property
    def end(self) -> int:
        """The id of the token that ends a completion."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end token. No text becomes padding, the end or another special token."""

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

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """The ids of a text, the longest symbol that fits first.

        Args:
            text: the text.
            special_tokens: read the symbols of padding and the end as these tokens. Only for texts of jaxpg's own: in
                data and in a user's prompt, "<eos>" is five characters.

        Raises:
            UserError: no symbol matches the next character.
        """
        pattern, ids = _encoder(self.symbols, special_tokens)
        symbols = pattern.findall(text)
        try:
            return [ids[symbol] for symbol in symbols]
        except KeyError as error:
            place = sum(map(len, symbols[: symbols.index(error.args[0])]))
            raise UserError(
                f"There is no token for {text[place]!r}, character {place + 1} of {text!r}. "
                f"The vocabulary has: {' '.join(self.symbols)}."
            ) from error

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


@lru_cache(maxsize=16)
def _encoder(symbols: tuple[str, ...], special_tokens: bool) -> tuple[re.Pattern[str], dict[str, int]]:
    """What finds the symbols in a text, any other character by itself, and the ids of the symbols."""
    ids = {symbol: i for i, symbol in enumerate(symbols) if special_tokens or i not in (PAD, END)}
    longest_first = sorted((symbol for symbol in ids if len(symbol) > 1), key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, longest_first), "."]), re.DOTALL), ids


CHARACTERS = Vocabulary(
    (
        *("<pad>", "<eos>", "<think>", "</think>", "<answer>", "</answer>"),
        *"0123456789",
        *"abcdefghijklmnopqrstuvwxyz",
        *"+-*/()=, :%?",
    )
)
"""The vocabulary of every generated task: characters, and a token for each tag."""


def completion_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of a completion up to its first end token, as it is judged, rewarded and shown.

    Padding that a policy wrote is "<pad>" in it; `Tokenizer.decode` leaves it out.
    """
    written = list(itertools.takewhile(lambda i: i != tokenizer.end, tokens))
    if PAD not in written:
        return tokenizer.decode(written)
    parts = [list(part) for _, part in itertools.groupby(written, PAD.__eq__)]
    return "".join(CHARACTERS.symbols[PAD] * len(part) if part[0] == PAD else tokenizer.decode(part) for part in parts)
