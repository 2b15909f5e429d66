"""Statistics over seeds, as recommended by Agarwal et al. 2021 ("Deep RL at the Edge of the Statistical Precipice")."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from jaxpg.errors import UserError

Floats = np.ndarray  # float64
MIN_SCORES = 5
"""The fewest scores that have an interval. A 95% interval of two is their range. It covers the mean of normal scores in
49% of cases with two of them, 75% with three, 80% with four, 84% with five and 91% with ten
(benchmarks/coverage.py)."""


class Estimate(NamedTuple):
    """A statistic with its confidence interval, arrays of one shape."""

    value: Floats
    low: Floats
    high: Floats


def interquartile_mean(scores: ArrayLike, axis: int = -1) -> Floats:
    """Mean of the middle half: a quarter of the scores, rounded down, is left out at each end (Agarwal et al., §4.3).

    More robust to a single lucky or failed seed than the mean, more efficient than the median.

    Args:
        scores: one score per seed along `axis`.
        axis: the axis of the seeds.
    """
    return stats.trim_mean(np.asarray(scores, float), 0.25, axis=axis)


def mean(scores: ArrayLike, axis: int = -1) -> Floats:
    """Plain average over `axis`, the counterpart of `interquartile_mean`."""
    return np.mean(np.asarray(scores, float), axis=axis)


def bootstrap(
    *strata: ArrayLike,
    statistic: Callable[..., Floats] = interquartile_mean,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Estimate:
    """A statistic over seeds with its stratified percentile-bootstrap interval (Agarwal et al., §4.1).

    Every stratum (a task) is resampled separately, with replacement, so that each resample has as many runs of each
    task as the data; the statistic is computed over all of them together. The interval is from the (1 − level)/2 to the
    (1 + level)/2 quantile of the resampled statistics. If a stratum is a seed, with the mean of each of its start
    states, the interval is over start states, for these seeds.

    Args:
        strata: one array `[..., S]` per task, seeds last; leading axes (points of a curve) are treated one by one.
            Fewer than MIN_SCORES seeds in all, or a single one of a task, have no interval.
        statistic: maps scores to numbers along `axis`.
        level: nominal coverage of the interval.
        resamples: number of resamples.
        seed: of the resampling, so that a report can be reproduced.

    Returns:
        Arrays of the leading shape. Where a score is not finite all three are NaN; where there is no interval its
        ends are.

    Raises:
        UserError: there is no stratum, or one has no seeds.
    """
    data = [np.atleast_1d(np.asarray(scores, float)) for scores in strata]
    if not data or any(scores.shape[-1] == 0 for scores in data):
        raise UserError("An interval over seeds needs at least one seed of every task.")
    result = np.full((3, *data[0].shape[:-1]), np.nan)
    known = np.all([np.isfinite(scores).all(axis=-1) for scores in data], axis=0)
    complete = [scores[known] for scores in data]
    if known.any():
        result[0, known] = statistic(np.concatenate(complete, axis=-1), axis=-1)
    sizes = [scores.shape[-1] for scores in data]
    if known.any() and min(sizes) > 1 and sum(sizes) >= MIN_SCORES:
        result[1:, known] = stats.bootstrap(
            complete,
            lambda *resampled, axis: statistic(np.concatenate(resampled, axis=axis), axis=axis),
            n_resamples=resamples,
            batch=max(1, 2_000_000 // sum(scores.size for scores in complete)),  # bounds the memory to 16 MB
            vectorized=True,
            axis=-1,
            confidence_level=level,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return Estimate(*result)


def difference(x: ArrayLike, y: ArrayLike, *, statistic: Callable[..., Floats] = interquartile_mean) -> Estimate:
    """statistic(x) − statistic(y) with its `bootstrap` interval; one without 0 tells the two apart.

    Seeds of both are resampled, independently of each other, also where they have the same numbers: what two algorithms
    do with a random key differs from the first step on. With 5 scores of each from one distribution, normal or with a
    long tail, the interval holds 0 in 93% of cases, with 10 in 95% (benchmarks/coverage.py).

    Args:
        x: Scores `[..., S]` of one algorithm, seeds last.
        y: Scores `[..., S]` of the other. Fewer than MIN_SCORES of either have no interval.
        statistic: maps scores to numbers along `axis`.
    """
    return _of_two(x, y, lambda x, y: statistic(x, axis=-1) - statistic(y, axis=-1))


def probability_of_improvement(x: ArrayLike, y: ArrayLike) -> Estimate:
    """P(X > Y) + P(X = Y)/2 for a score of each, over all pairs, with its `bootstrap` interval (Agarwal et al., §4.3).

    0.5 where neither is better. It says how often, and not how much. Arguments are those of `difference`.
    """
    return _of_two(x, y, _share_of_wins)


def _share_of_wins(x: Floats, y: Floats) -> Floats:
    x, y = x[..., :, None], y[..., None, :]
    return np.mean((x > y) + 0.5 * (x == y), axis=(-2, -1))


def _of_two(x: ArrayLike, y: ArrayLike, compare: Callable[[Floats, Floats], Floats]) -> Estimate:
    """What `compare` makes of the scores `[..., S]` of two algorithms, with an interval over the seeds of both."""
    sizes = [np.shape(scores)[-1] for scores in (x, y)]

    def of_both(scores: Floats, axis: int) -> Floats:
        return compare(*np.split(np.moveaxis(scores, axis, -1), sizes[:1], axis=-1))

    found = bootstrap(x, y, statistic=of_both)
    unknown = np.full_like(found.value, np.nan)
    return found if min(sizes) >= MIN_SCORES else found._replace(low=unknown, high=unknown)


def binned(steps: ArrayLike, returns: ArrayLike, edges: ArrayLike) -> Floats:
    """Curves of all seeds on one common grid of steps, `[bins, S]`.

    A bin `(edges[i], edges[i + 1]]` has the mean of the rows recorded in it, and the first bin also has a row at
    `edges[0]`, the evaluation before training. Empty bins between recordings are filled
    by linear interpolation, and a seed that has rows after its last return, in which no episode ended, keeps that
    return up to the last of them; bins before its first return and after its last row are NaN, so nothing is
    extrapolated. A row that does not advance (a seed that waits for the others) is ignored.

    Args:
        steps: [N] or [N, S], environment steps when each row was recorded, ascending.
        returns: [N, S], NaN where no episode ended.
        edges: [bins + 1], ascending.
    """
    returns, edges = np.asarray(returns, float), np.asarray(edges, float)
    steps = per_seed(steps, returns)
    return np.stack([_binned_seed(s, r, edges) for s, r in zip(steps.T, returns.T, strict=True)], axis=1)


def middles(edges: Floats) -> Floats:
    """The middles of bins."""
    return (edges[:-1] + edges[1:]) / 2


def per_seed(steps: ArrayLike, returns: Floats) -> Floats:
    """Steps `[N]` or `[N, S]` in the shape of returns, `[N, S]`.

    Raises:
        UserError: the shapes do not match.
    """
    steps = np.asarray(steps, float)
    columns = steps[:, None] if steps.ndim == 1 else steps
    if returns.ndim != 2 or columns.shape not in (returns.shape, (len(returns), 1)):
        raise UserError(f"returns must be [N, S] and steps [N] or [N, S], not {returns.shape} and {steps.shape}")
    return np.broadcast_to(columns, returns.shape)


def _binned_seed(steps: Floats, returns: Floats, edges: Floats) -> Floats:
    bins = len(edges) - 1
    index = np.where(steps == edges[0], 0, np.searchsorted(edges, steps, side="left") - 1)
    advanced = np.diff(steps, prepend=-np.inf) > 0
    real = np.isfinite(returns) & advanced & (index >= 0) & (index < bins)
    counts = np.bincount(index[real], minlength=bins)
    sums = np.bincount(index[real], weights=returns[real], minlength=bins)
    filled = counts > 0
    if not filled.any():
        return np.full(bins, np.nan)
    centers = middles(edges)
    curve = np.interp(centers, centers[filled], sums[filled] / counts[filled], left=np.nan)
    last_row = index[advanced & (index >= 0) & (index < bins)].max()
    return np.where(np.arange(bins) <= last_row, curve, np.nan)


def sustained(curves: ArrayLike, bins: int = 10) -> Floats:
    """The lower of each value of a curve and the mean of the `bins` values that begin with it, NaN where it is.

    This reaches a threshold where the curve does and stays above it on average. The largest of a hundred noisy values
    says little: bins of a dozen episodes of CartPole reach 475 somewhere in most runs of a policy that is worth
    430 all along. The last values, which fewer follow, have the mean of the last `bins`.

    Args:
        curves: [N, S], as of `binned`.
        bins: how many values make a mean.
    """
    return np.apply_along_axis(_sustained_seed, 0, np.asarray(curves, float), bins)


def _sustained_seed(curve: Floats, bins: int) -> Floats:
    result, known = np.full(curve.shape, np.nan), np.flatnonzero(np.isfinite(curve))
    for i in known:
        first = max(known[0], min(i, known[-1] + 1 - bins))
        result[i] = min(curve[i], curve[first : min(first + bins, known[-1] + 1)].mean())
    return result


def steps_to_threshold(steps: ArrayLike, returns: ArrayLike, threshold: float) -> Floats:
    """Environment steps at the first row that reaches the threshold, `[S]`; infinite where none does.

    A single lucky row counts, so pass curves that are averaged over the same bins for all algorithms: `sustained` ones
    of `binned`.

    Args:
        steps: [N] or [N, S].
        returns: [N, S], NaN where nothing was recorded.
        threshold: the return that counts as solved.
    """
    returns = np.asarray(returns, float)
    return np.where(returns >= threshold, per_seed(steps, returns), np.inf).min(axis=0, initial=np.inf)
