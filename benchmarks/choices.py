"""What each choice of `jaxpg.parallel.machine` is worth on the accelerator at hand: every program again without it.

    python benchmarks/choices.py [--out choices.json] [--rounds 3] [--cpu]

Each row is a program by a `Machine` with some fields replaced, in a process of its own; the programs of a table take
turns, once all are made. `--cpu` rehearses in small: its speeds mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import workloads
from device import calls_for, device
from rich.console import Console
from rich.table import Table
from turns import Worker, WorkerEnded
from work import PPO

from jaxpg.files import replace_file
from jaxpg.parallel import machine


class Choice(NamedTuple):
    """A machine with these fields of its record replaced."""

    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.fields) or "as it is"


class Program(NamedTuple):
    """A workload of workloads.py, its environment or size, its environments or columns, and the steps of a call."""

    workload: str
    environment: str
    num_envs: int
    steps: int


def ppo(environment: str, num_envs: int, updates: int = 16) -> Program:
    """PPO, so many updates a call."""
    return Program("jaxpg", environment, num_envs, updates * num_envs * PPO.num_steps)


def without(*names_and_values: tuple[str, Any]) -> Choice:
    """These fields replaced."""
    return Choice(names_and_values)


AS_IT_IS = Choice()
OF_CONTROL = (
    AS_IT_IS,
    without(("torsos_at_once", 0)),
    without(("few_categories", 0)),
    without(("sums_at_once", False)),
    without(("few_final_obs", 4)),
    without(("round_equations", 0)),
    without(("prepares_minibatches", False)),
    without(("packs_outputs", False)),
    without(("recursion_unroll", 1)),
    without(("resets_where_any", True)),
    without(("gathers_words", True)),
)
OF_TEXT = (
    AS_IT_IS,
    without(("few_slots", 0)),
    without(("steps_per_question", 48)),
)
TABLES: tuple[tuple[Program, tuple[Choice, ...]], ...] = (
    (Program("jaxpg_language", "1M", 64, 64 * 48), OF_TEXT),
    (ppo("CartPole-v1", 64), OF_CONTROL),
    (ppo("CartPole-v1", 2048), OF_CONTROL[:6]),
    (ppo("Breakout-MinAtar", 1024, 8), OF_CONTROL[:2]),
)
REHEARSAL = (
    (ppo("CartPole-v1", 4, 1), (AS_IT_IS, without(("gathers_words", False)), without(("resets_where_any", False)))),
)


class Variant(Worker):
    """A process that serves a program by another machine."""

    def __init__(self, program: Program, choice: Choice) -> None:
        workload, environment, num_envs, steps = map(str, program)
        serving = [sys.executable, __file__, "serve", json.dumps(dict(choice.fields))]
        self.start([*serving, workload, environment, num_envs, "1", "1", steps], os.environ)


def serve(fields: dict[str, Any]) -> None:
    """Answer as workloads.py does with the other arguments, by a machine with these fields."""
    for platform, choices in machine.MACHINES.items():  # which of them it is may not be asked before main() has begun
        machine.MACHINES[platform] = choices._replace(**fields)
    del sys.argv[1:3]
    workloads.main()


def made(program: Program, choice: Choice) -> Variant | str:
    """The process that serves it, or why there is none."""
    try:
        return Variant(program, choice)
    except WorkerEnded as error:
        return str(error)[-200:]


def result_of(future: Future[Variant | str]) -> Variant | str:
    """A process that is ready by now."""
    return future.result() if future.done() else "not made in time"


def time_in_turns(variants: dict[Choice, Variant], rounds: int, turn_s: float) -> dict[Choice, list[float]]:
    """Seconds of a call of each, in `rounds` turns of about `turn_s` seconds, after two calls that warm up."""
    calls = {}
    for choice, variant in variants.items():
        variant.ask("run")
        calls[choice] = calls_for(variant.ask("run")["wall"], turn_s)
    seconds: dict[Choice, list[float]] = {choice: [] for choice in variants}
    for _ in range(rounds):
        for choice, variant in variants.items():
            seconds[choice].append(variant.ask(f"run {calls[choice]}")["wall"] / calls[choice])
    return seconds


def table_of(program: Program, records: Sequence[dict[str, Any]]) -> Table:
    """The speed of each, and beside that of the first."""
    table = Table("choice", "per second", "× as it is", "made in s", title=" ".join(map(str, program[:3])))
    for record in records:
        if "failed" in record:
            table.add_row(record["choice"], record["failed"])
            continue
        beside = records[0]["call_s"] / record["call_s"] if "call_s" in records[0] else float("nan")
        table.add_row(record["choice"], f"{record['per_second']:,.0f}", f"{beside:.2f}", f"{record['made_s']:.1f}")
    return table


def main() -> None:
    """Make all programs at once, on all cores, and time one table after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("choices.json"), help="where results go")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every program (default 3)")
    parser.add_argument("--seconds", type=float, default=300, help="to make all programs in (default 300)")
    parser.add_argument("--cpu", action="store_true", help="rehearse in small, without an accelerator")
    arguments = parser.parse_args()
    tables, turn_s = (REHEARSAL, 0.05) if arguments.cpu else (TABLES, 0.3)
    console = Console(width=110)
    found: dict[str, Any] = {"machine": device(), "tables": []}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        started = [
            (program, {choice: pool.submit(made, program, choice) for choice in choices}) for program, choices in tables
        ]
        wait([future for _, futures in started for future in futures.values()], timeout=arguments.seconds)
        for program, futures in started:
            results = {choice: result_of(future) for choice, future in futures.items()}
            variants = {choice: result for choice, result in results.items() if isinstance(result, Variant)}
            seconds = time_in_turns(variants, arguments.rounds, turn_s)
            records: list[dict[str, Any]] = []
            for choice, result in results.items():
                if isinstance(result, str):
                    records.append({"choice": choice.label, "failed": result})
                    continue
                call_s = median(seconds[choice])
                speed = {"per_second": result.work / call_s, "call_s": call_s, "turns_s": seconds[choice]}
                records.append({"choice": choice.label, **speed, "made_s": result.made["wall"], "bytes": result.bytes})
                result.process.kill()
                result.process.wait()
            found["tables"].append({"program": program._asdict(), "choices": records})
            replace_file(arguments.out, json.dumps(found, indent=1) + "\n")
            console.print(table_of(program, records))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(json.loads(sys.argv[2]))
    else:
        main()
