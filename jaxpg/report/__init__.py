"""Reports: statistics over seeds, figures, a comparison of algorithms, and a policy playing as a GIF."""

from jaxpg.report.comparison import Run, Summary, compare, comparison_table, page, summarize
from jaxpg.report.figures import learning_curve
from jaxpg.report.gif import render_gif
from jaxpg.report.heatmap import sweep_table, write_sweep
from jaxpg.report.statistics import Estimate, binned, bootstrap, interquartile_mean, mean, steps_to_threshold

__all__ = [
    "Estimate",
    "Run",
    "Summary",
    "binned",
    "bootstrap",
    "compare",
    "comparison_table",
    "interquartile_mean",
    "learning_curve",
    "mean",
    "page",
    "render_gif",
    "steps_to_threshold",
    "summarize",
    "sweep_table",
    "write_sweep",
]
