"""Algorithms compared on one task: final performance, sample efficiency and speed; as a table, JSON and HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from jaxpg.files import replace_file
from jaxpg.ladder_settings import PARENTS
from jaxpg.report.drawing import DEFAULT_UNITS, Units
from jaxpg.report.figures import learning_curve
from jaxpg.report.page import Completions, Findings, html_page
from jaxpg.report.palette import color_of
from jaxpg.report.statistics import Estimate
from jaxpg.report.summaries import Lead, RunResult, Summary, best_of, summarize
from jaxpg.user_input.printable import printable

COLUMNS = ("algorithm", "IQM [95%]", "mean [95%]", "steps to threshold", "steps/s in all", "wall time")


TABLE_WIDTH = 80
"""Columns of a terminal in which `comparison_table` loses neither a column nor a part of a number."""


def cells(name: str, summary: Summary) -> tuple[str, ...]:
    """One algorithm's row as text, a cell for each of COLUMNS."""
    steps = summary.steps_to_threshold
    return (
        name,
        format_estimate(summary.iqm),
        format_estimate(summary.mean),
        "–" if steps is None else _median_steps(steps),
        format_quantity(summary.steps_per_second),
        format_duration(summary.seconds),
    )


LEAD_COLUMNS = ("behind the best [95%]", "the best is better [95%]")


def _lead_cells(lead: Lead | None) -> tuple[str, ...]:
    """The cells of an algorithm for LEAD_COLUMNS; dashes for the best itself."""
    if lead is None:
        return ("–",) * len(LEAD_COLUMNS)
    return format_estimate(lead.difference), format_estimate(lead.probability)


def comparison_table(summaries: Mapping[str, Summary], *, title: str) -> Table:
    """The comparison for the terminal; each interval is below its value, so that TABLE_WIDTH columns are enough."""
    before = _before_training(summaries)
    table = Table(
        *COLUMNS,
        title=Text(printable(title), "bold"),
        title_justify="left",
        caption=None if before is None else Text(printable(before)),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.columns[0].overflow = "fold"  # of a long name no letter is lost
    for column in table.columns[1:]:
        column.justify = "right"
        column.min_width = max(map(len, str(column.header).split()))
    for column in table.columns[1:3]:
        column.no_wrap = True
    for name, summary in summaries.items():
        first, *rest = cells(name, summary)
        table.add_row(Text(printable(first), f"bold {color_of(name)}"), *map(_stacked, rest))
    return table


def lead_sentence(summaries: Mapping[str, Summary]) -> str:
    """How far the best is ahead of those that it is told apart from, and which it is not; "" with nothing to compare.

    ppo is ahead of a2c by 120.3 [80.1, 160.0] (IQM), not told apart from trpo.
    """
    leads = {name: summary.lead for name, summary in summaries.items() if summary.lead}
    clear = [f"{name} by {format_estimate(lead.difference)}" for name, lead in leads.items() if lead.is_clear()]
    others = [name for name, lead in leads.items() if not lead.is_clear()]
    said = [f"ahead of {', '.join(clear)} (IQM)"] if clear else []
    said += [f"not told apart from {', '.join(others)}"] if others else []
    return f"{best_of(summaries)} is {', '.join(said)}." if said else ""


def _stacked(cell: str) -> Text:
    """A cell with what is in brackets in a line of its own, and each end of a wide interval too."""
    value, *bracketed = cell.replace(" (", "\n(").split(" [")
    return Text("\n[".join([value, *(x.replace(", ", ",\n") if len(x) > 18 else x for x in bracketed)]))


def _before_training(summaries: Mapping[str, Summary]) -> str | None:
    """What the initial policies score, in one number where all of them score the same; None if none was measured."""
    scores = {name: format_number(s.initial) for name, s in summaries.items() if math.isfinite(s.initial)}
    if not scores:
        return None
    same = len(scores) == len(summaries) and len(set(scores.values())) == 1
    listed = scores.values() if same else [f"{name} {score}" for name, score in scores.items()]
    return f"before training (IQM): {', '.join(dict.fromkeys(listed))}"


def write_comparison(
    runs: Mapping[str, RunResult],
    directory: str | Path,
    *,
    title: str,
    threshold: float | None = None,
    details: Mapping[str, Any],
    completions: Mapping[str, Completions] = MappingProxyType({}),
    units: Units = DEFAULT_UNITS,
    differences: Sequence[str] = (),
) -> dict[str, Summary]:
    """Write `comparison.json`, `comparison.html` (self-contained) and `learning_curve.png` into a directory.

    Args:
        runs: algorithm -> its result.
        directory: an existing directory.
        title: the task.
        threshold: the return that counts as solved.
        details: how the numbers were produced (command, configs, versions, device): text, numbers and mappings of
            them, by heading; printed at the end of the page and stored in the JSON.
        completions: algorithm -> what it wrote, by heading.
        units: of the axes.
        differences: what the algorithms were not given alike, in sentences; page and JSON warn of it.

    Returns:
        The summaries, for `comparison_table`.
    """
    directory = Path(directory)
    curves = {name: (run.steps, run.returns) for name, run in runs.items()}
    summaries = summarize(runs, threshold)
    learning_curve(curves, directory / "learning_curve.png", title=title, threshold=threshold, units=units)
    record = {
        "title": title,
        "threshold": threshold,
        "algorithms": summaries,
        "seeds": {name: _numbers(run) for name, run in runs.items()},
        "warnings": _warnings(runs, differences),
        "details": details,
    }
    text = json.dumps(to_jsonable(record), indent=2, allow_nan=False)
    replace_file(directory / "comparison.json", text + "\n")
    page = comparison_page(
        runs,
        title=title,
        threshold=threshold,
        details=details,
        completions=completions,
        units=units,
        differences=differences,
    )
    replace_file(directory / "comparison.html", page)
    return summaries


def comparison_page(
    runs: Mapping[str, RunResult],
    *,
    title: str,
    threshold: float | None = None,
    details: Mapping[str, Any],
    completions: Mapping[str, Completions] = MappingProxyType({}),
    units: Units = DEFAULT_UNITS,
    differences: Sequence[str] = (),
) -> str:
    """The comparison as one self-contained HTML page; arguments as for `write_comparison`."""
    summaries = summarize(runs, threshold)
    compared = any(summary.lead for summary in summaries.values())
    return html_page(
        title=title,
        threshold=threshold,
        findings=Findings(sentences(runs, summaries, threshold, units), _warnings(runs, differences)),
        curves={name: (run.steps, run.returns) for name, run in runs.items()},
        finals={name: (summary.final, summary.iqm) for name, summary in summaries.items()},
        rows=[
            (*COLUMNS, "before training", *(LEAD_COLUMNS if compared else ())),
            *(
                (*cells(name, s), format_number(s.initial), *(_lead_cells(s.lead) if compared else ()))
                for name, s in summaries.items()
            ),
        ],
        seeds=[("seed", *runs), *_per_seed(runs)],
        diagnostics={name: (run.steps, run.metrics) for name, run in runs.items()},
        details=details,
        completions=completions,
        parents=PARENTS,
        units=units,
    )


def _warnings(runs: Mapping[str, RunResult], differences: Sequence[str]) -> list[str]:
    """What a reader should know before trusting a comparison, in sentences."""
    return [*differences, *(f"{name}: {sentence}" for name, run in runs.items() for sentence in run.warnings)]


def sentences(
    runs: Mapping[str, RunResult], summaries: Mapping[str, Summary], threshold: float | None, units: Units
) -> list[str]:
    """What happened: of up to three algorithms each, of more the best and the fastest; the table has the others."""
    words = _best_and_fastest(summaries) if len(summaries) > 3 else dict.fromkeys(summaries, "")
    return [word + _sentence(name, runs[name], summaries[name], threshold, units) for name, word in words.items()]


def _best_and_fastest(summaries: Mapping[str, Summary]) -> dict[str, str]:
    """Of the best algorithm and of the first at the threshold, if it is another and one got there: what it is.

    Those that it is not told apart from (`Lead.is_clear`) are named with the best.
    """
    best, others = best_of(summaries), [name for name, s in summaries.items() if s.lead and not s.lead.is_clear()]
    medians = {name: _median(summary.steps_to_threshold) for name, summary in summaries.items()}
    fastest = min(medians, key=lambda name: medians[name])
    words = {}
    if best is not None:
        words[best] = f"Best, not told apart from {', '.join(others)}: " if others else "Best: "
    if math.isfinite(medians[fastest]):
        words.setdefault(fastest, "First at the threshold: ")
    return words


def _sentence(name: str, run: RunResult, summary: Summary, threshold: float | None, units: Units) -> str:
    """What happened: ppo: episode return 498.2 [497.1, 500.0] after 500 k environment steps, 21.30 before training."""
    steps = format_quantity(float(np.max(np.asarray(run.steps, float), initial=0.0)))
    before = f", {format_number(summary.initial)} before training" if math.isfinite(summary.initial) else ""
    sentence = f"{name}: {units.score} {format_estimate(summary.iqm)} after {steps} {units.steps}{before}"
    reached = summary.steps_to_threshold
    if reached is None or threshold is None:
        return f"{sentence}."
    count = int(np.isfinite(reached).sum())
    median = _median(reached)
    first = f", the median after {format_quantity(median)}" if math.isfinite(median) else ""
    return f"{sentence}; {count} of {len(reached)} seeds reached {threshold:g} in training{first}."


def _per_seed(runs: Mapping[str, RunResult]) -> list[tuple[str, ...]]:
    """Final performance, a row per number of a seed and a column per algorithm; a dash where it has no such seed."""
    columns = [
        {seed: format_number(x) for seed, x in zip(_numbers(run), np.asarray(run.final, float), strict=True)}
        for run in runs.values()
    ]
    numbers = dict.fromkeys(seed for column in columns for seed in column)
    return [(str(seed), *(column.get(seed, "–") for column in columns)) for seed in numbers]


def _numbers(run: RunResult) -> list[int]:
    """The numbers of the seeds of a run."""
    return [int(x) for x in run.seeds] or list(range(len(np.asarray(run.final))))


def to_jsonable(value: Any) -> Any:
    """A value in JSON's types: records as objects, arrays as lists, numbers that are not finite as null."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_jsonable(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return to_jsonable(value.tolist())
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str | None) else str(value)


def format_number(x: float) -> str:
    """Four significant digits in decimal notation, from 0.001 to a million; a dash if not finite."""
    if not math.isfinite(x):
        return "–"
    if not 1e-3 <= abs(x) < 1e6:
        return f"{x:.4g}" if x else "0"
    return f"{x:.{max(0, 3 - max(0, math.floor(math.log10(abs(x)))))}f}"


def format_quantity(x: float) -> str:
    """Three significant digits and a prefix: 12.3 k, 1.5 M."""
    if not math.isfinite(x):
        return "–"
    x = float(f"{x:.3g}")  # so that 999 999 is 1 M, not 1000 k
    for scale, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if x >= scale:
            return f"{x / scale:.3g}{prefix}"
    return f"{x:.3g}"


def format_duration(seconds: float) -> str:
    """A wall time in minutes and seconds, or hours, minutes and seconds: 0:42, 3:05, 2:10:00."""
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_estimate(estimate: Estimate) -> str:
    """A value with its interval, if it has one."""
    value, low, high = (format_number(float(x)) for x in estimate)
    return value if low == "–" else f"{value} [{low}, {high}]"


def _median_steps(steps: np.ndarray) -> str:
    """The median of the steps to the threshold, and the number of seeds that reached it."""
    return f"{format_quantity(_median(steps))} ({np.isfinite(steps).sum()}/{len(steps)})"


def _median(steps: np.ndarray | None) -> float:
    """The median of the steps, infinite unless more than half of the seeds arrived, or without a threshold."""
    return math.inf if steps is None else float(np.median(steps))
