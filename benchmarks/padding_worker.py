"""GRPO on CartPole from new policies, a run for every line of the standard input: the program of padding.py.

    python benchmarks/padding_worker.py SETTINGS

SETTINGS are those of `ladder.grpo`, as JSON. It imports nothing but jaxpg, of whichever checkout PYTHONPATH names.
"""

from __future__ import annotations

import json
import sys
import time

import jax

from jaxpg import envs, ladder, networks
from jaxpg.policy_gradient import policy_gradient

STEPS, SEEDS = 50_000, 5


def main() -> None:
    """Compile, say so, and print what every run cost, by seed: CPU seconds, and the iterations and steps they took."""
    env = envs.make("CartPole-v1")
    algorithm = ladder.grpo(**json.loads(sys.argv[1]))
    learner = policy_gradient(env, *networks.mlp(env, hidden=(64, 64)), algorithm)
    init, step = jax.jit(learner.init), jax.jit(learner.step, donate_argnums=0)

    def run() -> dict[str, float]:
        iterations = steps = 0
        for seed in range(SEEDS):
            state, run_key = init(jax.random.key(seed)), jax.random.key(100 + seed)
            metrics = {"steps": 0}
            while metrics["steps"] < STEPS:  # those of all iterations so far
                state, metrics = step(state, jax.random.fold_in(run_key, iterations))
                iterations += 1
            steps += int(metrics["steps"])
        return {"iterations": iterations / SEEDS, "steps": steps / SEEDS}

    run()
    print(json.dumps({"work": STEPS * SEEDS, "bytes": 0, "versions": {}}), flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        found = run()
        print(json.dumps({"cpu": (time.process_time() - began) / SEEDS, **found}), flush=True)


if __name__ == "__main__":
    main()
