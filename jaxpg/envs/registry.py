"""Environments and wrappers by name; settings are checked before anything is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxpg.envs import gymnax_adapter, mdps, probes, tabular, text, wrappers
from jaxpg.errors import UserError, hint, refuse_unknown
from jaxpg.types import Env
from jaxpg.user_code import argument_defaults, import_user_code

Factory = Callable[..., Env]


def _tabular_factory(name: str, time_limit: int) -> Factory:
    """The factory of a world's environment: its settings are the world's and the time limit."""
    make_mdp = mdps.MDPS[name]

    def factory(*, time_limit: int = time_limit, **settings: Any) -> Env:
        return tabular.as_env(make_mdp(**settings), time_limit, name)

    limit = inspect.Parameter("time_limit", inspect.Parameter.KEYWORD_ONLY, default=time_limit, annotation=int)
    parameters = [*inspect.signature(make_mdp).parameters.values(), limit]
    factory.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return factory


def _random_mdp(seed: int = 0, states: int = 5, actions: int = 3, time_limit: int = 100) -> Env:
    return tabular.as_env(mdps.random_mdp(jax.random.key(seed), states, actions), time_limit, "random_mdp")


def _text_factory(make_task: Callable[..., text.Task]) -> Factory:
    """The factory of a task's environment: its settings are the task's and those of `text_env`."""
    env_parameters = dict(inspect.signature(text.text_env).parameters)
    del env_parameters["task"]

    def factory(**settings: Any) -> Env:
        env_settings = {key: settings.pop(key) for key in env_parameters if key in settings}
        return text.text_env(make_task(**settings), **env_settings)

    parameters = [*inspect.signature(make_task).parameters.values(), *env_parameters.values()]
    factory.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return factory


_TIME_LIMITS = {"grid_world": 200, "frozen_lake": 100, "cliff_walking": 200, "taxi": 200, "random_walk": 10_000}
_factories: dict[str, Factory] = {
    **{name: _tabular_factory(name, limit) for name, limit in _TIME_LIMITS.items()},
    "random_mdp": _random_mdp,
    "probe-value": probes.value,
    "probe-observation": probes.observation,
    "probe-discount": probes.discount,
    "probe-action": probes.action,
    "probe-policy": probes.policy,
    **{name: _text_factory(task) for name, task in text.TASKS.items()},
    "json_lines": _text_factory(text.json_lines),
}
WRAPPERS: dict[str, Factory] = {
    wrapper.__name__: wrapper
    for wrapper in (
        wrappers.sticky_actions,
        wrappers.time_limit,
        wrappers.frame_stack,
        wrappers.flatten,
        wrappers.clip_actions,
    )
}


def register(name: str, factory: Factory) -> None:
    """Lets `make(name, **settings)` return `factory(**settings)`.

    Args:
        name: a name that is not taken.
        factory: keyword arguments with defaults -> Env; its signature defines the settings.

    Raises:
        UserError: the name is taken.
    """
    if name in names():
        raise UserError(f"The environment name {name!r} is already taken; register yours under another one.")
    _factories[name] = factory


def names() -> list[str]:
    """Every name that `make` knows: jaxpg's own, those registered by a user, and gymnax's."""
    return [*_factories, *gymnax_adapter.gymnax_names()]


def make(name: str, /, **settings: Any) -> Env:
    """Makes an environment.

    Args:
        name: one of `names()`, such as "CartPole-v1" or "grid_world", or the name "package.module:function" of a
            function that returns an Env.
        **settings: for gymnax's environments the constructor's arguments and the fields of EnvParams, such as
            `max_steps_in_episode` or `gravity`; for others the arguments of the factory.

    Returns:
        An Env with float32 array observations. The state of gymnax's environments is their EnvState.

    Raises:
        UserError: an unknown name or setting (with the nearest valid one), a value of the wrong type, a missing value;
            a function that cannot be imported or called, or does not return an Env.
    """
    _check_settings(name, settings, default_settings(name))
    with jax.ensure_compile_time_eval():  # a sweep calls this while tracing, and spaces must be concrete
        if name in _factories:
            return _factories[name](**settings)
        if ":" in name:
            return _make_user_env(name, settings)
        return gymnax_adapter.make_gymnax(name, settings)


def default_settings(name: str) -> dict[str, Any]:
    """The settings that `make` takes for an environment, with their defaults, `inspect.Parameter.empty` without one.

    Raises:
        UserError: an unknown name, a function that cannot be imported, or MNISTBandit without its data.
    """
    if name in _factories:
        return argument_defaults(_factories[name])
    if name in gymnax_adapter.gymnax_names():
        return gymnax_adapter.gymnax_settings(name)
    if ":" in name:
        return argument_defaults(import_user_code(name, "environment"))
    refuse_unknown("environment", name, names())


def wrap(env: Env, name: str, /, **settings: Any) -> Env:
    """Applies the wrapper of this name, a function of `jaxpg.envs.wrappers`.

    Raises:
        UserError: an unknown name or setting (with the nearest valid one), or a value of the wrong type.
    """
    if name not in WRAPPERS:
        refuse_unknown("wrapper", name, WRAPPERS)
    known = argument_defaults(WRAPPERS[name])
    del known["env"]
    _check_settings(name, settings, known)
    return WRAPPERS[name](env, **settings)


def _make_user_env(name: str, settings: dict[str, Any]) -> Env:
    """The environment that a user's function "package.module:function" returns."""
    try:
        env = import_user_code(name, "environment")(**settings)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"The environment {name} cannot be made: {type(error).__name__}: {error}.") from error
    if not isinstance(env, Env):
        raise UserError(f"{name} must return a jaxpg.types.Env, not {env!r}.")
    return env


def _check_settings(name: str, settings: dict[str, Any], known: dict[str, Any]) -> None:
    for key, value in settings.items():
        if key not in known:
            raise UserError(f"{name} has no setting {key!r}. {hint(key, known) if known else 'It has none.'}")
        if not _has_type_of(value, known[key]):
            default = np.asarray(known[key]).tolist()
            raise UserError(f"{name}: {key} must be like its default {default!r}, not {value!r}.")
    missing = [key for key, default in known.items() if default is inspect.Parameter.empty and key not in settings]
    if missing:
        raise UserError(f"{name} needs a value for {', '.join(missing)}.")


def _has_type_of(value: Any, default: Any) -> bool:
    """Whether a setting has the type of its default; an int may stand for a float, a list for a tuple or an array."""
    if default is None or default is inspect.Parameter.empty:
        return True
    if isinstance(default, jax.Array):
        return np.shape(value) == default.shape and np.asarray(value).dtype.kind in "iuf"
    if isinstance(value, bool):
        return isinstance(default, bool)
    if isinstance(default, Mapping):
        return isinstance(value, Mapping)
    if isinstance(default, tuple):
        return isinstance(value, tuple | list)
    return isinstance(value, int | float if isinstance(default, float) else type(default))
