"""The mesh of a run: how seeds, environments and parameters are laid out on devices.

A program is written once, for one device. `spread` runs it on a mesh of two axes. Independent runs (seeds,
hyperparameters) are split over SEED and exchange nothing. Within a run, environments are split over DATA and parameters
are replicated; the sums of `collectives` make the devices one learner.

For a model that outgrows a device the second axis is SHARD instead. Parameters and optimizer state are split over it
too, array by array, and so are the columns of a batch. The program is that of one device with the whole batch, and XLA
partitions it. Where weights are gathered, and that their gradient is split again, `collectives.gathered` and `split`
say: once before a rollout, and for an update all at once or block by block.
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
from jaxpg.parallel.collectives import DATA, SHARD, auto_mesh, layout
from jaxpg.parallel.cores import num_cores
from jaxpg.parallel.machine import machine, program_for, side_by_side
from jaxpg.types import Tree

SEED = "seed"  # independent runs are split over it, nothing is communicated
PER_SEED = PartitionSpec(SEED)
REPLICATED = PartitionSpec()


def make_mesh(
    num_seeds: int,
    num_envs: int,
    devices: Sequence[jax.Device],
    devices_per_seed: int | None = None,
    sharded: bool = False,
) -> Mesh:
    """A mesh of the axes SEED and DATA, or SEED and SHARD.

    Args:
        num_seeds: independent runs.
        num_envs: environments of one run, or examples in its batch; split over the second axis.
        devices: all devices of the mesh.
        devices_per_seed: size of the second axis. By default as small as possible, since devices along SEED do not
            communicate.
        sharded: the second axis is SHARD: its devices share the parameters too.

    Raises:
        UserError: the seeds or the environments do not divide evenly over the devices.
    """
    if devices_per_seed is None:
        devices_per_seed = len(devices) // math.gcd(num_seeds, len(devices))
    seed_devices = len(devices) // devices_per_seed
    if num_seeds % seed_devices or num_envs % devices_per_seed:
        remedy = "Use a number of devices that divides the seeds, or environments that are a multiple of "
        remedy += str(devices_per_seed)
        if num_seeds % seed_devices:
            remedy = f"Lay the seeds over as many devices as divide them, or use a multiple of {seed_devices} seeds"
        raise UserError(
            f"{len(devices)} devices cannot share {num_seeds} seeds of {num_envs} environments evenly, "
            f"{seed_devices} over the seeds and {devices_per_seed} over the environments. {remedy}."
        )
    return Mesh(np.asarray(devices).reshape(seed_devices, devices_per_seed), (SEED, SHARD if sharded else DATA))


def describe_mesh(mesh: Mesh) -> str:
    """The devices of a mesh in words."""
    kind = mesh.devices.flat[0].device_kind
    sizes = {"seeds": mesh.shape[SEED], "environments": batch_shards(mesh)}
    per_core = kind == "cpu" and jax.local_device_count() == num_cores()
    details = ["one XLA device per core"] if per_core else []
    if min(sizes.values()) > 1:
        details.append(" and ".join(f"{size} over {what}" for what, size in sizes.items()))
    if is_sharded(mesh):
        details.append("which share the parameters")
    if jax.process_count() > 1:
        details.append(f"in {jax.process_count()} processes")
    return f"{mesh.size} x {kind}" + (f" ({', '.join(details)})" if details else "")


def platform_of(mesh: Mesh) -> str:
    """The platform of the devices of a mesh, which may be described and not there: "cpu", "gpu", "tpu"."""
    return mesh.devices.flat[0].platform


def is_sharded(mesh: Mesh) -> bool:
    """Whether devices share the parameters of a run."""
    return SHARD in mesh.axis_names


def batch_shards(mesh: Mesh) -> int:
    """Into how many per-device programs the batch of a run is split: 1 on SHARD, where one program has all of it."""
    return mesh.shape.get(DATA, 1)


def is_per_environment(path: tuple[Any, ...]) -> bool:
    """Whether an array of a learner's state belongs to single environments: it is in the field `runner`."""
    return jax.tree_util.GetAttrKey("runner") in path


def state_specs(state: Tree, mesh: Mesh) -> Tree:
    """The partition specs of the states of S runs, whose leaves are `[S, ...]`.

    Arrays per environment (`[S, B, ...]`, see `is_per_environment`) are split over both axes. All others are split over
    SEED alone or, on a mesh with SHARD, also as `collectives.layout` says.
    """
    second = mesh.axis_names[1]

    def spec(path: tuple[Any, ...], x: Any) -> PartitionSpec:
        if is_per_environment(path):
            return PartitionSpec(SEED, second)
        if second == DATA:
            return PER_SEED
        return PartitionSpec(SEED, *layout(x.shape[1:], mesh.shape[SHARD]))

    return jax.tree_util.tree_map_with_path(spec, state)


def shardings(specs: Tree, mesh: Mesh) -> Tree:
    """Partition specs as shardings on a mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def place(tree: Tree, specs: Tree, mesh: Mesh) -> Tree:
    """Move arrays to the devices of a mesh. Each process passes whole arrays and keeps the parts of its own devices.

    On a CPU NumPy cuts them. `jax.device_put` compiles that for every shape: 14 programs at the start of PPO, 0.5 s.
    """
    if jax.process_count() == 1 and mesh.devices.flat[0].platform != "cpu":
        return jax.device_put(tree, shardings(specs, mesh))
    return jax.tree.map(_place_local_parts, tree, shardings(specs, mesh))


def _place_local_parts(x: Any, sharding: NamedSharding) -> jax.Array:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_place_local_parts(jax.random.key_data(x), sharding))
    array = np.asarray(x)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def to_host(tree: Tree) -> Tree:
    """Arrays on a mesh as arrays that this process can read; those of several processes are gathered in each."""
    if jax.process_count() == 1:
        return tree
    replicated = _replicate(jax.tree.leaves(tree)[0].sharding.mesh)(tree)
    return jax.tree.map(lambda x: x.addressable_data(0), replicated)


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[Tree], Tree]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, REPLICATED))


def abstract_arrays(shapes: Tree, specs: Tree, mesh: Mesh) -> Tree:
    """Shapes and dtypes with shardings, to lower a program for; a spec holds for the whole subtree at its place."""

    def with_sharding(spec: PartitionSpec, subtree: Tree) -> Tree:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), subtree)

    return jax.tree.map(with_sharding, specs, shapes)


def spread(function: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` on a mesh: once per device, on its part of the arguments; on SHARD one program that XLA partitions.

    `check_vma` is off: with it, the gradient with respect to replicated parameters arrives already summed over devices,
    and a second sum would multiply it by their number, an error that Adam hides.
    """

    def for_mesh(*arguments: Any) -> Any:
        with program_for(platform_of(mesh)):
            return function(*arguments)

    if is_sharded(mesh):
        return _auto_partitioned(for_mesh, mesh, in_specs, out_specs)
    return jax.shard_map(for_mesh, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _auto_partitioned(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` with shardings constrained at its arguments and results only; XLA partitions what is between."""

    def constrain(specs: Any, tree: Tree) -> Tree:
        def constrain_subtree(spec: PartitionSpec, subtree: Tree) -> Tree:
            return jax.tree.map(lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, spec)), subtree)

        return jax.tree.map(constrain_subtree, specs, tree)

    def partitioned(*arguments: Any) -> Any:
        token = auto_mesh.set(mesh)
        try:
            return constrain(out_specs, function(*constrain(in_specs, arguments)))
        finally:
            auto_mesh.reset(token)

    return partitioned


def map_seeds(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of one run, mapped over runs stacked on the first axis of its arguments and results.

    On an accelerator: `vmap`, all runs at once. On a CPU: `lax.map`, one after the other (`Machine.seeds_at_once`).
    A single run has no axis: a loop whose end differs between runs would select between old and new state every time.
    """

    def mapped(*arguments: Any) -> Any:
        if not machine().seeds_at_once:
            return lax.map(lambda of_one_run: function(*of_one_run), arguments)
        if (runs := len(jax.tree.leaves(arguments)[0])) > 1:
            with side_by_side(runs):
                return jax.vmap(function)(*arguments)
        alone = function(*jax.tree.map(lambda x: x[0], arguments))
        return jax.tree.map(lambda x: x[None], alone)

    return mapped
