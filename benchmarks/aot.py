"""What XLA makes of jaxpg for accelerators that are not here: programs compiled for TPUs and GPUs, and not run.

    pip install -e '.[aot]'                                     # in an environment of its own
    python benchmarks/aot.py [--targets ...] [--cases ...] [--peer-python PEER/bin/python] [--purejaxrl PATH]

Counts, no speeds: how many kernels an environment step, a minibatch and an update consist of, how often the host must
launch something or wait for an answer, what devices exchange, what is held in between, and for TPUs the cycles that the
compiler estimates, which mean something as ratios only. benchmarks/README.md says how to read the table. Each program
is compiled in a process of its own (aot_worker.py), one after the other, on the CPU. Results are written one by one
into results/aot.json. What is there with the versions of packages that are installed now is not compiled again, of
jaxpg only if it is of this very commit and nothing is changed in the checkout, so that an interrupted run goes on where
`--out` is outside of it. Which commit of PureJaxRL it was nobody looks at: give `--fresh` for another one.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu is for one process at a time: those that compile

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from aot_worker import CASES, COMPILING, PEER_CASES, TARGETS, compile_elsewhere, missing
from command_lines import out_file, require_peers
from result_files import read, write
from rich.console import Console
from rich.table import Table

from jaxpg.training.provenance import describe_machine

HERE = Path(__file__).resolve().parent


Program = tuple[str, str, str]
"""(target, library, case)"""


def rows(targets: list[str], cases: list[str], peers: list[str]) -> Iterator[Program]:
    """Everything to compile; the peers on what they can do."""
    for target in targets:
        for case in cases:
            yield target, "jaxpg", case
            yield from ((target, peer, case) for peer in peers if peer in PEER_CASES.get(case, ()))


def table(target: str, found: dict[tuple[str, str], dict[str, Any]]) -> Table:
    """The programs of one target; an update's numbers are those of all its steps and minibatches."""
    heads = (
        "program",
        "a step",
        "a minibatch",
        "an update",
        "launches",
        "waits",
        "exchanges",
        "of kB",
        "GB",
        "M cycles",
    )
    result = Table(*heads, "temporary MB", "compile CPU s", title=f"{target}: compiled, not run", title_justify="left")
    for (library, case), record in found.items():
        if "failed" in record:
            result.add_row(f"{library}: {case}", record["failed"][-60:])
            continue
        update, tpu = record["update"], record["unit"] == "operations"
        result.add_row(
            f"{library}: {case}",
            *("" if record[key] is None else str(record[key]) for key in ("step", "minibatch")),
            f"{update[record['unit']]:,}",
            *("" if tpu else f"{update.get(key, 0):,}" for key in ("launches", "waits")),
            *(f"{update.get('exchanges', 0)}", f"{update.get('exchanged_bytes', 0) / 1e3:,.0f}"),
            f"{update['bytes'] / 1e9:.2f}" if "bytes" in update else "",  # older results have none
            f"{update['cycles'] / 1e6:.1f}" if tpu else "",
            f"{record['temporary_bytes'] / 1e6:,.1f}",
            f"{record['compile_s']['cpu']:.1f}",
        )
    return result


@cache
def installed(python: str) -> dict[str, str]:
    """The versions of the packages that a Python compiles with."""
    command = [python, str(HERE / "versions.py"), *COMPILING]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def still_holds(known: Mapping[str, Any], commit: str | None, here: Mapping[str, str]) -> bool:
    """Whether a result need not be made again: of the same packages and, if it is jaxpg's, of this very commit."""
    committed = commit is not None and not commit.endswith("-dirty")
    same_code = known["library"] != "jaxpg" or (committed and known["commit"] == commit)
    return same_code and all(here.get(name) == version for name, version in known["versions"].items())


def compile_missing(
    wanted: Sequence[Program], out: Path, where: Callable[[str], tuple[str | None, str]], *, fresh: bool
) -> dict[Program, dict[str, Any]]:
    """Compile what is not in a file of results yet, or holds no longer, and write it there one by one; all of it.

    `where` gives for a library the Python that has it, None for this one, and its PYTHONPATH. Without the compilers the
    program ends with a sentence.
    """
    targets = list(dict.fromkeys(target for target, *_ in wanted))
    if absent := sorted({package for target in targets for package in missing(target)}):
        raise SystemExit(f"To compile for {', '.join(targets)}, install {', '.join(absent)}: pip install -e '.[aot]'.")
    machine, console = describe_machine(), Console()
    old = read(out).get("programs", [])
    kept = {(x["target"], x["library"], x["case"]): x for x in old if "failed" not in x}
    if fresh:
        kept = {program: x for program, x in kept.items() if program not in wanted}
    for target, library, case in wanted:
        known = kept.get((target, library, case))
        elsewhere, path = where(library)
        python = elsewhere or sys.executable
        if known and still_holds(known, machine["commit"], installed(python)):
            continue
        with console.status(f"{target}: {library}, {case}"):
            found = compile_elsewhere(target, library, case, python=python, path=path)
        about = {"target": target, "library": library, "case": case, "commit": machine["commit"]}
        kept[target, library, case] = about | found
        result = {"what": "compiled, not run", "machine": machine, "programs": list(kept.values())}
        write(out, result)
    return kept


def main() -> None:
    """Compile, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS), metavar="TARGET")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--peer-python", help="a Python that has the peers and the compilers (benchmarks/README.md)")
    parser.add_argument("--purejaxrl", type=Path, help="a clone of PureJaxRL, which is no package")
    parser.add_argument("--fresh", action="store_true", help="compile again what is in the results")
    parser.add_argument("--out", type=out_file, default=HERE / "results" / "aot.json")
    arguments = parser.parse_args()
    require_peers(parser, arguments.peer_python, arguments.purejaxrl)
    given = {"rejax": arguments.peer_python, "purejaxrl": arguments.peer_python and arguments.purejaxrl}
    peers = [peer for peer, place in given.items() if place]

    def where(library: str) -> tuple[str | None, str]:
        own = str(arguments.purejaxrl / "purejaxrl") if library == "purejaxrl" else os.environ.get("PYTHONPATH", "")
        return None if library == "jaxpg" else arguments.peer_python, own

    wanted = list(rows(arguments.targets, arguments.cases, peers))
    kept = compile_missing(wanted, arguments.out, where, fresh=arguments.fresh)
    console = Console(width=150)
    for target in arguments.targets:
        console.print(table(target, {(lib, case): x for (of, lib, case), x in kept.items() if of == target}))


if __name__ == "__main__":
    main()
