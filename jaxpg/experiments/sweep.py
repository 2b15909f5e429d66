"""Sweeps: many settings of one algorithm, several seeds each, as few compiled programs as possible.

A run is one point of the grid with one seed. All runs of a program (grid.py) are trained side by side as if they were
seeds, in waves that fit the memory; a wave is the directory of an ordinary run, and goes on where it was stopped.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpg import files, parallel
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments.build import Experiment, build
from jaxpg.experiments.config import Config
from jaxpg.experiments.grid import CompiledGroup
from jaxpg.experiments.warm_start import initial_policies, reward_params
from jaxpg.training import run_directory
from jaxpg.training.advance import memory_per_device
from jaxpg.training.loop import TrainingHooks, train
from jaxpg.types import Actor, Array, Key, Learner, Metrics, Tree

PLAN = "plan.json"


class SweptState(NamedTuple):
    """The state of a learner, and the numbers that it learns with."""

    learner: Tree
    settings: dict[str, Array]


class InitialState(NamedTuple):
    """What a swept learner adopts: its numbers, and the parameters of a policy, `()` for its own."""

    settings: dict[str, Array]
    policy: Tree


def make_swept(build_at: Callable[[Mapping[str, Any]], Experiment], defaults: Mapping[str, float]) -> Experiment:
    """One learner for all values of some settings: they are part of its state.

    Args:
        build_at: what learns with given values, which may be traced.
        defaults: the values until others are adopted.
    """

    def init(key: Key) -> SweptState:
        settings = {name: jnp.asarray(x, jnp.float32) for name, x in defaults.items()}
        return SweptState(build_at(defaults).learner.init(key), settings)

    def step(state: SweptState, key: Key) -> tuple[SweptState, Metrics]:
        learner, metrics = build_at(state.settings).learner.step(state.learner, key)
        return state._replace(learner=learner), metrics

    def actor(state: SweptState) -> Actor:
        return build_at(state.settings).learner.actor(state.learner)

    def with_policy(state: SweptState, begin: InitialState) -> SweptState:
        if begin.policy != ():
            state = state._replace(learner=build_at(begin.settings).learner.with_policy(state.learner, begin.policy))
        return state._replace(settings=begin.settings)

    def evaluate(state: SweptState, key: Key) -> Metrics:
        return build_at(state.settings).evaluate(state.learner, key)

    return build_at(defaults)._replace(learner=Learner(init, step, actor, with_policy), evaluate=evaluate)


class SweepRun(NamedTuple):
    """A point of a program, by its number there, and the place of a seed in the list of seeds."""

    point: int
    seed: int


def runs_of_group(program: CompiledGroup) -> list[SweepRun]:
    """All runs of a program."""
    return [SweepRun(point, seed) for point in range(len(program.points)) for seed in range(len(program.config.seeds))]


def split_waves(runs: Sequence[SweepRun], size: int) -> list[list[SweepRun]]:
    """Runs in waves of one size, so that all waves are one program; the last run is repeated to fill the last wave."""
    filled = [*runs, *[runs[-1]] * (-len(runs) % size)]
    return [filled[i : i + size] for i in range(0, len(filled), size)]


def wave_size(learner: Learner, runs: int, mesh: Mesh, limit: float) -> int:
    """How many runs fit the memory at once: the fewest waves, all alike, evenly split over the mesh.

    Args:
        learner: what learns.
        runs: how many runs there are.
        mesh: what they are split over.
        limit: bytes that there are on each device.

    Raises:
        UserError: not even one run per device fits.
    """
    width = mesh.shape[parallel.SEED]
    size = math.ceil(runs / width) * width
    while (needed := memory_per_device(learner, size, mesh)) > limit:
        if size == width:
            raise UserError(
                f"One run takes {needed / 2**20:.3g} MiB on a device, and there are {limit / 2**20:.3g}. Make the "
                "batch smaller (num_envs, num_steps), or use a device with more memory."
            )
        size = min(max(1, math.floor(size * limit / needed / width)) * width, size - width)
    waves = math.ceil(runs / size)
    return math.ceil(runs / waves / width) * width


def memory_limit(mesh: Mesh, gibibytes: float | None) -> float:
    """Bytes that each device may use: what it has, on a CPU its share of the machine's, or of `gibibytes` if given.

    A tenth is left to what else there is.
    """
    if gibibytes is not None:
        return gibibytes * 2**30 / mesh.size
    stats = mesh.local_devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return 0.9 * stats["bytes_limit"]
    return 0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(mesh.local_devices)


def train_wave(
    program: CompiledGroup, setup: Experiment, wave: Sequence[SweepRun], out: Path, mesh: Mesh, hooks: TrainingHooks
) -> None:
    """Train a wave, from where it stands; runs that diverge are left out, NaN from then on.

    Args:
        program: what the runs have in common.
        setup: of `swept_experiment`.
        wave: the runs.
        out: the directory of this wave.
        mesh: what the runs are split over, evenly.
        hooks: called between chunks, see `train`.
    """
    config, seed = program.config, np.asarray([run.seed for run in wave])
    values = {name: [program.points[run.point][name] for run in wave] for name in program.traced}
    policies = initial_policies(config, build(config, reward=reward_params(config))) if config.initial else ()
    train(
        setup.learner,
        seeds=[config.seeds[i] for i in seed],
        total_steps=config.total_steps,
        run_dir=out,
        mesh=mesh,
        evaluate=setup.evaluate,
        evaluate_every=max(1, config.total_steps // config.evaluations),
        config=configs.to_dict(config) | {"sweep": values},
        resume=True,
        initial=InitialState(
            {name: jnp.asarray(x, jnp.float32) for name, x in values.items()},
            jax.tree.map(lambda x: x[seed], policies),
        ),
        skip_diverged=True,
        hooks=hooks,
    )


def train_sweep(
    programs: Sequence[CompiledGroup],
    out: Path,
    plan: Mapping[str, Any],
    *,
    mesh_for: Callable[[Config], Mesh],
    memory_of: Callable[[Mesh], float],
    watched: Callable[[str, int], AbstractContextManager[TrainingHooks]],
    resume: bool,
) -> np.ndarray | None:
    """Train all runs of all programs, or go on with that.

    Args:
        programs: of `grid.plan`.
        out: where; a directory for each wave.
        plan: what tells this sweep from others, as JSON.
        mesh_for: what the runs of a config are split over.
        memory_of: bytes that each device of a mesh may use.
        watched: a description of a wave, its steps -> a context that yields the hooks of its training.
        resume: go on with the sweep in `out`, or start if there is none.

    Returns:
        The last evaluation of every point of the grid and every seed, `[P, S]`, NaN where a run diverged; None if
        it was stopped.

    Raises:
        UserError: `out` holds a sweep that is not to be resumed, or another one; a run does not fit the memory.
    """
    sizes = _open_sweep(out, plan, resume)
    scores = np.full((sum(len(p.points) for p in programs), len(programs[0].config.seeds)), np.nan)
    for i, program in enumerate(programs):
        mesh = mesh_for(program.config)
        setup = swept_experiment(program, shards=parallel.batch_shards(mesh))
        runs = runs_of_group(program)
        if i == len(sizes):  # as planned before it was stopped, whatever memory there is now
            sizes.append(wave_size(setup.learner, len(runs), mesh, memory_of(mesh)))
            files.replace_file(out / PLAN, json.dumps({**plan, "waves": sizes}, indent=1) + "\n")
        waves = split_waves(runs, sizes[i])
        for j, wave in enumerate(waves):
            where = f"program {i + 1} of {len(programs)}, wave {j + 1} of {len(waves)}: {len(wave)} runs"
            directory = out / f"program-{i:03d}" / f"wave-{j:03d}"
            with watched(where, program.config.total_steps) as hooks:
                train_wave(program, setup, wave, directory, mesh, hooks)
                if hooks.should_stop():
                    return None
            last = run_directory.load_metrics(directory)["evaluation_return"][-1]
            for run, score in zip(wave, last, strict=True):
                scores[program.places[run.point], run.seed] = score
    return scores


def swept_experiment(program: CompiledGroup, shards: int) -> Experiment:
    """What trains the points of a program: a learner whose state holds the traced settings."""
    config, reward = program.config, reward_params(program.config)

    def build_at(values: Mapping[str, Any]) -> Experiment:
        return build(dataclasses.replace(config, settings=config.settings | dict(values)), shards, reward)

    return make_swept(build_at, {name: config.settings[name] for name in program.traced})


def _open_sweep(out: Path, plan: Mapping[str, Any], resume: bool) -> list[int]:
    """The sizes of the waves that were planned before, by program."""
    path = out / PLAN
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        return []
    if not resume:
        raise UserError(f"{out} holds a sweep already. Add --resume to go on with it, or choose another --out.")
    begun = json.loads(path.read_text())
    for name, value in json.loads(json.dumps(plan)).items():
        if begun[name] != value:
            raise UserError(f"The sweep in {out} has another {name}: {begun[name]} there, {value} here.")
    return begun["waves"]
