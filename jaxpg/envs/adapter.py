"""Environments by name: gymnax's through one adapter, ours and a user's through factories.

What gymnax 1.0.1 does, checked for each environment it registers:

- Time limits are never marked as terminations: `step_env` reports natural ends only, and the limit is
  `state.time >= max_steps_in_episode`, which becomes a time-out here.
- No natural end: Pendulum, Freeway, DiscountingChain, BernoulliBandit, GaussianBandit, PointRobot, Reacher, Swimmer.
  They end by time-out alone, so a learner bootstraps there. (In MinAtar's own Freeway the limit is a termination.)
- Natural end after a known number of steps: Catch (`rows - 1`), DeepSea (`size`), MemoryChain (`memory_length + 1`),
  UmbrellaChain (`chain_length`), SimpleBandit and MNISTBandit (1). DeepSea's limit falls on that same step, where the
  termination wins. A smaller `max_steps_in_episode` cuts the others before their only informative reward.
- MemoryChain shows the observation of the state *before* the step, so the context is seen twice.
- MetaMaze moves the agent to a random cell when it reaches the goal and only then asks whether it stands on the goal;
  it terminates when the random cell happens to be the goal, else plays on.
- SimpleBandit shuffles its arms at every reset and its episodes last one step, so no arm is better than another.
- MinAtar has no sticky actions (see `wrappers.sticky_actions`) and cuts episodes after 1,000 steps (Freeway 2,500).
- CartPole's `total_mass` and `polemass_length` are fields of their own, not derived from `masscart` and `masspole`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from gymnax import registration
from gymnax.environments import spaces as gymnax_spaces

from jaxpg.errors import UserError
from jaxpg.types import Array, Box, Discrete, Env, Key, Space, TimeStep, Tree

Factory = Callable[..., Env]

_factories: dict[str, Factory] = {}

# Episodes that end by themselves after a known number of steps, mostly far below the limit: storage is sized by it.
_LENGTHS: dict[str, Callable[[Any, Any], int]] = {
    "Catch-bsuite": lambda env, params: env.rows - 1,
    "DeepSea-bsuite": lambda env, params: env.size,
    "MemoryChain-bsuite": lambda env, params: params.memory_length + 1,
    "UmbrellaChain-bsuite": lambda env, params: params.chain_length,
    "SimpleBandit-bsuite": lambda env, params: 1,
    "MNISTBandit-bsuite": lambda env, params: 1,
}

# gymnax downloads these to this directory when MNISTBandit is constructed.
_MNIST = Path("/tmp/mnist")
_MNIST_FILES = [f"{part}-ubyte.gz" for s in ("train", "t10k") for part in (f"{s}-images-idx3", f"{s}-labels-idx1")]


def register(name: str, factory: Factory) -> None:
    """Lets `make(name, **settings)` return `factory(**settings)`.

    Args:
        name: A name that is not taken.
        factory: Keyword arguments with defaults -> Env; its signature says which settings there are.

    Raises:
        UserError: The name is taken.
    """
    if name in names():
        raise UserError(f"The environment name {name!r} is already taken; register yours under another one.")
    _factories[name] = factory


def names() -> list[str]:
    """Every name that `make` knows: ours, the user's and gymnax's."""
    return [*_factories, *gymnax.registered_envs]


def make(name: str, **settings: Any) -> Env:
    """Makes an environment.

    Args:
        name: One of `names()`, such as "CartPole-v1" or "grid_world".
        **settings: For gymnax's environments the constructor's arguments and the fields of EnvParams, such as
            `max_steps_in_episode` or `gravity`; for others the arguments of the registered factory.

    Returns:
        Env whose observations are float32 arrays; a discrete observation comes one-hot. The state is gymnax's EnvState.

    Raises:
        UserError: An unknown name or setting (the nearest valid one is named), or a value of the wrong type.
    """
    if name in _factories:
        _check_settings(name, settings, _defaults(_factories[name]))
        return _guarded(name, _factories[name], settings)
    if name not in gymnax.registered_envs:
        raise UserError(f"There is no environment {name!r}. {_nearest(name, names())}")
    return from_gymnax(*_construct(name, settings), name=name)


def default_settings(name: str) -> dict[str, Any]:
    """The settings of an environment with their defaults.

    Raises:
        UserError: An unknown name.
    """
    if name in _factories:
        return _defaults(_factories[name])
    if name not in gymnax.registered_envs:
        raise UserError(f"There is no environment {name!r}. {_nearest(name, names())}")
    _, params = _construct(name, {})
    return _defaults(registration._registry[name]) | _fields(params)


def from_gymnax(env: Any, params: Any, *, name: str) -> Env:
    """A gymnax environment as an Env: no auto-reset, terminations and time-outs kept apart.

    Where both fall on the same step, the termination wins: `discount` is 0.

    Args:
        env: gymnax.environments.environment.Environment.
        params: its EnvParams; they are constants of the compiled program.
        name: how reports call it.
    """
    encode, observation_space = _observations(env.observation_space(params))

    def reset(key: Key) -> tuple[Tree, Array]:
        with jax.numpy_rank_promotion("allow"):  # Swimmer broadcasts over ranks; a caller may have forbidden that
            obs, state = env.reset_env(key, params)
        return cast(state), encode(obs)

    def step(key: Key, state: Tree, action: Array) -> tuple[Tree, TimeStep]:
        with jax.numpy_rank_promotion("allow"):
            obs, state, reward, terminated, _ = env.step_env(key, state, action, params)
        terminated = jnp.asarray(terminated, bool)
        return cast(state), TimeStep(
            obs=encode(obs),
            reward=jnp.asarray(reward, jnp.float32),
            discount=1.0 - terminated.astype(jnp.float32),
            last=terminated | env.is_truncated(state, params),
        )

    action_space = _space(env.action_space(params))
    cast = _cast(env, params, action_space)
    time_limit = int(params.max_steps_in_episode)
    if name in _LENGTHS:
        time_limit = min(time_limit, _LENGTHS[name](env, params))
    return Env(name, reset, step, observation_space, action_space, time_limit)


@jax.numpy_rank_promotion("allow")
def _cast(env: Any, params: Any, action_space: Space) -> Callable[[Tree], Tree]:
    """state -> state of the same dtypes after a reset as after a step, as a scan's carry needs them."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    dtype = jnp.int32 if isinstance(action_space, Discrete) else jnp.float32
    action = jax.ShapeDtypeStruct(action_space.shape, dtype)
    _, first = jax.eval_shape(lambda key: env.reset_env(key, params), key)
    _, second, *_ = jax.eval_shape(lambda *args: env.step_env(*args, params), key, first, action)
    dtypes = jax.tree.map(lambda x, y: jnp.promote_types(x.dtype, y.dtype), first, second)
    return lambda state: jax.tree.map(jax.lax.convert_element_type, state, dtypes)


def _space(space: Any) -> Space:
    """gymnax's space as ours; bounds at the edge of float32 mean unbounded."""
    if isinstance(space, gymnax_spaces.Discrete):
        return Discrete(int(space.n))
    if not isinstance(space, gymnax_spaces.Box):
        raise UserError(f"Only Discrete and Box spaces are supported, not {space!r}; flatten it in your environment.")
    low, high = (np.broadcast_to(np.asarray(x, np.float32), space.shape) for x in (space.low, space.high))
    edge = np.finfo(np.float32).max
    return Box(np.where(low <= -edge, -np.inf, low), np.where(high >= edge, np.inf, high))


def _observations(space: Any) -> tuple[Callable[[Array], Array], Box]:
    """How observations of a gymnax space are encoded as float32 arrays, and the space of the result."""
    converted = _space(space)
    if isinstance(converted, Box):
        return lambda obs: jnp.asarray(obs, jnp.float32), converted
    n = converted.n
    return lambda obs: jax.nn.one_hot(obs, n, dtype=jnp.float32), Box(np.zeros(n, np.float32), np.ones(n, np.float32))


def _construct(name: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    """gymnax's environment and its parameters with the settings filled in."""
    missing = [file for file in _MNIST_FILES if not (_MNIST / file).exists()]
    if name == "MNISTBandit-bsuite" and missing:
        raise UserError(f"{name} needs MNIST, which is not downloaded for you: put {', '.join(missing)} into {_MNIST}.")
    factory = registration._registry[name]
    arguments = {key: value for key, value in settings.items() if key in _defaults(factory)}
    _check_settings(name, arguments, _defaults(factory))
    env = _guarded(name, factory, arguments)
    fields = _fields(env.default_params)
    _check_settings(name, settings, _defaults(factory) | fields)
    changed = {key: _like(value, fields[key]) for key, value in settings.items() if key in fields}
    return env, env.default_params.replace(**changed)


def _guarded(name: str, factory: Callable[..., Any], settings: dict[str, Any]) -> Any:
    try:
        return factory(**settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(
            f"{name} cannot be made with {settings}: {error or 'the values do not fit together'}."
        ) from error


def _defaults(factory: Callable[..., Any]) -> dict[str, Any]:
    return {key: parameter.default for key, parameter in inspect.signature(factory).parameters.items()}


def _fields(params: Any) -> dict[str, Any]:
    return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}


def _like(value: Any, default: Any) -> Any:
    return jnp.asarray(value, default.dtype) if isinstance(default, jax.Array) else value


def _check_settings(name: str, settings: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuses unknown settings and values whose type differs from the default's (an int may stand for a float)."""
    for key, value in settings.items():
        if key not in defaults:
            raise UserError(f"{name} has no setting {key!r}. {_nearest(key, defaults)}")
        if not _fits(value, defaults[key]):
            expected = type(defaults[key]).__name__
            raise UserError(f"{name}: {key} must be like its default {defaults[key]!r} ({expected}), not {value!r}.")
    steps = settings.get("max_steps_in_episode", 1)
    if steps < 1:
        raise UserError(f"{name}: max_steps_in_episode must be at least 1, not {steps!r}.")


def _fits(value: Any, default: Any) -> bool:
    if default is None or default is inspect.Parameter.empty:
        return True
    if isinstance(default, jax.Array):
        shape = np.shape(value)
        return shape == default.shape and np.asarray(value).dtype.kind in "iuf"
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float, np.integer, np.floating))
    if isinstance(default, (tuple, list)):
        return isinstance(value, (tuple, list))
    return isinstance(value, type(default))


def _nearest(given: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(valid), n=1, cutoff=0.0)
    return f"Did you mean {close[0]!r}?" if close else "It takes no settings."
