"""One step of GRPO in turns: jaxpg, TRL's trainer and Tunix's learner on the same model, a process each.

`python benchmarks/language.py --peers` runs it; language_peers.py has the programs. Every program has one thread. First
the settings of each peer take turns with one another, then the best of each with jaxpg: A B C A B C.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import command_lines
import result_files
from language_peers import Work
from rich.console import Console
from rich.table import Table
from turns import Row, Worker, interleave

from jaxpg.training.provenance import describe_machine

HERE = Path(__file__).resolve().parent
TRIALS = 2
"""Timed steps of every setting, from which a peer's best one is taken."""
SETTINGS = {"jaxpg": ("",), "trl": ("sdpa 64", "sdpa 16", "eager 64"), "tunix": ("64", "16")}
"""Of TRL the attention and the completions of a gradient's part, of Tunix these alone."""
if shutil.which("g++"):  # torch compiles with it
    SETTINGS["trl"] += ("sdpa 64 compiled",)
ONE_THREAD = {"NPROC": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}


def peer_pythons(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, str]:
    """The Python of each peer that is given; ends with status 2 where there is none or it lacks the peer."""
    options = {"trl": ("--trl-python", "trl"), "tunix": ("--tunix-python", "google-tunix")}
    given = {peer: python for peer in options if (python := getattr(args, f"{peer}_python"))}
    if args.peers and not given:
        parser.error("--peers needs a Python that has a peer: --trl-python, --tunix-python or both")
    for peer, python in given.items():
        option, package = options[peer]
        if not args.peers:
            parser.error(f"{option} needs --peers")
        command_lines.require_package(parser, option, python, package)
    return given


class Step(Worker):
    """A process that takes a step of one program whenever it is asked to."""

    def __init__(self, python: str, name: str, setting: str, work: Work) -> None:
        command = [python, str(HERE / "language_peers.py"), name, setting, json.dumps(work._asdict())]
        self.setting = setting
        self.start(command, os.environ | ONE_THREAD | QUIET)


class Finding(NamedTuple):
    """What the turns of a program showed.

    weights: of its model.
    versions: of the packages that it runs on.
    setting: the one that it was timed with.
    trials: CPU seconds of a step with each of its settings, the median.
    cpu, wall, writing_cpu: seconds of every step, and of these what went before the reward.
    """

    weights: int
    versions: dict[str, str]
    setting: str
    trials: dict[str, float]
    cpu: list[float]
    wall: list[float]
    writing_cpu: list[float]


def compare(work: Work, pythons: Mapping[str, str], rounds: int) -> dict[str, Finding]:
    """The findings by program, of jaxpg and of every peer whose Python is given."""
    with ExitStack() as stack:
        best, trials = {}, {}
        for name, python in {"jaxpg": sys.executable, **pythons}.items():
            best[Row(name)], trials[name] = best_setting(stack, python, name, work)
        samples = interleave(best, "step", rounds)
        return {
            row.workload: Finding(
                worker.weights,
                worker.versions,
                worker.setting,
                trials[row.workload],
                *([sample[key] for sample in samples[row]] for key in ("cpu", "wall", "writing_cpu")),
            )
            for row, worker in best.items()
        }


def best_setting(stack: ExitStack, python: str, name: str, work: Work) -> tuple[Step, dict[str, float]]:
    """The process of a program's fastest setting, which the stack closes, and the CPU seconds of each setting."""
    steps = {Row(setting): Step(python, name, setting, work) for setting in SETTINGS[name]}
    for step in steps.values():
        stack.callback(step.close)
    if len(steps) == 1:
        return next(iter(steps.values())), {}
    samples = interleave(steps, "step", TRIALS)
    trials = {row.workload: median(sample["cpu"] for sample in samples[row]) for row in steps}
    fastest = min(trials, key=trials.__getitem__)
    for row, step in steps.items():
        if row.workload != fastest:
            step.close()
    return steps[Row(fastest)], trials


def share(findings: Mapping[str, Finding]) -> dict[str, float]:
    """jaxpg's CPU seconds as a share of each peer's: the median over rounds of the ratio within a round."""
    ours = findings["jaxpg"].cpu
    return {
        name: median(a / b for a, b in zip(ours, found.cpu, strict=True))
        for name, found in findings.items()
        if name != "jaxpg"
    }


def table(title: str, findings: Mapping[str, Finding]) -> Table:
    """A row per program: the median step, its parts, and jaxpg's share of it."""
    found = Table("program", "setting", "weights", "CPU s a step", "writing", "the rest", "jaxpg takes", title=title)
    shares = share(findings)
    for name, finding in findings.items():
        rest = [whole - writing for whole, writing in zip(finding.cpu, finding.writing_cpu, strict=True)]
        cells = [f"{median(x):.3f}" for x in (finding.cpu, finding.writing_cpu, rest)]
        ours = f"{shares[name]:.2f}" if name in shares else ""
        found.add_row(name, finding.setting, f"{finding.weights:,}", *cells, ours)
    return found


def measure(works: Mapping[str, Work], pythons: Mapping[str, str], rounds: int, out: Path, console: Console) -> None:
    """Findings and shares by size, printed and written as they come; sizes that are not measured stay in the file."""
    results = result_files.read(out)
    for size, work in works.items():
        findings = compare(work, pythons, rounds)
        console.print(table(f"one GRPO step, {size} weights, {work.columns} completions", findings))
        programs = {name: finding._asdict() for name, finding in findings.items()}
        found = {"work": work._asdict(), "programs": programs, "share": share(findings)}
        results[size] = {"machine": describe_machine(), **found}
        result_files.write(out, results)
