"""Contacts and joints of LunarLander one by one, against what defines them; whole flights are in test_lunar_lander."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.envs.lunar_lander import contacts, joints
from jaxpg.envs.lunar_lander.bodies import Pose, Shape, Velocity, outline, polygon
from jaxpg.envs.lunar_lander.contacts import SKIN, ContactImpulses, Manifold
from jaxpg.envs.lunar_lander.joints import ANGULAR_SLOP, LINEAR_SLOP, JointImpulses, RevoluteJoint
from jaxpg.envs.lunar_lander.vectors import Vector

EDGE, FRICTION = jnp.int32(3), 0.1


def square(half: float, density: float = 5.0) -> Shape:
    corners = half * np.array([(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)])
    return polygon(corners, density)


def pose(x: float, y: float, angle: float = 0.0) -> Pose:
    return Pose(Vector(jnp.float32(x), jnp.float32(y)), jnp.float32(angle))


def velocity(x: float, y: float, angular: float = 0.0) -> Velocity:
    return Velocity(Vector(jnp.float32(x), jnp.float32(y)), jnp.float32(angular))


def on_ground(shape: Shape, at: Pose) -> Manifold:
    """Its contact with an edge along y = 0."""
    start, end = (Vector(jnp.float32(x), jnp.float32(0)) for x in (-5, 5))
    return contacts.collide(start, end, *outline(shape, at))


def impulses(normal: float, tangent: float, feature: int) -> ContactImpulses:
    of_point = (jnp.float32(normal), jnp.float32(normal)), (jnp.float32(tangent), jnp.float32(tangent))
    return ContactImpulses(*of_point, jnp.int32(feature))


def prepared(shape: Shape, at: Pose, last: ContactImpulses) -> Any:
    return contacts.prepare(on_ground(shape, at), shape, at, EDGE, last)


def test_what_lies_flat_touches_with_two_points_and_the_edge_is_the_reference() -> None:
    """Both faces are as near; Box2D prefers the edge until a polygon's face is nearer by more than rounding."""
    flat = on_ground(square(0.5), pose(0.3, 0.5 + 1.5 * SKIN))
    assert not flat.of_polygon
    assert [bool(x) for x in flat.touching] == [True, True]
    np.testing.assert_allclose(flat.separations, [1.5 * SKIN] * 2, atol=1e-6)
    assert sorted(round(float(p.x), 5) for p in flat.points) == [-0.2, 0.8]
    assert not any(bool(x) for x in on_ground(square(0.5), pose(0.3, 0.5 + 2.5 * SKIN)).touching)


def test_two_points_are_solved_together_unless_they_are_one_but_for_rounding() -> None:
    """Two impulses at one point are not determined: Box2D leaves the second out."""
    contact, _ = prepared(square(0.5), pose(0, 0.5 + SKIN), ContactImpulses.none())
    assert contact.both
    assert [bool(x) for x in contact.active] == [True, True]
    tall = polygon(np.array([(-0.004, 0.0), (0.004, 0.0), (0.004, 1.0), (-0.004, 1.0)]), 5.0)
    contact, _ = prepared(tall, pose(0, float(tall.centre.y) + SKIN), ContactImpulses.none())
    assert [bool(x) for x in contact.manifold.touching] == [True, True]
    assert not contact.both
    assert [bool(x) for x in contact.active] == [True, False]


def test_a_contact_goes_on_with_the_impulses_of_the_same_features_alone() -> None:
    shape, at = square(0.5), pose(0, 0.5 + SKIN)
    _, begun = prepared(shape, at, ContactImpulses.none())
    feature = int(begun.feature)
    assert feature >= 0
    np.testing.assert_array_equal(begun.normal, [0, 0])
    _, same = prepared(shape, at, impulses(2.0, 0.1, feature))
    np.testing.assert_allclose(same.normal + same.tangent, [2, 2, 0.1, 0.1], rtol=1e-6)
    _, other = prepared(shape, at, impulses(2.0, 0.1, feature + 2))  # of another face
    np.testing.assert_array_equal(other.normal + other.tangent, [0] * 4)
    _, apart = prepared(shape, pose(0, 2), impulses(2.0, 0.1, feature))
    assert int(apart.feature) == -1
    np.testing.assert_array_equal(apart.normal + apart.tangent, [0] * 4)


@pytest.mark.parametrize(("half_width", "sign"), [(0.5, -1), (0.15, 1)])
def test_normal_impulses_solve_their_complementarity_problem(half_width: float, sign: int) -> None:
    """Neither pulls, neither point approaches afterwards, and only one that stays pushes; in all four cases.

    A push at one point of a wide body brings the other one down, at one of a tall body up.
    """
    shape = polygon(np.array([(-1.0, -0.5), (1.0, -0.5), (1.0, 0.5), (-1.0, 0.5)]) * (half_width, 1.0), 5.0)
    contact, _ = prepared(shape, pose(0, 0.5 + SKIN), ContactImpulses.none())
    k11, k12, k22 = (float(x) for x in contact.k)
    assert contact.both
    assert k12 * sign > 0
    old_key, approach_key = jax.random.split(jax.random.key(0))
    old = 3 * jax.random.uniform(old_key, (2000, 2))
    approach = 3 * jax.random.normal(approach_key, (2000, 2))

    def solved(old: jax.Array, approach: jax.Array) -> tuple[jax.Array, ...]:
        return contacts._normal_impulses(contact, (old[0], old[1]), [approach[0], approach[1]])

    x = np.stack(jax.vmap(solved)(old, approach), -1)
    after = np.asarray(approach) + (x - np.asarray(old)) @ np.array([[k11, k12], [k12, k22]])
    assert x.min() >= 0
    assert after.min() > -1e-4
    assert np.abs(x * after).max() < 1e-3
    cases = {(bool(a), bool(b)) for a, b in x > 0}
    assert len(cases) == 4


@pytest.mark.parametrize("slip", [-100.0, 100.0])
def test_friction_ends_at_its_share_of_the_normal_impulse(slip: float) -> None:
    shape, at = square(0.5), pose(0, 0.5 + SKIN)
    contact, begun = prepared(shape, at, ContactImpulses.none())
    started = begun._replace(normal=(jnp.float32(3), jnp.float32(2)))
    after, _ = contacts.solve_velocity(contact, started, shape, velocity(slip, 0), FRICTION)
    np.testing.assert_allclose(np.abs(after.tangent), [FRICTION * 3, FRICTION * 2], rtol=1e-6)
    slow, moved = contacts.solve_velocity(contact, started, shape, velocity(1e-4 * np.sign(slip), 0), FRICTION)
    assert np.abs(slow.tangent).max() < FRICTION * 2
    assert abs(float(moved.linear.x)) < 1e-4


def test_a_fifth_of_a_depth_is_corrected_in_a_pass() -> None:
    """Of what is beyond the slop, and of no more than Box2D's largest correction."""
    shape = square(0.5)
    for depth, risen in ((0.1, 0.2 * (0.1 - LINEAR_SLOP)), (LINEAR_SLOP / 2, 0.0), (1.5, 0.2)):
        at = pose(0, 0.5 * 2**0.5 + 2 * SKIN - depth, np.pi / 4)
        manifold = on_ground(shape, at)._replace(touching=(jnp.bool_(True), jnp.bool_(False)))
        lowest = min(range(2), key=lambda i: float(manifold.separations[i]))
        manifold = manifold._replace(
            points=(manifold.points[lowest],) * 2,
            separations=(manifold.separations[lowest],) * 2,
            of_polygon=jnp.bool_(False),
            face=Vector(jnp.float32(0), jnp.float32(0)),
            normal=Vector(jnp.float32(0), jnp.float32(1)),
        )
        corner = Vector(at.centre.x, at.centre.y - jnp.float32(0.5 * 2**0.5))
        manifold = manifold._replace(points=(corner, corner))
        contact, _ = contacts.prepare(manifold, shape, at, EDGE, ContactImpulses.none())
        moved, least = contacts.solve_position(contact, shape, at)
        assert float(moved.centre.y - at.centre.y) == pytest.approx(risen, abs=1e-5)
        assert float(least) == pytest.approx(-depth, abs=1e-5)


LIMITED = RevoluteJoint(
    a=square(0.5), b=square(0.2), anchor_a=Vector(0.5, 0.0), anchor_b=Vector(-0.2, 0.0), lower=-0.5, upper=0.5,
    motor_speed=0.0, max_torque=0.0,
)  # fmt: skip


def hinged(angle: float) -> tuple[Pose, Pose]:
    """Both bodies with their anchors together, the second turned by an angle."""
    anchor = Vector(0.5 + 0.2 * np.cos(angle), 0.2 * np.sin(angle))
    return pose(0, 0), pose(float(anchor.x), float(anchor.y), angle)


@pytest.mark.parametrize(("angle", "side"), [(0.6, 1), (0.0, 0), (-0.6, -1)])
def test_a_limit_goes_on_with_its_own_impulse(angle: float, side: int) -> None:
    for last_side in (-1, 0, 1):
        last = JointImpulses.none()._replace(limit=jnp.float32(2), at_limit=jnp.int32(last_side))
        _, begun = joints.prepare(LIMITED, *hinged(angle), last)
        assert int(begun.at_limit) == side
        assert float(begun.limit) == (2 if side and side == last_side else 0)


@pytest.mark.parametrize(("angle", "side"), [(0.6, 1), (-0.6, -1)])
def test_a_limit_pushes_and_never_pulls(angle: float, side: int) -> None:
    """What turns on beyond the limit is stopped, what turns back is left alone."""
    contact, begun = joints.prepare(LIMITED, *hinged(angle), JointImpulses.none())
    still = velocity(0, 0)
    for spin, stopped in ((side, True), (-side, False)):
        turning = velocity(-spin * 0.2 * np.sin(angle), spin * 0.2 * np.cos(angle), spin)  # about the anchor
        state, a, b = begun, still, turning
        for _ in range(20):
            state, a, b = joints.solve_velocity(contact, state, a, b, 0.02)
        assert side * float(state.limit) <= 0
        relative = float(b.angular - a.angular)
        assert abs(relative) < 1e-3 if stopped else side * relative < -0.5
        drift = b.at(contact.offset_b) - a.at(contact.offset_a)
        assert float(drift.length()) < 1e-3


@pytest.mark.parametrize(("beyond", "corrected"), [(0.1, 0.1 - ANGULAR_SLOP), (0.3, 8 / 180 * np.pi), (0.01, 0.0)])
@pytest.mark.parametrize("side", [-1, 1])
def test_an_angle_beyond_its_limit_is_corrected_but_for_the_slop(side: int, beyond: float, corrected: float) -> None:
    middle = Vector(0.0, 0.0)  # anchors elsewhere would turn the bodies back by a part of it
    joint = LIMITED._replace(anchor_a=middle, anchor_b=middle)
    a, b = pose(0, 0), pose(0, 0, side * (0.5 + beyond))
    new_a, new_b, close = joints.solve_position(joint, jnp.int32(side), a, b)
    assert side * float((new_b.angle - new_a.angle) - (b.angle - a.angle)) == pytest.approx(-corrected, abs=1e-5)
    assert bool(close) == (beyond <= ANGULAR_SLOP)
