"""The terminal: text is shown as it is, and no name in it can act as markup."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from jaxpg.printable import printable

NARROWEST = 60
"""Columns that tables need; a terminal of fewer wraps their lines, where otherwise numbers would be cut."""


def make_console(*, quiet: bool = False, soft_wrap: bool = False) -> Console:
    """A console that reads no markup such as `[red]` or `:smile:` in text; styles are those of `rich.text.Text`."""
    console = Console(quiet=quiet, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False)
    if console.width < NARROWEST:
        console.width = NARROWEST
    return console


def heading(title: str, details: str, out: Path | None) -> Text:
    """What a command begins with: a title in bold, details, and on a line of its own where it writes, if it does."""
    place = "" if out is None else f"\n{printable(out)}"
    return Text.assemble((printable(title), "bold"), f", {printable(details)}{place}")
