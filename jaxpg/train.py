"""Training: any Learner, over several seeds at once, seen from the host chunk by chunk.

A chunk is one compiled loop of iterations per seed, until each seed has consumed so many environment steps.
Where a seed stands after i iterations depends on its number and on i alone: not on the other seeds, not on where chunks
were cut, not on whether the run was interrupted in between. So resuming is exact.
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
from jax import lax
from jax.sharding import Mesh

from jaxpg import checkpoint, host, hosts, parallel, record
from jaxpg.errors import UserError
from jaxpg.record import Row
from jaxpg.types import Array, Key, Learner, Metrics, Tree

CHECKPOINTS = "checkpoints"
MEAN_OVER = {"return": "episodes", "length": "episodes", "length_right": "right", "length_wrong": "wrong"}
"""Metrics that are means over what another metric counts, NaN where that is 0; all others are means over iterations."""
COUNTS = tuple(dict.fromkeys(MEAN_OVER.values()))


class RunState(NamedTuple):
    """Where a run of S seeds stands; every leaf has a leading axis `[S]`.

    learner: the learner's state.
    iteration: [S] int32, iterations done.
    steps: [S] int32, environment steps consumed.
    """

    learner: Tree
    iteration: Array
    steps: Array


class SeedKeys(NamedTuple):
    """The randomness of one seed, by purpose."""

    init: Key
    run: Key
    evaluation: Key


def seed_keys(seed: int | Array) -> SeedKeys:
    """The keys of a seed, the same whichever other seeds run beside it."""
    return SeedKeys(*jax.random.split(jax.random.key(seed), 3))


def start(learner: Learner, keys: Key) -> RunState:
    """The seeds before their first iteration; `keys` is `[S]`."""
    zeros = jnp.zeros(keys.shape, jnp.int32)
    return RunState(lax.map(learner.init, keys), zeros, zeros)  # vmap would take twice as long to compile


def compiled_start(learner: Learner, shardings: Tree = None) -> Callable[[Key], RunState]:
    """`start` as a program that runs once: on a CPU, most of the time to compile it would go into making it fast."""
    return jax.jit(partial(start, learner), out_shardings=shardings, compiler_options=compiler_options(runs_once=True))


def compiler_options(*, runs_once: bool = False) -> dict[str, int | bool]:
    """What XLA may spend on a program for a CPU: no more than pays (benchmarks/LOG.md).

    LLVM's optimisation at level 1 takes a fifth less time than at XLA's own 3 and gives programs as fast; at level 0 it
    takes least and gives slow ones. jax 0.10 can also do without fused kernels, which later versions can not.
    """
    if jax.default_backend() != "cpu":
        return {}
    unfused = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
    return {"xla_backend_optimization_level": 0, **unfused} if runs_once else {"xla_backend_optimization_level": 1}


def advance(learner: Learner, keys: Key, state: RunState, target: Array | int) -> tuple[RunState, Metrics]:
    """Let every seed iterate until it has consumed `target` environment steps, or until a metric is not finite.

    How many iterations that takes may depend on the data, hence a while loop; a seed that is there stands still.
    Iteration i of a seed draws from `fold_in(key, i)`.

    Returns:
        The state, and metrics `[S]`: means over a seed's `iterations` in this call (those of MEAN_OVER over
        what it says, NaN where there was none; of COUNTS the sum, of `steps` the last).
    """
    return parallel.each_seed(partial(_advance_one, learner, target))(keys, state)


def _advance_one(learner: Learner, target: Array | int, key: Key, state: RunState) -> tuple[RunState, Metrics]:
    """`advance` of a single seed, without the axis `[S]`."""
    step = jax.jit(learner.step)  # traced once, for its shapes and for its code

    def iterate(carry: tuple[RunState, Metrics]) -> tuple[RunState, Metrics]:
        state, sums = carry
        learner_state, metrics = step(state.learner, jax.random.fold_in(key, state.iteration))
        end = RunState(learner_state, state.iteration + 1, metrics["steps"].astype(jnp.int32))
        return end, jax.tree.map(jnp.add, sums, _weighted(metrics))

    def unfinished(carry: tuple[RunState, Metrics]) -> Array:
        state, sums = carry
        return (state.steps < target) & jnp.isfinite(sum(sums.values()))

    metrics = jax.eval_shape(step, state.learner, key)[1]
    sums = {name: jnp.zeros(x.shape, jnp.float32) for name, x in metrics.items()}
    end, sums = lax.while_loop(unfinished, iterate, (state, sums))
    iterations = end.iteration - state.iteration
    means = {n: x / (sums[MEAN_OVER[n]] if n in MEAN_OVER else iterations.astype(x.dtype)) for n, x in sums.items()}
    totals = {n: sums[n] for n in COUNTS if n in sums}
    counts = {"steps": end.steps, "iteration": end.iteration, "iterations": iterations}
    return end, means | totals | counts


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
    keep_going: bool = False,
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
        keep_going: a seed that goes astray is left behind, NaN from then on, and the others go on.
        on_evaluation: called with the state of all seeds before the first iteration, and after every evaluation.
        on_row: called with every row of metrics.
        should_stop: asked after every chunk; if true, a checkpoint is written and the state returned as it is.

    Returns:
        The state of all seeds, `[S, ...]`; `min(state.steps) < total_steps` if it was stopped, or left one behind.

    Raises:
        UserError: the directory cannot be used, a step on the host failed, or, without `keep_going`, something became
            infinite or not a number.
    """
    if not 0 < total_steps < 2**31:
        raise UserError(f"total_steps must lie between 1 and 2^31 - 1, the most that is counted, not {total_steps}.")
    log_every = log_every or max(1, total_steps // 200)
    evaluate_every = evaluate_every or max(1, total_steps // 10)
    config = {**(config or {}), "total_steps": total_steps, "seeds": list(seeds)}
    mesh = mesh or parallel.make_mesh(len(seeds), 1, jax.devices()[:1])
    keys = jax.vmap(seed_keys)(jnp.asarray(seeds))
    state, origin = _begin(learner, keys.init, mesh, run_dir, config, resume, initial)
    steps, healthy = np.array(state.steps), np.ones(len(seeds), bool)  # a copy, since the state is given away
    if keep_going:
        healthy[_anywhere(_bad_parameters(state.learner))] = False
    chunk, evaluation = _programs(learner, evaluate, state, mesh)
    state = parallel.place(state, parallel.state_specs(state, mesh), mesh)
    keys = parallel.place(keys, jax.tree.map(lambda _: parallel.PER_SEED, keys), mesh)
    clock, saved = time.monotonic() - origin["seconds"], time.monotonic()
    host.forget_failures()

    def check(bad: Mapping[str, np.ndarray], row: Row) -> None:
        if not keep_going:
            _refuse_non_finite(bad, row, seeds, run_dir)
        healthy[_anywhere(bad)] = False

    def behind(steps: np.ndarray) -> int:
        return int(steps[healthy].min(initial=total_steps))

    if behind(steps) < total_steps:
        hosts.on_first(partial(record.add_machine, run_dir, list(mesh.devices.flat)))
    with _recorder(run_dir, keep=origin["bytes"], steps=int(steps.min())) as recorder:
        if not steps.any():
            on_evaluation(parallel.whole(state))
        while (done := behind(steps)) < total_steps:
            target = _next_target(steps[healthy], log_every, total_steps)
            began = time.monotonic()
            state, metrics = chunk(keys.run, state, np.int32(target))
            row = jax.device_get(parallel.whole(metrics)) | {"chunk_seconds": time.monotonic() - began}
            host.refuse_failure()
            check(_bad_metrics(row), row)
            steps = row["steps"]
            reached = behind(steps)
            finished = reached >= total_steps
            stop, due = hosts.any_of([should_stop(), time.monotonic() - saved > checkpoint_seconds])
            evaluated = evaluate and (finished or reached // evaluate_every > done // evaluate_every)
            if evaluated:
                measured = jax.device_get(parallel.whole(evaluation(keys.evaluation, state)))
                row |= {name: np.where(healthy, x, np.nan) for name, x in measured.items()}
                host.refuse_failure()
            row["seconds"] = time.monotonic() - clock
            recorder.write(row)
            on_row(row)
            if evaluated:
                on_evaluation(parallel.whole(state))
            if evaluated or finished or stop or due:
                saving = jax.device_get(parallel.whole(state))
                check(_bad_parameters(saving.learner), row)
                score = float(row["evaluation_return"][healthy].mean()) if evaluated and healthy.any() else None
                origin = {"bytes": recorder.size, "seconds": row["seconds"], "config": config}
                hosts.on_first(
                    partial(checkpoint.save, run_dir / CHECKPOINTS, saving, steps=reached, score=score, about=origin)
                )
                saved = time.monotonic()
            if stop:
                break
    return parallel.whole(state)


def _next_target(steps: np.ndarray, log_every: int, total_steps: int) -> int:
    """The next multiple of `log_every`, or so far that every seed that is not done moves: none waits for another."""
    furthest = steps[steps < total_steps].max()
    return min(max((steps.min() // log_every + 1) * log_every, furthest + 1), total_steps)


def restore(learner: Learner, run_dir: Path, seeds: Sequence[int], which: str = "best") -> RunState:
    """The state of a run at its `best` or `last` checkpoint.

    Raises:
        UserError: there is none, it is of another run, or it cannot be used.
    """
    found = checkpoint.find(run_dir / CHECKPOINTS, which)
    if found is None:
        raise UserError(f"{run_dir} has no checkpoint: the run did not get as far as its first one.")
    record.refuse_other_config(f"The checkpoint {found.path}", found.about["config"], record.load_config(run_dir))
    return checkpoint.restore(found, _shapes(learner, len(seeds)))


def _begin(
    learner: Learner, keys: Key, mesh: Mesh, run_dir: Path, config: Mapping[str, Any], resume: bool, initial: Tree
) -> tuple[RunState, dict[str, Any]]:
    """The state to go on from, and how much of the record stands at that point."""
    if not hosts.same(record.dumps(config)):
        raise UserError("The processes of this run were told different things. Give all of them the same arguments.")
    hosts.on_first(partial(record.open_directory, run_dir, config, resume=resume))
    found = checkpoint.find(run_dir / CHECKPOINTS)
    if not hosts.same(str(found and found.steps)):
        raise UserError(f"The processes see different checkpoints in {run_dir}: it has to be one directory for all.")
    if found is None:
        # Parameters that no single device can hold come into being where they lie.
        specs = parallel.state_specs(_shapes(learner, len(keys)), mesh)
        state = compiled_start(learner, parallel.lying(specs, mesh) if parallel.is_sharded(mesh) else None)(keys)
        if initial is not None:
            state = state._replace(learner=jax.jit(jax.vmap(learner.adopt))(state.learner, initial))
        return state, {"bytes": 0, "seconds": 0.0}
    record.refuse_other_config(f"The checkpoint {found.path}", found.about["config"], config)
    return checkpoint.restore(found, _shapes(learner, len(keys))), found.about


def _recorder(run_dir: Path, *, keep: int, steps: int) -> record.Recorder | record.Unrecorded:
    return record.Recorder(run_dir, keep=keep, steps=steps) if hosts.is_first() else record.Unrecorded()


def _shapes(learner: Learner, num_seeds: int) -> RunState:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_seeds))
    return jax.eval_shape(partial(start, learner), keys)


def memory(learner: Learner, num_seeds: int, mesh: Mesh) -> int:
    """Bytes that the training of so many seeds takes on each device of the mesh, as the compiled program states it."""
    state = _shapes(learner, num_seeds)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_seeds))
    chunk, _ = _programs(learner, None, state, mesh)
    arguments = parallel.placed((keys, state), (parallel.PER_SEED, parallel.state_specs(state, mesh)), mesh)
    needed = chunk.lower(*arguments, np.int32(1)).compile().memory_analysis()
    given_and_made = needed.argument_size_in_bytes + needed.output_size_in_bytes - needed.alias_size_in_bytes
    return given_and_made + needed.temp_size_in_bytes


def _programs(
    learner: Learner, evaluate: Callable[[Any, Key], Metrics] | None, state: RunState, mesh: Mesh
) -> tuple[Any, Any]:
    """The functions that advance and evaluate all seeds on the devices of the mesh."""
    seeds, specs = parallel.PER_SEED, parallel.state_specs(state, mesh)

    def evaluation(key: Key, state: RunState) -> dict[str, Array]:
        assert evaluate is not None  # else this is never called
        metrics = evaluate(state.learner, jax.random.fold_in(key, state.iteration))
        return {f"evaluation_{name}": value for name, value in metrics.items()}

    advance_all = parallel.spread(
        partial(advance, learner), mesh, in_specs=(seeds, specs, parallel.EVERYWHERE), out_specs=(specs, seeds)
    )
    evaluate_all = parallel.spread(parallel.each_seed(evaluation), mesh, in_specs=(seeds, specs), out_specs=seeds)
    options = compiler_options()
    return (
        jax.jit(advance_all, donate_argnums=1, compiler_options=options),
        jax.jit(evaluate_all, compiler_options=options),
    )


def _weighted(metrics: Metrics) -> Metrics:
    """What is summed over iterations: means over something times its number, all else as it is."""

    def total(name: str, value: Array) -> Array:
        count = metrics[MEAN_OVER[name]]
        return jnp.where(count > 0, value * count, 0.0)

    return {name: total(name, value) if name in MEAN_OVER else value for name, value in metrics.items()}


def _bad_metrics(row: Row) -> dict[str, np.ndarray]:
    """By metric, the seeds [S] for which it is not finite although it should be."""
    healthy = {n: row[MEAN_OVER.get(n, "iterations")] > 0 for n, x in row.items() if np.ndim(x)}
    return {n: ~np.isfinite(row[n]) & expected for n, expected in healthy.items()}


def _bad_parameters(learner_state: Tree) -> dict[str, np.ndarray]:
    """By array of a learner's state, the seeds [S] for which it is not finite; environments may hold anything."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): ~np.isfinite(x).reshape(len(x), -1).all(1)
        for path, x in jax.tree_util.tree_flatten_with_path(learner_state)[0]
        if jnp.issubdtype(x.dtype, jnp.inexact) and not parallel.is_per_environment(path)
    }


def _anywhere(bad: Mapping[str, np.ndarray]) -> np.ndarray:
    """The seeds [S] of which anything is bad."""
    return np.any(list(bad.values()), axis=0)


def _refuse_non_finite(bad: Mapping[str, np.ndarray], row: Row, seeds: Sequence[int], run_dir: Path) -> None:
    """Raise a UserError naming the quantity, the seed and the moment, if anything is bad."""
    for name, where in bad.items():
        if where.any():
            s = int(where.argmax())
            value = row[name][s] if name in row else "not finite"
            found = checkpoint.find(run_dir / CHECKPOINTS)
            kept = f"The last good checkpoint is {found.path}" if found else "There was no checkpoint yet"
            raise UserError(
                f"Training went astray: {name} of seed {seeds[s]} is {value} after iteration {row['iteration'][s]}, "
                f"{row['steps'][s]} steps. {kept}; a smaller learning_rate or max_grad_norm may help."
            )
