"""What came into each stage of a run and what went out: as a table in the terminal, and in the report of the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from jaxpg import envs
from jaxpg.envs.text.jsonl_reader import count_records, read_content
from jaxpg.envs.text.rewards import ACCURACY
from jaxpg.envs.text.text_env import PROCESS
from jaxpg.errors import UserError
from jaxpg.experiments.build import kind_of
from jaxpg.experiments.config import Config
from jaxpg.experiments.stages import Stage
from jaxpg.runs.results import last_evaluation
from jaxpg.training import run_directory
from jaxpg.user_input.printable import printable

MEASURED = ("accuracy", "format", "length", "return")
"""What of an evaluation is shown, in this order, where there is it."""


class StageRow(NamedTuple):
    """A stage.

    policy: what it begins with.
    data: what it learns from.
    evaluation: by the name of a metric, its mean over seeds before and after.
    """

    name: str
    algorithm: str
    policy: str
    data: str
    steps: int
    evaluation: dict[str, str]


def stage_rows(stages: Sequence[Stage]) -> list[StageRow]:
    """The rows of stages that have been trained."""
    return [_row(stage) for stage in stages]


def stage_table(rows: Sequence[StageRow]) -> Table:
    """For the terminal."""
    table = Table("stage", "learns from", "steps", "before → after", title="stages", box=box.SIMPLE_HEAD)
    for row in rows:
        what = row.name if row.name == row.algorithm else f"{row.name}: {row.algorithm}"
        stage = f"{what}\nfrom {row.policy}"
        evaluation = "\n".join(f"{name} {values}" for name, values in row.evaluation.items())
        table.add_row(*(printable(x, keep="\n") for x in (stage, row.data, f"{row.steps:,}", evaluation)))
        table.add_section()
    return table


def stage_details(rows: Sequence[StageRow]) -> dict[str, dict[str, Any]]:
    """For a report: stage -> what came in and what went out."""
    return {row.name: {name: x for name, x in row._asdict().items() if name != "name"} for row in rows}


def _row(stage: Stage) -> StageRow:
    config, metrics = stage.config, run_directory.load_metrics(stage.directory)
    evaluated = {name: metrics[f"evaluation_{name}"] for name in MEASURED if f"evaluation_{name}" in metrics}
    if not kind_of(config).has_policy:
        evaluated = {f"accuracy on {_data(config).split(',')[0]}": metrics["evaluation_accuracy"]}
    return StageRow(
        name=stage.name,
        algorithm=config.algorithm,
        policy=Path(config.initial).name if config.initial else "new parameters",
        data=_data(config),
        steps=int(metrics["steps"][-1].max()),
        evaluation={
            name: f"{np.mean(x[0]):.3g} → {np.mean(last_evaluation(x, x.shape[1])):.3g}"
            for name, x in evaluated.items()
        },
    )


def _data(config: Config) -> str:
    """What a stage learns from, in words."""
    match kind_of(config).data:
        case "demonstrations":
            return _demonstrations(config.demonstrations)
        case "pairs":
            return _preference_pairs(config.pairs)
        case "step_labels":
            return "labelled steps"
    if envs.task_factory(config.environment) is None:
        return "its episodes"
    rewards = dict(config.reward_list or config.environment_settings.get("rewards", ACCURACY))
    if config.process_weight:
        model = {"model": config.process_reward} if config.process_reward else {}
        rewards[PROCESS] = {"weight": config.process_weight, **model}
    return " + ".join(_reward(name, entry) for name, entry in rewards.items())


def _preference_pairs(settings: Mapping[str, Any]) -> str:
    source, share = settings.get("sampled_from"), settings.get("earlier_share")
    replayed = f", {share:g} of them earlier ones" if share else ""
    return "preference pairs" if source is None else f"preference pairs of {Path(source).name}{replayed}"


def _demonstrations(settings: Mapping[str, Any]) -> str:
    if settings.get("file") is None:
        number = settings.get("num_demonstrations")
        return "new demonstrations" if number is None else f"{number:,} demonstrations"
    source = settings.get("sampled_from")
    what = "demonstrations of a file" if source is None else f"right completions of {Path(source).name}"
    try:
        return f"{count_records(read_content(settings['file'])):,} {what}"
    except UserError:  # the stage has been trained, and its file may be gone
        return what


def _reward(name: str, entry: Any) -> str:
    settings = entry if isinstance(entry, Mapping) else {"weight": entry}
    model = f" ({Path(settings['model']).name})" if "model" in settings else ""
    standardized = f", {settings['standardize']}" if "standardize" in settings else ""
    return f"{settings.get('weight', 1.0):g} {name}{model}{standardized}"
