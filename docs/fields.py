"""A griffe extension: the fields that a record's docstring describes, a line each, become a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

FIELD = re.compile(r"(?P<names>\w+(?:, \w+)*)(?P<call>\([^:]*\)[^:]*)?: (?=\S)")


class Fields(griffe.Extension):
    """Rewrites the docstrings of classes."""

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        """Called by griffe for every class that it has read."""
        if cls.docstring:
            cls.docstring.value = as_list(cls.docstring.value)


def as_list(docstring: str) -> str:
    """`name: meaning` at the beginning of a line as an item, with the lines that continue it; sections as they are."""
    body, args, rest = docstring.partition("\nArgs:")
    lines: list[str] = []
    in_item = False
    for line in body.splitlines():
        if found := FIELD.match(line):
            if not in_item:
                lines.append("")
            names = f"`{found['names']}{found['call'] or ''}`"
            lines.append(f"- {names}: {line[found.end() :]}")
            in_item = True
        elif in_item and line.startswith("    "):
            lines.append(line[2:])
        else:
            if in_item and line:
                lines.append("")
            in_item = False
            lines.append(line)
    return "\n".join(lines) + args + rest
