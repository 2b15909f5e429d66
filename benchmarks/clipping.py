"""What clipping the gradients of policy and critic by one norm costs PPO with the library's own settings.

    python benchmarks/clipping.py [--only PATTERN]

The configs were searched with a norm of 0.5, so they cannot say what a default should be. Here every case has the
defaults of `ladder.ppo` and `networks.mlp`, or settings near those of throughput.py. The return is that of episodes
which ended in an iteration, as a mean over the whole run and over its last tenth; what stands behind ± is the standard
error over seeds. Writes results/clipping.json. On a CPU seeds and norms go one after the other.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from command_lines import chosen, pattern
from result_files import put
from rich.console import Console
from rich.table import Table

from jaxpg import compiler_options, envs, ladder, networks
from jaxpg.policy_gradient import policy_gradient
from jaxpg.training.provenance import describe_machine

RESULTS = Path(__file__).parent / "results" / "clipping.json"
NORMS = (0.5, 1.0, 2.0, 5.0, 1e9)  # a traced setting cannot be None: no gradient is as large as the last one
SEEDS = 8


class Case(NamedTuple):
    """A task and how long PPO is trained on it, with settings in place of its defaults."""

    environment: str
    steps: int
    settings: tuple[tuple[str, Any], ...] = ()
    normalized: bool = False

    @property
    def name(self) -> str:
        changed = ", ".join(f"{name} = {value}" for name, value in self.settings)
        return self.environment + (", normalised" if self.normalized else "") + (f", {changed}" if changed else "")


CASES = (
    Case("CartPole-v1", 500_000),
    Case("CartPole-v1", 1_000_000, (("learning_rate", 3e-4), ("value_clip", 0.2))),
    Case("Acrobot-v1", 500_000),
    Case("Catch-bsuite", 200_000),
    Case("Pendulum-v1", 300_000, normalized=True),
    Case("Breakout-MinAtar", 500_000),
)


def returns(case: Case) -> np.ndarray:
    """The return of every iteration, `[NORMS, SEEDS, iterations]`; NaN where no episode ended."""
    env = envs.make(case.environment)
    policy, critic = networks.mlp(env)

    def train(norm: jax.Array, key: jax.Array) -> jax.Array:
        algorithm = ladder.ppo(max_grad_norm=norm, **dict(case.settings))
        learner = policy_gradient(
            env, policy, critic, algorithm, normalize_observations=case.normalized, scale_rewards=case.normalized
        )
        init_key, run_key = jax.random.split(key)
        iterations = case.steps // (64 * 128)  # the defaults of num_envs and num_steps
        keys = jax.random.split(run_key, iterations)
        return jax.lax.scan(learner.step, learner.init(init_key), keys)[1]["return"]

    def of_each_seed(norm: jax.Array) -> jax.Array:
        return jax.lax.map(lambda key: train(norm, key), jax.random.split(jax.random.key(7), SEEDS))

    program = jax.jit(lambda norms: jax.lax.map(of_each_seed, norms), compiler_options=compiler_options())
    return np.asarray(program(jnp.array(NORMS)))


def summary(found: np.ndarray) -> dict[str, list[list[float]]]:
    """Mean over seeds and its standard error, of each norm, over the whole run and over its last tenth."""
    last = max(1, found.shape[-1] // 10)
    parts = {"whole run": found, "last tenth": found[..., -last:]}

    def estimates(part: np.ndarray) -> list[list[float]]:
        of_seeds = np.nanmean(part, -1)
        return np.stack([of_seeds.mean(-1), of_seeds.std(-1, ddof=1) / SEEDS**0.5], -1).tolist()

    return {name: estimates(part) for name, part in parts.items()}


def main() -> None:
    """Train, print a line per case and part as soon as it is there, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=pattern, default="", help="only the cases whose name this pattern fits")
    cases = chosen({case.name: case for case in CASES}, parser.parse_args().only)
    console = Console(width=160)
    about = {"machine": describe_machine(), "norms": NORMS, "seeds": SEEDS}
    table = Table("PPO", "steps", "", *(f"{norm:g}" for norm in NORMS[:-1]), "none")
    for name, case in cases.items():
        found = summary(returns(case))
        put(RESULTS, "results", name, found, about)
        for part, estimates in found.items():
            table.add_row(name, f"{case.steps:,}", part, *(f"{mean:.4g} ± {error:.2g}" for mean, error in estimates))
        console.print(table)


if __name__ == "__main__":
    main()
