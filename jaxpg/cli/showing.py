"""`jaxpg show`: what a command would train, before it does: settings, shapes, parameters and memory."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.table import Table

from jaxpg import parallel
from jaxpg.cli import signals
from jaxpg.cli.options import overrides_of
from jaxpg.envs.host import close_what_begins
from jaxpg.experiments.build import Experiment
from jaxpg.experiments.config import Config, resolve_config, to_dict, trainable
from jaxpg.experiments.config_file import file_name
from jaxpg.experiments.sources import setting_sources
from jaxpg.experiments.stages import build_planned, check_plan, plan_stages
from jaxpg.experiments.warm_start import initial_policies
from jaxpg.files import setting_text
from jaxpg.parallel import host_callback
from jaxpg.report.comparison import format_duration
from jaxpg.runs.terminal import make_console
from jaxpg.runs.training import devices_of
from jaxpg.training.memory import bytes_of, least_memory, memory_limit, refuse_too_large
from jaxpg.types import Discrete, Space, space_leaves
from jaxpg.user_input.printable import counted, printable


def run_show(arguments: argparse.Namespace) -> int:
    """Print the settings of an algorithm on a task with their sources, and the sizes of what they describe."""
    overrides = overrides_of(arguments)
    (algorithm,) = arguments.algorithms
    config = resolve_config(arguments.task, algorithm, overrides)
    experiment = _planned(config, arguments.task, algorithm, overrides)
    state = jax.eval_shape(experiment.learner.init, jax.random.key(0))
    memory = _memory(config, experiment, state)
    console = make_console(full_width=True)
    table = Table(box=box.SIMPLE_HEAD, title=f"{algorithm} on {config.task}")
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for name, (value, source) in setting_sources(arguments.task, algorithm, config, overrides).items():
        table.add_row(printable(name), printable(setting_text(value)), printable(source))
    console.print(table)
    console.print(_array_table(state))
    for line in (*_sizes(experiment, state), memory):
        console.print(line, soft_wrap=True)
    if arguments.time:
        with close_what_begins(), signals.ends_at_once():
            line = _time(config, experiment)
        console.print(line, soft_wrap=True)
    return 0


def _planned(config: Config, task: str, name: str, overrides: Mapping[str, Any]) -> Experiment:
    """The experiment of a config, which `jaxpg train` would not refuse; nothing is written.

    Raises:
        UserError: that of `jaxpg train` for the same stages, and for the runs that they begin with.
    """
    out = Path("runs") / f"{config.task}-{file_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}"  # as that of a new run
    plan = plan_stages(config, out, out, task=task, overrides=overrides, name=name)
    if len(plan) > 1:
        check_plan(plan)
    experiment = build_planned(config, names := trainable(task), traceable=True)
    if config.initial not in names:
        initial_policies(config, experiment)
    return experiment


def _time(config: Config, experiment: Experiment) -> str:
    """How long the iterations of a run take, from one that is trained now, without evaluations and checkpoints.

    One seed on one device is measured; the seeds of a device are taken to take their time one after the other.
    """
    step, keys = jax.jit(experiment.learner.step), jax.random.split(jax.random.key(0), 3)
    host_callback.clear_failures()
    began = time.monotonic()
    state, before = jax.block_until_ready(step(jax.jit(experiment.learner.init)(keys[0]), keys[1]))
    host_callback.raise_failure()
    compiled = time.monotonic()
    _, after = jax.block_until_ready(step(state, keys[2]))
    host_callback.raise_failure()
    seconds = time.monotonic() - compiled
    steps, seeds = int(after["steps"]) - int(before["steps"]), len(config.seeds)
    iterations, devices = math.ceil(config.total_steps / max(steps, 1)), len(devices_of(config))
    whole = iterations * seconds * math.ceil(seeds / devices)
    of_seeds = f"{counted(seeds, 'seed')} on {counted(devices, 'device')}"
    return (
        f"time: about {format_duration(whole)} for {iterations:,} iterations of {of_seeds}, at {1000 * seconds:.3g} ms "
        f"each; compiling took {compiled - began:.3g} s"
    )


def _array_table(state: Any) -> Table:
    """The arrays of a learner that are learned, each with its shape, and how many numbers they are."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("parameters", "shape", "numbers"):
        table.add_column(column, overflow="fold")
    total = 0
    for path, array in _learned(state):
        numbers = math.prod(array.shape)
        table.add_row(printable(path), " x ".join(map(str, array.shape)) or "1", f"{numbers:,}")
        total += numbers
    table.add_section()
    table.add_row("in all", "", f"{total:,}")
    return table


def _learned(state: Any) -> Iterator[tuple[str, Any]]:
    """The arrays that a learner learns, with their names."""
    for path, array in jax.tree_util.tree_leaves_with_path({"params": state.params}):
        yield jax.tree_util.keystr(path, simple=True, separator="."), array


def _sizes(experiment: Experiment, state: Any) -> Iterator[str]:
    """What is observed and done, and the batch of an iteration."""
    env, learner = experiment.env, experiment.learner
    observed = ", ".join(path + (path and ": ") + _space(space) for path, space in space_leaves(env.observation_space))
    yield f"observations: {observed}; actions: {_space(env.action_space)}"
    yield f"episodes: at most {env.time_limit:,} steps"
    if learner.experience is not None:
        rollout, _ = jax.eval_shape(learner.experience.collect, state, jax.random.key(0))
        steps, columns = rollout.steps.reward.shape
        yield f"batch: {steps:,} steps x {columns:,} environments = {steps * columns:,}, in each iteration of a seed"


def _memory(config: Config, experiment: Experiment, state: Any) -> str:
    """The memory of a run.

    Raises:
        UserError: there is less.
    """
    seeds = len(config.seeds)
    mesh = parallel.make_mesh(seeds, config.batch_size, devices_of(config))
    needed, limit = least_memory(experiment.learner, seeds, mesh), memory_limit(mesh)
    refuse_too_large(limit, needed, config=to_dict(config), num_seeds=seeds)
    return (
        f"memory: {_amount(bytes_of(state))} for the state of a seed; training takes at least {_amount(needed)} for "
        f"{counted(seeds, 'seed')}, on each of {counted(mesh.size, 'device')} with "
        f"{_amount(limit)}"
    )


def _space(space: Space) -> str:
    if isinstance(space, Discrete):
        return f"one of {space.n}"
    return " x ".join(map(str, space.shape)) + " real numbers" if space.shape else "a real number"


def _amount(number: float) -> str:
    """Bytes in a unit that suits them."""
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} GiB"
