"""Functions by name, "package.module:function", and the arguments that a function takes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from jaxpg.errors import UserError


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
    except Exception as error:
        raise UserError(
            f"The {what} {name} cannot be imported: {type(error).__name__}: {error}. Install its module, or add the "
            "folder that contains it to PYTHONPATH."
        ) from error
    if not callable(found):
        raise UserError(f"{name} must be a function, not {found!r}.")
    return found


def argument_defaults(factory: Callable[..., Any]) -> dict[str, Any]:
    """Names of the arguments of a function or class, with their defaults (`inspect.Parameter.empty` without one)."""
    parameters = inspect.signature(factory).parameters.values()
    return {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
