"""How fast PPO, A2C, GRPO, DQN and PQN run on this machine, beside the peers doing the same work.

    python benchmarks/throughput.py --peer-python PEER/bin/python [--purejaxrl PATH]
    python benchmarks/throughput.py --peer-python PEER/bin/python --one-agent
    python benchmarks/throughput.py --peer-python PEER/bin/python --to-return
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
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from command_lines import chosen, out_file, pattern, require_peers
from limits import ppo_flops_per_step
from result_files import put_row, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from turns import Peers, Row, interleave, workers
from work import EPISODES, PPO

from jaxpg.report.statistics import bootstrap
from jaxpg.training.provenance import describe_machine

HERE = Path(__file__).resolve().parent
CORES = len(os.sched_getaffinity(0))


ALGORITHMS = {
    "jaxpg_recurrent": "Recurrent PPO",
    "jaxpg_a2c": "A2C",
    "jaxpg_grpo": "GRPO",
    "jaxpg_dqn": "DQN",
    "jaxpg_pqn": "PQN",
}


class Case(NamedTuple):
    """Programs that do the same work, and the steps of one timed run: one to two seconds of a compiled program."""

    environment: str
    num_envs: int
    steps: int
    programs: tuple[Row, ...]

    @property
    def title(self) -> str:
        workload = self.programs[-1].workload
        if workload == "jaxpg_language":
            return f"GRPO, a transformer of {self.environment} weights, {self.num_envs} completions"
        algorithm = ALGORITHMS.get(workload, "PPO")
        return f"{algorithm}, {self.environment}, {self.num_envs} environments"


TRAIN_PPO = ("jaxpg", "jaxpg_plain", "rejax", "purejaxrl", "sb3", "sbx", "brax", "reference")
AGENTS = 64
COMPILED = (Row("rejax"), Row("purejaxrl"))
BASELINES = (Row("sb3"), Row("sbx"))
ALONE = (Row("jaxpg"), Row("jaxpg", devices=CORES))
SINGLE = tuple(Row(workload, threads=1) for workload in ("rejax", "purejaxrl", "jaxpg"))
SEVERAL = (Row("rejax", agents=CORES), Row("jaxpg", agents=CORES, devices=CORES))
MANY = (Row("rejax", agents=AGENTS), Row("jaxpg", agents=AGENTS), Row("jaxpg", AGENTS, CORES))
VALUES_ALONE = (Row("jaxpg_dqn"), Row("jaxpg_dqn", threads=1))  # stable-baselines3 has one thread
VALUES_SEVERAL = (Row("rejax_dqn", agents=CORES), Row("jaxpg_dqn", agents=CORES, devices=CORES))
RECURRENT = tuple(Row(name, threads=n) for n in (None, 1) for name in ("purejaxrl_recurrent", "jaxpg_recurrent"))
ALL = (*COMPILED, Row("jaxpg_plain"), *ALONE, *SINGLE, *SEVERAL)
CASES = [
    Case("CartPole-v1", 4, 2**18, ALL),
    Case("CartPole-v1", 64, 2**19, (*ALL, *BASELINES, *MANY)),
    Case("CartPole-v1", 2048, 2**19, ALL),
    Case("Breakout-MinAtar", 64, 2**17, ALL),
    Case("Breakout-MinAtar", 1024, 2**17, ALL),
    Case("Pendulum-v1", 64, 2**18, (Row("rejax"), Row("brax"), *BASELINES, *ALONE, *SEVERAL)),
    Case("CartPole-v1", 64, 2**17, RECURRENT),
    Case("Breakout-MinAtar", 1024, 2**17, RECURRENT),
    Case("CartPole-v1", 64, 2**19, (Row("sb3_a2c"), Row("jaxpg_a2c"))),
    Case("CartPole-v1", 10, 2**17, (Row("rejax_dqn"), Row("sb3_dqn"), *VALUES_ALONE, *VALUES_SEVERAL)),
    Case("CartPole-v1", 32, 2**17, (Row("rejax_pqn"), Row("jaxpg_pqn"))),
    Case("CartPole-v1", 256, 2**17, (Row("jaxpg_grpo"), Row("jaxpg_grpo", devices=CORES))),
    Case("0.1M", 64, 2**15, (Row("jaxpg_language"),)),
]
ONE_AGENT = [
    Case(name, num_envs, steps, (*COMPILED, Row("jaxpg_plain"), *ALONE))
    for name, num_envs, steps in (
        ("CartPole-v1", 64, 2**19),
        ("CartPole-v1", 2048, 2**19),
        ("Breakout-MinAtar", 64, 2**17),
        ("Breakout-MinAtar", 1024, 2**17),
    )
]
"""How soon a single agent is done: on one device, as the command line has it, and on one per core."""
COLLECTING = (Row("bare"), Row("collect_random"), Row("collect"))


def measure(case: Case, peers: Peers, rounds: int, compiles: int) -> list[dict[str, Any]]:
    """One record per program: seconds per million steps of every round, seconds of every compilation, bytes at most."""
    with workers(case.programs, peers, *case[:3]) as running:
        runs = interleave(running, "run", rounds)
        memory = {program: worker.ask("memory")["peak"] for program, worker in running.items()}
        builds = interleave(running, "compile", compiles) if compiles else {program: [] for program in running}
        return [
            program._asdict()
            | {"label": program.label, "environment": case.environment, "num_envs": case.num_envs}
            | {"versions": worker.versions, "peak_bytes": memory[program]}
            | {
                "iteration_steps": program.agents * case.num_envs * PPO.num_steps
                if program.workload in TRAIN_PPO
                else 0
            }
            | {f"{k}_s_per_million": [r[k] * 1e6 / worker.work for r in runs[program]] for k in ("cpu", "wall")}
            | {f"compile_{k}_s": [b[k] for b in builds[program]] for k in ("cpu", "wall")}
            for program, worker in running.items()
        ]


def ratio(base: dict[str, Any], record: dict[str, Any], key: str) -> float:
    """How many times less `record` took than `base`: the median over rounds of the ratio within a round."""
    return median(b / r for b, r in zip(base[key], record[key], strict=True))


RETURN, EVERY, PATIENCE, SEEDS = 475.0, 2**15, 3 * 2**19, 64
LEARNERS = ("rejax", "rejax_limit_1", "rejax_unclipped", "jaxpg", "jaxpg_norm_1", "jaxpg_unclipped")
"""Each with the same limits of its gradients. Without stable-baselines3 and sbx, which take minutes for each seed."""


def steps_to_return(program: Row, peers: Peers) -> list[int]:
    """The environment steps of each agent until its policy is worth RETURN, looked at every EVERY steps.

    PATIENCE where those were not enough: whoever is as slow as that is above the median by more than is said. The
    agents are those of the second seed: jaxpg's norm was chosen on those of the first (LOG.md, "PPO with a norm of 2").
    """
    found = np.full(program.agents, PATIENCE)
    with workers([program], peers, "CartPole-v1", 64, EVERY * program.agents) as running:
        worker = running[program]
        worker.ask("compile")
        for steps in range(EVERY, PATIENCE, EVERY):
            worker.ask("run")
            reached = np.array(worker.ask("score")["return"]) >= RETURN
            found = np.where(reached, np.minimum(found, steps), found)
            if (found <= steps).all():
                break
    return found.tolist()


def until_return(peers: Peers) -> Iterator[dict[str, Any]]:
    """How many steps PPO takes until CartPole is learned, of SEEDS agents side by side: a record per program.

    Agents of jaxpg are laid out over the cores, as the command line does; peers have one device.
    """
    for name in track(LEARNERS, transient=True):
        program = Row(name, SEEDS, CORES if name.startswith("jaxpg") else 1)
        yield program._asdict() | {"label": program.label, "steps": steps_to_return(program, peers)}


def return_table(records: list[dict[str, Any]]) -> Table:
    """The steps' median over seeds with an interval."""
    title = f"PPO, CartPole-v1, 64 environments: until {EPISODES} episodes are worth {RETURN:.0f}, {SEEDS} seeds"
    found = Table("program", "steps [95%]", "quartiles", f"not in {PATIENCE:,}", title=title, title_justify="left")
    for record in records:
        steps = np.array(record["steps"])
        of_steps = "{:,.0f} [{:,.0f}, {:,.0f}]".format(*bootstrap(steps, statistic=np.median))
        quartiles = "{:,.0f} to {:,.0f}".format(*np.quantile(steps, (0.25, 0.75)))
        found.add_row(record["label"], of_steps, quartiles, f"{(steps >= PATIENCE).sum()}")
    return found


def rate(workload: str, rounds: int, *case: Any) -> float:
    """What one of the machine's limits does per CPU second."""
    with workers([Row(workload)], Peers(), *case) as running:
        samples = interleave(running, "run", rounds)[Row(workload)]
        return running[Row(workload)].work / median(s["cpu"] for s in samples)


def matmul_rate(case: Case, rounds: int) -> float:
    """FLOPs per CPU second that the matrix products of the two networks reach by themselves, at the best batch size."""
    sizes = {256, case.num_envs * PPO.num_steps // PPO.num_minibatches}  # a cache-sized chunk, and a whole minibatch
    return max(rate("matmul", rounds, case.environment, rows, case.steps) for rows in sizes)


def busy_machine() -> dict[str, Any]:
    """What the figures come from, and how busy it is before they are taken."""
    return describe_machine() | {"load_before": os.getloadavg()[0]}


def first_update(record: dict[str, Any]) -> float | None:
    """Wall seconds from nothing compiled to the first new parameters of PPO; None where compiling was not timed."""
    if not record["compile_wall_s"] or not record["iteration_steps"]:
        return None
    iteration = record["iteration_steps"] * 1e-6 * median(record["wall_s_per_million"])
    return median(record["compile_wall_s"]) + iteration


def table(title: str, records: list[dict[str, Any]]) -> Table:
    """Medians, and how many times as long as a row the first program took with as many agents and threads."""
    found = Table(title=title, title_justify="left")
    found.add_column("program", no_wrap=True)
    base = records[0]["workload"]
    heads = (
        "CPU s / M steps",
        f"× {base}",
        "wall s / M steps",
        f"× {base}",
        "compile CPU s",
        "wall s",
        "first update s",
    )
    for head in (*heads, "GiB", "of matmul"):
        found.add_column(head, justify="right")
    bases = {(r["agents"], r["threads"]): r for r in reversed(records) if r["workload"] == base}
    for record in records:
        cells = []
        for key in ("cpu_s_per_million", "wall_s_per_million"):
            peer = bases.get((record["agents"], record["threads"]))
            cells += [f"{median(record[key]):.2f}", f"{ratio(peer, record, key):.2f}" if peer else ""]
        builds = [record[key] for key in ("compile_cpu_s", "compile_wall_s")]
        cells += [f"{median(b):.1f}" if b else "" for b in builds]
        first = first_update(record)
        cells += ["" if first is None else f"{first:.1f}", f"{record['peak_bytes'] / 2**30:.2f}"]
        found.add_row(record["label"], *cells, f"{record['matmul_share']:.0%}" if "matmul_share" in record else "")
    return found


QUICK = Case("CartPole-v1", 64, 2**18, (Row("reference"), Row("jaxpg")))
KNOWN = HERE / "results" / "quick.json"
SLOWER = 0.75


def quick(rounds: int, out: Path | None) -> None:
    """How many times faster than the frozen loop jaxpg is; ends with an error where it has been much more."""
    found = measure(QUICK, Peers(), rounds, 1)
    times = {
        "loop": ratio(*found, "cpu_s_per_million"),
        "compile": found[0]["compile_cpu_s"][0] / found[1]["compile_cpu_s"][0],
    }
    known = json.loads(KNOWN.read_text())["times"] if KNOWN.exists() else times
    for name, value in times.items():
        print(f"{name}: {value:.2f} times as fast as the frozen loop; it has been {known[name]:.2f}")
    if out:
        write(out, {"machine": busy_machine(), "times": times})
    elif slower := [name for name, value in times.items() if value < SLOWER * known[name]]:
        raise SystemExit(f"More than a quarter slower than it has been: {', '.join(slower)}.")


def one_case(case: Case, peers: Peers, rounds: int, compiles: int, console: Console) -> dict[str, Any]:
    """What is known of a case, its tables printed; collecting and the share of the matmul rate for PPO alone."""
    loops = measure(case, peers, rounds, compiles)
    found: dict[str, Any] = {"title": case.title, "loops": loops}
    if case.title.startswith("PPO"):
        found["collecting"] = measure(case._replace(programs=COLLECTING), Peers(), rounds, 0)
        found["ppo_flops_per_step"] = ppo_flops_per_step(case.environment)
        found["matmul_flops_per_cpu_s"] = matmul_rate(case, rounds)
        for record in loops:
            flops = found["ppo_flops_per_step"] * 1e6 / median(record["cpu_s_per_million"])
            record["matmul_share"] = flops / found["matmul_flops_per_cpu_s"]
    console.print(table(f"{case.title}: the whole loop", loops))
    if "collecting" in found:
        console.print(table(f"{case.title}: collecting alone", found["collecting"]))
    return found


UNREAD = {"quick": ("peer_python", "purejaxrl", "compiles", "only"), "to_return": ("purejaxrl", "only", "compiles")}
"""Options that a kind of measurement does not read."""


def read_arguments() -> argparse.Namespace:
    """The command line, refused where it says something that would not be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer-python", help="a Python that has the peers (benchmarks/README.md); without it, jaxpg alone"
    )
    parser.add_argument("--purejaxrl", type=Path, help="a clone of PureJaxRL, which is no package")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of every program (default 7)")
    parser.add_argument("--compiles", type=int, help="timed compilations of every program (default 3)")
    parser.add_argument("--only", type=pattern, help="only the cases whose title this pattern fits")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--one-agent", action="store_true", help="how soon one agent is trained, beside compiled peers")
    kinds.add_argument("--quick", action="store_true", help="one small case beside a loop that never changes")
    kinds.add_argument("--to-return", action="store_true", help="instead of speed, the time until CartPole is learned")
    parser.add_argument(
        "--out",
        type=out_file,
        help="where to write (default results/throughput.json, one_agent.json or to_return.json; --quick: nowhere)",
    )
    args = parser.parse_args()
    for kind in (kind for kind in UNREAD if getattr(args, kind)):
        if given := [name for name in UNREAD[kind] if getattr(args, name) is not None]:
            parser.error("{} does not read {}: leave it out".format(*map(option, (kind, given[0]))))
    require_peers(parser, args.peer_python, args.purejaxrl)
    args.compiles = 3 if args.compiles is None else args.compiles
    args.only = args.only or pattern("")
    return args


def option(name: str) -> str:
    """An argument as it is written in a command."""
    return f"--{name.replace('_', '-')}"


def main() -> None:
    """Measure, print the tables, write the JSON."""
    args = read_arguments()
    if args.quick:
        return quick(args.rounds, args.out)
    name = "to_return" if args.to_return else "one_agent" if args.one_agent else "throughput"
    cases = chosen({case.title: case for case in (ONE_AGENT if args.one_agent else CASES)}, args.only)
    out = args.out or HERE / "results" / f"{name}.json"
    peers = Peers(args.peer_python, args.purejaxrl and args.purejaxrl / "purejaxrl")
    console = Console(width=140)
    given = {"rounds": args.rounds, "compiles": args.compiles, "only": args.only.pattern}
    about: dict[str, Any] = {"machine": busy_machine(), "arguments": given}
    if args.to_return:
        records = []
        for record in until_return(peers):
            records.append(record)
            write(out, {**about, "cases": records})
        console.print(return_table(records))
    elif args.one_agent:
        for title, case in track(cases.items(), console=console, transient=True):
            loops = measure(case, peers, args.rounds, args.compiles)
            put_row(out, "cases", ("title",), {"title": title, "loops": loops}, about)
            console.print(table(title, loops))
    else:
        about["copied_bytes_per_cpu_s"] = rate("copy", 3, "CartPole-v1", 1, 1)
        console.print(f"Memory: {about['copied_bytes_per_cpu_s'] / 1e9:.1f} GB per CPU second, read and written.")
        for case in track(cases.values(), console=console, transient=True):
            put_row(out, "cases", ("title",), one_case(case, peers, args.rounds, args.compiles, console), about)
    console.print(f"Written to {out}")


if __name__ == "__main__":
    main()
