"""Functions by name, "package.module:function", and the arguments that a function takes."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxpg.errors import UserError

_NOT_THE_USERS = (str(Path(__file__).parent), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<")
"""How the names of source files begin that are jaxpg's own, or of Python and installed packages."""


def import_user_code(name: str, what: str) -> Callable[..., Any]:
    """The function that `name`, "package.module:function", stands for.

    Args:
        name: the name as the user gave it.
        what: what the function is used as, for the message of an error: "environment", "reward function".

    Raises:
        UserError: it cannot be imported, or is not a function.
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"The {what} {name} cannot be imported: {describe_failure(error)}. Install its module, or add the "
            "folder that contains it to PYTHONPATH."
        ) from error
    if not callable(found):
        raise UserError(f"{name} must be a function, not {found!r}.")
    return found


def argument_defaults(factory: Callable[..., Any]) -> dict[str, Any]:
    """Names of the arguments of a function or class, with their defaults (`inspect.Parameter.empty` without one)."""
    parameters = inspect.signature(factory).parameters.values()
    return {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


@contextlib.contextmanager
def explain_failure(what: str) -> Iterator[None]:
    """Raise what a user's code raises, `sys.exit` included, as a UserError: "WHAT raised ...".

    Only the user's code may run inside, and what traces or calls it.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{what} raised {describe_failure(error)}.") from error


def describe_failure(error: BaseException) -> str:
    """Type, first line and place of an exception: "ValueError: too long (bandit.py, line 12)"."""
    message = (str(error).strip().splitlines() or [""])[0].removesuffix(".")
    frames = [x for x in traceback.extract_tb(error.__traceback__) if not x.filename.startswith(_NOT_THE_USERS)]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {message}' if message else ''}{place}"
