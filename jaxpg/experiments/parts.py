"""The parts that a config names: those of jaxpg, and functions of the user's as "module:function".

    algorithm = "module:function"                         (*, num_envs=..., ...) -> PolicyGradient
    network = { kind = "module:function", width = 64 }    (env, *, width=...) -> (Policy, Critic)
    optimizer = { kind = "optax:scale_by_lion" }          (...) -> optax transformation, uphill, without a step size
    schedule = { kind = "module:function" }               (...) -> (environment steps -> step size)
    callbacks."module:function" = { patience = 5 }        (...) -> runs.Callback

An environment may be one too (envs/registry.py). Each function takes the settings that stand beside its name; those of
algorithms and networks are keyword-only, with defaults, types and meanings as in jaxpg's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxpg import ladder, preferences, values
from jaxpg.envs.registry import check_settings
from jaxpg.errors import UserError, refuse_unknown
from jaxpg.experiments.signatures import Option, check_free_settings, options
from jaxpg.ladder_settings import PARENTS
from jaxpg.models import language_model, networks
from jaxpg.policy_gradient import PolicyGradient
from jaxpg.user_code import argument_defaults, explain_failure, import_user_code, is_code_name

NETWORKS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (networks.mlp, networks.cnn, networks.recurrent, language_model.transformer)
}
Q_NETWORKS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (values.mlp, values.cnn)}
ALGORITHMS: dict[str, Callable[..., Any]] = {
    **values.TABULAR_ALGORITHMS,
    **values.ALGORITHMS,
    **ladder.ALGORITHMS,
    **{f.__name__: f for f in (preferences.sft, preferences.reward_model, preferences.dpo)},
}
NETWORKS_OF: dict[str, dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(ALGORITHMS, NETWORKS),
    **dict.fromkeys(values.ALGORITHMS, Q_NETWORKS),
    **{name: {} for name in values.TABULAR_ALGORITHMS},
}
"""The kinds of network that each algorithm trains; none for a table. It then ignores the network of its task."""


def algorithm_function(name: str) -> Callable[..., Any]:
    """The function behind the name of an algorithm.

    Raises:
        UserError: there is none, it cannot be imported, or has not `num_envs` among settings that are keyword-only.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if not is_code_name(name):
        refuse_unknown("algorithm", name, ALGORITHMS)
    function = import_user_code(name, "algorithm")
    if "num_envs" not in _check_keyword_only(name, function):
        raise UserError(
            f"The algorithm {name} has no setting num_envs, the number of parallel environments: add num_envs: int = "
            "16 to its keyword-only arguments, or inherit that of an algorithm (ladder_settings.child_of)."
        )
    return function


def algorithm_options(algorithm: str) -> dict[str, Option]:
    """The settings of an algorithm.

    Raises:
        UserError: as `algorithm_function`.
    """
    function = algorithm_function(algorithm)
    lineage, parent = [], PARENTS.get(algorithm)
    while parent is not None:
        lineage.append(parent)
        parent = PARENTS.get(parent)
    return options(function, [algorithm_function(name) for name in lineage])


def make_algorithm(name: str, settings: Mapping[str, Any]) -> PolicyGradient:
    """The record of an algorithm of the policy-gradient ladder, or of one of the user's.

    Raises:
        UserError: a function of the user's raised, or returned something else, or lets num_envs have no effect.
    """
    if name in ladder.ALGORITHMS:
        return ladder.ALGORITHMS[name](**settings)
    with explain_failure(f"The algorithm {name}"):
        algorithm = algorithm_function(name)(**settings)
    if not isinstance(algorithm, PolicyGradient):
        raise UserError(
            f"The algorithm {name} must return a PolicyGradient, such as ladder.ppo()._replace(...), not "
            f"{_type_of(algorithm)}."
        )
    if algorithm.collect.num_envs != settings["num_envs"]:
        raise UserError(
            f"The algorithm {name} collects from {algorithm.collect.num_envs} environments where its setting num_envs "
            f"is {settings['num_envs']}: pass num_envs on to what it builds on."
        )
    return algorithm


def networks_of(algorithm: str) -> dict[str, Callable[..., Any]]:
    """jaxpg's own kinds of network for an algorithm."""
    return NETWORKS_OF.get(algorithm, NETWORKS)


def network_function(algorithm: str, kind: Any) -> Callable[..., Any]:
    """The function behind the kind of a network, for an algorithm that has one.

    Raises:
        UserError: there is none, it cannot be imported, or it is not a function of `env` and keyword-only settings.
    """
    known = networks_of(algorithm)
    if str(kind) in known:
        return known[str(kind)]
    if not is_code_name(str(kind)):
        refuse_unknown("kind of network", str(kind), known, f" for {algorithm}")
    function = import_user_code(kind, "network")
    _check_keyword_only(kind, function, first="env")
    return function


def make_part(what: str, name: str, settings: Mapping[str, Any]) -> Any:
    """What a function of the user's returns for these settings.

    Args:
        what: what it is used as, for the messages of errors: "optimizer", "schedule", "callback".
        name: "module:function".
        settings: its arguments.

    Raises:
        UserError: it is no such name, it cannot be imported, it has no such setting, a setting has another type than
            its default, or it raised.
    """
    if not is_code_name(name):
        raise UserError(f'{what} takes the name of a function, "module:function", not {name!r}.')
    function = import_user_code(name, what)
    check_free_settings(name, settings)
    check_settings(name, dict(settings), argument_defaults(function))
    with explain_failure(f"The {what} {name}"):
        return function(**settings)


def _check_keyword_only(name: str, function: Callable[..., Any], first: str | None = None) -> list[str]:
    """The settings of a function of the user's; `first` is what it takes in front of them."""
    with explain_failure(f"The signature of {name}"):
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    if first is not None:
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise UserError(f"{name} must take {first} as its first argument, and its settings after a *.")
        del parameters[0]
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional:
        raise UserError(f"The settings of {name} must be keyword-only: write a * in front of {positional[0]}.")
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def _type_of(value: Any) -> str:
    return f"a {type(value).__name__}"


def check_networks(name: str, made: Any) -> tuple[Any, Any]:
    """What a network function of the user's returned, checked: a policy and a critic.

    Raises:
        UserError: it is something else.
    """
    from jaxpg.types import Critic, Policy

    fits = isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Policy)
    if not fits or not isinstance(made[1], Critic | None):
        raise UserError(f"The network {name} must return a pair (Policy, Critic), not {_type_of(made)}.")
    return made
