"""Gymnax's environments as Env records.

What gymnax 1.0.1 does, checked for each environment it registers:

- Time limits are never marked as terminations: `step_env` reports natural ends only, and the limit is
  `state.time >= max_steps_in_episode`, which becomes a time-out here.
- No natural end: Pendulum, Freeway, DiscountingChain, BernoulliBandit, GaussianBandit, PointRobot, Reacher, Swimmer.
  They end by time-out alone, so a learner bootstraps there. (In MinAtar's own Freeway the limit is a termination.)
- Natural end after a known number of steps: Catch (`rows - 1`), DeepSea (`size`), MemoryChain (`memory_length + 1`),
  UmbrellaChain (`chain_length`), SimpleBandit and MNISTBandit (1). DeepSea's limit falls on that same step, where the
  termination wins. A smaller `max_steps_in_episode` cuts the others before their only informative reward.
- MemoryChain shows the observation of the state *before* the step, so the context is seen twice.
- MetaMaze moves the agent to a random cell when it reaches the goal and only then checks whether it is on the goal;
  it terminates when the random cell happens to be the goal, and otherwise continues.
- SimpleBandit shuffles its arms at every reset and its episodes last one step, so no arm is better than another.
- MinAtar has no sticky actions (see `wrappers.sticky_actions`) and cuts episodes after 1,000 steps (Freeway 2,500).
- Asterix has eight rows for enemies and gold. Where a new one finds all of them taken it removes one that is there, and
  in an eighth of the cases also where one row is free; in MinAtar it is left out, and takes the free row.
- MountainCarContinuous: the car keeps its speed at the wall on the left, where Gymnasium's stops: it stops here, too.
- CartPole's `total_mass` and `polemass_length` are independent fields, not derived from `masscart` and `masspole`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.envs.adapting import state_cast
from jaxpg.errors import UserError
from jaxpg.types import Array, Box, Discrete, Env, Key, Space, TimeStep, Tree
from jaxpg.user_input.user_code import argument_defaults

# Environments whose episodes terminate after a known number of steps, mostly far below max_steps_in_episode. It becomes
# their time limit, by which storage is sized.
_FIXED_LENGTHS: dict[str, Callable[[Any, Any], int]] = {
    "Catch-bsuite": lambda env, params: env.rows - 1,
    "DeepSea-bsuite": lambda env, params: env.size,
    "MemoryChain-bsuite": lambda env, params: params.memory_length + 1,
    "UmbrellaChain-bsuite": lambda env, params: params.chain_length,
    "SimpleBandit-bsuite": lambda env, params: 1,
    "MNISTBandit-bsuite": lambda env, params: 1,
}


def _stop_at_the_wall(state: Any, params: Any) -> Any:
    """`position == min_position and velocity < 0: velocity = 0`, as in Gymnasium's continuous_mountain_car.py."""
    at_the_wall = state.position <= params.min_position
    return state.replace(velocity=jnp.where(at_the_wall, jnp.maximum(state.velocity, 0.0), state.velocity))


_MENDED: dict[str, Callable[[Any, Any], Any]] = {"MountainCarContinuous-v0": _stop_at_the_wall}
"""(state after gymnax's step, params) -> the state after Gymnasium's."""

# gymnax downloads these to this directory when MNISTBandit is constructed.
_MNIST_DIRECTORY = Path("/tmp/mnist")
_MNIST_FILES = [f"{part}-ubyte.gz" for s in ("train", "t10k") for part in (f"{s}-images-idx3", f"{s}-labels-idx1")]


def import_gymnax() -> ModuleType:
    """gymnax, which is imported when the first of its environments is asked for.

    It computes when it is imported, after which jax's devices cannot be chosen any more, nor its processes be started
    (`jax.distributed.initialize`); and with it come two seconds of libraries for plots.
    """
    with jax.ensure_compile_time_eval():  # it keeps arrays, and a caller may be traced
        import gymnax
    return gymnax


def gymnax_names() -> list[str]:
    """The names that gymnax knows, including those registered with it at run time."""
    return list(import_gymnax().registered_envs)


def gymnax_settings(name: str) -> dict[str, Any]:
    """Arguments of the constructor and fields of EnvParams, with their defaults.

    Raises:
        UserError: MNISTBandit without its data.
    """
    missing = [file for file in _MNIST_FILES if not (_MNIST_DIRECTORY / file).exists()]
    if name == "MNISTBandit-bsuite" and missing:
        raise UserError(
            f"{name} needs MNIST, which is not downloaded for you: put {', '.join(missing)} into {_MNIST_DIRECTORY}."
        )
    env, params = import_gymnax().make(name)
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return argument_defaults(type(env)) | fields


def make_gymnax(name: str, settings: dict[str, Any]) -> Env:
    """A gymnax environment with these settings, which are among `gymnax_settings` and have their types.

    Raises:
        UserError: values that gymnax refuses, or a time limit below one step.
    """
    defaults = gymnax_settings(name)
    env, params = import_gymnax().make(name)
    constructor = {key: value for key, value in settings.items() if key in argument_defaults(type(env))}
    if constructor:
        try:
            env, params = import_gymnax().make(name, **constructor)
        except (TypeError, ValueError, AssertionError) as error:
            reason = str(error) or "the values do not fit together"
            raise UserError(f"{name} cannot be made with {constructor}: {reason}.") from error
    params = params.replace(**{k: _cast_setting(v, defaults[k]) for k, v in settings.items() if k not in constructor})
    if params.max_steps_in_episode < 1:
        raise UserError(f"{name}: max_steps_in_episode must be at least 1, not {params.max_steps_in_episode}.")
    return from_gymnax(env, params, name=name)


def from_gymnax(env: Any, params: Any, *, name: str) -> Env:
    """A gymnax environment as an Env: no auto-reset, terminations and time-outs kept apart.

    Where both fall on the same step, the termination wins: `discount` is 0.

    Args:
        env: gymnax.environments.environment.Environment.
        params: its EnvParams; they are constants of the compiled program.
        name: of the environment.
    """
    encode, observation_space = _observation_encoder(env.observation_space(params))

    def reset(key: Key) -> tuple[Tree, Array]:
        with jax.numpy_rank_promotion("allow"):  # Swimmer broadcasts over ranks; a caller may have forbidden that
            obs, state = env.reset_env(key, params)
        return cast(state), encode(obs)

    def step(key: Key, state: Tree, action: Array) -> tuple[Tree, TimeStep]:
        with jax.numpy_rank_promotion("allow"):
            obs, state, reward, terminated, _ = env.step_env(key, state, action, params)
            if name in _MENDED:
                state = _MENDED[name](state, params)
                obs = env.get_obs(state)
        terminated = jnp.asarray(terminated, bool)
        return cast(state), TimeStep(
            obs=encode(obs),
            reward=jnp.asarray(reward, jnp.float32),
            discount=1.0 - terminated.astype(jnp.float32),
            last=terminated | env.is_truncated(state, params),
        )

    action_space = _space(env.action_space(params))
    cast = _state_cast(env, params, action_space)
    time_limit = int(params.max_steps_in_episode)
    if name in _FIXED_LENGTHS:
        time_limit = min(time_limit, _FIXED_LENGTHS[name](env, params))
    truncates_itself = type(env).is_truncated is not import_gymnax().environments.environment.Environment.is_truncated
    return Env(
        name, reset, step, observation_space, action_space, time_limit,
        min_truncation_step=1 if truncates_itself else int(params.max_steps_in_episode),
    )  # fmt: skip


@jax.numpy_rank_promotion("allow")
def _state_cast(env: Any, params: Any, action_space: Space) -> Callable[[Tree], Tree]:
    """A function that gives states the same dtypes after a reset as after a step, which a scan's carry requires."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    dtype = jnp.int32 if isinstance(action_space, Discrete) else jnp.float32
    action = jax.ShapeDtypeStruct(action_space.shape, dtype)
    _, after_reset = jax.eval_shape(lambda key: env.reset_env(key, params), key)
    _, after_step, *_ = jax.eval_shape(lambda *args: env.step_env(*args, params), key, after_reset, action)
    return state_cast(after_reset, after_step)


def _space(space: Any) -> Space:
    """A gymnax space as a jaxpg space; bounds at the limits of float32 mean unbounded."""
    spaces = import_gymnax().environments.spaces
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    if not isinstance(space, spaces.Box):
        raise UserError(f"Only Discrete and Box spaces are supported, not {space!r}; flatten it in your environment.")
    low, high = (np.broadcast_to(np.asarray(x, np.float32), space.shape) for x in (space.low, space.high))
    limit = np.finfo(np.float32).max
    return Box(np.where(low <= -limit, -np.inf, low), np.where(high >= limit, np.inf, high))


def _observation_encoder(space: Any) -> tuple[Callable[[Array], Array], Box]:
    """The function that converts observations of a gymnax space to float32 arrays, and the space of the result."""
    converted = _space(space)
    if isinstance(converted, Box):
        return lambda obs: jnp.asarray(obs, jnp.float32), converted
    n = converted.n
    return lambda obs: jax.nn.one_hot(obs, n, dtype=jnp.float32), Box(np.zeros(n, np.float32), np.ones(n, np.float32))


def _cast_setting(value: Any, default: Any) -> Any:
    """A setting with the type of its default: gymnax does not promote parameters, so an int cannot replace a float."""
    if isinstance(default, jax.Array):
        return jnp.asarray(value, default.dtype)
    return float(value) if isinstance(default, float) else value
