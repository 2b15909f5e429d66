"""Training on many accelerators that are not here: does it fit, and what do the chips say to each other?

    pip install -e '.[aot]'                                     # in an environment of its own
    python benchmarks/multichip.py [--targets ...] [--cases ...]

Programs for 1 to 256 chips, compiled and not run (see aot.py), of shapes alone, so that 8 billion weights take no
memory here. Data-parallel: the work of a chip stays the same, PPO on 2,048 environments or GRPO of a model of 10 M
weights on 64 completions. Shared (`--mesh shard=N`): GRPO of a model with the shape of Qwen2.5-1.5B or of Llama 3 8B,
in bfloat16 with float32 weights and Adam, recomputing blocks; 16 completions a chip, 256 tokens after prompts of 256.
On one chip: 8 such completions of a model with the shape of Qwen2.5-0.5B, with and without recomputing.

Of each chip: what it holds from one update to the next, and beside it at the worst moment. Exchanges: at a token, in an
update outside of the chunks of its gradient, and for each chunk of 16,384 tokens. Results are written one by one into
results/multichip.json; what is there of this commit and these packages is not compiled again. TPUs can be asked for:
`--targets "tpu v5e"`, whose compiler takes a minute to four for a program.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from aot import compile_missing
from aot_worker import CHIPS, TARGETS
from command_lines import out_file
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results" / "multichip.json"


def row(target: str, case: str, found: dict[str, Any]) -> tuple[str, ...]:
    """One program: whether it fits, and what it holds and exchanges."""
    if "failed" in found:
        return target, case, "no", *[""] * 5, found["failed"][-80:]
    held, beside = found["argument_bytes"], found["temporary_bytes"]
    once, update = found["once"], found["update"]
    chunk = update.get("exchanged_bytes", 0) - once.get("exchanged_bytes", 0)
    return (
        target,
        case,
        "yes" if held + beside < TARGETS[target].bytes else "no",
        f"{held / 1e9:,.2f}",
        f"{beside / 1e9:,.2f}",
        "" if found["token_exchanges"] is None else f"{found['token_exchanges']}",
        f"{once.get('exchanges', 0)} ({once.get('exchanged_bytes', 0) / 1e6:,.1f} MB)",
        f"{update.get('exchanges', 0) - once.get('exchanges', 0)} ({chunk / 1e6:,.1f} MB)" if chunk else "",
        f"{found['compile_s']['cpu']:.0f}",
    )


def main() -> None:
    """Compile what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["cuda H100"], choices=list(TARGETS), metavar="TARGET")
    parser.add_argument("--cases", nargs="+", default=list(CHIPS), choices=list(CHIPS), metavar="CASE")
    parser.add_argument("--fresh", action="store_true", help="compile again what is in the results")
    parser.add_argument("--out", type=out_file, default=RESULTS)
    arguments = parser.parse_args()
    wanted = [(target, "jaxpg", case) for target in arguments.targets for case in arguments.cases]
    path = os.environ.get("PYTHONPATH", "")
    found = compile_missing(wanted, arguments.out, lambda library: (None, path), fresh=arguments.fresh)
    heads = ("machine", "program", "fits", "state, GB a chip", "beside it", "at a token", "in an update", "in a chunk")
    table = Table(*heads, "compile CPU s", title="Compiled, not run", title_justify="left")
    for target, _, case in wanted:
        table.add_row(*row(target, case, found[target, "jaxpg", case]))
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
