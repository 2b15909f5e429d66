"""The training loop: any Learner, several seeds at once, in chunks, with evaluations, rows of metrics and checkpoints.

A chunk is one compiled loop of iterations per seed, until each seed has consumed a number of environment steps. Between
two chunks the host writes a row of metrics, and evaluates and saves where it is time to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from jaxpg.parallel.machine import compiler_options
from jaxpg.rollout.evaluation import RecordedEpisode
from jaxpg.training import checkpoint, run_directory
from jaxpg.training.advance import (
    Programs,
    RunState,
    SeedKeys,
    abstract_state,
    compile_init,
    compile_programs,
    seed_keys,
)
from jaxpg.training.checkpoint import Checkpoint
from jaxpg.training.diagnosis import Rerun
from jaxpg.training.health import Diverged, DivergenceMonitor
from jaxpg.training.lock import locked
from jaxpg.training.memory import check_memory, explain_exhaustion
from jaxpg.training.metrics_writer import MetricsWriter, NullWriter, Row, WrittenRows
from jaxpg.training.run_directory import ResumePoint
from jaxpg.types import Key, Learner, Metrics, Tree


class TrainingHooks(NamedTuple):
    """Functions that `train` calls before and between chunks; by default they do nothing and never stop.

    on_checked: called once, when the programs have been checked, before anything is written to the directory.
    on_row: called with every row of metrics; the first has the evaluation at step 0 alone.
    on_evaluation: called with the state of all seeds before the first iteration and after every evaluation.
    should_end: called after every row of a chunk; if true, the run is over: it is evaluated, a checkpoint is written
        that says so, and `train` returns.
    should_stop: the same for a run that will go on: a checkpoint is written, and `train` returns.
    """

    on_checked: Callable[[], None] = lambda: None
    on_row: Callable[[Row], None] = lambda row: None
    on_evaluation: Callable[[RunState], None] = lambda state: None
    should_end: Callable[[], bool] = lambda: False
    should_stop: Callable[[], bool] = lambda: False


NO_HOOKS = TrainingHooks()


def train(
    learner: Learner,
    *,
    seeds: Sequence[int],
    total_steps: int,
    run_dir: Path,
    mesh: Mesh | None = None,
    log_every: int | None = None,
    evaluate: Callable[[Any, Key], Metrics] | None = None,
    record: Callable[[Any, Key], RecordedEpisode] | None = None,
    evaluate_every: int | None = None,
    checkpoint_seconds: float = 60.0,
    config: Mapping[str, Any] | None = None,
    resume: bool = False,
    initial: Tree = None,
    skip_diverged: bool = False,
    hooks: TrainingHooks = NO_HOOKS,
) -> RunState:
    """Train every seed for `total_steps` environment steps; write metrics and checkpoints to `run_dir`.

    Several processes (`jax.distributed`) all call this with the same arguments and a mesh that has devices of each.
    Process 0 alone writes, and all read from `run_dir`.

    Args:
        learner: what is trained.
        seeds: the numbers of the seeds.
        total_steps: environment steps per seed; the iteration that reaches them is finished.
        run_dir: the directory of the run, see run_directory.py.
        mesh: of `parallel.make_mesh`; the first device alone by default.
        log_every: steps per chunk, which gives one row of metrics; a two-hundredth of the total by default.
        evaluate: a learner's state and a key -> scalars by name, `return` among them; jitted and mapped over seeds
            here, and written as `evaluation_...`.
        record: the episodes `[E, ...]` that `evaluate` runs with the same arguments. It is called if a return is not
            finite, to say where that came from.
        evaluate_every: steps between evaluations; a tenth of the total by default. The initial state, at step 0, and
            the end are always evaluated.
        checkpoint_seconds: checkpoints are written at evaluations, at the end, and when this time has passed.
        config: settings of the run, written to config.toml and compared when the run is resumed.
        resume: continue from the last checkpoint in `run_dir`, or start if there is none.
        initial: per seed, `[S, ...]`, the argument of `Learner.with_policy`; None keeps the state of `init`.
        skip_diverged: a seed that diverges is left out, its evaluations NaN from then on, and the others go on.
        hooks: called between chunks.

    Returns:
        The state of all seeds, `[S, ...]`; `min(state.steps) < total_steps` if training was stopped or a seed diverged.

    Raises:
        UserError: the directory cannot be used or is in use, the run does not fit the memory, a callback to the host
            failed, or, without `skip_diverged`, a metric or parameter is not finite. The message says whether a number
            of the environment was the first.
    """
    check_total_steps(total_steps)
    schedule = Schedule(
        total_steps=total_steps,
        log_every=log_every or max(1, total_steps // 200),
        evaluate_every=(evaluate_every or max(1, total_steps // 10)) if evaluate else None,
        checkpoint_seconds=checkpoint_seconds,
    )
    config = {**(config or {}), "total_steps": total_steps, "seeds": list(seeds)}
    mesh = mesh or parallel.make_mesh(len(seeds), 1, jax.devices()[:1])
    shapes = abstract_state(learner, len(seeds))
    programs = compile_programs(learner, evaluate, shapes, mesh)
    check_memory(programs, shapes, mesh, config, evaluates=evaluate is not None)
    processes.refuse_different_arguments(files.toml_dumps(config))
    keys = jax.jit(jax.vmap(seed_keys), compiler_options=compiler_options(runs_once=True))(jnp.asarray(seeds))
    with locked(run_dir), explain_exhaustion(config, len(seeds)):
        begin = partial(_init_or_restore, learner, keys.init, mesh, initial)
        hooks.on_checked()
        host_callback.clear_failures()
        state, resume_point = begin(_find_last(run_dir, config) if resume else None)
        jax.block_until_ready(state.iteration)
        host_callback.raise_failure()
        processes.on_main_process(partial(_open_run, run_dir, config, resume_point, resume=resume))
        monitor = DivergenceMonitor(seeds, run_dir, skip_diverged=skip_diverged)
        kept = run_directory.load_rows(run_dir, size=resume_point.rows.size) if resume_point and skip_diverged else []
        monitor.check_restored(state.learner, kept)
        steps = np.array(state.steps)  # a copy, since the state is donated
        specs = parallel.state_specs(state, mesh)
        state = parallel.place(state, specs, mesh)
        keys = parallel.place(keys, jax.tree.map(lambda _: parallel.PER_SEED, keys), mesh)
        run = RunContext(programs, keys, monitor, schedule, mesh, run_dir, config, record)
        rerun = Rerun(
            begin=lambda: parallel.place(begin(checkpoint.find(run_dir / checkpoint.CHECKPOINTS))[0], specs, mesh),
            advance=lambda state, target: programs.advance(keys.run, state, np.int32(target))[0],
            experience=None if parallel.is_sharded(mesh) else learner.experience,
            record=record,
            seeds=seeds,
            run_dir=run_dir,
        )
        try:
            return parallel.to_host(_train_chunks(run, state, steps, resume_point or ResumePoint(), hooks))
        except Diverged as diverged:
            raise rerun.explain(diverged) from None


MOST_STEPS = 2**31 - 2**26
"""Steps are counted by int32, and the last iteration goes beyond `total_steps` by most of its own."""


def check_total_steps(total_steps: int) -> None:
    """Raise a UserError unless this many steps can be counted."""
    if not 0 < total_steps <= MOST_STEPS:
        raise UserError(
            f"total_steps must be between 1 and {MOST_STEPS:,}, the most that is counted, not {total_steps:,}."
        )


class Schedule(NamedTuple):
    """When a run is logged, evaluated, saved and finished; see `train`. evaluate_every: None for never."""

    total_steps: int
    log_every: int
    evaluate_every: int | None
    checkpoint_seconds: float


class RunContext(NamedTuple):
    """What logging, evaluating and saving read. Constant during a run, except for the seeds that `monitor` excludes."""

    programs: Programs
    keys: SeedKeys
    monitor: DivergenceMonitor
    schedule: Schedule
    mesh: Mesh
    run_dir: Path
    config: Mapping[str, Any]
    record: Callable[[Any, Key], RecordedEpisode] | None

    def min_steps(self, steps: np.ndarray) -> int:
        """Environment steps of the slowest seed that has not diverged, `total_steps` at most."""
        return int(steps[self.monitor.healthy].min(initial=self.schedule.total_steps))


class Chunk(NamedTuple):
    """One chunk of training, done.

    state: of all seeds, on the mesh. Its buffers are donated to the next chunk.
    row: metrics, on the host.
    start, end: steps of the slowest healthy seed before and after, see `RunContext.min_steps`.
    """

    state: RunState
    row: Row
    start: int
    end: int


def is_evaluated(schedule: Schedule, start: int, end: int) -> bool:
    """Whether a chunk that took the slowest seed from `start` to `end` steps is followed by an evaluation.

    It is where a multiple of `evaluate_every` was passed, and at the end.
    """
    every = schedule.evaluate_every
    return every is not None and (end >= schedule.total_steps or end // every > start // every)


def _train_chunks(
    run: RunContext, state: RunState, steps: np.ndarray, resume_point: ResumePoint, hooks: TrainingHooks
) -> RunState:
    """Train to the end, or until it is stopped; `steps` [S] are those of the state."""
    began, saved = time.monotonic() - resume_point.seconds, time.monotonic()
    evaluates = run.schedule.evaluate_every is not None
    if run.min_steps(steps) < run.schedule.total_steps:
        processes.on_main_process(partial(run_directory.add_machine, run.run_dir, list(run.mesh.devices.flat)))
    with _open_writer(run.run_dir, keep=resume_point.rows.size, steps=int(steps.min())) as writer:

        def write(row: Row) -> Row:
            row = row | {"seconds": time.monotonic() - began}
            writer.write(row)
            hooks.on_row(row)
            return row

        if not steps.any():
            if evaluates:
                zeros = np.zeros(len(steps), np.int32)
                write(_row_without_training({"steps": zeros, "iteration": zeros}) | _evaluate(run, state))
            hooks.on_evaluation(parallel.to_host(state))
        for chunk in _chunks(run, state, steps):
            state = chunk.state
            evaluated = is_evaluated(run.schedule, chunk.start, chunk.end)
            row = write(chunk.row | (_evaluate(run, state) if evaluated else {}))
            overdue = time.monotonic() - saved > run.schedule.checkpoint_seconds
            end, stop, overdue = processes.any_process([hooks.should_end(), hooks.should_stop(), overdue])
            if end and evaluates and not evaluated:
                row, evaluated = write(_row_without_training(row) | _evaluate(run, state)), True
            if evaluated:
                hooks.on_evaluation(parallel.to_host(state))
            if evaluated or chunk.end >= run.schedule.total_steps or end or stop or overdue:
                _save_checkpoint(run, state, row, steps=chunk.end, rows=writer.sync(), ended=end)
                saved = time.monotonic()
            if evaluated and run.record is not None:
                run.monitor.check_evaluation(row)
            if end or stop:
                break
    return state


def _row_without_training(row: Row) -> Row:
    """The part of a row that is no evaluation where nothing was trained: before training, and where a run was ended."""
    counts = {name: row[name] for name in ("steps", "iteration")}
    return counts | {"iterations": np.zeros_like(row["iteration"]), "chunk_seconds": 0.0}


def _chunks(run: RunContext, state: RunState, steps: np.ndarray) -> Iterator[Chunk]:
    """Train chunk by chunk, until every seed that has not diverged has reached the total."""
    total_steps = run.schedule.total_steps
    while (start := run.min_steps(steps)) < total_steps:
        target = _next_target(steps[run.monitor.healthy], run.schedule.log_every, total_steps)
        began = time.monotonic()
        state, metrics = run.programs.advance(run.keys.run, state, np.int32(target))
        row = jax.device_get(parallel.to_host(metrics)) | {"chunk_seconds": time.monotonic() - began}
        host_callback.raise_failure()
        run.monitor.check_metrics(row)
        steps = row["steps"]
        yield Chunk(state, row, start, end=run.min_steps(steps))


def _next_target(steps: np.ndarray, log_every: int, total_steps: int) -> int:
    """The next multiple of `log_every`, or more, so that every unfinished seed advances in every chunk."""
    furthest = steps[steps < total_steps].max()
    return min(max((steps.min() // log_every + 1) * log_every, furthest + 1), total_steps)


def _evaluate(run: RunContext, state: RunState) -> dict[str, np.ndarray]:
    """Evaluation metrics [S], NaN for seeds that have diverged."""
    metrics = jax.device_get(parallel.to_host(run.programs.evaluate(run.keys.evaluation, state)))
    host_callback.raise_failure()
    return {name: np.where(run.monitor.healthy, x, np.nan) for name, x in metrics.items()}


def _save_checkpoint(run: RunContext, state: RunState, row: Row, *, steps: int, rows: WrittenRows, ended: bool) -> None:
    """Write a checkpoint of the state after a chunk, unless its parameters are not finite."""
    state = jax.device_get(parallel.to_host(state))
    run.monitor.check_parameters(state.learner, row)
    healthy = run.monitor.healthy
    evaluated = "evaluation_return" in row and healthy.any()
    score = float(row["evaluation_return"][healthy].mean()) if evaluated else None
    about = ResumePoint(rows, row["seconds"], run.config, ended).as_json()
    folder = run.run_dir / checkpoint.CHECKPOINTS
    processes.on_main_process(partial(checkpoint.save, folder, state, steps=steps, score=score, about=about))


def _init_or_restore(
    learner: Learner, keys: Key, mesh: Mesh, initial: Tree, last: Checkpoint | None
) -> tuple[RunState, ResumePoint | None]:
    """The state to begin with, and where the run continues: of a checkpoint, or new if there is none."""
    if last is None:
        return _init(learner, keys, mesh, initial), None
    return checkpoint.restore(last, abstract_state(learner, len(keys))), run_directory.resume_point(last)


def _find_last(run_dir: Path, config: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint to continue from, if there is one: the same in all processes, and of this config."""
    last = checkpoint.find(run_dir / checkpoint.CHECKPOINTS)
    if not processes.same_on_all(str(last and last.steps)):
        raise UserError(
            f"The processes see different checkpoints in {run_dir}. Start every process with the same directory."
        )
    if last is not None:
        stored = run_directory.resume_point(last, config).config
        run_directory.refuse_other_config(f"The checkpoint {last.path}", stored, config)
    return last


def _open_run(run_dir: Path, config: Mapping[str, Any], point: ResumePoint | None, *, resume: bool) -> None:
    """Open the directory of a run, once everything in it is found to be in order."""
    run_directory.refuse_foreign_files(run_dir, resumes=point is not None)
    if resume:
        run_directory.check_records(run_dir, (point or ResumePoint()).rows)
        checkpoint.prune(run_dir / checkpoint.CHECKPOINTS)  # a run that was killed while it saved has one more
    run_directory.open_directory(run_dir, config, resume=resume)


def _init(learner: Learner, keys: Key, mesh: Mesh, initial: Tree) -> RunState:
    """The state before the first iteration; parameters that no single device can hold are created on all of them."""
    specs = parallel.state_specs(abstract_state(learner, len(keys)), mesh)
    state = compile_init(learner, parallel.shardings(specs, mesh) if parallel.is_sharded(mesh) else None)(keys)
    if initial is not None:
        state = state._replace(learner=jax.jit(jax.vmap(learner.with_policy))(state.learner, initial))
    return state


def _open_writer(run_dir: Path, *, keep: int, steps: int) -> MetricsWriter | NullWriter:
    """Process 0 writes metrics, the others do not."""
    return MetricsWriter(run_dir, keep=keep, steps=steps) if processes.is_main_process() else NullWriter()


def restore(learner: Learner, run_dir: Path, seeds: Sequence[int], which: str = "best") -> RunState:
    """The state of a run at its `best` or `last` checkpoint.

    Raises:
        UserError: there is none, it is of another run, or it cannot be used.
    """
    folder, shapes = run_dir / checkpoint.CHECKPOINTS, abstract_state(learner, len(seeds))
    while True:
        found = checkpoint.find(folder, which)
        if found is None:
            saved = run_directory.steps_of_a_checkpoint(run_directory.load_rows(run_dir))
            why = f"that after {saved:,} steps is gone" if saved else "the run ended before its first one"
            remedy = f"Put {folder} back from a copy, or train" if saved else "Go on with it, or train"
            raise UserError(f"{run_dir} has no checkpoint: {why}. {remedy} a new run.")
        stored = run_directory.resume_point(found).config
        run_directory.refuse_other_config(f"The checkpoint {found.path}", stored, run_directory.load_config(run_dir))
        try:
            return checkpoint.restore(found, shapes)
        except UserError:
            if checkpoint.exists(found):
                raise  # otherwise the run still trains and has just replaced it by a later one
