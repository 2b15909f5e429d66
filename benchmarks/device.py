"""What is to be known of one accelerator, in parts that each keep to their time. benchmarks/gpu.sh runs them.

    python benchmarks/device.py PART [--seconds 90] [--out FOLDER] [--cpu]

check: whether there is an accelerator; begins its results anew. tests: the device lane (`pytest -m device`). speed: PPO
on CartPole with more and more environments and agents, beside rejax and PureJaxRL. language: GRPO on transformers,
whole, writing alone and learning alone. profile: a trace of PPO and one of GRPO, and the kernels that take longest.
choices: what each choice of jaxpg/parallel/machine.py is worth here, every program again with another; gpu.sh has no
time for it. table: what has been found. Results go into one file by the name of the device as soon as there are any; it
names what time did not suffice for. `--cpu` rehearses on a CPU in small: its speeds mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import language
import workloads
from rich.console import Console
from rich.table import Table
from turns import Peers, Row, Worker, WorkerEnded
from work import PPO

from jaxpg.files import replace_file
from jaxpg.training.provenance import describe_machine

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
LIBRARIES = ("rejax", "purejaxrl", "jaxpg")
LANGUAGE = tuple(workload.__name__ for workload in workloads.LANGUAGE)


class Work(NamedTuple):
    """A program to time: the arguments of workloads.py."""

    row: Row
    environment: str
    num_envs: int
    steps: int


Case = tuple[Work, ...]
"""Programs that take turns."""


class Plan(NamedTuple):
    """How much is done.

    groups: cases of `speed`; the programs of a group are made at once, on all cores, and held in memory together.
    sizes, columns: of `language`.
    choices: cases of `choices`.
    rounds, turn_s: turns of every program, and the seconds that one is to take.
    workers: processes of the tests. files: those that have tests of the device lane.
    traced: what is profiled: a workload, its environment, how many of those or completions, and updates.
    """

    groups: tuple[tuple[Case, ...], ...]
    sizes: tuple[str, ...]
    columns: int
    choices: tuple[Case, ...]
    rounds: int
    turn_s: float
    workers: int
    files: tuple[Path, ...]
    traced: tuple[tuple[str, str, int, int], ...]


def ppo_case(num_envs: int, agents: int, updates: int) -> Case:
    """PPO of all libraries, so many updates a call."""
    steps = updates * agents * num_envs * PPO.num_steps
    return tuple(Work(Row(library, agents=agents), "CartPole-v1", num_envs, steps) for library in LIBRARIES)


def chosen(workload: str, environment: str, num_envs: int, steps: int, choices: Sequence[str]) -> Case:
    """A program as it is, and by each of these other choices of the machine."""
    return tuple(Work(Row(workload, choice=choice), environment, num_envs, steps) for choice in (None, *choices))


MOST_ROWS = ("torsos_at_once=Infinity", "params_as_one=Infinity", "few_outputs=0")
MANY_ROWS = (
    *("torsos_at_once=0", "params_as_one=0", "few_outputs=0", "few_categories=0", "sums_at_once=false"),
    *("few_final_obs=4", "round_equations=0"),
)
FEW_ROWS = (
    *("prepares_minibatches=false", "packs_outputs=false", "recursion_unroll=1"),
    *("resets_where_any=true", "gathers_words=true"),
)
"""Other choices than `machine.GPU`, which matter with the most environments, with many, and with few."""
MARKED = [path for path in TESTS.glob("test_*.py") if "mark.device" in path.read_text(encoding="utf-8")]
FILES = tuple(sorted(MARKED, key=lambda path: (path.stem != "test_device", path)))
"""Those of the device lane, what says most first: the last may be cut off."""
FULL = Plan(
    groups=(
        (ppo_case(64, 1, 16), ppo_case(2048, 1, 16), ppo_case(64, 64, 8), ppo_case(1, 1, 16)),
        (ppo_case(65536, 1, 2), ppo_case(16384, 1, 4), ppo_case(64, 2048, 2)),
    ),
    sizes=("1M", "10M", "100M"),
    columns=64,
    choices=(
        chosen("jaxpg_language", "1M", 64, 64 * language.TOKENS, ("few_slots=0", "steps_per_question=48")),
        chosen("jaxpg", "CartPole-v1", 64, 16 * 64 * PPO.num_steps, (*MANY_ROWS, *FEW_ROWS)),
        chosen("jaxpg", "CartPole-v1", 65536, 2 * 65536 * PPO.num_steps, MOST_ROWS),
        chosen("jaxpg", "CartPole-v1", 2048, 16 * 2048 * PPO.num_steps, ("torsos_at_once=Infinity", *MANY_ROWS[2:])),
        chosen("jaxpg", "Breakout-MinAtar", 1024, 8 * 1024 * PPO.num_steps, MANY_ROWS[:1]),
    ),
    rounds=3,
    turn_s=1.0,
    workers=14,
    files=FILES,
    traced=(("jaxpg", "CartPole-v1", 64, 3), ("jaxpg_language", "1M", 64, 1), ("jaxpg", "CartPole-v1", 65536, 1)),
)
REHEARSAL = Plan(
    groups=((ppo_case(1, 1, 1),), (ppo_case(8, 2, 1),)),
    sizes=("0.01M",),
    columns=8,
    choices=(chosen("jaxpg", "CartPole-v1", 4, 4 * PPO.num_steps, ("gathers_words=false",)),),
    rounds=1,
    turn_s=0.05,
    workers=0,
    files=(TESTS / "test_machine.py",),
    traced=(("jaxpg", "CartPole-v1", 8, 1), ("jaxpg_language", "0.01M", 8, 1)),
)


class Results:
    """The file of a device, begun anew by the part `check`: `put` writes what another has found so far.

    A part that is run on another machine than `check`, or with another commit, has a machine of its own.
    """

    def __init__(self, folder: Path, machine: dict[str, Any], part: str) -> None:
        self.name = re.sub(r"\W+", "_", machine["devices"][0]).strip("_").lower()
        self.folder, self.path = folder, folder / f"{self.name}.json"
        folder.mkdir(parents=True, exist_ok=True)
        old = self.path.exists() and part != "check"
        self.found: dict[str, Any] = json.loads(self.path.read_text()) if old else {"parts": {}}
        self.machine = machine
        self.found.setdefault("machine", machine)

    def put(self, part: str, found: dict[str, Any]) -> None:
        first, own = ({**machine, "started": None} for machine in (self.found["machine"], self.machine))
        self.found["parts"][part] = found if first == own else {**found, "machine": self.machine}
        self.write()

    def write(self) -> None:
        replace_file(self.path, json.dumps(self.found, indent=1) + "\n")


class Clock(NamedTuple):
    """When a part must have ended, as `time.monotonic` counts."""

    end: float

    def left(self) -> float:
        return self.end - time.monotonic()


def device() -> dict[str, Any]:
    """The machine, and of an NVIDIA GPU its driver and memory."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader", "--id=0"]
    smi = subprocess.run(asked, capture_output=True, text=True, check=False) if shutil.which("nvidia-smi") else None
    said = smi.stdout.strip() if smi and not smi.returncode else None
    return describe_machine() | {"nvidia_smi": said, "xla": jax.devices()[0].client.platform_version}


def check(rehearsal: bool) -> None:
    """End with status 2 where there is no accelerator."""
    try:
        platform = jax.default_backend()
    except RuntimeError as error:  # jax's own word for a platform that it was told to use and cannot
        platform, reason = "cpu", f" ({str(error).splitlines()[0]})"
    else:
        reason = ""
    if platform == "cpu" and not rehearsal:
        print(f"gpu.sh: jax finds no accelerator{reason}; --cpu rehearses on this CPU.", file=sys.stderr)
        raise SystemExit(2)


@contextmanager
def started(works: Sequence[Work], peers: Peers) -> Iterator[tuple[dict[Work, Worker], dict[Work, str]]]:
    """The programs that were made, all at once, and why others were not; afterwards they are ended."""

    def start(work: Work) -> Worker | str:
        try:
            return Worker(peers, *work)
        except WorkerEnded as error:
            return f"could not be made: {error}"

    with ExitStack() as stack:
        with ThreadPoolExecutor(len(works)) as pool:
            made = dict(zip(works, pool.map(start, works), strict=True))
        running = {work: worker for work, worker in made.items() if isinstance(worker, Worker)}
        for worker in running.values():
            stack.callback(worker.process.wait)
            stack.callback(worker.process.kill)
        yield running, {work: why for work, why in made.items() if isinstance(why, str)}


def calls_for(seconds: float, turn_s: float) -> int:
    """So many calls make a turn of about `turn_s` seconds, at least one."""
    return max(1, round(turn_s / seconds))


def time_case(
    case: Sequence[Work], running: dict[Work, Worker], failed: dict[Work, str], plan: Plan
) -> list[dict[str, Any]]:
    """One record per program, after a call to warm up and one that says how many make a turn; those that end say so."""

    def ask(work: Work, what: str) -> dict[str, float]:
        try:
            return running[work].ask(what) if work in running else {}
        except (WorkerEnded, BrokenPipeError) as error:
            failed[work] = f"ended at `{what}`: {error}"
            del running[work]
            return {}

    answers = [(work, ask(work, "run") and ask(work, "run")) for work in case]
    calls = {work: calls_for(answer["wall"], plan.turn_s) for work, answer in answers if answer}
    turns: dict[Work, list[float]] = {work: [] for work in calls}
    for _ in range(plan.rounds):
        for work in calls:
            if answer := ask(work, f"run {calls[work]}"):
                turns[work].append(answer["wall"] / calls[work])
    peaks = {work: ask(work, "memory") for work in case}
    records = []
    for work in case:
        found = measured(running[work], calls[work], turns[work], peaks[work]) if work in running else None
        about = {"label": work.row.label, "workload": work.row.workload, "agents": work.row.agents}
        about |= {"choice": work.row.choice} if work.row.choice else {}
        about |= {"environment": work.environment, "num_envs": work.num_envs}
        records.append(about | (found or {"failed": failed[work]}))
    return records


def measured(worker: Worker, calls: int, call_s: list[float], peak: dict[str, float]) -> dict[str, Any]:
    """What is known of a program; `work` is that of one call, in environment steps or tokens."""
    return {
        "work": worker.work,
        "per_second": worker.work / median(call_s),
        "calls_of_a_turn": calls,
        "call_wall_s": call_s,
        "made_wall_s": worker.made["wall"],
        "program_bytes": worker.bytes,
        "peak_bytes": peak["peak"],
        "versions": worker.versions,
    }


def time_groups(
    groups: Sequence[Sequence[Case]],
    peers: Peers,
    plan: Plan,
    clock: Clock,
    put: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """All cases, `put` after each; no group is begun in less time than the slowest took to be made.

    `left_out` names the programs that have not been timed so far.
    """

    def name(work: Work) -> str:
        return f"{work.row.label}, {work.environment}, {work.num_envs}"

    there = [[[work for work in case if peers.python_for(work.row)] for case in group] for group in groups]
    left_out = [name(work) for group in there for case in group for work in case]
    found: dict[str, Any] = {"cases": [], "left_out": left_out}
    put(found)
    longest = 0.0
    for group in there:
        if clock.left() < longest + 10:
            continue
        began = time.monotonic()
        with started([work for case in group for work in case], peers) as (running, failed):
            longest = max(longest, time.monotonic() - began)
            for case in group:
                found["cases"].append(time_case(case, running, failed, plan))
                for work in case:
                    left_out.remove(name(work))
                put(found)
    return found


def tests(plan: Plan, clock: Clock, results: Results) -> None:
    """The device lane: how many passed and which did not; cut off in time, those that were run."""
    log = results.folder / f"{results.name}.tests.txt"
    around = os.environ | {"JAXPG_ON_DEVICE": "1", "PYTHONUNBUFFERED": "1"}
    options = ["-q", "-ra", "--durations=15", "-m", "device", "-W", "default", "-p", "no:cacheprovider"]
    options += ["-o", "addopts=", "--dist=load", "--maxschedchunk=1", f"-n{plan.workers}"]  # of any pytest-xdist
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *map(str, plan.files)],
            cwd=TESTS.parent,
            env=around,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        cut_off = False
        try:
            process.wait(timeout=max(1.0, clock.left() - 10))
        except subprocess.TimeoutExpired:
            cut_off = True
            process.send_signal(signal.SIGINT)  # pytest then says what it has seen
            process.wait()
    lines = log.read_text().splitlines()
    failing = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    results.put("tests", {"summary": lines[-1] if lines else "", "failed": failing, "cut_off": cut_off})
    if process.returncode:
        raise SystemExit(1)


def speed(plan: Plan, clock: Clock, results: Results, peers: Peers) -> None:
    """PPO beside the peers."""
    time_groups(plan.groups, peers, plan, clock, partial(results.put, "speed"))


def choices(plan: Plan, clock: Clock, results: Results) -> None:
    """Programs by other choices of the machine (jaxpg/parallel/machine.py)."""
    time_groups([plan.choices], Peers(), plan, clock, partial(results.put, "choices"))


def language_models(plan: Plan, clock: Clock, results: Results) -> None:
    """GRPO by size, and beside what memory and matrix products allow."""
    tokens = plan.columns * language.TOKENS
    group = [tuple(Work(Row(name), size, plan.columns, tokens) for name in LANGUAGE) for size in plan.sizes]
    put = partial(results.put, "language")
    found = time_groups([group], Peers(), plan, clock, put)
    limits = language.measured_limits(rounds=5)
    found["limits"] = limits._asdict()
    env = language.endless()
    for case in found["cases"]:
        size = case[0]["environment"]
        policy, _ = language.transformer_of(env, size)
        weights = sum(x.size for x in jax.tree.leaves(jax.eval_shape(policy.init, jax.random.key(0))))
        writing, learning = language.bounds(limits, size, weights, plan.columns)
        at_most = {"language_writing": writing, "language_learning": learning}
        for record in case:
            record |= {"weights": weights, "at_most": at_most.get(record["workload"])}
    put(found)


def kernels(profile: Any, limit: int = 20) -> dict[str, Any]:
    """What took longest on the device (rehearsed on a CPU: on its threads): kernels by their whole time.

    profile: a jax.profiler.ProfileData. Of a GPU its streams count; `busy` is the share of the time from the first
    kernel to the last in which one was running, if one ran at a time.
    """
    planes = [p for p in profile.planes if p.name.startswith("/device:")] or list(profile.planes)
    lines = [line for plane in planes for line in plane.lines]
    streams = [line for line in lines if line.name.startswith("Stream")] or lines
    events = [event for line in streams for event in line.events]
    if not events:  # the machine does not let its kernels be traced
        return {"kernels": 0, "wall_ms": 0.0, "busy": 0.0, "top": []}
    spent, number = Counter[str](), Counter[str]()
    for event in events:
        spent[event.name] += event.duration_ns
        number[event.name] += 1
    wall = max(event.end_ns for event in events) - min(event.start_ns for event in events)
    return {
        "kernels": len(events),
        "wall_ms": wall / 1e6,
        "busy": sum(spent.values()) / wall,
        "top": [
            {"kernel": name, "times": number[name], "ms": ns / 1e6, "share": ns / sum(spent.values())}
            for name, ns in spent.most_common(limit)
        ],
    }


def profile(plan: Plan, clock: Clock, results: Results) -> None:
    """A trace of each program, warm, for Perfetto (https://ui.perfetto.dev), and its kernels."""
    found: dict[str, Any] = {}
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # of Python's own calls there are more than of kernels
    for name, environment, number, updates in plan.traced:
        per_update = number * (language.TOKENS if name in LANGUAGE else PPO.num_steps)
        program = workloads.WORKLOADS[name](environment, number, 1, 1, updates * per_update).build()
        jax.block_until_ready(program.run())
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                jax.block_until_ready(program.run())
            (traced,) = Path(folder).rglob("*.xplane.pb")
            title = f"{name}, {environment}, {number}"
            found[title] = {"updates": updates} | kernels(jax.profiler.ProfileData.from_file(str(traced)))
            for trace in Path(folder).rglob("*.trace.json.gz"):
                shutil.copy(trace, results.folder / f"{results.name}.{name}-{number}.trace.json.gz")
        results.put("profile", found)


def tables(found: dict[str, Any]) -> Iterator[Table | str]:
    """What has been found, part by part."""
    machine, parts = found["machine"], found["parts"]
    yield f"{machine['nvidia_smi'] or machine['devices'][0]}, jax {machine['jax']}, jaxpg at {machine['commit']}"
    if "tests" in parts:
        yield "\n".join(["Tests of the device lane: " + parts["tests"]["summary"], *parts["tests"]["failed"]])
    for part, what in (("speed", "environment steps"), ("language", "tokens"), ("choices", "steps or tokens")):
        if part not in parts:
            continue
        heads = ("program", "environment", "number", f"{what}/s", "× beside", "of the bound", "made in s", "GB")
        table = Table(*heads)
        for record in (record for case in parts[part]["cases"] for record in [*case, None]):
            table.add_row(*cells(record, parts[part]["cases"])) if record else table.add_section()
        yield table
        yield "\n".join(f"{name}: no time was left" for name in parts[part]["left_out"])
    for title, one in parts.get("profile", {}).items():
        head = f"{title}: updates {one['updates']}, {one['kernels']:,} kernels in {one['wall_ms']:.1f} ms"
        head += f", of which the device was busy {one['busy']:.0%}"
        table = Table("kernel", "times", "ms", "share", title=head, title_justify="left")
        for kernel in one["top"]:
            table.add_row(kernel["kernel"][:80], str(kernel["times"]), f"{kernel['ms']:.3f}", f"{kernel['share']:.0%}")
        yield table


def compared(record: dict[str, Any], case: list[dict[str, Any]]) -> list[float]:
    """The speeds that a program is set beside: jaxpg beside other libraries, a choice beside the program as it is."""
    if "choice" in record:
        others = case[:1]
    else:
        others = [other for other in case if record["workload"] == "jaxpg" != other["workload"]]
    return [other["per_second"] for other in others if "failed" not in other]


def cells(record: dict[str, Any], cases: list[list[dict[str, Any]]]) -> list[str]:
    """A row of the table of speeds, beside the fastest that it is compared with."""
    about = [record["label"], record["environment"], f"{record['num_envs']:,}"]
    if "failed" in record:
        return [*about, record["failed"][:60]]
    (case,) = [case for case in cases if record in case]
    others = compared(record, case)
    beside = f"{record['per_second'] / max(others):.2f}" if others else ""
    of_bound = f"{record['per_second'] / record['at_most']:.1%}" if record.get("at_most") else ""
    numbers = f"{record['made_wall_s']:.1f}", f"{(record['peak_bytes'] or record['program_bytes']) / 1e9:.2f}"
    return [*about, f"{record['per_second']:,.0f}", beside, of_bound, *numbers]


def main() -> None:
    """Run a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("check", "tests", "speed", "language", "profile", "choices", "table"))
    parser.add_argument("--seconds", type=float, default=600, help="for this part (default 600)")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("--peer-python", help="a Python that has rejax (benchmarks/README.md)")
    parser.add_argument("--purejaxrl", type=Path, help="a clone of PureJaxRL, which is no package")
    parser.add_argument("--cpu", action="store_true", help="rehearse in small, without an accelerator")
    arguments = parser.parse_args()
    clock, plan = Clock(time.monotonic() + arguments.seconds), REHEARSAL if arguments.cpu else FULL
    check(arguments.cpu)
    results = Results(arguments.out, device(), arguments.part)
    peers = Peers(arguments.peer_python, arguments.purejaxrl and arguments.purejaxrl / "purejaxrl")
    if arguments.part == "table":
        console = Console(width=150)
        for each in tables(results.found):
            console.print(each, highlight=False, markup=False)
        return
    parts: dict[str, Callable[[], None]] = {
        "check": results.write,
        "tests": partial(tests, plan, clock, results),
        "speed": partial(speed, plan, clock, results, peers),
        "language": partial(language_models, plan, clock, results),
        "profile": partial(profile, plan, clock, results),
        "choices": partial(choices, plan, clock, results),
    }
    parts[arguments.part]()


if __name__ == "__main__":
    main()
