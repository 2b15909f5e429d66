"""The time to the first progress line of `jaxpg train`, on the first start and on every later one.

    python benchmarks/cold_start.py [--rounds 3]

Each round starts from an empty cache of compiled programs, then starts again with what the first start left there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from command_lines import out_file
from rich.console import Console
from throughput import HERE, busy_machine

TRAIN = ("train", "cartpole", "ppo")


def seconds_to_first_progress(home: Path, run: str) -> float:
    """From the start of the process to the first line that counts steps; the run is then ended."""
    command = [sys.executable, "-m", "jaxpg", *TRAIN, "--out", str(home / run)]
    environment = os.environ | {"JAXPG_CACHE": str(home / "cache")}
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "steps, compiled in" in line:
                waited = time.perf_counter() - begin
                process.kill()
                return waited
    raise SystemExit(f"jaxpg {' '.join(TRAIN)} showed no progress")


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="first and later starts to time (default 3)")
    parser.add_argument("--out", type=out_file, default=HERE / "results" / "cold_start.json")
    args = parser.parse_args()

    waits: dict[str, list[float]] = {"first": [], "later": []}
    result = {"machine": busy_machine(), "command": " ".join(("jaxpg", *TRAIN)), "seconds_to_first_progress": waits}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as home:
            for start in waits:
                waits[start].append(seconds_to_first_progress(Path(home), start))
    for start, seconds in waits.items():
        Console().print(f"{start} start: {median(seconds):.1f} s to the first progress line")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
