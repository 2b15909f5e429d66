"""Several processes that are one run: which of them speaks, what they agree on, and how one's end is the end of all.

Every process runs the same program on its share of the devices. The first alone prints and writes; all read the same
directories, which therefore lie on a file system that all of them see. With one process everything here is trivial.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpg.errors import UserError
from jaxpg.parallel import processes
from jaxpg.parallel.mesh import (
    to_host,
)


def process_allgather(x: np.ndarray) -> np.ndarray:
    """The `x` of every process, `[processes, ...]`, in each of them. All wait for each other here."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.asarray([first[i] for i in sorted(first)]), "process")
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    return np.asarray(to_host(jax.make_array_from_process_local_data(sharding, x[None])))


def is_main_process() -> bool:
    """Whether this is the process that prints and writes; true where there is only one."""
    return jax.process_index() == 0


def any_process(flags: Sequence[bool]) -> list[bool]:
    """Of each flag, whether it is set in any process. All processes wait for each other here."""
    if jax.process_count() == 1:
        return list(flags)
    return list(np.any(processes.process_allgather(np.asarray(flags)), axis=0).tolist())


def same_on_all(text: str) -> bool:
    """Whether all processes say the same. All wait for each other here."""
    if jax.process_count() == 1:
        return True
    checksum = np.asarray(zlib.crc32(text.encode()), np.uint32)
    return len(np.unique(processes.process_allgather(checksum))) == 1


def on_main_process(action: Callable[[], object]) -> None:
    """Do something in the first process alone, while the others wait.

    Raises:
        UserError: in all processes, if it was raised by `action`.
    """
    failure = None
    if is_main_process():
        try:
            action()
        except UserError as error:
            failure = error
    (failed,) = any_process([failure is not None])
    if failed:
        raise failure or UserError("The first process of this run could not go on, and says why.")
