"""Diagnostics: what a return and a loss do not show of a run, a small figure for each metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike

from jaxpg.report.drawing import DEFAULT_UNITS, STYLE, Units, broken, literal, scale_steps
from jaxpg.report.hover import add_hover
from jaxpg.report.palette import LineStyle, line_styles
from jaxpg.report.statistics import Floats, binned, interquartile_mean, middles, per_seed
from jaxpg.rollout.metrics import OF_ENV

TITLES = {
    "evaluation_return": "evaluation, return",
    "evaluation_accuracy": "evaluation, accuracy",
    "accuracy": "accuracy",
    "reward_accuracy": "share of pairs as judged",
    "truncated": "share of completions cut off",
    "frac_zero_std": "share of groups without signal",
    "entropy": "entropy of the policy, nats",
    "approx_kl": "KL to the collecting policy, nats",
    "clipped_high": "share clipped above",
    "clipped_low": "share clipped below",
    "reference_kl": "KL to the reference, nats",
    "episode_reference_kl": "KL to the reference, nats per episode",
    "kl_coefficient": "weight of the KL",
    "explained_variance": "explained variance of the critic",
    "policy_gradient_norm": "gradient norm, policy",
    "value_gradient_norm": "gradient norm, critic",
    "gradient_norm": "gradient norm",
    "advantage_mean": "advantages, mean",
    "advantage_std": "advantages, standard deviation",
    "advantage_min": "advantages, smallest",
    "advantage_max": "advantages, largest",
    "advantage_positive": "advantages, share above 0",
    "return_variation": "returns, coefficient of variation",
    "length": "episode length, steps",
    "q_value": "action value, mean",
    "td_loss": "TD loss",
    "epsilon": "epsilon",
}
"""The metrics that are drawn, in this order, with their titles and units."""
LEFT_OUT = {"gradient_norm": "policy_gradient_norm", "reward_accuracy": "accuracy"}
"""Metrics that are not drawn of a run that has another: the whole gradient beside its parts; `reward_accuracy` beside
`accuracy`, where it is not DPO's share of pairs but the mean of the reward of that name."""
LOGARITHMIC = ("policy_gradient_norm", "value_gradient_norm", "gradient_norm", "td_loss")
COLUMNS, BINS, WIDTH = 3, 50, 7.6
LONGEST_TITLE = 42  # letters, of a panel
FEW = 12  # places up to which each has a dot: a line between two evaluations looks like many
Metrics = Mapping[str, tuple[ArrayLike, Mapping[str, ArrayLike]]]
"""label -> (steps `[N]` or `[N, S]`, metric -> values `[N, S]`)."""


def diagnostics_figure(runs: Metrics, units: Units = DEFAULT_UNITS) -> Figure | None:
    """The interquartile mean over seeds of every metric of TITLES over steps, a panel each, and of the environment's.

    None if no run has a metric.
    """
    curves = {label: _curves(steps, metrics) for label, (steps, metrics) in runs.items()}
    found = dict.fromkeys(name for _, metrics in curves.values() for name in metrics)
    drawn = [*(name for name in TITLES if name in found), *(name for name in found if name not in TITLES)]
    if not drawn:
        return None
    styles = line_styles(curves)
    rows = -(-len(drawn) // COLUMNS)
    with matplotlib.rc_context(STYLE):
        keys, across, height = _keys(styles)
        figure = Figure(figsize=(WIDTH, 0.6 + height + 1.55 * rows), layout="constrained")
        for name, axes in zip(drawn, figure.subplots(rows, COLUMNS, squeeze=False).flat, strict=False):
            for label, (steps, metrics) in curves.items():
                if name in metrics:
                    values, measured = metrics[name]
                    marks = {"marker": "o", "markevery": measured, "markersize": 3} if len(measured) <= FEW else {}
                    axes.plot(steps, values, **marks, **_line(styles[label]))
                    add_hover(axes, steps[:: BINS // 10], values[:: BINS // 10], label)
            _decorate(axes, name)
        for axes in figure.axes[len(drawn) :]:
            axes.remove()
        figure.supxlabel(literal(units.steps), fontsize=9)
        figure.legend(handles=keys, loc="outside upper left", ncols=across, frameon=False, fontsize=8)
    return figure


def _keys(styles: Mapping[str, LineStyle]) -> tuple[list[Line2D], int, float]:
    """A key for each name, which may be long; how many stand side by side, and the height of all in inches."""
    keys = [Line2D([], [], label=broken(label), **_line(style)) for label, style in styles.items()]
    names = [str(key.get_label()).split("\n") for key in keys]
    widest = max(len(line) for name in names for line in name)
    across = max(1, min(5, int(WIDTH / (0.6 + 0.08 * widest))))  # of letters of 8 points
    return keys, across, 0.14 * -(-len(keys) // across) * max(map(len, names))


def _line(style: LineStyle) -> dict[str, Any]:
    return {"color": style.color, "linestyle": style.dashes, "linewidth": 1.2}


def _curves(steps: ArrayLike, metrics: Mapping[str, ArrayLike]) -> tuple[Floats, dict[str, tuple[Floats, list[int]]]]:
    """Centres of equal bins of steps, and the interquartile mean over seeds of every metric to draw.

    With each mean are the bins in which something was measured. Those in between are interpolated.
    """
    edges = np.linspace(0.0, float(np.nanmax(np.asarray(steps, float), initial=0.0)) or 1.0, BINS + 1)
    means = {
        name: interquartile_mean(binned(steps, values, edges))
        for name, values in metrics.items()
        if (name in TITLES or name.startswith(OF_ENV)) and LEFT_OUT.get(name) not in metrics
    }
    found = {name: x for name, x in means.items() if np.isfinite(x).any()}
    return middles(edges), {name: (x, _measured(steps, metrics[name], edges)) for name, x in found.items()}


def _measured(steps: ArrayLike, values: ArrayLike, edges: Floats) -> list[int]:
    """The bins in which a seed has a value."""
    known = np.isfinite(np.asarray(values, float))
    at = per_seed(steps, np.asarray(values, float))[known]
    return np.unique(np.clip(np.searchsorted(edges, at, side="left") - 1, 0, None)).tolist()


def _decorate(axes: Axes, name: str) -> None:
    title = TITLES.get(name) or f"{name.removeprefix(OF_ENV)}, mean over episodes"
    shown = title if len(title) <= LONGEST_TITLE else f"{title[: LONGEST_TITLE - 3]}..."
    axes.set_title(literal(shown), loc="left", fontsize=8)
    axes.tick_params(which="both", length=2, width=0.6, labelsize=7)
    scale_steps(axes, logarithmic=False, ticks=3)
    axes.grid(axis="y")
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    low, high = np.nanmin(values), np.nanmax(values)
    if name in LOGARITHMIC and 0 < 10 * low < high:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        if high < 100 * low:  # a power of ten alone would be a single number
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.get_offset_text().set_fontsize(6)
