"""How well every algorithm learns: the table of tasks and algorithms, made from the configs with one command.

    python benchmarks/learning.py [--tasks ...] [--algorithms ...] [--seeds N] [--controls] [--fresh]

A cell is one algorithm on one task, trained with several seeds; the score of a seed is the mean return of a hundred
whole episodes on fresh environments, played by the policy as it stands at the end of the budget. Cells are written to
results/learning.json one by one; those whose settings have not changed since are not trained again, and one that was
interrupted goes on where it stood. Last come the negative controls: runs with one deliberate mistake in the algorithm's
record, which must fall behind the same run without it, else this table would not notice such a mistake; `--controls`
trains them alone.
results/learning.md is the table, and results/cartpole_ladder.png shows how the algorithms came to their scores on
CartPole; both lie beside the file of `--results`, where that is another one.
"""

from __future__ import annotations

import os

os.environ["JAX_NUM_CPU_DEVICES"] = str(os.cpu_count())  # a share of the seeds for each core

import argparse
import hashlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from mistakes import early_episode_ends, groups_shuffled, time_outs_as_terminations, without_clip
from numpy.typing import ArrayLike
from result_files import read, write
from rich.console import Console
from rich.table import Table
from scipy import stats

from jaxpg import files, ladder, parallel, report
from jaxpg.algorithm import PolicyGradient
from jaxpg.experiments import config as configs
from jaxpg.experiments.build import build, networks
from jaxpg.policy_gradient import policy_gradient
from jaxpg.report.comparison import format_number, format_quantity, to_jsonable
from jaxpg.rollout.evaluation import evaluation_metrics
from jaxpg.training import provenance, run_directory
from jaxpg.training.loop import TrainingHooks, train
from jaxpg.types import Env, Learner

RESULTS = Path(__file__).parent / "results"
RUNS = Path(__file__).parent.parent / "runs" / "learning"
EPISODES = 100

Row = tuple[str, ...]
Change = Callable[[PolicyGradient], PolicyGradient]


class Cell(NamedTuple):
    """One algorithm on one task.

    seeds: how many.
    target: the mean over seeds that is to be reached, or None where it is only reported.
    solved: (n, score), where at least n seeds are to reach that score too.
    published: published scores with their source; budgets may differ.
    variant: name of what differs from the config, "" for the config as it is.
    overrides: settings that win over the config's.
    change: what is put in place of a field of the algorithm's record, None for the record as it is.
    """

    task: str
    algorithm: str
    seeds: int
    target: float | None = None
    solved: tuple[int, float] | None = None
    published: str = ""
    variant: str = ""
    overrides: Mapping[str, Any] = {}
    change: Change | None = None

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.task, self.algorithm, self.variant)))


CLEANRL = "CleanRL's PPO, 500 k, 3 seeds"
ZOO = "RL Zoo"
"""benchmark.md of rl-baselines3-zoo: one run each, greedy, with tuned settings and a budget of its own."""
ACROBOT = f"-86 ± 1 ({CLEANRL}), -82 ± 6 (openai/baselines' PPO, in CleanRL's documentation)"


def ladder_on_cartpole() -> list[Cell]:
    """Every rung, with the target that can be expected of it."""
    targets = {
        "reinforce": None,
        "reinforce_to_go": 430.0,
        "reinforce_baseline": 430.0,
        "actor_critic_mc": 440.0,
        "actor_critic_td": 400.0,
        "a2c": 470.0,
        "trpo": 470.0,
        "ppo": 485.0,
        "grpo": 450.0,
        "rloo": 450.0,
        "dr_grpo": 450.0,
        "dapo": 450.0,
    }
    published = {
        "ppo": f"490 ± 6 ({CLEANRL}), 498 ± 4 (openai/baselines' PPO, in CleanRL's documentation)",
        "a2c": f"500 ({ZOO}'s A2C, 500 k)",
        "trpo": f"500 ({ZOO}'s TRPO, 100 k)",
    }
    return [
        Cell("cartpole", name, 20, target, (18, 475.0) if name == "ppo" else None, published.get(name, ""))
        for name, target in targets.items()
    ]


def action_values() -> list[Cell]:
    """Q-learning with networks: CartPole after 300,000 steps, and Breakout."""
    early = {"total_steps": 500_000}  # a quarter of the config's: ten points come early
    return [
        Cell("cartpole", "dqn", 10, 450.0),
        Cell("cartpole", "double_dqn", 10, 450.0),
        Cell("cartpole", "rainbow", 10, 450.0),
        Cell("cartpole", "pqn", 10, 475.0),
        Cell("breakout", "dqn", 5, 10.0, variant="500 k steps", overrides=early),
        Cell("breakout", "pqn", 5, 30.0),
    ]


CELLS = [
    *ladder_on_cartpole(),
    *action_values(),
    Cell("acrobot", "ppo", 10, -88.0, published=ACROBOT),
    Cell("acrobot", "a2c", 10, -95.0, published=f"-83 ({ZOO}'s A2C, 500 k)"),
    Cell("acrobot", "trpo", 10, -95.0, published=f"-83 ({ZOO}'s TRPO, 100 k)"),
    Cell("pendulum", "ppo", 10, -200.0, published=f"-172 ({ZOO}'s PPO, 100 k)"),
    Cell("pendulum", "trpo", 10, -250.0, published=f"-175 ({ZOO}'s TRPO, 100 k)"),
    Cell("mountain_car", "ppo", 10, -120.0, published=f"-110 ({ZOO}'s PPO, 1 M)"),
    Cell("mountain_car_continuous", "ppo", 10, 90.0),
    Cell("frozen_lake", "ppo", 10, 0.70, published="0.740 (optimal for a discount of 0.99), 0.744 (optimum)"),
    Cell("memory_chain", "ppo", 10, 0.95),
    Cell("memory_chain", "ppo", 10, published="0 (chance)", variant="mlp", overrides={"network": {"kind": "mlp"}}),
    Cell("catch", "ppo", 10, 0.95),
    Cell("breakout", "ppo", 5, 40.0, published="43 (gymnax-baselines), 50 (others' plots)"),
    Cell("asterix", "ppo", 5, 15.0, published="18 (gymnax-baselines), 25 (others' plots)"),
    Cell("freeway", "ppo", 5, 57.0, published="58 (gymnax-baselines), 63 (others' plots)"),
    Cell("space_invaders", "ppo", 5, 130.0, published="130 (gymnax-baselines), 165 (others' plots)"),
]


def controls() -> list[tuple[Cell, Cell]]:
    """Pairs of a run and the same run with one mistake, of a smaller budget where an iteration is expensive."""
    table = {cell.name: cell for cell in CELLS}
    shuffled = partial(groups_shuffled, group_size=configs.resolve_config("cartpole", "grpo").settings["group_size"])
    many_epochs = Cell("cartpole", "ppo", 10, variant="20 epochs", overrides={"epochs": 20, "total_steps": 100_000})
    short_grpo = Cell("cartpole", "grpo", 10, variant="50 k steps", overrides={"total_steps": 50_000})
    pairs: list[tuple[Cell, str, Change]] = [
        (many_epochs, "20 epochs without the clip", without_clip),
        (table["catch ppo"], "episode ends one step early", early_episode_ends),
        (table["pendulum ppo"], "time-outs as terminations", time_outs_as_terminations),
        (short_grpo, "groups shuffled", shuffled),
    ]
    return [(right, right._replace(seeds=10, variant=mistake, change=change)) for right, mistake, change in pairs]


def resolve(cell: Cell) -> configs.Config:
    """The config of a cell: trained as the task says, evaluated once, at the end."""
    own = {"seeds": list(range(cell.seeds)), "evaluations": 1, "evaluation_episodes": EPISODES}
    return configs.resolve_config(cell.task, cell.algorithm, {**cell.overrides, **own})


def learner_of(cell: Cell, config: configs.Config) -> tuple[Learner, Env]:
    """The learner of a cell, its mistake included, and its environment."""
    setup = build(config)
    if cell.change is None:
        return setup.learner, setup.env
    policy, critic = networks(config, setup.env)
    algorithm = cell.change(ladder.ALGORITHMS[config.algorithm](**config.settings))
    return policy_gradient(setup.env, policy, critic, algorithm, **config.learner), setup.env


def fingerprint(cell: Cell, config: configs.Config) -> str:
    """What the result of a cell depends on, but for the code, the machine and chance."""
    text = json.dumps([cell.name, configs.to_dict(config)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_folder(cell: Cell) -> Path:
    """Where a cell is trained: another one for other settings."""
    return RUNS / f"{cell.name.replace(' ', '-')}-{fingerprint(cell, resolve(cell))}"


def measure(cell: Cell, console: Console, *, fresh: bool) -> dict[str, Any]:
    """Train a cell, from where an interrupted run of it stands unless `fresh`, and put down what came of it."""
    config = resolve(cell)
    learner, env = learner_of(cell, config)
    run_dir = run_folder(cell)
    if fresh:
        shutil.rmtree(run_dir, ignore_errors=True)
    devices = jax.devices()[: np.gcd(cell.seeds, len(jax.devices()))]
    began = time.monotonic()
    with console.status(f"{cell.name}, {cell.seeds} seeds") as status:
        train(
            learner,
            seeds=config.seeds,
            total_steps=config.total_steps,
            run_dir=run_dir,
            mesh=parallel.make_mesh(cell.seeds, 1, devices),
            log_every=max(1, config.total_steps // 100),
            evaluate=lambda state, key: evaluation_metrics(
                env, learner.actor(state), key, episodes=EPISODES, greedy=config.evaluation_greedy
            ),
            evaluate_every=config.total_steps,
            checkpoint_seconds=600.0,
            config=configs.to_dict(config),
            resume=True,
            hooks=TrainingHooks(
                on_row=lambda row: status.update(f"{cell.name}: {int(row['steps'].min()):,} of {config.total_steps:,}")
            ),
        )
    final = run_directory.load_metrics(run_dir)["evaluation_return"][-1]
    return {
        "fingerprint": fingerprint(cell, config),
        "final": final,
        "mean": report.bootstrap(final, statistic=report.mean),
        "iqm": report.bootstrap(final),
        "total_steps": config.total_steps,
        "actions": "greedy" if config.evaluation_greedy else "sampled",
        "seconds": time.monotonic() - began,
        "command": shlex.join(["python", "benchmarks/learning.py", *sys.argv[1:]]),
        "settings": files.flatten(configs.to_dict(config)),
        "machine": provenance.describe_machine(),
    }


COLUMNS = ("task", "algorithm", "steps", "seeds", "mean [95%]", "IQM [95%]", "target", "reached", "published")


def rows(results: Mapping[str, Any]) -> list[Row]:
    """The table's lines, a line per cell that has a result."""

    def line(cell: Cell, result: Mapping[str, Any]) -> Row:
        target = "" if cell.target is None else f"{cell.target:g}"
        if cell.solved:
            target += f", {cell.solved[0]} seeds ≥ {cell.solved[1]:g}"
        reached = "" if cell.target is None else ("yes" if is_reached(cell, result) else "no")
        algorithm = f"{cell.algorithm} ({cell.variant})" if cell.variant else cell.algorithm
        steps, seeds = format_quantity(result["total_steps"]), str(len(result["final"]))
        mean, iqm = format_estimate(result["mean"]), format_estimate(result["iqm"])
        return cell.task, algorithm, steps, seeds, mean, iqm, target, reached, cell.published

    return [line(cell, results[cell.name]) for cell in CELLS if cell.name in results]


def is_reached(cell: Cell, result: Mapping[str, Any]) -> bool:
    """Whether the mean over seeds, and as many seeds as the cell asks for, are where they are to be."""
    if result["mean"]["value"] < cell.target:
        return False
    number_of_seeds, score = cell.solved or (0, 0.0)
    return sum(seed >= score for seed in result["final"]) >= number_of_seeds


def format_estimate(estimate: Mapping[str, Any]) -> str:
    """A value with its interval, which `report.bootstrap` does not give of fewer than five seeds."""
    value, low, high = (estimate[name] for name in ("value", "low", "high"))
    if low is None or high is None:
        return format_number(value)
    return f"{format_number(value)} [{format_number(low)}, {format_number(high)}]"


CONTROL_COLUMNS = ("task", "algorithm", "mistake", "without it, mean [95%]", "with it, mean [95%]", "noticed", "p")


def control_rows(results: Mapping[str, Any]) -> list[Row]:
    """A line per pair; a mistake is noticed if a permutation test of the means says so at 1 %, one-sided."""
    lines: list[Row] = []
    for right, wrong in controls():
        if right.name not in results or wrong.name not in results:
            continue
        a, b = results[right.name]["mean"], results[wrong.name]["mean"]
        p = lower_mean(results[wrong.name]["final"], results[right.name]["final"])
        noticed = "yes" if p < 0.01 else "no"
        means = format_estimate(a), format_estimate(b)
        lines.append((right.task, right.algorithm, wrong.variant, *means, noticed, f"{p:.2g}"))
    return lines


def lower_mean(scores: ArrayLike, others: ArrayLike) -> float:
    """The p-value of a mean so far below that of the others, were both of one population: a permutation test."""
    test = stats.permutation_test(
        (np.ravel(scores), np.ravel(others)),
        lambda x, y, axis: x.mean(axis) - y.mean(axis),
        alternative="less",
        n_resamples=99_999,
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def markdown(columns: Row, lines: list[Row]) -> str:
    """Lines as a table of Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, ("---",) * len(columns), *lines))


def publish(results: Mapping[str, Any], path: Path, console: Console) -> None:
    """Print the tables of the results in a file, and write them beside it."""
    tables: list[tuple[Row, list[Row]]] = [(COLUMNS, rows(results)), (CONTROL_COLUMNS, control_rows(results))]
    for columns, lines in tables:
        table = Table(*columns)
        for line in lines:
            table.add_row(*(text.replace("[", r"\[") for text in line))
        console.print(table)
    learned, noticed = (markdown(*table) for table in tables)
    text = (
        f"Made by `python benchmarks/learning.py` from `configs/`: mean return of {EPISODES} whole episodes per seed "
        "at the end of the budget, sampled actions unless the task's config says greedy, with 95% bootstrap intervals "
        "over seeds. Published scores have budgets of their own; those of RL Zoo (benchmark.md of rl-baselines3-zoo) "
        f"are greedy and of one run each.\n\n{learned}\n"
        f"Negative controls, the same run with one deliberate mistake:\n\n{noticed}"
    )
    path.with_suffix(".md").write_text(text)


def draw_ladder(folder: Path) -> None:
    """The learning curves of all rungs on CartPole, if their runs are at hand, as a picture in a folder."""
    runs = {cell.algorithm: run_folder(cell) for cell in ladder_on_cartpole()}
    if not all((run / run_directory.METRICS).exists() for run in runs.values()):
        return
    metrics = {name: run_directory.load_metrics(run) for name, run in runs.items()}
    curves = {name: (m["steps"], m["return"]) for name, m in metrics.items()}
    report.learning_curve(curves, folder / "cartpole_ladder.png", title="CartPole-v1, the ladder", threshold=475.0)


def chosen(arguments: argparse.Namespace) -> list[Cell]:
    """The cells that the arguments ask for; without any the program ends with a sentence."""
    cells = [] if arguments.controls else list(CELLS)
    cells += [cell for pair in controls() for cell in pair if cell not in cells]
    cells = [cell for cell in cells if not arguments.tasks or cell.task in arguments.tasks]
    cells = [cell for cell in cells if not arguments.algorithms or cell.algorithm in arguments.algorithms]
    if not cells:
        tasks = ", ".join(dict.fromkeys(cell.task for cell in CELLS))
        raise SystemExit(f"No cell of the table fits. The tasks are {tasks}; see CELLS for their algorithms.")
    return [cell._replace(seeds=arguments.seeds or cell.seeds) for cell in cells]


def main() -> None:
    """Train the cells that are missing, one by one, and make the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tasks", nargs="+", help="only these tasks")
    parser.add_argument("--algorithms", nargs="+", help="only these algorithms")
    parser.add_argument("--seeds", type=int, help="seeds per cell, instead of the table's")
    parser.add_argument("--controls", action="store_true", help="the negative controls alone")
    parser.add_argument("--fresh", action="store_true", help="train also what has a result")
    parser.add_argument("--results", type=Path, default=RESULTS / "learning.json", help="where results are kept")
    arguments = parser.parse_args()
    cells = chosen(arguments)
    console, results = Console(highlight=False), read(arguments.results)
    for cell in cells:
        known = results.get(cell.name, {}).get("fingerprint")
        if known == fingerprint(cell, resolve(cell)) and not arguments.fresh:
            continue
        measured = to_jsonable(measure(cell, console, fresh=arguments.fresh))
        results = {**read(arguments.results), cell.name: measured}  # read again: other cells may have been finished
        write(arguments.results, results)
        console.print(
            f"{cell.name}: {format_estimate(results[cell.name]['mean'])}, {results[cell.name]['seconds']:.0f} s"
        )
    publish(results, arguments.results, console)
    draw_ladder(arguments.results.parent)


if __name__ == "__main__":
    main()
