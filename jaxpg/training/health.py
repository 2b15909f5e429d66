"""Whether training has diverged: metrics and parameters that are not finite, by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg import parallel
from jaxpg.errors import UserError
from jaxpg.training import checkpoint
from jaxpg.training.advance import (
    MEAN_OVER,
)
from jaxpg.training.metrics_writer import Row
from jaxpg.types import Tree


def non_finite_metrics(row: Row) -> dict[str, np.ndarray]:
    """By metric, the seeds [S] for which it is not finite although it should be."""
    healthy = {n: row[MEAN_OVER.get(n, "iterations")] > 0 for n, x in row.items() if np.ndim(x)}
    return {n: ~np.isfinite(row[n]) & expected for n, expected in healthy.items()}


def non_finite_parameters(learner_state: Tree) -> dict[str, np.ndarray]:
    """By array of a learner's state, the seeds [S] for which it is not finite; environments may hold anything."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): ~np.isfinite(x).reshape(len(x), -1).all(1)
        for path, x in jax.tree_util.tree_flatten_with_path(learner_state)[0]
        if jnp.issubdtype(x.dtype, jnp.inexact) and not parallel.is_per_environment(path)
    }


def seeds_with_any(bad: Mapping[str, np.ndarray]) -> np.ndarray:
    """The seeds [S] of which anything is bad."""
    return np.any(list(bad.values()), axis=0)


def refuse_non_finite(bad: Mapping[str, np.ndarray], row: Row, seeds: Sequence[int], run_dir: Path) -> None:
    """Raise a UserError naming the quantity, the seed and the moment, if anything is bad."""
    for name, where in bad.items():
        if where.any():
            s = int(where.argmax())
            value = row[name][s] if name in row else "not finite"
            found = checkpoint.find(run_dir / checkpoint.CHECKPOINTS)
            kept = f"The last good checkpoint is {found.path}" if found else "There was no checkpoint yet"
            raise UserError(
                f"Training went astray: {name} of seed {seeds[s]} is {value} after iteration {row['iteration'][s]}, "
                f"{row['steps'][s]} steps. {kept}; a smaller learning_rate or max_grad_norm may help."
            )
