"""LunarLander against Gymnasium's own, whose physics is Box2D."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from box2d import Episodes, continuous, fly, fly_gymnasium, landing_pilot, random_pilot, thrust_pilot
from scipy import stats
from tiny import LONG

from jaxpg import envs
from jaxpg.envs.lunar_lander import bodies, environment
from jaxpg.envs.lunar_lander.craft import HULL, Iterations
from jaxpg.errors import UserError
from jaxpg.types import Env

EPISODES = 200
LIMIT = 1_000 if "JAXPG_LONG" in os.environ else 400
"""Steps of an episode, in both; most landings take 270."""
LEVEL = 0.001
"""Of each two-sample test; there are forty of them."""


@cache
def step_of(is_continuous: bool, gravity: float, powers: tuple[float, float] | None) -> Any:
    """(scatter of the engines, state, action) -> state, observation, reward, whether it is over."""
    engines = environment._continuous_engines if is_continuous else environment._discrete_engines
    iterations = Iterations(180, 60)

    def step(scatter: Any, state: Any, action: Any) -> Any:
        return environment._move(scatter, state, engines(action), gravity=gravity, powers=powers, iterations=iterations)

    return jax.jit(step)


class Twins:
    """Gymnasium's environment, and ours begun with the same terrain, the same push and the same phases of the wind."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.theirs = gymnasium.make("LunarLander-v3", **settings).unwrapped
        powers = (15.0, 1.5) if settings.get("enable_wind") else None
        self._step = step_of(settings.get("continuous", False), settings.get("gravity", -10.0), powers)
        self.theirs.reset(seed=seed)
        self.draws = np.random.default_rng(seed)  # Gymnasium's generator, followed number by number
        terrain = self.draws.uniform(0, 40 / 6, size=12)
        terrain[3:8] = 10 / 3
        force = [self.draws.uniform(-1000, 1000) for _ in range(2)]
        phases = [self.draws.integers(-9999, 9999) for _ in range(2)] if powers else [0, 0]
        state = environment._start(jax.random.key(0))
        standing = environment.crafts.standing_at(environment.WIDTH / 2, environment.HEIGHT)
        impulse = environment.Vector(*(environment.DT * np.float32(force)))
        state = state._replace(
            craft=environment._push_hull(standing, impulse, environment.Vector(0.0, 0.0)),
            terrain=jnp.float32([0.33 * (terrain[i - 1] + terrain[i] + terrain[i + 1]) for i in range(11)]),
            wind=tuple(jnp.int32(phase) for phase in phases),
        )
        start = jnp.zeros(2) if settings.get("continuous") else jnp.int32(0)
        self.state, *_ = self._step(self._scatter(), state, start)

    def _scatter(self) -> np.ndarray:
        return np.float32([self.draws.uniform(-1.0, 1.0) for _ in range(2)]) / 30

    def step(self, action: Any) -> tuple[Any, Any]:
        """(observation, reward, whether it is over) of both."""
        return self.step_each((action, action))

    def step_each(self, actions: Any) -> tuple[Any, Any]:
        """The same, with an action for each."""
        return self.step_ours(actions[0]), self.step_theirs(actions[1])

    def step_ours(self, action: Any) -> tuple[Any, Any, Any]:
        self.state, *ours = self._step(self._scatter(), self.state, jnp.asarray(action))
        return tuple(ours)  # type: ignore[return-value]

    def step_theirs(self, action: Any) -> tuple[Any, Any, Any]:
        return self.theirs.step(action)[:3]

    def positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the three bodies are, [3, 2], in ours and in theirs."""
        ours = [(float(p.centre.x), float(p.centre.y)) for p in self.state.craft.poses]
        bodies = [self.theirs.lander, *self.theirs.legs]
        return np.array(ours), np.array([tuple(body.worldCenter) for body in bodies])


@pytest.mark.parametrize("settings", [{"continuous": True}, {"enable_wind": True, "gravity": -5.0}])
def test_a_flight_is_that_of_box2d(settings: dict[str, Any]) -> None:
    worst = {1: 0.0, 10: 0.0}
    for seed in range(10):
        twins = Twins(seed, **settings)
        rng = np.random.default_rng(seed)
        for step in range(1, 11):
            action = rng.uniform(-1, 1, 2).astype(np.float32) if settings.get("continuous") else int(rng.integers(4))
            (obs, reward, over), theirs = twins.step(action)
            np.testing.assert_allclose(obs, theirs[0], atol=2e-4)
            np.testing.assert_allclose(reward, theirs[1], atol=5e-2)
            assert not over
            assert not theirs[2]
            ours, boxes = twins.positions()
            if step in worst:
                worst[step] = max(worst[step], float(np.abs(ours - boxes).max()))
    assert worst[1] < 5e-6
    assert worst[10] < 1e-5


NEAR_HALF = [float(np.nextafter(np.float32(0.5), np.float32(x))) for x in (0, 1)]


@pytest.mark.parametrize("main", [-1.0, 0.0, 1e-6, 0.5, 3.0])
def test_fuel_costs_what_it_does_in_gymnasium(main: float) -> None:
    """The reward beside the growth of the potential, which drowns it: both engines, at and beyond their thresholds."""
    twins = Twins(0, continuous=True)
    for side in (0.0, 0.5, -0.5, *NEAR_HALF, -NEAR_HALF[1], 1.0, -2.0):
        before = float(twins.state.shaping), float(twins.theirs.prev_shaping)
        (_, reward, _), theirs = twins.step(np.float32([main, side]))
        ours = float(reward) - (float(twins.state.shaping) - before[0])
        boxes = theirs[1] - (twins.theirs.prev_shaping - before[1])
        np.testing.assert_allclose(ours, boxes, atol=2e-4)


@pytest.mark.parametrize("moved", [-9.9, 9.9, -10.1, 10.1])
def test_the_view_ends_where_that_of_gymnasium_does(moved: float) -> None:
    twins = Twins(0, continuous=True)
    x = moved - float(twins.theirs.lander.position.x) + environment.WIDTH / 2
    poses = tuple(p._replace(centre=p.centre + environment.Vector(x, 0.0)) for p in twins.state.craft.poses)
    twins.state = twins.state._replace(craft=twins.state.craft._replace(poses=poses))
    for body in (twins.theirs.lander, *twins.theirs.legs):
        body.position = (body.position.x + x, body.position.y)
    (_, reward, over), theirs = twins.step(np.zeros(2, np.float32))
    assert bool(over) == theirs[2] == (abs(moved) > 10)
    np.testing.assert_allclose(reward, theirs[1], atol=1e-2)


@pytest.mark.parametrize("legs", [(False, False), (True, False), (False, True)])
def test_the_wind_rests_while_a_leg_stands(legs: tuple[bool, bool]) -> None:
    twins = Twins(0, enable_wind=True, gravity=-5.0)
    twins.state = twins.state._replace(craft=twins.state.craft._replace(on_ground=jnp.array(legs)))
    for leg, stands in zip(twins.theirs.legs, legs, strict=True):
        leg.ground_contact = stands
    for _ in range(3):
        (obs, _, _), theirs = twins.step(0)
        np.testing.assert_allclose(obs, theirs[0], atol=2e-4)
    assert [int(k) for k in twins.state.wind] == [twins.theirs.wind_idx, twins.theirs.torque_idx]


def fly_down(seed: int) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """A flight down to the ground: observations of both, and by how much the angles of the legs differ at most."""
    twins, pilot, quiet = Twins(seed, continuous=True), continuous(landing_pilot), np.ones(2)
    flights: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    actions, apart = [np.zeros(2, np.float32)] * 2, 0.0
    while not any(flight and flight[-1][6:].any() for flight in flights):
        for i, (obs, *_) in enumerate(twins.step_each(actions)):
            flights[i].append(np.asarray(obs))
            actions[i] = pilot(np, np.asarray(obs), quiet)
        hull, *legs = (float(pose.angle) for pose in twins.state.craft.poses)
        theirs = [leg.angle - twins.theirs.lander.angle for leg in twins.theirs.legs]
        apart = max(apart, *(abs(leg - hull - other) for leg, other in zip(legs, theirs, strict=True)))
    return *flights, apart


def test_a_whole_flight_is_that_of_box2d() -> None:
    """Of 150 steps and more: the motors push the legs to their limits for 25 of them, and there they land."""
    for seed in range(4):
        ours, theirs, apart = fly_down(seed)
        assert len(ours) > 100
        assert apart < 2e-3
        np.testing.assert_allclose(ours[:-1], theirs[:-1], atol=1e-3)
        np.testing.assert_array_equal(ours[-1][6:], theirs[-1][6:])


def test_the_legs_move_between_the_angles_of_box2d() -> None:
    """A joint of Box2D counts from the angle at which its bodies were joined."""
    theirs = gymnasium.make("LunarLander-v3").unwrapped
    theirs.reset(seed=0)
    for leg, joint in zip(theirs.legs, environment.crafts.JOINTS, strict=True):
        origin = leg.angle - theirs.lander.angle - leg.joint.angle
        np.testing.assert_allclose(joint.lower, leg.joint.lowerLimit + origin, atol=1e-5)
        np.testing.assert_allclose(joint.upper, leg.joint.upperLimit + origin, atol=1e-5)
        np.testing.assert_allclose(joint.motor_speed, leg.joint.motorSpeed, rtol=1e-5)


def test_masses_are_those_of_box2d() -> None:
    theirs = gymnasium.make("LunarLander-v3").unwrapped
    theirs.reset(seed=0)
    for body, shape in ((theirs.lander, HULL), (theirs.legs[0], environment.crafts.LEG)):
        np.testing.assert_allclose(1 / shape.inverse_mass, body.mass, rtol=1e-5)
        about_centre = body.inertia - body.mass * np.dot(body.localCenter, body.localCenter)
        np.testing.assert_allclose(1 / shape.inverse_inertia, about_centre, rtol=1e-4)
        np.testing.assert_allclose([shape.centre.x, shape.centre.y], body.localCenter, atol=1e-6)


PILOTS = {"random": random_pilot, "thrust": thrust_pilot, "landing": landing_pilot}


SPACES = {
    "discrete": ("LunarLander-v3", list(PILOTS.values())),
    "continuous": ("LunarLanderContinuous-v3", [continuous(pilot) for pilot in PILOTS.values()]),
}


@cache
def ours(space: str, gravity: float = -10.0) -> dict[str, Episodes]:
    name, pilots = SPACES[space]
    return dict(zip(PILOTS, fly(envs.make(name, gravity=gravity, time_limit=LIMIT), pilots, EPISODES), strict=True))


@cache
def gymnasiums(space: str, pilot: str) -> Episodes:
    flown = SPACES[space][1][list(PILOTS).index(pilot)]
    env = gymnasium.make("LunarLander-v3", continuous=space == "continuous", max_episode_steps=LIMIT)
    return fly_gymnasium(env, flown, EPISODES)


def differences(a: Episodes, b: Episodes) -> dict[str, float]:
    """The p-value of each two-sample test: Kolmogorov-Smirnov, and Fisher's for the landings."""
    table = [[int(x.landed.sum()), int((~x.landed).sum())] for x in (a, b)]
    compared = {
        name: stats.ks_2samp(getattr(a, name), getattr(b, name)).pvalue for name in a._fields if name != "landed"
    }
    return {**compared, "landed": stats.fisher_exact(table).pvalue}


@pytest.mark.full
@pytest.mark.parametrize("space", ["discrete", pytest.param("continuous", marks=LONG)])
@pytest.mark.parametrize("pilot", list(PILOTS))
def test_episodes_are_distributed_as_gymnasiums(pilot: str, space: str) -> None:
    """With 200 episodes a side a Kolmogorov-Smirnov distance of 0.195 is noticed at this level.

    A normal variable moved by 0.54 standard deviations is noticed in nine of ten cases.
    """
    compared = differences(ours(space)[pilot], gymnasiums(space, pilot))
    assert min(compared.values()) > LEVEL, compared


@LONG
@pytest.mark.full
def test_the_comparison_notices_a_gravity_that_is_a_tenth_weaker() -> None:
    weaker = ours("discrete", gravity=-9.0)["landing"]
    assert min(differences(weaker, gymnasiums("discrete", "landing")).values()) < LEVEL


class Landing(NamedTuple):
    """How one side came to rest.

    settling: steps from the first moment at which both legs touch the ground to the end of the episode.
    still: steps at the end in which no body moves faster than Box2D lets a body sleep.
    reward: of the last step.
    """

    settling: int
    still: int
    reward: float


def landings(seed: int) -> list[Landing] | None:
    """How ours and theirs come to rest from one start, each flown by a pilot that sees its own; None after a crash."""
    twins = Twins(seed)
    quiet = np.ones(2)  # the pilot does nothing by chance
    flights: list[list[tuple[Any, Any, bool]]] = [[], []]
    looks = [lambda: ours_at_rest(twins), lambda: theirs_at_rest(twins)]
    actions = [0, 0]
    while min(map(len, flights)) < LIMIT and not all(flight and flight[-1][1][1] for flight in flights):
        for side, stepped in enumerate((twins.step_ours, twins.step_theirs)):
            if not (flights[side] and flights[side][-1][1][1]):
                obs, reward, over = stepped(actions[side])
                actions[side] = int(landing_pilot(np, np.asarray(obs), quiet))
                flights[side].append((np.asarray(obs), (float(reward), bool(over)), looks[side]()))
    if any(flight[-1][1][0] != 100 for flight in flights):
        return None
    return [summary(flight) for flight in flights]


def summary(flight: list[tuple[Any, Any, bool]]) -> Landing:
    stands = [obs[6] > 0 and obs[7] > 0 for obs, _, _ in flight]
    at_rest = [rests for *_, rests in flight]
    still = at_rest[::-1].index(False) if False in at_rest else len(at_rest)
    return Landing(len(flight) - stands.index(True), still, flight[-1][1][0])


def ours_at_rest(twins: Twins) -> bool:
    craft = twins.state.craft
    return all(bool(environment.crafts._rests(velocity)) for velocity in craft.velocities)


def theirs_at_rest(twins: Twins) -> bool:
    bodies_ = [twins.theirs.lander, *twins.theirs.legs]
    return all(b.linearVelocity.length <= 0.01 and abs(b.angularVelocity) <= 2 / 180 * np.pi for b in bodies_)


@pytest.mark.full
def test_it_falls_asleep_on_its_legs_as_box2d_does() -> None:
    pairs = [pair for pair in map(landings, range(12 if "JAXPG_LONG" in os.environ else 3)) if pair is not None]
    assert len(pairs) >= 2
    for mine, boxes in pairs:
        assert mine.still == boxes.still == 25  # half a second in which all three bodies rest
        assert mine.reward == boxes.reward == 100
        assert abs(mine.settling - boxes.settling) < 20
    assert abs(np.mean([mine.settling - boxes.settling for mine, boxes in pairs])) < 10


@pytest.mark.full
def test_the_landing_pilot_lands() -> None:
    """Else the comparison says nothing about the ground."""
    landing = ours("discrete")["landing"]
    assert landing.landed.mean() > 0.5
    assert landing.contacts.mean() > 0.1


@pytest.mark.parametrize(
    "settings", [{"gravity": 0.0}, {"gravity": -12.0}, {"time_limit": 0}, {"velocity_iterations": 0}]
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(settings))} must be"):
        envs.make("LunarLander-v3", **settings)


def test_a_polygon_s_mass_is_that_of_a_box() -> None:
    box = bodies.polygon(np.array([(1, 1), (5, 1), (5, 3), (1, 3)], float), density=2.0)
    assert (box.centre.x, box.centre.y) == pytest.approx((3, 2))
    assert 1 / box.inverse_mass == pytest.approx(16)
    assert 1 / box.inverse_inertia == pytest.approx(16 * (4**2 + 2**2) / 12)


def test_the_action_spaces() -> None:
    def actions(name: str) -> Env:
        return envs.make(name)

    assert actions("LunarLander-v3").action_space.n == 4  # type: ignore[union-attr]
    assert actions("LunarLanderContinuous-v3").action_space.shape == (2,)
