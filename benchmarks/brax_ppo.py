"""PPO of jaxpg beside Brax's own PPO on a task of Brax: what each reaches.

    python benchmarks/brax_ppo.py --seeds 5 --peer-seeds 3

jaxpg trains `configs/brax_inverted_pendulum.toml`. Brax trains with the settings that its notebook training.ipynb has
for inverted_pendulum. Both are evaluated on episodes of up to 1,000 steps at the end, and both take their budget from
the command line. Results go to results/brax_ppo.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from jaxpg.cli.main import main as jaxpg

RESULTS = Path(__file__).parent / "results" / "brax_ppo.json"
EPISODES = 32


def ours(seeds: int, steps: int) -> dict:
    """The last evaluation of every seed, by `jaxpg train`."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "run")
        size = ["--seeds", str(seeds), "--steps", str(steps), "--set", f"evaluation_episodes={EPISODES}"]
        start = time.perf_counter()
        command = ["train", "brax_inverted_pendulum", "ppo", *size, "--set", "evaluations=5", "--out", out, "--quiet"]
        assert jaxpg(command) == 0
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "evaluation_return" in row]
    curve = [{"steps": row["steps"][0], "return": row["evaluation_return"]} for row in evaluated]
    return {"steps": steps, "returns": curve[-1]["return"], "curve": curve, "seconds": time.perf_counter() - start}


def theirs(seeds: int, steps: int) -> dict:
    """The last evaluation of every seed, by `brax.training.agents.ppo`."""
    from brax import envs
    from brax.training.agents.ppo import train as ppo

    env, returns, curves = envs.get_environment("inverted_pendulum", backend="spring"), [], []
    start = time.perf_counter()
    for seed in range(seeds):
        curve: list[dict] = []
        ppo.train(
            environment=env, num_timesteps=steps, num_evals=5, reward_scaling=10, episode_length=1000,
            normalize_observations=True, action_repeat=1, unroll_length=5, num_minibatches=32, num_updates_per_batch=4,
            discounting=0.97, learning_rate=3e-4, entropy_cost=1e-2, num_envs=2048, batch_size=1024, seed=seed,
            num_eval_envs=EPISODES, max_devices_per_host=1,
            progress_fn=lambda done, metrics, curve=curve: curve.append(
                {"steps": int(done), "return": float(metrics["eval/episode_reward"])}
            ),
        )  # fmt: skip
        returns.append(curve[-1]["return"])
        curves.append(curve)
        print("Brax", seed, curve, flush=True)
    done = curves[0][-1]["steps"]
    return {"steps": done, "returns": returns, "curve": curves, "seconds": time.perf_counter() - start}


def main() -> None:
    """Train both and write what they reach."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--peer-seeds", type=int, default=3)
    parser.add_argument("--peer-steps", type=int, default=2_000_000)
    options = parser.parse_args()
    result = {"jaxpg": ours(options.seeds, options.steps)}
    print(result, flush=True)
    result["brax"] = theirs(options.peer_seeds, options.peer_steps)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
