"""Vectors and rotations in the plane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Number = Any
"""A number, or an array of numbers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Vector:
    """A vector, or an array of vectors, with its coordinates apart.

    Under `vmap` a coordinate is one array over environments. Pairs `[..., 2]` would be read with stride two.
    """

    x: Number
    y: Number

    def __add__(self, other: Vector) -> Vector:
        return Vector(self.x + other.x, self.y + other.y)

    def __sub__(self, other: Vector) -> Vector:
        return Vector(self.x - other.x, self.y - other.y)

    def __neg__(self) -> Vector:
        return Vector(-self.x, -self.y)

    def __rmul__(self, factor: Number) -> Vector:
        return Vector(factor * self.x, factor * self.y)

    def __getitem__(self, index: int | jax.Array | slice) -> Vector:
        return jax.tree.map(lambda x: x[index], self)

    def dot(self, other: Vector) -> Number:
        return self.x * other.x + self.y * other.y

    def cross(self, other: Vector) -> Number:
        """The third component of the product of both, positive if `other` is to the left."""
        return self.x * other.y - self.y * other.x

    def left(self) -> Vector:
        """Turned by a quarter to the left; `spin * r.left()` is the velocity of the point r of a body that spins."""
        return Vector(-self.y, self.x)

    def right(self) -> Vector:
        """Turned by a quarter to the right: the outer normal of an edge of a polygon given counter-clockwise."""
        return Vector(self.y, -self.x)

    def length(self) -> jax.Array:
        return jnp.sqrt(self.dot(self))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotation:
    """A rotation by an angle."""

    cos: Number
    sin: Number

    @classmethod
    def by(cls, angle: Number) -> Rotation:
        return cls(jnp.cos(angle), jnp.sin(angle))

    def __matmul__(self, v: Vector) -> Vector:
        return Vector(self.cos * v.x - self.sin * v.y, self.sin * v.x + self.cos * v.y)

    def inverse(self) -> Rotation:
        return Rotation(self.cos, -self.sin)


def constant(points: np.ndarray) -> Vector:
    """`points` [..., 2] as float32 vectors."""
    return Vector(*np.moveaxis(np.asarray(points, np.float32), -1, 0))


def pick(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values[index]` of a few values, by comparison: under `vmap` an index would be a gather."""
    return jnp.where(jnp.arange(values.shape[0]) == index, values, 0.0).sum()
