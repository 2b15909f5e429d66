"""Files of results: written whole or not at all, in JSON that every reader takes, and case by case.

Programs that measure for an hour are interrupted, or asked for some of their cases: what is finished then is in the
file, and what was not measured now stays as it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpg.files import replace_file
from jaxpg.training import provenance

provenance.commit()  # of the code that is imported now, and not when results are written


def read(path: Path) -> dict[str, Any]:
    """The results so far, none without the file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, results: Mapping[str, Any] | Sequence[Any]) -> None:
    """Replace the file at once, so that an interruption leaves the old one; null is what is not finite."""
    from jaxpg.report.comparison import to_jsonable  # not above: results are read without matplotlib and SciPy

    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(to_jsonable(results), indent=1, allow_nan=False) + "\n")


def put(path: Path, part: str, name: str, found: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write what was found of a case into the table of a part, in place of the case of that name alone.

    about: the machine, the arguments: each case has its own, since the cases of a file may be of several runs.
    """
    results = read(path)
    said = _said_once(results, about)
    cases = {known: {**said, **case} for known, case in results.get(part, {}).items()}
    write(path, {**results, part: {**cases, name: {**about, **found}}})


def put_row(path: Path, part: str, by: Sequence[str], found: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """`put` where the cases of a part are a list, each known by its values of the fields `by`."""
    results = read(path)
    said = _said_once(results, about)
    cases = [*({**said, **case} for case in results.get(part, ())), {**about, **found}]
    by_name = {tuple(case[field] for field in by): case for case in cases}  # the last, in the place of the first
    write(path, {**results, part: list(by_name.values())})


def _said_once(results: dict[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """What an older file says once for all of its cases, taken out of it."""
    return {key: results.pop(key) for key in about if key in results}
