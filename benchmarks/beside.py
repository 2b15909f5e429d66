"""Run the code of other libraries that docs/beside.md shows, so that what is counted there is code that works.

    python benchmarks/beside.py --python PEERS/bin/python --cleanrl CLONE [--only rejax] [--match Resume]

PEERS is a virtual environment with stable_baselines3, rejax, tyro, tensorboard and matplotlib, CLONE a checkout of
CleanRL. Each block runs in an empty directory. Numbers of environment steps are divided by `--shorter`, and loops of a
shell go over their first two values; nothing else is changed. CleanRL's code are changes of its ppo.py, which are made
in a copy of it. Writes results/beside.json: the version of each library, and the seconds of each task or its error.
TRL's code is not run: it needs a model of the Hugging Face hub.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from command_lines import pattern, require_package
from result_files import read, write

from jaxpg.training.provenance import describe_machine

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "beside.md"
RESULTS = ROOT / "benchmarks" / "results" / "beside.json"
PACKAGES = {"Stable-Baselines3": "stable_baselines3", "rejax": "rejax"}


class Example(NamedTuple):
    """What the page shows for a task in a library: blocks of (language, code)."""

    task: str
    peer: str
    blocks: list[tuple[str, str]]


def examples(page: str) -> Iterator[Example]:
    """Those of all libraries but jaxpg, whose code the tests run."""
    _, *parts = re.split(r"^## (.*)$", page, flags=re.MULTILINE)
    for task, text in zip(parts[::2], parts[1::2], strict=True):
        _, *shown = re.split(r"^\*\*(.*)\*\*$", text, flags=re.MULTILINE)
        for library, code in zip(shown[::2], shown[1::2], strict=True):
            if library != "jaxpg":
                yield Example(task, library, re.findall(r"^```(\w+)\n(.*?)^```$", code, re.MULTILINE | re.DOTALL))


def shortened(code: str, by: int) -> str:
    """The code with fewer environment steps, and loops of a shell over two values."""
    code = re.sub(r"\b\d+_000\b", lambda found: str(max(1, int(found[0]) // by)), code)
    code = re.sub(r"model_(\d+)_steps", lambda found: f"model_{int(found[1]) // by}_steps", code)
    code = re.sub(r" --total-timesteps \d+", "", code)
    code = re.sub(r"(python cleanrl/ppo\.py.*)", rf"\1 --total-timesteps {100_000 // by}", code)
    return re.sub(r"(for \w+ in \S+ \S+)[^;\n]*;", r"\1;", code)


def change_cleanrl(code: str, folder: Path) -> None:
    """Make the change that the page shows in the copy of ppo.py; where, its comment says."""
    path = folder / "ppo.py"
    text = path.read_text()
    if "# in Agent.__init__\n" in code:
        module, _, lines = code.partition("# in Agent.__init__\n")
        text = _before(text, "class Agent(", module + "\n")
        text = _before(text, "    def get_value(", textwrap.indent(lines, " " * 8) + "\n")
    elif "# in place of pg_loss1 and pg_loss2\n" in code:
        text = re.sub(r"\n +pg_loss1 = .*\n +pg_loss2 = .*\n +pg_loss = .*\n", "\n@\n", text)
        text = _before(text, "@\n", textwrap.indent(code, " " * 16)).replace("@\n", "")
    elif "# at the end of ppo.py\n" in code:
        text += textwrap.indent(code, " " * 4)
    else:
        (folder / "corridor.py").write_text(code)
    path.write_text(text)


def _before(text: str, place: str, insert: str) -> str:
    if text.count(place) != 1:
        raise SystemExit(f"CleanRL's ppo.py has {place!r} {text.count(place)} times.")
    return text.replace(place, insert + place)


def run(example: Example, python: str, cleanrl: Path | None, by: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the blocks of an example, one after the other, as one script of a shell."""
    lines = ["set -e", f'python() {{ {shlex.quote(python)} -W ignore "$@"; }}']
    if example.peer == "CleanRL":
        assert cleanrl is not None
        (folder / "cleanrl").mkdir()
        (folder / "cleanrl" / "ppo.py").write_text((cleanrl / "cleanrl" / "ppo.py").read_text())
    for number, (language, code) in enumerate(example.blocks):
        if language == "bash":
            lines.append(shortened(code, by))
        elif example.peer == "CleanRL":
            change_cleanrl(code, folder / "cleanrl")
            if len(example.blocks) == 1:
                lines.append(shortened("python cleanrl/ppo.py", by))
        else:
            (folder / f"block_{number}.py").write_text(shortened(code, by))
            lines.append(f"python block_{number}.py")
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": ""}
    return subprocess.run(["bash", "-c", "\n".join(lines)], cwd=folder, env=environment, capture_output=True, text=True)


def reason(stderr: str) -> str:
    """The last line of a traceback that names an exception; without one, the last line."""
    named = re.findall(r"^[\w.]*(?:Error|Exception|Exit)\b.*", stderr, re.MULTILINE)
    return (named or stderr.strip().splitlines() or ["failed without a word"])[-1]


def versions(wanted: Iterable[str], python: str, cleanrl: Path | None) -> dict[str, str]:
    """The version of each library that is wanted: of CleanRL, which is a file to copy, the commit."""
    ask = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    found = {
        library: subprocess.check_output([python, "-c", ask, package], text=True).strip()
        for library, package in PACKAGES.items()
        if library in wanted
    }
    if cleanrl and "CleanRL" in wanted:
        found["CleanRL"] = subprocess.check_output(["git", "-C", cleanrl, "rev-parse", "HEAD"], text=True)[:7]
    return found


def main() -> None:
    """Run what was asked for; the exit status is 1 if a block does not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has the libraries")
    parser.add_argument("--cleanrl", type=Path, help="a checkout of CleanRL; without it its code is not run")
    parser.add_argument("--only", nargs="+", choices=(*PACKAGES, "CleanRL"))
    parser.add_argument("--match", type=pattern, default="", help="only tasks that this pattern fits")
    parser.add_argument("--shorter", type=int, default=50)
    arguments = parser.parse_args()
    wanted = set(arguments.only or (*PACKAGES, *(("CleanRL",) if arguments.cleanrl else ())))
    if "CleanRL" in wanted and not (arguments.cleanrl and (arguments.cleanrl / "cleanrl" / "ppo.py").exists()):
        parser.error("CleanRL's code needs --cleanrl, a checkout of it, with its cleanrl/ppo.py")
    for library in wanted & PACKAGES.keys():
        require_package(parser, "--python", arguments.python, PACKAGES[library])
    shown = [x for x in examples(PAGE.read_text(encoding="utf-8")) if x.peer in wanted]
    if not (asked := [example for example in shown if arguments.match.search(example.task)]):
        parser.error(f"--match: no task fits; there are {'; '.join(dict.fromkeys(x.task for x in shown))}")
    written = read(RESULTS)
    written["versions"] = written.get("versions", {}) | versions(wanted, arguments.python, arguments.cleanrl)
    written["shorter"] = arguments.shorter
    written["machine"] = describe_machine()
    failed = 0
    for example in asked:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            done = run(example, arguments.python, arguments.cleanrl, arguments.shorter, Path(folder))
        outcome = f"{time.monotonic() - began:.0f} s" if done.returncode == 0 else reason(done.stderr)
        failed += done.returncode != 0
        print(f"{example.peer}: {example.task}: {outcome}", flush=True)
        written.setdefault("tasks", {}).setdefault(example.peer, {})[example.task] = outcome
        write(RESULTS, written)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
