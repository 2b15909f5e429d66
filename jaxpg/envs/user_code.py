"""A user's own functions by name, "package.module:function"."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from jaxpg.errors import UserError


def import_user_code(name: str, what: str) -> Callable[..., Any]:
    """The function "package.module:function"; `what` names its purpose in error messages.

    Raises:
        UserError: it cannot be imported, or is not a function.
    """
    module, _, function = name.partition(":")
    try:
        imported = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise UserError(
            f"The {what} {name} cannot be imported: {type(error).__name__}: {error}. Its module must be "
            "installed or be in a folder on PYTHONPATH."
        ) from error
    if not callable(imported):
        raise UserError(f"{name} is not a function but {imported!r}.")
    return imported
