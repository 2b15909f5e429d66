"""Divergence: metrics and parameters that are not finite, by seed, and what happens to such a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg import parallel
from jaxpg.errors import UserError
from jaxpg.training import checkpoint
from jaxpg.training.advance import counted_by
from jaxpg.training.metrics_writer import Row
from jaxpg.types import Tree

EVALUATED = "evaluation_return"
"""The metric of an evaluation by which a checkpoint is ranked."""


class Diverged(UserError):
    """A quantity was not finite: which one, of which seed (its index among those of the run), after which iteration."""

    def __init__(self, message: str, *, quantity: str, index: int, iteration: int) -> None:
        super().__init__(message)
        self.quantity, self.index, self.iteration = quantity, index, iteration


class DivergenceMonitor:
    """Knows which seeds of a run have diverged: by default the first one ends the run.

    Args:
        seeds: the numbers of the seeds, for messages.
        run_dir: the directory of the run, for messages.
        skip_diverged: a seed that diverges is excluded instead, and the others go on.
    """

    def __init__(self, seeds: Sequence[int], run_dir: Path, *, skip_diverged: bool) -> None:
        self._seeds, self._run_dir, self._skip_diverged = seeds, run_dir, skip_diverged
        self.healthy = np.ones(len(seeds), bool)  # [S], whether a seed has not diverged

    def check_restored(self, learner_state: Tree, rows: Sequence[Row]) -> None:
        """Exclude the seeds that had diverged before the run was interrupted, by its state and the rows it has kept.

        Parameters may be finite after a metric was not, and so may be all later metrics.
        """
        if not self._skip_diverged:
            return
        self._exclude(non_finite_parameters(learner_state))
        for row in rows:
            trained = {name: np.array(x) for name, x in row.items() if not name.startswith("evaluation_")}
            self._exclude(non_finite_metrics(trained))

    def check_metrics(self, row: Row) -> None:
        """Exclude the seeds whose metrics are not finite, or raise Diverged about the first."""
        self._check(non_finite_metrics(row), row)

    def check_parameters(self, learner_state: Tree, row: Row) -> None:
        """Exclude the seeds whose parameters are not finite, or raise Diverged about the first."""
        self._check(non_finite_parameters(learner_state), row)

    def check_evaluation(self, row: Row) -> None:
        """Raise Diverged about the first healthy seed whose evaluated return is not finite."""
        if not self._skip_diverged:
            non_finite = {EVALUATED: ~np.isfinite(row[EVALUATED]) & self.healthy}
            raise_if_diverged(non_finite, row, self._seeds, self._run_dir)

    def _check(self, non_finite: Mapping[str, np.ndarray], row: Row) -> None:
        if not self._skip_diverged:
            raise_if_diverged(non_finite, row, self._seeds, self._run_dir)
        self._exclude(non_finite)

    def _exclude(self, non_finite: Mapping[str, np.ndarray]) -> None:
        self.healthy &= ~np.any(list(non_finite.values()), axis=0)


def non_finite_metrics(row: Row) -> dict[str, np.ndarray]:
    """By metric, the seeds [S] whose value is not finite although there was something to measure."""
    measured = {name: row[counted_by(name) or "iterations"] > 0 for name, x in row.items() if np.ndim(x)}
    return {name: ~np.isfinite(row[name]) & expected for name, expected in measured.items()}


def non_finite_parameters(learner_state: Tree) -> dict[str, np.ndarray]:
    """By array of a learner's state, the seeds [S] for which it is not finite; environments may hold anything."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): ~np.isfinite(x).reshape(len(x), -1).all(1)
        for path, x in jax.tree_util.tree_flatten_with_path(learner_state)[0]
        if jnp.issubdtype(x.dtype, jnp.inexact) and not parallel.is_per_environment(path)
    }


def raise_if_diverged(non_finite: Mapping[str, np.ndarray], row: Row, seeds: Sequence[int], run_dir: Path) -> None:
    """Raise Diverged, with the quantity, the seed and the iteration, if anything is not finite."""
    for name, in_seeds in non_finite.items():
        if in_seeds.any():
            s = int(in_seeds.argmax())
            value = row[name][s] if name in row else "not finite"
            raise Diverged(
                f"Training diverged: {name} of seed {seeds[s]} is {value} after iteration {row['iteration'][s]}, "
                f"{row['steps'][s]} steps. {last_checkpoint(run_dir)}. Try a smaller learning_rate or max_grad_norm.",
                quantity=name,
                index=s,
                iteration=int(row["iteration"][s]),
            )


UNKEPT = "jaxpg-unkept-"
"""What the name of a directory begins with that is deleted when its training ends."""


def is_kept(run_dir: Path) -> bool:
    """Whether a directory is there when its training has ended."""
    return not any(part.startswith(UNKEPT) for part in run_dir.parts)


def last_checkpoint(run_dir: Path) -> str:
    """Which checkpoint of a run is good, as a clause of a sentence."""
    if not is_kept(run_dir):
        return "Nothing was kept: give out=DIRECTORY to have checkpoints"
    last = checkpoint.find(run_dir / checkpoint.CHECKPOINTS)
    return f"The last good checkpoint is {last.path}" if last else f"There was no checkpoint yet in {run_dir}"
