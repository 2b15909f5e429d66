"""Reports: statistics over seeds, figures, comparisons of algorithms, and episodes as GIFs."""

from jaxpg.report.comparison import comparison_page, comparison_table, lead_sentence, write_comparison
from jaxpg.report.drawing import Units
from jaxpg.report.episodes.gif import render_gif
from jaxpg.report.figures import learning_curve
from jaxpg.report.heatmap import beyond_the_grid, sweep_table, write_sweep
from jaxpg.report.statistics import (
    Estimate,
    binned,
    bootstrap,
    difference,
    interquartile_mean,
    mean,
    probability_of_improvement,
    steps_to_threshold,
)
from jaxpg.report.summaries import Lead, RunResult, Summary, summarize
from jaxpg.report.value_map import ValueMap, value_figure, value_table

__all__ = [
    "Estimate",
    "Lead",
    "RunResult",
    "Summary",
    "Units",
    "ValueMap",
    "beyond_the_grid",
    "binned",
    "bootstrap",
    "comparison_page",
    "comparison_table",
    "difference",
    "interquartile_mean",
    "lead_sentence",
    "learning_curve",
    "mean",
    "probability_of_improvement",
    "render_gif",
    "steps_to_threshold",
    "summarize",
    "sweep_table",
    "value_figure",
    "value_table",
    "write_comparison",
    "write_sweep",
]
