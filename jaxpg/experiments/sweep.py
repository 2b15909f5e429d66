"""Sweeps: many settings of one algorithm, several seeds each, in as few compiled programs as possible.

A run is one point of the grid with one seed. All runs of a group (grid.py) are trained side by side as if they were
seeds, in waves that fit the memory. The files of a wave are those of a run; it is resumed by its sweep alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpg import parallel
from jaxpg.errors import UserError
from jaxpg.experiments.build import Experiment, build
from jaxpg.experiments.config import Config, to_dict
from jaxpg.experiments.grid import CompiledGroup
from jaxpg.experiments.warm_start import initial_policies, reward_params
from jaxpg.training import run_directory
from jaxpg.training.advance import seed_keys, strongly_typed
from jaxpg.training.loop import TrainingHooks, train
from jaxpg.training.memory import memory_per_device
from jaxpg.types import Actor, Array, Key, Learner, Metrics, Tree
from jaxpg.user_input.printable import counted


class SweptState(NamedTuple):
    """The state of a learner, and the settings `[]` that it learns with, by name."""

    learner: Tree
    settings: dict[str, Array]


class InitialState(NamedTuple):
    """What the initial state of a swept learner is made of.

    settings: those of its point; some are read by `init` alone, such as the first values of a table.
    key: that of `init`, which cannot know the point.
    policy: parameters of the policy, `()` to keep those of `init`.
    """

    settings: dict[str, Array]
    key: Key
    policy: Tree


def make_swept(build_at: Callable[[Mapping[str, Any]], Experiment], defaults: Mapping[str, float]) -> Experiment:
    """One learner for all values of some settings, which are part of its state.

    Args:
        build_at: values of the settings, which may be traced -> the experiment with these values.
        defaults: the values that `init` puts into the state, until `with_policy` begins with those of a point.
    """

    def init(key: Key) -> SweptState:
        settings = {name: jnp.asarray(x, jnp.float32) for name, x in defaults.items()}
        return SweptState(build_at(defaults).learner.init(key), settings)

    def step(state: SweptState, key: Key) -> tuple[SweptState, Metrics]:
        learner, metrics = build_at(state.settings).learner.step(state.learner, key)
        return state._replace(learner=learner), metrics

    def actor(state: SweptState) -> Actor:
        return build_at(state.settings).learner.actor(state.learner)

    @jax.custom_batching.sequential_vmap  # one after the other, as `init_seeds`: the same weights to the last bit
    def init_at(settings: dict[str, Array], key: Key) -> Tree:
        return build_at(settings).learner.init(key)

    def with_policy(state: SweptState, initial: InitialState) -> SweptState:
        learner = init_at(initial.settings, initial.key)
        if initial.policy != ():
            learner = build_at(initial.settings).learner.with_policy(learner, initial.policy)
        return SweptState(strongly_typed(learner), initial.settings)

    def evaluate(state: SweptState, key: Key) -> Metrics:
        return build_at(state.settings).evaluate(state.learner, key)

    return build_at(defaults)._replace(learner=Learner(init, step, actor, with_policy), evaluate=evaluate, record=None)


def swept_experiment(group: CompiledGroup, shards: int) -> Experiment:
    """The experiment that trains all points of a group: its learner's state holds the traced settings."""
    config, models = group.config, reward_params(group.config)

    def build_at(values: Mapping[str, Any]) -> Experiment:
        return build(dataclasses.replace(config, settings=config.settings | dict(values)), shards, models)

    return make_swept(build_at, {name: config.settings[name] for name in group.traced})


class SweepRun(NamedTuple):
    """A run of a group: the index of its point in the group, and the index of its seed in the config's seeds."""

    point: int
    seed: int


def runs_of_group(group: CompiledGroup) -> list[SweepRun]:
    """All runs of a group."""
    return [SweepRun(point, seed) for point in range(len(group.points)) for seed in range(len(group.config.seeds))]


def waves_after(group_sizes: Sequence[int], i: int, wave: int, size: int) -> float:
    """How many waves of `size` runs follow after a wave of group i, given the number of runs of each group."""
    return math.ceil(group_sizes[i] / size) - wave - 1 + sum(group_sizes[i + 1 :]) / size


def split_waves(runs: Sequence[SweepRun], size: int) -> list[list[SweepRun]]:
    """Runs in waves of one size, so that one program trains all waves; the last run is repeated to fill the last."""
    filled = [*runs, *[runs[-1]] * (-len(runs) % size)]
    return [filled[i : i + size] for i in range(0, len(filled), size)]


def wave_size(learner: Learner, runs: int, mesh: Mesh, limit: float) -> int:
    """How many runs fit the memory at once: the fewest waves of one size, a multiple of the mesh's seed axis.

    Args:
        learner: what is trained.
        runs: the number of runs.
        mesh: the devices that the runs are split over.
        limit: bytes that may be used on each device.

    Raises:
        UserError: not even one run per device fits.
    """
    width = mesh.shape[parallel.SEED]
    size = math.ceil(runs / width) * width
    while (needed := memory_per_device(learner, size, mesh, limit)) > limit:
        if size == width:
            raise UserError(
                f"One run takes {needed / 2**20:,.3g} MiB on a device, and {limit / 2**20:,.3g} may be used: nine "
                "tenths of its memory, or its part of --memory. Make the batch smaller (num_envs, num_steps), raise "
                "--memory if you gave it, or use a device with more memory."
            )
        size = min(max(1, math.floor(size * limit / needed / width)) * width, size - width)
    waves = math.ceil(runs / size)
    return math.ceil(runs / waves / width) * width


def train_wave(
    group: CompiledGroup, experiment: Experiment, wave: Sequence[SweepRun], out: Path, mesh: Mesh, hooks: TrainingHooks
) -> None:
    """Train a wave, or resume it; a run that diverges is NaN from then on, and the others go on.

    Args:
        group: the group that the runs belong to.
        experiment: its `swept_experiment`.
        wave: the runs.
        out: the directory of this wave.
        mesh: the devices that the runs are split over, evenly.
        hooks: called between chunks, see `train`.
    """
    config, seeds = group.config, np.asarray([run.seed for run in wave])
    values = {name: [group.points[run.point][name] for run in wave] for name in group.traced}
    begins = config.initial and not run_directory.has_checkpoint(out)
    policies = initial_policies(config, build(config, models=reward_params(config))) if begins else ()
    train(
        experiment.learner,
        seeds=[config.seeds[i] for i in seeds],
        total_steps=config.total_steps,
        run_dir=out,
        mesh=mesh,
        evaluate=experiment.evaluate,
        evaluate_every=max(1, config.total_steps // config.evaluations),
        config=to_dict(config) | {"sweep": values},
        resume=True,
        initial=InitialState(
            {name: jnp.asarray(x, jnp.float32) for name, x in values.items()},
            jax.vmap(seed_keys)(jnp.asarray([config.seeds[i] for i in seeds])).init,
            jax.tree.map(lambda x: x[seeds], policies),
        ),
        skip_diverged=True,
        hooks=hooks,
    )


def train_sweep(
    groups: Sequence[CompiledGroup],
    out: Path,
    *,
    mesh_for: Callable[[Config, int], Mesh],
    memory_of: Callable[[Mesh], float],
    hooks_for: Callable[[str, int, float], AbstractContextManager[TrainingHooks]],
    sizes: Sequence[int] = (),
    on_size: Callable[[int], None] = lambda size: None,
) -> np.ndarray | None:
    """Train all runs of all groups, or resume their training.

    Args:
        groups: of `plan_grid`.
        out: the directory of the sweep, with one for each wave; waves that are in it are resumed.
        mesh_for: config, the size of its waves or 0 where any will do -> the devices that its runs are split over.
        memory_of: bytes that each device of a mesh may use.
        hooks_for: header, total steps, number of such waves that follow -> a context with the hooks of a wave.
        sizes: of the waves of the groups that were begun before, which a resumed sweep keeps.
        on_size: called with the size of a group's waves before the first of them is trained.

    Returns:
        The last evaluation of every point and seed, `[P, S]`, NaN where a run diverged; None if it was stopped.

    Raises:
        UserError: as `train`, or a run does not fit the memory.
    """
    scores = np.full((sum(len(group.points) for group in groups), len(groups[0].config.seeds)), np.nan)
    for i, group in enumerate(groups):
        size = sizes[i] if i < len(sizes) else 0
        mesh = mesh_for(group.config, size)
        experiment = swept_experiment(group, shards=parallel.batch_shards(mesh))
        runs = runs_of_group(group)
        if not size:
            size = wave_size(experiment.learner, len(runs), mesh, memory_of(mesh))
            on_size(size)
        waves = split_waves(runs, size)
        for j, wave in enumerate(waves):
            header = f"program {i + 1} of {len(groups)}, wave {j + 1} of {len(waves)}: {counted(len(set(wave)), 'run')}"
            directory = out / f"program-{i:03d}" / f"wave-{j:03d}"
            to_follow = waves_after([len(runs_of_group(x)) for x in groups], i, j, size)
            with hooks_for(header, group.config.total_steps, to_follow) as hooks:
                train_wave(group, experiment, wave, directory, mesh, hooks)
                if hooks.should_stop():
                    return None
            last = run_directory.load_metrics(directory)["evaluation_return"][-1]
            for run, score in zip(wave, last, strict=True):
                scores[group.places[run.point], run.seed] = score
    return scores
