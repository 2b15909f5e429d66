"""Training that leads nowhere, as its metrics show it: what is wrong, and what may help, in a sentence for each cause.

A number that is not finite is another matter (health.py). Here all numbers are in order, and yet nothing is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

PART = 0.2
"""The share of a run for which a cause has to last before it is named."""
MIN_ROWS = 10
"""Fewer rows than these say nothing."""
FIRST_ROWS = 5
GONE = 1e-3
"""Nats. Below that a policy takes the same action at least 9,999 times in 10,000."""
READ = (
    "steps",
    "iterations",
    "return",
    "evaluation_return",
    "accuracy",
    "advantage_std",
    "truncated",
    "entropy",
    "updates",
)
"""The metrics that `stalls` reads."""
Metrics = Mapping[str, np.ndarray]


class _Window(NamedTuple):
    """The rows of training that are judged.

    first: metrics of the first FIRST_ROWS rows, [n, S].
    last: of the last PART of all steps of the run, [n, S].
    untrained: [S], the evaluation before training, NaN if there was none.
    halfway: whether half of the run is done.
    """

    first: Metrics
    last: Metrics
    untrained: np.ndarray
    halfway: bool


def stalls(metrics: Metrics, *, total_steps: int, threshold: float | None = None) -> dict[str, str]:
    """What keeps a run from learning, by cause; empty as long as nothing is certain.

    A cause is named where it has lasted for PART of the run, in at least MIN_ROWS rows, in half of the seeds or more.
    None is named for a seed that has solved its task (return at the threshold, or 99% of its answers right) or that has
    learned: its return is higher than in the first rows by three standard errors, or its evaluation is higher than
    before training by the standard deviation of a row. The causes:

    - "signal": all advantages were 0.
    - "truncated": all completions were cut off by the limit of their length.
    - "entropy": a policy over discrete actions takes the same ones always, and has not learned.
    - "return": no return differed from another. From the middle of the run on also: the return is higher than at the
      start by less than half of the standard deviation of a row.

    Args:
        metrics: name -> [N, S], all rows so far, as `run_directory.stack_rows` gives them.
        total_steps: environment steps of each seed.
        threshold: the return that counts as solved.
    """
    window = _window(metrics, total_steps)
    if window is None or "return" not in metrics:
        return {}
    unlearned = ~(_has_learned(window) | _is_solved(window, threshold))
    found: dict[str, str] = {}
    for cause, (stalled, sentence) in CAUSES.items():
        seeds = unlearned & stalled(window)
        if 2 * seeds.sum() >= len(seeds):
            found[cause] = sentence.format(value=f"{np.nanmean(window.last['return'][:, seeds]):.4g}")
    if "signal" in found or "truncated" in found:
        found.pop("return", None)  # it follows
    return found


def _window(metrics: Metrics, total_steps: int) -> _Window | None:
    """The rows to judge, None as long as there are too few."""
    trained = metrics["iterations"].max(1) > 0
    rows = {name: x[trained] for name, x in metrics.items() if np.ndim(x) == 2}
    nothing = np.full(metrics["steps"].shape, np.nan)
    done = rows["steps"].min(1)
    if not len(done) or done[-1] < PART * total_steps:
        return None
    recent = done > done[-1] - PART * total_steps
    if recent.sum() < MIN_ROWS:
        return None
    return _Window(
        first={name: x[:FIRST_ROWS] for name, x in rows.items()},
        last={name: x[recent] for name, x in rows.items()},
        untrained=np.where(trained[0], np.nan, metrics.get("evaluation_return", nothing)[0]),
        halfway=bool(done[-1] >= 0.5 * total_steps),
    )


def _moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means, variances and counts of the finite values of each seed, [S] each."""
    known = np.isfinite(values)
    count = known.sum(0)
    mean = np.where(known, values, 0.0).sum(0) / np.maximum(count, 1)
    return mean, np.where(known, (values - mean) ** 2, 0.0).sum(0) / np.maximum(count - 1, 1), count


def _has_learned(window: _Window) -> np.ndarray:
    (before, noise, n), (after, noise_after, m) = (_moments(x["return"]) for x in (window.first, window.last))
    learned = after > before + 3 * np.sqrt(noise / np.maximum(n, 1) + noise_after / np.maximum(m, 1)) + 1e-6 * np.abs(
        before
    )
    if "evaluation_return" not in window.last:
        return learned
    evaluated, _, evaluations = _moments(window.last["evaluation_return"])
    return learned | ((evaluations > 0) & (evaluated > window.untrained + np.sqrt(noise)))


def _is_solved(window: _Window, threshold: float | None) -> np.ndarray:
    mean = _moments(window.last["return"])[0]
    solved = np.zeros(len(mean), bool) if threshold is None else mean >= threshold
    return solved | (_moments(window.last["accuracy"])[0] >= 0.99 if "accuracy" in window.last else False)


def _always(window: _Window, name: str, holds: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The seeds for which it holds in every row of the window; none where there is no such metric."""
    if name not in window.last:
        return np.zeros(window.last["steps"].shape[1], bool)
    return np.asarray(holds(window.last[name]).all(0))


def _without_signal(window: _Window) -> np.ndarray:
    return _always(window, "advantage_std", lambda x: x < 1e-6)


def _truncated(window: _Window) -> np.ndarray:
    return _always(window, "truncated", lambda x: x > 1 - 1e-6)


def _without_entropy(window: _Window) -> np.ndarray:
    gone = _always(window, "entropy", lambda x: (x >= 0) & (x < GONE))  # of a continuous policy it is soon below 0
    return gone & ~_always(window, "updates", lambda x: x == 0)  # which leave no step to measure it by


def _unmoved(window: _Window) -> np.ndarray:
    (before, noise, _), (after, noise_after, count) = (_moments(x["return"]) for x in (window.first, window.last))
    constant = (count >= MIN_ROWS) & (noise == 0) & (noise_after == 0) & (before == after)
    return constant | (window.halfway & (count >= MIN_ROWS) & (after < before + 0.5 * np.sqrt(noise)))


CAUSES: dict[str, tuple[Callable[[_Window], np.ndarray], str]] = {
    "signal": (
        _without_signal,
        "For a fifth of the run all advantages have been 0: all episodes of each comparison had the same return "
        "({value} on average), so there is nothing to learn from. Unless the task is solved, start with easier "
        "problems, a larger group_size, or a reward that rises in steps.",
    ),
    "truncated": (
        _truncated,
        "For a fifth of the run every completion has been cut off at the limit of its length, and no answer is "
        "finished. Begin with a fine-tuned policy (--from RUN), or allow longer completions.",
    ),
    "entropy": (
        _without_entropy,
        "For a fifth of the run the policy has been deterministic (its entropy is below 0.001 nats), and "
        "the return, {value}, is no higher than at the start. Try a larger entropy_coefficient or a smaller "
        "learning_rate.",
    ),
    "return": (
        _unmoved,
        "The return has not moved: it is {value}, no higher than at the start. Look at what the policy does (jaxpg "
        "play, or jaxpg sample where it writes), check the environment (jaxpg check), or try another learning_rate.",
    ),
}
"""By cause: which seeds it holds for, and the sentence."""
