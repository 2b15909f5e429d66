"""Policy gradients in JAX, from REINFORCE to DAPO: algorithms as records of small pure functions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpg import envs, ladder, policy_gradient, preferences, values
    from jaxpg.models import language_model as language
    from jaxpg.models import networks

__all__ = ["envs", "ladder", "language", "networks", "policy_gradient", "preferences", "values"]

_MODULES = {"language": "jaxpg.models.language_model", "networks": "jaxpg.models.networks"}
"""Public modules whose import path differs from their public name."""


def __getattr__(name: str) -> Any:
    """Import a public module on first use.

    gymnax computes when it is imported, and the command line has to choose jax's devices before that.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(_MODULES.get(name, f"{__name__}.{name}"))


def __dir__() -> list[str]:
    """The public modules, and the other modules that have been imported so far."""
    return sorted({*globals(), *__all__})
