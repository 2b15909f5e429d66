"""How often the bootstrap intervals of jaxpg/report/statistics.py hold what they estimate, with few seeds.

    python benchmarks/coverage.py

Each run draws as many scores as there are seeds from a known distribution and asks for a 95 % interval, as `jaxpg
compare` does. The share of runs whose interval holds the mean, or the interquartile mean, of the distribution is the
coverage. Of two algorithms it is the share whose interval holds the difference: both are drawn from the same
distribution, so that the rest are told apart by chance. Writes results/coverage.json. Minutes on one core.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from jaxpg.report import statistics
from jaxpg.training.provenance import describe_machine

RESULTS = Path(__file__).parent / "results" / "coverage.json"
RUNS = 10_000
SEEDS = (2, 3, 4, 5, 10)
SEEDS_OF_TWO = (5, 10, 20)
SCORES = {"normal": stats.norm(), "exponential": stats.expon(), "log-normal": stats.lognorm(1.0)}
STATISTICS = {"mean": statistics.mean, "interquartile mean": statistics.interquartile_mean}
OF_TWO = {
    "difference of the interquartile means": (statistics.difference, 0.0),
    "probability of improvement": (statistics.probability_of_improvement, 0.5),
}
GRID = 1_000_000  # equally likely scores that stand for a distribution where its interquartile mean is computed


def truth(scores: stats.distributions.rv_frozen, name: str) -> float:
    """The statistic of the distribution itself."""
    if name == "mean":
        return float(scores.mean())
    return float(statistics.interquartile_mean(scores.ppf((np.arange(GRID) + 0.5) / GRID)))


def coverage(
    scores: stats.distributions.rv_frozen, seeds: int, statistic: Callable[..., np.ndarray], true: float
) -> float:
    """The share of intervals that hold `true`, the same draws for every statistic."""
    drawn = scores.rvs((RUNS, seeds), random_state=np.random.default_rng(seeds))
    interval = statistics.bootstrap(drawn, statistic=statistic)
    return float(np.mean((interval.low <= true) & (true <= interval.high)))


def coverage_of_two(
    scores: stats.distributions.rv_frozen, seeds: int, compare: Callable[..., statistics.Estimate], true: float
) -> float:
    """The share of intervals that hold `true` where two algorithms have the same distribution of scores."""
    rng = np.random.default_rng(seeds)
    interval = compare(*(scores.rvs((RUNS, seeds), random_state=rng) for _ in range(2)))
    return float(np.mean((interval.low <= true) & (true <= interval.high)))


def main() -> None:
    """Draw, count, print and write."""
    statistics.MIN_SCORES = 2  # fewer seeds than that have no interval elsewhere; here is why
    found = {
        scores: {
            name: {seeds: coverage(SCORES[scores], seeds, of, truth(SCORES[scores], name)) for seeds in SEEDS}
            for name, of in STATISTICS.items()
        }
        for scores in SCORES
    }
    of_two = {
        scores: {
            name: {seeds: coverage_of_two(SCORES[scores], seeds, *compared) for seeds in SEEDS_OF_TWO}
            for name, compared in OF_TWO.items()
        }
        for scores in SCORES
    }
    result = {"command": "python benchmarks/coverage.py", "machine": describe_machine(), "runs": RUNS}
    RESULTS.write_text(json.dumps({**result, "coverage": found, "of two algorithms": of_two}, indent=1) + "\n")
    for shares_of, numbers in ((found, SEEDS), (of_two, SEEDS_OF_TWO)):
        table = Table("scores", "interval of the", *(f"{seeds} seeds" for seeds in numbers))
        for scores, of_scores in shares_of.items():
            for name, shares in of_scores.items():
                table.add_row(scores, name, *(f"{share:.1%}" for share in shares.values()))
        Console().print(table)


if __name__ == "__main__":
    main()
