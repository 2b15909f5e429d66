"""Reading the files of a run directory: checked records, or an error of one sentence.

What training and reports read from a run directory passes through `parse_file`. The directory may come from elsewhere
or be damaged, so every value is checked for its JSON type before it is used: `Check`s are put together to the shape
of a record, as in `record(steps=count, files=table_of(list_of(count)))`.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxpg.errors import UserError

T = TypeVar("T")
Check = Callable[[str, Any], Any]
"""The name of a place and the value in it -> the value.

Raises:
    ValueError: it is of another kind; says which place, what is there and what was expected.
"""


def read_file(path: Path, parse: Callable[[bytes], T], advice: str) -> T:
    """What `parse` makes of the content of a file, see `parse_file`.

    Args:
        path: the file.
        parse: content -> record.
        advice: a sentence that says what the user can do about a damaged file.

    Raises:
        UserError: the file cannot be read, or `parse` refused its content; names the file. One of `parse` as it is.
    """
    try:
        return parse_file(path, parse)
    except UserError:  # `parse` knows better what to do
        raise
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}. {advice}") from None


def parse_file(path: Path, parse: Callable[[bytes], T]) -> T:
    """What `parse` makes of the content of a file.

    Raises:
        ValueError: the file cannot be read, or `parse` raised a ValueError; says why, without a full stop.
    """
    try:
        return parse(path.read_bytes())
    except OSError as error:
        reason = error.strerror or str(error)
    except RecursionError:
        reason = "its brackets are nested too deeply"
    except UserError:
        raise
    except ValueError as error:
        reason = str(error).removesuffix(".")
    raise ValueError(reason)


def parse_json(content: bytes, check: Check) -> Any:
    """JSON whose value satisfies a check.

    Raises:
        ValueError: it does not; or it is not JSON.
    """
    try:
        value = json.loads(decode(content))
    except json.JSONDecodeError as error:
        if not content.strip(b"\0 \n\r\t"):
            raise ValueError("it is empty") from None
        raise ValueError(f"it is not JSON: {error.msg}, in line {error.lineno}, column {error.colno}") from None
    return check("its content", value)


def parse_toml(content: bytes) -> dict[str, Any]:
    """TOML, whose integers have 64 bits.

    Raises:
        ValueError: it is not TOML, or has a larger integer.
    """
    try:
        tables = tomllib.loads(decode(content))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is not TOML: {error}") from None
    _refuse_large_integers(tables)
    return tables


def _refuse_large_integers(value: Any) -> None:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _refuse_large_integers(each)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("it has an integer of more than 64 bits")


def decode(content: bytes) -> str:
    """Bytes as UTF-8.

    Raises:
        ValueError: they are not; names the first wrong byte.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise ValueError(f"it is not UTF-8 text: byte {error.start + 1} is {byte:#04x}") from None


def whole(low: int, high: int) -> Check:
    """A whole number of these bounds."""

    def check_whole(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(_expected(name, value, f"a whole number from {low} to {high}"))
        return value

    return check_whole


count = whole(0, 2**63 - 1)


def number(name: str, value: Any) -> float:
    """A number that fits a float; NaN and infinities are such."""
    if type(value) not in (int, float) or (type(value) is int and abs(value) > 2**1000):
        raise ValueError(_expected(name, value, "a number"))
    return float(value)


def finite(name: str, value: Any) -> float:
    """A number that is neither NaN nor infinite."""
    if not math.isfinite(number(name, value)):
        raise ValueError(_expected(name, value, "a finite number"))
    return float(value)


def text(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(_expected(name, value, "a string"))
    return value


def flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError(_expected(name, value, "true or false"))
    return value


def optional(check: Check) -> Check:
    """null, or what another check accepts."""
    return lambda name, value: None if value is None else check(name, value)


def list_of(check: Check, length: int | None = None) -> Check:
    """A list of values that another check accepts, of this length if one is given."""

    def check_list(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise ValueError(_expected(name, value, "a list" if length is None else f"a list of {length}"))
        return [check(f"entry {i} of {name}", x) for i, x in enumerate(value, start=1)]

    return check_list


def table(name: str, value: Any) -> dict[str, Any]:
    """An object with any fields."""
    if not isinstance(value, dict):
        raise ValueError(_expected(name, value, "an object with named fields"))
    return value


def table_of(check: Check) -> Check:
    """An object with any names, whose values another check accepts."""
    return lambda name, value: {key: check(f"{key!r} in {name}", x) for key, x in table(name, value).items()}


def record(*, absent: Mapping[str, Any] | None = None, **fields: Check) -> Check:
    """An object with these fields, others are left out; those in `absent` may be missing and have the values there."""
    defaults = absent or {}

    def check_record(name: str, value: Any) -> dict[str, Any]:
        found = table(name, value)
        if missing := [field for field in fields if field not in found and field not in defaults]:
            raise ValueError(f"{name} has no field {missing[0]!r}")
        return {
            field: check(f"{field!r} in {name}", found[field]) if field in found else defaults[field]
            for field, check in fields.items()
        }

    return check_record


def _expected(name: str, value: Any, what: str) -> str:
    shown = repr(value) if not isinstance(value, int) or abs(value) < 2**64 else "a number of many digits"
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    return f"{name} is {shown}, not {what}"
