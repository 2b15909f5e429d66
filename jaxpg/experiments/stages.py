"""The stages of a run: the runs that train its initial policy and its reward model, planned before anything is trained.

A config may name an algorithm, or a stage of its task, as a reward model, as its `initial` policy, or as the policy
whose right completions are its demonstrations. That is then trained first: a separate run on the same task, with the
settings of its section, which may name further ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxpg import preferences
from jaxpg.errors import UserError
from jaxpg.experiments.build import Experiment, build, reward_network, text_task
from jaxpg.experiments.config import Config, load_config, make_env, resolve_config, trainable
from jaxpg.experiments.config_file import merge, nested
from jaxpg.experiments.pair_sampling import check_earlier_pairs
from jaxpg.experiments.sampling import SAMPLED_FILES, sampled_table
from jaxpg.experiments.sections import STAGES
from jaxpg.experiments.warm_start import check_initial, check_writer, reward_params
from jaxpg.training import checkpoint, run_directory
from jaxpg.training.loop import check_total_steps

NOT_SAMPLED: dict[str, Any] = {"demonstrations": {}, "pairs": {"slip_rate": 0.5}}
"""What stands in for sampled data before they are there."""
INHERITED = ("environment", "environment_settings", "network", "pairs", "step_labels", STAGES)
"""The settings in which a stage follows the overrides of the run that needs it."""


class Stage(NamedTuple):
    """One run of a plan.

    name: of the stage, or the algorithm.
    config: its config, in which the runs that it starts from are directories.
    directory: the directory of the run.
    """

    name: str
    config: Config
    directory: Path


def is_finished(stage: Stage) -> bool:
    """Whether the last checkpoint of a stage has reached the stage's `total_steps`, or a callback has ended it before.

    The metrics may be ahead of it: a run that is killed after its last row has not saved what it learned. A run that
    has been ended goes on where other `total_steps` are asked for.
    """
    last = checkpoint.find(stage.directory / checkpoint.CHECKPOINTS)
    if last is None or last.steps >= stage.config.total_steps:
        return last is not None
    ended = last.about.get("ended") is True
    return ended and run_directory.resume_point(last).config.get("total_steps") == stage.config.total_steps


def runs_named(config: Config) -> dict[str, str]:
    """By the setting that names it, each run that a config starts from: a directory, or what is trained first.

    They are in the order in which they are trained.
    """
    table = sampled_table(config)
    sampled_from = {f"{table}.sampled_from": getattr(config, table)["sampled_from"]} if table else {}
    named = {**config.reward_models, **sampled_from, "initial": config.initial}
    return {setting: run for setting, run in named.items() if run is not None}


def with_run(config: Config, setting: str, run: str) -> Config:
    """A config in which a setting of `runs_named` is another run."""
    table, *path = setting.split(".")
    changed: Any = run
    if path:
        changed = merge(getattr(config, table), nested({".".join(path): run}))
    return dataclasses.replace(config, **{table: changed})


def names_run(setting: str) -> bool:
    """Whether a setting, with dots, names a run that another one starts from."""
    of_a_reward = setting.startswith("rewards.") and setting.endswith(".model")
    of_data = setting in [f"{table}.sampled_from" for table in SAMPLED_FILES]
    return of_a_reward or of_data or setting in ("reward", "process_reward", "initial")


def plan_stages(
    config: Config,
    directory: Path,
    shared_dir: Path,
    *,
    task: str | Path,
    overrides: Mapping[str, Any],
    name: str | None = None,
    finished: Callable[[Stage], bool] = is_finished,
) -> list[Stage]:
    """The runs that a config needs, in training order; the last one is the run of the config itself.

    A stage that is needed twice is planned once. What a finished stage needed is not planned again.

    Args:
        config: the config of the final run.
        directory: the directory of that run.
        shared_dir: where the stages go, each into a directory of its name.
        task: the task or TOML file that `config` was resolved from.
        overrides: settings of the command line; stages take over those that are INHERITED, and the seeds of `config`.
        name: of the final run; its algorithm if not given.
        finished: whether a stage has been trained already.

    Raises:
        UserError: a stage that depends on itself, directly or through other stages, or with too many steps to count.
    """
    inherited = {name: value for name, value in overrides.items() if name.split(".")[0] in INHERITED}
    inherited["seeds"] = list(config.seeds)

    names = trainable(task)

    def plan(planned: Stage, needed_by: tuple[str, ...]) -> list[Stage]:
        stages: dict[Path, Stage] = {}
        config = planned.config
        check_total_steps(config.total_steps)
        for setting, name in runs_named(config).items():
            if name not in names:
                continue
            if name in needed_by:
                chain = " needs ".join((*needed_by[needed_by.index(name) :], name))
                raise UserError(
                    f"{chain}: there is no first stage. Set {setting} to the directory of a run, or to none."
                )
            stage = Stage(name, resolve_config(task, name, inherited), shared_dir / name)
            needed = [stage] if finished(stage) else plan(stage, (*needed_by, name))
            for each in needed:
                stages.setdefault(each.directory, each)
            config = with_run(config, setting, str(stage.directory))
        if table := sampled_table(config):
            config = with_run(config, f"{table}.file", str(planned.directory / SAMPLED_FILES[table]))
        return [*stages.values(), planned._replace(config=config)]

    return plan(Stage(name or config.algorithm, config, directory), ())


def check_plan(plan: Sequence[Stage], finished: Callable[[Stage], bool] = is_finished) -> None:
    """Raise the UserError that building one of the stages would raise, before any of them is trained.

    The final run is checked first.
    """
    planned = {str(stage.directory): stage.config for stage in plan}
    *before, last = plan
    for stage in [last, *reversed([stage for stage in before if not finished(stage)])]:
        if stage.config.initial in planned:
            check_initial(stage.config, planned[stage.config.initial])
        _check_sampled_pairs(stage.config, planned)
        build_planned(stage.config, planned)


def _check_sampled_pairs(config: Config, planned: Mapping[str, Config]) -> None:
    """Refuse settings of pairs that cannot be sampled; `planned` are the configs of runs that are not there yet."""
    if sampled_table(config) != "pairs":
        return
    preferences.check_sampled(config.pairs, text_task(config, "train"))
    if config.initial is None or config.initial in planned:
        check_earlier_pairs(config, planned.get(config.initial or ""))
    else:
        check_earlier_pairs(config, load_config(Path(config.initial)))


def build_planned(config: Config, planned: Collection[str], *, traceable: bool = False) -> Experiment:
    """The experiment of a config before the runs that it names and that are `planned` have been trained.

    Demonstrations that are not there yet are the task's own, and pairs are made of them. A reward model that has not
    been trained has no parameters, which is enough to build the experiment; with `traceable` it has initial ones, to
    trace it with.
    """
    if table := sampled_table(config):
        source, file = (getattr(config, table).get(name) for name in ("sampled_from", "file"))
        if not (file and Path(file).exists()):
            if source not in planned:
                check_writer(source, config)
            config = dataclasses.replace(config, **{table: NOT_SAMPLED[table]})
    models = reward_params(config, planned=planned)
    if traceable and config.reward_models:
        initial = reward_network(config, make_env(config)).init
        models |= {name: initial(jax.random.key(0)) for name in config.reward_models if name not in models}
    return build(config, models=models)
