"""LunarLander-v3: the observation, the engines, the wind and the reward of Gymnasium's environment."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.envs.lunar_lander import craft as crafts
from jaxpg.envs.lunar_lander.bodies import origin, push
from jaxpg.envs.lunar_lander.craft import DT, HEIGHT, HULL, LEG_DOWN, SCALE, WIDTH, Craft, Iterations
from jaxpg.envs.lunar_lander.vectors import Vector
from jaxpg.errors import UserError
from jaxpg.types import Array, Box, Discrete, Env, Key, TimeStep

MAIN_POWER, SIDE_POWER = 13.0, 0.6
_MAIN_DOWN, _SIDE_AWAY = 4 / SCALE, 12 / SCALE
_SIDE_UP, _SIDE_UP_TILTED = 14 / SCALE, 17 / SCALE
"""Gymnasium takes 14 for the height and 17 for what a tilt makes of it; its comment says that 17 is a slip."""
_PUSH = 1000.0
_LIMITS = np.array([2.5, 2.5, 10, 10, 2 * math.pi, 10, 1, 1], np.float32)
_LOWS = np.array([-2.5, -2.5, -10, -10, -2 * math.pi, -10, 0, 0], np.float32)


class LunarLanderState(NamedTuple):
    """The state of an episode.

    craft: the bodies.
    terrain: [11], the heights of its corners in metres.
    shaping: the potential whose growth is the reward.
    wind: two int32, where on the curves of the wind and of the turbulence the episode is.
    time: steps since the start.
    """

    craft: Craft
    terrain: Array
    shaping: Array
    wind: tuple[Array, ...]
    time: Array


class _Engines(NamedTuple):
    """How much of its power each engine gives, 0 or 0.5 to 1, and to which side: -1, 0 or 1."""

    main: Array
    side: Array
    direction: Array


def lunar_lander(
    continuous: bool = False,
    gravity: float = -10.0,
    enable_wind: bool = False,
    wind_power: float = 15.0,
    turbulence_power: float = 1.5,
    time_limit: int = 1000,
    velocity_iterations: int = 180,
    position_iterations: int = 60,
) -> Env:
    """Gymnasium's LunarLander-v3, with the physics of Box2D written in JAX.

    Observations are `[8]`: position and velocity relative to the pad, angle, angular velocity, and whether each leg is
    on the ground (see `Craft.on_ground`). The reward is the growth of -100 |position| - 100 |velocity| - 100 |angle| +
    10 per leg on the ground, less 0.3 for the main engine and 0.03 for a side one; +100 instead when the craft comes to
    rest, -100 when the hull touches the ground or leaves the view. All three end the episode. `env_landed` among the
    metrics is the share of episodes that ended at rest.

    Args:
        continuous: actions `[2]` in [-1, 1], main and side engine, instead of the four none, left, main, right.
        gravity: between -12 and 0, metres per second squared.
        enable_wind: whether wind and turbulence push the craft while no leg touches the ground.
        wind_power: the largest force of the wind, in newtons.
        turbulence_power: the largest torque of the turbulence, in newton metres.
        time_limit: steps after which an episode times out.
        velocity_iterations: the most passes of the solver over the velocities; Gymnasium has 180.
        position_iterations: the most passes over the poses; Gymnasium has 60.

    Raises:
        UserError: gravity outside (-12, 0), or a number below 1 where steps or passes are counted.
    """
    if not -12 < gravity < 0:
        raise UserError(f"gravity must be between -12 and 0, not {gravity!r}.")
    counts = {
        "time_limit": time_limit,
        "velocity_iterations": velocity_iterations,
        "position_iterations": position_iterations,
    }
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{name} must be at least 1, not {count!r}.")
    engines = _continuous_engines if continuous else _discrete_engines
    powers = (wind_power, turbulence_power) if enable_wind else None
    move = partial(
        _move, gravity=gravity, powers=powers, iterations=Iterations(velocity_iterations, position_iterations)
    )

    def reset(key: Key) -> tuple[LunarLanderState, Array]:
        key_start, key_step = jax.random.split(key)
        state = _start(key_start)
        off = _Engines(*(jnp.zeros(()) for _ in _Engines._fields))
        state, obs, _, _ = move(_scatter(key_step), state, off)  # as in Gymnasium, an episode starts after a step
        return state._replace(time=jnp.zeros((), jnp.int32)), obs

    def step(key: Key, state: LunarLanderState, action: Array) -> tuple[LunarLanderState, TimeStep]:
        state, obs, reward, terminated = move(_scatter(key), state, engines(action))
        discount = 1.0 - terminated.astype(jnp.float32)
        return state, TimeStep(obs, reward, discount, last=terminated | (state.time >= time_limit))

    actions = Box(-np.ones(2, np.float32), np.ones(2, np.float32)) if continuous else Discrete(4)
    name = "LunarLanderContinuous-v3" if continuous else "LunarLander-v3"
    return Env(
        name, reset, step, Box(_LOWS, _LIMITS), actions, time_limit,
        min_truncation_step=time_limit, episode_metrics=lambda state: {"landed": crafts.is_at_rest(state.craft)},
    )  # fmt: skip


def _start(key: Key) -> LunarLanderState:
    key_terrain, key_push, key_wind = jax.random.split(key, 3)
    craft = crafts.standing_at(WIDTH / 2, HEIGHT)
    force = jax.random.uniform(key_push, (2,), minval=-_PUSH, maxval=_PUSH)
    phases = jax.random.randint(key_wind, (2,), -9999, 9999)
    return LunarLanderState(
        craft=_push_hull(craft, DT * Vector(force[0], force[1]), Vector(0.0, 0.0)),
        terrain=crafts.random_terrain(key_terrain),
        shaping=jnp.zeros(()),
        wind=(phases[0], phases[1]),
        time=jnp.zeros((), jnp.int32),
    )


def _scatter(key: Key) -> Array:
    """By how much the engines' place is off, `[2]`, up to a pixel."""
    return jax.random.uniform(key, (2,), minval=-1.0, maxval=1.0) / SCALE


def _move(
    scatter: Array,
    state: LunarLanderState,
    engines: _Engines,
    *,
    gravity: float,
    powers: tuple[float, float] | None,
    iterations: Iterations,
) -> tuple[LunarLanderState, Array, Array, Array]:
    """One step: the state, the observation, the reward, and whether the episode has terminated."""
    craft, wind = state.craft, state.wind
    if powers is not None:
        craft, wind = _blow(state, powers)
    craft = _fire(scatter, craft, engines)
    craft, touched = crafts.step(craft, state.terrain, gravity, iterations)
    obs = _observe(craft)
    shaping = _potential(obs)
    reward = shaping - state.shaping - 0.3 * engines.main - 0.03 * engines.side
    lost = touched.hull | (jnp.abs(obs[0]) >= 1)
    reward = jnp.where(touched.asleep, 100.0, jnp.where(lost, -100.0, reward))
    state = LunarLanderState(craft, state.terrain, shaping, wind, state.time + 1)
    return state, obs, reward, lost | touched.asleep


def _observe(craft: Craft) -> Array:
    pose, velocity = craft.poses[0], craft.velocities[0]
    place = origin(HULL, pose)
    return jnp.stack(
        [
            (place.x - WIDTH / 2) / (WIDTH / 2),
            (place.y - (HEIGHT / 4 + LEG_DOWN)) / (HEIGHT / 2),
            velocity.linear.x * (WIDTH / 2) * DT,
            velocity.linear.y * (HEIGHT / 2) * DT,
            pose.angle,
            20 * velocity.angular * DT,
            craft.on_ground[0].astype(jnp.float32),
            craft.on_ground[1].astype(jnp.float32),
        ]
    )


def _potential(obs: Array) -> Array:
    x, y, vx, vy, angle, _, *legs = obs
    distance, speed = jnp.sqrt(x * x + y * y), jnp.sqrt(vx * vx + vy * vy)
    return -100 * distance - 100 * speed - 100 * jnp.abs(angle) + 10 * legs[0] + 10 * legs[1]


def _discrete_engines(action: Array) -> _Engines:
    """0 none, 1 the left engine, 2 the main engine, 3 the right engine."""
    sideways = ((action == 1) | (action == 3)).astype(jnp.float32)
    return _Engines((action == 2).astype(jnp.float32), sideways, (action - 2).astype(jnp.float32))


def _continuous_engines(action: Array) -> _Engines:
    """The main engine runs from half to full power above 0, a side engine from 0.5 on."""
    main, side = jnp.clip(action, -1.0, 1.0)
    return _Engines(
        jnp.where(main > 0, (main + 1) / 2, 0.0), jnp.where(jnp.abs(side) > 0.5, jnp.abs(side), 0.0), jnp.sign(side)
    )


def _fire(scatter: Array, craft: Craft, engines: _Engines) -> Craft:
    """The impulses of the engines, at places that are off by `scatter`."""
    pose = craft.poses[0]
    up, across = Vector(jnp.sin(pose.angle), jnp.cos(pose.angle)), Vector(-jnp.cos(pose.angle), jnp.sin(pose.angle))
    down, outward = Vector(up.x, -up.y), Vector(across.x, -across.y)
    centre = origin(HULL, pose)
    main = (_MAIN_DOWN + 2 * scatter[0]) * down + scatter[1] * outward
    craft = _push_hull(craft, -(MAIN_POWER * engines.main) * main, centre + main - pose.centre)
    side = scatter[0] * down + (3 * scatter[1] + engines.direction * _SIDE_AWAY) * outward
    nozzle = Vector(-_SIDE_UP_TILTED * up.x, _SIDE_UP * up.y)
    return _push_hull(craft, -(SIDE_POWER * engines.side) * side, centre + side + nozzle - pose.centre)


def _blow(state: LunarLanderState, powers: tuple[float, float]) -> tuple[Craft, tuple[Array, ...]]:
    """Wind and turbulence, tanh(sin(0.02 k) + sin(0.01 pi k)) of their power, while no leg touches the ground."""
    flies = ~state.craft.on_ground.any()
    wind, torque = (
        jnp.where(flies, power * jnp.tanh(jnp.sin(0.02 * k) + jnp.sin(0.01 * math.pi * k)), 0.0)
        for power, k in zip(powers, state.wind, strict=True)
    )
    craft = _push_hull(state.craft, Vector(DT * wind, 0.0), Vector(0.0, 0.0), DT * torque)
    return craft, (state.wind[0] + flies, state.wind[1] + flies)


def _push_hull(craft: Craft, impulse: Vector, offset: Vector, twist: Array | float = 0.0) -> Craft:
    hull, *legs = craft.velocities
    return craft._replace(velocities=(push(hull, HULL, impulse, offset, twist), legs[0], legs[1]))
