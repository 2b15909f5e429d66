"""The programs that throughput.py and scaling.py time, each served by a process of its own.

    python workloads.py NAME ENVIRONMENT NUM_ENVS AGENTS DEVICES STEPS

A process prints one line of JSON when its program is made, and then one per line that it reads: `run` times one call of
about STEPS environment steps, `compile` times making the program anew, `memory` says how much the process, or on an
accelerator the device, has held at most, `score` what the policy is worth by now. While another process is timed, this
one waits for its next line and uses no core. Whatever goes beyond jax is imported where it is used, so the same file
runs in an environment without jaxpg.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from functools import partial, reduce
from importlib import metadata
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import peers
from work import (
    A2C_LEARNING_RATE,
    A2C_STEPS,
    CLIP,
    ENTROPY,
    EPISODES,
    GAMMA,
    HIDDEN,
    LAMBDA,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NUM_EPOCHS,
    NUM_MINIBATCHES,
    NUM_STEPS,
    VALUE,
    Workload,
    compiled,
    whole_iterations,
)


def jaxpg(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The whole loop of jaxpg's PPO. The settings are those of the peers; all others stay at their defaults."""
    from jaxpg import ladder

    algorithm = ladder.ppo(
        num_envs=num_envs,
        num_steps=NUM_STEPS,
        epochs=NUM_EPOCHS,
        num_minibatches=NUM_MINIBATCHES,
        learning_rate=LEARNING_RATE,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        clip=CLIP,
        value_clip=CLIP,
        entropy_coefficient=ENTROPY,
        value_coefficient=VALUE,
        max_grad_norm=MAX_GRAD_NORM,
    )
    return whole_loop(algorithm, env_name, num_envs, agents, whole_iterations(steps, num_envs, agents))


def jaxpg_a2c(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The whole loop of jaxpg's A2C: one gradient step every five."""
    from jaxpg import ladder

    algorithm = ladder.a2c(
        num_envs=num_envs,
        num_steps=A2C_STEPS,
        learning_rate=A2C_LEARNING_RATE,
        gamma=GAMMA,
        gae_lambda=1.0,
        entropy_coefficient=ENTROPY,
        value_coefficient=VALUE,
        max_grad_norm=MAX_GRAD_NORM,
    )
    return whole_loop(algorithm, env_name, num_envs, agents, whole_iterations(steps, num_envs, agents, A2C_STEPS))


def jaxpg_grpo(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """One iteration of jaxpg's GRPO, groups of 8 whole episodes; steps are counted to the time limit of all of them."""
    from jaxpg import envs, ladder

    algorithm = ladder.grpo(
        num_envs=num_envs, group_size=8, epochs=NUM_EPOCHS, num_minibatches=NUM_MINIBATCHES, gamma=1.0
    )
    one = whole_loop(algorithm, env_name, num_envs, agents, 1)
    return one._replace(work=agents * num_envs * envs.make(env_name).time_limit)


def whole_loop(algorithm: Any, env_name: str, num_envs: int, agents: int, per_agent: int) -> Workload:
    """So many steps of each agent as the command line trains them between two looks of the host."""
    from jaxpg import envs, evaluate, networks, parallel, policy_gradient, train

    env = envs.make(env_name)
    policy, critic = networks.mlp(env, hidden=HIDDEN, activation="tanh")
    learner = policy_gradient.policy_gradient(env, policy, critic, algorithm)
    mesh = parallel.make_mesh(agents, num_envs, jax.devices())
    seeds, start = partial(jax.random.split, num=agents), train.compiled_start(learner)
    specs = parallel.state_specs(jax.eval_shape(start, seeds(jax.random.key(0))), mesh)

    def advance(state: train.RunState, keys: jax.Array) -> Any:
        state, metrics = train.advance(learner, keys, state, state.steps.min() + per_agent)
        return (state, keys), metrics

    def score(state: Any) -> jax.Array:
        learner_state = jax.tree.map(lambda x: x[0], state[0].learner)
        return evaluate.scores(env, learner.actor(learner_state), jax.random.key(0), episodes=EPISODES)["return"]

    per_seed = parallel.PER_SEED
    spread = parallel.spread(advance, mesh, in_specs=(specs, per_seed), out_specs=((specs, per_seed), per_seed))
    return compiled(
        init=lambda key: parallel.place((start(seeds(key)), seeds(key)), (specs, per_seed), mesh),
        run=lambda state: spread(*state),
        work=agents * per_agent,
        compiler_options=train.compiler_options(),
        score=score,
    )


def jaxpg_language(size: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """GRPO on a transformer, a size of language.py in place of an environment; the work is the tokens written."""
    import language

    env = language.endless()
    learner = language.learner_of(*language.transformer_of(env, size), env, num_envs)
    iterations = max(1, steps // (num_envs * language.TOKENS))

    def iteration(state: Any, _: None) -> tuple[Any, Any]:
        key, step_key = jax.random.split(state[1])
        learner_state, metrics = learner.step(state[0], step_key)
        return (learner_state, key), metrics

    run = partial(jax.lax.scan, iteration, xs=None, length=iterations)
    return compiled(jax.jit(lambda key: (learner.init(key), key)), run, iterations * num_envs * language.TOKENS)


def reference(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The whole loop of a plain PPO that is frozen in reference.py."""
    from reference import Settings, loop

    settings = Settings(
        num_envs=num_envs,
        num_steps=NUM_STEPS,
        epochs=NUM_EPOCHS,
        num_minibatches=NUM_MINIBATCHES,
        hidden=HIDDEN,
        learning_rate=LEARNING_RATE,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        clip=CLIP,
        entropy=ENTROPY,
        max_grad_norm=MAX_GRAD_NORM,
    )
    init, iteration = loop(env_name, settings)
    iterations = max(1, steps // (num_envs * NUM_STEPS))
    run = partial(jax.lax.scan, iteration, xs=None, length=iterations)
    return compiled(jax.jit(init), run, iterations * num_envs * NUM_STEPS)


def rollout(policy: Any, env: Any, num_envs: int, steps: int) -> Workload:
    """jaxpg's rollouts and nothing else."""
    from jaxpg.rollout import continuing

    collector = continuing(num_envs=num_envs, num_steps=NUM_STEPS)
    iterations = max(1, steps // (num_envs * NUM_STEPS))

    def init(key: jax.Array) -> Any:
        params = policy.init(key)
        return params, collector.init(env, policy, params, key), key

    def iteration(state: Any, _: None) -> tuple[Any, Any]:
        params, runner, key = state
        key, collect_key = jax.random.split(key)
        runner, batch, tally = collector.collect(env, policy, params, runner, collect_key)
        return (params, runner, key), (jax.tree.map(jnp.sum, batch.steps), tally)

    run = partial(jax.lax.scan, iteration, xs=None, length=iterations)
    return compiled(jax.jit(init), run, iterations * num_envs * NUM_STEPS)


def collect(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """jaxpg's rollouts under the policy network."""
    from jaxpg import envs, networks

    env = envs.make(env_name)
    policy, _ = networks.mlp(env, hidden=HIDDEN, activation="tanh")
    return rollout(policy, env, num_envs, steps)


def collect_random(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """jaxpg's rollouts under random actions: what recording, successors and resets cost without a network."""
    from jaxpg import envs
    from jaxpg.distributions import Categorical, DiagonalGaussian
    from jaxpg.types import Discrete, Policy

    env = envs.make(env_name)
    space = env.action_space
    zeros = jnp.zeros(space.n if isinstance(space, Discrete) else space.shape)
    uniform = Categorical(zeros) if isinstance(space, Discrete) else DiagonalGaussian(zeros, zeros)
    policy = Policy(
        init=lambda key: (),
        start=lambda params, obs: (),
        act=lambda params, memory, obs: (uniform, memory),
        evaluate=lambda params, rollout: uniform,
    )
    return rollout(policy, env, num_envs, steps)


def bare(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The environment itself: a scan of gymnax's own step with its auto-reset, random actions."""
    import gymnax

    env, params = gymnax.make(env_name)
    sample = jax.vmap(env.action_space(params).sample)
    iterations = max(1, steps // (num_envs * NUM_STEPS))

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
        env_state, batch = jax.lax.scan(step, env_state, jax.random.split(scan_key, NUM_STEPS))
        return (env_state, key), jax.tree.map(jnp.sum, batch)

    run = partial(jax.lax.scan, iteration, xs=None, length=iterations)
    return compiled(jax.jit(init), run, iterations * num_envs * NUM_STEPS)


def network_widths(env_name: str) -> list[list[int]]:
    """The layer widths of actor and critic, from the flattened observation to the output."""
    import gymnax
    import numpy as np

    env, params = gymnax.make(env_name)
    inputs = int(np.prod(env.observation_space(params).shape))
    space = env.action_space(params)
    return [[inputs, *HIDDEN, getattr(space, "n", None) or space.shape[0]], [inputs, *HIDDEN, 1]]


def forward_flops(widths: list[int]) -> int:
    """Multiplications and additions of one row going through the layers' matrices."""
    return sum(2 * a * b for a, b in pairwise(widths))


def gradient_flops(widths: list[int]) -> int:
    """Forward, the gradient of every matrix, and of every layer's input but the first."""
    return 3 * forward_flops(widths) - 2 * widths[0] * widths[1]


def ppo_flops_per_step(env_name: str) -> int:
    """What the matrices of PPO need per environment step: act, one value, and the gradients of every epoch."""
    return sum(forward_flops(w) + NUM_EPOCHS * gradient_flops(w) for w in network_widths(env_name))


def matmul(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The gradient of the two networks without biases and activations: nothing but their matrix products.

    `num_envs` is the number of rows; about as many FLOPs are done as PPO's updates need for STEPS environment steps.
    """
    widths = network_widths(env_name)
    rounds = max(1, steps * NUM_EPOCHS // num_envs)

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


PEERS = (peers.rejax, peers.purejaxrl, peers.sb3, peers.sbx, peers.brax, peers.sb3_a2c)
OURS = (jaxpg, jaxpg_a2c, jaxpg_grpo, jaxpg_language, reference, collect, collect_random, bare, matmul, copy)
WORKLOADS = {workload.__name__: workload for workload in (*PEERS, *OURS)}


def timed(function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result of the function, and what it took: CPU seconds of this process, all threads, and wall seconds."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = jax.block_until_ready(function())
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return result, {"cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, "wall": wall}


def peak_memory() -> int:
    """Bytes held at most: by the accelerator where it says so, else by the process, with its code and its compiler."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


PACKAGES = ("jax", "jaxlib", "flax", "optax", "gymnax", "rejax", "stable_baselines3", "sbx-rl", "brax", "torch")


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter here."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def serve(make: Callable[[], Workload]) -> None:
    """Answer the lines of standard input until it ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # some packages have something to say when they are imported
    workload = make()
    program, _ = timed(workload.build)
    hello = {"work": workload.work, "bytes": program.bytes, "versions": versions()}
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        what = line.strip()
        if what == "memory":
            answer: dict[str, float] = {"peak": peak_memory()}
        elif what == "score":
            answer = {"return": program.score()}
        elif what == "compile":
            program, answer = timed(workload.build)
        else:
            _, answer = timed(program.run)
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Build the workload that the arguments name, on as many XLA devices as they say, and serve it."""
    name, env_name, *numbers = sys.argv[1:]
    num_envs, agents, devices, steps = map(int, numbers)
    if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_compilation_cache", False)
    serve(partial(WORKLOADS[name], env_name, num_envs, agents, devices, steps))


if __name__ == "__main__":
    main()
