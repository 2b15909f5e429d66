from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
from html.parser import HTMLParser
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from jaxpg import report
from jaxpg.cli.commands import differences, whole_iterations
from jaxpg.errors import UserError
from jaxpg.experiments.build import build
from jaxpg.experiments.config import resolve_config
from jaxpg.report.comparison import COLUMNS, cells, format_duration, format_number, format_quantity, sentences
from jaxpg.report.diagnostics import TITLES, diagnostics_figure
from jaxpg.report.drawing import spread_labels
from jaxpg.report.figures import curves_figure
from jaxpg.report.palette import COLORS, color_of
from jaxpg.report.statistics import binned, bootstrap, interquartile_mean, mean, steps_to_threshold, sustained

RNG = np.random.default_rng(0)


# Statistics


def test_interquartile_mean_is_the_mean_of_the_middle_half():
    assert interquartile_mean([1e6, 10, 0, 2, 11, 1, 3, 5]) == 5.0  # sorted 0 1 | 2 3 5 10 | 11 1e6
    assert interquartile_mean([9.0, 1, 2, 3, 4, 5, 6, 7, 8, 100]) == 5.5  # 10 // 4 = 2 left out at each end
    assert interquartile_mean([1.0, 2.0, 4.0]) == pytest.approx(7 / 3)  # 3 // 4 = 0: nothing to leave out
    scores = RNG.normal(size=(3, 12))
    np.testing.assert_array_equal(interquartile_mean(scores.T, axis=0), [interquartile_mean(row) for row in scores])
    np.testing.assert_allclose(interquartile_mean(2 * scores + 3), 2 * interquartile_mean(scores) + 3)


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(statistic):
    scores = RNG.normal(5.0, 2.0, size=(400, 30))  # symmetric: both statistics estimate 5
    for level, tolerance in ((0.5, 0.09), (0.95, 0.04)):  # 3 sigma of 400 trials are 0.075 and 0.033
        value, low, high = bootstrap(scores, statistic=statistic, level=level, resamples=500)
        np.testing.assert_allclose(value, statistic(scores))
        covered = np.mean((low <= 5) & (high >= 5))
        assert abs(covered - level) < tolerance


def test_the_interval_is_that_of_all_resamples_listed():
    scores = np.array([0.0, 1.0, 4.0, 9.0, 16.0])
    listed = [np.mean(drawn) for drawn in itertools.product(scores, repeat=5)]
    value, low, high = bootstrap(scores, statistic=mean, level=0.8, resamples=40_000)
    assert value == 6.0
    np.testing.assert_allclose([low, high], np.quantile(listed, [0.1, 0.9]), atol=0.21)  # the grid of means is 0.2


def test_each_stratum_is_resampled_on_its_own():
    easy, hard = np.full(4, 100.0), np.full(6, 0.0)
    value, low, high = bootstrap(easy, hard, statistic=mean)
    assert value == low == high == 40.0
    together = bootstrap(np.concatenate([easy, hard]), statistic=mean)
    assert together.high - together.low > 40


def test_the_interval_can_be_made_again_and_says_nan_where_it_knows_nothing():
    scores = RNG.normal(size=(3, 8))
    np.testing.assert_array_equal(bootstrap(scores), bootstrap(scores))
    assert not np.array_equal(bootstrap(scores), bootstrap(scores, seed=1))
    scores[1, 4] = np.nan
    assert np.isnan(bootstrap(scores)).any(axis=0).tolist() == [False, True, False]
    for few in ([7.0], [6.0, 8.0], [6.0, 6.0, 8.0, 8.0]):  # of two, an interval would be their range
        value, low, high = bootstrap(few)
        assert value == 7.0
        assert np.isnan([low, high]).all()
    assert np.isfinite(bootstrap([5.0, 6.0, 7.0, 8.0, 9.0])).all()
    assert np.isfinite(bootstrap([5.0, 6.0, 7.0], [8.0, 9.0])).all()
    assert np.isnan(bootstrap(np.arange(9.0), [8.0])[1:]).all()
    for nothing in ((), ([],), ([1.0, 2.0], [])):
        with pytest.raises(UserError, match="at least one seed"):
            bootstrap(*nothing)


def test_two_algorithms_are_compared_as_by_a_slow_loop():
    """By resampling the seeds of each, and by all pairs of them."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(3.0, 1.0, 12), np.round(rng.normal(2.5, 1.0, 8))
    x[:3] = y[:3]  # ties
    slow = {
        report.difference: lambda a, b: interquartile_mean(a) - interquartile_mean(b),
        report.probability_of_improvement: lambda a, b: np.mean([(s > t) + 0.5 * (s == t) for s in a for t in b]),
    }
    for compare, statistic in slow.items():
        found, back = compare(x, y), compare(y, x)
        drawn = [statistic(rng.choice(x, 12), rng.choice(y, 8)) for _ in range(2000)]
        np.testing.assert_allclose([found.value, back.value], [statistic(x, y), statistic(y, x)])
        np.testing.assert_allclose([found.low, found.high], np.quantile(drawn, [0.025, 0.975]), atol=0.08)
        few = compare(x, y[:4])  # fewer than have an interval, although there are enough of both together
        assert np.isfinite(few.value)
        assert np.isnan([few.low, few.high]).all()
        assert np.isnan(compare(x, [np.nan] * 8)).all()
        both = compare(np.stack([x, x + 9]), np.stack([y, y]))  # leading axes one by one
        np.testing.assert_allclose(both.value, [statistic(x, y), statistic(x + 9, y)])


def test_the_leads_of_the_best_are_in_the_page_and_in_the_record(tmp_path):
    """Whose runs all score higher than one algorithm's, and hardly differ from another's."""
    curve, rng = next(iter(toy_curves().values())), np.random.default_rng(0)
    finals = {"a2c": 50.0 + rng.random(6), "ppo": 99.0 + rng.random(6), "trpo": 98.9 + rng.random(6)}
    runs = {name: report.RunResult(*curve, final, 1.0, 1.0) for name, final in finals.items()}
    ahead = {name: summary.lead for name, summary in report.summarize(runs).items() if summary.lead}
    (near,) = ahead.keys() - {"a2c"}
    assert (ahead["a2c"].is_clear(), ahead[near].is_clear()) == (True, False)
    assert ahead["a2c"].probability == (1, 1, 1)
    (best,) = finals.keys() - ahead.keys()
    said = report.lead_sentence(report.summarize(runs))
    assert re.fullmatch(rf"{best} is ahead of a2c by 4\d\.\d\d \[4.*\] \(IQM\), not told apart from {near}\.", said)
    assert report.lead_sentence(report.summarize({"ppo": runs["ppo"]})) == ""
    report.write_comparison(runs, tmp_path, title="task", details={})
    stored = json.loads((tmp_path / "comparison.json").read_text())["algorithms"]
    assert stored[best]["lead"] is None
    assert stored["a2c"]["lead"]["difference"]["value"] == pytest.approx(float(ahead["a2c"].difference.value))
    page = (tmp_path / "comparison.html").read_text()
    assert page.count("behind the best [95%]") == 1
    assert "1.000 [1.000, 1.000]" in page
    alone = report.comparison_page({"ppo": runs["ppo"]}, title="task", details={})
    assert "the best" not in Outline(alone).text


def test_binning_by_hand():
    nan = np.nan
    steps = np.array([[10, 5], [20, 35], [30, 35], [60, 40]])
    returns = np.array([[1, nan], [3, 7.0], [nan, 99], [9, 11]])
    # Seed 0: bins (0,20] -> mean(1, 3), (20,40] nothing -> between its neighbours, (40,60] -> 9, then nothing known.
    # Seed 1: nothing before 20; the row that does not advance (99) is left out.
    expected = [[2, nan], [5.5, 9], [9, nan], [nan, nan]]
    np.testing.assert_array_equal(binned(steps, returns, [0, 20, 40, 60, 80]), expected)
    shared = binned(np.array([10, 30]), np.array([[1.0, 2], [3, 4]]), [0, 20, 40])
    np.testing.assert_array_equal(shared, [[1, 2], [3, 4]])
    assert np.isnan(binned([10, 20], np.full((2, 1), nan), [0, 20])).all()
    begun = binned(np.array([0, 10, 30]), np.array([[1.0], [3], [5]]), [0, 20, 40])  # the row before training counts
    np.testing.assert_array_equal(begun, [[2], [5]])
    held = binned([10, 30, 50, 70], np.array([[1.0], [3], [nan], [nan]]), [0, 20, 40, 60, 80, 100])
    np.testing.assert_array_equal(held, [[1], [3], [3], [3], [nan]])  # no episode ended in its last two rows
    with pytest.raises(UserError, match=r"\(3, 2\)"):
        binned(np.arange(4), np.zeros((3, 2)), [0, 1])


def test_a_curve_that_is_sustained_by_hand():
    """Of three values from each on; the last two have the mean of the last three, of two values both."""
    nan = np.nan
    curves = np.array([[nan, 1.0, nan, 1], [4, 9, nan, 5], [1, 2, 7, nan], [4, 4, nan, nan], [7, 6, nan, nan]])
    expected = [[nan, 1, nan, 1], [3, 5, nan, 3], [1, 2, 7, nan], [4, 4, nan, nan], [4, 4, nan, nan]]
    np.testing.assert_allclose(sustained(curves, bins=3), expected)


def test_lucky_episodes_do_not_reach_a_threshold():
    """Of a policy that is always worth 430, with six episodes to a row, bins reach 475; one that learns stays there."""
    rng = np.random.default_rng(0)
    episodes = np.where(rng.random((200, 20, 6)) < 0.5, 500.0, rng.uniform(220, 500, size=(200, 20, 6))).mean(-1)
    steps = np.linspace(2500.0, 500_000, 200)
    learned = np.where(steps[:, None] < 100_000, episodes, 490.0)
    runs = {
        name: report.RunResult(steps, returns, returns[-1], 1.0, 1.0)
        for name, returns in {"ppo": episodes, "a2c": learned}.items()
    }
    summaries = report.summarize(runs, threshold=475.0)
    assert (binned(steps, episodes, np.linspace(0, 500_000, 101)) >= 475).any(0).mean() > 0.8
    assert np.isinf(summaries["ppo"].steps_to_threshold).all()
    np.testing.assert_allclose(summaries["a2c"].steps_to_threshold, 100_000, atol=50_000)


def test_steps_to_threshold_by_hand():
    returns = np.array([[1, np.nan, 0], [5, 4, 1], [2, 5, 2], [6, 6, 3.0]])
    np.testing.assert_array_equal(steps_to_threshold([10, 20, 30, 40], returns, 5), [20, 30, np.inf])
    per_seed = np.array([[10, 20, 30, 40], [11, 21, 31, 41], [1, 2, 3, 4]]).T
    np.testing.assert_array_equal(steps_to_threshold(per_seed, returns, 3), [20, 21, 4])


# Figures


def toy_curves(seeds: int = 6) -> report.figures.Curves:
    steps = np.linspace(1000, 100_000, 50)
    rng = np.random.default_rng(7)
    learned = 100 * (1 - np.exp(-steps[:, None] / 3e4)) + rng.normal(size=(50, seeds))
    learned[0] = np.nan
    late = np.cumsum(rng.uniform(500, 3000, size=(40, seeds)), axis=0)
    return {"ppo": (steps, learned), "reinforce": (late, late / 2000)}


def test_the_line_is_the_interquartile_mean_and_the_shade_its_interval():
    curves = toy_curves()
    axes = curves_figure(curves, title="task", threshold=80.0).axes[0]
    edges = report.figures.step_grid(curves)
    estimate = bootstrap(binned(*curves["ppo"], edges))
    line = axes.lines[0]
    np.testing.assert_array_equal(line.get_ydata(), estimate.value)
    np.testing.assert_allclose(line.get_xdata(), (edges[1:] + edges[:-1]) / 2)
    corners = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert corners.min() == np.nanmin(estimate.low)
    assert corners.max() == np.nanmax(estimate.high)
    assert any(set(np.asarray(other.get_ydata())) == {80.0} for other in axes.lines)
    texts = [text.get_text() for text in axes.texts]
    assert {"ppo", "reinforce", "threshold 80", "interquartile mean over 6 seeds, 95% bootstrap interval"} <= {*texts}
    assert edges[-1] == max(np.max(steps) for steps, _ in curves.values())
    assert axes.get_xlim() == (0, edges[1:][np.isfinite(estimate.value)][-1])  # the other ends before


def test_more_lines_than_colours_have_a_panel_each_before_the_others():
    steps, learned = toy_curves()["ppo"]
    names = ["reinforce", "a2c", "ppo", "trpo", "grpo", "dapo", "ppo, learning_rate = 0.0003, ent_coef = 0.01"]
    curves = {name: (steps, learned - 10 * i) for i, name in enumerate(names)}
    assert len(curves_figure(dict(list(curves.items())[:6]), title="task").axes) == 1
    figure = curves_figure(curves, title="task", threshold=80.0)
    assert len(figure.axes) == len(names)
    assert [axes.get_title(loc="left").replace("\n", " ") for axes in figure.axes] == names
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    edges = report.figures.step_grid(curves)
    for i, (name, axes) in enumerate(zip(names, figure.axes, strict=True)):
        (line,) = [x for x in axes.lines if x.get_color() == color_of(name)]
        np.testing.assert_array_equal(line.get_ydata(), bootstrap(binned(*curves[name], edges)).value)
        assert len(axes.lines) == len(names) + 1, f"{name}: the others, its own, and the threshold"
        assert sum(x.get_color() not in COLORS for x in axes.lines) == len(names)
        corners = axes.collections[0].get_paths()[0].vertices[:, 1]
        assert corners.max() == pytest.approx(np.nanmax(bootstrap(binned(steps, learned - 10 * i, edges)).high))
    assert any("dashed: 80" in text.get_text() for text in figure.texts)


@pytest.mark.parametrize("seeds", [1, 3])
def test_learning_curves_become_pictures(tmp_path, seeds):
    nothing = np.arange(3.0), np.full((3, seeds), np.nan)
    report.learning_curve(toy_curves(seeds) | {"failed": nothing}, tmp_path / "curve.png", title="task")
    picture = Image.open(tmp_path / "curve.png")
    assert picture.size == (1520, 880)
    assert len(picture.convert("RGB").getcolors(1 << 20)) > 100
    with pytest.raises(UserError, match="no curve"):
        report.learning_curve({}, tmp_path / "none.png", title="task")


@pytest.mark.parametrize(
    "wanted", [[0.2, 0.5, 0.9], [0.5, 0.5, 0.5, 0.51], [0.97, 0.98, 0.99], [0.0, 0.01], [0.3], [0.5] * 40]
)
def test_labels_keep_apart_and_near(wanted):
    places = spread_labels(wanted, gap=0.1)
    gap = min(0.1, 1 / max(len(wanted) - 1, 1))
    assert (np.diff(places) >= gap - 1e-9).all()
    assert places.min() >= -1e-9
    assert places.max() <= 1 + 1e-9
    if len(wanted) == 1 or np.diff(wanted).min() >= gap:
        np.testing.assert_allclose(places, wanted)
    elif min(wanted) > 0.2 and max(wanted) < 0.8 and len(wanted) < 5:
        assert np.mean(places) == pytest.approx(np.mean(wanted))  # pushed up as much as down


# Comparison


def toy_runs() -> dict[str, report.RunResult]:
    finals = {
        "ppo": np.array([98.0, 99.0, 100.0, 97.0, 20.0, 99.5]),
        "reinforce": np.array([40.0, 45, 50, 55, 60, np.nan]),
    }
    rates = {"ppo": 123_456.0, "reinforce": 999.4}
    return {name: report.RunResult(*curve, finals[name], 75.0, rates[name]) for name, curve in toy_curves().items()}


def test_a_page_numbers_seeds_as_the_run_does() -> None:
    rows = [[f">{seed}</td>" for seed in seeds] for seeds in (range(6), range(100, 106))]
    for expected, seeds in zip(rows, ((), tuple(range(100, 106))), strict=True):
        runs = {name: run._replace(seeds=seeds) for name, run in toy_runs().items()}
        page = report.comparison_page(runs, title="task", details={})
        assert [row in page for row in expected] == [True] * 6
    assert rows[0][0] not in page


def test_a_score_stands_beside_the_seed_that_made_it():
    runs = toy_runs()
    numbers = {"ppo": (0, 1, 2, 3, 4, 5), "reinforce": (4, 5, 6, 7, 8, 9)}
    page = report.comparison_page({n: run._replace(seeds=numbers[n]) for n, run in runs.items()}, title="", details={})
    rows = [re.findall(r"<td>([^<]*)</td>", row) for row in re.findall(r"<tr>.*?</tr>", page)]
    shown = {row[0]: row[1:] for row in rows if len(row) == 3}
    assert list(shown) == [str(i) for i in range(10)]
    assert shown["0"] == ["98.00", "–"]
    assert shown["4"] == ["20.00", "40.00"]
    assert shown["8"] == ["–", "60.00"]


def test_what_is_as_good_as_the_best_is_named_with_it():
    """Of equal interquartile means the larger mean is the best."""
    curve = next(iter(toy_curves().values()))
    finals = {
        "ppo": [500.0] * 7 + [100.0],
        "a2c": [500.0] * 8,
        "trpo": [490.0, 495, 500, 500, 500, 505, 510, 480],
        "reinforce": [50.0 + i for i in range(8)],
    }
    runs = {name: report.RunResult(*curve, np.array(final), 1.0, 1.0) for name, final in finals.items()}
    page = report.comparison_page(runs, title="task", details={})
    assert "Best, not told apart from ppo, trpo: a2c: episode return 500.0" in page
    assert "Best: reinforce" not in page


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ({}, "Best: a2c:"),
        (dict.fromkeys(("a2c", "ppo", "trpo", "grpo"), 3), "Best, not told apart from ppo, trpo: a2c:"),
        ({"ppo": 3}, "Best, not told apart from ppo: a2c:"),
        ({"a2c": 1}, "Best, not told apart from ppo, trpo: a2c:"),
    ],
)
def test_without_an_interval_the_best_is_not_told_apart(seeds: dict[str, int], words: str):
    """One that was never evaluated is not named with it."""
    curve = next(iter(toy_curves().values()))
    scores = {"ppo": 100.0, "a2c": 300.0, "trpo": 200.0, "grpo": np.nan}
    finals = {name: score + np.arange(seeds.get(name, 8)) for name, score in scores.items()}
    runs = {name: report.RunResult(*curve, final, 1.0, 1.0) for name, final in finals.items()}
    (sentence,) = sentences(runs, report.summarize(runs), None, report.Units())
    assert sentence.startswith(words)
    unknown = {name: run._replace(final=np.full(3, np.nan)) for name, run in runs.items()}
    assert sentences(unknown, report.summarize(unknown), None, report.Units()) == []


class Outline(HTMLParser):
    """Checks that tags close in order, and collects what a page refers to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.references, self.text, self.tags = [], [], "", []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_comparison_is_written_in_full(tmp_path):
    details = {
        "Command": "jaxpg compare <task>",
        "Versions": {"jax": "0.10"},
        "Configurations": {"ppo": {"gamma": 0.99}},
    }
    runs = dict(zip(["ppo", "<i>ours"], toy_runs().values(), strict=True))
    about: dict[str, Any] = {"title": "A & B", "threshold": 80.0, "details": details, "differences": ["they differ"]}
    summaries = report.write_comparison(runs, tmp_path, **about)
    assert summaries["ppo"].iqm.value == pytest.approx(98.375)  # the mean of 97, 98, 99 and 99.5
    assert {path.name for path in tmp_path.iterdir()} == {"comparison.json", "comparison.html", "learning_curve.png"}

    record = json.loads((tmp_path / "comparison.json").read_text())
    ppo, reinforce = record["algorithms"]["ppo"], record["algorithms"]["<i>ours"]
    assert ppo["iqm"]["value"] == summaries["ppo"].iqm.value
    assert ppo["iqm"]["low"] <= ppo["iqm"]["value"] <= ppo["iqm"]["high"]
    assert ppo["steps_to_threshold"] == summaries["ppo"].steps_to_threshold.tolist()
    assert reinforce["iqm"]["value"] is None
    assert reinforce["steps_to_threshold"] == [None] * 6
    assert record["details"] == details
    assert record["seeds"] == {"ppo": [0, 1, 2, 3, 4, 5], "<i>ours": [0, 1, 2, 3, 4, 5]}
    assert record["warnings"] == ["they differ"]
    assert record["threshold"] == 80.0

    page = (tmp_path / "comparison.html").read_text()
    outline = Outline(page)
    assert outline.open == []
    ids = re.findall(r'\sid="([^"]*)"', page)
    assert len(set(ids)) == len(ids) > 0
    assert {reference.removeprefix("#") for reference in outline.references} <= set(ids)
    assert set(re.findall(r"url\(#(.*?)\)", page)) <= set(ids)
    assert not re.search(r"@import|url\((?!#)|<script|<link|<img", page)
    assert outline.tags.count("svg") == outline.tags.count("table") == 2
    assert "i" not in outline.tags
    assert "prefers-color-scheme: dark" in page
    assert "currentColor" in page
    assert "Diagnostics" not in outline.text  # nothing but returns was recorded
    for text in ("A & B", "jaxpg compare <task>", "<i>ours", "gamma", "0.99", "123 k", "1:15", "97.00", "(0/6)"):
        assert text in outline.text


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        ([3e3, 1e3, 2e3, np.inf], "2.5 k (3/4)"),
        ([1e3, 2e3, np.inf, np.inf], "– (2/4)"),  # the third seed of four never arrived: nobody knows the median
        ([1e3, np.inf, np.inf], "– (1/3)"),
    ],
)
def test_the_median_of_the_steps_needs_more_than_half_of_the_seeds(steps, shown):
    summary = report.summarize(toy_runs(), threshold=80.0)["ppo"]._replace(steps_to_threshold=np.array(steps))
    assert dict(zip(COLUMNS, cells("ppo", summary), strict=True))["steps to threshold"] == shown


def test_what_algorithms_were_not_given_alike_is_said():
    ppo = resolve_config("frozen_lake", "ppo")
    alike = {"ppo": 1_000_000, "a2c": 1_050_000}
    assert differences({"ppo": ppo, "a2c": ppo}, alike) == []
    (steps,) = differences({"ppo": ppo, "a2c": ppo}, alike | {"a2c": 1_200_000})
    assert "finished: ppo 1,000,000, a2c 1,200,000. A larger --steps" in steps
    other = dataclasses.replace(ppo, total_steps=300_000, evaluation_greedy=True)
    found = differences({"ppo": ppo, "q_learning": other}, {"ppo": 1_000_000, "q_learning": 300_000})
    assert found == [
        "The algorithms differ in total_steps: ppo 1 M, q_learning 300 k. --set total_steps=... sets it for all.",
        "The algorithms differ in evaluation_greedy: ppo false, q_learning true. --set evaluation_greedy=... sets it "
        "for all.",
    ]
    tuned = dataclasses.replace(ppo, initial="runs/base")
    assert differences({"ppo": tuned, "a2c": tuned}, alike) == []
    assert differences({"ppo": ppo, "a2c": tuned}, alike) == [
        "The algorithms differ in initial, a run whose steps are not counted here: ppo none, a2c runs/base."
    ]
    grid = dataclasses.replace(ppo, environment_settings={"slippery": False}, seeds=(10, 11), threshold=0.5)
    assert differences({"ppo": ppo, "a2c": grid}, alike) == [
        f"The algorithms differ in threshold: ppo {ppo.threshold}, a2c 0.5. --set threshold=... sets it for all.",
        f"The algorithms differ in their seeds: ppo {', '.join(map(str, ppo.seeds))}; a2c 10, 11.",
        "The algorithms differ in environment_settings.slippery, so their scores differ in kind: ppo its default, a2c "
        "false.",
    ]
    ended = dataclasses.replace(ppo, callbacks={"mine:solved": {}})
    (steps,) = differences({"ppo": ended, "a2c": ended}, alike | {"a2c": 1_200_000})
    assert steps.endswith("finished, or callbacks end them: ppo 1,000,000, a2c 1,200,000.")
    page = report.comparison_page(toy_runs(), title="task", details={}, differences=found)
    assert all(sentence in Outline(page).text for sentence in found)


def test_the_steps_of_whole_iterations_are_known_before_training():
    """PPO takes 64 x 128 at a time, A2C 16 x 16; REINFORCE whole episodes of 16 environments, whose ends vary."""
    algorithms = ("ppo", "a2c", "reinforce")
    configs = [resolve_config("CartPole-v1", name, {"total_steps": 2_000}) for name in algorithms]
    assert [whole_iterations(config) for config in configs] == [8_192, 2_048, 2_000]


@pytest.mark.parametrize(
    ("task", "name", "settings"),
    [
        ("catch", "dqn", {"num_envs": 4, "train_frequency": 3, "repeats": 5, "buffer_size": 600}),
        ("catch", "pqn", {"num_envs": 4, "num_steps": 8}),
        ("frozen_lake", "q_learning", {"num_envs": 4, "num_steps": 8}),
        ("frozen_lake", "n_step_sarsa", {"num_envs": 2, "num_steps": 6, "n_steps": 3}),
    ],
)
def test_the_steps_of_whole_iterations_are_those_that_are_trained(task: str, name: str, settings: dict[str, Any]):
    """One iteration for a single step, and two for one step more than an iteration takes."""
    step = jax.jit((learner := build(resolve_config(task, name, settings)).learner).step)
    state, metrics = step(learner.init(jax.random.key(0)), jax.random.key(1))
    first, second = int(metrics["steps"]), int(step(state, jax.random.key(2))[1]["steps"])
    predicted = [
        whole_iterations(resolve_config(task, name, settings | {"total_steps": x})) for x in (1, first, first + 1)
    ]
    assert predicted == [first, first, second]


def test_a_page_draws_the_metrics_that_a_run_has_and_no_others():
    steps = np.arange(1, 11) * 100.0
    constant = np.ones((10, 3))
    own = {"entropy": 0.5 * constant, "gradient_norm": constant, "policy_gradient_norm": constant, "loss": constant}
    ppo, reinforce = toy_runs().values()
    runs = {
        "ppo": ppo._replace(steps=steps, returns=constant, metrics=own),
        "reinforce": reinforce._replace(steps=steps, returns=constant, metrics={"q_value": np.nan * constant}),
    }
    figure = diagnostics_figure({name: (run.steps, run.metrics) for name, run in runs.items()})
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [TITLES["entropy"], TITLES["policy_gradient_norm"]]  # in place of the whole gradient's norm
    (line,) = figure.axes[0].lines
    drawn = line.get_ydata()
    np.testing.assert_array_equal(drawn[np.isfinite(drawn)], 0.5)
    assert TITLES["entropy"] in Outline(report.comparison_page(runs, title="task", details={})).text
    assert diagnostics_figure({"ppo": (steps, {"loss": constant})}) is None


def test_the_table_names_every_figure_within_80_columns():
    summaries = report.summarize(toy_runs(), threshold=80.0)
    console = Console(file=io.StringIO(), width=80)
    console.print(report.comparison_table(summaries, title="task"))
    lines = console.file.getvalue().splitlines()
    row = next(index for index, line in enumerate(lines) if "ppo" in line)
    assert lines[row].split() == ["ppo", "98.38", "85.58", "50", "k", "123", "k", "1:15"]
    intervals = [
        f"[{format_number(float(low))}, {format_number(float(high))}]" for _, low, high in summaries["ppo"][:2]
    ]
    assert lines[row + 1].split() == [*" ".join(intervals).split(), "(6/6)"]
    reached = np.median(summaries["ppo"].steps_to_threshold)
    assert 0.8 * 48_000 < reached < 1.2 * 48_000  # 100 (1 - exp(-x / 30 000)) = 80


def test_of_a_long_name_the_table_loses_no_letter_and_no_heading():
    name = "a_module_of_ones_own:with_a_long_name"
    summaries = report.summarize({name: toy_runs()["ppo"]}, threshold=80.0)
    console = Console(file=io.StringIO(), width=80)
    console.print(report.comparison_table(summaries, title="task"))
    lines = console.file.getvalue().splitlines()
    assert "…" not in console.file.getvalue()
    assert {"threshold", "steps/s", "wall", "time"} <= {word for line in lines[:4] for word in line.split()}
    folded = "".join(line.split()[0] for line in lines[4:] if line.strip() and not line.startswith("before"))
    assert folded.startswith("─")
    assert name in folded


def test_the_table_names_every_figure_of_huge_and_tiny_scores():
    for scale in (-1e30, 1e-9):
        runs = {name: run._replace(final=run.final * scale) for name, run in toy_runs().items()}
        console = Console(file=io.StringIO(), width=80)
        console.print(report.comparison_table(report.summarize(runs, threshold=80.0), title="task"))
        printed = console.file.getvalue()
        assert "…" not in printed
        (row,) = (line for line in printed.splitlines() if line.split()[:1] == ["ppo"])
        assert row.split()[-1] == "1:15"
        assert {"reinforce", "threshold", "wall"} <= {*printed.split()}


@pytest.mark.parametrize(
    ("initial", "text"),
    [
        ({"ppo": [1.0, 2, 3, 4], "reinforce": [2.5]}, "before training (IQM): 2.500"),
        ({"ppo": [1.0], "reinforce": [2.0]}, "before training (IQM): ppo 1.000, reinforce 2.000"),
        ({"ppo": None, "reinforce": [2.0]}, "before training (IQM): reinforce 2.000"),
        ({"ppo": None, "reinforce": None}, None),
    ],
)
def test_the_table_says_what_the_initial_policies_score(initial, text):
    runs = {name: run._replace(initial=initial[name]) for name, run in toy_runs().items()}
    console = Console(file=io.StringIO(), width=80)
    console.print(report.comparison_table(report.summarize(runs), title="task"))
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    assert [line for line in lines if line.startswith("before")] == ([text] if text else [])
    assert ("2.000" in report.comparison_page(runs, title="task", details={})) == ("reinforce 2.000" in (text or ""))


def test_without_a_threshold_nothing_is_said_of_it():
    summaries = report.summarize(toy_runs())
    assert all(summary.steps_to_threshold is None for summary in summaries.values())


@pytest.mark.parametrize(
    ("write", "x", "text"),
    [
        (format_number, 498.2345, "498.2"),
        (format_number, 12345.6, "12346"),
        (format_number, -0.12345, "-0.123"),
        (format_number, 0.0, "0"),
        (format_number, -1.4567e-5, "-1.457e-05"),
        (format_number, 999_999.4, "999999"),
        (format_number, 4.353e29, "4.353e+29"),
        (format_number, 3.0, "3.000"),
        (format_number, np.inf, "–"),
        (format_quantity, 123_456, "123 k"),
        (format_quantity, 1.5e6, "1.5 M"),
        (format_quantity, 999_999, "1 M"),
        (format_quantity, 42.0, "42"),
        (format_quantity, np.inf, "–"),
        (format_duration, 0.52, "0:01"),
        (format_duration, 59.7, "1:00"),
        (format_duration, 185, "3:05"),
        (format_duration, 7800, "2:10:00"),
        (format_duration, np.nan, "–"),
    ],
)
def test_numbers_for_people(write, x, text):
    assert write(x) == text
