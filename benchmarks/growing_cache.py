"""What a KV cache that grows while a completion is written saves, and costs to compile (`Machine.steps_of_room`).

    taskset -c 0 python benchmarks/growing_cache.py [--rounds 5]

A rollout of 64 completions, in groups of 8, each as long as it may be. A cache with room for all tokens from the first
on, and caches that grow in equal parts, take turns in one process with one thread: CPU seconds, medians, and the median
of the ratios within a round; what compiling takes, and what the compiled program holds beside its parameters. Writes
results/growing_cache.json.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import argparse
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
from language import GROUP, SIZES, endless
from result_files import write
from rich.console import Console
from rich.table import Table
from workloads import timed

import jaxpg
from jaxpg import language, rollout
from jaxpg.parallel import machine
from jaxpg.rollout.episodes import MOST_ROOMS
from jaxpg.training.provenance import describe_machine

RESULTS = Path(__file__).parent / "results" / "growing_cache.json"
COLUMNS = 64
CASES = (("0.1M", 24), ("0.1M", 48), ("0.1M", 512), ("1M", 48), ("1M", 128), ("1M", 512), ("10M", 48), ("10M", 256))
"""Weights of the model, and tokens of a completion."""
PARTS = range(1, MOST_ROOMS + 1)


def writing(size: str, tokens: int, parts: int) -> tuple[Any, float]:
    """The compiled rollout whose cache grows in so many parts, with its parameters, and the CPU seconds it took."""
    machine.MACHINES["cpu"] = machine.CPU._replace(steps_of_room=tokens // parts)
    env = endless(tokens=tokens)
    policy, _ = language.transformer(env, **SIZES[size])
    collector = rollout.episodic(num_envs=COLUMNS, group_size=GROUP)
    params = policy.init(jax.random.key(0))

    def collect(params: Any, key: jax.Array) -> jax.Array:
        return collector.collect(env, policy, params, (), key)[1].steps.action

    began = time.process_time()
    program = jax.jit(collect, compiler_options=jaxpg.compiler_options()).lower(params, jax.random.key(1)).compile()
    return (program, params), time.process_time() - began


def measure(size: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row for every number of parts."""
    made = {parts: writing(size, tokens, parts) for parts in PARTS}
    seconds: dict[int, list[float]] = {parts: [] for parts in PARTS}
    for turn in range(rounds + 1):  # the first is not counted
        for parts, ((program, params), _) in made.items():
            taken = timed(partial(program, params, jax.random.key(turn)))[1]["cpu"]
            seconds[parts] += [taken] if turn else []
    return [
        {
            "weights": size,
            "tokens": tokens,
            "parts": parts,
            "seconds": median(seconds[parts]),
            "ratio": median(a / b for a, b in zip(seconds[parts], seconds[1], strict=True)),
            "compile_seconds": compiling,
            "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        }
        for parts, ((program, _), compiling) in made.items()
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    about = describe_machine()
    parts = [f"in {n} parts" for n in PARTS if n > 1]
    table = Table("weights, tokens", "whole", *parts, title="CPU seconds of writing (of compiling)")
    results = []
    for size, tokens in CASES:
        rows = measure(size, tokens, arguments.rounds)
        first, *others = ((row, f"({row['compile_seconds']:.1f})") for row in rows)
        cells = [f"{row['ratio']:.2f} {compiling}" for row, compiling in others]
        table.add_row(f"{size}, {tokens}", f"{first[0]['seconds']:.3f} {first[1]}", *cells)
        results += rows
        write(RESULTS, {"machine": about, "rounds": arguments.rounds, "columns": COLUMNS, "results": results})
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
