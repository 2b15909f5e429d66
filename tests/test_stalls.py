"""What keeps a run from learning, told from rows made by hand, and what is not told."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from jaxpg.runs.progress import StallWarnings
from jaxpg.training.run_directory import stack_rows
from jaxpg.training.stalls import CAUSES, stalls

ROWS, STEP = 100, 10
NOISE = np.random.default_rng(0).standard_normal((ROWS, 4))


def table(rows: int = ROWS, **metrics):
    """The metrics of four seeds, STEP steps a row; a metric is an array [ROWS, 4], [ROWS] or a number."""
    columns = {name: np.broadcast_to(np.asarray(x, float).T, (4, ROWS)).T for name, x in metrics.items()}
    columns["steps"] = np.broadcast_to(STEP * np.arange(1, ROWS + 1)[:, None], (ROWS, 4))
    columns["iterations"] = np.ones((ROWS, 4))
    return {name: x[:rows] for name, x in columns.items()}


def causes(metrics, **settings):
    return list(stalls(metrics, total_steps=ROWS * STEP, **settings))


RISING = 20 + 5 * NOISE + np.linspace(0, 100, ROWS)[:, None]
FLAT = 20 + 5 * NOISE


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"return": FLAT, "advantage_std": 0.0}, ["signal"]),
        ({"return": 0.0, "truncated": 1.0, "advantage_std": 0.1, "accuracy": 0.0}, ["truncated"]),
        ({"return": 0.0, "truncated": 0.99, "advantage_std": 0.1, "accuracy": 0.0}, ["return"]),
        ({"return": FLAT, "entropy": 1e-5, "advantage_std": 0.1}, ["entropy", "return"]),
        ({"return": -200.0, "entropy": 0.7, "advantage_std": 0.1}, ["return"]),
        ({"return": FLAT, "entropy": 0.7, "advantage_std": 1.0}, ["return"]),
        ({"return": FLAT[::-1] - np.linspace(0, 10, ROWS)[:, None], "advantage_std": 1.0}, ["return"]),  # it fell
    ],
)
def test_a_run_that_learns_nothing_is_told_why(metrics, expected):
    assert causes(table(**metrics)) == expected


@pytest.mark.parametrize(
    ("metrics", "settings"),
    [
        ({"return": RISING, "advantage_std": 0.0, "entropy": 1e-6}, {}),  # it has learned, and is at its best
        ({"return": FLAT, "advantage_std": 0.0, "entropy": 1e-6}, {"threshold": 15.0}),  # solved from the start
        ({"return": 1.0, "accuracy": 1.0, "advantage_std": 0.0, "truncated": 0.0}, {}),
        ({"return": RISING, "entropy": -1.0, "advantage_std": 1.0}, {}),  # a continuous policy
        ({"return": np.nan, "advantage_std": 1.0}, {}),  # no episode has ended
        ({"loss": 1.0}, {}),  # fine-tuning
    ],
)
def test_a_run_that_learns_or_has_learned_is_not_warned(metrics, settings):
    assert causes(table(**metrics), **settings) == []


def test_where_nothing_is_trained_on_the_entropy_is_not_to_blame():
    rows = {"return": FLAT, "advantage_std": 0.0, "entropy": 0.0}
    assert causes(table(**rows, updates=0.0)) == ["signal"]
    assert causes(table(**rows, updates=4.0)) == ["signal", "entropy"]


def test_an_entropy_below_zero_is_not_gone():
    assert causes(table(**{"return": FLAT, "entropy": -3.0})) == ["return"]


def test_the_evaluation_counts_where_training_explores():
    """Epsilon-greedy returns stay low while the greedy policy becomes good."""
    evaluated = np.full(ROWS, np.nan)
    evaluated[[0, 50, 99]] = 20, 60, 100
    metrics = table(**{"return": FLAT, "evaluation_return": evaluated})
    metrics["iterations"] = np.where(np.arange(ROWS)[:, None] == 0, 0, np.ones((ROWS, 4)))
    assert causes(metrics) == []
    for last in (20.0, 21.0):  # a row has a standard deviation of 5
        evaluated[[50, 99]] = last
        metrics["evaluation_return"] = np.broadcast_to(evaluated[:, None], (ROWS, 4))
        assert causes(metrics) == ["return"]


def test_an_evaluation_in_training_is_none_of_before():
    """A run that was not evaluated at step 0 is judged by its returns alone."""
    evaluated = np.full(ROWS, np.nan)
    evaluated[[0, 99]] = 20, 100
    assert causes(table(**{"return": FLAT, "evaluation_return": evaluated})) == ["return"]


@pytest.mark.parametrize(("accuracy", "expected"), [(0.98, ["signal", "truncated"]), (0.995, [])])
def test_a_task_is_solved_with_99_of_100_answers_right(accuracy, expected):
    rows = {"return": 0.0, "truncated": 1.0, "advantage_std": 0.0}
    assert causes(table(**rows, accuracy=accuracy)) == expected


@pytest.mark.parametrize(("rows", "expected"), [(10, []), (19, []), (20, ["signal"]), (100, ["signal"])])
def test_a_fifth_of_the_run_has_to_be_over(rows, expected):
    assert causes(table(rows, **{"return": 0.0, "advantage_std": 0.0})) == expected


def test_a_return_with_noise_is_judged_from_the_middle_of_the_run_on():
    assert causes(table(49, **{"return": FLAT, "advantage_std": 1.0})) == []
    assert causes(table(60, **{"return": FLAT, "advantage_std": 1.0})) == ["return"]


def test_signal_that_comes_back_within_the_window_ends_the_alarm():
    spread = np.zeros(ROWS)
    spread[90] = 0.5
    assert causes(table(**{"return": RISING[::-1], "advantage_std": spread})) == ["return"]


def test_few_rows_say_nothing():
    metrics = {name: x[::12] for name, x in table(**{"return": 0.0, "advantage_std": 0.0}).items()}
    assert causes(metrics) == []


@pytest.mark.parametrize(("stuck", "expected"), [(1, []), (2, ["signal"]), (4, ["signal"])])
def test_half_of_the_seeds_have_to_be_stuck(stuck, expected):
    spread = np.ones((ROWS, 4))
    spread[:, :stuck] = 0.0
    assert causes(table(**{"return": np.where(spread == 0, FLAT, RISING), "advantage_std": spread})) == expected


def rows_of(metrics):
    return [{name: x[i] for name, x in metrics.items()} | {"seconds": 1.0} for i in range(len(metrics["steps"]))]


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"return": FLAT, "advantage_std": 0.0}, ["signal"]),
        ({"return": 0.0, "truncated": 1.0, "advantage_std": 0.1, "accuracy": 0.0}, ["truncated"]),
        ({"return": FLAT, "entropy": 1e-5, "advantage_std": 0.1}, ["entropy", "return"]),
        ({"return": FLAT, "advantage_std": 0.0, "entropy": 0.0, "updates": 0.0}, ["signal"]),
        ({"return": 1.0, "accuracy": 1.0, "advantage_std": 0.0}, []),
        ({"return": FLAT, "evaluation_return": 20.0 + np.arange(ROWS)}, []),
    ],
)
def test_what_is_said_in_training_needs_no_other_metrics_than_it_reads(metrics, expected):
    console, rows = Console(file=io.StringIO(), width=1000), table(**metrics)
    rows["iterations"] = np.where(np.arange(ROWS)[:, None] == 0, 0, np.ones((ROWS, 4)))
    warn = StallWarnings(console, ROWS * STEP, None)
    for row in rows_of(rows):
        warn(row)
    said = console.file.getvalue()
    assert [cause for cause, (_, sentence) in CAUSES.items() if sentence.partition("{")[0] in said] == expected


def test_each_cause_is_said_once_and_not_again_after_a_resume():
    rows = rows_of(table(**{"return": 0.0, "advantage_std": 0.0}))
    console = Console(file=io.StringIO(), width=1000)
    warn = StallWarnings(console, ROWS * STEP, None)
    for row in rows[:50]:
        warn(row)
    (line,) = console.file.getvalue().splitlines()
    assert line.startswith("Warning: For a fifth of the run all advantages have been 0")
    assert "(0 on average)" in line
    assert "signal" in stalls(stack_rows(rows[:20]), total_steps=ROWS * STEP)  # and no later
    resumed = StallWarnings(console, ROWS * STEP, None, rows[:50])
    for row in rows[50:]:
        resumed(row)
    assert len(console.file.getvalue().splitlines()) == 1
