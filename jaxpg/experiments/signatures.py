"""The settings of a function, read off its signature and docstring: names, types, defaults, meanings.

What the command line offers and what a config may say is nowhere listed a second time.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxpg.errors import UserError

REQUIRED: Any = inspect.Parameter.empty


class Option(NamedTuple):
    """A setting of a function.

    default: `REQUIRED` where there is none.
    kind: its annotation, such as `int` or `float | None`.
    meaning: its line under "Args:" in the docstring.
    """

    name: str
    default: Any
    kind: Any
    meaning: str


def options(function: Callable[..., Any], parents: Sequence[Callable[..., Any]] = ()) -> dict[str, Option]:
    """The keyword-only settings of a function by name; meanings that it does not state are its parents'."""
    meanings: dict[str, str] = {}
    for one in (*reversed(parents), function):
        meanings |= _meanings(inspect.getdoc(one) or "")
    namespace = vars(sys.modules[function.__module__])
    return {
        p.name: Option(p.name, p.default, _kind(p.annotation, namespace), meanings.get(p.name, ""))
        for p in inspect.signature(function).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }


def check(option: Option, value: Any, *, minimum: float = -math.inf) -> Any:
    """The value as the type that the option has: an int for a float, a list for a tuple, "none" for None.

    Raises:
        UserError: it has another type, is not finite, or a number in it is below `minimum`; no int is below that.
    """
    accepted = typing.get_args(option.kind) if _is_union(option.kind) else (option.kind,)
    if value in (None, "none") and types.NoneType in accepted:
        return None
    for kind in accepted:
        converted = _converted(value, kind)
        if converted is not None:
            _check_range(option, converted, minimum)
            return converted
    raise UserError(f"{option.name} must be {describe_kind(option.kind)}, not {value!r}.")


def describe_kind(kind: Any) -> str:
    """A type in words."""
    if _is_union(kind):
        return " or ".join(describe_kind(member) for member in typing.get_args(kind))
    if kind is types.NoneType:
        return "none"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a table"}
    return words.get(kind, "a list of integers")


def _converted(value: Any, kind: Any) -> Any:
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


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (types.UnionType, typing.Union)


def _kind(annotation: Any, namespace: dict[str, Any]) -> Any:
    return eval(annotation, namespace) if isinstance(annotation, str) else annotation


def _meanings(doc: str) -> dict[str, str]:
    """The lines `name: meaning` under "Args:", continued where the next line is indented further."""
    _, _, section = doc.partition("Args:\n")
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}\S.*)*)", section.partition("\n\n")[0], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
