"""The settings of a function, read from its signature and docstring: names, types, defaults, meanings.

So the settings that the command line and the configs offer are declared once, where they are used.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpg.errors import UserError, excerpt
from jaxpg.types import Array
from jaxpg.user_input.domains import Domain, check_number, domain_of
from jaxpg.user_input.printable import printable

REQUIRED: Any = inspect.Parameter.empty
"""The default of a setting that has none."""
_PLAIN = (bool, int, float, str, list, tuple, dict)


class Option(NamedTuple):
    """A setting of a function.

    name: the keyword.
    default: its default value, `REQUIRED` where there is none.
    kind: its type as a config may give it, such as `int` or `float | None`.
    meaning: its line under "Args:" in the docstring.
    domain: which numbers it may be; None for those of its name (domains.py).
    """

    name: str
    default: Any
    kind: Any
    meaning: str
    domain: Domain | None = None


def options(function: Callable[..., Any], parents: Sequence[Callable[..., Any]] = ()) -> dict[str, Option]:
    """The keyword-only settings of a function by name.

    Args:
        function: a function or a dataclass.
        parents: the functions it passes settings on to, nearest first: a meaning that its own docstring does not
            state is that of the nearest parent that does.
    """
    return dict(_options(function, tuple(parents)))


@functools.lru_cache(maxsize=512)  # each point of a grid asks for all of them: 7 ms for one point without
def _options(function: Callable[..., Any], parents: tuple[Callable[..., Any], ...]) -> dict[str, Option]:
    meanings: dict[str, str] = {}
    for documented in (*reversed(parents), function):
        meanings |= _meanings(inspect.getdoc(documented) or "")
    return {
        name: Option(name, p.default, _kind_of(p), meanings.get(name, ""))
        for name, p in inspect.signature(function, eval_str=True).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    }


def check(option: Option, value: Any) -> Any:
    """The value converted to the option's type: an int to a float, a list to a tuple, "none" to None.

    Raises:
        UserError: it has another type, it is a number outside of the option's domain (domains.py), or a string that is
            empty or has characters that cannot be printed.
    """
    value = _of_python(value)
    accepted = _members(option.kind)
    if (value is None or (isinstance(value, str) and value == "none")) and types.NoneType in accepted:
        return None
    for kind in accepted:
        if _is_of_kind(value, kind):
            _check_domain(option, value)
            return _converted(value, kind)
    raise UserError(f"{option.name} must be {describe_kind(option.kind)}, not {excerpt(value)}.")


def _of_python(value: Any) -> Any:
    """A value with numbers and arrays of NumPy's or jax's, at any depth, as numbers and lists of Python's."""
    if isinstance(value, np.generic | np.ndarray | Array):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _of_python(x) for name, x in value.items()}
    return type(value)(map(_of_python, value)) if type(value) in (list, tuple) else value


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


def _is_of_kind(value: Any, kind: Any) -> bool:
    """Whether a config may give this value for the kind; true and false are no numbers."""
    if kind is Any:
        return True
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    if typing.get_origin(kind) is Sequence:
        return isinstance(value, list | tuple) and all(type(x) is int for x in value)
    return isinstance(kind, type) and isinstance(value, kind)


def _converted(value: Any, kind: Any) -> Any:
    if kind is float:
        return float(value)
    return tuple(value) if typing.get_origin(kind) is Sequence else value


def _check_domain(option: Option, value: Any) -> None:
    name, domain = option.name, option.domain or domain_of(option.name)
    if isinstance(value, str) and (not value or printable(value) != value):
        raise UserError(f"{name} must be a non-empty string of printable characters, not {excerpt(value)}.")
    for x in value if isinstance(value, list | tuple) else (value,):
        if isinstance(x, int | float) and not isinstance(x, bool):
            check_number(name, x, domain)


def check_free_settings(name: str, value: Any) -> None:
    """Check a value of a table whose settings are not declared here, such as those of an environment.

    Raises:
        UserError: it holds a number that is not finite or that int32 or float32 cannot hold, a text with
            characters that cannot be printed, or something else than numbers, texts, booleans, lists and tables.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            check_free_settings(f"{name}.{key}", inner)
    elif type(value) in (list, tuple):  # a record is another type of tuple, which no config states
        for inner in value:
            check_free_settings(name, inner)
    elif isinstance(value, str):
        if printable(value) != value:
            hint = " Where a setting takes line breaks, write the two characters \\n for one." if "\n" in value else ""
            raise UserError(f"{name} must be a string of printable characters, not {excerpt(value)}.{hint}")
    elif isinstance(value, int | float):
        check_number(name, value)
    else:
        raise UserError(f"{name} must be a number, a string, true or false, a list or a table, not {excerpt(value)}.")


def _members(kind: Any) -> tuple[Any, ...]:
    """The types that a union consists of; another type is its only member."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _kind_of(parameter: inspect.Parameter) -> Any:
    """The type of a setting: its annotation, or that of its default where a function of the user's has none.

    Raises:
        UserError: there is no annotation, and the default is nothing that a config can state.
    """
    if parameter.annotation is not inspect.Parameter.empty:
        return _without_array(parameter.annotation)
    if parameter.default is None or parameter.default is REQUIRED:
        return Any
    if type(parameter.default) not in _PLAIN:
        raise UserError(
            f"The setting {parameter.name} has the default {excerpt(parameter.default)}, which no config can state: "
            "write a number, a string, true or false, a list, a table or None there."
        )
    return Sequence[int] if isinstance(parameter.default, list | tuple) else type(parameter.default)


def _without_array(kind: Any) -> Any:
    """`float | Array | None` as `float | None`: callers of the library may trace a number, a config states it."""
    return functools.reduce(operator.or_, [member for member in _members(kind) if member is not Array])


def _meanings(doc: str) -> dict[str, str]:
    """The lines `name: meaning` under "Args:", continued where the next line is indented further."""
    _, _, section = doc.partition("Args:\n")
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}\S.*)*)", section.partition("\n\n")[0], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
