"""The work that all programs of throughput.py do alike, and the record of a program; needs nothing beyond jax."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

EPISODES = 50  # that a policy is scored by


class Settings(NamedTuple):
    """The settings that all programs of an algorithm share; of PPO alone: epochs, minibatches and clip."""

    hidden: tuple[int, ...] = (64, 64)
    num_steps: int = 128
    epochs: int = 4
    num_minibatches: int = 4
    learning_rate: float = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5
    max_grad_norm: float = 2.0


PPO = Settings()
A2C = PPO._replace(num_steps=5, learning_rate=7e-4, gae_lambda=1.0)


class QSettings(NamedTuple):
    """The settings that all programs of DQN and PQN share.

    epsilon_steps, target_every: in environment steps; with DQN, a gradient step follows every step of all environments.
    num_steps, epochs, num_minibatches, gae_lambda: of PQN. buffer_size, batch_size, learning_starts: of DQN.
    """

    hidden: tuple[int, ...] = (64, 64)
    learning_rate: float = 5e-4
    gamma: float = 0.99
    max_grad_norm: float = 10.0
    epsilon_start: float = 1.0
    epsilon_end: float = 0.05
    epsilon_steps: int = 50_000
    buffer_size: int = 50_000
    batch_size: int = 128
    learning_starts: int = 1_000
    target_every: int = 2_000
    num_steps: int = 64
    epochs: int = 4
    num_minibatches: int = 16
    gae_lambda: float = 0.65


Q = QSettings()


class Program(NamedTuple):
    """A program that is made.

    run(): does the work once.
    score(): per agent, the mean return of EPISODES fresh episodes under its policy as it is now, actions sampled.
    bytes: what it holds at once, arguments, results and what is in between, as XLA states it; 0 where XLA does not say.
    """

    run: Callable[[], Any]
    score: Callable[[], list[float]] | None = None
    bytes: int = 0


class Workload(NamedTuple):
    """A program to time.

    build(): makes it anew, from tracing to the initial state, which is that of the next seed.
    work: what one run does, in environment steps (of a language model: tokens, of `matmul`: FLOPs, of `copy`: bytes).
    init(key) -> state, run(state) -> state, output: the functions that `build` compiles, None where there are none.
    """

    build: Callable[[], Program]
    work: int
    init: Callable[[jax.Array], Any] | None = None
    run: Callable[[Any], tuple[Any, Any]] | None = None


def compiled(
    init: Callable[[jax.Array], Any],
    run: Callable[[Any], tuple[Any, Any]],
    work: int,
    compiler_options: Mapping[str, Any] | None = None,
    score: Callable[[Any], jax.Array] | None = None,
) -> Workload:
    """A workload that is one program, `run(state) -> state, output`, which gets its own state back again and again."""
    seeds = itertools.count()

    def build() -> Program:
        jax.clear_caches()
        state = init(jax.random.key(next(seeds)))
        program = jax.jit(run, donate_argnums=0).lower(state).compile(dict(compiler_options or {}))
        jax.block_until_ready(state)
        needed = program.memory_analysis()
        given_and_made = needed.argument_size_in_bytes + needed.output_size_in_bytes - needed.alias_size_in_bytes

        def once() -> Any:
            nonlocal state
            state, output = program(state)
            return state, output

        scored = jax.jit(score) if score else None  # compiled on first use
        score_all = scored and (lambda: jnp.atleast_1d(scored(state)).tolist())
        return Program(once, score_all, given_and_made + needed.temp_size_in_bytes)

    return Workload(build, work, init, run)


def update_bytes(learner: Any) -> dict[str, int]:
    """What one update of a learner holds at once, as XLA states it: its state, updated in place, and all beside it."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    program = jax.jit(learner.step, donate_argnums=0).lower(jax.eval_shape(learner.init, key), key).compile()
    analysis = program.memory_analysis()
    return {"state": analysis.argument_size_in_bytes, "temporary": analysis.temp_size_in_bytes}


def over_agents(agents: int, function: Callable) -> Callable:
    """The function itself for one agent, so that one agent pays for no batching; otherwise its vmap."""
    return function if agents == 1 else jax.vmap(function)


def whole_iterations(steps: int, num_envs: int, agents: int, num_steps: int = PPO.num_steps) -> int:
    """The steps that each agent takes: at least one iteration, else as many as make about `steps` over all agents."""
    return max(1, steps // (num_envs * num_steps * agents)) * num_envs * num_steps
