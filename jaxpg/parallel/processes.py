"""Several processes that train one run: which of them writes, and what they have to agree on.

Every process runs the same program on its share of the devices. Process 0 alone prints and writes; all read the same
directories, which must be on a file system that all of them see. With one process every function here is trivial. How
the processes end together is in process_exit.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpg.errors import UserError
from jaxpg.parallel.mesh import to_host


def process_allgather(x: np.ndarray) -> np.ndarray:
    """The `x` of every process, `[processes, ...]`, in each of them. All processes wait for each other here.

    Replaces `jax.experimental.multihost_utils.process_allgather`, which requires equal numbers of devices in all
    processes: a mesh uses equal numbers, but the processes may have more. This uses one device of each.
    """
    first_device = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.asarray([first_device[i] for i in sorted(first_device)]), "process")
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    return np.asarray(to_host(jax.make_array_from_process_local_data(sharding, x[None])))


def is_main_process() -> bool:
    """Whether this is process 0, which prints and writes; true where there is only one."""
    return jax.process_index() == 0


def any_process(flags: Sequence[bool]) -> list[bool]:
    """For each flag, whether it is set in any process. All processes wait for each other here."""
    if jax.process_count() == 1:
        return list(flags)
    return list(np.any(process_allgather(np.asarray(flags)), axis=0).tolist())


def gather_texts(text: str) -> list[str]:
    """The `text` of every process, in each of them. All processes wait for each other here."""
    if jax.process_count() == 1:
        return [text]
    encoded = np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
    lengths = process_allgather(np.asarray(len(encoded), np.int32))
    rows = process_allgather(np.pad(encoded, (0, int(lengths.max()) - len(encoded))))
    texts = [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
    return [text.decode("utf-8", "surrogateescape") for text in texts]


def same_on_all(text: str) -> bool:
    """Whether `text` is the same in all processes. All processes wait for each other here."""
    return len(set(gather_texts(text))) == 1


def refuse_different_arguments(arguments: str) -> None:
    """Raise a UserError unless the arguments of the run are the same in all processes, which wait for each other."""
    if not same_on_all(arguments):
        raise UserError(
            "The processes of this run got different arguments. Start every process with the same arguments."
        )


def on_main_process(action: Callable[[], object]) -> None:
    """Call `action` in process 0 alone, while the others wait.

    Raises:
        UserError: in the other processes, if `action` raised one or an OSError, which process 0 raises.
    """
    failure: UserError | OSError | None = None
    if is_main_process():
        try:
            action()
        except (UserError, OSError) as error:
            failure = error
    (failed,) = any_process([failure is not None])
    if failed:
        raise failure or UserError("The first process of this run failed; its own message says why.")
