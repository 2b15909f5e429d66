"""The settings of a function, read from its signature and docstring: names, types, defaults, meanings.

So the settings that the command line and the configs offer are declared once, where they are used.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxpg.errors import UserError
from jaxpg.types import Array

REQUIRED: Any = inspect.Parameter.empty
"""The default of a setting that has none."""


class Option(NamedTuple):
    """A setting of a function.

    name: the keyword.
    default: its default value, `REQUIRED` where there is none.
    kind: its type as a config may give it, such as `int` or `float | None`.
    meaning: its line under "Args:" in the docstring.
    """

    name: str
    default: Any
    kind: Any
    meaning: str


def options(function: Callable[..., Any], parents: Sequence[Callable[..., Any]] = ()) -> dict[str, Option]:
    """The keyword-only settings of a function by name.

    Args:
        function: a function or a dataclass.
        parents: the functions it passes settings on to, nearest first: a meaning that its own docstring does not
            state is that of the nearest parent that does.
    """
    meanings: dict[str, str] = {}
    for documented in (*reversed(parents), function):
        meanings |= _meanings(inspect.getdoc(documented) or "")
    return {
        name: Option(name, p.default, _without_array(p.annotation), meanings.get(name, ""))
        for name, p in inspect.signature(function, eval_str=True).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    }


def check(option: Option, value: Any, *, minimum: float = -math.inf) -> Any:
    """The value converted to the option's type: an int to a float, a list to a tuple, "none" to None.

    Raises:
        UserError: it has another type, or a number in it is not finite or below `minimum`.
    """
    accepted = _members(option.kind)
    if value in (None, "none") and types.NoneType in accepted:
        return None
    for kind in accepted:
        converted = _convert(value, kind)
        if converted is not None:
            _check_range(option, converted, minimum)
            return converted
    raise UserError(f"{option.name} must be {describe_kind(option.kind)}, not {value!r}.")


def describe_kind(kind: Any) -> str:
    """A type in words."""
    words = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a string",
        dict: "a table",
        types.NoneType: "none",
    }
    return " or ".join(words.get(member, "a list of integers") for member in _members(kind))


def _convert(value: Any, kind: Any) -> Any:
    """The value as `kind`, None if it is not of that kind."""
    if isinstance(value, bool):
        return value if kind is bool else None
    if kind is float and isinstance(value, int | float):
        return float(value)
    if typing.get_origin(kind) is Sequence:
        fits = isinstance(value, list | tuple) and all(type(x) is int for x in value)
        return tuple(value) if fits else None
    return value if isinstance(kind, type) and isinstance(value, kind) else None


def _check_range(option: Option, value: Any, minimum: float) -> None:
    numbers = [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, int | float)]
    for x in numbers:
        if not math.isfinite(x):
            raise UserError(f"{option.name} must be finite, not {x}.")
        if x < minimum:
            raise UserError(f"{option.name} must be at least {minimum:g}, not {x!r}.")


def _members(kind: Any) -> tuple[Any, ...]:
    """The types that a union consists of; another type is its only member."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _without_array(kind: Any) -> Any:
    """`float | Array | None` as `float | None`: callers of the library may trace a number, a config states it."""
    return functools.reduce(operator.or_, [member for member in _members(kind) if member is not Array])


def _meanings(doc: str) -> dict[str, str]:
    """The lines `name: meaning` under "Args:", continued where the next line is indented further."""
    _, _, section = doc.partition("Args:\n")
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}\S.*)*)", section.partition("\n\n")[0], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
