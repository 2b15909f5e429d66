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
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpg.errors import UserError
from jaxpg.types import Key, Tree

DATA = "data"  # environments are split over it, gradients are summed over it
SEED = "seed"  # independent runs are split over it, nothing is communicated
SHARD = "shard"  # environments and parameters are split over it

_cut_up: ContextVar[Mesh | None] = ContextVar("_cut_up", default=None)
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


def own_key(key: Key) -> Key:
    """A key of this device's own, where several share a batch."""
    return jax.random.fold_in(key, lax.axis_index(DATA)) if num_shards() > 1 else key


def shard_index() -> jax.Array | int:
    """Which share of the batch this device holds."""
    return lax.axis_index(DATA) if num_shards() > 1 else 0


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
EVERYWHERE = PartitionSpec()


def lying(specs: Tree, mesh: Mesh) -> Tree:
    """`specs` as shardings."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def place(tree: Tree, specs: Tree, mesh: Mesh) -> Tree:
    """Move arrays to where `specs` says. Of several processes each has all of them, and keeps its own devices' part."""
    shardings = lying(specs, mesh)
    return jax.device_put(tree, shardings) if jax.process_count() == 1 else jax.tree.map(_own_part, tree, shardings)


def _own_part(x: Any, sharding: NamedSharding) -> jax.Array:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_own_part(jax.random.key_data(x), sharding))
    array = np.asarray(x)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def whole(tree: Tree) -> Tree:
    """Arrays on a mesh as this process can read them: what lies on several hosts is copied to a device of each."""
    if jax.process_count() == 1:
        return tree
    copied = _everywhere(jax.tree.leaves(tree)[0].sharding.mesh)(tree)
    return jax.tree.map(lambda x: x.addressable_data(0), copied)


def of_each_process(x: np.ndarray) -> np.ndarray:
    """The `x` of every process, `[processes, ...]`, in each of them. All wait for each other here."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.asarray([first[i] for i in sorted(first)]), "process")
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    return np.asarray(whole(jax.make_array_from_process_local_data(sharding, x[None])))


@functools.cache
def _everywhere(mesh: Mesh) -> Callable[[Tree], Tree]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, EVERYWHERE))


def placed(shapes: Tree, specs: Tree, mesh: Mesh) -> Tree:
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
        return _cut(function, mesh, in_specs, out_specs)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _cut(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` for XLA to cut up, from how its arguments lie and how its results shall."""

    def constrained(specs: Any, tree: Tree) -> Tree:
        def below(spec: PartitionSpec, part: Tree) -> Tree:
            return jax.tree.map(lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, spec)), part)

        return jax.tree.map(below, specs, tree)

    def cut_up(*arguments: Any) -> Any:
        token = _cut_up.set(mesh)
        try:
            return constrained(out_specs, function(*constrained(in_specs, arguments)))
        finally:
            _cut_up.reset(token)

    return cut_up


def columns(x: jax.Array, axis: int = 0) -> jax.Array:
    """`x`, its columns along that axis split over the devices that share parameters; as it is, where none do."""
    mesh = _cut_up.get()
    if mesh is None or x.shape[axis] % mesh.shape[SHARD]:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*[None] * axis, SHARD)))


def each_seed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of one run, applied to runs stacked on the first axis of its arguments and results.

    On an accelerator side by side, by `vmap`. On a CPU one after the other: a core gains nothing from runs side by
    side, and loses what its matrix and convolution kernels know only how to do for one set of weights.
    """
    if jax.default_backend() != "cpu":
        return jax.vmap(function)
    return lambda *arguments: lax.map(lambda stacked: function(*stacked), arguments)
