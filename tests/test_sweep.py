"""Sweeps: what a grid means, that a point of it is the run of its own, waves, memory, and runs that diverge."""

from __future__ import annotations

import io
import itertools
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from refusals import refused
from rich.console import Console

from jaxpg import parallel, report, values
from jaxpg.cli import commands
from jaxpg.cli.main import main
from jaxpg.cli.parser import make_parser
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments import grid, sweep
from jaxpg.experiments.build import build
from jaxpg.report import heatmap
from jaxpg.report.statistics import Estimate
from jaxpg.training import memory, run_directory, seed_keys
from jaxpg.training.loop import TrainingHooks

SMALL = [
    "--steps",
    "2000",
    "--set",
    "evaluation_episodes=8",
    "--set",
    "evaluations=2",
    "--quiet",
]


def test_a_grid_is_lists_and_ranges() -> None:
    read = grid.parse_grid(
        ["a=1e-4:1e-2:log:3", "b=0:1:linear:5", "c=0.1, 0.2,0.1", "d=tanh,relu", "e=[4],[4, 4]", "f=3", "g=none, 0.3"]
    )
    assert read == {
        "a": [1e-4, 1e-3, 1e-2],
        "b": [0.0, 0.25, 0.5, 0.75, 1.0],
        "c": [0.1, 0.2],
        "d": ["tanh", "relu"],
        "e": [[4], [4, 4]],
        "f": [3],
        "g": ["none", 0.3],
    }
    assert grid.parse_grid(["kind=m:f,m:g,m:h"]) == {"kind": ["m:f", "m:g", "m:h"]}


def test_a_range_has_its_ends_and_as_many_values_as_asked_for() -> None:
    """A discount of 0.9999 is not 1."""
    assert grid.parse_grid(["gamma=0.99:0.9999:linear:5"])["gamma"] == [0.99, 0.992475, 0.99495, 0.997425, 0.9999]
    assert grid.parse_grid(["gamma=0.9991:0.9995:linear:5"])["gamma"] == [0.9991, 0.9992, 0.9993, 0.9994, 0.9995]


@pytest.mark.parametrize("text", ["a", "=1", "a=", "a=1:2:log:1", "a=0:1:log:3", "a=1:2:cubic:3", "a=x:1:log:3"])
def test_what_is_no_grid_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--grid takes name=value|A range is low:high:log:n"):
        grid.parse_grid([text])


def test_numbers_share_a_program_and_shapes_do_not() -> None:
    chosen = {"learning_rate": [0.1, 0.2], "num_envs": [4, 8], "gamma": [0.9, 1]}
    programs = grid.plan_grid("catch", "a2c", {}, chosen)
    assert [p.config.settings["num_envs"] for p in programs] == [4, 8]
    assert all(p.traced == ("learning_rate", "gamma") for p in programs)
    assert [p.places for p in programs] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert programs[0].points[1] == {"learning_rate": 0.1, "num_envs": 4, "gamma": 1.0}
    mixed = grid.plan_grid("catch", "ppo", {}, {"value_clip": ["none", 0.2]})
    assert [(p.traced, len(p.points)) for p in mixed] == [((), 1), ((), 1)]
    with pytest.raises(UserError, match=r"no setting 'gama'.*'gamma'"):
        grid.plan_grid("catch", "a2c", {}, {"gama": [0.9]})
    with pytest.raises(UserError, match="gamma must be at most 1"):
        grid.plan_grid("catch", "a2c", {}, {"gamma": [0.9, 1.1]})


@pytest.mark.parametrize("algorithm", configs.ALGORITHMS)
def test_every_number_of_every_algorithm_may_be_swept(algorithm: str) -> None:
    """All at once: the step is traced with them, though for no program's sake."""
    text = "num_envs" not in configs.algorithm_options(algorithm)
    overrides = {"num_envs": 8} if not text else {"batch_size": 8}
    read = {"dr_grpo": {"max_length": 5}, "reinforce_baseline": {"baseline_kind": "running"}}
    required: dict[str, Any] = read.get(algorithm, {})
    task = "summarise_toy" if text else "frozen_lake" if algorithm in values.TABULAR_ALGORITHMS else "catch"
    if algorithm == "process_reward_model":  # completions need steps
        task = "modular_chain"
    settings = configs.resolve_config(task, algorithm, overrides | required).settings
    options = configs.algorithm_options(algorithm)
    numbers = {n for n, x in settings.items() if type(x) is float or "float" in str(options[n].kind)}
    assert {"learning_rate"} <= numbers
    chosen = {n: [settings[n] or {"dual_clip": 3.0}.get(n, 0.1)] for n in numbers}
    (program,) = grid.plan_grid(task, algorithm, overrides | required, chosen)
    assert set(program.traced) == numbers
    learner = sweep.swept_experiment(program, shards=1).learner
    state = jax.eval_shape(learner.init, jax.random.key(0))
    after, metrics = jax.eval_shape(learner.step, state, jax.random.key(0))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert metrics["learning_rate"].shape == ()


def scores(directory: Path) -> np.ndarray:
    return np.array([point["final"] for point in json.loads((directory / "sweep.json").read_text())["points"]], float)


SEEDS = ["--seeds", "2", "--seed", "4"]
COMMAND = ["sweep", "catch", "a2c", *SEEDS, *SMALL, "--grid", "learning_rate=0.001,0.01,0.1", "num_envs=4,8"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three step sizes, two seeds and two shapes; stopped in the second program, refused twice, and resumed."""
    out, train_wave = tmp_path_factory.mktemp("sweep") / "all", sweep.train_wave

    def stopped_early(group: grid.CompiledGroup, *arguments: object) -> None:
        if group.config.settings["num_envs"] == 8:
            raise KeyboardInterrupt
        train_wave(group, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "train_wave", stopped_early)
        assert main([*COMMAND, "--out", str(out)]) == 130
    before = (out / "program-000" / "wave-000" / run_directory.METRICS).read_bytes()
    assert main([*COMMAND, "--out", str(out)]) == 2
    assert main([*COMMAND[:-1], "num_envs=4", "--out", str(out), "--resume"]) == 2
    assert main([*COMMAND, "--out", str(out), "--resume"]) == 0
    assert (out / "program-000" / "wave-000" / run_directory.METRICS).read_bytes() == before
    return out


def test_every_point_is_the_run_of_its_own(swept: Path, tmp_path: Path) -> None:
    """The same as `train` with the setting of that point, a traced one and one of its shape.

    Returns of a few episodes are few numbers and may agree by chance; entropies do not.
    """
    final = scores(swept)
    assert final.shape == (6, 2)
    assert np.isfinite(final).all()
    assert len(np.unique(final)) > 3
    point = ["--set", "learning_rate=0.01", "--set", "num_envs=8"]
    assert main(["train", "catch", "a2c", *SEEDS, *SMALL, *point, "--out", str(tmp_path / "run")]) == 0
    alone = run_directory.load_metrics(tmp_path / "run")
    np.testing.assert_allclose(alone["evaluation_return"][-1], final[3], atol=1e-6)
    wave = run_directory.load_metrics(swept / "program-001" / "wave-000")
    np.testing.assert_allclose(alone["entropy"], wave["entropy"][:, 2:4], atol=1e-5)


@pytest.mark.parametrize(
    ("task", "algorithm", "overrides", "grid_of"),
    [
        ("frozen_lake", "q_learning", {}, {"initial_value": [-20.0, 5.0], "learning_rate": [0.1, 0.2]}),
        (
            "sort",
            "rlhf",
            {"reference_kl_target": 1.0, "num_envs": 8, "network.width": 16, "network.layers": 1},
            {"kl_coefficient": [0.01, 0.5]},
        ),
        ("catch", "a2c", {"num_envs": 4}, {"learning_rate": [1e-3, 1e-2]}),
    ],
)
def test_every_point_begins_as_the_run_of_its_own(
    task: str, algorithm: str, overrides: dict[str, Any], grid_of: dict[str, list[Any]]
) -> None:
    """To the last bit, also where `init` reads a setting that is swept: the first table, the weight that is steered."""
    (group,) = grid.plan_grid(task, algorithm, overrides, grid_of)
    learner, keys = sweep.swept_experiment(group, shards=1).learner, jax.vmap(seed_keys)(jnp.arange(2)).init
    for point in (group.points[0], group.points[-1]):
        settings = {name: jnp.full(2, point[name]) for name in group.traced}
        begun = jax.lax.map(learner.init, keys)
        begun = jax.jit(jax.vmap(learner.with_policy))(begun, sweep.InitialState(settings, keys, ()))
        alone = build(replace(group.config, settings=group.config.settings | point), 1).learner
        chex.assert_trees_all_equal(begun.learner, jax.lax.map(alone.init, keys))
        assert all(not x.weak_type for x in jax.tree.leaves(begun.learner))


def test_a_wave_is_resumed_by_its_sweep_alone(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("resume", "eval"):
        sentence = refused(capsys, command, str(swept / "program-000" / "wave-000"))
        assert "holds runs of a sweep side by side. The sweep goes on with jaxpg resume" in sentence


def test_a_wave_that_goes_on_does_not_read_what_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that a sweep began with may be gone by then."""
    read: list[str | None] = []
    group = group_of(learning_rate=[0.001, 0.01])
    experiment = sweep.swept_experiment(group, 1)
    group = group._replace(config=replace(group.config, initial="gone"))

    def begins_with(config: configs.Config, experiment: object) -> tuple[()]:
        read.append(config.initial)
        return ()

    monkeypatch.setattr(sweep, "build", lambda config, models: None)
    monkeypatch.setattr(sweep, "initial_policies", begins_with)
    monkeypatch.setattr(sweep, "train", lambda *arguments, **settings: None)

    def train_wave() -> None:
        mesh = parallel.make_mesh(4, 1, jax.devices()[:1])
        sweep.train_wave(group, experiment, sweep.runs_of_group(group), tmp_path, mesh, TrainingHooks())

    train_wave()
    assert read == ["gone"]
    checkpoint = tmp_path / run_directory.CHECKPOINTS / f"{1:012d}" / run_directory.MANIFEST
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("{}")
    train_wave()
    assert read == ["gone"]


def test_it_leaves_a_table_a_picture_and_the_best_as_a_task(swept: Path) -> None:
    best = configs.resolve_config(swept / "best.toml", "a2c")
    points = json.loads((swept / "sweep.json").read_text())["points"]
    settings = points[int(np.argmax(scores(swept).mean(1)))]["settings"]
    assert {name: best.settings[name] for name in settings} == settings
    assert best.total_steps == 2000
    assert (swept / "sweep.png").stat().st_size > 10_000


@pytest.mark.parametrize(("anneal", "longer"), [("total_steps", 9000), ("none", None)])
def test_the_best_of_a_sweep_anneals_over_all_steps_that_it_is_trained_for(
    anneal: str, longer: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the sweep did."""
    monkeypatch.setattr(commands, "train_sweep", lambda *_, **__: np.array([[1.0, 1.0], [2.0, 2.0]]))
    words = ["--steps", "3000", "--seeds", "2", "--grid", "learning_rate=0.001,0.01", "--set", f"anneal_steps={anneal}"]
    assert main(["sweep", "cartpole", "ppo", *words, "--out", str(tmp_path), "--quiet"]) == 0
    best = tmp_path / "best.toml"
    same, again = (configs.resolve_config(best, "ppo", x).settings for x in ({}, {"total_steps": 9000}))
    assert (same["learning_rate"], same["anneal_steps"]) == (0.01, longer and 3000)
    assert (again["learning_rate"], again["anneal_steps"]) == (0.01, longer)


def test_the_best_of_a_sweep_is_named_with_a_command_that_trains_new_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained as it is, the config would repeat the runs that it was selected by."""
    monkeypatch.setattr(commands, "train_sweep", lambda *_, **__: np.array([[1.0, 1.0], [2.0, 2.0]]))
    words = ["--seeds", "2", "--seed", "5", "--grid", "learning_rate=0.001,0.01", "--out", str(tmp_path / "a b")]
    assert main(["sweep", "cartpole", "ppo", *words, "--quiet"]) == 0
    (command,) = re.findall(r"On new ones: jaxpg train (.*)", capsys.readouterr().out)
    assert main(["show", *shlex.split(command)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "seeds [7, 8] command line" in shown
    assert "learning_rate 0.01 " in shown


@pytest.mark.parametrize(
    ("point", "sentence"),
    [
        ((0.01, 1), ""),
        ((0.1, 1), "Its learning_rate is the largest of the grid: a better point may lie beyond."),
        ((0.001, 3), "Its learning_rate is the smallest of the grid and its epochs is the largest of the grid: a"),
    ],
)
def test_a_best_point_at_an_end_of_the_grid_is_said(point: tuple[float, int], sentence: str) -> None:
    grid = {"learning_rate": [0.1, 0.001, 0.01], "epochs": [0, 1, 3], "clip": [0.1, 0.2], "kl": ["a", "b", "c"]}
    said = report.beyond_the_grid(grid, dict(zip(grid, (*point, 0.2, "c"), strict=True)))
    assert said.startswith(sentence)
    assert bool(said) == bool(sentence)


def group_of(**grids: list[float]) -> grid.CompiledGroup:
    overrides = {"num_envs": 4, "total_steps": 500, "seeds": [0, 1], "evaluations": 1, "evaluation_episodes": 4}
    return grid.plan_grid("catch", "a2c", overrides, grids)[0]


def test_waves_fit_the_memory_and_are_all_alike() -> None:
    learner = sweep.swept_experiment(group_of(gamma=[0.9]), shards=1).learner
    mesh = parallel.make_mesh(2, 1, jax.devices()[:2])
    needed = {n: sweep.memory_per_device(learner, n, mesh) for n in (2, 10)}
    assert needed[10] > needed[2] > 1000
    assert sweep.wave_size(learner, 9, mesh, 1e12) == 10
    assert sweep.wave_size(learner, 9, mesh, needed[10] - 1) in (4, 6)
    assert sweep.wave_size(learner, 9, mesh, needed[2]) == 2
    with pytest.raises(UserError, match=r"One run takes .* MiB on a device, and .* may be used: .* raise --memory"):
        sweep.wave_size(learner, 9, mesh, needed[2] - 1)
    runs = [sweep.SweepRun(point, 0) for point in range(9)]
    waves = sweep.split_waves(runs, 4)
    assert [len(wave) for wave in waves] == [4, 4, 4]
    assert [run for wave in waves for run in wave] == [*runs, runs[-1], runs[-1], runs[-1]]


def test_memory_that_is_given_is_that_of_all_devices() -> None:
    assert memory.memory_limit(parallel.make_mesh(2, 2, jax.devices()[:4]), 3.0) == 3 * 2**28


def test_the_least_memory_is_all_that_the_largest_loop_returns() -> None:
    """Of a loop around others; a device has its part of a whole array, and all of what a program per device makes."""

    def program(x: jax.Array) -> jax.Array:
        def outer(carry: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            return lax.fori_loop(0, 3, lambda _, y: y + 1.0, carry), carry

        carry, stacked = lax.scan(outer, x, length=10)
        return carry + stacked.sum(0)

    mesh = parallel.make_mesh(1, 4, jax.devices()[:4])
    split = PartitionSpec(parallel.collectives.DATA)
    spread = parallel.spread(program, mesh, in_specs=(split,), out_specs=split)
    x, one = jnp.zeros(8, jnp.float32), parallel.make_mesh(1, 1, jax.devices()[:1])
    assert memory.least_bytes(jax.make_jaxpr(program)(x).jaxpr, one) == 4 * (8 + 10 * 8)
    assert memory.least_bytes(jax.make_jaxpr(program)(x).jaxpr, mesh) == (8 + 10 * 8)
    assert memory.least_bytes(jax.make_jaxpr(spread)(x).jaxpr, mesh) == 4 * (2 + 10 * 2)


def test_too_little_memory_is_told_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "--out", str(tmp_path / "run"), "--memory", "1e-6"]) == 2
    assert "One run takes" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_that_diverges_is_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step size of 1e38 spoils its runs, and the others reach their end."""
    command = ["sweep", "catch", "a2c", "--seeds", "2", *SMALL, "--set", "num_envs=4", "--out", str(tmp_path)]
    assert main([*command, "--grid", "learning_rate=0.01,1e38", "--grid", "max_grad_norm=none"]) == 0
    final = scores(tmp_path)
    assert np.isfinite(final[0]).all()
    assert np.isnan(final[1]).all()
    assert "diverged" in capsys.readouterr().out
    assert run_directory.load_metrics(tmp_path / "program-000" / "wave-000")["steps"][-1, :2].min() >= 2000


@pytest.mark.parametrize(
    "name", ["evaluation_greedy=true,false", "evaluations=1,2", "threshold=1,2", "total_steps=10,20"]
)
def test_how_a_score_is_measured_is_no_point_of_a_grid(name: str) -> None:
    with pytest.raises(UserError, match=f"--grid cannot have {name.partition('=')[0]}, which is the same in all"):
        grid.parse_grid([name])


def test_a_sweep_goes_on_with_other_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Waves keep their size, of which as many devices as divide it take part; and it goes on as it was begun."""
    command = [*COMMAND, "--seeds", "3", "--out", str(tmp_path)]
    assert main([*command, "--devices", "1"]) == 0
    done = scores(tmp_path)
    for devices in ([], ["--devices", "2"]):  # 2 share the environments of each run, whose rounding is another
        shutil.rmtree(tmp_path / "program-000" / "wave-000")
        assert main(["resume", str(tmp_path), "--quiet", *devices]) == 0
        assert np.isfinite(scores(tmp_path)).all()
        assert devices or np.array_equal(scores(tmp_path), done)
    assert "A sweep takes no --wandb" in refused(capsys, "resume", str(tmp_path), "--wandb")
    swept = next(iter(json.loads((tmp_path / "sweep.json").read_text())["grid"]))
    assert "is in --grid and is also set" in refused(capsys, *command, "--resume", "--set", f"{swept}=0.5")


def test_no_digit_of_a_sweep_is_cut_off() -> None:
    points = {f"environment_settings.number_{i}": [0.000316228, 0.00316228] for i in range(4)}
    table = heatmap.sweep_table(points, np.random.default_rng(0).normal(size=(16, 5)), title="x")
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown


def test_points_with_the_same_middle_half_are_ranked_by_their_mean(tmp_path: Path) -> None:
    """Means 475, 500, none, 538 and 500, but middle halves at 500, 500, none, 400 and 500."""
    finals = np.full((5, 8), 500.0)
    finals[0, 0], finals[2, 0], finals[3] = 300.0, np.nan, [400.0] * 7 + [1500.0]
    assert heatmap.ranked(finals) == [1, 4, 0, 3, 2]
    rates = {"learning_rate": [0.1, 0.2, 0.3, 0.4, 0.5]}
    assert report.write_sweep(rates, finals, tmp_path, title="", details={}) == {"learning_rate": 0.2}


@pytest.mark.parametrize(("seeds", "heading"), [(2, "final return, IQM"), (8, "final return, IQM [95% interval]")])
def test_a_map_says_what_its_cells_have(seeds: int, heading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few seeds have no interval; and the heading fits into the picture, however small the grid."""
    drawn = []
    monkeypatch.setattr(heatmap, "save", lambda figure, *rest: drawn.append(figure))
    grid = {"learning_rate": [0.1, 0.2], "num_envs": [4, 8]}
    scores = np.random.default_rng(0).normal(size=(4, seeds))
    heatmap.sweep_figure(grid, scores, "map.png", title="actor_critic_td on mountain_car_continuous, 8 seeds")
    (figure,) = drawn
    figure.draw_without_rendering()
    title = figure._suptitle
    assert title.get_text().splitlines()[1] == heading
    assert title.get_window_extent().x1 <= figure.bbox.x1


def test_each_cell_of_a_map_is_its_point_and_a_frame_is_around_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 x 3 x 2 points, the last setting varying fastest: two maps, of three columns and two rows each."""
    drawn = []
    monkeypatch.setattr(heatmap, "save", lambda figure, *rest: drawn.append(figure))
    grid = {"gamma": [0.9, 0.99], "num_envs": [4, 8, 16], "clip": [0.1, 0.2]}
    points = list(itertools.product(*grid.values()))
    scores = [7 * place % 12 + 1 for place in range(12)]  # the best is the one at place 5
    heatmap.sweep_figure(grid, np.repeat(np.float64(scores)[:, None], 5, 1), "map.png", title="")
    shown: dict[tuple[float, ...], list[float]] = {}
    framed = []
    for axes in drawn[0].axes:
        gamma = float(axes.get_title().removeprefix("gamma "))
        across, down = (
            [float(label.get_text()) for label in labels] for labels in (axes.get_xticklabels(), axes.get_yticklabels())
        )
        for text in axes.texts:  # the value, and its interval below
            column, row = map(round, text.get_position())
            numbers = [float(number) for number in re.findall(r"[\d.]+", text.get_text())]
            shown.setdefault((gamma, across[column], down[row]), []).extend(numbers)
        for (row, column), value in np.ndenumerate(axes.images[0].get_array()):
            shown[gamma, across[column], down[row]].append(value)
        for patch in axes.patches:
            column, row = map(round, patch.get_center())
            framed.append((gamma, across[column], down[row]))
    assert shown == {point: [score] * 4 for point, score in zip(points, scores, strict=True)}
    assert framed == [points[5]]


def test_a_row_of_the_table_is_a_point_with_its_means_and_what_diverged() -> None:
    scores = np.array([[1.0, 1, 1, 1, 6], [5.0, 5, 5, 5, 5], [9.0, 9, np.nan, 9, np.nan]])
    table = heatmap.sweep_table({"learning_rate": [0.1, 0.2, 0.3]}, scores, title="")
    columns = {str(column.header): [cell.plain for cell in column.cells] for column in table.columns}
    assert columns["learning_rate"] == ["0.2", "0.1", "0.3"]
    assert [cell.partition(" ")[0] for cell in columns["IQM [95%]"]] == ["5.000", "1.000", "–"]
    assert columns["mean"] == ["5.000", "2.000", "–"]
    assert columns["diverged"] == ["", "", "2"]


def test_a_curve_of_equal_scores_is_drawn_and_goes_from_left_to_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounded mean of equal scores may be beside their interval, by how they lie in memory: on either side here."""
    drawn, value = [], np.array([3.0, 1.0, 2.0])
    estimate = Estimate(value, np.nextafter(value, [9, 9, 0]), np.nextafter(value, [9, 9, 0]))
    monkeypatch.setattr(heatmap, "bootstrap", lambda scores: estimate)
    monkeypatch.setattr(heatmap, "save", lambda figure, *rest: drawn.append(figure))
    scores = np.repeat(value[:, None], 8, axis=1)
    heatmap.sweep_figure({"learning_rate": [1e-2, 1e-4, 1e-3]}, scores, "curve.png", title="")
    line = drawn[0].axes[0].lines[0]
    assert line.get_xdata().tolist() == [1e-4, 1e-3, 1e-2]
    assert line.get_ydata().tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("values", "line"), [([0.9, 0.99, 1.0], "-"), (["tanh", "relu", "swish"], "None"), ([False, True, 1], "None")]
)
def test_between_settings_that_are_no_numbers_is_no_line(
    values: list[object], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(heatmap, "save", lambda figure, *rest: drawn.append(figure))
    heatmap.sweep_figure({"setting": values}, np.arange(6.0).reshape(3, 2), "curve.png", title="")
    points = drawn[0].axes[0].lines[0]
    assert (points.get_marker(), points.get_linestyle()) == ("o", line)


@pytest.mark.parametrize("greatest", [1e-2, 1e38])
def test_no_point_of_a_logarithmic_curve_is_cut_off(greatest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(heatmap, "save", lambda figure, *rest: drawn.append(figure))
    heatmap.sweep_figure({"learning_rate": [1e-4, 1e-3, greatest]}, np.ones((3, 2)), "curve.png", title="")
    drawn[0].draw_without_rendering()
    (axes,) = drawn[0].axes
    first, last = axes.transAxes.inverted().transform(axes.transData.transform([(1e-4, 1.0), (greatest, 1.0)]))[:, 0]
    assert 0.03 < first < last < 0.97


def test_long_values_below_a_map_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(heatmap, "save", lambda figure, *rest: drawn.append(figure))
    values = [[(64, 64), (128, 128, 128), (1024, 1024, 1024, 1024)], np.geomspace(1e-5, 1e-2, 8).tolist(), [1, 2, 3]]
    for across in values:
        scores = np.random.default_rng(0).normal(size=(2 * len(across), 5))
        heatmap.sweep_figure({"setting": across, "gamma": [0.9, 0.99]}, scores, "map.png", title="")
        figure = drawn.pop()
        figure.draw_without_rendering()
        (axes,) = figure.axes
        boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
        assert axes.get_position().height * figure.get_figheight() > 0.9
    assert axes.get_xticklabels()[0].get_rotation() == 0  # short ones lie


@pytest.mark.parametrize("scale", [1e-9, 1e-6, 1e6])
def test_the_axis_of_a_curve_has_no_offset(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(heatmap, "save", lambda figure, *rest: drawn.append(figure))
    scores = 500 + scale * np.random.default_rng(0).normal(size=(3, 2))
    heatmap.sweep_figure({"learning_rate": [0.1, 0.2, 0.3]}, scores, "curve.png", title="")
    drawn[0].draw_without_rendering()
    assert drawn[0].axes[0].yaxis.get_offset_text().get_text() == ""


def test_where_a_run_diverged_the_picture_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A curve has a cross below the point, a map a word in the cell; without such a run neither has any."""
    drawn = []
    monkeypatch.setattr(heatmap, "save", lambda figure, *rest: drawn.append(figure))
    scores = np.random.default_rng(0).normal(size=(4, 8))
    for diverged in (False, True):
        if diverged:
            scores[2, 0] = np.nan
        heatmap.sweep_figure({"learning_rate": [0.1, 0.2, 0.3, 0.4]}, scores, "curve.png", title="")
        heatmap.sweep_figure({"learning_rate": [0.1, 0.2], "num_envs": [4, 8]}, scores, "map.png", title="")
        curve, cells = (figure.axes[0] for figure in drawn[-2:])
        crosses = [line.get_xdata().tolist() for line in curve.lines if line.get_marker() == "x"]
        assert crosses == ([[0.3]] if diverged else [])
        assert curve.get_title("right") == ("× a run diverged" if diverged else "")
        words = [text.get_position() for text in cells.texts if text.get_text() == "diverged"]
        assert words == ([(0, 1)] if diverged else [])


def test_where_all_diverge_there_is_no_best(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Runs of every point diverged"):
        report.write_sweep({"gamma": [0.9]}, np.full((1, 2), np.nan), tmp_path, title="", details={})


def test_a_sweep_without_a_directory_does_not_resume(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--resume"]) == 2
    assert "--resume needs --out" in capsys.readouterr().err


def test_a_sweep_is_one_process() -> None:
    several = ["--distributed", "--coordinator", "localhost:1", "--processes", "1", "--process", "0", "--out", "x"]
    with pytest.raises(UserError, match="A sweep is one process"):
        commands.run_training(make_parser().parse_args([*COMMAND, *several]))


def test_the_waves_that_follow_are_those_of_the_group_and_of_the_runs_after_it():
    """Two groups of 10 and 6 runs in waves of 4: three waves and, as runs, one and a half."""
    assert [sweep.waves_after([10, 6], 0, wave, 4) for wave in range(3)] == [3.5, 2.5, 1.5]
    assert sweep.waves_after([10, 6], 1, 0, 6) == 0
