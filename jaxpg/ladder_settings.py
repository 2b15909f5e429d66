"""Which settings an algorithm inherits from its parent: by type, for editors and mypy, and at run time.

A rung states its own settings in its signature and passes the inherited ones on to its parent:

    @child_of(parent, learning_rate=1e-3)
    def rung(*, clip: Scalar = 0.2, **inherited: Unpack[ParentSettings]) -> PolicyGradient:
        return parent(**inherited)._replace(...)

The TypedDict behind `Unpack` (PEP 692) names what is inherited. A setting of the parent that has no meaning for the
rung is not in it, and is refused. New defaults of inherited settings are arguments of `child_of`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypedDict, TypeVar, cast, get_args

import numpy as np

from jaxpg.algorithm import PolicyGradient
from jaxpg.errors import UserError, excerpt, hint
from jaxpg.types import Array, Scalar
from jaxpg.user_input.domains import check_scalars, check_whole, domain_of

Algorithm = Callable[..., PolicyGradient]
AlgorithmT = TypeVar("AlgorithmT", bound=Callable[..., Any])
P = ParamSpec("P")

PARENTS: dict[str, str] = {}
"""The name of every algorithm that has a parent, and of its parent; of all ladders that have been imported."""

LENGTHS_OF_SCHEDULES = ("anneal_steps", "epsilon_steps", "beta_steps")
"""Whole numbers that may be traced, as under `jax.vmap`. On all others the program itself depends."""


class ReinforceSettings(TypedDict, total=False):
    """What every descendant of `reinforce` inherits."""

    num_envs: int
    learning_rate: Scalar
    anneal_steps: int | None
    max_grad_norm: Scalar | None
    adam_eps: Scalar
    gamma: Scalar
    entropy_coefficient: Scalar
    normalize_advantages: bool


class CriticSettings(ReinforceSettings, total=False):
    """What every descendant of `actor_critic_mc` that keeps the critic inherits."""

    value_coefficient: Scalar


class A2CSettings(CriticSettings, total=False):
    """What the children of `a2c` inherit."""

    num_steps: int | None
    gae_lambda: Scalar
    reset_pool: int


class MinibatchSettings(TypedDict, total=False):
    """The settings of `ppo` that belong to its epochs of minibatches."""

    epochs: int
    num_minibatches: int
    target_kl: Scalar | None
    chunk_rows: int | None


class ClipSettings(TypedDict, total=False):
    """The settings of `ppo` that belong to its surrogate."""

    clip: Scalar
    clip_high: Scalar | None
    dual_clip: Scalar | None


class EpisodicPPOSettings(CriticSettings, MinibatchSettings, ClipSettings, total=False):
    """The settings of `ppo` except `num_steps` and `reset_pool`, for whole episodes with a critic."""

    gae_lambda: Scalar
    value_clip: Scalar | None


class CriticFreePPOSettings(ReinforceSettings, MinibatchSettings, ClipSettings, total=False):
    """The settings of `ppo` except `num_steps`, `reset_pool` and those of the critic, for whole episodes in groups."""


class ReferenceFreeGRPOSettings(CriticFreePPOSettings, total=False):
    """The settings of `grpo` except those of the reference policy."""

    group_size: int


class GRPOSettings(ReferenceFreeGRPOSettings, total=False):
    """All of `grpo`."""

    kl: str | None
    kl_coefficient: Scalar
    reference_rate: Scalar


class ClipFreeDAPOSettings(ReinforceSettings, MinibatchSettings, total=False):
    """The settings of `dapo` except its clip, for another surrogate."""

    group_size: int
    max_resample_rounds: int | None
    overlong_filtering: bool


def root(algorithm: AlgorithmT) -> AlgorithmT:
    """An algorithm without a parent, whose settings are checked as those of its descendants are."""
    parameters = inspect.signature(algorithm, eval_str=True).parameters

    @wraps(algorithm)
    def checked(**settings: Any) -> Any:
        _check(algorithm.__name__, settings, parameters)
        return algorithm(**settings)

    return cast(AlgorithmT, checked)


def _check(algorithm: str, settings: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Refuse settings that an algorithm does not have, as Python does, and values that these settings cannot have."""
    for name in settings:
        if name not in parameters:
            raise TypeError(f"{algorithm} has no setting {name!r}. {hint(name, parameters)}")
    check_scalars(settings)
    _check_kinds(settings, parameters)


def _check_kinds(settings: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Refuse what is of another kind than the annotation of its setting: whole numbers, numbers and truth values.

    Raises:
        UserError: of another kind; a whole number outside of its domain (domains.py); or an array, though the program
            depends on it, as on a number of environments or on a truth value.
    """
    for name, value in settings.items():
        kind = parameters[name].annotation if name in parameters else None
        if value is None and kind in (int | None, Scalar | None):
            continue
        if kind in (int, int | None) and not (name in LENGTHS_OF_SCHEDULES and isinstance(value, Array)):
            check_whole(name, value, domain_of(name))
        elif kind is bool and not isinstance(value, bool | np.bool_):
            raise UserError(f"{name} must be True or False, not {excerpt(value)}: the program itself depends on it.")
        elif kind in (Scalar, Scalar | None) and not _is_number(value):
            own = " A schedule of your own is a field: algorithm._replace(learning_rate=f), with f of the steps so far."
            advice = own if name == "learning_rate" and callable(value) else ""
            raise UserError(f"{name} must be a number, not {excerpt(value)}.{advice}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number | np.ndarray | Array) and not isinstance(value, bool)


def child_of(
    parent: Callable[P, Any],
    *_: P.args,
    **defaults: P.kwargs,
) -> Callable[[AlgorithmT], AlgorithmT]:
    """Registers an algorithm under its parent; `defaults` are new defaults of settings that it inherits.

    The algorithm then raises a TypeError for a setting that it does not have. `inspect.signature` lists all settings
    that it has, with their defaults: configs, `jaxpg list options` and notebooks read it. Without an annotation of its
    own it returns what its parent does.
    """

    def register(algorithm: AlgorithmT) -> AlgorithmT:
        name = algorithm.__name__
        parameters = _all_parameters(algorithm, parent, defaults)

        @wraps(algorithm)
        def with_defaults(**settings: Any) -> Any:
            _check(name, settings, parameters)
            return algorithm(**(defaults | settings))

        returned = _returned(algorithm) or _returned(parent)
        signature = inspect.Signature(list(parameters.values()), return_annotation=returned)
        with_defaults.__signature__ = signature  # type: ignore[attr-defined]
        PARENTS[_public_name(algorithm)] = _public_name(parent)
        return cast(AlgorithmT, with_defaults)

    return register


def _returned(algorithm: Callable[..., Any]) -> Any:
    """The annotation of what it returns, None without one."""
    returned = inspect.signature(algorithm, eval_str=True).return_annotation
    return None if returned is inspect.Signature.empty else returned


def _public_name(algorithm: Callable[..., Any]) -> str:
    """How a config names an algorithm: jaxpg's own by its name, one of the user's as "module:function"."""
    own = algorithm.__module__.partition(".")[0] == __name__.partition(".")[0]
    return algorithm.__name__ if own else f"{algorithm.__module__}:{algorithm.__name__}"


def _all_parameters(
    algorithm: Callable[..., Any], parent: Callable[..., Any], defaults: dict[str, Any]
) -> dict[str, inspect.Parameter]:
    """The parameters of an algorithm, its `**inherited` replaced by the parameters of the parent that it stands for."""
    own = dict(inspect.signature(algorithm, eval_str=True).parameters)
    rest = [own.pop(name) for name, x in list(own.items()) if x.kind is inspect.Parameter.VAR_KEYWORD]
    inherited = [settings for parameter in rest for settings in get_args(parameter.annotation)]
    if rest and not inherited:
        raise UserError(
            f"{algorithm.__name__}: **{rest[0].name} needs an annotation that says which settings of its parent the "
            f"algorithm takes: **{rest[0].name}: Unpack[A2CSettings], or another of jaxpg.ladder_settings."
        )
    from_parent = {
        name: parameter.replace(default=defaults.get(name, parameter.default))
        for name, parameter in inspect.signature(parent, eval_str=True).parameters.items()
        if name in own or any(name in settings.__annotations__ for settings in inherited)
    }
    return from_parent | own
