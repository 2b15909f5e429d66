"""Algorithms on one task in numbers: final performance, steps to a threshold, and how far the best is ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxpg.report.figures import step_grid
from jaxpg.report.statistics import (
    Estimate,
    binned,
    bootstrap,
    difference,
    interquartile_mean,
    mean,
    probability_of_improvement,
    steps_to_threshold,
    sustained,
)


class RunResult(NamedTuple):
    """The result of one algorithm on a task with S seeds.

    steps: [N] or [N, S], environment steps of a seed when each row was recorded.
    returns: [N, S], mean return of the episodes that ended since the previous row, NaN if none did.
    final: [S], final performance: the mean return of the trained policy over its evaluation episodes.
    seconds: wall time of the whole run, all seeds together.
    steps_per_second: environment steps of all seeds per second of training, without compilation.
    initial: [S], the performance before training, measured like `final`; None if it was not.
    metrics: what else was recorded, `[N, S]` by name; the page draws those of `diagnostics.TITLES`.
    warnings: what kept it from learning, in sentences.
    seeds: [S], their numbers; 0, 1, ... if not given.
    """

    steps: ArrayLike
    returns: ArrayLike
    final: ArrayLike
    seconds: float
    steps_per_second: float
    initial: ArrayLike | None = None
    metrics: Mapping[str, ArrayLike] = {}
    warnings: Sequence[str] = ()
    seeds: Sequence[int] = ()


class Lead(NamedTuple):
    """How far the best algorithm is ahead of another one in final performance, with intervals over the seeds of both.

    difference: of their interquartile means.
    probability: that a run of the best scores higher, ties counted half.
    """

    difference: Estimate
    probability: Estimate

    def is_clear(self) -> bool:
        """Whether the two are told apart; without an interval, as of few seeds, they are not."""
        return bool(self.difference.low > 0)


class Summary(NamedTuple):
    """The row of one algorithm in a comparison.

    iqm, mean: interquartile mean and mean of the final performance, with 95% stratified bootstrap intervals.
    steps_to_threshold: [S], infinite for a seed that never reached it; None without a threshold.
    final, seconds, steps_per_second: as in RunResult.
    initial: interquartile mean of the performance before training, NaN if it was not measured.
    lead: of the best algorithm over this one; None for the best itself, and where nothing was measured.
    """

    iqm: Estimate
    mean: Estimate
    steps_to_threshold: np.ndarray | None
    final: np.ndarray
    seconds: float
    steps_per_second: float
    initial: float
    lead: Lead | None = None


def summarize(runs: Mapping[str, RunResult], threshold: float | None = None) -> dict[str, Summary]:
    """Summarise each run.

    Steps to the threshold are read from curves on one common grid, that of `learning_curve`, where they are above it,
    and are so on average over the next tenth of the longest run: a single lucky batch does not favour an algorithm with
    short iterations.

    Args:
        runs: algorithm -> its result.
        threshold: the return that counts as solved.
    """
    edges = step_grid({name: (run.steps, run.returns) for name, run in runs.items()})
    summaries = {name: _summary(run, edges, threshold) for name, run in runs.items()}
    best = best_of(summaries)
    return {name: s._replace(lead=_lead(best, name, summaries)) for name, s in summaries.items()}


def best_of(summaries: Mapping[str, Summary]) -> str | None:
    """The algorithm of the largest interquartile mean, of equal ones the largest mean; None where none was measured."""
    ranks = {name: (summary.iqm.value, summary.mean.value) for name, summary in summaries.items()}
    known = [name for name, rank in ranks.items() if math.isfinite(rank[0])]
    return max(known, key=lambda name: ranks[name], default=None)


def _lead(best: str | None, name: str, summaries: Mapping[str, Summary]) -> Lead | None:
    if best is None or name == best or not math.isfinite(summaries[name].iqm.value):
        return None
    finals = summaries[best].final, summaries[name].final
    return Lead(difference(*finals), probability_of_improvement(*finals))


def _summary(run: RunResult, edges: np.ndarray, threshold: float | None) -> Summary:
    final = np.asarray(run.final, float)
    steps = None
    if threshold is not None:
        steps = steps_to_threshold(edges[1:], sustained(binned(run.steps, run.returns, edges)), threshold)
    return Summary(
        iqm=bootstrap(final, statistic=interquartile_mean),
        mean=bootstrap(final, statistic=mean),
        steps_to_threshold=steps,
        final=final,
        seconds=run.seconds,
        steps_per_second=run.steps_per_second,
        initial=math.nan if run.initial is None else float(interquartile_mean(run.initial)),
    )
