"""Policy gradients in JAX, from REINFORCE to R1: algorithms as records of small pure functions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpg import envs, ladder, policy_gradient, preferences
    from jaxpg.models import language_model as language
    from jaxpg.models import networks

_MODULES = {
    "envs": "jaxpg.envs",
    "ladder": "jaxpg.ladder",
    "language": "jaxpg.models.language_model",
    "networks": "jaxpg.models.networks",
    "policy_gradient": "jaxpg.policy_gradient",
    "preferences": "jaxpg.preferences",
}

__all__ = ["envs", "ladder", "language", "networks", "policy_gradient", "preferences"]


def __getattr__(name: str) -> Any:
    """Import a module of the public face when it is first asked for.

    gymnax computes while it is imported, and the command line has to choose jax's devices before anything computes.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(_MODULES[name])
