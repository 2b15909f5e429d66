"""From the arguments of a command that trains to its record, and from a record back to what is to be trained."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpg.cli.options import RunOptions
from jaxpg.cli.record import RECORD, CommandRecord, Sweep, read
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments.config_file import file_name, read_task
from jaxpg.experiments.grid import CompiledGroup, plan_grid, refuse_twice
from jaxpg.experiments.sampling import SAMPLED_FILES, sampled_table
from jaxpg.experiments.sections import check_name
from jaxpg.experiments.stages import INHERITED, Stage, check_plan, names_run, plan_stages, runs_named, with_run
from jaxpg.training import checkpoint, run_directory


def plan_command(options: RunOptions, out: Path) -> CommandRecord:
    """The record of a command in `out`: a new one, or with --resume the one that is there.

    Raises:
        UserError: something that cannot be trained; a directory with another command, or one that has begun.
    """
    recorded = read(out) if options.resume else None
    if recorded is not None:
        return _updated(recorded, options, out)
    if not options.resume:
        _refuse_begun(out, options)
    if options.command == "resume":
        if not (out / run_directory.CONFIG).exists():
            raise UserError(f"{out} holds nothing to resume: it has no {RECORD} and no {run_directory.CONFIG}.")
        algorithm = configs.load_config(out).algorithm
        task = str(out / run_directory.CONFIG)
        options = dataclasses.replace(options, command="train", task=task, algorithms=(algorithm,))
    if options.command == "sweep":
        return _plan_sweep(options, out)
    runs = _plan_compare(options, out) if options.command == "compare" else _plan_train(options, out)
    return _record(options, runs, out)


def any_has_begun(record: CommandRecord, out: Path) -> bool:
    """Whether one of the runs of a command has trained anything."""
    directories = [run["directory"] for run in record.runs] + ([FIRST_WAVE] if record.sweep else [])
    return any(run_directory.has_begun(out / directory) for directory in directories)


def stages_of(record: CommandRecord, out: Path) -> list[Stage]:
    """The runs of a command in training order; of a sweep, those before it."""
    configs_of_runs = [_config(run["config"], out) for run in record.runs]
    directories = [run["directory"] for run in record.runs]
    algorithms = {file_name(algorithm): algorithm for algorithm in record.algorithms}
    names = [
        record.algorithms[0] if directory == "." else algorithms.get(directory, directory) for directory in directories
    ]
    return [Stage(n, c, out / d) for n, c, d in zip(names, configs_of_runs, directories, strict=True)]


def groups_of(record: CommandRecord, out: Path) -> list[CompiledGroup]:
    """The compiled groups of a sweep."""
    assert record.sweep is not None
    return [
        CompiledGroup(_config(group["config"], out), tuple(group["traced"]), group["places"], group["points"])
        for group in record.sweep.groups
    ]


def task_name(options: RunOptions) -> str:
    """The name of the task that a command line names."""
    assert options.task is not None
    tables, path = read_task(options.task)
    return check_name(tables.get("task", path.stem))


def config_of_run(options: RunOptions, algorithm: str, directory: Path) -> configs.Config:
    """The config of a run in `directory`: the task's, or, when the run is resumed, its own; overrides win over both.

    Raises:
        UserError: as `resolve_config`; a run of another task or algorithm, or as `_overridden`.
    """
    assert options.task is not None
    if not (options.resume and (directory / run_directory.CONFIG).exists()):
        return configs.resolve_config(options.task, algorithm, options.overrides)
    begun = configs.load_config(directory)
    of_the_task = {name: x for name, x in options.overrides.items() if name != "total_steps"}  # that is `_overridden`'s
    wanted = configs.resolve_config(options.task, algorithm, of_the_task).algorithm
    _refuse_other_runs(f"The run in {directory}", begun.task, [begun.algorithm], options, [wanted])
    return _overridden(begun, options.overrides, directory)


def _plan_train(options: RunOptions, out: Path) -> list[Stage]:
    (algorithm,) = options.algorithms
    return _plan_run(options, algorithm, config_of_run(options, algorithm, out), out, out)


def _plan_compare(options: RunOptions, out: Path) -> list[Stage]:
    """The runs of all algorithms, each after its stages; a stage that several need is trained once."""
    _refuse_one_algorithm(options, out)
    stages: dict[Path, Stage] = {}
    for algorithm in options.algorithms:
        directory = out / file_name(algorithm)
        if not options.resume:
            run_directory.refuse_begun(directory)
        config = config_of_run(options, algorithm, directory)
        for stage in _plan_run(options, algorithm, config, directory, out):
            if stages.setdefault(stage.directory, stage).config != stage.config:
                raise UserError(
                    f"{stage.name} is compared here and also trained before another algorithm, with other settings. "
                    "Compare it on its own, with another --out."
                )
    environments = {a: stages[out / file_name(a)].config.environment for a in options.algorithms}
    if len(set(environments.values())) > 1:
        listed = ", ".join(f"{algorithm} {environment}" for algorithm, environment in environments.items())
        raise UserError(
            f"compare is of one environment, and the algorithms have several here: {listed}. Train each with jaxpg "
            "train, and draw them with jaxpg plot."
        )
    return list(stages.values())


def _refuse_one_algorithm(options: RunOptions, out: Path) -> None:
    """Refuse a comparison of one algorithm, or of one that is named twice, unless it was begun as one."""
    first, *others = options.algorithms
    if not others and not (options.resume and (out / file_name(first)).exists()):
        raise UserError(
            f"compare is of two different algorithms or more, and this one is of {first} alone: name another one "
            f"beside it, or train it with: {shlex.join(['jaxpg', 'train', str(options.task), first])}."
        )


def _plan_run(options: RunOptions, name: str, config: configs.Config, directory: Path, shared_dir: Path) -> list[Stage]:
    """The stages of a config, checked if anything is to be trained before the config itself."""
    assert options.task is not None
    plan = plan_stages(config, directory, shared_dir, task=options.task, overrides=options.overrides, name=name)
    if len(plan) > 1 or options.command == "compare":
        check_plan(plan)
    return plan


def _plan_sweep(options: RunOptions, out: Path) -> CommandRecord:
    if not options.grid:
        raise UserError("sweep needs --grid, such as --grid learning_rate=1e-4:1e-2:log:8.")
    assert options.task is not None
    (algorithm,) = options.algorithms
    groups = plan_grid(options.task, algorithm, options.overrides, options.grid)
    *stages, last = _plan_run(options, algorithm, groups[0].config, out, out)
    for setting, run in runs_named(last.config).items():
        groups = [group._replace(config=with_run(group.config, setting, run)) for group in groups]
    _check_groups(groups, stages, options)
    tables = [
        {
            "config": _tables(group.config),
            "traced": list(group.traced),
            "places": group.places,
            "points": group.points,
        }
        for group in groups
    ]
    sweep = Sweep(grid=_jsonable(options.grid), memory=options.memory, groups=tables, waves=[])
    return _record(options, stages, out, sweep)


def _check_groups(groups: Sequence[CompiledGroup], stages: Sequence[Stage], options: RunOptions) -> None:
    """Raise the UserError that one of the programs of a sweep would raise, before any is compiled."""
    assert options.grid is not None
    inherited = [name for name in options.grid if name.split(".")[0] in INHERITED]
    if stages and inherited:
        raise UserError(
            f"--grid cannot have {inherited[0]}, which all points share with their first stage {stages[0].name}. "
            "Train that alone, and begin with its directory: --from RUN."
        )
    table = sampled_table(groups[0].config)
    if table and not getattr(groups[0].config, table).get("file"):
        raise UserError(
            f"A sweep samples no {table}: let jaxpg train write them once, with one point's settings, and set "
            f"{table}.file to the {SAMPLED_FILES[table]} in the directory of that run."
        )
    if groups[0].config.callbacks:
        raise UserError("A sweep takes no callbacks, since its runs share a program: train those alone that need them.")
    for group in groups:
        check_plan([*stages, Stage(group.config.algorithm, group.config, Path())])


def _record(options: RunOptions, stages: Sequence[Stage], out: Path, sweep: Sweep | None = None) -> CommandRecord:
    assert options.task is not None
    runs = [{"directory": str(s.directory.relative_to(out)), "config": _tables(s.config)} for s in stages]
    return CommandRecord(
        command=options.command,
        command_line=shlex.join(["jaxpg", *sys.argv[1:]]),
        task=options.task,
        algorithms=list(options.algorithms),
        devices=options.devices.devices,
        mesh=options.devices.mesh,
        runs=runs,
        sweep=sweep,
        directory=str(out),
        loggers=list(options.loggers),
    )


def _updated(record: CommandRecord, options: RunOptions, out: Path) -> CommandRecord:
    """A record with the devices, the memory and the `total_steps` that the command line gives now.

    Raises:
        UserError: the command line contradicts the record otherwise.
    """
    what = {"train": "The run", "compare": "The comparison", "sweep": "The sweep"}[record.command] + f" in {out}"
    if options.command not in ("resume", record.command):
        raise UserError(f"{what} goes on with: jaxpg resume {shlex.quote(str(out))}, not with {options.command}.")
    tables = [group["config"] for group in record.sweep.groups] if record.sweep else [record.runs[-1]["config"]]
    if options.task not in (None, record.task) or options.algorithms:
        known = options.task in (None, record.task)
        given = dataclasses.replace(options, task=None) if known else options
        _refuse_other_runs(what, tables[0]["task"], record.algorithms, given, options.algorithms or record.algorithms)
    record = dataclasses.replace(record, devices=options.devices.devices, mesh=options.devices.mesh)
    if record.sweep:
        if options.loggers:
            raise UserError(f"A sweep takes no --{options.loggers[0]}: its scores are in {run_directory.SWEEP}.")
        options = dataclasses.replace(options, overrides=_with_directories(options.overrides, record, out))
        return dataclasses.replace(record, sweep=_updated_sweep(record.sweep, options, out, what))
    shown = ["."] if record.command == "train" else [file_name(algorithm) for algorithm in record.algorithms]
    overrides = _with_directories(options.overrides, record, out)
    runs = [_updated_run(run, overrides, out) if run["directory"] in shown else run for run in record.runs]
    command = shlex.join(["jaxpg", *sys.argv[1:]])  # without which what the record says would give other runs
    line = record.command_line if runs == record.runs else f"{record.command_line}\n{command}"
    loggers = list(options.loggers) or record.loggers
    return dataclasses.replace(record, runs=runs, command_line=line, loggers=loggers)


def _updated_run(run: Mapping[str, Any], overrides: Mapping[str, Any], out: Path) -> dict[str, Any]:
    directory = out / run["directory"]
    return {**run, "config": _tables(_overridden(_config(run["config"], out), overrides, directory))}


def _with_directories(overrides: Mapping[str, Any], record: CommandRecord, out: Path) -> dict[str, Any]:
    """Overrides in which the names of what a command trains first are the directories where it does."""
    trained = [run["directory"] for run in record.runs]
    return {n: str(out / x) if names_run(n) and x in trained else x for n, x in overrides.items()}


def _updated_sweep(sweep: Sweep, options: RunOptions, out: Path, what: str) -> Sweep:
    if options.grid is not None and _jsonable(options.grid) != sweep.grid:
        raise UserError(f"{what} has another grid: {sweep.grid} there, {_jsonable(options.grid)} here.")
    overrides = options.overrides
    for name in overrides:
        refuse_twice(name, sweep.grid)
    for tables in [group["config"] for group in sweep.groups]:
        if overrides.get("total_steps", tables["total_steps"]) != tables["total_steps"]:
            raise UserError(
                f"{what} has another total_steps: {tables['total_steps']} there. A sweep cannot be extended."
            )
        _updated_run({"directory": ".", "config": tables}, overrides, out)
    return dataclasses.replace(sweep, memory=sweep.memory if options.memory is None else options.memory)


def _overridden(begun: configs.Config, overrides: Mapping[str, Any], directory: Path) -> configs.Config:
    """The config of a run that goes on, with the settings of the command line, of which `total_steps` alone may differ.

    Raises:
        UserError: another setting differs, the run has trained for longer already, or its learning rate is annealed and
            it is to go on for longer.
    """
    source = directory / run_directory.CONFIG
    config = configs.resolve_tables(configs.to_dict(begun), begun.algorithm, overrides, source=source)
    what, stored, current = f"The run in {directory}", configs.to_dict(begun), configs.to_dict(config)
    run_directory.refuse_other_config(what, stored, current, run_directory.GOES_ON)
    trained = checkpoint.find(directory / checkpoint.CHECKPOINTS)
    if trained is not None and config.total_steps < min(trained.steps, begun.total_steps):
        more = f"{trained.steps:,} steps each, more than --steps {config.total_steps:,}"
        raise UserError(f"The run in {directory} has trained {more}.")
    over = config.settings.get("anneal_steps")
    if config.total_steps > begun.total_steps and over is not None and over < config.total_steps:
        raise UserError(
            f"The run in {directory} anneals its learning rate to zero over {over:,} steps, so it would learn nothing "
            f"from there to {config.total_steps:,}. Train a new run for as long, or one that starts from this policy: "
            f"{shlex.join(['--from', str(directory)])} with another --out."
        )
    return config


def _refuse_other_runs(
    what: str, task: str, algorithms: Sequence[str], options: RunOptions, wanted: Sequence[str]
) -> None:
    """Raise a UserError unless the task of the options, if they have one, and `wanted` are what there is."""
    given = task if options.task is None else task_name(options)
    if (task, sorted(algorithms)) != (given, sorted(wanted)):
        raise UserError(f"{what} is of {', '.join(algorithms)} on {task}, not {', '.join(wanted)} on {given}.")


RESULTS = {
    "train": (),
    "compare": ("comparison.json", "comparison.html", "learning_curve.png"),
    "sweep": (run_directory.SWEEP, "sweep.png", "best.toml"),
}
"""What a command writes into its directory besides its runs and the record."""
FIRST_WAVE = "program-000/wave-000"


def _refuse_begun(out: Path, options: RunOptions) -> None:
    """Raise a UserError if a new command is to write where another one has begun, or over other files."""
    run_directory.refuse_begun(out)
    run_directory.refuse_begun(out / FIRST_WAVE, "It is of a sweep without its plan.json: choose another --out.")
    record = read(out)
    if record is None:
        config = os.path.realpath(out / run_directory.CONFIG)  # `Path.resolve` raises where links make a loop
        if options.task is not None and os.path.realpath(options.task) == config:
            raise UserError(
                f"The run would write its settings over its task, {options.task}. Choose another directory with --out."
            )
        run_directory.refuse_files(out, RESULTS[options.command], options.command)
    elif any_has_begun(record, out):
        what = {"train": "run", "compare": "comparison", "sweep": "sweep"}[record.command]
        raise UserError(f"{out} holds a {what} already. Add --resume to continue it, or choose another --out.")


def _tables(config: configs.Config) -> dict[str, Any]:
    """A config as it is in the record."""
    return _jsonable(configs.to_dict(config))


def _config(tables: Mapping[str, Any], out: Path) -> configs.Config:
    return configs.resolve_tables(tables, tables["algorithm"], source=out / RECORD)


def _jsonable(value: Any) -> Any:
    """Tuples as the lists that JSON makes of them."""
    return json.loads(json.dumps(value))
