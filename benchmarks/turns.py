"""Processes that take turns, A B A B, so that what else the machine does falls on all alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from workloads import PEERS

HERE = Path(__file__).resolve().parent
OTHERS = {workload.__name__ for workload in PEERS}
AS_AGENTS = (
    *("jaxpg", "rejax", "purejaxrl", "jaxpg_recurrent", "purejaxrl_recurrent"),
    *("jaxpg_a2c", "jaxpg_grpo", "jaxpg_dqn", "rejax_dqn"),
)
OF_PUREJAXRL = ("purejaxrl", "purejaxrl_recurrent")
SLOWER_LOOPS = {"sb3": 8, "sbx": 8, "sb3_a2c": 16, "sb3_dqn": 16}
"""Peers with a loop on the host, and what part of a case's steps they are given."""


class Row(NamedTuple):
    """One row: a workload of workloads.py, how many agents it trains at once, and on how many XLA devices.

    XLA splits single operations over as many threads as there are cores, or over `threads`.
    choice: a field of `jaxpg.parallel.machine.Machine` that has another value, "few_slots=0" (in JSON).
    """

    workload: str
    agents: int = 1
    devices: int = 1
    threads: int | None = None
    choice: str | None = None

    @property
    def label(self) -> str:
        chosen = [self.choice] if self.choice else []
        if self.workload not in AS_AGENTS:
            return ", ".join([self.workload, *chosen])
        kinds = ((self.agents, "agent"), (self.devices, "device"), (self.threads, "thread"))
        return ", ".join([self.workload, *(f"{n} {what}{'s' * (n > 1)}" for n, what in kinds if n), *chosen])


class Peers(NamedTuple):
    """Where the peers are: a Python that has them, and PureJaxRL's folder."""

    python: str | None = None
    purejaxrl: Path | None = None

    def python_for(self, program: Row) -> str | None:
        """The Python that runs a program; None if its place was not given."""
        if program.workload in OF_PUREJAXRL and self.purejaxrl is None:
            return None
        return self.python if program.workload in OTHERS else sys.executable


class WorkerEnded(SystemExit):
    """A process ended that should have answered; its own error stands above."""


class Worker:
    """A process that serves one program; `ask` returns what one run, or one compilation, took."""

    def __init__(self, peers: Peers, program: Row, env_name: str, num_envs: int, steps: int) -> None:
        steps //= SLOWER_LOOPS.get(program.workload, 1)
        numbers = map(str, (num_envs, program.agents, program.devices, steps))
        quiet = ["-W", "ignore::FutureWarning"]  # gymnax 0.0.9 relies on casts that jax has deprecated
        command = [peers.python_for(program), *quiet, str(HERE / "workloads.py"), program.workload, env_name, *numbers]
        command += [program.choice] if program.choice else []
        around = os.environ | ({"PYTHONPATH": str(peers.purejaxrl)} if program.workload in OF_PUREJAXRL else {})
        around |= {"NPROC": str(program.threads)} if program.threads else {}
        self.start(command, around)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process, and wait until its program is made."""
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        hello = self._read()
        self.work: int = hello["work"]
        self.bytes: int = hello["bytes"]
        self.made: dict[str, float] = hello.get("made", {})  # older checkouts do not say (before_after.py)
        self.versions: dict[str, str] = hello["versions"]
        self.weights: int = hello.get("weights", 0)  # of a language model

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
            raise WorkerEnded(f"A worker ended: {self.process.args}")
        return json.loads(line)


@contextmanager
def workers(programs: Iterable[Row], peers: Peers, *case: Any) -> Iterator[dict[Row, Worker]]:
    """The programs of one case, built one after another and ended together."""
    with ExitStack() as stack:
        running = {}
        for program in programs:
            if peers.python_for(program):
                running[program] = Worker(peers, program, *case)
                stack.callback(running[program].close)
        yield running


def interleave(running: dict[Row, Worker], what: str, rounds: int) -> dict[Row, list[dict[str, float]]]:
    """Ask every worker in turn, `rounds` times over; the first round warms up and is thrown away."""
    samples: dict[Row, list[dict[str, float]]] = {program: [] for program in running}
    for number in range(rounds + 1):
        for program, worker in running.items():
            cost = worker.ask(what)
            if number:
                samples[program].append(cost)
    return samples
