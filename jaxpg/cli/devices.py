"""The devices that a command runs on, and how seeds and environments are laid over them."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpg import parallel
from jaxpg.errors import UserError
from jaxpg.parallel import collectives, process_exit


def start_jax(arguments: argparse.Namespace) -> None:
    """Keep compiled programs on disk, and on a CPU make each core a device; must run before jax computes anything.

    XLA's own threads waste a third of two cores on matrices of this size; one device per core and seeds spread over
    them do not. Whoever has used jax before in this process, or set the number of devices, keeps what there is. With
    `--distributed`, wait for the other processes.

    Raises:
        UserError: this process does not know which of how many it is, or can not be it.
    """
    told: Any = jax.config  # whatever the user has set stands
    if told.jax_compilation_cache_dir is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", os.environ.get("JAXPG_CACHE") or str(Path(home) / "jaxpg"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    if told.jax_num_cpu_devices < 0:
        with contextlib.suppress(RuntimeError):  # raised where jax was used before, in this process
            share = -(-_wanted(arguments) // (getattr(arguments, "processes", None) or 1))
            jax.config.update("jax_num_cpu_devices", max(share, _cores()))
    if getattr(arguments, "distributed", False):
        _join_processes(arguments)
    elif any(getattr(arguments, name, None) is not None for name in ("coordinator", "processes", "process")):
        raise UserError("--coordinator, --processes and --process are for --distributed, which was not given.")


def make_run_mesh(arguments: argparse.Namespace, num_seeds: int, num_envs: int) -> Mesh:
    """The mesh that `--devices` and `--mesh` ask for; without them, as many devices as divide the seeds.

    Several processes have equal shares in it, of one device each if no more divide the seeds.

    Raises:
        UserError: there are fewer devices, or they can not share the seeds and environments evenly.
    """
    available = jax.devices()
    shape = parse_mesh(arguments.mesh) if arguments.mesh else {}
    sharded = collectives.SHARD in shape
    if shape:
        number = math.prod(shape.values())
        if arguments.devices not in (None, "all", str(number)):
            raise UserError(f"--mesh {arguments.mesh} has {number} devices, and --devices says {arguments.devices}.")
    elif arguments.devices is None:
        number = math.gcd(num_seeds, len(available))
        number = number if number % jax.process_count() == 0 else jax.process_count()
    else:
        number = len(available) if arguments.devices == "all" else _number(arguments.devices)
    if not 1 <= number <= len(available):
        asked = f"--mesh {arguments.mesh}" if shape else f"--devices {arguments.devices}"
        raise UserError(f"{asked} takes {number} devices, and {_here()} has {len(available)}.")
    over_data = number if sharded else shape.get(collectives.DATA, 1) if shape else None
    return parallel.make_mesh(num_seeds, num_envs, _per_process(number), over_data, sharded)


def parse_mesh(text: str) -> dict[str, int]:
    """`data=4,seed=2`, or `shard=4`, as sizes by axis.

    Raises:
        UserError: it is not of that form.
    """
    shape: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        known = axis in (collectives.DATA, parallel.SEED, collectives.SHARD) and axis not in shape
        alone = collectives.SHARD not in {*shape, axis} or not shape
        if not known or not alone or not size.isdecimal() or int(size) < 1:
            raise UserError(
                f"--mesh takes data=N (devices that share the environments of a seed), seed=N (devices that share the "
                f"seeds), or both, such as data=4,seed=2, or shard=N (devices that share environments and parameters); "
                f"not {text!r}."
            )
        shape[axis] = int(size)
    return shape


def describe(mesh: Mesh) -> str:
    """The devices of a mesh in words."""
    kind = mesh.devices.flat[0].device_kind
    shared = {"seeds": mesh.shape[parallel.SEED], "environments": parallel.batch_shards(mesh)}
    over = " and ".join(f"{number} over {what}" for what, number in shared.items() if number > 1)
    per_core = kind == "cpu" and jax.local_device_count() >= _cores()
    told = ["one XLA device per core"] if per_core else []
    told += [over] if min(shared.values()) > 1 else []
    told += ["which share the parameters"] if parallel.is_sharded(mesh) else []
    told += [f"in {jax.process_count()} processes"] if jax.process_count() > 1 else []
    return f"{mesh.size} x {kind}" + (f" ({', '.join(told)})" if told else "")


def _join_processes(arguments: argparse.Namespace) -> None:
    """Become one of the processes of a run."""
    told = (arguments.coordinator, arguments.processes, arguments.process)
    if None in told and told != (None, None, None):
        raise UserError("--coordinator, --processes and --process go together: give all three, or none on a cluster.")
    if arguments.coordinator and not re.fullmatch(r".+:\d+", arguments.coordinator):
        raise UserError(f"--coordinator takes HOST:PORT of the first process, not {arguments.coordinator!r}.")
    if arguments.processes is not None and not 0 <= arguments.process < arguments.processes:
        raise UserError(f"--process counts from 0 and stays below --processes {arguments.processes}.")
    if arguments.join_seconds < 1:
        raise UserError(f"--join-seconds must be at least 1, not {arguments.join_seconds}.")
    if arguments.out is None:
        raise UserError("--distributed needs --out, a directory that all processes see.")
    of_how_many = f"{arguments.processes} processes" if arguments.processes else "processes"
    process_exit.filter_native_output()
    process_exit.set_lost_message(
        lambda: f"not all {of_how_many} of this run joined within {arguments.join_seconds} seconds (--join-seconds)."
    )
    try:
        jax.distributed.initialize(
            arguments.coordinator,
            arguments.processes,
            arguments.process,
            initialization_timeout=arguments.join_seconds,
            heartbeat_timeout_seconds=process_exit.HEARTBEAT,
        )
    except ValueError as error:
        raise UserError(
            "--distributed found no cluster here (Slurm, Open MPI, TPU pods and Kubernetes are known). Give every "
            "process --coordinator HOST:PORT --processes N --process I, with the address of the first, process 0."
        ) from error
    except RuntimeError as error:
        raise UserError(f"The processes of this run could not be joined: {str(error).splitlines()[0]}") from error
    process_exit.set_lost_message(lambda: "another process of this run has gone, before anything was trained.")


def _per_process(number: int) -> list[jax.Device]:
    """So many devices, equally many of each process."""
    share, rest = divmod(number, jax.process_count())
    owned = [[d for d in jax.devices() if d.process_index == i] for i in range(jax.process_count())]
    if rest or share > min(map(len, owned)):
        raise UserError(
            f"{number} devices can not be shared evenly by {len(owned)} processes, which have "
            f"{', '.join(str(len(devices)) for devices in owned)} devices."
        )
    return [device for devices in owned for device in devices[:share]]


def _here() -> str:
    return "this machine" if jax.process_count() == 1 else f"the run of {jax.process_count()} processes"


def _wanted(arguments: argparse.Namespace) -> int:
    """How many devices the command line names, 1 where it names none; `eval` and the like take no such arguments."""
    asked = getattr(arguments, "devices", None)
    if mesh := getattr(arguments, "mesh", None):
        return math.prod(parse_mesh(mesh).values())
    return _number(asked) if asked and asked != "all" else 1


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--devices takes a number from 1 on, or all, not {text!r}.")
    return int(text)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
