"""What it costs, and saves, to work through the queries of a text in blocks (`Machine.queries_at_once`).

    taskset -c 0 python benchmarks/attention.py [--rounds 5]

The gradient of a decoder of two layers of width 128, four queries to two keys, by texts of S tokens, as many as make
some thousand tokens. All queries at once and blocks of several sizes take turns in one process with one thread: CPU
seconds, medians, relative to all at once, and what the compiled program holds beside its parameters. Writes
results/attention.json.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from result_files import write
from rich.console import Console
from rich.table import Table
from workloads import timed

from jaxpg.models.decoder import Decoder, DecoderConfig
from jaxpg.parallel import machine
from jaxpg.training.provenance import describe_machine

RESULTS = Path(__file__).parent / "results" / "attention.json"
TEXTS = {80: 48, 128: 32, 200: 20, 256: 16, 512: 8, 1024: 4, 2048: 2, 4096: 1}
"""The tokens of a text, and how many texts there are."""
SIZES = (256, 128, 64, 32)


def gradient(tokens: int, texts: int, at_once: int) -> Any:
    """The compiled gradient of the squared features by the parameters, of so many queries at once."""
    machine.MACHINES["cpu"] = machine.CPU._replace(queries_at_once=at_once)
    config = DecoderConfig(width=128, layers=2, heads=4, kv_heads=2, expansion=2.67, dtype="float32", remat=False)
    model = Decoder(config, vocabulary=64, outputs=64, tied=False)
    text = jax.random.randint(jax.random.key(0), (texts, tokens), 0, 64)
    params = model.init(jax.random.key(1), text[0, :2], method="outputs_of")
    real = jnp.ones_like(text, bool)
    program = jax.jit(jax.grad(lambda params: (model.apply(params, text, real)[0] ** 2).sum())).lower(params).compile()
    return program, params


def measure(tokens: int, texts: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds relative to all queries at once, and temporary bytes, for every size below the text's."""
    sizes = (tokens, *(size for size in SIZES if size < tokens))
    programs = {size: gradient(tokens, texts, size) for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(rounds + 1):  # the first is not counted
        for size, (program, params) in programs.items():
            taken = timed(lambda program=program, params=params: program(params))[1]["cpu"]
            seconds[size] += [taken] if turn else []
    found = {size: program.memory_analysis().temp_size_in_bytes for size, (program, _) in programs.items()}
    return [
        {
            "tokens": tokens,
            "texts": texts,
            "at_once": size,
            "seconds": median(seconds[size]),
            "ratio": median(a / b for a, b in zip(seconds[size], seconds[tokens], strict=True)),
            "temporary_bytes": found[size],
        }
        for size in sizes
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    about = describe_machine()
    table = Table("tokens x texts", "at once", *map(str, SIZES), title="seconds relative to all at once (temporary MB)")
    results = []
    for tokens, texts in TEXTS.items():
        rows = measure(tokens, texts, arguments.rounds)
        cells = {row["at_once"]: f"{row['ratio']:.2f} ({row['temporary_bytes'] / 1e6:,.0f})" for row in rows}
        table.add_row(f"{tokens:,} x {texts}", cells.pop(tokens), *(cells.get(size, "") for size in SIZES))
        results += rows
        write(RESULTS, {"machine": about, "rounds": arguments.rounds, "results": results})
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
