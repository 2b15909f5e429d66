"""Contacts of a convex polygon with an edge of the ground: where they touch, and the impulses that keep them apart."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jaxpg.envs.lunar_lander.bodies import Pose, Shape, Velocity, push
from jaxpg.envs.lunar_lander.joints import ANGULAR_SLOP, LINEAR_SLOP
from jaxpg.envs.lunar_lander.vectors import Rotation, Vector, pick
from jaxpg.types import Array, Scalar
from jaxpg.vectorize import compute_once, tree_where

SKIN = 0.01
"""Metres around every shape (Box2D's b2_polygonRadius): two shapes touch when they are two skins apart."""
_CORRECTED, _MAX_CORRECTION = 0.2, 0.2
_ILL_CONDITIONED = 1000.0


class Manifold(NamedTuple):
    """The one or two points at which a polygon touches an edge.

    points: two, in the world, on the incident segment clipped to the reference one.
    separations: two, metres along the normal of the reference face, without skins.
    touching: two bools.
    of_polygon: whether the reference face belongs to the polygon; else it is the edge.
    face: a point of the reference face.
    normal: the outer normal of the reference face.
    feature: tells manifolds apart: which face of the polygon is touched, and which of both is the reference.
    """

    points: tuple[Vector, ...]
    separations: tuple[Array, ...]
    touching: tuple[Array, ...]
    of_polygon: Array
    face: Vector
    normal: Vector
    feature: Array


def collide(start: Vector, end: Vector, vertices: Vector, normals: Vector) -> Manifold:
    """The contact of an edge with a convex polygon (b2CollideEdgeAndPolygon, for an edge without neighbours).

    Args:
        start, end: of the edge.
        vertices: [V], in the world, counter-clockwise.
        normals: [V], the outer normal of the side from each vertex to the next.
    """
    along = end - start
    along = (1 / along.length()) * along
    middle = Vector(vertices.x.mean(), vertices.y.mean())
    in_front = along.right().dot(middle - start) >= 0
    normal = tree_where(in_front, along.right(), along.left())
    from_edge = (vertices - _spread(start)).dot(_spread(normal)).min()
    by_side = jnp.minimum(-normals.dot(vertices - _spread(start)), -normals.dot(vertices - _spread(end)))
    opposite = (_spread(normal) - normals).dot(_spread(normal)) >= -ANGULAR_SLOP
    side = jnp.argmax(jnp.where(opposite, by_side, -jnp.inf))
    from_polygon = pick(by_side, side)
    of_polygon = from_polygon > 0.98 * from_edge + 0.001
    near = (from_edge <= 2 * SKIN) & (by_side.max() <= 2 * SKIN)

    facing = jnp.argmin(normals.dot(_spread(normal)))
    first, second = _side(vertices, facing)
    side_first, side_second = _side(vertices, side)
    face_from = tree_where(of_polygon, side_first, tree_where(in_front, start, end))
    face_to = tree_where(of_polygon, side_second, tree_where(in_front, end, start))
    face_normal = tree_where(of_polygon, _pick_vector(normals, side), normal)
    p, q = tree_where(of_polygon, start, first), tree_where(of_polygon, end, second)
    p, q, some = _clip(p, q, face_normal.right(), face_from)
    p, q, any_left = _clip(p, q, face_normal.left(), face_to)
    separations = (face_normal.dot(p - face_from), face_normal.dot(q - face_from))
    touches = near & some & any_left
    p, q, face_from, face_normal, separations, touches = compute_once(
        (p, q, face_from, face_normal, separations, touches)
    )
    return Manifold(
        points=(p, q),
        separations=separations,
        touching=(touches & (separations[0] <= 2 * SKIN), touches & (separations[1] <= 2 * SKIN)),
        of_polygon=of_polygon,
        face=face_from,
        normal=face_normal,
        feature=2 * jnp.where(of_polygon, side, facing) + of_polygon,
    )


class ContactImpulses(NamedTuple):
    """What a contact has pushed with in this step; the next step starts from it if the same features touch.

    normal, tangent: two each, one for each point.
    feature: of the manifold and its edge, -1 without a contact.
    """

    normal: tuple[Array, ...]
    tangent: tuple[Array, ...]
    feature: Array

    @classmethod
    def none(cls) -> ContactImpulses:
        zero = jnp.zeros(())
        return cls((zero, zero), (zero, zero), -jnp.ones((), jnp.int32))


class PreparedContact(NamedTuple):
    """What stays the same over a step.

    active: two bools; the second point of an ill-conditioned pair is left out.
    both: whether the two points are solved together.
    normal, tangent: of the ground, pointing to the body, and along it.
    offsets: of the two points from the centre of mass.
    normal_masses, tangent_masses: two each, the inverses of the velocity that a unit impulse gives.
    k: (k11, k12, k22) of the two normal impulses; k_inverse: its inverse.
    manifold, points, face, face_normal: the reference of the position pass, the last three in the body's coordinates.
    """

    active: tuple[Array, ...]
    both: Array
    normal: Vector
    tangent: Vector
    offsets: tuple[Vector, ...]
    normal_masses: tuple[Array, ...]
    tangent_masses: tuple[Array, ...]
    k: tuple[Array, ...]
    k_inverse: tuple[Array, ...]
    manifold: Manifold
    points: tuple[Vector, ...]
    face: Vector
    face_normal: Vector


def prepare(
    manifold: Manifold, shape: Shape, pose: Pose, edge: Array, last: ContactImpulses
) -> tuple[PreparedContact, ContactImpulses]:
    """A contact at this pose, and the impulses to start from: the last ones where the same features touch."""
    normal = tree_where(manifold.of_polygon, -manifold.normal, manifold.normal)
    tangent = normal.right()
    offsets = tuple(
        _between_surfaces(manifold, point, separation) - pose.centre
        for point, separation in zip(manifold.points, manifold.separations, strict=True)
    )
    m, i = shape.inverse_mass, shape.inverse_inertia
    arms = [r.cross(normal) for r in offsets]
    k11, k12, k22 = m + i * arms[0] ** 2, m + i * arms[0] * arms[1], m + i * arms[1] ** 2
    determinant = k11 * k22 - k12 * k12
    two = manifold.touching[0] & manifold.touching[1]
    both = two & (k11 * k11 < _ILL_CONDITIONED * determinant)
    active = (manifold.touching[0], manifold.touching[1] & (both | ~two))
    scale = 1 / jnp.where(both, determinant, 1.0)
    back = Rotation.by(pose.angle).inverse()
    feature = jnp.where(active[0] | active[1], 8 * edge + manifold.feature, -1).astype(jnp.int32)
    prepared = PreparedContact(
        active=active,
        both=both,
        normal=normal,
        tangent=tangent,
        offsets=offsets,
        normal_masses=(1 / k11, 1 / k22),
        tangent_masses=tuple(1 / (m + i * r.cross(tangent) ** 2) for r in offsets),
        k=(k11, k12, k22),
        k_inverse=(k22 * scale, -k12 * scale, k11 * scale),
        manifold=manifold,
        points=tuple(back @ (point - pose.centre) for point in manifold.points),
        face=back @ (manifold.face - pose.centre),
        face_normal=back @ manifold.normal,
    )
    kept = [a & (feature == last.feature) for a in active]
    normal_impulses, tangent_impulses = (
        tuple(jnp.where(keep, x, 0.0) for keep, x in zip(kept, impulses, strict=True))
        for impulses in (last.normal, last.tangent)
    )
    return prepared, ContactImpulses(normal_impulses, tangent_impulses, feature)


def warm_start(contact: PreparedContact, impulses: ContactImpulses, shape: Shape, velocity: Velocity) -> Velocity:
    """The velocity after all impulses of the last step at once."""
    for offset, n, t in zip(contact.offsets, impulses.normal, impulses.tangent, strict=True):
        velocity = push(velocity, shape, n * contact.normal + t * contact.tangent, offset)
    return velocity


def solve_velocity(
    contact: PreparedContact, impulses: ContactImpulses, shape: Shape, velocity: Velocity, friction: float
) -> tuple[ContactImpulses, Velocity]:
    """One pass: friction at each point, then both normal impulses (b2ContactSolver::SolveVelocityConstraints)."""
    tangent = []
    for point in (0, 1):
        slip = velocity.at(contact.offsets[point]).dot(contact.tangent)
        limit = friction * impulses.normal[point]
        wanted = impulses.tangent[point] - contact.tangent_masses[point] * slip
        new = jnp.where(contact.active[point], jnp.clip(wanted, -limit, limit), 0.0)
        change = new - impulses.tangent[point]
        velocity = push(velocity, shape, change * contact.tangent, contact.offsets[point])
        tangent.append(new)
    approach = [velocity.at(offset).dot(contact.normal) for offset in contact.offsets]
    normal = _normal_impulses(contact, impulses.normal, approach)
    for offset, new, old in zip(contact.offsets, normal, impulses.normal, strict=True):
        velocity = push(velocity, shape, (new - old) * contact.normal, offset)
    return ContactImpulses(normal, (tangent[0], tangent[1]), impulses.feature), velocity


def solve_position(contact: PreparedContact, shape: Shape, pose: Pose) -> tuple[Pose, Array]:
    """One pass over the pose: each point is pushed out by a part of its depth. Also the least separation before it."""
    least = jnp.zeros(())
    for point in (0, 1):
        rotation = Rotation.by(pose.angle)
        of_polygon = contact.manifold.of_polygon
        normal = tree_where(of_polygon, rotation @ contact.face_normal, contact.manifold.normal)
        face = tree_where(of_polygon, pose.centre + rotation @ contact.face, contact.manifold.face)
        touched = tree_where(of_polygon, contact.manifold.points[point], pose.centre + rotation @ contact.points[point])
        separation = compute_once(normal.dot(touched - face) - 2 * SKIN)
        normal, offset = tree_where(of_polygon, -normal, normal), touched - pose.centre
        depth = jnp.clip(_CORRECTED * (separation + LINEAR_SLOP), -_MAX_CORRECTION, 0.0)
        mass = 1 / (shape.inverse_mass + shape.inverse_inertia * offset.cross(normal) ** 2)
        impulse = jnp.where(contact.active[point], -depth * mass, 0.0) * normal
        pose = compute_once(push(pose, shape, impulse, offset))
        least = jnp.minimum(least, jnp.where(contact.active[point], separation, 0.0))
    return pose, least


def _normal_impulses(contact: PreparedContact, old: tuple[Array, ...], approach: list[Scalar]) -> tuple[Array, ...]:
    """The accumulated normal impulses that end the approach, none of them negative.

    Two points are a linear complementarity problem, velocity = K x + b with x >= 0, velocity >= 0, and one of both 0.
    It has four cases, tried in turn: both points push, the first alone, the second alone, none.
    """
    k11, k12, k22 = contact.k
    b1, b2 = approach[0] - (k11 * old[0] + k12 * old[1]), approach[1] - (k12 * old[0] + k22 * old[1])
    i11, i12, i22 = contact.k_inverse
    x1, x2 = -(i11 * b1 + i12 * b2), -(i12 * b1 + i22 * b2)
    alone1, alone2 = -b1 * contact.normal_masses[0], -b2 * contact.normal_masses[1]
    both = (x1 >= 0) & (x2 >= 0)
    first = (alone1 >= 0) & (k12 * alone1 + b2 >= 0)
    second = (alone2 >= 0) & (k12 * alone2 + b1 >= 0)
    none = (b1 >= 0) & (b2 >= 0)
    solved = Vector(
        jnp.where(both, x1, jnp.where(first, alone1, jnp.where(second | none, 0.0, old[0]))),
        jnp.where(both, x2, jnp.where(first, 0.0, jnp.where(second, alone2, jnp.where(none, 0.0, old[1])))),
    )
    single = [
        jnp.where(active, jnp.maximum(x - mass * v, 0.0), 0.0)
        for active, x, mass, v in zip(contact.active, old, contact.normal_masses, approach, strict=True)
    ]
    return jnp.where(contact.both, solved.x, single[0]), jnp.where(contact.both, solved.y, single[1])


def _between_surfaces(manifold: Manifold, point: Vector, separation: Scalar) -> Vector:
    """The middle between the two skins where a point touches the reference face."""
    on_face = point + (SKIN - separation) * manifold.normal
    on_point = point - SKIN * manifold.normal
    return 0.5 * (on_face + on_point)


def _clip(p: Vector, q: Vector, outward: Vector, limit: Vector) -> tuple[Vector, Vector, Array]:
    """The part of the segment from p to q that is not beyond `limit` in the direction `outward`, and whether any is."""
    beyond_p, beyond_q = outward.dot(p - limit), outward.dot(q - limit)
    difference = beyond_p - beyond_q
    crossing = p + (beyond_p / jnp.where(difference == 0, 1.0, difference)) * (q - p)
    some = (beyond_p <= 0) | (beyond_q <= 0)
    return tree_where(beyond_p <= 0, p, crossing), tree_where(beyond_q <= 0, q, crossing), some


def _side(vertices: Vector, index: Array) -> tuple[Vector, ...]:
    """Both ends of a side of a polygon."""
    following = Vector(jnp.roll(vertices.x, -1), jnp.roll(vertices.y, -1))
    return _pick_vector(vertices, index), _pick_vector(following, index)


def _pick_vector(vectors: Vector, index: Array) -> Vector:
    return Vector(pick(vectors.x, index), pick(vectors.y, index))


def _spread(v: Vector) -> Vector:
    """One vector, to be combined with an array of vectors."""
    return Vector(jnp.asarray(v.x)[..., None], jnp.asarray(v.y)[..., None])
