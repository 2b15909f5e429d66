"""Deliberate faults, and which test notices each: what the suite is worth, lane by lane.

    python benchmarks/mutations.py                      # all of them, by the tests named for each
    python benchmarks/mutations.py --only gae clip      # those whose names contain one of these
    python benchmarks/mutations.py --missing            # those that have never been run
    python benchmarks/mutations.py --lane quick         # by the whole quick lane: hours
    python benchmarks/mutations.py --anchors            # only whether each still finds its text

The faults are those of mutations.toml, each one replacement of text in a temporary copy of the tree. Its tests run in
the quick lane first and, if all of them pass there, in the full lane. Results are kept in results/mutations.json, from
which results/mutations.md is written; a fault that is not run again keeps its last result. A fault whose text is no
longer there exactly once must be given a new anchor.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
FAULTS = Path(__file__).parent / "mutations.toml"
LIMIT = 900  # seconds for the tests of one fault
SEES_TEXT = "tests/test_benchmarks.py::test_every_deliberate_fault_still_finds_its_text"
"""It would notice every fault by its text alone."""
COPIED = (
    "jaxpg",
    "tests",
    "configs",
    "benchmarks",
    "docs",
    "README.md",
    "ARCHITECTURE.md",
    "mkdocs.yml",
    "pyproject.toml",
)


class Mutation(NamedTuple):
    """A fault.

    name: what is wrong then.
    file: below jaxpg/.
    old, new: the text that is replaced, which the file has exactly once.
    tests: arguments of pytest that select the tests meant to notice it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = tuple(Mutation(**fault) for fault in tomllib.loads(FAULTS.read_text(encoding="utf-8"))["fault"])


def applies(mutation: Mutation, root: Path) -> bool:
    """Whether the file has the text exactly once."""
    file = root / "jaxpg" / mutation.file
    return file.exists() and file.read_text(encoding="utf-8").count(mutation.old) == 1


def first_failure(tree: Path, arguments: list[str], cache: Path) -> tuple[str, str]:
    """How pytest ended, "failed", "passed", "too long" or "broken", and the first test that failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-o", f"cache_dir={cache}", "--deselect", SEES_TEXT]
    command += arguments
    environment = os.environ | {"PYTHONPATH": str(tree), "MPLBACKEND": "Agg"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "too long", ""
    found = re.search(r"^(?:FAILED|ERROR) tests/(\S+\.py(?:::.+?)?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if found and done.returncode == 1:
        return "failed", found[1]
    return ("passed" if done.returncode in (0, 5) else "broken"), done.stdout[-2000:]  # 5: none of them in this lane


def tried(mutation: Mutation, tree: Path, cache: Path, lane: str | None) -> dict[str, str]:
    """The row of a fault that has been applied: who noticed it, and in which lane."""
    for name in (lane,) if lane else ("quick", "full"):
        selected = ["-n", "auto"] if lane else shlex.split(mutation.tests)
        ended, test = first_failure(tree, [*selected, *(["-m", "full"] if name == "full" else [])], cache)
        if ended == "failed":
            return {"lane": name, "noticed": test}
        if ended != "passed":
            print(test)
            return {"lane": name, "noticed": f"({ended})"}
    return {"lane": lane or "none", "noticed": "nobody"}


def written(results: dict[str, dict[str, str]], root: Path) -> str:
    """The table."""
    rows = ["| fault | file | lane | noticed by |", "|---|---|---|---|"]
    for mutation in MUTATIONS:
        result = results.get(mutation.name, {"lane": "–", "noticed": "not run"})
        lost = "" if applies(mutation, root) else " (its text is no longer there)"
        noticed = f"`{result['noticed']}`" if "::" in result["noticed"] else result["noticed"]
        rows.append(f"| {mutation.name}{lost} | `{mutation.file}` | {result['lane']} | {noticed} |")
    run = [results[m.name] for m in MUTATIONS if m.name in results]
    counts = {lane: sum(r["lane"] == lane for r in run) for lane in ("quick", "full", "none")}
    return (
        "# Deliberate faults, and the first test that notices each\n\n"
        f"Written by `benchmarks/mutations.py`. {len(MUTATIONS)} faults, {len(run)} of them run: the quick lane "
        f"notices {counts['quick']}, the full lane {counts['full']} more, nobody {counts['none']}.\n\n"
        + "\n".join(rows)
        + "\n"
    )


def main() -> None:
    """Apply, test, restore; write the table after every fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of faults")
    parser.add_argument("--lane", choices=["quick", "full"], help="run this whole lane instead of the tests named")
    parser.add_argument("--anchors", action="store_true", help="only say which faults no longer find their text")
    parser.add_argument("--missing", action="store_true", help="only those without a result")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to copy")
    arguments = parser.parse_args()
    lost = [m for m in MUTATIONS if not applies(m, arguments.tree)]
    for mutation in lost:
        print(f"no longer applies: {mutation.name} ({mutation.file})")
    if arguments.anchors:
        sys.exit(bool(lost))
    kept = RESULTS / "mutations.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree, cache = Path(folder) / "tree", Path(folder) / "cache"
        tree.mkdir()
        for name in COPIED:
            copy = shutil.copytree if (arguments.tree / name).is_dir() else shutil.copy
            copy(arguments.tree / name, tree / name)
        for mutation in MUTATIONS:
            chosen = any(part in mutation.name for part in arguments.only)
            if mutation in lost or not chosen or (arguments.missing and mutation.name in results):
                continue
            began, file = time.monotonic(), tree / "jaxpg" / mutation.file
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
            results[mutation.name] = tried(mutation, tree, cache, arguments.lane)
            file.write_text(text, encoding="utf-8")
            print(f"{mutation.name}: {results[mutation.name]} [{time.monotonic() - began:.0f} s]", flush=True)
            kept.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            (RESULTS / "mutations.md").write_text(written(results, arguments.tree), encoding="utf-8")


if __name__ == "__main__":
    main()
