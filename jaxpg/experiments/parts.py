"""The parts that a config names: those of jaxpg, and functions of the user's as "module:function".

    algorithm = "module:function"                         (*, num_envs=..., ...) -> PolicyGradient, or -> DeepQ
    network = { kind = "module:function", width = 64 }    (env, *, width=...) -> (Policy, Critic)
    optimizer = { kind = "optax:scale_by_lion" }          (...) -> optax transformation, uphill, without a step size
    schedule = { kind = "module:function" }               (...) -> (environment steps -> step size)
    callbacks."module:function" = { patience = 5 }        (...) -> runs.Callback

An environment may be one too (envs/registry.py). Each function takes the settings that stand beside its name; those of
algorithms and networks are keyword-only, with defaults, types and meanings as in jaxpg's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpg import ladder, preferences, values
from jaxpg.algorithm import PolicyGradient
from jaxpg.envs.registry import check_settings
from jaxpg.errors import UserError, excerpt, refuse_unknown
from jaxpg.experiments.signatures import Option, check_free_settings, options
from jaxpg.ladder_settings import PARENTS
from jaxpg.models import language_model, networks
from jaxpg.types import Array, Critic, Env, Policy
from jaxpg.update.optimizers import check_uphill, sgd
from jaxpg.user_input.domains import ANY, DOMAINS
from jaxpg.user_input.user_code import argument_defaults, explain_failure, import_user_code, is_code_name
from jaxpg.values.deep_q import DeepQ

AlgorithmT = TypeVar("AlgorithmT", PolicyGradient, DeepQ)

NETWORKS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (networks.mlp, networks.cnn, networks.recurrent, language_model.transformer)
}
Q_NETWORKS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (values.mlp, values.cnn)}
ALGORITHMS: dict[str, Callable[..., Any]] = {
    **values.TABULAR_ALGORITHMS,
    **values.ALGORITHMS,
    **ladder.ALGORITHMS,
    **{
        f.__name__: f
        for f in (preferences.sft, preferences.reward_model, preferences.process_reward_model, preferences.dpo)
    },
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
    return _options(algorithm, function, [algorithm_function(name) for name in lineage])


def network_options(algorithm: str, kind: Any) -> dict[str, Option]:
    """The settings of a kind of network.

    Raises:
        UserError: as `network_function`.
    """
    return _options(str(kind), network_function(algorithm, kind))


def _options(name: str, function: Callable[..., Any], parents: Sequence[Callable[..., Any]] = ()) -> dict[str, Option]:
    """`options`; a setting that only a function of the user's has may be any number, unless its name is known."""
    known = options(function, parents)
    if not is_code_name(name):
        return known
    ours = {"num_envs", *DOMAINS, *(name for parent in parents for name in options(parent))}
    return {name: option if name in ours else option._replace(domain=ANY) for name, option in known.items()}


def is_deep_q(name: str) -> bool:
    """Whether an algorithm is a DeepQ: one of jaxpg's, or one of the user's whose annotation, `-> DeepQ`, says so.

    What the networks of an algorithm are has to be known before its settings are. `child_of(values.dqn)` annotates.
    """
    if name in ALGORITHMS:
        return name in values.ALGORITHMS
    return inspect.signature(algorithm_function(name), eval_str=True).return_annotation is DeepQ


def make_algorithm(name: str, settings: Mapping[str, Any]) -> PolicyGradient | DeepQ:
    """The record of an algorithm of the policy-gradient ladder or of the DQN family, or of one of the user's.

    Raises:
        UserError: a function of the user's raised, or returned something else, or lets num_envs have no effect.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name](**settings)
    with explain_failure(f"The algorithm {name}"):
        algorithm = algorithm_function(name)(**settings)
    annotated = is_deep_q(name)
    if isinstance(algorithm, DeepQ) and not annotated:
        raise UserError(
            f"The algorithm {name} returns a DeepQ, and its networks are chosen before it is called: annotate the "
            "function with -> DeepQ."
        )
    if not isinstance(algorithm, DeepQ if annotated else PolicyGradient):
        wanted = "DeepQ, as its annotation says" if annotated else "PolicyGradient, such as ladder.ppo()._replace(...)"
        raise UserError(f"The algorithm {name} must return a {wanted}, not {_type_of(algorithm)}.")
    if algorithm.collector.num_envs != settings["num_envs"]:
        raise UserError(
            f"The algorithm {name} collects from {algorithm.collector.num_envs} environments where its setting "
            f"num_envs is {settings['num_envs']}: pass num_envs on to what it builds on."
        )
    return algorithm


def networks_of(algorithm: str) -> dict[str, Callable[..., Any]]:
    """jaxpg's own kinds of network for an algorithm."""
    if is_code_name(algorithm):
        return Q_NETWORKS if is_deep_q(algorithm) else NETWORKS
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


def with_own_parts(
    algorithm: AlgorithmT,
    *,
    optimizer: Mapping[str, Any],
    schedule: Mapping[str, Any],
    max_grad_norm: Array | float | None,
) -> AlgorithmT:
    """The record of an algorithm with the optimizer and the schedule that a config names.

    Args:
        algorithm: the record.
        optimizer: kind and settings, empty for the algorithm's own.
        schedule: the same of the step size.
        max_grad_norm: gradients are clipped by their norm in front of the optimizer, as they are in front of Adam.

    Raises:
        UserError: as `make_part`; the optimizer or the schedule is none, or has the sign or the step size in it.
    """
    if optimizer:
        own = _check_optimizer(optimizer["kind"], make_part("optimizer", **_named(optimizer)))
        clip = sgd(max_grad_norm=max_grad_norm)
        algorithm = algorithm._replace(optimizer=lambda: optax.chain(clip, own))
    if schedule:
        step_size = _check_schedule(schedule["kind"], make_part("schedule", **_named(schedule)))
        algorithm = algorithm._replace(learning_rate=step_size)
    return algorithm


def _named(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table with a kind as arguments of `make_part`."""
    return {"name": table["kind"], "settings": {name: x for name, x in table.items() if name != "kind"}}


def _check_optimizer(name: str, made: Any) -> optax.GradientTransformation:
    """An optimizer of the user's, tried on one gradient.

    Raises:
        UserError: it is none, or its updates point against the gradient, as those of `optax.adam` do.
    """
    if not isinstance(made, optax.GradientTransformation):
        raise UserError(f"The optimizer {name} must return an optax.GradientTransformation, not {_type_of(made)}.")
    with explain_failure(f"The optimizer {name}"):
        check_uphill(made, f"The optimizer {name}")
    return made


def _check_schedule(name: str, made: Any) -> Callable[[Array], Array]:
    """A schedule of the user's, tried at step 0: environment steps so far [] -> step size [].

    Raises:
        UserError: it is no function, or its value is not one number from 0 on.
    """
    if not callable(made):
        raise UserError(f"The schedule {name} must return a function of the environment steps, not {_type_of(made)}.")
    with jax.ensure_compile_time_eval(), explain_failure(f"The schedule {name}"):
        first = np.asarray(made(jnp.zeros((), jnp.int32)))
        fits = first.shape == () and bool(0 <= first < np.inf)
    if not fits:
        raise UserError(f"The schedule {name} must give one number, at least 0; at step 0 it gives {excerpt(first)}.")
    return lambda steps: jnp.asarray(made(steps), jnp.float32)


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
    if first is None and positional[:1] == ["env"]:
        raise UserError(
            f"{name} is no algorithm: its first argument is env, as that of a network, which is named by --set "
            f"network.kind={name}. A function of an algorithm takes keyword-only settings, num_envs among them."
        )
    if positional:
        raise UserError(f"The settings of {name} must be keyword-only: write a * in front of {positional[0]}.")
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def _type_of(value: Any) -> str:
    return f"a {type(value).__name__}"


def make_networks(algorithm: str, kind: str, env: Env, settings: Mapping[str, Any]) -> tuple[Policy, Any]:
    """The policy and the critic of a kind of network.

    Raises:
        UserError: a function of the user's raised, or returned something else.
    """
    made = _make_network(algorithm, kind, env, settings)
    if not is_code_name(kind):
        return made
    fits = isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Policy)
    if not fits or not isinstance(made[1], Critic | None):
        given = f"({', '.join(type(x).__name__ for x in made)})" if type(made) is tuple else _type_of(made)
        raise UserError(f"The network {kind} must return a pair (Policy, Critic), not {given}.")
    return made


def make_torso(algorithm: str, kind: str, env: Env, settings: Mapping[str, Any]) -> nn.Module:
    """The torso of a kind of network of action values.

    Raises:
        UserError: as `make_networks`.
    """
    made = _make_network(algorithm, kind, env, settings)
    if not isinstance(made, nn.Module):
        raise UserError(
            f"The network {kind} must return a flax module from observations to features for {algorithm}, as "
            f"values.mlp does, not {_type_of(made)}."
        )
    return made


def _make_network(algorithm: str, kind: str, env: Env, settings: Mapping[str, Any]) -> Any:
    function = network_function(algorithm, kind)
    if not is_code_name(kind):
        return function(env, **settings)
    with explain_failure(f"The network {kind}"):
        return function(env, **settings)
