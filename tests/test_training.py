"""The training loop: results do not depend on where chunks end, on interruptions, on other seeds or on devices."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_learner
from tensorboardX.proto.event_pb2 import Event
from toy_learner import TOTAL, peak_at_ten, run, toy

from jaxpg import parallel
from jaxpg.errors import UserError
from jaxpg.training import advance, checkpoint, health, loop, metrics_writer, run_directory
from jaxpg.training import program as program_module


def assert_same(a: object, b: object) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def rows(run_dir: Path) -> dict[str, np.ndarray]:
    """The metrics of a run, without wall times."""
    return {k: v for k, v in run_directory.load_metrics(run_dir).items() if "seconds" not in k}


def stop_after(chunks: int) -> Iterator[bool]:
    yield from [False] * (chunks - 1)
    yield True


def test_a_seed_learns_the_same_alone_and_beside_others(tmp_path: Path) -> None:
    together = run(tmp_path / "together", seeds=[3, 4, 5])
    alone = run(tmp_path / "alone", seeds=[4])
    assert_same(jax.tree.map(lambda x: x[1:2], together), alone)
    assert not np.array_equal(together.learner.params["w"][0], together.learner.params["w"][1])


@pytest.mark.parametrize("log_every", [1, 7, TOTAL])
def test_where_chunks_are_cut_changes_nothing(tmp_path: Path, log_every: int) -> None:
    assert_same(run(tmp_path / "a", log_every=log_every), run(tmp_path / "b"))


def test_iterations_follow_the_documented_keys(tmp_path: Path) -> None:
    """A slow loop with `fold_in(run_key, i)` gives the same states and the same means."""
    learner = toy(lucky_length=True)
    end = run(tmp_path, learner=learner, log_every=11, total_steps=22, seeds=[9])
    keys = advance.seed_keys(9)
    state, seen, metrics = learner.init(keys.init), 0, []
    for target, row in zip((11, 22), range(2), strict=True):
        metrics = []
        while int(state.steps) < target:
            state, one = jax.jit(learner.step)(state, jax.random.fold_in(keys.run, seen))
            seen += 1
            metrics.append({k: float(v) for k, v in one.items()})
        got = {k: v[row, 0] for k, v in rows(tmp_path).items()}
        episodes = sum(m["episodes"] for m in metrics)
        assert got["loss"] == pytest.approx(np.mean([m["loss"] for m in metrics]), rel=1e-5)
        expected = sum(m["return"] * m["episodes"] for m in metrics if m["episodes"]) / episodes
        assert got["return"] == pytest.approx(expected, rel=1e-5)
        assert got["length"] == pytest.approx(7.0)
        counts = ("episodes", "steps", "iteration", "iterations")
        assert [got[k] for k in counts] == [episodes, int(state.steps), seen, len(metrics)]
    np.testing.assert_allclose(end.learner.params["w"][0], state.params["w"], rtol=1e-6)


def test_lengths_are_means_over_the_completions_that_they_are_of() -> None:
    """Over three iterations; one had no right completion, and one no wrong one."""
    script = {
        "correct": [2.0, 0.0, 1.0],
        "length_correct": [5.0, np.nan, 8.0],
        "incorrect": [1.0, 3.0, 0.0],
        "length_incorrect": [4.0, 6.0, np.nan],
        "accuracy": [0.5, 0.25, 0.75],
    }

    def scripted(state: Any, metrics: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        return state, metrics | {name: jnp.asarray(x)[state.count - 1] for name, x in script.items()}

    learner, keys = toy(change=scripted), jax.vmap(advance.seed_keys)(jnp.arange(2))
    _, metrics = advance.advance_seeds(learner, keys.run, advance.init_seeds(learner, keys.init), 6)
    expected = {"correct": 3, "length_correct": 18 / 3, "incorrect": 4, "length_incorrect": 22 / 4, "accuracy": 0.5}
    for name, x in expected.items():
        np.testing.assert_allclose(metrics[name], [x, x], rtol=1e-6, err_msg=name)


def test_a_finished_seed_stands_still(tmp_path: Path) -> None:
    """Each stops at the first iteration that reaches the total, while slower ones go on."""
    end = run(tmp_path, seeds=range(8))
    metrics = rows(tmp_path)
    assert ((end.steps >= TOTAL) & (end.steps < TOTAL + 5)).all()
    assert len(set(end.iteration.tolist())) > 1
    stood = metrics["iterations"] == 0
    assert stood.any()
    assert np.isnan(metrics["loss"][stood]).all()
    assert np.isfinite(metrics["loss"][~stood]).all()
    assert (metrics["iterations"].sum(0) == end.iteration).all()


def test_no_seed_waits_for_another(tmp_path: Path) -> None:
    """However long iterations are beside `log_every`, every seed short of the total moves in every chunk."""
    run(tmp_path, log_every=1, seeds=range(4))
    metrics = rows(tmp_path)
    before = np.vstack([np.zeros(4), metrics["steps"][:-1]])
    assert (metrics["iterations"][before < TOTAL] > 0).all()


def test_side_by_side_is_the_same_as_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an accelerator does with the seeds, and what a CPU does; two programs, which may round differently."""
    one_by_one = run(tmp_path / "map", evaluate=peak_at_ten)
    monkeypatch.setattr(parallel, "map_seeds", jax.vmap)
    close = partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, jax.device_get(run(tmp_path / "vmap", evaluate=peak_at_ten)), jax.device_get(one_by_one))
    jax.tree.map(close, rows(tmp_path / "vmap"), rows(tmp_path / "map"))


def test_stopping_and_resuming_is_exact(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", evaluate=peak_at_ten, evaluate_every=10)
    for chunks in (1, 4):
        stops = stop_after(chunks)
        part = run(
            tmp_path / "parts",
            evaluate=peak_at_ten,
            evaluate_every=10,
            resume=True,
            checkpoint_seconds=1e9,
            hooks=loop.TrainingHooks(should_stop=lambda stops=stops: next(stops)),
        )
        assert int(part.steps.min()) < TOTAL
    parts = run(tmp_path / "parts", evaluate=peak_at_ten, evaluate_every=10, resume=True)
    assert_same(parts, whole)
    assert_same(rows(tmp_path / "parts"), rows(tmp_path / "whole"))
    assert [e.step for e in events(tmp_path / "parts")] == [e.step for e in events(tmp_path / "whole")]


def test_the_seconds_of_a_run_go_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1000.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=partial(next, clock)))
    run(tmp_path, hooks=loop.TrainingHooks(should_stop=partial(next, stop_after(5))))
    next(itertools.islice(clock, 500, None))  # as long as nothing trained
    run(tmp_path, resume=True)
    between = np.diff(run_directory.load_metrics(tmp_path)["seconds"])
    assert (between > 0).all()
    assert (between < 100).all()


def test_a_finished_run_goes_on_for_longer(tmp_path: Path) -> None:
    run(tmp_path / "parts", total_steps=TOTAL // 2)
    parts = run(tmp_path / "parts", resume=True)
    assert_same(parts, run(tmp_path / "whole"))
    assert "total_steps = 60\n" in (tmp_path / "parts" / "config.toml").read_text()
    assert_same(run(tmp_path / "parts", resume=True), parts)  # and there is nothing left to do


def test_rows_after_the_last_checkpoint_are_written_once(tmp_path: Path) -> None:
    """A process that died between a row and its checkpoint leaves rows that the next one writes again."""

    class Died(BaseException):
        pass

    def die_at_20(row: metrics_writer.Row) -> None:
        if row["steps"].min() >= 20:
            raise Died

    hooks = loop.TrainingHooks(on_row=die_at_20)
    with pytest.raises(Died):
        run(tmp_path / "parts", checkpoint_seconds=1e9, evaluate=peak_at_ten, evaluate_every=12, hooks=hooks)
    ahead = len(run_directory.load_metrics(tmp_path / "parts")["steps"])
    assert checkpoint.find(tmp_path / "parts" / "checkpoints").steps < 20
    parts = run(tmp_path / "parts", evaluate=peak_at_ten, evaluate_every=12, resume=True)
    assert_same(parts, run(tmp_path / "whole", evaluate=peak_at_ten, evaluate_every=12))
    assert_same(rows(tmp_path / "parts"), rows(tmp_path / "whole"))
    assert len(run_directory.load_metrics(tmp_path / "parts")["steps"]) > ahead
    assert [e.step for e in events(tmp_path / "parts")] == [e.step for e in events(tmp_path / "whole")]


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(tmp_path: Path) -> None:
    """That would delete the metrics of all that was trained. Before its first checkpoint a run may begin anew."""
    run(tmp_path, evaluate=peak_at_ten, evaluate_every=12)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="has no checkpoint: that after 48 steps is gone"):
        loop.restore(toy(), tmp_path, [0, 1, 2])
    with pytest.raises(UserError, match=r"has no checkpoint, although one was written after 48 steps.*Put .* back"):
        run(tmp_path, evaluate=peak_at_ten, evaluate_every=12, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    lines = before.splitlines(keepends=True)
    _, first, *_ = (i for i, line in enumerate(lines) if b"evaluation_return" in line)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[: first + 1]))
    run(tmp_path, evaluate=peak_at_ten, evaluate_every=12, resume=True)  # as if killed before it could save


def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the run, which trains on; the later one is read."""
    learner = toy()
    run(tmp_path, learner=learner, total_steps=TOTAL // 2)
    replaced = checkpoint.find(tmp_path / "checkpoints")
    run(tmp_path, learner=learner, resume=True)
    found = [replaced, checkpoint.find(tmp_path / "checkpoints")]
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "find", lambda folder, which: found.pop(0))
        assert loop.restore(learner, tmp_path, [0, 1, 2], "last").iteration.tolist() == [30, 30, 30]
    damaged = next((tmp_path / "checkpoints").glob("*/manifest.json"))
    damaged.write_text("{")
    with pytest.raises(UserError, match=r"its file manifest\.json is damaged"):
        loop.restore(learner, tmp_path, [0, 1, 2], "last")


def delete_rows(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()


def replace_rows(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").rename(run_dir / "moved")
    shutil.copy(run_dir / "moved", run_dir / "metrics.jsonl")


@pytest.mark.parametrize("spoil", [delete_rows, replace_rows, shutil.rmtree])
def test_a_run_whose_rows_are_taken_away_ends(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    """Otherwise it would train on, and all rows would go to a file that nobody can read."""

    def spoil_at_20(row: metrics_writer.Row) -> None:
        if row["steps"].min() == 20:
            spoil(tmp_path / "run")

    hooks = loop.TrainingHooks(on_row=spoil_at_20)
    with pytest.raises(UserError, match="has been deleted, moved or replaced while the run was training"):
        run(tmp_path / "run", checkpoint_seconds=1e9, evaluate=peak_at_ten, evaluate_every=4, hooks=hooks)
    last = checkpoint.find(tmp_path / "run" / "checkpoints")
    assert last is None or last.steps == 20


def test_best_and_last_checkpoint_are_kept(tmp_path: Path) -> None:
    learner = toy()
    run(tmp_path, learner=learner, evaluate=peak_at_ten, evaluate_every=4)
    metrics = run_directory.load_metrics(tmp_path)
    evaluated = np.isfinite(metrics["evaluation_return"]).all(1)
    assert metrics["steps"][evaluated, 0].tolist() == list(range(0, TOTAL + 1, 4))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    best = loop.restore(learner, tmp_path, [0, 1, 2], "best")
    assert best.iteration.tolist() == [10, 10, 10]
    assert loop.restore(learner, tmp_path, [0, 1, 2], "last").iteration.tolist() == [30, 30, 30]


def test_checkpoints_that_a_killed_process_left_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a run that had been saved to its end, which trains no more."""
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "prune", lambda folder: None)
        run(tmp_path, evaluate=peak_at_ten, evaluate_every=4)
    assert len(list((tmp_path / "checkpoints").iterdir())) > 2
    run(tmp_path, evaluate=peak_at_ten, evaluate_every=4, resume=True)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (4, 8, False),
        (8, 12, True),
        (8, 10, True),
        (10, 12, False),
        (4, 35, True),  # over several multiples of 10 at once
        (32, 36, True),  # the end is no multiple of 10
    ],
)
def test_a_chunk_is_followed_by_an_evaluation(start: int, end: int, expected: bool) -> None:
    schedule = loop.Schedule(total_steps=36, log_every=4, evaluate_every=10, checkpoint_seconds=60.0)
    assert loop.is_evaluated(schedule, start, end) == expected
    assert not loop.is_evaluated(schedule._replace(evaluate_every=None), start, end)


def test_evaluations_come_evenly_and_at_the_end(tmp_path: Path) -> None:
    run(tmp_path, learner=toy(), evaluate=peak_at_ten, evaluate_every=16, total_steps=42)
    metrics = run_directory.load_metrics(tmp_path)
    assert metrics["steps"][np.isfinite(metrics["evaluation_return"][:, 0]), 0].tolist() == [0, 16, 32, 42]


def test_the_first_row_is_the_initial_policy(tmp_path: Path) -> None:
    """Evaluated as later on, and with nothing of training in the row; without evaluations there is no such row."""
    shown: list[metrics_writer.Row] = []
    run(tmp_path / "a", learner=toy(), evaluate=peak_at_ten, hooks=loop.TrainingHooks(on_row=shown.append))
    metrics = run_directory.load_metrics(tmp_path / "a")
    first = {name: values[0] for name, values in metrics.items()}
    for name in ("steps", "iteration", "iterations"):
        assert first.pop(name).tolist() == [0, 0, 0]
    assert first.pop("chunk_seconds") == 0 < first.pop("seconds")
    assert first.pop("evaluation_return").tolist() == [-10, -10, -10]
    assert first.pop("evaluation_length").tolist() == [7, 7, 7]
    assert np.isnan([*first.values()]).all()
    assert len(shown) == len(metrics["steps"])
    run(tmp_path / "b", learner=toy())
    assert (run_directory.load_metrics(tmp_path / "b")["iterations"][0] > 0).all()


def spoil_loss(state: object, metrics: dict) -> tuple[object, dict]:
    loss = jnp.where((state.count == 6) & (state.params["w"][0] > 0), jnp.nan, metrics["loss"])
    return state, metrics | {"loss": loss}


def spoil_return(state: object, metrics: dict) -> tuple[object, dict]:
    return state, metrics | {
        "return": jnp.where((state.count == 6) & (metrics["episodes"] > 0), jnp.inf, metrics["return"])
    }


def spoil_params(state: object, metrics: dict) -> tuple[object, dict]:
    bad = (state.count == 6) & (state.params["w"][0] > 0)
    return state._replace(params=state.params | {"b": jnp.where(bad, jnp.inf, state.params["b"])}), metrics


@pytest.mark.parametrize(
    ("spoil", "quantity"), [(spoil_loss, "loss"), (spoil_return, "return"), (spoil_params, "params.b")]
)
def test_non_finite_numbers_stop_the_run(tmp_path: Path, spoil: toy_learner.Change, quantity: str) -> None:
    """The message names what, which seed and when; the checkpoint before is finite and good."""
    good = run(tmp_path / "good", learner=toy(), total_steps=8)
    with pytest.raises(
        UserError, match=rf"Training diverged: {quantity} of seed (\d) is .* after iteration 6, 12 steps"
    ) as error:
        run(tmp_path / "bad", learner=toy(change=spoil))
    assert "000000000008" in str(error.value)
    assert_same(loop.restore(toy(), tmp_path / "bad", [0, 1, 2], "last"), good)
    if spoil is not spoil_return:
        seed = int(str(error.value).split(" of seed ")[1][0])
        assert good.learner.params["w"][seed, 0] > 0
        assert (good.learner.params["w"][:seed, 0] < 0).all()


def test_a_seed_that_is_left_out_stays_so_after_an_interruption(tmp_path: Path) -> None:
    """One metric was not finite, before the interruption; its parameters are, and all that follows."""
    settings = {"seeds": range(6), "total_steps": 20, "evaluate": peak_at_ten, "skip_diverged": True}
    stop = loop.TrainingHooks(should_stop=partial(next, stop_after(4)))
    run(tmp_path, learner=toy(change=spoil_loss), hooks=stop, **settings)
    run(tmp_path, learner=toy(change=spoil_loss), resume=True, **settings)
    metrics = rows(tmp_path)
    left_out = np.isnan(metrics["loss"][1:]).any(0)
    assert 0 < left_out.sum() < 6
    assert np.isfinite(metrics["loss"][-1]).all()
    assert np.isnan(metrics["evaluation_return"][-1]).tolist() == left_out.tolist()


def test_the_best_checkpoint_is_that_of_the_seeds_that_are_left(tmp_path: Path) -> None:
    """The evaluation of a seed that has diverged is NaN, which no checkpoint would be better than."""
    settings = {"seeds": range(6), "evaluate": peak_at_ten, "evaluate_every": 4, "skip_diverged": True}
    learner = toy(change=spoil_loss)
    run(tmp_path, learner=learner, **settings)
    assert np.isnan(rows(tmp_path)["evaluation_return"][-1]).any()
    best = loop.restore(learner, tmp_path, list(range(6)), "best")
    assert best.iteration.max() == 10


def test_a_chunk_ends_where_a_metric_is_not_finite(tmp_path: Path) -> None:
    """The run is named, of which there may be several."""
    with pytest.raises(UserError, match=rf"after iteration 6, 12 steps\. There was no checkpoint yet in {tmp_path}\."):
        run(tmp_path, learner=toy(change=spoil_loss), log_every=TOTAL)


def test_no_checkpoint_is_named_in_a_directory_that_is_deleted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"12 steps\. Nothing was kept: give out=DIRECTORY"):
        run(tmp_path / f"{health.UNKEPT}xyz" / "stage", learner=toy(change=spoil_loss))


def test_devices_change_nothing(tmp_path: Path) -> None:
    mesh = parallel.make_mesh(4, 1, jax.devices()[:4])
    spread = run(tmp_path / "four", seeds=range(4), mesh=mesh, evaluate=peak_at_ten)
    assert len(spread.learner.params["w"].sharding.device_set) == 4
    assert_same(spread, run(tmp_path / "one", seeds=range(4), evaluate=peak_at_ten))


def test_the_step_is_traced_once(tmp_path: Path) -> None:
    traces = []

    def count(state: object, metrics: dict) -> tuple[object, dict]:
        traces.append(1)
        return state, metrics

    run(tmp_path, learner=toy(lucky_length=True, change=count))
    assert len(traces) == 1


def test_large_arrays_of_a_learner_are_arguments_of_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On four devices, with the results that one device has with constants."""
    table = jnp.arange(2**18, dtype=jnp.float32)

    def look_up(state: toy_learner.ToyState, metrics: dict[str, jax.Array]) -> tuple[toy_learner.ToyState, dict]:
        return state, metrics | {"loss": metrics["loss"] + table[1000 * state.count]}

    learner = toy(change=look_up)

    def trained(num_devices: int, limit: int) -> tuple[dict[str, np.ndarray], int]:
        monkeypatch.setattr(program_module, "LARGE_CONSTANT", limit)
        mesh = parallel.make_mesh(2, 4, jax.devices()[:num_devices])
        keys = jax.vmap(advance.seed_keys)(jnp.arange(2))
        state = advance.compile_init(learner)(keys.init)
        specs = parallel.state_specs(state, mesh)
        program = advance.compile_programs(learner, None, state, mesh).advance
        keys, state = parallel.place((keys.run, state), (parallel.PER_SEED, specs), mesh)
        lowered = program.lower(keys, state, np.int32(20))
        metrics = jax.device_get(program(keys, state, np.int32(20))[1])
        return metrics, lowered.compile().memory_analysis().argument_size_in_bytes

    as_constant, small = trained(1, limit=table.nbytes + 1)
    assert small < 10_000
    as_argument, size = trained(4, limit=table.nbytes)
    assert table.nbytes < size < table.nbytes + 10_000
    jax.tree.map(np.testing.assert_array_equal, as_argument, as_constant)


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    run(tmp_path, total_steps=4)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match=r"holds a run already\. Add --resume"):
        run(tmp_path, total_steps=4)
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("moved", [False, True])
def test_resuming_with_another_config_names_what_differs(tmp_path: Path, moved: bool) -> None:
    """In the run itself, and in a checkpoint that came from another run."""
    run(tmp_path / "a", total_steps=8, config={"algorithm": "toy", "toy": {"rate": 0.1, "clip": None}})
    target = tmp_path / "a"
    if moved:
        target = tmp_path / "b"
        target.mkdir()
        (tmp_path / "a" / "checkpoints").rename(target / "checkpoints")
    with pytest.raises(UserError, match=r"another config: toy.rate is 0.1 there, 0.2 here\.$"):
        run(target, resume=True, config={"algorithm": "toy", "toy": {"rate": 0.2, "clip": None}})
    run(target, resume=True, config={"algorithm": "toy", "toy": {"rate": 0.1, "clip": None}}) if not moved else None


def test_resuming_without_a_wrapper_that_has_no_arguments_names_it(tmp_path: Path) -> None:
    run(tmp_path, total_steps=8, config={"algorithm": "toy", "wrappers": {"flatten": {}}})
    with pytest.raises(UserError, match=r"another config: wrappers.flatten is {} there, 'absent' here\.$"):
        run(tmp_path, resume=True, config={"algorithm": "toy", "wrappers": {}})
    run(tmp_path, resume=True, config={"algorithm": "toy", "wrappers": {"flatten": {}}})


def test_a_checkpoint_of_another_learner_is_refused(tmp_path: Path) -> None:
    run(tmp_path, learner=toy(size=3), total_steps=8)
    with pytest.raises(
        UserError, match=r"of another learner: the array .*'w'.* is float32\[3, 3\] in it, but .*\[3, 4\]"
    ):
        run(tmp_path, learner=toy(size=4), resume=True)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to"):
        run(tmp_path / "file" / "run")


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """No file can be created in or below the folder. Root, whom permissions do not bind, becomes another user."""
    for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        path.chmod(0o555)
    unprivileged = 65534 if os.geteuid() == 0 else os.geteuid()
    me = os.geteuid()
    os.seteuid(unprivileged)
    try:
        yield
    finally:
        os.seteuid(me)
        for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
            path.chmod(0o755)


# JAX warns when its compilation cache meets the same folder or disk, which it does on a slow machine only.
ON_A_SLOW_MACHINE = pytest.mark.filterwarnings("ignore:Error writing persistent compilation cache")


@ON_A_SLOW_MACHINE
def test_a_read_only_directory_is_refused() -> None:
    """A new run in it, and one that is resumed, whose checkpoint does not change."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        good = run(folder / "run", total_steps=8)
        with read_only(folder):
            with pytest.raises(UserError, match=r"cannot be written to \(Permission denied\)"):
                run(folder / "new")
            with pytest.raises(UserError, match=r"cannot be written to \(Permission denied\)"):
                run(folder / "run", resume=True)
        assert_same(loop.restore(toy(lucky_length=True), folder / "run", [0, 1, 2], "last"), good)


@ON_A_SLOW_MACHINE
@pytest.mark.parametrize("room", [0, 1000, 100_000], ids=["metrics", "checkpoint", "arrays"])
def test_a_full_disk_leaves_the_last_checkpoint_intact(tmp_path: Path, room: int) -> None:
    """No file may grow beyond `room` bytes, which has the effect of a full disk or a quota."""
    learner = toy(size=40_000)
    good = run(tmp_path, learner=learner, total_steps=8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(UserError, match=r"intact|stay as they are"):
            run(tmp_path, learner=learner, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same(loop.restore(learner, tmp_path, [0, 1, 2], "last"), good)
    assert_same(run(tmp_path, learner=learner, resume=True), run(tmp_path / "whole", learner=learner))
    assert_same(rows(tmp_path), rows(tmp_path / "whole"))


def test_total_steps_must_be_countable(tmp_path: Path) -> None:
    for total in (0, 2**31):
        with pytest.raises(UserError, match="total_steps must be between"):
            run(tmp_path, total_steps=total)


def test_metrics_are_valid_json_and_survive_a_cut(tmp_path: Path) -> None:
    run(tmp_path, seeds=range(8), total_steps=20)
    path = tmp_path / "metrics.jsonl"
    whole = run_directory.load_metrics(tmp_path)
    lines = path.read_text().splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    parsed = [json.loads(line, parse_constant=refuse) for line in lines]
    assert any(None in row["return"] for row in parsed)  # NaN where no episode ended
    np.testing.assert_array_equal(
        whole["loss"].astype(np.float32)[:, 0], [np.float32(row["loss"][0]) for row in parsed]
    )
    path.write_text("\n".join(lines)[:-5])
    assert len(run_directory.load_metrics(tmp_path)["steps"]) == len(lines) - 1


def test_run_json_names_the_machine(tmp_path: Path) -> None:
    run(tmp_path, total_steps=4)
    (machine,) = json.loads((tmp_path / "run.json").read_text())
    assert machine["jax"] == jax.__version__
    assert machine["devices"] == ["cpu"]  # the one it used of four
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert head.returncode or machine["commit"].removesuffix("-dirty") == head.stdout.strip()


def test_run_json_keeps_every_process_that_trained(tmp_path: Path) -> None:
    """A process that finds the run complete adds nothing."""

    def devices() -> list[list[str]]:
        return [machine["devices"] for machine in json.loads((tmp_path / "run.json").read_text())]

    run(tmp_path, total_steps=20)
    run(tmp_path, total_steps=20, resume=True)
    assert devices() == [["cpu"]]
    run(tmp_path, total_steps=40, resume=True, mesh=parallel.make_mesh(3, 1, jax.devices()[:3]))
    assert devices() == [["cpu"], ["cpu"] * 3]


def events(run_dir: Path) -> list[Event]:
    """The events that TensorBoard shows: a new session withdraws what an earlier one wrote from its first step on."""
    files = sorted((run_dir / "tensorboard").iterdir(), key=lambda path: int(path.name.rpartition(".")[2]))
    shown: list[Event] = []
    for path in files:
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
            if event.session_log.status:
                shown = [e for e in shown if e.step < event.step]
            elif event.summary.value:
                shown.append(event)
    return shown


def test_tensorboard_shows_the_means_over_seeds(tmp_path: Path) -> None:
    run(tmp_path, learner=toy(), evaluate=peak_at_ten)
    metrics = run_directory.load_metrics(tmp_path)
    loss = [v.simple_value for e in events(tmp_path) for v in e.summary.value if v.tag == "training/loss"]
    np.testing.assert_allclose(loss, metrics["loss"][1:].mean(1), rtol=1e-6)
    assert [e.step for e in events(tmp_path)] == metrics["steps"][:, 0].tolist()


def test_a_mean_in_tensorboard_is_over_finite_seeds_at_the_step_of_the_slowest(tmp_path: Path) -> None:
    """A seed that has diverged is NaN; where all have, nothing is shown."""
    row = {"steps": [8, 4, 8], "loss": [2.0, np.nan, 5.0], "return": [np.nan, np.inf, np.nan], "seconds": 1.0}
    with metrics_writer.MetricsWriter(tmp_path, keep=0, steps=0) as writer:
        writer.write({name: np.asarray(x, np.float32) if name != "steps" else np.array(x) for name, x in row.items()})
    (event,) = events(tmp_path)
    assert event.step == 4
    assert [(value.tag, value.simple_value) for value in event.summary.value] == [("training/loss", 3.5)]
    stored = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert stored == row | {"loss": [2.0, None, 5.0], "return": [None, None, None]}


def test_an_evaluation_counts_once_on_devices_that_share_a_batch() -> None:
    """All of them evaluate all episodes, so a sum over devices would be too large by their number."""
    learner = toy()
    mesh = parallel.make_mesh(1, 4, jax.devices()[:4], 4)
    keys = jax.vmap(advance.seed_keys)(jnp.arange(1))
    state = advance.compile_init(learner)(keys.init)

    def evaluate(state: toy_learner.ToyState, key: jax.Array) -> dict[str, jax.Array]:
        return {
            "count": parallel.collectives.psum(jnp.float32(3.0)),
            "devices": jnp.int32(jax.lax.axis_size(parallel.DATA)),
        }

    programs = advance.compile_programs(learner, evaluate, state, mesh)
    keys, state = parallel.place((keys.run, state), (parallel.PER_SEED, parallel.state_specs(state, mesh)), mesh)
    metrics = programs.evaluate(keys, state)
    assert [float(x[0]) for x in metrics.values()] == [3.0, 4.0]
