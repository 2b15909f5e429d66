"""How fast PPO runs on this machine's CPU, beside rejax doing the same work.

    python benchmarks/throughput.py --peer-python PEER/bin/python
    python benchmarks/throughput.py --quick

benchmarks/README.md says how PEER is made, what "the same work" is and how to read the tables. Every program has a
process of its own (workloads.py); they take turns, A B A B, so that what else the machine does falls on all alike.
`--quick` sets jaxpg beside a plain loop that never changes (reference.py), on one small case, and fails where it is
more than a quarter slower, in proportion, than results/quick.json says it has been; with `--out results/quick.json` it
says so anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table
from workloads import ppo_flops_per_step

from jaxpg.record import machine

HERE = Path(__file__).resolve().parent
CORES = len(os.sched_getaffinity(0))

# environment, environments side by side, and the steps of one timed run: one to two seconds of the slowest program.
CASES = [
    ("CartPole-v1", 64, 2**19),
    ("CartPole-v1", 2048, 2**19),
    ("Breakout-MinAtar", 64, 2**17),
    ("Breakout-MinAtar", 1024, 2**17),
]


class Program(NamedTuple):
    """One row: a workload of workloads.py, how many agents it trains at once, and on how many XLA devices."""

    workload: str
    agents: int = 1
    devices: int = 1

    @property
    def label(self) -> str:
        if self.workload not in ("jaxpg", "rejax"):
            return self.workload
        agents, devices = (f"{n} {what}{'s' * (n > 1)}" for n, what in zip(self[1:], ("agent", "device"), strict=True))
        return f"{self.workload}, {agents}, {devices}"


LOOPS = [
    Program("rejax"),
    Program("jaxpg"),
    Program("jaxpg", devices=CORES),
    Program("rejax", agents=CORES),
    Program("jaxpg", agents=CORES, devices=CORES),
]
COLLECTING = [Program("bare"), Program("collect_random"), Program("collect")]


class Worker:
    """A process that serves one program; `ask` returns what one run, or one compilation, took."""

    def __init__(self, python: str, program: Program, env_name: str, num_envs: int, steps: int) -> None:
        numbers = map(str, (num_envs, program.agents, program.devices, steps))
        quiet = ["-W", "ignore::FutureWarning"]  # gymnax 0.0.9 relies on casts that jax has deprecated
        command = [python, *quiet, str(HERE / "workloads.py"), program.workload, env_name, *numbers]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        hello = self._read()
        self.work: int = hello["work"]
        self.versions: dict[str, str] = hello["versions"]

    def ask(self, what: str) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"A worker ended: {self.process.args}")  # its own error stands above
        return json.loads(line)


@contextmanager
def workers(programs: Iterable[Program], peer: str | None, *case: Any) -> Iterator[dict[Program, Worker]]:
    """The programs of one case, built one after another and ended together."""
    with ExitStack() as stack:
        running = {}
        for program in programs:
            python = peer if program.workload == "rejax" else sys.executable
            if python is None:
                continue
            running[program] = Worker(python, program, *case)
            stack.callback(running[program].close)
        yield running


def interleave(running: dict[Program, Worker], what: str, rounds: int) -> dict[Program, list[dict[str, float]]]:
    """Ask every worker in turn, `rounds` times over; the first round warms up and is thrown away."""
    samples: dict[Program, list[dict[str, float]]] = {program: [] for program in running}
    for number in range(rounds + 1):
        for program, worker in running.items():
            cost = worker.ask(what)
            if number:
                samples[program].append(cost)
    return samples


def measure(programs: list[Program], peer: str | None, case: tuple, rounds: int, compiles: int) -> list[dict[str, Any]]:
    """One record per program: seconds per million steps of every round, seconds of every compilation."""
    with workers(programs, peer, *case) as running:
        runs = interleave(running, "run", rounds)
        builds = interleave(running, "compile", compiles) if compiles else {program: [] for program in running}
        return [
            program._asdict()
            | {"label": program.label, "environment": case[0], "num_envs": case[1], "versions": worker.versions}
            | {f"{k}_s_per_million": [r[k] * 1e6 / worker.work for r in runs[program]] for k in ("cpu", "wall")}
            | {f"compile_{k}_s": [b[k] for b in builds[program]] for k in ("cpu", "wall")}
            for program, worker in running.items()
        ]


def ratio(base: dict[str, Any], record: dict[str, Any], key: str) -> float:
    """How many times less `record` took than `base`: the median over rounds of the ratio within a round."""
    return median(b / r for b, r in zip(base[key], record[key], strict=True))


def matmul_rate(env_name: str, num_envs: int, steps: int, rounds: int) -> float:
    """FLOPs per CPU second that the matrix products of the two networks reach by themselves, at the best batch size."""
    rates = []
    for rows in sorted({256, num_envs * 32}):  # a cache-sized chunk, and a whole minibatch
        with workers([Program("matmul")], None, env_name, rows, steps) as running:
            samples = interleave(running, "run", rounds)[Program("matmul")]
            rates.append(running[Program("matmul")].work / median(s["cpu"] for s in samples))
    return max(rates)


def busy_machine() -> dict[str, Any]:
    """What the figures come from, and how busy it is before they are taken."""
    return machine() | {"load_before": os.getloadavg()[0]}


def table(title: str, records: list[dict[str, Any]]) -> Table:
    """Medians, and how many times as long as a row the first program took with as many agents, in CPU and wall time."""
    found = Table(title=title, title_justify="left")
    found.add_column("program", no_wrap=True)
    base = records[0]["workload"]
    for head in (
        "CPU s / M steps",
        f"× {base}",
        "wall s / M steps",
        f"× {base}",
        "compile CPU s",
        "wall s",
        "of matmul",
    ):
        found.add_column(head, justify="right")
    bases = {record["agents"]: record for record in reversed(records) if record["workload"] == base}
    for record in records:
        cells = []
        for key in ("cpu_s_per_million", "wall_s_per_million"):
            cells += [f"{median(record[key]):.2f}", f"{ratio(bases[record['agents']], record, key):.2f}"]
        builds = [record[key] for key in ("compile_cpu_s", "compile_wall_s")]
        cells += [f"{median(b):.1f}" if b else "" for b in builds]
        found.add_row(record["label"], *cells, f"{record['matmul_share']:.0%}" if "matmul_share" in record else "")
    return found


QUICK = ("CartPole-v1", 64, 2**18)
KNOWN = HERE / "results" / "quick.json"
SLOWER = 0.75


def quick(rounds: int, out: Path | None) -> None:
    """How many times faster than the frozen loop jaxpg is; ends with an error where it has been much more."""
    found = measure([Program("reference"), Program("jaxpg")], None, QUICK, rounds, 1)
    times = {
        "loop": ratio(*found, "cpu_s_per_million"),
        "compile": found[0]["compile_cpu_s"][0] / found[1]["compile_cpu_s"][0],
    }
    known = json.loads(KNOWN.read_text())["times"] if KNOWN.exists() else times
    for name, value in times.items():
        print(f"{name}: {value:.2f} times as fast as the frozen loop; it has been {known[name]:.2f}")
    if out:
        out.write_text(json.dumps({"machine": busy_machine(), "times": times}, indent=1) + "\n")
    elif slower := [name for name, value in times.items() if value < SLOWER * known[name]]:
        raise SystemExit(f"More than a quarter slower than it has been: {', '.join(slower)}.")


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="a Python that has rejax and gymnax 0.0.9; without it, jaxpg alone")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of every program (default 7)")
    parser.add_argument("--compiles", type=int, default=3, help="timed compilations of every program (default 3)")
    parser.add_argument("--only", default="", help="only the cases whose 'environment num_envs' contains this")
    parser.add_argument("--quick", action="store_true", help="one small case beside a loop that never changes")
    parser.add_argument("--out", type=Path, help="where to write (default results/throughput.json; --quick: nowhere)")
    args = parser.parse_args()
    if args.quick:
        return quick(args.rounds, args.out)
    args.out = args.out or HERE / "results" / "throughput.json"
    console = Console(width=120)
    result: dict[str, Any] = {"machine": busy_machine(), "arguments": vars(args) | {"out": str(args.out)}, "cases": []}
    for case in track([c for c in CASES if args.only in f"{c[0]} {c[1]}"], console=console, transient=True):
        env_name, num_envs, _ = case
        loops = measure(LOOPS, args.peer_python, case, args.rounds, args.compiles)
        collecting = measure(COLLECTING, None, case, args.rounds, 0)
        rate, flops = matmul_rate(*case, args.rounds), ppo_flops_per_step(env_name)
        for record in loops:
            record["matmul_share"] = flops * 1e6 / median(record["cpu_s_per_million"]) / rate
        measured = {"loops": loops, "collecting": collecting}
        result["cases"].append(measured | {"ppo_flops_per_step": flops, "matmul_flops_per_cpu_s": rate})
        title = f"{env_name}, {num_envs} environments"
        console.print(table(f"{title}: the whole loop", loops))
        console.print(table(f"{title}: collecting alone", collecting))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"Written to {args.out}")


if __name__ == "__main__":
    main()
