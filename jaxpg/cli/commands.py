"""The commands that train: train, compare, sweep and resume. They take parsed arguments and return an exit code."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from jaxpg import files
from jaxpg.cli import checking, completion, gridworld, inspection, listing, plan, runs, showing, stage_report
from jaxpg.cli.options import RunOptions, read_run_options
from jaxpg.cli.planning import groups_of, stages_of, task_name
from jaxpg.cli.runs import Session
from jaxpg.cli.signals import Interruption, interruptible
from jaxpg.envs import task_factory
from jaxpg.experiments.build import kind_of
from jaxpg.experiments.completions import SAMPLES, completions_by_heading
from jaxpg.experiments.config import Config, to_dict, to_task
from jaxpg.experiments.config_file import file_name
from jaxpg.experiments.grid import CompiledGroup, config_at
from jaxpg.experiments.sections import MAX_NAME
from jaxpg.experiments.stages import Stage, is_finished
from jaxpg.experiments.sweep import train_sweep
from jaxpg.parallel import processes
from jaxpg.runs.results import common_units, curve_units, run_result
from jaxpg.runs.terminal import heading, make_console
from jaxpg.runs.training import PAGE, end_by_callback, write_page
from jaxpg.training import checkpoint, provenance, run_directory
from jaxpg.training.memory import memory_limit
from jaxpg.user_input.printable import counted, printable

UNEQUAL = 1.1
"""How many times the steps of another algorithm one may have taken before a comparison says so."""


def run_training(arguments: argparse.Namespace) -> int:
    """Train what train, compare or sweep asks for, or go on with it, and show the result."""
    options = read_run_options(arguments)
    out = options.out or _new_directory(options)
    with runs.open_session(options, out) as session:
        return FINISH[session.record.command](session)


def _finish_train(session: Session) -> int:
    """Train an algorithm on a task, and draw its learning curve."""
    if code := _train_stages(session):
        return code
    if processes.is_main_process():
        _show_run(stages_of(session.record, session.out)[-1].config, session)
        _show_stages(session)
    return 0


def _show_stages(session: Session) -> None:
    """What came into each stage of a run and what went out, where there was more than one."""
    stages = stages_of(session.record, session.out)
    if len(stages) == 1:
        return
    rows = stage_report.stage_rows(stages)
    make_console().print(stage_report.stage_table(rows))
    write_page(stages[-1].config, session.out, stage_report.stage_details(rows))


def _train_stages(session: Session, diverged: dict[str, str] | None = None) -> int:
    """0 if no run of a command was interrupted, else the exit code; `diverged`: see `runs.train_stages`."""
    if all(map(is_finished, stages := stages_of(session.record, session.out))):
        named = [stage for stage in stages if stage.name in session.record.algorithms]
        _print_line(runs.console_of(session.options), _finished_already(named))
    with interruptible(runs.console_of(session.options), runs.resume_command(session)) as interruption:
        finished = runs.train_stages(session, interruption, diverged)
    return 0 if finished else runs.report_interrupted(session, interruption)


def _finished_already(stages: Sequence[Stage]) -> str:
    """That the runs of a command have been trained before, and how they go on, if they can."""
    last = [checkpoint.find(stage.directory / checkpoint.CHECKPOINTS) for stage in stages]
    steps = [found.steps for found in last if found is not None]
    taken = " to ".join(f"{count:,}" for count in sorted({min(steps), max(steps)}))
    anneals = any(stage.config.settings.get("anneal_steps") is not None for stage in stages)
    return f"Finished already at {taken} steps, nothing was trained{'' if anneals else '; --steps N goes on'}."


def _show_run(config: Config, session: Session) -> None:
    """The result of a run, the files that it left, and the command that looks at it."""
    from jaxpg import report
    from jaxpg.report.comparison import TABLE_WIDTH

    out = session.out
    run = run_result(run_directory.load_metrics(out), config.threshold)
    curve, curves = out / "learning_curve.png", {config.algorithm: (run.steps, run.returns)}
    units = curve_units(to_dict(config))
    report.learning_curve(curves, curve, title=config.task, threshold=config.threshold, units=units)
    end = end_by_callback(config, out)
    if end or not task_factory(config.environment):  # of a text task every evaluation writes it, but not how it ended
        write_page(config, out)
    summaries = report.summarize({config.algorithm: run}, config.threshold)
    console = make_console(narrowest=TABLE_WIDTH)
    console.print(report.comparison_table(summaries, title=f"{config.task}, {counted(len(config.seeds), 'seed')}"))
    if end:
        _print_line(console, f"{config.algorithm}: {end}.")
    _print_line(console, f"Learning curve: {curve}")
    _print_line(console, f"Report:         {out / PAGE}")
    if kind_of(config).has_policy:
        look = ("sample",) if (out / SAMPLES).exists() else ("play", "--gif", f"{Path(config.task).name}.gif")
        words = runs.command_on(out, to_dict(config), *look)
        _print_line(console, f"Look at it:     {shlex.join(words)}")


def _finish_compare(session: Session) -> int:
    """Train several algorithms on a task, and compare them."""
    stages = {stage.name: stage.config for stage in stages_of(session.record, session.out)}
    resolved = {name: stages[name] for name in session.record.algorithms}
    if processes.is_main_process():  # before the training, since it takes long
        steps = {name: whole_iterations(config) for name, config in resolved.items()}
        _show_differences(differences(resolved, steps), runs.console_of(session.options))
    diverged: dict[str, str] = {}
    if code := _train_stages(session, diverged):
        return code
    left = {name: config for name, config in resolved.items() if name not in diverged}
    if processes.is_main_process() and left:
        trained = {name: _as_trained(config, session.out / file_name(name)) for name, config in left.items()}
        _show_comparison(trained, session, diverged)
    return 2 if diverged else 0


def _as_trained(config: Config, run_dir: Path) -> Config:
    """A config of a comparison with the steps of its run, which may have been resumed by itself, for longer."""
    return dataclasses.replace(config, total_steps=run_directory.load_config(run_dir)["total_steps"])


def whole_iterations(config: Config) -> int:
    """The steps that a seed will take, since its last iteration is finished; at least, where iterations vary."""
    settings = config.settings
    per_environment = settings.get("num_steps") or settings.get("train_frequency", 1) * settings.get("repeats", 1)
    iteration = settings.get("num_envs", 1) * per_environment
    return -(-config.total_steps // iteration) * iteration


MEASURED = ("evaluation_greedy", "evaluation_episodes", "evaluation_samples", "threshold")
"""Settings that decide how a score is measured, apart from the budget."""
OF_THE_TASK = (
    "environment_settings", "wrappers", "rewards", "reward", "process_reward", "process_weight",
)  # fmt: skip
"""Settings that decide what a score measures."""


def differences(resolved: Mapping[str, Config], steps: Mapping[str, int]) -> list[str]:
    """What makes a comparison unfair, in sentences: other budgets, seeds, initial policies, tasks, rewards or measures.

    Args:
        resolved: the configs, by algorithm.
        steps: by algorithm, those that a seed takes or took for its `total_steps`.
    """
    from jaxpg.report.comparison import format_quantity

    budgets = {name: format_quantity(config.total_steps) for name, config in resolved.items()}
    measured = {setting: {name: getattr(config, setting) for name, config in resolved.items()} for setting in MEASURED}
    found = [
        f"The algorithms differ in {setting}: {_listed(values)}. --set {setting}=... sets it for all."
        for setting, values in {"total_steps": budgets, **measured}.items()
        if len(set(values.values())) > 1
    ]
    if len({config.seeds for config in resolved.values()}) > 1:
        seeds = [f"{name} {', '.join(map(str, config.seeds))}" for name, config in resolved.items()]
        found.append(f"The algorithms differ in their seeds: {'; '.join(seeds)}.")
    begun = {name: config.initial for name, config in resolved.items()}
    if len(set(begun.values())) > 1:
        found.append(f"The algorithms differ in initial, a run whose steps are not counted here: {_listed(begun)}.")
    found += _differences_of_tasks(resolved)
    if len(set(budgets.values())) == 1 and max(steps.values()) > UNEQUAL * min(steps.values()):
        taken = _listed({name: f"{x:,}" for name, x in steps.items()})
        ended = any(config.callbacks for config in resolved.values())
        found.append(
            "The algorithms differ in the steps that they take for this total_steps, as their last iterations are "
            f"finished{', or callbacks end them' if ended else ''}: {taken}."
            f"{'' if ended else ' A larger --steps makes them alike.'}"
        )
    return found


def _differences_of_tasks(resolved: Mapping[str, Config]) -> list[str]:
    """What makes the scores of algorithms those of different tasks or rewards, in sentences."""
    tasks = {name: files.flatten({x: getattr(config, x) for x in OF_THE_TASK}) for name, config in resolved.items()}
    found = []
    for setting in dict.fromkeys(setting for settings in tasks.values() for setting in settings):
        values = {name: settings.get(setting, "its default") for name, settings in tasks.items()}
        if len(set(map(repr, values.values()))) > 1:
            found.append(f"The algorithms differ in {setting}, so their scores differ in kind: {_listed(values)}.")
    return found


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {files.setting_text(value)}" for name, value in values.items())


def _show_differences(sentences: Sequence[str], console: Console) -> None:
    for sentence in sentences:
        _print_line(console, sentence)


def _show_comparison(resolved: Mapping[str, Config], session: Session, diverged: Mapping[str, str]) -> None:
    """The algorithms side by side, in the terminal and as a page.

    Args:
        resolved: the configs of those that were trained, by name.
        session: the command.
        diverged: what happened to the others, in a sentence each.
    """
    from jaxpg import report
    from jaxpg.report.comparison import TABLE_WIDTH

    out = session.out
    first = next(iter(resolved.values()))
    metrics = {name: run_directory.load_metrics(out / file_name(name)) for name in resolved}
    results = {name: run_result(rows, resolved[name].threshold, resolved[name].seeds) for name, rows in metrics.items()}
    found = differences(resolved, {name: int(np.max(rows["steps"][-1])) for name, rows in metrics.items()})
    ends = {name: end_by_callback(config, out / file_name(name)) for name, config in resolved.items()}
    found += [f"{name}: {end}." for name, end in ends.items() if end]
    found += [f"{name} is left out. {sentence}" for name, sentence in diverged.items()]
    details = _provenance(session, [out / file_name(name) for name in resolved])
    details["configs"] = {name: files.flatten(to_dict(config)) for name, config in resolved.items()}
    if stages := _last_evaluations_of_stages(session, diverged):
        details["first stages, last evaluation"] = stages
    thresholds = {config.threshold for config in resolved.values()}
    summaries = report.write_comparison(
        results,
        out,
        title=first.task,
        threshold=thresholds.pop() if len(thresholds) == 1 else None,
        details=details,
        completions={name: completions_by_heading(out / file_name(name)) for name in resolved},
        units=common_units(curve_units(to_dict(config)) for config in resolved.values()),
        differences=found,
    )
    console = make_console(narrowest=TABLE_WIDTH)
    numbers = [len(config.seeds) for config in resolved.values()]
    fewest = f"{min(numbers)} to " if min(numbers) < max(numbers) else ""
    console.print(report.comparison_table(summaries, title=f"{first.task}, {fewest}{counted(max(numbers), 'seed')}"))
    if sentence := report.lead_sentence(summaries):
        _print_line(console, sentence)
    _show_differences(found, console)
    _print_line(console, f"Report: {out / 'comparison.html'}")


def _last_evaluations_of_stages(session: Session, failed: Collection[str]) -> dict[str, str]:
    """The last evaluation, with its interval, of every stage that was trained for the compared runs."""
    from jaxpg import report
    from jaxpg.report.comparison import format_estimate

    stages = stages_of(session.record, session.out)
    names = [stage.name for stage in stages if stage.name not in {*session.record.algorithms, *failed}]
    finals = {name: run_result(run_directory.load_metrics(session.out / file_name(name))).final for name in names}
    return {name: format_estimate(report.bootstrap(final)) for name, final in finals.items()}


def _finish_sweep(session: Session) -> int:
    """Train an algorithm with all settings of a grid, several seeds each, and name the best."""
    groups, out, sweep = groups_of(session.record, session.out), session.out, session.record.sweep
    assert sweep is not None
    config = groups[0].config
    console = runs.console_of(session.options)
    console.print(_sweep_header(groups, out))
    with interruptible(console, runs.resume_command(session)) as interruption:
        scores = _train_groups(groups, session, interruption)
    if scores is None:
        return runs.report_interrupted(session, interruption)
    from jaxpg import report

    title = f"{config.algorithm} on {config.task}, {counted(len(config.seeds), 'seed')}"
    waves = sorted(path.parent for path in out.glob(f"program-*/wave-*/{run_directory.MACHINE}"))
    best = report.write_sweep(sweep.grid, scores, out, title=title, details=_provenance(session, waves))
    files.replace_file(out / "best.toml", files.toml_dumps(to_task(config_at(groups, best))))
    console = make_console()
    console.print(report.sweep_table(sweep.grid, scores, title=title))
    _print_line(console, f"Picture:  {out / 'sweep.png'}")
    _print_line(console, f"The best: {out / 'best.toml'}")
    if beyond := report.beyond_the_grid(sweep.grid, best):
        _print_line(console, beyond)
    on_new_seeds = config.algorithm, "--seed", str(max(config.seeds) + 1)
    again = runs.command_on(out / "best.toml", to_dict(config), "train", *on_new_seeds)
    _print_line(console, f"It was selected on these seeds, which favours its score. On new ones: {shlex.join(again)}")
    return 0


def _train_groups(groups: Sequence[CompiledGroup], session: Session, interruption: Interruption) -> np.ndarray | None:
    """The scores of a sweep, `[P, S]`, after the stages that its runs begin with; None if it was interrupted."""
    if not runs.train_stages(session, interruption) or interruption.requested():
        return None
    options, sweep = session.options.devices, session.record.sweep
    assert sweep is not None
    sizes = list(sweep.waves)

    def save_size(size: int) -> None:
        sizes.append(size)
        resized = dataclasses.replace(sweep, waves=list(sizes))
        runs.save_record(session._replace(record=dataclasses.replace(session.record, sweep=resized)))

    return train_sweep(
        groups,
        session.out,
        # New waves fit any number of devices, so the number of seeds does not limit it: 0 divides by all.
        mesh_for=partial(runs.mesh_for, options),
        memory_of=lambda mesh: memory_limit(mesh, sweep.memory),
        hooks_for=partial(runs.training_hooks, session.options, interruption),
        sizes=sweep.waves,
        on_size=save_size,
    )


def _sweep_header(groups: Sequence[CompiledGroup], out: Path) -> Text:
    config, points = groups[0].config, sum(len(group.points) for group in groups)
    runs_of = f"{counted(points, 'point')} x {counted(len(config.seeds), 'seed')}"
    details = f"{runs_of}, {config.total_steps:,} steps each, {counted(len(groups), 'program')}"
    return heading(f"{config.algorithm} on {config.task}", details, out)


def _new_directory(options: RunOptions) -> Path:
    """A directory in runs/ for a command without --out, named after its task; one that is not there yet."""
    suffix = {"train": options.algorithms[0], "compare": "compared", "sweep": "sweep"}[options.command]
    suffix = file_name(suffix)[:MAX_NAME]  # the algorithm has not been looked up yet
    name = f"{task_name(options)}-{suffix}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (Path("runs") / f"{name}-{i}" for i in itertools.count(2))  # another command of the same second
    return next(path for path in itertools.chain([Path("runs") / name], numbered) if not os.path.lexists(path))


def _provenance(session: Session, trained: Sequence[Path]) -> dict[str, Any]:
    """The command, and the machines of the runs that were `trained`: not the one that draws the page."""
    machines = [machine for run_dir in trained for machine in run_directory.load_machines(run_dir)]
    return {"command": session.record.command_line, **provenance.machines(machines)}


def _print_line(console: Console, text: str) -> None:
    """Without colours and line breaks, so that a path can be copied."""
    console.print(printable(text), soft_wrap=True)


FINISH: dict[str, Callable[[Session], int]] = {
    "train": _finish_train,
    "compare": _finish_compare,
    "sweep": _finish_sweep,
}
"""By the command of a record: train what is left, show the result, return the exit code."""
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": run_training,
    "compare": run_training,
    "sweep": run_training,
    "resume": run_training,
    "eval": inspection.run_eval,
    "play": inspection.run_play,
    "sample": inspection.run_sample,
    "plot": inspection.run_plot,
    "export": inspection.run_export,
    "plan": plan.run_plan,
    "gridworld": gridworld.run_gridworld,
    "check": checking.run_check,
    "completion": completion.run_completion,
    "list": listing.run_list,
    "show": showing.run_show,
}
