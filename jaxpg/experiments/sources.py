"""Where every setting of a config comes from: a default, a file, one of its sections, or the command line."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from jaxpg.experiments import config_file
from jaxpg.experiments.config import COMMAND_ARGUMENTS, Config, to_dict
from jaxpg.experiments.sections import STAGES, settings_without_effect
from jaxpg.files import flatten, setting_text

DEFAULT = "default"
REPLACED = {"learning_rate": "schedule", "anneal_steps": "schedule", "adam_eps": "optimizer"}
"""Settings of an algorithm that have no effect together with a function of the user's, by the table that names it."""


def setting_sources(
    task: str | Path, name: str, config: Config, overrides: Mapping[str, Any]
) -> dict[str, tuple[Any, str]]:
    """The value of every setting of a resolved config, by its dotted name, and where it was stated last.

    Of one that has no effect, it says why in place of where it was stated.

    Args:
        task: what the config was resolved from.
        name: the algorithm, or the stage of the task.
        config: the config.
        overrides: the settings that won over the task's.
    """
    tables, path = config_file.read_task(task)
    section = dict(tables.get(config.algorithm, {}))
    inherited, model = {}, section.pop("like", None)
    if model is not None:
        inherited = tables[model]
    given = config_file.nested(overrides)
    of_the_stage = given.pop(STAGES, {}).get(name, {})
    layers = [
        (tables, path.name),
        (inherited, f"{path.name} [{model}]"),
        (section, f"{path.name} [{config.algorithm}]"),
        (tables.get(STAGES, {}).get(name, {}), f"{path.name} [{STAGES}.{name}]"),
        (of_the_stage, "command line"),
        (given, "command line"),
    ]
    stated = flatten(reduce(config_file.merge, [_labelled(table, label) for table, label in layers]))
    tables = {name: x for name, x in to_dict(config).items() if name not in (config.algorithm, *COMMAND_ARGUMENTS)}
    values = flatten(tables | config.settings)
    sources = {name: stated.get(name, stated.get(f"{name}.", DEFAULT)) for name in values}
    replaced = {name: part for name, part in REPLACED.items() if name in config.settings and getattr(config, part)}
    sources |= {name: f"no effect: {part}.kind replaces it" for name, part in replaced.items()}
    unread = settings_without_effect(config.settings)
    sources |= {name: f"no effect: {other} is {setting_text(config.settings[other])}" for name, other in unread.items()}
    return {name: (value, sources[name]) for name, value in values.items()}


def _labelled(table: Mapping[str, Any], label: str) -> dict[str, Any]:
    """A table with a label in place of every value, and in an empty one under the empty name."""
    return {name: _labelled(x, label) if isinstance(x, Mapping) else label for name, x in table.items()} or {"": label}
