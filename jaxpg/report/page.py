"""The comparison as one self-contained HTML file: figures inline, light or dark by the reader's preference.

There is no script: values are shown on hover by the figures' own titles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from jaxpg.files import setting_text
from jaxpg.report.diagnostics import Metrics, diagnostics_figure
from jaxpg.report.drawing import DEFAULT_UNITS, Units, inline_svg
from jaxpg.report.figures import Curves, curves_figure, finals_figure, ladder_figure
from jaxpg.report.palette import color_of
from jaxpg.report.statistics import MIN_SCORES, Estimate
from jaxpg.user_input.printable import printable

Completions = Mapping[str, Sequence[Any]]
"""heading -> completions, records with prompt, completion, reward and accuracy (`experiments.completions.Sample`)."""

OF_LEADS = (
    "Behind the best: the difference of the IQMs; the best is better: the probability that one of its runs scores "
    "higher, ties counted half; with intervals over the seeds of both. "
)
_CSS = """
:root { color-scheme: light dark; --ink: #24292f; --paper: #ffffff; --quiet: #6a737d; --line: #d8dee4; --tint: #f6f8fa }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #12161c; --quiet: #96a0ab; --line: #2f363e; --tint: #1a2028 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  overflow-wrap: anywhere; font: 1rem/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif }
h1 { margin: 0; font-size: 1.9rem; letter-spacing: -0.015em }
h2 { margin: 2.6rem 0 0.7rem; font-size: 1.15rem }
h2::first-letter { text-transform: uppercase }
p { margin: 0.6rem 0 }
.quiet, summary, dt { color: var(--quiet) }
figure { margin: 1.4rem 0; overflow-x: auto }
svg { display: block; width: 100%; min-width: 34rem; height: auto }
svg text { font-family: inherit !important }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: 0.93rem; font-variant-numeric: tabular-nums }
th, td { padding: 0.42rem 0.45rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { font-weight: 600; color: var(--quiet); font-size: 0.86rem }
th:first-child, td:first-child { text-align: left }
tbody tr:hover { background: var(--tint) }
.key { display: inline-block; width: 0.7em; height: 0.7em; margin-right: 0.5em; border-radius: 50% }
.warning { padding: 0.5rem 0.8rem; border-left: 0.3rem solid #d55e00; background: var(--tint) }
.written { width: auto; font: 0.9rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
.written td { padding: 0.1rem 0.8rem 0.1rem 0; vertical-align: top; border: 0 }
.written .completion { text-align: left; white-space: pre-wrap; overflow-wrap: anywhere }
pre, code { font: 0.86rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
pre { margin: 0; padding: 0.8rem 1rem; overflow-x: auto; background: var(--tint); border-radius: 0.5rem }
details { margin: 0.4rem 0 }
summary { cursor: pointer }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1.2rem;
  margin: 0.4rem 0 0.8rem; font-size: 0.92rem }
dd { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap }
@media print {
  :root { color-scheme: light }
  body { padding: 0; max-width: none; font-size: 0.8rem }
  figure, tr { break-inside: avoid; overflow: visible }
  h2, h2 + p { break-after: avoid }
  svg { min-width: 0 }
  .scroll { overflow: visible }
  th, td { padding: 0.3rem; white-space: normal }
  .key, .warning { print-color-adjust: exact }
  pre { white-space: pre-wrap; overflow-wrap: anywhere }
}
"""


class Findings(NamedTuple):
    """What a page says before it shows anything.

    sentences: what happened, one for each algorithm.
    warnings: what kept them from learning, or from being compared alike.
    """

    sentences: Sequence[str]
    warnings: Sequence[str]


def html_page(
    *,
    title: str,
    threshold: float | None,
    findings: Findings,
    curves: Curves,
    finals: Mapping[str, tuple[np.ndarray, Estimate]],
    rows: Sequence[Sequence[str]],
    seeds: Sequence[Sequence[str]],
    diagnostics: Metrics,
    details: Mapping[str, Any],
    completions: Mapping[str, Completions],
    parents: Mapping[str, str],
    units: Units = DEFAULT_UNITS,
) -> str:
    """The comparison as a page.

    Args:
        title: the task.
        threshold: the return that counts as solved.
        findings: what happened, in sentences.
        curves: algorithm -> (steps, returns), as for `learning_curve`.
        finals: algorithm -> (final performance of each seed, its interquartile mean with interval).
        rows: the table, its header first.
        seeds: the table per seed, its header first.
        diagnostics: algorithm -> (steps, further metrics), as for `diagnostics_figure`.
        details: heading -> text, or a mapping of names to text, numbers and further mappings.
        completions: algorithm -> its completions, by heading.
        parents: algorithm -> its parent.
        units: of the axes.
    """
    learning = curves_figure(curves, title="Learning", threshold=threshold, units=units)
    performance = finals_figure(finals, title="Final performance", threshold=threshold, units=units)
    note = (
        "Learning and steps to threshold: of the episodes of training with their exploration, or of evaluations where "
        "training has none. Final performance: of the last evaluation. "
        "IQM: interquartile mean of the final performance over seeds. "
        f"Intervals: 95% stratified bootstrap, of {MIN_SCORES} or more seeds. "
        "Steps to threshold: until the return is above it, and is so on average over the next tenth of the longest "
        "run; of the median seed, and the number of seeds that reached it. "
        f"{OF_LEADS if len(curves) > 1 else ''}"
        "Steps/s in all: of all seeds together. Before training: the interquartile mean at step 0. "
        "A value is shown where the mouse rests on a curve or a dot."
    )
    lead = "".join(f"<p>{_text(sentence)}</p>" for sentence in findings.sentences)
    warned = "".join(f'<p class="warning">{_text(sentence)}</p>' for sentence in findings.warnings)
    ladder = ladder_figure(curves, parents, title="Each beside its parent", units=units) if len(curves) > 2 else None
    lines = "" if ladder is None else _figure(ladder, f"Each beside its parent: {units.score} over {units.steps}")
    further = diagnostics_figure(diagnostics, units)
    metrics = "" if further is None else _diagnostics(further, units)
    texts = "".join(_completions(name, written, named=len(curves) > 1) for name, written in completions.items())
    sections = "".join(f"<h2>{_text(name)}</h2>{_detail(value)}" for name, value in details.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_CSS}</style></head><body>"
        f"<h1>{_text(title)}</h1>{lead}{warned}"
        f"{_figure(learning, f'Learning: {units.score} over {units.steps}')}{_table(rows, keyed=True)}"
        f'<p class="quiet">{note}</p>{_figure(performance, f"Final performance: {units.score}")}{lines}'
        f"<h2>Each seed</h2>{_table(seeds, keyed=False)}{metrics}{texts}{sections}</body></html>\n"
    )


def _figure(figure: Figure, label: str) -> str:
    """A figure, and what it is for readers who do not see it."""
    return f'<figure role="img" aria-label="{_text(label)}">{inline_svg(figure)}</figure>'


def _diagnostics(figure: Figure, units: Units) -> str:
    note = '<p class="quiet">Interquartile means over seeds.</p>'
    return f"<h2>Diagnostics</h2>{note}{_figure(figure, f'Diagnostics over {units.steps}')}"


def _completions(name: str, written: Completions, *, named: bool) -> str:
    """What a policy wrote, the last first: the reward, the prompt quietly, the answer in the ink of the page."""
    if not written:
        return ""
    blocks = ""
    for place, (heading, samples) in enumerate(reversed(list(written.items()))):
        lines = "".join(
            f'<tr><td>{x.reward:.2f}</td><td>{"✓" if x.is_right else "✗"}</td><td class="completion">'
            f'<span class="quiet">{_text(x.prompt)}</span><b>{_text(x.completion)}</b></td></tr>'
            for x in samples
        )
        opened = " open" if place == 0 else ""
        blocks += (
            f'<details{opened}><summary>{_text(heading)}</summary><table class="written">{lines}</table></details>'
        )
    return f"<h2>Completions{f' of {_text(name)}' if named else ''}</h2>{blocks}"


def _text(value: object) -> str:
    """Text as HTML shows it, in an element or in quotation marks."""
    return escape(printable(value, keep="\n\t"))


def _table(rows: Sequence[Sequence[str]], *, keyed: bool) -> str:
    """A table; if keyed, each row begins with a dot in the colour of its algorithm."""
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in rows[0])
    body = ""
    for row in rows[1:]:
        key = f'<span class="key" style="background:{color_of(row[0])}"></span>' if keyed else ""
        body += f"<tr><td>{key}" + "</td><td>".join(_text(cell) for cell in row) + "</td></tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _detail(value: Any) -> str:
    """Text as it is; a mapping as a list of names and values; a mapping in a mapping as a folded section."""
    if not isinstance(value, Mapping):
        return f"<pre>{_text(value)}</pre>"
    flat = "".join(
        f"<dt>{_text(name)}</dt><dd><code>{_text(setting_text(item))}</code></dd>"
        for name, item in value.items()
        if not isinstance(item, Mapping)
    )
    folded = "".join(
        f"<details><summary>{_text(name)}</summary>{_detail(item)}</details>"
        for name, item in value.items()
        if isinstance(item, Mapping)
    )
    return (f"<dl>{flat}</dl>" if flat else "") + folded
