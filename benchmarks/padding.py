"""GRPO on CartPole from a new policy to 50,000 steps, beside a checkout of before padding was skipped.

    git worktree add ../before dd71b62
    taskset -c 1 python benchmarks/padding.py ../before [--rounds 9]

Writes results/padding.json. Each case has a process per checkout (padding_worker.py); they take turns, A B A B, and a
ratio is taken within a round. A run is that of five seeds one after the other, in CPU seconds of the whole loop, of one
seed; compiling is not timed. Episodes have some 20 of 500 steps at the beginning: the first iterations are those in
which padding costs most.
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

from result_files import put
from turns import Worker, interleave

from jaxpg.training.provenance import describe_machine

HERE = Path(__file__).resolve().parent
CASES: dict[str, dict[str, Any]] = {
    "ladder.grpo()": {},
    "256 episodes": {"num_envs": 256, "learning_rate": 1e-3, "kl": None},
    "configs/cartpole.toml": {"num_envs": 32, "learning_rate": 1e-3, "kl": None},
}
"""Settings of `ladder.grpo`."""


class CheckoutWorker(Worker):
    """A process of padding_worker.py on the package of a checkout."""

    def __init__(self, checkout: Path, settings: dict[str, Any]) -> None:
        command = [sys.executable, str(HERE / "padding_worker.py"), json.dumps(settings)]
        self.start(command, os.environ | {"PYTHONPATH": str(checkout)})


def compare(before: Path, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """What a seed costs in both checkouts, and how many times as fast this one is: the median, and all."""
    with ExitStack() as stack:
        running = {name: CheckoutWorker(x, settings) for name, x in (("before", before), ("after", HERE.parent))}
        for worker in running.values():
            stack.callback(worker.close)
        found = interleave(running, "run", rounds)
    ratios = [a["cpu"] / b["cpu"] for a, b in zip(found["before"], found["after"], strict=True)]
    return {"ratio": median(ratios), "ratios": ratios, **found}


def main() -> None:
    """Measure, print and write, case by case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if not (arguments.before / "jaxpg" / "ladder.py").exists():
        parser.error(f"{arguments.before} is no checkout of jaxpg")
    about = {"machine": describe_machine(), "rounds": arguments.rounds}
    for name, settings in CASES.items():
        case = compare(arguments.before.resolve(), settings, arguments.rounds)
        put(HERE / "results" / "padding.json", "cases", name, case, about)
        seconds = [median(row["cpu"] for row in case[which]) for which in ("before", "after")]
        took = f"{seconds[0]:.3f} and {seconds[1]:.3f} s a seed for {case['after'][0]['steps']:.0f} steps"
        print(f"{name}: {case['ratio']:.2f} times as fast ({took})", flush=True)


if __name__ == "__main__":
    main()
