"""Functions of a user by name, "package.module:function"."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from jaxpg.errors import UserError


def import_user_code(name: str, what: str) -> Callable[..., Any]:
    """The function "package.module:function" of a user.

    Raises:
        UserError: it cannot be imported, or is no function.
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise UserError(
            f"The {what} {name} cannot be imported: {type(error).__name__}: {error}. Its module must be installed or "
            "lie in a folder that PYTHONPATH names."
        ) from error
    if not callable(found):
        raise UserError(f"{name} is no function, but {found!r}.")
    return found
