"""A revolute joint with a motor and limits, solved by sequential impulses."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from jaxpg.envs.lunar_lander.bodies import Pose, Shape, Velocity, push
from jaxpg.envs.lunar_lander.vectors import Rotation, Vector
from jaxpg.types import Array, Scalar
from jaxpg.vectorize import compute_once, tree_where

LINEAR_SLOP = 0.005
"""Metres by which a constraint may be violated without being corrected (Box2D's b2_linearSlop)."""
ANGULAR_SLOP = 2 / 180 * math.pi
"""The same in radians."""
_MAX_ANGULAR_CORRECTION = 8 / 180 * math.pi


class RevoluteJoint(NamedTuple):
    """Holds a point of body B on a point of body A; a motor turns B, between two angles.

    anchor_a, anchor_b: the point, relative to the centre of mass of each, in metres.
    lower, upper: the limits of B's angle minus A's, in radians.
    motor_speed: radians per second.
    max_torque: of the motor, in newton metres.
    """

    a: Shape
    b: Shape
    anchor_a: Vector
    anchor_b: Vector
    lower: float
    upper: float
    motor_speed: float
    max_torque: float


class JointImpulses(NamedTuple):
    """What the joint has pushed with in this step; the next step starts from it.

    point: holds the anchors together.
    limit: keeps the angle within its limits.
    motor: the motor's.
    at_limit: -1 at the lower limit, 1 at the upper, else 0.
    """

    point: Vector
    limit: Array
    motor: Array
    at_limit: Array

    @classmethod
    def none(cls) -> JointImpulses:
        return cls(Vector(jnp.zeros(()), jnp.zeros(())), jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32))


class PreparedJoint(NamedTuple):
    """What stays the same over a step: the offsets of the anchors and the inverses of the constraints' masses."""

    joint: RevoluteJoint
    offset_a: Vector
    offset_b: Vector
    point_mass: tuple[Scalar, Scalar, Scalar]
    joint_mass: tuple[Scalar, ...]
    coupling: Vector


def prepare(joint: RevoluteJoint, a: Pose, b: Pose, last: JointImpulses) -> tuple[PreparedJoint, JointImpulses]:
    """The joint at these poses, and the impulses to start from: those of the last step, but for a limit just met."""
    offset_a, offset_b = _offsets(joint, a, b)
    point = _point_matrix(joint, offset_a, offset_b)
    ia, ib = joint.a.inverse_inertia, joint.b.inverse_inertia
    coupling = Vector(-offset_a.y * ia - offset_b.y * ib, offset_a.x * ia + offset_b.x * ib)
    angle = b.angle - a.angle
    at_limit = jnp.where(angle <= joint.lower, -1, jnp.where(angle >= joint.upper, 1, 0)).astype(jnp.int32)
    kept = jnp.where((at_limit != 0) & (at_limit == last.at_limit), last.limit, 0.0)
    prepared = PreparedJoint(
        joint, offset_a, offset_b, _inverse_2(*point), _inverse_3(*point, coupling, ia + ib), coupling
    )
    return prepared, JointImpulses(last.point, kept, last.motor, at_limit)


def warm_start(joint: PreparedJoint, impulses: JointImpulses, a: Velocity, b: Velocity) -> tuple[Velocity, Velocity]:
    """The velocities after all impulses of the last step at once."""
    return _push_both(joint, impulses.point, impulses.motor + impulses.limit, a, b)


def solve_velocity(
    joint: PreparedJoint, impulses: JointImpulses, a: Velocity, b: Velocity, dt: float
) -> tuple[JointImpulses, Velocity, Velocity]:
    """One pass: the motor, then the anchors and the limit together (b2RevoluteJoint::SolveVelocityConstraints)."""
    motor, a, b = _solve_motor(joint, impulses.motor, a, b, dt)
    drift = b.at(joint.offset_b) - a.at(joint.offset_a)
    spin = b.angular - a.angular
    point, limit = compute_once(_solve_limited(joint, impulses, drift, spin))
    a, b = _push_both(joint, point, limit, a, b)
    return JointImpulses(impulses.point + point, impulses.limit + limit, motor, impulses.at_limit), a, b


def solve_position(joint: RevoluteJoint, at_limit: Array, a: Pose, b: Pose) -> tuple[Pose, Pose, Array]:
    """One pass over the poses: the limit, then the anchors. Also whether the error before it was within the slops."""
    below, above = b.angle - a.angle - joint.lower, b.angle - a.angle - joint.upper
    correction = jnp.where(
        at_limit < 0,
        jnp.clip(below + ANGULAR_SLOP, -_MAX_ANGULAR_CORRECTION, 0.0),
        jnp.where(at_limit > 0, jnp.clip(above - ANGULAR_SLOP, 0.0, _MAX_ANGULAR_CORRECTION), 0.0),
    )
    angular_error = jnp.where(at_limit < 0, -below, jnp.where(at_limit > 0, above, 0.0))
    ia, ib = joint.a.inverse_inertia, joint.b.inverse_inertia
    twist = -correction / (ia + ib)
    a, b = Pose(a.centre, a.angle - ia * twist), Pose(b.centre, b.angle + ib * twist)
    offset_a, offset_b = _offsets(joint, a, b)
    error = b.centre + offset_b - a.centre - offset_a
    impulse = compute_once(_times_2(_inverse_2(*_point_matrix(joint, offset_a, offset_b)), -error))
    close = (error.length() <= LINEAR_SLOP) & (angular_error <= ANGULAR_SLOP)
    return push(a, joint.a, -impulse, offset_a), push(b, joint.b, impulse, offset_b), close


def _solve_motor(
    joint: PreparedJoint, motor: Array, a: Velocity, b: Velocity, dt: float
) -> tuple[Array, Velocity, Velocity]:
    settings = joint.joint
    ia, ib = settings.a.inverse_inertia, settings.b.inverse_inertia
    wanted = motor - (b.angular - a.angular - settings.motor_speed) / (ia + ib)
    limited = jnp.clip(wanted, -dt * settings.max_torque, dt * settings.max_torque)
    twist = limited - motor
    return limited, a._replace(angular=a.angular - ia * twist), b._replace(angular=b.angular + ib * twist)


def _solve_limited(joint: PreparedJoint, impulses: JointImpulses, drift: Vector, spin: Scalar) -> tuple[Vector, Array]:
    """The impulses that stop the drift of the anchors, and the spin at a limit.

    A limit only pushes away from itself. If its accumulated impulse would pull, it is set to zero, and the anchors are
    solved with what that takes away.
    """
    at, before = impulses.at_limit, impulses.limit
    both, limit = _times_3(joint.joint_mass, -drift, -spin)
    pulls = ((at < 0) & (before + limit < 0)) | ((at > 0) & (before + limit > 0))
    taken = jnp.where(pulls, before, 0.0)
    alone = _times_2(joint.point_mass, taken * joint.coupling - drift)
    anchors_only = (at == 0) | pulls
    return tree_where(anchors_only, alone, both), jnp.where(anchors_only, -taken, limit)


def _push_both(
    joint: PreparedJoint, point: Vector, twist: Scalar, a: Velocity, b: Velocity
) -> tuple[Velocity, Velocity]:
    settings = joint.joint
    return push(a, settings.a, -point, joint.offset_a, -twist), push(b, settings.b, point, joint.offset_b, twist)


def _offsets(joint: RevoluteJoint, a: Pose, b: Pose) -> tuple[Vector, ...]:
    """From each centre of mass to its anchor."""
    return Rotation.by(a.angle) @ joint.anchor_a, Rotation.by(b.angle) @ joint.anchor_b


def _point_matrix(joint: RevoluteJoint, a: Vector, b: Vector) -> tuple[Scalar, Scalar, Scalar]:
    """K of the anchors, xx, xy and yy: the relative velocity of the anchors after an impulse P changes by K P."""
    ia, ib = joint.a.inverse_inertia, joint.b.inverse_inertia
    masses = joint.a.inverse_mass + joint.b.inverse_mass
    return (
        masses + a.y * a.y * ia + b.y * b.y * ib,
        -a.x * a.y * ia - b.x * b.y * ib,
        masses + a.x * a.x * ia + b.x * b.x * ib,
    )


Symmetric2 = tuple[Scalar, Scalar, Scalar]


def _inverse_2(xx: Scalar, xy: Scalar, yy: Scalar) -> Symmetric2:
    """The inverse of a symmetric matrix, by its entries xx, xy, yy."""
    scale = 1 / (xx * yy - xy * xy)
    return yy * scale, -xy * scale, xx * scale


def _times_2(matrix: Symmetric2, v: Vector) -> Vector:
    xx, xy, yy = matrix
    return Vector(xx * v.x + xy * v.y, xy * v.x + yy * v.y)


def _inverse_3(xx: Scalar, xy: Scalar, yy: Scalar, z: Vector, zz: Scalar) -> tuple[Scalar, ...]:
    """The inverse of a symmetric matrix whose third column is (z, zz): its entries xx, xy, yy, xz, yz, zz."""
    c_xx, c_xy, c_xz = yy * zz - z.y * z.y, z.x * z.y - xy * zz, xy * z.y - yy * z.x
    scale = 1 / (xx * c_xx + xy * c_xy + z.x * c_xz)
    rest = xx * zz - z.x * z.x, xy * z.x - xx * z.y, xx * yy - xy * xy
    return c_xx * scale, c_xy * scale, rest[0] * scale, c_xz * scale, rest[1] * scale, rest[2] * scale


def _times_3(matrix: tuple[Scalar, ...], v: Vector, z: Scalar) -> tuple[Vector, Scalar]:
    xx, xy, yy, xz, yz, zz = matrix
    return Vector(xx * v.x + xy * v.y + xz * z, xy * v.x + yy * v.y + yz * z), xz * v.x + yz * v.y + zz * z
