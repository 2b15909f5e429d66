"""Devices. The only file that names a device axis.

A program is written once, for one device. `spread` runs it on a mesh of two axes: independent runs (seeds,
hyperparameters) are split over SEED and exchange nothing; within a run, environments are split over DATA, parameters
are replicated, and the sums that make the devices one learner go through `psum`.

For a model that outgrows a device the second axis is SHARD instead: parameters and what the optimizer knows of them are
split over it too, array by array, and so are the columns of a batch. The program stays that of one device, with the
whole batch; XLA cuts it up, gathers a layer's weights where it needs them, and scatters the sums of gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpg.errors import UserError
from jaxpg.parallel.collectives import (
    DATA,
    SHARD,
    auto_mesh,
)
from jaxpg.types import Tree

SEED = "seed"  # independent runs are split over it, nothing is communicated


def make_mesh(
    num_seeds: int, num_envs: int, devices: Sequence[jax.Device], over_data: int | None = None, sharded: bool = False
) -> Mesh:
    """A mesh of two axes, SEED and DATA, or SHARD in its place.

    Args:
        num_seeds: independent runs.
        num_envs: what the devices of the data axis share out: environments of one run, or examples.
        devices: all that are used.
        over_data: how many of them share the environments of a run; as few as possible by default, since those on the
            seed axis need not talk.

        sharded: they share the parameters as well.

    Raises:
        UserError: the devices can not be shared out evenly.
    """
    if over_data is None:
        over_data = len(devices) // math.gcd(num_seeds, len(devices))
    over_seeds = len(devices) // over_data
    if num_seeds % over_seeds or num_envs % over_data:
        raise UserError(
            f"{len(devices)} devices can not share {num_seeds} seeds of {num_envs} environments evenly, "
            f"{over_seeds} over the seeds and {over_data} over the environments. Use a number of devices that divides "
            f"the seeds, or environments that are a multiple of {over_data}."
        )
    return Mesh(np.asarray(devices).reshape(over_seeds, over_data), (SEED, SHARD if sharded else DATA))


def is_sharded(mesh: Mesh) -> bool:
    """Whether devices share the parameters of a run."""
    return SHARD in mesh.axis_names


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts of their own programs a run's batch is cut: XLA cuts up one program for all of SHARD."""
    return mesh.shape.get(DATA, 1)


def state_specs(state: Tree, mesh: Mesh) -> Tree:
    """How the state of a run, stacked over seeds `[S, ...]`, lies on a mesh.

    What belongs to single environments (`[S, B, ...]`, see `is_per_environment`) is split over both axes; all else over
    the seeds alone, or, where parameters are shared out, also along the longest axis that divides evenly.
    """
    second = mesh.axis_names[1]

    def spec(path: tuple[Any, ...], x: Any) -> PartitionSpec:
        if is_per_environment(path):
            return PartitionSpec(SEED, second)
        sizes = [size if size % mesh.shape[second] == 0 else 0 for size in x.shape[1:]]
        if second == DATA or not any(sizes):
            return PER_SEED
        longest = int(np.argmax(sizes))
        return PartitionSpec(SEED, *[None] * longest, SHARD)

    return jax.tree_util.tree_map_with_path(spec, state)


def is_per_environment(path: tuple[Any, ...]) -> bool:
    """Whether the array at that place of a state is in a field called `runner`."""
    return jax.tree_util.GetAttrKey("runner") in path


PER_SEED = PartitionSpec(SEED)
REPLICATED = PartitionSpec()


def shardings(specs: Tree, mesh: Mesh) -> Tree:
    """`specs` as shardings."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def place(tree: Tree, specs: Tree, mesh: Mesh) -> Tree:
    """Move arrays to where `specs` says. Of several processes each has all of them, and keeps its own devices' part."""
    lies = shardings(specs, mesh)
    return jax.device_put(tree, lies) if jax.process_count() == 1 else jax.tree.map(_local_part, tree, lies)


def _local_part(x: Any, sharding: NamedSharding) -> jax.Array:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_local_part(jax.random.key_data(x), sharding))
    array = np.asarray(x)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def to_host(tree: Tree) -> Tree:
    """Arrays on a mesh as this process can read them: what lies on several hosts is copied to a device of each."""
    if jax.process_count() == 1:
        return tree
    copied = _replicate(jax.tree.leaves(tree)[0].sharding.mesh)(tree)
    return jax.tree.map(lambda x: x.addressable_data(0), copied)


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[Tree], Tree]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, REPLICATED))


def abstract_arrays(shapes: Tree, specs: Tree, mesh: Mesh) -> Tree:
    """Shapes of arrays that lie where `specs` says; a spec stands for all arrays below its place in the tree."""

    def one(spec: PartitionSpec, below: Tree) -> Tree:
        lies = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies), below)

    return jax.tree.map(one, specs, shapes)


def spread(function: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function`, run once per device on that device's share of its arguments.

    Replication is not checked: under the check, the gradient with respect to replicated parameters arrives already
    summed over devices, and summing it again would be wrong by their number, which Adam hides.
    """
    if is_sharded(mesh):
        return _auto_sharded(function, mesh, in_specs, out_specs)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _auto_sharded(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` for XLA to cut up, from how its arguments lie and how its results shall."""

    def constrained(specs: Any, tree: Tree) -> Tree:
        def below(spec: PartitionSpec, part: Tree) -> Tree:
            return jax.tree.map(lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, spec)), part)

        return jax.tree.map(below, specs, tree)

    def cut_up(*arguments: Any) -> Any:
        token = auto_mesh.set(mesh)
        try:
            return constrained(out_specs, function(*constrained(in_specs, arguments)))
        finally:
            auto_mesh.reset(token)

    return cut_up


def map_seeds(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of one run, applied to runs stacked on the first axis of its arguments and results.

    On an accelerator side by side, by `vmap`. On a CPU one after the other: a core gains nothing from runs side by
    side, and loses what its matrix and convolution kernels know only how to do for one set of weights.
    """
    if jax.default_backend() != "cpu":
        return jax.vmap(function)
    return lambda *arguments: lax.map(lambda stacked: function(*stacked), arguments)
