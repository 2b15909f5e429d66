"""`jaxpg plan`: the optimal values and policy of a world whose P and R are known, and the sweeps that it took."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from jaxpg import envs, values
from jaxpg.envs.mdp_records import AnyMDP
from jaxpg.envs.mdps import Grid, grid_of
from jaxpg.envs.reachability import check_mdp
from jaxpg.errors import UserError, refuse_unknown
from jaxpg.experiments.config import Config, resolve_config
from jaxpg.experiments.config_file import parse_overrides
from jaxpg.runs.terminal import make_console
from jaxpg.user_input.printable import printable
from jaxpg.values.planning import MAX_SWEEPS

METHODS: dict[str, Callable[..., values.Plan]] = {
    "value iteration": values.value_iteration,
    "value iteration, Gauss-Seidel": partial(values.value_iteration, order=values.gauss_seidel),
    "policy iteration": values.policy_iteration,
    "modified policy iteration, 5 sweeps": partial(values.policy_iteration, max_sweeps=5),
}
OF_THE_WORLD = ("environment", "environment_settings")
"""The settings of a task that say which world it is."""
PICTURE = Path("plan.png")


def run_plan(arguments: argparse.Namespace) -> int:
    """Solve the world of a task by every method, and show it."""
    overrides = parse_overrides(arguments.set)
    for key in overrides:
        if key.partition(".")[0] not in OF_THE_WORLD:  # an algorithm's would change nothing
            refuse_unknown("setting", key, OF_THE_WORLD, " of a plan")
    config = resolve_config(arguments.task, "ppo", overrides)
    if config.environment not in envs.MDPS:
        raise UserError(
            f"{config.task} cannot be planned: P and R of {config.environment} are not known. They are of "
            f"{', '.join(envs.MDPS)}."
        )
    time_limit = envs.make(config.environment, **config.environment_settings).time_limit  # which checks the settings
    grid = grid_of(config.environment, config.environment_settings)
    if arguments.out is not None:
        _check_picture(arguments.out, grid, config.environment)
    with jax.enable_x64(True):
        settings = {name: x for name, x in config.environment_settings.items() if name != "time_limit"}
        mdp = envs.MDPS[config.environment](**settings)
        check_mdp(mdp, arguments.gamma)
        console = make_console()
        plan = _show_methods(config, mdp, arguments, console)
        if grid is not None:
            _show_map(config, mdp, grid, plan, arguments, console)
        _show_returns(mdp, plan, time_limit, console)
    return 0


def _check_picture(out: Path, grid: Grid | None, environment: str) -> None:
    """Refuse a picture of a world that has none, or in a format that there is not."""
    from jaxpg.report.drawing import check_format

    if grid is None:
        raise UserError(f"{environment} does not lie on a grid, so there is no picture of it: leave out --out.")
    check_format(out)


def _show_methods(config: Config, mdp: AnyMDP, arguments: argparse.Namespace, console: Console) -> values.Plan:
    """A line for each method; the plan of the first."""
    table = Table("method", "sweeps", "improvements", "value of the start", box=box.SIMPLE_HEAD)
    table.title = f"{printable(config.task)}, discount {arguments.gamma:g}, tolerance {arguments.tolerance:g}"
    plans = [method(mdp, arguments.gamma, tolerance=arguments.tolerance) for method in METHODS.values()]
    for name, plan in zip(METHODS, plans, strict=True):
        improvements = "" if name.startswith("value") else str(plan.improvements)
        table.add_row(name, f"{int(plan.sweeps):,}", improvements, f"{float(mdp.start @ plan.values):.6f}")
    console.print(table)
    for name, plan in zip(METHODS, plans, strict=True):
        if plan.unfinished and not name.startswith("modified"):  # which ends its evaluations early
            console.print(_unfinished(name, int(plan.unfinished)))
    return plans[0]


def _unfinished(name: str, times: int) -> str:
    """A sentence on sweeps that ended at their limit."""
    what = "the sweeps" if name.startswith("value") else "an evaluation" if times == 1 else f"{times} evaluations"
    return (
        f"{name}: {what} ended at the limit of {MAX_SWEEPS:,} sweeps, before the values were within the tolerance. "
        "Compare the value of the start with that of the other methods, or take a larger --tolerance."
    )


def _show_map(
    config: Config, mdp: AnyMDP, grid: Grid, plan: values.Plan, arguments: argparse.Namespace, console: Console
) -> None:
    """The values and the policy as a table, and as a picture of how they came about."""
    from jaxpg import report

    final = report.ValueMap(np.asarray(plan.values), np.asarray(plan.policy))
    title = "optimal values and a policy that earns them"
    console.print(report.value_table(final, grid, title=title, width=console.width))
    out = arguments.out or PICTURE
    title = f"{config.task}, discount {arguments.gamma:g}"
    report.value_figure(_stages(mdp, plan, arguments.gamma, arguments.tolerance), grid, out, title=title)
    console.print(f"Picture: {printable(out)}", soft_wrap=True)


def _stages(mdp: AnyMDP, plan: values.Plan, gamma: float, tolerance: float) -> Mapping[str, Any]:
    """Three sweeps of value iteration on the way and the last, then the policies of policy iteration, four at most."""
    from jaxpg import report

    maps = _chosen_sweeps(mdp, int(plan.improvements), gamma, tolerance)
    improved = values.policy_iteration_steps(mdp, gamma, tolerance=tolerance, every_sweep=False)
    improvements = [step for step in improved if step.kind == "improvement"]
    for number in dict.fromkeys((1, 2, 3, len(improvements))):
        if number <= len(improvements):
            step = improvements[number - 1]
            maps[f"policy iteration,\nimprovement {number}, {step.sweeps} sweeps"] = step
    return {name: report.ValueMap(np.asarray(s.values), np.asarray(s.policy)) for name, s in maps.items()}


def _chosen_sweeps(mdp: AnyMDP, sweeps: int, gamma: float, tolerance: float) -> dict[str, values.Step]:
    """Of `sweeps` sweeps of value iteration three on the way and the last, by title; no others are kept."""
    chosen = 1, max(2, (sweeps + 1) // 16), max(3, (sweeps + 1) // 4)
    steps, maps = values.value_iteration_steps(mdp, gamma, tolerance=tolerance), {}
    step = next(steps)
    for step in steps:
        if step.sweeps in chosen:
            maps[f"value iteration,\nsweep {step.sweeps}"] = step
    return maps | {f"value iteration,\nsweep {step.sweeps}": step}


def _show_returns(mdp: AnyMDP, plan: values.Plan, time_limit: int, console: Console) -> None:
    """What the policy earns within the time limit, and the best return of a policy that knows the steps left."""
    followed = float(envs.expected_return(mdp, plan.policy, 1.0, horizon=time_limit))
    best = float(mdp.start @ values.finite_horizon(mdp, 1.0, time_limit).values[-1])
    console.print(
        f"Its return within the {time_limit} steps of an episode, without discount: {followed:.4f}. The best policy "
        f"that knows how many steps are left: {best:.4f}."
    )
