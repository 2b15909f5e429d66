"""The same bits before and after a change: hashes of one short run of every algorithm of every config.

    python benchmarks/same_bits.py before.json            # in a checkout of the commit before
    python benchmarks/same_bits.py after.json             # in this one
    python benchmarks/same_bits.py --compare before.json after.json

A run is hashed column by column (metrics.jsonl, without wall times) and array by array (the last checkpoint), and the
hashes are sorted, so that metrics and arrays may be renamed and moved but not change. Both must run on one machine: the
last digits depend on the processor and on the version of jax.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from command_lines import out_file
from result_files import read, write

CONFIGS = Path(__file__).parent.parent / "configs"
TIMES = ("seconds", "chunk_seconds")
SHORT = {"evaluations": "1", "evaluation_episodes": "16", "evaluation_samples": "1"}


def cases() -> Iterator[tuple[str, str, int]]:
    """(task, algorithm, steps) of every section of every config, and of the rungs that no section of control names."""
    for path in sorted(CONFIGS.glob("*.toml")):
        raw = tomllib.loads(path.read_text())
        algorithms = [name for name, x in raw.items() if isinstance(x, dict) and name not in TABLES]
        algorithms += ["cispo"] if path.stem == "cartpole" else []
        for algorithm in algorithms:
            yield path.stem, algorithm, 6_000 if raw.get("network", {}).get("kind") == "transformer" else 20_000


TABLES = ("network", "environment_settings", "wrappers", "rewards", "pairs", "demonstrations", "stages")


def digest(values: np.ndarray) -> str:
    """A hash of an array's type, shape and bytes."""
    return hashlib.sha256(f"{values.dtype}{values.shape}".encode() + values.tobytes()).hexdigest()[:16]


def hash_run(directory: Path) -> dict[str, list[str]]:
    """Sorted hashes of the metrics and of the arrays of the last checkpoint of a run."""
    import orbax.checkpoint as ocp

    written = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in written if any(row["iterations"])]  # of training, which earlier commits have, too
    names = {name for row in rows for name in row} - set(TIMES)
    columns = [json.dumps([row.get(name) for row in rows]) for name in names]
    last = max(path.parent for path in directory.glob("checkpoints/*/manifest.json"))
    arrays = ocp.StandardCheckpointer().restore(last.absolute() / "state")
    return {
        "metrics": sorted(hashlib.sha256(column.encode()).hexdigest()[:16] for column in columns),
        "arrays": sorted(digest(np.asarray(x)) for x in arrays.values()),
        "parameters": sorted(digest(np.asarray(x)) for name, x in arrays.items() if ".params" in name),
    }


def train(task: str, algorithm: str, steps: int, directory: Path) -> None:
    """One seed of a short run, by the command line, without the stages that it may begin with."""
    from jaxpg.__main__ import main

    settings = [word for name, value in SHORT.items() for word in ("--set", f"{name}={value}")]
    settings += ["--set", "initial=none", "--set", "reward=none"]
    where = ["--out", str(directory), "--devices", "1", "--quiet", "--seeds", "1", "--steps", str(steps)]
    if code := main(["train", task, algorithm, *where, *settings]):
        raise SystemExit(f"{task} {algorithm} ended with exit code {code}")


def compare(before: dict, after: dict) -> int:
    """Print the runs of before that differ or are missing now; how many differences there are."""
    missing = [name for name in before if name not in after]
    for name in missing:
        print(f"{name}: missing")
    different = len(missing)
    for name, expected in {name: x for name, x in before.items() if name in after}.items():
        for kind, hashes in expected.items():
            if after[name].get(kind) != hashes:
                missing = len(set(hashes) - set(after[name].get(kind, [])))
                print(f"{name}: {missing} of {len(hashes)} {kind} differ")
                different += 1
    print(f"{len(before.keys() & after.keys())} runs of {len(before)}, {different} differences")
    return different


def main() -> int:
    """Hash the runs of this checkout, or compare two files of hashes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=out_file, nargs="?", help="where to write the hashes")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FILE")
    parser.add_argument("--only", nargs="+", metavar="TASK/ALGO", help="these runs alone, such as cartpole/ppo")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th run from the I-th on")
    arguments = parser.parse_args()
    if arguments.compare:
        for path in arguments.compare:
            if not path.exists():
                parser.error(f"--compare: there is no {path}")
        return int(compare(*map(read, arguments.compare)) > 0)
    if arguments.out is None:
        parser.error("give the file to write the hashes to, or --compare with two of them")
    known = {f"{task}/{algorithm}": (task, algorithm, steps) for task, algorithm, steps in cases()}
    if unknown := [name for name in arguments.only or () if name not in known]:
        parser.error(f"--only: there is no run {unknown[0]}; there are {', '.join(known)}")
    index, number = map(int, arguments.part.split("/"))
    hashes = {}
    for task, algorithm, steps in [known[name] for name in arguments.only or known][index::number]:
        with tempfile.TemporaryDirectory() as directory:
            train(task, algorithm, steps, Path(directory) / "run")
            hashes[f"{task}/{algorithm}"] = hash_run(Path(directory) / "run")
        print(f"{task}/{algorithm}", flush=True)
        write(arguments.out, hashes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
