"""What training needs of memory, and what saves some of it, as XLA's analysis of the compiled program states it.

    python benchmarks/memory.py [--size 1M] [--columns 64]

Nothing is run: each row is compiled, and says what one update holds at once, split into the state (parameters, the
optimizer's moments, environments), which is updated in place, and all that is alive beside it at the worst moment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from command_lines import out_file
from language import LONG, SIZES, endless, large_learner, learner_of, transformer_of, whole_groups
from result_files import write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from work import update_bytes

from jaxpg import envs, ladder, networks
from jaxpg.policy_gradient import policy_gradient
from jaxpg.training import provenance
from jaxpg.types import Learner

HERE = Path(__file__).resolve().parent


def control(name: str, algorithm: Callable[..., Any], **settings: Any) -> Learner:
    """A learner with the MLP of 64 x 64."""
    env = envs.make(name)
    return policy_gradient(env, *networks.mlp(env), algorithm(**settings))


def text(size: str, columns: int, network: dict[str, Any] | None = None, **settings: Any) -> Learner:
    """A learner of completions of 48 tokens, one gradient step per batch."""
    env = endless()
    return learner_of(*transformer_of(env, size, **(network or {})), env, columns, **settings)


def cases(size: str, columns: int) -> dict[str, Callable[[], Learner]]:
    """By what a table calls it, how to make the learner."""
    ppo = ladder.ppo
    found: dict[str, Callable[[], Learner]] = {
        f"PPO, {name}, {n:,} environments x 128": lambda name=name, n=n: control(name, ppo, num_envs=n)
        for name in ("CartPole-v1", "Breakout-MinAtar")
        for n in (64, 1024)
    }
    found["A2C, CartPole-v1, 1,024 environments x 5"] = lambda: control(
        "CartPole-v1", ladder.a2c, num_envs=1024, num_steps=5
    )
    found["GRPO, CartPole-v1, 256 episodes of 500"] = lambda: control("CartPole-v1", ladder.grpo, num_envs=256)
    options: dict[str, dict[str, Any]] = {
        "texts side by side": {},
        "all texts at once": {"chunk_rows": columns},
        "chunks of 8 texts": {"chunk_rows": 8},
        "logits in 8 parts": {"network": {"logit_chunks": 8}},
        "rematerialised": {"network": {"remat": True}},
        "bfloat16": {"network": {"dtype": "bfloat16"}},
        "with a reference": {"algorithm": "grpo, reference"},
        "PPO with a critic": {"algorithm": "ppo"},
        "PPO, critic on the policy's features": {"algorithm": "ppo", "network": {"shared": True}},
    }
    for label, option in options.items():
        found[f"{size} transformer, {label}"] = lambda option=option: text(size, columns, **option)
    for dtype in ("float32", "bfloat16"):
        for remat in (False, True):
            label = f"0.5B transformer, 8 texts of {2 * LONG} tokens, {dtype}{', rematerialised' if remat else ''}"
            found[label] = partial(large_learner, "0.5B", 8, dtype=dtype, remat=remat)
    return found


def main() -> None:
    """Compile, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1M", help="of the transformer (default 1M)")
    parser.add_argument("--columns", type=whole_groups, default=64, help="completions side by side (default 64)")
    parser.add_argument("--out", type=out_file, default=HERE / "results" / "memory.json")
    args = parser.parse_args()
    console = Console()
    made, machine, found = cases(args.size, args.columns), provenance.describe_machine(), {}
    for name, make in track(made.items(), console=console, transient=True):
        found[name] = update_bytes(make())
        write(args.out, {"machine": machine, "bytes": found})
    table = Table("one update", "state, MiB", "beside it, MiB")
    for name, bytes_ in found.items():
        table.add_row(name, *(f"{x / 2**20:,.1f}" for x in bytes_.values()))
    console.print(table)


if __name__ == "__main__":
    main()
