"""Sums over devices and keys per device, with which a program on each of several devices forms one learner.

The devices of the axis DATA share the batch of one run. A learner is written for one device and calls these functions;
where no such axis is bound, they are identities. They work under `jax.shard_map`, `jax.pmap` and `jax.vmap` alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpg.types import Array, Key, Tree

TOGETHER_BELOW = 2**16  # numbers of an array, from which on copying it costs more than an exchange of its own

DATA = "jaxpg_data"  # environments are split over it, gradients are summed over it; no name of a user's own axis
SHARD = "shard"  # environments and parameters are split over it
auto_mesh: ContextVar[Mesh | None] = ContextVar("auto_mesh", default=None)
"""The mesh of the program being traced if XLA partitions it by itself (axis SHARD), else None.

`mesh.spread` sets it while it traces; `split`, `whole`, `shard_columns` and `layers.dot_rows` read it. It is a context
variable because the code between them is a learner, which knows nothing of meshes. Per-device programs (axis DATA) do
not need it: jax binds their axis by name.
"""


_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def each_alone() -> Iterator[None]:
    """What is traced in here every device of the axis DATA computes for itself, on the same numbers, as an evaluation.

    The functions below are identities then: a sum over devices would count everything once for each of them.
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def num_shards() -> int:
    """How many devices share the batch: the size of the axis DATA, 1 where it is not bound or in `each_alone`."""
    if _alone.get():
        return 1
    try:
        return lax.axis_size(DATA)
    except NameError:
        return 1


def psum(tree: Tree) -> Tree:
    """Sum over the devices of the axis DATA; the identity on one device, where XLA would not remove the sum.

    Small arrays travel as one vector per type, so that one exchange does for all: XLA combines exchanges by itself, on
    CUDA by a kernel per array in front of it and behind it (benchmarks/LOG.md, "compiled for machines not here").
    """
    if num_shards() == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    small = [i for i, x in enumerate(leaves) if jnp.size(x) < TOGETHER_BELOW]
    for kind in sorted({jnp.result_type(leaves[i]) for i in small}, key=str):  # the same order in all processes
        same = [i for i in small if jnp.result_type(leaves[i]) == kind]
        vector, unravel = ravel_pytree([leaves[i] for i in same])
        for i, x in zip(same, unravel(lax.psum(vector, DATA)), strict=True):
            leaves[i] = x
    large = [i for i, x in enumerate(leaves) if jnp.size(x) >= TOGETHER_BELOW]
    for i, x in zip(large, lax.psum([leaves[i] for i in large], DATA), strict=True):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def mean(x: jax.Array) -> jax.Array:
    """Mean of the entries of `x` on all devices of the axis DATA, which hold equally many."""
    return psum(x.mean()) / num_shards()


def gather(tree: Tree) -> Tree:
    """The rows of all devices of the axis DATA, one device after the other: `[B, ...]` of each; the identity on one."""
    return lax.all_gather(tree, DATA, tiled=True) if num_shards() > 1 else tree


def of_each_device(tree: Tree) -> Tree:
    """What each device of the axis DATA has, `[devices, ...]` of each array, by one exchange; for a few numbers.

    As a sum, to which every device adds its row: XLA puts sums of all shapes into one exchange, but gathers only where
    they are along the same axis, which those of all minibatches, under `vmap`, and those of the rollout are not.
    """
    vector, unravel = ravel_pytree(tree)
    if num_shards() == 1:
        return jax.vmap(unravel)(vector[None])
    own = jnp.arange(num_shards()) == lax.axis_index(DATA)
    return jax.vmap(unravel)(lax.psum(jnp.where(own[:, None], vector[None], 0), DATA))


def kept_apart(x: Array) -> Array:
    """`x`, for what is divided by a sum over devices; the same array, for speed alone.

    It replaces a plain use of `x` where devices share a batch. XLA puts a division into one kernel with what else is
    made of the same steps; if that is to be exchanged too, it waits for the sum, and two exchanges cannot be one. Eight
    GPUs exchange 18 instead of 19 times in an update of PPO (benchmarks/LOG.md, "two exchanges besides").
    """
    return x if num_shards() == 1 else lax.optimization_barrier(x)


def maximum(tree: Tree) -> Tree:
    """Maximum of the entries of each array on all devices of the axis DATA."""
    return jax.tree.map(jnp.max, of_each_device(jax.tree.map(jnp.max, tree)))


def device_key(key: Key) -> Key:
    """A key that differs between the devices of the axis DATA: `fold_in(key, device index)`; `key` on one device."""
    return jax.random.fold_in(key, lax.axis_index(DATA)) if num_shards() > 1 else key


def shard_index() -> jax.Array | int:
    """Index of this device on the axis DATA, 0 on one device."""
    return lax.axis_index(DATA) if num_shards() > 1 else 0


def layout(shape: tuple[int, ...], num_devices: int) -> PartitionSpec:
    """How the devices of the axis SHARD split an array of parameters: along its longest axis that divides evenly.

    A vector is not worth an exchange: every device has all of it.
    """
    divisible_sizes = [size if size % num_devices == 0 else 0 for size in shape]
    if len(shape) < 2 or not any(divisible_sizes):
        return PartitionSpec()
    longest = divisible_sizes.index(max(divisible_sizes))
    return PartitionSpec(*[None] * longest, SHARD)


def split(tree: Tree) -> Tree:
    """Parameters of which each device of the axis SHARD holds its part, see `layout`; so is their gradient.

    Unchanged in programs that XLA does not partition, as by `gathered` and `whole`.
    """
    mesh = auto_mesh.get()
    if mesh is None:
        return tree

    def constrain(x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, layout(x.shape, mesh.shape[SHARD])))

    return jax.tree.map(constrain, tree)


def gathered(tree: Tree) -> Tree:
    """Parameters that the devices of the axis SHARD hold in parts, with all of them on each; their gradient is split.

    They are gathered as they are: XLA would otherwise gather a copy in bfloat16 before it is made, in float32.
    """
    return whole(split(tree))


def whole(tree: Tree) -> Tree:
    """What `gathered` gave, inside of a loop: XLA chooses another layout for what a loop carries."""
    mesh = auto_mesh.get()
    return tree if mesh is None else lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


def shard_columns(x: jax.Array, axis: int = 0) -> jax.Array:
    """`x` with its columns (the given axis) constrained to be split over the axis SHARD, if XLA partitions the program.

    Unchanged in all other programs, and where the columns do not divide evenly.
    """
    mesh = auto_mesh.get()
    if mesh is None or x.shape[axis] % mesh.shape[SHARD]:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*[None] * axis, SHARD)))
