"""One run of Brax's own PPO for suites.py, in a Python with Brax and a jax on which it runs, and without jaxpg.

    PEER/bin/python benchmarks/brax_peer.py SEED published|small STEPS EPISODES

`published` are the settings of Brax's notebooks/training.ipynb, but for its 2 M steps; `small` has batches and networks
of the size of configs/brax_inverted_pendulum.toml. Prints the returns of whole episodes on fresh environments under the
final policy, sampled and greedy, as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import brax
import jax
import jax.numpy as jnp
from brax import envs
from brax.training.agents.ppo import networks, train

ENVIRONMENT, BACKEND, LIMIT = "inverted_pendulum", "spring", 1000
PUBLISHED: dict[str, Any] = {
    "reward_scaling": 10,
    "episode_length": LIMIT,
    "normalize_observations": True,
    "action_repeat": 1,
    "unroll_length": 5,
    "num_minibatches": 32,
    "num_updates_per_batch": 4,
    "discounting": 0.97,
    "learning_rate": 3e-4,
    "entropy_cost": 1e-2,
    "num_envs": 2048,
    "batch_size": 1024,
}
SMALL = PUBLISHED | {
    "reward_scaling": 0.1,
    "unroll_length": 16,
    "num_minibatches": 8,
    "discounting": 0.99,
    "learning_rate": 1e-3,
    "entropy_cost": 0.0,
    "num_envs": 16,
    "batch_size": 16,
    "max_grad_norm": 0.5,
    "clipping_epsilon": 0.2,
    "network_factory": partial(
        networks.make_ppo_networks,
        policy_hidden_layer_sizes=(64, 64),
        value_hidden_layer_sizes=(64, 64),
        activation=jnp.tanh,
    ),
}
SETTINGS = {"published": PUBLISHED, "small": SMALL}


def returns(env: envs.Env, act: Callable[..., Any], key: jax.Array, episodes: int) -> jax.Array:
    """Undiscounted returns of episodes of at most LIMIT steps, `[episodes]`."""

    def step(carry: tuple[Any, jax.Array], key: jax.Array) -> tuple[tuple[Any, jax.Array], jax.Array]:
        state, alive = carry
        actions, _ = act(state.obs, key)
        state = jax.vmap(env.step)(state, actions)
        return (state, alive * (1 - state.done)), alive * state.reward

    reset_key, step_key = jax.random.split(key)
    state = jax.vmap(env.reset)(jax.random.split(reset_key, episodes))
    keys = jax.random.split(step_key, LIMIT)
    return jax.lax.scan(step, (state, jnp.ones(episodes)), keys)[1].sum(0)


def main() -> None:
    """Train and score one seed."""
    seed, steps, episodes = int(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])
    settings = SETTINGS[sys.argv[2]] | {"num_timesteps": steps}
    env = envs.get_environment(ENVIRONMENT, backend=BACKEND)
    reached = [0]
    began = time.process_time()
    make_policy, params, _ = train.train(
        env, seed=seed, run_evals=False, policy_params_fn=lambda steps, *_: reached.append(int(steps)), **settings
    )
    seconds = time.process_time() - began
    found = {
        name: jax.jit(
            lambda key, greedy=greedy: returns(env, make_policy(params, deterministic=greedy), key, episodes)
        )(jax.random.key(10_000 + seed)).tolist()
        for name, greedy in (("sampled", False), ("greedy", True))
    }
    versions = {"brax": brax.__version__, "jax": jax.__version__}
    print(json.dumps({"steps": reached[-1], "cpu_seconds": seconds, **found, "versions": versions}))


if __name__ == "__main__":
    main()
