"""Training: any Learner, over several seeds at once, seen from the host chunk by chunk.

A chunk is one compiled loop of iterations per seed, until each seed has consumed so many environment steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpg import files, parallel
from jaxpg.errors import UserError
from jaxpg.parallel import host_callback, processes
from jaxpg.training import checkpoint, metrics_writer, run_directory
from jaxpg.training.advance import (
    RunState,
    abstract_state,
    compile_init,
    compile_programs,
    seed_keys,
)
from jaxpg.training.health import non_finite_metrics, non_finite_parameters, refuse_non_finite, seeds_with_any
from jaxpg.training.metrics_writer import Row
from jaxpg.types import Key, Learner, Metrics, Tree


def train(
    learner: Learner,
    *,
    seeds: Sequence[int],
    total_steps: int,
    run_dir: Path,
    mesh: Mesh | None = None,
    log_every: int | None = None,
    evaluate: Callable[[Any, Key], Metrics] | None = None,
    evaluate_every: int | None = None,
    checkpoint_seconds: float = 60.0,
    config: Mapping[str, Any] | None = None,
    resume: bool = False,
    initial: Tree = None,
    skip_diverged: bool = False,
    on_evaluation: Callable[[RunState], None] = lambda state: None,
    on_row: Callable[[Row], None] = lambda row: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunState:
    """Train every seed for `total_steps` environment steps, and leave a record and checkpoints in `run_dir`.

    Several processes (`jax.distributed`) call this alike, with a mesh that has devices of each; the first of them alone
    writes, and all read from `run_dir`.

    Args:
        learner: what learns.
        seeds: the numbers of the seeds.
        total_steps: environment steps per seed; the iteration that reaches them is finished.
        run_dir: see record.py.
        mesh: of `parallel.make_mesh`; the first device alone by default.
        log_every: steps per chunk, which gives one row of metrics; a two-hundredth of the total by default.
        evaluate: the learner's state, key -> scalars by name, `return` among them; jitted and mapped over seeds here,
            and recorded as `evaluation_...`.
        evaluate_every: steps between evaluations; a tenth of the total by default. There is always one at the end.
        checkpoint_seconds: checkpoints are written at evaluations, at the end, and whenever this time has passed.
        config: what this run is, written to config.toml and compared when the run goes on.
        resume: go on from the last checkpoint in `run_dir`, or start if there is none.
        initial: what each seed's learner adopts before it begins, `[S, ...]`: the parameters of a policy.
        skip_diverged: a seed that goes astray is left behind, NaN from then on, and the others go on.
        on_evaluation: called with the state of all seeds before the first iteration, and after every evaluation.
        on_row: called with every row of metrics.
        should_stop: asked after every chunk; if true, a checkpoint is written and the state returned as it is.

    Returns:
        The state of all seeds, `[S, ...]`; `min(state.steps) < total_steps` if it was stopped, or left one behind.

    Raises:
        UserError: the directory cannot be used, a step on the host failed, or, without `skip_diverged`, something
            became infinite or not a number.
    """
    if not 0 < total_steps < 2**31:
        raise UserError(f"total_steps must lie between 1 and 2^31 - 1, the most that is counted, not {total_steps}.")
    log_every = log_every or max(1, total_steps // 200)
    evaluate_every = evaluate_every or max(1, total_steps // 10)
    config = {**(config or {}), "total_steps": total_steps, "seeds": list(seeds)}
    mesh = mesh or parallel.make_mesh(len(seeds), 1, jax.devices()[:1])
    keys = jax.vmap(seed_keys)(jnp.asarray(seeds))
    state, origin = _init_or_restore(learner, keys.init, mesh, run_dir, config, resume, initial)
    steps, healthy = np.array(state.steps), np.ones(len(seeds), bool)  # a copy, since the state is given away
    if skip_diverged:
        healthy[seeds_with_any(non_finite_parameters(state.learner))] = False
    chunk, evaluation = compile_programs(learner, evaluate, state, mesh)
    state = parallel.place(state, parallel.state_specs(state, mesh), mesh)
    keys = parallel.place(keys, jax.tree.map(lambda _: parallel.PER_SEED, keys), mesh)
    clock, saved = time.monotonic() - origin["seconds"], time.monotonic()
    host_callback.clear_failures()

    def check(bad: Mapping[str, np.ndarray], row: Row) -> None:
        if not skip_diverged:
            refuse_non_finite(bad, row, seeds, run_dir)
        healthy[seeds_with_any(bad)] = False

    def behind(steps: np.ndarray) -> int:
        return int(steps[healthy].min(initial=total_steps))

    if behind(steps) < total_steps:
        processes.on_main_process(partial(run_directory.add_machine, run_dir, list(mesh.devices.flat)))
    with _writer(run_dir, keep=origin["bytes"], steps=int(steps.min())) as recorder:
        if not steps.any():
            on_evaluation(parallel.to_host(state))
        while (done := behind(steps)) < total_steps:
            target = _next_target(steps[healthy], log_every, total_steps)
            began = time.monotonic()
            state, metrics = chunk(keys.run, state, np.int32(target))
            row = jax.device_get(parallel.to_host(metrics)) | {"chunk_seconds": time.monotonic() - began}
            host_callback.raise_failure()
            check(non_finite_metrics(row), row)
            steps = row["steps"]
            reached = behind(steps)
            finished = reached >= total_steps
            stop, due = processes.any_process([should_stop(), time.monotonic() - saved > checkpoint_seconds])
            evaluated = evaluate and (finished or reached // evaluate_every > done // evaluate_every)
            if evaluated:
                measured = jax.device_get(parallel.to_host(evaluation(keys.evaluation, state)))
                row |= {name: np.where(healthy, x, np.nan) for name, x in measured.items()}
                host_callback.raise_failure()
            row["seconds"] = time.monotonic() - clock
            recorder.write(row)
            on_row(row)
            if evaluated:
                on_evaluation(parallel.to_host(state))
            if evaluated or finished or stop or due:
                saving = jax.device_get(parallel.to_host(state))
                check(non_finite_parameters(saving.learner), row)
                score = float(row["evaluation_return"][healthy].mean()) if evaluated and healthy.any() else None
                origin = {"bytes": recorder.size, "seconds": row["seconds"], "config": config}
                processes.on_main_process(
                    partial(
                        checkpoint.save,
                        run_dir / checkpoint.CHECKPOINTS,
                        saving,
                        steps=reached,
                        score=score,
                        about=origin,
                    )
                )
                saved = time.monotonic()
            if stop:
                break
    return parallel.to_host(state)


def _next_target(steps: np.ndarray, log_every: int, total_steps: int) -> int:
    """The next multiple of `log_every`, or so far that every seed that is not done moves: none waits for another."""
    furthest = steps[steps < total_steps].max()
    return min(max((steps.min() // log_every + 1) * log_every, furthest + 1), total_steps)


def restore(learner: Learner, run_dir: Path, seeds: Sequence[int], which: str = "best") -> RunState:
    """The state of a run at its `best` or `last` checkpoint.

    Raises:
        UserError: there is none, it is of another run, or it cannot be used.
    """
    found = checkpoint.find(run_dir / checkpoint.CHECKPOINTS, which)
    if found is None:
        raise UserError(f"{run_dir} has no checkpoint: the run did not get as far as its first one.")
    run_directory.refuse_other_config(
        f"The checkpoint {found.path}", found.about["config"], run_directory.load_config(run_dir)
    )
    return checkpoint.restore(found, abstract_state(learner, len(seeds)))


def _init_or_restore(
    learner: Learner, keys: Key, mesh: Mesh, run_dir: Path, config: Mapping[str, Any], resume: bool, initial: Tree
) -> tuple[RunState, dict[str, Any]]:
    """The state to go on from, and how much of the record stands at that point."""
    if not processes.same_on_all(files.toml_dumps(config)):
        raise UserError("The processes of this run were told different things. Give all of them the same arguments.")
    processes.on_main_process(partial(run_directory.open_directory, run_dir, config, resume=resume))
    found = checkpoint.find(run_dir / checkpoint.CHECKPOINTS)
    if not processes.same_on_all(str(found and found.steps)):
        raise UserError(f"The processes see different checkpoints in {run_dir}: it has to be one directory for all.")
    if found is None:
        # Parameters that no single device can hold come into being where they lie.
        specs = parallel.state_specs(abstract_state(learner, len(keys)), mesh)
        state = compile_init(learner, parallel.shardings(specs, mesh) if parallel.is_sharded(mesh) else None)(keys)
        if initial is not None:
            state = state._replace(learner=jax.jit(jax.vmap(learner.with_policy))(state.learner, initial))
        return state, {"bytes": 0, "seconds": 0.0}
    run_directory.refuse_other_config(f"The checkpoint {found.path}", found.about["config"], config)
    return checkpoint.restore(found, abstract_state(learner, len(keys))), found.about


def _writer(run_dir: Path, *, keep: int, steps: int) -> metrics_writer.MetricsWriter | metrics_writer.NullWriter:
    return (
        metrics_writer.MetricsWriter(run_dir, keep=keep, steps=steps)
        if processes.is_main_process()
        else metrics_writer.NullWriter()
    )


class TrainingHooks(NamedTuple):
    """Who looks on while something is trained, see `train.train`: what sees every row, and what may end it."""

    on_row: Callable[[Row], None]
    should_stop: Callable[[], bool]
