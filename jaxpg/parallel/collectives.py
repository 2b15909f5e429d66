"""Sums over the devices that share a batch: the only file that names the data axis."""

from __future__ import annotations

from contextvars import ContextVar

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpg.types import Key, Tree

DATA = "data"  # environments are split over it, gradients are summed over it
SHARD = "shard"  # environments and parameters are split over it
auto_mesh: ContextVar[Mesh | None] = ContextVar("_cut_up", default=None)
"""The mesh that XLA is to cut up the program for that is being traced."""


def num_shards() -> int:
    """How many devices share the batch: those of the data axis, where the code being traced runs once on each."""
    try:
        return lax.axis_size(DATA)
    except NameError:
        return 1


def psum(tree: Tree) -> Tree:
    """Sum over the devices of the data axis; the identity on one device, where XLA would not see that."""
    return lax.psum(tree, DATA) if num_shards() > 1 else tree


def mean(x: jax.Array) -> jax.Array:
    """Mean of the entries of all devices of the data axis, which hold equally many."""
    return psum(x.mean()) / num_shards()


def maximum(x: jax.Array) -> jax.Array:
    """The largest entry on all devices of the data axis."""
    return lax.pmax(x.max(), DATA) if num_shards() > 1 else x.max()


def device_key(key: Key) -> Key:
    """A key of this device's own, where several share a batch."""
    return jax.random.fold_in(key, lax.axis_index(DATA)) if num_shards() > 1 else key


def shard_index() -> jax.Array | int:
    """Which share of the batch this device holds."""
    return lax.axis_index(DATA) if num_shards() > 1 else 0


def shard_columns(x: jax.Array, axis: int = 0) -> jax.Array:
    """`x`, its columns along that axis split over the devices that share parameters; as it is, where none do."""
    mesh = auto_mesh.get()
    if mesh is None or x.shape[axis] % mesh.shape[SHARD]:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*[None] * axis, SHARD)))
