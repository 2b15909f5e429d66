"""This checkout beside another one, doing the same work in turns: what a change costs.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before [--only CartPole] [--rounds 7] [--compiles 5]

Every program has a process of its own (workloads.py of its checkout, on the package beside it); they take turns, A B A
B, and a ratio is taken within a round, so that what else the machine does falls on both. Above 1 this checkout takes
more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from command_lines import chosen, out_file, pattern
from rich.console import Console
from rich.table import Table
from turns import Row, Worker, interleave

HERE = Path(__file__).resolve().parent.parent
CASES = (
    ("CartPole-v1", 4, 2**18, Row("jaxpg")),
    ("CartPole-v1", 64, 2**19, Row("jaxpg")),
    ("CartPole-v1", 2048, 2**19, Row("jaxpg")),
    ("Breakout-MinAtar", 64, 2**17, Row("jaxpg")),
    ("Breakout-MinAtar", 1024, 2**17, Row("jaxpg")),
    ("Breakout-MinAtar", 64, 2**16, Row("jaxpg_cnn")),
    ("CartPole-v1", 64, 2**17, Row("jaxpg_recurrent")),
    ("CartPole-v1", 64, 2**19, Row("jaxpg_a2c")),
    ("CartPole-v1", 256, 2**17, Row("jaxpg_grpo")),
    ("0.1M", 64, 2**15, Row("jaxpg_language")),
    ("0.1M", 64, 2**15, Row("jaxpg_language_reference")),
    ("0.1M", 64, 2**15, Row("jaxpg_language_rlhf")),
    ("1M", 64, 2**13, Row("jaxpg_language_reference")),
    ("1M", 64, 2**13, Row("jaxpg_language_rlhf")),
)


class CheckoutWorker(Worker):
    """A worker that runs the workloads of a checkout on the package that lies in it."""

    def __init__(self, checkout: Path, row: Row, *case: Any) -> None:
        env_name, num_envs, steps = case
        script = str(checkout / "benchmarks" / "workloads.py")
        numbers = map(str, (num_envs, row.agents, row.devices, steps))
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        self.start([sys.executable, script, row.workload, env_name, *numbers], environment)


def measure(before: Path, case: tuple[Any, ...], rounds: int, compiles: int) -> dict[str, Any]:
    """Medians of the ratios after / before within a round, of CPU and wall seconds, running and compiling."""
    *numbers, row = case
    with ExitStack() as stack:
        running = {name: CheckoutWorker(path, row, *numbers) for name, path in (("before", before), ("after", HERE))}
        for worker in running.values():
            stack.callback(worker.close)
        runs, builds = interleave(running, "run", rounds), interleave(running, "compile", compiles)
    ratios = {
        f"{what}_{clock}": median(b[clock] / a[clock] for a, b in zip(x["before"], x["after"], strict=True))
        for what, x in (("run", runs), ("compile", builds))
        for clock in ("cpu", "wall")
    }
    return {
        "workload": row.workload,
        "environment": numbers[0],
        "num_envs": numbers[1],
        "ratios": ratios,
        "runs": runs,
        "compiles": builds,
    }


def main() -> None:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("--only", type=pattern, default="", help="only the cases whose title this pattern fits")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compiles", type=int, default=5)
    parser.add_argument("--out", type=out_file, help="write the seconds of every round as JSON")
    arguments = parser.parse_args()
    cases = chosen({f"{case[3].workload} {case[0]} {case[1]}": case for case in CASES}, arguments.only)
    names = ("run_cpu", "run_wall", "compile_cpu", "compile_wall")
    table = Table("case", *(name.replace("_", ", ") for name in names), title="after / before, medians within rounds")
    results = []
    for title, case in cases.items():
        result = measure(arguments.before.resolve(), case, arguments.rounds, arguments.compiles)
        results.append(result)
        table.add_row(title, *(f"{result['ratios'][name]:.3f}" for name in names))
        print(title, {name: round(x, 3) for name, x in result["ratios"].items()}, flush=True)
    Console().print(table)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
