"""Configs: what to train, where, and for how long, checked before anything compiles.

A task is a TOML file. Its top level describes the task; a section named after an algorithm holds what that algorithm
wants different from its defaults, and may override the top level too:

    environment = "CartPole-v1"
    total_steps = 500_000
    network = { kind = "mlp", hidden = [64, 64] }

    [ppo]
    num_envs = 8
    anneal_steps = "total_steps"
    network.hidden = [32, 32]

A section may say `like = "grpo"`: it begins with what that section says, as far as the algorithm has such settings.

Later wins: defaults, top level, section, command line. A table is merged key by key, but one that says `kind` replaces
what stood before. An integer may be given by the name of what it shall equal, `total_steps` or `time_limit`. The
resolved config that a run writes down is such a file again, with everything spelled out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpg import envs, ladder, preferences
from jaxpg.errors import UserError, refuse_unknown
from jaxpg.experiments.signatures import REQUIRED, Option, check, options
from jaxpg.models import language_model, networks
from jaxpg.policy_gradient import policy_gradient
from jaxpg.types import Env

NETWORKS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (networks.mlp, networks.cnn, networks.recurrent, language_model.transformer)
}
SUPERVISED: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (preferences.sft, preferences.reward_model, preferences.dpo)
}
ALGORITHMS: dict[str, Callable[..., Any]] = {**ladder.ALGORITHMS, **SUPERVISED}
SHARES = ("gamma", "gae_lambda", "baseline_rate", "reference_rate")  # settings that lie between 0 and 1
HOME = Path(__file__).parent.parent / "configs"  # in an installed package; a checkout has them beside the package
TASKS = HOME if HOME.is_dir() else HOME.parent.parent / "configs"


@dataclass(frozen=True, kw_only=True)
class Config:
    """One algorithm on one task, every setting resolved.

    Args:
        task: name of the task.
        algorithm: name of the algorithm.
        environment: name of the environment, or package.module:function of one's own.
        environment_settings: its settings.
        wrappers: wrappers by name, each with its settings, the innermost first.
        network: kind (mlp, cnn, recurrent or transformer) and its settings.
        total_steps: environment steps that each seed may consume.
        seeds: numbers of the seeds, which are trained side by side.
        threshold: return that counts as solved.
        evaluations: how often the policy is evaluated during training, evenly spaced.
        evaluation_episodes: whole episodes per evaluation and seed.
        evaluation_samples: this many episodes of an evaluation begin alike; pass@k is told up to so many.
        evaluation_greedy: evaluate the mode of the policy instead of samples.
        initial: the policy to begin with: directory of a run, or an algorithm that is trained first.
        reward: the reward model that judges completions: directory of a run, or an algorithm that is trained first.
        pairs: settings of the preference pairs, see preferences.pairs_of.
        learner: settings of the learner around the algorithm.
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
    pairs: dict
    learner: dict
    settings: dict

    @property
    def batch(self) -> int:
        """What devices share: environments, or examples."""
        return self.settings["num_envs"] if "num_envs" in self.settings else self.settings["batch_size"]


def tasks() -> list[str]:
    """The tasks that have a config."""
    return sorted(path.stem for path in TASKS.glob("*.toml"))


def task_options() -> dict[str, Option]:
    """What the top level of a config may say about a task and the learner."""
    own = options(Config)
    return {name: own[name] for name in own if name not in ("task", "algorithm", "learner", "settings")} | options(
        policy_gradient
    )


def algorithm_options(algorithm: str) -> dict[str, Option]:
    """The settings of an algorithm."""
    if algorithm not in ALGORITHMS:
        refuse_unknown("algorithm", algorithm, ALGORITHMS)
    lineage = [algorithm]
    while (parent := ladder.PARENT.get(lineage[-1])) is not None:
        lineage.append(parent)
    return options(ALGORITHMS[algorithm], [ALGORITHMS[name] for name in lineage[1:]])


def resolve_config(task: str | Path, algorithm: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """The config of an algorithm on a task.

    Args:
        task: one of `tasks()`, or the path of a TOML file.
        algorithm: one of ALGORITHMS.
        overrides: settings that win over the file's; dots lead into tables, as in "network.hidden".

    Raises:
        UserError: an unknown task, algorithm or setting (the nearest valid one is named), or a value that cannot be.
    """
    own = algorithm_options(algorithm)
    raw = _read(task)
    merged = {key: value for key, value in raw.items() if key not in ALGORITHMS}
    merged = _merge(merged, _section(raw, algorithm))
    merged = _merge(merged, _nested(overrides or {}))
    name = merged.pop("task", Path(task).stem)
    merged.pop("algorithm", None)
    known = task_options() | own
    for key in merged:
        if key not in known:
            refuse_unknown("setting", key, _dotted_names(merged, known), f" of {algorithm} on {name}")
    return _assemble(name, algorithm, merged, own)


def load_config(run_dir: Path) -> Config:
    """The config that a run wrote down."""
    path = run_dir / "config.toml"
    if not path.exists():
        raise UserError(f"{run_dir} is not the directory of a run: it has no config.toml.")
    return resolve_config(path, _parse(path)["algorithm"])


def make_env(config: Config, split: str = "train") -> Env:
    """The environment of a config, wrapped; `split` chooses between its train and test problems, where it has them."""
    settings = config.environment_settings
    if "split" in envs.default_settings(config.environment):
        settings = {"split": split, **settings}
    env = envs.make(config.environment, **settings)
    for name, arguments in config.wrappers.items():
        env = envs.wrap(env, name, **arguments)
    return env


def to_dict(config: Config) -> dict[str, Any]:
    """The config as a task file has it: tables last, the algorithm's settings in its section."""
    fields = {name: getattr(config, name) for name in options(Config) if name not in ("learner", "settings")}
    fields |= config.learner
    plain = {name: value for name, value in fields.items() if not isinstance(value, dict)}
    tables = {name: value for name, value in fields.items() if isinstance(value, dict)}
    return plain | tables | {config.algorithm: config.settings}


def parse_overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """`["learning_rate=3e-4", "network.hidden=[64, 64]"]` as settings; a value that is no TOML is a string."""
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set takes key=value, such as learning_rate=3e-4, not {assignment!r}.")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        overrides[key.strip()] = value
    return overrides


def _read(task: str | Path) -> dict[str, Any]:
    """The file of a task, its keys checked, those of all its sections too."""
    path = Path(task) if str(task).endswith(".toml") else TASKS / f"{task}.toml"
    if not path.exists():
        if str(task).endswith(".toml"):
            raise UserError(f"There is no file {path}.")
        refuse_unknown("task", str(task), tasks())
    raw = _parse(path)
    top = task_options()
    for key in raw:
        if key not in top and key not in ALGORITHMS and key not in ("task", "algorithm"):
            refuse_unknown("setting", key, [*top, *ALGORITHMS], f" of a task, as {path} says")
    for algorithm in ALGORITHMS.keys() & raw.keys():
        known = top | algorithm_options(algorithm)
        models = [name for name in ALGORITHMS.keys() & raw.keys() if "like" not in raw[name]]
        if "like" in raw[algorithm] and raw[algorithm]["like"] not in models:
            refuse_unknown("section", raw[algorithm]["like"], models, f" that {algorithm} could be like, in {path}")
        for key in raw[algorithm].keys() - {"like"}:
            if key not in known:
                refuse_unknown("setting", key, known, f" of {algorithm}, as {path} says")
    return raw


def _section(raw: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """What a file says of an algorithm, after the section that it is like."""
    own = dict(raw.get(algorithm, {}))
    model = own.pop("like", None)
    if model is None:
        return own
    known = task_options() | algorithm_options(algorithm)
    return _merge({name: value for name, value in raw[model].items() if name in known}, own)


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from None


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and "kind" not in value:
            value = _merge(old, value)
        merged[key] = value
    return merged


def _nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in dotted.items():
        for key in reversed(name.split(".")):
            value = {key: value}
        nested = _merge(nested, value)
    return nested


def _dotted_names(merged: Mapping[str, Any], known: Mapping[str, Option]) -> list[str]:
    """Every name that could have been meant, the network's among them."""
    network = merged.get("network")
    kind = str(network.get("kind", "mlp")) if isinstance(network, Mapping) else "mlp"
    inner = options(NETWORKS[kind]) if kind in NETWORKS else {}
    return [*known, "network.kind", *(f"network.{name}" for name in inner)]


def _assemble(task: str, algorithm: str, merged: dict[str, Any], own: dict[str, Option]) -> Config:
    """Check every value and sort the merged settings into a Config."""
    merged = {"environment_settings": {}, "wrappers": {}, "network": {}, "pairs": {}} | merged
    fields = options(Config)
    learner = options(policy_gradient)
    task_level = {name: fields[name] for name in fields if name in merged}
    values = {name: check(option, merged[name], minimum=_minimum(option)) for name, option in task_level.items()}
    if "environment" not in values:
        raise UserError(f'The config of {task} does not say which environment: add environment = "...".')
    values["network"] = _check_network(values["network"])
    values["pairs"] = _check_table(values["pairs"], options(preferences.make_pairs), " of preference pairs")
    for name, settings in values["wrappers"].items():
        check(Option(f"wrappers.{name}", REQUIRED, dict, ""), settings)
    config = Config(task=task, algorithm=algorithm, learner={}, settings={}, **values)
    check_seeds(config.seeds)
    config.learner.update({n: check(o, merged.get(n, o.default)) for n, o in learner.items()})
    for name, option in own.items():
        value = merged.get(name, option.default)
        if value is REQUIRED:
            raise UserError(f"{algorithm} needs a value for {name}: {option.meaning} Add --set {name}=...")
        config.settings[name] = _check_setting(option, _resolve_name(value, option, config))
    return config


def _check_network(network: dict[str, Any]) -> dict[str, Any]:
    kind = network.get("kind", "mlp")
    if str(kind) not in NETWORKS:
        refuse_unknown("kind of network", str(kind), NETWORKS)
    known = options(NETWORKS[kind])
    given = {name: value for name, value in network.items() if name != "kind"}
    defaults = {name: option.default for name, option in known.items()}
    return {"kind": kind} | defaults | _check_table(given, known, f" of the network {kind}")


def _check_table(given: Mapping[str, Any], known: Mapping[str, Option], where: str) -> dict[str, Any]:
    for name in given:
        if name not in known:
            refuse_unknown("setting", name, known, where)
    return {name: check(known[name], value, minimum=_minimum(known[name])) for name, value in given.items()}


def check_seeds(seeds: Sequence[int]) -> None:
    """Raise a UserError unless these can be the numbers of seeds."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0 or max(seeds) >= 2**31:
        raise UserError(f"seeds are different numbers from 0 to 2^31 - 1, at least one, not {list(seeds)}.")


def _minimum(option: Option) -> float:
    """Sizes and counts are at least 1; other numbers of a task or a network may be anything."""
    return 1 if option.kind is int or option.name in ("hidden", "channels") else float("-inf")


def _check_setting(option: Option, value: Any) -> Any:
    """No setting of an algorithm is negative; integers are at least 1, unless 0 is their default."""
    counts = int in (option.kind, *getattr(option.kind, "__args__", ())) and option.default != 0
    value = check(option, value, minimum=1 if counts else 0)
    if option.name in SHARES and value > 1:
        raise UserError(f"{option.name} must be at most 1, not {value}.")
    return value


def _resolve_name(value: Any, option: Option, config: Config) -> Any:
    """The number that stands behind `total_steps` or `time_limit` where an integer is wanted."""
    if isinstance(value, str) and int in (option.kind, *getattr(option.kind, "__args__", ())):
        if value == "total_steps":
            return config.total_steps
        if value == "time_limit":
            return make_env(config).time_limit
    return value
