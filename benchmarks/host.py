"""Environments on the host: the door beside the bare vector environment, and PPO through it beside stable-baselines3.

    peer/bin/python benchmarks/host.py [--rounds 5] [--environments CartPole-v1 LunarLander-v3]

Writes results/host.json. The Python needs jaxpg, gymnasium[box2d], stable-baselines3 and torch. Both sides of a ratio
do the same work in turns within one process, and compiling is not timed: CPU seconds of all threads, and medians of the
ratios within a round. The bare vector environment is `gymnasium.make_vec(..., vectorization_mode="sync")`, which is
given random actions and resets by itself; the door does the same inside of a compiled rollout, with every step
recorded. A step is one of an environment, a reset none. PPO has the settings of throughput.py on both sides.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import jax
import peers
import workloads
from result_files import put_row
from work import Program, Workload

from jaxpg.parallel import host_callback
from jaxpg.training.provenance import describe_machine

RESULTS = Path(__file__).parent / "results"
STEPS = {"CartPole-v1": 32_768, "LunarLander-v3": 16_384}


def vector(env_name: str, num_envs: int, steps: int) -> Workload:
    """Gymnasium's vector environment with random actions, and nothing else.

    Its work is the steps of its environments. It resets an environment whose episode is over in place of a step
    (`AutoresetMode.NEXT_STEP`, its default), which of CartPole under random actions is one of 23.
    """
    env = gymnasium.make_vec(env_name, num_envs, vectorization_mode="sync")
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(steps // num_envs)]

    def run() -> None:
        for action in actions:
            env.step(action)

    resets = 0
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        resets += int((terminated | truncated).sum())
    return Workload(lambda: Program(run), steps // num_envs * num_envs - resets)


def compare(ours: Workload, theirs: Workload, rounds: int) -> dict[str, Any]:
    """Steps per CPU second of both, and how many times as fast ours is: the median, and all."""
    programs = [(x.build(), x.work) for x in (ours, theirs)]
    rates: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for i, (program, work) in enumerate(programs):
            _, seconds = workloads.timed(program.run)
            if turn:  # the first run compiles
                rates[i].append(work / seconds["cpu"])
    host_callback.raise_failure()
    ratios = [a / b for a, b in zip(*rates, strict=True)]
    return {"ours": median(rates[0]), "theirs": median(rates[1]), "ratio": median(ratios), "ratios": ratios}


def main() -> None:
    """Measure, print and write, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--environments", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--num-envs", nargs="+", type=int, default=[8, 64])
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    about = {"machine": describe_machine(), "rounds": arguments.rounds}
    for name in arguments.environments:
        for num_envs in arguments.num_envs:
            door, steps = f"gymnasium:{name}", STEPS[name]
            for what, ours, theirs in (
                ("the door / the bare vector", workloads.collect_random, vector),
                ("PPO / stable-baselines3's", workloads.jaxpg, partial(peers.sb3, agents=1, devices=1)),
            ):
                settings = {"num_envs": num_envs, "steps": steps}
                row = compare(ours(door, agents=1, devices=1, **settings), theirs(name, **settings), arguments.rounds)
                case = {"what": what, "environment": name, "num_envs": num_envs}
                put_row(RESULTS / "host.json", "results", tuple(case), {**case, **row}, about)
                print(
                    f"{name}, {num_envs}: {what} {row['ratio']:.2f} ({row['ours']:,.0f} / {row['theirs']:,.0f} per s)"
                )


if __name__ == "__main__":
    main()
