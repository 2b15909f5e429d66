"""What a run has shown: its metrics as a table, its learning curve, and its last evaluation."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpg.envs.text.rewards import ACCURACY
from jaxpg.errors import UserError, refuse_unknown
from jaxpg.experiments.build import KINDS
from jaxpg.files import replace_file
from jaxpg.training.run_directory import WALL_TIMES
from jaxpg.training.stalls import stalls


@dataclass(frozen=True, eq=False)
class MetricsTable:
    """The metrics of a run of S seeds, in N rows. It equals itself alone.

    columns: name -> [N, S], NaN where a row lacks it; `seconds` and `chunk_seconds` are [N].
    seeds: the numbers of the seeds.
    """

    columns: Mapping[str, np.ndarray]
    seeds: Sequence[int]

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics that there are."""
        return tuple(self.columns)

    def __iter__(self) -> Iterator[str]:
        """The names, as of a dictionary."""
        return iter(self.columns)

    def __getitem__(self, name: str) -> np.ndarray:
        """A metric, [N, S], or [N] of `seconds` and `chunk_seconds`.

        Raises:
            UserError: the run has none of this name.
        """
        if name not in self.columns:
            refuse_unknown("metric", str(name), self.columns)
        return self.columns[name]

    def long_form(self) -> dict[str, np.ndarray]:
        """The table as columns `[N * S]`, one line for each row and seed, the first seed's rows first."""
        rows = len(self.columns["steps"])
        columns = {
            "seed": np.repeat(np.asarray(self.seeds), rows),
            "steps": self.columns["steps"].T.ravel().astype(int),
        }
        for name, values in self.columns.items():
            if name != "steps":
                columns[name] = np.tile(values, len(self.seeds)) if name in WALL_TIMES else values.T.ravel()
        return columns

    def to_pandas(self) -> Any:
        """`long_form` as a pandas DataFrame.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UserError("to_pandas needs pandas, which is not installed: pip install pandas.") from None
        return pandas.DataFrame(self.long_form())

    def to_csv(self, path: str | Path) -> None:
        """Write `long_form` to a file, the names in its first line; a number that is not there is an empty cell.

        Raises:
            OSError: the file cannot be written.
        """
        text, columns = io.StringIO(), self.long_form()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(_cells(columns))
        replace_file(Path(path), text.getvalue())


def _cells(columns: Mapping[str, np.ndarray]) -> Iterator[list[Any]]:
    """The lines of a table: every float in the fewest digits that give it back, nothing for NaN."""
    for line in zip(*(column.tolist() for column in columns.values()), strict=True):
        yield ["" if x != x else x for x in line]


def curve_units(tables: Mapping[str, Any]) -> Any:
    """The `report.Units` of a run's learning curve, from the tables of its config (`config.to_dict`)."""
    from jaxpg.report import Units

    if dict(tables.get("network") or {}).get("kind") != "transformer":  # a run's own code is not asked what it is
        return Units()
    kind, of_the_env = KINDS.get(str(tables.get("algorithm"))), dict(tables.get("environment_settings") or {})
    rewards = tables.get("rewards") or of_the_env.get("rewards", ACCURACY)
    by_model = any(tables.get(name) not in (None, "none") for name in ("reward", "process_reward"))
    by_outcome = not by_model and not of_the_env.get("process_weight") and list(rewards) == list(ACCURACY)
    is_accuracy = (kind is not None and kind.score == "accuracy") or by_outcome
    return Units("tokens", "accuracy", (0.0, 1.0)) if is_accuracy else Units("tokens", "reward of a completion")


def common_units(found: Iterable[Any]) -> Any:
    """The `report.Units` of runs in one figure: what they have in common, else plain words."""
    from jaxpg.report import Units

    different = list(dict.fromkeys(found))
    if len(different) == 1:
        return different[0]
    steps = {units.steps for units in different}
    return Units(steps.pop() if len(steps) == 1 else "steps", "return")


def run_result(metrics: Mapping[str, np.ndarray], threshold: float | None = None, seeds: Sequence[int] = ()) -> Any:
    """The metrics of a run as a `report.RunResult`; `threshold` is the return that counts as solved."""
    from jaxpg.report import RunResult

    evaluations = metrics.get("evaluation_return")
    return RunResult(
        steps=metrics["steps"],
        returns=training_returns(metrics),
        final=last_evaluation(evaluations, metrics["steps"].shape[1]),
        seconds=float(metrics["seconds"][-1]),
        steps_per_second=steps_per_second(metrics),
        initial=None if evaluations is None or metrics["steps"][0].any() else evaluations[0],
        metrics=metrics,
        warnings=list(stalls(metrics, total_steps=int(metrics["steps"][-1].max()), threshold=threshold).values()),
        seeds=seeds,
    )


def steps_per_second(metrics: Mapping[str, np.ndarray]) -> float:
    """Environment steps of all seeds per second: the median over chunks but the first, whose program was compiled.

    NaN for a run of one chunk.
    """
    trained = np.flatnonzero(metrics["chunk_seconds"] > 0)[1:]  # the row before training took no time
    new_steps = np.diff(metrics["steps"], axis=0, prepend=0).sum(1)
    return float(np.median(new_steps[trained] / metrics["chunk_seconds"][trained])) if len(trained) else np.nan


def training_returns(metrics: Mapping[str, np.ndarray]) -> np.ndarray:
    """The learning curve of a run, `[N, S]`: evaluations where training has no return, as in fine-tuning."""
    return metrics["return"] if "return" in metrics else metrics["evaluation_return"]


def last_evaluation(values: np.ndarray | None, num_seeds: int) -> np.ndarray:
    """The last evaluation, `[S]`; NaN if there was none."""
    done = [] if values is None else values[np.isfinite(values).all(1)]
    return done[-1] if len(done) else np.full(num_seeds, np.nan)


def best_seed(metrics: Mapping[str, np.ndarray], steps: np.ndarray) -> int:
    """The index of the seed with the best evaluation, of the last one that a state after `steps` `[S]` includes."""
    included = (metrics["steps"] <= steps).all(1)
    evaluations = metrics["evaluation_return"][included] if "evaluation_return" in metrics else None
    return int(np.argmax(np.nan_to_num(last_evaluation(evaluations, len(steps)), nan=-np.inf)))
