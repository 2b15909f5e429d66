"""Devices. The only file that names a device axis."""

from __future__ import annotations

import jax
from jax import lax

from jaxpg.types import Tree

DATA = "data"  # environments are split over it, gradients are summed over it
SEED = "seed"  # independent runs are split over it, nothing is communicated


def data_axis_bound() -> bool:
    """Whether the code being traced runs once per device of the data axis."""
    try:
        lax.axis_size(DATA)
    except NameError:
        return False
    return True


def psum(tree: Tree) -> Tree:
    """Sum over the devices of the data axis; the identity where no such axis is bound."""
    return lax.psum(tree, DATA) if data_axis_bound() else tree


def num_shards() -> int:
    """How many devices share the batch."""
    return lax.axis_size(DATA) if data_axis_bound() else 1


def shard_index() -> jax.Array | int:
    """Which share of the batch this device holds."""
    return lax.axis_index(DATA) if data_axis_bound() else 0
