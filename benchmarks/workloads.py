"""The programs that throughput.py and scaling.py time, each served by a process of its own.

    python workloads.py NAME ENVIRONMENT NUM_ENVS AGENTS DEVICES STEPS [FIELD=VALUE]

A process prints one line of JSON when its program is made, and then one per line that it reads: `run` times one call of
about STEPS environment steps (`run 8` eight in a row), `compile` times making the program anew, `memory` says how much
the process, or on an accelerator the device, has held at most, `score` what the policy is worth by now. While another
process is timed, this one waits for its next line and uses no core. FIELD=VALUE is a choice of jaxpg's `Machine`.
Whatever goes beyond jax is imported where it is used, so the same file runs in an environment without jaxpg.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import limits
import peers
from versions import versions
from work import A2C, EPISODES, PPO, Q, Workload, compiled, whole_iterations


def jaxpg(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The whole loop of jaxpg's PPO."""
    return whole_loop(ppo(num_envs), env_name, num_envs, agents, whole_iterations(steps, num_envs, agents))


def jaxpg_plain(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The same as a person writes it who imports jaxpg (docs/python.md): `init` and a scan over `step` in one `jit`."""
    from jaxpg import compiler_options, envs, networks, policy_gradient

    env, per_agent = envs.make(env_name), whole_iterations(steps, num_envs, agents)
    learner = policy_gradient.policy_gradient(
        env, *networks.mlp(env, hidden=PPO.hidden, activation="tanh"), ppo(num_envs)
    )

    def run(key: jax.Array) -> tuple[jax.Array, Any]:
        next_key, init_key, run_key = jax.random.split(key, 3)
        keys = jax.random.split(run_key, per_agent // (num_envs * PPO.num_steps))
        return next_key, jax.lax.scan(learner.step, learner.init(init_key), keys)

    return compiled(lambda key: key, run, per_agent, compiler_options=compiler_options())


def jaxpg_norm_1(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The same, with gradients clipped by a norm of 1."""
    algorithm = ppo(num_envs, max_grad_norm=1.0)
    return whole_loop(algorithm, env_name, num_envs, agents, whole_iterations(steps, num_envs, agents))


def jaxpg_unclipped(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The same, with gradients as they are."""
    algorithm = ppo(num_envs, max_grad_norm=None)
    return whole_loop(algorithm, env_name, num_envs, agents, whole_iterations(steps, num_envs, agents))


def jaxpg_cnn(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """jaxpg's PPO with convolutions that policy and critic share."""
    from jaxpg import networks

    per_agent = whole_iterations(steps, num_envs, agents)
    return whole_loop(ppo(num_envs), env_name, num_envs, agents, per_agent, networks.cnn)


def jaxpg_recurrent(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """jaxpg's PPO with a GRU that policy and critic share."""
    per_agent = whole_iterations(steps, num_envs, agents)
    return whole_loop(ppo(num_envs), env_name, num_envs, agents, per_agent, gru)


def gru(env: Any) -> Any:
    """A dense layer and a GRU as wide as PureJaxRL's, with two heads."""
    from jaxpg import networks

    return networks.recurrent(env, hidden=(128,), width=128, activation="relu")


def ppo(num_envs: int, max_grad_norm: float | None = PPO.max_grad_norm) -> Any:
    """jaxpg's PPO. The settings are those of the peers; all others stay at their defaults."""
    from jaxpg import ladder

    return ladder.ppo(
        num_envs=num_envs,
        num_steps=PPO.num_steps,
        epochs=PPO.epochs,
        num_minibatches=PPO.num_minibatches,
        learning_rate=PPO.learning_rate,
        gamma=PPO.gamma,
        gae_lambda=PPO.gae_lambda,
        clip=PPO.clip,
        value_clip=PPO.clip,
        entropy_coefficient=PPO.entropy,
        value_coefficient=PPO.value,
        max_grad_norm=max_grad_norm,
    )


def jaxpg_a2c(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The whole loop of jaxpg's A2C: one gradient step every five."""
    per_agent = whole_iterations(steps, num_envs, agents, A2C.num_steps)
    return whole_loop(a2c(num_envs), env_name, num_envs, agents, per_agent)


def a2c(num_envs: int) -> Any:
    """jaxpg's A2C; the settings are those of the peers."""
    from jaxpg import ladder

    return ladder.a2c(
        num_envs=num_envs,
        num_steps=A2C.num_steps,
        learning_rate=A2C.learning_rate,
        gamma=A2C.gamma,
        gae_lambda=A2C.gae_lambda,
        entropy_coefficient=A2C.entropy,
        value_coefficient=A2C.value,
        max_grad_norm=A2C.max_grad_norm,
    )


def jaxpg_grpo(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """One iteration of jaxpg's GRPO, groups of 8 whole episodes; steps are counted to the time limit of all of them."""
    from jaxpg import envs, ladder

    algorithm = ladder.grpo(num_envs=num_envs, group_size=8, epochs=PPO.epochs, num_minibatches=PPO.num_minibatches)
    one = whole_loop(algorithm, env_name, num_envs, agents, 1)
    return one._replace(work=agents * num_envs * envs.make(env_name).time_limit)


def jaxpg_dqn(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The whole loop of jaxpg's DQN: a gradient step after every step of all environments."""
    from jaxpg import envs, values

    algorithm = values.dqn(
        **value_settings(num_envs),
        buffer_size=Q.buffer_size,
        batch_size=Q.batch_size,
        learning_starts=Q.learning_starts,
        target_period=Q.target_every // num_envs,
        huber_threshold=None,
        repeats=Q.num_steps,
    )
    env = envs.make(env_name)
    learner = values.deep_q(env, values.mlp(env, hidden=Q.hidden), algorithm)
    return learner_loop(env, learner, num_envs, agents, whole_iterations(steps, num_envs, agents, Q.num_steps))


def jaxpg_pqn(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The whole loop of jaxpg's PQN, with layer normalisation."""
    from jaxpg import envs, values

    algorithm = values.pqn(
        **value_settings(num_envs),
        num_steps=Q.num_steps,
        gae_lambda=Q.gae_lambda,
        epochs=Q.epochs,
        num_minibatches=Q.num_minibatches,
    )
    env = envs.make(env_name)
    learner = values.deep_q(env, values.mlp(env, hidden=Q.hidden, layer_norm=True), algorithm)
    return learner_loop(env, learner, num_envs, agents, whole_iterations(steps, num_envs, agents, Q.num_steps))


def value_settings(num_envs: int) -> dict[str, Any]:
    """The settings of jaxpg's DQN and PQN alike."""
    return {
        "num_envs": num_envs,
        "learning_rate": Q.learning_rate,
        "gamma": Q.gamma,
        "max_grad_norm": Q.max_grad_norm,
        "epsilon_start": Q.epsilon_start,
        "epsilon_end": Q.epsilon_end,
        "epsilon_steps": Q.epsilon_steps,
    }


def whole_loop(
    algorithm: Any, env_name: str, num_envs: int, agents: int, per_agent: int, network: Callable[..., Any] | None = None
) -> Workload:
    """`learner_loop` of a policy-gradient algorithm, with an mlp or with this network."""
    from jaxpg import envs, networks, policy_gradient

    env = envs.make(env_name)
    policy, critic = network(env) if network else networks.mlp(env, hidden=PPO.hidden, activation="tanh")
    learner = policy_gradient.policy_gradient(env, policy, critic, algorithm)
    return learner_loop(env, learner, num_envs, agents, per_agent)


def learner_loop(env: Any, learner: Any, num_envs: int, agents: int, per_agent: int) -> Workload:
    """So many steps of each agent as the command line trains them between two looks of the host."""
    from jaxpg import parallel, rollout
    from jaxpg.training import advance

    mesh = parallel.make_mesh(agents, num_envs, jax.devices())
    seeds, start = partial(jax.random.split, num=agents), advance.compile_init(learner)
    specs = parallel.state_specs(advance.abstract_state(learner, agents), mesh)

    def run_chunk(state: advance.RunState, keys: jax.Array) -> Any:
        state, metrics = advance.advance_seeds(learner, keys, state, state.steps.min() + per_agent)
        return (state, keys), metrics

    def score(state: Any) -> jax.Array:
        def of_agent(learner_state: Any) -> jax.Array:
            actor = learner.actor(learner_state)
            return rollout.evaluation_metrics(env, actor, jax.random.key(0), episodes=EPISODES)["return"]

        return jax.vmap(of_agent)(state[0].learner)

    per_seed = parallel.PER_SEED
    spread = parallel.spread(run_chunk, mesh, in_specs=(specs, per_seed), out_specs=((specs, per_seed), per_seed))
    return compiled(
        init=lambda key: parallel.place((start(seeds(key)), seeds(key)), (specs, per_seed), mesh),
        run=lambda state: spread(*state),
        work=agents * per_agent,
        compiler_options=advance.compiler_options(),
        score=score,
    )


def jaxpg_language(size: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """GRPO on a transformer, a size of language.py in place of an environment; the work is the tokens written."""
    import language

    return _completions(language.endless(), "grpo", size, num_envs, steps)


def jaxpg_language_reference(size: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The same with a reference policy, and completions of any length."""
    import language

    return _completions(language.of_any_length(), "grpo, reference", size, num_envs, steps)


def jaxpg_language_rlhf(size: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """RLHF in its place: with a critic as large as the policy, too."""
    import language

    return _completions(language.of_any_length(), "rlhf", size, num_envs, steps)


def _completions(env: Any, algorithm: str, size: str, num_envs: int, steps: int) -> Workload:
    """Steps of an algorithm of language.py on a transformer; completions count as if all had full length."""
    import language

    from jaxpg.training import advance

    learner = language.learner_of(*language.transformer_of(env, size), env, num_envs, algorithm)
    iterations = max(1, steps // (num_envs * language.TOKENS))

    def iteration(state: Any, _: None) -> tuple[Any, Any]:
        key, step_key = jax.random.split(state[1])
        learner_state, metrics = learner.step(state[0], step_key)
        return (learner_state, key), metrics

    run = partial(jax.lax.scan, iteration, xs=None, length=iterations)
    tokens = iterations * num_envs * language.TOKENS
    return compiled(jax.jit(lambda key: (learner.init(key), key)), run, tokens, advance.compiler_options())


def language_writing(size: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """A transformer's completions and nothing else; the work is the tokens written."""
    import language

    from jaxpg.rollout.episodes import episodic

    env = language.endless()
    policy, _ = language.transformer_of(env, size)
    collector = episodic(num_envs=num_envs, group_size=language.GROUP)
    return rollout(policy, env, collector, num_envs * language.TOKENS, steps)


def language_learning(size: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """Updates by GRPO's loss on one batch and nothing else; the work is the tokens of prompts and completions."""
    import language

    from jaxpg.algorithm import make_batch, make_objective
    from jaxpg.types import Params

    env = language.endless()
    policy, _ = language.transformer_of(env, size)
    algorithm = language.ALGORITHMS["grpo"](num_envs=num_envs, **language.ONE_UPDATE)
    objective, optimizer = make_objective(policy, None, algorithm), algorithm.optimizer()
    iterations = max(1, steps // (num_envs * language.TOKENS))

    def init(key: jax.Array) -> Any:
        params = Params(policy.init(key), ())
        written = algorithm.collector.collect(env, policy, params.policy, (), key)[1]
        batch, _ = make_batch(policy, None, algorithm, params, (), jnp.zeros(()), written)
        return params, optimizer.init(params), batch, key

    def iteration(state: Any, _: None) -> tuple[Any, None]:
        params, opt_state, batch, key = state
        rate = jnp.float32(1e-4)
        params, opt_state, _ = algorithm.update(objective, optimizer, rate, params, opt_state, batch, key)
        return (params, opt_state, batch, key), None

    run = partial(jax.lax.scan, iteration, xs=None, length=iterations)
    return compiled(jax.jit(init), run, iterations * num_envs * (language.PROMPT + language.TOKENS))


def reference(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The whole loop of a plain PPO that is frozen in reference.py."""
    from reference import Settings, loop

    settings = Settings(
        num_envs=num_envs,
        num_steps=PPO.num_steps,
        epochs=PPO.epochs,
        num_minibatches=PPO.num_minibatches,
        hidden=PPO.hidden,
        learning_rate=PPO.learning_rate,
        gamma=PPO.gamma,
        gae_lambda=PPO.gae_lambda,
        clip=PPO.clip,
        entropy=PPO.entropy,
        max_grad_norm=PPO.max_grad_norm,
    )
    init, iteration = loop(env_name, settings)
    iterations = max(1, steps // (num_envs * PPO.num_steps))
    run = partial(jax.lax.scan, iteration, xs=None, length=iterations)
    return compiled(jax.jit(init), run, iterations * num_envs * PPO.num_steps)


def rollout(policy: Any, env: Any, collector: Any, steps_of_one: int, steps: int) -> Workload:
    """jaxpg's rollouts, of so many steps each, and nothing else."""
    iterations = max(1, steps // steps_of_one)

    def init(key: jax.Array) -> Any:
        params = policy.init(key)
        return params, collector.init(env, policy, params, key), key

    def iteration(state: Any, _: None) -> tuple[Any, Any]:
        params, runner, key = state
        key, collect_key = jax.random.split(key)
        runner, batch, stats = collector.collect(env, policy, params, runner, collect_key)
        return (params, runner, key), (jax.tree.map(jnp.sum, batch.steps), stats)

    run = partial(jax.lax.scan, iteration, xs=None, length=iterations)
    return compiled(jax.jit(init), run, iterations * steps_of_one)


def segments(policy: Any, env: Any, num_envs: int, steps: int) -> Workload:
    """jaxpg's rollouts as PPO collects them."""
    from jaxpg.rollout.segments import continuing

    collector = continuing(num_envs=num_envs, num_steps=PPO.num_steps)
    return rollout(policy, env, collector, num_envs * PPO.num_steps, steps)


def collect(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """jaxpg's rollouts under the policy network."""
    from jaxpg import envs, networks

    env = envs.make(env_name)
    policy, _ = networks.mlp(env, hidden=PPO.hidden, activation="tanh")
    return segments(policy, env, num_envs, steps)


def collect_random(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """jaxpg's rollouts under random actions: what recording, successors and resets cost without a network."""
    from jaxpg import envs
    from jaxpg.models.distributions import Categorical, DiagonalGaussian
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
    return segments(policy, env, num_envs, steps)


VALUE_PEERS = (peers.rejax_dqn, peers.sb3_dqn, peers.rejax_pqn)
PEERS = (
    *(
        peers.rejax,
        peers.rejax_limit_1,
        peers.rejax_unclipped,
        peers.purejaxrl,
        peers.purejaxrl_recurrent,
        peers.sb3,
        peers.sbx,
        peers.brax,
        peers.sb3_a2c,
    ),
    *VALUE_PEERS,
)
OURS = (
    jaxpg,
    jaxpg_plain,
    jaxpg_norm_1,
    jaxpg_unclipped,
    jaxpg_cnn,
    jaxpg_recurrent,
    jaxpg_a2c,
    jaxpg_grpo,
    jaxpg_dqn,
    jaxpg_pqn,
    reference,
    collect,
    collect_random,
)
LANGUAGE = (jaxpg_language, jaxpg_language_reference, jaxpg_language_rlhf, language_writing, language_learning)
LIMITS = (limits.bare, limits.matmul, limits.copy)
WORKLOADS = {workload.__name__: workload for workload in (*PEERS, *OURS, *LANGUAGE, *LIMITS)}


def timed(function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result of the function, and what it took: CPU seconds of this process, all threads, and wall seconds."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = jax.block_until_ready(function())
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return result, {"cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, "wall": wall}


def in_a_row(run: Callable[[], Any], calls: int = 1) -> Any:
    """So many calls, the next handed over before the last is done; the result of the last."""
    for _ in range(calls):
        result = run()
    return result


def peak_memory() -> int:
    """Bytes held at most: by the accelerator where it says so, else by the process, with its code and its compiler."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


PACKAGES = ("jax", "jaxlib", "flax", "optax", "gymnax", "rejax", "stable_baselines3", "sbx-rl", "brax", "torch")


def serve(make: Callable[[], Workload]) -> None:
    """Answer the lines of standard input until it ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # some packages have something to say when they are imported
    workload = make()
    program, made = timed(workload.build)
    hello = {"work": workload.work, "bytes": program.bytes, "made": made, "versions": versions(PACKAGES)}
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        what, *calls = line.split()
        if what == "memory":
            answer: dict[str, float] = {"peak": peak_memory()}
        elif what == "score":
            answer = {"return": program.score()}
        elif what == "compile":
            program, answer = timed(workload.build)
        else:
            _, answer = timed(partial(in_a_row, program.run, *map(int, calls)))
        print(json.dumps(answer), file=answers, flush=True)


def choose(choice: str) -> None:
    """Replace a field of jaxpg's `Machine`, "few_slots=0", for every platform: which it is may not be asked yet."""
    from jaxpg.parallel import machine

    field, _, value = choice.partition("=")
    for platform, choices in machine.MACHINES.items():
        machine.MACHINES[platform] = choices._replace(**{field: json.loads(value)})


def main() -> None:
    """Build the workload that the arguments name, on as many XLA devices as they say, and serve it."""
    name, env_name, *numbers = sys.argv[1:7]
    num_envs, agents, devices, steps = map(int, numbers)
    for choice in sys.argv[7:]:
        choose(choice)
    if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_compilation_cache", False)
    serve(partial(WORKLOADS[name], env_name, num_envs, agents, devices, steps))


if __name__ == "__main__":
    main()
