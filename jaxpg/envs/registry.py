"""Environments and wrappers by name; settings are checked before anything is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import NoneType
from typing import Any, get_args

import jax
import numpy as np

from jaxpg.envs import gymnax_adapter, host, mdps, probes, suites, tabular, text, wrappers
from jaxpg.envs.contract import check_env
from jaxpg.envs.lunar_lander import lunar_lander
from jaxpg.errors import UserError, excerpt, hint, refuse_unknown
from jaxpg.types import Env
from jaxpg.user_input.user_code import argument_defaults, explain_failure, import_user_code

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


def _with_settings(factory: Factory, **fixed: Any) -> Factory:
    """A factory some of whose settings have a value for good."""
    fixed_factory = partial(factory, **fixed)
    parameters = [p for name, p in inspect.signature(factory, eval_str=True).parameters.items() if name not in fixed]
    fixed_factory.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return fixed_factory


def _text_factory(of_task: Callable[..., text.Task]) -> Factory:
    """The factory of a task's environment: its settings are the task's and those of `text_env`."""
    env_parameters = dict(inspect.signature(text.text_env).parameters)
    del env_parameters["task"]

    def factory(**settings: Any) -> Env:
        env_settings = {key: settings.pop(key) for key in env_parameters if key in settings}
        return text.text_env(of_task(**settings), **env_settings)

    of_the_task = inspect.signature(of_task, eval_str=True).parameters.values()
    parameters = [*of_the_task, *env_parameters.values()]
    factory.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return factory


TEXT_TASKS: dict[str, Callable[..., text.Task]] = {**text.TASKS, "json_lines": text.json_lines}
"""The text tasks by name."""
_TIME_LIMITS = {"grid_world": 200, "frozen_lake": 100, "cliff_walking": 200, "taxi": 200, "random_walk": 10_000}
_factories: dict[str, Factory] = {
    **{name: _tabular_factory(name, limit) for name, limit in _TIME_LIMITS.items()},
    "random_mdp": _random_mdp,
    "LunarLander-v3": _with_settings(lunar_lander, continuous=False),
    "LunarLanderContinuous-v3": _with_settings(lunar_lander, continuous=True),
    "probe-value": probes.value,
    "probe-observation": probes.observation,
    "probe-discount": probes.discount,
    "probe-action": probes.action,
    "probe-policy": probes.policy,
    **{name: _text_factory(task) for name, task in TEXT_TASKS.items()},
}
NOTES: dict[str, str] = {
    "CartPole-v1": "as Gymnasium's, in float32",
    "Acrobot-v1": "as Gymnasium's, in float32",
    "Pendulum-v1": "as Gymnasium's, in float32",
    "MountainCar-v0": "as Gymnasium's, in float32",
    "MountainCarContinuous-v0": (
        "as Gymnasium's, in float32: the wall on the left stops the car, unlike in gymnax; with a goal_velocity above "
        "0 a car that rolls back from the goal stops there, as in gymnax"
    ),
    "frozen_lake": "as Gymnasium's FrozenLake-v1; for its 8x8 map set size = 8 and time_limit = 200",
    "cliff_walking": "as Gymnasium's CliffWalking-v1, which has no time limit; here it is 200",
    "taxi": "as Gymnasium's Taxi-v4",
    **dict.fromkeys(("LunarLander-v3", "LunarLanderContinuous-v3"), "its physics, without continuous collision"),
}
"""How environments of Gymnasium that are computed in the program compare with its own, as tests/test_classics.py and
tests/test_lunar_lander.py show."""
_user_factories: dict[str, Factory] = {}
_checked: set[tuple[Factory, str]] = set()
"""Which environments of users have passed `check_env`: function and settings."""
WRAPPERS: dict[str, Factory] = {
    wrapper.__name__: wrapper
    for wrapper in (
        wrappers.sticky_actions,
        wrappers.time_limit,
        wrappers.frame_stack,
        wrappers.flatten,
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
    _user_factories[name] = factory


def names() -> list[str]:
    """The names of jaxpg's environments, those registered by a user, and gymnax's; `suites.ids` has those of suites."""
    return [*_factories, *_user_factories, *gymnax_adapter.gymnax_names()]


def make(name: str, /, **settings: Any) -> Env:
    """Makes an environment.

    Args:
        name: one of `names()`, such as "CartPole-v1" or "grid_world"; an environment of a suite, "brax:ant" (`suites`);
            or the name "package.module:function" of a function that returns an Env, or a text task and says so in its
            signature (`-> Task`).
        **settings: for gymnax's environments the constructor's arguments and the fields of EnvParams, such as
            `max_steps_in_episode` or `gravity`; for a suite's the arguments that its adapter names; for others the
            arguments of the factory.

    Returns:
        An Env with float32 observations, or int32 of a Discrete space, as text tasks have. The state of gymnax's
        environments is their EnvState.

    Raises:
        UserError: an unknown name or setting (with the nearest valid one), a value of the wrong type, a missing value;
            a function of the user's that cannot be imported or called, or an environment of the user's that breaks the
            contract (see `check_env`); a suite whose library is not installed.
    """
    with jax.ensure_compile_time_eval():
        env = make_unchecked(name, **settings)
        function = _user_function(name)
        if function is not None and (function, repr(settings)) not in _checked:
            check_env(env, name)
            _checked.add((function, repr(settings)))
    return env


def make_unchecked(name: str, /, **settings: Any) -> Env:
    """`make`, but for the check of an environment of the user's (`check_env`), whose mistakes `battery` shows."""
    check_settings(name, settings, default_settings(name), table="environment_settings")
    if name in _factories:
        _check_annotated(name, settings, _factories[name])
    with jax.ensure_compile_time_eval():  # a sweep calls this while tracing, and spaces must be concrete
        if name in _factories:
            return _factories[name](**settings)
        if factory := _user_factory(name):
            with explain_failure(f"The environment {name} cannot be made: its function"):
                return factory(**settings)
        if suites.is_suite_name(name):
            return suites.make(name, settings)
        if host.comes_in(name):
            return host.make(name, settings)
        return gymnax_adapter.make_gymnax(name, settings)


def default_settings(name: str) -> dict[str, Any]:
    """The settings that `make` takes for an environment, with their defaults, `inspect.Parameter.empty` without one.

    Raises:
        UserError: an unknown name, a function that cannot be imported, a suite whose library is not installed, or
            MNISTBandit without its data.
    """
    if factory := _factories.get(name) or _user_factory(name):
        return argument_defaults(factory)
    if suites.is_suite_name(name):
        return suites.default_settings(name)
    if host.comes_in(name):
        return host.default_settings(name)
    if name in gymnax_adapter.gymnax_names():
        return gymnax_adapter.gymnax_settings(name)
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
    check_settings(name, settings, known)
    return WRAPPERS[name](env, **settings)


def make_task(name: str, /, **settings: Any) -> text.Task:
    """The text task behind a text environment.

    Args:
        name: one of TEXT_TASKS, or "package.module:function" of a function whose signature says that it returns a Task.
        **settings: its own, without those of `text_env`.

    Raises:
        UserError: an environment that is no text task; otherwise as `make`.
    """
    factory = task_factory(name)
    if factory is None:
        raise UserError(
            f"{name} has no texts to learn from: it is not a text task. There are: {', '.join(TEXT_TASKS)}; a function "
            "of yours that returns one says so in its signature, -> Task."
        )
    check_settings(name, settings, argument_defaults(factory))
    if name in TEXT_TASKS:
        _check_annotated(name, settings, factory)
        return factory(**settings)
    with explain_failure(f"The text task {name} cannot be made: its function"):
        return factory(**settings)


def task_factory(name: str) -> Callable[..., text.Task] | None:
    """What makes the text task of this name; None where the environment is none.

    It is one of TEXT_TASKS, or a function of the user's by name whose signature says that it returns a Task.
    """
    if name in TEXT_TASKS:
        return TEXT_TASKS[name]
    function = _user_function(name)
    return function if function is not None and _returns_task(function) else None


def _user_factory(name: str) -> Factory | None:
    """What makes the user's environment of a name; of a function that returns a text task, the task's environment."""
    function = _user_function(name)
    return _text_factory(function) if function is not None and _returns_task(function) else function


def _user_function(name: str) -> Callable[..., Any] | None:
    """The user's function behind a name: registered, or imported by a name "module:function" that is no suite's."""
    if name in _user_factories:
        return _user_factories[name]
    if ":" in name and not suites.is_suite_name(name) and not host.comes_in(name):
        return import_user_code(name, "environment")
    return None


def _returns_task(function: Callable[..., Any]) -> bool:
    """Whether a signature says that its function returns a text task."""
    returned = getattr(function, "__annotations__", {}).get("return")
    return returned is text.Task or (isinstance(returned, str) and returned.split(".")[-1] == text.Task.__name__)


def check_settings(name: str, settings: dict[str, Any], known: dict[str, Any], table: str = "") -> None:
    """Check the settings of what `name` stands for against the names and the types of their defaults, `known`.

    `table` is where a config has them, for an error.

    Raises:
        UserError: an unknown setting (with the nearest valid one), a value of another type, or a missing value.
    """
    for key, value in settings.items():
        if key not in known:
            raise UserError(f"{name} has no setting {key!r}. {hint(key, known) if known else 'It has none.'}")
        if not _has_type_of(value, known[key]):
            default = np.asarray(known[key]).tolist()
            raise UserError(f"{name}: {key} must be like its default {default!r}, not {excerpt(value)}.")
    missing = [key for key, default in known.items() if default is inspect.Parameter.empty and key not in settings]
    if missing:
        remedy = f" Give it to a run by --set {table}.{missing[0]}=..." if table else ""
        raise UserError(f"{name} needs a value for {', '.join(missing)}.{remedy}")


def _check_annotated(name: str, settings: dict[str, Any], factory: Callable[..., Any]) -> None:
    """Check by its annotation a setting whose default does not show its type: there is none, or it is None."""
    for key, parameter in inspect.signature(factory, eval_str=True).parameters.items():
        if key in settings and parameter.default in (None, inspect.Parameter.empty):
            kinds = get_args(parameter.annotation) or (parameter.annotation,)
            if isinstance(settings[key], bool) or not isinstance(settings[key], kinds):
                described = " or ".join("none" if kind is NoneType else kind.__name__ for kind in kinds)
                raise UserError(f"{name}: {key} must be {described}, not {excerpt(settings[key])}.")


def _has_type_of(value: Any, default: Any) -> bool:
    """Whether a setting has the type of its default; an int may stand for a float, a list for a tuple or an array.

    A function or a tokenizer may stand for its name: what makes the environment checks those.
    """
    if default is None or default is inspect.Parameter.empty:
        return True
    if isinstance(default, jax.Array):
        return np.shape(value) == default.shape and np.asarray(value).dtype.kind in "iuf"
    if isinstance(value, bool):
        return isinstance(default, bool)
    if isinstance(default, str) and (callable(value) or isinstance(value, text.Tokenizer)):
        return True
    if isinstance(default, Mapping):
        return isinstance(value, Mapping)
    if isinstance(default, tuple):
        return isinstance(value, tuple | list)
    return isinstance(value, int | float if isinstance(default, float) else type(default))
