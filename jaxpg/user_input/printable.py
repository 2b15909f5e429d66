"""Text from outside made safe to show: control characters become visible escapes.

Prompts, completions, names, paths and settings may hold anything. A terminal obeys escape codes in them: they move the
cursor, rewrite earlier lines or change the title of the window. Everything that jaxpg prints or draws and that it did
not write itself passes through `printable` first. A table, a title or a line of the terminal gets the result as text
without markup (`jaxpg.runs.terminal`), a figure without formulas (`report.drawing.literal`), a page with HTML's own
escapes.
"""

from __future__ import annotations

import unicodedata


def printable(text: object, keep: str = "") -> str:
    r"""`str(text)` with an escape such as `\x1b` or `\n` for every character that is not shown as itself.

    These are Unicode's control, format, surrogate, private and unassigned characters and its separators of lines and
    paragraphs: also those that reverse the direction of writing or have no width. Letters of any script, signs and
    spaces are unchanged.

    Args:
        text: anything with a `str`.
        keep: characters to leave as they are, such as a newline where lines are meant.
    """
    return "".join(c if c in keep or _is_shown(c) else c.encode("unicode_escape").decode() for c in str(text))


def _is_shown(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 seed", "8 seeds"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
