"""A lander on two legs over a terrain, and one step of its physics: that of Box2D's world of LunarLander."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpg.envs.lunar_lander import contacts, joints
from jaxpg.envs.lunar_lander.bodies import Pose, Shape, Velocity, outline, polygon
from jaxpg.envs.lunar_lander.contacts import SKIN, ContactImpulses, Manifold, PreparedContact
from jaxpg.envs.lunar_lander.joints import ANGULAR_SLOP, LINEAR_SLOP, JointImpulses, PreparedJoint, RevoluteJoint
from jaxpg.envs.lunar_lander.vectors import Rotation, Vector, pick
from jaxpg.types import Array, Key, Scalar
from jaxpg.vectorize import compute_once, stacked

SCALE = 30.0
"""Pixels of the original per metre."""
WIDTH, HEIGHT = 600 / SCALE, 400 / SCALE
"""Of the view, in metres."""
DT = 1 / 50
"""Seconds per step."""
CHUNKS = 11
"""Corners of the terrain."""
PAD = (WIDTH * 0.4, WIDTH * 0.6)
"""Where the landing pad begins and ends, in metres."""

HULL_POINTS = np.array([(14, 17), (-14, 17), (-17, 0), (-17, -10), (17, -10), (17, 0)], float) / SCALE
LEG_POINTS = np.array([(-2, -8), (2, -8), (2, 8), (-2, 8)], float) / SCALE
HULL = polygon(HULL_POINTS, density=5.0)
LEG = polygon(LEG_POINTS, density=1.0)
LEG_AWAY, LEG_DOWN = 20 / SCALE, 18 / SCALE
LEG_TILT = 0.05
"""Radians by which each leg leans when it is joined to the hull. Box2D counts the angle of a joint from there, which no
line of Gymnasium's says: its Python interface fills in the reference angle."""
SIDES = (-1.0, 1.0)
"""The first leg is on the right of the hull, as in Gymnasium, where it is the one of `i = -1`."""


def _joint(side: float) -> RevoluteJoint:
    return RevoluteJoint(
        a=HULL,
        b=LEG,
        anchor_a=-HULL.centre,
        anchor_b=Vector(side * LEG_AWAY, LEG_DOWN),
        lower=(0.4 if side < 0 else -0.9) + side * LEG_TILT,
        upper=(0.9 if side < 0 else -0.4) + side * LEG_TILT,
        motor_speed=0.3 * side,
        max_torque=40.0,
    )


JOINTS = tuple(_joint(side) for side in SIDES)
FRICTION = float(np.sqrt(0.1 * 0.2))
"""Between a leg (0.2, Box2D's default) and the ground (0.1): the geometric mean."""
_RESTING_SPEED, _RESTING_SPIN, _TIME_TO_SLEEP = 0.01, ANGULAR_SLOP, 0.5


class Craft(NamedTuple):
    """The hull and its two legs, hull first in every triple.

    poses, velocities: of the three bodies.
    joints: the impulses of the two joints.
    contacts: of each leg with the two edges of the ground beneath it, [2, 2].
    still: three, seconds since each body has come to rest.
    touching: [2, CHUNKS - 1] bool, which edges each leg touches.
    on_ground: [2] bool, what Gymnasium says of each leg: true when it begins to touch an edge, and false when it leaves
        one, although it may touch another one still.
    """

    poses: tuple[Pose, ...]
    velocities: tuple[Velocity, ...]
    joints: tuple[JointImpulses, ...]
    contacts: ContactImpulses
    still: tuple[Array, ...]
    touching: Array
    on_ground: Array


class Touched(NamedTuple):
    """What a step has found.

    hull: whether the hull touches the ground.
    asleep: whether all three bodies have rested for half a second.
    """

    hull: Array
    asleep: Array


class Iterations(NamedTuple):
    """At most this many passes over the velocities and over the poses in each step; Gymnasium has 180 and 60."""

    velocity: int
    position: int


def standing_at(x: float, y: float) -> Craft:
    """The craft before its first step, with the origin of its hull at (x, y)."""
    poses = [_placed(HULL, Vector(x, y), 0.0)]
    poses += [_placed(LEG, Vector(x - side * LEG_AWAY, y), side * LEG_TILT) for side in SIDES]
    zero = jnp.zeros(())
    standing = Velocity(Vector(zero, zero), zero)
    nothing = jax.tree.map(lambda x: jnp.broadcast_to(x, (2, 2)), ContactImpulses.none())
    return Craft(
        poses=(poses[0], poses[1], poses[2]),
        velocities=(standing, standing, standing),
        joints=(JointImpulses.none(), JointImpulses.none()),
        contacts=nothing,
        still=(zero, zero, zero),
        touching=jnp.zeros((2, CHUNKS - 1), bool),
        on_ground=jnp.zeros(2, bool),
    )


def random_terrain(key: Key) -> Array:
    """The heights of the terrain's corners, [CHUNKS]: uniform, flat around the pad, smoothed over three neighbours."""
    heights = jax.random.uniform(key, (CHUNKS + 1,), maxval=HEIGHT / 2)
    middle = CHUNKS // 2
    heights = heights.at[middle - 2 : middle + 3].set(HEIGHT / 4)
    return 0.33 * (jnp.roll(heights, 1) + heights + jnp.roll(heights, -1))[:CHUNKS]


def step(craft: Craft, terrain: Array, gravity: Scalar, iterations: Iterations) -> tuple[Craft, Touched]:
    """1/50 s of Box2D's world: collide, solve the velocities, move, solve the poses, sleep (b2World::Step).

    It leaves out continuous collision: a body that falls into the ground within one step is pushed out afterwards. What
    touches the ground at the end of a step counts as having touched it, which Box2D would have found on the way.

    Args:
        craft: before the step, after the engines' impulses.
        terrain: [CHUNKS], the heights of its corners.
        gravity: metres per second squared, negative.
        iterations: the most passes of both solvers. They stop earlier where nothing is left to correct.
    """
    legs = stacked(craft.poses[1:])
    manifolds, edges = jax.vmap(partial(_manifolds, terrain, LEG))(legs)
    constraints, impulses = _prepare(craft, manifolds, edges)
    fall = Vector(0.0, DT * gravity)
    velocities = tuple(v._replace(linear=v.linear + fall) for v in craft.velocities)
    impulses, velocities = _solve_velocities(constraints, impulses, velocities, iterations.velocity)
    poses = tuple(
        Pose(p.centre + DT * v.linear, p.angle + DT * v.angular) for p, v in zip(craft.poses, velocities, strict=True)
    )
    at_limits = tuple(joint.at_limit for joint in impulses.joints)
    poses, solved = _solve_poses(constraints, at_limits, poses, iterations.position)
    still = tuple(jnp.where(_rests(v), t + DT, 0.0) for v, t in zip(velocities, craft.still, strict=True))
    hull = jax.vmap(partial(_touches, terrain, HULL))(
        stacked([craft.poses[0], poses[0]]), jnp.array([2 * SKIN, LINEAR_SLOP])
    )
    on_ground, touching = _meet(craft.on_ground, craft.touching, manifolds, edges, 2 * SKIN, leave=True)
    manifolds, edges = jax.vmap(partial(_manifolds, terrain, LEG))(stacked(poses[1:]))
    on_ground, touching = _meet(on_ground, touching, manifolds, edges, LINEAR_SLOP, leave=False)
    asleep = _have_rested(still) & solved
    rows = [stacked(leg) for leg in impulses.contacts]
    moved = Craft(poses, velocities, tuple(impulses.joints), stacked(rows), still, touching, on_ground)
    return moved, compute_once(Touched(hull.any(), asleep))


def outlines(craft: Craft) -> list[list[tuple[float, float]]]:
    """The corners of the hull and of both legs, in metres."""
    corners = (outline(shape, pose)[0] for shape, pose in zip((HULL, LEG, LEG), craft.poses, strict=True))
    return [[(float(x), float(y)) for x, y in zip(v.x, v.y, strict=True)] for v in corners]


class _Constraints(NamedTuple):
    joints: list[PreparedJoint]
    contacts: list[list[PreparedContact]]


class _Impulses(NamedTuple):
    joints: list[JointImpulses]
    contacts: list[list[ContactImpulses]]


def _prepare(craft: Craft, manifolds: Manifold, edges: Array) -> tuple[_Constraints, _Impulses]:
    """The constraints at the poses before the step, and the impulses of the last step that still apply."""
    hull, *legs = craft.poses
    of_joints = [
        joints.prepare(joint, hull, leg, last) for joint, leg, last in zip(JOINTS, legs, craft.joints, strict=True)
    ]
    of_edges = jax.vmap(contacts.prepare, in_axes=(0, None, None, 0, 0))
    of_legs = jax.vmap(of_edges, in_axes=(0, None, 0, 0, 0))
    of_contacts = compute_once(of_legs(manifolds, LEG, stacked(legs), edges, craft.contacts))
    constraints, impulses = (
        [[jax.tree.map(itemgetter((i, k)), part) for k in (0, 1)] for i in (0, 1)] for part in of_contacts
    )
    return (
        _Constraints([prepared for prepared, _ in of_joints], constraints),
        _Impulses([last for _, last in of_joints], impulses),
    )


def _solve_velocities(
    constraints: _Constraints, impulses: _Impulses, velocities: tuple[Velocity, ...], iterations: int
) -> tuple[_Impulses, tuple[Velocity, ...]]:
    """Sequential impulses: each joint and then each contact corrects the velocities, again and again."""
    hull, *legs = velocities
    for i, joint in enumerate(constraints.joints):
        hull, legs[i] = joints.warm_start(joint, impulses.joints[i], hull, legs[i])
        for contact, impulse in zip(constraints.contacts[i], impulses.contacts[i], strict=True):
            legs[i] = contacts.warm_start(contact, impulse, LEG, legs[i])

    def one_pass(_: Array, carry: tuple[_Impulses, tuple[Velocity, ...]]) -> tuple[_Impulses, tuple[Velocity, ...]]:
        impulses, (hull, *legs) = carry
        of_joints, of_contacts = list(impulses.joints), [list(leg) for leg in impulses.contacts]
        for i in (1, 0):  # Box2D visits the newest joint first
            joint, of_joint = constraints.joints[i], of_joints[i]
            of_joints[i], hull, legs[i] = joints.solve_velocity(joint, of_joint, hull, legs[i], DT)
        for i, leg in enumerate(constraints.contacts):
            for k, contact in enumerate(leg):
                of_contacts[i][k], legs[i] = contacts.solve_velocity(contact, of_contacts[i][k], LEG, legs[i], FRICTION)
        return _Impulses(of_joints, of_contacts), (hull, *legs)

    return lax.fori_loop(0, iterations, one_pass, (impulses, (hull, *legs)))


def _solve_poses(
    constraints: _Constraints, at_limits: tuple[Array, ...], poses: tuple[Pose, ...], iterations: int
) -> tuple[tuple[Pose, ...], Array]:
    """Pushes the bodies out of the ground and the anchors together. Also whether the errors are within the slops."""

    def unsolved(carry: tuple[Array, tuple[Pose, ...], Array]) -> Array:
        done, _, solved = carry
        return (done < iterations) & ~solved

    def one_pass(carry: tuple[Array, tuple[Pose, ...], Array]) -> tuple[Array, tuple[Pose, ...], Array]:
        done, (hull, *legs), _ = carry
        solved = jnp.asarray(True)
        for i, leg in enumerate(constraints.contacts):
            for contact in leg:
                legs[i], least = contacts.solve_position(contact, LEG, legs[i])
                solved &= least >= -3 * LINEAR_SLOP
        for i in (1, 0):
            hull, legs[i], close = joints.solve_position(JOINTS[i], at_limits[i], hull, legs[i])
            solved &= close
        return done + 1, (hull, *legs), solved

    _, poses, solved = lax.while_loop(unsolved, one_pass, (jnp.zeros((), jnp.int32), poses, jnp.asarray(False)))
    return poses, solved


def _manifolds(terrain: Array, shape: Shape, pose: Pose) -> tuple[Manifold, Array]:
    """The contacts of a body with the edges beneath its left and its right end, [2], and the edges' indices, [2].

    A body is narrower than an edge. Where both are the same edge, the second touches nothing.
    """
    width = WIDTH / (CHUNKS - 1)
    vertices, normals = outline(shape, pose)
    ends = jnp.stack([vertices.x.min() / width - 1e-3, vertices.x.max() / width + 1e-3])
    edges = jnp.clip(jnp.floor(ends), 0, CHUNKS - 2).astype(jnp.int32)

    def with_edge(index: Array) -> Manifold:
        x = width * index
        start, end = Vector(x, pick(terrain, index)), Vector(x + width, pick(terrain, index + 1))
        return contacts.collide(start, end, vertices, normals)

    manifolds = jax.vmap(with_edge)(edges)
    there = jnp.stack([jnp.asarray(True), edges[0] != edges[1]])
    return manifolds._replace(touching=tuple(t & there for t in manifolds.touching)), edges


def _near(manifolds: Manifold, bound: Scalar) -> Array:
    """Which of the contacts are at most `bound` metres deep or apart."""
    touching, separations = manifolds.touching, manifolds.separations
    return (touching[0] & (separations[0] <= bound)) | (touching[1] & (separations[1] <= bound))


def _touches(terrain: Array, shape: Shape, pose: Pose, bound: Scalar) -> Array:
    """Whether a body is at most `bound` metres above the ground."""
    return _near(_manifolds(terrain, shape, pose)[0], bound).any()


def _meet(
    on_ground: Array, touching: Array, manifolds: Manifold, edges: Array, bound: float, *, leave: bool
) -> tuple[Array, Array]:
    """`Craft.on_ground` and `Craft.touching` after the contacts of the legs with edges, [2, 2], were looked at.

    With `leave`, edges that are not touched any more are left. Of both in one step, leaving comes last.
    """
    near = _near(manifolds, bound)[..., None] & jax.nn.one_hot(edges, CHUNKS - 1, dtype=bool)
    now = near.any(1) if leave else near.any(1) | touching
    begins, ends = (now & ~touching).any(-1), (touching & ~now).any(-1)
    return (on_ground | begins) & ~ends, now


def is_at_rest(craft: Craft) -> Array:
    """Whether all three bodies have rested for as long as they need to fall asleep."""
    return _have_rested(craft.still)


def _have_rested(still: tuple[Array, ...]) -> Array:
    return jnp.minimum(jnp.minimum(*still[:2]), still[2]) >= _TIME_TO_SLEEP


def _rests(velocity: Velocity) -> Array:
    slow = velocity.linear.dot(velocity.linear) <= _RESTING_SPEED**2
    return slow & (velocity.angular**2 <= _RESTING_SPIN**2)


def _placed(shape: Shape, origin: Vector, angle: float) -> Pose:
    """The pose of a body whose polygon's origin is at `origin`."""
    turned = Rotation(float(np.cos(angle)), float(np.sin(angle))) @ shape.centre
    return jax.tree.map(jnp.float32, Pose(origin + turned, angle))
