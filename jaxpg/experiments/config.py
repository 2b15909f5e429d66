"""Configs: what to train, where, and for how long, checked before anything compiles.

A task is a TOML file. Its top level describes the task. A section named after an algorithm holds the settings in which
that algorithm differs from its defaults, and may override the top level too:

    environment = "CartPole-v1"
    total_steps = 500_000
    network = { kind = "mlp", hidden = [64, 64] }

    [ppo]
    num_envs = 8
    anneal_steps = "total_steps"
    network.hidden = [32, 32]

A section with `like = "grpo"` inherits those settings of that section that the algorithm has.

A task may train an algorithm more than once, in stages that have names of their own. A stage takes over the settings of
its algorithm's section, and a setting that names a run (`initial`, `demonstrations.sampled_from`, the model of a
reward) may name a stage:

    [stages.rules]
    algorithm = "grpo"
    initial = "cold_start"
    rewards = { accuracy = 1.0, format = 0.1 }

Later wins: defaults, top level, section, command line. A table is merged key by key, but one with a `kind` replaces the
table before it. An integer may be given as the name of another number, `total_steps` or `time_limit`. The resolved
config that a run writes is such a file again, with every setting in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from jaxpg import envs, preferences
from jaxpg.errors import UserError, excerpt, refuse_unknown
from jaxpg.experiments import config_file
from jaxpg.experiments.parts import ALGORITHMS, algorithm_options, networks_of
from jaxpg.experiments.sections import (
    STAGES,
    check_kind,
    check_name,
    check_names,
    check_network,
    check_rewards,
    check_table,
    is_section,
    refuse_scheduled,
    refuse_split,
    refuse_unscaled_groups,
    refuse_without_effect,
    section_of,
    takes_integer,
)
from jaxpg.experiments.signatures import REQUIRED, Option, check, check_free_settings, options
from jaxpg.policy_gradient import policy_gradient
from jaxpg.training import run_directory
from jaxpg.types import Env, space_leaves
from jaxpg.user_input import user_code
from jaxpg.user_input.domains import INT32_MAX

MOST_SEEDS = 2**16
"""A larger number of seeds is taken for a typing mistake."""
DATA: dict[str, tuple[Callable[..., Any], str]] = {
    "pairs": (preferences.make_pairs, "preference pairs"),
    "step_labels": (preferences.make_step_labels, "labelled steps"),
    "demonstrations": (preferences.make_demonstrations, "demonstrations"),
}
"""The tables that say where data comes from: the function whose settings they hold, and what it makes, in words."""
COMMAND_ARGUMENTS = ("task", "algorithm")
"""What a run writes into its config.toml besides its settings; on a command line they are arguments."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One algorithm on one task, every setting resolved.

    Args:
        task: name of the task.
        algorithm: name of the algorithm.
        environment: name of the environment, suite:id of another library's, or package.module:function of your own.
        environment_settings: its settings.
        wrappers: wrappers by name, each with its settings, the innermost first.
        network: kind (mlp, cnn, recurrent, transformer, or module:function of your own) and its settings; empty for an
            algorithm that learns a table.
        total_steps: environment steps that each seed may consume.
        seeds: numbers of the seeds, which are trained side by side.
        threshold: return that counts as solved.
        evaluations: how often the policy is evaluated during training, evenly spaced.
        evaluation_episodes: whole episodes per evaluation and seed.
        evaluation_samples: evaluation episodes per start state (group size); pass@k is measured for k up to this.
        evaluation_greedy: evaluate the mode of the policy instead of samples.
        initial: the policy to begin with: directory of a run, or an algorithm that is trained first.
        reward: the reward model whose score is the only reward of whole completions: directory of a run, or an
            algorithm trained first.
        rewards: the rewards of a text task by name, each a weight or a table with weight, standardize (batch or
            running), and function (module:function of your own) or model (directory of a run, or an algorithm).
        process_reward: the process reward model that judges the steps of completions: directory of a run, or an
            algorithm that is trained first.
        pairs: settings of the preference pairs, see preferences.make_pairs.
        step_labels: settings of the completions with labelled steps, see preferences.make_step_labels.
        demonstrations: where fine-tuning has its demonstrations from, see preferences.make_demonstrations.
        learner: settings of the learner around the algorithm, see policy_gradient.
        optimizer: kind (module:function, such as optax:scale_by_lion) and its settings; empty for Adam.
        schedule: kind (module:function) of the step size over environment steps, and its settings; empty for the
            algorithm's learning_rate and anneal_steps.
        callbacks: functions module:function of your own that watch the training, each with its settings.
        settings: settings of the algorithm.
    """

    task: str
    algorithm: str
    environment: str
    environment_settings: dict
    wrappers: dict
    network: dict
    total_steps: int = 500_000
    seeds: Sequence[int] = (0,)
    threshold: float | None = None
    evaluations: int = 10
    evaluation_episodes: int = 32
    evaluation_samples: int = 1
    evaluation_greedy: bool = False
    initial: str | None = None
    reward: str | None = None
    rewards: dict
    process_reward: str | None = None
    pairs: dict
    step_labels: dict
    demonstrations: dict
    learner: dict
    optimizer: dict
    schedule: dict
    callbacks: dict
    settings: dict

    @property
    def batch_size(self) -> int:
        """How many environments, or examples, the devices of one seed share."""
        return self.settings["num_envs"] if "num_envs" in self.settings else self.settings["batch_size"]

    @property
    def reward_list(self) -> dict[str, Any]:
        """The list of rewards by name, `reward` being short for a list of one; empty for the environment's own."""
        return self.rewards if self.reward is None else {preferences.SCORE: {"model": self.reward}}

    @property
    def reward_models(self) -> dict[str, str]:
        """By the setting that names it, the directory of a run or the algorithm that each reward model comes from."""
        listed = {f"rewards.{n}.model": x.get("model") for n, x in self.rewards.items() if isinstance(x, Mapping)}
        named = {"reward": self.reward, **listed, "process_reward": self.process_reward}
        return {setting: run for setting, run in named.items() if run is not None}

    @property
    def process_weight(self) -> float:
        """The weight of the rewards of steps: 1 where a model judges them, unless the environment's settings say."""
        return self.environment_settings.get("process_weight", 1.0 if self.process_reward else 0.0)


def resolve_config(task: str | Path, algorithm: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """The config of an algorithm on a task.

    Args:
        task: one of `config_file.tasks()`, the path of a TOML file, or an environment, such as "CartPole-v1",
            "brax:ant" or "gymnasium:CartPole-v1", which is trained with the defaults.
        algorithm: one of ALGORITHMS, or a stage of the task.
        overrides: settings that win over the file's; dots lead into tables, as in "network.hidden".

    Raises:
        UserError: an unknown task, algorithm or setting (the nearest valid one is named), or an invalid value.
    """
    (config,) = resolve_configs(task, algorithm, [overrides or {}])
    return config


def resolve_configs(task: str | Path, algorithm: str, overrides: Iterable[Mapping[str, Any]]) -> list[Config]:
    """`resolve_config` for each of several overrides; the file is read and checked once."""
    tables, path = config_file.read_task(task)
    check_names(tables, task_options(), path)
    has_file = not config_file.names_environment(task)
    configs = []
    for each in overrides:
        sections = tables if has_file else tables | _network_for(str(task), algorithm, each)
        configs.append(_resolve(sections, algorithm, each, path))
        _refuse_annealed(configs[-1], sections, each, path)
    return configs


def _refuse_annealed(config: Config, sections: Mapping[str, Any], overrides: Mapping[str, Any], path: Path) -> None:
    """Refuse the config that a run wrote for more steps than its own, of which the last would learn nothing.

    Such a config names its algorithm, and states as a number what the task may have stated as "total_steps".
    """
    over, total, own = config.settings.get("anneal_steps"), config.total_steps, sections.get("total_steps")
    is_longer = "total_steps" in overrides and (type(own) is not int or total > own)
    if "algorithm" in sections and is_longer and "anneal_steps" not in overrides and over is not None and over < total:
        raise UserError(
            f"{path} is the config of a run, which anneals its learning rate to zero over {over:,} steps, so it would "
            f"learn nothing from there to {total:,}. Set anneal_steps too: to total_steps, as by --set "
            f"anneal_steps=total_steps, to anneal over all of them, or to {over}, if that is meant."
        )


def _network_for(environment: str, algorithm: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The table `network` for an environment without a config: a cnn for images, of Mnih et al. 2015 for large ones."""
    if not networks_of(algorithm):
        return {}
    fields, given = options(Config), _nested_overrides(overrides)
    settings, wrappers = (check(fields[name], given.get(name, {})) for name in ("environment_settings", "wrappers"))
    _check_tables("wrappers", wrappers)
    env = _wrap_all(envs.make(environment, **settings), environment, wrappers)
    images = [space.shape for _, space in space_leaves(env.observation_space) if len(space.shape) == 3]
    if len(images) != 1:
        return {}
    large = min(images[0][:2]) >= 36
    atari = {"channels": [32, 64, 64], "kernels": [8, 4, 3], "strides": [4, 2, 1], "hidden": [512]}
    return {"network": {"kind": "cnn", **(atari if large else {})}}


def resolve_tables(
    sections: Mapping[str, Any], algorithm: str, overrides: Mapping[str, Any] | None = None, *, source: Path
) -> Config:
    """`resolve_config` of tables that have been read already: those of a task, or of a config (`to_dict`).

    Args:
        sections: the tables.
        algorithm: one of ALGORITHMS.
        overrides: settings that win over them.
        source: the file that they were read from.

    Raises:
        UserError: as `resolve_config`.
    """
    check_names(sections, task_options(), source)
    return _resolve(sections, algorithm, overrides or {}, source)


def trainable(task: str | Path) -> list[str]:
    """What a setting of a task's config may name as a run that is trained first: algorithms, and the task's stages."""
    return [*ALGORITHMS, *config_file.read_task(task)[0].get(STAGES, {})]


def _resolve(sections: Mapping[str, Any], trained: str, overrides: Mapping[str, Any], source: Path) -> Config:
    """`resolve_tables` of sections whose names have been checked; `trained` is an algorithm or a stage."""
    given = _nested_overrides(overrides)
    stages = config_file.merge(sections.get(STAGES, {}), given.pop(STAGES, {}))
    if unknown := stages.keys() - sections.get(STAGES, {}).keys():
        refuse_unknown("stage", min(unknown), sections.get(STAGES, {}), f" of {source.stem}")
    stage = dict(stages.get(trained, {}))
    algorithm = stage.pop("algorithm", trained)
    if not is_section(algorithm):
        refuse_unknown("algorithm", algorithm, [*ALGORITHMS, *stages])
    own = algorithm_options(algorithm)
    known = task_options() | own
    top_level = {key: value for key, value in sections.items() if not is_section(key) and key != STAGES}
    layers = top_level, section_of(sections, algorithm, known), stage, given
    if any(layer.get("schedule") for layer in layers):
        refuse_scheduled(given)
    if "group_size" in own:
        refuse_unscaled_groups(algorithm, *layers)
    if not networks_of(algorithm) and any(layer.get("network") for layer in layers[1:]):
        raise UserError(f"{algorithm} learns a table and has no network: remove the setting network.")
    merged = reduce(config_file.merge, layers)
    name = check_name(merged.pop("task", source.stem))
    check(options(Config)["algorithm"], merged.pop("algorithm", algorithm))
    for key in merged:
        if key not in known:
            refuse_unknown("setting", key, _dotted_names(algorithm, merged, known), f" of {algorithm} on {name}")
    config = _checked_config(name, algorithm, merged, own)
    refuse_without_effect(given, config.settings, config.optimizer)
    _refuse_data(given, config.environment)
    return config


def _refuse_data(given: Mapping[str, Any], environment: str) -> None:
    """Refuse settings of pairs and other texts that are given for an environment without any."""
    named = [name for name in DATA if name in given]
    if named and envs.task_factory(environment) is None:
        raise UserError(f"{named[0]} is about texts, and {environment} is not a text task: remove {named[0]}.")


def load_config(run_dir: Path, *, trust_code: bool = False) -> Config:
    """The config that a run wrote into its directory.

    Args:
        run_dir: the directory.
        trust_code: whether the functions "module:function" that the config names may be imported and called, for a
            Python program; the command line has --trust-code.

    Raises:
        UserError: there is none, it is damaged (names it), it names code that is not trusted, or it is that of a run
            from Python, which need not say what was trained, or of a sweep.
    """
    run_directory.check_is_run(run_dir)
    path = run_dir / run_directory.CONFIG
    stored = run_directory.load_config(run_dir)
    config_file.refuse_deep(str(path), stored)
    if not isinstance(stored.get("algorithm"), str):
        raise UserError(
            f"{path} names no algorithm, as in a run that was trained from Python, so its policy cannot be built here. "
            "In Python, training.restore(learner, run_dir, seeds) returns its state, and rollout.evaluate measures the "
            "actor of a state; jaxpg plot draws its metrics."
        )
    if "sweep" in stored:  # one state with many settings, which no config can name
        raise UserError(
            f"{run_dir} holds runs of a sweep side by side. The sweep goes on with jaxpg resume on its own directory; "
            "its best.toml is a config to train."
        )
    if not trust_code:
        user_code.refuse_code_of_run(run_dir, stored)
    try:
        return resolve_tables(stored, stored["algorithm"], source=path)  # the file may be another one by now
    except UserError as error:
        raise UserError(f"{path} cannot be used: {error}") from error


def to_dict(config: Config) -> dict[str, Any]:
    """The config as the tables of a task file: tables last, the algorithm's settings in its section."""
    fields = {name: getattr(config, name) for name in options(Config) if name not in ("learner", "settings")}
    fields |= config.learner
    plain = {name: value for name, value in fields.items() if not isinstance(value, dict)}
    tables = {name: value for name, value in fields.items() if isinstance(value, dict)}
    return plain | tables | {config.algorithm: config.settings}


def to_task(config: Config) -> dict[str, Any]:
    """`to_dict` for a file that is trained again: a learning rate that falls over all steps does so over others too."""
    tables = to_dict(config)
    if config.settings.get("anneal_steps") == config.total_steps:
        tables[config.algorithm] = config.settings | {"anneal_steps": "total_steps"}
    return tables


def make_env(config: Config, split: str = "train") -> Env:
    """The environment of a config, wrapped, without the rewards and the reward models that the config names itself.

    `split` chooses between its train and test problems, where it has them.
    """
    settings = config.environment_settings
    if config.rewards or config.process_reward:  # what goes with those is not for the rewards of the environment
        of_the_rewards = options(envs.text.text_env)
        settings = {name: value for name, value in settings.items() if name not in of_the_rewards}
    if "split" in envs.default_settings(config.environment):
        settings = settings | {"split": split}
    return wrapped(config, envs.make(config.environment, **settings))


def wrapped(config: Config, env: Env) -> Env:
    """An environment with the wrappers of a config.

    Raises:
        UserError: as `envs.wrap`, or there are wrappers of a text task, whose completions are also written without it.
    """
    return _wrap_all(env, config.environment, config.wrappers)


def _wrap_all(env: Env, environment: str, wrappers: Mapping[str, Mapping[str, Any]]) -> Env:
    """`wrapped` by the name of the environment and the table of its wrappers."""
    if wrappers and envs.task_factory(environment):
        raise UserError(
            f"{environment} is a text task, which takes no wrappers: remove "
            f"{', '.join(f'wrappers.{name}' for name in wrappers)}. How long completions may be is a setting of "
            "the task, max_tokens."
        )
    for name, arguments in wrappers.items():
        env = envs.wrap(env, name, **arguments)
    return env


def task_options() -> dict[str, Option]:
    """The settings of a task and of the learner, which stand at the top level of a config."""
    fields = options(Config)
    of_the_task = {name: fields[name] for name in fields if name not in ("task", "algorithm", "learner", "settings")}
    return of_the_task | options(policy_gradient)


def check_seeds(seeds: Sequence[int]) -> None:
    """Raise a UserError unless these can be the numbers of seeds."""
    if not 0 < len(seeds) <= MOST_SEEDS:
        raise UserError(f"seeds are different numbers, from one to {MOST_SEEDS:,} of them, not {len(seeds):,}.")
    if len(set(seeds)) < len(seeds) or min(seeds) < 0 or max(seeds) > INT32_MAX:
        raise UserError(f"seeds are different numbers from 0 to 2^31 - 1, at least one, not {excerpt(list(seeds))}.")


def _nested_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides as tables.

    Raises:
        UserError: one of them is an argument of the commands, which a setting does not change.
    """
    tree = config_file.nested(overrides)
    for name in COMMAND_ARGUMENTS:
        if name in tree:
            raise UserError(f"{name} is an argument of the command, not a setting: name it there, without --set.")
    return tree


def _dotted_names(algorithm: str, merged: Mapping[str, Any], known: Mapping[str, Option]) -> list[str]:
    """Every name that could have been meant, those of the network's settings included."""
    network, kinds = merged.get("network"), networks_of(algorithm)
    if not kinds:
        return list(known)
    kind = str(network.get("kind", "mlp")) if isinstance(network, Mapping) else "mlp"
    of_the_network = options(kinds[kind]) if kind in kinds else {}
    return [*known, "network.kind", *(f"network.{name}" for name in of_the_network)]


def _check_tables(table: str, values: Mapping[str, Any]) -> None:
    """Check that each entry of a table of names is a table of settings."""
    for name, settings in values.items():
        check(Option(f"{table}.{name}", REQUIRED, dict, ""), settings)


def _checked_config(task: str, algorithm: str, merged: Mapping[str, Any], own: Mapping[str, Option]) -> Config:
    """Merged settings as a Config, every value checked; `own` are the options of the algorithm."""
    tables = ("environment_settings", "wrappers", "network", "rewards", "optimizer", "schedule", "callbacks")
    merged = {name: {} for name in (*tables, *DATA)} | dict(merged)
    fields = {name: option for name, option in options(Config).items() if name in merged}
    checked = {name: check(option, merged[name]) for name, option in fields.items()}
    if "environment" not in checked:
        raise UserError(f'The config of {task} does not say which environment: add environment = "...".')
    checked["network"] = check_network(algorithm, checked["network"])
    for name, (source, words) in DATA.items():
        checked[name] = check_table(checked[name], options(source), f" of {words}", f"{name}.")
    for table in ("wrappers", "callbacks"):
        _check_tables(table, checked[table])
    for name in ("optimizer", "schedule"):
        check_kind(name, checked[name])
    check_rewards(checked)
    for name in ("environment_settings", "wrappers", "rewards", "optimizer", "schedule", "callbacks"):
        check_free_settings(name, checked[name])
    refuse_split(checked["environment_settings"])
    check_seeds(checked.get("seeds", Config.seeds))
    learner = {n: check(o, merged.get(n, o.default)) for n, o in options(policy_gradient).items()}
    config = Config(task=task, algorithm=algorithm, learner=learner, settings={}, **checked)
    settings = {name: _check_setting(option, merged.get(name, option.default), config) for name, option in own.items()}
    if config.schedule and settings.get("anneal_steps") is not None:
        raise UserError(
            f"schedule states the step size, so anneal_steps = {settings['anneal_steps']} would have no effect: set "
            'anneal_steps to "none".'
        )
    schedule = {name: _named_number(value, config) for name, value in config.schedule.items()}
    return dataclasses.replace(config, settings=settings, schedule=schedule)


def _check_setting(option: Option, value: Any, config: Config) -> Any:
    """The value of an algorithm's setting, with `total_steps` and `time_limit` as the numbers that they name."""
    if value is REQUIRED:
        raise UserError(
            f"{config.algorithm} needs a value for {option.name}: {option.meaning} Add --set {option.name}=..."
        )
    if takes_integer(option):
        value = _named_number(value, config)
    return check(option, value)


def _named_number(value: Any, config: Config) -> Any:
    """The number behind one of NAMED_NUMBERS; any other value as it is."""
    if value == "total_steps":
        return config.total_steps
    if value == "time_limit":
        return make_env(config).time_limit
    return value
