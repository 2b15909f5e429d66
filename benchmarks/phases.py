"""Where one update of PPO spends its time, phase by phase.

    python benchmarks/phases.py [--environment CartPole-v1] [--envs 64] [--rounds 7]

Each phase is a program of its own that does what the update does there, on arrays of the same shapes: drawing keys,
acting, stepping the environments, resetting them (a fresh start at every step, as exact auto-reset has it), all of
collecting, values and advantages, shuffling (the orders of all epochs, and gathering every minibatch), and the update,
which contains the shuffling. They take turns. Alone, a phase cannot overlap or be fused with its neighbours, so the
parts need not add up to the whole; what the whole takes is measured too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from command_lines import out_file
from rich.console import Console
from rich.table import Table
from workloads import timed

from jaxpg import envs, ladder, networks
from jaxpg.algorithm import make_batch, make_objective
from jaxpg.policy_gradient import policy_gradient
from jaxpg.rollout.collector import action_noise, step_keys
from jaxpg.training import advance, provenance
from jaxpg.update.shuffle import random_permutations

HERE = Path(__file__).resolve().parent
CALLS = 5  # in a turn: the small phases take less than a millisecond


def phases(env_name: str, num_envs: int, settings: dict[str, Any]) -> dict[str, tuple[Callable[..., Any], tuple]]:
    """By name, a program and its arguments."""
    env = envs.make(env_name)
    policy, critic = networks.mlp(env)
    algorithm = ladder.ppo(num_envs=num_envs, **settings)
    learner = policy_gradient(env, policy, critic, algorithm)
    key, steps = jax.random.key(0), settings["num_steps"]
    state = jax.jit(learner.init)(key)
    params, runner = state.params, state.runner.collector
    objective, optimizer = make_objective(policy, critic, algorithm), algorithm.optimizer()
    collect = partial(algorithm.collector.collect, env, policy)
    part = jax.jit(collect)(params.policy, runner, key)[1]

    def over_steps(step: Callable[[Any, jax.Array], Any], carry: Any, keys: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, key: (step(carry, key), None), carry, keys)[0]

    def random_numbers(params: Any, key: jax.Array) -> Any:
        keys = step_keys(key, num_envs, steps, with_reset=True)
        return keys, action_noise(policy, params, runner, keys.action)

    def act(params: Any, obs: Any, action: jax.Array, noise: jax.Array) -> Any:
        def one(obs: jax.Array, noise: jax.Array) -> Any:
            distribution, _ = policy.act(params, (), obs)
            action = distribution.at(noise)
            return action, distribution.log_prob(action)

        def step(carry: Any, noise: jax.Array) -> Any:
            action, log_prob = jax.vmap(one)(obs + 1e-9 * carry[1].sum(), noise)  # or it would be hoisted
            return action, log_prob

        return over_steps(step, (jnp.zeros_like(action), jnp.zeros(num_envs)), noise)

    def environment(state: Any, action: jax.Array, keys: jax.Array) -> Any:
        return over_steps(lambda state, keys: jax.vmap(env.step)(keys, state, action)[0], state, keys)

    def reset(state: Any, keys: jax.Array) -> Any:
        return over_steps(lambda state, keys: jax.vmap(env.reset)(keys)[0], state, keys)

    def advantages(params: Any, part: Any) -> Any:
        return make_batch(policy, critic, algorithm, params, (), jnp.zeros(()), part)[0]

    batch = jax.jit(advantages)(params, part)

    def shuffling(part: Any, key: jax.Array) -> Any:
        rows = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), part.steps)
        orders = random_permutations(key, settings["epochs"], num_envs * steps).reshape(
            settings["epochs"] * settings["num_minibatches"], -1
        )

        def gathered(total: jax.Array, order: jax.Array) -> tuple[jax.Array, None]:
            chosen = jax.tree.map(lambda x: jnp.take(x, order, 1, unique_indices=True, mode="clip"), rows)
            return total + sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(chosen)), None

        return jax.lax.scan(gathered, jnp.zeros(()), orders)[0]

    def update(params: Any, opt_state: Any, batch: Any, key: jax.Array) -> Any:
        return algorithm.update(objective, optimizer, jnp.float32(3e-4), params, opt_state, batch, key)[:2]

    keys, noise = random_numbers(params.policy, key)
    keys, action = keys.env, part.steps.action[0]
    return {
        "random numbers": (random_numbers, (params.policy, key)),
        "acting": (act, (params.policy, part.steps.obs[0], action, noise)),
        "environment": (environment, (runner.env_state, action, keys)),
        "resetting": (reset, (runner.env_state, keys)),
        "collecting, whole": (collect, (params.policy, runner, key)),
        "advantages": (advantages, (params, part)),
        "shuffling": (shuffling, (part, key)),
        "update": (update, (params, state.opt_state, batch, key)),
        "one update, whole": (learner.step, (state, key)),
    }


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", default="CartPole-v1")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7, help="turns, of which the median is taken (default 7)")
    parser.add_argument("--out", type=out_file, help="where to write (default results/phases-ENVIRONMENT-ENVS.json)")
    args = parser.parse_args()
    settings = {"num_steps": 128, "epochs": 4, "num_minibatches": 4}
    programs = {
        name: (jax.jit(function, compiler_options=advance.compiler_options()), arguments)
        for name, (function, arguments) in phases(args.environment, args.envs, settings).items()
    }
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for turn in range(args.rounds + 1):
        for name, (program, arguments) in programs.items():
            cost = timed(lambda program=program, arguments=arguments: [program(*arguments) for _ in range(CALLS)])[1]
            if turn:
                costs[name].append(cost)
    milliseconds = {
        name: {kind: 1e3 / CALLS * median(cost[kind] for cost in found) for kind in ("cpu", "wall")}
        for name, found in costs.items()
    }
    whole = milliseconds["one update, whole"]["cpu"]
    table = Table("phase", "CPU ms", "wall ms", "of the whole", title=f"{args.environment}, {args.envs} environments")
    for name, cost in milliseconds.items():
        table.add_row(name, f"{cost['cpu']:.2f}", f"{cost['wall']:.2f}", f"{cost['cpu'] / whole:.0%}")
    Console().print(table)
    out = args.out or HERE / "results" / f"phases-{args.environment}-{args.envs}.json"
    out.write_text(
        json.dumps({"machine": provenance.describe_machine(), "milliseconds": milliseconds}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
