"""The tables of a task's file: its sections and stages by name, and what the tables in them may hold, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpg.errors import UserError, excerpt, refuse_unknown
from jaxpg.experiments import config_file
from jaxpg.experiments.parts import ALGORITHMS, algorithm_options, network_options, networks_of
from jaxpg.experiments.signatures import REQUIRED, Option, check
from jaxpg.files import setting_text
from jaxpg.training.lock import LOCK
from jaxpg.training.run_directory import CONFIG, SWEEP, WRITTEN
from jaxpg.user_input import user_code
from jaxpg.user_input.domains import Domain, domain_of
from jaxpg.user_input.printable import printable

MAX_NAME = 100
"""Characters in the name of a task."""
NAMED_NUMBERS = ("total_steps", "time_limit")
"""Names that stand for an integer in a config."""
_LIKE = Option("like", REQUIRED, str, "the section whose settings a section inherits.")
STAGES = "stages"
"""The table of a task's stages by name: sections of algorithms that the task trains more than once."""
_WRITTEN_BESIDE = (
    *(CONFIG, *WRITTEN, LOCK, "export", "vocabulary.json", "data.json", "demonstrations.jsonl", "pairs.npz"),
    *("plan.json", "comparison.json", "comparison.html", SWEEP, "sweep.png", "best.toml"),
)
"""What commands write into the directory in which the directories of stages are."""


def check_names(sections: Mapping[str, Any], top_level: dict[str, Option], path: Path) -> None:
    """Refuse a file with an unknown setting, also in a section of another algorithm than the one to be trained.

    `top_level` are the settings of a task, which may stand in a section too.
    """
    for key in sections:
        if key not in top_level and not is_section(key) and key not in ("task", "algorithm", STAGES):
            refuse_unknown("setting", key, [*top_level, *ALGORITHMS, STAGES], f" of a task, in {path}")
    _check_stages(sections.get(STAGES, {}), top_level, path)
    present = [name for name in sections if is_section(name)]
    for algorithm in present:
        check(Option(algorithm, REQUIRED, dict, ""), sections[algorithm])
    for algorithm in present:
        section = sections[algorithm]
        if "like" in section:
            _check_like(check(_LIKE, section["like"]), algorithm, sections, present, path)
        if algorithm not in ALGORITHMS:
            continue  # that of a function of the user's, which is imported only to be trained: `_resolve` checks it
        known = top_level | algorithm_options(algorithm)
        _check_section({key: value for key, value in section.items() if key != "like"}, known, algorithm, path)


def _check_like(model: str, algorithm: str, sections: Mapping[str, Any], present: Sequence[str], path: Path) -> None:
    """Refuse a section that inherits from one that is not there, or that inherits itself."""
    models = [name for name in present if "like" not in sections[name]]
    where = f" for `like` in section {algorithm}, in {path}"
    if model in present and model not in (algorithm, *models):
        without = f"one without: {', '.join(models)}" if models else "one without, of which there is none"
        raise UserError(f"The section {model} has a `like` itself, so it cannot be named{where}. Name {without}.")
    if model not in models:
        refuse_unknown("section", model, models, where)


def _check_section(section: Mapping[str, Any], known: Mapping[str, Option], name: str, path: Path) -> None:
    """Refuse an unknown setting in a section, or a value of the wrong type."""
    for key, value in section.items():
        if key not in known:
            refuse_unknown("setting", key, known, f" of {name}, in {path}")
        if not (takes_integer(known[key]) and value in NAMED_NUMBERS):
            check(known[key], value)


def _check_stages(stages: Any, top_level: dict[str, Option], path: Path) -> None:
    """Refuse stages without an algorithm or with the name of one, and unknown settings in them."""
    check(Option(STAGES, REQUIRED, dict, ""), stages)
    for name, stage in stages.items():
        check(Option(f"{STAGES}.{name}", REQUIRED, dict, ""), stage)
        check_name(name)
        if name in ALGORITHMS:
            raise UserError(f"The stage {name}, in {path}, has the name of an algorithm: give it another one.")
        if name in _WRITTEN_BESIDE:
            raise UserError(f"The stage {name}, in {path}, has the name of what a run writes: give it another one.")
        algorithm = stage.get("algorithm")
        if not (isinstance(algorithm, str) and is_section(algorithm)):
            given = "none" if algorithm is None else excerpt(algorithm)
            raise UserError(f"The stage {name}, in {path}, needs an algorithm, such as sft or grpo, not {given}.")
        if algorithm in ALGORITHMS:
            settings = {key: value for key, value in stage.items() if key != "algorithm"}
            _check_section(settings, top_level | algorithm_options(algorithm), f"the stage {name}", path)


def is_section(name: str) -> bool:
    """Whether a table of a task is the section of an algorithm."""
    return name in ALGORITHMS or user_code.is_code_name(name)


def section_of(sections: Mapping[str, Any], algorithm: str, known: Mapping[str, Option]) -> dict[str, Any]:
    """The section of an algorithm, merged over those settings of the section that its `like` names that are `known`."""
    section = dict(sections.get(algorithm, {}))
    model = section.pop("like", None)
    if model is None:
        return section
    return config_file.merge({name: value for name, value in sections[model].items() if name in known}, section)


def check_name(name: Any) -> str:
    """The name of a task, which becomes part of the names of directories and files.

    Raises:
        UserError: it is no name of one file on every system.
    """
    fits = isinstance(name, str) and 0 < len(name) <= MAX_NAME and printable(name) == name
    if not fits or set(name) & set("/\\") or name.startswith((".", "-")):
        raise UserError(
            f"The name of a task becomes part of the names of its directory and its files: 1 to {MAX_NAME} characters, "
            f"printable, without / and \\, not beginning with a dot or a dash; not {name!r}. Rename the file, "
            'or set task = "..." in it.'
        )
    return name


def check_kind(name: str, table: Mapping[str, Any]) -> None:
    """Refuse the table of an optimizer or a schedule that does not name a function."""
    kind = table.get("kind")
    if table and not (isinstance(kind, str) and user_code.is_code_name(kind)):
        raise UserError(f'{name}.kind must be the name of a function, "module:function", not {excerpt(kind)}.')


def refuse_scheduled(overrides: Mapping[str, Any]) -> None:
    """Refuse a step size together with a schedule."""
    if "learning_rate" in overrides:
        raise UserError("schedule states the step size, so learning_rate would have no effect: remove one of them.")


OF_ANOTHER: dict[str, tuple[str, Any]] = {
    "kl_coefficient": ("kl", None),
    "reference_rate": ("kl", None),
    "kl_gain": ("reference_kl_target", None),
    "baseline_rate": ("baseline_kind", "batch"),
}
"""Settings of an algorithm that nothing reads where another one has this value."""


def settings_without_effect(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings of an algorithm that nothing reads, by the name of the one that is why."""
    return {
        name: other
        for name, (other, value) in OF_ANOTHER.items()
        if name in settings and other in settings and settings[other] == value
    }


def refuse_without_effect(given: Mapping[str, Any], settings: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
    """Refuse a setting that is given, as on the command line, and that nothing reads beside the others."""
    for name, other in settings_without_effect(settings).items():
        if name in given:
            value = setting_text(settings[other])
            raise UserError(f"{name} has no effect while {other} is {value}: set {other} too, or leave {name} out.")
    if "adam_eps" in given and optimizer:
        raise UserError("adam_eps has no effect beside optimizer.kind, which replaces Adam: leave one of them out.")


def refuse_unscaled_groups(algorithm: str, top_level: Mapping[str, Any], *layers: Mapping[str, Any]) -> None:
    """Refuse `scale_rewards = false` for groups where rewards are not scaled anyway: in TRL it means something else."""
    if not top_level.get("scale_rewards") and any(layer.get("scale_rewards") is False for layer in layers):
        raise UserError(
            f"scale_rewards = false changes nothing for {algorithm}: it is about the running standard deviation of "
            "returns. Train dr_grpo or rloo to leave out the division by the standard deviation of a group, which TRL "
            "calls scale_rewards."
        )


def check_rewards(checked: Mapping[str, Any]) -> None:
    """Refuse rewards that are stated twice, and functions and models that are no name; the task checks the names."""
    given = ["rewards"] if checked["rewards"] else []
    given += ["reward"] if checked.get("reward") is not None else []
    given += ["environment_settings.rewards"] if "rewards" in checked["environment_settings"] else []
    if "rewards" in given and len(given) > 1:
        raise UserError(
            f"{' and '.join(given)} are given, and rewards is the whole list: name them all in it, a reward model as "
            'rewards.NAME = { model = "..." }.'
        )
    for name, entry in checked["rewards"].items():
        if isinstance(entry, Mapping) and "model" in entry:
            check(Option(f"rewards.{name}.model", REQUIRED, str, ""), entry["model"])
    _refuse_functions("rewards", checked["rewards"])
    _refuse_functions("environment_settings.rewards", checked["environment_settings"].get("rewards"))


def _refuse_functions(table: str, rewards: Any) -> None:
    """Refuse the functions of a Python program among rewards: a run says by a name what it was trained on."""
    for name, entry in rewards.items() if isinstance(rewards, Mapping) else ():
        parts = entry.values() if isinstance(entry, Mapping) else entry if isinstance(entry, tuple) else [entry]
        if any(map(callable, parts)):
            raise UserError(
                f'{table}.{name} must name its function, {{"function": "module:function"}}, not {excerpt(entry)}. The '
                "function itself is for envs.text.text_env, in a program that makes its learner by policy_gradient."
            )


def refuse_split(environment_settings: Mapping[str, Any]) -> None:
    """Refuse a split set by the user: a run would be evaluated on the problems that it trains on."""
    if "split" in environment_settings:
        raise UserError(
            "environment_settings.split cannot be set: a run trains on the split train and is evaluated on the split "
            "test. held_out says how much of a file of yours is in the latter."
        )


def check_network(algorithm: str, network: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of a network and all of its settings; empty for an algorithm without a network."""
    if not networks_of(algorithm):
        return {}
    kind = network.get("kind", "mlp")
    known = network_options(algorithm, kind)
    given = {name: value for name, value in network.items() if name != "kind"}
    defaults = {name: option.default for name, option in known.items()}
    return {"kind": kind} | defaults | check_table(given, known, f" of the network {kind}", "network.")


def check_table(given: Mapping[str, Any], known: Mapping[str, Option], where: str, prefix: str = "") -> dict[str, Any]:
    """The settings of a table, names and values checked; the prefix of a name is that of `--set`, "network."."""
    for name in given:
        if name not in known:
            refuse_unknown("setting", name, known, where)
    dotted = {name: known[name]._replace(name=f"{prefix}{name}", domain=_domain(known[name])) for name in given}
    return {name: check(dotted[name], value) for name, value in given.items()}


def _domain(option: Option) -> Domain:
    """Which numbers a setting may be, by its name without that of its table."""
    return option.domain or domain_of(option.name)


def takes_integer(option: Option) -> bool:
    """Whether a setting may be an integer, and so one of NAMED_NUMBERS."""
    return int in (option.kind, *getattr(option.kind, "__args__", ()))
