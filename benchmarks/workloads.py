"""The programs that throughput.py times, each served by a process of its own.

    python workloads.py NAME ENVIRONMENT NUM_ENVS AGENTS DEVICES STEPS

A process prints one line of JSON when its program stands compiled, and then one per line that it reads: `run` times one
call of about STEPS environment steps, `compile` times building the program anew. While another process is timed, this
one waits for its next line and uses no core. Whatever goes beyond jax is imported where it is used, so the same file
runs in an environment without jaxpg.
"""

from __future__ import annotations

import json
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial, reduce
from importlib import metadata
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

HIDDEN = (64, 64)
NUM_STEPS, NUM_EPOCHS, NUM_MINIBATCHES = 128, 4, 4
LEARNING_RATE, GAMMA, LAMBDA, CLIP, ENTROPY, MAX_GRAD_NORM = 3e-4, 0.99, 0.95, 0.2, 0.01, 0.5


class Workload(NamedTuple):
    """A program to time.

    init(key) -> state: compiled by itself.
    run(state) -> state, output: to be compiled.
    work: what one run does, in environment steps (of `matmul`: in FLOPs).
    compiler_options: what the program is compiled with by those who run it, XLA's defaults if nothing else.
    """

    init: Callable[[jax.Array], Any]
    run: Callable[[Any], tuple[Any, Any]]
    work: int
    compiler_options: Mapping[str, Any] = {}


def over_agents(agents: int, function: Callable) -> Callable:
    """The function itself for one agent, so that one agent pays for no batching; otherwise its vmap."""
    return function if agents == 1 else jax.vmap(function)


def jaxpg(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The whole loop of jaxpg's PPO, run as the command line runs it, between two looks of the host.

    The settings below are those of rejax; all others stay at their defaults.
    """
    from jaxpg import envs, ladder, networks, parallel, policy_gradient, train

    env = envs.make(env_name)
    policy, critic = networks.mlp(env, hidden=HIDDEN, activation="tanh")
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
        max_grad_norm=MAX_GRAD_NORM,
    )
    learner = policy_gradient.policy_gradient(env, policy, critic, algorithm)
    per_agent = max(1, steps // (num_envs * NUM_STEPS * agents)) * num_envs * NUM_STEPS
    mesh = parallel.make_mesh(agents, num_envs, jax.devices())
    seeds, start = partial(jax.random.split, num=agents), train.compiled_start(learner)
    state = jax.eval_shape(start, seeds(jax.random.key(0)))
    specs = parallel.state_specs(state, mesh)

    def advance(state: train.RunState, keys: jax.Array) -> Any:
        state, metrics = train.advance(learner, keys, state, state.steps.min() + per_agent)
        return (state, keys), metrics

    per_seed = parallel.PER_SEED
    spread = parallel.spread(advance, mesh, in_specs=(specs, per_seed), out_specs=((specs, per_seed), per_seed))
    return Workload(
        init=lambda key: parallel.place((start(seeds(key)), seeds(key)), (specs, per_seed), mesh),
        run=lambda state: spread(*state),
        work=agents * per_agent,
        compiler_options=train.compiler_options(),
    )


def rejax(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The whole loop of rejax's PPO, its evaluation switched off: it would run inside the loop."""
    import rejax

    per_agent = max(1, steps // (num_envs * NUM_STEPS * agents)) * num_envs * NUM_STEPS
    algorithm = rejax.PPO.create(
        env=env_name,
        num_envs=num_envs,
        num_steps=NUM_STEPS,
        num_epochs=NUM_EPOCHS,
        num_minibatches=NUM_MINIBATCHES,
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": HIDDEN},
        learning_rate=LEARNING_RATE,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        clip_eps=CLIP,
        ent_coef=ENTROPY,
        max_grad_norm=MAX_GRAD_NORM,
        total_timesteps=per_agent,
        eval_freq=per_agent,
        skip_initial_evaluation=True,
    ).replace(eval_callback=lambda algorithm, train_state, key: ())
    keys = partial(jax.random.split, num=agents) if agents > 1 else lambda key: key
    return Workload(
        init=jax.jit(lambda key: over_agents(agents, algorithm.init_state)(keys(key))),
        run=over_agents(agents, lambda state: algorithm.train(train_state=state)),
        work=agents * per_agent,
    )


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
    return Workload(jax.jit(init), run, iterations * num_envs * NUM_STEPS)


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
    return Workload(jax.jit(init), run, iterations * num_envs * NUM_STEPS)


def collect(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """jaxpg's rollouts under the policy network."""
    from jaxpg import envs, networks

    env = envs.make(env_name)
    policy, _ = networks.mlp(env, hidden=HIDDEN, activation="tanh")
    return rollout(policy, env, num_envs, steps)


def collect_random(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """jaxpg's rollouts under uniformly random actions: what recording, successors and resets cost without a network."""
    from jaxpg import envs
    from jaxpg.distributions import Categorical
    from jaxpg.types import Policy

    env = envs.make(env_name)
    uniform = Categorical(jnp.zeros(env.action_space.n))
    policy = Policy(
        init=lambda key: (),
        start=lambda params, obs: (),
        act=lambda params, memory, obs: (uniform, memory),
        evaluate=lambda params, rollout: uniform,
    )
    return rollout(policy, env, num_envs, steps)


def bare(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The environment itself: a scan of gymnax's own step with its auto-reset, uniformly random actions."""
    import gymnax

    env, params = gymnax.make(env_name)
    num_actions = env.action_space(params).n
    iterations = max(1, steps // (num_envs * NUM_STEPS))

    def init(key: jax.Array) -> Any:
        return jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key, num_envs), params)[1], key

    def step(state: Any, key: jax.Array) -> tuple[Any, Any]:
        action_key, step_key = jax.random.split(key)
        action = jax.random.randint(action_key, (num_envs,), 0, num_actions)
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
    return Workload(jax.jit(init), run, iterations * num_envs * NUM_STEPS)


def network_widths(env_name: str) -> list[list[int]]:
    """The layer widths of actor and critic, from the flattened observation to the output."""
    import gymnax
    import numpy as np

    env, params = gymnax.make(env_name)
    inputs = int(np.prod(env.observation_space(params).shape))
    return [[inputs, *HIDDEN, env.action_space(params).n], [inputs, *HIDDEN, 1]]


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
    return Workload(jax.jit(init), run, rounds * num_envs * sum(gradient_flops(w) for w in widths))


WORKLOADS = {w.__name__: w for w in (jaxpg, rejax, reference, collect, collect_random, bare, matmul)}


def timed(function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result of the function, and what it took: CPU seconds of this process, all threads, and wall seconds."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = jax.block_until_ready(function())
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return result, {"cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, "wall": wall}


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter here."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "optax", "gymnax", "rejax"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def serve(workload: Workload) -> None:
    """Answer the lines of standard input until it ends."""
    key = jax.random.key(0)

    def build() -> tuple[Any, Any]:
        jax.clear_caches()
        state = workload.init(key)
        return state, jax.jit(workload.run, donate_argnums=0).lower(state).compile(dict(workload.compiler_options))

    (state, run), _ = timed(build)
    print(json.dumps({"work": workload.work, "versions": versions()}), flush=True)
    for line in sys.stdin:
        if line.strip() == "compile":
            _, cost = timed(build)
        else:
            (state, _), cost = timed(partial(run, state))
        print(json.dumps(cost), flush=True)


def main() -> None:
    """Build the workload that the arguments name, on as many XLA devices as they say, and serve it."""
    name, env_name, *numbers = sys.argv[1:]
    num_envs, agents, devices, steps = map(int, numbers)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_compilation_cache", False)
    serve(WORKLOADS[name](env_name, num_envs, agents, devices, steps))


if __name__ == "__main__":
    main()
