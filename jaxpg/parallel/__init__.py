"""Devices and processes: collectives inside a program, its mesh, several processes, and callbacks to the host."""

from jaxpg.parallel import collectives, host_callback, processes
from jaxpg.parallel.collectives import DATA, SHARD
from jaxpg.parallel.compilation_cache import keep_compiled_programs
from jaxpg.parallel.cores import num_cores, one_device_per_core
from jaxpg.parallel.mesh import (
    PER_SEED,
    REPLICATED,
    SEED,
    abstract_arrays,
    batch_shards,
    describe_mesh,
    is_per_environment,
    is_sharded,
    make_mesh,
    map_seeds,
    place,
    platform_of,
    shardings,
    spread,
    state_specs,
    to_host,
)

__all__ = [
    "DATA",
    "PER_SEED",
    "REPLICATED",
    "SEED",
    "SHARD",
    "abstract_arrays",
    "batch_shards",
    "collectives",
    "describe_mesh",
    "host_callback",
    "is_per_environment",
    "is_sharded",
    "keep_compiled_programs",
    "make_mesh",
    "map_seeds",
    "num_cores",
    "one_device_per_core",
    "place",
    "platform_of",
    "processes",
    "shardings",
    "spread",
    "state_specs",
    "to_host",
]
