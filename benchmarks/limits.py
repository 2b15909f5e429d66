"""What bounds a loop: the bare environment, the matrix products of the networks, memory."""

from __future__ import annotations

from functools import partial, reduce
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from work import PPO, Workload, compiled


def bare(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The environment itself: a scan of gymnax's own step with its auto-reset, random actions."""
    import gymnax

    env, params = gymnax.make(env_name)
    sample = jax.vmap(env.action_space(params).sample)
    iterations = max(1, steps // (num_envs * PPO.num_steps))

    def init(key: jax.Array) -> Any:
        return jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key, num_envs), params)[1], key

    def step(state: Any, key: jax.Array) -> tuple[Any, Any]:
        action_key, step_key = jax.random.split(key)
        action = sample(jax.random.split(action_key, num_envs))
        keys = jax.random.split(step_key, num_envs)
        obs, state, reward, terminated, truncated, _ = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
            keys, state, action, params
        )
        return state, (obs, action, reward, terminated, truncated)

    def iteration(state: Any, _: None) -> tuple[Any, Any]:
        env_state, key = state
        key, scan_key = jax.random.split(key)
        env_state, batch = jax.lax.scan(step, env_state, jax.random.split(scan_key, PPO.num_steps))
        return (env_state, key), jax.tree.map(jnp.sum, batch)

    run = partial(jax.lax.scan, iteration, xs=None, length=iterations)
    return compiled(jax.jit(init), run, iterations * num_envs * PPO.num_steps)


def network_widths(env_name: str) -> list[list[int]]:
    """The layer widths of actor and critic, from the flattened observation to the output."""
    import gymnax
    import numpy as np

    env, params = gymnax.make(env_name)
    inputs = int(np.prod(env.observation_space(params).shape))
    space = env.action_space(params)
    return [[inputs, *PPO.hidden, getattr(space, "n", None) or space.shape[0]], [inputs, *PPO.hidden, 1]]


def forward_flops(widths: list[int]) -> int:
    """Multiplications and additions of one row going through the layers' matrices."""
    return sum(2 * a * b for a, b in pairwise(widths))


def gradient_flops(widths: list[int]) -> int:
    """Forward, the gradient of every matrix, and of every layer's input but the first."""
    return 3 * forward_flops(widths) - 2 * widths[0] * widths[1]


def ppo_flops_per_step(env_name: str) -> int:
    """What the matrices of PPO need per environment step: act, one value, and the gradients of every epoch."""
    return sum(forward_flops(w) + PPO.epochs * gradient_flops(w) for w in network_widths(env_name))


def matmul(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The gradient of the two networks without biases and activations: nothing but their matrix products.

    `num_envs` is the number of rows; about as many FLOPs are done as PPO's updates need for STEPS environment steps.
    """
    widths = network_widths(env_name)
    rounds = max(1, steps * PPO.epochs // num_envs)

    def init(key: jax.Array) -> Any:
        rows = jax.random.normal(key, (num_envs, widths[0][0]))
        matrices = [[jax.random.normal(key, ab) / ab[0] ** 0.5 for ab in pairwise(w)] for w in widths]
        return rows, matrices

    def loss(matrices: Any, rows: jax.Array) -> jax.Array:
        outputs = [reduce(jnp.dot, m, rows) for m in matrices]
        return sum(0.5 * jnp.sum(o * o) for o in outputs) / rows.shape[0]

    def iteration(state: Any, _: None) -> tuple[Any, None]:
        rows, matrices = state
        gradient = jax.grad(loss)(matrices, rows)
        return (rows, jax.tree.map(lambda m, g: m - 1e-3 * g, matrices, gradient)), None

    run = partial(jax.lax.scan, iteration, xs=None, length=rounds)
    return compiled(jax.jit(init), run, rounds * num_envs * sum(gradient_flops(w) for w in widths))


def copy(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """Bytes through memory: 256 MiB read and written, sixteen times."""
    size, rounds = 2**26, 16

    def iteration(state: Any, _: None) -> tuple[Any, None]:
        return state + 1.0, None

    run = partial(jax.lax.scan, iteration, xs=None, length=rounds)
    return compiled(jax.jit(lambda key: jnp.zeros(size)), run, rounds * size * 4 * 2)
