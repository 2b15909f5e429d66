"""The terminal: text is shown as it is, and no name in it can act as markup."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxpg.user_input.printable import printable

NARROWEST = 60
"""Columns that tables need; a terminal of fewer wraps their lines, where otherwise numbers would be cut."""
WIDEST = 10_000
"""Columns of a file or a pipe, in which no table breaks its lines."""


class _Console(Console):
    """A console that calls `on_lost` when its reader has closed the output; rich's own ends the process."""

    def __init__(self, on_lost: Callable[[], None], **settings: Any) -> None:
        super().__init__(**settings)
        self._on_lost = on_lost

    def on_broken_pipe(self) -> None:
        self._on_lost()


def _raise() -> None:
    raise BrokenPipeError


def make_console(
    *,
    quiet: bool = False,
    soft_wrap: bool = False,
    full_width: bool = False,
    narrowest: int = NARROWEST,
    on_lost: Callable[[], None] = _raise,
) -> Console:
    """A console that reads no markup such as `[red]` or `:smile:` in text; styles are those of `rich.text.Text`.

    When its reader has closed the output, as in `jaxpg ... | head`, it calls `on_lost`. With `full_width` its tables
    have the lines that they need where the output is no terminal, unless COLUMNS says how long those may be. It has at
    least `narrowest` columns, with which nothing that is printed is cut: the terminal wraps lines that are too long.
    """
    console = _Console(on_lost, quiet=quiet, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False)
    if full_width and not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDEST
    console.width = max(console.width, narrowest)
    return console


def heading(title: str, details: str, out: Path | None) -> Text:
    """What a command begins with: a title in bold, details, and on a line of its own where it writes, if it does."""
    place = "" if out is None else f"\n{printable(out)}"
    return Text.assemble((printable(title), "bold"), f", {printable(details)}{place}")
