"""What pictures promise: colours that belong to algorithms, axes, values on hover, each algorithm beside its parent."""

from __future__ import annotations

import itertools
import re
from html import unescape
from io import StringIO

import numpy as np
import pytest
from chromium import PATH as CHROMIUM
from chromium import chromium
from rich.console import Console

from jaxpg import report
from jaxpg.envs.mdps import Grid
from jaxpg.experiments.completions import Sample
from jaxpg.experiments.parts import ALGORITHMS
from jaxpg.ladder_settings import PARENTS
from jaxpg.report.comparison import comparison_page
from jaxpg.report.diagnostics import diagnostics_figure
from jaxpg.report.drawing import Units, inline_svg
from jaxpg.report.figures import curves_figure, drawing_grid, finals_figure, ladder_figure
from jaxpg.report.hover import with_titles
from jaxpg.report.palette import COLOR_OF, COLORS, color_of, line_styles
from jaxpg.report.statistics import Estimate
from jaxpg.report.summaries import RunResult
from jaxpg.runs.results import common_units, curve_units

TEXT = {"environment": "sort", "network": {"kind": "transformer"}}


def luminance(color: str) -> float:
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_every_algorithm_has_a_colour_and_no_other_name_has_one():
    assert set(COLOR_OF) == set(ALGORITHMS)


def test_a_child_has_another_colour_than_its_parent():
    same = [(child, parent) for child, parent in PARENTS.items() if COLOR_OF.get(child) == COLOR_OF.get(parent)]
    assert not [pair for pair in same if set(pair) <= set(COLOR_OF)]


@pytest.mark.parametrize("paper", ["#ffffff", "#12161c"])
def test_colours_stand_out_from_the_page(paper):
    """A contrast of at least 2.2; the least is orange on white."""
    for color in COLORS:
        low, high = sorted((luminance(color), luminance(paper)))
        assert (high + 0.05) / (low + 0.05) > 2.2


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB: protanopia and deuteranopia.
DEFICIENCIES = (
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
)


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colours_differ_for_colour_blind_readers(deficiency):
    """By a distance of at least 15 in CIE Lab, where 2.3 is just noticeable."""

    def lab(color: str) -> np.ndarray:
        channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        to_xyz = np.array(
            [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
        )
        x, y, z = np.cbrt(to_xyz @ np.clip(np.array(deficiency) @ linear, 1e-2, 1) / [0.95047, 1, 1.08883])
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    assert min(np.linalg.norm(lab(a) - lab(b)) for a, b in itertools.combinations(COLORS, 2)) > 15


def test_a_colour_belongs_to_an_algorithm_and_dashes_tell_equal_ones_apart():
    alone, together = line_styles(["dqn"]), line_styles(["ppo", "grpo", "dqn", "ppo, seeds 8 to 15"])
    assert alone["dqn"].color == together["dqn"].color == color_of("ppo")
    assert alone["dqn"].dashes == together["ppo"].dashes == "-"
    assert len(set(together.values())) == 4
    assert color_of("mine:spo") == color_of("mine:spo, again") in COLORS


STEPS = np.arange(1, 101) * 1000.0


def curve(scale: float, seeds: int = 5) -> tuple[np.ndarray, np.ndarray]:
    return STEPS, 100 * (1 - np.exp(-STEPS[:, None] / scale)) * np.ones((1, seeds))


@pytest.mark.parametrize(
    ("scales", "logarithmic"),
    [([3_000.0], True), ([3_000.0, 6_000.0], True), ([30_000.0], False), ([3_000.0, 30_000.0], False)],
)
def test_steps_are_logarithmic_where_all_happens_at_the_beginning(scales, logarithmic):
    curves = {f"a{i}": curve(scale) for i, scale in enumerate(scales)}
    edges, is_logarithmic = drawing_grid(curves)
    assert is_logarithmic is logarithmic
    assert edges[-1] == STEPS[-1]
    (axes,) = curves_figure(curves, title="task").axes
    assert axes.get_xscale() == ("log" if logarithmic else "linear")


def test_a_constant_curve_and_one_without_values_have_linear_axes():
    constant = {"a": (STEPS, np.ones((100, 5)))}
    nothing = {"a": (STEPS, np.full((100, 5), np.nan))}
    assert not drawing_grid(constant)[1]
    assert not drawing_grid(nothing)[1]


def test_axes_are_named_and_scores_stay_within_their_bounds():
    units = report.Units("tokens", "accuracy", (0.0, 1.0))
    (axes,) = curves_figure({"sft": (STEPS, np.full((100, 5), 1.0))}, title="sort", units=units).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("tokens", "accuracy")
    assert 1.0 < axes.get_ylim()[1] <= 1.03
    estimate = Estimate(*map(np.asarray, (1.0, np.nan, np.nan)))
    (axes,) = finals_figure({"sft": (np.ones(3), estimate)}, title="sort", units=units).axes
    assert axes.get_xlabel() == "accuracy"
    assert 1.0 < axes.get_xlim()[1] <= 1.03
    places = axes.collections[0].get_offsets()
    assert (places[:, 0] == 1.0).all()  # moved up and down alone
    assert len(set(places[:, 1])) == 3


@pytest.mark.parametrize(
    ("tables", "units"),
    [
        ({"environment": "CartPole-v1", "algorithm": "ppo"}, ("environment steps", "episode return")),
        ({"algorithm": "grpo"} | TEXT, ("tokens", "accuracy")),
        ({"algorithm": "grpo", "reward": "runs/model"} | TEXT, ("tokens", "reward of a completion")),
        ({"algorithm": "reward_model", "reward": "none"} | TEXT, ("tokens", "accuracy")),
        (
            {"algorithm": "grpo", "rewards": {"accuracy": 1.0, "format": 0.1}} | TEXT,
            ("tokens", "reward of a completion"),
        ),
        (
            {"algorithm": "sft", "environment_settings": {"rewards": {"length": 1.0}}} | TEXT,
            ("tokens", "reward of a completion"),
        ),
        (
            {"algorithm": "process_grpo", "environment_settings": {"process_weight": 1.0}} | TEXT,
            ("tokens", "reward of a completion"),
        ),
        ({"algorithm": "process_grpo", "process_reward": "runs/m"} | TEXT, ("tokens", "reward of a completion")),
        ({}, ("environment steps", "episode return")),
    ],
)
def test_units_are_those_of_the_task(tables, units):
    assert curve_units(tables)[:2] == units


def test_units_of_several_runs_are_those_that_all_have():
    score, accuracy = Units("tokens", "score"), Units("tokens", "accuracy", (0, 1))
    assert common_units([accuracy, accuracy]) == accuracy
    assert common_units([accuracy, score]) == Units("tokens", "return")
    assert common_units([score, Units("environment steps", "score")]) == Units("steps", "return")


def test_values_are_shown_where_the_mouse_rests():
    curves = {"ppo": curve(30_000.0), "<b>$x$": curve(20_000.0)}
    svg = inline_svg(curves_figure(curves, title="task"))
    titles = [unescape(title) for title in re.findall("<use [^>]*><title>([^<]*)</title></use>", svg)]
    assert sum(title.startswith("ppo: ") for title in titles) == 25
    assert sum(title.startswith("<b>$x$: ") for title in titles) == 25
    name, value, steps = re.fullmatch(r"(ppo): ([\d.]+) at ([\d,]+)", titles[10]).groups()
    expected = 100 * (1 - np.exp(-float(steps.replace(",", "")) / 30_000))
    assert name == "ppo"
    assert float(value) == pytest.approx(expected, abs=1.0)
    assert "hover" not in svg


def test_scores_beyond_the_bounds_of_their_unit_are_drawn_and_a_page_is_written_with_them():
    """And dots that matplotlib clips into others have no titles instead of those of others."""
    units = Units("tokens", "accuracy", (0.0, 1.0))
    assert units.limits((-0.05, 1.05), (0.0, 1.0)) == pytest.approx((-0.03, 1.03))
    assert units.limits((2.0, 6.5), (2.2, 6.3)) == (2.0, 6.5)
    scores = np.array([5.7, 6.1, 5.9, 4.0, 6.2])
    figure = finals_figure({"ppo": (scores, report.bootstrap(scores))}, title="task", units=units)
    assert len(re.findall("<title>ppo: ", inline_svg(figure))) == 5
    dots = '<g id="hover-0"><g><use x="1"/><use x="-1"/></g></g>'
    assert with_titles(dots, [["a", "b"]]).count("<title>") == 2
    assert "<title>" not in with_titles(dots, [["a"]])


def test_each_algorithm_is_drawn_beside_its_nearest_ancestor():
    curves = {name: curve(30_000.0) for name in ("reinforce", "ppo", "grpo", "dapo", "mine")}
    parents = {"reinforce_to_go": "reinforce", "ppo": "reinforce_to_go", "grpo": "ppo", "dapo": "grpo", "mine": "x"}
    figure = ladder_figure(curves, parents, title="task")
    drawn = {axes.get_title(loc="left"): axes.texts[0].get_text() for axes in figure.axes if axes.lines}
    assert drawn == {"ppo": "grey: reinforce", "grpo": "grey: ppo", "dapo": "grey: grpo"}
    (axes, *_) = figure.axes
    assert axes.lines[0].get_color() not in COLORS
    assert axes.lines[1].get_color() == color_of("ppo")
    assert ladder_figure({"ppo": curve(1.0), "mine": curve(1.0)}, parents, title="task") is None


def test_panels_show_scores_beyond_the_bounds_of_their_unit_wherever_they_are() -> None:
    """Axes are shared: bounds that hold in one panel must not cut off the lines of another."""
    units = Units("tokens", "accuracy", (0.0, 1.0))
    curves = {name: (STEPS, np.full((100, 5), top)) for name, top in (("reinforce", 0.5), ("grpo", 0.6), ("ppo", 6.0))}
    figure = ladder_figure(curves, {"ppo": "reinforce", "grpo": "reinforce"}, title="task", units=units)
    assert [axes.get_ylim()[1] > 6 for axes in figure.axes] == [True, True]
    within = {name: (STEPS, np.full((100, 5), 1.0)) for name in curves}
    figure = ladder_figure(within, {"ppo": "reinforce", "grpo": "reinforce"}, title="task", units=units)
    assert {axes.get_ylim()[1] <= 1.03 for axes in figure.axes} == {True}


def test_a_page_says_what_happened_and_tells_prompt_and_answer_apart():
    steps, returns = curve(30_000.0)
    run = RunResult(steps, returns, returns[-1], 75.0, 1000.0, np.zeros(5), warnings=["Nothing was learned."])
    page = unescape(
        comparison_page(
            {"ppo": run},
            title="task",
            threshold=60.0,
            details={},
            completions={
                "ppo": {"after 0 tokens": [Sample("1+1=", "3", 0.0, 0.0)], "late": [Sample("1+1=", "2", 1, 1)]}
            },
        )
    )
    assert (
        "<p>ppo: episode return 96.43 [96.43, 96.43] after 100 k environment steps, 0 before training; 5 of 5" in page
    )
    assert "seeds reached 60 in training, the median after 28 k.</p>" in page
    assert '<p class="warning">ppo: Nothing was learned.</p>' in page
    assert '<td>✗</td><td class="completion"><span class="quiet">1+1=</span><b>3</b></td>' in page
    assert page.index("<summary>late</summary>") < page.index("<summary>after 0 tokens</summary>")


def test_a_page_says_what_its_curves_and_figures_are():
    run = RunResult(*curve(30_000.0), np.ones(5), 75.0, 1000.0, metrics={"entropy": np.ones((100, 5))})
    page = comparison_page({"ppo": run}, title="task", details={}, units=Units("tokens", 'an "<i>accuracy"'))
    assert "Learning and steps to threshold: of the episodes of training" in page
    assert "of 5 or more seeds" in page
    labels = ['Learning: an "<i>accuracy" over tokens', 'Final performance: an "<i>accuracy"']
    labels += ["Diagnostics over tokens"]
    assert list(map(unescape, re.findall('<figure role="img" aria-label="([^"]*)">', page))) == labels


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_page_can_be_read_on_a_desktop_on_a_phone_and_on_paper(tmp_path):
    steps, returns = curve(30_000.0)
    runs = {name: RunResult(steps, -10 * returns, returns[-1] - 1e3, 75.0, 1e3, returns[0]) for name in ("a2c", "ppo")}
    path = tmp_path / "comparison.html"
    path.write_text(comparison_page(runs, title="task" * 40, threshold=-900.0, details={"Command": "jaxpg " * 99}))
    fits = "[...document.querySelectorAll('%s')].every(x => x.scrollWidth <= x.clientWidth)"
    with chromium() as page:
        page.screen(1200, 900)
        page.open(path.as_uri())
        assert page.evaluate(fits % ".scroll:has(.key), figure")
        page.screen(390, 800)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        letters = page.evaluate("document.querySelector('svg text').getBoundingClientRect().height")
        assert letters > 9  # pixels, of a number of an axis
        assert page.evaluate("getComputedStyle(document.querySelector('figure')).overflowX") == "auto"
        page.screen(700, 1000)
        page.call(
            "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
        )
        assert page.evaluate("getComputedStyle(document.querySelector('svg')).color") == "rgb(36, 41, 47)"
        assert page.evaluate(fits % ".scroll:has(.key), figure, pre")


@pytest.mark.parametrize(
    ("threshold", "named"),
    [
        (60.0, [("Best", "rloo"), ("First at the threshold", "grpo")]),
        (99.9, [("Best", "rloo")]),  # no curve gets there
        (None, [("Best", "rloo")]),
    ],
)
def test_of_many_algorithms_the_best_and_the_fastest_are_named(threshold, named):
    runs = {}
    for name, scale in {"a2c": 50_000.0, "ppo": 30_000.0, "grpo": 20_000.0, "rloo": 40_000.0}.items():
        steps, returns = curve(scale)
        runs[name] = RunResult(steps, returns, returns[-1] + 50 * (name == "rloo"), 75.0, 1000.0)
    page = comparison_page(runs, title="task", threshold=threshold, details={})
    assert re.findall(r"<p>(Best|First at the threshold): (\w+)", page) == named


@pytest.mark.parametrize("score", [-3.0, 500.0, 1e9, 3e-5])
def test_scores_that_differ_in_their_rounding_are_level_and_have_no_offset(score):
    rounded = score * (1 + 1e-7 * np.random.default_rng(0).normal(size=(100, 5)))
    final = Estimate(*map(np.asarray, (score, np.nan, np.nan)))
    for figure, along in (
        (curves_figure({"ppo": (STEPS, rounded)}, title="task"), "y"),
        (finals_figure({"ppo": (rounded[-1], final)}, title="task"), "x"),
    ):
        figure.draw_without_rendering()
        (axes,) = figure.axes
        axis = getattr(axes, f"{along}axis")
        assert np.ptp(axis.get_view_interval()) == pytest.approx(0.1 * abs(score), rel=0.01)
        assert axis.get_offset_text().get_text() == ""
        labels = [text.get_text() for text in axis.get_ticklabels()]
        assert len({*labels}) == len(labels) > 2
        assert max(map(len, labels)) < 8


def test_a_single_row_is_a_dot_and_a_curve_without_values_is_named():
    curves = {"ppo": (STEPS[:1], np.ones((1, 3))), "a2c": curve(30_000.0), "dqn": (STEPS, np.full((100, 3), np.nan))}
    (axes,) = curves_figure(curves, title="task").axes
    assert [line.get_marker() for line in axes.lines[:3]] == ["o", "", ""]
    names = [text.get_text().replace("\n", " ") for text in axes.texts]
    assert {"ppo", "a2c", "dqn: seeds without episode return"} <= {*names}
    assert len(axes.lines) == 3 + 2 + 3  # no line leads to where there is no value


@pytest.mark.parametrize(("number", "dots"), [(1, 1), (2, 2), (12, 12), (13, 0)])
def test_few_values_of_a_diagnostic_are_dots(number, dots):
    """Two of an evaluation, before training and after it, would look like many on a slope."""
    entropy = np.full((len(STEPS), 3), np.nan)
    rows = np.linspace(0, len(STEPS) - 1, number).astype(int)
    entropy[rows] = 1.0
    (line,) = diagnostics_figure({"ppo": (STEPS, {"entropy": entropy}), "a2c": (STEPS, {})}).axes[0].lines
    assert line.get_marker() == ("o" if dots else "None")
    if dots:
        assert line.get_markevery() == (rows // 2).tolist()  # bins of two rows


def test_a_single_value_of_a_line_behind_others_is_a_dot():
    curves = {str(i): (STEPS[:1], np.full((1, 3), i)) for i in range(len(COLORS) + 1)}
    for axes in curves_figure(curves, title="task").axes:
        assert {line.get_marker() for line in axes.lines} == {"o"}


def test_diagnostics_name_their_steps_and_lose_no_long_name():
    names = [f"{letter}_module.of_ones_own:with_an_algorithm, learning_rate = 0.0003" for letter in "abcde"]
    figure = diagnostics_figure(dict.fromkeys(names, (STEPS, {"entropy": np.ones((100, 3))})), Units("tokens"))
    figure.draw_without_rendering()
    assert figure.get_supxlabel() == "tokens"
    (legend,) = figure.legends
    assert ["".join(text.get_text().split()) for text in legend.get_texts()] == ["".join(x.split()) for x in names]
    for text in legend.get_texts():
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert figure.axes[0].get_position().height * figure.get_figheight() > 0.9


@pytest.mark.parametrize("top", [12.0, 50.0, 2000.0])
def test_a_logarithmic_diagnostic_has_more_than_one_number(top):
    norms = np.linspace(0.2, 0.2 * top, 100)[:, None] * np.ones((1, 3))
    figure = diagnostics_figure({"ppo": (STEPS, {"gradient_norm": norms})})
    figure.draw_without_rendering()
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    numbers = [label.get_text() for label in axes.get_yticklabels() if low <= label.get_position()[1] <= high]
    assert axes.get_yscale() == "log"
    assert len(numbers) > 2 - (top > 100)
    assert top > 100 or {float(number) for number in numbers} > {0.5, 1.0}


def test_the_reward_of_the_accuracy_is_not_called_a_share_of_pairs():
    values = np.ones((100, 3))
    titles = []
    for metrics in ({"accuracy": values, "reward_accuracy": values}, {"reward_accuracy": values, "margin": values}):
        figure = diagnostics_figure({"a": (STEPS, metrics)})
        titles.append([axes.get_title(loc="left") for axes in figure.axes])
    assert titles == [["accuracy"], ["share of pairs as judged"]]


def test_two_panels_take_the_width_of_the_figure():
    figure = ladder_figure({name: curve(30_000.0) for name in ("reinforce", "ppo", "grpo")}, PARENTS, title="task")
    figure.draw_without_rendering()
    assert max(axes.get_position().x1 for axes in figure.axes) > 0.9


def test_without_steps_the_axis_has_no_parts_of_a_step():
    (axes,) = curves_figure({"ppo": (np.zeros(0), np.zeros((0, 3)))}, title="task").axes
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert [text.get_text() for text in axes.texts][-1] == "ppo: seeds without\nepisode return"


def test_final_scores_are_dots_beside_their_mean_and_its_interval():
    """In the order that they are given in, from the top down."""
    finals = {"ppo": ([3.0, 5.0, 9.0], Estimate(*np.array([5.5, 4.0, 7.0]))), "a2c": ([1.0], Estimate(*np.ones(3)))}
    (axes,) = finals_figure(finals, title="task").axes
    assert [dots.get_offsets()[:, 0].tolist() for dots in axes.collections] == [[3, 5, 9], [1]]
    lines = [(line.get_xdata().tolist(), set(line.get_ydata().tolist())) for line in axes.lines]
    assert lines == [([4, 7], {0}), ([5.5], {0}), ([1, 1], {1}), ([1], {1})]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ppo", "a2c"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


def test_long_names_leave_room_for_the_final_scores():
    name = "my_long.module_name:spo_with_a_quadratic_wall, environment_settings.living_cost = 0.25"
    estimate = report.bootstrap(np.arange(5.0))
    figure = finals_figure({name: (np.arange(5.0), estimate), f"{name}, b": (np.arange(5.0), estimate)}, title="task")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_position().width > 0.55
    upper, lower = (label.get_window_extent() for label in axes.get_yticklabels())
    assert upper.y0 > lower.y1


def test_a_name_in_letters_that_the_font_lacks_is_drawn_without_a_warning(tmp_path):
    figure = curves_figure({"日本": curve(30_000.0)}, title="日本")
    inline_svg(figure)
    report.drawing.save(figure, tmp_path / "figure.png")


@pytest.mark.parametrize(
    ("width", "corner"),
    [(200, "│ -12.26 │"), (85, "│-12.26│"), (80, "│-12.3│"), (65, "│-12│"), (60, "h ↓ → ↑ ←"), (20, "h↓→↑←")],
)
def test_a_map_fits_into_the_terminal(width, corner):
    values = report.ValueMap(np.linspace(-13.0, 4.0, 24), np.eye(4)[np.arange(24) % 4])
    grid = Grid(2, 12, {(0, 0): "hole", (1, 11): "goal", (1, 4): ""})
    console = Console(width=width, file=StringIO())
    console.print(report.value_table(values, grid, title="lake", width=width))
    printed = console.file.getvalue()
    assert corner in printed
    assert "…" not in printed


@pytest.mark.parametrize(("rows", "columns"), [(14, 14), (30, 2), (4, 12)])
def test_maps_of_any_size_fit_onto_a_page(rows, columns, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(report.value_map, "save", lambda figure, path: figures.append(figure))
    cells = report.ValueMap(np.ones(rows * columns), np.ones((rows * columns, 4)))
    grid = Grid(rows, columns, {(0, 0): "hole"})
    report.value_figure(dict.fromkeys("12345678", cells), grid, tmp_path / "map.png", title="lake")
    assert max(figures[0].get_size_inches()) < 15


def test_titles_of_maps_have_the_lines_they_were_given(tmp_path):
    maps = {"value iteration,\nsweep 1": report.ValueMap(np.ones(4), np.ones((4, 4)))}
    report.value_figure(maps, Grid(2, 2, {}), tmp_path / "map.svg", title="lake")
    texts = re.findall("<text[^>]*>([^<]*)</text>", (tmp_path / "map.svg").read_text())
    assert {"value iteration,", "sweep 1", "lake"} <= {*texts}


def test_a_value_stands_in_the_cell_of_its_state():
    """Of a world with more columns than rows, with an arrow for each move that is taken."""
    console = Console(width=80, file=StringIO())
    values = report.ValueMap(np.arange(6.0), np.array([[0.6, 0.4, 0.0, 0.0]] * 6))
    console.print(report.value_table(values, Grid(2, 3, {}), title="lake"))
    printed = console.file.getvalue()
    found = [re.findall(r"\d\.\d\d", line) for line in printed.splitlines()]
    assert [line for line in found if line] == [["0.00", "1.00", "2.00"], ["3.00", "4.00", "5.00"]]
    assert len(re.findall("[←↑→↓]", printed)) == 2 * 6
