"""Policy gradients in JAX, from REINFORCE to DAPO: algorithms as records of small pure functions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpg import envs, ladder, policy_gradient, preferences, values
    from jaxpg.models import language_model as language
    from jaxpg.models import networks
    from jaxpg.parallel.machine import compiler_options
    from jaxpg.runs import Callback, fit, load

__all__ = [
    "Callback",
    "compiler_options",
    "envs",
    "fit",
    "ladder",
    "language",
    "load",
    "networks",
    "policy_gradient",
    "preferences",
    "values",
]

_MODULES = {"language": "jaxpg.models.language_model", "networks": "jaxpg.models.networks"}
"""Public modules whose import path differs from their public name."""
_OF_RUNS = ("Callback", "fit", "load")
"""What is no module, but stands in the face of `jaxpg.runs`."""


def __getattr__(name: str) -> Any:
    """Import what is public on first use.

    So the command line answers at once, and it and `fit` choose jax's devices before anything computes.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _OF_RUNS:
        parallel = importlib.import_module("jaxpg.parallel")
        parallel.one_device_per_core()
        parallel.keep_compiled_programs()
        return getattr(importlib.import_module("jaxpg.runs"), name)
    if name == "compiler_options":
        return importlib.import_module("jaxpg.parallel.machine").compiler_options
    return importlib.import_module(_MODULES.get(name, f"{__name__}.{name}"))


def __dir__() -> list[str]:
    """What is public, and the other modules that have been imported so far."""
    return sorted({*globals(), *__all__})
