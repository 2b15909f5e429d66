"""Rigid bodies in the plane: shape, mass, pose, velocity and what an impulse does."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

from jaxpg.envs.lunar_lander.vectors import Rotation, Vector, constant
from jaxpg.types import Scalar
from jaxpg.vectorize import compute_once


class Shape(NamedTuple):
    """A convex polygon of even density.

    vertices: [V], counter-clockwise, relative to the centre of mass.
    normals: [V], the outer normal of the edge from each vertex to the next.
    centre: the centre of mass in the coordinates in which the polygon was given.
    inverse_mass: 1 / kg.
    inverse_inertia: 1 / (kg m^2), about the centre of mass.
    """

    vertices: Vector
    normals: Vector
    centre: Vector
    inverse_mass: float
    inverse_inertia: float


class Pose(NamedTuple):
    """Where a body is: its centre of mass, and its angle in radians."""

    centre: Vector
    angle: Scalar


class Velocity(NamedTuple):
    """The velocity of the centre of mass, and the angular velocity in radians per second."""

    linear: Vector
    angular: Scalar

    def at(self, offset: Vector) -> Vector:
        """The velocity of the point of the body at `offset` from its centre of mass."""
        return self.linear + self.angular * offset.left()


Moved = TypeVar("Moved", Pose, Velocity)


def polygon(points: np.ndarray, density: float) -> Shape:
    """The shape of a convex polygon.

    With c_i the cross product of vertex i and the next, the area is A = sum_i c_i / 2, the centre of mass is
    sum_i (p_i + p_{i+1}) c_i / (6 A), and the second moment about the origin is
    sum_i c_i (p_i·p_i + p_i·p_{i+1} + p_{i+1}·p_{i+1}) / 12.

    Args:
        points: [V, 2], counter-clockwise, in metres.
        density: kg per square metre.
    """
    following = np.roll(points, -1, axis=0)
    cross = points[:, 0] * following[:, 1] - points[:, 1] * following[:, 0]
    area = cross.sum() / 2
    centre = ((points + following) * cross[:, None]).sum(0) / (6 * area)
    squares = (points * points + points * following + following * following).sum(1)
    inertia = (cross * squares).sum() / 12 - area * centre @ centre
    edges = following - points
    normals = np.stack([edges[:, 1], -edges[:, 0]], 1) / np.linalg.norm(edges, axis=1, keepdims=True)
    return Shape(
        vertices=constant(points - centre),
        normals=constant(normals),
        centre=Vector(float(centre[0]), float(centre[1])),
        inverse_mass=float(1 / (density * area)),
        inverse_inertia=float(1 / (density * inertia)),
    )


def push(body: Moved, shape: Shape, impulse: Vector, offset: Vector, twist: Scalar = 0.0) -> Moved:
    """A body's velocity after `impulse` at `offset` from its centre of mass and an angular impulse `twist`.

    v + P / m and w + (r x P + twist) / I. A pseudo-impulse moves a pose by the same formula.
    """
    linear, angular = body
    return type(body)(
        linear + shape.inverse_mass * impulse, angular + shape.inverse_inertia * (offset.cross(impulse) + twist)
    )


def outline(shape: Shape, pose: Pose) -> tuple[Vector, ...]:
    """The vertices and the normals of a shape, [V] each, in the world."""
    rotation = Rotation.by(pose.angle)
    turned = rotation @ shape.vertices
    moved = Vector(turned.x + pose.centre.x, turned.y + pose.centre.y)
    return compute_once((moved, rotation @ shape.normals))


def origin(shape: Shape, pose: Pose) -> Vector:
    """The point of a body that was the origin of its polygon's coordinates."""
    return pose.centre - Rotation.by(pose.angle) @ shape.centre
