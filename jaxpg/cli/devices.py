"""The devices of a command: its options, jax's start, and the mesh over which seeds and environments are laid."""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import json
import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpg import parallel
from jaxpg.cli import record
from jaxpg.errors import UserError, excerpt
from jaxpg.parallel import collectives, process_exit, processes

AXES = {"data": collectives.DATA, "seed": parallel.SEED, "shard": collectives.SHARD}
"""The axes of a mesh, by their names on the command line."""

OWN_ARGUMENTS = ("coordinator", "process", "join_seconds", "quiet")
"""Arguments in which the processes of a run may differ."""

OF_PROCESSES = ("coordinator", "processes", "process", "join_seconds")
"""Options of one process of several."""

JOIN_SECONDS = 300
"""How long the processes of a run wait for each other, unless the command line says."""

WORTH_SHARING = 8
"""Environments of each device, from which on several share a seed with a gain: two cores take 0.76 of the time of one
with 8 each, 1.25 with 2 (PPO on CartPole; benchmarks/LOG.md, "one agent on two cores")."""

MOST_DEVICES = 1000
"""In one process: more than any machine has. jax makes as many CPU devices as it is told to, a second for each 500."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """What the command line says about devices and processes; None where it says nothing.

    devices: how many, as text, or `all`.
    mesh: how they share the work, such as `data=4,seed=2`.
    distributed: whether this is one process of several; the next four fields are for those.
    coordinator: HOST:PORT of the first process.
    processes: how many there are.
    process: which one this is, from 0.
    join_seconds: how long to wait for all of them; JOIN_SECONDS by default.
    out: where the run writes.
    """

    devices: str | None = None
    mesh: str | None = None
    distributed: bool = False
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    join_seconds: int | None = None
    out: Path | None = None


def from_arguments(arguments: argparse.Namespace) -> DeviceOptions:
    """The device options of a command; the defaults for one that has none, such as `eval` and `list`.

    A command that goes on uses the devices that it began with, unless it is given others: they decide which steps share
    a minibatch.

    Raises:
        UserError: as `record.read`, or a sweep of several processes, before these wait for each other.
    """
    given = vars(arguments)
    names = [field.name for field in dataclasses.fields(DeviceOptions)]
    options = DeviceOptions(**{name: given[name] for name in names if name in given})
    begun = record.read(options.out) if given.get("resume") and options.out is not None else None
    if options.distributed and "sweep" in (arguments.command, begun and begun.command):
        raise UserError("A sweep is one process. On several hosts give each a part of the grid, and no --distributed.")
    if begun is None or (options.devices, options.mesh) != (None, None):
        return options
    return dataclasses.replace(options, devices=begun.devices, mesh=begun.mesh)


def start_jax(options: DeviceOptions) -> None:
    """Configure jax before it computes anything: the cache of compiled programs, CPU devices, other processes.

    On a CPU every core becomes an XLA device (`parallel.one_device_per_core`). Settings of the user are kept. With
    `--distributed`, wait for the others.

    Raises:
        UserError: more devices than a process can have, incomplete options of several processes, processes that cannot
            be joined, or a platform that jax cannot use.
    """
    parallel.keep_compiled_programs()
    per_process = -(-_requested_devices(options) // (options.processes or 1))
    if per_process > MOST_DEVICES:
        raise UserError(f"A process takes at most {MOST_DEVICES} devices, not {per_process}: see --devices and --mesh.")
    parallel.one_device_per_core(at_least=per_process)
    if options.distributed:
        _check_process_options(options)
        _join_processes(options)
    elif given := [f"--{name.replace('_', '-')}" for name in OF_PROCESSES if getattr(options, name) is not None]:
        raise UserError(f"{given[0]} is for one of several processes, --distributed, which was not given.")
    _check_platform()


def _check_platform() -> None:
    """Raise a UserError if jax cannot use the platform that it was told to use, or one that it has found."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter from plugins that find no device of theirs
        platforms: Any = jax.config.jax_platforms  # type: ignore[attr-defined]
        told = f" with JAX_PLATFORMS={platforms}" if platforms else ""
        reason = str(error).partition("\n")[0].partition(" (set JAX_PLATFORMS")[0] or "there is none"
        raise UserError(
            f"jax has no device{told}: {reason.removesuffix('.')}. Set JAX_PLATFORMS=cpu to train on the CPU, or unset "
            "it, and jax chooses among those that are there."
        ) from error


def check_same_command(arguments: argparse.Namespace) -> None:
    """Compare the arguments of all processes of a run, as soon as they have joined.

    Raises:
        UserError: in every process, if one of them got another argument; it names the first that differs.
    """
    mine = {name: _shown(value) for name, value in vars(arguments).items() if name not in OWN_ARGUMENTS}
    refuse_different([json.loads(text) for text in processes.gather_texts(json.dumps(mine))])


def refuse_different(arguments: Sequence[Mapping[str, str]]) -> None:
    """Raise a UserError that names the first argument in which a process differs from process 0; one dict of each."""
    for process, given in enumerate(arguments):
        for name, first in arguments[0].items():
            if given.get(name) != first:
                raise UserError(
                    f"The processes of this run got different arguments: {name} is {first} in process 0 and "
                    f"{given.get(name)} in process {process}. Start every process with the same arguments."
                )


def _shown(value: Any) -> str:
    """An argument as text that is the same where it means the same: a path with its directory."""
    return os.path.abspath(value) if isinstance(value, Path) else str(value)


def make_run_mesh(options: DeviceOptions, num_seeds: int, num_envs: int) -> Mesh:
    """The mesh of `--devices` and `--mesh`; without them, as many devices as divide the seeds.

    Every process contributes equally many devices: one if no more divide the seeds.

    Raises:
        UserError: there are fewer devices, or they cannot share the seeds and environments evenly.
    """
    available = jax.devices()
    shape = parse_mesh(options.mesh) if options.mesh is not None else {}
    if shape:
        number = math.prod(shape.values())
        if options.devices not in (None, "all", str(number)):
            raise UserError(f"--mesh {options.mesh} has {number} devices, and --devices says {options.devices}.")
    elif options.devices is None:
        number = math.gcd(num_seeds, len(available))
        number = number if number % jax.process_count() == 0 else jax.process_count()
    else:
        number = len(available) if options.devices == "all" else _parse_number(options.devices)
    if not 1 <= number <= len(available):
        option = f"--mesh {options.mesh}" if shape else f"--devices {options.devices}"
        place = "this machine" if jax.process_count() == 1 else f"the run of {jax.process_count()} processes"
        raise UserError(f"{option} takes {number} devices, and {place} has {len(available)}.")
    sharded = collectives.SHARD in shape
    devices_per_seed = number if sharded else shape.get(collectives.DATA, 1) if shape else None
    return parallel.make_mesh(num_seeds, num_envs, _devices_of_all_processes(number), devices_per_seed, sharded)


def describe_unused(options: DeviceOptions, mesh: Mesh, num_envs: int) -> str:
    """A sentence on the devices that the default leaves unused and `--devices all` would use; "" without any."""
    number, per_seed = len(jax.devices()), len(jax.devices()) // mesh.shape[parallel.SEED]
    chosen = (options.devices, options.mesh) != (None, None)
    if chosen or mesh.size == number or num_envs % per_seed or num_envs < WORTH_SHARING * per_seed:
        return ""
    return (
        f"{mesh.size} of {number} devices; with --devices all, {per_seed} share the environments of a seed, which is "
        "faster and shuffles them otherwise"
    )


def parse_mesh(text: str) -> dict[str, int]:
    """`data=4,seed=2`, or `shard=4`, as sizes by axis of the mesh.

    Raises:
        UserError: it is not of that form.
    """
    shape: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        axis = AXES.get(name)
        compatible = not shape or collectives.SHARD not in {*shape, axis}  # shard=N stands alone
        if axis is None or axis in shape or not compatible or not _is_count(size):
            raise UserError(
                f"--mesh takes data=N (devices that share the environments of a seed), seed=N (devices that share the "
                f"seeds), or both, such as data=4,seed=2, or shard=N (devices that share environments and parameters); "
                f"not {excerpt(text)}."
            )
        shape[axis] = int(size)
    return shape


def _check_process_options(options: DeviceOptions) -> None:
    """Raise a UserError if the options for several processes are incomplete or contradict each other."""
    of_process = (options.coordinator, options.processes, options.process)
    if None in of_process and of_process != (None, None, None):
        raise UserError("--coordinator, --processes and --process go together: give all three, or none on a cluster.")
    if options.coordinator and not re.fullmatch(r".+:\d+", options.coordinator):
        raise UserError(f"--coordinator takes HOST:PORT of the first process, not {options.coordinator!r}.")
    if options.processes is not None and options.process is not None and not 0 <= options.process < options.processes:
        raise UserError(
            f"--process counts from 0 and stays below --processes {options.processes}, but is {options.process}."
        )
    if options.join_seconds == 0:
        raise UserError("--join-seconds must be at least 1, not 0.")
    if options.out is None:
        raise UserError("--distributed needs --out, a directory that all processes see.")


def _join_processes(options: DeviceOptions) -> None:
    """Wait for the other processes of the run, and become one of them."""
    all_processes = f"{options.processes} processes" if options.processes else "processes"
    process_exit.filter_native_output()
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM, and do nothing with it
    seconds = options.join_seconds or JOIN_SECONDS
    process_exit.set_lost_message(
        lambda: f"not all {all_processes} of this run joined within {seconds} seconds (--join-seconds)."
    )
    try:
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.process,
            initialization_timeout=seconds,
            coordinator_bind_address=bind_address(options.coordinator),
            heartbeat_timeout_seconds=process_exit.HEARTBEAT_SECONDS,
        )
    except ValueError as error:
        raise UserError(
            "--distributed found no cluster here (Slurm, Open MPI, TPU pods and Kubernetes are known). Give every "
            "process --coordinator HOST:PORT --processes N --process I, with the address of the first, process 0."
        ) from error
    except RuntimeError as error:
        raise UserError(f"The processes of this run could not be joined: {str(error).splitlines()[0]}") from error
    process_exit.set_lost_message(lambda: "another process of this run exited before anything was trained.")


def bind_address(coordinator: str | None) -> str | None:
    """Where process 0 listens for the others: at the named IP address or localhost alone, if it is this machine's.

    None leaves it to jax, which listens at all addresses unless JAX_COORDINATOR_BIND_ADDRESS says otherwise: for the
    name of a host, which may stand for a loopback address on the host itself and for another one elsewhere, and for
    an address that is translated on its way here.
    """
    host, _, port = (coordinator or "").rpartition(":")
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
        return None
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family) as probe:
            probe.bind((str(address), 0))
    except (ValueError, OSError):  # no address, or not of this machine
        return None
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


def _devices_of_all_processes(number: int) -> list[jax.Device]:
    """That many devices, equally many of each process.

    Raises:
        UserError: they do not divide evenly, or a process has too few.
    """
    per_process, rest = divmod(number, jax.process_count())
    owned = [[d for d in jax.devices() if d.process_index == i] for i in range(jax.process_count())]
    if rest or per_process > min(map(len, owned)):
        raise UserError(
            f"{number} devices cannot be shared evenly by {len(owned)} processes, which have "
            f"{', '.join(str(len(devices)) for devices in owned)} devices."
        )
    return [device for devices in owned for device in devices[:per_process]]


def _requested_devices(options: DeviceOptions) -> int:
    """How many devices the options name; 1 where they name none or all."""
    if options.mesh is not None:
        return math.prod(parse_mesh(options.mesh).values())
    return _parse_number(options.devices) if options.devices not in (None, "all") else 1


def _parse_number(text: str) -> int:
    if not _is_count(text):
        raise UserError(f"--devices takes a number from 1 on, or all, not {excerpt(text)}.")
    return int(text)


def _is_count(text: str) -> bool:
    """Whether a text is a number of devices."""
    return re.fullmatch("[1-9][0-9]{0,8}", text) is not None
